"""scale_channel against a plain recomputation: both attentions in full for the whole sequence, no cache, no
rank-1 term."""

import pytest
import torch
from torch import Tensor

import posbench
from posbench.methods import ScaleChannel
from tests.models import CLOSED_FORM, LAYERS, VOCABULARY, WIDTH, build
from tests.rounding import SLACK, assert_same, family_noise, log_probabilities

PROMPT = 33
STEPS = 12


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoPE from its definition: coordinate i and i + d/2 turn by position * theta^(-2i/d)."""
    half = x.shape[-1] // 2
    angle = positions[:, None, :, None].double() * theta ** (
        -torch.arange(half).double() / half
    )
    a = x[..., :half].double()
    b = x[..., half:].double()
    return torch.cat(
        [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1
    ).to(x.dtype)


@torch.no_grad()
def recompute(
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
    own=True,
):
    """Logits [B, T, V] where rows from ``first_row`` on attend with scaled queries to scaled keys of all
    positions; ``scale_keys`` is about keys of earlier rows, ``own`` about queries and keys of these rows."""
    config = model.config
    total = ids.shape[1]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    heads = config.num_attention_heads
    groups = config.num_key_value_heads
    theta = config.rope_parameters["rope_theta"]
    window = (
        getattr(config, "sliding_window", None)
        if config.model_type == "mistral"
        else None
    )
    rows = torch.arange(total)[:, None]
    columns = torch.arange(total)[None]
    allowed = columns <= rows
    if window:
        allowed &= columns > rows - window
    allowed = allowed[None, None] & mask[:, None, None].bool()
    x = model.model.embed_tokens(ids)
    for index, layer in enumerate(model.model.layers):
        h = layer.input_layernorm(x)
        attention = layer.self_attn
        scaled = h.clone()
        scaled[..., list(channels)] *= factor

        def attend(source, keys, values, attention=attention):
            q, k, v = (
                proj(t).unflatten(-1, (n, -1)).transpose(1, 2)
                for proj, t, n in (
                    (attention.q_proj, source, heads),
                    (attention.k_proj, keys, groups),
                    (attention.v_proj, values, groups),
                )
            )
            q = rotated(q, positions, theta)
            k = rotated(k, positions, theta)
            k = k.repeat_interleave(heads // groups, 1)
            v = v.repeat_interleave(heads // groups, 1)
            scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            weights = scores.masked_fill(
                ~allowed, torch.finfo(scores.dtype).min
            ).softmax(-1)
            return (weights @ v).transpose(1, 2).flatten(2)

        z = attend(h, h, h)
        if layers[0] <= index <= layers[1]:
            parts = [scaled[:, :first_row] if scale_keys else h[:, :first_row]]
            parts.append(scaled[:, first_row:] if own else h[:, first_row:])
            keys = torch.cat(parts, dim=1)
            source = scaled if own else h
            changed = attend(source, keys, scaled if scale_values else h)
            z = torch.cat([z[:, :first_row], changed[:, first_row:]], dim=1)
        x = x + attention.o_proj(z)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x))


def prompts(padded: bool, batch: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (batch, PROMPT))
    mask = torch.ones(batch, PROMPT, dtype=torch.long)
    for row, pads in enumerate([7, 0, PROMPT - 1, 1][:batch] if padded else []):
        ids[row, :pads], mask[row, :pads] = 0, 0
    return ids, mask


def run_posbench(model, method, ids, mask):
    """Logits of the whole prompt and of 12 greedy steps through stock Hugging Face calls, and the tokens."""
    lm = posbench.load(model)
    with torch.no_grad(), method.applied(lm):
        prefill = lm.model(
            ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)
        ).logits
        out = lm.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=STEPS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return prefill, torch.stack(out.logits, dim=1), out.sequences


SETTINGS = [
    ((5,), 0.0, (0, 3)),
    ((0, 17, WIDTH - 1), -1.0, (1, 2)),
    ((30,), 0.5, (2, 3)),
    ((5, 41), 2.0, (1, 1)),
]


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left-padded"])
@pytest.mark.parametrize("last", [1, 16, "all"])
@pytest.mark.parametrize("name", CLOSED_FORM)
def test_prefill_and_cached_decoding_equal_the_recomputation(name, last, padded):
    model = build(name)
    ids, mask = prompts(padded)
    seen = mask.bool()
    first_row = 0 if last == "all" else PROMPT - last
    for channels, factor, layers in SETTINGS:
        method = ScaleChannel(channel=channels, factor=factor, layers=layers, last=last)
        prefill, steps, sequences = run_posbench(model, method, ids, mask)
        long_mask = torch.cat(
            [mask, torch.ones(len(ids), STEPS, dtype=torch.long)], dim=1
        )
        settings = dict(channels=channels, factor=factor, layers=layers)
        oracle = recompute(model, sequences, long_mask, first_row=first_row, **settings)
        noise = family_noise(name, method=method)
        assert_same(prefill[seen], oracle[:, :PROMPT][seen], noise, "logits")
        assert_same(steps, oracle[:, PROMPT - 1 : -1], noise, "logits")
        untouched = recompute(
            model, sequences, long_mask, first_row=sequences.shape[1], **settings
        )
        assert (oracle - untouched)[:, PROMPT - 1 :].abs().max() > 0.01, (
            "the setting has no effect to test"
        )


@pytest.mark.parametrize("tokens", ["last", "earlier"])
def test_half_of_the_method_equals_its_recomputation(tokens):
    model = build("llama-gqa")
    ids, mask = prompts(padded=True)
    settings = dict(channels=(5,), factor=-1.0, layers=(1, 2))
    method = ScaleChannel(channel=5, factor=-1.0, layers=(1, 2), tokens=tokens)
    _, steps, sequences = run_posbench(model, method, ids, mask)
    long_mask = torch.cat([mask, torch.ones(len(ids), STEPS, dtype=torch.long)], dim=1)
    half = dict(scale_keys=tokens == "earlier", own=tokens == "last")
    oracle = recompute(
        model, sequences, long_mask, first_row=PROMPT - 1, **settings, **half
    )
    noise = family_noise("llama-gqa")
    assert_same(steps, oracle[:, PROMPT - 1 : -1], noise, "logits")
    both = recompute(model, sequences, long_mask, first_row=PROMPT - 1, **settings)
    assert (both - oracle)[:, PROMPT - 1].abs().max() > 100 * SLACK * noise


@pytest.mark.parametrize(
    "wrong",
    [
        dict(scale_keys=False),
        dict(own=False),
        dict(scale_values=True),
        dict(layers=(0, 1)),
    ],
    ids=str,
)
def test_the_recomputation_tells_wrong_interventions_apart(wrong):
    model = build("llama-gqa")
    ids, mask = prompts(padded=True)
    method = ScaleChannel(channel=5, factor=-1.0, layers=(1, 2))
    prefill, _, _ = run_posbench(model, method, ids, mask)
    settings = (
        dict(channels=(5,), factor=-1.0, layers=(1, 2), first_row=PROMPT - 1) | wrong
    )
    away = (prefill - recompute(model, ids, mask, **settings))[:, -1].abs().max()
    assert away > 100 * SLACK * family_noise("llama-gqa")


@pytest.mark.parametrize("name", CLOSED_FORM)
def test_double_precision_agrees_to_rounding(name):
    model = build(name, dtype=torch.float64)
    ids, mask = prompts(padded=True)
    method = ScaleChannel(channel=(3, 9), factor=-0.7, layers=(1, 3))
    prefill, _, _ = run_posbench(model, method, ids, mask)
    # Transformers computes cos and sin in float32 whatever the model's dtype; the rank-1 term uses the same
    # table.
    oracle = recompute(
        model,
        ids,
        mask,
        channels=(3, 9),
        factor=-0.7,
        layers=(1, 3),
        first_row=PROMPT - 1,
    )
    assert_same(prefill[mask.bool()], oracle[mask.bool()], family_noise(name), "logits")


@pytest.mark.parametrize("name", CLOSED_FORM)
@pytest.mark.parametrize("last", [1, 16, "all"])
def test_factor_one_is_the_identity(name, last):
    model = build(name)
    lm = posbench.load(model)
    ids, mask = prompts(padded=False)
    method = ScaleChannel(channel=5, factor=1.0, layers=(0, 3), last=last)
    assert method.neutral() == method
    with torch.no_grad():
        before = lm.model(ids, attention_mask=mask).logits
        with method.applied(lm):
            inside = lm.model(ids, attention_mask=mask).logits
    first_row = PROMPT - last if last != "all" else PROMPT
    assert torch.equal(inside[:, :first_row], before[:, :first_row])
    assert_same(inside, before, family_noise(name), "logits")


def test_restored_to_the_bit_after_the_block_and_after_an_exception():
    model = build("qwen2")
    lm = posbench.load(model)
    ids, mask = prompts(padded=True)
    attributes = set(vars(model))

    def logits():
        with torch.no_grad():
            return lm.model(ids, attention_mask=mask).logits

    before = logits()
    method = ScaleChannel(channel=5, factor=0.0, layers=(0, 3))
    with method.applied(lm):
        assert not torch.equal(logits(), before)
    assert torch.equal(logits(), before)

    class Boom(Exception):
        pass

    def explode(*_):
        raise Boom

    with pytest.raises(Boom), method.applied(lm):
        raise Boom
    # Also in the middle of a forward, while the inner hooks are registered.
    handle = model.model.layers[2].mlp.register_forward_pre_hook(explode)
    with pytest.raises(Boom), method.applied(lm):
        logits()
    handle.remove()
    assert torch.equal(logits(), before)
    assert set(vars(model)) == attributes
    assert all(
        not m._forward_pre_hooks and not m._forward_hooks for m in model.modules()
    )


def test_logits_to_keep_and_hidden_states_match_the_full_output():
    lm = posbench.load(build("llama"))
    ids, mask = prompts(padded=False)
    with (
        torch.no_grad(),
        ScaleChannel(channel=5, factor=0.0, layers=(1, 2), last=4).applied(lm),
    ):
        full = lm.model(ids, attention_mask=mask, output_hidden_states=True)
        for keep in (1, 3, 4, 9):
            assert torch.equal(
                lm.model(ids, attention_mask=mask, logits_to_keep=keep).logits,
                full.logits[:, -keep:],
            )
        picked = torch.tensor([0, PROMPT - 1])
        assert torch.equal(
            lm.model(ids, attention_mask=mask, logits_to_keep=picked).logits,
            full.logits[:, picked],
        )
        from_embeddings = lm.model(
            inputs_embeds=lm.model.get_input_embeddings()(ids), attention_mask=mask
        ).logits
        as_tuple = lm.model(
            ids, attention_mask=mask, return_dict=False, use_cache=False
        )
    assert len(full.hidden_states) == LAYERS + 1
    assert all(state.shape == (4, PROMPT, WIDTH) for state in full.hidden_states)
    assert torch.equal(from_embeddings, full.logits)
    assert torch.equal(as_tuple[0], full.logits)


def test_a_cache_from_outside_the_block_is_refused():
    lm = posbench.load(build("llama"))
    ids, _ = prompts(padded=False)
    with torch.no_grad():
        cache = lm.model(ids).past_key_values
        with (
            ScaleChannel(channel=5, factor=0.0, layers=(1, 2)).applied(lm),
            pytest.raises(ValueError, match="outside"),
        ):
            lm.model(ids[:, :1], past_key_values=cache)


def test_teacher_forced_loss_equals_cached_decoding():
    lm = posbench.load(build("qwen2"))
    ids, mask = prompts(padded=True)
    answers = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3], [8]]
    method = ScaleChannel(channel=(2, 11), factor=-1.0, layers=(1, 3))
    rows = [row[m.bool()].tolist() for row, m in zip(ids, mask, strict=True)]
    lm.answer_ids = lambda prompt, answer: (rows[int(prompt)], answers[int(answer)])
    numbers = [str(i) for i in range(len(rows))]
    with torch.no_grad(), method.applied(lm):
        together = lm.answer_loss(numbers, numbers, batch_size=4)
        for row, answer, loss in zip(rows, answers, together, strict=True):
            out = lm.model(torch.tensor([row]))
            nats = []
            for token in answer:
                nats.append(-out.logits[0, -1].log_softmax(-1)[token])
                out = lm.model(
                    torch.tensor([[token]]), past_key_values=out.past_key_values
                )
            noise = family_noise("qwen2", log_probabilities)
            assert_same(loss, torch.stack(nats).mean().item(), noise, "losses")
