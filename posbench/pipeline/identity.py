"""The identity of a run: everything that can move a number, and nothing else; and where the run was made."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from posbench import paths, versions
from posbench.errors import UserError
from posbench.files import sources
from posbench.files.atomic import short_hash
from posbench.files.digests import Content, content_keys, hash_paths, read_contents
from posbench.files.hardware import describe_hardware
from posbench.files.imports import keep_code, read_code, user_files
from posbench.files.secrets import without_named_secrets
from posbench.late import torch
from posbench.model.load import torch_device
from posbench.pipeline.config import Config, task_sources
from posbench.pipeline.constants import FROM_RUN, fingerprint
from posbench.run.folder import CONFIG_DIR
from posbench.schema import override_text

ALWAYS = (
    "stats",
    "model",
    "measure",
    "run",
    "pipeline/stages",
    "schema.py",
    "files/atomic.py",
    "files/gguf.py",
)
"""Parts of the package that can move a number of any run."""
BY_CHOICE = (
    "tasks",
    "theory",
    "methods",
    "perturbations",
    "search",
    "studies",
    "embedded",
)
"""Parts of which a run uses only the imports of its classes. A changed figure, page or message moves no number."""
BACKENDS_PART = "backends"
"""The part of runs whose model is not in this process."""
DATA_SUFFIXES = (".json", ".yaml", ".jinja")
"""Data files next to the code: tables, shapes and chat templates."""
SERVED_SETTINGS = (
    "base_url",
    "server_name",
    "api",
    "temperature",
    "thinking_tokens",
    "extra_body",
    "chat_template",
    "context_window",
)
"""Settings of a served model that can move a number."""
MODEL_SETTINGS = (
    "dtype",
    "attention",
    "rope",
    "chat_template",
    "context_window",
    "allow_partial",
)
"""Settings of a model in process that can move a number."""
RUNTIME_SETTINGS = ("batch_size", "batch_tokens", "round_questions", "share")
"""Settings of the runtime that can move a number."""
CODE_DIGITS = 12
DATA_DIGITS = 16
SHOWN_DIGITS = 12


def input_sources(config: Config) -> list[sources.Source]:
    """Return all files that a run reads: checkpoint, data, and those of methods, search, study and backend."""
    needed: list[sources.Source] = []
    if config.uses_model:
        needed += config.model.files
        if config.model.backend:
            from posbench.backends.choice import make_backend

            needed += make_backend(config.model).files()
        needed += config.choice.files()
        for choice in config.all_methods.values():
            needed += choice.files()
    if config.uses_task:
        needed += task_sources(config.task)
    if "search" in config.stages:
        needed += config.search.files()
    if config.study:
        needed += config.study.files()
        # Verdicts rest on the papers' tables.
        tables = sources.Source(
            kind="path",
            id=str(paths.EXPERIMENTS),
            field="study.reference",
            files=paths.REFERENCE_TABLES,
        )
        needed.append(tables)
    return needed


def run_contents(config: Config) -> list[Content]:
    """Return the contents of the files of a run.

    Raises:
        UserError: One is missing, or cannot be read or downloaded.
    """
    return read_contents(input_sources(config))


def identity(config: Config, read: Sequence[Content]) -> dict[str, Any]:
    """Return everything that can move a number, apart from method and task settings.

    That is code, libraries, weights, data, kernel, precision, kind of device.

    Args:
        config: The run.
        read: Contents of its files, by :func:`run_contents`.

    Returns:
        Names, versions and digests by key; two runs with equal ones compute the same numbers.

    Raises:
        UserError: The method's constants come from a run of other weights.
    """
    need_constants_of_weights(config, read)
    runtime = config.runtime
    facts: dict[str, Any] = {
        "code": source_digest(_classes(config)),
        "data": short_hash(content_keys(read, "task"), DATA_DIGITS),
        "torch": versions.version_of("torch"),
        "transformers": versions.version_of("transformers"),
    }
    if config.asks_server:
        # Nothing is computed on this machine.
        return facts | model_identity(config, read)
    # A login node may lack the jobs' hardware.
    if runtime.device == "auto":
        facts["device"] = torch_device(runtime.device).type
    else:
        facts["device"] = torch.device(runtime.device).type
    for name in RUNTIME_SETTINGS:
        facts[name] = getattr(runtime, name)
    facts["threads"] = threads(config)
    return facts | model_identity(config, read)


def unmodified_identity(
    config: Config, run_identity: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the identity of the unmodified model's rows, which the code of methods, search and study cannot move.

    Args:
        config: The run.
        run_identity: Its identity, by :func:`identity`.
    """
    return {**run_identity, "code": source_digest(_classes_that_ask(config))}


def need_constants_of_weights(config: Config, read: Sequence[Content]) -> None:
    """Refuse constants that a run found for other weights; typed ones are taken as they are.

    Args:
        config: The run.
        read: Contents of its files, by :func:`run_contents`.

    Raises:
        UserError: The weights differ.
    """
    if not config.constants:
        return
    weights = fingerprint(read)
    for constants in config.constants:
        if constants.weights == weights:
            continue
        typed = [f"method={constants.method}"]
        for key, value in constants.values.items():
            if isinstance(value, int | float | str | list):
                typed.append(f"method.{key}={override_text(value)}")
        allowed = f"a run of these weights ({weights}); that one used {constants.weights or 'none'}"
        hint = f"to apply its constants all the same, type them: {' '.join(typed)}"
        raise UserError("method", f"{FROM_RUN}{constants.run}", allowed, hint)


def model_identity(config: Config, read: Sequence[Content]) -> dict[str, Any]:
    """Return the part of a run's identity that concerns its model: weights, and the arithmetic on them.

    Args:
        config: The run.
        read: Contents of its files, by :func:`run_contents`.
    """
    if not config.uses_model:
        return {}
    model = config.model
    if not model.in_process:
        # The server's weights are unknown: its address and the model's name identify them.
        served = {name: getattr(model, name) for name in SERVED_SETTINGS}
        # Whose key it is moves no number.
        served["extra_body"] = without_named_secrets(model.extra_body)
        if model.backend:
            files = [c.key for c in read if c.source.field.startswith("model.backend")]
            served["backend"] = {**model.backend, "files": short_hash(sorted(files))}
        return {"tokenizer": fingerprint(read), **served}
    settings = {name: getattr(model, name) for name in MODEL_SETTINGS}
    return {"weights": fingerprint(read), **settings}


def threads(config: Config) -> int | None:
    """Return the CPU threads of a run: the user's, else the default of the model's file where the run uses a model."""
    if config.runtime.threads:
        return config.runtime.threads
    return config.model.threads if config.uses_model else None


def version_key() -> dict[str, Any]:
    """Return the identity of posbench's code, which runs of one version folder share.

    So an experiment and a sweep, whose runs may differ in all else, stay in one version.
    """
    return {"posbench": versions.__version__, "code": source_digest()}


def run_name(
    config: Config, run_identity: Mapping[str, Any], read: Sequence[Content]
) -> str:
    """Return the name of a run's folder: a readable name, and a hash of everything that moves its numbers.

    Args:
        config: The run.
        run_identity: Its identity, by :func:`identity`.
        read: Contents of its files, by :func:`run_contents`.
    """
    runtime = config.runtime
    raw = hash_paths(config.raw, read)
    settings: dict[str, Any] = {
        "identity": run_identity,
        "measured": [runtime.intervene_examples, runtime.resamples],
        "typed": config.raw["typed"],
        "files": content_keys(read, "method", "search", "study"),
    }
    for group in ("task", "method", "study", "search"):
        if group in raw:
            settings[group] = raw[group]
    if config.all_methods:
        settings["every"] = {
            name: choice.values for name, choice in config.all_methods.items()
        }
    parts = [config.study_name]
    if config.uses_model:
        parts = [config.model.name, config.study_name, config.choice.name]
    return "__".join([*filter(None, parts), short_hash(settings)])


def _classes(config: Config) -> list[type]:
    """Return the classes of methods, backend, task, search and study of a run, also the user's own."""
    classes: list[type] = [*config.choice.classes]
    classes += [choice.cls for choice in config.all_methods.values()]
    classes += _classes_that_ask(config)
    if "search" in config.stages:
        classes += _classes_inside(config.search)
    if config.study:
        classes += _classes_inside(config.study)
    return classes


def _classes_that_ask(config: Config) -> list[type]:
    """Return the classes of backend and task of a run, on which replies depend whatever the method."""
    classes: list[type] = []
    if config.asks_server:
        from posbench.backends.choice import backend_class

        classes.append(backend_class(config.model))
    if config.uses_task:
        classes += _classes_inside(config.task)
    return classes


def _classes_inside(part: Any) -> Iterator[type]:
    """The class of a part of the config, and of the objects in its fields (a search's second task)."""
    if is_dataclass(part):
        yield type(part)
        for field in fields(part):
            yield from _classes_inside(getattr(part, field.name))


def source_digest(classes: Iterable[type] = ()) -> str:
    """Return a hash of the code that can move a number of a run; comments and docstrings are not part of it.

    Args:
        classes: The classes that take part: of method, task, search and study. Their modules count, with all that
            these import, the user's files among them.
    """
    classes = list(classes)
    own_files = user_files(classes)
    roots = {cls.__module__ for part in classes for cls in part.__mro__}
    own_code = {file: read_code(file) for file in own_files}
    roots |= {name for code in own_code.values() for name in code.imports}
    texts = [(file.name, code.text) for file, code in own_code.items()]
    texts += _package_code(frozenset(filter(_is_ours, roots)))
    keep_code()
    total = hashlib.sha256()
    for name, text in sorted(texts):
        total.update(name.encode() + text)
    return total.hexdigest()[:CODE_DIGITS]


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == paths.PACKAGE.name


@cache
def _package_code(roots: frozenset[str]) -> list[tuple[str, bytes]]:
    """Return path (in the package) and text of posbench's code that moves numbers of runs with these modules.

    Read once per process, at the first call.

    Args:
        roots: Dotted names of modules, in addition to :data:`ALWAYS`.
    """
    counted = [*ALWAYS, *BY_CHOICE]
    if any(name.startswith(f"posbench.{BACKENDS_PART}.") for name in roots):
        counted.append(BACKENDS_PART)
    counted_folders = [paths.PACKAGE / part for part in counted]
    names = set(roots)
    pending = [file for name in names for file in _files_of_module(name)]
    for part in ALWAYS:
        path = paths.PACKAGE / part
        pending += [path] if path.is_file() else sorted(path.rglob("*.py"))
    seen = set[Path]()
    modules = set[Path]()
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        seen.add(file)
        # Other packages (pages, lists) move no number; what they import does not count.
        if not any(file.is_relative_to(folder) for folder in counted_folders):
            continue
        modules.add(file)
        for name in _code_of(file).imports:
            if _is_ours(name) and name not in names:
                names.add(name)
                pending += _files_of_module(name)
    files = modules | _data_files(modules)
    return [
        (file.relative_to(paths.PACKAGE).as_posix(), _code_of(file).text)
        for file in files
    ]


_code_of = cache(read_code)  # a process reads each file of posbench once


def _files_of_module(name: str) -> list[Path]:
    """Return the file of one of posbench's modules, and the ``__init__`` files of the packages around it.

    Args:
        name: Dotted name of the module.
    """
    folder = paths.PACKAGE
    files = []
    for part in name.split(".")[1:]:
        folder = folder / part
        files += [folder / "__init__.py", folder.with_suffix(".py")]
    return [file for file in files if file.is_file()]


def _data_files(modules: Iterable[Path]) -> set[Path]:
    """Return the data files that modules may read from their folders.

    Those are files named like one of the modules, and files (also in data folders below) named like no module at all.
    """
    modules = set(modules)
    data_files = set[Path]()
    for folder in {module.parent for module in modules}:
        candidates = [file for file in folder.iterdir() if file.is_file()]
        for inner in folder.iterdir():
            if inner.is_dir() and not (inner / "__init__.py").exists():
                candidates += inner.rglob("*")
        for file in candidates:
            if file.suffix not in DATA_SUFFIXES or paths.MODELS in file.parents:
                continue
            module = file.with_suffix(".py")
            # A file named like a module that does not take part belongs to that module.
            if module in modules or not module.exists():
                data_files.add(file)
    return data_files


def provenance(
    config: Config,
    command: str,
    run_identity: Mapping[str, Any],
    read: Sequence[Content],
) -> dict[str, Any]:
    """Return versions, hardware and origin of a run, and the files it reads.

    Model and task are in it only where they take part.

    Args:
        config: The run.
        command: The command line.
        run_identity: Its identity, by :func:`identity`.
        read: Contents of its files, by :func:`run_contents`.
    """
    facts: dict[str, Any] = {
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "posbench": versions.__version__,
        "git": _git_commit(),
        "python": platform.python_version(),
        "packages": versions.installed_versions(paths.plugins().values()),
        "hardware": describe_hardware(),
        "identity": dict(run_identity),
        "files": [content.fact for content in read],
    }
    # A method that was taken from another run.
    if config.constants:
        facts["constants"] = {
            constants.method: {
                "run": constants.run,
                "folder": constants.folder,
                "source": constants.source,
            }
            for constants in config.constants
        }
    if config.config_dir:
        facts[CONFIG_DIR] = str(config.config_dir)
    if config.uses_model:
        names = ["path", "revision", "source"]
        if not config.model.in_process:
            names += ["base_url", "server_name", "api"]
        facts["model"] = {name: getattr(config.model, name) for name in names}
    if config.uses_task:
        task = config.task
        facts["task"] = {
            "version": task.version,
            "source": task.source,
            "licence": task.licence,
        }
    return facts


def need_same_contents(
    needed: Sequence[sources.Source], facts: Mapping[str, Any]
) -> None:
    """Refuse files of a task or a checkpoint that changed since the run.

    Args:
        needed: The files.
        facts: The run's provenance.

    Raises:
        UserError: A file is missing or holds something else.
    """
    fields = {source.field for source in needed}
    entries = [entry for entry in facts.get("files", ()) if entry["field"] in fields]
    if not entries:
        return
    recorded = {
        (entry["field"], entry["name"]): (
            entry.get("sha256") or entry.get("commit", "not read")
        )
        for entry in entries
    }
    for content in read_contents(needed):
        recorded_content = recorded.get(content.key[:2], "not read")
        if recorded_content != content.held:
            allowed = (
                f"the content that the run read ({recorded_content[:SHOWN_DIGITS]}; "
                f"now it holds {content.held[:SHOWN_DIGITS]})"
            )
            hint = (
                "restore that file, or make a new run: posbench with the same arguments"
            )
            file = str(content.file or content.source.id)
            raise UserError(content.source.field, file, allowed, hint)


def _git_commit() -> str | None:
    """Return the commit of the checkout this runs from, with ``-dirty`` where it has changes.

    None for an installed wheel, or where git gives no answer.
    """
    checkout = paths.PACKAGE.parent
    if not (checkout / ".git").exists():
        return None
    describe = ["describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(
            ["git", "-C", str(checkout), *describe],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # git is not installed
        return None
    return answer.stdout.strip() or None
