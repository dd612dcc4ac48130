"""Rows of a run made again the plain way, each prompt alone and nothing shared: do they say the same?

A run batches prompts, shares their prefills between methods, shards and resumes. None of that may change a reply.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.model.encode import Encoded
from posbench.model.lm import LM
from posbench.run.base import Run
from posbench.run.batch_plan import Subject
from posbench.run.folder import AUDIT, PREDICTIONS, PROVENANCE, RunDir, as_json
from posbench.run.replies import plan_replies

SHARE = 0.02
"""Share of the rows that is made again, unless another is asked for."""
MIN_ROWS = 20
TIE_NATS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}
"""How far the log-probabilities of two tokens lie apart at most that rounding may exchange, by dtype."""


@dataclass(frozen=True)
class Difference:
    """A row that came out differently.

    Attributes:
        method: Its method.
        id: Its prompt.
        field: The first field that differs.
        nats: Between the two replies, at the first token that differs, or between the log-likelihoods of a choice.
    """

    method: str
    id: str
    field: str
    nats: float


@dataclass(frozen=True)
class Audit:
    """What came of it.

    Attributes:
        rows: Rows that were made again.
        total: Rows of the run.
        ties: Replies that parted from the recorded ones where rounding decides between two tokens.
        differences: Rows that differ otherwise.
        dtype: Precision in which they were made again.
    """

    rows: int
    total: int
    ties: int
    differences: Sequence[Difference]
    dtype: str

    @property
    def words(self) -> str:
        """The result in a sentence."""
        made = f"{self.rows} of {self.total} rows were made again, each prompt alone in {self.dtype}"
        if not self.ties and not self.differences:
            return f"{made}: all are the same."
        parts = [f"{self.rows - self.ties - len(self.differences)} are the same"]
        if self.ties:
            parts.append(f"{self.ties} part where rounding decides between two tokens")
        if self.differences:
            first = self.differences[0]
            parts.append(
                f"{len(self.differences)} differ, first {first.method} {first.id} "
                f"({first.field}, by {first.nats:.3g} nats)"
            )
        return f"{made}: {', '.join(parts)}."

    @property
    def facts(self) -> dict[str, Any]:
        """The result for the provenance."""
        return {
            "words": self.words,
            "rows": self.rows,
            "total": self.total,
            "ties": self.ties,
            "differ": [f"{d.method} {d.id}: {d.field}" for d in self.differences],
        }


def audit_shards(run: Run) -> None:
    """Audit the rows that other processes made for a run in this process; nothing where none were evaluated.

    Raises:
        UserError: Rows differ.
    """
    if run.model.base_url or not run.out.rows_without_error(PREDICTIONS):
        return
    audit = audit_rows(run, dtype_name(run.lm))
    record_audit(run.out, audit)
    run.console.print(audit.words, soft_wrap=True, markup=False)
    need_agreement(run.out, audit)


def dtype_name(lm: LM) -> str:
    """The precision of a model's weights, as ``float32``."""
    return str(lm.model.dtype).removeprefix("torch.")


def audit_rows(run: Run, made_in: str, share: float = SHARE, seed: int = 0) -> Audit:
    """Make a random share of a run's replies again, and compare them with its rows.

    Args:
        run: The run, with what its search found. Its model may have another precision than the one before.
        made_in: The precision in which the rows were made.
        share: Share of the rows; :data:`MIN_ROWS` at least.
        seed: Of the random choice.

    Returns:
        How many rows agree.
    """
    rows = run.out.rows_without_error(PREDICTIONS)
    count = min(len(rows), max(MIN_ROWS, math.ceil(share * len(rows))))
    chosen = random.Random(seed).sample(rows, count)
    # Method by method, as each is applied anew.
    chosen.sort(key=lambda row: str(row["method"]))
    plain_run = _without_sharing(run)
    methods = run.method.methods()
    examples = {example.id: example for example in run.evaluation}
    bound = TIE_NATS.get(made_in, TIE_NATS["float32"])
    ties = 0
    differences = []
    with run.progress("audit", count) as advance:
        for row in chosen:
            subject = Subject(plain_run, row["method"], methods[row["method"]])
            example = examples[row["id"]]
            encoded = plain_run.prompts.encode([example])
            plan, compute = plan_replies([subject], encoded, [example])
            (request,) = plan.order
            (plain_row,) = compute([request])
            field = _first_difference(row, as_json(plain_row))
            if field:
                prompt = plan.asked_prompt(request).encoded
                nats = _distance(subject, prompt, row, plain_row)
                if nats > bound:
                    difference = Difference(row["method"], row["id"], field, nats)
                    differences.append(difference)
                elif row["output"] != plain_row["output"]:
                    ties += 1
            advance(1)
    return Audit(count, len(rows), ties, tuple(differences), dtype_name(run.lm))


def _without_sharing(run: Run) -> Run:
    """The run with each prompt in a batch of its own, and nothing shared; the model is the same."""
    plain_run = copy.copy(run)
    plain_run.lm = run.lm
    plain_run.runtime = replace(run.runtime, share=None, batch_size=1)
    vars(plain_run).pop("prompts", None)
    return plain_run


def _first_difference(recorded: Row, plain: Row) -> str:
    """The first field of a row that another value was recorded of; empty where there is none."""
    for field, value in plain.items():
        if recorded.get(field) != value:
            return field
    return ""


def _distance(subject: Subject, prompt: Encoded, recorded: Row, plain: Row) -> float:
    """How far apart two replies to a prompt are, in nats; infinite where rounding cannot have parted them.

    Args:
        subject: The run that asks, and the method under which both replies were given.
        prompt: The prompt.
        recorded: The row of the run.
        plain: The row as it came out now.
    """
    reply_fields = {
        "output",
        "thinking",
        "is_thinking",
        "finish",
        "scores",
        "outcome",
        "reason",
        "loglikelihoods",
    }
    request = {name: plain[name] for name in plain.keys() - reply_fields}
    if _first_difference(recorded, as_json(request)):
        return math.inf  # another prompt was asked
    if "loglikelihoods" in plain:
        likelihoods = np.subtract(recorded["loglikelihoods"], plain["loglikelihoods"])
        return float(np.abs(likelihoods).max())
    lm = subject.run.lm
    end = lm.need_tokenizer().eos_token_id or 0
    replies = [
        [*lm.continuation_ids(prompt, f"{row.get('thinking', '')}{row['output']}"), end]
        for row in (recorded, plain)
    ]
    num_same = _num_tokens_in_common(*replies)
    if num_same == min(map(len, replies)):
        return math.inf
    with subject.method.applied(lm):
        branches = [reply[: num_same + 1] for reply in replies]
        ((first_score, second_score),) = lm.continuations([prompt.ids], [branches])
    return abs(first_score[0] - second_score[0])


def _num_tokens_in_common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two replies begin with in common."""
    count = 0
    for token, other in zip(first, second, strict=False):
        if token != other:
            break
        count += 1
    return count


def record_audit(out: RunDir, audit: Audit) -> None:
    """Write the result to the provenance of a run."""
    out.write_facts(PROVENANCE, {**out.facts(PROVENANCE), AUDIT: audit.facts})


def need_agreement(out: RunDir, audit: Audit) -> None:
    """Refuse a run some of whose rows are not what its prompts give alone.

    Raises:
        UserError: Rows differ.
    """
    if audit.differences:
        allowed = "rows that each prompt gives alone"
        hint = f"remove {out.path} and run it again, with runtime.share=null"
        raise UserError("audit", audit.words, allowed, hint)
