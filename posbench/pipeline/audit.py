"""Whether a finished run is correct: check all of its rows and tables, and generate a share of its replies again.

A run batches prompts, shares their prefills between methods, shards and resumes. None of that may change a reply, so
some are made again the plain way, each prompt alone and nothing shared. All else that the stage evaluate wrote follows
from the config and the replies, and is made again in full: the list of rows, each row's description of its example, its
scores, the digests of prompts and of model and code, and the tables.
"""

from __future__ import annotations

import copy
import io
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.late import pd
from posbench.methods import Method
from posbench.model.encode import Encoded
from posbench.model.lm import LM
from posbench.pipeline.stages import evaluate
from posbench.run.base import Run
from posbench.run.folder import (
    AUDIT,
    EVALUATE_STAGE,
    PREDICTIONS,
    PROVENANCE,
    RunDir,
    as_json,
)
from posbench.run.plan import Subject
from posbench.run.proofs import (
    COMPUTATION,
    REQUEST,
    computation_digest,
    decoding_of,
    request_digest,
)
from posbench.run.replies import ReplyBatches
from posbench.run.reply_rows import (
    FIELDS_OF_EXAMPLE,
    FIELDS_OF_SCORE,
    row_of_reply,
    served_request_digest,
)
from posbench.stats.glance import noun_for
from posbench.tasks import Example
from posbench.tasks.base import num_questions, split_into_rounds

AUDITED_SHARE = 0.02
"""Share of the rows that is made again, unless another is asked for."""
MIN_ROWS = 20
TIE_NATS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}
"""Largest difference of the log-probabilities of two tokens that rounding may swap, by dtype."""


LISTED_FAULTS = 5
"""Faults that are named in a sentence."""
TABLE_TOLERANCE = 1e-6
"""Largest relative difference between recorded and recomputed numbers: libraries sum in other orders."""


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
    """The result of an audit.

    Attributes:
        rows: Rows that were made again.
        total: Rows of the run.
        ties: Replies that parted from the recorded ones where rounding decides between two tokens.
        differences: Rows that differ otherwise.
        dtype: Precision in which they were made again.
        faults: Parts of the run that do not follow from its config and replies, see :func:`find_faults`; None: not
            checked.
    """

    rows: int
    total: int
    ties: int
    differences: Sequence[Difference]
    dtype: str
    faults: Sequence[str] | None = None

    @property
    def words(self) -> str:
        """The result: the proven parts, the unproven ones, and the faults."""
        return " ".join(filter(None, [self._replies, self._whole]))

    @property
    def _whole(self) -> str:
        """Return the sentence on rows and tables: their faults, or that all of them follow from config and replies.

        It is empty where they were not checked (``faults`` is None).
        """
        if self.faults is None:
            return ""
        if self.faults:
            listed_faults = "; ".join(self.faults[:LISTED_FAULTS])
            num_unlisted = len(self.faults) - LISTED_FAULTS
            more = f"; and {num_unlisted} more" if num_unlisted > 0 else ""
            noun = noun_for(len(self.faults), "fault")
            return f"All rows and tables were checked: {len(self.faults)} {noun}: {listed_faults}{more}."
        text = (
            f"The {self.total} rows are those that the run planned; their fields, scores and digests, and the tables, "
            "were made again from config and replies: all are the same."
        )
        # The fields of every row were checked, but only a sample of replies was generated again.
        unproven = self.total - self.rows
        if unproven:
            text += f" Not proven: the other {unproven} replies themselves."
        return text

    @property
    def _replies(self) -> str:
        """Return the sentence on replies that were generated again: how many are the same, tie or differ.

        A tie differs from the recorded reply only where two tokens are so close that rounding decides.
        """
        if not self.dtype:
            return "No reply was made again: a server gave them."
        made = f"{self.rows} of {self.total} rows were made again, each prompt alone in {self.dtype}"
        if not self.ties and not self.differences:
            return f"{made}: all are the same."
        parts = [f"{self.rows - self.ties - len(self.differences)} are the same"]
        if self.ties:
            parts.append(f"{self.ties} part where rounding decides between two tokens")
        if self.differences:
            first = self.differences[0]
            # The gap between the two tokens' log-likelihoods; infinite where the replies differ otherwise.
            distance = "" if math.isinf(first.nats) else f", by {first.nats:.3g} nats"
            parts.append(
                f"{len(self.differences)} differ, first {first.method} {first.id} "
                f"({first.field}{distance})"
            )
        return f"{made}: {', '.join(parts)}."

    @property
    def facts(self) -> dict[str, Any]:
        """The result as an entry of ``provenance.json``: the sentences, counts of rows, and what differs."""
        return {
            "words": self.words,
            "rows": self.rows,
            "total": self.total,
            "ties": self.ties,
            "differ": [f"{d.method} {d.id}: {d.field}" for d in self.differences],
            "faults": self.faults,
        }


def audit_shards(run: Run) -> None:
    """Check the rows of a run that other processes made, by answering a sample of them in this process.

    The result is printed and recorded. Nothing happens for a served model, or where no prompts were evaluated.

    Raises:
        UserError: Rows differ.
    """
    if not run.model.in_process or not run.out.rows_without_error(PREDICTIONS):
        return
    audit = audit_rows(run, dtype_name(run.lm))
    record_audit(run.out, audit)
    run.console.print(audit.words)
    need_agreement(run.out, audit)


def dtype_name(lm: LM) -> str:
    """The precision of a model's weights, as ``float32``."""
    return str(lm.model.dtype).removeprefix("torch.")


def audit_rows(
    run: Run, made_in: str, share: float = AUDITED_SHARE, seed: int = 0
) -> Audit:
    """Make a random share of a run's replies again, and compare them with its rows.

    Args:
        run: The run, with the constants of its search. Its model may have another precision than the recorded one.
        made_in: The precision in which the rows were made.
        share: Share of the rows; :data:`MIN_ROWS` at least.
        seed: Of the random choice.

    Returns:
        Numbers of rows made again, of all rows and of ties, and the rows that differ.
    """
    methods = run.method.methods()
    examples = {example.id: example for example in run.evaluation}
    rows = [
        row
        for row in run.out.rows_without_error(PREDICTIONS)
        if row.get("method") in methods
        and row.get("id") in examples
        and "output" in row
    ]
    count = min(len(rows), max(MIN_ROWS, math.ceil(share * len(rows))))
    chosen = random.Random(seed).sample(rows, count)
    # Method by method, as each is applied anew.
    chosen.sort(key=lambda row: str(row["method"]))
    plain_run = _without_sharing(run)
    # Rounding may decide between tokens that are closer than this.
    bound = TIE_NATS.get(made_in, TIE_NATS["float32"])
    ties = 0
    differences = []
    with run.progress("audit", count) as advance:
        for row in chosen:
            subject = Subject(plain_run, row["method"], methods[row["method"]])
            example = examples[row["id"]]
            encoded = plain_run.prompts.encode([example])
            plan = ReplyBatches([subject], [example], encoded)
            (request,) = plan.order
            (plain_row,) = plan.answer([request])
            field = _first_difference(row, as_json(plain_row))
            # Fields that the row should not have.
            extra = sorted(
                row.keys() - plain_row.keys() - {*request.key, REQUEST, COMPUTATION}
            )
            if extra:
                difference = Difference(row["method"], row["id"], extra[0], math.inf)
                differences.append(difference)
            elif field:
                prompt = plan.asked_prompt(request).encoded
                nats = _distance(subject, prompt, row, plain_row)
                if nats > bound:
                    difference = Difference(row["method"], row["id"], field, nats)
                    differences.append(difference)
                elif row["output"] != plain_row["output"]:
                    ties += 1
            advance(1)
    return Audit(count, len(rows), ties, tuple(differences), dtype_name(run.lm))


def audit_run(run: Run, made_in: str, share: float, seed: int) -> Audit:
    """Audit a whole finished run.

    Args:
        run: The run, with the constants of its search and its model's identity. The precision may differ
            from the recorded one.
        made_in: The precision in which the rows were made.
        share: Share of the replies that are made again, see :func:`audit_rows`; a server's are not.
        seed: Of the random choice.
    """
    if not run.model.in_process:
        total = len(run.out.rows_without_error(PREDICTIONS))
        result = Audit(0, total, 0, (), "")
    else:
        result = audit_rows(run, made_in, share, seed)
    return replace(result, faults=tuple(find_faults(run)))


def find_faults(run: Run) -> list[str]:
    """Make all again that follows from the config of a finished run and its replies, and compare.

    Args:
        run: The run, as :func:`audit_run` takes it.

    Returns:
        A few words for each row that is missing or not part of the run, and for each field of a row and each file of
        the stage evaluate that does not follow from config and replies.
    """
    rows = run.out.rows(PREDICTIONS)
    methods = run.method.methods()
    examples = {example.id: example for example in run.evaluation}
    encoded = run.prompts.encode(run.evaluation)
    planned = [
        row
        for row in rows
        if row.get("method") in methods and row.get("id") in examples
    ]
    faults = _faults_of_keys(run, rows, list(methods))
    # The first computation of each method, decoding and model that a server reports.
    computations: dict[tuple[Any, ...], Any] = {}
    for row in planned:
        if "error" in row:
            continue
        if "output" not in row:
            faults.append(f"row {row['method']} {row['id']} has no output")
            continue
        example = examples[row["id"]]
        method = methods[row["method"]]
        prompt = encoded[example.id]
        asked = example
        if method.rewrites:
            asked = _asked_example(run, method, example, row)
            prompt = run.prompts.encode([asked])[example.id]
        expected = row_of_reply(run, asked, prompt, row)
        decoding = decoding_of(run.task, asked)
        if not run.model.in_process:
            expected[REQUEST] = served_request_digest(asked)
            # What the server computes with is unknown: rows with the same key must agree.
            key = (row["method"], decoding, str(row.get("server")))
            expected[COMPUTATION] = computations.setdefault(key, row.get(COMPUTATION))
        else:
            expected[REQUEST] = request_digest(prompt.ids, example.choices)
            expected[COMPUTATION] = computation_digest(run, method, decoding)
        expected = as_json(expected)
        lacking = [
            name
            for name in (*FIELDS_OF_EXAMPLE, *FIELDS_OF_SCORE)
            if name in row and name not in expected
        ]
        field = _first_difference(row, expected) or next(iter(lacking), "")
        if field:
            right = expected.get(field, "absent")
            what = f"{field} is {row.get(field)}, not {right}"
            faults.append(f"row {row['method']} {row['id']}: {what}")
    return faults + _faults_of_files(run, encoded, planned)


def _asked_example(run: Run, method: Method, example: Example, row: Row) -> Example:
    """An example as a method rewrites it; where that takes the model, as the row says that it did."""
    if method.rewrites_by_text:
        (asked,) = run.prompts.rewrite([example], method)
        return asked
    text = str(row.get("rewritten_prompt", example.prompt))
    return replace(example, prompt=text, items=(), original=example)


def _faults_of_keys(run: Run, rows: Sequence[Row], methods: Sequence[str]) -> list[str]:
    """Return a sentence for each row (method and example) that a run lacks, has twice, or did not plan.

    A run that stopped at a budget asked fewer questions, each under all methods and at all gold positions.
    """
    rows_by_key = Counter((row.get("method"), row.get("id")) for row in rows)
    questions = split_into_rounds(run.evaluation, 1)
    stopped = run.out.stage(EVALUATE_STAGE).get("stopped")
    faults = []
    # ``stopped`` holds the numbers of questions asked and planned.
    if stopped:
        questions = [
            examples
            for examples in questions
            if any(rows_by_key[method, e.id] for method in methods for e in examples)
        ]
        asked = num_questions(example for group in questions for example in group)
        if asked != stopped[0]:
            faults.append(f"rows of {asked} questions, where {stopped[0]} were asked")
    planned = {
        (method, example.id)
        for examples in questions
        for example in examples
        for method in methods
    }
    for method, name in sorted(planned - rows_by_key.keys()):
        faults.append(f"row {method} {name} is missing")
    for key, count in rows_by_key.items():
        row_name = f"row {key[0]} {key[1]}"
        if key not in planned:
            faults.append(f"{row_name} is none that the run planned")
        elif count > 1:
            faults.append(f"{row_name} stands {count} times")
    return faults


def _faults_of_files(
    run: Run, encoded: Mapping[str, Encoded], rows: Sequence[Row]
) -> list[str]:
    """Return a sentence for each file of the stage evaluate that is not what its rows give.

    Args:
        run: The run.
        encoded: Its prompts as tokens, by the example's id.
        rows: Rows of ``predictions.jsonl``.
    """
    answered = [row for row in rows if "error" not in row and "output" in row]
    remade_files = evaluate.files_of_rows(run, encoded, answered)
    faults = []
    for name in {*remade_files, *evaluate.SCORE_TABLES}:
        file = run.out.path / name
        text = file.read_text("utf-8") if file.is_file() else None
        remade = remade_files.get(name)
        # Both are None where a table is neither there nor follows from the rows.
        if text == remade:
            continue
        if text is None:
            faults.append(f"{name} is missing")
        elif remade is None:
            faults.append(f"{name} does not follow from the rows")
        elif not name.endswith(".csv"):
            faults.append(f"{name} is not that of the rows")
        else:
            cell = _differing_cell(text, remade)
            if cell:
                faults.append(f"{name} is not that of the rows: {cell}")
    return sorted(faults)


def _differing_cell(text: str, expected: str) -> str:
    """Describe the first cell in which two tables (texts of CSV files) differ by more than rounding.

    It is empty where they agree.
    """
    table, expected_table = (
        pd.read_csv(io.StringIO(each), dtype=str, keep_default_na=False)
        for each in (text, expected)
    )
    if list(table) != list(expected_table) or len(table) != len(expected_table):
        return "it has other rows or columns"
    for number in range(len(table)):
        for column in table:
            value, wanted = table[column][number], expected_table[column][number]
            if value != wanted and not _are_close(value, wanted):
                return f"{column} of row {number + 1} is {value}, not {wanted}"
    return ""


def _are_close(first: str, second: str) -> bool:
    """Whether two cells are numbers that rounding may have parted."""
    try:
        numbers = float(first), float(second)
    except ValueError:
        return False
    return math.isclose(*numbers, rel_tol=TABLE_TOLERANCE, abs_tol=TABLE_TOLERANCE)


def _without_sharing(run: Run) -> Run:
    """The run with each prompt in a batch of its own, and nothing shared; the model is the same."""
    plain_run = copy.copy(run)
    plain_run.lm = run.lm
    plain_run.runtime = replace(run.runtime, share=None, batch_size=1)
    vars(plain_run).pop("prompts", None)
    return plain_run


def _first_difference(recorded: Row, plain: Row) -> str:
    """The first field of a row that differs from the recorded one; empty if none does."""
    for field, value in plain.items():
        if recorded.get(field) != value:
            return field
    return ""


def _distance(subject: Subject, prompt: Encoded, recorded: Row, plain: Row) -> float:
    """Return how far two replies to a prompt are apart in nats; infinite where rounding cannot explain it.

    That is the difference of log-likelihoods of choices, or of the first tokens in which generated replies differ.

    Args:
        subject: The run that asks, and the method under which both replies were given.
        prompt: The prompt.
        recorded: The row of the run.
        plain: The row as it came out now.
    """
    of_example = {n: plain[n] for n in FIELDS_OF_EXAMPLE if n in plain}
    if _first_difference(recorded, as_json(of_example)):
        return math.inf  # another prompt was asked
    if "loglikelihoods" in plain:
        likelihoods = np.subtract(recorded["loglikelihoods"], plain["loglikelihoods"])
        return float(np.abs(likelihoods).max())
    lm = subject.run.lm
    end = lm.need_tokenizer().eos_token_id or 0
    replies = [
        [
            *lm.continuation_ids(
                prompt,
                f"{row.get('thinking', '')}{row.get('quote', '')}{row['output']}",
            ),
            end,
        ]
        for row in (recorded, plain)
    ]
    num_same = _num_tokens_in_common(*replies)
    # One reply is the beginning of the other, which no tie of two tokens explains.
    if num_same == min(map(len, replies)):
        return math.inf
    with subject.method.applied(lm):
        branches = [reply[: num_same + 1] for reply in replies]
        ((first_score, second_score),) = lm.continuations([prompt.ids], [branches])
    return abs(first_score[0] - second_score[0])


def _num_tokens_in_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens in the common prefix of two replies."""
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
    """Refuse a run whose audit found faults, or replies that differ from those to each prompt alone.

    Args:
        out: The run's folder.
        audit: The result of its audit.

    Raises:
        UserError: Rows differ, or there are faults.
    """
    if audit.differences:
        allowed = "rows that each prompt gives alone"
        hint = f"remove {out.path} and run it again, with runtime.share=null"
        raise UserError("audit", audit.words, allowed, hint)
    if audit.faults:
        allowed = "rows and tables that follow from config and replies"
        hint = (
            f"remove {out.path} and run it again; or restore the model, the data and the version of posbench "
            "that made it"
        )
        raise UserError("audit", audit.words, allowed, hint)
