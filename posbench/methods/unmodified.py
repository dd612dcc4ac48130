"""The unmodified model, as a method, so that every comparison has the same shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from posbench.methods.base import Method
from posbench.model.lm import LM

UNMODIFIED = "none"
"""What tables call it."""


@dataclass(frozen=True, kw_only=True)
class Unmodified(Method):
    """Changes nothing, and fits every model."""

    @contextmanager
    def applied(self, lm: LM) -> Iterator[LM]:
        """Yield the model as it is."""
        yield lm

    def neutral(self) -> Self:
        """Itself."""
        return self
