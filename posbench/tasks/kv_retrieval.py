"""Key-value retrieval (Liu et al. 2023): find the value of one key among n pairs, the gold pair moved over
positions."""

import random
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Literal

from posbench.files.sources import Source, local
from posbench.tasks.base import Example, Split, Task
from posbench.tasks.items import gold_indices, joined
from posbench.tasks.reading import refuse, refuse_line, rows

Record = tuple[str, str]

COMMIT = "04cbd0df78d3260600fd04e524a29bd1404ef86b"
OFFICIAL = f"https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/{COMMIT}/kv_retrieval_data"
SIZES, QUESTIONS = (75, 140, 300), 500
"""Pairs per prompt of the official files, and questions in each."""

WORDS = tuple("".join(letters) for letters in product("bdgkmnrt", "aeio", "lp"))
"""The 64 words that the embedded models read; none contains another, so substring scoring cannot confuse
two."""


def official_prompt(records: list[Record], key: str) -> tuple[str, list[tuple[int, int]]]:
    """The benchmark's prompt, and the character span of every pair.

    Source: nelson-liu/lost-in-the-middle, ``kv_retrieval.prompt`` (MIT).
    """
    head = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{"
    tail = f'}}\n\nKey: "{key}"\nCorresponding value:'
    return joined(head, [f'"{k}": "{v}"' for k, v in records], ",\n ", tail)


def compact_prompt(records: list[Record], key: str) -> tuple[str, list[tuple[int, int]]]:
    """One line that ends where the value begins, as in Yu et al. 2025, Appendix D.1; the embedded models read
    this."""
    return joined(
        "Json data: {", [f'"{k}": "{v}"' for k, v in records], ", ", f'}} The value of key "{key}" is "'
    )


PROMPTS: dict[str, Callable[[list[Record], str], tuple[str, list[tuple[int, int]]]]] = {
    "official": official_prompt,
    "compact": compact_prompt,
}


@dataclass(frozen=True, kw_only=True)
class KVRetrieval(Task):
    """Key-value retrieval over gold positions.

    Args:
        pairs: Pairs per prompt.
        positions: Gold positions: ``"50%"`` of the way (index floor(p * (pairs - 1)), the benchmark's
            0/34/69/104/139 at 140 pairs) or explicit 0-based indices.
        examples_per_position: Questions per position.
        prompt: ``official`` or ``compact``.
        records: ``uuid`` (random UUID pairs) or ``words`` (the embedded models' lexicon), when no file is
            given.
        path: An official file (``*.jsonl`` or ``*.jsonl.gz``), or ``official``: the smallest one with enough
            pairs, downloaded. Each question is asked at every position. A file may hold more pairs than
            ``pairs``: the gold pair is moved first, then the list is cut.
        calibration_examples: Calibration questions, each in a context of its own, generated from the same
            law.
        calibration_pairs: Pairs per calibration prompt.
        calibration_path: Finished calibration prompts instead (JSON lines with ``input`` and ``output``).
        seed: Seed of the generated sets.

    Score: 1 if the gold value occurs in the reply, letter case ignored (Liu et al. 2023).
    """

    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "accuracy"
    source: ClassVar[str] = "Liu et al. 2023, github.com/nelson-liu/lost-in-the-middle, kv_retrieval_data/"
    licence: ClassVar[str] = "MIT"
    size: ClassVar[str] = "500 questions at 75, 140 or 300 pairs, or generated"

    name: str = "kv_retrieval"
    max_new_tokens: int = 100
    pairs: int = 140
    positions: tuple[int | str, ...] = ("0%", "25%", "50%", "75%", "100%")
    examples_per_position: int = 500
    prompt: Literal["official", "compact"] = "official"
    records: Literal["uuid", "words"] = "uuid"
    path: str | None = None
    calibration_examples: int = 100
    calibration_pairs: int = 50
    calibration_path: str | None = None
    calibration_positions: tuple[int | str, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {
            "pairs": 2,
            "examples_per_position": 1,
            "calibration_examples": 1,
            "calibration_pairs": 2,
            "max_new_tokens": 1,
        }
        for name, low in limits.items():
            if getattr(self, name) < low:
                refuse(
                    name,
                    getattr(self, name),
                    f"a whole number from {low} up",
                    f"set task.{name}={low} or more",
                )
        for name in ("pairs", "calibration_pairs"):
            if self.records == "words" and not self.path and getattr(self, name) > len(WORDS):
                refuse(
                    name,
                    getattr(self, name),
                    f"at most {len(WORDS)} with records=words",
                    f"set task.{name}={len(WORDS)}",
                )
        if self.path == "official" and self.pairs > SIZES[-1]:
            refuse(
                "pairs",
                self.pairs,
                f"at most {SIZES[-1]} with path=official",
                f"set task.pairs={SIZES[-1]}, or task.path=null",
            )
        gold_indices("positions", self.positions, "pairs", self.pairs)
        self._calibration_indices()

    @property
    def gold_positions(self) -> list[int]:
        """The gold positions as 0-based indices."""
        return gold_indices("positions", self.positions, "pairs", self.pairs)

    @property
    def items(self) -> int:
        """Pairs per prompt."""
        return self.pairs

    @property
    def calibration_items(self) -> int:
        """Pairs per calibration prompt."""
        return self.calibration_pairs

    @property
    def chance(self) -> float:
        """One pair guessed at random."""
        return 1 / self.pairs

    def examples(self, split: Split) -> list[Example]:
        """See :meth:`Task.examples`.

        Evaluation: a file's questions appear at every position; generated questions have one context each.
        Calibration: questions spread evenly over the inner positions (Yu et al. 2025 never put the gold pair
        first or last either), from another random stream.
        """
        if split == "calibration":
            return self._finished_prompts() if self.calibration_path else list(self._calibration())
        return list(self._from_file() if self.path else self._generated())

    def files(self) -> tuple[Source, ...]:
        """The official file and the calibration prompts, where they are given."""
        given = {"task.path": self.path, "task.calibration_path": self.calibration_path}
        return tuple(
            Source(kind="url", id=f"{OFFICIAL}/kv-retrieval-{self._official}_keys.jsonl.gz", field=field)
            if path == "official" and field == "task.path"
            else Source(kind="path", id=path, field=field)
            for field, path in given.items()
            if path
        )

    @property
    def _official(self) -> int:
        return next(size for size in SIZES if size >= self.pairs)

    def score(self, example: Example, text: str) -> dict[str, float]:
        """1 if the value occurs in the reply, letter case ignored."""
        return {"accuracy": float(any(answer.lower() in text.lower() for answer in example.answers))}

    def _generated(self) -> Iterator[Example]:
        for position in self.gold_positions:
            for number in range(self.examples_per_position):
                name = f"{position}-{number}"
                yield self._draw(name, f"{self.seed}/evaluation/{name}", self.pairs, position)

    def _calibration(self) -> Iterator[Example]:
        inner = list(range(1, self.calibration_pairs - 1)) or [0, 1]
        given = self._calibration_indices()
        for number in range(self.calibration_examples):
            spread = inner[number * len(inner) // self.calibration_examples % len(inner)]
            position = given[number % len(given)] if given else spread
            yield self._draw(
                f"c{number}", f"{self.seed}/calibration/{number}", self.calibration_pairs, position
            )

    def _calibration_indices(self) -> list[int]:
        if self.calibration_positions is None:
            return []
        return gold_indices(
            "calibration_positions", self.calibration_positions, "calibration_pairs", self.calibration_pairs
        )

    def _draw(self, name: str, stream: str, pairs: int, position: int) -> Example:
        rng = random.Random(f"posbench kv_retrieval {stream}")
        if self.records == "words":
            keys, values = rng.sample(WORDS, pairs), rng.sample(WORDS, pairs)
        else:
            keys, values = (
                [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(pairs)] for _ in range(2)
            )
        return self._example(name, list(zip(keys, values, strict=True)), position, name)

    def _from_file(self) -> Iterator[Example]:
        official = self.path == "official"
        path = str(local(self.files()[0]) if official else self.path)
        lines = list(rows("path", path, count=QUESTIONS if official else None))
        if len(lines) < self.examples_per_position:
            refuse(
                "examples_per_position",
                self.examples_per_position,
                f"at most {len(lines)}, the questions in {path}",
                f"set task.examples_per_position={len(lines)}",
            )
        for number, (line, row) in enumerate(lines[: self.examples_per_position]):
            records, gold = _records(path, line, row)
            others = [pair for pair in records if pair != gold]
            if len(records) < self.pairs:
                refuse(
                    "pairs",
                    self.pairs,
                    f"at most {len(records)}, the pairs in {path}",
                    f"set task.pairs={len(records)}",
                )
            for position in self.gold_positions:
                moved = [*others[:position], gold, *others[position:]][: self.pairs]
                yield self._example(f"{position}-{number}", moved, position, str(number))

    def _example(self, name: str, records: list[Record], position: int, cluster: str) -> Example:
        key, value = records[position]
        prompt, spans = PROMPTS[self.prompt](records, key)
        return Example(
            id=name,
            prompt=prompt,
            answers=(value,),
            gold_position=position,
            items=tuple(spans),
            cluster=cluster,
        )

    def _finished_prompts(self) -> list[Example]:
        given = list(rows("calibration_path", str(self.calibration_path)))[: self.calibration_examples]
        if not given:
            refuse("calibration_path", self.calibration_path, "at least one prompt", "fill the file")
        evaluation = {example.prompt for example in self.examples("evaluation")} if self.path else set()
        questions = {_question(prompt) for prompt in evaluation}
        out = []
        for line, row in given:
            if not isinstance(row.get("input"), str) or not isinstance(row.get("output"), str):
                refuse_line(
                    "calibration_path", str(self.calibration_path), line, 'text fields "input" and "output"'
                )
            if _question(row["input"]) in questions:
                refuse_line(
                    "calibration_path",
                    str(self.calibration_path),
                    line,
                    "questions that the evaluation does not ask",
                )
            out.append(
                Example(id=f"c{line}", prompt=row["input"], answers=(row["output"],), cluster=f"c{line}")
            )
        return out


def _question(prompt: str) -> str:
    """The key that a prompt of either form asks for."""
    asked = re.findall(r'\b[Kk]ey:? "([^"]+)"', prompt)
    return asked[-1] if asked else prompt


def _records(path: str, line: int, row: dict[str, Any]) -> tuple[list[Record], Record]:
    try:
        records = [(str(k), str(v)) for k, v in row["ordered_kv_records"]]
        gold = (str(row["key"]), str(row["value"]))
    except (KeyError, TypeError, ValueError):
        refuse_line("path", path, line, "fields ordered_kv_records (list of [key, value]), key and value")
    if gold not in records:
        refuse_line("path", path, line, "a gold key and value that occur in ordered_kv_records")
    return records, gold
