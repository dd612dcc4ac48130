"""What a score over gold positions amounts to: spread, gap, primacy, recency, drop (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posbench.late import pd
from posbench.stats.bootstrap import (
    Z95,
    Array,
    Estimate,
    chunks,
    combined,
    mean,
    percentile,
    quantiles,
    resampled,
    tail,
)

STATISTICS = ("position_bias", "gap", "gap_null", "primacy", "recency", "middle_drop")
"""Over three gold positions or more: :func:`position_bias` (the one to sort by), best minus worst position,
what that is where positions do not matter, and the others of :func:`curve_statistics`."""

ALMOST = 0.05
"""So much more often than by guessing, or less often than always, is as good as that; see :func:`limit`."""


def curves(
    frame: pd.DataFrame, name: str, by: str, resamples: int, seed: int = 0
) -> dict[Any, tuple[Array, Array]]:
    """Mean score over K gold positions: for each value of ``by``, the curve [K] and its draws [R, K].

    Equal questions (``cluster``) are drawn for all. A curve is not a number at a position without a row.
    """
    frame = frame.dropna(subset=[name])
    places = sorted(frame["gold_position"].unique())
    keys = list(dict.fromkeys(frame[by]))
    parts = dict(iter(frame.groupby([by, "gold_position"], sort=False)))
    cells = [(key, place) for key in keys for place in places if (key, place) in parts]
    groups = {
        cell: (parts[cell][name].to_numpy(), list(parts[cell]["cluster"]))
        for cell in cells
    }
    found = resampled(groups, stratified=True, resamples=resamples, seed=seed)
    nothing = np.nan, np.full(resamples, np.nan)
    out = {}
    for key in keys:
        means, drawn = zip(
            *(found.get((key, place), nothing) for place in places), strict=True
        )
        out[key] = np.array(means), np.stack(drawn, axis=-1)
    return out


def curve_statistics(means: Array) -> dict[str, Array]:
    """What mean scores at K >= 3 gold positions in order, [..., K], amount to: by name, [...].

    ``primacy`` and ``recency`` are first and last position minus the mean of the inner ones; ``middle_drop``
    is the mean of the ends minus the lowest inner one; ``gap`` is best minus worst (Zhang et al. 2024,
    Ms-PoE: "Gap"). Sampling noise alone raises the last two.
    """
    first = means[..., 0]
    inner = means[..., 1:-1]
    last = means[..., -1]
    return {
        "primacy": first - inner.mean(-1),
        "recency": last - inner.mean(-1),
        "middle_drop": (first + last) / 2 - inner.min(-1),
        "gap": means.max(-1) - means.min(-1),
    }


def dips(frame: pd.DataFrame, name: str, resamples: int) -> tuple[Estimate, Array]:
    """1 - mean of a column in the middle / its mean at the lower of the two ends: :func:`dip` and draws [R].

    The middle is every gold position at a depth of 25 to 75 % of the prompt, give or take 5 for rounded
    positions. The frame is of one number of items, with items, gold_position, depth (0..1) and cluster.
    """
    ((curve, draws),) = curves(frame, name, "items", resamples).values()
    depth = np.sort(frame["depth"].unique())
    middle = (depth >= 0.2) & (depth <= 0.8)
    middle[[0, -1]] = False
    at = dip(curve, draws, middle, len(frame), frame["cluster"].nunique())
    return at, _dips(draws, middle).min(1)


def dip(
    curve: Array, draws: Array, middle: NDArray[np.bool_], n: int, questions: int
) -> Estimate:
    """1 - mean of a curve [K] in the middle, a mask [K], / its lower end; interval from the draws [R, K].

    The lower one of two equal ends is the unluckier one. So each end of the interval is the lower of the two
    that the ends of the curve give one by one.
    """
    low, high = np.min(
        [quantiles(each, questions) for each in _dips(draws, middle).T], axis=0
    )
    return Estimate(float(_dips(curve[None], middle).min()), float(low), float(high), n)


def _dips(means: Array, middle: NDArray[np.bool_]) -> Array:
    """1 - mean in the middle / at either end of curves [..., K], [..., 2]; not a number where an end is 0."""
    ends = means[:, [0, -1]]
    none = np.full((len(means), 2), np.nan)
    inner = means[:, middle].mean(1, keepdims=True) if middle.any() else none
    return np.divide(
        ends - inner, ends, out=none, where=(ends > 0).all(1, keepdims=True)
    )


def position_bias(curve: Array, draws: Array) -> tuple[float, Array]:
    """Standard deviation of a curve over K >= 2 gold positions without what sampling noise adds.

    From the curve [K] and its draws [R, K], the root of what is left of the variance, 0 where noise explains
    more than all of it. And for each draw [R] the deviation with which a curve of this shape plus the errors
    of that draw varies as much as the one found; 0 where the errors alone vary more.
    """
    variance = curve.var(ddof=1)
    errors = draws - curve
    noise = np.nanmean(draws.var(-1, ddof=1)) - variance
    spread = errors.var(-1, ddof=1)
    shape = (curve - curve.mean()) / np.sqrt(variance or 1)
    along = errors @ shape / (len(curve) - 1)
    left = max(variance, np.nanmean(spread)) - spread
    found = np.sqrt(np.maximum(along**2 + left, 0)) - along
    return float(np.sqrt(np.maximum(variance - noise, 0))), np.where(
        left > 0, found, 0.0
    )


def limit(positions: Iterable[Estimate], chance: float, questions: int) -> str:
    """Why the scores (0..1) at the gold positions leave no bias to be seen, by their 95 % intervals.

    ``at the floor: ...`` where none is surely above that of a guess, ``at the ceiling: ...`` where none is
    surely below 1, both give or take :data:`ALMOST`; ``too few questions: ...`` where so many at each
    position could not show that even if all were wrong, or right (Wilson's interval); else empty.
    """
    ends = [(at.ci_low, at.ci_high) for at in positions]
    top = 1 - ALMOST
    if not max(low for low, _ in ends) > chance + ALMOST:
        guess = f"a guess, {100 * chance:.1f} %" if chance else "zero"
        note = f"floor: no score is surely {100 * ALMOST:.0f} points above {guess}"
        share = chance + ALMOST
    elif not min(high for _, high in ends) < top:
        note = f"ceiling: no score is surely below {100 * top:.0f} %"
        share = ALMOST
    else:
        return ""
    least = int(np.ceil(Z95**2 * (1 - share) / share))
    few = f"too few questions: ask {least} or more at each gold position"
    return few if questions < least else f"at the {note}"


def rows(
    frame: pd.DataFrame,
    name: str,
    unmodified: str,
    resamples: int,
    seed: int,
    chance: float = 0.0,
) -> Iterator[tuple[str, str, Estimate, str]]:
    """Method, statistic of :data:`STATISTICS` or its difference from the unmodified model, estimate, note.

    The note is the :func:`limit` at which the method or, of a difference, the unmodified model stands; the
    estimate is then not a number. A difference of two gaps gets no row: that of the position biases says
    more. ``frame`` has method, gold_position, cluster and the score ``name``.
    """
    placed = frame.dropna(subset=["gold_position", name])
    if placed["gold_position"].nunique() < 3:
        return
    base: tuple[Told, str] | None = None
    found = curves(placed, name, "method", resamples, seed)
    whole = [
        method for method, (curve, _) in found.items() if not np.isnan(curve).any()
    ]
    for number, method in enumerate(sorted(whole, key=lambda m: m != unmodified)):
        part = placed[placed["method"] == method]
        places = [
            (here[name].to_numpy(), list(here["cluster"]))
            for _, here in part.groupby("gold_position")
        ]
        sizes = np.array([len(values) for values, _ in places])
        questions = min(len(set(clusters)) for _, clusters in places)
        told = Told(
            *found[method],
            sizes,
            questions,
            part[name].isin((0, 1)).all(),
            (seed, number),
        )
        note = limit((mean(*group) for group in places), chance, questions)
        shuffled = _shuffled_gaps(part, name, resamples, seed)
        low, high = np.quantile(shuffled, [0.025, 0.975])
        all_of = told.estimates | {
            "gap_null": Estimate(float(shuffled.mean()), low, high, len(part))
        }
        for key in (
            "gap",
            "gap_null",
            "primacy",
            "recency",
            "middle_drop",
            "position_bias",
        ):
            yield method, key, _unless(note, all_of[key]), note
            if base and not key.startswith("gap"):
                either = note or base[1]
                yield (
                    method,
                    f"{key}_difference",
                    _unless(either, told.minus(base[0], key)),
                    either,
                )
        if method == unmodified:
            base = told, note


def _unless(note: str, at: Estimate) -> Estimate:
    """An estimate; without a number where there is a note."""
    return Estimate(np.nan, np.nan, np.nan, at.n) if note else at


class Told:
    """What the curve of a method says: ``estimates`` of the statistics, by name.

    From the curve [K] and its draws [R, K], the prompts at each position [K], the fewest questions at any,
    and whether all scores are 0 or 1; ``seed`` is that of :func:`_smoothed`.
    """

    def __init__(
        self,
        curve: Array,
        draws: Array,
        sizes: Array,
        questions: int,
        shares: bool,
        seed: tuple[int, int],
    ) -> None:
        self.n = int(sizes.sum())
        self.questions = questions
        exact = {key: float(value) for key, value in curve_statistics(curve).items()}
        exact["position_bias"] = position_bias(curve, draws)[0]
        draws = _smoothed(curve, draws, sizes, seed) if shares else draws
        self.draws = {
            **curve_statistics(draws),
            "position_bias": position_bias(curve, draws)[1],
        }
        self.estimates = {
            key: percentile(value, self.draws[key], self.n, questions)
            for key, value in exact.items()
        }
        one = np.eye(len(curve))
        contrasts = {"middle_drop": (one[0] + one[-1]) / 2 - one[1:-1]}
        contrasts["gap"] = (one[:, None] - one)[~one.astype(bool)]
        for key, of in contrasts.items() if questions > 1 else ():
            low, high = _largest(of, curve, draws, self.draws[key], tail(questions))
            low, high = (max(low, 0.0), min(high, 1.0)) if key == "gap" else (low, high)
            self.estimates[key] = Estimate(exact[key], low, high, self.n)

    def minus(self, base: Told, key: str) -> Estimate:
        """Difference of a statistic from that of another method on the same questions."""
        at = self.estimates[key]
        was = base.estimates[key]
        n = self.n
        if key != "middle_drop":
            return percentile(
                at.value - was.value,
                self.draws[key] - base.draws[key],
                n,
                self.questions,
            )
        with np.errstate(invalid="ignore"):
            r = np.nan_to_num(np.corrcoef(self.draws[key], base.draws[key])[0, 1])
        return combined((at, was), (1, -1), n, float(r))


def _smoothed(curve: Array, draws: Array, sizes: Array, seed: tuple[int, int]) -> Array:
    """Draws [R, K] of shares with the noise that they lack at positions where nearly all prompts are right or
    nearly all wrong: what half a prompt more of each kind would add to the variance."""
    more = (curve * sizes + 0.5) / (sizes + 1)
    lacks = more * (1 - more) / (sizes + 1) - curve * (1 - curve) / sizes
    return draws + np.sqrt(np.maximum(lacks, 0)) * np.random.default_rng(seed).normal(
        size=draws.shape
    )


def _largest(
    of: Array, curve: Array, draws: Array, found: Array, beyond: float
) -> tuple[float, float]:
    """Interval of the largest of P contrasts [P, K] of a curve [K], from its draws [R, K] and its value in
    them, ``found`` [R]; ``beyond`` is the share of the draws beyond each end.

    The largest one found is the luckiest. So the lower end allows for the largest error of all that may be
    the largest in truth (Chernozhukov, Lee and Rosen 2013); the upper one is that of the basic bootstrap.
    """
    values = of @ curve
    spread = np.cov(draws.T)
    apart = of - of[values.argmax()]
    margin = (
        2 * Z95 * np.sqrt(np.maximum(np.einsum("pk,kl,pl->p", apart, spread, apart), 0))
    )
    among = of[values >= values.max() - margin]
    errors = (draws - curve) @ among.T
    scale = np.maximum(errors.std(0), 1e-12)
    reach = np.quantile((errors / scale).max(1), 1 - beyond)
    high = 2 * values.max() - np.quantile(found, beyond)
    return float((among @ curve - reach * scale).max()), float(high)


def _shuffled_gaps(part: pd.DataFrame, name: str, resamples: int, seed: int) -> Array:
    """Best minus worst position, [R], positions shuffled within questions asked at several, else in all."""
    _, member = np.unique(part["cluster"], return_inverse=True)
    order = np.argsort(member, kind="stable")
    block = member[order] if member.max() + 1 < len(member) else np.zeros(len(member))
    values = part[name].to_numpy(dtype=np.float64)[order]
    places = part["gold_position"].to_numpy(dtype=np.int64)[order]
    _, place, counts = np.unique(places, return_inverse=True, return_counts=True)
    shares = np.eye(len(counts))[place] / counts
    rng = np.random.default_rng(seed)
    gaps = []
    for size in chunks(resamples, len(order)):
        keys = rng.random((size, len(order))) + block
        gaps.append(np.ptp(values[np.argsort(keys, axis=1)] @ shares, axis=1))
    return np.concatenate(gaps)
