"""Check that a server passes whole prompts to its model: some silently truncate long ones.

Where a server counts the tokens of prompts, its counts are compared with each other: the counts of the parts of a text
must add up to the count of the whole. No tokenizer is assumed. Where it counts none, the model is asked for values at
the beginning, in the middle and at the end of texts of growing length.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from posbench.model.answers import Reply, RequestError

Part = Literal["", "the front", "the middle", "the end", "a part"]
Ask = Callable[[str, int], Reply]
"""Sends a text in the form of the task's prompts; the number limits the answer's tokens, thinking excluded (0: any)."""

VALUE_TOKENS = 32
"""Most tokens of an answer that is a value."""
SLACK_TOKENS = 8
"""Tolerance when two parts' counts are added: where a text is cut, a token may become two."""
NOISE_FACTOR = 3
"""Tolerance for inexact counts, as a multiple of the difference between two counts of one text."""
MIN_TOKENS_PER_CHARACTER = 0.03
"""A server whose counts grow more slowly does not count tokens."""
SMALL_CHARACTERS = 200
"""Characters of the shorter of two counted texts that every server reads whole."""
SHORT_CHARACTERS = 1500
"""Characters of a text that every server reads whole: the longer counted one, and the first searched for values."""
REFUSED = "the server refuses the longest one ({}), and what it refuses gets no answer: ask with fewer or shorter items"
"""Why delivery could not be checked where a text was refused."""
LIMIT_PRECISION = ((100_000, 64), (float("inf"), 16))
"""(longest prompt in characters, n): the limit is found to one part in n, coarser for long, costly prompts."""
NOTE_CHARACTERS = 120
"""Length of the notes that surround a value, in characters."""
FRONT, MIDDLE, END = DEPTHS = (0.0, 0.5, 1.0)
ATTEMPTS = 3
"""Failed searches for a value after which its depth counts as not read."""
LENGTHS_ABOVE = (1.04, 1.1, 1.2, 1.3, 1.4, 1.5)
"""Lengths, in multiples of the limit, at which no value is found if the server drops text."""
LENGTHS_BELOW = (0.97, 0.93, 0.88, 0.83, 0.78, 0.7)
"""Lengths, in multiples of the limit, at which values are found, with one exception, if the server drops text."""
KEPT_SHARE = 0.4
"""Share of the limit that every server keeps of a longer text at one of its ends: Ollama keeps the last half, routers
half at each end."""
FAR_LENGTH = 3
"""Length, in multiples of the limit, at which the kept part must still be found at the same distance from the end."""
FAR_DISTANCES = (1.1, 1.6, 2.2)
"""Distances from that end, in multiples of the limit, where a text of :data:`FAR_LENGTH` has no findable value."""
NAMING_LENGTHS = (0.8, 1.5)
"""Lengths, as shares of the limit, of a text that arrives whole and of one that does not."""
ROW_SHARE = 0.9
"""Share of the expected tokens of a prompt below which its row is checked."""
SHORT_PROMPT_TOKENS = 64
"""Expected tokens up to which a prompt is taken for whole: no server shortens it, and a few tokens of its template, or
unusual words, are a large share of its count."""
SURE_ROWS = 3
"""Shortened prompts after which further rows are no longer checked."""


@dataclass(frozen=True)
class Delivery:
    """How much of a prompt a server passes to its model.

    Attributes:
        characters: Length of the longest text known to arrive whole.
        limit: Largest prompt that arrives whole, in tokens as the server counts, or in characters if it does not
            count; None: no limit was met.
        is_counted: Whether ``limit`` is in tokens.
        drops: Which part of longer prompts is dropped.
        unchecked: Why delivery could not be checked; empty: it was.
        tokens_per_character: Of texts that arrive whole, if a token limit was met; else None.
        overhead_tokens: Tokens that the chat template adds to a prompt, under the same condition.
    """

    characters: int = 0
    limit: int | None = None
    is_counted: bool = True
    drops: Part = ""
    unchecked: str = ""
    tokens_per_character: float | None = None
    overhead_tokens: int = 0

    @property
    def unit(self) -> str:
        """Unit of ``limit``."""
        return "tokens" if self.is_counted else "characters"

    def __str__(self) -> str:
        """The finding in words; empty where there is nothing to say."""
        if self.limit is not None:
            return f"the server reads {self.limit:,} {self.unit} of a prompt, and drops {self.drops} of a longer one"
        if self.unchecked:
            return (
                f"whether prompts arrive whole could not be checked: {self.unchecked}"
            )
        return ""


class _NotCounted(Exception):
    """The server does not count the tokens of prompts."""


class _Rejected(Exception):
    """The server refused a text, so that nothing is silent."""


def cold(text: str) -> str:
    """Return a text that no cache has seen: its first words are new."""
    return f"Check {secrets.token_hex(4)}.\n\n{text}"


def check_delivery(ask: Ask, text: str) -> Delivery:
    """Find out whether the longest prompt arrives whole, and if not, up to which length prompts do.

    Args:
        ask: Sends texts.
        text: The longest prompt.

    Raises:
        RequestError: A request failed.
    """
    try:
        return _Counts(ask).check(text)
    except _Rejected as rejection:
        # Prompts that are refused have no score; none is shortened in silence.
        return Delivery(unchecked=REFUSED.format(rejection))
    except _NotCounted as error:
        reason = str(error)
    try:
        return _Values(ask, text).check(len(text), reason)
    except _Rejected as rejection:
        return Delivery(is_counted=False, unchecked=REFUSED.format(rejection))


def bracket(characters: int) -> int:
    """Return n where the limit is found to one part in n, for a longest prompt of this many characters."""
    return next(parts for most, parts in LIMIT_PRECISION if characters <= most)


def rounded_down(limit: int) -> int:
    """Return a limit without its last digits, so that it is the same when it is measured again."""
    step = 2 ** max(limit.bit_length() - 6, 0)
    return limit // step * step


# With the counts of the server


class _Counts:
    """Compares the tokens that a server counts in a text with those in its parts.

    Args:
        ask: Sends texts.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._known = dict[str, int]()
        self._beside_text = 0
        self._noise: int | None = None

    def check(self, text: str) -> Delivery:
        """Find out by token counts whether a text arrives whole, else how long a text may be.

        Args:
            text: A text that is as long as the longest prompt.
        """
        if self.tokens_if_whole(text) is not None:
            return Delivery(characters=len(text))
        characters = self._longest_whole(text)
        if not characters:
            return Delivery(unchecked="its counts of tokens do not add up")
        values = _Values(self._ask, text)
        tokens = self._count(text[:characters])
        # A text of no characters costs the overhead alone.
        per_character = (tokens - self._beside_text) / characters
        return Delivery(
            characters=characters,
            limit=rounded_down(tokens),
            drops=values.dropped_part(characters),
            tokens_per_character=per_character,
            overhead_tokens=self._beside_text,
        )

    def tokens_if_whole(self, text: str) -> int | None:
        """Tokens of a text, the template's among them; None where the text does not arrive whole."""
        self._measure_beside_text(text)
        return self._count(text) if self._is_whole(text, len(text) // 2) else None

    def _count(self, text: str, again: bool = False) -> int:
        """Return the tokens of a text as the server counts them; each text is sent once unless ``again``.

        Raises:
            _Rejected: The server refuses the text.
            _NotCounted: It reports no count.
        """
        if again or text not in self._known:
            # With new words in front: of a text in its cache, a server may count what is new alone.
            reply = self._ask(cold(text), 0)
            if reply.rejection:
                raise _Rejected(reply.rejection)
            if not reply.prompt_tokens:
                raise _NotCounted("it counts no tokens")
            self._known[text] = reply.prompt_tokens
        return self._known[text]

    def _measure_beside_text(self, text: str) -> None:
        """Measure the tokens of a prompt beside its text: the chat template's, and of the prefix that makes it new.

        Two texts alone have them twice, both together once.

        Raises:
            _NotCounted: The counts do not grow with the text.
        """
        size = min(SMALL_CHARACTERS, len(text) // 4)
        start = (len(text) - 2 * size) // 2
        first, second = (
            text[start : start + size],
            text[start + size : start + 2 * size],
        )
        both = self._count(first + second)
        growth = both - self._count(first)
        if growth < MIN_TOKENS_PER_CHARACTER * len(second):
            raise _NotCounted("its counts of tokens do not grow with the text")
        self._beside_text = self._count(first) + self._count(second) - both

    def _is_whole(self, text: str, at: int) -> bool:
        """Whether a text arrives whole: it has as many tokens as its two parts.

        Args:
            text: The text.
            at: Where it is split; both parts must be short enough to arrive whole.
        """
        parts = (text, text[:at], text[at:])
        whole, first, second = map(self._count, parts)
        missing = first + second - whole - self._beside_text
        if missing <= SLACK_TOKENS:
            return True
        # A server's counts may vary; how much is measured once.
        if self._noise is None:
            counts = (whole, first, second)
            self._noise = max(
                abs(self._count(part, again=True) - count)
                for part, count in zip(parts, counts, strict=True)
            )
        return missing <= SLACK_TOKENS + NOISE_FACTOR * self._noise

    def _longest_whole(self, text: str) -> int:
        """Return the characters of the longest beginning of a text that arrives whole, by bisection.

        0 if not even a short one does.
        """
        low, high = len(text) // 2, len(text)
        while not self._is_whole(text[:low], low // 2):
            high = low
            low = low // 2
            if low < SMALL_CHARACTERS // 4:
                return 0
        known = low
        while high - low > low // bracket(len(text)) + 1:
            middle = (low + high) // 2
            if self._is_whole(text[:middle], known):
                low = middle
            else:
                high = middle
        return low


# With values that the model finds


class _Values:
    """Asks a model for values placed at several depths of texts.

    Args:
        ask: Sends texts.
        prompt: Filler of the notes around a value; as the run's prompt, it has the same tokens per character.
    """

    def __init__(self, ask: Ask, prompt: str) -> None:
        self._ask = ask
        self._filler = " ".join(prompt.translate(str.maketrans('"{}', "'()")).split())

    def check(self, characters: int, why: str) -> Delivery:
        """Find out by values hidden in the text whether it arrives whole, else how long a text may be.

        Used where token counts cannot be compared.

        Args:
            characters: Length of the longest prompt.
            why: Why they cannot, in words.
        """
        short = min(SHORT_CHARACTERS, characters // 2)
        if not all(self._finds(short, depth) for depth in DEPTHS):
            reason = f"{why}, and the model does not find values in a short text"
            return Delivery(is_counted=False, unchecked=reason)
        lost = [depth for depth in DEPTHS if not self._finds(characters, depth)]
        if not lost:
            return Delivery(characters=characters, is_counted=False)
        part = _part_without(lost)
        where = part or "all"
        reason = (
            f"{why}, and the model finds no value at {where} of a text of {characters:,} characters, "
            "which may be its own bias or the server's doing"
        )
        if not part:
            return Delivery(is_counted=False, unchecked=reason)
        depth = {"the front": FRONT, "the middle": MIDDLE, "the end": END}[part]
        low = short
        high = characters
        while high - low > low // bracket(characters) + 1:
            middle = (low + high) // 2
            if self._finds(middle, depth, attempts=2):
                low = middle
            else:
                high = middle
        if not self._is_cliff(low, high, depth):
            return Delivery(is_counted=False, unchecked=reason)
        return Delivery(
            characters=low, limit=rounded_down(low), is_counted=False, drops=part
        )

    def dropped_part(self, limit: int) -> Part:
        """Return which part is dropped from texts of more than ``limit`` characters; "a part" if it is not known which.

        The model is asked for values hidden at several depths of a shorter and of a longer text.
        """
        below, above = (int(share * limit) for share in NAMING_LENGTHS)
        try:
            if not all(self._finds(below, depth) for depth in DEPTHS):
                return "a part"
            lost = [depth for depth in DEPTHS if not self._finds(above, depth)]
        except _Rejected:
            return "a part"
        if len(lost) == len(DEPTHS):
            return "the end"  # with which the question went
        return _part_without(lost) or "a part"

    def _is_cliff(self, low: int, high: int, depth: float) -> bool:
        """Whether text is dropped by the server: from one length on, all but a fixed number of characters at one end.

        A position bias changes gradually, or depends on relative depth and not on characters.

        Args:
            low: The longest text in which the value at ``depth`` was found.
            high: The shortest in which it was not.
            depth: Where values are lost.
        """

        def at(distance: float, length: int) -> float:
            """Return the depth of the point ``distance`` characters from the kept end."""
            share = distance / length
            return 1 - share if depth == FRONT else share

        for share in LENGTHS_ABOVE:
            length = int(share * high)
            if self._finds(length, depth, attempts=2):
                return False
            if not self._finds(length, at(KEPT_SHARE * low, length)):
                return False
        far = FAR_LENGTH * high
        if not self._finds(far, at(KEPT_SHARE * low, far)):
            return False
        if any(self._finds(far, at(share * high, far)) for share in FAR_DISTANCES):
            return False
        num_found = sum(
            self._finds(int(share * low), depth, attempts=2) for share in LENGTHS_BELOW
        )
        return num_found >= len(LENGTHS_BELOW) - 1

    def _finds(self, characters: int, depth: float, attempts: int = ATTEMPTS) -> bool:
        """Whether the model finds a value hidden in a text; each attempt hides another one.

        Args:
            characters: Length of the text.
            depth: Where the value is, 0 (front) to 1 (end).
            attempts: Attempts of which one has to succeed.

        Raises:
            _Rejected: The server refuses the text.
        """
        for _ in range(attempts):
            key, value = secrets.token_hex(4), secrets.token_hex(4)
            text = cold(text_with_value(self._filler, characters, depth, key, value))
            reply = self._ask(text, VALUE_TOKENS)
            if reply.rejection:
                raise _Rejected(reply.rejection)
            if value in reply.text:
                return True
        return False


def text_with_value(
    filler: str, characters: int, depth: float, key: str, value: str
) -> str:
    """Return a text that asks, at its beginning and at its end, for the value of a key.

    Args:
        filler: Text of the notes around the pair.
        characters: Approximate length of the text.
        depth: Position of the pair: 0 the front, 1 the end.
        key, value: The pair.
    """
    head = f'Extract the value of the key "{key}" from the JSON object below.\n\nJSON data:\n{{'
    tail = f'}}\n\nKey: "{key}"\nCorresponding value:'
    pair = f'"{key}": "{value}",\n '
    size = max(characters - len(head) - len(tail) - len(pair), NOTE_CHARACTERS)
    size_before = round(depth * size)
    notes = _notes(filler, size_before) + pair
    notes += _notes(filler, size - size_before)
    return head + notes.removesuffix(",\n ") + tail


def _notes(filler: str, characters: int) -> str:
    """Return lines of a JSON object, ``characters`` long in all, that hold pieces of a filler text."""
    words = filler * (characters // max(len(filler), 1) + 1)
    lines = list[str]()
    while characters > 0:
        label = f'"note {1000 + len(lines)}": "'
        length = max(min(NOTE_CHARACTERS, characters - len(label) - 4), 1)
        begin = len(lines) * NOTE_CHARACTERS
        lines.append(f'{label}{words[begin : begin + length]}",\n ')
        characters -= len(lines[-1])
    return "".join(lines)


def _part_without(lost: list[float]) -> Part:
    """Return the part of a text that is dropped, by the depths at which values are not found.

    It is empty where they do not make one part.
    """
    parts: dict[tuple[float, ...], Part] = {
        (FRONT,): "the front",
        (FRONT, MIDDLE): "the front",
        (MIDDLE,): "the middle",
        (MIDDLE, END): "the end",
        (END,): "the end",
    }
    return parts.get(tuple(lost), "")


# Row by row


class RowCheck:
    """Judges by a server's token count whether a row's prompt arrived whole.

    A prompt with far fewer tokens than others of its length is asked again, new to every cache and in halves: its text
    may be unusual, or the server may not count cached tokens. Its methods may be called from several threads.

    Args:
        ask: Sends texts.
        tokens_per_character: Of the task's prompts, by the server's count.
        overhead: Tokens that the chat template adds to a prompt.
    """

    def __init__(
        self, ask: Ask, tokens_per_character: float | None, overhead: int
    ) -> None:
        self._ask = ask
        self._per_character = tokens_per_character
        self._overhead = overhead
        self._share = ROW_SHARE
        self._num_shortened = 0
        self._lock = threading.Lock()

    def arrived(self, text: str, tokens: int | None) -> bool:
        """Return whether a prompt arrived whole, judged by its token count.

        Args:
            text: The prompt.
            tokens: Its tokens as the server counts; None: not reported.
        """
        if not tokens or self._per_character is None:
            return True
        expected = self._overhead + self._per_character * len(text)
        if expected <= SHORT_PROMPT_TOKENS:
            return True
        with self._lock:
            if tokens >= self._share * expected:
                return True
            # After some confirmed ones, no further prompt is checked by more requests.
            if self._num_shortened >= SURE_ROWS:
                return False
            is_whole = self._is_whole_all_the_same(text, tokens)
            if is_whole:
                # Other prompts of this kind are no sign, either.
                self._share = min(self._share, ROW_SHARE * tokens / expected)
            else:
                self._num_shortened += 1
            return is_whole

    def _is_whole_all_the_same(self, text: str, tokens: int) -> bool:
        """Whether a prompt for which the server counted few tokens arrived whole nevertheless.

        Args:
            text: The prompt.
            tokens: The server's count.

        Returns:
            False also where that cannot be found out.
        """
        try:
            tokens_if_whole = _Counts(self._ask).tokens_if_whole(text)
            if tokens_if_whole is None:
                return False
            if tokens >= ROW_SHARE * tokens_if_whole:
                return True
            # Cached tokens may not be counted: then a text that is sent again has fewer tokens.
            new = cold(text)
            self._ask(new, 0)
            again = self._ask(new, 0).prompt_tokens or 0
            return again < ROW_SHARE * tokens_if_whole
        except (_NotCounted, _Rejected):
            return False
        except RequestError:
            return False
