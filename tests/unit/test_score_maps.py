"""Mean scores and Gram panels against full recomputations, one sample at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import posbench as package
from posbench.errors import UserError
from posbench.methods.attention_buckets import AttentionBuckets
from posbench.methods.moice import MoICE
from posbench.studies.behind_rope import gram, score_map
from posbench.theory.causal_mask import diagonal_normalised
from tests.conftest import Result, run_folders
from tests.models import BUILDERS


def _rows(count: int = 3, length: int = 9) -> list[list[int]]:
    torch.manual_seed(3)
    return torch.randint(5, 250, (count, length)).tolist()


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3", "smollm3", "gemma", "phi3"])
def test_scores_give_back_the_attention(family: str) -> None:
    """The softmax of one sample's scores over what a token sees is its attention, averaged over nothing: one
    head."""
    torch.manual_seed(0)
    lm = package.load(BUILDERS[family]())
    rows = _rows()
    found = [each.mean for each in score_map.score_maps(lm, [rows[:2], rows[2:]])]
    assert len(found) == lm.layers and found[0].shape == (9, 9) and np.isnan(found[0][0, 1:]).all()
    single = [[each.mean for each in score_map.score_maps(lm, [[row]])] for row in rows]
    assert np.nan_to_num(found) == pytest.approx(np.nan_to_num(np.mean(single, axis=0)), abs=1e-4)
    # Independent: eager weights are exp(score) over a row's sum, so log weights differ from scores by one
    # number per row.
    lm.model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = lm.model(torch.tensor([rows[0]]), output_attentions=True).attentions
    for layer in range(lm.layers):
        logs = weights[layer][0].log().mean(0).numpy()
        for i in range(1, 9):
            away = logs[i, : i + 1] - single[0][layer][i, : i + 1]
            assert away == pytest.approx(away.mean(), abs=1e-4)


def test_mean_map_is_the_mean_of_single_maps() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(5, 3, 12, 4), torch.randn(5, 3, 12, 4)
    found = score_map.MeanMap(12)
    found.add(query[:3], key[:3], 0.5)
    found.add(query[3:], key[3:], 0.5)
    each = 0.5 * torch.einsum("bhid,bhjd->bij", query, key).double().numpy() / 3
    lower = np.tril_indices(12)
    assert found.mean[lower] == pytest.approx(each.mean(0)[lower], abs=1e-5)
    for half, rows in zip(found.halves, ([0, 2, 4], [1, 3]), strict=True):
        assert half[lower] == pytest.approx(each[rows].mean(0)[lower], abs=1e-5)
    for (near, shift), scores in zip(found.each, each, strict=True):
        rows, distances = [], []
        for i in range(5, 12):
            keys = scores[i, 1:i]
            rows.append(keys[-(len(keys) // 4) :].mean() - keys[: len(keys) // 4].mean())
        for distance in range(1, 10):
            pairs = np.array([scores[j + distance, j] for j in range(1, 12 - distance)])
            half = len(pairs) // 2
            distances.append(pairs[:half].mean() - pairs[-half:].mean())
        assert near == pytest.approx(np.mean(rows), abs=1e-5) and shift == pytest.approx(
            np.mean(distances), abs=1e-5
        )


def test_description_tells_relative_from_absolute_patterns() -> None:
    """Planted scores: a decay with distance, and on top of it, or not, a slope along the keys; noise in every
    sample."""
    n, samples = 24, 40
    place = torch.arange(n, dtype=torch.float32)
    rng = torch.Generator().manual_seed(0)
    told = {}
    for slope in (0.0, 0.1):
        found = score_map.MeanMap(n)
        scores = -0.3 * (place[:, None] - place) + slope * place
        for _ in range(samples):
            noisy = scores + torch.randn(n, n, generator=rng)
            # Keys that are unit vectors make the scores themselves the products.
            found.add(noisy[None, None], torch.eye(n)[None, None])
        told[slope] = score_map.describe(found)
    relative, absolute = told[0.0], told[0.1]
    lower = np.tril_indices(n - 1, -1)
    exact = scores.numpy()[1:, 1:]
    share = np.var(diagonal_normalised(exact)[lower]) / np.var(exact[lower])
    assert relative["shift_low"] < 0 < relative["shift_high"] and relative["beyond"] < 0.01
    assert absolute["shift_high"] < 0 and absolute["beyond"] == pytest.approx(share, rel=0.2)
    assert (
        relative["near_low"] > 0 and absolute["near_low"] > relative["near_high"] and absolute["n"] == samples
    )


def test_methods_that_attend_more_than_once() -> None:
    """Bases equal to the model's own change nothing, however often a method attends or runs a sample."""
    lm = package.load("tiny")
    rows = score_map.samples(lm, 3, 10, None, 0)
    plain = [np.nan_to_num(each.mean) for each in score_map.score_maps(lm, [rows])]
    for method in (
        MoICE(weights="uniform", bases=(None, None), top_k=2),
        AttentionBuckets(bases=(None, None)),
    ):
        with method.applied(lm):
            found = score_map.score_maps(lm, [rows])
            panels = gram.gram_panels(lm, [rows])
        assert [np.nan_to_num(each.mean) for each in found] == [
            pytest.approx(each, abs=1e-4) for each in plain
        ]
        assert len(found[0].each) == 3 and np.nan_to_num(panels["i"].mean) == pytest.approx(
            plain[1], abs=1e-4
        )


def test_gram_panels_are_inner_products_of_the_states() -> None:
    torch.manual_seed(0)
    lm = package.load(BUILDERS["llama"]())
    rows = _rows()
    panels = {name: each.mean for name, each in gram.gram_panels(lm, [rows[:2], rows[2:]]).items()}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in lm.model.modules())
    assert set(panels) == set(gram.PANELS)
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
    scores = score_map.score_maps(lm, [rows])
    assert panels["b"][lower] == pytest.approx(scores[0].mean[lower], abs=1e-5)
    assert panels["i"][lower] == pytest.approx(scores[1].mean[lower], abs=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "phi3", "mistral-window"])
def test_gram_and_scores_agree_on_other_families(family: str) -> None:
    lm = package.load(BUILDERS[family]())
    panels, scores = gram.gram_panels(lm, [_rows(2)]), score_map.score_maps(lm, [_rows(2)])
    lower = np.tril_indices(9)
    for panel, layer in (("b", 0), ("i", 1)):
        assert panels[panel].mean[lower] == pytest.approx(scores[layer].mean[lower], abs=1e-5)
    assert all(len(each.each) == 2 and np.isfinite(each.mean[lower]).all() for each in panels.values())


def test_large_maps_are_means_over_blocks() -> None:
    values = np.random.default_rng(0).normal(size=(21, 21))
    small = score_map.long_map({"score": values}, 30)
    assert len(small) == 21 * 22 // 2 and score_map.stacked(small.assign(layer=1), "score").shape == (
        1,
        21,
        21,
    )
    large = score_map.long_map({"score": values}, 8)  # blocks of three tokens
    cells = score_map.stacked(large.assign(layer=1), "score")[0]
    assert cells.shape == (7, 7) and np.isnan(cells[0, 1:]).all()
    assert cells[4, 1] == pytest.approx(values[12:15, 3:6].mean())
    assert cells[2, 2] == pytest.approx((values[7, 6] + values[8, 6] + values[8, 7]) / 3)
    assert sorted(set(large["query"])) == [2, 5, 8, 11, 14, 17, 20]


def test_samples(tmp_path: Path) -> None:
    lm = package.load("tiny")
    rows = score_map.samples(lm, 5, 20, None, 1)
    assert [len(row) for row in rows] == [20] * 5 and rows == score_map.samples(lm, 5, 20, None, 1)
    assert rows != score_map.samples(lm, 5, 20, None, 2)
    file = tmp_path / "words.txt"
    file.write_text(" ".join(["bal", "kop", "dip", "gel"] * 40))
    assert [len(row) for row in score_map.samples(lm, 3, 12, file, 0)] == [12] * 3
    with pytest.raises(UserError, match="pieces of"):
        score_map.samples(lm, 1000, 12, file, 0)
    with pytest.raises(UserError, match=r"study\.text"):
        score_map.samples(lm, 1, 12, tmp_path / "absent", 0)


def test_families_that_cannot_be_listened_to_are_refused() -> None:
    for family, words in (("mpt", "runs through the library"), ("gpt_neox", "post_attention_layernorm")):
        lm = package.load(BUILDERS[family]())
        with pytest.raises(UserError, match=words):
            gram.gram_panels(lm, [_rows()])


def test_the_commands(posbench: Callable[..., Result], outputs: Path) -> None:
    size = ["model=tiny_nope", "study.samples=8", "study.tokens=12", "stages=[study]", "runtime.batch_size=3"]
    for name in ("score_map", "gram"):
        result = posbench(f"study={name}", *size)
        assert result.status == 0, result.err
    second, first = run_folders(outputs)
    maps = pd.read_csv(first / "maps.csv")
    whole = score_map.stacked(maps, "score")
    assert np.nan_to_num(score_map.stacked(maps, "normalised")) == pytest.approx(
        np.nan_to_num(diagonal_normalised(whole)), abs=1e-6
    )
    panels = score_map.stacked(pd.read_csv(second / "panels.csv"), "product", by="panel")
    assert np.nan_to_num(panels[8]) == pytest.approx(np.nan_to_num(whole[1]), abs=1e-5), (
        "scores of layer 2 in both studies"
    )
    tables = {"maps": maps, "layers": pd.read_csv(first / "layers.csv")}
    study = score_map.ScoreMap(samples=8, tokens=12)
    # Five layers: the first four raw and normalised with their colour bars, then all of them.
    shapes = {name: len(figure.axes) for name, (figure, _) in study.figures(tables).items()}
    assert shapes == {"score_map": 16, "all_layers_score": 10, "all_layers_normalised": 10}
    (figure, _) = gram.Gram(samples=8, tokens=12).figures({"panels": pd.read_csv(second / "panels.csv")})[
        "gram"
    ]
    assert len(figure.axes) == 18
    assert len(pd.read_csv(first / "findings.csv")) == 3 and len(pd.read_csv(second / "findings.csv")) == 6


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["study=gram", "model=tiny_alibi"], "runs through the library"),
        (["study=score_map", "study.tokens=100000"], "study.tokens = 100000: allowed: at most"),
        (["study=score_map", "study.samples=1"], "study.samples = 1: allowed: a whole number from 2 up"),
        (
            ["study=score_map", "study.text=absent.txt"],
            "study.text = 'absent.txt': allowed: a UTF-8 text file",
        ),
        (["study=gram", "method=scale_channel"], "scale_channel runs the last token apart"),
    ],
)
def test_what_does_not_fit_is_refused(
    posbench: Callable[..., Result], outputs: Path, args: list[str], message: str
) -> None:
    result = posbench(*args)
    assert result.status == 2 and message in result.err and not run_folders(outputs), result.err
