"""C-Eval (Huang et al. 2023): multiple-choice questions in Chinese, 52 subjects, after demonstrations."""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from posbench.schema import Count
from posbench.tasks.base import Example
from posbench.tasks.exam import Exam
from posbench.tasks.reading import json_beside

SUBJECTS: dict[str, tuple[str, str]] = {
    subject: (name, category)
    for subject, (name, category) in json_beside(__file__)["subjects"].items()
}
"""Subject to Chinese name and category."""

_LETTER = r"(?<![A-Za-z])([A-D])(?![A-Za-z])"
_ANSWER_FORMS = (
    r"^\W*([A-D])(?!\w)",
    rf"答案(?:应该?|就)?(?:是|为|选)?(?:选项)?\W*{_LETTER}",
    rf"{_LETTER}\W*选?项?(?:是|都是)?(?:正确|对的|符合)",
    rf"选[择项]?\W*{_LETTER}(?!\W*[错不])",
)
"""Patterns of letters in replies, the surest form first."""


@dataclass(frozen=True, kw_only=True)
class CEval(Exam):
    """C-Eval, the 1346 questions of its val files, each after the first five dev questions of its subject.

    ``split=test`` has 12342 questions, whose answers are not in the original files: the run then writes
    ``ceval_submission.json`` in the leaderboard's form, and scores the questions that have an answer in the file.
    ``path`` takes the original CSV files (``ceval-exam.zip``), None takes ceval/ceval-exam.

    ``prompt=official`` (the default) is hkust-nlp/ceval's; ``lm_eval`` leaves 考试的 out of the header, puts a blank
    before the letter and strips the question. Answers alone, no chain of thought; ``answer=generate`` reads the letter
    with :meth:`letter`. The official mean is over subjects.
    """

    source: ClassVar[str] = (
        "Huang et al. 2023, github.com/hkust-nlp/ceval, hub ceval/ceval-exam"
    )
    licence: ClassVar[str] = "CC BY-NC-SA 4.0 (data)"
    size: ClassVar[str] = "1346 questions (val) in 52 subjects"
    categories: ClassVar[Mapping[str, str]] = {
        subject: category for subject, (_, category) in SUBJECTS.items()
    }
    hub: ClassVar[str] = "ceval/ceval-exam"
    parts: ClassVar[Mapping[str, int]] = {"val": 1346, "test": 12342}
    unlabelled: ClassVar[str] = "test"
    cue: ClassVar[str] = "答案："

    name: str = "ceval"
    max_new_tokens: Count = 32
    split: Literal["val", "test"] = "val"  # type: ignore[misc]
    mean: Literal["questions", "subjects"] = "subjects"

    @property
    def gap(self) -> str:  # type: ignore[override]
        """Nothing, ``答案：A``, but a blank in lm-eval's form."""
        return " " if self.prompt == "lm_eval" else ""

    def header(self, subject: str) -> str:
        """See :meth:`Exam.header`."""
        name, _ = SUBJECTS[subject]
        exam = "的" if self.prompt == "lm_eval" else "考试的"
        return f"以下是中国关于{name}{exam}单项选择题，请选出其中的正确答案。"

    def letter(self, text: str) -> str:
        """Return the letter of the choice in a reply; empty if there is none.

        In this order: a single letter at the start; the letter of "the answer is X" (答案是X), "X is right" (X正确) or
        "choose X" (选X); the only letter of the reply.
        """
        # Full-width letters and punctuation become ASCII.
        reply = unicodedata.normalize("NFKC", text)
        for form in _ANSWER_FORMS:
            match = re.search(form, reply)
            if match:
                return match[1]
        letters = set(re.findall(_LETTER, reply))
        return letters.pop() if len(letters) == 1 else ""

    def submission(self, replies: Sequence[tuple[Example, str]]) -> Mapping[str, str]:
        """Return the file to submit to the benchmark, ``ceval_submission.json``, as text by its name.

        It has the letter of every question by subject; for other splits than ``test`` there is no file.

        Args:
            replies: Each example with its reply.
        """
        if self.split != "test":
            return {}
        letters: dict[str, dict[str, str]] = {}
        for example, text in replies:
            _, _, number = example.id.rpartition("-")
            letters.setdefault(example.subset, {})[number] = self.letter(text)
        content = json.dumps(letters, ensure_ascii=False, indent=1)
        return {"ceval_submission.json": f"{content}\n"}
