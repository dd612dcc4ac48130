"""tools/figures.py: the committed figures are what today's code draws from the committed tables."""

from __future__ import annotations

import base64
import io
import itertools
import json
import lzma
import re
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from posbench.report.page import compact_svg
from posbench.run.folder import open_run_dir
from posbench.search import held_back
from tests.conftest import Result, run_folders
from tests.messages import refused
from tools import figures

pytestmark = pytest.mark.figures

ROOT = Path(__file__).parents[1]
KEPT = [ROOT / gallery.runs for gallery in figures.GALLERIES]
TABLE_10 = "docs/gallery/lpes_table10-tiny-operations.svg"
DRAWN_HERE = f"matplotlib=={version('matplotlib')}\n" in (
    ROOT / "constraints.txt"
).read_text(encoding="utf-8")
as_drawn = pytest.mark.skipif(
    not DRAWN_HERE, reason="another matplotlib than that of constraints.txt"
)


@as_drawn
def test_some_figures_are_what_the_code_draws(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["lpes_table7", "lpes_table10", "masks"]
    status = figures.main(["redraw", *names, "--check"])
    assert status == 0, capsys.readouterr().out


@as_drawn
@pytest.mark.slow
def test_all_figures_are_what_the_code_draws(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = figures.main(["redraw", "--check"])
    assert status == 0, capsys.readouterr().out


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one experiment's tables, figures and gallery."""
    for name in (
        *(gallery.page for gallery in figures.GALLERIES),
        *figures.GALLERY.further,
        TABLE_10,
        "constraints.txt",
        f"{figures.GALLERY.runs}/lpes_table10",
    ):
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy)
        else:
            shutil.copyfile(ROOT / name, copy)
    # Whatever version of matplotlib draws here.
    figures.redraw(tmp_path, ["lpes_table10"])
    return tmp_path


def lines_on(path: str, text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"{path}: ")]


def change_table(root: Path) -> None:
    (table,) = (root / figures.GALLERY.runs).glob("lpes_table10/*/operations.csv")
    rows = pd.read_csv(table)
    rows.loc[rows["way"] == "mutation", ["ratio", "ratio_min", "ratio_max"]] *= 3
    rows.to_csv(table, index=False)


def change_colour(root: Path) -> None:
    file = root / TABLE_10
    file.write_text(file.read_text().replace("#0072b2", "#0073b2", 1))


def move_a_mark(root: Path) -> None:
    file = root / TABLE_10
    text = file.read_text()
    (number,) = re.findall(r"<use [^>]* y=\"([\d.]+)\"", text)[:1]
    file.write_text(text.replace(f'y="{number}"', f'y="{float(number) + 0.5}"', 1))


def remove(root: Path) -> None:
    (root / TABLE_10).unlink()


@pytest.mark.parametrize("change", [change_table, change_colour, move_a_mark, remove])
def test_a_figure_that_differs_is_named_and_drawn_again(
    change: Callable[[Path], None], checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (checkout / TABLE_10).read_bytes()
    change(checkout)
    capsys.readouterr()
    assert figures.redraw(checkout, ["lpes_table10"], check=True) == 1
    assert lines_on(TABLE_10, capsys.readouterr().out)
    assert figures.redraw(checkout, ["lpes_table10"]) == 0
    assert lines_on(TABLE_10, capsys.readouterr().out)
    after = (checkout / TABLE_10).read_bytes()
    assert (after == before) == (change is not change_table)


def test_a_page_that_says_something_else_is_named(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = checkout / figures.GALLERY.page
    text = page.read_text()
    command = "`posbench experiment=lpes_table10"
    assert command in text
    page.write_text(text.replace(command, "`posbench"))
    assert figures.redraw(checkout, ["lpes_table10"], check=True) == 1
    assert lines_on(figures.GALLERY.page, capsys.readouterr().out)
    page.write_text(text)
    capsys.readouterr()
    assert figures.redraw(checkout, ["lpes_table10"], check=True) == 0
    assert not lines_on(figures.GALLERY.page, capsys.readouterr().out)


def test_what_another_version_draws_is_told(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_colour(checkout)
    installed = version("matplotlib")
    for pinned, is_told in ((installed, False), ("0.99", True)):
        (checkout / "constraints.txt").write_text(f"matplotlib=={pinned}\n")
        assert figures.redraw(checkout, ["lpes_table10"], check=True) == 1
        out = capsys.readouterr().out
        assert (f"matplotlib {installed}" in out and "0.99" in out) == is_told


def test_every_committed_picture_is_drawn_or_has_its_reason(tmp_path: Path) -> None:
    page = "![a](gallery/old.png) ![b](gallery/new.svg)"
    for name in (
        "docs/gallery/old.png",
        "docs/gallery/new.svg",
        "docs/gallery/lost.svg",
        "docs/figures/smollm2_a.png",
        "docs/figures/text.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    drawn = {figures.GALLERY.page: page, "docs/gallery/new.svg": ""}
    reasons = figures.without_tables(tmp_path, drawn)
    assert set(reasons) == {
        "docs/gallery/old.png",
        "docs/gallery/lost.svg",
        "docs/figures/smollm2_a.png",
    }
    unknown = [name for name, reason in reasons.items() if reason == figures.NO_SOURCE]
    assert unknown == ["docs/gallery/lost.svg"]


def test_a_name_without_tables_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["redraw", "nothing"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "nothing" in error and "lpes_table10" in error and "keep DIR" in error


def picture(level: int, shade: int = 0) -> str:
    colours = np.zeros((4, 5, 4), np.uint8) + 200
    colours[1, 2, 0] += shade
    buffer = io.BytesIO()
    Image.fromarray(colours).save(buffer, "png", compress_level=level)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<image xlink:href="data:image/png;base64,{data}"/>'


SVG = '<path id="mf1" d="M 1.5 2" style="fill: #440154"/><use xlink:href="#mf1" x="30.25"/>'


@pytest.mark.parametrize(
    ("a", "b", "is_same"),
    [
        (SVG, SVG.replace("30.25", "30.26"), True),
        (SVG, SVG.replace("30.25", "30.30"), False),
        (SVG, SVG.replace("1.5", "-1.5"), False),
        (SVG, SVG.replace("mf1", "m77e1"), True),
        (SVG, SVG.replace('"#mf1"', '"#other"'), False),
        (SVG, SVG.replace("#440154", "#440155"), False),
        (SVG, SVG.replace("use", "tip"), False),
        (SVG, SVG + SVG, False),
        (picture(1), picture(9), True),
        (picture(1), picture(1, shade=1), True),
        (picture(1), picture(1, shade=20), False),
        (SVG, SVG + picture(1), False),
    ],
)
def test_two_drawings_are_the_same_if_the_eye_sees_the_same(
    a: str, b: str, is_same: bool
) -> None:
    assert figures.same_drawing(a, b) == is_same


def test_a_compact_figure_keeps_scales_and_places() -> None:
    svg = '<g>\n    <path d="M 102.123456 0.012345"/>\n  </g>'
    assert compact_svg(svg) == '<g>\n<path d="M 102.12 0.012345"/>\n</g>'


def test_heat_maps_have_the_colours_of_their_scale() -> None:
    scales = np.concatenate(
        [
            255 * matplotlib.colormaps[name](np.arange(256))[:, :3]
            for name in ("viridis", "PuOr_r")
        ]
    )
    seen = 0
    galleries = [(ROOT / gallery.page).with_suffix("") for gallery in figures.GALLERIES]
    for file in (file for folder in galleries for file in folder.glob("*.svg")):
        for data in figures.EMBEDDED_PNG.findall(file.read_text(encoding="utf-8")):
            image = Image.open(io.BytesIO(base64.b64decode(data)))
            rgba = np.asarray(image.convert("RGBA"), dtype=int).reshape(-1, 4)
            colours = np.unique(rgba[rgba[:, 3] == 255][:, :3], axis=0)
            distance = np.abs(colours[:, None] - scales).max(2).min(1)
            assert distance.max(initial=0) <= 1, file.name
            seen += len(colours)
    assert seen > 1000


def test_a_kept_run_is_drawn_as_the_run_was(
    posbench: Callable[..., Result], outputs: Path, tmp_path: Path
) -> None:
    settings = ["task.limit=2", "task.positions=[0%,100%]", "stages=[evaluate,report]"]
    result = posbench("model=tiny", *settings)
    assert result.status == 0, result.err
    (run,) = run_folders(outputs)
    figures.keep(outputs, tmp_path / "kept")
    own = {file.name: file.read_bytes() for file in run.glob("figures/*.svg")}
    with figures.drawn_runs(tmp_path / "kept") as drawn:
        (again,) = run_folders(drawn)
        files = again.glob("figures/*.svg")
        assert {file.name: file.read_bytes() for file in files} == own != {}
        command = json.loads((run / "manifest.json").read_text())["command"]
        kept_command = json.loads((again / "manifest.json").read_text())["command"]
        assert kept_command == re.sub(r" runtime\.outputs=\S+", "", command)
    names = {file.name for file in (tmp_path / "kept").rglob("*") if file.is_file()}
    assert "metrics.csv" in names and not any(".jsonl" in name for name in names)
    assert not names & {"prompts.json", "report.html", "config.yaml"}
    # A table that names a place on the machine stays out of the repository.
    extra = run / "extra.csv"
    extra.write_text("file\n/home/me/data.json\n")
    open_run_dir(run).seal(command)
    with refused(
        str(extra), "/home/me/data.json", allowed="path", hint="relative paths"
    ):
        figures.keep(outputs, tmp_path / "kept")
    left = {file.name for file in (tmp_path / "kept").rglob("*") if file.is_file()}
    assert left == names, "what was kept before stays"


def test_a_committed_search_without_todays_columns_is_drawn(tmp_path: Path) -> None:
    """Its page asks whether it kept the unmodified model, which older tables do not say."""
    kept = tmp_path / "kept"
    shutil.copytree(ROOT / "experiments/results/runs/lpes_fig2", kept / "lpes_fig2")
    for file in kept.rglob(held_back.TABLE_FILE):
        table = pd.read_csv(file).drop(columns=held_back.KEPT, errors="ignore")
        table.to_csv(file, index=False)
    with figures.drawn_runs(kept) as drawn:
        runs = run_folders(drawn)
        assert len(runs) == 2
        assert all(list(run.glob("figures/*.svg")) for run in runs)


def test_a_large_table_is_kept_in_few_bytes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(
        {
            "item": np.tile(np.arange(10), 300),
            "gold_position": np.repeat(np.arange(10), 300),
            "attention": rng.random(3000),
            "standard_error": rng.random(3000),
        }
    )
    rows.to_csv(run / "attention.csv", index=False)
    rows.to_csv(run / "maps.csv", index=False)
    rows[:9].to_csv(run / "small.csv", index=False)
    figures._keep_tables(run, tmp_path / "kept")
    tables = {
        name: pd.read_csv(
            io.BytesIO(lzma.decompress((tmp_path / f"kept/{name}.csv.xz").read_bytes()))
        )
        for name in ("attention", "maps")
    }
    gold = rows[rows["item"] == rows["gold_position"]]
    for name, wanted in (("attention", gold), ("maps", rows)):
        wanted = wanted.drop(columns="standard_error").reset_index(drop=True)
        pd.testing.assert_frame_equal(tables[name], wanted, rtol=1e-5)
    small = pd.read_csv(tmp_path / "kept/small.csv")
    pd.testing.assert_frame_equal(small, rows[:9])


def test_the_kept_tables_are_small_and_name_no_machine() -> None:
    of_gallery = [[f for f in runs.rglob("*") if f.is_file()] for runs in KEPT]
    for files in of_gallery:
        assert sum(file.stat().st_size for file in files) < 3_000_000
    for file in itertools.chain(*of_gallery):
        data = file.read_bytes()
        text = (lzma.decompress(data) if file.suffix == ".xz" else data).decode()
        assert not re.search(r"/(?:home|root|tmp|work|Users)/", text), file
