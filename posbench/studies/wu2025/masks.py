"""Wu et al. 2025, Section 4: what the theorems predict, and what stacks of attention do. Needs no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import numpy as np

from posbench.late import Axes, Figure, pd
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.stats import reference
from posbench.stats.bootstrap import Array, Estimate, wilson
from posbench.stats.correlation import spearman
from posbench.stats.findings import Finding
from posbench.studies.base import Study, Tables
from posbench.studies.wu2025.synthetic_tables import TEST_SD, printed_cells
from posbench.studies.wu2025.training import PAIRS
from posbench.theory import masks, rope

M = -float(np.log(0.8))  # the decay of the paper's runs, gamma 0.8
SIGMA = 5.3  # tokens in which one layer's attention falls to e^-1/2 at theta 0.01, for Theorem 4.7
KINDS = {"no PE, causal": "causal", "decay 0.8, causal": "decay"}
"""Networks without residual stream whose gaps the paper prints in Figures 2 and 4, and their masks."""
LAST_ROW = "weight in the last row"


@dataclass(frozen=True, kw_only=True)
class Masks(Study):
    """Theorems on attention masks and stacks of attention with equal scores (Wu et al. 2025, Section 4)."""

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """A table for each of the functions below that make one, under its name."""
        made = (
            causal_rates,
            half_times,
            prefix_mass,
            bounds,
            decay_rows,
            peaks,
            rope_rows,
            rope_peaks,
        )
        return {make.__name__: make() for make in (*made, item_mass, predicted_gaps)}

    def figures(self, tables: Tables) -> Drawn:
        """Predictions as lines, stacks of attention as dots."""
        theory = "Dots: stacks of attention, equal scores. Lines: the theorems; dotted: Theorem 4.1's bound. "
        theory += "Tokens are counted from 1."
        rotated = "Dots, thick lines: stacks of attention. Thin lines: the theorems; dotted: Appendix H's zero as "
        rotated += "printed."
        bound = "Random attention and the bounds of Lemmas 4.4 and 4.6; below 1 a bound does not hold."
        drawn = {
            "theory": (theory_figure(tables), theory),
            "rope": (rope_figure(tables), rotated),
        }
        return drawn | {"bounds": (bounds_figure(tables["bounds"]), bound)}

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Theorems 4.1 to 4.7 in numbers."""
        return [*_on_masks(tables), *_on_rope(tables)]


def _told(theorem: str, holds: bool, at: tuple[float, int], **facts: Any) -> Finding:
    """The finding on a theorem, its words from ``wu2025_theorems.csv`` with facts in the note."""
    words = reference.table("wu2025_theorems.csv").set_index("theorem").loc[theorem]
    return Finding.that(
        holds, words["claim"], words["statistic"], at, words["note"].format(**facts)
    )


def _on_masks(tables: Tables) -> Iterator[Finding]:
    """Theorems 4.1 to 4.5."""
    rates = tables["causal_rates"]
    halves = tables["half_times"]
    prefix = tables["prefix_mass"]
    broken = int((rates["weight"] > rates["bound"] + 1e-12).sum())
    *_, before, last = rates.loc[rates["token"] == 2, "weight"]
    fall = before / last
    slack = np.log(fall) / -np.log1p(-1 / rates["n"].iloc[0])
    yield _told("4.1", broken == 0, (broken, len(rates)), fall=fall, slack=slack)
    early = int((halves["reaches"] < halves["hops"]).sum())
    short = halves[halves["width"] <= halves["n"] / 2]
    drift = 100 * (short["measured"] / short["predicted"] - 1).abs().max()
    yield _told("4.2", early == 0, (early, len(halves)), drift=drift)
    layers = prefix["layers"].max()
    inside = prefix[(prefix["layers"] == layers) & (prefix["kind"] == "prefix")]
    share = (inside["weight"] - inside["predicted"]).abs().max()
    late = prefix.loc[prefix["kind"] == "behind", "weight"].to_numpy()
    holds = share < 1e-6 and late[-1] < 1e-6
    yield _told(
        "4.3", holds, (share, len(inside)), layers=layers, fall=late[-2] / late[-1]
    )
    table = tables["bounds"].set_index("bound")
    printed = table.loc["4.4 upper, printed"]
    right = table.loc["4.4 upper, first row corrected"]
    first, broken = (
        int(t["broken"].sum()) for t in (printed[printed["query"] == 1], printed)
    )
    at = broken, int(printed["weights"].sum())
    yield _told("4.4", broken == 0, at, first=first, left=right["broken"].sum())
    rows = tables["decay_rows"].query("distance < 100")
    tops = tables["peaks"]
    law = (rows["weight"] - rows["predicted"]).abs().max()
    yield _told("4.5 law", law < 1e-9, (law, len(rows)))
    away = (tops["measured"] - tops["predicted"]).abs().max()
    yield _told("4.5 peak", away <= 1, (away, len(tops)))


def _on_rope(tables: Tables) -> Iterator[Finding]:
    """Lemma 4.6, Theorem 4.7, and the rollout as a predictor of trained networks."""
    table = tables["bounds"].set_index("bound")
    tops = tables["rope_peaks"]
    both = table.loc[["4.6 lower", "4.6 upper"]]
    slack = table.groupby("bound")["slack"].median()
    at = int(both["broken"].sum()), int(both["weights"].sum())
    yield _told(
        "4.6", at[0] == 0, at, lower=slack["4.6 lower"], upper=slack["4.6 upper"]
    )
    deeper = tops.sort_values("layers").groupby("theta")["measured"].diff().dropna()
    faster = tops.sort_values("theta").groupby("layers")["measured"].diff().dropna()
    at = int((deeper <= 0).sum() + (faster >= 0).sum()), len(deeper) + len(faster)
    far = (
        tops[tops["measured"] >= 10]
        .eval("angle = measured * theta")
        .groupby("layers")["angle"]
    )
    yield _told(
        "4.7 order", at[0] == 0, at, spread=100 * (far.max() / far.min() - 1).max()
    )
    ratio = tops["measured"] / tops["formula"]
    n = len(tops)
    slowest = tops[tops["theta"] == tops["theta"].min()].set_index("layers")
    growth = slowest.loc[17] / slowest.loc[9]
    outside = n - int(
        tops["measured"].between(tops["formula"], tops["formula_shared"]).sum()
    )
    facts = {
        "smallest": ratio.min(),
        "measured": growth["measured"],
        "formula": growth["formula"],
    }
    holds = bool(((tops["measured"] - tops["formula"]).abs() <= 1).all())
    yield _told("4.7 form", holds, (ratio.max(), n), **facts, outside=outside, n=n)
    slip = tops["appendix_h"] / tops["stationary"]
    right = (tops["stationary"] - tops["formula"]).abs()
    yield _told(
        "H", slip.min() > 0.99, (slip.min(), n), largest=slip.max(), right=right.max()
    )
    gaps = tables["predicted_gaps"]
    same = np.sign(gaps["predicted"]) == np.sign(gaps["paper"])
    clear = same[gaps["paper"].abs() > 2 * TEST_SD]
    seen = Estimate(clear.mean(), *wilson(clear.sum(), len(clear)), len(clear))
    rank = spearman(gaps["predicted"].to_numpy(), gaps["paper"].to_numpy())
    words = reference.table("wu2025_theorems.csv").set_index("theorem").loc["gaps"]
    note = words["note"].format(n=len(gaps), same=same.sum(), rank=rank)
    yield Finding.above(words["claim"], words["statistic"], seen, 0.5, note)


def _last_rows(weights: Array, layers: Sequence[int]) -> dict[int, Array]:
    """The last row of the product of so many layers of equal weights, for each number of layers."""
    found = masks.rollout([weights] * max(layers))
    return {t: found[t - 1][-1] for t in layers}


def causal_rates() -> pd.DataFrame:
    """Weights of tokens (from 1) in the last row, causal mask; ``predicted``: the rate log j, drawn back."""
    n = 32
    layers = 40
    rows = []
    found = _last_rows(masks.uniform(masks.causal(n)), range(1, layers + 1))
    for j, (t, row) in product((2, 3, 5, 10), found.items()):
        predicted = found[layers][j - 1] * float(j) ** (layers - t)
        rows.append(
            (t, j, row[j - 1], masks.causal_bound(n, t, 1 / n)[j - 1], predicted, n)
        )
    return pd.DataFrame(
        rows, columns=["layers", "token", "weight", "bound", "predicted", "n"]
    )


def half_times() -> pd.DataFrame:
    """Layers until half the weight is on token 1 under a window, until any is (``reaches``), hops to it."""
    n = 32
    rows = []
    for width in (2, 3, 5, 9, 17, 32):
        found = _last_rows(masks.uniform(masks.window(n, width)), range(1, 3 * n))
        first = np.array([row[0] for row in found.values()])
        hops = -(-(n - 1) // (width - 1))
        measured, reaches = (
            int(there.argmax()) + 1 for there in (first >= 0.5, first > 0)
        )
        rows.append(
            (width, measured, masks.window_half_time(n, width), reaches, hops, n)
        )
    return pd.DataFrame(
        rows, columns=["width", "measured", "predicted", "reaches", "hops", "n"]
    )


def prefix_mass() -> pd.DataFrame:
    """Last row, prefix mask; ``predicted``: 1 / K, behind the prefix the rate log(K + 1), drawn back."""
    length = 4
    layers = 20
    rows = []
    found = _last_rows(masks.uniform(masks.prefix(12, length)), range(1, layers + 1))
    for t, row in found.items():
        behind = found[layers][length] * float(length + 1) ** (layers - t)
        rows += [(t, k + 1, "prefix", row[k], 1 / length) for k in range(length)]
        rows.append((t, length + 1, "behind", row[length], behind))
    return pd.DataFrame(
        rows, columns=["layers", "token", "kind", "weight", "predicted"]
    )


def bounds(n: int = 24, draws: int = 20) -> pd.DataFrame:
    """How often random attention breaks the bounds of Lemmas 4.4 and 4.6, by query (from 1).

    ``slack`` and ``tightest`` are the median and the smallest factor of weight and bound.
    """
    rng = np.random.default_rng(0)
    theta = 0.1
    delta = 3.0
    seen = masks.causal(n)
    names = (
        "4.4 lower",
        "4.4 upper, printed",
        "4.4 upper, first row corrected",
        "4.6 lower",
        "4.6 upper",
    )
    ratios: dict[str, list[Array]] = {name: [] for name in names}
    for _ in range(draws):
        decayed = masks.attention(
            rng.uniform(-0.2, 0.2, (n, n)) + masks.decay(n, M), seen
        )
        low, high = masks.decay_bounds(n, M, -0.2, 0.2)
        printed = masks.decay_bounds(n, M, -0.2, 0.2, printed=True)[1]
        b = rng.uniform(1, 3, (n, n))
        phi = rng.uniform(-delta * theta, delta * theta, (n, n))
        rotated = masks.attention(rope.scores(n, theta, b, phi), seen)
        below, above = rope.bounds(n, theta, 1, 3, delta)
        pairs = (
            (decayed, low),
            (printed, decayed),
            (high, decayed),
            (rotated, below),
            (above, rotated),
        )
        for name, (larger, smaller) in zip(names, pairs, strict=True):
            ratios[name].append(
                np.divide(larger, smaller, out=np.ones((n, n)), where=seen)
            )
    rows = []
    for name, i in product(names, range(n)):
        factor = np.stack(ratios[name])[:, i, : i + 1]
        rows.append(
            (
                name,
                i + 1,
                factor.size,
                (factor < 1 - 1e-12).sum(),
                np.median(factor),
                factor.min(),
            )
        )
    return pd.DataFrame(
        rows, columns=["bound", "query", "weights", "broken", "slack", "tightest"]
    )


def _decayed(
    n: int, m: float, layers: Sequence[int] = (2, 4, 6, 10, 16)
) -> dict[int, Array]:
    """Last rows of equal scores under a decay mask."""
    return _last_rows(masks.attention(masks.decay(n, m), masks.causal(n)), layers)


def _rotated(theta: float, width: float) -> dict[int, Array]:
    """Last rows under RoPE of one angle, queries equal to keys; ``width`` of the attention in tokens."""
    n = int(np.pi / theta)
    # Of this strength attention falls as half a Gaussian of that standard deviation.
    scores = rope.scores(n, theta, (theta * width) ** -2)
    return _last_rows(masks.attention(scores, masks.causal(n)), (2, 3, 5, 9, 17))


def _by_distance(
    rows: Mapping[int, Array], law: Callable[[int, Any], Array]
) -> pd.DataFrame:
    """Rows of layers, distance (tokens), weight, predicted."""
    parts = []
    for t, row in rows.items():
        x = np.arange(len(row))
        parts.append(
            pd.DataFrame(
                {
                    "layers": t,
                    "distance": x,
                    "weight": row[::-1],
                    "predicted": law(t, x),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def decay_rows() -> pd.DataFrame:
    """The last row under a decay mask of equal scores, and the law of Theorem 4.5."""
    return _by_distance(_decayed(256, M), lambda t, x: masks.decay_law(t, M, x))


def _peak(row: Array) -> int:
    """Distance of the largest weight; the first token is a sink of its own."""
    return int(row[:0:-1].argmax())


def peaks() -> pd.DataFrame:
    """Distance of the largest weight behind the first token, measured and as t / (e^m - 1)."""
    found = {(m, t): row for m in (M, 0.5) for t, row in _decayed(512, m).items()}
    rows = [(m, t, _peak(row), masks.decay_peak(t, m)) for (m, t), row in found.items()]
    return pd.DataFrame(rows, columns=["m", "layers", "measured", "predicted"])


def rope_rows() -> pd.DataFrame:
    """The last row under RoPE of one angle, and Theorem 4.7's closed form, scaled to sum 1."""

    def closed(t: int, x: Any) -> Array:
        form = np.exp(rope.law(t, SIGMA, x))
        return form / form.sum()

    return _by_distance(_rotated(0.01, SIGMA), closed)


def rope_peaks() -> pd.DataFrame:
    """Distance of the largest weight under RoPE of one angle, by depth and angle (radians).

    ``formula_shared`` has c / layers; ``stationary`` and ``appendix_h`` are L's zeros, corrected and printed.
    """
    rows = []
    # Scores are of the same size at every angle.
    for theta, width in (
        (theta, SIGMA * 0.01 / theta) for theta in (0.005, 0.01, 0.02)
    ):
        for t, row in _rotated(theta, width).items():
            forms = rope.peak(t, width), rope.peak(t, width * np.sqrt(t))
            zeros = rope.stationary(t, width), rope.stationary(t, width, printed=theta)
            rows.append((theta, t, _peak(row), *forms, *zeros, rope.drift(t, width)))
    names = [
        "theta",
        "layers",
        "measured",
        "formula",
        "formula_shared",
        "stationary",
        "appendix_h",
        "drift",
    ]
    return pd.DataFrame(rows, columns=names)


def item_mass() -> pd.DataFrame:
    """Weight of the last token on the first, middle and last item of the paper's sequences, equal scores."""
    rows = []
    places = {"first": 0, "middle": 4, "last": 7}
    for kind, mask in KINDS.items():
        # Eight pairs and a query, as the paper's sequences.
        for t, row in _decayed(17, M if mask == "decay" else 0.0, (2, 4, 6)).items():
            rows += [
                (kind, t, place, row[2 * i] + row[2 * i + 1])
                for place, i in places.items()
            ]
    return pd.DataFrame(rows, columns=["attention", "layers", "item", "weight"])


def predicted_gaps() -> pd.DataFrame:
    """Differences of the weights on two items (predicted), and the paper's accuracy gaps (paper)."""
    mass = item_mass().set_index(["attention", "layers", "item"])["weight"]
    cells = pd.concat([printed_cells(f"wu2025_fig{figure}.csv") for figure in (2, 4)])
    paper = cells[cells["pe"] == "none"].set_index(["mask", "depth", "pair"])["paper"]
    rows = []
    for (kind, mask), t, (a, b) in product(KINDS.items(), (2, 4, 6), PAIRS):
        rows.append(
            (
                kind,
                t,
                f"{a} - {b}",
                mass[kind, t, a] - mass[kind, t, b],
                paper[mask, t, f"{a}-{b}"],
            )
        )
    return pd.DataFrame(
        rows, columns=["attention", "layers", "pair", "predicted", "paper"]
    )


def _dots(
    axes: Axes,
    table: pd.DataFrame,
    by: str,
    x: str,
    y: str,
    label: str = "{}",
    **thin: Any,
) -> None:
    """Measured dots for each value of a column, and thin lines of further columns with their line styles."""
    for index, (name, rows) in enumerate(table.groupby(by, sort=False)):
        style = plot.line_style(index)
        axes.plot(
            rows[x], rows[y], **style | {"linestyle": "none"}, label=label.format(name)
        )
        for column, line in thin.items():
            axes.plot(rows[x], rows[column], line, color=style["color"], linewidth=0.8)


def _over_distance(axes: Axes, table: pd.DataFrame, upto: int, title: str) -> None:
    """A row of weights for each number of layers: thick as measured, thin as predicted."""
    for index, (layers, line) in enumerate(table.groupby("layers")):
        colour = plot.line_style(index, of=table["layers"].nunique())["color"]
        axes.plot(
            line["distance"], line["weight"], color=colour, linewidth=3, alpha=0.4
        )
        axes.plot(
            line["distance"],
            line["predicted"],
            color=colour,
            linewidth=0.8,
            label=f"{layers} layers",
        )
    axes.set(
        xlim=(0, upto),
        xlabel="distance to the query (tokens)",
        ylabel="weight",
        title=title,
    )


def _log_ticks(axes: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    """Both axes logarithmic, with these ticks alone."""
    axes.set(xscale="log", yscale="log")
    for axis, ticks in ((axes.xaxis, x), (axes.yaxis, y)):
        axis.set_ticks(list(ticks), [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)


@plot.styled
def theory_figure(tables: Tables) -> Figure:
    """Theorems 4.1, 4.2 and 4.5: dots are stacks of attention with equal scores, lines are predictions."""
    figure, ((one, two), (three, four)) = plot.new_figure(
        plot.PAGE, 4.6, 2, 2, n="exact"
    )
    rates = tables["causal_rates"]
    halves = tables["half_times"]
    _dots(one, rates, "token", "layers", "weight", "token {}", predicted="-", bound=":")
    one.set(
        yscale="log",
        ylim=(rates["weight"].min() / 3, 2),
        xlabel="layers",
        ylabel=LAST_ROW,
    )
    one.set_title("4.1 causal: rate log j (line), bound (dotted)")
    two.plot(halves["width"], halves["measured"], "o", label="measured")
    two.plot(
        halves["width"],
        halves["predicted"],
        color=plot.PAPER,
        label="2 (n - 1) / (w - 1)",
    )
    two.set(
        xlabel="window width w", ylabel="layers to half on token 1", title="4.2 window"
    )
    _log_ticks(two, halves["width"], halves["measured"])
    # The first token is a sink of its own.
    inner = tables["decay_rows"].query("distance < distance.max()")
    _over_distance(three, inner, 130, "4.5 decay: negative binomial (thin)")
    _dots(four, tables["peaks"], "m", "predicted", "measured", "m {:.3g}")
    four.axline((0, 0), slope=1, color=plot.GUIDE, linewidth=0.8)
    four.set(
        xlabel="t / (e^m - 1)",
        ylabel="measured peak distance",
        title="4.5 decay: place of the peak",
    )
    for axes in figure.axes:
        axes.legend()
    return figure


@plot.styled
def rope_figure(tables: Tables) -> Figure:
    """Theorems 4.3 and 4.7, and the weights of both kinds of attention with the paper's accuracy gaps."""
    figure, ((one, two), (three, four)) = plot.new_figure(
        plot.PAGE, 4.6, 2, 2, n="exact"
    )
    prefix = tables["prefix_mass"]
    tops = tables["rope_peaks"]
    mean = (
        prefix.groupby(["kind", "layers"], sort=False)[["weight", "predicted"]]
        .mean()
        .reset_index()
    )
    words = {"prefix": "each prefix token (mean)", "behind": "first token behind"}
    _dots(one, mean.replace(words), "kind", "layers", "weight", predicted="-")
    one.set(
        yscale="log",
        ylim=(prefix["weight"].min() / 3, 2),
        xlabel="layers",
        ylabel=LAST_ROW,
    )
    one.set(
        xticks=range(0, prefix["layers"].max() + 1, 5),
        title="4.3 prefix: 1 / K, and rate log(K + 1)",
    )
    _over_distance(two, tables["rope_rows"], 120, "4.7 RoPE: closed form (thin)")
    _dots(
        three,
        tops,
        "theta",
        "layers",
        "measured",
        "theta {:g}",
        formula="-",
        appendix_h=":",
    )
    for _, line in tops.groupby("theta"):
        walk = three.plot(
            line["layers"], line["drift"], color=plot.GUIDE, linewidth=0.8, zorder=0
        )
    walk[0].set_label("random walk")
    _log_ticks(three, sorted(set(tops["layers"])), (0.3, 1, 3, 10, 30, 100))
    three.set(xlabel="layers", ylabel="peak distance (tokens)", ylim=(0.15, 2000))
    three.set_title("4.7 RoPE: place of the peak")
    _dots(four, tables["predicted_gaps"], "attention", "predicted", "paper")
    four.axhspan(
        -2 * TEST_SD,
        2 * TEST_SD,
        color=plot.SHADE,
        zorder=0,
        label="two deviations of a test set",
    )
    four.axhline(0, color=plot.GUIDE, linewidth=0.6)
    four.axvline(0, color=plot.GUIDE, linewidth=0.6)
    four.set(
        xlabel="difference of weights, equal scores",
        ylabel="accuracy gap (the paper's)",
    )
    four.set_title("items, 2 to 6 layers")
    for axes in figure.axes:
        axes.legend()
    return figure


@plot.styled
def bounds_figure(table: pd.DataFrame) -> Figure:
    """Factors of weights and bounds by query: the smallest of Lemma 4.4's upper bound, the medians of all."""
    figure, (left, right) = plot.new_figure(plot.PAGE, 2.3, 1, 2, n="random attention")
    for name, line in table.groupby("bound", sort=False):
        kind, _, row = str(name).partition(", ")
        if row:
            left.plot(
                line["query"],
                line["tightest"],
                **plot.line_style(len(left.lines)),
                label=row,
            )
        if "corrected" not in row:
            right.plot(
                line["query"],
                line["slack"],
                **plot.line_style(len(right.lines)),
                label=kind,
            )
    left.axhline(1, color=plot.GUIDE, linewidth=0.6)
    left.set(xlabel="query", ylabel="bound / weight, smallest", ylim=(0, None))
    left.set_title("4.4 decay: the upper bound fails in row 1")
    right.set(
        xlabel="query",
        ylabel="factor to the bound, median",
        yscale="log",
        ylim=(0.5, 5000),
    )
    right.set_title("slack of the bounds")
    left.legend()
    right.legend(ncols=2, loc="upper left")
    return figure
