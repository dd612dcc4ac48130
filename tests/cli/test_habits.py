"""Flags of other tools get the line that says the same here, and that line is one that posbench takes."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from posbench.cli.main import verb_of
from posbench.pipeline.compose import compose
from tests.conftest import Result

LINES = {
    "--model tiny --tasks kv_retrieval --limit 10": (
        "model=tiny task=kv_retrieval task.limit=10"
    ),
    "--model=tiny --limit=10": "model=tiny task.limit=10",
    "model=tiny --limit 10": "task.limit=10 model=tiny",
    "run --model hf --model_args pretrained=ORG/NAME,dtype=float16 --tasks mmlu "
    "--num_fewshot 3 --device cuda:0 --batch_size 8": (
        "model=ORG/NAME model.dtype=float16 task=mmlu task.shots=3 runtime.device=cuda:0 runtime.batch_size=8"
    ),
    "--model hf --model_args pretrained=gpt2,parallelize=True --tasks mmlu_anatomy": (
        "model=hf runtime.device_map=auto task=mmlu model.path=gpt2 task.subsets=[anatomy]"
    ),
    "--model hf --model_args pretrained=ORG/NAME dtype=float16 --tasks mmlu ceval": (
        "-m model=ORG/NAME model.dtype=float16 task=mmlu,ceval"
    ),
    "--model local-chat-completions --model_args "
    "model=qwen,base_url=http://host:8000/v1/chat/completions,num_concurrent=4": (
        "model=endpoint model.concurrency=4 model.base_url=http://host:8000/v1 model.name=qwen model.api=chat"
    ),
    "eval kv_retrieval --model hf/ORG/NAME -T pairs=20 --limit 5 --max-tokens 60": (
        "task=kv_retrieval model=ORG/NAME task.pairs=20 task.limit=5 task.max_new_tokens=60"
    ),
    "--model tiny --num_fewshot 2 task=mmlu": "model=tiny task.shots=2 task=mmlu",
}


@pytest.mark.parametrize(("typed", "line"), LINES.items())
def test_the_line_that_was_typed_in_our_spelling(
    typed: str, line: str, posbench: Callable[..., Result]
) -> None:
    result = posbench(*typed.split(), verb=True)
    assert result.status == 2
    assert result.out == ""
    (error,) = result.err.splitlines()
    assert shlex.split(error.partition("; next: posbench ")[2]) == line.split()
    jobs = compose(line.split()).composed
    assert len(jobs) == (2 if line.startswith("-m") else 1)


@pytest.mark.parametrize(
    ("typed", "line", "left_out"),
    [
        ("--limit 0.1 --log_samples", "", "--log_samples, task.limit=0.1"),
        ("--batch_size auto model=tiny", "model=tiny", "runtime.batch_size=auto"),
        ("--num_fewshot 5", "", "task.shots=5"),
        ("--gen_kwargs temperature=0", "", "--gen_kwargs temperature=0"),
    ],
)
def test_what_has_no_counterpart_is_named(
    typed: str, line: str, left_out: str, posbench: Callable[..., Result]
) -> None:
    result = posbench(*typed.split(), verb=True)
    assert result.status == 2
    hint = result.err.strip().partition("; next: ")[2]
    expected = f"posbench {line}".strip()
    assert hint == f"{expected} (without a counterpart here: {left_out})"


def test_tasks_that_are_not_here_go_to_the_harness(
    posbench: Callable[..., Result],
) -> None:
    result = posbench(
        "--model", "hf", "--model_args", "pretrained=ORG/NAME", "--tasks", "arc,mmlu",
        "--limit", "5", verb=True,
    )  # fmt: skip
    assert result.status == 2
    hint = shlex.split(result.err.partition("; next: ")[2])
    assert verb_of(hint[1:]) == "lm_eval"
    assert hint[hint.index("--model_args") + 1].startswith("pretrained=ORG/NAME,")
    assert hint[hint.index("--tasks") + 1] == "arc,mmlu"
    assert hint[hint.index("--limit") + 1] == "5"


@pytest.mark.parametrize("verb", ["validate", "fetch", "diagnose", "export"])
def test_verbs_that_take_overrides_answer_too(
    verb: str, posbench: Callable[..., Result]
) -> None:
    result = posbench(verb, "--model", "tiny", "--limit", "3", verb=True)
    assert result.status == 2
    assert f"posbench {verb} model=tiny task.limit=3" in result.err


def test_other_flags_are_refused_as_before(posbench: Callable[..., Result]) -> None:
    result = posbench("--frobnicate", "3", verb=True)
    assert result.status == 2
    assert "'--frobnicate'" in result.err
