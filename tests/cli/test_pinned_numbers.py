"""The numbers of the code before the rebuilding: the same runs, every cell, column names by a stated map."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
import yaml

from tests.conftest import run_folders
from tests.rounding import assert_same

PINNED = Path(__file__).parents[1] / "data" / "pinned"
RENAMED = {
    "position": "gold_position",
    "pair": "item",
    "low": "ci_low",
    "high": "ci_high",
}
RENAMED_IN = {
    "crop_mask_layers": {"ci_low": "change_ci_low", "ci_high": "change_ci_high"}
}
FROM_ZERO = {("facts", "layer")}
"""Columns that were counted from 1."""
WORDS = {"claim", "statistic", "note", "source"}
"""Texts, which may be put in other words."""
ROUNDED = 1e-5
"""Noise of a number as a share of itself: tables are made from rows of six significant digits. In a table of
differences, whose digits cancel, it is this share of the largest number."""


def new_name(table: str, column: str) -> str:
    name = RENAMED.get(column, re.sub(r"(?<!ci)_(low|high)$", r"_ci_\1", column))
    return RENAMED_IN.get(table, {}).get(name, name)


def read(file: Path) -> pd.DataFrame:
    return pd.read_csv(file, keep_default_na=False, na_values=["", "nan"])


def assert_same_table(after: pd.DataFrame, before: pd.DataFrame) -> None:
    """Decisions, counts and texts are the same; numbers up to rounding."""
    floats = [
        column for column in before if pd.api.types.is_float_dtype(before[column])
    ]
    for column in set(before) - set(floats):
        assert (
            after[column].astype(str).tolist() == before[column].astype(str).tolist()
        ), column
    numbers = before[floats]
    scale = numbers.where(numbers != 0, 1.0).abs()
    if (numbers < 0).any(axis=None):
        scale[:] = numbers.drop(columns="depth", errors="ignore").abs().max(axis=None)
    assert_same(
        after[floats].astype(float) / scale, numbers / scale, ROUNDED, "pinned tables"
    )


@pytest.mark.parametrize(
    "job", sorted(folder.name for folder in PINNED.iterdir() if folder.is_dir())
)
def test_every_number_is_what_it_was(job: str, posbench, outputs: Path) -> None:
    assert posbench(*(PINNED / job / "command.txt").read_text().split()).status == 0
    (run,) = run_folders(outputs)
    for file in (PINNED / job).glob("*.csv"):
        before = read(file)
        after = read(run / file.name)
        if file.stem == "metrics":
            # Statistics that came later have rows of their own.
            is_old = after["metric"].isin(before["metric"])
            after = after[is_old].reset_index(drop=True)
        before.columns = [new_name(file.stem, column) for column in before]
        for column in [column for table, column in FROM_ZERO if table == file.stem]:
            before[column] -= 1
        kept = [column for column in before if column not in WORDS]
        assert_same_table(after[kept], before[kept])
    if (PINNED / job / "found.yaml").is_file():
        (before,), (after,) = (
            yaml.safe_load((folder / "found.yaml").read_text()).values()
            for folder in (PINNED / job, run)
        )
        # Since then also the gain on held-back prompts, which the search itself does not see.
        assert_same_table(
            pd.DataFrame(
                [
                    {
                        key: value
                        for key, value in after.items()
                        if key not in WORDS | {"held_back"}
                    }
                ]
            ),
            pd.DataFrame(
                [{key: value for key, value in before.items() if key not in WORDS}]
            ),
        )
