"""Asking Hydra: for the configs of all jobs, or, where a launcher is chosen, to have the jobs run.

Its own basic sweeper splits a sweep into jobs, so that they are the same both ways; a sweeper plugin of ours would have
to do that again, and compose every job twice as Hydra does.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from posbench import paths
from posbench.files.atomic import write_text
from posbench.files.secrets import without_typed_secrets
from posbench.pipeline.arguments import Request
from posbench.run.runtime import Runtime

BASIC = {
    "hydra/launcher": "basic",
    "hydra/sweeper": "basic",
    "hydra/callbacks": None,
    "hydra/job_logging": "none",
    "hydra/hydra_logging": "none",
}
"""What a config chooses of Hydra's own unless it says so; see :func:`compose_directly`."""
SWEEP = "POSBENCH_SWEEP"
"""Environment variable with a sweep's folder, Hydra's ``sweep.dir``: a launcher keeps its files there."""
MAX_ERROR_LENGTH = 300


def compose_directly(flags: Any, request: Request) -> list[DictConfig] | None:
    """Compose the configs of all jobs by Hydra's Compose API.

    That takes a third of the time of ``hydra.main``, which composes every job twice.

    Args:
        flags: Hydra's flags.
        request: What to compose.

    Returns:
        The configs. None where only ``hydra.main`` serves: for its flags, and where a launcher, a sweeper or
        another part of Hydra's own config is chosen.
    """
    if any(_is_hydra_key(override) for override in flags.overrides):
        return None
    if flags.cfg or flags.info or flags.help:
        return None
    if flags.hydra_help or flags.shell_completion:
        return None
    multirun = bool(flags.multirun or request.multirun)
    with _hydra_of(request) as (parser, search_override):
        parsed = parser.parse_overrides(list(request.overrides))
        jobs = [list(request.overrides)]
        if multirun:
            jobs = BasicSweeper.split_arguments(parsed, None)[0]
        configs = list[DictConfig]()
        composed = dict[tuple[str, ...], DictConfig]()
        for number, job in enumerate(jobs):
            # Hydra lays values over what the choices make, in their order: jobs of the same choices share it.
            values = [override for override in job if override.startswith("++")]
            choices = tuple(override for override in job if override not in values)
            if choices not in composed:
                composed[choices] = hydra.compose(
                    request.config,
                    [*search_override, *choices],
                    return_hydra_config=True,
                )
            config = copy.deepcopy(composed[choices])
            for override in parser.parse_overrides(values):
                OmegaConf.update(
                    config, override.key_or_group, override.value(), force_add=True
                )
            node = config.hydra
            is_basic = BASIC.items() <= node.runtime.choices.items()
            if not is_basic or node.mode or node.sweeper.params:
                return None
            with open_dict(config):
                node.mode = RunMode.MULTIRUN if multirun else RunMode.RUN
                node.job.num = number
                node.overrides.task = job
            configs.append(config)
    return configs


def _is_hydra_key(override: str) -> bool:
    return override.lstrip("+~").startswith("hydra")


@contextmanager
def _hydra_of(request: Request) -> Iterator[tuple[OverridesParser, list[str]]]:
    """Hydra's Compose API on the folders of a request.

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
        yield parser, search_path(further_folders)


def search_path(folders: Sequence[Path]) -> list[str]:
    """Return the override that lets Hydra search these folders after the first; empty without folders."""
    if not folders:
        return []
    listed = ",".join(f"file://{folder}" for folder in folders)
    return [f"hydra.searchpath=[{listed}]"]


def write_record(records: Path, number: int, record: Mapping[str, Any]) -> None:
    """Leave the record of a job for the caller of :func:`posbench.pipeline.compose.compose`.

    Args:
        records: Folder of the records.
        number: Number of the job.
        record: The record.
    """
    overrides = [without_typed_secrets(text) for text in record["overrides"]]
    data = {**record, "overrides": overrides}
    write_text(records / f"job-{number:05d}.json", json.dumps(data))


@contextmanager
def hydra_at(folder: str) -> Iterator[None]:
    """Let Hydra raise instead of printing, and write to a folder; nothing it changes outlives the block."""
    with _environment({"HYDRA_FULL_ERROR": "1", SWEEP: folder}):
        argv = sys.argv
        GlobalHydra.instance().clear()
        try:
            yield
        finally:
            GlobalHydra.instance().clear()
            sys.argv = argv


def launch(request: Request, run: Callable[[Path], None]) -> list[dict[str, Any]]:
    """Let a launcher run the jobs of a sweep, and return their records.

    These and the launcher's logs lie under the outputs, as jobs may run on other machines, and are removed
    when all went well. A job whose process died has a record that says so.

    Args:
        request: The sweep.
        run: Starts the launcher, for records in a folder.
    """
    with _hydra_of(request) as (parser, search_override):
        parsed = parser.parse_overrides(list(request.overrides))
        jobs = [
            [override for override in job if not _is_hydra_key(override)]
            for job in BasicSweeper.split_arguments(parsed, None)[0]
        ]
        first_config = hydra.compose(request.config, [*search_override, *jobs[0]])
        outputs = OmegaConf.select(first_config, "runtime.outputs")
    outputs_folder = Path(outputs or Runtime.outputs).expanduser().absolute()
    folder = (
        outputs_folder / ".sweeps" / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    )
    folder.mkdir(parents=True)
    try:
        with _environment({SWEEP: str(folder)}):
            run(folder)
    except Exception as error:
        if isinstance(error, HydraException | OmegaConfBaseException | yaml.YAMLError):
            raise
        reason = " ".join(str(error).split())[:MAX_ERROR_LENGTH]
        reason = reason or type(error).__name__
        for number, job in enumerate(jobs):
            _record_lost_job(folder, number, spelled(request, job), reason)
    job_records = read_records(folder)
    if not any(record["status"] for record in job_records):
        shutil.rmtree(folder)
        with suppress(OSError):  # another sweep's records are there
            folder.parent.rmdir()
    return job_records


def _record_lost_job(
    folder: Path, number: int, overrides: Sequence[str], reason: str
) -> None:
    """Leave a record of a job that left none itself."""
    if (folder / f"job-{number:05d}.json").is_file():
        return
    typed = " ".join(map(without_typed_secrets, overrides))
    fault = (
        f"{typed}: its process ended, or still runs (the same command resumes); "
        f"logs: {folder} ({reason})"
    )
    record = {
        "overrides": overrides,
        "multirun": True,
        "folder": None,
        "status": 1,
        "error": fault,
    }
    write_record(folder, number, record)


def spelled(request: Request, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return overrides with their keys, checkpoints, lists of methods and runs that methods come from, as typed."""
    as_typed = []
    for override in overrides:
        key, sign, value = override.partition("=")
        for name, typed_value in request.spelled_values.get(key, {}).items():
            value = value.replace(name, typed_value)
        as_typed.append(request.spelled.get(key, key) + sign + value)
    return tuple(as_typed)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records that jobs left in a folder, in order."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("job-*.json"))]


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
