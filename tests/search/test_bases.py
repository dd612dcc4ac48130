"""The search for a RoPE base, against stock models with that base in their config."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

import posbench as package
from posbench.measure.replies import encode_with_answer
from tests.conftest import Result, config_of, run_folders

SEARCH = (
    "model=tiny",
    "method=rope_base",
    "search=bases",
    "stages=[search,evaluate]",
    "task.limit=10",
    "search.factors=[0.1,1.0,30.0]",
    "task.calibration_examples=18",
)


def stock_loss(base: float, prompts: list[tuple[list[int], list[int]]]) -> float:
    """Mean loss of answers, in nats per token, under a stock model with another base in its config."""
    model = package.load("tiny").model
    config = copy.deepcopy(model.config)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": base}
    stock = type(model)(config).eval()
    stock.load_state_dict(model.state_dict())
    losses = []
    for prompt, answer in prompts:
        with torch.no_grad():
            logits = stock(torch.tensor([prompt + answer])).logits[0]
        own = logits[len(prompt) - 1 : -1].log_softmax(-1)
        losses.append(-own[range(len(answer)), answer].mean().item())
    return sum(losses) / len(losses)


def test_the_base_with_the_likeliest_answers_is_found_and_used(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    """Bases 1,000 and 300,000 beside tiny's own of 10,000, which a factor of 1 names again."""
    result = posbench(*SEARCH)
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    table = pd.read_csv(folder / "search.csv").set_index("base")
    assert list(table.index) == [1000, 10000, 300000]
    examples = config_of(*SEARCH).task.examples("calibration")
    lm = package.load("tiny")
    prompts = [encode_with_answer(lm, example) for example in examples]
    for base, row in table.iterrows():
        assert row["loss"] == pytest.approx(stock_loss(base, prompts), abs=1e-4)
        assert row["fall"] == pytest.approx(
            table["loss"][10000] - row["loss"], abs=1e-6
        )
    found = yaml.safe_load((folder / "found.yaml").read_text())["rope_base"]
    assert found["base"] == table["loss"].idxmin() == 300000
    assert found["held_back"]["ci_low"] > 0
    metrics = pd.read_csv(folder / "metrics.csv")
    gain = metrics[
        (metrics["metric"] == "accuracy_difference") & (metrics["depth"].isna())
    ]
    assert gain["value"].item() > 0
    assert "base 300000.0" in result.out


def test_under_a_change_of_the_prompt_the_changed_prompts_are_read(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    """With the question first as well, which is written here by hand."""
    listed = "method=[question_first_and_last,rope_base]"
    args = (*SEARCH, "stages=[search,report]", "search.held_back=12", listed)
    result = posbench(*args)
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    table = pd.read_csv(folder / "search.csv").set_index("base")
    examples = config_of(*SEARCH).task.examples("calibration")
    lm = package.load("tiny")
    prompts = []
    for example in examples:
        start, end = example.question
        prompt = f"{example.prompt[start:end]}\n\n{example.prompt}"
        prompts.append(encode_with_answer(lm, replace(example, prompt=prompt)))
    for base, row in table.iterrows():
        assert row["loss"] == pytest.approx(stock_loss(base, prompts), abs=1e-4)
    check = pd.read_csv(folder / "held_back.csv")
    assert check["beside"].tolist() == ["question_first_and_last"]
    assert (
        f"question_first_and_last alone {check['unmodified'].item():.4g}" in result.out
    )


@pytest.mark.parametrize(
    ("args", "allowed"),
    [
        (
            ("method=[recite,rope_base]", "search=bases"),
            "changes of the prompt that need no model and ask for the answer alone",
        ),
        (
            ("method=[attention_sorting,rope_base]", "search=bases"),
            "changes of the prompt that need no model and ask for the answer alone",
        ),
        (
            (
                "method=[top_3,rope_base]",
                "search=bases",
                "task.pairs=6",
                "task.calibration_pairs=6",
                "task.positions=[0,1,2,3,4,5]",
            ),
            "top_3-rope_base cuts some away",
        ),
        (
            ("method=[layer_scaling,moice]", "search=router"),
            "which serves moice alone",
        ),
        (
            ("method=[layer_scaling,scale_channel]", "search=gradient"),
            "which serves layer_scaling alone",
        ),
    ],
)
def test_lists_that_a_search_does_not_serve_are_refused(
    posbench: Callable[..., Result],
    outputs: Path,
    args: Sequence[str],
    allowed: str,
) -> None:
    result = posbench("model=tiny", "stages=[search]", *args)
    assert result.status == 2
    assert allowed in result.err
    assert not run_folders(outputs)


def test_calibration_prompts_that_a_change_does_not_reach_are_refused(
    posbench: Callable[..., Result], outputs: Path, tmp_path: Path
) -> None:
    """Of a file without marked items: the base would be one for prompts as they are."""
    line = '{"input": "Json data: {\\"bal\\": \\"kop\\"} The value of key \\"bal\\" is \\"", "output": "kop"}\n'
    (tmp_path / "calibration.jsonl").write_text(line * 12)
    file = f"task.calibration_path={tmp_path / 'calibration.jsonl'}"
    listed = "method=[documents_twice,rope_base]"
    result = posbench("model=tiny", listed, "search=bases", "stages=[search]", file)
    assert result.status == 2
    assert "calibration prompts that documents_twice-rope_base changes" in result.err
    assert not run_folders(outputs)


def test_a_fix_beside_the_models_own_base_is_no_files(
    posbench: Callable[..., Result], outputs: Path, tmp_path: Path
) -> None:
    """The documents twice take the bias away, the search keeps the base: there is nothing to export."""
    result = posbench(
        "model=tiny",
        "method=[documents_twice,rope_base]",
        "search=bases",
        "search.factors=[0.01]",
        "task.limit=80",
        "task.positions=[0%,50%,100%]",
        "task.calibration_examples=12",
        "stages=[search,evaluate]",
    )
    assert result.status == 0, result.err
    assert "\nfixed: " in result.out and "posbench export" not in result.out
    (folder,) = run_folders(outputs)
    out = ("--to", "checkpoint", "--out", str(tmp_path / "fix"))
    refused = posbench("export", str(folder), *out, verb=True)
    assert refused.status == 2 and "there is nothing to write" in refused.err
    assert not (tmp_path / "fix").exists()


def test_the_models_own_base_is_kept_where_no_other_is_better(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    result = posbench(*SEARCH, "stages=[search]", "search.factors=[0.01]")
    assert result.status == 0, result.err
    assert "it is the model's own, and no other one has a lower loss" in result.out
    (folder,) = run_folders(outputs)
    check = pd.read_csv(folder / "held_back.csv")
    assert check["gain"].tolist() == [0.0]


def test_one_calibration_prompt_has_a_figure_without_intervals(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    few = "task.calibration_examples=1"
    result = posbench(*SEARCH, "stages=[search,report]", few)
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    assert (folder / "figures" / "bases.svg").is_file()
