"""The unmodified model, as a method, so that every comparison has the same shape."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

from posbench.methods.base import CheckpointChange, Continuation, Method
from posbench.model.lm import LM


@dataclass(frozen=True, kw_only=True)
class Unmodified(Method):
    """Changes nothing, and fits every model."""

    def prefill(self) -> Self:
        """Itself."""
        return self

    def continuation(self) -> Continuation:
        """Nothing."""
        return Continuation()

    def folded(self, lm: LM) -> CheckpointChange:
        """Nothing."""
        return CheckpointChange()

    def changed(self, lm: LM) -> AbstractContextManager[None]:
        """An empty block."""
        return nullcontext()

    def neutral(self) -> Self:
        """Itself."""
        return self
