"""Which versions are installed, and whether posbench supports them; pyproject.toml states the ranges once."""

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from posbench.errors import UserError

__version__ = "0.1.0"


def _needed() -> list[Requirement]:
    """What the package metadata asks for, without extras; nothing in a checkout that was never installed."""
    try:
        lines = [Requirement(line) for line in requires("posbench") or ()]
    except PackageNotFoundError:
        return []
    return [
        line for line in lines if not line.marker or line.marker.evaluate({"extra": ""})
    ]


def installed() -> dict[str, str]:
    """Versions of what posbench needs, for the record of a run."""
    return {requirement.name: version(requirement.name) for requirement in _needed()}


def check() -> None:
    """Raise UserError for an unsupported transformers, before its import fails without saying why."""
    for requirement in (r for r in _needed() if r.name == "transformers"):
        found = version("transformers")
        if not requirement.specifier.contains(found, prereleases=True):
            hint = f"pip install '{requirement}'"
            raise UserError(
                "transformers", found, f"version {requirement.specifier}", hint
            )


def summary() -> str:
    """The versions that a time depends on, in one line."""
    return f"posbench {__version__}, torch {version('torch')}, transformers {version('transformers')}"
