"""What work costs a model: tokens, operations, bytes, and time on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from posbench.model import families
from posbench.model.lm import LM
from posbench.model.store import token_bytes
from posbench.tasks import Example


class Reads(NamedTuple):
    """What is read at most of prompts that are about equally long, and of texts that are no prompts."""

    prompts: int = 0  # prompts read whole
    answers: int = 0  # further tokens, each behind a prompt
    replies: int = 0  # of these prompts, those that are answered
    batches: int = 0  # that these make
    texts: int = 0
    length: int = 0  # tokens of each text


class Looks(NamedTuple):
    """How often each of some prompts is read for what happens inside, and how often it is answered."""

    examples: Sequence[Example]
    times: int
    replies: int = 0
    shared: bool = False  # whether prompts share prefills


@dataclass(frozen=True)
class Work:
    """What a stage asks of the model at most, of all its methods together."""

    stage: str
    prompts: int
    tokens: int  # of these prompts, each counted whole
    computed: int  # of them, prefills shared
    pairs: int  # of a computed token and one that it attends to, itself among them
    steps: int = 0  # of generation: a token of each reply of a batch
    fed: int = 0  # tokens of replies that the model reads again: all but the last ones
    later: int = 0  # pairs of these
    batch: int = 0  # tokens of a batch, padding and reply counted, where that and ``held`` are most
    held: int = 0  # tokens of the shared prefill that it goes on from

    def times(self, factor: float) -> Work:
        """So much of it; batches stay as large as they are."""
        kept = ("stage", "batch", "held")
        every = {f.name: getattr(self, f.name) for f in fields(self)}
        return Work(
            **{k: v if k in kept else round(v * factor) for k, v in every.items()}
        )


FLOPS = 989e12
BANDWIDTH = 3.35e12
MEMORY = 80e9
"""An H100 SXM by NVIDIA's data sheet: operations a second in bfloat16, dense; bytes a second; bytes."""
COMPUTE = 0.4
READING = 0.6
FILLED = 0.9
"""Assumed: shares of the first in prefills, of the second in generation, of the third that is used."""


@dataclass(frozen=True)
class Costs:
    """The numbers of a model that its costs follow from."""

    parameters: int
    body: int  # parameters that every token passes: without embedding and output
    head: int  # of the output
    layers: int
    heads: int  # width of all query heads
    cache: int  # numbers in the KV cache of a token
    stored: int  # bytes of a token in a shared prefill, see :func:`posbench.model.prefix.token_bytes`
    width: int  # bytes of a number

    @classmethod
    def of(cls, lm: LM) -> Costs:
        """Of a model, whose weights may be on the meta device."""
        config = families.text_config(lm.model)
        kept = lm.model.get_input_embeddings().weight
        every = sum(p.numel() for p in lm.model.parameters())
        output = lm.model.get_output_embeddings()
        head = output.weight.numel() if output else kept.numel()
        body = (
            every - kept.numel() - (head if output and output.weight is not kept else 0)
        )
        queries = config.num_attention_heads
        layers = config.num_hidden_layers
        groups = getattr(config, "num_key_value_heads", None) or queries
        size = getattr(config, "head_dim", None) or config.hidden_size // queries
        cache = 2 * layers * groups * size
        width = kept.element_size()
        return cls(
            every, body, head, layers, queries * size, cache, token_bytes(lm), width
        )

    @property
    def weights(self) -> int:
        """Bytes."""
        return self.parameters * self.width

    def cached(self, work: Work) -> int:
        """Bytes of the KV cache of the largest batch."""
        return self.cache * self.width * work.batch

    def bytes(self, work: Work) -> int:
        """Weights, the KV cache of the largest batch, and the shared prefill that it goes on from."""
        return self.weights + self.cached(work) + self.stored * work.held

    def prefill(self, work: Work) -> float:
        """Operations: two for each weight that a token passes, four for each number of a head of a pair; the
        output of a prompt's last token alone."""
        return self._flops(work.computed, work.pairs, work.prompts)

    def flops(self, work: Work) -> float:
        """Operations of prefills and replies."""
        return self.prefill(work) + self._flops(work.fed, work.later, work.fed)

    def _flops(self, tokens: int, pairs: int, outputs: int) -> float:
        return (
            2.0 * self.body * tokens
            + 4.0 * self.layers * self.heads * pairs
            + 2.0 * self.head * outputs
        )

    def seconds(self, work: Work) -> float:
        """On an H100: prefills take their operations, a step of generation reads weights and cache."""
        read = work.steps * self.weights + work.later * self.cache * self.width
        prefills = self.prefill(work) / (COMPUTE * FLOPS)
        return prefills + read / (READING * BANDWIDTH)

    def devices(self, work: Work) -> int:
        """How many such cards hold it, its layers spread over them."""
        return -(-self.bytes(work) // int(FILLED * MEMORY))
