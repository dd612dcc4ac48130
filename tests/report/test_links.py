"""Links between pages: from a run up to its sweep and its diagnosis, wherever the outputs lie."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest

from posbench.cli.main import main
from posbench.report.links import link_to_parents, rebase_links
from posbench.run.folder import JOBS, RunDir
from posbench.run.lease import owning
from tests.conftest import Result, run_folders


def parents_of(run: Path) -> list[tuple[str, Path]]:
    """Name and page of each parent that a run's page links."""
    (place,) = re.findall(
        '<p class="parents".*?</p>', (run / "report.html").read_text(), re.DOTALL
    )
    links = re.findall('<a href="([^"]+)">([^<]+)</a>', place)
    assert bool(links) != (" hidden" in place), place
    return [
        (html.unescape(name), (run / unquote(html.unescape(address))).resolve())
        for address, name in links
    ]


@pytest.fixture
def swept(
    small: list[str], posbench: Callable[..., Result], outputs: Path
) -> tuple[list[Path], Path]:
    """The runs of a sweep, of which one was made alone before, and the sweep."""
    settings = [*small, "stages=[evaluate,report]", "method.layers=[1,2]"]
    settings += ["method.channel=3"]
    assert posbench(*settings, "method.factor=0.5").status == 0
    (alone,) = run_folders(outputs)
    assert parents_of(alone) == []
    assert posbench("-m", *settings, "method.factor=0.5,0").status == 0
    (jobs,) = outputs.glob(f"*/*/*/{JOBS}")
    return run_folders(outputs), jobs.parent


def test_runs_link_back_to_their_sweep(
    swept: tuple[list[Path], Path], outputs: Path, tmp_path: Path
) -> None:
    runs, sweep = swept
    assert len(runs) == 2
    pages = [(run / "report.html").read_bytes() for run in runs]
    for run in runs:
        ((name, page),) = parents_of(run)
        assert page == sweep / "report.html"
        assert "sweep of 2 runs" in name and "method.factor" in name
        assert RunDir(run).done and not RunDir(run).damaged(), "its books hold the page"
    # A page that is drawn again has the same link, also where the outputs have moved.
    moved = tmp_path / "elsewhere"
    outputs.rename(moved)
    for run, page in zip(runs, pages, strict=True):
        place = moved / run.relative_to(outputs)
        assert (
            parents_of(place)[0][1]
            == moved / sweep.relative_to(outputs) / "report.html"
        )
        assert main(["report", str(place)]) == 0
        assert (place / "report.html").read_bytes() == page
    # Without the sweep there is nothing to link to.
    shutil.rmtree(moved / sweep.relative_to(outputs))
    place = moved / runs[0].relative_to(outputs)
    assert main(["report", str(place)]) == 0
    assert parents_of(place) == []


def test_only_the_links_of_an_intact_page_are_written(
    swept: tuple[list[Path], Path], outputs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A diagnosis that names the runs is added; a damaged page, and one that another process owns, stay as they are."""
    runs, _ = swept
    diagnosis = outputs / "diagnose" / "some__x"
    diagnosis.mkdir(parents=True)
    (diagnosis / "report.html").write_text(
        "<title>a &amp; b: diagnosis - posbench</title>"
    )
    named = {"runs": {"shape": str(Path("old") / runs[0].relative_to(outputs.parent))}}
    (diagnosis / "diagnosis.json").write_text(json.dumps(named))
    before = (runs[0] / "report.html").read_text()
    damaged = (runs[1] / "report.html").read_text().replace("posbench", "another")
    (runs[1] / "report.html").write_text(damaged)
    with owning(runs[0]):
        link_to_parents(runs)
    assert (runs[0] / "report.html").read_text() == before
    assert str(runs[0]) in caplog.text
    # Damage elsewhere in a run is still seen after its page was written.
    table = runs[0] / "metrics.csv"
    intact = table.read_text()
    table.write_text(intact.replace("0", "1"))
    link_to_parents(runs)
    assert RunDir(runs[0]).damaged() == ["metrics.csv"]
    table.write_text(intact)
    assert not RunDir(runs[0]).damaged()
    assert (runs[1] / "report.html").read_text() == damaged
    assert RunDir(runs[1]).damaged() == ["report.html"]
    (name, page) = parents_of(runs[0])[1]
    assert (name, page) == ("a & b: diagnosis", diagnosis / "report.html")
    after = (runs[0] / "report.html").read_text()
    (place,) = re.findall('<p class="parents".*?</p>', after, re.DOTALL)
    assert after.replace(place, "") == re.sub('<p class="parents".*?</p>', "", before)
    # A file that cannot be read is passed over.
    (diagnosis / "diagnosis.json").write_text("{")
    link_to_parents(runs)
    assert len(parents_of(runs[0])) == 1 and "diagnosis.json" in caplog.text


def test_a_copied_page_links_to_where_it_did(tmp_path: Path) -> None:
    text = (
        '<a href="../run a/report.html#position=3"><a class="point" href="../b%20c/">'
        '<a href="#made"><a href="https://example.org/x"><a href="x&amp;y.html">'
    )
    moved = rebase_links(text, tmp_path / "v1/sweep", tmp_path / "gallery/pages/x")
    assert re.findall('href="([^"]*)"', moved) == [
        "../../../v1/run%20a/report.html#position=3",
        "../../../v1/b%20c/",
        "#made",
        "https://example.org/x",
        "../../../v1/sweep/x%26y.html",
    ]
