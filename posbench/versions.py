"""Which versions are installed, and whether posbench supports them; the ranges are stated once, in
pyproject.toml."""

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from posbench.errors import UserError

__version__ = "0.1.0"


def _needed() -> list[Requirement]:
    """What the package metadata asks for here, without extras; nothing where it was never installed."""
    try:
        lines = [Requirement(line) for line in requires("posbench") or ()]
    except PackageNotFoundError:
        return []
    return [line for line in lines if not line.marker or line.marker.evaluate({"extra": ""})]


def installed() -> dict[str, str]:
    """Versions of what posbench needs, for the record of a run."""
    return {requirement.name: version(requirement.name) for requirement in _needed()}


def check() -> None:
    """Refuse an unsupported transformers before its import fails in a place that says nothing.

    Raises:
        UserError: The installed version lies outside the range in posbench's package metadata.
    """
    for requirement in _needed():
        found = version(requirement.name) if requirement.name == "transformers" else ""
        if found and not requirement.specifier.contains(found, prereleases=True):
            hint = f"pip install '{requirement}'"
            raise UserError("transformers", found, f"version {requirement.specifier}", hint)


def summary() -> str:
    """The versions that a time depends on, in one line."""
    return f"posbench {__version__}, torch {version('torch')}, transformers {version('transformers')}"
