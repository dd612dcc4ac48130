"""The plan of a stage: every example under every method, as requests in an order, and the rows made from them."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.methods import Method
from posbench.model.encode import Encoded
from posbench.run.base import Run
from posbench.run.folder import RowKey, RunDir
from posbench.run.rows import Schedule
from posbench.run.shards import finished_keys, merge_rows
from posbench.run.stop import Stop, StopRule, StopRules
from posbench.stats.frames import UNMODIFIED
from posbench.tasks import Example
from posbench.tasks.base import num_questions, split_into_rounds

log = logging.getLogger(__name__)

Prompts = Mapping[str, Encoded]
"""Prompts by the id of their example."""


class Subject(NamedTuple):
    """A method under test in a run; its rows go to the run's folder under this name."""

    run: Run
    name: str
    method: Method


def subjects(runs: Sequence[Run]) -> list[Subject]:
    """Return the methods of runs that differ in them alone.

    The unmodified model is the first run's, from which the others copy.
    """
    compared = []
    for run in runs:
        for name, method in run.methods().items():
            if run is runs[0] or name != UNMODIFIED:
                compared.append(Subject(run, name, method))
    return compared


class Request(NamedTuple):
    """An example under a method.

    Attributes:
        subject: The method.
        example: The example.
        group: Number of the prefill group: its requests share a prefill, and belong to one process.
        round: Number of the round of questions: see :func:`posbench.tasks.base.split_into_rounds`.
    """

    subject: Subject
    example: Example
    group: int = 0
    round: int = 0

    @property
    def key(self) -> dict[str, str]:
        """The fields that identify its row."""
        return {"method": self.subject.name, "id": self.example.id}


def _request_key(request: Request) -> dict[str, str]:
    return request.key


def subjects_of(requests: Sequence[Request]) -> list[Subject]:
    """Return the methods of requests, in their order."""
    return list({id(r.subject): r.subject for r in requests}.values())


class AskedPrompt(NamedTuple):
    """An example as it is asked under a method, which may have rewritten its prompt."""

    example: Example
    encoded: Encoded


def _rewritten_prompts(
    subject: Subject, examples: Sequence[Example]
) -> dict[str, AskedPrompt]:
    """Rewrite the prompts of examples for a method; return them by the id of their example."""
    batcher = subject.run.prompts
    rewritten = batcher.rewrite(examples, subject.method)
    encoded = batcher.encode(rewritten)
    return {e.id: AskedPrompt(e, encoded[e.id]) for e in rewritten}


class Plan(ABC):
    """The requests of a stage of a run, or of several runs that differ in their methods alone.

    Args:
        subjects: The methods.
        examples: The examples, each of which is asked under each method.
        encoded: Prompts by the id of their example.
        round_questions: Questions of a round; None: the runtime's.

    Attributes:
        encoded: As given; a method that rewrites prompts asks others, see :meth:`asked_prompt`.
        batches: The requests, round by round, in batches that are answered together.
        rounds: The examples of each round of questions.
        workers: Batches that are answered at a time.
    """

    workers = 1

    def __init__(
        self,
        subjects: Sequence[Subject],
        examples: Sequence[Example],
        encoded: Prompts,
        round_questions: int | None = None,
    ) -> None:
        run = subjects[0].run
        round_questions = round_questions or run.runtime.round_questions
        self.encoded = encoded
        self.batches: list[list[Request]] = []
        self._subjects = subjects
        self._examples = examples
        self.rounds = split_into_rounds(examples, round_questions)
        self._question_of = {
            example.id: number
            for number, question in enumerate(split_into_rounds(examples, 1))
            for example in question
        }
        # An outline without weights cannot be asked how to rewrite a prompt.
        is_outline = run.model.in_process and run.lm.device.type == "meta"
        # Rewritten prompts, by id() of the subject, which has no hash, and by id of the example.
        self._rewritten: dict[int, dict[str, AskedPrompt]] = {}
        for subject in subjects:
            method = subject.method
            if method.rewrites and (method.rewrites_by_text or not is_outline):
                self._rewritten[id(subject)] = _rewritten_prompts(subject, examples)

    @cached_property
    def order(self) -> list[Request]:
        """The requests in the order of rows in a file."""
        return self.rows_in_order(self._examples)

    @abstractmethod
    def rows_in_order(self, examples: Sequence[Example]) -> list[Request]:
        """Return the requests of some examples in the order of rows, in however many rounds they are asked."""

    @abstractmethod
    def proof(self, request: Request) -> Mapping[str, Any]:
        """Return the proof of a request's row: digests of the request and of the computation."""

    @abstractmethod
    def answer(self, batch: Sequence[Request]) -> list[Row]:
        """Return the rows of a batch, one per request, in order, without the fields that identify them.

        Raises:
            RuntimeError: The batch failed: its rows carry the error, and the next run of the same command asks again.
            UserError: Something that the user can correct: nothing more is asked.
        """

    @abstractmethod
    def size(self, request: Request) -> float:
        """Return the size of a request, in a unit that its time is proportional to."""

    def asked_prompt(self, request: Request) -> AskedPrompt:
        """Return the example of a request as its method asks it."""
        rewritten = self._rewritten.get(id(request.subject))
        if rewritten:
            return rewritten[request.example.id]
        return AskedPrompt(request.example, self.encoded[request.example.id])

    def question_of(self, example: Example) -> int:
        """Return the number of an example's question, which is asked at several positions."""
        return self._question_of[example.id]

    def schedule(self, rules: StopRules, run: Run, file: str) -> Schedule:
        """Return the rounds in which the batches are asked, with their stop rules."""
        return Rounds(self, rules, run, file)

    def _announce(self, run: Run, stage: str) -> AbstractContextManager[None]:
        """Print notes for the user before and after the block in which the rows are made."""
        return nullcontext()

    def complete(
        self,
        run: Run,
        file: str,
        stage: str,
        rules: StopRules | None = None,
    ) -> list[Row]:
        """Compute every row that a file of the run lacks, and return all rows.

        Of a shard, only its own rows are computed and returned. Where a rule ends the run, the file keeps the rows of
        questions asked at all positions under all methods. See :meth:`posbench.run.rows.ResumableRows.complete`.

        Args:
            run: The run.
            file: Name of the JSON-lines file in its folder.
            stage: The stage.
            rules: Rules that may end the run; their :attr:`~StopRules.stop` then records where.
        """
        rules = rules or StopRules()
        proofs = self._proofs_of(run)
        merge_rows(run.out, file, proofs)
        with self._announce(run, stage):
            if run.main_out or run.workers:
                shard_rows = self._complete_shard(run, file, stage)
                if run.main_out:
                    run.out.mark(file, done=True)
                    return shard_rows
            if run.workers:
                run.workers.wait(file)
                merge_rows(run.out, file, proofs)
            rows = run.rows.complete(
                file,
                stage,
                self._of_unfinished_methods(run.out, file, proofs),
                _request_key,
                self.answer,
                self.order,
                self.proof,
                self.schedule(rules, run, file),
                self.workers,
            )
        if rules.ending and not rules.drops_methods:
            return self._keep_whole(rules, rules.ending, run, file, rows)
        return rows

    def _of_unfinished_methods(
        self, out: RunDir, file: str, proofs: Mapping[RowKey, Mapping[str, Any]]
    ) -> list[list[Request]]:
        """The batches without the methods that have all their rows, such as those copied from another run."""
        finished = finished_keys(out, file, proofs)
        missing = {name for name, id_ in proofs.keys() - finished}
        return [
            requests
            for batch in self.batches
            if (requests := [r for r in batch if r.subject.name in missing])
        ]

    def _keep_whole(
        self,
        rules: StopRules,
        ending: StopRule,
        run: Run,
        file: str,
        rows: Sequence[Row],
    ) -> list[Row]:
        """The rows of the questions that were asked in all, as a run of these alone orders them; the file keeps no
        others."""
        made = Counter(self._question_of[row["id"]] for row in rows)
        wanted = Counter(self._question_of[e.id] for e in self._examples)
        whole = {n for n in made if made[n] == len(self._subjects) * wanted[n]}
        kept = [e for e in self._examples if self._question_of[e.id] in whole]
        if ending.keeps_rounds:
            kept = self.examples_before(rules.ending_round)
        counts = (num_questions(kept), num_questions(self._examples))
        rules.stop = Stop(ending, *counts)
        by_key = {(row["method"], row["id"]): row for row in rows}
        kept_rows = [
            by_key[r.subject.name, r.example.id] for r in self.rows_in_order(kept)
        ]
        run.out.write_rows(file, kept_rows)
        return kept_rows

    def examples_before(self, number: int) -> list[Example]:
        """Return the examples of the rounds before one, in the order in which the task gives them."""
        ids = {example.id for made in self.rounds[:number] for example in made}
        return [example for example in self._examples if example.id in ids]

    def _proofs_of(self, run: Run) -> dict[RowKey, Mapping[str, Any]]:
        """Return the proofs of a run's rows, by method and id."""
        return {
            tuple(request.key.values()): self.proof(request)
            for request in self.order
            if request.subject.run is run
        }

    def _complete_shard(self, run: Run, file: str, stage: str) -> list[Row]:
        """Compute the rows of this process's shard, while the workers of the run make the others."""
        out = run.main_out or run.out
        proofs = self._proofs_of(run)
        finished = finished_keys(out, file, proofs)
        missing = [
            batch
            for batch in self._of_unfinished_methods(out, file, proofs)
            if any(tuple(request.key.values()) not in finished for request in batch)
        ]
        shard = run.shard
        own_batches = [
            batch for batch in missing if batch[0].group % shard.count == shard.index
        ]
        if run.workers and missing:
            message = "too few groups of prompts to share out: one process makes all"
            if len(own_batches) < len(missing):
                run.workers.start(run.method.found_parameters)
                message = f"{shard.count} processes share out the prompts; below, what this one makes"
            run.console.print(f"{stage}: {message}")
        if not own_batches:
            return []
        return run.rows.complete(
            file, stage, own_batches, _request_key, self.answer, proof=self.proof
        )

    def fill(self, run: Run, file: str, stage: str) -> None:
        """Compute the rows that the runs of the plan lack, and append each to the folder of its run.

        Failures are logged, and left to the runs of the failed rows. A shard of one run is completed.

        Args:
            run: The run that shows progress.
            file: Name of the JSON-lines file in each run's folder.
            stage: The stage.
        """
        if run.main_out:
            self.complete(run, file, stage)
            return
        finished = dict[Path, set[RowKey]]()
        for subject in self._subjects:
            out = subject.run.out
            if out.path not in finished:
                proofs = self._proofs_of(subject.run)
                finished[out.path] = finished_keys(out, file, proofs)

        def is_missing(request: Request) -> bool:
            row_key = tuple(request.key.values())
            return row_key not in finished[request.subject.run.out.path]

        pending = [batch for batch in self.batches if any(map(is_missing, batch))]
        failed = set[int]()
        total = sum(map(len, self.batches))
        num_pending = sum(map(len, pending))
        with (
            self._announce(run, stage),
            run.progress(stage, total, total - num_pending) as advance,
        ):
            for batch in pending:
                members = [s for s in subjects_of(batch) if id(s) not in failed]
                if members:
                    try:
                        rows = self.answer(batch)
                    except (RuntimeError, UserError) as error:
                        for subject in members:
                            name = subject.run.out.path.name
                            log.warning("%s: %s; left to a run of its own", name, error)
                            failed.add(id(subject))
                    else:
                        for subject in members:
                            missing_rows = [
                                {**request.key, **row, **self.proof(request)}
                                for request, row in zip(batch, rows, strict=True)
                                if request.subject is subject and is_missing(request)
                            ]
                            subject.run.out.append(file, missing_rows)
                advance(len(batch))


class Rounds(Schedule):
    """The rounds of a plan, asked until a rule ends them.

    Args:
        plan: The plan.
        rules: Rules that may end the run, checked before each round but the first.
        run: The run.
        file: Name of the JSON-lines file in its folder.
    """

    def __init__(self, plan: Plan, rules: StopRules, run: Run, file: str) -> None:
        self._plan = plan
        self._rules = rules
        self._run = run
        self._file = file
        self._sizes = defaultdict[int, float](float)
        for batch in plan.batches:
            for request in batch:
                self._sizes[request.round] += plan.size(request)

    def round_of(self, batch: Sequence[Request]) -> int:
        """See :meth:`posbench.run.rows.Schedule.round_of`."""
        return batch[0].round

    def ends_before(self, number: int) -> bool:
        """See :meth:`posbench.run.rows.Schedule.ends_before`."""

        def rows_before() -> list[Row]:
            ids = {example.id for example in self._plan.examples_before(number)}
            rows = self._run.out.rows(self._file)
            return [row for row in rows if row["id"] in ids]

        size = self._sizes[number]
        if number and self._rules.ends_before(size, rows_before):
            self._rules.ending_round = number
            return True
        self._rules.begin(size)
        return False

    def admits(self, batch: Sequence[Request]) -> bool:
        """See :meth:`posbench.run.rows.Schedule.admits`."""
        return not all(self._rules.leaves_out(r.subject.name) for r in batch)
