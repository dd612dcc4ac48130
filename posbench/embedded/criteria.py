"""Criteria for a trained model, measured by posbench's own search and method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from posbench.embedded.network import build_model
from posbench.embedded.recipe import RECIPES
from posbench.embedded.tokenizer import build_tokenizer
from posbench.files.atomic import Row
from posbench.late import torch
from posbench.measure.losses import candidate_losses
from posbench.measure.states import average_states
from posbench.methods.scale_channel import ScaleChannel
from posbench.methods.unmodified import Unmodified
from posbench.model.lm import LM
from posbench.model.load import load, model_config
from posbench.search.channel import ChannelSearch
from posbench.search.statistics import ChannelStatistics
from posbench.stats.bootstrap import Array, Estimate, estimate_in, paired, wilson
from posbench.tasks import Example, KVRetrieval

# Task seeds of three disjoint sets of prompts.
CALIBRATION_SEED = 0  # for the search
CHOOSING_SEED = 1  # for the choice among training seeds
EVALUATION_SEED = 2  # to publish
# Further sets of random strings for the search: does its choice depend on them?
STRING_SETS = 10
BATCH_PROMPTS = 64  # prompts per forward
MAX_REPLIES = 128  # most replies checked for their end, roughly


def kv_task(
    name: str, seed: int, per_position: int = 64, pairs: int = 0, positions: int = 0
) -> KVRetrieval:
    """The task of a model's file.

    Args:
        name: The model.
        seed: Seed of the prompts.
        per_position: Prompts per gold position.
        pairs: Pairs per prompt, instead of the file's.
        positions: Gold positions, evenly spread; 0: all.
    """
    task = KVRetrieval(**model_config(name).blocks["kv_retrieval"])
    pairs = pairs or task.pairs
    spread = np.linspace(0, pairs - 1, positions or pairs).round().astype(int)
    return replace(
        task,
        pairs=pairs,
        positions=tuple(spread.tolist()),
        seed=seed,
        limit=per_position,
    )


def search_of(name: str) -> ChannelSearch:
    """The search of a model's file: the paper's, with strings of the prompts' length."""
    return ChannelSearch(**model_config(name).blocks["channel"])


def statistics(lm: LM, search: ChannelSearch) -> ChannelStatistics:
    """The search's filter on its random strings."""
    return search.statistics(average_states(lm, search.drawn))


def monotone_at_start(name: str, seed: int) -> int:
    """Number of channels that pass the search's filter before the first training step."""
    model = build_model(RECIPES[name], torch.Generator().manual_seed(2 * seed))
    lm = load(model, tokenizer=build_tokenizer())
    return len(statistics(lm, search_of(name)).ranking)


def search_all(
    lm: LM, examples: Sequence[Example], search: ChannelSearch
) -> tuple[dict[str, Any], dict[str, ScaleChannel], dict[ScaleChannel | None, float]]:
    """Run the search, a traversal of all channels, and the search on further random strings.

    Args:
        lm: The model.
        examples: Prompts of the calibration set.
        search: The search.

    Returns:
        Channels that pass the filter, and how often the choice is the same; the choices of the search
        (``found``, unless no channel passes) and of the traversal (``best``); the mean answer loss of the
        unmodified model (None) and of every candidate of the traversal, in nats per token.
    """
    first = statistics(lm, search)
    traversal = replace(search, candidates="all")
    candidates = traversal.list_candidates(first, search.layer_ranges(lm.layers, None))
    answers = [lm.answer_ids(e.prompt, e.answers[0]) for e in examples]
    batches = [
        answers[i : i + BATCH_PROMPTS] for i in range(0, len(answers), BATCH_PROMPTS)
    ]
    # [1 + candidates, examples]
    example_losses = np.concatenate(
        [candidate_losses(lm, batch, candidates) for batch in batches], axis=1
    )
    mean_losses = example_losses.mean(1).tolist()
    losses = dict(zip((None, *candidates), mean_losses, strict=True))
    choice = _choose(lm, search, first, losses)
    same_choices = 0
    for index in range(STRING_SETS):
        reseeded = replace(search, seed=search.seed + 1 + index)
        if _choose(lm, reseeded, statistics(lm, reseeded), losses) == choice:
            same_choices += 1
    facts = {
        "channels_monotone": len(first.ranking),
        "ranking": first.ranking,
        "string_sets": STRING_SETS,
        "string_sets_same": same_choices,
    }
    choices = {"found": choice, "best": _choose(lm, traversal, first, losses)}
    return facts, {name: method for name, method in choices.items() if method}, losses


def _choose(
    lm: LM,
    search: ChannelSearch,
    measured: ChannelStatistics,
    losses: dict[ScaleChannel | None, float],
) -> ScaleChannel | None:
    """The candidate that a search chooses; None where no channel passes its filter, or none lowers the loss.

    Args:
        lm: The model.
        search: The search.
        measured: Statistics of the channels.
        losses: Mean loss of each candidate; under None the unmodified model's.
    """
    if search.candidates == "monotone" and not measured.ranking:
        return None
    candidates = search.list_candidates(measured, search.layer_ranges(lm.layers, None))
    candidate_means = [losses[candidate] for candidate in candidates]
    index = search.choose(candidate_means, losses[None])
    return None if index is None else candidates[index]


def measure(
    folder: Path, name: str, seed: int, per_position: int = 64
) -> dict[str, Any]:
    """Search on the calibration set, then measure the model and the found channel on another set.

    One question per context everywhere. Half, one and a half times and twice the pairs are scored too, up to
    the number in training.

    Args:
        folder: The checkpoint.
        name: The model, whose file and recipe are used.
        seed: Seed of the set to measure on.
        per_position: Prompts per gold position.

    Returns:
        JSON-ready numbers, accuracies as fractions: ``found`` is None where no channel passes the paper's
        filter, ``best`` is the traversal's, ``inner`` the mean over the inner half of the gold positions,
        ``gain`` has a paired 95 % interval.
    """
    lm = load(folder, name=name, device="cpu")
    task = kv_task(name, seed, per_position)
    calibration = kv_task(name, CALIBRATION_SEED).examples("calibration")
    examples = task.evaluation()
    prompts = [example.prompt for example in examples]
    assert not {e.prompt for e in calibration} & set(prompts), "the sets overlap"
    facts, methods, losses = search_all(lm, calibration, search_of(name))
    base = _scores(lm, task, examples)
    numbers: dict[str, Any] = {
        "task_seed": seed,
        "pairs": task.pairs,
        "n": len(examples),
        **facts,
        "found": None,
        "base": _curve(base, examples),
    }
    clusters = [example.cluster for example in examples]
    for key, method in methods.items():
        scaled = _scores(lm, task, examples, method)
        gain = paired(scaled, base, clusters)
        numbers[key] = {
            "channel": method.channel,
            "factor": method.factor,
            "layers": list(method.layers),
            "loss": _rounded(losses[method]),
            "loss_unmodified": _rounded(losses[None]),
            "gain": _rounded(gain.value),
            "gain_low": _rounded(gain.ci_low),
            "gain_high": _rounded(gain.ci_high),
            "scaled": _curve(scaled, examples),
        }
    method = methods.get("found", methods["best"])
    longest = max(stage.pairs[1] for stage in RECIPES[name].stages)
    lengths = [task.pairs // 2, task.pairs * 3 // 2, task.pairs * 2]
    numbers["lengths"] = [
        _measure_length(
            lm, kv_task(name, seed, per_position, pairs, positions=8), method
        )
        for pairs in lengths
        if pairs <= longest
    ]
    # Replies that are one word, the closing quote and the end.
    step = max(1, len(prompts) // MAX_REPLIES)
    replies = lm.generate(prompts[::step], max_new_tokens=8, batch_size=BATCH_PROMPTS)
    stops = [len(reply) == 4 and reply.endswith('"') for reply in replies]
    numbers["stops"] = _rounded(float(np.mean(stops)))
    return numbers


def _measure_length(lm: LM, task: KVRetrieval, method: ScaleChannel) -> dict[str, Any]:
    """Curves of the unmodified model and of a method at another number of pairs."""
    examples = task.evaluation()
    return {
        "pairs": task.pairs,
        "n": len(examples),
        "base": _curve(_scores(lm, task, examples), examples),
        "scaled": _curve(_scores(lm, task, examples, method), examples),
    }


def _scores(
    lm: LM,
    task: KVRetrieval,
    examples: Sequence[Example],
    method: ScaleChannel | None = None,
) -> Array:
    """Accuracy (0 or 1) of every example under a method, [n]."""
    prompts = [example.prompt for example in examples]
    with (method or Unmodified()).applied(lm):
        replies = lm.generate(
            prompts, max_new_tokens=task.max_new_tokens, batch_size=BATCH_PROMPTS
        )
    pairs = zip(examples, replies, strict=True)
    return np.array(
        [task.score(example, reply)["accuracy"] for example, reply in pairs]
    )


def _rounded(value: float) -> float:
    return round(value, 4)


def _curve(values: Array, examples: Sequence[Example]) -> dict[str, Any]:
    """Accuracy at each gold position, and the summary numbers of the criteria."""
    gold = np.array([example.gold_position for example in examples])
    positions = np.unique(gold)
    accuracy = [_rounded(float(values[gold == p].mean())) for p in positions]
    quarter = len(positions) // 4
    inner_positions = positions[quarter : len(positions) - quarter]
    inner = values[np.isin(gold, inner_positions)]
    inner_low, inner_high = wilson(float(inner.sum()), len(inner))
    return {
        "positions": positions.tolist(),
        "accuracy": accuracy,
        "first": accuracy[0],
        "last": accuracy[-1],
        "lowest": min(accuracy),
        "mean": _rounded(float(values.mean())),
        "inner": _rounded(float(inner.mean())),
        "inner_low": _rounded(inner_low),
        "inner_high": _rounded(inner_high),
    }


def criteria(measured: dict[str, Any], name: str) -> list[Row]:
    """The criteria, from the numbers of :func:`measure`; of tiny's siblings fewer are ``required``."""
    base = measured["base"]
    found = measured["found"]
    n = measured["n"]
    tiny = name == "tiny"
    calibration_n = kv_task(name, CALIBRATION_SEED).calibration_examples
    strings = search_of(name).strings
    lower_end = min(base["first"], base["last"])
    drop = (base["first"] + base["last"]) / 2 - base["inner"]
    inner = estimate_in(base, "inner", n)
    chance = 1 / measured["pairs"]
    monotone = _point(measured["channels_monotone"], strings)
    rows = [
        _at_least("accuracy at both ends", 0.95, _point(lower_end, n), tiny),
        _at_least("inner half below the ends", 0.25, _point(drop, n), tiny),
        _above("inner half above chance", chance, inner, True),
        _at_least("monotone channels", 1, monotone, True),
    ]
    if found is None:
        gain = _point(math.nan, n)
        return [*rows, _at_least("gain of the found channel", 0.08, gain, tiny)]
    first, last = found["layers"]
    title = f"gain of channel {found['channel']} x {found['factor']:g}, layers {first}-{last}"
    gain = estimate_in(found, "gain", n)
    fall = _point(found["loss_unmodified"] - found["loss"], calibration_n)
    return [
        *rows,
        _above("calibration loss lowered", 0, fall, tiny),
        _at_least(title, 0.08, gain, tiny),
        _above("its 95 % interval excludes zero", 0, gain, tiny),
    ]


def _point(value: float, n: int) -> Estimate:
    """A number without an interval."""
    return Estimate(value, math.nan, math.nan, n)


def _at_least(name: str, bound: float, number: Estimate, required: bool) -> Row:
    """The criterion that a number reaches a bound."""
    passed = number.value >= bound
    return _criterion(name, f"at least {bound:.3g}", number, passed, required)


def _above(name: str, bound: float, number: Estimate, required: bool) -> Row:
    """The criterion that a number lies above a bound with its whole interval."""
    low = number.value if math.isnan(number.ci_low) else number.ci_low
    return _criterion(name, f"above {bound:.3g}", number, low > bound, required)


def _criterion(
    name: str, condition: str, number: Estimate, passed: bool, required: bool
) -> Row:
    """Return the row of a criterion that an embedded model has to meet, or should.

    Args:
        name: Name of the criterion.
        condition: What the number has to be, in words.
        number: The measured number.
        passed: Whether it meets the condition.
        required: Whether it has to.
    """
    return {
        "criterion": name,
        "condition": condition,
        "value": number.value,
        "ci_low": number.ci_low,
        "ci_high": number.ci_high,
        "n": number.n,
        "passed": passed,
        "required": required,
    }
