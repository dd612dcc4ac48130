"""scale_channel in one forward of the prompt against its two passes, and calls that bring a prompt in parts."""

from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

import posbench
from posbench.methods import ScaleChannel
from posbench.methods.layer_scaling import LayerScaling
from posbench.methods.ms_poe import MsPoE
from posbench.model.hooks import functions_in_front
from posbench.model.last_rows import LastRows
from tests.conftest import few
from tests.messages import refused
from tests.models import BUILDERS, LAYERS, VOCABULARY, build
from tests.rounding import assert_same, attention_noise, family_noise

PROMPT = 33
STEPS = 4
TWO_PASSES = {
    "qwen3", "qwen3-moe", "gemma3", "gemma3-vision", "olmo2",
    "mpt", "mpt-clip", "falcon", "falcon-7b", "falcon-alibi",
}  # fmt: skip
"""Models with norms or clamps behind the key projection, or with attention functions of their own."""
ONE_PASS = [name for name in BUILDERS if name not in TWO_PASSES]
METHOD = ScaleChannel(channel=(5, 41), factor=-1.0, layers=(0, 3))
SETTINGS = [
    METHOD,
    ScaleChannel(channel=5, factor=0.0, layers=(1, 2), tokens="last"),
    ScaleChannel(channel=30, factor=2.0, layers=(2, 3), tokens="earlier"),
    ScaleChannel(channel=(0, 17, 47), factor=-1.0, layers=(1, 2), last=16),
    ScaleChannel(channel=(0, 17), factor=0.3, layers=(1, 2), last=16),
    ScaleChannel(channel=5, factor=0.5, layers=(0, 3), last=16, tokens="last"),
    ScaleChannel(channel=5, factor=-1.0, layers=(0, 3), last=16, tokens="earlier"),
    ScaleChannel(channel=5, factor=-1.0, layers=(0, 3), last="all"),
]


def prompts(padded=True):
    """Token ids and mask of four prompts, padded on the left to :data:`PROMPT` tokens."""
    ids = torch.randint(
        1, VOCABULARY - 1, (4, PROMPT), generator=torch.Generator().manual_seed(1)
    )
    pads = torch.tensor([7, 0, PROMPT - 1, 1] if padded else [0] * 4)
    mask = (torch.arange(PROMPT) >= pads[:, None]).long()
    return ids * mask, mask


def generate(lm, ids, mask, **settings):
    """Stock greedy decoding: the tokens, and the logits of each step."""
    out = lm.model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=STEPS,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **settings,
    )
    return out.sequences, torch.stack(out.logits, dim=1)


def count_forwards(model):
    """Register a hook; the list that it returns has the tokens of every forward of the decoder."""
    lengths = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: lengths.append(args[0].shape[1])
    )
    return lengths


def test_which_models_run_a_prompt_in_one_forward():
    for name in BUILDERS:
        lm = posbench.load(build(name))
        lengths = count_forwards(lm.model)
        with torch.no_grad(), METHOD.applied(lm):
            lm.model(prompts(padded=False)[0])
        expected = [PROMPT - 1, 1] if name in TWO_PASSES else [PROMPT]
        assert lengths == expected, name


@pytest.mark.parametrize("name", few(ONE_PASS, 6))
@torch.no_grad()
def test_one_pass_gives_what_two_give(name, monkeypatch):
    lm = posbench.load(build(name))
    for number, method in enumerate(SETTINGS):
        ids, mask = prompts(padded=number % 2 == 0)
        outputs = []
        for in_one in (True, False):
            with monkeypatch.context() as patch:
                if not in_one:
                    patch.setattr(LastRows, "fits", lambda *_: False)
                with method.applied(lm):
                    prompt = lm.logits(ids, mask)[mask.bool()]
                    tokens, steps = generate(lm, ids, mask)
            outputs.append((prompt, tokens, steps))
        (prompt, tokens, steps), (prompt_of_two, tokens_of_two, steps_of_two) = outputs
        assert torch.equal(tokens, tokens_of_two)
        noise = family_noise(name, method=method)
        assert_same(prompt, prompt_of_two, noise, "logits")
        assert_same(steps, steps_of_two, noise, "logits")


@pytest.mark.parametrize("name", ["llama-gqa", "phi3-partial", "cohere2"])
@torch.no_grad()
def test_sixteen_bits_round_no_more_than_two_passes(name, monkeypatch):
    """Against float64: the keys that one pass changes in place are rounded about as often."""
    ids, mask = prompts()
    exact = posbench.load(build(name, dtype=torch.float64))
    with METHOD.applied(exact):
        expected = exact.logits(ids, mask)[:, -1]
    errors = []
    for in_one in (True, False):
        with monkeypatch.context() as patch:
            if not in_one:
                patch.setattr(LastRows, "fits", lambda *_: False)
            lm = posbench.load(build(name, dtype=torch.bfloat16))
            with METHOD.applied(lm):
                logits = lm.logits(ids, mask)[:, -1]
            errors.append((logits - expected).pow(2).mean().sqrt())
    one, two = errors
    assert one < 1.5 * two
    unmodified = exact.logits(ids, mask)[:, -1]
    assert one < 0.5 * (expected - unmodified).pow(2).mean().sqrt()


@torch.no_grad()
def test_rows_of_other_lengths_change_nothing():
    lm = posbench.load(build("mistral-window"))
    ids, mask = prompts()
    noise = family_noise("mistral-window", method=METHOD)
    with METHOD.applied(lm):
        together = lm.logits(ids, mask)[:, -1]
        for row, own_mask, logits in zip(ids, mask, together, strict=True):
            alone = lm.logits(row[own_mask.bool()][None])[0, -1]
            assert_same(alone, logits, noise, "logits")


@pytest.mark.parametrize("last", [1, 16])
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "qwen3", "mpt"])
@torch.no_grad()
def test_generate_on_a_filled_cache_reads_one_prompt(name, last):
    """A prompt in two calls, and a conversation: its end is what counts, not what ended an earlier call."""
    lm = posbench.load(build(name))
    ids, mask = prompts(padded=False)
    method = ScaleChannel(channel=(5, 41), factor=-1.0, layers=(0, 3), last=last)
    with method.applied(lm):
        whole, steps = generate(lm, ids, mask)
        for split in (20, PROMPT - 1):
            cache = DynamicCache(config=lm.model.config)
            lm.model(ids[:, :split], past_key_values=cache)
            in_two, steps_of_two = generate(lm, ids, mask, past_key_values=cache)
            assert torch.equal(in_two, whole)
            assert torch.equal(steps_of_two, steps)
        conversation = torch.cat([whole, ids], dim=1)
        long_mask = torch.ones_like(conversation)
        goes_on = generate(lm, conversation, long_mask, past_key_values=cache)
        alone = generate(lm, conversation, long_mask)
        for one, other in zip(goes_on, alone, strict=True):
            assert torch.equal(one, other)


def test_a_prompt_in_pieces_is_refused():
    lm = posbench.load(build("llama"))
    ids, mask = prompts(padded=False)
    for pieces in (16, PROMPT - 1):
        with (
            torch.no_grad(),
            METHOD.applied(lm),
            pytest.raises(ValueError, match="prefill_chunk_size"),
        ):
            generate(lm, ids, mask, prefill_chunk_size=pieces)
    everywhere = ScaleChannel(channel=5, factor=-1.0, layers=(0, 3), last="all")
    with torch.no_grad(), everywhere.applied(lm):
        in_pieces = generate(lm, ids, mask, prefill_chunk_size=16)[0]
        assert torch.equal(in_pieces, generate(lm, ids, mask)[0])


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3"])
@torch.no_grad()
def test_assisted_generation_replies_as_greedy_decoding_does(name):
    lm = posbench.load(build(name))
    ids = prompts(padded=False)[0][:1].repeat(1, 2)
    mask = torch.ones_like(ids)
    with METHOD.applied(lm):
        greedy, _ = generate(lm, ids, mask)
        # transformers 5.6 looks prompts up only where there is an end of a text, here one that no model writes.
        no_end = {"eos_token_id": 10**6}
        assisted, _ = generate(lm, ids, mask, prompt_lookup_num_tokens=4, **no_end)
    assert torch.equal(assisted, greedy)
    assert not torch.equal(greedy, generate(lm, ids, mask)[0])


@torch.no_grad()
def test_listeners_see_scaled_queries_and_keys_on_both_sides_of_the_block():
    lm = posbench.load(build("llama-gqa"))
    ids, mask = prompts()
    noise = attention_noise("llama-gqa")
    with METHOD.applied(lm), lm.last_attention() as inside:
        lm.logits(ids, mask)
    with lm.last_attention() as outside, METHOD.applied(lm):
        lm.logits(ids, mask)
    with lm.last_attention() as unmodified:
        lm.logits(ids, mask)
    for layer in range(LAYERS):
        assert_same(inside[layer], outside[layer], noise, "attention")
        assert (inside[layer] - unmodified[layer]).abs().max() > 0.01


@pytest.mark.parametrize(
    "other",
    [LayerScaling(scales=(1.5, 1.0, 2.0, 1.2)), MsPoE(ratios=(1.2, 1.8))],
    ids=["rotation", "by hand"],
)
@torch.no_grad()
def test_composed_methods_give_what_two_passes_give(other, monkeypatch):
    lm = posbench.load(build("llama-gqa"))
    ids, mask = prompts()
    noise = family_noise("llama-gqa", method=METHOD)
    outer_to_inner = [(other, METHOD), (METHOD, other)]
    for outer, inner in outer_to_inner:
        with outer.applied(lm), inner.applied(lm):
            tokens, steps = generate(lm, ids, mask)
            with monkeypatch.context() as patch:
                patch.setattr(LastRows, "fits", lambda *_: False)
                tokens_of_two, steps_of_two = generate(lm, ids, mask)
        assert torch.equal(tokens, tokens_of_two)
        assert_same(steps, steps_of_two, noise, "logits")


def test_gradients_pass_through_a_prompt():
    lm = posbench.load(build("llama"))
    ids, _ = prompts(padded=False)
    with METHOD.applied(lm):
        lm.model(ids, labels=ids).loss.backward()
    gradient = lm.model.get_input_embeddings().weight.grad
    assert bool(gradient.isfinite().all()) and float(gradient.abs().max()) > 0


def test_a_failure_in_the_middle_leaves_the_kernel_and_the_model():
    model = build("phi3")
    lm = posbench.load(model)
    ids, mask = prompts()
    with torch.no_grad():
        before = lm.logits(ids, mask)
        weights = {name: value.clone() for name, value in model.state_dict().items()}

        def fail(*_):
            raise KeyboardInterrupt

        # In the attention of a scaled layer, behind the function in front of the kernel.
        handle = model.model.layers[1].self_attn.o_proj.register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt), METHOD.applied(lm):
            lm.model(ids, attention_mask=mask)
        handle.remove()
        assert not functions_in_front(model)
        assert model.config._attn_implementation == "sdpa"
        assert "prepare_inputs_for_generation" not in vars(model)
        assert torch.equal(lm.logits(ids, mask), before)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in weights.items())


@pytest.mark.parametrize("own_forward", [False, True])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2", "qwen3", "olmo2"])
def test_keys_that_a_hook_changes_are_those_of_changed_weights(name, own_forward):
    ids, mask = prompts()
    hooked, changed = posbench.load(build(name)), posbench.load(build(name))
    for layer in hooked.model.model.layers:
        projection = layer.self_attn.k_proj
        if own_forward:
            projection.forward = lambda x, forward=projection.forward: 2 * forward(x)
        else:
            projection.register_forward_hook(lambda _, args, output: 2 * output)
    with torch.no_grad():
        for layer in changed.model.model.layers:
            for parameter in layer.self_attn.k_proj.parameters():
                parameter.mul_(2)
    # Doubled keys double what rounding does to scores.
    noise = 2 * family_noise(name)
    for method in SETTINGS:
        with method.applied(hooked):
            found = hooked.logits(ids, mask)
            tokens = generate(hooked, ids, mask)[0]
        with method.applied(changed):
            expected = changed.logits(ids, mask)
            assert torch.equal(tokens, generate(changed, ids, mask)[0])
        assert_same(found[mask.bool()], expected[mask.bool()], noise, "logits")


def test_a_hook_on_a_projection_of_queries_keys_and_values():
    ids, mask = prompts()
    lm = posbench.load(build("phi3"))
    before = lm.logits(ids, mask)
    (projection,) = {lm.model.model.layers[1].self_attn.qkv_proj}
    hook = projection.register_forward_hook(lambda _, args, output: 2 * output)
    with (
        refused("model", allowed="queries", hint="inside") as caught,
        METHOD.applied(lm),
    ):
        lm.logits(ids, mask)
    assert "qkv_proj in layer 1" in str(caught.value)
    hook.remove()
    assert torch.equal(lm.logits(ids, mask), before)


def test_one_block_of_the_method_at_a_time():
    ids, mask = prompts()
    lm = posbench.load(build("llama"))
    before = lm.logits(ids, mask)
    with METHOD.applied(lm):
        inside = lm.logits(ids, mask)
        with (
            refused("method", allowed="last=all", hint="channel="),
            SETTINGS[1].applied(lm),
        ):
            pass
        assert torch.equal(lm.logits(ids, mask), inside)
    assert torch.equal(lm.logits(ids, mask), before)


def test_blocks_that_scale_all_tokens_nest():
    ids, mask = prompts()
    lm = posbench.load(build("llama"))
    first, second = (replace(SETTINGS[-1], channel=channel) for channel in (5, 41))
    with replace(SETTINGS[-1], channel=(5, 41)).applied(lm):
        expected = lm.logits(ids, mask)
        tokens = generate(lm, ids, mask)[0]
    with first.applied(lm), second.applied(lm):
        found = lm.logits(ids, mask)
        assert torch.equal(generate(lm, ids, mask)[0], tokens)
    assert_same(
        found[mask.bool()], expected[mask.bool()], family_noise("llama"), "logits"
    )


def test_gradient_checkpointing_is_refused_in_words():
    lm = posbench.load(build("llama"))
    lm.model.gradient_checkpointing_enable()
    lm.model.train()
    ids, mask = prompts(padded=False)
    with METHOD.applied(lm), pytest.raises(ValueError, match="checkpointing_disable"):
        lm.model(input_ids=ids, attention_mask=mask)
