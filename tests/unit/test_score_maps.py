"""Mean scores and Gram panels against full recomputations, one sample at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import posbench
from posbench.errors import UserError
from posbench.studies import score_maps as study
from posbench.theory.causal_mask import diagonal_normalised
from tests.models import BUILDERS


def _rows(count: int = 3, length: int = 9) -> list[list[int]]:
    torch.manual_seed(3)
    return torch.randint(5, 250, (count, length)).tolist()


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3", "smollm3", "gemma"])
def test_scores_give_back_the_attention(family: str) -> None:
    """The softmax of one sample's scores over what a token sees is its attention, averaged over nothing: one head."""
    torch.manual_seed(0)
    lm = posbench.load(BUILDERS[family]())
    rows = _rows()
    found = study.score_maps(lm, rows, batch_size=2)
    assert found.shape == (lm.layers, 9, 9) and np.isnan(found[0][0, 1:]).all()
    alone = np.mean([study.score_maps(lm, [row]) for row in rows], axis=0)
    assert np.nan_to_num(found) == pytest.approx(np.nan_to_num(alone), abs=1e-4)
    # Independent: eager weights are exp(score) over a row's sum, so log weights differ from scores by one number per row.
    lm.model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = lm.model(torch.tensor([rows[0]]), output_attentions=True).attentions
    one = study.score_maps(lm, rows[:1])
    for layer in range(lm.layers):
        logs = weights[layer][0].log().mean(0).numpy()
        for i in range(1, 9):
            away = logs[i, : i + 1] - one[layer][i, : i + 1]
            assert away == pytest.approx(away.mean(), abs=1e-4)


def test_gram_panels_are_inner_products_of_the_states() -> None:
    torch.manual_seed(0)
    lm = posbench.load(BUILDERS["llama"]())
    rows = _rows()
    panels = study.gram_panels(lm, rows, batch_size=2)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in lm.model.modules())
    assert set(panels) == set(study.PANELS)
    lower = np.tril_indices(9)
    block, second = lm.model.model.layers[0], lm.model.model.layers[1]
    want = dict.fromkeys("acdefgh", 0.0)
    with torch.no_grad():
        for row in rows:
            out = lm.model(torch.tensor([row]), output_hidden_states=True, output_attentions=False)
            x, g = out.hidden_states[0][0], out.hidden_states[1][0]
            a = block.input_layernorm(x)
            cos_sin = lm.model.model.rotary_emb(x[None], torch.arange(9)[None])
            mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
            d = block.self_attn(a[None], position_embeddings=cos_sin, attention_mask=mask)[0][0]
            c = torch.linalg.lstsq(block.self_attn.o_proj.weight, d.T).solution.T
            e = d + x
            states = {
                "a": a,
                "c": c,
                "d": d,
                "e": e,
                "f": block.post_attention_layernorm(e),
                "g": g,
                "h": second.input_layernorm(g),
            }
            for name, value in states.items():
                want[name] = want[name] + (value @ value.T).numpy() / len(rows)
    for name, value in want.items():
        assert panels[name][lower] == pytest.approx(value[lower], abs=2e-3, rel=1e-3), name
    maps = study.score_maps(lm, rows)
    assert panels["b"][lower] == pytest.approx(maps[0][lower], abs=1e-5)
    assert panels["i"][lower] == pytest.approx(maps[1][lower], abs=1e-5)


def test_samples(tmp_path: Path) -> None:
    lm = posbench.load("tiny")
    rows, what = study.samples(lm, 5, 20, None, 1)
    assert [len(row) for row in rows] == [20] * 5 and rows == study.samples(lm, 5, 20, None, 1)[0] and "seed 1" in what
    file = tmp_path / "words.txt"
    file.write_text(" ".join(["bal", "kop", "dip", "gel"] * 40))
    rows, what = study.samples(lm, 3, 12, file, 0)
    assert [len(row) for row in rows] == [12] * 3 and "words.txt" in what
    with pytest.raises(UserError, match="pieces of"):
        study.samples(lm, 1000, 12, file, 0)
    with pytest.raises(UserError, match="--text"):
        study.samples(lm, 1, 12, tmp_path / "absent", 0)


def test_families_that_cannot_be_listened_to_are_refused(tmp_path: Path) -> None:
    for family, words in (("mpt", "runs through the library"), ("gpt_neox", "post_attention_layernorm")):
        lm = posbench.load(BUILDERS[family]())
        with pytest.raises(UserError, match=words):
            study.gram_panels(lm, _rows())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(["--models", "tiny_nope", "--samples", "8", "--tokens", "12", "--out", str(tmp_path)]) == 0
    assert {p.name for p in (tmp_path / "tiny_nope").iterdir()} == {
        "maps.npz",
        *(f"{n}.{k}" for n in ("gram", "score_maps") for k in ("png", "pdf")),
    }
    data = np.load(tmp_path / "tiny_nope/maps.npz")
    assert np.nan_to_num(data["normalised"]) == pytest.approx(np.nan_to_num(diagonal_normalised(data["scores"])))
    assert study.main(["--models", "tiny_alibi", "--samples", "2", "--tokens", "8", "--out", str(tmp_path)]) == 2
    assert "runs through the library" in " ".join(capsys.readouterr().out.split())
