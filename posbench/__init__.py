"""posbench: find, explain and remove position bias in language models."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from posbench import methods as methods
    from posbench.lm import LM as LM
    from posbench.lm import load as load

__all__ = ["LM", "__version__", "load", "methods"]


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import: the command line's help and listings do without them.
    if name in ("LM", "load"):
        from posbench import lm

        return getattr(lm, name)
    if name == "methods":
        import importlib

        return importlib.import_module("posbench.methods")
    raise AttributeError(f"module 'posbench' has no attribute {name!r}")
