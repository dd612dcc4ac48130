"""The row of a reply: its example's source, request, reply and scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from posbench.backends.base import NO_WINDOW
from posbench.files.atomic import Row, short_hash
from posbench.measure.outcomes import decide_outcome, holds_answer
from posbench.model.encode import Encoded
from posbench.run.base import Run
from posbench.run.proofs import request_digest
from posbench.stats.outcomes import ANSWERED, CUT
from posbench.tasks import Example, Task


def prompt_digest(example: Example) -> str:
    """Return a checksum by which a prompt that is built again is recognised."""
    return short_hash([example.system, example.prompt, example.prefill])


def served_request_digest(example: Example) -> str:
    """Return the digest of a request to a server: of its text, as the server's tokens are not known."""
    return request_digest(list(prompt_digest(example).encode()), example.choices)


def make_row(run: Run, asked: Example, encoded: Encoded, reply: Row) -> Row:
    """Return the row of a reply: its example's source, the reply, its scores, and the digest of the request.

    Args:
        run: The run.
        asked: The example as its method asked it.
        encoded: Its prompt.
        reply: The fields of the reply.
    """
    example = asked.original or asked
    scores = {}
    if reply["outcome"] == ANSWERED:
        scores = run.task.checked_score(example, str(reply["output"]))
    # A server that applies the chat template itself counts the tokens.
    tokens = 0 if run.model.api == "chat" else len(encoded.ids)
    row = {
        "subset": example.subset,
        "gold_position": example.gold_position,
        "cluster": example.cluster,
        **reply,
        "scores": scores,
        "tokens": tokens or _tokens_of_prompt(reply),
        "dropped": encoded.dropped,
        "answers": list(example.answers),
        "prompt": prompt_digest(example),
    }
    if example.other_gold:
        row["other_gold"] = list(example.other_gold)
    if asked.prompt != example.prompt:
        row["rewritten_prompt"] = asked.prompt
    if asked.max_new_tokens != example.max_new_tokens:
        row["max_new_tokens"] = asked.max_new_tokens
    if asked.answer_cue:
        row["answer_cue"] = asked.answer_cue
    return row


def _tokens_of_prompt(reply: Row) -> int | None:
    """Return the tokens of one prompt by a server's count; None if it does not count."""
    total = reply.get("prompt_tokens")
    return None if total is None else total // reply.get("requests", 1)


def prompt_columns(
    rows: Iterable[Mapping[str, Any]], window: int
) -> dict[str, float | None]:
    """Return how much of the model's context window prompts take.

    Args:
        rows: Rows of predictions.jsonl; those without ``tokens`` are left out.
        window: The context window in tokens, :data:`NO_WINDOW` where it is not known.

    Returns:
        ``tokens`` (mean over the rows), ``window``, and ``window_share``, their ratio; None where not known.
    """
    tokens = [row["tokens"] for row in rows if row.get("tokens")]
    mean = float(np.mean(tokens)) if tokens else None
    known_window = window if window < NO_WINDOW else None
    share = None
    if mean is not None and known_window is not None:
        share = round(mean / known_window, 4)
    return {
        "tokens": None if mean is None else round(mean, 1),
        "window": known_window,
        "window_share": share,
    }


FIELDS_OF_EXAMPLE = (
    "subset",
    "gold_position",
    "cluster",
    "tokens",
    "dropped",
    "answers",
    "prompt",
    "other_gold",
    "rewritten_prompt",
    "max_new_tokens",
    "answer_cue",
)
"""Fields of a row that follow from its example, its method and the prompt."""
FIELDS_OF_SCORE = ("scores", "outcome", "reason")
"""Fields of a row that follow from its example and reply."""


def row_of_reply(run: Run, asked: Example, encoded: Encoded, recorded: Row) -> Row:
    """Make a row again from the reply that it records: all other fields follow from the example.

    Args:
        run: The run.
        asked: The example that the row should be of, as its method asks it.
        encoded: Its prompt as the model read it.
        recorded: The row.
    """
    rescored = rescored_row(run.task, asked.original or asked, recorded)
    derived = {*FIELDS_OF_EXAMPLE, "scores"}
    reply = {name: value for name, value in rescored.items() if name not in derived}
    return make_row(run, asked, encoded, reply)


def rescored_row(task: Task, example: Example, row: Row) -> Row:
    """Return a row of predictions.jsonl with the outcome and the scores that a task gives now.

    Only whether a reply holds an answer depends on the task: a refused prompt, say, stays refused.
    """
    if row.get("outcome") not in (ANSWERED, CUT):
        return row
    # A method may have asked for a longer reply.
    asked = replace(
        example,
        max_new_tokens=row.get("max_new_tokens", example.max_new_tokens),
        answer_cue=str(row.get("answer_cue", "")),
    )
    decision = decide_outcome(
        str(row["output"]),
        str(row.get("finish", "")),
        holds_answer=holds_answer(task, asked, row),
        is_thinking=bool(row.get("is_thinking")),
        ended_itself=True,
    )
    scores = {}
    if decision.outcome == ANSWERED:
        scores = task.checked_score(example, str(row["output"]))
    # In the order of a row that is made afresh, so that the file has the same bytes.
    rescored: Row = {}
    for name, value in row.items():
        if name == "outcome":
            rescored |= decision.fields
        elif name == "scores":
            rescored[name] = scores
        elif name != "reason":
            rescored[name] = value
    return rescored
