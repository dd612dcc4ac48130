"""What the stages of a run take: seconds, tokens, memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from posbench.files.hardware import peak_memory
from posbench.model.lm import LM
from posbench.run.budget import price_of
from posbench.run.folder import RunDir

if TYPE_CHECKING:
    from posbench.backends.base import Backend

STAGES_WITH_TOKENS = ("intervene", "evaluate")
"""Stages whose tokens a second are known: a search tries many candidates on one reading of a prompt, and a
study may feed the model by itself."""


class StageMeter:
    """Measures the stages of a run.

    Args:
        loaded_model: Returns the model that counts tokens; None as long as it is not loaded.
        price: Of a million tokens read and written; None: not known.
    """

    def __init__(
        self,
        loaded_model: Callable[[], LM | Backend | None],
        price: tuple[float, float] | None = None,
    ) -> None:
        self._loaded_model = loaded_model
        self._price = price
        self._loops = dict[str, float]()

    @contextmanager
    def stage(self, name: str, out: RunDir) -> Iterator[None]:
        """Record in the run folder what a stage takes, also one that fails."""
        started = time.monotonic()
        self._loops = {}
        try:
            yield
        finally:
            amounts = {"seconds": time.monotonic() - started}
            if name in STAGES_WITH_TOKENS:
                amounts |= self._loops
                cost = price_of(
                    self._loops.get("prompt_tokens", 0),
                    self._loops.get("reply_tokens", 0),
                    self._price,
                )
                # A server that tells no tokens has no known cost.
                if cost is not None and self._loops.get("prompt_tokens"):
                    amounts["usd"] = cost
            # On a full disk, the stage itself raises, or what follows it.
            with suppress(OSError):
                out.spend(name, amounts, peak_memory())

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Count time and tokens of a block, which make the tokens per second."""
        before = self._counters()
        try:
            yield
        finally:
            for name, now in self._counters().items():
                self._loops[name] = self._loops.get(name, 0) + now - before[name]

    def _counters(self) -> dict[str, float]:
        """The clock, and what the model has read and written so far."""
        model = self._loaded_model()
        return {
            "loop_seconds": time.monotonic(),
            "prompt_tokens": model.tokens_read if model else 0,
            "reply_tokens": model.tokens_written if model else 0,
        }
