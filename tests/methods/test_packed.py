"""Several methods in one batch against each of them alone, on whole prompts."""

import pytest
import torch

import posbench
from posbench.methods import ScaleChannel, Unmodified
from posbench.methods.layer_scaling import LayerScaling
from posbench.methods.packed import can_pack, continuation_of, packed, prompt_copies
from posbench.model.hooks import count_hooks, intercepting_attention
from posbench.model.store import PrefixStore
from tests.models import VOCABULARY, build
from tests.rounding import assert_same, family_noise

FAMILIES = (
    "llama",
    "llama-gqa",
    "mistral-window",
    "mixtral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3-partial",
    "gpt_neox",
    "olmo2",
    "smollm3",
    "cohere2",
)
METHODS = (
    ScaleChannel(channel=3, factor=-1.0, layers=(1, 2)),
    Unmodified(),
    ScaleChannel(channel=3, factor=2.0, layers=(0, 3)),
    ScaleChannel(channel=(17, 3), factor=0.0, layers=(1, 3)),
    ScaleChannel(channel=17, factor=-1.0, layers=(1, 2), tokens="last"),
    ScaleChannel(channel=17, factor=-1.0, layers=(1, 2), tokens="earlier"),
)
LENGTHS = (40, 33, 12)


def random_prompts():
    torch.manual_seed(0)
    return [torch.randint(1, VOCABULARY, (n,)).tolist() for n in LENGTHS]


def filled_prefix(lm, prompts):
    """The prefill of prompts up to their last token, with what METHODS record."""
    store = PrefixStore([p[:-1] for p in prompts], (3, 17), range(lm.layers))
    store.fill(lm, 8, None)
    return store.prefix(lm, range(len(prompts)))


def next_inputs(inputs, tokens):
    """Inputs of a forward over one further token of each row."""
    mask = inputs["attention_mask"]
    return {
        "input_ids": tokens,
        "attention_mask": torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1),
        "position_ids": inputs["position_ids"][:, -1:] + 1,
    }


@torch.inference_mode()
def logits_of_steps(lm, inputs, steps):
    """Logits [B, 1 + steps, V] of the last token of prompts and of given tokens [B, steps] behind them."""
    output = lm.model(**inputs, use_cache=True, logits_to_keep=1)
    logits = [output.logits]
    for tokens in steps.T[:, :, None]:
        inputs = next_inputs(inputs, tokens)
        cache = output.past_key_values
        output = lm.model(**inputs, past_key_values=cache, use_cache=True)
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("name", FAMILIES)
def test_methods_together_give_what_each_gives_alone(name):
    lm = posbench.load(build(name))
    hooks = count_hooks(lm.model)
    prompts = random_prompts()
    steps = torch.randint(1, VOCABULARY, (len(prompts), 20))
    prefix = filled_prefix(lm, prompts)
    with packed(lm, prefix, METHODS) as rows:
        inputs = lm.pad(prompts * len(METHODS), rows)
        together = logits_of_steps(lm, inputs, steps.repeat(len(METHODS), 1))
    assert count_hooks(lm.model) == hooks
    noise = family_noise(name)
    for method, logits in zip(METHODS, together.chunk(len(METHODS)), strict=True):
        with method.applied(lm):
            alone = logits_of_steps(lm, lm.pad(prompts), steps)
        assert_same(logits, alone, noise, "logits")
    assert (together[:3] - together[3:6]).abs().max() > 100 * noise


def test_a_fork_leaves_the_pack_as_it_is():
    lm = posbench.load(build("llama-gqa"))
    prompts = random_prompts()
    prefix = filled_prefix(lm, prompts)
    steps = torch.randint(1, VOCABULARY, (len(prompts), 3)).repeat(2, 1)
    with packed(lm, prefix, METHODS[:2]) as rows:
        first = logits_of_steps(lm, lm.pad(prompts * 2, rows), steps)
        other = logits_of_steps(lm, lm.pad(prompts * 2, rows), steps + 1)
        again = logits_of_steps(lm, lm.pad(prompts * 2, rows), steps)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_who_may_share_a_batch():
    assert all(continuation_of(method) is not None for method in METHODS)

    class Stronger(ScaleChannel):
        """It scales otherwise, and inherits what is said of its base class."""

        def scale(self, hidden):
            return super().scale(hidden) * 2

    assert continuation_of(Stronger(channel=3, factor=0.0, layers=(0, 1))) is None
    several = ScaleChannel(channel=3, factor=0.0, layers=(0, 1), last=4)
    assert continuation_of(several) is None
    assert continuation_of(LayerScaling(scales=(1.0, 2.0))) is None


def test_models_whose_attention_cannot_be_formed_are_left_out():
    assert not can_pack(build("mpt")) and not can_pack(build("falcon"))
    model = build("llama")
    assert can_pack(model)
    with intercepting_attention(
        model, lambda *args, following, **kw: following(*args, **kw)
    ):
        assert not can_pack(model), "a function in front would see a part of the keys"


def test_memory_of_prompts_is_counted_by_the_forms_of_their_keys():
    continuations = [method.continuation() for method in METHODS]
    # Channels 3, (17, 3) and 17; each of four methods where a norm stands behind the projection.
    assert prompt_copies(build("llama"), continuations) == 3
    assert prompt_copies(build("qwen3"), continuations) == 4
    assert prompt_copies(build("llama"), [Unmodified().continuation()] * 9) == 1
