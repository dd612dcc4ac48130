"""Sentences and tables say no more than the numbers do."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from posbench.files.atomic import write_csv
from posbench.report.console import fit_columns, line_length
from posbench.report.folder import read_csv
from posbench.report.glance import findings_glance
from posbench.report.page import VERDICT_RULE
from posbench.report.tables import (
    bias_table,
    findings_table,
    other_scores,
    position_table,
    subset_table,
)
from posbench.report.terminal import show_findings, summary_table, text_table
from posbench.report.text import (
    count_verdicts,
    describe_costs,
    describe_cut_prompts,
    describe_method,
    headline,
    run_title,
    study_answer,
    title,
    verdict_table,
)
from posbench.stats import findings
from posbench.stats.bootstrap import Estimate
from posbench.stats.findings import Finding
from posbench.stats.frames import rows_over_all_positions
from posbench.stats.reference import read_table
from tests.frames import AFTER, BEFORE, metrics
from tests.messages import assert_names


@pytest.mark.parametrize(
    ("value", "low", "high", "named"),
    [
        (
            0.086,
            0.05,
            0.12,
            ("raises", "84.0 %", "92.7 %", "+8.6 points", "5.0 to 12.0", "n = 300"),
        ),
        (0.01, -0.02, 0.04, ("by less than", "5 points", "84.0 %")),
        (0.02, 0.0, 0.04, ("by less than", "5 points", "84.0 %")),
        (0.01, -0.02, 0.06, ("cannot be told", "84.0 %")),
        (-0.01, -0.06, 0.02, ("cannot be told", "84.0 %")),
        (-0.1, -0.15, -0.05, ("lowers",)),
    ],
)
def test_headline_says_no_more_than_the_interval(
    value: float, low: float, high: float, named: tuple[str, ...]
) -> None:
    frame = metrics()
    mask = (frame["metric"] == "accuracy_difference") & (
        frame["gold_position"] == "all"
    )
    frame.loc[mask, ["value", "ci_low", "ci_high"]] = value, low, high
    curve, _, result = headline(frame).partition("; ")
    assert_names(curve, "unmodified", "98.0 %", "60.0 %", "94.0 %")
    assert_names(result, "scale_channel", *named)


def test_two_gold_positions_are_said_to_show_no_bias() -> None:
    frame = metrics("none")
    positions = frame["gold_position"].unique()
    inner = [p for p in positions if p != "all"][1:-1]
    step = "three gold positions"
    assert step not in headline(frame)
    assert step in headline(frame[~frame["gold_position"].isin(inner)])


def test_headline_without_method_without_comparison_and_without_metrics() -> None:
    alone = headline(metrics("none"))
    assert alone.endswith(
        "98.0 % at the first gold position, a mean of 60.0 % at inner ones and "
        "94.0 % at the last; 84.0 % on average (n = 300)."
    )
    unpaired = metrics()[lambda f: f["metric"] == "accuracy"]
    assert_names(headline(unpaired), "not compared with")
    assert_names(headline(None), "nothing", "scored")


def test_what_a_run_took_is_told_by_stage_and_tokens_by_the_seconds_of_the_loops() -> (
    None
):
    evaluate = {
        "seconds": 100.4,
        "loop_seconds": 50,
        "prompt_tokens": 120_000,
        "reply_tokens": 5_000,
    }
    status = {
        "spent": {
            "evaluate": evaluate | {"resident": 2_345_000_000},
            "intervene": {"seconds": 3.3},
        }
    }
    status["spent"]["report"] = {"seconds": 9, "resident": 9e9}
    assert describe_costs(status) == {
        "time": "intervene 3.3 s, evaluate 1.7 min",
        "tokens/s": "evaluate 2,500 (prompts and replies)",
        "peak memory": "2.35 GB resident",
    }
    assert describe_costs({"state": "done", "stages": {}}) == {}, (
        "a run of an older version"
    )


def test_intervals_go_below_where_a_table_is_too_wide_and_lists_do_not() -> None:
    for width, broken in ((40, False), (30, True)):
        out = StringIO()
        table = text_table(
            ["gold position", "score"],
            [["[[0, 1.25], [3, 1.5]]", "6.6 [2.1, 8.5]"]],
            width,
        )
        Console(file=out, width=60).print(table)
        assert (
            "6.6 [2.1, 8.5]" in out.getvalue()
        ) != broken and "[[0, 1.25], [3, 1.5]]" in out.getvalue()


def test_a_table_for_80_columns_breaks_no_word() -> None:
    source = "Liu et al. 2023, github.com/nelson-liu/lost-in-the-middle"
    columns = [
        ["name", "kv_retrieval", "loogle_timeline_reorder"],
        ["metric", "accuracy", "exact_order"],
        ["source", source, "2023"],
        ["size", "500 questions at 75, 140 or 300 pairs", "214"],
    ]
    for room, is_whole in ((300, True), (60, True), (45, False)):
        fitted = fit_columns(columns, room)
        assert sum(max(map(line_length, column)) for column in fitted) <= room
        # The name of a row is broken last, and a name only behind _, / and -.
        assert ("loogle_timeline_reorder" in fitted[0]) is is_whole
        for column, lines in zip(columns, fitted, strict=True):
            for cell, text in zip(column, lines, strict=True):
                assert "".join(text.split()) == "".join(cell.split())
                for before, after in pairwise(text.split("\n")):
                    assert f"{before} {after}" in cell or before[-1] in "_/-"
    assert fit_columns(columns, 300) == columns


def test_a_shortened_prompt_counts_once_and_the_mean_is_over_the_shortened() -> None:
    dropped = {"x": 0, "y": 10, "z": 20}
    rows = [
        {"id": name, "dropped": n, "method": method}
        for method in "ab"
        for name, n in dropped.items()
    ]
    sentence = (
        "2 of 3 prompts were shortened to the context window (mean 15 tokens removed)."
    )
    assert (
        describe_cut_prompts(rows) == sentence and describe_cut_prompts(rows[:1]) == ""
    )


def test_a_method_is_told_with_every_parameter() -> None:
    one = {
        "name": "scale_channel",
        "channel": 3,
        "factor": 0.0,
        "layers": [0, 1],
        "last": None,
    }
    assert describe_method(one) == "scale_channel: channel 3, factor 0.0, layers [0, 1]"
    both = {
        "name": "a-b",
        "parts": {"a": {"x": 1}, "b": {"y": None, "z": 2}},
        "source": "a: a paper",
    }
    assert describe_method(both) == "a-b: a (x 1); b (z 2); constants: a: a paper"


def test_terminal_table_is_narrow_and_ends_with_all() -> None:
    for frame in (
        metrics(),
        pd.concat([metrics(), metrics("[bold]other")[lambda f: f["method"] != "none"]]),
    ):
        out = StringIO()
        Console(file=out, width=100).print(summary_table(frame))
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= 100
        assert all(word in out.getvalue() for word in ("60.0", "+30.0", "50 %"))
        last = [one for one in lines if " all " in one][-1]
        assert "84.0" in last and "300" in last and "[57.0, 63.0]" in out.getvalue()
        assert lines.index(last) > max(
            i for i, one in enumerate(lines) if one.lstrip().startswith("100 %")
        )
    assert "[bold]other" in out.getvalue()


def test_position_table() -> None:
    header, rows = position_table(metrics())
    assert header == ["gold position", "unmodified", "scale_channel", "difference", "n"]
    assert rows[1] == [
        "50 %",
        "60.0 [57.0, 63.0]",
        "90.0 [87.0, 93.0]",
        "+30.0 [26.0, 34.0]",
        "100",
    ]
    assert [row[0] for row in rows] == ["0 %", "50 %", "100 %", "all"]
    assert (BEFORE[1], AFTER[1]) == (0.6, 0.9)


def _scores(*rows: tuple[str, str, float], **same: object) -> pd.DataFrame:
    """Rows of metrics.csv over all positions, each value its own interval."""
    common = {
        "model": "m",
        "task": "t",
        "gold_position": "all",
        "depth": None,
        "n": 4,
        "seed": 0,
        **same,
    }
    return pd.DataFrame(
        [
            {**common, "method": m, "metric": k, "value": v, "ci_low": v, "ci_high": v}
            for m, k, v in rows
        ]
    )


def test_other_scores_stand_apart_from_the_tasks_own_in_their_own_unit() -> None:
    own = [
        ("none", "exact_order", 0.5),
        ("x", "exact_order", 0.75),
        ("x", "exact_order_difference", 0.25),
    ]
    other = [("none", "lsd", 1.25), ("x", "lsd", 1.0), ("x", "lsd_difference", -0.25)]
    header, table = subset_table(other_scores(_scores(*own, *other)), task_metric="")
    assert header == ["subset", "metric", "unmodified", "x", "difference", "n"]
    cells = ["1.250 [1.250, 1.250]", "1.000 [1.000, 1.000]", "-0.250 [-0.250, -0.250]"]
    assert table == [["all", "lsd", *cells, "4"]]


def test_bias_is_told_in_points_and_a_gap_has_no_difference() -> None:
    own = _scores(("none", "accuracy", 0.5), ("x", "accuracy", 0.6))
    bias = [
        ("none", "gap", 0.3),
        ("x", "gap", 0.2),
        ("none", "primacy", 0.1),
        ("x", "primacy", 0.05),
    ]
    header, table = bias_table(
        pd.concat([own, _scores(*bias, ("x", "primacy_difference", -0.05))])
    )
    assert header == ["statistic", "unmodified", "x", "difference"]
    assert table[0] == [
        "gap (best - worst)",
        "30.0 [30.0, 30.0]",
        "20.0 [20.0, 20.0]",
        "",
    ]
    assert table[1][1:] == ["10.0 [10.0, 10.0]", "5.0 [5.0, 5.0]", "-5.0 [-5.0, -5.0]"]


def _judged() -> pd.DataFrame:
    at = {
        "holds": (1, 0.5, 1.5),
        "contradicted": (-1, -1.5, -0.5),
        "inconclusive": (0, -1, 1),
    }
    found = [
        Finding.above("A claim", f"statistic of {word}", Estimate(*numbers, 50), 0)
        for word, numbers in at.items()
    ]
    found += [
        Finding.untestable("Another claim", "nothing", "too short"),
        Finding.that(True, "A sum", "of two", (2, 2)),
    ]
    return findings.findings_table([found[0].control(), *found], "tiny")


def test_verdicts_are_counted_the_papers_and_ours_apart() -> None:
    paper, _, ours = count_verdicts(_judged()).partition("Our controls")
    assert_names(paper, "2 hold", "1 contradicted", "1 inconclusive", "1 not testable")
    assert_names(paper, "Holm-corrected")
    assert_names(ours, "1 holds")


def test_a_verdict_comes_first_with_the_statistic_that_it_rests_on(
    tmp_path: Path,
) -> None:
    header, rows = findings_table(_judged())
    assert header[:4] == ["verdict", "claim", "value", "statistic"]
    assert [row[0] for row in rows] == [
        *("holds", "contradicted", "inconclusive", "not testable", "holds"),
        "holds",
    ]
    assert (
        rows[-1][1] == "Control: A claim"
        and rows[3][2] == rows[3][4] == rows[4][4] == ""
    )
    write_csv(tmp_path / "findings.csv", _judged())
    out = StringIO()
    show_findings(tmp_path, Console(file=out, width=120))
    told = " ".join(out.getvalue().split())
    for word in ("holds", "contradicted", "inconclusive"):
        assert f"{word} A claim: statistic of {word}" in told, (
            "equal claims are told apart"
        )
        assert f"statistic of {word} (holds above 0; n = 50)" in told
    assert told.count("95 % interval") == 1 and "n = 0" not in told
    assert count_verdicts(_judged()) in findings_glance(_judged()).details


def test_claims_of_several_models_name_them(tmp_path: Path) -> None:
    """Claims of a sweep over models, or over settings of one, are of one wording."""
    finding = Finding.above("A claim", "a share", Estimate(1, 0.5, 1.5, 50), 0)
    names = ["tiny, task.pairs=8", "tiny, task.pairs=16"]
    each = [findings.findings_table([finding], name) for name in names]
    table = pd.concat(each, ignore_index=True)
    header, rows = findings_table(table)
    assert [row[header.index("model")] for row in rows] == names
    assert "model" not in findings_table(each[0])[0], "of one model the page says it"
    write_csv(tmp_path / "findings.csv", table)
    out = StringIO()
    show_findings(tmp_path, Console(file=out, width=120))
    told = " ".join(out.getvalue().split())
    for name in names:
        assert f"holds {name}: A claim: a share" in told
    assert verdict_table(table)[1] == [["holds", "A claim", "; ".join(names)]]


def test_the_rule_beside_verdicts_says_what_the_correction_does(tmp_path: Path) -> None:
    """Two intervals above zero with p of 0.03: twice that, the smallest adjusted one, decides neither claim."""
    effect = Estimate(1.0, 0.5, 1.5, 50)
    claims = [
        replace(Finding.above(name, "a share", effect, 0), p=0.03) for name in "AB"
    ]
    corrected = findings.correct_findings(claims)
    assert [finding.verdict for finding in claims] == ["holds"] * 2
    assert [finding.verdict for finding in corrected] == ["inconclusive"] * 2
    write_csv(tmp_path / "findings.csv", findings.findings_table(corrected, "tiny"))
    out = StringIO()
    show_findings(tmp_path, Console(file=out, width=120))
    said = " ".join(out.getvalue().split())
    for rule in (said.partition("In brackets")[2], VERDICT_RULE):
        assert re.search(r"inconclusive[^;]*\bp [^;]*above 0\.05", rule), rule


def test_a_study_answers_with_its_numbers_and_says_where_it_cannot_tell() -> None:
    counts = count_verdicts(_judged())
    holds, _, contradicted = study_answer(_judged()).partition("Contradicted:")
    assert holds.startswith(counts)
    assert_names(holds, "statistic of holds", "1.00 [0.50, 1.50]", "of two: 2")
    assert_names(contradicted, "statistic of contradicted", "-1.00 [-1.50, -0.50]")
    unsure = Finding.above("B (Paper 2025)", "a share", Estimate(0.1, -1, 1, 50), 0)
    said = "Claims of the paper: 1 inconclusive. Inconclusive: B (a share: 0.10 [-1.00, 1.00])."
    assert study_answer(findings.findings_table([unsure], "tiny")) == said


def test_verdicts_stand_side_by_side() -> None:
    told = [
        ("a", "C", "contradicted"),
        ("a", "C", "holds"),
        ("a", "D", "holds"),
        ("b", "D", "inconclusive"),
    ]
    told += [("c", "C", "holds")]
    rows = [{"model": m, "claim": c, "verdict": v, "kind": "paper"} for m, c, v in told]
    frame = pd.DataFrame(rows, columns=list(findings.FINDING_COLUMNS)).assign(
        n=1, p_holm=float("nan"), note=""
    )
    both = [["contradicted", "C", "a"], ["holds", "C", "a; c"]]
    table = [*both, ["holds", "D", "a"], ["inconclusive", "D", "b"]]
    assert verdict_table(frame) == (["verdict", "claim", "models"], table)


def test_a_title_names_method_model_and_task() -> None:
    config: dict[str, object] = {
        "model": {"name": "m"},
        "task": {"name": "t"},
        "method": {"name": "none"},
    }
    assert run_title(config) == "unmodified on m, t"
    scaled = config | {
        "method": {"name": "x"},
        "search": {"name": "s"},
        "stages": ["search", "evaluate"],
    }
    assert run_title(scaled) == "x on m, t"
    assert run_title(scaled | {"stages": ["search"]}) == "search s for x on m, t"
    assert run_title(config | {"study": {"name": "chain"}}) == "study chain on m, t"
    assert (
        run_title(scaled | {"study": {"name": "chain"}}) == "study chain with x on m, t"
    )
    assert (
        run_title({"study": {"name": "rope"}}) == "study rope"
        and run_title({}) == "run"
    )
    assert (
        title(["x", "x"], list("abcde"), ["t"], ["x.y"]) == "x on 5 models, t, by x.y"
    )


def test_whose_claim_it_is_stands_at_its_definition() -> None:
    claims = read_table("yu2025_claims.csv", "kind", "claim")
    assert set(claims["kind"]) == {"paper", "control"}
    assert (
        (claims["kind"] == "paper") == claims["claim"].str.contains("Yu et al. 2025")
    ).all()
    assert (
        claims.loc[claims["claim"].str.startswith("Control"), "kind"] == "control"
    ).all()
    assert not claims["claim"].str.contains(r"\bC\d").any()


def test_what_hides_a_position_bias_is_told_first_and_once() -> None:
    """Newcomer, 3: read back from a file, the row's note stands where its number would."""
    front = ("tiny", "none", "kv", "all", None)
    why = "no score is reliably 5 points above chance, 3.1 %"
    hidden = "position bias of unmodified and x cannot be measured"
    for note, said in {
        f"at the floor: {why}": f"At the floor: {hidden} ({why}). ",
        "floor": f"Floor: {hidden}. ",
        "too few questions: ask 73": f"Too few questions: {hidden} (ask 73). ",
    }.items():
        rows = [
            (*front[:1], method, *front[2:], *row)
            for method in ("none", "x")
            for row in (
                ("accuracy", 0.0, 60, 0.0, 0.06, 0, None),
                ("position_bias", None, 60, None, None, 0, note),
            )
        ]
        table = pd.DataFrame(rows, columns=list(metrics().columns))
        frame = pd.read_csv(StringIO(table.to_csv(index=False)))
        assert headline(frame).startswith(f"{said}x answers 0.0 % on average")
        name = "cannot do the task" if note.startswith("at the") else "cannot tell"
        assert headline(frame[frame["method"] == "none"]).endswith(
            f"The unmodified model answers 0.0 % on average (n = 60). Verdict: {name}."
        )
        short = note.partition(":")[0]
        assert bias_table(frame)[1][0][1:] == [short, short]


def test_a_table_of_one_task_has_no_scores_of_others(tmp_path: Path) -> None:
    """An export asks a run of the same constants for its side effects on other tasks."""
    metrics().to_csv(tmp_path / "metrics.csv", index=False)
    table = read_csv(tmp_path / "metrics.csv")
    assert table is not None
    others = table[table["task"] != table["task"].iloc[0]]
    assert rows_over_all_positions(others, "difference").empty
