"""MMLU (Hendrycks et al. 2021): multiple-choice questions in 57 subjects, after five demonstrations."""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from posbench.schema import Count
from posbench.tasks.exam import LETTERS, Exam, Question
from posbench.tasks.reading import Line

_SUBJECTS = {
    "STEM": """
        abstract_algebra astronomy college_biology college_chemistry college_computer_science
        college_mathematics college_physics computer_security conceptual_physics electrical_engineering
        elementary_mathematics high_school_biology high_school_chemistry high_school_computer_science
        high_school_mathematics high_school_physics high_school_statistics machine_learning
    """,
    "humanities": """
        formal_logic high_school_european_history high_school_us_history high_school_world_history
        international_law jurisprudence logical_fallacies moral_disputes moral_scenarios philosophy
        prehistory professional_law world_religions
    """,
    "social sciences": """
        econometrics high_school_geography high_school_government_and_politics high_school_macroeconomics
        high_school_microeconomics high_school_psychology human_sexuality professional_psychology
        public_relations security_studies sociology us_foreign_policy
    """,
    "other": """
        anatomy business_ethics clinical_knowledge college_medicine global_facts human_aging management
        marketing medical_genetics miscellaneous nutrition professional_accounting professional_medicine
        virology
    """,
}
CATEGORIES = dict(sorted((subject, kind) for kind, text in _SUBJECTS.items() for subject in text.split()))
"""As in ``categories.py`` of hendrycks/test; lm-evaluation-harness counts anatomy as STEM."""


@dataclass(frozen=True, kw_only=True)
class MMLU(Exam):
    """MMLU's test set: 14042 questions, each with the first five dev questions of its subject before it.

    ``path`` takes the original CSV files, which have no header line; None takes cais/mmlu.

    ``prompt=lm_eval`` (the default, what leaderboards report) strips blanks around a question; ``official``
    (evaluate.py of hendrycks/test) does not, and has two blanks before the subject in the header. That code
    also drops demonstrations until a prompt fits 2048 tokens; a task knows no tokens, so here a prompt over
    the context window follows ``truncation``. ``answer=generate`` is lm-eval's mmlu_generative: the first
    line, exact but for letter case and punctuation.
    """

    source: ClassVar[str] = "Hendrycks et al. 2021, github.com/hendrycks/test (data.tar), hub cais/mmlu"
    licence: ClassVar[str] = "MIT"
    size: ClassVar[str] = "14042 questions in 57 subjects"
    categories: ClassVar[Mapping[str, str]] = CATEGORIES
    hub: ClassVar[str] = "cais/mmlu"
    columns: ClassVar[tuple[str, ...]] = ("question", *LETTERS, "answer")
    parts: ClassVar[Mapping[str, int]] = {"test": 14042}
    cue: ClassVar[str] = "Answer:"
    stop: ClassVar[tuple[str, ...]] = ("\n",)

    name: str = "mmlu"
    max_new_tokens: Count = 5
    prompt: Literal["official", "lm_eval"] = "lm_eval"

    def header(self, subject: str) -> str:
        """See :meth:`Exam.header`."""
        about = ("  " if self.prompt == "official" else " ") + subject.replace("_", " ")
        return f"The following are multiple choice questions (with answers) about{about}."

    def letter(self, text: str) -> str:
        """The reply without punctuation and outer blanks, in capitals."""
        return text.translate(str.maketrans("", "", string.punctuation)).strip().upper()

    def _question(self, row: Line, number: int, part: str) -> Question:
        if not self.path:
            # The hub has the options in one list, and a number for the answer.
            options, answer = row.take("choices", list), row.take("answer", int)
            if len(options) != len(LETTERS):
                row.refuse('a field "choices" with four options')
            if not 0 <= answer < len(LETTERS):
                row.refuse(f'a field "answer" from 0 to 3 (not {answer})')
            row.update(zip(LETTERS, options, strict=True), answer=LETTERS[answer])
        return super()._question(row, number, part)
