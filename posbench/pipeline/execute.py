"""One run: claim the folder, run the stages in order, finish."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

import posbench
from posbench import paths
from posbench.errors import UserError
from posbench.files import sources
from posbench.files.atomic import digest
from posbench.files.hardware import hardware
from posbench.model.lm import LM
from posbench.model.load import ModelConfig, torch_device
from posbench.pipeline.config import Config
from posbench.pipeline.stages import report as stage_report
from posbench.run.base import IncompleteRun, Run, encode, load_model
from posbench.run.folder import claim, find

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "hydra-core",
    "omegaconf",
    "numpy",
    "scipy",
    "pandas",
    "matplotlib",
)


def execute(config: Config, *, command: str, console: Console) -> Path:
    """Run the stages of a config in its versioned folder; finished work is not repeated.

    Args:
        config: The checked config.
        command: The command line, for the record.
        console: Where progress and tables go.

    Returns:
        The run folder.

    Raises:
        UserError: Something the user can mend.
        IncompleteRun: Some rows failed and will be retried by the same command.
    """
    # First of all: a device that is not there, and weights to download, with the hub's own progress bars.
    who = identity(config)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if config.runtime.threads:
        torch.set_num_threads(config.runtime.threads)
    subject = config.study_name or config.task.name
    suite = config.experiment.name if config.experiment else subject
    moves = {"identity": who, "method": config.raw["method"]}
    if config.study:
        moves["study"] = config.raw["study"]
    if "search" in config.stages or (config.study and config.study.uses_search):
        moves |= {"search": config.raw["search"], "pinned": config.raw["pinned"]}
    moves["measured"] = [config.runtime.intervene_examples, config.runtime.resamples]
    parts = (
        [config.model.name, config.study_name, config.method_name]
        if uses_model(config)
        else [config.study_name]
    )
    name = "__".join([*filter(None, parts), digest(moves)])
    key = {
        "posbench": posbench.__version__,
        "code": who["code"],
        "task": config.raw["task"],
        "task_version": config.task.version,
    }
    outputs = Path(config.runtime.outputs).expanduser()
    console.rule(
        f"[bold]{config.model.name}  {subject}  {config.method_name}"
        if uses_model(config)
        else f"[bold]{subject}"
    )
    lm = preflight(config, console) if find(outputs, suite, key, name) is None else None
    facts = provenance(config, command, who)
    with claim(outputs, suite, key, name, config.raw, facts) as out:
        if out.done and all(out.stage(stage).get("done") for stage in config.stages):
            console.print("finished before: nothing is computed again")
            stage_report.show(out.path, console)
            return out.path
        (out.path / "DONE").unlink(missing_ok=True)
        out.finish("running")
        run = Run(config, out, console, who)
        if lm:
            run.lm = lm
        try:
            for stage in config.stages:
                module = (
                    f"posbench.search.{config.search.stage}"
                    if stage == "search"
                    else f"posbench.pipeline.stages.{stage}"
                )
                importlib.import_module(module).run(run)
                out.mark(stage, done=True)
        except BaseException as error:
            out.finish(
                "incomplete" if isinstance(error, IncompleteRun) else "failed",
                f"{type(error).__name__}: {error}",
            )
            raise
        out.finish("done")
        if "report" not in config.stages:
            stage_report.show(out.path, console)
        return out.path


def uses_model(config: Config) -> bool:
    """Whether a run looks at a model at all; some studies do not."""
    return (
        config.study is None
        or config.study.needs_model
        or bool({"search", "intervene", "evaluate"} & set(config.stages))
    )


def preflight(config: Config, console: Console) -> LM | None:
    """Load the model and refuse what does not fit it, so that bad input leaves no folder behind.

    Of each split only the longest prompt (in characters) is tokenised here; the stages check every one.

    Raises:
        UserError: The checkpoint, a channel, layers, a file or a prompt does not fit.
    """
    if config.stages == ("report",):
        raise UserError(
            "stages", ["report"], "report after another stage", "posbench report DIR redraws a run"
        )
    if not uses_model(config):
        assert config.study is not None
        config.study.check(config, None)
        return None
    lm = load_model(config, console)
    config.trial().check(lm)
    if config.study:
        config.study.check(config, lm)
    task = config.task
    if "search" in config.stages:
        importlib.import_module(f"posbench.search.{config.search.stage}").check(config, lm)
        longest = max(task.examples("calibration"), key=lambda e: len(e.prompt))
        lm.encode(longest.prompt)
    if {"intervene", "evaluate"} & set(config.stages):
        longest = max(task.evaluation(), key=lambda e: len(e.prompt))
        encoded = encode(lm, task, longest)
        _check_overflow(lm, encoded.ids)
        if len({tuple(lm.continuation_ids(encoded, choice)) for choice in longest.choices}) < len(
            longest.choices
        ):
            raise UserError(
                "model",
                lm.name,
                f"a tokenizer that tells the choices of {task.name} apart: {', '.join(map(repr, longest.choices))}",
                "take a model that reads this text; the embedded ones know the words of kv_retrieval only",
            )
    return lm


def _check_overflow(lm: LM, ids: list[int]) -> None:
    """Refuse float16 where it overflows on the longest prompt: the answers would be noise, and nothing else
    would say so.

    Raises:
        UserError: The next-token logits are not finite.
    """
    if lm.model.dtype != torch.float16:
        return
    with torch.inference_mode():
        finite = torch.isfinite(lm.model(**lm.pad([ids]), logits_to_keep=1, use_cache=False).logits).all()
    if not finite:
        raise UserError(
            "model.dtype",
            "float16",
            f"bfloat16 or float32: {lm.name} overflows in float16",
            "set model.dtype=bfloat16",
        )


def identity(config: Config) -> dict[str, Any]:
    """What, beside the method and the task, can move a number: weights, kernel, precision, batch size, device
    kind."""
    model, kind = config.model, torch_device(config.runtime.device).type
    return {
        "weights": fingerprint(model) if uses_model(config) else None,
        "dtype": model.dtype,
        "attention": model.attention,
        "rope": model.rope,
        "chat_template": model.chat_template,
        "context_window": model.context_window,
        "batch_size": config.runtime.batch_size,
        "batch_tokens": config.runtime.batch_tokens,
        "threads": config.runtime.threads,
        "device": kind,
        "code": source_digest(config),
    }


def fingerprint(model: ModelConfig) -> str:
    """Identity of a checkpoint: content of a local folder's small files and edges of its weights, or hub id
    and commit."""
    source = sources.checkpoint(model.path, model.revision)
    if source.kind == "model":
        return f"{source.id}@{sources.commit(source)}"
    folder = sources.local(source)
    total = hashlib.sha256()
    for file in sorted(
        p for p in folder.iterdir() if p.is_file() and p.suffix != ".md" and not p.name.startswith(".")
    ):
        total.update(f"{file.name} {file.stat().st_size}".encode())
        with open(file, "rb") as stream:
            total.update(stream.read(1 << 20))
            # The first megabyte of a shard can be shared by two fine-tunes; the last rarely is.
            stream.seek(max(file.stat().st_size - (1 << 20), 0))
            total.update(stream.read())
    return total.hexdigest()[:16]


def source_digest(config: Config) -> str:
    """Hash of the package's code and of the user's own method and task: results of two codes never meet in
    one folder."""
    total = hashlib.sha256()
    parts = [config.task, config.search, *([config.study] if config.study else [])]
    own = {inspect.getsourcefile(cls) for cls in (*config.method_classes, *map(type, parts))}
    files = {*paths.PACKAGE.rglob("*.py"), *(Path(file).resolve() for file in own if file)}
    for file in sorted(files):
        name = file.relative_to(paths.PACKAGE).as_posix() if file.is_relative_to(paths.PACKAGE) else file.name
        total.update(name.encode() + file.read_bytes())
    return total.hexdigest()[:12]


def provenance(config: Config, command: str, who: Mapping[str, Any]) -> dict[str, Any]:
    """Versions, hardware and origin of a run."""
    return {
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "posbench": posbench.__version__,
        "git": _git(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "hardware": hardware(),
        "identity": dict(who),
        "model": {
            "path": config.model.path,
            "revision": config.model.revision,
            "source": config.model.source,
        },
        "task": {
            "version": config.task.version,
            "source": config.task.source,
            "licence": config.task.licence,
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git() -> str | None:
    """Commit of the checkout this package runs from, marked when it has changes; None for an installed
    wheel."""
    if not (paths.PACKAGE.parent / ".git").exists():
        return None
    ask = ["git", "-C", str(paths.PACKAGE.parent), "describe", "--always", "--dirty", "--abbrev=12"]
    answer = subprocess.run(ask, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None
