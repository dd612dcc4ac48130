"""The base search on planted peaks and troughs, and what it finds on the real waves."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from lpes.bucket_search import PUBLISHED_BASES, BucketSearch
from lpes.waves import ChosenBase, choose_bases, extrema
from tests.conftest import run_folders
from tests.messages import refused

EMPTY = np.array([], dtype=int)


def planted(**found):
    """Candidates 1, 2, ... with peaks and troughs: ``a=([peaks], [troughs])``."""
    return {
        float(i + 1): (np.array(p, dtype=int), np.array(t, dtype=int))
        for i, (p, t) in enumerate(found.values())
    }


def test_a_base_is_chosen_for_its_peaks_in_troughs_and_its_troughs_under_peaks():
    found = planted(
        first=([100, 500], [300]),
        same=([100, 500], [300]),
        fills=([301], [99, 502]),
        half=([297], []),
    )
    assert choose_bases(found, 1.0, 2) == [
        ChosenBase(1.0, 0, pytest.approx(float("nan"), nan_ok=True)),
        ChosenBase(3.0, 3, 2.0),
    ]


def test_what_cancelled_counts_no_more():
    found = planted(
        first=([100, 500], []), one=([], [100]), again=([], [101]), other=([], [499])
    )
    assert [step.base for step in choose_bases(found, 1.0, 3)] == [1.0, 2.0, 4.0]
    assert [step.coincidences for step in choose_bases(found, 1.0, 4)] == [0, 1, 1, 0]


def test_ties_go_to_the_smaller_offset_then_to_the_smaller_base():
    found = planted(
        first=([100], []), far=([], [103]), near=([], [101]), too_far=([], [104])
    )
    assert [step.base for step in choose_bases(found, 1.0, 2)] == [1.0, 3.0]
    assert [
        step.base
        for step in choose_bases(
            planted(first=([5], []), a=([], [6]), b=([], [4])), 1.0, 3
        )
    ] == [
        1.0,
        2.0,
        3.0,
    ]


def test_extrema_are_the_largest_and_smallest_within_reach():
    curve = np.random.default_rng(0).normal(size=400)
    for reach in (1, 5, 40):
        windows = [
            np.delete(curve[max(i - reach, 0) : i + reach + 1], min(i, reach))
            for i in range(400)
        ]
        expected = (
            [i for i in range(1, 399) if curve[i] > windows[i].max()],
            [i for i in range(1, 399) if curve[i] < windows[i].min()],
        )
        assert tuple(part.tolist() for part in extrema(curve, reach)) == expected


def test_the_published_list_comes_out_in_part(posbench, outputs):
    """18000 and 19000 follow 10000 where a base has six to eight peaks; the rest of the list is not found."""
    assert (
        posbench(
            "study=bucket_search", "study.reach=[250,400]", "stages=[study]"
        ).status
        == 0
    )
    (folder,) = run_folders(outputs)
    waves = pd.read_csv(folder / "waves.csv", keep_default_na=False)
    bases = waves.groupby("step")["base"].first().tolist()
    assert bases[:3] == [10000, 18000, 19000] and set(bases) != set(PUBLISHED_BASES)
    table = pd.read_csv(folder / "bases.csv").groupby("reach")
    assert table.get_group(250)["base"].tolist() == bases
    assert table["published"].sum().to_dict() == {250: 3, 400: 2}
    peaks = waves[(waves["base"] == 10000) & (waves["extremum"] == "peak")]
    assert 4 <= len(peaks) <= 9
    alone = waves[waves["base"] == 10000].set_index("distance")["score"]
    place = int(peaks["distance"].iloc[1])
    assert alone[place] == alone.loc[max(place - 250, 1000) : place + 250].max()
    angles = place * 10000.0 ** (-np.arange(0, 128, 2) / 128)
    assert alone[place] == pytest.approx(
        2 * np.cos(angles).sum() / np.sqrt(128), rel=1e-6
    )
    (finding,) = pd.read_csv(folder / "findings.csv").itertuples()
    assert (finding.value, finding.n, finding.verdict) == (3, 6, "contradicted")


def test_fewer_bases_than_are_published_cannot_be_all_of_them():
    for count, verdict in ((3, "not testable"), (6, "contradicted")):
        bases = pd.DataFrame({"reach": [64] * count, "published": 0})
        # However many were asked for: a search may find fewer.
        (finding,) = BucketSearch(count=6).findings({"bases": bases})
        assert finding.verdict == verdict


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("candidates", (30000, 10000, 500)),
        ("distances", (4000, 100)),
        ("first", 0.0),
        ("dim", 3),
    ],
)
def test_a_search_among_nothing_is_refused(field: str, value: Any) -> None:
    with refused(f"study.{field}", allowed=(), hint=f"study.{field}="):
        BucketSearch(**{field: value})
