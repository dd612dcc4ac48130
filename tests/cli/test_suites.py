"""The examples for other suites, lm-evaluation-harness and inspect_ai, find the bias of a reader that has one.

The reader answers every question with the first value of its prompt, so that it is right exactly where the gold
pair is the first one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

SUITES = Path(__file__).parents[2] / "docs" / "examples" / "suites"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the examples is where their commands look."""
    monkeypatch.syspath_prepend(SUITES)


def first_value(prompt: str) -> str:
    """The reader's reply."""
    return re.findall(r'": "([^"]+)"', prompt)[0]


def test_the_task_of_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="needs positionbench[lm_eval]")
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class FirstValue(LM):
        """The reader, as the harness asks a model."""

        def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
            return [first_value(request.args[0]) for request in requests]

        loglikelihood = loglikelihood_rolling = generate_until  # never asked

    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tasks = TaskManager(
        include_path=str(SUITES),
        include_defaults=False,
        metadata={"pairs": 5, "questions": 4},
    )
    evaluated = simple_evaluate(
        FirstValue(), tasks=["posbench_kv"], task_manager=tasks, bootstrap_iters=0
    )
    results = evaluated["results"]["posbench_kv"]
    assert results["sample_len"] == 3 * 4
    assert results["accuracy,none"] == pytest.approx(1 / 3)
    by_position = [
        results[f"accuracy_{name},none"] for name in ("first", "middle", "last")
    ]
    assert by_position == [1, 0, 0]
    assert results["position_gap,none"] == 1


def test_the_task_of_inspect(tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai", reason="needs inspect-ai")
    from inspect_ai import eval as evaluate
    from inspect_ai.model import ModelOutput, ModelUsage, get_model
    from inspect_kv import POSITIONS, kv_positions

    prompts: list[str] = []

    def answer(messages: list[Any], *_: Any) -> ModelOutput:
        prompts.append(messages[-1].text)
        output = ModelOutput.from_content("mock", first_value(prompts[-1]))
        output.usage = ModelUsage()  # else it is counted by a tokenizer from the net
        return output

    model = get_model("mockllm/model", custom_outputs=answer)
    task = kv_positions(pairs=5, questions=4)
    (log,) = evaluate(task, model=model, display="none", log_dir=str(tmp_path))
    assert log.status == "success", log.error
    assert len(set(prompts)) == len(prompts) == 4 * len(POSITIONS)
    (score,) = log.results.scores
    values = {name: metric.value for name, metric in score.metrics.items()}
    assert [values[position] for position in POSITIONS] == [1, 0, 0, 0, 0]
    assert values["position_gap"] == 1
    assert values["middle_drop"] == pytest.approx(1 / 2)
