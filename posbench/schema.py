"""Plain data checked against a dataclass: each mistake becomes one line that names the key."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from inspect import isabstract
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, with_config

from posbench.errors import Faults, UserError, near

T = TypeVar("T")

MOST = 1_000_000
Count = Annotated[int, Ge(1), Le(MOST)]
Whole = Annotated[int, Ge(0), Le(MOST)]
Several = Annotated[int, Ge(2), Le(MOST)]
Tokens = Annotated[int, Ge(1), Le(10**9)]
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]
Scale = Annotated[float, Gt(1e-6), Le(1e6)]
WIDEST = 3e38
Factor = Annotated[float, Ge(-WIDEST), Le(WIDEST)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
"""Numbers with their bounds: work and memory grow with a count, and float32 holds a factor and a scale."""

Bases = Annotated[tuple[Annotated[float, Gt(1)] | None, ...], MinLen(1)]
"""Bases of rotary embeddings; None is the model's own."""

Truncation = Literal["refuse", "middle", "document", "words"]
"""What happens to a prompt that does not fit; see :class:`posbench.tasks.Task`."""

PLAIN = {
    int: "a whole number",
    float: "a finite number",
    str: "text",
    bool: "true or false (bool)",
}
PLAIN[NoneType] = "null"


def build(cls: type[T], data: Mapping[str, Any], where: str) -> T:
    """Check plain data against a dataclass, with its annotated bounds, and make the object.

    Raises:
        UserError: Unknown or missing keys, wrong types, values out of bounds: all of them, each with its
            dotted name in ``where``.
    """
    faults = Faults()
    kinds = get_type_hints(cls, include_extras=True)
    allowed = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key, value in data.items():
        if now := getattr(cls, "renamed", {}).get(key):
            hint = f"call it so: {where}.{now}={value}"
            faults.found.append(
                UserError(f"{where}.{key}", value, f"{where}.{now}, its name now", hint)
            )
        elif key not in allowed:
            hint = near(str(key), allowed, "remove the key").replace(
                "mean ", f"mean {where}."
            )
            known = f"keys {', '.join(allowed)}" if allowed else "no keys"
            faults.found.append(
                UserError(f"{where}.{key}".strip("."), value, known, hint)
            )
        elif isinstance(value, bool) and "bool" not in words(kinds[key]):
            # pydantic reads true as 1; nobody means a batch size of true.
            faults.found.append(_wrong(where, key, value, kinds[key]))
        elif isinstance(value, Mapping) and any(map(isabstract, _arms(kinds[key]))):
            hint = (
                f"leave it out, and set the keys of the choice itself: {key}.KEY=VALUE"
            )
            faults.found.append(
                UserError(
                    f"{where}.{key}", value, f"a choice of {key}, with a _target_", hint
                )
            )
    faults.raise_any()
    try:
        return _adapter(cls).validate_python(dict(data))  # type: ignore[arg-type,no-any-return]
    except ValidationError as error:
        named: dict[str, str] = {}
        # A union reports every branch; the first word on a field is as good as the others.
        for each in sorted(error.errors(), key=lambda e: len(e["loc"])):
            named.setdefault(
                str(each["loc"][0]) if each["loc"] else "", each["msg"].lower()
            )
        for name, reason in named.items():
            faults.found.append(
                _wrong(where, name, data.get(name), kinds.get(name, Any), reason)
            )
        faults.raise_any()
        raise AssertionError("a validation error without an error") from error


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(with_config(ConfigDict(allow_inf_nan=False))(cls))


def _arms(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def verify(thing: Any, where: str) -> None:
    """Raise UserError unless an object that was made in Python keeps its declared bounds and choices."""
    faults = Faults()
    for name, kind in get_type_hints(type(thing), include_extras=True).items():
        if get_origin(kind) is not ClassVar and not _fits(getattr(thing, name), kind):
            faults.found.append(_wrong(where, name, getattr(thing, name), kind))
    faults.raise_any()


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Annotated:
        return _fits(value, args[0]) and all(_holds(value, bound) for bound in args[1:])
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in args)
    if origin is Literal:
        return value in args
    if origin is tuple and isinstance(value, list | tuple):
        parts = args[:1] * len(value) if args[-1:] == (Ellipsis,) else args
        return len(value) == len(parts) and all(map(_fits, value, parts))
    if origin is tuple or kind is NoneType:
        return value is None and kind is NoneType
    kinds = (int, float) if kind is float else kind
    return not isinstance(kind, type) or isinstance(value, kinds)


def _holds(value: Any, bound: Any) -> bool:
    if isinstance(bound, MinLen):
        return len(value) >= bound.min_length
    if isinstance(bound, Ge | Gt):
        return value >= bound.ge if isinstance(bound, Ge) else value > bound.gt
    return (
        value <= bound.le
        if isinstance(bound, Le)
        else value < bound.lt
        if isinstance(bound, Lt)
        else True
    )


def target(
    data: Mapping[str, Any], kind: type[T], where: str
) -> tuple[type[T], dict[str, Any]]:
    """The class that ``_target_`` names, and the other keys; UserError unless it is one of that kind."""
    if not isinstance(data, Mapping):
        plural = {"search": "searches", "study": "studies"}.get(where, f"{where}s")
        raise UserError(
            where,
            data,
            "a choice of that group",
            f"posbench ls {plural} shows the choices",
        )
    path = str(data.get("_target_"))
    try:
        module, _, name = path.rpartition(".")
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        given = data.get("_target_")
        hint = f"check conf/{where}/*.yaml ({error})"
        raise UserError(
            f"{where}._target_", given, "the import path of a class", hint
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, kind)):
        allowed = f"a subclass of {kind.__module__}.{kind.__name__}"
        raise UserError(f"{where}._target_", path, allowed, "see CONTRIBUTING.md")
    return cls, {key: value for key, value in data.items() if key != "_target_"}


def instantiate(data: Mapping[str, Any], kind: type[T], where: str) -> T:
    """The object that a config node with a ``_target_`` describes, with all inside; see :func:`build`."""
    cls, values = target(data, kind, where)
    own = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    # Names of choices travel with the data; few classes keep them.
    values = {
        key: value for key, value in values.items() if key in own or key != "name"
    }
    return build(
        cls,
        {key: _inside(value, f"{where}.{key}") for key, value in values.items()},
        where,
    )


def _inside(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        if "_target_" in value:
            return instantiate(value, object, where)
        return {key: _inside(part, f"{where}.{key}") for key, part in value.items()}
    return value


def defaults(cls: type[Any]) -> dict[str, Any]:
    """Every field of a dataclass as plain data: its default, None where it has none."""
    given = {
        f: f.default if f.default_factory is MISSING else f.default_factory()
        for f in fields(cls)
    }
    return {
        f.name: None if value is MISSING else _plain(value)
        for f, value in given.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return value


def required(cls: type[Any]) -> set[str]:
    """Fields without a default."""
    return {
        f.name
        for f in fields(cls)
        if f.default is MISSING and f.default_factory is MISSING
    }


def _wrong(where: str, name: str, value: Any, kind: Any, reason: str = "") -> UserError:
    # These say once more what the annotation says.
    told = (
        ""
        if not reason or reason.startswith(("input should be", "tuple should have"))
        else f" ({reason})"
    )
    dotted = f"{where}.{name}".strip(".")
    return UserError(dotted, value, words(kind), f"set {dotted}={_example(kind)}{told}")


def _example(kind: Any) -> str:
    """A legal value as the command line spells it; ``...`` where the type alone does not tell."""
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Annotated:
        bounds = [
            bound
            for bound in args[1:]
            if isinstance(bound, Ge | Gt) and bound != Ge(-WIDEST)
        ]
        lowest: list[Any] = [
            bound.ge if isinstance(bound, Ge) else bound.gt + 1  # type: ignore[operator]
            for bound in bounds
        ]
        return f"{max(lowest[0], 0):g}" if lowest else _example(args[0])
    if origin is Literal:
        return str(args[0])
    if origin in (Union, UnionType):
        return _example(args[0])
    if origin is tuple:
        return f"[{','.join(_example(arg) for arg in args if arg is not Ellipsis)}]"
    return {int: "1", float: "0.5", bool: "true"}.get(kind, "...")


def words(kind: Any) -> str:
    """A type annotation in words."""
    origin = get_origin(kind)
    args = get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if origin is Annotated:
        return _bounded(words(args[0]), args[1:])
    if origin is Literal:
        return " | ".join(str(a) for a in args)
    if origin in (Union, UnionType):
        return ", or ".join(words(a) for a in args)
    if origin is tuple and args[-1] is Ellipsis:
        return f"a list [...] of: {words(args[0])}"
    if origin is tuple:
        return f"a list of exactly {len(args)}: [{', '.join(words(a) for a in args)}]"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"an object with {', '.join(kind.model_fields)}"
    return "a mapping" if origin is dict or is_dataclass(kind) else "a value"


def _bounded(plain: str, bounds: tuple[Any, ...]) -> str:
    """``a whole number from 1 up``, ``a number from 0 to 1``, ``a list [...] of at least 1: text``."""
    if isinstance(bounds[0], MinLen):
        return plain.replace(" of:", f" of at least {bounds[0].min_length}:")
    if Le(WIDEST) in bounds:
        return "a number that float32 holds"
    text = {
        type(bound): getattr(bound, type(bound).__name__.lower(), None)
        for bound in bounds
    }
    low = (
        f"from {text[Ge]:.10g}"
        if Ge in text
        else f"above {text[Gt]:g}"
        if Gt in text
        else ""
    )
    up = "" if Ge in text else "up to "
    high = (
        f"{up}{text[Le]:.10g}"
        if Le in text
        else f"below {text[Lt]:g}"
        if Lt in text
        else ""
    )
    middle = (
        ("to" if high else "up")
        if low.startswith("from")
        else "and"
        if low and high
        else ""
    )
    return " ".join(filter(None, [plain.replace("finite ", ""), low, middle, high]))
