"""Composing a config: the one way from ``key=value`` arguments and YAML files to plain data.

Groups are chosen as Hydra does. Every other key is laid over the defaults of the class that its group names,
so that YAML files hold only what differs; what the model's file says of a method, task, search or study comes
in between, unless the user or the experiment set that key.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posbench import paths
from posbench.errors import UserError, choices, near
from posbench.model.load import ModelConfig
from posbench.pipeline.arguments import (
    GROUPS,
    Request,
    model_name,
    read_flags,
    requested,
)
from posbench.pipeline.multirun import (
    directly,
    hydra_at,
    launched,
    leave,
    records,
    search_path,
    spelled,
)
from posbench.run.runtime import Cluster, Runtime
from posbench.schema import defaults, target


@dataclass(frozen=True)
class Composed:
    """One composed config."""

    raw: dict[
        str, Any
    ]  # the config as plain data, every default filled in, nothing left to resolve
    typed: tuple[str, ...]  # dotted keys that the user set
    overrides: tuple[str, ...]  # the arguments of this job as typed
    folders: tuple[Path, ...]  # posbench's config folder, and the user's own
    number: int = 0  # number of the job in a sweep
    multirun: bool = False  # whether it is one of a sweep
    records: Path = field(
        default=Path(), compare=False
    )  # folder that takes what :func:`leave` leaves


def compose(
    args: Sequence[str],
    each: Callable[[Composed], None],
    before: Callable[[Sequence[Composed]], None] = lambda every: None,
) -> list[dict[str, Any]]:
    """Compose the configs that the arguments ask for and hand them on: one, or one for each job of a sweep.

    Args:
        args: ``key=value`` overrides and Hydra's flags.
        each: Called with every config; what it leaves by :func:`leave` is returned.
        before: Called first with all configs of a sweep, where its jobs run in this process.

    Returns:
        The records of the jobs, in order.

    Raises:
        UserError: An argument or a YAML file is wrong.
    """
    known = read_flags(args)
    folders = paths.config_folders(known.config_dir)
    request = requested(known.overrides, folders, bool(known.multirun))
    problems: list[UserError] = []

    def made(config: DictConfig, folder: Path) -> Composed | None:
        try:
            return _composed(config, request, folders, folder)
        except UserError as error:
            # Hydra would print a line of its own about an exception, and a sweep goes on.
            problems.append(error)
            return None

    def apart(folder: Path) -> None:
        def job(config: DictConfig) -> None:
            if composed := made(config, folder):
                each(composed)

        hydra.main(
            version_base="1.3", config_path=str(paths.CONF), config_name=request.config
        )(job)()

    found = list[dict[str, Any]]()
    with (
        tempfile.TemporaryDirectory(prefix="posbench-sweep-") as here,
        hydra_at(here),
        _complaining(args, folders),
    ):
        sys.argv = ["posbench", *_for_hydra(args, known, request)]
        configs = directly(known, request)
        if configs is None and (known.multirun or request.multirun):
            return launched(request, apart)
        if configs is None:
            apart(Path(here))
        else:
            _in_turn(configs, lambda config: made(config, Path(here)), before, each)
        found = records(Path(here))
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


# Filling in


def _for_hydra(args: Sequence[str], known: Any, request: Request) -> list[str]:
    flags = [a for a in args if a not in known.overrides]
    if request.multirun and not (known.multirun or known.cfg or known.info):
        flags.append("-m")
    # Its parser refuses an override that follows a flag and its value: overrides go last.
    first = request.searched[:1]
    others = request.searched[1:]
    flags += [*(f"--config-dir={folder}" for folder in first), *search_path(others)]
    return [*flags, *request.overrides]


def _in_turn(
    configs: Sequence[DictConfig],
    made: Callable[[DictConfig], Composed | None],
    before: Callable[[Sequence[Composed]], None],
    each: Callable[[Composed], None],
) -> None:
    """Fill in all configs, then hand on those that are right, together and one by one."""
    every = list[Composed | None]()
    for config in configs:
        HydraConfig.instance().cfg = config
        every.append(made(config))
    before([composed for composed in every if composed])
    for config, composed in zip(configs, every, strict=True):
        HydraConfig.instance().cfg = config
        if composed:
            each(composed)


@contextmanager
def _complaining(args: Sequence[str], folders: Sequence[Path]) -> Iterator[None]:
    """What Hydra raises, as one line; its end behind ``--help`` and the like is none."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise _complaint(error, read_flags(args).overrides, folders[-1]) from error
    except SystemExit as end:
        if end.code:
            raise UserError(
                "flag", " ".join(args), "Hydra's flags", "posbench --help"
            ) from end


def _composed(
    config: DictConfig, request: Request, folders: Sequence[Path], folder: Path
) -> Composed:
    """A job as Hydra composed it; one that is wrong leaves a record in the folder."""
    now = HydraConfig.get()
    typed = [str(o) for o in OmegaConf.to_container(now.overrides.task, resolve=False)]  # type: ignore[union-attr]
    number = OmegaConf.select(now, "job.num", default=0, throw_on_missing=False) or 0
    multirun = now.mode == RunMode.MULTIRUN
    try:
        made = _filled(
            config, dict(now.runtime.choices), typed, request, folders, number, multirun
        )
    except UserError as error:
        facts = {"overrides": typed, "multirun": multirun, "folder": None}
        leave(folder, number, {**facts, "status": 2, "error": str(error)})
        raise
    return replace(made, records=folder)


def _filled(
    config: DictConfig,
    chosen: Mapping[str, str | None],
    typed: Sequence[str],
    request: Request,
    folders: Sequence[Path],
    number: int,
    multirun: bool,
) -> Composed:
    """The plain data of a composed config."""
    keys = tuple(o.split("=", 1)[0].lstrip("+~").split("@")[-1] for o in typed)
    raw: Any = OmegaConf.to_container(config, resolve=False)
    raw.pop("hydra", None)
    there = [group for group in GROUPS if isinstance(raw.get(group), dict)]
    blocks = _blocks(raw["model"], folders, keys) if "model" in there else {}
    kept = {*keys, *request.set_by_experiment}
    known = {k: v for k, v in defaults(ModelConfig).items() if k != "blocks"}
    for group in there:
        if group == "runtime":
            raw[group] = {**defaults(Runtime), **raw[group]}
            if isinstance(cluster := raw[group]["cluster"], dict):
                raw[group]["cluster"] = {**defaults(Cluster), **cluster}
            continue
        raw[group] = {"name": chosen.get(group), **raw[group]}
        if group == "model":
            raw[group] = {**known, **raw[group]}
            if raw[group]["name"] == "hf" and isinstance(
                path := raw[group]["path"], str
            ):
                raw[group]["name"] = model_name(path)
            if raw[group]["base_url"] and "/" in str(raw[group]["name"]):
                raw[group]["served"] = raw[group]["served"] or raw[group]["name"]
                raw[group]["name"] = model_name(raw[group]["served"])
        else:
            _fill(raw[group], group, blocks, kept)
    _need_taken(raw, blocks, keys)
    for key, value in _of_model(raw).items():
        if f"task.{key}" not in keys:
            raw["task"][key] = value
    return Composed(
        _resolved(raw), keys, spelled(request, typed), tuple(folders), number, multirun
    )


def _of_model(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the task that the paper of an experiment set for this model alone."""
    reference = _mapping(raw, "experiment", "reference")
    task = _mapping(raw, "task")
    measured = str(reference.get("task")).partition("/")[0] == task.get("name")
    return (
        _mapping(reference, "settings", str(_mapping(raw, "model").get("name")))
        if measured
        else {}
    )


def _mapping(node: Any, *keys: str) -> Mapping[str, Any]:
    """What lies under these keys; empty where it is no mapping, which the check of its group tells."""
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def _blocks(
    model: Mapping[str, Any], folders: Sequence[Path], typed: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """The blocks of a model's file, which must name something.

    Raises:
        UserError: A block is of no method, task or study, or a typed key of it is none of these.
    """
    fields = defaults(ModelConfig)
    blocks = {
        k: dict(v)
        for k, v in model.items()
        if k not in fields and isinstance(v, Mapping)
    }
    groups = "method", "task", "search", "study"
    there = list(
        itertools.chain(*(choices(*(folder / g for folder in folders)) for g in groups))
    )
    for name in blocks:
        if name not in there:
            allowed = "the name of a method, task, search or study"
            raise UserError(
                f"model.{name}", "a block", allowed, near(name, there, "remove it")
            )
    for key in typed:
        _, name, *rest = [*key.split("."), "", ""]
        if key.startswith("model.") and name in blocks and rest[0]:
            file = next(
                f
                for g in groups
                for r in folders
                if (f := r / g / f"{name}.yaml").is_file()
            )
            known = defaults(
                target(yaml.safe_load(file.read_text()), object, "model")[0]
            )
            if rest[0] not in (*known, "source"):
                hint = near(rest[0], list(known), "remove it")
                raise UserError(
                    key, blocks[name].get(rest[0]), f"keys {', '.join(known)}", hint
                )
    return blocks


def _need_taken(
    raw: Mapping[str, Any], blocks: Mapping[str, Any], typed: Sequence[str]
) -> None:
    """Refuse a typed key of a block that nothing in the config takes; studies read those of methods, too."""
    taken = set(choices(paths.CONF / "method")) if raw.get("study") else set()

    def look(node: Any, name: str) -> None:
        if isinstance(node, Mapping):
            taken.update(
                {
                    name,
                    str(node.get("name")),
                    str(node.get("_target_")).split(".")[-2:][0],
                }
            )
            for key, part in node.items():
                look(part, str(key))

    for group in ("method", "task", "search", "study"):
        look(raw.get(group), group)
    for key in typed:
        group, name, *rest = [*key.split("."), ""]
        if group == "model" and rest[:-1] and name in blocks and name not in taken:
            used = ", ".join(block for block in blocks if block in taken) or "none"
            hint = f"leave it out, or choose {name}"
            raise UserError(
                key,
                blocks[name].get(rest[0]),
                f"a block that this run uses: {used}",
                hint,
            )


def _fill(
    node: dict[str, Any],
    where: str,
    blocks: Mapping[str, Mapping[str, Any]],
    kept: set[str],
) -> None:
    """Lay a node over the model's block of its name, and that over its class's defaults; so inside it."""
    if "_target_" not in node:
        return
    cls, given = target(node, object, where)
    # Choices of one class share its module's block: an exhaustive search takes that of the channel search.
    names = (
        str(given.get("name") or where.rpartition(".")[2]),
        cls.__module__.rpartition(".")[2],
    )
    block = next((blocks[name] for name in names if name in blocks), {})
    fields = defaults(cls)
    for key, value in block.items():
        # Keys of an earlier release come along to be refused by name.
        if (
            key in (*fields, *getattr(cls, "renamed", ()))
            and f"{where}.{key}" not in kept
        ):
            node[key] = value
    for key, value in fields.items():
        node.setdefault(key, value)
    for key, value in node.items():
        nested = isinstance(value, dict) and "_target_" not in value
        inside = (
            {f"{key}.{name}": part for name, part in value.items()}
            if nested
            else {key: value}
        )
        for name, part in inside.items():
            if isinstance(part, dict):
                _fill(part, f"{where}.{name}", blocks, kept)


def _resolved(raw: dict[str, Any]) -> dict[str, Any]:
    if not re.search(r"\$\{|\?\?\?", json.dumps(raw, default=str)):
        return raw  # as most are: OmegaConf takes longer to resolve nothing than to read the files
    try:
        return OmegaConf.to_container(
            OmegaConf.create(dict(raw)), resolve=True, throw_on_missing=True
        )  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", "") or "config")
        reason = str(error).strip().splitlines()[0]
        raise UserError(key, "???", "a value", f"set {key}=... ({reason})") from error


def _complaint(error: Exception, overrides: Sequence[str], folder: Path) -> UserError:
    """What Hydra, OmegaConf and the YAML parser still find, in our form."""
    text = " ".join(str(error).split()) or type(error).__name__
    reason = text if len(text) <= 160 else f"{text[:160]} ..."
    if isinstance(error, yaml.YAMLError):
        return UserError(
            "config file", str(folder), "valid YAML", f"correct it ({reason})"
        )
    key = str(getattr(error, "full_key", None) or "config")
    if missing := re.search(
        r"Could not find '(\S+)/([^/\s]+)'.*?Available options in '\S+': (.*?) Config",
        text,
    ):
        return UserError(
            missing[1],
            missing[2],
            missing[3].replace(" ", ", "),
            f"leave {missing[1]} out",
        )
    return UserError(
        key,
        " ".join(overrides),
        "what conf/ holds",
        f"see posbench --cfg job ({reason})",
    )
