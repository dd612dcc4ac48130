"""Where the configs, experiments and embedded models are, in a checkout and in an installed wheel."""

import sys
from pathlib import Path

from posbench.errors import UserError

PACKAGE = Path(__file__).resolve().parent


def _beside_or_inside(name: str) -> Path:
    """A top-level folder: inside the package when installed from a wheel, beside it in a checkout."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


CONF = _beside_or_inside("conf")
EXPERIMENTS = _beside_or_inside("experiments")
MODELS = PACKAGE / "embedded" / "models"
EMBEDDED = "posbench://"


def model_path(path: str) -> str:
    """Resolve ``posbench://NAME`` to the folder of an embedded model; other paths and hub ids pass
    through."""
    embedded = path.startswith(EMBEDDED)
    return str(MODELS / path.removeprefix(EMBEDDED) if embedded else Path(path).expanduser())


def config_folders(own: str | None, field: str = "--config-dir") -> list[Path]:
    """posbench's config folder and the user's own, whose modules can be imported from then on.

    Args:
        own: The user's folder, or None.
        field: What named it, for the error.

    Raises:
        UserError: There is no such folder.
    """
    if own is None:
        return [CONF]
    folder = Path(own).expanduser().absolute()
    if not folder.is_dir():
        raise UserError(field, own, "a folder with your YAML files", "check the path")
    sys.path += [str(folder)] if str(folder) not in sys.path else []
    return [CONF, folder]
