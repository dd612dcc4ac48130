"""Behind RoPE without a trained model: the causal mask in simulation, and in the limit of many dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, MinLen

from posbench.errors import UserError
from posbench.late import Figure, pd
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.schema import Seed, Several
from posbench.stats.bootstrap import Array
from posbench.stats.correlation import spearman
from posbench.stats.findings import Finding
from posbench.studies.base import Study, Tables
from posbench.studies.behind_rope.maps import by_layer, long_table, maps_figure, stacked
from posbench.theory import causal_mask as theory

PAPER = "Behind RoPE,"
LAYERS = 4
ALPHAS = (0.0, 0.2, 0.5, 0.8)
NORMS = {
    "l2": "",
    "layernorm": "LayerNorm / d",
    "layernorm_sqrt": "LayerNorm / sqrt(d)",
}


@dataclass(frozen=True)
class Setting:
    """One row of a figure: arguments of :func:`theory.simulate`."""

    alpha: float
    rope: bool = False
    mask: bool = True
    norm: theory.Norm = "l2"

    @property
    def name(self) -> str:
        """Words for titles and files."""
        rope = "RoPE" if self.rope else ""
        mask = "" if self.mask else "no mask"
        return ", ".join(
            filter(None, [f"alpha {self.alpha:g}", rope, mask, NORMS[self.norm]])
        )


FIGURES: dict[int, tuple[Setting, ...]] = {
    1: (),
    2: (Setting(0.0), Setting(0.2)),
    4: (Setting(0.0, rope=True),),
    6: (Setting(0.4), Setting(0.6), Setting(0.8)),
    7: tuple(
        Setting(alpha, norm=norm)
        for norm in ("layernorm_sqrt", "layernorm")
        for alpha in (0.0, 0.2)
    ),
    9: (Setting(0.5, rope=True),),
    10: (Setting(0.0, rope=True, mask=False),),
}
"""Figures of the paper and what each simulates: nothing for Figure 1. With RoPE, normalised maps follow."""


@dataclass(frozen=True, kw_only=True)
class CausalMask(Study):
    """What the causal mask alone does to attention scores.

    Source: Behind RoPE, Sections 3 to 5.1, Figures 1, 2, 4, 6, 7, 9, 10. The paper counts layers from 1.

    ``input_norm`` is the length of the inputs of the LayerNorm runs. ``unit``: 1, as the text says of all
    inputs; the first update then weighs sqrt(d) times the stream. ``sqrt_dim``: sqrt(d), with which LayerNorm
    and scores over d are the model of the L2 norm again.
    """

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False

    # Which of these figures; 1 is exact, and so are the closed forms that come with it.
    show: Annotated[tuple[Literal[1, 2, 4, 6, 7, 9, 10], ...], MinLen(1)] = (
        1,
        2,
        4,
        6,
        7,
        9,
        10,
    )
    draws: Several = 10000  # random inputs to average over (the paper: 100,000)
    tokens: Annotated[int, Ge(4)] = 50
    dim: Several = 64
    seed: Seed = 0
    input_norm: Literal["unit", "sqrt_dim"] = "unit"

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        if len(set(self.show)) < len(self.show):
            raise UserError(
                "study.show",
                list(self.show),
                "each figure once",
                "set study.show=[2,4]",
            )
        if self.dim % 2:
            raise UserError(
                "study.dim", self.dim, "an even number", f"set study.dim={self.dim + 1}"
            )

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``scores`` (simulated means and standard errors) and ``facts``; with Figure 1
        :func:`exact_tables`; with Figure 7 ``layernorm`` (the second layer's last row, with the L2 norm too).
        """
        parts: dict[str, list[pd.DataFrame]] = {
            "scores": [],
            "facts": [],
            "layernorm": [],
        }
        plan = [
            (figure, setting) for figure in self.show for setting in FIGURES[figure]
        ]
        with run.progress("simulation", len(plan)) as advance:
            for figure, setting in plan:
                mean, error, again = self.simulated(setting)
                front = {"figure": figure, "setting": setting.name}
                seen = np.tri(self.tokens, dtype=bool) if setting.mask else True
                both = zip(np.where(seen, mean, np.nan), error, strict=True)
                maps = {
                    n: {"score": a, "standard_error": b}
                    for n, (a, b) in enumerate(both)
                }
                parts["scores"].append(
                    pd.DataFrame({**front, **long_table("layer", maps, self.tokens)})
                )
                told = facts(mean, again, self.limit(setting))
                parts["facts"].append(pd.DataFrame({**front, **told, "n": self.draws}))
                if setting.norm != "l2":
                    l2 = theory.limit(self.tokens, 2, setting.alpha)[1][-1, :-1]
                    last = {
                        "key": np.arange(1, self.tokens),
                        "score": mean[1, -1, :-1],
                        "l2": l2,
                    }
                    parts["layernorm"].append(
                        pd.DataFrame({"setting": setting.name, **last})
                    )
                advance(1)
        tables = exact_tables(self.tokens) if 1 in self.show else {}
        return tables | {
            name: pd.concat(each, ignore_index=True)
            for name, each in parts.items()
            if each
        }

    def simulated(self, setting: Setting) -> tuple[Array, Array, Array]:
        """Mean scores, standard errors, and means of half as many draws of another seed, each [L, n, n]."""
        length = (
            self.dim**0.5
            if setting.norm != "l2" and self.input_norm == "sqrt_dim"
            else 1.0
        )
        kind: dict[str, Any] = {
            **asdict(setting),
            "dim": self.dim,
            "input_norm": length,
        }
        simulate = partial(theory.simulate, self.tokens, LAYERS, **kind)
        mean, error = simulate(draws=self.draws, seed=self.seed)
        return mean, error, simulate(draws=self.draws // 2, seed=self.seed + 1)[0]

    def limit(self, setting: Setting) -> list[Array] | None:
        """The exact map of each layer; None where LayerNorm makes another model than the L2 norm."""
        if setting.norm != "l2" and (setting.norm, self.input_norm) != (
            "layernorm",
            "sqrt_dim",
        ):
            return None
        kernel = theory.rope_kernel(self.tokens, self.dim) if setting.rope else None
        return theory.limit(
            self.tokens, LAYERS, setting.alpha, mask=setting.mask, kernel=kernel
        )

    def figures(self, tables: Tables) -> Drawn:
        """Each of the paper's figures by its number, and the closed forms."""
        drawn: dict[str, tuple[Figure, str]] = {}
        if "steps" in tables:
            words = f"{PAPER} Figure 1: from three inputs to the scores of the second layer."
            drawn["figure_1"] = first_figure(tables["steps"]), words
            words = "The closed forms, and where the scores of the last query stop rising at alpha 0."
            drawn["closed_forms"] = (
                forms_figure(tables["lengths"], tables["last_rows"]),
                words,
            )
        words = "Mean scores before the softmax, no diagonal. Normalised: each diagonal's mean subtracted."
        for figure, frame in (
            tables["scores"].groupby("figure", sort=False) if "scores" in tables else ()
        ):
            rows = []
            for setting in FIGURES[int(figure)]:
                scores = stacked(frame[frame["setting"] == setting.name], "score")
                rows.append((setting.name, by_layer(scores)))
                if setting.rope:
                    rows.append(
                        (
                            f"{setting.name}, normalised",
                            by_layer(theory.diagonal_normalised(scores)),
                        )
                    )
            drawn[f"figure_{figure}"] = (
                maps_figure(rows),
                f"{PAPER} Figure {figure}. {words}",
            )
        if "layernorm" in tables:
            words = "LayerNorm for the L2 norm: scores of the second layer's last query, over the largest."
            length = "1" if self.input_norm == "unit" else "sqrt(d)"
            drawn["layernorm"] = layernorm_figure(tables["layernorm"], length), words
        return drawn

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """The paper's claims, as far as the figures shown bear on them."""
        found = _of_closed_forms(tables) if "steps" in tables else []
        if "facts" not in tables:
            return found
        rows = tables["facts"].set_index(["setting", "layer"])
        plain = [
            setting.name
            for figure in (2, 6)
            if figure in self.show
            for setting in FIGURES[figure]
        ]
        if plain:
            found.append(_of_simulation(rows.loc[plain].dropna(subset=["correlation"])))
        if 7 in self.show:
            found.append(_of_layernorm(rows, theory.limit(self.tokens, 2, 0.2)[1]))
        if {4, 10} <= set(self.show):
            found.append(_of_rope(rows))
        return found


def _of_closed_forms(tables: Tables) -> list[Finding]:
    """Section 3.2, Appendix A, and strict increase in the limit."""
    forms = tables["closed_forms"]
    lengths = tables["lengths"].dropna()
    rising = tables["rising"]
    away = (forms["closed"] - forms["limit"]).abs().max()
    claim = f"{PAPER} Equation 4: the score of the second layer is g(i) / (h(i) h(j))"
    note = f"alpha {', '.join(f'{alpha:g}' for alpha in ALPHAS)}; nine digits"
    size = "largest distance to the exact limit of many dimensions"
    found = [Finding.that(away < 1e-8, claim, size, (away, len(forms)), note)]
    for claim, layers, alphas in (
        ("3.2: the second layer's scores rise strictly with the key", [1], ALPHAS),
        (
            "4.1: at alpha 0 those of the third and fourth rise strictly too",
            [2, 3],
            [0.0],
        ),
        (
            "4.1: at alpha above 0 those of the third and fourth rise strictly too",
            [2, 3],
            ALPHAS[1:],
        ),
    ):
        rows = rising[rising["layer"].isin(layers) & rising["alpha"].isin(alphas)]
        falling = rows[rows["rising"] < rows["rows"]].itertuples()
        falls = [
            f"layer {r.layer}: {r.rising} of {r.rows}, last row from key {r.top} on"
            for r in falling
        ]
        note = f"rows that rise: {', '.join(falls)} it falls" if falls else ""
        at = rows["rising"].sum() / rows["rows"].sum(), rows["rows"].sum()
        size = "share of rows that rise in the limit"
        found.append(
            Finding.that(not falls, f"{PAPER} Section {claim}", size, at, note)
        )
    printed = (lengths["printed"] / lengths["step"] - 1).abs().max()
    corrected = (lengths["corrected"] - lengths["step"]).abs().max()
    still, wrong = (int((lengths[name] >= 0).sum()) for name in ("step", "printed"))
    claim = f"{PAPER} Appendix A.2: h'(i + 1)^2 - h'(i)^2 has the printed numerator"
    size = "largest relative distance of the printed to the true difference"
    note = f"the middle term has the wrong sign: {wrong} printed differences are not below 0; with a plus it is "
    note += f"away by {corrected:.0e} at most, and {still} true ones are not below 0: the conclusion stands"
    return [
        *found,
        Finding.that(printed < 1e-6, claim, size, (printed, len(lengths)), note),
    ]


def _of_simulation(rows: pd.DataFrame) -> Finding:
    """Section 4.1."""
    # The mean of a bounded cosine lies below its limit by about one part in d.
    second = rows.xs(1, level="layer").assign(
        limit=lambda each: each["score"] - each["bias"]
    )
    told = [
        f"{name}: {row.bias:+.4f} ({row.bias / row.limit:+.1%})"
        for name, row in second.iterrows()
    ]
    claim = f"{PAPER} Section 4.1: the simulation shows what the derivation says"
    size = "smallest correlation of simulated and exact scores below the diagonal, from the second layer on"
    note = f"second layer minus its limit, mean: {', '.join(told)}"
    least = rows["correlation"].min()
    return Finding.that(least > 0.9, claim, size, (least, len(rows)), note)


def _of_layernorm(rows: pd.DataFrame, limit: Array) -> Finding:
    """Appendix B."""
    names = {
        by: [f"alpha {alpha:g}, {NORMS[by]}" for alpha in (0.0, 0.2)] for by in NORMS
    }
    by_d, by_root = (
        rows.loc[names[by]].query("layer > 0")["rank"]
        for by in ("layernorm", "layernorm_sqrt")
    )
    l2 = limit[np.tril_indices(len(limit), -1)].mean()
    score = rows.loc[(names["layernorm"][1], 1), "score"]
    claim = f"{PAPER} Appendix B: scores over d, not sqrt(d), bring back the pattern of the L2 norm"
    size = "rank correlation of score and key, mean over queries; smallest over alpha and later layers"
    note = f"with sqrt(d): {by_root.min():.2f} to {by_root.max():.2f}; mean score of the second layer at "
    note += f"alpha 0.2 {score:.3f}, L2 {l2:.3f}: they agree for inputs of length sqrt(d) (study.input_norm)"
    return Finding.that(by_d.min() > 0.9, claim, size, (by_d.min(), len(by_d)), note)


def _of_rope(rows: pd.DataFrame) -> Finding:
    """Section 5.1."""
    masked, free = (
        rows.loc[name].query("layer > 0")
        for name in ("alpha 0, RoPE", "alpha 0, RoPE, no mask")
    )
    least = masked["split_half"].min()
    most = free["split_half"].max()
    listed = ", ".join(f"{value:.2f}" for value in masked["beyond_limit"])
    claim = f"{PAPER} Section 5.1: RoPE's pattern depends on more than i - j with a causal mask, not without"
    size = "correlation of two simulations' diagonal-normalised scores, smallest from the second layer on; "
    size += "holds above 0.9 with the mask and below 0.3 without; few draws lower the former"
    note = f"without the mask {most:.3f} at most; share of variance beyond i - j in the limit, second layer "
    note += f"and on: {listed}; without the mask below {max(free['beyond_limit'].max(), 1e-6):.0e}"
    return Finding.that(
        least > 0.9 and most < 0.3, claim, size, (least, len(masked)), note
    )


def facts(mean: Array, again: Array, limit: Sequence[Array] | None) -> pd.DataFrame:
    """What mean scores [L, n, n], those of other draws, and the exact maps show by layer, below the diagonal.

    Returns:
        Rows of layer, score (mean), bias and largest (mean and largest distance to the limit), correlation
        (with it), rising and rows (its rows that rise, of all with two keys), beyond and beyond_limit (share
        of variance beyond i - j), split_half (correlation of both diagonal-normalised maps), rank (Spearman
        correlation of score and key, mean over queries).
    """
    n = mean.shape[1]
    lower = np.tril_indices(n, -1)
    rows = []
    for layer, scores in enumerate(mean):
        one, other = (
            theory.diagonal_normalised(x[layer])[lower] for x in (mean, again)
        )
        row = {
            "layer": layer,
            "score": scores[lower].mean(),
            "beyond": theory.beyond_distance(scores),
        }
        row["split_half"] = np.corrcoef(one, other)[0, 1]
        row["rank"] = np.mean(
            [spearman(scores[i, :i], np.arange(i)) for i in range(2, n)]
        )
        row |= dict.fromkeys(
            ("bias", "largest", "correlation", "rising", "rows", "beyond_limit"), np.nan
        )
        if limit is not None:
            true = limit[layer]
            away = (scores - limit[layer])[lower]
            row |= {"bias": away.mean(), "largest": np.abs(away).max()}
            row |= {"rows": n - 2, "rising": theory.rising_rows(true)}
            row["beyond_limit"] = theory.beyond_distance(true)
            if np.ptp(true[lower]) > 1e-9:
                row["correlation"] = np.corrcoef(scores[lower], true[lower])[0, 1]
        rows.append(row)
    return pd.DataFrame(rows)


def exact_tables(n: int) -> dict[str, pd.DataFrame]:
    """``steps`` (Figure 1), ``closed_forms`` (Equation 4, the limit), ``lengths`` (g, h, h', Appendix A.2),
    ``rising`` (rows of the limit that rise, and the key of the last row's largest score), ``last_rows``.
    """
    i, (query, key) = np.arange(1, n + 1), np.tril_indices(n, -1)
    forms = []
    lengths = []
    rising = []
    last = []
    for alpha in ALPHAS:
        limit = theory.limit(n, LAYERS, alpha)
        places = {"alpha": alpha, "query": query + 1, "key": key + 1}
        both = {
            "closed": theory.scores_2(n, alpha)[query, key],
            "limit": limit[1][query, key],
        }
        forms.append(pd.DataFrame(places | both))
        own = {
            "g": np.where(i > 1, theory.g(i, alpha), np.nan),
            "h": theory.h(i, alpha),
        }
        own["h_prime"] = theory.h_prime(i, alpha)
        own["step"] = np.append(np.diff(own["h_prime"] ** 2), np.nan)
        own["corrected"] = theory.h_prime_step(i, alpha)
        own["printed"] = theory.h_prime_step(i, alpha, printed=True)
        lengths.append(pd.DataFrame({"alpha": alpha, "token": i, **own}))
        for layer in range(1, LAYERS):
            row = limit[layer][-1, :-1]
            rising.append(
                (
                    alpha,
                    layer,
                    theory.rising_rows(limit[layer]),
                    n - 2,
                    int(row.argmax()) + 1,
                )
            )
            last.append(
                pd.DataFrame(
                    {"alpha": alpha, "layer": layer, "key": i[:-1], "score": row}
                )
            )
    first, second = theory.limit(3, 2, 0.0)
    weights = np.exp(np.where(np.tri(3, dtype=bool), first, -np.inf))
    output = weights / weights.sum(1, keepdims=True) + np.eye(3)
    drawn = {"(a) scores, first layer": first, "(b) output: shares of inputs": output}
    drawn["(c) at length 1"] = output / np.linalg.norm(output, axis=1, keepdims=True)
    drawn["(d) scores, second layer"] = second
    steps = {
        step: {"value": np.where(np.tri(3, dtype=bool), each, np.nan)}
        for step, each in drawn.items()
    }
    found = {
        "steps": long_table("step", steps, 3).rename(
            columns={"query": "token", "key": "other"}
        )
    }
    found |= {
        "closed_forms": pd.concat(forms),
        "lengths": pd.concat(lengths),
        "last_rows": pd.concat(last),
    }
    return found | {
        "rising": pd.DataFrame(
            rising, columns=["alpha", "layer", "rising", "rows", "top"]
        )
    }


@plot.styled
def first_figure(steps: pd.DataFrame) -> Figure:
    """Behind RoPE, Figure 1: three tokens, alpha 0, from the inputs to the scores of the second layer."""
    figure, panels = plot.new_figure(
        plot.PAGE, 1.9, 1, steps["step"].nunique(), n="exact"
    )
    for axes, (title, frame) in zip(
        panels, steps.groupby("step", sort=False), strict=True
    ):
        shown = frame.pivot(index="token", columns="other", values="value").to_numpy()
        axes.imshow(shown, cmap="viridis", vmin=0, vmax=2)
        for i, j in zip(*np.nonzero(~np.isnan(shown)), strict=True):
            colour = "white" if shown[i, j] < 1.2 else "black"
            axes.text(
                j, i, f"{shown[i, j]:.3f}", ha="center", va="center", color=colour
            )
        axes.set(title=title, xlabel="key or input", ylabel="token")
        for place in (axes.set_xticks, axes.set_yticks):
            place(range(3), ["1", "2", "3"])
    return figure


@plot.styled
def forms_figure(lengths: pd.DataFrame, last: pd.DataFrame) -> Figure:
    """The closed forms g and h, where rising stops at alpha 0, and the sign in Appendix A.2."""
    figure, ((one, two), (three, four)) = plot.new_figure(
        plot.PAGE, 4.2, 2, 2, n="exact"
    )
    for index, (alpha, line) in enumerate(lengths.groupby("alpha")):
        colour = plot.line_style(index, of=lengths["alpha"].nunique())["color"]
        one.plot(line["token"], line["g"], color=colour, label=f"alpha {alpha:g}")
        two.plot(line["token"], line["h"], color=colour)
        start = line[line["token"] <= 12]
        four.plot(start["token"], start["step"], color=colour)
        four.plot(start["token"], start["printed"], color=colour, linestyle=":")
    for index, (layer, line) in enumerate(last[last["alpha"] == 0].groupby("layer")):
        colour = plot.line_style(index, of=last["layer"].nunique())["color"]
        share = line["score"] / line["score"].max()
        three.plot(line["key"], share, color=colour, label=f"layer {layer}")
        three.plot(line["key"][share.idxmax()], 1, "o", color=colour)
    one.set(
        xlabel="query i (from 1)",
        ylabel="g(i)",
        title="score before normalising",
        ylim=(None, 5.2),
    )
    two.set(
        xlabel="token i (from 1)", ylabel="h(i)", title="length after the first layer"
    )
    three.set(xlabel="key j (from 1)", ylabel="score / largest", ylim=(0.9, 1.005))
    three.set_title(
        f"query {lengths['token'].max()}, alpha 0: the score falls behind the dot"
    )
    four.axhline(0, color=plot.GUIDE, linewidth=0.6)
    four.set(xlabel="token i (from 1)", ylabel="h'(i + 1)² - h'(i)²")
    four.set_title("Appendix A.2: true (line), as printed (dotted)")
    one.legend(ncols=2, loc="upper right")
    three.legend(loc="lower right")
    return figure


@plot.styled
def layernorm_figure(table: pd.DataFrame, length: str) -> Figure:
    """The last row of the second layer with LayerNorm and with the L2 norm, a panel for each alpha."""
    parts = table["setting"].str.split(", ", expand=True)
    figure, panels = plot.new_figure(plot.PAGE, 2.0, 1, parts[0].nunique())
    groups = table.assign(alpha=parts[0], norm=parts[1]).groupby("alpha", sort=False)
    for axes, (alpha, frame) in zip(panels, groups, strict=True):
        for colour, (norm, line) in zip(
            plot.COLOURS, frame.groupby("norm", sort=False), strict=False
        ):
            axes.plot(
                line["key"],
                line["score"] / line["score"].max(),
                color=colour,
                label=str(norm),
            )
        exact = {
            "color": plot.PAPER,
            "linestyle": plot.DASHED,
            "label": "the paper's L2 norm, exact",
        }
        axes.plot(line["key"], line["l2"] / line["l2"].max(), **exact)
        axes.set(
            xlabel="key (from 1)",
            ylabel="score / largest",
            title=f"{alpha}, inputs of length {length}",
        )
    axes.legend(loc="lower right")
    return figure
