"""What a stage asks: every example under every method, in batches that share prefills where they can."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.late import torch
from posbench.measure.replies import room
from posbench.methods import Method
from posbench.model.encode import Encoded
from posbench.model.lm import LM
from posbench.model.prefix import Prefix
from posbench.model.store import (
    Store,
    batches,
    fed,
    grouped,
    layout,
    obstacle,
    token_bytes,
)
from posbench.run.base import Run, out_of_memory
from posbench.run.cost import Work
from posbench.run.folder import RunDir
from posbench.run.parts import gather
from posbench.run.runtime import Runtime
from posbench.stats.frames import UNMODIFIED
from posbench.tasks import Example

log = logging.getLogger(__name__)

Plan = Callable[[Sequence[Example], int | None], list[list[Example]]]
"""Examples in batches of at most so many tokens (None: as the runtime wants them)."""

Compute = Callable[[Sequence["Ask"]], list[Row]]
"""The rows of a batch, without what identifies them."""

BATCHES = 2
"""A group has at most the tokens of so many batches: a killed run repeats one group's prefill, and groups are
what processes share out."""


class Subject(NamedTuple):
    """A method under test in a run; its rows go to the run's folder under this name."""

    run: Run
    name: str
    method: Method


def subjects(runs: Sequence[Run]) -> list[Subject]:
    """The methods of runs that differ in them alone; the unmodified model is the first one's, from which the
    others copy."""
    every = [Subject(run, *each) for run in runs for each in run.methods().items()]
    return [each for each in every if each.run is runs[0] or each.name != UNMODIFIED]


class Ask(NamedTuple):
    """An example under a method."""

    subject: Subject
    example: Example
    group: int = 0  # asks of one group share a prefill, and belong to one process

    @property
    def key(self) -> dict[str, str]:
        """What tells its row from others."""
        return {"method": self.subject.name, "id": self.example.id}


class Group(NamedTuple):
    """Examples that share a prefill, what they are prefilled under, and the methods that go on from there."""

    examples: Sequence[Example]
    under: Method | None  # None: nothing is shared
    methods: Sequence[Method]


@dataclass
class Asks:
    """Examples under methods, batch by batch, each of one method."""

    lm: LM
    runtime: Runtime
    encoded: Mapping[str, Encoded]
    batches: list[list[Ask]] = field(default_factory=list)
    order: list[Ask] = field(
        default_factory=list
    )  # as rows stand in a file: method by method
    said: list[str] = field(default_factory=list)  # what shares nothing, and why
    asked: int = 0  # prompt tokens of the batches so far
    _groups: list[Group] = field(default_factory=list)
    _store: tuple[int, Store | None] = (-1, None)  # the group that is prefilled
    _prefix: tuple[list[str], Prefix | None] = ([], None)  # the batch that is gathered

    @classmethod
    def of(
        cls,
        subjects: Sequence[Subject],
        examples: Sequence[Example],
        encoded: Mapping[str, Encoded],
        plan: Plan,
    ) -> Asks:
        """Plan a stage of a run, or of several that differ in their methods alone.

        The batches of a method depend on examples, model and runtime alone, so that a resumed run, and one
        that shares with others, forms the same ones.
        """
        run = subjects[0].run
        asks = cls(run.lm, run.runtime, encoded)
        kinds = dict[str, list[Subject]]()
        groups, most = asks._shared(examples)
        for number, each in enumerate(subjects):
            under = each.method.prefill() if groups else None
            kinds.setdefault(repr(under or number), []).append(each)
            asks.order += [
                Ask(each, e) for batch in plan(examples, None) for e in batch
            ]
        for alike in kinds.values():
            under = alike[0].method.prefill() if groups else None
            if groups and not under:
                asks.said.append(
                    f"{alike[0].name} reads each prompt as one, and shares no prefill"
                )
            for members in groups if under else plan(examples, None):
                number = len(asks._groups)
                asks._groups.append(
                    Group(members, under, [each.method for each in alike])
                )
                parts = plan(members, most) if under else [members]
                asks.batches += [
                    [Ask(each, e, number) for e in part]
                    for part in parts
                    for each in alike
                ]
        return asks

    def _shared(
        self, examples: Sequence[Example]
    ) -> tuple[list[list[Example]], int | None]:
        """Groups of examples that share a prefill, none where that cannot be, and the tokens of a batch."""
        share = self.runtime.share
        tokens = self.runtime.batch_tokens
        why = obstacle(self.lm.model) if share and examples else ""
        if why:
            self.said.append(f"{self.lm.name} shares no prefill: {why}")
        if why or not share or not examples:
            return [], None
        rows = [self.encoded[e.id].ids[:-1] for e in examples]
        room = self.runtime.shared_bytes // token_bytes(self.lm)
        longest = max(map(len, rows)) + 1
        batch = max(min(tokens or room, room // 2), longest)
        if room - batch < longest:
            enough = -(-2 * longest * token_bytes(self.lm) // 2**20)
            held = f"runtime.share={share} is too small for the longest prompt, set {enough}MiB or more"
            self.said.append(f"prompts share no prefill: {held}")
            return [], None
        capacity = min(room - batch, BATCHES * (tokens or room))
        return [
            [examples[i] for i in group] for group in grouped(rows, capacity)
        ], batch

    def work(self, stage: str, answered: bool) -> Work:
        """What all of it asks of the model, with or without replies, before any of it is done;
        :attr:`LM.read` will count as many computed tokens."""
        spans = list[tuple[int, int]]()
        held = list[int]()
        runtime = self.runtime
        for each in self._groups:
            rows = [self.encoded[e.id].ids[:-1] for e in each.examples if each.under]
            plan = layout(rows)
            held.append(plan.size)
            for part in batches(
                rows, plan.stretches, runtime.batch_size, runtime.batch_tokens
            ):
                spans += fed(rows, part)
        replies = list[tuple[int, int]]()
        memory = [(0, 0)]
        steps = 0
        for batch in self.batches:
            sizes = [len(self.encoded[ask.example.id].ids) for ask in batch]
            group = batch[0].group
            answers = [
                room(self.lm, ask.subject.run.task, ask.example) for ask in batch
            ]
            new = [
                n * (answered and not ask.example.choices)
                for n, ask in zip(answers, batch, strict=True)
            ]
            spans += [(size - 1 if held[group] else 0, size) for size in sizes]
            replies += [
                (size, max(more - 1, 0)) for size, more in zip(sizes, new, strict=True)
            ]
            memory.append((len(batch) * (max(sizes) + max(new)), held[group]))
            steps += max(new)
        batch_tokens, most_held = max(memory, key=sum)
        first, end = np.array(spans, np.int64).reshape(-1, 2).T
        length, more = np.array(replies, np.int64).reshape(-1, 2).T
        return Work(
            stage,
            prompts=len(replies),
            tokens=int(length.sum()),
            computed=int((end - first).sum()),
            pairs=int((end * (end + 1) - first * (first + 1)).sum()) // 2,
            steps=steps,
            fed=int(more.sum()),
            later=int((more * length + more * (more + 1) // 2).sum()),
            batch=batch_tokens,
            held=most_held,
        )

    @contextmanager
    def under(self, batch: Sequence[Ask]) -> Iterator[Prefix | None]:
        """The model under the method of a batch, and the prefill that the batch goes on from."""
        prefix = self._prefilled(batch)
        self.asked += sum(len(self.encoded[ask.example.id].ids) for ask in batch)
        with batch[0].subject.method.applied(self.lm):
            yield prefix

    def _prefilled(self, batch: Sequence[Ask]) -> Prefix | None:
        number = batch[0].group
        ids = [ask.example.id for ask in batch]
        group = self._groups[number]
        if self._store[0] != number:
            self._store = (-1, None)
            self._prefix = ([], None)  # one at a time in memory
            self._store = number, self._filled(group) if group.under else None
        store = self._store[1]
        if self._prefix[0] != ids:
            self._prefix = [], None
            place = {e.id: row for row, e in enumerate(group.examples)}
            self._prefix = (
                ids,
                store.prefix(self.lm, [place[name] for name in ids]) if store else None,
            )
        return self._prefix[1]

    def _filled(self, group: Group) -> Store | None:
        """The prefill of a group; None where the memory is too small for it."""
        told = [method.records() for method in group.methods]
        runtime = self.runtime
        channels, layers = (
            {each for one in side for each in one} for side in zip(*told, strict=True)
        )
        rows = [self.encoded[e.id].ids[:-1] for e in group.examples]
        store = Store(rows, sorted(channels), sorted(layers))
        assert group.under is not None
        try:
            with group.under.applied(self.lm):
                store.fill(self.lm, runtime.batch_size, runtime.batch_tokens)
            return store
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            log.warning(
                "out of memory with a prefill of %d tokens: not shared",
                store.layout.size,
            )
        del store
        torch.cuda.empty_cache()  # only behind the handler are its tensors free
        return None

    def complete(self, run: Run, file: str, stage: str, compute: Compute) -> list[Row]:
        """See :meth:`posbench.run.base.Run.complete`; says what prefills were shared."""
        key = lambda ask: ask.key  # noqa: E731
        gather(run.out, file)
        with self._told(run, stage):
            if run.main or run.helpers:
                rows = (
                    row
                    for row in (run.main or run.out).rows(file)
                    if "error" not in row
                )
                there = {(row["method"], row["id"]) for row in rows}
                lacking = [
                    each
                    for each in self.batches
                    if any((*a.key.values(),) not in there for a in each)
                ]
                mine = [
                    each
                    for each in lacking
                    if each[0].group % run.part.of == run.part.number
                ]
                if run.helpers and lacking:
                    said = (
                        "too few groups of prompts to share out: one process makes all"
                    )
                    if len(mine) < len(lacking):
                        run.helpers.start(run.found)
                        said = f"{run.part.of} processes share out the prompts; below, what this one makes"
                    run.console.print(f"{stage}: {said}", markup=False)
                made = run.complete(file, stage, mine, key, compute) if mine else []
                if run.main:
                    run.out.mark(file, done=True)
                    return made
            if run.helpers:
                run.helpers.wait(file)
                gather(run.out, file)
            return run.complete(file, stage, self.batches, key, compute, self.order)

    def fill(
        self,
        run: Run,
        file: str,
        stage: str,
        compute: Compute,
        out: Callable[[Ask], RunDir],
    ) -> None:
        """Compute the rows that files lack, and append each to the folder that ``out`` tells.

        What fails is left, with a word, to the run that it belongs to. A part of one run is completed.
        """
        if run.main:
            self.complete(run, file, stage, compute)
            return
        folders = {out(batch[0]).path: out(batch[0]) for batch in self.batches}
        names = list(self.batches[0][0].key) if self.batches else []
        known = {
            path: {
                tuple(row.get(name) for name in names)
                for row in folder.rows(file)
                if "error" not in row
            }
            for path, folder in folders.items()
        }

        def lacking(batch: Sequence[Ask]) -> list[Ask]:
            there = known[out(batch[0]).path]
            return [ask for ask in batch if tuple(ask.key.values()) not in there]

        todo = [batch for batch in self.batches if lacking(batch)]
        failed = set[int]()
        total = sum(map(len, self.batches))
        with (
            self._told(run, stage),
            run.progress(stage, total, total - sum(map(len, todo))) as advance,
        ):
            for batch in todo:
                if id(batch[0].subject) not in failed:
                    try:
                        made = compute(batch)
                        missing = lacking(batch)
                    except (RuntimeError, UserError) as error:
                        log.warning(
                            "%s: %s; left to a run of its own",
                            batch[0].subject.run.out.path.name,
                            error,
                        )
                        failed.add(id(batch[0].subject))
                    else:
                        rows = [
                            {**ask.key, **row}
                            for ask, row in zip(batch, made, strict=True)
                            if ask in missing
                        ]
                        out(batch[0]).append(file, rows)
                advance(len(batch))

    @contextmanager
    def _told(self, run: Run, stage: str) -> Iterator[None]:
        before = self.lm.read
        for line in self.said:
            run.console.print(f"{stage}: {line}", soft_wrap=True, markup=False)
        yield
        read = self.lm.read - before
        if read < self.asked:
            told = f"{stage}: {read:,} of {self.asked:,} prompt tokens computed, the others shared"
            run.console.print(told, soft_wrap=True, markup=False)
