"""Where the configs, experiments and embedded models are, in a checkout and in an installed wheel."""

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from posbench.errors import UserError

PACKAGE = Path(__file__).resolve().parent


# Inside the package when installed from a wheel, next to it in a checkout.
_ROOT = PACKAGE if (PACKAGE / "conf").is_dir() else PACKAGE.parent
CONF = _ROOT / "conf"
EXPERIMENTS = _ROOT / "experiments"
PAPERS = tuple(sorted(file.parent for file in EXPERIMENTS.glob("*/__init__.py")))
"""A folder for each paper, laid out as one that a user gives by ``--config-dir``; its modules are a package."""
BUILT_IN = (CONF, *PAPERS)
"""posbench's own config folders."""
PLUGINS = "posbench.plugins"
"""Group of the entry points of plug-ins: each names a package, laid out as a folder given by ``--config-dir``."""
REFERENCE_TABLES = ("reference/*.csv", "*/reference/*.csv")
"""Tables below :data:`EXPERIMENTS` with the papers' own numbers: shared between papers, and each paper's."""
MODELS = PACKAGE / "embedded" / "models"
EMBEDDED = "posbench://"
"""Prefix of the path of an embedded model."""
WHEEL = "wheel://"
"""Prefix of the path of a model in a wheel of the package index."""
GGUF = ".gguf"
"""Suffix of a GGUF file."""
PLURALS = {
    "model": "models",
    "task": "tasks",
    "method": "methods",
    "search": "searches",
    "runtime": "runtimes",
    "study": "studies",
}
"""Plural of each group of choices, a folder of :data:`CONF`."""
GROUPS = tuple(PLURALS)
_FOLDERS_OF_CHOICES = (*GROUPS, "runtime/cluster", "experiment")

if str(EXPERIMENTS) not in sys.path:
    sys.path.append(str(EXPERIMENTS))


def model_path(path: str) -> str:
    """``posbench://NAME`` as the folder of an embedded model; other paths and hub ids pass through."""
    if path.startswith(EMBEDDED):
        return str(MODELS / path.removeprefix(EMBEDDED))
    return str(Path(path).expanduser())


@cache
def plugins() -> Mapping[Path, str]:
    """The config folders of the installed plug-ins, each with the name of its distribution. None is imported.

    Raises:
        UserError: A plug-in has no choices, or one that posbench or another plug-in has, too.
    """
    found = dict[Path, str]()
    # In one order, whatever that of the installation.
    for entry in sorted(entry_points(group=PLUGINS)):
        distribution = entry.dist.name if entry.dist else entry.name
        field = f"plug-in {distribution}"
        folder = _package_folder(entry.value)
        if folder is None or not any(
            any((folder / group).glob("*.yaml")) for group in _FOLDERS_OF_CHOICES
        ):
            allowed = "an installed package that holds YAML files, as method/NAME.yaml"
            hint = f"install {distribution} again, or uninstall it"
            raise UserError(field, entry.value, allowed, hint)
        if taken := _taken_choice(folder, (*BUILT_IN, *found)):
            choice, file = taken
            allowed = (
                f"names that {_distribution(file, found) or 'posbench'} does not have"
            )
            hint = f"rename it in {distribution}, or uninstall {distribution}"
            raise UserError(field, choice, allowed, hint)
        found[folder] = distribution
    return found


def _package_folder(name: str) -> Path | None:
    """The folder of a package, without importing it; None if it is not installed."""
    top, *rest = name.split(".")
    spec = find_spec(top) if top.isidentifier() else None
    roots = (spec and spec.submodule_search_locations) or ()
    folders = (Path(root, *rest).absolute() for root in roots)
    return next((folder for folder in folders if folder.is_dir()), None)


def _taken_choice(folder: Path, others: Sequence[Path]) -> tuple[str, Path] | None:
    """The first choice of a folder that one of the others has, too: as it is typed, and the other's file."""
    for group in _FOLDERS_OF_CHOICES:
        for file in sorted((folder / group).glob("*.yaml")):
            other = find_choice(group, file.stem, others)
            if other:
                return f"{group}={file.stem}", other
    return None


def distribution_of(file: Path) -> str | None:
    """The distribution of the plug-in that a choice's file belongs to; None if it belongs to none."""
    return _distribution(file, plugins())


def _distribution(file: Path, folders: Mapping[Path, str]) -> str | None:
    return next((folders[f] for f in folders if file.is_relative_to(f)), None)


def config_folders(user_folder: str | None, field: str = "--config-dir") -> list[Path]:
    """posbench's config folders, those of plug-ins, and the user's, if any, whose modules can be imported from then on.

    Raises:
        UserError: There is no such folder, a module in it has the name of a paper's package, or it has a choice of
            posbench or of a plug-in; ``field`` is the argument that named the folder. Or a plug-in is wrong, see
            :func:`plugins`.
    """
    folders = [*BUILT_IN, *plugins()]
    if user_folder is None:
        return folders
    folder = Path(user_folder).expanduser().absolute()
    if not folder.is_dir():
        allowed = "an existing folder with your YAML files"
        raise UserError(field, user_folder, allowed, "check the path")
    if folder in folders:
        return folders
    for paper in PAPERS:
        for module in (folder / f"{paper.name}.py", folder / paper.name):
            if module.exists():
                # Python would import posbench's in its place, without a word.
                allowed = f"no module of the name of posbench's {paper.name}"
                raise UserError(field, str(module), allowed, "rename it")
    if taken := _taken_choice(folder, folders):
        choice, file = taken
        plugin = distribution_of(file)
        owner = f"the plug-in {plugin}" if plugin else "posbench"
        hint = "rename it, or uninstall the plug-in" if plugin else "rename it"
        raise UserError(
            field, str(folder), f"no {choice}, which {owner} has, too", hint
        )
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return [*folders, folder]


def own_folder(folders: Sequence[Path]) -> Path | None:
    """The user's own among config folders; None without one."""
    given = (f for f in folders if f not in BUILT_IN and f not in plugins())
    return next(given, None)


def find_choice(
    group: str, name: str, folders: Sequence[Path] = BUILT_IN
) -> Path | None:
    """The YAML file of a choice, from the first config folder that has it; None where none has.

    Args:
        group: Its group: ``model``, ``study``, ``experiment``, ...
        name: Its name.
        folders: Config folders.
    """
    files = (folder / group / f"{name}.yaml" for folder in folders)
    return next((file for file in files if file.is_file()), None)


def group_folders(group: str, folders: Sequence[Path] = BUILT_IN) -> list[Path]:
    """The folder of a group in each config folder; not all exist."""
    return [folder / group for folder in folders]
