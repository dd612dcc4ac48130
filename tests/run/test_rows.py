"""The loop that completes rows: whatever fails, stops or is killed, the file ends as if nothing had happened."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.run.folder import RunDir
from posbench.run.rows import (
    IncompleteRun,
    ResumableRows,
    Schedule,
)

FILE = "rows.jsonl"
ITEMS = list(range(20))
BATCHES = [ITEMS[start : start + 4] for start in range(0, 20, 4)]


@contextmanager
def no_progress(label: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
    yield lambda parts: None


def key(item: int) -> Row:
    return {"id": str(item)}


def squares(batch: Sequence[int]) -> list[Row]:
    return [{"square": item * item} for item in batch]


def complete(folder: Path, compute: Any = squares, **options: Any) -> list[Row]:
    rows = ResumableRows(RunDir(folder), no_progress)
    return rows.complete(FILE, "test", BATCHES, key, compute, **options)


def expected(items: Sequence[int] = ITEMS) -> list[Row]:
    return [{"id": str(item), "square": item * item} for item in items]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.mark.parametrize("workers", [1, 3])
def test_all_rows_in_the_order_of_the_items(folder: Path, workers: int) -> None:
    order = ITEMS[::-1]
    rows = complete(folder, workers=workers, order=order)
    assert rows == expected(order) == RunDir(folder).rows(FILE)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_batches_too_large_for_the_memory_are_halved_until_they_fit(
    folder: Path, limit: int, workers: int
) -> None:
    sizes = []

    def compute(batch: Sequence[int]) -> list[Row]:
        if len(batch) > limit:
            raise torch.OutOfMemoryError
        sizes.append(len(batch))
        return squares(batch)

    assert complete(folder, compute, workers=workers) == expected()
    assert sum(sizes) == len(ITEMS), "nothing is computed twice"
    assert max(sizes) == {1: 1, 2: 2, 3: 2}[limit]


def test_one_item_too_large_for_the_memory_fails_alone(folder: Path) -> None:
    def compute(batch: Sequence[int]) -> list[Row]:
        if 7 in batch:
            raise torch.OutOfMemoryError
        return squares(batch)

    with pytest.raises(IncompleteRun, match=r"1 rows of rows\.jsonl failed"):
        complete(folder, compute)
    assert complete(folder) == expected()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failed_batch_is_tried_again_next_time(folder: Path, workers: int) -> None:
    def compute(batch: Sequence[int]) -> list[Row]:
        if batch[0] == 8:
            raise RuntimeError("no luck")
        return squares(batch)

    with pytest.raises(IncompleteRun, match="4 rows"):
        complete(folder, compute, workers=workers)
    failed = [row for row in RunDir(folder).rows(FILE) if "error" in row]
    assert [row["id"] for row in failed] == ["8", "9", "10", "11"]
    asked = []

    def count(batch: Sequence[int]) -> list[Row]:
        asked.append(batch)
        return squares(batch)

    assert complete(folder, count) == expected() and asked == [[8, 9, 10, 11]]


@pytest.mark.parametrize("most", [1, 3, None])
def test_many_failures_in_a_row_end_the_attempts(
    folder: Path, most: int | None
) -> None:
    tried = []
    schedule = Schedule()
    schedule.most_failures = most

    def compute(batch: Sequence[int]) -> list[Row]:
        tried.append(batch)
        raise RuntimeError("the server is gone")

    expected_words = r"one after another.*the server is gone" if most else "20 rows"
    with pytest.raises(IncompleteRun, match=expected_words):
        complete(folder, compute, schedule=schedule)
    assert len(tried) == (most or len(BATCHES))


@pytest.mark.parametrize("workers", [1, 2])
def test_what_the_user_has_to_correct_ends_the_attempts_and_keeps_rows(
    folder: Path, workers: int
) -> None:
    asked = []

    def compute(batch: Sequence[int]) -> list[Row]:
        if batch[0] >= 12:
            raise UserError("key", "wrong", "a key", "set one")
        asked.extend(batch)
        return squares(batch)

    with pytest.raises(UserError, match="key = 'wrong'"):
        complete(folder, compute, workers=workers)
    kept = sorted(int(row["id"]) for row in RunDir(folder).rows(FILE))
    assert kept == sorted(asked), "no row that was made is lost"
    assert workers > 1 or kept == ITEMS[:12]


class FirstRounds(Schedule):
    """Two batches a round, of which some are made; of the others some batches are not admitted."""

    def __init__(self, rounds: int, unwanted: Sequence[int] = ()) -> None:
        self.rounds = rounds
        self.unwanted = unwanted
        self.asked: list[int] = []

    def round_of(self, batch: Sequence[int]) -> int:
        return batch[0] // 8

    def ends_before(self, number: int) -> bool:
        self.asked.append(number)
        return number >= self.rounds

    def admits(self, batch: Sequence[int]) -> bool:
        return batch[0] not in self.unwanted


@pytest.mark.parametrize("workers", [1, 2])
def test_a_schedule_ends_rounds_and_leaves_batches_out(
    folder: Path, workers: int
) -> None:
    schedule = FirstRounds(1)
    rows = complete(folder, schedule=schedule, workers=workers)
    assert rows == expected(ITEMS[:8]) and schedule.asked == [0, 1]
    # A resumed run keeps what is there, and asks before each round that lacks rows.
    schedule = FirstRounds(3, unwanted=[12])
    rows = complete(folder, schedule=schedule, workers=workers)
    assert rows == expected([*ITEMS[:12], *ITEMS[16:]]) and schedule.asked == [1, 2]
    assert complete(folder) == expected()


@pytest.mark.parametrize("seed", range(20))
def test_a_killed_run_repeats_no_row_and_ends_with_the_same_bytes(
    tmp_path: Path, seed: int
) -> None:
    drawn = random.Random(seed)
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    alone.mkdir()
    killed.mkdir()
    complete(alone)
    made: list[int] = []

    def compute(batch: Sequence[int]) -> list[Row]:
        if drawn.random() < 0.3:
            raise KeyboardInterrupt
        made.extend(batch)
        return squares(batch)

    while True:
        try:
            rows = complete(killed, compute, workers=1)
        except KeyboardInterrupt:
            continue
        break
    assert rows == expected() and sorted(made) == ITEMS
    assert (killed / FILE).read_bytes() == (alone / FILE).read_bytes()
