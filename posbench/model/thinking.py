"""Thinking that a model writes before its answer, told apart from the answer in the text of a reply."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

MARKS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""How models mark the beginning and the end of thinking in plain text."""
CHANNEL = re.compile(
    r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)"
    r"(?=<\|end\|>|<\|return\|>|<\|call\|>|<\|start\|>|<\|channel\|>|\Z)",
    re.S,
)
"""A message of gpt-oss with the name of its channel: ``analysis`` is thinking, ``final`` the answer."""
BARE_CHANNELS = re.compile(r"\A(?:analysis)(.*?)(?:assistantfinal)(.*)\Z", re.S)
"""The same where the server dropped the special tokens."""


Form = Literal["", "field", "inline", "opened", "hidden"]
"""How a server gives thinking: there is none; in a field of its own; between marks in the text; as text that lacks the
first mark, which the chat template wrote; not shown."""


class SplitReply(NamedTuple):
    """The parts of a reply.

    Attributes:
        answer: What follows the thinking; the whole text where there is none.
        thinking: The thinking, without its marks.
        is_open: Whether the reply ended in the thinking.
        form: ``inline`` or ``opened``; empty where there is no thinking.
    """

    answer: str
    thinking: str = ""
    is_open: bool = False
    form: Form = ""


def opens_thinking(prompt: str) -> bool:
    """Return whether a prompt ends with the mark that begins thinking, as chat templates of some models write it."""
    return prompt.rstrip().endswith(tuple(begin for begin, _ in MARKS))


def split_thinking(text: str, opened: bool = False) -> SplitReply:
    """Tell the thinking in a reply from its answer.

    All up to the last mark that ends thinking is thinking, whether or not the reply has the mark that begins it.

    Args:
        text: The text of a reply.
        opened: Whether the chat template wrote the mark that begins thinking, which the reply then lacks.
    """
    if "<|channel|>" in text:
        return _split_channels(text)
    bare = BARE_CHANNELS.match(text)
    if bare:
        return SplitReply(bare[2].lstrip(), bare[1].strip(), form="inline")
    form: Form = "opened" if opened else ""
    ends = [(text.rfind(end) + len(end), end) for _, end in MARKS if end in text]
    thinking = ""
    answer = text
    if ends:
        index, end = max(ends)
        before = text[: index - len(end)]
        form = "inline" if any(begin in before for begin, _ in MARKS) else "opened"
        thinking = _without_marks(before)
        answer = text[index:].lstrip()
        opened = False
    begins = [(answer.find(begin), begin) for begin, _ in MARKS if begin in answer]
    if begins:
        index, begin = min(begins)
        rest = _without_marks(answer[index + len(begin) :])
        parts = (answer[:index].strip(), _joined(thinking, rest))
        return SplitReply(*parts, is_open=True, form=form or "inline")
    if opened:
        return SplitReply("", text.strip(), is_open=True, form=form)
    return SplitReply(answer, thinking, form=form)


def _split_channels(text: str) -> SplitReply:
    """The parts of a reply of gpt-oss with its special tokens."""
    thinking: list[str] = []
    answers: list[str] = []
    for match in CHANNEL.finditer(text):
        parts = answers if match[1] == "final" else thinking
        parts.append(match[2].strip())
    texts = ("\n".join(answers), "\n".join(thinking))
    return SplitReply(*texts, is_open=not answers, form="inline")


def _without_marks(text: str) -> str:
    for begin, end in MARKS:
        text = text.replace(begin, "").replace(end, "")
    return text.strip()


def _joined(*parts: str) -> str:
    return "\n".join(part for part in parts if part)
