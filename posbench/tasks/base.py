"""What every task is: pure text in, numbers out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from posbench.sources import Source

Split = Literal["evaluation", "calibration"]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt with its gold answers.

    Attributes:
        id: Unique within the task and split, stable across runs.
        prompt: What the model is asked, before any chat template.
        answers: Accepted answers; the first one is the target of a calibration loss.
        gold_position: 0-based place of the gold item among the items; None where the task has no positions.
        items: Character span (start, end) in the prompt of every item (document, key-value pair), in order.
        cluster: Examples that share a question; intervals resample these, not single prompts.
        subset: Data set or subject, in a benchmark of several; scored apart in ``subsets.csv``.
        choices: Continuations of which the most likely one is the reply, as in ``answers``; empty: the model generates.
        chat: Whether a chat template may surround the prompt.
        system: System message, where a chat template surrounds the prompt.
        max_new_tokens: Tokens to generate at most, instead of the task's.
        stop: Texts that end the reply.
        document: Character span of the prompt from whose end ``truncation=document`` cuts.
        separator: Text put where the document was cut.
        meta: Anything else worth a column.
    """

    id: str
    prompt: str
    answers: tuple[str, ...]
    gold_position: int | None = None
    items: tuple[tuple[int, int], ...] = ()
    cluster: str = ""
    subset: str = ""
    choices: tuple[str, ...] = ()
    chat: bool = True
    system: str = ""
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    document: tuple[int, int] | None = None
    separator: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A benchmark. The dataclass fields are the keys of ``conf/task/<name>.yaml``.

    ``version`` increases when a number can move; ``metric`` is the score that tables and "best" refer to, in 0..1;
    ``size`` says in a few words how much there is; ``overall`` says whether the total is the mean over examples or over
    the means of the subsets.

    Truncation of prompts over the context window: ``refuse``; ``middle`` cuts the middle of the task's prompt, before any
    chat template (LongBench); ``document`` cuts the end of ``Example.document`` (ZeroSCROLLS, L-Eval).
    """

    version: ClassVar[str]
    metric: ClassVar[str]
    source: ClassVar[str]
    licence: ClassVar[str]
    size: ClassVar[str]
    overall: ClassVar[Literal["examples", "subsets"]] = "examples"

    name: str
    max_new_tokens: int
    truncation: Literal["refuse", "middle", "document"] = "refuse"

    @property
    def chance(self) -> float | None:
        """Accuracy of a guess among the items, where that means something."""
        return None

    def averages(self) -> Mapping[str, tuple[str, ...]]:
        """Named means over the means of subsets or of earlier averages, such as a benchmark's categories."""
        return {}

    @abstractmethod
    def examples(self, split: Split) -> list[Example]:
        """All examples of a split. No calibration question ever appears in the evaluation.

        Raises:
            UserError: A file is missing or malformed, or a position does not exist.
        """

    def files(self) -> tuple[Source, ...]:
        """The files that :meth:`examples` reads, for ``posbench fetch``; open them with :func:`posbench.sources.local`."""
        return ()

    @abstractmethod
    def score(self, example: Example, text: str) -> dict[str, float]:
        """Metrics of one reply; pure."""
