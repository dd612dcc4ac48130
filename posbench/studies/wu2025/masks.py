"""Wu et al. 2025, Section 4: what the theorems predict beside what stacks of attention do. Needs no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from posbench.plots.base import PAGE, line_style, new_figure, styled
from posbench.run.base import Run
from posbench.stats.tables import wilson
from posbench.studies.base import Finding, Study, Verdict
from posbench.theory import masks, rope

Array = NDArray[np.float64]
M = -float(np.log(0.8))  # the decay of the paper's runs, gamma 0.8
ITEMS = 17  # tokens of the paper's sequences: eight pairs and a query


SIGMA = 5.3
"""Tokens in which one layer's attention falls to e^-1/2 where theta is 0.01, in the study of Theorem 4.7."""
PAIRS = (("first", "middle"), ("first", "last"), ("middle", "last"))
GAPS = {
    ("no PE, causal", 2): (0.059, 0.077, 0.018),
    ("no PE, causal", 4): (0.077, 0.094, 0.021),
    ("no PE, causal", 6): (0.091, 0.106, 0.011),
    ("decay 0.8, causal", 2): (-0.055, -0.073, -0.003),
    ("decay 0.8, causal", 4): (-0.010, -0.001, 0.008),
    ("decay 0.8, causal", 6): (0.020, 0.014, -0.010),
}
"""Accuracy gaps of trained networks without residual stream, in the order of :data:`PAIRS`: Wu et al. 2025,
Figures 2 and 4."""
TEST_SD = 0.0067
"""Standard deviation of such a gap over its 10,000 test sequences, measured on networks trained as the
paper's."""


@dataclass(frozen=True, kw_only=True)
class Masks(Study):
    """Theorems on attention masks beside stacks of attention with equal scores (Wu et al. 2025, Section
    4)."""

    needs_model: ClassVar[bool] = False

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
            item_mass,
            predicted_gaps,
        )
        return {make.__name__: make() for make in made}

    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """Predictions as lines, stacks of attention as dots."""
        masked = [tables[name] for name in ("causal_rates", "half_times", "decay_rows", "peaks")]
        rotated = [tables[name] for name in ("prefix_mass", "rope_rows", "rope_peaks", "predicted_gaps")]
        return {
            "theory": (
                theory_figure(*masked),
                "Dots: stacks of attention with equal scores. Lines: what the theorems predict; dotted: the bound of "
                "Theorem 4.1.",
            ),
            "rope": (
                rope_figure(*rotated),
                "Dots and thick lines: stacks of attention. Thin lines: what the theorems predict; dotted: the zero of "
                "Appendix H as printed; grey: a random walk with steps of half a Gaussian. Last panel: "
                "differences between weights, equal scores, against the accuracy gaps that "
                "the paper prints; grey: two standard deviations of its test sets.",
            ),
            "bounds": (
                bounds_figure(tables["bounds"]),
                "Random attention beside the bounds of Lemmas 4.4 and 4.6: a factor below 1 is a bound that does not hold.",
            ),
        }

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """Theorems 4.1 to 4.7 in numbers."""
        return [*_on_masks(tables), *_on_decay(tables), *_on_rope(tables), _on_gaps(tables["predicted_gaps"])]


def _on_masks(tables: Mapping[str, pd.DataFrame]) -> list[Finding]:
    """Theorems 4.1 to 4.3."""
    rates, halves, prefix = tables["causal_rates"], tables["half_times"], tables["prefix_mass"]
    broken, second = (
        int((rates["weight"] > rates["bound"] + 1e-12).sum()),
        rates[rates["token"] == 2]["weight"].to_numpy(),
    )
    slack = np.log(second[-2] / second[-1]) / -np.log1p(-1 / rates["n"].iloc[0])
    early = int((halves["reaches"] < halves["hops"]).sum())
    short = halves[halves["width"] <= halves["n"] / 2]
    drift = (short["measured"] / short["predicted"] - 1).abs().max()
    end = prefix[prefix["layers"] == prefix["layers"].max()]
    inside, outside = end[end["kind"] == "prefix"], prefix[prefix["kind"] == "behind"]
    share = (inside["weight"] - inside["predicted"]).abs().max()
    late = outside.sort_values("layers")["weight"].to_numpy()
    return [
        Finding(
            claim="Theorem 4.1: under a causal mask the weight of a later token stays below C (1 - (j - 1) epsilon)^t",
            statistic="weights above the bound",
            value=broken,
            n=len(rates),
            verdict=_holds(broken == 0),
            note=f"a slack bound: token 2 falls by a factor {second[-2] / second[-1]:.3f} per layer (eigenvalue 1/2), "
            f"{slack:.0f} times the bound's rate",
        ),
        Finding(
            claim="Theorem 4.2: through a window w the first token is reached in ceil((N - 1) / (w - 1)) layers, and wins",
            statistic="widths that reach it earlier",
            value=early,
            n=len(halves),
            verdict=_holds(early == 0),
            note=f"half of the weight is there after 2 (N - 1) / (w - 1) layers, a random walk's drift: away by "
            f"{100 * drift:.0f} % at most for w up to N / 2",
        ),
        Finding(
            claim="Theorem 4.3: under a prefix mask all K prefix tokens keep some weight, and the others lose theirs",
            statistic="largest distance of a prefix token's weight to 1 / K",
            value=share,
            n=len(inside),
            verdict=_holds(share < 1e-6 and late[-1] < 1e-6),
            note=f"equal scores, {end['layers'].iloc[0]} layers; token K + 1 falls by a factor {late[-2] / late[-1]:.3f} "
            "per layer (K + 1)",
        ),
    ]


def _on_decay(tables: Mapping[str, pd.DataFrame]) -> list[Finding]:
    """Lemma 4.4 and Theorem 4.5."""
    rows, tops = tables["decay_rows"].query("distance < 100"), tables["peaks"]
    table = tables["bounds"].set_index("bound")
    printed, mended = table.loc["4.4 upper, printed"], table.loc["4.4 upper, first row mended"]
    first = int(printed.loc[printed["query"] == 1, "broken"].sum())
    away, law = (
        (tops["measured"] - tops["predicted"]).abs().max(),
        (rows["weight"] - rows["predicted"]).abs().max(),
    )
    return [
        Finding(
            claim="Lemma 4.4: decayed attention stays below C_max e^(-(i - j) m), C_max = e^(I_max - I_min) / (1 + e^-m)",
            statistic="weights above it, random scores",
            value=printed["broken"].sum(),
            n=int(printed["weights"].sum()),
            verdict=_holds(printed["broken"].sum() == 0),
            note=f"{first} of them are the first row's, whose only weight is 1: it fails where "
            f"I_max - I_min < log(1 + e^-m). With e^(I_max - I_min) in that row {mended['broken'].sum()} are left",
        ),
        Finding(
            claim="Theorem 4.5: decay mask and depth weigh distances by binom(t + x, x) e^(-x m)",
            statistic="largest distance to the negative binomial law",
            value=law,
            n=len(rows),
            verdict=_holds(law < 1e-9),
            note="equal scores, distances to 100, nine digits",
        ),
        Finding(
            claim="Theorem 4.5: the peak stands at x* = t / (e^m - 1)",
            statistic="largest distance to it in tokens",
            value=away,
            n=len(tops),
            verdict=_holds(away <= 1),
            note="behind the first token, which is a sink of its own",
        ),
    ]


def _on_rope(tables: Mapping[str, pd.DataFrame]) -> list[Finding]:
    """Lemma 4.6 and Theorem 4.7."""
    table, tops = tables["bounds"].set_index("bound"), tables["rope_peaks"]
    both, slack = table.loc[["4.6 lower", "4.6 upper"]], table.groupby("bound")["slack"].median()
    deeper = tops.sort_values("layers").groupby("theta")["measured"].diff().dropna()
    faster = tops.sort_values("theta").groupby("layers")["measured"].diff().dropna()
    wrong = int((deeper <= 0).sum() + (faster >= 0).sum())
    scaled = tops.assign(angle=tops["measured"] * tops["theta"])[tops["measured"] >= 10].groupby("layers")[
        "angle"
    ]
    spread = (scaled.max() / scaled.min() - 1).max()
    ratio = tops["measured"] / tops["formula"]
    slowest = tops[tops["theta"] == tops["theta"].min()].set_index("layers")
    growth = slowest.loc[17] / slowest.loc[9]
    slip = (tops["appendix_h"] / tops["stationary"]).agg(["min", "max"])
    right = (tops["stationary"] - tops["formula"]).abs().max()
    outside = int(((tops["measured"] < tops["formula"]) | (tops["measured"] > tops["formula_shared"])).sum())
    return [
        Finding(
            claim="Lemma 4.6: RoPE's attention lies between C_min e^(-c x^2 theta^2) and C_max e^(-c' x^2 theta^2)",
            statistic="weights outside",
            value=both["broken"].sum(),
            n=int(both["weights"].sum()),
            verdict=_holds(both["broken"].sum() == 0),
            note=f"random lengths and angles; slack: the middle weight is {slack['4.6 lower']:.0f} times the lower and "
            f"1 / {slack['4.6 upper']:.0f} of the upper bound",
        ),
        Finding(
            claim="Theorem 4.7: the peak x* moves back with depth t and comes nearer with theta",
            statistic="neighbouring depths or thetas that disagree",
            value=wrong,
            n=len(deeper) + len(faster),
            verdict=_holds(wrong == 0),
            note=f"x* theta is constant to {100 * spread:.0f} % over theta where x* is 10 tokens or more",
        ),
        Finding(
            claim="Theorem 4.7: distances are weighed by binom(t + x, x) e^(-c x^2 theta^2) with the c of one layer",
            statistic="measured peak over that of the closed form, largest",
            value=ratio.max(),
            n=len(tops),
            verdict=_holds(bool(((tops["measured"] - tops["formula"]).abs() <= 1).all())),
            note=f"smallest {ratio.min():.2f}; t from 8 to 16 moves the peak by a factor {growth['measured']:.2f}, the "
            f"form's by {growth['formula']:.2f}. The Theta allows any c from c / (t + 1) to c; {outside} of {len(tops)} "
            "peaks lie outside of these two forms'",
        ),
        Finding(
            claim="Appendix H: L'(x) = log((t + x) / x) - 2 c theta x is 0 at the peak of the closed form",
            statistic="its zero over that with theta^2, the derivative of the printed L, smallest",
            value=slip["min"],
            n=len(tops),
            verdict=_holds(slip["min"] > 0.99),
            note=f"largest {slip['max']:.2f}; with theta^2 the zero is {right:.1f} tokens from the peak at most. Growth with "
            "t and fall with theta stand",
        ),
    ]


def _on_gaps(gaps: pd.DataFrame) -> Finding:
    """The rollout as a predictor of trained networks."""
    clear = gaps[gaps["paper"].abs() > 2 * TEST_SD]
    agree = int((np.sign(clear["predicted"]) == np.sign(clear["paper"])).sum())
    low, high = wilson(agree, len(clear))
    rank, among_all = (
        gaps["predicted"].corr(gaps["paper"], method="spearman"),
        (gaps["predicted"] * gaps["paper"] > 0).sum(),
    )
    return Finding(
        claim="Differences between the theory's weights have the signs of trained networks' accuracy gaps (Figures 2 and 4)",
        statistic="share of equal signs, of gaps beyond two standard deviations of the test set",
        value=agree / len(clear),
        low=low,
        high=high,
        n=len(clear),
        verdict=_holds(low > 0.5),
        note=f"the paper's gaps, as printed; of all {len(gaps)}, {among_all} have the sign, and they correlate at {rank:.2f} "
        "(Spearman). Sizes are not comparable",
    )


def _holds(does: bool) -> Verdict:
    return "holds" if does else "does not hold"


def causal_rates(n: int = 32, layers: int = 40, tokens: Sequence[int] = (2, 3, 5, 10)) -> pd.DataFrame:
    """Weight of token j (from 1) in the last row under a causal mask of equal weights, and the bound of
    Theorem 4.1.

    Returns:
        Rows of layers, token, weight, bound, predicted (the rate log j of the eigenvalue 1/j, drawn back from
        the last weight), n.
    """
    found = masks.rollout([masks.uniform(masks.causal(n))] * layers)
    rows = []
    for j in tokens:
        last = found[-1][-1, j - 1]
        for t, weights in enumerate(found, start=1):
            bound = masks.causal_bound(n, t, 1 / n)[j - 1]
            rows.append((t, j, weights[-1, j - 1], bound, last * float(j) ** (layers - t), n))
    return pd.DataFrame(rows, columns=["layers", "token", "weight", "bound", "predicted", "n"])


def half_times(n: int = 32, widths: Sequence[int] = (2, 3, 5, 9, 17, 32)) -> pd.DataFrame:
    """Layers until half of the last token's weight is on the first one, per window width.

    Returns:
        Rows of width, measured, predicted (the drift of a random walk), reaches (layers until there is any
        weight), hops (ceil((n - 1) / (width - 1))), n.
    """
    rows = []
    for width in widths:
        weights, state, t, reaches = masks.uniform(masks.window(n, width)), np.eye(n), 0, 0
        while state[-1, 0] < 0.5:
            state, t = weights @ state, t + 1
            reaches = reaches or (t if state[-1, 0] > 0 else 0)
        rows.append((width, t, masks.window_half_time(n, width), reaches, -(-(n - 1) // (width - 1)), n))
    return pd.DataFrame(rows, columns=["width", "measured", "predicted", "reaches", "hops", "n"])


def prefix_mass(n: int = 12, length: int = 4, layers: int = 20) -> pd.DataFrame:
    """Weights of the last token on each prefix token and on the first one behind, equal scores under a prefix
    mask (Theorem 4.3).

    Returns:
        Rows of layers, token (from 1), kind (prefix, behind), weight, predicted: 1 / K, and behind the prefix
        the rate log(K + 1) of the eigenvalue 1 / (K + 1), drawn back from the last weight.
    """
    found = masks.rollout([masks.uniform(masks.prefix(n, length))] * layers)
    rows = []
    for t, weights in enumerate(found, start=1):
        rows += [(t, k + 1, "prefix", weights[-1, k], 1 / length) for k in range(length)]
        rows.append(
            (
                t,
                length + 1,
                "behind",
                weights[-1, length],
                found[-1][-1, length] * float(length + 1) ** (layers - t),
            )
        )
    return pd.DataFrame(rows, columns=["layers", "token", "kind", "weight", "predicted"])


def bounds(n: int = 24, draws: int = 20, seed: int = 0) -> pd.DataFrame:
    """How often random attention breaks the bounds of Lemmas 4.4 and 4.6, and how far away they are.

    Scores under the decay mask are even in [-0.2, 0.2]; under RoPE of 0.1 per token b is even in [1, 3] and
    phi within 3 theta.

    Returns:
        Rows of bound, query (from 1), weights (of all draws), broken, slack and tightest (median and smallest
        factor between weight and bound).
    """
    rng, theta, delta = np.random.default_rng(seed), 0.1, 3.0
    names = ("4.4 lower", "4.4 upper, printed", "4.4 upper, first row mended", "4.6 lower", "4.6 upper")
    ratios: dict[str, list[Array]] = {name: [] for name in names}
    for _ in range(draws):
        decayed = masks.attention(rng.uniform(-0.2, 0.2, (n, n)) + masks.decay(n, M), masks.causal(n))
        low, high = masks.decay_bounds(n, M, -0.2, 0.2)
        printed = masks.decay_bounds(n, M, -0.2, 0.2, printed=True)[1]
        b, phi = rng.uniform(1, 3, (n, n)), rng.uniform(-delta * theta, delta * theta, (n, n))
        rotated = masks.attention(rope.scores(n, theta, b, phi), masks.causal(n))
        below, above = rope.bounds(n, theta, 1, 3, delta)
        pairs = ((decayed, low), (printed, decayed), (high, decayed), (rotated, below), (above, rotated))
        for name, (larger, smaller) in zip(names, pairs, strict=True):
            ratios[name].append(np.divide(larger, smaller, out=np.ones((n, n)), where=masks.causal(n)))
    rows = []
    for name, found in ratios.items():
        for i in range(n):
            factor = np.stack(found)[:, i, : i + 1]
            rows.append(
                (name, i + 1, factor.size, (factor < 1 - 1e-12).sum(), np.median(factor), factor.min())
            )
    return pd.DataFrame(rows, columns=["bound", "query", "weights", "broken", "slack", "tightest"])


def decay_rows(n: int = 256, m: float = M, layers: Sequence[int] = (2, 4, 6, 10, 16)) -> pd.DataFrame:
    """The last row under a decay mask of equal scores by distance, and the negative binomial law of Theorem
    4.5."""
    found = masks.rollout([masks.attention(masks.decay(n, m), masks.causal(n))] * max(layers))
    distance = np.arange(n)
    parts = []
    for t in layers:
        values = {"weight": found[t - 1][-1, ::-1], "predicted": masks.decay_law(t, m, distance)}
        parts.append(pd.DataFrame({"layers": t, "distance": distance, **values}))
    return pd.concat(parts, ignore_index=True)


def peaks(
    m: Sequence[float] = (M, 0.5), layers: Sequence[int] = (2, 4, 6, 10, 16), n: int = 512
) -> pd.DataFrame:
    """Distance of the largest weight behind the first token, measured and as t / (e^m - 1)."""
    rows = []
    for each in m:
        found = masks.rollout([masks.attention(masks.decay(n, each), masks.causal(n))] * max(layers))
        for t in layers:
            row = found[t - 1][-1, ::-1][:-1]
            rows.append((each, t, int(row.argmax()), masks.decay_peak(t, each)))
    return pd.DataFrame(rows, columns=["m", "layers", "measured", "predicted"])


def _rope_last_rows(theta: float, layers: Sequence[int]) -> dict[int, Array]:
    """The last row by distance after each number of layers, one angle, equal queries and keys."""
    n = int(np.pi / theta)
    weights = masks.attention(rope.scores(n, theta, rope.strength(theta, _width(theta))), masks.causal(n))
    row, found = np.eye(n)[-1], {}
    for t in range(1, max(layers) + 1):
        row = row @ weights
        if t in layers:
            found[t] = row[::-1]
    return found


def _width(theta: float) -> float:
    """Width of the attention in tokens, scores being of the same size at every theta."""
    return SIGMA * 0.01 / theta


def rope_rows(theta: float = 0.01, layers: Sequence[int] = (2, 3, 5, 9, 17)) -> pd.DataFrame:
    """The last row under RoPE of one angle by distance, and the closed form of Theorem 4.7, scaled to sum 1.

    Returns:
        Rows of layers, distance (tokens), weight, formula.
    """
    parts = []
    for t, row in _rope_last_rows(theta, layers).items():
        distance = np.arange(len(row))
        formula = np.exp(rope.law(t, _width(theta), distance))
        values = {"weight": row, "formula": formula / formula.sum()}
        parts.append(pd.DataFrame({"layers": t, "distance": distance, **values}))
    return pd.concat(parts, ignore_index=True)


def rope_peaks(
    thetas: Sequence[float] = (0.005, 0.01, 0.02), layers: Sequence[int] = (2, 3, 5, 9, 17)
) -> pd.DataFrame:
    """Distance of the largest weight under RoPE of one angle, over depth and angle; scores of one size.

    Returns:
        Rows of theta (radians), layers, measured, formula (:func:`posbench.theory.rope.peak`), formula_shared
        (the same with c / layers), stationary and appendix_h (zeros of L', corrected and printed), drift
        (mean distance of a random walk).
    """
    rows = []
    for theta in thetas:
        for t, row in _rope_last_rows(theta, layers).items():
            width = _width(theta)
            forms = rope.peak(t, width), rope.peak(t, width * np.sqrt(t))
            zeros = rope.stationary(t, width), rope.stationary(t, width, printed=theta)
            rows.append((theta, t, int(row[:-1].argmax()), *forms, *zeros, rope.drift(t, width)))
    names = ["theta", "layers", "measured", "formula", "formula_shared", "stationary", "appendix_h", "drift"]
    return pd.DataFrame(rows, columns=names)


def item_mass(layers: Sequence[int] = (2, 4, 6)) -> pd.DataFrame:
    """Weight of the last token on the first, middle and last item of the paper's sequences, with equal
    scores."""
    kinds = {"no PE, causal": np.zeros((ITEMS, ITEMS)), "decay 0.8, causal": masks.decay(ITEMS, M)}
    rows = []
    for name, scores in kinds.items():
        found = masks.rollout([masks.attention(scores, masks.causal(ITEMS))] * max(layers))
        for t in layers:
            last = found[t - 1][-1]
            rows += [
                (name, t, place, last[2 * i] + last[2 * i + 1])
                for place, i in (("first", 0), ("middle", 4), ("last", 7))
            ]
    return pd.DataFrame(rows, columns=["attention", "layers", "item", "weight"])


def predicted_gaps() -> pd.DataFrame:
    """Differences between the weights on two items, beside the accuracy gaps of :data:`GAPS`.

    Returns:
        Rows of attention, layers, pair, predicted (difference of weights), paper (difference of accuracies).
    """
    mass = item_mass().set_index(["attention", "layers", "item"])["weight"]
    rows = [
        (name, t, f"{one} - {other}", mass[name, t, one] - mass[name, t, other], gap)
        for (name, t), printed in GAPS.items()
        for (one, other), gap in zip(PAIRS, printed, strict=True)
    ]
    return pd.DataFrame(rows, columns=["attention", "layers", "pair", "predicted", "paper"])


@styled
def theory_figure(
    rates: pd.DataFrame, halves: pd.DataFrame, rows: pd.DataFrame, tops: pd.DataFrame
) -> Figure:
    """Theorems 4.1, 4.2 and 4.5: dots are stacks of attention with equal scores, lines are predictions."""
    figure = new_figure(PAGE, 4.6)
    one, two, three, four = figure.subplots(2, 2).flat
    for index, (token, line) in enumerate(rates.groupby("token")):
        style = line_style(index)
        one.plot(line["layers"], line["weight"], **style | {"linestyle": "none"}, label=f"token {token}")
        one.plot(line["layers"], line["predicted"], color=style["color"], linewidth=0.8)
        one.plot(line["layers"], line["bound"], color=style["color"], linewidth=0.8, linestyle=":")
    one.set(
        yscale="log", ylim=(rates["weight"].min() / 3, 2), xlabel="layers", ylabel="weight in the last row"
    )
    one.set_title("4.1 causal: rate log j (line), bound (dotted)")
    two.plot(halves["width"], halves["measured"], "o", color="black", label="measured")
    two.plot(halves["width"], halves["predicted"], label="2 (n - 1) / (w - 1)")
    two.set(
        xscale="log",
        yscale="log",
        xlabel="window width w",
        ylabel="layers to half on token 1",
        title="4.2 window",
    )
    for axis, ticks in ((two.xaxis, halves["width"]), (two.yaxis, halves["measured"])):
        axis.set_ticks(list(ticks), [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    for index, (layers, line) in enumerate(rows.groupby("layers")):
        style, inner = line_style(index, of=rows["layers"].nunique()), line.iloc[:-1]
        three.plot(inner["distance"], inner["weight"], color=style["color"], linewidth=3, alpha=0.4)
        three.plot(
            inner["distance"],
            inner["predicted"],
            color=style["color"],
            linewidth=0.8,
            label=f"{layers} layers",
        )
    three.set(
        xlim=(0, 130),
        xlabel="distance to the query",
        ylabel="weight",
        title="4.5 decay: negative binomial (thin)",
    )
    for index, (m, line) in enumerate(tops.groupby("m")):
        four.plot(
            line["predicted"],
            line["measured"],
            **line_style(index) | {"linestyle": "none"},
            label=f"m {m:.3g}",
        )
    ends = [0, tops["predicted"].max()]
    four.plot(ends, ends, color="0.5", linewidth=0.8)
    four.set(
        xlabel="t / (e^m - 1)", ylabel="measured peak distance", title="4.5 decay: where the peak stands"
    )
    for axes in (one, two, three, four):
        axes.legend()
    return figure


@styled
def rope_figure(prefix: pd.DataFrame, rows: pd.DataFrame, tops: pd.DataFrame, gaps: pd.DataFrame) -> Figure:
    """Theorems 4.3 and 4.7, and the weights of both kinds of attention beside the paper's accuracy gaps."""
    figure = new_figure(PAGE, 4.6)
    one, two, three, four = figure.subplots(2, 2).flat
    for index, (kind, line) in enumerate(prefix.groupby("kind", sort=False)):
        style, mean = line_style(index), line.groupby("layers")[["weight", "predicted"]].mean()
        words = {"prefix": "each prefix token (mean)", "behind": "first token behind"}[str(kind)]
        one.plot(mean.index, mean["weight"], **style | {"linestyle": "none"}, label=words)
        one.plot(mean.index, mean["predicted"], color=style["color"], linewidth=0.8)
    one.set(
        yscale="log", ylim=(prefix["weight"].min() / 3, 2), xlabel="layers", ylabel="weight in the last row"
    )
    one.set(xticks=range(0, prefix["layers"].max() + 1, 5), title="4.3 prefix: 1 / K, and rate log(K + 1)")
    for index, (layers, line) in enumerate(rows.groupby("layers")):
        style = line_style(index, of=rows["layers"].nunique())
        two.plot(line["distance"], line["weight"], color=style["color"], linewidth=3, alpha=0.4)
        two.plot(
            line["distance"], line["formula"], color=style["color"], linewidth=0.8, label=f"{layers} layers"
        )
    two.set(
        xlim=(0, 120),
        xlabel="distance to the query (tokens)",
        ylabel="weight",
        title="4.7 RoPE: closed form (thin)",
    )
    for index, (theta, line) in enumerate(tops.groupby("theta")):
        style = line_style(index)
        three.plot(
            line["layers"], line["measured"], **style | {"linestyle": "none"}, label=f"theta {theta:g}"
        )
        three.plot(line["layers"], line["formula"], color=style["color"], linewidth=0.8)
        three.plot(line["layers"], line["appendix_h"], color=style["color"], linewidth=0.8, linestyle=":")
        three.plot(line["layers"], line["drift"], color="0.6", linewidth=0.8, zorder=0)
    three.set(
        xscale="log",
        yscale="log",
        xlabel="layers",
        ylabel="peak distance (tokens)",
        title="4.7 RoPE: where the peak stands",
    )
    three.set_ylim(0.15, 2000)
    for axis, ticks in ((three.xaxis, sorted(set(tops["layers"]))), (three.yaxis, (0.3, 1, 3, 10, 30, 100))):
        axis.set_ticks(list(ticks), [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    for index, (name, line) in enumerate(gaps.groupby("attention", sort=False)):
        four.plot(
            line["predicted"], line["paper"], **line_style(index) | {"linestyle": "none"}, label=str(name)
        )
    four.axhspan(-2 * TEST_SD, 2 * TEST_SD, color="0.9", zorder=0)
    four.axhline(0, color="0.5", linewidth=0.6)
    four.axvline(0, color="0.5", linewidth=0.6)
    four.set(
        xlabel="difference of weights, equal scores",
        ylabel="accuracy gap (the paper's)",
        title="items, 2 to 6 layers",
    )
    for axes in (one, two, three, four):
        axes.legend()
    return figure


@styled
def bounds_figure(table: pd.DataFrame) -> Figure:
    """Factors between weights and bounds by query: the smallest of Lemma 4.4's upper bound, and the medians
    of all."""
    figure = new_figure(PAGE, 2.3)
    left, right = figure.subplots(1, 2)
    upper = [
        (name, line) for name, line in table.groupby("bound", sort=False) if str(name).startswith("4.4 upper")
    ]
    for index, (name, line) in enumerate(upper):
        left.plot(line["query"], line["tightest"], **line_style(index), label=str(name).split(", ")[1])
    left.axhline(1, color="0.5", linewidth=0.6)
    left.set(
        xlabel="query",
        ylabel="bound / weight, smallest",
        title="4.4 decay: the upper bound fails in row 1",
        ylim=(0, None),
    )
    others = [(name, line) for name, line in table.groupby("bound", sort=False) if "mended" not in str(name)]
    for index, (name, line) in enumerate(others):
        right.plot(line["query"], line["slack"], **line_style(index), label=str(name).split(", ")[0])
    right.set(xlabel="query", ylabel="factor to the bound, median", yscale="log", title="slack of the bounds")
    right.set(ylim=(0.5, 5000))
    left.legend()
    right.legend(ncols=2, loc="upper left")
    return figure
