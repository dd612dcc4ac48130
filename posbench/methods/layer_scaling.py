"""One RoPE scale per layer (LPES): in layer h the rotary embedding sees position m / s_h."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from posbench.errors import UserError
from posbench.methods.base import Method, Needs
from posbench.methods.curves import check_points, layer_scales
from posbench.model import rope
from posbench.model.lm import LM
from posbench.schema import Scale


@dataclass(frozen=True, kw_only=True)
class LayerScaling(Method):
    """Divide positions by a scale per layer, read off a curve or given one by one.

    Queries and keys are rotated with the same scale, in the prompt and in every later step; the cache holds
    rotated keys, and nothing is computed twice. Scales of layers without RoPE have no effect.

    Args:
        points: Control points (x, y) of the curve, x in layers and strictly rising, y a scale.
        curve: ``bezier``, ``linear`` or ``step``.
        x: ``stretched`` (Eq. 6: layers are spread over the curve) or ``absolute`` (layer h is at x = h).
        scales: One scale for each layer instead of a curve.

    Source: LPES, Section 3.2, Eq. 4-8.
    """

    needs: ClassVar[Needs] = Needs(rope=True)

    points: tuple[tuple[float, float], ...] | None = None
    curve: Literal["bezier", "linear", "step"] = "bezier"
    x: Literal["stretched", "absolute"] = "stretched"
    scales: tuple[Scale, ...] | None = None

    def __post_init__(self) -> None:
        if (self.points is None) == (self.scales is None):
            allowed = "either control points or method.scales, with one scale per layer"
            hint = "find points: posbench stages=[search] search=genetic method=layer_scaling"
            raise UserError("method.points", self.points, allowed, hint)

    @classmethod
    def example(cls, lm: LM) -> Self:
        """A curve of four points over the layers."""
        last = lm.layers - 1
        end = (float(last), 1.6)
        return cls(points=((0.0, 1.2), (last / 3, 1.8), (last / 1.5, 1.4), end))

    def layer_scales(self, layers: int) -> list[float]:
        """The scale of each of the model's layers."""
        if self.scales is not None:
            return list(self.scales)
        return layer_scales(self.curve, self.points or (), layers, self.x)

    def check(self, lm: LM) -> None:
        """Refuse a model without RoPE, and scales or points that do not fit its layers.

        Raises:
            UserError: States which.
        """
        super().check(lm)
        if self.points is not None:
            check_points(self.points, lm.layers)
            return
        scales = self.scales or ()
        if len(scales) != lm.layers:
            allowed = f"{lm.layers} numbers, one for each layer of {lm.name}"
            hint = "set method.scales=null and give method.points"
            raise UserError("method.scales", list(scales), allowed, hint)

    def neutral(self) -> Self:
        """Scale 1 in every layer."""
        if self.scales is not None:
            return replace(self, scales=(1.0,) * len(self.scales))
        return replace(self, points=tuple((x, 1.0) for x, _ in self.points or ()))

    def prefill(self) -> Self:
        """Itself: a scale is the same for every token."""
        return self

    def changed(self, lm: LM) -> AbstractContextManager[None]:
        """See :meth:`Method.changed`."""
        scales = self.layer_scales(lm.layers)
        layers = rope.rotated_layers(lm.model)
        changes = rope.divide_positions({layer: scales[layer] for layer in layers})
        return rope.tables(lm.model, changes)
