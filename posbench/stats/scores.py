"""Make tidy tables with intervals from scored rows; pure functions."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from posbench.late import DataFrame, pd
from posbench.stats import outcomes, position_bias
from posbench.stats.bootstrap import (
    NO_ESTIMATE,
    Array,
    Estimate,
    combined,
    mean,
    paired,
    percentile,
    resampled_means,
)
from posbench.stats.position_bias import CurveIntervals, StatisticRow
from posbench.tasks.base import Task
from posbench.tasks.scorers import WHOLE_REPLY

_SCORE = ("metric", "value", "n", "ci_low", "ci_high", "seed")
METRIC_COLUMNS = ("model", "method", "task", "gold_position", "depth", *_SCORE, "note")
"""Columns of ``metrics.csv``. The first metric is the task's own, in 0..1; gold_position is a 0-based index
or ``all``; depth is index / (items - 1); n counts prompts; the interval is 95 %, over whole questions, paired
for a difference (docs/metrics.md). :data:`posbench.stats.position_bias.STATISTICS` names the rows that sum up
the curve over gold positions; their note says why no bias can be seen, where that is so."""

OVER_ALL = {"gold_position": "all", "depth": np.nan}
"""Cells of a row over all gold positions."""
SUBSET_COLUMNS = ("model", "method", "task", "subset", "kind", *_SCORE)
"""Columns of ``subsets.csv``: kind is ``subset`` or ``average`` (a named mean over subsets)."""


class ScoreGroup(NamedTuple):
    """One method's rows with a metric.

    Attributes:
        method: Name of the method.
        metric: Column of the metric.
        label: The metric's name in tables: the same, or ``<metric>_difference`` of rows that also hold the
            unmodified model's value on the same prompt, in ``<metric>_base``.
        rows: Rows of prompts, from :func:`score_frame`.
    """

    method: str
    metric: str
    label: str
    rows: DataFrame

    def mean(
        self, rows: pd.DataFrame, weights: pd.Series[float] | None = None
    ) -> Estimate:
        """Estimate the mean, of values or of paired differences, over some of the group's rows.

        Args:
            rows: The rows.
            weights: Weight of each row; None: equal weights.

        Returns:
            The mean of the scores; where the group's label is METRIC_difference, of the score minus the unmodified
            model's. Without a score, an estimate of NaN.
        """
        rows = rows[rows[self.metric].notna()]
        if rows.empty:
            return NO_ESTIMATE
        values = rows[self.metric].to_numpy()
        clusters = list(rows["cluster"])
        row_weights = None if weights is None else weights[rows.index].to_numpy()
        if self.label == self.metric:
            return mean(values, clusters, row_weights)
        # The unmodified model's score of the same prompt.
        base = rows[f"{self.metric}_base"].to_numpy()
        return paired(values, base, clusters, row_weights)


class SubsetEstimate(NamedTuple):
    """A method's mean of a metric over a subset, or a named average over subsets (``kind``)."""

    method: str
    subset: str
    kind: str
    label: str
    estimate: Estimate


@dataclass(frozen=True, kw_only=True)
class Tabulator:
    """Makes the tables of a run from its scored rows.

    Methods are compared with the one called ``unmodified`` on the same prompts. Intervals that need draws use
    ``resamples`` draws with ``seed``, which is also a column. A served model has ``thinking_tokens`` of its own.
    The context window has ``window`` tokens; None: not known.
    """

    task: Task
    model: str
    unmodified: str
    resamples: int
    seed: int
    thinking_tokens: int | None = None
    window: int | None = None

    @property
    def _composes_score(self) -> bool:
        """Whether the task makes its metric from the means of several metrics."""
        return type(self.task).total is not Task.total

    def metrics(
        self,
        rows: Sequence[Mapping[str, Any]],
        anytime: Mapping[str, CurveIntervals] | None = None,
    ) -> pd.DataFrame:
        """Tabulate the scores at every gold position and over all prompts.

        Args:
            rows: Prediction rows, see :func:`score_frame`.
            anytime: See :func:`posbench.stats.position_bias.statistic_rows`.

        Returns:
            ``metrics.csv`` with :data:`METRIC_COLUMNS`.
        """
        frame, metrics = score_frame(rows, self.task)
        task_metric = self.task.metric
        totals = self._totals(frame, metrics)
        room = None
        if self.window is not None:
            lengths = (row.get("tokens") for row in rows)
            room = outcomes.room_for_replies(self.window, lengths)
        notes = self._missing_notes(frame, room)
        lines = []
        for group in self._groups(frame, metrics):
            # Rows at each gold position, for metrics that make sense there.
            if group.metric in (task_metric, *self.task.metrics_by_position):
                asked = group.rows
                if group.label == task_metric:
                    # A position of which no answer came has its line, too.
                    has_line = frame[task_metric].notna() | (frame[outcomes.KIND] != "")
                    asked = frame[has_line & (frame["method"] == group.method)]
                for position, part in asked.groupby("gold_position", sort=True):
                    lines.append(
                        {
                            **self._line(group.method, group.label, group.mean(part)),
                            **self._position_cells(position),
                            "note": "",
                        }
                    )
            # Then the row over all positions; a mean over subsets, where the task says so.
            total = totals.get((group.method, group.label))
            is_missing = group.label == task_metric and bool(notes[group.method])
            if total is None and (len(group.rows) or is_missing):
                total = group.mean(group.rows)
            if total is not None:
                note = ""
                if group.metric == task_metric:
                    note = notes[group.method]
                    if group.label != group.metric:
                        # A difference is invalid if either of the two scores is.
                        note = note or notes[self.unmodified]
                elif group.label == WHOLE_REPLY:
                    from posbench.stats.first_line import first_line_note

                    note = first_line_note(
                        group.rows, task_metric, self.resamples, self.seed
                    )
                line = self._line(group.method, group.label, total)
                lines.append({**line, **OVER_ALL, "note": note})
        lines += self._outcome_lines(frame)

        statistics = list(
            position_bias.statistic_rows(
                frame,
                task_metric,
                self.unmodified,
                self.resamples,
                self.seed,
                self.task.chance or 0.0,
                notes,
                anytime,
            )
        )
        statistics += self._missing_statistics(frame, notes, statistics)
        # Position bias and its parts.
        for row in statistics:
            line = self._line(row.method, row.statistic, row.estimate)
            cells: Mapping[str, Any] = OVER_ALL
            if row.position is not None:
                cells = self._position_cells(row.position)
            lines.append({**line, **cells, "note": row.note})
        return pd.DataFrame(lines, columns=list(METRIC_COLUMNS))

    def _missing_notes(self, frame: pd.DataFrame, room: int | None) -> dict[str, str]:
        """Return for each method why missing answers invalidate its scores; an empty text if they do not.

        Args:
            frame: A row for each method and prompt.
            room: Tokens that the context window leaves for an answer after the longest prompt; None: not known.
        """
        return {
            str(method): outcomes.missing_note(
                rows,
                self.task.max_new_tokens,
                self.resamples,
                self.seed,
                self.thinking_tokens,
                room,
            )
            for method, rows in frame.groupby("method", sort=False)
        }

    @staticmethod
    def _missing_statistics(
        frame: pd.DataFrame,
        notes: Mapping[str, str],
        statistics: Sequence[StatisticRow],
    ) -> list[StatisticRow]:
        """Return empty statistics of position bias for methods without any answer at some gold position.

        Args:
            frame: A row for each method and prompt.
            notes: Why scores are invalid, by method.
            statistics: Those that were computed; their methods are left out.
        """
        measured = {row.method for row in statistics}
        positions = frame.groupby("method")["gold_position"].nunique()
        return [
            StatisticRow(method, statistic, NO_ESTIMATE, note)
            for method, note in notes.items()
            # A position bias needs more than two positions.
            if note and method not in measured and positions[method] > 2
            for statistic in position_bias.STATISTICS
        ]

    def _outcome_lines(self, frame: pd.DataFrame) -> list[dict[str, Any]]:
        """Return rows of metrics.csv with the share of each kind of missing answer, by method and gold position.

        Kinds that occur in no row are left out.

        Args:
            frame: A row for each answer: its method, gold_position, and kind (empty if the answer is there).
        """
        lines = []
        for metric in outcomes.OUTCOME_METRICS:
            if not (frame[outcomes.KIND] == metric).any():
                continue
            for method, rows in frame.groupby("method", sort=False):
                parts = [
                    (self._position_cells(position), part)
                    for position, part in rows.groupby("gold_position")
                ]
                for cells, part in [*parts, (OVER_ALL, rows)]:
                    estimate = outcomes.share_of_kind(part, metric)
                    line = self._line(str(method), metric, estimate)
                    lines.append({**line, **cells, "note": ""})
        return lines

    def _position_cells(self, position: float) -> dict[str, Any]:
        """Cells of a row at a gold position: its index, and its depth where the number of items is known."""
        items = self.task.items or 0
        depth = position / (items - 1) if items > 1 else np.nan
        return {"gold_position": str(int(position)), "depth": depth}

    def subsets(self, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
        """Tabulate every subset with all metrics, and every named average with the task's own.

        Args:
            rows: Prediction rows, see :func:`score_frame`.

        Returns:
            ``subsets.csv`` with :data:`SUBSET_COLUMNS`; no row where the task has one subset.
        """
        frame, metrics = score_frame(rows, self.task)
        lines = []
        if frame["subset"].nunique() > 1:
            for method, subset, kind, label, estimate in self._subset_estimates(
                frame, metrics
            ):
                line = self._line(method, label, estimate)
                lines.append({**line, "subset": subset, "kind": kind})
        return pd.DataFrame(lines, columns=list(SUBSET_COLUMNS))

    def _line(self, method: str, label: str, estimate: Estimate) -> dict[str, Any]:
        """Return the cells that rows of metrics.csv and subsets.csv have in common.

        Args:
            method: The method.
            label: The metric, or METRIC_difference.
            estimate: Its value.
        """
        return {
            "model": self.model,
            "method": method,
            "task": self.task.name,
            "metric": label,
            "value": estimate.value,
            "n": estimate.n,
            "ci_low": estimate.ci_low,
            "ci_high": estimate.ci_high,
            "seed": self.seed,
        }

    def _groups(
        self, frame: pd.DataFrame, metrics: Sequence[str]
    ) -> Iterator[ScoreGroup]:
        """Yield for each metric the scores of every method, then their pairs with the unmodified model's.

        Args:
            frame: A row for each method and prompt.
            metrics: Columns with scores.
        """
        for metric in metrics:
            # A method without any answer has no rows here, and still its line in the tables.
            rows_by_method = {
                method: rows[rows[metric].notna()]
                for method, rows in frame.groupby("method", sort=False)
            }
            for method, rows in rows_by_method.items():
                yield ScoreGroup(str(method), metric, metric, rows)
            unmodified = rows_by_method.pop(self.unmodified, frame.iloc[:0])
            base = unmodified[["id", metric]]
            for method, rows in rows_by_method.items():
                pairs = rows.merge(base, on="id", suffixes=("", "_base"))
                yield ScoreGroup(str(method), metric, f"{metric}_difference", pairs)

    def _totals(
        self, frame: pd.DataFrame, metrics: Sequence[str]
    ) -> dict[tuple[str, str], Estimate]:
        """Return the average over subsets by method and label (METRIC or METRIC_difference).

        It is empty where it would be the mean over all prompts.

        Args:
            frame: A row for each answer: its method, subset, and scores.
            metrics: Names of the scores.
        """
        if frame["subset"].nunique() == 1 and not self._composes_score:
            return {}
        return {
            (method, label): estimate
            for method, subset_or_average, _, label, estimate in self._subset_estimates(
                frame, metrics
            )
            if subset_or_average == "all"
        }

    def _subset_estimates(
        self, frame: pd.DataFrame, metrics: Sequence[str]
    ) -> Iterator[SubsetEstimate]:
        """Yield the estimates of every metric in every subset, then of the task's metric in every average over subsets.

        An average is the mean over its subsets' rows, each row with its subset's weight over its number of rows: a
        question in several subsets is one cluster. If a subset's score combines several means, the subsets' intervals
        are combined.

        Args:
            frame: A row for each method and prompt.
            metrics: Columns with scores.
        """
        task_metric = self.task.metric
        subsets = list(dict.fromkeys(frame["subset"]))
        methods = list(dict.fromkeys(frame["method"]))
        estimates: dict[tuple[str, str, str], Estimate] = {}
        composed: set[str] = set()
        for subset in subsets:
            rows = frame[frame["subset"] == subset].sort_values("id")
            for group in self._groups(rows, metrics):
                if len(group.rows):
                    key = (group.method, subset, group.label)
                    estimates[key] = group.mean(group.rows)
            if self._composes_score:
                for method, label, estimate in self._composed_scores(rows, metrics):
                    estimates[method, subset, label] = estimate
                    composed.add(subset)

        for subset, metric in product(subsets, metrics):
            labels = (metric, f"{metric}_difference")
            for method, label in product(methods, labels):
                key = (method, subset, label)
                if key in estimates:
                    yield SubsetEstimate(
                        method, subset, "subset", label, estimates[key]
                    )

        groups = {
            (group.method, group.label): group
            for group in self._groups(frame, [task_metric])
        }
        for average, method, label, weights in self._averages(
            subsets, methods, estimates
        ):
            parts = [estimates[method, subset, label] for subset in weights]
            # Such a score is no mean of rows.
            if composed & weights.keys():
                n = sum(part.n for part in parts)
                estimate = combined(parts, list(weights.values()), n)
            else:
                group = groups[method, label]
                rows = group.rows[group.rows["subset"].isin(weights)]
                counts = rows["subset"].map(rows["subset"].value_counts())
                estimate = group.mean(rows, rows["subset"].map(weights) / counts)
            yield SubsetEstimate(method, average, "average", label, estimate)

    def _averages(
        self,
        subsets: Sequence[str],
        methods: Sequence[str],
        estimates: Mapping[tuple[str, str, str], Estimate],
    ) -> Iterator[tuple[str, str, str, dict[str, float]]]:
        """List every average of every method, the one over all subsets last.

        Args:
            subsets: Names of the subsets.
            methods: Names of the methods.
            estimates: Estimates by method, subset and label; subsets without one are left out.

        Yields:
            The average's name, method, label, and the weights of the subsets in it, of sum 1.
        """
        averages = {"all": tuple(subsets)} | dict(self.task.averages())
        # An average may be made of earlier averages; the total is the last.
        averages["all"] = averages.pop("all")
        counts: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        weights_of: dict[tuple[str, str], dict[str, dict[str, float]]] = defaultdict(
            dict
        )
        for (method, subset, label), estimate in estimates.items():
            counts[method, label][subset] = estimate.n
            weights_of[method, label][subset] = {subset: 1.0}
        labels = (self.task.metric, f"{self.task.metric}_difference")
        for average, members in averages.items():
            for method, label in product(methods, labels):
                # Subsets, and averages that were made before, by name.
                known = weights_of[method, label]
                scored = [known[member] for member in members if member in known]
                if not scored:
                    continue
                weights: dict[str, float] = defaultdict(float)
                shares = self._member_shares(scored, counts[method, label])
                for member, share in zip(scored, shares, strict=True):
                    for subset, weight in member.items():
                        weights[subset] += share * weight
                known[average] = dict(weights)
                yield average, method, label, known[average]

    def _member_shares(
        self, members: Sequence[Mapping[str, float]], counts: Mapping[str, int]
    ) -> list[float]:
        """Return the weight of each member in an average, by the task's rule; the sum is 1.

        Args:
            members: The subsets of each member.
            counts: Number of rows of the subsets.
        """
        sizes = [1] * len(members)
        if self.task.average == "examples":
            sizes = [sum(counts[subset] for subset in member) for member in members]
        return [size / sum(sizes) for size in sizes]

    def _composed_scores(
        self, rows: pd.DataFrame, metrics: Sequence[str]
    ) -> Iterator[tuple[str, str, Estimate]]:
        """Estimate a score that a task makes from the means of several metrics, in the rows of one subset.

        Args:
            rows: A row for each method and prompt.
            metrics: Columns from which the score is made.

        Yields:
            Method, label and estimate, of the score and of its difference from the unmodified model's.
        """
        metric = self.task.metric
        subset = rows["subset"].iloc[0]
        # The same draws for all methods, so that differences are paired.
        seed = self.seed + zlib.crc32(subset.encode())
        base: tuple[float, Array] | None = None
        # The unmodified model first, as the others are compared with it.
        by_method = sorted(
            rows.groupby("method"), key=lambda pair: pair[0] != self.unmodified
        )
        for method, part in by_method:
            means: dict[str, Array] = {}
            draws: dict[str, Array] = {}
            for name in metrics:
                values = part[name].to_numpy()
                if part[name].notna().any():
                    means[name] = np.asarray(np.nanmean(values))
                    draws[name] = resampled_means(
                        values, part["cluster"], self.resamples, seed
                    )
            if metric not in means:
                continue
            value = self.task.total(subset, means)
            if value is means[metric]:
                return  # its mean, of which the interval is known
            score_draws = self.task.total(subset, draws)
            n = int(part[metric].notna().sum())
            questions = part["cluster"].nunique()
            yield method, metric, percentile(value, score_draws, n, questions)
            if method == self.unmodified:
                base = (float(value), score_draws)
            elif base is not None:
                base_value, base_draws = base
                change = percentile(
                    value - base_value, score_draws - base_draws, n, questions
                )
                yield method, f"{metric}_difference", change


def score_frame(
    rows: Sequence[Mapping[str, Any]], task: Task
) -> tuple[pd.DataFrame, list[str]]:
    """Put the replies of a run into a frame.

    Args:
        rows: Prediction rows; answers without scores (no gold answer is known) are left out.
        task: The task that scored them.

    Returns:
        A row per reply with method, id, gold_position, cluster, subset, the columns of :mod:`posbench.stats.outcomes`
        and each metric (NaN if a reply lacks it, always for one that is no answer), and the names of the metrics, the
        task's own first.

    Raises:
        ValueError: There is no such row.
    """
    scorable_rows = [row for row in rows if outcomes.is_scorable(row)]
    if not scorable_rows:
        raise ValueError("no scored rows to tabulate")
    metrics = [task.metric]
    for row in scorable_rows:
        metrics += [name for name in row.get("scores", ()) if name not in metrics]
    lines = []
    for row in scorable_rows:
        line = {
            "method": row["method"],
            "id": row["id"],
            "gold_position": row.get("gold_position"),
            "cluster": row.get("cluster") or row["id"],
            "subset": row.get("subset", ""),
            outcomes.KIND: outcomes.kind_of_row(row),
            outcomes.REASON: row.get("reason", ""),
        }
        for name in metrics:
            line[name] = row.get("scores", {}).get(name, np.nan)
        lines.append(line)
    return pd.DataFrame(lines), metrics
