"""posbench: find, explain and remove position bias in language models."""

import importlib
from typing import TYPE_CHECKING, Any

from posbench.versions import __version__

if TYPE_CHECKING:
    from posbench import methods as methods
    from posbench.model.lm import LM as LM
    from posbench.model.load import load as load

__all__ = ["LM", "__version__", "load", "methods"]


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import: the command line's help and listings do without them.
    modules = {"LM": "posbench.model.lm", "load": "posbench.model.load"}
    if name in modules:
        importlib.import_module("posbench.versions").check_transformers()
        return getattr(importlib.import_module(modules[name]), name)
    if name == "methods":
        return importlib.import_module("posbench.methods")
    raise AttributeError(f"module 'posbench' has no attribute {name!r}")
