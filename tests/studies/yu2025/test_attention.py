"""Attention to the gold item, its doubling, and positional channels: against full eager attention,
enumeration and controls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import permutations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from matplotlib.figure import Figure
from scipy.stats import spearmanr

import posbench as package
from posbench.measure.items import attention_to_items, item_tokens
from posbench.measure.states import Site, Strings, average_states, moments
from posbench.methods.scale_channel import ScaleChannel
from posbench.perturbations.scale_attention import scale_attention
from posbench.report.folder import study_tables
from posbench.schema import instantiate, verify
from posbench.stats.correlation import permutation_p, spearman
from posbench.stats.frames import UNMODIFIED
from posbench.stats.position_bias import dip_from_rows, position_curves
from posbench.studies.attention_to_gold import (
    AttentionToGold,
    _length_finding,
    head_row,
    mean_maps,
    retrieval_scores,
    vertical_share,
)
from posbench.studies.base import Study
from posbench.studies.prompts import Prompts
from posbench.tasks import KVRetrieval
from tests.conftest import Result, run_folders
from tests.messages import Tokens, refused
from tests.models import LAYERS, WIDTH, build
from tests.parity.plain import batch
from tests.rounding import (
    assert_same,
    attention_noise,
    embedded_attention_noise,
    embedded_noise,
    family_noise,
    hidden_states,
)
from yu2025.doubling import Doubling
from yu2025.positional_channels import (
    PositionalChannels,
    correlation,
    jackknife,
    mean_correlation,
)

SMALL = dict(
    prompt="compact",
    records="words",
    pairs=6,
    limit=2,
    max_new_tokens=1,
    positions=(0, 3, 5),
)
PADS = [0, 7]
TOTAL = 30
BARE = "stages=[study]"  # writing figures takes longer than all else here
FEW = ["study.examples=6", "task.limit=6", "task.positions=[0,5,11]", "task.pairs=12"]


@contextmanager
def plainly(
    model,
    tokens: torch.Tensor,
    factor: float,
    layers,
    renormalise: bool,
    rows: Callable[[int], slice],
) -> Iterator[list[torch.Tensor]]:
    """Eager attention whose whole weight matrix is made, then changed in some rows; yields the matrices in
    layer order."""
    made: list[torch.Tensor] = []
    softmax = torch.nn.functional.softmax

    def changed(scores, dim=-1, **settings):
        weights = softmax(scores, dim=dim, **settings)
        if weights.ndim != 4:  # a router of experts
            return weights
        if len(made) % LAYERS in layers:
            part = torch.ones_like(weights)
            part[:, :, rows(weights.shape[-2])] += (
                factor - 1
            ) * torch.nn.functional.pad(
                tokens, (0, weights.shape[-1] - tokens.shape[-1])
            ).to(weights)[:, None, None]
            weights = weights * part
            if renormalise:
                weights = weights / weights.sum(-1, keepdim=True)
        made.append(weights)
        return weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", changed)
        patch.setattr(model.config, "_attn_implementation_internal", "eager")
        yield made


def marked() -> torch.Tensor:
    """Tokens of one item per row, [B, T]."""
    tokens = torch.zeros(len(PADS), TOTAL)
    tokens[0, 20:24] = 1
    tokens[1, 22:25] = 1
    return tokens


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "llama-gqa",
        "mistral-window",
        "gemma2",
        "phi3-partial",
        "mpt",
        "falcon",
        "falcon-7b",
    ],
)
def test_doubling_equals_full_matrices_with_their_last_row_changed(
    name: str, renormalise: bool
) -> None:
    model = build(
        name
    )  # padding overflows in float64 where a family takes its softmax in float32
    ids, mask, positions = batch(PADS, TOTAL)
    call = dict(input_ids=ids, attention_mask=mask, use_cache=True)
    call |= {} if name == "mpt" else {"position_ids": positions}
    layers = (1, 3)
    tokens = marked()
    with torch.no_grad():
        before = model(**call).logits
        with scale_attention(
            package.load(model), tokens, 2.0, layers=layers, renormalise=renormalise
        ) as weights:
            found = model(**call).logits
        with plainly(
            model, tokens, 2.0, layers, renormalise, lambda n: slice(n - 1, n)
        ) as full:
            expected = model(**call).logits
    noise = family_noise(name)
    assert_same(found[:, -1], expected[:, -1], noise, "logits")
    assert_same(found[0, :-1], before[0, :-1], noise, "logits")
    assert (found[:, -1] - before[:, -1]).abs().max() > 1e-3, "the change is seen"
    assert torch.equal(model(**call).logits, before), "and gone after the block"
    for layer in range(LAYERS):
        assert_same(
            weights[layer], full[layer][:, :, -1], attention_noise(name), "attention"
        )


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "mpt"])
def test_doubling_while_tokens_follow_equals_one_long_forward(
    name: str, generated: bool
) -> None:
    model = build(name, dtype=torch.float64)
    ids, mask, _ = batch([0], TOTAL + 3)
    tokens = marked()[:1]
    logits = []
    first = TOTAL - 1
    with torch.no_grad():
        with scale_attention(
            package.load(model), tokens, 3.0, layers=range(LAYERS), generated=generated
        ):
            out = model(ids[:, :TOTAL], use_cache=True)
            logits.append(out.logits[:, -1])
            for at in range(TOTAL, TOTAL + 3):
                out = model(
                    ids[:, at : at + 1],
                    attention_mask=mask[:, : at + 1],
                    past_key_values=out.past_key_values,
                )
                logits.append(out.logits[:, -1])
        rows = slice(first, None) if generated else slice(first, first + 1)
        with plainly(model, tokens, 3.0, range(LAYERS), True, lambda n: rows):
            expected = model(ids, use_cache=False).logits[:, first:]
    # The library's eager attention takes its softmax in float32.
    assert_same(torch.stack(logits, 1), expected, family_noise(name), "logits")


def test_doubling_by_one_changes_nothing_and_works_inside_a_method() -> None:
    model = build("llama-gqa")
    lm = package.load(model)
    tokens = marked()
    ids, mask, positions = batch(PADS, TOTAL)
    call = dict(input_ids=ids, attention_mask=mask, position_ids=positions)
    noise = family_noise("llama-gqa")
    with torch.no_grad():
        with scale_attention(lm, tokens, 1.0, layers=range(LAYERS)):
            inside = model(**call).logits
        assert_same(
            inside[mask.bool()], model(**call).logits[mask.bool()], noise, "logits"
        )
        with ScaleChannel(channel=5, factor=-1.0, layers=(1, 2)).applied(lm):
            with scale_attention(lm, tokens, 2.0, layers=range(LAYERS)) as weights:
                found = model(**call).logits[:, -1]
            with plainly(
                model,
                tokens,
                2.0,
                range(LAYERS),
                True,
                # In one pass all tokens attend, and the last one again.
                lambda n: slice(n - 1, n) if n in (1, TOTAL) else slice(0, 0),
            ) as full:
                expected = model(**call).logits[:, -1]
    assert_same(found, expected, noise, "logits")
    assert_same(
        weights[2], full[-2][:, :, -1], attention_noise("llama-gqa"), "attention"
    )


def test_doubling_marks_the_tokens_of_its_item_in_any_order_of_the_batch() -> None:
    lm = package.load("tiny")
    task = KVRetrieval(**(SMALL | {"pairs": 8, "positions": (1, 6)}))
    examples = sorted(
        task.evaluation()[:3] + KVRetrieval(**SMALL).evaluation()[:2],
        key=lambda e: -len(e.items),
    )[:3]
    encoded = {e.id: lm.encode(e.prompt) for e in examples}
    study = Doubling(factor=4.0)
    tokens = {e.id: item_tokens(encoded[e.id], e) for e in examples}
    run: Any = SimpleNamespace(lm=lm)
    prompts = Prompts(run, task, examples, encoded, tokens, [examples])
    _, together = study.replies_and_weights(prompts, "gold", examples)
    for row, example in enumerate(examples):
        target = example.gold_position
        _, alone = study.replies_and_weights(prompts, "gold", [example])
        _, plain = study.replies_and_weights(prompts, UNMODIFIED, [example])
        noise = embedded_attention_noise()
        assert_same(together[row], alone[0], noise, "attention")
        lm_row = attention_to_items(lm, [encoded[example.id]], [example])[0]
        assert_same(plain[0], lm_row, noise, "attention")
        before = plain[0, 0, target]
        after = alone[0, 0, target]
        assert before < after <= 4 * before, (
            "layer 0 sees no earlier change: more weight, at most the factor"
        )
    assert {
        study.target("other", e) for e in examples if e.id == examples[0].id
    }.isdisjoint({examples[0].gold_position})


def test_attention_by_head_equals_full_eager_attention() -> None:
    lm = package.load("tiny_alibi")
    examples = KVRetrieval(**SMALL).evaluation()[:2]
    encoded = [lm.encode(e.prompt) for e in examples]
    found = attention_to_items(lm, encoded, examples, heads=True)
    noise = embedded_attention_noise("tiny_alibi")
    assert_same(
        found.mean(2), attention_to_items(lm, encoded, examples), noise, "attention"
    )
    with (
        torch.no_grad(),
        plainly(
            lm.model, torch.zeros(1, 1), 1.0, (), False, lambda n: slice(0, 0)
        ) as full,
    ):
        lm.model(torch.tensor([e.ids for e in encoded]), use_cache=False)
    for row, (code, example) in enumerate(zip(encoded, examples, strict=True)):
        for item, (start, end) in enumerate(example.items):
            tokens = [
                i for i, (a, b) in enumerate(code.offsets) if a < end and b > start
            ]
            for layer, weights in enumerate(full):
                for head in range(weights.shape[1]):
                    mean = np.mean([float(weights[row, head, -1, t]) for t in tokens])
                    assert_same(found[row, layer, head, item], mean, noise, "attention")
        kept = head_row(found[row].numpy(), example)
        gold = example.gold_position
        for layer in range(lm.layers):
            for head in range(found.shape[2]):
                weights = found[row, layer, head].tolist()
                assert kept["largest"][layer][head] == weights.index(max(weights))
                assert kept["gold"][layer][head] == pytest.approx(
                    weights[gold], rel=1e-5
                )
                assert kept["others"][layer][head] == pytest.approx(
                    (sum(weights) - weights[gold]) / 5, rel=1e-4, abs=1e-7
                )


def test_retrieval_score_is_what_shuffling_leaves() -> None:
    gold = np.array([0, 0, 2, 2, 4, 5])
    rng = np.random.default_rng(0)
    largest = np.stack(
        [gold, np.zeros(6, int), np.array([0, 1, 2, 3, 4, 0]), rng.integers(0, 6, 6)],
        axis=1,
    )
    weights = rng.random((6, 4))
    found = retrieval_scores(
        largest, weights, weights / 2, gold, [str(i) for i in range(6)], least=0.0
    )
    shuffles = np.array(
        [(largest == np.array(order)[:, None]).mean(0) for order in permutations(gold)]
    )
    assert np.allclose(found["expected"], shuffles.mean(0)), "over all 720 orders"
    assert np.allclose(
        found["score"], (largest == gold[:, None]).mean(0) - shuffles.mean(0)
    )
    assert found.loc[1, "score"] == pytest.approx(0), (
        "one place whatever is asked for: a vertical line"
    )
    assert np.allclose(found["ratio"], 2) and np.allclose(
        found["gold_attention"], weights.mean(0)
    )


def test_layers_that_follow_are_found_and_random_ones_are_not() -> None:
    rng = np.random.default_rng(1)
    gold = np.repeat([0, 5, 11], 40)
    largest = rng.integers(0, 12, (120, 60))
    largest[:, 7] = np.where(rng.random(120) < 0.5, gold, 0)
    ones = np.ones((120, 60))
    found = retrieval_scores(
        largest, ones, ones, gold, [str(i) for i in range(120)], least=0.0
    )
    assert (
        list(found.index[found["retrieval"]]) == [7]
        and (found["score_ci_low"] > 0).sum() < 8
    )
    assert found.loc[7, "p"] < 0.01 < found.loc[found.index != 7, "p"].min()
    column = np.tile(rng.random(12), (120, 1))
    diagonal = np.eye(12)[gold]
    mean = mean_maps(np.stack([column, diagonal], 1), gold, "layer")
    assert (mean["n"] == 40).all()
    vertical, other = (vertical_share(rows) for _, rows in mean.groupby("layer"))
    assert vertical == pytest.approx(1) and other < 0.4
    row = mean[(mean["layer"] == 1) & (mean["gold_position"] == 5)].set_index("item")[
        "attention"
    ]
    assert row[5] == 1 and row.drop(5).max() == 0


def test_a_layer_that_follows_too_rarely_to_name_is_not_related() -> None:
    rng = np.random.default_rng(2)
    gold = np.repeat([0, 5, 11], 3000)
    follows = rng.random((9000, 2)) < (0.9, 0.04)
    largest = np.where(follows, gold[:, None], rng.integers(0, 12, (9000, 2)))
    ones = np.ones((9000, 2))
    ids = [str(i) for i in range(9000)]
    found = retrieval_scores(largest, ones, ones, gold, ids, AttentionToGold().least)
    assert found["p"].max() < 0.01 and found["score_ci_low"].min() > 0
    assert found["retrieval"].tolist() == [True, False]


@pytest.mark.parametrize(
    ("related", "verdict"),
    [
        ([2, 3], "holds"),
        ([0], "contradicted"),
        ([1, 2], "inconclusive"),  # as many pairs for as against
        ([], "not testable"),
    ],
)
def test_deep_layers_that_follow_and_a_tie(related: list[int], verdict: str) -> None:
    layers = pd.DataFrame(
        {
            "layer": range(4),
            "retrieval": [layer in related for layer in range(4)],
            "threshold": 0.02,
            "vertical": 0.9,
            "p": 0.001,
            "n": 900,
        }
    )
    score = layers["retrieval"] * 0.8
    layers = layers.assign(
        score=score, score_ci_low=score - 0.01, score_ci_high=score + 0.01
    )
    examples = pd.DataFrame({"items": [8, 8]})
    maps = pd.DataFrame({"item": range(8)})
    heads = pd.DataFrame({"retrieval": [True, True, False]})
    tables = {"layers": layers, "heads": heads, "maps": maps, "examples": examples}
    follow, deep = AttentionToGold(show=("maps",)).findings(tables)
    assert deep.verdict == verdict
    assert follow.verdict == ("holds" if related else "inconclusive")


@pytest.mark.parametrize(
    ("related", "verdict"),
    [(1, "holds"), (3, "contradicted"), (0, "not testable")],
)
def test_figure_13_says_that_a_part_of_the_heads_follows(
    related: int, verdict: str
) -> None:
    heads = pd.DataFrame(
        {"layer": [0, 0, 1, 1, 1], "retrieval": [False] * 2 + [True] * 3}
    )
    heads.loc[2 + related :, "retrieval"] = False
    tables = {
        "layers": pd.DataFrame({"retrieval": [True]}),
        "heads": heads,
        "head_maps": pd.DataFrame({"layer": [1]}),
        "maps": pd.DataFrame({"item": range(8)}),
        "examples": pd.DataFrame({"items": [8, 8]}),
    }
    (part,) = AttentionToGold(show=("head_maps",)).findings(tables)
    assert part.verdict == verdict and part.n == 3


def test_statistics_over_gold_positions() -> None:
    rng = np.random.default_rng(2)
    x = rng.random((5, 9))
    y = rng.integers(0, 4, (5, 9)).astype(float)
    assert np.allclose(
        spearman(x, y), [spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)]
    )
    few = np.array([3.0, 1.0, 2.0, 5.0, 4.0]), np.array([2.0, 1.0, 3.0, 5.0, 4.0])
    every = [spearmanr(few[0], order).statistic for order in permutations(few[1])]
    exact = np.mean(np.array(every) >= spearmanr(*few).statistic - 1e-12)
    assert permutation_p(*few) == pytest.approx(exact, abs=0.01)
    frame = pd.DataFrame(
        {
            "gold_position": np.repeat([0, 5, 10], 50),
            "depth": np.repeat([0, 0.5, 1], 50),
        }
    )
    frame = frame.assign(
        cluster=[str(i) for i in range(150)],
        value=np.repeat([4.0, 1.0, 2.0], 50),
        items=11,
    )
    (value, *_), drawn = dip_from_rows(frame, "value", 1000)
    assert value == 0.5 and np.allclose(drawn, 0.5), (
        "half of the lower end; constant values leave no spread"
    )
    frame["value"] += rng.normal(size=150)
    apart = position_curves(frame, "value", "items", 1000)[11][1]
    spread = frame.groupby("gold_position")["value"].std(ddof=0) / np.sqrt(50)
    assert np.allclose(apart.std(0), spread, rtol=0.1), "the standard error of a mean"
    assert abs(np.corrcoef(apart[:, 0], apart[:, 1])[0, 1]) < 0.1
    frame["cluster"] = [str(i) for i in range(50)] * 3
    frame["value"] = np.tile(rng.normal(size=50), 3)
    together = position_curves(frame, "value", "items", 1000)[11][1]
    assert np.allclose(together[:, 0], together[:, 2]), (
        "a question asked at every position is drawn at all of them"
    )


@pytest.mark.parametrize("site", ["attention_input", "residual"])
@pytest.mark.parametrize("name", ["tiny_nope", "tiny_alibi"])
def test_moments_equal_what_all_states_give(name: str, site: Site) -> None:
    lm = package.load(name)
    skip = 4
    channels = [3, 40]
    strings = Strings(count=45, length=24, alphabet="tokens", batch_size=20, seed=3)
    found = moments(lm, strings, site, channels, skip, lambda n: None)
    averages = average_states(lm, strings)
    expected = (
        averages["attention_input"]
        if site == "attention_input"
        else averages["residual"][1:]
    )
    noise = embedded_noise(name, hidden_states, output_hidden_states=True)
    assert_same(found.mean, expected, noise, "hidden states")
    with torch.no_grad():
        out = lm.model.base_model(
            input_ids=torch.tensor(strings.draw(lm)),
            output_hidden_states=True,
            use_cache=False,
        )
    if site == "residual":
        states = (
            torch.stack(out.hidden_states[1:]).double().numpy()
        )  # [L, strings, P, D]
        assert_same(found.mean, states.mean(1), noise, "hidden states")
        variance = states[:, :, skip:][..., channels].var((1, 2))
        # A square moves by twice its root times what moves.
        largest = np.abs(states[..., channels]).max()
        assert_same(found.variance, variance, 2 * noise * largest, "hidden states")
        for group in (0, 7):
            wanted = states[:, group::20][..., channels].mean(1)
            assert_same(found.groups[group], wanted, noise, "hidden states")
    together = np.einsum("g,glpc->lpc", found.sizes / 45, found.groups)
    assert_same(together, found.mean[..., channels], noise, "hidden states")
    assert_same(found.shuffled[:, :skip], found.mean[:, :skip], noise, "hidden states")
    assert np.allclose(
        found.shuffled[:, skip:].mean(1), found.mean[:, skip:].mean(1), atol=1e-5
    ), "the rest only moves"
    assert np.abs(found.shuffled - found.mean).max() > 0.01


def test_a_planted_trend_is_found_and_noise_is_not() -> None:
    rng = np.random.default_rng(4)
    noise = rng.normal(size=(20, 3, 60, 8))
    noise[..., 5] += np.linspace(0, 1, 60)
    noise[..., 6] -= np.linspace(0, 1, 60)
    level = mean_correlation(noise.mean(0))
    assert (
        set(np.argsort(-level)[:2]) == {5, 6} and level[[0, 1, 2, 3, 4, 7]].max() < 0.3
    )
    assert correlation(np.array([[1.0, 2.0, 4.0], [3.0, 2.0, 1.0]])).tolist() == [1, -1]
    value, low, high, _ = jackknife(noise[..., 5], np.full(20, 10.0))
    assert value == pytest.approx(level[5]) and 0.5 < low < value < high <= 1
    assert jackknife(noise[..., 0], np.full(20, 10.0))[1] < 0.15


def drawn(folder: Path) -> Mapping[str, tuple[Figure, str]]:
    """The figures of a run folder, from its files alone."""
    config = yaml.safe_load((folder / "config.yaml").read_text())["study"]
    study: Any = instantiate(config, Study, "study")
    return study.figures(
        study_tables(folder, json.loads((folder / "study.json").read_text())["tables"])
    )


def test_an_untrained_model_has_neither_retrieval_nor_gain(
    posbench: Callable[..., Result], outputs: Path, checkpoint: Path
) -> None:
    model = [
        "model=hf",
        "model.name=random",
        f"model.path={checkpoint}",
        "model.dtype=float32",
        "task.prompt=compact",
        "task.records=words",
        "task.max_new_tokens=1",
    ]
    for study, fields in (
        ("attention_to_gold", ["study.items=[9]", "task.positions=[0,4,8]"]),
        ("doubling", []),
    ):
        result = posbench(f"study={study}", BARE, *model, *FEW, *fields)
        assert result.status == 0, result.err
    tables = {folder.name.split("__")[1]: folder for folder in run_folders(outputs)}
    folder = tables["attention_to_gold"]
    assert not pd.read_csv(folder / "layers.csv")["retrieval"].any()
    assert set(drawn(folder)) == {"maps", "heads", "head_maps", "gold", "lengths"}, (
        "the best layer stands in"
    )
    verdicts = pd.read_csv(folder / "findings.csv")["verdict"]
    assert "holds" not in set(verdicts) and "not testable" in set(verdicts)
    examples = pd.read_csv(tables["doubling"] / "examples.csv").pivot(
        index="id", columns="mode", values="score"
    )
    assert abs((examples["gold"] - examples["none"]).mean()) < 0.15


def test_the_studies_on_a_trained_model(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    strings = ["study.strings=60", "study.length=64"]
    for study, fields in (
        ("attention_to_gold", [*FEW, "study.items=[24]", "study.least=0.2"]),
        ("doubling", [*FEW, "study.item=0.5", "study.factor=3"]),
        ("positional_channels", strings),
    ):
        result = posbench(f"study={study}", BARE, "model=tiny", *fields)
        assert result.status == 0, result.err
    folders = {folder.name.split("__")[1]: folder for folder in run_folders(outputs)}
    folder = folders["attention_to_gold"]
    layers = pd.read_csv(folder / "layers.csv")
    assert layers["retrieval"].tolist() == [False, True, False, False]
    maps = pd.read_csv(folder / "maps.csv")
    examples = pd.read_csv(folder / "examples.csv")
    diagonal = maps[
        (maps["layer"] == 1) & (maps["item"] == maps["gold_position"])
    ].set_index("gold_position")["attention"]
    own = examples[examples["items"] == 12].groupby("gold_position")["attention"].mean()
    assert np.allclose(diagonal, own, rtol=1e-4) and set(examples["items"]) == {12, 24}
    assert set(drawn(folder)) == {"maps", "heads", "head_maps", "gold", "lengths"}
    doubled = pd.read_csv(folders["doubling"] / "examples.csv").set_index(
        ["id", "mode"]
    )
    wide = doubled["attention"].unstack()
    here = doubled.xs("item", level="mode")
    at_gold = here.index[here["target"] == here["gold_position"]]
    assert (
        np.allclose(wide.loc[at_gold, "item"], wide.loc[at_gold, "gold"])
        and len(at_gold) == 6
    )
    assert (wide["gold"] > wide["none"]).all() and (wide["other"] < wide["gold"]).all()
    folder = folders["positional_channels"]
    curves = pd.read_csv(folder / "curves.csv")
    null = pd.read_csv(folder / "null.csv").set_index("positions")
    assert (
        15 in set(curves["channel"])
        and curves.groupby(["channel", "kind", "layer"])["token"].count().eq(64).all()
    )
    assert (
        null.loc["as they are", "largest"] > null.loc["shuffled positions", "largest"]
    )
    claims = pd.read_csv(folder / "findings.csv")["claim"]
    assert claims.is_unique, "one run asks a claim of a channel once"
    assert "[the strongest positional channel]" in claims[0]
    assert not (folder / "search_state.pt").exists()
    assert {"averaged", "statistics", "layers_15"} <= set(drawn(folder)) and set(
        drawn(folders["doubling"])
    ) == {"doubling"}


@pytest.mark.parametrize(
    ("study", "field", "allowed", "hint"),
    [
        (AttentionToGold(layers=(9,)), "study.layers", "3", "study.layers=null"),
        (AttentionToGold(layers=()), "study.layers", "3", "study.layers=null"),
        (
            AttentionToGold(head_layer=4),
            "study.head_layer",
            "3",
            "study.head_layer=null",
        ),
        (AttentionToGold(examples=1), "study.examples", "2", "study.examples=2"),
        (AttentionToGold(items=(400,)), "task.pairs", "64", "task.pairs=64"),
        (Doubling(item=1.5), "study.item", ("0", "1"), "study.item=0"),
        (Doubling(factor=1.0), "study.factor", "1", "study.factor=2"),
        (
            PositionalChannels(channels=(WIDTH,)),
            "study.channels",
            ("0", "47"),
            "stages=[search]",
        ),
        (PositionalChannels(strings=3), "study.strings", "20", "study.strings=20"),
        (
            PositionalChannels(length=600),
            "study.length",
            ("512", "tiny"),
            "study.length",
        ),
    ],
)
def test_fields_that_do_not_fit_are_refused(
    study: Study, field: str, allowed: Tokens, hint: Tokens
) -> None:
    run: Any = SimpleNamespace(lm=package.load("tiny"), task=KVRetrieval(**SMALL))
    with refused(field, allowed=allowed, hint=hint):
        verify(study, "study")
        study.check(run)


def _with_dips(dips: list[float], noise: float) -> pd.DataFrame:
    """Examples of 16, 32, 64, ... items, attention 1 at both ends and lower between them by these dips."""
    rng = np.random.default_rng(0)
    rows = []
    for number, dip in enumerate(dips):
        for i, depth in product(range(30), np.linspace(0, 1, 5)):
            level = 1.0 if depth in (0, 1) else 1 - dip
            place = {
                "items": 16 * 2**number,
                "id": f"{i} {depth}",
                "cluster": f"{number} {i}",
            }
            place |= {"gold_position": int(4 * depth), "depth": depth, "score": 1.0}
            rows.append(place | {"attention": level + noise * rng.normal()})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("dips", "noise", "verdict"),
    [
        ([0.17, 0.41, 0.23], 0.02, "contradicted"),  # a line through these rises
        ([0.17, 0.41, 0.46], 0.1, "inconclusive"),
        ([0.17, 0.41, 0.43], 0.02, "contradicted"),  # it grows too little to name
        ([0.1, 0.25, 0.4], 0.02, "holds"),
        ([0.1, 0.25, 0.4], 2.0, "inconclusive"),
    ],
)
def test_a_dip_grows_with_the_length_only_if_it_grows_at_every_step(
    dips: list[float], noise: float, verdict: str
) -> None:
    found = _length_finding(_with_dips(dips, noise))
    assert found.verdict == verdict and found.ci_low < found.value < found.ci_high
