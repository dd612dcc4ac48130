"""How the lean of a model follows a swept number of its method (Yu et al. 2025, Figure 6); reads run folders,
never models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray
from scipy.stats import rankdata

from posbench.plots.base import UNMODIFIED, gold_attention, own_metric, strongest_layer
from posbench.plots.sweep import CENTRE, LEAN, SPREAD
from posbench.report import page as report
from posbench.run.folder import RunDir
from posbench.stats.tables import position_bias, resampled_curves
from posbench.studies.base import FINDING_COLUMNS, Finding

Array = NDArray[np.float64]
ATTENTION, PREDICTIONS = "attention.jsonl", "predictions.jsonl"
TREND = ("group", "axis", "statistic", "number", "value", "low", "high", "n")
"""Columns of ``trend.csv``: a statistic at one value (``number``) of the swept key, ``none`` for the
unmodified model."""


def trends(
    runs: Sequence[tuple[dict[str, str], Path]], axes: Sequence[str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """How the lean of a model follows a swept number of its method.

    Args:
        runs: Per finished run its settings and folder.
        axes: The swept keys. One of the method's keys must have three numbers or more; other keys, models and
            tasks make groups.

    Returns:
        Rows of :data:`TREND` for every setting and for the unmodified model: the centre of attention over the
        items, 0 the first and 1 the last, in the layer whose attention to the gold item is largest in the
        unmodified model; and the score of the first half of the gold positions minus that of the second; and
        the position bias. Then the findings: rank correlations of these with the number, and the factor with
        the best average score, with bootstrap intervals over questions. Both are empty where no such key was
        swept.
    """
    values = {
        axis: [_number(setting.get(axis)) for setting, _ in runs]
        for axis in axes
        if axis.startswith("method.")
    }
    numeric = [axis for axis, numbers in values.items() if None not in numbers and len(set(numbers)) > 2]
    groups: dict[str, dict[float, Path]] = {}
    configs = (
        [yaml.safe_load((path / "config.yaml").read_text()) for _, path in runs] if len(numeric) == 1 else []
    )
    tasks = {facts["task"]["name"] for facts in configs}
    for (setting, path), facts in zip(runs, configs, strict=False):
        rest = [f"{axis}={setting[axis]}" for axis in axes if axis not in numeric and axis in setting]
        group = ", ".join(
            [facts["model"]["name"], *([facts["task"]["name"]] if len(tasks) > 1 else []), *rest]
        )
        groups.setdefault(group, {})[float(setting[numeric[0]])] = path
    rows: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for group, folders in groups.items():
        if len(folders) < 3:
            continue
        facts = yaml.safe_load((next(iter(folders.values())) / "config.yaml").read_text())
        here, findings = _trend(
            dict(sorted(folders.items())), numeric[0], facts["method"]["name"], facts["runtime"]["resamples"]
        )
        rows += [{"group": group, "axis": numeric[0], **row} for row in here]
        found += [{"model": group, **asdict(finding)} for finding in findings]
    return pd.DataFrame(rows, columns=list(TREND)), pd.DataFrame(found, columns=list(FINDING_COLUMNS))


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _trend(
    folders: dict[float, Path], axis: str, method: str, resamples: int
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Rows and findings of one model and task."""
    # Yu et al. (2025) say which way their factor goes; of other keys the claim is only that they have a side.
    published = method == "scale_channel" and axis == "method.factor"
    attention, scores = _centres(folders), _scores(folders)
    parts = []
    if attention is not None:
        parts.append(_attention_lean(attention, folders, axis, published, resamples))
    if scores is not None:
        parts.append(_score_lean(scores, folders, axis, published, resamples))
    return [row for rows, _ in parts for row in rows], [
        finding for _, findings in parts for finding in findings
    ]


def _attention_lean(
    table: pd.DataFrame, folders: dict[float, Path], axis: str, published: bool, resamples: int
) -> tuple[list[dict[str, Any]], list[Finding]]:
    curves = resampled_curves(table, "centre", "number", resamples, 0)
    n = int(table["id"].nunique())
    rows = [
        {"statistic": CENTRE, "number": number, **_mean(*curve), "n": n} for number, curve in curves.items()
    ]
    prompts = table.drop_duplicates("id").sort_values("id")
    wide = [table[table["number"] == number].sort_values("id")["centre"].to_numpy() for number in folders]
    each = prompts.assign(rank=rank_correlation(np.stack(wide, axis=-1), np.array(list(folders))), number=0.0)
    claim = "C7: a larger factor moves attention to the beginning (Yu et al. 2025, Figure 6a)"
    found = _finding(
        claim if published else f"attention leans with {axis}",
        f"rank correlation of the {CENTRE} with {axis}, mean over prompts",
        -1 if published else 0,
        **_mean(*resampled_curves(each, "rank", "number", resamples, 0)[0.0]),
        n=n,
    )
    return rows, [found]


def _mean(curve: Array, draws: Array) -> dict[str, float]:
    """Mean over gold positions with its interval, from a curve [K] and its draws [R, K]."""
    low, high = np.quantile(draws.mean(-1), [0.025, 0.975])
    return {"value": float(curve.mean()), "low": float(low), "high": float(high)}


def _halves(curve: Array) -> Array:
    """First half of the gold positions minus second half, [..., K] to [...]; the ends alone are often all
    right."""
    half = curve.shape[-1] // 2
    return curve[..., :half].mean(-1) - curve[..., -half:].mean(-1)


def _score_lean(
    table: pd.DataFrame, folders: dict[float, Path], axis: str, published: bool, resamples: int
) -> tuple[list[dict[str, Any]], list[Finding]]:
    numbers, n = np.array(list(folders)), int(table["cluster"].nunique())
    curves = resampled_curves(table, "score", "number", resamples, 0)
    rows = []
    for number, (curve, draws) in curves.items():
        low, high = np.quantile(_halves(draws), [0.025, 0.975])
        rows.append(
            {
                "statistic": LEAN,
                "number": number,
                "value": float(_halves(curve)),
                "low": low,
                "high": high,
                "n": n,
            }
        )
    spreads = {number: position_bias(*curve) for number, curve in curves.items()}
    for number, (value, draws) in spreads.items():
        low, high = np.quantile(draws, [0.025, 0.975])
        rows.append({"statistic": SPREAD, "number": number, "value": value, "low": low, "high": high, "n": n})
    exact, drawn = (np.stack([curves[number][i] for number in folders], axis=-2) for i in (0, 1))
    low, high = np.quantile(rank_correlation(_halves(drawn), numbers), [0.025, 0.975])
    lean = _finding(
        "C7: a larger factor favours the beginning (Yu et al. 2025, Figure 6b)"
        if published
        else f"the score leans with {axis}",
        f"rank correlation of the {LEAN} with {axis}",
        1 if published else 0,
        value=float(rank_correlation(_halves(exact), numbers)),
        low=float(low),
        high=float(high),
        n=n,
    )
    found = [lean]
    # Below zero the paper's factor turns the bias round, so that more of it is no more bias.
    kept = numbers >= 0 if published else np.full(len(numbers), True)
    if kept.sum() > 2:
        values, drawn_values = (
            np.stack([spreads[number][i] for number in numbers[kept]], axis=-1) for i in (0, 1)
        )
        low, high = np.quantile(rank_correlation(drawn_values, numbers[kept]), [0.025, 0.975])
        claim = "C7: over 1 a factor amplifies the bias, below 1 it shrinks it (Yu et al. 2025, Section 4.3)"
        found.append(
            _finding(
                claim if published else f"the position bias changes with {axis}",
                f"rank correlation of the {SPREAD} with {axis}" + (" from 0 up" if published else ""),
                1 if published else 0,
                value=float(rank_correlation(values, numbers[kept])),
                low=float(low),
                high=float(high),
                n=n,
            )
        )
    if not published:
        return rows, found
    draws = numbers[drawn.mean(-1).argmax(-1)]
    low, high = map(float, np.quantile(draws, [0.025, 0.975], method="inverted_cdf"))
    inside, outside = low >= -1 and high <= 0.5, high < -1 or low > 0.5
    peak = Finding(
        claim="C7: the average accuracy peaks for a factor from 0.5 to -1 (Yu et al. 2025, Section 4.3)",
        statistic="factor with the best average score",
        value=float(numbers[exact.mean(-1).argmax()]),
        low=low,
        high=high,
        n=n,
        verdict="holds" if inside else "does not hold" if outside else "not testable here",
        note="" if inside or outside else "the interval reaches over an end of the range",
    )
    return rows, [*found, peak]


def _finding(
    claim: str, statistic: str, sign: int, *, value: float, low: float, high: float, n: int
) -> Finding:
    """A correlation and whether its interval lies on the claimed side of zero; sign 0 claims either side."""
    holds = (sign <= 0 and high < 0) or (sign >= 0 and low > 0)
    verdict: Any = "holds" if holds else "does not hold"
    return Finding(claim=claim, statistic=statistic, value=value, low=low, high=high, n=n, verdict=verdict)


def rank_correlation(values: Array, numbers: Array) -> Array:
    """Spearman's correlation of the last axis with the numbers; 0 where the values are all the same."""
    ranks, own = rankdata(values, axis=-1), rankdata(numbers)
    ranks, own = ranks - ranks.mean(-1, keepdims=True), own - own.mean()
    spread = np.sqrt((ranks**2).sum(-1) * (own**2).sum())
    return np.where(spread > 0, (ranks * own).sum(-1) / np.where(spread > 0, spread, 1), 0.0)


def _centres(folders: dict[float, Path]) -> pd.DataFrame | None:
    """Centre of attention of every measured prompt at every number, and of the unmodified model."""
    first = next(iter(folders.values()))
    frame = report.read_csv(first / "attention.csv")
    if frame is None or not all((path / ATTENTION).is_file() for path in folders.values()):
        return None
    layer = strongest_layer(gold_attention(frame))
    known = {row["id"]: row for row in RunDir(first).rows(PREDICTIONS) if "error" not in row}
    out = []
    for number, path in folders.items():
        for row in RunDir(path).rows(ATTENTION):
            plain = row["method"] == UNMODIFIED
            if "error" in row or (plain and path != first):
                continue
            weights = np.array(row["attention"][layer])
            # A sliding window may leave a layer without any weight on the items.
            centre = (
                float(weights @ np.linspace(0, 1, len(weights)) / weights.sum())
                if weights.sum() > 0
                else np.nan
            )
            # Without predictions nothing says where the gold item stood, and all prompts are drawn as one
            # group.
            said = known.get(row["id"], {"gold_position": 0, "cluster": ""})
            place = {"position": said["gold_position"], "cluster": said["cluster"] or row["id"]}
            out.append(
                {"number": UNMODIFIED if plain else number, "id": row["id"], "centre": centre, **place}
            )
    table = pd.DataFrame(out)
    return table if set(folders) <= set(table["number"]) and table["centre"].notna().all() else None


def _scores(folders: dict[float, Path]) -> pd.DataFrame | None:
    """Score of every prompt with a gold position at every number, and of the unmodified model."""
    first = next(iter(folders.values()))
    metrics = report.read_csv(first / "metrics.csv")
    if metrics is None or not all((path / PREDICTIONS).is_file() for path in folders.values()):
        return None
    name = own_metric(metrics).iloc[0]
    out = [
        {
            "number": UNMODIFIED if row["method"] == UNMODIFIED else number,
            "position": row["gold_position"],
            "cluster": row["cluster"] or row["id"],
            "score": row["scores"][name],
        }
        for number, path in folders.items()
        for row in RunDir(path).rows(PREDICTIONS)
        if "error" not in row
        and row["scores"]
        and row["gold_position"] is not None
        and (row["method"] != UNMODIFIED or path == first)
    ]
    table = pd.DataFrame(out)
    return (
        table
        if len(out) and set(folders) <= set(table["number"]) and table["position"].nunique() > 1
        else None
    )
