"""Plain data checked against a dataclass: a mistake becomes one UserError that names the key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from posbench.errors import UserError


def build(cls: type[Any], data: Mapping[str, Any], where: str) -> Any:
    """Check plain data against a dataclass and make the object.

    Raises:
        UserError: Unknown key, missing key or wrong type, with the dotted name.
    """
    allowed = [f.name for f in fields(cls)]
    for key in data:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            raise UserError(
                f"{where}.{key}",
                data[key],
                f"keys {', '.join(allowed)}",
                f"did you mean {where}.{near[0]}?" if near else "remove the key",
            )
    kinds = get_type_hints(cls)
    for key, value in data.items():
        # pydantic reads true as 1; nobody means a batch size of true.
        if isinstance(value, bool) and "bool" not in _words(kinds[key]):
            raise UserError(_dotted(where, key), value, _words(kinds[key]), f"set {_dotted(where, key)}=...")
    try:
        return TypeAdapter(with_config(ConfigDict(allow_inf_nan=False))(cls)).validate_python(dict(data))
    except ValidationError as error:
        # A union reports every branch; the shortest location names the field itself.
        first = min(error.errors(), key=lambda e: len(e["loc"]))
        name = str(first["loc"][0]) if first["loc"] else ""
        raise UserError(
            _dotted(where, name),
            data.get(name),
            _words(kinds.get(name, Any)),
            f"set {_dotted(where, name)}=... ({first['msg'].lower()})",
        ) from error


def _dotted(where: str, name: str) -> str:
    return f"{where}.{name}".strip(".")


def _words(kind: Any) -> str:
    """A type annotation in words."""
    plain = {
        int: "a whole number",
        float: "a finite number",
        str: "text",
        bool: "true or false (bool)",
        NoneType: "null",
    }
    origin, args = get_origin(kind), get_args(kind)
    if kind in plain:
        return plain[kind]
    if origin is Literal:
        return " | ".join(str(a) for a in args)
    if origin in (Union, UnionType):
        return ", or ".join(_words(a) for a in args)
    if origin is tuple and args[-1] is Ellipsis:
        return f"a list [...] of: {_words(args[0])}"
    if origin is tuple:
        return f"a list of exactly {len(args)}: [{', '.join(_words(a) for a in args)}]"
    return "a mapping" if origin is dict else "a value"


def required(cls: type[Any]) -> set[str]:
    """Fields without a default."""
    return {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
