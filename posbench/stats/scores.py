"""From scored rows to tidy tables with intervals; pure functions."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from posbench.stats import position_bias
from posbench.stats.bootstrap import Array, Estimate, difference, index_draws, mean, quantiles, wilson
from posbench.tasks.base import Task

COLUMNS = (
    "model",
    "method",
    "task",
    "gold_position",
    "depth",
    "metric",
    "value",
    "n",
    "ci_low",
    "ci_high",
    "seed",
)
"""Columns of ``metrics.csv``. The first metric is the task's own, in 0..1; gold_position is a 0-based index
or ``all``; depth is index / (items - 1); n counts prompts; the interval is 95 %: Wilson for right-or-wrong
scores, else a bootstrap over questions, paired for a difference.
:data:`posbench.stats.position_bias.STATISTICS` names the rows that sum up the curve over gold positions."""

SUBSET_COLUMNS = (
    "model",
    "method",
    "task",
    "subset",
    "kind",
    "metric",
    "value",
    "n",
    "ci_low",
    "ci_high",
    "seed",
)
"""Columns of ``subsets.csv``: kind is ``subset`` or ``average`` (a named mean over subsets); the rest as in
``metrics.csv``."""

Key = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Tabulator:
    """Makes the tables of a run out of its scored rows.

    Attributes:
        task: The task, for its name, its metric and its means over subsets.
        model: Model name.
        unmodified: Method name of the unmodified model; others are compared with it on the same prompts.
        resamples: Bootstrap draws per interval.
        seed: Seed of the draws and the ``seed`` column.
    """

    task: Task
    model: str
    unmodified: str
    resamples: int
    seed: int

    def metrics(self, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
        """The table of metrics, with :data:`COLUMNS`.

        Args:
            rows: Prediction rows with ``method``, ``id``, ``gold_position``, ``cluster``, ``subset`` and
                ``scores``; rows without scores (no gold answer is known) are left out.

        Raises:
            ValueError: There are no scored rows.
        """
        frame, names = scored(rows, self.task)
        out: list[tuple[Any, ...]] = []
        own, items = self.task.metric, self.task.items

        def add(method: str, place: Any, name: str, at: Estimate) -> None:
            depth = place / (items - 1) if place != "all" and items and items > 1 else np.nan
            place = place if place == "all" else int(place)
            cells = at.value, at.n, at.ci_low, at.ci_high
            out.append((self.model, method, self.task.name, str(place), depth, name, *cells, self.seed))

        whole = self._whole(frame, names)
        methods = list(dict.fromkeys(frame["method"]))
        for name in names:
            for change in (False, True):
                for method in methods:
                    part = self._paired(frame, method, name) if change else frame[frame["method"] == method]
                    part, shown = part.dropna(subset=[name]), f"{name}_difference" if change else name
                    for place, group in part.groupby("gold_position", sort=True) if name == own else ():
                        add(method, place, shown, self._mean(group, name, change))
                    if (method, shown) in whole:
                        add(method, "all", shown, whole[method, shown])
        for method, name, at in position_bias.rows(frame, own, self.unmodified, self.resamples, self.seed):
            add(method, "all", name, at)
        return pd.DataFrame(out, columns=list(COLUMNS))

    def subsets(self, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
        """Every subset with all metrics and every named average with the task's own, with
        :data:`SUBSET_COLUMNS`.

        Args:
            rows: As in :meth:`metrics`.

        Returns:
            No rows where the task has one subset.
        """
        frame, names = scored(rows, self.task)
        out = []
        if frame["subset"].nunique() > 1:
            for method, kind, where, name, at in self._subsets(frame, names):
                front = self.model, method, self.task.name, where, kind, name
                out.append((*front, at.value, at.n, at.ci_low, at.ci_high, self.seed))
        return pd.DataFrame(out, columns=list(SUBSET_COLUMNS))

    def _paired(self, frame: pd.DataFrame, method: str, name: str) -> pd.DataFrame:
        """Prompts that both the method and the unmodified model answered; the score is their difference."""
        base = frame.loc[frame["method"] == self.unmodified, ["id", name]]
        both = frame[(frame["method"] == method) & (method != self.unmodified)].merge(
            base, on="id", suffixes=("", "_base")
        )
        return both.assign(**{name: both[name] - both[f"{name}_base"]})

    def _mean(self, group: pd.DataFrame, name: str, change: bool) -> Estimate:
        """A mean with its interval; differences are no counts, even where all are 0 or 1."""
        interval = difference if change else mean
        return interval(
            group[name].to_numpy(), list(group["cluster"]), resamples=self.resamples, seed=self.seed
        )

    def _whole(self, frame: pd.DataFrame, names: Sequence[str]) -> dict[Key, Estimate]:
        """(method, metric or metric_difference) -> estimate over all prompts."""
        out: dict[Key, Estimate] = {}
        if frame["subset"].nunique() > 1 or type(self.task).total is not Task.total:
            found = self._subsets(frame, names)
            out = {(method, name): at for method, _, where, name, at in found if where == "all"}
        for method in dict.fromkeys(frame["method"]):
            for name in names:
                for change in (False, True):
                    key = method, f"{name}_difference" if change else name
                    part = self._paired(frame, method, name) if change else frame[frame["method"] == method]
                    part = part.dropna(subset=[name])
                    if key not in out and len(part):
                        out[key] = self._mean(part, name, change)
        return out

    def _subsets(
        self, frame: pd.DataFrame, names: Sequence[str]
    ) -> Iterator[tuple[str, str, str, str, Estimate]]:
        """Method, kind, subset or average, metric, estimate; questions are resampled within their subset."""
        task, own = self.task, self.task.metric
        subsets, methods = list(dict.fromkeys(frame["subset"])), list(dict.fromkeys(frame["method"]))
        averages = {"all": tuple(subsets)} | dict(task.averages())
        # An average that is made of other averages comes after them, and the total last.
        averages["all"] = averages.pop("all")
        drawn: dict[tuple[str, str, str], tuple[float, Array, int]] = {}
        binary: dict[tuple[str, str, str], tuple[float, float]] = {}
        for method in methods:
            for subset in subsets:
                here = frame[(frame["method"] == method) & (frame["subset"] == subset)].sort_values("id")
                found = self._resampled(here, names, self.seed + zlib.crc32(subset.encode()))
                if own in found:
                    totals = (
                        task.total(subset, {k: np.asarray(v[i]) for k, v in found.items()}) for i in (0, 1)
                    )
                    found[own] = (*totals, found[own][2])  # type: ignore[assignment]
                for name, (value, values, n) in found.items():
                    drawn[method, subset, name] = (float(value), values, n)
                    if type(task).total is Task.total and here[name].dropna().isin((0, 1)).all():
                        binary[method, subset, name] = wilson(value * n, n)
        lines = [("subset", s, n) for s in subsets for n in names] + [("average", a, own) for a in averages]
        for kind, where, name in lines:
            for method in methods:
                key = method, where, name
                parts = [
                    drawn[method, p, name] for p in averages.get(where, ()) if (method, p, name) in drawn
                ]
                if kind == "average" and parts:
                    drawn[key] = self._average(parts)
                if key not in drawn or (kind == "average" and not parts):
                    continue
                value, values, n = drawn[key]
                yield method, kind, where, name, Estimate(value, *(binary.get(key) or quantiles(values)), n)
                base = drawn.get((self.unmodified, where, name))
                if method != self.unmodified and base is not None:
                    change = Estimate(value - base[0], *quantiles(values - base[1]), n)
                    yield method, kind, where, f"{name}_difference", change

    def _average(self, parts: Sequence[tuple[float, Array, int]]) -> tuple[float, Array, int]:
        """Mean over subsets, weighted as the task says."""
        counts = np.array([n for _, _, n in parts])
        even = self.task.average != "examples"
        weights = np.full(len(parts), 1 / len(parts)) if even else counts / counts.sum()
        value = float(sum(w * v for w, (v, _, _) in zip(weights, parts, strict=True)))
        values = np.sum([w * d for w, (_, d, _) in zip(weights, parts, strict=True)], axis=0)
        return value, values, int(counts.sum())

    def _resampled(
        self, rows: pd.DataFrame, names: Sequence[str], seed: int
    ) -> dict[str, tuple[float, Array, int]]:
        """Mean, resampled means [R] and count of every metric that occurs; equal questions and seed give
        equal draws."""
        _, member = np.unique(rows["cluster"], return_inverse=True)
        count = int(member.max()) + 1
        which = np.concatenate(list(index_draws(count, self.resamples, seed)))
        out = {}
        for name in names:
            values = rows[name].to_numpy(dtype=np.float64)
            there = ~np.isnan(values)
            if there.any():
                totals = np.bincount(member, weights=np.where(there, values, 0), minlength=count)
                sizes = np.bincount(member, weights=there, minlength=count)
                with np.errstate(invalid="ignore"):
                    drawn = totals[which].sum(1) / sizes[which].sum(1)
                out[name] = float(values[there].mean()), drawn, int(there.sum())
        return out


def scored(rows: Sequence[Mapping[str, Any]], task: Task) -> tuple[pd.DataFrame, list[str]]:
    """One row per scored reply (method, id, gold_position, cluster, subset, a column per metric), and the
    metrics.

    Raises:
        ValueError: There are no scored rows.
    """
    kept = [r for r in rows if r["scores"]]
    if not kept:
        raise ValueError("no scored rows to tabulate")
    names = list(dict.fromkeys([task.metric, *(name for r in kept for name in r["scores"])]))
    front = ("method", "id", "gold_position")
    frame = pd.DataFrame(
        [
            {
                **{column: r[column] for column in front},
                "cluster": r["cluster"] or r["id"],
                "subset": r.get("subset", ""),
                **{name: r["scores"].get(name, np.nan) for name in names},
            }
            for r in kept
        ]
    )
    return frame, names
