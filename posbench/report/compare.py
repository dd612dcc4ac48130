"""Chosen runs side by side: one table, one figure, differences paired by prompt."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from posbench.errors import UserError, renamed
from posbench.files.atomic import Row, new_folder, short_hash, to_canonical, write_csv
from posbench.late import DataFrame, Figure, pd
from posbench.model.load import SERVER_KEYS, is_in_process
from posbench.plots.base import save, sign
from posbench.plots.scores import accuracy_by_position, by_subset
from posbench.plots.section import Section
from posbench.report.console import Record
from posbench.report.curve import curve_of_methods
from posbench.report.folder import config_group, need_destination, read_csv
from posbench.report.glance import comparison_glance, name_in_commands, score_order
from posbench.report.index import cut_text, differing_settings, estimate_cell
from posbench.report.links import run_links
from posbench.report.page import write_page
from posbench.report.summaries import RunSummary, read_config_as_run, read_summaries
from posbench.report.tables import (
    has_missing_note,
    missing_notes,
    without_missing_scores,
)
from posbench.report.text import MAX_LISTED
from posbench.run.folder import PREDICTIONS, PROVENANCE, RunDir, open_undamaged
from posbench.run.own_code import make_importable
from posbench.schema import instantiate, override_text
from posbench.stats import outcomes
from posbench.stats.bootstrap import Estimate, combined
from posbench.stats.findings import estimate, estimate_columns, estimate_row
from posbench.stats.frames import (
    UNMODIFIED,
    display_name,
    rows_at_positions,
    rows_over_all_positions,
)
from posbench.stats.scores import Tabulator
from posbench.stats.shape import shape_in_metrics
from posbench.tasks import Task

TABLE_FILE = "comparison.csv"
DIFFERENCES_NOTE = "Differences are from the first run. Scores in %, all else in points, each with its 95 % interval."
MAX_LABEL_CHARACTERS = 48
DECODING_KEYS = ("max_new_tokens", "repetition_penalty")
"""Keys of a task that move a greedy reply."""
PENALTY_NAMES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
"""Penalties that a server may apply of its own."""
MAX_DEPTH_GAP = 0.1
"""Share of the items by which gold positions may differ that count as the same, as those of 20 and of 40 pairs do."""
MEASURES = {
    "score": ("", "difference"),
    "position_bias": ("position_bias", "position_bias_difference"),
}
"""The compared numbers: for each its metric, and the metric of its paired difference."""


@dataclass(frozen=True)
class ComparedRun:
    """A finished run with scores, under its name in a comparison.

    Attributes:
        run: The run folder.
        summary: Its names and settings.
        config: Its config, with the constants of a search.
        metrics: Rows of metrics.csv of its method, or of the unmodified model where
            that ran alone.
        unmodified: Rows of metrics.csv of the unmodified model.
        label: A name that no other run has.
    """

    run: RunDir
    summary: RunSummary
    config: Mapping[str, Any]
    metrics: DataFrame
    unmodified: DataFrame
    label: str = ""

    @classmethod
    def of(cls, folder: Path) -> ComparedRun:
        """Open a run for a comparison, with the metrics of its method (of the unmodified model if it has no other).

        Raises:
            UserError: It is damaged, unfinished or has no scores.
        """
        # The user typed the folder as RUN; the check calls it DIR.
        with renamed("DIR", "RUN"):
            run = open_undamaged(folder)
        metrics = read_csv(run.path / "metrics.csv")
        if not run.done or metrics is None:
            hint = "choose another: posbench ls runs state=done"
            raise UserError("RUN", str(folder), "a finished run with scores", hint)
        is_unmodified = metrics["method"] == UNMODIFIED
        unmodified = metrics[is_unmodified]
        own_metrics = unmodified if is_unmodified.all() else metrics[~is_unmodified]
        (summary,) = read_summaries([run.path])
        config = read_config_as_run(run)
        return cls(run, summary, config, own_metrics, unmodified)

    @property
    def model(self) -> str:
        """Name of its model."""
        return self.summary.name("model")

    @property
    def method(self) -> str:
        """Name of the method that its numbers are of."""
        return str(self.metrics["method"].iloc[0])

    @property
    def decoding(self) -> dict[str, str]:
        """The settings that can change a greedy reply, by name; of a served run also those left to the server."""
        task = config_group(self.config, "task")
        settings = {
            f"task.{name}": override_text(to_canonical(task[name]))
            for name in DECODING_KEYS
            if name in task
        }
        settings["temperature"] = "0"
        open_penalties: Sequence[str] = ()
        if not is_in_process(self.config.get("model")):
            recorded = self.run.facts(PROVENANCE).get("decoding")
            # Before they were sent, every penalty was the server's.
            open_penalties = recorded["open_penalties"] if recorded else PENALTY_NAMES
            sent = (recorded or {}).get("sent", {"temperature": 0})
            temperature = sent.get("temperature", "of the server")
            settings["temperature"] = override_text(to_canonical(temperature))
        for name in PENALTY_NAMES:
            is_open = name in open_penalties
            settings[name] = "of the server" if is_open else "neutral"
        return settings

    @cached_property
    def prompts(self) -> dict[tuple[Any, ...], Row]:
        """Scorable rows of the run's method by example id, gold position and digest of the prompt.

        Rows without an answer are among them.
        """
        # Rows of an older version hold no short_hash of their prompt: the run's, over all
        # prompts, replaces it.
        all_prompts = self.run.read_json("prompts.json").get("questions")
        if not all_prompts:
            all_prompts = str(self.run.path)
        rows = {}
        for row in self.run.rows_without_error(PREDICTIONS):
            if row["method"] == self.method and outcomes.is_scorable(row):
                prompt = row.get("prompt") or all_prompts
                rows[row["id"], row["gold_position"], prompt] = row
        return rows


def write_comparison(
    folders: Sequence[Path], out: Path | None = None, formats: Iterable[str] = ()
) -> tuple[list[Path], list[Record], list[str]]:
    """Compare runs with the first one, in a table and a page with a figure.

    Args:
        folders: The run folders.
        out: Folder of table and page; None takes one in ``compare/`` of the outputs.
        formats: Further formats of the figure, see :func:`posbench.plots.base.save`.

    Returns:
        The files, the table's rows, and notes on the differences.

    Raises:
        UserError: Fewer than two runs, runs of several tasks, one that cannot be
            compared, or ``out`` is something else.
    """
    if len({folder.resolve() for folder in folders}) < max(len(folders), 2):
        value = " ".join(map(str, folders))
        hint = "posbench ls runs lists them"
        raise UserError("RUN", value, "two or more different runs", hint)
    runs = label_runs([ComparedRun.of(folder) for folder in folders])
    first = runs[0]
    _need_one_task(runs)
    out = (out or _default_folder(runs)).absolute()
    need_destination(out, (out / TABLE_FILE).is_file, "comparison")
    figure = _score_figure(runs)
    rows: list[Record] = [_row(first, {})]
    notes = [
        f"{run.label}: no score, {note}."
        for run in runs
        for note in missing_notes(run.metrics).values()
    ]
    for run in runs[1:]:
        difference = differences(first, run)
        rows.append(_row(run, difference))
        notes.append(pairing_note(first, run, difference))
        notes.append(decoding_note(first, run))
    notes = list(filter(None, notes))
    files = [out / TABLE_FILE]
    with new_folder(out) as folder:
        write_csv(folder / TABLE_FILE, pd.DataFrame(rows))
        picture = save(figure, folder / "accuracy", formats) if figure else None
        if picture:
            files.append(out / picture.name)
        page = _write_page(folder, out, runs, rows, notes, picture)
        files.append(out / page.name)
    return files, rows, notes


def _need_one_task(runs: Sequence[ComparedRun]) -> None:
    """Refuse runs of several tasks.

    Raises:
        UserError: A run has another task than the first.
    """
    task = runs[0].summary.name("task")
    for run in runs:
        name = run.summary.name("task")
        if name != task:
            value = f"{run.run.path} (task {name})"
            hint = f"runs of {task}: posbench ls runs task={task}"
            raise UserError("RUN", value, f"runs of one task, {task}", hint)


def _default_folder(runs: Sequence[ComparedRun]) -> Path:
    """Return ``OUTPUTS/compare/HASHES``, the same folder for the same runs."""
    first_folder = runs[0].run.path.resolve()
    outputs = first_folder.parent
    # A run lies in OUTPUTS/SUITE/vNNN/; one copied elsewhere is compared beside its folder.
    if re.fullmatch("v[0-9]+", first_folder.parent.name):
        outputs = first_folder.parents[2]
    hashes = [run.summary.hash for run in runs]
    name = "_".join(hashes)
    if len(hashes) > 4:
        name = f"{hashes[0]}_and_{len(hashes) - 1}_{short_hash(hashes)}"
    return outputs / "compare" / name


def label_runs(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Return the runs with different labels: model, method and settings if they differ, else the hash."""
    several_models = len({run.model for run in runs}) > 1
    several_methods = len({run.method for run in runs}) > 1
    labels = []
    settings_of_runs = differing_settings([run.summary for run in runs])
    for run, settings in zip(runs, settings_of_runs, strict=True):
        names = []
        if several_models:
            names.append(display_name(run.model))
        if several_methods:
            names.append(display_name(run.method))
            # The method's name distinguishes a served model from its twin in process.
            for key in ("base_url", *SERVER_KEYS):
                settings.pop(f"model.{key}", None)
        for key, value in settings.items():
            # How a run was asked is no name for it.
            if not key.startswith("runtime.") or key == "runtime.seed":
                names.append(f"{key.partition('.')[2]}={value}")
        labels.append(cut_text(", ".join(names), MAX_LABEL_CHARACTERS))
    unique = []
    for run, label in zip(runs, labels, strict=True):
        if not label or labels.count(label) > 1:
            label = f"{label} {run.summary.hash}".strip()
        unique.append(replace(run, label=label))
    return unique


def _estimate(metrics: pd.DataFrame, metric: str) -> Estimate | None:
    """A metric over all gold positions; None if it is absent, or meaningless because answers are missing."""
    rows = rows_over_all_positions(metrics, metric).dropna(subset="value")
    rows = rows[~has_missing_note(rows)]
    return None if rows.empty else estimate(rows.iloc[0])


def differences(first: ComparedRun, second: ComparedRun) -> dict[str, Any]:
    """Estimate score and position bias of a run minus the first run's.

    They are paired where one run asked all prompts of the other. Else they are
    differences of independent numbers, whose intervals are too wide if some prompts are
    the same; there are none where the gold positions differ, over which averages are taken.

    Returns:
        ``pairs``, the number of paired prompts (0 if unpaired), and an estimate or None
        for each of :data:`MEASURES`.
    """
    common = [key for key in first.prompts if key in second.prompts]
    # Few prompts in common would give a difference of those few alone.
    if not common or len(common) < min(len(first.prompts), len(second.prompts)):
        result: dict[str, Any] = {"pairs": 0}
        for measure, (metric, _) in MEASURES.items():
            result[measure] = _unpaired_difference(first, second, metric)
        return result
    config = first.run.config("task", "runtime")
    make_importable(first.run)
    task: Task = instantiate(config["task"], Task, "task")  # type: ignore[type-abstract]
    # The tables of a run compare with its unmodified model: here the first run plays it.
    rows = [{**first.prompts[key], "method": UNMODIFIED} for key in common]
    rows += [{**second.prompts[key], "method": "other"} for key in common]
    tabulator = Tabulator(
        task=task,
        model="",
        unmodified=UNMODIFIED,
        resamples=config["runtime"]["resamples"],
        seed=getattr(task, "seed", 0),
    )
    metrics = tabulator.metrics(rows)
    result = {"pairs": len(common)}
    for measure, (_, paired_metric) in MEASURES.items():
        result[measure] = _estimate(metrics, paired_metric)
    return result


def _unpaired_difference(
    first: ComparedRun, second: ComparedRun, metric: str
) -> Estimate | None:
    """Estimate a metric of the second run minus the first run's, as of independent samples.

    It is None if one lacks the metric, or if their gold positions differ.
    """
    if not _share_positions(first, second):
        return None
    minuend = _estimate(second.metrics, metric)
    subtrahend = _estimate(first.metrics, metric)
    if minuend is None or subtrahend is None:
        return None
    n = minuend.n + subtrahend.n
    return combined((minuend, subtrahend), (1, -1), n)


def _share_positions(first: ComparedRun, second: ComparedRun) -> bool:
    """Whether two runs asked as many gold positions, each within a tenth of the items of the other's."""
    depths = [
        sorted(rows_at_positions(run.metrics)["depth"].dropna().astype(float).unique())
        for run in (first, second)
    ]
    if len(depths[0]) != len(depths[1]):
        return False
    return all(abs(a - b) < MAX_DEPTH_GAP for a, b in zip(*depths, strict=True))


def pairing_note(first: ComparedRun, run: ComparedRun, difference: Row) -> str:
    """Say on how many common prompts a run's differences from the first one rest.

    Args:
        first: The run that is subtracted.
        run: The run.
        difference: Its row of differences; ``pairs`` is the number of common prompts, 0 if they are unpaired.

    Returns:
        A sentence; empty if both runs asked the same prompts.
    """
    common = len(first.prompts.keys() & run.prompts.keys())
    if not difference["pairs"]:
        if not _share_positions(first, run):
            return f"{run.label}: its gold positions are not those of {first.label}: averages are not compared."
        return (
            f"{run.label}: unpaired, {common} of its {len(run.prompts)} prompts "
            f"were also asked in {first.label}."
        )
    if common == len(run.prompts) == len(first.prompts):
        return ""
    return f"{run.label}: the differences are over the {common} prompts that both runs asked."


def decoding_note(first: ComparedRun, run: ComparedRun) -> str:
    """Return a sentence on decoding settings in which a run differs from the first one; empty if none is known."""
    other = run.decoding
    reasons = [
        f"{name} {other[name]} instead of {value}"
        for name, value in first.decoding.items()
        if name in other and other[name] != value
    ]
    if not reasons:
        return ""
    text = f"{run.label}: it decodes otherwise than {first.label}: {', '.join(reasons)}"
    return f"{text}; part of the difference may come from that."


def _row(run: ComparedRun, difference: Row) -> Row:
    """Return a run's row of ``compare.csv``: its own estimates, and those of its difference from the first run.

    Args:
        run: The run.
        difference: Estimates by measure, and ``pairs``; empty for the first run.
    """
    row: Row = {
        "run": run.summary.hash,
        "label": run.label,
        "model": run.model,
        "method": run.method,
        "folder": str(run.run.path),
        "shape": shape_in_metrics(run.metrics, run.method),
        "n": len(run.prompts),
        "pairs": difference.get("pairs"),
        "window_share": run.summary.window_share,
    }
    for measure, (metric, _) in MEASURES.items():
        row |= _estimate_columns(measure, _estimate(run.metrics, metric))
        row |= _estimate_columns(f"{measure}_difference", difference.get(measure))
    return row


def _estimate_columns(name: str, estimate: Estimate | None) -> Row:
    """The columns of an estimate, None in each where it is missing."""
    if estimate is None:
        return dict.fromkeys(estimate_columns(name))
    return {**estimate_row(estimate, name)}


def terminal_rows(rows: Sequence[Record]) -> list[dict[str, str]]:
    """The table as a terminal shows it: scores in %, all else in points.

    Where runs differ in the share of the context window that their prompts take, it has a column.
    """
    cells = [_terminal_row(row) for row in rows]
    shares = [_share_cell(row["window_share"]) for row in rows]
    if len(set(shares)) > 1:
        for cells_of_run, share in zip(cells, shares, strict=True):
            cells_of_run["window share"] = share
    return cells


def _share_cell(share: float | None) -> str:
    """The share of the context window that prompts take, in %; empty where not known."""
    return "" if share is None else f"{100 * share:.3g} %"


def _terminal_row(row: Record) -> dict[str, str]:
    # A label may end with the hash, which has a line of its own.
    """Return the cells that a terminal shows of a row of ``compare.csv``, by their headers."""
    label = f" {row['label']}".removesuffix(f" {row['run']}").strip()
    settings = label.replace(", ", "\n")
    cells = {"run": f"{row['run']}\n{settings}".strip()}
    for measure in MEASURES:
        name = measure.replace("_", " ")
        cells[name] = estimate_cell(row, measure)
        cells[f"{name} difference"] = estimate_cell(
            row, f"{measure}_difference", signed=True
        )
    cells["shape"] = str(row["shape"])
    cells["n"] = str(row["n"])
    return cells


def verdict(rows: Sequence[Record]) -> str:
    """Say of each run whether it scores higher than the first one, with the difference and its interval.

    Args:
        rows: The rows of comparison.csv, the first run's first.
    """
    first, *others = rows
    texts = [_contrast(first, row) for row in others[:MAX_LISTED]]
    if len(others) > MAX_LISTED:
        texts.append(f"{len(others) - MAX_LISTED} more in the table.")
    return " ".join(texts)


def _contrast(first: Record, row: Record) -> str:
    """A sentence on how a run differs from the first one.

    Args:
        first: The first run's row.
        row: The run's.
    """
    order = score_order(row)
    names = f"{row['label']} and {first['label']}"
    if order == "not compared":
        return f"Scores of {names} cannot be compared."
    pairs = row["pairs"]
    basis = f"{pairs} paired prompts" if pairs else "unpaired"
    numbers = f"{estimate_cell(row, 'score_difference', signed=True)} points, {basis}"
    bias = row["position_bias_difference"]
    if bias is not None:
        change = estimate_cell(row, "position_bias_difference", signed=True)
        numbers += f"; position bias {change}"
    numbers = f"({numbers})".replace("\n", " ")
    if order != "alike":
        direction = "higher" if order == "above" else "lower"
        text = f"{row['label']} scores {direction} than {first['label']}"
        return f"{text} {numbers}."
    return f"Scores of {names} cannot be told apart {numbers}."


def _write_page(
    folder: Path,
    out: Path,
    runs: Sequence[ComparedRun],
    rows: Sequence[Record],
    notes: Sequence[str],
    picture: Path | None,
) -> Path:
    """Write the page of a comparison.

    Args:
        folder: Folder of its files.
        out: Where that folder will lie.
        runs: The runs.
        rows: The rows of comparison.csv.
        notes: Notes on the differences.
        picture: The scores over the gold position or over subsets, as an SVG.

    Returns:
        The page.
    """
    cells = [
        {name: cell.replace("\n", " ") for name, cell in row.items()}
        for row in terminal_rows(rows)
    ]
    links = run_links([run.run.path for run in runs], out)
    pages = {run.label: links.get(run.summary.hash, "") for run in runs}
    pages[UNMODIFIED] = pages.get(
        display_name(UNMODIFIED), links.get(rows[0]["run"], "")
    )
    section = Section(
        "Runs",
        " ".join([DIFFERENCES_NOTE, *notes]),
        list(cells[0]),
        [list(row.values()) for row in cells],
    )
    curve = curve_of_methods(
        _score_rows(runs), lambda name: pages.get(name, ""), _unmodified_names(runs)
    )
    if curve:
        section.insert = lambda max_bytes: curve
    elif picture:
        section.pictures = [(picture, "Scores with 95 % intervals.")]
    labels = [run.label for run in runs]
    title = f"{runs[0].summary.name('task')}: {' and '.join(labels[:2])}"
    if len(labels) > 2:
        title += f" and {len(labels) - 2} more"
    folders = [run.run.path for run in runs]
    return write_page(
        folder,
        title,
        replace(
            comparison_glance(rows, folders),
            details=verdict(rows),
        ),
        [section],
        provenance={
            "command": f"posbench compare {' '.join(map(name_in_commands, folders))}"
        },
        runs=folders,
        place=out,
    )


def _score_rows(runs: Sequence[ComparedRun]) -> pd.DataFrame:
    """The scores of all runs, the label of each as its method, and the unmodified model's if they are the same in all.

    Args:
        runs: The runs.
    """
    frames = []
    for run in runs:
        # The name of the unmodified model gives it its line style.
        name = UNMODIFIED if run.label == display_name(UNMODIFIED) else run.label
        scores = without_missing_scores(run.metrics)
        frames.append(scores.assign(method=name, model="", seed=0))
    has_unmodified = any(run.label == display_name(UNMODIFIED) for run in runs)
    baselines = [_curve(run.unmodified) for run in runs]
    is_common = all(baseline == baselines[0] for baseline in baselines)
    if not has_unmodified and baselines[0] and is_common:
        frames.append(runs[0].unmodified.assign(method=UNMODIFIED, model="", seed=0))
    return pd.concat(frames, ignore_index=True)


def _unmodified_names(runs: Sequence[ComparedRun]) -> list[str]:
    """The names in :func:`_score_rows` of unmodified models."""
    return [UNMODIFIED, *(run.label for run in runs if run.method == UNMODIFIED)]


def _score_figure(runs: Sequence[ComparedRun]) -> Figure | None:
    """Draw scores over the gold position, or over subsets where prompts have no gold position; None without either.

    There is one line per run, and one for the unmodified model if its scores are the same in all runs.
    """
    rows = _score_rows(runs)
    if len(rows_at_positions(rows)):
        figure = accuracy_by_position(rows, _unmodified_names(runs))
        # Runs with equal scores lie on each other.
        _widen_hidden_lines(figure)
    else:
        subset_figure = _subset_figure(runs)
        if subset_figure is None:
            return None
        figure = subset_figure
    sign(figure, list(dict.fromkeys(run.model for run in runs)))
    return figure


def _curve(metrics: pd.DataFrame) -> list[list[float]]:
    """Gold position and score of each row at a gold position."""
    rows = rows_at_positions(metrics)[["gold_position", "value"]]
    return rows.to_numpy().tolist()


def _widen_hidden_lines(figure: Figure) -> None:
    """Draw a line wider that another line with the same values would hide."""
    for lower, upper in itertools.combinations(figure.axes[0].lines, 2):
        if np.array_equal(lower.get_ydata(), upper.get_ydata()):
            lower.set(linewidth=3, markersize=6.5)


def _subset_figure(runs: Sequence[ComparedRun]) -> Figure | None:
    """Draw the runs' scores of each subset; None if a run has no subsets."""
    frames = []
    for run in runs:
        subsets = read_csv(run.run.path / "subsets.csv")
        if subsets is None:
            return None
        rows = subsets[subsets["method"] == run.method]
        frames.append(rows.assign(method=run.label))
    return by_subset(pd.concat(frames).assign(model=""))
