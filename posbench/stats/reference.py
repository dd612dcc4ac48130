"""The papers' own numbers, read from the tables that travel with the experiments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from posbench import paths
from posbench.errors import UserError


def table(file: str, *columns: str) -> pd.DataFrame:
    """A table of ``experiments/reference``, every cell as printed.

    Args:
        file: Its name, or the path of a table of the user's own.
        columns: Columns that it must have.

    Raises:
        UserError: There is no such file, or it lacks a column.
    """
    path = paths.EXPERIMENTS / "reference" / file
    found = pd.read_csv(path, dtype=str, keep_default_na=False) if path.is_file() else pd.DataFrame()
    if found.empty or not set(columns) <= set(found):
        allowed = f"a CSV in {path.parent}" + (f" with columns {', '.join(columns)}" if columns else "")
        raise UserError("experiment.reference.file", file, allowed, "check the name")
    return found


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Which rows of a paper's table an experiment is held against, and how their names map to ours.

    Attributes:
        file: CSV in ``experiments/reference`` with columns model, method, task, position, metric, value.
        paper_task: Value of its task column.
        task: Our name of that task; ``task/subset`` for one data set of a benchmark, whose rows then have its
            name as position.
        further_tasks: Further tasks of the same table, paper's name -> ours.
        source: Paper and table, for the report.
        models: Paper's model name -> ours; rows of other models keep the paper's name.
        methods: Paper's method name -> ours; rows of other methods are left out.
        positions: Paper's position label -> ours (``all`` for the average); others stay as printed.
        metrics: Paper's metric -> ours; values in percent become shares.
        percent: Whether values are in percent although the metric's name does not say ``(%)``.
        setting: Task fields that must have these values for the numbers to be comparable.
    """

    file: str
    paper_task: str
    task: str
    source: str
    models: dict[str, str]
    methods: dict[str, str]
    further_tasks: dict[str, str] = field(default_factory=dict)
    positions: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=lambda: {"accuracy(%)": "accuracy"})
    setting: dict[str, Any] = field(default_factory=dict)
    percent: bool = False

    def rows(self) -> list[dict[str, Any]]:
        """The paper's rows in our names, values in 0..1: model, method, task, gold_position, metric, value,
        source.

        Raises:
            UserError: The file is missing, or lacks the task or a name that is mapped.
        """
        printed = table(self.file, "model", "method", "task", "position", "metric", "value")
        tasks = {self.paper_task: self.task, **self.further_tasks}
        kept = {"task": tasks, "method": self.methods, "metric": self.metrics}
        for column, names in kept.items():
            printed = printed[printed[column].isin(list(names))]
        if printed.empty:
            field_ = "experiment.reference.paper_task"
            raise UserError(field_, self.paper_task, f"a task in {self.file}", "check the name")
        mapped = {"paper_task": {self.paper_task: self.task}, "further_tasks": self.further_tasks}
        mapped |= {"models": self.models, "methods": self.methods, "positions": self.positions}
        for key, names in mapped.items():
            there = printed["task" if key.endswith(("task", "tasks")) else key.removesuffix("s")]
            for name in set(names) - set(there):
                hint = f"write it as {self.file} does"
                raise UserError(f"experiment.reference.{key}", name, ", ".join(dict.fromkeys(there)), hint)
        # Cells that the paper leaves blank.
        printed = printed[~printed["value"].isin(["—", "-", ""])]
        return [self._row(row, *tasks[row["task"]].partition("/")[::2]) for row in printed.to_dict("records")]

    def _row(self, row: dict[Any, str], task: str, subset: str) -> dict[str, Any]:
        place = row["position"] or "all"
        return {
            "model": self.models.get(row["model"], row["model"]),
            "method": self.methods[row["method"]],
            "task": task,
            "gold_position": subset or self.positions.get(place, place),
            "metric": self.metrics[row["metric"]],
            "value": float(row["value"]) / (100 if self.percent or row["metric"].endswith("(%)") else 1),
            "source": self.source,
        }
