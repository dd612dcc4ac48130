"""The constants in conf/model against the paper's table, and checkpoints trained without position
embeddings."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from posbench import paths
from posbench.errors import choices
from posbench.methods import ScaleChannel
from posbench.model import families
from posbench.model.load import load, model_config, with_blocks
from tests.messages import refused
from tests.models import BUILDERS, LAYERS, SHAPE, VOCABULARY, build
from tests.parity.test_families import errors
from tests.rounding import assert_same, family_noise, noise_floor

TABLE4 = pd.read_csv(
    paths.EXPERIMENTS / "yu2025/reference/yu2025_table4_parameters.csv", dtype=str
)
FILES = {
    "LLaMA-2-7b-chat": ("llama2_7b", "meta-llama/Llama-2-7b-chat-hf"),
    "LLaMA-2-13b-chat": ("llama2_13b", "meta-llama/Llama-2-13b-chat-hf"),
    "Vicuna-7b-v1.5-16k": ("vicuna_7b_16k", "lmsys/vicuna-7b-v1.5-16k"),
    "Vicuna-13b-v1.5-16k": ("vicuna_13b_16k", "lmsys/vicuna-13b-v1.5-16k"),
    "Mistral-7B-Instruct-v0.2": ("mistral7b", "mistralai/Mistral-7B-Instruct-v0.2"),
    "Gemma-1.1-7b-it": ("gemma_7b", "google/gemma-1.1-7b-it"),
    "Qwen1.5-7b-chat": ("qwen1_5_7b", "Qwen/Qwen1.5-7B-Chat"),
    "MPT-30b-chat": ("mpt_30b", "mosaicml/mpt-30b-chat"),
}


def test_the_table_has_these_models() -> None:
    assert set(TABLE4["model"]) == set(FILES) and len(TABLE4) == 3 * len(FILES)


@pytest.mark.parametrize("printed", FILES)
def test_published_constants_are_those_of_table_4(printed: str) -> None:
    name, path = FILES[printed]
    row = TABLE4[TABLE4["model"] == printed].set_index("metric")["value"]
    config = model_config(name)
    block = config.blocks["scale_channel"]
    assert config.path == path and block["channel"] == int(
        row["channel_index"].replace(",", "")
    )
    assert block["factor"] == float(row["scale_factor"])
    assert block["layers"] == [int(layer) for layer in row["applied_layers"].split("~")]
    assert "Yu et al. 2025, Table 4" in block["source"]


@pytest.mark.parametrize("name", choices(paths.CONF / "model"))
def test_every_constant_says_where_it_comes_from(name: str) -> None:
    data = yaml.safe_load((paths.CONF / "model" / f"{name}.yaml").read_text())
    blocks = with_blocks(data)["blocks"]
    assert data["source"] and all(
        blocks[method]["source"]
        for method in choices(paths.CONF / "method")
        if method in blocks
    )
    if "scale_channel" in blocks:
        assert set(blocks["scale_channel"]) == {"channel", "factor", "layers", "source"}
    # The paper prints a channel of TinyLlama-NoPE, but no factor; LPES prints no control points of any model.
    # Those of smollm2 and qwen2_5_coder_0_5b are our own searches'.
    known = {name for name, _ in FILES.values()} | {
        "tiny",
        "tiny_b",
        "tiny_nope",
        "tiny_alibi",
        "smollm2",
        "qwen2_5_coder_0_5b",
    }
    assert ("scale_channel" in blocks) == (name in known)


# Models without position embeddings


def _positions() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randint(1, VOCABULARY, (2, 20)), torch.stack(
        [torch.randperm(20), torch.randperm(20) * 7]
    )


ROTATES = [
    name
    for name in BUILDERS
    if not name.startswith(("mpt", "falcon-alibi", "smollm3-nope", "gemma3-vision"))
]


@pytest.mark.parametrize("name", ROTATES)
def test_without_rope_positions_change_nothing(name: str) -> None:
    model, (ids, shuffled) = build(name), _positions()
    with torch.no_grad():
        rotated = model(ids).logits
        assert (rotated - model(ids, position_ids=shuffled).logits).abs().max() > 0.1
        families.remove_rope(model)
        plain = model(ids).logits
        assert torch.equal(plain, model(ids, position_ids=shuffled).logits)
    assert (plain - rotated).abs().max() > 0.1


def test_without_rope_a_llama_equals_an_architecture_that_has_none() -> None:
    shape = dict(SHAPE, num_key_value_heads=2)
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.2)).eval()
    nope = SmolLM3ForCausalLM(
        SmolLM3Config(**shape, no_rope_layers=[0] * LAYERS, tie_word_embeddings=False)
    ).eval()
    nope.load_state_dict(llama.state_dict())
    ids, _ = _positions()
    with torch.no_grad():
        expected = nope(ids).logits
        assert (llama(ids).logits - expected).abs().max() > 1e-2
        families.remove_rope(llama)
        assert_same(llama(ids).logits, expected, noise_floor(llama, ids), "logits")


def test_scale_channel_on_a_model_without_rope() -> None:
    model = build("llama-gqa")
    families.remove_rope(model)
    method = ScaleChannel(channel=(5, 9), factor=-1.0, layers=(1, 3))
    prompt, generated, effect = errors(model, method, padded=True, steps=4)
    assert_same(max(prompt, generated), 0.0, family_noise("llama-gqa"), "logits")
    assert effect > 0.01


def test_a_checkpoint_without_rope_is_loaded_so(checkpoint: Path) -> None:
    ids, shuffled = _positions()
    ids = ids % 20
    for rope, equal in (("none", True), ("checkpoint", False)):
        model = load(checkpoint, rope=rope, device="cpu").model
        with torch.no_grad():
            same = torch.equal(
                model(ids).logits, model(ids, position_ids=shuffled).logits
            )
        assert same == equal, rope
    assert model_config("tinyllama_nope").rope == "none"


@pytest.mark.parametrize(
    "model",
    [
        MptForCausalLM(MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=20)),
        FalconForCausalLM(
            FalconConfig(
                hidden_size=16,
                num_attention_heads=2,
                num_hidden_layers=1,
                vocab_size=20,
                alibi=True,
            )
        ),
    ],
    ids=["mpt", "falcon with alibi"],
)
def test_what_does_not_rotate_is_refused(model: PreTrainedModel) -> None:
    with refused(
        "model.rope",
        "none",
        allowed=("checkpoint", model.config.model_type),
        hint="model.rope=checkpoint",
    ):
        families.remove_rope(model)
