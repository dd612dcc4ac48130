"""Hidden states: averages over random strings, and single channels."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from posbench.errors import UserError
from posbench.late import Tensor, inference_mode, torch
from posbench.model import families
from posbench.model.families import Site
from posbench.model.guard import forward, guarded
from posbench.model.hooks import pre_hooks
from posbench.model.lm import LM
from posbench.schema import Alphabet

Array = NDArray[np.floating]

SAVE_EVERY = 200  # strings between two calls of ``keep``
NUM_GROUPS = 20  # groups of strings, each with means of its own


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
            raise UserError(
                "search.length",
                self.length,
                allowed,
                f"set search.length={lm.context_window}",
            )
        rng = random.Random(f"posbench random strings {self.seed}")
        tokenizer = lm.need_tokenizer()
        if self.alphabet == "tokens":
            special_ids = set(tokenizer.all_special_ids)
            usable_ids = [i for i in range(len(tokenizer)) if i not in special_ids]
            return [rng.choices(usable_ids, k=self.length) for _ in range(self.count)]
        characters = string.ascii_letters + string.digits
        rows = []
        for _ in range(self.count):
            ids: list[int] = []
            num_characters = self.length * 4
            while len(ids) < self.length:
                text = "".join(rng.choices(characters, k=num_characters))
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                num_characters *= 2
            rows.append(ids[: self.length])
        return rows


@dataclass
class Sums:
    """Running sums of hidden states by site, over ``count`` strings."""

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
    """Average hidden states over random strings.

    Args:
        lm: The model, with L layers of width D.
        strings: The strings, of P tokens each.
        start: Sums of an earlier call to continue from.
        keep: Called with the sums every `SAVE_EVERY` strings.
        advance: Called with the number of strings that were just run.

    Methods that are applied outside have changed the states already.

    Returns:
        In float32, ``attention_input`` [L, P, D]: the tensor after each layer's first norm; ``residual``
        [L + 1, P, D]: embedding, block outputs, the last after the final norm, as in transformers'
        ``hidden_states``.
    """
    rows = strings.draw(lm)
    state = start or Sums()
    # Sums over the strings of a batch, by site and layer.
    attention_input: dict[int, Tensor] = {}
    residual: dict[int, Tensor] = {}

    rows_per_string = _rows_per_prompt(lm, rows[0])

    def add_to(by_layer: dict[int, Tensor]) -> Callable[[int, Tensor], None]:
        def read(layer: int, hidden: Tensor) -> None:
            total = hidden.float().sum(0) / rows_per_string
            by_layer[layer] = by_layer[layer] + total if layer in by_layer else total

        return read

    saved_count = state.count
    with (
        reading(lm, "attention_input", add_to(attention_input)),
        reading(lm, "residual", add_to(residual)),
        reading_last_states(lm, add_to(residual)),
    ):
        for first in range(state.count, len(rows), strings.batch_size):
            batch = torch.tensor(
                rows[first : first + strings.batch_size], device=lm.device
            )
            attention_input.clear()
            residual.clear()
            forward(lm, input_ids=batch)
            _add_batch(state, "attention_input", attention_input, lm.device)
            _add_batch(state, "residual", residual, lm.device)
            state.count += len(batch)
            advance(len(batch))
            if state.count - saved_count >= SAVE_EVERY:
                keep(state)
                saved_count = state.count
    return {
        site: (total / state.count).cpu().numpy() for site, total in state.sums.items()
    }


def _add_batch(
    state: Sums, site: Site, by_layer: Mapping[int, Tensor], device: torch.device
) -> None:
    """Add a batch's sums of each layer, [P, D], to the running sums of a site, [L, P, D]."""
    total = torch.stack([by_layer[layer].to(device) for layer in sorted(by_layer)])
    if site in state.sums:
        total = state.sums[site] + total
    state.sums[site] = total


def _rows_per_prompt(lm: LM, ids: Sequence[int]) -> int:
    """Return the rows per prompt: several for a method that runs it in several views, next to or after each other."""
    num_rows = 0

    def count(layer: int, hidden: Tensor) -> None:
        nonlocal num_rows
        if layer == 0:
            num_rows += len(hidden)

    with reading(lm, "attention_input", count):
        forward(lm, input_ids=torch.tensor([list(ids)], device=lm.device))
    return num_rows


@contextmanager
def reading_last_states(lm: LM, read: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call a function with the number of layers and the states after the final norm [B, T, D], in each forward."""

    def hook(_: Any, args: Any, output: Any) -> None:
        read(lm.layers, output[0])

    handle = lm.model.base_model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def reading(
    lm: LM, site: Site, read: Callable[[int, Tensor], None]
) -> AbstractContextManager[None]:
    """Call a function with every layer and its input [B, T, D], in each forward inside the block."""

    def before(layer: int) -> Callable[..., None]:
        return lambda _, args, kwargs: read(
            layer, families.attention_input(args, kwargs)
        )

    return pre_hooks(families.site_modules(lm.model, site), None, before)


@contextmanager
def channel_input(
    lm: LM, channels: Sequence[int], site: Site = "attention_input"
) -> Iterator[dict[int, Tensor]]:
    """Yield a dict that holds C channels of every layer's input in the latest forward, layer -> [B, T, C].

    Methods that are applied outside have changed them already.
    """
    states: dict[int, Tensor] = {}
    indices = list(channels)

    def read(layer: int, hidden: Tensor) -> None:
        states[layer] = hidden[..., indices]

    with reading(lm, site, read):
        yield states


def stacked(states: Mapping[int, Tensor], prompts: int) -> NDArray[np.float64]:
    """Stack the activations collected by :func:`channel_input`.

    Args:
        states: C channels of each layer, [rows, T, C]. A method may run a prompt as several rows next to each
            other: these are averaged.
        prompts: Number B of prompts.

    Returns:
        [B, L, T, C].
    """
    layers = [states[layer].double().cpu().numpy() for layer in sorted(states)]
    rows = np.stack(layers, axis=1)
    return rows.reshape(prompts, -1, *rows.shape[1:]).mean(1)


class Moments(NamedTuple):
    """Hidden states of one site over random strings; L layers, P positions, D channels, C chosen ones."""

    mean: Array  # averages, [L, P, D]
    shuffled: Array  # the same, positions behind the first ``skip`` shuffled within each string
    groups: Array  # averages of each group of strings at the chosen channels, [NUM_GROUPS, L, P, C]
    sizes: Array  # strings in each group, [NUM_GROUPS]
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

    Args:
        lm: The model.
        strings: The strings.
        site: Where to read the states; at ``residual`` they are block outputs, the last after the final norm.
        channels: The channels whose averages by group and variance are computed.
        skip: First positions that are not shuffled, and not part of the variance.
        advance: Called with the number of strings that were just run.
    """
    rows = strings.draw(lm)
    rng = np.random.default_rng(strings.seed)
    count = len(rows)
    width = families.text_config(lm.model).hidden_size
    shape = (lm.layers, strings.length)
    sums = torch.zeros(*shape, width, device=lm.device)
    shuffled_sums = torch.zeros(*shape, width, device=lm.device)
    squares = torch.zeros(*shape, len(channels), device=lm.device)
    group_sums = torch.zeros(NUM_GROUPS, *shape, len(channels), device=lm.device)
    rows_per_string = _rows_per_prompt(lm, rows[0])
    # Of the current batch: the shuffled positions and the group of each string, and the chosen channels by layer.
    order = torch.empty(0)
    group = torch.empty(0)
    chosen_states: dict[int, Any] = {}

    def read(layer: int, hidden: Tensor) -> None:
        if site == "residual":
            layer -= 1  # the output of a block is the input of the next one
        if layer < 0:
            return
        states = hidden.float().to(lm.device)
        # Rows of one string are adjacent: their mean counts.
        by_string = states.reshape(len(order), -1, *states.shape[1:])
        states = by_string.sum(1) / rows_per_string
        chosen = states[..., channels]
        chosen_states[layer] = chosen_states.get(layer, 0) + chosen
        sums[layer] += states.sum(0)
        group_sums[:, layer].index_add_(0, group, chosen)
        string_indices = torch.arange(len(states), device=lm.device)[:, None]
        shuffled_sums[layer] += states[string_indices, order].sum(0)

    with ExitStack() as stack:
        stack.enter_context(reading(lm, site, read))
        if site == "residual":
            stack.enter_context(reading_last_states(lm, read))
        for start in range(0, count, strings.batch_size):
            ids = rows[start : start + strings.batch_size]
            positions = np.tile(np.arange(strings.length), (len(ids), 1))
            positions[:, skip:] = rng.permuted(positions[:, skip:], axis=1)
            order = torch.tensor(positions, device=lm.device)
            group = torch.arange(start, start + len(ids), device=lm.device) % NUM_GROUPS
            forward(lm, input_ids=torch.tensor(ids, device=lm.device))
            for layer, chosen in chosen_states.items():
                squares[layer] += (chosen**2).sum(0)
            chosen_states.clear()
            advance(len(ids))
    sizes = np.bincount(np.arange(count) % NUM_GROUPS, minlength=NUM_GROUPS).astype(
        np.float64
    )
    group_totals = group_sums.cpu().numpy().astype(np.float64)
    mean_squares = squares.cpu().numpy().astype(np.float64)[:, skip:] / count
    chosen_means = group_totals.sum(0)[:, skip:] / count
    return Moments(
        mean=(sums / count).cpu().numpy(),
        shuffled=(shuffled_sums / count).cpu().numpy(),
        groups=group_totals / sizes[:, None, None, None],
        sizes=sizes,
        variance=mean_squares.mean(1) - chosen_means.mean(1) ** 2,
        strings=count,
    )
