"""From scored rows to tidy tables with intervals; pure functions."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from posbench.stats import position_bias
from posbench.stats.bootstrap import Array, Estimate, difference, drawn_means, mean, percentile, wilson
from posbench.tasks.base import Task

_SCORE = ("metric", "value", "n", "ci_low", "ci_high", "seed")
COLUMNS = ("model", "method", "task", "gold_position", "depth", *_SCORE)
"""Columns of ``metrics.csv``. The first metric is the task's own, in 0..1; gold_position is a 0-based index
or ``all``; depth is index / (items - 1); n counts prompts; the interval is 95 %: Wilson for right-or-wrong
scores, else a bootstrap over questions, paired for a difference.
:data:`posbench.stats.position_bias.STATISTICS` names the rows that sum up the curve over gold positions."""

SUBSET_COLUMNS = ("model", "method", "task", "subset", "kind", *_SCORE)
"""Columns of ``subsets.csv``: kind is ``subset`` or ``average`` (a named mean over subsets)."""

Line = tuple[str, str, str, str, Estimate]
"""Method, subset or average, kind, metric, estimate."""

Drawn = tuple[float, Array, int]
"""A mean, its draws [R], and the values behind it."""


@dataclass(frozen=True, kw_only=True)
class Tabulator:
    """Makes the tables of a run of a task by a model out of its scored rows.

    Methods are compared with the one called ``unmodified`` on the same prompts, over ``resamples`` draws;
    ``seed`` is that of the draws, and a column.
    """

    task: Task
    model: str
    unmodified: str
    resamples: int
    seed: int

    def metrics(self, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
        """The scores at every gold position and over all prompts: :data:`COLUMNS`; see :func:`scored`."""
        frame, names = scored(rows, self.task)
        own, items = self.task.metric, self.task.items or 0
        totals, out = self._totals(frame, names), []
        for method, name, shown, part in self._parts(frame, names):
            for place, group in part.groupby("gold_position", sort=True) if name == own else ():
                depth = place / (items - 1) if items > 1 else np.nan
                at = self._mean(group, name, shown)
                out.append(self._row(method, str(int(place)), depth, shown, at))
            if (method, shown) in totals or len(part):
                at = totals.get((method, shown)) or self._mean(part, name, shown)
                out.append(self._row(method, "all", np.nan, shown, at))
        for method, name, at in position_bias.rows(frame, own, self.unmodified, self.resamples, self.seed):
            out.append(self._row(method, "all", np.nan, name, at))
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
        return (self.model, method, self.task.name, *front, at.value, at.n, at.ci_low, at.ci_high, self.seed)

    def _parts(self, frame: pd.DataFrame, names: list[str]) -> Iterator[tuple[str, str, str, pd.DataFrame]]:
        """Method, metric, its name in tables, rows: the values, then paired differences from unmodified."""
        for name in names:
            by_method = dict(iter(frame.dropna(subset=[name]).groupby("method", sort=False)))
            yield from ((str(method), name, name, part) for method, part in by_method.items())
            base = by_method.pop(self.unmodified, frame.iloc[:0])[["id", name]]
            for method, part in by_method.items():
                both = part.merge(base, on="id", suffixes=("", "_base"))
                change = both[name] - both[f"{name}_base"]
                yield str(method), name, f"{name}_difference", both.assign(**{name: change})

    def _mean(self, group: pd.DataFrame, name: str, shown: str) -> Estimate:
        """A mean with its interval; differences are no counts, even where all are 0 or 1."""
        interval, values = mean if shown == name else difference, group[name].to_numpy()
        return interval(values, list(group["cluster"]), resamples=self.resamples, seed=self.seed)

    def _totals(self, frame: pd.DataFrame, names: list[str]) -> dict[tuple[str, str], Estimate]:
        """By method and metric, what the subsets amount to; empty where that is the mean over all prompts."""
        if frame["subset"].nunique() == 1 and type(self.task).total is Task.total:
            return {}
        found = self._subsets(frame, names)
        return {(method, name): at for method, where, _, name, at in found if where == "all"}

    def _subsets(self, frame: pd.DataFrame, names: list[str]) -> Iterator[Line]:
        """Every subset's and average's estimates; questions are drawn within their subset."""
        task, own = self.task, self.task.metric
        subsets, methods = list(dict.fromkeys(frame["subset"])), list(dict.fromkeys(frame["method"]))
        averages = {"all": tuple(subsets)} | dict(task.averages())
        # An average that is made of other averages comes after them, and the total last.
        averages["all"] = averages.pop("all")
        drawn: dict[tuple[str, str, str], Drawn] = {}
        intervals: dict[tuple[str, str, str], Estimate] = {}
        for method in methods:
            for subset in subsets:
                here = frame[(frame["method"] == method) & (frame["subset"] == subset)].sort_values("id")
                found = self._resampled(here, names, self.seed + zlib.crc32(subset.encode()))
                for name, (value, draws, n) in found.items():
                    drawn[method, subset, name] = value, draws, n
                    if type(task).total is Task.total and here[name].dropna().isin((0, 1)).all():
                        intervals[method, subset, name] = Estimate(value, *wilson(value * n, n), n)
        lines = [("subset", s, n) for s in subsets for n in names] + [("average", a, own) for a in averages]
        for kind, where, name in lines:
            for method in methods:
                key, inner = (method, where, name), averages[where] if kind == "average" else ()
                parts = [drawn[method, part, name] for part in inner if (method, part, name) in drawn]
                if parts:
                    drawn[key] = self._average(parts)
                if key not in drawn:
                    continue
                value, draws, n = drawn[key]
                yield method, where, kind, name, intervals.get(key) or percentile(value, draws, n)
                base = drawn.get((self.unmodified, where, name))
                if method != self.unmodified and base is not None:
                    change = percentile(value - base[0], draws - base[1], n)
                    yield method, where, kind, f"{name}_difference", change

    def _average(self, parts: Sequence[Drawn]) -> Drawn:
        """Mean over subsets, weighted as the task says."""
        counts = np.array([n for _, _, n in parts])
        even = np.full(len(parts), 1 / len(parts))
        weights = counts / counts.sum() if self.task.average == "examples" else even
        value = float(sum(w * v for w, (v, _, _) in zip(weights, parts, strict=True)))
        draws = np.sum([w * d for w, (_, d, _) in zip(weights, parts, strict=True)], axis=0)
        return value, draws, int(counts.sum())

    def _resampled(self, rows: pd.DataFrame, names: Sequence[str], seed: int) -> dict[str, Drawn]:
        """Every metric that occurs in a subset; the task's own is its total."""
        found: dict[str, Drawn] = {}
        for name in names:
            values = rows[name].to_numpy(dtype=np.float64)
            known = values[~np.isnan(values)]
            if len(known):
                draws = drawn_means(values, rows["cluster"], self.resamples, seed)
                found[name] = float(known.mean()), draws, len(known)
        if self.task.metric in found:
            subset, n = rows["subset"].iloc[0], found[self.task.metric][2]
            parts = ({name: np.asarray(at[i]) for name, at in found.items()} for i in (0, 1))
            value, draws = (self.task.total(subset, means) for means in parts)
            found[self.task.metric] = float(value), draws, n
        return found


def scored(rows: Sequence[Mapping[str, Any]], task: Task) -> tuple[pd.DataFrame, list[str]]:
    """One row per scored reply (method, id, gold_position, cluster, subset, each metric), and the metrics.

    Prediction rows without scores (no gold answer is known) are left out; `ValueError` where none has any.
    """
    kept = [r for r in rows if r["scores"]]
    if not kept:
        raise ValueError("no scored rows to tabulate")
    names = list(dict.fromkeys([task.metric, *(name for r in kept for name in r["scores"])]))
    lines = []
    for row in kept:
        front = {column: row[column] for column in ("method", "id", "gold_position")}
        front |= {"cluster": row["cluster"] or row["id"], "subset": row.get("subset", "")}
        lines.append({**front, **dict.fromkeys(names, np.nan), **row["scores"]})
    return pd.DataFrame(lines), names
