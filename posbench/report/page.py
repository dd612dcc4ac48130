"""From a run folder to figures and one self-contained HTML page; reads folders, never models."""

from __future__ import annotations

import base64
import html
import itertools
import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from posbench import paths
from posbench.files.atomic import write_bytes, write_text
from posbench.late import pd
from posbench.plots.attention import attention_by_position
from posbench.plots.base import counted, save, sign
from posbench.plots.scores import accuracy_by_position, by_subset
from posbench.plots.section import Section
from posbench.report import failures, tables
from posbench.report.folder import (
    CAPTIONS,
    need_folder,
    read_csv,
    read_json,
    read_text,
    study_tables,
)
from posbench.report.paper import beside, reference_text
from posbench.report.text import (
    FEW,
    answer,
    applied,
    headline,
    served,
    shortened,
    spent,
    subject,
)
from posbench.run.folder import opened
from posbench.schema import instantiate
from posbench.search import held_back
from posbench.search.base import Search
from posbench.stats.frames import at_positions, metric_name, shown
from posbench.studies.base import Study

HOLDS = (
    "A claim holds where its whole 95 % interval lies on the claimed side, is contradicted on the other, and "
    "else inconclusive; p is adjusted for the claims that were tested together."
)


TIMES = {"ratio": "takes {} times the time of", "speedup": "is {} times as fast as"}
"""Columns of measured times, in words."""
SCALE = 0.66
"""Pixels of a page for one of a figure: letters of one size in all figures, and the widest fills the page."""
INTERVAL = re.compile(r"\[-?[\d.]+(e[+-]\d+)?, -?[\d.]+(e[+-]\d+)?\]")
LONG = 20  # letters from which on a word may be broken after its signs


def render_run(folder: Path) -> Path:
    """Draw every figure that a run folder's files allow, and write report.html, whose path it returns.

    Raises:
        UserError: See :func:`read_run`.
    """
    sentence, sections = read_run(folder)
    config = opened(folder).config()
    model = config.get("model")
    study = read_json(folder / "study.json") or {}
    # Where there is no model the study says what it is.
    models = [
        str(
            model["name"]
            if isinstance(model, dict) and "name" in model
            else study.get("study", "")
        )
    ]
    facts = {
        name: read_json(folder / f"{name}.json") or {}
        for name in ("prompts", "provenance", "status")
    }
    facts["provenance"].pop("sum", None)
    facts["provenance"] = spent(facts["status"]) | facts["provenance"]
    text = read_text(folder / "config.yaml")
    if (folder / failures.FILE).is_file():
        facts["failures"] = failures.on_page(
            opened(folder), opened(folder).config("task")
        )
    return write_page(
        folder, subject(config), sentence, sections, models, config=text, **facts
    )


def read_run(folder: Path) -> tuple[str, list[Section]]:
    """The result of a run in one sentence, and the sections of its page.

    Raises:
        UserError: The folder is missing, is no run folder, or holds a file that cannot be read.
    """
    names = ("config.yaml", "study.json", "metrics.csv", "search.csv", "attention.csv")
    need_folder(folder, "a run folder (it holds config.yaml)", *names)
    metrics, subsets, findings = (
        read_csv(folder / f"{n}.csv") for n in ("metrics", "subsets", "findings")
    )
    config = opened(folder).config()
    sections = _study(folder, config)
    if metrics is not None:
        sections += _scores(folder, metrics, subsets)
    elif not sections and (told := read_json(folder / "experiment.json")):
        sections.append(
            Section(str(told["title"]), reference_text(told, [], pd.DataFrame()))
        )
    if subsets is not None:
        drawn = {
            "subsets": (
                by_subset(subsets),
                "Every subset, and below the line every average.",
            )
        }
        sections.append(Section("By subset", "", *tables.subset_table(subsets), drawn))
    attention = read_csv(folder / "attention.csv")
    if attention is not None:
        what = "Attention of the last prompt token to the item with the answer"
        caption = f"{what}: strongest layer (left) and every layer (right)."
        if attention["method"].nunique() > 1:
            caption = (
                f"Left: {what.lower()}. Right: what the method changes in each layer."
            )
        drawn = {"attention": (attention_by_position(attention), caption)}
        sections.append(Section("Attention", figures=drawn))
    if "search" in (config.get("stages") or ()):
        search: Search = instantiate(config.get("search", {}), Search, "search")  # type: ignore[type-abstract]
        sections += held_back.sections(read_csv(folder / held_back.TABLE))
        sections += search.sections(lambda name: read_csv(folder / f"{name}.csv"))
    if (folder / "found.yaml").is_file():
        sections.append(
            Section("Found constants", block=read_text(folder / "found.yaml"))
        )
    if metrics is not None or findings is None:
        return (metrics is None and measured(folder)) or headline(metrics), sections
    return answer(findings), sections


def measured(folder: Path) -> str:
    """What a run without scores and claims measured, in words: the gain of a search, the times of a study;
    empty where it measured neither."""
    gained = read_csv(folder / held_back.TABLE)
    said = list[str]()
    names = (read_json(folder / "study.json") or {}).get("tables", ())
    for table, (kind, words) in itertools.product(
        study_tables(folder, names).values(), TIMES.items()
    ):
        if {"work", "way", "base", f"{kind}_min", f"{kind}_max"} <= set(table):
            for row in table[table["way"] != table["base"]].to_dict("records"):
                least, usual, most = (
                    f"{row[name]:.2f}" for name in (f"{kind}_min", kind, f"{kind}_max")
                )
                spread = f"{row['work']}; {least} to {most} over rounds"
                said.append(
                    f"{row['way']} {words.format(usual)} {shown(row['base'])} ({spread})"
                )
    more = [f"{len(said) - FEW} more"] * (len(said) > FEW)
    front = [] if gained is None else [held_back.told(gained.iloc[0])]
    return "; ".join([*front, *said[:FEW], *more]) + "." * bool(front or said)


def cut_prompts(folder: Path) -> str:
    """How many prompts of a run were shortened to the context window, and what a server did with them, in
    words; empty where there is nothing to tell."""
    rows = [
        row for row in opened(folder).rows("predictions.jsonl") if "error" not in row
    ]
    return " ".join(filter(None, [shortened(rows), served(rows)]))


def _study(folder: Path, config: Mapping[str, Any]) -> list[Section]:
    """What a study measured: its verdicts, and every figure it draws."""
    facts = read_json(folder / "study.json")
    experiment = read_json(folder / "experiment.json") or {}
    if not facts:
        return []
    study: Study = instantiate(config.get("study", {}), Study, "study")  # type: ignore[type-abstract]
    section = Section(
        (type(study).__doc__ or facts["study"]).split("\n")[0].rstrip(".")
    )
    findings = read_csv(folder / "findings.csv")
    if findings is not None:
        section.header, section.rows = tables.findings_table(findings)
        section.text = f"{HOLDS} "
    found = study_tables(folder, facts["tables"])
    section.figures = study.figures(found)
    counts = {
        int(n) for table in found.values() if "n" in table for n in table["n"].dropna()
    }
    for figure, _ in section.figures.values():
        if (
            not figure.get_label() and len(counts) == 1
        ):  # the one count of all tables is that of every figure
            figure.set_label(counted(counts))
    text = [f"{experiment['title']}."] if experiment.get("title") else []
    text += (
        [f"The paper reads: {'; '.join(experiment['claims'])}."]
        if experiment.get("claims")
        else []
    )
    section.text += " ".join(
        [*text, f"Numbers: {', '.join(f'{name}.csv' for name in facts['tables'])}."]
    )
    return [section]


def _scores(
    folder: Path, metrics: pd.DataFrame, subsets: pd.DataFrame | None
) -> list[Section]:
    """Scores by gold position, position bias, the paper's numbers, and other scores."""
    ran = read_json(folder / "method.json") or {}
    what = metric_name(metrics).capitalize()
    front = f"As applied: {applied(ran)}. " if len(ran) > 1 else ""
    text = f"{front}{what} in % and paired difference in points, each with its 95 % interval"
    text = "; ".join(filter(None, [text, tables.position_words(metrics)])) + "."
    section = Section(
        what, f"{text} {cut_prompts(folder)}".strip(), *tables.position_table(metrics)
    )
    if len(at_positions(metrics)):
        section.title = f"{what} by gold position"
        caption = f"{what} over the position of the answer. Bands: 95 % intervals."
        section.figures = {"accuracy": (accuracy_by_position(metrics), caption)}
    out = [section]
    bias = tables.bias_table(metrics)
    out += [Section("Position bias", "", *bias)] if bias[1] else []
    out += beside(folder, metrics, subsets)
    others = tables.other_scores(metrics)
    if len(others):
        out.append(Section("Other scores", "", *tables.subset_table(others, own="")))
    return out


def size(png: bytes) -> dict[str, int]:
    """Width and height of a figure on a page, from the beginning of its file."""
    width, height = struct.unpack(">II", png[16:24])
    return {"width": round(SCALE * width), "height": round(SCALE * height)}


def fitted(text: str) -> str:
    """HTML of a text that breaks where a reader expects it: not inside an interval, and in long names after
    their signs."""
    kept = INTERVAL.sub(r'<span class="whole">\g<0></span>', html.escape(text))
    return re.sub(
        rf"\S{{{LONG},}}",
        lambda word: re.sub(r"([/=,]|__)(?=\w)", r"\1<wbr>", word[0]),
        kept,
    )


def write_page(
    folder: Path,
    title: str,
    sentence: str,
    sections: Sequence[Section],
    models: Sequence[str] = (),
    **run: Any,
) -> Path:
    """Save all figures, signed with the models and n, under ``figures/``, their captions beside them, and
    write report.html around them, whose path it returns; of a run it also shows ``failures``, ``prompts``,
    ``config``, ``provenance`` and ``status``."""
    parts = []
    captions = dict[str, str]()
    for section in sections:
        drawn = []
        for name, (figure, caption) in section.figures.items():
            sign(figure, models)
            png, _ = save(figure, folder / "figures" / re.sub(r"\W", "-", name))
            captions[png.stem] = caption
            data = png.read_bytes()
            source = "data:image/png;base64," + base64.b64encode(data).decode()
            drawn.append({"source": source, "caption": caption, **size(data)})
        parts.append({**vars(section), "figures": drawn})
    if captions:
        write_text(folder / "figures" / CAPTIONS, json.dumps(captions, indent=2) + "\n")
    source = (paths.PACKAGE / "report" / "report.html.j2").read_text()
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["fitted"] = fitted
    name = f"{folder.parent.name}/{folder.name}"
    page = environment.from_string(source).render(
        title=title, name=name, sentence=sentence, sections=parts, **run
    )
    write_bytes(folder / "report.html", page.encode())
    return folder / "report.html"
