"""The papers' own numbers, read from the tables that travel with the experiments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from posbench import paths
from posbench.errors import UserError


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
        """The paper's rows in our names, values in 0..1.

        Raises:
            UserError: The file is missing, or lacks the task or a name that is mapped.
        """
        file = paths.EXPERIMENTS / "reference" / self.file
        if not file.is_file():
            raise UserError(
                "experiment.reference.file", self.file, f"a CSV in {file.parent}", "check the name"
            )
        table, tasks = pd.read_csv(file, dtype=str), {self.paper_task: self.task, **self.further_tasks}
        table = table[
            table["task"].isin(list(tasks))
            & table["method"].isin(list(self.methods))
            & table["metric"].isin(list(self.metrics))
        ]
        if table.empty:
            raise UserError(
                "experiment.reference.paper_task", self.paper_task, f"a task in {self.file}", "check the name"
            )
        for key, column, names in (
            ("paper_task", "task", {self.paper_task: self.task}),
            ("further_tasks", "task", self.further_tasks),
            ("models", "model", self.models),
            ("methods", "method", self.methods),
            ("positions", "position", self.positions),
        ):
            for name in set(names) - set(table[column]):
                raise UserError(
                    f"experiment.reference.{key}",
                    name,
                    ", ".join(dict.fromkeys(table[column])),
                    f"write it as {self.file} does",
                )
        table["position"] = table["position"].fillna("all")
        # Cells that the paper leaves blank.
        table = table[~table["value"].isin(["—", "-"]) & table["value"].notna()]
        placed = {paper: ours.partition("/") for paper, ours in tasks.items()}
        return [
            {
                "model": self.models.get(row["model"], row["model"]),
                "method": self.methods[row["method"]],
                "task": placed[row["task"]][0],
                "position": placed[row["task"]][2] or self.positions.get(row["position"], row["position"]),
                "metric": self.metrics[row["metric"]],
                "value": float(row["value"]) / (100 if self.percent or row["metric"].endswith("(%)") else 1),
                "source": self.source,
            }
            for row in table.to_dict("records")
        ]
