"""The loop that completes a file of rows, and goes on where a killed run stopped."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import groupby
from multiprocessing.pool import ThreadPool
from typing import Any, NamedTuple

from posbench.errors import IncompleteRun, UserError
from posbench.files.atomic import Row
from posbench.late import has_torch, torch
from posbench.run.folder import RowKey, RunDir
from posbench.stats.outcomes import FAILED

log = logging.getLogger(__name__)

Key = Callable[[Any], Mapping[str, Any]]
"""The fields that identify the row of an item."""

Proof = Callable[[Any], Mapping[str, Any]]
"""Returns the proof of an item's row: a row with another proof is computed again."""

Compute = Callable[[Sequence[Any]], list[Row]]
"""The rows of a batch of items, one per item, in order, without the fields that identify them."""

ShowProgress = Callable[[str, int, int], AbstractContextManager[Callable[[int], Any]]]
"""Shows progress while a block runs, by a label, the number of rows, and of those that an earlier session made."""


def no_proof(item: Any) -> Mapping[str, Any]:
    """Return nothing: the row of an item is known by its key alone."""
    return {}


class _Failures:
    """Failures so far, and whether they end the attempts.

    Args:
        most_in_a_row: Consecutive failed batches after which no more are tried; None: no limit.

    Attributes:
        num_rows: Rows that failed.
        obstacles: Errors that end the attempts, in order.
    """

    def __init__(self, most_in_a_row: int | None) -> None:
        self.num_rows = 0
        self.obstacles: list[Exception] = []
        self._most_in_a_row = most_in_a_row
        self._in_a_row = 0

    @property
    def is_over(self) -> bool:
        """Whether no more batches are tried."""
        return bool(self.obstacles)

    def count(self, new_rows: Sequence[Row], some_left: bool) -> None:
        """Count the failed rows of a batch; after too many failed batches one after another the run stops.

        Args:
            new_rows: All new rows of the batch; failed ones have ``error``.
            some_left: Whether other rows were not tried yet.
        """
        errors = [row["error"] for row in new_rows if "error" in row]
        self.num_rows += len(errors)
        self._in_a_row = self._in_a_row + 1 if errors else 0
        if errors and some_left and self._in_a_row == self._most_in_a_row:
            self.obstacles.append(
                IncompleteRun(
                    f"{self._in_a_row} requests failed one after another; the last: {errors[-1]}"
                    "; run the same command again to go on"
                )
            )


class Schedule:
    """The rounds in which the batches of a file are computed, some of which may be left out.

    This one has a single round, and leaves nothing out.

    Attributes:
        most_failures: Consecutive failed batches after which no more are tried; None: no limit.
    """

    most_failures: int | None = None

    def round_of(self, batch: Sequence[Any]) -> int:
        """Return the number of the round of a batch: a round begins when the one before it has ended."""
        return 0

    def ends_before(self, number: int) -> bool:
        """Return whether a round that lacks rows, and all that follow it, are left out."""
        return False

    def admits(self, batch: Sequence[Any]) -> bool:
        """Return whether a batch may be begun; each thread asks before it takes one."""
        return True


class _Attempt(NamedTuple):
    """Result of a batch: its rows, of which some may be failed ones; or none."""

    batch: Sequence[Any]
    rows: list[Row]
    is_too_large: bool = False
    is_left_out: bool = False


class ResumableRows:
    """The files of rows of a run folder, completed batch by batch."""

    def __init__(self, out: RunDir, progress: ShowProgress) -> None:
        self.out = out
        self.progress = progress
        # by file, the keys of its rows in their final order
        self._key_order = dict[str, list[RowKey]]()

    def complete(
        self,
        file: str,
        label: str,
        batches: Sequence[Sequence[Any]],
        key: Key,
        compute: Compute,
        order: Sequence[Any] | None = None,
        proof: Proof = no_proof,
        schedule: Schedule | None = None,
        workers: int = 1,
    ) -> list[Row]:
        """Compute every row that a file lacks, batch by batch, and return all rows.

        A batch with a missing row is computed as a whole, so that a resumed run sees the same batches, and hence the
        same rounding, as an uninterrupted one. Out of memory, a batch and all that follow are halved. Rows are kept as
        soon as their batch is computed, so that a killed run repeats only the batches under way. An error that stops
        the run (a wrong key, say) lets these end first, so that their rows are kept.

        Args:
            file: Name of the JSON-lines file in the run folder.
            label: Label of the progress bar.
            batches: The items to compute where their rows are missing, round by round.
            key: Fields that identify the row of an item.
            compute: Rows of a batch, one per item, in order, without these fields.
            order: All items in the order of their rows; None: the order of the batches.
            proof: Returns the proof of an item's row.
            schedule: Rounds of the batches; None: one round of all.
            workers: Batches that are computed at a time, each in a thread.

        Returns:
            The rows in that order, without those left out.

        Raises:
            IncompleteRun: Some rows failed, or ``schedule.most_failures`` batches did and others were not tried;
                failed rows carry the error and are retried next time.
        """
        schedule = schedule or Schedule()
        all_items = [item for batch in batches for item in batch]
        if order is not None:
            all_items = list(order)
        key_fields, rows = self._read_rows(file, all_items, key, proof)
        failures = _Failures(schedule.most_failures)

        def is_missing(item: Any) -> bool:
            return tuple(key(item).values()) not in rows

        def attempt(batch: Sequence[Any]) -> _Attempt:
            if not any(map(is_missing, batch)):
                return _Attempt(batch, [])
            if failures.is_over or not schedule.admits(batch):
                return _Attempt(batch, [], is_left_out=True)
            try:
                new_rows = _compute_rows(batch, key, compute, proof)
            except RuntimeError as error:
                log.error("%s: %s", file, error)
                return _Attempt(
                    batch, [_failed_row(key(item), error) for item in batch]
                )
            except UserError as error:
                failures.obstacles.append(error)
                return _Attempt(batch, [], is_left_out=True)
            return _Attempt(batch, new_rows or [], is_too_large=new_rows is None)

        # Into so many parts batches are split; doubled each time that memory is too small.
        num_parts = 1
        is_any_left_out = False
        pending = [batch for batch in batches if any(map(is_missing, batch))]
        num_done = len(all_items) - sum(map(len, pending))
        with (
            self.progress(label, len(all_items), num_done) as advance,
            _threads(workers) as attempt_each,
        ):
            # A resumed run keeps the rounds that are there, even when its time is over.
            for number, round_batches in groupby(pending, schedule.round_of):
                if failures.is_over or schedule.ends_before(number):
                    is_any_left_out = True
                    break
                queue = deque(
                    part for batch in round_batches for part in _split(batch, num_parts)
                )
                while queue:
                    for done in attempt_each(attempt, _drained(queue)):
                        # Memory was too small: this batch and all waiting ones are split in two.
                        if done.is_too_large:
                            message = (
                                "%s: out of memory with %d prompts: smaller batches"
                            )
                            log.warning(message, file, len(done.batch))
                            num_parts *= 2
                            parts = [done.batch, *_drained(queue)]
                            queue.extend(p for part in parts for p in _split(part, 2))
                            continue
                        if done.is_left_out:
                            is_any_left_out = True
                            continue
                        new_rows = [
                            row
                            for row in done.rows
                            # A batch is computed as a whole; rows that are there stay.
                            if _row_key(row, key_fields) not in rows
                        ]
                        self.out.append(file, new_rows)
                        for row in new_rows:
                            if "error" not in row:
                                rows[_row_key(row, key_fields)] = row
                        advance(len(done.batch))
                        num_failed = sum("error" in row for row in new_rows)
                        num_tried = len(rows) + failures.num_rows + num_failed
                        failures.count(new_rows, num_tried < len(all_items))
        if failures.obstacles:
            raise failures.obstacles[0]
        ordered_items = all_items
        if is_any_left_out:
            ordered_items = [item for item in all_items if not is_missing(item)]
        return self._ordered(
            file, rows, [key(item) for item in ordered_items], failures.num_rows
        )

    def _read_rows(
        self, file: str, items: Sequence[Any], key: Key, proof: Proof
    ) -> tuple[list[str], dict[RowKey, Row]]:
        """Read the rows that earlier sessions left in a file.

        A half-written last line is cut off, and rows whose digests differ are dropped.

        Args:
            file: Name of the file.
            items: What the rows are made from.
            key: Returns the fields that identify an item's row.
            proof: Returns the digests that an item's row must have.

        Returns:
            Names of the identifying fields, and the rows by the values of these fields.
        """
        self.out.repair(file)
        fields = list(key(items[0])) if items else []
        proofs = {tuple(key(item).values()): proof(item) for item in items}
        rows = {
            _row_key(row, fields): row
            for row in self.out.proven_rows(file, fields, proofs)
            if all(name in row for name in fields)
        }
        return fields, rows

    def _ordered(
        self,
        file: str,
        rows: Mapping[RowKey, Row],
        keys: Sequence[Mapping[str, Any]],
        num_failed: int,
    ) -> list[Row]:
        """Return all rows in the order of their keys, and sort the file in that order.

        Args:
            file: Name of the file.
            rows: Rows by their identifying values.
            keys: Identifying fields of each row, in order.
            num_failed: Rows that could not be made.

        Raises:
            IncompleteRun: Rows failed.
        """
        if num_failed:
            raise IncompleteRun(
                f"{num_failed} rows of {file} failed; run the same command again to retry them"
            )
        fields = list(keys[0]) if keys else []
        row_keys = [tuple(key.values()) for key in keys]
        # Rows that were computed again are last in the file: sort them to their places in an undamaged run.
        key_order = self._key_order.setdefault(file, [])
        key_order += row_keys
        ranks = {row_key: rank for rank, row_key in enumerate(key_order)}
        self.out.sort(
            file,
            lambda row: ranks.get(
                tuple(row.get(name) for name in fields), len(key_order)
            ),
        )
        return [rows[row_key] for row_key in row_keys]


def _drained(queue: deque[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """The batches of a queue, each taken from it when it is asked for."""
    while queue:
        yield queue.popleft()


@contextmanager
def _threads(workers: int) -> Iterator[Callable[..., Iterable[_Attempt]]]:
    """Yield a function that maps over batches: in threads, in order of completion; or one after the other.

    Args:
        workers: Number of threads; 1: none.
    """
    if workers == 1:
        yield map
        return
    # Threads of a pool do not keep a process from ending.
    with ThreadPool(workers) as pool:
        yield pool.imap_unordered


def _failed_row(key_fields: Mapping[str, Any], error: RuntimeError) -> Row:
    """The row of an item that could not be computed: the next run of the same command tries it again."""
    return {**key_fields, "outcome": FAILED, "error": str(error)}


def _row_key(row: Row, fields: Sequence[str]) -> RowKey:
    return tuple(row[name] for name in fields)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether a forward failed for want of memory, on a GPU or a CPU."""
    if has_torch() and isinstance(error, torch.OutOfMemoryError):
        return True
    return "can't allocate memory" in str(error)


def _split(batch: Sequence[Any], num_parts: int) -> list[Sequence[Any]]:
    """A batch in about that many equal parts, none empty."""
    size = max(-(-len(batch) // num_parts), 1)
    return [batch[start : start + size] for start in range(0, len(batch), size)]


def _compute_rows(
    items: Sequence[Any], key: Key, compute: Compute, proof: Proof
) -> list[Row] | None:
    """Compute the rows of some items together; None where they do not fit into memory, so that the caller splits them.

    Args:
        items: The items.
        key: Returns the fields that identify an item's row.
        compute: Returns the other fields, a row for each item.
        proof: Returns the digests that prove an item's row.

    Raises:
        RuntimeError: Anything else went wrong, or a single item does not fit.
    """
    try:
        rows = compute(items)
        return [
            {**key(item), **row, **proof(item)}
            for item, row in zip(items, rows, strict=True)
        ]
    except RuntimeError as error:
        if not is_out_of_memory(error) or len(items) == 1:
            raise
    # Only behind the handler are the tensors of the failed forward free.
    torch.cuda.empty_cache()
    return None
