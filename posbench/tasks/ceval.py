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

_SUBJECTS = {
    "STEM": """
        computer_network 计算机网络 operating_system 操作系统 computer_architecture 计算机组成
        college_programming 大学编程 college_physics 大学物理 college_chemistry 大学化学
        advanced_mathematics 高等数学 probability_and_statistics 概率统计 discrete_mathematics 离散数学
        electrical_engineer 注册电气工程师 metrology_engineer 注册计量师 high_school_mathematics 高中数学
        high_school_physics 高中物理 high_school_chemistry 高中化学 high_school_biology 高中生物
        middle_school_mathematics 初中数学 middle_school_biology 初中生物 middle_school_physics 初中物理
        middle_school_chemistry 初中化学 veterinary_medicine 兽医学
    """,
    "Social Science": """
        college_economics 大学经济学 business_administration 工商管理 marxism 马克思主义基本原理
        mao_zedong_thought 毛泽东思想和中国特色社会主义理论体系概论 education_science 教育学
        teacher_qualification 教师资格 high_school_politics 高中政治 high_school_geography 高中地理
        middle_school_politics 初中政治 middle_school_geography 初中地理
    """,
    "Humanities": """
        modern_chinese_history 近代史纲要 ideological_and_moral_cultivation 思想道德修养与法律基础
        logic 逻辑学 law 法学 chinese_language_and_literature 中国语言文学 art_studies 艺术学
        professional_tour_guide 导游资格 legal_professional 法律职业资格 high_school_chinese 高中语文
        high_school_history 高中历史 middle_school_history 初中历史
    """,
    "Other": """
        civil_servant 公务员 sports_science 体育学 plant_protection 植物保护 basic_medicine 基础医学
        clinical_medicine 临床医学 urban_and_rural_planner 注册城乡规划师 accountant 注册会计师
        fire_engineer 注册消防工程师 environmental_impact_assessment_engineer 环境影响评价工程师
        tax_accountant 税务师 physician 医师资格
    """,
}
SUBJECTS = {
    subject: (name, category)
    for category, text in _SUBJECTS.items()
    for subject, name in zip(text.split()[::2], text.split()[1::2], strict=True)
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
    """C-Eval, the 1346 questions of its val files, each after the first five dev questions of its subject.

    ``split=test`` has 12342 questions, whose answers the original files do not hold: the run then writes
    ``ceval_submission.json`` in the leaderboard's form, and scores what has an answer in the file. ``path``
    takes the original CSV files (``ceval-exam.zip``), None takes ceval/ceval-exam.

    ``prompt=official`` (the default) is hkust-nlp/ceval's; ``lm_eval`` leaves 考试的 out of the header, puts
    a blank before the letter and strips the question. The answer-only form; there is no chain-of-thought
    variant. ``answer=generate`` reads the letter with regular expressions, see :meth:`letter`. The official
    mean is that over subjects.
    """

    source: ClassVar[str] = "Huang et al. 2023, github.com/hkust-nlp/ceval, hub ceval/ceval-exam"
    licence: ClassVar[str] = "CC BY-NC-SA 4.0 (data)"
    size: ClassVar[str] = "1346 questions (val) in 52 subjects"
    categories: ClassVar[Mapping[str, str]] = {name: kind for name, (_, kind) in SUBJECTS.items()}
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
        of = "的" if self.prompt == "lm_eval" else "考试的"
        return f"以下是中国关于{SUBJECTS[subject][0]}{of}单项选择题，请选出其中的正确答案。"

    def letter(self, text: str) -> str:
        """The letter alone at the start; else that of 答案是X, X正确, 选X; else the only one; or none."""
        # Full-width letters and signs count as their narrow forms.
        reply = unicodedata.normalize("NFKC", text)
        for form in _FORMS:
            if found := re.search(form, reply):
                return found[1]
        named = set(re.findall(_LETTER, reply))
        return named.pop() if len(named) == 1 else ""

    def submission(self, replies: Sequence[tuple[Example, str]]) -> Mapping[str, str]:
        """``ceval_submission.json``: the letter of every id by subject; nothing for ``split=val``."""
        if self.split != "test":
            return {}
        letters: dict[str, dict[str, str]] = {}
        for example, text in replies:
            letters.setdefault(example.subset, {})[example.id.rpartition("-")[2]] = self.letter(text)
        return {"ceval_submission.json": json.dumps(letters, ensure_ascii=False, indent=1) + "\n"}
