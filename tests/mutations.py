"""Ways in which a JSON file from outside is not what its reader expects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

DEEP = "[" * 100_000
HALF_CHARACTER = '"\\ud800"'
MARK = "the value that is replaced in the text"
WHOLE_FILES = {
    "empty": "",
    "list": "[]",
    "object": "{}",
    "null": "null",
    "number": "3",
    "text": '"text"',
    "list of numbers": "[1]",
    "not a number": "NaN",
    "infinity": "[1e999]",
    "deep": DEEP,
    "deep and closed": DEEP[:300] + "]" * 300,
    "half a character": HALF_CHARACTER,
    "zero byte": "\0",
}
"""Texts in place of a whole file."""
VALUES = {
    "null": "null",
    "wrong list": "[1]",
    "wrong object": '{"x": 1}',
    "not a number": "NaN",
    "deep": DEEP,
    "half a character": HALF_CHARACTER,
}
"""Texts in place of one value."""


def whole_files(data: Any) -> Iterator[tuple[str, str]]:
    """Name and text of every mutation of the whole file."""
    yield from WHOLE_FILES.items()
    text = json.dumps(data)
    yield "truncated", text[: len(text) // 2]


def missing(data: Any, keys: tuple[str | int, ...]) -> str:
    """The text of the data without one field."""
    changed = deepcopy(data)
    node = changed
    for key in keys[:-1]:
        node = node[key]
    del node[keys[-1]]
    return json.dumps(changed)


def replaced(data: Any, keys: tuple[str | int, ...], text: str) -> str:
    """The text of the data with that text, which may be no JSON, in place of one value, or for a new one."""
    changed = deepcopy(data)
    node = changed
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = MARK
    return json.dumps(changed).replace(json.dumps(MARK), text)


def single_fields(
    data: Any, fields: list[tuple[str | int, ...]]
) -> Iterator[tuple[str, str]]:
    """Name and text of every mutation of each field: it is missing, or has another value."""
    for keys in fields:
        name = ".".join(map(str, keys))
        yield f"{name} missing", missing(data, keys)
        for kind, text in VALUES.items():
            yield f"{name} {kind}", replaced(data, keys, text)
