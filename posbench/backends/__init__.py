"""Backends: answer prompts for models that are not in this process."""

from posbench.backends.base import Backend

__all__ = ["Backend"]
