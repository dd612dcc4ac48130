"""What every method is: plain data plus one context manager."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from posbench.files.sources import Source
from posbench.model import rope
from posbench.model.guard import alone
from posbench.model.lm import LM
from posbench.schema import verify


class Needs(NamedTuple):
    """What a method asks of a model: rotary embeddings (``rope``), whose angles the base alone sets
    (``plain``), in attention that runs through the library's functions, where the method rotates head by head
    (``by_hand``)."""

    rope: bool = False
    plain: bool = False
    by_hand: bool = False


class Folded(NamedTuple):
    """A method as a change of the checkpoint: the factors of columns of the query and key projections, by
    layer and channel, and keys of the config's ``rope_parameters``."""

    columns: Mapping[int, Mapping[int, float]] = {}
    rope: Mapping[str, Any] = {}


class SweepClaims(NamedTuple):
    """A paper's reading of a sweep over one of a method's parameters.

    A larger value moves attention to the beginning (``attention``), favours the beginning (``score``) and,
    from 0 up, means more position bias (``bias``); the average score peaks (``peak``) from the lowest to the
    highest of ``best``.
    """

    attention: str
    score: str
    bias: str
    peak: str
    best: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """An intervention at inference time. The fields are the keys of ``method.*``; a default stands here
    alone.

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

    @classmethod
    def short_name(cls) -> str:
        """That of its module, as a config chooses it."""
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def files(cls, values: Mapping[str, Any]) -> tuple[Source, ...]:
        """The files that its parameters name; what they hold is part of a run's identity."""
        return ()

    @property
    def needs_prompt(self) -> bool:
        """Whether the last prompt token is treated apart, so that a text without a prompt has no result."""
        return False

    def check(self, lm: LM) -> None:
        """Raise UserError, which names the parameter and what is allowed, unless all fit the model."""
        verify(self, "method")
        if self.needs.rope:
            name = self.short_name()
            rope.check(lm, name, plain=self.needs.plain, by_hand=self.needs.by_hand)

    def prefill(self) -> "Method | None":
        """The method that all tokens of a prompt but the last run under, each by those before it alone, so
        that prompts and methods may share what they have in common; None where a prompt is read as one."""
        return None

    def records(self) -> tuple[Collection[int], Collection[int]]:
        """Channels of the attention input, and layers, that it needs of a prefill that it shares."""
        return (), ()

    def folded(self, lm: LM) -> Folded | None:
        """What of the checkpoint to change so that it computes the same without the method; None where
        nothing does."""
        return None

    def twin(self) -> Self:
        """The nearest method that :meth:`folded` has an answer for; itself where that is not another."""
        return self

    @contextmanager
    def applied(self, lm: LM) -> Iterator[LM]:
        """Apply the method inside a ``with`` block; leaving it, also by an exception, restores the model.

        Blocks nest in one thread; see :func:`posbench.model.guard.alone` for others and for crossed exits.
        """
        self.check(lm)
        with alone(lm, self.short_name(), self.changed(lm)):
            yield lm

    @abstractmethod
    def changed(self, lm: LM) -> AbstractContextManager[object]:
        """The block of :meth:`applied` for a model that :meth:`check` has accepted."""

    @abstractmethod
    def neutral(self) -> Self:
        """The same method with parameters under which it must change nothing (used by the identity tests)."""
