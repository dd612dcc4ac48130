"""The user's own classes that a run's config names: found again in the --config-dir that the run records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posbench import paths
from posbench.errors import UserError
from posbench.files.imports import locate_module
from posbench.run.folder import CONFIG_DIR, PROVENANCE, RunDir

_chosen_folders: list[Path] = []
"""The --config-dir of the running verb, which replaces the recorded ones; empty without one."""


@contextmanager
def chosen_config_dir(folder: str | None) -> Iterator[None]:
    """Take a folder as the config folder of all runs opened in the block, in place of the one that they record.

    Their own classes are imported from there.

    Args:
        folder: The folder; None: the one that each run records.

    Raises:
        UserError: There is no such folder.
    """
    if folder is None:
        yield
        return
    _chosen_folders.append(paths.config_folders(folder)[-1])
    try:
        yield
    finally:
        _chosen_folders.pop()


def config_dir_chosen() -> Path | None:
    """Return the --config-dir of the verb that runs now; None without one."""
    return _chosen_folders[-1] if _chosen_folders else None


def make_importable(run: RunDir) -> list[Path]:
    """Make the user's own classes in a run's config importable.

    Args:
        run: The run.

    Returns:
        The config folders of the run, for readers of their files.

    Raises:
        UserError: See :func:`import_from`.
    """
    recorded = run.facts(PROVENANCE).get(CONFIG_DIR)
    return import_from(recorded, run.config(), f"run {run.path.name}")


def import_from(recorded: str | None, config: Any, reader: str) -> list[Path]:
    """Make the user's own classes in a config importable from a config folder.

    That is the folder chosen for this verb, else the recorded one.

    Args:
        recorded: The recorded folder; None: there is none.
        config: The config.
        reader: Whose config it is, in words.

    Returns:
        The config folders, posbench's first.

    Raises:
        UserError: The folder is gone, or a module of its name was imported from another one: no config may be read
            with the code of another.
    """
    names = _own_modules(config)
    folder = config_dir_chosen() or (Path(recorded) if recorded else None)
    if folder is None:
        return paths.config_folders(None)
    if not folder.is_dir():
        missing = [f"{name}.py" for name in names if locate_module(name) is None]
        # An installed package has them.
        if not missing:
            return paths.config_folders(None)
        allowed = f"the folder with {', '.join(missing)} of {reader}"
        hint = "it is gone: add --config-dir DIR, where it is now"
        raise UserError("--config-dir", str(folder), allowed, hint)
    folders = paths.config_folders(str(folder))
    for name in names:
        stands_there = (folder / f"{name}.py").is_file() or (folder / name).is_dir()
        location = locate_module(name)
        if not stands_there or location is None or location.file is None:
            continue  # an installed module, or none: the import says so
        if not location.file.is_relative_to(folder.resolve()):
            allowed = f"{name} of {folder}, which {reader} was made with"
            hint = "rename one of the two modules, or read them one by one"
            raise UserError("module", str(location.file), allowed, hint)
    return folders


def _own_modules(node: Any) -> list[str]:
    """Return the top-level packages, other than posbench, of all classes that a config names (``_target_``)."""
    names: list[str] = []
    if isinstance(node, Mapping):
        target = node.get("_target_")
        if isinstance(target, str):
            names.append(target.partition(".")[0])
        for value in node.values():
            names += _own_modules(value)
    return [name for name in dict.fromkeys(names) if name != "posbench"]
