"""The page of claims: the newest verdict of each study and model, one row for each claim, nothing lost."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pytest

from posbench.cli import claims
from posbench.files.atomic import write_csv
from posbench.studies.base import FINDING_COLUMNS


def findings(model: str, *rows: tuple[str, float, str]) -> pd.DataFrame:
    made = [
        (model, claim, "points", value, value - 1, value + 1, 9, verdict, "")
        for claim, value, verdict in rows
    ]
    return pd.DataFrame(made, columns=list(FINDING_COLUMNS))


def test_only_the_newest_run_of_a_study_and_model_counts(tmp_path: Path) -> None:
    old, new = findings("tiny", ("C1: a", 1.0, "holds")), findings("tiny", ("C1: a", 2.0, "does not hold"))
    other = findings("tiny_b", ("C1: a", 3.0, "holds"))
    runs = {"chain/v001/tiny__x": old, "chain/v002/tiny__y": new, "chain/v001/tiny_b__z": other}
    for age, (folder, frame) in enumerate(runs.items()):
        file = tmp_path / folder / "findings.csv"
        file.parent.mkdir(parents=True)
        write_csv(file, frame)
        os.utime(file, (age, age))
    assert claims.collect(tmp_path).set_index("model")["value"].to_dict() == {"tiny": 2.0, "tiny_b": 3.0}


def test_the_page_holds_every_claim_once_in_the_matrix_and_each_number_once() -> None:
    found = pd.concat(
        [
            findings(
                "tiny", ("C2: b", 1.25, "holds"), ("C1: a", 2.5, "holds"), ("C1: a", 3.75, "does not hold")
            ),
            findings("tiny_b", ("C2: b", 4.25, "not testable here"), ("Control: c", 5.5, "holds")),
        ]
    )
    page = claims.page(found, ["tiny", "tiny_b"], ["posbench study=chain"])
    matrix = [line for line in page.splitlines() if line.startswith(("| C", "| claim"))]
    assert matrix[:2] == ["| claim | tiny | tiny_b |", "| C1: a | 1 of 2 hold |  |"]
    assert matrix[2:] == ["| C2: b | holds | not testable here |", "| Control: c |  | holds |"]
    for number in ("1.25", "2.5", "3.75", "4.25", "5.5"):
        assert page.count(f"| {number} [") == 1, number
    assert (
        page.index("### C1: a") < page.index("### C2: b") < page.index("### Control: c")
        and "posbench study=chain" in page
    )


@pytest.mark.parametrize(
    ("verdicts", "word"),
    [(["holds"], "holds"), (["holds"] * 2, "holds"), (["does not hold", "holds"], "1 of 2 hold")],
)
def test_verdicts_of_several_statistics(verdicts: list[str], word: str) -> None:
    assert claims.verdict_of(findings("tiny", *(("C1: a", 1.0, verdict) for verdict in verdicts))) == word
