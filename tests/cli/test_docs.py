"""`posbench docs`: documents say what the code says, and nothing of a run is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd
import pytest

from posbench.cli import docs
from posbench.cli.main import main
from posbench.files.atomic import write_csv
from posbench.model.families import FAMILIES
from posbench.stats.findings import FINDING_COLUMNS
from tests.conftest import Result, run_folders
from tests.messages import assert_line_names, assert_refused

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "families.md"


def findings(model: str, *rows: tuple[str, float, str]) -> pd.DataFrame:
    made = [
        {
            "model": model,
            "claim": claim,
            "value": value,
            "verdict": verdict,
            "n": 9,
            "statistic": "points",
        }
        | {
            "ci_low": value - 1,
            "ci_high": value + 1,
            "kind": "control" if "Control" in claim else "paper",
        }
        for claim, value, verdict in rows
    ]
    return pd.DataFrame(made, columns=list(FINDING_COLUMNS))


def write(folder: Path, runs: dict[str, pd.DataFrame]) -> None:
    for age, (name, frame) in enumerate(runs.items()):
        file = folder / name / "findings.csv"
        file.parent.mkdir(parents=True)
        write_csv(file, frame)
        (file.parent / "provenance.json").write_text(
            json.dumps({"command": f"posbench study={name}"})
        )
        os.utime(file, (age, age))


def test_the_table_of_families_is_the_family_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["docs", "families"]) == 0
    table = capsys.readouterr().out.strip()
    text = PAGE.read_text()
    assert docs.between_marks(PAGE, "families", table) == text, (
        "posbench docs families --out docs/families.md"
    )
    assert len(table.splitlines()) == 2 + len(FAMILIES)
    for family in FAMILIES:
        assert family.name in text


def test_only_the_part_between_the_marks_is_written(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("before\n<!-- families -->\nlast year\n<!-- /families -->\nafter\n")
    assert main(["docs", "families", f"--out={file}"]) == 0
    text = file.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "last year" not in text and "`llama`" in text


def test_a_new_file_can_be_written_again(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    for _ in range(2):
        assert main(["docs", "families", f"--out={file}"]) == 0
        assert file.read_text().count("`llama`") == 1


@pytest.mark.parametrize(
    "marks", ["other text", "<!-- families -->", "<!-- /families --> <!-- families -->"]
)
def test_text_without_a_pair_of_marks_is_not_overwritten(
    marks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.md"
    file.write_text(marks)
    assert main(["docs", "families", "--out", str(file)]) == 2
    assert file.read_text() == marks and "--out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args", [[], ["nothing"], ["families", "x"], ["claims"], ["run", "a", "b"]]
)
def test_the_pages_that_there_are_stand_in_the_error(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["docs", *args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    pages = (
        "families",
        "data",
        "claims DIR",
        "run DIR",
        "experiments DIR",
        "gallery DIR",
    )
    assert_refused(line, "docs", " ".join(args), allowed=pages, hint="posbench docs")


def test_a_folder_without_claims_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["docs", "claims", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_only_the_newest_run_of_a_study_and_model_counts(tmp_path: Path) -> None:
    old = findings("tiny", ("C1: a", 1.0, "holds"))
    new = findings("tiny", ("C1: a", 2.0, "contradicted"))
    other = findings("tiny_b", ("C1: a", 3.0, "holds"))
    write(
        tmp_path,
        {
            "chain/v001/tiny__x": old,
            "chain/v002/tiny__y": new,
            "chain/v001/tiny_b__z": other,
        },
    )
    (tmp_path / "fig6/v001/tiny__z").mkdir(parents=True)
    (tmp_path / "fig6/v001/tiny__z/provenance.json").write_text(
        '{"command": "posbench experiment=fig6"}'
    )
    sweep = tmp_path / "fig6/v001/sweep__x"
    write(tmp_path, {"fig6/v001/sweep__x": findings("tiny", ("C7: b", 1.0, "holds"))})
    (sweep / "provenance.json").unlink()
    (sweep / "summary.csv").write_text("")
    (sweep / "jobs.json").write_text(
        json.dumps([{"folder": None}, {"folder": "outputs/fig6/v001/tiny__z"}])
    )
    page = docs.claims(tmp_path)
    assert (
        "| C1: a | contradicted | holds |" in page
        and "    posbench experiment=fig6" in page
    )
    assert "chain/v002/tiny__y" in page and "chain/v001/tiny__x" not in page


def test_a_study_without_a_model_has_its_column(tmp_path: Path) -> None:
    runs = {
        "masks/v1/x": findings("", ("a", 1.0, "holds")),
        "gram/v1/y": findings("tiny", ("b", 2.0, "holds")),
    }
    write(tmp_path, runs)
    page = docs.claims(tmp_path)
    assert "| claim | no model | tiny |" in page and "| a | holds |  |" in page


def test_the_page_holds_every_claim_once_in_the_overview_and_each_number_once(
    tmp_path: Path,
) -> None:
    rows = (
        ("C2: b", 1.25, "holds"),
        ("C1: a", 2.5, "holds"),
        ("C1: a", 3.75, "contradicted"),
    )
    other = ("C2: b", 4.25, "not testable"), ("Control: c", 5.5, "holds")
    write(
        tmp_path,
        {
            "chain/v1/x": findings("tiny", *rows),
            "gram/v1/y": findings("tiny_b", *other),
        },
    )
    page = docs.claims(tmp_path)
    matrix = [line for line in page.splitlines() if line.startswith(("| C", "| claim"))]
    assert matrix[:2] == [
        "| claim | tiny | tiny_b |",
        "| C2: b | holds | not testable |",
    ]
    assert matrix[2:] == [
        "| C1: a | 1 holds, 1 contradicted |  |",
        "| Control: c |  | holds |",
    ]
    assert_line_names(page, "tiny_b", "1 not testable", "1 holds")
    for number in ("1.25", "2.50", "3.75", "4.25", "5.50"):
        assert page.count(f"| {number} [") == 1, number
    assert page.index("## C2: b") < page.index("## C1: a") < page.index("## Control: c")
    assert "posbench study=chain" in page


@pytest.mark.parametrize(
    ("verdicts", "word"),
    [
        (["holds"], "holds"),
        (["holds"] * 2, "holds"),
        (["contradicted", "holds"], "1 holds, 1 contradicted"),
        ([], ""),
    ],
)
def test_verdicts_of_several_statistics(verdicts: list[str], word: str) -> None:
    assert docs.combined_verdict(pd.Series(verdicts, dtype=object)) == word


def test_a_run_as_markdown_has_the_numbers_of_its_tables(
    posbench, outputs: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    result: Result = posbench(*small)
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    capsys.readouterr()
    assert main(["docs", "run", str(folder)]) == 0
    page = capsys.readouterr().out
    metrics = pd.read_csv(folder / "metrics.csv")
    means = metrics[
        (metrics["metric"] == "accuracy") & (metrics["gold_position"] == "all")
    ]["value"]
    assert len(means) == 2
    for value in means:
        assert f"{100 * value:.1f} [" in page
    assert json.loads((folder / "provenance.json").read_text())["command"] in page
