"""The papers' own numbers, read from the tables that travel with the experiments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from posbench import paths
from posbench.errors import UserError
from posbench.late import pd
from posbench.schema import Count, Positive
from posbench.stats.bootstrap import Z95, Estimate
from posbench.stats.findings import MIN_OBSERVATIONS
from posbench.stats.frames import UNMODIFIED
from posbench.tasks import Task
from posbench.tasks.items import GoldPositionTask, index_at_percent

Z90 = 1.6448536269514722
SHARE_MARGIN = (
    0.05  # of a share: the largest distance that still counts as the same number
)
BLANKS = ("—", "-", "/", "")  # cells that the papers leave empty


def reference_tables() -> dict[str, Path]:
    """The papers' tables by the names of their files."""
    patterns = paths.REFERENCE_TABLES
    files = (file for pattern in patterns for file in paths.EXPERIMENTS.glob(pattern))
    return {file.name: file for file in files}


def read_table(file: str, *columns: str) -> pd.DataFrame:
    """Return a table of numbers printed in a paper, every cell as text.

    Args:
        file: Its name in a ``reference/`` folder, or an absolute path.
        columns: Columns that it must have.

    Raises:
        UserError: There is no such file, or it lacks one of the columns.
    """
    # An absolute path is taken as it is.
    path = reference_tables().get(file, paths.EXPERIMENTS / file)
    cells = pd.DataFrame()
    if path.is_file():
        cells = pd.read_csv(path, dtype=str, keep_default_na=False)
    field = "experiment.reference.file"
    if cells.empty:
        allowed = f"the name of a CSV with rows in a reference/ folder of {paths.EXPERIMENTS}, or an absolute path"
        raise UserError(field, file, allowed, "check the name")
    missing = [name for name in columns if name not in cells]
    if missing:
        allowed = f"columns {', '.join(columns)}, of which {', '.join(missing)} is missing in {path}"
        raise UserError(field, file, allowed, "correct its first line")
    return cells


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A paper's claim on the settings of a sweep, which are named by the value of a swept key.

    Attributes:
        claim: The claim with its source.
        better: Settings that each score at least a point more than ``than``.
        than: A setting, or ``none``: the unmodified model.
        equal: In place of ``better`` and ``than``, settings of which no two differ by a point.
        not_better: In place of ``better``, settings that each score less than a point more than ``than``.
        one_search: Whether each setting is one search. Then a difference could be between two searches of one setting,
            and the claim is inconclusive.
    """

    claim: str
    better: tuple[str, ...] = ()
    than: str = UNMODIFIED
    equal: tuple[str, ...] = ()
    not_better: tuple[str, ...] = ()
    one_search: bool = False


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The rows of a paper's table to compare an experiment with, and the mapping of their names to ours.

    Attributes:
        file: CSV in a ``reference/`` folder, with columns model, method, task, position, metric, value.
        paper_task: Value of its task column.
        task: Our name of that task; ``task/subset`` for a data set of a benchmark, whose name is then the
            position.
        source: Paper and table, for the report.
        models: The paper's model name -> ours; rows of other models keep the paper's name.
        methods: The paper's method name -> ours; rows of other methods are left out.
        variant: What distinguishes this run within its sweep, an interpolation as ``${search.curve} curve``.
        variants: Further methods of a run, by its variant.
        further_tasks: Further tasks of the same table, the paper's name -> ours.
        positions: The paper's position label -> ours (``all`` for the average); others stay as printed.
        metrics: The paper's metric -> ours; values in percent become shares.
        setting: Task fields that must have these values for the numbers to be comparable.
        settings: Further ones by model (our name), which a run of that model takes unless the user typed the
            key.
        percent: Whether values are in percent although the metric's name does not say ``(%)``.
        margin: Distance (of shares) within which a number of ours agrees, see `agreement`.
        n: The paper's task name -> examples behind each of its cells, where the paper says so.
    """

    file: str
    paper_task: str
    task: str
    source: str
    models: dict[str, str]
    methods: dict[str, str]
    variant: str = ""
    variants: dict[str, dict[str, str]] = field(default_factory=dict)
    further_tasks: dict[str, str] = field(default_factory=dict)
    positions: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=lambda: {"accuracy(%)": "accuracy"})
    setting: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    percent: bool = False
    margin: Positive = SHARE_MARGIN
    n: dict[str, Count] = field(default_factory=dict)

    def beside(self, task: Task, model: str) -> tuple[list[dict[str, Any]], str]:
        """Select the paper's rows that apply to a run of a task by a model.

        Each row requires the setting of its own model. A label such as ``25%`` becomes the index that the
        task gives it. An average over other gold positions than the run's is left out.

        Args:
            task: The run's task.
            model: Name of its model.

        Returns:
            The rows of :meth:`rows` that apply, and why there are none, or no averages.

        Raises:
            UserError: As :meth:`rows`.
        """
        rows = self.rows()
        table_tasks = list(dict.fromkeys(row["task"] for row in rows))
        mismatches = []
        if task.name not in table_tasks:
            mismatches.append(_mismatch("task", task.name, table_tasks))
        else:
            rows = [row for row in rows if row["task"] == task.name]
            for key, allowed in self._allowed_settings(model).items():
                value = getattr(task, key, None)
                if value not in allowed:
                    mismatches.append(_mismatch(key, value, allowed))
        if mismatches:
            mismatch_text = ", ".join(mismatches)
            note = (
                f"This run has {mismatch_text}: the paper's numbers do not apply to it."
            )
            return [], note
        task_fields = vars(task)
        applicable = [
            row
            for row in rows
            # The run's task has the settings that the paper used for that model.
            if self._setting(row["model"]).items() <= task_fields.items()
        ]
        return _at_gold_positions(applicable, task)

    def _setting(self, model: str) -> dict[str, Any]:
        """Values that task fields must have for the rows of a model."""
        return {**self.setting, **self.settings.get(model, {})}

    def _allowed_settings(self, model: str) -> dict[str, list[Any]]:
        """Return by task field the values under which the paper's numbers for a model apply.

        Args:
            model: The model; one without settings of its own may have those of any model.
        """
        models = list(self.settings)
        if model in self.settings or not self.settings:
            models = [model]
        allowed: dict[str, list[Any]] = {}
        for name in models:
            for key, value in self._setting(name).items():
                allowed.setdefault(key, []).append(value)
        return allowed

    def rows(self) -> list[dict[str, Any]]:
        """The paper's rows in our names.

        Returns:
            Rows of model, method, task, gold_position, metric, value (0..1), source, margin, and n where the
            paper states it.

        Raises:
            UserError: The file, the task, a mapped name or a number is missing.
        """
        columns = ("model", "method", "task", "position", "metric", "value")
        printed = read_table(self.file, *columns)
        tasks = {self.paper_task: self.task, **self.further_tasks}
        methods = {**self.methods, **self.variants.get(self.variant, {})}
        for key, column, names in (
            ("paper_task", "task", tasks),
            ("methods", "method", methods),
            ("metrics", "metric", self.metrics),
        ):
            listed = ", ".join(dict.fromkeys(printed[column]))
            printed = printed[printed[column].isin(list(names))]
            if printed.empty:
                field = f"experiment.reference.{key}"
                hint = f"write it as {self.file} does"
                raise UserError(field, ", ".join(names), listed, hint)
        self._check_names(printed, methods)

        # Blank cells say that the paper did not measure.
        filled = printed[~printed["value"].isin(BLANKS)]
        values = pd.to_numeric(filled["value"], errors="coerce")
        for text in filled.loc[values.isna(), "value"]:
            key = "experiment.reference.file"
            hint = f"correct {self.file}, or leave the cell blank"
            raise UserError(key, text, "numbers in the column value", hint)
        # All values become shares, 0..1.
        is_percent = self.percent | filled["metric"].str.endswith("(%)")
        # Our name of the paper's task may be ``task/subset``.
        task_and_subset = filled["task"].map(tasks).str.partition("/")
        subset = task_and_subset[2]
        position = filled["position"].replace("", "all").replace(self.positions)
        result = pd.DataFrame(
            {
                "model": filled["model"].replace(self.models),
                "method": filled["method"].map(methods),
                "task": task_and_subset[0],
                "gold_position": subset.where(subset != "", position),
                "metric": filled["metric"].map(self.metrics),
                "value": values / np.where(is_percent, 100, 1),
                "source": self.source,
                "margin": self.margin,
            }
        )
        rows = result.to_dict("records")
        for row, n in zip(rows, filled["task"].map(self.n), strict=True):
            if not pd.isna(n):
                row["n"] = int(n)
        return rows

    def _check_names(self, printed: pd.DataFrame, methods: Mapping[str, str]) -> None:
        """Refuse names in the experiment's YAML that do not occur in the paper's table.

        Args:
            printed: The paper's table.
            methods: Our names of methods, by the paper's.

        Raises:
            UserError: Names the key, the name, and those that occur.
        """
        names_by_field: dict[str, tuple[str, Iterable[str]]] = {
            "paper_task": ("task", [self.paper_task]),
            "further_tasks": ("task", self.further_tasks),
            "models": ("model", self.models),
            "methods": ("method", methods),
            "positions": ("position", self.positions),
            "n": ("task", self.n),
        }
        for key, (column, names) in names_by_field.items():
            for name in set(names) - set(printed[column]):
                allowed = ", ".join(dict.fromkeys(printed[column]))
                hint = f"write it as {self.file} does"
                raise UserError(f"experiment.reference.{key}", name, allowed, hint)


def _mismatch(key: str, value: Any, allowed: list[Any]) -> str:
    """How a run differs from the paper, such as ``pairs=10 (paper 75 or 140)``."""
    return f"{key}={value} (paper {' or '.join(dict.fromkeys(map(str, allowed)))})"


def _at_gold_positions(
    rows: list[dict[str, Any]], task: Task
) -> tuple[list[dict[str, Any]], str]:
    """Replace labels such as ``25%`` by the gold positions of a run's prompts.

    Returns:
        The rows, without averages over other gold positions than the run's, and a note where there are such.
    """
    labels = {
        row["gold_position"] for row in rows if row["gold_position"].endswith("%")
    }
    if not labels or not isinstance(task, GoldPositionTask):
        return rows, ""
    positions = {label: index_at_percent(label, task.items) for label in labels}
    run_positions = set(task.gold_positions)
    result = []
    for row in rows:
        position = positions.get(row["gold_position"])
        if position in run_positions:
            row = {**row, "gold_position": str(position)}
        result.append(row)
    if set(positions.values()) == run_positions:
        return result, ""
    note = "The paper's averages are over other gold positions and are left out."
    return [row for row in result if row["gold_position"] != "all"], note


def agreement(ours: Estimate, paper: Estimate, margin: float) -> str:
    """Test whether a number of ours equals the paper's up to a margin, by two one-sided tests.

    The interval of the difference adds both 95 % intervals by their halves (Zou and Donner 2008) and is scaled
    to 90 %, so that each side is tested at 5 %.

    Args:
        ours: Our number.
        paper: The paper's; its interval has no width where its n is not known.
        margin: The largest distance that still counts as equal, in the numbers' unit.

    Returns:
        ``agrees`` where the interval lies within +-margin, ``differs`` where it lies wholly beyond,
        ``no interval`` where our number has none, else ``inconclusive``.
    """
    if np.isnan(ours.ci_low) or np.isnan(ours.ci_high):
        return "no interval"
    difference = ours.value - paper.value
    to_90_percent = Z90 / Z95
    low = difference - to_90_percent * np.hypot(
        max(ours.value - ours.ci_low, 0), paper.ci_high - paper.value
    )
    high = difference + to_90_percent * np.hypot(
        max(ours.ci_high - ours.value, 0), paper.value - paper.ci_low
    )
    if ours.n < MIN_OBSERVATIONS:
        return "inconclusive"
    return equivalence(float(low), float(high), margin)


def equivalence(low: float, high: float, margin: float) -> str:
    """``agrees`` where the interval of a difference lies within +-margin, ``differs`` beyond, or ``inconclusive``."""
    if low <= -margin <= high or low <= margin <= high:
        return "inconclusive"
    if -margin < low and high < margin:
        return "agrees"
    return "differs"
