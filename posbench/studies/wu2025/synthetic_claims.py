"""What Wu et al. 2025 read off their trained networks, held against ours; thresholds of a re-implementation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from posbench.stats import reference
from posbench.stats.bootstrap import Array, Estimate
from posbench.stats.findings import Finding
from posbench.studies.wu2025 import synthetic_tables as tables

CONDITION = ["mask", "pe", "depth", "residual", "bias"]
"""Columns of the conditions of a claim."""
EARLY = 1000
"""Iterations below which nothing is learned; where a claim needs more, its table says so."""
SINK_FIGURES = {"causal": "Figure 10", "window": "Figure 11", "prefix": "Figure 12"}


def findings(gaps: pd.DataFrame, sinks: pd.DataFrame) -> list[Finding]:
    """What Wu et al. 2025 read off their figures, for the conditions that were trained, each at its end.

    The claims on gaps stand in ``wu2025_claims.csv``. FM, FL, ML are the gaps [first, middle], [first, last], [middle,
    last]; the smallest of several combinations counts, for ``within`` the largest in size.
    """
    ends = tables.over_seeds(tables.at_end(gaps))
    told = reference.table(
        "wu2025_claims.csv", "claim", "statistic", *CONDITION, "minus", "smallest_of", "least"
    )
    judged = [found for row in told.to_dict("records") if (found := _judged(ends, row))]
    return [*judged, *_u_shape(ends), *_sinks(sinks)]


def _judged(ends: pd.DataFrame, claim: Mapping[str, Any]) -> Finding | None:
    """The verdict on a row of the claims, from the gaps at the end; None where a condition was not trained."""
    one = {name: claim[name] for name in CONDITION}
    other = one | dict(part.split("=") for part in claim["minus"].split())
    rows = [_gaps(ends, each) for each in ([one, other] if claim["minus"] else [one])]
    if any(each.empty for each in rows):
        return None
    parts = np.array([_combination(text) for text in claim["smallest_of"].split(", ")])
    values = parts @ (rows[0]["gap"].to_numpy() - (rows[1]["gap"].to_numpy() if rows[1:] else 0))
    best = int(np.abs(values).argmax() if claim["direction"] == "within" else values.argmin())
    value, bound, size = float(values[best]), float(claim["bound"]), np.abs(parts[best])
    # Half-widths of intervals add up, as the parts share test sequences.
    half = sum(float(size @ (each["ci_high"] - each["ci_low"]).to_numpy()) / 2 for each in rows)
    at = Estimate(value, value - half, value + half, sum(int(size @ each["n"].to_numpy()) for each in rows))
    above, below, within = at.ci_low > bound, at.ci_high < bound, abs(value) <= bound
    holds = {"above": above, "below": below, "within": within}[claim["direction"]]
    # A network that guesses counts as untrained; with more training a claim that fails may hold.
    trained = min(each["iteration"].iloc[0] * (each["train_loss"].iloc[0] <= tables.CHANCE) for each in rows)
    early = trained < EARLY or (trained < int(claim["least"]) and not holds)
    note = "; ".join(dict.fromkeys(map(_trained, rows)))
    return _unless(early, Finding.that(holds, claim["claim"], claim["statistic"], at, note))


def _combination(text: str) -> Array:
    """``FL - FM - ML`` as factors of FM, FL and ML."""
    factors = dict.fromkeys(("FM", "FL", "ML"), 0.0)
    for part in text.replace("- ", "-").split():
        factors[part.lstrip("-")] = -1.0 if part.startswith("-") else 1.0
    return np.array(list(factors.values()))


def _gaps(ends: pd.DataFrame, settings: Mapping[str, str]) -> pd.DataFrame:
    """The three gaps of a condition, of several data scales the paper's; empty where it was not trained."""
    fixed = {"vocabulary": "gaussian", **settings}
    here = ends[(ends[list(fixed)].astype(str) == pd.Series(fixed)).all(axis=1)].set_index("pair")
    scales = [s for s in ("paper", "code") if (here["scale"] == s).sum() == len(tables.PAIR_NAMES)]
    return here[here["scale"] == scales[0]].loc[tables.PAIR_NAMES] if scales else here[:0]


def _trained(rows: pd.DataFrame) -> str:
    at = rows.iloc[0]
    seeds = f"{at['seeds']} seed{'s' if at['seeds'] > 1 else ''}"
    code = ", std 1/D" if at["scale"] == "code" else ""
    return f"{at['iteration']:,} iterations, {seeds}, loss {at['train_loss']:.2f}{code}"


def _unless(early: bool, finding: Finding) -> Finding:
    """A finding that keeps its number, but has no verdict where networks were trained too little."""
    return replace(finding, verdict="not testable here") if early else finding


def _u_shape(ends: pd.DataFrame) -> list[Finding]:
    """Section 5.2: the middle is lost only where the data favour both ends."""
    claim = "The middle is lost only if the data favour both ends (Section 5.2, Figures 2, 3 and 6 to 8)"
    rule = {"claim": claim, "minus": "", "smallest_of": "FM, -ML", "direction": "below", "bound": tables.NEAR}
    others = ends["bias"].isin(["none", "first", "middle", "last"]) & (ends["vocabulary"] == "gaussian")
    found = []
    for row in ends.loc[others, tables.SETTINGS].drop_duplicates().to_dict("records"):
        condition = {name: str(row[name]) for name in CONDITION}
        each = _judged(ends, rule | condition | {"statistic": tables.label(row), "least": EARLY})
        found += [each] if each else []
    if not found:
        return []
    worst = max(found, key=lambda each: each.value)
    words = (
        f"largest 'smaller of FM and -ML' of {len(found)} conditions without that bias ({worst.statistic})"
    )
    return [replace(worst, statistic=words)]


def _sinks(sinks: pd.DataFrame) -> list[Finding]:
    """Appendix K.4: sinks are on the centre nodes of the mask.

    Within the first half of the sequence, as late tokens average few queries; token by token, and item by item, an
    item being two tokens, its vector and its label.
    """
    rows = tables.at_end(sinks[(sinks["bias"] == "none") & ~sinks["residual"] & (sinks["pe"] == "none")])
    out, first = list[Finding](), dict[tuple[str, int], list[tuple[int, float, float, int]]]()
    for (depth, mask), one in rows.groupby(["depth", "mask"], sort=False):
        kind, _, span = str(mask).partition(" ")
        if kind not in SINK_FIGURES:
            continue
        claim = f"Attention sinks stand on the centre nodes of the mask (Appendix K.4, {SINK_FIGURES[kind]})"
        level, n = (
            tables.uniform_sinks(str(mask), one["token"].nunique()),
            int(one.loc[one["token"] == 0, "n"].sum()),
        )
        for column, who, size in (("by_entry", "Wu", 1), ("by_entry", "Wu", 2), ("by_head", "Gu", 1)):
            count = max(int(span) // size, 1) if kind == "prefix" else 1
            share, equal = (t.groupby(t["token"] // size)[column].mean() for t in (one, level))
            share = share.iloc[: len(share) // 2 + 1]
            value, what = (
                share.iloc[:count].min() - share.iloc[count:].max(),
                "token" if size == 1 else "item",
            )
            named = f"the first {what}" if count == 1 else f"the weakest of the first {count} {what}s"
            words = f"sink metric of {who} et al.: {named} minus the strongest other {what} of the first half"
            note = f"first {what} {share[0]:.3f}; equal weights would give {equal[0]:.3f}"
            found = _beyond_noise(claim, f"{words}, {mask}, depth {depth}", value, n, note)
            out.append(_unless(one["iteration"].iloc[0] < EARLY, found))
            if kind == "window" and size == 1:
                first.setdefault((who, int(depth)), []).append((int(span), share[0], equal[0], n))
    claim = "The wider the window, the stronger the sink on the first token (Appendix K.4, Figure 11)"
    for (who, depth), shares in first.items():
        (narrow, low, equal_low, _), (wide, high, equal_high, n) = min(shares), max(shares)
        where = f"first token: window {wide} minus window {narrow}, depth {depth}"
        note = f"equal weights would give {equal_high - equal_low:+.3f}: few queries see a narrow window's tokens"
        if narrow < wide:
            out.append(
                _beyond_noise(claim, f"sink metric of {who} et al. of the {where}", high - low, n, note)
            )
    return out


def _beyond_noise(claim: str, statistic: str, value: float, n: int, note: str) -> Finding:
    """Whether a difference of shares of n sequences is above three standard errors, at most."""
    return Finding.that(value > 1.5 / n**0.5, claim, statistic, (value, n), note)


def thresholds(gaps: pd.DataFrame) -> pd.DataFrame:
    """What an independent re-implementation reached, held against every seed at its last iteration in a range.

    Returns:
        required, iterations, measured (a text per seed), verdict (``yes``, ``no``, ``not run``).
    """
    keys, rows = ["network", "scale", *CONDITION, "least", "most"], []
    limits = reference.table("wu2025_thresholds.csv", *keys, "quantity", "low", "high")
    for key, wanted in limits.groupby(keys, sort=False):
        at = dict(zip(keys, key, strict=True))
        fixed = {"vocabulary": "gaussian", **{name: at[name] for name in ("scale", *CONDITION)}}
        here = gaps[(gaps[list(fixed)].astype(str) == pd.Series(fixed)).all(axis=1)]
        here = here[here["iteration"].between(int(at["least"]), float(at["most"] or "inf"))]
        texts, passed = [], []
        for seed, run in here.groupby("seed"):
            last = run[run["iteration"] == run["iteration"].max()].set_index("pair").loc[tables.PAIR_NAMES]
            told = {
                q: float(_combination(q) @ last["gap"]) for q in wanted["quantity"] if "M" in q or "L" in q
            }
            told |= {"novel accuracy in the middle": last["novel_middle"].iloc[0]}
            told |= {"better set": last[["acc_ab", "acc_ba"]].max(axis=None)}
            fm, fl, ml = last["gap"]
            text = f"seed {seed}, {last['iteration'].iloc[0]:,}: {fm:+.3f} / {fl:+.3f} / {ml:+.3f}, novel middle "
            texts.append(f"{text}{last['novel_middle'].iloc[0]:.2f}")
            passed.append(all(float(r.low) <= told[r.quantity] <= float(r.high) for r in wanted.itertuples()))
        verdict = "not run" if not passed else "yes" if all(passed) else "no"
        required = ", ".join(f"{r.quantity} {r.low} to {r.high}" for r in wanted.itertuples())
        window = (
            f"{int(at['least']):,} to {int(at['most']):,}" if at["most"] else f"from {int(at['least']):,}"
        )
        rows.append((f"{at['network']}: {required}", window, "; ".join(texts), verdict))
    return pd.DataFrame(rows, columns=["required", "iterations", "measured", "verdict"])
