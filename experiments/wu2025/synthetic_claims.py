"""Claims of Wu et al. 2025 on their trained networks, compared with ours; thresholds for a re-implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import scipy

from posbench.files.atomic import Row
from posbench.late import pd
from posbench.stats import reference
from posbench.stats.bootstrap import Estimate
from posbench.stats.findings import Finding, join_findings
from wu2025 import synthetic_tables as tables

GAPS = ["FM", "FL", "ML"]
"""Names in the claims of the gaps [first, middle], [first, last], [middle, last]."""
CONDITION = ["mask", "pe", "depth", "residual", "bias"]
MIN_ITERATIONS = (
    1000  # below, nothing is learned; where a claim needs more, its row says so
)
SINK_FIGURES = {"causal": "Figure 10", "window": "Figure 11", "prefix": "Figure 12"}


def findings(gaps: pd.DataFrame, sinks: pd.DataFrame) -> list[Finding]:
    """Claims that Wu et al. 2025 read off their figures, for the trained conditions, each at its end.

    The claims on gaps are in ``wu2025_claims.csv``. Of several combinations of gaps the smallest counts, for
    ``within`` the largest in size.
    """
    ends = tables.mean_over_seeds(tables.last_iterations(gaps))
    columns = [*CONDITION, "minus", "smallest_of", "direction", "least"]
    claims = reference.read_table("wu2025_claims.csv", *columns).to_dict("records")
    judged = [_judge(ends, claim) for claim in claims]
    return [
        *[finding for finding in judged if finding],
        *_u_shape(ends),
        *_sinks(sinks),
    ]


def _judge(ends: pd.DataFrame, claim: Mapping[str, Any]) -> Finding | None:
    """Judge a row of the claims; None where a condition was not trained.

    Args:
        ends: Gaps at the end of the trainings, means over seeds.
        claim: ``claim``, ``statistic``, the `CONDITION`; ``minus``: changes of the condition whose gaps are
            subtracted (``depth=2``); ``smallest_of``: combinations of gaps (``FM, -ML``); ``direction``: above,
            below or within; ``bound``; ``least``: iterations below which it may fail for lack of training.
    """
    conditions = [{name: claim[name] for name in CONDITION}]
    if claim["minus"]:
        changes = dict(change.split("=") for change in claim["minus"].split())
        conditions.append(conditions[0] | changes)
    networks = [_gaps(ends, condition) for condition in conditions]
    if any(network.empty for network in networks):
        return None
    gap = networks[0]["gap"]
    if len(networks) > 1:
        gap = gap - networks[1]["gap"]
    direction = claim["direction"]
    values = {text: _evaluate(text, gap) for text in claim["smallest_of"].split(", ")}
    decisive = min(values, key=lambda text: values[text])
    if direction == "within":
        decisive = max(values, key=lambda text: abs(values[text]))
    value = values[decisive]
    # Half-widths of intervals add up, as the parts share test sequences.
    total = decisive.replace("-", "+")
    half = _evaluate(total, sum(network["half"] for network in networks))
    n = _evaluate(total, sum(network["n"] for network in networks))
    estimate = Estimate(value, value - half, value + half, int(n))
    bound = float(claim["bound"])
    low, high = {
        "above": (bound, inf),
        "below": (-inf, bound),
        "within": (-bound, bound),
    }[direction]
    note = "; ".join(dict.fromkeys(network["note"].iloc[0] for network in networks))
    finding = Finding.within(
        claim["claim"], claim["statistic"], estimate, low, high, note
    )
    # With more training a claim that fails may hold.
    iterations = min(network["trained"].iloc[0] for network in networks)
    fails_early = iterations < int(claim["least"]) and finding.verdict != "holds"
    return _tested_from(iterations < MIN_ITERATIONS or fails_early, finding)


def _evaluate(text: str, values: Mapping[str, float]) -> float:
    """Value of an expression such as ``FL - FM - ML``, from the values of its names."""
    return float(pd.eval(text, local_dict=dict(values), engine="python"))


def _gaps(ends: pd.DataFrame, settings: Mapping[str, str]) -> pd.DataFrame:
    """FM, FL and ML of a condition; of two scales the paper's.

    Returns:
        Rows by `GAPS` with gap, half (width of the interval), n, note, trained (iterations, 0 for a network
        that guesses); empty where the condition was not trained.
    """
    rows = _select(ends, {"vocabulary": "gaussian", **settings}).set_index("pair")
    counts = rows["scale"].value_counts()
    pairs = len(tables.PAIR_NAMES)
    scales = [scale for scale in ("paper", "code") if counts.get(scale) == pairs]
    if not scales:
        return rows[:0]
    gaps = rows[rows["scale"] == scales[0]]
    gaps = gaps.loc[tables.PAIR_NAMES].set_axis(GAPS)
    network = gaps.iloc[0]
    seeds = "1 seed" if network["seeds"] == 1 else f"{network['seeds']} seeds"
    note = (
        f"{network['iteration']:,} iterations, {seeds}, loss {network['train_loss']:.2f}"
        f"{tables.scale_suffix(network)}; interval: of the test sequences, not of the seeds"
    )
    guesses = network["train_loss"] > tables.CHANCE
    return gaps.assign(
        half=(gaps["ci_high"] - gaps["ci_low"]) / 2,
        note=note,
        trained=0 if guesses else network["iteration"],
    )


def _select(frame: pd.DataFrame, settings: Mapping[str, str]) -> pd.DataFrame:
    """The rows with these settings, given as text."""
    texts = frame[list(settings)].astype(str)
    return frame[(texts == pd.Series(settings)).all(axis=1)]


def _tested_from(too_early: bool, finding: Finding) -> Finding:
    """The finding, without a verdict where networks were trained too little."""
    return finding.not_testable("too little training") if too_early else finding


def _u_shape(ends: pd.DataFrame) -> list[Finding]:
    """Section 5.2: the middle is lost only where the data favour both ends."""
    claim = "The middle is lost only if the data favour both ends (Section 5.2, Figures 2, 3 and 6 to 8)"
    rule = {
        "claim": claim,
        "minus": "",
        "smallest_of": "FM, -ML",
        "direction": "below",
        "bound": tables.NEAR,
        "least": MIN_ITERATIONS,
    }
    gaussian = ends[ends["vocabulary"] == "gaussian"]
    without_both_ends = gaussian["bias"].isin(["none", "first", "middle", "last"])
    conditions = gaussian.loc[without_both_ends, tables.SETTINGS].drop_duplicates()
    judged = []
    for condition in conditions.to_dict("records"):
        settings = {name: str(condition[name]) for name in CONDITION}
        statistic = tables.condition_label(condition)
        finding = _judge(ends, {**rule, **settings, "statistic": statistic})
        if finding:
            judged.append(finding)
    if not judged:
        return []
    worst = max(judged, key=lambda finding: finding.value)
    statistic = (
        f"largest 'smaller of FM and -ML' of {len(judged)} conditions without that bias "
        f"({worst.statistic})"
    )
    return [replace(join_findings(judged, numbers_of=worst), statistic=statistic)]


class _Sink(NamedTuple):
    """Sink metric of the first token under a window mask."""

    window: int
    share: float
    uniform: float  # the share under equal weights
    n: int  # test sequences


def _sinks(sinks: pd.DataFrame) -> list[Finding]:
    """Appendix K.4: sinks are on the mask's centre nodes, by token and by item (two tokens)."""
    plain = sinks[
        (sinks["vocabulary"] == "gaussian")
        & (sinks["bias"] == "none")
        & ~sinks["residual"]
        & (sinks["pe"] == "none")
    ]
    groups = tables.last_iterations(plain).groupby(["depth", "mask"], sort=False)
    findings: list[Finding] = []
    by_window: dict[str, list[_Sink]] = {}
    for (depth, mask), rows in groups:
        kind, _, span = mask.partition(" ")
        if kind not in SINK_FIGURES:
            continue
        claim = f"Attention sinks stand on the centre nodes of the mask (Appendix K.4, {SINK_FIGURES[kind]})"
        equal_weights = tables.uniform_sinks(mask, rows["token"].nunique())
        n = rows.loc[rows["token"] == 0, "n"].sum()
        for column, author, unit, tokens in (
            ("by_entry", "Wu", "token", 1),
            ("by_entry", "Wu", "item", 2),
            ("by_head", "Gu", "token", 1),
        ):
            metric = f"sink metric of {author} et al."
            shares = rows.groupby(rows["token"] // tokens)[column].mean()
            uniform = equal_weights.groupby(equal_weights["token"] // tokens)
            uniform_share = uniform[column].mean()[0]
            # The first half of the sequence, as few queries see late tokens.
            shares = shares.iloc[: len(shares) // 2 + 1]
            centres = 1
            if kind == "prefix":
                centres = max(int(span) // tokens, 1)
            named = f"the first {unit}"
            if centres > 1:
                named = f"the weakest of the first {centres} {unit}s"
            statistic = (
                f"{metric}: {named} minus the strongest other {unit} of the first half, "
                f"{mask}, depth {depth}"
            )
            lead = shares[:centres].min() - shares[centres:].max()
            note = f"first {unit} {shares[0]:.3f}; equal weights would give {uniform_share:.3f}"
            finding = _beyond_noise(claim, statistic, lead, n, note)
            too_early = rows["iteration"].iloc[0] < MIN_ITERATIONS
            findings.append(_tested_from(too_early, finding))
            if kind == "window" and unit == "token":
                sink = _Sink(int(span), shares[0], uniform_share, n)
                statistic = f"{metric} of the first token, depth {depth}"
                by_window.setdefault(statistic, []).append(sink)
    return findings + _window_sinks(by_window)


def _window_sinks(by_window: Mapping[str, Sequence[_Sink]]) -> list[Finding]:
    """Appendix K.4: the widest window against the narrowest, for each metric and depth."""
    claim = "The wider the window, the stronger the sink on the first token (Appendix K.4, Figure 11)"
    findings = []
    for statistic, sinks in by_window.items():
        narrow = min(sinks)
        wide = max(sinks)
        if narrow.window == wide.window:
            continue
        statistic = f"{statistic}: window {wide.window} minus window {narrow.window}"
        note = (
            f"equal weights would give {wide.uniform - narrow.uniform:+.3f}: "
            "few queries see through a narrow window"
        )
        difference = wide.share - narrow.share
        findings.append(_beyond_noise(claim, statistic, difference, wide.n, note))
    return findings


def _beyond_noise(
    claim: str, statistic: str, value: float, n: int, note: str
) -> Finding:
    """Whether a difference of shares of n sequences is above 0: its standard error is at most 1/2 / sqrt(n)."""
    p = 2 * scipy.stats.norm.sf(2 * abs(value) * n**0.5)
    return Finding.tested(value > 0, claim, statistic, (value, n), p, note)


def thresholds(gaps: pd.DataFrame) -> pd.DataFrame:
    """Thresholds for a re-implementation, to be reached by every seed at its last iteration in a range.

    Returns:
        Rows of required, iterations, measured, verdict (yes, no, not run).
    """
    rows: list[Row] = []
    keys = ["network", "scale", *CONDITION, "least", "most"]
    limits = reference.read_table(
        "wu2025_thresholds.csv", *keys, "quantity", "low", "high"
    )
    for key, network_limits in limits.groupby(keys, sort=False):
        row = dict(zip(keys, key, strict=True))
        least = int(row["least"])
        settings = {name: row[name] for name in ("scale", *CONDITION)}
        runs = _select(gaps, {"vocabulary": "gaussian", **settings})
        runs = runs[runs["iteration"].between(least, float(row["most"] or "inf"))]
        ranges = network_limits[["quantity", "low", "high"]].to_numpy()
        texts = []
        passed = []
        for seed, run in runs.groupby("seed"):
            iteration = run["iteration"].max()
            last = run[run["iteration"] == iteration].set_index("pair")
            last = last.loc[tables.PAIR_NAMES]
            novel = last["novel_middle"].iloc[0]
            values = {
                **dict(zip(GAPS, last["gap"], strict=True)),
                "novel_middle": novel,
                "best": last[["acc_ab", "acc_ba"]].max(axis=None),
            }
            gap_text = " / ".join(f"{gap:+.3f}" for gap in last["gap"])
            texts.append(
                f"seed {seed}, {iteration:,}: {gap_text}, novel middle {novel:.2f}"
            )
            passed.append(
                all(
                    float(low) <= _evaluate(quantity, values) <= float(high)
                    for quantity, low, high in ranges
                )
            )
        required = ", ".join(f"{name} {low} to {high}" for name, low, high in ranges)
        window = f"from {least:,}"
        if row["most"]:
            window = f"{least:,} to {int(row['most']):,}"
        verdict = "yes" if all(passed) else "no"
        if not passed:
            verdict = "not run"
        rows.append(
            {
                "required": f"{row['network']}: {required}",
                "iterations": window,
                "measured": "; ".join(texts),
                "verdict": verdict,
            }
        )
    return pd.DataFrame(rows)
