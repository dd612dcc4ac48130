"""Theory against closed forms, brute force, and the numbers that the papers and independent runs print."""

from __future__ import annotations

from math import log
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from posbench.cli.main import main
from posbench.studies.behind_rope import causal_mask as study
from posbench.theory import causal_mask as rope

M = -log(0.8)


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
