"""A curve in a page has a point for every number of its table, and the numbers of no other."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from posbench.plots.sweep import MAX_BANDS, factor_sweep
from posbench.report.curve import curve_of_run, curve_of_sweep
from posbench.report.template import breakable, linked
from tests.frames import AFTER, BEFORE, metrics, sweep


def points_of(html: str) -> list[dict[str, str]]:
    """Attributes of the points of a curve, with the centre of the dot."""
    found = []
    for tag, circle in re.findall(
        r'<(?:a|g)( [^>]*class="point"[^>]*)>\s*<circle class="reach" ([^>]*)/>', html
    ):
        found.append(dict(re.findall(r'([\w-]+)="([^"]*)"', f"{tag} {circle}")))
    return found


def test_points_lie_where_their_numbers_say() -> None:
    points = points_of(curve_of_run(metrics()))
    assert [p["data-method"] for p in points] == 3 * ["scale_channel"] + 3 * ["none"]
    values = [*AFTER, *BEFORE]
    heights = [float(p["cy"]) for p in points]
    assert np.polyfit(values, heights, 1, full=True)[1][0] < 0.05, "on one scale"
    assert np.corrcoef(values, heights)[0, 1] < -0.999, "upwards"
    assert [float(p["cx"]) for p in points[:3]] == [30, 187, 344]
    for point, value in zip(points, values, strict=True):
        low, high = 100 * value - 3, 100 * value + 3
        text = f"accuracy {100 * value:.1f} % [{low:.1f}, {high:.1f}], n = 100"
        assert point["aria-label"].endswith(text) and point["tabindex"] == "0"


def test_a_point_leads_to_its_questions() -> None:
    points = points_of(curve_of_run(metrics(), "../a/report.html"))
    addresses = [f"../a/report.html#position={n}" for n in (0, 1, 2)]
    assert [point["href"] for point in points] == 2 * addresses


def test_what_has_no_number_has_no_point() -> None:
    table = metrics()
    is_inner = (table["gold_position"] == "1") & (table["method"] == "none")
    table.loc[is_inner, "value"] = np.nan
    assert len(points_of(curve_of_run(table))) == 5
    table.loc[table["gold_position"] != "all", "value"] = np.nan
    assert curve_of_run(table) == ""
    # Twice the same place under one name: the table has more columns than this curve shows.
    twice = pd.concat([metrics(), metrics().assign(seed=1)])
    assert curve_of_run(twice) == ""


def test_a_sweep_has_a_line_for_each_setting_and_one_for_the_unmodified_model() -> None:
    table = sweep([1.0, 0.5, 0.0])
    runs = list(table["run"].unique())
    pages = {run: f"../{run}/report.html" for run in runs}
    html = curve_of_sweep(table, ["method.factor"], pages)
    key = re.findall(r"<li.*?<a href=\"(.*?)\">(.*?)</a>", html)
    names = [name for _, name in key]
    assert names[-1] == "unmodified" and len(names) == len(runs) + 1
    assert {address for address, _ in key[:-1]} == set(pages.values())
    assert all("#position=" in point["href"] for point in points_of(html))


LINKS = {"v001/a__1f": "a/report.html", "a__1f": "a/report.html", "1f": "b&c.html"}


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("v001/a__1f.", '<a href="a/report.html">v001/a__1f</a>.'),
        ("(1f)", '(<a href="b&amp;c.html">1f</a>)'),
        ("x1f 1f0", "x1f 1f0"),
        ("<b> & 1f", '&lt;b&gt; &amp; <a href="b&amp;c.html">1f</a>'),
    ],
)
def test_names_of_runs_are_links(text: str, html: str) -> None:
    assert linked(text, LINKS) == breakable(text, LINKS) == html
    assert "<a" not in breakable(text) and "<b>" not in linked(text)


def test_labels_are_text() -> None:
    html = curve_of_run(metrics("<script>"))
    assert "<script" not in html and "&lt;script&gt;" in html


@pytest.mark.parametrize("count", [4, 5, 6, 7])
def test_a_curve_has_as_many_bands_as_the_figure_of_the_sweep(count: int) -> None:
    """Every setting has its band in the figure and in the page, or none has it in either."""
    table = sweep([n / 10 for n in range(count)])
    axes = ["method.factor"]
    html = curve_of_sweep(table, axes, dict.fromkeys(table["run"], "a.html"))
    assert html.count('class="band"') == count + 1
    drawn = factor_sweep(table, axes).axes[1].collections
    assert len(drawn) == (count + 1 if count <= MAX_BANDS else 1)
    assert html.count('class="line"') == len(drawn)


def test_a_sweep_over_lengths_has_the_unmodified_line_of_each() -> None:
    """Depths of unlike lengths interleave: one line through the points of both would be of neither."""
    first, second = sweep([0.5, 0.6]).groupby("run", sort=False)
    second = second[1].assign(
        depth=second[1]["depth"].where(second[1]["depth"] != 0.5, 0.48)
    )
    table = pd.concat([first[1], second])
    html = curve_of_sweep(table, ["method.factor"], {})
    names = re.findall(r"<li.*?</span> (.*?)</li>", html)
    assert sorted(names) == [
        "factor 0.5",
        "factor 0.6",
        "unmodified, factor 0.5",
        "unmodified, factor 0.6",
    ]
    lines = re.findall(r'<polyline class="dashed" points="(.*?)"', html)
    assert [len(line.split()) for line in lines] == [3, 3]


def test_a_seed_is_named_once() -> None:
    table = sweep([1.0, 2.0]).rename(columns={"method.factor": "task.seed"})
    names = re.findall(
        r"<li.*?</span> (.*?)</li>", curve_of_sweep(table, ["task.seed"], {})
    )
    assert "seed 1" in names and "seed seed 1" not in " ".join(names)
