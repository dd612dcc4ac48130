"""The outcome of a reply: an answer to the whole prompt, or the reason why it is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from posbench.model.answers import (
    GOOD_REASONS,
    NO_CHOICE,
    REFUSAL_REASONS,
    TOOL_REASONS,
)
from posbench.model.lm import FINISH_LENGTH
from posbench.stats.outcomes import (
    ANSWERED,
    CONTENT_FILTER,
    CUT,
    IN_THINKING,
    NO_ANSWER,
    NO_TEXT,
    NOT_READ,
    OVERFLOW,
    REFUSED,
    TOOL_CALL,
    UNKNOWN_REASON,
    Outcome,
)
from posbench.tasks import Example, Task


class Decision(NamedTuple):
    """The outcome of a reply and, where it is no answer, why."""

    outcome: Outcome
    reason: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the outcome in a row."""
        return {"outcome": self.outcome} | (
            {"reason": self.reason} if self.reason else {}
        )


def decide_outcome(
    text: str,
    finish: str,
    *,
    holds_answer: bool = False,
    is_thinking: bool = False,
    ended_itself: bool = False,
    rejection: str = "",
    obstacle: str = "",
    prompt_arrived: bool = True,
) -> Decision:
    """Decide the outcome of a reply; a reply not known to be an answer counts as none.

    Args:
        text: The reply without its thinking, before it is cut at stop texts.
        finish: Why it ended: a word of this library (:data:`posbench.model.lm.FINISH_LENGTH` among them) or of a
            server, in small letters; empty where a server says nothing.
        holds_answer: Whether it is an answer although it may have ended at its limit, see :func:`holds_answer`.
        is_thinking: Whether it ended in the thinking.
        ended_itself: Whether the model is known to have ended it, so that it may be empty.
        rejection: Why the server did not let the model read the prompt: :data:`posbench.stats.outcomes.OVERFLOW` or
            :data:`posbench.stats.outcomes.CONTENT_FILTER`.
        obstacle: Other reason why the text may be no answer.
        prompt_arrived: Whether the model read the whole prompt.

    Returns:
        One of the outcomes except ``failed``, as a failed request has no reply.
    """
    if rejection == OVERFLOW or not prompt_arrived:
        return Decision(NOT_READ, rejection or "the prompt did not arrive whole")
    if rejection == CONTENT_FILTER:
        return Decision(REFUSED, CONTENT_FILTER)
    if finish in REFUSAL_REASONS:
        who = "the model" if finish.startswith("refus") else CONTENT_FILTER
        return Decision(REFUSED, f"{who} ({UNKNOWN_REASON} {finish!r})")
    if finish in TOOL_REASONS:
        return Decision(NO_ANSWER, f"{TOOL_CALL} ({UNKNOWN_REASON} {finish!r})")
    if is_thinking:
        return Decision(CUT, IN_THINKING)
    if obstacle and finish != FINISH_LENGTH:
        return Decision(NO_ANSWER, obstacle)
    if finish == FINISH_LENGTH and (obstacle or not holds_answer):
        return Decision(CUT, "ended at the limit, before an answer")
    if finish and finish != FINISH_LENGTH and finish not in GOOD_REASONS:
        return Decision(NO_ANSWER, f"{UNKNOWN_REASON} {finish!r}")
    if not text.strip() and not ended_itself:
        return Decision(NO_ANSWER, NO_TEXT)
    return Decision(ANSWERED)


def holds_answer(task: Task, example: Example, reply: Mapping[str, Any]) -> bool:
    """Return whether a reply is an answer although it may have ended at its limit.

    A choice that was read is one. A reply of one token at most has no room for anything before its answer. A benchmark
    that prescribes the length scores a reply of that length, too. Where a method asks for a quotation first, a reply
    that ends in it is none.

    Args:
        task: The task.
        example: The example as it was asked.
        reply: Has ``output``; of a served choice, how it was read (``by``); and the ``quote`` before an answer.
    """
    if example.choices:
        return reply.get("by") != NO_CHOICE
    if example.answer_cue and "quote" not in reply:
        return False
    if (example.max_new_tokens or task.max_new_tokens) == 1 or task.prescribes_length:
        return True
    return task.has_answer(example.original or example, str(reply["output"]))
