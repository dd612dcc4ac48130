"""The command line, and the additions of an experiment: overrides as Hydra reads them.

Hydra has no way to choices that no file holds (folders, hub ids, lists of methods), nor to keys that a file leaves to
the defaults of a class: its parser of overrides is asked, and these are spelled as it takes them.
"""

from __future__ import annotations

import itertools
import os
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from posbench import paths
from posbench.errors import UserError, choices, near, unknown_name
from posbench.files import sources
from posbench.files.parse import CORRECT_FILE, read_yaml
from posbench.pipeline.constants import FROM_RUN, read_constants
from posbench.run.runtime import Runtime
from posbench.schema import override_text

CLUSTER = "runtime/cluster"
"""A group inside a group."""
GROUP_OF_KEY = {"search.side_task": "task"}
"""Keys inside a group that are choices of another."""
TOP = (*paths.GROUPS, "stages", "experiment", "budget")
FILE_KEYS = ("grid", "minutes", "needs_weights")
"""Keys of ``experiment`` that are read from the experiment's file before anything is composed."""
USER_SOURCE = "given by the user"
"""``model.source`` of a checkpoint that no YAML describes."""
ENDPOINT = "endpoint"
"""The choice of ``model`` that takes its name from a server."""
HUB_MODEL = "hf"
"""The choice of ``model`` that takes its name from ``model.path``."""
URL = re.compile(r"https?://\S+")
"""The address of a server, as it is typed in place of a model."""
HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/\S*)?")
"""An address without its scheme."""
COMPOSED_METHOD = "posbench.methods.composed.Composed"
MAX_NAME_LENGTH = 60
STAGES_PATTERN = re.compile(r"stages=(?!null$)([a-z]+(?:,[a-z]+)*)")
"""Stages as one would type them; Hydra takes a comma for a sweep."""
RUN_OF_METHOD_PATTERN = re.compile(
    rf"""(?P<quote>['"]){FROM_RUN}(?P<quoted>(?:\\.|(?!(?P=quote)).)+)(?P=quote)"""
    rf"""|\b{FROM_RUN}(?P<bare>[^,\[\]'"]+)"""
)
"""A run that is named in place of a method; a path may hold spaces, and in quotes any sign."""
METHOD_LIST = re.compile(r"\[([^\[\]]*)\]")
RUN_CONSTANTS = "run_constants"
"""Key of a method's node that names the run its constants come from."""
BARE_OVERRIDE = re.compile(r"([^=]+)=([^\[\]{}()'\",=$\\]+)")
"""A key and a value without brackets and quotes."""
NEEDS_QUOTES = re.compile(r"[^\x00-\x7f]|~")
"""Hydra's grammar knows no letters but ASCII outside of quotes, and no ~."""


@dataclass(frozen=True)
class Request:
    """The input of Hydra.

    Attributes:
        config: Name of the primary config.
        searched: Folders to search in addition to conf/. The first has the primary config, unless conf/ has.
        overrides: The overrides.
        multirun: Whether the user or an experiment asks for a sweep.
        experiment: Name of the experiment; empty without one.
        grid: Dotted keys over which the experiment sweeps, without typed ones.
        set_by_experiment: Dotted keys that the experiment sets.
        spelled: Keys of the overrides, each as the user typed it.
        spelled_values: Typed values that Hydra gets in another form, by group: checkpoints, lists of methods
            and methods that come from runs, each with the typed form.
    """

    config: str
    searched: tuple[Path, ...]
    overrides: tuple[str, ...]
    multirun: bool
    experiment: str
    grid: frozenset[str]
    set_by_experiment: frozenset[str]
    spelled: Mapping[str, str]
    spelled_values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def _refuse_sweeper_params(experiment: Mapping[str, Any]) -> None:
    """Refuse Hydra's own key for a grid, which an experiment would pass over, unless Hydra itself sweeps over it."""
    hydra = experiment.get("hydra") or {}
    sweeper = hydra.get("sweeper") or {}
    if "params" in sweeper and hydra.get("mode") != "MULTIRUN":
        field = "hydra.sweeper.params"
        allowed = "experiment.grid"
        hint = "put its keys there, each with a list: method.factor: [1, 0]"
        raise UserError(field, sweeper["params"], allowed, hint)


def _refuse_extended_experiment(experiment: Mapping[str, Any], file: Path) -> None:
    """Refuse an experiment that extends another one, whose grid, settings and reference would be passed over."""
    entries = experiment.get("defaults")
    for entry in entries if isinstance(entries, list) else []:
        extended = entry
        if isinstance(entry, Mapping):
            # It chooses from a group, as ``override task: longbench`` does.
            extended = entry.get("experiment", "_self_")
        if extended not in ("config", "_self_"):
            allowed = "config, _self_, and choices as override task: NAME"
            hint = f"copy what you need of {extended} into {file.name}"
            raise UserError(f"{file}: defaults", extended, allowed, hint)


class Flags(NamedTuple):
    """Arguments of a run: its overrides, whether it is a sweep, and the user's own config folder."""

    overrides: list[str]
    multirun: bool
    config_dir: str | None


def read_flags(args: Sequence[str]) -> Flags:
    """Separate the overrides of a command line (``key=value``) from its flags (``-m``, ``--config-dir``).

    Raises:
        UserError: A flag is unknown, has no value, or is given twice.
    """
    overrides = list[str]()
    multirun = False
    config_dir = None
    remaining = iter(args)
    for arg in remaining:
        name, sign, value = arg.partition("=")
        if arg in ("-m", "--multirun"):
            multirun = True
        elif name == "--config-dir":
            folder = value if sign else next(remaining, "")
            if not folder:
                allowed = "a folder with your YAML files"
                raise UserError(name, folder, allowed, f"{name} DIR")
            if config_dir is not None:
                hint = f"put the files of {config_dir} and {folder} into one folder"
                raise UserError(name, folder, "the flag once", hint)
            config_dir = folder
        elif arg.startswith("-"):
            allowed = "key=value, -m (--multirun), --config-dir DIR, --cfg job"
            raise UserError("flag", arg, allowed, "posbench --help")
        else:
            overrides.append(arg)
    return Flags(overrides, multirun, config_dir)


def parse_request(
    overrides: Sequence[str], folders: Sequence[Path], multirun: bool
) -> Request:
    """Return the overrides of the user and of the experiment, as Hydra reads them.

    Args:
        overrides: The overrides as typed.
        folders: config folders, posbench's first.
        multirun: Whether the user asks for a sweep.

    Returns:
        The request for Hydra, with what turns its names back into the typed ones.

    Raises:
        UserError: An override names nothing that there is.
    """
    # Hydra's own spelling of an experiment has a plus.
    is_experiment = re.compile(r"\+{0,2}experiment=(.*)")
    experiment_names = [
        match[1] for match in map(is_experiment.fullmatch, overrides) if match
    ]
    if len(experiment_names) > 1:
        value = " ".join(experiment_names)
        hint = f"a command for each: posbench experiment={experiment_names[0]}"
        raise UserError("experiment", value, "one experiment", hint)
    group_overrides = [
        _with_stages_as_list(with_address(override))
        for override in overrides
        if not is_experiment.fullmatch(override)
    ]
    group_overrides, path_models = _name_path_models(group_overrides, folders)
    group_overrides, run_methods = _name_run_methods(group_overrides)
    parsed = _parse(group_overrides)
    _refuse_deleted_and_set(parsed)
    model = _implied_model(parsed)
    if model:
        parsed += _parse([f"model={model}"])
    searched_folders = list(folders[1:])
    reference_override = list[str]()
    config = "config"
    experiment = dict[str, Any]()
    if experiment_names:
        file = _find_experiment(experiment_names[0], folders)
        config = file.stem
        experiment = read_yaml(file, hint=CORRECT_FILE)
        _refuse_extended_experiment(experiment, file)
        hydra_mode = any(o.key_or_group == "hydra.mode" for o in parsed)
        if not multirun and not hydra_mode:
            _refuse_sweeper_params(experiment)
        # The experiment's file is the main config, so Hydra searches its folder first.
        searched_folders = [file.parent, *searched_folders]
        reference = (experiment.get("experiment") or {}).get("reference") or {}
        # The experiment's YAML names the table relative to itself.
        table = file.parent / str(reference.get("file"))
        if table.is_file():
            reference_override = [f"experiment.reference.file={table}"]
    typed_keys = {override.key_or_group for override in parsed}
    grid = (experiment.get("experiment") or {}).get("grid") or {}
    # The experiment's grid is a sweep over the keys that the user did not type.
    sweep = [
        f"{key}={','.join(override_text(value) for value in values)}"
        for key, values in grid.items()
        if key not in typed_keys
    ]
    parsed += _parse(sweep)
    rewritten = []
    typed_spelling = {}
    spelled_methods = dict[str, str]()
    for override in parsed:
        extra_names = {"model": list(path_models), "method": list(run_methods)}
        _check(override, folders, multirun or bool(sweep), extra_names)
        text = _rewrite(override, run_methods, spelled_methods)
        rewritten.append(text)
        typed_spelling[text.split("=")[0]] = str(override.input_line).split("=")[0]
    spelled_runs = {
        name: f"{FROM_RUN}{node[RUN_CONSTANTS]['run']}"
        for name, node in run_methods.items()
    }
    for name, methods in spelled_methods.items():
        # Runs inside a list have their own spelling.
        parts = [
            spelled_runs.get(part, part) for part in re.split(r"([^\w.-]+)", methods)
        ]
        spelled_methods[name] = "".join(parts)
    if multirun or sweep:
        rewritten = _merge_mappings(rewritten)
    set_by_experiment = frozenset(
        key for group in paths.GROUPS for key in leaf_keys(experiment.get(group), group)
    )
    return Request(
        config=config,
        searched=tuple(searched_folders),
        overrides=(*reference_override, *rewritten),
        multirun=multirun or bool(sweep),
        experiment=experiment_names[0] if experiment_names else "",
        grid=frozenset(grid) - typed_keys,
        set_by_experiment=set_by_experiment,
        spelled=typed_spelling,
        spelled_values={
            "model": path_models,
            "method": spelled_methods | spelled_runs,
        },
    )


def _refuse_deleted_and_set(overrides: Sequence[Override]) -> None:
    """Refuse a key that is set and deleted with ~, whatever the order: Hydra would delete it."""
    deleted = [o.key_or_group for o in overrides if o.is_delete()]
    for override in overrides:
        key = override.key_or_group
        for other in deleted:
            if not override.is_delete() and f"{key}.".startswith(f"{other}."):
                value = str(override.input_line).partition("=")[2]
                allowed = f"~{other} or {key}=VALUE, not both"
                raise UserError(key, value, allowed, f"leave ~{other} out")


def _refuse_unknown_hydra_key(key: str, value: str) -> None:
    """Refuse a key that Hydra's own config does not have: with a plus Hydra would add it, and read it nowhere."""
    kind: Any = HydraConf
    for name in re.split("[./]", key.partition("@")[0])[1:]:
        # The keys of a mapping, a launcher or a sweeper are theirs.
        kinds = get_type_hints(kind) if is_dataclass(kind) else {}
        if kinds and name not in kinds:
            hint = near(name, list(kinds), "leave it out")
            raise UserError(key, value, f"keys {', '.join(kinds)}", hint)
        kind = kinds.get(name)


def _implied_model(overrides: Sequence[Override]) -> str:
    """Return the choice of group ``model`` that typed keys imply: ``endpoint`` for a server, ``hub`` for a checkpoint.

    It is empty where the user chose a model, or typed neither ``model.base_url`` nor ``model.path``. Without this
    choice the default model's name and constants would be used for another model.
    """
    set_keys = {o.key_or_group: o for o in overrides if not o.is_delete()}
    if "model" in set_keys:
        return ""
    address = set_keys.get("model.base_url")
    if address and (address.is_sweep_override() or address.value() is not None):
        return ENDPOINT
    return HUB_MODEL if "model.path" in set_keys else ""


def _with_stages_as_list(override: str) -> str:
    match = STAGES_PATTERN.fullmatch(override)
    return f"stages=[{match[1]}]" if match else override


# Models


def with_address(override: str) -> str:
    """Return an override as typed; a server's address in place of a model's name becomes ``model.base_url``.

    Raises:
        UserError: An address has no ``http://``, or stands in a list with names.
    """
    key, _, value = override.partition("=")
    if key != "model":
        return override
    parts = value.split(",")
    for part in parts:
        if HOST_AND_PORT.fullmatch(part) and not sources.exists(Path(part)):
            allowed = "an address with http:// or https://"
            raise UserError("model", part, allowed, f"model=http://{part}")
    are_addresses = [bool(URL.fullmatch(part)) for part in parts]
    if any(are_addresses) and not all(are_addresses):
        allowed = "names alone, or addresses alone"
        raise UserError("model", value, allowed, "give each kind its own command")
    return f"model.base_url={value}" if all(are_addresses) else override


def folder_name(text: str) -> str:
    """A text in letters, digits and inner ``-._`` of ASCII, for the name of a folder; may be empty."""
    ascii_text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore")
    safe_text = re.sub(r"[^\w.-]+", "-", ascii_text.decode()).strip("-._")
    return safe_text[-MAX_NAME_LENGTH:].strip("-._")


def model_name(path: str, taken: Iterable[str] = ()) -> str:
    """Return the name of the checkpoint of a folder or hub id: the end of its path, safe for a folder.

    Args:
        path: The folder or hub id.
        taken: Names of other models; parts of the path go in front until the name differs from all.
    """
    checkpoint = Path(path).expanduser()
    if sources.exists(checkpoint):
        checkpoint = Path(os.path.abspath(checkpoint))
    parts = []
    for part in checkpoint.parts:
        if safe_part := folder_name(part):
            parts.append(safe_part)
    parts = parts or ["model"]
    # From the last part alone to the whole path.
    names = [
        "-".join(parts[-count:])[-MAX_NAME_LENGTH:].strip("-._")
        for count in range(1, len(parts) + 1)
    ]
    used_names = set(taken)
    return next((name for name in names if name not in used_names), f"{names[0]}-given")


def _name_path_models(
    overrides: Sequence[str], folders: Sequence[Path]
) -> tuple[list[str], dict[str, str]]:
    """Register each folder or hub id that is typed as ``model=PATH`` as a choice of group ``model``.

    Returns:
        The overrides with the names of these choices in place of the paths, and the path of each name.
    """
    known_names = choices(*paths.group_folders("model", folders))
    names = dict[str, str]()
    rewritten = list[str]()
    for override in overrides:
        key, _, value = override.partition("=")
        is_folder = key == "model" and sources.exists(Path(value).expanduser())
        # Lists, dictionaries and sweeps of Hydra; a folder may have such signs in its name.
        has_syntax = bool(re.search(r"[\[\](){}'\"]", value)) and not is_folder
        if key != "model" or has_syntax:
            rewritten.append(override)
            continue
        values = [value] if is_folder else [part.strip() for part in value.split(",")]
        for path in values:
            if path not in known_names and path not in names and _is_path(path):
                names[path] = model_name(path, [*known_names, *names.values()])
                node = {"path": path, "source": USER_SOURCE}
                ConfigStore.instance().store(group="model", name=names[path], node=node)
        rewritten.append("model=" + ",".join(names.get(path, path) for path in values))
    return rewritten, {name: path for path, name in names.items()}


def _name_run_methods(
    overrides: Sequence[str],
) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Register each ``method=from:RUN`` as a choice of group ``method`` with the constants of that run.

    Returns:
        The overrides with the names of these choices in place of ``from:RUN``, and the config node of each name.
    """
    # RUN may be a hash, which is looked up in the folder of outputs of this command.
    outputs = Path(Runtime.outputs)
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "runtime.outputs":
            outputs = Path(value.strip("'\""))
    nodes: dict[str, dict[str, Any]] = {}

    def name_run(run: str, typed: str) -> str:
        constants, node = read_constants(run.strip(), outputs.expanduser(), typed)
        name = f"from_{folder_name(constants.run)}"
        nodes[name] = {**node, RUN_CONSTANTS: asdict(constants)}
        ConfigStore.instance().store(group="method", name=name, node=nodes[name])
        return name

    def name_match(match: re.Match[str]) -> str:
        if match["bare"]:
            return name_run(match["bare"], match.string)
        run = re.sub(r"\\(.)", r"\1", match["quoted"])
        return name_run(run, run)

    rewritten = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "method":
            run = value.removeprefix(FROM_RUN)
            # A folder may have a comma or a quote in its name.
            if run not in (value, "") and sources.exists(Path(run).expanduser()):
                value = name_run(run, run)
            else:
                value = RUN_OF_METHOD_PATTERN.sub(name_match, value)
            override = f"method={value}"
        rewritten.append(override)
    return rewritten, nodes


def _is_path(value: str) -> bool:
    """Whether a value of ``model=`` is a folder or a hub id, and no name of a choice."""
    if "/" in value or value.startswith(("~", ".")) or value.endswith(".gguf"):
        return True
    return bool(value) and sources.exists(Path(value))


# Overrides


def _parse(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides with Hydra's grammar; values that it would not accept bare are put in quotes first.

    Raises:
        UserError: An override is not of the form key=value, or its value has unbalanced brackets or quotes.
    """
    quoted = []
    for override in overrides:
        match = BARE_OVERRIDE.fullmatch(override)
        if match and NEEDS_QUOTES.search(match[2]):
            override = f"{match[1]}='{match[2]}'"
        quoted.append(override)
    try:
        return OverridesParser.create().parse_overrides(quoted)
    except HydraException as error:
        text = str(getattr(error, "override", None) or " ".join(overrides))
        key, sign, _ = text.partition("=")
        if not sign:
            hint = "posbench --help; a verb comes first: posbench VERB --config-dir DIR"
            raise UserError("argument", text, "key=value", hint) from error
        hint = f"close brackets and quotes; other signs stand in quotes: {key}=\"'a = (b)'\""
        raise UserError(key, text, "key=value, a list as [a,b]", hint) from error


def _find_experiment(name: str, folders: Sequence[Path]) -> Path:
    """Return an experiment's file, from the first config folder whose ``experiment/`` has it; UserError if none has."""
    file = paths.find_choice("experiment", name, folders)
    if file:
        return file
    names = choices(*paths.group_folders("experiment", folders))
    raise unknown_name("experiment", name, names, "posbench ls experiments")


def leaf_keys(node: Any, key: str) -> Iterator[str]:
    """Yield the dotted keys of the values below a node of a config."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from leaf_keys(value, f"{key}.{name}")
    elif "." in key:
        yield key


def _check(
    override: Override,
    folders: Sequence[Path],
    multirun: bool,
    extra_names: Mapping[str, Collection[str]],
) -> None:
    """Refuse an override that names nothing, before Hydra would in its own words.

    Args:
        override: The override.
        folders: config folders, posbench's first.
        multirun: Whether a sweep was asked for.
        extra_names: Further choices by group, which have no file: models typed as a path, methods of runs.
    """
    key = override.key_or_group
    value = str(override.input_line).partition("=")[2]
    if key == "hydra.searchpath":
        raise UserError(key, value, "nothing typed", "name your folder: --config-dir")
    top = key.split(".")[0].split("@")[0]
    if top not in (*TOP, "hydra", CLUSTER) and not top.startswith("hydra/"):
        hint = near(top, TOP, "remove it")
        raise UserError(key, value, f"keys {', '.join(TOP)}", hint)
    if top.partition("/")[0] == "hydra":
        _refuse_unknown_hydra_key(key, value)
    part = key.removeprefix("experiment.").split(".")[0]
    if top == "experiment" and part in FILE_KEYS:
        allowed = f"nothing typed: {part} is read from the experiment's file"
        hint = "leave it out"
        if part == "grid":
            hint = "type the key of the grid itself: method.factor=1"
        raise UserError(key, value, allowed, hint)
    if override.is_sweep_override() and not multirun:
        allowed = "one value; a list as [a,b]"
        hint = f"sweep with -m (--multirun), or quote a comma: {key}=\"'a,b'\""
        raise UserError(key, value, allowed, hint)
    group = GROUP_OF_KEY.get(key, key)
    chooses = group in (*paths.GROUPS, CLUSTER) and not override.is_delete()
    # Inside a group, a key that is set to null chooses nothing.
    if not chooses or (group != key and override.value() is None):
        return
    known_names = choices(*paths.group_folders(group, folders))
    for name in _chosen_values(override, known_names):
        _check_choice(key, group, name, known_names, extra_names.get(key, ()))


def _check_choice(
    key: str,
    group: str,
    name: str,
    known_names: Sequence[str],
    extra_names: Collection[str],
) -> None:
    """Refuse a choice that its group does not have, or a list of methods that has one twice.

    Args:
        key: Key of the override.
        group: Group that it chooses from.
        name: The choice; of methods also a list.
        known_names: Choices of the group.
        extra_names: Further choices, which have no file.
    """
    brackets = re.fullmatch(r"\[(.*)\]", name)
    parts = [name]
    if brackets and key == "method":
        parts = [part.strip() for part in brackets[1].split(",")]
    for number, part in enumerate(parts):
        is_empty = part == "null" or (part == "none" and len(parts) > 1)
        is_known = part in known_names or part in extra_names
        is_repeated = part in parts[:number]
        if is_known and not is_repeated and not is_empty:
            continue
        allowed = ", ".join(known_names)
        if brackets:
            allowed = f"a list of different ones of: {allowed}"
        if key == "model":
            allowed += ", a folder, or a hub id as ORG/NAME"
        if key == "method":
            allowed += f", or {FROM_RUN}RUN"
        hint = "leave it out"
        if not is_empty:
            listing = f"posbench ls {paths.PLURALS.get(group, 'runtimes')}"
            hint = near(part, known_names, listing)
        if is_repeated:
            hint = f"name {part} once"
        raise UserError(key, name, allowed, hint)


def _chosen_values(override: Override, known_names: Sequence[str]) -> list[str]:
    """Return the names that an override of a config group chooses, several where it is a sweep.

    A pattern (``glob(*)``) chooses the known names that match it; one that matches none is returned as typed, so that
    the caller refuses it by name.
    """
    value = override.value()
    if isinstance(value, Glob):
        pattern = str(override.input_line).partition("=")[2]
        return value.filter(list(known_names)) or [pattern]
    if override.is_sweep_override():
        return [str(swept) for swept in override.sweep_string_iterator()]
    if value is None:
        return ["null"]
    if isinstance(value, str):
        return [value]
    return [override.get_value_element_as_str()]


def _rewrite(
    override: Override,
    run_methods: Mapping[str, Mapping[str, Any]],
    spelled_methods: dict[str, str],
) -> str:
    """Return an override as Hydra reads it: a list of methods as a stored config's name, a key as one that may be new.

    Args:
        override: The override.
        run_methods: Config nodes of methods that come from runs, by the names of these choices.
        spelled_methods: Lists of methods as typed, by the names of their stored configs; the override's are added.
    """
    line = str(override.input_line)
    key, _, value = line.partition("=")
    if key in GROUP_OF_KEY and override.value() is not None:
        # Such a key holds a choice of another group, as search.side_task that of task.
        return f"+{GROUP_OF_KEY[key]}@{key}={value}"
    if key == "method":

        def store(brackets: re.Match[str]) -> str:
            name = _store_methods(brackets[1].split(","), run_methods)
            spelled_methods[name] = brackets[0]
            return name

        return f"method={re.sub(METHOD_LIST, store, value)}"
    bare_key = key.lstrip("+~")
    # ``++`` sets a key whether the choice has it or not; posbench checks the keys itself.
    is_inside_group = "." in bare_key and bare_key.split(".")[0] in paths.GROUPS
    if is_inside_group and not key.startswith("~"):
        return f"++{bare_key}={value}"
    return line


def _merge_mappings(overrides: Sequence[str]) -> list[str]:
    """Overrides of a sweep in which a key that is set to mappings more than once is set to them merged.

    Without a sweep Hydra merges them; its sweeper would keep the last one alone. Of a key with several choices
    each is merged with each, in the order of Hydra's sweeps.

    Args:
        overrides: The overrides as :func:`_rewrite` gives them.
    """
    parsed = _parse(overrides)
    texts = list(overrides)
    keys = [override.get_key_element() for override in parsed]
    for key in dict.fromkeys(keys):
        indices = [index for index, other in enumerate(keys) if other == key]
        later_values = [v for index in indices[1:] for v in _choices(parsed[index])]
        if not any(isinstance(value, dict) for value in later_values):
            continue
        # Keys inside the mapping take part in the order in which they are typed.
        parts = [
            (index, other.removeprefix(key).lstrip("."))
            for index, other in enumerate(keys)
            if other == key or other.startswith(f"{key}.")
        ]
        nested = [
            [_nest(inner_key, value) for value in _choices(parsed[index])]
            for index, inner_key in parts
        ]
        merged = [reduce(_merge, values) for values in itertools.product(*nested)]
        written = map(Override._get_value_element_as_str, merged)
        for index, _ in parts:
            texts[index] = ""
        texts[indices[-1]] = f"{key}={','.join(dict.fromkeys(written))}"
    return [text for text in texts if text]


def _choices(override: Override) -> list[Any]:
    """The values that an override chooses from, as Hydra's parser holds them."""
    value = override._value
    if not override.is_discrete_sweep() or isinstance(value, Glob):
        return [value]
    texts = [f"key={text}" for text in override.sweep_string_iterator()]
    return [single._value for single in _parse(texts)]


def _nest(inner_key: str, value: Any) -> Any:
    """A value at a dotted key inside a mapping; itself where the key is empty."""
    for name in reversed(inner_key.split(".") if inner_key else []):
        value = {name: value}
    return value


def _merge(first: Any, second: Any) -> Any:
    """The second value laid over the first, as OmegaConf merges mappings."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return second
    common = first.keys() & second.keys()
    return first | second | {key: _merge(first[key], second[key]) for key in common}


def _store_methods(
    names: Iterable[str], run_methods: Mapping[str, Mapping[str, Any]]
) -> str:
    """Store the config of a list of methods, one inside the other; return its name.

    Args:
        names: The methods.
        run_methods: Config nodes of methods that come from runs, by the names of these choices.

    Raises:
        UserError: A run's method is a list itself, or one that is in the list already.
    """
    parts = [name.strip() for name in names]
    if len(parts) == 1:
        return parts[0]
    methods = []
    for part in parts:
        node = run_methods.get(part, {})
        method = str(node.get("name", part))
        if "parts" in node or method in methods:
            run = node.get(RUN_CONSTANTS, {}).get("run", part)
            allowed = f"a list of different single methods; {part} is {method}"
            hint = f"method={FROM_RUN}{run} alone takes the method of that run"
            raise UserError("method", f"[{','.join(parts)}]", allowed, hint)
        methods.append(method)
    defaults = [
        f"{part}@parts.{method}" for part, method in zip(parts, methods, strict=True)
    ]
    node = {
        "defaults": [*defaults, "_self_"],
        "_target_": COMPOSED_METHOD,
        "name": "-".join(methods),
    }
    composed_name = "-".join(parts)
    ConfigStore.instance().store(group="method", name=composed_name, node=node)
    return composed_name
