"""Remedies against each other: the loss of the right answer on calibration prompts, under each method."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

from posbench.diagnose.outcome import Remedy
from posbench.errors import UserError
from posbench.measure.replies import encode_with_answer
from posbench.methods import Method
from posbench.methods.choice import MethodChoice
from posbench.methods.unmodified import Unmodified
from posbench.model.lm import LM
from posbench.stats.bootstrap import Estimate, difference
from posbench.stats.frames import UNMODIFIED
from posbench.studies.bias_source import SHARE
from posbench.tasks import Example

FIRST_ROUND = 12
"""Prompts after which the worse half of the methods is left out."""
BATCH = 4


def applicable_methods(
    lm: LM, choices: Mapping[str, MethodChoice]
) -> tuple[dict[str, Method], list[Remedy]]:
    """Build the methods that can run on a model, and say of the others why not.

    Args:
        lm: The model.
        choices: Every method by name, with the constants that are known.

    Returns:
        The methods, and those left out.
    """
    methods: dict[str, Method] = {}
    left_out = []
    for name, choice in choices.items():
        if issubclass(choice.cls, Unmodified):
            continue
        try:
            method = choice.build()
            method.check(lm)
            if method.rewrites or method.needs.items:
                left_out.append(Remedy(name, note="it reads or rewrites the prompt"))
                continue
        except UserError as error:
            left_out.append(Remedy(name, note=f"{error.field}: {error.allowed}"))
            continue
        methods[name] = method
    return methods, left_out


def race(
    lm: LM,
    methods: Mapping[str, Method],
    examples: Sequence[Example],
    is_over: Callable[[], bool],
    advance: Callable[[int], None],
) -> list[Remedy]:
    """Compare methods by the loss of the right answer; the worse half drops out after the first prompts.

    Args:
        lm: The model.
        methods: The methods by name.
        examples: Calibration prompts.
        is_over: Whether no further prompts may be read; asked after each batch.
        advance: Called with the number of prompts that were read.

    Returns:
        The methods, the one with the largest gain first. A gain is paired over the prompts that both read.
    """
    contestants: dict[str, Method] = {UNMODIFIED: Unmodified(), **methods}
    losses: dict[str, list[float]] = {name: [] for name in contestants}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for start in range(0, len(examples), BATCH):
        batch = examples[start : start + BATCH]
        if start and is_over():
            break
        if start == FIRST_ROUND and len(contestants) > 3:
            contestants = _better_half(contestants, losses)
        for name, method in contestants.items():
            batch_began = time.monotonic()
            with method.applied(lm):
                pairs = [encode_with_answer(lm, example) for example in batch]
                values = lm.answer_token_loss(pairs, batch_size=len(batch))
            losses[name] += values.tolist()
            times[name].append(time.monotonic() - batch_began)
        advance(len(batch) * len(contestants))
    unmodified = losses.pop(UNMODIFIED)
    unmodified_times = times.pop(UNMODIFIED)
    remedies = []
    for name, values in losses.items():
        clusters = [example.question_id for example in examples[: len(values)]]
        falls = np.subtract(unmodified[: len(values)], values)
        gain = difference(falls, clusters)
        ratios = [
            own / base for own, base in zip(times[name], unmodified_times, strict=False)
        ]
        remedies.append(Remedy(name, gain, round(median(ratios), 2)))
    return sorted(remedies, key=_rank)


def _better_half(
    contestants: Mapping[str, Method], losses: Mapping[str, Sequence[float]]
) -> dict[str, Method]:
    """The unmodified model, and the half of the methods with the lower loss, two or more."""
    names = sorted(
        (name for name in contestants if name != UNMODIFIED),
        key=lambda name: sum(losses[name]),
    )
    kept = names[: max(len(names) // 2, 2)]
    return {
        name: method
        for name, method in contestants.items()
        if name == UNMODIFIED or name in kept
    }


def _rank(remedy: Remedy) -> tuple[int, float]:
    """Those that read most prompts first, then by their gain."""
    assert remedy.gain is not None
    return -remedy.gain.n, -remedy.gain.value


def winner_of(remedies: Sequence[Remedy]) -> str:
    """Name of the method whose gain is surely above zero and the largest; empty where there is none."""
    for remedy in remedies:
        if remedy.gain and remedy.gain.ci_low > 0:
            return remedy.name
    return ""


def hopeful_methods(remedies: Sequence[Remedy], gap: Estimate | None) -> list[str]:
    """Names of the methods whose gain may still be one that matters, the best first.

    Args:
        remedies: The methods of the race.
        gap: Loss at the worst gold position minus that at the best one, in nats per answer token. What matters closes
            :data:`~posbench.studies.bias_source.SHARE` of it or more; None, or none for sure: any gain matters.
    """
    least = SHARE * gap.value if gap and gap.ci_low > 0 else 0.0
    return [r.name for r in remedies if r.gain and r.gain.ci_high > least]
