"""Addresses between pages: from a page to runs, and from a run's page up to the pages that it is a part of."""

from __future__ import annotations

import html
import logging
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from posbench.errors import UserError
from posbench.files.atomic import write_text
from posbench.report.folder import read_json, sweep_runs
from posbench.report.template import render_html
from posbench.run.folder import JOBS, open_run_dir
from posbench.run.lease import owning
from posbench.stats.glance import Tone, noun_for

log = logging.getLogger(__name__)

PAGE = "report.html"
PARENT_FILES = (
    f"*/v[0-9]*/sweep__*/{JOBS}",
    "diagnose/*/diagnosis.json",
    "order/*/order.json",
)
"""Files that name the runs of a sweep, a diagnosis or a comparison of orders, below a folder of outputs."""
PAGE_TITLE = re.compile(r"<title>(.*?)(?: - posbench)?</title>", re.DOTALL)
CHIP = re.compile(r'<p class="chip (\w+)">(.*?)</p>', re.DOTALL)
TONES: dict[str, Tone] = {"good": "good", "bad": "bad"}
RESULT = re.compile(r'<p class="result">(.*?)</p>', re.DOTALL)
TAG = re.compile("<[^>]*>")
RELATIVE_LINK = re.compile(r'(?<=\s)href="(?!#|[a-z]+:)([^"]+)"')
PARENT_LINKS = re.compile(r'<p class="parents".*?</p>', re.DOTALL)
"""The place on a run's page for links to its parents, empty or not."""


class ParentPage(NamedTuple):
    """A page that a run is a part of, under the name that a reader sees."""

    name: str
    page: Path


def run_links(runs: Iterable[Path], folder: Path) -> dict[str, str]:
    """Return the relative address of each run by the names that a page may call it.

    Args:
        runs: The runs; those that are gone get no link.
        folder: The folder of the page with the links.
    """
    links = dict[str, str]()
    for run in runs:
        address = run_address(run, folder)
        if address:
            names = (str(run), f"{run.parent.name}/{run.name}", run.name)
            links |= dict.fromkeys((*names, run.name.rpartition("__")[2]), address)
    return links


def run_address(run: Path, folder: Path) -> str:
    """The address of a run's page relative to a folder, of the run where it has none; empty where it is gone."""
    page = run / PAGE
    if page.is_file():
        return page_address(page, folder)
    return f"{page_address(run, folder)}/" if run.is_dir() else ""


def page_address(page: Path, folder: Path) -> str:
    """The address of a page relative to a folder, as a link has it."""
    relative = os.path.relpath(page.absolute(), folder.absolute())
    return urllib.parse.quote(Path(relative).as_posix())


class PageHead(NamedTuple):
    """What a page says first; empty texts for a page without a verdict.

    Attributes:
        title: Its title; of a page without one the name of its folder.
        word: The verdict in a word or a few.
        tone: ``good``, ``bad`` or ``open``.
        sentence: The result in a sentence.
    """

    title: str
    word: str = ""
    tone: Tone = "open"
    sentence: str = ""


def read_head(page: Path) -> PageHead:
    """Read what a page says first, which stands at its beginning in the words of its glance."""
    text = page.read_text(encoding="utf-8", errors="replace")
    title = PAGE_TITLE.search(text)
    name = html.unescape(title[1]) if title else page.parent.name
    chip = CHIP.search(text)
    if not chip:
        return PageHead(name)
    sentence = RESULT.search(text)
    plain = TAG.sub("", sentence[1]).replace("\u00a0", " ") if sentence else ""
    word, tone = html.unescape(chip[2]), TONES.get(chip[1], "open")
    return PageHead(name, word, tone, html.unescape(plain))


def rebase_links(text: str, old: Path, new: Path) -> str:
    """Return the HTML of a page whose relative links lead from a new folder to where they led from the old one.

    Args:
        text: The page.
        old: The folder that it was written for.
        new: The folder that it will lie in.
    """

    def rebase(link: re.Match[str]) -> str:
        address, mark, part = link[1].partition("#")
        target = old / urllib.parse.unquote(html.unescape(address))
        slash = "/" if address.endswith("/") else ""
        return f'href="{html.escape(page_address(target, new))}{slash}{mark}{part}"'

    return RELATIVE_LINK.sub(rebase, text)


def parent_links(run: Path, parents: Sequence[ParentPage]) -> str:
    """Return the HTML of a run's links to its parents; a hidden place for them without any.

    Args:
        run: The run.
        parents: See :func:`parent_pages`.
    """
    folder = run.resolve()
    links = {page_address(parent.page, folder): parent.name for parent in parents}
    return render_html("parents.html.j2", parents=links).strip()


def parent_pages(run: Path) -> list[ParentPage]:
    """Return the pages of the outputs folder that a run is a part of; none for a run that lies outside one."""
    run = run.resolve()
    if not re.fullmatch("v[0-9]+", run.parent.name):
        return []
    return _parents_of_runs(run.parents[2]).get(run, [])


def link_to_parents(runs: Iterable[Path]) -> None:
    """Write the links to their parents into the pages of finished runs; all else on the pages stays.

    Args:
        runs: The runs; those without a page, and with a damaged one, are passed over.
    """
    parents_in = dict[Path, Mapping[Path, Sequence[ParentPage]]]()
    for run in {run.resolve(): None for run in runs}:
        page = run / PAGE
        if not page.is_file() or not re.fullmatch("v[0-9]+", run.parent.name):
            continue
        outputs = run.parents[2]
        if outputs not in parents_in:
            parents_in[outputs] = _parents_of_runs(outputs)
        links = parent_links(run, parents_in[outputs].get(run, []))
        text = page.read_text(encoding="utf-8", errors="replace")
        linked_text = PARENT_LINKS.sub(links.replace("\\", r"\\"), text, count=1)
        if linked_text == text or open_run_dir(run).damaged([PAGE]):
            continue
        try:
            with owning(run):
                write_text(page, linked_text)
                open_run_dir(run).renew([PAGE])
        except UserError as error:
            log.warning("%s: no link to what it is a part of (%s)", page, error)


def _parents_of_runs(outputs: Path) -> dict[Path, list[ParentPage]]:
    """Return the parents of each run of a folder of outputs, which is resolved."""
    parents = dict[Path, list[ParentPage]]()
    for pattern in PARENT_FILES:
        for file in sorted(outputs.glob(pattern)):
            page = file.parent / PAGE
            if not page.is_file():
                continue
            try:
                runs = list(dict.fromkeys(_runs_named_in(file, outputs)))
            except UserError as error:
                log.warning("%s: passed over (%s)", file, error)
                continue
            name = read_head(page).title
            if file.name == JOBS:
                name = f"sweep of {len(runs)} {noun_for(len(runs), 'run')}: {name}"
            for run in runs:
                parents.setdefault(run, []).append(ParentPage(name, page))
    return parents


def _runs_named_in(file: Path, outputs: Path) -> Iterator[Path]:
    """Yield the runs that one of :data:`PARENT_FILES` names, where they lie now.

    Args:
        file: The file.
        outputs: The folder of outputs that it is in.
    """
    if file.name == JOBS:
        yield from sweep_runs(file.parent)
        return
    facts = read_json(file)
    recorded = facts.get("runs") or {"run": facts.get("run", "")}
    for run in recorded.values():
        yield outputs.joinpath(*Path(run).parts[-3:])
