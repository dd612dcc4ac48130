"""``posbench check-data``: the content of a data file, before any model is loaded."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from posbench.errors import Faults, UserError
from posbench.measure.replies import encode_untruncated, generation_budget
from posbench.pipeline.compose import compose_one
from posbench.pipeline.prepare import PreparedRun, prepare
from posbench.schema import instantiate
from posbench.tasks import Example, Task
from posbench.tasks.own_data import OwnData, holds_log
from posbench.tasks.retrieval_log import RetrievalLog

EDGE_CHARACTERS = 1500
"""Shown at both ends of a long prompt."""
UNQUOTED_PATH = re.compile(r"[\w ./:@+-]+", re.ASCII)
"""A path that Hydra reads without quotes."""

Facts = list[tuple[str, str]]
"""Lines to print: name and text."""


def check_data(args: list[str]) -> int:
    """Print what a data file holds and the command that asks it, or what is wrong with its lines.

    usage: posbench check-data FILE [references=FILE] [OVERRIDES] [--config-dir DIR]

      FILE       a file of your own, of the kinds that docs/own_data.md shows; a retrieval log; or of a benchmark
      references reference answers for a retrieval log that holds none
      OVERRIDES  task=NAME for a benchmark's file, any key of the task (task.positions=[0,4]), and
                 model=NAME_OR_DIR for lengths in its tokens, and whether it can be asked the file

    It loads no weights. Of wrong lines the first ten faults are named. The status is 2 where lines are wrong,
    or a run with that model would be refused.

    example: posbench check-data my_file.jsonl model=mistral7b
    """
    if not args or args[0].startswith("-") or re.match(r"(task|model)[.\w]*=", args[0]):
        raise UserError(
            "check-data",
            " ".join(args),
            "a file, then keys to set",
            "posbench check-data FILE",
        )
    file, *given = args
    overrides = [
        f"task.{override}" if override.startswith("references=") else override
        for override in given
    ]
    path = file
    if not UNQUOTED_PATH.fullmatch(file):
        path = "'" + re.sub(r"(['\\])", r"\\\1", file) + "'"
    asked_overrides = [f"task.path={path}", *overrides]
    if not _sets(overrides, "task="):
        is_log = holds_log(Path(file).expanduser())
        name = "retrieval_log" if is_log else "own_data"
        asked_overrides.insert(0, f"task={name}")
    has_model = _sets(overrides, "model")
    # Without a model the prompts have no model's own template.
    model = [] if has_model else ["model=hf"]
    raw_task = compose_one(*asked_overrides, *model).raw["task"]
    task = instantiate(raw_task, Task, "task")  # type: ignore[type-abstract]
    facts: Facts = [("task", task.name)]
    if isinstance(task, OwnData):
        facts = _file_facts(task)
        items = _items_to_set(task)
        if items:
            task = replace(task, items_per_prompt=items)
            asked_overrides.append(f"task.items_per_prompt={items}")
    elif isinstance(task, RetrievalLog):
        facts = _log_facts(task)
    faults = Faults()
    run: PreparedRun | None = None
    if has_model:
        with faults.collecting():
            run = prepare(compose_one(*asked_overrides))
    else:
        asked_overrides.append("model=DIR_OR_HUB_ID")
    if run:
        task = run.config.task
    examples = task.evaluation()
    facts += _example_facts(examples)
    if run:
        facts.append(("tokens", _token_lengths(run, examples)))
        facts += [("changed", line) for line in run.warnings]
    for name, text in facts:
        print(f"{name:<10}{text}")
    _print_prompt(examples[0])
    faults.raise_any()
    if isinstance(task, RetrievalLog):
        _print_log_commands(task, file, given, asked_overrides)
    print(f"\nto run it:\n\n    {shlex.join(['posbench', *asked_overrides])}")
    return 0


def _sets(overrides: Sequence[str], key: str) -> bool:
    """Whether an override begins with a key."""
    return any(override.startswith(key) for override in overrides)


def _file_facts(task: OwnData) -> Facts:
    """Facts about a file of the user's own."""
    file = task.own
    items = file.kind.holds
    facts = [("kind", f"{file.kind.kind}, by the field {items}")]
    if file.log:
        facts = [("shape", file.log.shape)]
    if file.unread:
        facts.append(("unread", f"fields {', '.join(file.unread)}"))
    facts += [("note", line) for line in task.notes()]
    if not file.moves:
        return facts
    shortest = _items_to_set(task)
    if shortest:
        facts.append(
            (
                "lists",
                f"{_spread(file.sizes)} {items}; prompts take {shortest}, "
                "the gold one among them",
            )
        )
    return facts


def _log_facts(task: RetrievalLog) -> Facts:
    """Facts about a retrieval log."""
    log = task.log
    questions = log.questions
    num_scored = sum(question.answers is not None for question in questions)
    numbers = Counter(
        -1 if question.gold is None else min(len(question.gold), 2)
        for question in questions
    )
    labels = {1: "one", 2: "several", 0: "named, but not retrieved", -1: "not known"}
    gold = [
        f"{label} in {numbers[key]}" for key, label in labels.items() if numbers[key]
    ]
    return [
        ("shape", log.shape),
        ("read", f"{len(questions)} of {log.num_read} {log.units}"),
        (
            "answers",
            f"{num_scored} with a reference, {len(questions) - num_scored} without",
        ),
        ("gold", f"{', '.join(gold)} questions"),
        ("documents", f"{_spread([len(q.documents) for q in questions])} a question"),
        *(("note", line) for line in task.notes()),
    ]


def _print_log_commands(
    task: RetrievalLog, file: str, given: Sequence[str], asked: Sequence[str]
) -> None:
    """Print the commands that compare orders, and move the gold document, on a retrieval log.

    Args:
        task: The task.
        file: The log.
        given: What was typed after it.
        asked: Arguments of the run in the logged order.
    """
    model = [text for text in asked if text.startswith("model")]
    references = [text for text in given if "references=" in text]
    short = [text.removeprefix("task.") for text in references]
    order = shlex.join(["posbench", "order", file, *short, *model])
    print(f"\nto compare orders of the documents:\n\n    {order}")
    own_data = OwnData(path=task.path, references=task.references)
    try:
        num_questions = len(own_data.own.records)
    except UserError as error:
        print(f"\nthe gold document cannot be moved: {error.allowed}")
        return
    items = _items_to_set(own_data)
    overrides = [
        text for text in asked if text.startswith(("task.path=", "task.references="))
    ]
    overrides += [f"task.items_per_prompt={items}"] if items else []
    command = shlex.join(["posbench", "task=own_data", *overrides, *model])
    print(f"\nto move the gold document of {num_questions} questions:\n\n    {command}")


def _items_to_set(task: OwnData) -> int | None:
    """Items that a prompt can take from every line; None if set, or if all lines have the same number."""
    if not task.own.moves or task.items_per_prompt:
        return None
    sizes = task.own.sizes
    return min(sizes) if min(sizes) < max(sizes) else None


def _example_facts(examples: Sequence[Example]) -> Facts:
    """Number, subsets and sizes of examples."""
    questions = {e.question_id for e in examples}
    text = f"{len(questions)}"
    positions = {e.gold_position for e in examples if e.gold_position is not None}
    if positions:
        listed = ", ".join(map(str, sorted(positions)))
        text += f", each at gold positions {listed}: {len(examples)} prompts"
    facts = [("examples", text)]
    subsets = dict.fromkeys(e.subset for e in examples if e.subset)
    if subsets:
        facts.append(("subsets", ", ".join(subsets)))
    for name, counts, unit in (
        ("items", [len(e.items) for e in examples], "a prompt"),
        ("other gold items", [len(e.other_gold) for e in examples], "a prompt"),
        ("choices", [len(e.choices) for e in examples], "a question"),
        ("answers", [len(e.answers) for e in examples], "a question"),
        ("length", [len(e.prompt) for e in examples], "characters a prompt"),
    ):
        if any(counts):
            facts.append((name, f"{_spread(counts)} {unit}"))
    return facts


def _spread(numbers: Sequence[int]) -> str:
    """Minimum, maximum and median, or the one number."""
    low = min(numbers)
    high = max(numbers)
    if low == high:
        return f"{low:,}"
    return f"{low:,} to {high:,} (median {median(numbers):,.0f})"


def _token_lengths(run: PreparedRun, examples: Sequence[Example]) -> str:
    """Lengths of prompts in tokens, and how many are too long or hold unknown tokens.

    A chat template is counted.
    """
    encoder: Any = run.reader
    prompts = [encode_untruncated(encoder, e).ids for e in examples]
    unknown_token = encoder.tokenizer.unk_token_id
    num_too_long = 0
    for ids, example in zip(prompts, examples, strict=True):
        length = len(ids) + generation_budget(encoder, run.config.task, example)
        num_too_long += length > encoder.context_window
    num_unknown = sum(unknown_token in ids for ids in prompts)
    window = f"the model reads {encoder.context_window:,}"
    texts = [f"{_spread([len(ids) for ids in prompts])} a prompt", window]
    if num_too_long:
        texts.append(
            f"{num_too_long} of {len(prompts)} are too long with their replies: "
            "see task.truncation"
        )
    if num_unknown:
        texts.append(
            f"{num_unknown} of {len(prompts)} hold tokens that it does not know"
        )
    return "; ".join(texts)


def _print_prompt(example: Example) -> None:
    """Print a prompt, without the middle of a long one, and the answer it expects."""
    answer = "what the file does not tell"
    if example.answers:
        answer = repr(example.answers[0])
    print(f"\nthe first prompt (before any chat template), which expects {answer}:\n")
    text = example.prompt
    num_hidden = len(text) - 2 * EDGE_CHARACTERS
    if num_hidden > 0:
        text = (
            f"{text[:EDGE_CHARACTERS]}\n[... {num_hidden:,} characters ...]\n"
            f"{text[-EDGE_CHARACTERS:]}"
        )
    print("\n".join(f"    {line}" for line in text.splitlines()))
