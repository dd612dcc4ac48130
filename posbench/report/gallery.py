"""Many runs as one folder to show: a page with every figure, and the papers' tables."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from posbench.errors import UserError
from posbench.files.atomic import new_folder, write_csv, write_text
from posbench.files.markdown import markdown
from posbench.late import pd
from posbench.plots.base import FORMATS
from posbench.report.collect import Entry, Panel, collect_entries
from posbench.report.experiments import PAPERS
from posbench.report.folder import need_destination, read_csv
from posbench.report.glance import findings_glance
from posbench.report.links import PAGE, PageHead, read_head, rebase_links
from posbench.report.page import VERDICT_RULE, figure_size
from posbench.report.tables import latex
from posbench.report.template import render_html
from posbench.report.text import tally_verdicts
from posbench.stats.glance import noun_for, sentence_case

HEADINGS = PAPERS | {"": "Other runs"}
"""Headings of the page in their order: the title of each paper, then of other runs."""
PAGE_FILE = "index.html"
GENERATOR = '<meta name="generator" content="posbench gallery">'
"""Marks a gallery: no other folder is replaced."""


def write_gallery(folder: Path, out: Path | None = None) -> Path:
    """Write the gallery of a folder's newest runs, see :func:`posbench.report.collect.collect_entries`.

    Args:
        folder: An outputs folder, an experiment's, or one version's.
        out: Where the gallery is written, in the place of an older one; None takes
            ``gallery/`` in the folder.

    Returns:
        The path of its page.

    Raises:
        UserError: Something else is at that place, or a run's file cannot be read.
    """
    out = (out or folder / "gallery").absolute()
    page = out / PAGE_FILE
    need_destination(out, lambda: _is_gallery(page), "gallery")
    entries = collect_entries(folder)
    with new_folder(out) as root:
        groups: dict[str, list[dict[str, Any]]] = {paper: [] for paper in HEADINGS}
        for entry in entries:
            groups[paper_of(entry)].append(_write_entry(entry, root, out))
        text = render_html(
            "gallery.html.j2",
            mark=GENERATOR,
            papers=[
                (HEADINGS[paper], group) for paper, group in groups.items() if group
            ],
            sentence=_sentence(entries),
            verdict_rule=VERDICT_RULE,
        )
        write_text(root / PAGE_FILE, text)
    return page


def _is_gallery(page: Path) -> bool:
    """Whether a file is the page of a gallery."""
    with suppress(FileNotFoundError):
        return GENERATOR in page.read_text(encoding="utf-8", errors="replace")
    return False


def _sentence(entries: Sequence[Entry]) -> str:
    """Return the gallery's first sentence: numbers of experiments, runs and verdicts on claims of the papers."""
    # Sweeps of two entries may hold the same run.
    runs = {run.path.resolve() for entry in entries for run in entry.runs}
    results = {result.folder.resolve() for entry in entries for result in entry.results}
    experiments = noun_for(len(entries), "experiment")
    text = f"{len(entries)} {experiments}, {len(runs)} {noun_for(len(runs), 'run')}."
    verdicts = []
    for folder in runs | results:
        findings = None
        # The files of a sweep's runs were not checked.
        with suppress(UserError):
            findings = read_csv(folder / "findings.csv")
        if findings is not None:
            verdicts.append(findings.loc[findings["kind"] == "paper", "verdict"])
    counts = tally_verdicts(pd.concat(verdicts)) if verdicts else ""
    if counts:
        text += f" Verdicts on claims of the papers: {counts}."
    return text


def paper_of(entry: Entry) -> str:
    """The key of an entry's paper in :data:`HEADINGS`."""
    paper = str(entry.experiment.get("paper", ""))
    return paper if paper in PAPERS else ""


def paper_shows(entry: Entry) -> str:
    """Say what the paper shows: its claims, else where its numbers come from; empty without either."""
    text = "; ".join(map(str, entry.experiment.get("claims") or ()))
    source = (entry.experiment.get("reference") or {}).get("source")
    if not text and source:
        setting_note = "for other models or settings"
        if len(entry.cells):
            setting_note = "beside ours in the table"
        text = f"the numbers of {source}, {setting_note}"
    return sentence_case(text)


def heading(entry: Entry) -> str:
    """The title of an entry."""
    return str(entry.experiment.get("title") or entry.name)


def _write_entry(entry: Entry, root: Path, out: Path) -> dict[str, Any]:
    """Write an entry's tables, figures and pages below a folder.

    Args:
        entry: An experiment with its runs.
        root: The folder that the gallery is written to.
        out: The folder where it will lie.

    Returns:
        The fields of its section on the page.
    """
    pages = []
    for result in entry.results:
        page = _copy_file(result.folder / PAGE, root, entry, result.label)
        if page:
            copy = (root / page).read_text(encoding="utf-8")
            text = rebase_links(copy, result.folder, (out / page).parent)
            write_text(root / page, text)
        pages.append((result.label, page))
    figures = [_copy_figure(entry, panel, root) for panel in entry.panels]
    return {
        "name": entry.name,
        "head": _head_of(entry),
        "title": heading(entry),
        "covers": ", ".join(entry.experiment.get("covers") or ()),
        "shows": paper_shows(entry),
        "seen": entry.summary,
        "command": entry.command,
        "made": entry.origin,
        "faults": entry.faults,
        "pages": pages,
        "figures": figures,
        "tables": _write_tables(entry, root),
    }


def _head_of(entry: Entry) -> PageHead | None:
    """What an entry says first: what its only page does, else how its claims fared; None with several and no claims."""
    pages = [result.folder / PAGE for result in entry.results]
    if len(pages) == 1 and pages[0].is_file():
        head = read_head(pages[0])
        if head.word:
            return head
    if not len(entry.findings):
        return None
    glance = findings_glance(entry.findings)
    return PageHead(heading(entry), glance.word, glance.tone, glance.sentence)


def _write_tables(entry: Entry, root: Path) -> list[tuple[str, list[str]]]:
    """Write the tables of an entry as CSV, Markdown and LaTeX below ``root``.

    Returns:
        Kind of each table, and its three files relative to ``root``.
    """
    (root / "tables").mkdir(exist_ok=True)
    command = f"% {heading(entry)}. Made by: {entry.command}".replace("\n", " ")
    packages = "% \\usepackage{booktabs}, and longtable for tables of more than a page"
    kinds = []
    for index, (kind, (frame, (header, rows))) in enumerate(entry.tables.items()):
        # The first table has the plain name of the experiment.
        stem = f"tables/{entry.name}-{kind}" if index else f"tables/{entry.name}"
        write_csv(root / f"{stem}.csv", frame)
        write_text(root / f"{stem}.md", markdown(header, rows) + "\n")
        write_text(
            root / f"{stem}.tex", f"{command}\n{packages}\n{latex(header, rows)}"
        )
        kinds.append((kind, [f"{stem}.{suffix}" for suffix in ("csv", "md", "tex")]))
    return kinds


def _copy_figure(entry: Entry, panel: Panel, root: Path) -> dict[str, Any]:
    """Copy one figure in all formats that there are.

    Args:
        entry: The experiment.
        panel: A figure of one of its runs, with the caption.
        root: The gallery's folder.

    Returns:
        Values for the page: ``file`` (the picture shown), ``further`` (format and file of the others), its size in
        pixels, ``caption``, and ``label`` of its run if the entry has several.
    """
    label = panel.result.label
    stem = f"{label}-{panel.figure}"
    copies = {
        name: _copy_file(panel.file.with_suffix(f".{name}"), root, entry, stem)
        for name in FORMATS
    }
    return {
        "file": copies.pop(FORMATS[0]),
        "further": [(name.upper(), file) for name, file in copies.items() if file],
        **figure_size(panel.file.read_text(encoding="utf-8")),
        "caption": panel.caption,
        "label": entry.names[label] if len(entry.results) > 1 else "",
    }


def _copy_file(file: Path, root: Path, entry: Entry, stem: str) -> str:
    """Copy a run's file below ``root``, under the name ``stem``.

    Returns:
        Its new path relative to ``root``; empty if the file is absent.
    """
    kind = "pages" if file.suffix == ".html" else "figures"
    copy = root / kind / entry.name / f"{stem}{''.join(file.suffixes)}"
    if not file.is_file():
        return ""
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, copy)
    return copy.relative_to(root).as_posix()
