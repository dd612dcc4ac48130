"""Wu et al. 2025, Section 4: what the theorems predict beside what stacks of attention do. Needs no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from posbench.plots import PAGE, line_style, new_figure, styled
from posbench.stages.base import Run
from posbench.studies.base import Finding, Study
from posbench.theory import masks

Array = NDArray[np.float64]
M = -float(np.log(0.8))  # the decay of the paper's runs, gamma 0.8
ITEMS = 17  # tokens of the paper's sequences: eight pairs and a query


@dataclass(frozen=True, kw_only=True)
class Masks(Study):
    """Theorems on attention masks beside stacks of attention with equal scores (Wu et al. 2025, Section 4)."""

    needs_model: ClassVar[bool] = False

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``causal_rates``, ``half_times``, ``decay_rows``, ``peaks``, ``item_mass``, by the functions of these names."""
        return {
            "causal_rates": causal_rates(),
            "half_times": half_times(),
            "decay_rows": decay_rows(),
            "peaks": peaks(),
            "item_mass": item_mass(),
        }

    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """Predictions as lines, stacks of attention as dots."""
        caption = (
            "Dots: stacks of attention with equal scores. Lines: what the theorems predict; dotted: the bound of Theorem 4.1."
        )
        shown = [tables[name] for name in ("causal_rates", "half_times", "decay_rows", "peaks")]
        return {"theory": (theory_figure(*shown), caption)}

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """Theorems 4.1 and 4.5 in numbers."""
        rates, rows, tops = tables["causal_rates"], tables["decay_rows"].query("distance < 100"), tables["peaks"]
        broken = int((rates["weight"] > rates["bound"] + 1e-12).sum())
        second = rates[rates["token"] == 2]["weight"].to_numpy()
        away, law = (tops["measured"] - tops["predicted"]).abs().max(), (rows["weight"] - rows["predicted"]).abs().max()
        return [
            Finding(claim="Theorem 4.1: under a causal mask the weight of a later token stays below C (1 - (j - 1) epsilon)^t",
                    statistic="weights above the bound", value=broken, n=len(rates),
                    verdict="holds" if broken == 0 else "does not hold",
                    note=f"a slack bound: token 2 falls by a factor {second[-2] / second[-1]:.3f} per layer (eigenvalue 1/2)"),
            Finding(claim="Theorem 4.5: decay mask and depth weigh distances by binom(t + x, x) e^(-x m)",
                    statistic="largest distance to the negative binomial law", value=law, n=len(rows),
                    verdict="holds" if law < 1e-9 else "does not hold", note="equal scores, distances to 100, nine digits"),
            Finding(claim="Theorem 4.5: the peak stands at x* = t / (e^m - 1)",
                    statistic="largest distance to it in tokens", value=away, n=len(tops),
                    verdict="holds" if away <= 1 else "does not hold", note="behind the first token, which is a sink of its own"),
        ]  # fmt: skip


def causal_rates(n: int = 32, layers: int = 40, tokens: Sequence[int] = (2, 3, 5, 10)) -> pd.DataFrame:
    """Weight of token j (from 1) in the last row under a causal mask of equal weights, and the bound of Theorem 4.1.

    Returns:
        Rows of layers, token, weight, bound, predicted (the rate log j of the eigenvalue 1/j, drawn back from the last weight).
    """
    found = masks.rollout([masks.uniform(masks.causal(n))] * layers)
    rows = []
    for j in tokens:
        last = found[-1][-1, j - 1]
        for t, weights in enumerate(found, start=1):
            bound = masks.causal_bound(n, t, 1 / n)[j - 1]
            rows.append((t, j, weights[-1, j - 1], bound, last * float(j) ** (layers - t)))
    return pd.DataFrame(rows, columns=["layers", "token", "weight", "bound", "predicted"])


def half_times(n: int = 32, widths: Sequence[int] = (2, 3, 5, 9, 17, 32)) -> pd.DataFrame:
    """Layers until half of the last token's weight is on the first one, per window width, and the drift's prediction."""
    rows = []
    for width in widths:
        weights, state, t = masks.uniform(masks.window(n, width)), np.eye(n), 0
        while state[-1, 0] < 0.5:
            state, t = weights @ state, t + 1
        rows.append((width, t, masks.window_half_time(n, width)))
    return pd.DataFrame(rows, columns=["width", "measured", "predicted"])


def decay_rows(n: int = 256, m: float = M, layers: Sequence[int] = (2, 4, 6, 10, 16)) -> pd.DataFrame:
    """The last row under a decay mask of equal scores by distance, and the negative binomial law of Theorem 4.5."""
    found = masks.rollout([masks.attention(masks.decay(n, m), masks.causal(n))] * max(layers))
    distance = np.arange(n)
    parts = []
    for t in layers:
        values = {"weight": found[t - 1][-1, ::-1], "predicted": masks.decay_law(t, m, distance)}
        parts.append(pd.DataFrame({"layers": t, "distance": distance, **values}))
    return pd.concat(parts, ignore_index=True)


def peaks(m: Sequence[float] = (M, 0.5), layers: Sequence[int] = (2, 4, 6, 10, 16), n: int = 512) -> pd.DataFrame:
    """Distance of the largest weight behind the first token, measured and as t / (e^m - 1)."""
    rows = []
    for each in m:
        found = masks.rollout([masks.attention(masks.decay(n, each), masks.causal(n))] * max(layers))
        for t in layers:
            row = found[t - 1][-1, ::-1][:-1]
            rows.append((each, t, int(row.argmax()), masks.decay_peak(t, each)))
    return pd.DataFrame(rows, columns=["m", "layers", "measured", "predicted"])


def item_mass(layers: Sequence[int] = (2, 4, 6)) -> pd.DataFrame:
    """Weight of the last token on the first, middle and last item of the paper's sequences, with equal scores."""
    kinds = {"no PE, causal": np.zeros((ITEMS, ITEMS)), "decay 0.8, causal": masks.decay(ITEMS, M)}
    rows = []
    for name, scores in kinds.items():
        found = masks.rollout([masks.attention(scores, masks.causal(ITEMS))] * max(layers))
        for t in layers:
            last = found[t - 1][-1]
            rows += [(name, t, place, last[2 * i] + last[2 * i + 1]) for place, i in (("first", 0), ("middle", 4), ("last", 7))]
    return pd.DataFrame(rows, columns=["attention", "layers", "item", "weight"])


@styled
def theory_figure(rates: pd.DataFrame, halves: pd.DataFrame, rows: pd.DataFrame, tops: pd.DataFrame) -> Figure:
    """Theorems 4.1, 4.2 and 4.5: dots are stacks of attention with equal scores, lines are predictions."""
    figure = new_figure(PAGE, 4.6)
    one, two, three, four = figure.subplots(2, 2).flat
    for index, (token, line) in enumerate(rates.groupby("token")):
        style = line_style(index)
        one.plot(line["layers"], line["weight"], **style | {"linestyle": "none"}, label=f"token {token}")
        one.plot(line["layers"], line["predicted"], color=style["color"], linewidth=0.8)
        one.plot(line["layers"], line["bound"], color=style["color"], linewidth=0.8, linestyle=":")
    one.set(yscale="log", ylim=(rates["weight"].min() / 3, 2), xlabel="layers", ylabel="weight in the last row")
    one.set_title("4.1 causal: rate log j (line), bound (dotted)")
    two.plot(halves["width"], halves["measured"], "o", color="black", label="measured")
    two.plot(halves["width"], halves["predicted"], label="2 (n - 1) / (w - 1)")
    two.set(xscale="log", yscale="log", xlabel="window width w", ylabel="layers to half on token 1", title="4.2 window")
    for axis, ticks in ((two.xaxis, halves["width"]), (two.yaxis, halves["measured"])):
        axis.set_ticks(list(ticks), [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    for index, (layers, line) in enumerate(rows.groupby("layers")):
        style, inner = line_style(index, of=rows["layers"].nunique()), line.iloc[:-1]
        three.plot(inner["distance"], inner["weight"], color=style["color"], linewidth=3, alpha=0.4)
        three.plot(inner["distance"], inner["predicted"], color=style["color"], linewidth=0.8, label=f"{layers} layers")
    three.set(xlim=(0, 130), xlabel="distance to the query", ylabel="weight", title="4.5 decay: negative binomial (thin)")
    for index, (m, line) in enumerate(tops.groupby("m")):
        four.plot(line["predicted"], line["measured"], **line_style(index) | {"linestyle": "none"}, label=f"m {m:.3g}")
    ends = [0, tops["predicted"].max()]
    four.plot(ends, ends, color="0.5", linewidth=0.8)
    four.set(xlabel="t / (e^m - 1)", ylabel="measured peak distance", title="4.5 decay: where the peak stands")
    for axes in (one, two, three, four):
        axes.legend()
    return figure
