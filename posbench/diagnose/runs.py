"""The runs of a diagnosis: ordinary runs, composed from the user's overrides and each part's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from posbench.diagnose.allowance import Allowance
from posbench.diagnose.outcome import Diagnosis
from posbench.errors import UserError
from posbench.files.secrets import command_line
from posbench.files.sources import cached_path, weight_files
from posbench.model.lm import LM
from posbench.model.load import SERVER_KEYS, ModelConfig
from posbench.pipeline.arguments import ENDPOINT, read_flags
from posbench.pipeline.compose import compose
from posbench.pipeline.config import Config
from posbench.pipeline.execute import execute, set_threads
from posbench.pipeline.prepare import prepare, silence_transformers
from posbench.report.page import render_run
from posbench.run.base import load_placed
from posbench.run.folder import PREDICTIONS, REDRAWN_FILES, open_run_dir
from posbench.run.heartbeat import loading
from posbench.run.lease import owning
from posbench.schema import override_text
from posbench.tasks import Task


def key_of(override: str) -> str:
    """The key, or the group, that an override sets."""
    return override.lstrip("+~").partition("=")[0]


class Runs:
    """Makes the runs of a diagnosis.

    Args:
        args: Overrides as typed, with Hydra's flags, without the budget.
        allowance: The budget of all runs together.
        console: Where progress goes.

    Attributes:
        config: The config of the task with its current settings, once :meth:`use` has set it.
        settings: Overrides that the diagnosis chose so far, by key.
        typed_keys: Keys that the user set.
        diagnosis: The findings; the runs, their prompts and their times are recorded there.
        seconds_of_run: Wall time of the run of each part, earlier sessions among it.
    """

    def __init__(
        self, args: Sequence[str], allowance: Allowance, console: Console
    ) -> None:
        self.args = list(args)
        self.allowance = allowance
        self.console = console
        self.settings: dict[str, Any] = {}
        overrides = read_flags(args).overrides
        self.typed_keys = {key_of(override) for override in overrides}
        self.diagnosis = Diagnosis(model="", task="")
        self.seconds_of_run: dict[str, float] = {}
        self.config: Config
        self._configs: dict[tuple[str, ...], Config] = {}
        self._in_process_args: list[str] | None = None
        self._lm: LM | None = None

    # Configs

    def typed_number(self, key: str) -> int | None:
        """A whole number that the user typed, the last one of several."""
        typed = [arg for arg in self.args if key_of(arg) == key]
        value = typed[-1].partition("=")[2] if typed else ""
        return int(value) if value.isdigit() else None

    def overrides(
        self,
        part_overrides: Sequence[str],
        method: str | None = "none",
        stages: str = "evaluate",
        in_process: bool = False,
    ) -> list[str]:
        """The command line of a run: the typed overrides, the changes of the diagnosis, and the overrides of the part.

        Args:
            part_overrides: Overrides of the part.
            method: The method; empty: the typed one, or one among ``part_overrides``; None: no method.
            stages: Its stages.
            in_process: Whether to ask the checkpoint of a served model, and not the server.
        """
        args = self.args
        if in_process and self._in_process_args is not None:
            args = self._in_process_args
        part_keys = {key_of(override) for override in part_overrides}
        typed = [
            arg
            for arg in args
            if key_of(arg) not in part_keys
            and not (method != "" and arg.startswith("method"))
        ]
        changed = [
            f"{key}={override_text(value)}"
            for key, value in self.settings.items()
            if key not in part_keys and not (in_process and key.startswith("model."))
        ]
        chosen = [f"method={method}"] if method else []
        return [*typed, *changed, *chosen, *part_overrides, f"stages=[{stages}]"]

    def prepare(self, part_overrides: Sequence[str], **choices: Any) -> Config:
        """The checked config of a run; the same overrides are composed once.

        Args:
            part_overrides: Overrides of the part.
            **choices: See :meth:`overrides`.
        """
        overrides = self.overrides(part_overrides, **choices)
        config = self._configs.get(tuple(overrides))
        if config is None:
            jobs = compose(overrides).composed
            if len(jobs) > 1:
                names = ", ".join(job.raw["model"]["name"] for job in jobs)
                allowed = "one model, task and method at a time"
                hint = "posbench diagnose model=NAME for each"
                raise UserError("diagnose", names, allowed, hint)
            rest = replace(self.allowance.rest(1.0), text=self.allowance.budget.text)
            config = self._count_probe(prepare(jobs[0], budget=rest).config)
            self._configs[tuple(overrides)] = config
        return config

    def _count_probe(self, config: Config) -> Config:
        """Count the tokens of probing the server; return the config without them, so that no run counts them again."""
        server = config.server
        if server is None:
            return config
        self.allowance.add(0, server.tokens_read, server.tokens_written, is_paid=True)
        return replace(config, server=replace(server, tokens_read=0, tokens_written=0))

    @property
    def task(self) -> Task:
        """The task with its current settings; it moves a gold item."""
        return self.config.task

    @property
    def is_method_typed(self) -> bool:
        """Whether the user asks about one method."""
        return any(key.startswith("method") for key in self.typed_keys)

    # The model

    def use(self, config: Config) -> None:
        """Ask with this config from now on; for a served model, look for its checkpoint on this machine."""
        self.config = config
        model = config.model
        if model.in_process:
            return
        self._in_process_args = None
        if _has_weights(model):
            self._in_process_args = _args_of_checkpoint(self.args, model)

    @property
    def is_served(self) -> bool:
        """Whether a server answers."""
        return not self.config.model.in_process

    @property
    def has_checkpoint(self) -> bool:
        """Whether the model can run in process."""
        return not self.is_served or self._in_process_args is not None

    @property
    def lm(self) -> LM:
        """The model in process, loaded when it is first needed."""
        if self._lm is None:
            silence_transformers()
            config = self.prepare(["task.limit=1"], in_process=True)
            set_threads(config)
            began = time.monotonic()
            with loading(config.model.name, self.console):
                self._lm = load_placed(config.model, config.runtime)
            self._count_time("loading", time.monotonic() - began)
        return self._lm

    # Runs

    def execute(
        self,
        part: str,
        part_overrides: Sequence[str],
        share: float | None = None,
        prompts: int = 0,
        **choices: Any,
    ) -> Path:
        """Make a run, and record it as a part of the diagnosis.

        Args:
            part: Name of the part.
            part_overrides: Overrides of the part.
            share: Share of the budget that is spent when its rows must be there; None: no limit.
            prompts: Prompts that it reads without a reply, which its rows do not count.
            **choices: See :meth:`overrides`.

        Returns:
            The run folder.
        """
        config = self.prepare(part_overrides, **choices)
        if share is not None and (
            self.allowance.is_time or not config.model.in_process
        ):
            config = replace(config, budget=self.allowance.rest(share))
        command = command_line(self.overrides(part_overrides, **choices))
        lm = self.lm if config.model.in_process else None
        with self.counted(part, lm, prompts):
            folder = execute(
                config,
                command=command,
                console=self.console,
                lm=lm,
                shows_result=False,
            )
        self.diagnosis.runs[part] = str(folder)
        self.seconds_of_run[part] = open_run_dir(folder).status()["seconds"]
        self._count_rows(part, folder, is_served=lm is None)
        return folder

    def write_page(self, folder: Path) -> None:
        """Draw the figures and the page of a run, as its stage report would."""
        with owning(folder):
            render_run(folder)
            open_run_dir(folder).renew(REDRAWN_FILES)

    @contextmanager
    def counted(
        self, part: str, lm: LM | None = None, prompts: int = 0
    ) -> Iterator[None]:
        """Add the time of a block, and the tokens that a model read and wrote in it, to a part.

        Args:
            part: Name of the part.
            lm: The model in process, None for a server.
            prompts: Prompts that are read in it, where no run counts them.
        """
        began = time.monotonic()
        read, written = (lm.tokens_read, lm.tokens_written) if lm else (0, 0)
        yield
        self._count_time(part, time.monotonic() - began)
        if lm:
            self.allowance.add(
                prompts, lm.tokens_read - read, lm.tokens_written - written
            )
        if prompts:
            self.count_prompts(part, prompts)

    def _count_rows(self, part: str, folder: Path, is_served: bool) -> None:
        """Count the prompts of a run, and the tokens that its server counted."""
        if not (folder / PREDICTIONS).is_file():
            return
        rows = open_run_dir(folder).rows_without_error(PREDICTIONS)
        self.count_prompts(part, len(rows))
        read = written = 0
        if is_served:
            read = sum(int(row.get("prompt_tokens") or 0) for row in rows)
            written = sum(int(row.get("reply_tokens") or 0) for row in rows)
        self.allowance.add(len(rows), read, written, is_paid=is_served)

    def count_prompts(self, part: str, prompts: int) -> None:
        """Add prompts that were read to a part."""
        counts = self.diagnosis.prompts
        counts[part] = counts.get(part, 0) + prompts

    def _count_time(self, part: str, seconds: float) -> None:
        counts = self.diagnosis.seconds
        counts[part] = round(counts.get(part, 0.0) + seconds, 1)


def _has_weights(model: ModelConfig) -> bool:
    """Whether the checkpoint of a served model is on this machine, weights and all."""
    if not model.path:
        return False
    try:
        source = _without_server(model).checkpoint
        folder = cached_path(source)
    except UserError:
        return False
    if folder is None:
        return False
    files = weight_files(folder)
    return bool(files) and all((folder / name).is_file() for name in files)


def _without_server(model: ModelConfig) -> ModelConfig:
    """The config of a served model's checkpoint in process."""
    defaults = {
        name: ModelConfig.__dataclass_fields__[name].default for name in SERVER_KEYS
    }
    changes: Mapping[str, Any] = {**defaults, "base_url": None}
    return replace(model, **changes)


def _args_of_checkpoint(args: Sequence[str], model: ModelConfig) -> list[str]:
    """The arguments for the checkpoint of a served model in process."""
    server_keys = [
        f"model.{name}" for name in ("base_url", "path", "price", *SERVER_KEYS)
    ]
    kept = [
        arg
        for arg in args
        if not any(f"{key_of(arg)}.".startswith(f"{key}.") for key in server_keys)
    ]
    choices = [arg for arg in kept if key_of(arg) == "model"]
    if choices and choices != [f"model={ENDPOINT}"]:
        return kept
    return [f"model={model.path}", *(arg for arg in kept if arg not in choices)]
