"""How a model follows a swept number of its method (Yu et al. 2025, Figure 6)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posbench.files.atomic import Row
from posbench.late import pd
from posbench.methods import Method
from posbench.methods.base import SweepClaims
from posbench.plots.sweep import CENTRE, HALVES, SPREAD
from posbench.report.folder import TREND_COLUMNS, read_csv
from posbench.report.tables import missing_notes
from posbench.run.folder import PREDICTIONS, RunDir, open_undamaged
from posbench.schema import resolve_target
from posbench.stats import outcomes
from posbench.stats.bootstrap import Array, Estimate, mean, percentile
from posbench.stats.correlation import spearman
from posbench.stats.findings import (
    CONSTANT,
    SMALLEST_SHARE,
    Finding,
    draws_p,
    estimate_row,
    findings_table,
)
from posbench.stats.frames import (
    UNMODIFIED,
    display_name,
    gold_attention,
    metric_of_task,
    strongest_layer,
)
from posbench.stats.position_bias import (
    position_bias,
    position_curves,
    score_limit_note,
    statistic_rows,
)
from posbench.tasks.base import read_recorded_task

MAX_SETTINGS = 24
"""Most values of a swept number that are read, and settings that a figure draws."""
ATTENTION_FILE = "attention.jsonl"


def trends(
    runs: Sequence[tuple[dict[str, str], Path]], axes: Sequence[str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """How attention, score and position bias follow a swept number of the method.

    Runs are grouped by model, task and the other swept keys; each group needs at least
    three values of the number.

    Args:
        runs: Setting (values of the swept keys) and folder of every finished run.
        axes: The swept keys.

    Returns:
        Rows of :data:`TREND_COLUMNS` for every value and for the unmodified model: the centre
        of attention over the items (0 the first, 1 the last) in the
        :func:`strongest_layer`, the score of the first half of the gold positions minus
        the second half's, the position bias. Then the findings: rank correlations of
        these with the number, and the number with the best average score, with
        bootstrap intervals over questions. Both are empty unless exactly one number was
        swept.
    """
    axis = _swept_number(runs, axes)
    groups = _group_runs(runs, axes, axis) if axis else {}
    rows = list[Row]()
    findings = list[pd.DataFrame]()
    for name, folders in groups.items():
        if len(folders) > 2:
            trend = _Trend(folders, axis)
            trend.measure()
            rows += [{"group": name, "axis": axis, **row} for row in trend.rows]
            findings.append(findings_table(trend.findings, name))
    if not findings:
        findings = [findings_table([], "")]
    table = pd.DataFrame(rows, columns=list(TREND_COLUMNS))
    return table, pd.concat(findings, ignore_index=True)


def _swept_number(
    runs: Sequence[tuple[dict[str, str], Path]], axes: Sequence[str]
) -> str:
    """Return the one swept key of the method that has three or more numbers as values.

    It is empty if there is no such key, or several.

    Args:
        runs: Settings of each run (value by key), and its folder.
        axes: Swept keys.
    """
    numeric = []
    for axis in axes:
        if not axis.startswith("method."):
            continue
        texts = pd.Series([setting.get(axis) for setting, _ in runs])
        values = pd.to_numeric(texts, errors="coerce")
        if values.notna().all() and values.nunique() > 2:
            numeric.append(axis)
    return numeric[0] if len(numeric) == 1 else ""


def _group_runs(
    runs: Sequence[tuple[dict[str, str], Path]], axes: Sequence[str], axis: str
) -> dict[str, dict[float, Path]]:
    """Group runs that differ in ``axis`` alone.

    Args:
        runs: Settings of each run (value by key), and its folder.
        axes: All swept keys.
        axis: The key whose trend is measured.

    Returns:
        Folder by value of ``axis``, by a label of model, task and other settings.
    """
    configs = {folder: RunDir(folder).config() for _, folder in runs}
    tasks = {config["task"]["name"] for config in configs.values() if "task" in config}
    varied = _varied_fields(configs.values())
    groups: dict[str, dict[float, Path]] = {}
    for setting, folder in runs:
        config = configs[folder]
        names = [config["model"]["name"]]
        if len(tasks) > 1:
            names.append(config["task"]["name"])
        # Two methods, or a list of runs' methods, are two trends.
        method = config["method"]
        if "name" in varied:
            names.append(display_name(method["name"]))
        for field in varied:
            key = f"method.{field}"
            # The swept keys, or keys inside the field, are named below.
            is_swept = any(f"{swept}.".startswith(f"{key}.") for swept in axes)
            if field in method and field != "name" and not is_swept:
                names.append(f"{key}={method[field]}")
        for key in axes:
            if key != axis and key in setting:
                names.append(f"{key}={setting[key]}")
        groups.setdefault(", ".join(names), {})[float(setting[axis])] = folder
    return groups


def _varied_fields(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The fields in which two methods of one model differ: ``name``, and of methods of one name the others."""
    first_by_model: dict[str, Mapping[str, Any]] = {}
    first_by_name: dict[tuple[str, str], Mapping[str, Any]] = {}
    varied = []
    for config in configs:
        model = config["model"]["name"]
        method = config["method"]
        if first_by_model.setdefault(model, method)["name"] != method["name"]:
            varied.append("name")
        first = first_by_name.setdefault((model, method["name"]), method)
        varied += [field for field in method if method[field] != first.get(field)]
    return list(dict.fromkeys(varied))


class _Trend:
    """One model and task over the values of a swept number.

    A statistic is an array [1 + R] for each value: the statistic itself, then its R
    bootstrap draws.

    Attributes:
        numbers: The values that are read, rising.
        folders: The run at each number.
        rows: Of trend.csv, without group and axis; filled by :meth:`measure`.
        findings: Filled by :meth:`measure`.
    """

    def __init__(self, folders: Mapping[float, Path], axis: str) -> None:
        """Read what the runs of a sweep have in common.

        Args:
            folders: Folder of the run at each number.
            axis: Config key of the number, such as ``method.factor``.

        Raises:
            UserError: A run's files are not as it left them.
        """
        self.axis = axis
        self.rows: list[Row] = []
        self.findings: list[Finding] = []
        # All prompts of a run are read: of hundreds of runs a spread subset suffices.
        numbers = np.array(sorted(folders))
        count = min(len(numbers), MAX_SETTINGS)
        spread = np.linspace(0, len(numbers) - 1, count).round().astype(int)
        self.numbers = numbers[spread]
        self.subset_note = ""
        if count < len(numbers):
            self.subset_note = f", at {count} of {len(numbers)} values"
        self.folders = {float(number): folders[number] for number in self.numbers}
        for folder in self.folders.values():
            open_undamaged(folder, only=(ATTENTION_FILE, PREDICTIONS))
        self.first_folder = folders[numbers[0]]
        self.chances: dict[Any, float] = {
            n: _chance(folder) for n, folder in self.folders.items()
        }
        self.chances[UNMODIFIED] = _chance(self.first_folder)
        config = RunDir(next(iter(folders.values()))).config()
        self.resamples = config["runtime"]["resamples"]
        cls, _ = resolve_target(config["method"], Method, "method")  # type: ignore[type-abstract]
        parameter = axis.removeprefix("method.")
        self.claims: SweepClaims | None = cls.sweep_claims.get(parameter)
        if self.claims:
            subject = cls.sweep_subject(config["method"], config["model"])
            self.claims = self.claims.asked_of(subject)

    def measure(self) -> None:
        """Fill ``rows`` and ``findings`` from attention and scores, as far as the runs measured them."""
        centres = self._read_centres()
        if centres is not None:
            self._measure_attention(centres)
        scores = self._read_scores()
        if scores is None:
            return
        num_before = len(self.findings)
        self._measure_scores(scores)
        num_missing = sum(map(_lacks_answers, self.folders.values()))
        # Missing answers would move the scores, so these claims are not judged.
        if num_missing:
            note = f"{outcomes.PROBLEM} in {num_missing} of {len(self.folders)} runs"
            untestable = [f.not_testable(note) for f in self.findings[num_before:]]
            self.findings[num_before:] = untestable

    def _measure_attention(self, centres: pd.DataFrame) -> None:
        """Add the centre of attention (mean depth that the last token attends to) at each number, and its trend.

        Args:
            centres: A row per prompt and number: ``id``, ``cluster`` (its question), ``number`` and ``centre``.
        """
        n = int(centres["id"].nunique())
        num_questions = int(centres["cluster"].nunique())
        means = {
            number: curve.mean(-1)
            for number, curve in self._curves(centres, "centre").items()
        }
        self._add_rows(CENTRE, means, n, num_questions)
        # Per prompt: rank correlation of the centre with the number.
        modified = centres[centres["number"] != UNMODIFIED]
        by_prompt = modified.pivot(index="id", columns="number", values="centre")
        rank = np.nan_to_num(spearman(by_prompt.to_numpy(dtype=float), self.numbers))
        prompts = centres.drop_duplicates("id").sort_values("id")
        prompts = prompts.assign(number=0, rank=rank)
        correlation = self._curves(prompts, "rank")[0].mean(-1)
        claim = f"the centre of attention follows {self.axis}"
        if self.claims:
            claim = self.claims.attention
        self._add_correlation(
            claim, CENTRE, -1, correlation, n, num_questions, ", mean over prompts"
        )

    def _measure_scores(self, scores: pd.DataFrame) -> None:
        """Add the trends of scores and of position bias, and the verdicts on the paper's claims about them.

        Args:
            scores: A row per prompt and number: ``cluster`` (its question), gold position, ``number`` and ``score``.
        """
        n = int(scores["cluster"].nunique())
        score_curves = self._curves(scores, "score")
        # Score of the first half of gold positions minus that of the second.
        halves = {number: _halves(curve) for number, curve in score_curves.items()}
        measurable = {
            number
            for number, rows in scores.groupby("number")
            if not _hides_bias(rows, self.chances[number])
        }
        biases = {}
        for number, curve in score_curves.items():
            # The value first, then the bootstrap draws.
            if number in measurable:
                bias, draws = position_bias(curve[0], curve[1:])
                biases[number] = np.append(bias, draws)
        self._add_rows(HALVES, halves, n, n)
        self._add_biases(scores)

        claim = f"the score of the two halves follows {self.axis}"
        if self.claims:
            claim = self.claims.score
        correlation = _rank_correlation(halves, self.numbers)
        self._add_correlation(claim, HALVES, 1, correlation, n, n)
        if np.ptp([halves[number] for number in self.numbers], axis=0).max() == 0:
            # All answers are right, or all wrong: that contradicts nothing.
            self.findings[-1] = self.findings[-1].not_testable(CONSTANT)

        claim = f"the position bias changes with {self.axis}"
        numbers = self.numbers
        restriction = ""
        if self.claims:
            claim = self.claims.bias
            # Below zero a published factor reverses the bias, so a larger effect is not a better one.
            numbers = numbers[numbers >= 0]
            restriction = " from 0 up"
        numbers = np.array([number for number in numbers if number in measurable])
        if len(numbers) > 2:
            correlation = _rank_correlation(biases, numbers)
            self._add_correlation(claim, SPREAD, 1, correlation, n, n, restriction)
            gaps = ""
            if self.claims:
                gaps = self._gaps_beside(self.claims.neutral, numbers)
            if gaps:
                self.findings[-1] = self.findings[-1].not_testable(gaps)
        elif self.claims:
            note = "the bias can be measured at fewer than three numbers: ask more numbers or more questions"
            text = f"rank correlation of the {SPREAD} with {self.axis}{restriction}"
            self.findings.append(Finding.untestable(claim, text, note, n))

        if self.claims:
            measured = {number: float(bias[0]) for number, bias in biases.items()}
            self.findings.append(self._peak(self.claims, score_curves, measured, n))

    def _add_rows(
        self,
        statistic: str,
        values: Mapping[Any, Array],
        n: int,
        num_questions: int,
    ) -> None:
        """Add a statistic's row at every number and for the unmodified model.

        Args:
            statistic: Its name.
            values: By number, the value followed by its bootstrap draws, shape (1 + draws,).
            n: Prompts.
            num_questions: Questions, which the bootstrap draws.
        """
        for number, value in values.items():
            estimate = percentile(value[0], value[1:], n, num_questions)
            row = {
                "statistic": statistic,
                "number": number,
                **estimate_row(estimate),
                "n": n,
            }
            self.rows.append(row)

    def _add_biases(self, scores: pd.DataFrame) -> None:
        """Add the position bias at every number where it can be seen, with the same interval as in tables of runs.

        Args:
            scores: As in :meth:`_measure_scores`.
        """
        n = int(scores["cluster"].nunique())
        for number, rows in scores.groupby("number", sort=False):
            statistics = statistic_rows(
                rows.assign(method=number),
                "score",
                UNMODIFIED,
                self.resamples,
                0,
                self.chances[number],
            )
            for statistic in statistics:
                if statistic.statistic == "position_bias" and not statistic.note:
                    row = {"statistic": SPREAD, "number": number}
                    values = estimate_row(statistic.estimate)
                    self.rows.append({**row, **values, "n": n})

    def _curves(self, table: pd.DataFrame, column: str) -> dict[Any, Array]:
        """Curves over the K gold positions by number, [1 + R, K] each."""
        by_number = position_curves(table, column, "number", self.resamples)
        return {
            number: np.vstack([curve, draws])
            for number, (curve, draws) in by_number.items()
        }

    def _add_correlation(
        self,
        claim: str,
        statistic: str,
        sign: int,
        correlation: Array,
        n: int,
        num_questions: int,
        restriction: str = "",
    ) -> None:
        """Add the finding that a rank correlation lies on one side of zero.

        Args:
            claim: The paper's claim, or our control's.
            statistic: The statistic to correlate with the swept number.
            sign: Side of zero that the paper claims; a control takes either.
            correlation: The correlation, then its bootstrap draws, [1 + R].
            n: Prompts.
            num_questions: Questions, which the bootstrap draws.
            restriction: To which values or prompts it is restricted, in words.
        """
        text = f"rank correlation of the {statistic} with {self.axis}{restriction}{self.subset_note}"
        draws = correlation[1:]
        estimate = percentile(correlation[0], draws, n, num_questions)
        is_above = sign > 0 if self.claims else estimate.value > 0
        if is_above:
            p = draws_p(draws, SMALLEST_SHARE)
            finding = Finding.above(claim, text, estimate, SMALLEST_SHARE, least_p=p)
        else:
            p = draws_p(draws, -SMALLEST_SHARE)
            finding = Finding.below(claim, text, estimate, -SMALLEST_SHARE, least_p=p)
        self.findings.append(finding if self.claims else finding.control())

    def _peak(
        self,
        claims: SweepClaims,
        score_curves: Mapping[Any, Array],
        biases: Mapping[Any, float],
        n: int,
    ) -> Finding:
        """Judge whether the number with the best average score lies in the claimed range.

        The interval spans all numbers not significantly worse than the best one, and all that are best in some
        bootstrap draw, so it has no width only where all draws agree. There is a verdict only where the numbers
        asked can show one: some in the claimed range and some on either side, and the best one at neither end.
        Of numbers with the same average the one with the least position bias is given, as where a sweep is printed.

        Args:
            claims: The paper's claims; ``best`` is the claimed range.
            score_curves: By number, scores of shape (1 + draws, gold positions), the measured one first.
            biases: Position bias by number, where it could be measured.
            n: Questions.
        """
        means = np.stack(
            [score_curves[number].mean(-1) for number in self.numbers], axis=-1
        )
        # Of several numbers with the same average all have to lie on one side.
        is_best = np.isclose(means, means.max(-1, keepdims=True), rtol=0, atol=1e-12)
        may_be_best = is_best.any(0) | not_worse_than_best(means)
        tied = self.numbers[is_best[0]]
        best = min(tied, key=lambda number: round(biases.get(number, np.inf), 9))
        first, last = claims.best
        is_claimed = (self.numbers >= first) & (self.numbers <= last)
        holds = bool(is_claimed[is_best[0]].all())
        supports = is_claimed if holds else ~is_claimed
        # Two-sided: the share of bootstrap draws that contradict, doubled.
        p = np.nan
        if np.ptp(means[0]):
            opposing = (is_best[1:] & ~supports).any(-1)
            p = 2 * (1 + np.count_nonzero(opposing)) / len(means)

        candidates = self.numbers[may_be_best]
        estimate = Estimate(best, candidates.min(), candidates.max(), n)
        parameter = self.axis.rpartition(".")[2]
        statistic = f"{parameter} with the best average score"
        if len(tied) > 1:
            statistic += f" (one of {len(tied)} alike)"
        statistic += self.subset_note
        finding = Finding.tested(holds, claims.peak, statistic, estimate, p)
        gaps = self._gaps_around(first, last)
        if finding.verdict == "not testable":
            return finding
        if gaps:
            return finding.not_testable(gaps)
        if not holds and is_claimed[is_best[0]].any():
            return finding.inconclusive(
                "the best averages are equal inside the claimed range and outside"
            )
        for edge, name, side in ((0, "lowest", -1), (-1, "highest", 1)):
            if may_be_best[edge]:
                note = (
                    f"the {name} {parameter} asked may be the best one: "
                    f"{self._ask(self._beyond(side))}"
                )
                if is_best[0, edge]:
                    return finding.not_testable(note)
                return finding.inconclusive(note)
        if not supports[may_be_best].all():
            return finding.inconclusive(
                "numbers inside the claimed range and outside cannot be told from the best"
            )
        return finding

    def _gaps_around(self, first: float, last: float) -> str:
        """Say which numbers are missing to judge a claim that the best one lies from ``first`` to ``last``.

        Returns:
            A sentence that also suggests numbers; empty if there are numbers inside the range and on both sides.
        """
        inside = (self.numbers >= first) & (self.numbers <= last)
        missing = []
        further = list[float]()
        if not inside.any():
            missing.append(f"from {first:g} to {last:g}")
            further += [first, (first + last) / 2, last]
        if not (self.numbers < first).any():
            missing.append(f"under {first:g}")
            further += self._beyond(-1, first)
        if not (self.numbers > last).any():
            missing.append(f"over {last:g}")
            further += self._beyond(1, last)
        if not missing:
            return ""
        return f"no {self.axis} {' or '.join(missing)} was asked: {self._ask(further)}"

    def _gaps_beside(self, neutral: float, numbers: Array) -> str:
        """The side of a number that a claim on both of its sides needs and the sweep lacks; empty for none.

        Args:
            neutral: The number that leaves the model as it is.
            numbers: The numbers at which the bias could be measured.
        """
        parameter = self.axis.rpartition(".")[2]
        asked = self.numbers[self.numbers >= 0]
        for side, name in ((1, "over"), (-1, "under")):
            if (side * numbers > side * neutral).any():
                continue
            place = f"{parameter} {name} {neutral:g}"
            if (side * asked > side * neutral).any():
                return f"at no {place} the bias could be measured: ask more questions"
            further = [neutral + side * 0.5, neutral + side]
            return f"no {place} was asked: {self._ask(further)}"
        return ""

    def _beyond(self, side: int, bound: float | None = None) -> list[float]:
        """Two numbers in steps of the grid's end, beyond it and a bound: below for side -1, above for 1."""
        end, neighbour = self.numbers[[0, 1]] if side < 0 else self.numbers[[-1, -2]]
        step = abs(end - neighbour)
        start = end if bound is None else max(side * end, side * bound) * side
        return [float(start + side * step), float(start + 2 * side * step)]

    def _ask(self, numbers: Sequence[float]) -> str:
        """The settings to add to the sweep, as they are typed."""
        return f"ask {self.axis}={','.join(f'{number:g}' for number in sorted(set(numbers)))}, too"

    def _common_prompts(self, table: pd.DataFrame) -> pd.DataFrame | None:
        """The rows of the prompts that were asked at every number; None where there are none.

        Jobs of a sweep with a budget may ask different positions, items or numbers of questions.

        Args:
            table: Rows with number, id and prompt (distinguishes prompts of one id).
        """
        if not set(self.folders) <= set(table["number"]):
            return None
        times_asked = table.groupby(["id", "prompt"])["number"].transform("nunique")
        common = table[times_asked == table["number"].nunique()]
        return None if common.empty else common

    def _rows_by_number(self, file: str) -> Iterator[tuple[Any, Row]]:
        """Yield the number and each row of a JSON-lines file of all runs.

        The number is `none` for the unmodified model, whose rows are the same in all runs and are yielded once. Nothing
        is yielded if a run lacks the file.
        """
        if not all((folder / file).is_file() for folder in self.folders.values()):
            return
        for number, folder in self.folders.items():
            for row in RunDir(folder).rows_without_error(file):
                if row["method"] != UNMODIFIED:
                    yield number, row
                elif folder == self.first_folder:
                    yield UNMODIFIED, row

    def _read_centres(self) -> pd.DataFrame | None:
        """Return the centre of attention of every prompt at every number and unmodified.

        The centre is the mean depth (0..1) of the items, weighted by the last token's attention in the strongest layer.

        Returns:
            Rows with number, id, prompt, centre (0..1), gold_position and cluster; None where
            a run did not measure attention, no prompt was asked at every number, or one
            has no attention on its items.
        """
        attention = read_csv(self.first_folder / "attention.csv")
        if attention is None:
            return None
        layer = strongest_layer(gold_attention(attention))
        predictions = {
            row["id"]: row
            for row in RunDir(self.first_folder).rows_without_error(PREDICTIONS)
        }
        # Without predictions the gold positions are unknown: all count as one group.
        unknown = {"gold_position": 0, "cluster": ""}
        digests = self._digests()
        rows = []
        for number, row in self._rows_by_number(ATTENTION_FILE):
            weights = np.array(row["attention"][layer])
            total = weights.sum()
            centre = np.nan
            # A sliding window may leave a layer without any weight on the items.
            if total > 0:
                centre = float(weights @ np.linspace(0, 1, len(weights)) / total)
            prompt = predictions.get(row["id"], unknown)
            rows.append(
                {
                    "number": number,
                    "id": row["id"],
                    "prompt": (digests[number].get(row["id"], ""), len(weights)),
                    "centre": centre,
                    "gold_position": prompt["gold_position"],
                    "cluster": prompt["cluster"] or row["id"],
                }
            )
        columns = ["number", "id", "prompt", "centre", "gold_position", "cluster"]
        table = self._common_prompts(pd.DataFrame(rows, columns=columns))
        if table is None or table["centre"].isna().any():
            return None
        return table

    def _digests(self) -> dict[Any, dict[str, str]]:
        """Return the digest of each prompt by number, then by example id; empty for a run without predictions."""
        digests: dict[Any, dict[str, str]] = {}
        for number, folder in self.folders.items():
            rows = RunDir(folder).rows_without_error(PREDICTIONS)
            digests[number] = {row["id"]: row.get("prompt", "") for row in rows}
            if folder == self.first_folder:
                digests[UNMODIFIED] = digests[number]
        return digests

    def _read_scores(self) -> pd.DataFrame | None:
        """Return the score of every prompt with a gold position at every number and unmodified.

        Returns:
            Rows with number, id, prompt, gold_position, cluster and score; None where a run
            has no scores, or the prompts that were asked at every number have one gold
            position.
        """
        metrics = read_csv(self.first_folder / "metrics.csv")
        if metrics is None:
            return None
        metric = metric_of_task(metrics).iloc[0]
        rows = []
        for number, row in self._rows_by_number(PREDICTIONS):
            if row["scores"] and row["gold_position"] is not None:
                rows.append(
                    {
                        "number": number,
                        "id": row["id"],
                        "prompt": row.get("prompt", ""),
                        "gold_position": row["gold_position"],
                        "cluster": row["cluster"] or row["id"],
                        "score": row["scores"][metric],
                    }
                )
        columns = ["number", "id", "prompt", "gold_position", "cluster", "score"]
        table = self._common_prompts(pd.DataFrame(rows, columns=columns))
        if table is None or table["gold_position"].nunique() < 2:
            return None
        return table


def not_worse_than_best(means: Array) -> NDArray[np.bool_]:
    """Which of K settings are not significantly worse than the best one.

    A setting stays where its largest distance behind another one, in standard errors of their paired difference, is
    no larger than the noise in the largest distance in 95 % of draws. So the truly best one stays with that probability
    at least, whatever K is (Hsu 1984, multiple comparisons with the best, with bootstrapped quantiles).

    Args:
        means: Mean score of each setting, then its bootstrap draws, shape (1 + R, K).
    """
    observed = means[0]
    noise = means[1:] - observed
    may_be_best = np.ones(len(observed), bool)
    for setting in range(len(observed)):
        leads = observed - observed[setting]
        noise_of_leads = noise - noise[:, [setting]]
        errors = noise_of_leads.std(0)
        # A lead that no draw changes is sure, also where it is the setting's own of zero.
        known = errors > 1e-12
        if (leads[~known] > 1e-12).any():
            may_be_best[setting] = False
        elif known.any():
            scaled_noise = (noise_of_leads[:, known] / errors[known]).max(1)
            largest = (leads[known] / errors[known]).max()
            may_be_best[setting] = largest <= np.quantile(scaled_noise, 0.95)
    return may_be_best


def _lacks_answers(folder: Path) -> bool:
    """Whether too many answers of a run are missing for its scores to mean anything."""
    metrics = read_csv(folder / "metrics.csv")
    return metrics is not None and bool(missing_notes(metrics))


def _chance(folder: Path) -> float:
    """Score of a guess in the task of a run, 0..1."""
    task = RunDir(folder).config().get("task")
    return (read_recorded_task(task).chance or 0.0) if task else 0.0


def _hides_bias(rows: pd.DataFrame, chance: float) -> bool:
    """Whether a setting answers almost nothing, no more than a guess, or everything, so no bias can show.

    Args:
        rows: A row per prompt: ``gold_position``, ``cluster`` (its question) and ``score``.
        chance: Score of a guess.
    """
    positions = [
        mean(at_position["score"].to_numpy(), list(at_position["cluster"]))
        for _, at_position in rows.groupby("gold_position")
    ]
    average = mean(rows["score"].to_numpy(), list(rows["cluster"]))
    questions = rows["cluster"].nunique()
    return bool(score_limit_note(positions, average, chance, questions))


def _halves(curve: Array) -> Array:
    """First half of the gold positions minus the second, [..., K] to [...].

    Halves are compared, not ends: at the ends alone all answers are often right.
    """
    half = curve.shape[-1] // 2
    return curve[..., :half].mean(-1) - curve[..., -half:].mean(-1)


def _rank_correlation(statistics: Mapping[Any, Array], numbers: Array) -> Array:
    """Rank correlation [1 + R] of a statistic with the numbers; 0 where it is constant."""
    values = np.stack([statistics[number] for number in numbers], axis=-1)
    return np.nan_to_num(spearman(values, numbers))
