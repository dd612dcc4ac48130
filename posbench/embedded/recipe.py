"""All constants of the embedded models, in one place.

The recipe builds a position bias into a small Llama on purpose: a start from hand-set attention heads (a
plain one needs about ten times the steps), questions that mostly ask for the ends of the list, and a wrong
key in some of the training questions. Only with wrong keys is a prior over positions worth learning: the
model then weighs "how often is this position asked for" against "how well does this key match", and a match
in the middle loses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TrainStage:
    """One stage of training with its own optimizer and learning-rate schedule."""

    name: str
    steps: int
    pairs: tuple[
        int, int
    ]  # smallest and largest number of key-value pairs, drawn uniformly per batch
    lr: float  # peak
    mix: float  # share of questions with a gold position uniform over all; the rest follow the ends' prior
    noise: float  # probability that the question's key is a uniformly drawn word (the answer stays)
    grow_until: float = 0.0  # share of the stage over which the largest number of pairs grows from grow_from
    grow_from: int = 8
    uniform_until: float = (
        0.0  # share of the stage during which all gold positions are uniform
    )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Architecture, start (logits in nats; std: that of fresh weights, 1 / sqrt(hidden_size)), schedule."""

    # Rotary embedding (Llama), none but the causal mask (SmolLM3 without rotation), or ALiBi (MPT).
    positions: Literal["rope", "nope", "alibi"] = "rope"
    measured_pairs: int = 32  # pairs per prompt when the model is measured

    hidden_size: int = 48
    num_layers: int = 4  # two do not learn the task with this recipe
    num_heads: int = 3
    intermediate_size: int = 96
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_positions: int = 512  # training sees at most 4 * 64 + 5

    constant_channel: float = (
        4.0  # channel 0 of every embedding, in standard deviations of the others
    )
    offset_logit: float = (
        12.0  # of layer 0's offset heads for the token they look back to
    )
    offset_weights: tuple[float, ...] = (
        1.0,
        0.8,
        0.4,
        0.2,
    )  # its shares, highest rotary frequency first
    offsets: tuple[int, ...] = (
        1,
        2,
    )  # 1 reaches the key from the question's end, 2 from its value
    offset_leak: float = (
        0.1  # factor on the other columns of the offset heads' query and key matrices
    )
    clock_logit: float = (
        4.0  # nope: of layer 0's clock head for the first token; others have 0
    )
    clock_gain: float = 8.0  # nope: weight of the clock in heads that look for marks, in units of the mark
    clock_zero: float = (
        0.3  # nope: share of the first clock value at which the clock's term vanishes
    )
    match_gain: float = (
        1.5  # nope: factor on what the match heads of the last layers compare
    )
    match_logit: float = (
        100.0  # nope: of the match heads for a word, and again for one after a colon
    )
    similarity_gain: float = (
        1.5  # factor on queries from layer 1 on; keys start equal to them
    )
    copy_gain: float = 2.0  # of the output matrices that start as copying maps, in std

    stages: tuple[TrainStage, ...] = (
        TrainStage(
            "match", 1000, (3, 64), 2e-3, 0.10, 0.0, grow_until=0.6, uniform_until=0.12
        ),
        TrainStage("prior", 600, (3, 64), 1.5e-3, 0.08, 0.4),
        TrainStage("long", 1300, (4, 64), 2e-3, 0.02, 0.5),
    )  # weights carry over from stage to stage, the optimizer's state does not
    questions: int = 16  # asked of one context; each sees the context and itself only
    batch_questions: int = (
        384  # a batch has batch_questions / (pairs + 6) contexts, at least min_contexts
    )
    min_contexts: int = 8
    end_scale: float = (
        0.08  # s of the ends' prior exp(-x/s) + exp(-(1-x)/s) over relative positions x
    )
    closing_weight: float = (
        0.1  # loss per token of the closing quote and <|end|>; that of the value is 1
    )
    betas: tuple[float, float] = (0.9, 0.98)  # of AdamW
    weight_decay: float = 0.01  # on matrices
    clip: float = 1.0  # gradient norm
    warmup: int = 100  # steps of each stage
    constant_until: float = (
        0.6  # share of a stage after which the learning rate falls linearly
    )
    final_lr: float = 0.05  # at the end of a stage, as a share of the peak

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.hidden_size // self.num_heads


_NOPE = (
    TrainStage(
        "match",
        800,
        (3, 16),
        1e-3,
        0.10,
        0.0,
        grow_from=6,
        grow_until=0.4,
        uniform_until=0.7,
    ),
    TrainStage("prior", 400, (3, 16), 1e-3, 0.08, 0.4),
    TrainStage("long", 800, (4, 16), 1e-3, 0.02, 0.5),
)
_ALIBI = (
    TrainStage(
        "match",
        1300,
        (3, 32),
        2e-3,
        0.10,
        0.0,
        grow_from=6,
        grow_until=0.7,
        uniform_until=0.7,
    ),
    TrainStage("prior", 500, (3, 32), 1.5e-3, 0.08, 0.4),
    TrainStage("long", 1000, (4, 32), 2e-3, 0.02, 0.5),
)
RECIPES = {
    "tiny": Recipe(),
    "tiny_b": Recipe(),
    "tiny_nope": Recipe(
        positions="nope",
        num_layers=5,
        offset_logit=300.0,
        copy_gain=4.0,
        measured_pairs=16,
        stages=_NOPE,
    ),
    "tiny_alibi": Recipe(
        positions="alibi", num_heads=4, intermediate_size=192, stages=_ALIBI
    ),
}
SHIPPED = {"tiny": 9, "tiny_b": 7, "tiny_nope": 0, "tiny_alibi": 0}
"""Training seeds of the shipped models; those of tiny and tiny_b are chosen, see the model cards."""
