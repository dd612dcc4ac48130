"""L-Eval, closed-ended (An et al. 2023): exams on long documents, answered by letters or true and false."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from posbench.files.sources import Source, local
from posbench.schema import Count, Truncation
from posbench.tasks.base import EvaluationOnly, Example
from posbench.tasks.reading import (
    Line,
    Row,
    check_subsets,
    find_file,
    json_beside,
    read_data_rows,
)

Benchmark = Literal["coursera", "quality", "tpo", "sci_fi"]

FILES: dict[str, dict[str, Any]] = json_beside(__file__)["files"]
"""By benchmark: documents in its own file, that file's sha256, and the system message."""
LEVAL_URL = "https://raw.githubusercontent.com/OpenLMLab/LEval/main/LEval-data/Closed-ended-tasks"

LETTERS = "ABCD"
_BY_STORY = "based on the world described in the document."
_BY_WORLD_KNOWLEDGE = (
    "based on the real-world knowledge and facts up until your last training"
)
_ANSWER_BRIEFLY = (
    "Please directly answer without any additional output or explanation. "
)
_ANSWER_DIRECTLY = (
    "Please directly give the answer without any additional output or explanation"
)
_DOCUMENT = "Document is as follows. "
_CUE = "\nAnswer:"
_TRUTH_AND_FACT = re.compile(r"\s*(true|false)\s*\[fact:\s*(true|false)\s*\]\s*")


def letters(reply: str, *, several: bool) -> str:
    """Return the letters that the benchmark's evaluation reads in a reply; the text ``None`` for an empty one.

    Its rules, quirks included: with one right option the first capital A to D anywhere, so that ``Based on``
    gives B; ``A`` where there is none. With several (Coursera) the letters that the reply begins with, or,
    unless there are two, the capitals before white space, full stop or bracket, or else the first capitals A
    to D, both up to the word ``Question``. White space at the beginning counts: `` AB.`` gives B.

    Args:
        reply: The reply.
        several: Whether several options may be right.
    """
    if not reply.strip():
        return "None"
    if reply in LETTERS:
        return reply
    if not several:
        return next((c for c in reply if c in LETTERS), "A")
    first = "".join(re.findall(r"\A[A-D]+", reply))
    if len(first) > 1:
        return "".join(sorted(set(first)))
    answer, _, _ = reply.partition("Question")
    marked = re.findall(r"[A-D](?=[\s.)])", answer)
    if first or marked:
        return "".join(sorted({*first, *marked}))
    run = re.search("[A-D]+", answer)
    return run.group() if run else "A"


def gold_letters(text: str) -> str:
    """The letters in the first word of a gold answer, such as B of ``(B) the option``; ``A`` without any."""
    first_word = "".join(text.split()[:1])
    return "".join(c for c in first_word if c in LETTERS) or "A"


def letter_score(predicted: str, gold: str) -> float:
    """1 for the gold letters in their order, 0.25 for gold ones and no other otherwise, else 0."""
    if predicted == gold:
        return 1.0
    return 0.25 if set(predicted) <= set(gold) else 0.0


def true_or_false(reply: str) -> str:
    """``true`` or ``false``, whichever the first word with one holds (``true`` with both); else empty."""
    for word in reply.lower().split():
        for value in ("true", "false"):
            if value in word:
                return value
    return ""


@dataclass(frozen=True, kw_only=True)
class LEvalClosed(EvaluationOnly):
    """The four closed-ended sets of L-Eval that LPES reports.

    SFiction asks every question twice: by the story, with the document (subset ``sci_fi_loyalty``), and by
    the real world, with neither document nor system message nor chat template (``sci_fi_fact``), as the
    benchmark's program for Llama-2 does; L-Eval's number is the mean of both (``sci_fi``). A model without
    chat template reads the system message in front of the prompt. ``path`` is a folder or ``.zip``
    with the benchmark's files (``coursera.jsonl``, ...); None downloads them.
    """

    version: ClassVar[str] = "2"
    metric: ClassVar[str] = "score"
    source: ClassVar[str] = (
        "An et al. 2023, github.com/OpenLMLab/LEval, LEval-data/Closed-ended-tasks/"
    )
    prescribes_length: ClassVar[bool] = True
    licence: ClassVar[str] = "GPL-3.0"
    size: ClassVar[str] = (
        "Coursera 172, QuALITY 202, TOEFL (tpo) 269, SFiction 64 questions asked twice"
    )
    average: ClassVar[Literal["examples", "subsets"]] = "subsets"

    holds: ClassVar[tuple[str, ...]] = ("*.jsonl",)

    name: str = "leval_closed"
    max_new_tokens: Count = 512
    truncation: Truncation = "words"
    subsets: tuple[Benchmark, ...] = ("coursera", "quality", "tpo", "sci_fi")

    def __post_init__(self) -> None:
        check_subsets(self.subsets, list(FILES))

    def official(self) -> tuple[Source, ...]:
        """The official files."""
        return tuple(_official(subset) for subset in self.subsets)

    def averages(self) -> Mapping[str, tuple[str, ...]]:
        """``sci_fi`` is the mean of both readings; ``all`` the mean of the benchmarks."""
        if "sci_fi" not in self.subsets:
            return {"all": self.subsets}
        return {"sci_fi": ("sci_fi_loyalty", "sci_fi_fact"), "all": self.subsets}

    def questions(self) -> Iterator[Example]:
        """See :meth:`EvaluationOnly.questions`."""
        for subset in self.subsets:
            for number, line in self._lines(subset):
                yield from _examples(f"{subset}-{number}", subset, line)

    def score(self, example: Example, text: str) -> dict[str, float]:
        """1 for the gold letters or truth, 0.25 for a part of the letters (Coursera), else 0."""
        gold = example.answers[0]
        answer = self.extracted(example, text)
        if gold in ("true", "false"):
            return {"score": float(answer == gold)}
        return {"score": letter_score(answer, gold)}

    def extracted(self, example: Example, text: str) -> str:
        """The letters, or true or false."""
        if example.subset.startswith("sci_fi"):
            return true_or_false(text)
        return letters(text, several=example.subset == "coursera")

    def _lines(self, subset: Benchmark) -> Iterator[Row]:
        """Return number and fields of the documents of one exam, from the user's folder or the hub's file."""
        if not self.path:
            count = FILES[subset]["documents"]
            return read_data_rows("path", local(_official(subset)), count=count)
        hint = f"take it from {self.source}, or set task.path=null to download it"
        folder = Path(self.path).expanduser()
        file, member = find_file(folder, (f"{subset}.jsonl",), hint)
        return read_data_rows("path", file, member)


def _official(name: Benchmark) -> Source:
    return Source(
        kind="url",
        id=f"{LEVAL_URL}/{name}.jsonl",
        field="task.path",
        sha256=FILES[name]["sha256"],
    )


def _examples(name: str, subset: Benchmark, line: Line) -> Iterator[Example]:
    """Yield the examples of one document.

    A question of ``sci_fi`` gives two: what is true in the story (``loyalty``), and what in the world (``fact``).

    Args:
        name: Beginning of their ids.
        subset: The exam.
        line: The document with its questions and answers.
    """
    document = line.take("input")
    questions = line.take("instructions", list)
    gold_answers = line.take("outputs", list)
    is_text = [
        isinstance(text, str) and text.strip() for text in (*questions, *gold_answers)
    ]
    if len(questions) != len(gold_answers) or not all(is_text):
        line.refuse(
            '"instructions" and "outputs" of the same length (lists of str, none empty)'
        )
    for number, (question, gold_answer) in enumerate(
        zip(questions, gold_answers, strict=True)
    ):
        example = Example(
            id=f"{name}-{number}",
            prompt=f"{_DOCUMENT}{document} \nQuestion: {question}.  {_ANSWER_DIRECTLY}",
            answers=(gold_letters(gold_answer),),
            subset=subset,
            system=FILES[subset]["system"],
            prefill=_CUE,
            document=(len(_DOCUMENT), len(_DOCUMENT) + len(document)),
        )
        if subset != "sci_fi":
            if not re.match(r"\s*\S*[A-D]", gold_answer):
                line.refuse(
                    f'"outputs" that begin with letters from A to D ({gold_answer[:20]} does not)'
                )
            yield example
            continue
        # An answer such as "True [fact: False]": by the story, and in the world.
        truth_and_fact = _TRUTH_AND_FACT.fullmatch(gold_answer.lower())
        if not truth_and_fact:
            line.refuse(
                f'"outputs" like "True [fact: False]" ({gold_answer[:20]} is not)'
            )
        yield replace(
            example,
            id=f"{example.id}-loyalty",
            answers=(truth_and_fact[1],),
            cluster=example.id,
            subset="sci_fi_loyalty",
        )
        yield Example(
            id=f"{example.id}-fact",
            prompt=question.replace(_BY_STORY, _BY_WORLD_KNOWLEDGE) + _ANSWER_BRIEFLY,
            answers=(truth_and_fact[2],),
            cluster=example.id,
            subset="sci_fi_fact",
            chat=False,
            prefill=_CUE,
        )
