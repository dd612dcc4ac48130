"""Hidden states: averages over random strings, and single channels."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from posbench.errors import UserError
from posbench.late import Tensor, inference_mode, torch
from posbench.model import families
from posbench.model.families import Site
from posbench.model.guard import finite, guarded
from posbench.model.hooks import before_each
from posbench.model.lm import LM

Array = NDArray[np.floating]
Alphabet = Literal["characters", "tokens"]

SAVE_EVERY = 200  # strings between two calls of ``keep``
GROUPS = 20  # groups of strings whose means are kept apart


@dataclass(frozen=True, kw_only=True)
class Strings:
    """Random strings of letters and digits, tokenised (``characters``), or of token ids (``tokens``)."""

    count: int
    length: int
    alphabet: Alphabet = "characters"
    seed: int = 0
    batch_size: int = 8

    def draw(self, lm: LM) -> list[list[int]]:
        """Token ids, ``count`` rows of exactly ``length``, without a beginning-of-sequence token.

        Raises:
            UserError: They are longer than the model reads.
        """
        if self.length > lm.context_window:
            allowed = f"at most {lm.context_window} (context window of {lm.name})"
            raise UserError("search.length", self.length, allowed, "shorten it")
        rng = random.Random(f"posbench random strings {self.seed}")
        tokenizer = lm.need_tokenizer()
        if self.alphabet == "tokens":
            special = set(tokenizer.all_special_ids)
            usable = [i for i in range(len(tokenizer)) if i not in special]
            return [rng.choices(usable, k=self.length) for _ in range(self.count)]
        rows = list[list[int]]()
        for _ in range(self.count):
            ids = list[int]()
            letters = self.length * 4
            while len(ids) < self.length:
                text = "".join(
                    rng.choices(string.ascii_letters + string.digits, k=letters)
                )
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                letters *= 2
            rows.append(ids[: self.length])
        return rows


@dataclass
class Sums:
    """Running sums of hidden states over so many strings, by site."""

    count: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)


@guarded
@inference_mode
def average_states(
    lm: LM,
    strings: Strings,
    *,
    start: Sums | None = None,
    keep: Callable[[Sums], None] = lambda sums: None,
    advance: Callable[[int], None] = lambda n: None,
) -> dict[str, Array]:
    """Hidden states averaged over random strings, float32.

    Goes on from the sums of ``start`` and calls ``keep`` with them every `SAVE_EVERY` strings; ``advance`` is
    told how many strings more are done.

    Returns:
        ``attention_input`` [L, P, D]: the tensor after each layer's first norm; ``residual`` [L + 1, P, D]:
        embedding, block outputs, the last after the final norm, as in transformers' ``hidden_states``.
    """
    rows = strings.draw(lm)
    state = start or Sums()
    captured: dict[Site, dict[int, Tensor]] = {"attention_input": {}, "residual": {}}

    def add(site: Site) -> Callable[[int, Tensor], None]:
        return lambda layer, hidden: captured[site].update(
            {layer: hidden.float().sum(0)}
        )

    saved_at = state.count
    with (
        reading(lm, "attention_input", add("attention_input")),
        reading(lm, "residual", add("residual")),
    ):
        for first in range(state.count, len(rows), strings.batch_size):
            batch = torch.tensor(
                rows[first : first + strings.batch_size], device=lm.device
            )
            out = lm.model.base_model(input_ids=batch, use_cache=False)
            captured["residual"][lm.layers] = (
                finite(out.last_hidden_state).float().sum(0)
            )
            for site, parts in captured.items():
                total = torch.stack([parts[i].to(lm.device) for i in sorted(parts)])
                state.sums[site] = (
                    state.sums[site] + total if site in state.sums else total
                )
            state.count += len(batch)
            advance(len(batch))
            if state.count - saved_at >= SAVE_EVERY:
                keep(state)
                saved_at = state.count
    return {
        name: (value / state.count).cpu().numpy() for name, value in state.sums.items()
    }


def reading(
    lm: LM, site: Site, see: Callable[[int, Tensor], None]
) -> AbstractContextManager[None]:
    """Show a function every layer and its input [B, T, D], in each forward inside the block."""
    modules = families.site_modules(lm.model, site)
    given = families.attention_input
    return before_each(
        modules,
        None,
        lambda layer: lambda _, args, kwargs: see(layer, given(args, kwargs)),
    )


@contextmanager
def channel_input(
    lm: LM, channels: Sequence[int], site: Site = "attention_input"
) -> Iterator[dict[int, Tensor]]:
    """Yield a dict that holds C channels of every layer's input in the latest forward, layer -> [B, T, C].

    Outer blocks have changed them already.
    """
    found: dict[int, Tensor] = {}
    with reading(
        lm,
        site,
        lambda layer, hidden: found.update({layer: hidden[..., list(channels)]}),
    ):
        yield found


def stacked(found: Mapping[int, Tensor], prompts: int) -> NDArray[np.float64]:
    """What :func:`channel_input` collected of so many prompts B, [B, L, T, C] in float64.

    A method may run a prompt as several rows next to each other: these are averaged.
    """
    every = np.stack(
        [found[layer].double().cpu().numpy() for layer in sorted(found)], axis=1
    )
    return every.reshape(prompts, -1, *every.shape[1:]).mean(1)


class Moments(NamedTuple):
    """Hidden states of one site over random strings; L layers, P positions, D channels, C chosen ones."""

    mean: Array  # averages, [L, P, D]
    shuffled: Array  # the same, positions behind the first ``skip`` shuffled within each string
    groups: Array  # averages of each group of strings at the chosen channels, [GROUPS, L, P, C]
    sizes: Array  # strings in each group, [GROUPS]
    variance: Array  # over strings and positions behind the first ``skip``, [L, C]
    strings: int


@guarded
@inference_mode
def moments(
    lm: LM,
    strings: Strings,
    site: Site,
    channels: Sequence[int],
    skip: int,
    advance: Callable[[int], None],
) -> Moments:
    """Run random strings and keep sums alone: memory is linear in the length of a string.

    At the site ``residual`` the states are block outputs, the last after the final norm. ``channels`` have
    their groups and variance kept; the first ``skip`` positions are not shuffled, nor in the variance.
    """
    rows = strings.draw(lm)
    rng = np.random.default_rng(strings.seed)
    n = len(rows)
    width = families.text_config(lm.model).hidden_size
    shape = (lm.layers, strings.length)
    mean, shuffled = torch.zeros(2, *shape, width, device=lm.device)
    squares = torch.zeros(*shape, len(channels), device=lm.device)
    groups = torch.zeros(GROUPS, *shape, len(channels), device=lm.device)
    order = group = torch.empty(0)

    def see(layer: int, hidden: Tensor) -> None:
        layer -= (
            site == "residual"
        )  # the output of a block is the input of the next one
        if layer < 0:
            return
        states = hidden.float().to(lm.device)
        part = states[..., channels]
        mean[layer] += states.sum(0)
        squares[layer] += (part**2).sum(0)
        groups[:, layer].index_add_(0, group, part)
        shuffled[layer] += states[
            torch.arange(len(states), device=lm.device)[:, None], order
        ].sum(0)

    with reading(lm, site, see):
        for start in range(0, n, strings.batch_size):
            ids = rows[start : start + strings.batch_size]
            places = np.tile(np.arange(strings.length), (len(ids), 1))
            places[:, skip:] = rng.permuted(places[:, skip:], axis=1)
            order = torch.tensor(places, device=lm.device)
            group = torch.arange(start, start + len(ids), device=lm.device) % GROUPS
            out = lm.model.base_model(
                input_ids=torch.tensor(ids, device=lm.device), use_cache=False
            )
            finite(out.last_hidden_state)
            if site == "residual":
                see(lm.layers, out.last_hidden_state)
            advance(len(ids))
    sizes = np.bincount(np.arange(n) % GROUPS, minlength=GROUPS).astype(np.float64)
    kept, squared = (
        part.cpu().numpy().astype(np.float64) for part in (groups, squares)
    )
    return Moments(
        mean=(mean / n).cpu().numpy(),
        shuffled=(shuffled / n).cpu().numpy(),
        groups=kept / sizes[:, None, None, None],
        sizes=sizes,
        variance=(squared[:, skip:] / n).mean(1)
        - (kept.sum(0)[:, skip:] / n).mean(1) ** 2,
        strings=n,
    )
