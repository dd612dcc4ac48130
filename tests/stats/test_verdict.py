"""One verdict for a run: on simulated readers whose bias is known, and in all that a run leaves."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from posbench.stats.scores import Tabulator
from posbench.stats.shape import shape_in_metrics
from posbench.stats.verdict import (
    BIAS,
    CANNOT_DO,
    CANNOT_TELL,
    FIXED,
    NO_BIAS,
    NOT_FIXED,
    VERDICTS,
    Verdict,
    run_verdict,
)
from posbench.tasks import KVRetrieval
from tests.conftest import Result, few, run_folders
from tests.messages import assert_names
from tools.verdicts import (
    FIXED_QUESTIONS,
    method_scores,
    metrics_of,
    simulated_scores,
    stopped_shape,
    verdict_name,
)

FLAT = (0.6, 0.6, 0.6, 0.6, 0.6)
ONE_LOST = (0.9, 0.9, 0.35, 0.9, 0.9)
MIDDLE_LOST = (0.9, 0.5, 0.3, 0.5, 0.9)
HALFWAY = (0.9, 0.78, 0.7, 0.78, 0.9)
SOLVED = (1.0, 1.0, 1.0, 1.0, 1.0)
NOTHING = (0.0, 0.0, 0.0, 0.0, 0.0)


def verdict_of(
    questions: int, seed: int = 0, *, cut: str = "", **shares: tuple[float, ...]
) -> Any:
    """The verdict on a run in which each method answers so large a share at each position."""
    return run_verdict(simulated_metrics(questions, seed, cut=cut, **shares))


def simulated_metrics(
    questions: int, seed: int = 0, *, cut: str = "", **shares: tuple[float, ...]
) -> pd.DataFrame:
    """The metrics.csv of a run in which each method answers so large a share at each position.

    One draw decides about a question at a position for all methods, as the same model is asked. All wrong replies under
    the method ``cut`` ended before an answer.
    """
    rng = np.random.default_rng(seed)
    num_positions = len(next(iter(shares.values())))
    luck = rng.random((questions, num_positions))
    rows = []
    for method, curve in shares.items():
        for question, position in np.ndindex(luck.shape):
            right = luck[question, position] < curve[position]
            is_cut = method == cut and not right
            rows.append(
                {
                    "method": method,
                    "id": f"{question}-{position}",
                    "gold_position": position,
                    "cluster": str(question),
                    "scores": {} if is_cut else {"accuracy": float(right)},
                    "outcome": "cut" if is_cut else "answered",
                }
            )
    tabulator = Tabulator(
        task=KVRetrieval(pairs=num_positions),
        model="m",
        unmodified="none",
        resamples=400,
        seed=0,
    )
    # As it is read back from metrics.csv.
    table = tabulator.metrics(rows).to_csv(index=False)
    return pd.read_csv(StringIO(table), keep_default_na=False, na_values=[""])


@pytest.mark.parametrize(
    ("questions", "shares", "name"),
    [
        (100, {"none": NOTHING}, CANNOT_DO),
        (5, {"none": NOTHING}, CANNOT_TELL),
        (100, {"none": SOLVED}, NO_BIAS),
        (20, {"none": SOLVED}, CANNOT_TELL),
        (600, {"none": FLAT}, NO_BIAS),
        (40, {"none": FLAT}, CANNOT_TELL),
        (300, {"none": ONE_LOST}, BIAS),
        (100, {"none": MIDDLE_LOST}, BIAS),
        (100, {"none": MIDDLE_LOST, "x": SOLVED}, FIXED),
        (40, {"none": MIDDLE_LOST, "x": SOLVED}, FIXED),
        (6, {"none": MIDDLE_LOST, "x": SOLVED}, CANNOT_TELL),
        (300, {"none": MIDDLE_LOST, "x": (0.9, 0.85, 0.85, 0.85, 0.9)}, FIXED),
        (300, {"none": MIDDLE_LOST, "x": MIDDLE_LOST}, NOT_FIXED),
        (300, {"none": MIDDLE_LOST, "x": (0.9, 0.55, 0.35, 0.55, 0.9)}, NOT_FIXED),
        (60, {"none": MIDDLE_LOST, "x": HALFWAY}, CANNOT_TELL),
        (300, {"none": MIDDLE_LOST, "x": (0.3, 0.3, 0.3, 0.3, 0.3)}, NOT_FIXED),
        (300, {"none": MIDDLE_LOST, "x": NOTHING}, NOT_FIXED),
        (100, {"none": NOTHING, "x": NOTHING}, CANNOT_DO),
        (100, {"none": NOTHING, "x": SOLVED}, CANNOT_TELL),
        (600, {"none": FLAT, "x": SOLVED}, NO_BIAS),
    ],
)
def test_the_verdict_follows_what_was_planted(
    questions: int, shares: dict[str, tuple[float, ...]], name: str
) -> None:
    verdict = verdict_of(questions, **shares)
    assert verdict.name == name, verdict
    assert verdict.reason


@pytest.mark.parametrize("base", [MIDDLE_LOST, NOTHING])
def test_a_method_whose_replies_are_cut_has_no_verdict(base: tuple[float, ...]) -> None:
    verdict = verdict_of(100, cut="x", none=base, x=(0.3,) * 5)
    assert verdict.name == CANNOT_TELL and "missing answers" in verdict.reason


@pytest.mark.parametrize("share", [0.1, 0.6, 0.95])
@pytest.mark.parametrize("questions", [10, 60])
def test_hardly_an_unbiased_reader_has_a_bias(share: float, questions: int) -> None:
    names = [verdict_of(questions, seed, none=(share,) * 5).name for seed in range(20)]
    assert names.count(BIAS) <= 1


def test_a_planted_bias_is_nearly_always_seen() -> None:
    names = [verdict_of(40, seed, none=MIDDLE_LOST).name for seed in range(20)]
    assert names.count(BIAS) >= 18


def test_a_method_that_changes_nothing_fixes_nothing() -> None:
    """Another draw of the same model, as if every reply had been asked again."""
    rng = np.random.default_rng(0)
    for seed in range(20):
        luck = rng.normal(0, 0.01, 5)
        again = tuple(float(share) for share in np.clip(MIDDLE_LOST + luck, 0, 1))
        assert verdict_of(60, seed, none=MIDDLE_LOST, x=again).name != FIXED


@pytest.mark.parametrize("questions", [20, 60])
def test_a_method_that_removes_a_quarter_of_a_bias_is_no_fix(questions: int) -> None:
    """At 20 questions one of ten was called a fix; docs/metrics.md has more simulations."""
    rng = np.random.default_rng(questions)
    names = [verdict_name(method_scores(rng, 0.25, questions)) for _ in range(20)]
    assert names.count(FIXED) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("questions", [20, 60, 200])
def test_a_fix_is_sure(questions: int) -> None:
    rng = np.random.default_rng(questions)
    for removed, most in ((0.0, 0), (0.25, 10), (0.5, 16)):
        names = [
            verdict_name(method_scores(rng, removed, questions)) for _ in range(200)
        ]
        assert names.count(FIXED) <= most


def test_a_method_that_removes_a_bias_is_a_fix_or_cannot_be_told() -> None:
    """No change of the average by chance, and no score too low to be sure of, makes it "not fixed"."""
    rng = np.random.default_rng(0)
    names = [verdict_name(method_scores(rng, 1.0, 60)) for _ in range(20)]
    assert names.count(FIXED) >= 16
    names += [verdict_name(method_scores(rng, 1.0, 20)) for _ in range(20)]
    assert set(names) <= {FIXED, CANNOT_TELL}


def test_a_fix_at_the_ceiling_is_as_sure_as_another() -> None:
    """Few questions leave a score of 100 % wide: what remains of the bias may be more than half of a small one."""
    before = (1.0, 0.9, 0.8, 0.9, 1.0)
    nearly_solved = (0.98, 0.98, 0.98, 0.98, 0.98)
    assert verdict_of(100, none=before, x=nearly_solved).name == CANNOT_TELL
    assert verdict_of(600, none=before, x=nearly_solved).name == FIXED


@pytest.mark.parametrize("questions", few([30, 15, 72], 1))
def test_half_a_fix_near_the_ceiling_is_hardly_called_one(questions: int) -> None:
    """Too few questions to tell a score from 100 %: only the lowest that it may be says what is left."""
    before, after = (1.0, 0.6, 0.4, 0.6, 1.0), (1.0, 0.8, 0.7, 0.8, 1.0)
    verdicts = [verdict_of(questions, n, none=before, x=after) for n in range(40)]
    assert [verdict.name for verdict in verdicts].count(FIXED) <= 2


@pytest.mark.parametrize("share", [0.6, 0.8, 0.95])
def test_a_reader_without_bias_is_told_so_in_a_number_of_questions_chosen_beforehand(
    share: float,
) -> None:
    rng = np.random.default_rng(1)
    questions = FIXED_QUESTIONS[share]
    runs = [simulated_scores(rng, [share] * 3, questions, runs=1)[0] for _ in range(10)]
    names = [verdict_name({"none": scores}) for scores in runs]
    assert names.count(NO_BIAS) >= 7 and names.count(BIAS) <= 1


def test_no_bias_says_its_margin_and_what_it_would_have_missed() -> None:
    verdict = verdict_of(600, none=FLAT)
    assert "by more than 10 points" in verdict.reason
    reach = float(verdict.reason.split("at most ")[1].split()[0])
    assert 3 < reach < 10 and "n = 600" in verdict.reason


def test_a_run_that_stops_when_it_knows_has_the_verdict_of_its_rule() -> None:
    """The rule that stops a run and its verdict look at the same intervals."""
    rng = np.random.default_rng(2)
    for shares, name in (((0.95,) * 3, NO_BIAS), (ONE_LOST, BIAS), (MIDDLE_LOST, BIAS)):
        scores = simulated_scores(rng, shares, 400)
        shape, curve = stopped_shape(scores)
        asked = scores[: curve.contrasts[0].n]
        metrics = metrics_of({"none": asked}, {"none": curve})
        verdict = run_verdict(metrics)
        assert verdict is not None and verdict.name == name
        assert shape_in_metrics(metrics, "none") == shape
        # By intervals for a fixed number of questions it may be more sure than it is.
        fixed = metrics_of({"none": asked})
        widths = [
            (table["ci_high"] - table["ci_low"])[table["metric"] == "position_contrast"]
            for table in (metrics, fixed)
        ]
        assert (widths[0].to_numpy() > widths[1].to_numpy()).all()


def test_two_positions_have_no_verdict() -> None:
    assert verdict_of(50, none=(0.9, 0.1)) is None
    assert run_verdict(None) is None


def test_the_words_are_six() -> None:
    assert len(set(VERDICTS)) == 6
    assert str(Verdict(FIXED, "x")) == "fixed (x)"


def test_a_model_that_answers_nothing_gets_no_fix(
    small: list[str],
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
) -> None:
    """Newcomer, 1: a random model, with a search, its page, its constants and its model card."""
    few = [key for key in small if not key.startswith("task.limit")]
    result = posbench(*few, "task.limit=60", "stages=[search,evaluate,report]")
    assert result.status == 0, result.err
    assert f"Verdict: {CANNOT_DO}." in " ".join(result.out.split())
    (folder,) = run_folders(outputs)
    head = (folder / "found.yaml").read_text().splitlines()[0]
    assert head.startswith("#")
    assert CANNOT_DO in head
    page = (folder / "report.html").read_text()
    assert CANNOT_DO in page
    assert "Paste into" not in page

    out = tmp_path / "fix"
    export = ["export", str(folder), "--to", "transformers", "--out", str(out)]
    refused = posbench(*export, verb=True)
    assert refused.status == 2
    assert_names(refused.err, "RUN", "cannot do", "--force")
    assert not out.exists()
    forced = posbench(*export, "--force", verb=True)
    assert forced.status == 0, forced.err
    card = (out / "README.md").read_text()
    assert CANNOT_DO in card
    assert "A fix against" not in card

    finished = posbench(*few, "task.limit=60", "stages=[search,evaluate,report]")
    assert "finished before" in finished.out, "the verdict is part of what was sealed"


def test_a_fix_is_called_one(posbench: Callable[..., Result], outputs: Path) -> None:
    result = posbench("task.limit=40", "stages=[search,evaluate,report]")
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    assert FIXED in (folder / "found.yaml").read_text().splitlines()[0]
    assert "Paste into" in (folder / "report.html").read_text()
    # Another run copies what was found, but not the verdict on this one.
    assert posbench("task.limit=40", "method.last=1", "stages=[search]").status == 0
    (copy,) = set(run_folders(outputs)) - {folder}
    block = (folder / "found.yaml").read_text().partition("\n")[2]
    assert (copy / "found.yaml").read_text() == block
