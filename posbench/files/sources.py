"""Where the files of a config come from (the hub, a URL, this machine), and how they get here."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal
from urllib.request import Request, urlopen

import huggingface_hub
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from posbench import paths
from posbench.errors import MachineError, UserError
from posbench.files.atomic import write_bytes
from posbench.late import hub_errors

WEIGHTS = "model*.safetensors"
CHECKPOINT = ("*.json", "*.jinja", "*.txt", "*.model", WEIGHTS)
"""What a checkpoint is loaded from. The same weights as *.bin, *.pth or consolidated.* stay on the hub."""

A_CHECKPOINT = "a local directory with config.json, tokenizer files and *.safetensors, or a reachable hub id"
TOKENIZER = (
    "tokenizer*",
    "special_*",
    "added_*",
    "vocab*",
    "merges*",
    "chat_template*",
    "*.model",
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files that a config needs, in one place."""

    # ``model`` or ``dataset`` (hub repositories), ``url``, or ``path`` (on this machine)
    kind: Literal["model", "dataset", "url", "path"]
    id: str  # hub id, URL, or path of a file or folder
    field: str  # the config key that named it, for errors
    # of a data set, paths in its repository; of a checkpoint, patterns in its top folder
    files: tuple[str, ...] = ()
    revision: str | None = None  # hub branch, tag or commit; None is the default branch
    sha256: str = ""  # checksum that a URL's content must have; empty: not known
    about: str = ""  # what is known of size and licence without asking


@dataclass(frozen=True)
class File:
    """A file's name, its size in bytes (None if unknown), and whether it is on this machine."""

    name: str
    size: int | None
    here: bool


def there(path: Path) -> bool:
    """Whether there is such a file or folder; none has a name that is too long for this machine."""
    try:
        return path.exists()
    except OSError:
        return False


def checkpoint(path: str, revision: str | None = None) -> Source:
    """The source of a model: an embedded one, a local directory, or a hub id."""
    resolved = paths.model_path(path)
    local = (
        there(Path(resolved)) or resolved.startswith("/") or path.startswith((".", "~"))
    )
    kind: Any = "path" if local else "model"
    return Source(
        kind=kind, id=path, field="model.path", files=CHECKPOINT, revision=revision
    )


def local(source: Source) -> Path:
    """The folder (repository) or file (URL, path) on this machine; what is complete needs no network.

    Raises:
        UserError: It is not here and cannot be downloaded, or its content is not what it was.
    """
    here = cached(source)
    if here is None:
        listing(source)
        here = _download(source)
    if (
        source.sha256
        and (found := hashlib.sha256(here.read_bytes()).hexdigest()) != source.sha256
    ):
        allowed = f"the content of {source.id} with sha256 {source.sha256[:12]}"
        hint = f"delete that file and run posbench fetch again, or set {source.field} to a copy of your own"
        raise UserError(source.field, f"{here} with sha256 {found[:12]}", allowed, hint)
    return here


def commit(source: Source) -> str:
    """The commit of a hub repository that :func:`local` uses."""
    revision = source.revision or ""
    return revision if re.fullmatch("[0-9a-f]{40}", revision) else local(source).name


def cached(source: Source) -> Path | None:
    """The folder or file if all of it is on this machine, else None; never touches the network."""
    if source.kind == "path":
        path = Path(paths.model_path(source.id))
        return path if there(path) else None
    if source.kind == "url":
        return _url_file(source.id) if _url_file(source.id).is_file() else None
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                source.id, local_files_only=True, **_wanted(source)
            )
        )
    except hub_errors.LocalEntryNotFoundError:
        return None
    except ValueError as error:
        raise _refused(source, error) from error
    # A cache filled by other programs has no list of files: look at what loading needs.
    if source.kind == "model":
        gone = lacking(folder)
        return (
            None
            if gone and (WEIGHTS in source.files or not gone.endswith(".safetensors"))
            else folder
        )
    return folder if all((folder / name).is_file() for name in source.files) else None


def lacking(folder: Path) -> str:
    """The first thing that a checkpoint folder lacks to be loaded; empty if nothing."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if not any(folder.glob("tokenizer*")):
        return "tokenizer files"
    try:
        return next(
            (shard for shard in shards(folder) if not (folder / shard).is_file()), ""
        )
    except UserError as error:
        return error.allowed


def facts(source: Source) -> dict[str, Any]:
    """What a checkpoint on this machine says in its config.json; empty where that cannot be read."""
    try:
        known = json.loads(
            (Path(paths.model_path(source.id)) / "config.json").read_text(
                encoding="utf-8"
            )
        )
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def shards(folder: Path) -> list[str]:
    """The files that hold the weights of a checkpoint folder, as its index names them, there or not.

    Raises:
        UserError: The index is malformed, or names files elsewhere or that are no safetensors.
    """
    whole = "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if (folder / whole).is_file() or not index.is_file():
        return [whole]
    try:
        named = sorted(
            set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        )
        outside = [
            name for name in named if not re.fullmatch(r"[^/\\]+\.safetensors", name)
        ]
        if named and not outside:
            return named
        hint = f"get the checkpoint again: its index names {', '.join(outside[:1]) or 'no file'}"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        hint = f"get the checkpoint again ({type(error).__name__}: {error})"
    allowed = "an index whose weight_map names safetensors files of its own folder"
    raise UserError("model.path", str(index), allowed, hint)


def listing(source: Source) -> tuple[str, list[File]]:
    """The commit (hub repositories only, else empty) and the files, asked from the hub or server.

    Raises:
        UserError: It does not exist, is not complete, or cannot be reached.
    """
    if source.kind == "path":
        return "", _on_disk(source)
    try:
        if source.kind == "url":
            if cached(source):
                return "", _on_disk(source, _url_file(source.id))
            with urlopen(Request(source.id, method="HEAD"), timeout=30) as answer:
                size = answer.headers.get("Content-Length")
            return "", [
                File(_url_file(source.id).name, int(size) if size else None, False)
            ]
        # Without the timeout the client would retry for half a minute where there is no network.
        asked: dict[str, Any] = {
            "repo_type": source.kind,
            "revision": source.revision,
            "timeout": 10,
        }
        info = huggingface_hub.HfApi().repo_info(
            source.id, files_metadata=True, **asked
        )
    except _failures() as error:
        raise _refused(source, error) from error
    sha = str(info.sha)
    files = []
    for entry in getattr(info, "siblings", None) or ():
        if _matches(source, entry.rfilename):
            here = huggingface_hub.try_to_load_from_cache(
                source.id, entry.rfilename, revision=sha, repo_type=source.kind
            )
            files.append(File(entry.rfilename, entry.size, isinstance(here, str)))
    names = {file.name for file in files}
    whole = ("config.json", *(part for part in source.files if part == WEIGHTS))
    wanted = source.files if source.kind == "dataset" else whole
    gone = [
        pattern
        for pattern in wanted
        if not any(fnmatch(name, pattern) for name in names)
    ]
    if gone:
        allowed = f"a repository with {gone[0]} (commit {sha[:12]} has none)"
        hint = "name a revision that has it (some keep safetensors under refs/pr/N), or another repository"
        raise UserError(source.field, source.id, allowed, hint)
    return sha, sorted(files, key=lambda file: file.name)


def fetch(sources: Iterable[Source], *, dry_run: bool, console: Console) -> None:
    """Print every file of the sources, and download what is missing or newer on the hub unless ``dry_run``.

    Raises:
        UserError: A file is missing on this machine, or a source cannot be reached and is not in the cache.
    """
    sources = list(dict.fromkeys(sources))
    table = Table(
        "what", "from", "file", "size", "state", "about", box=None, pad_edge=False
    )
    commits: dict[Source, str] = {}
    wanted = []
    problems = []
    every = []
    for source in sources:
        try:
            sha, files = listing(source)
        except UserError as error:
            # Without a cause it was reached, and does not hold what is wanted.
            here = cached(source) if source.kind != "path" and error.__cause__ else None
            if here is None:
                problems.append(error)
                table.add_row(
                    source.field.partition(".")[0],
                    source.id,
                    "",
                    "",
                    "missing",
                    source.about,
                )
                continue
            reason = type(error.__cause__).__name__
            said = (
                f"{source.id}: not reachable ({reason}), but a complete copy is cached"
            )
            console.print(said, soft_wrap=True)
            sha = "" if source.kind == "url" else here.name
            files = _on_disk(source, here)
        if sha:
            commits[source] = sha
        for file in files:
            tokenizer = source.files == CHECKPOINT and any(
                fnmatch(file.name, part) for part in TOKENIZER
            )
            what = "tokenizer" if tokenizer else source.field.partition(".")[0]
            state = (
                "missing"
                if not file.here
                else "here"
                if source.kind == "path"
                else "cached"
            )
            size = "?" if file.size is None else decimal(file.size)
            about = source.about if file == files[0] else ""
            table.add_row(what, source.id, file.name, size, state, about)
        every += files
        here = cached(source)
        if here is None or (sha and here.name != sha):
            wanted.append(source)
    if table.row_count:
        console.print(table)
    if every and not problems:
        total, absent = (
            sum(f.size or 0 for f in every if not (f.here and new))
            for new in (False, True)
        )
        console.print(
            f"{len(every)} files, {decimal(total)}; to download: {decimal(absent)}"
        )
    if problems:
        raise problems[0]
    if not wanted:
        console.print(
            "nothing to download: everything this config needs is on this machine"
        )
    elif dry_run:
        console.print("nothing was downloaded")
    else:
        for source in wanted:
            _download(source)
        console.print("downloaded: runs of this config need no network now")
    for source, sha in commits.items():
        pin = f"{source.field.partition('.')[0]}.revision={sha}"
        console.print(
            f"{source.id} is at commit {sha}; to stay there: {pin}", soft_wrap=True
        )


def _failures() -> tuple[type[Exception], ...]:
    """What the hub's client and urllib raise: no network, no such repository, a torn answer, a bad id."""
    return OSError, hub_errors.HTTPError, HTTPException, ValueError


def _wanted(source: Source) -> dict[str, Any]:
    """Arguments that select the files of a repository in the hub's client, where * also matches a slash."""
    wanted = {
        "repo_type": source.kind,
        "revision": source.revision,
        "allow_patterns": list(source.files),
    }
    return wanted | {"ignore_patterns": ["*/*"] if source.kind == "model" else None}


def _matches(source: Source, name: str) -> bool:
    if source.kind == "dataset":
        return name in source.files
    return "/" not in name and any(fnmatch(name, pattern) for pattern in source.files)


def _on_disk(source: Source, folder: Path | None = None) -> list[File]:
    """The files of a path, or of a cached repository."""
    path = folder or Path(paths.model_path(source.id))
    if there(path) and path.is_dir() and source.files == CHECKPOINT and lacking(path):
        raise _refused(source, FileNotFoundError(f"it lacks {lacking(path)}"))
    if there(path) and path.is_dir() and source.files:
        found = [
            p for pattern in source.files for p in path.glob(pattern) if p.is_file()
        ]
        return [
            File(p.relative_to(path).as_posix(), p.stat().st_size, True)
            for p in sorted(set(found))
        ]
    if there(path) and path.is_file() and source.files != CHECKPOINT:
        return [File(path.name, path.stat().st_size, True)]
    what = "directory" if source.files == CHECKPOINT else "file or folder"
    raise _refused(source, FileNotFoundError(f"no such {what}"))


def _download(source: Source) -> Path:
    try:
        if source.kind == "url":
            with urlopen(source.id, timeout=30) as answer:
                data = answer.read()
            _url_file(source.id).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(_url_file(source.id), data)
            return _url_file(source.id)
        return Path(huggingface_hub.snapshot_download(source.id, **_wanted(source)))
    except _failures() as error:
        raise _refused(source, error) from error


def cache_folder() -> Path | None:
    """``POSBENCH_CACHE``, else posbench's part of the user's cache; None where there is no home folder."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(os.environ.get("POSBENCH_CACHE") or f"{base}/posbench").expanduser()
    except RuntimeError:
        return None


def _url_file(url: str) -> Path:
    """Where a URL is cached: two URLs that end in the same name stay apart."""
    cache = cache_folder()
    if cache is None:
        allowed = "a folder for downloads, where there is no home folder"
        raise MachineError(
            "POSBENCH_CACHE", None, allowed, "set that environment variable"
        )
    name = url.rstrip("/").rpartition("/")[2] or "index"
    return cache / hashlib.sha256(url.encode()).hexdigest()[:12] / name


def _refused(source: Source, error: Exception) -> UserError:
    """The failure of a source as one line with the next step."""
    field = source.field
    value = source.id
    whole = source.files == CHECKPOINT
    named = {"dataset": "a reachable data set of the hub", "url": "a reachable URL"}
    allowed = (
        A_CHECKPOINT if whole else named.get(source.kind, "a file on this machine")
    )
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    own = (
        f"set {field}=DIR to a local checkpoint"
        if whole
        else f"set {field} to a copy on this machine"
    )
    page = f"https://huggingface.co/{'datasets/' if source.kind == 'dataset' else ''}{source.id}"
    if isinstance(error, hub_errors.GatedRepoError):
        hint = f"accept its licence at {page}, then `hf auth login` (or set HF_TOKEN)"
    elif isinstance(error, hub_errors.RepositoryNotFoundError):
        login = "a private or gated repository needs `hf auth login` (or HF_TOKEN)"
        hint = f"check the spelling; {login}; or {own}"
    elif isinstance(error, hub_errors.RevisionNotFoundError):
        field = field.replace(".path", ".revision")
        value = source.revision or "main"
        allowed = f"a branch, tag or commit of {source.id}"
        hint = f"see {page}/commits"
    elif isinstance(error.__cause__, hub_errors.OfflineModeIsEnabled) or isinstance(
        error, hub_errors.OfflineModeIsEnabled
    ):
        hint = f"unset HF_HUB_OFFLINE for once (posbench fetch), or {own}"
    else:
        hint = f"{own} ({reason})"
    return UserError(field, value, allowed, hint)
