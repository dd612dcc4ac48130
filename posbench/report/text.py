"""The numbers of a run as sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from posbench.report.tables import bias_table, limits, pct, points
from posbench.stats.findings import VERDICTS
from posbench.stats.frames import UNMODIFIED, at_positions, metric_name, overall

FEW = 4  # claims of one verdict that a sentence names
SOURCE = r" \([^()]*\d[^()]*\)$"
"""The source at the end of a claim, as ``(Yu et al. 2025, Figure 3)``."""


def short(text: str) -> str:
    """A cell with its interval in whole points, for 80 columns."""
    # A list of numbers, such as a swept setting, is no interval.
    pattern = r"(?<=\d) \[(-?[\d.]+), (-?[\d.]+)\]$"
    return re.sub(pattern, lambda m: f" [{float(m[1]):.0f}, {float(m[2]):.0f}]", text)


def headline(metrics: pd.DataFrame | None) -> str:
    """The result in plain words, from metrics.csv rows of a run, or None when nothing was scored. A method
    raises or lowers the average only if the 95 % interval of the difference excludes zero."""
    if metrics is None or overall(metrics).empty:
        return "Nothing was scored in this run."
    average: Any = overall(metrics).drop_duplicates("method").set_index("method")
    verb = "answers" if metric_name(metrics) == "accuracy" else "scores"
    said = [_unmodified(metrics, average, verb)] if UNMODIFIED in average.index else []
    said += [_verdict(metrics, average, str(name), verb) for name in average.index if name != UNMODIFIED]
    header, bias = bias_table(metrics)
    if bias:
        cells = zip(header[1:], bias[0][1:], strict=True)
        listed = [f"{name} {cell}" for name, cell in cells if cell and not cell.startswith("at the ")]
        said += [f"position bias in points: {', '.join(listed)}"] if listed else []
        said += filter(None, [limits(metrics)])
    return "; ".join(said) + "."


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
    change, before = difference.iloc[0], pct(average.at[UNMODIFIED, "value"])
    low, high = 100 * change["ci_low"], 100 * change["ci_high"]
    facts = f"{points(change['value'])} points, 95 % interval {low:.1f} to {high:.1f}, n = {change['n']}"
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
    """The method as it ran, from ``method.json``: its name, its parameters, and the source of constants."""
    own = {k: v for k, v in method.items() if k not in ("name", "source")}
    values = []
    for name, part in method.get("parts", {"": own}).items():
        text = ", ".join(f"{k} {v}" for k, v in part.items() if v is not None)
        values.append(f"{name} ({text})" if name else text)
    constants = f"; constants: {method['source']}" if "source" in method else ""
    return f"{method['name']}: {'; '.join(values)}{constants}"


def verdicts(findings: pd.DataFrame) -> str:
    """How a study's claims fared, the paper's and our controls apart."""
    said = []
    for kind, words in {"paper": "Claims of the paper", "control": "Our controls"}.items():
        own = findings[findings["kind"] == kind]
        corrected = " (Holm-corrected within the study)" if own["p_holm"].notna().sum() > 1 else ""
        if len(own):
            said.append(f"{words}: {tally(own['verdict'])}{corrected}.")
    return " ".join(said)


def decided(findings: pd.DataFrame) -> str:
    """The paper's claims that are decided, each with the models it is said of, and how many are not; our
    controls where there are no others."""
    own = findings[findings["kind"] == "paper"]
    own, every = (own if len(own) else findings).fillna({"model": ""}), findings["model"].nunique()
    said = []
    for verdict in ("holds", "contradicted"):
        claims: dict[str, list[str]] = {}
        for row in own[own["verdict"] == verdict].itertuples():
            claims.setdefault(re.sub(SOURCE, "", row.claim), []).append(row.model)
        # Those of the most models come first.
        ranked = sorted(claims.items(), key=lambda pair: -len(set(pair[1])))
        named = [f"{claim}{_on(list(dict.fromkeys(models)), every)}" for claim, models in ranked[:FEW]]
        named += [f"{len(claims) - FEW} more"] * (len(claims) > FEW)
        said += [f"{verdict.capitalize()}: {'; '.join(named)}."] if named else []
    undecided = tally(own["verdict"], VERDICTS[2:])
    said += [f"{'Beside these: ' if said else ''}{undecided}."] if undecided else []
    return " ".join(said)


def _on(models: Sequence[str], every: int) -> str:
    """`` (tiny, tiny_b)``: the models, where not all of several are meant."""
    if not any(models) or every == 1:
        return ""
    whole = "both" if every == 2 else f"all {every}"
    return f" ({whole} models)" if len(models) == every else f" ({', '.join(models)})"


def tally(verdicts: pd.Series, words: Sequence[str] = VERDICTS) -> str:
    """`3 hold, 1 inconclusive`: how often each verdict occurs, in the order of the words."""
    counts, plural = verdicts.value_counts(), {"holds": "hold", "agrees": "agree", "differs": "differ"}
    there = [(counts[name], name) for name in words if name in counts]
    return ", ".join(f"{n} {plural.get(name, name) if n > 1 else name}" for n, name in there)
