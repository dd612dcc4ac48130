"""Cost of a run in advance: prompts, tokens, memory and time, from config.json and the tokenizer.

Of many prompts the first :data:`ESTIMATE_CHARACTERS` characters are tokenised, the tokens of the others follow
from their length; replies count in full, and of choices the prompt alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from posbench.methods import Method
from posbench.methods.unmodified import Unmodified
from posbench.model import families
from posbench.model.items import probe_items
from posbench.model.lm import LM
from posbench.model.load import CheckpointReader, load_without_weights
from posbench.pipeline.config import Config
from posbench.pipeline.prepare import build_run
from posbench.pipeline.stages.intervene import plan_attention
from posbench.report.terminal import text_table
from posbench.run.base import Run
from posbench.run.batch_plan import BatchPlan
from posbench.run.cost import (
    Costs,
    InspectionPasses,
    Speed,
    StudyWorkload,
    WorkEstimate,
)
from posbench.run.heartbeat import doing
from posbench.run.plan import Subject
from posbench.run.progress import duration
from posbench.run.replies import ReplyBatches
from posbench.stats.frames import UNMODIFIED
from posbench.tasks import Example, Task
from posbench.tasks.items import sort_by_gold_position

TIMED_BATCHES = 3
"""Batches that are timed."""
TIMED_STEPS = 8
"""Tokens that each of the timed batches generates."""
FIRST_TOKENS = 16
"""Tokens after which generation is timed, where whole prompts are not read."""
ESTIMATE_CHARACTERS = 500_000
"""Characters of the prompts of a stage that are tokenised for an estimate."""
NO_LIMIT = 2**62


def show(
    config: Config, reader: CheckpointReader, measure: bool, console: Console
) -> None:
    """Print the cost of a run of a model in process.

    Args:
        config: The run.
        reader: Its model without weights.
        measure: Whether to run a few batches to estimate the time, too.
        console: Where it is printed.
    """
    run = build_run(config, Console(quiet=True))
    run.lm = load_without_weights(config.model, reader, config.runtime.device)
    estimates = estimate_run(config, run)
    seconds = None
    if measure and estimates:
        costs = Costs.of(run.lm)
        speed = measure_speed(build_run(config, console), costs)
        seconds = [speed.seconds(costs, work) for work in estimates]
    if estimates:
        console.print(_table(estimates, seconds))
    costs = Costs.of(run.lm)
    console.print(_memory_line(costs, estimates))
    if estimates:
        flops = sum(costs.flops(work) for work in estimates)
        console.print(f"about {flops:.1e} operations, without what a method adds")
    # Some searches and studies do not know their work in advance.
    estimated = {work.stage for work in estimates}
    unknown = " and ".join(
        f"the {stage}"
        for stage in config.stages
        if stage != "report" and stage not in estimated
    )
    if seconds is not None:
        message = f"at most about {duration(sum(seconds))}"
        if unknown:
            message += f" without {unknown}, which cannot be estimated"
        message += f", from {TIMED_BATCHES} batches on this machine"
        console.print(f"time: {message}")
        return
    if unknown:
        console.print(f"not estimated: {unknown}")
    if estimates:
        console.print("time: posbench validate --measure runs a few batches")


def _table(estimates: Sequence[WorkEstimate], seconds: Sequence[float] | None) -> Table:
    """Return the printed table of an estimate: a line for each stage, with a column of times if they are known."""
    header = ["stage", "prompts", "tokens asked", "computed", "steps of generation"]
    rows = []
    for work in estimates:
        counts = (work.prompts, work.tokens, work.computed_tokens, work.decode_steps)
        rows.append([work.stage, *(f"{count:,}" for count in counts)])
    if seconds is not None:
        header.append("about")
        for row, stage_seconds in zip(rows, seconds, strict=True):
            row.append(duration(stage_seconds))
    return text_table(header, rows)


def _memory_line(costs: Costs, estimates: Sequence[WorkEstimate]) -> str:
    """Return the sentence on memory: of the weights, and the largest of any stage for KV caches and shared prefills."""
    line = f"{costs.parameters:,} parameters, {decimal(costs.weight_bytes)} in memory"
    cache = max((costs.cache_bytes(work) for work in estimates), default=0)
    prefix = max((costs.prefix_bytes(work) for work in estimates), default=0)
    if cache:
        line += f"; KV cache of a batch {decimal(cache)}"
    if prefix:
        line += f"; prefills that prompts share {decimal(prefix)}"
    return line


def estimate_run(
    config: Config,
    run: Run,
    methods: Mapping[str, Method] | None = None,
    characters: int = ESTIMATE_CHARACTERS,
) -> list[WorkEstimate]:
    """Estimate the workload of each stage; some studies do not know theirs in advance.

    Args:
        config: The run.
        run: The same run, its model without weights.
        methods: Methods by name, from several runs that share prefills; None: the run's own.
        characters: Number of characters of a stage's prompts to tokenise; rounded up to whole questions.
    """
    task = config.task
    stages = config.stages
    method = run.method.trial()
    if not methods:
        methods = {UNMODIFIED: Unmodified()}
        if not isinstance(method, Unmodified):
            # Only the method counts for the estimate, not its name.
            methods[""] = method
    subjects = [Subject(run, name, method) for name, method in methods.items()]
    estimates = list[WorkEstimate]()
    if "search" in stages:
        estimates += _estimate_search(config, run, characters)
    if "study" in stages and config.study:
        # A study tells its work as numbers, or as examples that pass through the model.
        for reading in config.study.workload(run):
            if isinstance(reading, StudyWorkload):
                estimates.append(
                    _estimate_workload(run, "study", task, (), reading, characters)
                )
            else:
                estimates += _estimate_passes(run, reading, method, characters)
    if "intervene" in stages:
        examples = sort_by_gold_position(
            task.evaluation(), run.runtime.intervene_examples
        )
        if examples:
            estimates.append(
                _estimate_rows(subjects, "intervene", examples, characters)
            )
    if "evaluate" in stages:
        examples = task.evaluation()
        if examples:
            estimates.append(_estimate_rows(subjects, "evaluate", examples, characters))
    return estimates


def _estimate_search(config: Config, run: Run, characters: int) -> list[WorkEstimate]:
    """Return the work of the search on its calibration prompts, and on a second task whose scores it must not lower.

    Args:
        config: The config.
        run: The run, with the model's outline.
        characters: Prompts of about this many characters are encoded; the rest is extrapolated.

    Returns:
        An estimate for each of the two; none for a search whose workload is not known.
    """
    task = config.task
    search = config.search
    estimates = []
    examples = run.as_asked(task.examples("calibration"))
    model = families.text_config(run.lm.model)
    answer = run.encoder.need_tokenizer()(examples[0].answers[0])["input_ids"]
    workload = search.workload(
        len(examples), len(answer), model.num_hidden_layers, model.hidden_size
    )
    if workload:
        estimates.append(
            _estimate_workload(run, "search", task, examples, workload, characters)
        )
    second_task = search.second_task()
    if second_task:
        side_task, side_examples, times = second_task
        side_workload = StudyWorkload(times * len(side_examples))
        estimates.append(
            _estimate_workload(
                run,
                f"search: {side_task.name}",
                side_task,
                side_examples,
                side_workload,
                characters,
            )
        )
    return estimates


def _sample(
    examples: Sequence[Example], characters: int
) -> tuple[list[Example], float]:
    """Return the first questions, at all their gold positions, until ``characters`` are reached.

    Returns:
        The examples, and the factor from their characters to those of all examples.
    """
    questions = dict[str, list[Example]]()
    for example in examples:
        questions.setdefault(example.question_id, []).append(example)
    sample = list[Example]()
    sample_size = 0
    for members in questions.values():
        if sample_size >= characters:
            break
        sample += members
        sample_size += sum(len(example.prompt) for example in members)
    total_size = sum(len(example.prompt) for example in examples)
    return sample, total_size / max(sample_size, 1)


def _estimate_rows(
    subjects: Sequence[Subject],
    stage: str,
    examples: Sequence[Example],
    characters: int,
) -> WorkEstimate:
    """Return the work of a stage that makes a row for each example and method, from the same plan as the run's.

    Args:
        subjects: The methods of the run.
        stage: ``evaluate``, which generates replies, or ``intervene``, which reads attention.
        examples: All examples.
        characters: Prompts of about this many characters are planned; the rest is extrapolated.
    """
    run = subjects[0].run
    run.evaluation, factor = _sample(examples, characters)
    encoded = run.prompts.encode(run.evaluation)
    if stage == "evaluate":
        plan: BatchPlan = ReplyBatches(subjects, run.evaluation, encoded)
    else:
        plan = plan_attention(subjects, encoded)
    work = plan.estimate(stage, answered=stage == "evaluate").times(factor)
    return replace(work, prompts=len(subjects) * len(examples))


def _estimate_passes(
    run: Run, passes: InspectionPasses, method: Method, characters: int
) -> list[WorkEstimate]:
    """Return the work of a study that passes its examples through the model several times.

    Args:
        run: The run.
        passes: The examples, and how many passes and replies there are for each.
        method: The method under which the study runs.
        characters: Prompts of about this many characters are planned; the rest is extrapolated.

    Returns:
        The reading, and the replies; without those that have no prompts.
    """
    share = None
    # A prefill can be shared only if the method leaves it as it computes it itself.
    if passes.shared and method.prefill() == method:
        share = run.runtime.share
    study_run = replace(run, runtime=replace(run.runtime, share=share))
    study_run.lm = run.lm
    study_run.evaluation, factor = _sample(passes.examples, characters)
    encoded = study_run.prompts.encode(study_run.evaluation)
    subject = Subject(study_run, "", Unmodified())
    plan = ReplyBatches([subject], study_run.evaluation, encoded)
    works = []
    for name, times in (("study", passes.times), ("study: replies", passes.replies)):
        work = plan.estimate(name, answered=times == passes.replies).times(
            factor * times
        )
        works.append(replace(work, prompts=times * len(passes.examples)))
    return [work for work in works if work.prompts]


def _estimate_workload(
    run: Run,
    stage: str,
    task: Task,
    examples: Sequence[Example],
    workload: StudyWorkload,
    characters: int,
) -> WorkEstimate:
    """Return the work of prompts of about one length.

    Args:
        run: The run.
        stage: Name of the estimate.
        task: The task that asks the prompts.
        examples: Prompts from which the length is taken.
        workload: The number of prompts.
        characters: Number of characters of the prompts to tokenise.
    """
    sample, _ = _sample(examples, characters)
    encoded = run.prompts.encode(sample, task)
    lengths = [len(prompt.ids) for prompt in encoded.values()] or [0]
    mean_length = np.mean(lengths)
    # A token attends to itself and all before it.
    mean_pairs = np.mean([length * (length + 1) / 2 for length in lengths])
    text_tokens = workload.texts * workload.length
    reply = task.max_new_tokens
    tokens = round(workload.prompts * mean_length + workload.answers + text_tokens)
    attention_pairs = round(
        workload.prompts * mean_pairs
        + workload.answers * mean_length
        + text_tokens * (workload.length + 1) / 2
    )
    decoded_tokens = workload.replies * (reply - 1)
    longest = max(*lengths, workload.length) + reply
    batch_size = run.runtime.batch_size
    batch_tokens = min(batch_size * longest, run.runtime.batch_tokens or NO_LIMIT)
    return WorkEstimate(
        stage,
        prompts=workload.prompts,
        tokens=tokens,
        computed_tokens=tokens,
        attention_pairs=attention_pairs,
        decode_steps=workload.batches * reply,
        decoded_tokens=decoded_tokens,
        decoded_pairs=round(decoded_tokens * (mean_length + reply / 2)),
        batch_tokens=max(batch_tokens, longest),
    )


def measure_speed(
    run: Run, costs: Costs, max_tokens: int | None = None, max_seconds: float = math.inf
) -> Speed:
    """Measure how fast a run's model reads and writes, under its method.

    Args:
        run: The run; its model is loaded.
        costs: The model's sizes.
        max_tokens: Tokens of a batch, made of two prompts of half the length; None: batches are read as they are.
        max_seconds: After this time no further batch is timed.

    Returns:
        Seconds per operation of reading, and seconds per step of writing.
    """
    # A file may have too few questions for calibration where nothing is searched.
    only_searches = set(run.stages) <= {"search", "report"}
    examples = run.examples("calibration" if only_searches else "evaluation")
    encoded = run.prompts.encode(examples)
    batches = run.prompts.batches(examples, encoded)
    stride = max(len(batches) // TIMED_BATCHES, 1)
    timed_batches = batches[::stride][:TIMED_BATCHES]
    operations = 0.0
    reading_seconds = 0.0
    writing_seconds = 0.0
    steps = 0
    first_started = time.perf_counter()
    tokens_before = run.lm.tokens_read

    def activity() -> str:
        return (
            f"timing {run.lm.name}, {run.lm.tokens_read - tokens_before:,} tokens read"
        )

    with doing(activity), run.method.trial().applied(run.lm) as lm:
        # The first batch warms up.
        for number, batch in enumerate([timed_batches[0][:1], *timed_batches]):
            prompts = [encoded[example.id].ids for example in batch]
            if max_tokens:
                prompts = [ids[: max_tokens // 2] for ids in prompts[:2]]
            prompts_of_steps = prompts
            if max_tokens:
                # A step is short compared with reading, so it is timed after a few tokens.
                prompts_of_steps = [ids[:FIRST_TOKENS] for ids in prompts]
            # No items are known of a prompt that is cut.
            cut_prompts = [*prompts, *prompts_of_steps]
            with probe_items(lm, cut_prompts) if max_tokens else nullcontext():
                one_token = _time_generation(lm, prompts, 1)
                first_token = one_token
                if max_tokens:
                    first_token = _time_generation(lm, prompts_of_steps, 1)
                all_tokens = _time_generation(lm, prompts_of_steps, 1 + TIMED_STEPS)
            if number:
                operations += costs.prefill_flops(_plain_reading(prompts))
                reading_seconds += one_token
                writing_seconds += all_tokens - first_token
                steps += TIMED_STEPS
            if steps and time.perf_counter() - first_started > max_seconds:
                break
    return Speed(reading_seconds / operations, max(writing_seconds, 0.0) / steps)


def _time_generation(lm: LM, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Return the seconds in which a model reads prompts and generates ``tokens`` after each."""
    started = time.perf_counter()
    lm.generate(
        prompts,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        batch_size=len(prompts),
    )
    return time.perf_counter() - started


def _plain_reading(prompts: Sequence[Sequence[int]]) -> WorkEstimate:
    """Return the work of reading prompts (token ids) that share nothing."""
    lengths = [len(prompt) for prompt in prompts]
    return WorkEstimate(
        "",
        prompts=len(prompts),
        tokens=sum(lengths),
        computed_tokens=sum(lengths),
        attention_pairs=sum(length * (length + 1) // 2 for length in lengths),
    )
