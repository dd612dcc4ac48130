"""Every benchmark through every stage it has, on a random model that reads bytes: limits, resume, prompts on
record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import yaml

from posbench import paths
from posbench.errors import choices
from posbench.model.lm import LM
from posbench.run.folder import PREDICTIONS
from tests.cli.task_files import TASKS, _mmlu
from tests.conftest import Result, run_folders
from tests.tasks import test_zero_scrolls

DATA = Path(__file__).parents[1] / "data"
METHOD = ["method.channel=3", "method.factor=-1.0", "method.layers=[0,1]"]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 2 layers with one token per byte and a chat template; window 8192."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "bytes"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(["<s>", "</s>", *letters])}, merges=[]
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}[assistant]"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        bos_token_id=0,
        eos_token_id=1,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


POSITIONS = {"kv_retrieval", "nq_multidoc", "own_data"}
RESUMED = {"mmlu", "own_data", "zero_scrolls"}
"""One task for each way to ask: choices, items at several positions, generated replies."""


def test_they_are_tasks_of_posbench() -> None:
    assert set(TASKS) <= set(choices(paths.CONF / "task"))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_runs_stops_and_goes_on(
    name: str,
    reader: Path,
    tmp_path: Path,
    outputs: Path,
    posbench: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, count = TASKS[name]
    (tmp_path / "files").mkdir()
    stages = (
        "[search,intervene,evaluate,report]"
        if name == "nq_multidoc"
        else "[intervene,evaluate,report]"
    )
    search = [
        "search.strings=2",
        "search.length=40",
        "search.window=8",
        "search.skip=2",
        "search.factors=[0.0]",
        "search.top_k=2",
        "search.candidates=all",
        "search.layers=[0,1]",
    ]
    args = [
        "model=hf",
        "model.name=bytes",
        f"model.path={reader}",
        "runtime.device=cpu",
        "runtime.threads=1",
        "runtime.resamples=100",
        f"task={name}",
        # All that a random model writes is cut but for a single token.
        "task.max_new_tokens=1",
        *make(tmp_path / "files"),
        f"stages={stages}",
        *(search if name == "nq_multidoc" else METHOD),
    ]
    first = posbench(*args)
    assert first.status == 0, first.err
    (folder,) = run_folders(outputs)
    rows = [
        json.loads(line) for line in (folder / PREDICTIONS).read_text().splitlines()
    ]
    assert len(rows) == 2 * count, "two methods, and what the limit leaves"
    metrics = pd.read_csv(folder / "metrics.csv")
    assert set(metrics["method"]) == {
        "none",
        "scale_channel",
    } and f"{metrics['metric'][0]}_difference" in set(metrics["metric"])
    assert (folder / "attention.csv").is_file() == (name in POSITIONS)
    prompts = json.loads((folder / "prompts.json").read_text())
    assert prompts["prompts"] == count
    for shown in prompts["first"].values():
        assert hashlib.sha256(shown["text"].encode()).hexdigest() == shown["sha256"]
        assert (
            len(shown["text"].encode()) + (not shown["text"].startswith("<s>"))
            == shown["tokens"]
        )
    if name in ("mmlu", "ceval"):
        assert all(
            row["output"] in "ABCD" and len(row["loglikelihoods"]) == 4 for row in rows
        )
    page = (folder / "report.html").read_text()
    assert "First prompt" in page and ("By subset" in page) == (
        (folder / "subsets.csv").is_file()
    )

    if name not in RESUMED:
        return
    # A run that lost its last rows computes these alone, and ends with the same bytes.
    wanted = {f: (folder / f).read_bytes() for f in ("metrics.csv", "prompts.json")}
    whole = (folder / PREDICTIONS).read_bytes().splitlines(keepends=True)
    (folder / PREDICTIONS).write_bytes(b"".join(whole[:-1]))
    (folder / "DONE").unlink()
    made: list[int] = []
    generate = LM.generate_replies
    choose = LM.continuations
    monkeypatch.setattr(
        LM,
        "generate_replies",
        lambda lm, rows, **k: made.append(len(rows)) or generate(lm, rows, **k),
    )
    monkeypatch.setattr(
        LM,
        "continuations",
        lambda lm, rows, c, **k: made.append(len(rows)) or choose(lm, rows, c, **k),
    )
    assert posbench(*args).status == 0
    assert 1 <= sum(made) <= count, "only the batch with the missing row"
    assert {f: (folder / f).read_bytes() for f in wanted} == wanted
    assert len((folder / PREDICTIONS).read_bytes().splitlines()) == len(whole)
    assert (
        yaml.safe_load((folder / "config.yaml").read_text())["task"]["limit"]
        is not None
    )


def test_a_benchmark_without_calibration_is_not_searched_on(
    reader: Path, tmp_path: Path, outputs: Path, posbench: Callable[..., Result]
) -> None:
    result = posbench(
        "model=hf",
        f"model.path={reader}",
        "task=mmlu",
        *_mmlu(tmp_path),
        "stages=[search,evaluate]",
        "search.length=200",
    )
    assert (
        result.status == 2
        and "no calibration questions" in result.err
        and not run_folders(outputs)
    )


def test_unlabelled_questions_become_a_submission(
    reader: Path, tmp_path: Path, outputs: Path, posbench: Callable[..., Result]
) -> None:
    for subset in ("qasper", "space_digest"):
        test_zero_scrolls.write(
            tmp_path, subset, test_zero_scrolls.row(subset, output=None), split="test"
        )
    result = posbench(
        "model=hf",
        f"model.path={reader}",
        "task=zero_scrolls",
        f"task.path={tmp_path}",
        "task.subsets=[qasper,space_digest]",
        "task.split=test",
        "method=none",
        "task.max_new_tokens=3",
        "stages=[evaluate,report]",
    )
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    table = pd.read_csv(
        folder / "submission/none/zero_scrolls_predictions.csv", dtype=str
    )
    assert list(table.columns) == ["Task", "ID", "Prediction"] and len(table) == 2
    assert not (folder / "metrics.csv").exists() and "nothing is scored" in " ".join(
        result.out.split()
    )


def test_a_log_without_references_is_asked_and_not_scored(
    reader: Path, outputs: Path, posbench: Callable[..., Result]
) -> None:
    result = posbench(
        "model=hf",
        f"model.path={reader}",
        "task=retrieval_log",
        f"task.path={DATA / 'logs' / 'langchain_retrieval_chain.jsonl.gz'}",
        "task.limit=2",
        "task.max_new_tokens=1",
        "method=none",
        "stages=[evaluate,report]",
    )
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    assert not (folder / "metrics.csv").exists()
    printed = " ".join(result.out.split())
    assert "nothing is scored" in printed and "task.references=FILE" in printed
    assert len((folder / PREDICTIONS).read_text().splitlines()) == 2


@pytest.mark.parametrize("name", ["own_data", "retrieval_log"])
def test_a_share_of_own_questions_is_searched_on_and_checked(
    name: str,
    reader: Path,
    tmp_path: Path,
    outputs: Path,
    posbench: Callable[..., Result],
) -> None:
    rows = [
        {
            "question": f"Where is cup {i}?",
            "contexts": [f"Cup {j} is in room {j * 7}." for j in range(i, i + 3)],
            "gold_indices": [i % 3],
            "answers": [f"room {i * 7}"],
        }
        for i in range(24)
    ]
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = posbench(
        "model=hf",
        f"model.path={reader}",
        f"task={name}",
        f"task.path={file}",
        "task.limit=2",
        "task.max_new_tokens=1",
        "task.calibration_share=0.6",
        "runtime.resamples=100",
        "stages=[search,evaluate,report]",
        "search.strings=2",
        "search.length=40",
        "search.window=8",
        "search.skip=2",
        "search.factors=[0.0]",
        "search.top_k=2",
        "search.candidates=all",
        "search.layers=[0,1]",
    )
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    facts = pd.read_csv(folder / "held_back.csv").iloc[0]
    per_question = 3 if name == "own_data" else 1
    assert facts["n"] == 7 * per_question, "half of 14 of 24 questions"
    printed = " ".join(result.out.split())
    assert "14 of 24 questions" in printed and "calibration_share=0.6" in printed
