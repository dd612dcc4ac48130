"""The examples of a run, to be read: prompt, expected answers, and reply and score of every method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posbench.errors import UserError
from posbench.files import sources
from posbench.files.atomic import Row
from posbench.run.folder import RunDir
from posbench.run.replies import prompt_digest
from posbench.stats.frames import shown
from posbench.tasks import Example, Task
from posbench.tasks.base import recorded

FILE = "predictions.jsonl"
FEW = 5  # examples that are shown unless more are asked for
AROUND = 60
EDGE = 200  # characters kept around the gold item, and at both ends of a prompt


@dataclass(frozen=True)
class Examples:
    """The evaluated examples of a run; prompts are built again from the task, not kept in the rows."""

    task: Task
    rows: Mapping[str, Sequence[Row]]  # by id, one for each method
    prompts: Mapping[str, Example]  # by id
    lost: str  # why there are no prompts; empty where there are

    @classmethod
    def of(cls, run: RunDir, config: Mapping[str, Any]) -> Examples:
        """Those of a run folder with this config; it reads no network."""
        task = recorded(config["task"])
        rows: dict[str, list[Row]] = {}
        for row in run.rows(FILE):
            rows.setdefault(row["id"], []).append(row)
        prompts = dict[str, Example]()
        lost = ""
        try:
            away = [
                source.id for source in task.files() if sources.cached(source) is None
            ]
            lost = f"{away[0]} is not on this machine" if away else ""
            prompts = {} if away else {e.id: e for e in task.evaluation()}
        except UserError as error:
            lost = str(error)
        return cls(task, rows, prompts, lost)

    def wrong(self) -> list[str]:
        """The ids whose score is below 1 under some method, in the order of the task."""
        return [
            name
            for name in self.ids()
            if any(self._score(row) < 1 for row in self.rows[name])
        ]

    def ids(self) -> list[str]:
        """All ids, in the order of the task, or else of the file."""
        return [name for name in self.prompts if name in self.rows] or list(self.rows)

    def _score(self, row: Row) -> float:
        """The task's own metric of a row; 1 where it has none."""
        scores = row.get("scores") or {}
        return float(scores.get(self.task.metric, min(scores.values(), default=1.0)))

    def text(self, name: str, whole: bool = False) -> str:
        """One example in words; ``whole`` with all of its prompt."""
        rows = self.rows[name]
        example = self.prompts.get(name)
        first = next((row for row in rows if "error" not in row), rows[0])
        place = first.get("gold_position")
        dropped = first.get("dropped")
        head = [
            f"id {name}",
            first.get("subset") or "",
            f"{first.get('tokens', '?')} tokens",
        ]
        head += [f"{dropped} more cut off to fit the window"] if dropped else []
        if place is not None:
            of = (
                f" (0 to {len(example.items) - 1})" if example and example.items else ""
            )
            head.insert(1, f"gold position {place}{of}")
        expected = " | ".join(first.get("answers", ["not recorded"]))
        lines = [
            ", ".join(filter(None, head)),
            "prompt:",
            _indented(self._prompt(first, example, whole)),
        ]
        lines += [f"expected: {expected or 'not published'}"]
        return "\n".join([*lines, *(self._answered(row, example) for row in rows)])

    def _prompt(self, row: Row, example: Example | None, whole: bool) -> str:
        if example is None:
            return f"cannot be built again: {self.lost or 'the task has no example of this id now'}"
        if row.get("prompt") != prompt_digest(example):
            return "cannot be built again: the task's data or code gives no prompt of this row's checksum now"
        return full(example) if whole else excerpt(example)

    def _answered(self, row: Row, example: Example | None) -> str:
        if "error" in row:
            return f"{shown(row['method'])}: failed ({row['error']})"
        scores = ", ".join(f"{name} {value:g}" for name, value in row["scores"].items())
        scores = scores or row.get("note") or "not scored"
        read = self.task.extracted(example, row["output"]) if example else None
        lines = [
            f"{shown(row['method'])}: {scores}",
            f"  reply:  {_indented(row['output'], 10).strip()}",
        ]
        return "\n".join(
            [
                *lines,
                *([f"  answer: {read or 'none found'}"] if read is not None else []),
            ]
        )


def few(names: Sequence[str], most: int = FEW) -> list[str]:
    """At most so many of the names, spread evenly over them."""
    return (
        [names[i * len(names) // most] for i in range(most)]
        if len(names) > most
        else list(names)
    )


def full(example: Example) -> str:
    """All that a model is asked, without a chat template."""
    return (
        (f"{example.system}\n\n" if example.system else "")
        + example.prompt
        + example.prefill
    )


def excerpt(example: Example) -> str:
    """Both ends of a prompt, and the gold item with a little around it."""
    text = full(example)
    at = len(f"{example.system}\n\n") if example.system else 0
    kept = [(0, EDGE), (len(text) - EDGE, len(text))]
    if example.items and example.gold_position is not None:
        start, end = example.items[example.gold_position]
        # A gold item may be a long document; its own ends are enough then.
        first = at + start - AROUND
        last = at + end + AROUND
        kept[1:1] = [
            (first, min(last, first + 2 * EDGE)),
            (max(first, last - 2 * EDGE), last),
        ]
    return joined(text, kept)


def joined(text: str, kept: Iterable[tuple[int, int]]) -> str:
    """The kept spans of a text, rising, with the number of characters that are left out between them."""
    out = ""
    done = 0
    for start, end in kept:
        start = max(start, 0)
        end = min(end, len(text))
        gap = start - done
        if gap > EDGE / 5:
            out = f"{out}\n[... {gap} characters ...]\n"
            done = start
        out = out + text[done : max(end, done)]
        done = max(end, done)
    return out


def _indented(text: str, by: int = 2) -> str:
    return "\n".join(" " * by + line for line in text.splitlines())


def on_page(run: RunDir, config: Mapping[str, Any]) -> dict[str, Any]:
    """For the page of a run: ``said`` of all wrong answers, and ``shown``, some of them (head, text)."""
    try:
        examples = Examples.of(run, config)
    except UserError as error:
        return {"said": f"They cannot be shown: {error}", "shown": []}
    wrong = examples.wrong()
    said = f"{len(wrong)} of {len(examples.rows)} examples are scored below 1 under some method"
    some = few(wrong)
    more = (
        f"; {len(some)} of them, and all with: posbench show DIR --wrong --all"
        if wrong
        else ""
    )
    return {
        "said": f"{said}{more}.",
        "shown": [examples.text(n).partition("\n")[::2] for n in some],
    }
