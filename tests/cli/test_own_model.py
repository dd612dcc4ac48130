"""`posbench model=DIR` alone, from an empty directory, on checkpoints of which nothing is known."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import transformers as hf
import yaml

from posbench.embedded.tokenizer import build_tokenizer
from posbench.pipeline.compose import composed
from posbench.pipeline.identity import identity, reads, run_name
from posbench.pipeline.ready import ready
from tests.conftest import Result, run_folders

FEW = ["task.limit=2", "task.calibration_examples=4", "search.strings=8", "runtime.resamples=100"]


def _run(posbench: Callable[..., Result], outputs: Path, folder: Path, *few: str) -> Path:
    """The run folder of a checkpoint's default run, every stage of it done and its changes told."""
    result = posbench(f"model={folder}", *few)
    assert result.status == 0, result.err
    (run,) = (
        each for each in run_folders(outputs) if each.name.startswith(f"{folder.name}__scale_channel__")
    )
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["stages"] == ["search", "intervene", "evaluate", "report"]
    told = [line for line in result.out.splitlines() if " -> " in line]
    assert f"task.pairs: 140 -> {config['task']['pairs']}, the window of {folder.name} is 256 tokens" in told
    found = yaml.safe_load((run / "found.yaml").read_text())["scale_channel"]
    method = json.loads((run / "method.json").read_text())
    assert {key: method[key] for key in ("channel", "factor", "layers")} == {
        key: found[key] for key in ("channel", "factor", "layers")
    }
    metrics = pd.read_csv(run / "metrics.csv")
    assert set(metrics["method"]) == {"none", "scale_channel"} and set(metrics["model"]) == {folder.name}
    assert (run / "report.html").is_file()
    return run


def test_the_default_run_of_a_checkpoint(
    checkpoint: Path,
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = _run(posbench, outputs, checkpoint, *FEW)
    # Another checkpoint of that base name is another run.
    other = tmp_path / "other" / checkpoint.name
    shutil.copytree(checkpoint, other)
    model = hf.AutoModelForCausalLM.from_pretrained(checkpoint)
    model.lm_head.weight.data *= 2
    model.save_pretrained(other)
    made = composed(f"model={other}", *FEW)
    config, raw = ready(made).config, yaml.safe_load((run / "config.yaml").read_text())
    name = run_name(config, identity(config, read := reads(config)), read)
    assert name != run.name and name.rpartition("__")[0] == run.name.rpartition("__")[0]
    assert config.raw["task"] == raw["task"] and config.raw["search"] == raw["search"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma"])
def test_it_needs_nothing_else(
    name: str, posbench: Callable[..., Result], outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer, folder = build_tokenizer(), tmp_path / name
    ends = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    own = {"gemma": {"num_key_value_heads": 1, "head_dim": 8}, "gpt_neox": {"rotary_pct": 0.5}}.get(name, {})
    shape = {**size, **ends, **own, "vocab_size": len(tokenizer), "max_position_embeddings": 256}
    config = hf.AutoConfig.for_model(name, initializer_range=0.3, **shape)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _run(posbench, outputs, folder)
