"""What a search, a study or a stage receives, and the one loop that makes work resumable."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from posbench.files.atomic import Row, digest
from posbench.files.hardware import peak_memory
from posbench.late import torch
from posbench.measure.replies import encode, plan
from posbench.methods import Method
from posbench.methods.choice import MethodChoice
from posbench.methods.unmodified import Unmodified
from posbench.model.encode import Encoded, Encoder
from posbench.model.endpoint import Endpoint, text_encoder
from posbench.model.lm import LM, batches
from posbench.model.load import ModelConfig, load
from posbench.run.folder import RunDir
from posbench.run.parts import Helpers, Part
from posbench.run.progress import Work, progress
from posbench.run.runtime import Runtime
from posbench.stats.frames import SERVED, UNMODIFIED
from posbench.tasks import Example, Task
from posbench.tasks.base import Split

log = logging.getLogger(__name__)

COUNTED = ("intervene", "evaluate")
"""Stages whose tokens a second are known: a search tries many candidates on one reading of a prompt, and a
study may feed the model by itself."""

Known = dict[tuple[Any, ...], Row]
"""Rows by the values of the fields that identify them."""

Key = Callable[[Any], Mapping[str, Any]]
Compute = Callable[[Sequence[Any]], list[Row]]


IN_A_ROW = 3
"""Failures in a row, for each thread, after which no more rows are tried."""


class IncompleteRun(Exception):
    """Some rows failed; they are recorded and retried by the next run of the same command."""


@dataclass
class Run:
    """One run."""

    model: ModelConfig
    task: Task
    choice: MethodChoice  # the method under test
    target: (
        MethodChoice | None
    )  # the choice, or its part, whose parameters the search finds; None: no search
    runtime: Runtime
    raw: Mapping[
        str, Any
    ]  # the resolved config as plain data: the groups that take part
    stages: Sequence[str]
    reference: Sequence[
        Row
    ]  # the paper's rows that apply, see :class:`posbench.stats.reference.Reference`
    console: Console
    identity: Mapping[
        str, Any
    ]  # model, weights, code and kernel: part of every stage key
    out: RunDir = field(
        init=False
    )  # the claimed folder; none yet while the fields are checked
    missing: str = ""  # what to do where a parameter of the method is missing
    standins: Mapping[str, Any] = field(
        default_factory=dict
    )  # for what the search stage will find
    found: dict[str, Any] | None = None  # what the search found
    every: Mapping[str, MethodChoice] = field(
        default_factory=dict
    )  # empty unless the study measures them all
    part: Part = field(
        default_factory=Part
    )  # of the rows that processes share out, what this one makes
    main: RunDir | None = None  # the run's own folder, where ``out`` is that of a part
    helpers: Helpers | None = None  # what makes the other parts
    _orders: dict[Path, list[tuple[Any, ...]]] = field(
        default_factory=dict
    )  # keys of the rows of each file
    _loops: dict[str, float] = field(
        default_factory=dict
    )  # what the loops of this stage took

    @cached_property
    def lm(self) -> LM:
        """The model, loaded when it is first needed."""
        where = {
            name: getattr(self.runtime, name)
            for name in ("device", "device_map", "max_memory")
        }
        if self.runtime.log_every and not self.console.is_terminal:
            self.console.print(Text(f"loading {self.model.name}"), soft_wrap=True)
        with self.console.status(Text(f"loading {self.model.name}")):
            return load(self.model, **where)

    @cached_property
    def endpoint(self) -> Endpoint:
        """The served model."""
        return Endpoint(self.model)

    @cached_property
    def encoder(self) -> Encoder:
        """What makes prompts: the model, or of a served one its tokenizer, if it is known."""
        return text_encoder(self.model) if self.model.base_url else self.lm

    # Examples

    @cached_property
    def evaluation(self) -> list[Example]:
        """The evaluation examples."""
        return self.task.evaluation()

    def examples(self, split: Split) -> list[Example]:
        """Examples of a split."""
        return self.evaluation if split == "evaluation" else self.task.examples(split)

    def encode(
        self, examples: Sequence[Example], task: Task | None = None
    ) -> dict[str, Encoded]:
        """Prompts as tokens, by id."""
        return {e.id: encode(self.encoder, task or self.task, e) for e in examples}

    def plan(
        self,
        examples: Sequence[Example],
        encoded: Mapping[str, Encoded],
        task: Task | None = None,
        tokens: int | None = None,
    ) -> list[list[Example]]:
        """Batches as the runtime wants them or of fewer tokens, :func:`posbench.measure.replies.plan`."""
        size = self.runtime.batch_size
        tokens = tokens or self.runtime.batch_tokens
        return plan(task or self.task, examples, encoded, size, tokens)

    def batches(
        self,
        things: Sequence[Any],
        length: Callable[[Any], int],
        tokens: int | None = None,
    ) -> list[list[Any]]:
        """Batches of anything with a length in tokens, the longest first, as the runtime wants them or of
        fewer tokens."""
        size = self.runtime.batch_size
        tokens = tokens or self.runtime.batch_tokens
        found = batches([length(each) for each in things], size, tokens)
        return [[things[i] for i in group] for group in found]

    # Methods

    def method(self, found: Mapping[str, Any] | None = None) -> Method:
        """The method under test, with what the search found.

        Raises:
            UserError: A parameter is missing or wrong.
        """
        return self.choice.build(found or self.found, self.target, self.missing)

    def trial(self) -> Method:
        """The method with legal stand-ins for what the search will find, to check everything else first."""
        given = self.target.values if self.target else {}
        return self.method(
            {k: v for k, v in self.standins.items() if given.get(k) is None}
        )

    def whole(self, method: Method) -> Method:
        """The list of methods with this one in the place that the search serves; itself without a list."""
        if not self.choice.parts or self.target is None:
            return method
        composed: Any = self.trial()
        return replace(composed, parts={**composed.parts, self.target.name: method})

    def methods(self) -> dict[str, Method]:
        """The unmodified model and the method under test, by their names in tables; for ``method.json``."""
        method = self.method()
        self.out.write_json(
            "method.json", {"name": self.choice.name, **asdict(method), **self.origin()}
        )
        if self.model.base_url:
            return {SERVED: method}
        under_test = (
            {} if isinstance(method, Unmodified) else {self.choice.name: method}
        )
        return {UNMODIFIED: Unmodified(), **under_test}

    def origin(self) -> dict[str, str]:
        """The ``source`` of the model's block for each method that runs with the constants of that block."""
        sources = []
        for name, part in (
            self.choice.parts or {self.choice.name: self.choice}
        ).items():
            if part is self.target and self.found:
                continue  # its search tells where they come from
            block = self.model.blocks.get(name, {})
            method = part.build(
                self.found if part is self.target else None, hint=self.missing
            )
            ran = json.loads(json.dumps(asdict(method)))
            published = all(
                ran.get(key) == value for key, value in block.items() if key != "source"
            )
            if published and "source" in block:
                sources.append(
                    f"{name}: {block['source']}"
                    if self.choice.parts
                    else str(block["source"])
                )
        return {"source": "; ".join(sources)} if sources else {}

    # Work

    @contextmanager
    def progress(self, label: str, total: int, done: int = 0) -> Iterator[Work]:
        """A bar, or lines, of progress, ``done`` of it before; yields what is told how much more is done. Its
        time and tokens make the tokens per second."""
        start = self._looped()
        with progress(self.console, self.runtime.log_every, label, total, done) as work:
            try:
                yield work
            finally:
                for name, now in self._looped().items():
                    self._loops[name] = self._loops.get(name, 0) + now - start[name]

    def _looped(self) -> dict[str, float]:
        """The clock, and what the model has read and written so far."""
        lm = vars(self).get("lm") or vars(self).get(
            "endpoint"
        )  # looking must not load it
        tokens = {
            "prompt_tokens": lm.read if lm else 0,
            "reply_tokens": lm.written if lm else 0,
        }
        return {"loop_seconds": time.monotonic(), **tokens}

    @contextmanager
    def measured(self, stage: str) -> Iterator[None]:
        """Record what a stage takes, also one that fails: seconds, tokens of its loops, memory."""
        began = time.monotonic()
        self._loops = {}
        try:
            yield
        finally:
            took = {
                "seconds": time.monotonic() - began,
                **(self._loops if stage in COUNTED else {}),
            }
            with suppress(
                OSError
            ):  # a full disk, which the stage itself, or its end, tells
                self.out.spend(stage, took, peak_memory())

    def complete(
        self,
        file: str,
        label: str,
        batches: Sequence[Sequence[Any]],
        key: Key,
        compute: Compute,
        order: Sequence[Any] | None = None,
    ) -> list[Row]:
        """Compute every row that a file lacks, batch by batch, and return all rows, in the order of
        ``order``, by default that of the batches.

        Batches depend on the plan alone, and one with a missing row is computed whole, so that a resumed run
        sees the same batches, and hence the same rounding, as an uninterrupted one. Out of memory, a batch
        and all that follow are halved; the rows made so far are kept. ``key`` gives the fields that identify
        the row of an item, ``compute`` the rows of a batch, one per item, in order.

        Raises:
            IncompleteRun: Some batch failed; its rows carry the error and are retried next time.
        """
        names, rows = self._known(
            file, [item for batch in batches[:1] for item in batch[:1]], key
        )
        failed = 0
        share = 1
        total = sum(map(len, batches))
        todo = [
            batch
            for batch in batches
            if any(tuple(key(item).values()) not in rows for item in batch)
        ]
        with self.progress(label, total, total - sum(map(len, todo))) as advance:
            for batch in todo:
                waiting = _cut(batch, share)
                while waiting:
                    part = waiting.pop(0)
                    missing = [
                        item for item in part if tuple(key(item).values()) not in rows
                    ]
                    made: list[Row] | None = []
                    if missing:
                        try:
                            made = _fitting(part, key, compute)
                        except RuntimeError as error:
                            log.error("%s: %s", file, error)
                            made = [{**key(item), "error": str(error)} for item in part]
                            failed += len(missing)
                    if made is None:
                        share *= 2
                        log.warning(
                            "%s: out of memory with %d prompts: smaller batches",
                            file,
                            len(part),
                        )
                        waiting = [
                            smaller
                            for each in (part, *waiting)
                            for smaller in _cut(each, 2)
                        ]
                        continue
                    fresh = [
                        row for row in made if tuple(row[n] for n in names) not in rows
                    ]
                    self.out.append(file, fresh)
                    rows |= {
                        tuple(row[n] for n in names): row
                        for row in fresh
                        if "error" not in row
                    }
                    advance(len(part))
        asked = (
            [item for batch in batches for item in batch] if order is None else order
        )
        return self._whole(file, rows, [key(item) for item in asked], failed)

    def complete_each(
        self,
        file: str,
        label: str,
        items: Sequence[Any],
        key: Key,
        one: Callable[[Any], Row],
        workers: int,
    ) -> list[Row]:
        """As :meth:`complete`, item by item in so many threads: each row is kept as soon as it is made, so
        that a killed run asks again for the rows under way alone.

        Raises:
            IncompleteRun: Some rows failed, or so many one after another that the others were not tried.
        """
        names, rows = self._known(file, items, key)
        todo = [item for item in items if tuple(key(item).values()) not in rows]
        failed = straight = 0

        def tried(item: Any) -> Row:
            try:
                return {**key(item), **one(item)}
            except RuntimeError as error:
                log.error("%s: %s", file, error)
                return {**key(item), "error": str(error)}

        # Its threads do not keep a process that is to end.
        with (
            self.progress(label, len(items), len(items) - len(todo)) as advance,
            ThreadPool(workers) as pool,
        ):
            for row in pool.imap_unordered(tried, todo):
                self.out.append(file, [row])
                advance(1)
                if "error" not in row:
                    rows[tuple(row[name] for name in names)], straight = row, 0
                    continue
                failed = failed + 1
                straight = straight + 1
                if straight == IN_A_ROW * workers and len(rows) + failed < len(items):
                    told = f"{straight} requests failed one after another; the last: {row['error']}"
                    raise IncompleteRun(f"{told}; run the same command again to go on")
        return self._whole(file, rows, [key(item) for item in items], failed)

    def _known(
        self, file: str, items: Sequence[Any], key: Key
    ) -> tuple[tuple[str, ...], Known]:
        """The names of the fields that identify a row, and the whole rows of a file."""
        self.out.repair(file)
        names = tuple(key(items[0])) if items else ()
        found = (
            row for row in self.out.rows(file) if all(name in row for name in names)
        )
        return names, {tuple(row[name] for name in names): row for row in found}

    def _whole(
        self, file: str, rows: Known, keys: Sequence[Mapping[str, Any]], failed: int
    ) -> list[Row]:
        """All rows in order; IncompleteRun where some failed."""
        if failed:
            raise IncompleteRun(
                f"{failed} rows of {file} failed; run the same command again to retry them"
            )
        order = [tuple(each.values()) for each in keys]
        self._put_in_order(file, tuple(keys[0]) if keys else (), order)
        return [rows[each] for each in order]

    def _put_in_order(
        self, file: str, names: Sequence[str], keys: Sequence[tuple[Any, ...]]
    ) -> None:
        """Rows that were made again came last: let them stand where an undamaged run has them."""
        order = self._orders.setdefault(self.out.path / file, [])
        order += keys
        place = {key: number for number, key in enumerate(order)}
        self.out.sort(
            file,
            lambda row: place.get(tuple(row.get(name) for name in names), len(order)),
        )

    def share_unmodified(self, file: str, *settings: Any) -> str:
        """Take the unmodified model's rows of a file from another run of this version, so that a sweep
        measures them once; returns the key (of model, task and settings) under which they may be shared.
        """
        key = digest(
            {"identity": self.identity, "task": self.raw["task"], "settings": settings}
        )
        if not any(row["method"] == UNMODIFIED for row in self.out.rows(file)):
            other = self.out.sibling_with(file, key)
            if other:
                rows = [
                    r
                    for r in other.rows(file)
                    if r["method"] == UNMODIFIED and "error" not in r
                ]
                self.out.append(file, rows)
                self.out.mark(file, copied_from=other.path.name)
                self.out.add_hardware(other.hardware())
        return key


def out_of_memory(error: RuntimeError) -> bool:
    """Whether a forward failed for want of memory, on a GPU or a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(
        error
    )


def _cut(batch: Sequence[Any], share: int) -> list[Sequence[Any]]:
    """A batch in about ``share`` equal parts, none empty."""
    step = max(-(-len(batch) // share), 1)
    return [batch[i : i + step] for i in range(0, len(batch), step)]


def _fitting(part: Sequence[Any], key: Key, compute: Compute) -> list[Row] | None:
    """Rows of a part; None where it is too large for the memory and can be cut.

    Raises:
        RuntimeError: Anything else went wrong.
    """
    try:
        return [
            {**key(item), **row} for item, row in zip(part, compute(part), strict=True)
        ]
    except RuntimeError as error:
        if not out_of_memory(error) or len(part) == 1:
            raise
    # Only behind the handler are the tensors of the failed forward free.
    torch.cuda.empty_cache()
    return None
