"""A method as a config names it: some of its parameters may be missing until a search has found them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from posbench.errors import UserError, renamed
from posbench.files.sources import Source
from posbench.methods.base import Method
from posbench.methods.composed import Composed
from posbench.schema import build, defaults, required, target


@dataclass(frozen=True, kw_only=True)
class MethodChoice:
    """Class and parameters of a method, or of a part of a list of methods."""

    name: str  # what tables call it
    cls: type[Method]  # its class
    values: dict[str, Any]  # its parameters; None marks what a search must find
    typed: frozenset[str] = (
        frozenset()
    )  # keys of these that the user typed; a search leaves them alone
    where: str = "method"  # dotted name of its config node
    # in a list of methods, the choices by name, the outermost first
    parts: dict[str, MethodChoice] = field(default_factory=dict)

    @classmethod
    def of(
        cls, data: Mapping[str, Any], typed: Iterable[str] = (), where: str = "method"
    ) -> MethodChoice:
        """The choice that a config node with the dotted name ``where`` describes; ``typed`` are dotted keys.

        Raises:
            UserError: There is no such class, or a list of methods has no parts.
        """
        kind, values = target(data, Method, where)  # type: ignore[type-abstract]
        name = str(values.pop("name", kind.short_name()))
        typed = list(typed)
        parts = dict[str, MethodChoice]()
        own = frozenset(
            key.removeprefix(f"{where}.")
            for key in typed
            if key.startswith(f"{where}.")
        )
        if issubclass(kind, Composed):
            given = values.pop("parts", None)
            nodes = given.values() if isinstance(given, Mapping) else ()
            if not nodes or not all(isinstance(node, Mapping) for node in nodes):
                hint = "write method=[layer_scaling,scale_channel]"
                raise UserError(f"{where}.parts", given, "methods by name", hint)
            for key, value in values.items():
                hint = f"name the part: {where}.parts.NAME.{key}=..."
                raise UserError(
                    f"{where}.{key}", value, f"keys of {', '.join(given)}", hint
                )
            for key, part in given.items():
                parts[str(key)] = cls.of(
                    {**part, "name": key}, typed, f"{where}.parts.{key}"
                )
        return cls(
            name=name, cls=kind, values=values, typed=own, where=where, parts=parts
        )

    @property
    def classes(self) -> list[type[Method]]:
        """The method's class, and those of its parts."""
        return [self.cls, *(part.cls for part in self.parts.values())]

    def files(self) -> tuple[Source, ...]:
        """The files that the method's parameters name, and those of its parts."""
        own = (
            replace(f, field=f"{self.where}.{f.field}")
            for f in self.cls.files(self.values)
        )
        return (*own, *(file for part in self.parts.values() for file in part.files()))

    @property
    def pinned(self) -> dict[str, Any]:
        """What the user typed of it."""
        return {key: value for key, value in self.values.items() if key in self.typed}

    def build(
        self,
        found: Mapping[str, Any] | None = None,
        part: MethodChoice | None = None,
        hint: str = "",
    ) -> Method:
        """Make the method; what a search found fills every parameter that the user did not type.

        Args:
            found: Parameters by name.
            part: Whose parameters these are; None: its own.
            hint: What to do where a parameter is missing, with ``{key}``.

        Raises:
            UserError: A parameter is missing or wrong.
        """
        if self.parts:
            each = self.parts.items()
            made = {
                name: choice.build(found if choice is part else None, hint=hint)
                for name, choice in each
            }
            return build(self.cls, {**self.values, "parts": made}, self.where)
        fresh = {
            k: v
            for k, v in (found or {}).items()
            if k in self.values and k not in self.typed
        }
        values = self.values | fresh
        with renamed("method.", f"{self.where}."):
            missing = [
                f"method.{k}"
                for k, v in values.items()
                if v is None and k in required(self.cls)
            ]
            if missing:
                allowed = f"a value (the model has no {self.name} block with it)"
                hint = hint or "type {key}=..., or add the block to the model's YAML"
                raise UserError(missing[0], None, allowed, hint.format(key=missing[0]))
            return build(self.cls, values, "method")


def every(
    folders: Sequence[Path], blocks: Mapping[str, dict[str, Any]]
) -> dict[str, MethodChoice]:
    """Every method of config folders by its file's name, valued as in the file and the model's block."""
    files = {
        file.stem: file
        for folder in reversed(folders)
        for file in (folder / "method").glob("*.yaml")
    }
    found = {}
    for name, file in sorted(files.items()):
        cls, given = target(yaml.safe_load(file.read_text()), Method, "method")  # type: ignore[type-abstract]
        values = defaults(cls)
        values |= {
            k: v for k, v in (given | blocks.get(name, {})).items() if k in values
        }
        found[name] = MethodChoice(name=name, cls=cls, values=values)
    return found
