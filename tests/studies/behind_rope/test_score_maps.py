"""The studies of score maps and Gram panels against full recomputations, one sample at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import posbench as package
from behind_rope import gram, score_map
from behind_rope.maps import long_table, maps_figure, stack_maps
from behind_rope.score_map import ScoreMap
from posbench.measure.scores import diagonal_normalised, score_maps
from posbench.methods.attention_buckets import AttentionBuckets
from posbench.methods.moice import MoICE
from tests.conftest import Result, run_folders
from tests.messages import refused
from tests.models import BUILDERS
from tests.rounding import assert_same, embedded_noise, noise_floor


def _rows(count: int = 3, length: int = 9) -> list[list[int]]:
    torch.manual_seed(3)
    return torch.randint(5, 250, (count, length)).tolist()


def test_methods_that_attend_more_than_once() -> None:
    """Bases equal to the model's own change nothing, however often a method attends or runs a sample."""
    lm = package.load("tiny")
    rows = ScoreMap(samples=3, tokens=10).rows(lm)
    plain = [np.nan_to_num(each.mean) for each in score_maps(lm, [rows])]
    noise = embedded_noise("tiny")
    for method in (
        MoICE(weights="uniform", bases=(None, None), top_k=2),
        AttentionBuckets(bases=(None, None)),
    ):
        with method.applied(lm):
            found = score_maps(lm, [rows])
            panels = gram.gram_panels(lm, [rows])
        assert all(len(each.each) == 3 for each in panels.values())
        assert_same(
            [np.nan_to_num(each.mean) for each in found], plain, noise, "scores"
        )
        assert len(found[0].each) == 3
        assert_same(np.nan_to_num(panels["i"].mean), plain[1], noise, "scores")


def test_gram_panels_are_inner_products_of_the_states() -> None:
    torch.manual_seed(0)
    lm = package.load(BUILDERS["llama"]())
    rows = _rows()
    panels = {
        name: each.mean
        for name, each in gram.gram_panels(lm, [rows[:2], rows[2:]]).items()
    }
    assert not any(
        module._forward_hooks or module._forward_pre_hooks
        for module in lm.model.modules()
    )
    assert set(panels) == set(gram.PANEL_TITLES)
    lower = np.tril_indices(9)
    block = lm.model.model.layers[0]
    second = lm.model.model.layers[1]
    want = dict.fromkeys("acdefgh", 0.0)
    with torch.no_grad():
        for row in rows:
            out = lm.model(
                torch.tensor([row]), output_hidden_states=True, output_attentions=False
            )
            x = out.hidden_states[0][0]
            g = out.hidden_states[1][0]
            a = block.input_layernorm(x)
            cos_sin = lm.model.model.rotary_emb(x[None], torch.arange(9)[None])
            mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
            d = block.self_attn(
                a[None], position_embeddings=cos_sin, attention_mask=mask
            )[0][0]
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
        assert panels[name][lower] == pytest.approx(value[lower], abs=2e-3, rel=1e-3), (
            name
        )
    scores = score_maps(lm, [rows])
    noise = noise_floor(lm.model, torch.tensor(rows))
    assert_same(panels["b"][lower], scores[0].mean[lower], noise, "scores")
    assert_same(panels["i"][lower], scores[1].mean[lower], noise, "scores")


@pytest.mark.parametrize("family", ["qwen3", "phi3", "mistral-window"])
def test_gram_and_scores_agree_on_other_families(family: str) -> None:
    lm = package.load(BUILDERS[family]())
    panels = gram.gram_panels(lm, [_rows(2)])
    scores = score_maps(lm, [_rows(2)])
    lower = np.tril_indices(9)
    for panel, layer in (("b", 0), ("i", 1)):
        noise = noise_floor(lm.model, torch.tensor(_rows(2)))
        assert_same(
            panels[panel].mean[lower], scores[layer].mean[lower], noise, "scores"
        )
    assert all(
        len(each.each) == 2 and np.isfinite(each.mean[lower]).all()
        for each in panels.values()
    )


def test_large_maps_are_means_over_blocks() -> None:
    values = np.random.default_rng(0).normal(size=(21, 21))
    values[np.triu_indices(21, 1)] = np.nan
    small = long_table("layer", {0: {"score": values}}, 30)
    assert len(small) == 21 * 22 // 2 and stack_maps(small, "score").shape == (
        1,
        21,
        21,
    )
    assert small.iloc[-1].tolist() == [0, 21, 21, values[20, 20]]
    large = long_table("layer", {0: {"score": values}}, 8)  # blocks of three tokens
    cells = stack_maps(large, "score")[0]
    assert cells.shape == (7, 7) and np.isnan(cells[0, 1:]).all()
    assert cells[4, 1] == pytest.approx(values[12:15, 3:6].mean())
    assert cells[2, 2] == pytest.approx(
        (values[7, 6] + values[8, 6] + values[8, 7]) / 3
    )
    assert sorted(set(large["query"])) == [2, 5, 8, 11, 14, 17, 20]


def test_samples(tmp_path: Path) -> None:
    lm = package.load("tiny")
    rows = ScoreMap(samples=5, tokens=20, seed=1).rows(lm)
    assert [len(row) for row in rows] == [20] * 5 and rows == ScoreMap(
        samples=5, tokens=20, seed=1
    ).rows(lm)
    assert rows != ScoreMap(samples=5, tokens=20, seed=2).rows(lm)
    file = tmp_path / "words.txt"
    file.write_text(" ".join(["bal", "kop", "dip", "gel"] * 40))
    assert [
        len(row) for row in ScoreMap(samples=3, tokens=12, text=str(file)).rows(lm)
    ] == [12] * 3
    with refused(
        "study.text",
        "319 tokens",
        allowed=("1000", "12"),
        hint=("study.samples=26", "study.tokens"),
    ):
        ScoreMap(samples=1000, tokens=12, text=str(file)).rows(lm)
    with refused("study.text", str(tmp_path / "absent"), allowed="UTF-8", hint="path"):
        ScoreMap(samples=2, tokens=12, text=str(tmp_path / "absent")).rows(lm)


def test_families_that_cannot_be_listened_to_are_refused() -> None:
    for family, words in (
        ("mpt", "MPT"),
        ("gpt_neox", "post_attention_layernorm"),
    ):
        lm = package.load(BUILDERS[family]())
        with refused("model", lm.name, allowed=words):
            gram.gram_panels(lm, [_rows()])


def test_the_commands(posbench: Callable[..., Result], outputs: Path) -> None:
    size = [
        "model=tiny_nope",
        "study.samples=8",
        "study.tokens=12",
        "stages=[study]",
        "runtime.batch_size=3",
    ]
    for name in ("score_map", "gram"):
        result = posbench(f"study={name}", *size)
        assert result.status == 0, result.err
    second, first = run_folders(outputs)
    maps = pd.read_csv(first / "maps.csv")
    whole = stack_maps(maps, "score")
    assert np.nan_to_num(stack_maps(maps, "normalised")) == pytest.approx(
        np.nan_to_num(diagonal_normalised(whole)), abs=1e-6
    )
    panels = stack_maps(pd.read_csv(second / "panels.csv"), "product", by="panel")
    assert np.nan_to_num(panels[8]) == pytest.approx(
        np.nan_to_num(whole[1]), abs=1e-5
    ), "scores of layer 2 in both studies"
    tables = {"maps": maps, "layers": pd.read_csv(first / "layers.csv")}
    study = ScoreMap(samples=8, tokens=12)
    # Five layers: the first four raw and normalised, then all of them; the colour bar of each stands in it.
    shapes = {
        name: len(figure.axes) for name, (figure, _) in study.figures(tables).items()
    }
    assert shapes == {"score_map": 8, "all_layers_score": 5, "all_layers_normalised": 5}
    (figure, _) = gram.Gram(samples=8, tokens=12).figures(
        {"panels": pd.read_csv(second / "panels.csv")}
    )["gram"]
    assert len(figure.axes) == 9 and all(axes.child_axes for axes in figure.axes)
    assert (
        len(pd.read_csv(first / "findings.csv")) == 3
        and len(pd.read_csv(second / "findings.csv")) == 6
    )


def test_claims_are_asked_of_the_models_that_they_are_about(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    """Figure 3 reads a model without position embedding, Section 5.2 those with RoPE, as tiny has it."""
    size = ["study.samples=8", "study.tokens=12", "stages=[study]"]
    for model in ("tiny", "tiny_nope"):
        for study in ("gram", "score_map"):
            result = posbench(f"study={study}", f"model={model}", *size)
            assert result.status == 0, result.err
    testable = {}
    for folder in run_folders(outputs):
        findings = pd.read_csv(folder / "findings.csv")
        key = folder.name.partition("__")[0], "maps.csv" in os.listdir(folder)
        testable[key] = list(findings["verdict"] != "not testable")
        notes = findings.loc[~pd.Series(testable[key]), "note"]
        assert notes.str.contains("position embedding|has none").all()
    assert testable == {
        ("tiny", False): 6 * [False],
        ("tiny", True): [False, True, True],
        ("tiny_nope", False): 6 * [True],
        ("tiny_nope", True): [True, False, False],
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["study=gram", "model=tiny_alibi"], "model = 'tiny_alibi': allowed: a family"),
        (
            ["study=score_map", "study.tokens=100000"],
            "study.tokens = 100000: allowed: at most",
        ),
        (
            ["study=score_map", "study.samples=1"],
            "study.samples = 1: allowed: a whole number from 2 to 1000000",
        ),
        (
            ["study=score_map", "study.text=absent.txt"],
            "study.text = 'absent.txt': allowed: a UTF-8 text file",
        ),
        (
            ["study=gram", "method=scale_channel"],
            "scale_channel runs the last token apart",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    posbench: Callable[..., Result], outputs: Path, args: list[str], message: str
) -> None:
    result = posbench(*args)
    assert result.status == 2 and message in result.err and not run_folders(outputs), (
        result.err
    )


def layer_rows(name: str, intervals: list[tuple[float, float]]) -> pd.DataFrame:
    """Rows of layers with a number in the middle of its interval."""
    low, high = np.array(intervals).T
    columns = {name: (low + high) / 2, f"{name}_ci_low": low, f"{name}_ci_high": high}
    return pd.DataFrame(columns).assign(**{f"{name}_n": 40, "n": 40})


@pytest.mark.parametrize(
    ("later", "verdict"),
    [
        ([(0.4, 0.6), (0.2, 0.3)], "holds"),
        ([(0.4, 0.6), (-0.1, 0.3)], "inconclusive"),
        ([(0.4, 0.6), (-2.1, -1.9)], "contradicted"),
    ],
)
def test_a_claim_on_all_later_layers_needs_all_of_them(
    later: list[tuple[float, float]], verdict: str
) -> None:
    rows = layer_rows("near", later)
    finding = score_map._near_keys(layer_rows("near", [(-0.1, 0.1)]).iloc[0], rows)
    assert finding.verdict == verdict and finding.value == 0.5


def test_a_layer_that_hardly_depends_on_more_than_the_distance_contradicts() -> None:
    """Layer 1 surely does nothing worth naming, although its interval is the narrowest."""
    first = layer_rows("shift", [(-0.01, 0.01)]).iloc[0]
    later = layer_rows("shift", [(0.039, 0.041), (0.4, 0.6)])
    assert score_map._beyond_distance(first, later).verdict == "contradicted"
    later = layer_rows("shift", [(-0.7, -0.6), (0.4, 0.6)])
    assert score_map._beyond_distance(first, later).verdict == "holds"


def test_scores_whose_halves_share_nothing_have_no_size() -> None:
    nothing = pd.DataFrame({"beyond": [np.nan, np.nan]})
    assert score_map._normalised_size(nothing).verdict == "not testable"
    some = pd.DataFrame({"beyond": [0.25, 0.04]})
    assert score_map._normalised_size(some).verdict == "holds"


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "olmo2"])
def test_families_with_norms_behind_their_parts_have_no_gram(family: str) -> None:
    lm = package.load(BUILDERS[family]())
    with refused("model", lm.name, allowed="post_attention_layernorm"):
        gram.first_block(lm)


def test_a_sink_does_not_hide_what_the_other_keys_get() -> None:
    scores = np.where(np.tri(30, dtype=bool), np.arange(30.0), np.nan)
    scores[:, 0] = 1000.0
    (axes,) = maps_figure([("", {"layer 0": scores})], has_sink=True).axes
    low, high = axes.images[0].get_clim()
    # The colours of the keys from 2 on, of which the last one stands on the diagonal alone.
    assert 1 <= low < 2 and 26 <= high <= 28
