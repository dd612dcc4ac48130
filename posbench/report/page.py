"""From a run folder to figures and one self-contained HTML page."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posbench.files.atomic import write_bytes, write_json
from posbench.late import pd
from posbench.plots.attention import attention_by_position
from posbench.plots.base import count_label, save, sign
from posbench.plots.scores import accuracy_by_position, by_subset
from posbench.plots.section import Section
from posbench.report import tables
from posbench.report.curve import curve_of_run
from posbench.report.explorer import questions_section
from posbench.report.folder import (
    CAPTIONS,
    need_files,
    read_csv,
    read_json,
    read_text,
    study_tables,
)
from posbench.report.glance import run_glance
from posbench.report.links import parent_links, parent_pages, run_links
from posbench.report.paper import paper_sections, reference_text
from posbench.report.template import render_html
from posbench.report.text import (
    describe_costs,
    describe_data,
    describe_method,
    describe_prompts,
    describe_stop,
    describe_window_share,
    run_title,
)
from posbench.run.folder import (
    AUDIT,
    FOUND_FILE,
    METHOD_FILE,
    PREDICTIONS,
    PROVENANCE,
    RESCORED,
    STUDY_STAGE,
    open_run_dir,
)
from posbench.run.method import typed_in_place
from posbench.run.own_code import make_importable
from posbench.schema import instantiate
from posbench.search import held_back
from posbench.search.base import Search
from posbench.stats.findings import ALPHA
from posbench.stats.frames import metric_name, rows_at_positions
from posbench.stats.glance import Glance
from posbench.stats.verdict import (
    CANNOT_TELL,
    FIXED,
    NOT_FIXED,
    Verdict,
    run_verdict,
)
from posbench.studies.base import read_study

VERDICT_RULE = (
    "A claim holds where its whole 95 % interval passes the smallest effect worth naming (holds if), is "
    "contradicted where it stays below, and is else inconclusive, as is every claim whose p is above "
    f"{ALPHA:g}; p is adjusted for the claims that were tested together."
)
PIXELS_PER_POINT = 132 / 72
"""Scale of figures on a page: all letters have one size, and the widest fills the page."""
SIZE = re.compile(r'(width|height)="([\d.]+)pt"')
"""A size in points at the start of an SVG."""
LONG_FRACTION = re.compile(r"(?<![\d.])([1-9]\d*\.\d\d)\d+")
"""A coordinate of an SVG with more digits than a screen shows; below 1 it may be a scale, which keeps its digits."""
MAX_PAGE_BYTES = 500_000
"""Size of a page that the questions of a run fill up at most."""


def render_run(folder: Path, formats: Iterable[str] = ()) -> Path:
    """Draw every figure that a run folder's files allow, and write report.html.

    Args:
        folder: The run.
        formats: Further formats of figures, see :func:`posbench.plots.base.save`.

    Returns:
        The path of report.html.

    Raises:
        UserError: See :func:`read_run`.
    """
    glance, sections = read_run(folder)
    run = open_run_dir(folder)
    config = run.config()
    model = config.get("model")
    if isinstance(model, dict) and "name" in model:
        model_name = str(model["name"])
    else:
        # Figures of a run without a model are signed with its study.
        study = read_json(folder / "study.json") or {}
        model_name = str(study.get("study", ""))
    status = read_json(folder / "status.json") or {}
    provenance = read_json(folder / "provenance.json") or {}
    # The file's own checksum.
    provenance.pop("sum", None)
    return write_page(
        folder,
        run_title(config),
        glance,
        sections,
        [model_name],
        config=read_text(folder / "config.yaml"),
        prompts=read_json(folder / "prompts.json"),
        provenance=_describe_course(status) | provenance,
        status=status,
        formats=formats,
        parents=parent_links(folder, parent_pages(folder)),
    )


def _describe_course(status: Mapping[str, Any]) -> dict[str, str]:
    """Return what a run cost, what ended it early, and whether rescore changed its scores: texts by label.

    Args:
        status: Content of status.json.
    """
    stop = describe_stop(status)
    described = describe_costs(status)
    if stop:
        described["end"] = stop
    if status.get("stages", {}).get(PREDICTIONS, {}).get(RESCORED):
        described["scores"] = "changed by posbench rescore after the run"
    return described


def read_run(folder: Path) -> tuple[Glance, list[Section]]:
    """Return the first look at a run, and the sections of its page.

    Args:
        folder: The run.

    Raises:
        UserError: The folder is missing, is no run folder, or holds a file that cannot be read.
    """
    names = ("config.yaml", "study.json", "metrics.csv", "search.csv", "attention.csv")
    need_files(folder, "a run folder (it holds config.yaml)", *names)
    metrics = read_csv(folder / "metrics.csv")
    subsets = read_csv(folder / "subsets.csv")
    run = open_run_dir(folder)
    config = run.config()
    make_importable(run)
    sections = _study_sections(folder, config)
    if metrics is not None:
        sections += _score_sections(folder, metrics, subsets)
    # Neither scores nor a study: at least the claims of its experiment.
    elif not sections:
        experiment = read_json(folder / "experiment.json")
        if experiment:
            text = reference_text(experiment, [], pd.DataFrame())
            sections.append(Section(str(experiment["title"]), text))
    questions = questions_section(run)
    if questions:
        sections.insert(1, questions)
    if subsets is not None:
        caption = "Every subset, and below the line every average."
        figures = {"subsets": (by_subset(subsets), caption)}
        table = tables.subset_table(subsets)
        sections.append(Section("By subset", "", *table, figures))
    attention = read_csv(folder / "attention.csv")
    if attention is not None:
        sections.append(attention_section(attention))
    # What the search found, and whether it holds on held-back prompts.
    if "search" in (config.get("stages") or ()):
        search: Search = instantiate(config.get("search", {}), Search, "search")  # type: ignore[type-abstract]
        sections += held_back.sections(read_csv(folder / held_back.TABLE_FILE))
        sections += search.sections(lambda name: read_csv(folder / f"{name}.csv"))
    if (folder / FOUND_FILE).is_file():
        typed = typed_in_place(read_json(folder / METHOD_FILE) or {})
        text = _use_of_constants(run_verdict(metrics), typed)
        constants = read_text(folder / FOUND_FILE)
        sections.append(Section("Found constants", text, block=constants))
    return run_glance(folder), sections


def _use_of_constants(verdict: Verdict | None, typed: str) -> str:
    """Return advice on the constants that a search found, by the verdict on the run that applied them.

    Args:
        verdict: The verdict; None where no position bias was measured.
        typed: The run's own constants in their place, in words; empty where it applied the found ones.
    """
    if verdict and typed:
        return f"This run did not evaluate them ({typed}): do that before you use them elsewhere."
    if verdict is None:
        return "This run did not measure a position bias with them: do that before you use them elsewhere."
    if verdict.name == FIXED:
        return f"Paste into the model's YAML. Verdict of this run: {verdict}."
    advice = {
        NOT_FIXED: "No fix, so nothing to paste.",
        CANNOT_TELL: "Whether they fix it cannot be told: ask more questions before you use them elsewhere.",
    }.get(verdict.name, "No bias was shown that they could fix.")
    return f"{advice} Verdict of this run: {verdict}."


def describe_audit(folder: Path) -> str:
    """The result of an audit, in words; empty without one."""
    provenance = read_json(folder / PROVENANCE) or {}
    return str(provenance.get(AUDIT, {}).get("words", ""))


def _study_sections(folder: Path, config: Mapping[str, Any]) -> list[Section]:
    """Return a study's own sections, then one with its verdicts and figures; an empty list without a study."""
    facts = read_json(folder / "study.json")
    experiment = read_json(folder / "experiment.json") or {}
    if not facts:
        return []
    study = read_study(config.get("study", {}))
    description = type(study).__doc__ or facts["study"]
    section = Section(description.split("\n")[0].rstrip("."))
    texts = []
    findings = read_csv(folder / "findings.csv")
    if findings is not None:
        section.header, section.rows = tables.findings_table(findings)
        texts.append(VERDICT_RULE)
    frames = study_tables(folder, facts["tables"])
    figures = study.figures(frames)
    own_sections = list(study.sections(frames, figures))
    shown = {name for own in own_sections for name in own.figures}
    section.figures = {n: drawn for n, drawn in figures.items() if n not in shown}
    counts = set[int]()
    for frame in frames.values():
        if "n" in frame:
            counts.update(int(n) for n in frame["n"].dropna())
    if len(counts) == 1:
        # A count shared by all tables is every figure's.
        for figure, _ in figures.values():
            if not figure.get_label():
                figure.set_label(count_label(counts))
    if experiment.get("title"):
        texts.append(f"{experiment['title']}.")
    if experiment.get("claims"):
        texts.append(f"The paper reads: {'; '.join(experiment['claims'])}.")
    texts.append(describe_window_share(open_run_dir(folder).stage(STUDY_STAGE)))
    files = ", ".join(f"{name}.csv" for name in facts["tables"])
    section.text = " ".join(filter(None, [*texts, f"Numbers: {files}."]))
    return [*own_sections, section]


def _score_sections(
    folder: Path, metrics: pd.DataFrame, subsets: pd.DataFrame | None
) -> list[Section]:
    """Return sections with scores by gold position, position bias, the paper's numbers, and other scores.

    Args:
        folder: The run's folder.
        metrics: Rows of metrics.csv.
        subsets: Rows of subsets.csv; None where the task has none.
    """
    name = metric_name(metrics).capitalize()
    text = f"{name} in % and paired difference in points, each with its 95 % interval"
    method = read_json(folder / METHOD_FILE) or {}
    # More than its name.
    if len(method) > 1:
        text = f"As applied: {describe_method(method)}. {text}"
    positions = tables.describe_positions(metrics)
    if positions:
        text = f"{text}; {positions}"
    stop = describe_stop(open_run_dir(folder).status())
    if stop:
        text = f"{text}; {stop}"
    texts = [
        f"{text}.",
        *(say(folder) for say in (describe_prompts, describe_data, describe_audit)),
    ]
    text = " ".join(filter(None, texts))
    scores = Section(name, text, *tables.position_table(metrics))
    if len(rows_at_positions(metrics)):
        scores.title = f"{name} by gold position"
        caption = f"{name} over the position of the answer. Bands: 95 % intervals."
        scores.figures = {"accuracy": (accuracy_by_position(metrics), caption)}
        scores.curves = {"accuracy": curve_of_run(metrics)}
    sections = [scores]
    header, rows = tables.bias_table(metrics)
    if rows:
        sections.append(Section("Position bias", "", header, rows))
    sections += paper_sections(folder, metrics, subsets)
    other_scores = tables.other_scores(metrics)
    if len(other_scores):
        table = tables.subset_table(other_scores, task_metric="")
        sections.append(Section("Other scores", "", *table))
    return sections


def attention_section(attention: pd.DataFrame) -> Section:
    """Return the section with figures of the attention to the gold item, from a table of ``attention.csv``."""
    quantity = "Attention of the last prompt token to the item with the answer"
    if attention["method"].nunique() > 1:
        caption = (
            f"Left: {quantity.lower()}. Right: what the method changes in each layer."
        )
    else:
        caption = f"{quantity}: strongest layer (left) and every layer (right)."
    figures = {"attention": (attention_by_position(attention), caption)}
    return Section("Attention", figures=figures)


def figure_size(svg: str) -> dict[str, int]:
    """Width and height of a figure on a page, from the text of its SVG."""
    start = svg[svg.index("<svg ") :].partition(">")[0]
    sizes = dict(SIZE.findall(start))
    return {
        name: round(PIXELS_PER_POINT * float(points)) for name, points in sizes.items()
    }


def write_page(
    folder: Path,
    title: str,
    glance: Glance,
    sections: Sequence[Section],
    models: Sequence[str] = (),
    *,
    config: str = "",
    prompts: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    status: Mapping[str, Any] | None = None,
    formats: Iterable[str] = (),
    runs: Iterable[Path] = (),
    place: Path | None = None,
    parents: str = "",
) -> Path:
    """Save all figures under ``figures/`` with their captions, and write report.html.

    Args:
        folder: Folder of a run or a sweep.
        title: Heading of the page.
        glance: The first look at the result, below the heading.
        sections: The parts of the page.
        models: Names to print on figures, next to n.
        config: Text of config.yaml.
        prompts: Content of prompts.json.
        provenance: Content of provenance.json, with the cost of the run.
        status: Content of status.json.
        formats: Further formats of figures, see :func:`posbench.plots.base.save`.
        runs: Runs that the page names: their names are links to their pages.
        place: Where the page will lie, if not in ``folder``.
        parents: HTML of the links to pages that a run is a part of.

    Returns:
        The path of report.html.
    """
    parts = []
    captions = dict[str, str]()
    for section in sections:
        figures = []
        for name, (figure, caption) in section.figures.items():
            sign(figure, models)
            stem = folder / "figures" / re.sub(r"\W", "-", name)
            file = save(figure, stem, formats)
            captions[file.stem] = caption
            picture = embedded_figure(file, caption)
            figures.append({**picture, "curve": section.curves.get(name, "")})
        for file, caption in section.pictures:
            figures.append(embedded_figure(file, caption))
        parts.append({**vars(section), "figures": figures, "inserted": ""})
    if captions:
        write_json(folder / "figures" / CAPTIONS, captions)

    shown = place or folder

    def render() -> bytes:
        page = render_html(
            "report.html.j2",
            run_links(runs, shown),
            title=title,
            name=f"{shown.parent.name}/{shown.name}",
            glance=glance,
            parents=parents,
            sections=parts,
            config=config,
            prompts=prompts,
            provenance=provenance,
            status=status,
        )
        return page.encode()

    page = render()
    for section, part in zip(sections, parts, strict=True):
        # What is inserted takes what the rest of the page leaves.
        if section.insert:
            part["inserted"] = section.insert(MAX_PAGE_BYTES - len(page))
            page = render()
    path = folder / "report.html"
    write_bytes(path, page)
    return path


def compact_svg(svg: str) -> str:
    """An SVG as text without the digits of its coordinates that no screen shows, and without indentation."""
    return LONG_FRACTION.sub(r"\1", re.sub(r"^ +", "", svg, flags=re.MULTILINE))


def embedded_figure(file: Path, caption: str) -> dict[str, Any]:
    """Return an SVG as a page embeds it: address with its content, caption, width and height.

    Args:
        file: The SVG.
        caption: Its caption.
    """
    svg = file.read_text(encoding="utf-8")
    size = figure_size(svg)
    short = re.sub(r"\s+", " ", compact_svg(svg)).replace('"', "'")
    encoded = urllib.parse.quote(short, safe=" /:=;,'()!*+?@")
    source = f"data:image/svg+xml,{encoded}"
    return {"source": source, "caption": caption, **size}
