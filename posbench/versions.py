"""Which versions are installed, and whether posbench supports them; pyproject.toml states the ranges once."""

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from posbench.errors import UserError

__version__ = "0.1.0"


def _requirements() -> list[Requirement]:
    """Requirements in the package metadata, without extras; empty in a checkout that was never installed."""
    try:
        requirements = [Requirement(line) for line in requires("posbench") or ()]
    except PackageNotFoundError:
        return []
    no_extra = {"extra": ""}
    return [r for r in requirements if not r.marker or r.marker.evaluate(no_extra)]


def installed_versions() -> dict[str, str]:
    """Versions of posbench's requirements, for the record of a run."""
    return {r.name: version(r.name) for r in _requirements()}


def check_transformers() -> None:
    """Raise UserError for an unsupported transformers, before its import fails without saying why."""
    for requirement in _requirements():
        if requirement.name != "transformers":
            continue
        installed_version = version("transformers")
        supported = requirement.specifier
        if not supported.contains(installed_version, prereleases=True):
            allowed = f"version {supported}"
            hint = f"pip install '{requirement}'"
            raise UserError("transformers", installed_version, allowed, hint)


def version_line() -> str:
    """The versions that a time depends on, in one line."""
    return f"posbench {__version__}, torch {version('torch')}, transformers {version('transformers')}"
