"""Prefills that prompts share: a beginning that several prompts have is computed once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from posbench.late import PreTrainedModel, Tensor, inference_mode, torch, transformers
from posbench.model import families
from posbench.model.guard import check_finite, guarded
from posbench.model.hooks import SPARE_TOKENS, appendable_cache, with_cache
from posbench.model.lm import LM
from posbench.model.prefix import PREFIX_ATTRIBUTE, Prefix, recording_inputs

MIN_SEGMENT_TOKENS = 32
"""Shortest part of a segment behind which a prompt may branch off; shorter ones are computed again."""
MIN_LENGTH_RATIO = 0.9
"""Smallest share of the longest segment's tokens in a batch. Shorter segments are extended by the tokens before
them, which are computed again."""

Prompts = Sequence[Sequence[int]]
"""Token ids of each prompt."""
IntArray = NDArray[np.int64]
NO_TOKENS = np.zeros(0, np.int64)

# The plan: which tokens of which prompt are computed


class Segment(NamedTuple):
    """The tokens of a prompt, from ``start`` to its end, that no prompt before it has."""

    prompt: int  # index of the prompt
    start: int
    level: int  # how many segments the tokens before ``start`` belong to


@dataclass(frozen=True)
class PrefixTrie:
    """Prompts laid out in one store of tokens, in which each shared prefix occurs once.

    Attributes:
        token_slots: For each prompt, the slot of each of its tokens, shape (prompt_length,).
        segments: The segments, in an order in which they can be computed.
        size: Number of slots, which is the number of tokens to compute.
    """

    token_slots: list[IntArray]
    segments: list[Segment]
    size: int


def lexicographic_order(prompts: Prompts) -> list[int]:
    """Indices of the prompts, sorted by their tokens: prompts with a common prefix become neighbours."""
    return sorted(range(len(prompts)), key=lambda index: (prompts[index], index))


def build_prefix_trie(prompts: Prompts) -> PrefixTrie:
    """Lay out prompts in a token store so that a shared prefix is computed once.

    Prompts are visited in lexicographic order. Each shares its longest common prefix with the one before it,
    except for a short remainder, see :data:`MIN_SEGMENT_TOKENS`.

    Args:
        prompts: Token ids of each prompt, without the tokens that a method runs itself.

    Returns:
        Slots of each prompt's tokens, shape (length,) each, the segments in an order in which they can be computed,
        and the number of slots.
    """
    token_slots = [NO_TOKENS] * len(prompts)
    segments: list[Segment] = []
    num_slots = 0
    previous_ids = NO_TOKENS
    previous_slots = NO_TOKENS
    # The segments that the previous prompt consists of, from its first token to its last.
    path: list[Segment] = []
    for index in lexicographic_order(prompts):
        ids = np.asarray(prompts[index], np.int64)
        start = _branch_point(previous_ids, ids, path)
        path = [segment for segment in path if segment.start < start]
        if start < len(ids):
            segment = Segment(index, start, level=len(path))
            path.append(segment)
            segments.append(segment)
        new_slots = np.arange(num_slots, num_slots + len(ids) - start)
        num_slots += len(new_slots)
        previous_slots = np.concatenate([previous_slots[:start], new_slots])
        previous_ids = ids
        token_slots[index] = previous_slots
    return PrefixTrie(token_slots, segments, num_slots)


def _common_prefix_length(a: IntArray, b: IntArray) -> int:
    length = min(len(a), len(b))
    differences = np.flatnonzero(a[:length] != b[:length])
    return int(differences[0]) if len(differences) else length


def _branch_point(previous_ids: IntArray, ids: IntArray, path: list[Segment]) -> int:
    """Return how many tokens of the prompt before a prompt can take over instead of computing them.

    Args:
        previous_ids: Token ids of the prompt before.
        ids: Token ids of the prompt.
        path: Segments that make up the prompt before.
    """
    start = _common_prefix_length(previous_ids, ids)
    if start == len(ids) == len(previous_ids):
        return start
    # A few tokens of one more segment would only make this prompt wait for it.
    for segment in reversed(path):
        if segment.start < start < segment.start + MIN_SEGMENT_TOKENS:
            start = segment.start
    return start


def group_by_prefix(prompts: Prompts, capacity_tokens: int) -> list[list[int]]:
    """Divide prompts into groups that fit into a store, neighbours of the lexicographic order together.

    Args:
        prompts: Token ids of each prompt.
        capacity_tokens: Tokens of a group at most, a shared prefix counted once. A longer prompt is a group of its
            own.

    Returns:
        Indices of the prompts of each group.
    """
    groups: list[list[int]] = []
    num_tokens = 0
    previous_ids = NO_TOKENS
    for index in lexicographic_order(prompts):
        ids = np.asarray(prompts[index], np.int64)
        # A short end of the common prefix may be computed again, see _branch_point().
        common = _common_prefix_length(previous_ids, ids)
        new_tokens = len(ids) - max(common - MIN_SEGMENT_TOKENS, 0)
        if not groups or num_tokens + new_tokens > capacity_tokens:
            groups.append([])
            num_tokens = 0
            new_tokens = len(ids)
        groups[-1].append(index)
        num_tokens += new_tokens
        previous_ids = ids
    return groups


# The work


def reason_not_shareable(model: PreTrainedModel) -> str:
    """Return the reason, in words, why prompts cannot share a prefill in a model; empty where they can."""
    config = families.text_config(model)
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    # Some models have parameters for each kind of layer.
    by_kind = [value for value in rope_parameters.values() if isinstance(value, dict)]
    rope_types = {
        str(parameters.get("rope_type")) for parameters in (rope_parameters, *by_kind)
    }
    changing = sorted(rope_types & {"dynamic", "longrope"})
    if changing:
        return f"its rotary embedding ({', '.join(changing)}) changes with the length of the prompt"
    return ""


def token_bytes(lm: LM) -> int:
    """Return the bytes of a token in a :class:`PrefixStore`.

    Stored are its keys, values and rotations, and one channel of the attention input, or all channels if the keys are
    not linear in it. The result is cached per model.
    """
    if lm.model not in _TOKEN_BYTES:
        _TOKEN_BYTES[lm.model] = _measure_token_bytes(lm)
    return _TOKEN_BYTES[lm.model]


@guarded
@inference_mode
def _measure_token_bytes(lm: LM) -> int:
    """Return the bytes that a token takes in a prefix store, measured on two tokens.

    They hold keys and values of all layers, recorded attention inputs, and tables of the rotary embedding.
    """
    prefix = Prefix(transformers.DynamicCache())
    ids = torch.zeros(1, 2, dtype=torch.long, device=lm.device)
    with recording_inputs(lm.model, prefix, [0], range(lm.layers)):
        inputs = with_cache(lm.model.forward, prefix.cache)
        lm.model(input_ids=ids, use_cache=True, **inputs)
    num_bytes = 0
    for layer in prefix.cache.layers:
        num_bytes += layer.keys[0, :, 0].nbytes + layer.values[0, :, 0].nbytes
    for hidden in prefix.inputs.values():
        num_bytes += hidden[0, 0].nbytes
    # Layers that rotate alike share the tensors.
    tables = {id(table[0]): table for table in prefix.rotary.values() if table}
    for cos, sin in tables.values():
        num_bytes += cos[0, 0].nbytes + sin[0, 0].nbytes
    return num_bytes


_TOKEN_BYTES: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


@dataclass
class PrefixStore:
    """Keys and values of prompts that share their prefixes, each token once.

    Attributes:
        prompts: Token ids of each prompt, without the tokens that a method runs itself; :meth:`fill` computes
            them.
        channels: Channels of the attention input to record, see :func:`posbench.model.prefix.recording_inputs`.
        layers: Layers to record.
        layout: The slot of each token of each prompt.
    """

    prompts: Prompts
    channels: Sequence[int] = ()
    layers: Collection[int] = ()
    layout: PrefixTrie = field(init=False)
    # (kind, layer) -> states of all N slots: "keys" and "values" [N, G, d], "inputs" [N, C], "cos" and "sin"
    # [N, d]
    _states: dict[tuple[str, int], Tensor] = field(default_factory=dict, repr=False)
    # layer -> the layer under which its rotation is stored; None without rotary embedding
    _rotary_layer: dict[int, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = build_prefix_trie(self.prompts)

    def fill(self, lm: LM, size: int, tokens: int | None) -> None:
        """Compute every segment under the present state of the model, and store its keys, values and recordings.

        Args:
            lm: The model.
            size: Segments of a batch at most.
            tokens: Tokens of a batch at most, those before the segments counted; None: any number.
        """
        self._states.clear()
        for batch in segment_batches(self.prompts, self.layout.segments, size, tokens):
            _compute(lm, self, batch)

    def prefix(self, lm: LM, rows: Sequence[int]) -> Prefix:
        """The prefill of some prompts, by index, padded on the left."""
        return self._gather(lm, [self.layout.token_slots[row] for row in rows])

    def _gather(
        self, lm: LM, rows: Sequence[IntArray], spare: int = SPARE_TOKENS
    ) -> Prefix:
        """Return the stored states of some slots as a prefill, padded on the left.

        Args:
            lm: The model.
            rows: Slots of the tokens of each row of the batch, shape (length,) each.
            spare: Tokens that can be appended to the cache without a copy.
        """
        width = max(map(len, rows))
        # Padding is masked, so any slot will do.
        slots = torch.from_numpy(
            np.stack([np.pad(row, (width - len(row), 0)) for row in rows])
        )
        cache = transformers.DynamicCache()
        if width:
            keys_and_values = (
                (
                    self._read("keys", layer, slots).transpose(1, 2),
                    self._read("values", layer, slots).transpose(1, 2),
                )
                for layer in range(lm.layers)
            )
            cache = appendable_cache(keys_and_values, spare)
        prefix = Prefix(cache=cache, channels=tuple(self.channels))
        setattr(cache, PREFIX_ATTRIBUTE, prefix)
        if not width:
            return prefix

        # Layers that rotate alike share cos and sin.
        tables = {
            layer: (self._read("cos", layer, slots), self._read("sin", layer, slots))
            for kind, layer in self._states
            if kind == "cos"
        }
        for layer in self.layers:
            prefix.inputs[layer] = self._read("inputs", layer, slots)
            rotary_layer = self._rotary_layer[layer]
            if rotary_layer is None:
                prefix.rotary[layer] = None
            else:
                prefix.rotary[layer] = tables[rotary_layer]
        return prefix

    def _read(self, kind: str, layer: int, slots: Tensor) -> Tensor:
        """States [B, T, ...] at slots [B, T]."""
        states = self._states[kind, layer]
        return states[slots.to(states.device)]

    def _write(self, kind: str, layer: int, slots: Tensor, values: Tensor) -> None:
        """Put values [M, ...] of M tokens at their slots [M]."""
        if (kind, layer) not in self._states:
            shape = (self.layout.size, *values.shape[1:])
            self._states[kind, layer] = values.new_zeros(shape)
        states = self._states[kind, layer]
        states[slots.to(states.device)] = values


def segment_batches(
    prompts: Prompts,
    segments: Sequence[Segment],
    batch_size: int,
    batch_tokens: int | None,
) -> Iterator[list[Segment]]:
    """Divide segments into batches that are computed together: of one level and of similar length.

    A segment's level is the number of segments before it in its prompt; those have to be computed first.

    Args:
        prompts: Token ids of each prompt.
        segments: Segments of these prompts.
        batch_size: Segments of a batch at most.
        batch_tokens: Tokens of a batch at most, the prefixes before the segments and padding counted; None: any
            number. A longer prompt is a batch of its own.

    Yields:
        The batches, the lowest level first, and of a level the longest segments first.
    """
    lengths = {
        segment.prompt: len(prompts[segment.prompt]) - segment.start
        for segment in segments
    }
    batch: list[Segment] = []
    longest_prompt = 0
    for segment in sorted(
        segments, key=lambda s: (s.level, -lengths[s.prompt], s.prompt)
    ):
        prompt_length = len(prompts[segment.prompt])
        longest_prompt = max(longest_prompt, prompt_length)
        if batch:
            length = lengths[segment.prompt]
            longest = lengths[batch[0].prompt]
            is_full = len(batch) == batch_size or (
                batch_tokens is not None
                and (len(batch) + 1) * longest_prompt > batch_tokens
            )
            is_similar = (
                length >= MIN_LENGTH_RATIO * longest
                or longest - length < MIN_SEGMENT_TOKENS
            )
            if is_full or not is_similar or segment.level != batch[0].level:
                yield batch
                batch = []
                longest_prompt = prompt_length
        batch.append(segment)
    if batch:
        yield batch


def computed_spans(prompts: Prompts, batch: Sequence[Segment]) -> list[tuple[int, int]]:
    """Return the tokens (first, end) of its prompt that each segment of a batch feeds to the model.

    Args:
        prompts: Token ids of each prompt.
        batch: The segments.
    """
    width = max(len(prompts[segment.prompt]) - segment.start for segment in batch)
    # All rows feed the same number of tokens, some from before their segment: then no row has a gap, which sliding
    # windows and ALiBi would count.
    spans = []
    for segment in batch:
        end = len(prompts[segment.prompt])
        spans.append((max(end - width, 0), end))
    return spans


@guarded
@inference_mode
def _compute(lm: LM, store: PrefixStore, batch: Sequence[Segment]) -> None:
    """Run segments whose prefixes are all stored, in one batch, and store their keys, values and recorded states.

    Args:
        lm: The model.
        store: Where prefixes are taken from and results go.
        batch: The segments.
    """
    prompts = [store.prompts[segment.prompt] for segment in batch]
    token_slots = [store.layout.token_slots[segment.prompt] for segment in batch]
    starts = [start for start, _ in computed_spans(store.prompts, batch)]
    lengths = [
        len(prompt) - segment.start
        for prompt, segment in zip(prompts, batch, strict=True)
    ]
    width = max(lengths)

    # What the segments feed, behind the stored tokens before them.
    inputs = lm.pad([p[start:] for p, start in zip(prompts, starts, strict=True)])
    past_slots = [
        slots[:start] for slots, start in zip(token_slots, starts, strict=True)
    ]
    cache = store._gather(lm, past_slots, width).cache
    past_width = int(cache.get_seq_length())
    past_lengths = torch.tensor(starts, device=lm.device)[:, None]
    # Prompts of the batch have different numbers of stored tokens: mask the padding.
    if past_width:
        past_columns = torch.arange(past_width, device=lm.device)
        past_mask = (past_columns >= past_width - past_lengths).long()
        inputs["attention_mask"] = torch.cat(
            [past_mask, inputs["attention_mask"]], dim=1
        )
    inputs["position_ids"] = inputs["position_ids"] + past_lengths
    prefix = Prefix(cache)
    with recording_inputs(lm.model, prefix, store.channels, store.layers):
        logits = lm.model(
            **inputs,
            **with_cache(lm.model.forward, cache),
            use_cache=True,
            logits_to_keep=1,
        ).logits
        check_finite(logits)

    # Row and column in the batch of every token of the segments, and its slot.
    rows = torch.from_numpy(np.repeat(np.arange(len(batch)), lengths))
    columns = torch.from_numpy(
        np.concatenate([np.arange(width - length, width) for length in lengths])
    )
    slots = torch.from_numpy(
        np.concatenate(
            [
                slots[segment.start :]
                for slots, segment in zip(token_slots, batch, strict=True)
            ]
        )
    )
    # Keys and values of all layers; attention inputs and rotations of the recorded ones.
    for layer in range(lm.layers):
        states = cache.layers[layer]
        keys = _pick_tokens(states.keys.transpose(1, 2), rows, past_width + columns)
        store._write("keys", layer, slots, keys)
        values = _pick_tokens(states.values.transpose(1, 2), rows, past_width + columns)
        store._write("values", layer, slots, values)
    first_layer: dict[int, int] = {}
    for layer in store.layers:
        hidden = _pick_tokens(prefix.inputs[layer], rows, columns)
        store._write("inputs", layer, slots, hidden)
        rotary = prefix.rotary[layer]
        if rotary is None:
            store._rotary_layer[layer] = None
            continue
        cos, sin = rotary
        # Most models rotate all layers by the same tensors.
        rotary_layer = first_layer.setdefault(id(cos), layer)
        store._rotary_layer[layer] = rotary_layer
        if rotary_layer == layer:
            store._write("cos", layer, slots, _pick_tokens(cos, rows, columns))
            store._write("sin", layer, slots, _pick_tokens(sin, rows, columns))


def _pick_tokens(states: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """States [M, ...] of the tokens at M rows and columns of [B, T, ...]; of [1, T, ...] where rows do not differ."""
    if states.shape[0] == 1:
        rows = torch.zeros_like(rows)
    return states[rows.to(states.device), columns.to(states.device)]
