"""What the whole reply adds to its first line by position: the note, its false alarms, and where it is shown."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from posbench.report.tables import position_table
from posbench.report.text import headline
from posbench.stats.first_line import first_line_note
from posbench.stats.scores import Tabulator
from posbench.tasks import Example
from posbench.tasks.nq_multidoc import NQMultiDoc
from posbench.tasks.scorers import WHOLE_REPLY
from tests.messages import assert_names

POSITIONS = (0, 4, 9)
PARIS = Example(id="x", prompt="", answers=("Paris",))


def replies(
    headings: dict[int, float], questions: int, seed: int
) -> list[dict[str, object]]:
    """Rows of a reader that is right at 70 % everywhere, and begins with a heading with some probability."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(questions):
        for position in POSITIONS:
            text = "It is Paris." if rng.random() < 0.7 else "It is Rome."
            if rng.random() < headings[position]:
                text = f"## Answer\n{text}"
            rows.append(
                {
                    "method": "none",
                    "id": f"{position}-{number}",
                    "gold_position": position,
                    "cluster": str(number),
                    "scores": NQMultiDoc().score(PARIS, text),
                }
            )
    return rows


def table(rows: list[dict[str, object]]) -> pd.DataFrame:
    tabulator = Tabulator(
        task=NQMultiDoc(documents=10, positions=POSITIONS),
        model="m",
        unmodified="none",
        resamples=300,
        seed=0,
    )
    return tabulator.metrics(rows)


def test_headings_at_one_position_are_told_and_both_scores_shown() -> None:
    rows = replies({0: 0.5, 4: 0.0, 9: 0.0}, 80, seed=1)
    metrics = table(rows)
    assert_names(headline(metrics), "first line", "gold position 4", "at 0", "0.0")
    header, cells = position_table(metrics)
    column = header.index("whole reply")
    for line, position in zip(cells, (*POSITIONS, None), strict=True):
        own = [
            row["scores"][WHOLE_REPLY]  # type: ignore[index]
            for row in rows
            if position in (None, row["gold_position"])
        ]
        assert line[column] == f"{100 * np.mean(own):.1f} %"
    first_line = float(cells[0][1].split()[0])
    assert first_line < float(cells[0][column].split()[0]) - 20


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_headings_everywhere_are_seldom_told(share: float) -> None:
    """The level of the test is 1 %: of 100 readers whose headings do not know the position hardly one is told."""
    notes = []
    for seed in range(100):
        rows = replies(dict.fromkeys(POSITIONS, share), 40, seed)
        frame = pd.DataFrame([{**row, **row["scores"]} for row in rows])  # type: ignore[dict-item]
        notes.append(first_line_note(frame, "accuracy", 200, seed))
    assert sum(map(bool, notes)) <= 4


def test_one_position_alone_has_no_note() -> None:
    rows = replies(dict.fromkeys(POSITIONS, 0.5), 40, 0)
    alone = [row for row in rows if row["gold_position"] == 0]
    assert "first line" not in headline(table(alone))
