"""The first look at a result, the same on page and terminal: a word, a few numbers, one sentence, the next command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from posbench.stats.bootstrap import Estimate, with_interval

Tone = Literal["good", "bad", "open"]
"""``good`` is green, ``bad`` red, and ``open`` neither: undecided, mixed, or nothing that is judged."""
MAX_WORDS = 25
"""Words of a sentence."""
MAX_NUMBERS = 3
"""Numbers beside the word."""


class Number(NamedTuple):
    """A number of a glance.

    Attributes:
        name: What was measured, as ``position bias, unmodified``.
        value: The number as text, with its interval where it has one.
        unit: Its unit, as ``points``.
    """

    name: str
    value: str
    unit: str

    @classmethod
    def of(
        cls, name: str, estimate: Estimate, unit: str, form: str = "", scale: float = 1
    ) -> Number:
        """Return an estimate as a number.

        Args:
            name: What was measured.
            estimate: The number with its interval.
            unit: Its unit, after scaling.
            form: See :func:`posbench.stats.bootstrap.with_interval`.
            scale: Factor of value and interval; 100 makes points of shares.
        """
        value, low, high = (scale * end for end in estimate[:3])
        return cls(name, with_interval(value, low, high, form), unit)

    def __str__(self) -> str:
        """Name, number and unit."""
        return f"{self.name} {self.value} {self.unit}"


@dataclass(frozen=True)
class Glance:
    """The first look at a result.

    Attributes:
        word: The verdict in a word or a few.
        tone: Its colour.
        sentence: The result in one sentence of at most :data:`MAX_WORDS` words.
        numbers: At most :data:`MAX_NUMBERS` numbers behind it.
        next: The command to run next; empty: nothing is left to do.
        purpose: What that command does, in a few words.
        details: All else that is to be said, in sentences.
        sample: What the numbers rest on, as ``270 prompts at 9 positions``; empty where they do not say.
        rule: What the numbers mean, and when the word is given, in a sentence or two.
    """

    word: str
    tone: Tone
    sentence: str
    numbers: tuple[Number, ...] = ()
    next: str = ""
    purpose: str = ""
    details: str = ""
    sample: str = ""
    rule: str = ""

    @property
    def basis(self) -> str:
        """Whether the numbers have intervals, and what they rest on."""
        has_intervals = any("[" in number.value for number in self.numbers)
        return ", ".join(filter(None, ["95 % intervals" * has_intervals, self.sample]))

    @property
    def text(self) -> str:
        """Sentence and details."""
        return f"{self.sentence} {self.details}".strip()


def first_short(*sentences: str) -> str:
    """Return the first sentence of at most :data:`MAX_WORDS` words; if all are longer, the last one.

    Args:
        sentences: The same in fewer and fewer words. Names and claims in them may have any length.
    """
    for sentence in sentences:
        if len(sentence.split()) <= MAX_WORDS:
            return sentence
    return sentences[-1]


def noun_for(number: int, noun: str) -> str:
    """A noun as it stands behind a number: ``run`` behind 1, else ``runs``."""
    return noun if number == 1 else f"{noun}s"


def sentence_case(text: str) -> str:
    """A text that begins with a capital and ends with a full stop; an empty one stays empty."""
    text = f"{text[:1].upper()}{text[1:]}"
    return f"{text}." if text and not text.endswith(".") else text
