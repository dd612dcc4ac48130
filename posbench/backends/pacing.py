"""Rate control of requests to a server: concurrency, pauses when the server asks to wait, and measured speed."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from statistics import median
from typing import NamedTuple

import numpy as np

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
"""First pause after a refusal that names no time; doubled while nothing is answered."""
LONGEST_PAUSE_SECONDS = 60.0
"""Longest such pause."""
MAX_WAIT_SECONDS = 900.0
"""Seconds for which a server may be busy, or ask to wait, before the run stops."""
NOTICE_SECONDS = 10.0
"""Seconds of waiting after which the user is notified."""
DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
UNIT_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
RATE_LIMIT_PREFIXES = ("x-ratelimit", "anthropic-ratelimit", "ratelimit")
TIMED_REPLY_TOKENS = 16
"""Reply tokens while a server is timed; shorter replies make the time per token no more accurate."""
FULLY_PARALLEL = 0.75
"""Share of requests answered in parallel from which a server is taken to answer all of them in parallel."""
SAME_LENGTH_RATIO = 1.1
"""Texts whose lengths differ by less are timed as one."""
NEAR_LENGTH_RATIO = 1.5
"""Length ratio of two texts up to which they are taken to need the same time."""


class ServerBusy(RuntimeError):
    """A server refused requests for :data:`MAX_WAIT_SECONDS`, or asks to wait for longer."""


class Pacer:
    """Lets several threads send requests, with the concurrency that the server accepts.

    The number rises by one with each round of answers and is halved when the server refuses (additive increase,
    multiplicative decrease); refusals of requests that were under way together halve it once.

    Args:
        most: Maximum of concurrent requests.
        clock: Seconds.

    Attributes:
        max_wait: Seconds that the server may refuse all requests, or ask to wait.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.max_wait = MAX_WAIT_SECONDS
        self._is_noticed = False
        self._clock = clock
        self._limit = float(most)
        self._active = 0
        self._resume_at = 0.0
        self._decreased_at = float("-inf")
        self._pause = FIRST_PAUSE_SECONDS
        self._refused_since: float | None = None
        self._changed = threading.Condition()

    @property
    def limit(self) -> int:
        """Requests that may be under way now."""
        return max(int(self._limit), 1)

    @contextmanager
    def turn(self) -> Iterator[float]:
        """Wait until a request may be sent, and count it as being answered inside the block.

        Yields:
            The time at which it is sent, in seconds of the pacer's clock.
        """
        with self._changed:
            while True:
                pause = self._resume_at - self._clock()
                if pause <= 0 and self._active < self.limit:
                    break
                self._changed.wait(pause if pause > 0 else None)
            self._active += 1
            began = self._clock()
        try:
            yield began
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def answered(self, headers: Mapping[str, str], tokens: int = 0) -> None:
        """Count an answer, and heed the rate limits in its headers.

        Args:
            headers: Headers of the answer, names in lower case.
            tokens: Approximate tokens of a request.
        """
        with self._changed:
            # About one more at a time after each round of answers.
            self._limit = min(self._limit + 1 / self._limit, float(self.most))
            self._pause = FIRST_PAUSE_SECONDS
            self._refused_since = None
            self._is_noticed = False
            pause = pause_until_refilled(headers, tokens)
            if pause:
                resume_at = self._clock() + min(pause, LONGEST_PAUSE_SECONDS)
                self._resume_at = max(self._resume_at, resume_at)
            self._changed.notify_all()

    def refused(
        self, began: float, headers: Mapping[str, str], message: str = ""
    ) -> None:
        """Note that a server was too busy for a request: send fewer at a time from now on, after a pause.

        Args:
            began: When the request was sent.
            headers: Headers of the response, which may ask to wait.
            message: What the server said.

        Raises:
            ServerBusy: The server asks for a longer wait than :attr:`max_wait`, or refused everything for that time.
        """
        with self._changed:
            now = self._clock()
            # Requests that were sent before the last decrease say nothing about the new number.
            if began > self._decreased_at:
                self._limit = max(self._limit / 2, 1.0)
                self._decreased_at = now
            if self._refused_since is None:
                self._refused_since = now
            pause = retry_after(headers)
            if pause is None:
                pause = self._pause
                if began >= self._resume_at:
                    self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
            waited = now - self._refused_since
            if pause > self.max_wait:
                raise ServerBusy(f"it asks to wait {pause:,.0f} s ({message})")
            if waited > self.max_wait:
                raise ServerBusy(
                    f"it has refused all requests for {waited / 60:.0f} minutes ({message})"
                )
            if max(waited, pause) > NOTICE_SECONDS and not self._is_noticed:
                self._is_noticed = True
                minutes = self.max_wait / 60
                text = "the server is busy, waiting for up to %.0f minutes: %s"
                log.warning(text, minutes, message)
            self._resume_at = max(self._resume_at, now + pause)
            self._changed.notify_all()


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that ``retry-after-ms`` or ``Retry-After`` asks to wait; None where neither is there."""
    milliseconds = headers.get("retry-after-ms", "")
    if re.fullmatch(r"\d+(\.\d+)?", milliseconds):
        return float(milliseconds) / 1000
    text = headers.get("retry-after", "")
    seconds = parse_seconds(text)
    if seconds is not None or not text:
        return seconds
    try:
        when = parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return None
    return max((when - datetime.now(UTC)).total_seconds(), 0.0)


def pause_until_refilled(headers: Mapping[str, str], tokens: int) -> float:
    """Return the seconds until a server's rate limits, by its headers, allow one more request.

    Headers give the remaining amount and the time until the limit is full again; it refills evenly.

    Args:
        headers: ``x-ratelimit-remaining-requests``, ``-reset-requests``, ``-limit-requests``, and likewise for
            ``tokens``; names in lower case.
        tokens: Tokens that a request takes.
    """
    pauses = [0.0]
    for unit, needed in (("requests", 1), ("tokens", max(tokens, 1))):
        for prefix in RATE_LIMIT_PREFIXES:
            remaining = _rate_header(headers, prefix, "remaining", unit)
            reset = parse_seconds(_rate_header(headers, prefix, "reset", unit))
            if not re.fullmatch(r"\d+", remaining) or reset is None:
                continue
            missing = needed - int(remaining)
            if missing <= 0:
                continue
            share = 1.0
            limit = _rate_header(headers, prefix, "limit", unit)
            if re.fullmatch(r"\d+", limit) and int(limit) > int(remaining):
                share = min(missing / (int(limit) - int(remaining)), 1.0)
            pauses.append(share * reset)
    return max(pauses)


def _rate_header(headers: Mapping[str, str], prefix: str, kind: str, unit: str) -> str:
    """A rate-limit header in either order of its words, as OpenAI and Anthropic have them; empty where absent."""
    name = headers.get(f"{prefix}-{kind}-{unit}")
    return name or headers.get(f"{prefix}-{unit}-{kind}", "")


def parse_seconds(text: str) -> float | None:
    """Read a time as rate-limit headers give it: ``2``, ``0.5``, ``6m0s``, ``20ms``, or the moment as ISO 8601.

    Returns:
        Seconds from now; None where it is no time.
    """
    text = text.strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if text and not DURATION.sub("", text):
        return sum(
            float(number) * UNIT_SECONDS[unit]
            for number, unit in DURATION.findall(text)
        )
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max((moment - datetime.now(UTC)).total_seconds(), 0.0)


# Speed


class Timing(NamedTuple):
    """A request that was sent alone, its text new to every cache: characters, tokens of the reply, seconds."""

    characters: int
    reply_tokens: int
    seconds: float


@dataclass(frozen=True)
class ServerSpeed:
    """Measured speed of a server on texts that it has not cached."""

    timings: tuple[Timing, ...]
    parallel: float | None = None
    sent: int = 1

    @property
    def token_seconds(self) -> float:
        """Upper bound of the seconds per reply token."""
        return min(
            t.seconds / max(t.reply_tokens, TIMED_REPLY_TOKENS) for t in self.timings
        )

    @property
    def points(self) -> list[tuple[float, float]]:
        """Points (characters of a prompt, seconds to read it), in order of length.

        They are medians over timed texts of similar length, less the time of their replies.
        """
        token_seconds = self.token_seconds
        points = []
        remaining = sorted(self.timings)
        while remaining:
            shortest = remaining[0].characters
            group = [
                t for t in remaining if t.characters <= SAME_LENGTH_RATIO * shortest
            ]
            remaining = remaining[len(group) :]
            seconds = median(
                max(t.seconds - token_seconds * t.reply_tokens, 0.0) for t in group
            )
            points.append((median(t.characters for t in group), seconds))
        return points

    def was_timed_at(self, characters: float) -> bool:
        """Return whether a text of about this length was timed."""
        lengths = [length for length, _ in self.points]
        return any(
            length / NEAR_LENGTH_RATIO <= characters <= NEAR_LENGTH_RATIO * length
            for length in lengths
        )

    def seconds_of_request(self, characters: float, reply_tokens: float) -> float:
        """Return the seconds of one request sent alone, interpolated linearly between the timed lengths.

        Args:
            characters: Characters of the prompt.
            reply_tokens: Tokens of the reply.
        """
        points = self.points
        lengths, seconds = zip(*points, strict=True)
        reading = float(np.interp(characters, lengths, seconds))
        longest, longest_seconds = points[-1]
        # Outside the timed lengths, in proportion to the nearest.
        if characters > longest:
            slope = longest_seconds / max(longest, 1)
            reading = longest_seconds + slope * (characters - longest)
        elif characters < lengths[0]:
            reading = seconds[0] * characters / max(lengths[0], 1)
        return reading + self.token_seconds * reply_tokens

    def at_once(self, concurrency: int) -> float:
        """Return how many requests a server answers in the time of one, if ``concurrency`` are sent at once.

        A server that answered all timed requests in parallel is taken to answer more in parallel; an untimed one, all.
        """
        if self.parallel is None:
            return float(concurrency)
        parallel = self.parallel
        if parallel > FULLY_PARALLEL * self.sent:
            parallel *= concurrency / self.sent
        return min(max(parallel, 1.0), float(concurrency))

    def seconds_of_requests(
        self, count: float, characters: float, reply_tokens: float, concurrency: int
    ) -> float:
        """Return the seconds of ``count`` requests.

        Args:
            count: Their number.
            characters: Characters of the prompt of each.
            reply_tokens: Tokens of the reply to each.
            concurrency: Concurrent requests.
        """
        seconds_each = self.seconds_of_request(characters, reply_tokens)
        return seconds_each * count / self.at_once(concurrency)
