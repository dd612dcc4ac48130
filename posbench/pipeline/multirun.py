"""Asking Hydra: for the configs of all jobs, or, where a launcher is chosen, to have the jobs run."""

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
from posbench.pipeline.arguments import Request
from posbench.run.runtime import Runtime

BASIC = {
    "hydra/launcher": "basic",
    "hydra/sweeper": "basic",
    "hydra/callbacks": None,
} | dict.fromkeys(("hydra/job_logging", "hydra/hydra_logging"), "none")
"""What a config chooses of Hydra's own unless it says so; see :func:`directly`."""
SWEEP = "POSBENCH_SWEEP"
"""Environment variable with a sweep's folder, Hydra's ``sweep.dir``: a launcher keeps its files there."""


def directly(known: Any, request: Request) -> list[DictConfig] | None:
    """The configs of all jobs by Hydra's Compose API, in a third of the time that ``hydra.main`` takes, which
    composes every job twice. None where only ``hydra.main`` serves: for its flags, and where a launcher, a
    sweeper or another part of Hydra's own config is chosen.
    """
    own = [
        override
        for override in known.overrides
        if override.lstrip("+~").startswith("hydra")
    ]
    if (
        own
        or known.cfg
        or known.info
        or known.help
        or known.hydra_help
        or known.shell_completion
    ):
        return None
    multirun = bool(known.multirun or request.multirun)
    with _hydra_of(request) as (parser, path):
        parsed = parser.parse_overrides(list(request.overrides))
        jobs = (
            BasicSweeper.split_arguments(parsed, None)[0]
            if multirun
            else [[*request.overrides]]
        )
        configs = list[DictConfig]()
        chosen = dict[tuple[str, ...], DictConfig]()
        for number, job in enumerate(jobs):
            # Hydra lays values over what the choices make, in their order: jobs of the same choices share it.
            values = [override for override in job if override.startswith("++")]
            choices = tuple(override for override in job if override not in values)
            if choices not in chosen:
                chosen[choices] = hydra.compose(
                    request.config, [*path, *choices], return_hydra_config=True
                )
            config = copy.deepcopy(chosen[choices])
            for override in parser.parse_overrides(values):
                OmegaConf.update(
                    config, override.key_or_group, override.value(), force_add=True
                )
            node = config.hydra
            if (
                BASIC.items() - node.runtime.choices.items()
                or node.mode
                or node.sweeper.params
            ):
                return None
            with open_dict(config):
                node.mode = RunMode.MULTIRUN if multirun else RunMode.RUN
                node.job.num = number
                node.overrides.task = job
            configs.append(config)
    return configs


@contextmanager
def _hydra_of(request: Request) -> Iterator[tuple[OverridesParser, list[str]]]:
    """Hydra's Compose API on the folders of a request: its parser, and the override that names the others."""
    named = (
        request.config != "config"
    )  # it stands in the first of the folders, that of its experiment
    primary, others = (
        (request.searched[0], request.searched[1:])
        if named
        else (paths.CONF, request.searched)
    )
    with hydra.initialize_config_dir(str(primary), "posbench", version_base="1.3"):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        yield parser, search_path([*[paths.CONF] * named, *others])


def search_path(folders: Sequence[Path]) -> list[str]:
    """The override that lets Hydra search these folders after the first."""
    return (
        [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders)}]"]
        if folders
        else []
    )


def leave(records: Path, number: int, record: Mapping[str, Any]) -> None:
    """Leave the record of a job for the caller of :func:`compose`."""
    write_text(records / f"job-{number:05d}.json", json.dumps(record))


@contextmanager
def hydra_at(folder: str) -> Iterator[None]:
    """Hydra raises instead of printing, and writes to a folder; nothing it changes outlives the block."""
    with _set(**{"HYDRA_FULL_ERROR": "1", SWEEP: folder}):
        before = sys.argv
        GlobalHydra.instance().clear()
        try:
            yield
        finally:
            GlobalHydra.instance().clear()
            sys.argv = before


def launched(request: Request, run: Callable[[Path], None]) -> list[dict[str, Any]]:
    """Let a launcher run the jobs of a sweep, and give their records.

    These and its logs lie under the outputs, as jobs may run on other machines, and go when all went well. A
    job whose process died has a record that says so.
    """
    with _hydra_of(request) as (parser, path):
        jobs = BasicSweeper.split_arguments(
            parser.parse_overrides(list(request.overrides)), None
        )[0]
        jobs = [
            [o for o in job if not o.lstrip("+~").startswith("hydra")] for job in jobs
        ]
        shown = [spelled(request, job) for job in jobs]
        outputs = OmegaConf.select(
            hydra.compose(request.config, [*path, *jobs[0]]), "runtime.outputs"
        )
    place = Path(outputs or Runtime.outputs).expanduser().absolute()
    folder = place / ".sweeps" / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        with _set(**{SWEEP: str(folder)}):
            run(folder)
    except Exception as error:
        if isinstance(error, HydraException | OmegaConfBaseException | yaml.YAMLError):
            raise
        told = " ".join(str(error).split())[:300] or type(error).__name__
        for number, job in enumerate(shown):
            if not (folder / f"job-{number:05d}.json").is_file():
                fault = f"{' '.join(job)}: its process ended, or still runs (the same command resumes); "
                fault += f"logs: {folder} ({told})"
                facts = {"overrides": job, "multirun": True, "folder": None}
                leave(folder, number, {**facts, "status": 1, "error": fault})
    found = records(folder)
    if not any(record["status"] for record in found):
        shutil.rmtree(folder)
        with suppress(OSError):  # another sweep's are there
            folder.parent.rmdir()
    return found


def spelled(request: Request, overrides: Sequence[str]) -> tuple[str, ...]:
    """Overrides with their keys as typed."""
    parts = [override.partition("=") for override in overrides]
    return tuple(
        request.spelled.get(key, key) + sign + value for key, sign, value in parts
    )


def records(folder: Path) -> list[dict[str, Any]]:
    """What the jobs left, in order."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("job-*.json"))]


@contextmanager
def _set(**names: str) -> Iterator[None]:
    """Environment variables for a block."""
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(
                name, value
            )
