"""What Wu et al. 2025 read off their trained networks, held against ours, and the thresholds of a
re-implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd

from posbench.studies.base import Finding, Verdict
from posbench.studies.wu2025.synthetic_tables import (
    CHANCE,
    HALF,
    NEAR,
    PAIR_NAMES,
    PE_WORDS,
    SETTINGS,
    ZERO,
    at_end,
    label,
    over_seeds,
    uniform_sinks,
)
from posbench.studies.wu2025.training import PAIRS


@dataclass(frozen=True)
class _Gap:
    """A linear combination of gaps with a 95 % interval; half-widths add up, as the parts share test
    sequences."""

    value: float
    half: float
    n: int
    iteration: int
    note: str

    def __add__(self, other: _Gap) -> _Gap:
        note = "; ".join(dict.fromkeys((self.note, other.note)))
        iteration = min(self.iteration, other.iteration)
        return _Gap(self.value + other.value, self.half + other.half, self.n + other.n, iteration, note)

    def __neg__(self) -> _Gap:
        return replace(self, value=-self.value)


class _Ends:
    """Gaps of every condition at its end, looked up by settings; of several data scales the paper's."""

    def __init__(self, gaps: pd.DataFrame) -> None:
        self.table = over_seeds(at_end(gaps))

    def gaps(self, **settings: Any) -> dict[str, _Gap] | None:
        """FM, FL and ML of a condition; None where it was not trained."""
        rows = self.table
        for name, value in {"vocabulary": "gaussian", **settings}.items():
            rows = rows[rows[name] == value]
        for scale in ("paper", "code"):
            chosen = rows[rows["scale"] == scale].set_index("pair")
            if len(chosen) == len(PAIRS):
                return {
                    letter: _Gap(
                        at.gap,
                        (at.ci_high - at.ci_low) / 2,
                        int(at.n),
                        self._trained(at),
                        self._note(at, scale),
                    )
                    for letter, at in zip(
                        ("FM", "FL", "ML"), (chosen.loc[pair] for pair in PAIR_NAMES), strict=True
                    )
                }
        return None

    @staticmethod
    def _trained(at: Any) -> int:
        """Iterations; a network that guesses still counts as untrained."""
        return int(at.iteration) if at.train_loss <= CHANCE else 0

    @staticmethod
    def _note(at: Any, scale: str) -> str:
        seeds = f"{at.seeds} seed{'s' if at.seeds > 1 else ''}"
        return f"{at.iteration:,} iterations, {seeds}, loss {at.train_loss:.2f}" + (
            ", std 1/D" if scale == "code" else ""
        )


Direction = Literal["above", "below", "within"]


EARLY, LATE = 1000, 60_000
"""Iterations below which nothing is learned yet, and from which on matching by content may be expected of
RoPE."""


def _finding(
    claim: str, statistic: str, gap: _Gap, direction: Direction, bound: float = 0.0, least: int = EARLY
) -> Finding:
    """The verdict on a gap; where it was trained for fewer than ``least`` iterations, a claim that fails is
    not testable."""
    low, high = gap.value - gap.half, gap.value + gap.half
    holds = {"above": low > bound, "below": high < bound, "within": -bound <= gap.value <= bound}[direction]
    verdict: Verdict = "holds" if holds else "does not hold"
    if gap.iteration < EARLY or (gap.iteration < least and not holds):
        verdict = "not testable here"
    return Finding(
        claim=claim,
        statistic=statistic,
        value=gap.value,
        low=low,
        high=high,
        n=gap.n,
        verdict=verdict,
        note=gap.note,
    )


def _smaller(*gaps: _Gap) -> _Gap:
    return min(gaps, key=lambda gap: gap.value)


def _largest(*gaps: _Gap) -> _Gap:
    return max(gaps, key=lambda gap: abs(gap.value))


def findings(gaps: pd.DataFrame, sinks: pd.DataFrame) -> list[Finding]:
    """What Wu et al. 2025 read off their figures, for the conditions that were trained, each at its last
    iteration.

    FM, FL, ML are the gaps [first, middle], [first, last], [middle, last]; above 0 the earlier item wins.
    """
    ends = _Ends(gaps)
    return [
        *_depth_findings(ends),
        *_bias_findings(ends),
        *_u_shape_findings(ends, gaps),
        *_sink_findings(sinks),
    ]


def _depth_findings(ends: _Ends) -> list[Finding]:
    """Figures 2 and 4: depth and relative position encodings on unbiased data, without residual
    connections."""
    kinds = {"no PE": ("causal", "none"), "decay mask": ("decay", "none"), "RoPE": ("causal", "rope")}
    cells = {
        (name, depth): found
        for name, (mask, pe) in kinds.items()
        for depth in (2, 6)
        if (found := ends.gaps(mask=mask, pe=pe, depth=depth, residual=False, bias="none"))
    }
    out = []
    if plain := cells.get(("no PE", 2)):
        claim = "A causal mask alone favours the earlier item, on data without bias (Figure 2, depth 2)"
        out.append(_finding(claim, "FM of no PE, causal", plain["FM"], "above"))
    if decay := cells.get(("decay mask", 2)):
        claim = "At depth 2 the decay mask turns it to the later item (Figure 2)"
        out.append(_finding(claim, "FM of the decay mask", decay["FM"], "below"))
        if rope := cells.get(("RoPE", 2)):
            claim = "RoPE's decay is weaker than the decay mask's (Figure 2; Lemmas 4.4 and 4.6)"
            out.append(
                _finding(
                    claim,
                    "FM of RoPE minus FM of the decay mask, depth 2",
                    rope["FM"] + -decay["FM"],
                    "above",
                )
            )
    for name in kinds:
        if (name, 2) in cells and (name, 6) in cells:
            claim = "Depth moves the bias to the earlier item (Figures 2 and 4)"
            gap = cells[name, 6]["FM"] + -cells[name, 2]["FM"]
            out.append(_finding(claim, f"FM at depth 6 minus FM at depth 2, {name}", gap, "above"))
    return out


def _bias_findings(ends: _Ends) -> list[Finding]:
    """Figures 3 and 6 to 8: which biases of the data a network takes up."""
    out = []
    both: dict[str, Any] = {"depth": 2, "residual": True}
    if full := ends.gaps(mask="full", pe="none", bias="first+last", **both):
        claim = "Without mask and PE no bias is learned (Figure 3)"
        out.append(_finding(claim, "largest gap of no PE, no mask", _largest(*full.values()), "within", ZERO))
    if causal := ends.gaps(mask="causal", pe="none", bias="first+last", **both):
        claim = "The causal mask without PE takes up the bias to the first item only (Figure 3)"
        out.append(
            _finding(
                claim, "smaller of FM and FL, no PE, causal", _smaller(causal["FM"], causal["FL"]), "above"
            )
        )
        out.append(_finding(claim, "ML, no PE, causal", causal["ML"], "within", NEAR))
    for mask in ("full", "causal"):
        for pe in ("sin", "rope"):
            name = f"{PE_WORDS[pe]}, {'no mask' if mask == 'full' else 'causal'}"
            if found := ends.gaps(mask=mask, pe=pe, bias="first+last", **both):
                claim = "With sin PE or RoPE both ends win: lost in the middle (Figure 3)"
                out.append(
                    _finding(
                        claim, f"smaller of FM and -ML, {name}", _smaller(found["FM"], -found["ML"]), "above"
                    )
                )
                if (mask, pe) == ("causal", "rope"):
                    claim = "RoPE with a causal mask goes beyond copying by position (Figure 3: .472 + .241)"
                    gap = found["FM"] + -found["ML"]
                    statistic = f"FM - ML, {name}; copying by position gives at most {2 * HALF:.3f}"
                    out.append(_finding(claim, statistic, gap, "above", 2 * HALF, LATE))
            wins: dict[str, tuple[str, Callable[[dict[str, _Gap]], _Gap], str]] = {
                "first": ("smaller of FM and FL", lambda g: _smaller(g["FM"], g["FL"]), "Figure 6"),
                "middle": ("smaller of -FM and ML", lambda g: _smaller(-g["FM"], g["ML"]), "Figure 7"),
                "last": ("smaller of -FL and -ML", lambda g: _smaller(-g["FL"], -g["ML"]), "Figure 8"),
            }
            for place, (words, rule, figure) in wins.items():
                if found := ends.gaps(mask=mask, pe=pe, bias=place, **both):
                    claim = f"With PE a bias of the data to the {place} item is taken up ({figure})"
                    out.append(_finding(claim, f"{words}, {name}", rule(found), "above"))
    for place, figure in (("middle", "Figure 7"), ("last", "Figure 8")):
        if found := ends.gaps(mask="causal", pe="none", bias=place, **both):
            claim = f"The causal mask without PE favours the first item even where the data favour the {place} ({figure})"
            out.append(
                _finding(
                    claim, "smaller of FM and FL, no PE, causal", _smaller(found["FM"], found["FL"]), "above"
                )
            )
    return out


def _u_shape_findings(ends: _Ends, gaps: pd.DataFrame) -> list[Finding]:
    """Section 5.2: the middle is lost only where the data favour both ends."""
    rows = gaps.loc[
        (gaps["bias"] != "first+last") & (gaps["vocabulary"] == "gaussian"), SETTINGS
    ].drop_duplicates()
    found = [
        (_smaller(each["FM"], -each["ML"]), label(row).replace("\n", ", "))
        for row in rows.to_dict("records")
        if row["bias"] in ("none", "first", "middle", "last")
        and (each := ends.gaps(**{k: v for k, v in row.items() if k != "vocabulary"}))
    ]
    if not found:
        return []
    worst, name = max(found, key=lambda pair: pair[0].value)
    claim = "The middle is lost only if the data favour both ends (Section 5.2, Figures 2, 3 and 6 to 8)"
    statistic = f"largest 'smaller of FM and -ML' of {len(found)} conditions without that bias ({name})"
    return [_finding(claim, statistic, worst, "below", NEAR)]


def _sink_findings(sinks: pd.DataFrame) -> list[Finding]:
    """Appendix K.4: sinks are on the centre nodes of the mask.

    Within the first half of the sequence, as late tokens average few queries; token by token, and item by
    item, an item being two tokens, its vector and its label.
    """
    rows = at_end(sinks[(sinks["bias"] == "none") & ~sinks["residual"] & (sinks["pe"] == "none")])
    out: list[Finding] = []
    first: dict[tuple[str, int], list[tuple[int, float, float, int]]] = {}
    verdict: Verdict
    for (depth, mask), one in rows.groupby(["depth", "mask"], sort=False):
        kind, _, span = str(mask).partition(" ")
        if kind not in ("causal", "window", "prefix"):
            continue
        early = int(one["iteration"].iloc[0]) < EARLY
        level = uniform_sinks(str(mask), one["token"].nunique())
        for column, metric, size in (
            ("by_entry", "Wu et al.", 1),
            ("by_entry", "Wu et al.", 2),
            ("by_head", "Gu et al.", 1),
        ):
            count = max(int(span) // size, 1) if kind == "prefix" else 1
            share = one.groupby(one["token"] // size)[column].mean()
            share = share.iloc[: len(share) // 2 + 1]
            value, n = (
                share.iloc[:count].min() - share.iloc[count:].max(),
                int(one[one["token"] == 0]["n"].sum()),
            )
            claim = (
                f"Attention sinks stand on the centre nodes of the mask (Appendix K.4, {SINK_FIGURES[kind]})"
            )
            what = "token" if size == 1 else "item"
            named = f"the first {what}" if count == 1 else f"the weakest of the first {count} {what}s"
            statistic = f"sink metric of {metric}: {named} minus the strongest other {what} of the first half, {mask}, depth {depth}"
            # Three standard errors of a share of that many sequences, at most.
            verdict = "holds" if value > 1.5 / n**0.5 else "does not hold"
            verdict = "not testable here" if early else verdict
            equal = float(level.groupby(level.index // size)[column].mean().iloc[0])
            note = f"first {what} {share.iloc[0]:.3f}; equal weights would give {equal:.3f}"
            out.append(
                Finding(claim=claim, statistic=statistic, value=float(value), n=n, verdict=verdict, note=note)
            )
            if kind == "window" and size == 1:
                first.setdefault((metric, int(depth)), []).append((int(span), float(share.iloc[0]), equal, n))
    for (metric, depth), shares in first.items():
        if len(shares) > 1:
            (narrow, low, equal_low, _), (wide, high, equal_high, n) = min(shares), max(shares)
            statistic = f"sink metric of {metric} of the first token: window {wide} minus window {narrow}, depth {depth}"
            claim = "The wider the window, the stronger the sink on the first token (Appendix K.4, Figure 11)"
            verdict = "holds" if high - low > 1.5 / n**0.5 else "does not hold"
            note = f"equal weights would give {equal_high - equal_low:+.3f}: a narrow window shows its tokens to few queries"
            out.append(
                Finding(claim=claim, statistic=statistic, value=high - low, n=n, verdict=verdict, note=note)
            )
    return out


SINK_FIGURES = {"causal": "Figure 10", "window": "Figure 11", "prefix": "Figure 12"}


def thresholds(gaps: pd.DataFrame) -> pd.DataFrame:
    """What a re-implementation must reach, held against every seed at its last iteration in a range.

    Returns:
        required, iterations, measured (a text per seed), verdict (``yes``, ``no``, ``not run``).
    """
    rows: list[tuple[str, str, str, str]] = []

    def hold(required: str, low: int, high: int | None, rule: Callable[[Any], bool], **settings: Any) -> None:
        fixed = {
            "vocabulary": "gaussian",
            "scale": "paper",
            "depth": 2,
            "residual": True,
            "bias": "first+last",
            **settings,
        }
        here = gaps[(gaps[list(fixed)] == pd.Series(fixed)).all(axis=1)]
        here = here[(here["iteration"] >= low) & (here["iteration"] <= (high or here["iteration"].max()))]
        texts, passed = [], []
        for seed, run in here.groupby("seed"):
            last = run[run["iteration"] == run["iteration"].max()].set_index("pair")
            fm, fl, ml = (float(last.at[pair, "gap"]) for pair in PAIR_NAMES)
            first, iteration = last.iloc[0], int(last["iteration"].iloc[0])
            ends = float(max(last["acc_ab"].max(), last["acc_ba"].max()))
            at = {"fm": fm, "fl": fl, "ml": ml, "novel": float(first["novel_middle"]), "best": ends}
            texts.append(
                f"seed {seed}, {iteration:,}: {fm:+.3f} / {fl:+.3f} / {ml:+.3f}, novel middle {at['novel']:.2f}"
            )
            passed.append(rule(pd.Series(at)))
        verdict = "not run" if not passed else "yes" if all(passed) else "no"
        window = f"{low:,} to {high:,}" if high else f"from {low:,}"
        rows.append((required, window, "; ".join(texts), verdict))

    hold(
        "no PE, no mask: every gap within 0.02 of 0",
        1000,
        None,
        lambda g: max(abs(g.fm), abs(g.fl), abs(g.ml)) <= 0.02,
        mask="full",
        pe="none",
    )
    for mask in ("full", "causal"):
        for pe in ("sin", "rope"):
            name = f"{PE_WORDS[pe]}, {'no mask' if mask == 'full' else 'causal'}"
            hold(
                f"{name}, copying by position: FM 0.12 to 0.40, ML -0.42 to -0.14, FM - ML 0.47 to 0.60, FL = FM + ML to 0.03",
                6000,
                20_000,
                lambda g: (
                    0.12 <= g.fm <= 0.40
                    and -0.42 <= g.ml <= -0.14
                    and 0.47 <= g.fm - g.ml <= 0.60
                    and abs(g.fl - g.fm - g.ml) <= 0.03
                ),
                mask=mask,
                pe=pe,
            )
    hold(
        "RoPE, causal, late: FM above 0.38, FL above 0.25, ML -0.32 to -0.20, novel accuracy in the middle above 0.6",
        65_000,
        None,
        lambda g: g.fm > 0.38 and g.fl > 0.25 and -0.32 <= g.ml <= -0.20 and g.novel > 0.6,
        mask="causal",
        pe="rope",
    )
    hold(
        "no PE, causal: FM and FL above 0.03, ML within 0.05 of 0",
        10_000,
        None,
        lambda g: g.fm > 0.03 and g.fl > 0.03 and abs(g.ml) <= 0.05,
        mask="causal",
        pe="none",
    )
    hold(
        "std 1/D, sin PE: one end is answered with 0.95 or more",
        6000,
        16_000,
        lambda g: g.best >= 0.95,
        mask="causal",
        pe="sin",
        scale="code",
    )
    hold(
        "std 1/D, no PE, causal: FM above 0.12, ML within 0.04 of 0",
        60_000,
        None,
        lambda g: g.fm > 0.12 and abs(g.ml) <= 0.04,
        mask="causal",
        pe="none",
        scale="code",
    )
    unbiased = {"residual": False, "bias": "none"}
    hold(
        "Figure 2, no PE: FM 0.05 to 0.13",
        8000,
        None,
        lambda g: 0.05 <= g.fm <= 0.13,
        mask="causal",
        pe="none",
        **unbiased,
    )
    hold(
        "Figure 2, RoPE: FM within 0.05 of 0",
        8000,
        None,
        lambda g: abs(g.fm) <= 0.05,
        mask="causal",
        pe="rope",
        **unbiased,
    )
    hold(
        "Figure 2, decay mask: FM -0.13 to -0.04",
        8000,
        None,
        lambda g: -0.13 <= g.fm <= -0.04,
        mask="decay",
        pe="none",
        **unbiased,
    )
    return pd.DataFrame(rows, columns=["required", "iterations", "measured", "verdict"])
