"""What a trained tiny model must show, measured through posbench's own search and method."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from posbench.embedded.network import build_model
from posbench.embedded.recipe import Recipe
from posbench.embedded.tokenizer import build_tokenizer
from posbench.methods import ScaleChannel, Unmodified
from posbench.model.lm import LM, batches
from posbench.model.load import load
from posbench.search import Candidate, ChannelSearch
from posbench.search.channel_run import average_states, candidate_losses
from posbench.search.statistics import ChannelStatistics
from posbench.stats.tables import mean_interval, wilson
from posbench.tasks import Example, KVRetrieval

PAIRS = 32
"""Pairs per prompt of the criteria of ``tiny``."""
CALIBRATION_SEED, CHOOSING_SEED, EVALUATION_SEED = 0, 1, 2
"""Task seeds of three disjoint sets: for the search, for the choice among training seeds, for the published
numbers."""
CALIBRATION_EXAMPLES = 120
"""Calibration questions, each in a context of its own, as in ``conf/model/tiny.yaml``."""
SEARCH = ChannelSearch(alphabet="tokens", strings=400, length=128, window=12, skip=8, batch_size=60)
"""The paper's search with lengths that fit `PAIRS`, as in ``conf/model/tiny.yaml``."""
STRING_SETS = 10
"""Further sets of random strings on which the search is repeated, to see whether its choice depends on
them."""
BATCH = 64
"""Prompts per forward."""

ENDS_AT_LEAST = 0.95
DROP_AT_LEAST = 0.25
GAIN_AT_LEAST = 0.08

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Check:
    """One criterion with what was measured."""

    name: str
    measured: str
    required: str
    passed: bool
    of_every_model: bool = False
    """Asked of the siblings of ``tiny`` too, which need not lose the middle nor gain."""


def kv_task(
    seed: int, *, pairs: int = PAIRS, per_position: int = 64, positions: int | None = None
) -> KVRetrieval:
    """The compact task over all gold positions, or over ``positions`` evenly spread ones."""
    places = (
        range(pairs)
        if positions is None
        else np.linspace(0, pairs - 1, positions).round().astype(int).tolist()
    )
    return KVRetrieval(
        prompt="compact",
        records="words",
        pairs=pairs,
        positions=tuple(places),
        examples_per_position=per_position,
        max_new_tokens=1,
        calibration_pairs=pairs,
        calibration_examples=CALIBRATION_EXAMPLES,
        seed=seed,
    )


def scores(
    lm: LM, task: KVRetrieval, examples: Sequence[Example], method: ScaleChannel | None = None
) -> Scores:
    """Accuracy (0 or 1) of every example under a method, [n]."""
    with (method or Unmodified()).applied(lm):
        replies = lm.generate(
            [e.prompt for e in examples], max_new_tokens=task.max_new_tokens, batch_size=BATCH
        )
    return np.array([task.score(e, r)["accuracy"] for e, r in zip(examples, replies, strict=True)])


def calibration_losses(lm: LM, examples: Sequence[Example], candidates: Sequence[Candidate]) -> Scores:
    """Mean answer loss in nats per token: the unmodified model first, then every candidate, [1 + C]."""
    pairs = [lm.answer_ids(e.prompt, e.answers[0]) for e in examples]
    parts = [
        candidate_losses(lm, [pairs[i] for i in group], candidates)
        for group in batches([1] * len(pairs), BATCH)
    ]
    return np.concatenate(parts, axis=1).mean(1)


@dataclass(frozen=True)
class Searched:
    """The paper's search on the calibration set, and a traversal of all channels.

    Attributes:
        statistics: The filter on the strings of `SEARCH`.
        found: What the search chooses; None where no channel passes its filter.
        best: What the traversal chooses.
        losses: Calibration loss of every candidate of the traversal.
        unmodified: Calibration loss of the unmodified model.
        same: Of `STRING_SETS` further sets of random strings, how many lead to the same choice.
    """

    statistics: ChannelStatistics
    found: Candidate | None
    best: Candidate
    losses: dict[Candidate, float]
    unmodified: float
    same: int


def load_trained(folder: Path, name: str | None = None) -> LM:
    """A trained directory as a model on the CPU; MPT has no other attention than eager."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    return load(
        folder, name=name or folder.name, device="cpu", attention="eager" if kind == "mpt" else "sdpa"
    )


def search_for(pairs: int) -> ChannelSearch:
    """`SEARCH` with random strings as long as a prompt of that many pairs."""
    return replace(SEARCH, length=4 * pairs)


def monotone_at_start(recipe: Recipe, seed: int) -> int:
    """Channels that pass the search's filter before the first training step."""
    model = build_model(recipe, torch.Generator().manual_seed(2 * seed))
    lm, search = load(model, tokenizer=build_tokenizer()), search_for(recipe.measured_pairs)
    return len(search.statistics(average_states(lm, search)).ranking)


def search_all(lm: LM, examples: Sequence[Example], search: ChannelSearch = SEARCH) -> Searched:
    """Run the search, the traversal, and the search on further random strings."""
    statistics = search.statistics(average_states(lm, search))
    ranges, everything = search.layer_ranges(lm.layers, None), replace(search, candidates="all")
    candidates = everything.ask(statistics, ranges)
    values = calibration_losses(lm, examples, candidates)
    losses = dict(zip(candidates, values[1:].tolist(), strict=True))

    def choice(variant: ChannelSearch, measured: ChannelStatistics) -> Candidate | None:
        asked = variant.ask(measured, ranges) if measured.ranking or variant.candidates == "all" else []
        index = variant.choose([losses[c] for c in asked], float(values[0])) if asked else None
        return None if index is None else asked[index]

    found, best = choice(search, statistics), choice(everything, statistics)
    assert best is not None, "the paper's variant always chooses a candidate"
    others = [replace(search, seed=search.seed + 1 + i) for i in range(STRING_SETS)]
    same = sum(choice(other, other.statistics(average_states(lm, other))) == found for other in others)
    return Searched(statistics, found, best, losses, float(values[0]), same)


def measure(
    lm: LM, seed: int, *, pairs: int = PAIRS, longest: int = 2 * PAIRS, per_position: int = 64
) -> dict[str, Any]:
    """Search on the calibration set, then measure the model and the found channel on the set of ``seed``.

    One question per context everywhere. All accuracies are fractions; ``inner`` is the mean over the inner
    half of the gold positions and ``gain`` has a 95 % bootstrap interval of the paired difference.

    Args:
        lm: The model.
        seed: Task seed of the examples that are scored; not the calibration seed.
        pairs: Pairs per prompt.
        longest: Most pairs that the training saw; half, one and a half times and twice ``pairs`` are scored
            up to there.
        per_position: Questions per gold position.

    Returns:
        JSON-ready numbers; ``found`` is None where no channel passes the paper's filter, ``best`` is the
        traversal's.
    """
    assert seed != CALIBRATION_SEED, "the calibration seed is for the search"
    calibration = kv_task(CALIBRATION_SEED, pairs=pairs).examples("calibration")
    task = kv_task(seed, pairs=pairs, per_position=per_position)
    examples = task.examples("evaluation")
    assert not {e.prompt for e in calibration} & {e.prompt for e in examples}, (
        "calibration and scored prompts overlap"
    )
    searched = search_all(lm, calibration, search_for(pairs))
    base = scores(lm, task, examples)
    out: dict[str, Any] = {
        "task_seed": seed,
        "pairs": pairs,
        "n": len(examples),
        "channels_monotone": len(searched.statistics.ranking),
        "ranking": searched.statistics.ranking,
        "string_sets": STRING_SETS,
        "string_sets_same": searched.same,
        "base": _curve(base, examples),
        "found": None,
        "best": None,
    }
    for name, candidate in (("found", searched.found), ("best", searched.best)):
        if candidate is None:
            continue
        scaled = scores(lm, task, examples, _method(candidate))
        low, high = mean_interval(scaled - base, [e.cluster for e in examples], resamples=2000, seed=0)
        out[name] = {
            "channel": candidate.channel,
            "factor": candidate.factor,
            "layers": list(candidate.layers),
            "loss": round(searched.losses[candidate], 4),
            "loss_unmodified": round(searched.unmodified, 4),
            "scaled": _curve(scaled, examples),
            "gain": round(float((scaled - base).mean()), 4),
            "gain_low": round(low, 4),
            "gain_high": round(high, 4),
        }
    method = _method(searched.found or searched.best)
    out["lengths"] = []
    for length in (n for n in (pairs // 2, pairs * 3 // 2, pairs * 2) if n <= longest):
        other = kv_task(seed, pairs=length, per_position=per_position, positions=8)
        some = other.examples("evaluation")
        plain, scaled = scores(lm, other, some), scores(lm, other, some, method)
        row = {"pairs": length, "n": len(some), "base": _curve(plain, some), "scaled": _curve(scaled, some)}
        out["lengths"].append(row)
    out["stops"] = stops(lm, examples[:: max(1, len(examples) // 128)])
    return out


def _method(candidate: Candidate) -> ScaleChannel:
    return ScaleChannel(channel=candidate.channel, factor=candidate.factor, layers=candidate.layers)


def stops(lm: LM, examples: Sequence[Example]) -> float:
    """Share of replies that are one word, the closing quote, and the end, when eight tokens are allowed."""
    replies = lm.generate([e.prompt for e in examples], max_new_tokens=8, batch_size=BATCH)
    return round(float(np.mean([len(r) == 4 and r.endswith('"') for r in replies])), 4)


def _curve(values: Scores, examples: Sequence[Example]) -> dict[str, Any]:
    """Mean, per-position accuracy, and the summary numbers of the criteria."""
    positions = np.array([e.gold_position for e in examples])
    places = np.unique(positions)
    by_position = np.array([values[positions == p].mean() for p in places])
    quarter = len(places) // 4
    inner = np.isin(positions, places[quarter : len(places) - quarter])
    low, high = wilson(float(values[inner].sum()), int(inner.sum()))
    return {
        "mean": round(float(values.mean()), 4),
        "positions": [int(p) for p in places],
        "accuracy": [round(float(a), 4) for a in by_position],
        "first": round(float(by_position[0]), 4),
        "last": round(float(by_position[-1]), 4),
        "inner": round(float(values[inner].mean()), 4),
        "inner_low": round(low, 4),
        "inner_high": round(high, 4),
        "lowest": round(float(by_position.min()), 4),
    }


def criteria(measured: dict[str, Any]) -> list[Check]:
    """The criteria of the shipped model ``tiny``, from the numbers of `measure`."""
    base, found = measured["base"], measured["found"]
    ends = min(base["first"], base["last"])
    drop = (base["first"] + base["last"]) / 2 - base["inner"]
    chance = 1 / measured["pairs"]
    checks = [
        Check("accuracy at both ends", f"{ends:.3f}", f">= {ENDS_AT_LEAST}", ends >= ENDS_AT_LEAST),
        Check("inner half below the ends", f"{drop:.3f}", f">= {DROP_AT_LEAST}", drop >= DROP_AT_LEAST),
        Check(
            "inner half above chance",
            f">= {base['inner_low']:.3f}",
            f"> {chance:.3f}",
            base["inner_low"] > chance,
            True,
        ),
        Check(
            "monotone channels",
            str(measured["channels_monotone"]),
            ">= 1",
            measured["channels_monotone"] >= 1,
            True,
        ),
    ]
    if found is None:
        return [*checks, Check("gain of the found channel", "none found", f">= {GAIN_AT_LEAST}", False)]
    gain = f"{found['gain']:+.3f} [{found['gain_low']:+.3f}, {found['gain_high']:+.3f}]"
    name = f"gain of channel {found['channel']} x {found['factor']:g}, layers {found['layers'][0]}-{found['layers'][1]}"
    lower = found["loss"] < found["loss_unmodified"]
    return [
        *checks,
        Check(
            "calibration loss lowered",
            f"{found['loss_unmodified']:.3f} -> {found['loss']:.3f}",
            "lower",
            lower,
        ),
        Check(name, gain, f">= {GAIN_AT_LEAST}", found["gain"] >= GAIN_AT_LEAST),
        Check("its 95 % interval excludes zero", f"{found['gain_low']:+.3f}", "> 0", found["gain_low"] > 0),
    ]
