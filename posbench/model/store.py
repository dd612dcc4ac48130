"""Prefills that prompts share: what they have in common from the beginning is computed once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from posbench.late import PreTrainedModel, Tensor, inference_mode, torch, transformers
from posbench.model import families
from posbench.model.guard import finite, guarded
from posbench.model.hooks import SPARE, held
from posbench.model.lm import LM
from posbench.model.prefix import READ, Prefix, recording

LEAST = 32
"""Tokens in common that are worth a forward of their own: below, they are computed again."""
ALIKE = 0.9
"""Stretches of a batch have at least this share of the longest one's tokens: shorter ones are filled up with
tokens before them, which are computed again."""

Rows = Sequence[Sequence[int]]
Slots = NDArray[np.int64]

# The plan: which tokens of which prompt are computed


class Stretch(NamedTuple):
    """The tokens of a prompt, from ``start`` to its end, that no prompt before it has."""

    row: int
    start: int
    level: int  # one more than that of any stretch that it follows on


@dataclass(frozen=True)
class Layout:
    """Prompts as places in a common store of tokens."""

    slots: list[Slots]  # of each prompt, the place of each token
    stretches: list[Stretch]
    size: int  # places in all: the tokens to compute


def in_order(rows: Rows) -> list[int]:
    """Numbers of prompts so that those which begin alike stand together."""
    return sorted(range(len(rows)), key=lambda i: (rows[i], i))


def layout(rows: Rows) -> Layout:
    """What of each prompt to compute, so that each beginning which prompts have in common is there once."""
    slots = [np.zeros(0, np.int64)] * len(rows)
    stretches = list[Stretch]()
    size = 0
    # Of the prompt before: its tokens, the starts and levels of its stretches, its number.
    before = np.zeros(0, np.int64)
    own = list[tuple[int, int]]()
    last = 0
    for row in in_order(rows):
        ids = np.asarray(rows[row], np.int64)
        start, own = _common(before, ids, own)
        if start < len(ids):
            level = max((level for _, level in own), default=-1) + 1
            own = [*own, (start, level)]
            stretches.append(Stretch(row, start, level))
        new = np.arange(size, size + len(ids) - start)
        slots[row] = np.concatenate([slots[last][:start], new])
        size = size + len(new)
        before = ids
        last = row
    return Layout(slots, stretches, size)


def _alike(before: Slots, ids: Slots) -> int:
    """How many tokens two prompts have in common from their beginning."""
    size = min(len(before), len(ids))
    unlike = np.flatnonzero(before[:size] != ids[:size])
    return int(unlike[0]) if len(unlike) else size


def _common(
    before: Slots, ids: Slots, own: list[tuple[int, int]]
) -> tuple[int, list[tuple[int, int]]]:
    """How many tokens to take from the prompt before, and the stretches (start, level) that these are of."""
    start = _alike(before, ids)
    own = [each for each in own if each[0] < start]
    # A few tokens of one more stretch would only make this one wait for it.
    while own and start - own[-1][0] < LEAST and not (start == len(ids) == len(before)):
        start = own.pop()[0]
    return start, own


def grouped(rows: Rows, capacity: int) -> list[list[int]]:
    """Numbers of the prompts of each group whose tokens, those in common counted once, number at most
    ``capacity``; a longer prompt is a group of its own."""
    groups = list[list[int]]()
    size = 0
    before = np.zeros(0, np.int64)
    for row in in_order(rows):
        ids = np.asarray(rows[row], np.int64)
        # At most LEAST of those in common are computed again, see :func:`_common`.
        new = len(ids) - max(_alike(before, ids) - LEAST, 0)
        if not groups or size + new > capacity:
            groups.append([])
            size = 0
            new = len(ids)
        groups[-1].append(row)
        size = size + new
        before = ids
    return groups


# The work


def obstacle(model: PreTrainedModel) -> str:
    """Why prompts cannot share a prefill in a model; empty where they can."""
    config = families.text_config(model)
    told = getattr(config, "rope_parameters", None) or {}
    every = [told, *(each for each in told.values() if isinstance(each, dict))]
    kinds = {str(each.get("rope_type")) for each in every} & {"dynamic", "longrope"}
    if kinds:
        return f"its rotary embedding ({', '.join(sorted(kinds))}) changes with the length of the prompt"
    return ""


@guarded
@inference_mode
def token_bytes(lm: LM) -> int:
    """Bytes that a token takes in a :class:`Store`: keys, values, rotations, and of the attention input a
    channel or, where keys are not linear in it, all of them."""
    here = Prefix(transformers.DynamicCache())
    ids = torch.zeros(1, 2, dtype=torch.long, device=lm.device)
    with recording(lm.model, here, [0], range(lm.layers)):
        lm.model(input_ids=ids, past_key_values=here.cache, use_cache=True)
    kept = [
        each[0, :, 0]
        for layer in here.cache.layers
        for each in (layer.keys, layer.values)
    ]
    kept += [each[0, 0] for each in here.inputs.values()]
    rotations = {id(each[0]): each for each in here.rotary.values() if each}
    kept += [each[0, 0] for both in rotations.values() for each in both]
    return sum(each.nbytes for each in kept)


@dataclass
class Store:
    """Keys and values of prompts that share their beginnings, each token once.

    ``rows`` are the prompts without the tokens that a method runs itself; :meth:`fill` computes them.
    """

    rows: Rows
    channels: Sequence[int] = ()  # to record, see :func:`recording`
    layers: Collection[int] = ()
    layout: Layout = field(init=False)
    # by what it is and by layer, the tensors of all places: [N, G, d], [N, C] or [N, d]
    _kept: dict[tuple[str, int], Tensor] = field(default_factory=dict, repr=False)
    _rotated: dict[int, int | None] = field(
        default_factory=dict
    )  # layer -> one that is rotated alike

    def __post_init__(self) -> None:
        self.layout = layout(self.rows)

    def fill(self, lm: LM, size: int, tokens: int | None) -> None:
        """Compute every stretch, in batches of at most ``size`` and so many tokens, those before them
        counted. The model is as the methods that continue want the prompts read."""
        self._kept.clear()
        for batch in batches(self.rows, self.layout.stretches, size, tokens):
            _compute(lm, self, batch)

    def prefix(self, lm: LM, rows: Sequence[int]) -> Prefix:
        """The prefill of some prompts, by number, padded on the left."""
        return self._gathered(lm, [self.layout.slots[row] for row in rows])

    def _gathered(self, lm: LM, slots: Sequence[Slots], spare: int = SPARE) -> Prefix:
        width = max(map(len, slots))
        # Padding may hold any numbers: the mask shuts it.
        index = torch.from_numpy(
            np.stack([np.pad(each, (width - len(each), 0)) for each in slots])
        )

        def read(what: str, layer: int) -> Tensor:
            kept = self._kept[what, layer]
            return kept[index.to(kept.device)]

        def states(layer: int) -> tuple[Tensor, Tensor]:
            return read("keys", layer).transpose(1, 2), read("values", layer).transpose(
                1, 2
            )

        cache = transformers.DynamicCache()
        if width:
            cache = held((states(layer) for layer in range(lm.layers)), spare)
        prefix = Prefix(cache=cache, channels=tuple(self.channels))
        setattr(cache, READ, prefix)
        if not width:
            return prefix

        same = {
            layer: (read("cos", layer), read("sin", layer))
            for what, layer in self._kept
            if what == "cos"
        }
        for layer in self.layers:
            prefix.inputs[layer] = read("inputs", layer)
            like = self._rotated[layer]
            prefix.rotary[layer] = None if like is None else same[like]
        return prefix

    def _keep(self, what: str, layer: int, places: Tensor, values: Tensor) -> None:
        """Put values [N, ...] of some tokens at their places."""
        kept = self._kept.get((what, layer))
        if kept is None:
            kept = self._kept[what, layer] = values.new_zeros(
                self.layout.size, *values.shape[1:]
            )
        kept[places.to(kept.device)] = values


def batches(
    rows: Rows, stretches: Sequence[Stretch], size: int, tokens: int | None
) -> Iterator[list[Stretch]]:
    """Stretches that are computed together, those of a level, and of about one length, longest first."""
    own = {each.row: len(rows[each.row]) - each.start for each in stretches}
    batch = list[Stretch]()
    longest = 0
    for each in sorted(
        stretches, key=lambda each: (each.level, -own[each.row], each.row)
    ):
        longest = max(longest, len(rows[each.row]))
        if batch:
            first = own[batch[0].row]
            alike = own[each.row] >= ALIKE * first or first - own[each.row] < LEAST
            full = len(batch) == size or (
                tokens is not None and (len(batch) + 1) * longest > tokens
            )
            if full or not alike or each.level != batch[0].level:
                yield batch
                batch = []
                longest = len(rows[each.row])
        batch.append(each)
    if batch:
        yield batch


def fed(rows: Rows, batch: Sequence[Stretch]) -> list[tuple[int, int]]:
    """First token and end of what each stretch of a batch feeds."""
    width = max(len(rows[each.row]) - each.start for each in batch)
    # Every row feeds as many tokens, if need be some before its own: then no row has a gap, which sliding
    # windows and ALiBi would count.
    return [
        (max(len(rows[each.row]) - width, 0), len(rows[each.row])) for each in batch
    ]


@guarded
@inference_mode
def _compute(lm: LM, store: Store, batch: Sequence[Stretch]) -> None:
    """Run stretches of one level and keep what they give."""
    starts, ends = zip(*fed(store.rows, batch), strict=True)
    width = max(end - each.start for each, end in zip(batch, ends, strict=True))
    slots = [
        store.layout.slots[each.row][:start]
        for each, start in zip(batch, starts, strict=True)
    ]
    given = lm.pad(
        [
            store.rows[each.row][start:]
            for each, start in zip(batch, starts, strict=True)
        ]
    )
    before = store._gathered(lm, slots, width)
    cache = before.cache
    known = torch.tensor([len(each) for each in slots], device=lm.device)[:, None]
    if before.tokens:
        shut = torch.arange(before.tokens, device=lm.device) < before.tokens - known
        given["attention_mask"] = torch.cat(
            [(~shut).long(), given["attention_mask"]], dim=1
        )
    given["position_ids"] = given["position_ids"] + known
    past = before.tokens
    here = Prefix(cache)
    with recording(lm.model, here, store.channels, store.layers):
        finite(
            lm.model(
                **given, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits
        )
    own = [end - each.start for each, end in zip(batch, ends, strict=True)]
    line = torch.from_numpy(np.repeat(np.arange(len(batch)), own))
    column = torch.from_numpy(
        np.concatenate([np.arange(width - count, width) for count in own])
    )
    own_slots = [store.layout.slots[each.row][each.start :] for each in batch]
    places = torch.from_numpy(np.concatenate(own_slots))

    def keep(what: str, layer: int, values: Tensor, offset: int = 0) -> None:
        # Rotations may be the same for all rows.
        rows = (
            line.to(values.device)
            if values.shape[0] > 1
            else torch.zeros_like(line, device=values.device)
        )
        store._keep(
            what, layer, places, values[rows, offset + column.to(values.device)]
        )

    for layer in range(lm.layers):
        there = cache.layers[layer]
        keep("keys", layer, there.keys.transpose(1, 2), past)
        keep("values", layer, there.values.transpose(1, 2), past)
    rotations: dict[int, int] = {}
    for layer in store.layers:
        keep("inputs", layer, here.inputs[layer])
        rotary = here.rotary[layer]
        if rotary is None:
            store._rotated[layer] = None
            continue
        # Most models rotate all layers by the same tensors.
        like = store._rotated[layer] = rotations.setdefault(id(rotary[0]), layer)
        if like == layer:
            keep("cos", layer, rotary[0])
            keep("sin", layer, rotary[1])
