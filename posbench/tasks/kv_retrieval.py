"""Key-value retrieval (Liu et al. 2023): the value of one key among n pairs, the gold pair moved about."""

import random
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

from posbench.errors import Faults
from posbench.files.sources import Source
from posbench.schema import Count, Several
from posbench.tasks.base import Example, Split
from posbench.tasks.items import GoldPositionTask, Spans, joined
from posbench.tasks.reading import Line, parse_rows, read_data_rows, refuse
from posbench.tasks.scorers import contains_answer

COMMIT = "04cbd0df78d3260600fd04e524a29bd1404ef86b"
OFFICIAL = f"https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/{COMMIT}/kv_retrieval_data"
OFFICIAL_PAIRS = (75, 140, 300)
"""Pairs per prompt of the official files."""
KV_QUESTIONS = 500
"""Questions in each official file."""

WORDS = tuple("".join(letters) for letters in product("bdgkmnrt", "aeio", "lp"))
"""The 64 words that the embedded models read; none contains another, which would confuse the scoring."""


Pair = tuple[str, str]
"""A key and its value."""


def official_prompt(pairs: list[Pair], key: str) -> tuple[str, Spans]:
    """The benchmark's prompt (``kv_retrieval.prompt``, MIT), and the character span of every pair."""
    head = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{"
    tail = f'}}\n\nKey: "{key}"\nCorresponding value:'
    return joined(head, [f'"{k}": "{v}"' for k, v in pairs], ",\n ", tail)


def compact_prompt(pairs: list[Pair], key: str) -> tuple[str, Spans]:
    """One line that ends where the value begins, as in Yu et al. 2025, Appendix D.1."""
    tail = f'}} The value of key "{key}" is "'
    return joined("Json data: {", [f'"{k}": "{v}"' for k, v in pairs], ", ", tail)


BEFORE_VALUE = " \n\"'`*:{"
"""Characters allowed before a value at the beginning of a reply."""
UUID_LIKE = re.compile(r"[0-9a-f-]{8,}(?=[^0-9a-f-])")
"""A run of at least 8 hexadecimal digits and hyphens, followed by another character."""
PROMPTS = {"official": official_prompt, "compact": compact_prompt}
QUESTIONS = {"official": 'Key: "{key}"', "compact": 'The value of key "{key}"'}
"""The question of a prompt, by its form."""


@dataclass(frozen=True, kw_only=True)
class KVRetrieval(GoldPositionTask):
    """Find the value of a key in a list of key-value pairs, where the asked pair stands at one place after another.

    Args:
        pairs, calibration_pairs: Pairs per prompt, and per calibration prompt.
        prompt: ``official`` or ``compact``.
        records: Where no file is given: random ``uuid`` pairs, or the embedded models' ``words``.
        chat: Whether the model's chat template surrounds the prompt; the compact one ends where the value
            begins, for a model to continue.
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
    chat: bool = True
    calibration_pairs: Several = 50
    calibration_path: str | None = None

    def __post_init__(self) -> None:
        if self.records == "words" and not self.path:
            limit = len(WORDS)
            for key in self.sizes:
                count = getattr(self, key)
                if count > limit:
                    allowed = f"at most {limit} with records=words"
                    refuse(key, count, allowed, f"set task.{key}={limit}")
        largest = OFFICIAL_PAIRS[-1]
        if self.path == "official" and self.pairs > largest:
            allowed = f"at most {largest} with path=official"
            hint = f"set task.pairs={largest}, or task.path=null"
            refuse("pairs", self.pairs, allowed, hint)
        # These refuse positions outside the list.
        _ = self.gold_positions
        _ = self.calibration_indices

    @property
    def simpler(self) -> Mapping[str, Any]:
        """Settings that make prompts of short words in one line, by field; empty where a file is given."""
        if self.path or self.calibration_path:
            return {}
        return {
            "prompt": "compact",
            "records": "words",
            "pairs": min(self.pairs, len(WORDS)),
            "calibration_pairs": min(self.calibration_pairs, len(WORDS)),
        }

    @property
    def chance(self) -> float:  # type: ignore[override]
        """One pair guessed at random."""
        return 1 / self.pairs

    def examples(self, split: Split) -> list[Example]:
        """Return the questions of a split: from a file each at every gold position, else drawn for each position."""
        if split == "calibration":
            if self.calibration_path:
                return list(self._finished_prompts(0, self.calibration_examples))
            return list(self._calibration(self.calibration_examples))
        if self.path:
            return list(self._from_file())
        examples = []
        for position in self.gold_positions:
            for number in range(self.limit):
                name = f"{position}-{number}"
                stream = f"evaluation/{name}"
                examples.append(self._draw(name, stream, self.pairs, position))
        return examples

    def files(self) -> tuple[Source, ...]:
        """Return the benchmark's or user's file of questions, and the user's calibration prompts, as far as set."""
        sources = []
        if self.path == "official":
            # The smallest official file with enough pairs.
            size = next(size for size in OFFICIAL_PAIRS if size >= self.pairs)
            url = f"{OFFICIAL}/kv-retrieval-{size}_keys.jsonl.gz"
            sources.append(Source(kind="url", id=url, field="task.path"))
        elif self.path:
            sources.append(Source(kind="path", id=self.path, field="task.path"))
        if self.calibration_path:
            sources.append(
                Source(
                    kind="path",
                    id=self.calibration_path,
                    field="task.calibration_path",
                )
            )
        return tuple(sources)

    def score(self, example: Example, text: str) -> dict[str, float]:
        """1 if the gold value occurs in the reply, letter case ignored (Liu et al. 2023)."""
        return {"accuracy": float(contains_answer(text, example.answers))}

    def has_answer(self, example: Example, text: str) -> bool:
        """Whether a reply is an attempt: it begins with a value of the prompt, or with an invented or miscopied UUID.

        A value later in the reply may be one that the model lists on its way to the answer, as does a model whose reply
        begins with a key of the prompt.
        """
        if self.prompt == "compact":
            return True  # the prompt ends where the value begins
        if super().has_answer(example, text):
            return True
        reply = text.lower().lstrip(BEFORE_VALUE)
        value_of_key: dict[str, str] = {}
        for start, end in example.items:
            key, _, value = (
                example.prompt[start + 1 : end - 1].lower().partition('": "')
            )
            value_of_key[key] = value
        values = value_of_key.values()
        if any(value and reply.startswith(value) for value in values):
            return True
        invented = UUID_LIKE.match(reply)
        return invented is not None and invented[0] not in value_of_key

    def held_back(self, count: int) -> list[Example]:
        """See :meth:`Task.held_back`: from another stream, or the next prompts of the file."""
        if self.calibration_path:
            return list(self._finished_prompts(self.calibration_examples, count))
        return list(self._calibration(count, "held_back"))

    def _calibration(
        self, count: int, stream: str = "calibration"
    ) -> Iterator[Example]:
        """Yield ``count`` generated calibration questions.

        Args:
            count: Number of questions.
            stream: Name that seeds the random draws: another one gives other questions.
        """
        # Spread over the inner positions, where the bias is; with two pairs there are none.
        inner = list(range(1, self.calibration_pairs - 1)) or [0, 1]
        positions = self.calibration_indices
        for number in range(count):
            if positions:
                position = positions[number % len(positions)]
            else:
                position = inner[number * len(inner) // count % len(inner)]
            yield self._draw(
                f"{stream[0]}{number}",
                f"{stream}/{number}",
                self.calibration_pairs,
                position,
            )

    def _draw(self, name: str, stream: str, pairs: int, position: int) -> Example:
        """Return a generated question.

        Args:
            name: Id of the example.
            stream: Examples of one stream and seed have the same pairs, at whatever gold position.
            pairs: Pairs in the prompt.
            position: Index of the gold pair.
        """
        rng = random.Random(f"posbench kv_retrieval {self.seed}/{stream}")
        if self.records == "words":
            keys = rng.sample(WORDS, pairs)
            values = rng.sample(WORDS, pairs)
        else:
            keys = [_draw_uuid(rng) for _ in range(pairs)]
            values = [_draw_uuid(rng) for _ in range(pairs)]
        pairs_drawn = list(zip(keys, values, strict=True))
        return self._example(name, pairs_drawn, position, cluster=name)

    def _from_file(self) -> Iterator[Example]:
        """Yield the questions of a benchmark's file, each at every gold position.

        Distractors beyond ``pairs`` are left out.
        """
        path = self.place()
        faults = Faults()
        # The official files have that many questions; another count means a damaged file.
        count = KV_QUESTIONS if self.path == "official" else 0
        lines = list(read_data_rows("path", path, count=count, faults=faults))
        questions = parse_rows(lines[: self.limit], _pairs_and_gold, faults)
        for number, (pairs, gold) in enumerate(questions):
            distractors = [pair for pair in pairs if pair != gold]
            if len(pairs) < self.pairs:
                allowed = f"at most {len(pairs)}, the pairs in {path}"
                refuse("pairs", self.pairs, allowed, f"set task.pairs={len(pairs)}")
            for position in self.gold_positions:
                moved = [*distractors[:position], gold, *distractors[position:]]
                yield self._example(
                    f"{position}-{number}", moved[: self.pairs], position, str(number)
                )

    def _example(
        self, name: str, pairs: list[Pair], position: int, cluster: str
    ) -> Example:
        """Return the example that asks for the value of the pair at ``position``.

        Args:
            name: Its id.
            pairs: Keys and values, in the order of the prompt.
            position: Index of the gold pair.
            cluster: Id of its question, which it shares with the same question at other positions.
        """
        key, value = pairs[position]
        prompt, spans = PROMPTS[self.prompt](pairs, key)
        question = QUESTIONS[self.prompt].format(key=key)
        start = prompt.rindex(question)
        return Example(
            id=name,
            prompt=prompt,
            answers=(value,),
            gold_position=position,
            items=spans,
            question=(start, start + len(question)),
            cluster=cluster,
            chat=self.chat,
        )

    def _finished_prompts(self, start: int, count: int) -> Iterator[Example]:
        """Yield at most ``count`` calibration prompts of the user's file, after the first ``start`` ones."""
        lines = list(
            read_data_rows("calibration_path", Path(str(self.calibration_path)))
        )
        evaluated_keys = set()
        if self.path:
            evaluated_keys = {
                _key_of(example.prompt) for example in self.examples("evaluation")
            }
        for number, line in lines[start : start + count]:
            prompt = line.take("input")
            answer = line.take("output")
            # The same key is the same question.
            if _key_of(prompt) in evaluated_keys:
                line.refuse("questions that the evaluation does not ask")
            yield Example(
                id=f"c{number}",
                prompt=prompt,
                answers=(answer,),
                cluster=f"c{number}",
                chat=self.chat,
            )


def _draw_uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _key_of(prompt: str) -> str:
    """The key that a prompt of either form asks for."""
    keys = re.findall(r'\b[Kk]ey:? "([^"]+)"', prompt)
    return keys[-1] if keys else prompt


def _pairs_and_gold(line: Line) -> tuple[list[Pair], Pair]:
    """Return the key-value pairs of a line of a benchmark's file, and the gold one, which is among them."""
    try:
        pairs = [(str(k), str(v)) for k, v in line["ordered_kv_records"]]
        key, value = line["key"], line["value"]
    except (KeyError, TypeError, ValueError):
        line.refuse("fields ordered_kv_records (list of [key, value]), key and value")
    if value is None or not str(value).strip():
        line.refuse("a gold value that is not blank: every reply contains a blank one")
    gold = (str(key), str(value))
    if [pair for pair in pairs if pair[0] == gold[0]] != [gold]:
        line.refuse("a gold key that occurs once in ordered_kv_records, with its value")
    return pairs, gold
