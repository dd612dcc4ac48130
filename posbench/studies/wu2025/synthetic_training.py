"""Wu et al. 2025, Section 5 and Appendices J to L: networks trained on data with a known position bias, their
gaps."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pandas as pd
import torch
from annotated_types import MinLen

from posbench.errors import Faults, UserError
from posbench.files.atomic import Row
from posbench.files.hardware import hardware
from posbench.model.load import torch_device
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.schema import Count, build
from posbench.stats.findings import Finding
from posbench.studies.base import Study, Tables
from posbench.studies.wu2025.synthetic_claims import findings
from posbench.studies.wu2025.synthetic_tables import figures, frames, paper_cells, printed_cells
from posbench.studies.wu2025.training import Condition, train

PAPER_ITERATIONS, PAPER_SEEDS = 100_000, 5
"""Section 5: iterations of each training, and runs averaged."""

Job = tuple[Condition, list[int]]
Rows = dict[int, list[Row]]
"""What one call of :func:`train` is for, and what it returns."""


class Trained(Study):
    """What is shown of synthetic trainings, from tables ``gaps``, ``sinks`` and ``paper_cells``."""

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False

    @staticmethod
    def tables(measured: Sequence[tuple[Condition, Row]], files: Sequence[str]) -> dict[str, pd.DataFrame]:
        """These tables, with the paper's cells of some CSVs of ``experiments/reference``."""
        gaps, sinks = frames(measured)
        return {"gaps": gaps, "sinks": sinks, "paper_cells": paper_cells(gaps, files)}

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        return figures(tables["gaps"], tables["sinks"], tables["paper_cells"])

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """The paper's claims, as far as these conditions can tell."""
        return findings(tables["gaps"], tables["sinks"])


@dataclass(frozen=True, kw_only=True)
class SyntheticTraining(Trained):
    """Position bias of attention networks trained on synthetic sequences.

    Source: Wu et al. 2025, Section 5 and Appendices J to L.

    Attributes:
        conditions: Networks and data to train, each with fields of
            :class:`posbench.studies.wu2025.training.Condition`.
        common: Fields that all conditions share.
        preset: ``quick``: ``quick_iterations`` and one seed, the early regime; ``paper``: 100,000 iterations,
            five seeds (about 15 minutes a training of depth 2 on a free core).
        quick_iterations: Iterations of the quick preset.
        iterations: Iterations instead of the preset's.
        seeds: Seeds 0, 1, ... instead of the preset's number.
        processes: Trainings at a time on a CPU, one thread each; None: as many as ``runtime.threads``.
        trainings: Folder of the trainings; None: beside the run folder, shared by runs of the same code. What
            is found there is continued, and not repeated.
        reference: CSV in ``experiments/reference`` with the paper's cells.
    """

    conditions: Annotated[tuple[dict[str, Any], ...], MinLen(1)]
    common: dict[str, Any] = field(default_factory=dict)
    preset: Literal["quick", "paper"] = "quick"
    quick_iterations: Count = 8000
    iterations: Count | None = None
    seeds: Count | None = None
    processes: Count | None = None
    trainings: str | None = None
    reference: str | None = None

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        faults = Faults()
        with faults.collecting():
            self.built()
        with faults.collecting():
            if self.reference:
                printed_cells(self.reference)
        if self.trainings and Path(self.trainings).expanduser().is_file():
            faults.found.append(UserError("study.trainings", self.trainings, "a folder", "check the path"))
        faults.raise_any()

    def built(self) -> list[Condition]:
        """The conditions.

        Raises:
            UserError: A condition has an unknown or impossible field, or stands there twice; all of them
                together.
        """
        faults, found = Faults(), list[Condition]()
        build(Condition, self.common, "study.common")
        for index, fields in enumerate(self.conditions):
            where = f"study.conditions[{index}]"
            with faults.collecting():
                condition = Condition.of({**self.common, **fields}, where)
                if condition in found:
                    raise UserError(where, fields, "different conditions", "remove it")
                found.append(condition)
        faults.raise_any()
        return found

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Train what is not trained yet; see :class:`Trained` for the tables."""
        conditions, paper = self.built(), self.preset == "paper"
        iterations = self.iterations or (PAPER_ITERATIONS if paper else self.quick_iterations)
        seeds = list(range(self.seeds or (PAPER_SEEDS if paper else 1)))
        root = Path(self.trainings).expanduser() if self.trainings else run.out.path.parent / "trainings"
        device = torch_device(run.runtime.device)
        work = partial(train, iterations=iterations, root=root, hardware=hardware())
        with run.progress("training", len(conditions) * len(seeds) * iterations) as advance:
            if device.type == "cpu":
                jobs = [(condition, [seed]) for condition in conditions for seed in seeds]
                rows = _on_cores(jobs, work, self.processes or torch.get_num_threads(), advance)
            else:
                jobs = [(condition, seeds) for condition in conditions]
                rows = [work(*job, device=str(device), advance=advance) for job in jobs]
        found = zip(jobs, rows, strict=True)
        measured = [(job[0], row) for job, made in found for each in made.values() for row in each]
        return self.tables(measured, [self.reference] if self.reference else [])


def _on_cores(
    jobs: Sequence[Job], work: partial[Rows], processes: int, advance: Callable[[int], None]
) -> list[Rows]:
    """Trainings on the cores of a CPU, one single-threaded process each; with one process, in this one."""
    if min(processes, len(jobs)) == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return [work(*job, advance=advance) for job in jobs]
        finally:
            torch.set_num_threads(before)
    spawned, found = multiprocessing.get_context("spawn"), list[Rows]()
    with ProcessPoolExecutor(processes, mp_context=spawned, initializer=_start_child) as pool:
        for rows in pool.map(work, *zip(*jobs, strict=True)):
            found.append(rows)
            advance(work.keywords["iterations"])
    return found


def _start_child() -> None:
    """One thread for torch, and no life beyond the parent's: a killed run must not keep its folders locked."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
