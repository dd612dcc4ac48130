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
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MinLen

from posbench.errors import Faults, UserError
from posbench.files.hardware import hardware
from posbench.late import pd, torch
from posbench.model.load import torch_device
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.schema import Count, build
from posbench.stats.findings import Finding
from posbench.studies.base import Study, Tables
from posbench.studies.wu2025.synthetic_claims import findings
from posbench.studies.wu2025.synthetic_tables import figures, printed_cells, tabulated
from posbench.studies.wu2025.training import Condition, Measured, train

_told: SimpleQueue[Any]
"""In the process of a training: where it says how far it is."""


class Trained(Study):
    """What is shown of synthetic trainings, from the tables ``gaps``, ``sinks`` and ``paper_cells``."""

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        return figures(tables["gaps"], tables["sinks"], tables["paper_cells"])

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """The paper's claims, as far as these conditions can tell."""
        return findings(tables["gaps"], tables["sinks"])


@dataclass(frozen=True, kw_only=True)
class SyntheticTraining(Trained):
    """Position bias of attention networks trained on synthetic sequences (Wu et al. 2025, Section 5).

    The preset ``quick`` trains one seed for ``quick_iterations``, ``paper`` five seeds for 100,000 (about 15
    minutes a training of depth 2 on a free core).
    """

    conditions: Annotated[
        tuple[dict[str, Any], ...], MinLen(1)
    ]  # each with fields of :class:`Condition`
    common: dict[str, Any] = field(
        default_factory=dict
    )  # fields that all conditions share
    preset: Literal["quick", "paper"] = "quick"
    quick_iterations: Count = 8000
    iterations: Count | None = None  # instead of the preset's
    seeds: Count | None = None  # seeds 0, 1, ..., instead of the preset's number
    processes: Count | None = (
        None  # trainings at a time on a CPU, one thread each; None: runtime.threads
    )
    trainings: str | None = (
        None  # their folder, where they go on; None: next to the run folder
    )
    reference: str | None = None  # CSV in experiments/reference with the paper's cells

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        self.built()
        if self.trainings and Path(self.trainings).expanduser().is_file():
            raise UserError(
                "study.trainings", self.trainings, "a folder", "check the path"
            )

    def built(self) -> list[Condition]:
        """The conditions, checked, and the reference."""
        faults = Faults()
        found = list[Condition]()
        build(Condition, self.common, "study.common")
        for index, fields in enumerate(self.conditions):
            where = f"study.conditions[{index}]"
            with faults.collecting():
                condition = Condition.of({**self.common, **fields}, where)
                if condition in found:
                    raise UserError(where, fields, "different conditions", "remove it")
                found.append(condition)
        with faults.collecting():
            if self.reference:
                printed_cells(self.reference)
        faults.raise_any()
        return found

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Train what is not trained yet; see :func:`tabulated`."""
        conditions = self.built()
        paper = self.preset == "paper"
        iterations = self.iterations or (100_000 if paper else self.quick_iterations)
        seeds = list(range(self.seeds or (5 if paper else 1)))
        device = torch_device(run.runtime.device)
        root = (
            Path(self.trainings).expanduser()
            if self.trainings
            else run.out.path.parent / "trainings"
        )
        work = partial(train, iterations=iterations, root=root, hardware=hardware())
        with run.progress(
            "training", len(conditions) * len(seeds) * iterations
        ) as advance:
            if device.type == "cpu":
                jobs = [
                    (condition, [seed]) for condition in conditions for seed in seeds
                ]
                found = _on_cores(
                    jobs, work, self.processes or torch.get_num_threads(), advance
                )
            else:
                found = [
                    work(c, seeds, device=str(device), advance=advance)
                    for c in conditions
                ]
        return tabulated([*chain(*found)], [self.reference] if self.reference else [])


def _on_cores(
    jobs: Sequence[Any],
    work: partial[Measured],
    processes: int,
    advance: Callable[..., None],
) -> list[Measured]:
    """Trainings on the cores of a CPU, one single-threaded process each; with one process, in this one."""
    if min(processes, len(jobs)) == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return [work(*job, advance=advance) for job in jobs]
        finally:
            torch.set_num_threads(before)
    spawned = multiprocessing.get_context("spawn")
    told: SimpleQueue[Any] = spawned.SimpleQueue()

    def listen() -> None:
        for n, how in iter(told.get, None):
            advance(n, **how)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        with ProcessPoolExecutor(processes, spawned, _start_child, (told,)) as pool:
            return list(pool.map(partial(_in_child, work), *zip(*jobs, strict=True)))
    finally:
        told.put(None)
        listener.join()


def _in_child(work: partial[Measured], *job: Any) -> Measured:
    """A training that tells the parent how far it is."""
    return work(*job, advance=lambda n, **how: _told.put((n, how)))


def _start_child(told: SimpleQueue[Any]) -> None:
    """One thread for torch, and no life beyond the parent's: a killed run must not keep folders locked."""
    global _told
    _told = told
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
