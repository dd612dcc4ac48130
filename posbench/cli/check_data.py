"""``posbench check-data``: what a data file holds, before any model is loaded."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from posbench.errors import UserError
from posbench.files import sources
from posbench.pipeline.compose import composed
from posbench.schema import instantiate
from posbench.tasks import Example, Task
from posbench.tasks.own_data import OwnData

EDGE = 1500  # characters shown at both ends of a long prompt
PLAIN = re.compile(r"[\w ./:@+-]+", re.ASCII)
"""A path that Hydra reads as it stands."""


def check_data(args: list[str]) -> int:
    """Print what a data file holds, and the command that asks it; or what is wrong with its lines.

    posbench check-data FILE                    a file of your own, of the kinds in docs/own_data.md
    posbench check-data FILE task=nq_multidoc   a file of a benchmark; any key of the task can be set
    posbench check-data FILE model=DIR          lengths in tokens, too

    Raises:
        UserError: No file, or what is wrong with its lines (the first ten faults).
    """
    if not args or args[0].startswith("-") or re.match(r"(task|model)[.\w]*=", args[0]):
        raise UserError("check-data", " ".join(args), "a file, then keys to set", "posbench check-data FILE")
    file, *given = args
    quoted = file if PLAIN.fullmatch(file) else "'" + re.sub(r"(['\\])", r"\\\1", file) + "'"
    path = f"task.path={quoted}"
    # What the file of a model says of a task would show in the prompts.
    model = [] if any(arg.startswith("model") for arg in given) else ["model=hf"]
    named = [] if any(arg.startswith("task=") for arg in given) else ["task=own_data"]
    raw = composed(*named, path, *given, *model).raw
    task = instantiate(raw["task"], Task, "task")  # type: ignore[type-abstract]
    more = list[str]()
    if isinstance(task, OwnData):
        task, more = _read(task)
    else:
        print(f"{'task':<10}{task.name}")
    examples = task.evaluation()
    print("\n".join(f"{name:<10}{text}" for name, text in _facts(examples)))
    if not model:
        print(f"{'tokens':<10}{_tokens(raw['model'], examples)}")
    first = examples[0]
    wanted = repr(first.answers[0]) if first.answers else "what the file does not tell"
    print(f"\nthe first prompt (before any chat template), which expects {wanted}:\n")
    print("\n".join(f"    {line}" for line in _shortened(first.prompt).splitlines()))
    method = [] if any(arg.startswith("method") for arg in given) else ["method=none"]
    asked = [*named, path, *given, *more, *(["model=DIR_OR_HUB_ID"] if model else []), *method]
    print(f"\nto ask it:\n\n    {shlex.join(['posbench', *asked])}")
    return 0


def _shortened(prompt: str) -> str:
    """A prompt without the middle of a long one."""
    left = len(prompt) - 2 * EDGE
    return prompt if left <= 0 else f"{prompt[:EDGE]}\n[... {left:,} characters ...]\n{prompt[-EDGE:]}"


def _read(task: OwnData) -> tuple[OwnData, list[str]]:
    """The task of a file of one's own, with what its prompts need set; and that as overrides."""
    own = task.own
    print(f"{'kind':<10}{own.kind.kind}, by the field {own.kind.holds}")
    if own.unread:
        print(f"{'unread':<10}fields {', '.join(own.unread)}")
    sizes = own.sizes
    if own.moves and (without := sum(_astray(record) for record in own.records)):
        told = f"{without} of {len(own.records)} gold {own.kind.holds} hold none of their answers"
        print(f"{'gold':<10}{told}: is gold counted from 0?")
    if not own.moves or task.items_per_prompt or min(sizes) == max(sizes):
        return task, []
    print(
        f"{'lists':<10}{_spread(sizes)} {own.kind.holds}; prompts take {min(sizes)}, the gold one among them"
    )
    return replace(task, items_per_prompt=min(sizes)), [f"task.items_per_prompt={min(sizes)}"]


def _astray(record: Any) -> bool:
    """Whether no answer stands in what is said to hold it."""
    text = record.text(0, record.parts()[record.gold]).lower()
    return not any(answer.lower() in text for answer in record.answers)


def _facts(examples: Sequence[Example]) -> list[tuple[str, str]]:
    """What the examples are, in words."""
    asked = len({e.cluster or e.id for e in examples})
    places = sorted({e.gold_position for e in examples if e.gold_position is not None})
    moved = (
        f", each at gold positions {', '.join(map(str, places))}: {len(examples)} prompts" if places else ""
    )
    facts = [("examples", f"{asked}{moved}")]
    if names := list(dict.fromkeys(e.subset for e in examples if e.subset)):
        facts.append(("subsets", ", ".join(names)))
    if any(e.items for e in examples):
        facts.append(("items", f"{_spread([len(e.items) for e in examples])} a prompt"))
    if any(e.choices for e in examples):
        facts.append(("choices", f"{_spread([len(e.choices) for e in examples])} a question"))
    facts.append(("answers", f"{_spread([len(e.answers) for e in examples])} a question"))
    return [*facts, ("length", f"{_spread([len(e.prompt) for e in examples])} characters a prompt")]


def _spread(numbers: Sequence[int]) -> str:
    """One number, or the least, the median and the most."""
    least, most = min(numbers), max(numbers)
    return f"{least:,}" if least == most else f"{least:,} to {most:,} (median {median(numbers):,.0f})"


def _tokens(model: dict[str, Any], examples: Sequence[Example]) -> str:
    """The lengths of prompts in tokens of a model, whose weights stay where they are."""
    source = sources.checkpoint(str(model["path"]), model.get("revision"))
    if (folder := sources.cached(source)) is None:
        return f"{source.id} is not on this machine: posbench fetch"
    from transformers import AutoConfig, AutoTokenizer  # slow, and seldom wanted here

    from posbench.model.families import context_window

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    counts = [len(tokenizer(e.prompt)["input_ids"]) for e in examples]
    window = model.get("context_window") or context_window(AutoConfig.from_pretrained(folder))
    return f"{_spread(counts)} a prompt; the model reads {window:,}"
