"""Weights are the model's, whole and no others, or the checkpoint is refused in one line."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from posbench.errors import UserError
from posbench.model.lm import LM
from posbench.model.load import load
from tests.conftest import Result, run_folders
from tests.messages import assert_names, assert_refused, refused
from tests.models import BUILDERS, VOCABULARY

Tensors = dict[str, torch.Tensor]
Q = "model.layers.2.self_attn.q_proj.weight"
"""A tensor of the checkpoint."""


def _edit_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def _tensors(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, {"format": "pt"})

    return edit


def _config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: _edit_json(folder / "config.json", **values)


PARTIAL: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "a layer": (
        _tensors(lambda t: {k: v for k, v in t.items() if ".layers.3." not in k}),
        ("9 missing", "model.layers.3.input_layernorm.weight"),
    ),
    "a tensor": (
        _tensors(lambda t: {k: v for k, v in t.items() if k != Q}),
        ("1 missing", Q),
    ),
    "a deeper config": (
        _config(num_hidden_layers=6),
        ("18 missing", "model.layers.4.input_layernorm.weight"),
    ),
    "a shallower config": (
        _config(num_hidden_layers=2),
        ("18 not", "model.layers.2.input_layernorm.weight"),
    ),
    "other names": (
        _tensors(lambda t: {f"student.{k}": v for k, v in t.items()}),
        ("39 missing", "lm_head.weight", "39 not", "student.lm_head.weight"),
    ),
    "another shape": (
        _tensors(lambda t: {**t, Q: t[Q][:8].clone()}),
        ("1", "shape", Q),
    ),
    "another vocabulary": (
        _config(vocab_size=400),
        ("2", "shape", "lm_head.weight"),
    ),
}


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the random checkpoint to spoil."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@pytest.mark.parametrize("name", PARTIAL)
def test_weights_that_are_not_the_models_are_refused(name: str, copy: Path) -> None:
    spoil, faults = PARTIAL[name]
    spoil(copy)
    hint = "model.allow_partial=true"
    with refused("model.path", str(copy), allowed=faults, hint=hint):
        load(copy)


def test_partial_weights_are_named_in_every_table_and_drawn_alike(
    posbench: Callable[..., Result], small: list[str], outputs: Path, copy: Path
) -> None:
    PARTIAL["a layer"][0](copy)
    args = [*small, f"model.path={copy}", "task.limit=2"]
    args += ["method=none", "stages=[evaluate,report]"]
    refused = posbench(*args)
    assert (
        refused.status == 2
        and refused.err.count("\n") == 1
        and "9 missing" in refused.err
    )
    assert not outputs.exists()
    made = posbench(*args, "model.allow_partial=true")
    assert made.status == 0 and "random-partial" in made.out
    (folder,) = run_folders(outputs)
    assert folder.name.startswith("random-partial__none__")
    assert set(pd.read_csv(folder / "metrics.csv")["model"]) == {"random-partial"}
    assert "random-partial" in (folder / "report.html").read_text()
    rescored = posbench("rescore", str(folder), verb=True)
    assert rescored.status == 0 and set(
        pd.read_csv(folder / "metrics.csv")["model"]
    ) == {"random-partial"}
    states = [load(copy, allow_partial=True).model.state_dict() for _ in range(2)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_a_complete_checkpoint_is_not_called_partial(checkpoint: Path) -> None:
    with refused("model.allow_partial", True, allowed="false", hint="leave"):
        load(checkpoint, allow_partial=True)


def test_the_harness_refuses_too(copy: Path) -> None:
    harness = pytest.importorskip("posbench.cli.harness")
    PARTIAL["a tensor"][0](copy)
    with refused(
        "model_args.pretrained",
        str(copy),
        allowed=("1 missing", Q),
        hint="model.allow_partial=true",
    ):
        harness.PosbenchLM(str(copy), device="cpu")


@pytest.mark.parametrize("name", BUILDERS)
def test_the_checkpoint_of_every_family_is_complete(
    name: str, tiny: LM, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = BUILDERS[name]().eval()
    model.save_pretrained(tmp_path)
    tiny.need_tokenizer().save_pretrained(tmp_path)
    lm = load(tmp_path, device="cpu")
    ids = torch.arange(1, 9)[None] % VOCABULARY
    with torch.inference_mode():
        assert torch.equal(lm.model(input_ids=ids).logits, model(input_ids=ids).logits)


BROKEN: dict[str, Callable[[Path], Any]] = {
    "text as hidden size": _config(hidden_size="wide"),
    "no heads": _config(num_attention_heads=0, num_key_value_heads=0),
    "an empty tokenizer.json": lambda folder: (folder / "tokenizer.json").write_text(
        "{}"
    ),
    "an index that holds a list": lambda folder: (
        (folder / "model.safetensors").unlink(),
        (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": ["model.safetensors"]}'
        ),
    ),
    "an index that names a file elsewhere": lambda folder: (
        (folder / "model.safetensors").rename(folder.parent / "x.bin"),
        (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"lm_head.weight": "../x.bin"}}'
        ),
    ),
    "an embedding smaller than the tokenizer": lambda folder: (
        _tensors(
            lambda t: {k: v[:50].clone() if len(v) == 72 else v for k, v in t.items()}
        )(folder),
        _config(vocab_size=50)(folder),
    ),
    "a chat template that is none": lambda folder: (
        folder / "chat_template.jinja"
    ).write_text("{% if %}"),
    "a chat template that divides by zero": lambda folder: (
        folder / "chat_template.jinja"
    ).write_text("{{ 1/0 }}"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_gets_one_line(name: str, copy: Path) -> None:
    BROKEN[name](copy)
    with pytest.raises(UserError) as caught:
        load(copy, device="cpu").encode("a prompt")
    (fault,) = caught.value.faults
    assert fault.field.startswith("model.") and "\n" not in str(fault)
    if name.startswith("an embedding"):
        assert_names(fault.allowed, "tokenizer", "50 tokens")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("intermediate_size", 0),
        ("num_hidden_layers", 0),
        ("num_attention_heads", 0),
        ("num_attention_heads", -1),
        ("num_key_value_heads", 0),
        ("head_dim", 0),
        ("vocab_size", 0),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", -1),
        ("rms_norm_eps", math.nan),
        ("attention_dropout", math.nan),
    ],
)
def test_a_size_that_no_model_has_is_one_line(
    key: str,
    value: float,
    copy: Path,
    posbench: Callable[..., Result],
    small: list[str],
) -> None:
    _config(**{key: value})(copy)
    result = posbench(*small, f"model.path={copy}")
    assert result.status == 2 and result.err.count("\n") == 1
    assert_refused(result.err, "model.path", str(copy), allowed=(key, str(value)))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_rope_base_that_none_is_is_one_line(value: float, copy: Path) -> None:
    _config(rope_parameters={"rope_type": "default", "rope_theta": value})(copy)
    with refused("model.path", str(copy), allowed=("rope_theta", str(value))):
        load(copy)
