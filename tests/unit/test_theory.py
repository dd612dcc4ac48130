"""Theory against closed forms, brute force, and the numbers that the papers and independent runs print."""

from __future__ import annotations

from functools import partial
from math import comb, expm1, log
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import posbench
from posbench.cli.main import main
from posbench.methods.attention_buckets import AttentionBuckets
from posbench.methods.moice import MoICE
from posbench.model import families
from posbench.studies.behind_rope import causal_mask as study
from posbench.studies.wu2025 import masks as layers_study
from posbench.studies.wu2025 import rollout as rollout_study
from posbench.theory import causal_mask as rope
from posbench.theory import masks
from posbench.theory import rope as rotation
from tests.models import BUILDERS, build

M = -log(0.8)


def test_centre_nodes_by_brute_force() -> None:
    rng = np.random.default_rng(0)
    for mask in (masks.causal(9), masks.window(9, 3), masks.prefix(9, 4), *(rng.random((8, 7, 7)) < 0.3)):
        n = len(mask)
        wanted = []
        for j in range(n):
            found, edge = {j}, {j}
            while edge:
                edge = {i for i in range(n) for k in edge if mask[i, k]} - found
                found |= edge
            wanted += [j] if len(found) == n else []
        assert masks.centre_nodes(mask) == wanted
    assert masks.centre_nodes(masks.causal(9)) == masks.centre_nodes(masks.window(9, 2)) == [0]
    assert masks.centre_nodes(masks.prefix(9, 4)) == [0, 1, 2, 3]
    assert masks.centre_nodes(masks.window(9, 1)) == []


def test_causal_paths_are_binomial() -> None:
    counts = masks.path_counts(masks.causal(10), 5)
    for i in range(10):
        for j in range(10):
            assert counts[i, j] == (comb(4 + i - j, i - j) if j <= i else 0)


def test_the_first_token_takes_over() -> None:
    """Theorem 4.1 with equal weights, 17 tokens."""
    found = masks.rollout([masks.uniform(masks.causal(17))] * 20)
    printed = {1: 0.0588, 2: 0.2023, 4: 0.5831, 6: 0.8413, 10: 0.9860, 20: 0.99998}
    for layers, mass in printed.items():
        assert found[layers - 1][-1, 0] == pytest.approx(mass, abs=6e-5)
        assert (found[layers - 1][-1] <= masks.causal_bound(17, layers, 1 / 17) + 1e-15).all()
    late = [found[layers][-1, 1] for layers in (18, 19)]
    assert log(late[0] / late[1]) == pytest.approx(log(2), rel=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_bounds_hold_for_random_scores(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, layers = 12, 6
    stack = [masks.attention(rng.uniform(-1, 1, (n, n)), masks.causal(n)) for _ in range(layers)]
    smallest = min(weights[masks.causal(n)].min() for weights in stack)
    for t, found in enumerate(masks.rollout(stack), start=1):
        assert (
            found.sum(-1) == pytest.approx(1)
            and (found[-1] <= masks.causal_bound(n, t, smallest) + 1e-12).all()
        )
    seen = masks.prefix(n, 4)
    stack = [masks.attention(rng.uniform(-1, 1, (n, n)), seen) for _ in range(layers)]
    smallest = min(weights[seen].min() for weights in stack)
    for t, found in enumerate(masks.rollout(stack), start=1):
        assert (found[-1] <= masks.prefix_bound(n, 4, t, smallest) + 1e-12).all()
    scores = rng.uniform(-0.7, 0.4, (n, n))
    weights = masks.attention(scores + masks.decay(n, M), masks.causal(n))
    low, high = masks.decay_bounds(n, M, -0.7, 0.4)
    assert (low[masks.causal(n)] <= weights[masks.causal(n)]).all() and (weights <= high + 1e-15).all()


def test_the_printed_upper_bound_fails_in_the_first_row() -> None:
    printed = masks.decay_bounds(5, M, 0, 0, printed=True)[1][0, 0]
    assert printed == pytest.approx(1 / (1 + np.exp(-M)))
    assert (
        printed
        < 1
        == masks.attention(masks.decay(5, M), masks.causal(5))[0, 0]
        <= masks.decay_bounds(5, M, 0, 0)[1][0, 0]
    )


def test_window_and_prefix_masses() -> None:
    for width, printed in ((5, (0, 0.114, 0.9993)), (9, (0.012, 0.665, 1)), (13, (0.084, 0.790, 1))):
        found = masks.rollout([masks.uniform(masks.window(17, width))] * 20)
        assert [found[t - 1][-1, 0] for t in (2, 6, 20)] == pytest.approx(printed, abs=6e-4)
    for width in (2, 3, 5):
        found = masks.rollout([masks.uniform(masks.window(32, width))] * 80)
        first = next(t for t, p in enumerate(found, start=1) if p[-1, 0] >= 0.5)
        assert first == pytest.approx(masks.window_half_time(32, width), rel=0.06)
    last = masks.rollout([masks.uniform(masks.prefix(12, 4))] * 60)[-1][-1]
    assert last[:4] == pytest.approx(0.25, abs=1e-9) and last[4:] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("m", [M, 0.5])
def test_decay_gives_the_negative_binomial_law(m: float) -> None:
    n = 256
    weights = masks.attention(masks.decay(n, m), masks.causal(n))
    x = np.arange(100)
    for t in (2, 4, 6):
        row = masks.rollout([weights] * t)[-1][-1, ::-1][:100]
        assert row == pytest.approx(masks.decay_law(t, m, x), abs=1e-11)
        peak = masks.decay_peak(t, m)
        assert peak == pytest.approx((t - 1) / expm1(m)) and int(row.argmax()) in {
            int(peak + 1e-9),
            int(peak + 1e-9) - 1,
        }


# RoPE


def _walk(weights: np.ndarray, layers: int) -> np.ndarray:
    return np.linalg.matrix_power(weights, layers)[-1, ::-1]


@pytest.mark.parametrize("seed", range(4))
def test_rope_bounds_hold_for_random_lengths_and_angles(seed: int) -> None:
    """Lemma 4.6 against every pair rotated on its own."""
    rng, n, theta, delta = np.random.default_rng(seed), 16, 0.15, 2.0
    b, phi = rng.uniform(0.5, 4, (n, n)), rng.uniform(-delta * theta, delta * theta, (n, n))
    low, high = rotation.bounds(n, theta, 0.5, 4, delta)
    for i in range(n):
        scores = []
        for j in range(i + 1):
            query = np.exp(1j * (phi[i, j] + 0.7)) * np.exp(-1j * i * theta)
            key = np.exp(0.7j) * np.exp(-1j * j * theta)
            scores.append(b[i, j] * (query * key.conjugate()).real)
        weights = np.exp(scores) / np.exp(scores).sum()
        assert (low[i, : i + 1] <= weights).all() and (weights <= high[i, : i + 1] + 1e-15).all()
    assert (np.triu(low, 1) == 0).all() and (np.diff(low[-1]) > 0).all()


def test_rope_bounds_need_angles_below_pi() -> None:
    with pytest.raises(ValueError, match="above pi"):
        rotation.bounds(16, 0.25, 1, 1)
    # A token one whole turn away weighs as much as the query itself.
    turn = masks.attention(rotation.scores(64, 2 * np.pi / 60, 4.0), masks.causal(64))[-1]
    assert turn[3] == pytest.approx(turn[63]) and turn[33] < 0.01 * turn[63]


@pytest.mark.parametrize("width", [2.65, 5.3, 10.6])
def test_the_closed_form_of_rope(width: float) -> None:
    for t in (1, 2, 4, 8, 16):
        exact = [log(comb(t + x, x)) - x**2 / (2 * width**2) for x in range(120)]
        assert rotation.law(t + 1, width, np.arange(120)) == pytest.approx(exact, rel=1e-9, abs=1e-9)
        top = rotation.peak(t + 1, width)
        assert top == int(np.argmax(exact))
        # Appendix H: the derivative with theta^2 is 0 at the peak, the printed one with theta is not.
        assert rotation.stationary(t + 1, width) == pytest.approx(top, abs=1)
        x = rotation.stationary(t + 1, width, printed=0.01)
        assert log((t + x) / x) == pytest.approx(x / (0.01 * width**2)) and x < 0.6 * top


def test_the_peak_under_rope_grows_with_depth_and_wavelength() -> None:
    """Theorem 4.7's monotonicity, and by how much its closed form with one layer's c falls short."""
    tops = layers_study.rope_peaks()
    first = tops[tops.theta == 0.01].set_index("layers")
    # An independent run found these.
    assert list(first["measured"]) == pytest.approx([6, 10, 18, 33, 65], abs=1) and list(
        first["formula"]
    ) == [5, 7, 9, 13, 18]
    weights = masks.attention(rotation.scores(314, 0.01, (0.01 * 5.3) ** -2), masks.causal(314))
    assert _walk(weights, 9)[:-1].argmax() == first.loc[9, "measured"]
    assert (tops.groupby("theta")["measured"].diff().dropna() > 0).all()
    assert (tops.sort_values("theta").groupby("layers")["measured"].diff().dropna() < 0).all()
    assert tops["measured"].between(tops["formula"], tops["formula_shared"]).all()
    mean = (_walk(weights, 17) * np.arange(314)).sum()
    assert mean == pytest.approx(rotation.drift(17, 5.3), rel=0.08)


def test_bounds_that_break_and_bounds_that_hold() -> None:
    rows = layers_study.bounds(n=8, draws=6)
    table = rows.groupby("bound")
    assert table["broken"].sum().to_dict() == {
        "4.4 lower": 0,
        "4.4 upper, printed": 6,
        "4.4 upper, first row mended": 0,
        "4.6 lower": 0,
        "4.6 upper": 0,
    }
    first = rows[(rows.bound == "4.4 upper, printed") & (rows["query"] == 1)]
    # The first row's only weight is 1, whatever the scores.
    assert first["broken"].item() == 6 and first["tightest"].item() == pytest.approx(np.exp(0.4) / 1.8)
    assert (table["weights"].sum() == 6 * 36).all() and (rows["slack"] >= rows["tightest"]).all()


def test_prefix_and_window_tables() -> None:
    mass = layers_study.prefix_mass()
    late = mass[mass.layers == 20].set_index("token")["weight"]
    power = np.linalg.matrix_power(masks.uniform(masks.prefix(12, 4)), 20)[-1]
    assert late.to_numpy() == pytest.approx(power[:5]) and late.loc[1:4].to_numpy() == pytest.approx(
        0.25, abs=1e-9
    )
    behind = mass[(mass.token == 5) & (mass.layers > 18)]["weight"].to_numpy()
    assert behind[0] / behind[1] == pytest.approx(5, rel=0.05)
    halves = layers_study.half_times()
    assert (halves["reaches"] == halves["hops"]).all()


def test_predicted_gaps_are_differences_of_the_rollout() -> None:
    gaps = layers_study.predicted_gaps().set_index(["attention", "layers", "pair"])
    row = np.linalg.matrix_power(masks.attention(masks.decay(17, M), masks.causal(17)), 4)[-1]
    cell = gaps.loc[("decay 0.8, causal", 4, "first - last")]
    assert cell["predicted"] == pytest.approx(row[0] + row[1] - row[14] - row[15]) and cell["paper"] == -0.001
    assert len(gaps) == 18


# Behind RoPE


@pytest.mark.parametrize("alpha", [0, 0.05, 0.2, 0.5, 0.8, 0.99])
def test_closed_forms_are_the_exact_limit(alpha: float) -> None:
    n, lower = 50, np.tril_indices(50, -1)
    assert rope.scores_2(n, alpha)[lower] == pytest.approx(rope.limit(n, 2, alpha)[1][lower], abs=1e-13)
    i = np.arange(1, n + 1)
    plain = np.outer(rope.g_prime(i, alpha) / rope.h_prime(i, alpha), 1 / rope.h_prime(i, alpha))
    assert plain[lower] == pytest.approx(rope.limit(n, 2, alpha, residual=False)[1][lower], abs=1e-13)
    long = np.arange(1, 2001)
    assert (np.diff(rope.h(long, alpha)) < 0).all() and (np.diff(rope.h_prime(long, alpha)) < 0).all()
    step = rope.h_prime(long + 1, alpha) ** 2 - rope.h_prime(long, alpha) ** 2
    assert step == pytest.approx(rope.h_prime_step(long, alpha), abs=1e-13)
    printed = rope.h_prime_step(long, alpha, printed=True)
    assert printed[0] == pytest.approx(step[0]) and not np.allclose(
        printed[1:9], step[1:9], rtol=0.01, atol=0
    )


def test_printed_values() -> None:
    assert [float(rope.scores_2(3, 0)[i, j]) for i, j in ((1, 0), (2, 0), (2, 1))] == pytest.approx(
        [0.154, 0.132, 0.150], abs=1e-3
    )
    for alpha, g2, g50, h50 in (
        (0, 0.53788, 0.03867, 1.06123),
        (0.2, 1.29604, 0.83123, 1.29845),
        (0.5, 2.37754, 2.01974, 1.59456),
    ):
        assert [rope.g(2, alpha), rope.g(50, alpha), rope.h(50, alpha), rope.h(1, alpha)] == pytest.approx(
            [g2, g50, h50, 2], abs=1e-5
        )
    rows = {
        (0, False): (0.0182, 0.0326, 0.0343, 0.0697, 0.1415, 0.1390, 0.1539, 0.3559, 0.3591),
        (0.2, False): (0.3201, 0.4813, 0.4928, 0.4079, 0.7218, 0.7403, 0.4576, 0.8480, 0.8653),
        (0, True): (0.0087, 0.0205, 0.0331, 0.0331, 0.0889, 0.1343, 0.0729, 0.2225, 0.3460),
    }
    for (alpha, rotated), wanted in rows.items():
        found = rope.limit(50, 4, alpha, kernel=rope.rope_kernel(50) if rotated else None)
        assert [found[layer][49, j] for layer in (1, 2, 3) for j in (0, 24, 48)] == pytest.approx(
            wanted, abs=6e-5
        )


def test_scores_rise_with_the_key_but_not_at_every_layer() -> None:
    def rising(alpha: float, layer: int) -> int:
        rows = rope.limit(50, 4, alpha)[layer - 1]
        return sum((np.diff(rows[i, :i]) > 0).all() for i in range(2, 50))

    assert [rising(0, layer) for layer in (2, 3, 4)] == [48, 24, 30], (
        "layers 3 and 4 do not always rise at alpha 0"
    )
    assert [rising(0.2, layer) for layer in (2, 3, 4)] == [48, 48, 48]


def test_the_simulation_meets_the_limit() -> None:
    lower = np.tril_indices(20, -1)
    mean, error = rope.simulate(20, 3, 0.2, dim=512, draws=3000, seed=1)
    exact = rope.limit(20, 3, 0.2)
    assert mean[0][lower] == pytest.approx(0.2, abs=0.01)
    # The bias at layer 2 is about -1/2 per dimension.
    away = mean[1][lower] - exact[1][lower]
    assert abs(away.mean() + 0.5 / 512) < 0.002 and np.corrcoef(mean[1][lower], exact[1][lower])[0, 1] > 0.999
    assert (error[1:][:, lower[0], lower[1]] > 0).all() and np.abs(away).max() < 0.01


def test_layernorm_with_inputs_of_length_sqrt_d_is_l2() -> None:
    dim, lower = 256, np.tril_indices(12, -1)
    plain, _ = rope.simulate(12, 3, 0.2, dim=dim, draws=1500, seed=2)
    normed, _ = rope.simulate(12, 3, 0.2, dim=dim, draws=1500, seed=2, norm="layernorm", input_norm=dim**0.5)
    short, _ = rope.simulate(12, 3, 0.2, dim=dim, draws=1500, seed=2, norm="layernorm")
    assert np.abs(normed[1:] - plain[1:])[:, lower[0], lower[1]].max() < 0.01
    assert np.abs(short[1] - plain[1])[lower].max() > 0.1, "inputs of length 1 are another model"


def test_only_the_mask_leaves_more_than_distance() -> None:
    rotated = {"rope": True, "draws": 2000, "dim": 64, "n": 30, "layers": 3}
    halves = [
        [rope.diagonal_normalised(rope.simulate(mask=mask, seed=seed, **rotated)[0][2]) for seed in (0, 1)]
        for mask in (True, False)
    ]
    lower = np.tril_indices(30, -1)
    with_mask, without = (np.corrcoef(a[lower], b[lower])[0, 1] for a, b in halves)
    assert with_mask > 0.8 and abs(without) < 0.3


def test_diagonal_normalisation() -> None:
    rng = np.random.default_rng(0)
    only_distance = rng.normal(size=9)[np.abs(np.subtract.outer(np.arange(9), np.arange(9)))]
    assert np.nan_to_num(rope.diagonal_normalised(only_distance)) == pytest.approx(0)
    found = rope.diagonal_normalised(rng.normal(size=(2, 9, 9)))
    for offset in range(9):
        assert np.diagonal(found, -offset, axis1=1, axis2=2).mean(-1) == pytest.approx(0)
    assert np.isnan(found[:, 0, 1:]).all() and (found[:, 8, 0] == 0).all()


def test_the_study_draws_and_tabulates_what_the_theory_says(tmp_path: Path) -> None:
    size = ["study.draws=60", "study.tokens=9", "study.dim=16"]
    assert (
        main(
            ["study=causal_mask", *size, "study.show=[1,10]", "stages=[study]", f"runtime.outputs={tmp_path}"]
        )
        == 0
    )
    (folder,) = tmp_path.glob("causal_mask/v*/causal_mask__*")
    tables = {file.stem: pd.read_csv(file) for file in folder.glob("*.csv")}
    drawn = study.CausalMask(show=(1, 10), tokens=9).figures(tables)
    # Colour bars count as axes: a raw and a normalised map for each of four layers.
    assert {name: len(figure.axes) for name, (figure, _) in drawn.items()} == {
        "figure_1": 4,
        "closed_forms": 4,
        "figure_10": 16,
    }
    frame = tables["scores"].set_index(["figure", "setting", "layer", "query", "key"])
    mean, error = rope.simulate(9, 4, 0.0, dim=16, draws=60, rope=True, mask=False)
    one = frame.loc[(10, "alpha 0, RoPE, no mask", 2, 9, 4)]
    assert one["score"] == pytest.approx(mean[1, 8, 3]) and one["standard_error"] == pytest.approx(
        error[1, 8, 3]
    )
    assert len(frame) == 4 * 81, "without a mask all pairs have a score"
    steps = pd.read_csv(folder / "steps.csv")
    assert steps[steps.step.str.startswith("(d)")]["value"].tolist() == pytest.approx(
        [1, 0.1535, 1, 0.1321, 0.1508, 1], abs=1e-4
    )
    verdicts = pd.read_csv(folder / "findings.csv").set_index("claim")["verdict"]
    assert (
        verdicts.filter(like="A.2").item() == "does not hold"
        and verdicts.filter(like="Equation 4").item() == "holds"
    )


@pytest.mark.parametrize("field", ["show=[3]", "show=[2,2]", "dim=5", "tokens=2", "draws=1"])
def test_the_study_refuses_what_it_cannot_simulate(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study=causal_mask", f"study.{field}", f"runtime.outputs={tmp_path}"]) == 2
    assert f"study.{field.split('=')[0]} = " in capsys.readouterr().err


def test_findings_tell_where_the_text_disagrees() -> None:
    tables = study.exact_tables(50)
    found = {finding.claim: finding for finding in study.CausalMask(show=(1,)).findings(tables)}
    later = next(f for claim, f in found.items() if "at alpha 0 layers 3 and 4" in claim)
    assert (
        later.verdict == "does not hold"
        and later.value == pytest.approx((24 + 30) / 96)
        and "24 of 48" in later.note
    )
    assert [f.verdict for f in found.values()].count("does not hold") == 2
    top = tables["rising"].set_index(["alpha", "layer"])["top"]
    # An independent run saw row 50 fall from key 32 and 38 on.
    assert top[0.0, 3] + 1 == 32 and top[0.0, 4] + 1 == 38 and top[0.2, 4] == 49


def test_shares_beyond_distance_as_in_the_limit() -> None:
    printed = {0.0: (0.41, 0.21, 0.10), 0.5: (0.05, 0.06, 0.06)}
    for alpha, wanted in printed.items():
        limit = study.exact(study.Setting(alpha, rope=True), 50, 64)
        later = limit[1:]
        rows = study.facts(np.array(later), np.array(later), later)
        assert rows["beyond_limit"].tolist() == pytest.approx(wanted, abs=0.005)
        assert rows["split_half"].tolist() == pytest.approx([1, 1, 1]) and rows["bias"].abs().max() == 0
    free = study.exact(study.Setting(0.0, rope=True, mask=False), 50, 64)
    assert [study.beyond_distance(x) for x in free] == pytest.approx([0, 0, 0, 0], abs=1e-6)
    assert (
        study.rising_rows(np.tril(np.arange(25.0).reshape(5, 5))) == 3
        and study.rising_rows(np.zeros((5, 5))) == 0
    )


def test_layernorm_of_long_inputs_has_the_limit_of_l2() -> None:
    normed, wide = study.Setting(0.2, norm="layernorm"), study.Setting(0.2, norm="layernorm_sqrt")
    assert study.exact(normed, 9, 64) is None and study.exact(wide, 9, 64, "sqrt_dim") is None
    mean, _, again = study.CausalMask(tokens=9, dim=64, draws=600, input_norm="sqrt_dim").simulated(normed)
    rows = study.facts(mean, again, study.exact(normed, 9, 64, "sqrt_dim"))
    assert rows["correlation"][1:].min() > 0.98 and rows["largest"].max() < 0.03


def test_the_studies_of_masks() -> None:
    rates = layers_study.causal_rates()
    assert (rates["weight"] <= rates["bound"] + 1e-12).all()
    late = rates[rates["layers"] > 36]
    assert (
        (late["weight"] / late["predicted"]).between(0.97, 1.03).groupby(late["token"]).all()[[2, 3, 5]].all()
    )
    halves = layers_study.half_times().set_index("width")["measured"]
    # An independent run found these, in products of one attention more than its count.
    assert list(halves.loc[[2, 3, 5, 9, 17, 32]]) == [60 + 1, 30 + 1, 15 + 1, 8 + 1, 5 + 1, 4 + 1]
    tops = layers_study.peaks()
    assert (tops["measured"] - tops["predicted"]).abs().max() <= 1 + 1e-9
    mass = layers_study.item_mass().set_index(["attention", "layers", "item"])["weight"]
    assert [mass["no PE, causal", 2, i] for i in ("first", "middle", "last")] == pytest.approx(
        [0.35, 0.08, 0.02], abs=0.006
    )
    assert [mass["decay 0.8, causal", 6, i] for i in ("first", "middle", "last")] == pytest.approx(
        [0.60, 0.03, 0.00], abs=0.006
    )


def _whole_maps(lm: posbench.LM, ids: list[int]) -> np.ndarray:
    """Eager attention of one prompt, [L, H, n, n]."""
    if families.family_of(lm.model).interface:
        lm.model.set_attn_implementation("eager")
    else:
        lm.model.config._attn_implementation = "eager"
    with torch.no_grad():
        found = lm.model(torch.tensor([ids]), output_attentions=True).attentions
    return np.stack([weights[0].double().numpy() for weights in found])


@pytest.mark.parametrize(
    "family", ["llama", "llama-gqa", "mistral-window", "gemma2", "qwen3", "smollm3-nope", "mpt", "falcon"]
)
def test_rollout_and_sinks_are_those_of_whole_maps(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = posbench.load(build(family))
    torch.manual_seed(1)
    ids, parts, tokens = torch.randint(5, 250, (41,)).tolist(), 6, 16
    kernel = lm.model.config._attn_implementation
    # Blocks of three rows: what is compared is the sum over blocks.
    monkeypatch.setattr(
        rollout_study, "attention_rows", partial(rollout_study.attention_rows, entries=3 * 4 * 41)
    )
    found = rollout_study.flow(lm, ids, parts, tokens)
    assert lm.model.config._attn_implementation == kernel
    maps = _whole_maps(lm, ids)
    for number, share in enumerate((0.0, 0.5)):
        state = np.eye(41)
        for layer, weights in enumerate(maps):
            state = share * state + (1 - share) * weights.mean(0) @ state
            wanted = [part.sum() for part in np.array_split(state[-1], parts)]
            assert found["rollout"][number, layer] == pytest.approx(wanted, abs=1e-5), (share, layer)
    early = maps[:, :, :tokens, :tokens]
    assert found["by_head"] == pytest.approx(masks.sink_by_head(early))
    assert found["by_entry"] == pytest.approx(masks.sink_by_entry(early, masks.causal(tokens)))


def test_attention_rows_hold_one_block_and_know_every_kind_of_mask() -> None:
    torch.manual_seed(2)
    query, key = torch.randn(1, 4, 11, 8), torch.randn(1, 2, 11, 8)
    scores = torch.einsum("bhid,bhjd->bhij", query, key.repeat_interleave(2, 1)) * 0.3
    distance = torch.arange(11)[:, None] - torch.arange(11)
    for width in (None, 4):
        seen = (distance >= 0) & (distance < (width or 11))
        wanted = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        additive = torch.zeros(1, 1, 11, 11).masked_fill(~seen, float("-inf"))
        for mask in (None, seen[None, None], additive, torch.ones(1, 11)):
            blocks = list(
                rollout_study.attention_rows(
                    query, key, mask, scaling=0.3, sliding_window=width, entries=4 * 11 * 2
                )
            )
            assert [start for start, _ in blocks] == [0, 2, 4, 6, 8, 10] and all(
                w.numel() <= 88 for _, w in blocks
            )
            assert torch.allclose(torch.cat([weights for _, weights in blocks], dim=2), wanted, atol=1e-6)


def test_rollout_under_methods_that_attend_more_than_once() -> None:
    """Bases equal to the model's own change nothing, however often a method attends."""
    lm = posbench.load("tiny")
    ids = lm.encode("bal kop dip gel").ids * 4
    plain = rollout_study.flow(lm, ids, 4, 8)["rollout"]
    for method in (
        MoICE(weights="uniform", bases=(None, None), top_k=2),
        AttentionBuckets(bases=(None, None)),
    ):
        with method.applied(lm):
            assert rollout_study.flow(lm, ids, 4, 8)["rollout"] == pytest.approx(plain, abs=1e-5), method
    with AttentionBuckets(bases=(None, 500.0)).applied(lm):
        assert np.abs(rollout_study.flow(lm, ids, 4, 8)["rollout"] - plain).max() > 1e-4


def test_sinks_by_hand() -> None:
    first = np.zeros((4, 4))
    first[:, 0] = 1
    own = np.eye(4)
    stack = np.stack([first, own])
    # The first head sees token 1 alone; the second sees itself: mean weights 1/4, 1/3, 1/2, 1 over the
    # queries that see a token.
    assert masks.sink_by_head(stack).tolist() == [0.5, 0.5, 0.5, 0.5] and masks.sink_by_head(
        own[None]
    ).tolist() == [0, 1, 1, 1]
    assert masks.sink_by_entry(stack, masks.causal(4)) == pytest.approx(
        [(1 + 1 / 4) / 2, 1 / 6, 1 / 4, 1 / 2]
    )
    even = masks.uniform(masks.prefix(12, 4))
    assert (masks.sink_by_entry(even, masks.prefix(12, 4), 0.08)[:4] == 1).all()
    deep = masks.rollout([masks.uniform(masks.causal(16))] * 10)[-1]
    assert masks.sink_by_head(deep)[0] == 1 and masks.sink_by_head(deep)[1:].sum() == 0


def test_sinks_of_a_model_that_attends_evenly() -> None:
    torch.manual_seed(0)
    lm = posbench.load(BUILDERS["llama"]())
    with torch.no_grad():
        for layer in lm.model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    rows = [rollout_study.flow(lm, ids, 2, 4) for ids in ([5, 9, 40, 33, 8, 100], [7, 7, 9, 8], [5])]
    tables = rollout_study.summary(
        [{k: v.tolist() for k, v in row.items()} for row in rows], ["a", "b", "c"], 50
    )
    sinks = tables["sinks"].set_index(["metric", "token"])
    even = masks.uniform(masks.causal(4))
    assert sinks.loc["by_head", "share"].tolist() == masks.sink_by_head(even[None]).tolist() == [1, 1, 0, 0]
    assert sinks.loc["by_entry", "share"].tolist() == [1, 1, 1, 1] and sinks["n"].eq(2).all(), (
        "the third prompt is too short"
    )
    rollout = tables["rollout"]
    assert (
        rollout.groupby(["rollout", "layers"])["weight"].sum().to_numpy() == pytest.approx(1)
        and rollout["n"].eq(3).all()
    )
    assert (rollout["low"] <= rollout["weight"] + 1e-12).all() and (
        rollout["weight"] <= rollout["high"] + 1e-12
    ).all()
    change = tables["changes"].set_index("what")["value"]
    first = rollout[(rollout.rollout == "attention alone") & (rollout.part == 0)].set_index("layers")[
        "weight"
    ]
    assert change["attention alone"] == pytest.approx(first[4] - first[1]) and change["by_head"] == 0
