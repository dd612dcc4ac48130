"""What holds of every figure: one palette, a legend for what is drawn, models and n inside."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from behind_rope.maps import maps_figure
from lpes import rope_curves
from posbench import paths
from posbench.plots import attention, scores, search, sweep
from posbench.plots import base as plot
from posbench.stats.findings import estimate_columns
from posbench.studies import attention_to_gold
from posbench.studies.cost.timing import ratio_figure
from tests import frames
from tests.plots.test_search import GENERATIONS, PARTS, SEARCH
from wu2025.rollout import RESIDUAL_SHARES, rollout_figure
from yu2025 import ablations, channel_subtraction, crop_mask, doubling
from yu2025 import hidden_perturbation as perturbed

pytestmark = pytest.mark.figures

ROLES = (
    plot.BLACK,
    plot.GOLD_COLOUR,
    plot.CONTROL_COLOUR,
    plot.PAPER_COLOUR,
    *plot.COLOURS,
)
DEFICIENT = {  # Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
    "nobody": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
XYZ = np.array(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
)


def seen(colour: str, by: str) -> np.ndarray:
    """A colour in CIELAB as somebody sees it."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    light = XYZ @ np.clip(DEFICIENT[by] @ linear, 0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(light > 0.008856, np.cbrt(light), 7.787 * light + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("by", DEFICIENT)
def test_no_two_meanings_look_alike(by):
    assert len(set(ROLES)) == len(ROLES)
    for one, other in itertools.combinations(ROLES, 2):
        # About 2 is the least that can be seen side by side.
        assert np.linalg.norm(seen(one, by) - seen(other, by)) > 15, (one, other)


def test_colours_are_defined_in_one_place():
    literal = re.compile(
        r"""#[0-9A-Fa-f]{6}\b|colou?r["']?\s*[=:]\s*["'](?!black|white|none)"""
    )
    files = [
        file
        for file in paths.PACKAGE.rglob("*.py")
        if file.name != "base.py" or file.parent.name != "plots"
    ]
    assert len(files) > 100
    named = [
        f"{file.name}: {line}"
        for file in files
        for line in file.read_text().split("\n")
        if literal.search(line)
    ]
    assert named == []


def rows(name: str = "", n: int = 20, **each: Any) -> pd.DataFrame:
    """Every combination of some columns' values, with numbers, their intervals and n."""
    table = pd.DataFrame(list(itertools.product(*each.values())), columns=list(each))
    value = 0.3 + 0.4 * np.sin(np.arange(len(table))) ** 2
    ends = dict(
        zip(estimate_columns(name), (value, value - 0.1, value + 0.1), strict=True)
    )
    return table.assign(**ends, n=n)


DEPTHS = [0.0, 0.5, 1.0]
LAYERS = {"crop_first": 0, "crop_last": 1, "retrieval_first": 2, "retrieval_last": 2}


def cropped() -> Figure:
    table = rows(
        variant=list(crop_mask.CHANGE_LABELS),
        measure=["score", "attention"],
        depth=DEPTHS,
    )
    layers = rows("change", variant=list(crop_mask.CHANGE_LABELS), layer=[0, 1, 2])
    return crop_mask.crop_figure(table.assign(**LAYERS), layers.assign(**LAYERS))


def doubled() -> Figure:
    table = rows("score", mode=list(doubling.MODE_LABELS), depth=DEPTHS).assign(items=9)
    return doubling.doubling_figure(
        table.merge(rows("attention", mode=list(doubling.MODE_LABELS), depth=DEPTHS)), 4
    )


def subtracted() -> Figure:
    variants = ["none", "gold", "other", "gold_control_3", "other_control_3"]
    table = rows(variant=variants, measure=["channel", "attention"], item=range(5))
    return channel_subtraction.items_figure(
        table.assign(gold=2, other=3, tested_channel=7)
    )


def curved() -> Figure:
    table = rows(
        variant=list(perturbed.VARIANT_LABELS),
        layer=[0, 1, 2],
        token=[0, 9, 20],
        channel=[7],
    )
    return perturbed.curves_figure(
        table.assign(control=False, start=8, end=12), n=table["n"]
    )


def changed() -> Figure:
    table = rows(
        "change",
        variant=["crop", "shift"],
        layer=[0, 1],
        channel=[7, 8],
        where=["inside"],
    )
    return perturbed.layers_figure(table.assign(control=table["channel"] == 8))


def ablated() -> Figure:
    names = ["none", ablations.FULL, ablations.CONTROL]
    table = rows(ablation=names).merge(rows("difference", ablation=names))
    return ablations.ablation_figure(table.assign(paper=[0.5, 0.6, np.nan]))


def headed() -> Figure:
    table = rows("score", layer=[0, 1], head=[0, 1])
    return attention_to_gold.head_figure(table.assign(retrieval=table["head"] == 1))


def mapped() -> Figure:
    table = rows("attention", layer=[0, 1, 2], gold_position=[0, 4], item=range(5))
    return attention_to_gold.map_panels(
        table, "layer", {layer: f"layer {layer}" for layer in range(3)}
    )


def rolled() -> Figure:
    return rollout_figure(
        rows("weight", rollout=list(RESIDUAL_SHARES), layers=[1, 2], part=range(4))
    )


def timed() -> Figure:
    table = rows("ratio", work=["prefill"], way=["none", "ms_poe"]).assign(base="none")
    table = table.rename(
        columns={"ratio_ci_low": "ratio_min", "ratio_ci_high": "ratio_max"}
    )
    return ratio_figure(table.assign(paper=["", "1.45 (LPES, Table 5)"]))


def trended() -> Figure:
    table = rows(
        group=["tiny", "tiny_b"],
        statistic=list(sweep.PANELS),
        number=["-1", "0", "1", "none"],
    )
    return sweep.trend(table.assign(axis="method.factor"))


def swept_models() -> Figure:
    parts = [
        frames.attention().assign(model=model, run=model)
        for model in ("tiny", "tiny_b")
    ]
    return sweep.attention_sweep(pd.concat(parts), "model")


FIGURES: dict[str, Callable[[], Figure]] = {
    "accuracy": lambda: scores.accuracy_by_position(frames.metrics()),
    "models": lambda: scores.accuracy_by_model(
        pd.concat([frames.metrics(), frames.metrics(model="b")])
    ),
    "attention": lambda: attention.attention_by_position(frames.attention()),
    "factors": lambda: sweep.factor_sweep(frames.sweep([-1.0, 0.5, 1.0])),
    "channel": lambda: search.channel_figure(frames.channels(), 33, n=[7]),
    "candidates": lambda: search.candidate_losses_figure(frames.search()),
    "convergence": lambda: search.convergence_figure(GENERATIONS, n=[360]),
    "curve": lambda: search.curve_figure(PARTS, SEARCH.assign(scored=360)),
    "maps": lambda: maps_figure(
        [("alpha 0", {"layer 0": np.tril(np.ones((4, 4))), "layer 1": np.eye(4)})],
        n=[9],
    ),
    **{
        make.__name__: make
        for make in (cropped, doubled, subtracted, curved, changed, ablated, headed)
    },
    **{make.__name__: make for make in (mapped, rolled, timed, trended, swept_models)},
}


@pytest.fixture(scope="module", params=FIGURES)
def figure(request: pytest.FixtureRequest) -> Figure:
    """One figure of each kind, signed and laid out as it is saved."""
    drawn = FIGURES[request.param]()
    plot.sign(drawn, ["tiny", "tiny_b"])
    plot.styled(drawn.draw_without_rendering)()
    return drawn


def lines(figure: Figure) -> list[tuple[str, str]]:
    """Name and colour of every line; points with intervals have the name of the pair."""
    pairs = {
        bars.lines[0]: bars.get_label()
        for axes in figure.axes
        for bars in axes.containers
        if hasattr(bars, "lines")
    }
    every = [line for axes in figure.axes for line in axes.get_lines()]
    return [
        (str(pairs.get(line, line.get_label())), to_hex(line.get_color()))
        for line in every
    ]


def test_every_name_stands_in_a_legend_and_every_colour_has_a_name(figure):
    boxes = [
        *figure.legends,
        *(box for axes in figure.axes if (box := axes.get_legend())),
    ]
    told = {text.get_text() for box in boxes for text in box.get_texts()}
    assert {
        label for axes in figure.axes for label in axes.get_legend_handles_labels()[1]
    } <= told
    named = {colour for label, colour in lines(figure) if not label.startswith("_")}
    assert {colour for _, colour in lines(figure)} <= named | {
        to_hex(plot.GUIDE),
        to_hex(plot.SHADE),
    }


def test_lines_are_drawn_in_colours_of_the_palette(figure):
    scale = {
        to_hex(plot.line_style(step, steps=of)["color"])
        for of in range(1, 9)
        for step in range(of)
    }
    palette = {to_hex(colour) for colour in (*ROLES, plot.GUIDE, plot.SHADE)} | scale
    assert {colour for _, colour in lines(figure)} <= palette
    maps = {
        image.get_cmap().name for axes in figure.axes for image in axes.get_images()
    }
    assert maps <= {"viridis", "PuOr_r"}, "a value and a change"


def test_models_and_n_stand_inside(figure):
    words = figure.get_suptitle()
    assert "tiny, tiny_b" in words and re.search(r"n = \d", words)
    place = figure._suptitle.get_window_extent()
    assert (
        figure.bbox.x0 <= place.x0
        and place.x1 <= figure.bbox.x1
        and place.y1 <= figure.bbox.y1
    )
    assert not any(axes.get_tightbbox().overlaps(place) for axes in figure.axes), (
        "nothing lies under it"
    )


def test_what_is_exact_names_no_model():
    drawn, _ = plot.new_figure(3, 2, n="exact")
    plot.sign(drawn, ["tiny"])
    assert drawn.get_suptitle() == "exact"


def test_a_role_has_its_colour_wherever_it_is_drawn():
    for figure, control in (
        (cropped(), "crop another (control)"),
        (doubled(), "a random other item (control)"),
    ):
        handles = dict(zip(*plot.legend_entries(figure)[::-1], strict=True))
        assert handles[control].get_color() == plot.CONTROL_COLOUR
        assert handles[control].get_zorder() > handles["unmodified"].get_zorder(), (
            "not hidden under its dashes"
        )
        assert handles["unmodified"].get_color() == plot.BLACK
    assert handles["the gold item"].get_color() == plot.GOLD_COLOUR
    gold = dict(zip(*plot.legend_entries(subtracted())[::-1], strict=True))["gold item"]
    assert gold.get_color() == plot.GOLD_COLOUR
    assert (
        dict(zip(*plot.legend_entries(timed())[::-1], strict=True))["paper"].get_color()
        == plot.PAPER_COLOUR
    )


def test_models_get_colours_of_their_own_and_numbers_steps_of_a_scale():
    names = [
        style["color"] for style in sweep.setting_styles(["tiny", "tiny_b", *"cdefg"])
    ]
    assert set(names) == set(plot.COLOURS)
    assert not set(
        map(to_hex, (s["color"] for s in sweep.setting_styles(["-1", "0", "1"])))
    ) & {c.lower() for c in names}


def hidden_in_layers(num_layers: int) -> Figure:
    table = rows(
        variant=list(perturbed.VARIANT_LABELS),
        layer=list(range(num_layers)),
        token=[8, 100, 254],
        channel=[382],
    )
    return perturbed.curves_figure(
        table.assign(control=False, start=102, end=153), n=table["n"]
    )


def channel_in_layers(num_layers: int) -> Figure:
    table = rows(
        channel=["382"],
        site=["attention_input"],
        layer=list(range(num_layers)),
        token=[8, 100, 254],
    )
    return search.channel_figure(
        table.assign(sliding_mean=table["value"]), "382", n=[20]
    )


def thirds_over_layers(num_layers: int) -> Figure:
    table = rows(
        "attention",
        scale=[1.0, 1.5],
        layer=list(range(num_layers)),
        third=["first", "middle", "last"],
    )
    return rope_curves.thirds_figure(table)


@pytest.mark.parametrize("num_layers", [4, 30])
@pytest.mark.parametrize(
    "draw", [hidden_in_layers, channel_in_layers, thirds_over_layers]
)
def test_panels_of_many_layers_keep_their_labels_apart_and_inside(draw, num_layers):
    figure = draw(num_layers)
    figure.draw_without_rendering()
    for axes in figure.axes:
        low, high = axes.get_xlim()
        boxes = [
            label.get_window_extent()
            for tick, label in zip(
                axes.get_xticks(), axes.get_xticklabels(), strict=True
            )
            if low <= tick <= high
        ]
        assert len(boxes) >= 2
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))
        label_box = axes.xaxis.label.get_window_extent()
        assert figure.bbox.x0 <= label_box.x0 and label_box.x1 <= figure.bbox.x1
