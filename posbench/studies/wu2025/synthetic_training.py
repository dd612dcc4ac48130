"""Wu et al. 2025, Section 5 and Appendices J to L: networks trained on sequences with a known position bias,
and their gaps."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import pandas as pd
import torch
from matplotlib.figure import Figure

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.files.hardware import hardware
from posbench.model.lm import LM
from posbench.model.load import torch_device
from posbench.pipeline.config import Config
from posbench.run.base import Run
from posbench.schema import build
from posbench.studies.base import Finding, Study
from posbench.studies.wu2025.synthetic_claims import findings
from posbench.studies.wu2025.synthetic_tables import beside_paper, figures, frames, paper_cells
from posbench.studies.wu2025.training import Condition, train

PAPER_ITERATIONS, PAPER_SEEDS = 100_000, 5
"""Section 5: iterations of each training, and runs averaged."""


@dataclass(frozen=True, kw_only=True)
class SyntheticTraining(Study):
    """Position bias of attention networks trained on synthetic sequences (Wu et al. 2025, Section 5 and
    Appendices J to L).

    Attributes:
        conditions: Networks and data to train, each a mapping of fields of
            `posbench.studies.wu2025.training.Condition`.
        common: Fields that all conditions share.
        preset: ``quick``: ``quick_iterations`` and one seed, the early regime; ``paper``: 100,000 iterations,
            five seeds.
        quick_iterations: Iterations of the quick preset.
        iterations: Iterations instead of the preset's.
        seeds: Seeds 0, 1, ... instead of the preset's number.
        processes: Trainings at a time on a CPU, one thread each; None: as many as torch has threads
            (``runtime.threads``).
        trainings: Folder of the trainings; None: beside the run folder, shared by runs of the same code. What
            is found there is continued, and not repeated.
        reference: CSV in ``experiments/reference`` with the paper's cells.
    """

    needs_model: ClassVar[bool] = False

    conditions: tuple[dict[str, Any], ...]
    common: dict[str, Any] = field(default_factory=dict)
    preset: Literal["quick", "paper"] = "quick"
    quick_iterations: int = 8000
    iterations: int | None = None
    seeds: int | None = None
    processes: int | None = None
    trainings: str | None = None
    reference: str | None = None

    def check(self, config: Config, lm: LM | None) -> None:
        """Refuse unknown or impossible fields of a condition, counts below one, and a reference that is not
        there."""
        for name in ("quick_iterations", "iterations", "seeds", "processes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"study.{name}", value, "a whole number from 1 up", f"set study.{name}=1")
        if self.trainings and Path(self.trainings).expanduser().is_file():
            raise UserError("study.trainings", self.trainings, "a folder, made as needed", "check it")
        self.built()
        if self.reference:
            paper_cells(self.reference)

    def built(self) -> list[Condition]:
        """The conditions, checked.

        Raises:
            UserError: A condition has an unknown or impossible field, or stands there twice.
        """
        if not self.conditions:
            raise UserError("study.conditions", [], "at least one condition", "see the study's YAML")
        found: list[Condition] = []
        for index, fields_ in enumerate(self.conditions):
            where = f"study.conditions.{index}"
            condition: Condition = build(Condition, {**self.common, **fields_}, where)
            condition.check(where)
            if condition in found:
                raise UserError(where, fields_, "different conditions", "remove it")
            found.append(condition)
        return found

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Train what is not trained yet.

        Tables: ``gaps``, one row per condition, seed, iteration and pair; ``sinks``, one per token;
            ``beside_paper``.
        """
        conditions = self.built()
        paper = self.preset == "paper"
        iterations = self.iterations or (PAPER_ITERATIONS if paper else self.quick_iterations)
        seeds = list(range(self.seeds or (PAPER_SEEDS if paper else 1)))
        root = Path(self.trainings).expanduser() if self.trainings else run.out.path.parent / "trainings"
        device = torch_device(run.config.runtime.device)
        with run.progress("training", len(conditions) * len(seeds) * iterations) as advance:
            if device.type == "cpu":
                jobs = [(condition, [seed]) for condition in conditions for seed in seeds]
                measured = _on_cores(
                    jobs, iterations, root, self.processes or torch.get_num_threads(), advance
                )
            else:
                whole = partial(
                    train,
                    iterations=iterations,
                    root=root,
                    hardware=hardware(),
                    device=str(device),
                    advance=advance,
                )
                measured = [
                    (condition, row)
                    for condition in conditions
                    for rows in whole(condition, seeds).values()
                    for row in rows
                ]
        gaps, sinks = frames(measured)
        return {
            "gaps": gaps,
            "sinks": sinks,
            "beside_paper": beside_paper(gaps, [self.reference] if self.reference else []),
        }

    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """Gaps at the end, gaps over the training, and attention sinks."""
        return figures(tables["gaps"], tables["sinks"], tables["beside_paper"])

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """The paper's claims, as far as these conditions can tell."""
        return findings(tables["gaps"], tables["sinks"])


# Training


def _on_cores(
    jobs: Sequence[tuple[Condition, list[int]]],
    iterations: int,
    root: Path,
    processes: int,
    advance: Callable[[int], None],
) -> list[tuple[Condition, Row]]:
    """Trainings on the cores of a CPU, one single-threaded process each; with one process, in this one."""
    named = hardware()
    found: dict[int, list[Row]] = {}
    if min(processes, len(jobs)) == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for index, (condition, seeds) in enumerate(jobs):
                (found[index],) = train(
                    condition, seeds, iterations, root, hardware=named, advance=advance
                ).values()
        finally:
            torch.set_num_threads(before)
    else:
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=spawned, initializer=_start_child) as pool:
            work = partial(_train_in_child, iterations=iterations, root=root, named=named)
            waiting = {
                pool.submit(work, condition, seeds): index for index, (condition, seeds) in enumerate(jobs)
            }
            for future in as_completed(waiting):
                result = future.result()
                if isinstance(result, dict):
                    pool.shutdown(cancel_futures=True)
                    raise UserError(**result)
                found[waiting[future]] = result
                advance(iterations)
    return [(condition, row) for index, (condition, _) in enumerate(jobs) for row in found[index]]


def _start_child() -> None:
    """One thread for torch, and no life beyond the process that asked for it: a killed run must not keep its
    folders locked."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _train_in_child(
    condition: Condition, seeds: list[int], *, iterations: int, root: Path, named: str
) -> list[Row] | dict[str, Any]:
    """Rows of one training, or the fields of a `UserError`, which would not survive the way between
    processes."""
    try:
        (rows,) = train(condition, seeds, iterations, root, hardware=named).values()
    except UserError as error:
        return {"field": error.field, "value": error.value, "allowed": error.allowed, "hint": error.hint}
    return rows
