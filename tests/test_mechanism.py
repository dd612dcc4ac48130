"""docs/mechanism.md has the numbers of its own runs, as experiments/results keeps them, and no others."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from tools import mechanism
from tools.pages import between_marks

PAGE = mechanism.PAGE.read_text(encoding="utf-8")
MADE = "python tools/mechanism.py"


@pytest.fixture(scope="module")
def numbers() -> pd.DataFrame:
    return mechanism.read_numbers()


def test_the_tables_are_those_of_the_kept_numbers(numbers: pd.DataFrame) -> None:
    for name, table in mechanism.tables(numbers).items():
        assert between_marks(mechanism.PAGE, name, table) == PAGE, MADE


def test_no_interval_stands_outside_the_tables_that_are_made(
    numbers: pd.DataFrame,
) -> None:
    text = PAGE
    for name in mechanism.tables(numbers):
        text = re.sub(f"<!-- {name} -->.*?<!-- /{name} -->", "", text, flags=re.DOTALL)
    assert re.findall(r"\[-?\d[\d.]*, -?\d[\d.]*\]", text.replace(",", ", ")) == [
        "[0, 2]",
        "[3, 3]",
    ], "layers of a command"


def test_the_verdicts_are_those_of_the_numbers(numbers: pd.DataFrame) -> None:
    """Against the bars of metrics.md: 80 % of a level, a point of a score, 5 % of the inner attention."""
    for (experiment, model), run in numbers.groupby(["experiment", "model"]):
        by_name = run.set_index("name")
        bars = {"crop_level": 0.8, "crop_score": 0.01}
        if experiment == mechanism.CHANNEL:
            bars = {"gold_rise": 0.05 * by_name.loc["gold_unmodified", "value"]}
        elif experiment == mechanism.TOKENS:
            continue
        for name, bar in bars.items():
            row = by_name.loc[name]
            before = by_name["value"].get("unmodified_inner", 0)
            if name == "crop_level" and (
                before > bar * by_name.loc["unmodified_first", "value"]
            ):
                assert row["verdict"] == "not testable", (experiment, model, name)
            elif row["ci_low"] > bar:
                assert row["verdict"] == "holds", (experiment, model, name)
            elif row["ci_high"] < bar:
                assert row["verdict"] == "contradicted", (experiment, model, name)
            else:
                assert row["verdict"] == "inconclusive", (experiment, model, name)


def test_the_channel_steers_attention_on_the_model_that_the_page_names(
    numbers: pd.DataFrame,
) -> None:
    rises = numbers[numbers["name"] == "gold_rise"].set_index("model")
    assert rises.index[rises["verdict"] == "holds"].tolist() == ["tiny_nope"]
    gains = numbers[numbers["experiment"] == mechanism.TOKENS]
    by_keys = gains[gains["name"] == "earlier"].set_index("model")
    assert by_keys.index[by_keys["ci_low"] > 0].tolist() == ["tiny_nope"]
    assert "`tiny_nope` do the keys alone raise accuracy" in PAGE
    whole = gains[gains["name"] == "both"].set_index("model")
    last = gains[gains["name"] == "last"].set_index("model")
    assert whole.loc["tiny_nope", "ci_low"] < 0 < whole.loc["tiny_nope", "ci_high"]
    assert last.loc["tiny_nope", "ci_high"] < 0 < last.loc["tiny_b", "ci_low"]
    assert by_keys.loc["tiny_b", "ci_high"] < 0


def test_numbers_in_sentences_follow_from_the_kept_ones(numbers: pd.DataFrame) -> None:
    levels = numbers[numbers["experiment"] == mechanism.MASK]
    levels = levels.pivot(index="model", columns="name", values="value")
    last = levels["unmodified_inner"] + levels["last_over_inner_attention"]
    at_ends = np.concatenate([levels["unmodified_first"], last])
    assert f"{at_ends.min():.2f} to {at_ends.max():.2f} per token" in PAGE
    # Holm's first step of seven claims, 90 % power, an effect of a tenth.
    deviations = (norm.isf(0.05 / 7 / 2) + norm.isf(0.1)) / 0.1
    assert f"needs {np.ceil((0.25 * deviations) ** 2):.0f} inner prompts" in PAGE
    for prompts in (700, 200):
        largest = np.floor(100 * np.sqrt(prompts) / deviations) / 100
        assert re.search(rf"up to\s+{largest:.2f}", PAGE), prompts
    points = 10 * deviations * np.sqrt([0.4, 0.1]) / np.sqrt(700)
    assert f"detect {points[0]:.1f} points" in PAGE and f"{points[1]:.1f} if" in PAGE
