"""The budget of a diagnosis: the limit and the use so far."""

from __future__ import annotations

from typing import NamedTuple

from posbench.run.budget import Budget, Price, Stopwatch, money, price_of
from posbench.run.progress import duration

DEFAULT_BUDGET = "10min"
"""Budget of a diagnosis whose command names none."""
LARGER_FACTOR = 3.0
"""Factor on a budget that was too small."""


class Counts(NamedTuple):
    """Prompts that were read, their tokens, and the tokens of their replies."""

    prompts: int = 0
    read: int = 0
    written: int = 0


class Allowance:
    """The budget of a diagnosis, shared out among its parts.

    Args:
        budget: A time, or a number of prompts, of tokens, or money.
        price: Money for a million tokens read and written; None: not known.
        watch: Measures the time of this session; None: from now on.

    Attributes:
        watch: The watch.
        prompts: Prompts that were read so far.
        read: Their tokens.
        written: Tokens of replies.
        paid: Share of these that a server answered, which may cost money.
    """

    def __init__(
        self,
        budget: Budget,
        price: Price | None,
        watch: Stopwatch | None = None,
    ) -> None:
        self.budget = budget
        self.price = price
        self.watch = watch or Stopwatch()
        self.prompts = 0
        self.read = 0
        self.written = 0
        self.paid = Counts()

    @property
    def is_time(self) -> bool:
        """Whether the budget is a time."""
        return self.budget.seconds is not None

    @property
    def usd(self) -> float | None:
        """Money that was spent; None: the price is not known."""
        return price_of(self.paid.read, self.paid.written, self.price)

    @property
    def spent(self) -> float:
        """Use so far, in the unit of the budget."""
        if self.is_time:
            return self.watch.seconds
        if self.budget.prompts is not None:
            return float(self.prompts)
        if self.budget.usd is not None:
            return self.usd or 0.0
        return float(self.read + self.written)

    def left(self, share: float) -> float:
        """Budget left until this share of it is spent, in its unit."""
        return max(share * self.budget.size - self.spent, 0.0)

    def add(self, prompts: int, read: int, written: int, is_paid: bool = False) -> None:
        """Count prompts that were read, their tokens, and the tokens of their replies, of a server or in process."""
        self.prompts += prompts
        self.read += read
        self.written += written
        if is_paid:
            paid = self.paid
            self.paid = Counts(
                paid.prompts + prompts, paid.read + read, paid.written + written
            )

    def cost_of_prompt(self, read: float, written: float) -> float:
        """Cost of one more prompt, in the unit of a budget that is not a time.

        Args:
            read: Estimate of its tokens, used before the first prompt.
            written: Estimate of its reply tokens.
        """
        if self.budget.prompts is not None:
            return 1.0
        so_far = Counts(self.prompts, self.read, self.written)
        if self.budget.usd is not None:
            so_far = self.paid
        if so_far.prompts:
            read = so_far.read / so_far.prompts
            written = so_far.written / so_far.prompts
        if self.budget.usd is not None:
            return price_of(read, written, self.price) or 0.0
        return read + written

    def rest(self, share: float) -> Budget:
        """Return the budget of the next run: what is left of the first ``share`` (0..1) of the whole budget."""
        left = self.left(share)
        budget = self.budget
        if budget.seconds is not None:
            seconds = max(left, 1.0)
            return Budget(f"{seconds:.0f}s", seconds=seconds)
        if budget.usd is not None:
            return Budget(f"{left:.6f}usd", usd=max(left, 1e-6))
        if budget.tokens is not None:
            return Budget(f"{left:.0f}tok", tokens=max(int(left), 1))
        return Budget(f"{left:.0f}prompts", prompts=max(int(left), 1))

    def larger(self, factor: float = LARGER_FACTOR) -> str:
        """A larger budget, as it is typed."""
        size = factor * self.budget.size
        if self.budget.seconds is not None:
            return f"{-(-size // 60):.0f}min"
        if self.budget.usd is not None:
            return f"{size:.3g}usd"
        if self.budget.tokens is not None:
            return f"{-(-size // 1000):.0f}ktok"
        return f"{-(-size // 1):.0f}prompts"

    def words(self, is_served: bool) -> str:
        """Use so far, in words; the tokens of a model in process are those of this session."""
        parts = [f"{self.prompts:,} prompts"]
        # Some servers count no tokens.
        if self.read:
            parts.append(f"{self.read + self.written:,} tokens")
        if self.usd is not None and (self.paid.read or not self.paid.prompts):
            parts.append(money(self.usd))
        parts.append(duration(self.watch.seconds))
        if is_served:
            return ", ".join(parts)
        return f"{parts[0]}; in this session {', '.join(parts[1:])}"
