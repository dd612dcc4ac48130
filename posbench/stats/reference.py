"""The papers' own numbers, read from the tables that travel with the experiments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posbench import paths
from posbench.errors import UserError
from posbench.late import pd
from posbench.schema import Count, Positive
from posbench.stats.bootstrap import Z95, Estimate
from posbench.stats.findings import FEW
from posbench.tasks import Task
from posbench.tasks.items import Placed, at_percent

Z90 = 1.6448536269514722
MARGIN = 0.05  # of a share: the largest distance that still counts as the same number


def table(file: str, *columns: str) -> pd.DataFrame:
    """A table of ``experiments/reference`` or of the user's own path, every cell as printed. Raises
    `UserError` where there is no such file or it lacks one of the columns."""
    path = paths.EXPERIMENTS / "reference" / file
    found = (
        pd.read_csv(path, dtype=str, keep_default_na=False)
        if path.is_file()
        else pd.DataFrame()
    )
    if found.empty or not set(columns) <= set(found):
        allowed = f"a CSV in {path.parent}" + (
            f" with columns {', '.join(columns)}" if columns else ""
        )
        raise UserError("experiment.reference.file", file, allowed, "check the name")
    return found


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Which rows of a paper's table an experiment is held against, and how their names map to ours."""

    file: str  # CSV in ``experiments/reference`` with columns model, method, task, position, metric, value
    paper_task: str  # value of its task column
    # our name of it; ``task/subset`` for a data set of a benchmark, whose name is then the position
    task: str
    source: str  # paper and table, for the report
    models: dict[
        str, str
    ]  # paper's model name -> ours; rows of other models keep the paper's name
    methods: dict[
        str, str
    ]  # paper's method name -> ours; rows of other methods are left out
    # what tells this run from others of its sweep, an interpolation as ``${search.curve} curve``, and by it
    # further methods, those of this run alone
    variant: str = ""
    variants: dict[str, dict[str, str]] = field(default_factory=dict)
    # further tasks of the same table, paper's name -> ours
    further_tasks: dict[str, str] = field(default_factory=dict)
    # paper's position label -> ours (``all`` for the average); others stay as printed
    positions: dict[str, str] = field(default_factory=dict)
    # paper's metric -> ours; values in percent become shares
    metrics: dict[str, str] = field(default_factory=lambda: {"accuracy(%)": "accuracy"})
    # task fields that must have these values for the numbers to be comparable
    setting: dict[str, Any] = field(default_factory=dict)
    # further ones by model (our name), which a run of that model takes unless the user typed the key
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    percent: bool = False  # whether values are in percent although the metric's name does not say ``(%)``
    margin: Positive = MARGIN  # distance (of shares) within which a number of ours agrees, see `agreement`
    # paper's task name -> examples behind each of its cells, where the paper says so
    n: dict[str, Count] = field(default_factory=dict)

    def beside(self, task: Task, model: str) -> tuple[list[dict[str, Any]], str]:
        """The rows that hold in a run of this task and model, and why there are none, or no averages.

        Each row stands in the setting of its own model. A label such as ``25%`` becomes the index that the
        task gives it. An average over other gold positions than the run's is left out. Raises as ``rows``.
        """
        rows = self.rows()
        wanted: dict[str, list[Any]] = {
            "task": list({row["task"]: None for row in rows})
        }
        here: dict[str, Any] = {"task": task.name}
        if task.name in wanted["task"]:
            rows = [row for row in rows if row["task"] == task.name]
            for name in [model] if model in self.settings else self.settings or [model]:
                for key, value in self._setting(name).items():
                    wanted.setdefault(key, []).append(value)
                    here[key] = getattr(task, key, None)
        other = [
            f"{key}={here[key]} (paper {' or '.join(dict.fromkeys(map(str, values)))})"
            for key, values in wanted.items()
            if here[key] not in values
        ]
        if other:
            return (
                [],
                f"This run has {', '.join(other)}: the paper's numbers do not apply to it.",
            )
        mine = [
            self._setting(row["model"]).items() <= vars(task).items() for row in rows
        ]
        return _placed(
            [row for row, same in zip(rows, mine, strict=True) if same], task
        )

    def _setting(self, model: str) -> dict[str, Any]:
        return {**self.setting, **self.settings.get(model, {})}

    def rows(self) -> list[dict[str, Any]]:
        """The paper's rows in our names: model, method, task, gold_position, metric, value (0..1), source,
        margin, and n where the paper states it.
        Raises `UserError` where the file, the task, a mapped name or a number of it is missing."""
        printed = table(
            self.file, "model", "method", "task", "position", "metric", "value"
        )
        tasks = {self.paper_task: self.task, **self.further_tasks}
        methods = {**self.methods, **self.variants.get(self.variant, {})}
        for column, names in {
            "task": tasks,
            "method": methods,
            "metric": self.metrics,
        }.items():
            printed = printed[printed[column].isin(list(names))]
        if printed.empty:
            where = "experiment.reference.paper_task"
            allowed = f"a task in {self.file}"
            raise UserError(where, self.paper_task, allowed, "check the name")
        for key in (
            "paper_task",
            "further_tasks",
            "models",
            "methods",
            "positions",
            "n",
        ):
            there = printed[
                "task" if "task" in key or key == "n" else key.removesuffix("s")
            ]
            mapped: Sequence[str] = (
                [self.paper_task] if key == "paper_task" else getattr(self, key)
            )
            mapped = list(methods) if key == "methods" else mapped
            for name in set(mapped) - set(there):
                hint = f"write it as {self.file} does"
                raise UserError(
                    f"experiment.reference.{key}",
                    name,
                    ", ".join(dict.fromkeys(there)),
                    hint,
                )
        filled = printed[
            ~printed["value"].isin(["—", "-", "/", ""])
        ]  # cells that the papers leave blank
        task = filled["task"].map(tasks).str.partition("/")
        place = filled["position"].replace("", "all")
        number = pd.to_numeric(filled["value"], errors="coerce")
        for text in filled.loc[number.isna(), "value"]:
            hint = f"correct {self.file}, or leave the cell blank"
            raise UserError(
                "experiment.reference.file", text, "numbers in the column value", hint
            )
        percent = self.percent | filled["metric"].str.endswith("(%)")
        columns = {
            "model": filled["model"].replace(self.models),
            "method": filled["method"].map(methods),
            "task": task[0],
            "gold_position": task[2].where(
                task[2] != "", place.replace(self.positions)
            ),
            "metric": filled["metric"].map(self.metrics),
            "value": number / np.where(percent, 100, 1),
        }
        rows = (
            pd.DataFrame(columns)
            .assign(source=self.source, margin=self.margin)
            .to_dict("records")
        )
        sizes = filled["task"].map(self.n)
        return [
            r if pd.isna(n) else {**r, "n": int(n)}
            for r, n in zip(rows, sizes, strict=True)
        ]


def _placed(rows: list[dict[str, Any]], task: Task) -> tuple[list[dict[str, Any]], str]:
    """The rows with the indices of their gold positions; averages only over the positions that are asked."""
    labels = {
        row["gold_position"] for row in rows if row["gold_position"].endswith("%")
    }
    if not labels or not isinstance(task, Placed):
        return rows, ""
    index = {label: at_percent(label, task.items) for label in labels}
    asked = {place: str(place) for place in task.gold_positions}
    rows = [
        {**r, "gold_position": asked.get(index.get(at := r["gold_position"], -1), at)}
        for r in rows
    ]
    if set(index.values()) == set(asked):
        return rows, ""
    note = "The paper's averages are over other gold positions and are left out."
    return [row for row in rows if row["gold_position"] != "all"], note


def agreement(ours: Estimate, paper: Estimate, margin: float) -> str:
    """Whether a number of ours is the paper's, up to a margin: an equivalence test of two one-sided tests.

    ``agrees``: the 90 % interval of ours minus the paper's lies within +-margin (each side at 5 %);
    ``differs``: it lies wholly beyond; else ``inconclusive``. It adds both 95 % intervals by their halves
    (Zou and Donner 2008); the paper's has no width where its n is not known.
    """
    if any(np.isnan([ours.ci_low, ours.ci_high])):
        return "no interval"
    away = ours.value - paper.value
    part = Z90 / Z95
    low = away - part * np.hypot(
        max(ours.value - ours.ci_low, 0), paper.ci_high - paper.value
    )
    high = away + part * np.hypot(
        max(ours.ci_high - ours.value, 0), paper.value - paper.ci_low
    )
    if ours.n < FEW or low <= -margin <= high or low <= margin <= high:
        return "inconclusive"
    return "agrees" if -margin < low and high < margin else "differs"
