"""Answers in the forms of real servers."""

from __future__ import annotations

from typing import Any

import pytest

from posbench.model.answers import (
    RequestError,
    choice_in_reply,
    first_choice,
    read_reply,
)


def answer(
    message: dict[str, Any], finish: str = "stop", **usage: Any
) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": finish, "message": message}
    return {"choices": [choice], "usage": usage, "model": "m"}


@pytest.mark.parametrize(
    "message",
    [
        {"content": "C", "reasoning_content": "so B"},  # DeepSeek, vLLM, llama.cpp
        {"content": "C", "reasoning": "so B"},  # OpenRouter, Groq
        {"content": "<think>so B</think>C"},
        {
            "content": [  # Mistral
                {"type": "thinking", "thinking": [{"type": "text", "text": "so B"}]},
                {"type": "text", "text": "C"},
            ]
        },
    ],
)
def test_the_thinking_of_every_server_is_told_apart(message: dict[str, Any]) -> None:
    reply = read_reply(answer(message))
    assert (reply.text, reply.thinking, reply.is_thinking) == ("C", "so B", False)


@pytest.mark.parametrize(
    ("usage", "thinking_tokens", "reply_tokens"),
    [
        ({"completion_tokens": 9}, None, 9),
        (
            {
                "completion_tokens": 9,
                "completion_tokens_details": {"reasoning_tokens": 7},
            },
            7,
            9,
        ),
        ({"completion_tokens": 9, "completion_tokens_details": None}, None, 9),
        # xAI leaves the thinking out of the tokens of the reply.
        (
            {
                "completion_tokens": 2,
                "reasoning_tokens": 7,
                "prompt_tokens": 5,
                "total_tokens": 14,
            },
            7,
            9,
        ),
        ({"completion_tokens": 9, "prompt_tokens": 5, "total_tokens": 0}, None, 9),
        ({}, None, None),
    ],
)
def test_tokens_are_counted_whole(
    usage: dict[str, Any], thinking_tokens: int | None, reply_tokens: int | None
) -> None:
    reply = read_reply(answer({"content": "C"}, **usage))
    assert (reply.thinking_tokens, reply.reply_tokens) == (
        thinking_tokens,
        reply_tokens,
    )


@pytest.mark.parametrize(
    ("message", "finish", "flags", "is_thinking"),
    [
        ({"content": None, "reasoning_content": "so"}, "length", {}, True),
        ({"content": None, "reasoning_content": "so"}, "stop", {}, False),
        ({"content": "C", "reasoning_content": "so"}, "length", {}, False),
        ({"content": "<think>so"}, "length", {}, True),
        # A stop text, or the end, in the middle of the thinking.
        ({"content": "<think>so"}, "stop", {}, True),
        ({"content": "so"}, "length", {"opened": True}, True),
        ({"content": "so"}, "length", {}, False),
        ({"content": ""}, "length", {"hidden": True}, True),
        ({"content": ""}, "length", {}, False),
        ({"content": "<think>so", "refusal": "no"}, "stop", {}, False),
    ],
)
def test_a_reply_may_end_in_its_thinking(
    message: dict[str, Any], finish: str, flags: dict[str, bool], is_thinking: bool
) -> None:
    assert read_reply(answer(message, finish), **flags).is_thinking == is_thinking


def test_a_total_of_other_tokens_makes_no_cut() -> None:
    """A total may hold a system prompt, or cached tokens, that neither of the two other counts has."""
    usage = {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 514}
    reply = read_reply(answer({"content": "C"}, "stop", **usage), max_tokens=20)
    assert reply.finish == "stop"
    cut = read_reply(answer({"content": "C"}, "stop", **usage), max_tokens=9)
    assert cut.finish == "length"


def test_a_prompt_of_no_tokens_is_one_that_was_not_counted() -> None:
    usage = {"prompt_tokens": 0, "completion_tokens": 9}
    reply = read_reply(answer({"content": "C"}, "stop", **usage), max_tokens=9)
    assert reply.prompt_tokens is None and reply.finish == "length"
    nothing = dict.fromkeys(usage, 0)
    assert read_reply(answer({"content": "C"}, **nothing)).reply_tokens is None


def test_a_null_reason_is_none() -> None:
    """As one that is left out: such a reply counts where it has fewer tokens than it may."""
    unstated = answer({"content": "C"}, completion_tokens=9)
    unstated["choices"][0]["finish_reason"] = None
    assert read_reply(unstated, max_tokens=20).finish == ""
    assert read_reply(unstated, max_tokens=9).finish == "length"


def test_what_is_no_number_of_tokens_is_a_failure() -> None:
    with pytest.raises(RequestError, match="usage"):
        read_reply(answer({"content": "C"}, completion_tokens="many"))


def test_of_several_choices_the_one_of_index_0_counts_if_there_is_one() -> None:
    first, second = ({"index": i, "text": text} for i, text in enumerate("XY"))
    assert first_choice({"choices": [second, first]}) == first
    assert first_choice({"choices": [{"text": "X"}]}) == {"text": "X"}
    assert first_choice({"choices": [first, {**second, "index": 0}]}) == {}


@pytest.mark.parametrize("finish", ["length", "MAX_TOKENS", "model_length"])
def test_every_word_for_no_more_tokens_means_a_cut_reply(finish: str) -> None:
    assert read_reply(answer({"content": "C"}, finish)).finish == "length"


@pytest.mark.parametrize("finish", ["error", "abort", "stop"])
def test_a_reply_with_an_error_is_none(finish: str) -> None:
    failed = answer({"content": "C"}, finish)
    if finish == "stop":
        failed["choices"][0]["error"] = {"message": "lost"}
    with pytest.raises(RequestError, match="ended with"):
        read_reply(failed)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("I", "I"),
        ("I is right", "I"),
        ("I. Because", "I"),
        ("I am not sure", ""),
        ("I'm not sure", ""),
        ("I think it is option C", ""),
        ("The answer I would give is unclear", ""),
        ("I think the answer is C", "C"),
        ("answer I", "I"),
    ],
)
def test_a_person_is_no_choice(text: str, choice: str) -> None:
    assert choice_in_reply(text, [f" {letter}" for letter in "ABCDEFGHI"]) == choice
