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
from posbench.files.sources import Source, local, there
from posbench.schema import Count, Positive, Several, Truncation, build, target

Split = Literal["evaluation", "calibration"]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt with its gold answers."""

    id: str  # unique within the task and split, stable across runs
    prompt: str  # what the model is asked, before any chat template
    answers: tuple[
        str, ...
    ]  # accepted ones; the first is the target of a calibration loss
    gold_position: int | None = (
        None  # 0-based place of the gold item among the items; None without positions
    )
    items: tuple[
        tuple[int, int], ...
    ] = ()  # span in the prompt of every item, in characters (start, end)
    cluster: str = ""  # examples that share a question, which intervals resample; empty: this one alone
    subset: str = ""  # data set or subject, in a benchmark of several; also scored apart, in subsets.csv
    choices: tuple[
        str, ...
    ] = ()  # continuations, the likeliest of which is the reply; empty: it generates
    chat: bool = True  # whether a chat template may surround the prompt
    system: str = ""  # system message, where a chat template surrounds the prompt
    prefill: str = ""  # with which the reply begins (such as "Answer:"), after the prompt and its template
    max_new_tokens: int | None = None  # to generate at most, instead of the task's
    min_new_tokens: int = 0  # before which neither the end of sequence nor a stop text of one token may come
    stop: tuple[
        str, ...
    ] = ()  # texts that end the reply; they are cut off with what follows
    document: tuple[int, int] | None = (
        None  # span from whose end truncation=document and words cut
    )
    separator: str = ""  # put where the document was cut
    meta: Mapping[str, Any] = field(
        default_factory=dict
    )  # anything else that scoring needs


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A benchmark. The dataclass fields are the keys of ``task.*``; a default stands here alone."""

    version: ClassVar[str] = "1"  # increases when a number can move
    metric: ClassVar[str]  # the score, in 0..1, that tables and "best" refer to
    source: ClassVar[str]  # of the data, as the next two
    licence: ClassVar[str]
    size: ClassVar[str]
    average: ClassVar[Literal["examples", "subsets"]] = (
        "examples"  # what a mean over subsets weights alike
    )
    items: ClassVar[int | None] = (
        None  # documents or pairs per prompt, where gold positions count them
    )
    calibration_items: ClassVar[int | None] = None  # those per calibration prompt
    renamed: ClassVar[
        Mapping[str, str]
    ] = {}  # keys of earlier releases, by what they are called now
    chance: ClassVar[float | None] = (
        None  # score of a guess, where that means something
    )

    name: str  # short name, used in folders and tables
    max_new_tokens: Count  # tokens to generate at most; an example may say otherwise
    # prompts over the context window: ``refuse``; ``middle`` removes tokens from the middle of the prompt
    # before any chat template (LongBench, LooGLE); ``document`` cuts the end of the document (ZeroSCROLLS);
    # ``words`` does so 250 words at a time (L-Eval)
    truncation: Truncation = "refuse"
    # tokens of the prompt before any chat template; None: what the window has room for
    max_prompt_tokens: Several | None = None
    # questions at most at each gold position of each subset, the first ones in the file's order; None: all
    limit: Count | None = None
    # divisor of the positive logits of tokens that occurred before; 1: greedy decoding
    repetition_penalty: Positive = 1.0

    @abstractmethod
    def examples(self, split: Split) -> list[Example]:
        """All examples of a split. No calibration question ever appears in the evaluation.

        Raises UserError where a file is missing or malformed, or there is no such position or split.
        """

    @abstractmethod
    def score(self, example: Example, text: str) -> dict[str, float]:
        """Metrics of one reply, the task's ``metric`` among them; empty where no gold answer is known."""

    def held_back(self, count: int) -> list[Example]:
        """At most ``count`` calibration questions beyond :meth:`examples`, on which what a search found is
        checked; none by default."""
        return []

    def extracted(self, example: Example, text: str) -> str | None:
        """What :meth:`score` reads out of a reply, to show it; None where it looks at the whole reply."""
        return None

    def files(self) -> tuple[Source, ...]:
        """The files that :meth:`examples` reads."""
        return ()

    def place(self) -> Path:
        """The first of :meth:`files` on this machine; UserError if it is not here nor can be downloaded."""
        first = self.files()[0]
        if first.kind == "path" and not there(path := Path(first.id).expanduser()):
            allowed = f"a file or folder on this machine; there is no {path.absolute()}"
            hint = f"a relative path starts where posbench is called, also in a YAML; source: {self.source}"
            raise UserError(first.field, first.id, allowed, hint)
        return local(first)

    def averages(self) -> Mapping[str, tuple[str, ...]]:
        """Named means over subsets or earlier averages; ``all`` is every subset's if it is not given."""
        return {}

    def total(
        self, subset: str, means: Mapping[str, NDArray[np.float64]]
    ) -> NDArray[np.float64]:
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
                raise UserError(
                    "task", f"id {name}", "ids that occur once", "fix the data"
                )
        return first(examples, self.limit)


def recorded(data: Mapping[str, Any]) -> Task:
    """The task that a run folder's config holds, maybe under keys of an earlier release; UserError as for
    any config."""
    cls, values = target(data, Task, "task")  # type: ignore[type-abstract]
    for before in cls.renamed.keys() & values.keys():
        now = cls.renamed[before]
        given = values.pop(before)
        # There were two limits at a time, of which the smaller one counted.
        values[now] = min(given, values.get(now) or given) if now == "limit" else given
    return build(cls, values, "task")


def first(examples: Iterable[Example], most: int | None) -> list[Example]:
    """The examples, at most ``most`` of each subset and gold position."""
    seen = Counter[tuple[str, int | None]]()
    kept = []
    for example in examples:
        seen[example.subset, example.gold_position] += 1
        if most is None or seen[example.subset, example.gold_position] <= most:
            kept.append(example)
    return kept


@dataclass(frozen=True, kw_only=True)
class EvaluationOnly(Task):
    """A task without calibration questions, from the user's files (``path``) or from the benchmark's own."""

    holds: ClassVar[tuple[str, ...]] = (
        "**/*",
    )  # what it reads in a folder of the user's, as patterns

    path: str | None = None

    @abstractmethod
    def official(self) -> tuple[Source, ...]:
        """The benchmark's own files."""

    @abstractmethod
    def questions(self) -> Iterable[Example]:
        """The evaluation examples."""

    def files(self) -> tuple[Source, ...]:
        """The user's file or folder, or the benchmark's own files."""
        own = Source(
            kind="path", id=self.path or "", field="task.path", files=self.holds
        )
        return (own,) if self.path else self.official()

    def examples(self, split: Split) -> list[Example]:
        """See :meth:`Task.examples`; there are no calibration questions."""
        if split == "calibration":
            allowed = f"no search on task {self.name}: it has no calibration questions"
            hint = "search with task=kv_retrieval, then set method.channel=... and stages=[evaluate,report]"
            raise UserError("stages", "search", allowed, hint)
        return list(self.questions())
