"""What a multirun leaves behind: one table over its runs, one figure, one page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from posbench.errors import UserError
from posbench.files.atomic import digest, write_csv, write_text
from posbench.plots import sweep as plots
from posbench.plots.section import Section
from posbench.report import tables
from posbench.report.folder import need_folder, read_csv, read_json
from posbench.report.page import experiment_section, write_page
from posbench.report.paper import with_subsets
from posbench.report.terminal import print_table, show_findings, show_reference
from posbench.report.text import cell, pct, points
from posbench.report.trend import trends
from posbench.stats.frames import UNMODIFIED, metric_name, overall
from posbench.stats.scores import COLUMNS

TREND_TEXT = (
    "Centre of attention: for each prompt the centre of mass of the last token's attention over the items, 0 the first item "
    "and 1 the last, in the layer of the attention figure. Position bias: standard deviation over gold positions without "
    "sampling noise. Rank correlations are Spearman's over the settings."
)


def summarise(jobs: Sequence[dict[str, Any]], console: Console) -> Path | None:
    """Collect the finished runs of a multirun into ``sweep__<axes>__<hash>/`` beside them.

    Args:
        jobs: Per job its ``overrides`` (list of ``key=value``), run ``folder`` (None if it failed) and exit
            ``status``.
        console: Where the table goes.

    Returns:
        The sweep folder, or None when no job finished.
    """
    settings = [dict(o.split("=", 1) for o in job["overrides"] if "=" in o) for job in jobs]
    keys = dict.fromkeys(k for s in settings for k in s)
    varied = [k for k in keys if len({s.get(k) for s in settings}) > 1]
    axes = [
        axis for axis in varied if axis not in COLUMNS
    ]  # model, method and task are columns of every table already
    finished = [(s, Path(job["folder"])) for s, job in zip(settings, jobs, strict=True) if job["folder"]]
    for setting, job in zip(settings, jobs, strict=True):
        if not job["folder"]:
            listed = " ".join(f"{k}={v}" for k, v in setting.items())
            console.print(f"failed: {listed} (exit status {job['status']})")
    if not finished:
        return None
    name = "_".join(a.replace(".", "-").replace("/", "-") for a in varied) or "runs"
    folder = finished[0][1].parent / f"sweep__{name}__{digest([str(p) for _, p in finished])}"
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"metrics.csv": "summary.csv"} | {
        f"{n}.csv": f"{n}_summary.csv" for n in ("attention", "subsets", "findings")
    }
    for file, out in kept.items():
        frames = [
            _labelled(path / file, setting, axes) for setting, path in finished if (path / file).is_file()
        ]
        if frames:
            write_csv(folder / out, pd.concat(frames, ignore_index=True))
    _share_experiment(folder, [path for _, path in finished])
    trend, findings = trends(finished, axes)
    if len(trend):
        write_csv(folder / "trend.csv", trend)
        write_csv(folder / "findings.csv", findings)
    write_text(folder / "jobs.json", json.dumps(list(jobs), indent=2) + "\n")
    _show(folder, console)
    return folder


def _show(folder: Path, console: Console) -> None:
    """Print what a sweep folder says, and draw its page."""
    summary = read_csv(folder / "summary.csv")
    if summary is not None:
        header, rows, sentence = sweep_table(summary, swept_columns(summary))
        print_table(console, header[:-1], [row[:-1] for row in rows])
        console.print("average over gold positions in %, difference in points, [95 % interval]")
        console.print(sentence)
        show_findings(folder, console)
        show_reference(with_subsets(summary, read_csv(folder / "subsets_summary.csv")), folder, console)
        console.print(f"sweep: {render_sweep(folder)}", soft_wrap=True)
    elif (folder / "findings_summary.csv").is_file():
        console.print(f"verdicts of all runs: {folder / 'findings_summary.csv'}", soft_wrap=True)


def _share_experiment(folder: Path, runs: Sequence[Path]) -> None:
    """Give the sweep its experiment's title, and each run's own part of the paper's numbers: same model, same
    setting."""
    told = [run for run in runs if (run / "experiment.json").is_file()]
    if not told:
        return
    own: list[dict[str, Any]] = []
    every: list[dict[str, Any]] = []
    for run in told:
        rows, metrics = read_json(run / "reference.json") or [], read_csv(run / "metrics.csv")
        models = set() if metrics is None else set(metrics["model"])
        own += [{**row, "run": _label(run)} for row in rows if row["model"] in models]
        every = every or rows
    facts = read_json(told[0] / "experiment.json")
    if own:
        facts["note"] = ""  # a run in another setting has no row here
    write_text(folder / "experiment.json", json.dumps(facts, indent=2) + "\n")
    write_text(folder / "reference.json", json.dumps(own or every, indent=2) + "\n")


def _label(run: Path) -> str:
    """Version and name: runs of different tasks may share a folder name, in different versions."""
    return f"{run.parent.name}/{run.name}"


def _labelled(file: Path, setting: dict[str, str], axes: Sequence[str]) -> pd.DataFrame:
    frame = pd.read_csv(file, dtype=str, keep_default_na=False)
    labels = {"run": _label(file.parent), **{axis: setting.get(axis) for axis in axes}}
    return pd.concat([pd.DataFrame([labels] * len(frame)), frame], axis=1)


def render_sweep(folder: Path) -> Path:
    """Draw a sweep's figures and write its report.html.

    Args:
        folder: Holds summary.csv (run, the swept columns, then the columns of metrics.csv); optionally
            attention_summary.csv, trend.csv, findings.csv, experiment.json and reference.json.

    Returns:
        Path of report.html.

    Raises:
        UserError: The folder or summary.csv is missing, or a file cannot be read.
    """
    need_folder(folder, "a sweep folder (it holds summary.csv)", "summary.csv")
    summary, attention, subsets = (
        read_csv(folder / f"{n}.csv") for n in ("summary", "attention_summary", "subsets_summary")
    )
    if summary is None:
        raise UserError("summary.csv", "no row", "rows of at least one run", "run the sweep first")
    accuracy = overall(summary[summary["method"] != UNMODIFIED])
    accuracy = overall(summary) if accuracy.empty else accuracy
    axes = swept_columns(summary)
    if plots.with_setting(accuracy, axes)[0]["setting"].duplicated().any():
        axes.append("run")
    header, rows, sentence = sweep_table(summary, axes)
    caption = (
        "Left: score over all positions with 95 % intervals. Right: score over the position of the answer."
    )
    drawn = {"sweep": (plots.factor_sweep(summary, axes), caption)}
    if attention is not None:
        caption = "Attention of the last prompt token to the item with the answer over its position, for each setting."
        drawn["attention"] = plots.attention_sweep(attention, axes), caption
    text = "Score over all positions in % with its 95 % interval; difference from unmodified and position bias in points."
    sections = [Section("Settings", text, header, rows, drawn)]
    trend, findings = read_csv(folder / "trend.csv"), read_csv(folder / "findings.csv")
    if trend is not None and findings is not None:
        caption = "Bands: 95 % bootstrap intervals over questions. Dotted: no side preferred. Dashed: the unmodified model."
        figure = {"trend": (plots.trend(trend), caption)}
        sections.append(Section("Trend", TREND_TEXT, *tables.findings_table(findings), figure))
    sections += experiment_section(folder, with_subsets(summary, subsets))
    return write_page(folder, sentence, "", sections)


def swept_columns(summary: pd.DataFrame) -> list[str]:
    """The swept columns: those of model, method and task that vary, and what stands between `run` and
    `model`."""
    front = list(summary.columns[: list(summary.columns).index("model")])
    swept = [c for c in front if c != "run"]
    rows = summary[summary["method"] != UNMODIFIED] if (summary["method"] != UNMODIFIED).any() else summary
    named = [c for c in ("model", "method", "task") if rows[c].nunique() > 1 and f"{c} (swept)" not in swept]
    return [*named, *swept] or (["seed"] if rows["seed"].nunique() > 1 else ["method"])


def sweep_table(summary: pd.DataFrame, axes: list[str]) -> tuple[list[str], list[list[str]], str]:
    """Header, rows and the sentence of a sweep: how average and position bias run, and how many settings
    change the first."""
    rows, settings, label = plots.with_setting(summary, axes)
    table: list[list[str]] = []
    averages: list[tuple[float, str]] = []
    biases: list[tuple[float, str]] = []
    tally = {"raise": 0, "lower": 0, "do not reliably change": 0}
    for setting in settings:
        here = rows[rows["setting"] == setting]
        modified = here[here["method"] != UNMODIFIED]
        shown = here if modified.empty else modified
        frames = overall(shown), overall(plots.unmodified_of(rows, setting))
        change = overall(modified, "difference").dropna(subset="ci_low")
        cells: list[Any] = [
            next(f.itertuples(), None) for f in (*frames, change, overall(shown, "position_bias"))
        ]
        point, _, change_, bias = cells
        averages += [(point.value, setting)] if point is not None else []
        biases += [(bias.value, setting)] if bias is not None else []
        if change_ is not None:
            tally[
                "raise"
                if change_.ci_low > 0
                else "lower"
                if change_.ci_high < 0
                else "do not reliably change"
            ] += 1
        run = ", ".join(dict.fromkeys(map(str, here["run"]))) if "run" in here else ""
        texts = map(cell, cells, ("{:.1f}", "{:.1f}", "{:+.1f}", "{:.1f}"))
        table.append([setting, *texts, "" if point is None else str(point.n), run])
    if not averages:
        return [], [], "Nothing was scored in this sweep."
    (low, at_low), (high, at_high) = min(averages), max(averages)
    sentence = f"Over {len(settings)} settings of {label}, the average runs from {pct(low)} ({at_low}) to {pct(high)} ({at_high})"
    verdicts = ", ".join(f"{count} {word}" for word, count in tally.items() if count)
    sentence += (
        f"; of {sum(tally.values())} compared with the unmodified model, {verdicts} it" if verdicts else ""
    )
    header = [label, metric_name(summary), "unmodified", "difference", "position bias", "n", "run"]
    if biases:
        (low, at_low), (high, at_high) = min(biases), max(biases)
        sentence += (
            f"; the position bias from {points(low)[1:]} ({at_low}) to {points(high)[1:]} points ({at_high})"
        )
    else:
        header, table = [*header[:4], *header[5:]], [[*row[:4], *row[5:]] for row in table]
    return header, table, sentence + "."
