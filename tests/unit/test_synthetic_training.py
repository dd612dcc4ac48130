"""The synthetic trainings of Wu et al. 2025 against loops over single sequences, closed forms, and themselves
resumed."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from posbench import paths
from posbench.errors import UserError
from posbench.run.folder import RunDir
from posbench.studies.cost import training_speed
from posbench.studies.wu2025 import synthetic_results
from posbench.studies.wu2025 import training as position_training
from posbench.studies.wu2025.network import Attention, AttentionNetwork
from posbench.studies.wu2025.sequences import (
    Mixture,
    ask,
    copying_gap,
    draw_world,
    novel_sequences,
    other_is_right,
    training_batch,
)
from posbench.studies.wu2025.synthetic_claims import findings, thresholds
from posbench.studies.wu2025.synthetic_tables import (
    GAP_COLUMNS,
    PAIR_NAMES,
    SETTINGS,
    at_end,
    beside_paper,
    over_seeds,
    paper_cells,
    uniform_sinks,
)
from posbench.studies.wu2025.synthetic_training import SyntheticTraining
from posbench.studies.wu2025.training import (
    Condition,
    Ensemble,
    folder_of,
    marks,
    pair_rows,
    train,
    trainings,
)
from tests.conftest import Result, run_folders

SMALL = Condition(width=16, classes=64, labels=4, batch=8, sequences=50)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The generator


def shares(mixture: Mixture, count: int = 10_000) -> tuple[np.ndarray, np.ndarray]:
    """Share of sequences in which an item's label is the one asked for, per item, and the query's cosine to
    its class."""
    world = draw_world(mixture, rng(1))
    drawn = training_batch(mixture, world, count, rng(2))
    labels = drawn.tokens[:, 1::2]
    asked = world.label_vectors[drawn.targets][:, None]
    same = (labels == asked).all(-1)
    x, query = drawn.tokens[:, 0:-1:2], drawn.tokens[:, -1:]
    return same.double().mean(0).numpy(), torch.cosine_similarity(x, query, dim=-1)[same].numpy()


@pytest.mark.parametrize("scale", ["paper", "code"])
def test_training_shares(scale: str) -> None:
    # 0.516, 0.723, 0.446: chances of a sequence with two classes of four copies each and 32 labels.
    share, cosine = shares(Mixture(scale=scale))
    assert np.abs(share - (1 / 2 + 1 / 2 / 32)).max() < 0.015
    assert abs(share.mean() - 0.516) < 0.005
    # Both have the mean in common: 1 / (1 + 0.75^2) = 0.64, less the spread of norms in 64 dimensions and
    # equal labels.
    assert cosine.mean() == pytest.approx(0.618, abs=0.01)
    ends, _ = shares(Mixture(scale=scale, bias=(0, 7)))
    assert np.abs(ends[[0, 7]] - 0.723).max() < 0.01
    assert np.abs(ends[1:7] - 0.446).max() < 0.015


@pytest.mark.parametrize("scale, norm", [("paper", 1.0), ("code", 0.125)])
def test_token_norms(scale: str, norm: float) -> None:
    mixture = Mixture(scale=scale)
    tokens = training_batch(mixture, draw_world(mixture, rng()), 2000, rng(1)).tokens
    assert (tokens**2).sum(-1).mean().sqrt().item() == pytest.approx(norm, rel=0.02)


def test_fixed_vocabulary_is_one_vector_a_class() -> None:
    mixture = Mixture(vocabulary="fixed")
    world = draw_world(mixture, rng())
    drawn = training_batch(mixture, world, 100, rng(1))
    # Every item and query is (mean + 0.75 omega) / 1.25 of a class; its label follows it.
    table = (world.means + 0.75 * world.shared) / 1.25
    distance = torch.cdist(drawn.tokens[:, ::2], table[None], compute_mode="donot_use_mm_for_euclid_dist")
    assert distance.min(-1).values.max() < 1e-4
    classes = distance.argmin(-1)
    assert torch.equal(world.label_vectors[world.class_labels[classes[:, :-1]]], drawn.tokens[:, 1::2])
    assert torch.equal(world.class_labels[classes[:, -1]], drawn.targets)
    # Two classes, four copies each, and the query is one of them.
    assert all(sorted(np.unique(row, return_counts=True)[1]) == [4, 4] for row in classes[:, :-1].numpy())
    assert all(row[-1] in row[:-1] for row in classes.numpy())


def test_paired_sets() -> None:
    mixture = Mixture()
    world = draw_world(mixture, rng())
    novel = novel_sequences(mixture, world, 5000, rng(1))
    plain, one, two = ask(novel, world, 0), ask(novel, world, 0, 4), ask(novel, world, 4, 0)
    # Item 4 is overwritten by an exact copy of item 0; nothing else moves; its label stays.
    assert torch.equal(one.tokens[:, 8], one.tokens[:, 0])
    others = [i for i in range(17) if i != 8]
    assert torch.equal(one.tokens[:, others], plain.tokens[:, others])
    assert torch.equal(two.tokens[:, 0], plain.tokens[:, 8])
    # The answer stands behind the asked item; the other item has it by chance.
    label = world.label_vectors[one.targets]
    assert torch.equal(one.tokens[:, 1], label)
    by_chance = (one.tokens[:, 9] == label).all(-1).double().mean().item()
    assert by_chance == pytest.approx(other_is_right(mixture), abs=0.02)
    # Where both items have one class, the sets [a, b] and [b, a] ask the same.
    same = novel.slots[:, 0] == novel.slots[:, 4]
    assert torch.equal(one.targets[same], two.targets[same])
    assert same.double().mean().item() == pytest.approx(3 / 7, abs=0.02)


def test_copying_policies() -> None:
    mixture = Mixture()
    assert other_is_right(mixture) == pytest.approx(3 / 7 + 4 / 7 / 32)
    assert copying_gap(mixture, 1, 0) == pytest.approx(0.554, abs=5e-4)
    assert copying_gap(mixture, 0.5, 0) == pytest.approx(0.277, abs=5e-4)
    # A simulated policy that answers the first item's label gets just these accuracies.
    world = draw_world(mixture, rng())
    novel = novel_sequences(mixture, world, 10_000, rng(1))
    right, wrong = ask(novel, world, 0, 7), ask(novel, world, 7, 0)
    hits = [
        (s.tokens[:, 1] == world.label_vectors[s.targets]).all(-1).double().mean().item()
        for s in (right, wrong)
    ]
    assert hits[0] - hits[1] == pytest.approx(copying_gap(mixture, 1, 0), abs=0.02)


def test_fresh_component_moves_the_tests_alone() -> None:
    shared, fresh = Mixture(vocabulary="fixed"), Mixture(vocabulary="fixed", test_component="fresh")
    world = draw_world(shared, rng())
    direction = world.shared / world.shared.norm()
    along = [novel_sequences(m, world, 500, rng(1)).items @ direction for m in (shared, fresh)]
    assert along[0].mean() > 0.4
    assert abs(along[1].mean()) < 0.25


# The network


def loop_logits(network: AttentionNetwork, tokens: torch.Tensor, model: int) -> list[float]:
    """One sequence through one model with Python's own numbers: no batches, no masks added, complex rotation
    by hand."""
    spec, d = network.spec, tokens.shape[-1]
    n = len(tokens)
    x = [[float(v) for v in row] for row in tokens]
    if spec.pe == "sin":
        for i in range(n):
            for k in range(d // 2):
                angle = i * spec.rope_base ** (-2 * k / d)
                x[i][2 * k] += math.sin(angle)
                x[i][2 * k + 1] += math.cos(angle)

    def times(row: list[float], weight: torch.Tensor) -> list[float]:
        matrix = weight[model].tolist()
        return [sum(row[a] * matrix[a][b] for a in range(d)) for b in range(weight.shape[-1])]

    def rotated(row: list[float], place: int) -> list[float]:
        out: list[float] = []
        for k in range(d // 2):
            turned = complex(row[2 * k], row[2 * k + 1]) * cmath.exp(
                1j * place * spec.rope_base ** (-2 * k / d)
            )
            out += [turned.real, turned.imag]
        return out

    def factor(i: int, j: int) -> float:
        """What exp(score) is multiplied with, as the official code does."""
        if spec.mask == "full":
            return 1.0
        if spec.mask == "prefix" and j < spec.prefix:
            return 1.0
        if j > i or (spec.mask == "window" and j <= i - spec.window):
            return 0.0
        return math.exp(-spec.decay * (i - j)) if spec.mask == "decay" else 1.0

    for layer in range(spec.depth):
        queries = [times(row, network.query[layer]) for row in x]
        keys = [times(row, network.key[layer]) for row in x]
        values = [times(row, network.value[layer]) for row in x]
        if spec.pe == "rope":
            queries = [rotated(row, i) for i, row in enumerate(queries)]
            keys = [rotated(row, i) for i, row in enumerate(keys)]
        out = []
        for i in range(n):
            score = [
                sum(a * b for a, b in zip(queries[i], keys[j], strict=True)) / math.sqrt(d) for j in range(n)
            ]
            weights = [math.exp(s) * factor(i, j) for j, s in enumerate(score)]
            mixed = [sum(w * values[j][k] for j, w in enumerate(weights)) / sum(weights) for k in range(d)]
            out.append([m + (x[i][k] if spec.residual else 0.0) for k, m in enumerate(mixed)])
        x = out
    h = x[-1]
    for index, (weight, bias) in enumerate(zip(network.weight, network.bias, strict=True)):
        h = [a + b for a, b in zip(times(h, weight), bias[model, 0].tolist(), strict=True)]
        h = [max(v, 0.0) for v in h] if index < 3 else h
    return h


NETWORKS = [
    Attention(mask="causal", pe="none"),
    Attention(mask="full", pe="rope", residual=True),
    Attention(mask="causal", pe="rope", depth=3),
    Attention(mask="decay", pe="none", residual=True),
    Attention(mask="window", pe="sin", window=3, depth=1),
    Attention(mask="prefix", pe="sin", prefix=3, residual=True),
]


@pytest.mark.parametrize("spec", NETWORKS, ids=lambda s: f"{s.mask}-{s.pe}-{s.depth}-{s.residual}")
def test_network_is_the_loop(spec: Attention) -> None:
    tokens = torch.randn(2, 2, 9, 8, generator=rng(3))
    network = AttentionNetwork(spec, 8, 5, 9, [rng(0), rng(1)])
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(3)  # so that scores, and with them masks and rotations, matter
        logits = network(tokens)
        weights = network.attentions(tokens)
    for model in range(2):
        expected = loop_logits(network, tokens[model, 1], model)
        assert logits[model, 1].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert weights.shape == (2, 2, spec.depth, 9, 9)
    assert torch.allclose(weights.sum(-1), torch.ones(()))
    assert (weights[..., torch.tensor(~spec.seen(9))] == 0).all()


def test_initial_weights_fill_the_default_range() -> None:
    network = AttentionNetwork(Attention(), 64, 32, 17, [rng()])
    for p in network.parameters():
        assert p.abs().max() <= 1 / 8
        assert p.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.35)
    assert sum(p.numel() for p in network.parameters()) == 2 * 3 * 64**2 + 3 * (64**2 + 64) + 64 * 32 + 32


# Training


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
    assert all((p - q).abs().max() > 1e-3 for p, q in zip(together.network.parameters(), start, strict=True))
    for index, single in enumerate(alone):
        assert same(together, single, index) < 1e-5
    assert same(together, alone[1]) > 1e-3
    # A member's checkpoint goes on alone.
    resumed = Ensemble(condition, [5], torch.device("cpu"))
    resumed.load([together.state(1)])
    for ensemble in (together, resumed):
        ensemble.step()
    assert same(together, resumed, 1) < 1e-6


def test_killed_training_resumes_bit_identically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(position_training, "CHECKPOINT_EVERY", 10)
    monkeypatch.setattr(position_training, "marks", lambda until: [m for m in (20, 40) if m <= until])
    whole = train(SMALL, [1], 40, tmp_path / "whole", hardware="x")

    class Killed(Exception):
        pass

    step, count = Ensemble.step, 0

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
    assert [row["iteration"] for row in folder_of(tmp_path / "torn", SMALL, 1).rows("rows.jsonl")] == [20]
    train(SMALL, [1], 30, tmp_path / "torn", hardware="x")
    torn = train(SMALL, [1], 40, tmp_path / "torn", hardware="x")
    assert torn == whole
    assert [row["iteration"] for row in torn[1]] == [20, 40]
    states = [
        torch.load(folder_of(tmp_path / name, SMALL, 1).path / "checkpoint.pt") for name in ("whole", "torn")
    ]
    for key in ("parameters", "first", "second"):
        assert all(torch.equal(a, b) for a, b in zip(states[0][key], states[1][key], strict=True))
    assert torch.equal(states[0]["data"], states[1]["data"])


def test_rows_and_marks(tmp_path: Path) -> None:
    condition = replace(SMALL, sequences=200)
    rows = train(condition, [0, 1], 3, tmp_path, hardware="here")
    assert list(rows) == [0, 1]
    for seed, measured in rows.items():
        assert [row["iteration"] for row in measured] == [3]
        pairs = pair_rows(condition, measured[0])
        assert [row["pair"] for row in pairs] == ["first-middle", "first-last", "middle-last"]
        for row in pairs:
            assert row["gap"] == pytest.approx(row["acc_ab"] - row["acc_ba"], abs=1e-9)
            assert row["ci_low"] <= row["gap"] <= row["ci_high"]
            assert (row["seed"], row["n"], row["std"], row["hardware"]) == (seed, 200, 0.25, "here")
    assert [c for c, _ in trainings(tmp_path)] == [condition, condition]
    assert marks(3) == [3]
    assert marks(17_000) == [1000, 2000, 4000, 6000, 8000, 10_000, 12_000, 16_000, 17_000]


def test_untrained_and_blind_networks_have_no_gap() -> None:
    # Without mask and encoding, exchanging two items changes nothing: every gap is test noise, at any
    # weights.
    blind = Ensemble(replace(SMALL, mask="full", labels=4, sequences=4000), [0], torch.device("cpu"))
    for _ in range(150):
        blind.step()
    row = blind.measure()[0]
    assert row["train_loss"] < math.log(4)
    for a, b in position_training.PAIRS:
        assert abs(row[f"gap_{a}_{b}"]) < 4 * row[f"sd_{a}_{b}"]


def test_full_mask_network_ignores_the_order_of_items() -> None:
    tokens = torch.randn(1, 3, 17, 16, generator=rng())
    order = torch.randperm(8, generator=rng(1))
    moved = torch.cat(
        [tokens[:, :, :16].unflatten(2, (8, 2))[:, :, order].flatten(2, 3), tokens[:, :, 16:]], 2
    )
    for mask, equal in (("full", True), ("causal", False)):
        network = AttentionNetwork(Attention(mask=mask), 16, 4, 17, [rng(2)])
        with torch.no_grad():
            assert torch.allclose(network(tokens), network(moved), atol=1e-6) is equal


def test_sinks_are_shares_of_their_definitions() -> None:
    condition = replace(SMALL, mask="prefix", prefix=3, sequences=30)
    ensemble = Ensemble(condition, [0], torch.device("cpu"))
    with torch.no_grad():
        for p in ensemble.network.query:
            p.mul_(2000)  # sharp attention
    row = ensemble.measure()[0]
    # Once more from single weights, as Gu et al. and Wu et al. define them.
    drawn = training_batch(condition, ensemble.worlds[0], 30, rng(position_training.TEST_SEEDS))
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
    file = folder_of(tmp_path, SMALL, 0).path / "checkpoint.pt"
    torch.save({**torch.load(file), "device": "cuda"}, file)
    with pytest.raises(UserError, match="go on on cuda"):
        train(SMALL, [0], 2, tmp_path, hardware="x")
    file.write_bytes(b"torn")
    with pytest.raises(UserError, match="remove the folder"):
        train(SMALL, [0], 2, tmp_path, hardware="x")


def test_damaged_row_is_made_again(tmp_path: Path) -> None:
    train(SMALL, [0], 2, tmp_path, hardware="x")
    run = folder_of(tmp_path, SMALL, 0)
    first = RunDir(run.path).rows("rows.jsonl")
    (run.path / "rows.jsonl").write_text((run.path / "rows.jsonl").read_text()[:-5])
    assert train(SMALL, [0], 2, tmp_path, hardware="x")[0] == first
    train(SMALL, [0], 5, tmp_path, hardware="x")
    with pytest.raises(UserError, match="measured later only"):
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
        replace(SMALL, **change).check("study")
    assert raised.value.field == named


# The study

TINY = [
    "study=synthetic_training",
    "+study.common={width: 8, classes: 16, labels: 4, batch: 4, sequences: 40, depth: 1}",
    "study.conditions=[{mask: causal}, {mask: full, pe: rope, bias: [0, 7]}]",
    "study.seeds=2",
    "study.processes=1",
    "runtime.device=cpu",
]


def test_study_trains_and_goes_on(
    posbench: Callable[..., Result], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    step = Ensemble.step

    def counted(self: Ensemble) -> None:
        nonlocal steps
        steps += 1
        step(self)

    monkeypatch.setattr(Ensemble, "step", counted)
    first = posbench(*TINY, "study.iterations=6")
    assert first.status == 0, first.err
    assert steps == 2 * 2 * 6
    (folder,) = run_folders(outputs)
    gaps = pd.read_csv(folder / "gaps.csv", keep_default_na=False)
    assert list(gaps) == GAP_COLUMNS
    assert (
        len(gaps) == 2 * 2 * 3
        and set(gaps["bias"]) == {"none", "first+last"}
        and set(gaps["iteration"]) == {6}
    )
    assert len(pd.read_csv(folder / "sinks.csv")) == 2 * 2 * 17
    assert "not testable here" in (folder / "report.html").read_text(), "nobody learns in six iterations"
    assert posbench(*TINY, "study.iterations=10").status == 0
    assert steps == 2 * 2 * 10, "the second run goes on from the first"
    (later,) = [f for f in run_folders(outputs) if f != folder]
    both = pd.read_csv(later / "gaps.csv", keep_default_na=False)
    pd.testing.assert_frame_equal(both[both["iteration"] == 6].reset_index(drop=True), gaps)


@pytest.mark.slow
def test_processes_change_nothing(posbench: Callable[..., Result], outputs: Path) -> None:
    found = []
    for processes in (1, 2):
        args = [f"study.processes={processes}" if arg.startswith("study.processes") else arg for arg in TINY]
        assert (
            posbench(*args, "study.iterations=5", f"study.trainings={outputs / str(processes)}").status == 0
        )
    for folder in run_folders(outputs):
        found.append((folder / "gaps.csv").read_bytes())
    assert len(found) == 2 and found[0] == found[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["study.conditions=[]"], "study.conditions = []"),
        (["study.conditions=[{maks: causal}]"], "did you mean study.conditions.0.mask?"),
        (["study.conditions=[{mask: half}]"], "study.conditions.0.mask = 'half'"),
        (["study.conditions=[{bias: [8]}]"], "study.conditions.0.bias = [8]"),
        (["study.conditions=[{pe: rope}, {pe: rope}]"], "study.conditions.1"),
        (["study.seeds=0"], "study.seeds = 0"),
        (["study.preset=long"], "quick | paper"),
        (["study.reference=wu2025.csv"], "study.reference = 'wu2025.csv'"),
        (["method=scale_channel"], "looks at none"),
    ],
)
def test_bad_study_is_refused(
    posbench: Callable[..., Result], outputs: Path, args: list[str], message: str
) -> None:
    result = posbench("study=synthetic_training", *args)
    assert result.status == 2 and result.err.count("\n") == 1 and message in result.err, result.err
    assert not run_folders(outputs)


# Tables and claims


def made(
    fm: float, fl: float, ml: float, *, iteration: int = 8000, seed: int = 0, **settings: object
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
        {**fixed, "pair": pair, "gap": gap, "ci_low": gap - 0.013, "ci_high": gap + 0.013}
        for pair, gap in zip(PAIR_NAMES, (fm, fl, ml), strict=True)
    ]
    return pd.DataFrame(rows, columns=GAP_COLUMNS)


NO_SINKS = pd.DataFrame(columns=[*SETTINGS, "seed", "iteration", "n", "token", "by_head", "by_entry"])


def verdicts(*frames: pd.DataFrame) -> dict[str, str]:
    sinks = NO_SINKS.astype({"residual": bool})
    return {
        finding.statistic.split(";")[0]: finding.verdict for finding in findings(pd.concat(frames), sinks)
    }


def test_claims_can_fail() -> None:
    name = "smaller of FM and -ML, RoPE, causal"
    beyond = "FM - ML, RoPE, causal"
    rope = {"pe": "rope", "iteration": 70_000}
    assert verdicts(made(0.277, 0, -0.277, **rope)) == {name: "holds", beyond: "does not hold"}
    assert verdicts(made(0.277, 0, -0.277, pe="rope")) == {name: "holds", beyond: "not testable here"}
    assert verdicts(made(0.472, 0.433, -0.241, **rope)) == {name: "holds", beyond: "holds"}
    assert verdicts(made(0.005, 0, -0.277, **rope))[name] == "does not hold"
    assert verdicts(made(0.277, 0, -0.277, pe="rope", iteration=500))[name] == "not testable here"
    unbiased = {"bias": "none", "residual": False}
    decay, rope_2 = made(-0.055, -0.073, 0, mask="decay", **unbiased), made(0, 0, 0, pe="rope", **unbiased)
    found = verdicts(decay, rope_2)
    assert found["FM of the decay mask"] == "holds"
    assert found["FM of RoPE minus FM of the decay mask, depth 2"] == "holds"
    assert verdicts(made(0.06, 0, 0, mask="decay", **unbiased))["FM of the decay mask"] == "does not hold"
    (lost,) = [
        v
        for k, v in verdicts(made(0.3, 0, -0.3, pe="rope", bias="none")).items()
        if k.startswith("largest 'smaller")
    ]
    assert lost == "does not hold"


def test_means_over_seeds_at_the_last_iteration() -> None:
    gaps = pd.concat([made(0.9, 0, 0, iteration=4000), made(0.2, 0, -0.2), made(0.3, 0, -0.1, seed=1)])
    at = over_seeds(at_end(gaps)).set_index("pair").loc["first-middle"]
    assert (at["iteration"], at["seeds"], at["gap"]) == (8000, 2, pytest.approx(0.25))
    assert at["ci_high"] - at["gap"] == pytest.approx(0.013 / 2**0.5), (
        "two independent means of equal precision"
    )
    assert at["spread"] == pytest.approx(0.1 / 2**0.5)
    ahead = pd.concat([gaps, made(0.4, 0, -0.4, iteration=20_000)])
    at = over_seeds(at_end(ahead)).set_index("pair").loc["first-middle"]
    assert (at["iteration"], at["seeds"], at["gap"]) == (20_000, 1, 0.4), (
        "a seed that lags behind is left out"
    )
    close = pd.concat([gaps, made(0.4, 0, -0.4, iteration=9000)])
    assert set(at_end(close)["iteration"]) == {8000}, "one that is a little ahead does not stand for both"


def test_papers_cells() -> None:
    cells = paper_cells("wu2025_fig3.csv").set_index(["mask", "pe", "pair"])["paper"].sort_index()
    # Typed off Figure 3 of the paper, not off the CSV.
    assert cells["causal", "rope"].to_dict() == {
        "first-middle": 0.472,
        "first-last": 0.433,
        "middle-last": -0.241,
    }
    assert cells["full", "sin", "middle-last"] == -0.264
    beside = beside_paper(
        pd.concat([made(0.49, 0.15, 0.02, pe="rope"), made(0.2, 0.3, 0.1)]), ["wu2025_fig3.csv"]
    )
    verdict = beside.set_index(["pe", "pair"])["verdict"]
    assert verdict["rope"].to_dict() == {
        "first-middle": "agrees",
        "first-last": "same sign",
        "middle-last": "differs",
    }
    assert verdict["none"].to_dict() == {
        "first-middle": "same sign",
        "first-last": "agrees",
        "middle-last": "differs",
    }
    assert beside_paper(made(0.2, 0, 0, bias="none"), ["wu2025_fig3.csv"]).empty


@pytest.mark.parametrize("file", sorted(paths.EXPERIMENTS.glob("wu2025_*.yaml")), ids=lambda file: file.stem)
def test_experiments_train_what_the_paper_prints(file: Path) -> None:
    data = yaml.safe_load(file.read_text())["study"]
    study = SyntheticTraining(**{**data, "conditions": tuple(data["conditions"])})
    settings = pd.DataFrame([condition.settings for condition in study.built()])
    if study.reference:
        both = settings.merge(
            paper_cells(study.reference),
            on=[c for c in SETTINGS if c != "scale"],
            how="outer",
            indicator=True,
        )
        assert (both["_merge"] == "both").all() and len(both) == 3 * len(settings)


def test_thresholds_can_fail() -> None:
    good, bad = (
        made(0.49, 0.44, -0.26, pe="rope", iteration=80_000),
        made(0.28, 0.0, -0.26, pe="rope", iteration=80_000, seed=1),
    )
    late = "RoPE, causal, late"
    for gaps, expected in (
        (good, "yes"),
        (pd.concat([good, bad]), "no"),
        (made(0, 0, 0, mask="full"), "not run"),
    ):
        table = thresholds(gaps)
        assert table.loc[table["required"].str.startswith(late), "verdict"].tolist() == [expected]


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
        for mask, high in (("prefix 2", 2), ("causal", 0), ("window 5", 1), ("window 9", 1))
        for token in range(17)
    ]
    found = findings(made(0, 0, 0, mask="full"), pd.DataFrame(rows))
    verdict = {f.statistic: f.verdict for f in found if "sink" in f.statistic}
    kinds = {"prefix 2": "holds", "causal": "does not hold", "window 5": "holds"}
    for kind, expected in kinds.items():
        assert [v for k, v in verdict.items() if f"half, {kind}" in k] == [expected] * 3
    # Of 17 tokens the first is seen by rows of 1/1, 1/2, 1/3, 1/4 > 0.2, and by thirteen that give it less.
    assert uniform_sinks("causal", 17)["by_entry"].iloc[0] == pytest.approx(4 / 17)
    assert {v for k, v in verdict.items() if "minus window 5" in k} == {"does not hold"}, "both windows alike"


def test_results_of_a_folder(tmp_path: Path) -> None:
    for pe in ("none", "rope"):
        condition = Condition(pe=pe, residual=True, bias=(0, 7), batch=4, sequences=20)
        train(condition, [0], 2, tmp_path / "trainings", hardware="here")
    synthetic_results.main([str(tmp_path / "trainings"), "--out", str(tmp_path / "results")])
    text = (tmp_path / "results" / "wu2025.md").read_text()
    assert "6 cells" in text and "paper +0.472" in text and "here" in text and "not run" in text
    assert (tmp_path / "results" / "wu2025_gaps_first_last_residual.png").is_file()
    assert len(pd.read_csv(tmp_path / "results" / "wu2025_gaps.csv")) == 2 * 3
    with pytest.raises(SystemExit):
        synthetic_results.main([str(tmp_path)])


# The plain loop of the speed table

PLAIN = [Condition(pe="rope", residual=True), Condition(mask="decay", bias=(0, 7)), Condition(pe="sin")]


@pytest.mark.parametrize("condition", PLAIN, ids=lambda condition: condition.name)
def test_plain_loop_trains_the_same_network(condition: Condition, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(condition, batch=8)
    ensemble = Ensemble(small, [0], torch.device("cpu"))
    loop, step = training_speed.plain_steps(small, ensemble)
    loop()
    step()
    # Its sequences are those of the whole-batch generator in distribution.
    data, vectors = training_speed.PlainSequences(small, ensemble.worlds[0]), ensemble.worlds[0].label_vectors
    drawn = [data[index] for index in range(200)]
    share = (
        torch.stack([(tokens[1::2] == vectors[target]).all(-1) for tokens, target in drawn]).double().mean()
    )
    assert share.item() == pytest.approx(0.516, abs=0.012)
    monkeypatch.setattr(training_speed.PlainNetwork, "take", lambda self, ensemble: None)
    with pytest.raises(RuntimeError, match="differ by"):
        training_speed.plain_steps(small, ensemble)
