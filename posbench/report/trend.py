"""How a model follows a swept number of its method (Yu et al. 2025, Figure 6); reads folders alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posbench.files.atomic import Row
from posbench.late import pd
from posbench.methods import Method
from posbench.methods.base import SweepClaims
from posbench.plots.sweep import CENTRE, HALVES, SPREAD
from posbench.report.folder import TREND, read_csv
from posbench.run.folder import RunDir, checked
from posbench.schema import target
from posbench.stats.bootstrap import Array, Estimate, mean, percentile
from posbench.stats.correlation import spearman
from posbench.stats.findings import Finding, ends, frame
from posbench.stats.frames import (
    UNMODIFIED,
    gold_attention,
    own_metric,
    strongest_layer,
)
from posbench.stats.position_bias import curves, limit, position_bias

MOST = 24
"""Values of a swept number that are looked at, spread evenly; settings that a figure of a sweep holds."""
ATTENTION = "attention.jsonl"
PREDICTIONS = "predictions.jsonl"


Runs = Sequence[tuple[dict[str, str], Path]]


def trends(runs: Runs, axes: Sequence[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """How a model follows the one number of its method that was swept; nothing for fewer than three values.

    From settings and folder of every finished run, and the swept keys: models, tasks and keys that are no
    number of the method make groups.

    Returns:
        Rows of :data:`TREND` for every setting and for the unmodified model: the centre of attention over the
        items (0 the first, 1 the last) in :func:`strongest_layer`; the score of the first half of the gold
        positions minus that of the second; the position bias. Then the findings: rank correlations of these
        with the number, and the number with the best average score, with bootstrap intervals over questions.
    """
    own = [axis for axis in axes if axis.startswith("method.")]
    values = pd.DataFrame([setting for setting, _ in runs]).reindex(columns=own)
    values = values.apply(pd.to_numeric, errors="coerce")
    numeric = [
        axis
        for axis in own
        if values[axis].notna().all() and values[axis].nunique() > 2
    ]
    runs = runs if len(numeric) == 1 else ()
    configs = {path: RunDir(path).config() for _, path in runs}
    tasks = {facts["task"]["name"] for facts in configs.values() if "task" in facts}
    groups: dict[str, dict[float, Path]] = {}
    for setting, path in runs:
        rest = [
            f"{axis}={setting[axis]}"
            for axis in axes
            if axis not in numeric and axis in setting
        ]
        task = [configs[path]["task"]["name"]] if len(tasks) > 1 else []
        group = ", ".join([configs[path]["model"]["name"], *task, *rest])
        groups.setdefault(group, {})[float(setting[numeric[0]])] = path
    rows = list[Row]()
    found = list[pd.DataFrame]()
    for group, folders in groups.items():
        if len(folders) > 2:
            trend = _Trend(folders, numeric[0], configs[next(iter(folders.values()))])
            found.append(frame(trend.findings(), group))
            rows += [{"group": group, "axis": numeric[0], **row} for row in trend.rows]
    judged = pd.concat(found, ignore_index=True) if found else frame([], "")
    return pd.DataFrame(rows, columns=list(TREND)), judged


class _Trend:
    """One model and task; a statistic is an array [1 + R] for each number: its value, then its draws."""

    def __init__(
        self, folders: dict[float, Path], axis: str, facts: Mapping[str, Any]
    ) -> None:
        numbers = np.array(sorted(folders))
        few = min(len(folders), MOST)
        # Every prompt of a run is read: of hundreds of runs some tell as much.
        self.numbers = numbers[
            np.linspace(0, len(numbers) - 1, few).round().astype(int)
        ]
        self.folders = {float(number): folders[number] for number in self.numbers}
        for folder in self.folders.values():
            checked(folder, only=(ATTENTION, PREDICTIONS))
        self.some = f", at {few} of {len(numbers)} values" if few < len(numbers) else ""
        self.first = self.folders[numbers[0]]
        self.axis = axis
        self.resamples = facts["runtime"]["resamples"]
        cls, _ = target(facts["method"], Method, "method")  # type: ignore[type-abstract]
        self.claims: SweepClaims | None = cls.sweep_claims.get(
            axis.removeprefix("method.")
        )
        self.rows: list[Row] = []

    def findings(self) -> list[Finding]:
        """What attention and scores say, as far as the runs measured them; fills ``rows``."""
        attention = self._centres()
        scores = self._scores()
        found = [] if attention is None else [self._attention(attention)]
        return found if scores is None else found + self._score(scores)

    def _tell(self, statistic: str, found: Mapping[Any, Array], n: int) -> None:
        """Add a statistic's rows, at every number and for the unmodified model."""
        for number, values in found.items():
            at = percentile(values[0], values[1:], n)
            self.rows.append(
                {"statistic": statistic, "number": number, **ends(at), "n": n}
            )

    def _curves(self, table: pd.DataFrame, name: str) -> dict[Any, Array]:
        """Curves over the gold positions by number, [1 + R, K]."""
        found = curves(table, name, "number", self.resamples)
        return {number: np.vstack(pair) for number, pair in found.items()}

    def _sided(
        self, claim: str, what: str, sign: int, values: Array, n: int, where: str = ""
    ) -> Finding:
        """A correlation, and whether it lies on the claimed side of zero; without a claim, on either."""
        words = f"rank correlation of the {what} with {self.axis}{where}{self.some}"
        at = percentile(values[0], values[1:], n)
        up = sign > 0 if self.claims else at.value > 0
        found = (Finding.above if up else Finding.below)(claim, words, at)
        return found if self.claims else found.control()

    def _attention(self, table: pd.DataFrame) -> Finding:
        n = int(table["id"].nunique())
        modified = table[table["number"] != UNMODIFIED]
        means = {
            number: curve.mean(-1)
            for number, curve in self._curves(table, "centre").items()
        }
        self._tell(CENTRE, means, n)
        wide = modified.pivot(index="id", columns="number", values="centre").to_numpy(
            dtype=float
        )
        rank = np.nan_to_num(spearman(wide, self.numbers))
        prompts = (
            table.drop_duplicates("id").sort_values("id").assign(number=0, rank=rank)
        )
        claim = (
            self.claims.attention
            if self.claims
            else f"the centre of attention follows {self.axis}"
        )
        values = self._curves(prompts, "rank")[0].mean(-1)
        return self._sided(claim, CENTRE, -1, values, n, ", mean over prompts")

    def _score(self, table: pd.DataFrame) -> list[Finding]:
        n = int(table["cluster"].nunique())
        numbers = self.numbers
        claims = self.claims
        found = self._curves(table, "score")
        halves = {number: _halves(curve) for number, curve in found.items()}
        seen = {
            number
            for number, part in table.groupby("number")
            if not self._limited(part)
        }
        spreads = {
            number: np.append(*position_bias(at[0], at[1:]))
            for number, at in found.items()
            if number in seen
        }
        self._tell(HALVES, halves, n)
        self._tell(SPREAD, spreads, n)
        claim = (
            claims.score
            if claims
            else f"the score of the two halves follows {self.axis}"
        )
        out = [self._sided(claim, HALVES, 1, _ranks(halves, numbers), n)]
        # Below zero a published factor turns the bias round, so that more of it is no more bias.
        kept, where = (numbers[numbers >= 0], " from 0 up") if claims else (numbers, "")
        kept = np.array([number for number in kept if number in seen])
        if len(kept) > 2:
            claim = (
                claims.bias if claims else f"the position bias changes with {self.axis}"
            )
            out.append(self._sided(claim, SPREAD, 1, _ranks(spreads, kept), n, where))
        return [*out, self._peak(claims, found, n)] if claims else out

    @staticmethod
    def _limited(part: pd.DataFrame) -> bool:
        """Whether a setting answers almost nothing or everything, so that it has no bias to be seen."""
        at = [
            mean(h["score"].to_numpy(), list(h["cluster"]))
            for _, h in part.groupby("gold_position")
        ]
        return bool(limit(at, 0.0, part["cluster"].nunique()))

    def _peak(self, claims: SweepClaims, found: Mapping[Any, Array], n: int) -> Finding:
        """Whether the number with the best average score lies where it is claimed to."""
        means = np.stack([found[number].mean(-1) for number in self.numbers], axis=-1)
        best, (first, last) = self.numbers[means.argmax(-1)], claims.best
        low, high = np.quantile(best[1:], [0.025, 0.975], method="inverted_cdf")
        what = f"{self.axis.rpartition('.')[2]} with the best average score{self.some}"
        held = first <= best[0] <= last
        with_it = ((best[1:] >= first) & (best[1:] <= last)) == held
        p = (
            2 * (1 + np.count_nonzero(~with_it)) / len(best)
            if np.ptp(means[0])
            else np.nan
        )
        return Finding.tested(
            held, claims.peak, what, Estimate(best[0], low, high, n), p
        )

    def _rows(self, file: str) -> Iterator[tuple[Any, Row]]:
        """Each prompt's row at every number, and unmodified once; none where a run lacks the file."""
        if all((path / file).is_file() for path in self.folders.values()):
            for number, path in self.folders.items():
                for row in RunDir(path).rows(file):
                    plain = row["method"] == UNMODIFIED
                    if "error" not in row and (path == self.first or not plain):
                        yield UNMODIFIED if plain else number, row

    def _centres(self) -> pd.DataFrame | None:
        """Centre of attention of every measured prompt at every number, and of the unmodified model."""
        frame = read_csv(self.first / "attention.csv")
        if frame is None:
            return None
        layer = strongest_layer(gold_attention(frame))
        out = []
        known = {
            row["id"]: row
            for row in RunDir(self.first).rows(PREDICTIONS)
            if "error" not in row
        }
        for number, row in self._rows(ATTENTION):
            weights = np.array(row["attention"][layer])
            # A sliding window may leave a layer without any weight on the items.
            some = weights.sum() > 0
            centre = (
                float(weights @ np.linspace(0, 1, len(weights)) / weights.sum())
                if some
                else np.nan
            )
            # Without predictions nothing says where the gold item stood: all prompts are drawn as one group.
            said = known.get(row["id"], {"gold_position": 0, "cluster": ""})
            out.append(
                (
                    number,
                    row["id"],
                    centre,
                    said["gold_position"],
                    said["cluster"] or row["id"],
                )
            )
        table = pd.DataFrame(
            out, columns=["number", "id", "centre", "gold_position", "cluster"]
        )
        return (
            table
            if set(self.folders) <= set(table["number"])
            and table["centre"].notna().all()
            else None
        )

    def _scores(self) -> pd.DataFrame | None:
        """Score of every prompt with a gold position at every number, and of the unmodified model."""
        metrics = read_csv(self.first / "metrics.csv")
        if metrics is None:
            return None
        name = own_metric(metrics).iloc[0]
        out = []
        for number, row in self._rows(PREDICTIONS):
            if row["scores"] and row["gold_position"] is not None:
                out.append(
                    (
                        number,
                        row["gold_position"],
                        row["cluster"] or row["id"],
                        row["scores"][name],
                    )
                )
        table = pd.DataFrame(
            out, columns=["number", "gold_position", "cluster", "score"]
        )
        several = (
            set(self.folders) <= set(table["number"])
            and table["gold_position"].nunique() > 1
        )
        return table if several else None


def _halves(curve: Array) -> Array:
    """First half of the gold positions minus second, [..., K] to [...]; ends alone are often all right."""
    half = curve.shape[-1] // 2
    return curve[..., :half].mean(-1) - curve[..., -half:].mean(-1)


def _ranks(found: Mapping[Any, Array], numbers: Array) -> Array:
    """Rank correlations [1 + R] of a statistic with the numbers, 0 where all values are equal."""
    return np.nan_to_num(
        spearman(np.stack([found[number] for number in numbers], axis=-1), numbers)
    )
