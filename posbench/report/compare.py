"""Chosen runs side by side: one table, one figure; differences are paired where the prompts are the same."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from posbench.errors import UserError, renamed
from posbench.files.atomic import Row, digest, new_folder, write_csv
from posbench.late import Figure, pd
from posbench.plots.base import save, sign
from posbench.plots.scores import accuracy_by_position, by_subset
from posbench.report.console import Record
from posbench.report.failures import FILE
from posbench.report.folder import need_place, read_csv
from posbench.report.index import Listed, differing, number
from posbench.run.folder import RunDir, checked
from posbench.schema import instantiate
from posbench.stats.bootstrap import Estimate, combined
from posbench.stats.findings import columns, ends
from posbench.stats.frames import UNMODIFIED, at_positions, overall, shown
from posbench.stats.scores import Tabulator
from posbench.tasks import Task

NAME = "comparison.csv"
LABEL = 48  # the table's file; letters of a label
PARTS = {
    "score": ("", "difference"),
    "position_bias": ("position_bias", "position_bias_difference"),
}
"""What is compared: the metric that holds it, and that which holds a paired difference of it."""


@dataclass(frozen=True)
class Compared:
    """A finished run that evaluated, under the name that it has in a comparison."""

    run: RunDir
    listed: Listed
    metrics: (
        pd.DataFrame
    )  # of the method under test, or of the unmodified model where it ran alone
    unmodified: pd.DataFrame
    label: str = ""

    @classmethod
    def of(cls, folder: Path) -> Compared:
        """Open a run; `UserError` where it is damaged, unfinished or has no scores."""
        with renamed("DIR", "RUN"):
            run = checked(folder)
        metrics = read_csv(run.path / "metrics.csv")
        if not run.done or metrics is None:
            hint = "choose another: posbench ls runs state=done"
            raise UserError("RUN", str(folder), "a finished run with scores", hint)
        plain = metrics["method"] == UNMODIFIED
        return cls(
            run,
            Listed.of(run.path),
            metrics[plain if plain.all() else ~plain],
            metrics[plain],
        )

    @property
    def names(self) -> tuple[str, str]:
        """Its model, and the method that it tells of."""
        return self.listed.name("model"), str(self.metrics["method"].iloc[0])

    @cached_property
    def prompts(self) -> dict[tuple[Any, ...], Row]:
        """Scored answers of the method by what was asked: question, gold position and the prompt itself."""
        # Rows of an older version do not say what their prompt was; then all of the run's prompts tell.
        every = self.run.read_json("prompts.json").get("questions") or str(
            self.run.path
        )
        rows = [
            r
            for r in self.run.rows(FILE)
            if r["method"] == self.names[1] and r.get("scores")
        ]
        return {
            (r["id"], r["gold_position"], r.get("prompt") or every): r for r in rows
        }


def write_comparison(
    folders: Sequence[Path], out: Path | None = None
) -> tuple[list[Path], list[Record], list[str]]:
    """Compare runs with the first one: a table and a figure in ``out``, else in ``compare/`` of the outputs;
    these files, the table's rows, and what must be said of it.

    Raises:
        UserError: Fewer than two runs, runs of several tasks, one that cannot be compared, or ``out`` is
            something else.
    """
    if len({folder.resolve() for folder in folders}) < max(len(folders), 2):
        value = " ".join(map(str, folders))
        raise UserError(
            "RUN", value, "two runs or more, each once", "posbench ls runs lists them"
        )
    runs = labelled([Compared.of(folder) for folder in folders])
    first = runs[0]
    task = first.listed.name("task")
    for run in runs:
        if (other := run.listed.name("task")) != task:
            hint = f"runs of {task}: posbench ls runs task={task}"
            raise UserError(
                "RUN",
                f"{run.run.path} (task {other})",
                f"runs of one task, {task}",
                hint,
            )
    out = (out or _place(runs)).absolute()
    need_place(out, (out / NAME).is_file(), "comparison")
    found = [differences(first, run) if run is not first else {} for run in runs]
    figure = _figure(runs)
    lines = [_row(run, more) for run, more in zip(runs, found, strict=True)]
    with new_folder(out) as made:
        write_csv(made / NAME, pd.DataFrame(lines))
        if figure:
            save(figure, made / "accuracy")
    said = [
        said_of(first, run, more) for run, more in zip(runs, found, strict=True) if more
    ]
    files = [out / NAME, *([out / "accuracy.png"] if figure else [])]
    return files, list(lines), [*filter(None, said)]


def _place(runs: Sequence[Compared]) -> Path:
    """A folder for a comparison, the same for the same runs."""
    names = [run.listed.hash for run in runs]
    folder = runs[0].run.path.resolve()
    top = (
        folder.parents[2]
        if re.fullmatch("v[0-9]+", folder.parent.name)
        else folder.parent
    )
    few = (
        "_".join(names)
        if len(names) < 5
        else f"{names[0]}_and_{len(names) - 1}_{digest(names)}"
    )
    return top / "compare" / few


def labelled(runs: Sequence[Compared]) -> list[Compared]:
    """The runs with labels of what tells them apart: model, method, settings, else the hash."""
    kept = [i for i in (0, 1) if len({run.names[i] for run in runs}) > 1]
    labels = []
    for run, settings in zip(
        runs, differing([run.listed for run in runs]), strict=True
    ):
        # A name apart tells a served twin well enough.
        told = {
            k: v
            for k, v in settings.items()
            if 1 not in kept or k not in ("model.base_url", "model.served")
        }
        varied = [f"{key.partition('.')[2]}={value}" for key, value in told.items()]
        text = ", ".join([*(shown(run.names[i]) for i in kept), *varied])
        labels.append(text if len(text) <= LABEL else f"{text[: LABEL - 3]}...")
    twice = {label for label in labels if not label or labels.count(label) > 1}
    return [
        replace(
            run, label=f"{label} {run.listed.hash}".strip() if label in twice else label
        )
        for run, label in zip(runs, labels, strict=True)
    ]


def _estimate(metrics: pd.DataFrame, metric: str) -> Estimate | None:
    """A number over all gold positions; None where there is none."""
    rows = overall(metrics, metric).dropna(subset="value")
    return next(
        (Estimate(r.value, r.ci_low, r.ci_high, int(r.n)) for r in rows.itertuples()),
        None,
    )


def differences(first: Compared, other: Compared) -> dict[str, Any]:
    """Score and position bias of a run minus those of the first, and over how many ``pairs`` of answers to
    one prompt: where one run asked all that the other did. Else, without pairs, they are differences of
    independent numbers, whose intervals are too wide where a part of the prompts is the same."""
    shared = [key for key in first.prompts if key in other.prompts]
    found: dict[str, Any] = {"pairs": 0}
    if not shared or len(shared) < min(len(first.prompts), len(other.prompts)):
        for part, (metric, _) in PARTS.items():
            a, b = (_estimate(run.metrics, metric) for run in (other, first))
            found[part] = combined((a, b), (1, -1), a.n + b.n) if a and b else None
        return found
    config = first.run.config("task", "runtime")
    task: Task = instantiate(config["task"], Task, "task")  # type: ignore[type-abstract]
    draws = {
        "resamples": config["runtime"]["resamples"],
        "seed": getattr(task, "seed", 0),
    }
    both = {UNMODIFIED: first, "other": other}
    rows = [
        {**run.prompts[key], "method": name}
        for name, run in both.items()
        for key in shared
    ]
    table = Tabulator(task=task, model="", unmodified=UNMODIFIED, **draws).metrics(rows)
    return {"pairs": len(shared)} | {
        part: _estimate(table, metric) for part, (_, metric) in PARTS.items()
    }


def said_of(first: Compared, run: Compared, found: Row) -> str:
    """What the differences of a run rest on, where that is not all of its prompts."""
    shared = len(first.prompts.keys() & run.prompts.keys())
    if not found["pairs"]:
        asked = f"{shared} of its {len(run.prompts)} prompts were asked in {first.label}, too"
        return f"{run.label}: unpaired, {asked}."
    if shared == len(run.prompts) == len(first.prompts):
        return ""
    return f"{run.label}: the differences are over the {shared} prompts that both runs asked."


def _row(run: Compared, found: Row) -> Row:
    """A run's row of the file."""
    model, method = run.names
    front = {
        "run": run.listed.hash,
        "label": run.label,
        "model": model,
        "method": method,
    }
    line: Row = {
        **front,
        "folder": str(run.run.path),
        "n": len(run.prompts),
        "pairs": found.get("pairs"),
    }
    for part, (metric, _) in PARTS.items():
        for name, at in (
            (part, _estimate(run.metrics, metric)),
            (f"{part}_difference", found.get(part)),
        ):
            line |= dict.fromkeys(columns(name)) | (ends(at, name) if at else {})
    return line


def look(lines: Sequence[Record]) -> list[dict[str, str]]:
    """The table as a terminal shows it: scores in %, all else in points."""

    def seen(at: Any) -> dict[str, str]:
        names = [name for part in PARTS for name in (part, f"{part}_difference")]
        told = {
            name.replace("_", " "): number(at, name, "+" * ("difference" in name))
            for name in names
        }
        label = (
            f" {at['label']}".removesuffix(f" {at['run']}").strip().replace(", ", "\n")
        )
        return {"run": f"{at['run']}\n{label}".strip(), **told, "n": str(at["n"])}

    return [seen(line) for line in lines]


def _figure(runs: Sequence[Compared]) -> Figure | None:
    """Scores over the gold position, or over subsets where prompts have none: a line for each run, and the
    unmodified model's where it is the same for all."""
    names = [
        UNMODIFIED if run.label == shown(UNMODIFIED) else run.label for run in runs
    ]
    tables = [run.metrics for run in runs]
    plain = [
        at_positions(run.unmodified)[["gold_position", "value"]].to_numpy().tolist()
        for run in runs
    ]
    if UNMODIFIED not in names and plain[0] and all(each == plain[0] for each in plain):
        names = [*names, UNMODIFIED]
        tables = [*tables, runs[0].unmodified]
    frames = [
        t.assign(method=name, model="", seed=0)
        for t, name in zip(tables, names, strict=True)
    ]
    frame = pd.concat(frames, ignore_index=True)
    if len(at_positions(frame)):
        figure = accuracy_by_position(frame)
        for under, over in itertools.combinations(figure.axes[0].lines, 2):
            if np.array_equal(
                under.get_ydata(), over.get_ydata()
            ):  # else it would not be seen
                under.set(linewidth=3, markersize=6.5)
    else:
        found = [(run, read_csv(run.run.path / "subsets.csv")) for run in runs]
        tables = [
            t[t["method"] == r.names[1]].assign(method=r.label)
            for r, t in found
            if t is not None
        ]
        if len(tables) < len(runs):
            return None
        figure = by_subset(pd.concat(tables).assign(model=""))
    sign(figure, list(dict.fromkeys(run.names[0] for run in runs)))
    return figure
