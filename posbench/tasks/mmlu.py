"""MMLU (Hendrycks et al. 2021): multiple-choice questions in 57 subjects, after five demonstrations."""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from posbench.schema import Count
from posbench.tasks.exam import LETTERS, Exam, Question
from posbench.tasks.reading import Line, json_beside


@dataclass(frozen=True, kw_only=True)
class MMLU(Exam):
    """MMLU's test set: 14042 questions, each with the first five dev questions of its subject before it.

    ``path`` takes the original CSV files, which have no header line; None takes cais/mmlu.

    ``prompt=lm_eval`` (the default, what leaderboards report) strips blanks around a question; ``official``
    (evaluate.py of hendrycks/test) does not, and has two blanks before the subject in the header. That code also drops
    demonstrations until a prompt fits 2048 tokens; a task does not see tokens, so here ``truncation`` applies to
    prompts over the context window. ``answer=generate`` is lm-eval's mmlu_generative: the first line, exact but for
    letter case and punctuation.
    """

    source: ClassVar[str] = (
        "Hendrycks et al. 2021, github.com/hendrycks/test (data.tar), hub cais/mmlu"
    )
    licence: ClassVar[str] = "MIT"
    size: ClassVar[str] = "14042 questions in 57 subjects"
    categories: ClassVar[Mapping[str, str]] = json_beside(__file__)["subjects"]
    hub: ClassVar[str] = "cais/mmlu"
    columns: ClassVar[tuple[str, ...]] = ("question", *LETTERS, "answer")
    parts: ClassVar[Mapping[str, int]] = {"test": 14042}
    cue: ClassVar[str] = "Answer:"
    stop: ClassVar[tuple[str, ...]] = ("\n",)
    version: ClassVar[str] = "2"  # 2: a reply is read to the end of its first line

    name: str = "mmlu"
    max_new_tokens: Count = 5
    prompt: Literal["official", "lm_eval"] = "lm_eval"

    def header(self, subject: str) -> str:
        """See :meth:`Exam.header`."""
        blanks = "  " if self.prompt == "official" else " "
        topic = subject.replace("_", " ")
        return f"The following are multiple choice questions (with answers) about{blanks}{topic}."

    def letter(self, text: str) -> str:
        """The first line of the reply without punctuation and outer blanks, in capitals."""
        # In process a stop text that is a token ends a reply at this token alone: "\n\n" may be another one.
        line = text.split("\n", 1)[0]
        without_punctuation = str.maketrans("", "", string.punctuation)
        return line.translate(without_punctuation).strip().upper()

    def _question(self, line: Line, number: int, part: str) -> Question:
        """Return a line as a question; a line of the hub is first brought into the form of the official CSV files.

        Args:
            line: The line, by field.
            number: Its number in the file, for the id.
            part: Name of the subject.
        """
        if not self.path:
            # The hub has the options in one list, and a number for the answer.
            options = line.take("choices", list)
            answer = line.take("answer", int)
            if len(options) != len(LETTERS):
                line.refuse('a field "choices" with four options')
            if not 0 <= answer < len(LETTERS):
                line.refuse(f'a field "answer" from 0 to 3 (not {answer})')
            line.update(zip(LETTERS, options, strict=True))
            line["answer"] = LETTERS[answer]
        return super()._question(line, number, part)
