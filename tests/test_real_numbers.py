"""The pages on a real model: numbers with intervals stand in committed tables, and counts are those of the tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd
import pytest

from posbench import paths
from posbench.model.load import model_config
from posbench.tasks import KVRetrieval
from tools import pages

ROOT = paths.EXPERIMENTS.parent
RESULTS = paths.EXPERIMENTS / "results"
FILES = (
    "smollm2.csv",
    "qwen2_5_coder_0_5b.csv",
    "qwen2_5_coder_0_5b_attention.csv",
    "smollm2_numbers.csv",
)
NUMBER = r"[+-]?\d+\.?\d*(?:e-?\d+)?"
GROUP = re.compile(rf"({NUMBER})\s*(?:%|points|nats)?\s*\[({NUMBER}),\s*({NUMBER})\]")
Interval = tuple[float, float, float]


def page_groups(name: str) -> list[tuple[str, ...]]:
    """Each `value [low, high]` of a page, as it is printed."""
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    return [match.groups() for match in GROUP.finditer(text)]


def kept_intervals(files: Iterable[str]) -> list[Interval]:
    """Value and interval of every row of the committed tables."""
    kept: list[Interval] = []
    for file in files:
        table = pd.read_csv(RESULTS / file, dtype=str, keep_default_na=False)
        if "ci_low" in table:
            columns = table[["value", "ci_low", "ci_high"]].astype(float)
            kept += list(columns.itertuples(index=False, name=None))
        else:
            for value in table["value"]:
                if match := GROUP.fullmatch(value):
                    kept.append(tuple(map(float, match.groups())))
    return kept


def kept_in_remedies(files: Iterable[Path]) -> list[Interval]:
    """Accuracies, differences and biases with their intervals, in per cent and points, of tables of remedies."""
    kept: list[Interval] = []
    for file in files:
        table = pd.read_csv(file)
        for name in ("accuracy", "difference", "bias"):
            columns = table[[name, f"{name}_low", f"{name}_high"]].dropna()
            kept += list(columns.itertuples(index=False, name=None))
    return kept


def is_kept(printed: Sequence[str], kept: Sequence[Interval]) -> bool:
    """Whether an interval is one of the files', rounded to its digits, as a share or in per cent."""
    return any(
        all(
            abs(number * scale - float(text)) <= 0.5001 * 10 ** -_digits(text)
            for number, text in zip(interval, printed, strict=True)
        )
        for interval in kept
        for scale in (1, 100)
    )


def _digits(text: str) -> int:
    return len(text.partition(".")[2])


@pytest.mark.parametrize("page", ["real_model", "real_remedies"])
def test_every_interval_of_the_page_is_in_a_committed_table(page: str) -> None:
    groups = page_groups(page)
    kept = kept_intervals(FILES)
    kept += kept_in_remedies([RESULTS / "remedies" / "smollm2_uuid.csv"])
    assert len(groups) > 15
    assert [group for group in groups if not is_kept(group, kept)] == []
    # A number that nobody measured is noticed.
    assert not is_kept(("12.3", "4.56", "78.9"), kept)


def test_every_interval_of_the_bench_of_remedies_is_in_its_tables() -> None:
    kept = kept_in_remedies((RESULTS / "remedies").glob("*.csv"))
    searched = pd.read_csv(RESULTS / "rope_bases.csv")[["fall", "ci_low", "ci_high"]]
    kept += list(searched.dropna().itertuples(index=False, name=None))
    groups = page_groups("remedies")
    assert len(groups) > 25
    assert [group for group in groups if not is_kept(group, kept)] == []


def test_each_number_that_no_run_stands_behind_says_so() -> None:
    table = pd.read_csv(RESULTS / "smollm2_numbers.csv", dtype=str)
    assert not table[["page", "quantity", "command", "source"]].isna().any(axis=None)
    assert table["source"].str.contains("run not kept|measured").all()


def test_the_count_of_claims_is_that_of_the_file() -> None:
    text = (ROOT / "docs/real_model.md").read_text(encoding="utf-8")
    counts = re.search(
        r"[Oo]f (\d+) claims of Yu et al\. on this model (\d+) hold, (\d+) are\s+contradicted, "
        r"(\d+) are\s+inconclusive[^.]*?and (\d+) are\s+not testable",
        text,
    )
    assert counts is not None
    yu = pages.read_claims(paths.EXPERIMENTS / "yu2025/results/yu2025_claims.csv")[
        "study"
    ]
    claims = pages.read_claims(RESULTS / "smollm2.csv")
    shown = claims[claims["study"].isin(yu) & (claims["kind"] == "paper")]
    shown = shown.drop_duplicates(["model", "claim", "statistic", "value", "n"])
    once = pages.count_once(pages.correct_over_page(shown))
    verdicts = once.loc[once["model"] == "smollm2", "verdict"].value_counts()
    order = ("holds", "contradicted", "inconclusive", "not testable")
    assert list(map(int, counts.groups())) == [
        verdicts.sum(),
        *(verdicts.get(word, 0) for word in order),
    ]


def test_keys_and_values_are_drawn_from_the_same_syllables() -> None:
    """What the page says of them, counted in the prompts themselves."""
    block = dict(model_config("smollm2").blocks["kv_retrieval"])
    block.pop("chat")
    examples = KVRetrieval(**block).evaluation()
    other = own = 0
    for example in examples:
        pairs = re.findall(r'"(\w+)": "(\w+)"', example.prompt)
        key, value = pairs[example.gold_position]
        own += key == value
        other += key != value and key in {value for _, value in pairs}
    text = (ROOT / "docs/real_model.md").read_text(encoding="utf-8")
    assert f"in {other} of the {len(examples)} prompts the key" in text
    assert f"and in {own} its own" in text
