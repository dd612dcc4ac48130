"""Waves, decay and attention to thirds, against closed forms and full attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import posbench as package
from lpes.waves import rope_decay_bound, rope_wave
from posbench.measure.items import attention_to_thirds
from posbench.methods.position_interpolation import PositionInterpolation
from tests.conftest import Result, run_folders
from tests.models import BUILDERS
from tests.rounding import EPSILON, assert_same, attention_noise

AT = np.array([0.0, 1.0, 7.0, 350.0])


def test_the_wave_is_the_score_of_two_rotated_ones() -> None:
    dim = 32
    for distance, value in zip(
        AT, rope_wave(AT, dim, base=500.0, scale=2.0), strict=True
    ):
        angles = distance / 2 * 500.0 ** (-2 * np.arange(dim // 2) / dim)
        turned = np.concatenate(
            [np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles)]
        )
        # Query and key are all ones: their dot product after rotation, over the square root of the head size.
        assert value == pytest.approx(turned.sum() / np.sqrt(dim))
    assert rope_wave(AT[:1], dim)[0] == pytest.approx(np.sqrt(dim))


def test_a_scale_stretches_wave_and_decay() -> None:
    assert rope_wave(2 * AT, scale=2.0) == pytest.approx(
        rope_wave(AT)
    ) and rope_decay_bound(2 * AT, scale=2.0) == pytest.approx(rope_decay_bound(AT))


def test_the_bound_decays_and_bounds_the_wave() -> None:
    dim = 128
    at = np.arange(1.0, 2000.0)
    bound = rope_decay_bound(at, dim)
    assert rope_decay_bound(AT[:1], dim)[0] == pytest.approx((dim // 2 + 1) / 2)
    assert bound[:20].mean() > bound[200:400].mean() > bound[1500:].mean()


@pytest.mark.parametrize("family", ["llama-gqa", "qwen2"])
def test_thirds_are_those_of_full_attention(family: str) -> None:
    torch.manual_seed(0)
    lm = package.load(BUILDERS[family]())
    prompts = [torch.randint(5, 250, (n,)).tolist() for n in (10, 12, 30)]
    lm.model.set_attn_implementation("eager")
    for scale in (1.0, 1.7):
        with PositionInterpolation(scale=scale).applied(lm), torch.inference_mode():
            every = [
                lm.model(torch.tensor([p]), output_attentions=True).attentions
                for p in prompts
            ]
            found = attention_to_thirds(lm, prompts, [[2, 0], [1]])
        assert_same(found.sum(-1), np.ones(found.shape[:-1]), EPSILON, "attention")
        for number, layer in np.ndindex(3, lm.layers):
            row = every[number][layer][0, :, -1].mean(0).numpy()
            expected = [part.sum() for part in np.array_split(row, 3)]
            assert_same(
                found[number, layer], expected, attention_noise(family), "attention"
            )


def test_the_study_tells_what_it_measured(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    result = posbench(
        "study=rope_curves", "study.prompts=8", "study.distance=700", "stages=[study]"
    )
    (folder,) = run_folders(outputs)
    table = pd.read_csv(folder / "thirds.csv")
    assert result.status == 0 and len(table) == 4 * 4 * 3 and set(table["n"]) == {8}
    assert (table["attention_ci_low"] <= table["attention"]).all()
    middle = table[table["third"] == "middle"].pivot(
        index="layer", columns="scale", values="attention"
    )
    rising = [(np.diff(row) > 0).all() for row in middle.to_numpy()]
    (finding,) = pd.read_csv(folder / "findings.csv").itertuples()
    steps = table[(table["third"] == "middle") & (table["scale"] > 1)]
    sure = (steps["change_ci_low"] > 0).all()
    assert finding.value == np.mean(rising) and (finding.verdict == "holds") == sure
    changes = table.pivot(
        index=["layer", "third"], columns="scale", values="change"
    ).to_numpy()
    means = table.pivot(
        index=["layer", "third"], columns="scale", values="attention"
    ).to_numpy()
    assert (
        changes[:, 1:] == pytest.approx(np.diff(means), abs=1e-9)
        and (changes[:, 0] == 0).all()
    )
    curves = pd.read_csv(folder / "curves.csv")
    assert curves["wave_scale_1.5"].to_numpy() == pytest.approx(
        rope_wave(np.arange(1.0, 701), scale=1.5), rel=1e-8
    )
    assert curves["decay_scale_2"].to_numpy() == pytest.approx(
        rope_decay_bound(np.arange(1.0, 701), scale=2.0), rel=1e-8
    )


def test_a_model_without_rotary_embedding_is_refused(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    result = posbench("study=rope_curves", "model=tiny_alibi")
    assert result.status == 2 and "rotary" in result.err and not run_folders(outputs)
