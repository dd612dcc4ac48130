"""From scored rows to tidy tables with intervals; pure functions."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posbench.late import pd
from posbench.stats import position_bias
from posbench.stats.bootstrap import (
    Array,
    Estimate,
    combined,
    drawn_means,
    mean,
    paired,
    percentile,
)
from posbench.tasks.base import Task

_SCORE = ("metric", "value", "n", "ci_low", "ci_high", "seed")
COLUMNS = ("model", "method", "task", "gold_position", "depth", *_SCORE, "note")
"""Columns of ``metrics.csv``. The first metric is the task's own, in 0..1; gold_position is a 0-based index
or ``all``; depth is index / (items - 1); n counts prompts; the interval is 95 %, over whole questions, paired
for a difference (docs/metrics.md). :data:`posbench.stats.position_bias.STATISTICS` names the rows that sum up
the curve over gold positions; their note says why no bias can be seen, where that is so."""

SUBSET_COLUMNS = ("model", "method", "task", "subset", "kind", *_SCORE)
"""Columns of ``subsets.csv``: kind is ``subset`` or ``average`` (a named mean over subsets)."""

Line = tuple[str, str, str, str, Estimate]
"""Method, subset or average, kind, metric, estimate."""


@dataclass(frozen=True, kw_only=True)
class Tabulator:
    """Makes the tables of a run of a task by a model out of its scored rows.

    Methods are compared with the one called ``unmodified`` on the same prompts. Intervals that need draws
    have ``resamples`` of them; ``seed`` is theirs, and a column.
    """

    task: Task
    model: str
    unmodified: str
    resamples: int
    seed: int

    def metrics(self, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
        """The scores at every gold position and over all prompts: :data:`COLUMNS`; see :func:`scored`."""
        frame, names = scored(rows, self.task)
        own = self.task.metric
        items = self.task.items or 0
        totals = self._totals(frame, names)
        out = []
        for method, name, shown, part in self._parts(frame, names):
            for place, group in (
                part.groupby("gold_position", sort=True) if name == own else ()
            ):
                depth = place / (items - 1) if items > 1 else np.nan
                at = self._mean(group, name, shown)
                out.append((*self._row(method, str(int(place)), depth, shown, at), ""))
            if (method, shown) in totals or len(part):
                at = totals.get((method, shown)) or self._mean(part, name, shown)
                out.append((*self._row(method, "all", np.nan, shown, at), ""))
        chance = self.task.chance or 0.0
        draws = (self.resamples, self.seed)
        for method, name, at, note in position_bias.rows(
            frame, own, self.unmodified, *draws, chance
        ):
            out.append((*self._row(method, "all", np.nan, name, at), note))
        return pd.DataFrame(out, columns=list(COLUMNS))

    def subsets(self, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
        """Every subset with all metrics, every named average with the task's own: :data:`SUBSET_COLUMNS`; no
        row where the task has one subset."""
        frame, names = scored(rows, self.task)
        found = self._subsets(frame, names) if frame["subset"].nunique() > 1 else ()
        out = [self._row(*line) for line in found]
        return pd.DataFrame(out, columns=list(SUBSET_COLUMNS))

    def _row(self, method: str, *cells: Any) -> tuple[Any, ...]:
        """A row of either table; the last cell is the estimate."""
        *front, at = cells
        return (
            self.model,
            method,
            self.task.name,
            *front,
            at.value,
            at.n,
            at.ci_low,
            at.ci_high,
            self.seed,
        )

    def _parts(
        self, frame: pd.DataFrame, names: Sequence[str]
    ) -> Iterator[tuple[str, str, str, pd.DataFrame]]:
        """Method, metric, its name in tables, rows: the scores, then those that have one of the unmodified
        model beside them, ``<metric>_base``, for paired differences."""
        for name in names:
            by_method = dict(
                iter(frame.dropna(subset=[name]).groupby("method", sort=False))
            )
            yield from (
                (str(method), name, name, part) for method, part in by_method.items()
            )
            base = by_method.pop(self.unmodified, frame.iloc[:0])[["id", name]]
            for method, part in by_method.items():
                both = part.merge(base, on="id", suffixes=("", "_base"))
                yield str(method), name, f"{name}_difference", both

    def _mean(self, group: pd.DataFrame, name: str, shown: str) -> Estimate:
        """A mean, or that of paired differences, with its interval."""
        values = group[name].to_numpy()
        clusters = list(group["cluster"])
        if shown == name:
            return mean(values, clusters)
        before = group[f"{name}_base"].to_numpy()
        return paired(values, before, clusters)

    def _totals(
        self, frame: pd.DataFrame, names: list[str]
    ) -> dict[tuple[str, str], Estimate]:
        """By method and metric, what the subsets amount to; empty where that is the mean over all prompts."""
        if frame["subset"].nunique() == 1 and type(self.task).total is Task.total:
            return {}
        found = self._subsets(frame, names)
        return {
            (method, name): at for method, where, _, name, at in found if where == "all"
        }

    def _subsets(self, frame: pd.DataFrame, names: list[str]) -> Iterator[Line]:
        """Every subset's and average's estimates; no question is in two subsets."""
        own = self.task.metric
        subsets = list(dict.fromkeys(frame["subset"]))
        methods = list(dict.fromkeys(frame["method"]))
        averages = {"all": tuple(subsets)} | dict(self.task.averages())
        # An average that is made of other averages comes after them, and the total last.
        averages["all"] = averages.pop("all")
        found: dict[tuple[str, str, str], Estimate] = {}
        for subset in subsets:
            here = frame[frame["subset"] == subset].sort_values("id")
            for method, name, shown, part in self._parts(here, names):
                if len(part):
                    found[method, subset, shown] = self._mean(part, name, shown)
            if type(self.task).total is not Task.total:
                seed = zlib.crc32(subset.encode())
                found |= {
                    (m, subset, shown): at
                    for m, shown, at in self._made(here, names, seed)
                }
        lines = [("subset", s, n) for s in subsets for n in names] + [
            ("average", a, own) for a in averages
        ]
        for kind, where, name in lines:
            for method, shown in (
                (m, n) for m in methods for n in (name, f"{name}_difference")
            ):
                key = (method, where, shown)
                inner = averages[where] if kind == "average" else ()
                parts = [
                    found[method, part, shown]
                    for part in inner
                    if (method, part, shown) in found
                ]
                if parts:
                    found[key] = self._average(parts)
                if key in found:
                    yield method, where, kind, shown, found[key]

    def _average(self, parts: Sequence[Estimate]) -> Estimate:
        """Mean over subsets, weighted as the task says."""
        counts = np.array([part.n for part in parts])
        even = np.full(len(parts), 1 / len(parts))
        weights = counts / counts.sum() if self.task.average == "examples" else even
        return combined(parts, weights, int(counts.sum()))

    def _made(
        self, rows: pd.DataFrame, names: Sequence[str], seed: int
    ) -> Iterator[tuple[str, str, Estimate]]:
        """Method, column and estimate of a subset's score that is made of the means of several metrics, and
        of its difference from that of the unmodified model."""
        drawn: dict[str, tuple[float, Array]] = {}
        for method, part in sorted(
            rows.groupby("method"), key=lambda pair: pair[0] != self.unmodified
        ):
            there = {
                name: part[name].to_numpy()
                for name in names
                if part[name].notna().any()
            }
            if self.task.metric not in there:
                continue
            exact = {
                name: np.asarray(np.nanmean(values)) for name, values in there.items()
            }
            draws = {
                name: drawn_means(
                    values, part["cluster"], self.resamples, self.seed + seed
                )
                for name, values in there.items()
            }
            value, of = (
                self.task.total(rows["subset"].iloc[0], means)
                for means in (exact, draws)
            )
            n = int(part[self.task.metric].notna().sum())
            questions = part["cluster"].nunique()
            drawn[method] = float(value), of
            yield method, self.task.metric, percentile(value, of, n, questions)
            base = drawn.get(self.unmodified)
            if method != self.unmodified and base:
                change = percentile(value - base[0], of - base[1], n, questions)
                yield method, f"{self.task.metric}_difference", change


def scored(
    rows: Sequence[Mapping[str, Any]], task: Task
) -> tuple[pd.DataFrame, list[str]]:
    """One row per scored reply (method, id, gold_position, cluster, subset, each metric), and the metrics.

    Prediction rows without scores (no gold answer is known) are left out; `ValueError` where none has any.
    """
    kept = [r for r in rows if r["scores"]]
    if not kept:
        raise ValueError("no scored rows to tabulate")
    names = list(
        dict.fromkeys([task.metric, *(name for r in kept for name in r["scores"])])
    )
    lines = []
    for row in kept:
        front = {column: row[column] for column in ("method", "id", "gold_position")}
        front |= {
            "cluster": row["cluster"] or row["id"],
            "subset": row.get("subset", ""),
        }
        lines.append({**front, **dict.fromkeys(names, np.nan), **row["scores"]})
    return pd.DataFrame(lines), names
