"""What every task is: pure text in, numbers out."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from posbench.errors import UserError
from posbench.files.sources import Source, local
from posbench.schema import Count, Positive, Several, Truncation

Split = Literal["evaluation", "calibration"]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt with its gold answers.

    Attributes:
        id: Unique within the task and split, stable across runs.
        prompt: What the model is asked, before any chat template.
        answers: Accepted ones; the first is the target of a calibration loss.
        gold_position: 0-based place of the gold item among the items; None without positions.
        items: Character span (start, end) in the prompt of every item (document, key-value pair), in order.
        cluster: Examples that share a question, which intervals resample; empty: this one alone.
        subset: Data set or subject, in a benchmark of several; also scored apart, in ``subsets.csv``.
        choices: Continuations of which the most likely one is the reply; empty: the model generates.
        chat: Whether a chat template may surround the prompt.
        system: System message, where a chat template surrounds the prompt.
        prefill: Text after the prompt and its template with which the reply begins (such as ``Answer:``).
        max_new_tokens: Tokens to generate at most, instead of the task's.
        min_new_tokens: Tokens before which neither the end of sequence nor a stop text of one token may come.
        stop: Texts that end the reply; they are cut off with what follows.
        document, separator: Character span of the prompt from whose end ``truncation=document`` and ``words``
            cut, and the text put there.
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
    """A benchmark. The dataclass fields are the keys of ``task.*``; a default stands here alone.

    Attributes:
        version: Increases when a number can move.
        metric: The score, in 0..1, that tables and "best" refer to.
        source, licence, size: Of its data, in a few words.
        average: Whether means over several subsets weight every example or every subset the same.
        items: Items (documents, pairs) per prompt, where gold positions count them.
        calibration_items: The same of calibration prompts, with a field ``calibration_positions``.
        chance: Score of a guess, where that means something.
        name: Short name, used in folders and tables.
        max_new_tokens: Tokens to generate at most; an example may say otherwise.
        truncation: Prompts over the context window: ``refuse``; ``middle`` removes tokens from the middle of
            the prompt before any chat template (LongBench, LooGLE); ``document`` cuts the end of the document
            (ZeroSCROLLS); ``words`` does so 250 words at a time (L-Eval).
        max_prompt_tokens: Tokens of the prompt before any chat template; None: what the window has room for.
        limit: Questions per subset and gold position at most, the first ones; None: all.
        repetition_penalty: Divisor of the positive logits of tokens that occurred before; 1: greedy decoding.
    """

    version: ClassVar[str] = "1"
    metric: ClassVar[str]
    source: ClassVar[str]
    licence: ClassVar[str]
    size: ClassVar[str]
    average: ClassVar[Literal["examples", "subsets"]] = "examples"
    items: ClassVar[int | None] = None
    calibration_items: ClassVar[int | None] = None
    chance: ClassVar[float | None] = None

    name: str
    max_new_tokens: Count
    truncation: Truncation = "refuse"
    max_prompt_tokens: Several | None = None
    limit: Count | None = None
    repetition_penalty: Positive = 1.0

    @abstractmethod
    def examples(self, split: Split) -> list[Example]:
        """All examples of a split. No calibration question ever appears in the evaluation.

        Raises UserError where a file is missing or malformed, or there is no such position or split.
        """

    @abstractmethod
    def score(self, example: Example, text: str) -> dict[str, float]:
        """Metrics of one reply, the task's ``metric`` among them; empty where no gold answer is known."""

    def files(self) -> tuple[Source, ...]:
        """The files that :meth:`examples` reads."""
        return ()

    def place(self) -> Path:
        """The first of :meth:`files` on this machine; UserError if it is not here nor can be downloaded."""
        first = self.files()[0]
        if first.kind == "path" and not Path(first.id).expanduser().exists():
            hint = f"get it from {self.source}, or set {first.field}=null"
            raise UserError(first.field, first.id, "a file or folder on this machine", hint)
        return local(first)

    def averages(self) -> Mapping[str, tuple[str, ...]]:
        """Named means over subsets or earlier averages; ``all`` is every subset's if it is not given."""
        return {}

    def total(self, subset: str, means: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        """A subset's value of ``metric`` from the means of all its metrics, elementwise."""
        return means[self.metric]

    def submission(self, replies: Sequence[tuple[Example, str]]) -> Mapping[str, str]:
        """Files for a leaderboard, name to content, from all replies of one method; none by default."""
        return {}

    def evaluation(self) -> list[Example]:
        """The evaluation examples that ``limit`` leaves; UserError also for an id that occurs twice."""
        examples = self.examples("evaluation")
        for name, count in Counter(e.id for e in examples).items():
            if count > 1:
                raise UserError("task", f"id {name}", "ids that occur once", "fix the data")
        return first(examples, self.limit)


def first(examples: Iterable[Example], most: int | None) -> list[Example]:
    """The examples, at most ``most`` of each subset and gold position."""
    seen, kept = Counter[tuple[str, int | None]](), []
    for example in examples:
        seen[example.subset, example.gold_position] += 1
        if most is None or seen[example.subset, example.gold_position] <= most:
            kept.append(example)
    return kept


@dataclass(frozen=True, kw_only=True)
class EvaluationOnly(Task):
    """A task without calibration questions, from the user's files (``path``) or from the benchmark's own."""

    path: str | None = None

    @abstractmethod
    def official(self) -> tuple[Source, ...]:
        """The benchmark's own files."""

    @abstractmethod
    def questions(self) -> Iterable[Example]:
        """The evaluation examples."""

    def files(self) -> tuple[Source, ...]:
        """The user's file or folder, or the benchmark's own files."""
        own = Source(kind="path", id=self.path or "", field="task.path", files=("**/*",))
        return (own,) if self.path else self.official()

    def examples(self, split: Split) -> list[Example]:
        """See :meth:`Task.examples`; there are no calibration questions."""
        if split == "calibration":
            allowed = f"no search on task {self.name}: it has no calibration questions"
            hint = "search with task=kv_retrieval, then set method.channel=... and stages=[evaluate,report]"
            raise UserError("stages", "search", allowed, hint)
        return list(self.questions())
