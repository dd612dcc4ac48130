"""Waves, decay and attention to thirds, against closed forms and full attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import posbench
from posbench.methods.position_interpolation import PositionInterpolation
from posbench.studies.lpes.rope_curves import attention_to_thirds, decay, main, wave
from tests.models import BUILDERS

AT = np.array([0.0, 1.0, 7.0, 350.0])


def test_the_wave_is_the_score_of_two_rotated_ones() -> None:
    dim = 32
    for distance, value in zip(AT, wave(AT, dim, base=500.0, scale=2.0), strict=True):
        angles = distance / 2 * 500.0 ** (-2 * np.arange(dim // 2) / dim)
        turned = np.concatenate([np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles)])
        # Query and key are all ones: their dot product after rotation, over the square root of the head size.
        assert value == pytest.approx(turned.sum() / np.sqrt(dim))
    assert wave(AT[:1], dim)[0] == pytest.approx(np.sqrt(dim))


def test_a_scale_stretches_wave_and_decay() -> None:
    assert wave(2 * AT, scale=2.0) == pytest.approx(wave(AT)) and decay(2 * AT, scale=2.0) == pytest.approx(
        decay(AT)
    )


def test_the_bound_decays_and_bounds_the_wave() -> None:
    dim, at = 128, np.arange(1.0, 2000.0)
    bound = decay(at, dim)
    assert decay(AT[:1], dim)[0] == pytest.approx((dim // 2 + 1) / 2)
    assert bound[:20].mean() > bound[200:400].mean() > bound[1500:].mean()


@pytest.mark.parametrize("family", ["llama-gqa", "qwen2"])
def test_thirds_are_those_of_full_attention(family: str) -> None:
    torch.manual_seed(0)
    lm = posbench.load(BUILDERS[family]())
    prompts = [torch.randint(5, 250, (n,)).tolist() for n in (10, 12, 30)]
    frame = attention_to_thirds(lm, prompts, (1.0, 1.7), batch_size=2)
    assert frame.groupby(["scale", "layer"])["attention"].sum().to_numpy() == pytest.approx(1.0, abs=1e-5)
    lm.model.set_attn_implementation("eager")
    for scale in (1.0, 1.7):
        with PositionInterpolation(scale=scale).applied(lm), torch.inference_mode():
            every = [lm.model(torch.tensor([p]), output_attentions=True).attentions for p in prompts]
        for layer in range(lm.layers):
            rows = [one[layer][0, :, -1].mean(0).numpy() for one in every]
            middle = np.mean([np.array_split(row, 3)[1].sum() for row in rows])
            here = frame[(frame.scale == scale) & (frame.layer == layer) & (frame.third == "middle")].iloc[0]
            assert here.attention == pytest.approx(middle, abs=1e-5) and here.n == 3
            assert here.ci_low <= here.attention <= here.ci_high


def test_it_writes_what_it_drew(tmp_path, capsys) -> None:
    main(["--out", str(tmp_path), "--prompts", "4", "--distance", "700"])
    names = {"curves.csv", "curves.png", "curves.pdf", "thirds.csv", "thirds.png", "thirds.pdf"}
    assert {p.name for p in tmp_path.iterdir()} == names
    assert "attention to the middle third" in " ".join(capsys.readouterr().out.split())
