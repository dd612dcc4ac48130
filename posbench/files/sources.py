"""Where the files of a config come from (the hub, a URL, this machine), and how they get here.

Of a URL's download pooch would replace ten lines; sizes, states and messages, which are most of this module, stay.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.request import Request, urlopen

import huggingface_hub
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from posbench import paths
from posbench.errors import MachineError, UserError
from posbench.files.atomic import write_bytes
from posbench.files.checksums import cache_folder, file_sha256
from posbench.files.parse import parse_json, read_text
from posbench.late import LateModule, hub_errors

if TYPE_CHECKING:
    from posbench.files import gguf, wheels
else:
    # Few runs read such a model.
    gguf = LateModule("posbench.files.gguf")
    wheels = LateModule("posbench.files.wheels")

WEIGHTS_PATTERN = "model*.safetensors"
CHECKPOINT_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model", WEIGHTS_PATTERN)
"""Files from which a checkpoint is loaded. Copies of the weights as *.bin, *.pth or consolidated.* stay on the hub."""

CHECKPOINT_ALLOWED = "a local directory with config.json, tokenizer files and *.safetensors, or a reachable hub id"
TOKENIZER = (
    "tokenizer*",
    "special_*",
    "added_*",
    "vocab*",
    "merges*",
    "chat_template*",
    "*.model",
)
"""Files of the tokenizer among these."""

SERVER_TIMEOUT_SECONDS = 30
# Without a timeout the hub's client would retry for half a minute where there is no network.
HUB_TIMEOUT_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files that a config needs, in one place.

    Attributes:
        kind: ``model`` or ``dataset`` (hub repositories), ``url``, ``path`` (on this machine), ``gguf`` (a GGUF file
            on this machine, read as a checkpoint), or ``wheel`` (one in a wheel of the package index).
        id: Hub id, URL, ``wheel://NAME``, or path of a file or folder.
        field: The config key that named it, for errors.
        files: Of a data set, paths in its repository; of a checkpoint, patterns in its top folder.
        revision: Hub branch, tag or commit; None is the default branch.
        sha256: Checksum that a URL's content must have; empty: not known.
        about: Known size and licence, to show without network access.
    """

    kind: Literal["model", "dataset", "url", "path", "gguf", "wheel"]
    id: str
    field: str
    files: tuple[str, ...] = ()
    revision: str | None = None
    sha256: str = ""
    about: str = ""

    @property
    def is_local(self) -> bool:
        """Whether it is a file or folder of the user, not something that is downloaded."""
        return self.kind in ("path", "gguf")

    @property
    def is_converted(self) -> bool:
        """Whether a copy that was converted from a GGUF file is read in its place."""
        return self.kind in ("gguf", "wheel")


@dataclass(frozen=True)
class File:
    """A file's name, its size in bytes (None if unknown), and whether it is on this machine."""

    name: str
    size: int | None
    here: bool


def exists(path: Path) -> bool:
    """Whether there is such a file or folder; none has a name that is too long for this machine."""
    try:
        return path.exists()
    except OSError:
        return False


def checkpoint_source(path: str, revision: str | None = None) -> Source:
    """The source of a model: embedded, in a wheel, a local directory or GGUF file, or a hub id."""
    resolved = paths.model_path(path)
    looks_local = resolved.startswith("/") or path.startswith((".", "~"))
    kind: Literal["path", "gguf", "wheel", "model"] = "model"
    if path.startswith(paths.WHEEL):
        kind = "wheel"
    elif _is_gguf(Path(resolved)):
        kind = "gguf"
    elif looks_local or exists(Path(resolved)):
        kind = "path"
    return Source(
        kind=kind,
        id=path,
        field="model.path",
        files=CHECKPOINT_PATTERNS,
        revision=revision,
    )


def _is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, or a folder with one and no other checkpoint."""
    if path.suffix == paths.GGUF:
        return True
    has_config = (path / "config.json").exists()
    return not has_config and any(path.glob(f"*{paths.GGUF}"))


def local(source: Source) -> Path:
    """Return the folder (repository) or file (URL, path) on this machine; without network if it is complete.

    Raises:
        UserError: It is missing and cannot be downloaded, or its content has changed.
    """
    path = cached_path(source)
    if path is None:
        need_reachable(source)
        path = _download(source)
    if source.sha256:
        checksum = hashlib.sha256(path.read_bytes()).hexdigest()
        if checksum != source.sha256:
            value = f"{path} with sha256 {checksum[:12]}"
            allowed = f"the content of {source.id} with sha256 {source.sha256[:12]}"
            hint = f"delete that file and run posbench fetch again, or set {source.field} to a copy of your own"
            raise UserError(source.field, value, allowed, hint)
    return path


def need_reachable(source: Source) -> None:
    """Refuse a source that is neither on this machine nor downloadable by a run."""
    if source.kind == "wheel" and cached_path(source) is None:
        wheel = wheels.wheel_of(source.id)
        allowed = f"a model that was fetched; this one was not ({wheel.about})"
        raise UserError(source.field, source.id, allowed, _fetch_command(source))
    list_files(source)


def _fetch_command(source: Source) -> str:
    """The command that fetches a model, or fetches it again."""
    if source.kind == "wheel":
        return f"posbench fetch {wheels.wheel_of(source.id).name}"
    return f"posbench fetch model={source.id}"


def gguf_sha256(source: Source) -> str:
    """The digest of the GGUF file of a source of kind ``gguf`` or ``wheel``.

    Raises:
        UserError: There is no such file.
    """
    if source.kind == "wheel":
        return wheels.wheel_of(source.id).file_sha256
    return file_sha256(gguf_file(source))


def gguf_file(source: Source) -> Path:
    """The file of a source of kind ``gguf``.

    Raises:
        UserError: There is none, or a folder holds several.
    """
    return gguf.find_file(Path(paths.model_path(source.id)), source.field)


def commit_of(source: Source) -> str:
    """The commit of a hub repository that :func:`local` uses."""
    revision = source.revision or ""
    if re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    return local(source).name


def cached_path(source: Source) -> Path | None:
    """Return the folder or file if it is complete on this machine, else None; without network access."""
    if source.kind == "path":
        path = Path(paths.model_path(source.id))
        return path if exists(path) else None
    if source.is_converted:
        return _converted(source)
    if source.kind == "url":
        file = _url_file(source.id)
        return file if file.is_file() else None
    selection = _repository_files(source)
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                source.id, local_files_only=True, **selection
            )
        )
    except hub_errors.LocalEntryNotFoundError:
        return None
    except ValueError as error:
        raise _refused(source, error) from error
    # A cache filled by other programs has no list of files: check the files that loading needs.
    if source.kind == "dataset":
        complete = all((folder / name).is_file() for name in source.files)
    else:
        missing = missing_file(folder)
        weights_only = missing.endswith(".safetensors")
        complete = not missing or (weights_only and WEIGHTS_PATTERN not in source.files)
    return folder if complete else None


def _converted(source: Source) -> Path | None:
    """The checkpoint that was made from a GGUF file; None if none was.

    Raises:
        UserError: It was made and is damaged.
    """
    folder = gguf.converted_folder(gguf_sha256(source))
    if not folder.exists():
        return None
    damage = gguf.damage(folder)
    if damage:
        allowed = f"the files that were written there ({damage})"
        command = _fetch_command(source)
        raise UserError(source.field, str(folder), allowed, command)
    return folder


def missing_file(folder: Path) -> str:
    """The first thing that a checkpoint folder lacks to be loaded; empty if nothing."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if not any(folder.glob("tokenizer*")):
        return "tokenizer files"
    try:
        names = weight_files(folder)
    except UserError as error:
        return error.allowed
    for name in names:
        if not (folder / name).is_file():
            return name
    return ""


def checkpoint_config(source: Source) -> dict[str, Any]:
    """The config.json of a checkpoint on this machine; empty where that cannot be read."""
    folder = Path(paths.model_path(source.id))
    if source.is_converted:
        folder = cached_path(source) or folder
    file = folder / "config.json"
    try:
        config = parse_json(read_text(file))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def weight_files(folder: Path) -> list[str]:
    """The files that hold the weights of a checkpoint folder, as its index names them, there or not.

    Raises:
        UserError: The index is malformed, or names files elsewhere or that are no safetensors.
    """
    single_file = "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if (folder / single_file).is_file() or not index.is_file():
        return [single_file]
    try:
        weight_map = parse_json(read_text(index))["weight_map"]
        names = sorted(set(weight_map.values()))
        pattern = r"[^/\\]+\.safetensors"
        outside = [name for name in names if not re.fullmatch(pattern, name)]
        if names and not outside:
            return names
        problem = outside[0] if outside else "no file"
        hint = f"get the checkpoint again: its index names {problem}"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        hint = f"get the checkpoint again ({type(error).__name__}: {error})"
    allowed = "an index whose weight_map names safetensors files of its own folder"
    raise UserError("model.path", str(index), allowed, hint)


def list_files(source: Source) -> tuple[str, list[File]]:
    """The commit (hub repositories only, else empty) and the files, asked from the hub or server.

    Raises:
        UserError: It does not exist, is not complete, or cannot be reached.
    """
    if source.kind == "path":
        return "", _on_disk(source)
    if source.kind == "gguf":
        file = gguf_file(source)
        return "", [File(file.name, file.stat().st_size, True)]
    if source.kind == "wheel":
        wheel = wheels.wheel_of(source.id)
        has_copy = gguf.converted_folder(wheel.file_sha256).exists()
        return "", [File(wheel.requirement, wheel.size, has_copy)]
    try:
        if source.kind == "url":
            return "", [_url_listing(source)]
        info = huggingface_hub.HfApi().repo_info(
            source.id,
            repo_type=source.kind,
            revision=source.revision,
            timeout=HUB_TIMEOUT_SECONDS,
            files_metadata=True,
        )
    except _failures() as error:
        raise _refused(source, error) from error
    sha = str(info.sha)
    files = []
    for entry in getattr(info, "siblings", None) or ():
        name = entry.rfilename
        if _matches(source, name):
            cached_file = huggingface_hub.try_to_load_from_cache(
                source.id, name, revision=sha, repo_type=source.kind
            )
            files.append(File(name, entry.size, isinstance(cached_file, str)))
    needed_patterns = source.files
    if source.kind == "model":
        needed_patterns = ("config.json",)
        if WEIGHTS_PATTERN in source.files:
            needed_patterns += (WEIGHTS_PATTERN,)
    for pattern in needed_patterns:
        if not any(fnmatch(file.name, pattern) for file in files):
            allowed = f"a repository with {pattern} (commit {sha[:12]} has none)"
            hint = "name a revision that has it (some keep safetensors under refs/pr/N), or another repository"
            raise UserError(source.field, source.id, allowed, hint)
    return sha, sorted(files, key=lambda file: file.name)


def _url_listing(source: Source) -> File:
    """The file of a URL, asked from its server unless it is cached."""
    file = _url_file(source.id)
    if file.is_file():
        return File(file.name, file.stat().st_size, True)
    request = Request(source.id, method="HEAD")
    with urlopen(request, timeout=SERVER_TIMEOUT_SECONDS) as answer:
        length = answer.headers.get("Content-Length")
    return File(file.name, int(length) if length else None, False)


def fetch(sources: Iterable[Source], *, dry_run: bool, console: Console) -> None:
    """Print every file of the sources; unless ``dry_run``, download those that are missing or newer on the hub.

    Raises:
        UserError: A file is missing on this machine, or a source cannot be reached and is not in the cache.
    """
    columns = ("what", "from", "file", "size", "state", "about")
    table = Table(*columns, box=None, pad_edge=False)
    commits: dict[Source, str] = {}
    outdated: list[Source] = []
    problems: list[UserError] = []
    all_files: list[File] = []
    for source in dict.fromkeys(sources):
        try:
            sha, files = list_files(source)
        except UserError as error:
            copy = None
            # Without a cause the source was reached, and lacks something.
            if not source.is_local and error.__cause__:
                copy = cached_path(source)
            if copy is None:
                problems.append(error)
                group = source.field.partition(".")[0]
                table.add_row(group, source.id, "", "", "missing", source.about)
                continue
            reason = type(error.__cause__).__name__
            line = (
                f"{source.id}: not reachable ({reason}), but a complete copy is cached"
            )
            console.print(line)
            sha = "" if source.kind == "url" else copy.name
            files = _on_disk(source, copy)
        if sha:
            commits[source] = sha
        for file in files:
            about = source.about if file == files[0] else ""
            table.add_row(*_table_cells(source, file), about)
        all_files += files
        if not _is_current(source, sha):
            outdated.append(source)
    if table.row_count:
        console.print(table)
    if all_files and not problems:
        total = decimal(sum(file.size or 0 for file in all_files))
        missing = decimal(sum(f.size or 0 for f in all_files if not f.here))
        console.print(f"{len(all_files)} files, {total}; to download: {missing}")
    if problems:
        raise problems[0]
    if not outdated:
        console.print(
            "nothing to download: everything this config needs is on this machine"
        )
    elif dry_run:
        console.print("nothing was downloaded")
    else:
        for source in outdated:
            _download(source, console)
        console.print("downloaded: runs of this config need no network now")
    for source, sha in commits.items():
        pin = f"{source.field.partition('.')[0]}.revision={sha}"
        line = f"{source.id} is at commit {sha}; to stay there: {pin}"
        console.print(line)


def _is_current(source: Source, commit: str) -> bool:
    """Whether a source is here, undamaged and of this commit, if it has one."""
    try:
        copy = cached_path(source)
    except UserError:
        if not source.is_converted:
            raise
        return False  # damaged: it is made again
    return copy is not None and commit in ("", copy.name)


def _table_cells(source: Source, file: File) -> tuple[str, str, str, str, str]:
    """Return the table cells that :func:`fetch` prints for a file."""
    group = source.field.partition(".")[0]
    of_tokenizer = any(fnmatch(file.name, pattern) for pattern in TOKENIZER)
    if source.files == CHECKPOINT_PATTERNS and of_tokenizer:
        group = "tokenizer"
    state = "missing"
    if file.here:
        state = "here" if source.is_local else "cached"
    size = "?" if file.size is None else decimal(file.size)
    return group, source.id, file.name, size, state


def _failures() -> tuple[type[Exception], ...]:
    """Return the exceptions of the hub's client and urllib: no network, no such repository, a torn answer, a bad id."""
    return OSError, hub_errors.HTTPError, HTTPException, ValueError


def _repository_files(source: Source) -> dict[str, Any]:
    """Arguments that select the files of a repository in the hub's client, where * also matches a slash."""
    return {
        "repo_type": source.kind,
        "revision": source.revision,
        "allow_patterns": list(source.files),
        "ignore_patterns": ["*/*"] if source.kind == "model" else None,
    }


def _matches(source: Source, name: str) -> bool:
    """Whether a file of a repository is one of the source's."""
    if source.kind == "dataset":
        return name in source.files
    return "/" not in name and any(fnmatch(name, pattern) for pattern in source.files)


def _on_disk(source: Source, folder: Path | None = None) -> list[File]:
    """The files of a path, or of a cached repository."""
    path = folder or Path(paths.model_path(source.id))
    is_checkpoint = source.files == CHECKPOINT_PATTERNS
    if exists(path) and path.is_dir() and source.files:
        if is_checkpoint and missing_file(path):
            raise _refused(source, FileNotFoundError(f"it lacks {missing_file(path)}"))
        matches = {file for pattern in source.files for file in path.glob(pattern)}
        return [
            File(file.relative_to(path).as_posix(), file.stat().st_size, True)
            for file in sorted(matches)
            if file.is_file()
        ]
    if exists(path) and path.is_file() and not is_checkpoint:
        return [File(path.name, path.stat().st_size, True)]
    missing = "directory" if is_checkpoint else "file or folder"
    raise _refused(source, FileNotFoundError(f"no such {missing}"))


def _download(source: Source, console: Console | None = None) -> Path:
    """Download or convert a source, and return its folder or file; long steps are announced on the console."""
    console = console or Console(
        stderr=True, soft_wrap=True, markup=False, highlight=False
    )
    if source.kind == "wheel":
        return wheels.fetch(wheels.wheel_of(source.id), source.field, console)
    if source.kind == "gguf":
        file = gguf_file(source)
        digest = file_sha256(file)
        return gguf.convert(file, digest, source.field, source.id, console.print)
    try:
        if source.kind == "url":
            with urlopen(source.id, timeout=SERVER_TIMEOUT_SECONDS) as answer:
                data = answer.read()
            file = _url_file(source.id)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(file, data)
            return file
        selection = _repository_files(source)
        return Path(huggingface_hub.snapshot_download(source.id, **selection))
    except _failures() as error:
        raise _refused(source, error) from error


def _url_file(url: str) -> Path:
    """Return the path of a URL in the cache; its hash separates URLs that end in the same name."""
    cache = cache_folder()
    if cache is None:
        allowed = "a folder for downloads: this user has no home folder"
        hint = "set POSBENCH_CACHE=DIR"
        raise MachineError("POSBENCH_CACHE", None, allowed, hint)
    name = url.rstrip("/").rpartition("/")[2] or "index"
    return cache / hashlib.sha256(url.encode()).hexdigest()[:12] / name


def _refused(source: Source, error: Exception) -> UserError:
    """The failure of a source as one line with the next step."""
    field = source.field
    value = source.id
    if source.files == CHECKPOINT_PATTERNS:
        allowed = CHECKPOINT_ALLOWED
        local_copy = f"set {field}=DIR to a local checkpoint"
    else:
        allowed = "a file on this machine"
        local_copy = f"set {field} to a copy on this machine"
        if source.kind == "dataset":
            allowed = "a reachable data set of the hub"
        elif source.kind == "url":
            allowed = "a reachable URL"
    page = f"https://huggingface.co/{source.id}"
    if source.kind == "dataset":
        page = f"https://huggingface.co/datasets/{source.id}"
    offline = (error, error.__cause__)
    is_address = source.id.startswith(("http://", "https://"))
    if is_address and source.files == CHECKPOINT_PATTERNS:
        hint = f"for a server set model.base_url={source.id}"
    elif isinstance(error, hub_errors.GatedRepoError):
        hint = f"accept its licence at {page}, then `hf auth login` (or set HF_TOKEN)"
    elif isinstance(error, hub_errors.RepositoryNotFoundError):
        login = "a private or gated repository needs `hf auth login` (or HF_TOKEN)"
        hint = f"check the spelling; {login}; or {local_copy}"
    elif isinstance(error, hub_errors.RevisionNotFoundError):
        field = field.replace(".path", ".revision")
        value = source.revision or "main"
        allowed = f"a branch, tag or commit of {source.id}"
        hint = f"see {page}/commits"
    elif any(isinstance(e, hub_errors.OfflineModeIsEnabled) for e in offline):
        hint = f"unset HF_HUB_OFFLINE for once (posbench fetch), or {local_copy}"
    else:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        hint = f"{local_copy} ({lines[0][:200]})"
    return UserError(field, value, allowed, hint)
