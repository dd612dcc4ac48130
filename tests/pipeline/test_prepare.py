"""Before a run: names of checkpoints, defaults that fit the window, obstacles together, estimates."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import posbench
from posbench import paths
from posbench.errors import UserError
from posbench.model import rope
from posbench.pipeline.arguments import model_name, parse_request
from posbench.pipeline.compose import ComposedConfig, compose, compose_one
from posbench.pipeline.identity import identity, run_contents, run_name
from posbench.pipeline.prepare import PreparedRun, prepare
from tests.cli import test_tasks
from tests.conftest import Result
from tests.messages import assert_line_names, refused

reader = test_tasks.reader
WORDS = {"task.records": "words", "task.prompt": "compact"}


@pytest.fixture(scope="module")
def plain() -> ComposedConfig:
    """The config of a checkpoint of which nothing is known; a test says which."""
    return compose_one("model=some/where")


@pytest.fixture
def made(plain: ComposedConfig) -> Callable[..., PreparedRun]:
    """What is ready to run on a checkpoint, with keys as typed."""

    def call(path: Path, **keys: Any) -> PreparedRun:
        raw = deepcopy(plain.raw)
        typed = {
            "model.path": str(path),
            "model.name": path.name,
            "task.limit": 20,
            **keys,
        }
        for key, value in typed.items():
            *groups, last = key.split(".")
            node = raw
            for group in groups:
                node = node[group]
            node[last] = value
        return prepare(
            replace(plain, raw=raw, typed=(*plain.typed, *typed)), download=False
        )

    return call


def test_a_checkpoint_is_called_by_its_folder_or_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("mine", "a/step 9", "b/step 9", "ü, (1)", "tiny"):
        (tmp_path / name).mkdir(parents=True)
    for value in (
        "mine",
        "./mine",
        "mine/",
        "~/mine",
        str(tmp_path / "mine"),
        "some/mine",
        "a/../mine",
    ):
        assert model_name(value) == "mine", value
        assert parse_request([f"model={value}"], [paths.CONF], False).overrides == (
            "model=mine",
        ), value
    assert model_name("ü, (1)") == "u-1" and model_name("a/step 9") == "step-9"
    assert model_name("/") == "model" and len(model_name("x" * 300)) <= 60
    with refused(
        "model", "mistral7", allowed=("mistral7b", "folder", "hub id"), hint="mistral7b"
    ):
        parse_request(["model=mistral7"], [paths.CONF], False)
    # A folder of the name of a YAML is another model, and so is one that another folder shares its name with.
    every = "model=a/step 9,b/step 9,tiny,./tiny"
    found = [job.raw["model"] for job in compose(["-m", every]).composed]
    names = ["step-9", "b-step-9", "tiny", f"{model_name(str(tmp_path))}-tiny"]
    assert [one["name"] for one in found] == names
    assert [one["path"] for one in found] == [
        "a/step 9",
        "b/step 9",
        "posbench://tiny",
        "./tiny",
    ]
    assert compose_one("model=hf", "model.path=~/mine").raw["model"]["name"] == "mine"


def test_defaults_fit_a_window_and_say_so(
    made: Callable[..., PreparedRun], checkpoint: Path
) -> None:
    found = made(checkpoint)
    task: Any = found.config.task
    search: Any = found.config.search
    # A prompt of n pairs of words has 4 n + 3 tokens, and the reply one.
    assert (
        task.pairs == (256 - 1 - 3) // 4
        and task.max_new_tokens == 1
        and task.calibration_pairs == 50
    )
    assert (search.length, search.window, search.skip, search.alphabet) == (
        256,
        25,
        7,
        "tokens",
    )
    assert found.config.stages == ("search", "intervene", "evaluate", "report")
    assert_line_names(
        "\n".join(found.warnings), "task.pairs: 140", "63", "random", "256"
    )
    assert_line_names("\n".join(found.warnings), "search.length: 1000", "random", "256")
    for key in (
        "task.pairs",
        "task.records",
        "search.length",
        "search.alphabet",
    ):  # recorded as it runs
        group, name = key.split(".")
        assert found.config.raw[group][name] == getattr(
            getattr(found.config, group), name
        )
    assert prepare(compose_one("model=tiny")).warnings == ()


def test_the_most_pairs_that_fit_are_taken(
    made: Callable[..., PreparedRun], reader: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reader)

    def longest(task: Any) -> int:
        chats = [[{"role": "user", "content": e.prompt}] for e in task.evaluation()]
        texts = [
            tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True)
            for c in chats
        ]
        return max(len(tokenizer(text)["input_ids"]) for text in texts)

    task: Any = made(reader, **{"task.limit": 2}).config.task
    assert task.records == "uuid" and longest(task) <= 8192 - 100
    assert longest(replace(task, pairs=task.pairs + 1)) > 8192 - 100
    few = made(reader, **{"model.context_window": 500, "task.limit": 2})
    task = few.config.task
    # Words of three letters, a token per byte.
    assert (
        task.records == "words"
        and task.max_new_tokens == 3
        and longest(task) <= 500 - 3
    )
    assert longest(replace(task, pairs=task.pairs + 1)) > 500 - 3
    assert_line_names("\n".join(few.warnings), "task.records: uuid", "words", "500")


@pytest.mark.parametrize(
    ("typed", "key", "largest"),
    [
        ({"task.pairs": 60, "task.max_new_tokens": 20}, "task.pairs", 58),
        ({"task.pairs": 9, "task.max_new_tokens": 256}, "task.max_new_tokens", 217),
        ({"task.pairs": 9, "search.length": 300}, "search.length", 256),
        ({"task.pairs": 9, "search.window": 200}, "search.window", 25),
    ],
)
def test_what_is_typed_is_refused_with_what_would_fit(
    typed: dict[str, Any],
    key: str,
    largest: int,
    made: Callable[..., PreparedRun],
    checkpoint: Path,
) -> None:
    hint = f"{key}={largest}"
    with refused(key, typed[key], allowed=str(largest), hint=hint) as error:
        made(checkpoint, **WORDS, **typed)
    assert len(error.value.faults) == 1
    assert made(checkpoint, **WORDS, **{**typed, key: largest})


def test_a_genetic_search_fits_few_layers(checkpoint: Path) -> None:
    chosen = (
        f"model={checkpoint}",
        "method=layer_scaling",
        "search=genetic",
        "task.limit=2",
    )
    found = prepare(compose_one(*chosen, "search.step_x=2"))
    search: Any = found.config.search
    # Layers 0 to 3 in steps of two: places 0 and 2.
    assert search.points == 2 and any(
        line.startswith("search.points: 4 -> 2, random has 4 layers")
        for line in found.warnings
    )
    with refused("search.points", 5, allowed=("4", "random"), hint="search.points=4"):
        prepare(compose_one(*chosen, "search.points=5"))


def test_a_method_for_longer_texts_than_the_prompts_is_told() -> None:
    """A prompt of n pairs of words has 4 n + 3 tokens, and the reply one."""
    overrides = ["model=tiny", "task.pairs=32", "task.limit=2", "stages=[evaluate]"]
    settings = ["method=dca", "method.trained_length=200"]
    dca = [*overrides, *settings]
    (line,) = prepare(compose_one(*dca, "method.chunk_length=132")).warnings
    assert_line_names(line, "method", "dca", "132", "131")
    assert not prepare(compose_one(*dca, "method.chunk_length=131")).warnings


def test_a_base_that_reaches_less_far_than_the_prompts_is_told() -> None:
    """Its prompts and replies have 4 x 32 + 4 tokens; its own base is 10,000, which reaches as far."""
    overrides = ["model=tiny", "task.pairs=32", "task.limit=2", "stages=[evaluate]"]

    def warnings(*method: str) -> list[str]:
        return prepare(compose_one(*overrides, *method)).warnings

    lm = posbench.load("tiny")
    pairs = rope.rotary_module(lm.model).inv_freq.numel()
    distance = rope.reach(50.0, pairs, 132)
    assert 0 < distance < rope.reach(rope.own_base(lm.model), pairs, 132)
    (line,) = warnings("method=rope_base", "method.base=50")
    assert_line_names(line, "method", "rope_base", f"{distance} tokens", "131")
    (line,) = warnings(
        "method=[question_first_and_last,rope_base]", "method.parts.rope_base.base=50"
    )
    assert_line_names(line, "method", f"{distance} tokens")
    (line,) = warnings("method=attention_buckets", "method.bases=[50,null]")
    assert_line_names(line, "method", f"{distance} tokens")
    (line,) = warnings(
        "method=moice",
        "method.weights=uniform",
        "method.bases=[1e6,50]",
        "method.top_k=2",
    )
    assert_line_names(line, "method", f"{distance} tokens")
    assert not warnings("method=rope_base", "method.base=1e6")


def test_gold_positions_that_meet_are_told(
    made: Callable[..., PreparedRun], checkpoint: Path
) -> None:
    told = made(checkpoint, **WORDS, **{"task.pairs": 3}).warnings
    assert_line_names("\n".join(told), "task.positions: 5", "3 pairs")


def test_sizes_of_an_experiment_change_only_where_they_do_not_fit() -> None:
    args = ("experiment=yu2025_fig6", "method.factor=0", "model.context_window=64")
    run = prepare(compose_one(*args))
    # As tight as it goes, where a default would leave room for longer prompts.
    assert run.config.task.items == 15
    assert any(w.startswith("task.pairs: 32 -> 15, ") for w in run.warnings)
    with refused("task.pairs", 32, allowed=("15", "tiny", "64"), hint="task.pairs=15"):
        prepare(compose_one(*args, "task.pairs=32"))


def test_all_obstacles_are_told_together(
    made: Callable[..., PreparedRun], checkpoint: Path, tmp_path: Path
) -> None:
    data = {"task.path": f"{tmp_path}/none.jsonl"}

    def fields(path: Path, **keys: Any) -> set[str]:
        with pytest.raises(UserError) as told:
            made(path, **keys)
        return {fault.field for fault in told.value.faults}

    wrong = {"stages": ["evaluate"], "runtime.threads": 0}
    assert fields(tmp_path, **data, **wrong) == {
        "method.channel",
        "model.path",
        "runtime.threads",
        "task.path",
    }
    shutil.copytree(checkpoint, tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"gpt2"'))
    assert fields(tmp_path / "other", **data) == {"model architecture", "task.path"}
    long = {"task.max_new_tokens": 256, "search.length": 300}
    assert fields(checkpoint, **long) == {"task.max_new_tokens", "search.length"}


def test_two_checkpoints_of_one_name_are_two_runs(
    made: Callable[..., PreparedRun], checkpoint: Path, tmp_path: Path
) -> None:
    other = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, other)
    names = []
    for place in (checkpoint, other):
        config = made(place).config
        names.append(
            run_name(config, identity(config, read := run_contents(config)), read)
        )
        weights = bytearray((other / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (other / "model.safetensors").write_bytes(weights)
    assert (
        names[0] != names[1] and len({name.rpartition("__")[0] for name in names}) == 1
    )


def test_validate_tells_what_is_not_here_and_what_a_run_takes(
    posbench: Callable[..., Result], checkpoint: Path
) -> None:
    away = posbench(
        "validate", "model=some/where", "task=mmlu", "method=none", verb=True
    )
    assert (
        away.status == 2
        and away.err.count("\n") == 2
        and "model.path = 'some/where'" in away.err
    )
    assert away.err.count("posbench fetch model=") == 2 and "task.path" in away.err
    few = ["task.limit=3", "task.calibration_examples=4", "search.strings=10"]
    told = posbench("validate", f"model={checkpoint}", *few, "--measure", verb=True)
    assert told.status == 0, told.err
    lines = [re.split(" {2,}", line.strip()) for line in told.out.splitlines()]
    cells = {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines}
    # 63 pairs of words: 255 tokens; two methods, five positions, three questions: all in one batch; the search
    # reads its prompts of 50 pairs thrice, ten strings, and the answer under 40 candidates and none.
    assert (
        cells["evaluate"][:2] == ["30", f"{30 * 255:,}"] and cells["evaluate"][3] == "1"
    )
    assert (
        cells["intervene"][:2] == ["30", f"{30 * 255:,}"]
        and cells["intervene"][3] == "0"
    )
    assert cells["search"][:2] == ["12", f"{12 * 203 + 10 * 256 + 4 * 41:,}"]
    from transformers import AutoModelForCausalLM

    count = sum(
        p.numel() for p in AutoModelForCausalLM.from_pretrained(checkpoint).parameters()
    )
    assert f"{count:,} parameters, {4 * count / 1000:.1f} kB" in told.out
    assert_line_names(told.out, "time:")
    assert_line_names(told.out, "task.pairs: 140", "63")


def test_a_large_model_gets_small_batches_on_a_cpu_unless_they_are_typed(monkeypatch):
    from posbench.pipeline import fit
    from posbench.pipeline.compose import compose_one
    from posbench.pipeline.prepare import prepare

    given = ["model=tiny", "runtime.device=cpu", "stages=[evaluate]"]
    plain = prepare(compose_one(*given)).config.runtime.batch_tokens
    monkeypatch.setattr(fit, "CPU_BATCH_OPERATIONS", 1e9)
    small = prepare(compose_one(*given))
    outline = small.reader.facts.get_text_config()
    weights = 12 * outline.num_hidden_layers * outline.hidden_size**2
    assert small.config.runtime.batch_tokens == int(1e9 / (2 * weights)) < plain
    assert any("runtime.batch_tokens" in line for line in small.warnings)
    typed = prepare(compose_one(*given, "runtime.batch_tokens=16384"))
    assert typed.config.runtime.batch_tokens == 16384
