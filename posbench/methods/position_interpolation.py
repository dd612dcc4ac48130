"""One scale for all positions (Chen et al. 2023): the rotary embedding sees position m / s."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from posbench.errors import UserError
from posbench.methods.base import Method
from posbench.model import rope

if TYPE_CHECKING:
    from posbench.model.lm import LM


@dataclass(frozen=True, kw_only=True)
class PositionInterpolation(Method):
    """Divide every position by one scale, in every layer and head.

    Args:
        scale: The divisor s; 1 changes nothing, above 1 positions move together.

    Source: Chen et al. 2023 (Position Interpolation); the uniform baseline of Ms-PoE (scale 1.5) and of LPES
    (the mean of its scales).
    """

    scale: float

    def check(self, lm: LM) -> None:
        """See :meth:`Method.check`."""
        rope.check(lm, "position_interpolation")
        if self.scale <= 0:
            raise UserError("method.scale", self.scale, "a number above 0", "set method.scale=1.5")

    def neutral(self) -> Self:
        """Scale 1."""
        return replace(self, scale=1.0)

    @contextmanager
    def applied(self, lm: LM) -> Iterator[LM]:
        """See :meth:`Method.applied`."""
        self.check(lm)
        with rope.tables(lm.model, rope.scaled(dict.fromkeys(rope.rotated_layers(lm.model), self.scale))):
            yield lm
