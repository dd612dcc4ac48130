"""The page says what the folder's numbers say, and nothing more."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from posbench.errors import UserError
from posbench.report import page as report
from posbench.report import tables
from tests.unit.test_plots import AFTER, BEFORE, attention, channels, metrics, search, sweep


def folder_with(path: Path, **frames: pd.DataFrame) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.yaml").write_text("model: tiny\n")
    for name, frame in frames.items():
        frame.to_csv(path / f"{name}.csv", index=False)
    return path


def with_difference(value: float, low: float, high: float) -> pd.DataFrame:
    frame = metrics()
    mask = (frame["metric"] == "accuracy_difference") & (frame["position"] == "all")
    frame.loc[mask, ["value", "ci_low", "ci_high"]] = value, low, high
    return frame


@pytest.mark.parametrize(
    ("value", "low", "high", "said"),
    [
        (
            0.086,
            0.05,
            0.12,
            "scale_channel raises the average from 84.0 % to 92.7 % (+8.6 points, 95 % interval 5.0 to 12.0, n = 300)",
        ),
        (0.01, -0.02, 0.04, "makes no reliable change to the average"),
        (0.02, 0.0, 0.04, "makes no reliable change to the average"),
        (-0.1, -0.15, -0.05, "scale_channel lowers the average"),
    ],
)
def test_headline_says_no_more_than_the_interval(value, low, high, said):
    text = tables.headline(with_difference(value, low, high))
    assert text.startswith(
        "The unmodified model answers 96.0 % at the ends and 60.0 % at its worst inner position; "
    )
    assert said in text


def test_headline_without_method_without_comparison_and_without_metrics():
    assert tables.headline(metrics("none")).endswith(
        "60.0 % at its worst inner position, 84.0 % on average (n = 300)."
    )
    alone = metrics()[lambda f: f["metric"] == "accuracy"]
    assert "no paired comparison was recorded" in tables.headline(alone)
    assert tables.headline(None) == "Nothing was scored in this run."


def test_full_run(tmp_path):
    folder = folder_with(
        tmp_path, metrics=metrics(), attention=attention(), search=search(), channels=channels()
    )
    (folder / "found.yaml").write_text("scale_channel: {channel: 33, factor: 0}\n")
    (folder / "provenance.json").write_text(
        json.dumps({"command": "posbench task=kv", "packages": {"torch": "2.6"}})
    )
    page = report.render_run(folder).read_text()
    for title in (
        "Accuracy by gold position",
        "Attention",
        "Search",
        "Positional channel",
        "Found constants",
        "Provenance",
    ):
        assert f"<h2>{title}</h2>" in page
    for text in (
        "60.0 [57.0, 63.0]",
        "+30.0 [26.0, 34.0]",
        "scale_channel: {channel: 33, factor: 0}",
        "posbench task=kv",
        "packages.torch",
    ):
        assert text in page
    assert page.count("data:image/png;base64,") == 4
    assert "<script" not in page and "http" not in page.replace("data:image", "")
    names = {p.name for p in (folder / "figures").iterdir()}
    assert {"accuracy.png", "accuracy.pdf", "attention.pdf", "candidates.pdf", "channel_33.pdf"} <= names
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    report.render_run(folder)
    assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_absent_files_leave_their_sections_out(tmp_path):
    page = report.render_run(folder_with(tmp_path, search=search(3, None))).read_text()
    assert "Nothing was scored" in page and "kept the unmodified model" in page
    for title in (
        "Accuracy by gold position",
        "Attention",
        "Positional channel",
        "Found constants",
        "Provenance",
        "How to reproduce",
    ):
        assert f"<h2>{title}</h2>" not in page
    (tmp_path / "search.csv").unlink()
    assert "<img" not in report.render_run(tmp_path).read_text()


def test_names_are_escaped(tmp_path):
    folder = folder_with(
        tmp_path,
        metrics=metrics("<script>alert(1)</script>", model="<script>m"),
        attention=attention(method="<script>"),
    )
    (folder / "provenance.json").write_text(json.dumps({"command": "posbench '<script>'"}))
    (folder / "config.yaml").write_text("model: </pre><script>\n")
    page = report.render_run(folder).read_text()
    assert "<script" not in page and "&lt;script&gt;" in page


def test_unfinished_run_says_so(tmp_path):
    folder = folder_with(tmp_path, metrics=metrics())
    (folder / "status.json").write_text(json.dumps({"state": "incomplete", "error": "3 rows failed"}))
    assert "may be partial. 3 rows failed" in report.render_run(folder).read_text()


def test_model_named_null_and_method_none_survive_the_csv(tmp_path):
    folder = folder_with(tmp_path, metrics=metrics(model="null"))
    assert "The unmodified model answers" in report.render_run(folder).read_text()


@pytest.mark.parametrize("render", [report.render_run, report.render_sweep])
def test_missing_folder_is_named(render, tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        render(tmp_path / "nowhere")
    with pytest.raises(UserError, match="DIR"):
        render(tmp_path)


@pytest.mark.parametrize("content", ["", "model,method\nx,y,z,w,v\n1\n", "\xff\xfe"])
def test_unreadable_csv_is_named(content, tmp_path):
    folder = folder_with(tmp_path)
    (folder / "metrics.csv").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match="metrics"):
        report.render_run(folder)


def test_broken_json_is_named(tmp_path):
    folder = folder_with(tmp_path, metrics=metrics())
    (folder / "provenance.json").write_text("{")
    with pytest.raises(UserError, match=r"provenance\.json"):
        report.render_run(folder)


def test_reference_verdicts():
    def row(value, **more):
        return {
            "model": "tiny",
            "method": "none",
            "task": "kv",
            "position": "50%",
            "metric": "accuracy",
            "value": value,
            **more,
        }

    reference = [
        row(0.61),
        row(0.5),
        row(0.61, model="gpt"),
        row(0.6, position="80%"),
        row(0.84, position="all"),
        row(0.98, position="0"),
    ]
    table = tables.compare_with_reference(metrics(), reference)
    assert list(table["verdict"]) == [
        "agrees",
        "differs",
        "other model, not comparable",
        "not measured",
        "agrees",
        "agrees",
    ]
    assert (
        table["ours"][0] == pytest.approx(0.6)
        and np.isnan(table["ours"][2])
        and np.isnan(table["difference"][3])
    )
    assert table["difference"][1] == pytest.approx(0.1)
    swept = [row(0.82, **{"method": "scale_channel", "position": "1", "method.factor": 1})]
    table = tables.compare_with_reference(sweep([1.0, 0.0]), swept)
    assert list(table["ours"]) == [pytest.approx(0.8)]


def test_terminal_table_is_narrow_and_ends_with_all():
    for frame in (metrics(), pd.concat([metrics(), metrics("[bold]other")[lambda f: f["method"] != "none"]])):
        out = StringIO()
        Console(file=out, width=100).print(tables.summary_table(frame))
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= 100
        assert "60.0" in out.getvalue() and "+30.0" in out.getvalue() and "50 %" in out.getvalue()
        last = [one for one in lines if " all " in one][-1]
        assert "84.0" in last and "300" in last
        assert lines.index(last) > max(i for i, one in enumerate(lines) if " 100 %" in one)
    assert "[bold]other" in out.getvalue()


def test_position_table():
    header, rows = tables.position_table(metrics())
    assert header == ["position", "unmodified", "scale_channel", "difference", "n"]
    assert rows[1] == ["50 %", "60.0 [57.0, 63.0]", "90.0 [87.0, 93.0]", "+30.0 [26.0, 34.0]", "100"]
    assert [row[0] for row in rows] == ["0 %", "50 %", "100 %", "all"]
    assert (BEFORE[1], AFTER[1]) == (0.6, 0.9)


def test_sweep_page(tmp_path):
    sweep([1.0, 0.0, -1.0]).to_csv(tmp_path / "summary.csv", index=False)
    parts = [attention(g).assign(**{"run": f"r{g}", "method.factor": g}) for g in (1.0, 0.0, -1.0)]
    pd.concat(parts).to_csv(tmp_path / "attention_summary.csv", index=False)
    row = {
        "model": "gpt",
        "method": "none",
        "task": "kv",
        "position": "0%",
        "metric": "accuracy",
        "value": 0.9,
        "source": "Table 1",
    }
    (tmp_path / "reference.json").write_text(json.dumps([row]))
    page = report.render_sweep(tmp_path).read_text()
    assert "Over 3 settings of method.factor, the average runs from 82.7 % (-1) to 92.7 % (0)" in page
    assert "1 raise, 2 do not reliably change it" in page
    assert "numbers are for gpt; none of these ran here" in page and "Source: Table 1." in page
    assert (tmp_path / "figures" / "sweep.pdf").is_file() and (
        tmp_path / "figures" / "attention.pdf"
    ).is_file()


def test_sweep_over_a_column_that_metrics_also_has(tmp_path):
    parts = [metrics(m).assign(run=m) for m in ("a", "b")]
    frame = pd.concat(parts)
    frame.insert(0, "swept", frame["run"])
    columns = ["run", "swept", *[c for c in frame.columns if c not in ("run", "swept")]]
    frame[columns].rename(columns={"swept": "method"}).to_csv(tmp_path / "summary.csv", index=False)
    assert "Over 2 settings of method (swept)" in report.render_sweep(tmp_path).read_text()
    pd.concat(parts).to_csv(tmp_path / "summary.csv", index=False)
    assert "Over 2 settings of method," in report.render_sweep(tmp_path).read_text()


def test_report_needs_no_model_library():
    code = "import sys, posbench.report.page; sys.exit(bool({'torch', 'transformers', 'hydra', 'matplotlib.pyplot'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_intervals_are_rounded_and_lists_are_not():
    assert (
        tables.short("76.6 [72.1, 80.5]") == "76.6 [72, 80]"
        and tables.short("+0.1 [-0.3, 2.3]") == "+0.1 [-0, 2]"
    )
    assert (
        tables.short("[1.0,1.585]") == "[1.0,1.585]"
        and tables.short("[[0, 1.25], [3, 1.5]]") == "[[0, 1.25], [3, 1.5]]"
    )


def test_other_scores_stand_beside_the_tasks_own_in_their_own_unit():
    common = {"model": "m", "task": "t", "position": "all", "depth": None, "n": 4, "seed": 0}
    rows = [
        ("none", "exact_order", 0.5),
        ("none", "lsd", 1.25),
        ("x", "exact_order", 0.75),
        ("x", "lsd", 1.0),
        ("x", "exact_order_difference", 0.25),
        ("x", "lsd_difference", -0.25),
    ]
    frame = pd.DataFrame(
        [{**common, "method": m, "metric": k, "value": v, "ci_low": v, "ci_high": v} for m, k, v in rows]
    )
    header, table = tables.subset_table(tables.other_scores(frame), own="")
    assert header == ["subset", "metric", "unmodified", "x", "difference", "n"]
    assert table == [
        ["all", "lsd", "1.250 [1.250, 1.250]", "1.000 [1.000, 1.000]", "-0.250 [-0.250, -0.250]", "4"]
    ]
