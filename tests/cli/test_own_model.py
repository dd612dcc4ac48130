"""`posbench model=DIR` alone, from an empty directory, on checkpoints of which nothing is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import transformers as hf
import yaml

from posbench.embedded.tokenizer import build_tokenizer
from tests.conftest import Result, run_folders
from tests.messages import assert_line_names

FOUND = ("channel", "factor", "layers")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma"])
def test_it_needs_nothing_else(
    name: str,
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = build_tokenizer()
    folder = tmp_path / name
    ends = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    own = {
        "gemma": {"num_key_value_heads": 1, "head_dim": 8},
        "gpt_neox": {"rotary_pct": 0.5},
    }.get(name, {})
    shape = {
        **size,
        **ends,
        **own,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 256,
    }
    config = hf.AutoConfig.for_model(name, initializer_range=0.3, **shape)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    result = posbench(f"model={folder}")
    assert result.status == 0, result.err
    (run,) = run_folders(outputs)
    assert (
        run.name.startswith(f"{name}__scale_channel__")
        and (run / "report.html").is_file()
    )
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["stages"] == ["search", "intervene", "evaluate", "report"]
    told = [line for line in result.out.splitlines() if " -> " in line]
    pairs = str(config["task"]["pairs"])
    assert_line_names("\n".join(told), "task.pairs: 140", pairs, name, "256")
    found = yaml.safe_load((run / "found.yaml").read_text())["scale_channel"]
    method = json.loads((run / "method.json").read_text())
    assert [method[key] for key in FOUND] == [found[key] for key in FOUND]
    metrics = pd.read_csv(run / "metrics.csv")
    assert set(metrics["method"]) == {"none", "scale_channel"} and set(
        metrics["model"]
    ) == {name}
