"""Keep secrets out of every file: values that hold them are masked where they enter."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from urllib.parse import quote

MASK = "***"
SECRET_NAME = re.compile(
    r"key|token|secret|pass(?![a-z])|passw|passphrase|auth(?!or(?!i))|session|cookie|credential|bearer",
    re.I,
)
"""Names of fields that hold a secret, if it is a text."""
PLAIN_NAME = re.compile(
    r"(?:(?:bos|eos|pad|unk|sep|cls|mask|stop|start|end|image|special|think|thinking|reasoning|budget|max|min|num|add"
    r"|added|skip|first|last|prompt|completion|new|output|input|truncate)_)*tokens?(?:_ids?)?|tokenizer|keywords?",
    re.I,
)
"""Names that match :data:`SECRET_NAME` and hold no secret: settings of tokens."""
PLACEHOLDERS = (
    "ollama",
    "lm-studio",
    "not-needed",
    "sk-no-key-required",
    "no-key-required",
    "dummy-key",
)
"""Keys in manuals of local servers that need none."""
MIN_CHARACTERS = 6
"""Shortest text that is masked: a shorter one is no secret, and may be a word of a reply (EMPTY)."""
NAME = re.compile(r"([\w.-]+)\s*[:=]\s*")
VALUE = re.compile(r"'[^']*'|\"[^\"]*\"|\{[^{}]*\}|\[[^\[\]]*\]|[^,{}\[\]]+")
"""A name and its value in an argument of the command line, also inside of braces."""


def is_secret_name(name: str) -> bool:
    """Return whether a field with this name holds a secret."""
    last = name.rpartition(".")[2]
    return bool(SECRET_NAME.search(last)) and not (
        PLAIN_NAME.fullmatch(last) and last.lower() != "token"
    )


def secrets_in(value: Any, is_secret: bool = False) -> list[str]:
    """List the texts under secret-like names in plain data, long ones first.

    Args:
        value: The data.
        is_secret: Whether the data itself is under such a name.
    """
    found = []
    if isinstance(value, Mapping):
        for name, entry in value.items():
            found += secrets_in(entry, is_secret or is_secret_name(str(name)))
    elif isinstance(value, list | tuple):
        for entry in value:
            found += secrets_in(entry, is_secret)
    elif is_secret and isinstance(value, str):
        found.append(value)
    return sorted(filter(is_long_enough, found), key=len, reverse=True)


def is_long_enough(text: str) -> bool:
    """Return whether a text is long enough to be masked as a secret without masking plain words."""
    return len(text) >= MIN_CHARACTERS and text.lower() not in PLACEHOLDERS


def written_forms(secret: str) -> list[str]:
    """List the forms in which a secret may be repeated: unchanged, in an address, and in base64."""
    encoded = base64.b64encode(secret.encode()).decode().rstrip("=")
    return list(dict.fromkeys([secret, quote(secret, safe=""), encoded]))


def without_secrets(value: Any, secrets: Collection[str]) -> Any:
    """Return plain data with :data:`MASK` in the place of each secret, in keys and values."""
    if not secrets:
        return value
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, MASK)
        return value
    if isinstance(value, list):
        return [without_secrets(entry, secrets) for entry in value]
    if isinstance(value, Mapping):
        return {
            without_secrets(name, secrets): without_secrets(entry, secrets)
            for name, entry in value.items()
        }
    return value


def without_named_secrets(value: Any, is_secret: bool = False) -> Any:
    """Return plain data with :data:`MASK` in the place of every text under the name of a secret."""
    if isinstance(value, Mapping):
        return {
            name: without_named_secrets(entry, is_secret or is_secret_name(str(name)))
            for name, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_named_secrets(entry, is_secret) for entry in value]
    return MASK if is_secret and isinstance(value, str) else value


def command_line(arguments: Iterable[str]) -> str:
    """Return the command line of these arguments as a shell takes it, with :data:`MASK` for typed secrets.

    Args:
        arguments: What is typed behind ``posbench``.
    """
    return shlex.join(["posbench", *map(without_typed_secrets, arguments)])


def without_typed_secrets(argument: str) -> str:
    """Return an argument of the command line with :data:`MASK` for secrets in ``model.extra_body``."""
    if "extra_body" not in argument:
        return argument

    key, equals, _ = argument.partition("=")
    if is_secret_name(key):
        return f"{key}{equals}{MASK}"
    parts = []
    position = 0
    while match := NAME.search(argument, position):
        parts.append(argument[position : match.end()])
        position = match.end()
        value = VALUE.match(argument, position)
        if value and is_secret_name(match[1]):
            parts.append(MASK)
            position = value.end()
    return "".join(parts) + argument[position:]
