"""Hidden states: averages over random strings, and single channels."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from posbench.errors import UserError
from posbench.model import families
from posbench.model.families import Site
from posbench.model.hooks import before_each
from posbench.model.lm import LM

Array = NDArray[np.floating]
Alphabet = Literal["characters", "tokens"]

SAVE_EVERY = 200
"""Strings between two calls of ``keep``."""


@dataclass(frozen=True, kw_only=True)
class Strings:
    """Random strings.

    Attributes:
        count: How many.
        length: Tokens of each.
        alphabet: ``characters`` draws letters and digits and tokenises them; ``tokens`` draws token ids.
        seed: Seed of the draws.
        batch_size: Strings per forward.
    """

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
        rng, tokenizer = random.Random(f"posbench random strings {self.seed}"), lm.need_tokenizer()
        if self.alphabet == "tokens":
            special = set(tokenizer.all_special_ids)
            usable = [i for i in range(len(tokenizer)) if i not in special]
            return [rng.choices(usable, k=self.length) for _ in range(self.count)]
        rows: list[list[int]] = []
        while len(rows) < self.count:
            ids, letters = list[int](), self.length * 4
            while len(ids) < self.length:
                text = "".join(rng.choices(string.ascii_letters + string.digits, k=letters))
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                letters *= 2
            rows.append(ids[: self.length])
        return rows


@dataclass
class Sums:
    """Running sums of hidden states over so many strings, by site."""

    count: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)


@torch.inference_mode()
def average_states(
    lm: LM,
    strings: Strings,
    *,
    start: Sums | None = None,
    keep: Callable[[Sums], None] = lambda sums: None,
    advance: Callable[[int], None] = lambda n: None,
) -> dict[str, Array]:
    """Hidden states averaged over random strings.

    Args:
        lm: The model.
        strings: The strings.
        start: Sums to go on from.
        keep: Called with the sums from time to time, to save them.
        advance: Told how many strings are done.

    Returns:
        ``attention_input`` [L, P, D]: the tensor after each layer's first norm; ``residual`` [L + 1, P, D]:
        embedding, block outputs, the last after the final norm, as in transformers' ``hidden_states``.
        float32.
    """
    rows, state = strings.draw(lm), start or Sums()
    captured: dict[Site, dict[int, Tensor]] = {"attention_input": {}, "residual": {}}

    def capture(site: Site) -> Callable[[int], Callable[..., None]]:
        def of_layer(layer: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                captured[site][layer] = families.attention_input(args, kwargs).float().sum(0)

            return hook

        return of_layer

    advance(state.count)
    saved_at = state.count
    with ExitStack() as stack:
        for site in captured:
            stack.enter_context(before_each(families.site_modules(lm.model, site), None, capture(site)))
        for first in range(state.count, len(rows), strings.batch_size):
            batch = torch.tensor(rows[first : first + strings.batch_size], device=lm.device)
            out = lm.model.base_model(input_ids=batch, use_cache=False)
            captured["residual"][lm.layers] = out.last_hidden_state.float().sum(0)
            for site, parts in captured.items():
                total = torch.stack([parts[i].to(lm.device) for i in sorted(parts)])
                state.sums[site] = state.sums[site] + total if site in state.sums else total
            state.count += len(batch)
            advance(len(batch))
            if state.count - saved_at >= SAVE_EVERY:
                keep(state)
                saved_at = state.count
    return {name: (value / state.count).cpu().numpy() for name, value in state.sums.items()}


@contextmanager
def channel_input(
    lm: LM, channels: Sequence[int], site: Site = "attention_input"
) -> Iterator[dict[int, Tensor]]:
    """Collect some channels of every layer's input in each forward inside the block, as the outer blocks
    leave them.

    Yields:
        Dict layer -> [B, T, C] of the latest forward, for C channels.
    """
    found: dict[int, Tensor] = {}

    def read(layer: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[layer] = families.attention_input(args, kwargs)[..., list(channels)]

        return hook

    with before_each(families.site_modules(lm.model, site), None, read):
        yield found


def stacked(found: Mapping[int, Tensor], prompts: int) -> NDArray[np.float64]:
    """What :func:`channel_input` collected of so many prompts B, [B, L, T, C] in float64.

    A method may run a prompt as several rows next to each other: these are averaged.
    """
    every = np.stack([found[layer].double().cpu().numpy() for layer in sorted(found)], axis=1)
    return every.reshape(prompts, -1, *every.shape[1:]).mean(1)
