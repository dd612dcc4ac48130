"""Behind RoPE without a trained model: Figures 1, 2, 4, 6, 7, 9 and 10 by simulation, beside the exact limit of many dimensions.

``make causal-mask``, or ``python -m posbench.studies.causal_mask --help``. The paper averages 100,000 draws (``--draws 100000``).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console

from posbench.plots import COLOURS, PAGE, line_style, new_figure, save, styled
from posbench.record import write_csv, write_text
from posbench.tables import markdown
from posbench.theory import causal_mask as theory

Array = NDArray[np.float64]
LAYERS = 4
QUANTILES = (0.01, 0.99)  # of the finite entries: the paper's colour range


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
            filter(None, [*parts, "" if self.norm == "l2" else f"LayerNorm / {'d' if self.norm == 'layernorm' else 'sqrt(d)'}"])
        )


FIGURES: dict[str, tuple[Setting, ...]] = {
    "2": (Setting(0.0), Setting(0.2)),
    "4": (Setting(0.0, rope=True, normalised=True),),
    "6": (Setting(0.4), Setting(0.6), Setting(0.8)),
    "7": tuple(Setting(alpha, norm=norm) for norm in ("layernorm_sqrt", "layernorm") for alpha in (0.0, 0.2)),
    "9": (Setting(0.5, rope=True, normalised=True),),
    "10": (Setting(0.0, rope=True, mask=False, normalised=True),),
}
"""Figures of the paper and what each one simulates. Figure 1 is exact and needs no simulation."""


def exact(setting: Setting, n: int, dim: int) -> list[Array] | None:
    """The limit of a setting; None for LayerNorm from inputs of length 1, which has none of its own."""
    if setting.norm != "l2":
        return None
    kernel = theory.rope_kernel(n, dim) if setting.rope else None
    return theory.limit(n, LAYERS, setting.alpha, mask=setting.mask, kernel=kernel)


def rising_rows(scores: Array) -> int:
    """Rows in which the score rises strictly with the key, up to the one before the query."""
    return sum(bool((np.diff(scores[i, :i]) > 0).all()) for i in range(2, len(scores)))


def facts(setting: Setting, n: int, dim: int, draws: int, mean: Array, again: Array) -> list[list[str]]:
    """Per layer: what the simulation shows and what the limit says, as text.

    Args:
        setting: The setting.
        n: Tokens.
        dim: Dimensions.
        draws: Random inputs of ``mean``.
        mean: Mean scores, [L, n, n].
        again: The same from other draws, for what noise alone would leave.
    """
    lower, limit, rows = np.tril_indices(n, -1), exact(setting, n, dim), []
    for layer in range(1, LAYERS):
        split = [theory.diagonal_normalised(x[layer])[lower] for x in (mean, again)]
        kept = np.corrcoef(split[0], split[1])[0, 1]
        if limit is None:
            away = strict = beyond = ""
        else:
            difference = mean[layer][lower] - limit[layer][lower]
            away = f"{difference.mean():+.4f} (largest {np.abs(difference).max():.4f})"
            strict = f"{rising_rows(limit[layer])} of {n - 2}"
            left = theory.diagonal_normalised(limit[layer])[lower]
            whole = limit[layer][lower] - limit[layer][lower].mean()
            # Equal scores everywhere have nothing to explain.
            beyond = f"{(left**2).sum() / (whole**2).sum():.2f}" if (whole**2).sum() > 1e-20 else "0"
        rows.append([setting.name, str(layer + 1), away, strict, beyond, f"{kept:.3f}"])
    return rows


@styled
def maps(rows: Sequence[tuple[str, Array]]) -> Figure:
    """Heat maps: a row per (name, [L, n, n]), a column per layer; each has its own colours, from its 1 % to its 99 % quantile."""
    columns = max(len(scores) for _, scores in rows)
    figure = new_figure(PAGE, 1.75 * len(rows) + 0.1)
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, scores) in zip(grid, rows, strict=True):
        for layer, (axes, values) in enumerate(zip(line, scores, strict=True), start=1):
            draw_map(figure, axes, values)
            left = f"{name.replace(', ', chr(10))}\n\nquery" if layer == 1 else ""
            axes.set(title=f"layer {layer}", ylabel=left)
    return figure


def draw_map(figure: Figure, axes: Axes, values: Array) -> None:
    """One heat map of a query's score with every key but itself, with its own colours from the 1 % to the 99 % quantile."""
    n = len(values)
    # The diagonal is far above the rest and would hide it.
    shown = np.where(np.eye(n, dtype=bool), np.nan, values)
    low, high = np.nanquantile(shown, QUANTILES)
    image = axes.imshow(shown, cmap="viridis", vmin=low, vmax=high, interpolation="nearest")
    figure.colorbar(image, ax=axes, fraction=0.046, pad=0.04)
    axes.set(xlabel="key", ylabel="query")
    axes.set_xticks([0, n - 1], ["1", str(n)])
    axes.set_yticks([0, n - 1], ["1", str(n)])


@styled
def first_figure() -> Figure:
    """Behind RoPE, Figure 1: three tokens, alpha 0, from the inputs to the scores that layer 2 reads."""
    n = 3
    first, second = theory.limit(n, 2, 0.0)
    weights = np.exp(np.where(np.tri(n, dtype=bool), first, -np.inf))
    weights /= weights.sum(1, keepdims=True)
    output = weights + np.eye(n)
    unit = output / np.linalg.norm(output, axis=1, keepdims=True)
    names = ("(a) scores of layer 1", "(b) output: shares of inputs", "(c) at length 1", "(d) scores of layer 2")
    steps = zip(names, (first, output, unit, second), strict=True)
    figure = new_figure(PAGE, 1.9)
    for axes, (title, values) in zip(figure.subplots(1, len(names)), steps, strict=True):
        shown = np.where(np.tri(n, dtype=bool), values, np.nan)
        axes.imshow(shown, cmap="viridis", vmin=0, vmax=2)
        for i in range(n):
            for j in range(i + 1):
                axes.text(j, i, f"{values[i, j]:.3f}", ha="center", va="center", color="white" if values[i, j] < 1.2 else "black")
        axes.set(title=title, xticks=range(n), yticks=range(n), xlabel="key or input", ylabel="token")
        axes.set_xticklabels(["1", "2", "3"])
        axes.set_yticklabels(["1", "2", "3"])
    return figure


@styled
def forms_figure(n: int, alphas: Sequence[float] = (0.0, 0.2, 0.5, 0.8)) -> Figure:
    """The closed forms g and h over the position, and row n of layers 2 to 4 in the limit: where rising stops at alpha 0."""
    figure = new_figure(PAGE, 2.4)
    left, middle, right = figure.subplots(1, 3)
    i = np.arange(1, n + 1)
    for number, alpha in enumerate(alphas):
        colour = line_style(number, of=len(alphas))["color"]
        left.plot(i[1:], theory.g(i[1:], alpha), label=f"alpha {alpha:g}", color=colour)
        middle.plot(i, theory.h(i, alpha), label=f"alpha {alpha:g}", color=colour)
    for layer, scores in enumerate(theory.limit(n, LAYERS, 0.0)[1:], start=2):
        row = scores[-1, :-1]
        right.plot(i[:-1], row / row.max(), label=f"layer {layer}", color=COLOURS[layer - 2])
    # Room for the legends above the lines.
    left.set(xlabel="query i", ylabel="g(i)", title="score before normalising", ylim=(0, 4.6))
    middle.set(xlabel="token i", ylabel="h(i)", title="length after layer 1", ylim=(1, 2.4))
    right.set(xlabel="key j", ylabel="score / largest", title=f"query {n}, alpha 0: rises, then falls", ylim=(0.4, 1.02))
    for axes in (left, middle):
        axes.legend(ncols=2, loc="upper center")
    right.legend()
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, draw, tabulate, and write everything to a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figures", nargs="*", choices=["1", *FIGURES], default=["1", *FIGURES])
    parser.add_argument("--draws", type=int, default=10000)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs/causal_mask"))
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    console, rows, frames = Console(), [], []
    if "1" in options.figures:
        save(first_figure(), options.out / "figure_1")
        save(forms_figure(options.tokens), options.out / "closed_forms")
    for figure in [f for f in options.figures if f != "1"]:
        drawn = []
        for setting in FIGURES[figure]:
            with console.status(f"figure {figure}: {setting.name}"):
                mean, error, again = simulated(setting, options)
            rows += [[figure, *line] for line in facts(setting, options.tokens, options.dim, options.draws, mean, again)]
            shown = np.where(np.tri(options.tokens, dtype=bool), mean, np.nan) if setting.mask else mean
            drawn.append((setting.name, shown))
            if setting.normalised:
                drawn.append((f"{setting.name}, normalised", theory.diagonal_normalised(mean)))
            frames.append(_long(figure, setting, mean, error))
        save(maps(drawn), options.out / f"figure_{figure}")
    header = (
        "figure",
        "setting",
        "layer",
        "simulation minus limit",
        "limit: rows that rise",
        "limit: beyond i - j",
        "split-half r",
    )
    text = f"""# The causal mask alone

Behind RoPE, {options.tokens} tokens, {options.dim} dimensions, {options.draws} draws (the paper: 50, 64, 100,000),
seed {options.seed}. Made by `make causal-mask`.

{markdown(header, rows)}

"Rows that rise": rows in which the score rises strictly with the key, of all rows with two keys or more. "Beyond i - j": share of
the variance below the diagonal that is left after each diagonal's mean is subtracted. "Split-half r": correlation of the
diagonal-normalised maps of two independent sets of draws; noise alone gives 0. LayerNorm rows start from inputs of length 1,
as the paper's do: the update then weighs sqrt(d) times the stream, which is another model than the one with unit norms.
"""
    write_text(options.out / "causal_mask.md", text)
    if frames:
        write_csv(options.out / "scores.csv", pd.concat(frames, ignore_index=True))
    console.print(text)
    console.print(f"written: {options.out}", soft_wrap=True)


def simulated(setting: Setting, options: argparse.Namespace) -> tuple[Array, Array, Array]:
    """Mean scores and standard errors of all draws, and of another half as many with other seeds."""
    given = {
        "n": options.tokens, "layers": LAYERS, "alpha": setting.alpha, "dim": options.dim, "mask": setting.mask,
        "rope": setting.rope, "norm": setting.norm,
    }  # fmt: skip
    mean, error = theory.simulate(**given, draws=options.draws, seed=options.seed)
    again, _ = theory.simulate(**given, draws=max(options.draws // 2, 1), seed=options.seed + 1)
    return mean, error, again


def _long(figure: str, setting: Setting, mean: Array, error: Array) -> pd.DataFrame:
    layer, i, j = np.nonzero(np.broadcast_to(np.tri(mean.shape[1], dtype=bool) if setting.mask else True, mean.shape))
    values = {"score": mean[layer, i, j], "standard_error": error[layer, i, j]}
    return pd.DataFrame({"figure": figure, "setting": setting.name, "layer": layer + 1, "query": i + 1, "key": j + 1, **values})


if __name__ == "__main__":
    main()
