"""Composing a config: the one way from ``key=value`` arguments and YAML files to plain data.

Groups are chosen as Hydra does. Every other key is laid over the defaults of the class that its group names,
so that YAML files hold only differences; the settings of a method, task, search or study in the model's file come
in between, unless the user or the experiment set that key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posbench import paths
from posbench.errors import UserError, choices, is_machine_fault, near
from posbench.files.choices import read_choice, read_choice_files
from posbench.files.parse import read_text, unreadable
from posbench.model.load import ModelConfig
from posbench.pipeline.arguments import (
    ENDPOINT,
    HUB_MODEL,
    RUN_CONSTANTS,
    Request,
    leaf_keys,
    model_name,
    parse_request,
    read_flags,
)
from posbench.pipeline.multirun import (
    Record,
    call_hydra,
    compose_jobs,
    hydra_cleared,
    launch_folder,
    new_record,
    read_records,
    record_lost_job,
    runs_by_hydra,
    spelled,
    write_record,
)
from posbench.run.runtime import Cluster, Runtime
from posbench.schema import (
    check_shape,
    default_values,
    describe_type,
    resolve_target,
    shortened,
)
from posbench.tasks.items import positions_in_fewer_items

GROUPS_WITH_BLOCKS = ("method", "task", "search", "study")
"""Groups whose members may have a block in a model's file, which they take constants from."""
MAX_REASON_LENGTH = 160
UNRESOLVED = re.compile(r"\$\{|\?\?\?")
"""Syntax that OmegaConf resolves: references to other keys, and missing values."""
MISSING_CHOICE = re.compile(
    r"Could not find '(\S+)/([^/\s]+)'.*?Available options in '\S+': (.*?) Config"
)


@dataclass(frozen=True)
class ComposedConfig:
    """One composed config.

    Attributes:
        raw: The config as plain data, every default filled in, nothing left to resolve.
        typed: Dotted keys that the user set.
        overrides: The arguments of this job as typed.
        folders: config folders, posbench's first.
        number: Number of the job in a sweep.
        multirun: Whether it is one of a sweep.
        notes: Changes that make an experiment and a model go together, a line each.
        experiment: Name of the experiment, as it is typed; empty without one.
        grid: Dotted keys among the typed ones that the experiment's grid sets.
    """

    raw: dict[str, Any]
    typed: tuple[str, ...]
    overrides: tuple[str, ...]
    folders: tuple[Path, ...]
    number: int = 0
    multirun: bool = False
    notes: tuple[str, ...] = ()
    experiment: str = ""
    grid: frozenset[str] = frozenset()

    @property
    def typed_by_user(self) -> frozenset[str]:
        """Dotted keys set by the user, without the keys of an experiment's grid."""
        return frozenset(self.typed) - self.grid

    def arguments(self) -> list[str]:
        """Arguments after a verb that select this config alone."""
        experiment = [f"experiment={self.experiment}"] if self.experiment else []
        own_folder = paths.own_folder(self.folders)
        flag = [f"--config-dir={own_folder}"] if own_folder else []
        return [*experiment, *self.overrides, *flag]


@dataclass(frozen=True)
class Jobs:
    """The configs that a command line asks for.

    Attributes:
        composed: The jobs that are right, in order.
        refused: Records of the jobs of a sweep that are wrong, by their numbers.
        run_by_hydra: Whether :func:`launch` must run them, as they choose a launcher.
    """

    composed: Sequence[ComposedConfig] = ()
    refused: Mapping[int, Record] = field(default_factory=dict)
    run_by_hydra: bool = False


def compose(args: Sequence[str]) -> Jobs:
    """Compose the configs that the arguments ask for: one, or one for each job of a sweep.

    Args:
        args: ``key=value`` overrides, and the flags for a sweep and the user's config folder.

    Returns:
        The composed configs, the jobs of a sweep that are refused, and whether Hydra has to run the jobs.

    Raises:
        UserError: An argument or a YAML file is wrong.
    """
    arguments = _Arguments.of(args)
    with _hydra_errors_translated(arguments), hydra_cleared():
        try:
            configs = compose_jobs(arguments.request)
        except (OSError, RecursionError) as error:
            # OmegaConf raises OSError for a file that holds a number, and calls itself for each level.
            if isinstance(error, HydraException) or is_machine_fault(error):
                raise
            typed = shortened(" ".join(arguments.overrides))
            allowed = "mappings in every file, none of them nested deeply"
            folder = paths.own_folder(arguments.folders) or paths.CONF
            hint = f"look at the overrides and the files in {folder} ({error})"
            raise UserError("config", typed, allowed, hint) from error
        composed = list[ComposedConfig]()
        refused = dict[int, Record]()
        for config in configs:
            HydraConfig.instance().cfg = config
            try:
                composed.append(_compose_job(config, config.hydra, arguments))
            except UserError as error:
                if config.hydra.mode != RunMode.MULTIRUN:
                    raise
                refused[config.hydra.job.num] = _refusal(config.hydra, arguments, error)
        return Jobs(composed, refused, runs_by_hydra(arguments.request, configs))


def launch(
    args: Sequence[str], jobs: Jobs, run: Callable[[ComposedConfig], Record]
) -> list[Record]:
    """Let Hydra run jobs, each in whatever process its launcher takes.

    Args:
        args: The arguments of :func:`compose`.
        jobs: Result of that composition.
        run: Runs a job and returns its record.

    Returns:
        The records of the jobs, in order. A job whose process died has a record of that.
    """
    arguments = _Arguments.of(args)
    if not jobs.composed:
        return list(jobs.refused.values())
    first = jobs.composed[0]
    outputs = str(first.raw["runtime"]["outputs"] or Runtime.outputs)
    with launch_folder(outputs) as folder:

        def run_job(config: DictConfig) -> None:
            job = HydraConfig.get()
            try:
                record = run(_compose_job(config, job, arguments))
            except UserError as error:
                # Hydra would print a line of its own about an exception, and a sweep goes on.
                record = _refusal(job, arguments, error)
            write_record(folder, _number(job), record)

        try:
            with _hydra_errors_translated(arguments):
                call_hydra(arguments.request, run_job, folder)
        except Exception as error:
            if isinstance(error, UserError) or not first.multirun:
                raise
            for job in jobs.composed:
                record_lost_job(folder, job.number, job.overrides, error)
        return read_records(folder)


def compose_one(*overrides: str) -> ComposedConfig:
    """Return the one config that overrides ask for.

    Raises:
        UserError: An override or a YAML file is wrong.
    """
    return compose(overrides).composed[0]


def compose_record(
    groups: Mapping[str, Any], folders: Sequence[Path]
) -> ComposedConfig:
    """Return the config of the groups that a run recorded.

    Whatever the others are, nothing reads them.

    Args:
        groups: The groups.
        folders: posbench's config folder, and the user's own.
    """
    defaults = compose_one("method=none")
    raw = {**defaults.raw, **groups}
    return replace(defaults, raw=raw, typed=(), folders=tuple(folders))


# Hydra


@dataclass(frozen=True)
class _Arguments:
    """Arguments, read.

    Attributes:
        overrides: The overrides as typed.
        folders: posbench's config folder, and the user's own.
        request: Input of Hydra.
    """

    overrides: Sequence[str]
    folders: tuple[Path, ...]
    request: Request

    @classmethod
    def of(cls, args: Sequence[str]) -> _Arguments:
        """Read arguments."""
        flags = read_flags(args)
        folders = paths.config_folders(flags.config_dir)
        request = parse_request(flags.overrides, folders, flags.multirun)
        return cls(flags.overrides, tuple(folders), request)


@contextmanager
def _hydra_errors_translated(arguments: _Arguments) -> Iterator[None]:
    """Translate Hydra's errors into ours, one line each."""
    try:
        yield
    except (
        HydraException,
        OmegaConfBaseException,
        yaml.YAMLError,
        UnicodeDecodeError,
    ) as error:
        folder = paths.own_folder(arguments.folders) or paths.CONF
        raise _translate(error, arguments.overrides, folder) from error


def _translate(error: Exception, overrides: Sequence[str], folder: Path) -> UserError:
    """Turn an error of Hydra, OmegaConf or the YAML parser into a UserError of one line.

    Args:
        error: The error.
        overrides: What was composed.
        folder: Config folder that was read.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    reason = text
    if len(text) > MAX_REASON_LENGTH:
        reason = f"{text[:MAX_REASON_LENGTH]} ..."
    if isinstance(error, UnicodeDecodeError):
        # The error does not name the file.
        for file in sorted(folder.rglob("*.yaml")):
            try:
                read_text(file)
            except ValueError:
                return unreadable(file, error, "YAML in UTF-8", "save it as UTF-8")
    if isinstance(error, yaml.YAMLError | UnicodeDecodeError):
        hint = f"correct it ({reason})"
        return UserError("config file", str(folder), "valid YAML", hint)
    missing = MISSING_CHOICE.search(text)
    if missing:
        group, choice, options = missing.groups()
        allowed = options.replace(" ", ", ")
        return UserError(group, choice, allowed, f"leave {group} out")
    key = str(getattr(error, "full_key", None) or "config")
    hint = f"posbench --cfg job prints them ({reason})"
    return UserError(key, " ".join(overrides), "keys and choices of conf/", hint)


# Filling in


def _compose_job(config: DictConfig, job: Any, arguments: _Arguments) -> ComposedConfig:
    """Turn a job's config into plain data with all defaults.

    Args:
        config: The config as Hydra composed it.
        job: Hydra's description of the job.
        arguments: The arguments.
    """
    request, folders = arguments.request, arguments.folders
    overrides = _overrides(job)
    typed = tuple(_key_of(override) for override in overrides)
    choices_made: Mapping[str, str | None] = dict(job.runtime.choices)
    raw: Any = OmegaConf.to_container(config, resolve=False)
    raw.pop("hydra", None)
    groups = [group for group in paths.GROUPS if isinstance(raw.get(group), dict)]
    blocks = {}
    if "model" in groups:
        blocks = _read_blocks(raw["model"], folders, typed)
    notes: list[str] = []
    for group in groups:
        if group in typed and group not in request.grid:
            notes += _drop_keys_of_experiment(raw[group], group, request, typed)
    # Keys that the model's block may not set.
    fixed = {*typed, *request.set_by_experiment}
    for group in groups:
        fixed |= _keys_of_own_choice(group, choices_made.get(group), folders)
    runs = _take_run_constants(raw.get("method"), "method", fixed)
    if runs:
        raw["constants"] = runs
    for group in groups:
        if group == "runtime":
            raw[group] = _fill_runtime(raw[group])
            continue
        # The choice's name, unless its file gives another one.
        raw[group] = {"name": choices_made.get(group), **raw[group]}
        if group == "model":
            raw[group] = _fill_model(raw[group])
        else:
            _fill_node(raw[group], group, blocks, fixed)
    _need_used_blocks(raw, blocks, typed)
    for key, value in _paper_settings(raw).items():
        if f"task.{key}" not in typed:
            raw["task"][key] = value
    raw = _resolve(raw)
    classes = {"model": ModelConfig, "runtime": Runtime}
    for group in groups:
        _read_numbers(raw[group], group, classes.get(group))
    return ComposedConfig(
        raw=raw,
        notes=(*notes, *_fit_positions(raw, typed)),
        experiment=request.experiment,
        grid=request.grid,
        typed=typed,
        overrides=spelled(request, overrides),
        folders=folders,
        number=_number(job),
        multirun=job.mode == RunMode.MULTIRUN,
    )


def _overrides(job: Any) -> list[str]:
    """The overrides of a job, from Hydra's description."""
    overrides: Any = OmegaConf.to_container(job.overrides.task, resolve=False)
    return [str(override) for override in overrides]


def _number(job: Any) -> int:
    """The number of a job; Hydra numbers jobs only in a sweep."""
    number = OmegaConf.select(job, "job.num", default=0, throw_on_missing=False)
    return int(number or 0)


def _refusal(job: Any, arguments: _Arguments, error: UserError) -> Record:
    """The record of a job that is wrong."""
    overrides = spelled(arguments.request, _overrides(job))
    record = new_record(overrides, job.mode == RunMode.MULTIRUN)
    return {**record, "status": error.status, "error": str(error)}


def _key_of(override: str) -> str:
    """The dotted key of an override, or the group that it chooses."""
    return override.split("=", 1)[0].lstrip("+~").split("@")[-1]


def _keys_of_own_choice(
    group: str, name: str | None, folders: Sequence[Path]
) -> set[str]:
    """Return the dotted keys that the user's own file of a choice sets, or one of his own that it extends.

    A model's block leaves them as they are.

    Args:
        group: The config group.
        name: The choice.
        folders: config folders, posbench's first.
    """
    own_folder = paths.own_folder(folders)
    if own_folder is None:
        return set()
    files = read_choice_files(group, str(name), folders)
    return {
        key
        for file, data in files.items()
        if file.is_relative_to(own_folder)
        for key in leaf_keys(data, group)
    }


def _drop_keys_of_experiment(
    node: dict[str, Any], group: str, request: Request, typed: Sequence[str]
) -> Iterator[str]:
    """Drop settings of an experiment that belong to its own choice of a group, where the user chose another.

    Args:
        node: The group's node; changed.
        group: The config group.
        request: The experiment, with the dotted keys that it sets.
        typed: Dotted keys that the user set, which stay.

    Yields:
        A line that names them, if there are any.
    """
    if "_target_" not in node:
        return
    cls, _ = resolve_target(node, object, group)
    of_experiment, of_user = (
        {".".join(key.split(".")[:2]) for key in keys}
        for keys in (request.set_by_experiment, typed)
    )
    fields = {f"{group}.{name}" for name in default_values(cls)}
    foreign = of_experiment - of_user - fields
    dropped = [key for name in node if (key := f"{group}.{name}") in foreign]
    for key in dropped:
        del node[key.partition(".")[2]]
    if dropped:
        yield f"{', '.join(dropped)}: left out, the {group} that was chosen has no such setting"


def _fill_runtime(node: Mapping[str, Any]) -> dict[str, Any]:
    runtime = {**default_values(Runtime), **node}
    if isinstance(runtime["cluster"], dict):
        runtime["cluster"] = {**default_values(Cluster), **runtime["cluster"]}
    return runtime


def _fill_model(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's config node with the defaults of all missing keys, and a name that can name a folder.

    A checkpoint without a name is named after its path. A served model with a name such as ``org/model`` keeps it in
    ``served``, which is sent to the server.
    """
    fields = default_values(ModelConfig)
    del fields["blocks"]
    model = {**fields, **node}
    if model["name"] == HUB_MODEL and isinstance(model["path"], str):
        model["name"] = model_name(model["path"])
    name = str(model["name"])
    if model["base_url"]:
        if model["served"] and name == ENDPOINT:
            model["name"] = model_name(str(model["served"]))
        elif not re.fullmatch(r"\w[\w.-]*", name):
            # Server names have a / or a :, folder names have not.
            model["served"] = model["served"] or name
            model["name"] = model_name(name)
    return model


def _paper_settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the task that the paper of an experiment set for this model alone; mostly empty."""
    reference = _mapping(raw, "experiment", "reference")
    measured_task = str(reference.get("task")).partition("/")[0]
    if measured_task != _mapping(raw, "task").get("name"):
        return {}
    model = str(_mapping(raw, "model").get("name"))
    return _mapping(reference, "settings", model)


def _fit_positions(raw: dict[str, Any], typed: Sequence[str]) -> Iterator[str]:
    """Move default gold positions into the items of a prompt, where their number was set elsewhere.

    An experiment's positions count the items of its paper, and a model's file may have fewer.

    Args:
        raw: The config; the task's node is changed.
        typed: Dotted keys that the user set.

    Yields:
        A line for each change.
    """
    node = raw.get("task")
    if not isinstance(node, dict) or "_target_" not in node:
        return
    cls, _ = resolve_target(node, object, "task")
    defaults = default_values(cls)
    keys = ("positions", "calibration_positions")
    for key, size_key in zip(keys, getattr(cls, "sizes", ()), strict=False):
        positions = node.get(key)
        new_size = node.get(size_key)
        if f"task.{key}" in typed or not isinstance(positions, list):
            continue
        indices = [p for p in positions if isinstance(p, int)]
        # No items at all is a fault of the number, which its check reports.
        if (
            not isinstance(new_size, int)
            or new_size < 1
            or max(indices, default=-1) < new_size
        ):
            continue
        size = max(defaults.get(size_key) or 0, max(indices) + 1)
        node[key] = list(positions_in_fewer_items(positions, size, new_size))
        yield (
            f"task.{key}: {positions} -> {node[key]}, the same places among task.{size_key}={new_size}"
        )


def _mapping(node: Any, *keys: str) -> Mapping[str, Any]:
    """The mapping under these keys; empty where there is another value, which the check of its group reports."""
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def _read_blocks(
    model: Mapping[str, Any], folders: Sequence[Path], typed: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the blocks of a model's file: constants of a method, task, search or study for this model, by its name.

    Args:
        model: The model's config node.
        folders: Config folders.
        typed: Keys that the user typed.

    Raises:
        UserError: A block belongs to no method, task, search or study, or a typed key to none of its settings.
    """
    fields = default_values(ModelConfig)
    blocks = {
        name: dict(value)
        for name, value in model.items()
        if name not in fields and isinstance(value, Mapping)
    }
    known_names = [
        name
        for group in GROUPS_WITH_BLOCKS
        for name in choices(*paths.group_folders(group, folders))
    ]
    for name in blocks:
        if name not in known_names:
            allowed = "the name of a method, task, search or study"
            hint = near(name, known_names, "remove it")
            if name == "search":
                hint = "give the block the name of its search: channel, genetic, ..."
            raise UserError(f"model.{name}", "a block", allowed, hint)
    for key in typed:
        name, field_name = _block_field(key)
        if name in blocks and field_name:
            block_fields = _fields_of_choice(name, folders)
            if field_name not in (*block_fields, "source"):
                value = blocks[name].get(field_name)
                allowed = f"keys {', '.join(block_fields)}"
                hint = near(field_name, list(block_fields), "remove it")
                raise UserError(key, value, allowed, hint)
    return blocks


def _block_field(key: str) -> tuple[str, str]:
    """Name of the block and of its field that a dotted key ``model.NAME.FIELD`` sets; empty for other keys."""
    group, *names = key.split(".")
    if group != "model" or len(names) < 2:
        return "", ""
    return names[0], names[1]


def _fields_of_choice(name: str, folders: Sequence[Path]) -> Mapping[str, Any]:
    """Fields, with their defaults, of the method, task, search or study of a name."""
    group = next(g for g in GROUPS_WITH_BLOCKS if paths.find_choice(g, name, folders))
    cls, _ = resolve_target(read_choice(group, name, folders), object, group)
    return default_values(cls)


def _need_used_blocks(
    raw: Mapping[str, Any], blocks: Mapping[str, Any], typed: Sequence[str]
) -> None:
    """Refuse a typed key of a model's block (see :func:`_read_blocks`) that this run would not read.

    Args:
        raw: The composed config.
        blocks: The model's blocks by name.
        typed: Keys that the user typed, such as ``model.scale_channel.factor``.

    Raises:
        UserError: The block's method, task, search or study is not part of the run.
    """
    used = set[str]()
    # Studies also read the constants of methods that they apply themselves.
    if raw.get("study"):
        used.update(choices(paths.CONF / "method"))
    for group in GROUPS_WITH_BLOCKS:
        used |= _names_in(raw.get(group), group)
    for key in typed:
        name, field_name = _block_field(key)
        if field_name and name in blocks and name not in used:
            listed = ", ".join(block for block in blocks if block in used) or "none"
            value = blocks[name].get(field_name)
            allowed = f"a block that this run uses: {listed}"
            raise UserError(key, value, allowed, f"leave it out, or choose {name}")


def _names_in(node: Any, key: str) -> set[str]:
    """Return all names under which a config may take a block of the model's file: keys, names and modules of its nodes.

    Args:
        node: A config node.
        key: Its key.
    """
    if not isinstance(node, Mapping):
        return set()
    module = str(node.get("_target_")).split(".")[-2:][0]
    names = {key, str(node.get("name")), module}
    for name, value in node.items():
        names |= _names_in(value, str(name))
    return names


def _take_run_constants(node: Any, key: str, fixed: set[str]) -> list[dict[str, Any]]:
    """Take out of a method's node, and its parts, which run their constants come from.

    Args:
        node: The node; changed.
        key: Its dotted key.
        fixed: Dotted keys that blocks of the model's file leave alone; the keys of such a method are added.
    """
    if not isinstance(node, dict):
        return []
    runs = []
    constants = node.pop(RUN_CONSTANTS, None)
    if constants:
        runs.append(constants)
        fixed.update(leaf_keys(node, key))
        if key != "method":
            del node["name"]  # a part has the name of its key
    for name, part in (node.get("parts") or {}).items():
        runs += _take_run_constants(part, f"{key}.parts.{name}", fixed)
    return runs


def _fill_node(
    node: dict[str, Any],
    key: str,
    blocks: Mapping[str, Mapping[str, Any]],
    fixed: Collection[str],
) -> None:
    """Complete a node and those inside: keys in ``fixed`` win, then the model's block, the node, the class's defaults.

    Args:
        node: The node; changed.
        key: Its dotted key.
        blocks: Blocks of the model's file, by name.
        fixed: Dotted keys that the user or the experiment set.
    """
    if "_target_" not in node:
        return
    cls, values = resolve_target(node, object, key)
    name = str(values.get("name") or key.rpartition(".")[2])
    # Choices of one class share its module's block: an exhaustive search uses the channel search's.
    module = cls.__module__.rpartition(".")[2]
    block = blocks.get(name, blocks.get(module, {}))
    fields = default_values(cls)
    for field_name, value in block.items():
        if field_name in fields and f"{key}.{field_name}" not in fixed:
            node[field_name] = value
    for field_name, value in fields.items():
        node.setdefault(field_name, value)
    for field_name, value in node.items():
        if not isinstance(value, dict):
            continue
        if "_target_" in value:
            _fill_node(value, f"{key}.{field_name}", blocks, fixed)
            continue
        for part_name, part in value.items():
            if isinstance(part, dict):
                _fill_node(part, f"{key}.{field_name}.{part_name}", blocks, fixed)


def _read_numbers(node: Any, key: str, cls: Any = None) -> None:
    """Put numbers in place of texts that fields of numbers read as such, so that both spellings are the same run.

    Values in quotes, and those of environment variables, are text.

    Args:
        node: The node, and those inside; changed.
        key: Its dotted key.
        cls: The class that it describes, if not by its ``_target_``.
    """
    if not isinstance(node, dict):
        return
    if "_target_" in node:
        cls, _ = resolve_target(node, object, key)
    kinds = _field_kinds(cls) if cls else {}
    for name, value in node.items():
        _read_numbers(value, f"{key}.{name}")
        if name in kinds and isinstance(value, str | list):
            with suppress(UserError):  # the check of its class reports it
                node[name] = _numbers_in(value, check_shape(value, kinds[name], "", ""))


@cache
def _field_kinds(cls: Any) -> dict[str, Any]:
    """The types of a class's fields, those that can hold a number."""
    kinds = get_type_hints(cls, include_extras=True)
    words = ("number", "bool")
    return {k: v for k, v in kinds.items() if any(w in describe_type(v) for w in words)}


def _numbers_in(value: Any, read: Any) -> Any:
    """A value with the numbers of the object that was read from it in place of texts."""
    if isinstance(value, list):
        return [_numbers_in(*pair) for pair in zip(value, read, strict=True)]
    return read if isinstance(value, str) and isinstance(read, int | float) else value


def _resolve(raw: dict[str, Any]) -> dict[str, Any]:
    """Replace references to other keys (``${...}``) by their values.

    Raises:
        UserError: A referenced key does not exist, or a mandatory value (``???``) is missing.
    """
    if not UNRESOLVED.search(json.dumps(raw, default=str)):
        return raw  # as most are: OmegaConf takes longer to resolve nothing than to read the files
    try:
        resolved: Any = OmegaConf.to_container(
            OmegaConf.create(dict(raw)), resolve=True, throw_on_missing=True
        )
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", "") or "config")
        reason = str(error).strip().splitlines()[0]
        hint = f"set {key}=... ({reason})"
        raise UserError(key, "???", "a value", hint) from error
    return dict(resolved)
