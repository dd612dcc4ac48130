"""Figures carry exactly the numbers of their frames, and their files are the same bytes every time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from posbench.plots import base as plot
from posbench.plots.attention import attention_by_position
from posbench.plots.base import FORMATS, save
from posbench.plots.scores import accuracy_by_model, accuracy_by_position, by_subset
from posbench.plots.search import candidate_losses_figure, channel_figure
from posbench.plots.sweep import attention_sweep, factor_sweep, with_setting
from posbench.stats.scores import SUBSET_COLUMNS
from tests.frames import AFTER, BEFORE, attention, channels, metrics, search, sweep
from tests.messages import assert_names, refused

pytestmark = pytest.mark.figures

ROOT = Path(__file__).parents[2]


def line(axes, label: str):
    (found,) = [one for one in axes.lines if one.get_label() == label]
    return found


def test_accuracy_lines_and_bands_carry_the_frame():
    axes = accuracy_by_position(metrics()).axes[0]
    np.testing.assert_allclose(line(axes, "unmodified").get_xdata(), [0, 50, 100])
    np.testing.assert_allclose(
        line(axes, "unmodified").get_ydata(), np.multiply(BEFORE, 100)
    )
    np.testing.assert_allclose(
        line(axes, "scale_channel").get_ydata(), np.multiply(AFTER, 100)
    )
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx(101) and band.min() == pytest.approx(57)
    assert "%" in axes.get_xlabel() and "%" in axes.get_ylabel()


def test_positions_are_sorted_as_numbers_and_models_kept_apart():
    frame = pd.concat([metrics().iloc[::-1], metrics(model="other")])
    axes = accuracy_by_position(frame).axes[0]
    np.testing.assert_allclose(
        line(axes, "scale_channel, model tiny").get_xdata(), [0, 50, 100]
    )
    assert len(axes.lines) == 4


def test_a_panel_for_each_model_with_the_unmodified_one_once():
    """Each run of a sweep measured the unmodified model again; a method keeps its colour in all panels."""
    other = metrics().replace({"method": {"scale_channel": "ms_poe"}})
    frame = pd.concat(
        [metrics(), other, other.assign(model="other")], ignore_index=True
    )
    first, second = accuracy_by_model(frame).axes
    assert (first.get_title(), second.get_title()) == ("tiny", "other")
    assert (len(first.lines), len(second.lines)) == (3, 2)
    for axes in (first, second):
        np.testing.assert_allclose(
            line(axes, "unmodified").get_ydata(), np.multiply(BEFORE, 100)
        )
        np.testing.assert_allclose(
            line(axes, "ms_poe").get_ydata(), np.multiply(AFTER, 100)
        )
    assert line(first, "ms_poe").get_color() == line(second, "ms_poe").get_color()
    assert line(first, "ms_poe").get_color() != line(first, "scale_channel").get_color()


def test_attention_names_the_strongest_layer_and_shows_the_change():
    left, right, *_ = attention_by_position(attention()).axes
    assert "layer 1" in left.get_title()
    np.testing.assert_allclose(
        line(left, "scale_channel").get_ydata(), [0.03, 0.032, 0.034]
    )
    np.testing.assert_allclose(right.images[0].get_array(), np.full((2, 3), 0.01))
    assert right.images[0].norm.vmin == -right.images[0].norm.vmax


def test_attention_of_one_method_alone_and_no_change():
    only = attention()[lambda f: f["method"] == "none"]
    _, right, *_ = attention_by_position(only).axes
    np.testing.assert_allclose(
        right.images[0].get_array(), [[0.01, 0.012, 0.014], [0.02, 0.022, 0.024]]
    )
    _, right, *_ = attention_by_position(attention(gain=0)).axes
    assert not np.any(right.images[0].get_array())
    _, right, *_ = attention_by_position(attention(gain=-1e-9)).axes
    assert right.images[0].norm.vmax == pytest.approx(0.05 * 0.024), (
        "rounding is not drawn as a change"
    )


def test_channel_lines_have_a_panel_for_each_site_and_layer():
    figure = channel_figure(channels(), 33, n=[7])
    assert [axes.get_title() for axes in figure.axes] == ["layer 0", "layer 1"] * 2
    assert ["input" in axes.get_ylabel() for axes in figure.axes[::2]] == [True, False]
    raw, mean = figure.axes[3].lines
    np.testing.assert_allclose(raw.get_ydata(), [1.01, 1.09, 1.21, 1.29, 1.41])
    np.testing.assert_allclose(mean.get_ydata(), [1, 1.1, 1.2, 1.3, 1.4])
    low, high = figure.axes[3].get_ylim()
    assert 0.9 < low < 1 and high < 1.5, (
        "the other layer, near 0, does not flatten this one"
    )
    huge = channels().assign(value=lambda f: f["value"].where(f["token"] > 0, 500))
    axes = channel_figure(huge, 33).axes[0]
    assert "(500)" in axes.get_title() and axes.get_ylim()[1] < 2
    with refused("channels (channel 34)", "no row", allowed="value", hint="stage"):
        channel_figure(channels(), 34)


def test_a_channel_of_a_deep_model_has_some_of_its_layers_and_says_so():
    table = pd.concat(
        channels().query("layer == 0").assign(layer=layer) for layer in range(31)
    )
    figure = channel_figure(table, 33)
    drawn = [axes.get_title() for axes in figure.axes]
    assert drawn == [f"layer {layer}" for layer in range(0, 31, 3)] * 2
    assert figure.get_suptitle() == "one layer of 3; the others are left out"
    assert not channel_figure(channels(), 33).get_suptitle()


def test_candidates_are_the_best_and_the_winner():
    axes = candidate_losses_figure(search()).axes[0]
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert (
        labels[0] == "ch 0 x 0, layers 1-3"
        and labels[-1].startswith("ch 35 ")
        and len(labels) == 31
    )
    np.testing.assert_allclose(
        line(axes, "selected").get_xdata(), [search()["loss"][35]]
    )
    assert set(line(axes, "unmodified").get_xdata()) == {1.5}
    assert_names(axes.figure.get_suptitle(), "30", "40 candidates", "selected")
    assert "selected" not in [
        one.get_label()
        for one in candidate_losses_figure(search(3, None)).axes[0].lines
    ]


def test_factor_sweep_sorts_numbers_and_draws_the_unmodified_once():
    left, right = factor_sweep(sweep([1.0, -1.0, 0.5])).axes
    points = left.lines[0]
    np.testing.assert_allclose(points.get_xdata(), [-1, 0.5, 1])
    np.testing.assert_allclose(
        points.get_ydata(), 100 * (np.mean(AFTER) - np.array([0.1, 0.05, 0.1]))
    )
    assert [one.get_label() for one in right.lines] == ["-1", "0.5", "1", "unmodified"]
    np.testing.assert_allclose(
        line(right, "0.5").get_ydata(), 100 * (np.array(AFTER) - 0.05)
    )


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ([1e-5, 1e-3], "log"),
        ([0.01, 0.5], "linear"),
        ([0.0, 1.0], "linear"),
        ([-1.0, 1000.0], "linear"),
    ],
)
def test_only_positive_settings_of_many_magnitudes_have_a_logarithmic_axis(
    settings: list[float], scale: str
):
    left, _ = factor_sweep(sweep(settings)).axes
    assert left.get_xscale() == scale


def test_what_was_asked_without_positions_is_a_horizontal_line():
    """A closed book has one score, beside which those by position are read."""
    closed = metrics("none")
    closed = closed[closed["gold_position"] == "all"].assign(
        value=0.2, ci_low=0.1, ci_high=0.35
    )
    runs = pd.concat([metrics("none").assign(method="a"), closed.assign(method="b")])
    by_position = accuracy_by_position(runs).axes[0]
    settings = pd.concat(
        [
            metrics("none").assign(**{"run": "1", "task.prompt": "official"}),
            closed.assign(**{"run": "2", "task.prompt": "closed_book"}),
        ]
    )
    swept = factor_sweep(settings, "task.prompt").axes[1]
    for axes, label, other in (
        (by_position, "b", "a"),
        (swept, "closed_book", "official"),
    ):
        level = line(axes, label)
        assert list(level.get_xdata()) == [0, 1]  # the width of the axes
        np.testing.assert_allclose(level.get_ydata(), 20)
        assert len(line(axes, other).get_xdata()) == 3
        shade = axes.patches[-1].get_extents().transformed(axes.transData.inverted())
        np.testing.assert_allclose([shade.y0, shade.y1], [10, 35])
    # With positions alone there is no such line.
    assert len(accuracy_by_position(metrics("none")).axes[0].lines) == 1


def test_a_block_of_keys_is_told_without_braces():
    blocks = {1.0: "{points:1}", 0.5: "{curve:free,step:2}"}
    both = sweep([1.0, 0.5])
    _, settings, _ = with_setting(
        both.assign(block=both["method.factor"].map(blocks)), "block"
    )
    assert sorted(settings) == ["curve free, step 2", "points 1"]


def test_an_unmodified_model_of_another_name_is_black():
    table = metrics().replace({"method": {"none": "unmodified, served"}})
    names = ["none", "unmodified, served"]
    axes = accuracy_by_position(table, names).axes[0]
    colours = {one.get_label(): one.get_color() for one in axes.lines}
    assert colours.pop("unmodified, served") == plot.BLACK
    assert plot.BLACK not in colours.values()


def test_seeds_are_names_without_an_order():
    table = sweep([2, 0, 1]).rename(columns={"method.factor": "search.seed"})
    left, right = factor_sweep(table, "search.seed").axes
    names = [text.get_text() for text in left.get_xticklabels()]
    assert names == ["seed 2", "seed 0", "seed 1"]
    colours = [one.get_color() for one in right.lines[:3]]
    assert colours == [plot.line_style(index)["color"] for index in range(3)]
    # No line joins the points: each has one place on the x axis.
    assert all(len(set(one.get_xdata())) == 1 for one in left.lines[:3])


def test_few_lines_of_a_sweep_have_bands_and_many_have_none():
    for settings, num_bands in (([0.5, 1.0], 3), ([0.1 * i for i in range(6)], 1)):
        right = factor_sweep(sweep(settings)).axes[1]
        assert len(right.collections) == num_bands  # the unmodified model's among them


def test_many_lines_have_a_panel_with_their_changes():
    assert len(factor_sweep(sweep([0.1 * i for i in range(5)])).axes) == 2
    settings = [0.1 * i for i in range(6)]
    table = sweep(settings)
    _, scores, changes = factor_sweep(table).axes
    base = np.array(line(scores, "unmodified").get_ydata())
    *drawn, zero = changes.lines
    assert len(drawn) == len(settings) and list(zero.get_ydata()) == [0, 0]
    for change, score in zip(drawn, scores.lines, strict=False):
        np.testing.assert_allclose(change.get_xdata(), score.get_xdata())
        np.testing.assert_allclose(change.get_ydata(), score.get_ydata() - base)
        assert change.get_color() == score.get_color()


def test_long_names_of_settings_stand_beside_their_points_alone():
    names = {0.5: "a long name of a setting", 1.0: "another long name of a setting"}
    table = sweep([1.0, 0.5])
    table["block"] = table["method.factor"].map(names)
    figure = factor_sweep(table.drop(columns="method.factor"), "block")
    left, right = figure.axes
    listed = [text.get_text() for text in left.get_yticklabels()]
    assert sorted(listed) == sorted(names.values())
    legend = [text.get_text() for box in figure.legends for text in box.get_texts()]
    assert legend == ["unmodified"]
    for index, name in enumerate(listed):
        point = left.containers[index].lines[0]
        assert list(point.get_ydata()) == [index]
        assert point.get_color() == line(right, name).get_color()
        assert point.get_marker() == line(right, name).get_marker()
        mean = np.mean(line(right, name).get_ydata())
        np.testing.assert_allclose(point.get_xdata(), [mean])


def test_sweep_over_models_keeps_each_unmodified():
    parts = [
        metrics(model=m).assign(run=m, value=lambda f, i=i: f["value"] - 0.1 * i)
        for i, m in enumerate(("a", "b"))
    ]
    left, right = factor_sweep(pd.concat(parts), "model").axes
    assert [text.get_text() for text in left.get_xticklabels()] == ["a", "b"]
    assert len(right.lines) == 4
    np.testing.assert_allclose(
        right.lines[3].get_ydata(), np.multiply(BEFORE, 100) - 10
    )


def test_one_setting_with_two_runs_is_refused():
    with refused(
        "method.factor", "0.5 (several runs)", allowed="setting", hint="column"
    ):
        factor_sweep(sweep([0.5, 0.5]))


def test_attention_sweep_lines():
    parts = [
        attention(g).assign(**{"run": str(g), "method.factor": g}) for g in (0.01, 0.0)
    ]
    axes = attention_sweep(pd.concat(parts)).axes[0]
    np.testing.assert_allclose(line(axes, "0.01").get_ydata(), [0.03, 0.032, 0.034])
    np.testing.assert_allclose(
        line(axes, "unmodified").get_ydata(), [0.02, 0.022, 0.024]
    )


def test_runs_with_fewer_items_reach_the_end_of_the_axis():
    few = attention().assign(run="few", pairs=3)
    many = few.assign(run="many", pairs=5)
    many[["item", "gold_position"]] *= 2
    rows = pd.concat([few, many], ignore_index=True)
    axes = attention_sweep(rows, "pairs").axes[0]
    for name in ("3", "5"):
        np.testing.assert_allclose(line(axes, name).get_xdata(), [0, 50, 100])


def test_subsets_are_points_with_intervals_and_averages_come_last():
    rows = [
        (
            "tiny",
            method,
            "qa",
            name,
            kind,
            "score",
            value + gain,
            9,
            value + gain - 0.1,
            value + gain + 0.1,
            0,
        )
        for method, gain in (("none", 0.0), ("x", 0.2))
        for name, kind, value in (
            ("a_b", "subset", 0.3),
            ("c", "subset", 0.5),
            ("all", "average", 0.4),
        )
    ]
    axes = by_subset(pd.DataFrame(rows, columns=list(SUBSET_COLUMNS))).axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a b", "c", "all"]
    for container, gain in zip(axes.containers, (0, 20), strict=True):
        np.testing.assert_allclose(
            container.lines[0].get_xdata(), np.array([30, 50, 40]) + gain
        )
        ends = np.array(
            [segment[:, 0] for segment in container.lines[2][0].get_segments()]
        )
        np.testing.assert_allclose(np.ptp(ends, axis=1), 20)
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == [
        "unmodified",
        "x",
    ]


@pytest.mark.parametrize(
    ("frame", "value"),
    [
        (metrics().drop(columns="value"), "columns missing: value"),
        (metrics().iloc[:0], "no row"),
    ],
)
def test_what_cannot_be_drawn_is_named(frame, value):
    with refused("metrics", value, allowed=("gold_position", "value")):
        accuracy_by_position(frame)


DRAW = """
import sys
from tests.plots.test_figures import drawn
drawn(sys.argv[1])
assert "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
"""


def drawn(folder: Path | str) -> None:
    """Two figures as files of all formats."""
    save(accuracy_by_position(metrics()), Path(folder) / "a", FORMATS)
    save(attention_by_position(attention()), Path(folder) / "b", FORMATS)


def test_files_are_byte_stable_across_processes(tmp_path):
    other = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", DRAW, str(tmp_path / "other")],
        check=True,
        cwd=ROOT,
        env=other,
    )
    drawn(tmp_path / "own")  # under another hash seed
    files = [
        {p.name: p.read_bytes() for p in (tmp_path / where).iterdir()}
        for where in ("own", "other")
    ]
    assert files[0] == files[1] and sorted(files[0]) == [
        f"{name}.{kind}" for name in "ab" for kind in ("pdf", "png", "svg", "vl.json")
    ]


def test_close_values_of_a_sweep_are_two_settings():
    values = (1.0, 0.1234561, 0.1234562, 1e-05, 1 / 3)
    parts = [metrics().assign(run=str(v), factor=v) for v in values]
    table = pd.concat(parts)[["run", "factor", *metrics().columns]]
    _, settings, _ = with_setting(table, ["factor"])
    assert settings == ["1e-05", "0.1234561", "0.1234562", repr(1 / 3), "1"]
