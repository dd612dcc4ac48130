"""Tables, verdicts and thresholds of made-up gaps: each can fail."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy

from posbench import paths
from posbench.files.markdown import markdown
from posbench.stats.bootstrap import Z95
from wu2025.synthetic_claims import findings, thresholds
from wu2025.synthetic_results import (
    CELL_FILES,
    _misses,
    _networks,
    _omega_counts,
    _omegas,
    _verdicts,
)
from wu2025.synthetic_tables import (
    CELL_COLUMNS,
    PAIR_NAMES,
    SETTINGS,
    _difference_half_width,
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
        "omega": "none",
        "acc_ab": 0.7,
        "acc_ba": 0.4,
        "draws": 1,
        "draw_sd": 0.0,
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


def test_of_two_iterations_with_equal_work_the_later_one_stands() -> None:
    gaps = pd.concat(
        [
            made(0.9, 0, 0, iteration=1000),
            made(0.9, 0, 0, iteration=1000, seed=1),
            made(0.2, 0, 0, iteration=2000),
        ]
    )
    assert set(last_iterations(gaps)["iteration"]) == {2000}


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
    near = "this network agrees"
    far = "this network differs"
    assert list(verdict["rope"]) == [near, far, far]
    assert list(verdict["none"]) == [far, near, far]
    near_zero = both.set_index(["pe", "pair"])["near_zero"]
    assert near_zero["none", "middle-last"] and near_zero.sum() == 1, (
        "the paper's -0.006, with which 0 would agree"
    )
    assert compare_cells(made(0.2, 0, 0, bias="none"), ["wu2025_fig3.csv"]).empty


def seeds_around(gaps: Sequence[float], **settings: object) -> pd.DataFrame:
    """A training of each first-middle gap; the sets of Figure 3's RoPE with a causal mask."""
    return pd.concat(
        [
            made(gap, 0.433, -0.241, pe="rope", seed=seed, **settings)
            for seed, gap in enumerate(gaps)
        ]
    )


def first_middle(*frames: pd.DataFrame) -> pd.Series:
    """The cell of Figure 3, paper 0.472, of gaps made by :func:`seeds_around`."""
    cells = compare_cells(pd.concat(frames), ["wu2025_fig3.csv"])
    return cells.set_index("pair").loc["first-middle"]


def test_agreement_needs_seeds_and_counts_their_variance() -> None:
    assert first_middle(seeds_around([0.472] * 2))["verdict"] == "this network agrees"
    assert first_middle(seeds_around([0.472] * 3))["verdict"] == "agrees"
    assert first_middle(seeds_around([0.43]))["verdict"] == "cannot tell"
    assert first_middle(seeds_around([0.2]))["verdict"] == "this network differs"
    assert first_middle(seeds_around([0.19, 0.2, 0.21]))["verdict"] == "differs"
    # The mean is the paper's, but seeds that spread by 0.04 could have it by chance.
    cell = first_middle(seeds_around([0.432, 0.472, 0.512]))
    assert cell["verdict"] == "inconclusive" and cell["spread"] == pytest.approx(0.04)
    # Student's t with two degrees of freedom: three seeds of ours, five of the paper's.
    half = scipy.stats.t.ppf(0.95, 2) * 0.04 * (1 / 3 + 1 / 5) ** 0.5
    assert cell["difference_ci_high"] == pytest.approx(half)
    assert cell["difference_ci_low"] == pytest.approx(-half)


def test_equal_seeds_keep_the_noise_of_their_tests() -> None:
    cell = first_middle(seeds_around([0.472] * 3))
    half = scipy.stats.t.ppf(0.95, 2) * 0.013 / Z95 * (1 / 3 + 1 / 5) ** 0.5
    assert cell["difference_ci_high"] == pytest.approx(half)


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("draws", [1, 5])
def test_the_interval_covers_the_difference(seeds: int, draws: int) -> None:
    # Five runs of the paper with one draw each, ours with several: all seeds and omegas drawn alike.
    rng = np.random.default_rng(0)
    between_seeds = 0.03
    between_draws = 0.1 if draws > 1 else 0.0
    trials = 2000
    covered = 0
    for _ in range(trials):
        paper = rng.normal(0, np.hypot(between_seeds, between_draws), 5).mean()
        gaps = rng.normal(0, between_seeds, (seeds, 1))
        gaps = gaps + rng.normal(0, between_draws, (seeds, draws))
        draw_sd = 0.0
        if draws > 1:
            draw_sd = gaps.var(axis=1, ddof=1).mean() ** 0.5
        cell = SimpleNamespace(
            seeds=seeds,
            draws=draws,
            draw_sd=draw_sd,
            test_sd=draw_sd / draws**0.5,
            spread=gaps.mean(axis=1).std(ddof=1),
        )
        covered += abs(gaps.mean() - paper) < _difference_half_width(cell)
    # It may be too wide, as Satterthwaite's degrees of freedom are few.
    assert 0.9 - 3 * (0.9 * 0.1 / trials) ** 0.5 < covered / trials < 0.98


def test_draws_of_omega_widen_the_interval() -> None:
    draws = {"draws": 5, "draw_sd": 0.1}
    narrow = first_middle(seeds_around([0.46, 0.472, 0.484]))
    wide = first_middle(seeds_around([0.46, 0.472, 0.484], **draws))
    # Each of the paper's five runs has one draw.
    seed_part = 0.1**2 / 5 * (1 / 3 + 1 / 5)
    draw_part = 0.1**2 * (1 - 1 / 5) / 5
    freedom = (seed_part + draw_part) ** 2 / (seed_part**2 / 2 + draw_part**2 / 12)
    half = scipy.stats.t.ppf(0.95, freedom) * (seed_part + draw_part) ** 0.5
    assert wide["difference_ci_high"] == pytest.approx(half)
    assert narrow["difference_ci_high"] < wide["difference_ci_high"] / 2
    one = first_middle(seeds_around([0.472], **draws))
    assert one["verdict"] == "cannot tell"


def test_enough_seeds_stand_before_one_that_is_ahead() -> None:
    ahead = seeds_around([0.1], iteration=100_000)
    cell = first_middle(seeds_around([0.47, 0.472, 0.474], iteration=4000), ahead)
    assert (cell["iteration"], cell["seeds"]) == (4000, 3)


def test_both_omegas_stand_beside_the_paper() -> None:
    # Figure 16, RoPE without mask: 0.164, 0.163 and -0.003.
    network = {
        "vocabulary": "fixed",
        "mask": "full",
        "pe": "rope",
        "bias": "first",
    }
    fresh = {"omega": "fresh", "draws": 5, "draw_sd": 0.01}
    seeds = range(3)
    trained = [
        made(0.556, 0.553, 0, seed=seed, omega="training", **network) for seed in seeds
    ]
    moved = [made(0.16, 0.17, 0, seed=seed, **fresh, **network) for seed in seeds]
    alone = made(0.5, 0.5, 0, **{**network, "mask": "causal", "omega": "training"})
    gaps = pd.concat([*trained, *moved, alone])
    cells = compare_cells(gaps, ["wu2025_fig16.csv"])
    assert cells["counted"].sum() == len(cells) == 3 * 2 + 3
    counts = _omega_counts(cells).set_index(["network", "omega of the tests"])
    assert counts.loc[("RoPE", "training"), ["agrees", "differs"]].tolist() == [1, 2]
    assert counts.loc[("RoPE", "fresh"), ["agrees", "differs"]].tolist() == [3, 0]
    distance = counts["mean distance from the paper"].astype(float)
    away = (0.556 - 0.164 + 0.553 - 0.163 + 0.003) / 3
    assert distance["all", "training"] == pytest.approx(away, abs=5e-4)
    table = _omegas(cells)
    assert len(table) == 6
    told = table[table["network"] == "RoPE, no mask, depth 2"].iloc[0]
    assert told["paper"] == "+0.164"
    assert told["training's omega"].startswith("+0.556") and "differs" in told.iloc[-2]
    assert told["fresh omegas"].startswith("+0.160") and "agrees" in told.iloc[-1]
    causal = table[table["network"] == "RoPE, causal, depth 2"]
    assert set(causal["fresh omegas"]) == {"not measured"}
    verdict = _verdicts(cells, {"gaussian": 0, "fixed": 18}).set_index("verdict")
    assert verdict.filter(like="training's omega").sum().sum() == 18
    assert verdict.filter(like="fresh omegas").sum().sum() == 18
    assert verdict.loc["not trained", "fixed, fresh omegas"] == 15


def test_an_older_table_keeps_its_longer_training_of_one_omega() -> None:
    network = {"vocabulary": "fixed", "pe": "rope"}
    old = made(0.5, 0, 0, iteration=20_000, omega="training", **network)
    new = [
        made(0.4, 0, 0, iteration=2000, omega=omega, **network)
        for omega in ("training", "fresh")
    ]
    both = combine(pd.concat(new), old)
    assert both.groupby("omega")["iteration"].unique().map(list).to_dict() == {
        "fresh": [2000],
        "training": [20_000],
    }


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
    told = _verdicts(cells, {"gaussian": 18, "fixed": 0}).set_index("verdict")
    assert told.loc["not trained", "gaussian"] == 18 - 6
    assert told[["gaussian", "gaussian, near zero"]].sum().sum() == 18
    assert told.filter(like="fixed").sum().sum() == 0
    misses = _misses(cells)
    agrees = cells["verdict"] == "this network agrees"
    assert len(misses) == (cells["counted"] & ~agrees).sum() == 4
    away = misses["difference"].astype(float).abs()
    assert (away.diff().dropna() <= 0).all() and "same" in set(misses["sign"])


def test_the_committed_page_counts_every_cell_once() -> None:
    gaps = pd.read_csv(
        paths.EXPERIMENTS / "wu2025/results/gaps.csv", keep_default_na=False
    )
    cells = compare_cells(gaps, CELL_FILES)
    assert cells["counted"].sum() > 219
    counted = cells[cells["counted"]].groupby(["figure", *CELL_COLUMNS, "omega"])
    assert counted.size().eq(1).all()
    assert (cells.loc[cells["verdict"] == "agrees", "seeds"] >= 3).all()
    printed = pd.concat([read_printed_cells(file) for file in CELL_FILES])
    vocabularies = printed["vocabulary"].value_counts()
    told = _verdicts(cells, vocabularies)
    numbers = told.drop(columns=["verdict", "meaning"]).sum()
    assert numbers.filter(like="gaussian").sum() == vocabularies["gaussian"] == 126
    assert numbers.filter(like="training's").sum() == vocabularies["fixed"] == 126
    assert numbers.filter(like="fresh").sum() == 126
    page = (paths.EXPERIMENTS / "wu2025/results/README.md").read_text()
    assert markdown(list(told), told.to_numpy().tolist()) in page
    for table in (_misses(cells), _omega_counts(cells), _omegas(cells)):
        assert markdown(list(table), table.to_numpy().tolist()) in page
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
