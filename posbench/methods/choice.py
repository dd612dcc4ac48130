"""A method as a config names it: some of its parameters may be missing until a search has found them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from posbench import paths
from posbench.errors import UserError, renamed
from posbench.files.choices import read_choice
from posbench.files.sources import Source
from posbench.methods.base import Method
from posbench.methods.composed import Composed
from posbench.methods.prompt_change import PromptChange
from posbench.schema import build, default_values, required_fields, resolve_target

RESERVED_FIELDS = {"name", "parts"}
"""Keys of a method's config node that are no parameters."""


@dataclass(frozen=True, kw_only=True)
class MethodChoice:
    """Class and parameters of a method, or of a part of a list of methods.

    Attributes:
        name: Its name in tables.
        cls: Its class.
        values: Its parameters; None marks those that a search must find.
        typed: Keys that the user typed; a search leaves them alone.
        where: Dotted name of its config node.
        parts: In a list of methods, the choices by name, the outermost first.
    """

    name: str
    cls: type[Method]
    values: dict[str, Any]
    typed: frozenset[str] = frozenset()
    where: str = "method"
    parts: dict[str, MethodChoice] = field(default_factory=dict)
    _built: dict[str, Method] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(
        cls,
        data: Mapping[str, Any],
        typed: Iterable[str] = (),
        config_path: str = "method",
    ) -> MethodChoice:
        """Return the choice that a config node describes.

        Args:
            data: The node.
            typed: Dotted keys of the config that the user typed.
            config_path: Dotted name of the node.

        Raises:
            UserError: There is no such class, or a list of methods has no parts.
        """
        method_class, values = resolve_target(data, Method, config_path)  # type: ignore[type-abstract]
        reserved = RESERVED_FIELDS & {field.name for field in fields(method_class)}  # type: ignore[arg-type]
        if reserved and not issubclass(method_class, Composed):
            allowed = f"a class without a field {' or '.join(sorted(reserved))}, which names the choice"
            where = f"{config_path}._target_"
            raise UserError(where, method_class.__name__, allowed, "rename the field")
        name = str(values.pop("name", method_class.short_name()))
        all_typed = list(typed)
        prefix = f"{config_path}."
        typed_keys = [k.removeprefix(prefix) for k in all_typed if k.startswith(prefix)]
        parts: dict[str, MethodChoice] = {}
        if issubclass(method_class, Composed):
            nodes = values.pop("parts", None)
            _check_parts(nodes, values, config_path)
            for part_name, node in nodes.items():
                part_path = f"{config_path}.parts.{part_name}"
                part = {**node, "name": part_name}
                parts[str(part_name)] = cls.of(part, all_typed, part_path)
        return cls(
            name=name,
            cls=method_class,
            values=values,
            typed=frozenset(typed_keys),
            where=config_path,
            parts=parts,
        )

    @classmethod
    def listed(cls, parts: Mapping[str, MethodChoice], name: str) -> MethodChoice:
        """Return the choice of several methods at once, the outermost first."""
        return cls(name=name, cls=Composed, values={}, parts=dict(parts))

    @property
    def classes(self) -> list[type[Method]]:
        """The classes of the method and of its parts."""
        return [self.cls, *(part.cls for part in self.parts.values())]

    @property
    def reads_items(self) -> bool:
        """Whether the method, or a part, reads the positions of the items of a prompt."""
        return any(cls.needs.items for cls in self.classes)

    @property
    def changes_prompts_alone(self) -> bool:
        """Whether the method, with all its parts, leaves the model as it is."""
        classes = [part.cls for part in self.parts.values()] or [self.cls]
        return all(issubclass(cls, PromptChange) for cls in classes)

    @property
    def changed_part(self) -> str:
        """What it changes, in words: the prompt, the model, or both."""
        classes = [part.cls for part in self.parts.values()] or [self.cls]
        # A method that rewrites prompts leaves the model as it is, even where it asks the model how.
        rewrites = {cls.rewrite is not Method.rewrite for cls in classes}
        if rewrites == {True, False}:
            return "prompt and model"
        return "prompt" if rewrites == {True} else "model"

    @property
    def export_format(self) -> str:
        """The format of ``posbench export`` for it: a checkpoint where it folds, else weights with a file of code.

        Empty for changes of the prompt, and for several methods that change the model: some lists fold, and no file of
        code holds two.
        """
        parts = list(self.parts.values()) or [self]
        classes = [part.cls for part in parts if not part.changes_prompts_alone]
        if len(classes) != 1:
            return ""
        folds = all(cls.always_folds for cls in classes)
        return "checkpoint" if folds else "transformers"

    def files(self) -> tuple[Source, ...]:
        """Return the files that the parameters of the method and of its parts name, each with its config key."""
        sources = [
            replace(source, field=f"{self.where}.{source.field}")
            for source in self.cls.files(self.values)
        ]
        for part in self.parts.values():
            sources += part.files()
        return tuple(sources)

    @property
    def pinned(self) -> dict[str, Any]:
        """The parameters that the user typed."""
        return {key: value for key, value in self.values.items() if key in self.typed}

    def build(
        self,
        found: Mapping[str, Any] | None = None,
        part: MethodChoice | None = None,
        hint: str = "",
    ) -> Method:
        """Return the method; a search's result fills every parameter that the user did not type.

        The same parameters return the same object.

        Args:
            found: Parameters by name.
            part: The part of a composed method whose parameters these are; None: the method itself.
            hint: Hint for a missing parameter, with ``{key}``.

        Raises:
            UserError: A parameter is missing or wrong.
        """
        if self.parts:
            parts = {
                name: choice.build(found if choice is part else None, hint=hint)
                for name, choice in self.parts.items()
            }
            return self._made({**self.values, "parts": parts}, self.where)
        values = dict(self.values)
        for key, value in (found or {}).items():
            if key in values and key not in self.typed:
                values[key] = value
        with renamed("method.", f"{self.where}."):
            needed_keys = required_fields(self.cls)
            missing = [k for k, v in values.items() if v is None and k in needed_keys]
            if missing:
                key = f"method.{missing[0]}"
                allowed = (
                    f"a value (the model's YAML has no {self.name} block that sets it)"
                )
                hint = (
                    hint
                    or "type {key}=..., search for it (posbench ls searches), or add the block to the model's YAML"
                )
                raise UserError(key, None, allowed, hint.format(key=key))
            return self._made(values, "method")

    def _made(self, values: Mapping[str, Any], where: str) -> Method:
        """The method with these parameters, made once."""
        key = repr(values)
        if key not in self._built:
            self._built[key] = build(self.cls, values, where)
        return self._built[key]


def _check_parts(nodes: Any, keys: Mapping[str, Any], config_path: str) -> None:
    """Refuse a list of methods whose parts are not config nodes by name, or that has further keys itself.

    Args:
        nodes: Config node of each method by name.
        keys: Other keys beside the parts; none are allowed.
        config_path: Config key of the list, for errors.

    Raises:
        UserError: Names the key.
    """
    mapping = isinstance(nodes, Mapping) and len(nodes) > 0
    if not mapping or not all(isinstance(node, Mapping) for node in nodes.values()):
        hint = "write method=[layer_scaling,scale_channel]"
        raise UserError(
            f"{config_path}.parts",
            nodes,
            "a mapping from names of methods to their keys",
            hint,
        )
    for key, value in keys.items():
        allowed = f"keys of {', '.join(nodes)}"
        hint = f"name the part: {config_path}.parts.NAME.{key}=..."
        if key in nodes:
            hint = f"set {config_path}.parts.{key}.KEY=..."
        raise UserError(f"{config_path}.{key}", value, allowed, hint)


def all_choices(
    folders: Sequence[Path], blocks: Mapping[str, dict[str, Any]]
) -> dict[str, MethodChoice]:
    """Return every method of the config folders, with the parameters of its file and of the model's block.

    Args:
        folders: Config folders; a file in an earlier folder replaces one in a later folder.
        blocks: The model's blocks by the name of their method.

    Returns:
        The choices by the names of their files.

    Raises:
        UserError: The class of one cannot be imported, or is no method.
    """
    files: dict[str, Path] = {}
    for folder in reversed(folders):
        files |= {file.stem: file for file in (folder / "method").glob("*.yaml")}
    choices = {}
    for name, file in sorted(files.items()):
        data = read_choice("method", name, folders)
        try:
            cls, node = resolve_target(data, Method, "method")  # type: ignore[type-abstract]
        except UserError as error:
            hint = error.hint
            if plugin := paths.distribution_of(file):
                hint += f", or without the plug-in: pip uninstall {plugin}"
            where = f"method={name}"
            raise UserError(where, error.value, error.allowed, hint) from error
        values = default_values(cls)
        for key, value in (node | blocks.get(name, {})).items():
            if key in values:
                values[key] = value
        choices[name] = MethodChoice(name=name, cls=cls, values=values)
    return choices
