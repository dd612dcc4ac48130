"""What tells runs apart: all that can move a number, and nothing else; and where a run was made."""

from __future__ import annotations

import hashlib
import inspect
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from posbench import paths, versions
from posbench.errors import UserError
from posbench.files import sources
from posbench.files.atomic import digest
from posbench.files.digests import Content, contents, in_place, keys
from posbench.files.hardware import hardware
from posbench.late import torch
from posbench.model.load import torch_device
from posbench.pipeline.config import Config, data_of

NUMBERS = (
    "tasks stats theory model methods perturbations measure run search studies embedded"
)
NUMBERS += " pipeline/stages schema.py files/atomic.py"
"""Parts of the package that can move a number: a changed figure, page or message starts no new version."""
READ = (".py", ".json", ".yaml", ".jinja")
"""What the package computes with: code, and the tables, shapes and chat templates beside it."""
DRAWS = re.compile(rb"^@plot\.styled\ndef .*?(?=^[^\s)]|\Z)", re.M | re.S)
"""A function that draws: it stands beside what it draws, and moves no number."""


def files(config: Config) -> list[sources.Source]:
    """The files that take part in a run: checkpoint, data, and what method, search and study read."""
    asked: list[sources.Source] = []
    if config.uses_model:
        asked = [*config.model.files, *config.choice.files()]
        asked += [
            file for choice in config.all_methods.values() for file in choice.files()
        ]
    asked += data_of(config.task) if config.uses_task else ()
    asked += config.search.files() if "search" in config.stages else ()
    if config.study:
        # Verdicts rest on the papers' tables.
        tables = paths.EXPERIMENTS / "reference"
        asked += config.study.files()
        asked.append(
            sources.Source(
                kind="path", id=str(tables), field="study.reference", files=("*.csv",)
            )
        )
    return asked


def reads(config: Config) -> list[Content]:
    """What these files hold.

    Raises:
        UserError: One is missing, or cannot be read or downloaded.
    """
    return contents(files(config))


def identity(config: Config, read: Sequence[Content]) -> dict[str, Any]:
    """What, apart from method and settings of the task, can move a number: code, libraries, weights, data,
    kernel, precision, device kind; ``read`` as :func:`reads` gives it."""
    model = config.model
    runtime = config.runtime
    found: dict[str, Any] = {
        "code": source_digest(_own(config)),
        "data": digest(keys(read, "task"), 16),
    }
    found |= {name: version(name) for name in ("torch", "transformers")}
    if config.uses_model and model.base_url:
        # What the server computes with is not known: its address and the model's name there stand for it.
        asked = ("base_url", "server_name", "api", "chat_template", "context_window")
        return found | {
            "tokenizer": fingerprint(read),
            **{name: getattr(model, name) for name in asked},
        }
    # A login node may lack what its jobs have.
    device = torch_device if runtime.device == "auto" else torch.device
    found["device"] = device(runtime.device).type
    found |= {
        name: getattr(runtime, name) for name in ("batch_size", "batch_tokens", "share")
    }
    found["threads"] = threads(config)
    if config.uses_model:
        kept = (
            "dtype",
            "attention",
            "rope",
            "chat_template",
            "context_window",
            "allow_partial",
        )
        found |= {
            "weights": fingerprint(read),
            **{name: getattr(model, name) for name in kept},
        }
    return found


def threads(config: Config) -> int | None:
    """CPU threads of a run: the user's, else those of the model's file where the run looks at it."""
    return config.runtime.threads or (
        config.model.threads if config.uses_model else None
    )


def version_key() -> dict[str, Any]:
    """What runs of one version folder share: posbench's code. So an experiment and a sweep, whose runs may
    differ in all else, stay in one version."""
    return {"posbench": versions.__version__, "code": source_digest()}


def run_name(config: Config, who: Mapping[str, Any], read: Sequence[Content]) -> str:
    """Folder of a run: what it is, and a hash of what moves its numbers."""
    runtime = config.runtime
    raw = in_place(config.raw, read)
    measured = [runtime.intervene_examples, runtime.resamples]
    moves = {"identity": who, "measured": measured, "typed": config.raw["typed"]}
    moves |= {
        key: raw[key] for key in ("task", "method", "study", "search") if key in raw
    }
    if config.all_methods:
        moves["every"] = {
            name: choice.values for name, choice in config.all_methods.items()
        }
    moves["files"] = keys(read, "method", "search", "study")
    parts = [config.study_name]
    if config.uses_model:
        parts = [config.model.name, config.study_name, config.choice.name]
    return "__".join([*filter(None, parts), digest(moves)])


def fingerprint(read: Sequence[Content]) -> str:
    """Identity of the checkpoint: hub id and commit, or a hash of all that it is loaded from."""
    files = [content for content in read if content.source.field == "model.path"]
    hub = [
        f"{content.source.id}@{content.held}"
        for content in files
        if content.file is None
    ]
    return hub[0] if hub else digest(keys(files, "model"), 16)


def _own(config: Config) -> set[Path]:
    """The files of the classes that take part, the user's own among them."""
    searching = "search" in config.stages
    parts = [
        *[config.task] * config.uses_task,
        *[config.search] * searching,
        *filter(None, [config.study]),
    ]
    classes = [
        *config.choice.classes,
        *(choice.cls for choice in config.all_methods.values()),
        *map(type, parts),
    ]
    return {
        Path(file).resolve() for file in map(inspect.getsourcefile, classes) if file
    }


def source_digest(own: Iterable[Path] = ()) -> str:
    """Hash of the code that can move a number, and of ``own`` files: two codes never meet in one folder."""
    total = hashlib.sha256()
    users = [file for file in own if not file.is_relative_to(paths.PACKAGE)]
    for name, code in sorted(
        [*_shipped(), *((file.name, _numeric(file)) for file in users)]
    ):
        total.update(name.encode() + code)
    return total.hexdigest()[:12]


def _numeric(file: Path) -> bytes:
    """A file without its functions that draw."""
    return DRAWS.sub(b"", file.read_bytes())


@cache
def _shipped() -> list[tuple[str, bytes]]:
    """posbench's own code that can move a number, as it was when this process first looked."""
    files = set[Path]()
    for part in (paths.PACKAGE / name for name in NUMBERS.split()):
        inside = (
            f
            for suffix in READ
            for f in part.rglob(f"*{suffix}")
            if paths.MODELS not in f.parents
        )
        files |= {part} if part.is_file() else set(inside)
    return [
        (file.relative_to(paths.PACKAGE).as_posix(), _numeric(file)) for file in files
    ]


def provenance(
    config: Config, command: str, who: Mapping[str, Any], read: Sequence[Content]
) -> dict[str, Any]:
    """Versions, hardware and origin of a run, and what it reads; model and task only where they take part."""
    facts: dict[str, Any] = {
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "posbench": versions.__version__,
        "git": _git(),
        "python": platform.python_version(),
        "packages": versions.installed(),
        "hardware": hardware(),
        "identity": dict(who),
        "files": [content.fact for content in read],
    }
    if config.uses_model:
        kept = ["path", "revision", "source"]
        kept += ["base_url", "server_name", "api"] if config.model.base_url else []
        facts["model"] = {name: getattr(config.model, name) for name in kept}
    if config.uses_task:
        facts["task"] = {
            name: getattr(config.task, name)
            for name in ("version", "source", "licence")
        }
    return facts


def need_same(wanted: Sequence[sources.Source], facts: Mapping[str, Any]) -> None:
    """Refuse files of a task or a checkpoint that do not hold what a run read, by the run's provenance.

    Raises:
        UserError: A file is missing or holds something else.
    """
    fields = {source.field for source in wanted}
    entries = [entry for entry in facts.get("files", ()) if entry["field"] in fields]
    was = {(e["field"], e["name"]): e.get("sha256", e.get("commit")) for e in entries}
    for content in contents(wanted) if entries else ():
        before = was.get(content.key[:2], "not read")
        if before != content.held:
            allowed = (
                f"what the run read ({before[:12]}; now it holds {content.held[:12]})"
            )
            hint = "bring that file back, or run the new one: posbench with the same arguments"
            raise UserError(
                content.source.field,
                str(content.file or content.source.id),
                allowed,
                hint,
            )


def _git() -> str | None:
    """Commit of the checkout this runs from, marked when it has changes; None for an installed wheel."""
    if not (paths.PACKAGE.parent / ".git").exists():
        return None
    ask = [
        "git",
        "-C",
        str(paths.PACKAGE.parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
    ]
    answer = subprocess.run(ask, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None
