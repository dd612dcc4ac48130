"""What every task is: pure text in, numbers out."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from posbench.errors import UserError
from posbench.files.sources import Source

Split = Literal["evaluation", "calibration"]
Truncation = Literal["refuse", "middle", "document", "words"]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt with its gold answers.

    Attributes:
        id: Unique within the task and split, stable across runs.
        prompt: What the model is asked, before any chat template.
        answers: Accepted answers; the first one is the target of a calibration loss.
        gold_position: 0-based place of the gold item among the items; None where the task has no positions.
        items: Character span (start, end) in the prompt of every item (document, key-value pair), in order.
        cluster: Examples that share a question; intervals resample these, not single prompts. Empty: this one
            alone.
        subset: Data set or subject, in a benchmark of several; also scored apart, in ``subsets.csv``.
        choices: Continuations of the prompt, of which the most likely one is the reply; empty: the model
            generates.
        chat: Whether a chat template may surround the prompt.
        system: System message, where a chat template surrounds the prompt.
        prefill: Text after the prompt and its template with which the reply begins (such as ``Answer:``).
        max_new_tokens: Tokens to generate at most, instead of the task's.
        min_new_tokens: Tokens before which neither the end of sequence nor a stop text of one token may come.
        stop: Texts that end the reply; they are cut off with what follows.
        document: Character span of the prompt from whose end ``truncation=document`` and ``words`` cut.
        separator: Text put where the document was cut.
        meta: Anything else that scoring needs.
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
    prefill: str = ""
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    document: tuple[int, int] | None = None
    separator: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A benchmark. The dataclass fields are the keys of ``conf/task/<name>.yaml``.

    ``version`` increases when a number can move; ``metric`` is the score that tables and "best" refer to, in
    0..1; ``size`` says in a few words how much there is; ``average`` says whether means over several subsets
    weight every example or every subset the same.

    Args:
        name: Short name, used in folders and tables.
        max_new_tokens: Tokens to generate at most; an example may say otherwise.
        truncation: Prompts over the context window: ``refuse``; ``middle`` removes tokens from the middle of
            the prompt before any chat template (LongBench, LooGLE); ``document`` cuts the end of the document
            (ZeroSCROLLS); ``words`` does so 250 words at a time (L-Eval).
        max_prompt_tokens: Tokens of the prompt before any chat template; None: what the context window leaves
            room for.
        limit: Questions per subset and gold position at most, the first ones; None: all.
        repetition_penalty: Divisor of the positive logits of tokens that occurred before; 1 is plain greedy
            decoding.
    """

    version: ClassVar[str]
    metric: ClassVar[str]
    source: ClassVar[str]
    licence: ClassVar[str]
    size: ClassVar[str]
    average: ClassVar[Literal["examples", "subsets"]] = "examples"

    name: str
    max_new_tokens: int
    truncation: Truncation = "refuse"
    max_prompt_tokens: int | None = None
    limit: int | None = None
    repetition_penalty: float = 1.0

    @property
    def items(self) -> int | None:
        """Items (documents, pairs) per prompt, where gold positions count them; a position's depth is its
        share of the way."""
        return None

    @property
    def calibration_items(self) -> int | None:
        """Items per calibration prompt, in a task with a field ``calibration_positions``."""
        return None

    @property
    def chance(self) -> float | None:
        """Score of a guess, where that means something."""
        return None

    @abstractmethod
    def examples(self, split: Split) -> list[Example]:
        """All examples of a split. No calibration question ever appears in the evaluation.

        Raises:
            UserError: A file is missing or malformed, a position does not exist, or there is no such split.
        """

    @abstractmethod
    def score(self, example: Example, text: str) -> dict[str, float]:
        """Metrics of one reply, the task's ``metric`` among them; empty where no gold answer is known.
        Pure."""

    def files(self) -> tuple[Source, ...]:
        """The files that :meth:`examples` reads, for ``posbench fetch``; open them with
        :func:`posbench.files.sources.local`."""
        return ()

    def averages(self) -> Mapping[str, tuple[str, ...]]:
        """Named means over subsets or over earlier averages, such as a benchmark's categories. ``all`` is the
        task's total and holds every subset unless it is given here."""
        return {}

    def total(self, subset: str, means: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        """A subset's value of ``metric`` from the means of all its metrics; elementwise, so that it can be
        resampled."""
        return means[self.metric]

    def submission(self, replies: Sequence[tuple[Example, str]]) -> Mapping[str, str]:
        """Files for a leaderboard, name to content, from all replies of one method; none by default."""
        return {}

    def evaluation(self) -> list[Example]:
        """The evaluation examples that ``limit`` leaves.

        Raises:
            UserError: See :meth:`examples`; also for an id that occurs twice.
        """
        seen: Counter[tuple[str, int | None]] = Counter()
        ids: set[str] = set()
        kept = []
        for example in self.examples("evaluation"):
            if example.id in ids:
                raise UserError("task", f"id {example.id}", "ids that occur once", "mend the data")
            ids.add(example.id)
            seen[example.subset, example.gold_position] += 1
            if self.limit is None or seen[example.subset, example.gold_position] <= self.limit:
                kept.append(example)
        return kept

    def refuse_split(self) -> UserError:
        """The error of a task without calibration questions."""
        return UserError(
            "stages",
            "search",
            f"no search on task {self.name}: it has no calibration questions",
            "search with task=kv_retrieval, then set method.channel=... here and stages=[evaluate,report]",
        )
