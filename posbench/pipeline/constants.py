"""Constants of methods that runs found or applied, for ``method=from:RUN``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posbench.errors import UserError
from posbench.files.atomic import short_hash
from posbench.files.digests import Content, content_keys, read_contents
from posbench.files.parse import CORRECT_FILE, Object, read_yaml
from posbench.files.sources import Source
from posbench.report.folder import (
    applied_or_found,
    read_csv,
    read_json,
    with_constants,
)
from posbench.run.folder import (
    DONE,
    FOUND_FILE,
    METHOD_FILE,
    PROVENANCE,
    RunDir,
    as_json,
    find_run,
    open_run_dir,
    open_undamaged,
    runs_in,
)
from posbench.run.method import typed_in_place
from posbench.stats.frames import UNMODIFIED
from posbench.stats.verdict import run_verdict
from posbench.tasks import Example, Task
from posbench.tasks.base import read_recorded_task

FROM_RUN = "from:"
"""Beginning of a choice of method that takes method and constants from a run."""
WEIGHTS_DIGITS = 16


@dataclass(frozen=True, kw_only=True)
class RunConstants:
    """The method of a run with the constants that it applied or found.

    Attributes:
        method: Name of the method.
        run: The hash of the run, as ``posbench ls runs`` prints it.
        folder: The run folder.
        weights: Fingerprint of the weights that the run used.
        source: Where the constants come from, in words.
        values: Every parameter of the method by name.
        verdict: The run's verdict on the position bias, in words; empty where it measured none.
    """

    method: str
    run: str
    folder: str
    weights: str
    source: str
    values: dict[str, Any]
    verdict: str = ""

    def line(self, typed: Mapping[str, Any]) -> str:
        """Return the line that tells the user which constants were taken from the run.

        Args:
            typed: Parameters that the user set to other values.
        """
        values = ", ".join(f"{k} {v}" for k, v in self.values.items() if v is not None)
        line = f"method: {self.method} ({values}) from run {self.run}"
        others = {k: v for k, v in typed.items() if as_json(v) != self.values.get(k)}
        if self.verdict:
            line += f"; its verdict: {self.verdict}"
        if others:
            words = ", ".join(f"{k} {v}" for k, v in others.items())
            line += f"; typed here in place of its own: {words}"
        return line


def fingerprint(read: Sequence[Content]) -> str:
    """Return the identity of the checkpoint: hub id and commit, or a hash of all that it is loaded from."""
    checkpoint = [content for content in read if content.source.field == "model.path"]
    for content in checkpoint:
        if content.file is None:
            return f"{content.source.id}@{content.held}"
    return short_hash(content_keys(checkpoint, "model"), WEIGHTS_DIGITS)


def read_constants(
    name: str, outputs: Path, typed: str
) -> tuple[RunConstants, dict[str, Any]]:
    """Read the method of a run, with the constants that it applied, or else found.

    Args:
        name: The run's folder, or its hash in the outputs.
        outputs: The outputs folder.
        typed: The value of which it may be the beginning alone: a comma, a quote or a bracket ends a bare name.

    Returns:
        The constants, and the config node of the method with them.

    Raises:
        UserError: There is no such run, it is damaged, or it has neither a method nor constants.
    """
    from posbench.run.own_code import make_importable

    field = f"method={FROM_RUN}RUN"
    hint = "posbench ls runs lists the runs and their methods"
    folder = find_run(name, outputs)
    if not folder.is_dir():
        allowed = f"a run: its folder, or its hash in {outputs}"
        if typed not in (name, f"{FROM_RUN}{name}"):
            allowed += f"; {name!r} is none"
            quoted = f"\"method='{FROM_RUN}DIR'\""
            hint = f"quote a folder with a comma, quote or bracket in its name: {quoted}; {hint}"
            name = typed
        raise UserError(field, name, allowed, hint)
    out = open_undamaged(folder)
    make_importable(out)
    node = out.config("method", "model")["method"]
    method = str(node.get("name"))
    if method == UNMODIFIED:
        raise UserError(field, name, "a run with a method", hint)
    found: dict[str, Any] = {}
    if (folder / FOUND_FILE).is_file():
        found = read_yaml(folder / FOUND_FILE, dict[str, Object], hint=CORRECT_FILE)
    applied: Any = read_json(folder / METHOD_FILE)
    if applied is None and not found:
        allowed = "a run that found or applied constants"
        raise UserError(field, name, allowed, f"finish it: {out.command}")
    applied = applied_or_found(node, applied, found)
    # The source that the search recorded, else the method's, else the run itself.
    sources = [str(block["source"]) for block in found.values() if "source" in block]
    source = "; ".join(sources) or str(applied.get("source") or f"run {folder.name}")
    typed = typed_in_place(applied)
    if typed:
        source += f"; {typed}"
    filled = with_constants(node, applied)
    verdict = run_verdict(read_csv(folder / "metrics.csv"))
    constants = RunConstants(
        method=method,
        run=folder.name.rpartition("__")[2],
        folder=str(folder.resolve()),
        weights=str(out.facts(PROVENANCE).get("identity", {}).get("weights", "")),
        source=source,
        values={k: v for k, v in filled.items() if k not in ("name", "_target_")},
        verdict=str(verdict) if verdict else "",
    )
    return constants, filled


def calibration_overlap(constants: RunConstants, task: Task) -> str:
    """Count the questions of a task that were calibration prompts of the search for some constants.

    A task that calibrates on the lines after its evaluation takes other lines under another ``limit``.

    Args:
        constants: The constants of a run.
        task: The task that is to be evaluated under them.

    Returns:
        A sentence; empty if there are none, or the number is unknown.
    """
    folder = Path(constants.folder)
    recorded = RunDir(folder).config().get("task")
    if not recorded or not (folder / FOUND_FILE).is_file():
        return ""
    try:
        calibration = read_recorded_task(recorded).examples("calibration")
    except UserError:
        return ""  # its data are gone, or it has no calibration prompts
    seen = {_text_of_question(example) for example in calibration}
    asked = {_text_of_question(example) for example in task.evaluation()}
    common = len(seen & asked)
    if not common:
        return ""
    return (
        f"method=from:{constants.run}: {common} of {len(asked)} questions were calibration prompts of the search that "
        "found the constants, so their scores are no check of it: set task.limit as it was there, or task.seed"
    )


def _text_of_question(example: Example) -> str:
    """A prompt without its items, which are put in another order for each gold position."""
    ends = [0, *(end for _, end in example.items)]
    starts = [*(start for start, _ in example.items), len(example.prompt)]
    return "".join(
        example.prompt[end:start] for end, start in zip(ends, starts, strict=True)
    )


def suggest_run(
    outputs: Path, method: str, checkpoint: Sequence[Source], otherwise: str
) -> str:
    """Name the newest finished run whose search found constants of a method for the weights of a checkpoint.

    Args:
        outputs: The outputs folder, which may not exist.
        method: Name of the method.
        checkpoint: The files of the model.
        otherwise: Message where there is no such run.
    """
    candidates = _runs_with_constants(outputs, method)
    if candidates:
        with suppress(UserError):
            weights = fingerprint(read_contents(checkpoint))
            for hash_of_run, weights_of_run in candidates:
                if weights_of_run == weights:
                    return f"a run found some for these weights: method={FROM_RUN}{hash_of_run}"
    return otherwise


def _runs_with_constants(outputs: Path, method: str) -> list[tuple[str, str]]:
    """Return hash and weights' digest of each finished run whose search found constants of a method, newest first."""
    if not outputs.is_dir():
        return []
    candidates: list[tuple[str, str, str]] = []
    for folder in runs_in(outputs):
        is_candidate = (folder / FOUND_FILE).is_file() and (folder / DONE).is_file()
        if not is_candidate or folder.name.split("__")[1:2] != [method]:
            continue
        facts = open_run_dir(folder).facts(PROVENANCE)
        weights = str(facts.get("identity", {}).get("weights", ""))
        hash_of_run = folder.name.rpartition("__")[2]
        candidates.append((str(facts.get("started", "")), hash_of_run, weights))
    return [(run, weights) for _, run, weights in sorted(candidates, reverse=True)]
