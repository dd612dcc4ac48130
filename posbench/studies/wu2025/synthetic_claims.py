"""What Wu et al. 2025 read off their trained networks, held against ours; thresholds of what to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import scipy

from posbench.late import pd
from posbench.stats import reference
from posbench.stats.bootstrap import Estimate
from posbench.stats.findings import Finding, joint
from posbench.studies.wu2025 import synthetic_tables as tables

GAPS = ["FM", "FL", "ML"]
CONDITION = ["mask", "pe", "depth", "residual", "bias"]
EARLY = 1000  # iterations below which nothing is learned; where a claim needs more, its row says so
SINK_FIGURES = {"causal": "Figure 10", "window": "Figure 11", "prefix": "Figure 12"}


def findings(gaps: pd.DataFrame, sinks: pd.DataFrame) -> list[Finding]:
    """What Wu et al. 2025 read off their figures, for the conditions that were trained, each at its end.

    The claims on gaps stand in ``wu2025_claims.csv``; FM, FL, ML are the gaps [first, middle], [first, last],
    [middle, last]. Of several combinations the smallest counts, for ``within`` the largest in size.
    """
    ends = tables.over_seeds(tables.at_end(gaps))
    told = reference.table(
        "wu2025_claims.csv", *CONDITION, "minus", "smallest_of", "direction", "least"
    )
    judged = [found for row in told.to_dict("records") if (found := _judged(ends, row))]
    return [*judged, *_u_shape(ends), *_sinks(sinks)]


def _judged(ends: pd.DataFrame, claim: Mapping[str, Any]) -> Finding | None:
    """The verdict on a row of the claims; None where a condition was not trained."""
    one = {name: claim[name] for name in CONDITION}
    other = one | dict(part.split("=") for part in claim["minus"].split())
    rows = [_gaps(ends, each) for each in ([one, other] if claim["minus"] else [one])]
    if any(each.empty for each in rows):
        return None
    gap = rows[0]["gap"] - (rows[1]["gap"] if rows[1:] else 0)
    direction = claim["direction"]
    values = {part: _combined(part, gap) for part in claim["smallest_of"].split(", ")}
    best = max(
        values,
        key=lambda part: abs(values[part]) if direction == "within" else -values[part],
    )
    # Half-widths of intervals add up, as the parts share test sequences.
    half, n = (
        _combined(best.replace("-", "+"), sum(each[name] for each in rows))
        for name in ("half", "n")
    )
    value = values[best]
    bound = float(claim["bound"])
    note = "; ".join(dict.fromkeys(each["note"].iloc[0] for each in rows))
    at = Estimate(value, value - half, value + half, int(n))
    bounds = {"above": (bound, inf), "below": (-inf, bound), "within": (-bound, bound)}[
        direction
    ]
    found = Finding.within(claim["claim"], claim["statistic"], at, *bounds, note)
    # With more training a claim that fails may hold.
    trained = min(each["trained"].iloc[0] for each in rows)
    return _unless(
        trained < EARLY or (trained < int(claim["least"]) and found.verdict != "holds"),
        found,
    )


def _combined(text: str, values: Mapping[str, float]) -> float:
    """``FL - FM - ML`` of the values of FM, FL and ML."""
    return float(pd.eval(text, local_dict=dict(values), engine="python"))


def _gaps(ends: pd.DataFrame, settings: Mapping[str, str]) -> pd.DataFrame:
    """FM, FL and ML of a condition, of several scales the paper's; empty where it was not trained."""
    here = _where(ends, {"vocabulary": "gaussian", **settings}).set_index("pair")
    scales = [
        s
        for s in ("paper", "code")
        if (here["scale"] == s).sum() == len(tables.PAIR_NAMES)
    ]
    if not scales:
        return here[:0]
    here = here[here["scale"] == scales[0]].loc[tables.PAIR_NAMES].set_axis(GAPS)
    at = here.iloc[0]
    seeds = f"{at['seeds']} seed{'s' if at['seeds'] > 1 else ''}"
    note = f"{at['iteration']:,} iterations, {seeds}, loss {at['train_loss']:.2f}{tables.scaled(at)}"
    note += "; interval: of the test sequences, not of the seeds"
    # A network that guesses counts as untrained.
    trained = at["iteration"] if at["train_loss"] <= tables.CHANCE else 0
    return here.assign(
        half=(here["ci_high"] - here["ci_low"]) / 2, note=note, trained=trained
    )


def _where(frame: pd.DataFrame, settings: Mapping[str, str]) -> pd.DataFrame:
    """The rows with these settings, given as text."""
    return frame[(frame[list(settings)].astype(str) == pd.Series(settings)).all(axis=1)]


def _unless(early: bool, finding: Finding) -> Finding:
    """A finding that keeps its number, but has no verdict where networks were trained too little."""
    return finding.not_testable("too little training") if early else finding


def _u_shape(ends: pd.DataFrame) -> list[Finding]:
    """Section 5.2: the middle is lost only where the data favour both ends."""
    claim = "The middle is lost only if the data favour both ends (Section 5.2, Figures 2, 3 and 6 to 8)"
    rule = {
        "claim": claim,
        "minus": "",
        "smallest_of": "FM, -ML",
        "direction": "below",
        "least": EARLY,
    }
    others = ends["bias"].isin(["none", "first", "middle", "last"]) & (
        ends["vocabulary"] == "gaussian"
    )
    found = []
    for row in ends.loc[others, tables.SETTINGS].drop_duplicates().to_dict("records"):
        texts = {name: str(row[name]) for name in CONDITION} | {
            "statistic": tables.label(row)
        }
        found.append(_judged(ends, rule | texts | {"bound": tables.NEAR}))
    judged = [each for each in found if each]
    if not judged:
        return []
    worst = max(judged, key=lambda each: each.value)
    words = (
        f"largest 'smaller of FM and -ML' of {len(judged)} conditions without that bias"
    )
    return [
        replace(joint(judged, shown=worst), statistic=f"{words} ({worst.statistic})")
    ]


def _sinks(sinks: pd.DataFrame) -> list[Finding]:
    """Appendix K.4: sinks are on the mask's centre nodes, by token and by item (two tokens).

    Of the first half of the sequence, as few queries see late tokens.
    """
    rows = tables.at_end(
        sinks[(sinks["bias"] == "none") & ~sinks["residual"] & (sinks["pe"] == "none")]
    )
    out = list[Finding]()
    first = dict[str, list[tuple[int, float, float, int]]]()
    for (depth, mask), one in rows.groupby(["depth", "mask"], sort=False):
        kind, _, span = mask.partition(" ")
        if kind not in SINK_FIGURES:
            continue
        claim = f"Attention sinks stand on the centre nodes of the mask (Appendix K.4, {SINK_FIGURES[kind]})"
        level = tables.uniform_sinks(mask, one["token"].nunique())
        n = one.loc[one["token"] == 0, "n"].sum()
        for column, who, size in (
            ("by_entry", "Wu", 1),
            ("by_entry", "Wu", 2),
            ("by_head", "Gu", 1),
        ):
            what = "item" if size == 2 else "token"
            metric = f"sink metric of {who} et al."
            count = max(int(span) // size, 1) if kind == "prefix" else 1
            share, equal = (
                t.groupby(t["token"] // size)[column].mean() for t in (one, level)
            )
            share = share.iloc[: len(share) // 2 + 1]
            named = (
                f"the first {what}"
                if count == 1
                else f"the weakest of the first {count} {what}s"
            )
            words = f"{metric}: {named} minus the strongest other {what} of the first half, "
            words += f"{mask}, depth {depth}"
            note = (
                f"first {what} {share[0]:.3f}; equal weights would give {equal[0]:.3f}"
            )
            found = _beyond_noise(
                claim, words, share[:count].min() - share[count:].max(), n, note
            )
            out.append(_unless(one["iteration"].iloc[0] < EARLY, found))
            if kind == "window" and size == 1:
                same = first.setdefault(
                    f"{metric} of the first token, depth {depth}", []
                )
                same.append((int(span), share[0], equal[0], n))
    claim = "The wider the window, the stronger the sink on the first token (Appendix K.4, Figure 11)"
    for words, shares in first.items():
        (narrow, low, equal_low, _), (wide, high, equal_high, n) = (
            min(shares),
            max(shares),
        )
        by_chance = f"equal weights would give {equal_high - equal_low:+.3f}"
        note = f"{by_chance}: few queries see through a narrow window"
        words = f"{words}: window {wide} minus window {narrow}"
        out += (
            [_beyond_noise(claim, words, high - low, n, note)] if narrow < wide else []
        )
    return out


def _beyond_noise(
    claim: str, statistic: str, value: float, n: int, note: str
) -> Finding:
    """If a difference of shares of n sequences is above 0: its standard error is 1/2 / sqrt(n) at most."""
    p = 2 * scipy.stats.norm.sf(2 * abs(value) * n**0.5)
    return Finding.tested(value > 0, claim, statistic, (value, n), p, note)


def thresholds(gaps: pd.DataFrame) -> pd.DataFrame:
    """What a re-implementation must reach, every seed at its last iteration in a range: yes, no, not run."""
    keys = ["network", "scale", *CONDITION, "least", "most"]
    rows = []
    limits = reference.table("wu2025_thresholds.csv", *keys, "quantity", "low", "high")
    for (network, *settings, least, most), wanted in limits.groupby(keys, sort=False):
        fixed = dict(zip(["scale", *CONDITION], settings, strict=True))
        here = _where(gaps, {"vocabulary": "gaussian", **fixed})
        here = here[here["iteration"].between(int(least), float(most or "inf"))]
        texts = []
        passed = []
        for seed, run in here.groupby("seed"):
            last = (
                run[run["iteration"] == run["iteration"].max()]
                .set_index("pair")
                .loc[tables.PAIR_NAMES]
            )
            at = dict(zip(GAPS, last["gap"], strict=True))
            gap = " / ".join(f"{value:+.3f}" for value in at.values())
            novel = last["novel_middle"].iloc[0]
            at |= {
                "novel_middle": novel,
                "best": last[["acc_ab", "acc_ba"]].max(axis=None),
            }
            texts.append(
                f"seed {seed}, {last['iteration'].iloc[0]:,}: {gap}, novel middle {novel:.2f}"
            )
            ranges = wanted[["quantity", "low", "high"]].to_numpy()
            passed.append(
                all(
                    float(low) <= _combined(q, at) <= float(high)
                    for q, low, high in ranges
                )
            )
        verdict = "not run" if not passed else "yes" if all(passed) else "no"
        required = ", ".join(
            f"{r.quantity} {r.low} to {r.high}" for r in wanted.itertuples()
        )
        window = f"{int(least):,} to {int(most):,}" if most else f"from {int(least):,}"
        rows.append((f"{network}: {required}", window, "; ".join(texts), verdict))
    return pd.DataFrame(rows, columns=["required", "iterations", "measured", "verdict"])
