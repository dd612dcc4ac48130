"""From a run folder to figures and one self-contained HTML page; reads folders, never models."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import yaml

from posbench import paths
from posbench.files.atomic import write_bytes
from posbench.plots.attention import attention_by_position
from posbench.plots.base import save
from posbench.plots.scores import accuracy_by_position, by_subset
from posbench.plots.section import Section
from posbench.report import tables
from posbench.report.folder import need_folder, read, read_csv, read_json, read_text, study_tables, unreadable
from posbench.report.paper import reference_table, reference_text, with_subsets
from posbench.report.text import applied, headline, shortened, verdicts
from posbench.run.folder import RunDir
from posbench.schema import instantiate
from posbench.search.base import Search
from posbench.stats.frames import at_positions, metric_name
from posbench.studies.base import Study

BIAS_TEXT = (
    "In points, 95 % bootstrap intervals over questions, the same questions for all methods. Position bias: standard "
    "deviation of the score over gold positions without what sampling noise adds; 0 where noise explains all of it. A gap "
    "is above 0 by noise alone: beside it stands what it is when positions are shuffled, with the range of 95 % of the "
    "shuffles."
)
SHOWN = 8000  # characters of a prompt in the report


def render_run(folder: Path) -> Path:
    """Draw every figure that a run folder's files allow, and write report.html; what is not there is left
    out.

    Returns:
        Path of report.html.

    Raises:
        UserError: The folder is missing, is no run folder, or holds a file that cannot be read.
    """
    names = ("config.yaml", "study.json", "metrics.csv", "search.csv", "attention.csv")
    need_folder(folder, "a run folder (it holds config.yaml)", *names)
    metrics, subsets, findings = (read_csv(folder / f"{n}.csv") for n in ("metrics", "subsets", "findings"))
    config = read(folder / "config.yaml", lambda p: yaml.safe_load(p.read_text()), "YAML") or {}
    sections = _study(folder, config)
    if metrics is not None:
        sections += _scores(folder, metrics, subsets)
    sections += _subsets(subsets) + _attention(read_csv(folder / "attention.csv"))
    if "search" in config.get("stages", ()):
        search: Search = instantiate(config["search"], Search, "search")  # type: ignore[type-abstract]
        sections += search.sections(lambda name: read_csv(folder / f"{name}.csv"))
    if (folder / "found.yaml").is_file():
        text = "Paste into the model's YAML."
        sections.append(Section("Found constants", text, block=read_text(folder / "found.yaml")))
    sections += _prompts(read_json(folder / "prompts.json") or {})
    sections += _origin(folder, read_json(folder / "provenance.json") or {})
    sentence = said(metrics) if findings is None or metrics is not None else verdicts(findings)
    return write_page(folder, sentence, _warning(folder), sections)


def said(metrics: pd.DataFrame | None) -> str:
    """The headline of a run."""
    return headline(metrics, None if metrics is None else tables.bias_table(metrics))


def cut_prompts(folder: Path) -> str:
    """How many prompts of a run were shortened to the context window, in words; empty where none was."""
    return shortened(row for row in RunDir(folder).rows("predictions.jsonl") if "error" not in row)


# Sections


def _study(folder: Path, config: Mapping[str, Any]) -> list[Section]:
    """What a study measured: its verdicts, and every figure it draws."""
    facts = read_json(folder / "study.json")
    if not facts:
        return []
    study: Study = instantiate(config["study"], Study, "study")  # type: ignore[type-abstract]
    section = Section((type(study).__doc__ or facts["study"]).split("\n")[0].rstrip("."))
    findings = read_csv(folder / "findings.csv")
    if findings is not None:
        section.header, section.rows = tables.findings_table(findings)
    section.figures = study.figures(study_tables(folder, facts["tables"]))
    experiment = read_json(folder / "experiment.json") or {}
    title, claims = experiment.get("title"), "; ".join(experiment.get("claims", []))
    text = [f"{title}." if title else "", f"The paper reads: {claims}." if claims else ""]
    section.text = " ".join(
        filter(None, [*text, f"Numbers: {', '.join(f'{n}.csv' for n in facts['tables'])}."])
    )
    return [section]


def _scores(folder: Path, metrics: pd.DataFrame, subsets: pd.DataFrame | None) -> list[Section]:
    """Scores by gold position, position bias, the paper's numbers, and other scores."""
    ran, what = read_json(folder / "method.json") or {}, metric_name(metrics).capitalize()
    front = f"As applied: {applied(ran)}. " if len(ran) > 1 else ""
    text = f"{front}{what} in % and paired difference in points, each with its 95 % interval."
    section = Section(
        what, " ".join(filter(None, (text, cut_prompts(folder)))), *tables.position_table(metrics)
    )
    if len(at_positions(metrics)):
        section.title = f"{what} by gold position"
        caption = f"{what} over the position of the answer. Bands: 95 % intervals."
        section.figures = {"accuracy": (accuracy_by_position(metrics), caption)}
    out, bias = [section], tables.bias_table(metrics)
    out += [Section("Position bias", BIAS_TEXT, *bias)] if bias[1] else []
    out += experiment_section(folder, with_subsets(metrics, subsets))
    others = tables.other_scores(metrics)
    if len(others):
        text = "In their own unit, over all examples that have them."
        out.append(Section("Other scores", text, *tables.subset_table(others, own="")))
    return out


def _subsets(subsets: pd.DataFrame | None) -> list[Section]:
    if subsets is None:
        return []
    text = "The task's own metric in % and points, others in their own unit; 95 % intervals over questions within subsets."
    drawn = {"subsets": (by_subset(subsets), "Every subset, and below the line every average.")}
    return [Section("By subset", text, *tables.subset_table(subsets), drawn)]


def _attention(attention: pd.DataFrame | None) -> list[Section]:
    if attention is None:
        return []
    caption = "Attention of the last prompt token to the item with the answer"
    alone = attention["method"].nunique() == 1
    caption = (
        f"{caption}: strongest layer (left) and every layer (right)."
        if alone
        else f"Left: {caption.lower()}. "
    )
    caption += "" if alone else "Right: what the method changes in each layer."
    return [Section("Attention", figures={"attention": (attention_by_position(attention), caption)})]


def experiment_section(folder: Path, metrics: pd.DataFrame) -> list[Section]:
    """What the paper says, and its numbers beside ours where the same model ran."""
    facts, reference = read_json(folder / "experiment.json") or {}, read_json(folder / "reference.json") or []
    if not facts and not reference:
        return []
    try:
        header, rows = reference_table(metrics, list(reference))
        text = reference_text(facts, list(reference), bool(rows))
    except (KeyError, TypeError, ValueError) as error:
        allowed = "a list of rows with model, method, task, gold_position, metric, value"
        raise unreadable(folder / "reference.json", error, allowed) from error
    return [Section(str(facts.get("title", "Beside the paper's numbers")), text, header, rows)]


def _prompts(prompts: Mapping[str, Any]) -> list[Section]:
    """The first prompt of each subset."""
    out = []
    for subset, first in prompts.get("first", {}).items():
        every = f"all {prompts['prompts']} prompts: {prompts['sha256'][:16]}"
        text, half = f"{first['tokens']} tokens, sha256 {first['sha256'][:16]}; {every}.", SHOWN // 2
        shown = (
            first["text"]
            if len(first["text"]) <= SHOWN
            else f"{first['text'][:half]}\n[...]\n{first['text'][-half:]}"
        )
        out.append(Section(f"First prompt {subset}".strip(), text, block=shown, folded=True))
    return out


def _origin(folder: Path, provenance: Mapping[str, Any]) -> list[Section]:
    """Config, how to repeat the run, and where it was made."""
    sections = []
    if (folder / "config.yaml").is_file():
        sections.append(Section("Config", block=read_text(folder / "config.yaml"), folded=True))
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
    status = read_json(folder / "status.json") or {}
    if status.get("state") not in ("failed", "incomplete"):
        return ""
    return f"This run is {status['state']}; its numbers may be partial. {status.get('error') or ''}".strip()


# The page


def write_page(folder: Path, sentence: str, warning: str, sections: Sequence[Section]) -> Path:
    """Save the figures of all sections under ``figures/`` and write report.html around them."""
    parts = []
    for section in sections:
        drawn = []
        for name, (figure, caption) in section.figures.items():
            stem = "".join(c if c.isalnum() or c == "_" else "-" for c in name)
            png, _ = save(figure, folder / "figures" / stem)
            drawn.append(("data:image/png;base64," + base64.b64encode(png.read_bytes()).decode(), caption))
        parts.append({**vars(section), "figures": drawn})
    source = (paths.PACKAGE / "report" / "report.html.j2").read_text()
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    page = template.render(title=folder.name, sentence=sentence, warning=warning, sections=parts)
    write_bytes(folder / "report.html", page.encode())
    return folder / "report.html"
