"""The result of a multirun: one table over its runs, figures and a page."""

from __future__ import annotations

import csv
import io
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console

from posbench.errors import UserError
from posbench.files.atomic import (
    Row,
    short_hash,
    write_csv,
    write_json,
    write_text,
)
from posbench.files.parse import Objects
from posbench.late import Figure, pd
from posbench.plots import sweep as plots
from posbench.plots.scores import accuracy_by_model
from posbench.plots.section import Section
from posbench.report import tables
from posbench.report.console import show_glance, show_link
from posbench.report.contrasts import judge_contrasts
from posbench.report.curve import curve_of_sweep
from posbench.report.folder import (
    CAPTIONS,
    config_group,
    name_in_config,
    need_files,
    read_csv,
    read_json,
    sweep_runs,
)
from posbench.report.glance import (
    EXPORT_PURPOSE,
    TONES,
    findings_glance,
    gain_glance,
    name_in_commands,
    run_glance,
)
from posbench.report.links import link_to_parents, run_links
from posbench.report.page import VERDICT_RULE, embedded_figure, write_page
from posbench.report.paper import paper_sections
from posbench.report.terminal import show_findings, show_reference, show_table
from posbench.report.text import (
    MAX_LISTED,
    study_answer,
    swept_keys,
    title,
    verdict_table,
)
from posbench.report.trend import MAX_SETTINGS, trends
from posbench.run.folder import (
    CONFIG,
    JOBS,
    PROVENANCE,
    RunDir,
    open_run_dir,
    open_undamaged,
    was_rescored,
)
from posbench.search import held_back
from posbench.stats.bootstrap import Estimate, with_interval
from posbench.stats.findings import FINDING_COLUMNS
from posbench.stats.frames import (
    UNMODIFIED,
    display_name,
    metric_name,
    rows_at_positions,
    rows_over_all_positions,
)
from posbench.stats.glance import (
    Glance,
    Number,
    Tone,
    first_short,
    noun_for,
    sentence_case,
)
from posbench.stats.scores import METRIC_COLUMNS
from posbench.stats.shape import shape_in_metrics
from posbench.stats.verdict import (
    BIAS,
    CANNOT_DO,
    CANNOT_TELL,
    FIXED,
    NO_BIAS,
    NOT_FIXED,
    run_verdict,
    verdict_rule,
)

SWEEP_TABLE_NAMES = {
    "metrics": "summary",
    "attention": "attention_summary",
    "subsets": "subsets_summary",
    "findings": "findings_summary",
    "held_back": "held_back_summary",
}
"""Names of a run's tables in its sweep; gains on held-back prompts are joined of searches alone."""
GAINS_FILE = f"{SWEEP_TABLE_NAMES['held_back']}.csv"
MAX_PICTURES_BYTES = 400_000
"""Size of all figures of runs that the page of their sweep shows."""
MAX_NAMED_SETTINGS = 4
"""Settings that are named beside a sweep's verdict."""
SWEEP_FILES = [
    CONFIG,
    "experiment.json",
    "reference.json",
    *(f"{name}.csv" for name in SWEEP_TABLE_NAMES),
]
"""Files of a run that its sweep reads."""


def summarise(
    jobs: Sequence[dict[str, Any]],
    console: Console,
    folder: Path | None = None,
    *,
    command: str,
) -> Path | None:
    """Collect the finished runs of a multirun into one folder, and print it.

    Args:
        jobs: Of each job its ``overrides`` (``key=value``), run ``folder`` (None if it
            failed) and exit ``status``.
        console: Where the summary is printed.
        folder: Sweep folder to write again; None makes ``sweep__<axes>__<hash>/``
            next to the runs.
        command: The command of the sweep; a run may have been made by another one before.

    Returns:
        The sweep folder, or None when no job finished.
    """
    failed = [job for job in jobs if not job["folder"]]
    statuses = {job["status"] for job in failed}
    if len(failed) == len(jobs) > 1 and len(statuses) == 1:
        console.print(f"failed: all {len(jobs)} jobs (exit status {statuses.pop()})")
        return None
    for job in failed:
        text = " ".join(job["overrides"])
        console.print(f"failed: {text} (exit status {job['status']})")
    folders = [Path(job["folder"]) if job["folder"] else None for job in jobs]
    overrides = [job["overrides"] for job in jobs]
    settings, varied = _distinct_settings(overrides, folders)
    if not settings:
        return None
    runs = [(setting, run_folder) for run_folder, setting in settings.items()]
    note = same_runs_note(overrides, folders)
    if note:
        console.print(note, markup=False)
    # Model, method and task are columns of every table already.
    axes = [key for key in varied if key not in METRIC_COLUMNS]
    run_folders = list(settings)
    if folder is None:
        folder = _sweep_folder(varied, run_folders)
    folder.mkdir(parents=True, exist_ok=True)
    for run_folder in run_folders:
        open_undamaged(
            run_folder, only=SWEEP_FILES
        )  # the first may have finished days ago
    joined = list[str]()
    for run_table, sweep_table_name in SWEEP_TABLE_NAMES.items():
        if run_table == "held_back" and joined:
            continue  # scores and claims say more
        files = [
            (setting, run_folder / f"{run_table}.csv")
            for setting, run_folder in runs
            if (run_folder / f"{run_table}.csv").is_file()
        ]
        if files:
            keys = axes
            if run_table == "findings":  # of these columns they have the model alone
                keys = [key for key in varied if key not in FINDING_COLUMNS]
            if run_table == "held_back":  # it has none of these columns
                keys = varied
            write_text(folder / f"{sweep_table_name}.csv", _join_tables(files, keys))
            joined.append(run_table)
    _write_experiment(folder, run_folders)
    # A swept number gives a trend, other settings the experiment's contrasts.
    trend, findings = trends(runs, axes)
    if len(trend):
        write_csv(folder / "trend.csv", trend)
    else:
        findings = judge_contrasts(runs, varied)
    if len(findings):
        write_csv(folder / "findings.csv", findings)
    write_json(folder / JOBS, list(jobs))
    _show(folder, console, command)
    RunDir(folder).seal(command)
    return folder


def same_runs_note(
    overrides: Sequence[Sequence[str]], runs: Sequence[Path | None]
) -> str:
    """Return `5 settings are 4 runs: method.factor=1 and 1.0 are one run`; empty if each setting has a run of its own.

    Args:
        overrides: Of each job its ``key=value`` arguments.
        runs: The folder of each job's run, None if it failed.
    """
    of_runs: dict[Path, list[dict[str, str]]] = {}
    for of_job, run in zip(overrides, runs, strict=True):
        if run:
            of_runs.setdefault(run, []).append(_values_by_key(of_job))
    settings = [setting for of_run in of_runs.values() for setting in of_run]
    if len(settings) == len(of_runs):
        return ""
    varied = _varied_keys(settings)
    equal = list[str]()
    qualified = list[str]()
    for of_run in of_runs.values():
        texts = _values_of_one_run(of_run)
        equal.append(", ".join(filter(None, texts.values())))
        if texts:
            first = {key: f"{key}={value}" for key, value in of_run[0].items()}
            of_all = (texts.get(key, first.get(key)) for key in varied)
            qualified.append(", ".join(filter(None, of_all)))
    # What is one run under every value of the other keys is named without them.
    named = equal[:1] if len(set(equal)) == 1 else qualified
    listed = [f"{text} are one run" for text in named[:MAX_LISTED] if text]
    if len(named) > MAX_LISTED:
        listed.append(f"{len(named) - MAX_LISTED} more")
    count = (
        f"{len(settings)} settings are {len(of_runs)} {noun_for(len(of_runs), 'run')}"
    )
    return ": ".join(filter(None, [count, "; ".join(listed)]))


def _values_of_one_run(settings: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return by key the values under which several settings are one run, as `factor=1 and 1.0`.

    Of keys that vary together, whose values crossed would name other runs, the first one has the text of all.
    """
    values = {
        key: dict.fromkeys(setting.get(key, "(default)") for setting in settings)
        for key in _varied_keys(settings)
    }
    if len(settings) < math.prod(map(len, values.values())):
        names = (
            ", ".join(f"{key}={setting.get(key)}" for key in values)
            for setting in settings
        )
        return dict.fromkeys(values, "") | {next(iter(values)): " and ".join(names)}
    return {key: f"{key}={' and '.join(of_key)}" for key, of_key in values.items()}


def find_finished_sweep(
    overrides: Sequence[Sequence[str]], runs: Sequence[Path]
) -> Path | None:
    """The folder that :func:`summarise` made of these runs; None unless it is intact.

    Args:
        overrides: Of each job its ``key=value`` arguments.
        runs: The folder of each job's run.
    """
    settings, varied = _distinct_settings(overrides, runs)
    folder = _sweep_folder(varied, list(settings))
    sweep = RunDir(folder)
    return folder if sweep.done and not sweep.damaged() else None


def _distinct_settings(
    overrides: Sequence[Sequence[str]], runs: Sequence[Path | None]
) -> tuple[dict[Path, dict[str, str]], list[str]]:
    """Split the overrides of each run into keys and values.

    Args:
        overrides: Of each job its ``key=value`` arguments.
        runs: The folder of its run, None if it failed; of jobs with one folder the first counts.

    Returns:
        Value by key of every run that has a folder, and the keys whose values differ between runs.
    """
    of_runs: dict[Path, dict[str, str]] = {}
    of_failed = []
    for of_job, run in zip(overrides, runs, strict=True):
        setting = _values_by_key(of_job)
        if run:
            of_runs.setdefault(run, setting)
        else:
            of_failed.append(setting)
    return of_runs, _varied_keys([*of_runs.values(), *of_failed])


def _values_by_key(overrides: Sequence[str]) -> dict[str, str]:
    """The values that ``key=value`` arguments set; a key that Hydra adds or overrides by force is the same key."""
    pairs = (text.lstrip("+").split("=", 1) for text in overrides if "=" in text)
    return {key: _unquoted(value) for key, value in pairs}


def _varied_keys(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys whose values differ between settings."""
    keys = dict.fromkeys(key for setting in settings for key in setting)
    return [key for key in keys if len({s.get(key) for s in settings}) > 1]


def _unquoted(value: str) -> str:
    """The text of an override's value, which has quotes where it holds a comma."""
    quoted = re.fullmatch(r"""(['"])(.*)\1""", value)
    return re.sub(r"""\\(['"])""", r"\1", quoted[2]) if quoted else value


def _sweep_folder(varied: Sequence[str], runs: Sequence[Path]) -> Path:
    """The folder of a sweep over these keys and runs, next to its first run."""
    name = "_".join(varied).replace(".", "-").replace("/", "-") or "runs"
    run_names = ["/".join(run.parts[-3:]) for run in runs]
    return runs[0].parent / f"sweep__{name}__{short_hash(run_names)}"


def _show(folder: Path, console: Console, command: str) -> None:
    """Print the result of a sweep (its scores, else its verdicts, else the gains of its searches), and draw its page.

    Args:
        folder: The sweep's folder, with the tables over all its runs.
        console: Where it is printed.
        command: The command line of the sweep, for its page.
    """
    scores = _read_scores(folder)
    if scores is None:
        findings = read_csv(folder / "findings_summary.csv")
        gains = read_csv(folder / GAINS_FILE)
        if findings is not None:
            glance = _verdicts_glance(folder, findings)
            console.print(glance.details)
            show_table(console, *verdict_table(_add_setting_to_model(findings)))
        elif gains is not None:
            glance = _searches_glance(folder, gains)
            if glance.details:
                console.print(glance.details)
            header, rows = _gain_table(gains)
            # The last column names the run, as on the page.
            show_table(console, header[:-1], [row[:-1] for row in rows])
        else:
            return
    else:
        glance = scores.glance
        console.print(glance.details)
        subsets = read_csv(folder / "subsets_summary.csv")
        show_reference(folder, scores.summary, subsets, console)
        show_findings(folder, console)
        console.rule(_title_of_scores(scores))
        # A terminal is narrow: runs and shapes are on the page.
        header = scores.header
        shown = [i for i, name in enumerate(header) if name not in ("run", "shape")]
        cells = [[row[i] for i in shown] for row in scores.rows]
        show_table(console, [header[i] for i in shown], cells)
        console.print(
            "average over gold positions in %, difference in points, [95 % interval]"
        )
    page = _render(folder, command, scores)
    show_glance(console, glance)
    show_link(console, "sweep", page)


def _write_experiment(folder: Path, runs: Sequence[Path]) -> None:
    """Write the experiment's claims, and the paper's numbers for each run's model, into the sweep's folder."""
    runs = [run for run in runs if (run / "experiment.json").is_file()]
    if not runs:
        return
    facts = read_json(runs[0] / "experiment.json")
    references = [read_json(run / "reference.json", Objects) or [] for run in runs]
    rows = list[Row]()
    for run, reference in zip(runs, references, strict=True):
        metrics = read_csv(run / "metrics.csv")
        models = set() if metrics is None else set(metrics["model"])
        for row in reference:
            if row["model"] in models:
                rows.append({**row, "run": _run_label(run)})
    if rows:
        facts["note"] = ""  # a run in another setting has no row here
    else:
        # No run has a model of the paper: its numbers are shown without ours.
        rows = next(filter(None, references), [])
    write_json(folder / "experiment.json", facts)
    write_json(folder / "reference.json", rows)


def _run_label(run: Path) -> str:
    """Version and name: runs of different tasks may share a folder name."""
    return f"{run.parent.name}/{run.name}"


def _join_tables(
    files: Sequence[tuple[dict[str, str], Path]], axes: Sequence[str]
) -> str:
    """Join the CSV files of runs into one, behind new columns `run` and the swept keys.

    Args:
        files: Setting and CSV file of each run.
        axes: The swept keys.

    Returns:
        The text of the joined CSV.
    """
    columns = ["run", *axes]
    texts = [file.read_text(encoding="utf-8") for _, file in files]
    labels = [
        [_run_label(file.parent), *(setting.get(axis, "") for axis in axes)]
        for setting, file in files
    ]
    header = texts[0].partition("\n")[0]
    # Quoted cells, or different columns, need a parser.
    if any('"' in text or not text.startswith(f"{header}\n") for text in texts):
        frames = []
        for label, text in zip(labels, texts, strict=True):
            frame = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)
            label_columns = pd.DataFrame([label] * len(frame), columns=columns)
            frames.append(pd.concat([label_columns, frame], axis=1))
        return pd.concat(frames).to_csv(index=False, lineterminator="\n")
    # The tables of hundreds of runs, a million rows of attention, are joined as text.
    lines = [",".join([*columns, header]) + "\n"]
    for label, text in zip(labels, texts, strict=True):
        prefix = _csv_record(label) + ","
        lines += [prefix + row for row in text.splitlines(keepends=True)[1:]]
    return "".join(lines)


def _csv_record(values: Sequence[str]) -> str:
    """These values as one line of a CSV, quoted where needed, without its line end."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerow(values)
    return stream.getvalue().removesuffix("\n")


def summarise_again(folder: Path, console: Console) -> None:
    """Write a sweep's tables and page again from its runs, which have changed since."""
    open_undamaged(folder, only=[JOBS])
    jobs = read_json(folder / JOBS, Objects)
    # The outputs may have moved: the runs are where they lie now.
    runs = iter(sweep_runs(folder))
    for job in jobs:
        if job["folder"]:
            job["folder"] = str(next(runs))
    summarise(jobs, console, folder, command=RunDir(folder).command)


def render_sweep(folder: Path, command: str = "", formats: Iterable[str] = ()) -> Path:
    """Draw the figures of a sweep, write its report.html, and link to it from the pages of its runs.

    Args:
        folder: The sweep.
        command: The command that makes it; empty takes the one that its manifest records.
        formats: Further formats of figures, see :func:`posbench.plots.base.save`.

    Returns:
        The path of report.html.

    Raises:
        UserError: The sweep has neither scores nor verdicts nor searches, or a file cannot be read.
    """
    need_files(
        folder,
        "a sweep folder (it holds summary.csv)",
        "summary.csv",
        "findings_summary.csv",
        GAINS_FILE,
    )
    command = command or RunDir(folder).command
    return _render(folder, command, _read_scores(folder), formats)


def _render(
    folder: Path, command: str, scores: _Scores | None, formats: Iterable[str] = ()
) -> Path:
    """Draw and write what :func:`render_sweep` does; without ``scores`` the runs judged claims, or only searched."""
    if scores is not None:
        page = _render_scores(folder, command, scores, formats)
    elif (folder / "findings_summary.csv").is_file():
        page = _render_verdicts(folder, command)
    else:
        page = _render_searches(folder, command)
    link_to_parents(sweep_runs(folder))
    return page


class _Scores(NamedTuple):
    """The scores of a sweep as terminal and page show them.

    Attributes:
        summary: Rows of summary.csv.
        axes: The columns that distinguish settings.
        header: Header of the table of settings.
        rows: Its rows.
        glance: The first look.
    """

    summary: pd.DataFrame
    axes: list[str]
    header: list[str]
    rows: list[list[str]]
    glance: Glance


def _read_scores(folder: Path) -> _Scores | None:
    """Read the scores of a sweep; None where its runs scored nothing."""
    summary = read_csv(folder / "summary.csv")
    if summary is None:
        return None
    axes = setting_columns(summary)
    settings, label = _read_settings(summary, axes)
    glance = _scores_glance(folder, summary, settings, label)
    return _Scores(summary, axes, *_table_of(settings, label, summary), glance)


def _render_scores(
    folder: Path, command: str, scores: _Scores, formats: Iterable[str]
) -> Path:
    """Draw the figures of a sweep with scores and write its report.html; see :func:`render_sweep`."""
    summary, axes = scores.summary, scores.axes
    attention = read_csv(folder / "attention_summary.csv")
    subsets = read_csv(folder / "subsets_summary.csv")
    trend = read_csv(folder / "trend.csv")
    findings = read_csv(folder / "findings.csv")
    # A figure of hundreds of settings would not be readable.
    drawn_runs = _spread_runs(summary, axes)
    num_drawn = drawn_runs.nunique()
    num_runs = summary["run"].nunique()
    drawn_note = ""
    if num_drawn < num_runs:
        drawn_note = f" {num_drawn} of {num_runs} runs are drawn."

    figures = {"sweep": _score_figure(summary, axes, drawn_runs, drawn_note)}
    sections = [Section("Settings", "", scores.header, scores.rows, figures)]
    runs = sweep_runs(folder)
    drawn = summary[summary["run"].isin(drawn_runs)]
    pages = run_links(runs, folder)
    curve = curve_of_sweep(tables.without_missing_scores(drawn), axes, pages)
    if curve:
        text = f"A dot leads to the questions of its run at that position.{drawn_note}"
        insert = lambda max_bytes: curve  # noqa: E731
        sections.append(Section("By gold position", text, insert=insert))
    if attention is not None:
        attention = attention[attention["run"].isin(drawn_runs)]
        figure = plots.attention_sweep(attention, axes)
        caption = "Attention of the last prompt token to the item with the answer over its position, for each setting."
        figures = {"attention": (figure, caption + drawn_note)}
        sections.append(Section("Attention", figures=figures))
    # A swept number has a trend; other settings have claims alone.
    if trend is not None and findings is not None:
        caption = "Bands: 95 % intervals over questions. Dotted: no side preferred. Dashed: the unmodified model."
        figures = {"trend": (plots.trend(trend), caption)}
        sections.append(Section("Trend", "", *tables.findings_table(findings), figures))
    elif findings is not None:
        text = VERDICT_RULE
        sections.append(Section("Claims", text, *tables.findings_table(findings)))
    sections += paper_sections(folder, summary, subsets)
    models = list(dict.fromkeys(summary["model"]))
    return write_page(
        folder,
        _title_of_scores(scores),
        scores.glance,
        sections,
        models,
        provenance={"command": command},
        formats=formats,
        runs=runs,
    )


def _title_of_scores(scores: _Scores) -> str:
    """What a sweep with scores measured: methods, models, tasks and swept keys."""
    modified = plots.modified_of(scores.summary)
    return title(
        map(display_name, modified["method"]),
        list(dict.fromkeys(scores.summary["model"])),
        modified["task"],
        [axis for axis in scores.axes if axis not in METRIC_COLUMNS and axis != "run"],
    )


def _verdicts_glance(folder: Path, findings: pd.DataFrame) -> Glance:
    """The first look at a sweep whose runs judged claims and scored nothing.

    Args:
        folder: The sweep.
        findings: Its findings_summary.csv.
    """
    glance = findings_glance(findings)
    return replace(
        glance,
        next=f"posbench report {shlex.quote(str(folder.parents[2]))}",
        purpose="puts the figures of all runs on one page",
        details=" ".join([glance.details, *_job_notes(folder)]),
        sample=_failed_share(folder),
    )


def _failed_share(folder: Path) -> str:
    """Return `1 of 2 jobs failed`, as a verdict of the others is not that of the sweep; empty if none failed."""
    failed, num_jobs = _failed_jobs(folder)
    return f"{len(failed)} of {num_jobs} jobs failed" if failed else ""


def _searches_glance(folder: Path, gains: pd.DataFrame) -> Glance:
    """The first look at a sweep whose runs only searched; its next command is that of the first search that gains.

    Args:
        folder: The sweep.
        gains: Its held_back_summary.csv.
    """
    words = _gain_words(gains)
    counts = Counter(words)
    count = counts["gains"]
    num_checked = len(words) - counts["not checked"]
    word = f"{count} of {num_checked} checked gain"
    if num_checked == len(words):
        word = f"{count} of {num_checked} gain"
    elif not num_checked:
        word = "not checked"
    tone: Tone = "bad" if counts["harms"] else "open"
    if count == len(words):
        tone = "good"
    listed = ", ".join(f"{number} {text}" for text, number in counts.items())
    sentence = (
        f"Of {len(words)} {'search' if len(words) == 1 else 'searches'}, checked on held-back prompts "
        f"against the model without what was found: {listed}."
    )
    first_gaining = gains["run"].iloc[words.index("gains")] if count else ""
    command, purpose = "", ""
    for run in sweep_runs(folder):
        if _run_label(run) == first_gaining:
            glance = run_glance(run)
            command, purpose = glance.next, glance.purpose
    return Glance(
        word,
        tone,
        sentence,
        next=command,
        purpose=purpose,
        details=" ".join(_job_notes(folder)),
        sample=_failed_share(folder),
    )


def _gain_words(gains: pd.DataFrame) -> list[str]:
    """The verdict on each search, from rows of held_back_summary.csv."""
    return [gain_glance(facts, "").word for facts in gains.to_dict("records")]


def _gain_table(gains: pd.DataFrame) -> tables.Table:
    """One row per search: its swept values, the verdict and the gain on held-back prompts.

    Args:
        gains: Rows of held_back_summary.csv.
    """
    swept = list(gains.columns[1 : list(gains.columns).index("measure")])
    rows = []
    for word, row in zip(_gain_words(gains), gains.itertuples(), strict=True):
        numbers = [""] * 3
        if pd.notna(row.gain):
            gain = with_interval(row.gain, row.ci_low, row.ci_high)
            without = f"{row.unmodified:.3g}"
            if isinstance(row.beside, str):  # a list of methods
                without = f"{without} ({held_back.baseline(row._asdict())})"
            numbers = [gain, f"{row.found:.3g}", without]
        rows.append([word, row.measure, *numbers, str(row.n), str(row.run)])
    header = ["verdict", "measure", "gain", "found", "without", "n", "run"]
    settings = gains[swept].astype(str).to_numpy().tolist()
    cells = [[*setting, *row] for setting, row in zip(settings, rows, strict=True)]
    return [*swept, *header], cells


def _scores_glance(
    folder: Path, summary: pd.DataFrame, settings: Sequence[_Setting], label: str
) -> Glance:
    """The first look at a sweep with scores: what becomes of the position bias, and of the average.

    Args:
        folder: The sweep.
        summary: Its summary.csv.
        settings: Its settings.
        label: Their label.
    """
    findings = read_csv(folder / "findings.csv")
    details = [_sweep_sentence(settings, label), *_job_notes(folder)]
    if findings is not None:
        details.insert(1, study_answer(findings))
    scored = [s for s in settings if s.average and not s.lacks_answers]
    if not scored:
        sentence = "Nothing was scored in this sweep."
        if any(setting.lacks_answers for setting in settings):
            sentence = "Too many answers are missing in every setting to say anything."
        return Glance(CANNOT_TELL, "open", sentence, details=" ".join(details))
    of_settings = {str(run) for setting in settings for run in setting.runs}
    verdicts = {r: v for r, v in _verdicts(summary).items() if r in of_settings}
    word, tone, verdict = _word(list(verdicts.values()))
    worst, best = _extremes(scored, "average")

    def in_words(setting: _Setting) -> str:
        """The values of a setting as typed: with their key; those of several keys have theirs."""
        value = setting.name.removeprefix("seed ")
        return value if "=" in value else f"{label}={value}"

    def named(alike: Sequence[_Setting]) -> str:
        """The first of settings that read alike as typed, and the number of the others."""
        return in_words(alike[0]) + _others(alike)

    on_average = f"the average {_range(scored, 'average', ' %', ' %')}"
    averages = [setting.average for setting in best]
    numbers = [_number(f"highest average ({named(best)})", "%", *averages)]
    if len(best) == len(scored) > 1:
        rows = [setting.average for setting in scored]
        numbers = [_number(f"average in all {len(scored)}", "%", *rows)]
    count = f"{len(scored)} {noun_for(len(scored), 'setting')}"
    sentences = [
        f"Over {count} of {label}, {on_average}.",
        f"Over {count}, {on_average}.",
    ]
    biased = [setting for setting in scored if setting.has_bias]
    if biased:
        least, most = _extremes(biased, "bias")
        if len(least) == len(biased):
            where = f"in all {len(biased)} that measured it"
            if len(scored) == 1:
                where = f"({least[0].name})"
            elif len(biased) == 1:
                where = f"in the one where it could be measured ({least[0].name})"
            biases = (
                f"the position bias is {100 * least[0].bias.value:z.1f} points {where}"
            )
            rows = [setting.bias for setting in biased]
            numbers.insert(0, _number(f"position bias {where}", "points", *rows))
        else:
            quantity = "position bias"
            # A setting that is right everywhere has none to measure: the least measured is not the least.
            if len(biased) < len(scored):
                quantity = "measured position bias"
            biases = f"the {quantity} {_range(biased, 'bias', ' points', '')}"
            least_name = f"least {quantity} ({named(least)})"
            most_name = f"most {quantity} ({named(most)})"
            numbers = [
                _number(least_name, "points", *(setting.bias for setting in least)),
                _number(most_name, "points", *(setting.bias for setting in most)),
                *numbers,
            ]
        sentences = [
            f"Over {count} of {label}, {biases}, and {on_average}.",
            f"Over {count} of {label}, {biases}.",
            f"Over {count}, {biases}.",
            *sentences,
        ]
    command, purpose = "", ""
    if "run" in summary:
        command, purpose = _step_after_sweep(folder, verdicts, worst[0], best[0])
        if purpose == EXPORT_PURPOSE:
            purpose = f"{purpose}, of {in_words(best[0])}"
            if _are_at_an_end(best, scored):
                purpose += ", an end of the range that was tried"
    return Glance(
        word,
        tone,
        first_short(*sentences),
        tuple(numbers),
        command,
        purpose,
        details=" ".join(details),
        sample=_sample(scored, verdicts, verdict),
        rule=verdict_rule(verdict) if verdict else "",
    )


def _sample(
    settings: Sequence[_Setting], verdicts: Mapping[str, str], verdict: str
) -> str:
    """How many prompts the average of each setting rests on, and which settings have the sweep's verdict, if not all.

    Args:
        settings: The settings that were scored.
        verdicts: The verdict on each run.
        verdict: That of the sweep; empty without one.
    """
    sizes = sorted({int(setting.average.n) for setting in settings})
    count = f"{sizes[0]:,} to {sizes[-1]:,}" if len(sizes) > 1 else f"{sizes[0]:,}"
    names = [
        setting.name
        for setting in settings
        if any(verdicts.get(run) == verdict for run in setting.runs)
    ]
    text = f"{count} prompts in each setting"
    if 0 < len(names) <= MAX_NAMED_SETTINGS and len(names) < len(settings):
        text += f"; {verdict}: {', '.join(names)}"
    return text


def _are_at_an_end(best: Sequence[_Setting], settings: Sequence[_Setting]) -> bool:
    """Whether the best of more than two numbers are the smallest or the largest, so that one beyond may be better."""
    try:
        values = [float(setting.name) for setting in settings]
    except ValueError:
        return False
    ends = {min(values), max(values)}
    return len(values) > 2 and ends.issuperset(float(s.name) for s in best)


def _step_after_sweep(
    folder: Path, verdicts: Mapping[str, str], worst: _Setting, best: _Setting
) -> tuple[str, str]:
    """The command after a sweep and what it does; empty where nothing is to be done.

    Args:
        folder: The sweep.
        verdicts: The verdict on each run, by its name in the summary.
        worst: The setting with the lowest average.
        best: The one with the highest.
    """
    best_run, worst_run = best.runs[0], worst.runs[0]
    if verdicts.get(best_run) == FIXED:
        name = Path(best_run).name
        for run in sweep_runs(folder):
            if run.name == name:
                glance = run_glance(run)
                return glance.next, glance.purpose
    if worst is best:
        return "", ""
    names = [Path(run).name for run in (worst_run, best_run)]
    by_name = {run.name: run for run in sweep_runs(folder) if run.name in names}
    if by_name.keys() != {*names}:
        return "", ""  # the summary is of other runs
    runs = [by_name[name] for name in names]
    if len({run.parents[1].name for run in runs}) > 1:
        return "", ""  # scores of two tasks are not compared
    purpose = "compares the lowest and the highest average"
    asked = [RunDir(run).read_json("prompts.json").get("questions") for run in runs]
    if asked[0] and asked[0] == asked[1]:
        purpose += ", prompt by prompt"
    return f"posbench compare {' '.join(map(name_in_commands, runs))}", purpose


def _number(name: str, unit: str, *rows: Any) -> Number:
    """A number of a sweep.

    Args:
        name: What was measured.
        unit: Its unit.
        rows: Its row of summary.csv, or those of several settings whose values read alike; the number has an interval
            where their intervals do, too.
    """
    estimates = [Estimate(r.value, r.ci_low, r.ci_high, int(r.n)) for r in rows]
    numbers = [Number.of(name, each, unit, "z.1f", 100) for each in estimates]
    if len(set(numbers)) == 1:
        return numbers[0]
    value = estimates[0]._replace(ci_low=math.nan, ci_high=math.nan)
    return Number.of(name, value, unit, "z.1f", 100)


def _verdicts(summary: pd.DataFrame) -> dict[str, str]:
    """The verdict on the position bias of each run of a sweep, by run; without those that measured none."""
    if "run" not in summary:
        return {}
    verdicts = {}
    for run, rows in summary.groupby("run", sort=False):
        verdict = run_verdict(rows)
        if verdict:
            verdicts[str(run)] = verdict.name
    return verdicts


def _word(verdicts: Sequence[str]) -> tuple[str, Tone, str]:
    """Word and tone of a sweep, and the verdict in it: that of all its runs, or the best one with their number."""
    if not verdicts:
        return "measured", "open", ""
    order = (FIXED, NO_BIAS, BIAS, NOT_FIXED, CANNOT_TELL, CANNOT_DO)
    word = min(verdicts, key=order.index)
    count = verdicts.count(word)
    if count == len(verdicts):
        return word, TONES[word], word
    return f"{word} in {count} of {len(verdicts)}", "open", word


def _failed_jobs(folder: Path) -> tuple[list[str], int]:
    """The overrides of each job of a sweep that failed, and the number of all its jobs."""
    jobs = read_json(folder / JOBS, Objects) or []
    failed = [" ".join(job["overrides"]) for job in jobs if not job["folder"]]
    return failed, len(jobs)


def _job_notes(folder: Path) -> list[str]:
    """Return sentences on a sweep's jobs: which failed, and whether code or prompts differ between them."""
    notes = []
    failed, _ = _failed_jobs(folder)
    if failed:
        listed = "; ".join(failed[:MAX_LISTED])
        jobs = noun_for(len(failed), "job")
        notes.append(f"Not shown, as failed: {len(failed)} {jobs} ({listed}).")
    sizes = set()
    for run in sweep_runs(folder):
        budget = open_run_dir(run).facts(PROVENANCE).get("budget") or {}
        sizes.add((budget.get("settings", ""), budget.get("end", "")))
    runs = sweep_runs(folder)
    num_rescored = sum(was_rescored(open_run_dir(run)) for run in runs)
    if 0 < num_rescored < len(runs):
        notes.append(
            f"posbench rescore changed scores of {num_rescored} of {len(runs)} runs: what scores the others may be "
            f"other code. Next: posbench rescore {folder}."
        )
    if len(sizes) > 1:
        notes.append(
            "For the budget the jobs chose different sizes, or stopped at different questions: settings did not all "
            "answer the same prompts; claims compare those that all answered."
        )
    return notes


def _score_figure(
    summary: pd.DataFrame,
    axes: Sequence[str],
    drawn_runs: pd.Series,
    drawn_note: str,
) -> tuple[Figure, str]:
    """The figure of a sweep's scores, and its caption.

    Args:
        summary: Rows of summary.csv.
        axes: The columns that distinguish settings.
        drawn_runs: The runs that a figure over settings draws.
        drawn_note: Their number, for the caption.
    """
    compares_models = "model" in axes and set(axes) <= {"model", "method"}
    if compares_models and len(rows_at_positions(summary)):
        caption = "Score over the position of the answer, model by model. Bands: 95 % intervals."
        return accuracy_by_model(summary), caption
    rows = summary[summary["run"].isin(drawn_runs)]
    scores = tables.without_missing_scores(rows)
    figure = plots.factor_sweep(scores, axes)
    left = "score over all positions with 95 % intervals"
    right = "score over the position of the answer"
    caption = f"Left: {left}. Right: {right}."
    if len(figure.axes) > 2:
        change = "its change from the unmodified model"
        caption = f"Left: {left}. Middle: {right}. Right: {change}."
    caption += drawn_note
    is_missing = tables.has_missing_note(rows)
    if is_missing.any():
        num_missing = rows.loc[is_missing, "run"].nunique()
        caption += f" Answers are missing in {num_missing} of {rows['run'].nunique()} runs: not drawn."
    return figure, caption


def _render_verdicts(folder: Path, command: str) -> Path:
    """Write the page of a sweep whose runs judged claims and scored nothing; return its path.

    Args:
        folder: The sweep's folder, with the tables over all its runs.
        command: The command line of the sweep.

    Raises:
        UserError: No run has findings.
    """
    findings = read_csv(folder / "findings_summary.csv")
    if findings is None:
        raise UserError(
            "summary.csv", "no row", "rows of at least one run", "run the sweep first"
        )
    by_setting = _add_setting_to_model(findings)
    runs = by_setting.drop_duplicates("model")[["model", "run"]].astype(str)
    text = "Each has a page with its figures."
    sections = [
        Section("Verdicts", VERDICT_RULE, *verdict_table(by_setting)),
        Section("Numbers", "", *tables.findings_table(by_setting, models=True)),
        Section("Runs", text, ["model", "run"], runs.to_numpy().tolist()),
    ]
    if swept_keys(findings):
        for section in sections:
            section.header = [
                "model and setting" if name == "model" else name
                for name in section.header
            ]
    folders = sweep_runs(folder)
    settings = dict(zip(by_setting["run"], by_setting["model"], strict=True))
    pictures = _figures_of_experiment(folders, settings)
    if pictures:
        text = "More of them are on the pages of the runs."
        sections.insert(0, Section("Figures", text, pictures=pictures))
    studies = []
    for run in folders:
        study = name_in_config(open_run_dir(run).config(), "study")
        studies.append(f"study {study}")
    dotted = [column for column in findings if "." in column]
    page_title = title(studies, findings["model"].dropna(), (), dotted)
    return write_page(
        folder,
        page_title,
        _verdicts_glance(folder, findings),
        sections,
        provenance={"command": command},
        runs=folders,
    )


def _render_searches(folder: Path, command: str) -> Path:
    """Write the page of a sweep whose runs only searched; return its path.

    Args:
        folder: The sweep's folder, with the table of gains.
        command: The command line of the sweep.

    Raises:
        UserError: No search was checked.
    """
    gains = read_csv(folder / GAINS_FILE)
    if gains is None:
        raise UserError(
            GAINS_FILE, "no row", "rows of at least one run", "run the sweep first"
        )
    runs = sweep_runs(folder)
    configs = [open_run_dir(run).config() for run in runs]
    subjects, models, tasks = (
        [name_in_config(config, group) for config in configs]
        for group in ("search", "model", "task")
    )
    text = "Gain over the model without what was found, paired, with its 95 % interval; each run has the constants."
    return write_page(
        folder,
        title([f"search {name}" for name in subjects], models, tasks),
        _searches_glance(folder, gains),
        [Section("Held-back prompts", text, *_gain_table(gains))],
        provenance={"command": command},
        runs=runs,
    )


def _figures_of_experiment(
    runs: Sequence[Path], settings: Mapping[str, str]
) -> list[tuple[Path, str]]:
    """Return the figures that stand for those of the paper, with captions, as far as a page has room for them.

    An experiment names them as ``MODEL/FIGURE``, or as a figure of its first run; without names the first figures of
    the runs, one of each in turn.

    Args:
        runs: The runs of a sweep.
        settings: Model and swept values of each run with findings, by its label.
    """
    files: dict[str, Path] = {}
    captions: dict[Path, str] = {}
    panels: dict[str, Sequence[str]] = {}
    of_runs = list[list[Path]]()
    for run in runs:
        config = open_run_dir(run).config()
        panels = panels or config_group(config, "experiment").get("panels") or {}
        model = name_in_config(config, "model")
        setting = settings.get(_run_label(run)) or model
        texts = read_json(run / "figures" / CAPTIONS) or {}
        of_run = []
        for name, text in texts.items():
            file = run / "figures" / f"{name}.svg"
            if file.is_file():
                captions[file] = f"{setting}: {text}" if setting else text
                of_run.append(file)
                files.setdefault(f"{model}/{name}", file)
                files.setdefault(name, file)
        of_runs.append(of_run)
    chosen: dict[Path, str] = {}
    for item in panels:
        for name in panels[item]:
            # A model that did not run is replaced by the first one that has the figure.
            chosen_file = files.get(name) or files.get(name.rpartition("/")[2])
            if chosen_file:
                chosen.setdefault(chosen_file, f"{item}. {captions[chosen_file]}")
    if not any(panels.values()):
        in_turn = filter(None, chain.from_iterable(zip_longest(*of_runs)))
        chosen = {file: captions[file] for file in in_turn}
    pictures = []
    free_bytes = MAX_PICTURES_BYTES
    for file, caption in chosen.items():
        free_bytes -= len(embedded_figure(file, caption)["source"])
        if free_bytes >= 0:
            pictures.append((file, caption))
    return pictures


def _add_setting_to_model(findings: pd.DataFrame) -> pd.DataFrame:
    """Findings of many runs, each model's name followed by its swept values."""
    names = findings["model"].fillna("")
    for column in swept_keys(findings):
        names += f" {column.rpartition('.')[2]}=" + findings[column].astype(str)
    return findings.assign(model=names.str.strip())


def _spread_runs(summary: pd.DataFrame, axes: Sequence[str]) -> pd.Series:
    """The runs of at most :data:`MAX_SETTINGS` settings, spread evenly over all."""
    rows, settings, _ = plots.with_setting(summary, axes)
    step = max(len(settings) / MAX_SETTINGS, 1)
    count = min(len(settings), MAX_SETTINGS)
    drawn_settings = [settings[int(i * step)] for i in range(count)]
    return rows.loc[rows["setting"].isin(drawn_settings), "run"]


def setting_columns(summary: pd.DataFrame) -> list[str]:
    """The :func:`swept_columns`, and `run` where they do not distinguish all runs."""
    axes = swept_columns(summary)
    averages = rows_over_all_positions(plots.modified_of(summary))
    rows, _, _ = plots.with_setting(averages, axes)
    return [*axes, "run"] if rows["setting"].duplicated().any() else axes


def swept_columns(summary: pd.DataFrame) -> list[str]:
    """Return the columns that distinguish the settings of a sweep.

    The varying ones among model, method and task, then the columns between `run` and
    `model`; if there are none, `seed` or `method`.

    Args:
        summary: Rows of summary.csv, where swept keys stand between `run` and `model`.
    """
    swept = swept_keys(summary)
    rows = plots.modified_of(summary)
    names = [
        column
        for column in ("model", "method", "task")
        if rows[column].nunique() > 1 and f"{column} (swept)" not in swept
    ]
    columns: list[str] = []
    for column in [*names, *swept]:
        # A checkpoint's path is left out where its name already distinguishes the rows.
        if not columns or _splits_groups(rows, columns, column):
            columns.append(column)
    if columns:
        return columns
    return ["seed"] if rows["seed"].nunique() > 1 else ["method"]


def _splits_groups(rows: pd.DataFrame, columns: list[str], column: str) -> bool:
    """Whether a column varies between rows that agree in the other columns."""
    groups = rows.groupby(columns, dropna=False)[column]
    return bool((groups.nunique(dropna=False) > 1).any())


class _Setting(NamedTuple):
    """Results of a sweep in one setting; numbers are rows of summary.csv, or None.

    Attributes:
        name: The values of the swept columns.
        runs: Its runs, of several models or methods those under the method.
        average: Score over all gold positions.
        baseline: Score of the unmodified model.
        difference: The paired difference of the two.
        bias: Position bias.
        shape: Shape of the score over the gold position.
        base_shape: Shape for the unmodified model.
    """

    name: str
    runs: Sequence[Any]
    average: Any
    baseline: Any
    difference: Any
    bias: Any
    shape: str
    base_shape: str

    @property
    def lacks_answers(self) -> bool:
        """Whether it has no score because too many answers are missing."""
        return self.average is not None and bool(pd.isna(self.average.value))

    @property
    def has_bias(self) -> bool:
        """Whether its position bias could be measured."""
        return self.bias is not None and not pd.isna(self.bias.value)

    @property
    def rounded_bias(self) -> float:
        """The position bias without the noise of floating point; infinite where it could not be measured."""
        return round(self.bias.value, 9) if self.has_bias else math.inf


def sweep_table(
    summary: pd.DataFrame, axes: list[str]
) -> tuple[list[str], list[list[str]], str]:
    """The average and position bias of every setting of a sweep.

    Args:
        summary: Rows of summary.csv.
        axes: The columns that distinguish settings.

    Returns:
        Header, rows (one per setting) and a sentence; all empty but the sentence when
        nothing was scored.
    """
    settings, label = _read_settings(summary, axes)
    header, rows = _table_of(settings, label, summary)
    return header, rows, _sweep_sentence(settings, label)


def _table_of(
    settings: Sequence[_Setting], label: str, summary: pd.DataFrame
) -> tuple[list[str], list[list[str]]]:
    """Header and rows of :func:`sweep_table`, from settings and their label."""
    if not any(setting.average for setting in settings):
        return [], []
    has_bias = any(setting.has_bias for setting in settings)
    header = [label, metric_name(summary), "unmodified", "difference"]
    if has_bias:
        header += ["position bias", "shape"]
    header += ["n", "run"]
    table = []
    for setting in settings:
        cells = [
            setting.name,
            tables.cell(setting.average, "z.1f"),
            tables.cell(setting.baseline, "z.1f"),
            tables.cell(setting.difference, "+z.1f"),
        ]
        if has_bias:
            cells += [tables.cell(setting.bias, "z.1f"), setting.shape]
        cells.append("" if setting.average is None else str(setting.average.n))
        cells.append(", ".join(map(str, setting.runs)) if "run" in summary else "")
        table.append(cells)
    return header, table


def _read_settings(
    summary: pd.DataFrame, axes: list[str]
) -> tuple[list[_Setting], str]:
    """Return the settings of a sweep in drawing order with their estimates, and a label for them.

    Args:
        summary: Rows of summary.csv.
        axes: The columns that distinguish settings.
    """
    rows, names, label = plots.with_setting(summary, axes)
    # Where answers are missing nothing is said but that.
    rows.loc[tables.has_missing_note(rows), ["value", "ci_low", "ci_high"]] = math.nan
    # A sweep summarised from one folder has no runs.
    run_column = "run" if "run" in rows else "setting"
    is_unmodified = rows["method"] == UNMODIFIED
    settings_with_method = rows.loc[~is_unmodified, "setting"]
    modified = rows[~is_unmodified | ~rows["setting"].isin(settings_with_method)]
    unmodified = rows[is_unmodified]
    averages = _by_key(rows_over_all_positions(modified), "setting")
    differences = rows_over_all_positions(modified, "difference")
    differences_of = _by_key(differences.dropna(subset="ci_low"), "setting")
    biases = _by_key(rows_over_all_positions(modified, "position_bias"), "setting")
    baselines = _by_key(rows_over_all_positions(unmodified), run_column)
    runs_of = rows.groupby("setting")[run_column].unique()
    modified_runs_of = modified.groupby("setting")[run_column].unique()
    settings = []
    for name in names:
        base_runs = [run for run in runs_of[name] if run in baselines]
        baseline = None
        base_shape = ""
        if base_runs:
            baseline = baselines[base_runs[0]]
            rows_of_run = unmodified[unmodified[run_column] == base_runs[0]]
            base_shape = shape_in_metrics(rows_of_run, UNMODIFIED)
        settings.append(
            _Setting(
                name=name,
                runs=modified_runs_of[name],
                average=averages.get(name),
                baseline=baseline,
                difference=differences_of.get(name),
                bias=biases.get(name),
                shape=shape_in_metrics(*_rows_of_setting(modified, name)),
                base_shape=base_shape,
            )
        )
    return settings, label


def _sweep_sentence(settings: Sequence[_Setting], label: str) -> str:
    """The result over all settings of a sweep; the table has the numbers of single settings.

    Args:
        settings: The settings.
        label: Their label.
    """
    if not any(setting.average for setting in settings):
        return "Nothing was scored in this sweep."
    parts = []
    scored = [s for s in settings if s.average and not s.lacks_answers]
    if scored:
        average = f"the average {_range(scored, 'average', ' %', ' %')}"
        if len(scored) > 1:
            average = f"Over {len(scored)} settings of {label}, {average}"
        parts.append(average)
    # Settings without valid scores are named apart.
    without = [setting.name for setting in settings if setting.lacks_answers]
    if without:
        names = ", ".join(without[:MAX_LISTED])
        count = f"{len(without)} {noun_for(len(without), 'setting')}"
        parts.append(
            f"too many answers are missing to say anything in {count} ({names})"
        )
    counts = Counter(
        _direction(setting.difference) for setting in settings if setting.difference
    )
    if counts:
        directions = ("raise it", "lower it", "cannot be told apart")
        singular = {"raise it": "raises it", "lower it": "lowers it"}
        changes = ", ".join(
            f"{counts[d]} {singular.get(d, d) if counts[d] == 1 else d}"
            for d in directions
            if counts[d]
        )
        total = counts.total()
        text = f"of {total} compared with the unmodified model, {changes}"
        # Some differ by chance alone.
        if total >= 10:
            text += " (each by an interval of its own: of 20 without an effect one is taken for more by chance)"
        parts.append(text)
    parts += _bias_parts(settings)
    # Of the unmodified model, which may differ between settings of the task.
    shapes = Counter(setting.base_shape for setting in settings if setting.base_shape)
    num_without = sum(
        bool(setting.baseline and not setting.base_shape) for setting in settings
    )
    if shapes and num_without:
        shapes["not measurable"] = num_without
    if len(shapes) == 1:
        parts.append(f"shape of the unmodified model: {next(iter(shapes))}")
    elif shapes:
        counted = ", ".join(f"{shape} ({count})" for shape, count in shapes.items())
        parts.append(f"shape of the unmodified model by settings: {counted}")
    return sentence_case("; ".join(parts))


def _bias_parts(settings: Sequence[_Setting]) -> list[str]:
    """Return phrases on the range of the position bias over settings, and on settings where it cannot be measured.

    The list is empty if it was measured in no setting.
    """
    biased = [setting for setting in settings if setting.has_bias]
    if not biased:
        return []
    parts = [f"the position bias {_range(biased, 'bias', '', ' points')}"]
    unmeasured = [
        f"{setting.name} ({tables.cell(setting.bias, '')})"
        for setting in settings
        if setting.bias and not setting.has_bias
    ]
    if len(unmeasured) > MAX_LISTED:
        parts.append(f"it cannot be measured in {len(unmeasured)} settings")
    elif unmeasured:
        parts.append(f"it cannot be measured for {' and '.join(unmeasured)}")
    return parts


def _direction(difference: Any) -> str:
    """The effect on the average, from its difference to the unmodified model, in words."""
    if difference.ci_low > 0:
        return "raise it"
    if difference.ci_high < 0:
        return "lower it"
    return "cannot be told apart"


def _rows_of_setting(rows: pd.DataFrame, setting: str) -> tuple[pd.DataFrame, str]:
    """The rows of a setting's first run, and the method that they are of."""
    of_setting = rows[rows["setting"] == setting]
    if "run" in of_setting:
        of_setting = of_setting[of_setting["run"] == of_setting["run"].iloc[0]]
    return of_setting, str(of_setting["method"].iloc[0])


def _by_key(rows: pd.DataFrame, column: str) -> Mapping[str, Any]:
    """The first row for each value of a column."""
    return {
        getattr(row, column): row for row in rows.drop_duplicates(column).itertuples()
    }


def _reads_alike(first: float, second: float) -> bool:
    """Whether two shares (0..1) are one number where they are printed."""
    return f"{100 * first:z.1f}" == f"{100 * second:z.1f}"


def _extremes(
    settings: Sequence[_Setting], quantity: Literal["average", "bias"]
) -> tuple[list[_Setting], list[_Setting]]:
    """The settings with the lowest value of a quantity, and those with the highest.

    Values that read alike are a tie; the setting with the least position bias comes first, and is the one to name.

    Args:
        settings: Settings in which the quantity was measured.
        quantity: What is compared.
    """
    values = [getattr(setting, quantity).value for setting in settings]

    def tied(extreme: float) -> list[_Setting]:
        pairs = zip(settings, values, strict=True)
        alike = [setting for setting, value in pairs if _reads_alike(value, extreme)]
        return sorted(alike, key=lambda s: s.rounded_bias)

    return tied(min(values)), tied(max(values))


def _others(alike: Sequence[_Setting]) -> str:
    """Return ` and 2 others` behind the name of the first of settings that read alike; empty for one."""
    count = len(alike) - 1
    return f" and {count} {noun_for(count, 'other')}" if count else ""


def _range(
    settings: Sequence[_Setting],
    quantity: Literal["average", "bias"],
    lowest_unit: str,
    highest_unit: str,
) -> str:
    """Return `runs from 70.0 % (a) to 80.0 % (b)`, the lowest and the highest value of a quantity.

    Of a single one it is `is 80.0 % (b)`, of several that read alike `is 80.0 % in all 3`.

    Args:
        settings: Settings in which the quantity was measured.
        quantity: What is compared.
        lowest_unit: Unit after the lowest value, empty where the highest one's is enough.
        highest_unit: Unit after the highest value.
    """
    lowest, highest = _extremes(settings, quantity)
    lowest_text, highest_text = (
        f"{100 * getattr(alike[0], quantity).value:z.1f}{unit}"
        for alike, unit in ((lowest, lowest_unit), (highest, highest_unit))
    )
    highest_part = f"{highest_text} ({highest[0].name}{_others(highest)})"
    if len(settings) == 1:
        return f"is {highest_part}"
    if len(highest) == len(settings):
        return f"is {highest_text} in all {len(settings)}"
    lowest_part = f"{lowest_text} ({lowest[0].name}{_others(lowest)})"
    return f"runs from {lowest_part} to {highest_part}"
