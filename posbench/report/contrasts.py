"""Claims about the settings of a sweep: one against another, or against the unmodified model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from posbench.late import pd
from posbench.report.folder import config_group, name_in_config, read_csv
from posbench.report.tables import missing_notes
from posbench.run.folder import PREDICTIONS, open_run_dir, open_undamaged
from posbench.schema import build
from posbench.stats import bootstrap, outcomes
from posbench.stats.findings import (
    SMALLEST_POINTS,
    Finding,
    estimate,
    findings_table,
    inert_note,
    join_findings,
)
from posbench.stats.frames import UNMODIFIED, metric_of_task
from posbench.stats.reference import Contrast

ONE_SEARCH = (
    "one search of each setting: searches of one setting differ, too (lpes_table8)"
)
NO_COMMON_PROMPTS = "the runs asked no prompt in common"
Runs = Sequence[tuple[Mapping[str, str], Path]]
"""Setting and folder of each run of a sweep."""


def judge_contrasts(runs: Runs, varied: Collection[str]) -> pd.DataFrame:
    """Judge the contrasts that an experiment declares (see :class:`Contrast`), for each model.

    Args:
        runs: The runs of its sweep, which all declare the same contrasts.
        varied: Keys whose values differ between its jobs. A contrast compares two values of such a key, or of a key of
            the experiment's grid where it has one.

    Returns:
        Rows of findings.csv; none for runs without contrasts, or without all settings of a contrast.
    """
    by_model: dict[str, list[tuple[Mapping[str, str], Path]]] = {}
    contrasts: list[Contrast] = []
    for setting, folder in runs:
        config = open_run_dir(folder).config()
        experiment = config_group(config, "experiment")
        contrasts = [
            build(Contrast, data, "experiment.contrasts")
            for data in experiment.get("contrasts") or ()
        ]
        model = name_in_config(config, "model")
        keys = experiment.get("grid") or varied
        named = {key: value for key, value in setting.items() if key in keys}
        by_model.setdefault(model, []).append((named, folder))
    tables = [findings_table([], "")]
    for model, of_model in by_model.items():
        findings = [_judge(contrast, of_model) for contrast in contrasts]
        judged = [finding for finding in findings if finding]
        if judged:
            tables.append(findings_table(judged, model))
    return pd.concat(tables[1:] or tables, ignore_index=True)


def _judge(contrast: Contrast, runs: Runs) -> Finding | None:
    """Return the verdict on a contrast in the runs of one model; None where they lack one of its settings.

    Args:
        contrast: Settings of a sweep of which some are claimed to score better than, or the same as, others.
        runs: Settings and folders of the runs.
    """
    pairs = list(combinations(contrast.equal, 2))
    for setting in (*contrast.better, *contrast.not_better):
        pairs.append((setting, contrast.than))
    settings = sorted({name for pair in pairs for name in pair})
    scores: dict[str, list[pd.DataFrame]] = {name: [] for name in settings}
    unmodified: dict[str, list[pd.DataFrame]] = {name: [] for name in settings}
    without_answers = set[str]()
    key = _key_of_settings(settings, runs)
    if key is None:
        return None
    # Where other keys were swept, too, settings are compared under each of their values.
    for index, folder_of in enumerate(_runs_by_other_keys(key, runs)):
        # Every run has the unmodified model's scores.
        folder_of.setdefault(UNMODIFIED, next(iter(folder_of.values())))
        if not folder_of.keys() >= set(settings):
            continue
        for name in settings:
            table = _read_scores(name, folder_of[name])
            scores[name].append(_in_group(table, index))
            base = _read_scores(UNMODIFIED, folder_of[name])
            unmodified[name].append(_in_group(base, index))
            if _lacks_answers(name, folder_of[name]):
                without_answers.add(name)
    if not all(scores.values()):
        return None
    tables = {name: pd.concat(of_name) for name, of_name in scores.items()}
    # A setting that changes no reply (a method that does nothing here) can neither win nor lose.
    inert = {
        name: _inert_note(name, tables[name], pd.concat(unmodified[name]))
        for name in settings
        if name != UNMODIFIED
    }
    parts = []
    for first, second in pairs:
        points = _difference(tables[first], tables[second])
        statistic = f"{first} minus {second}, points of the average"
        part = _bounded(contrast, statistic, points)
        # The two settings have no prompt in common.
        if not points.n:
            part = part.not_testable(NO_COMMON_PROMPTS)
        elif first in without_answers or second in without_answers:
            part = part.not_testable(
                f"{outcomes.PROBLEM} under {', '.join(sorted(without_answers))}"
            )
        elif all(inert.get(name, "unmodified") for name in (first, second)):
            notes = [inert[name] for name in (first, second) if name in inert]
            part = part.not_testable("; ".join(notes))
        parts.append(part)
    if not parts:
        return None
    finding = join_findings(parts)
    return finding.inconclusive(ONE_SEARCH) if contrast.one_search else finding


def _bounded(contrast: Contrast, statistic: str, points: bootstrap.Estimate) -> Finding:
    """Return the verdict on one pair of settings by the difference of their scores.

    Args:
        contrast: Claims one better, not better, or equal.
        statistic: What the difference is, in words.
        points: The difference, in points.
    """
    claim = contrast.claim
    if contrast.better:
        return Finding.above(claim, statistic, points, SMALLEST_POINTS)
    if contrast.not_better:
        return Finding.below(claim, statistic, points, SMALLEST_POINTS)
    return Finding.within(claim, statistic, points, -SMALLEST_POINTS, SMALLEST_POINTS)


def _key_of_settings(names: Collection[str], runs: Runs) -> str | None:
    """Return the swept key that has all the named settings among its values; None if no key has.

    Args:
        names: Settings that a contrast compares; the unmodified model, which is in every run, may be among them.
        runs: Settings (value by swept key) and folder of each run.
    """
    keys = dict.fromkeys(key for setting, _ in runs for key in setting)
    wanted = set(names) - {UNMODIFIED}
    for key in keys:
        if wanted <= {setting.get(key) for setting, _ in runs}:
            return key
    return None


def _runs_by_other_keys(key: str, runs: Runs) -> list[dict[str, Path]]:
    """Group the runs with scores that agree in all swept keys but one.

    Args:
        key: That key.
        runs: Settings (value by swept key) and folder of each run.

    Returns:
        For each group, the folder by the value of ``key``.
    """
    groups: dict[tuple[tuple[str, str], ...], dict[str, Path]] = {}
    for setting, folder in runs:
        if key not in setting or read_csv(folder / "metrics.csv") is None:
            continue
        other_settings = sorted(item for item in setting.items() if item[0] != key)
        groups.setdefault(tuple(other_settings), {}).setdefault(setting[key], folder)
    return list(groups.values())


def _lacks_answers(name: str, folder: Path) -> bool:
    """Whether too many answers of a run are missing under a setting for its scores to mean anything.

    Args:
        name: The setting, or the unmodified model, whose rows every run has.
        folder: A run with that setting.
    """
    metrics = read_csv(folder / "metrics.csv")
    assert metrics is not None, "a run with scores has it"
    return any(
        (method == UNMODIFIED) == (name == UNMODIFIED)
        for method in missing_notes(metrics)
    )


def _read_scores(name: str, folder: Path) -> pd.DataFrame:
    """Return the scores of a run's prompts under its method, or under the unmodified model if that is the name.

    Returns:
        Columns ``cluster`` (the question, for the bootstrap) and ``score``, indexed by id and digest of the prompt.
    """
    open_undamaged(folder, only=(PREDICTIONS,))
    metrics = read_csv(folder / "metrics.csv")
    assert metrics is not None, "a run with scores has it"
    metric = metric_of_task(metrics).iloc[0]
    rows: list[dict[str, Any]] = []
    for row in open_run_dir(folder).rows_without_error(PREDICTIONS):
        if row["scores"] and (row["method"] == UNMODIFIED) == (name == UNMODIFIED):
            rows.append(
                {
                    "id": row["id"],
                    # Jobs with a budget may ask other prompts under the same ids.
                    "prompt": row.get("prompt", ""),
                    "cluster": row["cluster"] or row["id"],
                    "score": row["scores"][metric],
                }
            )
    columns = ["id", "prompt", "cluster", "score"]
    return pd.DataFrame(rows, columns=columns).set_index(["id", "prompt"])


def _in_group(table: pd.DataFrame, group: int) -> pd.DataFrame:
    """Scores with the number of their group of runs as a further level of the index."""
    return table.assign(group=group).set_index("group", append=True)


def _inert_note(name: str, scores: pd.DataFrame, unmodified: pd.DataFrame) -> str:
    """Whether a setting moves hardly any score of the unmodified model, see :func:`inert_note`."""
    both = scores["score"].to_frame().assign(before=unmodified["score"]).dropna()
    if both.empty:
        return ""
    changed = float((both["score"] != both["before"]).mean())
    return inert_note(name, changed, _difference(scores, unmodified))


def _difference(after: pd.DataFrame, before: pd.DataFrame) -> bootstrap.Estimate:
    """Estimate the mean difference of the scores of the same prompts, in points.

    Args:
        after: Scores and clusters of one setting, from :func:`_read_scores`.
        before: Those of the setting that is subtracted.
    """
    both = after.assign(score_before=before["score"]).dropna()
    if both.empty:
        return bootstrap.NO_ESTIMATE
    clusters = list(both["cluster"].astype(str))
    difference = bootstrap.paired(both["score"], both["score_before"], clusters)
    return estimate(difference._asdict(), scale=100)
