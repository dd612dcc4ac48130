"""A figure as a Vega-Lite specification holds the numbers that were drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from posbench.plots.base import VEGA, save
from posbench.plots.vega import specification

pytestmark = pytest.mark.figures


def marks(view: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each layer, by mark."""
    return {layer["mark"]["type"]: layer["data"]["values"] for layer in view["layer"]}


def test_lines_bands_and_intervals() -> None:
    figure = Figure()
    axes = figure.subplots()
    axes.plot([0, 1, 2], [5, 3, np.nan], label="none")
    axes.fill_between([0, 1], [4, 2], [6, 4])
    axes.errorbar([0, 1], [7, 8], yerr=[[1, 1], [2, 2]], label="method")
    axes.axhline(9)
    axes.set(xlabel="depth", ylabel="accuracy", xscale="log", title="a")
    (view,) = specification(figure)["concat"]
    layers = marks(view)
    assert layers["line"] == [
        {"series": "none", "x": 0.0, "y": 5.0},
        {"series": "none", "x": 1.0, "y": 3.0},
        {"series": "none", "x": 2.0, "y": None},
        {"series": "method", "x": 0.0, "y": 7.0},
        {"series": "method", "x": 1.0, "y": 8.0},
    ]
    assert layers["area"] == [
        {"series": "", "x": 0.0, "y": 4.0, "y2": 6.0},
        {"series": "", "x": 1.0, "y": 2.0, "y2": 4.0},
    ]
    assert [(bar["y"], bar["y2"]) for bar in layers["rule"]] == [(6, 9), (7, 10)]
    x = view["layer"][0]["encoding"]["x"]
    assert (x["title"], x["scale"]["type"], view["title"]) == ("depth", "log", "a")


def test_bars_and_heat_maps() -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    left.bar([0, 1], [2, 3], width=0.5, label="cost")
    image = right.imshow([[1, 2, 3], [4, 5, 6]], origin="lower")
    figure.colorbar(image)
    made = specification(figure)
    assert made["columns"] == 2 and len(made["concat"]) == 2
    bars, cells = (marks(view)["rect"] for view in made["concat"])
    assert [(bar["x"], bar["x2"], bar["y2"]) for bar in bars] == [
        (-0.25, 0.25, 2),
        (0.75, 1.25, 3),
    ]
    assert {bar["series"] for bar in bars} == {"cost"}
    assert [cell["value"] for cell in cells] == [1, 2, 3, 4, 5, 6]
    last = cells[-1]
    assert (last["x"], last["x2"], last["y"], last["y2"]) == (1.5, 2.5, 0.5, 1.5)


def test_the_same_figure_gives_the_same_file(tmp_path: Path) -> None:
    texts = []
    for name in "ab":
        figure = Figure()
        figure.subplots().plot([0, 1], [2, 3])
        save(figure, tmp_path / name, [VEGA])
        texts.append((tmp_path / f"{name}.{VEGA}").read_text())
    assert texts[0] == texts[1]
    assert json.loads(texts[0])["$schema"].startswith("https://vega.github.io/schema/")
