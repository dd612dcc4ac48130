"""From a run folder to figures, one self-contained HTML page and a terminal table; reads folders, never
models."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import yaml
from matplotlib.figure import Figure

from posbench import paths
from posbench.errors import UserError
from posbench.files.atomic import write_bytes
from posbench.plots import base as plots
from posbench.plots import search as curve_plots
from posbench.plots import sweep as sweep_plots
from posbench.plots.base import UNMODIFIED, at_positions, overall
from posbench.report import tables
from posbench.run.folder import RunDir
from posbench.stats.tables import COLUMNS as METRICS
from posbench.stats.tables import SUBSET_COLUMNS
from posbench.studies.base import FINDING_COLUMNS

FINDING_TEXTS = ("claim", "statistic", "verdict", "note")
TEXT_COLUMNS = ("run", "model", "method", "task", "position", "metric", "channel", "site", *FINDING_TEXTS)
SEARCH = (
    "channel",
    "factor",
    "layer_first",
    "layer_last",
    "loss",
    "loss_unmodified",
    "n",
    "monotone_layers",
    "smoothness",
)
ATTENTION = ("model", "method", "task", "gold_position", "layer", "pair", "attention")
BIAS_TEXT = (
    "In points, 95 % bootstrap intervals over questions, the same questions for all methods. Position bias: standard deviation "
    "of the score over gold positions without what sampling noise adds; 0 where noise explains all of it. A gap is above 0 by "
    "noise alone: beside it stands what it is when positions are shuffled, with the range of 95 % of the shuffles."
)
TREND_TEXT = (
    "Centre of attention: for each prompt the centre of mass of the last token's attention over the items, 0 the first item and "
    "1 the last, in the layer of the attention figure. Position bias: standard deviation over gold positions without sampling "
    "noise. Rank correlations are Spearman's over the settings."
)
SHOWN = 8000  # characters of a prompt in the report
NEEDED = {
    "metrics": METRICS,
    "summary": METRICS,
    "subsets": SUBSET_COLUMNS,
    "subsets_summary": SUBSET_COLUMNS,
    "attention": ATTENTION,
    "attention_summary": ATTENTION,
    "findings": FINDING_COLUMNS,
    "trend": ("group", "axis", "statistic", "number", "value", "low", "high", "n"),
    "search": (*SEARCH, "selected"),
    "channels": ("channel", "site", "layer", "position", "value", "sliding_mean"),
    "generations": ("generation", "best", "mean", "worst", "evaluations", "candidates", "unmodified"),
    "curve": ("part", "x", "y"),
    "search (scales)": (
        "fitness",
        "beginning",
        "middle",
        "end",
        "scored",
        "complete",
        "unmodified",
        "selected",
    ),
    "search (epochs)": ("epoch", "loss"),
}


@dataclass
class Section:
    """One part of the page: a heading, then whatever is given of text, table, figure and verbatim block."""

    title: str
    text: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    figures: list[tuple[str, str]] = field(default_factory=list)  # data URI, caption
    block: str = ""
    folded: bool = False


def render_run(folder: Path) -> Path:
    """Draw every figure that a run folder's CSVs allow, and write report.html.

    Args:
        folder: A run folder; metrics.csv, attention.csv, search.csv, channels.csv, found.yaml,
            provenance.json and reference.json and experiment.json are each optional, and what they would show
            is left out with them.

    Returns:
        Path of report.html.

    Raises:
        UserError: The folder is missing, is no run folder, or holds a file that cannot be read.
    """
    names = ("config.yaml", "study.json", "metrics.csv", "search.csv", "attention.csv", "channels.csv")
    _check_folder(folder, "a run folder (it holds config.yaml)", names)
    metrics, attention, search, channels, subsets = (
        read_csv(folder / f"{n}.csv") for n in ("metrics", "attention", "search", "channels", "subsets")
    )
    sections = _study(folder)
    if metrics is not None:
        header, rows = tables.position_table(metrics)
        ran = _json(folder / "method.json") or {}
        ran = f"As applied: {tables.applied(ran)}. " if len(ran) > 1 else ""
        what = plots.metric_name(metrics)
        text = ran + f"{what.capitalize()} in % and paired difference in points, each with its 95 % interval."
        text = " ".join(filter(None, (text, shortened(folder))))
        positions = bool(len(at_positions(metrics)))
        sections.append(
            Section(
                f"{what.capitalize()} by gold position" if positions else what.capitalize(),
                text,
                header,
                rows,
            )
        )
        if positions:
            caption = f"{what.capitalize()} over the position of the answer. Bands: 95 % intervals."
            sections[-1].figures.append(
                _figure(folder, "accuracy", plots.accuracy_by_position(metrics), caption)
            )
        header, rows = tables.bias_table(metrics)
        if rows:
            sections.append(Section("Position bias", BIAS_TEXT, header, rows))
        sections += _experiment(folder, tables.with_subsets(metrics, subsets))
        others = tables.other_scores(metrics)
        if len(others):
            header, rows = tables.subset_table(others, own="")
            sections.append(
                Section("Other scores", "In their own unit, over all examples that have them.", header, rows)
            )
    if subsets is not None:
        header, rows = tables.subset_table(subsets)
        text = "The task's own metric in % and points, others in their own unit; 95 % intervals over questions within subsets."
        figure = _figure(
            folder, "subsets", plots.by_subset(subsets), "Every subset, and below the line every average."
        )
        sections.append(Section("By subset", text, header, rows, [figure]))
    if attention is not None:
        caption = "Left: attention of the last prompt token to the item with the answer. Right: what the method changes in each layer."
        if attention["method"].nunique() == 1:
            caption = "Attention of the last prompt token to the item with the answer: strongest layer (left) and every layer (right)."
        sections.append(
            Section(
                "Attention",
                figures=[_figure(folder, "attention", plots.attention_by_position(attention), caption)],
            )
        )
    if search is not None and "fitness" in search:
        sections.append(_curve_search(folder, search))
    elif search is not None and "epoch" in search:
        header, rows = (
            list(search),
            [[f"{value:.4g}" for value in row] for row in search.itertuples(index=False)],
        )
        sections.append(
            Section(
                "Search", "Mean loss and the scales at the end of every epoch.", header, rows, folded=True
            )
        )
    elif search is not None:
        sections.append(_search(folder, search))
    if channels is not None:
        caption = (
            "Mean over random strings at each token position (thin) and its sliding mean (thick), which the search fits: a line "
            "that keeps rising or falling means that the channel encodes position. Attention input: after a layer's first norm. "
            "Residual: 0 is the embedding, the last one comes after the final norm."
        )
        drawn = [(c, plots.channel_curves(channels, c)) for c in channels["channel"].unique()]
        figures = [
            _figure(folder, f"channel_{_slug(c)}", figure, f"Channel {c}. {caption}") for c, figure in drawn
        ]
        sections.append(Section("Positional channel", figures=figures))
    if (folder / "found.yaml").is_file():
        sections.append(
            Section("Found constants", "Paste into the model's YAML.", block=_text(folder / "found.yaml"))
        )
    prompts = _json(folder / "prompts.json") or {}
    for subset, first in prompts.get("first", {}).items():
        every = f"all {prompts['prompts']} prompts: {prompts['sha256'][:16]}"
        text = f"{first['tokens']} tokens, sha256 {first['sha256'][:16]}; {every}."
        shown = (
            first["text"]
            if len(first["text"]) <= SHOWN
            else first["text"][: SHOWN // 2] + "\n[...]\n" + first["text"][-SHOWN // 2 :]
        )
        sections.append(Section(f"First prompt {subset}".strip(), text, block=shown, folded=True))
    provenance = _json(folder / "provenance.json") or {}
    sections += _origin(folder, provenance)
    findings = read_csv(folder / "findings.csv")
    sentence = (
        tables.headline(metrics) if findings is None or metrics is not None else tables.verdicts(findings)
    )
    return _write(folder, _html(folder.name, sentence, _warning(folder), sections))


def render_sweep(folder: Path) -> Path:
    """Draw a sweep's figures and write its report.html.

    Args:
        folder: Holds summary.csv (run, the swept columns, then the columns of metrics.csv); optionally
            attention_summary.csv (the same in front of the columns of attention.csv) and reference.json (a
            list of rows).

    Returns:
        Path of report.html.

    Raises:
        UserError: The folder or summary.csv is missing, or a file cannot be read.
    """
    _check_folder(folder, "a sweep folder (it holds summary.csv)", ("summary.csv",))
    summary, attention, subsets = (
        read_csv(folder / f"{n}.csv") for n in ("summary", "attention_summary", "subsets_summary")
    )
    if summary is None:
        raise UserError("summary.csv", "no row", "rows of at least one run", "run the sweep first")
    accuracy = overall(summary[summary["method"] != UNMODIFIED])
    accuracy = overall(summary) if accuracy.empty else accuracy
    axes = tables.swept_columns(summary)
    if sweep_plots.with_setting(accuracy, axes)[0]["setting"].duplicated().any():
        axes.append("run")
    header, rows, sentence = tables.sweep_table(summary, axes)
    caption = (
        "Left: score over all positions with 95 % intervals. Right: score over the position of the answer."
    )
    figures = [_figure(folder, "sweep", sweep_plots.factor_sweep(summary, axes), caption)]
    if attention is not None:
        caption = "Attention of the last prompt token to the item with the answer over its position, for each setting."
        figures.append(_figure(folder, "attention", sweep_plots.attention_sweep(attention, axes), caption))
    text = "Score over all positions in % with its 95 % interval; difference from unmodified and position bias in points."
    sections = [Section("Settings", text, header, rows, figures)]
    trend, findings = read_csv(folder / "trend.csv"), read_csv(folder / "findings.csv")
    if trend is not None and findings is not None:
        caption = (
            "Bands: 95 % bootstrap intervals over questions. Dotted: no lean. Dashed: the unmodified model."
        )
        drawn = _figure(folder, "trend", sweep_plots.trend(trend), caption)
        sections.append(Section("Lean", TREND_TEXT, *tables.findings_table(findings), [drawn]))
    sections += _experiment(folder, tables.with_subsets(summary, subsets))
    return _write(folder, _html(folder.name, sentence, "", sections))


# Words and tables


def shortened(folder: Path) -> str:
    """How many prompts of a run were shortened to the context window, in words; empty where none was."""
    return tables.shortened(row for row in RunDir(folder).rows("predictions.jsonl") if "error" not in row)


# Sections


def study_tables(folder: Path, names: Sequence[str]) -> dict[str, pd.DataFrame]:
    """The tables of a study as its files hold them; text such as ``none`` stays text."""
    read = functools.partial(pd.read_csv, keep_default_na=False, na_values=["", "nan"])
    return {name: _read(folder / f"{name}.csv", read, "a CSV as posbench writes it") for name in names}


def _study(folder: Path) -> list[Section]:
    """What a study measured: its verdicts, and every figure it draws."""
    facts = _json(folder / "study.json")
    if not facts:
        return []
    # A study brings its model library along, which no other page needs.
    from posbench.pipeline.config import study_of

    study, _ = study_of(
        _read(folder / "config.yaml", lambda p: yaml.safe_load(p.read_text()), "YAML")["study"]
    )
    title = (type(study).__doc__ or facts["study"]).split("\n")[0].rstrip(".")
    section = Section(title)
    findings = read_csv(folder / "findings.csv")
    if findings is not None:
        section.header, section.rows = tables.findings_table(findings)
    for name, (figure, caption) in study.figures(study_tables(folder, facts["tables"])).items():
        section.figures.append(_figure(folder, name, figure, caption))
    files = ", ".join(f"{name}.csv" for name in facts["tables"])
    experiment = _json(folder / "experiment.json") or {}
    title = f"{experiment['title']}." if experiment else ""
    claims = "; ".join(experiment.get("claims", []))
    section.text = " ".join(
        filter(None, [title, f"The paper reads: {claims}." if claims else "", f"Numbers: {files}."])
    )
    return [section]


def _experiment(folder: Path, metrics: pd.DataFrame) -> list[Section]:
    """What the paper says, and its numbers beside ours where the same model ran."""
    facts, reference = _json(folder / "experiment.json") or {}, _json(folder / "reference.json") or []
    if not facts and not reference:
        return []
    try:
        header, rows = tables.reference_table(metrics, list(reference))
        text = tables.reference_text(facts, list(reference), bool(rows))
    except (KeyError, TypeError, ValueError) as error:
        allowed = "a list of rows with model, method, task, position, metric, value"
        raise _unreadable(folder / "reference.json", error, allowed) from error
    return [Section(str(facts.get("title", "Beside the paper's numbers")), text, header, rows)]


def _search(folder: Path, search: pd.DataFrame) -> Section:
    best = search.sort_values("loss", kind="stable").head(10)
    won = search[search["selected"].astype(str).str.lower().isin(("true", "1"))]
    text = f"The ten best of {len(search)} candidates by loss on the calibration examples."
    if won.empty:
        text += " None was selected: the search kept the unmodified model."
    header = ["candidate", "loss", "unmodified", "n", "monotone layers", "smoothness", "selected"]
    rows = []
    for index, row in best.iterrows():
        losses = [f"{row[column]:.4f}" for column in ("loss", "loss_unmodified")]
        counts = [str(row["n"]), str(row["monotone_layers"]), f"{row['smoothness']:.3g}"]
        rows.append([plots.candidate_label(row), *losses, *counts, "yes" if index in won.index else ""])
    figure = _figure(
        folder,
        "candidates",
        plots.candidate_losses(search),
        "Loss of the best candidates; dashed: unmodified model.",
    )
    return Section("Search", text, header, rows, [figure])


def _curve_search(folder: Path, search: pd.DataFrame) -> Section:
    """The genetic search for one scale per layer: its best candidates, its course and its curve."""
    scales = [column for column in search if column.startswith("scale_")]
    best, full = search[search["complete"]].head(10), len(search) * int(search["scored"].max())
    text = (
        f"The ten best of {len(search)} candidates, accuracy in %. {int(search['scored'].sum())} of {full} answers were asked "
        "for: a candidate that can no longer become a parent is given up."
    )
    header = ["scales", "fitness", "beginning", "middle", "end", ""]
    rows = [
        [
            ", ".join(f"{row[column]:.2f}" for column in scales),
            *(f"{100 * row[column]:.1f}" for column in header[1:5]),
            "selected" if row["selected"] else "unmodified" if row["unmodified"] else "",
        ]
        for _, row in best.iterrows()
    ]
    section = Section("Search", text, header, rows)
    generations, curve = read_csv(folder / "generations.csv"), read_csv(folder / "curve.csv")
    if generations is not None:
        caption = "Fitness of the best candidate and of the parents on average, generation by generation."
        section.figures.append(_figure(folder, "convergence", curve_plots.convergence(generations), caption))
    if curve is not None:
        caption = (
            "Left: control points and curve. Middle: the scale of every layer. Right: accuracy on the calibration questions "
            "with the answer at the beginning, in the middle and at the end, and their weighted mean, the fitness."
        )
        section.figures.append(_figure(folder, "curve", curve_plots.curve(curve, search), caption))
    return section


def _origin(folder: Path, provenance: Mapping[str, Any]) -> list[Section]:
    """Config, how to repeat the run, and where it was made."""
    sections = []
    if (folder / "config.yaml").is_file():
        sections.append(Section("Config", block=_text(folder / "config.yaml"), folded=True))
    if provenance.get("command"):
        sections.append(
            Section("How to reproduce", "The command of this run:", block=str(provenance["command"]))
        )
    facts = [[k, v] for k, v in _flat(provenance) if k != "command"]
    return [*sections, Section("Provenance", header=["what", "value"], rows=facts)] if facts else sections


def _flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested mappings as dotted keys; what is empty is left out."""
    out: list[tuple[str, str]] = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            out += _flat(value, f"{prefix}{key}.")
        elif value is not None:
            out.append((f"{prefix}{key}", str(value)))
    return out


def _warning(folder: Path) -> str:
    status = _json(folder / "status.json") or {}
    if status.get("state") not in ("failed", "incomplete"):
        return ""
    return f"This run is {status['state']}; its numbers may be partial. {status.get('error') or ''}".strip()


# Files


def _check_folder(folder: Path, allowed: str, names: Sequence[str]) -> None:
    if not any((folder / name).is_file() for name in names):
        hint = (
            "posbench prints the folder of each run" if folder.is_dir() else "no such folder; check the path"
        )
        raise UserError("DIR", str(folder), allowed, hint)


def _unreadable(path: Path, error: Exception, allowed: str) -> UserError:
    return UserError(path.name, str(path), allowed, f"repeat the run that wrote it ({error})")


def _read(path: Path, parse: Callable[[Path], Any], allowed: str) -> Any:
    """A file's parsed content, or None where there is no file."""
    if not path.is_file():
        return None
    try:
        return parse(path)
    except (OSError, ValueError) as error:  # pandas', json's and Unicode's errors are ValueErrors
        raise _unreadable(path, error, allowed) from error


def read_csv(path: Path) -> pd.DataFrame | None:
    """A CSV with text columns kept as text (`none` and `null` are names, not gaps); None if absent or without
    rows."""

    def parse(path: Path) -> pd.DataFrame:
        names = pd.read_csv(path, nrows=0).columns
        text = {c: str for c in names if c.removesuffix(".1") in TEXT_COLUMNS}
        if path.stem == "channels":
            text.pop("position")  # a token position here, not a gold position or ``all``
        frame = pd.read_csv(path, dtype=text, keep_default_na=False, na_values=["", "nan"])
        # A swept `method` stands beside the `method` column of the metrics: the later one is the metrics'
        # own.
        twice = [c.removesuffix(".1") for c in names if c.endswith(".1") and c.removesuffix(".1") in names]
        return frame.rename(columns={c: f"{c} (swept)" for c in twice} | {f"{c}.1": c for c in twice})

    frame = _read(path, parse, f"a CSV with {', '.join(NEEDED[path.stem])}")
    # The searches for scales leave other columns than the search for a channel.
    kinds = (
        {"fitness": "search (scales)", "epoch": "search (epochs)"}
        if path.stem == "search" and frame is not None
        else {}
    )
    needed = NEEDED[next((name for column, name in kinds.items() if column in frame), path.stem)]
    if frame is not None and not set(needed) <= set(frame):
        missing = ValueError(f"columns missing: {', '.join(c for c in needed if c not in frame)}")
        raise _unreadable(path, missing, f"a CSV with {', '.join(needed)}")
    return None if frame is None or frame.empty else frame


def _json(path: Path) -> Any:
    return _read(path, lambda p: json.loads(p.read_text(encoding="utf-8")), "JSON as posbench writes it")


def _text(path: Path) -> str:
    return str(_read(path, lambda p: p.read_text(encoding="utf-8"), "UTF-8 text"))


def _slug(name: Any) -> str:
    return "".join(c if c.isalnum() else "-" for c in str(name))


def _figure(folder: Path, stem: str, figure: Figure, caption: str) -> tuple[str, str]:
    """Save a figure in the folder; its PNG as a data URI, and its caption."""
    png, _ = plots.save(figure, folder / "figures" / stem)
    return "data:image/png;base64," + base64.b64encode(png.read_bytes()).decode(), caption


def _html(title: str, sentence: str, warning: str, sections: Sequence[Section]) -> str:
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        (paths.PACKAGE / "report" / "report.html.j2").read_text()
    )
    return template.render(title=title, sentence=sentence, warning=warning, sections=sections)


def _write(folder: Path, page: str) -> Path:
    write_bytes(folder / "report.html", page.encode())
    return folder / "report.html"
