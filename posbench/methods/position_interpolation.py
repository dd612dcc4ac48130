"""One scale for all positions (Chen et al. 2023): the rotary embedding sees position m / s."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from posbench.methods.base import CheckpointChange, Method, Needs
from posbench.model import rope
from posbench.model.lm import LM
from posbench.schema import Scale


@dataclass(frozen=True, kw_only=True)
class PositionInterpolation(Method):
    """Divide every position by ``scale``, in every layer and head; above 1 positions move together.

    Source: Chen et al. 2023 (Position Interpolation); the uniform baseline of Ms-PoE (scale 1.5) and of LPES
    (the mean of its scales).
    """

    needs: ClassVar[Needs] = Needs(rope=True)

    scale: Scale = 1.5

    def neutral(self) -> Self:
        """Scale 1."""
        return replace(self, scale=1.0)

    def folded(self, lm: LM) -> CheckpointChange | None:
        """Rotary embeddings of type linear, if the model's are plain."""
        rope_type = getattr(rope.rotary_module(lm.model), "rope_type", "default")
        rope_types = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
        if set(rope_types) != {"default"}:
            return None
        return CheckpointChange(rope={"rope_type": "linear", "factor": self.scale})

    def prefill(self) -> Self:
        """Itself: the scale is the same for every token."""
        return self

    def changed(self, lm: LM) -> AbstractContextManager[None]:
        """See :meth:`Method.changed`."""
        scales = dict.fromkeys(rope.rotated_layers(lm.model), self.scale)
        return rope.tables(lm.model, rope.divide_positions(scales))
