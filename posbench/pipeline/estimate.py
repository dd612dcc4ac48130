"""What a run would take: prompts, tokens, memory and time, told from config.json and the tokenizer.

Of many prompts the first :data:`LOOK` characters are tokenised, the others told from their length; replies
count in full, and of choices the prompt alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.filesize import decimal

from posbench.methods import Method
from posbench.methods.unmodified import Unmodified
from posbench.model import families
from posbench.model.load import Reader, outline
from posbench.pipeline.config import Config, trial
from posbench.pipeline.ready import prepared
from posbench.pipeline.stages import intervene
from posbench.report.terminal import text_table
from posbench.run import answers
from posbench.run.base import Run
from posbench.run.cost import Costs, Looks, Reads, Work
from posbench.run.progress import duration
from posbench.run.shared import Subject
from posbench.stats.frames import UNMODIFIED
from posbench.tasks import Example, Task
from posbench.tasks.items import placed

BATCHES = 3
STEPS = 8
"""Batches that are timed, and tokens that each of them generates."""
LOOK = 500_000


def show(config: Config, reader: Reader, measure: bool, console: Console) -> None:
    """Print what a run would take; with ``measure`` the time, too, from a few batches."""
    stages = [stage for stage in config.stages if stage != "report"]
    served = config.model.base_url
    run = prepared(config, {}, (), Console(quiet=True))
    run.lm = reader if served else outline(config.model, reader, config.runtime.device)  # type: ignore[assignment]
    works = work(config, run)
    measure = measure and not served
    token, step = _seconds(config, console) if measure and works else (0.0, 0.0)
    spent = [w.computed * token + w.steps * step for w in works]
    header = ["stage", "prompts", "tokens asked", "computed", "steps of generation"] + [
        "about"
    ] * measure
    rows = [
        [w.stage, f"{w.prompts:,}", f"{w.tokens:,}", f"{w.computed:,}", f"{w.steps:,}"]
        + [duration(seconds)] * measure
        for w, seconds in zip(works, spent, strict=True)
    ]
    if works:
        console.print(text_table(header, rows))
    if served:
        return
    shape = Costs.of(run.lm)
    memory = f"{shape.parameters:,} parameters, {decimal(shape.weights)} in memory"
    for what, sizes in (
        ("KV cache of a batch", [shape.cached(w) for w in works]),
        ("prefills that prompts share", [shape.stored * w.held for w in works]),
    ):
        memory += f"; {what} {decimal(max(sizes))}" if any(sizes) else ""
    console.print(memory, soft_wrap=True)
    if works:
        console.print(
            f"about {sum(map(shape.flops, works)):.1e} operations, without what a method adds"
        )
    untold = " and ".join(
        f"the {stage}" for stage in stages if stage not in {w.stage for w in works}
    )
    if measure and works:
        without = untold and f" without {untold}, which cannot be told before"
        told = f"at most about {duration(sum(spent))}{without}, from {BATCHES} batches on this machine"
        console.print(f"time: {told}", soft_wrap=True)
        return
    if untold:
        console.print(f"not estimated: {untold}")
    if works:
        console.print("time: posbench validate --measure runs a few batches")


def work(
    config: Config, run: Run, methods: Mapping[str, Method] | None = None
) -> list[Work]:
    """What each stage asks of the model; some studies cannot tell before. The methods are the run's, unless
    those of several runs that share prefills are given."""
    task = config.task
    stages = config.stages
    found = list[Work]()
    own = {UNMODIFIED: Unmodified()} | (
        {} if isinstance(trial(config), Unmodified) else {"": trial(config)}
    )
    subjects = [Subject(run, name, method) for name, method in (methods or own).items()]
    if "search" in stages:
        asked = task.examples("calibration")
        text = families.text_config(run.lm.model)
        answer = len(run.encoder.need_tokenizer()(asked[0].answers[0])["input_ids"])
        if told := config.search.asks(
            len(asked), answer, text.num_hidden_layers, text.hidden_size
        ):
            found.append(_read(run, "search", task, asked, told))
        if beside := config.search.beside():
            side, prompts, times = beside
            found.append(
                _read(
                    run,
                    f"search: {side.name}",
                    side,
                    prompts,
                    Reads(times * len(prompts)),
                )
            )
    if "study" in stages and config.study:
        for seen in config.study.reads(run):
            found += (
                [_read(run, "study", task, (), seen)]
                if isinstance(seen, Reads)
                else _looked(run, seen, trial(config))
            )
    if "intervene" in stages and (
        examples := placed(task.evaluation(), run.runtime.intervene_examples)
    ):
        found.append(_asked(subjects, "intervene", examples))
    if "evaluate" in stages and (examples := task.evaluation()):
        found.append(_asked(subjects, "evaluate", examples))
    return found


def _some(examples: Sequence[Example]) -> tuple[list[Example], float]:
    """The first questions at all their places, and how many times as many characters all have."""
    questions = dict[str, list[Example]]()
    size = 0
    for e in examples:
        questions.setdefault(e.cluster or e.id, []).append(e)
    taken = list[Example]()
    for members in questions.values():
        if size < LOOK:
            taken += members
            size += sum(len(e.prompt) for e in members)
    return taken, sum(len(e.prompt) for e in examples) / max(size, 1)


def _asked(
    subjects: Sequence[Subject], stage: str, examples: Sequence[Example]
) -> Work:
    """Examples under methods, as the run will plan them."""
    run = subjects[0].run
    run.evaluation, factor = _some(examples)
    plan = answers.planned if stage == "evaluate" else intervene.planned
    asks, _ = plan(subjects, run.encode(run.evaluation))
    found = asks.work(stage, answered=stage == "evaluate").times(factor)
    return replace(found, prompts=len(subjects) * len(examples))


def _looked(run: Run, seen: Looks, method: Method) -> list[Work]:
    """What a study asks of prompts, inside a method."""
    share = run.runtime.share if seen.shared and method.prefill() == method else None
    asker = replace(run, runtime=replace(run.runtime, share=share))
    asker.lm, (asker.evaluation, factor) = run.lm, _some(seen.examples)
    asks, _ = answers.planned(
        [Subject(asker, "", Unmodified())], run.encode(asker.evaluation)
    )
    looks = asks.work("study", answered=False).times(factor * seen.times)
    replies = asks.work("study: replies", answered=True).times(factor * seen.replies)
    return [each for each in (looks, replies) if each.prompts]


def _read(
    run: Run, stage: str, task: Task, examples: Sequence[Example], reads: Reads
) -> Work:
    """What is counted in prompts of about one length."""
    some, _ = _some(examples)
    lengths = [len(code.ids) for code in run.encode(some, task).values()] or [0]
    prompt = np.mean(lengths)
    pairs = np.mean([n * (n + 1) / 2 for n in lengths])
    texts = reads.texts * reads.length
    new = task.max_new_tokens
    asked = round(reads.prompts * prompt + reads.answers + texts)
    fed = reads.replies * (new - 1)
    later = prompt + new / 2
    each = max(*lengths, reads.length) + new
    return Work(
        stage,
        prompts=reads.prompts,
        tokens=asked,
        computed=asked,
        pairs=round(
            reads.prompts * pairs
            + reads.answers * prompt
            + texts * (reads.length + 1) / 2
        ),
        steps=reads.batches * new,
        fed=fed,
        later=round(fed * later),
        batch=max(
            min(run.runtime.batch_size * each, run.runtime.batch_tokens or 2**62), each
        ),
    )


def _seconds(config: Config, console: Console) -> tuple[float, float]:
    """Seconds per token read, and per step of generation, under the method."""
    run = prepared(config, {}, (), console)
    examples = run.examples(
        "evaluation"
        if {"intervene", "evaluate"} & set(config.stages)
        else "calibration"
    )
    encoded = run.encode(examples)
    plan = run.plan(examples, encoded)
    chosen = plan[:: max(len(plan) // BATCHES, 1)][:BATCHES]
    tokens = 0
    reading = 0.0
    writing = 0.0
    with run.trial().applied(run.lm) as lm:
        for number, batch in enumerate([chosen[0], *chosen]):
            rows = [encoded[e.id].ids for e in batch]
            started = time.perf_counter()
            lm.generate(rows, max_new_tokens=1, batch_size=len(rows))
            read = time.perf_counter() - started
            lm.generate(
                rows,
                max_new_tokens=1 + STEPS,
                min_new_tokens=1 + STEPS,
                batch_size=len(rows),
            )
            if number:  # the first one warms up
                tokens = tokens + sum(map(len, rows))
                reading = reading + read
                writing += time.perf_counter() - started - 2 * read
    return reading / tokens, max(writing, 0.0) / (STEPS * len(chosen))
