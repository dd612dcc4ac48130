"""Which versions are installed, and whether posbench supports them; pyproject.toml states the ranges once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from posbench.errors import UserError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__version__ = "0.1.0"
LOCAL_EXTRA = "local"
"""The extra with torch and transformers."""
DISTRIBUTION = "positionbench"
"""Name on the package index, where ``posbench`` is another project."""


def install_hint(extra: str) -> str:
    """The command that installs posbench with one of its extras, from the checkout that it was installed from."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from pathlib import Path
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        origin = json.loads(
            distribution(DISTRIBUTION).read_text("direct_url.json") or "{}"
        )
    except PackageNotFoundError:
        origin = {}
    # pip writes dir_info for a folder alone, and no file at all for what comes from an index.
    if "dir_info" in origin:
        checkout = url2pathname(urlsplit(origin["url"]).path)
        if Path(checkout).is_dir():
            flag = "-e " if origin["dir_info"].get("editable") else ""
            return f"pip install {flag}'{checkout}[{extra}]'"
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def _requirements() -> list[Requirement]:
    """Requirements in the package metadata, those of a model in process too; empty if it was never installed."""
    # These two take half the time of `posbench --help`, which needs neither.
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(line) for line in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        return []
    local = {"extra": LOCAL_EXTRA}
    return [r for r in requirements if not r.marker or r.marker.evaluate(local)]


@cache  # a process keeps the versions it began with, and the metadata of 29 packages take 16 ms
def version_of(name: str) -> str | None:
    """Version of an installed package; None where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def installed_versions(plugins: Iterable[str] = ()) -> dict[str, str]:
    """Versions of those of posbench's requirements that are installed, and of plug-ins, for the record of a run."""
    names = [*(requirement.name for requirement in _requirements()), *plugins]
    found = {name: version_of(name) for name in names}
    return {name: number for name, number in found.items() if number}


def check_transformers() -> None:
    """Raise UserError for an unsupported transformers, before its import fails without saying why."""
    for requirement in _requirements():
        if requirement.name != "transformers":
            continue
        installed_version = version_of("transformers")
        supported = requirement.specifier
        if installed_version and not supported.contains(
            installed_version, prereleases=True
        ):
            allowed = f"version {supported}"
            hint = f"pip install 'transformers{supported}'"
            raise UserError("transformers", installed_version, allowed, hint)


def version_line() -> str:
    """The versions that a time depends on, in one line."""
    torch, transformers = map(version_of, ("torch", "transformers"))
    return f"posbench {__version__}, torch {torch}, transformers {transformers}"
