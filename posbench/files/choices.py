"""The YAML file of a choice, and the files that it extends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posbench import paths
from posbench.files.parse import CORRECT_FILE, Object, read_yaml


def read_choice(group: str, name: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Return the keys of a choice, with those of the files that it extends by ``defaults``.

    Args:
        group: Its group: ``method``, ``task``, ...
        name: Its name.
        folders: Config folders.
    """
    keys: dict[str, Any] = {"name": name}
    for data in read_choice_files(group, name, folders).values():
        keys |= data
    return keys


def read_choice_files(
    group: str, name: str, folders: Sequence[Path], readers: Sequence[Path] = ()
) -> dict[Path, dict[str, Any]]:
    """Return the data of the file of a choice and of those that it extends; later ones win, as Hydra merges them.

    Args:
        group: Its group.
        name: Its name.
        folders: Config folders.
        readers: Files that extend it, which it does not extend in turn.
    """
    file = paths.find_choice(group, name, folders)
    if file is None or file in readers:
        return {}
    data = read_yaml(file, Object | None, hint=CORRECT_FILE) or {}
    entries = data.get("defaults")
    entries = entries if isinstance(entries, list) else []
    names = [entry for entry in entries if isinstance(entry, str)]
    if "_self_" not in names:
        names.append("_self_")
    found = dict[Path, dict[str, Any]]()
    for entry in names:
        if entry == "_self_":
            found[file] = data
            continue
        found |= read_choice_files(group, entry, folders, [*readers, file])
    return found
