"""What a sweep says of how a model follows a number, against run folders in which that is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from posbench.files.atomic import write_csv
from posbench.plots.sweep import CENTRE, HALVES, SPREAD, trend
from posbench.report.sweep import render_sweep
from posbench.report.trend import not_worse_than_best, trends
from posbench.run.folder import RunDir
from tests.frames import attention, metrics, sweep, with_missing_answers

NUMBERS = [-2.0, -1.0, 0.0, 1.0, 2.0]
POSITIONS = 4
PROMPTS = 40
TASK = "posbench.tasks.kv_retrieval.KVRetrieval"
TARGETS = {
    "scale_channel": "posbench.methods.scale_channel.ScaleChannel",
    "position_interpolation": "posbench.methods.position_interpolation.PositionInterpolation",
}


def _runs(
    folder: Path, strength: float, method: str = "scale_channel", pairs: int = 75
) -> list[tuple[dict[str, str], Path]]:
    """Run folders in which attention and score move to the beginning with the factor, as strongly as told."""
    runs = []
    for number in NUMBERS:
        path = folder / f"run{number}"
        path.mkdir(parents=True)
        out = RunDir(path)
        config = {
            "model": {"name": "m"},
            "task": {"name": "kv", "_target_": TASK, "pairs": pairs},
            "method": {"name": method, "_target_": TARGETS[method]},
            "runtime": {"resamples": 300},
        }
        (path / "config.yaml").write_text(json.dumps(config))
        write_csv(path / "attention.csv", attention())
        write_csv(path / "metrics.csv", metrics())
        rng = np.random.default_rng(int(10 * number) + 200)
        depth = np.linspace(-1, 1, POSITIONS)
        weights = list[dict[str, Any]]()
        scores = list[dict[str, Any]]()
        for name, side in (("none", 0.0), (method, strength * number)):
            for i in range(PROMPTS):
                position = i % POSITIONS
                row = {"method": name, "id": str(i)}
                # Layer 1 is the stronger one in attention.csv; layer 0 prefers the other side and must not be
                # read.
                layers = [
                    np.exp(side * depth),
                    np.exp(-side * depth + 0.2 * rng.normal(size=POSITIONS)),
                ]
                weights.append({**row, "attention": [list(layer) for layer in layers]})
                right = float(rng.random() < 0.5 - 0.2 * side * depth[position])
                scores.append(
                    {
                        **row,
                        "gold_position": position,
                        "cluster": "",
                        "scores": {"accuracy": right},
                    }
                )
        out.append("attention.jsonl", weights)
        out.append("predictions.jsonl", scores)
        runs.append(({"method.factor": f"{number:g}"}, path))
    return runs


def test_a_planted_trend_is_found_and_its_absence_too(tmp_path: Path) -> None:
    for name, strength in (("planted", 1.0), ("control", 0.0)):
        rows, findings = trends(_runs(tmp_path / name, strength), ["method.factor"])
        first, second, _, peak = findings.itertuples()
        if strength:
            assert (
                first.verdict == second.verdict == "holds"
                and first.value < -0.9
                and second.value > 0.9
            )
            centres = rows[
                (rows["statistic"] == CENTRE) & (rows["number"] != "none")
            ].set_index("number")["value"]
            weights = {n: np.exp(-n * np.linspace(-1, 1, POSITIONS)) for n in NUMBERS}
            wanted = [
                float(w @ np.linspace(0, 1, POSITIONS) / w.sum())
                for w in weights.values()
            ]
            np.testing.assert_allclose(
                centres[NUMBERS].astype(float), wanted, atol=0.02
            )
        else:
            assert first.verdict == second.verdict == "inconclusive"
            assert (
                first.ci_low < 0 < first.ci_high and second.ci_low < 0 < second.ci_high
            )
        assert (
            peak.ci_low <= peak.value <= peak.ci_high
            and peak.value in NUMBERS
            and peak.kind == "paper"
        )
        assert (rows["ci_low"] <= rows["value"]).all() and (
            rows["value"] <= rows["ci_high"]
        ).all()
        assert set(rows["number"]) == {*NUMBERS, "none"} and set(rows["statistic"]) == {
            CENTRE,
            HALVES,
            SPREAD,
        }


def test_a_guess_has_no_position_bias(tmp_path: Path) -> None:
    """One answer in two is right: with 75 pairs a score, with two pairs a guess."""
    for pairs, shown in ((75, True), (2, False)):
        runs = _runs(tmp_path / str(pairs), 0.0, pairs=pairs)
        rows, _ = trends(runs, ["method.factor"])
        assert (SPREAD in set(rows["statistic"])) is shown


def test_equal_averages_in_and_out_of_the_claimed_range_decide_no_peak(
    tmp_path: Path,
) -> None:
    """All answers right at every factor but the last, which is surely worse."""
    runs = _runs(tmp_path, 0.0)
    for (_, path), share in zip(runs, (1, 1, 1, 1, 0.2), strict=True):
        rows = RunDir(path).rows("predictions.jsonl")
        for number, row in enumerate(rows):
            row["scores"] = {"accuracy": float(number % 10 < 10 * share)}
        RunDir(path).write_rows("predictions.jsonl", rows)
    *_, peak = trends(runs, ["method.factor"])[1].itertuples()
    assert peak.verdict == "inconclusive" and "equal" in peak.note


def _peaks(
    folder: Path,
    accuracy: dict[float, float],
    prompts: int = 200,
    channel: int | None = None,
) -> pd.Series:
    """The verdict on where the average peaks, of a sweep in which each factor is right on a known share of prompts.

    A factor answers the prompts that a less accurate one answers, and more.
    """
    runs = []
    for number, share in accuracy.items():
        path = folder / f"run{number}"
        path.mkdir(parents=True)
        config = {
            "model": {
                "name": "m",
                "scale_channel": {"channel": 3},
                "positional_channel": 5,
            },
            "task": {"name": "kv", "_target_": TASK, "pairs": 75},
            "method": {
                "name": "scale_channel",
                "_target_": TARGETS["scale_channel"],
                "channel": channel,
            },
            "runtime": {"resamples": 200},
        }
        (path / "config.yaml").write_text(json.dumps(config))
        write_csv(path / "metrics.csv", metrics())
        rows = [
            {
                "method": method,
                "id": str(i),
                "gold_position": i % POSITIONS,
                "cluster": "",
                # 97 is coprime to the number of prompts: right answers are spread over the positions.
                "scores": {"accuracy": float(97 * i % prompts < right * prompts)},
            }
            for method, right in (("none", 0.5), ("scale_channel", share))
            for i in range(prompts)
        ]
        RunDir(path).append("predictions.jsonl", rows)
        runs.append(({"method.factor": f"{number:g}"}, path))
    return trends(runs, ["method.factor"])[1].iloc[-1]


def _hill(numbers: list[float], top: float) -> dict[float, float]:
    """Accuracy that falls by 20 points for every unit of distance from the top."""
    return {number: 0.9 - 0.2 * abs(number - top) for number in numbers}


@pytest.mark.parametrize(
    ("numbers", "top", "verdict", "note"),
    [
        # The claimed range is -1 to 0.5: asked inside and on both sides, with the best one at neither end.
        ([2, 1, 0, -1, -2], 0, "holds", ""),
        ([2, 1.5, 1, 0, -1, -2], 1.5, "contradicted", ""),
        # The best one is the last one asked.
        ([1, 0.5, 0, -1.5], -1.5, "not testable", "-4.5,-3"),
        ([2, 1, 0, -2], 2, "not testable", "3,4"),
        # One side, or the range itself, was not asked.
        ([1, 0.5, 0], 0, "not testable", "no method.factor under -1 was asked"),
        ([0.5, 0, -1, -2], 0, "not testable", "no method.factor over 0.5 was asked"),
        ([2, 1.5, 1, -1.5, -2], 1.5, "not testable", "from -1 to 0.5"),
    ],
)
def test_a_best_setting_needs_what_surrounds_it(
    numbers: list[float], top: float, verdict: str, note: str, tmp_path: Path
) -> None:
    peak = _peaks(tmp_path, _hill(numbers, top))
    assert (peak["verdict"], peak["value"]) == (verdict, top)
    assert note in str(peak["note"])


def test_of_equal_averages_the_least_biased_number_is_the_best(tmp_path: Path) -> None:
    """-1 and 0 answer 60 % each, -1 most at the first positions and 0 the same at all of them."""
    runs = _runs(tmp_path, 0.0)
    shares = {-1.0: [0.9, 0.5, 0.5, 0.5], 0.0: [0.6] * 4}
    for number, (_, path) in zip(NUMBERS, runs, strict=True):
        rows = RunDir(path).rows("predictions.jsonl")
        for row in rows:
            share = shares.get(number, [0.4] * 4)[row["gold_position"]]
            # Ten questions at each of the four positions.
            row["scores"] = {
                "accuracy": float(int(row["id"]) // POSITIONS < 10 * share)
            }
        RunDir(path).write_rows("predictions.jsonl", rows)
    *_, peak = trends(runs, ["method.factor"])[1].itertuples()
    assert peak.value == 0
    assert peak.statistic == "factor with the best average score (one of 2 alike)"


def test_claims_name_the_channel_that_they_are_asked_of(tmp_path: Path) -> None:
    subjects = {
        3: "the search's channel",
        5: "the strongest positional channel",
        7: "channel 7",
    }
    for channel, subject in subjects.items():
        folder = tmp_path / str(channel)
        peak = _peaks(folder, _hill([2, 1, 0, -1, -2], 0), channel=channel)
        assert f"[{subject}] (Yu et al. 2025" in peak["claim"]


def test_the_interval_of_a_best_setting_spans_what_cannot_be_told_from_it(
    tmp_path: Path,
) -> None:
    """0 is ahead of -1 by two answers of 200, which tells nothing, and of the others by 40 points."""
    accuracy = {2.0: 0.4, 1.0: 0.4, 0.0: 0.8, -1.0: 0.79, -1.5: 0.4, -2.0: 0.4}
    peak = _peaks(tmp_path / "close", accuracy)
    assert (peak["value"], peak["ci_low"], peak["ci_high"]) == (0, -1, 0)
    assert peak["verdict"] == "holds"
    # 1 is outside the claimed range: as close, it leaves the question open.
    peak = _peaks(tmp_path / "open", {**accuracy, 1.0: 0.79})
    assert (peak["ci_low"], peak["ci_high"]) == (-1, 1)
    assert peak["verdict"] == "inconclusive"
    peak = _peaks(tmp_path / "sure", {**accuracy, -1.0: 0.4})
    assert peak["ci_low"] == peak["value"] == peak["ci_high"] == 0


@pytest.mark.parametrize("gap", [0.0, 0.05])
def test_the_truly_best_setting_is_among_those_that_may_be_best(gap: float) -> None:
    """Paired answers to 100 questions under six settings, the best of which is ahead of the others by the gap."""
    rng = np.random.default_rng(3)
    shares = np.array([0.6, 0.6, 0.6 + gap, 0.6, 0.6, 0.2])
    kept = []
    for _ in range(200):
        answers = rng.random((100, 6)) < shares
        draws = rng.integers(100, size=(300, 100))
        means = np.vstack([answers.mean(0), answers[draws].mean(1)])
        kept.append(not_worse_than_best(means))
    # 190 of 200 are wanted: with 183 or more it is not told from them (binomial, 1 %).
    assert np.sum(kept, axis=0)[2] >= 183
    assert np.sum(kept, axis=0)[5] == 0


def test_a_claim_on_both_sides_of_a_number_needs_both(tmp_path: Path) -> None:
    """'a factor over 1 amplifies the bias, below 1 shrinks it' says nothing of factors up to 1."""
    runs = _runs(tmp_path / "up to 1", 1.0)
    renamed = {"-2": "-2", "-1": "-1", "0": "0", "1": "0.5", "2": "1"}
    below = [({"method.factor": renamed[s["method.factor"]]}, p) for s, p in runs]
    bias = trends(below, ["method.factor"])[1].iloc[2]
    assert bias["verdict"] == "not testable" and bias["value"] == 1
    assert "no factor over 1 was asked: ask method.factor=1.5,2, too" in bias["note"]


def test_missing_answers_of_one_setting_decide_nothing_of_scores(
    tmp_path: Path,
) -> None:
    runs = _runs(tmp_path, 1.0)
    write_csv(runs[1][1] / "metrics.csv", with_missing_answers(metrics()))
    _, findings = trends(runs, ["method.factor"])
    attention_claim, *of_scores = findings.itertuples()
    assert attention_claim.verdict == "holds" and len(of_scores) == 3
    for finding in of_scores:
        assert finding.verdict == "not testable"
        assert "missing answers in 1 of 5" in finding.note


def _rewrite(path: Path, file: str, keep: Any, **changes: Any) -> None:
    """Leave some rows of a run's file, with other fields."""
    rows = [{**row, **changes} for row in RunDir(path).rows(file) if keep(row)]
    RunDir(path).write_rows(file, rows)


def test_a_job_that_asked_less_is_compared_on_what_it_asked(tmp_path: Path) -> None:
    """Jobs of a sweep with a budget choose their sizes: here one has the ends alone, and fewer prompts' attention."""
    runs = _runs(tmp_path, 1.0)
    less = runs[3][1]
    _rewrite(less, "predictions.jsonl", lambda row: row["gold_position"] in (0, 3))
    _rewrite(less, "attention.jsonl", lambda row: int(row["id"]) < 12)
    rows, findings = trends(runs, ["method.factor"])
    attention, score, _, peak = findings.itertuples()
    assert attention.verdict == score.verdict == "holds"
    assert attention.value < -0.9 and attention.n == 12
    assert score.value > 0.9 and score.n == PROMPTS / 2
    assert not rows[["value", "ci_low", "ci_high"]].isna().any(axis=None)
    # The best number is that of the prompts that all were asked.
    ends = {
        number: np.mean(
            [
                row["scores"]["accuracy"]
                for row in RunDir(path).rows("predictions.jsonl")
                if row["method"] != "none" and row["gold_position"] in (0, 3)
            ]
        )
        for number, (_, path) in zip(NUMBERS, runs, strict=True)
    }
    assert ends[peak.value] == max(ends.values())


def test_jobs_without_common_prompts_are_not_compared(tmp_path: Path) -> None:
    runs = _runs(tmp_path, 1.0)
    _rewrite(runs[1][1], "predictions.jsonl", lambda row: True, prompt="another")
    rows, findings = trends(runs, ["method.factor"])
    assert rows.empty and findings.empty


def test_the_rows_are_those_of_the_prompts(tmp_path: Path) -> None:
    runs = _runs(tmp_path, 1.0)
    rows, _ = trends(runs, ["method.factor"])
    number = NUMBERS[0]
    path = runs[0][1]
    scores = [
        r for r in RunDir(path).rows("predictions.jsonl") if r["method"] != "none"
    ]
    means = [
        np.mean([r["scores"]["accuracy"] for r in scores if r["gold_position"] == p])
        for p in range(POSITIONS)
    ]
    halves = rows[(rows["statistic"] == HALVES) & (rows["number"] == number)].iloc[0]
    assert (
        halves.value == pytest.approx(np.mean(means[:2]) - np.mean(means[2:]))
        and halves.n == PROMPTS
    )
    spread = rows[(rows["statistic"] == SPREAD) & (rows["number"] == number)].iloc[0]
    # Noise of the means, from the binomial law, is what the plain variance has too much.
    noise = np.mean([m * (1 - m) / (PROMPTS // POSITIONS) for m in means])
    assert spread.value == pytest.approx(
        np.sqrt(np.var(means, ddof=1) - noise), abs=0.02
    )


def test_another_method_has_no_claim_about_the_direction_and_few_numbers_make_no_trend(
    tmp_path: Path,
) -> None:
    runs = _runs(tmp_path, -1.0, method="position_interpolation")
    _, findings = trends(
        [({"method.scale": s["method.factor"]}, p) for s, p in runs], ["method.scale"]
    )
    assert len(findings) == 3 and set(findings["kind"]) == {"control"}
    assert (
        list(findings["verdict"][:2]) == ["holds", "holds"]
        and findings["value"][0] > 0 > findings["value"][1]
    )
    # One side is preferred as strongly at 2 as at -2, so the spread follows no number of the five.
    assert (
        findings["verdict"][2] == "inconclusive"
        and findings["ci_low"][2] <= 0 <= findings["ci_high"][2]
    )
    for few, axes in ((runs[:2], ["method.factor"]), (runs, ["task.seed"]), (runs, [])):
        rows, findings = trends(few, axes)
        assert rows.empty and findings.empty


def test_a_factor_that_amplifies_the_bias_is_seen_from_zero_up(tmp_path: Path) -> None:
    _, findings = trends(_runs(tmp_path, 1.0), ["method.factor"])
    spread = findings.iloc[2]
    assert (
        "amplifies" in spread["claim"]
        and spread["value"] == 1.0
        and spread["verdict"] == "holds"
    )


@pytest.mark.figures
def test_the_page_of_a_sweep_shows_the_trend(tmp_path: Path) -> None:
    rows, findings = trends(_runs(tmp_path / "runs", 1.0), ["method.factor"])
    write_csv(tmp_path / "trend.csv", rows)
    write_csv(tmp_path / "findings.csv", findings)
    sweep(NUMBERS).to_csv(tmp_path / "summary.csv", index=False)
    page = render_sweep(tmp_path).read_text()
    assert (
        ">Trend</h2>" in page
        and "Figure 6a" in page
        and (tmp_path / "figures" / "trend.svg").is_file()
    )
    panels = trend(pd.read_csv(tmp_path / "trend.csv", keep_default_na=False)).axes
    for axes, name, scale in zip(
        panels, (CENTRE, HALVES, SPREAD), (1, 100, 100), strict=True
    ):
        (line,) = [one for one in axes.lines if len(one.get_xdata()) == len(NUMBERS)]
        wanted = (
            rows[(rows["statistic"] == name) & (rows["number"] != "none")]
            .set_index("number")
            .loc[NUMBERS, "value"]
        )
        np.testing.assert_allclose(
            line.get_ydata(), scale * wanted.astype(float), rtol=1e-6
        )


def _with_method(runs: list[tuple[dict[str, str], Path]], **fields: Any) -> None:
    """Set fields of the method in the configs of runs."""
    for _, path in runs:
        config = json.loads((path / "config.yaml").read_text("utf-8"))
        config["method"] |= fields
        (path / "config.yaml").write_text(json.dumps(config), "utf-8")


@pytest.mark.parametrize(
    "fields", [{"channel": 15}, {"name": "other"}], ids=["channels", "methods"]
)
def test_two_methods_of_a_sweep_are_two_trends_in_any_order(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    rising = _runs(tmp_path / "a", 1.0)
    falling = _runs(tmp_path / "b", -1.0)
    _with_method(rising, channel=20)
    _with_method(falling, channel=20)
    _with_method(falling, **fields)
    (label,) = (
        f"={value}" if key == "channel" else value for key, value in fields.items()
    )
    for runs in (rising + falling, falling + rising):
        rows, findings = trends(runs, ["method.factor"])
        assert rows["group"].nunique() == 2
        of_centre = findings[findings["statistic"].str.contains(CENTRE)]
        values = of_centre.set_index("model")["value"]
        (own,) = (name for name in values.index if label in name)
        (other,) = (name for name in values.index if name != own)
        assert values[own] > 0.9 and values[other] < -0.9


def test_answers_that_are_all_right_contradict_nothing(tmp_path: Path) -> None:
    runs = _runs(tmp_path, 1.0)
    for _, path in runs:
        rows = [json.loads(line) for line in (path / "predictions.jsonl").open()]
        (path / "predictions.jsonl").unlink()
        for row in rows:
            row["scores"] = {"accuracy": 1.0}
        RunDir(path).append("predictions.jsonl", rows)
    _, findings = trends(runs, ["method.factor"])
    of_scores = findings[findings["statistic"].str.contains(HALVES)]
    assert of_scores["verdict"].tolist() == ["not testable"]
