"""Calibrated attention against a float64 recomputation of its definition, and its own promises."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import posbench
from posbench.errors import UserError
from posbench.methods import calibrated_attention
from posbench.methods.calibrated_attention import CalibratedAttention, document_shares
from tests.messages import refused
from tests.models import build
from tests.parity.plain import batch, prompt_then_steps
from tests.rounding import assert_same, family_noise, noise_floor

GOLDEN = Path(__file__).parent / "golden"
CASES = [
    case
    for case in json.loads((GOLDEN / "documents" / "manifest.json").read_text())[
        "cases"
    ]["documents"]
    if case["id"].startswith("calibrated_")
]
PADS = [0, 5, 11]
PROMPT = 40
STEPS = 4
ITEMS = [[(3, 9), (9, 15), (17, 22)], [(4, 11), (12, 20)], [(2, 25)]]
MILD = CalibratedAttention(temperature=1e-3, dummy=5)


def prompts(lm):
    ids, mask, positions = batch(PADS, PROMPT + STEPS)
    for row, pad, items in zip(ids, PADS, ITEMS, strict=True):
        lm.items.add(row[pad:PROMPT].tolist(), items)
    return ids, mask, positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
def test_the_reference_of_the_definition(case, dtype, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "llama-mha").to(dtype)
    lm = posbench.load(model)
    with np.load(GOLDEN / "documents" / "documents_llama-mha.npz") as data:
        prefix = f"{case['id']}/"
        wanted = {k.removeprefix(prefix): data[k] for k in data if prefix in k}
    ids = torch.tensor(wanted["prompt_ids"])
    lm.items.add(ids[0].tolist(), list(map(tuple, wanted["document_spans"].tolist())))
    measured = []

    def listen(attention, dummy_attention, temperature):
        shares = document_shares(attention, dummy_attention, temperature)
        measured.append((attention, dummy_attention, shares))
        return shares

    def dummies():
        while True:
            for row in wanted["dummy_ids"].tolist():
                yield [token for token in row if token >= 0]

    given = dummies()
    monkeypatch.setattr(calibrated_attention, "document_shares", listen)
    monkeypatch.setattr(
        CalibratedAttention, "dummy_tokens", lambda self, lm, length: next(given)
    )
    method = CalibratedAttention(
        temperature=case["temperature"],
        last_layers=1 - case["first_layer"] / lm.layers,
        dummy=0,
    )
    monkeypatch.setattr(CalibratedAttention, "check", lambda self, lm: None)
    with method.applied(lm):
        generated = lm.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=len(wanted["tokens"]),
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    ((attention, dummy_attention, shares),) = measured
    for found, name in (
        (attention, "attention"),
        (dummy_attention, "dummy_attention"),
    ):
        np.testing.assert_allclose(found, wanted[name], atol=1e-6, rtol=0)
    # In float32 shares, and so logits, move by the rounding of attention divided by the temperature.
    exact = dtype == torch.float64
    amplified = 1e-4 if exact else 1e-7 / case["temperature"]
    np.testing.assert_allclose(shares, wanted["alpha"], atol=amplified, rtol=0)
    np.testing.assert_array_equal(
        generated.sequences[0, ids.shape[1] :], wanted["tokens"]
    )
    steps = torch.stack(generated.logits, 1)[0]
    bound = 1e-4 if exact else max(1e-4, amplified)
    np.testing.assert_allclose(steps, wanted["step_logits"], atol=bound, rtol=0)


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3", "smollm3-nope"])
def test_a_batch_equals_its_rows_one_by_one(family):
    lm = posbench.load(build(family))
    ids, mask, positions = prompts(lm)
    noise = family_noise(family)
    with MILD.applied(lm):
        together = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
        for row, pad in enumerate(PADS):
            one = slice(row, row + 1), slice(pad, None)
            alone = prompt_then_steps(
                lm.model, ids[one], mask[one], positions[one], PROMPT - pad
            )
            assert_same(together[one], alone, 10 * noise, "logits")


def test_earlier_tokens_and_a_single_document_stay():
    lm = posbench.load(build("llama-gqa"))
    ids, mask, positions = prompts(lm)
    stock = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    with MILD.applied(lm):
        found = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    noise = family_noise("llama-gqa")
    earlier = mask.bool()
    earlier[:, PROMPT - 1 :] = False
    assert_same(found[earlier], stock[earlier], noise, "logits")
    last = slice(PROMPT - 1, None)
    assert_same(found[2, last], stock[2, last], noise, "logits")
    for row in (0, 1):
        moved = (found[row, last] - stock[row, last]).abs().amax(-1)
        assert (moved > 1e-2).all()


def test_weights_keep_their_sum_and_those_of_others():
    """And shares in proportion to what documents had change nothing."""
    lm = posbench.load(build("llama-gqa"))
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(1, 2, 3, 20, generator=generator).softmax(-1)
    documents = [(2, 5), (5, 6), (9, 15)]
    calibration = calibrated_attention._Calibration(lm, MILD, None, 0)
    calibration.documents = [documents]
    shares = torch.tensor([0.2, 0.7, 0.1], dtype=torch.float64)
    calibration.shares = [shares]
    changed = calibration._changed(weights)
    torch.testing.assert_close(changed.sum(-1), weights.sum(-1))
    outside = [j for j in range(20) if not any(a <= j < b for a, b in documents)]
    assert torch.equal(changed[..., outside], weights[..., outside])
    means = torch.stack([changed[..., a:b].mean(-1) for a, b in documents], -1)
    expected = shares.float().expand_as(means)
    torch.testing.assert_close(means / means.sum(-1, keepdim=True), expected)
    # Within a document all weights grow alike.
    factor = changed[..., 9:15] / weights[..., 9:15]
    torch.testing.assert_close(factor, factor[..., :1].expand_as(factor))
    one_row = weights[:, :1, :1]
    had = torch.stack([one_row[0, 0, 0, a:b].mean() for a, b in documents])
    calibration.shares = [(had / had.sum()).double()]
    torch.testing.assert_close(calibration._changed(one_row), one_row)


def test_shares():
    attention = torch.tensor([0.3, 0.2, 0.5])
    bias = torch.tensor([0.1, 0.0, 0.4])
    found = document_shares(attention, bias, 0.1)
    expected = torch.tensor([2.0, 2.0, 1.0]).softmax(0)
    torch.testing.assert_close(found, expected)


def test_dummies():
    lm = posbench.load("tiny")
    words = lm.tokenizer("bal kop", add_special_tokens=False)["input_ids"]
    dummy = CalibratedAttention(dummy="bal kop").dummy_tokens(lm, len(words) + 1)
    assert dummy == [*words, words[0]]
    assert CalibratedAttention(dummy=7).dummy_tokens(lm, 3) == [7, 7, 7]
    for wrong in ("", 10**6, -1):
        with refused("method.dummy", wrong, hint="method.dummy=a"):
            CalibratedAttention(dummy=wrong).check(lm)


def test_a_prompt_read_outside_is_refused():
    lm = posbench.load(build("llama"))
    ids, *_ = prompts(lm)
    with torch.no_grad():
        cache = lm.model(ids[:, :PROMPT]).past_key_values
        with MILD.applied(lm), pytest.raises(ValueError, match="outside the block"):
            lm.model(ids[:, PROMPT:], past_key_values=cache)


@pytest.mark.parametrize("family", ["mpt", "mistral-window"])
def test_what_cannot_work_is_refused(family):
    lm = posbench.load(build(family))
    with pytest.raises(UserError) as error:
        MILD.check(lm)
    assert error.value.field == "method" and "\n" not in str(error.value)


def test_noise_of_the_reference_is_known():
    """The tolerance of 1e-4 on logits is above the rounding of the tiny model."""
    lm = posbench.load(AutoModelForCausalLM.from_pretrained(GOLDEN / "llama-mha"))
    ids = torch.randint(1, 128, (1, 100), generator=torch.Generator().manual_seed(0))
    assert 0 < noise_floor(lm.model, ids) < 1e-4
