"""The page says what the folder's numbers say, and nothing more."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from posbench.files.digests import Content
from posbench.files.sources import Source
from posbench.plots.base import save
from posbench.report.page import figure_size, read_run, render_run
from posbench.report.sweep import render_sweep, sweep_table, swept_columns
from posbench.report.template import breakable
from tests.frames import (
    attention,
    channels,
    metrics,
    search,
    sweep,
    with_missing_answers,
)
from tests.messages import assert_names, refused

pytestmark = pytest.mark.figures

SEARCHED = (
    "stages: [search]\nsearch: {_target_: posbench.search.channel.ChannelSearch}\n"
)


def folder_with(path: Path, config: str = SEARCHED, **frames: pd.DataFrame) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.yaml").write_text(config)
    for name, frame in frames.items():
        frame.to_csv(path / f"{name}.csv", index=False)
    return path


def test_full_run(tmp_path):
    folder = folder_with(
        tmp_path,
        metrics=metrics(),
        attention=attention(),
        search=search(),
        channels=channels(),
    )
    (folder / "found.yaml").write_text("scale_channel: {channel: 33, factor: 0}\n")
    (folder / "provenance.json").write_text(
        json.dumps({"command": "posbench task=kv", "packages": {"torch": "2.6"}})
    )
    page = render_run(folder).read_text()
    words = re.sub("<[^>]*>", "", page)
    titles = (
        "Accuracy by gold position",
        "Attention",
        "Search",
        "Positional channel",
        "Found constants",
        "Provenance",
    )
    cells = (
        "60.0 [57.0, 63.0]",
        "+30.0 [26.0, 34.0]",
        "scale_channel: {channel: 33, factor: 0}",
    )
    for text in (*cells, "posbench task=kv", "packages.torch"):
        assert text in words
    for title in titles:
        assert f">{title}</h2>" in page
    # The scores over the gold position are drawn in the page itself.
    assert page.count('src="data:image/svg+xml,') == 3
    assert page.count('class="curve"') == 1
    assert "<script" not in page
    assert "http" not in re.sub('src="data:image[^"]*"', "", page)
    names = {p.name for p in (folder / "figures").iterdir()}
    drawings = ("accuracy", "attention", "candidates", "channel_33")
    assert names == {"captions.json", *(f"{name}.svg" for name in drawings)}
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    render_run(folder)
    assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_figures_in_further_formats_stay_those_of_the_tables(tmp_path):
    folder = folder_with(tmp_path / "run", metrics=metrics())
    render_run(folder, ["pdf"])
    pdf = folder / "figures" / "accuracy.pdf"
    first = pdf.read_bytes()
    lower = metrics()
    lower["value"] /= 2
    folder_with(folder, metrics=lower)
    render_run(folder)
    fresh = folder_with(tmp_path / "fresh", metrics=lower)
    render_run(fresh, ["pdf", "svg"])
    redrawn = (fresh / "figures" / "accuracy.pdf").read_bytes()
    assert pdf.read_bytes() == redrawn != first
    assert not (folder / "figures" / "accuracy.png").exists()


def test_a_figure_has_its_size_in_inches_on_the_page(tmp_path):
    file = save(Figure(figsize=(3, 2)), tmp_path / "a")
    size = figure_size(file.read_text())
    assert size == {"width": 3 * 132, "height": 2 * 132}


def test_a_checkpoint_of_the_hub_is_shown_by_its_revision(tmp_path):
    """It has no checksum of its own, unlike a file."""
    hub = Source(kind="model", id="someone/model", field="model.path")
    path = Source(kind="path", id="data.jsonl", field="task.path")
    contents = [
        Content(hub, "", None, "0123456789abcdef0123"),
        Content(path, ".jsonl", tmp_path / "data.jsonl", "fedcba9876543210fedc"),
    ]
    folder = folder_with(tmp_path, metrics=metrics())
    facts = {"command": "posbench", "files": [content.fact for content in contents]}
    (folder / "provenance.json").write_text(json.dumps(facts))
    words = re.sub("<[^>]*>", "", render_run(folder).read_text())
    assert "someone/model, revision 0123456789abcdef" in words
    assert ".jsonl, sha256 fedcba9876543210" in words


def test_absent_files_leave_their_sections_out(tmp_path):
    page = render_run(folder_with(tmp_path, search=search(3, None))).read_text()
    assert "Nothing was scored" in page and "kept the unmodified model" in page
    titles = (
        "Accuracy by gold position",
        "Attention",
        "Positional channel",
        "Found constants",
        "Provenance",
    )
    for title in (*titles, "How to reproduce"):
        assert f">{title}</h2>" not in page
    (tmp_path / "search.csv").unlink()
    assert "<img" not in render_run(tmp_path).read_text()


def test_names_are_escaped(tmp_path):
    folder = folder_with(
        tmp_path,
        "model: </pre><script>\n",
        metrics=metrics("<script>alert(1)</script>", model="<script>m"),
        attention=attention(method="<script>"),
    )
    (folder / "provenance.json").write_text(
        json.dumps({"command": "posbench '<script>'"})
    )
    page = render_run(folder).read_text()
    assert "<script" not in page and "&lt;script&gt;" in page


def test_unfinished_run_says_so(tmp_path):
    folder = folder_with(tmp_path, metrics=metrics())
    (folder / "status.json").write_text(
        json.dumps({"state": "incomplete", "error": "3 rows failed"})
    )
    assert_names(render_run(folder).read_text(), "partial", "3 rows failed")


def test_model_named_null_and_method_none_survive_the_csv(tmp_path):
    folder = folder_with(tmp_path, metrics=metrics(model="null"))
    assert read_run(folder)[0].details.startswith("The unmodified model answers")


@pytest.mark.parametrize("render", [render_run, render_sweep])
def test_missing_folder_is_named(render, tmp_path):
    with refused("DIR", str(tmp_path / "nowhere"), allowed="folder", hint="path"):
        render(tmp_path / "nowhere")
    with refused("DIR", str(tmp_path), allowed="folder", hint="folder"):
        render(tmp_path)


@pytest.mark.parametrize("content", ["", "model,method\nx,y,z,w,v\n1\n", "\xff\xfe"])
def test_unreadable_csv_is_named(content, tmp_path):
    folder = folder_with(tmp_path)
    (folder / "metrics.csv").write_bytes(content.encode("latin-1"))
    with refused(
        "metrics.csv",
        str(folder / "metrics.csv"),
        allowed=("gold_position", "ci_low", "seed"),
        hint="run",
    ):
        render_run(folder)


def test_broken_json_is_named(tmp_path):
    folder = folder_with(tmp_path, metrics=metrics())
    (folder / "provenance.json").write_text("{")
    with refused(
        "provenance.json",
        str(folder / "provenance.json"),
        allowed="JSON",
        hint="line 1",
    ):
        render_run(folder)


def test_sweep_page(tmp_path):
    sweep([1.0, 0.0, -1.0]).to_csv(tmp_path / "summary.csv", index=False)
    parts = [
        attention(g).assign(**{"run": f"r{g}", "method.factor": g})
        for g in (1.0, 0.0, -1.0)
    ]
    pd.concat(parts).to_csv(tmp_path / "attention_summary.csv", index=False)
    row = {
        "model": "gpt",
        "method": "none",
        "task": "kv",
        "gold_position": "0%",
        "metric": "accuracy",
        "value": 0.9,
        "source": "Table 1",
    }
    (tmp_path / "reference.json").write_text(json.dumps([row]))
    page = render_sweep(tmp_path).read_text()
    assert_names(page, "3 settings", "method.factor", "92.7 % (0)")
    assert "82.7 % (-1 and 1 other)" in page
    assert_names(page, "1 raises", "2 cannot be")
    assert (
        "<title>scale_channel on tiny, kv, by method.factor - posbench</title>" in page
    )
    assert_names(page, "gpt", "none of these", "Source: Table 1.")
    tables = re.findall("<table.*?</table>", page, re.DOTALL)
    assert tables and all("<td" in table for table in tables), "a table without rows"
    assert (tmp_path / "figures" / "sweep.svg").is_file() and (
        tmp_path / "figures" / "attention.svg"
    ).is_file()


def test_sweep_over_a_column_that_metrics_also_has(tmp_path):
    parts = [metrics(m).assign(run=m) for m in ("a", "b")]
    frame = pd.concat(parts)
    frame.insert(0, "swept", frame["run"])
    columns = ["run", "swept", *[c for c in frame.columns if c not in ("run", "swept")]]
    frame[columns].rename(columns={"swept": "method"}).to_csv(
        tmp_path / "summary.csv", index=False
    )
    assert_names(render_sweep(tmp_path).read_text(), "2 settings", "method (swept)")
    plain = pd.concat(parts)[["run", *metrics().columns]]
    assert sweep_table(plain, swept_columns(plain))[2].startswith(
        "Over 2 settings of method,"
    )


def test_a_sweep_names_the_settings_whose_bias_cannot_be_measured():
    """Newcomer, 9: the best setting had no position bias, and the sentence was silent about it."""
    frames = []
    for factor, bias in ((1.0, 0.3), (0.0, 0.2), (-1.0, None)):
        note = "" if bias else "at the ceiling: why"
        row = metrics().iloc[[-1]].assign(metric="position_bias", value=bias, note=note)
        row["gold_position"] = "all"
        frame = pd.concat([metrics(), row])
        frames.append(frame.assign(run=f"r{factor}", factor=factor))
    frame = pd.concat(frames)[["run", "factor", *metrics().columns]]
    sentence = sweep_table(frame, swept_columns(frame))[2]
    assert_names(sentence, "20.0 (0)", "30.0 points (1)", "the ceiling")


def test_a_sweep_says_nothing_of_scores_whose_answers_are_missing():
    cut = with_missing_answers(metrics(after=[0.3, 0.2, 0.3]))
    frame = pd.concat([metrics().assign(run="a", x=1), cut.assign(run="b", x=2)])
    frame = frame[["run", "x", *metrics().columns]]
    _, rows, sentence = sweep_table(frame, swept_columns(frame))
    assert rows[0][1] == "92.7 [89.7, 95.7]" and rows[0][3] == "+8.7 [4.7, 12.7]"
    assert rows[1][1] == "missing answers" and rows[1][3] == ""
    assert "1 raises it" in sentence and "lower it" not in sentence
    assert "26.7" not in sentence and "in 1 setting (2)" in sentence
    assert sentence.startswith("The average is 92.7 % (1);")


def test_a_model_that_ran_unmodified_alone_has_its_row():
    """Its job with the method failed."""
    parts = [
        metrics().assign(run="a"),
        metrics(method="none", model="tiny_b").assign(run="b"),
    ]
    frame = pd.concat(parts)[["run", *metrics().columns]]
    assert swept_columns(frame) == ["model"]
    _, rows, sentence = sweep_table(frame, swept_columns(frame))
    assert [row[0] for row in rows] == ["tiny", "tiny_b"]
    assert rows[1][1].startswith("84.0") and sentence.startswith("Over 2 settings")


def test_checkpoints_that_were_swept_are_told_apart():
    parts = [
        metrics().assign(**{"run": p[-1], "model.path": f"/home/all/{p}"})
        for p in ("a/A", "b/B")
    ]
    frame = pd.concat(parts)[["run", "model.path", *metrics().columns]]
    header, rows, sentence = sweep_table(frame, swept_columns(frame))
    assert header[0] == "model.path" and [row[0] for row in rows] == ["a/A", "b/B"]
    assert "/home" not in sentence
    # Where the models have names of their own the path says no more.
    named = frame.assign(model=frame["run"])
    header, rows, _ = sweep_table(named, swept_columns(named))
    assert header[0] == "model" and [row[0] for row in rows] == ["A", "B"]


def test_a_sweep_of_studies_shows_their_verdicts_side_by_side(tmp_path):
    same = dict(
        kind="paper",
        statistic="s",
        value=1,
        ci_low=0.5,
        ci_high=2,
        n=20,
        p=0.01,
        p_holm=0.01,
    )
    rows = [
        {"run": f"v001/{m}", "study.x": x, "model": m, "verdict": v, "claim": c, **same}
        for m, x, verdicts in (
            ("a", 1, ("holds", "inconclusive")),
            ("b", 2, ("contradicted", "holds")),
        )
        for c, v in zip(("C", "D"), verdicts, strict=True)
    ]
    pd.DataFrame(rows).assign(note="").to_csv(
        tmp_path / "findings_summary.csv", index=False
    )
    words = " ".join(re.sub("<[^>]*>", " ", render_sweep(tmp_path).read_text()).split())
    assert (
        "model and setting holds C a x=1 contradicted C b x=2 inconclusive D a x=1 holds D b x=2"
        in words
    )
    assert_names(words, "2 hold", "1 contradicted", "1 inconclusive")


def test_text_breaks_where_a_reader_expects_it():
    assert (
        breakable("1 [-1.5, 2e-05] & [a, b]")
        == '1 <span class="whole">[-1.5, 2e-05]</span> &amp; [a, b]'
    )
    assert breakable("v001/tiny__scale_channel") == "v001/<wbr>tiny__<wbr>scale_channel"
    assert breakable("a_b") == "a_b"
