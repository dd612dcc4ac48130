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
    """One stage of training with its own optimizer and learning-rate schedule.

    Attributes:
        name: Name in the training curve.
        steps: Training steps.
        pairs: Smallest and largest number of key-value pairs, drawn uniformly per batch.
        lr: Peak learning rate.
        mix: Share of questions with a gold position uniform over all; the others follow the ends' prior.
        noise: Probability that the question's key is a uniformly drawn word (the answer stays).
        grow_until: Share of the stage over which the largest number of pairs grows from ``grow_from``.
        grow_from: Largest number of pairs at the start of the stage.
        uniform_until: Share of the stage during which all gold positions are uniform.
    """

    name: str
    steps: int
    pairs: tuple[int, int]
    lr: float
    mix: float
    noise: float
    grow_until: float = 0.0
    grow_from: int = 8
    uniform_until: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Architecture, start and training schedule.

    Logits are in nats; ``std`` is the standard deviation of random weights, 1 / sqrt(hidden_size).
    """

    # Rotary embedding (Llama), none but the causal mask (SmolLM3 without rotation), or ALiBi (MPT).
    positions: Literal["rope", "nope", "alibi"] = "rope"
    # Pairs per prompt when the model is measured.
    measured_pairs: int = 32

    hidden_size: int = 48
    num_layers: int = 4  # two do not learn the task with this recipe
    num_heads: int = 3
    intermediate_size: int = 96
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_positions: int = 512  # training has at most 4 * 64 + 5

    # Channel 0 of every embedding, in standard deviations of the other channels.
    constant_channel: float = 4.0
    # Logit of layer 0's offset heads for the token they look back to.
    offset_logit: float = 12.0
    # Its shares of the rotary frequencies, highest first.
    offset_weights: tuple[float, ...] = (1.0, 0.8, 0.4, 0.2)
    # Tokens the offset heads look back: 1 reaches the key from the question's end, 2 from its value.
    offsets: tuple[int, ...] = (1, 2)
    # Factor on the other columns of the offset heads' query and key matrices.
    offset_leak: float = 0.1
    # nope: logit of layer 0's clock head for the first token; other tokens have 0.
    clock_logit: float = 4.0
    # nope: weight of the clock in heads that look for marks, in units of the mark.
    clock_gain: float = 8.0
    # nope: share of the first clock value at which the clock's term vanishes.
    clock_zero: float = 0.3
    # nope: factor on the comparison in the match heads of the last layers.
    match_gain: float = 1.5
    # nope: logit of the match heads for a word, and again for one after a colon.
    match_logit: float = 100.0
    # Factor on queries from layer 1 on; keys start equal to them.
    similarity_gain: float = 1.5
    # Of the output matrices that start as copying maps, in std.
    copy_gain: float = 2.0

    # Weights carry over from stage to stage, the optimizer's state does not.
    stages: tuple[TrainStage, ...] = (
        TrainStage(
            name="match",
            steps=1000,
            pairs=(3, 64),
            lr=2e-3,
            mix=0.10,
            noise=0.0,
            grow_until=0.6,
            uniform_until=0.12,
        ),
        TrainStage("prior", steps=600, pairs=(3, 64), lr=1.5e-3, mix=0.08, noise=0.4),
        TrainStage("long", steps=1300, pairs=(4, 64), lr=2e-3, mix=0.02, noise=0.5),
    )
    # Questions about one context; each sees the context and itself only.
    questions: int = 16
    # A batch has batch_questions / (pairs + 6) contexts, at least min_contexts.
    batch_questions: int = 384
    min_contexts: int = 8
    # s of the ends' prior exp(-x/s) + exp(-(1-x)/s) over relative positions x.
    end_scale: float = 0.08
    # Loss per token of the closing quote and <|end|>; the value's loss has weight 1.
    closing_weight: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)  # of AdamW
    weight_decay: float = 0.01  # on matrices
    clip: float = 1.0  # gradient norm
    warmup: int = 100  # steps of each stage
    # Share of a stage after which the learning rate falls linearly.
    constant_until: float = 0.6
    final_lr: float = 0.05  # at the end of a stage, as a share of the peak

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.hidden_size // self.num_heads


_NOPE_STAGES = (
    TrainStage(
        name="match",
        steps=800,
        pairs=(3, 16),
        lr=1e-3,
        mix=0.10,
        noise=0.0,
        grow_from=6,
        grow_until=0.4,
        uniform_until=0.7,
    ),
    TrainStage("prior", steps=400, pairs=(3, 16), lr=1e-3, mix=0.08, noise=0.4),
    TrainStage("long", steps=800, pairs=(4, 16), lr=1e-3, mix=0.02, noise=0.5),
)
_ALIBI_STAGES = (
    TrainStage(
        name="match",
        steps=1300,
        pairs=(3, 32),
        lr=2e-3,
        mix=0.10,
        noise=0.0,
        grow_from=6,
        grow_until=0.7,
        uniform_until=0.7,
    ),
    TrainStage("prior", steps=500, pairs=(3, 32), lr=1.5e-3, mix=0.08, noise=0.4),
    TrainStage("long", steps=1000, pairs=(4, 32), lr=2e-3, mix=0.02, noise=0.5),
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
        stages=_NOPE_STAGES,
    ),
    "tiny_alibi": Recipe(
        positions="alibi",
        num_heads=4,
        intermediate_size=192,
        stages=_ALIBI_STAGES,
    ),
}
SHIPPED_SEEDS = {"tiny": 9, "tiny_b": 7, "tiny_nope": 0, "tiny_alibi": 0}
"""Training seeds of the shipped models; the seeds of tiny and tiny_b are chosen, see the model cards."""
