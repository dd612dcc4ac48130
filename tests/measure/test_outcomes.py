"""The outcome of replies in the forms of real servers: what is not known to be an answer is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from posbench.measure.outcomes import Decision, decide_outcome, holds_answer
from posbench.model.answers import RequestError, read_reply
from posbench.run.reply_rows import rescored_row
from posbench.stats.outcomes import Outcome
from posbench.tasks import KVRetrieval

LIMIT = 20
REASONS = {
    # the words of OpenAI, Anthropic, Gemini, Cohere, Bedrock, Mistral, Together, text-generation-inference, DeepSeek
    "stop": "answered",
    "eos": "answered",
    "eos_token": "answered",
    "end_turn": "answered",
    "stop_sequence": "answered",
    "COMPLETE": "answered",
    "length": "cut",
    "max_tokens": "cut",
    "model_length": "cut",
    "MAX_TOKENS": "cut",
    "content_filter": "refused",
    "SAFETY": "refused",
    "RECITATION": "refused",
    "PROHIBITED_CONTENT": "refused",
    "BLOCKLIST": "refused",
    "refusal": "refused",
    "guardrail_intervened": "refused",
    "tool_calls": "no answer",
    "function_call": "no answer",
    "tool_use": "no answer",
    "MALFORMED_FUNCTION_CALL": "no answer",
    "OTHER": "no answer",
    "pause_turn": "no answer",
    "weather": "no answer",
}


def answer(
    message: dict[str, Any] | str, finish: str | None = "stop", tokens: int | None = 5
) -> dict[str, Any]:
    """What a server sends: a message of a chat, or the text of a completion."""
    choice: dict[str, Any] = {"index": 0}
    choice |= {"text": message} if isinstance(message, str) else {"message": message}
    if finish is not None:
        choice["finish_reason"] = finish
    usage = {} if tokens is None else {"prompt_tokens": 9, "completion_tokens": tokens}
    return {"choices": [choice], "usage": usage}


def decision_on(data: dict[str, Any], holds: bool = False) -> Decision:
    """The outcome of a server's answer to a request of at most :data:`LIMIT` tokens."""
    reply = read_reply(data, max_tokens=LIMIT)
    return decide_outcome(
        reply.text,
        reply.finish,
        holds_answer=holds,
        is_thinking=reply.is_thinking,
        ended_itself=reply.ended_itself,
        rejection=reply.rejection,
        obstacle=reply.obstacle,
    )


@pytest.mark.parametrize("written", [str, str.upper, str.title])
@pytest.mark.parametrize("reason", REASONS)
def test_only_known_reasons_in_any_case_of_letters_are_answers(
    reason: str, written: Any
) -> None:
    decision = decision_on(answer({"content": "X"}, written(reason)))
    assert decision.outcome == REASONS[reason]
    assert (decision.reason == "") == (decision.outcome == "answered")
    if decision.outcome in ("refused", "no answer"):
        assert reason.lower() in decision.reason


@pytest.mark.parametrize("reason", ["error", "ABORT", "Cancelled", "user_cancel"])
def test_a_server_that_gave_up_is_asked_again(reason: str) -> None:
    with pytest.raises(RequestError, match="ended with"):
        read_reply(answer({"content": "X"}, reason))


@pytest.mark.parametrize(
    ("text", "finish", "tokens", "outcome"),
    [
        # A server that says stop where it cut.
        ("Let me look", "stop", LIMIT, "cut"),
        ("Let me look", "stop", LIMIT - 1, "answered"),
        ("look " * LIMIT, "stop", None, "cut"),
        ("Let me look at it", "stop", None, "answered"),
        # One that gives no reason.
        ("X", None, LIMIT, "cut"),
        ("X", None, LIMIT - 1, "answered"),
        ("X", "", LIMIT - 1, "answered"),
        # Nor counts: a token has a byte at least.
        ("X" * (LIMIT - 1), None, None, "answered"),
        ("X" * LIMIT, None, None, "no answer"),
        ("\u00e9" * (LIMIT - 5), None, None, "no answer"),
        # Empty text.
        ("", "stop", 0, "no answer"),
        (" \n", "stop", 0, "no answer"),
        ("", "stop", None, "no answer"),
        ("", None, 0, "no answer"),
    ],
)
def test_a_reply_counts_only_below_its_limit(
    text: str, finish: str | None, tokens: int | None, outcome: str
) -> None:
    for message in (text, {"content": text}):
        assert decision_on(answer(message, finish, tokens)).outcome == outcome


def test_an_empty_completion_of_which_tokens_are_counted_ended_itself() -> None:
    assert decision_on(answer("", "stop", 1)).outcome == "answered"
    assert decision_on(answer({"content": ""}, "stop", 1)).outcome == "no answer"


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"content": None, "reasoning_content": "X"}, "reasoning_content"),
        ({"content": "", "reasoning": "X"}, "field reasoning"),
        ({"content": None, "tool_calls": [{"id": "1"}]}, "tool_calls"),
        ({"content": None, "function_call": {"name": "f"}}, "function_call"),
        ({"content": "<musing>X</musing>"}, "<musing> </musing>"),
        ({"content": "<musing>X"}, "<musing>"),
    ],
)
def test_a_reply_without_text_says_where_it_stands(
    message: dict[str, Any], named: str
) -> None:
    decision = decision_on(answer(message))
    assert decision.outcome == "no answer" and named in decision.reason
    assert decision_on(answer(message, "length"), holds=True).outcome == "cut"


def test_a_refusal_of_the_model_is_none_of_the_filter() -> None:
    decision = decision_on(answer({"content": "<think>so", "refusal": "I can't"}))
    assert decision.outcome == "refused" and "the model" in decision.reason


@pytest.mark.parametrize(
    ("parts", "text", "thinking"),
    [
        ([{"type": "output_text", "text": "X"}], "X", ""),
        (
            [{"type": "reasoning", "reasoning": "Y"}, {"type": "text", "text": "X"}],
            "X",
            "Y",
        ),
        (
            [
                {"type": "reasoning", "summary": [{"type": "s", "text": "Y"}]},
                {"type": "text", "text": "X"},
            ],
            "X",
            "Y",
        ),
        (
            [{"type": "redacted_thinking", "data": "?"}, {"type": "text", "text": "X"}],
            "X",
            "",
        ),
    ],
)
def test_parts_of_known_types_are_read(
    parts: list[Any], text: str, thinking: str
) -> None:
    reply = read_reply(answer({"content": parts}))
    assert (reply.text, reply.thinking) == (text, thinking)


def test_a_part_of_an_unknown_type_is_another_form() -> None:
    parts = [{"type": "text", "text": "X"}, {"type": "image_url", "image_url": {}}]
    with pytest.raises(RequestError, match=r"another form.*image_url"):
        read_reply(answer({"content": parts}))


def test_a_prompt_that_was_not_read_or_was_filtered_keeps_its_reason() -> None:
    assert decide_outcome("X", "stop", rejection="context overflow") == (
        "not read",
        "context overflow",
    )
    assert decide_outcome("", "", rejection="content filter").outcome == "refused"
    assert decide_outcome("X", "stop", prompt_arrived=False).outcome == "not read"


@pytest.mark.parametrize("finish", ["end", "stop", "length"])
def test_in_process_the_end_of_every_reply_is_known(finish: str) -> None:
    """An empty reply that the model ended is a wrong answer; one that was cut is none."""
    for text in ("", "X"):
        decision = decide_outcome(text, finish, ended_itself=True)
        assert decision.outcome == ("cut" if finish == "length" else "answered")


def test_some_replies_are_answers_although_they_end_at_their_limit() -> None:
    kv = KVRetrieval(pairs=9, limit=1, positions=(3,))
    example = kv.evaluation()[0]
    right = {"output": f"It is {example.answers[0]} and so"}
    assert holds_answer(kv, example, right)
    assert not holds_answer(kv, example, {"output": "It is"})
    assert holds_answer(kv, replace(example, max_new_tokens=1), {"output": "It"})
    lettered = replace(example, choices=("A", "B"))
    assert holds_answer(kv, lettered, {"output": "A", "by": "letter"})
    assert holds_answer(kv, lettered, {"output": "A"})
    assert not holds_answer(kv, lettered, {"output": "So", "by": "none in the reply"})


def test_rescoring_changes_what_depends_on_the_task_alone() -> None:
    kv = KVRetrieval(pairs=9, limit=1, positions=(3,))
    example = kv.evaluation()[0]
    right = f"It is {example.answers[0]}"
    row = {"output": right, "finish": "length", "outcome": "cut", "reason": "old"}
    again = rescored_row(kv, example, {**row, "scores": {}})
    assert (again["outcome"], again["scores"]["accuracy"]) == ("answered", 1)
    assert "reason" not in again
    back = rescored_row(kv, example, {**again, "output": "It is"})
    assert (back["outcome"], back["scores"]) == ("cut", {})
    for outcome in set(get_args(Outcome)) - {"answered", "cut"}:
        kept = {**row, "outcome": outcome, "scores": {}}
        assert rescored_row(kv, example, kept) == kept
