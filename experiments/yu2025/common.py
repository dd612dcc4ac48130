"""Common parts of the paper's studies: the layers that read the gold item, channels and their controls, contrasts."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posbench.errors import UserError
from posbench.files.atomic import Row, round_values
from posbench.late import pd
from posbench.methods.scale_channel import (
    channel_role,
    check_channels,
    scale_layer_range,
)
from posbench.model import families
from posbench.run.base import Run
from posbench.stats import bootstrap
from posbench.stats.bootstrap import Array, Estimate, Group, K
from posbench.stats.findings import Finding, estimate_row
from posbench.stats.frames import UNMODIFIED
from posbench.stats.outcomes import MAX_MISSING_SHARE, PROBLEM
from posbench.studies.prompts import LayerRange, gold_index
from posbench.tasks import Example

CROP_LAYERS = (1, 7)
"""First and last cropped layer of 32, 0-based: 2 to 8 counted from 1 in Yu et al. 2025, Section 2.2."""
RETRIEVAL_LAYERS = (15, 20)
"""First and last retrieval layer of 32, 0-based: Yu et al. 2025."""
MIN_LAYERS_FOR_SHARE = 16  # of fewer layers a share of the paper's says little


def retrieval_layers(
    layers: LayerRange | None, unmodified: Sequence[float] | Array
) -> LayerRange:
    """Return the first and the last layer whose attention is looked at.

    Args:
        layers: The user's choice; None for the paper's 15 to 20 of 32, or that share of another depth.
        unmodified: Attention to the gold item by layer in the unmodified model, [L]. Below 16 layers a share
            says little, and the default is the one layer where it is strongest.
    """
    if layers is not None:
        return layers
    if len(unmodified) < MIN_LAYERS_FOR_SHARE:
        strongest = int(np.argmax(unmodified))
        return (strongest, strongest)
    return scale_layer_range(RETRIEVAL_LAYERS, len(unmodified))


def layers_label(first: int, last: int) -> str:
    """``layer 1`` or ``layers 1-3``."""
    if first == last:
        return f"layer {first}"
    return f"layers {first}-{last}"


def study_channels(
    run: Run, channel: int | None, controls: int, seed: int
) -> list[int]:
    """Return a channel to study, then random channels as controls, in order.

    Args:
        run: The run.
        channel: The channel; None for the channel in the model's scale_channel block.
        controls: Number of control channels.
        seed: Of their draw.

    Raises:
        UserError: There is no channel, or there are too few others.
    """
    lm = run.lm
    if channel is None:
        channel = run.model.blocks.get("scale_channel", {}).get("channel")
    if channel is None:
        allowed = f"a channel (model {lm.name} has no scale_channel block with one)"
        hint = (
            f"find one: posbench stages=[search] model={lm.name} method=scale_channel"
        )
        raise UserError("study.channel", None, allowed, hint)
    check_channels(lm, "study.channel", [int(channel)])
    width = families.text_config(lm.model).hidden_size
    candidates = [index for index in range(width) if index != channel]
    if controls > len(candidates):
        allowed = f"at most {len(candidates)}, the other channels of {lm.name}"
        raise UserError("study.controls", controls, allowed, "set study.controls=3")
    rng = random.Random(f"posbench control channels {seed}")
    return [int(channel), *sorted(rng.sample(candidates, controls))]


def channel_subject(run: Run, channel: int) -> str:
    """The subject of claims on a channel, see :func:`posbench.methods.scale_channel.channel_role`."""
    searched = run.model.blocks.get("scale_channel", {}).get("channel")
    return channel_role(channel, searched, run.model.positional_channel)


def gold_attention_rows(batch: Sequence[Example], attention: Array) -> list[Row]:
    """Attention to the gold item of each prompt, by layer, as :meth:`posbench.studies.prompts.Prompts.under` takes it.

    Args:
        batch: B examples.
        attention: Attention to their items, [B, L, N].
    """
    rows = []
    for example, layers in zip(batch, attention, strict=True):
        rows.append({"attention": round_values(layers[:, gold_index(example)])})
    return rows


def contrast_columns(scores: pd.DataFrame, method: str, base: str) -> dict[str, float]:
    """Compare the scores of a method with others on the same prompts.

    Args:
        scores: As of :func:`posbench.run.replies.compare_scores`.
        method: The method.
        base: Another method.

    Returns:
        The method's mean (value) and n; paired, its ``difference`` from the base and its ``gain`` on the
        unmodified model; each with its interval, over prompts that all three answered; the largest share of
        prompts that one left unanswered (``missing``); and the share whose score the method ``changed``.
    """
    compared = [method, base, UNMODIFIED]
    all_scores = scores.pivot(index="id", columns="method", values="score")[
        list(dict.fromkeys(compared))
    ]
    missing = float(all_scores.isna().mean().max())
    # Differences are over prompts that all methods answered.
    wide = all_scores.dropna()
    if wide.empty:
        names = ("value", "difference", "gain")
        columns = {
            k: v
            for name in names
            for k, v in estimate_row(bootstrap.NO_ESTIMATE, name).items()
        }
        return {**columns, "n": 0, "missing": missing, "changed": math.nan}
    answered = scores[(scores["method"] == method) & scores["score"].notna()]
    value = bootstrap.mean(answered["score"].to_numpy(), list(answered["cluster"]))
    cluster_of_id = scores.drop_duplicates("id").set_index("id")["cluster"]
    clusters = list(cluster_of_id.loc[wide.index])
    after = wide[method].to_numpy()
    difference = bootstrap.paired(after, wide[base].to_numpy(), clusters)
    unmodified = wide[UNMODIFIED].to_numpy()
    gain = bootstrap.paired(after, unmodified, clusters)
    return {
        **estimate_row(value),
        "n": value.n,
        **estimate_row(difference, "difference"),
        **estimate_row(gain, "gain"),
        "missing": missing,
        "changed": float((after != unmodified).mean()),
    }


def unless_missing(finding: Finding, row: Any) -> Finding:
    """Return a finding unchanged, or without a verdict where too many answers are missing.

    Args:
        finding: The finding.
        row: The row of :func:`contrast_columns` that it rests on.
    """
    missing = row.get("missing", 0.0)
    if not missing > MAX_MISSING_SHARE:
        return finding
    return finding.not_testable(
        f"{PROBLEM}: {missing:.1%} of the replies are no answers"
    )


def difference_of_means(
    groups: Mapping[K, Group], after: K, before: K, resamples: int
) -> Estimate:
    """Estimate the mean of group ``after`` minus that of group ``before``.

    It is :func:`posbench.stats.bootstrap.paired` where both have the same prompts, else
    :func:`posbench.stats.bootstrap.statistic`.

    Args:
        groups: Values of prompts, and the question of each, by group.
        after: Name of the one group.
        before: Name of the other.
        resamples: Bootstrap draws.
    """
    after_values, after_clusters = groups[after]
    before_values, before_clusters = groups[before]
    if list(after_clusters) == list(before_clusters):
        return bootstrap.paired(after_values, before_values, after_clusters)
    return bootstrap.statistic(
        groups, lambda means: means[after] - means[before], resamples=resamples
    )
