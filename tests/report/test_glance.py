"""The first look at a result: short, with units, and the same on its page and in the terminal."""

from __future__ import annotations

import html
import json
import re
import shlex
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console
from rich.text import Text

from posbench.diagnose.outcome import Diagnosis, Pilot, Remedy, shape_of_run
from posbench.diagnose.page import glance as diagnosis_glance
from posbench.diagnose.page import lines
from posbench.files.atomic import write_json
from posbench.report.compare import verdict as compare_verdict
from posbench.report.console import (
    _Terminal,
    make_console,
    show_glance,
    show_link,
    show_lists,
    wrap_words,
)
from posbench.report.glance import (
    comparison_glance,
    findings_glance,
    name_in_commands,
    run_glance,
    scores_glance,
)
from posbench.report.page import render_run, write_page
from posbench.report.sweep import render_sweep
from posbench.report.tables import findings_table
from posbench.report.terminal import show_run
from posbench.run.folder import PROVENANCE, RunDir
from posbench.run.jsonl import checksum
from posbench.stats import findings as judged
from posbench.stats.bootstrap import Estimate
from posbench.stats.findings import Finding
from posbench.stats.glance import Glance, Number, first_short
from posbench.stats.verdict import RULES, VERDICTS
from posbench.studies.remedies import Remedies
from tests.frames import metrics, sweep, with_missing_answers
from tests.glances import check_glance
from tests.stats.test_verdict import (
    FLAT,
    HALFWAY,
    MIDDLE_LOST,
    NOTHING,
    SOLVED,
    simulated_metrics,
)

RUNS = [
    (100, {"none": NOTHING}),
    (20, {"none": SOLVED}),
    (100, {"none": SOLVED}),
    (40, {"none": FLAT}),
    (600, {"none": FLAT}),
    (5, {"none": NOTHING}),
    (100, {"none": MIDDLE_LOST}),
    (100, {"served": MIDDLE_LOST}),
    (100, {"none": MIDDLE_LOST, "x": SOLVED}),
    (300, {"none": MIDDLE_LOST, "x": (0.9, 0.85, 0.85, 0.85, 0.9)}),
    (300, {"none": MIDDLE_LOST, "x": MIDDLE_LOST}),
    (60, {"none": MIDDLE_LOST, "x": HALFWAY}),
    (300, {"none": MIDDLE_LOST, "x": NOTHING}),
    (100, {"none": NOTHING, "x": SOLVED}),
    (100, {"x": SOLVED}),
    (100, {"none": (0.9, 0.5)}),
    (100, {"none": (0.9, 0.5), "x": (0.9, 0.9)}),
    (100, {"none": (0.9, 0.5), "x": (0.5, 0.5)}),
    (100, {"none": (0.9, 0.5), "x": (0.9, 0.5)}),
]
CLAIM = "Some layers and heads follow the gold item, others one place (Yu et al. 2025)"


@cache
def _table(number: int) -> pd.DataFrame:
    """The metrics.csv of one of these runs."""
    questions, shares = RUNS[number]
    return simulated_metrics(questions, **shares)


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_a_run_has_a_short_sentence_with_units(number: int) -> None:
    table = _table(number)
    for delivery in (None, {"unchecked": "it counts no tokens"}):
        glance = scores_glance(table, delivery)
        check_glance(glance)
        names = [*RUNS[number][1], "m"]
        assert {*names} & {*re.findall(r"\w+", glance.sentence)}, glance.sentence
        assert {number.unit for number in glance.numbers} <= {"points", "%"}


def test_all_verdicts_are_among_these_runs() -> None:
    words = {scores_glance(_table(number)).word for number in range(len(RUNS))}
    assert {*VERDICTS} <= words
    assert [*RULES] == [*VERDICTS]
    assert {"better", "worse", "within 5 points", "measured"} <= words


@pytest.mark.parametrize(
    ("shares", "questions", "told"),
    [
        ((0.9, 0.45, 0.65), 20, "which part of the prompt it favours cannot be told"),
        ((1.0, 0.0, 1.0), 100, "it loses the middle"),
    ],
)
def test_a_bias_of_no_clear_shape_favours_no_part_that_could_be_named(
    shares: tuple[float, ...], questions: int, told: str
) -> None:
    glance = scores_glance(simulated_metrics(questions, none=shares))
    assert glance.word == "bias" and told in glance.sentence


@pytest.mark.parametrize(
    ("questions", "told"),
    [(20, "it surely answers more than 83 %"), (100, "nearly all")],
)
def test_a_fix_of_few_questions_claims_no_more_than_is_sure(
    questions: int, told: str
) -> None:
    """All right each time: of 20 the Wilson interval begins at 1 / (1 + 1.96^2 / 20) = 83.9 %."""
    curves = {"none": (1.0, 0.0, 1.0), "x": (1.0, 1.0, 1.0)}
    glance = scores_glance(simulated_metrics(questions, **curves))
    assert glance.word == "fixed" and told in glance.sentence


def test_missing_answers_leave_no_number() -> None:
    cut = (0.9, 0.5, 0.3, 0.5, 0.9)
    glance = scores_glance(simulated_metrics(100, cut="none", none=cut))
    check_glance(glance)
    assert glance.word == "cannot tell" and "no answers" in glance.sentence
    assert not glance.numbers
    glance = scores_glance(with_missing_answers(metrics()))
    assert "no answers" in glance.sentence
    assert not any("scale_channel" in number.name for number in glance.numbers)
    assert scores_glance(None).sentence == "Nothing was scored in this run."


def test_numbers_of_a_fix_are_those_of_the_table() -> None:
    table = simulated_metrics(300, none=MIDDLE_LOST, x=(0.9, 0.85, 0.85, 0.85, 0.9))
    glance = scores_glance(table)
    before, after, change = glance.numbers

    def row(method: str, metric: str) -> str:
        rows = table[(table["method"] == method) & (table["metric"] == metric)]
        of_all = rows[rows["gold_position"] == "all"]
        value, low, high = 100 * of_all[["value", "ci_low", "ci_high"]].iloc[0]
        return f"{value:.1f} [{low:.1f}, {high:.1f}]"

    assert (
        str(before)
        == f"position bias, unmodified {row('none', 'position_bias')} points"
    )
    assert str(after) == f"with x {row('x', 'position_bias')} points"
    assert change.value == f"+{row('x', 'accuracy_difference')}"
    text = f"from {before.value.split()[0]} to {after.value.split()[0]} points"
    assert text in glance.sentence
    # 300 questions, each at five positions.
    assert glance.basis == "95 % intervals, 1,500 prompts at 5 positions"
    assert (
        "standard deviation" in glance.rule and "Fixed: more than half" in glance.rule
    )


def _findings(*verdicts: str, claim: str = CLAIM) -> pd.DataFrame:
    """Findings on claims with these verdicts."""
    rows = [
        Finding(
            verdict=verdict,  # type: ignore[arg-type]
            claim=f"{number}: {claim}",
            statistic="share",
            value=0.5,
            ci_low=0.4,
            ci_high=0.6,
            n=40,
        )
        for number, verdict in enumerate(verdicts)
    ]
    return judged.findings_table(rows, "tiny")


def test_claims_are_counted_and_the_one_that_decides_is_named() -> None:
    glance = findings_glance(_findings("holds", "contradicted", "inconclusive"))
    check_glance(glance)
    assert (glance.word, glance.tone) == ("1 of 3 hold", "bad")
    assert glance.sentence.startswith("Of 3 claims of the paper on tiny, 1 holds, 1 is")
    assert [str(number) for number in glance.numbers] == [
        "claims that hold 1 of 3",
        "contradicted claims 1 of 3",
        "undecided claims 1 of 3",
    ]
    short = findings_glance(_findings("holds", "contradicted", claim="it peaks"))
    assert short.sentence.endswith("; contradicted: 1: it peaks.")
    for verdict, tone in (("holds", "good"), ("not testable", "open")):
        glance = findings_glance(_findings(verdict))
        check_glance(glance)
        assert (glance.word, glance.tone) == (verdict, tone)
        assert "Some layers and heads" in glance.sentence
        long = findings_glance(_findings(verdict, claim="word " * 30))
        check_glance(long)
    many = pd.concat([_findings("holds"), _findings("holds").assign(model="tiny_b")])
    counted = "1 claim of the paper on 2 models: of 2 verdicts, 2 hold."
    assert findings_glance(many).sentence == counted


def _remedies(gains: dict[str, tuple[float, float, float]]) -> pd.DataFrame:
    """The table of a study of remedies."""
    rows = [
        {
            "method": name,
            "difference": value,
            "difference_low": low,
            "difference_high": high,
            "time": 1.5,
            "time_low": 1.4,
            "time_high": 1.6,
            "n": 40,
            "verdict": "helps" if low > 0 else "cannot tell",
        }
        for name, (value, low, high) in gains.items()
    ]
    return pd.DataFrame([{"method": "none", "verdict": ""}, *rows])


def test_remedies_within_the_interval_of_the_best_are_ties() -> None:
    gains = {"a": (30.0, 20.0, 40.0), "b": (25.0, 15.0, 35.0), "c": (5.0, -4.0, 9.0)}
    glance = Remedies().glance({"remedies": _remedies(gains)})
    assert glance is not None
    check_glance(glance)
    assert glance.sentence.endswith("; b lies within its interval.")
    assert (
        "points" in glance.sentence and "Within the interval of a: b." in glance.details
    )
    none = Remedies().glance({"remedies": _remedies({"c": (5.0, -4.0, 9.0)})})
    assert none is not None and none.tone == "open"
    check_glance(none)


def test_a_gain_of_a_diagnosis_has_its_unit_and_its_ties() -> None:
    gains = {"scale_channel": 0.674, "layer_scaling": 0.664, "moice": 0.1}
    remedies = [
        Remedy(name, Estimate(gain, gain - 0.2, gain + 0.2, 48), 1.0)
        for name, gain in gains.items()
    ]
    diagnosis = Diagnosis(
        "smollm2",
        "kv_retrieval",
        "fixed",
        "why",
        remedies=remedies,
        winner="scale_channel",
        held_back="fixed (why)",
    )
    start = "change of the model:"
    (line,) = (text for text in lines(diagnosis) if text.startswith(start))
    assert "scale_channel, 0.674 [0.474, 0.874] nats per answer token" in line
    assert "within its interval: layer_scaling 0.664)" in line and "moice" not in line


def test_a_diagnosis_says_the_illness_before_the_remedy(tmp_path: Path) -> None:
    table = simulated_metrics(300, none=MIDDLE_LOST, x=(0.9, 0.85, 0.85, 0.85, 0.9))
    runs = {"shape": table[table["method"] == "none"], "held-back": table}
    for part, rows in runs.items():
        (tmp_path / part).mkdir()
        rows.to_csv(tmp_path / part / "metrics.csv", index=False)
    method = {"name": "x", "channel": 15, "factor": -1.0}
    write_json(tmp_path / "held-back" / "method.json", method)
    diagnosis = Diagnosis(
        "m",
        "kv_retrieval",
        "fixed",
        shape=shape_of_run(table),
        runs={part: str(tmp_path / part) for part in runs},
    )
    glance = diagnosis_glance(diagnosis)
    check_glance(glance)
    illness, _, remedy = glance.sentence.partition("; ")
    assert illness == "m loses the middle of the prompt"
    assert remedy.startswith("tried on held-back questions, x lowers that bias from ")
    assert remedy.endswith(" points.")
    assert glance.basis.endswith("1,500 prompts at 5 positions")
    assert glance.rule.endswith("As applied: x: channel 15, factor -1.0.")


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_diagnosis_without_its_runs_has_a_sentence(verdict: str) -> None:
    pilot = Pilot("floor", Estimate(0.05, 0.01, 0.1, 60), 0)
    for pilots in ([], [pilot]):
        for place in ("", "put what matters first: 90 % right there"):
            step = "posbench diagnose model=m budget=20min"
            diagnosis = Diagnosis(
                "m", "kv_retrieval", verdict, pilots=pilots, place=place, next=step
            )
            check_glance(diagnosis_glance(diagnosis))


@pytest.mark.parametrize(
    ("ends", "word"),
    [
        ((0.1, 0.05, 0.2), "scale_channel higher"),
        ((-0.1, -0.2, -0.05), "unmodified higher"),
        ((0.01, -0.03, 0.04), "within 5 points"),
        ((0.01, -0.05, 0.06), "cannot tell"),
        ((None, None, None), "cannot tell"),
    ],
)
def test_two_runs_side_by_side(ends: tuple[float, ...], word: str) -> None:
    value, low, high = ends
    row = {
        "run": "1a2b3c4d",
        "label": "scale_channel",
        "n": 100,
        "pairs": 100,
        "score": 0.5,
        "score_difference": value,
        "score_difference_ci_low": low,
        "score_difference_ci_high": high,
        "position_bias_difference": None,
    }
    first = row | {"label": "unmodified", "run": "5e6f7a8b"}
    glance = comparison_glance([first, row])
    check_glance(glance)
    assert glance.word == word
    if value is not None and not low <= 0 <= high:
        # The higher one comes first, and neither run is good or bad.
        ordered = ("scale_channel", "unmodified")[:: 1 if value > 0 else -1]
        assert glance.sentence.startswith(f"{ordered[0]} scores 10.0 points above")
        on_shared = f"{ordered[1]} on the 100 prompts that both were asked."
        assert glance.sentence.endswith(on_shared) and glance.tone == "open"
        # The number says the same, with its interval: the higher one minus the other.
        (number,) = glance.numbers
        assert number.name == "score, {} minus {}".format(*ordered)
        ends = sorted(abs(100 * end) for end in (low, high))
        assert number.value == f"+10.0 [{ends[0]:.1f}, {ends[1]:.1f}]"
    if value == 0.01:
        # Close in their scores, or not told apart, and yet not in their bias.
        for low, high, end in (
            (-0.3, -0.1, "lower"),
            (0.1, 0.3, "higher"),
            (-0.1, 0.3, ""),
        ):
            bias = dict(
                position_bias_difference=(low + high) / 2,
                position_bias_difference_ci_low=low,
                position_bias_difference_ci_high=high,
            )
            glance = comparison_glance([first, row | bias])
            check_glance(glance)
            better = {"lower": "scale_channel", "higher": "unmodified"}.get(end)
            assert glance.word == (f"{better} less biased" if better else word)
            wanted = f"{better} has the lower position bias; " if better else ""
            assert glance.sentence.startswith(wanted)
            # Without a fix to write: what the worse one answers wrong.
            worse = "5e6f7a8b" if end == "lower" else "1a2b3c4d"
            assert glance.next == f"posbench show {worse} --wrong"
    # A long name stays in the sentence.
    long = [first | {"label": "a" * 40}, row | {"label": "b" * 40}]
    ordinals = {1: "second", -1: "first"}
    sign = 0 if value in (0.01, None) else (1 if low > 0 else -1)
    wanted = f"{ordinals[sign]} run higher" if sign else word
    assert comparison_glance(long).word == wanted
    # What stands under "In detail" never differs.
    details = compare_verdict([first, row])
    told = {1: "higher than", -1: "lower than", 0: "cannot be"}[sign]
    assert details.count(told) == 1
    check_glance(comparison_glance([first, row, row]))


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (("a, pairs=16", "b, pairs=32"), ("a, pairs=16", "b, pairs=32")),
        (("tiny, a", "tiny_b, b"), ("tiny, a", "tiny_b, b")),
        (("tiny, pairs=16", "tiny, pairs=32"), ("tiny, pairs=16", "tiny, pairs=32")),
        (("a, factor=0.5", "b, points=1"), ("a", "b")),
        (("a", "b, factor=0.5"), ("a", "b")),
    ],
)
def test_two_runs_are_named_by_all_that_both_differ_in(
    labels: tuple[str, str], names: tuple[str, str]
) -> None:
    """The score of a method among 16 pairs is not below that of another among 32 because of the method."""
    scores = {"score": 0.5, "n": 9, "pairs": 0, "position_bias_difference": None}
    ends = {"": 0.1, "_ci_low": 0.05, "_ci_high": 0.15}
    scores |= {f"score_difference{end}": value for end, value in ends.items()}
    rows = [scores | {"label": label, "run": label} for label in labels]
    (number,) = comparison_glance(rows).numbers
    assert number.name == f"score, {names[1]} minus {names[0]}"


@pytest.mark.parametrize(
    ("difference", "better"),
    [((0.1, 0.05, 0.2), 1), ((-0.1, -0.2, -0.05), 0), ((0.0, -0.1, 0.1), None)],
)
def test_after_a_comparison_the_better_run_is_written(
    tmp_path: Path, difference: tuple[float, ...], better: int | None
) -> None:
    table = simulated_metrics(300, none=MIDDLE_LOST, x=(0.9, 0.85, 0.85, 0.85, 0.9))
    config = "model: {name: m}\nmethod: {_target_: posbench.methods.ScaleChannel}\n"
    folders = [_run(tmp_path / f"m__x__{i}", config, metrics=table) for i in (0, 1)]
    names = ("score_difference", "score_difference_ci_low", "score_difference_ci_high")
    row = {"n": 9, "pairs": 9, "score": 0.5, "position_bias_difference": None}
    first, second = (row | {"run": str(i), "label": f"run{i}"} for i in (0, 1))
    rows = [first, second | dict(zip(names, difference, strict=True))]
    step = comparison_glance(rows, folders).next
    if better is None:
        assert step == "posbench show 1 --wrong"
    else:
        assert step == f"posbench export {better} --to transformers --out fix"


def test_of_many_runs_each_is_counted_once() -> None:
    empty: dict[str, Any] = {
        "run": "1a2b3c4d",
        "n": 9,
        "position_bias_difference": None,
    }
    names = ("score_difference", "score_difference_ci_low", "score_difference_ci_high")
    values = [(0.1, 0.05, 0.2), (-0.1, -0.2, -0.05), (0.0, -0.1, 0.1), (None,) * 3]
    rows = [
        empty | {"label": f"run{i}", "pairs": 9} | dict(zip(names, ends, strict=True))
        for i, ends in enumerate([(None,) * 3, *values])
    ]
    glance = comparison_glance(rows)
    check_glance(glance)
    assert glance.word == "1 above, 1 below"
    assert [number.value for number in glance.numbers] == ["1", "1", "1"]
    assert glance.sentence.endswith("1 below; 1 cannot be compared.")
    details = compare_verdict(rows)
    for told in ("higher than run0", "lower than run0", "told apart", "be compared"):
        assert details.count(told) == 1, told


def test_a_number_at_a_limit_and_a_small_bound_are_said() -> None:
    limit = Finding.above("a", "b", Estimate(8 / 9, 8 / 9, 8 / 9, 900), 5.78e-6)
    header, (row,) = findings_table(judged.findings_table([limit], "tiny"))
    cells = dict(zip(header, row, strict=True))
    assert cells["value"] == "0.889 (the same in every resample)"
    assert cells["holds if"] == "above 0.00000578, the smallest effect worth naming"


# Page and terminal


def _run(path: Path, config: str = "{}", **frames: pd.DataFrame) -> Path:
    """A run folder with these tables."""
    path.mkdir()
    (path / "config.yaml").write_text(config)
    for name, frame in frames.items():
        frame.to_csv(path / f"{name}.csv", index=False)
    return path


def _on_page(page: Path) -> tuple[str, str]:
    """The word and the sentence at the head of a page, as read."""
    text = page.read_text()
    found = [
        re.search(rf'<p class="{name}[^"]*">(.*?)</p>', text, re.DOTALL)
        for name in ("chip", "result")
    ]
    word, sentence = (html.unescape(re.sub("<[^>]*>", "", m[1])) for m in found if m)
    return word, sentence.replace("\N{NO-BREAK SPACE}", " ")


def _printed(folder: Path, width: int) -> str:
    """What a terminal of this width shows of a run."""
    out = StringIO()
    console = _Terminal(file=out, force_terminal=True, width=width, highlight=False)
    show_run(folder, console)
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


@pytest.mark.parametrize("width", [80, 160])
def test_page_and_terminal_say_the_same(tmp_path: Path, width: int) -> None:
    claims = _findings("holds", "contradicted", "inconclusive")
    folders = [
        _run(tmp_path / "scores", metrics=metrics()),
        _run(tmp_path / "claims", metrics=metrics("none"), findings=claims),
        _run(tmp_path / "bias", metrics=simulated_metrics(100, none=MIDDLE_LOST)),
    ]
    for folder in folders:
        glance = run_glance(folder)
        assert _on_page(render_run(folder)) == (glance.word, glance.sentence)
        printed = _printed(folder, width)
        lines_of_text = printed.splitlines()
        assert glance.sentence in " ".join(printed.split())
        # The end: sentence, next command, page.
        assert printed.split()[-2:] == ["report:", str(folder / "report.html")]
        tail = " ".join(" ".join(lines_of_text[-8:]).split())
        assert glance.sentence in tail and f"next: {glance.next}" in tail
        for line in lines_of_text:
            assert len(line) <= width or len(line.split()) == 1


@pytest.mark.parametrize("number", [1, 6])
def test_a_diagnosis_is_not_held_to_the_questions_of_the_run(
    tmp_path: Path, number: int
) -> None:
    folder = _run(tmp_path / "run", metrics=_table(number))
    facts = {"command": "posbench task.limit=5 task=own_data model=m"}
    write_json(folder / PROVENANCE, facts | {"sum": checksum(facts)})
    glance = run_glance(folder)
    assert glance.word in ("cannot tell", "bias")
    assert glance.next == "posbench diagnose task=own_data model=m"


def test_the_next_command_asks_the_same_questions(tmp_path: Path) -> None:
    config = """
model: {name: two, path: /models/two, rope_base: {base: 10}}
task: {name: kv_retrieval, pairs: 20, positions: [0%, 100%], limit: 9}
experiment: {name: yu2025_table1_kv, grid: {model: [tiny, tiny_b]}}
"""
    folder = _run(tmp_path / "run", config, metrics=_table(1))
    for command, subject in {
        # The job of a sweep has one of the swept values; a model on disk has no name to choose it by.
        "-m model=/models/one,/models/two +model.rope_base.base=10 task.pairs=range(10,30,10) method=a,b": (
            "task=kv_retrieval model=/models/two +model.rope_base.base=10 task.pairs=20 'task.positions=[0%,100%]'"
        ),
        "model=mine task.limit=9": "task=kv_retrieval model=mine 'task.positions=[0%,100%]'",
    }.items():
        facts = {"command": f"posbench experiment=yu2025_table1_kv {command}"}
        write_json(folder / PROVENANCE, facts | {"sum": checksum(facts)})
        glance = run_glance(folder)
        assert sorted(shlex.split(glance.next)[2:]) == sorted(shlex.split(subject))


def test_where_all_is_right_no_wrong_prompts_are_shown(tmp_path: Path) -> None:
    for name, share in (("all", 1.0), ("most", 0.9)):
        table = metrics("none")
        table["value"] = table["value"].where(table["metric"] != "accuracy", share)
        glance = run_glance(_run(tmp_path / name, metrics=table))
        assert ("--wrong" in glance.next) == (name == "most")


def test_a_sweep_begins_with_its_verdict(tmp_path: Path) -> None:
    sweep([1.0, 0.0, -1.0]).to_csv(tmp_path / "summary.csv", index=False)
    _, sentence = _on_page(render_sweep(tmp_path))
    assert sentence.startswith("Over 3 settings of method.factor, the average runs")


def test_words_are_not_broken() -> None:
    text = "held-back prompts " * 12 + "x" * 100
    for width in (20, 80, 160):
        wrapped = wrap_words(text, width)
        assert wrapped.split() == text.split()
        lengths = [len(line) for line in wrapped.split("\n")]
        assert max(lengths[:-1]) <= width
    assert wrap_words("  indented\n\nlines", 80) == "  indented\n\nlines"


def test_all_that_a_terminal_shows_is_broken_between_words() -> None:
    out = StringIO()
    console = _Terminal(file=out, force_terminal=True, width=30, color_system=None)
    text = "gain 0.626 on 120 held-back prompts, and more of them"
    for printed in (text, Text(text)):
        console.print(printed, soft_wrap=True)
    lines_of_text = out.getvalue().splitlines()
    assert " ".join(lines_of_text).split() == 2 * text.split()
    assert max(map(len, lines_of_text)) <= 30


class _Tty(StringIO):
    """A terminal as a file."""

    def isatty(self) -> bool:
        return True


GLANCE = Glance(
    "fixed",
    "good",
    "It lowers the bias of every model by more than half, and the average rises by three points.",
    (Number("bias", "4.9", "points"),),
    "posbench show 1a2b --wrong",
    "shows more",
)


@pytest.mark.parametrize("file", [_Tty(), StringIO()], ids=["terminal", "pipe"])
def test_a_terminal_gets_a_coloured_sentence_and_a_link_and_a_pipe_plain_text(
    file: StringIO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    page = tmp_path / "report.html"
    console = make_console(width=60)
    console.file = file
    console._color_system = Console(file=file)._color_system
    show_glance(console, GLANCE)
    show_link(console, "report", page)
    text = file.getvalue()
    if file.isatty():
        assert "\x1b[32m" in text and "\x1b]8;id=" in text and page.as_uri() in text
    else:
        assert text == (
            f"fixed: bias 4.9 points\n{GLANCE.sentence}\nnext: {GLANCE.next}  (shows more)\nreport: {page}\n"
        )


def test_the_first_sentence_that_is_short_is_taken() -> None:
    long = "word " * 30
    assert first_short(f"{long}.", "Short.") == "Short."
    assert first_short("First.", "Short.") == "First."


def test_the_head_of_a_page_escapes_names(tmp_path: Path) -> None:
    glance = Glance("bias", "bad", "A model <b>x</b> has a bias.")
    page = write_page(tmp_path, "title", glance, [])
    assert "<b>x</b>" not in page.read_text()
    assert _on_page(page) == ("bias", glance.sentence)


def test_a_next_step_is_one_line_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first line of a broken command would be another command."""
    stream = StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = make_console(width=40)
    assert console.is_terminal
    step = "posbench model=tiny " + "task.pairs=20 " * 9 + "task.limit=5"
    glance = Glance("bias", "open", "It loses the middle.", next=step)
    show_glance(console, glance)
    (line,) = (li for li in stream.getvalue().splitlines() if "next: " in li)
    assert re.sub("\x1b[^m]*m", "", line) == f"next: {step}"


@pytest.mark.parametrize("columns", ["0", "00"])
def test_a_width_of_zero_columns_is_not_known(
    monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    """Terminals that do not know their width say COLUMNS=0: it is then 80, as for a pipe."""
    stream = StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", columns)
    show_glance(make_console(), GLANCE)
    printed = re.sub("\x1b[^m]*m", "", stream.getvalue()).splitlines()
    sentence = [line for line in printed if line in GLANCE.sentence]
    assert " ".join(sentence) == GLANCE.sentence and len(sentence) == 2
    assert all(40 < len(line) <= 80 for line in sentence[:1])


def test_a_pipe_gets_tab_separated_columns_where_colours_are_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Build servers set FORCE_COLOR for all commands, also for those whose output is cut."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    show_lists(
        {"runs": [{"run": "1a2b", "score": 0.5}, {"run": "3c4d", "score": None}]}
    )
    assert capsys.readouterr().out == "run\tscore\n1a2b\t0.5\n3c4d\t\n"


def test_commands_name_a_run_by_its_hash_or_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its folder was typed: inside v001 a relative path has one part."""
    name = "kv/v001/tiny__none__aaaa0001"
    for outputs in ("outputs", "other"):
        run = tmp_path / outputs / name
        run.mkdir(parents=True)
        config = {"runtime": {"outputs": outputs}}
        (run / "config.yaml").write_text(json.dumps(config), "utf-8")
    for outputs, wanted in (("outputs", "aaaa0001"), ("other", f"other/{name}")):
        monkeypatch.chdir(tmp_path)
        assert name_in_commands(Path(outputs, name)) == wanted
        monkeypatch.chdir(tmp_path / outputs / name / "..")
        assert name_in_commands(Path("tiny__none__aaaa0001")) == wanted


def test_a_run_that_was_stopped_before_its_scores_is_unfinished(tmp_path: Path) -> None:
    run = tmp_path / "kv/v001/tiny__none__aaaa0001"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("{}", "utf-8")
    assert run_glance(run).word == "nothing scored"
    RunDir(run).append("predictions.jsonl", [{"id": "0"}])
    glance = run_glance(run)
    assert glance.word == "unfinished" and glance.next == f"posbench resume {run}"
