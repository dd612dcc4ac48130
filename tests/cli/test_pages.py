"""Every kind of page in a browser, as wide as a phone and as a screen: nothing is cut, lost or too wide."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest

from posbench.cli.main import main
from posbench.run.folder import RunDir
from tests.browser import axe_core, axe_faults, looks
from tests.conftest import run_folders

FEW = [
    "task.pairs=12",
    "task.positions=[0,5,11]",
    "task.limit=6",
    "runtime.resamples=100",
]
SEARCH = [
    "method=layer_scaling",
    "search=genetic",
    "search.population=6",
    "search.parents=3",
]
SEARCH += [
    "search.mutations=3",
    "search.crossovers=2",
    "search.generations=2",
    "task.calibration_examples=6",
]


@pytest.fixture(scope="module")
def pages(
    small: list[str], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A page of each kind, by its title."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copytree(checkpoint, folder / "a" / "another-checkpoint-of-the-same-family")
    both = f"model.path={checkpoint},{folder / 'a' / 'another-checkpoint-of-the-same-family'}"
    out = f"runtime.outputs={folder / 'outputs'}"
    run = [key for key in small if not key.startswith(("stages=", "model.path="))]
    run += ["stages=[search,intervene,evaluate,report]"]
    calls = [
        [*run, f"model.path={checkpoint}"],
        [*SEARCH, *FEW, "stages=[search,report]"],
    ]
    calls += [["-m", *run, both], ["-m", "method.factor=0,0.5,2", *FEW]]
    calls += [["-m", "study=crop_mask", "model=tiny,tiny_b", "study.examples=6", *FEW]]
    for call in calls:
        assert main([*call, out]) == 0
    assert main(["report", str(folder / "outputs")]) == 0
    found = {
        str(run.relative_to(folder)): run / "report.html"
        for run in run_folders(folder / "outputs")
    }
    found |= {
        str(file.parent): file
        for file in folder.glob("outputs/*/v*/sweep__*/report.html")
    }
    swept = [run for run in run_folders(folder / "outputs") if has_factor(run)]
    compared = folder / "compared"
    assert main(["compare", *map(str, swept[:3]), f"--out={compared}"]) == 0
    assert main(["diagnose", "model=tiny", "budget=1min", out]) == 0
    (diagnosis,) = (folder / "outputs" / "diagnose").glob("*/report.html")
    assert main(["view", str(folder / "outputs")]) == 0
    copies = (folder / "outputs" / "gallery" / "pages").glob("*/*.html")
    return found | {
        "gallery": folder / "outputs" / "gallery" / "index.html",
        **{f"gallery {file.parent.name}": file for file in copies},
        "compare": compared / "report.html",
        "diagnosis": diagnosis,
        "view": folder / "outputs" / "index.html",
    }


def has_factor(run: Path) -> bool:
    """Whether a run is one of the sweep over factors."""
    method = RunDir(run).config().get("method") or {}
    return method.get("name") == "scale_channel" and method.get("factor") is not None


@pytest.mark.slow
@pytest.mark.parametrize("is_dark", [False, True])
def test_pages_are_accessible(
    is_dark: bool, pages: dict[str, Path], tmp_path: Path
) -> None:
    axe = axe_core(tmp_path)
    for name, page in pages.items():
        assert axe_faults(page, axe, is_dark) == [], name


@pytest.mark.slow
def test_pages_stay_small_and_their_links_lead_somewhere(
    pages: dict[str, Path],
) -> None:
    for name, page in pages.items():
        text = page.read_text()
        if name != "gallery":
            assert len(text.encode()) <= 500_000, name
        for address in re.findall(r'href="([^"#]+)', text):
            target = page.parent / unquote(html.unescape(address))
            assert target.exists(), f"{name}: {address}"


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_in_a_browser(width: int, pages: dict[str, Path]) -> None:
    assert sum("sweep__" in name for name in pages) == 3
    for name, page in pages.items():
        found = looks(page, width)
        assert found["page"] <= found["width"] == width, name
        drawn = "<svg" in page.read_text() or name == "view"
        assert found["shown"] or drawn or "sweep__" in name, name
        assert (found["lost"], found["cut"], found["small"]) == ([], [], []), name
