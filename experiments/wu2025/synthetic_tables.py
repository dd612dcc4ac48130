"""Tables and figures of the synthetic trainings: gaps, sinks, and the cells of Wu et al. 2025 with ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import scipy

from posbench.errors import UserError, renamed
from posbench.files.atomic import Row
from posbench.late import Axes, Figure, pd
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.stats import reference
from posbench.stats.bootstrap import Z95, normal
from posbench.theory import masks
from wu2025.network import Attention
from wu2025.sequences import Mixture, copying_gap
from wu2025.training import PAIRS, Condition, Measured

SETTINGS = ["vocabulary", "scale", "mask", "pe", "depth", "residual", "bias"]
"""Columns that distinguish conditions; the paper's cells have all but the scale."""
GAP_SETTINGS = [*SETTINGS, "omega"]
"""Columns that distinguish gaps: the condition, and the shared component omega of the test sets."""
CELL_COLUMNS = [*(name for name in SETTINGS if name != "scale"), "pair"]
PAIR_NAMES = [f"{a}-{b}" for a, b in PAIRS]
PAIR_LABELS = [f"{a} - {b}" for a, b in PAIRS]
HALF_COPYING_GAP = copying_gap(Mixture()) * 0.5
"""Gap of copying the first item's label in half of the sequences: 0.277."""
NEAR = 0.05  # difference of gaps that count as the same
TEST_SD = 0.0067
"""Of a gap over its 10,000 test sequences, measured on trained networks."""
PAPER_SEEDS = 5
MIN_SEEDS = 3  # below, the variance between seeds is not estimated
FEW_SEEDS_VERDICTS = {
    "agrees": "this network agrees",
    "differs": "this network differs",
    "inconclusive": "cannot tell",
}
"""Verdicts on these networks alone, with fewer than `MIN_SEEDS` seeds."""
CHANCE = 0.9 * float(np.log(Mixture().labels))
"""Training loss (nats) above which nothing is learned yet: within a tenth of guessing among 32 labels."""
PE_LABELS = {"none": "no PE", "sin": "sin PE", "rope": "RoPE"}
CONDITIONS_PER_ROW = 6  # of a figure of gaps
MIN_GAP_LIMIT = 0.15  # of the axis of gaps, whose ends are this or larger


def tabulate(measured: Measured, files: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Tables of trainings: ``gaps`` (by pair of items), ``sinks`` (by token, from 0) and :func:`compare_cells`.

    ``omega`` is the omega in the test sets of the ``fixed`` vocabulary: the ``training``'s, or ``fresh``, means over
    ``draws`` whose standard deviation is ``draw_sd``; ``none`` in another vocabulary.

    Args:
        measured: Rows of trainings with their conditions.
        files: Tables in reference/ with the paper's cells. With these only conditions are compared whose
            other settings are the paper's, too.

    Raises:
        UserError: Two conditions have the same columns.
    """
    _need_told_apart([condition for condition, _ in measured])
    papers_settings = set[tuple[Any, ...]]()
    gaps: list[Row] = []
    sinks: list[Row] = []
    for condition, row in measured:
        run: Row = {
            **condition.settings,
            "seed": row["seed"],
            "iteration": row["iteration"],
        }
        if not condition.changed:
            papers_settings.add(tuple(condition.settings[name] for name in SETTINGS))
        gaps += [{**run, **gap_row} for gap_row in _gap_rows(condition.vocabulary, row)]
        shares = zip(row["sink_by_head"], row["sink_by_entry"], strict=True)
        for token, (by_head, by_entry) in enumerate(shares):
            sink_row = {
                **run,
                "n": row["n"],
                "token": token,
                "by_head": by_head,
                "by_entry": by_entry,
            }
            sinks.append(sink_row)
    gap_table = pd.DataFrame(gaps)
    is_papers = [
        settings in papers_settings
        for settings in gap_table[SETTINGS].itertuples(index=False, name=None)
    ]
    return {
        "gaps": gap_table,
        "sinks": pd.DataFrame(sinks),
        "paper_cells": compare_cells(gap_table[is_papers], files),
    }


def _need_told_apart(conditions: Sequence[Condition]) -> None:
    """Refuse conditions that differ in a field that is no column of the tables, which would count as seeds of one."""
    first: dict[str, Condition] = {}
    for condition in conditions:
        other = first.setdefault(str(condition.settings), condition)
        if other.changed != condition.changed:
            changed = condition.changed or other.changed
            allowed = f"conditions that differ in {', '.join(SETTINGS)}, which tell them apart in the tables"
            hint = "train them in studies of their own, with other study.trainings"
            raise UserError("study.conditions", changed, allowed, hint)


def _gap_rows(vocabulary: str, row: Row) -> list[Row]:
    """The gaps of one measurement, by omega of the test sets and pair of items."""
    training = {
        "n": row["n"],
        "train_loss": row["train_loss"],
        "train_accuracy": row["train_accuracy"],
    }
    rows = []
    for a, b in PAIRS:
        gap = row[f"gap_{a}_{b}"]
        half = Z95 * row[f"sd_{a}_{b}"]
        gap_row = {
            "omega": "training" if vocabulary == "fixed" else "none",
            "pair": f"{a}-{b}",
            "acc_ab": row[f"acc_{a}_{b}"],
            "acc_ba": row[f"acc_{b}_{a}"],
            "gap": gap,
            "ci_low": gap - half,
            "ci_high": gap + half,
            "draws": 1,
            "draw_sd": 0.0,
            **training,
            **{f"novel_{item}": row[f"novel_{item}"] for item in Mixture().places},
            "hardware": row["hardware"],
        }
        rows.append(gap_row)
    if "fresh_omega" not in row:
        return rows
    draws = pd.DataFrame(row["fresh_omega"])
    mean = draws.mean()
    for a, b in PAIRS:
        draw_gaps = (draws[f"acc_{a}_{b}"] - draws[f"acc_{b}_{a}"]).to_numpy()
        estimate = normal(draw_gaps)
        gap_row = {
            "omega": "fresh",
            "pair": f"{a}-{b}",
            "acc_ab": mean[f"acc_{a}_{b}"],
            "acc_ba": mean[f"acc_{b}_{a}"],
            "gap": estimate.value,
            "ci_low": estimate.ci_low,
            "ci_high": estimate.ci_high,
            "draws": len(draws),
            "draw_sd": draw_gaps.std(ddof=1),
            **training,
            **{f"novel_{item}": mean[f"novel_{item}"] for item in Mixture().places},
            "hardware": row["hardware"],
        }
        rows.append(gap_row)
    return rows


def combine(*tables: pd.DataFrame) -> pd.DataFrame:
    """Rows of tables of :func:`tabulate`, merged; a training in several tables is taken from one table.

    It is the table with the longest training, and the first such table; for each omega of the test sets
    separately, as an older table may lack one of them.
    """
    key = [*_settings_of(tables[0]), "seed"]
    rows = pd.concat(tables, keys=range(len(tables)), names=["table"])
    rows = rows.reset_index("table")
    ends = rows.groupby([*key, "table"])["iteration"].transform("max")
    longest = ends.groupby([rows[name] for name in key]).transform("max")
    rows = rows[ends == longest]
    first_table = rows.groupby(key)["table"].transform("min")
    rows = rows[rows["table"] == first_table].drop(columns="table")
    return rows.sort_values(key, kind="stable", ignore_index=True)


def _settings_of(table: pd.DataFrame) -> list[str]:
    """`GAP_SETTINGS`, without the omega in a table of sinks."""
    return [name for name in GAP_SETTINGS if name in table]


def last_iterations(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of each condition at the iteration where seeds times iterations is largest.

    So a single seed that is ahead of the others does not represent all; of two such iterations it is the later
    one. Where an iteration was reached by `MIN_SEEDS` seeds, iterations with fewer seeds are left out.
    """
    settings = _settings_of(frame)
    conditions = [frame[name] for name in settings]
    seeds = frame.groupby([*settings, "iteration"])["seed"].transform("nunique")
    enough = seeds >= MIN_SEEDS
    none_has_enough = ~enough.groupby(conditions).transform("any")
    work = (seeds * frame["iteration"]).where(enough | none_has_enough, 0)
    most_trained = frame[work == work.groupby(conditions).transform("max")]
    ends = most_trained.groupby(settings)["iteration"].transform("max")
    return most_trained[most_trained["iteration"] == ends]


def mean_over_seeds(gaps: pd.DataFrame) -> pd.DataFrame:
    """Mean over the seeds of each condition, iteration and pair.

    The interval is of the test sequences and their omegas, for these networks; ``spread`` is the standard
    deviation over seeds, ``draw_sd`` over draws of omega, ``test_sd`` of one network's gap over its
    tests, ``novel`` the accuracy on new classes, over the three items.
    """
    half = (gaps["ci_high"] - gaps["ci_low"]) / 2
    rows = gaps.assign(variance=half**2, draw_variance=gaps["draw_sd"] ** 2)
    of_sequences = (half / Z95) ** 2
    of_draws = rows["draw_variance"] / rows["draws"]
    rows["test_variance"] = of_sequences.where(rows["draws"] == 1, of_draws)
    rows["novel"] = rows[["novel_first", "novel_middle", "novel_last"]].mean(axis=1)
    groups = rows.groupby([*GAP_SETTINGS, "iteration", "pair"], sort=False)
    table = groups.agg(
        gap=("gap", "mean"),
        variance=("variance", "sum"),
        seeds=("seed", "nunique"),
        spread=("gap", "std"),
        draws=("draws", "min"),
        draw_variance=("draw_variance", "mean"),
        test_variance=("test_variance", "mean"),
        train_loss=("train_loss", "mean"),
        n=("n", "sum"),
        train_accuracy=("train_accuracy", "mean"),
        novel=("novel", "mean"),
    ).reset_index()
    half = np.sqrt(table.pop("variance")) / table["seeds"]
    return table.assign(
        ci_low=table["gap"] - half,
        ci_high=table["gap"] + half,
        draw_sd=np.sqrt(table.pop("draw_variance")),
        test_sd=np.sqrt(table.pop("test_variance")),
    )


def read_printed_cells(file: str) -> pd.DataFrame:
    """The paper's cells of one figure: figure, `CELL_COLUMNS`, paper (the gap)."""
    with renamed("experiment.reference.file", "study.reference"):
        table = reference.read_table(file, "figure", *CELL_COLUMNS, "gap")
    table = table.assign(residual=table["residual"] == "True")
    table = table.rename(columns={"gap": "paper"})[["figure", *CELL_COLUMNS, "paper"]]
    return table.astype({"figure": int, "depth": int, "paper": float})


def compare_cells(gaps: pd.DataFrame, files: Sequence[str]) -> pd.DataFrame:
    """The paper's cells with ours :func:`last_iterations`, of the conditions that were trained.

    A cell of the ``fixed`` vocabulary has a row for each omega of the test sets. ``difference`` is ours minus
    the paper's, with the 90 % interval of :func:`_difference_half_width`; the verdict is where it lies, `NEAR`
    being the same number, in the words of `FEW_SEEDS_VERDICTS` where seeds are few, or ``not learned`` where the
    training loss is above `CHANCE`. A cell trained with both scales is ``counted`` once, with the
    paper's; ``near_zero`` are the paper's gaps with which a gap of 0 would agree.
    """
    columns = [
        "figure",
        *GAP_SETTINGS,
        "pair",
        "paper",
        "gap",
        "ci_low",
        "ci_high",
        "iteration",
        "seeds",
        "spread",
        "draws",
        "draw_sd",
        "train_loss",
        "train_accuracy",
        "novel",
        "difference",
        "difference_ci_low",
        "difference_ci_high",
        "counted",
        "near_zero",
        "verdict",
    ]
    if not files:
        return pd.DataFrame(columns=columns)
    printed = pd.concat([read_printed_cells(file) for file in files])
    cells = printed.merge(mean_over_seeds(last_iterations(gaps)), on=CELL_COLUMNS)
    half = np.array([_difference_half_width(row) for row in cells.itertuples()])
    cells["difference"] = cells["gap"] - cells["paper"]
    cells["difference_ci_low"] = cells["difference"] - half
    cells["difference_ci_high"] = cells["difference"] + half
    paper_scale = cells["scale"] == "paper"
    cell = [cells[name] for name in ("figure", *CELL_COLUMNS, "omega")]
    cells["counted"] = paper_scale | ~paper_scale.groupby(cell).transform("any")
    cells["near_zero"] = cells["paper"].abs() <= NEAR
    cells["verdict"] = [_cell_verdict(row) for row in cells.itertuples()]
    return cells[columns].reset_index(drop=True)


def _difference_half_width(row: Any) -> float:
    """Half-width of the 90 % interval of ours minus the paper's cell, the variance between seeds included.

    A mean of ours over S seeds and D draws of the test sets has variance b / S, where b is that between the
    seeds' means; the paper's, over five seeds of one draw each, has (b + (1 - 1/D) d) / 5, where d is the
    variance between draws. Degrees of freedom are Satterthwaite's. With fewer than `MIN_SEEDS` seeds b is the
    variance of the tests alone, so that the interval is for these networks.
    """
    between_seeds = row.test_sd**2
    if row.seeds >= MIN_SEEDS:
        between_seeds = max(between_seeds, row.spread**2)
    seed_part = between_seeds * (1 / row.seeds + 1 / PAPER_SEEDS)
    draw_part = row.draw_sd**2 * (1 - 1 / row.draws) / PAPER_SEEDS
    variance = seed_part + draw_part
    if row.seeds < MIN_SEEDS:
        return float(reference.Z90 * variance**0.5)
    squares = seed_part**2 / (row.seeds - 1)
    if row.draws > 1:
        squares += draw_part**2 / (row.seeds * (row.draws - 1))
    quantile = scipy.special.stdtrit(variance**2 / squares, 0.95)
    return float(quantile * variance**0.5)


def _cell_verdict(row: Any) -> str:
    """Whether our gap agrees with the paper's cell."""
    if row.train_loss > CHANCE:
        return "not learned"
    low = row.difference_ci_low
    high = row.difference_ci_high
    verdict = reference.equivalence(low, high, NEAR)
    return FEW_SEEDS_VERDICTS[verdict] if row.seeds < MIN_SEEDS else verdict


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


def condition_label(row: Mapping[str, Any], between: str = ", ") -> str:
    """A condition in words, without its bias and scale."""
    masks_in_words = {"full": "no mask", "decay": "decay mask"}
    words = [masks_in_words.get(row["mask"], row["mask"])]
    if row["mask"] != "decay" or row["pe"] != "none":
        words.insert(0, PE_LABELS[row["pe"]])
    words.append(f"depth {row['depth']}")
    if not row["residual"]:
        words.append("no residual")
    return between.join(words)


def omega_suffix(row: Mapping[str, Any]) -> str:
    """Suffix for the label of a condition of the ``fixed`` vocabulary."""
    texts = {"training": ", training's omega", "fresh": ", fresh omegas"}
    return texts.get(row["omega"], "")


def scale_suffix(row: Mapping[str, Any]) -> str:
    """Suffix for the label of a condition with the official code's scale."""
    return ", std 1/D" if row["scale"] == "code" else ""


def uniform_sinks(mask: str, tokens: int) -> pd.DataFrame:
    """Sink metrics by token of equal weights under a mask of the tables (``window 5``)."""
    kind, _, span = mask.partition(" ")
    fields: dict[str, Any] = {"mask": kind}
    if span:
        fields[kind] = int(span)
    network = Attention(**fields)
    visible = network.seen(tokens)
    scores = np.zeros(visible.shape)
    if kind == "decay":
        scores = masks.decay(tokens, network.decay)
    weights = masks.attention(scores, visible)
    by_entry = masks.sink_share_by_entry(weights, visible)
    by_head = masks.sink_share_by_head(np.tril(weights))
    columns = {"token": range(tokens), "by_entry": by_entry, "by_head": by_head}
    return pd.DataFrame(columns)


def figures(gaps: pd.DataFrame, sinks: pd.DataFrame, cells: pd.DataFrame) -> Drawn:
    """Draw gaps at the end and over the training, and the sinks of plain networks.

    Args:
        gaps: Table ``gaps`` of :func:`tabulate`.
        sinks: Its table ``sinks``.
        cells: The paper's cells with ours.

    Returns:
        Figures with captions, two for each kind of data and network.
    """
    figures: dict[str, tuple[Figure, str]] = {}
    kinds = gaps.groupby(["vocabulary", "scale", "bias", "residual"], sort=False)
    for (vocabulary, scale, bias, residual), rows in kinds:
        name = _file_name(vocabulary, scale, bias, residual)
        std = "1/D" if scale == "code" else "1/sqrt(D)"
        kind = f"{vocabulary} vocabulary, std {std}, bias of the data: {bias}"
        caption = (
            f"Accuracy gaps [a, b] - [b, a] ({kind}); above 0 the earlier item wins. Bars: mean over seeds; "
            "whiskers: 95 % over test sequences; dots: seeds; the paper: after 100,000 iterations. "
            f"Dotted: copying by position alone, one item ({2 * HALF_COPYING_GAP:.3f}) or two in turn "
            f"({HALF_COPYING_GAP:.3f})."
        )
        if vocabulary == "fixed":
            caption += (
                " The same networks are tested with the training's omega and with fresh ones, as in the official "
                "program."
            )
        figures[f"gaps_{name}"] = (gaps_figure(rows, cells), caption)
        if rows["iteration"].nunique() > 1:
            caption = f"The same gaps over the training ({kind})."
            figures[f"curves_{name}"] = (curves_figure(rows, cells), caption)
    rows = gaps[causal_without_pe(gaps)]
    if rows["bias"].nunique() > 1:
        caption = "The causal mask without PE at depth 2, by bias and std of the data."
        figure = curves_figure(rows, cells, by_data=True)
        figures["causal_without_pe"] = (figure, caption)
    plain = sinks[
        (sinks["bias"] == "none")
        & (sinks["vocabulary"] == "gaussian")
        & (sinks["pe"] == "none")
    ]
    plain = plain[~plain["residual"]]
    if not plain.empty:
        caption = (
            "After training without PE and residual connections: share of heads and sequences in which a "
            "token is a sink, and of single weights. Few queries see late tokens."
        )
        figures["sinks"] = (sinks_figure(plain), caption)
    return figures


def _file_name(vocabulary: str, scale: str, bias: str, residual: bool) -> str:
    """File name of a kind of data and network, without the settings that are the default."""
    words = [bias.replace("+", "_")]
    if vocabulary != "gaussian":
        words.append(vocabulary)
    if residual:
        words.append("residual")
    if scale == "code":
        words.append("code_scale")
    return "_".join(words)


def _draw_copying_gaps(axes: Axes, largest: float) -> None:
    """Draw the gaps of copying by position; the axis has room for the largest gap, and shows small ones small."""
    for copies in (-2, -1, 0, 1, 2):
        line = ":" if copies else "-"
        gap = copies * HALF_COPYING_GAP
        axes.axhline(gap, color=plot.GUIDE, linewidth=0.6, linestyle=line, zorder=0)
    limit = max(MIN_GAP_LIMIT, 1.15 * largest)
    axes.set(ylim=(-limit, limit), ylabel="accuracy gap")


@plot.styled
def gaps_figure(gaps: pd.DataFrame, cells: pd.DataFrame) -> Figure:
    """Gaps at the end, three bars for each condition; the paper's as diamonds."""
    last = last_iterations(gaps)
    key = [*GAP_SETTINGS, "pair"]
    mean = mean_over_seeds(last).merge(cells[[*key, "paper"]], "left", key)
    # The training's omega goes above the fresh ones.
    mean = mean.sort_values("omega", ascending=False, kind="stable")
    condition = mean.groupby(GAP_SETTINGS, sort=False).ngroup()
    mean = mean.assign(
        line=condition // CONDITIONS_PER_ROW, x=condition % CONDITIONS_PER_ROW
    )
    several = mean[mean["seeds"] > 1]
    seeds = last.merge(several[[*key, "line", "x"]], on=key)
    largest = np.nanmax([*last["gap"].abs(), *mean["paper"].abs()])
    lines = 1 + mean["line"].max()
    figure, grid = plot.new_figure(
        plot.PAGE, 0.5 + 2.0 * lines, lines, n=last["n"], squeeze=False
    )
    for line, axes in enumerate(grid.flat):
        _draw_copying_gaps(axes, largest)
        for index, pair in enumerate(PAIR_NAMES):
            bars = mean[(mean["pair"] == pair) & (mean["line"] == line)]
            dots = seeds[(seeds["pair"] == pair) & (seeds["line"] == line)]
            _draw_bars(axes, bars, dots, index)
        ticks = [_tick_label(row) for row in bars.to_dict("records")]
        axes.set_xticks(range(len(ticks)), ticks)
        axes.set_xlim(-0.6, max(len(ticks), 3) - 0.4)
    plot.add_legend_below(figure)
    return figure


def _tick_label(row: Row) -> str:
    """The label of a condition below its bars, a line for each fact."""
    facts = [condition_label(row, "\n"), f"{row['iteration'] / 1000:g}k its"]
    if row["omega"] != "none":
        facts.append(f"omega: {row['omega']}")
    return "\n".join(facts)


def _draw_bars(axes: Axes, bars: pd.DataFrame, dots: pd.DataFrame, index: int) -> None:
    """Draw the gaps of one pair of items.

    Args:
        axes: Where to draw.
        bars: Means over seeds, with the paper's gaps.
        dots: Gaps of single seeds.
        index: Number of the pair, for its colour and place.
    """
    shift = 0.25 * (index - 1)
    x = bars["x"] + shift
    gap = bars["gap"]
    half = (bars["ci_high"] - bars["ci_low"]) / 2
    axes.bar(x, gap, 0.22, color=plot.COLOURS[index], label=PAIR_LABELS[index])
    axes.errorbar(x, gap, half, fmt="none", color="black", linewidth=0.8, capsize=1.5)
    axes.plot(dots["x"] + shift, dots["gap"], "o", color="black", markersize=1.8)
    if bars["paper"].notna().any():
        axes.plot(x, bars["paper"], **plot.PAPER_MARKER)


def _panels(
    frame: pd.DataFrame, draw: Callable[[Axes, Row, pd.DataFrame], None]
) -> Figure:
    """A panel for each condition, three in a row, drawn from its settings and rows."""
    settings = _settings_of(frame)
    groups = list(frame.groupby(settings, sort=False))
    figure, panels = plot.new_panels(len(groups), 3, 1.6, n=frame["n"])
    for index, (axes, (key, rows)) in enumerate(zip(panels, groups, strict=True)):
        draw(axes, dict(zip(settings, key, strict=True)), rows)
        if index % 3:
            axes.set_ylabel("")
            axes.tick_params(labelleft=False)
    plot.add_legend_below(figure)
    return figure


@plot.styled
def curves_figure(
    gaps: pd.DataFrame, cells: pd.DataFrame, by_data: bool = False
) -> Figure:
    """Gaps over the iterations, a line per pair and seed, the paper's at its end; a panel per condition.

    Args:
        gaps: Table ``gaps`` of :func:`tabulate`.
        cells: The paper's cells.
        by_data: Name each panel after its data, not after its network.
    """
    key = [*GAP_SETTINGS, "pair"]
    gaps = gaps.merge(cells[[*key, "paper"]], "left", key)
    gaps = gaps.sort_values("omega", ascending=False, kind="stable")
    largest = np.nanmax(gaps[["gap", "paper"]].abs())
    return _panels(gaps, partial(_draw_curves, largest=largest, by_data=by_data))


def _draw_curves(
    axes: Axes, condition: Row, rows: pd.DataFrame, *, largest: float, by_data: bool
) -> None:
    """Draw one panel of :func:`curves_figure`; ``largest`` is the largest gap of all panels."""
    _draw_copying_gaps(axes, largest)
    first_seed = rows["seed"].min()
    for (pair, seed), line in rows.sort_values("iteration").groupby(["pair", "seed"]):
        index = PAIR_NAMES.index(pair)
        style = plot.line_style(index) | {"markersize": 2.2, "linewidth": 0.9}
        name = PAIR_LABELS[index] if seed == first_seed else None
        axes.plot(line["iteration"] / 1000, line["gap"], label=name, **style)
        if line["paper"].notna().any():
            diamond = plot.PAPER_MARKER | {
                "markerfacecolor": style["color"],
                "markeredgewidth": 0.7,
            }
            axes.plot([100], line["paper"].iloc[:1], clip_on=False, **diamond)
    title = condition_label(condition)
    if condition["omega"] != "none":
        title += f"\nomega: {condition['omega']}"
    if by_data:
        std = scale_suffix(condition) or ", std 1/sqrt(D)"
        title = f"bias: {condition['bias']}{std}"
    axes.set(xlabel="iterations (thousands)", xscale="log", xlim=(0.9, 115))
    axes.set_title(title)
    axes.set_xticks([1, 10, 100], ["1", "10", "100"])


@plot.styled
def sinks_figure(sinks: pd.DataFrame) -> Figure:
    """Both sink metrics per token at the end, a panel per condition; mean over seeds."""
    return _panels(last_iterations(sinks), _draw_sinks)


def _draw_sinks(axes: Axes, condition: Row, rows: pd.DataFrame) -> None:
    """Draw one panel of :func:`sinks_figure`."""
    labels = {
        "by_entry": "single weights > 0.2 (Wu et al.)",
        "by_head": "heads with mean > 0.3 (Gu et al.)",
    }
    shares = 100 * rows.groupby("token")[list(labels)].mean()
    tokens = shares.index.to_numpy()
    for index, (metric, text) in enumerate(labels.items()):
        x = tokens - 0.2 + 0.4 * index
        axes.bar(x, shares[metric], 0.4, color=plot.COLOURS[index], label=text)
    uniform = 100 * uniform_sinks(condition["mask"], len(tokens))["by_entry"]
    axes.plot(
        tokens - 0.2,
        uniform,
        "_",
        color=plot.PAPER_COLOUR,
        markersize=5,
        label="Wu et al., equal weights",
    )
    axes.set(
        xlabel=plot.TOKEN_LABEL, ylabel="sink (%)", ylim=(0, 103), xticks=tokens[::4]
    )
    axes.set_title(
        f"{condition['mask']}, depth {condition['depth']}{scale_suffix(condition)}"
    )
