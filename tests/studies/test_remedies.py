"""``study=remedies``: its numbers against its rows, and the choice among remedies."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from posbench.files import hardware
from posbench.stats import bootstrap
from posbench.stats.frames import UNMODIFIED
from posbench.studies.remedies import (
    COLUMNS,
    Remedies,
    _front,
    _time_in_words,
    _time_ratio,
    best_remedy,
)
from tests.conftest import Result


def test_numbers_are_those_of_the_rows(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    result = posbench(
        "study=remedies",
        "task.limit=8",
        "task.positions=[0%,50%,100%]",
        "study.methods=[top_1,best_first,documents_twice,prompt_twice,scale_channel,recite]",
        "study.repeats=1",
        "study.timed=1",
        "runtime.resamples=200",
    )
    assert result.status == 0, result.err
    (folder,) = outputs.glob("remedies/v*/*__*")
    best = re.search(r"(?:Try|the best is) (\w+)", result.out)
    page = (folder / "report.html").read_text()
    assert best and best[1] in ("documents_twice", "prompt_twice", "scale_channel")
    assert "the task places the gold item" in page
    table = pd.read_csv(folder / "remedies.csv", keep_default_na=False)
    table = table.set_index("method")
    scores: dict[str, dict[str, float]] = defaultdict(dict)
    positions: dict[tuple[str, int], list[float]] = defaultdict(list)
    num_cut = 0
    for line in (folder / "predictions.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["method"] == "recite":
            num_cut += row["outcome"] == "cut"
            continue
        scores[row["method"]][row["id"]] = row["scores"]["accuracy"]
        positions[row["method"], row["gold_position"]].append(row["scores"]["accuracy"])
    assert set(scores) == {"none", "documents_twice", "prompt_twice", "scale_channel"}
    for name, of_method in scores.items():
        row = table.loc[name]
        accuracy = 100 * np.mean([*of_method.values()])
        assert float(row["accuracy"]) == pytest.approx(accuracy, abs=0.01)
        gain = accuracy - 100 * np.mean([*scores["none"].values()])
        assert float(row["difference"]) == pytest.approx(gain, abs=0.01)
        worst = min(np.mean(v) for (m, _), v in positions.items() if m == name)
        assert float(row["worst"]) == pytest.approx(100 * worst, abs=0.01)
    # The average over other positions is no gain of an order.
    assert set(table.loc[["best_first", "top_1"], "verdict"]) == {"left out"}
    # A quotation does not fit a reply of one token: what was answered all the same says nothing.
    assert f"{num_cut} cut off" in table.loc["recite", "note"] and num_cut > 1
    assert table.loc["recite", "accuracy"] == ""
    # What stands in the prompt twice is read twice.
    tokens = table["tokens"].replace("", np.nan).astype(float)
    assert 1.8 * tokens["none"] < tokens["documents_twice"] < 2.1 * tokens["none"]
    memory = pd.read_csv(folder / "remedies.csv").set_index("method")["memory_gb"]
    is_known = hardware.reset_resident_peak()
    assert (memory[[*scores]].between(0.1, 10) if is_known else memory.isna()).all()
    assert ("peak memory (GB)" in page) == is_known


def test_memory_has_a_column_where_it_is_known() -> None:
    row: dict[str, object] = dict.fromkeys(COLUMNS, 1.0)
    rows = [
        row
        | {"method": name, "changes": "", "verdict": "helps", "memory_gb": gigabytes}
        for name, gigabytes in (("a", 0.5277), ("b", None))
    ]
    (known, _) = Remedies().sections({"remedies": pd.DataFrame(rows)}, {})
    assert known.header[-1] == "peak memory (GB)"
    assert [cells[-1] for cells in known.rows] == ["0.528", ""]
    (unknown, _) = Remedies().sections({"remedies": pd.DataFrame(rows[1:])}, {})
    assert "memory" not in " ".join(unknown.header) + unknown.text
    assert len(unknown.rows[0]) == len(unknown.header) == len(known.header) - 1


def test_where_every_remedy_lacks_answers_they_are_not_said_not_to_fit() -> None:
    note = "missing answers: 2.1% of 96 replies are no answers: 2 cut off; set task.max_new_tokens=400"
    table = pd.DataFrame(
        {
            "method": ["none", "a", "b"],
            "verdict": ["", "left out", "left out"],
            "note": ["", note, "the same prompts as a"],
        }
    )
    glance = Remedies().glance({"remedies": table})
    assert glance is not None and "each remedy that was asked" in glance.sentence
    assert glance.next.endswith("task.max_new_tokens=400")
    unasked = table.assign(note=["", "no items", "the same prompts as a"])
    glance = Remedies().glance({"remedies": unasked})
    assert glance is not None and "No remedy fits" in glance.sentence


def test_remedies_that_do_not_fit_are_left_out_and_the_others_asked(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    """Prompts that are too long when they are said twice, and methods that do not go together."""
    result = posbench(
        "study=remedies",
        "task.limit=2",
        "task.pairs=64",
        "task.positions=[0%,50%,100%]",
        "study.methods=[documents_twice,rope_base,[self_extend,layer_scaling]]",
        "study.repeats=1",
        "study.timed=1",
    )
    assert result.status == 0, result.err
    (folder,) = outputs.glob("remedies/v*/*__*")
    table = pd.read_csv(folder / "remedies.csv", keep_default_na=False)
    notes = table.set_index("method")["note"]
    assert table.loc[table["verdict"] != "left out", "method"].tolist() == [
        "none",
        "rope_base",
    ]
    assert "prompt length: at most 51" in notes["documents_twice"]
    assert "rotates by hand" in notes["self_extend + layer_scaling"]


def test_methods_of_a_list_are_applied_together(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    """A question before the prompt with a channel scaled: the replies are those of a run under both."""
    small = ("task.limit=4", "task.pairs=12", "task.positions=[0%,50%,100%]")
    both = "[question_first_and_last,scale_channel]"
    result = posbench(
        "study=remedies",
        *small,
        f"study.methods=[scale_channel,{both},[best_first,scale_channel]]",
        "study.repeats=1",
        "study.timed=1",
    )
    assert result.status == 0, result.err
    (folder,) = outputs.glob("remedies/v*/*__*")
    name = "question_first_and_last + scale_channel"
    table = pd.read_csv(folder / "remedies.csv", keep_default_na=False)
    table = table.set_index("method")
    assert table.loc[[name, "scale_channel"], "changes"].tolist() == [
        "prompt and model",
        "model",
    ]
    assert table.loc["best_first + scale_channel", "verdict"] == "left out"
    replies = {}
    for line in (folder / "predictions.jsonl").read_text().splitlines():
        row = json.loads(line)
        replies[row["method"], row["id"]] = row["output"]
    assert posbench(f"method={both}", *small, "stages=[evaluate]").status == 0
    (run,) = outputs.glob("kv_retrieval/v*/*__*")
    compared = 0
    for line in (run / "predictions.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["method"] != "none":
            assert replies[name, row["id"]] == row["output"]
            compared += 1
    assert compared == 12


@pytest.mark.parametrize(
    ("best", "step"),
    [
        ("rope_base", "posbench method=rope_base"),
        (
            "recite + rope_base",
            "posbench 'method=[recite,rope_base]'",
        ),
    ],
)
def test_the_next_step_names_the_methods_of_the_best_remedy(
    best: str, step: str
) -> None:
    rows = [
        {"method": UNMODIFIED, "difference": 0.0, "verdict": ""},
        {"method": best, "difference": 20.0, "verdict": "helps"},
    ]
    common = {"difference_low": 9.0, "difference_high": 30.0, "time": 1.0, "n": 40}
    common |= {"time_low": 0.9, "time_high": 1.1}
    table = pd.DataFrame([{**common, **row} for row in rows])
    glance = Remedies().glance({"remedies": table})
    assert glance is not None and glance.next == step


def test_a_budget_asks_fewer_questions_of_every_remedy(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    result = posbench(
        "study=remedies",
        "task.limit=20",
        "task.pairs=8",
        "task.positions=[0,7]",
        "study.methods=[documents_twice,scale_channel,prompt_twice]",
        "study.repeats=1",
        "study.timed=1",
        "runtime.resamples=100",
        # Three remedies and the unmodified model: ten questions at two positions, and two rounds of a timed one.
        "budget=88prompts",
    )
    assert result.status == 0, result.err
    assert "study remedies: examples 10 of 20; 88 prompts in all" in result.out
    (folder,) = outputs.glob("remedies/v*/*__*")
    lines = (folder / "predictions.jsonl").read_text().splitlines()
    asked = defaultdict(set)
    for row in map(json.loads, lines):
        asked[row["method"], row["gold_position"]].add(row["id"])
    assert len(asked) == 8 and {len(ids) for ids in asked.values()} == {10}
    for position in (0, 7):
        assert len({frozenset(asked[m, p]) for m, p in asked if p == position}) == 1
    shown = posbench("show", str(folder), "--all", verb=True)
    assert "of 20 examples" in shown.out


def test_an_interval_for_several_comparisons_is_students_at_their_level() -> None:
    values = np.random.default_rng(0).normal(size=40)
    names = [str(number) for number in range(40)]
    found = bootstrap.difference(values, names, alpha=0.05 / 20)
    half = scipy.stats.sem(values) * scipy.stats.t.ppf(1 - 0.05 / 40, 39)
    # But for the correction for skewness.
    assert found.ci_high - found.ci_low == pytest.approx(2 * half, rel=0.05)
    after, before = (values > 0).astype(float), np.zeros(40)
    narrow = bootstrap.paired(after, before, names)
    wide = bootstrap.paired(after, before, names, alpha=0.05 / 20)
    ratio = scipy.stats.t.ppf(1 - 0.05 / 40, 39) / scipy.stats.t.ppf(0.975, 39)
    widths = [e.ci_high - e.ci_low for e in (wide, narrow)]
    assert widths[0] / widths[1] == pytest.approx(ratio)


def test_no_remedy_of_the_front_is_beaten() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        times, values = rng.random(12), rng.integers(0, 5, 12).astype(float)
        kept = {
            i
            for i in range(12)
            if values[i] >= 2
            and not any(
                (times[j] <= times[i] and values[j] > values[i])
                or (times[j] < times[i] and values[j] >= values[i])
                for j in range(12)
            )
        }
        assert set(_front(times, values, 2)) == kept


def test_the_cheapest_of_those_alike_is_named_and_one_that_is_not_sure_is_not() -> None:
    rows = [
        ("dear", 20.0, 3.0, "helps"),
        ("cheap", 19.5, 1.5, "helps"),
        ("weak", 10.0, 1.0, "helps"),
        ("lucky", 30.0, 1.0, "cannot tell"),
    ]
    table = pd.DataFrame(rows, columns=["method", "difference", "time", "verdict"])
    assert best_remedy(table)["method"] == "cheap"
    assert best_remedy(table[table["verdict"] != "helps"])["method"] == "lucky"


def test_rounds_on_both_sides_of_the_unmodified_time_tell_no_difference() -> None:
    def row(*times: float) -> dict[str, float]:
        return dict(zip(("time", "time_low", "time_high"), times, strict=True))

    assert _time_in_words(row(1.0, 0.95, 1.05)) == "in about the same time"
    assert _time_in_words(row(0.8, 0.7, 1.1)) == "at 0.8 (0.7 to 1.1) times the time"
    assert _time_in_words(row(1.8, 1.6, 2.1)) == "at 1.8 times the time"
    assert _time_ratio(row(0.8, 0.7, 1.1)) == "0.8 (0.7 to 1.1)"
    assert _time_ratio(row(1.8, 1.8, 1.8)) == "1.8"


@pytest.mark.parametrize(
    ("verdicts", "tone"),
    [
        (("helps", "cannot tell"), "good"),
        (("harms", "cannot tell"), "open"),
        (("harms", "less than 5 points"), "bad"),
    ],
)
def test_undecided_is_not_none(verdicts: tuple[str, ...], tone: str) -> None:
    ends = ("difference", "difference_low", "difference_high")
    times = ("time", "time_low", "time_high")
    rows = [
        {"method": f"m{i}", "verdict": v, "n": 9}
        | dict(zip((*ends, *times), (9.0, 1.0, 17.0, 2.0, 2.0, 2.0), strict=True))
        for i, v in enumerate(verdicts)
    ]
    glance = Remedies().glance({"remedies": pd.DataFrame(rows)})
    assert glance is not None and glance.tone == tone


def test_a_model_without_answers_is_said_and_not_compared(
    posbench: Callable[..., Result], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = "missing answers: 3 of 48 are cut off; set task.max_new_tokens=800"
    monkeypatch.setattr(
        "posbench.studies.remedies._missing_note", lambda run, rows: note
    )
    args = ["study=remedies", "task.limit=3", "task.pairs=8", "task.positions=[0,7]"]
    result = posbench(*args, "study.methods=[documents_twice]")
    assert result.status == 0, result.err
    assert "next: posbench study=remedies task.max_new_tokens=800" in result.out
    (folder,) = outputs.glob("remedies/v*/*__*")
    assert "3 of 48 are cut off" in (folder / "report.html").read_text()
    table = pd.read_csv(folder / "remedies.csv")
    assert set(table["verdict"]) == {"left out"} and table["time"].isna().all()
