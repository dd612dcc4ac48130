"""Trainings against themselves: alone and together, killed and resumed, measured twice."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from posbench.errors import UserError
from posbench.run.folder import RunDir
from tests.messages import refused
from wu2025 import training as module
from wu2025.sequences import training_batch
from wu2025.synthetic_tables import tabulate
from wu2025.training import (
    Condition,
    Ensemble,
    measured_iterations,
    read_trainings,
    train,
    training_folder,
)

SMALL = Condition(width=16, classes=64, labels=4, batch=8, sequences=50)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same(a: Ensemble, b: Ensemble, index: int = 0, of: int = 0) -> float:
    """Largest difference of two ensembles' parameters."""
    pairs = zip(a.network.parameters(), b.network.parameters(), strict=True)
    return max((p[index] - q[of]).abs().max().item() for p, q in pairs)


def test_ensemble_is_its_members() -> None:
    condition = replace(SMALL, pe="rope", residual=True, bias=(0, 7))
    together = Ensemble(condition, [3, 5, 8], torch.device("cpu"))
    alone = [Ensemble(condition, [seed], torch.device("cpu")) for seed in (3, 5, 8)]
    start = [p.detach().clone() for p in together.network.parameters()]
    for ensemble in (together, *alone):
        for _ in range(8):
            ensemble.step()
    assert all(
        (p - q).abs().max() > 1e-3
        for p, q in zip(together.network.parameters(), start, strict=True)
    )
    for index, single in enumerate(alone):
        assert same(together, single, index) < 1e-5
    assert same(together, alone[1]) > 1e-3
    # A member's checkpoint goes on alone.
    resumed = Ensemble(condition, [5], torch.device("cpu"))
    resumed.load([together.state(1)])
    for ensemble in (together, resumed):
        ensemble.step()
    assert same(together, resumed, 1) < 1e-6


def test_killed_training_resumes_bit_identically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECKPOINT_EVERY", 10)
    monkeypatch.setattr(
        module, "measured_iterations", lambda until: [m for m in (20, 40) if m <= until]
    )
    whole = train(SMALL, [1], 40, tmp_path / "whole", hardware="x")

    class Killed(Exception):
        pass

    step = Ensemble.step
    count = 0

    def dies(self: Ensemble) -> None:
        nonlocal count
        count += 1
        if count == 27:
            raise Killed
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Ensemble, "step", dies)
        with pytest.raises(Killed):
            train(SMALL, [1], 40, tmp_path / "torn", hardware="x")
    # The first part asks for fewer iterations: what is left to do must not be baked into what is done.
    assert [
        row["iteration"]
        for row in training_folder(tmp_path / "torn", SMALL, 1).rows("rows.jsonl")
    ] == [20]
    train(SMALL, [1], 30, tmp_path / "torn", hardware="x")
    torn = train(SMALL, [1], 40, tmp_path / "torn", hardware="x")
    assert torn == whole
    assert [row["iteration"] for _, row in torn] == [20, 40]
    states = [
        torch.load(training_folder(tmp_path / name, SMALL, 1).path / "checkpoint.pt")
        for name in ("whole", "torn")
    ]
    for key in ("parameters", "first", "second"):
        assert all(
            torch.equal(a, b)
            for a, b in zip(states[0][key], states[1][key], strict=True)
        )
    assert torch.equal(states[0]["data"], states[1]["data"])


def test_rows_and_marks(tmp_path: Path) -> None:
    condition = replace(SMALL, sequences=200)
    measured = train(condition, [0, 1], 3, tmp_path, hardware="here")
    assert [(row["seed"], row["iteration"]) for _, row in measured] == [(0, 3), (1, 3)]
    assert read_trainings(tmp_path) == measured
    for seed, (_, row) in enumerate(measured):
        found = tabulate([(condition, row)], [])
        assert found["sinks"]["by_entry"].tolist() == row["sink_by_entry"]
        assert (
            list(found["sinks"]["token"]) == list(range(17))
            and found["paper_cells"].empty
        )
        pairs = found["gaps"].to_dict("records")
        assert [pair["pair"] for pair in pairs] == [
            "first-middle",
            "first-last",
            "middle-last",
        ]
        for pair in pairs:
            assert pair["gap"] == pytest.approx(
                pair["acc_ab"] - pair["acc_ba"], abs=1e-9
            )
            assert pair["ci_low"] <= pair["gap"] <= pair["ci_high"]
            assert [pair[name] for name in ("seed", "n", "std", "hardware")] == [
                seed,
                200,
                0.25,
                "here",
            ]
    assert measured_iterations(3) == [3]
    assert measured_iterations(17_000) == [
        1000,
        2000,
        4000,
        6000,
        8000,
        10_000,
        12_000,
        16_000,
        17_000,
    ]


def test_untrained_and_blind_networks_have_no_gap() -> None:
    # Without mask and encoding, exchanging two items changes nothing: every gap is test noise, at any
    # weights.
    blind = Ensemble(
        replace(SMALL, mask="full", labels=4, sequences=4000), [0], torch.device("cpu")
    )
    for _ in range(150):
        blind.step()
    row = blind.measure()[0]
    assert row["train_loss"] < math.log(4)
    for a, b in module.PAIRS:
        assert abs(row[f"gap_{a}_{b}"]) < 4 * row[f"sd_{a}_{b}"]


COPYING = replace(
    SMALL,
    vocabulary="fixed",
    mask="full",
    pe="rope",
    residual=True,
    bias=(0,),
    batch=32,
    width=32,
    sequences=2000,
)


def test_copying_by_position_needs_the_training_omega() -> None:
    # RoPE turns what all tokens share; without mask there is no other trace of the position.
    ensemble = Ensemble(COPYING, [0, 1], torch.device("cpu"))
    for _ in range(300):
        ensemble.step()
    for row in ensemble.measure():
        gaps = [
            draw["acc_first_last"] - draw["acc_last_first"]
            for draw in row["fresh_omega"]
        ]
        assert row["gap_first_last"] > 0.35
        assert len(gaps) == module.OMEGA_DRAWS >= 3
        assert np.mean(gaps) < 0.6 * row["gap_first_last"]
        assert np.ptp(gaps) > 0.1, "each draw has its own omega"


def test_omegas_of_a_draw_are_the_official_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = []
    draw_sequences = module.data.novel_sequences

    def recorded(mixture, world, count, generator):  # type: ignore[no-untyped-def]
        drawn.append((count, world.shared))
        return draw_sequences(mixture, world, count, generator)

    monkeypatch.setattr(module.data, "novel_sequences", recorded)
    ensemble = Ensemble(replace(COPYING, sequences=98), [0], torch.device("cpu"))
    ensemble.measure()
    training, *fresh = drawn
    assert training[0] == 98 and torch.equal(training[1], ensemble.worlds[0].shared)
    assert [count for count, _ in fresh] == [20] * 9 * module.OMEGA_DRAWS
    seen = [training[1]]
    for start in range(0, len(fresh), 9):
        # Accuracy by item, then first-middle and the five other sets.
        omegas = [omega for _, omega in fresh[start : start + 9]]
        first_middle = omegas.pop(3)
        assert all(torch.equal(omega, omegas[0]) for omega in omegas)
        assert not any(
            torch.equal(new, old) for new in (first_middle, omegas[0]) for old in seen
        )
        seen += [first_middle, omegas[0]]


def test_sinks_are_shares_of_their_definitions() -> None:
    condition = replace(SMALL, mask="prefix", prefix=3, sequences=30)
    ensemble = Ensemble(condition, [0], torch.device("cpu"))
    with torch.no_grad():
        for p in ensemble.network.query:
            p.mul_(2000)  # sharp attention
    row = ensemble.measure()[0]
    # Once more from single weights, as Gu et al. and Wu et al. define them.
    drawn = training_batch(
        condition, ensemble.worlds[0], 30, rng(module.TEST_SEED_OFFSET)
    )
    weights = ensemble.network.attentions(drawn.tokens[None])[0].double().numpy()
    seen = condition.seen(17)
    for token in range(17):
        gu = [w[token:, token].mean() > 0.3 for sequence in weights for w in sequence]
        wu = [
            np.mean([w[i, token] > 0.2 for i in range(17) if seen[i, token]])
            for sequence in weights
            for w in sequence
        ]
        assert row["sink_by_head"][token] == pytest.approx(np.mean(gu))
        assert row["sink_by_entry"][token] == pytest.approx(np.mean(wu))
    assert max(row["sink_by_head"]) > 0.1


def test_checkpoint_of_another_device_is_refused(tmp_path: Path) -> None:
    train(SMALL, [0], 1, tmp_path, hardware="x")
    file = training_folder(tmp_path, SMALL, 0).path / "checkpoint.pt"
    torch.save({**torch.load(file), "device": "cuda"}, file)
    with refused("checkpoint", str(file), allowed="cpu", hint="cuda"):
        train(SMALL, [0], 2, tmp_path, hardware="x")
    file.write_bytes(b"torn")
    with refused("checkpoint", str(file), allowed="checkpoint", hint="folder"):
        train(SMALL, [0], 2, tmp_path, hardware="x")


def test_damaged_row_is_made_again(tmp_path: Path) -> None:
    train(SMALL, [0], 2, tmp_path, hardware="x")
    run = training_folder(tmp_path, SMALL, 0)
    first = [(SMALL, row) for row in RunDir(run.path).rows("rows.jsonl")]
    (run.path / "rows.jsonl").write_text((run.path / "rows.jsonl").read_text()[:-5])
    assert train(SMALL, [0], 2, tmp_path, hardware="x") == first
    train(SMALL, [0], 5, tmp_path, hardware="x")
    with refused("iterations", 1, allowed="1000", hint="folder"):
        train(SMALL, [0], 1, tmp_path, hardware="x")


@pytest.mark.parametrize(
    "change, named",
    [
        ({"bias": (8,)}, "study.bias"),
        ({"bias": (0, 0)}, "study.bias"),
        ({"depth": 0}, "study.depth"),
        ({"window": 0}, "study.window"),
        ({"prefix": 18}, "study.prefix"),
        ({"decay": -1.0}, "study.decay"),
        ({"noise": -0.1}, "study.noise"),
        ({"batch": 0}, "study.batch"),
        ({"learning_rate": 0.0}, "study.learning_rate"),
        ({"width": 15, "pe": "rope"}, "study.width"),
        ({"classes": 1}, "study.classes"),
        ({"copies": 1}, "study.copies"),
    ],
)
def test_bad_conditions_are_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(UserError) as raised:
        Condition.of({**asdict(SMALL), **change}, "study")
    assert raised.value.field == named


def test_conditions_that_the_tables_cannot_tell_apart_are_refused(
    tmp_path: Path,
) -> None:
    """Networks of two decays would count as two seeds of one condition."""
    measured = []
    for decay in (0.1, 0.9):
        condition = replace(SMALL, mask="decay", decay=decay, sequences=200)
        measured += train(condition, [0], 2, tmp_path / f"{decay}", hardware="x")
    changed = measured[-1][0].changed
    assert changed["decay"] == 0.9
    with refused("study.conditions", changed, allowed="mask", hint="study.trainings"):
        tabulate(measured, [])
    assert len(tabulate(measured[:1], [])["gaps"]) == 3


def test_a_bias_is_named_in_the_order_of_the_items() -> None:
    names = {replace(SMALL, bias=bias).settings["bias"] for bias in ((0, 7), (7, 0))}
    assert names == {"first+last"}
