"""The precision study: its arithmetic by hand, and an ordering that rounding must keep."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from rich.console import Console

from posbench import paths
from posbench.methods.choice import all_choices
from posbench.pipeline.prepare import build_run
from posbench.schema import required_fields
from posbench.studies.cost.precision import Precision, compare
from tests.conftest import Result, config_of, run_folders
from tests.messages import assert_refused


def test_compare_by_hand() -> None:
    reference = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    found = torch.tensor([[0.5, 0.0], [2.0, 0.0]])
    assert compare(found, reference) == {
        "largest": 1.0,
        "mean": 1.5 / 4,
        "changed": 0.5,
        "n": 2,
    }
    assert compare(reference, reference) == {
        "largest": 0.0,
        "mean": 0.0,
        "changed": 0.0,
        "n": 2,
    }


@pytest.mark.slow
def test_every_method_is_measured_and_fewer_bits_mean_larger_errors(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    result = posbench("study=precision", "study.prompts=12")
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    errors, drifts = (
        pd.read_csv(folder / f"{name}.csv", keep_default_na=False)
        for name in ("errors", "drifts")
    )
    largest = errors.set_index(["method", "weights"])["largest"]
    methods = sorted(set(errors["method"]))
    # A method whose constants the model's file lacks cannot be measured on it.
    blocks = config_of("study=precision").model.blocks
    assert set(methods) == {
        name
        for name, choice in all_choices(paths.config_folders(None), blocks).items()
        if choice.changed_part == "model"
        and all(choice.values[key] is not None for key in required_fields(choice.cls))
    }
    for name in methods:
        assert (
            0
            < largest[name, "float32"]
            < largest[name, "float16"]
            < largest[name, "bfloat16"]
        )
        assert largest[name, "float32"] < 1e-4
    assert (
        largest["scale_channel", "float64"] > 1 and ("none", "float64") not in largest
    )
    assert set(drifts["method"]) == set(methods)
    assert (drifts[drifts["weights"] == "float32"]["largest"] < 1e-4).all()
    refused = posbench("study=precision", "method=ms_poe")
    assert refused.status == 2
    assert_refused(refused.err, "method", "ms_poe", allowed="precision", hint="leave")


def test_prompts_are_spread_over_all_positions_and_keep_the_gold_pair() -> None:
    run = build_run(config_of("study=precision", "task.limit=10"), Console(quiet=True))
    examples = run.evaluation
    at_each = Counter(example.gold_position for example in examples)
    prompts = Precision(prompts=len(examples) * 2 // 3)._prompts(run)
    text = [run.lm.need_tokenizer().decode(prompt) for prompt in prompts]
    chosen = [examples[i * len(examples) // len(prompts)] for i in range(len(prompts))]
    found = Counter(example.gold_position for example in chosen)
    assert found.keys() == at_each.keys()
    assert max(found.values()) - min(found.values()) <= 1
    golds = [
        re.sub(r"\s", "", e.prompt[slice(*e.items[e.gold_position])]) for e in chosen
    ]
    assert all(
        gold in re.sub(r"\s", "", prompt)
        for gold, prompt in zip(golds, text, strict=True)
    )
    # Every second prompt is shorter, where there are pairs before the gold one.
    lengths = {len(prompt) for prompt in prompts}
    assert len(lengths) > 3


def test_a_weight_type_is_measured_once_and_float64_not_at_all(
    posbench: Callable[..., Result],
) -> None:
    for dtypes in ("[float32,float32]", "[float64]"):
        refused = posbench("study=precision", f"study.dtypes={dtypes}")
        assert refused.status == 2
        assert_refused(refused.err, "study.dtypes")
