"""What every method is: plain data plus one context manager."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from posbench.model.lm import LM


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """An intervention at inference time. The dataclass fields are the keys of ``conf/method/<name>.yaml``."""

    @property
    def needs_prompt(self) -> bool:
        """Whether the method treats the last prompt token apart, so that a text without a prompt has no
        result under it."""
        return False

    @abstractmethod
    def check(self, lm: LM) -> None:
        """Compare the parameters with the model.

        Raises:
            UserError: A parameter does not fit this model; the message names it and what is allowed.
        """

    @abstractmethod
    def applied(self, lm: LM) -> AbstractContextManager[LM]:
        """Apply the method inside a ``with`` block; leaving it, also by an exception, restores the model."""

    @abstractmethod
    def neutral(self) -> Self:
        """The same method with parameters under which it must change nothing (used by the identity tests)."""
