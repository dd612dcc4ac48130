"""Gaps in the positions of a prompt: between instruction and documents, and between documents and question."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from posbench.errors import UserError
from posbench.late import Tensor, torch
from posbench.methods.base import Method, Needs
from posbench.model import rope
from posbench.model.items import BatchItems, reading_items
from posbench.model.lm import LM
from posbench.model.rope import RotaryCall
from posbench.schema import Whole


@dataclass(frozen=True, kw_only=True)
class PositionEngineering(Method):
    """Count positions as if placeholder tokens, which nobody sees, stood before and behind the documents of a prompt.

    With documents (the items of the prompt) from token P to token E - 1, token m takes the position ::

        m                        m < P, the instruction
        m + theta_a              P <= m < E, the documents, with the text between them
        m + theta_a + theta_b    m >= E, the question, and all generated tokens

    in every layer that rotates. A token that an item shares with other text counts as the item's. The work is that of
    the unmodified model. Positions beyond the context window are refused: no model was trained on them.

    Args:
        theta_a: Positions left out between instruction and documents, in tokens. It belongs to a checkpoint, as does
            theta_b: the paper searches both on questions with known answers, and gives 1900 and 400 for retrieved
            documents with Llama 2 (window 4096).
        theta_b: Positions left out between documents and question, in tokens.

    Source: He et al., EMNLP 2024, arXiv 2404.11216. Differs from source: none that we know of; no released program was
    read.
    """

    needs: ClassVar[Needs] = Needs(rope=True, items=True)

    theta_a: Whole
    theta_b: Whole

    @classmethod
    def example(cls, lm: LM) -> Self:
        """Gaps of 40 and 10 tokens."""
        return cls(theta_a=40, theta_b=10)

    def check(self, lm: LM) -> None:
        """Refuse a model without RoPE, and gaps that fill its context window.

        Raises:
            UserError: States which.
        """
        super().check(lm)
        for name in ("theta_a", "theta_b"):
            if getattr(self, name) >= lm.context_window:
                allowed = f"fewer than the {lm.context_window} tokens of {lm.name}'s context window"
                hint = f"set method.{name}={lm.context_window // 4}, or less"
                raise UserError(f"method.{name}", getattr(self, name), allowed, hint)

    def neutral(self) -> Self:
        """No gaps."""
        return replace(self, theta_a=0, theta_b=0)

    @contextmanager
    def changed(self, lm: LM) -> Iterator[None]:
        """See :meth:`Method.changed`."""
        with reading_items(lm) as batch:

            def move(call: RotaryCall) -> RotaryCall:
                gaps = self._gaps(lm, batch, call.positions)
                return replace(call, positions=call.positions + gaps)

            rotated = rope.rotated_layers(lm.model)
            with rope.tables(lm.model, dict.fromkeys(rotated, move)):
                yield

    def _gaps(self, lm: LM, batch: BatchItems, positions: Tensor) -> Tensor:
        """Return how many positions are left out before each token of a forward, [B, T].

        Args:
            lm: The model.
            batch: The items of its rows.
            positions: Positions of the tokens of the forward, [1 or B, T].

        Raises:
            UserError: The prompt with its gaps is longer than the context window.
        """
        if not batch.rows:
            raise ValueError("the prompt was read outside the block: run it inside")
        device = positions.device
        columns = torch.arange(positions.shape[1], device=device) + batch.past
        spans = [[s for s in row if s != (0, 0)] for row in batch.rows]
        begins = torch.tensor([[min(row)[0]] for row in spans], device=device)
        ends = torch.tensor([[max(e for _, e in row)] for row in spans], device=device)
        longest = batch.width - min(batch.starts)
        excess = longest + self.theta_a + self.theta_b - lm.context_window
        if excess > 0 and self.theta_a + self.theta_b > 0:
            allowed = (
                f"theta_a + theta_b of at most {max(lm.context_window - longest, 0)}: a prompt has {longest} of the "
                f"{lm.context_window} tokens that {lm.name} reads"
            )
            hint = "set smaller gaps, or ask with fewer items"
            raise UserError("method.theta_a", self.theta_a, allowed, hint)
        in_documents = self.theta_a * (columns >= begins).long()
        return in_documents + self.theta_b * (columns >= ends).long()
