"""LongBench v1 (Bai et al. 2023): 21 tasks over long texts, each with a score of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from posbench.files.sources import Source
from posbench.schema import Count, Truncation
from posbench.tasks import scorers
from posbench.tasks.base import EvaluationOnly, Example
from posbench.tasks.reading import (
    Line,
    check_subsets,
    find_file,
    json_beside,
    read_data_rows,
)

PROMPTS: dict[str, Any] = json_beside(__file__)["tasks"]
"""Prompt and tokens to generate of every task, character by character as in the benchmark (MIT)."""

CATEGORIES: dict[str, tuple[str, ...]] = {
    "single_doc_qa": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "multi_doc_qa": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "summarization": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "few_shot": ("trec", "triviaqa", "samsum", "lsht"),
    "synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    "code": ("lcc", "repobench-p"),
}
"""The benchmark's six categories."""

CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
ENGLISH_AND_CODE = tuple(
    task for tasks in CATEGORIES.values() for task in tasks if task not in CHINESE
)
"""The 16 tasks of Yu et al. 2025: 14 English ones and 2 of code."""

WITHOUT_TEMPLATE = frozenset({*CATEGORIES["few_shot"], *CATEGORIES["code"]})
"""Tasks whose prompt ends in the middle of a pattern to continue, and takes no chat template."""
EXTENDED = tuple(
    task for task in ENGLISH_AND_CODE if task not in ("narrativeqa", "musique", "qmsum")
)
"""The 13 tasks of LongBench-E."""
BUCKETS = {"0-4k": 4000, "4-8k": 8000, "8k+": float("inf")}
"""LongBench-E's ranges of length: each ends before this many words."""
COUNTS = {"multifieldqa_en": 150, "lcc": 500, "repobench-p": 500}
"""Questions of the official files, where they are not 200."""

_F1 = (
    "narrativeqa",
    "qasper",
    "multifieldqa_en",
    "hotpotqa",
    "2wikimqa",
    "musique",
    "triviaqa",
)
Scorer = Callable[[str, str], float]
SCORERS: dict[str, Scorer] = {
    **dict.fromkeys(_F1, scorers.qa_f1),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), scorers.rouge_l),
    **dict.fromkeys(("dureader", "vcsum"), scorers.rouge_l_zh),
    **dict.fromkeys(("lcc", "repobench-p"), scorers.code_similarity),
    "multifieldqa_zh": scorers.qa_f1_zh,
    "passage_count": scorers.number_share,
    **dict.fromkeys(
        ("passage_retrieval_en", "passage_retrieval_zh"), scorers.retrieval
    ),
}
"""The score of a reply against one gold text; trec and lsht also need the classes and are scored by name."""

GOLD_FORMS = {
    "passage_count": r"\d+",
    "passage_retrieval_en": r"Paragraph \d+",
    "passage_retrieval_zh": r"段落\d+",
}
"""Forms of the gold texts that are scored."""
CLASSIFICATION = ("trec", "lsht")
"""Tasks whose gold text is one of some classes."""


@dataclass(frozen=True, kw_only=True)
class LongBench(EvaluationOnly):
    """LongBench v1.

    Args:
        subsets: Names of the tasks; the 16 of Yu et al. 2025 by default.
        path: A folder with ``<task>.jsonl`` files or ``data.zip``, or that zip; None: the hub's.
        protocol: ``official``: samsum stops at a line break after at least one token, and replies are scored
            as they are. ``yu``: as the program of Yu et al. 2025: no such stop, at least one token in every
            task, and replies stripped before they are scored (code loses its indent).
        extended: LongBench-E instead: the files ``<task>_e.jsonl``, without tasks that are not in it, and one
            subset for every task and range of length (under 4000 words, under 8000, more).

    Score: 0..1, the best one over the gold texts: token F1, ROUGE-L, share of right numbers, class named, or
    similarity of code (:mod:`posbench.tasks.scorers`). Of few-shot replies the first line counts. ``all`` is
    the mean over tasks, ``categories`` that over the six categories; the program of Yu et al. prints both. It
    has a ``max_prompt_tokens`` of the window minus 500.
    """

    # 2: a gold text that normalisation would empty keeps its articles or signs
    version: ClassVar[str] = "2"
    metric: ClassVar[str] = "score"
    source: ClassVar[str] = (
        "Bai et al. 2023, arXiv:2308.14508, github.com/THUDM/LongBench"
    )
    prescribes_length: ClassVar[bool] = True
    licence: ClassVar[str] = "MIT"
    size: ClassVar[str] = "21 tasks, 4750 questions"
    average: ClassVar[Literal["examples", "subsets"]] = "subsets"

    holds: ClassVar[tuple[str, ...]] = ("*.jsonl", "data/*.jsonl", "data.zip")

    name: str = "longbench"
    subsets: tuple[str, ...] = ENGLISH_AND_CODE
    protocol: Literal["official", "yu"] = "official"
    extended: bool = False
    max_new_tokens: Count = 512
    truncation: Truncation = "middle"

    def __post_init__(self) -> None:
        check_subsets(self.subsets, list(PROMPTS) if self.chosen else EXTENDED)

    @property
    def chosen(self) -> tuple[str, ...]:
        """The tasks that are asked, without those that LongBench-E does not have."""
        if not self.extended:
            return self.subsets
        return tuple(task for task in self.subsets if task in EXTENDED)

    def official(self) -> tuple[Source, ...]:
        """Return the benchmark's archive on the hub, data.zip."""
        source = Source(
            kind="dataset",
            id="THUDM/LongBench",
            field="task.path",
            files=("data.zip",),
        )
        return (source,)

    def questions(self) -> Iterator[Example]:
        """Ids are ``<task>-<_id>``, subsets the tasks (LongBench-E: ``<task>/<range>``)."""
        folder = self.place()
        for task in self.chosen:
            yield from self._task(folder, task)

    def score(self, example: Example, text: str) -> dict[str, float]:
        """Score a reply by the subset's metric: the best over the gold answers.

        Args:
            example: The prompt, with the subset's name and classes in ``meta``.
            text: The reply.

        Returns:
            The number as ``score``, 0..1.
        """
        task = example.meta["task"]
        # Scripts of papers differ: that of Yu et al. strips replies.
        if self.protocol == "yu":
            text = text.strip()
        # As the benchmark does: after the answer, models go on with another question.
        if task in CATEGORIES["few_shot"]:
            text = text.lstrip("\n").split("\n")[0]
        if task in CLASSIFICATION:
            classes = example.meta["all_classes"]
            scorer: Scorer = partial(scorers.classification, classes=classes)
        else:
            scorer = SCORERS[task]
        return {"score": max(scorer(text, gold) for gold in example.answers)}

    def averages(self) -> Mapping[str, tuple[str, ...]]:
        """Return the subsets over which averages are taken, by name of the average.

        These are the categories of tasks and their mean, ``categories``; of LongBench-E the ranges of length.
        """
        if self.extended:
            return {
                bucket: tuple(f"{task}/{bucket}" for task in self.chosen)
                for bucket in BUCKETS
            }
        averages = {}
        for name, tasks in CATEGORIES.items():
            chosen = tuple(task for task in tasks if task in self.chosen)
            if chosen:
                averages[name] = chosen
        return {**averages, "categories": tuple(averages)}

    def _task(self, folder: Path, task: str) -> Iterator[Example]:
        """Yield the examples of a task from its file in a folder or in data.zip."""
        name = f"{task}_e.jsonl" if self.extended else f"{task}.jsonl"
        hint = "get data.zip from hf.co/datasets/THUDM/LongBench"
        names = (name, f"data/{name}")
        file, member = find_file(folder, names, hint, archive="data.zip")
        # The official files have a known number of examples.
        count = 0 if self.path or self.extended else COUNTS.get(task, 200)
        for _, line in read_data_rows("path", file, member, unique="_id", count=count):
            yield self._example(line, task)

    def _example(self, line: Line, task: str) -> Example:
        """Return the example of a line of a task's file."""
        context = line.take("context")
        question = line.get("input")
        template: str = PROMPTS[task]["prompt"]
        # Some copies of repobench-p hold all of the prompt's text in the context; the template joins the two.
        needs_question = "{input}" in template and task != "repobench-p"
        if not isinstance(question, str) or (needs_question and not question):
            line.refuse('a field "input" (str, not empty in this task)')
        answers = line.take("answers", list)
        form = GOLD_FORMS.get(task, "")
        if not all(isinstance(text, str) and re.search(form, text) for text in answers):
            shown_form = f" like {form}" if form else ""
            line.refuse(f'a field "answers" (list of str{shown_form})')
        meta: dict[str, Any] = {"task": task}
        if task in CLASSIFICATION:
            classes = line.take("all_classes", list)
            is_text = all(isinstance(name, str) for name in classes)
            if not is_text or not set(answers) <= set(classes):
                line.refuse(
                    'a field "all_classes" (list of str) with all of the answers'
                )
            meta["all_classes"] = classes
        subset = task
        if self.extended:
            length = line.take("length", int)
            bucket = next(name for name, end in BUCKETS.items() if length < end)
            subset = f"{task}/{bucket}"
        # As the benchmark's program does; Yu et al. also ask for one token at least.
        stops_at_line_break = self.protocol == "official" and task == "samsum"
        needs_token = self.protocol == "yu" or task == "samsum"
        return Example(
            id=f"{task}-{line.take('_id')}",
            prompt=template.format(context=context, input=question),
            answers=tuple(answers),
            subset=subset,
            chat=task not in WITHOUT_TEMPLATE,
            max_new_tokens=min(PROMPTS[task]["max_new_tokens"], self.max_new_tokens),
            min_new_tokens=1 if needs_token else 0,
            stop=("\n",) if stops_at_line_break else (),
            meta=meta,
        )
