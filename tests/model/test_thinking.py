"""Thinking in the texts of replies, as published models write it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posbench.model import thinking
from posbench.model.thinking import opens_thinking, split_thinking

HARMONY = (
    "<|channel|>analysis<|message|>The key is B.<|end|><|start|>assistant"
    "<|channel|>final<|message|>C<|return|>"
)


@pytest.mark.parametrize(
    ("text", "opened", "answer", "thinking", "is_open", "form"),
    [
        ("C", False, "C", "", False, ""),
        ("<think>so B</think>\n\nC", False, "C", "so B", False, "inline"),
        ("so B</think>C", False, "C", "so B", False, "opened"),
        ("so B</think>C", True, "C", "so B", False, "opened"),
        ("<think>so B", False, "", "so B", True, "inline"),
        ("so B", True, "", "so B", True, "opened"),
        ("<think></think>C", False, "C", "", False, "inline"),
        ("[THINK]so B[/THINK]C", False, "C", "so B", False, "inline"),
        ("◁think▷so B◁/think▷C", False, "C", "so B", False, "inline"),
        # Only what follows the last thinking is the answer.
        ("<think>a</think>B<think>b</think>C", False, "C", "aBb", False, "inline"),
        ("<think>a</think>B<think>b", False, "B", "a\nb", True, "inline"),
        (HARMONY, False, "C", "The key is B.", False, "inline"),
        (HARMONY[:50], False, "", "The key is B.", True, "inline"),
        (
            "analysisThe key is B.assistantfinalC",
            False,
            "C",
            "The key is B.",
            False,
            "inline",
        ),
        # A word, and no mark.
        ("I think B", False, "I think B", "", False, ""),
        ("analysis of B", False, "analysis of B", "", False, ""),
    ],
)
def test_the_answer_is_what_follows_the_thinking(
    text: str, opened: bool, answer: str, thinking: str, is_open: bool, form: str
) -> None:
    assert split_thinking(text, opened)[:4] == (answer, thinking, is_open, form)


def test_a_template_that_begins_the_thinking_is_seen() -> None:
    assert opens_thinking("<|assistant|><think>\n")
    assert not opens_thinking("<|assistant|><think>\n\n</think>\n\n")
    assert not opens_thinking("Answer:")


FORMS = {
    # the marks before and behind the thinking, as models and servers write them
    "thoughts": ("<thoughts>", "</thoughts>"),
    "reflection": ("<reflection>", "</reflection>"),
    "scratchpad": ("<scratchpad>", "</scratchpad>"),
    "analysis": ("<analysis>", "</analysis>"),
    "special tokens": ("<|thinking|>", "<|/thinking|>"),
    "other special tokens": ("<|inner_begin|>", "<|inner_end|>"),
    "unused tokens": ("<unused94>thought\n", "<unused95>"),
    "half a special token": ("<|channel>thought\n", "<channel|>"),
    "details": ('<details type="reasoning"><summary>Thought</summary>', "</details>"),
    "bold": ("**Thinking:**\n", "\n\n**Answer:** "),
    "heading": ("## Reasoning\n", "\n\n## Final answer\n"),
    "label": ("Thought process: ", "\nAnswer: "),
    "quoted": ("> ", "\n\n"),
    "invented tag": ("<musing depth='2'>", "</musing>"),
    "brackets": ("[REASONING]", "[/REASONING]"),
    "comment": ("<!-- ", " -->"),
    "fence": ("```thinking\n", "\n```\n"),
}


UNNAMED = ("other special tokens", "quoted", "invented tag")
"""Forms that do not say that it is thinking: what they hold may be the answer."""


@pytest.mark.parametrize("name", [name for name in FORMS if name not in UNNAMED])
def test_what_opens_and_closes_at_the_beginning_is_thinking(name: str) -> None:
    begin, end = FORMS[name]
    split = split_thinking(f"{begin}Could be X? Hm.{end}I cannot say.")
    assert split.answer == "I cannot say." and "Could be X? Hm." in split.thinking
    assert not split.unclear_marks and split.form == "inline"
    twice = split_thinking(f"{begin}X?{end}{begin}Hm.{end}I cannot say.")
    assert twice.answer == "I cannot say."


@pytest.mark.parametrize(
    "text",
    [
        *(f"{FORMS[name][0]}Could be X?{FORMS[name][1]}V." for name in UNNAMED),
        "<value>V</value> is the value.",
        "> V\n\nThis is the value.",
        "<|begin_of_box|>V<|end_of_box|> is the value.",
        "<思考>V?</思考>X",
        '{"thinking": "V?", "answer": "X"}',
        "*Thinking: V?*\n\nX",
        "Thought for 3 seconds\n\nX",
    ],
)
def test_of_marks_with_another_name_it_cannot_be_told(text: str) -> None:
    """Either part may hold the answer: nothing is cut away, and nothing scored."""
    split = split_thinking(text)
    assert split.unclear_marks and split.answer == text and not split.thinking


@pytest.mark.parametrize(
    ("text", "answer", "thinking"),
    [
        ("V\n<reasoning>Found.</reasoning>\nBye!", "V\nBye!", "Found."),
        ("<answer>V</answer><think>so</think>", "<answer>V</answer>", "so"),
        (
            "**Reasoning:** found\n**Answer:** V\n**Conclusion:** it was there",
            "V\n**Conclusion:** it was there",
            "found",
        ),
        ("~~~thinking\nX?\n~~~\nV", "V", "X?"),
        ("````thinking\nX?\n````\nV", "V", "X?"),
    ],
)
def test_an_answer_beside_thinking_stays(text: str, answer: str, thinking: str) -> None:
    assert split_thinking(text)[:3] == (answer, thinking, False)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("closes", [True, False])
def test_where_nothing_follows_it_cannot_be_told(name: str, closes: bool) -> None:
    begin, end = FORMS[name]
    split = split_thinking(f"{begin}Could be X? Hm.{end if closes else ''}")
    is_known = name in ("thoughts", "reflection", "scratchpad", "analysis") or (
        name == "special tokens"
    )
    if is_known:
        assert split.answer == "" and split.is_open == (not closes)
    else:
        assert split.unclear_marks and begin.split()[0][:4] in split.unclear_marks


@pytest.mark.parametrize(
    "text",
    [
        "<b>X</b>",
        "<b>X</b> is the value.",
        "<answer>X</answer>",
        "<final_answer>X</final_answer> as asked",
        "<p>The value is X.</p>",
        "<!DOCTYPE html>",
        '{"value": "X"}',
        "[X] is the value [1].",
        "(A) because it says so",
        "**X**",
        "## X\nas asked",
        "The answer: X",
        ">5 items",
        ">>> x = 5",
        "```python\nx\n```",
        "X <thoughtful/> Y",
        "I thought: X",
        "a <|im_end|>",
        "<3",
    ],
)
def test_a_plain_answer_stays_whole(text: str) -> None:
    assert split_thinking(text) == (text, "", False, "", "")


BEGINNINGS = (
    thinking.SPECIAL,
    thinking.TAG,
    thinking.BRACKET,
    thinking.THINKING_LABEL,
    thinking.JSON_FIELD,
    thinking.FENCE,
    thinking.QUOTED_LINES,
    re.compile("<!--"),
)


@pytest.mark.parametrize("beginning", BEGINNINGS, ids=lambda mark: mark.pattern[:12])
@given(data=st.data())
@settings(max_examples=30)
def test_no_section_is_overlooked(
    beginning: re.Pattern[str], data: st.DataObject
) -> None:
    text = data.draw(st.from_regex(beginning, fullmatch=True))
    assert thinking.SECTION_START.match(text)
