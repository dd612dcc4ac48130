"""LooGLE timeline reorder (Li et al. 2023): put the events of a long document in the order in which they
happened."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from posbench.files.sources import Source, local
from posbench.tasks.base import Example, Split, Task, Truncation
from posbench.tasks.reading import refuse, refuse_line, rows, take

HUB = Source(
    kind="dataset",
    id="bigai-nlco/LooGLE",
    field="task.path",
    files=("data.zip",),
    revision="bdc356116a09a6a3d552e28a9f330878915b1696",
)
"""The last commit whose rows are documents with ``qa_pairs``, as in the paper's repository."""

TYPE = "timeline_reorder"
_EVENT = re.compile(r"^[ \t]*(\d+)[ \t]*[.)][ \t]*", re.MULTILINE)
_UNITS = ("", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX")


def roman(number: int) -> str:
    """A number from 1 to 39 in Roman numerals."""
    return "X" * (number // 10) + _UNITS[number % 10]


def numerals(text: str, *, arabic: bool = False) -> list[str]:
    """All numerals that stand as words in a text, in order; the ``I`` of "I think" is one (as in the official
    parser)."""
    return re.findall(r"\b\d+\b" if arabic else r"\b[IVXLCDM]+\b", text)


def deviations(order: Sequence[int]) -> dict[str, float]:
    """How far a permutation is from 0, 1, ..., n-1; the smaller the better (Li et al. 2023).

    ``lsd`` and ``lmd`` are the mean square and mean absolute displacement; ``sd`` the swaps that sort it, n
    minus its cycles; ``sdd`` the length of those swaps, where the pair whose displacement a swap reduces most
    per place goes first. Some swap of places i < j always reduces it by 2 (j - i), the most there is (the
    last item that has to move right, and one that has to pass it), so ``sdd`` is half the sum of
    displacements.

    Args:
        order: The place in the gold order of each item of the reply, from 0.
    """
    size, seen, cycles = len(order), set[int](), 0
    for start in range(size):
        cycles += start not in seen
        while start not in seen:
            seen.add(start)
            start = order[start]
    moved = [abs(place - index) for index, place in enumerate(order)]
    return {
        "lsd": sum(m * m for m in moved) / size,
        "lmd": sum(moved) / size,
        "sd": float(size - cycles),
        "sdd": sum(moved) / 2,
    }


def worst(size: int) -> dict[str, float]:
    """The largest deviations of any order of ``size`` items: of the reversal, and of one cycle for ``sd``."""
    return {
        "lsd": (size**2 - 1) / 3,
        "lmd": size**2 // 2 / size,
        "sd": size - 1.0,
        "sdd": float(size**2 // 4),
    }


def reorder_scores(reply: str, gold: str) -> dict[str, float]:
    """All metrics of one reply.

    ``exact_order`` is 1 for the gold order. ``standard`` is 1 for a reply in standard format, each gold item
    once and no other numeral; ``lsd``, ``lmd``, ``sd``, ``sdd`` are its deviations, and the worst ones for
    any other reply. The same names with ``_s`` are there for standard replies alone.

    Args:
        reply: The model's text.
        gold: The gold order, such as ``II,I,III`` or ``2,1,3``; its notation is the one looked for.
    """
    arabic = gold[0].isdigit()
    wanted, found = numerals(gold, arabic=arabic), numerals(reply, arabic=arabic)
    if sorted(found) != sorted(wanted):
        return {"exact_order": 0.0, "standard": 0.0, **worst(len(wanted))}
    moved = deviations([wanted.index(item) for item in found])
    apart = {f"{name}_s": value for name, value in moved.items()}
    return {"exact_order": float(found == wanted), "standard": 1.0, **moved, **apart}


@dataclass(frozen=True, kw_only=True)
class LooGLETimelineReorder(Task):
    """LooGLE's timeline reorder questions.

    Non-standard replies count with the worst deviation of their number of events, as the paper says. The
    released evaluation loop has that test inverted (it replaces the valid values); this is the paper's rule,
    not the loop's.

    Args:
        path: ``longdep_qa`` as ``.jsonl``, ``.jsonl.gz``, ``.parquet`` or inside a ``.zip``, one document per
            row with ``input`` and ``qa_pairs``; None: the hub's, downloaded once.
        member: The file inside a ``.zip``.
        numerals: ``roman`` renumbers events 1., 2., ... (each at the start of a line) as I., II., ..., as the
            paper asks, so that years in a reply are no items; questions numbered otherwise stay as they are.
            ``as_given``: all do.
        first_per_document: Only the first question of every document. 96 documents have one, and all scores
            of Yu et al. 2025, Table 3, are multiples of 1/96: our reading of it.
        chat: Whether a chat template surrounds the prompt. The official script for open models has none, and
            a repetition penalty of 2; Yu et al. say nothing, and use templates elsewhere.
    """

    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "exact_order"
    source: ClassVar[str] = "Li et al. 2023, huggingface.co/datasets/bigai-nlco/LooGLE, longdep_qa"
    licence: ClassVar[str] = "CC BY-SA 4.0"
    size: ClassVar[str] = "214 questions on 96 documents"

    name: str = "loogle_timeline_reorder"
    max_new_tokens: int = 500
    truncation: Truncation = "middle"
    path: str | None = None
    member: str = "data/longdep_qa.jsonl"
    numerals: Literal["roman", "as_given"] = "roman"
    first_per_document: bool = False
    chat: bool = True

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            refuse(
                "max_new_tokens",
                self.max_new_tokens,
                "a whole number from 1 up",
                "set task.max_new_tokens=500",
            )

    def files(self) -> tuple[Source, ...]:
        """The given file, or the hub's."""
        return (Source(kind="path", id=self.path, field="task.path"),) if self.path else (HUB,)

    def examples(self, split: Split) -> list[Example]:
        """See :meth:`Task.examples`. There are no calibration questions."""
        if split == "calibration":
            raise self.refuse_split()
        file = Path(self.path).expanduser() if self.path else local(HUB) / HUB.files[0]
        if not file.is_file():
            hint = f"take longdep_qa from {self.source}, or set task.path=null to download it"
            refuse("path", str(file), "a file on this machine", hint)
        member = self.member if file.suffix == ".zip" else None
        shown = f"{file}:{member}" if member else str(file)
        found = [
            e for line, row in rows("path", file, member=member) for e in self._document(shown, line, row)
        ]
        if not found:
            refuse(
                "path",
                shown,
                f'questions with "type": "{TYPE}"',
                "set task.path to the file longdep_qa of LooGLE",
            )
        return found

    def score(self, example: Example, text: str) -> dict[str, float]:
        """See :func:`reorder_scores`."""
        return reorder_scores(text, example.answers[0])

    def _document(self, shown: str, line: int, row: dict[str, Any]) -> Iterator[Example]:
        document, text = (take("path", shown, line, row, name) for name in ("input", "qa_pairs"))
        try:
            pairs = ast.literal_eval(text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
            refuse_line("path", shown, line, f'a Python literal in "qa_pairs" ({error})')
        if not isinstance(pairs, list) or not all(isinstance(pair, dict) for pair in pairs):
            refuse_line("path", shown, line, 'a list of dicts in "qa_pairs"')
        asked = [pair for pair in pairs if take("path", shown, line, pair, "type") == TYPE]
        for number, pair in enumerate(asked[:1] if self.first_per_document else asked):
            question, answer = (take("path", shown, line, pair, name) for name in ("Q", "A"))
            gold = numerals(answer, arabic=any(c.isdigit() for c in answer))
            if len(gold) < 2 or len(set(gold)) < len(gold):
                refuse_line(
                    "path",
                    shown,
                    line,
                    f'an "A" of two or more different numerals, such as II,I,III ({answer[:30]} is not)',
                )
            if self.numerals == "roman":
                question, gold = _in_roman(question, gold)
            yield Example(
                id=f"{line}-{number}",
                prompt=f"Please answer the question based on the long texts below. \n{document}\nQuestion: {question}\nAnswer: ",
                answers=(",".join(gold),),
                chat=self.chat,
            )


def _in_roman(question: str, gold: list[str]) -> tuple[str, list[str]]:
    """Events numbered 1., 2., ... at line starts and their order, in Roman numerals; anything else as it
    is."""
    wanted = [str(number + 1) for number in range(len(gold))]
    if sorted(_EVENT.findall(question)) != sorted(wanted) or sorted(gold) != sorted(wanted):
        return question, gold
    return _EVENT.sub(lambda found: f"{roman(int(found.group(1)))}. ", question), [
        roman(int(item)) for item in gold
    ]
