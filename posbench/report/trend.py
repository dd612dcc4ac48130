"""How a model follows a swept number of its method (Yu et al. 2025, Figure 6); reads run folders, never
models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from posbench.methods import Method
from posbench.methods.base import SweepClaims
from posbench.plots.sweep import CENTRE, HALVES, SPREAD
from posbench.report.folder import TREND, read_csv
from posbench.run.folder import RunDir
from posbench.schema import target
from posbench.stats.bootstrap import Array, Estimate, quantiles
from posbench.stats.correlation import spearman
from posbench.stats.findings import COLUMNS, Finding, ends
from posbench.stats.frames import UNMODIFIED, gold_attention, own_metric, strongest_layer
from posbench.stats.position_bias import curves, position_bias

ATTENTION, PREDICTIONS = "attention.jsonl", "predictions.jsonl"
Curves = Mapping[Any, tuple[Array, Array]]


def trends(
    runs: Sequence[tuple[dict[str, str], Path]], axes: Sequence[str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """How a model follows a swept number of its method.

    Args:
        runs: Per finished run its settings and folder.
        axes: The swept keys. One of the method's keys must have three numbers or more; other keys, models and
            tasks make groups.

    Returns:
        Rows of :data:`TREND` for every setting and for the unmodified model: the centre of attention over the
        items, 0 the first and 1 the last, in the layer whose attention to the gold item is largest in the
        unmodified model; the score of the first half of the gold positions minus that of the second; and the
        position bias. Then the
        findings: rank correlations of these with the number, and the number with the best average score, with
        bootstrap intervals over questions. Both are empty where no such key was swept.
    """
    values = {a: [_number(setting.get(a)) for setting, _ in runs] for a in axes if a.startswith("method.")}
    numeric = [axis for axis, numbers in values.items() if None not in numbers and len(set(numbers)) > 2]
    groups: dict[str, dict[float, Path]] = {}
    configs = (
        [yaml.safe_load((path / "config.yaml").read_text()) for _, path in runs] if len(numeric) == 1 else []
    )
    tasks = {facts["task"]["name"] for facts in configs if "task" in facts}
    for (setting, path), facts in zip(runs, configs, strict=False):
        rest = [f"{axis}={setting[axis]}" for axis in axes if axis not in numeric and axis in setting]
        task = [facts["task"]["name"]] if len(tasks) > 1 else []
        group = ", ".join([facts["model"]["name"], *task, *rest])
        groups.setdefault(group, {})[float(setting[numeric[0]])] = path
    rows: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for group, folders in groups.items():
        if len(folders) > 2:
            here, findings = _Trend(dict(sorted(folders.items())), numeric[0]).read()
            rows += [{"group": group, "axis": numeric[0], **row} for row in here]
            found += [{"model": group, **asdict(finding)} for finding in findings]
    return pd.DataFrame(rows, columns=list(TREND)), pd.DataFrame(found, columns=list(COLUMNS))


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


class _Trend:
    """Rows and findings of one model and task.

    Args:
        folders: Run folders by the swept number, in order.
        axis: The swept key.
    """

    def __init__(self, folders: dict[float, Path], axis: str) -> None:
        facts = yaml.safe_load((next(iter(folders.values())) / "config.yaml").read_text())
        self.folders, self.axis, self.resamples = folders, axis, facts["runtime"]["resamples"]
        self.numbers = np.array(list(folders))
        cls, _ = target(facts["method"], Method, "method")  # type: ignore[type-abstract]
        self.claims: SweepClaims | None = cls.sweep_claims.get(axis.removeprefix("method."))
        self.rows: list[dict[str, Any]] = []

    def read(self) -> tuple[list[dict[str, Any]], list[Finding]]:
        """All of it."""
        attention, scores = self._centres(), self._scores()
        found = [] if attention is None else self._attention(attention)
        found += [] if scores is None else self._score(scores)
        return self.rows, found

    def _add(self, statistic: str, number: Any, at: Estimate) -> None:
        self.rows.append({"statistic": statistic, "number": number, **ends(at), "n": at.n})

    def _claimed(self, claim: str, generic: str) -> str:
        return getattr(self.claims, claim) if self.claims else generic

    def _sided(self, claim: str, what: str, sign: int, at: Estimate) -> Finding:
        """A correlation and whether its interval lies on the claimed side of zero; without a claim, on either
        side."""
        statistic = f"rank correlation of the {what}"
        sign = sign if self.claims else 0
        holds = (sign <= 0 and at.ci_high < 0) or (sign >= 0 and at.ci_low > 0)
        return Finding.that(holds, claim, statistic, at)

    def _attention(self, table: pd.DataFrame) -> list[Finding]:
        n = int(table["id"].nunique())
        for number, (curve, draws) in curves(table, "centre", "number", self.resamples).items():
            self._add(CENTRE, number, Estimate(float(curve.mean()), *quantiles(draws.mean(-1)), n))
        prompts = table.drop_duplicates("id").sort_values("id")
        wide = [
            table[table["number"] == number].sort_values("id")["centre"].to_numpy() for number in self.folders
        ]
        rank = np.nan_to_num(spearman(np.stack(wide, axis=-1), self.numbers))
        each = curves(prompts.assign(rank=rank, number=0.0), "rank", "number", self.resamples)
        curve, draws = each[0.0]
        at = Estimate(float(curve.mean()), *quantiles(draws.mean(-1)), n)
        claim = self._claimed("attention", f"the centre of attention follows {self.axis}")
        return [self._sided(claim, f"{CENTRE} with {self.axis}, mean over prompts", -1, at)]

    def _score(self, table: pd.DataFrame) -> list[Finding]:
        n, numbers = int(table["cluster"].nunique()), self.numbers
        found = curves(table, "score", "number", self.resamples)
        for number, (curve, draws) in found.items():
            self._add(HALVES, number, Estimate(float(_halves(curve)), *quantiles(_halves(draws)), n))
        spreads = {number: position_bias(*curve) for number, curve in found.items()}
        for number, (value, draws) in spreads.items():
            self._add(SPREAD, number, Estimate(value, *quantiles(draws), n))
        exact, drawn = (np.stack([found[number][i] for number in self.folders], axis=-2) for i in (0, 1))
        at = Estimate(_rank(_halves(exact), numbers), *quantiles(_ranks(_halves(drawn), numbers)), n)
        claim = self._claimed("score", f"the score of the two halves follows {self.axis}")
        out = [self._sided(claim, f"{HALVES} with {self.axis}", 1, at)]
        # Below zero a published factor turns the bias round, so that more of it is no more bias.
        kept = numbers >= 0 if self.claims else np.full(len(numbers), True)
        if kept.sum() > 2:
            values, draws = (np.stack([spreads[n_][i] for n_ in numbers[kept]], axis=-1) for i in (0, 1))
            at = Estimate(_rank(values, numbers[kept]), *quantiles(_ranks(draws, numbers[kept])), n)
            claim = self._claimed("bias", f"the position bias changes with {self.axis}")
            where = " from 0 up" if self.claims else ""
            out.append(self._sided(claim, f"{SPREAD} with {self.axis}{where}", 1, at))
        return [*out, self._peak(exact, drawn, n)] if self.claims else out

    def _peak(self, exact: Array, drawn: Array, n: int) -> Finding:
        """Whether the number with the best average score lies where it is claimed to."""
        assert self.claims is not None
        (first, last), draws = self.claims.best, self.numbers[drawn.mean(-1).argmax(-1)]
        low, high = map(float, np.quantile(draws, [0.025, 0.975], method="inverted_cdf"))
        at = Estimate(float(self.numbers[exact.mean(-1).argmax()]), low, high, n)
        inside, outside = low >= first and high <= last, high < first or low > last
        finding = Finding.that(
            inside, self.claims.peak, f"{self.axis.rpartition('.')[2]} with the best average score", at
        )
        if inside or outside:
            return finding
        note = "the interval reaches over an end of the range"
        return Finding(**{**asdict(finding), "verdict": "not testable here", "note": note})

    def _centres(self) -> pd.DataFrame | None:
        """Centre of attention of every measured prompt at every number, and of the unmodified model."""
        first = next(iter(self.folders.values()))
        frame = read_csv(first / "attention.csv")
        if frame is None or not all((path / ATTENTION).is_file() for path in self.folders.values()):
            return None
        layer = strongest_layer(gold_attention(frame))
        known = {row["id"]: row for row in RunDir(first).rows(PREDICTIONS) if "error" not in row}
        out = []
        for number, path in self.folders.items():
            for row in RunDir(path).rows(ATTENTION):
                plain = row["method"] == UNMODIFIED
                if "error" in row or (plain and path != first):
                    continue
                weights = np.array(row["attention"][layer])
                # A sliding window may leave a layer without any weight on the items.
                some = weights.sum() > 0
                centre = float(weights @ np.linspace(0, 1, len(weights)) / weights.sum()) if some else np.nan
                # Without predictions nothing says where the gold item stood, and all prompts are drawn as one
                # group.
                said = known.get(row["id"], {"gold_position": 0, "cluster": ""})
                place = {"gold_position": said["gold_position"], "cluster": said["cluster"] or row["id"]}
                out.append(
                    {"number": UNMODIFIED if plain else number, "id": row["id"], "centre": centre, **place}
                )
        table = pd.DataFrame(out)
        return table if set(self.folders) <= set(table["number"]) and table["centre"].notna().all() else None

    def _scores(self) -> pd.DataFrame | None:
        """Score of every prompt with a gold position at every number, and of the unmodified model."""
        first = next(iter(self.folders.values()))
        metrics = read_csv(first / "metrics.csv")
        if metrics is None or not all((path / PREDICTIONS).is_file() for path in self.folders.values()):
            return None
        name, out = own_metric(metrics).iloc[0], []
        for number, path in self.folders.items():
            for row in RunDir(path).rows(PREDICTIONS):
                plain = row["method"] == UNMODIFIED
                if (
                    "error" in row
                    or not row["scores"]
                    or row["gold_position"] is None
                    or (plain and path != first)
                ):
                    continue
                place = {"gold_position": row["gold_position"], "cluster": row["cluster"] or row["id"]}
                out.append({"number": UNMODIFIED if plain else number, **place, "score": row["scores"][name]})
        table = pd.DataFrame(out)
        several = (
            len(out) and set(self.folders) <= set(table["number"]) and table["gold_position"].nunique() > 1
        )
        return table if several else None


def _halves(curve: Array) -> Array:
    """First half of the gold positions minus second half, [..., K] to [...]; the ends alone are often all
    right."""
    half = curve.shape[-1] // 2
    return curve[..., :half].mean(-1) - curve[..., -half:].mean(-1)


def _ranks(values: Array, numbers: Array) -> Array:
    return np.nan_to_num(spearman(values, numbers))


def _rank(values: Array, numbers: Array) -> float:
    return float(_ranks(values, numbers))
