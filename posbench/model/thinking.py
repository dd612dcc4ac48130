"""Separate the thinking that a model writes before its answer from the answer in the text of a reply."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

THINKING_MARKS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<thoughts>", "</thoughts>"),
    ("<reasoning>", "</reasoning>"),
    ("<reflection>", "</reflection>"),
    ("<scratchpad>", "</scratchpad>"),
    ("<analysis>", "</analysis>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|thinking|>", "<|/thinking|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""Begin and end marks of thinking in plain text, anywhere in a reply."""
CHANNEL = re.compile(
    r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)"
    r"(?=<\|end\|>|<\|return\|>|<\|call\|>|<\|start\|>|<\|channel\|>|\Z)",
    re.S,
)
"""A message of gpt-oss with the name of its channel: ``analysis`` is thinking, ``final`` the answer."""
BARE_CHANNELS = re.compile(r"\A(?:analysis)(.*?)(?:assistantfinal)(.*)\Z", re.S)
"""Both channels in a reply from which the server dropped the special tokens."""

# A section of any name that opens at the beginning of a reply and closes before its answer may be thinking.
TAG = re.compile(r"<\s?([^\W\d_][\w:.-]*)(?:\s[^<>]*)?>")
"""An opening tag."""
BRACKET = re.compile(r"([\[{(【«])\s*([^\W\d_][\w -]{0,30}?)\s*([\]})】»])")
"""A name in brackets."""
SPECIAL = re.compile(
    r"</?\|[^<>|\n]{1,40}\|?>|<[^<>|\n/]{1,40}\|>|<(?:unused|reserved)[^<>\n]{0,20}>"
)
"""A special token written as text."""
ANSWER_NAMES = "answer final final_answer response output result solution conclusion"
TEXT_NAMES = frozenset(
    f"""{ANSWER_NAMES} a abbr address article aside b big blockquote body br caption cite code dd del dfn div dl doctype
    dt em figure font footer form h1 h2 h3 h4 h5 h6 head header hr html i img input ins kbd label li link main mark meta
    nav ol option p pre q quote s samp script section select small span strike strong style sub sup table tbody td
    textarea th thead time title tr tt u ul url var xml""".split()
)
"""Names of tags that belong to an answer: names for an answer, and tags of HTML and BBCode."""
THINKING_WORD = (
    r"(?:(?:my|the|internal|inner|hidden|step[ -]by[ -]step)\s+)?"
    r"(?:think(?:ing)?|thoughts?|reasoning|reflections?|analysis|scratch ?pad|deliberation|monologue|chain of thought)"
    r"(?:\s+(?:process|steps?|trace))?"
)
NAMES_THINKING = re.compile(rf"(?<![a-z]){THINKING_WORD}", re.I)
THINKING_LINE = re.compile(rf"{THINKING_WORD}\s*\n", re.I)
ANSWER_WORD = (
    r"(?:(?:my|the|final)\s+)*(?:answer|response|reply|conclusion|result|solution)"
)
THINKING_LABEL = re.compile(
    rf"#{{1,6}}\s*{THINKING_WORD}\s*:?\s*(?:\n|\Z)"
    rf"|(?:\*\*|__){THINKING_WORD}\s*:?\s*(?:\*\*|__)\s*:?"
    r"|[*_]?(?:thinking|thoughts?|reasoning|chain of thought)(?:\s+process)?\s*:"
    r"|thought for \d+ \w+",
    re.I,
)
"""Headings and labels before thinking."""
ANSWER_LABEL = re.compile(
    rf"^\s*(?:#{{1,6}}\s*{ANSWER_WORD}\s*:?\s*$"
    rf"|(?:\*\*|__){ANSWER_WORD}\s*:?\s*(?:\*\*|__)\s*:?"
    rf"|{ANSWER_WORD}\s*:)",
    re.I | re.M,
)
"""Headings and labels before the answer that follows it."""
FENCE = re.compile(rf"(`{{3,}}|~{{3,}})\s*{THINKING_WORD}\b[^\n]*\n", re.I)
"""Beginning of a code block with such a name."""
JSON_FIELD = re.compile(rf"\{{\s*\"{THINKING_WORD}\"\s*:", re.I)
"""Beginning of a JSON object with such a field."""
QUOTED_LINES = re.compile(r"(?:>(?:[ \t][^\n]*)?(?:\n|\Z))+")
"""Quoted lines."""
SECTION_START = re.compile(
    r"[<\[{(【«#*_`~>]|thinking|thought|reasoning|chain of thought", re.I
)
"""How a text begins that may begin with a section; most replies do not."""


Form = Literal["", "field", "inline", "opened", "hidden"]
"""How a server returns thinking: not at all; in a field; between marks in the text; in the text without the first mark,
which the chat template wrote; hidden."""


class SplitReply(NamedTuple):
    """The parts of a reply.

    Attributes:
        answer: The text after the thinking; the whole text if there is none.
        thinking: The thinking, without its marks.
        is_open: Whether the reply ended in the thinking.
        form: ``inline`` or ``opened``; empty where there is no thinking.
        unclear_marks: Marks at the beginning of ``answer`` that may enclose thinking or an answer; empty if there are
            none.
    """

    answer: str
    thinking: str = ""
    is_open: bool = False
    form: Form = ""
    unclear_marks: str = ""


def opens_thinking(prompt: str) -> bool:
    """Return whether a prompt ends with the mark that begins thinking, as chat templates of some models write it."""
    return prompt.rstrip().endswith(tuple(begin for begin, _ in THINKING_MARKS))


def split_thinking(text: str, opened: bool = False) -> SplitReply:
    """Split a reply into thinking and answer.

    The text up to the last closing mark of :data:`THINKING_MARKS` is thinking, even without an opening mark; but text
    before the first opening mark is not. A section in other marks at the beginning of the rest is thinking, too, if the
    marks name it so and close before the end. With marks of any other name it is unclear.

    Args:
        text: The text of a reply.
        opened: Whether the chat template wrote the mark that begins thinking, which the reply then lacks.
    """
    # gpt-oss.
    if "<|channel|>" in text:
        return _split_channels(text)
    # The same, where a server has removed the special tokens and left their names.
    bare = BARE_CHANNELS.match(text)
    if bare:
        return SplitReply(bare[2].lstrip(), bare[1].strip(), form="inline")
    split = _split_known_marks(text, opened)
    while not split.is_open:
        section = _first_section(split.answer.lstrip("\ufeff \t\r\n"))
        if section is None:
            break
        if not section.rest.strip() or not section.is_named:
            return split._replace(unclear_marks=section.marks)
        split = SplitReply(
            section.rest.lstrip(),
            _joined(split.thinking, section.text.strip()),
            form=split.form or "inline",
        )
    return split


def _split_known_marks(text: str, opened: bool) -> SplitReply:
    """Split a reply into answer and thinking at pairs of marks such as ``<think>`` and ``</think>``.

    Args:
        text: The reply.
        opened: The chat template wrote the first mark, so that the reply begins inside the thinking.
    """
    form: Form = "opened" if opened else ""
    ends = [
        (text.rfind(end) + len(end), end) for _, end in THINKING_MARKS if end in text
    ]
    thinking = ""
    answer = text
    if ends:
        # All up to the last closing mark is thinking, but for text before the first opening one.
        index, end = max(ends)
        before = text[: index - len(end)]
        starts = [before.find(begin) for begin, _ in THINKING_MARKS if begin in before]
        form = "inline" if starts else "opened"
        lead = before[: min(starts)].strip() if starts and not opened else ""
        if any(end in lead for _, end in THINKING_MARKS):
            lead = ""  # closes the mark that the chat template opened
        thinking = _without_marks(before[len(lead) :] if lead else before)
        answer = _joined(lead, text[index:].lstrip())
        opened = False
    begins = [
        (answer.find(begin), begin) for begin, _ in THINKING_MARKS if begin in answer
    ]
    # A mark is opened and not closed: the reply was cut while thinking.
    if begins:
        index, begin = min(begins)
        rest = _without_marks(answer[index + len(begin) :])
        parts = (answer[:index].strip(), _joined(thinking, rest))
        return SplitReply(*parts, is_open=True, form=form or "inline")
    if opened:
        return SplitReply("", text.strip(), is_open=True, form=form)
    return SplitReply(answer, thinking, form=form)


def _split_channels(text: str) -> SplitReply:
    """Split a reply of gpt-oss by its special tokens: the channel ``final`` is the answer, all others are thinking."""
    thinking: list[str] = []
    answers: list[str] = []
    for match in CHANNEL.finditer(text):
        parts = answers if match[1] == "final" else thinking
        parts.append(match[2].strip())
    texts = ("\n".join(answers), "\n".join(thinking))
    return SplitReply(*texts, is_open=not answers, form="inline")


class _Section(NamedTuple):
    """A section in marks at the beginning of a text.

    Attributes:
        text: The text between the marks.
        rest: The text after the closing mark; empty if there is none.
        marks: The marks.
        is_named: Whether they say that it is thinking.
    """

    text: str
    rest: str
    marks: str
    is_named: bool = True


def _first_section(text: str) -> _Section | None:
    """Return the section in marks of any kind at the beginning of a text; None if it begins with no mark."""
    if not SECTION_START.match(text):
        return None
    readers: tuple[Callable[[str], _Section | None], ...] = (
        _special_section,
        _tag_section,
        _bracket_section,
        _comment_section,
        _label_section,
        _json_section,
        _fence_section,
        _quote_section,
    )
    return next((section for read in readers if (section := read(text))), None)


def _section(text: str, begin: re.Match[str], ends: list[re.Match[str]]) -> _Section:
    """Return the section of a text from its first mark to the last mark that may end it; to the end without one.

    Args:
        text: The text.
        begin: The first mark.
        ends: Marks that may end the section, in their order.
    """
    if not ends:
        return _Section(text[begin.end() :], "", begin[0].strip())
    end = ends[-1]
    rest = text[end.end() :]
    if begin[0] in rest:
        rest = ""  # it opens again, and does not close
    marks = f"{begin[0].strip()} {end[0].strip()}"
    inside = text[begin.end() : end.start()]
    is_named = bool(NAMES_THINKING.search(begin[0]) or THINKING_LINE.match(inside))
    return _Section(inside, rest, marks, is_named)


def _special_section(text: str) -> _Section | None:
    """Return the section that begins with a special token such as ``<|channel|>``; None if the text does not."""
    begin = SPECIAL.match(text)
    if not begin or _core(begin[0]) in TEXT_NAMES:
        return None
    others = [
        match
        for match in SPECIAL.finditer(text, begin.end())
        if match[0] != begin[0] and _core(match[0]) not in TEXT_NAMES
    ]
    # A mark of the same name ends it; else any other special token does.
    same = [match for match in others if _core(match[0]) == _core(begin[0])]
    return _section(text, begin, same or others)


def _core(token: str) -> str:
    """Return the name in a special token without words for begin and end: ``<|end_of_x|>`` is ``x``."""
    name = token.strip("<>|/").lower().rstrip("0123456789")
    name = re.sub(r"^(?:begin|start|end)_(?:of_)?", "", name)
    return re.sub(r"_(?:begin|start|end)$", "", name)


def _tag_section(text: str) -> _Section | None:
    """Return the section that begins with a tag such as ``<reasoning>``; None if the text does not."""
    begin = TAG.match(text)
    if not begin or begin[1].lower() in TEXT_NAMES or begin[0].endswith("/>"):
        return None
    ends = re.finditer(rf"</{re.escape(begin[1])}\s*>", text, re.I)
    return _section(text, begin, list(ends))


def _bracket_section(text: str) -> _Section | None:
    """Return the section that begins with a name in brackets such as ``[THINK]``; None if the text does not."""
    begin = BRACKET.match(text)
    if not begin or begin[2].lower() in TEXT_NAMES:
        return None
    opening, name, closing = map(re.escape, begin.groups())
    ends = list(re.finditer(rf"{opening}\s*/\s*{name}\s*{closing}", text, re.I))
    is_named = re.fullmatch(THINKING_WORD, begin[2], re.I)
    # Without an end, only a name that means thinking counts as a mark.
    return _section(text, begin, ends) if ends or is_named else None


def _comment_section(text: str) -> _Section | None:
    begin = re.match("<!--", text)
    if not begin:
        return None
    # A comment is no answer.
    return _section(text, begin, list(re.finditer("-->", text)))._replace(is_named=True)


def _label_section(text: str) -> _Section | None:
    """Return the section from a label such as ``Thinking:`` to a label of the answer; None if the text has no such."""
    begin = THINKING_LABEL.match(text)
    if not begin:
        return None
    end = ANSWER_LABEL.search(text, begin.end())
    if not end:
        return _Section(text[begin.end() :], "", begin[0].strip())
    marks = f"{begin[0].strip()} {end[0].strip()}"
    return _Section(text[begin.end() : end.start()], text[end.end() :], marks)


def _json_section(text: str) -> _Section | None:
    """Return the whole text as a section if it is a JSON object whose first field names thinking; else None."""
    begin = JSON_FIELD.match(text)
    return _Section(text, "", begin[0].strip()) if begin else None


def _fence_section(text: str) -> _Section | None:
    """Return the section inside a fenced block at the beginning of a text; None if it begins with none."""
    begin = FENCE.match(text)
    if not begin:
        return None
    end = re.compile(rf"^{begin[1]}[ \t]*$", re.M).search(text, begin.end())
    if not end:
        return _Section(text[begin.end() :], "", begin[0].strip())
    inner = text[begin.end() : end.start()]
    return _Section(inner, text[end.end() :], f"{begin[0].strip()} {begin[1]}")


def _quote_section(text: str) -> _Section | None:
    """Quoted lines, which may be the answer itself."""
    begin = QUOTED_LINES.match(text)
    if not begin:
        return None
    return _Section(begin[0], text[begin.end() :], "> (quoted lines)", is_named=False)


def _without_marks(text: str) -> str:
    for begin, end in THINKING_MARKS:
        text = text.replace(begin, "").replace(end, "")
    return text.strip()


def _joined(*parts: str) -> str:
    return "\n".join(part for part in parts if part)
