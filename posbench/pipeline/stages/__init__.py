"""The stages of a run, in order: search, study, intervene, evaluate, report. Each module has a function ``run``."""

from importlib import import_module
from typing import Any


def stage_module(name: str) -> Any:
    """Return the module of a stage, so that a run imports those that it takes alone."""
    return import_module(f"{__name__}.{name}")
