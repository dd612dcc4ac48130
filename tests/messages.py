"""Messages compared by what they name: field, value, and words of what is allowed and of the next step.

A test names keys, choices, numbers and commands, so that it fails where one of them is wrong, and not where a
sentence is worded differently. What an error looks like as a line is tested in ``test_errors.py``.
"""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from posbench.errors import UserError

ANY = object()
"""Any value: for one that the test cannot know, such as a redacted address."""
MAX_WORDS = 3
"""Words of one token at most, such as a verdict or a command; more are a sentence."""
LINE = re.compile(
    r"(?:.* )?posbench: (?P<field>.+?)(?: = (?P<value>.*?):|:(?: (?P<wrong>.*?);)?)"
    r" allowed: (?P<allowed>.*); next: (?P<hint>.*)"
)
"""What ``UserError`` prints, and in ``wrong`` what is wrong with a line of a file."""

Tokens = str | tuple[str, ...]


class Fault(NamedTuple):
    """One refusal, raised or printed; ``value`` as Python writes it."""

    field: str
    value: str
    allowed: str
    hint: str

    @classmethod
    def of(cls, error: UserError) -> "Fault":
        """The refusal that an error stands for."""
        return cls(error.field, _written(error.value), error.allowed, error.hint)


@contextmanager
def refused(
    field: str,
    value: object = ANY,
    *,
    allowed: Tokens = (),
    hint: Tokens = (),
    error: type[UserError] = UserError,
) -> Iterator[Any]:
    """Pass where the block raises one error of that field and value, naming those tokens.

    Args:
        field: The field that the error names.
        value: Its value.
        allowed: What the error must name as allowed: keys, choices, numbers.
        hint: What its next step must name.
        error: Class of the error.
    """
    with pytest.raises(error) as caught:
        yield caught
    faults = [Fault.of(fault) for fault in caught.value.faults]
    _check(faults, field, value, allowed, hint)


def line_refused(
    file: Path | str, number: int, *named: str, key: str = "task.path"
) -> AbstractContextManager[Any]:
    """Pass where the block refuses that line of a file of a task, naming those fields and words."""
    return refused(f"{key}: {file}, line {number}", "", allowed=named, hint="line")


def faults_of(stderr: str) -> list[Fault]:
    """The refusals that the command line printed, one a line; other lines are left out."""
    found = [match for match in map(LINE.match, stderr.splitlines()) if match]
    return [
        Fault(
            match["field"],
            match["value"] or repr(match["wrong"] or ""),
            match["allowed"],
            match["hint"],
        )
        for match in found
    ]


def assert_refused(
    stderr: str,
    field: str,
    value: object = ANY,
    *,
    allowed: Tokens = (),
    hint: Tokens = (),
) -> None:
    """Fail unless a printed line refuses that value of that field, naming those tokens (see ``refused``)."""
    _check(faults_of(stderr), field, value, allowed, hint)


def assert_names(text: str, *tokens: str) -> None:
    """Fail unless a text, such as a headline, names all tokens, however its lines break."""
    assert text and not _missing(text, tokens), (
        f"{_missing(text, tokens)} not in {text}"
    )


def assert_line_names(text: str, *tokens: str) -> None:
    """Fail unless one line of a text names all tokens."""
    named = [line for line in text.splitlines() if not _missing(line, tokens)]
    assert named, f"no line with {tokens} in {text}"


def _check(
    faults: list[Fault], field: str, value: object, allowed: Tokens, hint: Tokens
) -> None:
    """Fail unless one of the faults names all that."""
    of_field = [
        fault
        for fault in faults
        if fault.field == field and (value is ANY or fault.value == _written(value))
    ]
    assert of_field, f"{field} = {value!r} is not refused: {faults}"
    missing = [
        (_missing(fault.allowed, allowed), _missing(fault.hint, hint))
        for fault in of_field
    ]
    assert ([], []) in missing, f"{missing} not named by {of_field}"


def _written(value: object) -> str:
    """A value as a message shows it."""
    return " ".join(repr(value).split())


def _missing(text: str, tokens: Tokens) -> list[str]:
    """The tokens that a text does not name as whole words, whatever its case and its line breaks."""
    tokens = (tokens,) if isinstance(tokens, str) else tokens
    text = " ".join(text.split())
    for token in tokens:
        assert len(token.split()) <= MAX_WORDS, f"{token!r} is a sentence"
    return [token for token in tokens if not _names(text, token)]


def _names(text: str, token: str) -> bool:
    """Whether a text has a token that no longer word or number contains."""
    start = r"(?<![\w.])" if re.match(r"\w", token) else ""
    end = r"(?!\w|\.\d)" if re.search(r"\w$", token) else ""
    return re.search(start + re.escape(token) + end, text, re.IGNORECASE) is not None
