"""Tables, verdicts and thresholds of made-up gaps: each can fail."""

from __future__ import annotations

import pandas as pd
import pytest

from posbench import paths
from posbench.files.markdown import markdown
from posbench.studies.wu2025.synthetic_claims import findings, thresholds
from posbench.studies.wu2025.synthetic_results import (
    FILES,
    _misses,
    _networks,
    _verdicts,
)
from posbench.studies.wu2025.synthetic_tables import (
    CELL,
    PAIR_NAMES,
    SETTINGS,
    causal_without_pe,
    combine,
    compare_cells,
    last_iterations,
    mean_over_seeds,
    read_printed_cells,
    uniform_sinks,
)


def made(
    fm: float,
    fl: float,
    ml: float,
    *,
    iteration: int = 8000,
    seed: int = 0,
    **settings: object,
) -> pd.DataFrame:
    """Rows of ``gaps`` for one training with these gaps, each +-0.013."""
    fixed = {
        "vocabulary": "gaussian",
        "scale": "paper",
        "std": 0.125,
        "mask": "causal",
        "pe": "none",
        "depth": 2,
        "residual": True,
        "bias": "first+last",
        "seed": seed,
        "iteration": iteration,
        "acc_ab": 0.7,
        "acc_ba": 0.4,
        "n": 10_000,
        "train_loss": 0.5,
        "train_accuracy": 0.8,
        "novel_first": 0.8,
        "novel_middle": 0.7,
        "novel_last": 0.8,
        "hardware": "x",
        **settings,
    }
    rows = [
        {
            **fixed,
            "pair": pair,
            "gap": gap,
            "ci_low": gap - 0.013,
            "ci_high": gap + 0.013,
        }
        for pair, gap in zip(PAIR_NAMES, (fm, fl, ml), strict=True)
    ]
    return pd.DataFrame(rows)


NO_SINKS = pd.DataFrame(
    columns=[*SETTINGS, "seed", "iteration", "n", "token", "by_head", "by_entry"]
)


def verdicts(*frames: pd.DataFrame) -> dict[str, str]:
    sinks = NO_SINKS.astype({"residual": bool})
    return {
        finding.statistic.split(";")[0]: finding.verdict
        for finding in findings(pd.concat(frames), sinks)
    }


def test_claims_can_fail() -> None:
    name = "smaller of FM and -ML, RoPE, causal"
    beyond = "FM - ML, RoPE, causal"
    rope = {"pe": "rope", "iteration": 70_000}
    assert verdicts(made(0.277, 0, -0.277, **rope)) == {
        name: "holds",
        beyond: "inconclusive",
    }
    assert verdicts(made(0.277, 0, -0.277, pe="rope")) == {
        name: "holds",
        beyond: "not testable",
    }
    assert verdicts(made(0.472, 0.433, -0.241, **rope)) == {
        name: "holds",
        beyond: "holds",
    }
    assert verdicts(made(0.005, 0, -0.277, **rope))[name] == "inconclusive"
    assert verdicts(made(-0.05, 0, -0.277, **rope))[name] == "contradicted"
    assert (
        verdicts(made(0.277, 0, -0.277, pe="rope", iteration=500))[name]
        == "not testable"
    )
    unbiased = {"bias": "none", "residual": False}
    decay = made(-0.055, -0.073, 0, mask="decay", **unbiased)
    rope_2 = made(0, 0, 0, pe="rope", **unbiased)
    found = verdicts(decay, rope_2)
    assert found["FM of the decay mask"] == "holds"
    assert found["FM of RoPE minus FM of the decay mask, depth 2"] == "holds"
    assert (
        verdicts(made(0.06, 0, 0, mask="decay", **unbiased))["FM of the decay mask"]
        == "contradicted"
    )
    (lost,) = [
        v
        for k, v in verdicts(made(0.3, 0, -0.3, pe="rope", bias="none")).items()
        if k.startswith("largest 'smaller")
    ]
    assert lost == "contradicted"


def test_a_training_in_two_tables_counts_once() -> None:
    old = pd.concat(
        [
            made(0.1, 0, 0),
            made(0.1, 0, 0, seed=1, iteration=2000),
            made(0.1, 0, 0, bias="last"),
        ]
    )
    new = pd.concat(
        [
            made(0.2, 0, 0),
            made(0.2, 0, 0, iteration=9000),
            made(0.3, 0, 0, seed=1, iteration=1000),
        ]
    )
    both = combine(new, old)
    found = both[both["pair"] == "first-middle"].set_index(
        ["bias", "seed", "iteration"]
    )["gap"]
    # Seed 0 goes on in the new table, seed 1 has got further in the old one, the other bias is there alone.
    assert found.to_dict() == {
        ("first+last", 0, 8000): 0.2,
        ("first+last", 0, 9000): 0.2,
        ("first+last", 1, 2000): 0.1,
        ("last", 0, 8000): 0.1,
    }
    pd.testing.assert_frame_equal(combine(both, both), both)


def test_means_over_seeds_at_the_last_iteration() -> None:
    gaps = pd.concat(
        [
            made(0.9, 0, 0, iteration=4000),
            made(0.2, 0, -0.2),
            made(0.3, 0, -0.1, seed=1),
        ]
    )
    at = mean_over_seeds(last_iterations(gaps)).set_index("pair").loc["first-middle"]
    assert (at["iteration"], at["seeds"], at["gap"]) == (8000, 2, pytest.approx(0.25))
    assert at["ci_high"] - at["gap"] == pytest.approx(0.013 / 2**0.5), (
        "two independent means of equal precision"
    )
    assert at["spread"] == pytest.approx(0.1 / 2**0.5)
    ahead = pd.concat([gaps, made(0.4, 0, -0.4, iteration=20_000)])
    at = mean_over_seeds(last_iterations(ahead)).set_index("pair").loc["first-middle"]
    assert (at["iteration"], at["seeds"], at["gap"]) == (20_000, 1, 0.4), (
        "a seed that lags behind is left out"
    )
    close = pd.concat([gaps, made(0.4, 0, -0.4, iteration=9000)])
    assert set(last_iterations(close)["iteration"]) == {8000}, (
        "one that is a little ahead does not stand for both"
    )


def test_papers_cells() -> None:
    cells = (
        read_printed_cells("wu2025_fig3.csv")
        .set_index(["mask", "pe", "pair"])["paper"]
        .sort_index()
    )
    # Typed off Figure 3 of the paper, not off the CSV.
    assert cells["causal", "rope"].to_dict() == {
        "first-middle": 0.472,
        "first-last": 0.433,
        "middle-last": -0.241,
    }
    assert cells["full", "sin", "middle-last"] == -0.264
    both = compare_cells(
        pd.concat([made(0.49, 0.15, 0.02, pe="rope"), made(0.2, 0.3, 0.1)]),
        ["wu2025_fig3.csv"],
    )
    verdict = both.set_index(["pe", "pair"])["verdict"]
    # 0.308 - 0.3 lies within 0.05 whatever the noise; 0.106 + 0.006 does not, nor the wide misses.
    assert list(verdict["rope"]) == ["agrees", "differs", "differs"]
    assert list(verdict["none"]) == ["differs", "agrees", "differs"]
    near = both.set_index(["pe", "pair"])["near_zero"]
    assert near["none", "middle-last"] and near.sum() == 1, (
        "the paper's -0.006, with which 0 would agree"
    )
    assert compare_cells(made(0.2, 0, 0, bias="none"), ["wu2025_fig3.csv"]).empty


def test_a_cell_with_both_scales_counts_once_with_the_papers() -> None:
    both = [
        made(0.49, 0.15, 0.02, pe="rope", scale=scale) for scale in ("code", "paper")
    ]
    alone = made(0.2, 0.3, 0.1, scale="code")
    cells = compare_cells(pd.concat([*both, alone]), ["wu2025_fig3.csv"])
    assert len(cells) == 9 and cells["counted"].sum() == 6
    assert set(cells.loc[cells["counted"] & (cells["pe"] == "rope"), "scale"]) == {
        "paper"
    }
    told = _verdicts(cells, 18).set_index("verdict")
    assert (
        told.loc["not trained", "cells"]
        + told["cells"].drop("not trained").sum()
        + told["near_zero"].sum()
        == 18
    )
    misses = _misses(cells)
    assert len(misses) == (cells["counted"] & (cells["verdict"] != "agrees")).sum()
    away = misses["difference"].astype(float).abs()
    assert (away.diff().dropna() <= 0).all() and "same" in set(misses["sign"])


def test_the_committed_page_counts_every_cell_once() -> None:
    gaps = pd.read_csv(
        paths.EXPERIMENTS / "results/wu2025/gaps.csv", keep_default_na=False
    )
    cells = compare_cells(gaps, FILES)
    assert (len(cells), cells["counted"].sum()) == (231, 219)
    assert cells.loc[cells["counted"]].groupby(["figure", *CELL]).size().eq(1).all()
    told = _verdicts(cells, 252)
    assert told[["cells", "near_zero"]].sum().sum() == 252
    page = (paths.EXPERIMENTS / "results/wu2025/README.md").read_text()
    assert markdown(list(told), told.to_numpy().tolist()) in page
    misses = _misses(cells)
    assert markdown(list(misses), misses.to_numpy().tolist()) in page
    compared = _networks(cells[causal_without_pe(cells)])
    assert markdown(list(compared), compared.to_numpy().tolist()) in page.replace(
        "**", ""
    )
    assert set(compared["network"]) == {"no PE, causal, depth 2"} and len(compared) >= 8


def test_thresholds_can_fail() -> None:
    good = made(0.49, 0.44, -0.26, pe="rope", iteration=80_000)
    bad = made(0.28, 0.0, -0.26, pe="rope", iteration=80_000, seed=1)
    late = "RoPE, causal, late"
    for gaps, expected in (
        (good, "yes"),
        (pd.concat([good, bad]), "no"),
        (made(0, 0, 0, mask="full"), "not run"),
    ):
        table = thresholds(gaps)
        assert table.loc[
            table["required"].str.startswith(late), "verdict"
        ].tolist() == [expected]


def test_sinks_of_a_prefix() -> None:
    rows = [
        {
            "vocabulary": "gaussian",
            "scale": "paper",
            "mask": mask,
            "pe": "none",
            "depth": 2,
            "residual": False,
            "bias": "none",
            "seed": 0,
            "iteration": 8000,
            "n": 10_000,
            "token": token,
            "by_head": 0.4 if token < high else 0.1,
            "by_entry": 0.3 if token < high else 0.1,
        }
        for mask, high in (
            ("prefix 2", 2),
            ("causal", 0),
            ("window 5", 1),
            ("window 9", 1),
        )
        for token in range(17)
    ]
    found = findings(made(0, 0, 0, mask="full"), pd.DataFrame(rows))
    verdict = {f.statistic: f.verdict for f in found if "sink" in f.statistic}
    kinds = {"prefix 2": "holds", "causal": "inconclusive", "window 5": "holds"}
    for kind, expected in kinds.items():
        assert [v for k, v in verdict.items() if f"half, {kind}" in k] == [expected] * 3
    # Of 17 tokens the first is seen by rows of 1/1, 1/2, 1/3, 1/4 > 0.2, and by thirteen that give it less.
    assert uniform_sinks("causal", 17)["by_entry"].iloc[0] == pytest.approx(4 / 17)
    assert {v for k, v in verdict.items() if "minus window 5" in k} == {
        "inconclusive"
    }, "both windows alike"
