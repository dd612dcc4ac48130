"""One run folder: bookkeeping, rows with checksums, a manifest of all files, and the check for damaged files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from posbench.errors import UserError
from posbench.files.atomic import Row, naming, short_hash, write_text
from posbench.files.parse import parse_yaml, read_json, read_text
from posbench.run.jsonl import checksum, read_rows, to_lines
from posbench.run.lease import need_owned

log = logging.getLogger(__name__)

RowKey = tuple[Any, ...]
"""Values of the fields that identify a row."""
Proofs = Mapping[RowKey, Mapping[str, Any]]
"""By the key of each row, the fields that prove that it belongs to this run."""
State = Literal["running", "done", "failed", "incomplete", "mixed"]
"""State of a run in ``status.json``."""
MIXED: Final = "mixed"
"""State of a run during which a file changed: rows may stem from either content, so none is used."""
CONFIG = "config.yaml"
PROVENANCE = "provenance.json"
STATUS = "status.json"
MANIFEST = "manifest.json"
METHOD_FILE = "method.json"
"""The method under test with its parameters, in a run folder."""
FOUND_FILE = "found.yaml"
"""The parameters that a search found, by method."""
SIZES = "sizes"
"""Field of the manifest: bytes by file name; manifests of earlier versions lack it."""
DONE = "DONE"
OTHER_HARDWARE = "other_hardware"
"""Field of the provenance: further machines that made rows; rows agree with the first machine's up to rounding."""
CONFIG_DIR = "config_dir"
"""Field of the provenance: the absolute path of the --config-dir that a run was made with."""
AUDIT = "audit"
"""Field of the provenance: result of recomputing rows without optimisations."""
PREDICTIONS = "predictions.jsonl"
"""Every reply of the evaluation, with its prompt's id, its method and its score."""
EVALUATE_STAGE = "evaluate"
"""The stage that scores replies, in ``status.json``."""
STUDY_STAGE = "study"
"""The stage that runs a study, there."""
RESCORED = "rescored"
"""Field of the record of the predictions: whether ``posbench rescore`` changed scores."""
JOBS = "jobs.json"
"""List of the jobs of a sweep: it marks a sweep's folder, as :data:`CONFIG` marks a run's."""
RESCORING = ".rescoring"
"""Marks a run that ``posbench rescore`` began to write to. Hidden, so no part of its results."""
SUBMITTED = ".submitted.json"
"""A list of the times that the run was submitted. Hidden, so no part of its results."""
ROWS = ".jsonl"
NUMBER_FILES = (ROWS, ".csv", ".json", ".yaml")
"""Suffixes of files that numbers are read from: even an added one damages a finished run."""
REDRAWN_FILES = ("figures/", "report.html")
"""Files that ``posbench report`` makes again from the others."""
DIGITS_OF = {"usd": 6}
"""Decimals of the amounts spent by a stage, where they are more than two."""
RUN_MARKS = (CONFIG, STATUS, PROVENANCE)
"""Files of which a run has each, and a sweep has none."""
MAX_LISTED_RUNS = 8
MAX_LISTED_FILES = 4


@dataclass
class RunDir:
    """A run folder.

    Attributes:
        path: The folder.
        id: Id of the run, which its rows and bookkeeping carry; empty: they belong to no run (a training's).
    """

    path: Path
    id: str = ""

    def write_json(self, name: str, data: Any) -> None:
        """Write a JSON file atomically."""
        need_owned(self.path)
        write_text(self.path / name, json_text(data))

    def read_json(self, name: str) -> Row:
        """Read a JSON file that holds an object; empty where there is no file.

        Raises:
            UserError: The file is damaged, or holds no object.
        """
        file = self.path / name
        if not file.is_file():
            return {}
        hint = f"remove {self.path} and repeat the command that made it"
        facts: Row = read_json(file, hint=hint, finite=False)
        return facts

    def config(self, *groups: str) -> dict[str, Any]:
        """Read the recorded config; empty where there is none.

        Args:
            groups: Config groups that it must have.

        Raises:
            UserError: The file holds no config, or it lacks one of ``groups``.
        """
        file = self.path / CONFIG
        config: Any = None
        with suppress(ValueError):
            config = parse_yaml(read_text(file)) if file.is_file() else {}
        if not isinstance(config, dict) or not all(
            isinstance(config.get(group), dict) for group in groups
        ):
            allowed = "a config as posbench records it"
            hint = "repeat the command that made this run"
            if not file.exists() and (self.path / JOBS).is_file():
                allowed = "one run: this is a sweep of several"
                hint = "posbench ls runs names them"
            raise UserError(CONFIG, str(file), allowed, hint)
        return config

    @property
    def done(self) -> bool:
        """Whether the run finished."""
        return (self.path / DONE).is_file()

    # Bookkeeping

    def write_facts(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write a bookkeeping file, which carries its run and a checksum as rows do."""
        stamped = {**as_json(facts), "run": self.id}
        self.write_json(name, {**stamped, "sum": checksum(stamped)})

    def facts(self, name: str) -> Row:
        """Read ``status.json`` or ``provenance.json``, without its checksum.

        It is empty where the file is absent, damaged or another run's.
        """
        file = self.path / name
        if not file.is_file():
            return {}
        try:
            facts = json.loads(file.read_bytes())
            if facts.pop("sum") != checksum(facts):
                return {}
            if self.id and facts["run"] != self.id:
                return {}
            return dict(facts)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            return {}

    @property
    def command(self) -> str:
        """The command that made the run or sweep; empty where it is not recorded."""
        facts = self.facts(MANIFEST) or self.facts(PROVENANCE)
        return str(facts.get("command", ""))

    def status(self) -> Row:
        """Return the run's state and the records of its stages."""
        return {"state": "running", "stages": {}} | self.facts(STATUS)

    def stage(self, name: str) -> Row:
        """Return a stage's record: its ``key``, ``done``, and checksums of the ``files`` it wrote."""
        return dict(self.status()["stages"].get(name, {}))

    def mark(self, name: str, **facts: Any) -> None:
        """Add facts to a stage's record."""
        status = self.status()
        status["stages"].setdefault(name, {}).update(facts)
        self.write_facts(STATUS, status)

    @contextmanager
    def recorded(self, stage: str) -> Iterator[None]:
        """Record that a stage is done and the checksums of the files that the block wrote, unless the block raises."""
        stamps_before = self._file_stamps()
        yield
        # Rows and bookkeeping carry checksums of their own.
        written = [
            name
            for name, stamp in self._file_stamps().items()
            if stamp != stamps_before.get(name)
            and not name.endswith(ROWS)
            and name not in (STATUS, PROVENANCE)
        ]
        checksums = {name: self._file_checksum(name) for name in written}
        earlier = self.stage(stage).get("files", {})
        self.mark(stage, done=True, files=earlier | checksums)

    def finish(
        self, state: State, error: str | None = None, seconds: float = 0.0
    ) -> None:
        """Record how the run ended.

        Args:
            state: ``done`` also writes the manifest, and DONE last.
            error: The error that stopped the run.
            seconds: Wall time of this session, added to the time of earlier sessions (killed ones not counted).
        """
        self.add_seconds(seconds)
        self.write_facts(STATUS, self.status() | {"state": state, "error": error})
        if state == "done":
            self.seal(self.command)

    def add_seconds(self, seconds: float) -> None:
        """Add wall time to the time of earlier sessions."""
        status = self.status()
        total = round(status.get("seconds", 0) + seconds, 1)
        self.write_facts(STATUS, status | {"seconds": total})

    def spend(
        self, stage: str, amounts: Mapping[str, float], peaks: Mapping[str, int]
    ) -> None:
        """Add the costs of a stage in this session to the record ``spent``.

        Args:
            stage: The stage.
            amounts: Seconds and tokens, which add up over sessions.
            peaks: Bytes of memory, of which the highest stays.
        """
        status = self.status()
        spent = status.setdefault("spent", {}).setdefault(stage, {})
        for name, value in amounts.items():
            spent[name] = round(spent.get(name, 0) + value, DIGITS_OF.get(name, 2))
        for name, value in peaks.items():
            spent[name] = max(spent.get(name, 0), value)
        self.write_facts(STATUS, status)

    # Machines

    def hardware(self) -> list[str]:
        """Return the machines that made rows of this run, the first one first.

        They are described as :func:`posbench.files.hardware.describe_hardware` does.
        """
        facts = self.facts(PROVENANCE)
        first = [facts["hardware"]] if facts.get("hardware") else []
        return [*first, *facts.get(OTHER_HARDWARE, [])]

    def add_hardware(self, machines: Iterable[str]) -> None:
        """Record in the provenance that these machines made rows of this run, too.

        Args:
            machines: Their descriptions, by :func:`posbench.files.hardware.describe_hardware`.
        """
        facts = self.facts(PROVENANCE)
        recorded = self.hardware()
        merged = list(dict.fromkeys([*recorded, *machines]))
        if facts and len(merged) > len(recorded):
            facts["hardware"] = merged[0]
            facts[OTHER_HARDWARE] = merged[1:]
            self.write_facts(PROVENANCE, facts)

    # Damage

    def seal(self, command: str) -> None:
        """Write the manifest, and last DONE, which holds the manifest's checksum.

        The manifest holds checksum and size of every file, and the command that makes them.
        """
        sizes = self._file_sizes()
        checksums = {name: self._file_checksum(name) for name in sizes}
        self._seal(command, checksums, sizes)

    def begin_rescore(self) -> None:
        """Take away DONE, with a mark of why; once the run is sealed again, the mark goes."""
        # Without a manifest, of an earlier version, no change of a file is noticed.
        if self.done and self.facts(MANIFEST):
            write_text(self.path / RESCORING, "posbench rescore writes to this run\n")
            (self.path / DONE).unlink()

    @property
    def is_rescore_unfinished(self) -> bool:
        """Whether ``posbench rescore`` began to write to the run and has not ended."""
        return (self.path / RESCORING).is_file() and not self.done

    @property
    def rescore_command(self) -> str:
        """The command that scores the run again."""
        return f"posbench rescore {shlex.quote(str(self.path))}"

    def _seal(
        self, command: str, checksums: Mapping[str, str], sizes: Mapping[str, int]
    ) -> None:
        # Killed in between, a folder without DONE is unfinished; one whose manifest DONE denies is damaged.
        (self.path / DONE).unlink(missing_ok=True)
        facts = {"command": command, "files": checksums, SIZES: sizes}
        self.write_facts(MANIFEST, facts)
        write_text(self.path / DONE, f"{self._file_checksum(MANIFEST)}\n")
        (self.path / RESCORING).unlink(missing_ok=True)

    def renew(self, changed: Sequence[str]) -> None:
        """Renew the recorded checksums of files that a verb wrote, and the manifest; those of all other files stay.

        Args:
            changed: Beginnings of the names of these files.
        """
        prefixes = tuple(changed)
        status = self.status()
        manifest = self.facts(MANIFEST)
        for facts in status["stages"].values():
            for name in facts.get("files", {}):
                if name.startswith(prefixes):
                    facts["files"][name] = self._file_checksum(name)
        has_status = bool(self.facts(STATUS))
        if not has_status and not manifest:
            return  # of an earlier version: nothing is recorded
        # Only the end of a rescore seals the run that it began to write to.
        stays_open = self.is_rescore_unfinished and PREDICTIONS not in changed
        # Without DONE a process killed here leaves an unfinished run, not a wrong one.
        (self.path / DONE).unlink(missing_ok=True)
        if has_status:  # a sweep has a manifest alone
            self.write_facts(STATUS, status)
        if manifest and not stays_open:
            rewritten = (*prefixes, STATUS)
            checksums = {
                name: checksum
                for name, checksum in manifest["files"].items()
                if not name.startswith(rewritten)
            }
            sizes = self._file_sizes()
            for name in sizes:
                if name.startswith(rewritten):
                    checksums[name] = self._file_checksum(name)
            for name, size in manifest.get(SIZES, {}).items():
                if not name.startswith(rewritten):
                    sizes[name] = size
            self._seal(str(manifest["command"]), checksums, sizes)

    def damaged(self, only: Sequence[str] | None = None) -> list[str]:
        """Return the names of files that changed since the run wrote them.

        A finished run is compared with its manifest, an unfinished one with the checksums in the records of its stages.
        Files of rows are not among the latter, except a search's, as every row carries a checksum.

        Args:
            only: Names of the files to look at; None: all.
        """
        manifest = self.facts(MANIFEST)
        end = self.path / DONE
        sealed = False
        if end.is_file():
            recorded = end.read_text(errors="replace").strip()
            # DONE holds the checksum of the manifest.
            sealed = recorded == self._file_checksum(MANIFEST)
        if manifest and (sealed or not end.is_file()):
            return self._differ_from_manifest(manifest["files"], only)

        # One bookkeeping file at most is absent or damaged by an earlier version of posbench, which wrote
        # neither with a checksum.
        unreadable = [name for name in (STATUS, PROVENANCE) if not self.facts(name)]
        # A run with an id has both files.
        lost = unreadable if self.id or len(unreadable) == 1 else []
        if end.is_file() and not sealed:
            # An empty DONE without a manifest is of an earlier version too.
            of_earlier_version = not manifest and not end.stat().st_size
            lost = [] if of_earlier_version else [DONE, MANIFEST, *lost]
        elif (self.path / MANIFEST).is_file():
            lost = [MANIFEST, *lost]
        checksums = dict[str, str]()
        for facts in self.status()["stages"].values():
            checksums |= facts.get("files", {})
        if only is not None:
            checksums = {
                name: checksum for name, checksum in checksums.items() if name in only
            }
        return [*lost, *self._differing(checksums)]

    def _differ_from_manifest(
        self, checksums: Mapping[str, str], only: Sequence[str] | None
    ) -> list[str]:
        """Return the names of files that differ from the manifest's checksums, or were added.

        Args:
            checksums: Checksum by file name, from the manifest.
            only: The only files to check; None checks all, and looks for added ones.
        """
        if only is not None:
            return self._differing({name: checksums.get(name, "") for name in only})
        added = self._added(checksums, self._file_stamps())
        return [*self._differing(checksums), *added]

    def resized(self) -> list[str]:
        """Return the names of files that are missing, added or of another size than in the manifest.

        It reads no file but the manifest, so it is quick enough for each of a long list of runs.
        """
        manifest = self.facts(MANIFEST)
        recorded = manifest.get(SIZES, {})  # empty in an earlier version's
        checksums = manifest.get("files", {})
        sizes = self._file_sizes()
        changed = [
            name
            for name in checksums
            if name not in sizes or sizes[name] != recorded.get(name, sizes[name])
        ]
        return [*changed, *self._added(checksums, sizes)]

    @staticmethod
    def _added(checksums: Mapping[str, str], names: Iterable[str]) -> list[str]:
        """Return which names of files that numbers are read from are not in the manifest."""
        return [
            name
            for name in names
            if name not in checksums and name.endswith(NUMBER_FILES)
        ]

    def resume(
        self,
        stages: Sequence[str],
        config: Mapping[str, Any],
        provenance: Mapping[str, Any],
    ) -> None:
        """Make an unfinished, extended or damaged run ready for its stages.

        Damaged files are removed (of rows the damaged ones, later); the stages then make them again, and
        config and provenance are written here.

        Args:
            stages: Stages that will run.
            config: The config to record.
            provenance: The provenance to record where there is none.
        """
        damaged = self.damaged()
        manifest_files = self.facts(MANIFEST).get("files", {})
        status = self.status()
        recorded_stages = status["stages"]

        text = yaml.safe_dump(as_json(config), sort_keys=False)
        stage_records = self._records_to_keep(stages, recorded_stages, damaged)
        config_checksum = hashlib.sha256(text.encode()).hexdigest()
        stage_records["config"] = {"files": {CONFIG: config_checksum}}
        (self.path / RESCORING).unlink(missing_ok=True)  # the stages score again
        # Written before files are removed, so that a killed process leaves a consistent record.
        new_status = {
            "state": "running",
            "error": None,
            "stages": stage_records,
            "seconds": status.get("seconds", 0),
            "spent": status.get("spent", {}),
        }
        self.write_facts(STATUS, new_status)

        for name in damaged:
            file = self.path / name
            ours = name in manifest_files or name in (DONE, MANIFEST)
            if manifest_files and not ours and file.is_file():
                file.replace(file.with_name(f"{file.name}.aside"))  # not ours to delete
            elif file.suffix != ROWS and name != STATUS:
                file.unlink(missing_ok=True)
        (self.path / DONE).unlink(missing_ok=True)
        (self.path / MANIFEST).unlink(missing_ok=True)
        write_text(self.path / CONFIG, text)
        if not self.facts(PROVENANCE):
            note = "the first was damaged: these are the facts of a later start"
            self.write_facts(PROVENANCE, {**provenance, "rewritten": note})
        makes_numbers = any(
            not recorded_stages.get(stage, {}).get("done")
            for stage in stages
            if stage != "report"
        )
        if provenance.get("hardware") and (makes_numbers or damaged):
            self.add_hardware([provenance["hardware"]])

    def _records_to_keep(
        self,
        stages: Sequence[str],
        recorded_stages: Mapping[str, Row],
        damaged: Sequence[str],
    ) -> dict[str, Row]:
        """Return the records of stages that stay valid when some stages run again and some files are damaged.

        Args:
            stages: Stages that run again.
            recorded_stages: Records by stage, or by name of a file of rows.
            damaged: Names of damaged files.
        """
        repeated = list(stages)
        # Which stage a damaged file belongs to is not known: all of them run again, from their rows.
        if damaged:
            repeated = [name for name in recorded_stages if not name.endswith(ROWS)]
        unchanged = {
            name: facts
            for name, facts in recorded_stages.items()
            if name not in repeated
        }
        # Rows that no other stage marked are the search's: it repeats from those that are valid.
        search_rows_damaged = any(
            name.endswith(ROWS) and name not in recorded_stages for name in damaged
        )
        search = dict(recorded_stages.get("search", {}))
        files = search.get("files")
        if files and not search_rows_damaged and not self._differing(files):
            unchanged["search"] = search
        return unchanged

    def _differing(self, checksums: Mapping[str, str]) -> list[str]:
        """Names of files whose checksum is another one now."""
        return [
            name
            for name, recorded in checksums.items()
            if self._file_checksum(name) != recorded
        ]

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return the checksums of those files that exist."""
        checksums = {name: self._file_checksum(name) for name in names}
        return {name: checksum for name, checksum in checksums.items() if checksum}

    def _file_checksum(self, name: str) -> str:
        """SHA-256 of a file; empty where there is none."""
        file = self.path / name
        if not file.is_file():
            return ""
        return hashlib.sha256(file.read_bytes()).hexdigest()

    def _file_stamps(self) -> dict[str, tuple[int, int, int]]:
        """Return inode, time and size by name of every file but manifest, DONE, and those hidden or set aside."""
        stamps = {}
        # Lists of runs look into every folder: pathlib would take ten times as long.
        for folder, subfolders, names in os.walk(self.path):
            subfolders[:] = sorted(name for name in subfolders if name[0] != ".")
            prefix = folder[len(str(self.path)) + 1 :]
            for name in sorted(names):
                if name.startswith(".") or name.endswith(".aside"):
                    continue
                with suppress(FileNotFoundError):  # another process removed it
                    stat = os.stat(f"{folder}/{name}")
                    stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
                    stamps[f"{prefix}/{name}" if prefix else name] = stamp
        for name in (DONE, MANIFEST):
            stamps.pop(name, None)
        return stamps

    def _file_sizes(self) -> dict[str, int]:
        """Return the size by name of the same files."""
        return {name: size for name, (_, _, size) in self._file_stamps().items()}

    # Rows

    def rows(self, name: str) -> list[Row]:
        """Return the valid rows of this run in a JSON-lines file, oldest first."""
        return read_rows(self.path / name, self.id)[0]

    def rows_without_error(self, name: str) -> list[Row]:
        """Return the rows of a file (:meth:`rows`) that did not fail."""
        return [row for row in self.rows(name) if "error" not in row]

    def num_torn_rows(self, name: str) -> int:
        """Return how many lines of a JSON-lines file are torn, damaged or another run's."""
        return read_rows(self.path / name, self.id)[1]

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to a JSON-lines file, each with its run and a checksum, in one flushed write.

        Args:
            name: Name of the file.
            rows: Fields of each row.
        """
        text = to_lines(rows, self.id)
        need_owned(self.path)
        file = self.path / name
        with naming(file), open(file, "ab+") as stream:
            if stream.tell():
                stream.seek(-1, os.SEEK_END)
                # A line that a killed process left torn must not swallow the next one.
                if stream.read(1) != b"\n":
                    text = "\n" + text
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())

    def write_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a file of rows, in the place of an earlier one."""
        need_owned(self.path)
        write_text(self.path / name, to_lines(rows, self.id))

    def repair(self, name: str) -> None:
        """Drop from a file torn, damaged or foreign lines and rows with an error, so that they are made again."""
        rows, invalid = read_rows(self.path / name, self.id)
        valid = [row for row in rows if "error" not in row]
        errored = len(rows) - len(valid)
        if invalid or errored:
            message = "%s: dropped %d damaged or foreign and %d errored rows"
            log.warning(message, self.path / name, invalid, errored)
            self.write_rows(name, valid)

    def proven_rows(
        self, name: str, fields: Sequence[str], proofs: Proofs
    ) -> list[Row]:
        """Return the rows of a file that are proven to be this run's, and drop the others from it.

        Args:
            name: Name of the JSON-lines file.
            fields: Names of the fields that identify a row.
            proofs: By the values of these fields, the proof that this run's row carries.
        """
        kept = []
        unproven = []
        for row in self.rows(name):
            proof = proofs.get(tuple(row.get(field) for field in fields), {})
            if is_proven(row, proof):
                kept.append(row)
            else:
                unproven.append((row, proof))
        if unproven:
            warn_of_unproven(self.path / name, unproven)
            self.write_rows(name, kept)
        return kept

    def sort(self, name: str, rank: Callable[[Row], int]) -> None:
        """Sort the rows of a file by ``rank``: rows that were made again go where they would have been."""
        rows = self.rows(name)
        ordered = sorted(rows, key=rank)
        if ordered != rows:
            self.write_rows(name, ordered)

    def sibling_with(self, stage: str, key: str) -> RunDir | None:
        """Return another, undamaged run of this version from which a stage's rows may be copied; None without one.

        Args:
            stage: The stage, or a file of rows.
            key: What the rows depend on; the other run must have finished the stage under the same key.
        """
        siblings = (
            folder
            for folder in self.path.parent.iterdir()
            if folder != self.path and folder.is_dir()
        )
        for folder in sorted(siblings):
            try:
                sibling = open_run_dir(folder)
                facts = sibling.stage(stage)
                finished = facts.get("key") == key and facts.get("done")
                if finished and not sibling.damaged():
                    return sibling
            except OSError as error:
                log.warning("%s: passed over (%s)", folder, error)
        return None


def was_rescored(run: RunDir) -> bool:
    """Return whether ``posbench rescore`` changed scores of a run, and they were not made again since."""
    return bool(run.stage(PREDICTIONS).get(RESCORED))


def is_proven(row: Row, proof: Mapping[str, Any]) -> bool:
    """Return whether a row carries its proof."""
    return all(row.get(name) == value for name, value in proof.items())


def warn_of_unproven(
    file: Path, unproven: Sequence[tuple[Row, Mapping[str, Any]]]
) -> None:
    """Log that rows of a file are ignored, and how the first one differs from what this run would make.

    Args:
        file: The file.
        unproven: Each of these rows, and the proof (digests by field) that it should carry.
    """
    row, proof = unproven[0]
    field = next(name for name, value in proof.items() if row.get(name) != value)
    message = "%s: %s = %r: allowed: %r, what this run asks and computes; next: %d such rows are made again"
    log.warning(message, file, field, row.get(field), proof[field], len(unproven))


def run_id(version_key: Mapping[str, Any], name: str) -> str:
    """Return the id that a run's rows and bookkeeping carry; it does not depend on where the folder is."""
    return short_hash([as_json(version_key), name], 12)


def recorded_run_ids(folder: Path) -> list[str]:
    """Return the run ids in a folder's bookkeeping files: all equal if none is damaged."""
    files = (STATUS, PROVENANCE, MANIFEST)
    run_ids = (RunDir(folder).facts(name).get("run") for name in files)
    return [str(run_id) for run_id in run_ids if run_id]


def open_run_dir(folder: Path) -> RunDir:
    """Return a folder with the id that most of its bookkeeping files carry."""
    candidates = [*recorded_run_ids(folder), ""]
    return RunDir(folder, max(candidates, key=candidates.count))


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run or a sweep."""
    marks = (*RUN_MARKS, MANIFEST, JOBS)
    return any((folder / name).is_file() for name in marks)


def need_outside_runs(field: str, place: Path) -> None:
    """Refuse a place of new files in a run, which would count as damaged.

    Args:
        field: Key or flag that named the place.
        place: The place, which may not exist yet.

    Raises:
        UserError: It is a run's folder, or lies in one.
    """
    resolved = place.resolve()
    for folder in (resolved, *resolved.parents):
        if all((folder / name).is_file() for name in RUN_MARKS):
            allowed = f"a place outside a run: {folder} is sealed with its files"
            raise UserError(field, str(place), allowed, "name another folder")


def runs_in(folder: Path) -> list[Path]:
    """Return the run and sweep folders below a folder of outputs, of an experiment or task, or of one version."""
    folder = folder.resolve()
    versions = [*folder.glob("v[0-9]*"), *folder.glob("*/v[0-9]*"), folder]
    runs = []
    for version in versions:
        if not re.fullmatch("v[0-9]+", version.name) or not version.is_dir():
            continue
        for run in version.iterdir():
            if is_run(run) and not run.name.startswith("."):
                runs.append(run)
    return sorted(runs)


def find_run(name: str, outputs: Path) -> Path:
    """Return the folder of a run from its path or the beginning of its hash (4 digits or more).

    A name that fits no run is returned as a path, which may be absent.

    Raises:
        UserError: Several runs have that hash.
    """
    path = Path(name).expanduser()
    if path.exists() or not outputs.is_dir() or not re.fullmatch("[0-9a-f]{4,}", name):
        return path
    matches = [
        run for run in runs_in(outputs) if run.name.rpartition("__")[2].startswith(name)
    ]
    if len(matches) > 1:
        hint = f"name its folder: {', '.join(map(str, matches))}"
        raise UserError("RUN", name, "a name that fits one run only", hint)
    return matches[0] if matches else path


def open_run(folder: Path) -> RunDir:
    """Open a run folder for reading.

    Raises:
        UserError: It is no run folder; the hint names the runs in it.
    """
    if is_run(folder):
        return open_run_dir(folder)
    hint = "posbench ls runs lists them"
    if not folder.is_dir():
        hint = f"no such folder; check the path: {hint}"
    elif runs := runs_in(folder):
        listed = ", ".join(map(str, runs[:MAX_LISTED_RUNS]))
        hint = f"name one of its runs: {listed}"
        if len(runs) > MAX_LISTED_RUNS:
            hint += f" and {len(runs) - MAX_LISTED_RUNS} more"
    raise UserError("DIR", str(folder), f"a run folder (it holds {CONFIG})", hint)


def json_text(data: Any) -> str:
    """Return the text that :meth:`RunDir.write_json` writes for data."""
    return json.dumps(data, indent=2, sort_keys=True, default=str) + "\n"


def open_undamaged(
    folder: Path, made_again: Sequence[str] = (), only: Sequence[str] | None = None
) -> RunDir:
    """Open a run or a sweep whose files are as it left them.

    Of an unfinished run only the files of finished stages can be checked, which is logged.

    Args:
        folder: The folder.
        made_again: Beginnings of the names of files that may differ: the caller makes them again.
        only: Names of the files to check; None: all.

    Raises:
        UserError: It is no run folder, files are damaged, or a rescore of it has not ended; the hint is the command
            to run next.
    """
    run = open_run(folder)
    prefixes = tuple(made_again)
    if run.is_rescore_unfinished and PREDICTIONS not in prefixes:
        allowed = "a scored run: posbench rescore was stopped before its end"
        hint = f"go on with it: {run.rescore_command}"
        raise UserError("DIR", str(folder), allowed, hint)
    damaged = [name for name in run.damaged(only) if not name.startswith(prefixes)]
    if damaged:
        listed = ", ".join(damaged[:MAX_LISTED_FILES])
        if len(damaged) > MAX_LISTED_FILES:
            listed += f" and {len(damaged) - MAX_LISTED_FILES} more"
        allowed = f"files as the run left them; damaged: {listed}"
        hint = f"make the run again: {run.command or 'repeat the command that made it'}"
        raise UserError("DIR", str(folder), allowed, hint)
    if not (run.done and (folder / MANIFEST).is_file()):
        message = "%s: without a manifest (unfinished, or of an older version): not all is checked"
        log.warning(message, folder)
    return run


def as_json(data: Any) -> Any:
    """Return data as JSON gives it back."""
    return json.loads(json.dumps(data, default=str))
