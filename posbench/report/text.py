"""The numbers of a run as sentences and cells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from posbench.stats.frames import UNMODIFIED, at_positions, metric_name, overall

GROUP = ["model", "task", "seed"]
VERDICTS = ("holds", "does not hold", "not testable here")
BIAS_WORDS = {
    "position_bias": "position bias (std over positions)",
    "gap": "gap (best - worst)",
    "gap_null": "gap if positions did not matter",
    "primacy": "primacy (first - inner)",
    "recency": "recency (last - inner)",
    "middle_drop": "middle drop (ends - lowest inner)",
}


def cell(row: Any, form: str, scale: float = 100) -> str:
    """A share as `76.6 [72.1, 80.5]` in %, empty where there is none."""
    return "" if row is None else form.format(scale * row.value) + interval(row, form.replace("+", ""), scale)


def interval(row: Any, form: str, scale: float = 1) -> str:
    """` [72.1, 80.5]`, empty without an interval."""
    low, high = row.ci_low, row.ci_high
    return "" if pd.isna(low) else f" [{form.format(scale * low)}, {form.format(scale * high)}]"


def pct(share: float) -> str:
    """A share in %."""
    return f"{100 * share:.1f} %"


def points(share: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return f"{100 * share:+.1f}"


def short(text: str) -> str:
    """A cell with its interval in whole points, for 80 columns; metrics.csv and report.html keep the
    decimals."""
    # A list of numbers, such as a swept setting, is no interval.
    pattern = r"(?<=\d) \[(-?[\d.]+), (-?[\d.]+)\]$"
    return re.sub(pattern, lambda m: f" [{float(m[1]):.0f}, {float(m[2]):.0f}]", text)


def headline(metrics: pd.DataFrame | None, bias: tuple[list[str], list[list[str]]] | None = None) -> str:
    """The result in plain words, one or two sentences for each model, task and seed.

    Args:
        metrics: metrics.csv rows, or None when nothing was scored.
        bias: Header and first row of the table of position bias, where there is one model, task and seed.

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
        verb = "answers" if metric_name(rows) == "accuracy" else "scores"
        parts = [_unmodified(rows, average, verb)] if UNMODIFIED in average.index else []
        parts += [
            _verdict(rows, average, str(method), verb) for method in average.index if method != UNMODIFIED
        ]
        if bias and bias[1] and not many:
            cells = zip(bias[0][1:], bias[1][0][1:], strict=True)
            listed = ", ".join(f"{name} {cell}" for name, cell in cells if cell)
            parts.append(f"position bias in points: {listed}")
        sentences.append(where + "; ".join(parts) + ".")
    return " ".join(sentences)


def _unmodified(rows: pd.DataFrame, average: Any, verb: str) -> str:
    """How the unmodified model does: at the ends and inside, and on average where it is alone."""
    base = at_positions(rows)
    base = base[base["method"] == UNMODIFIED].sort_values("depth")
    mean = f"{pct(average.at[UNMODIFIED, 'value'])} on average (n = {average.at[UNMODIFIED, 'n']})"
    if len(base) > 2:
        ends, worst = (base["value"].iloc[0] + base["value"].iloc[-1]) / 2, base["value"].iloc[1:-1].min()
        curve = f"{pct(ends)} at the ends and {pct(worst)} at its worst inner position"
        mean = f"{curve}, {mean}" if len(average) == 1 else curve
    return f"The unmodified model {verb} {mean}"


def _verdict(rows: pd.DataFrame, average: Any, method: str, verb: str) -> str:
    """What a method does to the average, as far as the interval of the difference allows to say."""
    after, n = pct(average.at[method, "value"]), average.at[method, "n"]
    difference = overall(rows, "difference")
    difference = difference[difference["method"] == method].dropna(subset="ci_low")
    if UNMODIFIED not in average.index or difference.empty:
        return f"{method} {verb} {after} on average (n = {n}; no paired comparison was recorded)"
    change = difference.iloc[0]
    low, high = 100 * change["ci_low"], 100 * change["ci_high"]
    facts = f"{points(change['value'])} points, 95 % interval {low:.1f} to {high:.1f}, n = {change['n']}"
    before = pct(average.at[UNMODIFIED, "value"])
    if low > 0 or high < 0:
        return f"{method} {'raises' if low > 0 else 'lowers'} the average from {before} to {after} ({facts})"
    return f"{method} makes no reliable change to the average: {before} before, {after} after ({facts})"


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


def verdicts(findings: pd.DataFrame) -> str:
    """How a study's claims fared, in one sentence."""
    counts = findings["verdict"].value_counts()
    listed = ", ".join(f"{counts[name]} {name}" for name in VERDICTS if name in counts)
    return f"Claims of the paper: {listed}."
