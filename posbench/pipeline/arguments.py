"""What a user types, and what an experiment adds to it: overrides as Hydra shall see them."""

from __future__ import annotations

import io
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from posbench import paths
from posbench.errors import UserError, choices, near
from posbench.files import sources

GROUPS = ("model", "task", "method", "search", "runtime", "study")
PLURALS = {
    group: {"search": "searches", "study": "studies"}.get(group, f"{group}s")
    for group in GROUPS
}
CLUSTER = "runtime/cluster"
"""A group inside a group."""
CHOSEN = {"search.side_task": "task"}
"""Keys inside a group that are choices of another."""
TOP = (*GROUPS, "stages", "experiment")
GIVEN = "given by the user"
"""``model.source`` of a checkpoint that no YAML describes."""
STAGES = re.compile(r"stages=(?!null$)([a-z]+(?:,[a-z]+)*)")
"""Stages as one would type them; Hydra takes a comma for a sweep."""


@dataclass(frozen=True)
class Request:
    """What Hydra gets: primary config, folders to search beside posbench's (the first has the config, unless
    posbench's has it), overrides; what the experiment set; overrides as typed."""

    config: str
    searched: tuple[Path, ...]
    overrides: tuple[str, ...]
    multirun: bool
    set_by_experiment: frozenset[str]
    spelled: Mapping[str, str]


def read_flags(args: Sequence[str]) -> Any:
    """Hydra's own reading of the arguments, where every complaint is one line instead of its usage text."""
    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint):
            known, unknown = get_args_parser().parse_known_intermixed_args(list(args))
    except SystemExit as error:
        reason = complaint.getvalue().strip().splitlines()[-1].split("error: ")[-1]
        raise UserError(
            "flag", " ".join(args), "Hydra's flags", f"posbench --help ({reason})"
        ) from error
    modes = [known.run, known.multirun, known.cfg, known.info, known.shell_completion]
    if unknown:
        raise UserError(
            "flag", unknown[0], "key=value and Hydra's flags", "posbench --help"
        )
    alone = known.resolve and not (known.cfg or known.help)
    if sum(map(bool, modes)) > 1 or known.experimental_rerun or alone:
        allowed = "one of -m, --cfg job [--resolve], --info"
        raise UserError(
            "flag", " ".join(args), allowed, "to run again, repeat the command"
        )
    return known


def requested(
    overrides: Sequence[str], folders: Sequence[Path], multirun: bool
) -> Request:
    """Overrides as Hydra shall see them."""
    names = [
        o.removeprefix("experiment=") for o in overrides if o.startswith("experiment=")
    ]
    rest, given = _models(
        [_listed(o) for o in overrides if not o.startswith("experiment=")], folders
    )
    parsed = _parsed(rest)
    searched = list(folders[1:])
    added = list[str]()
    config = "config"
    experiment = dict[str, Any]()
    if names:
        file = _experiment(
            names[-1],
            [paths.EXPERIMENTS, *(folder / "experiment" for folder in folders[1:])],
        )
        config = file.stem
        experiment = dict(yaml.safe_load(file.read_text()))
        # The last --config-dir wins, so the user's own goes on the search path.
        parsed = [o for o in parsed if o.key_or_group != "hydra.searchpath"]
        searched = [file.parent, *searched]
        table = file.parent / str(
            ((experiment.get("experiment") or {}).get("reference") or {}).get("file")
        )
        added = [f"experiment.reference.file={table}"] if table.is_file() else []
    typed = {o.key_or_group for o in parsed}
    grid = (experiment.get("experiment") or {}).get("grid") or {}
    swept = {key: values for key, values in grid.items() if key not in typed}
    parsed += _parsed(
        [
            f"{key}={','.join(_spell(v) for v in values)}"
            for key, values in swept.items()
        ]
    )
    shown = []
    spelled = {}
    for override in parsed:
        _check(override, folders, multirun or bool(swept), given)
        text = _rewritten(override, folders)
        shown.append(text)
        spelled[text.split("=")[0]] = str(override.input_line).split("=")[0]
    set_by = frozenset(
        k for group in GROUPS for k in _leaves(experiment.get(group), group)
    )
    return Request(
        config, tuple(searched), (*added, *shown), bool(swept), set_by, spelled
    )


def _listed(override: str) -> str:
    return f"stages=[{found[1]}]" if (found := STAGES.fullmatch(override)) else override


def model_name(path: str, taken: Iterable[str] = ()) -> str:
    """What a run calls the checkpoint of a folder or hub id: the last part of its name, made safe for a path;
    with as many parts in front as tell it from the names that are ``taken``."""
    place = Path(path).expanduser()
    place = Path(os.path.abspath(place)) if sources.there(place) else place
    plain = (
        unicodedata.normalize("NFKD", part).encode("ascii", "ignore").decode()
        for part in place.parts
    )
    parts = [re.sub(r"[^\w.-]+", "-", part).strip("-._") for part in plain]
    parts = [part for part in parts if part] or ["model"]
    names = ["-".join(parts[-n:])[-60:].strip("-._") for n in range(1, len(parts) + 1)]
    return next((name for name in names if name not in set(taken)), f"{names[0]}-given")


def _models(
    overrides: Sequence[str], folders: Sequence[Path]
) -> tuple[list[str], list[str]]:
    """Overrides in which folders and hub ids of ``model=`` are choices of that group, stored for Hydra; and
    the names of these."""
    names = choices(*(folder / "model" for folder in folders))
    found = dict[str, str]()
    out = list[str]()

    def choice(value: str) -> str:
        place = (
            "/" in value
            or value[:1] in ("~", ".")
            or (bool(value) and sources.there(Path(value)))
        )
        if value in names or not place:
            return value
        if value not in found:
            found[value] = model_name(value, [*names, *found.values()])
            node = {"path": value, "source": GIVEN}
            ConfigStore.instance().store(group="model", name=found[value], node=node)
        return found[value]

    for override in overrides:
        key, _, value = override.partition("=")
        whole = key == "model" and sources.there(Path(value).expanduser())
        plain = key == "model" and (whole or not re.search(r"[\[\](){}'\"]", value))
        parts = [value] if whole else [part.strip() for part in value.split(",")]
        out.append(f"model={','.join(map(choice, parts))}" if plain else override)
    return out, list(found.values())


def _parsed(overrides: Sequence[str]) -> list[Override]:
    # Hydra's grammar knows no letters but ASCII outside of quotes, and no ~.
    plain = r"([^=]+)=([^\[\]{}()'\",=$\\]+)"
    quoted = [
        m[1] + f"='{m[2]}'"
        if (m := re.fullmatch(plain, o)) and re.search(r"[^\x00-\x7f]|~", m[2])
        else o
        for o in overrides
    ]
    try:
        return OverridesParser.create().parse_overrides(quoted)
    except HydraException as error:
        text = str(getattr(error, "override", None) or " ".join(overrides))
        key, sign, _ = text.partition("=")
        if not sign:
            raise UserError("argument", text, "key=value", "posbench --help") from error
        hint = f"close brackets and quotes; other signs stand in quotes: {key}=\"'a = (b)'\""
        raise UserError(key, text, "key=value, a list as [a,b]", hint) from error


def _experiment(name: str, folders: Sequence[Path]) -> Path:
    """The file of an experiment: posbench's, or one of the user's own ``experiment/`` folder."""
    for folder in folders:
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    there = choices(*folders)
    raise UserError(
        "experiment",
        name,
        ", ".join(there),
        near(name, there, "posbench ls experiments"),
    )


def _spell(value: Any) -> str:
    """A value of an experiment's grid as an override spells it."""
    return json.dumps(value).replace('"', "") if not isinstance(value, str) else value


def _leaves(node: Any, where: str) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(value, f"{where}.{key}")
    elif where.count("."):
        yield where


def _check(
    override: Override, folders: Sequence[Path], multirun: bool, given: Sequence[str]
) -> None:
    """Refuse what names nothing, before Hydra would in its own words; ``given`` models were named by path."""
    key = override.key_or_group
    first = override.key_or_group.split(".")[0].split("@")[0]
    value = str(override.input_line).partition("=")[2]
    if first not in (*TOP, "hydra", CLUSTER) and not first.startswith("hydra/"):
        raise UserError(
            key, value, f"keys {', '.join(TOP)}", near(first, TOP, "remove it")
        )
    if override.is_sweep_override() and not multirun:
        raise UserError(
            key, value, "one value; a list as [a,b]", "sweep with -m (--multirun)"
        )
    group = CHOSEN.get(key, key)
    if (
        group in (*GROUPS, CLUSTER)
        and not override.is_delete()
        and (group == key or override.value() is not None)
    ):
        there = choices(*(folder / group for folder in folders))
        for name in _values(override, there):
            listed = re.fullmatch(r"\[(.*)\]", name)
            parts = (
                [part.strip() for part in listed[1].split(",")]
                if listed and key == "method"
                else [name]
            )
            for number, part in enumerate(parts):
                empty = part == "null" or (part == "none" and len(parts) > 1)
                named = part in there or (key == "model" and part in given)
                if not named or part in parts[:number] or empty:
                    hint = (
                        "leave it out"
                        if empty
                        else near(
                            part, there, f"posbench ls {PLURALS.get(group, 'runtimes')}"
                        )
                    )
                    allowed = (
                        "a list of different ones of: " if listed else ""
                    ) + ", ".join(there)
                    allowed += (
                        ", a folder, or a hub id as ORG/NAME" if key == "model" else ""
                    )
                    raise UserError(key, name, allowed, hint)


def _values(override: Override, there: Sequence[str]) -> list[str]:
    """The values that an override chooses among; of a pattern those of ``there`` that match, else itself."""
    if isinstance(pattern := override.value(), Glob):
        return pattern.filter(list(there)) or [
            str(override.input_line).partition("=")[2]
        ]
    if override.is_sweep_override():
        return [str(value) for value in override.sweep_string_iterator()]
    return [
        override.get_value_element_as_str() if override.value() is not None else "null"
    ]


def _rewritten(override: Override, folders: Sequence[Path]) -> str:
    """An override for Hydra: a list of methods as a stored config's name, a key as one that may be new."""
    line = str(override.input_line)
    key, _, value = line.partition("=")
    if key in CHOSEN and override.value() is not None:
        return f"+{CHOSEN[key]}@{key}={value}"
    if key == "method":
        return "method=" + re.sub(
            r"\[([^\[\]]*)\]", lambda m: _store(m[1].split(",")), value
        )
    bare = key.lstrip("+~")
    inside = "." in bare and bare.split(".")[0] in GROUPS and not key.startswith("~")
    return f"++{bare}={value}" if inside else line


def _store(names: Iterable[str]) -> str:
    """Store the config of a list of methods, one inside the other; its name."""
    parts = [name.strip() for name in names]
    if len(parts) == 1:
        return parts[0]
    composed = "posbench.methods.composed.Composed"
    node = {
        "defaults": [*(f"{name}@parts.{name}" for name in parts), "_self_"],
        "_target_": composed,
    }
    ConfigStore.instance().store(group="method", name="-".join(parts), node=node)
    return "-".join(parts)
