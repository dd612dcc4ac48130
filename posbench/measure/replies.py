"""Prompts as tokens, batches of prompts that are decoded alike, and what a model replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from posbench.files.atomic import rounded
from posbench.model.encode import Encoded, Encoder
from posbench.model.lm import LM, batches
from posbench.model.prefix import Prefix
from posbench.tasks import Example, Task


def room(encoder: Encoder, task: Task, example: Example) -> int:
    """Tokens of the window that an example's answer may take."""
    tokenizer = encoder.tokenizer
    if example.choices and tokenizer:
        return max(
            len(tokenizer(c, add_special_tokens=False)["input_ids"])
            for c in example.choices
        )
    return example.max_new_tokens or task.max_new_tokens


def encode(encoder: Encoder, task: Task, example: Example) -> Encoded:
    """An example's prompt as tokens, with room for its answer."""
    return encoder.encode(
        example.prompt,
        truncation=task.truncation,
        reserve=room(encoder, task, example),
        most=task.max_prompt_tokens,
        document=example.document,
        separator=example.separator,
        chat=example.chat,
        system=example.system,
        prefill=example.prefill,
    )


def encode_whole(encoder: Encoder, example: Example) -> Encoded:
    """An example's prompt as tokens, however long it is."""
    wide: Any = replace(encoder, context_window=2**31)  # type: ignore[type-var]
    return wide.encode(
        example.prompt,
        chat=example.chat,
        system=example.system,
        prefill=example.prefill,
    )


def encode_longest(encoder: Encoder, task: Task) -> tuple[Example, Encoded]:
    """The evaluation example with the longest prompt in characters: what does not fit shows at once."""
    longest = max(task.evaluation(), key=lambda e: len(e.prompt))
    return longest, encode(encoder, task, longest)


def plan(
    task: Task,
    examples: Sequence[Example],
    encoded: Mapping[str, Encoded],
    size: int,
    tokens: int | None,
) -> list[list[Example]]:
    """Batches of examples that are decoded alike, the largest first; ``encoded`` has their prompts by id.

    At most ``size`` prompts each, and ``tokens`` tokens, padding and reply counted (None: any number).
    """
    alike: dict[tuple[Any, ...], list[Example]] = {}
    for e in examples:
        kind = (
            bool(e.choices),
            e.max_new_tokens or task.max_new_tokens,
            e.min_new_tokens,
            e.stop,
        )
        alike.setdefault(kind, []).append(e)
    out = []
    for (chosen, new, *_), members in alike.items():
        lengths = [len(encoded[e.id].ids) + (0 if chosen else new) for e in members]
        out += [[members[i] for i in group] for group in batches(lengths, size, tokens)]
    return sorted(out, key=lambda group: -len(encoded[group[0].id].ids))


def replies(
    lm: LM,
    task: Task,
    batch: Sequence[Example],
    encoded: Mapping[str, Encoded],
    prefix: Prefix | None = None,
) -> list[dict[str, Any]]:
    """``output`` of each example of a batch, and ``loglikelihoods`` (nats) of its choices, if any; on a
    prefix that holds all tokens of these prompts but the last."""
    tokens = [encoded[e.id].ids for e in batch]
    first = batch[0]
    if first.choices:
        asked = [
            [lm.continuation_ids(encoded[e.id], choice) for choice in e.choices]
            for e in batch
        ]
        found = lm.continuations(tokens, asked, batch_size=len(batch), prefix=prefix)
        nats = [[total for total, _ in row] for row in found]
        best = [
            e.choices[row.index(max(row))].strip()
            for e, row in zip(batch, nats, strict=True)
        ]
        return [
            {"output": text, "loglikelihoods": rounded(row, 8)}
            for text, row in zip(best, nats, strict=True)
        ]
    texts = lm.generate(
        tokens,
        max_new_tokens=first.max_new_tokens or task.max_new_tokens,
        min_new_tokens=first.min_new_tokens,
        stop=first.stop,
        repetition_penalty=task.repetition_penalty,
        batch_size=len(batch),
        prefix=prefix,
    )
    return [{"output": text} for text in texts]
