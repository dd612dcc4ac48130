"""Where the configs, experiments and embedded models are, in a checkout and in an installed wheel."""

import sys
from collections.abc import Sequence
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

if str(EXPERIMENTS) not in sys.path:
    sys.path.append(str(EXPERIMENTS))


def model_path(path: str) -> str:
    """``posbench://NAME`` as the folder of an embedded model; other paths and hub ids pass through."""
    if path.startswith(EMBEDDED):
        return str(MODELS / path.removeprefix(EMBEDDED))
    return str(Path(path).expanduser())


def config_folders(user_folder: str | None, field: str = "--config-dir") -> list[Path]:
    """posbench's config folders and the user's, if any, whose modules can be imported from then on.

    Raises:
        UserError: There is no such folder, or a module in it has the name of a paper's package; ``field`` is the
            argument that named the folder.
    """
    if user_folder is None:
        return list(BUILT_IN)
    folder = Path(user_folder).expanduser().absolute()
    if not folder.is_dir():
        allowed = "an existing folder with your YAML files"
        raise UserError(field, user_folder, allowed, "check the path")
    if folder in BUILT_IN:
        return list(BUILT_IN)
    for paper in PAPERS:
        for module in (folder / f"{paper.name}.py", folder / paper.name):
            if module.exists():
                # Python would import posbench's in its place, without a word.
                allowed = f"no module of the name of posbench's {paper.name}"
                raise UserError(field, str(module), allowed, "rename it")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return [*BUILT_IN, folder]


def own_folder(folders: Sequence[Path]) -> Path | None:
    """The user's own among config folders; None without one."""
    return next((folder for folder in folders if folder not in BUILT_IN), None)


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
