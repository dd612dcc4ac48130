"""What tells runs apart: all that can move a number, and nothing else; and where a run was made."""

from __future__ import annotations

import hashlib
import inspect
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from posbench import paths, versions
from posbench.files import sources
from posbench.files.atomic import digest
from posbench.files.hardware import hardware
from posbench.model.load import ModelConfig, torch_device
from posbench.pipeline.config import Config

NUMBERS = "tasks stats theory model methods perturbations measure run search studies embedded"
NUMBERS += " pipeline/stages schema.py files/atomic.py"
"""Parts of the package that can move a number: a changed figure, page or message starts no new version."""


def identity(config: Config) -> dict[str, Any]:
    """What, apart from method and task, can move a number: code, weights, kernel, precision, device kind."""
    model, runtime = config.model, config.runtime
    found: dict[str, Any] = {"code": source_digest(config), "device": torch_device(runtime.device).type}
    found |= {name: getattr(runtime, name) for name in ("batch_size", "batch_tokens")}
    found["threads"] = threads(config)
    if config.uses_model:
        kept = ("dtype", "attention", "rope", "chat_template", "context_window")
        found |= {"weights": fingerprint(model), **{name: getattr(model, name) for name in kept}}
    return found


def threads(config: Config) -> int | None:
    """CPU threads of a run: the user's, else those of the model's file where the run looks at it."""
    return config.runtime.threads or (config.model.threads if config.uses_model else None)


def version_key(config: Config, who: Mapping[str, Any]) -> dict[str, Any]:
    """What runs of one version folder share: code and examples."""
    key = {"posbench": versions.__version__, "code": who["code"]}
    if config.uses_task:
        key |= {"task": config.raw["task"], "task_version": config.task.version}
    return key


def run_name(config: Config, who: Mapping[str, Any]) -> str:
    """Folder of a run: what it is, and a hash of what moves its numbers."""
    runtime = config.runtime
    measured = [runtime.intervene_examples, runtime.resamples]
    moves = {"identity": who, "measured": measured, "typed": config.raw["typed"]}
    moves |= {key: config.raw[key] for key in ("method", "study", "search") if key in config.raw}
    if config.every:
        moves["every"] = {name: choice.values for name, choice in config.every.items()}
    if config.study and (files := config.study.reads()):
        moves["reads"] = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    parts = [config.study_name]
    if config.uses_model:
        parts = [config.model.name, config.study_name, config.choice.name]
    return "__".join([*filter(None, parts), digest(moves)])


def fingerprint(model: ModelConfig) -> str:
    """Identity of a checkpoint: its small files and the edges of its weights, or hub id and commit."""
    source = sources.checkpoint(model.path, model.revision)
    if source.kind == "model":
        return f"{source.id}@{sources.commit(source)}"
    folder = sources.local(source)
    total, files = hashlib.sha256(), [p for p in folder.iterdir() if p.is_file() and p.suffix != ".md"]
    for file in sorted(p for p in files if not p.name.startswith(".")):
        total.update(f"{file.name} {file.stat().st_size}".encode())
        with open(file, "rb") as stream:
            total.update(stream.read(1 << 20))
            # The first megabyte of a shard can be shared by two fine-tunes; the last rarely is.
            stream.seek(max(file.stat().st_size - (1 << 20), 0))
            total.update(stream.read())
    return total.hexdigest()[:16]


def source_digest(config: Config) -> str:
    """Hash of the code that can move a number, the user's own too: two codes never meet in one folder."""
    total = hashlib.sha256()
    searching = "search" in config.stages
    parts = [*[config.task] * config.uses_task, *[config.search] * searching, *filter(None, [config.study])]
    classes = [*config.choice.classes, *(choice.cls for choice in config.every.values()), *map(type, parts)]
    own = {inspect.getsourcefile(cls) for cls in classes}
    files = {Path(file).resolve() for file in own if file}
    for name in NUMBERS.split():
        part = paths.PACKAGE / name
        files |= {part} if part.is_file() else {*part.rglob("*.py"), *part.glob("*.json")}
    for file in sorted(files):
        name = file.relative_to(paths.PACKAGE).as_posix() if file.is_relative_to(paths.PACKAGE) else file.name
        total.update(name.encode() + file.read_bytes())
    return total.hexdigest()[:12]


def provenance(config: Config, command: str, who: Mapping[str, Any]) -> dict[str, Any]:
    """Versions, hardware and origin of a run; model and task only where they take part."""
    facts: dict[str, Any] = {
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "posbench": versions.__version__,
        "git": _git(),
        "python": platform.python_version(),
        "packages": versions.installed(),
        "hardware": hardware(),
        "identity": dict(who),
    }
    if config.uses_model:
        facts["model"] = {name: getattr(config.model, name) for name in ("path", "revision", "source")}
    if config.uses_task:
        facts["task"] = {name: getattr(config.task, name) for name in ("version", "source", "licence")}
    return facts


def _git() -> str | None:
    """Commit of the checkout this runs from, marked when it has changes; None for an installed wheel."""
    if not (paths.PACKAGE.parent / ".git").exists():
        return None
    ask = ["git", "-C", str(paths.PACKAGE.parent), "describe", "--always", "--dirty", "--abbrev=12"]
    answer = subprocess.run(ask, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None
