"""Figures carry exactly the numbers of their frames, and their files are the same bytes every time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from posbench.errors import UserError
from posbench.plots import base as plots
from posbench.plots import sweep as sweep_plots

ROOT = Path(__file__).parents[2]
BEFORE, AFTER = [0.98, 0.6, 0.94], [0.96, 0.9, 0.92]


def metrics(method: str = "scale_channel", after: list[float] = AFTER, model: str = "tiny") -> pd.DataFrame:
    """A metrics.csv of three positions."""
    rows = []

    def add(name: str, metric: str, values: list[float], half: float) -> None:
        for position, value in [*enumerate(values), ("all", float(np.mean(values)))]:
            n, depth = (300, np.nan) if position == "all" else (100, position / 2)
            rows.append(
                (model, name, "kv", str(position), depth, metric, value, n, value - half, value + half, 0)
            )

    add("none", "accuracy", BEFORE, 0.03)
    if method != "none":
        add(method, "accuracy", after, 0.03)
        add(method, "accuracy_difference", [a - b for a, b in zip(after, BEFORE, strict=True)], 0.04)
    columns = [
        "model",
        "method",
        "task",
        "position",
        "depth",
        "metric",
        "value",
        "n",
        "ci_low",
        "ci_high",
        "seed",
    ]
    return pd.DataFrame(rows, columns=columns)


def attention(gain: float = 0.01, method: str = "scale_channel") -> pd.DataFrame:
    """An attention.csv of 2 layers, 3 pairs, 3 gold positions; layer 1 is the stronger."""
    rows = [
        (
            "tiny",
            name,
            "kv",
            gold,
            layer,
            pair,
            (0.01 + 0.01 * layer + 0.002 * gold + add) if pair == gold else 0.001,
            20,
        )
        for name, add in (("none", 0.0), (method, gain))
        for gold in range(3)
        for layer in range(2)
        for pair in range(3)
    ]
    return pd.DataFrame(
        rows, columns=["model", "method", "task", "gold_position", "layer", "pair", "attention", "n"]
    )


def search(n: int = 40, selected: int | None = 35) -> pd.DataFrame:
    """A search.csv; candidate `selected` won although others have a lower loss."""
    frame = pd.DataFrame(
        {"rank": range(1, n + 1), "channel": range(n), "factor": 0.0, "layer_first": 1, "layer_last": 3}
    )
    frame = frame.assign(
        loss=np.linspace(1, 2, n), loss_unmodified=1.5, n=50, monotone_layers=3, smoothness=0.1
    )
    return frame.assign(selected=[i == selected for i in range(n)])


def channels() -> pd.DataFrame:
    """A channels.csv of 2 sites, 2 layers, 5 tokens."""
    rows = [
        (33, site, layer, position, layer + position / 10 + 0.01 * (-1) ** position, layer + position / 10)
        for site in ("attention_input", "residual")
        for layer in range(2)
        for position in range(5)
    ]
    return pd.DataFrame(rows, columns=["channel", "site", "layer", "position", "value", "sliding_mean"])


def sweep(factors: list[float]) -> pd.DataFrame:
    """A summary.csv over method.factor."""
    parts = [
        metrics(after=[v - 0.1 * abs(f) for v in AFTER]).assign(**{"run": f"r{f}", "method.factor": f})
        for f in factors
    ]
    frame = pd.concat(parts, ignore_index=True)
    return frame[["run", "method.factor", *frame.columns.drop(["run", "method.factor"])]]


def line(axes, label: str):
    (found,) = [one for one in axes.lines if one.get_label() == label]
    return found


def test_accuracy_lines_and_bands_carry_the_frame():
    axes = plots.accuracy_by_position(metrics(), chance=0.05).axes[0]
    np.testing.assert_allclose(line(axes, "unmodified").get_xdata(), [0, 50, 100])
    np.testing.assert_allclose(line(axes, "unmodified").get_ydata(), np.multiply(BEFORE, 100))
    np.testing.assert_allclose(line(axes, "scale_channel").get_ydata(), np.multiply(AFTER, 100))
    assert set(line(axes, "chance").get_ydata()) == {5.0}
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx(101) and band.min() == pytest.approx(57)
    assert "%" in axes.get_xlabel() and "%" in axes.get_ylabel()


def test_positions_are_sorted_as_numbers_and_models_kept_apart():
    frame = pd.concat([metrics().iloc[::-1], metrics(model="other")])
    axes = plots.accuracy_by_position(frame).axes[0]
    np.testing.assert_allclose(line(axes, "scale_channel, model tiny").get_xdata(), [0, 50, 100])
    assert len(axes.lines) == 4


def test_without_depth_the_largest_position_counts_as_one():
    rows = plots.at_positions(metrics().assign(depth=np.nan))
    assert sorted(rows["depth"].unique()) == [0, 0.5, 1]


def test_attention_names_the_strongest_layer_and_shows_the_change():
    left, right, *_ = plots.attention_by_position(attention()).axes
    assert "layer 1" in left.get_title()
    np.testing.assert_allclose(line(left, "scale_channel").get_ydata(), [0.03, 0.032, 0.034])
    np.testing.assert_allclose(right.images[0].get_array(), np.full((2, 3), 0.01))
    assert right.images[0].norm.vmin == -right.images[0].norm.vmax
    left, *_ = plots.attention_by_position(attention(), layers=[0, 1]).axes
    np.testing.assert_allclose(line(left, "unmodified").get_ydata(), [0.015, 0.017, 0.019])
    assert "layers 0, 1" in left.get_title()


def test_attention_of_one_method_alone_and_no_change():
    only = attention()[lambda f: f["method"] == "none"]
    _, right, *_ = plots.attention_by_position(only).axes
    np.testing.assert_allclose(right.images[0].get_array(), [[0.01, 0.012, 0.014], [0.02, 0.022, 0.024]])
    _, right, *_ = plots.attention_by_position(attention(gain=0)).axes
    assert not np.any(right.images[0].get_array())


def test_channel_lines():
    figure = plots.channel_curves(channels(), 33)
    assert [axes.get_title() for axes in figure.axes[:2]] == ["attention input", "residual"]
    raw, mean = figure.axes[1].lines[2:4]
    np.testing.assert_allclose(raw.get_ydata(), [1.01, 1.09, 1.21, 1.29, 1.41])
    np.testing.assert_allclose(mean.get_ydata(), [1, 1.1, 1.2, 1.3, 1.4])
    huge = channels().assign(value=lambda f: f["value"].where(f["position"] > 0, 500))
    axes = plots.channel_curves(huge, 33).axes[0]
    assert "off the scale" in axes.get_title() and axes.get_ylim()[1] < 2
    with pytest.raises(UserError, match="34"):
        plots.channel_curves(channels(), 34)


def test_candidates_are_the_best_and_the_winner():
    axes = plots.candidate_losses(search()).axes[0]
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels[0] == "ch 0 x 0, layers 1-3" and labels[-1].startswith("ch 35 ") and len(labels) == 31
    np.testing.assert_allclose(line(axes, "selected").get_xdata(), [search()["loss"][35]])
    assert set(line(axes, "unmodified").get_xdata()) == {1.5}
    assert axes.figure.get_suptitle() == "best 30 of 40 candidates, and the selected one"
    assert "selected" not in [
        one.get_label() for one in plots.candidate_losses(search(3, None)).axes[0].lines
    ]


def test_factor_sweep_sorts_numbers_and_draws_the_unmodified_once():
    left, right = sweep_plots.factor_sweep(sweep([1.0, -1.0, 0.5])).axes
    points = left.lines[0]
    np.testing.assert_allclose(points.get_xdata(), [-1, 0.5, 1])
    np.testing.assert_allclose(points.get_ydata(), 100 * (np.mean(AFTER) - np.array([0.1, 0.05, 0.1])))
    assert [one.get_label() for one in right.lines] == ["-1", "0.5", "1", "unmodified"]
    np.testing.assert_allclose(line(right, "0.5").get_ydata(), 100 * (np.array(AFTER) - 0.05))


def test_sweep_over_models_keeps_each_unmodified():
    parts = [
        metrics(model=m).assign(run=m, value=lambda f, i=i: f["value"] - 0.1 * i)
        for i, m in enumerate(("a", "b"))
    ]
    left, right = sweep_plots.factor_sweep(pd.concat(parts), "model").axes
    assert [text.get_text() for text in left.get_xticklabels()] == ["a", "b"]
    assert len(right.lines) == 4
    np.testing.assert_allclose(right.lines[3].get_ydata(), np.multiply(BEFORE, 100) - 10)


def test_one_setting_with_two_runs_is_refused():
    with pytest.raises(UserError, match="several runs"):
        sweep_plots.factor_sweep(sweep([0.5, 0.5]))


def test_attention_sweep_lines():
    parts = [attention(g).assign(**{"run": str(g), "method.factor": g}) for g in (0.01, 0.0)]
    axes = sweep_plots.attention_sweep(pd.concat(parts)).axes[0]
    np.testing.assert_allclose(line(axes, "0.01").get_ydata(), [0.03, 0.032, 0.034])
    np.testing.assert_allclose(line(axes, "unmodified").get_ydata(), [0.02, 0.022, 0.024])


@pytest.mark.parametrize("frame", [metrics().drop(columns="value"), metrics().iloc[:0]])
def test_what_cannot_be_drawn_is_named(frame):
    with pytest.raises(UserError, match=r"value|no row"):
        plots.accuracy_by_position(frame)


DRAW = """
import sys, pathlib
import tests.unit.test_plots as t
t.plots.save(t.plots.accuracy_by_position(t.metrics()), pathlib.Path(sys.argv[1]) / "a")
t.plots.save(t.plots.attention_by_position(t.attention()), pathlib.Path(sys.argv[1]) / "b")
assert "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
"""


def test_files_are_byte_stable_across_processes(tmp_path):
    for seed in ("1", "2"):
        command = [sys.executable, "-c", DRAW, str(tmp_path / seed)]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed})
    for name in ("a.png", "a.pdf", "b.png", "b.pdf"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    assert sorted(p.name for p in (tmp_path / "1").iterdir()) == ["a.pdf", "a.png", "b.pdf", "b.png"]
