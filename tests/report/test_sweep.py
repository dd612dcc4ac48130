"""A sweep of hundreds of runs: joined as text, and drawn in part."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from posbench.files.atomic import write_csv
from posbench.plots.sweep import with_setting
from posbench.report import sweep
from posbench.run.folder import JOBS, RunDir
from posbench.search.held_back import TABLE_COLUMNS, gain_facts
from posbench.stats import findings
from posbench.stats.bootstrap import Estimate
from posbench.stats.findings import Finding
from posbench.stats.glance import Glance
from tests.conftest import Result
from tests.frames import metrics, with_missing_answers
from tests.frames import sweep as summary


@pytest.mark.parametrize("plain", [True, False], ids=["as text", "as tables"])
def test_the_tables_of_runs_stand_below_each_other(plain: bool, tmp_path: Path) -> None:
    files = []
    wanted = []
    for name, value in (("a", "0.5"), ("b", "[1,2]")):
        table = metrics().assign(note="" if plain else 'a "b", c')
        (tmp_path / "v001" / name).mkdir(parents=True)
        file = tmp_path / "v001" / name / "metrics.csv"
        table.to_csv(file, index=False)
        files.append(({"method.factor": value, "model": "x"}, file))
        own = pd.read_csv(file, dtype=str, keep_default_na=False)
        own.insert(0, "run", f"v001/{name}")
        own.insert(1, "method.factor", value)
        wanted.append(own)
    found = pd.read_csv(
        io.StringIO(sweep._join_tables(files, ["method.factor"])),
        dtype=str,
        keep_default_na=False,
    )
    pd.testing.assert_frame_equal(found, pd.concat(wanted, ignore_index=True))


def test_a_figure_shows_some_of_many_settings() -> None:
    every = summary([number / 10 for number in range(60)])
    some = sweep._spread_runs(every, ["method.factor"])
    drawn = sorted(
        every.loc[every["run"].isin(some), "method.factor"].astype(float).unique()
    )
    assert len(drawn) == sweep.MAX_SETTINGS and drawn[0] == 0
    assert max(b - a for a, b in pairwise(drawn)) < 0.31, "spread evenly"
    few = summary([0.0, 0.5, 1.0])
    assert set(sweep._spread_runs(few, ["method.factor"])) == set(few["run"])


def test_a_sweep_is_reproduced_by_its_own_command(
    small: list[str],
    posbench: Callable[..., Result],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that was made alone before keeps its command; the sweep has its own."""
    settings = [*small, "stages=[evaluate]", "method.channel=3", "method.layers=[1,2]"]
    assert posbench(*settings, "method.factor=0.5").status == 0
    assert posbench("-m", *settings, "method.factor=0.5,0").status == 0
    (file,) = outputs.glob(f"*/*/*/{JOBS}")
    wanted = "method.factor=0.5,0"

    def assert_reproducible() -> None:
        assert wanted in RunDir(file.parent).command
        page = html.unescape((file.parent / "report.html").read_text())
        command = page.partition("How to reproduce")[2].partition("</pre>")[0]
        assert "posbench -m " in command and wanted in command

    assert_reproducible()
    monkeypatch.chdir(file.parents[1])
    for verb, name in (
        ("report", str(file.parent)),
        ("rescore", str(file.parent)),
        ("report", file.parent.name),
    ):
        assert posbench(verb, name, verb=True).status == 0
        assert_reproducible()


def test_a_setting_whose_answers_are_missing_is_not_drawn() -> None:
    tables = [
        metrics(after=after).assign(run=run, **{"method.factor": factor})
        for run, factor, after in (("a", 0.5, [0.6, 0.5, 0.4]), ("b", 0.1, [0.9] * 3))
    ]
    rows = pd.concat([tables[0], with_missing_answers(tables[1])], ignore_index=True)
    first = ["run", "method.factor"]
    rows = rows[[*first, *rows.columns.drop(first)]]
    figure, caption = sweep._score_figure(
        rows, ["method.factor"], pd.Series(["a", "b"]), ""
    )
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[1].lines}
    np.testing.assert_allclose(lines["0.5"], [60, 50, 40])
    assert np.isnan(lines["0.1"]).all()
    assert "1 of 2 runs: not drawn" in caption


@pytest.mark.parametrize(
    ("jobs", "note"),
    [
        ({"method.factor=1": "a", "method.factor=0": "b"}, ""),
        (
            {"method.factor=1": "a", "method.factor=0": "b", "method.factor=1.0": "a"},
            "3 settings are 2 runs: method.factor=1 and 1.0 are one run",
        ),
        # The seed changes no result under any value of the other key.
        (
            {"k=1 s=1": "a", "k=1 s=2": "a", "k=2 s=1": "b", "k=2 s=2": "b"},
            "4 settings are 2 runs: s=1 and 2 are one run",
        ),
        # It changes none under one of them.
        (
            {"k=1 s=1": "a", "k=1 s=2": "a", "k=2 s=1": "b", "k=2 s=2": "c"},
            "4 settings are 3 runs: k=1, s=1 and 2 are one run",
        ),
        # Both keys vary in it, and their values crossed are other runs.
        (
            {"k=1 s=1": "a", "k=2 s=2": "a", "k=1 s=2": "b", "k=2 s=1": "c"},
            "4 settings are 3 runs: k=1, s=1 and k=2, s=2 are one run",
        ),
    ],
)
def test_settings_that_are_one_run_are_named(jobs: dict[str, str], note: str) -> None:
    runs = [Path(run) for run in jobs.values()]
    assert sweep.same_runs_note([job.split() for job in jobs], runs) == note


def _scored_jobs(outputs: Path, *curves: list[float]) -> list[dict[str, Any]]:
    """Jobs over a factor, and their runs, with the scores of the method at three gold positions."""
    jobs = []
    for number, after in enumerate(curves):
        run = outputs / f"kv/v001/tiny__scale_channel__aaaa000{number}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("{}")
        table = metrics(after=after)
        of_average = (table["gold_position"] == "all") & (table["metric"] == "accuracy")
        bias = np.std(after, ddof=1) if min(after) < 1 else np.nan
        ends = {"value": bias, "ci_low": bias - 0.05, "ci_high": bias + 0.05}
        note = "" if min(after) < 1 else "at the ceiling: all answers are right"
        biases = table[of_average].assign(metric="position_bias", note=note, **ends)
        pd.concat([table, biases]).to_csv(run / "metrics.csv", index=False)
        RunDir(run).seal("posbench")
        overrides = [f"task.pairs={number}"]
        jobs.append({"overrides": overrides, "folder": str(run), "status": 0})
    return jobs


def _widen_intervals(job: dict[str, Any]) -> None:
    """Let a job's numbers be those of a few questions."""
    file = Path(job["folder"]) / "metrics.csv"
    table = pd.read_csv(file)
    few = table.assign(ci_low=table["value"] - 0.2, ci_high=table["value"] + 0.2)
    few.to_csv(file, index=False)
    RunDir(file.parent).seal("posbench")


def _words_of(jobs: list[dict[str, Any]]) -> str:
    """What the page of a sweep says, without its tags."""
    folder = sweep.summarise(jobs, Console(quiet=True), command="posbench -m a=0,1")
    assert folder is not None
    page = (folder / "report.html").read_text("utf-8")
    return html.unescape(" ".join(re.sub("<[^>]*>", " ", page).split()))


def _glance_of(jobs: list[dict[str, Any]]) -> Glance:
    """The first look at a sweep."""
    folder = sweep.summarise(jobs, Console(quiet=True), command="posbench -m a=0,1")
    assert folder is not None
    scores = sweep._read_scores(folder)
    assert scores is not None
    return scores.glance


def test_settings_that_read_alike_have_no_least_and_no_most(tmp_path: Path) -> None:
    words = _words_of(_scored_jobs(tmp_path, *2 * [[0.9, 0.5, 0.9]]))
    assert "the average is 76.7 % in all 2" in words
    assert "runs from" not in words and "least position" not in words


def test_settings_that_read_alike_share_an_interval_only_where_they_have_one(
    tmp_path: Path,
) -> None:
    jobs = _scored_jobs(tmp_path / "same", *2 * [[0.9, 0.5, 0.9]])
    assert list(map(str, _glance_of(jobs).numbers)) == [
        "position bias in all 2 that measured it 23.1 [18.1, 28.1] points",
        "average in all 2 76.7 [73.7, 79.7] %",
    ]
    jobs = _scored_jobs(tmp_path / "other", *2 * [[0.9, 0.5, 0.9]])
    # The second setting was asked a few questions only.
    _widen_intervals(jobs[1])
    assert list(map(str, _glance_of(jobs).numbers)) == [
        "position bias in all 2 that measured it 23.1 points",
        "average in all 2 76.7 %",
    ]
    # So is it where two of three read alike.
    curves = [[0.9, 0.5, 0.9], [0.9, 0.5, 0.9], [0.4, 0.4, 0.5]]
    jobs = _scored_jobs(tmp_path / "two_of_three", *curves)
    two_alike = "highest average (task.pairs=0 and 1 other) 76.7"
    assert f"{two_alike} [73.7, 79.7] %" in map(str, _glance_of(jobs).numbers)
    _widen_intervals(jobs[1])
    numbers = list(map(str, _glance_of(jobs).numbers))
    assert f"{two_alike} %" in numbers
    assert "most position bias (task.pairs=0 and 1 other) 23.1 points" in numbers


def test_of_the_best_settings_alike_the_least_biased_is_named(tmp_path: Path) -> None:
    """0, 2 and 3 have an average of 70 %, one of them by a sum that rounds to more; 2 has the least bias of them."""
    curves = [0.9, 0.5, 0.7 + 1e-15], [0.4, 0.4, 0.5], [0.8, 0.6, 0.7], [0.9, 0.6, 0.6]
    jobs = _scored_jobs(tmp_path, *curves)
    glance = _glance_of(jobs)
    best = "highest average (task.pairs=2 and 2 others) 70.0"
    assert str(glance.numbers[-1]).startswith(best)
    assert "to 70.0 % (2 and 2 others)" in glance.details


@pytest.mark.parametrize(
    ("best", "at_end"), [("0", True), ("1", False), ("0 2", True), ("0 1", False)]
)
def test_the_best_are_at_an_end_if_all_of_them_are(best: str, at_end: bool) -> None:
    settings = [
        sweep._Setting(name, [], None, None, None, None, "", "") for name in "012"
    ]
    chosen = [setting for setting in settings if setting.name in best.split()]
    assert sweep._are_at_an_end(chosen, settings) is at_end


def test_the_least_measured_bias_is_not_called_the_least(tmp_path: Path) -> None:
    """The last setting is right everywhere, so that it has no bias that could be measured."""
    curves = [0.9, 0.5, 0.9], [0.9, 0.3, 0.9], [1.0, 1.0, 1.0]
    words = _words_of(_scored_jobs(tmp_path, *curves))
    assert "least measured position bias (task.pairs=0)" in words
    assert "least position bias" not in words


def test_keys_with_one_last_name_are_told_apart() -> None:
    rows = summary([0, 1]).rename(columns={"method.factor": "task.seed"})
    rows = rows.assign(**{"method.seed": 5, "method.factor": 2})
    keys = ["task.seed", "method.seed", "method.factor"]
    _, settings, _ = with_setting(rows, keys)
    assert settings[0] == "task.seed=0, method.seed=5, factor=2"


def test_terminal_and_page_show_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings of a sweep are read once, and terminal, page and first look say the same of them."""
    jobs = _scored_jobs(tmp_path, [0.9, 0.5, 0.9], [0.7, 0.6, 0.8])
    read = []
    read_settings = sweep._read_settings
    monkeypatch.setattr(
        sweep, "_read_settings", lambda *args: read.append(1) or read_settings(*args)
    )
    console = Console(width=200, file=io.StringIO(), force_terminal=False)
    folder = sweep.summarise(jobs, console, command="posbench -m method.factor=0,1")
    assert len(read) == 1
    assert folder is not None
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    page = (folder / "report.html").read_text()
    words = html.unescape(" ".join(re.sub("<[^>]*>", " ", page).split()))
    for average in ("76.7 [73.7, 79.7]", "70.0 [67.0, 73.0]"):
        assert average in printed and average in words
    assert "the average runs from 70.0 % (1) to 76.7 % (0)" in words


def test_a_swept_seed_is_named_as_typed(tmp_path: Path) -> None:
    rows = summary([0, 1]).rename(columns={"method.factor": "task.seed"})
    rows.to_csv(tmp_path / "summary.csv", index=False)
    page = sweep.render_sweep(tmp_path).read_text()
    assert "(task.seed=0)" in page and "task.seed=seed" not in page


def _sweep_of_verdicts(
    root: Path, settings: Sequence[Sequence[str]]
) -> tuple[str, str]:
    """What terminal and page say of a sweep in which every run judged two claims, and the last job failed.

    Args:
        root: Where the runs go.
        settings: The overrides of each job.
    """
    jobs: list[dict[str, object]] = []
    for number, setting in enumerate(settings):
        run = root / f"kv/v001/tiny__rollout__none__aaaa000{number}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("{}")
        judged = [
            Finding.above(f"claim {name}", "a share", Estimate(*interval, 40), 0.05)
            for name, interval in (("A", (0.5, 0.4, 0.6)), ("B", (0.1, -0.1, 0.3)))
        ]
        write_csv(run / "findings.csv", findings.findings_table(judged, "tiny"))
        RunDir(run).seal("posbench")
        jobs.append({"overrides": setting, "folder": str(run), "status": 0})
    jobs[-1] |= {"folder": None, "status": 2}
    out = io.StringIO()
    folder = sweep.summarise(jobs, Console(width=200, file=out), command="posbench -m")
    assert folder is not None
    page = (folder / "report.html").read_text()
    words = html.unescape(" ".join(re.sub("<[^>]*>", " ", page).split()))
    return " ".join(out.getvalue().split()), words


def test_verdicts_name_the_jobs_that_failed(tmp_path: Path) -> None:
    printed, words = _sweep_of_verdicts(tmp_path, [["task=kv"], ["task=nq"]])
    for told in (printed, words):
        assert "Not shown, as failed: 1 job (task=nq)." in told
        assert "1 of 2 jobs failed" in told


def _searched(outputs: Path, gains: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Jobs of a sweep over models that only searched, and their runs, with these rows of held_back.csv."""
    jobs = []
    for model, facts in gains.items():
        run = outputs / f"kv/v001/{model}__rope_base__aaaa0001"
        run.mkdir(parents=True)
        config = {"model": {"name": model}, "search": {"name": "bases"}}
        (run / "config.yaml").write_text(json.dumps(config))
        table = pd.DataFrame([facts], columns=list(TABLE_COLUMNS))
        write_csv(run / "held_back.csv", table)
        RunDir(run).seal("posbench")
        jobs.append({"overrides": [f"model={model}"], "folder": str(run), "status": 0})
    return jobs


def _gains(found: float, questions: int = 8, **facts: Any) -> dict[str, Any]:
    """A row of held_back.csv: that loss beside an unmodified one of 1.0 on average."""
    clusters = [str(number) for number in range(questions)]
    unmodified = [0.9, 1.1] * (questions // 2)
    return gain_facts("loss", [found] * questions, unmodified, clusters) | facts


def test_searches_alone_are_joined_by_their_gains(tmp_path: Path) -> None:
    beside = {"beside": "question_first_and_last"}
    gains = {
        "tiny": _gains(0.5),
        "tiny_b": _gains(1.0, **beside),
        "tiny_c": _gains(1.0, questions=2),
        "tiny_d": _gains(1.5),
    }
    out = io.StringIO()
    jobs = _searched(tmp_path, gains)
    folder = sweep.summarise(jobs, Console(width=200, file=out), command="posbench -m")
    assert folder is not None
    joined = pd.read_csv(folder / "held_back_summary.csv")
    assert list(joined["model"]) == list(gains)
    np.testing.assert_allclose(joined["gain"], [0.5, 0, np.nan, -0.5], atol=1e-9)
    page = sweep.render_sweep(folder).read_text()
    words = html.unescape(" ".join(re.sub("<[^>]*>", " ", page).split()))
    for told in (" ".join(out.getvalue().split()), words):
        assert "1 of 3 checked gain" in told
        counts = "1 gains, 1 cannot tell, 1 not checked, 1 harms"
        assert "Of 4 searches, checked" in told and f"found: {counts}." in told
        assert "tiny gains loss 0.500 [" in told and "0.5 1 8" in told
        assert "tiny_b cannot tell loss" in told
        assert "1 1 (question_first_and_last alone) 8" in told
        assert "tiny_c not checked loss 2" in told
        assert "tiny_d harms loss" in told


@pytest.mark.parametrize(
    ("found", "questions", "word", "tone"),
    [
        ([0.5, 0.6], 8, "2 of 2 gain", "good"),
        ([0.5, 1.5], 8, "1 of 2 gain", "bad"),
        ([0.5, 1.0], 8, "1 of 2 gain", "open"),
        ([0.5, 1.5], 2, "not checked", "open"),
    ],
)
def test_a_sweep_of_searches_says_how_they_fared(
    found: list[float], questions: int, word: str, tone: str, tmp_path: Path
) -> None:
    gains = {f"tiny_{loss}": _gains(loss, questions) for loss in found}
    jobs = _searched(tmp_path, gains)
    folder = sweep.summarise(jobs, Console(quiet=True), command="posbench -m")
    assert folder is not None
    joined = pd.read_csv(folder / "held_back_summary.csv")
    glance = sweep._searches_glance(folder, joined)
    assert (glance.word, glance.tone) == (word, tone)


def test_figures_name_the_setting_of_their_run(tmp_path: Path) -> None:
    """Two settings of one model draw figures of the same names: each is shown, those of one name side by side."""
    runs = [tmp_path / f"kv/v001/tiny__{name}" for name in "ab"]
    for run in runs:
        (run / "figures").mkdir(parents=True)
        config = {"model": {"name": "tiny"}}
        (run / "config.yaml").write_text(json.dumps(config))
        for name in ("one", "two"):
            svg = '<svg xmlns="http://www.w3.org/2000/svg" width="9pt" height="9pt"/>'
            (run / f"figures/{name}.svg").write_text(svg)
        captions = {"one": "First.", "two": "Second."}
        (run / "figures/captions.json").write_text(json.dumps(captions))
    settings = {"v001/tiny__a": "tiny x=1", "v001/tiny__b": "tiny x=2"}
    assert sweep._figures_of_experiment(runs, settings) == [
        (runs[0] / "figures/one.svg", "tiny x=1: First."),
        (runs[1] / "figures/one.svg", "tiny x=2: First."),
        (runs[0] / "figures/two.svg", "tiny x=1: Second."),
        (runs[1] / "figures/two.svg", "tiny x=2: Second."),
    ]


def test_a_sweep_whose_jobs_all_failed_says_so_once() -> None:
    settings = ("task=kv", "task=nq")
    jobs = [{"overrides": [s], "folder": None, "status": 2} for s in settings]
    out = io.StringIO()
    assert sweep.summarise(jobs, Console(file=out), command="posbench -m") is None
    assert out.getvalue() == "failed: all 2 jobs (exit status 2)\n"


def test_a_claim_in_several_settings_is_one_claim(tmp_path: Path) -> None:
    settings = [[f"method={name}", "study.x=1"] for name in ("a", "b", "c")]
    printed, words = _sweep_of_verdicts(tmp_path, settings)
    for told in (printed, words):
        assert "2 claims of the paper on tiny in 2 settings: of 4 verdicts, 2 " in told
        assert "tiny method=a; tiny method=b" in told
        assert "model and setting" in told and "models" not in told
