"""scale_channel on every family against two full attentions without cache, which know nothing of the family
table."""

import inspect
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import nn

import posbench
from posbench.methods import ScaleChannel
from posbench.model import families
from posbench.model.hooks import cache_name, replace_attribute
from tests.models import BUILDERS, VOCABULARY, attentions, build
from tests.rounding import EPSILON, SLACK, assert_same, attention_noise, family_noise

PROMPT = 33
STEPS = 12
EAGER = ("gemma2", "mpt", "mpt-clip")
LEFT_IN_SINGLE = 0.2
"""Share of a model's noise that is left in float64: transformers norms, rotates and softmaxes in float32."""
EFFECT = 0.005
"""Logits reach 9: what changes none of them by this much has no effect to test."""


def exact(name, padded):
    """The model in float64 and its noise; in float32 where eager attention turns float64 padding into NaN."""
    if padded and name in EAGER:
        return build(name), family_noise(name)
    return build(name, dtype=torch.float64), LEFT_IN_SINGLE * family_noise(name)


SETTINGS = [((5,), 0.0, (0, 3)), ((0, 17, 47), -1.0, (1, 2)), ((5, 41), 2.0, (1, 1))]


class Memory:
    """Stands in for a cache: remembers the keys and values of one call, or gives them back in another."""

    is_sliding = False

    def __init__(self, give=()):
        self.give = dict(give)
        self.kept = {}

    def update(self, key, value, layer, *_, **__):
        self.kept = {"key": key, "value": value}
        return self.give.get("key", key), self.give.get("value", value)

    def get_seq_length(self, *_):
        return 0


@torch.no_grad()
def double_forward(
    model,
    ids,
    mask,
    *,
    first_row,
    channels,
    factor,
    layers,
    scale_keys=True,
    scale_values=False,
):
    """Logits [B, T, V]: each chosen attention runs on its input and on the scaled input with the values of
    the first run."""

    def twice(forward):
        parameters = inspect.signature(forward).parameters
        place = cache_name(parameters)

        def call(*args, **kwargs):
            bound = inspect.signature(forward).bind(*args, **kwargs)
            arguments = {
                k: v for k, v in bound.arguments.items() if k != "kwargs"
            } | bound.arguments.get("kwargs", {})
            first = Memory()
            hidden = arguments["hidden_states"]
            base = forward(**arguments | {place: first})
            scaled = hidden.clone()
            scaled[..., list(channels)] *= factor
            kept = {} if scale_values else {"value": first.kept["value"]}
            if not scale_keys:
                kept["key"] = first.kept["key"]
            second = forward(
                **arguments | {place: Memory(kept), "hidden_states": scaled}
            )
            return (
                torch.cat([base[0][:, :first_row], second[0][:, first_row:]], dim=1),
                *base[1:],
            )

        return call

    with ExitStack() as stack:
        for module in attentions(model)[layers[0] : layers[1] + 1]:
            stack.enter_context(
                replace_attribute(module, "forward", twice(module.forward))
            )
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits


def prompts(padded, batch=4):
    torch.manual_seed(1)
    ids = torch.randint(1, VOCABULARY - 1, (batch, PROMPT))
    mask = torch.ones(batch, PROMPT, dtype=torch.long)
    for row, pads in enumerate([7, 0, PROMPT - 1, 1][:batch] if padded else []):
        ids[row, :pads], mask[row, :pads] = 0, 0
    return ids, mask


@torch.no_grad()
def through_posbench(model, method, ids, mask, steps=STEPS):
    """Logits of the prompt, of each greedy step, and all tokens, through stock Hugging Face calls."""
    lm = posbench.load(model)
    with method.applied(lm):
        prefill = lm.logits(ids, mask)
        out = lm.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=steps,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return prefill, torch.stack(out.logits, dim=1), out.sequences


def errors(model, method, *, padded, steps=STEPS, **wrong):
    """Largest difference to the two attentions in the prompt and in the generated tokens, and the size of the
    effect."""
    ids, mask = prompts(padded)
    prefill, generated, tokens = through_posbench(model, method, ids, mask, steps)
    whole = torch.cat([mask, torch.ones(len(ids), steps, dtype=torch.long)], dim=1)
    first_row = 0 if method.last == "all" else PROMPT - method.last
    setting = (
        dict(
            channels=method.channels,
            factor=method.factor,
            layers=method.layers,
            first_row=first_row,
        )
        | wrong
    )
    expected = double_forward(model, tokens, whole, **setting)
    plain = double_forward(
        model, tokens, whole, **setting | dict(first_row=tokens.shape[1])
    )
    seen = mask.bool()
    return (
        (prefill - expected[:, :PROMPT])[seen].abs().max().item(),
        (generated - expected[:, PROMPT - 1 : -1]).abs().max().item(),
        (expected - plain)[:, PROMPT - 1 :].abs().max().item(),
    )


def assert_rounding(prompt, generated, noise):
    """The errors of :func:`errors` are rounding alone."""
    assert_same(prompt, 0.0, noise, "logits")
    assert_same(generated, 0.0, noise, "logits")


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left-padded"])
@pytest.mark.parametrize("name", BUILDERS)
def test_prefill_and_cached_decoding_equal_two_attentions(name, padded):
    """Also over the window: those of the windowed models are shorter than the prompt."""
    model, noise = exact(name, padded)
    for channels, factor, layers in SETTINGS:
        prompt, generated, effect = errors(
            model,
            ScaleChannel(channel=channels, factor=factor, layers=layers),
            padded=padded,
        )
        assert_rounding(prompt, generated, noise)
        assert effect > EFFECT, "the setting has no effect to test"


@pytest.mark.parametrize("last", [16, "all"])
@pytest.mark.parametrize("name", BUILDERS)
def test_more_scaled_rows(name, last):
    for padded in (False, True):
        model, noise = exact(name, padded)
        method = ScaleChannel(channel=(5, 9), factor=-1.0, layers=(1, 2), last=last)
        prompt, generated, _ = errors(model, method, padded=padded, steps=4)
        assert_rounding(prompt, generated, noise)


@pytest.mark.parametrize("name", BUILDERS)
def test_single_precision(name):
    prompt, generated, _ = errors(
        build(name),
        ScaleChannel(channel=(5, 9), factor=-1.0, layers=(1, 2)),
        padded=True,
    )
    assert_rounding(prompt, generated, family_noise(name))


@pytest.mark.parametrize(
    "wrong",
    [dict(scale_keys=False), dict(scale_values=True), dict(layers=(0, 1))],
    ids=str,
)
@pytest.mark.parametrize("name", BUILDERS)
def test_wrong_interventions_are_told_apart(name, wrong):
    method = ScaleChannel(channel=(0, 5, 17, 41), factor=-1.0, layers=(1, 2))
    prompt, generated, _ = errors(
        exact(name, True)[0], method, padded=True, steps=2, **wrong
    )
    assert min(prompt, generated) > 20 * SLACK * family_noise(name)


MUTATIONS = [
    ("llama", dict(query="k_proj", key="v_proj")),
    ("llama-gqa", dict(key="v_proj")),
    ("qwen3", dict(key_norm=None)),
    ("qwen3", dict(norm_over="projection")),
    ("gemma3", dict(key_norm=None)),
    ("olmo2", dict(key_norm=None)),
    ("olmo2", dict(norm_over="head")),
    ("phi3", dict(fused="groups")),
    ("gpt_neox", dict(fused="blocks")),
    ("mpt", dict(fused="groups")),
    ("mpt-clip", dict(clip=None)),
    ("falcon", dict(fused="blocks")),
    ("smollm3", dict(rope_if=None)),
    ("cohere2", dict(rope_if=None)),
]


@pytest.mark.parametrize(("name", "mutation"), MUTATIONS, ids=str)
def test_a_wrong_family_row_does_not_go_unnoticed(name, mutation, monkeypatch):
    model, _ = exact(name, True)
    rows = tuple(
        replace(f, **mutation) if f is families.family_of(model) else f
        for f in families.FAMILIES
    )
    assert rows != families.FAMILIES
    monkeypatch.setattr(families, "FAMILIES", rows)
    method = ScaleChannel(channel=(0, 5, 17, 41), factor=-1.0, layers=(0, 3))
    try:
        prompt, generated, _ = errors(model, method, padded=True, steps=2)
    except RuntimeError:
        return  # the shapes do not fit
    assert min(prompt, generated) > 20 * SLACK * family_noise(name)


class Int8Linear(nn.Module):
    """A linear that rounds its input row by row as 8-bit kernels do: not linear, and without a weight to
    read."""

    def __init__(self, linear):
        super().__init__()
        self.inner = [linear]
        self.out_features = linear.out_features

    def forward(self, x):
        step = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return self.inner[0]((x / step).round() * step)


class Adapted(nn.Linear):
    """A linear with a low-rank update beside it, as adapters add it."""

    def forward(self, x):
        return super().forward(x) + (x @ self.down) @ self.up


def _adapted(linear):
    new = Adapted(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        dtype=linear.weight.dtype,
    )
    new.load_state_dict(linear.state_dict())
    new.down = torch.randn(linear.in_features, 2, dtype=linear.weight.dtype) * 0.3
    new.up = torch.randn(2, linear.out_features, dtype=linear.weight.dtype) * 0.3
    return new


@pytest.mark.parametrize("wrap", [Int8Linear, _adapted], ids=["8-bit", "adapter"])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "phi3", "gpt_neox"])
def test_projections_whose_weight_does_not_tell_all(name, wrap):
    model = build(name, dtype=torch.float64)
    for attention in attentions(model):
        for part, child in list(attention.named_children()):
            if part in ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value"):
                setattr(attention, part, wrap(child))
    prompt, generated, effect = errors(
        model, ScaleChannel(channel=(5, 9), factor=-1.0, layers=(1, 2)), padded=True
    )
    assert_rounding(prompt, generated, LEFT_IN_SINGLE * family_noise(name))
    assert effect > EFFECT


def test_falcon_with_alibi_shows_the_attention_that_it_computes():
    """Its eager attention adds the bias twice; the mask that its other kernels get holds it once."""
    model = build("falcon-alibi")
    lm, (ids, mask) = posbench.load(model), prompts(padded=True)
    with torch.no_grad():
        outside = lm.logits(ids, mask)
        with lm.last_attention() as rows:
            inside = lm.logits(ids, mask)
        assert torch.equal(lm.logits(ids, mask), outside)
    assert_same(inside, outside, family_noise("falcon-alibi"), "logits")
    for row in rows.values():
        assert_same(row.sum(-1), torch.ones(row.shape[:-1]), EPSILON, "attention")
        assert (row * (1 - mask[:, None])).abs().max() == 0


@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "falcon-alibi"])
def test_the_last_row_of_attention_equals_the_full_matrix(name):
    model = build(name)
    lm = posbench.load(model)
    ids, mask = prompts(padded=True)
    with torch.no_grad():
        kernel = model.config._attn_implementation
        outside = lm.logits(ids, mask)
        with lm.last_attention() as rows:
            inside = lm.logits(ids, mask)
        assert model.config._attn_implementation == kernel
        if families.family_of(model).interface:
            assert torch.equal(inside[mask.bool()], outside[mask.bool()])
        else:  # another kernel runs inside
            assert_same(
                inside[mask.bool()], outside[mask.bool()], family_noise(name), "logits"
            )
        if families.family_of(model).interface:
            model.set_attn_implementation("eager")
        else:
            model.config._attn_implementation = "eager"
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        full = model(
            ids,
            attention_mask=mask,
            position_ids=positions,
            output_attentions=True,
            use_cache=False,
        ).attentions
    assert sorted(rows) == list(range(lm.layers))
    for layer, row in rows.items():
        assert row.shape == full[layer][:, :, -1].shape
        assert_same(row, full[layer][:, :, -1], attention_noise(name), "attention")
        assert_same(row.sum(-1), torch.ones(row.shape[:-1]), EPSILON, "attention")
        assert (row * (1 - mask[:, None])).abs().max() == 0
