"""scale_channel and the channel search against outputs of the authors' program
(tests/parity/golden/README.md)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import posbench
from posbench.methods import ScaleChannel
from posbench.search import statistics
from tests.rounding import assert_same, log_probabilities, noise_floor

GOLDEN = Path(__file__).parent / "golden"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
# skip_first and change_value are switches of the authors' program that the paper does not describe and
# posbench lacks.
CASES = [
    c
    for c in MANIFEST["scale_channel"]["llama-mha"]["cases"]
    if c["channels"] and not c["skip_first"] and not c["change_value"]
]


@pytest.fixture(scope="module")
def lm():
    return posbench.load(AutoModelForCausalLM.from_pretrained(GOLDEN / "llama-mha"))


@pytest.fixture(scope="module")
def noise(lm, arrays):
    """Of the model's logits on the golden prompt."""
    return noise_floor(lm.model, torch.tensor(arrays["prompt_ids"]))


@pytest.fixture(scope="module")
def arrays():
    with np.load(GOLDEN / "scale_channel_llama-mha.npz") as data:
        return dict(data)


def method_of(case):
    layers = case["layers"]
    return ScaleChannel(
        channel=tuple(case["channels"]),
        factor=case["factor"],
        layers=(layers[0], layers[-1]),
        last=case["last_recompute_tokens"],
    )


def of_kind(*kinds):
    chosen = [c for c in CASES if c["kind"] in kinds]
    assert chosen
    return pytest.mark.parametrize("case", chosen, ids=lambda c: c["id"])


@of_kind("prefill+greedy", "batch2+greedy", "leftpad2+greedy", "len1+greedy")
@torch.no_grad()
def test_prompt_and_greedy_decoding(lm, arrays, noise, case):
    name = case["id"]
    kind = case["kind"]
    ids = torch.tensor(arrays["batch_ids" if "2" in kind else "prompt_ids"])
    if kind == "len1+greedy":
        ids = ids[:, :1]
    mask = (
        torch.tensor(arrays["batch_mask"])
        if kind.startswith("leftpad")
        else torch.ones_like(ids)
    )
    tokens = arrays[f"{name}/tokens"]
    with method_of(case).applied(lm):
        out = lm.model(
            ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)
        )
        generated = lm.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens.shape[-1],
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    if f"{name}/prefill_logits" in arrays:
        assert_same(
            out.logits.squeeze(0), arrays[f"{name}/prefill_logits"], noise, "golden"
        )
    if f"{name}/last_logits" in arrays:
        assert_same(out.logits[:, -1], arrays[f"{name}/last_logits"], noise, "golden")
    if f"{name}/key_cache" in arrays:
        keys = torch.stack([layer.keys[0] for layer in out.past_key_values.layers])
        assert_same(keys, arrays[f"{name}/key_cache"], noise, "golden")
    np.testing.assert_array_equal(
        generated.sequences[:, ids.shape[1] :].squeeze(0).numpy(), tokens
    )
    steps = torch.stack(generated.logits, dim=1).squeeze(0)
    assert_same(steps, arrays[f"{name}/step_logits"], noise, "golden")


@of_kind("teacher_forced")
@torch.no_grad()
def test_teacher_forcing_in_one_call_and_on_the_cache(lm, arrays, noise, case):
    start = case["prompt_len"]
    rows = case["answer_len"] + 1
    ids = torch.tensor(arrays["prompt_ids"])[:, : start + case["answer_len"]]
    labels = ids.clone()
    labels[:, :start] = -100
    with method_of(case).applied(lm):
        once = lm.model(ids, labels=labels)
    one_row = ScaleChannel(
        channel=tuple(case["channels"]),
        factor=case["factor"],
        layers=method_of(case).layers,
    )
    with one_row.applied(lm):
        prompt = lm.model(ids[:, :start])
        answer = lm.model(ids[:, start:], past_key_values=prompt.past_key_values)
    expected = arrays[f"{case['id']}/logits"]
    assert_same(once.logits[0, -rows:], expected, noise, "golden")
    cached = torch.cat([prompt.logits[:, -1:], answer.logits], dim=1)[0]
    assert_same(cached, expected, noise, "golden")
    nats = noise_floor(lm.model, ids, log_probabilities)
    assert_same(once.loss.item(), arrays[f"{case['id']}/loss"].item(), nats, "golden")


def test_official_channel_filter():
    with np.load(GOLDEN / "channel_search.npz") as data:
        golden = {name.removeprefix("odd9/"): data[name] for name in data.files}
    found = statistics.official_filter(golden["hidden_f16"].astype(np.float32))
    codes = np.where(found.direction == 1, 1, np.where(found.direction == -1, 2, 0)).T
    np.testing.assert_array_equal(codes, golden["mono_code"])
    np.testing.assert_array_equal(found.monotone_layers, golden["mono_count"])
    used = golden["mono_count"] > 0
    np.testing.assert_allclose(
        found.smoothness[used],
        golden["smoothness_min"][used],
        rtol=MANIFEST["tolerance"]["smoothness_rtol"],
    )
    assert found.ranking == golden["ranking"].tolist()
    assert found.ranking[:10] == golden["top10"].tolist()
