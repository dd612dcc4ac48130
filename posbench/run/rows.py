"""The loop that completes a file of rows, and goes on where a killed run stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing.pool import ThreadPool
from typing import Any

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.late import torch
from posbench.run.folder import RowKey, RunDir
from posbench.run.progress import Progress
from posbench.stats.outcomes import FAILED

log = logging.getLogger(__name__)

Key = Callable[[Any], Mapping[str, Any]]
"""The fields that identify the row of an item."""

Proof = Callable[[Any], Mapping[str, Any]]
"""What the row of an item proves itself by: a row that carries something else is computed again."""

Stop = Callable[[Sequence[Any]], bool]
"""Whether a batch that lacks rows, and all that follow it, are left out."""

Compute = Callable[[Sequence[Any]], list[Row]]
"""The rows of a batch of items, one per item, in order, without the fields that identify them."""

ShowProgress = Callable[[str, int, int], AbstractContextManager[Progress]]
"""Shows progress while a block runs, by a label, the number of rows, and of those that an earlier session made."""

FAILURES_IN_A_ROW = 3
"""Failed requests one after another, for each thread, after which no more are tried."""


def go_on(batch: Any) -> bool:
    """Return that no batch, and no round, is left out."""
    return False


def may_start_any(item: Any) -> bool:
    """Return that every item may be taken."""
    return True


def no_proof(item: Any) -> Mapping[str, Any]:
    """Return nothing: the row of an item is known by its key alone."""
    return {}


class IncompleteRun(Exception):
    """Some rows failed; they are recorded and retried by the next run of the same command."""


class ResumableRows:
    """The files of rows of a run folder, completed batch by batch or item by item."""

    def __init__(self, out: RunDir, progress: ShowProgress) -> None:
        self.out = out
        self.progress = progress
        # by file, the keys of its rows in the order in which they shall stand
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
        stop: Stop = go_on,
    ) -> list[Row]:
        """Compute every row that a file lacks, batch by batch, and return all rows.

        A batch with a missing row is computed as a whole, so that a resumed run sees the same batches, and
        hence the same rounding, as an uninterrupted one. Out of memory, a batch and all that follow are
        halved; rows computed before are kept.

        Args:
            file: Name of the JSON-lines file in the run folder.
            label: What the progress bar says.
            batches: All items, those whose rows exist among them.
            key: Fields that identify the row of an item.
            compute: Rows of a batch, one per item, in order, without these fields.
            order: Items in the order of the rows; None: that of the batches.
            proof: What the row of an item proves itself by.
            stop: Asked before each batch; rows that are not made then are left out.

        Returns:
            All rows, in that order.

        Raises:
            IncompleteRun: Some batch failed; its rows carry the error and are retried next time.
        """
        all_items = [item for batch in batches for item in batch]
        key_fields, rows = self._read_rows(file, all_items, key, proof)

        def is_missing(item: Any) -> bool:
            return tuple(key(item).values()) not in rows

        pending = [batch for batch in batches if any(map(is_missing, batch))]
        num_pending = sum(map(len, pending))
        num_failed = 0
        num_parts = 1
        is_stopped = False
        with self.progress(
            label, len(all_items), len(all_items) - num_pending
        ) as advance:
            for batch in pending:
                if stop(batch):
                    is_stopped = True
                    break
                parts = _split(batch, num_parts)
                while parts:
                    part = parts.pop(0)
                    num_missing = sum(map(is_missing, part))
                    if not num_missing:
                        advance(len(part))
                        continue
                    try:
                        new_rows = _compute_rows(part, key, compute, proof)
                    except RuntimeError as error:
                        log.error("%s: %s", file, error)
                        new_rows = [_failed_row(key(item), error) for item in part]
                        num_failed += num_missing
                    if new_rows is None:
                        message = "%s: out of memory with %d prompts: smaller batches"
                        log.warning(message, file, len(part))
                        num_parts *= 2
                        parts = [
                            half
                            for whole_part in (part, *parts)
                            for half in _split(whole_part, 2)
                        ]
                        continue
                    missing_rows = [
                        row for row in new_rows if _row_key(row, key_fields) not in rows
                    ]
                    self.out.append(file, missing_rows)
                    for row in missing_rows:
                        if "error" not in row:
                            rows[_row_key(row, key_fields)] = row
                    advance(len(part))
        ordered_items = all_items if order is None else order
        if is_stopped:
            ordered_items = [item for item in ordered_items if not is_missing(item)]
        return self._ordered(
            file, rows, [key(item) for item in ordered_items], num_failed
        )

    def complete_each(
        self,
        file: str,
        label: str,
        items: Sequence[Any],
        key: Key,
        compute: Callable[[Any], Row],
        workers: int,
        proof: Proof = no_proof,
        rounds: Sequence[Sequence[Any]] | None = None,
        stop: Callable[[int], bool] = go_on,
        may_start: Callable[[Any], bool] = may_start_any,
    ) -> list[Row]:
        """Compute every row that a file lacks, item by item in several threads, and return all rows.

        Each row is kept as soon as it is computed, so that a killed run repeats only the items under way. What stops
        the run (a key that is wrong, say) lets the items under way end first, so that their rows are kept.

        Args:
            file: Name of the JSON-lines file in the run folder.
            label: What the progress bar says.
            items: All items, those whose rows exist among them, in the order of the rows.
            key: Fields that identify the row of an item.
            compute: Row of an item, without these fields.
            workers: Number of threads.
            proof: What the row of an item proves itself by.
            rounds: The items in the order in which they are computed, a round after the other; None: all at once.
            stop: Asked by its number before each round that lacks rows; what it and later ones lack is left out then.
            may_start: Asked by each thread before it takes an item; the item is left out where the answer is no.

        Returns:
            The rows that exist, in the order of the items.

        Raises:
            IncompleteRun: Some rows failed, or so many one after another that the others were not tried.
        """
        key_fields, rows = self._read_rows(file, items, key, proof)

        def is_missing(item: Any) -> bool:
            return tuple(key(item).values()) not in rows

        num_pending = sum(map(is_missing, items))
        num_failed = 0
        failures_in_a_row = 0
        stopping = threading.Event()
        obstacles: list[Exception] = []

        def try_to_compute(item: Any) -> Row | None:
            if stopping.is_set() or not may_start(item):
                return None
            try:
                return {**key(item), **compute(item), **proof(item)}
            except RuntimeError as error:
                log.error("%s: %s", file, error)
                return _failed_row(key(item), error)
            except UserError as error:
                obstacles.append(error)
                stopping.set()
                return None

        # Threads of a pool do not keep a process from ending.
        with (
            self.progress(label, len(items), len(items) - num_pending) as advance,
            ThreadPool(workers) as pool,
        ):
            for number, round_items in enumerate([items] if rounds is None else rounds):
                pending = [item for item in round_items if is_missing(item)]
                # A resumed run keeps the rounds that are there, even when its time is over.
                if not pending:
                    continue
                if stopping.is_set() or stop(number):
                    break
                for row in pool.imap_unordered(try_to_compute, pending):
                    if row is None:
                        continue
                    self.out.append(file, [row])
                    advance(1)
                    if "error" not in row:
                        rows[_row_key(row, key_fields)] = row
                        failures_in_a_row = 0
                        continue
                    num_failed += 1
                    failures_in_a_row += 1
                    some_left = len(rows) + num_failed < len(items)
                    if failures_in_a_row == FAILURES_IN_A_ROW * workers and some_left:
                        obstacles.append(
                            IncompleteRun(
                                f"{failures_in_a_row} requests failed one after another; the last: {row['error']}"
                                "; run the same command again to go on"
                            )
                        )
                        stopping.set()
        if obstacles:
            raise obstacles[0]
        left_items = [item for item in items if not is_missing(item)]
        return self._ordered(file, rows, [key(item) for item in left_items], num_failed)

    def _read_rows(
        self, file: str, items: Sequence[Any], key: Key, proof: Proof
    ) -> tuple[list[str], dict[RowKey, Row]]:
        """Names of the fields that identify a row, and the rows of a file by the values of these fields.

        A half-written last line is cut off, and rows that prove to be others are dropped; rows without all
        of these fields are left out.
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
        """All rows in the order of their keys, in which the file is sorted, too."""
        if num_failed:
            raise IncompleteRun(
                f"{num_failed} rows of {file} failed; run the same command again to retry them"
            )
        fields = list(keys[0]) if keys else []
        row_keys = [tuple(key.values()) for key in keys]
        # Rows that were computed again stand last: they go where an undamaged run has them.
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


def _failed_row(key_fields: Mapping[str, Any], error: RuntimeError) -> Row:
    """The row of an item that could not be computed: the next run of the same command tries it again."""
    return {**key_fields, "outcome": FAILED, "error": str(error)}


def _row_key(row: Row, fields: Sequence[str]) -> RowKey:
    return tuple(row[name] for name in fields)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether a forward failed for want of memory, on a GPU or a CPU."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return "can't allocate memory" in str(error)


def _split(batch: Sequence[Any], num_parts: int) -> list[Sequence[Any]]:
    """A batch in about that many equal parts, none empty."""
    size = max(-(-len(batch) // num_parts), 1)
    return [batch[start : start + size] for start in range(0, len(batch), size)]


def _compute_rows(
    items: Sequence[Any], key: Key, compute: Compute, proof: Proof
) -> list[Row] | None:
    """Rows of items; None where they are too many for the memory and can be split.

    Raises:
        RuntimeError: Anything else went wrong.
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
