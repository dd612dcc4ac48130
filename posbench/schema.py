"""Plain data checked against a dataclass: each mistake becomes one line that names the key."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from inspect import get_annotations, isabstract
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
from pydantic_core import ErrorDetails

from posbench.errors import Faults, UserError, near

T = TypeVar("T")

MAX_COUNT = 1_000_000
MAX_SHOWN = 120
"""Characters of a value from outside that a message repeats."""
Count = Annotated[int, Ge(1), Le(MAX_COUNT)]
Whole = Annotated[int, Ge(0), Le(MAX_COUNT)]
Several = Annotated[int, Ge(2), Le(MAX_COUNT)]
Tokens = Annotated[int, Ge(1), Le(10**9)]
Threads = Annotated[int, Ge(1), Le(1024)]
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]
Scale = Annotated[float, Gt(1e-6), Le(1e6)]
FLOAT32_LIMIT = 3e38
Factor = Annotated[float, Ge(-FLOAT32_LIMIT), Le(FLOAT32_LIMIT)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
"""Numbers with their bounds: work and memory grow with a count, and float32 holds a factor and a scale."""

Bases = Annotated[tuple[Annotated[float, Gt(1)] | None, ...], MinLen(1)]
"""Bases of rotary embeddings; None is the model's own."""

Truncation = Literal["refuse", "middle", "document", "words"]
"""Treatment of a prompt that does not fit; see :class:`posbench.tasks.Task`."""
Alphabet = Literal["characters", "tokens"]
"""What random strings are drawn from."""

PLAIN_WORDS = {
    int: "a whole number",
    float: "a finite number",
    str: "text",
    bool: "true or false (bool)",
    NoneType: "null",
}


def build(cls: type[T], data: Mapping[str, Any], prefix: str) -> T:
    """Check plain data against a dataclass, with its annotated bounds, and make the object.

    Raises:
        UserError: Unknown or missing keys, wrong types, values out of bounds: all faults, each with its
            dotted name in ``prefix``.
    """
    faults = Faults()
    kinds = _field_kinds(cls)  # type: ignore[arg-type]  # classes are hashable
    for key, value in data.items():
        fault = _key_fault(cls, kinds, key, value, prefix)
        if fault:
            faults.found.append(fault)
    faults.raise_any()
    try:
        return _adapter(cls).validate_python(dict(data))  # type: ignore[arg-type,no-any-return]
    except ValidationError as error:
        reasons: dict[str, str] = {}
        # A union reports every branch; the first reason for a field is as good as the others.
        for detail in sorted(error.errors(), key=lambda detail: len(detail["loc"])):
            name = str(detail["loc"][0]) if detail["loc"] else ""
            reasons.setdefault(name, detail["msg"].lower())
        for name, reason in reasons.items():
            kind = kinds.get(name, Any)
            faults.found.append(_wrong(prefix, name, data.get(name), kind, reason))
        faults.raise_any()
        raise AssertionError("a validation error without an error") from error


def _key_fault(
    cls: Any, kinds: Mapping[str, Any], key: str, value: Any, prefix: str
) -> UserError | None:
    """The fault of a key, or of a value that pydantic would accept; None without a fault.

    Args:
        cls: The dataclass.
        kinds: Type hints of its fields.
        key: A key of the data.
        value: Its value.
        prefix: Dotted name of the data.
    """
    field = f"{prefix}.{key}"
    names = [f.name for f in fields(cls)]
    if key not in names:
        allowed = f"keys {', '.join(names)}" if names else "no keys"
        hint = near(str(key), names, "remove the key")
        hint = hint.replace("mean ", f"mean {prefix}.")
        return UserError(field.strip("."), value, allowed, hint)
    kind = kinds[key]
    if isinstance(value, bool) and "bool" not in describe_type(kind):
        # pydantic reads true as 1; nobody means a batch size of true.
        return _wrong(prefix, key, value, kind)
    if isinstance(value, Mapping) and any(map(isabstract, _union_members(kind))):
        allowed = f"a choice of {key}, with a _target_"
        hint = f"leave it out, and set the keys of the choice itself: {key}.KEY=VALUE"
        return UserError(field, value, allowed, hint)
    return None


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(with_config(ConfigDict(allow_inf_nan=False))(cls))


def check_shape(data: Any, shape: Any, label: str, hint: str) -> Any:
    """Check plain data from outside against a type, which may be or hold dataclasses, and make the objects.

    Args:
        data: The data.
        shape: The type.
        label: Where the data comes from, as messages name it.
        hint: The next step where it has another shape.

    Raises:
        UserError: The first field that is missing, unknown, or of another type, with its value.
    """
    try:
        return _shape_adapter(shape).validate_python(data)
    except ValidationError as error:
        # A union reports every branch; the shortest path is the field's own.
        detail = min(error.errors(), key=lambda detail: len(detail["loc"]))
        path = ".".join(str(part) for part in detail["loc"])
        field = f"{label}: {path}" if path else label
        value = None if detail["type"].startswith("missing") else detail["input"]
        raise UserError(field, shortened(value), _allowed(detail), hint) from error


def _allowed(detail: ErrorDetails) -> str:
    """The allowed values where pydantic found a fault."""
    kind = detail["type"]
    if kind.startswith("missing"):
        return "a value: this field is missing"
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return "no such field"
    if kind == "dataclass_type":
        return "an object with named fields"
    if kind == "too_short":
        return f"{detail['ctx']['min_length']} or more entries"
    return detail["msg"].lower().removeprefix("input should be ")


def no_other_keys(cls: type[T]) -> type[T]:
    """Mark a dataclass for :func:`check_shape`: keys other than its fields are refused."""
    return with_config(ConfigDict(extra="forbid", allow_inf_nan=False))(cls)


@cache
def _field_kinds(cls: Any) -> Mapping[str, Any]:
    """The types of a dataclass's fields, with the bounds of their annotations."""
    return get_type_hints(cls, include_extras=True)


@cache
def _shape_adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)


def shortened(value: Any) -> Any:
    """A value as a message can hold it."""
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."


def _union_members(kind: Any) -> tuple[Any, ...]:
    """The types of a union; any other type alone."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def verify(thing: Any, prefix: str) -> None:
    """Raise UserError unless an object that was made in Python keeps its declared bounds and choices."""
    faults = Faults()
    kinds = _field_kinds(type(thing))  # type: ignore[arg-type]  # classes are hashable
    for name, kind in kinds.items():
        if get_origin(kind) is not ClassVar and not _fits(getattr(thing, name), kind):
            faults.found.append(_wrong(prefix, name, getattr(thing, name), kind))
    faults.raise_any()


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value has a type, with the bounds of its annotation."""
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Annotated:
        return _fits(value, args[0]) and all(_holds(value, bound) for bound in args[1:])
    if origin in (Union, UnionType):
        return any(_fits(value, member) for member in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False
        any_length = args[-1:] == (Ellipsis,)
        item_kinds = args[:1] * len(value) if any_length else args
        return len(value) == len(item_kinds) and all(map(_fits, value, item_kinds))
    if kind is NoneType:
        return value is None
    if kind is float:
        return isinstance(value, int | float)
    return not isinstance(kind, type) or isinstance(value, kind)


def _holds(value: Any, bound: Any) -> bool:
    """Whether a value keeps a bound; any other annotation holds."""
    match bound:
        case MinLen():
            return len(value) >= bound.min_length
        case Ge():
            return value >= bound.ge
        case Gt():
            return value > bound.gt
        case Le():
            return value <= bound.le
        case Lt():
            return value < bound.lt
    return True


def resolve_target(
    data: Mapping[str, Any], kind: type[T], prefix: str
) -> tuple[type[T], dict[str, Any]]:
    """The class that ``_target_`` names, and the other keys; UserError unless it is one of that kind."""
    if not isinstance(data, Mapping):
        plural = {"search": "searches", "study": "studies"}.get(prefix, f"{prefix}s")
        hint = f"posbench ls {plural} shows the choices"
        raise UserError(prefix, data, f"a choice of {prefix}", hint)
    path = data.get("_target_")
    try:
        module, _, name = str(path).rpartition(".")
        cls = getattr(importlib.import_module(module), name)
    except SyntaxError as error:
        allowed = f"a module that Python can read ({error.msg})"
        hint = f"correct {error.filename}, line {error.lineno}"
        raise UserError(f"{prefix}._target_", path, allowed, hint) from error
    except (ImportError, AttributeError, ValueError) as error:
        allowed = "the import path of a class"
        name_of_choice = data.get("name")
        file = f"conf/{prefix}/*.yaml"
        if name_of_choice:
            file = f"the YAML of {prefix}={name_of_choice}"
        reason = str(error)
        # Another module of the same name may come first.
        if loaded := getattr(sys.modules.get(module), "__file__", None):
            reason += f"; {module} is {loaded}"
        hint = f"check {file} ({reason})"
        own = module.partition(".")[0] != "posbench"
        file_name = f"{module.replace('.', '/')}.py"
        if isinstance(error, ModuleNotFoundError) and own:
            hint = f"install what {file_name} imports ({error})"
        is_lost = isinstance(error, ModuleNotFoundError) and module.startswith(
            str(error.name)
        )
        if is_lost and own:
            hint = f"your own {file_name} is not found: install its plug-in, or add --config-dir DIR, which holds it"
        raise UserError(f"{prefix}._target_", path, allowed, hint) from error
    if not (isinstance(cls, type) and issubclass(cls, kind)):
        allowed = f"a subclass of {kind.__module__}.{kind.__name__}"
        raise UserError(f"{prefix}._target_", str(path), allowed, "see CONTRIBUTING.md")
    # A subclass has the fields of its base, and its own only by the decorator.
    is_decorated = "__dataclass_fields__" in vars(cls) or not get_annotations(cls)
    if not is_decorated or not hasattr(cls, "__dataclass_fields__"):
        hint = "put @dataclass(frozen=True, kw_only=True) in front of it"
        raise UserError(f"{prefix}._target_", str(path), "a dataclass", hint)
    if isabstract(cls):
        missing = sorted(cls.__abstractmethods__)  # type: ignore[attr-defined]
        allowed = f"a class that defines {', '.join(missing)}"
        raise UserError(f"{prefix}._target_", str(path), allowed, "see CONTRIBUTING.md")
    lacking = [
        name
        for base in reversed(cls.__mro__)
        for name, annotation in get_annotations(base).items()
        if "ClassVar" in str(annotation) and not hasattr(cls, name)
    ]
    if lacking:
        allowed = f"a class that sets {', '.join(lacking)}"
        raise UserError(f"{prefix}._target_", str(path), allowed, "see CONTRIBUTING.md")
    return cls, {key: value for key, value in data.items() if key != "_target_"}


def instantiate(data: Mapping[str, Any], kind: type[T], prefix: str) -> T:
    """The object that a config node with a ``_target_`` describes, with all inside; see :func:`build`."""
    cls, values = resolve_target(data, kind, prefix)
    # The name of a choice travels with its data; few classes have a field for it.
    if "name" not in {f.name for f in fields(cls)}:  # type: ignore[arg-type]
        values.pop("name", None)
    parts = {k: _instantiate_inside(v, f"{prefix}.{k}") for k, v in values.items()}
    return build(cls, parts, prefix)


def _instantiate_inside(value: Any, prefix: str) -> Any:
    """A config value with an object in place of every node that has a ``_target_``."""
    if not isinstance(value, Mapping):
        return value
    if "_target_" in value:
        return instantiate(value, object, prefix)
    return {
        key: _instantiate_inside(part, f"{prefix}.{key}") for key, part in value.items()
    }


def default_values(cls: type[Any]) -> dict[str, Any]:
    """Defaults of a dataclass as plain data, by field; None without a default."""
    values = {}
    for f in fields(cls):
        value = f.default
        if f.default_factory is not MISSING:
            value = f.default_factory()
        values[f.name] = None if value is MISSING else plain(value)
    return values


def plain(value: Any) -> Any:
    """Tuples as lists, and mappings as dictionaries, at every depth."""
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    return value


def required_fields(cls: type[Any]) -> set[str]:
    """Fields without a default."""
    return {
        f.name
        for f in fields(cls)
        if f.default is MISSING and f.default_factory is MISSING
    }


def _wrong(
    prefix: str, name: str, value: Any, kind: Any, reason: str = ""
) -> UserError:
    """The error of a value of a wrong type, with pydantic's reason where it is more specific."""
    field = f"{prefix}.{name}".strip(".")
    hint = f"set {field}={_example(kind)}"
    repeats_the_type = reason.startswith(("input should be", "tuple should have"))
    if reason and not repeats_the_type:
        hint += f" ({reason})"
    return UserError(field, value, describe_type(kind), hint)


def _example(kind: Any) -> str:
    """A legal value as the command line spells it; ``...`` where the type alone does not give one."""
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Annotated:
        for bound in args[1:]:
            if isinstance(bound, Ge) and bound != Ge(-FLOAT32_LIMIT):
                return f"{max(bound.ge, 0):g}"  # type: ignore[call-overload]
            if isinstance(bound, Gt):
                return f"{max(bound.gt + 1, 0):g}"  # type: ignore[operator]
        return _example(args[0])
    if origin is Literal:
        return str(args[0])
    if origin in (Union, UnionType):
        return _example(args[0])
    if origin is tuple:
        return f"[{','.join(_example(arg) for arg in args if arg is not Ellipsis)}]"
    return {int: "1", float: "0.5", bool: "true"}.get(kind, "...")


def override_text(value: Any) -> str:
    """A value as an override has it: ``null``, ``true``, ``[0%,1]``, ``{a:1}``, ``'a, b.csv'``."""
    if isinstance(value, str):
        if re.search(r"""[,'"(){}\[\]]""", value) is None:
            return value
        # Backslashes before a quote, also the last one, would escape it.
        escaped = re.sub(r"(\\+)(?='|\Z)", r"\1\1", value)
        return "'" + escaped.replace("'", r"\'") + "'"
    if isinstance(value, Mapping):
        items = (f"{key}:{override_text(item)}" for key, item in value.items())
        return f"{{{','.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(override_text, value))}]"
    return json.dumps(value, default=str).replace('"', "")


def describe_type(kind: Any) -> str:
    """A type annotation in words."""
    origin = get_origin(kind)
    args = get_args(kind)
    if kind in PLAIN_WORDS:
        return PLAIN_WORDS[kind]
    if origin is Annotated:
        return _bounded(describe_type(args[0]), args[1:])
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (Union, UnionType):
        return ", or ".join(map(describe_type, args))
    if origin is tuple and args[-1] is Ellipsis:
        return f"a list [...] of: {describe_type(args[0])}"
    if origin is tuple:
        return f"a list of exactly {len(args)}: [{', '.join(map(describe_type, args))}]"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"an object with {', '.join(kind.model_fields)}"
    return "a mapping" if origin is dict or is_dataclass(kind) else "a value"


def _bounded(plain: str, bounds: tuple[Any, ...]) -> str:
    """``a whole number from 1 up``, ``a number from 0 to 1``, ``a list [...] of at least 1: text``."""
    if isinstance(bounds[0], MinLen):
        return plain.replace(" of:", f" of at least {bounds[0].min_length}:")
    if Le(FLOAT32_LIMIT) in bounds:
        return "a number that float32 holds"
    limits = {
        type(bound): getattr(bound, type(bound).__name__.lower(), None)
        for bound in bounds
    }
    lower = ""
    if Ge in limits:
        lower = f"from {limits[Ge]:.10g}"
    elif Gt in limits:
        lower = f"above {limits[Gt]:g}"
    upper = ""
    if Le in limits:
        upper = f"{limits[Le]:.10g}"
        if Ge not in limits:
            upper = f"up to {upper}"
    elif Lt in limits:
        upper = f"below {limits[Lt]:g}"
    link = ""
    if Ge in limits:
        link = "to" if upper else "up"
    elif lower and upper:
        link = "and"
    parts = [plain.replace("finite ", ""), lower, link, upper]
    return " ".join(part for part in parts if part)
