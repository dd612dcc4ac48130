"""The studies of perturbed prompts against full attention written out, spans run alone, and hooks on the
norms."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from posbench.measure.states import Strings
from posbench.methods.scale_channel import ScaleChannel, scale_layer_range
from posbench.model.load import ModelConfig, load, model_config
from posbench.stats import bootstrap, reference
from posbench.stats.bootstrap import Estimate
from posbench.stats.correlation import permutation_p
from posbench.studies import prompts as shared
from posbench.studies.bias_source import _by_position, _gap_of_positions
from posbench.tasks import KVRetrieval
from tests.conftest import Result, run_folders
from tests.messages import assert_refused, refused
from tests.parity import plain
from tests.rounding import assert_same, hidden_states, noise_floor, weights_noise
from yu2025 import common
from yu2025.crop_mask import NEAR_LEVEL, CropMask, crossed_figure

PAIRS = 8
POSITIONS = (0, 3, 7)
EACH = 2
WORDS = torch.randint(6, 60, (4, 40), generator=torch.Generator().manual_seed(0))
TASK = dict(
    prompt="compact",
    records="words",
    pairs=PAIRS,
    positions=POSITIONS,
    limit=EACH,
    max_new_tokens=1,
)


@pytest.fixture(scope="module")
def overrides(checkpoint: Path) -> list[str]:
    """A run on the random checkpoint: 6 prompts of 8 pairs."""
    task = [
        f"task.{key}={list(value) if key == 'positions' else value}"
        for key, value in TASK.items()
    ]
    rest = [
        "model=hf",
        "model.name=random",
        f"model.path={checkpoint}",
        "model.dtype=float32",
    ]
    return [
        *rest,
        *task,
        "runtime.device=cpu",
        "runtime.threads=1",
        "runtime.resamples=100",
        "runtime.batch_size=4",
    ]


@pytest.fixture(scope="module")
def lm(checkpoint: Path):
    return load(
        ModelConfig(name="random", path=str(checkpoint), dtype="float32"), device="cpu"
    )


@pytest.fixture(scope="module")
def attention(lm) -> float:
    """Noise of attention weights."""
    return weights_noise(lm.model, WORDS)


@pytest.fixture(scope="module")
def hidden(lm) -> float:
    """Noise of hidden states."""
    return noise_floor(lm.model, WORDS, hidden_states, output_hidden_states=True)


def tables(outputs: Path) -> dict[str, pd.DataFrame]:
    """All tables of the one run."""
    (folder,) = run_folders(outputs)
    return {
        path.stem: pd.read_csv(path, keep_default_na=False, na_values=["", "nan"])
        for path in folder.glob("*.csv")
    }


def spans(lm, example):
    """Token spans of the items, from the text that each token spells."""
    encoded = lm.encode(example.prompt)
    touching = [
        [i for i, (a, b) in enumerate(encoded.offsets) if a < last and b > first]
        for first, last in example.items
    ]
    return encoded.ids, [(tokens[0], tokens[-1] + 1) for tokens in touching]


@torch.no_grad()
def written_out(lm, example, crop=None, crop_layers=(), move=None):
    """Attention of the last token to each item in each layer, [L, N], and the reply's token: full matrices,
    every head apart."""
    ids, items = spans(lm, example)
    rows = {}

    def attend(layer):
        if crop is not None and layer.number in crop_layers:
            for query in range(*crop):
                layer.open[
                    query,
                    [
                        key
                        for key in range(len(ids))
                        if key and not crop[0] <= key < crop[1]
                    ],
                ] = False
        out = []
        last = []
        for q, k, v in zip(layer.query, layer.key, layer.value, strict=True):
            weights = layer.weights(layer.turn(q), layer.turn(k))
            if move is not None:
                (start, stop), (to, to_stop) = move
                turned = layer.turn(k)
                for i in range(start, stop):
                    at = torch.zeros_like(k)
                    place = min(to + i - start, to_stop - 1)
                    at[place] = k[i]
                    turned[i] = layer.turn(at)[place]
                weights[-1] = layer.weights(layer.turn(q), turned)[-1]
            out.append(weights @ v)
            last.append(weights[-1])
        mean = torch.stack(last).mean(0)
        rows[layer.number] = [mean[a:b].mean().item() for a, b in items]
        return torch.stack(out)

    with plain.attending_plainly(lm.model, [0], attend):
        reply = lm.logits(torch.tensor([ids]))[0, -1].argmax().item()
    return np.array([rows[layer] for layer in range(lm.layers)]), lm.tokenizer.decode(
        [reply]
    )


def test_crop_mask_equals_full_attention_written_out(
    posbench: Callable[..., Result],
    outputs: Path,
    overrides: list[str],
    lm,
    attention: float,
) -> None:
    result = posbench(
        "experiment=yu2025_mechanism_mask",
        "study.layers=[0,1]",
        "study.retrieval=[2,3]",
        "stages=[study]",
        *overrides,
    )
    assert result.status == 0, result.err
    found = tables(outputs)
    (left, right) = crossed_figure(found["crop_mask_effects"]).axes
    assert len(left.get_yticks()) == 7 and left.get_ylim()[0] > left.get_ylim()[1], (
        "the first on top"
    )
    drawn = [
        line.get_xdata()[0]
        for line in right.lines
        if line.get_label().startswith("unmodified")
    ]
    scores = found["crop_mask"].query("variant == 'none' and measure == 'accuracy'")[
        "value"
    ]
    assert np.allclose(drawn, 100 * (scores.to_numpy()[[0, 2]] - scores.to_numpy()[1]))
    got = found["crop_mask"].set_index(["variant", "gold_position", "measure"])
    layers = found["crop_mask_layers"].set_index(["variant", "layer"])["attention"]
    task = KVRetrieval(**TASK)
    variants = {
        "none": lambda items, gold: {},
        "crop": lambda items, gold: dict(crop=items[gold], crop_layers=(0, 1)),
        "pe_to_beginning": lambda items, gold: dict(move=(items[gold], items[0])),
        "pe_to_end": lambda items, gold: dict(move=(items[gold], items[-1])),
        "crop_pe_to_beginning": lambda items, gold: dict(
            crop=items[gold], crop_layers=(0, 1), move=(items[gold], items[0])
        ),
        "crop_pe_to_end": lambda items, gold: dict(
            crop=items[gold], crop_layers=(0, 1), move=(items[gold], items[-1])
        ),
    }
    seen = {}
    for variant, setting in variants.items():
        for position in POSITIONS:
            examples = [e for e in task.evaluation() if e.gold_position == position]
            each = [
                written_out(lm, e, **setting(spans(lm, e)[1], position))
                for e in examples
            ]
            weights = np.mean([weights[:, position] for weights, _ in each], axis=0)
            score = np.mean(
                [
                    task.score(e, reply)["accuracy"]
                    for e, (_, reply) in zip(examples, each, strict=True)
                ]
            )
            found_here = got.loc[(variant, position, "attention"), "value"]
            assert_same(found_here, weights[2:].mean(), attention, "attention")
            assert got.loc[(variant, position, "accuracy"), "value"] == score
            seen[variant, position] = weights[2:].mean()
            if position == 3:
                # Of three positions, the inner one.
                assert_same(layers[variant], weights, attention, "attention")
    for variant in list(variants)[1:]:
        assert abs(seen[variant, 3] - seen["none", 3]) > 1e-4
        change = got.loc[(variant, 3, "attention"), "change"]
        assert_same(change, seen[variant, 3] - seen["none", 3], attention, "attention")
    effects = found["crop_mask_effects"].set_index("effect")["value"]
    larger = max(seen["pe_to_beginning", 3], seen["pe_to_end", 3])
    both = seen["crop_pe_to_end", 3]
    wanted = {
        "crop_over_moves": seen["crop", 3] - larger,
        "mask_beyond_ids_attention": both - seen["pe_to_end", 3],
        "ids_beyond_mask_attention": both - seen["crop", 3],
        "last_over_inner_attention": seen["none", 7] - seen["none", 3],
    }
    for name, value in wanted.items():
        assert_same(effects[name], value, attention, "attention")
    for name, part, whole in (("crop_level", "crop", 0), ("end_level", "pe_to_end", 7)):
        value = seen[part, 3] / seen["none", whole]
        assert_same(effects[name], value, attention / seen["none", whole], "attention")
    for control in ("crop_other", "pe_to_end_other"):
        assert (layers[control] - layers["none"]).abs().max() > 1e-6, (
            "the control does something"
        )


@torch.no_grad()
def loss_written_out(lm, example, crop=None, move=None, dimmed=None) -> float:
    """Loss of the answer in nats per token: full matrices, every head apart.

    The crop is of all layers; moved keys are seen by the last prompt token and the answer; ``dimmed`` tokens keep a
    hundredth of their score's exponential for the last prompt token.
    """
    prompt, _ = spans(lm, example)
    encoded = lm.encode(example.prompt)
    answer = lm.continuation_ids(encoded, example.answers[0])
    ids = [*prompt, *answer[:-1]]
    last = len(prompt) - 1

    def attend(layer):
        if crop is not None:
            for query in range(*crop):
                shut = [k for k in range(1, len(ids)) if not crop[0] <= k < crop[1]]
                layer.open[query, shut] = False
        out = []
        for q, k, v in zip(layer.query, layer.key, layer.value, strict=True):
            weights = layer.weights(layer.turn(q), layer.turn(k))
            if move is not None:
                (start, stop), (to, to_stop) = move
                turned = layer.turn(k)
                for i in range(start, stop):
                    place = min(to + i - start, to_stop - 1)
                    at = torch.zeros_like(k)
                    at[place] = k[i]
                    turned[i] = layer.turn(at)[place]
                weights[last:] = layer.weights(layer.turn(q), turned)[last:]
            if dimmed is not None:
                weights[last, slice(*dimmed)] *= 0.01
                weights[last] /= weights[last].sum()
            out.append(weights @ v)
        return torch.stack(out)

    with plain.attending_plainly(lm.model, [0], attend):
        logits = lm.logits(torch.tensor([ids]))[0, last:]
    nats = logits.double().log_softmax(-1)
    return -float(nats[range(len(answer)), answer].mean())


def test_sources_of_a_bias_equal_losses_written_out(
    posbench: Callable[..., Result],
    outputs: Path,
    overrides: list[str],
    lm,
) -> None:
    result = posbench("study=bias_source", "stages=[study]", *overrides)
    assert result.status == 0, result.err
    found = tables(outputs)
    losses = found["bias_source"].set_index(["variant", "gold_position"])["loss"]
    examples = KVRetrieval(**TASK).evaluation()
    interventions = {
        "none": lambda items, gold: {},
        "crop": lambda items, gold: dict(crop=items[gold]),
        "pe_to_beginning": lambda items, gold: dict(move=(items[gold], items[0])),
        "pe_to_end": lambda items, gold: dict(move=(items[gold], items[-1])),
        "sink": lambda items, gold: dict(dimmed=(0, 1)),
    }
    noise = noise_floor(lm.model, WORDS)
    expected: dict[tuple[str, int], float] = {}
    worst = 0
    for variant, setting in interventions.items():
        if variant != "none":
            worst = max(POSITIONS, key=lambda position: expected["none", position])
        if variant == "pe_to_end" and worst == POSITIONS[-1]:
            assert "pe_to_end" not in losses.index.get_level_values("variant")
            continue  # it stands there already
        for position in POSITIONS if variant == "none" else [worst]:
            here = [e for e in examples if e.gold_position == position]
            each = [
                loss_written_out(lm, e, **setting(spans(lm, e)[1], position))
                for e in here
            ]
            expected[variant, position] = np.mean(each)
            assert_same(losses[variant, position], np.mean(each), noise, "logits")
    assert len({round(value, 4) for value in expected.values()}) == len(expected)
    effects = found["bias_source_effects"].set_index("effect")["value"]
    losses_of_unmodified = [expected["none", position] for position in POSITIONS]
    gap = max(losses_of_unmodified) - min(losses_of_unmodified)
    assert_same(effects["gap"], gap, 2 * noise, "logits")
    changed = dict.fromkeys(variant for variant, _ in expected)
    for variant in list(changed)[1:]:
        gain = expected["none", worst] - expected[variant, worst]
        assert_same(effects[f"{variant}_gain"], gain, 2 * noise, "logits")
        over_bound = gain - gap / 3
        assert_same(effects[f"{variant}_over_bound"], over_bound, 3 * noise, "logits")
    for control in ("crop_other", "pe_to_end_other", "sink_other"):
        assert abs(effects[f"{control}_gain"]) > 1e-7, "the control does something"


def test_the_gap_of_one_question_has_no_interval() -> None:
    frame = pd.DataFrame({"gold_position": [0, 1, 2], "loss": [0.1, 2.0, 1.0]})
    gap = _gap_of_positions(frame.assign(cluster=["a", "b", "c"]), 50)
    assert gap.value == pytest.approx(1.9) and np.isnan(gap[1:3]).all()


def test_small_losses_have_the_interval_of_numbers_and_not_of_shares() -> None:
    losses = [0.1, 0.2, 0.3]
    frame = pd.DataFrame({"loss": losses, "cluster": ["a", "b", "c"]})
    frame = frame.assign(variant="none", gold_position=0, depth=0.0)
    (row,) = _by_position(frame).to_dict("records")
    half = 4.302653 * np.std(losses, ddof=1) / np.sqrt(3)
    assert row["loss_ci_high"] - row["loss"] == pytest.approx(half)
    assert row["loss"] - row["loss_ci_low"] == pytest.approx(half)


@pytest.mark.parametrize(
    ("model", "verdicts"),
    [
        # Trained on questions that ask for both ends, with RoPE under a causal mask: either cue tells the place.
        ("tiny", {"causal mask": "holds", "position ids": "holds"}),
        # Without position embedding the causal mask alone can tell it.
        ("tiny_nope", {"causal mask": "holds"}),
    ],
)
def test_sources_that_the_making_of_a_model_settles_are_named(
    posbench: Callable[..., Result],
    outputs: Path,
    model: str,
    verdicts: dict[str, str],
) -> None:
    result = posbench(
        "study=bias_source",
        f"model={model}",
        "study.examples=12",
        "task.positions=[0%,50%,100%]",
        "runtime.resamples=400",
    )
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    findings = pd.read_csv(folder / "findings.csv")
    named = {
        source
        for source in ("causal mask", "position ids", "first token")
        for claim, verdict in zip(findings["claim"], findings["verdict"], strict=True)
        if source in claim.partition(":")[0] and verdict == "holds"
    }
    assert named == set(verdicts)


def test_sources_need_a_better_and_a_worse_position(
    posbench: Callable[..., Result],
) -> None:
    result = posbench("study=bias_source", "model=tiny", "task.positions=[50%]")
    assert result.status == 2
    assert_refused(result.err, "task.positions", 1)


def test_one_question_tells_no_source(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    few = ("study.examples=1", "task.positions=[0%,50%,100%]", "runtime.resamples=100")
    result = posbench("study=bias_source", "model=tiny", *few)
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    findings = pd.read_csv(folder / "findings.csv")
    assert set(findings["verdict"]) == {"not testable"}


def test_a_model_without_rotation_has_no_position_ids_to_cross(
    posbench: Callable[..., Result],
) -> None:
    result = posbench("study=crop_mask", "study.crossed=true", "model=tiny_nope")
    assert (
        result.status == 2
        and "study.crossed = True" in result.err
        and result.err.count("\n") == 1
    )


def test_hidden_perturbation_equals_spans_run_alone_and_position_ids_by_hand(
    posbench: Callable[..., Result],
    outputs: Path,
    overrides: list[str],
    lm,
    hidden: float,
) -> None:
    channel = 5
    length = 40
    start = 16
    stop = 24
    study = [
        "stages=[study]",
        "study.texts=6",
        f"study.length={length}",
        "study.alphabet=tokens",
        "study.skip=4",
        "study.bins=20",
    ]
    result = posbench(
        "study=hidden_perturbation",
        f"study.channel={channel}",
        *study,
        "study.controls=2",
        *overrides,
    )
    assert result.status == 0, result.err
    found = tables(outputs)
    texts = torch.tensor(Strings(count=6, length=length, alphabet="tokens").draw(lm))

    def normed(ids, positions=None):
        """The channel behind the first norm of every layer, [L, B, P]."""
        kept = []
        hooks = [
            layer.input_layernorm.register_forward_hook(
                lambda m, a, out: kept.append(out[..., channel])
            )
            for layer in lm.model.model.layers
        ]
        with torch.no_grad():
            lm.model(ids, position_ids=positions)
        for hook in hooks:
            hook.remove()
        return torch.stack(kept).double().numpy()

    places = torch.arange(length).repeat(6, 1)
    places[:, start:stop] -= stop - start
    unmodified = normed(texts)
    shifted = normed(texts, places)
    alone = normed(texts[:, start:stop])
    curve = unmodified.mean(1).reshape(lm.layers, 20, 2).mean(-1)[:, 2:]
    reach = curve.max(1) - curve.min(1)
    sign = np.sign(curve[:, 0] - unmodified[:, :, start:stop].mean((1, 2)))
    base = unmodified[:, :, start:stop].mean((1, 2))
    # Without a token before it, a span of a model with relative positions is a prompt of its own.
    crop = sign / reach * (alone.mean((1, 2)) - base)
    shift = sign / reach * (shifted[:, :, start:stop].mean((1, 2)) - base)
    effects = found["effects"].set_index("effect")["value"]
    noise = hidden / reach.min()
    assert_same(effects["crop_inside"], crop[1:].mean(), noise, "hidden states")
    assert_same(effects["shift_inside"], shift[1:].mean(), noise, "hidden states")
    beyond = crop[1:].mean() - abs(shift[1:].mean())
    assert_same(effects["crop_over_shift"], beyond, noise, "hidden states")
    assert abs(crop[1:].mean()) > 0.01 and abs(shift[1:].mean()) > 0.01
    table = found["layer_effects"]
    rows = table[
        (table["where"] == "inside")
        & (table["channel"] == channel)
        & (table["variant"] == "crop")
    ]
    assert_same(rows["change"], crop, noise, "hidden states")
    assert rows["change"].iloc[0] == 0, "layer 0 has attended to nothing yet"
    assert table["control"].sum() == 2 * 2 * 2 * lm.layers and channel not in set(
        table.loc[table["control"], "channel"]
    )
    curves = found["curves"]
    lines = curves[(curves["variant"] == "none") & (curves["channel"] == channel)]
    assert_same(
        lines["value"].to_numpy().reshape(lm.layers, 20)[:, 2:],
        curve,
        hidden,
        "hidden states",
    )


def test_channel_subtraction_equals_hooks_on_the_norms(
    posbench: Callable[..., Result],
    outputs: Path,
    overrides: list[str],
    lm,
    attention: float,
    hidden: float,
) -> None:
    channel = 5
    gold = 3
    other = 5
    study = [
        "experiment=yu2025_mechanism_channel",
        f"study.channel={channel}",
        "study.layers=[1,2]",
        "study.controls=1",
        "study.value=2",
    ]
    result = posbench(*study, *overrides)
    assert result.status == 0, result.err
    found = tables(outputs)
    items = (
        found["items"].set_index(["variant", "measure", "item"]).sort_index()["value"]
    )
    assert set(found["items"]["gold"]) == {gold} and set(found["items"]["other"]) == {
        other
    }
    examples = [e for e in KVRetrieval(**TASK).evaluation() if e.gold_position == gold]

    @torch.no_grad()
    def hooked(amounts, item):
        """Channel and attention of every item in layers 1 and 2, mean over layers and prompts, [N] each."""
        states = []
        weights = []
        for e in examples:
            ids, tokens = spans(lm, e)
            kept = {}

            def change(module, args, out, kept=kept, tokens=tokens):
                number = next(
                    i
                    for i, layer in enumerate(lm.model.model.layers)
                    if layer.input_layernorm is module
                )
                out = out.clone()
                if number in amounts:
                    out[:, slice(*tokens[item]), channel] -= amounts[number]
                kept[number] = out[0, :, channel]
                return out

            hooks = [
                layer.input_layernorm.register_forward_hook(change)
                for layer in lm.model.model.layers
            ]
            lm.model.set_attn_implementation("eager")
            maps = lm.model(torch.tensor([ids]), output_attentions=True).attentions
            lm.model.set_attn_implementation("sdpa")
            for hook in hooks:
                hook.remove()
            states.append(
                [[kept[n][a:b].mean().item() for a, b in tokens] for n in (1, 2)]
            )
            weights.append(
                [
                    [maps[n][0, :, -1, a:b].mean().item() for a, b in tokens]
                    for n in (1, 2)
                ]
            )
        return np.array(states).mean(0), np.array(weights).mean((0, 1))

    curves, plain_weights = hooked({}, gold)
    rising = np.sign([np.polyfit(range(PAIRS), curve, 1)[0] for curve in curves])
    amounts = dict(zip((1, 2), 2 * rising * np.ptp(curves, axis=1), strict=True))
    assert found["amounts"]["layer"].tolist() == list(amounts)
    assert_same(
        found["amounts"]["subtracted"],
        list(amounts.values()),
        2 * hidden,
        "hidden states",
    )
    assert_same(items["none", "attention"], plain_weights, attention, "attention")
    for where, item in (("gold", gold), ("other", other)):
        states, weights = hooked(amounts, item)
        assert_same(
            items[where, "channel"], states.mean(0), 2 * hidden, "hidden states"
        )
        assert_same(items[where, "attention"], weights, attention, "attention")
        assert abs(weights[item] - plain_weights[item]) > 1e-4
        effects = found["effects"].set_index("effect")["value"]
        rise = weights[item] - plain_weights[item]
        assert_same(effects[f"{where}_rise"], rise, attention, "attention")
        _, back = hooked({layer: -amount for layer, amount in amounts.items()}, item)
        assert_same(
            effects[f"{where}_over_opposite"],
            weights[item] - back[item],
            attention,
            "attention",
        )


@pytest.mark.parametrize("study", ["crop_mask", "hidden_perturbation"])
def test_model_without_rope_says_what_cannot_be_tested(
    posbench: Callable[..., Result], outputs: Path, study: str
) -> None:
    small = (
        ["study.examples=2"]
        if study == "crop_mask"
        else ["study.texts=8", "study.length=48"]
    )
    result = posbench(
        f"study={study}", "model=tiny_nope", "runtime.resamples=100", *small
    )
    assert result.status == 0, result.err
    found = tables(outputs)["findings"].set_index("claim")
    moved = found.index.str.contains("PE to|oved position|hifted position")
    assert set(found["verdict"][moved]) == {"not testable"}
    assert list(found["note"].str.contains("no rotary embedding")) == list(moved)


@pytest.mark.parametrize(
    ("inner", "verdict", "word"),
    [(0.07, "holds", ""), (0.079, "holds", ""), (0.081, "not testable", "81 %")],
)
def test_a_level_that_the_unmodified_model_is_near_cannot_be_reached(
    inner: float, verdict: str, word: str
) -> None:
    claims = reference.read_table("yu2025_claims.csv")
    claims = claims[claims["study"].isin(["crop_mask", "crop_mask_crossed"])]
    of_levels = claims[claims["effects"].str.contains("_level")]
    assert list(of_levels["bound"].astype(float)) == [NEAR_LEVEL, NEAR_LEVEL]
    values = {
        "unmodified_inner": inner,
        "unmodified_first": 0.1,
        "last_over_inner_attention": 0.1 - inner,
        "crop_pe_to_end_attention": 0.01,
        "crop_level": 0.95,
        "end_level": 0.95,
    }
    others = " ".join(claims["effects"]).split()
    values = dict.fromkeys(others, 0.01) | values
    effects = pd.DataFrame(
        [
            {"effect": e, "value": v, "ci_low": 0.99 * v, "ci_high": 1.01 * v, "n": 100}
            for e, v in values.items()
        ]
    )
    layers = dict.fromkeys(("retrieval_first", "retrieval_last"), 1)
    layers |= dict.fromkeys(("crop_first", "crop_last"), 0)
    tables = {"crop_mask": pd.DataFrame([layers]), "crop_mask_effects": effects}
    found = CropMask().findings(tables)
    judged = [f for f in found if "nearly to its level" in f.claim]
    assert [f.verdict for f in judged] == [verdict, verdict]
    assert all(word in f.note for f in judged)


def test_intervals_keep_pairs_together_and_agree_with_a_plain_bootstrap() -> None:
    rng = np.random.default_rng(0)
    clusters = [str(i // 2) for i in range(60)]
    base = rng.normal(size=60)
    noise = rng.normal(size=60)
    difference = lambda m: m["b"] - m["a"]  # noqa: E731
    shifted = {"a": (list(base), clusters), "b": (list(base + 1), clusters)}
    assert np.allclose(
        bootstrap.statistic(shifted, difference, resamples=200)[:3], 1
    ), "what is shared cancels"
    apart = {
        "a": (list(base), clusters),
        "b": (list(base + 1), [f"other {c}" for c in clusters]),
    }
    _, low, high, _ = bootstrap.statistic(apart, difference, resamples=200)
    assert high - low > 0.2, "and does not where the clusters differ"
    value, low, high, _ = bootstrap.statistic(
        {"b": (list(noise), clusters)}, lambda m: m["b"], resamples=4000
    )
    pairs = noise.reshape(30, 2).mean(1)
    share = bootstrap.tail(30)
    plain_means = np.array([pairs[rng.integers(0, 30, 30)].mean() for _ in range(4000)])
    assert value == pytest.approx(noise.mean()) and np.allclose(
        [low, high], np.quantile(plain_means, [share, 1 - share]), atol=0.03
    )


@pytest.mark.parametrize(
    ("channel", "subject"),
    [
        (382, "the search's channel"),
        (100, "the strongest positional channel"),
        (7, "channel 7"),
    ],
)
def test_claims_on_the_positional_channel_say_which_one(
    channel: int, subject: str
) -> None:
    """Of SmolLM2 the search takes another channel than the one that follows the position most closely."""
    run: Any = SimpleNamespace(model=model_config("smollm2"))
    assert common.channel_subject(run, channel) == subject
    effects = shared.effects_table({"crop_inside": Estimate(0.3, 0.2, 0.4, 40)})
    first, *_ = shared.judge_claims(effects, "hidden_perturbation", subject=subject)
    assert f"falls back [{subject}] (Yu et al." in first.claim


def test_task_without_gold_items_is_refused() -> None:
    task: Any = SimpleNamespace(
        name="mmlu",
        items=None,
        evaluation=lambda: pytest.fail("it would be downloaded"),
    )
    with refused(
        "task",
        "mmlu",
        allowed="gold item",
        hint=("task=kv_retrieval", "task=nq_multidoc"),
    ):
        shared.need_items(task)


def test_layers_of_the_paper_and_of_other_depths() -> None:
    assert scale_layer_range(common.CROP_LAYERS, 32) == (1, 7) and scale_layer_range(
        common.RETRIEVAL_LAYERS, 32
    ) == (15, 20)
    assert scale_layer_range(common.CROP_LAYERS, 4) == (0, 1) and scale_layer_range(
        common.RETRIEVAL_LAYERS, 80
    ) == (38, 50)
    assert common.retrieval_layers(None, [0.1] * 32) == (15, 20)
    assert common.retrieval_layers(None, [0.1, 0.3, 0.2]) == (1, 1)
    assert common.retrieval_layers((0, 2), [0.1, 0.3, 0.2]) == (0, 2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["study=hidden_perturbation"],
            "find one: posbench stages=[search] model=random method=scale_channel",
        ),
        (
            ["study=channel_subtraction", "study.channel=16"],
            "different channels from 0 to 15",
        ),
        (
            ["study=crop_mask", "study.layers=[2,4]"],
            "study.layers = [2, 4]: allowed: [first, last]",
        ),
        (
            ["study=crop_mask", "study.examples=0"],
            "study.examples = 0: allowed: a whole number from 1 to 1000000",
        ),
        (
            ["study=crop_mask", "method=moice", "method.weights=uniform"],
            "no method of rotary embeddings inside one",
        ),
        (
            ["study=hidden_perturbation", "study.channel=3", "study.span=[0.2,0.6]"],
            "study.span = [0.2, 0.6]: allowed: [start, end]",
        ),
        (
            ["study=hidden_perturbation", "study.channel=3", "study.length=500"],
            "the window of random is 256 tokens",
        ),
        (
            ["study=hidden_perturbation", "study.channel=3", "study.layers=[3,3]"],
            "layers before the last one",
        ),
        (
            ["study=channel_subtraction", "study.channel=3", "study.other=0.4"],
            "study.other = 0.4: allowed: a depth",
        ),
        (
            ["study=channel_subtraction", "study.channel=3", "study.value=-1"],
            "a number above 0",
        ),
    ],
)
def test_what_does_not_fit_gets_one_line_and_leaves_nothing(
    posbench: Callable[..., Result],
    outputs: Path,
    overrides: list[str],
    args: list[str],
    message: str,
) -> None:
    length = (
        ["study.length=100"]
        if args[0] == "study=hidden_perturbation" and "study.length=500" not in args
        else []
    )
    result = posbench(*overrides, *length, *args)
    assert (
        result.status == 2 and result.err.count("\n") == 1 and message in result.err
    ), result.err
    assert not run_folders(outputs)


def test_the_halves_of_the_method_run_as_an_experiment(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    few = [
        "task.pairs=12",
        "task.positions=[0,5,11]",
        "task.limit=8",
        "runtime.resamples=100",
    ]
    result = posbench(
        "experiment=yu2025_mechanism_tokens", "model=tiny", "stages=[evaluate]", *few
    )
    assert result.status == 0, result.err
    (summary,) = outputs.glob("yu2025_mechanism_tokens/v*/sweep__*/summary.csv")
    rows = pd.read_csv(summary, keep_default_na=False).query(
        "metric == 'accuracy' and gold_position == 'all'"
    )
    found = rows.set_index(["method", "method.tokens"])["value"].astype(float)
    task = KVRetrieval(
        prompt="compact", records="words", pairs=12, positions=(0, 5, 11)
    )
    assert (
        set(found["scale_channel"].index) == {"both", "last", "earlier"}
        and found["none"].nunique() == 1
    )
    model = load(
        ModelConfig(name="tiny", path="posbench://tiny", dtype="float32"), device="cpu"
    )
    asked = [e for e in task.evaluation() if int(e.id.split("-")[1]) < 4]
    for tokens in ("last", "earlier"):
        method = ScaleChannel(channel=15, factor=-1.0, layers=(1, 3), tokens=tokens)
        with method.applied(model):
            said = model.generate([e.prompt for e in asked], max_new_tokens=1)
        right = [
            task.score(e, text)["accuracy"] for e, text in zip(asked, said, strict=True)
        ]
        assert found["scale_channel", tokens] == pytest.approx(np.mean(right), abs=1e-6)


@pytest.mark.parametrize(
    ("study", "positions", "field"),
    [
        ("crop_mask", '["0%","100%"]', "task.positions"),
        ("channel_subtraction", "[0]", "study.gold"),
    ],
)
def test_an_item_is_not_compared_with_itself(
    posbench: Callable[..., Result],
    outputs: Path,
    study: str,
    positions: str,
    field: str,
) -> None:
    call = ["model=tiny", f"study={study}", f"task.positions={positions}"]
    result = posbench(*call, "task.limit=4", "runtime.device=cpu")
    assert result.status == 2 and not run_folders(outputs)
    assert_refused(result.err, field)


def test_the_order_of_three_positions_says_nothing(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    call = ["model=tiny", "study=attention_to_gold", "study.examples=6"]
    call += ["task.positions=[0,5,11]", "study.items=[12]", "task.pairs=12"]
    result = posbench(*call, "runtime.device=cpu", "stages=[study]")
    assert result.status == 0, result.err
    (run,) = run_folders(outputs)
    findings = pd.read_csv(run / "findings.csv")
    link = findings[findings["claim"].str.contains("follows the position bias")]
    assert link["verdict"].tolist() == ["not testable"]
    assert np.isnan(permutation_p(np.arange(4.0), np.ones(4)))
