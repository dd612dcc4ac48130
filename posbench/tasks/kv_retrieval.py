"""Key-value retrieval (Liu et al. 2023): the value of one key among n pairs, the gold pair moved about."""

import random
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

from posbench.errors import Faults
from posbench.files.sources import Source
from posbench.schema import Count, Several
from posbench.tasks.base import Example, Split
from posbench.tasks.items import Placed, Spans, joined
from posbench.tasks.reading import Line, each, refuse, rows

COMMIT = "04cbd0df78d3260600fd04e524a29bd1404ef86b"
OFFICIAL = f"https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/{COMMIT}/kv_retrieval_data"
SIZES = (75, 140, 300)
QUESTIONS = 500
"""Pairs per prompt of the official files, and questions in each."""

WORDS = tuple("".join(letters) for letters in product("bdgkmnrt", "aeio", "lp"))
"""The 64 words that the embedded models read; none contains another, which would confuse the scoring."""


Record = tuple[str, str]


def official_prompt(records: list[Record], key: str) -> tuple[str, Spans]:
    """The benchmark's prompt (``kv_retrieval.prompt``, MIT), and the character span of every pair."""
    head = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{"
    tail = f'}}\n\nKey: "{key}"\nCorresponding value:'
    return joined(head, [f'"{k}": "{v}"' for k, v in records], ",\n ", tail)


def compact_prompt(records: list[Record], key: str) -> tuple[str, Spans]:
    """One line that ends where the value begins, as in Yu et al. 2025, Appendix D.1."""
    tail = f'}} The value of key "{key}" is "'
    return joined("Json data: {", [f'"{k}": "{v}"' for k, v in records], ", ", tail)


PROMPTS = {"official": official_prompt, "compact": compact_prompt}


@dataclass(frozen=True, kw_only=True)
class KVRetrieval(Placed):
    """Key-value retrieval over gold positions.

    Args:
        pairs, calibration_pairs: Pairs per prompt, and per calibration prompt.
        prompt: ``official`` or ``compact``.
        records: Where no file is given: random ``uuid`` pairs, or the embedded models' ``words``.
        path: An official file (``*.jsonl`` or ``*.jsonl.gz``), or ``official``: the smallest one with enough
            pairs, downloaded. The gold pair is moved to every position, then the list is cut to ``pairs``.
        calibration_path: Finished calibration prompts instead (JSON lines with ``input`` and ``output``).
        calibration_positions: None: spread evenly over the inner ones, as in Yu et al. 2025.
    """

    metric: ClassVar[str] = "accuracy"
    source: ClassVar[str] = (
        "Liu et al. 2023, github.com/nelson-liu/lost-in-the-middle, kv_retrieval_data/"
    )
    licence: ClassVar[str] = "MIT"
    size: ClassVar[str] = "500 questions at 75, 140 or 300 pairs, or generated"
    sizes: ClassVar[tuple[str, str]] = ("pairs", "calibration_pairs")

    name: str = "kv_retrieval"
    max_new_tokens: Count = 100
    pairs: Several = 140
    prompt: Literal["official", "compact"] = "official"
    records: Literal["uuid", "words"] = "uuid"
    calibration_pairs: Several = 50
    calibration_path: str | None = None

    def __post_init__(self) -> None:
        for name in self.sizes if self.records == "words" and not self.path else ():
            if getattr(self, name) > len(WORDS):
                allowed = f"at most {len(WORDS)} with records=words"
                refuse(
                    name, getattr(self, name), allowed, f"set task.{name}={len(WORDS)}"
                )
        if self.path == "official" and self.pairs > SIZES[-1]:
            allowed = f"at most {SIZES[-1]} with path=official"
            refuse(
                "pairs",
                self.pairs,
                allowed,
                f"set task.pairs={SIZES[-1]}, or task.path=null",
            )
        _ = self.gold_positions, self.calibration_indices

    @property
    def simpler(self) -> Mapping[str, Any]:
        """Short words in one line, where no file is given."""
        if self.path or self.calibration_path:
            return {}
        most = {name: min(getattr(self, name), len(WORDS)) for name in self.sizes}
        return {"prompt": "compact", "records": "words", **most}

    @property
    def chance(self) -> float:  # type: ignore[override]
        """One pair guessed at random."""
        return 1 / self.pairs

    def examples(self, split: Split) -> list[Example]:
        """See :meth:`Task.examples`; a file's questions are asked at every position, generated ones once."""
        if split == "calibration":
            count = self.calibration_examples
            return list(
                self._finished_prompts(0, count)
                if self.calibration_path
                else self._calibration(count)
            )
        if self.path:
            return list(self._from_file())
        asked = [
            (at, f"{at}-{n}") for at in self.gold_positions for n in range(self.limit)
        ]
        return [
            self._draw(name, f"evaluation/{name}", self.pairs, at) for at, name in asked
        ]

    def files(self) -> tuple[Source, ...]:
        """The official file and the calibration prompts, where they are given."""
        given = {"task.path": self.path, "task.calibration_path": self.calibration_path}
        found = [
            Source(kind="path", id=path, field=field)
            for field, path in given.items()
            if path
        ]
        if self.path == "official":
            size = next(size for size in SIZES if size >= self.pairs)
            found[0] = replace(
                found[0], kind="url", id=f"{OFFICIAL}/kv-retrieval-{size}_keys.jsonl.gz"
            )
        return tuple(found)

    def score(self, example: Example, text: str) -> dict[str, float]:
        """1 if the gold value occurs in the reply, letter case ignored (Liu et al. 2023)."""
        return {
            "accuracy": float(
                any(answer.lower() in text.lower() for answer in example.answers)
            )
        }

    def held_back(self, count: int) -> list[Example]:
        """See :meth:`Task.held_back`: from another stream, or the next prompts of the file."""
        if self.calibration_path:
            return list(self._finished_prompts(self.calibration_examples, count))
        return list(self._calibration(count, "held_back"))

    def _calibration(
        self, count: int, stream: str = "calibration"
    ) -> Iterator[Example]:
        inner = list(range(1, self.calibration_pairs - 1)) or [0, 1]
        given = self.calibration_indices
        for number in range(count):
            spread = inner[number * len(inner) // count % len(inner)]
            position = given[number % len(given)] if given else spread
            yield self._draw(
                f"{stream[0]}{number}",
                f"{stream}/{number}",
                self.calibration_pairs,
                position,
            )

    def _draw(self, name: str, stream: str, pairs: int, position: int) -> Example:
        rng = random.Random(f"posbench kv_retrieval {self.seed}/{stream}")
        if self.records == "words":
            keys = rng.sample(WORDS, pairs)
            values = rng.sample(WORDS, pairs)
        else:
            drawn = [
                str(uuid.UUID(int=rng.getrandbits(128), version=4))
                for _ in range(2 * pairs)
            ]
            keys = drawn[:pairs]
            values = drawn[pairs:]
        return self._example(name, list(zip(keys, values, strict=True)), position, name)

    def _from_file(self) -> Iterator[Example]:
        path = self.place()
        faults = Faults()
        lines = list(
            rows(
                "path",
                path,
                count=QUESTIONS if self.path == "official" else 0,
                faults=faults,
            )
        )
        for number, (records, gold) in enumerate(
            each(lines[: self.limit], _records, faults)
        ):
            others = [pair for pair in records if pair != gold]
            if len(records) < self.pairs:
                allowed = f"at most {len(records)}, the pairs in {path}"
                refuse("pairs", self.pairs, allowed, f"set task.pairs={len(records)}")
            for position in self.gold_positions:
                moved = [*others[:position], gold, *others[position:]][: self.pairs]
                yield self._example(
                    f"{position}-{number}", moved, position, str(number)
                )

    def _example(
        self, name: str, records: list[Record], at: int, cluster: str
    ) -> Example:
        key, value = records[at]
        prompt, spans = PROMPTS[self.prompt](records, key)
        return Example(
            id=name,
            prompt=prompt,
            answers=(value,),
            gold_position=at,
            items=spans,
            cluster=cluster,
        )

    def _finished_prompts(self, start: int, count: int) -> Iterator[Example]:
        given = list(rows("calibration_path", Path(str(self.calibration_path))))[
            start : start + count
        ]
        questions = (
            {_question(e.prompt) for e in self.examples("evaluation")}
            if self.path
            else set()
        )
        for number, row in given:
            prompt = row.take("input")
            answer = row.take("output")
            if _question(prompt) in questions:
                row.refuse("questions that the evaluation does not ask")
            yield Example(
                id=f"c{number}", prompt=prompt, answers=(answer,), cluster=f"c{number}"
            )


def _question(prompt: str) -> str:
    """The key that a prompt of either form asks for."""
    asked = re.findall(r'\b[Kk]ey:? "([^"]+)"', prompt)
    return asked[-1] if asked else prompt


def _records(row: Line) -> tuple[list[Record], Record]:
    try:
        records = [(str(k), str(v)) for k, v in row["ordered_kv_records"]]
        gold = (str(row["key"]), str(row["value"]))
    except (KeyError, TypeError, ValueError):
        row.refuse("fields ordered_kv_records (list of [key, value]), key and value")
    if gold not in records:
        row.refuse("a gold key and value that occur in ordered_kv_records")
    return records, gold
