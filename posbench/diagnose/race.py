"""A race of remedies: the loss of the right answer on calibration prompts, under each method."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from posbench.diagnose.outcome import Remedy
from posbench.errors import UserError
from posbench.files.atomic import Row, short_hash
from posbench.measure.replies import encode_with_answer
from posbench.methods import Method
from posbench.methods.choice import MethodChoice
from posbench.methods.unmodified import Unmodified
from posbench.model.lm import LM
from posbench.run.folder import RunDir
from posbench.run.prompts import rewrite_examples
from posbench.run.proofs import COMPUTATION, REQUEST, request_digest
from posbench.run.rows import ResumableRows, Schedule
from posbench.stats.bootstrap import Estimate, difference
from posbench.stats.findings import ALPHA
from posbench.stats.frames import UNMODIFIED
from posbench.studies.bias_source import SMALLEST_GAP_SHARE
from posbench.tasks import Example, Task

FIRST_ROUND = 12
"""Prompts after which the worse half of the methods is left out."""
RACE_BATCH = 4
"""Prompts of a round, which every method reads in one batch."""
RACE_FILE = "race.jsonl"
QUESTION_FIRST = "question_first_and_last"
"""The change of the prompt that is raced together with the best method: it costs hardly any tokens."""


def applicable_methods(
    lm: LM,
    choices: Mapping[str, MethodChoice],
    examples: Sequence[Example],
    typed: bool = False,
    changes_raced: bool = False,
) -> tuple[dict[str, Method], list[Remedy]]:
    """Build the methods that can run on a model, and give the reasons against the others.

    Args:
        lm: The model.
        choices: Every method by name, with the constants that are known.
        examples: The prompts of the race.
        typed: Whether the user asks about one method, which may change the prompt alone.
        changes_raced: Whether the changes of the prompt had a race of their own.

    Returns:
        The methods, and the reason for each one left out.
    """
    longest = max(examples, key=lambda example: len(example.prompt))
    prompt, answer = encode_with_answer(lm, longest)
    num_tokens = len(prompt) + len(answer)
    methods: dict[str, Method] = {}
    left_out = []
    for name, choice in choices.items():
        if issubclass(choice.cls, Unmodified):
            continue
        try:
            method = choice.build()
            method.check(lm)
            note = ""
            if choice.changes_prompts_alone and not typed:
                note = "a change of the prompt: posbench study=order"
                if changes_raced:
                    note = "a change of the prompt, raced above"
            elif choice.reads_items or not method.rewrites_by_text:
                # They take ten times as long and more: they would take the time of all others.
                note = (
                    "it works on the items, slowly: posbench study=remedies measures it"
                )
            if note:
                left_out.append(Remedy(name, note=note))
                continue
            reason = method.without_effect(lm, num_tokens)
            if reason:
                note = f"it {reason}; these have up to {num_tokens} tokens"
                left_out.append(Remedy(name, note=note))
                continue
        except UserError as error:
            left_out.append(Remedy(name, note=f"{error.field}: {error.allowed}"))
            continue
        methods[name] = method
    return methods, left_out


class Heat(NamedTuple):
    """A prompt under a method; all methods of a round read the same prompts."""

    method: str
    example: Example
    round: int


class Heats(Schedule):
    """The rounds of a race: the worse half of the methods drops out after the first prompts.

    Args:
        out: The folder of the rows.
        names: The methods, the unmodified model among them.
        is_over: Whether no further prompts may be read; asked before each round but the first.
    """

    def __init__(
        self, out: RunDir, names: Sequence[str], is_over: Callable[[], bool]
    ) -> None:
        self._out = out
        self._names = names
        self._is_over = is_over
        self._kept = set(names)

    def round_of(self, batch: Sequence[Heat]) -> int:
        """See :meth:`posbench.run.rows.Schedule.round_of`."""
        return batch[0].round

    def ends_before(self, number: int) -> bool:
        """See :meth:`posbench.run.rows.Schedule.ends_before`."""
        if number and self._is_over():
            return True
        if number * RACE_BATCH >= FIRST_ROUND and len(self._names) > 4:
            self._kept = self._better_half()
        return False

    def admits(self, batch: Sequence[Heat]) -> bool:
        """See :meth:`posbench.run.rows.Schedule.admits`."""
        return batch[0].method in self._kept

    def _better_half(self) -> set[str]:
        """The unmodified model, and the half of the methods with the lower loss, two or more."""
        totals = dict.fromkeys(self._names, 0.0)
        for row in self._out.rows_without_error(RACE_FILE):
            # A killed race may have rows of a later one, of methods together.
            if row["round"] * RACE_BATCH < FIRST_ROUND and row["method"] in totals:
                totals[row["method"]] += row["loss"]
        names = sorted(totals.keys() - {UNMODIFIED}, key=lambda n: (totals[n], n))
        return {UNMODIFIED, *names[: max(len(names) // 2, 2)]}


def race(
    lm: LM,
    task: Task,
    methods: Mapping[str, Method],
    examples: Sequence[Example],
    rows: ResumableRows,
    is_over: Callable[[], bool],
) -> list[Remedy]:
    """Compare methods by the loss of the right answer; the worse half drops out after the first prompts.

    Args:
        lm: The model.
        task: The task that asks the prompts.
        methods: The methods by name; one that rewrites prompts reads them as it rewrites them.
        examples: Calibration prompts.
        rows: The files of rows, from which a killed race resumes.
        is_over: Whether no further prompts may be read; asked after each round.

    Returns:
        The methods, the one with the largest gain first. A gain is paired over the prompts that both read.
    """
    contestants: dict[str, Method] = {UNMODIFIED: Unmodified(), **methods}
    as_given = {e.id: encode_with_answer(lm, e) for e in examples}
    # By method, its prompts with their answers, by the id of their example.
    encoded = dict.fromkeys(contestants, as_given)
    for name, method in contestants.items():
        if method.rewrites:
            rewritten = rewrite_examples(lm, task, examples, method)
            encoded[name] = {e.id: encode_with_answer(lm, e) for e in rewritten}
    batches = [
        [
            Heat(name, e, start // RACE_BATCH)
            for e in examples[start : start + RACE_BATCH]
        ]
        for start in range(0, len(examples), RACE_BATCH)
        for name in contestants
    ]

    def compute(batch: Sequence[Heat]) -> list[Row]:
        began = time.monotonic()
        with contestants[batch[0].method].applied(lm):
            pairs = [encoded[heat.method][heat.example.id] for heat in batch]
            losses = lm.answer_token_loss(pairs, batch_size=len(batch))
        seconds = (time.monotonic() - began) / len(batch)
        return [
            {"round": heat.round, "loss": loss, "seconds": seconds}
            for heat, loss in zip(batch, losses.tolist(), strict=True)
        ]

    def proof(heat: Heat) -> Row:
        prompt_ids, answer_ids = encoded[heat.method][heat.example.id]
        return {
            REQUEST: request_digest([*prompt_ids, *answer_ids], ()),
            COMPUTATION: short_hash(repr(contestants[heat.method])),
        }

    race_rows = rows.complete(
        RACE_FILE,
        "remedies",
        batches,
        lambda heat: {"method": heat.method, "id": heat.example.id},
        compute,
        proof=proof,
        schedule=Heats(rows.out, list(contestants), is_over),
    )
    # The best of several looks better than it is: the intervals hold for all methods together.
    alpha = ALPHA / max(len(methods), 1)
    remedies = [_remedy(name, race_rows, examples, alpha) for name in methods]
    return sorted(remedies, key=_rank)


def lead_over(
    first: str,
    second: str,
    rows: Sequence[Row],
    examples: Sequence[Example],
    alpha: float = ALPHA,
) -> Estimate:
    """Return by how much the loss of one method lies below that of another, in nats per answer token.

    It is paired over the prompts that both read.

    Args:
        first: The one.
        second: The other.
        rows: The rows of their race.
        examples: The prompts of the race.
        alpha: One minus the level of the interval.
    """
    losses: dict[str, dict[str, float]] = {first: {}, second: {}}
    for row in rows:
        if row["method"] in losses:
            losses[row["method"]][row["id"]] = row["loss"]
    both = [e for e in examples if e.id in losses[first] and e.id in losses[second]]
    falls = [losses[second][e.id] - losses[first][e.id] for e in both]
    questions = [e.question_id for e in both]
    return difference(np.array(falls), questions, alpha=alpha)


def _remedy(
    name: str, rows: Sequence[Row], examples: Sequence[Example], alpha: float
) -> Remedy:
    """The gain of a method on the prompts that it read, and its time divided by the unmodified model's.

    Args:
        name: The method.
        rows: The rows of its race.
        examples: The prompts of the race.
        alpha: One minus the level of the gain's interval.
    """
    unmodified = {row["id"]: row for row in rows if row["method"] == UNMODIFIED}
    ratios = [
        row["seconds"] / unmodified[row["id"]]["seconds"]
        for row in rows
        if row["method"] == name and row["id"] in unmodified
    ]
    gain = lead_over(name, UNMODIFIED, rows, examples, alpha)
    return Remedy(name, gain, round(median(ratios), 2))


def _rank(remedy: Remedy) -> tuple[int, float]:
    """Sort key of a remedy: by the prompts it read, then by gain, largest first."""
    assert remedy.gain is not None
    return -remedy.gain.n, -remedy.gain.value


def winner_of(remedies: Sequence[Remedy]) -> str:
    """Name of the method with the largest gain surely above zero; empty if there is none."""
    for remedy in remedies:
        if remedy.gain and remedy.gain.ci_low > 0:
            return remedy.name
    return ""


def hopeful_methods(remedies: Sequence[Remedy], gap: Estimate | None) -> list[str]:
    """Names of the methods whose gain may still matter, the best first.

    Args:
        remedies: The methods of the race.
        gap: Loss at the worst gold position minus the loss at the best one, in nats per answer token. A gain matters
            if it closes :data:`SMALLEST_GAP_SHARE` of the gap; without a sure gap, every gain does.
    """
    least = SMALLEST_GAP_SHARE * gap.value if gap and gap.ci_low > 0 else 0.0
    return [r.name for r in remedies if r.gain and r.gain.ci_high > least]
