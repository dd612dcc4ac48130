"""Verdicts follow from the interval alone, and estimates survive a table."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from posbench.stats import findings
from posbench.stats.bootstrap import Estimate
from posbench.stats.findings import COLUMNS, Finding

AT = Estimate(0.3, 0.1, 0.5, 40)


@pytest.mark.parametrize(
    ("bound", "above", "below"),
    [
        (0.0, "holds", "does not hold"),
        (0.1, "does not hold", "does not hold"),
        (0.3, "does not hold", "does not hold"),
        (0.5, "does not hold", "does not hold"),
        (0.6, "does not hold", "holds"),
    ],
)
def test_a_claim_holds_where_the_whole_interval_lies_on_its_side(
    bound: float, above: str, below: str
) -> None:
    assert Finding.above("c", "s", AT, bound).verdict == above
    assert Finding.below("c", "s", AT, bound).verdict == below


def test_a_number_keeps_its_interval_or_has_none() -> None:
    found = Finding.above("claim", "points", AT, note="read this")
    assert (found.value, found.ci_low, found.ci_high, found.n, found.note) == (*AT, "read this")
    alone = Finding.that(True, "claim", "count", (7, 3))
    assert (alone.value, alone.n, alone.verdict) == (7, 3, "holds") and math.isnan(alone.ci_low)
    silent = Finding.untestable("claim", "points", "too small")
    assert silent.verdict == "not testable here" and math.isnan(silent.value) and silent.n == 0
    table = findings.frame([found, alone, silent], "tiny")
    assert tuple(table) == COLUMNS and list(table["model"]) == ["tiny"] * 3 and table["value"][0] == 0.3


@pytest.mark.parametrize("name", ["", "change"])
def test_an_estimate_survives_a_row(name: str) -> None:
    row = findings.ends(AT, name) | {"n": AT.n}
    wanted = ["change", "change_ci_low", "change_ci_high"] if name else ["value", "ci_low", "ci_high"]
    assert list(row) == [*wanted, "n"]
    assert findings.estimate(row, name) == findings.estimate(pd.DataFrame([row]).iloc[0], name) == AT
    assert findings.estimate(row, name, scale=10) == pytest.approx((3, 1, 5, 40))
