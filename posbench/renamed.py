"""Names of the version before, answered for one version: what they stand for now, and a warning that says so.

CONTRIBUTING.md says how to rename something public.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

OLD_NAMES: dict[str, str] = {}
"""Dotted old names, each with the dotted name now, of the modules that were imported."""


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that a name is another one now, at the line that uses it.

    Args:
        old: The old name.
        new: The name now.
        stacklevel: Calls between that line and the warning, this one counted.
    """
    message = f"{old} is now {new}; the old name goes with the next version"
    # Not a DeprecationWarning: Python hides those of imported modules.
    warnings.warn(message, FutureWarning, stacklevel)


def keep_old_names(module: str, names: Mapping[str, str]) -> None:
    """Let a module answer old names of what it defines with what they are now, and a warning.

    Args:
        module: Name of the module.
        names: Names now, by old name.
    """
    OLD_NAMES.update(
        {f"{module}.{old}": f"{module}.{new}" for old, new in names.items()}
    )

    def answer(name: str) -> Any:
        if name not in names:
            message = f"module {module!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[module])
        warn_renamed(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(sys.modules[module], names[name])

    # A module that assigned __getattr__ itself would hide misspelt names from type checkers.
    vars(sys.modules[module])["__getattr__"] = answer


class RenamedAttribute:
    """Attribute of a class under an old name: gives what it is now, and warns; a subclass may not define it."""

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self.owner = f"{owner.__module__}.{owner.__qualname__}"
        self.name = name
        OLD_NAMES[f"{self.owner}.{name}"] = f"{self.owner}.{self.new}"

    def __get__(self, thing: Any, cls: type[Any] | None = None) -> Any:
        warn_renamed(f"{self.owner}.{self.name}", f"{self.owner}.{self.new}")
        return getattr(cls if thing is None else thing, self.new)


def old_hooks(cls: type[Any]) -> dict[str, str]:
    """What subclasses of a class may not define any more, and what they define in its place."""
    hooks = dict(vars(cls).get("renamed_hooks", {}))
    for name, value in vars(cls).items():
        if isinstance(value, RenamedAttribute):
            hooks[name] = value.new
    return hooks


def renamed_parameters(
    **names: str,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a function that takes parameters by old names too (``old="new"``), and warns."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        dotted = f"{function.__module__}.{function.__qualname__}"
        OLD_NAMES.update(
            {f"{dotted}.{old}": f"{dotted}.{new}" for old, new in names.items()}
        )

        @wraps(function)
        def decorated(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in names.keys() & kwargs.keys():
                warn_renamed(f"{dotted}({old}=)", f"{dotted}({names[old]}=)")
                kwargs[names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return decorated

    return decorate
