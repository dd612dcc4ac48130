"""JSON and YAML from outside: of bounded size and depth, finite numbers and whole characters, of a declared shape."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

from posbench.errors import UserError
from posbench.schema import check_shape

MAX_FILE_BYTES = 1 << 28
"""Largest JSON or YAML file that is read: files of posbench and of checkpoints are far smaller."""
MAX_DEPTH = 100
"""Deepest nesting of lists and mappings; functions that walk through data recurse once per level."""
MAX_YAML_VALUES = 10_000_000
"""Values of a YAML text: a few lines of aliases of aliases spell out billions."""
TOO_DEEP = f"lists and mappings nested deeper than {MAX_DEPTH}"
YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The C library's loader, many times faster, where there is one."""
CORRECT_FILE = "correct the file"
"""Hint where a file that a user wrote is wrong."""
Object = dict[str, Any]
"""Shape of a JSON object or YAML mapping whose fields differ."""
Objects = list[dict[str, Any]]
"""Shape of a list of objects."""


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Return the data of a JSON text.

    Args:
        text: The text.
        finite: Whether numbers must be finite; posbench itself writes NaN where a number has no interval.

    Raises:
        ValueError: It is no JSON in UTF-8, nested too deeply, or holds a number that is not finite or half of a
            surrogate pair, which no file can hold.
    """
    if isinstance(text, bytes):
        text = text.decode()
    checks: dict[str, Any] = {}
    if finite:
        checks = {"parse_constant": _refuse_constant, "parse_float": _finite_number}
    try:
        data = json.loads(text, **checks)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _need_shallow(data)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(data, ensure_ascii=False).encode()
    return data


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no finite number")


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no finite number")
    return number


def _need_shallow(data: Any) -> None:
    """Raise ValueError for data that is nested deeper than :data:`MAX_DEPTH`."""
    level = [data]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                inner += node.values()
            elif isinstance(node, list):
                inner += node
        if not inner:
            return
        level = inner
    raise ValueError(TOO_DEEP)


def parse_yaml(text: str) -> Any:
    """Return the data of a YAML text.

    Raises:
        ValueError: It is no YAML, is nested too deeply, or an alias is nested in its own anchor.
    """
    try:
        _need_bounded_yaml(text)
        return yaml.load(text, YAML)
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML: {error}") from error


def _need_bounded_yaml(text: str) -> None:
    """Raise ValueError before the loader, which calls itself for each level, meets too many levels or values."""
    open_anchors: list[str | None] = []
    # values in each collection that is open, aliases spelled out; the first is the whole text
    num_values = [0]
    num_values_of_anchor: dict[str | None, int] = {}
    for event in yaml.parse(text, YAML):
        if isinstance(event, yaml.CollectionStartEvent):
            open_anchors.append(event.anchor)
            num_values.append(1)
        elif isinstance(event, yaml.CollectionEndEvent):
            ended = num_values.pop()
            num_values_of_anchor[open_anchors.pop()] = ended
            num_values[-1] += ended
        elif isinstance(event, yaml.ScalarEvent):
            num_values[-1] += 1
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in open_anchors:
                raise ValueError(f"*{event.anchor} stands inside what it names")
            num_values[-1] += num_values_of_anchor.get(event.anchor, 1)
        if len(open_anchors) > MAX_DEPTH:
            raise ValueError(TOO_DEEP)
        if num_values[-1] > MAX_YAML_VALUES:
            raise ValueError(f"more than {MAX_YAML_VALUES} values, aliases spelled out")


def read_text(file: Path) -> str:
    """Return the text of a file; ValueError where it is too large or no UTF-8."""
    size = file.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{size} bytes, more than {MAX_FILE_BYTES}")
    return file.read_text(encoding="utf-8")


def read_json(
    file: Path, shape: Any = Object, *, hint: str, finite: bool = True
) -> Any:
    """Return the data of a JSON file.

    Args:
        file: The file.
        shape: Type of the data: of plain data, or a dataclass.
        hint: The next step where it is not as it should be.
        finite: See :func:`parse_json`.

    Raises:
        UserError: It cannot be parsed, or is of another shape; the error names file, field and value.
    """
    try:
        data = parse_json(read_text(file), finite=finite)
    except ValueError as error:
        raise unreadable(file, error, "JSON as posbench writes it", hint) from error
    return check_shape(data, shape, str(file), hint)


def read_yaml(file: Path, shape: Any = Object, *, hint: str) -> Any:
    """Return the data of a YAML file; arguments and errors as of :func:`read_json`."""
    try:
        data = parse_yaml(read_text(file))
    except ValueError as error:
        raise unreadable(file, error, "valid YAML", hint) from error
    return check_shape(data, shape, str(file), hint)


def unreadable(file: Path, error: Exception, allowed: str, hint: str) -> UserError:
    """The error of a file that cannot be parsed."""
    reason = " ".join(str(error).split())
    return UserError(file.name, str(file), allowed, f"{hint} ({reason})")
