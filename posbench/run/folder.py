"""One run folder: bookkeeping, rows with checksums, a manifest of all files, and what of them is damaged."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from posbench.errors import UserError
from posbench.files.atomic import Row, digest, write_text
from posbench.run.lease import need_owned
from posbench.run.rows import checksum, lines, read_rows

log = logging.getLogger(__name__)
CONFIG = "config.yaml"
PROVENANCE = "provenance.json"
STATUS = "status.json"
MANIFEST = "manifest.json"
OTHER_HARDWARE = "other_hardware"
"""Field of the provenance: further machines that made rows; they agree with the first one up to rounding."""
JOBS = "jobs.json"
"""What a sweep ran: it is the folder's mark, as :data:`CONFIG` is that of a run."""
ROWS = ".jsonl"
READ = (ROWS, ".csv", ".json", ".yaml")
"""Kinds of files that numbers are read from: one more of them in a finished run is damage too."""
DRAWN = ("figures/", "report.html")
"""What ``posbench report`` makes again from the other files."""
YAML = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # many times faster where there is a C library


@dataclass
class RunDir:
    """A run folder; rows carry the ``id`` of its run (empty: no run's, such as a training's)."""

    path: Path
    id: str = ""

    def write_json(self, name: str, data: Any) -> None:
        """Write a JSON file atomically."""
        need_owned(self.path)
        write_text(
            self.path / name,
            json.dumps(data, indent=2, sort_keys=True, default=str) + "\n",
        )

    def read_json(self, name: str) -> Any:
        """A JSON file's content, an empty dict where there is none yet; `UserError` where it is damaged."""
        file = self.path / name
        try:
            return json.loads(file.read_bytes()) if file.is_file() else {}
        except ValueError as error:
            hint = f"remove {self.path} and repeat the command that made it"
            raise UserError(
                name, str(file), "JSON as posbench writes it", hint
            ) from error

    def config(self, *groups: str) -> dict[str, Any]:
        """The recorded config, empty where there is none; `UserError` where it is none, or lacks a group."""
        file = self.path / CONFIG
        found = None
        with suppress(yaml.YAMLError, UnicodeDecodeError):
            found = yaml.load(file.read_text(), YAML) if file.is_file() else {}
        if not isinstance(found, dict) or not all(
            isinstance(found.get(group), dict) for group in groups
        ):
            allowed = "a config as posbench records it"
            hint = "repeat the command that made this run"
            raise UserError(CONFIG, str(file), allowed, hint)
        return found

    @property
    def done(self) -> bool:
        """Whether the run finished."""
        return (self.path / "DONE").is_file()

    # Bookkeeping

    def write_facts(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write a bookkeeping file, which carries its run and a checksum as rows do."""
        whole = {**plain(facts), "run": self.id}
        self.write_json(name, {**whole, "sum": checksum(whole)})

    def facts(self, name: str) -> Row:
        """What a bookkeeping file says; empty where it is absent, damaged or another run's."""
        file = self.path / name
        try:
            found = json.loads(file.read_bytes()) if file.is_file() else {}
            whole = found.pop("sum") == checksum(found) and self.id in (
                "",
                found["run"],
            )
        except (ValueError, KeyError, AttributeError, TypeError):
            return {}
        return dict(found) if whole else {}

    def status(self) -> Row:
        """State, and what is recorded of stages."""
        return {"state": "running", "stages": {}} | self.facts(STATUS)

    def stage(self, name: str) -> Row:
        """What is recorded of a stage: its ``key``, ``done``, and checksums of the ``files`` it wrote."""
        return dict(self.status()["stages"].get(name, {}))

    def mark(self, name: str, **facts: Any) -> None:
        """Record facts of a stage."""
        status = self.status()
        status["stages"].setdefault(name, {}).update(facts)
        self.write_facts(STATUS, status)

    @contextmanager
    def recorded(self, stage: str) -> Iterator[None]:
        """Record what a stage wrote, and that it is done, when the block ends without an error."""
        before = self._stamps()
        yield
        wrote = [
            name for name, stamp in self._stamps().items() if stamp != before.get(name)
        ]
        # Rows and bookkeeping carry checksums of their own.
        wrote = [
            name
            for name in wrote
            if not name.endswith(ROWS) and name not in (STATUS, PROVENANCE)
        ]
        files = {name: self._sum(name) for name in wrote}
        self.mark(stage, done=True, files=self.stage(stage).get("files", {}) | files)

    def finish(
        self, state: str, error: str | None = None, seconds: float = 0.0
    ) -> None:
        """Record how the run ended, and add what it took to ``seconds``, the wall time of all sessions but
        killed ones; ``done`` also writes the manifest, and DONE last."""
        facts = self.status()
        spent = {"seconds": round(facts.get("seconds", 0) + seconds, 1)}
        self.write_facts(STATUS, facts | {"state": state, "error": error} | spent)
        if state == "done":
            self.seal(str(self.facts(PROVENANCE).get("command", "")))

    def spend(
        self, stage: str, took: Mapping[str, float], peaks: Mapping[str, int]
    ) -> None:
        """Add what a session took of a stage to ``spent``; of all sessions the highest peak stays."""
        status = self.status()
        known = status.setdefault("spent", {}).setdefault(stage, {})
        known |= {
            name: round(known.get(name, 0) + value, 2) for name, value in took.items()
        }
        known |= {name: max(known.get(name, 0), value) for name, value in peaks.items()}
        self.write_facts(STATUS, status)

    # Machines

    def hardware(self) -> list[str]:
        """The machines that made rows of this run, in the words of
        :func:`posbench.files.hardware.hardware`, the first one first."""
        facts = self.facts(PROVENANCE)
        first = [facts["hardware"]] if facts.get("hardware") else []
        return [*first, *facts.get(OTHER_HARDWARE, [])]

    def add_hardware(self, machines: Iterable[str]) -> None:
        """Record in the provenance that these machines made rows of this run, too."""
        facts = self.facts(PROVENANCE)
        known = self.hardware()
        every = list(dict.fromkeys([*known, *machines]))
        if facts and len(every) > len(known):
            self.write_facts(
                PROVENANCE, {**facts, "hardware": every[0], OTHER_HARDWARE: every[1:]}
            )

    # Damage

    def seal(self, command: str) -> None:
        """Write the manifest, a checksum of every file and the command that makes them, and last DONE, which
        holds the manifest's checksum."""
        self._seal(command, list(self._stamps()))

    def _seal(self, command: str, names: Sequence[str]) -> None:
        # Killed in between, a folder without DONE is unfinished; one whose manifest DONE denies is damaged.
        (self.path / "DONE").unlink(missing_ok=True)
        self.write_facts(
            MANIFEST,
            {"command": command, "files": {name: self._sum(name) for name in names}},
        )
        write_text(self.path / "DONE", f"{self._sum(MANIFEST)}\n")

    def renew(self, changed: Sequence[str]) -> None:
        """Renew the recorded checksums of files that a verb wrote (beginnings of names), and the manifest."""
        status = self.status()
        old = self.facts(MANIFEST)
        for facts in status["stages"].values():
            drawn = {
                n: self._sum(n)
                for n in facts.get("files", {})
                if n.startswith(tuple(changed))
            }
            if drawn:
                facts["files"] |= drawn
        recorded = self.facts(STATUS)
        if not (recorded or old):
            return  # of an earlier version: nothing is recorded
        (self.path / "DONE").unlink(missing_ok=True)
        if recorded:  # a sweep has a manifest alone
            self.write_facts(STATUS, status)
        if old:
            ours = [
                n
                for n in self._stamps()
                if n in old["files"] or n.startswith(tuple(changed))
            ]
            self._seal(str(old["command"]), ours)

    def damaged(self, only: Sequence[str] | None = None) -> list[str]:
        """Names of files that are not what the run left, of all or of ``only`` these: by the manifest of a
        finished run, or by what the stages of an unfinished one recorded. Of rows only a search's are among
        the latter: all carry checksums.
        """
        manifest = self.facts(MANIFEST)
        end = self.path / "DONE"
        sealed = end.is_file() and end.read_text(errors="replace").strip() == self._sum(
            MANIFEST
        )
        if manifest and (sealed or not end.is_file()):
            if only is not None:
                return self._unlike(
                    {name: manifest["files"].get(name, "") for name in only}
                )
            added = [
                n
                for n in self._stamps()
                if n not in manifest["files"] and n.endswith(READ)
            ]
            return [*self._unlike(manifest["files"]), *added]
        books = [name for name in (STATUS, PROVENANCE) if not self.facts(name)]
        # One that posbench of an earlier version made has neither with a checksum.
        lost = books if self.id or len(books) == 1 else []
        if end.is_file() and not sealed:
            # An empty DONE without a manifest is of an earlier version too.
            lost = ["DONE", MANIFEST, *lost] if manifest or end.stat().st_size else []
        elif (self.path / MANIFEST).is_file():
            lost = [MANIFEST, *lost]
        recorded = dict[str, str]()
        for facts in self.status()["stages"].values():
            recorded |= facts.get("files", {})
        asked = {
            name: known
            for name, known in recorded.items()
            if only is None or name in only
        }
        return [*lost, *self._unlike(asked)]

    def resume(
        self,
        stages: Sequence[str],
        config: Mapping[str, Any],
        provenance: Mapping[str, Any],
    ) -> None:
        """Make an unfinished, extended or damaged run ready for stages: what is damaged goes, rows but the
        whole ones later; all that can be is made again by the stages, config and provenance here."""
        damaged = self.damaged()
        known = self.facts(MANIFEST).get("files", {})
        status = self.status()
        before = status["stages"]
        search = self.stage("search")
        again = (
            [name for name in before if not name.endswith(ROWS)] if damaged else stages
        )
        kept = {name: facts for name, facts in before.items() if name not in again}
        # Rows that no other stage marked are the search's: it repeats from those that are whole.
        own_rows = [
            name for name in damaged if name.endswith(ROWS) and name not in before
        ]
        if search.get("files") and not own_rows and not self._unlike(search["files"]):
            kept["search"] = search
        text = yaml.safe_dump(plain(config), sort_keys=False)
        kept["config"] = {"files": {CONFIG: hashlib.sha256(text.encode()).hexdigest()}}
        told = {
            "state": "running",
            "error": None,
            "stages": kept,
            "seconds": status.get("seconds", 0),
        }
        told |= {"spent": status.get("spent", {})}
        self.write_facts(STATUS, told)
        for name in damaged:
            file = self.path / name
            if known and name not in (*known, "DONE", MANIFEST) and file.is_file():
                file.replace(file.with_name(f"{file.name}.aside"))  # not ours to delete
            elif file.suffix != ROWS and name != STATUS:
                file.unlink(missing_ok=True)
        for name in ("DONE", MANIFEST):
            (self.path / name).unlink(missing_ok=True)
        write_text(self.path / CONFIG, text)
        if not self.facts(PROVENANCE):
            note = "the first was damaged: these are the facts of a later start"
            self.write_facts(PROVENANCE, {**provenance, "rewritten": note})
        makes_numbers = any(
            not before.get(name, {}).get("done") for name in stages if name != "report"
        )
        if provenance.get("hardware") and (makes_numbers or damaged):
            self.add_hardware([provenance["hardware"]])

    def _unlike(self, files: Mapping[str, str]) -> list[str]:
        return [name for name, known in files.items() if self._sum(name) != known]

    def sums(self, names: Sequence[str]) -> dict[str, str]:
        """Checksums of those files that are there."""
        return {name: known for name in names if (known := self._sum(name))}

    def _sum(self, name: str) -> str:
        """The checksum of a file; empty where there is none."""
        file = self.path / name
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""

    def _stamps(self) -> dict[str, tuple[int, int, int]]:
        """Inode, time and size of every file but manifest, DONE, and those hidden or set aside."""
        found = {}
        for file in sorted(self.path.rglob("*")):
            name = file.relative_to(self.path).as_posix()
            hidden = any(part.startswith(".") for part in name.split("/")) or name in (
                "DONE",
                MANIFEST,
            )
            if not hidden and file.suffix != ".aside" and file.is_file():
                stat = file.stat()
                found[name] = stat.st_ino, stat.st_mtime_ns, stat.st_size
        return found

    # Rows

    def rows(self, name: str) -> list[Row]:
        """Whole, undamaged rows of this run in a JSON-lines file, oldest first."""
        return read_rows(self.path / name, self.id)[0]

    def torn(self, name: str) -> int:
        """How many lines of a JSON-lines file are torn, damaged or another run's."""
        return read_rows(self.path / name, self.id)[1]

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows, each with its run and a checksum, in one flushed write."""
        text = lines(rows, self.id)
        need_owned(self.path)
        with open(self.path / name, "ab+") as stream:
            if stream.tell():
                stream.seek(-1, os.SEEK_END)
                # A line that a killed process left torn must not swallow the next one.
                text = text if stream.read(1) == b"\n" else "\n" + text
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())

    def write_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a whole file of rows."""
        need_owned(self.path)
        write_text(self.path / name, lines(rows, self.id))

    def repair(self, name: str) -> None:
        """Drop torn, damaged or foreign lines and rows with an error, so that they are made again."""
        rows, damaged = read_rows(self.path / name, self.id)
        kept = [row for row in rows if "error" not in row]
        if damaged or len(kept) < len(rows):
            said = "%s: dropped %d damaged or foreign and %d errored rows"
            log.warning(said, self.path / name, damaged, len(rows) - len(kept))
            self.write_rows(name, kept)

    def sort(self, name: str, place: Callable[[Row], int]) -> None:
        """Put rows in order of their place: those that were made again stand where they would have stood."""
        rows = self.rows(name)
        ordered = sorted(rows, key=place)
        if ordered != rows:
            self.write_rows(name, ordered)

    def sibling_with(self, stage: str, key: str) -> RunDir | None:
        """Another run of this version that finished a stage under the same key, whose files are whole: they
        may be copied."""
        for folder in sorted(
            p for p in self.path.parent.iterdir() if p != self.path and p.is_dir()
        ):
            try:
                other = opened(folder)
                known = other.stage(stage)
                if (
                    known.get("key") == key
                    and known.get("done")
                    and not other.damaged()
                ):
                    return other
            except OSError as error:
                log.warning("%s: passed over (%s)", folder, error)
        return None


def run_id(version_key: Mapping[str, Any], name: str) -> str:
    """What rows and bookkeeping files of a run carry: it does not change with the place of the folder."""
    return digest([plain(version_key), name], 12)


def ids(folder: Path) -> list[str]:
    """The runs that a folder's bookkeeping files name: one and the same, if none is damaged."""
    found = (
        RunDir(folder).facts(name).get("run") for name in (STATUS, PROVENANCE, MANIFEST)
    )
    return [str(name) for name in found if name]


def opened(folder: Path) -> RunDir:
    """A folder with the id that most of its bookkeeping files name."""
    return RunDir(folder, max(known := [*ids(folder), ""], key=known.count))


def is_run(folder: Path) -> bool:
    """Whether a folder is a run or a sweep."""
    return any(
        (folder / name).is_file()
        for name in (CONFIG, STATUS, PROVENANCE, MANIFEST, JOBS)
    )


def runs_in(folder: Path) -> list[Path]:
    """Run and sweep folders in an outputs folder, an experiment's or task's, or one version's."""
    folder = folder.resolve()
    versions = [v for depth in ("v[0-9]*", "*/v[0-9]*") for v in folder.glob(depth)] + [
        folder
    ]
    inside = (
        run
        for v in versions
        if re.fullmatch("v[0-9]+", v.name) and v.is_dir()
        for run in v.iterdir()
    )
    named = (run for run in inside if not run.name.startswith("."))
    return sorted(
        run for run in named if any((run / mark).is_file() for mark in (CONFIG, JOBS))
    )


def open_run(folder: Path) -> RunDir:
    """Open a run folder for reading.

    Raises:
        UserError: It is no run folder; the hint names the runs in it.
    """
    if is_run(folder):
        return opened(folder)
    inside = runs_in(folder) if folder.is_dir() else []
    hint = "posbench ls runs lists them"
    hint = hint if folder.is_dir() else f"no such folder; check the path: {hint}"
    if inside:
        more = f" and {len(inside) - 8} more" if len(inside) > 8 else ""
        hint = f"take a run in it: {', '.join(map(str, inside[:8]))}{more}"
    raise UserError("DIR", str(folder), f"a run folder (it holds {CONFIG})", hint)


def checked(
    folder: Path, made_again: Sequence[str] = (), only: Sequence[str] | None = None
) -> RunDir:
    """A run, or a sweep, whose files are as it left them, but for those (beginnings of names) that the caller
    makes again; with ``only``, these files. Of an unfinished run only what its finished stages wrote can be
    checked, which is said.

    Raises:
        UserError: It is no run folder, or files are damaged; the hint is the command that makes them again.
    """
    run = open_run(folder)
    damaged = [
        name for name in run.damaged(only) if not name.startswith(tuple(made_again))
    ]
    if damaged:
        command = run.facts(MANIFEST).get("command") or run.facts(PROVENANCE).get(
            "command"
        )
        named = ", ".join(damaged[:4]) + (
            f" and {len(damaged) - 4} more" if len(damaged) > 4 else ""
        )
        hint = f"make it again: {command or 'repeat the command that made it'}"
        raise UserError(
            "DIR", str(folder), f"files as the run left them; damaged: {named}", hint
        )
    if not (run.done and (folder / MANIFEST).is_file()):
        log.warning(
            "%s: without a manifest (unfinished, or of an older version): not all is checked",
            folder,
        )
    return run


def plain(data: Any) -> Any:
    """Data as JSON gives it back."""
    return json.loads(json.dumps(data, default=str))
