"""The words of a reply before its answer, which a prompt can go on with: measured then is where the answer begins."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from posbench.errors import UserError
from posbench.files.atomic import Row, short_hash
from posbench.measure.replies import reply_to_batch
from posbench.run.base import Run
from posbench.tasks import Example, Task

ReadAt = Literal["prompt", "answer"]
"""The end of a measured prompt: ``prompt``, as asked; ``answer``, after the words of the reply before its answer."""
LEADS_FILE = "leads.jsonl"
MIN_CUE = 2
"""Fewest characters, spaces aside, that tell where the answer begins in a reply that does not have it."""


def words_before(reply: str, answers: Sequence[str]) -> str | None:
    """Return the text of a reply before the first of the answers in it; None where it has none.

    The spaces at its end are left out, as tokens begin with them.

    Args:
        reply: The reply.
        answers: Accepted answers; each counts as whole words, in any case.
    """
    patterns = [rf"(?<!\w){re.escape(a.strip())}(?!\w)" for a in answers if a.strip()]
    starts = [match.start() for p in patterns if (match := re.search(p, reply, re.I))]
    return reply[: min(starts)].rstrip(" ") if starts else None


def leads(replies: Sequence[str], answers: Sequence[Sequence[str]]) -> list[str | None]:
    """Return the words of each reply before its answer, also of wrong replies where the right ones tell their end.

    Most right replies to prompts of one kind come to their answer in the same words (``... is "``). In a reply without
    the answer those words end the lead, too; where right replies have too few in common it has none.

    Args:
        replies: Replies to B prompts.
        answers: The accepted answers of each.

    Returns:
        B leads; None where the answer's place in the reply is unknown.
    """
    found = [words_before(r, a) for r, a in zip(replies, answers, strict=True)]
    right = [lead for lead in found if lead is not None]
    if right and not any(right):
        return [""] * len(replies)  # all answer at once, and so do wrong replies
    # One that answers at once has no words that could tell.
    cue = _usual_end([lead for lead in right if lead])
    if len("".join(cue.split())) < MIN_CUE:
        return found
    for index, reply in enumerate(replies):
        if found[index] is None and cue in reply:
            found[index] = reply[: reply.index(cue) + len(cue)]
    return found


def _usual_end(texts: Sequence[str]) -> str:
    """The longest text that more than half of the texts end with; empty where they have none in common."""
    usual = ""
    # What so many end with has shorter ends that as many share.
    for length in range(1, max(map(len, texts), default=0) + 1):
        ends = Counter(text[-length:] for text in texts if len(text) >= length)
        end, count = ends.most_common(1)[0]
        if count <= len(texts) / 2:
            break
        usual = end
    return usual


def examples_at_answer(
    run: Run, examples: Sequence[Example], task: Task | None = None
) -> list[Example]:
    """Return examples whose reply has begun with the words that the model itself puts before the answer.

    Replies are those of the model as it is now, kept in :data:`LEADS_FILE`. Examples with a reply whose answer cannot
    be placed are left out.

    Args:
        run: The run.
        examples: The examples.
        task: Their task; None: the run's.

    Raises:
        UserError: No reply has the answer.
    """
    task = task or run.task
    encoded = run.prompts.encode(examples, task)

    def compute(batch: Sequence[Example]) -> list[Row]:
        return [
            {"output": str(reply["output"])}
            for reply in reply_to_batch(run.lm, task, batch, encoded)
        ]

    def key(example: Example) -> Row:
        return {"prompt": short_hash(example.prompt), "id": example.id}

    rows = run.rows.complete(
        LEADS_FILE,
        "replies, for the words before the answer",
        run.prompts.batches(examples, encoded, task),
        key,
        compute,
    )
    reply_by_id = {row["id"]: row["output"] for row in rows}
    found = leads(
        [reply_by_id[example.id] for example in examples],
        [example.answers for example in examples],
    )
    begun = [
        replace(example, prefill=example.prefill + lead)
        for example, lead in zip(examples, found, strict=True)
        if lead is not None
    ]
    if not begun:
        allowed = "prompt here: no reply has the answer in it"
        hint = "set read_at=prompt, or task.max_new_tokens higher where replies are cut"
        raise UserError("read_at", "answer", allowed, hint)
    return begun
