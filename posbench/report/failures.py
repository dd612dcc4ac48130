"""The examples of a run as text: prompt, expected answers, every method's reply and score."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posbench.errors import UserError
from posbench.files import sources
from posbench.files.atomic import Row
from posbench.run.folder import PREDICTIONS, RunDir
from posbench.run.own_code import make_importable
from posbench.run.reply_rows import prompt_digest
from posbench.stats.frames import display_name
from posbench.stats.outcomes import describe_kind, kind_of_row
from posbench.studies.base import read_study
from posbench.tasks import Example, Task
from posbench.tasks.base import read_recorded_task

MAX_EXAMPLES = 5
"""Examples that are shown unless all are asked for."""
CONTEXT_CHARACTERS = 60
"""Characters kept before and after the gold item."""
EDGE_CHARACTERS = 200
"""Characters kept at both ends of a prompt."""
MIN_GAP_CHARACTERS = EDGE_CHARACTERS / 5
"""Longer gaps between kept spans are left out."""


@dataclass(frozen=True)
class RunExamples:
    """The evaluated examples of a run.

    Prompts are built again from the task; rows do not hold them.

    Attributes:
        task: The task of the run.
        rows: Predictions of each example by its id, one for each method.
        prompts: Examples by id; empty if they cannot be built.
        lost: Reason why there are no prompts; empty if there are some.
    """

    task: Task
    rows: Mapping[str, Sequence[Row]]
    prompts: Mapping[str, Example]
    lost: str

    @classmethod
    def of(cls, run: RunDir, config: Mapping[str, Any]) -> RunExamples:
        """Collect the rows of a run by example, and its prompts from the task's data, without network access.

        The prompts are empty, with the reason in the last field, where the data is not on this machine or has changed.
        """
        make_importable(run)
        task = read_recorded_task(config["task"])
        rows: dict[str, list[Row]] = {}
        for row in run.rows(PREDICTIONS):
            rows.setdefault(row["id"], []).append(row)
        try:
            for source in task.files():
                if sources.cached_path(source) is None:
                    lost = f"{source.id} is not on this machine"
                    return cls(task, rows, {}, lost)
            if config.get("study"):
                study = read_study(config["study"])
                examples = study.recorded_examples(task)
            else:
                examples = task.evaluation()
            prompts = {example.id: example for example in examples}
        except UserError as error:
            return cls(task, rows, {}, str(error))
        return cls(task, rows, prompts, "")

    def wrong(self) -> list[str]:
        """Ids of examples with a score below 1 under some method, in task order."""
        return [
            name
            for name in self.ids()
            if any(_is_wrong(self.score(row)) for row in self.rows[name])
        ]

    def missing(self) -> list[str]:
        """Ids of examples without an answer under some method, in task order."""
        return [name for name in self.ids() if any(map(kind_of_row, self.rows[name]))]

    def ids(self) -> list[str]:
        """All ids, in task order if the prompts can be built, else in file order."""
        return [name for name in self.prompts if name in self.rows] or list(self.rows)

    def score(self, row: Row) -> float | None:
        """The score of a row by the task's own metric, else its lowest one; None for a row without scores."""
        scores = row.get("scores")
        if not scores:
            return None
        return float(scores.get(self.task.metric, min(scores.values())))

    def text(self, name: str, whole: bool = False) -> str:
        """Return one example as text: facts, prompt, expected answers, and the reply of each method.

        Args:
            name: Id of the example.
            whole: Print the prompt whole, else its ends and what surrounds the gold items.
        """
        rows = self.rows[name]
        row = next((row for row in rows if "error" not in row), rows[0])
        example = self.prompts.get(name)
        expected = " | ".join(row.get("answers", ["not recorded"]))
        lines = [
            self._head(name, row, example),
            "prompt:",
            _indent(self._prompt(row, example, in_full=whole)),
            f"expected: {expected or 'not published'}",
        ]
        lines += [self._reply(row, example, in_full=whole) for row in rows]
        return "\n".join(lines)

    def _head(self, name: str, row: Row, example: Example | None) -> str:
        """Return id, gold position, subset and length of an example, in one line.

        Args:
            name: Id of the example.
            row: One of its rows.
            example: The task's example now; None if there is none.
        """
        facts = [f"id {name}"]
        position = row.get("gold_position")
        if position is not None:
            fact = f"gold position {position}"
            if example and example.items:
                fact += f" (0 to {len(example.items) - 1})"
            facts.append(fact)
        if row.get("other_gold"):
            facts.append(f"other gold items {', '.join(map(str, row['other_gold']))}")
        if row.get("subset"):
            facts.append(row["subset"])
        facts.append(f"{row.get('tokens', '?')} tokens")
        if row.get("dropped"):
            facts.append(f"{row['dropped']} more cut off to fit the window")
        return ", ".join(facts)

    def _prompt(self, row: Row, example: Example | None, in_full: bool) -> str:
        """Return the prompt of a row, or why it cannot be shown.

        Args:
            row: A row of the example.
            example: The task's example now; None if there is none.
            in_full: Return it whole, else an excerpt.
        """
        if example is None:
            reason = self.lost or "the task has no example of this id now"
            return f"cannot be built again: {reason}"
        if row.get("prompt") != prompt_digest(example):
            return "cannot be built again: the task's data or code gives no prompt of this row's checksum now"
        return full_prompt(example) if in_full else excerpt(example)

    def _reply(self, row: Row, example: Example | None, in_full: bool) -> str:
        """Return the lines on one method's row: score, rewritten prompt and thinking if any, reply, and its answer.

        Args:
            row: A row of predictions.jsonl.
            example: The example; None where the task's data is not here.
            in_full: Whether texts are printed whole, else shortened.
        """
        method = display_name(row["method"])
        if "error" in row:
            return f"{method}: failed ({row['error']})"
        scores = ", ".join(f"{name} {value:g}" for name, value in row["scores"].items())
        # A missing answer (cut, refused, ...) is described in place of its scores.
        kind = kind_of_row(row)
        if kind:
            scores = describe_kind(row)
        lines = [f"{method}: {scores or 'not scored'}"]
        for field, label in (
            ("rewritten_prompt", "prompt of this method"),
            ("thinking", "thinking, not scored"),
            ("quote", "quote, not scored"),
        ):
            if row.get(field):
                text = row[field] if in_full else shorten(row[field])
                lines.append(f"  {label}: {_indent(text, 10).strip()}")
        lines.append(f"  reply:  {_indent(row['output'], 10).strip()}")
        answer = self.task.extracted(example, row["output"]) if example else None
        if answer is not None:
            lines.append(f"  answer: {answer or 'none found'}")
        return "\n".join(lines)


def _is_wrong(score: float | None) -> bool:
    """Whether a score is below 1; a row without one is not wrong."""
    return score is not None and score < 1


def spread_sample(names: Sequence[str], count: int = MAX_EXAMPLES) -> list[str]:
    """At most ``count`` of the names, spread evenly over the list."""
    if len(names) <= count:
        return list(names)
    return [names[i * len(names) // count] for i in range(count)]


def full_prompt(example: Example) -> str:
    """All that a model is asked, without a chat template."""
    system = f"{example.system}\n\n" if example.system else ""
    return system + example.prompt + example.prefill


def shorten(text: str) -> str:
    """Both ends of a text, with the number of characters left out between them."""
    ends = [(0, EDGE_CHARACTERS), (len(text) - EDGE_CHARACTERS, len(text))]
    return join_spans(text, ends)


def excerpt(example: Example) -> str:
    """Return the beginning and the end of a prompt, and its gold items with a little around them."""
    text = full_prompt(example)
    spans = [(0, EDGE_CHARACTERS)]
    # Items' spans count from the start of the user's text; the system prompt comes before it.
    offset = len(f"{example.system}\n\n") if example.system else 0
    gold_items = [example.items[i] for i in example.gold_positions if example.items]
    for item_start, item_end in sorted(gold_items):
        start = offset + item_start - CONTEXT_CHARACTERS
        end = offset + item_end + CONTEXT_CHARACTERS
        # A gold item may be a long document; its own ends are enough then.
        spans.append((start, min(end, start + 2 * EDGE_CHARACTERS)))
        spans.append((max(start, end - 2 * EDGE_CHARACTERS), end))
    spans.append((len(text) - EDGE_CHARACTERS, len(text)))
    return join_spans(text, spans)


def join_spans(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """The spans of a text, with the number of characters left out between them.

    Args:
        text: The text.
        spans: Start and end of each, by rising start; they may overlap or lie partly
            outside the text.
    """
    result = ""
    position = 0
    for start, end in spans:
        start = max(start, 0)
        end = min(end, len(text))
        gap = start - position
        if gap > MIN_GAP_CHARACTERS:
            result += f"\n[... {gap} characters ...]\n"
            position = start
        end = max(end, position)
        result += text[position:end]
        position = end
    return result


def _indent(text: str, columns: int = 2) -> str:
    return "\n".join(" " * columns + line for line in text.splitlines())


def wrong_answers(examples: RunExamples) -> dict[str, Any]:
    """Return the wrong answers of a run as text for its page.

    Args:
        examples: The examples of the run.

    Returns:
        ``summary``: their number, in words. ``examples``: head and text of some of them.
    """
    wrong = examples.wrong()
    names = spread_sample(wrong)
    summary = f"{len(wrong)} of {len(examples.rows)} examples are scored below 1 under some method"
    if wrong:
        summary += (
            f"; {len(names)} of them, and all with: posbench show DIR --wrong --all"
        )
    missing = examples.missing()
    if missing:
        summary += f". Of {len(missing)} there is no answer under some method, which is no wrong one"
        names += [name for name in spread_sample(missing) if name not in names]
    texts = []
    for name in names:
        head, _, text = examples.text(name).partition("\n")
        texts.append((head, text))
    return {"summary": f"{summary}.", "examples": texts}
