"""All constants of the embedded tiny models, in one place.

The recipe builds a position bias into a small Llama on purpose, and says how: a start from hand-set attention
heads ("mimetic" start, because a plain start needs about ten times the steps), questions that mostly ask for
the ends of the list, and a wrong key in some of the training questions. Only with the wrong keys is a prior
over positions worth learning: the model then weighs "how often is this position asked for" against "how well
does this key match", and a match in the middle loses.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class TrainStage:
    """One stage of training with its own optimizer and learning-rate schedule."""

    name: str
    """Name in the curves and progress lines."""
    steps: int
    """Optimizer steps."""
    pairs: tuple[int, int]
    """Smallest and largest number of key-value pairs, drawn uniformly per batch."""
    lr: float
    """Peak learning rate."""
    mix: float
    """Share of questions whose gold pair is uniform over the positions; the rest follow the prior of the
    ends."""
    noise: float
    """Probability that the key in the question is replaced by a uniformly drawn word (the answer stays)."""
    grow_until: float = 0.0
    """Fraction of the stage over which the largest number of pairs grows linearly from ``grow_from``."""
    grow_from: int = 8
    """Largest number of pairs at the first step when ``grow_until`` is positive."""
    uniform_until: float = 0.0
    """Fraction of the stage during which all gold positions are uniform."""


def _default_stages() -> tuple[TrainStage, ...]:
    return (
        TrainStage(name="match", steps=1000, pairs=(3, 64), lr=2e-3, mix=0.10, noise=0.0,
                   grow_until=0.6, uniform_until=0.12),
        TrainStage(name="prior", steps=600, pairs=(3, 64), lr=1.5e-3, mix=0.08, noise=0.4),
        TrainStage(name="long", steps=1300, pairs=(4, 64), lr=2e-3, mix=0.02, noise=0.5),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Architecture, start, data and schedule of a tiny model. Two equal recipes and seeds give equal
    weights."""

    positions: Literal["rope", "nope", "alibi"] = "rope"
    """Rotary embedding (Llama), none but the causal mask (SmolLM3 without rotation), or ALiBi (MPT)."""
    measured_pairs: int = 32
    """Pairs per prompt when the model is measured."""

    hidden_size: int = 48
    """Width of the residual stream, in channels."""
    num_layers: int = 4
    """Decoder layers; two do not learn the task with this recipe."""
    num_heads: int = 3
    """Attention heads per layer, without grouping of the keys."""
    intermediate_size: int = 96
    """Width of the gated MLP."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding."""
    rms_norm_eps: float = 1e-5
    """Epsilon of the RMS norms."""
    max_positions: int = 512
    """``max_position_embeddings`` of the config (the training sees at most ``4 * 64 + 5`` positions)."""

    constant_channel: float = 4.0
    """Start value of channel 0 of every embedding, in standard deviations of the other channels."""
    offset_logit: float = 12.0
    """Attention logit, at the start, of layer 0's offset heads for the token they look back to."""
    offset_weights: tuple[float, ...] = (1.0, 0.8, 0.4, 0.2)
    """Share of the offset logit carried by the highest rotary frequencies, highest first."""
    offsets: tuple[int, ...] = (1, 2)
    """How far back the offset heads look: 1 reaches the key from the question's end, 2 reaches it from its
    value."""
    offset_leak: float = 0.1
    """Factor on the other columns of the offset heads' query and key matrices."""
    clock_logit: float = 4.0
    """For ``nope``: attention logit, at the start, of layer 0's clock head for the first token; others have
    0."""
    clock_gain: float = 8.0
    """For ``nope``: how much the heads that look for marked tokens weigh the clock, in units of the mark."""
    clock_zero: float = 0.3
    """For ``nope``: clock value, as a fraction of its first, at which the clock's term vanishes."""
    match_gain: float = 1.5
    """For ``nope``: factor on what the match heads of the last layers compare."""
    match_logit: float = 100.0
    """For ``nope``: attention logit, at the start, of the match heads for a word, and again for one that
    follows a colon."""
    similarity_gain: float = 1.5
    """Factor on the query matrix of layers from 1 on; their key matrix starts equal to it."""
    copy_gain: float = 2.0
    """Factor of the output matrices that start as copying maps, in units of the weights' standard
    deviation."""

    stages: tuple[TrainStage, ...] = field(default_factory=_default_stages)
    """The stages, in order; weights carry over, optimizer state does not."""
    questions: int = 16
    """Questions asked of one context; each sees the context and itself only."""
    batch_questions: int = 384
    """Contexts per batch are ``batch_questions / (pairs + 6)``, at least ``min_contexts``."""
    min_contexts: int = 8
    """Fewest contexts in a batch."""
    end_scale: float = 0.08
    """Decay length of the prior ``exp(-x/s) + exp(-(1-x)/s)`` over relative positions x."""
    closing_weight: float = 0.1
    """Weight, per token, of the loss on the closing quote and on ``<|end|>`` relative to the value's."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW betas."""
    weight_decay: float = 0.01
    """AdamW decay on matrices."""
    clip: float = 1.0
    """Gradient norm limit."""
    warmup: int = 100
    """Steps of linear warm-up in each stage."""
    constant_until: float = 0.6
    """Fraction of each stage after which the learning rate falls linearly to ``final_lr``."""
    final_lr: float = 0.05
    """Learning rate at the end of a stage, as a fraction of its peak."""

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads) or self.num_heads < len(self.offsets):
            raise ValueError(
                f"hidden_size {self.hidden_size} must split into {self.num_heads} heads of even width, and there must be a head "
                f"per offset ({len(self.offsets)})"
            )
        if self.positions == "alibi" and (
            self.num_heads.bit_count() > 1 or self.intermediate_size != 4 * self.hidden_size
        ):
            raise ValueError(
                "alibi: the stock MPT has an MLP of 4 * hidden_size; num_heads must be a power of two here"
            )

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.hidden_size // self.num_heads

    @property
    def longest(self) -> int:
        """Most pairs in a training context."""
        return max(stage.pairs[1] for stage in self.stages)

    @property
    def total_steps(self) -> int:
        """Optimizer steps over all stages."""
        return sum(stage.steps for stage in self.stages)

    def as_dict(self) -> dict[str, Any]:
        """The recipe as plain JSON-ready values."""
        return asdict(self)


RECIPES = {
    "tiny": Recipe(),
    "tiny_b": Recipe(),
    "tiny_nope": Recipe(
        positions="nope", num_layers=5, offset_logit=300.0, copy_gain=4.0, measured_pairs=16,
        stages=(
            TrainStage(name="match", steps=800, pairs=(3, 16), lr=1e-3, mix=0.10, noise=0.0,
                       grow_from=6, grow_until=0.4, uniform_until=0.7),
            TrainStage(name="prior", steps=400, pairs=(3, 16), lr=1e-3, mix=0.08, noise=0.4),
            TrainStage(name="long", steps=800, pairs=(4, 16), lr=1e-3, mix=0.02, noise=0.5),
        ),
    ),
    "tiny_alibi": Recipe(
        positions="alibi", num_heads=4, intermediate_size=192,
        stages=(
            TrainStage(name="match", steps=1300, pairs=(3, 32), lr=2e-3, mix=0.10, noise=0.0,
                       grow_from=6, grow_until=0.7, uniform_until=0.7),
            TrainStage(name="prior", steps=500, pairs=(3, 32), lr=1.5e-3, mix=0.08, noise=0.4),
            TrainStage(name="long", steps=1000, pairs=(4, 32), lr=2e-3, mix=0.02, noise=0.5),
        ),
    ),
}  # fmt: skip
"""Recipes of the shipped models."""
SHIPPED = {"tiny": 9, "tiny_b": 7, "tiny_nope": 0, "tiny_alibi": 0}
"""Training seeds of the shipped models; those of ``tiny`` and ``tiny_b`` are chosen, see the model cards."""
