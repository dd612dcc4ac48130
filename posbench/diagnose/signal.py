"""Whether a prompt makes its answer likelier: a quick check before replies are generated."""

from __future__ import annotations

from collections.abc import Sequence

from posbench.late import torch
from posbench.measure.replies import encode_prompt
from posbench.model.lm import LM
from posbench.stats.bootstrap import Estimate, difference
from posbench.tasks import Example, Task

SIGNAL_QUESTIONS = 12
"""Questions of the check, each at one gold position."""
NEGLIGIBLE_NATS = 0.1
"""Gain in nats per answer token below which the prompt counts as no help."""
SIGNAL_BATCH = 4
"""Questions of a batch, after which the check may end."""


def spread_over_positions(examples: Sequence[Example]) -> list[Example]:
    """At most :data:`SIGNAL_QUESTIONS` examples of different questions, with alternating gold positions.

    Args:
        examples: The examples of a task; the n-th of each gold position is the same question, or another one.
    """
    by_position: dict[int, list[Example]] = {}
    for example in examples:
        by_position.setdefault(example.gold_position or 0, []).append(example)
    groups = [by_position[position] for position in sorted(by_position)]
    count = min(SIGNAL_QUESTIONS, min(map(len, groups)))
    return [groups[i % len(groups)][i] for i in range(count)]


def answer_signal(lm: LM, task: Task, examples: Sequence[Example]) -> Estimate:
    """Estimate how much likelier an answer is after its own prompt than after another question's.

    The difference is zero for a random model and several nats for one that copies at all, so a few questions suffice.

    Args:
        lm: The model.
        task: The examples' task.
        examples: N examples of different questions, N >= 2.

    Returns:
        Fall of the loss in nats per answer token; of the first questions alone where they are decisive.
    """
    encoded = [encode_prompt(lm, task, example) for example in examples]
    gains: list[torch.Tensor] = []
    estimate: Estimate | None = None
    for start in range(0, len(examples), SIGNAL_BATCH):
        if estimate and estimate.ci_low > NEGLIGIBLE_NATS:
            break
        with_own_prompt = []
        with_other_prompt = []
        for index, example in enumerate(examples[start : start + SIGNAL_BATCH], start):
            prompt = encoded[index]
            other = encoded[index - 1]
            answer = example.answers[0]
            with_own_prompt.append((prompt.ids, lm.continuation_ids(prompt, answer)))
            with_other_prompt.append((other.ids, lm.continuation_ids(other, answer)))
        after_own = lm.answer_token_loss(with_own_prompt, batch_size=SIGNAL_BATCH)
        after_other = lm.answer_token_loss(with_other_prompt, batch_size=SIGNAL_BATCH)
        gains.append(after_other - after_own)
        values = torch.cat(gains).double().numpy()
        names = [example.question_id for example in examples[: len(values)]]
        estimate = difference(values, names)
    assert estimate is not None, "there are examples"
    return estimate


def has_no_signal(gain: Estimate) -> bool:
    """Whether the gain from the prompt is surely below :data:`NEGLIGIBLE_NATS`."""
    return gain.ci_high < NEGLIGIBLE_NATS
