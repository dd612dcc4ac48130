"""``posbench check-data``: what a data file holds, before any model is loaded."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from posbench.errors import Faults, UserError
from posbench.measure.replies import encode_whole, room
from posbench.pipeline.compose import composed
from posbench.pipeline.prepare import PreparedRun, prepare
from posbench.schema import instantiate
from posbench.tasks import Example, Task
from posbench.tasks.own_data import OwnData

EDGE = 1500  # characters shown at both ends of a long prompt
PLAIN = re.compile(r"[\w ./:@+-]+", re.ASCII)
"""A path that Hydra reads as it stands."""


def check_data(args: list[str]) -> int:
    """Print what a data file holds and the command that asks it, or what is wrong with its lines.

    usage: posbench check-data FILE [OVERRIDES] [--config-dir DIR]

      FILE       a file of your own, of the kinds that docs/own_data.md shows; or of a benchmark
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
    path = (
        file if PLAIN.fullmatch(file) else "'" + re.sub(r"(['\\])", r"\\\1", file) + "'"
    )
    asked = [
        *([] if _given(given, "task=") else ["task=own_data"]),
        f"task.path={path}",
        *given,
    ]
    # Without a model no model's file shows in the prompts.
    model = [] if _given(given, "model") else ["model=hf"]
    task = instantiate(composed(*asked, *model).raw["task"], Task, "task")  # type: ignore[type-abstract]
    told = [("task", task.name)]
    if isinstance(task, OwnData):
        told, fewest = _own(task)
        task = replace(task, items_per_prompt=fewest or task.items_per_prompt)
        asked += [f"task.items_per_prompt={fewest}"] if fewest else []
    faults = Faults()
    made = None
    with faults.collecting():
        made = None if model else prepare(composed(*asked))
    asked += ["model=DIR_OR_HUB_ID"] if model else []
    examples = (made.config.task if made else task).evaluation()
    told += _facts(examples)
    told += [("tokens", _tokens(made, examples))] if made else []
    told += [("changed", line) for line in (made.warnings if made else ())]
    print("\n".join(f"{name:<10}{text}" for name, text in told))
    first = examples[0]
    wanted = repr(first.answers[0]) if first.answers else "what the file does not tell"
    print(f"\nthe first prompt (before any chat template), which expects {wanted}:\n")
    cut = len(first.prompt) - 2 * EDGE
    whole = (
        f"{first.prompt[:EDGE]}\n[... {cut:,} characters ...]\n{first.prompt[-EDGE:]}"
    )
    print(
        "\n".join(
            f"    {line}" for line in (whole if cut > 0 else first.prompt).splitlines()
        )
    )
    faults.raise_any()
    print(f"\nto ask it:\n\n    {shlex.join(['posbench', *asked])}")
    return 0


def _given(args: Sequence[str], key: str) -> bool:
    return any(arg.startswith(key) for arg in args)


def _own(task: OwnData) -> tuple[list[tuple[str, str]], int | None]:
    """What a file of one's own is; and how many items prompts take, where lists differ and nobody says."""
    own = task.own
    name = own.kind.holds
    sizes = own.sizes
    told = [("kind", f"{own.kind.kind}, by the field {name}")]
    told += [("unread", f"fields {', '.join(own.unread)}")] if own.unread else []
    if not own.moves:
        return told, None
    if astray := sum(_astray(record) for record in own.records):
        lost = f"{astray} of {len(sizes)} gold {name} hold none of their answers: is gold counted from 0?"
        told.append(("gold", lost))
    if task.items_per_prompt or min(sizes) == max(sizes):
        return told, None
    told.append(
        (
            "lists",
            f"{_spread(sizes)} {name}; prompts take {min(sizes)}, the gold one among them",
        )
    )
    return told, min(sizes)


def _astray(record: Any) -> bool:
    """Whether no answer stands in what is said to hold it."""
    text = record.text(0, record.parts()[record.gold]).lower()
    return not any(answer.lower() in text for answer in record.answers)


def _facts(examples: Sequence[Example]) -> list[tuple[str, str]]:
    """What the examples are, in words."""
    places = sorted({e.gold_position for e in examples if e.gold_position is not None})
    moved = (
        f", each at gold positions {', '.join(map(str, places))}: {len(examples)} prompts"
        if places
        else ""
    )
    facts = [("examples", f"{len({e.cluster or e.id for e in examples})}{moved}")]
    if names := list(dict.fromkeys(e.subset for e in examples if e.subset)):
        facts.append(("subsets", ", ".join(names)))
    for name, counts, of in (
        ("items", [len(e.items) for e in examples], "a prompt"),
        ("choices", [len(e.choices) for e in examples], "a question"),
        ("answers", [len(e.answers) for e in examples], "a question"),
        ("length", [len(e.prompt) for e in examples], "characters a prompt"),
    ):
        facts += [(name, f"{_spread(counts)} {of}")] if any(counts) else []
    return facts


def _spread(numbers: Sequence[int]) -> str:
    """One number, or the least, the median and the most."""
    least = min(numbers)
    most = max(numbers)
    return (
        f"{least:,}"
        if least == most
        else f"{least:,} to {most:,} (median {median(numbers):,.0f})"
    )


def _tokens(made: PreparedRun, examples: Sequence[Example]) -> str:
    """The lengths of prompts in tokens, any chat template counted, and how many are too long, or hold tokens
    that the tokenizer does not know."""
    read: Any = made.reader
    codes = [encode_whole(read, e).ids for e in examples]
    unknown = read.tokenizer.unk_token_id
    needed = [
        len(ids) + room(read, made.config.task, e)
        for ids, e in zip(codes, examples, strict=True)
    ]
    over = sum(n > read.context_window for n in needed)
    odd = sum(unknown in ids for ids in codes)
    told = f"{_spread([*map(len, codes)])} a prompt; the model reads {read.context_window:,}"
    told += (
        f"; {over} of {len(codes)} are too long with their replies: see task.truncation"
        if over
        else ""
    )
    return told + (
        f"; {odd} of {len(codes)} hold tokens that it does not know" if odd else ""
    )
