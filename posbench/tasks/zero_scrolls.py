"""ZeroSCROLLS (Shaham et al. 2023): summaries, questions and aggregation over long texts, zero-shot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from posbench.files.sources import Source
from posbench.late import np, pd
from posbench.schema import Count, Truncation
from posbench.tasks import scorers
from posbench.tasks.base import EvaluationOnly, Example
from posbench.tasks.reading import Line, check_subsets, find_file, read_data_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUMMARIES = ("gov_report", "summ_screen_fd", "qmsum", "squality")
NEW_TOKENS = {
    "gov_report": 1024,
    "summ_screen_fd": 512,
    "qmsum": 512,
    "squality": 512,
    "qasper": 128,
    "narrative_qa": 64,
    "quality": 10,
    "musique": 32,
    "space_digest": 36,
    "book_sum_sort": 256,
}
"""The ten tasks and the most tokens that the benchmark generates."""
ROUGES = ("rouge1", "rouge2", "rougeL")

LPES = (*SUMMARIES, "qasper", "narrative_qa", "space_digest")
"""The seven tasks of LPES; Ms-PoE has book_sum_sort in place of space_digest."""

SCORERS = {
    "space_digest": scorers.exponential_similarity,
    "book_sum_sort": scorers.concordance_index,
}
"""Scorers of a reply against one gold text, for tasks not scored by ROUGE, a letter or token F1."""

FORMAT_REQUEST = "Do not provide any explanation."
"""Added to the instruction of every task but the summaries, for chat models."""


@dataclass(frozen=True, kw_only=True)
class ZeroSCROLLS(EvaluationOnly):
    """ZeroSCROLLS.

    Args:
        subsets: Names of the tasks; the seven of LPES by default.
        split: ``validation`` (about 20 questions a task, with gold answers) or ``test`` (the leaderboard's,
            without: nothing is scored, and :meth:`submission` writes the file to hand in, of all ten tasks).
        path: A folder with ``<task>/<validation or test>.jsonl`` or ``<task>.zip`` files; None: the hub's.
        chat_format: True: the prompts that the benchmark gives chat models, where a template may surround
            them: no response header (``Answer:``) at the end, and :data:`FORMAT_REQUEST` after the
            instruction except for summaries. False: the file's ``input`` and no template.
        rouge: A summary task's value: ``corpus`` averages each ROUGE over the examples and takes the
            geometric mean of the three (the code of the SCROLLS family); ``example`` averages the geometric
            means of the examples (the other reading of the paper).
        max_new_tokens: 512 as in LPES; tasks whose own number is smaller keep it. Gov_report's own is 1024.

    Score: 0..1, the best one over the references. Summaries: geometric mean of ROUGE-1, -2 and -L, whose
    maxima over the references are taken one by one; quality: the right letter; space_digest: exponential
    similarity; book_sum_sort: concordance index; else token F1. The benchmark's score is the mean over tasks.
    """

    # 2: a gold text that normalisation would empty keeps its articles or signs
    version: ClassVar[str] = "2"
    metric: ClassVar[str] = "score"
    source: ClassVar[str] = "Shaham et al. 2023, arXiv:2305.14196, hub tau/zero_scrolls"
    prescribes_length: ClassVar[bool] = True
    licence: ClassVar[str] = "MIT (code); the texts have those of the ten data sets"
    size: ClassVar[str] = (
        "10 tasks, about 20 validation questions each; test answers are private"
    )
    average: ClassVar[Literal["examples", "subsets"]] = "subsets"

    holds: ClassVar[tuple[str, ...]] = ("*/*.jsonl", "*.zip")

    name: str = "zero_scrolls"
    subsets: tuple[str, ...] = LPES
    split: Literal["validation", "test"] = "validation"
    chat_format: bool = True
    rouge: Literal["corpus", "example"] = "corpus"
    max_new_tokens: Count = 512
    truncation: Truncation = "document"

    def __post_init__(self) -> None:
        check_subsets(self.subsets, list(NEW_TOKENS))

    def official(self) -> tuple[Source, ...]:
        """Return the hub's files: one zip per task."""
        source = Source(
            kind="dataset",
            id="tau/zero_scrolls",
            field="task.path",
            files=tuple(f"{subset}.zip" for subset in self.subsets),
        )
        return (source,)

    def questions(self) -> Iterator[Example]:
        """Ids are ``<task>-<id>``; rows with one id are references of one example."""
        folder = self.place()
        for subset in self.subsets:
            yield from self._subset(folder, subset)

    def score(self, example: Example, text: str) -> dict[str, float]:
        """Score a reply: the best over the references, and each ROUGE of summaries; empty without published answers.

        The score of a summary is the geometric mean of its three ROUGEs.

        Args:
            example: The prompt, with the references as its answers.
            text: The reply.

        Returns:
            Numbers by name, 0..1: ``score``, and of a summary each of :data:`ROUGES`.
        """
        if not example.answers:
            return {}
        if example.subset in SUMMARIES:
            triples = [scorers.rouge_triple(text, gold) for gold in example.answers]
            best = {
                name: max(triple[i] for triple in triples)
                for i, name in enumerate(ROUGES)
            }
            return {"score": float(np.prod(list(best.values())) ** (1 / 3)), **best}
        if example.subset == "quality":
            letter = scorers.letter(text)
            gold_letters = [scorers.letter(gold) for gold in example.answers]
            return {"score": float(letter != "" and letter in gold_letters)}
        scorer = SCORERS.get(example.subset, scorers.ascii_f1)
        return {"score": max(scorer(text, gold) for gold in example.answers)}

    def total(
        self, subset: str, means: Mapping[str, NDArray[np.float64]]
    ) -> NDArray[np.float64]:
        """See :meth:`Task.total`; with ``rouge=corpus`` the geometric mean of three mean ROUGEs."""
        if self.rouge == "example" or subset not in SUMMARIES:
            return means[self.metric]
        return np.cbrt(means["rouge1"] * means["rouge2"] * means["rougeL"])

    def submission(self, replies: Sequence[tuple[Example, str]]) -> Mapping[str, str]:
        """Return the file to submit to the leaderboard by its name, ``zero_scrolls_predictions.csv``.

        Its columns are Task, ID, Prediction; for other splits than ``test`` there is no file.

        Args:
            replies: Each example with its reply.
        """
        if self.split != "test":
            return {}
        table = pd.DataFrame(
            [(example.subset, example.meta["id"], reply) for example, reply in replies],
            columns=["Task", "ID", "Prediction"],
        )
        return {"zero_scrolls_predictions.csv": table.to_csv(index=False)}

    def _subset(self, folder: Path, subset: str) -> list[Example]:
        """Return the examples of a task with all of their references, which the file has in lines of the same id.

        Args:
            folder: The folder with the benchmark's files.
            subset: Name of the dataset in the benchmark, such as ``gov_report``.
        """
        hint = f"get {subset}.zip from hf.co/datasets/tau/zero_scrolls"
        name = f"{subset}/{self.split}.jsonl"
        file, member = find_file(folder, (name,), hint, archive=f"{subset}.zip")
        examples: dict[str, Example] = {}
        for _, line in read_data_rows("path", file, member):
            example = self._example(line, subset)
            earlier = examples.get(example.id)
            if earlier is None:
                examples[example.id] = example
                continue
            if earlier.prompt != example.prompt:
                line.refuse(
                    f'the "input" that "id" {example.meta["id"]} has further up'
                )
            answers = earlier.answers + example.answers
            examples[example.id] = replace(earlier, answers=answers)
        return list(examples.values())

    def _example(self, line: Line, subset: str) -> Example:
        """Return the example of a line, with one reference.

        Args:
            line: A line of the official file.
            subset: Name of the dataset in the benchmark, such as ``gov_report``.
        """
        name = line.take("id")
        prompt = line.take("input")
        answers = (_gold(line, subset),) if self.split == "validation" else ()
        keys = ("document_start_index", "query_start_index", "query_end_index")
        start, query, end = (line.take(key, int) for key in keys)
        if not 0 <= start <= query <= end <= len(prompt):
            line.refuse(
                f"indices 0 <= {' <= '.join(keys)} <= {len(prompt)}, the length of the input"
            )
        # A chat model needs no cue behind the query, and is told how to answer.
        if self.chat_format:
            prompt = prompt[:end]
        if self.chat_format and subset not in SUMMARIES:
            instruction, gap, content = prompt.partition("\n\n")
            if not gap or len(instruction) > start:
                line.refuse(
                    'an "input" with an instruction and an empty line before the document'
                )
            request = f"{instruction.strip()} {FORMAT_REQUEST}"
            prompt = request + gap + content
            added = len(request) - len(instruction)
            start += added
            query += added
        return Example(
            id=f"{subset}-{name}",
            prompt=prompt,
            answers=answers,
            subset=subset,
            chat=self.chat_format,
            max_new_tokens=min(NEW_TOKENS[subset], self.max_new_tokens),
            # Up to the query, since the separator includes the empty line between them.
            document=(start, query),
            separator=line.take("truncation_seperator"),
            meta={"id": name},
        )


def _gold(line: Line, subset: str) -> str:
    """Return the gold text of a line; refuse one that the subset's score cannot read."""
    gold: str = line.take("output")
    if subset == "quality" and not scorers.letter(gold):
        line.refuse('a field "output" with a letter from A to D')
    if subset == "space_digest" and scorers.percentage(gold) is None:
        line.refuse('a field "output" with a percentage')
    if subset == "book_sum_sort":
        numbers = scorers.parse_order(gold)
        if len(numbers) < 2 or len(set(numbers)) < len(numbers):
            line.refuse('a field "output" with different numbers, such as 2, 1, 3')
    return gold
