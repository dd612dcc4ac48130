"""What a run would take: prompts, tokens, memory and time, told from config.json and the tokenizer.

Lengths are characters times the tokens per character of the longest prompt; replies count in full.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal

from posbench.files.sources import cached, shards
from posbench.measure.replies import encode, room
from posbench.methods.unmodified import Unmodified
from posbench.model.lm import batches
from posbench.model.load import Reader
from posbench.pipeline.config import Config, trial
from posbench.pipeline.ready import prepared
from posbench.report.terminal import text_table
from posbench.run.progress import duration
from posbench.tasks import Example
from posbench.tasks.items import placed

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
BATCHES, STEPS = 3, 8
"""Batches that are timed, and tokens that each of them generates."""


@dataclass(frozen=True)
class Work:
    """What a stage asks of the model at most, of both methods together; a step is one token of a batch."""

    stage: str
    prompts: int
    tokens: int
    steps: int = 0


def show(config: Config, reader: Reader, measure: bool, console: Console) -> None:
    """Print what a run would take; with ``measure`` the time, too, from a few batches."""
    stages = [stage for stage in config.stages if stage != "report"]
    works, measure = work(config, reader), measure and not config.model.base_url
    token, step = _seconds(config, console) if measure and works else (0.0, 0.0)
    spent = [w.tokens * token + w.steps * step for w in works]
    header = ["stage", "prompts", "tokens read", "steps of generation"] + ["about"] * measure
    rows = [
        [w.stage, f"{w.prompts:,}", f"{w.tokens:,}", f"{w.steps:,}", *[duration(seconds)] * measure]
        for w, seconds in zip(works, spent, strict=True)
    ]
    if works:
        console.print(text_table(header, rows))
    if config.model.base_url:
        return
    parameters, weights, cache = _memory(config, reader, works)
    console.print(
        f"{parameters:,} parameters, {decimal(weights)} in memory; KV cache of a batch {decimal(cache)}"
    )
    untold = " and ".join(f"the {stage}" for stage in stages if stage not in {w.stage for w in works})
    if measure and works:
        without = untold and f" without {untold}, which cannot be told before"
        told = f"at most about {duration(sum(spent))}{without}, from {BATCHES} batches on this machine"
        console.print(f"time: {told}", soft_wrap=True)
        return
    if untold:
        console.print(f"not estimated: {untold}")
    if works:
        console.print("time: posbench validate --measure runs a few batches")


def work(config: Config, reader: Reader) -> list[Work]:
    """What each stage asks of the model; a study, and some searches, cannot tell before."""
    task, stages, found = config.task, config.stages, list[Work]()
    methods = 1 if isinstance(trial(config), Unmodified) else 2
    if "search" in stages:
        asked, text = task.examples("calibration"), _text(reader)
        answer = len(reader.need_tokenizer()(asked[0].answers[0])["input_ids"])
        told = config.search.asks(len(asked), answer, text.num_hidden_layers, text.hidden_size)
        if told:
            length = _lengths(config, reader, asked)[0] / len(asked)
            steps = told[2] * task.max_new_tokens
            found.append(Work("search", told[0], round(told[0] * length + told[1]), steps))
        if beside := config.search.beside():
            side, prompts, times = beside
            read = times * _lengths(replace(config, task=side), reader, prompts)[0]
            found.append(Work(f"search: {side.name}", times * len(prompts), read))
    for stage in ("intervene", "evaluate"):
        examples = task.evaluation() if stage in stages else []
        examples = placed(examples, config.runtime.intervene_examples) if stage == "intervene" else examples
        if examples:
            read, steps = _lengths(config, reader, examples)
            steps = methods * steps if stage == "evaluate" else 0
            found.append(Work(stage, methods * len(examples), methods * read, steps))
    return found


def _text(reader: Reader) -> Any:
    return reader.facts.get_text_config()


def _lengths(config: Config, reader: Reader, examples: Sequence[Example]) -> tuple[int, int]:
    """Tokens of prompts, and steps of generation in the batches that they make."""
    longest = max(examples, key=lambda e: len(e.prompt))
    share = len(encode(reader, config.task, longest).ids) / max(len(longest.prompt), 1)
    new = [0 if e.choices else room(reader, config.task, e) for e in examples]
    lengths, runtime = [round(share * len(e.prompt)) for e in examples], config.runtime
    whole = [a + b for a, b in zip(lengths, new, strict=True)]
    plan = batches(whole, runtime.batch_size, runtime.batch_tokens)
    return sum(lengths), sum(max(new[i] for i in group) for group in plan)


def _memory(config: Config, reader: Reader, works: Sequence[Work]) -> tuple[int, int, int]:
    """Parameters; bytes of the weights as they are loaded, and of the KV cache of the largest batch."""
    text, runtime, folder = _text(reader), config.runtime, cached(config.model.checkpoint)
    stored = WIDTHS.get(str(getattr(text, "dtype", "")).removeprefix("torch."), 4)
    parameters = sum(_content(folder / name) for name in shards(folder)) // stored if folder else 0
    own = config.model.dtype == "auto" and runtime.device not in ("auto", "cpu")
    width = stored if own else WIDTHS.get(config.model.dtype, 4)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    each = max([-(-w.tokens // w.prompts) for w in works], default=0) + config.task.max_new_tokens
    most = runtime.batch_size * each
    tokens = max(min(most, runtime.batch_tokens or most), each)
    return parameters, parameters * width, 2 * text.num_hidden_layers * heads * size * width * tokens


def _content(file: Path) -> int:
    """Bytes of the tensors in a safetensors file: all but its header, whose length stands in front."""
    with open(file, "rb") as stream:
        return file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")


def _seconds(config: Config, console: Console) -> tuple[float, float]:
    """Seconds per token read, and per step of generation, under the method."""
    run = prepared(config, {}, (), console)
    examples = run.examples("evaluation" if {"intervene", "evaluate"} & set(config.stages) else "calibration")
    encoded = run.encode(examples)
    plan = run.plan(examples, encoded)
    chosen = plan[:: max(len(plan) // BATCHES, 1)][:BATCHES]
    tokens, reading, writing = 0, 0.0, 0.0
    with run.trial().applied(run.lm) as lm:
        for number, batch in enumerate([chosen[0], *chosen]):
            rows, started = [encoded[e.id].ids for e in batch], time.perf_counter()
            lm.generate(rows, max_new_tokens=1, batch_size=len(rows))
            read = time.perf_counter() - started
            lm.generate(rows, max_new_tokens=1 + STEPS, min_new_tokens=1 + STEPS, batch_size=len(rows))
            if number:  # the first one warms up
                tokens, reading = tokens + sum(map(len, rows)), reading + read
                writing += time.perf_counter() - started - 2 * read
    return reading / tokens, max(writing, 0.0) / (STEPS * len(chosen))
