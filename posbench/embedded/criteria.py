"""What a trained model must show, measured by posbench's own search and method."""

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
from posbench.stats.bootstrap import Array, paired, wilson
from posbench.tasks import Example, KVRetrieval

CALIBRATION_SEED = 0
CHOOSING_SEED = 1
EVALUATION_SEED = 2
"""Task seeds of three disjoint sets: for the search, for the choice among training seeds, to publish."""
STRING_SETS = (
    10  # further sets of random strings for the search: does its choice depend on them?
)
BATCH = 64  # prompts per forward


def kv_task(
    name: str, seed: int, per_position: int = 64, pairs: int = 0, positions: int = 0
) -> KVRetrieval:
    """The task of a model's file, over all gold positions or over some evenly spread ones."""
    task = KVRetrieval(**model_config(name).blocks["kv_retrieval"])
    pairs = pairs or task.pairs
    places = np.linspace(0, pairs - 1, positions or pairs).round().astype(int).tolist()
    return replace(
        task, pairs=pairs, positions=tuple(places), seed=seed, limit=per_position
    )


def search_of(name: str) -> ChannelSearch:
    """The search of a model's file: the paper's, with strings as long as the prompts."""
    return ChannelSearch(**model_config(name).blocks["channel"])


def statistics(lm: LM, search: ChannelSearch) -> ChannelStatistics:
    """The search's filter on its random strings."""
    return search.statistics(average_states(lm, search.drawn))


def monotone_at_start(name: str, seed: int) -> int:
    """Channels that pass the search's filter before the first training step."""
    model = build_model(RECIPES[name], torch.Generator().manual_seed(2 * seed))
    return len(
        statistics(load(model, tokenizer=build_tokenizer()), search_of(name)).ranking
    )


def search_all(
    lm: LM, examples: Sequence[Example], search: ChannelSearch
) -> tuple[dict[str, Any], dict[str, ScaleChannel], dict[ScaleChannel | None, float]]:
    """Run the search, a traversal of all channels, and the search on further random strings.

    Returns channels that pass the filter and how often the choice is the same; the choices of the search
    (``found``, unless no channel passes) and of the traversal (``best``); the mean answer loss of the
    unmodified model (None) and of every candidate of the traversal, in nats per token.
    """

    def choice(
        variant: ChannelSearch, measured: ChannelStatistics
    ) -> ScaleChannel | None:
        asked = (
            variant.ask(measured, ranges)
            if measured.ranking or variant is everything
            else []
        )
        index = (
            variant.choose([losses[c] for c in asked], losses[None]) if asked else None
        )
        return None if index is None else asked[index]

    first = statistics(lm, search)
    ranges = search.layer_ranges(lm.layers, None)
    everything = replace(search, candidates="all")
    candidates = everything.ask(first, ranges)
    answers = [lm.answer_ids(e.prompt, e.answers[0]) for e in examples]
    groups = [answers[i : i + BATCH] for i in range(0, len(answers), BATCH)]
    each = np.concatenate(
        [candidate_losses(lm, group, candidates) for group in groups], axis=1
    )
    losses = dict(zip((None, *candidates), each.mean(1).tolist(), strict=True))
    chosen = {"found": choice(search, first), "best": choice(everything, first)}
    others = [replace(search, seed=search.seed + 1 + i) for i in range(STRING_SETS)]
    same = sum(
        choice(other, statistics(lm, other)) == chosen["found"] for other in others
    )
    facts = {"channels_monotone": len(first.ranking), "ranking": first.ranking}
    facts |= {"string_sets": STRING_SETS, "string_sets_same": same}
    return facts, {name: method for name, method in chosen.items() if method}, losses


def measure(
    folder: Path, name: str, seed: int, per_position: int = 64
) -> dict[str, Any]:
    """Search on the calibration set, then measure the model and the found channel on the set of ``seed``.

    One question per context everywhere. Half, one and a half times and twice the pairs are scored too, as far
    as the training of ``name``'s recipe saw so many. Returns JSON-ready numbers, accuracies as fractions:
    ``found`` is None where no channel passes the paper's filter, ``best`` is the traversal's, ``inner`` the
    mean over the inner half of the gold positions, ``gain`` has a paired 95 % interval.
    """
    lm = load(folder, name=name, device="cpu")
    task = kv_task(name, seed, per_position)
    calibration = kv_task(name, CALIBRATION_SEED).examples("calibration")
    examples = task.evaluation()
    assert not {e.prompt for e in calibration} & {e.prompt for e in examples}, (
        "the sets overlap"
    )
    facts, chosen, losses = search_all(lm, calibration, search_of(name))
    base = _scores(lm, task, examples)
    out = {
        "task_seed": seed,
        "pairs": task.pairs,
        "n": len(examples),
        **facts,
        "found": None,
    }
    out["base"] = _curve(base, examples)
    for key, method in chosen.items():
        scaled = _scores(lm, task, examples, method)
        gain = paired(scaled, base, [e.cluster for e in examples])
        numbers = {"loss": losses[method], "loss_unmodified": losses[None]}
        numbers |= {
            "gain": gain.value,
            "gain_low": gain.ci_low,
            "gain_high": gain.ci_high,
        }
        where = {
            "channel": method.channel,
            "factor": method.factor,
            "layers": list(method.layers),
        }
        out[key] = {**where, **_rounded(numbers), "scaled": _curve(scaled, examples)}
    method, out["lengths"] = chosen.get("found", chosen["best"]), []
    longest = max(stage.pairs[1] for stage in RECIPES[name].stages)
    for pairs in (task.pairs // 2, task.pairs * 3 // 2, task.pairs * 2):
        if pairs <= longest:
            other = kv_task(name, seed, per_position, pairs, positions=8)
            some = other.evaluation()
            plain, after = (
                _curve(_scores(lm, other, some, each), some) for each in (None, method)
            )
            out["lengths"].append(
                {"pairs": pairs, "n": len(some), "base": plain, "scaled": after}
            )
    # Replies that are one word, the closing quote and the end.
    prompts = [e.prompt for e in examples[:: max(1, len(examples) // 128)]]
    replies = lm.generate(prompts, max_new_tokens=8, batch_size=BATCH)
    stops = [len(reply) == 4 and reply.endswith('"') for reply in replies]
    return {**out, **_rounded({"stops": float(np.mean(stops))})}


def _scores(
    lm: LM, task: KVRetrieval, examples: Sequence[Example], method: Any = None
) -> Array:
    """Accuracy (0 or 1) of every example under a method, [n]."""
    prompts = [e.prompt for e in examples]
    with (method or Unmodified()).applied(lm):
        replies = lm.generate(
            prompts, max_new_tokens=task.max_new_tokens, batch_size=BATCH
        )
    return np.array(
        [task.score(e, r)["accuracy"] for e, r in zip(examples, replies, strict=True)]
    )


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in numbers.items()}


def _curve(values: Array, examples: Sequence[Example]) -> dict[str, Any]:
    """Accuracy at each gold position, and the summary numbers of the criteria."""
    positions = np.array([e.gold_position for e in examples])
    places = np.unique(positions)
    accuracy = [round(float(values[positions == p].mean()), 4) for p in places]
    quarter = len(places) // 4
    inner = values[np.isin(positions, places[quarter : len(places) - quarter])]
    low, high = wilson(float(inner.sum()), len(inner))
    ends = {"first": accuracy[0], "last": accuracy[-1], "lowest": min(accuracy)}
    means = {"mean": float(values.mean()), "inner": float(inner.mean())}
    summary = _rounded(means | {"inner_low": low, "inner_high": high})
    return {"positions": places.tolist(), "accuracy": accuracy, **ends, **summary}


def criteria(measured: dict[str, Any], name: str) -> list[Row]:
    """The criteria, from the numbers of :func:`measure`; of tiny's siblings fewer are ``required``."""
    base = measured["base"]
    found = measured["found"]
    n = measured["n"]
    tiny = name == "tiny"
    lower = min(base["first"], base["last"])
    mean = (base["first"] + base["last"]) / 2
    inner = base["inner"], base["inner_low"], base["inner_high"]
    rows = [
        _judged("accuracy at both ends", 0.95, (lower,), n, tiny),
        _judged("inner half below the ends", 0.25, (mean - base["inner"],), n, tiny),
        _judged(
            "inner half above chance", 1 / measured["pairs"], inner, n, True, above=True
        ),
        _judged(
            "monotone channels",
            1,
            (measured["channels_monotone"],),
            search_of(name).strings,
            True,
        ),
    ]
    if found is None:
        return [*rows, _judged("gain of the found channel", 0.08, (math.nan,), n, tiny)]
    (first, last), gain = (
        found["layers"],
        (found["gain"], found["gain_low"], found["gain_high"]),
    )
    fall = (found["loss_unmodified"] - found["loss"],)
    asked = kv_task(name, CALIBRATION_SEED).calibration_examples
    title = f"gain of channel {found['channel']} x {found['factor']:g}, layers {first}-{last}"
    rows.append(_judged("calibration loss lowered", 0, fall, asked, tiny, above=True))
    rows.append(_judged(title, 0.08, gain, n, tiny))
    return [
        *rows,
        _judged("its 95 % interval excludes zero", 0, gain, n, tiny, above=True),
    ]


def _judged(
    name: str,
    bound: float,
    at: Sequence[float],
    n: int,
    required: bool,
    above: bool = False,
) -> Row:
    """A number that must reach a bound, or lie above it with its whole interval."""
    value, low, high = (*at, math.nan, math.nan)[:3]
    passed = (value if math.isnan(low) else low) > bound if above else value >= bound
    row = {
        "criterion": name,
        "condition": f"{'above' if above else 'at least'} {bound:.3g}",
        "value": value,
    }
    return {
        **row,
        "ci_low": low,
        "ci_high": high,
        "n": n,
        "passed": passed,
        "required": required,
    }
