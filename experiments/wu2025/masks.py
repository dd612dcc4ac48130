"""Wu et al. 2025, Section 4: the theorems' predictions, and stacks of attention. Needs no model.

Tables count tokens from 1, as the paper does. A last row holds the weights of the last token on every token
after some layers: the last row of the rollout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import numpy as np

from posbench.files.atomic import Row
from posbench.late import Axes, Figure, pd
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.stats import bootstrap, reference
from posbench.stats.bootstrap import Array
from posbench.stats.correlation import spearman
from posbench.stats.findings import Finding
from posbench.studies.base import Study, Tables
from posbench.theory import masks
from wu2025 import rope
from wu2025.synthetic_tables import TEST_SD, read_printed_cells
from wu2025.training import PAIRS

DECAY = -float(np.log(0.8))  # m of the paper's decay mask, per token: gamma 0.8
WIDTH = 5.3  # tokens; standard deviation of one layer's attention at ROPE_ANGLE
ROPE_ANGLE = 0.01  # theta in radians per token, for Theorem 4.7
TOLERANCE = 1e-12  # relative rounding error of a weight
GAP_DEPTHS = (2, 4, 6)  # layers of the networks whose gaps the paper prints
NETWORK_MASKS = {"no PE, causal": "causal", "decay 0.8, causal": "decay"}
"""Networks without residual stream whose gaps the paper prints in Figures 2 and 4, and their masks."""
LAST_ROW_LABEL = "weight in the last row"


@dataclass(frozen=True, kw_only=True)
class Masks(Study):
    """Theorems on attention masks and stacks of attention with equal scores (Wu et al. 2025, Section 4)."""

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables of theorems and of stacks of attention, each under the name of its function below."""
        functions = (
            causal_rates,
            half_times,
            prefix_mass,
            bounds,
            decay_rows,
            peaks,
            rope_rows,
            rope_peaks,
            item_mass,
            predicted_gaps,
        )
        return {function.__name__: function() for function in functions}

    def figures(self, tables: Tables) -> Drawn:
        """Predictions as lines, stacks of attention as dots."""
        theory_caption = (
            "Dots: stacks of attention, equal scores. Lines: the theorems; dotted: Theorem 4.1's bound. "
            "Tokens are counted from 1."
        )
        rope_caption = (
            "Dots, thick lines: stacks of attention. Thin lines: the theorems; dotted: Appendix H's zero as "
            "printed."
        )
        bounds_caption = "Random attention and the bounds of Lemmas 4.4 and 4.6; below 1 a bound does not hold."
        return {
            "theory": (theory_figure(tables), theory_caption),
            "rope": (rope_figure(tables), rope_caption),
            "bounds": (bounds_figure(tables["bounds"]), bounds_caption),
        }

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Theorems 4.1 to 4.7 in numbers, and the rollout as a predictor of trained networks."""
        return [
            _theorem_4_1(tables["causal_rates"]),
            _theorem_4_2(tables["half_times"]),
            _theorem_4_3(tables["prefix_mass"]),
            _lemma_4_4(tables["bounds"]),
            _theorem_4_5_law(tables["decay_rows"]),
            _theorem_4_5_peak(tables["peaks"]),
            _lemma_4_6(tables["bounds"]),
            _theorem_4_7_order(tables["rope_peaks"]),
            _theorem_4_7_form(tables["rope_peaks"]),
            _appendix_h(tables["rope_peaks"]),
            _gaps_finding(tables["predicted_gaps"]),
        ]


def _texts(theorem: str) -> pd.Series:
    """Claim, statistic and note of a theorem in ``wu2025_theorems.csv``; the note is a format string."""
    return reference.read_table("wu2025_theorems.csv").set_index("theorem").loc[theorem]


def _finding(
    theorem: str, holds: bool, value: float, n: int, /, **note_values: Any
) -> Finding:
    """The finding on a theorem: its number, the number of cases behind it, the values in its note."""
    texts = _texts(theorem)
    note = texts["note"].format(**note_values)
    return Finding.that(holds, texts["claim"], texts["statistic"], (value, n), note)


def _theorem_4_1(rates: pd.DataFrame) -> Finding:
    """Under a causal mask later tokens lose their weight at least as fast as the bound."""
    broken = int((rates["weight"] > rates["bound"] + TOLERANCE).sum())
    second_token = rates.loc[rates["token"] == 2, "weight"].to_numpy()
    fall = second_token[-2] / second_token[-1]
    bound_rate = -np.log1p(-1 / rates["n"].iloc[0])
    slack = np.log(fall) / bound_rate
    return _finding("4.1", broken == 0, broken, len(rates), fall=fall, slack=slack)


def _theorem_4_2(half_times: pd.DataFrame) -> Finding:
    """Under a window mask no weight reaches the first token before it can in hops of the window."""
    early = int((half_times["reaches"] < half_times["hops"]).sum())
    share = half_times["width"] / half_times["n"]
    away = half_times["measured"] - half_times["predicted"]
    percent = 100 * away.abs() / half_times["predicted"]
    return _finding(
        "4.2",
        early == 0,
        early,
        len(half_times),
        quarter=percent[share <= 1 / 4].max(),
        half=percent[share <= 1 / 2].max(),
        layers=away.abs().max(),
    )


def _theorem_4_3(mass: pd.DataFrame) -> Finding:
    """Under a prefix mask the K prefix tokens keep 1 / K each, and the tokens behind lose their weight."""
    layers = mass["layers"].max()
    prefix = mass[(mass["layers"] == layers) & (mass["kind"] == "prefix")]
    error = (prefix["weight"] - prefix["predicted"]).abs().max()
    behind = mass.loc[mass["kind"] == "behind", "weight"].to_numpy()
    holds = error < 1e-6 and behind[-1] < 1e-6
    fall = behind[-2] / behind[-1]
    return _finding("4.3", holds, error, len(prefix), layers=layers, fall=fall)


def _lemma_4_4(bounds: pd.DataFrame) -> Finding:
    """The printed upper bound of attention under a decay mask."""
    printed = bounds[bounds["bound"] == "4.4 upper, printed"]
    corrected = bounds[bounds["bound"] == "4.4 upper, first row corrected"]
    broken = int(printed["broken"].sum())
    first = int(printed.loc[printed["query"] == 1, "broken"].sum())
    left = int(corrected["broken"].sum())
    weights = int(printed["weights"].sum())
    return _finding("4.4", broken == 0, broken, weights, first=first, left=left)


def _theorem_4_5_law(last_rows: pd.DataFrame) -> Finding:
    """The law of the weights under a decay mask, far from the first token."""
    rows = last_rows[last_rows["distance"] < 100]
    error = (rows["weight"] - rows["predicted"]).abs().max()
    return _finding("4.5 law", error < 1e-9, error, len(rows))


def _theorem_4_5_peak(peaks: pd.DataFrame) -> Finding:
    """The distance of the largest weight under a decay mask."""
    error = (peaks["measured"] - peaks["predicted"]).abs().max()
    return _finding("4.5 peak", error <= 1, error, len(peaks))


def _lemma_4_6(bounds: pd.DataFrame) -> Finding:
    """Both bounds of attention under RoPE."""
    rows = bounds[bounds["bound"].isin(["4.6 lower", "4.6 upper"])]
    broken = int(rows["broken"].sum())
    weights = int(rows["weights"].sum())
    slack = rows.groupby("bound")["slack_all"].first()
    return _finding(
        "4.6",
        broken == 0,
        broken,
        weights,
        lower=slack["4.6 lower"],
        upper=slack["4.6 upper"],
    )


def _theorem_4_7_order(peaks: pd.DataFrame) -> Finding:
    """The largest weight under RoPE lies further away with depth, and nearer with the angle."""
    by_depth = peaks.sort_values("layers").groupby("theta")["measured"].diff().dropna()
    by_angle = peaks.sort_values("theta").groupby("layers")["measured"].diff().dropna()
    broken = int((by_depth <= 0).sum() + (by_angle >= 0).sum())
    steps = len(by_depth) + len(by_angle)
    # Near peaks are too coarse, in whole tokens, to compare angles.
    far = peaks[peaks["measured"] >= 10]
    angles = (far["measured"] * far["theta"]).groupby(far["layers"])
    spread = 100 * (angles.max() / angles.min() - 1).max()
    return _finding("4.7 order", broken == 0, broken, steps, spread=spread)


def _theorem_4_7_form(peaks: pd.DataFrame) -> Finding:
    """The closed form's largest weight under RoPE."""
    n = len(peaks)
    ratio = peaks["measured"] / peaks["formula"]
    slowest = peaks[peaks["theta"] == peaks["theta"].min()].set_index("layers")
    growth = slowest.loc[17] / slowest.loc[9]
    between = peaks["measured"].between(peaks["formula"], peaks["formula_shared"])
    holds = bool(((peaks["measured"] - peaks["formula"]).abs() <= 1).all())
    return _finding(
        "4.7 form",
        holds,
        ratio.max(),
        n,
        smallest=ratio.min(),
        measured=growth["measured"],
        formula=growth["formula"],
        outside=n - int(between.sum()),
        n=n,
    )


def _appendix_h(peaks: pd.DataFrame) -> Finding:
    """The printed zero of L's slope against the corrected one."""
    ratio = peaks["appendix_h"] / peaks["stationary"]
    error = (peaks["stationary"] - peaks["formula"]).abs().max()
    return _finding(
        "H",
        ratio.min() > 0.99,
        ratio.min(),
        len(peaks),
        largest=ratio.max(),
        right=error,
    )


def _gaps_finding(gaps: pd.DataFrame) -> Finding:
    """Whether the rollout predicts the signs of the accuracy gaps that exceed the test noise."""
    same = np.sign(gaps["predicted"]) == np.sign(gaps["paper"])
    clear = gaps["paper"].abs() > 2 * TEST_SD
    # The gaps of one network are no independent observations: the third is the second less the first.
    networks = gaps["attention"] + gaps["layers"].astype(str)
    share = bootstrap.mean(same[clear].to_numpy(float), networks[clear].tolist())
    rank = spearman(gaps["predicted"].to_numpy(), gaps["paper"].to_numpy())
    texts = _texts("gaps")
    note = texts["note"].format(n=len(gaps), same=same.sum(), rank=rank)
    return Finding.above(texts["claim"], texts["statistic"], share, 0.5, note)


def _last_rows(weights: Array, layers: Sequence[int]) -> dict[int, Array]:
    """Last rows [n] after each of some numbers of layers, all with the same weights [n, n]."""
    products = masks.rollout([weights] * max(layers))
    return {t: products[t - 1][-1] for t in layers}


def causal_rates() -> pd.DataFrame:
    """Weights in the last row under a causal mask, their bound, and the rate log j (``predicted``).

    The rate is extrapolated back from the weight after the last layer.
    """
    n = 32
    layers = 40
    last_rows = _last_rows(masks.uniform(masks.causal(n)), range(1, layers + 1))
    rows = []
    for token, (t, weights) in product((2, 3, 5, 10), last_rows.items()):
        final_weight = last_rows[layers][token - 1]
        row = {
            "layers": t,
            "token": token,
            "weight": weights[token - 1],
            "bound": masks.causal_bound(n, t, 1 / n)[token - 1],
            "predicted": final_weight * float(token) ** (layers - t),
            "n": n,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def half_times() -> pd.DataFrame:
    """Layers until half the weight is on token 1 under a window mask, measured and predicted.

    ``reaches``: layers until any weight is on it; ``hops``: windows between the last token and it.
    """
    n = 32
    rows = []
    for width in range(2, n + 1):
        last_rows = _last_rows(masks.uniform(masks.window(n, width)), range(1, 3 * n))
        on_first_token = np.array([weights[0] for weights in last_rows.values()])
        row = {
            "width": width,
            "measured": int((on_first_token >= 0.5).argmax()) + 1,
            "predicted": masks.window_half_time(n, width),
            "reaches": int((on_first_token > 0).argmax()) + 1,
            "hops": -(-(n - 1) // (width - 1)),
            "n": n,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def prefix_mass() -> pd.DataFrame:
    """Weights in the last row under a prefix mask of K tokens, on the prefix and on the first token behind.

    ``predicted``: 1 / K; behind the prefix the rate log(K + 1), extrapolated back from the last layer.
    """
    length = 4
    layers = 20
    last_rows = _last_rows(
        masks.uniform(masks.prefix(12, length)), range(1, layers + 1)
    )
    columns = ["layers", "token", "kind", "weight", "predicted"]
    rows: list[tuple[int, int, str, float, float]] = []
    for t, weights in last_rows.items():
        for token in range(length):
            rows.append((t, token + 1, "prefix", weights[token], 1 / length))
        behind = last_rows[layers][length] * float(length + 1) ** (layers - t)
        rows.append((t, length + 1, "behind", weights[length], behind))
    return pd.DataFrame(rows, columns=columns)


def bounds(n: int = 24, draws: int = 20) -> pd.DataFrame:
    """How often random attention breaks the bounds of Lemmas 4.4 and 4.6, by query.

    Args:
        n: Tokens.
        draws: Random matrices of scores.

    Returns:
        Rows of bound, query, weights (count), broken (count beyond the bound), slack and tightest (median and
        smallest factor between bound and weight), and slack_all (the median over the weights of all queries).
    """
    rng = np.random.default_rng(0)
    theta = 0.1
    delta = 3.0
    causal = masks.causal(n)
    decay_lower, decay_upper = masks.decay_bounds(n, DECAY, -0.2, 0.2)
    _, decay_printed = masks.decay_bounds(n, DECAY, -0.2, 0.2, printed=True)
    rope_lower, rope_upper = rope.bounds(n, theta, 1, 3, delta)
    factors: dict[str, list[Array]] = defaultdict(list)
    for _ in range(draws):
        scores = rng.uniform(-0.2, 0.2, (n, n)) + masks.decay(n, DECAY)
        decayed = masks.attention(scores, causal)
        b = rng.uniform(1, 3, (n, n))
        phi = rng.uniform(-delta * theta, delta * theta, (n, n))
        rotated = masks.attention(rope.scores(n, theta, b, phi), causal)
        # The larger and the smaller side by the lemma.
        pairs = {
            "4.4 lower": (decayed, decay_lower),
            "4.4 upper, printed": (decay_printed, decayed),
            "4.4 upper, first row corrected": (decay_upper, decayed),
            "4.6 lower": (rotated, rope_lower),
            "4.6 upper": (rope_upper, rotated),
        }
        for name, (larger, smaller) in pairs.items():
            factor = np.divide(larger, smaller, out=np.ones((n, n)), where=causal)
            factors[name].append(factor)
    rows = []
    for name, matrices in factors.items():
        slack_all = np.median(np.stack(matrices)[:, causal])
        for query in range(n):
            factor = np.stack(matrices)[:, query, : query + 1]
            row = {
                "bound": name,
                "query": query + 1,
                "weights": factor.size,
                "broken": (factor < 1 - TOLERANCE).sum(),
                "slack": np.median(factor),
                "tightest": factor.min(),
                "slack_all": slack_all,
            }
            rows.append(row)
    return pd.DataFrame(rows)


def _decay_last_rows(n: int, m: float, layers: Sequence[int]) -> dict[int, Array]:
    """Last rows [n] of equal scores under a decay mask, by number of layers."""
    return _last_rows(masks.attention(masks.decay(n, m), masks.causal(n)), layers)


def _rope_last_rows(theta: float, width: float) -> dict[int, Array]:
    """Last rows under RoPE of one angle, queries equal to keys, by number of layers.

    Args:
        theta: Angle in radians per token; the number of tokens spans half a turn.
        width: Standard deviation of one layer's attention in tokens.
    """
    n = int(np.pi / theta)
    # Of this strength attention falls as half a Gaussian of that standard deviation.
    scores = rope.scores(n, theta, (theta * width) ** -2)
    return _last_rows(masks.attention(scores, masks.causal(n)), (2, 3, 5, 9, 17))


def _by_distance(
    last_rows: Mapping[int, Array], law: Callable[[int, Any], Array]
) -> pd.DataFrame:
    """Last rows by number of layers as rows of layers, distance (tokens), weight, and the law's prediction."""
    parts = []
    for layers, weights in last_rows.items():
        distance = np.arange(len(weights))
        columns = {
            "layers": layers,
            "distance": distance,
            "weight": weights[::-1],
            "predicted": law(layers, distance),
        }
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def decay_rows() -> pd.DataFrame:
    """The last row under a decay mask of equal scores, and the law of Theorem 4.5."""
    last_rows = _decay_last_rows(256, DECAY, (2, 4, 6, 10, 16))
    return _by_distance(last_rows, lambda t, x: masks.decay_law(t, DECAY, x))


def _peak_distance(weights: Array) -> int:
    """Distance of the largest weight of a last row, in tokens; the first token, a sink, is left out.

    Of weights that are equal but for rounding the nearest counts.
    """
    inner = weights[:0:-1]
    return int((inner >= inner.max() * (1 - TOLERANCE)).argmax())


def peaks() -> pd.DataFrame:
    """Distance of the largest weight behind the first token, measured and as t / (e^m - 1).

    Where the latter is whole, the law has equal weights there and one token before.
    """
    rows = []
    for m in (DECAY, 0.5):
        for layers, weights in _decay_last_rows(512, m, (2, 4, 6, 10, 16)).items():
            row = {
                "m": m,
                "layers": layers,
                "measured": _peak_distance(weights),
                "predicted": masks.decay_peak(layers, m),
            }
            rows.append(row)
    return pd.DataFrame(rows)


def _rope_law(layers: int, distance: Any) -> Array:
    """Theorem 4.7's closed form at distances in tokens, scaled to sum 1."""
    form = np.exp(rope.law(layers, WIDTH, distance))
    return form / form.sum()


def rope_rows() -> pd.DataFrame:
    """The last row under RoPE of one angle, and Theorem 4.7's closed form, scaled to sum 1."""
    return _by_distance(_rope_last_rows(ROPE_ANGLE, WIDTH), _rope_law)


def rope_peaks() -> pd.DataFrame:
    """Distance of the largest weight under RoPE of one angle, by depth and angle (radians).

    ``formula_shared`` has c / layers; ``stationary`` and ``appendix_h`` are the zeros of L's slope, corrected
    and as printed.
    """
    rows = []
    for theta in (0.005, 0.01, 0.02):
        # Scores are of the same size at every angle.
        width = WIDTH * ROPE_ANGLE / theta
        for layers, weights in _rope_last_rows(theta, width).items():
            row = {
                "theta": theta,
                "layers": layers,
                "measured": _peak_distance(weights),
                "formula": rope.peak(layers, width),
                "formula_shared": rope.peak(layers, width * np.sqrt(layers)),
                "stationary": rope.stationary(layers, width),
                "appendix_h": rope.stationary(layers, width, printed=theta),
                "drift": rope.drift(layers, width),
            }
            rows.append(row)
    return pd.DataFrame(rows)


def item_mass() -> pd.DataFrame:
    """Weight of the last token on the first, middle and last item of the paper's sequences, equal scores."""
    n = 17  # eight pairs of item and label, and a query
    items = {"first": 0, "middle": 4, "last": 7}
    rows: list[Row] = []
    for network, mask in NETWORK_MASKS.items():
        m = DECAY if mask == "decay" else 0.0
        for layers, weights in _decay_last_rows(n, m, GAP_DEPTHS).items():
            for name, item in items.items():
                weight = weights[2 * item] + weights[2 * item + 1]
                row = {
                    "attention": network,
                    "layers": layers,
                    "item": name,
                    "weight": weight,
                }
                rows.append(row)
    return pd.DataFrame(rows)


def predicted_gaps() -> pd.DataFrame:
    """Differences of the weights on two items (predicted), and the paper's accuracy gaps (paper)."""
    mass = item_mass().set_index(["attention", "layers", "item"])["weight"]
    cells = pd.concat(
        [read_printed_cells(f"wu2025_fig{figure}.csv") for figure in (2, 4)]
    )
    paper = cells[cells["pe"] == "none"].set_index(["mask", "depth", "pair"])["paper"]
    rows = []
    networks = NETWORK_MASKS.items()
    for (network, mask), layers, (a, b) in product(networks, GAP_DEPTHS, PAIRS):
        row = {
            "attention": network,
            "layers": layers,
            "pair": f"{a} - {b}",
            "predicted": mass[network, layers, a] - mass[network, layers, b],
            "paper": paper[mask, layers, f"{a}-{b}"],
        }
        rows.append(row)
    return pd.DataFrame(rows)


def _draw_dots(
    axes: Axes,
    table: pd.DataFrame,
    by: str,
    x: str,
    y: str,
    *,
    label: str = "{}",
    lines: Mapping[str, str] | None = None,
) -> None:
    """Draw measured dots, a colour for each value of a column, and thin lines of predictions.

    Args:
        axes: Where to draw.
        table: The rows.
        by: Column whose values have a colour each.
        x: Column of the dots' x.
        y: Column of the dots' y.
        label: Format string of a legend entry.
        lines: Line style of each further column, drawn over x.
    """
    for index, (value, rows) in enumerate(table.groupby(by, sort=False)):
        style = plot.line_style(index)
        dots = style | {"linestyle": "none", "label": label.format(value)}
        axes.plot(rows[x], rows[y], **dots)
        for column, line in (lines or {}).items():
            axes.plot(rows[x], rows[column], line, color=style["color"], linewidth=0.8)


def _draw_last_rows(axes: Axes, table: pd.DataFrame, limit: int, title: str) -> None:
    """Draw weights over the distance up to a limit, thick as measured, thin as predicted."""
    depths = table["layers"].nunique()
    for index, (layers, rows) in enumerate(table.groupby("layers")):
        colour = plot.line_style(index, steps=depths)["color"]
        distance = rows["distance"]
        axes.plot(distance, rows["weight"], color=colour, linewidth=3, alpha=0.4)
        label = f"{layers} layers"
        axes.plot(distance, rows["predicted"], color=colour, linewidth=0.8, label=label)
    axes.set(xlim=(0, limit), xlabel="distance to the query (tokens)")
    axes.set(ylabel="weight", title=title)


def _set_log_ticks(axes: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    """Make both axes logarithmic, with these ticks alone."""
    axes.set(xscale="log", yscale="log")
    for axis, ticks in ((axes.xaxis, x), (axes.yaxis, y)):
        axis.set_ticks(list(ticks), [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)


@plot.styled
def theory_figure(tables: Tables) -> Figure:
    """Theorems 4.1, 4.2 and 4.5: dots are stacks of attention with equal scores, lines are predictions."""
    figure, grid = plot.new_figure(plot.PAGE, 4.6, 2, 2, n="exact")
    causal, window, decay, peak = grid.flat

    rates = tables["causal_rates"]
    lines = {"predicted": "-", "bound": ":"}
    _draw_dots(
        causal, rates, "token", "layers", "weight", label="token {}", lines=lines
    )
    causal.set(yscale="log", ylim=(rates["weight"].min() / 3, 2))
    causal.set(xlabel="layers", ylabel=LAST_ROW_LABEL)
    causal.set_title("4.1 causal: rate log j (line), bound (dotted)")

    halves = tables["half_times"]
    label = "2 (n - 1) / (w - 1)"
    window.plot(halves["width"], halves["measured"], "o", label="measured")
    window.plot(
        halves["width"], halves["predicted"], color=plot.PAPER_COLOUR, label=label
    )
    window.set(xlabel="window width w", ylabel="layers to half on token 1")
    window.set_title("4.2 window")
    ticked = halves[halves["width"].isin((2, 3, 5, 9, 17, 32))]
    _set_log_ticks(window, ticked["width"], ticked["measured"])

    # The first token is a sink of its own.
    inner = tables["decay_rows"].query("distance < distance.max()")
    _draw_last_rows(decay, inner, 130, "4.5 decay: negative binomial (thin)")

    _draw_dots(peak, tables["peaks"], "m", "predicted", "measured", label="m {:.3g}")
    peak.axline((0, 0), slope=1, color=plot.GUIDE, linewidth=0.8)
    peak.set(xlabel="t / (e^m - 1)", ylabel="measured peak distance")
    peak.set_title("4.5 decay: place of the peak")

    for axes in figure.axes:
        axes.legend()
    return figure


@plot.styled
def rope_figure(tables: Tables) -> Figure:
    """Theorems 4.3 and 4.7, and the weights of both kinds of attention with the paper's accuracy gaps."""
    figure, grid = plot.new_figure(plot.PAGE, 4.6, 2, 2, n="exact")
    prefix, closed_form, peak, gaps = grid.flat

    mass = tables["prefix_mass"]
    groups = mass.groupby(["kind", "layers"], sort=False)
    mean = groups[["weight", "predicted"]].mean().reset_index()
    kinds = {"prefix": "each prefix token (mean)", "behind": "first token behind"}
    mean = mean.replace(kinds)
    _draw_dots(prefix, mean, "kind", "layers", "weight", lines={"predicted": "-"})
    prefix.set(yscale="log", ylim=(mass["weight"].min() / 3, 2))
    prefix.set(xlabel="layers", ylabel=LAST_ROW_LABEL)
    prefix.set_xticks(range(0, mass["layers"].max() + 1, 5))
    prefix.set_title("4.3 prefix: 1 / K, and rate log(K + 1)")

    title = "4.7 RoPE: closed form (thin)"
    _draw_last_rows(closed_form, tables["rope_rows"], 120, title)

    peaks = tables["rope_peaks"]
    lines = {"formula": "-", "appendix_h": ":"}
    _draw_dots(
        peak, peaks, "theta", "layers", "measured", label="theta {:g}", lines=lines
    )
    walk_style = {"color": plot.GUIDE, "linewidth": 0.8, "zorder": 0}
    for _, rows in peaks.groupby("theta"):
        (walk,) = peak.plot(rows["layers"], rows["drift"], **walk_style)
    walk.set_label("random walk")
    _set_log_ticks(peak, sorted(set(peaks["layers"])), (0.3, 1, 3, 10, 30, 100))
    peak.set(xlabel="layers", ylabel="peak distance (tokens)", ylim=(0.15, 2000))
    peak.set_title("4.7 RoPE: place of the peak")

    _draw_dots(gaps, tables["predicted_gaps"], "attention", "predicted", "paper")
    noise = {"color": plot.SHADE, "label": "two deviations of a test set"}
    gaps.axhspan(-2 * TEST_SD, 2 * TEST_SD, zorder=0, **noise)
    gaps.axhline(0, color=plot.GUIDE, linewidth=0.6)
    gaps.axvline(0, color=plot.GUIDE, linewidth=0.6)
    gaps.set_xlabel("difference of weights, equal scores")
    gaps.set_ylabel("accuracy gap (the paper's)")
    gaps.set_title("items, 2 to 6 layers")

    for axes in figure.axes:
        axes.legend()
    return figure


@plot.styled
def bounds_figure(table: pd.DataFrame) -> Figure:
    """Factors of weights and bounds by query: the smallest of Lemma 4.4's upper bound, the medians of all."""
    figure, (left, right) = plot.new_figure(plot.PAGE, 2.3, 1, 2, n="random attention")
    for name, rows in table.groupby("bound", sort=False):
        bound, _, variant = str(name).partition(", ")
        if variant:
            style = plot.line_style(len(left.lines))
            left.plot(rows["query"], rows["tightest"], **style, label=variant)
        if "corrected" not in variant:
            style = plot.line_style(len(right.lines))
            right.plot(rows["query"], rows["slack"], **style, label=bound)
    left.axhline(1, color=plot.GUIDE, linewidth=0.6)
    left.set(xlabel="query", ylabel="bound / weight, smallest", ylim=(0, None))
    left.set_title("4.4 decay: the upper bound fails in row 1")
    left.legend()
    right.set(xlabel="query", ylabel="factor to the bound, median")
    right.set(yscale="log", ylim=(0.5, 5000))
    right.set_title("slack of the bounds")
    right.legend(ncols=2, loc="upper left")
    return figure
