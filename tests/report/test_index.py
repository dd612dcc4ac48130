"""The list of runs: what each is and how it stands; only whole runs show numbers."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from rich.cells import cell_len
from rich.console import Console

from posbench.cli.main import main
from posbench.files.atomic import to_canonical
from posbench.report.folder import read_csv
from posbench.report.glance import run_glance, run_word
from posbench.report.index import (
    age,
    legend,
    list_title,
    next_step,
    records,
    run_table,
)
from posbench.report.summaries import summaries
from posbench.run.folder import RunDir, find_run, open_run, open_run_dir, runs_in
from posbench.run.lease import owning
from posbench.schema import override_text
from posbench.stats.findings import FINDING_COLUMNS
from posbench.stats.verdict import run_verdict
from tests.conftest import Result
from tests.frames import metrics, with_missing_answers
from tests.messages import assert_names, refused
from tests.stats.test_verdict import MIDDLE_LOST, simulated_metrics


def made(
    folder: Path, method: dict[str, Any], day: int, state: str = "done", **more: Any
) -> Path:
    """A run folder of that state, begun on that day of May."""
    folder.mkdir(parents=True)
    task = {
        "name": "kv_retrieval",
        "pairs": 12,
        "positions": [0, 5],
        **more.pop("task", {}),
    }
    ran = more.pop("ran", {})
    config = {
        "model": more.pop("model", {"name": "tiny", "path": "x"}),
        "task": task,
        "method": method,
        **more,
    }
    run = RunDir(folder, folder.name[-8:])
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    run.write_facts("provenance.json", {"started": f"2026-05-{day:02d}T10:00:00+00:00"})
    run.write_facts("status.json", {"state": state, "stages": {}, "seconds": 2.5})
    metrics(method["name"]).to_csv(folder / "metrics.csv", index=False)
    if state == "done":
        run.write_json("method.json", ran)
        run.seal("posbench")
    return folder


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Six runs of a task in two versions, one in each state, and one of a study."""
    suite = tmp_path / "outputs/kv_retrieval"
    scaled = {"name": "scale_channel", "layers": [1, 2]}
    made(suite / "v001/tiny__scale_channel__aaaa0001", scaled | {"factor": 0.0}, 1)
    made(
        suite / "v001/tiny__scale_channel__aaaa0002",
        scaled | {"factor": -1},
        2,
        task={"pairs": 24},
    )
    made(suite / "v001/tiny__none__bbbb0001", {"name": "none"}, 3)
    made(suite / "v002/tiny__none__bbbb0002", {"name": "none"}, 4, "running")
    made(suite / "v002/tiny__none__bbbb0003", {"name": "none"}, 5, "failed")
    study = made(
        tmp_path / "outputs/fig9/v001/tiny__maps__none__cccc0001",
        {"name": "none"},
        6,
        "running",
    )
    (study / "metrics.csv").unlink()
    (study / "config.yaml").write_text(
        yaml.safe_dump({"model": {"name": "tiny"}, "study": {"name": "maps"}})
    )
    row: dict[str, Any] = dict.fromkeys(FINDING_COLUMNS, 0.0)
    told = [
        ("paper", "holds"),
        ("paper", "holds"),
        ("paper", "inconclusive"),
        ("control", "contradicted"),
    ]
    found = pd.DataFrame(
        [row | {"kind": kind, "verdict": verdict} for kind, verdict in told]
    )
    found.to_csv(study / "findings.csv", index=False)
    RunDir(study, "cccc0001").seal("posbench")
    return tmp_path / "outputs"


def by_hash(outputs: Path, *filters: str) -> dict[str, Any]:
    return {str(record["run"]): record for record in records(outputs, filters)}


def test_newest_first_with_the_numbers_of_their_tables(outputs: Path) -> None:
    found = by_hash(outputs)
    assert [*found] == [
        "cccc0001",
        "bbbb0003",
        "bbbb0002",
        "bbbb0001",
        "aaaa0002",
        "aaaa0001",
    ]
    scaled = found["aaaa0001"]
    plain = found["bbbb0001"]
    # The means over the positions of tests/frames.py.
    assert (
        scaled["score"] == pytest.approx((0.96 + 0.9 + 0.92) / 3) and scaled["n"] == 300
    )
    assert scaled["difference"] == pytest.approx(
        scaled["score"] - (0.98 + 0.6 + 0.94) / 3
    )
    assert scaled["score_ci_high"] == pytest.approx(scaled["score"] + 0.03)
    assert (
        plain["score"] == pytest.approx((0.98 + 0.6 + 0.94) / 3)
        and plain["difference"] is None
    )
    assert (
        found["cccc0001"]["verdicts"] == "2 hold, 1 inconclusive"
        and found["cccc0001"]["score"] is None
    )
    assert scaled["folder"] == str(
        outputs / "kv_retrieval/v001/tiny__scale_channel__aaaa0001"
    )
    assert scaled["seconds"] == 2.5 and scaled["started"].startswith("2026-05-01")


def test_settings_are_those_in_which_the_rows_shown_differ(outputs: Path) -> None:
    found = by_hash(outputs)
    assert found["aaaa0001"]["settings"] == {"task.pairs": "12", "method.factor": "0"}
    assert found["aaaa0002"]["settings"] == {"task.pairs": "24", "method.factor": "-1"}
    assert found["bbbb0001"]["settings"] == {"task.pairs": "12"}, (
        "a method without that key"
    )
    assert by_hash(outputs, "none")["bbbb0001"]["settings"] == {}, (
        "alike among those shown"
    )


def test_what_a_search_found_stands_where_the_config_has_nothing(outputs: Path) -> None:
    suite = outputs / "kv_retrieval/v003"
    open_ = {"name": "a-b", "parts": {"b": {"name": "b", "channel": None}}}
    for day, channel in enumerate((7, 9), 1):
        ran = {
            "name": "a-b",
            "parts": {"b": {"channel": channel, "x": 1}},
            "source": "a search",
        }
        made(suite / f"tiny__a-b__dddd000{channel}", open_, day, ran=ran)
    made(suite / "tiny__a-b__dddd0000", open_, 3, "failed", ran=ran)
    found = {
        name: record["settings"] for name, record in by_hash(outputs, "a-b").items()
    }
    key = "method.parts.b.channel"
    assert found == {
        "dddd0007": {key: "7"},
        "dddd0009": {key: "9"},
        "dddd0000": {key: "null"},
    }
    assert [*by_hash(outputs, f"{key}=9")] == ["dddd0009"]


@pytest.mark.parametrize("in_list", [False, True])
@pytest.mark.parametrize("is_applied", [True, False], ids=["applied", "found"])
def test_what_a_run_applied_or_found_replaces_the_constants_of_the_models_file(
    is_applied: bool, in_list: bool, outputs: Path
) -> None:
    """A search that evaluated nothing has no method.json, and found.yaml names the searched method alone."""
    of_model = {"channel": 15, "factor": -1.0, "last": 1}
    key = "method.parts.b" if in_list else "method"
    for channel in (7, 9):
        result = {"channel": channel, "factor": channel / 14}
        folder = outputs / f"kv_retrieval/v003/tiny__b__dddd000{channel}"
        method = {"name": "b", **of_model}
        ran = {**result, "last": 1, "source": "a search"}
        if in_list:
            parts = {"a": {"factor": 3.0}, "b": of_model}
            method = {"name": "a-b", "parts": parts}
            ran = {"name": "a-b", "parts": {**parts, "b": ran}}
        made(folder, method, channel, ran=ran)
        if not is_applied:
            (folder / "method.json").unlink()
            block = {**result, "loss": 0.5, "source": "a search"}
            (folder / "found.yaml").write_text(yaml.safe_dump({"b": block}))
            open_run_dir(folder).seal("posbench")
    found = by_hash(outputs, f"{key}.last=1")
    assert {name: record["settings"] for name, record in found.items()} == {
        "dddd0007": {f"{key}.channel": "7", f"{key}.factor": "0.5"},
        "dddd0009": {f"{key}.channel": "9", f"{key}.factor": str(9 / 14)},
    }
    assert [*by_hash(outputs, f"{key}.factor=0.5")] == ["dddd0007"]
    assert not by_hash(outputs, f"{key}.last=1", f"{key}.factor=-1")


def test_states(outputs: Path) -> None:
    states = {name: record["state"] for name, record in by_hash(outputs).items()}
    assert (
        states["bbbb0002"] == "killed"
        and states["bbbb0003"] == "failed"
        and states["aaaa0001"] == "done"
    )
    with owning(outputs / "kv_retrieval/v002/tiny__none__bbbb0002"):
        assert by_hash(outputs)["bbbb0002"]["state"] == "running"
    unfinished = by_hash(outputs)["bbbb0003"]
    assert unfinished["score"] is None, "its table may be half of it"


@pytest.mark.parametrize(
    "name", ["metrics.csv", "config.yaml", "manifest.json", "DONE"]
)
def test_a_damaged_run_shows_no_number(name: str, outputs: Path) -> None:
    file = outputs / "kv_retrieval/v001/tiny__scale_channel__aaaa0001" / name
    file.write_bytes(file.read_bytes().replace(b"0", b"1").replace(b"a", b"b"))
    found = by_hash(outputs)
    assert (
        found["aaaa0001"]["state"] == "damaged" and found["aaaa0001"]["score"] is None
    )
    assert (
        found["aaaa0002"]["state"] == "done" and found["aaaa0002"]["score"] is not None
    )


@pytest.mark.parametrize(
    "name", ["config.yaml", "predictions.jsonl", "status.json", "figures/a.svg"]
)
@pytest.mark.parametrize("how", ["deleted", "halved"])
def test_a_run_that_lost_a_file_is_listed_as_damaged(
    name: str, how: str, outputs: Path
) -> None:
    run = open_run(outputs / "kv_retrieval/v001/tiny__scale_channel__aaaa0001")
    (run.path / "figures").mkdir()
    for added in ("predictions.jsonl", "figures/a.svg"):
        (run.path / added).write_text("some rows")
    assert by_hash(outputs)["aaaa0001"]["state"] == "damaged", "added rows"
    run.seal("posbench")
    assert by_hash(outputs)["aaaa0001"]["state"] == "done"
    file = run.path / name
    half = file.read_bytes()[: file.stat().st_size // 2]
    file.unlink()
    if how == "halved":
        file.write_bytes(half)
    found = by_hash(outputs)
    assert found["aaaa0001"]["state"] == "damaged"
    assert found["aaaa0001"]["score"] is None and not found["aaaa0001"]["verdict"]
    assert found["aaaa0002"]["state"] == "done"


def test_a_run_without_its_end_shows_no_number(outputs: Path) -> None:
    run = open_run(outputs / "kv_retrieval/v001/tiny__scale_channel__aaaa0001")
    (run.path / "DONE").unlink()
    assert by_hash(outputs)["aaaa0001"]["state"] == "killed"
    assert by_hash(outputs)["aaaa0001"]["score"] is None
    assert "rescore" not in next_step(records(outputs, ["aaaa0001"]))
    run.seal("posbench")
    run.begin_rescore()
    (run.path / "metrics.csv").write_text("half")
    assert by_hash(outputs)["aaaa0001"]["state"] == "killed"
    step = next_step(records(outputs, ["aaaa0001"]))
    assert step.startswith(f"posbench rescore {run.path}")
    with owning(run.path):
        assert by_hash(outputs)["aaaa0001"]["state"] == "running"


def test_a_check_of_some_files_tells_what_the_whole_one_does(outputs: Path) -> None:
    run = RunDir(outputs / "kv_retrieval/v001/tiny__scale_channel__aaaa0001")
    for name in ("metrics.csv", "config.yaml"):
        kept = (run.path / name).read_bytes()
        (run.path / name).write_bytes(kept + b"#")
        assert (
            run.damaged([name]) == run.damaged() == [name]
            and run.damaged(["status.json"]) == []
        )
        (run.path / name).write_bytes(kept)
    (run.path / "attention.csv").write_text("added")
    assert (
        run.damaged(["attention.csv"]) == ["attention.csv"]
        and run.damaged(["metrics.csv"]) == []
    )


def test_filters(outputs: Path) -> None:
    for filters, names in {
        ("state=done", "method=scale_*"): {"aaaa0001", "aaaa0002"},
        ("task.pairs=24",): {"aaaa0002"},
        ("method.factor=-1",): {"aaaa0002"},
        ("method.factor=-1.0",): {"aaaa0002"},
        ("task.positions=[0,5]", "v002"): {"bbbb0002", "bbbb0003"},
        ("task.positions=[0, 5]", "v002"): {"bbbb0002", "bbbb0003"},
        ("verdict=better", "task.pairs=2.4e1"): {"aaaa0002"},
        ("FIG9",): {"cccc0001"},
        ("study=maps", "state=failed"): set(),
        ("run=aaaa*",): {"aaaa0001", "aaaa0002"},
    }.items():
        assert set(by_hash(outputs, *filters)) == names, filters
    with refused(
        "filter", "modle=tiny", allowed=("model", "task", "method"), hint="model"
    ):
        records(outputs, ["modle=tiny"])
    with refused("filter", "task.pair=12", allowed="setting", hint="task.pairs"):
        records(outputs, ["task.pair=12"])
    # No run can ever be in this state, unlike one that names a model of later runs.
    with refused("state", "finished", allowed=("done", "killed"), hint="state=done"):
        records(outputs, ["state=finished"])
    assert not records(outputs, ["state=damaged"])


def lines(outputs: Path, width: int, *filters: str) -> list[str]:
    """The list as a terminal of that width shows it, without its title; colours and links left out."""
    console = Console(width=width, file=StringIO(), force_terminal=False)
    with console.capture() as capture:
        console.print(run_table(records(outputs, filters), width))
    text = capture.get().splitlines()
    assert all(cell_len(line) <= width for line in text)
    start = next(i for i, line in enumerate(text) if line.startswith("run "))
    return text[start:]


def cells(outputs: Path, width: int, *filters: str) -> list[list[str]]:
    """The words of each line but the header."""
    return [line.split() for line in lines(outputs, width, *filters)[1:]]


def test_a_run_has_one_line_and_the_newest_is_first(outputs: Path) -> None:
    hashes = [run.hash for run in summaries(runs_in(outputs))]
    for width in (60, 80, 100, 160, 400):
        listed = [words[0] for words in cells(outputs, width)]
        assert sorted(listed) == sorted(hashes)
        assert listed == [record["run"] for record in records(outputs)]


def test_a_line_has_what_ran_its_settings_verdict_score_bias_and_age(
    outputs: Path,
) -> None:
    found = records(outputs, ["scale_channel"])
    shared = ("v001", "model tiny", "task kv_retrieval", "scale_channel")
    assert_names(list_title(found), "2 runs", *shared)
    narrow = cells(outputs, 50, "scale_channel")
    assert narrow[0][:4] == ["aaaa0002", "pairs=24", "factor=-1", "better"]
    assert narrow[0][4] == "92.7"
    (study,) = cells(outputs, 50, "maps")
    assert study[:8] == ["cccc0001", "tiny", "fig9", "maps", "2", "of", "3", "hold"]
    failed, killed, plain, *_ = cells(outputs, 80, "kv_retrieval")
    assert failed[:3] == ["bbbb0003", "unmodified", "version=v002"]
    assert failed[3] == "failed" and killed[3] == "killed"
    assert plain[:4] == ["bbbb0001", "unmodified", "version=v001", "measured"]


def test_a_wide_terminal_has_intervals_differences_and_all_verdicts(
    outputs: Path,
) -> None:
    first, _ = lines(outputs, 160, "scale_channel")[1:]
    assert "92.7 [89.7, 95.7]" in first and "+8.7 [4.7, 12.7]" in first
    assert "2 hold, 1 inconclusive" in lines(outputs, 160, "maps")[1]


def test_settings_are_compared_among_runs_of_one_kind(outputs: Path) -> None:
    found = {words[0]: words for words in cells(outputs, 160)}
    assert {"pairs=12", "factor=0"} < set(found["aaaa0001"])
    assert {"pairs=24", "factor=-1"} < set(found["aaaa0002"])
    assert not any("pairs" in word for word in found["bbbb0001"]), "other methods"


def sweep(outputs: Path) -> None:
    """Twelve runs of one method: three factors, two seeds, and channels that follow the seeds."""
    for day, (factor, seed, limit) in enumerate(
        itertools.product((0.5, 0, -1), (1, 2), (30, 40)), 1
    ):
        made(
            outputs / f"kv_retrieval/v003/tiny__scale_channel__eeee{day:04d}",
            {"name": "scale_channel", "channel": 70 + seed, "factor": factor},
            day,
            task={"seed": seed, "limit": limit},
        )


def test_no_two_lines_of_a_kind_are_alike_even_where_settings_are_left_out(
    outputs: Path,
) -> None:
    sweep(outputs)
    for width in (80, 160):
        shown = cells(outputs, width, "v003")
        settings = [[word for word in words if "=" in word] for words in shown]
        assert len(shown) == 12 and len({*map(tuple, settings)}) == 12, width
    # A factor has three values, all others two.
    assert all(words[0].startswith("factor=") for words in settings)
    assert any("channel=71" in words for words in settings), "there is room for all"
    narrow = cells(outputs, 60, "v003")
    assert all("..." in words for words in narrow)
    whole = {word for words in settings for word in words}
    left = {word for words in narrow for word in words if "=" in word}
    assert left <= whole, "a value is shown in full or not at all"


def test_long_names_are_cut_before_a_line_breaks(outputs: Path) -> None:
    name = "a-model-with-a-name-that-is-longer-than-many-a-line-of-a-terminal"
    made(
        outputs / "kv_retrieval/v003/x__none__ffff0001",
        {"name": "none"},
        9,
        model={"name": name, "path": "x"},
    )
    for width in (60, 80):
        first = cells(outputs, width)[0]
        assert first[0] == "ffff0001" and first[1].endswith("...")
        assert name.startswith(first[1].removesuffix("...")) and "measured" in first


def test_the_verdict_is_that_of_the_run(outputs: Path) -> None:
    folder = outputs / "kv_retrieval/v001/tiny__scale_channel__aaaa0001"
    table = metrics()
    bias = table.iloc[[0, 0]].assign(
        metric="position_bias",
        gold_position="all",
        method=["none", "scale_channel"],
        value=0.3,
        ci_low=0.2,
        ci_high=0.4,
        note="",
    )
    pd.concat([table, bias]).to_csv(folder / "metrics.csv", index=False)
    RunDir(folder, "aaaa0001").seal("posbench")
    verdict = run_verdict(read_csv(folder / "metrics.csv"))
    assert verdict is not None
    assert by_hash(outputs)["aaaa0001"]["verdict"] == verdict.name
    assert f" {verdict.name} " in lines(outputs, 80, "run=aaaa0001")[1]
    assert by_hash(outputs)["bbbb0003"]["verdict"] == "", "it is not done"


def test_a_study_without_scores_has_the_word_of_its_page(tmp_path: Path) -> None:
    """The word is the study's own, not the number of its claims that hold; a wide terminal has both."""
    folder = made(
        tmp_path / "outputs/order/v001/tiny__order__none__dddd0001",
        {"name": "none"},
        7,
        study={"name": "order", "_target_": "posbench.studies.order.OrderStudy"},
    )
    (folder / "metrics.csv").unlink()
    row: dict[str, Any] = {"accuracy": 60.0, "n": 40, "tokens": 100}
    row |= {"difference_low": 1.0, "difference_high": 9.0}
    policies = [
        row | {"name": name, "difference": difference, "use": name == "reversed"}
        for name, difference in (("as_retrieved", 0.0), ("reversed", 5.0))
    ]
    pd.DataFrame(policies).to_csv(folder / "policies.csv", index=False)
    claim = dict.fromkeys(FINDING_COLUMNS, 0.0) | {"kind": "paper", "verdict": "holds"}
    pd.DataFrame([claim]).to_csv(folder / "findings.csv", index=False)
    facts = {"study": "order", "tables": ["policies"]}
    (folder / "study.json").write_text(json.dumps(facts))
    RunDir(folder, "dddd0001").seal("posbench")
    outputs = tmp_path / "outputs"
    record = by_hash(outputs)["dddd0001"]
    glance = run_glance(folder)
    assert (record["verdict"], record["tone"]) == (glance.word, glance.tone)
    assert (glance.word, record["verdicts"]) == ("gains", "1 holds")
    assert "1 holds" not in lines(outputs, 40)[1]
    assert_names(lines(outputs, 160)[1], "gains", "1 holds")
    # A damaged table of a study has no verdict.
    (folder / "policies.csv").write_text("name\n")
    (outputs / ".runs.json").unlink(missing_ok=True)
    assert by_hash(outputs)["dddd0001"]["state"] == "damaged"


@pytest.mark.parametrize("after", [None, [0.96, 0.9, 0.92], [0.5, 0.5, 0.5]])
@pytest.mark.parametrize("biases", [None, (0.3, 0.2, 0.4), (0.05, 0.0, 0.3)])
def test_the_word_of_a_list_is_that_of_the_page(
    after: list[float] | None, biases: tuple[float, ...] | None, tmp_path: Path
) -> None:
    table = metrics(after=after) if after else metrics()
    if not after:
        table = table[table["method"] == "none"]
    if biases:
        names = dict.fromkeys(table["method"])
        bias = table.iloc[[0] * len(names)].assign(
            metric="position_bias", gold_position="all", method=list(names), note=""
        )
        ends = dict(zip(("value", "ci_low", "ci_high"), biases, strict=True))
        table = pd.concat([table, bias.assign(**ends)])
    folder = tmp_path / "run"
    folder.mkdir()
    table.to_csv(folder / "metrics.csv", index=False)
    glance = run_glance(folder)
    assert run_word(folder) == (glance.word, glance.tone)


def test_of_fixed_runs_the_one_with_the_least_bias_goes_on(tmp_path: Path) -> None:
    found = []
    for number, bias in enumerate((0.10, 0.05, 0.07)):
        folder = tmp_path / f"m__x__{number}"
        folder.mkdir()
        table = simulated_metrics(300, none=MIDDLE_LOST, x=(0.9, 0.85, 0.85, 0.85, 0.9))
        table.to_csv(folder / "metrics.csv", index=False)
        found.append(
            {
                "run": str(number),
                "folder": str(folder),
                "model": "m",
                "task": "kv_retrieval",
                "state": "done",
                "verdict": "fixed",
                "position_bias": bias,
            }
        )
    # The bias of another model or task says nothing about this one.
    found.append(found[1] | {"run": "3", "model": "n", "position_bias": 0.01})
    found.append(found[1] | {"run": "4", "task": "mmlu", "position_bias": 0.01})
    assert "(after 1, the fixed run with the least bias: " in next_step(found)
    # A newest run that is not fixed comes first.
    found[0]["verdict"] = "not fixed"
    assert "(after 0: " in next_step(found)


def test_a_list_ends_with_units_and_the_next_command(outputs: Path) -> None:
    folder = outputs / "kv_retrieval/v002/tiny__none__bbbb0003"
    facts = {"started": "2026-05-05T10:00:00+00:00", "command": "posbench -m x"}
    RunDir(folder, "bbbb0003").write_facts("provenance.json", facts)
    found = records(outputs)
    table = run_table(found, 160)
    counts = {r["n"] for r in found if r["score"] is not None}
    shown = legend(table, found)
    assert shown.startswith("score in %, difference in points, [95 % interval], ")
    assert re.findall(r"\d+", shown.partition("], ")[2]) == [
        f"{int(n)}" for n in sorted({min(counts), max(counts)})
    ]
    assert "interval" not in legend(run_table(found, 60), found)
    # Nothing is to be done after the newest run, a study without a class.
    assert found[0]["run"] == "cccc0001" and found[1]["state"] == "failed"
    assert (
        next_step(found)
        == "posbench -m x  (after bbbb0003: goes on where the run failed)"
    )
    for state, begin in (
        ("incomplete", "posbench -m x  (after"),
        ("mixed", f"remove {folder}, then posbench -m x  (after"),
    ):
        changed = [{**record} for record in found[1:]]
        changed[0]["state"] = state
        assert next_step(changed).startswith(f"{begin} bbbb0003: ")
    (newest, *_) = done = records(outputs, ["run=aaaa*"])
    glance = run_glance(Path(newest["folder"]))
    assert next_step(done) == f"{glance.next}  (after aaaa0002: {glance.purpose})"
    assert next_step([]) == ""


def test_a_table_of_an_older_version_has_a_score_but_no_verdict(outputs: Path) -> None:
    folder = outputs / "kv_retrieval/v001/tiny__scale_channel__aaaa0001"
    metrics().drop(columns=["note", "seed"]).to_csv(folder / "metrics.csv", index=False)
    RunDir(folder, "aaaa0001").seal("posbench")
    found = by_hash(outputs)["aaaa0001"]
    assert found["verdict"] == "" and found["score"] is not None
    assert " done " in lines(outputs, 80, "run=aaaa0001")[1]


def test_a_verdict_has_a_colour_and_a_hash_opens_the_page(outputs: Path) -> None:
    folder = outputs / "kv_retrieval/v001/tiny__scale_channel__aaaa0001"
    page = folder / "report.html"
    page.write_text("")
    console = Console(
        width=80, file=StringIO(), force_terminal=True, color_system="standard"
    )
    with console.capture() as capture:
        console.print(run_table(records(outputs), 80))
    by_line = {
        name: line
        for line in capture.get().splitlines()
        for name in by_hash(outputs)
        if name in line
    }
    assert f";{page.as_uri()}\x1b\\aaaa0001\x1b]8;;" in by_line["aaaa0001"]
    assert "file:" not in by_line["aaaa0002"], "it has no page"
    assert "\x1b[31mfailed" in by_line["bbbb0003"]
    assert "\x1b[33m2 of 3 hold" in by_line["cccc0001"]


def test_missing_answers_have_no_score_in_the_list(outputs: Path) -> None:
    folder = outputs / "kv_retrieval/v001/tiny__scale_channel__aaaa0001"
    table = with_missing_answers(metrics())
    bias = table[table["note"] != ""].assign(metric="position_bias", value=None)
    pd.concat([table, bias]).to_csv(folder / "metrics.csv", index=False)
    RunDir(folder, "aaaa0001").seal("posbench")
    header, line = lines(outputs, 80, "run=aaaa0001")
    assert "missing answers" in line
    assert not {"score", "difference", "bias"} & set(header.split())


def test_age() -> None:
    now = datetime(2026, 5, 8, tzinfo=UTC)
    for seconds, words in (
        (0, "0 s"),
        (59, "59 s"),
        (90, "1.5 min"),
        (7199, "2 h"),
        (86400 * 7, "7 d"),
        (86400 * 71.6, "72 d"),
    ):
        assert age((now - timedelta(seconds=seconds)).isoformat(), now) == words
    assert age("", now) == age("yesterday", now) == ""


def test_values_are_spelled_as_one_types_them() -> None:
    assert [
        override_text(to_canonical(v)) for v in ("a", None, True, 1.0, 0.5, ["0%", 1.0])
    ] == [*("a", "null", "true", "1", "0.5", "[0%,1]")]


def test_the_command_prints_tsv_and_json(
    outputs: Path, posbench: Callable[..., Result]
) -> None:
    table = posbench("ls", "runs", "state=done", "--outputs", str(outputs), verb=True)
    header, *lines = [line.split("\t") for line in table.out.splitlines()]
    assert (
        table.status == 0
        and len(lines) == 4
        and {len(line) for line in lines} == {len(header)}
    )
    told = posbench("ls", "runs", "--json", f"--outputs={outputs}", verb=True)
    assert json.loads(told.out)[0]["run"] == "cccc0001"
    for asked, hint in {
        "model=tinny": "tiny?",
        "scale_chanel": "scale_channel?",
        "model=nope": "",  # "none" is a method
    }.items():
        nothing = posbench(
            "ls", "runs", "fig9", asked, "--outputs", str(outputs), verb=True
        )
        assert (
            nothing.status == 0
            and nothing.err.count("\n") == 1
            and "no run in" in nothing.err
        )
        assert nothing.err.strip().endswith(
            f"passes fig9 {asked}{f'; did you mean {hint}' if hint else ''}"
        )
    assert main(["ls", "runs", "--outputs", str(outputs / "nowhere")]) == 2
    assert main(["ls", "runs", "--all"]) == 2


def test_a_run_by_its_hash(outputs: Path) -> None:
    folder = outputs / "kv_retrieval/v001/tiny__none__bbbb0001"
    assert find_run("bbbb0001", outputs) == folder == find_run(str(folder), outputs)
    with refused("RUN", "bbbb", hint=("tiny__none__bbbb0001", "tiny__none__bbbb0003")):
        find_run("bbbb", outputs)
    with refused("DIR", "dddd", allowed="config.yaml", hint="posbench ls runs"):
        open_run(find_run("dddd", outputs))


def test_runs_are_found_from_any_height(outputs: Path) -> None:
    every = runs_in(outputs)
    assert len(every) == 6 and sorted(runs_in(outputs / "kv_retrieval")) == every[1:]
    assert runs_in(outputs / "fig9/v001") == every[:1] and runs_in(every[0]) == []
    sweep = outputs / "fig9/v001/sweep__x__y"
    sweep.mkdir()
    (sweep / "jobs.json").write_text("[]")
    shutil.copytree(every[0], every[0].with_name(".new-run"))
    assert len(runs_in(outputs)) == 7
