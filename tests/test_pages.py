"""tools/pages.py: documents say what the code says, and nothing of a run is lost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from posbench import paths
from posbench.files.atomic import write_csv
from posbench.model.families import FAMILIES
from posbench.stats.findings import FINDING_COLUMNS
from tests.conftest import Result, run_folders
from tests.messages import assert_line_names, refused
from tools import pages

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "families.md"
REAL = ["results/smollm2", "results/qwen2_5_coder_0_5b"]
"""The pages of real models, without their endings."""


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
    assert pages.main(["families"]) == 0
    table = capsys.readouterr().out.strip()
    text = PAGE.read_text()
    assert pages.between_marks(PAGE, "families", table) == text, (
        "python tools/pages.py families --out docs/families.md"
    )
    assert len(table.splitlines()) == 2 + len(FAMILIES)
    for family in FAMILIES:
        assert family.name in text


def test_only_the_part_between_the_marks_is_written(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("before\n<!-- families -->\nlast year\n<!-- /families -->\nafter\n")
    assert pages.main(["families", f"--out={file}"]) == 0
    text = file.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "last year" not in text and "`llama`" in text


def test_a_new_file_can_be_written_again(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    for _ in range(2):
        assert pages.main(["families", f"--out={file}"]) == 0
        assert file.read_text().count("`llama`") == 1


@pytest.mark.parametrize(
    "marks", ["other text", "<!-- families -->", "<!-- /families --> <!-- families -->"]
)
def test_text_without_a_pair_of_marks_is_not_overwritten(
    marks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.md"
    file.write_text(marks)
    assert pages.main(["families", "--out", str(file)]) == 2
    assert file.read_text() == marks and "--out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ([], "required: page"),
        (["nothing"], "invalid choice: 'nothing'"),
        (["families", "x"], "families takes no DIR"),
        (["claims"], "claims takes a DIR"),
        (["tables", "x"], "tables needs --out FILE"),
        (["run", "a", "b"], "unrecognized arguments: b"),
        (["run", "a", "--beside", "b"], "--beside goes with claims or gallery"),
        (["gallery", "a", "--paper", "lpes"], "--paper goes with claims"),
        (["gallery", "a", "--beside", "b"], "--beside needs --out FILE"),
        (["gallery", "a", "--keep"], "--keep goes with claims or gallery, and --out"),
        (["run", "a", "--keep", "--out", "b"], "--keep goes with claims or gallery"),
    ],
)
def test_a_page_that_cannot_be_made_is_refused(
    args: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        pages.main(args)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert reason in error
    assert "{families,data,claims,run,experiments,tables,gallery} [DIR]" in error


def test_a_folder_without_claims_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pages.main(["claims", str(tmp_path)]) == 2
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
    page = pages.claims_page(pages.read_claims(tmp_path))
    assert (
        "| C1: a | contradicted | holds |" in page
        and "    posbench experiment=fig6" in page
    )
    assert "chain/v002/tiny__y" in page and "chain/v001/tiny__x" not in page


def test_a_sweep_of_several_models_counts_for_each(tmp_path: Path) -> None:
    both = pd.concat(
        [
            findings("tiny", ("C1: a", 1.0, "holds")),
            findings("tiny_b", ("C1: a", 2.0, "holds")),
        ]
    )
    newer = findings("tiny_b", ("C1: a", 3.0, "contradicted"))
    write(tmp_path, {"table1/v001/tiny__x": both, "table1/v002/tiny_b__y": newer})
    page = pages.claims_page(pages.read_claims(tmp_path))
    assert "| C1: a | holds | contradicted |" in page
    assert "- tiny_b: Claims of the paper: 1 contradicted." in page


def test_a_study_without_a_model_has_its_column(tmp_path: Path) -> None:
    runs = {
        "masks/v1/x": findings("", ("a", 1.0, "holds")),
        "gram/v1/y": findings("tiny", ("b", 2.0, "holds")),
    }
    write(tmp_path, runs)
    page = pages.claims_page(pages.read_claims(tmp_path))
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
    page = pages.claims_page(pages.read_claims(tmp_path))
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


def test_a_further_model_has_the_last_column_of_the_claims_that_others_have(
    tmp_path: Path,
) -> None:
    write(tmp_path / "first", {"fig3/v1/x": findings("tiny", ("a", 1.0, "holds"))})
    further = {
        "fig3/v1/y": findings("small", ("a", 2.0, "contradicted"), ("b", 3.0, "holds")),
        "fig9/v1/z": findings("small", ("c", 4.0, "holds")),
    }
    write(tmp_path / "beside", further)
    page = pages.claims_page(
        pages.read_claims(tmp_path / "first"), pages.read_claims(tmp_path / "beside")
    )
    assert "| claim | tiny | small |" in page
    assert "| a | holds | contradicted |" in page and "| b |  | holds |" in page
    assert "| c |" not in page and "study=fig9" not in page


def test_claims_of_studies_without_a_run_are_kept(tmp_path: Path) -> None:
    before = {
        "fig3/v1/x": findings("small", ("a", 1.0, "holds"), ("b", 2.0, "holds")),
        "fig10/v1/x": findings("small", ("d", 6.0, "holds")),
        "fig9/v1/y": findings("small", ("c", 3.0, "inconclusive")),
    }
    after = {"fig3/v1/z": findings("small", ("a", 4.0, "contradicted"))}
    write(tmp_path / "before", before)
    write(tmp_path / "after", after)
    file = tmp_path / "page.md"
    for folder in ("before", "after"):
        folder_and_file = str(tmp_path / folder), "--out", str(file)
        assert pages.main(["claims", *folder_and_file, "--keep"]) == 0
    overview = [line for line in file.read_text().splitlines() if line[:3] == "| a"]
    text = file.read_text()
    assert overview == ["| a | contradicted |"] and "| b |" not in text
    assert text.index("| a |") < text.index("| c | inc") < text.index("| d | holds |")
    assert "1 holds, 1 contradicted, 1 inconclusive" in text
    assert pages.main(["claims", str(tmp_path / "after"), "--out", str(file)]) == 0
    assert "| c |" not in file.read_text()


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        *[(page, []) for page in REAL],
        ("yu2025/results/yu2025_claims", REAL),
        ("lpes/results/lpes_claims", REAL),
        ("behind_rope/results/behind_rope_claims", REAL),
    ],
)
def test_pages_of_claims_are_those_of_their_tables(
    name: str, beside: list[str]
) -> None:
    folder = paths.EXPERIMENTS
    further = [pages.read_claims(folder / f"{page}.csv") for page in beside]
    claims = pages.read_claims(folder / f"{name}.csv")
    page = folder / f"{name}.md"
    text = pages.claims_page(claims, *further)
    assert pages.between_marks(page, "claims", text) == page.read_text()


@pytest.mark.parametrize(
    ("runs", "paper", "page"),
    [
        ("results/runs", "lpes", "lpes/results/lpes_claims"),
        ("results/runs", "behind_rope", "behind_rope/results/behind_rope_claims"),
        (f"{REAL[1]}/runs", "", REAL[1]),
    ],
)
def test_tables_of_claims_are_those_of_the_kept_runs(
    runs: str, paper: str, page: str
) -> None:
    claims = pages.read_claims(paths.EXPERIMENTS / runs)
    of_paper = claims[claims["study"].str.startswith(paper)].reset_index(drop=True)
    written = pages.read_claims(paths.EXPERIMENTS / f"{page}.csv")
    pd.testing.assert_frame_equal(of_paper, written, check_dtype=False)


def test_a_measurement_that_two_figures_show_counts_once(tmp_path: Path) -> None:
    same = findings("tiny", ("a", 1.0, "holds"))
    other = findings("tiny", ("a", 2.0, "holds"))
    write(tmp_path, {"fig1/v1/x": same, "fig2/v1/x": same, "fig3/v1/x": other})
    page = pages.claims_page(pages.read_claims(tmp_path))
    assert (
        page.count("| holds | tiny |") == 2
        and "tiny: Claims of the paper: 1 holds" in page
    )


def test_a_claim_counts_once_however_many_channels_and_runs_asked_it(
    tmp_path: Path,
) -> None:
    """Three channels of one run and a second run: one claim; what names another subject is a claim of its own."""
    channels = findings(
        "tiny", ("a", 1.0, "holds"), ("a", 2.0, "holds"), ("a", 3.0, "inconclusive")
    )
    again = findings("tiny", ("b", 4.0, "holds"), ("b", 5.0, "not testable"))
    subjects = findings("tiny", ("c [x]", 6.0, "contradicted"), ("c [y]", 7.0, "holds"))
    write(tmp_path, {"fig4/v1/x": channels, "fig5/v1/x": again, "fig6/v1/x": subjects})
    claims = pages.read_claims(tmp_path)
    counted = pages.count_once(claims)
    assert dict(zip(counted["claim"], counted["verdict"], strict=True)) == {
        "a": "inconclusive",
        "b": "holds",
        "c [x]": "contradicted",
        "c [y]": "holds",
    }
    page = pages.claims_page(claims)
    assert "tiny: Claims of the paper: 2 hold, 1 contradicted, 1 inconclusive." in page


def test_runs_of_another_channel_stand_beside_each_other(tmp_path: Path) -> None:
    """The newest run counts for each subject, also where claims of earlier runs are kept."""
    runs = {
        "fig6/v001/tiny__x": findings("tiny", ("a [p]", 1.0, "holds")),
        "fig6/v001/tiny__y": findings("tiny", ("a [q]", 2.0, "contradicted")),
        "fig6/v002/tiny__z": findings("tiny", ("a [q]", 3.0, "holds")),
    }
    write(tmp_path / "runs", runs)
    claims = pages.read_claims(tmp_path / "runs")
    values = dict(zip(claims["claim"], claims["value"], strict=True))
    assert values == {"a [p]": "1.00 [0.00, 2.00]", "a [q]": "3.00 [2.00, 4.00]"}
    write(
        tmp_path / "later", {"fig6/v003/z": findings("tiny", ("a [p]", 4.0, "holds"))}
    )
    later = pages.with_kept(pages.read_claims(tmp_path / "later"), claims)
    assert list(later["claim"]) == ["a [p]", "a [q]"]
    assert list(later["value"]) == ["4.00 [3.00, 5.00]", "3.00 [2.00, 4.00]"]


def test_a_page_corrects_over_all_that_it_shows(tmp_path: Path) -> None:
    """Four studies with a p of 0.02 each: every one alone holds, and none beside the others."""

    def study(p: float) -> pd.DataFrame:
        rows = findings("tiny", ("a", p, "holds"), ("Control: k", p, "holds"))
        return rows.assign(
            claim=[f"claim {p}", f"Control: {p}"], p=[p, 0.04], p_holm=[p, 0.04]
        )

    p_values = [0.001, 0.02, 0.021, 0.022]
    runs = {f"fig{i}/v1/x": study(p) for i, p in enumerate(p_values)}
    write(tmp_path, runs)
    claims = pages.correct_over_page(pages.read_claims(tmp_path))
    paper = claims[claims["kind"] == "paper"]
    # Holm by hand: the largest of the sorted p times the number of those not smaller.
    by_hand = [
        max(p * (len(p_values) - j) for j, p in enumerate(p_values[: i + 1]))
        for i in range(len(p_values))
    ]
    assert list(paper["p (Holm)"]) == [f"{p:.2g}" for p in by_hand]
    assert list(paper["verdict"]) == ["holds"] + 3 * ["inconclusive"]
    assert paper["note"].iloc[1].startswith("holds by its study alone")
    assert set(claims[claims["kind"] == "control"]["verdict"]) == {"inconclusive"}
    # A table whose raw p values were not kept is corrected from the adjusted ones.
    without = pages.read_claims(tmp_path).assign(p="")
    assert list(pages.correct_over_page(without)["verdict"]) == list(claims["verdict"])


@pytest.mark.parametrize("name", ["docs/gallery.md", "experiments/results/smollm2.md"])
def test_all_entries_of_a_gallery_can_be_kept(name: str) -> None:
    page = (paths.EXPERIMENTS.parent / name).read_text(encoding="utf-8")
    rest = page.partition("<!-- gallery -->\n\n")[2]
    kept = pages.entries_of(page)
    text, figures = pages.gallery_page([], "images", kept=kept)
    assert rest.startswith(f"{text}\n\n<!-- /gallery -->") and not figures
    assert sum(map(len, kept.values())) == page.count("\n### ")


def test_a_gallery_shows_a_further_model_as_its_own_page_does(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    page = tmp_path / "results" / "small.md"
    own = [
        "## Other runs",
        "<!-- entry fig9 -->",
        "### Figure 9: (a) gap",
        "*We see:* Holds: a.",
        "![Figure 9: (a) gap](small/fig9.png)\\\nA gap.",
        "`posbench experiment=fig9`; small.",
    ]
    page.write_text("\n\n".join(["<!-- gallery -->", *own, "<!-- /gallery -->"]))
    out = tmp_path / "docs" / "gallery.md"
    further = pages.sections_of(page, out)
    assert further == {
        "fig9": "*We see* on [small](../results/small.md#figure-9-a-gap): Holds: a."
        "\n\n![Figure 9: (a) gap](../results/small/fig9.png)\\\nA gap."
    }
    # It takes the place of what stood there, or goes where the page has nothing more of it.
    entries = {
        "fig9": "<!-- entry fig9 -->\n\nours\n\n<!-- beside -->\n\nold",
        "fig8": "<!-- entry fig8 -->\n\nours\n\n<!-- beside -->\n\nold",
        "fig7": "<!-- entry fig7 -->\n\nours",
    }
    kept = {"Other runs": entries}
    text, _ = pages.gallery_page([], "images", further, kept)
    assert pages.entries_of(f"<!-- gallery -->{text}")["Other runs"] == {
        "fig7": entries["fig7"],
        "fig8": "<!-- entry fig8 -->\n\nours",
        "fig9": f"<!-- entry fig9 -->\n\nours\n\n<!-- beside -->\n\n{further['fig9']}",
    }
    with refused("--beside", str(tmp_path / "none.md"), allowed="gallery", hint="DIR"):
        pages.sections_of(tmp_path / "none.md", out)


def test_the_real_models_of_the_gallery_are_those_of_their_own_pages() -> None:
    """Each experiment that both pages have shows in one what it shows in the other."""
    root = paths.EXPERIMENTS.parent
    gallery = root / "docs" / "gallery.md"
    further = pages.further_sections(
        [paths.EXPERIMENTS / f"{page}.md" for page in REAL], gallery
    )
    kept = pages.entries_of(gallery.read_text(encoding="utf-8"))
    text, _ = pages.gallery_page([], "gallery", further, kept)
    assert text in gallery.read_text(encoding="utf-8")


def test_a_gallery_keeps_what_a_folder_has_no_runs_of(
    posbench: Callable[..., Result],
    small: list[str],
    outputs: Path,
    tmp_path: Path,
) -> None:
    page = tmp_path / "page.md"
    for seed, (folder, names) in enumerate({"first": "ab", "second": "b"}.items()):
        settings = [f"task.seed={seed}", "method=none", "stages=[evaluate,report]"]
        result = posbench(*small, *settings)
        assert result.status == 0, result.err
        for name in names:
            shutil.copytree(outputs / "kv_retrieval", tmp_path / folder / name)
        shutil.rmtree(outputs)
    assert pages.main(["gallery", str(tmp_path / "first"), f"--out={page}"]) == 0
    before = pages.entries_of(page.read_text())["Other runs"]
    old_images = {file.name for file in (tmp_path / "page").iterdir()}
    again = ["gallery", str(tmp_path / "second"), f"--out={page}"]
    assert pages.main([*again, "--keep"]) == 0
    after = pages.entries_of(page.read_text())["Other runs"]
    assert list(after) == ["a", "b"] == list(before)
    assert after["a"] == before["a"] and "task.seed=1" in after["b"]
    assert {file.name for file in (tmp_path / "page").iterdir()} == old_images
    unmarked = page.read_text().replace("<!-- entry a -->", "")
    page.write_text(unmarked)
    assert pages.main([*again, "--keep"]) == 2 and page.read_text() == unmarked
    assert pages.main(again) == 0
    assert list(pages.entries_of(page.read_text())["Other runs"]) == ["b"]
    images = {file.name for file in (tmp_path / "page").iterdir()}
    assert images == {name for name in old_images if name.startswith("b-")} != set()


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
    assert pages.combined_verdict(pd.Series(verdicts, dtype=object)) == word


def test_a_run_as_markdown_has_the_numbers_of_its_tables(
    posbench, outputs: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    result: Result = posbench(*small)
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    capsys.readouterr()
    assert pages.main(["run", str(folder)]) == 0
    page = capsys.readouterr().out
    metrics = pd.read_csv(folder / "metrics.csv")
    means = metrics[
        (metrics["metric"] == "accuracy") & (metrics["gold_position"] == "all")
    ]["value"]
    assert len(means) == 2
    for value in means:
        assert f"{100 * value:.1f} [" in page
    assert json.loads((folder / "provenance.json").read_text())["command"] in page


def test_tables_of_a_run_stand_between_their_marks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("{}")
    write_csv(run / "counts.csv", pd.DataFrame({"verdict": ["a|b"], "cells": [3]}))
    write_csv(run / "unnamed.csv", pd.DataFrame({"x": [1]}))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- counts -->\nold\n<!-- /counts -->\nafter\n")
    assert pages.main(["tables", str(run), "--out", str(page)]) == 0
    table = "| verdict | cells |\n| --- | --- |\n| a\\|b | 3 |"
    marked = f"<!-- counts -->\n\n{table}\n\n<!-- /counts -->"
    assert page.read_text() == f"before\n{marked}\nafter\n"
    page.write_text("no marks\n")
    assert pages.main(["tables", str(run), "--out", str(page)]) == 2
    assert_line_names(capsys.readouterr().err, "--out", str(page), str(run), "NAME.csv")
