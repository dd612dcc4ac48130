"""Before a run: names of checkpoints, defaults that fit the window, obstacles together, estimates."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posbench.errors import UserError
from posbench.pipeline.compose import compose, composed
from posbench.pipeline.ready import Ready, ready
from tests.cli import test_tasks
from tests.conftest import Result

reader = test_tasks.reader


def made(*overrides: str) -> Ready:
    return ready(composed(*overrides), download=False)


def _name(*overrides: str) -> Any:
    return composed(*overrides).raw["model"]["name"]


def test_a_checkpoint_is_called_by_its_folder_or_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("mine", "a/step 9", "b/step 9", "ü, (1)", "tiny"):
        (tmp_path / name).mkdir(parents=True)
    for value in ("mine", "./mine", "mine/", "~/mine", str(tmp_path / "mine"), "some/mine", "a/../mine"):
        assert _name(f"model={value}") == "mine", value
    assert _name("model=hf", "model.path=mine") == _name("model=hf", "model.path=some/mine") == "mine"
    assert _name("model=hf", "model.path=mine", "model.name=x") == _name("model=mine", "model.name=x") == "x"
    assert _name("model=ü, (1)") == "u-1" and _name("model=a/step 9") == "step-9"
    # The name of a YAML is that YAML; a folder of its name is another model.
    assert composed("model=tiny").raw["model"]["path"] == "posbench://tiny"
    assert composed("model=./tiny").raw["model"]["path"] == "./tiny" and _name("model=./tiny") != "tiny"
    found: list[Any] = []
    compose(["-m", "model=a/step 9,b/step 9,tiny"], lambda one: found.append(one.raw["model"]))
    assert [one["name"] for one in found] == ["step-9", "b-step-9", "tiny"]
    assert [one["path"] for one in found] == ["a/step 9", "b/step 9", "posbench://tiny"]
    with pytest.raises(UserError, match=r"'mistral7'.*a folder, or a hub id.*did you mean mistral7b"):
        composed("model=mistral7")


def test_defaults_fit_a_window_and_say_so(checkpoint: Path) -> None:
    found = made(f"model={checkpoint}")
    task, search = found.config.task, found.config.search
    # A prompt of n pairs of words has 4 n + 3 tokens, and the reply up to 100.
    assert task.pairs == task.calibration_pairs == (256 - 100 - 3) // 4  # type: ignore[attr-defined]
    assert (search.length, search.window, search.skip) == (256, 25, 7)  # type: ignore[attr-defined]
    assert found.config.stages == ("search", "intervene", "evaluate", "report")
    assert "task.pairs: 140 -> 38, the window of random is 256 tokens" in found.said
    assert "search.length: 1000 -> 256, the window of random is 256 tokens" in found.said
    for group in ("task", "search"):  # what is recorded is what runs
        told = {name: value for name, value in found.config.raw[group].items() if name != "_target_"}
        told = {name: tuple(v) if isinstance(v, list) else v for name, v in told.items()}
        assert told == {name: getattr(getattr(found.config, group), name) for name in told}
    assert not made("model=tiny").said and not made(f"model={checkpoint}", "study=masks").said


def test_the_most_pairs_that_fit_are_taken(reader: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reader)

    def longest(task: Any) -> int:
        chats = [[{"role": "user", "content": e.prompt}] for e in task.evaluation()]
        texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
        return max(len(tokenizer(text)["input_ids"]) for text in texts)

    task: Any = made(f"model={reader}", "task.examples_per_position=2").config.task
    assert task.records == "uuid" and longest(task) <= 8192 - 100 < longest(
        replace(task, pairs=task.pairs + 1)
    )
    few: Any = made(f"model={reader}", "model.context_window=500", "task.examples_per_position=2")
    assert few.config.task.records == "words" and longest(few.config.task) <= 400
    assert any(line.startswith("task.records: uuid -> words, the window of bytes") for line in few.said)


def test_what_is_typed_is_refused_with_what_would_fit(checkpoint: Path) -> None:
    words = ["task.records=words", "task.prompt=compact"]
    for typed, allowed in [
        ([*words, "task.pairs=60", "task.max_new_tokens=20"], "task.pairs = 60: allowed: at most 58"),
        (["task.max_new_tokens=256"], "task.max_new_tokens = 256: allowed: at most 64"),
        (["search.length=300"], "search.length = 300: allowed: at most 256"),
        (["search.window=200"], "search.window = 200: allowed: at most 25"),
    ]:
        with pytest.raises(UserError) as told:
            made(f"model={checkpoint}", *typed)
        assert str(told.value).startswith(allowed) and len(told.value.faults) == 1
    assert (
        made(f"model={checkpoint}", *words, "task.pairs=58", "task.max_new_tokens=20").config.task.items == 58
    )
    # Pairs that only just fit are a user's own choice; too few of them merge gold positions, in a line.
    (line,) = (x for x in made(f"model={checkpoint}", *words, "task.pairs=3").said if "positions" in x)
    assert line == "task.positions: 5 -> 3 different ones, with 3 pairs"
    with pytest.raises(UserError, match="at most 38"):
        made("experiment=yu2025_fig6", f"model={checkpoint}", *words, "task.pairs=64")


def test_all_obstacles_are_told_together(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as told:
        made(
            f"model={tmp_path}", f"task.path={tmp_path}/none.jsonl", "stages=[evaluate]", "runtime.threads=0"
        )
    fields = [fault.field for fault in told.value.faults]
    assert sorted(fields) == ["method.channel", "model.path", "runtime.threads", "task.path"]
    shutil.copytree(checkpoint, tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"gpt2"'))
    with pytest.raises(UserError) as told:
        made(f"model={tmp_path}/other", f"task.path={tmp_path}/none.jsonl")
    assert {fault.field for fault in told.value.faults} == {"model architecture", "task.path"}
    with pytest.raises(UserError) as told:
        made(f"model={checkpoint}", "task.max_new_tokens=256", "search.length=300")
    assert [fault.field for fault in told.value.faults] == ["task.max_new_tokens", "search.length"]


def test_validate_tells_what_is_not_here_and_what_a_run_takes(
    posbench: Callable[..., Result], checkpoint: Path
) -> None:
    away = posbench("validate", "model=some/where", "task=mmlu", "method=none", verb=True)
    assert away.status == 2 and away.err.count("\n") == 2 and "model.path = 'some/where'" in away.err
    assert away.err.count("posbench fetch model=") == 2 and "task.path" in away.err
    few = ["task.examples_per_position=3", "task.calibration_examples=4", "search.strings=10"]
    told = posbench("validate", f"model={checkpoint}", *few, "--measure", verb=True)
    assert told.status == 0, told.err
    cells = {row[0]: row[1:] for row in _rows(told.out)}
    # 38 pairs of words: 155 tokens; two methods, five positions, three questions in one batch.
    assert cells["evaluate"][:3] == ["30", f"{30 * 155:,}", "200"]
    assert cells["intervene"][:3] == ["30", f"{30 * 155:,}", "0"]
    assert cells["search"][:2] == ["12", f"{12 * 155 + 10 * 256 + 4 * 41:,}"]
    import torch
    from transformers import AutoModelForCausalLM

    count = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(checkpoint).parameters())
    assert f"{count:,} parameters" in told.out and torch.float32.itemsize * count < 1e5
    assert "time: about" in told.out and "task.pairs: 140 -> 38" in told.out


def _rows(text: str) -> list[list[str]]:
    return [[c.strip() for c in line.strip("│").split("│")] for line in text.splitlines() if line[:1] == "│"]
