"""What the parts of a diagnosis say: levels of pilots, shapes, sources, winners."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from posbench.diagnose.allowance import Allowance
from posbench.diagnose.outcome import (
    Diagnosis,
    Remedy,
    Shape,
    best_place_in_prompt,
    judge_pilot,
    judge_source,
    judge_structure,
)
from posbench.diagnose.page import lines, write_diagnosis
from posbench.diagnose.race import hopeful_methods, winner_of
from posbench.run.budget import Budget
from posbench.stats.bootstrap import Estimate
from posbench.stats.verdict import BIAS, CANNOT_TELL
from posbench.studies.bias_source import INTERVENTIONS
from posbench.studies.structure import CAUSE, DIRECTION, conclude

QUESTIONS = 20


def rows_of_pilot(shares: tuple[float, ...], cut: int = 0) -> list[Any]:
    """Rows of a pilot in which each position has so large a share of right answers."""
    rows = [
        {
            "id": f"{question}-{position}",
            "cluster": str(question),
            "gold_position": position,
            "scores": {
                "accuracy": float(
                    (question + 7 * position) % QUESTIONS < share * QUESTIONS
                )
            },
        }
        for position, share in enumerate(shares)
        for question in range(QUESTIONS)
    ]
    for row in rows[:cut]:
        row |= {"outcome": "cut", "scores": {}, "reason": "ended at the limit"}
    return rows


@pytest.mark.parametrize(
    ("shares", "cut", "level"),
    [
        ((0.0, 0.0, 0.0), 0, "floor"),
        ((0.05, 0.0, 0.05), 0, "floor"),
        ((1.0, 1.0, 1.0), 0, "ceiling"),
        ((0.9, 0.2, 0.3), 0, "in between"),
        ((0.6, 0.0, 0.0), 0, "in between"),
        ((0.0, 0.0, 0.0), 30, "missing answers"),
        ((1.0, 1.0, 1.0), 2, "missing answers"),
        # One cut reply in sixty leaves the numbers as they are.
        ((1.0, 1.0, 1.0), 1, "ceiling"),
    ],
)
def test_a_pilot_tells_where_a_model_stands(
    shares: tuple[float, ...], cut: int, level: str
) -> None:
    assert judge_pilot(rows_of_pilot(shares, cut), "accuracy", 0.0, {}).level == level


def test_a_pilot_without_answers_says_what_to_change() -> None:
    rows = rows_of_pilot((1.0, 1.0, 1.0), 2)
    cut = judge_pilot(rows, "accuracy", 0.0, {})
    assert (cut.missing, cut.is_cut, cut.step) == (2, True, "")
    filtered = {"outcome": "refused", "reason": "content filter", "scores": {}}
    refused = judge_pilot([row | filtered for row in rows], "accuracy", 0.0, {})
    assert refused.level == "missing answers" and refused.missing == len(rows)
    assert not refused.is_cut and "content filter" in refused.step
    assert refused.average.n == 0 and "60 refused" in refused.kinds


def test_a_guess_is_the_floor_where_there_are_choices() -> None:
    rows = rows_of_pilot((0.25, 0.25, 0.25))
    assert judge_pilot(rows, "accuracy", 0.25, {}).level == "floor"
    assert judge_pilot(rows, "accuracy", 0.0, {}).level == "in between"


def interval(low: float, high: float) -> Estimate:
    return Estimate((low + high) / 2, low, high, QUESTIONS)


def tables_of_source(
    gap: Estimate, shares: dict[str, Estimate], losses: tuple[float, ...] = (1, 3, 2)
) -> Any:
    effects = {"gap": gap} | {f"{name}_share": e for name, e in shares.items()}
    effects |= {f"{name}_over_bound": interval(-0.5, -0.1) for name in shares}
    rows = [{"effect": name, **e._asdict()} for name, e in effects.items()]
    unmodified = [
        {
            "variant": "none",
            "gold_position": position,
            "depth": position / (len(losses) - 1),
            "loss": loss,
            "n": 15,
        }
        for position, loss in enumerate(losses)
    ]
    return {
        "bias_source": pd.DataFrame(unmodified),
        "bias_source_effects": pd.DataFrame(rows),
    }


def findings_of_source(verdicts: dict[str, str]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"claim": INTERVENTIONS[name].claim, "verdict": verdict}
            for name, verdict in verdicts.items()
        ]
    )


@pytest.mark.parametrize(
    ("best", "crop", "beginning", "end", "sink", "named", "excluded"),
    [
        ("first", "holds", "no", "no", "no", "mask", "ids sink"),
        ("last", "no", "no", "holds", "open", "ids", ""),
        # An item that looks like the first one says nothing of what prefers the last.
        ("last", "no", "no", "open", "open", "", ""),
        ("last", "no", "open", "no", "open", "", "ids"),
        ("middle", "no", "no", "no", "no", "", "sink"),
        ("first", "holds", "open", "holds", "open", "mask ids", ""),
        ("first", "open", "open", "no", "open", "", ""),
    ],
)
def test_a_source_is_named_or_left_out_by_its_interventions(
    best: str, crop: str, beginning: str, end: str, sink: str, named: str, excluded: str
) -> None:
    words = {"no": "contradicted", "open": "inconclusive", "holds": "holds"}
    verdicts = {
        "crop": words[crop],
        "pe_to_beginning": words[beginning],
        "pe_to_end": words[end],
        "sink": words[sink],
    }
    losses = {"first": (1, 3, 2), "last": (2, 3, 1), "middle": (2, 1, 3)}[best]
    shares = dict.fromkeys(verdicts, interval(0.1, 0.5))
    tables = tables_of_source(interval(1, 2), shares, losses)
    source = judge_source(tables, findings_of_source(verdicts))
    names = {"mask": "causal mask", "ids": "position ids", "sink": "first token"}
    assert set(source.named) == {names[key] for key in named.split()}
    assert set(source.excluded) == {names[key] for key in excluded.split()}
    assert source.questions == 15
    assert ("cannot tell" in str(source)) == (not named and not excluded)


def test_a_source_is_left_out_for_what_it_surely_does_not_do_alone() -> None:
    """An intervention may close the gap, but its control more so: that is no sign against its source."""
    verdicts = {"sink": "contradicted"}
    tables = tables_of_source(interval(1, 2), {"sink": interval(0.2, 0.6)})
    assert judge_source(tables, findings_of_source(verdicts)).excluded
    effects = tables["bias_source_effects"]
    effects.loc[effects["effect"] == "sink_over_bound", "ci_high"] = 0.1
    assert not judge_source(tables, findings_of_source(verdicts)).excluded


def test_a_place_is_that_in_the_prompt() -> None:
    """The first position that is asked need not be the first item."""
    shares = {"pe_to_beginning": interval(0.1, 0.2)}
    tables = tables_of_source(interval(1, 2), shares)
    findings = findings_of_source({"pe_to_beginning": "contradicted"})
    assert judge_source(tables, findings).excluded
    tables["bias_source"]["depth"] = [0.25, 0.5, 0.75]
    assert not judge_source(tables, findings).excluded


@pytest.mark.parametrize("direction", ["holds", "contradicted", "inconclusive"])
@pytest.mark.parametrize(
    "cause", ["holds", "contradicted", "inconclusive", "not testable"]
)
def test_a_diagnosis_says_of_structure_what_the_page_of_the_study_says(
    direction: str, cause: str
) -> None:
    rows = [
        {"claim": DIRECTION[0], "verdict": direction, "note": ""},
        {"claim": CAUSE[0], "verdict": cause, "note": "item 0 is 7 times"},
    ]
    word, _, sentence = conclude(direction, cause)
    told = judge_structure(pd.DataFrame(rows))
    assert told.startswith(f"{word}: ") and told.endswith(" (item 0 is 7 times)")
    assert sentence[1:-1] in told
    is_cause_named = direction == "holds" and cause in ("holds", "contradicted")
    assert (word in ("structural in part", "direction only")) == is_cause_named
    assert ("cannot be told" in told) == (
        direction == "inconclusive" or (direction == "holds" and not is_cause_named)
    )


def test_the_place_is_measured_on_questions_that_did_not_choose_it() -> None:
    scores = np.array([[1, 0, 0], [1, 0, 1]] * 20, dtype=float)
    place = best_place_in_prompt(scores, [0, 5, 9])
    # Odd rows measure: right at the first and the last place, so 100 % there against a mean of 50 %.
    assert place.startswith("put what matters first: 100 % right there, 50 % elsewhere")
    assert "50.0 [" in place and "20 questions" in place
    assert "at item 6" in best_place_in_prompt(scores[:, [1, 0, 1]], [0, 5, 9])
    both = best_place_in_prompt(np.array([[1.0, 0.0, 0.0, 1.0]] * 24), range(4))
    assert both.startswith(
        "put what matters first or last: 100 % right there, 0 % elsewhere"
    )
    # Twelve right of twelve may be 76 %, and twelve wrong 24 % (Wilson).
    low = 1 - math.sqrt(2) * (1 - 12 / (12 + 1.96**2))
    assert f"100 [{100 * low:.0f}, 100] points more" in both
    # By chance some place is always the best of the first half; the second half does not confirm it.
    for questions, share in ((40, 0.5), (16, 0.9), (30, 0.9)):
        noise = np.random.default_rng(0).random((400, questions, 9)) < share
        found = [bool(best_place_in_prompt(1.0 * rows, range(9))) for rows in noise]
        assert np.mean(found) < 0.06
    # Of questions that are easy or hard everywhere, the place is found by what differs within them.
    rng = np.random.default_rng(0)
    shares = np.array([0.95, 0.7, 0.7, 0.7, 0.7])
    found = []
    for _ in range(100):
        is_easy = rng.random((80, 1)) < 0.5
        rows = is_easy & (rng.random((80, 5)) < shares)
        found.append(best_place_in_prompt(1.0 * rows, range(5)))
    assert np.mean([text.startswith("put what matters first") for text in found]) > 0.8
    assert not best_place_in_prompt(scores[:2], [0, 5, 9])


def test_without_a_gap_nothing_is_named() -> None:
    shares = {"crop": interval(0.5, 0.9)}
    tables = tables_of_source(interval(-0.1, 1), shares)
    source = judge_source(tables, findings_of_source({"crop": "not testable"}))
    assert not source.named and "cannot tell" in str(source)


def test_the_winner_is_surely_better_than_the_unmodified_model() -> None:
    sure = Remedy("a", interval(0.01, 0.1), 1.0)
    unsure = Remedy("b", interval(-0.01, 0.9), 1.0)
    left_out = Remedy("c", note="no constants")
    assert winner_of([unsure, sure, left_out]) == "a"
    assert winner_of([unsure, left_out]) == ""


def test_the_gain_that_is_told_is_that_of_the_winner() -> None:
    first = Remedy("b", interval(-0.25, 0.75), 1.0)
    winner = Remedy("a", interval(0.5, 1.5), 1.0)
    diagnosis = Diagnosis("model", "task", BIAS, "reason")
    diagnosis.remedies = [first, winner]
    diagnosis.winner = winner_of(diagnosis.remedies)
    diagnosis.held_back = "not asked"
    (line,) = (
        text for text in lines(diagnosis) if text.startswith("change of the model:")
    )
    assert line.startswith("change of the model: a, 1.0") and "0.25" not in line


def test_a_bias_that_is_not_the_verdict_is_not_the_headline() -> None:
    contrasts = {"primacy": interval(0.3, 0.5), "recency": interval(-0.05, 0.05)}
    diagnosis = Diagnosis("model", "task", BIAS, "numbers")
    diagnosis.shape = Shape("primacy", contrasts, [], 30)
    assert "has a primacy bias" in diagnosis.headline
    diagnosis.verdict = CANNOT_TELL
    assert "primacy" not in diagnosis.headline


def test_a_winner_without_held_back_questions_has_a_page(tmp_path: Path) -> None:
    diagnosis = Diagnosis("model", "task", BIAS, "numbers")
    diagnosis.winner = "a"
    diagnosis.held_back = "not asked: nothing is left of the budget"
    page = write_diagnosis(diagnosis, tmp_path, "posbench diagnose")
    assert diagnosis.held_back in page.read_text(encoding="utf-8")


def test_money_is_counted_for_what_the_server_was_asked_alone() -> None:
    allowance = Allowance(Budget.parse("1usd"), (1.0, 10.0))
    allowance.add(10, 100_000, 10_000, is_paid=True)
    assert allowance.usd == pytest.approx(0.2)
    assert allowance.cost_of_prompt(0, 0) == pytest.approx(0.02)
    allowance.add(50, 900_000, 0)  # in process
    assert allowance.usd == pytest.approx(0.2) == allowance.spent
    assert allowance.cost_of_prompt(0, 0) == pytest.approx(0.02)
    assert allowance.read == 1_000_000 and allowance.prompts == 60


def test_a_method_is_given_up_where_it_surely_closes_less_than_a_third_of_the_gap() -> (
    None
):
    below = Remedy("a", interval(-0.2, 0.9), 1.0)
    above = Remedy("b", interval(-0.2, 1.1), 1.0)
    harmful = Remedy("c", interval(-0.9, -0.1), 1.0)
    left_out = Remedy("d", note="no constants")
    remedies = [below, above, harmful, left_out]
    gap = Estimate(3.0, 2.0, 4.0, 20)
    assert hopeful_methods(remedies, gap) == ["b"]
    # Without a gap that is sure any gain counts.
    for unknown in (None, Estimate(3.0, -0.5, 6.5, 20)):
        assert hopeful_methods(remedies, unknown) == ["a", "b"]
