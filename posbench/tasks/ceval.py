"""C-Eval (Huang et al. 2023): multiple-choice questions in Chinese, 52 subjects, after five
demonstrations."""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from posbench.tasks.base import Example
from posbench.tasks.exam import Exam

SUBJECTS = {
    "computer_network": ("计算机网络", "STEM"),
    "operating_system": ("操作系统", "STEM"),
    "computer_architecture": ("计算机组成", "STEM"),
    "college_programming": ("大学编程", "STEM"),
    "college_physics": ("大学物理", "STEM"),
    "college_chemistry": ("大学化学", "STEM"),
    "advanced_mathematics": ("高等数学", "STEM"),
    "probability_and_statistics": ("概率统计", "STEM"),
    "discrete_mathematics": ("离散数学", "STEM"),
    "electrical_engineer": ("注册电气工程师", "STEM"),
    "metrology_engineer": ("注册计量师", "STEM"),
    "high_school_mathematics": ("高中数学", "STEM"),
    "high_school_physics": ("高中物理", "STEM"),
    "high_school_chemistry": ("高中化学", "STEM"),
    "high_school_biology": ("高中生物", "STEM"),
    "middle_school_mathematics": ("初中数学", "STEM"),
    "middle_school_biology": ("初中生物", "STEM"),
    "middle_school_physics": ("初中物理", "STEM"),
    "middle_school_chemistry": ("初中化学", "STEM"),
    "veterinary_medicine": ("兽医学", "STEM"),
    "college_economics": ("大学经济学", "Social Science"),
    "business_administration": ("工商管理", "Social Science"),
    "marxism": ("马克思主义基本原理", "Social Science"),
    "mao_zedong_thought": ("毛泽东思想和中国特色社会主义理论体系概论", "Social Science"),
    "education_science": ("教育学", "Social Science"),
    "teacher_qualification": ("教师资格", "Social Science"),
    "high_school_politics": ("高中政治", "Social Science"),
    "high_school_geography": ("高中地理", "Social Science"),
    "middle_school_politics": ("初中政治", "Social Science"),
    "middle_school_geography": ("初中地理", "Social Science"),
    "modern_chinese_history": ("近代史纲要", "Humanities"),
    "ideological_and_moral_cultivation": ("思想道德修养与法律基础", "Humanities"),
    "logic": ("逻辑学", "Humanities"),
    "law": ("法学", "Humanities"),
    "chinese_language_and_literature": ("中国语言文学", "Humanities"),
    "art_studies": ("艺术学", "Humanities"),
    "professional_tour_guide": ("导游资格", "Humanities"),
    "legal_professional": ("法律职业资格", "Humanities"),
    "high_school_chinese": ("高中语文", "Humanities"),
    "high_school_history": ("高中历史", "Humanities"),
    "middle_school_history": ("初中历史", "Humanities"),
    "civil_servant": ("公务员", "Other"),
    "sports_science": ("体育学", "Other"),
    "plant_protection": ("植物保护", "Other"),
    "basic_medicine": ("基础医学", "Other"),
    "clinical_medicine": ("临床医学", "Other"),
    "urban_and_rural_planner": ("注册城乡规划师", "Other"),
    "accountant": ("注册会计师", "Other"),
    "fire_engineer": ("注册消防工程师", "Other"),
    "environmental_impact_assessment_engineer": ("环境影响评价工程师", "Other"),
    "tax_accountant": ("税务师", "Other"),
    "physician": ("医师资格", "Other"),
}
"""Subject to Chinese name and category, from ``subject_mapping.json`` of hkust-nlp/ceval (MIT)."""

_LETTER = r"(?<![A-Za-z])([A-D])(?![A-Za-z])"
_FORMS = (
    r"^\W*([A-D])(?!\w)",
    rf"答案(?:应该?|就)?(?:是|为|选)?(?:选项)?\W*{_LETTER}",
    rf"{_LETTER}\W*选?项?(?:是|都是)?(?:正确|对的|符合)",
    rf"选[择项]?\W*{_LETTER}(?!\W*[错不])",
)
"""How replies name a letter, the surest form first."""


@dataclass(frozen=True, kw_only=True)
class CEval(Exam):
    """C-Eval, the 1346 questions of its val files (``split=val``), each after the first five dev questions of
    its subject.

    Args:
        split: ``val``, or ``test``: 12342 questions, whose answers the original files do not hold. The run
            then writes ``ceval_submission.json`` in the leaderboard's form, and scores what has an answer in
            the file.

    ``path`` takes the original CSV files (``ceval-exam.zip``), None takes ceval/ceval-exam.

    ``prompt=official`` (the default) is hkust-nlp/ceval's; ``lm_eval`` leaves 考试的 out of the header, puts a
    blank before the letter and strips the question. The answer-only form; there is no chain-of-thought
    variant. ``answer=generate`` reads the letter with regular expressions, see :meth:`letter`. The official
    mean is that over subjects.
    """

    version: ClassVar[str] = "1"
    source: ClassVar[str] = (
        "Huang et al. 2023, github.com/hkust-nlp/ceval, huggingface.co/datasets/ceval/ceval-exam"
    )
    licence: ClassVar[str] = "CC BY-NC-SA 4.0 (data)"
    size: ClassVar[str] = "1346 questions (val) in 52 subjects"
    categories: ClassVar[Mapping[str, str]] = {
        subject: category for subject, (_, category) in SUBJECTS.items()
    }
    hub: ClassVar[str] = "ceval/ceval-exam"
    parts: ClassVar[Mapping[str, int]] = {"val": 1346, "test": 12342}
    cue: ClassVar[str] = "答案："

    name: str = "ceval"
    max_new_tokens: int = 32
    split: Literal["val", "test"] = "val"
    mean: Literal["questions", "subjects"] = "subjects"

    @property
    def part(self) -> str:
        """See :meth:`Exam.part`."""
        return self.split

    @property
    def gap(self) -> str:
        """Nothing, ``答案：A``, but a blank in lm-eval's form."""
        return " " if self.prompt == "lm_eval" else ""

    def header(self, subject: str) -> str:
        """See :meth:`Exam.header`."""
        of = "的" if self.prompt == "lm_eval" else "考试的"
        return f"以下是中国关于{SUBJECTS[subject][0]}{of}单项选择题，请选出其中的正确答案。"

    def labelled(self, part: str) -> bool:
        """See :meth:`Exam.labelled`."""
        return part != "test"

    def letter(self, text: str) -> str:
        """The letter alone at the start; else that of 答案是X, of X正确, of 选X; else the only one named; else
        none.

        Full-width letters and signs count as their narrow forms.
        """
        reply = unicodedata.normalize("NFKC", text)
        for form in _FORMS:
            if found := re.search(form, reply):
                return found[1]
        named = set(re.findall(_LETTER, reply))
        return named.pop() if len(named) == 1 else ""

    def submission(self, replies: Sequence[tuple[Example, str]]) -> Mapping[str, str]:
        """``ceval_submission.json``: per subject the letter of every question id; nothing for
        ``split=val``."""
        if self.split != "test":
            return {}
        letters: dict[str, dict[str, str]] = {}
        for example, text in replies:
            letters.setdefault(example.subset, {})[example.id.rpartition("-")[2]] = self.letter(text)
        return {"ceval_submission.json": json.dumps(letters, ensure_ascii=False, indent=1) + "\n"}
