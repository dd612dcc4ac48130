"""Asking Hydra: for the configs of all jobs, or, where a launcher is chosen, to have the jobs run.

Its own basic sweeper cannot be asked for its jobs alone, so a sweep is split here as that splits it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from posbench import paths
from posbench.files.atomic import write_text
from posbench.files.secrets import without_typed_secrets
from posbench.pipeline.arguments import Request

HYDRA_DEFAULTS = {
    "hydra/launcher": "basic",
    "hydra/sweeper": "basic",
    "hydra/callbacks": None,
    "hydra/job_logging": "none",
    "hydra/hydra_logging": "none",
}
"""Hydra's own settings of a config unless it chooses others; see :func:`runs_by_hydra`."""
SWEEP = "POSBENCH_SWEEP"
"""Environment variable with a sweep's folder, Hydra's ``sweep.dir``: a launcher keeps its files there."""
MAX_ERROR_LENGTH = 300

Record = dict[str, Any]
"""The record of a job: its ``overrides``, whether it is one of a ``multirun``, its run's ``folder``, the exit
``status``, and an ``error`` that is recorded nowhere else."""


def compose_jobs(request: Request) -> list[DictConfig]:
    """Compose the config of each job, with Hydra's description of the job under its key ``hydra``.

    Hydra's Compose API takes a third of the time of ``hydra.main``, which composes every job twice.

    Args:
        request: The request.
    """
    with _hydra_of(request) as (parser, search_override):

        @cache
        def compose_choices(choices: tuple[str, ...]) -> DictConfig:
            overrides = [*search_override, *choices]
            return hydra.compose(request.config, overrides, return_hydra_config=True)

        def compose_job(number: int, job: Sequence[str]) -> DictConfig:
            # Hydra applies values after the choices, in order, so jobs with the same choices share a composition.
            values = [override for override in job if override.startswith("++")]
            choices = tuple(override for override in job if override not in values)
            config = copy.deepcopy(compose_choices(choices))
            for override in parser.parse_overrides(values):
                OmegaConf.update(
                    config, override.key_or_group, override.value(), force_add=True
                )
            with open_dict(config):
                config.hydra.job.num = number
                config.hydra.overrides.task = [o for o in job if not _is_hydra_key(o)]
            return config

        # Keys of hydra.sweeper.params, which Hydra's own sweeper would read.
        swept = list[str]()
        if not request.multirun:
            config = compose_job(0, request.overrides)
            if config.hydra.mode != RunMode.MULTIRUN:
                return [config]
            params = config.hydra.sweeper.get("params") or {}
            swept = [f"{key}={values}" for key, values in params.items()]
        jobs = _split(parser, [*swept, *request.overrides])
        configs = [compose_job(number, job) for number, job in enumerate(jobs)]
        for config in configs:
            config.hydra.mode = RunMode.MULTIRUN
        return configs


def _split(parser: OverridesParser, overrides: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the overrides of each job of a sweep, in the order of Hydra's basic sweeper.

    If a key is given twice, the last one counts; a value given twice counts once.

    Raises:
        HydraException: A sweep is not over a list of values.
    """
    values = dict[str, list[str]]()
    for override in parser.parse_overrides(list(overrides)):
        key = override.get_key_element()
        if not override.is_sweep_override():
            values[key] = [f"{key}={override.get_value_element_as_str()}"]
        elif override.is_discrete_sweep():
            texts = dict.fromkeys(override.sweep_string_iterator())
            values[key] = [f"{key}={text}" for text in texts]
        else:
            raise HydraException(
                f"{override.input_line}: a sweep takes a list of values"
            )
    return list(itertools.product(*values.values()))


def runs_by_hydra(request: Request, configs: Sequence[DictConfig]) -> bool:
    """Return whether Hydra itself must run jobs: they choose a launcher, or another part of its own config."""
    return any(map(_is_hydra_key, request.overrides)) or any(
        not HYDRA_DEFAULTS.items() <= config.hydra.runtime.choices.items()
        for config in configs
    )


def _is_hydra_key(override: str) -> bool:
    return override.lstrip("+~").startswith("hydra")


@contextmanager
def _hydra_of(request: Request) -> Iterator[tuple[OverridesParser, list[str]]]:
    """Initialise Hydra's Compose API on the config folders of a request, for a block.

    Yields:
        Its parser, and the override that names all folders but the first.
    """
    first = paths.CONF
    further_folders = request.searched
    if request.config != "config":
        # The config of an experiment lies in the first of the folders, which Hydra must search first.
        first = request.searched[0]
        further_folders = (paths.CONF, *request.searched[1:])
    with hydra.initialize_config_dir(str(first), "posbench", version_base="1.3"):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        yield parser, _search_path(further_folders)


def _search_path(folders: Sequence[Path]) -> list[str]:
    """The override that lets Hydra search these folders after the first; empty without folders."""
    if not folders:
        return []
    listed = ",".join(f"file://{folder}" for folder in folders)
    return [f"hydra.searchpath=[{listed}]"]


@contextmanager
def hydra_cleared() -> Iterator[None]:
    """Clear Hydra's global state before the block and after it."""
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().clear()


def call_hydra(
    request: Request, run: Callable[[DictConfig], None], folder: Path
) -> None:
    """Let Hydra run the jobs of a request.

    Args:
        request: The request.
        run: Called with the config of each job, in whatever process a launcher takes.
        folder: Where launchers keep their files.
    """
    main = hydra.main(
        version_base="1.3", config_path=str(paths.CONF), config_name=request.config
    )(run)
    argv = sys.argv
    # Its parser refuses an override that follows a flag and its value: overrides go last.
    sys.argv = ["posbench", *(["-m"] if request.multirun else [])]
    sys.argv += [f"--config-dir={path}" for path in request.searched[:1]]
    sys.argv += [*_search_path(request.searched[1:]), *request.overrides]
    # It then raises instead of printing.
    variables = {"HYDRA_FULL_ERROR": "1", SWEEP: str(folder)}
    try:
        with hydra_cleared(), _environment(variables), _text_help():
            main()
    finally:
        sys.argv = argv


@contextmanager
def _text_help() -> Iterator[None]:
    """Let ``hydra.main``, the only public way to its launchers, make its parser of flags on Python 3.14, for a block.

    argparse of Python 3.14 looks into each help text when it is given; Hydra 1.3 gives one that becomes text only
    when it is printed.
    """
    add_argument = argparse.ArgumentParser.add_argument

    def add_argument_with_text(
        parser: argparse.ArgumentParser, *names: str, **settings: Any
    ) -> argparse.Action:
        if not isinstance(settings.get("help"), str):
            settings["help"] = None
        return add_argument(parser, *names, **settings)

    argparse.ArgumentParser.add_argument = add_argument_with_text  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.add_argument = add_argument  # type: ignore[method-assign]


@contextmanager
def launch_folder(outputs: str) -> Iterator[Path]:
    """Make the folder in which jobs of a launched sweep leave their records; remove it unless one of them failed.

    It lies under the outputs, as jobs may run on other machines.
    """
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    folder = Path(outputs).expanduser().absolute() / ".sweeps" / name
    folder.mkdir(parents=True)
    yield folder
    if not any(record["status"] for record in read_records(folder)):
        shutil.rmtree(folder)
        with suppress(OSError):  # another sweep's records are there
            folder.parent.rmdir()


def write_record(folder: Path, number: int, record: Record) -> None:
    """Leave the record of a launched job for the process that launched it."""
    write_text(folder / f"job-{number:05d}.json", json.dumps(record))


def record_lost_job(
    folder: Path, number: int, overrides: Sequence[str], error: Exception
) -> None:
    """Write the record of a launched job that ended without writing one.

    Args:
        folder: Folder of the sweep, see :func:`launch_folder`.
        number: Index of the job.
        overrides: Overrides of the job.
        error: What the launcher raised.
    """
    if (folder / f"job-{number:05d}.json").is_file():
        return
    reason = " ".join(str(error).split())[:MAX_ERROR_LENGTH] or type(error).__name__
    record = new_record(overrides, multirun=True)
    fault = (
        f"{' '.join(record['overrides'])}: its process ended, or still runs (the same command resumes); "
        f"logs: {folder} ({reason})"
    )
    write_record(folder, number, {**record, "status": 1, "error": fault})


def new_record(overrides: Sequence[str], multirun: bool) -> Record:
    """Return the record of a job that has no run yet."""
    typed = [without_typed_secrets(text) for text in overrides]
    return {"overrides": typed, "multirun": multirun, "folder": None, "status": 0}


def spelled(request: Request, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return overrides as the user typed them.

    Args:
        request: Knows the typed form of keys, checkpoints, lists of methods, and runs that methods come from.
        overrides: Overrides as Hydra got them.
    """
    as_typed = []
    for override in overrides:
        key, sign, value = override.partition("=")
        typed_values = request.spelled_values.get(key, {})
        name = value.strip("'\"")
        if name in typed_values:
            value = value.replace(name, typed_values[name])  # within its quotes
        as_typed.append(request.spelled.get(key, key) + sign + value)
    return tuple(as_typed)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records that jobs left in a folder, in order."""
    return [
        json.loads(file.read_text("utf-8"))
        for file in sorted(folder.glob("job-*.json"))
    ]


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a block."""
    saved_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in saved_values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
