"""Is the installed transformers one that posbench supports? The range is stated once, in pyproject.toml."""

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

import posbench
from posbench.errors import UserError


def check() -> None:
    """Refuse an unsupported transformers before its import fails in a place that says nothing.

    Raises:
        UserError: The installed version lies outside the range in posbench's package metadata.
    """
    try:
        needed = [Requirement(line) for line in requires("posbench") or ()]
    except PackageNotFoundError:
        return  # a checkout that was never installed has no metadata
    for requirement in needed:
        if requirement.name == "transformers":
            installed = version("transformers")
            if not requirement.specifier.contains(installed, prereleases=True):
                raise UserError(
                    "transformers",
                    installed,
                    f"version {requirement.specifier}",
                    f"pip install '{requirement}'",
                )


def summary() -> str:
    """The versions that a time depends on, in one line."""
    others = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"posbench {posbench.__version__}, {others}"
