"""LooGLE timeline reorder (Li et al. 2023): put the events of a long document in order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from posbench.files.sources import Source
from posbench.schema import Count, Truncation
from posbench.tasks.base import EvaluationOnly, Example
from posbench.tasks.reading import Line, read_data_rows, refuse

COMMIT = "bdc356116a09a6a3d552e28a9f330878915b1696"
"""The last commit whose rows are documents with ``qa_pairs``, as in the paper's repository."""
HUB = Source(
    kind="dataset",
    id="bigai-nlco/LooGLE",
    field="task.path",
    files=("data.zip",),
    revision=COMMIT,
)

QUESTION_TYPE = "timeline_reorder"
INSTRUCTION = "Please answer the question based on the long texts below. "
_EVENT_NUMBER = re.compile(r"^[ \t]*(\d+)[ \t]*[.)][ \t]*", re.MULTILINE)
_ROMAN_UNITS = ("", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX")


def roman(number: int) -> str:
    """A number from 1 to 39 in Roman numerals."""
    return "X" * (number // 10) + _ROMAN_UNITS[number % 10]


def numerals(text: str, *, arabic: bool = False) -> list[str]:
    """Return all numerals that are words, in order, also the ``I`` of "I think", as in the official parser."""
    return re.findall(r"\b\d+\b" if arabic else r"\b[IVXLCDM]+\b", text)


def deviations(order: Sequence[int]) -> dict[str, float]:
    """Return distances of a permutation (places in the gold order, from 0) from 0, 1, ..., n-1 (Li et al. 2023).

    ``lsd`` and ``lmd`` are the mean square and mean absolute displacement; ``sd`` the swaps that sort it, n minus its
    cycles; ``sdd`` the length of those swaps, the one that reduces displacement most per place first. Some swap of
    places i < j always reduces it by 2 (j - i), the most there is (the last item that has to move right, and one that
    has to pass it): half the sum of displacements.
    """
    size = len(order)
    visited: set[int] = set()
    cycles = 0
    for start in range(size):
        if start in visited:
            continue
        cycles += 1
        index = start
        while index not in visited:
            visited.add(index)
            index = order[index]
    displacements = [abs(gold - index) for index, gold in enumerate(order)]
    total = sum(displacements)
    return {
        "lsd": sum(d * d for d in displacements) / size,
        "lmd": total / size,
        "sd": float(size - cycles),
        "sdd": total / 2,
    }


def worst(size: int) -> dict[str, float]:
    """The largest deviations of any order of ``size`` items: the reversal's, and ``sd`` of one cycle."""
    return {**deviations(range(size)[::-1]), "sd": size - 1.0}


def reorder_scores(reply: str, gold: str) -> dict[str, float]:
    """Return all metrics of one reply, for a gold order such as ``II,I,III`` or ``2,1,3``.

    ``exact_order`` is 1 for the gold order. ``standard`` is 1 for a reply in standard format, each gold item
    once and no other numeral in that notation; ``lsd``, ``lmd``, ``sd``, ``sdd`` are its deviations, and the
    worst ones for any other reply. The same names with ``_s`` are there for standard replies alone.
    """
    is_arabic = gold[0].isdigit()
    gold_order = numerals(gold, arabic=is_arabic)
    reply_order = numerals(reply, arabic=is_arabic)
    if sorted(reply_order) != sorted(gold_order):
        return {"exact_order": 0.0, "standard": 0.0, **worst(len(gold_order))}
    distances = deviations([gold_order.index(item) for item in reply_order])
    return {
        "exact_order": float(reply_order == gold_order),
        "standard": 1.0,
        **distances,
        **{f"{name}_s": value for name, value in distances.items()},
    }


@dataclass(frozen=True, kw_only=True)
class LooGLETimelineReorder(EvaluationOnly):
    """LooGLE's timeline reorder questions.

    Replies that are no order count with the worst deviations, as the paper says; the released evaluation has
    that test inverted (it replaces the valid values).

    Args:
        path, member: ``longdep_qa`` as ``.jsonl``, ``.jsonl.gz``, ``.parquet``, or the file ``member`` in a
            ``.zip``; one document per row with ``input`` and ``qa_pairs``. None: the hub's, downloaded once.
        numerals: ``roman`` renumbers events 1., 2., ... (each at the start of a line) as I., II., ..., as the
            paper asks, so that years in a reply are no items. Other questions, or ``as_given`` all, stay.
        first_per_document: Only the first question of every document. 96 documents have one, and all scores
            of Yu et al. 2025, Table 3, are multiples of 1/96: our reading of it.
        chat: Whether a chat template surrounds the prompt. The official script for open models has none, and
            a repetition penalty of 2; Yu et al. say nothing, and use templates elsewhere.
    """

    metric: ClassVar[str] = "exact_order"
    source: ClassVar[str] = (
        "Li et al. 2023, huggingface.co/datasets/bigai-nlco/LooGLE, longdep_qa"
    )
    prescribes_length: ClassVar[bool] = True
    licence: ClassVar[str] = "CC BY-SA 4.0"
    size: ClassVar[str] = "214 questions on 96 documents"

    name: str = "loogle_timeline_reorder"
    max_new_tokens: Count = 500
    truncation: Truncation = "middle"
    member: str = "data/longdep_qa.jsonl"
    numerals: Literal["roman", "as_given"] = "roman"
    first_per_document: bool = False
    chat: bool = True

    def official(self) -> tuple[Source, ...]:
        """The hub's data.zip."""
        return (HUB,)

    def questions(self) -> list[Example]:
        """Return the reorder questions of the benchmark's or the user's file as examples.

        Raises:
            UserError: The file is wrong, or has none.
        """
        file = self.place()
        if not self.path:
            file = file / HUB.files[0]
        member = self.member if file.suffix == ".zip" else ""
        examples: list[Example] = []
        for _, line in read_data_rows("path", file, member):
            examples += self._document(line)
        if not examples:
            allowed = f'questions with "type": "{QUESTION_TYPE}"'
            refuse("path", str(file), allowed, "take LooGLE's file longdep_qa")
        return examples

    def score(self, example: Example, text: str) -> dict[str, float]:
        """See :func:`reorder_scores`."""
        return reorder_scores(text, example.answers[0])

    def _document(self, line: Line) -> Iterator[Example]:
        """Yield the reorder questions of a document as examples.

        Args:
            line: A line of the official file: a document with questions of several types.
        """
        document = line.take("input")
        questions = [
            pair for pair in _qa_pairs(line) if pair.take("type") == QUESTION_TYPE
        ]
        if self.first_per_document:
            questions = questions[:1]
        for number, pair in enumerate(questions):
            question = pair.take("Q")
            answer = pair.take("A")
            gold = numerals(answer, arabic=any(c.isdigit() for c in answer))
            if len(gold) < 2 or len(set(gold)) < len(gold):
                line.refuse(
                    f'an "A" of different numerals, such as II,I,III ({answer[:30]} is not)'
                )
            if self.numerals == "roman":
                question, gold = _in_roman(question, gold)
            yield Example(
                id=f"{line.number}-{number}",
                prompt=f"{INSTRUCTION}\n{document}\nQuestion: {question}\nAnswer: ",
                answers=(",".join(gold),),
                chat=self.chat,
            )


def _qa_pairs(line: Line) -> list[Line]:
    """Return the questions of a document, each with its fields; the document's line holds them as a Python literal."""
    text = line.take("qa_pairs")
    try:
        pairs = ast.literal_eval(text)
    except (
        ValueError,
        TypeError,
        SyntaxError,
        MemoryError,
        RecursionError,
    ) as error:
        line.refuse(f'a Python literal in "qa_pairs" ({error})')
    if not isinstance(pairs, list) or not all(isinstance(pair, dict) for pair in pairs):
        line.refuse('a list of dicts in "qa_pairs"')
    return [Line(pair, line.field, line.file_label, line.number) for pair in pairs]


def _in_roman(question: str, gold: list[str]) -> tuple[str, list[str]]:
    """Return a question and its gold order in Roman numerals.

    Both stay as they are where the events have other numbers than 1., 2., ... at line starts.
    """
    numbers = sorted(str(number + 1) for number in range(len(gold)))
    if sorted(_EVENT_NUMBER.findall(question)) != numbers or sorted(gold) != numbers:
        return question, gold
    roman_question = _EVENT_NUMBER.sub(lambda m: f"{roman(int(m[1]))}. ", question)
    return roman_question, [roman(int(item)) for item in gold]
