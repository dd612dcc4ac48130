"""Behind RoPE without a trained model: what the causal mask does, by simulation and in the exact limit of
many dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import spearmanr

from posbench.errors import UserError
from posbench.model.lm import LM
from posbench.pipeline.config import Config
from posbench.plots.base import COLOURS, PAGE, new_figure, styled
from posbench.run.base import Run
from posbench.studies.base import Finding, Study
from posbench.theory import causal_mask as theory

Array = NDArray[np.float64]
LAYERS = 4
ALPHAS = (0.0, 0.2, 0.5, 0.8)
QUANTILES = (0.01, 0.99)  # of the finite entries: the paper's colour range
FACTS = (
    "score",
    "bias",
    "largest",
    "correlation",
    "rising",
    "rows",
    "beyond",
    "beyond_limit",
    "split_half",
    "rank",
)


@dataclass(frozen=True)
class Setting:
    """One row of a figure.

    Attributes:
        alpha: Cosine between inputs.
        rope: Whether queries and keys are rotated.
        mask: Whether attention is causal.
        norm: See :func:`posbench.theory.causal_mask.simulate`.
        normalised: Draw diagonal-normalised maps below the raw ones.
    """

    alpha: float
    rope: bool = False
    mask: bool = True
    norm: theory.Norm = "l2"
    normalised: bool = False

    @property
    def name(self) -> str:
        """Words for titles and files."""
        parts = [f"alpha {self.alpha:g}", "RoPE" if self.rope else "", "" if self.mask else "no mask"]
        return ", ".join(
            filter(
                None,
                [
                    *parts,
                    ""
                    if self.norm == "l2"
                    else f"LayerNorm / {'d' if self.norm == 'layernorm' else 'sqrt(d)'}",
                ],
            )
        )


FIGURES: dict[int, tuple[Setting, ...]] = {
    1: (),
    2: (Setting(0.0), Setting(0.2)),
    4: (Setting(0.0, rope=True, normalised=True),),
    6: (Setting(0.4), Setting(0.6), Setting(0.8)),
    7: tuple(Setting(alpha, norm=norm) for norm in ("layernorm_sqrt", "layernorm") for alpha in (0.0, 0.2)),
    9: (Setting(0.5, rope=True, normalised=True),),
    10: (Setting(0.0, rope=True, mask=False, normalised=True),),
}
"""Figures of the paper and what each one simulates. Figure 1 is exact and needs no simulation."""


@dataclass(frozen=True, kw_only=True)
class CausalMask(Study):
    """What the causal mask alone does to attention scores (Behind RoPE, Sections 3 to 5.1, Figures 1, 2, 4,
    6, 7, 9, 10).

    Attributes:
        show: Which of these figures; 1 is exact, and so are the closed forms that come with it.
        draws: Random inputs to average over (the paper: 100,000).
        tokens: Tokens n.
        dim: Dimensions d.
        seed: Seed of the draws.
        input_norm: Length of the inputs of the LayerNorm runs. ``unit``: 1, as the text says of all inputs;
            the first update then weighs sqrt(d) times the stream. ``sqrt_dim``: sqrt(d), with which LayerNorm
            and scores over d are the model of the L2 norm again.
    """

    needs_model: ClassVar[bool] = False

    show: tuple[int, ...] = tuple(FIGURES)
    draws: int = 10000
    tokens: int = 50
    dim: int = 64
    seed: int = 0
    input_norm: Literal["unit", "sqrt_dim"] = "unit"

    def check(self, config: Config, lm: LM | None) -> None:
        """Refuse figures that are none of these, and sizes at which nothing is left to see."""
        if not self.show or not set(self.show) <= set(FIGURES) or len(set(self.show)) < len(self.show):
            allowed = f"some of {', '.join(map(str, FIGURES))}, each once"
            raise UserError("study.show", list(self.show), allowed, "set study.show=[2,4]")
        for name, least, other in (("draws", 2, ""), ("tokens", 4, ""), ("dim", 2, "even, ")):
            value = getattr(self, name)
            if value < least or (other and value % 2):
                default = next(field.default for field in fields(self) if field.name == name)
                raise UserError(
                    f"study.{name}",
                    value,
                    f"a whole number, {other}from {least} up",
                    f"set study.{name}={default}",
                )

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables by what they hold.

        ``steps`` (Figure 1), ``closed_forms`` (Equation 4 beside the limit), ``lengths`` (g, h, h' and
        Appendix A.2), ``rising`` (rows of the limit that rise), ``last_rows``; ``scores`` (simulated means
        and standard errors) and ``facts`` (one row for each setting and layer; see :func:`facts`);
        ``layernorm`` (last row of layer 2, and the exact one with the L2 norm).
        """
        tables = exact_tables(self.tokens) if 1 in self.show else {}
        scores, rows, last = [], [], []
        plan = [(figure, setting) for figure in self.show for setting in FIGURES[figure]]
        with run.progress("simulation", len(plan)) as advance:
            for figure, setting in plan:
                mean, error, again = self.simulated(setting)
                scores.append(_long(figure, setting, mean, error))
                limit = exact(setting, self.tokens, self.dim, self.input_norm)
                rows.append(facts(mean, again, limit).assign(figure=figure, setting=setting.name))
                if setting.norm != "l2":
                    plain = theory.limit(self.tokens, 2, setting.alpha)[1]
                    both = {"score": mean[1, -1, :-1], "l2": plain[-1, :-1]}
                    last.append(
                        pd.DataFrame({"setting": setting.name, "key": np.arange(1, self.tokens), **both})
                    )
                advance(1)
        if plan:
            every = pd.concat(rows, ignore_index=True)
            tables |= {
                "scores": pd.concat(scores, ignore_index=True),
                "facts": every[["figure", "setting", "layer", *FACTS]],
            }
        if last:
            tables["layernorm"] = pd.concat(last, ignore_index=True)
        return tables

    def simulated(self, setting: Setting) -> tuple[Array, Array, Array]:
        """Mean scores and standard errors of all draws, and means of another half as many with other seeds,
        each [L, n, n]."""
        long = setting.norm != "l2" and self.input_norm == "sqrt_dim"
        given = {
            "n": self.tokens,
            "layers": LAYERS,
            "alpha": setting.alpha,
            "dim": self.dim,
            "mask": setting.mask,
            "rope": setting.rope,
            "norm": setting.norm,
            "input_norm": self.dim**0.5 if long else 1.0,
        }
        mean, error = theory.simulate(**given, draws=self.draws, seed=self.seed)
        again, _ = theory.simulate(**given, draws=max(self.draws // 2, 1), seed=self.seed + 1)
        return mean, error, again

    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """Each of the paper's figures by its number, and the closed forms."""
        drawn: dict[str, tuple[Figure, str]] = {}
        if "steps" in tables:
            drawn["figure_1"] = (
                first_figure(tables["steps"]),
                "Behind RoPE, Figure 1: from three inputs to the scores of layer 2.",
            )
            caption = "The closed forms over the position, and where the scores of the last query stop rising at alpha 0."
            drawn["closed_forms"] = forms_figure(tables["lengths"], tables["last_rows"]), caption
        for figure, frame in tables["scores"].groupby("figure", sort=False) if "scores" in tables else ():
            rows = []
            for setting in FIGURES[int(figure)]:
                scores = _stacked(frame[frame["setting"] == setting.name], self.tokens)
                rows.append((setting.name, scores))
                if setting.normalised:
                    rows.append((f"{setting.name}, normalised", theory.diagonal_normalised(scores)))
            words = "Mean scores before the softmax; the diagonal is left out. Normalised: each diagonal's mean subtracted."
            drawn[f"figure_{figure}"] = maps(rows), f"Behind RoPE, Figure {figure}. {words}"
        if "layernorm" in tables:
            length = "1" if self.input_norm == "unit" else "sqrt(d)"
            caption = "What the last query of layer 2 reads with LayerNorm in place of the L2 norm, over its largest score."
            drawn["layernorm"] = layernorm_figure(tables["layernorm"], length), caption
        return drawn

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """The paper's claims, as far as the figures shown bear on them."""
        found = _of_closed_forms(tables) if "steps" in tables else []
        if "facts" not in tables:
            return found
        rows = tables["facts"].set_index(["setting", "layer"])
        plain = [s.name for f in (2, 6) if f in self.show for s in FIGURES[f]]
        if plain:
            found.append(_of_simulation(rows.loc[plain]))
        if 7 in self.show:
            found += _of_layernorm(rows, limit=theory.limit(self.tokens, 2, 0.2)[1])
        if {4, 10} <= set(self.show):
            found.append(_of_rope(rows))
        return found


def _of_closed_forms(tables: Mapping[str, pd.DataFrame]) -> list[Finding]:
    """Section 3.2, Appendix A, and strict increase in the limit."""
    forms, lengths, rising = tables["closed_forms"], tables["lengths"].dropna(), tables["rising"]
    away = (forms["closed"] - forms["limit"]).abs().max()
    printed = (lengths["printed"] / lengths["step"] - 1).abs().max()
    corrected = (lengths["corrected"] - lengths["step"]).abs().max()
    still = int((lengths["step"] >= 0).sum())
    wrong = int((lengths["printed"] >= 0).sum())

    def rows(layers: Sequence[int], alphas: Sequence[float]) -> pd.DataFrame:
        return rising[rising["layer"].isin(layers) & rising["alpha"].isin(alphas)]

    second, later, mixed = rows([2], ALPHAS), rows([3, 4], [0.0]), rows([3, 4], ALPHAS[1:])
    falls = ", ".join(
        f"layer {row.layer}: {row.rising} of {row.rows}, last row from key {row.top} on"
        for row in later.itertuples()
    )
    return [
        Finding(
            claim="Behind RoPE, Equation 4: the score of layer 2 is g(i) / (h(i) h(j))",
            statistic="largest distance to the exact limit of many dimensions",
            value=away,
            n=len(forms),
            verdict="holds" if away < 1e-8 else "does not hold",
            note=f"alpha {', '.join(f'{a:g}' for a in ALPHAS)}; nine digits",
        ),
        Finding(
            claim="Behind RoPE, Section 3.2: in layer 2 the score rises strictly with the key",
            statistic="share of rows that rise in the limit",
            value=second["rising"].sum() / second["rows"].sum(),
            n=int(second["rows"].sum()),
            verdict="holds" if (second["rising"] == second["rows"]).all() else "does not hold",
        ),
        Finding(
            claim="Behind RoPE, Section 4.1: at alpha 0 layers 3 and 4 rise strictly too",
            statistic="share of rows that rise in the limit",
            value=later["rising"].sum() / later["rows"].sum(),
            n=int(later["rows"].sum()),
            verdict="holds" if (later["rising"] == later["rows"]).all() else "does not hold",
            note=f"rows that rise: {falls} it falls",
        ),
        Finding(
            claim="Behind RoPE, Section 4.1: at alpha above 0 layers 3 and 4 rise strictly too",
            statistic="share of rows that rise in the limit",
            value=mixed["rising"].sum() / mixed["rows"].sum(),
            n=int(mixed["rows"].sum()),
            verdict="holds" if (mixed["rising"] == mixed["rows"]).all() else "does not hold",
        ),
        Finding(
            claim="Behind RoPE, Appendix A.2: h'(i + 1)^2 - h'(i)^2 has the printed numerator",
            statistic="largest relative distance of the printed to the true difference",
            value=printed,
            n=len(lengths),
            verdict="holds" if printed < 1e-6 else "does not hold",
            note=f"the middle term has the wrong sign: {wrong} printed differences are not below 0; with a plus it is away "
            f"by {corrected:.0e} at most, and {still} true differences are not below 0: the conclusion stands",
        ),
    ]


def _of_simulation(rows: pd.DataFrame) -> Finding:
    rows = rows.dropna(subset=["correlation"])
    second = rows.xs(2, level="layer")
    # The mean of a bounded cosine lies below its limit by about one part in d.
    return Finding(
        claim="Behind RoPE, Section 4.1: the simulation shows what the derivation says",
        statistic="smallest correlation of simulated and exact scores below the diagonal, layers 2 to 4",
        value=rows["correlation"].min(),
        n=len(rows),
        verdict="holds" if rows["correlation"].min() > 0.9 else "does not hold",
        note="layer 2 minus its limit, mean: "
        + ", ".join(
            f"{name}: {row.bias:+.4f} ({row.bias / (row.score - row.bias):+.1%})"
            for name, row in second.iterrows()
        ),
    )


def _of_layernorm(rows: pd.DataFrame, limit: Array) -> list[Finding]:
    by_d, by_root = (
        rows.loc[[f"alpha {a:g}, LayerNorm / {by}" for a in (0.0, 0.2)]].query("layer > 1")
        for by in ("d", "sqrt(d)")
    )
    ours = limit[np.tril_indices(len(limit), -1)].mean()
    score = rows.loc[("alpha 0.2, LayerNorm / d", 2), "score"]
    return [
        Finding(
            claim="Behind RoPE, Appendix B: scores over d instead of sqrt(d) bring back the pattern of the L2 norm",
            statistic="rank correlation of score and key, mean over queries; smallest over alpha 0 and 0.2, layers 2 to 4",
            value=by_d["rank"].min(),
            n=len(by_d),
            verdict="holds" if by_d["rank"].min() > 0.9 else "does not hold",
            note=f"with sqrt(d): {by_root['rank'].min():.2f} to {by_root['rank'].max():.2f}; mean score of layer 2 at alpha "
            f"0.2 {score:.3f}, L2 {ours:.3f}: they agree for inputs of length sqrt(d) alone (study.input_norm)",
        )
    ]


def _of_rope(rows: pd.DataFrame) -> Finding:
    masked, free = (rows.loc[name].query("layer > 1") for name in ("alpha 0, RoPE", "alpha 0, RoPE, no mask"))
    listed = ", ".join(f"{value:.2f}" for value in masked["beyond_limit"])
    return Finding(
        claim="Behind RoPE, Section 5.1: with a causal mask RoPE's pattern depends on more than i - j, without it does not",
        statistic="correlation of two independent simulations' diagonal-normalised scores, smallest of layers 2 to 4; holds "
        "above 0.9 with the mask and below 0.3 without; few draws lower the former",
        value=masked["split_half"].min(),
        n=len(masked),
        verdict="holds"
        if masked["split_half"].min() > 0.9 and free["split_half"].max() < 0.3
        else "does not hold",
        note=f"without the mask {free['split_half'].max():.3f} at most; share of variance beyond i - j in the limit, layers 2 to "
        f"4: {listed}; without the mask below {max(free['beyond_limit'].max(), 1e-6):.0e}",
    )


def exact(setting: Setting, n: int, dim: int, input_norm: str = "unit") -> list[Array] | None:
    """The limit of a setting, a map for each layer; None where LayerNorm makes another model than the L2
    norm."""
    if setting.norm != "l2" and (setting.norm, input_norm) != ("layernorm", "sqrt_dim"):
        return None
    kernel = theory.rope_kernel(n, dim) if setting.rope else None
    return theory.limit(n, LAYERS, setting.alpha, mask=setting.mask, kernel=kernel)


def rising_rows(scores: Array) -> int:
    """Rows in which the score rises strictly with the key, up to the one before the query."""
    return sum(bool((np.diff(scores[i, :i]) > 0).all()) for i in range(2, len(scores)))


def beyond_distance(scores: Array) -> float:
    """Share of the variance below the diagonal that is left after each diagonal's mean is subtracted; 0 where
    all are equal."""
    lower = np.tril_indices(len(scores), -1)
    whole = ((scores[lower] - scores[lower].mean()) ** 2).sum()
    return float((theory.diagonal_normalised(scores)[lower] ** 2).sum() / whole) if whole > 1e-20 else 0.0


def facts(mean: Array, again: Array, limit: Sequence[Array] | None) -> pd.DataFrame:
    """What a simulation shows, layer by layer.

    Args:
        mean: Mean scores, [L, n, n].
        again: The same from other draws, for what noise alone would leave.
        limit: The exact maps; None where there are none.

    Returns:
        Rows of layer and, below the diagonal: score (mean), bias and largest (mean and largest distance to
        the limit), correlation (with the limit), rising and rows (rows of the limit that rise, of all with
        two keys), beyond and beyond_limit (share of variance beyond i - j), split_half (correlation of the
        diagonal-normalised maps of both simulations), rank (Spearman correlation of score and key, mean over
        queries).
    """
    n = mean.shape[1]
    lower, rows = np.tril_indices(n, -1), []
    for layer, scores in enumerate(mean):
        first, second = (theory.diagonal_normalised(x[layer])[lower] for x in (mean, again))
        rank = np.mean([spearmanr(scores[i, :i], np.arange(i)).statistic for i in range(2, n)])
        row = {
            "layer": layer + 1,
            "score": scores[lower].mean(),
            "beyond": beyond_distance(scores),
            "split_half": np.corrcoef(first, second)[0, 1],
            "rank": rank,
        }
        if limit is not None:
            away = scores[lower] - limit[layer][lower]
            varies = np.ptp(limit[layer][lower]) > 1e-9
            row |= {
                "bias": away.mean(),
                "largest": np.abs(away).max(),
                "rows": n - 2,
                "rising": rising_rows(limit[layer]),
                "correlation": np.corrcoef(scores[lower], limit[layer][lower])[0, 1] if varies else np.nan,
                "beyond_limit": beyond_distance(limit[layer]),
            }
        rows.append(row)
    return pd.DataFrame(rows, columns=["layer", *FACTS])


def exact_tables(n: int) -> dict[str, pd.DataFrame]:
    """What needs no simulation: the tables of :meth:`CausalMask.measure` but for ``scores`` and ``facts``."""
    first, second = theory.limit(3, 2, 0.0)
    weights = np.exp(np.where(np.tri(3, dtype=bool), first, -np.inf))
    weights /= weights.sum(1, keepdims=True)
    output = weights + np.eye(3)
    unit = output / np.linalg.norm(output, axis=1, keepdims=True)
    titles = (
        "(a) scores of layer 1",
        "(b) output: shares of inputs",
        "(c) at length 1",
        "(d) scores of layer 2",
    )
    three = np.tril_indices(3)
    steps = [
        pd.DataFrame({"step": title, "token": three[0] + 1, "other": three[1] + 1, "value": values[three]})
        for title, values in zip(titles, (first, output, unit, second), strict=True)
    ]
    i, lower = np.arange(1, n + 1), np.tril_indices(n, -1)
    forms, lengths, rising, last = [], [], [], []
    for alpha in ALPHAS:
        limit = theory.limit(n, LAYERS, alpha)
        closed = theory.scores_2(n, alpha)[lower]
        pairs = {"query": lower[0] + 1, "key": lower[1] + 1}
        forms.append(pd.DataFrame({"alpha": alpha, **pairs, "closed": closed, "limit": limit[1][lower]}))
        step = np.append(np.diff(theory.h_prime(i, alpha) ** 2), np.nan)
        ways = {
            "corrected": theory.h_prime_step(i, alpha),
            "printed": theory.h_prime_step(i, alpha, printed=True),
        }
        own = {
            "g": np.where(i > 1, theory.g(i, alpha), np.nan),
            "h": theory.h(i, alpha),
            "h_prime": theory.h_prime(i, alpha),
        }
        lengths.append(pd.DataFrame({"alpha": alpha, "token": i, **own, "step": step, **ways}))
        for layer, scores in enumerate(limit[1:], start=2):
            row = scores[-1, :-1]
            rising.append((alpha, layer, rising_rows(scores), n - 2, int(row.argmax()) + 1))
            last.append(pd.DataFrame({"alpha": alpha, "layer": layer, "key": i[:-1], "score": row}))
    return {
        "steps": pd.concat(steps, ignore_index=True),
        "closed_forms": pd.concat(forms, ignore_index=True),
        "lengths": pd.concat(lengths, ignore_index=True),
        "rising": pd.DataFrame(rising, columns=["alpha", "layer", "rising", "rows", "top"]),
        "last_rows": pd.concat(last, ignore_index=True),
    }


def _long(figure: int, setting: Setting, mean: Array, error: Array) -> pd.DataFrame:
    layer, i, j = np.nonzero(
        np.broadcast_to(np.tri(mean.shape[1], dtype=bool) if setting.mask else True, mean.shape)
    )
    values = {"score": mean[layer, i, j], "standard_error": error[layer, i, j]}
    return pd.DataFrame(
        {
            "figure": figure,
            "setting": setting.name,
            "layer": layer + 1,
            "query": i + 1,
            "key": j + 1,
            **values,
        }
    )


def _stacked(frame: pd.DataFrame, n: int) -> Array:
    """The maps of a long table, [L, n, n]; not a number where it has no row."""
    found = np.full((frame["layer"].max(), n, n), np.nan)
    found[frame["layer"] - 1, frame["query"] - 1, frame["key"] - 1] = frame["score"]
    return found


@styled
def maps(rows: Sequence[tuple[str, Array]], last: int | None = None) -> Figure:
    """Heat maps: a row per (name, [L, n, n]), a column per layer; each has its own colours; see
    :func:`draw_map`."""
    columns = max(len(scores) for _, scores in rows)
    figure = new_figure(PAGE, 1.75 * len(rows) + 0.1)
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, scores) in zip(grid, rows, strict=True):
        for layer, (axes, values) in enumerate(zip(line, scores, strict=True), start=1):
            draw_map(figure, axes, values, last)
            left = f"{name.replace(', ', chr(10))}\n\nquery" if layer == 1 else ""
            axes.set(title=f"layer {layer}", ylabel=left)
    return figure


def draw_map(figure: Figure, axes: Axes, values: Array, last: int | None = None) -> None:
    """One heat map of a query's score with every key but itself, with its own colours from the 1 % to the 99
    % quantile.

    Args:
        figure: Receives the colour bar.
        axes: Receives the map.
        values: [n, n], a cell for each token.
        last: Number of the last token, where a cell stands for several; they hold no token's score with
            itself.
    """
    n = len(values)
    # The diagonal is far above the rest and would hide it.
    shown = values if last else np.where(np.eye(n, dtype=bool), np.nan, values)
    low, high = np.nanquantile(shown, QUANTILES)
    image = axes.imshow(shown, cmap="viridis", vmin=low, vmax=high, interpolation="nearest")
    figure.colorbar(image, ax=axes, fraction=0.046, pad=0.04)
    axes.set(xlabel="key", ylabel="query")
    axes.set_xticks([0, n - 1], ["1", str(last or n)])
    axes.set_yticks([0, n - 1], ["1", str(last or n)])


@styled
def first_figure(steps: pd.DataFrame) -> Figure:
    """Behind RoPE, Figure 1: three tokens, alpha 0, from the inputs to the scores that layer 2 reads."""
    figure = new_figure(PAGE, 1.9)
    panels = list(steps.groupby("step", sort=False))
    for axes, (title, frame) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        shown = frame.pivot(index="token", columns="other", values="value").to_numpy()
        axes.imshow(shown, cmap="viridis", vmin=0, vmax=2)
        for i, j in zip(*np.nonzero(~np.isnan(shown)), strict=True):
            colour = "white" if shown[i, j] < 1.2 else "black"
            axes.text(j, i, f"{shown[i, j]:.3f}", ha="center", va="center", color=colour)
        axes.set(title=title, xticks=range(3), yticks=range(3), xlabel="key or input", ylabel="token")
        axes.set_xticklabels(["1", "2", "3"])
        axes.set_yticklabels(["1", "2", "3"])
    return figure


@styled
def forms_figure(lengths: pd.DataFrame, last: pd.DataFrame) -> Figure:
    """The closed forms g and h over the position, where rising stops at alpha 0, and the sign in Appendix
    A.2."""
    figure = new_figure(PAGE, 4.2)
    one, two, three, four = figure.subplots(2, 2).flat
    for colour, (alpha, line) in zip(COLOURS, lengths.groupby("alpha"), strict=False):
        one.plot(line["token"], line["g"], color=colour, label=f"alpha {alpha:g}")
        two.plot(line["token"], line["h"], color=colour)
        start = line[line["token"] <= 12]
        four.plot(start["token"], start["step"], color=colour)
        four.plot(start["token"], start["printed"], color=colour, linestyle=":")
    for colour, (layer, line) in zip(COLOURS, last[last["alpha"] == 0].groupby("layer"), strict=False):
        share = line["score"] / line["score"].max()
        three.plot(line["key"], share, color=colour, label=f"layer {layer}")
        three.plot(line["key"][share.idxmax()], 1, "o", color=colour)
    n = int(lengths["token"].max())
    one.set(xlabel="query i", ylabel="g(i)", title="score before normalising", ylim=(None, 5.2))
    two.set(xlabel="token i", ylabel="h(i)", title="length after layer 1")
    three.set(xlabel="key j", ylabel="score / largest", ylim=(0.9, 1.005))
    three.set_title(f"query {n}, alpha 0: the score falls behind the dot")
    four.axhline(0, color="0.5", linewidth=0.6)
    four.set(
        xlabel="token i", ylabel="h'(i + 1)² - h'(i)²", title="Appendix A.2: true (line), as printed (dotted)"
    )
    one.legend(ncols=2, loc="upper right")
    three.legend(loc="lower right")
    return figure


@styled
def layernorm_figure(table: pd.DataFrame, length: str) -> Figure:
    """The last row of layer 2 with LayerNorm, a panel per alpha, and with the L2 norm in the limit; inputs of
    that length."""
    figure = new_figure(PAGE, 2.0)
    parts = table.assign(
        alpha=table["setting"].str.split(", ").str[0], norm=table["setting"].str.split(", ").str[1]
    )
    panels = list(parts.groupby("alpha", sort=False))
    for axes, (alpha, frame) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for colour, (norm, line) in zip(COLOURS, frame.groupby("norm", sort=False), strict=False):
            axes.plot(line["key"], line["score"] / line["score"].max(), color=colour, label=str(norm))
        axes.plot(
            line["key"],
            line["l2"] / line["l2"].max(),
            color="black",
            linestyle=(0, (4, 2)),
            label="L2 norm, exact",
        )
        axes.set(xlabel="key", ylabel="score / largest", title=f"{alpha}, inputs of length {length}")
    axes.legend(loc="lower right")
    return figure
