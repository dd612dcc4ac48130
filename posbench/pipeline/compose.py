"""Composing a config: the one way from ``key=value`` arguments and YAML files to plain data.

Groups are chosen as Hydra does. Every other key is laid over the defaults of the class that its group names,
so that YAML files hold only what differs; what the model's file says of a method, task, search or study comes
in between, unless the user or the experiment set that key.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posbench import paths
from posbench.errors import UserError, choices, near
from posbench.model.load import ModelConfig
from posbench.run.runtime import Runtime
from posbench.schema import defaults, target

GROUPS = ("model", "task", "method", "search", "runtime", "study")
PLURALS = {group: {"search": "searches", "study": "studies"}.get(group, f"{group}s") for group in GROUPS}
TOP = (*GROUPS, "stages", "experiment")
RESULTS = "POSBENCH_SWEEP"
"""Environment variable with the folder in which the jobs of a sweep leave their records."""


@dataclass(frozen=True)
class Composed:
    """One composed config."""

    raw: dict[str, Any]  # the config as plain data, every default filled in, nothing left to resolve
    typed: tuple[str, ...]  # dotted keys that the user set
    overrides: tuple[str, ...]  # the arguments of this job as typed
    folders: tuple[Path, ...]  # posbench's config folder, and the user's own
    number: int = 0  # number of the job in a sweep
    multirun: bool = False  # whether it is one of a sweep


def compose(args: Sequence[str], each: Callable[[Composed], None]) -> list[dict[str, Any]]:
    """Compose the configs that the arguments ask for and hand them on: one, or one for each job of a sweep.

    Args:
        args: ``key=value`` overrides and Hydra's flags.
        each: Called with every config; what it leaves by :func:`leave` is returned.

    Returns:
        The records of the jobs, in order.

    Raises:
        UserError: An argument or a YAML file is wrong.
    """
    known = _flags(args)
    folders = paths.config_folders(known.config_dir)
    request = _request(known.overrides, folders, bool(known.multirun))
    flags = [a for a in args if a not in known.overrides]
    if request.multirun and not (known.multirun or known.cfg or known.info):
        flags.append("-m")

    problems: list[UserError] = []

    def job(config: DictConfig) -> None:
        now = HydraConfig.get()
        typed = [str(o) for o in OmegaConf.to_container(now.overrides.task, resolve=False)]  # type: ignore[union-attr]
        number = OmegaConf.select(now, "job.num", default=0, throw_on_missing=False) or 0
        multirun = now.mode == RunMode.MULTIRUN
        try:
            made = _filled(config, dict(now.runtime.choices), typed, request, folders, number, multirun)
        except UserError as error:
            # Hydra would print a line of its own about an exception, and a sweep goes on.
            problems.append(error)
            facts = {"overrides": typed, "multirun": multirun, "folder": None}
            leave(number, {**facts, "status": 2, "error": str(error)})
            return
        each(made)

    with tempfile.TemporaryDirectory(prefix="posbench-sweep-") as records, _hydra_at(records):
        # Its parser refuses an override that follows a flag and its value: overrides go last.
        sys.argv = ["posbench", *flags, *request.flags, *request.overrides]
        main = hydra.main(version_base="1.3", config_path=str(paths.CONF), config_name=request.config)
        try:
            main(job)()
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise _complaint(error, known.overrides, folders[-1]) from error
        except SystemExit as end:
            # --help and the like print and leave.
            if end.code:
                raise UserError("flag", " ".join(args), "Hydra's flags", "posbench --help") from end
        found = [json.loads(p.read_text()) for p in sorted(Path(records).glob("job-*.json"))]
    if problems and not any(record["multirun"] for record in found):
        raise problems[0]
    return found


def composed(*overrides: str) -> Composed:
    """The one config that overrides ask for.

    Raises:
        UserError: An override or a YAML file is wrong.
    """
    found: list[Composed] = []
    compose(overrides, found.append)
    return found[0]


def leave(number: int, record: Mapping[str, Any]) -> None:
    """Leave the record of a job for the caller of :func:`compose`."""
    Path(os.environ[RESULTS], f"job-{number:05d}.json").write_text(json.dumps(record))


@contextmanager
def _hydra_at(records: str) -> Iterator[None]:
    """Hydra raises instead of printing; nothing that it changes outlives the block."""
    names = {"HYDRA_FULL_ERROR": "1", RESULTS: records}
    before = sys.argv, {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().clear()
        sys.argv = before[0]
        for name, value in before[1].items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


# Arguments


@dataclass(frozen=True)
class _Request:
    """What Hydra gets: primary config, flags, overrides; what the experiment set; overrides as typed."""

    config: str
    flags: tuple[str, ...]
    overrides: tuple[str, ...]
    multirun: bool
    set_by_experiment: frozenset[str]
    spelled: Mapping[str, str]


def _flags(args: Sequence[str]) -> Any:
    """Hydra's own reading of the arguments, where every complaint is one line instead of its usage text."""
    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint):
            known, unknown = get_args_parser().parse_known_intermixed_args(list(args))
    except SystemExit as error:
        reason = complaint.getvalue().strip().splitlines()[-1].split("error: ")[-1]
        raise UserError("flag", " ".join(args), "Hydra's flags", f"posbench --help ({reason})") from error
    modes = [known.run, known.multirun, known.cfg, known.info, known.shell_completion]
    if unknown:
        raise UserError("flag", unknown[0], "key=value and Hydra's flags", "posbench --help")
    alone = known.resolve and not (known.cfg or known.help)
    if sum(map(bool, modes)) > 1 or known.experimental_rerun or alone:
        allowed = "one of -m, --cfg job [--resolve], --info"
        raise UserError("flag", " ".join(args), allowed, "to run again, repeat the command")
    return known


def _request(overrides: Sequence[str], folders: Sequence[Path], multirun: bool) -> _Request:
    """Overrides as Hydra shall see them."""
    names = [o.removeprefix("experiment=") for o in overrides if o.startswith("experiment=")]
    parsed = _parsed([o for o in overrides if not o.startswith("experiment=")])
    path = [f"file://{folder}" for folder in folders[1:]]
    config, flags, experiment = "config", list[str](), dict[str, Any]()
    if names:
        file = _experiment(names[-1], [paths.EXPERIMENTS, *(folder / "experiment" for folder in folders[1:])])
        config, experiment = file.stem, dict(yaml.safe_load(file.read_text()))
        # The last --config-dir wins, so the user's own goes on the search path.
        parsed = [o for o in parsed if o.key_or_group != "hydra.searchpath"]
        flags = ["--config-dir", str(file.parent)]
        flags += [f"hydra.searchpath=[{','.join(path)}]"] if path else []
        table = file.parent / str(((experiment.get("experiment") or {}).get("reference") or {}).get("file"))
        flags += [f"experiment.reference.file={table}"] if table.is_file() else []
    typed = {o.key_or_group for o in parsed}
    grid = (experiment.get("experiment") or {}).get("grid") or {}
    swept = {key: values for key, values in grid.items() if key not in typed}
    parsed += _parsed([f"{key}={','.join(_spell(v) for v in values)}" for key, values in swept.items()])
    shown, spelled = [], {}
    for override in parsed:
        _check(override, folders, multirun or bool(swept))
        text = _rewritten(override, folders)
        shown.append(text)
        spelled[text.split("=")[0]] = str(override.input_line).split("=")[0]
    set_by = frozenset(k for group in GROUPS for k in _leaves(experiment.get(group), group))
    return _Request(config, tuple(flags), tuple(shown), bool(swept), set_by, spelled)


def _parsed(overrides: Sequence[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        reason = " ".join(str(error).split())[:160]
        text = str(getattr(error, "override", None) or " ".join(overrides))
        hint = f"correct it ({reason})"
        raise UserError(text.split("=")[0], text, "key=value, a list as [a,b]", hint) from error


def _experiment(name: str, folders: Sequence[Path]) -> Path:
    """The file of an experiment: posbench's, or one of the user's own ``experiment/`` folder."""
    for folder in folders:
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    there = choices(*folders)
    raise UserError("experiment", name, ", ".join(there), near(name, there, "posbench ls experiments"))


def _spell(value: Any) -> str:
    """A value of an experiment's grid as an override spells it."""
    return json.dumps(value).replace('"', "") if not isinstance(value, str) else value


def _leaves(node: Any, where: str) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(value, f"{where}.{key}")
    elif where.count("."):
        yield where


def _check(override: Override, folders: Sequence[Path], multirun: bool) -> None:
    """Refuse what names nothing, before Hydra would in its own words."""
    key, first = override.key_or_group, override.key_or_group.split(".")[0].split("@")[0]
    value = str(override.input_line).partition("=")[2]
    if first not in (*TOP, "hydra") and not first.startswith("hydra/"):
        raise UserError(key, value, f"keys {', '.join(TOP)}", near(first, TOP, "remove it"))
    if override.is_sweep_override() and not multirun:
        raise UserError(key, value, "one value; a list as [a,b]", "sweep with -m (--multirun)")
    if key in GROUPS and not override.is_delete():
        there = choices(*(folder / key for folder in folders))
        for name in _values(override):
            listed = re.fullmatch(r"\[(.*)\]", name)
            parts = [part.strip() for part in listed[1].split(",")] if listed and key == "method" else [name]
            for number, part in enumerate(parts):
                if (part not in there and part != "null") or part in parts[:number]:
                    hint = near(part, there, f"posbench ls {PLURALS[key]}")
                    allowed = ("a list of different ones of: " if listed else "") + ", ".join(there)
                    raise UserError(key, name, allowed, hint)


def _values(override: Override) -> list[str]:
    """The values that an override chooses among."""
    if override.is_sweep_override():
        return [str(value) for value in override.sweep_string_iterator()]
    return [override.get_value_element_as_str() if override.value() is not None else "null"]


def _rewritten(override: Override, folders: Sequence[Path]) -> str:
    """An override for Hydra: a list of methods as a stored config's name, a key as one that may be new."""
    line = str(override.input_line)
    key, _, value = line.partition("=")
    if key == "method":
        return "method=" + re.sub(r"\[([^\[\]]*)\]", lambda m: _store(m[1].split(",")), value)
    bare = key.lstrip("+~")
    inside = "." in bare and bare.split(".")[0] in GROUPS and not key.startswith("~")
    return f"++{bare}={value}" if inside else line


def _store(names: Iterable[str]) -> str:
    """Store the config of a list of methods, one inside the other; its name."""
    parts = [name.strip() for name in names]
    composed = "posbench.methods.composed.Composed"
    node = {"defaults": [*(f"{name}@parts.{name}" for name in parts), "_self_"], "_target_": composed}
    ConfigStore.instance().store(group="method", name="-".join(parts), node=node)
    return "-".join(parts)


# Filling in


def _filled(
    config: DictConfig,
    chosen: Mapping[str, str | None],
    typed: Sequence[str],
    request: _Request,
    folders: Sequence[Path],
    number: int,
    multirun: bool,
) -> Composed:
    """The plain data of a composed config."""
    keys = tuple(o.split("=", 1)[0].lstrip("+~") for o in typed)
    raw: Any = OmegaConf.to_container(config, resolve=False)
    there = [group for group in GROUPS if isinstance(raw.get(group), dict)]
    blocks = _blocks(raw["model"], folders) if "model" in there else {}
    kept = {*keys, *request.set_by_experiment}
    known = {k: v for k, v in defaults(ModelConfig).items() if k != "blocks"}
    for group in there:
        if group == "runtime":
            raw[group] = {**defaults(Runtime), **raw[group]}
            continue
        raw[group] = {"name": chosen.get(group), **raw[group]}
        if group == "model":
            raw[group] = {**known, **raw[group]}
        else:
            _fill(raw[group], group, blocks, kept)
    for key, value in _of_model(raw).items():
        if f"task.{key}" not in keys:
            raw["task"][key] = value
    parts = [override.partition("=") for override in typed]
    spelled = tuple(request.spelled.get(key, key) + sign + value for key, sign, value in parts)
    return Composed(_resolved(raw), keys, spelled, tuple(folders), number, multirun)


def _of_model(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the task that the paper of an experiment set for this model alone."""
    reference, task = _mapping(raw, "experiment", "reference"), _mapping(raw, "task")
    measured = str(reference.get("task")).partition("/")[0] == task.get("name")
    return _mapping(reference, "settings", str(_mapping(raw, "model").get("name"))) if measured else {}


def _mapping(node: Any, *keys: str) -> Mapping[str, Any]:
    """What lies under these keys; empty where it is no mapping, which the check of its group tells."""
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def _blocks(model: Mapping[str, Any], folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The blocks of a model's file, which must name something.

    Raises:
        UserError: A block is of no method, task or study.
    """
    fields = defaults(ModelConfig)
    blocks = {k: dict(v) for k, v in model.items() if k not in fields and isinstance(v, Mapping)}
    groups = "method", "task", "search", "study"
    there = list(itertools.chain(*(choices(*(folder / g for folder in folders)) for g in groups)))
    for name in blocks:
        if name not in there:
            allowed = "the name of a method, task, search or study"
            raise UserError(f"model.{name}", "a block", allowed, near(name, there, "remove it"))
    return blocks


def _fill(node: dict[str, Any], where: str, blocks: Mapping[str, Mapping[str, Any]], kept: set[str]) -> None:
    """Lay a node over the model's block of its name, and that over its class's defaults; so inside it."""
    if "_target_" not in node:
        return
    cls, given = target(node, object, where)
    # Choices of one class share its module's block: an exhaustive search takes that of the channel search.
    names = str(given.get("name") or where.rpartition(".")[2]), cls.__module__.rpartition(".")[2]
    block = next((blocks[name] for name in names if name in blocks), {})
    fields = defaults(cls)
    for key, value in block.items():
        if key in fields and f"{where}.{key}" not in kept:
            node[key] = value
    for key, value in fields.items():
        node.setdefault(key, value)
    for key, value in node.items():
        nested = isinstance(value, dict) and "_target_" not in value
        inside = {f"{key}.{name}": part for name, part in value.items()} if nested else {key: value}
        for name, part in inside.items():
            if isinstance(part, dict):
                _fill(part, f"{where}.{name}", blocks, kept)


def _resolved(raw: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return OmegaConf.to_container(OmegaConf.create(dict(raw)), resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", "") or "config")
        reason = str(error).strip().splitlines()[0]
        raise UserError(key, "???", "a value", f"set {key}=... ({reason})") from error


def _complaint(error: Exception, overrides: Sequence[str], folder: Path) -> UserError:
    """What Hydra, OmegaConf and the YAML parser still find, in our form."""
    text = " ".join(str(error).split()) or type(error).__name__
    reason = text if len(text) <= 160 else f"{text[:160]} ..."
    if isinstance(error, yaml.YAMLError):
        return UserError("config file", str(folder), "valid YAML", f"correct it ({reason})")
    key = str(getattr(error, "full_key", None) or "config")
    return UserError(key, " ".join(overrides), "what conf/ holds", f"see posbench --cfg job ({reason})")
