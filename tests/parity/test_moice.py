"""MoICE against a plain recomputation, base by base, and against outputs of the authors' program."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import posbench
from posbench.errors import UserError
from posbench.methods import ScaleChannel
from posbench.methods.moice import (
    BASES,
    MoICE,
    auxiliary_loss,
    load_routers,
    mixed_attention,
    mixture_weights,
)
from posbench.search.router import RouterSearch
from posbench.tasks import KVRetrieval
from tests.models import build
from tests.parity.plain import FAMILIES, attending_plainly, batch, prompt_then_steps
from tests.rounding import (
    EPSILON,
    assert_same,
    family_noise,
    largest_difference,
    noise_floor,
)

GOLDEN = Path(__file__).parent / "golden"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
CASES = MANIFEST["moice"]["llama-mha-moice"]["cases"]
ROUTER = GOLDEN / "moice_router.safetensors"
PADS = [0, 5, 11]
PROMPT = 30
STEPS = 6
APART = (10000.0, 20.0, 300.0)
"""Bases far enough apart to tell in prompts this short."""


def gate(layer, name):
    return f"model.layers.{layer}.self_attn.gate_{name}.weight"


def router_file(folder, lm, experts, std=1.0):
    """Random routers for every layer of a model, some of which may rotate nothing."""
    generator = torch.Generator().manual_seed(3)
    config = lm.model.config
    width = (
        getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    shapes = {1: (experts, width), 2: (experts, experts), 3: (experts, width)}
    tensors = {
        gate(i, n): torch.randn(shape, generator=generator) * std
        for i in range(lm.layers)
        for n, shape in shapes.items()
    }
    save_file(tensors, folder / "router.safetensors")
    return str(folder / "router.safetensors"), tensors


def plain_weights(layer, query, tensors, top_k):
    """Mixture weights [T, N] of one head, from the router's formula."""
    seen = layer.turn(query, base=APART[0])
    w1, w2, w3 = (tensors[gate(layer.number, n)] for n in (1, 2, 3))
    logits = (F.silu(seen @ w1.T) * (seen @ w3.T)) @ w2.T
    kept = torch.zeros_like(logits, dtype=torch.bool)
    for token, row in enumerate(logits.tolist()):
        kept[token, sorted(range(len(row)), key=lambda e: -row[e])[:top_k]] = True
    return logits.masked_fill(~kept, float("-inf")).softmax(-1)


def plainly(model, ids, pads, tensors, top_k):
    def attend(layer):
        out = torch.zeros_like(layer.query)
        for head, (query, key, value) in enumerate(
            zip(layer.query, layer.key, layer.value, strict=True)
        ):
            weights = plain_weights(layer, query, tensors, top_k)
            for number, base in enumerate(APART):
                attention = layer.weights(
                    layer.turn(query, base=base), layer.turn(key, base=base)
                )
                out[head] += weights[:, number, None] * (attention @ value)
        return out

    with attending_plainly(model, pads, attend), torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize(
    ("family", "top_k"),
    [*((family, 3) for family in FAMILIES), ("llama-gqa", 1), ("qwen2", 2)],
)
def test_prompt_and_steps_equal_a_plain_recomputation(tmp_path, family, top_k):
    lm = posbench.load(build(family))
    weights, tensors = router_file(tmp_path, lm, len(APART))
    ids, mask, positions = batch(PADS, PROMPT + STEPS)
    expected = plainly(lm.model, ids, PADS, tensors, top_k)
    method = MoICE(weights=weights, bases=APART, top_k=top_k)
    with method.applied(lm):
        found = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    noise = family_noise(family, method=method)
    assert_same(found[mask.bool()], expected[mask.bool()], noise, "logits")
    stock = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    assert (stock - expected)[mask.bool()].abs().max() > 1e-2


def test_a_batch_equals_its_rows_one_by_one(tmp_path):
    lm = posbench.load(build("llama-gqa"))
    weights, _ = router_file(tmp_path, lm, len(APART))
    ids, mask, positions = batch(PADS, PROMPT + STEPS)
    with MoICE(weights=weights, bases=APART, top_k=2).applied(lm):
        together = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
        for row, pad in enumerate(PADS):
            one = slice(row, row + 1), slice(pad, None)
            alone = prompt_then_steps(
                lm.model, ids[one], mask[one], positions[one], PROMPT - pad
            )
            assert_same(together[one], alone, family_noise("llama-gqa"), "logits")


def test_the_models_own_base_changes_nothing_whatever_the_router(tmp_path):
    lm = posbench.load(build("llama-gqa"))
    weights, _ = router_file(tmp_path, lm, len(BASES))
    ids, mask, positions = batch(PADS, PROMPT + STEPS)
    stock = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    with MoICE(weights=weights, top_k=3).neutral().applied(lm):
        found = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    noise = family_noise("llama-gqa")
    assert_same(found[mask.bool()], stock[mask.bool()], noise, "logits")
    # Equal numbers are another way to say it; uniform is the router with equal logits.
    zero, tensors = router_file(tmp_path, lm, len(BASES), std=0.0)
    assert not any(value.any() for value in tensors.values())
    with MoICE(weights=zero).applied(lm):
        even = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    with MoICE(weights="uniform").applied(lm):
        uniform = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    assert_same(uniform, even, noise, "logits")


@pytest.mark.parametrize("family", ["llama-gqa", "gemma"])
def test_together_with_a_scaled_channel(family):
    lm = posbench.load(build(family))
    ids, mask, positions = batch(PADS, PROMPT + STEPS)
    scale = ScaleChannel(channel=3, factor=-1.0, layers=(1, 3))
    with scale.applied(lm):
        scaled = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    with MoICE(weights="uniform").neutral().applied(lm), scale.applied(lm):
        both = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    assert_same(both[mask.bool()], scaled[mask.bool()], family_noise(family), "logits")


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "moice_llama-mha-moice.npz") as data:
        return posbench.load(
            AutoModelForCausalLM.from_pretrained(GOLDEN / "llama-mha")
        ), dict(data)


@pytest.mark.parametrize("kind", ["", "batch_"], ids=["one", "batch"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
@torch.no_grad()
def test_outputs_of_the_released_program(golden, case, kind):
    (lm, arrays), name = golden, case["id"]
    ids = torch.tensor(arrays["batch_ids" if kind else "prompt_ids"])
    method = MoICE(
        weights=str(ROUTER),
        bases=tuple(map(float, case["base_set"])),
        top_k=case["topk"],
    )
    with method.applied(lm):
        out = lm.model(ids)
        generated = lm.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    tokens = generated.sequences[:, ids.shape[1] :]
    steps = torch.stack(generated.logits, 1)
    noise = noise_floor(lm.model, ids)
    if kind:
        assert_same(
            out.logits[:, -1], arrays[f"{name}/batch_last_logits"], noise, "golden"
        )
    else:
        assert_same(out.logits[0], arrays[f"{name}/prefill_logits"], noise, "golden")
        tokens = tokens[0]
        steps = steps[0]
        if f"{name}/key_cache_unrotated" in arrays:
            keys = torch.stack(
                [
                    layer.keys[0, :, ::8].transpose(0, 1)
                    for layer in out.past_key_values.layers
                ]
            )
            assert_same(keys, arrays[f"{name}/key_cache_unrotated"], noise, "golden")
    np.testing.assert_array_equal(tokens, arrays[f"{name}/{kind}tokens"])
    assert_same(steps, arrays[f"{name}/{kind}step_logits"], noise, "golden")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
@torch.no_grad()
def test_router_and_auxiliary_loss_of_the_released_program(golden, case):
    lm, arrays = golden
    ids = torch.tensor(arrays["prompt_ids"])
    bases = tuple(map(float, case["base_set"]))

    def router_logits(lm):
        """What the routers of all layers say, [L, T, heads, bases]."""
        heard = {}
        routers = load_routers(lm, str(ROUTER), len(BASES))
        with mixed_attention(lm.model, routers, bases, case["topk"], heard.__setitem__):
            lm.model(ids)
        return torch.stack(
            [heard[layer][0].transpose(0, 1) for layer in range(lm.layers)]
        )

    logits = router_logits(lm)
    exact = router_logits(posbench.load(copy.deepcopy(lm.model).double()))
    expected = arrays[f"{case['id']}/router_logits"]
    noise = largest_difference(logits, exact)
    assert_same(logits, expected, noise, "golden")
    loss = auxiliary_loss(logits.flatten(0, 2), case["topk"])
    assert_same(loss, case["aux_loss"], noise, "golden")


def test_the_auxiliary_loss_says_nothing_where_all_experts_are_kept():
    logits = torch.randn(
        50, 7, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    constant = auxiliary_loss(logits, 7)
    constant.backward()
    assert_same(constant, 7.0, 7 * EPSILON, "losses")
    assert_same(logits.grad, torch.zeros_like(logits), EPSILON, "losses")
    logits.grad = None
    auxiliary_loss(logits, 3).backward()
    assert logits.grad.abs().max() > 1e-4


def test_the_router_of_the_embedded_model_helps_on_prompts_it_was_not_trained_on():
    lm = posbench.load("tiny")
    rows = []
    task = KVRetrieval(
        pairs=32, positions=(0, 15, 31), records="words", prompt="compact", limit=8
    )
    for example in task.examples("evaluation"):
        prompt, answer = lm.answer_ids(example.prompt, example.answers[0])
        rows.append(prompt + answer)
    routers = load_routers(lm, "posbench://tiny/moice.safetensors", len(BASES))
    losses = RouterSearch().held_out(lm, rows, routers, MoICE())
    trained, even, stock = (
        torch.tensor(losses[n]).mean()
        for n in ("trained router", "even mixture", "unmodified")
    )
    assert trained < stock < even


def test_mixture_keeps_the_largest():
    weights = mixture_weights(torch.tensor([[0.0, 1.0, 2.0]]).log1p(), 2)
    assert_same(weights, [[0.0, 0.4, 0.6]], EPSILON, "probabilities")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"weights": None}, "weights"),
        ({"weights": "missing.safetensors"}, "weights"),
        ({"top_k": 8}, "top_k"),
        ({"top_k": 0}, "top_k"),
        ({"weights": "uniform", "top_k": 3}, "top_k"),
        ({"bases": (1.0,), "top_k": 1}, "bases"),
        ({"bases": (10000.0, 20000.0), "top_k": 2}, "weights"),
    ],
)
def test_bad_parameters(golden, given, field):
    lm = golden[0]
    with (
        pytest.raises(UserError) as error,
        MoICE(**{"weights": str(ROUTER), **given}).applied(lm),
    ):
        pass
    assert error.value.field == f"method.{field}"
