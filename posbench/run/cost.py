"""Cost model of a run: tokens, operations, bytes, and time on a device.

Operations follow from a closed form, as prompts are not run for an estimate; the tests compare it with torch's
FlopCounterMode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from posbench.model import families
from posbench.model.lm import LM
from posbench.model.store import token_bytes
from posbench.tasks import Example


class StudyWorkload(NamedTuple):
    """Upper bound of the tokens that a study or a search reads, in prompts of about equal length and in other texts.

    Attributes:
        prompts: Prompts read in full.
        answers: Further tokens, each behind a prompt.
        replies: Of these prompts, those that are answered.
        batches: Batches that these make.
        texts: Texts that are no prompts.
        length: Tokens of each such text.
    """

    prompts: int = 0
    answers: int = 0
    replies: int = 0
    batches: int = 0
    texts: int = 0
    length: int = 0


class InspectionPasses(NamedTuple):
    """Forward passes with which a study inspects the model on each prompt, and replies to it.

    Attributes:
        examples: The prompts.
        times: Forward passes of each.
        replies: Replies to each.
        shared: Whether prompts share prefills.
    """

    examples: Sequence[Example]
    times: int
    replies: int = 0
    shared: bool = False


LIGHT_PARAMETERS = 10_000_000
"""Models with fewer parameters are not timed before a run without a budget: they rarely take an hour."""


@dataclass(frozen=True)
class WorkEstimate:
    """Upper bound of the work that a stage asks of the model, all its methods together.

    Attributes:
        stage: The stage.
        prompts: Number of prompts.
        tokens: Tokens of these prompts, each counted in full.
        computed_tokens: Tokens computed, with shared prefills counted once.
        attention_pairs: Pairs of a computed token and a token that it attends to, itself among them.
        decode_steps: Steps of generation: a token of each reply of a batch.
        decoded_tokens: Reply tokens that the model reads again: all but the last of each reply.
        decoded_pairs: Attention pairs of the decoded tokens.
        batch_tokens: Tokens, with padding and replies, of the batch for which their sum with ``prefix_tokens`` is
            largest.
        prefix_tokens: Tokens of the shared prefill that this batch goes on from.
    """

    stage: str
    prompts: int
    tokens: int
    computed_tokens: int
    attention_pairs: int
    decode_steps: int = 0
    decoded_tokens: int = 0
    decoded_pairs: int = 0
    batch_tokens: int = 0
    prefix_tokens: int = 0

    def times(self, factor: float) -> WorkEstimate:
        """Return ``factor`` times this work, with batches of unchanged size."""
        return replace(
            self,
            prompts=round(self.prompts * factor),
            tokens=round(self.tokens * factor),
            computed_tokens=round(self.computed_tokens * factor),
            attention_pairs=round(self.attention_pairs * factor),
            decode_steps=round(self.decode_steps * factor),
            decoded_tokens=round(self.decoded_tokens * factor),
            decoded_pairs=round(self.decoded_pairs * factor),
        )


# An H100 SXM by NVIDIA's data sheet.
H100_FLOPS = 989e12
"""Dense operations per second in bfloat16."""
H100_BANDWIDTH = 3.35e12
"""Bytes per second."""
H100_MEMORY = 80e9
"""Bytes."""
COMPUTE_SHARE = 0.4
"""Assumed share of the operations per second reached in prefills."""
BANDWIDTH_SHARE = 0.6
"""Assumed share of the bandwidth reached in generation."""
MEMORY_SHARE = 0.9
"""Assumed share of the memory that can be used."""
STEP_SECONDS_OF_A_LAYER = 0.7e-3
"""Overhead of a generation step per layer, waiting for Python: 22 to 29 ms for 32 layers, measured on an H200."""


class Speed(NamedTuple):
    """Measured speed of this machine.

    Attributes:
        operation: Seconds per operation of a prefill.
        step: Seconds per step of generation of a batch.
    """

    operation: float
    step: float

    def seconds(self, costs: Costs, work: WorkEstimate) -> float:
        """Return the time of some work."""
        return (
            self.operation * costs.prefill_flops(work) + self.step * work.decode_steps
        )


@dataclass(frozen=True)
class Costs:
    """The sizes of a model from which its costs follow.

    Attributes:
        parameters: All parameters.
        body_parameters: Parameters without embedding and output.
        output_parameters: Parameters of the output layer.
        layers: Number of layers.
        query_width: Width of all query heads of a layer.
        cache_numbers: Numbers in the KV cache of a token.
        stored_token_bytes: Bytes of a token in a shared prefill, see :func:`posbench.model.store.token_bytes`.
        number_bytes: Bytes of a number.
    """

    parameters: int
    body_parameters: int
    output_parameters: int
    layers: int
    query_width: int
    cache_numbers: int
    stored_token_bytes: int
    number_bytes: int

    @classmethod
    def of(cls, lm: LM) -> Costs:
        """Return the numbers of parameters and sizes that determine a model's costs; its weights need not be loaded."""
        config = families.text_config(lm.model)
        embedding = lm.model.get_input_embeddings().weight
        output = lm.model.get_output_embeddings()
        parameters = sum(p.numel() for p in lm.model.parameters())
        output_parameters = output.weight.numel() if output else embedding.numel()
        # A token passes through the body; the embedding only looks one row up.
        body_parameters = parameters - embedding.numel()
        if output and output.weight is not embedding:
            body_parameters -= output_parameters
        layers = config.num_hidden_layers
        query_heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or query_heads
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // query_heads
        return cls(
            parameters=parameters,
            body_parameters=body_parameters,
            output_parameters=output_parameters,
            layers=layers,
            query_width=query_heads * head_dim,
            cache_numbers=2 * layers * kv_heads * head_dim,
            stored_token_bytes=token_bytes(lm),
            number_bytes=embedding.element_size(),
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.parameters * self.number_bytes

    def cache_bytes(self, work: WorkEstimate) -> int:
        """Return the bytes of the KV cache of the largest batch."""
        return self.cache_numbers * self.number_bytes * work.batch_tokens

    def prefix_bytes(self, work: WorkEstimate) -> int:
        """Return the bytes of the shared prefill that this batch goes on from."""
        return self.stored_token_bytes * work.prefix_tokens

    def memory_bytes(self, work: WorkEstimate) -> int:
        """Return the bytes of weights, KV cache and shared prefill."""
        return self.weight_bytes + self.cache_bytes(work) + self.prefix_bytes(work)

    def prefill_flops(self, work: WorkEstimate) -> float:
        """Return the operations of prefills.

        They are two for each weight that a token passes, and four for each number of a head of an attention
        pair; the output is computed for a prompt's last token alone.
        """
        return self._flops(work.computed_tokens, work.attention_pairs, work.prompts)

    def flops(self, work: WorkEstimate) -> float:
        """Return the operations of prefills and replies."""
        decoding = self._flops(
            work.decoded_tokens, work.decoded_pairs, work.decoded_tokens
        )
        return self.prefill_flops(work) + decoding

    def _flops(self, tokens: int, pairs: int, outputs: int) -> float:
        return (
            2.0 * self.body_parameters * tokens
            + 4.0 * self.layers * self.query_width * pairs
            + 2.0 * self.output_parameters * outputs
        )

    def seconds(self, work: WorkEstimate) -> float:
        """Return an estimate of the seconds that work takes on an H100.

        Prefills are bound by arithmetic; a step of generation by reading weights and KV cache, or by a fixed overhead.
        """
        read_bytes = (
            work.decode_steps * self.weight_bytes
            + work.decoded_pairs * self.cache_numbers * self.number_bytes
        )
        prefills = self.prefill_flops(work) / (COMPUTE_SHARE * H100_FLOPS)
        reading = read_bytes / (BANDWIDTH_SHARE * H100_BANDWIDTH)
        waiting = work.decode_steps * self.layers * STEP_SECONDS_OF_A_LAYER
        return prefills + max(reading, waiting)

    def devices(self, work: WorkEstimate) -> int:
        """Return how many H100s hold the model, its layers spread over them."""
        return -(-self.memory_bytes(work) // int(MEMORY_SHARE * H100_MEMORY))
