"""The questions of a run inside its page: prompts, replies and attention, as data that a script filters and shows."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.plots.section import Section
from posbench.report import failures
from posbench.report.failures import RunExamples, shorten, spread_sample
from posbench.report.template import render_html
from posbench.run.folder import PREDICTIONS, RunDir
from posbench.run.reply_rows import prompt_digest
from posbench.stats.frames import UNMODIFIED, display_name
from posbench.stats.outcomes import describe_kind, kind_of_row
from posbench.tasks import Example

ATTENTION_FILE = "attention.jsonl"
"""Attention of the last token to every item in every layer, of some prompts of a run."""
MAX_DATA_BYTES = 300_000
"""Size of the data in a page, above which some questions have no prompt there."""
MAX_ROWS_SHARE = 0.6
"""Share of the data that questions without their prompts may take; above it some are left out."""
SCRIPT_BYTES = 16_000
"""Size of the part of a page that is not data, at most."""
MAX_PROMPT_CHARACTERS = 2_400
"""Length of a prompt above which its page has an excerpt."""
MIN_ITEM_CHARACTERS = 8
"""Characters that an excerpt keeps of every item."""
MAX_GOLD_CHARACTERS = 400
"""Characters that an excerpt keeps of an item with an answer."""
TURNS = (1, 2, 4)
"""In every so many-th turn a question gets its prompt whose score a method changes, a wrong one, another one."""
CUT = " [...] "
"""Stands in an excerpt where text was left out."""


@dataclass(frozen=True)
class Questions:
    """The questions of a run.

    Attributes:
        examples: Their prompts and rows.
        methods: The methods in the order of the rows, the unmodified model first.
        attention: Attention of the last token, float, shape (layers, items), by question and method.
        run: The end of the run folder's name.
    """

    examples: RunExamples
    methods: Sequence[str]
    attention: Mapping[tuple[str, str], np.ndarray]
    run: str

    @classmethod
    def of(cls, run: RunDir, examples: RunExamples) -> Questions:
        """Collect the questions of a run, with the attention that it recorded.

        Args:
            run: The run.
            examples: Its examples.
        """
        methods = {
            row["method"]: None for rows in examples.rows.values() for row in rows
        }
        ordered = sorted(methods, key=lambda method: method != UNMODIFIED)
        attention = {
            (row["id"], row["method"]): np.array(row["attention"], dtype=float)
            for row in run.rows(ATTENTION_FILE)
            if "attention" in row
        }
        name = run.path.absolute().name.rpartition("__")[2]
        return cls(examples, ordered, attention, name)

    def data(self, max_bytes: int = MAX_DATA_BYTES) -> dict[str, Any]:
        """Return what the script of the page reads.

        Args:
            max_bytes: Size as JSON, at most. Beyond it prompts are left out, then questions.

        Returns:
            ``questions``: of each its id, gold position, accepted answers, and for each method the score (null without
            an answer), the outcome (empty: answered), the reply, and whether the method changed the prompt; null where
            the method was not asked. ``prompts`` by the number of the question: its text in pieces, of which every
            second one is an item. ``gold``: the gold items of these prompts. ``attention`` by number, then method:
            bytes in base64, 255 times the square root of the share of ``top``. ``layers``: their number; ``layer``: the
            one with the most attention to the gold item. ``total``: questions of the run.
        """
        ids = self.examples.ids()
        rows = {name: self._question(name) for name in ids}
        num_bytes = sum(map(_size, rows.values()))
        max_row_bytes = MAX_ROWS_SHARE * max_bytes
        if num_bytes > max_row_bytes:
            ids = spread_sample(ids, int(len(ids) * max_row_bytes / num_bytes))
            num_bytes = sum(_size(rows[name]) for name in ids)
        tops = [array.max() for array in self.attention.values() if array.size]
        data: dict[str, Any] = {
            "run": self.run,
            "methods": self.methods,
            "labels": [display_name(method) for method in self.methods],
            "metric": self.examples.task.metric.replace("_", " "),
            "total": len(rows),
            "questions": [rows[name] for name in ids],
            "top": float(np.nanmax(tops)) if tops else 0.0,
            "layers": max((len(array) for array in self.attention.values()), default=0),
            "layer": self._strongest_layer(),
            "prompts": {},
            "gold": {},
            "attention": {},
        }
        numbers = {name: number for number, name in enumerate(ids)}
        free_bytes = max_bytes - num_bytes
        for name in self._by_interest(ids):
            example = self._example(name)
            if example is None:
                continue
            pieces, gold = prompt_pieces(example)
            maps = self._maps(name, len(pieces) // 2, data["top"])
            free_bytes -= _size([pieces, gold, maps]) + 40
            if free_bytes < 0:
                break
            number = numbers[name]
            data["prompts"][number] = pieces
            data["gold"][number] = gold
            if maps:
                data["attention"][number] = maps
        return data

    def html(self, max_bytes: int) -> str:
        """Return the part of the page with the questions.

        Args:
            max_bytes: Its size, at most.
        """
        room = min(MAX_DATA_BYTES, max_bytes - SCRIPT_BYTES)
        data = self.data(max(room, 0))
        wrong = failures.wrong_answers(self.examples)
        outcomes = Counter(
            reply[1] or "answered"
            for question in data["questions"]
            for reply in question[3]
            if reply
        )
        return render_html(
            "explorer.html.j2",
            # A text that ends a script would end it here.
            data=_json(data).replace("<", "\\u003c"),
            run=data["run"],
            labels=data["labels"],
            positions=_positions(data["questions"]),
            outcomes=sorted(outcomes, key=lambda name: -outcomes[name]),
            has_attention=bool(data["attention"]),
            num_questions=len(data["questions"]),
            num_prompts=len(data["prompts"]),
            total=data["total"],
            lost=self.examples.lost,
            wrong=wrong,
        )

    def _question(self, name: str) -> list[Any]:
        """Return a question as :meth:`data` has it.

        Args:
            name: Its id.
        """
        rows = {row["method"]: row for row in self.examples.rows[name]}
        first = next(iter(rows.values()))
        # An error leaves a row without its example's fields.
        first = next((row for row in rows.values() if "answers" in row), first)
        replies = [self._reply(rows.get(method)) for method in self.methods]
        answers = [shorten(answer) for answer in first.get("answers", [])]
        return [name, first.get("gold_position"), answers[:3], replies]

    def _reply(self, row: Row | None) -> list[Any] | None:
        """Return score, outcome, text, and whether the method changed the prompt; None without a row."""
        if row is None:
            return None
        score = self.examples.score(row)
        text = shorten(str(row.get("output", row.get("error", ""))))
        reply = [score, "" if score is not None else _missing_kind(row), text]
        return [*reply, 1] if row.get("rewritten_prompt") else reply

    def _example(self, name: str) -> Example | None:
        """The example of a question; None where its prompt is not the one that was asked."""
        example = self.examples.prompts.get(name)
        if example is None:
            return None
        digests_asked = {row.get("prompt") for row in self.examples.rows[name]}
        return example if prompt_digest(example) in digests_asked else None

    def _maps(self, name: str, num_items: int, top: float) -> dict[str, str]:
        """Return the attention of a question by the number of its method, as bytes in base64.

        Args:
            name: Its id.
            num_items: Items of the prompt.
            top: The largest attention of the run.
        """
        changed = {
            row["method"]
            for row in self.examples.rows[name]
            if row.get("rewritten_prompt")
        }
        maps = {}
        for number, method in enumerate(self.methods):
            weights = self.attention.get((name, method))
            # Items of a changed prompt stand elsewhere.
            if weights is None or method in changed or weights.shape[-1] != num_items:
                continue
            share = np.sqrt(np.clip(weights / (top or 1.0), 0, 1))
            shades = np.round(255 * np.nan_to_num(share)).astype(np.uint8)
            maps[str(number)] = base64.b64encode(shades.tobytes()).decode()
        return maps

    def _strongest_layer(self) -> int:
        """The layer (0-based) with the most attention to the gold item on average; 0 where nothing was recorded."""
        weights = []
        for (name, _), array in self.attention.items():
            position = self.examples.rows.get(name, [{}])[0].get("gold_position")
            if position is not None and array.ndim == 2 and position < array.shape[1]:
                weights.append(array[:, position])
        return int(np.mean(weights, axis=0).argmax()) if weights else 0

    def _by_interest(self, ids: Sequence[str]) -> list[str]:
        """Return the ids in the order in which their prompts go into the page.

        In turn one of each gold position: mostly those whose score a method changes, then wrong ones, then others; with
        recorded attention before those without.

        Args:
            ids: The ids.
        """
        groups: dict[tuple[Any, int], list[str]] = {}
        for name in ids:
            _, position, _, replies = self._question(name)
            scores = [reply[0] for reply in replies if reply]
            kind = 2
            if any(score is not None and score != scores[0] for score in scores[1:]):
                kind = 0
            elif any(score is None or score < 1 for score in scores):
                kind = 1
            groups.setdefault((position, kind), []).append(name)
        mapped = {name for name, _ in self.attention}
        ranks = dict[str, int]()
        for (_, kind), names in groups.items():
            ordered = sorted(names, key=lambda name: name not in mapped)
            for turn, name in enumerate(ordered, 1):
                ranks[name] = turn * TURNS[kind]
        return sorted(ids, key=lambda name: ranks[name])


def questions_section(run: RunDir) -> Section | None:
    """Return the section of a page with the questions of a run; None where it asked none.

    Args:
        run: The run.

    Raises:
        UserError: Its config cannot be read, or names no task.
    """
    if not (run.path / PREDICTIONS).is_file():
        return None
    config = run.config("task")
    try:
        examples = RunExamples.of(run, config)
    except UserError as error:
        return Section("Questions", f"They cannot be shown: {error}")
    if not examples.rows:
        return None
    questions = Questions.of(run, examples)
    return Section("Questions", insert=questions.html)


def prompt_pieces(example: Example) -> tuple[list[str], list[int]]:
    """Return a prompt in pieces, of which every second one is an item, and the numbers of its gold items.

    A long prompt is shortened: text between items to its ends, every item to its beginning, gold items least.

    Args:
        example: The example.
    """
    text = failures.full_prompt(example)
    # Spans of items count from the start of the user's text, which comes after a system prompt.
    offset = len(text) - len(example.prompt) - len(example.prefill)
    spans = [(offset + start, offset + end) for start, end in example.items]
    ends = [0, *(end for _, end in spans)]
    # Items that are not in the order of the text cannot be told apart in it.
    if any(start < end for (start, _), end in zip(spans, ends, strict=False)):
        return [_shortened(text, MAX_PROMPT_CHARACTERS)], []
    is_long = len(text) > MAX_PROMPT_CHARACTERS
    gap_characters = 2 * failures.EDGE_CHARACTERS if is_long else len(text)
    item_characters = len(text)
    if is_long and spans:
        share = MAX_PROMPT_CHARACTERS // (2 * len(spans))
        item_characters = max(share, MIN_ITEM_CHARACTERS)
    if is_long and not spans:
        gap_characters = MAX_PROMPT_CHARACTERS
    pieces = []
    position = 0
    for number, (start, end) in enumerate(spans):
        pieces.append(_shortened(text[position:start], gap_characters))
        item = text[start:end]
        if number in example.gold_positions:
            pieces.append(_shortened(item, max(MAX_GOLD_CHARACTERS, item_characters)))
        elif len(item) > item_characters + len(CUT):
            pieces.append(item[:item_characters] + CUT.rstrip())
        else:
            pieces.append(item)
        position = end
    pieces.append(_shortened(text[position:], gap_characters))
    return pieces, [number for number in example.gold_positions if number < len(spans)]


def _missing_kind(row: Row) -> str:
    """Why a row has no score, in words."""
    return describe_kind(row) if kind_of_row(row) else "not scored"


def _shortened(text: str, max_characters: int) -> str:
    """Both ends of a text that is longer than so many characters."""
    if len(text) <= max_characters + len(CUT):
        return text
    half = max_characters // 2
    return text[:half] + CUT + text[-half:]


def _positions(questions: Iterable[Sequence[Any]]) -> list[int]:
    """The gold positions of questions, in order."""
    return sorted({question[1] for question in questions if question[1] is not None})


def _json(data: Any) -> str:
    """Data as JSON without spaces."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, default=float)


def _size(data: Any) -> int:
    """Bytes of data in a page."""
    text = _json(data)
    # ``<`` is written as six characters.
    return len(text.encode()) + 5 * text.count("<") + 1
