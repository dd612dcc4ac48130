"""What every method is: plain data plus one context manager."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from posbench.model import rope
from posbench.model.lm import LM
from posbench.schema import verify


class Needs(NamedTuple):
    """What a method asks of a model.

    Attributes:
        rope: A rotary position embedding.
        plain: One whose base alone sets its angles.
        by_hand: Attention that runs through the library's functions, in which the method rotates head by
            head.
    """

    rope: bool = False
    plain: bool = False
    by_hand: bool = False


class SweepClaims(NamedTuple):
    """A paper's reading of a sweep over one of a method's parameters.

    Attributes:
        attention: A larger value moves attention to the beginning.
        score: A larger value favours the beginning.
        bias: A larger value means more position bias, for values from 0 up.
        peak: The average score peaks for a value in ``best``.
        best: Lowest and highest of these values.
    """

    attention: str
    score: str
    bias: str
    peak: str
    best: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """An intervention at inference time. The dataclass fields are the keys of ``method.*``; a default stands
    here alone.

    Attributes:
        needs: What it asks of a model; others are refused by name.
        rows_per_prompt: Whether a prompt may run as several rows of a batch.
        sweep_claims: What a paper says of sweeps, by field.
    """

    needs: ClassVar[Needs] = Needs()
    rows_per_prompt: ClassVar[bool] = False
    sweep_claims: ClassVar[Mapping[str, SweepClaims]] = {}

    @classmethod
    def example(cls, lm: LM) -> Self:
        """An instance that fits a model and changes it, for the contract tests and the latency study."""
        return cls()

    @property
    def needs_prompt(self) -> bool:
        """Whether the last prompt token is treated apart, so that a text without a prompt has no result."""
        return False

    def check(self, lm: LM) -> None:
        """Compare the parameters with the model.

        Raises:
            UserError: A parameter does not fit this model; the message names it and what is allowed.
        """
        verify(self, "method")
        if self.needs.rope:
            rope.check(
                lm,
                type(self).__module__.rpartition(".")[2],
                plain=self.needs.plain,
                by_hand=self.needs.by_hand,
            )

    @abstractmethod
    def applied(self, lm: LM) -> AbstractContextManager[LM]:
        """Apply the method inside a ``with`` block; leaving it, also by an exception, restores the model."""

    @abstractmethod
    def neutral(self) -> Self:
        """The same method with parameters under which it must change nothing (used by the identity tests)."""
