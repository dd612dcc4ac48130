"""Another RoPE base in all layers: a smaller one rotates faster, so that far tokens differ more from near ones."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

from annotated_types import Gt

from posbench.methods.base import CheckpointChange, Method, Needs
from posbench.model import rope
from posbench.model.lm import LM


@dataclass(frozen=True, kw_only=True)
class RopeBase(Method):
    """Rotate queries and keys with another base theta, in all layers; it costs nothing.

    Args:
        base: theta: of n channel pairs, pair i rotates by ``base ** -(i / n)`` radians per token. None: the model's.

    Source: a larger base is known as NTK-aware scaling. Attention Buckets (Chen et al. 2023, arXiv 2312.04455) mixes
    several bases; one alone did as much on the model where those helped (docs/remedies.md).
    """

    needs: ClassVar[Needs] = Needs(rope=True, plain=True)
    always_folds: ClassVar[bool] = True

    base: Annotated[float, Gt(1)] | None

    @classmethod
    def example(cls, lm: LM) -> Self:
        """A base that no model of ours has."""
        return cls(base=2500.0)

    def neutral(self) -> Self:
        """The model's own base."""
        return replace(self, base=None)

    def unchanged_length(self, lm: LM) -> int:
        """The whole window where the base is the model's own."""
        is_own = self.base in (None, rope.own_base(lm.model))
        return lm.context_window if is_own else 0

    def caution(self, lm: LM, tokens: int) -> str:
        """See :meth:`Method.caution`."""
        return rope.caution_about_bases(lm, [self.base], tokens)

    def folded(self, lm: LM) -> CheckpointChange:
        """The base in the config."""
        return CheckpointChange(rope={"rope_theta": self.base} if self.base else {})

    def prefill(self) -> Self:
        """Itself: the base is the same for every token."""
        return self

    def changed(self, lm: LM) -> AbstractContextManager[None]:
        """See :meth:`Method.changed`."""

        def set_base(call: rope.RotaryCall) -> rope.RotaryCall:
            return replace(call, bases=(self.base,))

        return rope.tables(
            lm.model, dict.fromkeys(rope.rotated_layers(lm.model), set_base)
        )
