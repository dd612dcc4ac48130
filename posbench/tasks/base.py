"""The interface of tasks: plain text in, numbers out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from posbench.errors import UserError
from posbench.files.sources import Source, exists, local
from posbench.schema import Count, Positive, Several, Truncation, build, resolve_target

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Split = Literal["evaluation", "calibration"]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt with its gold answers.

    Attributes:
        id: Unique within the task and split, stable across runs.
        prompt: The prompt, before any chat template.
        answers: Accepted answers; the first is the target of a calibration loss.
        gold_position: 0-based index of the gold item among the items; None without positions. With several gold items,
            the one that the task moves, and by which tables and figures are sorted.
        other_gold: Indices of the other gold items, which the answer needs as well.
        items: Span in the prompt of every item, in characters (start, end).
        question: Span in the prompt of the question itself, in characters; None: not marked.
        orders: Permutations of the items that the data knows, each a tuple of indices: ``relevance``, best first, where
            it is not the prompt's order; ``source``, as they stand in their sources; ``id``, by their names.
        cluster: Examples that share a question, which intervals resample; empty: this one alone.
        subset: Data set or subject, in a benchmark of several; also scored apart, in subsets.csv.
        choices: Continuations, the likeliest of which is the reply; empty: the model generates one.
        chat: Whether a chat template may surround the prompt.
        system: System message, where a chat template surrounds the prompt.
        prefill: Beginning of the reply (such as "Answer:"), after the prompt and its template.
        max_new_tokens: Tokens to generate at most, instead of the task's.
        min_new_tokens: Tokens before which neither the end of sequence nor a stop text of one token may come.
        stop: Texts that end the reply; they and all text after them are cut off.
        answer_cue: Text after whose last occurrence in a reply the answer stands, which alone is scored; empty: the
            whole reply is the answer. Set where a method asks for more than an answer.
        document: Span from whose end truncation=document and words cut.
        separator: Put where the document was cut.
        meta: Anything else that scoring needs.
        original: The example as the task gives it, where a method rewrote the prompt: by it the task judges replies.
    """

    id: str
    prompt: str
    answers: tuple[str, ...]
    gold_position: int | None = None
    other_gold: tuple[int, ...] = ()
    items: tuple[tuple[int, int], ...] = ()
    question: tuple[int, int] | None = None
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    cluster: str = ""
    subset: str = ""
    choices: tuple[str, ...] = ()
    chat: bool = True
    system: str = ""
    prefill: str = ""
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    answer_cue: str = ""
    document: tuple[int, int] | None = None
    separator: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    original: Example | None = None

    @property
    def question_id(self) -> str:
        """Name of the question, which intervals resample: the cluster, or the example where it has none."""
        return self.cluster or self.id

    @property
    def generation_stop(self) -> tuple[str, ...]:
        """Texts at which generation ends: none before an answer cue, as :attr:`stop` ends the answer alone."""
        return () if self.answer_cue else self.stop

    @property
    def gold_positions(self) -> tuple[int, ...]:
        """Indices of all gold items, that at ``gold_position`` first; empty without positions."""
        if self.gold_position is None:
            return ()
        return (self.gold_position, *self.other_gold)


SCORE_ROUNDING = 1e-9
"""By which a score may leave 0..1."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A benchmark. The dataclass fields are the keys of ``task.*``, with their only defaults."""

    # increases when a number can move
    version: ClassVar[str] = "1"
    # the score, in 0..1, that tables and "best" refer to
    metric: ClassVar[str]
    # of the data, as the next two
    source: ClassVar[str]
    licence: ClassVar[str]
    size: ClassVar[str]
    # units of equal weight in a mean over subsets
    average: ClassVar[Literal["examples", "subsets"]] = "examples"
    # documents or pairs per prompt, where gold positions count them
    items: ClassVar[int | None] = None
    # those per calibration prompt
    calibration_items: ClassVar[int | None] = None
    # fields with the items per prompt, and per calibration prompt, where gold positions count them
    sizes: ClassVar[tuple[str, ...]] = ()
    # whether the benchmark prescribes the length of a reply, and scores replies of that length
    prescribes_length: ClassVar[bool] = False
    # further metrics that tables show at every gold position, besides the task's own
    metrics_by_position: ClassVar[tuple[str, ...]] = ()
    # score of a guess, where that means something
    chance: ClassVar[float | None] = None

    # short name, used in folders and tables
    name: str
    # tokens to generate at most; an example may say otherwise
    max_new_tokens: Count
    # prompts over the context window: ``refuse``; ``middle`` removes tokens from the middle of the prompt
    # before any chat template (LongBench, LooGLE); ``document`` cuts the end of the document (ZeroSCROLLS);
    # ``words`` does so 250 words at a time (L-Eval)
    truncation: Truncation = "refuse"
    # tokens of the prompt before any chat template; None: limited by the window alone
    max_prompt_tokens: Several | None = None
    # questions at most at each gold position of each subset, the first ones in the file's order; None: all
    limit: Count | None = None
    # divisor of the positive logits of tokens that occurred before; 1: greedy decoding
    repetition_penalty: Positive = 1.0

    @property
    def gold_positions(self) -> list[int]:
        """The 0-based indices over which the gold item is moved, by the field ``positions``; empty where none is.

        Raises UserError where a position is outside the items, or a file that holds them is wrong.
        """
        return []

    @property
    def simpler(self) -> Mapping[str, Any]:
        """Fields that make a prompt shorter and easier to spell; empty where nothing does."""
        return {}

    @abstractmethod
    def examples(self, split: Split) -> list[Example]:
        """All examples of a split. No calibration question ever appears in the evaluation.

        Raises UserError where a file is missing or malformed, or there is no such position or split.
        """

    @abstractmethod
    def score(self, example: Example, text: str) -> dict[str, float]:
        """Metrics of one reply, the task's ``metric`` among them; empty where no gold answer is known."""

    def held_back(self, count: int) -> list[Example]:
        """At most ``count`` calibration questions beyond :meth:`examples`, on which the result of a search is
        checked; none by default."""
        return []

    def checked_score(self, example: Example, text: str) -> dict[str, float]:
        """Return :meth:`score`, checked.

        Raises:
            UserError: The scores lack the task's metric, or it is not in 0..1, or one is not a finite number.
        """
        scores = self.score(example, text)
        correct = f"correct score() of {type(self).__name__}, or its metric"
        # Such a task computes its metric from others, once for all examples.
        composes_metric = type(self).total is not Task.total
        lacks_metric = bool(scores) and self.metric not in scores
        wrong = [
            name
            for name, value in scores.items()
            if not isinstance(value, Real) or not math.isfinite(value)
        ]
        if wrong or (lacks_metric and not composes_metric):
            allowed = f"finite numbers by name, with the task's metric {self.metric} among them"
            value = f"{scores!r} for example {example.id}"
            raise UserError(f"task {self.name}: score", value, allowed, correct)
        score = scores.get(self.metric, 0)
        if not -SCORE_ROUNDING <= score <= 1 + SCORE_ROUNDING:
            value = f"{self.metric} {score:g} for example {example.id}"
            allowed = "from 0 to 1"
            raise UserError(f"task {self.name}: score", value, allowed, correct)
        return scores

    def has_answer(self, example: Example, text: str) -> bool:
        """Whether a reply that ended at ``max_new_tokens`` had come to its answer, right or wrong.

        Where it had not, more tokens might have made it right: it is counted as cut, not as wrong. By default
        only a fully right reply is known to hold an answer.
        """
        return self.score(example, text).get(self.metric, 0.0) >= 1

    def extracted(self, example: Example, text: str) -> str | None:
        """Return the part of a reply that :meth:`score` reads, to show it; None if it reads the whole reply."""
        return None

    def how_to_shorten(self, example: Example) -> str:
        """Return what the user can do where the prompt of an example does not fit the window, in words."""
        steps = []
        # ``sizes`` names the fields with the number of items, of evaluation first and of calibration.
        if self.sizes:
            num_items = len(example.items)
            fields = [f for f in self.sizes if getattr(self, f) == num_items]
            field = next(iter(fields), self.sizes[0])
            steps.append(f"ask with fewer items (task.{field})")
        if example.document:
            steps.append("cut the document's end with task.truncation=document")
        elif not example.items:
            steps.append("cut the prompt with task.truncation=middle")
        return ", or ".join(steps) or f"shorten question {example.id}"

    def files(self) -> tuple[Source, ...]:
        """The files that :meth:`examples` reads."""
        return ()

    def place(self) -> Path:
        """Return where the first of :meth:`files` lies on this machine, downloaded if necessary.

        Raises:
            UserError: It is not here, and cannot be downloaded.
        """
        source = self.files()[0]
        if source.kind == "path":
            path = Path(source.id).expanduser()
            if not exists(path):
                allowed = (
                    f"a file or folder on this machine; there is no {path.absolute()}"
                )
                hint = f"a relative path starts where posbench is called, also in a YAML; source: {self.source}"
                raise UserError(source.field, source.id, allowed, hint)
        return local(source)

    def averages(self) -> Mapping[str, tuple[str, ...]]:
        """Named means over subsets or earlier averages; ``all`` is every subset's if it is not given."""
        return {}

    def total(
        self, subset: str, means: Mapping[str, NDArray[np.float64]]
    ) -> NDArray[np.float64]:
        """A subset's value of ``metric`` from the means of all its metrics, elementwise."""
        return means[self.metric]

    def notes(self) -> list[str]:
        """Notes on the data for readers of the scores, a line each; none by default."""
        return []

    def submission(self, replies: Sequence[tuple[Example, str]]) -> Mapping[str, str]:
        """Files for a leaderboard, name to content, from all replies of one method; none by default."""
        return {}

    def evaluation(self) -> list[Example]:
        """Return the evaluation examples, at most ``limit`` of each subset and gold position.

        Raises:
            UserError: As of :meth:`examples`; or an id occurs twice, or an example is wrong (:func:`check_examples`).
        """
        examples = self.examples("evaluation")
        check_examples(self, examples)
        for name, count in Counter(example.id for example in examples).items():
            if count > 1:
                raise UserError(
                    "task", f"id {name}", "ids that occur once", "fix the data"
                )
        return first_examples(examples, self.limit)


def check_examples(task: Task, examples: Sequence[Example]) -> None:
    """Refuse the examples of a split where there are none, or where a field of one cannot be right.

    Args:
        task: The task, for the error.
        examples: What its ``examples`` returned.

    Raises:
        UserError: Names the example and the field.
    """
    hint = f"correct examples() of {type(task).__name__}"
    if not isinstance(examples, Sequence) or not examples:
        field = f"task {task.name}: examples"
        raise UserError(field, examples, "a list of one or more", hint)
    for example in examples:
        check_gold_positions(example)
        where = f"example {example.id}"
        answers = example.answers
        if isinstance(answers, str) or not all(isinstance(a, str) for a in answers):
            allowed = f"a tuple of texts, in {where}"
            raise UserError("task: answers", answers, allowed, hint)
        if not example.prompt.strip():
            raise UserError("task: prompt", "", f"a text, in {where}", hint)
        if outside := first_span_outside(example.items, example.prompt):
            allowed = f"spans in the prompt of {where}, which has {len(example.prompt)} characters"
            raise UserError("task: items", outside, allowed, hint)


def first_span_outside(
    spans: Sequence[tuple[int, int]], text: str
) -> tuple[int, int] | None:
    """Return the first span that is empty or not within a text; None where all are. (0, 0) stands for a cut item."""
    for start, end in spans:
        if not 0 <= start < end <= len(text) and (start, end) != (0, 0):
            return start, end
    return None


def check_gold_positions(example: Example) -> None:
    """Refuse an example with a gold position that is not among its items, or that occurs twice.

    Raises:
        UserError: Names the example.
    """
    if example.gold_position is None and not example.other_gold:
        return
    gold = example.gold_positions
    num_items = len(example.items)
    # A task may leave the items out: then nothing looks at them.
    is_inside = not num_items or all(0 <= index < num_items for index in gold)
    has_repetition = len(set(gold)) < len(gold)
    if gold and is_inside and not has_repetition:
        return
    value = f"{list(gold or example.other_gold)} in example {example.id}"
    allowed = (
        f"a gold_position, and other_gold different from it, from 0 to {num_items - 1}"
    )
    raise UserError("task: gold items", value, allowed, "fix the task's examples")


def read_recorded_task(data: Mapping[str, Any]) -> Task:
    """The task that a run folder's config holds; UserError as for any config."""
    cls, values = resolve_target(data, Task, "task")  # type: ignore[type-abstract]
    return build(cls, values, "task")


def first_examples(examples: Iterable[Example], limit: int | None) -> list[Example]:
    """Return the examples in their order, at most ``limit`` of each subset and gold position; None: all of them."""
    counts = Counter[tuple[str, int | None]]()
    result = []
    for example in examples:
        key = (example.subset, example.gold_position)
        counts[key] += 1
        if limit is None or counts[key] <= limit:
            result.append(example)
    return result


def split_into_rounds(
    examples: Sequence[Example], questions: int | None
) -> list[list[Example]]:
    """Split examples into rounds of ``questions`` questions of each subset, each at all of its gold positions.

    The first rounds equal the examples with a smaller ``limit``: see :func:`first_examples`. None: one round.
    """
    if questions is None:
        return [list(examples)] if examples else []
    counts = Counter[tuple[str, int | None]]()
    rounds = dict[int, list[Example]]()
    for example in examples:
        key = (example.subset, example.gold_position)
        rounds.setdefault(counts[key] // questions, []).append(example)
        counts[key] += 1
    return [rounds[number] for number in sorted(rounds)]


def num_questions(examples: Iterable[Example]) -> int:
    """Return the most questions at a gold position of a subset: the ``limit`` that keeps all."""
    counts = Counter((example.subset, example.gold_position) for example in examples)
    return max(counts.values(), default=0)


@dataclass(frozen=True, kw_only=True)
class EvaluationOnly(Task):
    """A task without calibration questions, from the user's files (``path``) or from the benchmark's own."""

    # patterns of the files that it reads in a folder of the user's
    holds: ClassVar[tuple[str, ...]] = ("**/*",)

    path: str | None = None

    @abstractmethod
    def official(self) -> tuple[Source, ...]:
        """The benchmark's own files."""

    @abstractmethod
    def questions(self) -> Iterable[Example]:
        """The evaluation examples."""

    def files(self) -> tuple[Source, ...]:
        """The user's file or folder, or the benchmark's own files."""
        if not self.path:
            return self.official()
        return (Source(kind="path", id=self.path, field="task.path", files=self.holds),)

    def examples(self, split: Split) -> list[Example]:
        """See :meth:`Task.examples`; there are no calibration questions."""
        if split == "calibration":
            allowed = f"no search on task {self.name}: it has no calibration questions"
            hint = "search with task=kv_retrieval, and evaluate with method=from:RUN"
            raise UserError("stages", "search", allowed, hint)
        return list(self.questions())
