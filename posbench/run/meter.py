"""Measure the stages of a run: seconds, tokens, memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from posbench.files.hardware import peak_memory
from posbench.model.lm import LM
from posbench.run.budget import Price, price_of
from posbench.run.folder import RunDir

if TYPE_CHECKING:
    from posbench.backends.base import Backend

STAGES_WITH_TOKENS = ("intervene", "evaluate")
"""Stages whose tokens per second can be measured: a search tries many candidates on one prefill, and a study may call
the model directly."""


class StageMeter:
    """Measures the stages of a run.

    Args:
        loaded_model: Returns the model that counts tokens; None until it is loaded.
        price: Price per million tokens read and written; None: not known.
    """

    def __init__(
        self,
        loaded_model: Callable[[], LM | Backend | None],
        price: Price | None = None,
    ) -> None:
        self._loaded_model = loaded_model
        self._price = price
        self._loops = dict[str, float]()

    @contextmanager
    def stage(self, name: str, out: RunDir) -> Iterator[None]:
        """Record in the run folder the time, tokens, cost and peak memory of a stage (the block), even if it fails.

        Args:
            name: Name of the stage, such as ``evaluate``.
            out: The run folder.
        """
        started = time.monotonic()
        self._loops = {}
        try:
            yield
        finally:
            amounts = {"seconds": time.monotonic() - started}
            # Other stages ask the model for nothing.
            if name in STAGES_WITH_TOKENS:
                amounts |= self._loops
                cost = price_of(
                    self._loops.get("prompt_tokens", 0),
                    self._loops.get("reply_tokens", 0),
                    self._price,
                    self._loops.pop("cached_tokens", 0),
                )
                # Without token counts from the server, the cost is unknown.
                if cost is not None and self._loops.get("prompt_tokens"):
                    amounts["usd"] = cost
            # On a full disk, the stage itself raises, or the next step.
            with suppress(OSError):
                out.spend(name, amounts, peak_memory())

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Add the time and tokens of a block to those of the stage, for its tokens per second."""
        before = self._counters()
        try:
            yield
        finally:
            for name, now in self._counters().items():
                self._loops[name] = self._loops.get(name, 0) + now - before[name]

    def _counters(self) -> dict[str, float]:
        """Return the clock (seconds), and the tokens that the model has read and written so far, by name."""
        model = self._loaded_model()
        return {
            "loop_seconds": time.monotonic(),
            "prompt_tokens": model.tokens_read if model else 0,
            "reply_tokens": model.tokens_written if model else 0,
            "cached_tokens": getattr(model, "tokens_cached", 0),
        }
