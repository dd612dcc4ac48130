"""What the columns of the tables mean."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from posbench.stats import frames
from tests.frames import AFTER, BEFORE, attention, metrics
from tests.messages import refused


def test_without_depth_the_largest_position_counts_as_one() -> None:
    rows = frames.rows_at_positions(metrics().assign(depth=np.nan))
    assert sorted(rows["depth"].unique()) == [0, 0.5, 1]


def test_the_tasks_own_metric_is_the_first_one_of_its_table() -> None:
    other = metrics().assign(
        task="qa", metric=lambda f: f["metric"].str.replace("accuracy", "rouge")
    )
    spread = metrics().iloc[:1].assign(metric="position_bias", gold_position="all")
    table = pd.concat([spread, metrics(), other])
    assert (
        frames.metric_name(metrics()) == "accuracy"
        and frames.metric_name(table) == "score"
    )
    means = (
        frames.rows_over_all_positions(table)
        .groupby(["task", "method"])["value"]
        .first()
    )
    for task in ("kv", "qa"):
        assert list(means[task]) == pytest.approx([np.mean(BEFORE), np.mean(AFTER)])
    change = frames.rows_over_all_positions(table, "difference")
    assert list(change["value"]) == pytest.approx(
        [np.mean(AFTER) - np.mean(BEFORE)] * 2
    )
    assert len(frames.rows_of_metric(table, "position_bias")) == 1


def test_gold_attention_is_that_of_the_item_with_the_answer() -> None:
    gold = frames.gold_attention(attention())
    assert len(gold) == 2 * 3 * 2 and sorted(gold["depth"].unique()) == [0, 0.5, 1]
    assert frames.strongest_layer(gold) == 1
    # The unmodified model decides, where it is there.
    turned = gold.assign(
        attention=gold["attention"].mask(gold["method"] != "none", 1 - gold["layer"])
    )
    assert frames.strongest_layer(turned) == 1
    assert frames.strongest_layer(turned[turned["method"] != "none"]) == 0


def test_what_is_missing_or_mixed_is_named() -> None:
    with refused(
        "attention",
        "columns missing: item",
        allowed=("item", "attention"),
        hint="stage",
    ):
        frames.gold_attention(attention().drop(columns="item"))
    with refused("metrics model", "a, b", allowed="one"):
        frames.need_single_value(
            pd.concat([metrics(model=m) for m in "ab"]), "metrics", "model", "task"
        )
