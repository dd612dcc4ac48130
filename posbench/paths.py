"""Where the configs, experiments and embedded models are, in a checkout and in an installed wheel."""

import sys
from pathlib import Path

from posbench.errors import UserError

PACKAGE = Path(__file__).resolve().parent


# Inside the package when installed from a wheel, next to it in a checkout.
_ROOT = PACKAGE if (PACKAGE / "conf").is_dir() else PACKAGE.parent
CONF = _ROOT / "conf"
EXPERIMENTS = _ROOT / "experiments"
MODELS = PACKAGE / "embedded" / "models"
EMBEDDED = "posbench://"
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


def model_path(path: str) -> str:
    """``posbench://NAME`` as the folder of an embedded model; other paths and hub ids pass through."""
    if path.startswith(EMBEDDED):
        return str(MODELS / path.removeprefix(EMBEDDED))
    return str(Path(path).expanduser())


def config_folders(user_folder: str | None, field: str = "--config-dir") -> list[Path]:
    """posbench's config folder and the user's, if any, whose modules can be imported from then on.

    Raises:
        UserError: There is no such folder; ``field`` is what named it.
    """
    if user_folder is None:
        return [CONF]
    folder = Path(user_folder).expanduser().absolute()
    if not folder.is_dir():
        allowed = "an existing folder with your YAML files"
        raise UserError(field, user_folder, allowed, "check the path")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return [CONF, folder]
