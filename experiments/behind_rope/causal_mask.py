"""Behind RoPE without a trained model: the causal mask in simulation, and in the limit of many dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge, MinLen

from behind_rope import theory
from behind_rope.maps import (
    long_table,
    maps_figure,
    stack_maps,
    title_layers,
)
from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.late import Figure, pd
from posbench.measure.scores import diagonal_normalised
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.schema import Seed, Several
from posbench.stats.bootstrap import Array
from posbench.stats.correlation import spearman
from posbench.stats.findings import Finding
from posbench.studies.base import Study, Tables

PAPER = "Behind RoPE,"
LAYERS = 4
ALPHAS = (0.0, 0.2, 0.5, 0.8)
NORMS: dict[theory.Norm, str] = {
    "l2": "",
    "layernorm": "LayerNorm / d",
    "layernorm_sqrt": "LayerNorm / sqrt(d)",
}
"""Norms in words."""
FORM_TOLERANCE = 1e-8  # of a score in closed form against the exact limit
MIN_DRAWS = 1000
"""Draws below which a simulation contradicts nothing; the paper has 100,000."""
SIMULATION_CORRELATION = 0.9  # from which on a simulation reaches the limit
NO_CORRELATION = 0.3  # below which two simulations have nothing in common


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
        words = [f"alpha {self.alpha:g}"]
        if self.rope:
            words.append("RoPE")
        if not self.mask:
            words.append("no mask")
        if self.norm != "l2":
            words.append(NORMS[self.norm])
        return ", ".join(words)


FIGURES: dict[int, tuple[Setting, ...]] = {
    1: (),
    2: (Setting(0.0), Setting(0.2)),
    4: (Setting(0.0, rope=True),),
    6: (Setting(0.4), Setting(0.6), Setting(0.8)),
    7: (
        Setting(0.0, norm="layernorm_sqrt"),
        Setting(0.2, norm="layernorm_sqrt"),
        Setting(0.0, norm="layernorm"),
        Setting(0.2, norm="layernorm"),
    ),
    9: (Setting(0.5, rope=True),),
    10: (Setting(0.0, rope=True, mask=False),),
}
"""Settings that each figure of the paper simulates: none for Figure 1. With RoPE, normalised maps follow."""


@dataclass(frozen=True, kw_only=True)
class CausalMask(Study):
    """What the causal mask alone does to attention scores.

    Source: Behind RoPE, Sections 3 to 5.1, Figures 1, 2, 4, 6, 7, 9, 10. The paper counts layers from 1.

    Attributes:
        show: Which of these figures; 1 is exact, and so are the closed forms that come with it.
        draws: Random inputs to average over (the paper: 100,000).
        tokens: Tokens of an input.
        dim: Dimensions of an input.
        seed: Seed of the draws.
        input_norm: Length of the inputs of the LayerNorm runs, for which the text gives none. ``unit``: 1, as
            elsewhere in the paper; the first update then weighs sqrt(d) times the stream. ``sqrt_dim``:
            sqrt(d), with which LayerNorm and scores over d are the model of the L2 norm again.
    """

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False

    show: Annotated[tuple[Literal[1, 2, 4, 6, 7, 9, 10], ...], MinLen(1)] = (
        1,
        2,
        4,
        6,
        7,
        9,
        10,
    )
    draws: Several = 10000
    tokens: Annotated[int, Ge(4)] = 50
    dim: Several = 64
    seed: Seed = 0
    input_norm: Literal["unit", "sqrt_dim"] = "unit"

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        if len(set(self.show)) < len(self.show):
            hint = "set study.show=[2,4]"
            raise UserError("study.show", list(self.show), "each figure once", hint)
        if self.dim % 2:
            hint = f"set study.dim={self.dim + 1}"
            raise UserError("study.dim", self.dim, "an even number", hint)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Simulate the figures.

        Returns:
            ``scores`` (means and standard errors of the simulations) and ``facts``; with Figure 1
            :func:`exact_tables`; with Figure 7 ``layernorm`` (the second layer's last row, with the L2 norm
            too).
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
                mean, error, repeated_mean = self.simulated(setting)
                front = {"figure": figure, "setting": setting.name}
                scores = self._score_table(setting, mean, error)
                parts["scores"].append(pd.DataFrame({**front, **scores}))
                rows = compare_maps(mean, repeated_mean, self.limit(setting))
                parts["facts"].append(pd.DataFrame({**front, **rows, "n": self.draws}))
                if setting.norm != "l2":
                    parts["layernorm"].append(self._layernorm_table(setting, mean))
                advance(1)
        tables = exact_tables(self.tokens) if 1 in self.show else {}
        for name, frames in parts.items():
            if frames:
                tables[name] = pd.concat(frames, ignore_index=True)
        return tables

    def _score_table(self, setting: Setting, mean: Array, error: Array) -> pd.DataFrame:
        """Means and standard errors [L, n, n] as rows of layer, query, key, without masked entries."""
        if setting.mask:
            mean = np.where(np.tri(self.tokens, dtype=bool), mean, np.nan)
        maps = {
            layer: {"score": mean[layer], "standard_error": error[layer]}
            for layer in range(LAYERS)
        }
        return long_table("layer", maps, self.tokens)

    def _layernorm_table(self, setting: Setting, mean: Array) -> pd.DataFrame:
        """Scores of the second layer's last query, simulated with LayerNorm and exact with the L2 norm."""
        _, l2 = theory.limit_scores(self.tokens, 2, setting.alpha)
        columns = {
            "setting": setting.name,
            "key": np.arange(1, self.tokens),
            "score": mean[1, -1, :-1],
            "l2": l2[-1, :-1],
        }
        return pd.DataFrame(columns)

    def simulated(self, setting: Setting) -> tuple[Array, Array, Array]:
        """Mean scores, standard errors, and means of half the draws from another seed, each [L, n, n]."""
        mean, error = self._simulate(setting, self.draws, self.seed)
        repeated_mean, _ = self._simulate(setting, self.draws // 2, self.seed + 1)
        return mean, error, repeated_mean

    def _simulate(self, setting: Setting, draws: int, seed: int) -> tuple[Array, Array]:
        """Mean scores and standard errors, both [L, n, n]."""
        long_inputs = setting.norm != "l2" and self.input_norm == "sqrt_dim"
        return theory.simulate(
            self.tokens,
            LAYERS,
            setting.alpha,
            dim=self.dim,
            draws=draws,
            mask=setting.mask,
            rope=setting.rope,
            norm=setting.norm,
            input_norm=self.dim**0.5 if long_inputs else 1.0,
            seed=seed,
        )

    def limit(self, setting: Setting) -> list[Array] | None:
        """The exact map of each layer; None where LayerNorm makes another model than the L2 norm."""
        like_l2 = setting.norm == "layernorm" and self.input_norm == "sqrt_dim"
        if setting.norm != "l2" and not like_l2:
            return None
        kernel = theory.rope_kernel(self.tokens, self.dim) if setting.rope else None
        return theory.limit_scores(
            self.tokens, LAYERS, setting.alpha, mask=setting.mask, kernel=kernel
        )

    def figures(self, tables: Tables) -> Drawn:
        """Each of the paper's figures by its number, and the closed forms."""
        figures: dict[str, tuple[Figure, str]] = {}
        if "steps" in tables:
            caption = f"{PAPER} Figure 1: from three inputs to the scores of the second layer."
            figures["figure_1"] = (first_figure(tables["steps"]), caption)
            caption = "The closed forms, and where the scores of the last query stop rising at alpha 0."
            figure = forms_figure(tables["lengths"], tables["last_rows"])
            figures["closed_forms"] = (figure, caption)
        if "scores" in tables:
            for number, frame in tables["scores"].groupby("figure", sort=False):
                caption = (
                    f"{PAPER} Figure {number}. Mean scores before the softmax, no diagonal. "
                    "Normalised: each diagonal's mean subtracted."
                )
                figure = _scores_figure(FIGURES[int(number)], frame)
                figures[f"figure_{number}"] = (figure, caption)
        if "layernorm" in tables:
            caption = "LayerNorm for the L2 norm: scores of the second layer's last query, over the largest."
            length = "1" if self.input_norm == "unit" else "sqrt(d)"
            figure = layernorm_figure(tables["layernorm"], length)
            figures["layernorm"] = (figure, caption)
        return figures

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """The paper's claims, as far as the figures shown bear on them."""
        findings: list[Finding] = []
        if "steps" in tables:
            findings.append(_equation_4(tables["closed_forms"]))
            findings += _rising_scores(tables["rising"])
            findings.append(_appendix_a2(tables["lengths"].dropna()))
        if "facts" not in tables:
            return findings
        rows = tables["facts"].set_index(["setting", "layer"])
        simulated = list[Finding]()
        l2_figures = [figure for figure in (2, 6) if figure in self.show]
        settings = [s.name for figure in l2_figures for s in FIGURES[figure]]
        if settings:
            later = rows.loc[settings].dropna(subset=["correlation"])
            simulated.append(_section_4_1(later))
        if 7 in self.show:
            _, l2 = theory.limit_scores(self.tokens, 2, 0.2)
            simulated.append(_appendix_b(rows, l2))
        if 4 in self.show and 10 in self.show:
            simulated.append(_section_5_1(rows))
        if self.draws < MIN_DRAWS:
            # Noise lowers the correlations: it cannot confirm them.
            note = f"{self.draws} draws are too few to contradict it"
            simulated = [
                f.not_testable(note) if f.verdict == "contradicted" else f
                for f in simulated
            ]
        return [*findings, *simulated]


def _equation_4(forms: pd.DataFrame) -> Finding:
    """The closed form of the second layer's scores."""
    error = (forms["closed"] - forms["limit"]).abs().max()
    claim = f"{PAPER} Equation 4: the score of the second layer is g(i) / (h(i) h(j))"
    statistic = "largest distance to the exact limit of many dimensions"
    note = f"alpha {', '.join(f'{alpha:g}' for alpha in ALPHAS)}; nine digits"
    holds = error < FORM_TOLERANCE
    return Finding.that(holds, claim, statistic, (error, len(forms)), note)


def _rising_scores(rising: pd.DataFrame) -> list[Finding]:
    """Sections 3.2 and 4.1: scores rise strictly with the key, in the limit."""
    statistic = "share of rows that rise in the limit"
    findings = []
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
        maps = rising[rising["layer"].isin(layers) & rising["alpha"].isin(alphas)]
        falls = [
            f"layer {row.layer}: {row.rising} of {row.rows}, last row from key {row.top} on"
            for row in maps[maps["rising"] < maps["rows"]].itertuples()
        ]
        note = ""
        if falls:
            note = f"rows that rise: {', '.join(falls)} it falls"
        rows = maps["rows"].sum()
        share = maps["rising"].sum() / rows
        claim = f"{PAPER} Section {claim}"
        findings.append(Finding.that(not falls, claim, statistic, (share, rows), note))
    return findings


def _appendix_a2(lengths: pd.DataFrame) -> Finding:
    """The printed difference h'(i + 1)^2 - h'(i)^2 against the true one."""
    error = (lengths["printed"] / lengths["step"] - 1).abs().max()
    corrected_error = (lengths["corrected"] - lengths["step"]).abs().max()
    wrong = int((lengths["printed"] >= 0).sum())
    still_wrong = int((lengths["step"] >= 0).sum())
    claim = f"{PAPER} Appendix A.2: h'(i + 1)^2 - h'(i)^2 has the printed numerator"
    statistic = "largest relative distance of the printed to the true difference"
    note = (
        f"the middle term has the wrong sign: {wrong} printed differences are not below 0; with a plus it is "
        f"away by {corrected_error:.0e} at most, and {still_wrong} true ones are not below 0: "
        "the conclusion stands"
    )
    return Finding.that(error < 1e-6, claim, statistic, (error, len(lengths)), note)


def _section_4_1(rows: pd.DataFrame) -> Finding:
    """The simulation with the L2 norm against the limit."""
    # The mean of a bounded cosine lies below its limit by about one part in d.
    second = rows.xs(1, level="layer")
    limit = second["score"] - second["bias"]
    biases = [
        f"{name}: {bias:+.4f} ({bias / limit[name]:+.1%})"
        for name, bias in second["bias"].items()
    ]
    claim = f"{PAPER} Section 4.1: the simulation shows what the derivation says"
    statistic = "smallest correlation of simulated and exact scores below the diagonal, from the second layer on"
    note = f"second layer minus its limit, mean: {', '.join(biases)}"
    smallest = rows["correlation"].min()
    holds = smallest > SIMULATION_CORRELATION
    return Finding.that(holds, claim, statistic, (smallest, len(rows)), note)


def _appendix_b(rows: pd.DataFrame, l2: Array) -> Finding:
    """LayerNorm for the L2 norm; ``l2`` is the latter's map of the second layer at alpha 0.2, [n, n]."""
    names = {
        norm: [Setting(alpha, norm=norm).name for alpha in (0.0, 0.2)] for norm in NORMS
    }
    by_d = rows.loc[names["layernorm"]].query("layer > 0")["rank"]
    by_sqrt_d = rows.loc[names["layernorm_sqrt"]].query("layer > 0")["rank"]
    l2_score = l2[np.tril_indices(len(l2), -1)].mean()
    score = rows.loc[(names["layernorm"][1], 1), "score"]
    claim = f"{PAPER} Appendix B: scores over d, not sqrt(d), bring back the pattern of the L2 norm"
    statistic = "rank correlation of score and key, mean over queries; smallest over alpha and later layers"
    note = (
        f"with sqrt(d): {by_sqrt_d.min():.2f} to {by_sqrt_d.max():.2f}; mean score of the second layer at "
        f"alpha 0.2 {score:.3f}, L2 {l2_score:.3f}: they agree for inputs of length sqrt(d) (study.input_norm)"
    )
    smallest = by_d.min()
    return Finding.that(smallest > 0.9, claim, statistic, (smallest, len(by_d)), note)


def _section_5_1(rows: pd.DataFrame) -> Finding:
    """Whether RoPE's pattern depends on more than i - j, with the causal mask and without."""
    masked = rows.loc["alpha 0, RoPE"].query("layer > 0")
    unmasked = rows.loc["alpha 0, RoPE, no mask"].query("layer > 0")
    smallest = masked["split_half"].min()
    largest = unmasked["split_half"].max()
    shares = ", ".join(f"{share:.2f}" for share in masked["beyond_limit"])
    unmasked_share = max(unmasked["beyond_limit"].max(), 1e-6)
    claim = f"{PAPER} Section 5.1: RoPE's pattern depends on more than i - j with a causal mask, not without"
    statistic = (
        "correlation of two simulations' diagonal-normalised scores, smallest from the second layer on; "
        "holds above 0.9 with the mask and below 0.3 without; few draws lower the former"
    )
    note = (
        f"without the mask {largest:.3f} at most; share of variance beyond i - j in the limit, second layer "
        f"and on: {shares}; without the mask below {unmasked_share:.0e}"
    )
    holds = smallest > SIMULATION_CORRELATION and largest < NO_CORRELATION
    return Finding.that(holds, claim, statistic, (smallest, len(masked)), note)


def compare_maps(
    mean: Array, again: Array, limit: Sequence[Array] | None
) -> pd.DataFrame:
    """Compare simulated scores below the diagonal, layer by layer, with the limit and with a repetition.

    Args:
        mean: Mean scores, [L, n, n].
        again: Mean scores of other draws, [L, n, n].
        limit: Exact maps, [n, n] for each layer; None where there are none.

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
        normalised = diagonal_normalised(scores)[lower]
        repeated = diagonal_normalised(again[layer])[lower]
        ranks = [spearman(scores[i, :i], np.arange(i)) for i in range(2, n)]
        row: Row = {
            "layer": layer,
            "score": scores[lower].mean(),
            "beyond": theory.beyond_distance(scores),
            "split_half": np.corrcoef(normalised, repeated)[0, 1],
            "rank": np.mean(ranks),
            "bias": np.nan,
            "largest": np.nan,
            "correlation": np.nan,
            "rising": np.nan,
            "rows": np.nan,
            "beyond_limit": np.nan,
        }
        if limit is not None:
            exact = limit[layer]
            error = (scores - exact)[lower]
            row["bias"] = error.mean()
            row["largest"] = np.abs(error).max()
            row["rising"] = theory.rising_rows(exact)
            row["rows"] = n - 2
            row["beyond_limit"] = theory.beyond_distance(exact)
            if np.ptp(exact[lower]) > 1e-9:
                correlations = np.corrcoef(scores[lower], exact[lower])
                row["correlation"] = correlations[0, 1]
        rows.append(row)
    return pd.DataFrame(rows)


def exact_tables(n: int) -> dict[str, pd.DataFrame]:
    """Tables of the limit and of the closed forms, for n tokens.

    Returns:
        ``steps`` (Figure 1), ``closed_forms`` (Equation 4, the limit), ``lengths`` (g, h, h', Appendix A.2),
        ``last_rows``, ``rising`` (rows of the limit that rise, and the key of the last row's largest score).
    """
    token = np.arange(1, n + 1)
    query, key = np.tril_indices(n, -1)
    forms = []
    lengths = []
    last_rows = []
    rising = []
    for alpha in ALPHAS:
        limit = theory.limit_scores(n, LAYERS, alpha)
        form_columns = {
            "alpha": alpha,
            "query": query + 1,
            "key": key + 1,
            "closed": theory.second_layer_scores(n, alpha)[query, key],
            "limit": limit[1][query, key],
        }
        forms.append(pd.DataFrame(form_columns))
        h_prime = theory.h_prime(token, alpha)
        length_columns = {
            "alpha": alpha,
            "token": token,
            "g": np.where(token > 1, theory.g(token, alpha), np.nan),
            "h": theory.h(token, alpha),
            "h_prime": h_prime,
            "step": np.append(np.diff(h_prime**2), np.nan),
            "corrected": theory.h_prime_step(token, alpha),
            "printed": theory.h_prime_step(token, alpha, printed=True),
        }
        lengths.append(pd.DataFrame(length_columns))
        for layer in range(1, LAYERS):
            scores = limit[layer][-1, :-1]
            row_columns = {
                "alpha": alpha,
                "layer": layer,
                "key": token[:-1],
                "score": scores,
            }
            last_rows.append(pd.DataFrame(row_columns))
            rising_row = {
                "alpha": alpha,
                "layer": layer,
                "rising": theory.rising_rows(limit[layer]),
                "rows": n - 2,
                "top": int(scores.argmax()) + 1,
            }
            rising.append(rising_row)
    return {
        "steps": _first_steps(),
        "closed_forms": pd.concat(forms),
        "lengths": pd.concat(lengths),
        "last_rows": pd.concat(last_rows),
        "rising": pd.DataFrame(rising),
    }


def _first_steps() -> pd.DataFrame:
    """Figure 1: rows of step, token, other (key or input) and value, for three tokens at alpha 0."""
    causal = np.tri(3, dtype=bool)
    first, second = theory.limit_scores(3, 2, 0.0)
    weights = np.exp(np.where(causal, first, -np.inf))
    output = weights / weights.sum(1, keepdims=True) + np.eye(3)
    unit = output / np.linalg.norm(output, axis=1, keepdims=True)
    steps = {
        "(a) scores, first layer": first,
        "(b) output: shares of inputs": output,
        "(c) at length 1": unit,
        "(d) scores, second layer": second,
    }
    maps = {
        step: {"value": np.where(causal, values, np.nan)}
        for step, values in steps.items()
    }
    table = long_table("step", maps, 3)
    return table.rename(columns={"query": "token", "key": "other"})


def _scores_figure(settings: Sequence[Setting], table: pd.DataFrame) -> Figure:
    """Maps of each setting, and with RoPE normalised maps."""
    rows = []
    for setting in settings:
        scores = stack_maps(table[table["setting"] == setting.name], "score")
        rows.append((setting.name, title_layers(scores)))
        if setting.rope:
            normalised = diagonal_normalised(scores)
            rows.append((f"{setting.name}, normalised", title_layers(normalised)))
    return maps_figure(rows)


@plot.styled
def first_figure(steps: pd.DataFrame) -> Figure:
    """Behind RoPE, Figure 1: three tokens, alpha 0, from the inputs to the scores of the second layer."""
    count = steps["step"].nunique()
    figure, panels = plot.new_figure(plot.PAGE, 1.9, 1, count, n="exact")
    groups = steps.groupby("step", sort=False)
    for axes, (title, frame) in zip(panels, groups, strict=True):
        values = frame.pivot(index="token", columns="other", values="value").to_numpy()
        axes.imshow(values, cmap="viridis", vmin=0, vmax=2)
        for i, j in zip(*np.nonzero(~np.isnan(values)), strict=True):
            colour = "white" if values[i, j] < 1.2 else "black"
            text = f"{values[i, j]:.3f}"
            axes.text(j, i, text, ha="center", va="center", color=colour)
        axes.set(title=title, xlabel="key or input", ylabel="token")
        axes.set_xticks(range(3), ["1", "2", "3"])
        axes.set_yticks(range(3), ["1", "2", "3"])
    return figure


@plot.styled
def forms_figure(lengths: pd.DataFrame, last: pd.DataFrame) -> Figure:
    """The closed forms g and h, where rising stops at alpha 0, and the sign in Appendix A.2."""
    figure, grid = plot.new_figure(plot.PAGE, 4.2, 2, 2, n="exact")
    score_axes, length_axes, last_axes, step_axes = grid.flat
    alphas = lengths["alpha"].nunique()
    for index, (alpha, rows) in enumerate(lengths.groupby("alpha")):
        colour = plot.line_style(index, steps=alphas)["color"]
        score_axes.plot(
            rows["token"], rows["g"], color=colour, label=f"alpha {alpha:g}"
        )
        length_axes.plot(rows["token"], rows["h"], color=colour)
        start = rows[rows["token"] <= 12]
        step_axes.plot(start["token"], start["step"], color=colour)
        step_axes.plot(start["token"], start["printed"], color=colour, linestyle=":")
    layers = last["layer"].nunique()
    for index, (layer, rows) in enumerate(last[last["alpha"] == 0].groupby("layer")):
        colour = plot.line_style(index, steps=layers)["color"]
        share = rows["score"] / rows["score"].max()
        last_axes.plot(rows["key"], share, color=colour, label=f"layer {layer}")
        last_axes.plot(rows["key"][share.idxmax()], 1, "o", color=colour)
    score_axes.set(xlabel="query i (from 1)", ylabel="g(i)", ylim=(None, 5.2))
    score_axes.set_title("score before normalising")
    score_axes.legend(ncols=2, loc="upper right")
    length_axes.set(xlabel="token i (from 1)", ylabel="h(i)")
    length_axes.set_title("length after the first layer")
    n = lengths["token"].max()
    last_axes.set(xlabel="key j (from 1)", ylabel="score / largest", ylim=(0.9, 1.005))
    last_axes.set_title(f"query {n}, alpha 0: the score falls behind the dot")
    last_axes.legend(loc="lower right")
    step_axes.axhline(0, color=plot.GUIDE, linewidth=0.6)
    step_axes.set(xlabel="token i (from 1)", ylabel="h'(i + 1)² - h'(i)²")
    step_axes.set_title("Appendix A.2: true (line), as printed (dotted)")
    return figure


@plot.styled
def layernorm_figure(table: pd.DataFrame, length: str) -> Figure:
    """The last row of the second layer with LayerNorm and with the L2 norm, a panel for each alpha."""
    names = table["setting"].str.split(", ", expand=True)
    figure, panels = plot.new_figure(plot.PAGE, 2.0, 1, names[0].nunique())
    groups = table.assign(alpha=names[0], norm=names[1]).groupby("alpha", sort=False)
    for axes, (alpha, frame) in zip(panels, groups, strict=True):
        norms = frame.groupby("norm", sort=False)
        for colour, (norm, rows) in zip(plot.COLOURS, norms, strict=False):
            share = rows["score"] / rows["score"].max()
            axes.plot(rows["key"], share, color=colour, label=str(norm))
        axes.plot(
            rows["key"],
            rows["l2"] / rows["l2"].max(),
            color=plot.PAPER_COLOUR,
            linestyle=plot.DASHED,
            label="the paper's L2 norm, exact",
        )
        axes.set(xlabel="key (from 1)", ylabel="score / largest")
        axes.set_title(f"{alpha}, inputs of length {length}")
    axes.legend(loc="lower right")
    return figure
