"""Wu et al. 2025, Section 5, Appendices J to L: networks trained on data with a known position bias."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MinLen

from posbench.errors import Faults, UserError
from posbench.files.hardware import describe_hardware
from posbench.late import pd, torch
from posbench.model.load import torch_device
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.schema import Count, build
from posbench.stats.findings import Finding
from posbench.studies.base import Study, Tables
from wu2025.synthetic_claims import findings
from wu2025.synthetic_tables import (
    figures,
    read_printed_cells,
    tabulate,
)
from wu2025.training import Condition, Measured, train

PAPER_ITERATIONS = 100_000
PAPER_SEEDS = 5

_progress_queue: SimpleQueue[Any]
"""In a process of trainings: where it reports iterations, and whether they were done before."""


class TrainedNetworks(Study):
    """What is shown of synthetic trainings, from the tables ``gaps``, ``sinks`` and ``paper_cells``."""

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        return figures(tables["gaps"], tables["sinks"], tables["paper_cells"])

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """The paper's claims, as far as these conditions allow."""
        return findings(tables["gaps"], tables["sinks"])


@dataclass(frozen=True, kw_only=True)
class SyntheticTraining(TrainedNetworks):
    """Position bias of attention networks trained on synthetic sequences (Wu et al. 2025, Section 5).

    The preset ``quick`` trains one seed for ``quick_iterations``, ``paper`` five seeds for 100,000 (about 15
    minutes a training of depth 2 on a free core).

    Attributes:
        conditions: Conditions to train, each with fields of :class:`Condition`.
        common: Fields that all conditions share.
        preset: How long and how often to train.
        quick_iterations: Iterations of the preset ``quick``.
        iterations: Iterations instead of the preset's.
        seeds: Number of seeds (0, 1, ...) instead of the preset's.
        processes: Trainings at a time on a CPU, one thread each; None: runtime.threads.
        trainings: Folder of the trainings, where they go on; None: next to the run folder.
        reference: CSV in reference/ with the paper's cells.
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
        self.built()
        if self.trainings and Path(self.trainings).expanduser().is_file():
            raise UserError(
                "study.trainings", self.trainings, "a folder", "check the path"
            )

    def built(self) -> list[Condition]:
        """Build the conditions, and check the reference.

        Raises:
            UserError: Conditions are wrong or equal, or there is no such reference; all faults together.
        """
        faults = Faults()
        conditions: list[Condition] = []
        build(Condition, self.common, "study.common")
        for index, fields in enumerate(self.conditions):
            where = f"study.conditions[{index}]"
            with faults.collecting():
                condition = Condition.of({**self.common, **fields}, where)
                if condition in conditions:
                    raise UserError(where, fields, "different conditions", "remove it")
                conditions.append(condition)
        with faults.collecting():
            if self.reference:
                read_printed_cells(self.reference)
        faults.raise_any()
        return conditions

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Train the missing networks; see :func:`tabulate`."""
        conditions = self.built()
        iterations = self.quick_iterations
        seed_count = 1
        if self.preset == "paper":
            iterations = PAPER_ITERATIONS
            seed_count = PAPER_SEEDS
        iterations = self.iterations or iterations
        seeds = list(range(self.seeds or seed_count))
        device = torch_device(run.runtime.device)
        root = run.out.path.parent / "trainings"
        if self.trainings:
            root = Path(self.trainings).expanduser()
        train_all = partial(
            train, iterations=iterations, root=root, hardware=describe_hardware()
        )
        total = len(conditions) * len(seeds) * iterations
        with run.progress("training", total) as advance:
            if device.type == "cpu":
                jobs = [
                    (condition, [seed]) for condition in conditions for seed in seeds
                ]
                processes = self.processes or torch.get_num_threads()
                measured = _train_on_cores(jobs, train_all, processes, advance)
            else:
                measured = [
                    train_all(condition, seeds, device=str(device), advance=advance)
                    for condition in conditions
                ]
        files = [self.reference] if self.reference else []
        return tabulate(list(chain(*measured)), files)


def _train_on_cores(
    jobs: Sequence[tuple[Condition, list[int]]],
    train_job: partial[Measured],
    processes: int,
    advance: Callable[..., None],
) -> list[Measured]:
    """Train on the cores of a CPU, one single-threaded process each.

    Args:
        jobs: Condition and seeds of each training.
        train_job: :func:`train` with all arguments but these and ``advance``.
        processes: Processes at a time; one: this process.
        advance: Called with numbers of iterations done.

    Returns:
        The measurements, in the order of the jobs.
    """
    if min(processes, len(jobs)) == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return [train_job(*job, advance=advance) for job in jobs]
        finally:
            torch.set_num_threads(threads)
    spawn = multiprocessing.get_context("spawn")
    queue: SimpleQueue[Any] = spawn.SimpleQueue()
    listener = threading.Thread(
        target=_forward_progress, args=(queue, advance), daemon=True
    )
    listener.start()
    try:
        with ProcessPoolExecutor(processes, spawn, _start_child, (queue,)) as pool:
            train_in_child = partial(train_job, advance=_report)
            return list(pool.map(train_in_child, *zip(*jobs, strict=True)))
    finally:
        queue.put(None)
        listener.join()


def _forward_progress(queue: SimpleQueue[Any], advance: Callable[..., None]) -> None:
    """Pass on the reports of the children until the queue holds None."""
    for n, before in iter(queue.get, None):
        advance(n, before=before)


def _report(n: int, before: bool = False) -> None:
    """In a child: report iterations to the parent."""
    _progress_queue.put((n, before))


def _start_child(queue: SimpleQueue[Any]) -> None:
    """One thread for torch, and no life beyond the parent's: a killed run must not keep folders locked."""
    global _progress_queue
    _progress_queue = queue
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()


def _exit_with(parent: BaseProcess) -> None:
    """Wait for the end of a process, then end this one."""
    parent.join()
    os._exit(1)
