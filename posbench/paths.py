"""Where the configs, experiments and embedded models are, in a checkout and in an installed wheel."""

from pathlib import Path

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
