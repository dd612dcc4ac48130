"""Contrasts of a sweep's settings: by hand, and the cases that decide nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from posbench.report.contrasts import judge_contrasts
from posbench.run.folder import RunDir
from posbench.studies.cost.latency import _ratio_finding
from tests.frames import metrics, with_missing_answers

PROMPTS = 400


def run(
    folder: Path,
    scores: dict[str, float],
    contrasts: list[dict[str, Any]],
    prompts: str = "",
) -> Path:
    """A run that answers these shares of its prompts, by method, the same prompts first."""
    folder.mkdir(parents=True)
    config = {"model": {"name": "tiny"}, "experiment": {"contrasts": contrasts}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    metrics().to_csv(folder / "metrics.csv", index=False)
    book = RunDir(folder, "r1")
    rows = [
        {
            "method": method,
            "id": str(number),
            "cluster": str(number),
            "prompt": f"{prompts}{number}",
            "gold_position": 0,
            "scores": {"accuracy": float(number < share * PROMPTS)},
        }
        for method, share in scores.items()
        for number in range(PROMPTS)
    ]
    book.append("predictions.jsonl", rows)
    book.seal("posbench")
    return folder


def judged(
    tmp_path: Path, shares: dict[str, float], contrast: dict[str, Any]
) -> pd.DataFrame:
    """The findings of a contrast over runs with these shares, beside an unmodified model at 0.5."""
    contrasts = [{"claim": "c", **contrast}]
    runs = []
    for name, share in shares.items():
        both = {"none": 0.5, "layer_scaling": share}
        folder = run(tmp_path / f"table/v001/tiny__{name}", both, contrasts)
        runs.append(({"search.curve": name}, folder))
    return judge_contrasts(runs, ["search.curve"])


def test_a_setting_is_a_value_of_a_swept_key(tmp_path: Path) -> None:
    """Other keys that were typed may have the same value."""
    contrasts = [{"claim": "c", "better": ["2"], "than": "1"}]
    runs = []
    for name, share in {"1": 0.5, "2": 0.9}.items():
        folder = run(tmp_path / f"t/v001/tiny__{name}", {"lpes": share}, contrasts)
        setting = {"runtime.threads": "2", "search.calibration_seed": name}
        runs.append((setting, folder))
    (finding,) = judge_contrasts(runs, ["search.calibration_seed"]).itertuples()
    assert finding.value == pytest.approx(40) and finding.verdict == "holds"


def test_runs_without_a_common_prompt_decide_nothing(tmp_path: Path) -> None:
    contrasts = [{"claim": "c", "better": ["b"], "than": "a"}]
    runs = []
    for name in "ab":
        folder = tmp_path / f"t/v001/tiny__{name}"
        runs.append(({"x": name}, run(folder, {"lpes": 0.5}, contrasts, prompts=name)))
    (finding,) = judge_contrasts(runs, ["x"]).itertuples()
    assert finding.verdict == "not testable" and "no prompt in common" in finding.note


def test_less_than_a_point_better_may_be_worse(tmp_path: Path) -> None:
    for share, verdict in (
        (0.3, "holds"),
        (0.51, "inconclusive"),
        (0.7, "contradicted"),
    ):
        contrast = {"not_better": ["a"]}
        (finding,) = judged(tmp_path / f"{share}", {"a": share}, contrast).itertuples()
        assert finding.verdict == verdict, share


def test_settings_are_compared_under_every_value_of_the_other_keys(
    tmp_path: Path,
) -> None:
    contrasts = [{"claim": "c", "better": ["b"], "than": "a"}]
    runs = []
    for seed, by_setting in {
        "0": {"a": 0.4, "b": 0.9},
        "1": {"a": 0.6, "b": 0.7},
    }.items():
        for name, share in by_setting.items():
            folder = tmp_path / f"t/v001/tiny__{name}{seed}"
            run(folder, {"lpes": share}, contrasts, prompts=seed)
            # Another key has values with the names of settings.
            setting = {"x": name, "task.seed": seed, "y": "ab"[int(seed)]}
            runs.append((setting, folder))
    (finding,) = judge_contrasts(runs, ["x", "task.seed", "y"]).itertuples()
    assert finding.value == pytest.approx((50 + 10) / 2) and finding.n == 2 * PROMPTS


@pytest.mark.parametrize("cut", ["layer_scaling", "none"])
def test_missing_answers_decide_nothing(cut: str, tmp_path: Path) -> None:
    contrasts = [{"claim": "c", "better": ["b"]}]
    both = {"none": 0.5, "layer_scaling": 0.9}
    folder = run(tmp_path / "t/v001/tiny__b", both, contrasts)
    (finding,) = judge_contrasts([({"x": "b"}, folder)], ["x"]).itertuples()
    assert finding.verdict == "holds"
    table = with_missing_answers(metrics("layer_scaling"), cut)
    table.to_csv(folder / "metrics.csv", index=False)
    (finding,) = judge_contrasts([({"x": "b"}, folder)], ["x"]).itertuples()
    assert finding.verdict == "not testable" and "missing answers" in finding.note


@pytest.mark.parametrize(
    ("shares", "contrast", "verdict", "points"),
    [
        ({"a": 0.8, "b": 0.9}, {"better": ["a", "b"]}, "holds", 30),
        ({"a": 0.8, "b": 0.5}, {"better": ["a", "b"]}, "contradicted", 0),
        ({"a": 0.8, "b": 0.9}, {"better": ["b"], "than": "a"}, "holds", 10),
        ({"a": 0.8, "b": 0.9}, {"better": ["a"], "than": "b"}, "contradicted", -10),
        ({"a": 0.8, "b": 0.9}, {"equal": ["a", "b"]}, "contradicted", -10),
        ({"a": 0.8, "b": 0.8}, {"equal": ["a", "b"]}, "holds", 0),
        ({"a": 0.8, "b": 0.9}, {"equal": ["a", "b"], "one_search": True}, "inconclusive", -10),
    ],
)  # fmt: skip
def test_settings_are_compared_on_the_same_prompts(
    shares: dict[str, float],
    contrast: dict[str, Any],
    verdict: str,
    points: float,
    tmp_path: Path,
) -> None:
    (finding,) = judged(tmp_path, shares, contrast).itertuples()
    assert finding.verdict == verdict and finding.n == PROMPTS
    assert finding.value == pytest.approx(points)


def test_a_setting_that_was_not_run_leaves_its_contrast_out(tmp_path: Path) -> None:
    assert judged(tmp_path, {"a": 0.8}, {"better": ["b"]}).empty


@pytest.mark.parametrize(
    ("printed", "rounds", "verdict"),
    [
        ("1.86", (1.06, 1.08), "contradicted"),
        ("1.86", (1.97, 2.00), "contradicted"),
        ("1.86", (1.80, 1.95), "holds"),
        ("1.00", (0.96, 1.04), "holds"),
        ("1.00", (0.96, 1.10), "inconclusive"),
    ],
)
def test_a_ratio_of_times_is_held_against_the_papers(
    printed: str, rounds: tuple[float, float], verdict: str
) -> None:
    low, high = rounds
    ratio = float(np.mean(rounds))
    row = {"way": "ms_poe", "work": "w", "ratio": ratio, "ratio_min": low}
    row |= {"ratio_max": high, "n": 2}
    paper = SimpleNamespace(method="ms_poe", ratio=printed, source="s")
    finding = _ratio_finding(row, paper)
    assert finding.verdict == verdict
