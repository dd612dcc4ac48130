"""Methods of rotary embeddings against forwards that rotate by hand, and against transformers' own
scaling."""

import copy
import math
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import posbench
from posbench.methods import ScaleChannel
from posbench.methods.attention_buckets import AttentionBuckets
from posbench.methods.layer_scaling import LayerScaling
from posbench.methods.moice import MoICE
from posbench.methods.ms_poe import MsPoE
from posbench.methods.position_interpolation import PositionInterpolation
from posbench.methods.rope_base import RopeBase
from posbench.model.hooks import replace_attribute
from posbench.model.rope import reach
from posbench.search.gradient import answer_loss
from tests.messages import refused
from tests.models import LAYERS, LONGROPE, SHAPE, VOCABULARY, WIDTH, attentions, build
from tests.rounding import (
    EPSILON,
    SLACK,
    assert_same,
    attention_noise,
    family_noise,
    log_probabilities,
    logits_of,
    noise_floor,
)

PROMPT = 33
STEPS = 6
SCALES = (1.0, 1.3, 1.7, 2.4)
FAMILIES = [
    "llama",
    "llama-gqa",
    "llama-tied-llama3",
    "mistral-window",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3-partial",
    "gpt_neox",
    "falcon",
    "olmo2",
    "smollm3",
    "cohere2",
]
"""Grouped keys, rescaled and partial rotation, norms behind the projection, windows, fused projections,
layers without RoPE."""
LINEAR = [
    "llama",
    "llama-gqa",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gpt_neox",
    "olmo2",
]
BASES = (10000.0, 500.0, None, 40000.0)


def prompts(padded: bool, batch: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(1, VOCABULARY - 1, (batch, PROMPT))
    mask = torch.ones(batch, PROMPT, dtype=torch.long)
    for row, pads in enumerate([7, 0, 12] if padded else []):
        ids[row, :pads], mask[row, :pads] = 0, 0
    return ids, mask


@torch.no_grad()
def through_posbench(lm, method, ids, mask):
    """Logits of the prompt, of each greedy step, and all tokens, through stock calls inside the block."""
    with method.applied(lm):
        prefill = lm.logits(ids, mask)
        out = lm.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=STEPS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            use_cache=True,
        )
    return prefill, torch.stack(out.logits, dim=1), out.sequences


def frequencies(module) -> Tensor:
    """Angles per position, [r / 2], written out for plain RoPE; a rescaled rotation is read from the
    model."""
    config = module.config
    rope = config.rope_parameters
    if "rope_theta" not in rope:
        rope = rope[
            module.layer_type
            if hasattr(module, "layer_type")
            else config.layer_types[module.layer_idx]
        ]
    width = (
        getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    width = int(width * rope.get("partial_rotary_factor", 1.0))
    assert rope["rope_type"] == "default"
    return torch.tensor(
        [rope["rope_theta"] ** (-2 * i / width) for i in range(width // 2)]
    )


@torch.no_grad()
def rotated_by_hand(model, ids, mask, scales, own=None, gain=1.0) -> Tensor:
    """Logits [B, T, V] of one forward without cache in which each layer rotates at position / scale.

    Each attention is called with cos and sin that are computed here, position by position, and knows nothing
    of posbench. ``own`` are angles per position, [r / 2], of a rescaled rotation, and ``gain`` its factor.
    """
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    rotary = model.base_model.rotary_emb
    if own is None and "llama3" in str(getattr(rotary, "rope_type", "")):
        own = rotary.inv_freq

    def wrap(module, scale):
        forward = module.forward

        def call(*args, **kwargs):
            if kwargs.get("position_embeddings") is not None:
                plain = frequencies(module) if own is None else own
                angles = torch.stack(
                    [torch.outer(row.float() / scale, plain) for row in positions]
                )
                if "cohere2" in module.config.model_type:
                    angles = angles.repeat_interleave(2, dim=-1)
                else:
                    angles = torch.cat([angles, angles], dim=-1)
                kwargs["position_embeddings"] = (
                    gain * angles.cos(),
                    gain * angles.sin(),
                )
            return forward(*args, **kwargs)

        return replace_attribute(module, "forward", call)

    with ExitStack() as stack:
        for module, scale in zip(attentions(model), scales, strict=True):
            stack.enter_context(wrap(module, scale))
        return model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits


def by_length(kind: str) -> tuple[PreTrainedModel, Tensor, float]:
    """A model trained on 16 positions whose frequencies depend on the length; those for a prompt of PROMPT
    tokens, [r / 2], by the published formulas; and the factor of cos and sin."""
    if kind == "longrope":
        model = build("phi3-longrope")
        width = 2 * len(LONGROPE["long_factor"])
        exact = torch.arange(0, width, 2, dtype=torch.float64) / width
        own = 1 / (torch.tensor(LONGROPE["long_factor"]) * 1e4**exact)
        return model, own.float(), math.sqrt(1 + math.log(4096 / 16) / math.log(16))
    rope = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
    shape = SHAPE | dict(
        max_position_embeddings=16, num_key_value_heads=4, rope_parameters=rope
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.2)).eval()
    width = WIDTH // 4
    base = 1e4 * (2.0 * PROMPT / 16 - 1) ** (width / (width - 2))
    return (
        model,
        (base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)).float(),
        1.0,
    )


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@torch.no_grad()
def test_the_length_of_the_prompt_chooses_the_frequencies_not_the_scaled_positions(
    kind,
):
    model, own, gain = by_length(kind)
    lm, (ids, mask) = posbench.load(model), prompts(padded=False)
    noise = noise_floor(model, ids)
    for scales in ((2.5,) * LAYERS, (1.0, 1.3, 2.5, 4.0)):
        expected = rotated_by_hand(model, ids, mask, scales, own, gain)
        with LayerScaling(scales=scales).applied(lm):
            assert_same(lm.logits(ids, mask), expected, noise, "logits")
    same = rotated_by_hand(model, ids, mask, (2.5,) * LAYERS, own, gain)
    for method in (
        PositionInterpolation(scale=2.5),
        MsPoE(ratios=(2.5, 2.5), first_layer=0),
    ):
        with method.applied(lm):
            assert_same(lm.logits(ids, mask), same, noise, "logits")
    stock = rotated_by_hand(model, ids, mask, (1.0,) * LAYERS, own, gain)
    assert_same(lm.logits(ids, mask), stock, noise, "logits")
    scale = torch.full((LAYERS,), 2.5)
    pairs = [(ids[0, :30].tolist(), ids[0, 30:].tolist())]
    with PositionInterpolation(scale=2.5).applied(lm):
        inputs, targets = lm.pad_with_answers(pairs)
        logits = model(
            **inputs, use_cache=False, logits_to_keep=targets.shape[1]
        ).logits
    assert_same(
        answer_loss(lm, scale, pairs),
        lm.answer_nats(logits, targets).mean(),
        noise,
        "losses",
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left-padded"])
@pytest.mark.parametrize(
    "method",
    [LayerScaling(scales=SCALES), PositionInterpolation(scale=1.6)],
    ids=["layers", "uniform"],
)
def test_scaled_positions_equal_a_rotation_by_hand(name, padded, method):
    model = build(name)
    ids, mask = prompts(padded)
    prefill, steps, tokens = through_posbench(posbench.load(model), method, ids, mask)
    whole = torch.cat([mask, torch.ones(len(ids), STEPS, dtype=torch.long)], dim=1)
    scales = SCALES if isinstance(method, LayerScaling) else (1.6,) * LAYERS
    expected = rotated_by_hand(model, tokens, whole, scales)
    assert_same(
        prefill[mask.bool()],
        expected[:, :PROMPT][mask.bool()],
        family_noise(name),
        "logits",
    )
    assert_same(steps, expected[:, PROMPT - 1 : -1], family_noise(name), "logits")
    plain = rotated_by_hand(model, tokens, whole, (1.0,) * LAYERS)
    effect = (expected - plain)[whole.bool()].abs().max()
    assert effect > 100 * SLACK * family_noise(name), (
        "the scales have no effect to test"
    )


@pytest.mark.parametrize("name", LINEAR)
def test_scale_two_in_every_layer_is_the_librarys_linear_scaling(name):
    model = build(name)
    config = copy.deepcopy(model.config)
    config.rope_parameters = dict(
        config.rope_parameters, rope_type="linear", factor=2.0
    )
    stock = type(model)(config).eval()
    stock.load_state_dict(model.state_dict())
    ids, mask = prompts(True)
    expected = posbench.load(stock).logits(ids, mask)
    for method in (
        LayerScaling(scales=(2.0,) * LAYERS),
        PositionInterpolation(scale=2.0),
    ):
        lm = posbench.load(model)
        with method.applied(lm):
            found = lm.logits(ids, mask)
        assert_same(
            found[mask.bool()], expected[mask.bool()], family_noise(name), "logits"
        )
    assert (lm.logits(ids, mask) - expected)[mask.bool()].abs().max() > 1e-2


def with_base(model, base):
    """A stock model with another base in its config and the same weights."""
    if base is None:
        return model
    config = copy.deepcopy(model.config)
    config.rope_parameters = dict(config.rope_parameters, rope_theta=base)
    stock = type(model)(config).eval()
    stock.load_state_dict(model.state_dict())
    return stock


def mixed(parts: list[Tensor], mixture: str) -> Tensor:
    """The mixture, written out: parts are the N bases' logits [B, T, V]."""
    if mixture == "logits":
        most = [part.max(-1).values for part in parts]
        total = sum(m.exp() for m in most)
        return sum(
            m.exp().div(total)[..., None] * part
            for m, part in zip(most, parts, strict=True)
        )
    shares = [part.softmax(-1) for part in parts]
    total = sum(share.max(-1).values for share in shares)
    return sum(
        share.max(-1).values.div(total)[..., None] * share for share in shares
    ).log()


@pytest.mark.parametrize("mixture", ["logits", "probabilities"])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama-gqa",
        "mistral-window",
        "qwen3",
        "phi3-partial",
        "falcon",
        "cohere2",
    ],
)
def test_buckets_equal_stock_models_of_each_base(name, mixture):
    model = build(name)
    lm = posbench.load(model)
    # All bases at once, three and one, one by one: 99 tokens for each base.
    for padded, batch_tokens in ((False, None), (True, 300), (True, 1)):
        method = AttentionBuckets(
            bases=BASES, mixture=mixture, batch_tokens=batch_tokens
        )
        ids, mask = prompts(padded)
        prefill, steps, tokens = through_posbench(lm, method, ids, mask)
        whole = torch.cat([mask, torch.ones(len(ids), STEPS, dtype=torch.long)], dim=1)
        expected = mixed(
            [
                posbench.load(with_base(model, base)).logits(tokens, whole)
                for base in BASES
            ],
            mixture,
        )
        read = log_probabilities if mixture == "probabilities" else logits_of
        noise = family_noise(name, read)
        assert_same(
            prefill[mask.bool()], expected[:, :PROMPT][mask.bool()], noise, "logits"
        )
        assert_same(steps, expected[:, PROMPT - 1 : -1], noise, "logits")
        alone = posbench.load(with_base(model, BASES[0])).logits(tokens, whole)
        assert (expected.softmax(-1) - alone.softmax(-1))[
            whole.bool()
        ].abs().max() > 1e-3, "the bases have no effect to test"


@pytest.mark.parametrize(
    "name", ["llama", "llama-gqa", "mistral-window", "qwen3", "phi3-partial", "falcon"]
)
def test_another_base_equals_a_stock_model_of_that_base(name: str) -> None:
    model = build(name)
    lm = posbench.load(model)
    for padded in (False, True):
        ids, mask = prompts(padded)
        prefill, steps, tokens = through_posbench(lm, RopeBase(base=500.0), ids, mask)
        whole = torch.cat([mask, torch.ones(len(ids), STEPS, dtype=torch.long)], dim=1)
        expected = posbench.load(with_base(model, 500.0)).logits(tokens, whole)
        noise = family_noise(name)
        assert_same(
            prefill[mask.bool()], expected[:, :PROMPT][mask.bool()], noise, "logits"
        )
        assert_same(steps, expected[:, PROMPT - 1 : -1], noise, "logits")
        own = lm.logits(tokens, whole)
        effect = (expected - own)[whole.bool()].abs().max()
        assert effect > 100 * SLACK * noise, "the base has no effect to test"


@pytest.mark.parametrize("base", [100.0, 1000.0, 10000.0])
def test_a_base_reaches_as_far_as_the_trace_of_the_stock_rotation_is_positive(
    base: float,
) -> None:
    """For q of independent coordinates of variance 1, E[q R q] is the trace of R, and E[q R k] = 0 for another k."""
    rotary = with_base(build("llama"), base).model.rotary_emb
    cos, _ = rotary(torch.zeros(1), torch.arange(2000)[None])
    trace = cos[0].sum(-1)
    pairs = WIDTH // SHAPE["num_attention_heads"] // 2
    distance = reach(base, pairs, 1999)
    assert 0 < distance < 1999
    assert (trace[: distance + 1] >= 0).all() and trace[distance + 1] < 0
    assert reach(base, pairs, distance - 1) == distance - 1


def test_buckets_in_turn_hold_the_activations_of_one_and_the_cache_of_all():
    model = build("mistral-window")
    rows = []
    lm = posbench.load(model)
    embedding = model.get_input_embeddings()
    (ids, mask), forward = prompts(False), embedding.forward

    def counting(tokens):
        rows.append(len(tokens))
        return forward(tokens)

    with replace_attribute(embedding, "forward", counting):
        for batch_tokens, passes in ((None, [12]), (300, [9, 3]), (1, [3] * 4)):
            with AttentionBuckets(bases=BASES, batch_tokens=batch_tokens).applied(lm):
                given = DynamicCache(config=model.config)
                step = mask.new_ones(3, PROMPT + 1)
                out = model(ids, attention_mask=mask, past_key_values=given)
                assert rows == passes
                assert out.past_key_values is given
                assert {len(layer.keys) for layer in given.layers} == {12}
                last = model(
                    ids[:, :1], attention_mask=step, past_key_values=given
                ).logits
            assert rows.pop() == 12
            rows.clear()
            if batch_tokens is None:
                expected = out.logits
                after = last
            assert_same(out.logits, expected, family_noise("mistral-window"), "logits")
            assert_same(last, after, family_noise("mistral-window"), "logits")


@pytest.mark.parametrize("first", [True, False], ids=["inside", "outside"])
def test_buckets_stay_together_where_another_method_looks_into_the_layers(first):
    lm, (ids, mask), found = posbench.load(build("llama-gqa")), prompts(True), []
    channel = ScaleChannel(channel=5, factor=-1.0, layers=(1, 2))
    for batch_tokens in (None, 1):
        buckets = AttentionBuckets(bases=BASES, batch_tokens=batch_tokens)
        both = (buckets, channel) if first else (channel, buckets)
        with both[0].applied(lm), both[1].applied(lm):
            found.append(lm.logits(ids, mask))
    noise = family_noise("llama-gqa")
    assert_same(found[0][mask.bool()], found[1][mask.bool()], noise, "logits")
    with buckets.applied(lm):
        assert (found[0] - lm.logits(ids, mask))[
            mask.bool()
        ].abs().max() > 100 * SLACK * noise


def test_buckets_of_probabilities_sum_to_one():
    lm = posbench.load(build("llama"))
    with AttentionBuckets(bases=BASES, mixture="probabilities").applied(lm):
        logits = lm.logits(*prompts(True))
    assert_same(
        logits.exp().sum(-1), torch.ones(logits.shape[:2]), EPSILON, "probabilities"
    )


def test_buckets_in_losses_and_continuations():
    """Everything that runs on a prompt's cache gives what one forward over the whole text gives."""
    lm = posbench.load("tiny")
    method = AttentionBuckets(bases=BASES)
    prompt = 'Json data: {"bal": "kop", "dip": "gel"} The value of key "dip" is "'
    ids, answer = lm.answer_ids(prompt, "gel kop")
    with method.applied(lm):
        loss = lm.answer_loss([prompt, prompt[11:]], ["gel kop", "gel"])[0]
        found = lm.continuations([ids, ids[5:]], [[answer, answer[:1]], [answer]])[0][
            0
        ][0]
        out = lm.model(
            input_ids=torch.tensor([ids + answer]),
            labels=torch.tensor([[-100] * len(ids) + answer]),
        )
    assert len(answer) > 1
    noise = noise_floor(lm.model, torch.tensor([ids + answer]), log_probabilities)
    assert_same(loss, out.loss, noise, "losses")
    assert_same(found, -len(answer) * loss, len(answer) * noise, "losses")


def test_buckets_refuse_what_they_cannot_mix():
    lm = posbench.load(build("llama"))
    ids, mask = prompts(False)
    cache = lm.model(ids, use_cache=True).past_key_values
    with AttentionBuckets(bases=BASES).applied(lm):
        with pytest.raises(ValueError, match="run the prompt inside the block"):
            lm.model(ids[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match="without beams"):
            lm.model.generate(
                ids, attention_mask=mask, max_new_tokens=3, num_beams=2, do_sample=False
            )
        with pytest.raises(ValueError, match="output_hidden_states"):
            lm.model(ids, output_hidden_states=True)
    with refused("method.bases", (10000.0, 0.5), allowed="1", hint="method.bases=[2]"):
        AttentionBuckets(bases=(10000.0, 0.5)).check(lm)
    with refused(
        "method.batch_tokens",
        0,
        allowed=("1", "1000000000"),
        hint="method.batch_tokens=1",
    ):
        AttentionBuckets(batch_tokens=0).check(lm)


@pytest.mark.parametrize("batch_tokens", [None, 1])
def test_attention_under_buckets_is_that_of_all_bases(batch_tokens):
    model = build("llama")
    lm = posbench.load(model)
    method = AttentionBuckets(bases=BASES, batch_tokens=batch_tokens)
    ids, mask = prompts(True)
    with method.applied(lm), lm.last_attention() as found:
        lm.logits(ids, mask)
    for number, base in enumerate(BASES):
        alone = posbench.load(with_base(model, base))
        with alone.last_attention() as weights:
            alone.logits(ids, mask)
        for layer, rows in weights.items():
            assert_same(
                found[layer][number :: len(BASES)],
                rows,
                attention_noise("llama"),
                "attention",
            )


@pytest.mark.parametrize(
    "method",
    [
        LayerScaling(scales=SCALES),
        PositionInterpolation(scale=1.6),
        AttentionBuckets(bases=BASES),
        RopeBase(base=500.0),
    ],
)
def test_restored_after_an_exception(method):
    lm = posbench.load(build("llama-gqa"))
    ids, mask = prompts(True)
    before = lm.logits(ids, mask)
    with pytest.raises(RuntimeError, match="inside"), method.applied(lm):
        lm.logits(ids, mask)
        raise RuntimeError("inside")
    assert torch.equal(lm.logits(ids, mask), before)
    assert not [
        m
        for m in lm.model.modules()
        if "forward" in vars(m) or m._forward_pre_hooks or m._forward_hooks
    ]


@pytest.mark.parametrize("name", ["mpt", "falcon-alibi", "smollm3-nope"])
@pytest.mark.parametrize(
    "method",
    [
        LayerScaling(scales=SCALES),
        PositionInterpolation(scale=1.6),
        AttentionBuckets(bases=BASES),
        RopeBase(base=500.0),
    ],
)
def test_models_without_rope_are_refused_in_words(name, method):
    with (
        refused("method", allowed="RoPE", hint="method=scale_channel"),
        method.applied(posbench.load(build(name))),
    ):
        pass


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["olmo2", "llama"])
def test_moice_keeps_the_type_of_half_precision_weights(
    name: str, dtype: torch.dtype
) -> None:
    """OLMo 2 has tables in float32."""
    lm = posbench.load(build(name, dtype=dtype))
    ids = torch.tensor([[5, 6, 7, 8]])
    with MoICE(weights="uniform", bases=(None,) * 3, top_k=3).applied(lm):
        found = lm.logits(ids)
    torch.testing.assert_close(found, lm.logits(ids), atol=0.1, rtol=0.05)
