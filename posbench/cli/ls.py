"""``posbench ls``: the available choices; it imports as little as it can."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posbench import paths
from posbench.cli.options import flag, option
from posbench.errors import UserError, choices, near
from posbench.files.choices import read_choice
from posbench.model.families import FAMILIES
from posbench.report.console import show_lists
from posbench.report.experiments import trains_networks
from posbench.schema import resolve_target
from posbench.tasks import Task

TASK_COLUMNS = ("version", "metric", "size", "source", "licence")
GROUP_OF_KIND = {plural: group for group, plural in paths.PLURALS.items()}
CHOICES = *GROUP_OF_KIND, "experiments", "families"


def ls(args: list[str]) -> int:
    """List what there is to choose from, with a line on each.

    usage: posbench ls [KIND] [--json] [--config-dir DIR]

      KIND              models, methods, tasks, searches, studies, runtimes, experiments or families;
                        all of them unless said; `posbench ls runs --help` says how runs are found
      --json            as JSON
      --config-dir DIR  your own YAML files, too

    The column from names the installed plug-in that brings a choice. A terminal gets a table, a pipe tab-separated
    columns below a header.

    example: posbench ls experiments | cut -f 1
    """
    config_dir, args = option(args, "--config-dir")
    as_json, names = flag(args, "--json")
    if len(names) > 1 or (names and names[0] not in CHOICES):
        typed = " ".join(names)
        allowed = [*CHOICES, "runs"]
        hint = near(typed, allowed, "posbench ls models")
        raise UserError("ls", typed, ", ".join(allowed), hint)
    records = {kind: _records(kind, config_dir) for kind in names or CHOICES}
    show_lists(records, as_json)
    return 0


def _records(kind: str, config_dir: str | None) -> list[dict[str, object]]:
    """Return a row for each choice of a kind (models, methods, ..., families), with values by column.

    Args:
        kind: The word behind ``posbench ls``.
        config_dir: The user's folder of YAML files; None: the folder where it is looked for by default.
    """
    # Families of architectures are code; all else is a YAML file each.
    if kind == "families":
        return [
            {
                "name": family.name,
                "model_type": ", ".join(family.model_types),
                "positions": family.position,
            }
            for family in FAMILIES
        ]
    group = GROUP_OF_KIND.get(kind, "experiment")
    folders = paths.config_folders(config_dir)
    records: list[dict[str, object]] = []
    for name in choices(*paths.group_folders(group, folders)):
        file = paths.find_choice(group, name, folders)
        if file:
            origin = {"from": paths.distribution_of(file)}
            data = read_choice(group, name, folders)
            records.append({"name": name, **_facts(kind, file, data), **origin})
    return records


def _facts(kind: str, file: Path, data: Mapping[str, Any]) -> dict[str, object]:
    """Return the columns of a choice in `posbench ls`, which depend on its kind.

    Args:
        kind: The word behind ``posbench ls``.
        file: The choice's YAML file.
        data: Its keys, and those of the files that it extends.
    """
    if kind == "tasks":
        cls, _ = resolve_target(data, Task, "task")  # type: ignore[type-abstract]
        return {column: getattr(cls, column) for column in TASK_COLUMNS}
    if kind != "experiments":
        return {"what": _first_sentence(file.read_text("utf-8")) or data.get("path")}
    experiment = data.get("experiment") or {}
    needs = ""
    if trains_networks({**data, "defaults": data.get("defaults") or []}):
        needs = "training"
    elif experiment.get("needs_weights"):
        needs = "weights"
    return {
        "what": experiment.get("title"),
        "minutes": experiment.get("minutes"),
        "needs": needs,
    }


def _first_sentence(text: str) -> str:
    """The first sentence of a YAML's first comment."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    comment = " ".join(line.lstrip("# ") for line in lines)
    # The stop of "et al." ends no sentence.
    comment = comment.replace("et al. ", "et al.\0")
    return comment.split(". ")[0].replace("\0", " ").rstrip(".")
