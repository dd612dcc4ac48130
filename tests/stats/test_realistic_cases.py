"""Intervals and verdicts on what real data bring: unlike positions, partial credit, few settings, lost answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from posbench.diagnose.outcome import Remedy
from posbench.diagnose.race import _remedy, winner_of
from posbench.stats.bootstrap import Estimate, combined, mean
from posbench.stats.findings import draws_p
from posbench.stats.frames import UNMODIFIED
from posbench.stats.policies import CANNOT_TELL, USE, PolicyRace
from posbench.stats.position_bias import (
    MINUS_HALF,
    contrast_estimates,
    contrast_with_others,
    floor_note,
    position_curves,
    statistic_rows,
)
from posbench.studies.attention_to_gold import LINK, _position_findings
from posbench.studies.remedies import _biases
from posbench.tasks import Example


def rows_of(scores: np.ndarray) -> pd.DataFrame:
    """Scores [N, K] of N questions at K positions as rows."""
    questions, positions = np.indices(scores.shape)
    columns = {
        "method": "m",
        "gold_position": positions.ravel(),
        "cluster": questions.ravel().astype(str),
        "score": scores.ravel(),
    }
    return pd.DataFrame(columns)


def test_a_position_unlike_the_others_is_not_taken_for_one_of_them() -> None:
    """All positions but the first are right on the same questions: nothing makes the first one's contrast surer."""
    rng = np.random.default_rng(0)
    num_questions, draws = 100, 60
    missed = 0
    for _ in range(draws):
        scores = np.repeat(rng.random((num_questions, 1)) < 0.7, 5, axis=1) * 1.0
        scores[:, 0] = rng.random(num_questions) < 0.6
        rows = rows_of(scores)
        [(curve, resampled)] = position_curves(rows, "score", "method", 200).values()
        questions = [str(i) for i in range(num_questions)]
        positions = [mean(column, questions) for column in scores.T]
        first = contrast_estimates(positions, resampled)[0]
        assert first.value == pytest.approx(contrast_with_others(curve)[0])
        missed += not first.ci_low < -0.1 < first.ci_high
    # With one correlation for each two positions a third of the intervals miss.
    assert missed <= 0.12 * draws


def test_equal_answers_have_equal_statistics_and_a_difference_of_about_zero() -> None:
    """A factor of 1 changes nothing: its bias and its shape are those of the unmodified model."""
    scores = (np.random.default_rng(3).random((6, 5)) < 0.6) * 1.0
    rows = [rows_of(scores).assign(method=name) for name in (UNMODIFIED, "same")]
    found = statistic_rows(pd.concat(rows), "score", UNMODIFIED, 200, 0)
    by_method: dict[str, dict[str, Estimate]] = {UNMODIFIED: {}, "same": {}}
    for row in found:
        by_method[row.method][f"{row.statistic} {row.position}"] = row.estimate
    for name, estimate in by_method[UNMODIFIED].items():
        assert by_method["same"][name] == pytest.approx(estimate, nan_ok=True), name
    change = by_method["same"]["position_bias_difference None"]
    assert change.value == 0 and change.ci_low < 0 < change.ci_high


def test_no_changed_answer_does_not_show_that_none_would_change() -> None:
    """A method that would mend a share s of the middle's n answers changes none of them with a chance of (1 - s)^n."""
    curve = np.array([1.0, 0, 1])
    widths = []
    for questions in (10, 20, 50):
        scores = np.tile(curve, (questions, 1))
        rows = [rows_of(scores).assign(method=name) for name in (UNMODIFIED, "same")]
        found = statistic_rows(pd.concat(rows), "score", UNMODIFIED, 2000, 0)
        by_name = {r.statistic: r.estimate for r in found if r.method == "same"}
        change = by_name["position_bias_difference"]
        mended = 1 - 0.1 ** (1 / questions)
        # The standard deviation of 1, s, 1 instead of that of 1, 0, 1.
        true_change = np.std([1, mended, 1], ddof=1) - np.std(curve, ddof=1)
        assert change.ci_low < true_change < 0 < change.ci_high
        widths.append(change.ci_high - change.ci_low)
        # Far from half of it can be mended: that is sure.
        assert by_name[MINUS_HALF].ci_low > 0
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("questions", [1, 2])
def test_one_question_tells_no_bias_nor_do_two(questions: int) -> None:
    """Of 600 flat readers 46 had one for sure with two questions at each position."""
    scores = np.array([[1.0, 1, 0, 0, 1]]).repeat(questions, 0)
    rows = statistic_rows(rows_of(scores), "score", UNMODIFIED, 100, 0)
    (bias,) = (row for row in rows if row.statistic == "position_bias")
    assert np.isnan(bias.estimate.value) and "too few" in bias.note


def test_one_correlation_of_all_parts_is_a_matrix_of_it() -> None:
    rng = np.random.default_rng(1)
    parts = [Estimate(v, v - a, v + b, 9) for v, a, b in rng.random((4, 3))]
    weights = (1, -0.5, -0.25, -0.25)
    matrix = np.full((4, 4), 0.3)
    assert combined(parts, weights, 9, 0.3) == pytest.approx(
        combined(parts, weights, 9, matrix)
    )


def test_a_score_of_nearly_one_says_no_more_than_a_right_answer() -> None:
    questions = [str(i) for i in range(60)]
    right = mean(np.ones(60), questions)
    nearly = mean(np.r_[np.ones(59), 0.98], questions)
    assert 0.8 < nearly.ci_low <= right.ci_low
    # Of scores spread over 0..1 the interval is the normal one.
    spread = np.random.default_rng(0).random(400)
    estimate = mean(spread, [str(i) for i in range(400)])
    half = 1.96 * spread.std() / 20
    assert estimate.ci_high - estimate.ci_low == pytest.approx(2 * half, rel=0.03)


def test_partial_credit_near_zero_does_not_rule_out_a_rare_right_answer() -> None:
    """Replies overlap with the answer by a few percent; now and then one is right."""
    rng = np.random.default_rng(2)
    missed = 0
    for _ in range(400):
        scores = rng.uniform(0, 0.1, 20)
        scores[rng.random(20) < 0.1] = 1
        estimate = mean(scores, [str(i) for i in range(20)])
        missed += not estimate.ci_low < 0.9 * 0.05 + 0.1 < estimate.ci_high
    assert missed <= 0.08 * 400


def test_questions_asked_unequally_often_are_worth_fewer() -> None:
    rng = np.random.default_rng(3)
    sizes = np.maximum(30 // np.arange(1, 21), 1)
    missed = 0
    for _ in range(400):
        right = rng.random(20) < 0.7
        values = np.repeat(right, sizes) * 1.0
        clusters = [str(i) for i in np.repeat(np.arange(20), sizes)]
        estimate = mean(values, clusters)
        missed += not estimate.ci_low < 0.7 < estimate.ci_high
    assert missed <= 0.08 * 400


@pytest.mark.parametrize(
    ("share", "chance", "questions", "positions"),
    [(0.5, 0.25, 10, 3), (0.45, 0.25, 20, 5), (0.4, 0.2, 15, 5), (0.1, 0.007, 100, 5)],
)
def test_a_reader_better_than_a_guess_is_not_at_the_floor(
    share: float, chance: float, questions: int, positions: int
) -> None:
    rng = np.random.default_rng(4)
    names = [str(i) for i in range(questions)]
    at_floor = 0
    for _ in range(200):
        scores = (rng.random((questions, positions)) < share) * 1.0
        each = [mean(column, names) for column in scores.T]
        average = mean(scores.ravel(), np.repeat(names, positions).tolist())
        note = floor_note(each, average, chance, questions)
        at_floor += note.startswith("at the floor")
    assert at_floor <= 0.05 * 200


def test_a_reader_that_guesses_is_at_the_floor() -> None:
    names = [str(i) for i in range(40)]
    wrong = [mean(np.zeros(40), names)] * 5
    average = mean(np.zeros(200), names * 5)
    assert floor_note(wrong, average, 0.05, 40).startswith("at the floor")


def test_the_p_of_a_rank_is_that_of_its_draws() -> None:
    draws = np.array([1.0] * 95 + [0.5] * 3 + [-0.5] * 2)
    # Two of 100 draws lie below the bound, five at or below the other one.
    assert draws_p(draws, 0.05) == pytest.approx(2 * 3 / 101)
    assert draws_p(draws, 0.5) == pytest.approx(2 * 6 / 101)
    assert draws_p(draws, 1.0) == 1.0


def test_two_curves_with_nothing_in_common_are_not_said_to_follow_each_other() -> None:
    rng = np.random.default_rng(5)
    verdicts = []
    for _ in range(30):
        attention = 0.02 * np.exp(rng.normal(0, 0.5, 5))
        share = rng.uniform(0.3, 0.9, 5)
        scores = (rng.random((60, 5)) < share) * 1.0
        rows = rows_of(scores).assign(items=20)
        rows["depth"] = rows["gold_position"] / 4
        rows["attention"] = attention[rows["gold_position"]]
        rows["attention"] *= np.exp(rng.normal(0, 0.3, len(rows)))
        maps = pd.DataFrame({"layer": 0, "gold_position": range(5), "item": range(5)})
        maps["attention"] = attention
        layers = pd.DataFrame({"layer": [0], "used": [True]})
        tables = {"maps": maps, "layers": layers}
        finding = _position_findings(rows, tables)[0]
        assert finding.claim == LINK[0]
        verdicts.append(finding.verdict)
    assert verdicts.count("holds") + verdicts.count("contradicted") <= 4


def test_an_order_that_ties_make_common_contradicts_nothing() -> None:
    """Four of five positions are equal: in one of five permutations the fifth has the most attention."""
    scores = np.array([[1.0, 1, 1, 1, 0.5]]).repeat(20, 0)
    rows = rows_of(scores).assign(items=20)
    rows["depth"] = rows["gold_position"] / 4
    attention = np.arange(1, 6) / 100
    rows["attention"] = attention[rows["gold_position"]]
    maps = pd.DataFrame({"layer": 0, "gold_position": range(5), "item": range(5)})
    maps["attention"] = attention
    tables = {"maps": maps, "layers": pd.DataFrame({"layer": [0], "used": [True]})}
    finding = _position_findings(rows, tables)[0]
    assert finding.verdict == "inconclusive" and finding.p >= 0.4


def test_a_perfect_reader_has_no_bias_that_could_be_measured() -> None:
    rows = [
        {"gold_position": p, "id": f"{q} {p}", "cluster": str(q), "scores": {"a": 1.0}}
        for q in range(6)
        for p in range(3)
    ]
    bias = _biases({UNMODIFIED: rows}, "a", 200, 0.0)[UNMODIFIED]
    assert np.isnan([bias.value, bias.ci_low, bias.ci_high]).all()


def test_a_policy_that_loses_answers_is_not_recommended_for_what_it_repairs() -> None:
    """It repairs a tenth of the questions, and has no reply to another tenth, which were right."""
    base = {f"q{i}": float(i >= 40) for i in range(400)}
    silent = {name for number, name in enumerate(base) if number >= 360}
    changed = {name: 1.0 for name in base if name not in silent}
    race = PolicyRace("as_is", ("b",))
    lossy = race.verdict({"as_is": base, "b": changed}, "b")
    assert (lossy.name, lossy.policy) == (CANNOT_TELL, "as_is")
    assert "40 questions without an answer" in lossy.reason
    whole = race.verdict({"as_is": base, "b": dict.fromkeys(base, 1.0)}, "b")
    assert (whole.name, whole.policy) == (USE, "b")


def test_of_many_methods_without_an_effect_hardly_one_wins() -> None:
    rng = np.random.default_rng(6)
    prompts = [Example(id=str(i), prompt="p", answers=("a",)) for i in range(48)]
    methods = [f"m{number}" for number in range(15)]
    wins = 0
    for _ in range(60):
        rows: list[dict[str, Any]] = []
        for name in (UNMODIFIED, *methods):
            losses = rng.gamma(2, 1, 48)
            rows += [
                {"method": name, "id": p.id, "loss": loss, "seconds": 1.0}
                for p, loss in zip(prompts, losses, strict=True)
            ]
        remedies: list[Remedy] = [
            _remedy(name, rows, prompts, 0.05 / len(methods)) for name in methods
        ]
        remedies.sort(key=lambda remedy: -(remedy.gain or Estimate(0, 0, 0, 0)).value)
        wins += bool(winner_of(remedies))
    assert wins <= 0.12 * 60
