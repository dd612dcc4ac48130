"""Many runs as one folder to show: a page with every figure, the papers' tables, figures as PDF."""

from __future__ import annotations

import io
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image

from posbench import paths
from posbench.files.atomic import new_folder, write_csv, write_text
from posbench.files.markdown import markdown
from posbench.late import pd
from posbench.report.collect import Entry, Part, collect
from posbench.report.experiments import PAPERS
from posbench.report.folder import need_place
from posbench.report.page import size
from posbench.report.tables import latex
from posbench.report.text import tally

GROUPS = PAPERS | {"": "Other runs"}
"""The papers in the order of the page, and what is of none."""
PAGE = "index.html"
MARK = '<meta name="generator" content="posbench gallery">'
"""What tells a gallery from any other folder: only a gallery is replaced."""


def write_gallery(folder: Path, out: Path | None = None) -> Path:
    """Write the gallery of a folder's newest runs (:func:`posbench.report.collect.collect`) to ``out``, or to
    ``gallery/`` in it, in the place of an older one; the path of its page.

    Raises:
        UserError: There is something else at that place, or a run's file cannot be read.
    """
    out = (out or folder / "gallery").absolute()
    page = out / PAGE
    ours = page.is_file() and MARK in page.read_text(encoding="utf-8", errors="replace")
    need_place(out, ours, "gallery")
    entries = collect(folder)
    with new_folder(out) as made:
        shown: dict[str, list[dict[str, Any]]] = {}
        for entry in entries:
            shown.setdefault(paper_of(entry), []).append(_write(entry, made))
        source = (paths.PACKAGE / "report" / "gallery.html.j2").read_text()
        page_of = jinja2.Environment(
            autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        grouped = [
            (title, shown[paper]) for paper, title in GROUPS.items() if paper in shown
        ]
        told = {"mark": MARK, "papers": grouped, "sentence": _sentence(entries)}
        write_text(made / PAGE, page_of.from_string(source).render(**told))
    return page


def _sentence(entries: Sequence[Entry]) -> str:
    """How many experiments are shown, and how the papers' claims fared in them."""
    found = [entry.findings for entry in entries if len(entry.findings)]
    verdicts = [each.loc[each["kind"] == "paper", "verdict"] for each in found]
    count = f"{len(entries)} experiment{'s' * (len(entries) != 1)}, {sum(len(e.runs) for e in entries)} runs"
    told = tally(pd.concat(verdicts)) if verdicts else ""
    return (
        f"{count}. Claims of the papers, each on each model: {told}."
        if told
        else f"{count}."
    )


def paper_of(entry: Entry) -> str:
    """The key of an entry's paper in :data:`GROUPS`."""
    paper = str(entry.facts.get("paper", ""))
    return paper if paper in PAPERS else ""


def told(entry: Entry) -> tuple[str, str]:
    """What the paper shows, in its authors' claims, and what we see, from the runs' numbers."""
    claims = "; ".join(map(str, entry.facts.get("claims") or ()))
    source = (entry.facts.get("reference") or {}).get("source")
    where = (
        "which stand beside ours in the table"
        if len(entry.cells)
        else "for other models or settings"
    )
    shows = claims or (f"the numbers of {source}, {where}" if source else "")
    return f"{shows[:1].upper()}{shows[1:]}." if shows else "", entry.seen


def heading(entry: Entry) -> tuple[str, str]:
    """Title of an entry, and which tables and figures of its paper it covers."""
    return str(entry.facts.get("title") or entry.name), ", ".join(
        entry.facts.get("covers") or ()
    )


def _write(entry: Entry, root: Path) -> dict[str, Any]:
    """Write an entry's tables, figures and pages below a folder; what the page says of it."""
    title, covers = heading(entry)
    shows, seen = told(entry)
    facts = {
        "name": entry.name,
        "title": title,
        "covers": covers,
        "shows": shows,
        "seen": seen,
    }
    told_of = {"command": entry.command, "made": entry.made, "faults": entry.faults}
    pages = [
        (p.label, copied(p.folder / "report.html", root, entry, p.label))
        for p in entry.parts
    ]
    figures = [
        _figure(entry, part, name, root)
        for part in entry.parts
        for name in part.figures
    ]
    return {
        **facts,
        **told_of,
        "pages": pages,
        "figures": figures,
        "tables": _tables(entry, root),
    }


def _tables(entry: Entry, root: Path) -> list[tuple[str, list[str]]]:
    """Write the tables of an entry, each as CSV, Markdown and LaTeX; their kinds and files."""
    out = []
    (root / "tables").mkdir(exist_ok=True)
    for index, (kind, (frame, (header, rows))) in enumerate(entry.tables.items()):
        stem = f"tables/{entry.name}-{kind}" if index else f"tables/{entry.name}"
        write_csv(root / f"{stem}.csv", frame)
        write_text(root / f"{stem}.md", markdown(header, rows) + "\n")
        made = f"% {heading(entry)[0]}. Made by: {entry.command}".replace("\n", " ")
        needs = "% \\usepackage{booktabs}, and longtable for tables of more than a page"
        write_text(root / f"{stem}.tex", f"{made}\n{needs}\n{latex(header, rows)}")
        out.append((kind, [f"{stem}.{kind_of}" for kind_of in ("csv", "md", "tex")]))
    return out


def _figure(entry: Entry, part: Part, name: str, root: Path) -> dict[str, Any]:
    """Copy one figure as PNG and PDF; where it is, its size in pixels, its caption and whose it is."""
    drawn = part.folder / "figures"
    png, pdf = (
        copied(drawn / f"{name}.{kind}", root, entry, f"{part.label}-{name}")
        for kind in ("png", "pdf")
    )
    with open(drawn / f"{name}.png", "rb") as stream:
        facts = {"png": png, "pdf": pdf, **size(stream.read(24))}
    return {
        **facts,
        "caption": part.figures[name],
        "label": part.label if len(entry.parts) > 1 else "",
    }


def copied(file: Path, root: Path, entry: Entry, stem: str) -> str:
    """Copy a run's file to the place of its kind below a folder, and say which; empty where there is none."""
    kind = "pages" if file.suffix == ".html" else "figures"
    to = root / kind / entry.name / f"{stem}{file.suffix}"
    if not file.is_file():
        return ""
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, to)
    return to.relative_to(root).as_posix()


def as_markdown(entries: Sequence[Entry], images: str) -> tuple[str, dict[str, Path]]:
    """The gallery in short: of each entry what the paper shows, what we see, the command, and one or two
    figures, as images in the folder ``images``; and the file of each image."""
    parts = list[str]()
    files = dict[str, Path]()
    grouped = {
        paper: [entry for entry in entries if paper_of(entry) == paper]
        for paper in GROUPS
    }
    for paper, own in grouped.items():
        parts += [f"## {GROUPS[paper]}"] if own else []
        for entry in own:
            shows, seen = told(entry)
            parts += [
                f"### {heading(entry)[0]}",
                f"*The paper shows:* {shows}" if shows else "",
            ]
            parts += [f"*We see:* {seen}" if seen else "", *entry.faults]
            for part, name in few_figures(entry):
                image = f"{entry.name}-{part.label}-{name}.png"
                files[image] = part.folder / "figures" / f"{name}.png"
                front = f"{part.label}: " if len(entry.parts) > 1 else ""
                parts.append(
                    f"![{heading(entry)[0]}]({images}/{image})\\\n{front}{part.figures[name]}"
                )
            parts.append(f"`{entry.command}`; {entry.made}." if entry.command else "")
    return "\n\n".join(filter(None, parts)), files


def few_figures(entry: Entry) -> Sequence[tuple[Part, str]]:
    """The first figure of the first two runs; of one run alone, its first three."""
    each = [
        [(part, name) for name in part.figures] for part in entry.parts if part.figures
    ]
    return [figures[0] for figures in each[:2]] if len(each) > 1 else list(*each)[:3]


def shrink(file: Path, most: int = 100_000) -> bytes:
    """A figure as a PNG of so many bytes at the most where it can be, with fewer colours, then pixels."""
    image = Image.open(file).convert("RGB")
    for share, colours in itertools.product((0.7, 0.6, 0.5), (256, 64)):
        size = round(share * image.width), round(share * image.height)
        small = image.resize(size, Image.Resampling.LANCZOS)
        # Rare colours count as much as others: a colour bar keeps all of its own.
        small = small.quantize(
            colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
        small.save(stream := io.BytesIO(), "png", optimize=True)
        if stream.tell() <= most:
            break
    return stream.getvalue()
