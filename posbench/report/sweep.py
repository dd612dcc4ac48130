"""What a multirun leaves behind: one table over its runs, one figure, one page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from posbench.errors import UserError
from posbench.files.atomic import Row, digest, write_csv, write_text
from posbench.late import pd
from posbench.plots import sweep as plots
from posbench.plots.scores import accuracy_by_model
from posbench.plots.section import Section
from posbench.report import tables
from posbench.report.folder import need_folder, read_csv, read_json, runs_of
from posbench.report.page import HOLDS, write_page
from posbench.report.paper import beside
from posbench.report.terminal import show_findings, show_reference, text_table
from posbench.report.text import answer, title, verdict_table
from posbench.report.trend import MOST, trends
from posbench.run.folder import CONFIG, JOBS, PROVENANCE, RunDir, checked, opened
from posbench.stats.frames import UNMODIFIED, at_positions, metric_name, overall, shown
from posbench.stats.scores import COLUMNS

TABLES = ("metrics", "attention", "subsets", "findings")
READ = [
    CONFIG,
    "experiment.json",
    "reference.json",
    *(f"{name}.csv" for name in TABLES),
]
"""Files of a run that its sweep reads."""


def summarise(
    jobs: Sequence[dict[str, Any]], console: Console, folder: Path | None = None
) -> Path | None:
    """Collect the finished runs of a multirun into ``sweep__<axes>__<hash>/`` beside them, and print it; with
    ``folder``, into that of an earlier time.

    Of each job: its ``overrides`` (``key=value``), run ``folder`` (None if it failed), exit ``status``.
    Returns the folder, or None when no job finished.
    """
    settings, varied = _varied([job["overrides"] for job in jobs])
    # Model, method and task are columns of every table already.
    axes = [key for key in varied if key not in COLUMNS]
    finished = []
    for setting, job in zip(settings, jobs, strict=True):
        if job["folder"]:
            finished.append((setting, Path(job["folder"])))
        else:
            listed = " ".join(f"{key}={value}" for key, value in setting.items())
            console.print(f"failed: {listed} (exit status {job['status']})")
    if not finished:
        return None
    runs = [path for _, path in finished]
    folder = folder or _place(varied, runs)
    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        checked(run, only=READ)  # the first of many may have finished days ago
    for file in TABLES:
        there = [
            (s, p / f"{file}.csv") for s, p in finished if (p / f"{file}.csv").is_file()
        ]
        if there:
            out = "summary.csv" if file == "metrics" else f"{file}_summary.csv"
            write_text(folder / out, _together(there, axes))
    _share_experiment(folder, runs)
    trend, findings = trends(finished, axes)
    if len(trend):
        write_csv(folder / "trend.csv", trend)
        write_csv(folder / "findings.csv", findings)
    write_text(folder / JOBS, json.dumps(list(jobs), indent=2) + "\n")
    _show(folder, console)
    RunDir(folder).seal(str(RunDir(runs[0]).facts(PROVENANCE).get("command", "")))
    return folder


def finished(overrides: Sequence[Sequence[str]], runs: Sequence[Path]) -> Path | None:
    """The folder that :func:`summarise` left for these runs, by their overrides; None unless it is whole."""
    folder = _place(_varied(overrides)[1], runs)
    return folder if RunDir(folder).done and not RunDir(folder).damaged() else None


def _varied(
    overrides: Sequence[Sequence[str]],
) -> tuple[list[dict[str, str]], list[str]]:
    """The settings of every job, and the keys that are not alike in all of them."""
    settings = [dict(o.split("=", 1) for o in each if "=" in o) for each in overrides]
    keys = dict.fromkeys(key for setting in settings for key in setting)
    return settings, [
        key for key in keys if len({setting.get(key) for setting in settings}) > 1
    ]


def _place(varied: Sequence[str], runs: Sequence[Path]) -> Path:
    name = "_".join(varied).replace(".", "-").replace("/", "-") or "runs"
    return (
        runs[0].parent
        / f"sweep__{name}__{digest(['/'.join(run.parts[-3:]) for run in runs])}"
    )


def _show(folder: Path, console: Console) -> None:
    """Print what a sweep folder says, and draw its page."""
    summary = read_csv(folder / "summary.csv")
    if summary is not None:
        header, rows, sentence = sweep_table(summary, swept_columns(summary))
        console.print(
            text_table(header[:-1], [row[:-1] for row in rows], console.width)
        )
        console.print(
            "average over gold positions in %, difference in points, [95 % interval]"
        )
        console.print(sentence)
        show_findings(folder, console)
        show_reference(
            folder, summary, read_csv(folder / "subsets_summary.csv"), console
        )
    elif (findings := read_csv(folder / "findings_summary.csv")) is not None:
        console.print(text_table(*verdict_table(_by_setting(findings)), console.width))
        console.print(answer(findings))
    else:
        return
    console.print(f"sweep: {render_sweep(folder)}", soft_wrap=True)


def _share_experiment(folder: Path, runs: Sequence[Path]) -> None:
    """Give the sweep its experiment's title, and each run's own part of the paper's numbers."""
    told = [run for run in runs if (run / "experiment.json").is_file()]
    if not told:
        return
    facts = read_json(told[0] / "experiment.json")
    own = list[Row]()
    every = [read_json(run / "reference.json") or [] for run in told]
    for run, rows in zip(told, every, strict=True):
        metrics = read_csv(run / "metrics.csv")
        models = set() if metrics is None else set(metrics["model"])
        own += [{**row, "run": _label(run)} for row in rows if row["model"] in models]
    if own:
        facts["note"] = ""  # a run in another setting has no row here
    write_text(folder / "experiment.json", json.dumps(facts, indent=2) + "\n")
    reference = own or next(filter(None, every), [])
    write_text(folder / "reference.json", json.dumps(reference, indent=2) + "\n")


def _label(run: Path) -> str:
    """Version and name: runs of different tasks may share a folder name, in different versions."""
    return f"{run.parent.name}/{run.name}"


def _together(files: Sequence[tuple[dict[str, str], Path]], axes: Sequence[str]) -> str:
    """The tables of runs as one CSV, each row behind its run's label and values of the swept keys."""
    fronts = [
        [_label(file.parent), *(setting.get(axis, "") for axis in axes)]
        for setting, file in files
    ]
    texts = [file.read_text(encoding="utf-8") for _, file in files]
    header = texts[0].partition("\n")[0]
    columns = ["run", *axes]
    if any('"' in text or not text.startswith(f"{header}\n") for text in texts):
        frames = [
            pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)
            for text in texts
        ]
        labels = [
            pd.DataFrame([front] * len(f), columns=columns)
            for front, f in zip(fronts, frames, strict=True)
        ]
        rows = pd.concat(
            [pd.concat(pair, axis=1) for pair in zip(labels, frames, strict=True)]
        )
        return rows.to_csv(index=False, lineterminator="\n")
    # The tables of hundreds of runs, a million rows of attention, are joined as text.
    out = [",".join([*columns, header]) + "\n"]
    for front, text in zip(fronts, texts, strict=True):
        prefix = _csv_line(front) + ","
        out += [prefix + row for row in text.splitlines(keepends=True)[1:]]
    return "".join(out)


def _csv_line(values: Sequence[str]) -> str:
    """One CSV record of these values, quoted where needed, without its line end."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue().removesuffix("\n")


def again(folder: Path, console: Console) -> None:
    """Collect a sweep again, whose runs have changed since."""
    checked(folder, only=[JOBS])
    runs = iter(runs_of(folder))
    jobs = [
        {**job, "folder": job["folder"] and str(next(runs))}
        for job in read_json(folder / JOBS)
    ]
    summarise(jobs, console, folder)


def render_sweep(folder: Path) -> Path:
    """Draw the figures of what :func:`summarise` wrote, and its report.html, whose path it returns. Raises
    `UserError` where it has neither scores nor verdicts, or a file cannot be read."""
    need_folder(
        folder,
        "a sweep folder (it holds summary.csv)",
        "summary.csv",
        "findings_summary.csv",
    )
    names = ("summary", "attention_summary", "subsets_summary", "trend", "findings")
    summary, attention, subsets, trend, findings = (
        read_csv(folder / f"{name}.csv") for name in names
    )
    if summary is None:
        return _render_verdicts(folder)
    axes = axes_of(summary)
    header, rows, sentence = sweep_table(summary, axes)
    few = _few(summary, axes)
    every = summary["run"].nunique()
    drawn_of = (
        f" {few.nunique()} of {every} runs are drawn." if few.nunique() < every else ""
    )
    if (
        "model" in axes
        and set(axes) <= {"model", "method"}
        and len(at_positions(summary))
    ):
        figure = accuracy_by_model(summary)
        caption = "Score over the position of the answer, model by model. Bands: 95 % intervals."
    else:
        figure = plots.factor_sweep(summary[summary["run"].isin(few)], axes)
        left = "score over all positions with 95 % intervals"
        right = "score over the position of the answer"
        caption = f"Left: {left}. Right: {right}.{drawn_of}"
    drawn = {"sweep": (figure, caption)}
    sections = [Section("Settings", "", header, rows, drawn)]
    if attention is not None:
        caption = "Attention of the last prompt token to the item with the answer over its position"
        figure = plots.attention_sweep(attention[attention["run"].isin(few)], axes)
        drawn = {"attention": (figure, f"{caption}, for each setting.{drawn_of}")}
        sections.append(Section("Attention", figures=drawn))
    if trend is not None and findings is not None:
        caption = "Bands: 95 % intervals over questions. Dotted: no side preferred. Dashed: the"
        drawn = {"trend": (plots.trend(trend), f"{caption} unmodified model.")}
        sections.append(Section("Trend", "", *tables.findings_table(findings), drawn))
        sentence = f"{sentence} {answer(findings)}"
    models = list(dict.fromkeys(summary["model"]))
    rows = plots.modified_of(summary)
    swept = [axis for axis in axes if axis not in COLUMNS and axis != "run"]
    told = title(map(shown, rows["method"]), models, rows["task"], swept)
    sections += beside(folder, summary, subsets)
    return write_page(
        folder, told, sentence, sections, models, provenance=_command(folder)
    )


def _render_verdicts(folder: Path) -> Path:
    """The page of a sweep whose runs judged claims and scored nothing."""
    findings = read_csv(folder / "findings_summary.csv")
    if findings is None:
        raise UserError(
            "summary.csv", "no row", "rows of at least one run", "run the sweep first"
        )
    settings = _by_setting(findings)
    runs = (
        settings.drop_duplicates("model")[["model", "run"]]
        .astype(str)
        .to_numpy()
        .tolist()
    )
    sections = [
        Section("Verdicts", HOLDS, *verdict_table(settings)),
        Section("Numbers", "", *tables.findings_table(settings, models=True)),
        Section("Runs", "Each has a page with its figures.", ["model", "run"], runs),
    ]
    configs = [opened(run).config() for run in runs_of(folder)]
    studies = [
        f"study {(config.get('study') or {}).get('name', '')}" for config in configs
    ]
    told = title(
        studies, findings["model"].dropna(), (), [c for c in findings if "." in c]
    )
    return write_page(
        folder, told, answer(findings), sections, provenance=_command(folder)
    )


def _command(folder: Path) -> dict[str, str]:
    """The command of a sweep, which its runs know; empty where none is left."""
    known = (opened(run).facts(PROVENANCE) for run in runs_of(folder))
    return next(
        ({"command": str(facts["command"])} for facts in known if "command" in facts),
        {},
    )


def _by_setting(findings: pd.DataFrame) -> pd.DataFrame:
    """Findings of many runs, whose model is told with what was swept beside it."""
    texts = findings["model"].fillna("")
    swept = findings.columns[: list(findings).index("model")]
    for column in swept.drop("run"):
        texts += f" {column.rpartition('.')[2]}=" + findings[column].astype(str)
    return findings.assign(model=texts.str.strip())


def _few(summary: pd.DataFrame, axes: Sequence[str]) -> pd.Series:
    """The runs of at most :data:`MOST` settings, spread evenly over all: a figure holds no more lines."""
    rows, settings, _ = plots.with_setting(summary, axes)
    step = max(len(settings) / MOST, 1)
    some = [settings[int(i * step)] for i in range(min(len(settings), MOST))]
    return rows.loc[rows["setting"].isin(some), "run"]


def axes_of(summary: pd.DataFrame) -> list[str]:
    """The :func:`swept_columns`, and `run` where they do not tell the runs apart."""
    axes = swept_columns(summary)
    settings = plots.with_setting(overall(plots.modified_of(summary)), axes)[0][
        "setting"
    ]
    return [*axes, "run"] if settings.duplicated().any() else axes


def swept_columns(summary: pd.DataFrame) -> list[str]:
    """The swept columns: what of model, method and task varies, and what stands between `run` and `model`."""
    swept = [
        c for c in summary.columns[: list(summary.columns).index("model")] if c != "run"
    ]
    rows = plots.modified_of(summary)
    named = [
        c
        for c in ("model", "method", "task")
        if rows[c].nunique() > 1 and f"{c} (swept)" not in swept
    ]
    told: list[str] = []
    for column in [*named, *swept]:
        # A checkpoint's path says nothing where its name tells the rows apart already.
        if (
            not told
            or (
                rows.groupby(told, dropna=False)[column].nunique(dropna=False) > 1
            ).any()
        ):
            told.append(column)
    return told or (["seed"] if rows["seed"].nunique() > 1 else ["method"])


def sweep_table(
    summary: pd.DataFrame, axes: list[str]
) -> tuple[list[str], list[list[str]], str]:
    """Header, rows and the sentence of a sweep: how average and position bias run, and what changes."""
    rows, settings, label = plots.with_setting(summary, axes)
    header = [
        label,
        metric_name(summary),
        "unmodified",
        "difference",
        "position bias",
        "n",
        "run",
    ]
    table: list[list[str]] = []
    averages = list[tuple[float, str]]()
    biases = list[tuple[float, str]]()
    tally = {"raise it": 0, "lower it": 0, "cannot be told apart": 0}
    parts, runs = _averages(rows)
    for setting in settings:
        cells = [part.get(setting) for part in parts]
        point, _, difference, bias = cells
        averages += [(point.value, setting)] if point is not None else []
        biases += (
            [(bias.value, setting)]
            if bias is not None and not pd.isna(bias.value)
            else []
        )
        if difference is not None:
            lower = "lower it" if difference.ci_high < 0 else "cannot be told apart"
            tally["raise it" if difference.ci_low > 0 else lower] += 1
        run = ", ".join(dict.fromkeys(map(str, runs[setting]))) if "run" in rows else ""
        texts = map(tables.cell, cells, ("z.1f", "z.1f", "+z.1f", "z.1f"))
        table.append([setting, *texts, "" if point is None else str(point.n), run])
    if not averages:
        return [], [], "Nothing was scored in this sweep."
    text = [
        f"Over {len(settings)} settings of {label}, the average runs from {_span(averages, ' %', ' %')}"
    ]
    verdicts = ", ".join(f"{count} {word}" for word, count in tally.items() if count)
    if verdicts:
        text.append(
            f"of {sum(tally.values())} compared with the unmodified model, {verdicts}"
        )
    if biases:
        text.append(f"the position bias from {_span(biases, '', ' points')}")
    else:
        header, *table = ([*row[:4], *row[5:]] for row in (header, *table))
    return header, table, "; ".join(text) + "."


def _averages(rows: pd.DataFrame) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    """Average, that of the unmodified model, difference and position bias, each by setting; and its runs."""
    column = "run" if "run" in rows else "setting"
    plain = rows["method"] == UNMODIFIED
    runs = rows.groupby("setting")[column].unique()
    modified = rows[~plain | ~rows["setting"].isin(rows.loc[~plain, "setting"])]
    unmodified = overall(rows[plain]).drop_duplicates(column).set_index(column)
    changes = overall(modified, "difference").dropna(subset="ci_low")
    parts = overall(modified), changes, overall(modified, "position_bias")
    found = [{row.setting: row for row in part[::-1].itertuples()} for part in parts]
    base = {r.Index: r for r in unmodified.itertuples()}
    firsts = {
        s: next((base[run] for run in own if run in base), None)
        for s, own in runs.items()
    }
    return [found[0], firsts, *found[1:]], runs


def _span(values: list[tuple[float, str]], *units: str) -> str:
    """`70.0 % (a) to 80.0 % (b)`: the lowest and the highest share with its unit and setting."""
    ends = zip((min(values), max(values)), units, strict=True)
    return " to ".join(
        f"{100 * share:.1f}{unit} ({setting})" for (share, setting), unit in ends
    )
