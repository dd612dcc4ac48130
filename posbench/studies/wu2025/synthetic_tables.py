"""Tables and figures of the synthetic trainings: gaps, sinks, and the cells of Wu et al. 2025 beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from posbench import paths
from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.plots.base import COLOURS, PAGE, legend_below, new_figure, styled
from posbench.studies.wu2025.network import Attention
from posbench.studies.wu2025.sequences import Mixture, copying_gap
from posbench.studies.wu2025.training import PAIRS, Condition, pair_rows, sink_rows
from posbench.theory import masks

SETTINGS = ["vocabulary", "scale", "mask", "pe", "depth", "residual", "bias"]
"""Columns that tell conditions apart."""
GAP_COLUMNS = [
    *SETTINGS[:2],
    "std",
    *SETTINGS[2:],
    "seed",
    "iteration",
    "pair",
    "acc_ab",
    "acc_ba",
    "gap",
    "ci_low",
    "ci_high",
    "n",
    "train_loss",
    "train_accuracy",
    "novel_first",
    "novel_middle",
    "novel_last",
    "hardware",
]
PAIR_NAMES = [f"{a}-{b}" for a, b in PAIRS]
PE_WORDS = {"none": "no PE", "sin": "sin PE", "rope": "RoPE"}
HALF = copying_gap(Mixture(), 0.5, 0)
"""Gap of copying the first item's label in half of the sequences: 0.277."""
NEAR = 0.05
"""Largest difference to the paper's cell at which we say that it agrees: seeds spread by about 0.04 on biased
data."""
ZERO = 0.02
"""Gaps up to here count as none: three times the noise of 10,000 paired sequences."""
CHANCE = 0.9 * float(np.log(Mixture().labels))
"""Training loss in nats above which a network has learned nothing yet: within a tenth of guessing among 32
labels."""


def frames(measured: Sequence[tuple[Condition, Row]]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tables ``gaps`` and ``sinks`` from measured rows."""
    gaps = pd.DataFrame(
        [row for condition, each in measured for row in pair_rows(condition, each)], columns=GAP_COLUMNS
    )
    return gaps, pd.DataFrame([row for condition, each in measured for row in sink_rows(condition, each)])


def at_end(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of each condition at the iteration behind which most training stands, all seeds that reached it
    taken together.

    One seed that was trained a little longer than the others does not stand for all of them.
    """
    work = frame.groupby([*SETTINGS, "iteration"])["seed"].transform("nunique") * frame["iteration"]
    return frame[work == work.groupby([frame[name] for name in SETTINGS]).transform("max")]


def over_seeds(gaps: pd.DataFrame) -> pd.DataFrame:
    """Mean gap over the seeds of each condition, iteration and pair.

    Returns:
        Settings, iteration, pair, gap, ci_low, ci_high (95 %, of the test sequences, for these networks),
        seeds, spread (standard deviation over seeds; nan for one), novel_middle (mean accuracy on new classes
        asked for in the middle), train_loss, n.
    """
    rows = gaps.assign(variance=((gaps["ci_high"] - gaps["ci_low"]) / 2) ** 2)
    grouped = rows.groupby([*SETTINGS, "iteration", "pair"], sort=False)
    table = grouped.agg(
        gap=("gap", "mean"),
        variance=("variance", "sum"),
        seeds=("seed", "nunique"),
        spread=("gap", "std"),
        novel_middle=("novel_middle", "mean"),
        train_loss=("train_loss", "mean"),
        n=("n", "sum"),
    ).reset_index()
    half = np.sqrt(table["variance"]) / table["seeds"]
    return table.assign(ci_low=table["gap"] - half, ci_high=table["gap"] + half).drop(columns="variance")


def paper_cells(file: str) -> pd.DataFrame:
    """The paper's cells of one figure: figure, vocabulary, mask, pe, depth, residual, bias, pair, gap (column
    ``paper``).

    Raises:
        UserError: There is no such file, or it lacks a column.
    """
    path = paths.EXPERIMENTS / "reference" / file
    wanted = ["figure", "vocabulary", "mask", "pe", "depth", "residual", "bias", "pair", "gap"]
    table = pd.read_csv(path, keep_default_na=False) if path.is_file() else pd.DataFrame()
    if not set(wanted) <= set(table.columns):
        allowed = f"a CSV in {path.parent} with columns {', '.join(wanted)}"
        raise UserError("study.reference", file, allowed, "take wu2025_fig3.csv")
    return table[wanted].rename(columns={"gap": "paper"})


def beside_paper(gaps: pd.DataFrame, files: Sequence[str]) -> pd.DataFrame:
    """The paper's cells beside ours, at the iteration of :func:`at_end`.

    Returns:
        figure, settings, pair, paper, gap, ci_low, ci_high, iteration, seeds, spread, difference, verdict.
        The paper prints no intervals, so the verdict is ``agrees`` within `NEAR`, ``same sign`` where both
        are beyond `ZERO` on one side, else ``differs``; ``not learned`` where the training loss is above
        `CHANCE`. No rows where no cell's condition was trained.
    """
    cells = (
        pd.concat([paper_cells(file) for file in files])
        if files
        else pd.DataFrame(columns=["figure", *SETTINGS, "pair"])
    )
    columns = [
        "figure",
        *SETTINGS,
        "pair",
        "paper",
        "gap",
        "ci_low",
        "ci_high",
        "iteration",
        "seeds",
        "spread",
        "train_loss",
        "difference",
    ]
    if cells.empty or gaps.empty:
        return pd.DataFrame(columns=[*columns, "verdict"])
    keys = [c for c in [*SETTINGS, "pair"] if c != "scale"]
    both = cells.merge(over_seeds(at_end(gaps)), on=keys)
    both["difference"] = both["gap"] - both["paper"]
    near = both["difference"].abs() <= NEAR
    same = (both[["gap", "paper"]].abs().min(axis=1) > ZERO) & (
        np.sign(both["gap"]) == np.sign(both["paper"])
    )
    idle = both["train_loss"] > CHANCE
    both["verdict"] = np.select([idle, near, same], ["not learned", "agrees", "same sign"], "differs")
    return both[[*columns, "verdict"]].reset_index(drop=True)


# Figures


def label(row: Mapping[str, Any]) -> str:
    """A condition in words, without its bias."""
    mask = {"full": "no mask", "decay": "decay mask"}.get(str(row["mask"]), str(row["mask"]))
    words = [mask] if row["mask"] == "decay" and row["pe"] == "none" else [PE_WORDS[str(row["pe"])], mask]
    return "\n".join([*words, f"depth {row['depth']}", *([] if row["residual"] else ["no residual"])])


def figures(gaps: pd.DataFrame, sinks: pd.DataFrame, beside: pd.DataFrame) -> dict[str, tuple[Figure, str]]:
    """A figure of gaps for each vocabulary, scale, bias and kind of network, one of their course, and one of
    sinks."""
    out: dict[str, tuple[Figure, str]] = {}
    for (vocabulary, scale, bias, residual), rows in gaps.groupby(
        ["vocabulary", "scale", "bias", "residual"], sort=False
    ):
        name = "_".join(
            ["gaps", str(bias).replace("+", "_"), *([vocabulary] if vocabulary != "gaussian" else [])]
        )
        name += ("_residual" if residual else "") + ("_code_scale" if scale == "code" else "")
        same = (
            (beside["vocabulary"] == vocabulary)
            & (beside["scale"] == scale)
            & (beside["residual"] == residual)
        )
        chosen = beside[same & (beside["bias"] == bias)]
        what = f"{vocabulary} vocabulary, std {'1/sqrt(D)' if scale == 'paper' else '1/D'}, bias of the data: {bias}"
        caption = (
            f"Accuracy gaps [a, b] - [b, a] ({what}); above 0 the earlier item wins. Bars: mean over seeds; whiskers: 95 % over "
            "test sequences; dots: seeds; diamonds: the paper, 100,000 iterations. Dotted: copying by position alone, always one "
            "item or two in turn."
        )
        out[name] = (gaps_figure(rows, chosen), caption)
        if rows["iteration"].nunique() > 1:
            out[name.replace("gaps", "course")] = (
                course_figure(rows),
                f"The same gaps over the training ({what}).",
            )
    plain = sinks[(sinks["bias"] == "none") & (sinks["vocabulary"] == "gaussian") & (sinks["pe"] == "none")]
    plain = plain[~plain["residual"]]
    if not plain.empty:
        caption = (
            "After training without PE and residual connections: share of heads and sequences in which a token is a sink (mean "
            "weight above 0.3, Gu et al.), and of single weights above 0.2 (Wu et al.). Late tokens are seen by few queries."
        )
        out["sinks"] = (sinks_figure(plain), caption)
    return out


def _policies(axes: Axes) -> None:
    for level in (-2 * HALF, -HALF, 0, HALF, 2 * HALF):
        axes.axhline(level, color="0.6", linewidth=0.6, linestyle=":" if level else "-", zorder=0)


def _limits(*values: pd.Series) -> tuple[float, float]:
    """Limits of a symmetric axis that shows all values, and small ones as small."""
    top = max(0.15, *(1.15 * float(part.abs().max()) for part in values if len(part)))
    return -top, top


PER_ROW = 6
"""Conditions side by side."""


@styled
def gaps_figure(gaps: pd.DataFrame, beside: pd.DataFrame) -> Figure:
    """Gaps at the end, three bars for each condition; the paper's as diamonds."""
    last = at_end(gaps)
    mean = over_seeds(last)
    conditions = mean[SETTINGS].drop_duplicates().to_dict("records")
    lines = -(-len(conditions) // PER_ROW)
    figure = new_figure(PAGE, 0.5 + 2.0 * lines)
    panels = np.atleast_1d(figure.subplots(lines, 1))
    for line, axes in enumerate(panels):
        shown = conditions[line * PER_ROW : (line + 1) * PER_ROW]
        _policies(axes)
        ticks = []
        for place, condition in enumerate(shown):
            here = mean[(mean[SETTINGS] == pd.Series(condition)).all(axis=1)].set_index("pair")
            for index, pair in enumerate(PAIR_NAMES):
                x, at = place + 0.25 * (index - 1), here.loc[pair]
                axes.bar(
                    x,
                    at["gap"],
                    0.22,
                    color=COLOURS[index],
                    label=pair.replace("-", " - ") if not place else None,
                )
                axes.errorbar(
                    x,
                    at["gap"],
                    (at["ci_high"] - at["ci_low"]) / 2,
                    color="black",
                    linewidth=0.8,
                    capsize=1.5,
                )
                same = (last[SETTINGS] == pd.Series(condition)).all(axis=1) & (last["pair"] == pair)
                if at["seeds"] > 1:
                    axes.plot([x] * same.sum(), last.loc[same, "gap"], "o", color="black", markersize=1.8)
                cell = beside[
                    (beside[SETTINGS] == pd.Series(condition)).all(axis=1) & (beside["pair"] == pair)
                ]
                if len(cell):
                    axes.plot(
                        x,
                        cell["paper"].iloc[0],
                        "D",
                        color="black",
                        markerfacecolor="white",
                        markersize=4,
                        zorder=4,
                    )
            ticks.append(f"{label(condition)}\n{here['iteration'].iloc[0] / 1000:g}k its")
        axes.set_xticks(range(len(shown)), ticks)
        axes.set(
            xlim=(-0.6, max(len(shown), 3) - 0.4),
            ylim=_limits(last["gap"], beside["paper"]),
            ylabel="accuracy gap",
        )
    if len(beside):
        panels[0].plot([], [], "D", color="black", markerfacecolor="white", markersize=4, label="paper")
    legend_below(figure, panels[0])
    return figure


@styled
def course_figure(gaps: pd.DataFrame) -> Figure:
    """Gaps over the iterations, a panel per condition, a line per pair and seed."""
    conditions = gaps[SETTINGS].drop_duplicates().to_dict("records")
    columns = min(3, len(conditions))
    lines = -(-len(conditions) // columns)
    figure = new_figure(PAGE, 0.4 + 1.6 * lines)
    panels = np.atleast_1d(figure.subplots(lines, columns, sharey=True)).ravel()
    for axes, condition in zip(panels, conditions, strict=False):
        _policies(axes)
        here = gaps[(gaps[SETTINGS] == pd.Series(condition)).all(axis=1)]
        for index, pair in enumerate(PAIR_NAMES):
            for number, (_, line) in enumerate(
                here[here["pair"] == pair].sort_values("iteration").groupby("seed")
            ):
                axes.plot(
                    line["iteration"] / 1000,
                    line["gap"],
                    color=COLOURS[index],
                    marker="osD"[index],
                    markersize=2.2,
                    linewidth=0.9,
                    label=None if number else pair.replace("-", " - "),
                )
        axes.set(
            xlabel="iterations (thousands)",
            xlim=(0, None),
            ylim=_limits(gaps["gap"]),
            title=label(condition).replace("\n", ", "),
        )
    for axes in panels[len(conditions) :]:
        axes.set_visible(False)
    for axes in panels[::columns]:
        axes.set_ylabel("accuracy gap")
    legend_below(figure, panels[0])
    return figure


def uniform_sinks(mask: str, tokens: int) -> pd.DataFrame:
    """Both sink metrics of equal weights under a mask of the tables (``window 5``): what a metric shows
    without any training.

    Returns:
        by_entry and by_head by token (from 0).
    """
    kind, _, span = mask.partition(" ")
    network = Attention(mask=kind, **({kind: int(span)} if span else {}))  # type: ignore[arg-type]
    seen = network.seen(tokens)
    scores = masks.decay(tokens, network.decay) if kind == "decay" else np.zeros(seen.shape)
    weights = masks.attention(scores, seen)
    return pd.DataFrame(
        {"by_entry": masks.sink_by_entry(weights, seen), "by_head": masks.sink_by_head(np.tril(weights))}
    )


@styled
def sinks_figure(sinks: pd.DataFrame) -> Figure:
    """Both sink metrics per token at the end, a panel per condition; mean over seeds."""
    last = at_end(sinks)
    conditions = last[SETTINGS].drop_duplicates().to_dict("records")
    columns = min(3, len(conditions))
    lines = -(-len(conditions) // columns)
    figure = new_figure(PAGE, 0.4 + 1.5 * lines)
    panels = np.atleast_1d(figure.subplots(lines, columns)).ravel()
    for axes, condition in zip(panels, conditions, strict=False):
        here = (
            last[(last[SETTINGS] == pd.Series(condition)).all(axis=1)]
            .groupby("token")[["by_entry", "by_head"]]
            .mean()
        )
        tokens = here.index.to_numpy() + 1
        axes.bar(
            tokens - 0.2,
            100 * here["by_entry"],
            0.4,
            color=COLOURS[0],
            label="single weights > 0.2 (Wu et al.)",
        )
        axes.bar(
            tokens + 0.2,
            100 * here["by_head"],
            0.4,
            color=COLOURS[1],
            label="heads with mean > 0.3 (Gu et al.)",
        )
        level = uniform_sinks(condition["mask"], len(tokens))["by_entry"]
        scale = ", std 1/D" if condition["scale"] == "code" else ""
        axes.plot(
            tokens - 0.2, 100 * level, "_", color="black", markersize=5, label="Wu et al., equal weights"
        )
        axes.set(
            xlabel="token",
            title=f"{condition['mask']}, depth {condition['depth']}{scale}",
            xticks=tokens[::4],
        )
    for axes in panels[len(conditions) :]:
        axes.set_visible(False)
    for axes in panels[::columns]:
        axes.set_ylabel("sink (%)")
    legend_below(figure, panels[0])
    return figure
