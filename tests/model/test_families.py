"""The family table: who is in it, who is refused and why, and what it says of fused projections."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, MptConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import posbench
from posbench.model import families
from posbench.model.hooks import cache_of, find_cache, set_cache, with_cache
from tests.messages import refused
from tests.models import BUILDERS, attentions, build
from tests.rounding import assert_same, states_noise


def test_every_family_has_a_random_model_in_the_matrix():
    tested = {build(name).config.model_type for name in BUILDERS}
    assert tested == {t for family in families.FAMILIES for t in family.model_types}


def test_no_type_is_both_served_and_refused_and_all_exist():
    served = [t for family in families.FAMILIES for t in family.model_types]
    refused = [t for types in families.UNSUPPORTED.values() for t in types]
    assert len(set(served + refused)) == len(served + refused)
    assert set(served) <= set(CONFIG_MAPPING_NAMES)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("deepseek_v3", "MLA"),
        ("llama4", "Llama 4"),
        ("qwen3_next", "linear attention"),
        ("gemma3n", "keys"),
        ("t5", "causal"),
    ],
)
def test_architectures_outside_the_shape_are_refused_with_the_reason(kind, reason):
    with refused("model architecture", kind, allowed="llama", hint=reason) as caught:
        families.family_of_type(kind)
    assert "families.py" not in str(caught.value)


def test_an_unknown_architecture_is_sent_to_the_table():
    with refused(
        "model architecture", "gpt2", allowed="llama", hint="posbench/model/families.py"
    ):
        families.family_of_type("gpt2")


@pytest.mark.parametrize("name", BUILDERS)
def test_the_row_finds_every_attention_module(name):
    model = build(name)
    assert families.attention_modules(model) == attentions(model)


@pytest.mark.parametrize("name", BUILDERS)
def test_context_window(name):
    config = build(name).config
    assert families.context_window(config) == (
        512 if config.model_type in ("mpt", "falcon") else 4096
    )


def test_a_prompt_over_the_alibi_table_is_refused(tmp_path):
    """MPT builds its biases for max_seq_len positions and fails beyond."""
    from posbench.embedded.tokenizer import build_tokenizer

    build("mpt").save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    lm = posbench.load(tmp_path)
    assert lm.context_window == MptConfig.from_pretrained(tmp_path).max_seq_len == 512
    with refused("prompt length", 523, allowed="512", hint="task.truncation=middle"):
        lm.encode('"bal": "kop", ' * 130)


@pytest.mark.parametrize(
    "name", ["phi3", "gpt_neox", "mpt", "falcon", "falcon-7b", "falcon-alibi"]
)
def test_projected_keys_are_those_the_model_caches(name):
    """Unrotated in MPT and ALiBi Falcon; elsewhere position 0, where the rotation does nothing."""
    model = build(name)
    ids = torch.randint(1, 200, (2, 9))
    seen = {}
    module = families.attention_modules(model)[1]
    handle = module.register_forward_pre_hook(
        lambda m, a, k: seen.update(h=families.attention_input(a, k)), with_kwargs=True
    )
    with torch.no_grad():
        cached = model(ids, use_cache=True).past_key_values.layers[1].keys
        keys = families.keys_for_cache(
            model, 1, families.project_keys(model, 1, seen["h"]), None
        )
    handle.remove()
    repeated = keys.repeat_interleave(cached.shape[1] // keys.shape[1], dim=1)
    positions = slice(None) if name in ("mpt", "falcon-alibi") else slice(0, 1)
    assert_same(
        cached[:, :, positions], repeated[:, :, positions], states_noise(name), "keys"
    )


def test_rope_that_changes_with_the_length_is_announced(caplog):
    from posbench.methods import ScaleChannel

    model = build("llama")
    lm = posbench.load(model)
    method = ScaleChannel(channel=5, factor=0.0, layers=(1, 2))
    method.check(lm)
    assert not caplog.records
    model.config.rope_parameters = {
        "rope_type": "dynamic",
        "rope_theta": 1e4,
        "factor": 2.0,
    }
    method.check(lm)
    assert "dynamic" in caplog.text


def test_a_soft_cap_is_never_left_out(tmp_path):
    from posbench.embedded.tokenizer import build_tokenizer

    model = build("gemma2")
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    assert posbench.load(tmp_path).model.config._attn_implementation == "eager"
    with refused(
        "model.attention",
        "sdpa",
        allowed=("eager", "soft-cap"),
        hint="model.attention=auto",
    ):
        posbench.load(tmp_path, attention="sdpa")
    model.config._attn_implementation_internal = "sdpa"
    with refused(
        "model.attention",
        "sdpa",
        allowed=("eager", "soft-cap"),
        hint="model.attention=auto",
    ):
        posbench.load(model)


def test_the_vision_model_reads_its_text_config():
    model = build("gemma3-vision")
    assert families.text_config(model).model_type == "gemma3_text"
    assert isinstance(AutoConfig.for_model("gemma3"), type(model.config))
    assert (
        families.family_of(SimpleNamespace(config=model.config)).layers
        == "model.language_model.layers"
    )


@pytest.mark.parametrize("name", BUILDERS)
def test_each_attention_gets_its_cache_under_a_known_name(name):
    """transformers renamed it once; where a hook does not find it, a continued prompt would count as a new one."""
    model = build(name)
    ids = torch.arange(3, 11)[None]
    first = model(ids[:, :5], use_cache=True)
    cache = cache_of(first)
    found = []

    def look(module, args, kwargs):
        found.append(find_cache(kwargs))

    with ExitStack() as stack:
        for module in attentions(model):
            handle = module.register_forward_pre_hook(look, with_kwargs=True)
            stack.callback(handle.remove)
        last = model(ids[:, 5:], **with_cache(model.forward, cache))
    assert found and all(seen is cache for seen in found)
    assert cache.get_seq_length() == 8
    set_cache(last, None)
    assert cache_of(last) is None
