"""The numbers of a run or a sweep as sentences and tables; frames in, text out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table
from rich.text import Text

from posbench.plots import sweep as sweep_plots
from posbench.plots.base import UNMODIFIED, at_positions, metric_name, overall, own_metric
from posbench.stats.tables import BIAS

GROUP = ["model", "task", "seed"]
NUMBER_COLUMNS = ("value", "ci_low", "ci_high")
VERDICTS = ("holds", "does not hold", "not testable here")
OTHER_MODEL = "other model, not comparable"
BIAS_WORDS = {
    "position_bias": "position bias (std over positions)",
    "gap": "gap (best - worst)",
    "gap_null": "gap if positions did not matter",
    "primacy": "primacy (first - inner)",
    "recency": "recency (last - inner)",
    "middle_drop": "middle drop (ends - lowest inner)",
}
TOLERANCE = 0.025  # how far (0..1) a paper's depth label may lie from the nearest depth we measured


def headline(metrics: pd.DataFrame | None) -> str:
    """The result in plain words, one or two sentences for each model, task and seed.

    Args:
        metrics: metrics.csv rows, or None when nothing was scored.

    Returns:
        Text. A method is said to raise or lower the average only if the 95 % interval of the difference
        excludes zero.
    """
    if metrics is None or overall(metrics).empty:
        return "Nothing was scored in this run."
    many = [c for c in GROUP if metrics[c].nunique() > 1]
    sentences = []
    for key, rows in metrics.groupby(GROUP, sort=False, dropna=False):
        where = "".join(f"{c} {v}: " for c, v in zip(GROUP, key, strict=True) if c in many)
        average: Any = overall(rows).drop_duplicates("method").set_index("method")
        parts = []
        verb = "answers" if metric_name(rows) == "accuracy" else "scores"
        if UNMODIFIED in average.index:
            base = at_positions(rows)
            base = base[base["method"] == UNMODIFIED].sort_values("depth")
            mean = f"{_pct(average.at[UNMODIFIED, 'value'])} on average (n = {average.at[UNMODIFIED, 'n']})"
            if len(base) > 2:
                ends, worst = (
                    (base["value"].iloc[0] + base["value"].iloc[-1]) / 2,
                    base["value"].iloc[1:-1].min(),
                )
                curve = f"{_pct(ends)} at the ends and {_pct(worst)} at its worst inner position"
                mean = f"{curve}, {mean}" if len(average) == 1 else curve
            parts.append(f"The unmodified model {verb} {mean}")
        parts += [
            _verdict(rows, average, str(method), verb) for method in average.index if method != UNMODIFIED
        ]
        header, table = bias_table(rows)
        if table:
            cells = [f"{name} {cell}" for name, cell in zip(header[1:], table[0][1:], strict=True) if cell]
            parts.append(f"position bias in points: {', '.join(cells)}")
        sentences.append(where + "; ".join(parts) + ".")
    return " ".join(sentences)


def shortened(rows: Iterable[Mapping[str, Any]]) -> str:
    """How many prompts lost tokens, from rows with ``id`` and ``dropped``; empty where none did."""
    dropped = {row["id"]: row.get("dropped", 0) for row in rows}
    cut = [tokens for tokens in dropped.values() if tokens]
    if not cut:
        return ""
    mean = f"mean {np.mean(cut):.0f} tokens removed"
    return f"{len(cut)} of {len(dropped)} prompts were shortened to the context window ({mean})."


def applied(method: Mapping[str, Any]) -> str:
    """The method as it ran, from ``method.json``: its name, every parameter, and where published constants
    come from."""
    parts = method.get("parts", {"": {k: v for k, v in method.items() if k not in ("name", "source")}})
    words = {
        name: ", ".join(f"{k} {v}" for k, v in part.items() if v is not None) for name, part in parts.items()
    }
    values = "; ".join(f"{name} ({text})" if name else text for name, text in words.items())
    return f"{method['name']}: {values}" + (f"; constants: {method['source']}" if "source" in method else "")


def _verdict(rows: pd.DataFrame, average: Any, method: str, verb: str) -> str:
    """What a method does to the average, as far as the interval of the difference allows to say."""
    after = _pct(average.at[method, "value"])
    difference = overall(rows, "difference")
    difference = difference[difference["method"] == method].dropna(subset="ci_low")
    if UNMODIFIED not in average.index or difference.empty:
        return f"{method} {verb} {after} on average (n = {average.at[method, 'n']}; no paired comparison was recorded)"
    change = difference.iloc[0]
    low, high = 100 * change["ci_low"], 100 * change["ci_high"]
    facts = f"{points(change['value'])} points, 95 % interval {low:.1f} to {high:.1f}, n = {change['n']}"
    before = _pct(average.at[UNMODIFIED, "value"])
    if low > 0 or high < 0:
        return f"{method} {'raises' if low > 0 else 'lowers'} the average from {before} to {after} ({facts})"
    return f"{method} makes no reliable change to the average: {before} before, {after} after ({facts})"


def verdicts(findings: pd.DataFrame) -> str:
    """How a study's claims fared, in one sentence."""
    counts = findings["verdict"].value_counts()
    return (
        "Claims of the paper: "
        + ", ".join(f"{counts[name]} {name}" for name in VERDICTS if name in counts)
        + "."
    )


def findings_table(findings: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Claims, the statistics they are held against, and verdicts as text: a header, and one row for each
    finding."""
    rows = []
    for row in findings.fillna({"note": "", "model": ""}).itertuples():
        interval = f" [{row.low:.3g}, {row.high:.3g}]" if row.low == row.low else ""
        rows.append(
            [row.claim, row.statistic, f"{row.value:.3g}{interval}", str(row.n), row.verdict, str(row.note)]
        )
    return ["claim", "statistic", "value", "n", "verdict", "note"], rows


def position_table(metrics: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """The task's score per gold position as text: a header, and one row per position with `all` last.

    Args:
        metrics: metrics.csv rows.

    Returns:
        Columns: position (depth in %), score of each method in % with its interval, difference of each
        modified one in points with its interval, n. Where model, task or seed vary, they stand in front of
        the position.
    """
    own = own_metric(metrics)
    kind = (
        metrics["metric"]
        .where(metrics["metric"] != own, "score")
        .where(metrics["metric"] != own + "_difference", "change")
    )
    rows = metrics.assign(kind=kind)[kind.isin(["score", "change"])]
    many = [c for c in GROUP if rows[c].nunique() > 1]
    methods = sorted(rows["method"].unique(), key=lambda m: m != UNMODIFIED)
    changed = [m for m in methods if ((rows["method"] == m) & (rows["kind"] == "change")).any()]
    header = [*many, "position", *("unmodified" if m == UNMODIFIED else str(m) for m in methods)]
    header += ["difference" if len(changed) == 1 else f"{m}: difference" for m in changed] + ["n"]
    table = []
    for key, group in rows.groupby(GROUP, sort=False, dropna=False):
        front = [str(v) for c, v in zip(GROUP, key, strict=True) if c in many]
        depth = (
            at_positions(group)
            .sort_values("depth")
            .drop_duplicates("position")
            .set_index("position")["depth"]
        )
        for position in [*depth.index, "all"]:
            here = group[group["position"].astype(str) == str(position)]
            cells = {(r.method, r.kind): r for r in here.itertuples()}
            line = [*front, "all" if position == "all" else f"{100 * depth[position]:.3g} %"]
            line += [_cell(cells.get((m, "score")), "{:.1f}") for m in methods]
            line += [_cell(cells.get((m, "change")), "{:+.1f}") for m in changed]
            table.append([*line, "/".join(dict.fromkeys(str(n) for n in here["n"]))])
    return header, table


def bias_table(metrics: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """What the curves over gold positions amount to, as text: a header, and one row for each statistic that
    there is.

    Args:
        metrics: metrics.csv rows.

    Returns:
        Columns: statistic, each method and the difference of each modified one, in points with their
        intervals. Where model, task or seed vary, they stand in front.
    """
    rows = metrics[metrics["metric"].str.removesuffix("_difference").isin(BIAS)]
    many = [c for c in GROUP if rows[c].nunique() > 1]
    methods = sorted(rows["method"].unique(), key=lambda m: m != UNMODIFIED)
    changed = [
        m for m in methods if ((rows["method"] == m) & rows["metric"].str.endswith("_difference")).any()
    ]
    header = [*many, "statistic", *("unmodified" if m == UNMODIFIED else str(m) for m in methods)]
    header += ["difference" if len(changed) == 1 else f"{m}: difference" for m in changed]
    table = []
    for key, group in rows.groupby(GROUP, sort=False, dropna=False):
        cells = {(r.method, r.metric): r for r in group.itertuples()}
        for name, words in BIAS_WORDS.items():
            line = [*(str(v) for c, v in zip(GROUP, key, strict=True) if c in many), words]
            line += [_cell(cells.get((m, name)), "{:.1f}") for m in methods]
            line += [_cell(cells.get((m, f"{name}_difference")), "{:+.1f}") for m in changed]
            if any(line[len(many) + 1 :]):
                table.append(line)
    return header, table


def other_scores(metrics: pd.DataFrame) -> pd.DataFrame:
    """The scores over all examples beside the task's own, as :func:`subset_table` takes them; empty where
    there are none."""
    own = own_metric(metrics)
    metric = metrics["metric"].str.removesuffix("_difference")
    rest = (metric != own) & ~metric.isin(BIAS)
    rows = metrics[rest & (metrics["position"].astype(str) == "all")]
    return rows.assign(subset="all", kind="average")


def subset_table(
    subsets: pd.DataFrame, kind: str = "", own: str | None = None
) -> tuple[list[str], list[list[str]]]:
    """Subsets and averages as text: a header, and one row per subset or average and metric.

    Args:
        subsets: subsets.csv rows of one model and task.
        kind: `subset` or `average` for these alone.
        own: The task's own metric; None takes it from the rows, and empty says that it is not among them.

    Returns:
        Columns: subset, metric (if there are several), value of each method with its interval, difference of
        each modified one, n. The task's own metric is in % and points, the others are in their own unit.
    """
    rows = subsets[subsets["kind"] == kind] if kind else subsets
    own = own_metric(subsets).iloc[0] if own is None else own
    methods = sorted(rows["method"].unique(), key=lambda m: m != UNMODIFIED)
    changed = [
        m for m in methods if ((rows["method"] == m) & rows["metric"].str.endswith("_difference")).any()
    ]
    header = ["subset", "metric", *("unmodified" if m == UNMODIFIED else str(m) for m in methods)]
    header += ["difference" if len(changed) == 1 else f"{m}: difference" for m in changed] + ["n"]
    table = []
    plain = rows[~rows["metric"].str.endswith("_difference")]
    for where, name in dict.fromkeys(zip(plain["subset"], plain["metric"], strict=True)):
        here = rows[rows["subset"] == where]
        cells = {(r.method, r.metric): r for r in here.itertuples()}
        scale = 100 if name == own else 1
        line = [_cell(cells.get((m, name)), "{:.1f}" if scale == 100 else "{:.3f}", scale) for m in methods]
        line += [
            _cell(cells.get((m, f"{name}_difference")), "{:+.1f}" if scale == 100 else "{:+.3f}", scale)
            for m in changed
        ]
        table.append([where, name, *line, str(cells[methods[0], name].n)])
    if own and len({line[1] for line in table}) == 1:
        header, table = [header[0], *header[2:]], [[line[0], *line[2:]] for line in table]
    return header, table


def summary_table(metrics: pd.DataFrame) -> Table:
    """The table a run ends with in the terminal, at most 100 columns wide for up to two methods.

    Args:
        metrics: metrics.csv rows.

    Returns:
        A rich table: gold position (depth in %), score in % and difference in points with their 95 %
        intervals.
    """
    header, rows = position_table(metrics)
    title = ", ".join(str(metrics[c].iloc[0]) for c in ("model", "task") if metrics[c].nunique() == 1)
    table = Table(
        title=Text(title), caption=f"{metric_name(metrics)} in %, difference in points, [95 % interval]"
    )
    for name in header:
        table.add_column(Text(name), justify="right", overflow="fold")
    tall = len(header) > 5  # several methods: the interval goes below its number
    for index, row in enumerate(rows):
        cells = [Text(short(cell).replace(" [", "\n[") if tall else short(cell)) for cell in row]
        table.add_row(*cells, end_section=index + 2 == len(rows))
    return table


def short(cell: str) -> str:
    """A cell with its interval in whole points, for 80 columns; metrics.csv and report.html keep the
    decimals."""
    # A list of numbers, such as a swept setting, is no interval.
    return re.sub(
        r"(?<=\d) \[(-?[\d.]+), (-?[\d.]+)\]$", lambda m: f" [{float(m[1]):.0f}, {float(m[2]):.0f}]", cell
    )


def reference_text(facts: Mapping[str, Any], reference: list[dict[str, Any]], compared: bool) -> str:
    """What is said beside a paper's numbers.

    Args:
        facts: ``experiment.json``: ``note`` on the setting and ``claims`` of the paper.
        reference: The paper's rows.
        compared: Whether one of the paper's models ran.
    """
    text = [str(facts.get("note", ""))]
    if facts.get("claims"):
        text.append("The paper's reading: " + "; ".join(facts["claims"]) + ".")
    if compared:
        text.append("A number agrees if the paper's value lies within our 95 % interval.")
    elif reference:
        models = ", ".join(dict.fromkeys(str(row["model"]) for row in reference))
        text.append(f"The paper's numbers are for {models}; none of these ran here, so nothing is compared.")
    sources = "; ".join(dict.fromkeys(str(row["source"]) for row in reference if row.get("source")))
    text.append(f"Source: {sources}." if sources else "")
    return " ".join(part for part in text if part)


def reference_table(
    metrics: pd.DataFrame, reference: list[dict[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    """A paper's numbers beside ours as text, for the models that ran: header and rows, none where no model
    matches."""
    table = compare_with_reference(metrics, reference)
    table = table[table["verdict"] != OTHER_MODEL]
    header = ["model", "method", "position", "paper %", "ours %", "difference", "verdict"]
    rows = []
    for row in table.itertuples():
        ours = (
            ""
            if pd.isna(row.ours)
            else f"{100 * row.ours:.1f} [{100 * row.ci_low:.1f}, {100 * row.ci_high:.1f}]"
        )
        change = "" if pd.isna(row.difference) else points(row.difference)
        rows.append(
            [row.model, row.method, row.position, f"{100 * row.paper:.1f}", ours, change, row.verdict]
        )
    return header, rows


def with_subsets(metrics: pd.DataFrame, subsets: pd.DataFrame | None) -> pd.DataFrame:
    """metrics.csv rows and, with their name as position, those of subsets.csv: what a paper's table is
    compared with."""
    if subsets is None:
        return metrics
    named = subsets[subsets["subset"] != "all"].rename(columns={"subset": "position"}).drop(columns="kind")
    return pd.concat([metrics, named.assign(depth=np.nan)], ignore_index=True)


def compare_with_reference(metrics: pd.DataFrame, reference: list[dict[str, Any]]) -> pd.DataFrame:
    """Put a paper's numbers beside ours.

    Args:
        metrics: metrics.csv or summary.csv rows.
        reference: Rows with model, method, task, position (`all`, a 0-based index, or a depth such as `25%`),
            metric, value (0..1). A depth matches the nearest one measured within 2.5 points. Any further key
            that is a column of `metrics` (a swept one, say) must match too.

    Returns:
        One row per reference row and match: model, method, task, position, metric, paper, ours, ci_low,
        ci_high, difference (ours - paper), verdict: `agrees` if the paper's number lies in our interval, else
        `differs`; `other model, not comparable`, `not measured` or `no interval` where that cannot be said.
    """
    named = ["model", "method", "task", "position", "metric"]
    out = []
    for row in reference:
        same = {
            c: str(v)
            for c, v in row.items()
            if c in metrics and c not in ("position", *NUMBER_COLUMNS, "n", "depth")
        }
        match = metrics
        for column, value in same.items():
            match = match[match[column].map(_plain) == _plain(value)]
        match = _at(match, str(row["position"]))
        line = {**{c: str(row[c]) for c in named}, "paper": float(row["value"])}
        none = dict.fromkeys(("ours", "ci_low", "ci_high", "difference"), np.nan)
        if str(row["model"]) not in set(metrics["model"].astype(str)):
            out.append({**line, **none, "verdict": OTHER_MODEL})
        elif match.empty:
            out.append({**line, **none, "verdict": "not measured"})
        for value, low, high in match[list(NUMBER_COLUMNS)].itertuples(index=False):
            verdict = (
                "no interval"
                if pd.isna(low) or pd.isna(high)
                else "agrees"
                if low <= line["paper"] <= high
                else "differs"
            )
            ours = {
                "ours": value,
                "ci_low": low,
                "ci_high": high,
                "difference": value - line["paper"],
                "verdict": verdict,
            }
            out.append({**line, **ours})
    return pd.DataFrame(out, columns=[*named, "paper", "ours", "ci_low", "ci_high", "difference", "verdict"])


def _at(rows: pd.DataFrame, position: str) -> pd.DataFrame:
    """Rows at a position label: equal text, or for `25%` the nearest depth within the tolerance."""
    if not position.endswith("%"):
        return rows[rows["position"].astype(str) == position]
    far = (pd.to_numeric(rows["depth"]) - float(position[:-1]) / 100).abs()
    return rows[(far <= TOLERANCE) & (far == far.min())]


def _plain(value: Any) -> str:
    """Text by which two values are compared: 0, 0.0 and `0` are equal."""
    try:
        return f"{float(value):g}"
    except (TypeError, ValueError):
        return str(value)


def swept_columns(summary: pd.DataFrame) -> list[str]:
    """The swept columns of a summary: those of model, method and task that vary, and what stands between
    `run` and `model`."""
    front = list(summary.columns[: list(summary.columns).index("model")])
    swept = [c for c in front if c != "run"]
    rows = summary[summary["method"] != UNMODIFIED] if (summary["method"] != UNMODIFIED).any() else summary
    named = [c for c in ("model", "method", "task") if rows[c].nunique() > 1 and f"{c} (swept)" not in swept]
    return [*named, *swept] or (["seed"] if rows["seed"].nunique() > 1 else ["method"])


def sweep_table(summary: pd.DataFrame, axes: list[str]) -> tuple[list[str], list[list[str]], str]:
    """Header, rows and the sentence of a sweep: how average and position bias run, and how many settings
    change the first."""
    rows, settings, label = sweep_plots.with_setting(summary, axes)
    table: list[list[str]] = []
    low_high: list[tuple[float, str]] = []
    biases: list[tuple[float, str]] = []
    tally = {"raise": 0, "lower": 0, "do not reliably change": 0}
    for setting in settings:
        here = rows[rows["setting"] == setting]
        modified = here[here["method"] != UNMODIFIED]
        point = overall(here if modified.empty else modified)
        base, change = (
            overall(sweep_plots.unmodified_of(rows, setting)),
            overall(modified, "difference").dropna(subset="ci_low"),
        )
        cells: list[Any] = [next(frame.itertuples(), None) for frame in (point, base, change)]
        if cells[0] is not None:
            low_high.append((cells[0].value, setting))
        if cells[2] is not None:
            better = (
                "raise"
                if cells[2].ci_low > 0
                else "lower"
                if cells[2].ci_high < 0
                else "do not reliably change"
            )
            tally[better] += 1
        run = ", ".join(dict.fromkeys(map(str, here["run"]))) if "run" in here else ""
        n = "" if cells[0] is None else str(cells[0].n)
        bias = next(overall(here if modified.empty else modified, "position_bias").itertuples(), None)
        if bias is not None:
            biases.append((bias.value, setting))
        table.append(
            [setting, *map(_cell, [*cells, bias], ("{:.1f}", "{:.1f}", "{:+.1f}", "{:.1f}")), n, run]
        )
    if not low_high:
        return [], [], "Nothing was scored in this sweep."
    (low, at_low), (high, at_high) = min(low_high), max(low_high)
    sentence = f"Over {len(settings)} settings of {label}, the average runs from {_pct(low)} ({at_low}) to {_pct(high)} ({at_high})"
    verdicts = ", ".join(f"{count} {word}" for word, count in tally.items() if count)
    sentence += (
        f"; of {sum(tally.values())} compared with the unmodified model, {verdicts} it" if verdicts else ""
    )
    header = [label, metric_name(summary), "unmodified", "difference", "position bias", "n", "run"]
    if biases:
        (low, at_low), (high, at_high) = min(biases), max(biases)
        sentence += (
            f"; the position bias from {points(low)[1:]} ({at_low}) to {points(high)[1:]} points ({at_high})"
        )
    else:
        header, table = [*header[:4], *header[5:]], [[*row[:4], *row[5:]] for row in table]
    return header, table, sentence + "."


def _cell(row: Any, form: str, scale: float = 100) -> str:
    """A share as `76.6 [72.1, 80.5]` in %, empty where there is none."""
    if row is None:
        return ""
    ends = form.replace("+", "")
    interval = (
        ""
        if pd.isna(row.ci_low)
        else f" [{ends.format(scale * row.ci_low)}, {ends.format(scale * row.ci_high)}]"
    )
    return form.format(scale * row.value) + interval


def _pct(share: float) -> str:
    return f"{100 * share:.1f} %"


def points(share: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return f"{100 * share:+.1f}"
