"""Plug-ins laid out as pip leaves them, without the seconds that it takes."""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

from posbench import paths

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "plugin"


def forget() -> None:
    """Look up anew what is installed, as another process does."""
    paths.plugins.cache_clear()
    for name in [*sys.modules]:
        if name.startswith(("plugged", "posbench_rotate")):
            del sys.modules[name]


def install(site: Path, distribution: str, value: str, **choices: str) -> Path:
    """Lay out an installed distribution as pip leaves it; return the folder of its package.

    Args:
        site: Where to.
        distribution: Its name.
        value: Value of its entry point.
        choices: The text of a YAML file by the method's name.
    """
    info = site / f"{distribution.replace('-', '_')}-1.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n"
    )
    (info / "entry_points.txt").write_text(f"[{paths.PLUGINS}]\nx = {value}\n")
    package = site.joinpath(*value.split("."))
    for name, text in choices.items():
        file = package / "method" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return package


def install_example(site: Path) -> None:
    """Lay out the plug-in of the documentation as its pyproject.toml describes it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    (package,) = project["entry-points"][paths.PLUGINS].values()
    install(site, project["name"], package)
    shutil.copytree(EXAMPLE / package, site / package)
