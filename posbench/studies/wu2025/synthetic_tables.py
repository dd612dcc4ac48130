"""Tables and figures of the synthetic trainings: gaps, sinks, and the cells of Wu et al. 2025 with ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from posbench.errors import renamed
from posbench.files.atomic import Row
from posbench.late import Axes, Figure, pd
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.stats import reference
from posbench.stats.bootstrap import Z95, Estimate
from posbench.studies.wu2025.network import Attention
from posbench.studies.wu2025.sequences import Mixture, copying_gap
from posbench.studies.wu2025.training import PAIRS, Measured
from posbench.theory import masks

SETTINGS = ["vocabulary", "scale", "mask", "pe", "depth", "residual", "bias"]
"""Columns that tell conditions apart; the paper's cells have all but the scale."""
CELL = [*(name for name in SETTINGS if name != "scale"), "pair"]
PAIR_NAMES = [f"{a}-{b}" for a, b in PAIRS]
HALF = (
    copying_gap(Mixture()) * 0.5
)  # of copying the first item's label in half of the sequences: 0.277
NEAR = 0.05  # so near gaps are the same: seeds spread by about 0.04
TEST_SD = (
    0.0067  # of a gap over its 10,000 test sequences, measured on trained networks
)
PAPER_HALF = (
    Z95 * TEST_SD / 5**0.5
)  # of the 95 % interval of the paper's means of five trainings
CHANCE = 0.9 * float(np.log(Mixture().labels))
"""Training loss (nats) above which nothing is learned yet: within a tenth of guessing among 32 labels."""
PER_ROW = 6  # conditions next to each other in a figure of gaps


def tabulated(measured: Measured, files: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Tables ``gaps`` (by pair of items), ``sinks`` (by token, from 0) and :func:`paper_cells`."""
    gaps = list[Row]()
    sinks = list[Row]()
    kept = [
        "n",
        "train_loss",
        "train_accuracy",
        "novel_first",
        "novel_middle",
        "novel_last",
        "hardware",
    ]
    for condition, row in measured:
        where = condition.settings | {
            "seed": row["seed"],
            "iteration": row["iteration"],
        }
        for a, b in PAIRS:
            gap = row[f"gap_{a}_{b}"]
            half = Z95 * row[f"sd_{a}_{b}"]
            both = {
                "pair": f"{a}-{b}",
                "acc_ab": row[f"acc_{a}_{b}"],
                "acc_ba": row[f"acc_{b}_{a}"],
            }
            at = {"gap": gap, "ci_low": gap - half, "ci_high": gap + half}
            gaps.append(where | both | at | {name: row[name] for name in kept})
        for token, (head, entry) in enumerate(
            zip(row["sink_by_head"], row["sink_by_entry"], strict=True)
        ):
            sinks.append(
                where
                | {"n": row["n"], "token": token, "by_head": head, "by_entry": entry}
            )
    table = pd.DataFrame(gaps)
    return {
        "gaps": table,
        "sinks": pd.DataFrame(sinks),
        "paper_cells": paper_cells(table, files),
    }


def combined(*tables: pd.DataFrame) -> pd.DataFrame:
    """Rows of `tabulated` tables together: a training that is in several stands once, where it is longest."""
    key = [*SETTINGS, "seed"]
    rows = pd.concat(tables, keys=range(len(tables)), names=["table"]).reset_index(
        "table"
    )
    ends = rows.groupby([*key, "table"])["iteration"].transform("max")
    rows = rows[ends == ends.groupby([rows[name] for name in key]).transform("max")]
    rows = rows[rows["table"] == rows.groupby(key)["table"].transform("min")]
    return rows.drop(columns="table").sort_values(key, kind="stable", ignore_index=True)


def at_end(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows at the iteration with most training behind it: no single seed that is ahead speaks for all."""
    work = (
        frame.groupby([*SETTINGS, "iteration"])["seed"].transform("nunique")
        * frame["iteration"]
    )
    return frame[
        work == work.groupby([frame[name] for name in SETTINGS]).transform("max")
    ]


def over_seeds(gaps: pd.DataFrame) -> pd.DataFrame:
    """Mean over the seeds of each condition, iteration and pair; the interval is of the test sequences."""
    rows = gaps.assign(
        spread=gaps["gap"], variance=((gaps["ci_high"] - gaps["ci_low"]) / 2) ** 2
    )
    # accuracy on new classes, over the three items
    rows["novel"] = rows[["novel_first", "novel_middle", "novel_last"]].mean(axis=1)
    how = dict(
        gap="mean",
        variance="sum",
        seed="nunique",
        spread="std",
        train_loss="mean",
        n="sum",
    )
    how |= dict(train_accuracy="mean", novel="mean")
    table = (
        rows.groupby([*SETTINGS, "iteration", "pair"], sort=False)
        .agg(how)
        .reset_index()
    )
    half = np.sqrt(table.pop("variance")) / table["seed"]
    table = table.assign(ci_low=table["gap"] - half, ci_high=table["gap"] + half)
    return table.rename(columns={"seed": "seeds"})


def printed_cells(file: str) -> pd.DataFrame:
    """The paper's cells of one figure: figure, `CELL`, paper (the gap)."""
    with renamed("experiment.reference.file", "study.reference"):
        table = reference.table(file, "figure", *CELL, "gap")
    table = table.assign(residual=table["residual"] == "True").rename(
        columns={"gap": "paper"}
    )
    return table[["figure", *CELL, "paper"]].astype(
        {"figure": int, "depth": int, "paper": float}
    )


def paper_cells(gaps: pd.DataFrame, files: Sequence[str]) -> pd.DataFrame:
    """The paper's cells with ours :func:`at_end`, of the conditions that were trained.

    The verdict is that of :func:`posbench.stats.reference.agreement` with margin `NEAR`, or ``not learned``
    where the training loss is above `CHANCE`. A cell that was trained with both scales is ``counted`` once,
    with the paper's; ``near_zero`` are the paper's gaps with which a gap of 0 would agree.
    """
    ours = [
        "paper",
        "gap",
        "ci_low",
        "ci_high",
        "iteration",
        "seeds",
        "spread",
        "train_loss",
    ]
    ours += ["train_accuracy", "novel", "difference"]
    columns = ["figure", *SETTINGS, "pair", *ours, "counted", "near_zero", "verdict"]
    if not files:
        return pd.DataFrame(columns=columns)
    both = pd.concat(map(printed_cells, files)).merge(over_seeds(at_end(gaps)), on=CELL)
    both["difference"] = both["gap"] - both["paper"]
    own = both["scale"] == "paper"
    both["counted"] = own | ~own.groupby(
        [both[name] for name in ("figure", *CELL)]
    ).transform("any")
    both["near_zero"] = both["paper"].abs() <= NEAR
    both["verdict"] = [
        "not learned"
        if row.train_loss > CHANCE
        else reference.agreement(
            Estimate(row.gap, row.ci_low, row.ci_high, row.n),
            Estimate(row.paper, row.paper - PAPER_HALF, row.paper + PAPER_HALF, 5),
            NEAR,
        )
        for row in both.itertuples()
    ]
    return both[columns].reset_index(drop=True)


def causal_without_pe(rows: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are of a causal mask without PE at depth 2 with residual connections."""
    network = {
        "vocabulary": "gaussian",
        "mask": "causal",
        "pe": "none",
        "depth": 2,
        "residual": True,
    }
    return (rows[list(network)] == pd.Series(network)).all(axis=1)


def label(row: Mapping[str, Any], between: str = ", ") -> str:
    """A condition in words, without its bias and scale."""
    mask = {"full": "no mask", "decay": "decay mask"}.get(row["mask"], row["mask"])
    pe = {"none": "no PE", "sin": "sin PE", "rope": "RoPE"}[row["pe"]]
    words = [mask] if (row["mask"], row["pe"]) == ("decay", "none") else [pe, mask]
    return between.join(
        [*words, f"depth {row['depth']}", *([] if row["residual"] else ["no residual"])]
    )


def scaled(row: Mapping[str, Any]) -> str:
    """What to add to the label of a condition with the official code's scale."""
    return ", std 1/D" if row["scale"] == "code" else ""


def uniform_sinks(mask: str, tokens: int) -> pd.DataFrame:
    """Sink metrics by token of equal weights under a mask of the tables (``window 5``)."""
    kind, _, span = mask.partition(" ")
    network = Attention(mask=kind, **({kind: int(span)} if span else {}))  # type: ignore[arg-type]
    seen = network.seen(tokens)
    scores = (
        masks.decay(tokens, network.decay) if kind == "decay" else np.zeros(seen.shape)
    )
    weights = masks.attention(scores, seen)
    by_head = masks.sink_by_head(np.tril(weights))
    by_entry = masks.sink_by_entry(weights, seen)
    return pd.DataFrame(
        {"token": range(tokens), "by_entry": by_entry, "by_head": by_head}
    )


def figures(gaps: pd.DataFrame, sinks: pd.DataFrame, cells: pd.DataFrame) -> Drawn:
    """Gaps at the end and over the training, for each kind of data and network; sinks of plain networks."""
    out: dict[str, tuple[Figure, str]] = {}
    kinds = gaps.groupby(["vocabulary", "scale", "bias", "residual"], sort=False)
    for (vocabulary, scale, bias, residual), rows in kinds:
        parts = {
            vocabulary: vocabulary != "gaussian",
            "residual": residual,
            "code_scale": scale == "code",
        }
        name = "_".join(
            [bias.replace("+", "_"), *(part for part, there in parts.items() if there)]
        )
        std = "1/D" if scale == "code" else "1/sqrt(D)"
        what = f"{vocabulary} vocabulary, std {std}, bias of the data: {bias}"
        caption = (
            f"Accuracy gaps [a, b] - [b, a] ({what}); above 0 the earlier item wins. Bars: mean over seeds; "
            "whiskers: 95 % over test sequences; dots: seeds; the paper: after 100,000 iterations. "
            f"Dotted: copying by position alone, one item ({2 * HALF:.3f}) or two in turn ({HALF:.3f})."
        )
        out[f"gaps_{name}"] = gaps_figure(rows, cells), caption
        if rows["iteration"].nunique() > 1:
            caption = f"The same gaps over the training ({what})."
            out[f"curves_{name}"] = curves_figure(rows, cells), caption
    rows = gaps[causal_without_pe(gaps)]
    if rows["bias"].nunique() > 1:
        caption = "The causal mask without PE at depth 2, by bias and std of the data."
        out["causal_without_pe"] = curves_figure(rows, cells, by_data=True), caption
    plain = sinks[
        (sinks["bias"] == "none")
        & (sinks["vocabulary"] == "gaussian")
        & (sinks["pe"] == "none")
    ]
    plain = plain[~plain["residual"]]
    caption = "After training without PE and residual connections: share of heads and sequences in which a "
    caption += "token is a sink, and of single weights. Few queries see late tokens."
    return out if plain.empty else {**out, "sinks": (sinks_figure(plain), caption)}


def _policies(axes: Axes, top: float) -> None:
    """Gaps of copying by position, and an axis that shows small gaps as small."""
    for level in (-2 * HALF, -HALF, 0, HALF, 2 * HALF):
        axes.axhline(
            level,
            color=plot.GUIDE,
            linewidth=0.6,
            linestyle=":" if level else "-",
            zorder=0,
        )
    axes.set(
        ylim=(-max(0.15, 1.15 * top), max(0.15, 1.15 * top)), ylabel="accuracy gap"
    )


@plot.styled
def gaps_figure(gaps: pd.DataFrame, cells: pd.DataFrame) -> Figure:
    """Gaps at the end, three bars for each condition; the paper's as diamonds."""
    last = at_end(gaps)
    key = [*SETTINGS, "pair"]
    mean = over_seeds(last)
    printed = cells if len(cells) else mean.assign(paper=np.nan)
    mean = mean.merge(printed[[*key, "paper"]], "left", key)
    mean["place"] = mean.groupby(SETTINGS, sort=False).ngroup()
    seeds = last.merge(mean[mean["seeds"] > 1][[*key, "place"]], on=key)
    top = np.nanmax([*last["gap"].abs(), *mean["paper"].abs()])
    lines = 1 + mean["place"].max() // PER_ROW
    shape: dict[str, Any] = {"n": last["n"], "squeeze": False}
    figure, grid = plot.new_figure(plot.PAGE, 0.5 + 2.0 * lines, lines, **shape)
    for line, axes in enumerate(grid.flat):
        _policies(axes, top)
        for index, pair in enumerate(PAIR_NAMES):
            bars, dots = (
                f[(f["pair"] == pair) & (f["place"] // PER_ROW == line)]
                for f in (mean, seeds)
            )
            x, at = (f["place"] % PER_ROW + 0.25 * (index - 1) for f in (bars, dots))
            axes.bar(
                x,
                bars["gap"],
                0.22,
                color=plot.COLOURS[index],
                label=pair.replace("-", " - "),
            )
            half = (bars["ci_high"] - bars["ci_low"]) / 2
            axes.errorbar(
                x,
                bars["gap"],
                half,
                fmt="none",
                color="black",
                linewidth=0.8,
                capsize=1.5,
            )
            axes.plot(at, dots["gap"], "o", color="black", markersize=1.8)
            if bars["paper"].notna().any():
                axes.plot(x, bars["paper"], **plot.OPEN_DIAMOND)
        rows = bars.to_dict("records")
        ticks = [
            f"{label(row, chr(10))}\n{row['iteration'] / 1000:g}k its" for row in rows
        ]
        axes.set_xticks(range(len(ticks)), ticks)
        axes.set_xlim(-0.6, max(len(ticks), 3) - 0.4)
    plot.legend_below(figure)
    return figure


def _by_condition(
    frame: pd.DataFrame, draw: Callable[[Axes, Row, pd.DataFrame], None]
) -> Figure:
    """A panel for each condition, three in a row, drawn from its settings and rows."""
    groups = list(frame.groupby(SETTINGS, sort=False))
    figure, panels = plot.new_panels(len(groups), 3, 1.6, n=frame["n"])
    for number, (axes, (key, rows)) in enumerate(zip(panels, groups, strict=True)):
        draw(axes, dict(zip(SETTINGS, key, strict=True)), rows)
        if number % 3:
            axes.set_ylabel("")
            axes.tick_params(labelleft=False)
    plot.legend_below(figure)
    return figure


@plot.styled
def curves_figure(
    gaps: pd.DataFrame, cells: pd.DataFrame, by_data: bool = False
) -> Figure:
    """Gaps over the iterations, a line per pair and seed, the paper's at its end; a panel per condition.

    Its title is the network, or with ``by_data`` the data.
    """
    printed = gaps.merge(
        cells[[*SETTINGS, "pair", "paper"]], "left", [*SETTINGS, "pair"]
    )

    def draw(axes: Axes, condition: Row, rows: pd.DataFrame) -> None:
        _policies(axes, np.nanmax(printed[["gap", "paper"]].abs()))
        for (pair, seed), line in rows.sort_values("iteration").groupby(
            ["pair", "seed"]
        ):
            style = {
                **plot.line_style(PAIR_NAMES.index(pair)),
                "markersize": 2.2,
                "linewidth": 0.9,
            }
            name = pair.replace("-", " - ") if seed == rows["seed"].min() else None
            axes.plot(line["iteration"] / 1000, line["gap"], label=name, **style)
            if line["paper"].notna().any():
                own = plot.OPEN_DIAMOND | {
                    "markerfacecolor": style["color"],
                    "markeredgewidth": 0.7,
                }
                axes.plot([100], line["paper"].iloc[:1], clip_on=False, **own)
        title = f"bias: {condition['bias']}" + (scaled(condition) or ", std 1/sqrt(D)")
        title = title if by_data else label(condition)
        axes.set(
            xlabel="iterations (thousands)", xscale="log", xlim=(0.9, 115), title=title
        )
        axes.set_xticks([1, 10, 100], ["1", "10", "100"])

    return _by_condition(printed, draw)


@plot.styled
def sinks_figure(sinks: pd.DataFrame) -> Figure:
    """Both sink metrics per token at the end, a panel per condition; mean over seeds."""
    names = {
        "by_entry": "single weights > 0.2 (Wu et al.)",
        "by_head": "heads with mean > 0.3 (Gu et al.)",
    }

    def draw(axes: Axes, condition: Row, rows: pd.DataFrame) -> None:
        here = 100 * rows.groupby("token")[list(names)].mean()
        tokens = here.index.to_numpy()
        for index, (metric, words) in enumerate(names.items()):
            x = tokens - 0.2 + 0.4 * index
            axes.bar(x, here[metric], 0.4, color=plot.COLOURS[index], label=words)
        level = 100 * uniform_sinks(condition["mask"], len(tokens))["by_entry"]
        equal: dict[str, Any] = {
            "color": plot.PAPER,
            "markersize": 5,
            "label": "Wu et al., equal weights",
        }
        axes.plot(tokens - 0.2, level, "_", **equal)
        title = f"{condition['mask']}, depth {condition['depth']}{scaled(condition)}"
        axes.set(
            xlabel=plot.TOKEN,
            ylabel="sink (%)",
            title=title,
            xticks=tokens[::4],
            ylim=(0, 103),
        )

    return _by_condition(at_end(sinks), draw)
