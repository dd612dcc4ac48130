"""A method: the attention of some layers counts for less."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

from posbench.methods import Method
from posbench.methods.scale_channel import check_layers
from posbench.model import families
from posbench.model.lm import LM
from posbench.schema import Share


@dataclass(frozen=True, kw_only=True)
class Damp(Method):
    """Multiply the output of the attention modules by 1 - strength.

    Args:
        strength: 0 changes nothing, 1 switches the attention off. It belongs to a checkpoint, so it has no
            default: the model's file gives it, the user types it, or a search finds it.
        layers: First and last layer, 0-based; None: all.
    """

    strength: Share
    layers: tuple[int, int] | None = None

    @classmethod
    def example(cls, lm: LM) -> Self:
        """An instance for the contract tests and the latency study."""
        return cls(strength=0.5)

    def neutral(self) -> Self:
        """Strength 0."""
        return replace(self, strength=0.0)

    def check(self, lm: LM) -> None:
        """Refuse layers that the model does not have; bounds of the fields are checked by their types."""
        super().check(lm)
        check_layers(lm, "method.layers", self.layers)

    @contextmanager
    def changed(self, lm: LM) -> Iterator[None]:
        """Change the model, and restore it, also after an exception."""
        first, last = self.layers or (0, lm.layers - 1)

        def damped(module: Any, args: Any, output: Any) -> Any:
            return (output[0] * (1 - self.strength), *output[1:])

        with ExitStack() as stack:
            for module in families.attention_modules(lm.model)[first : last + 1]:
                stack.callback(module.register_forward_hook(damped).remove)
            yield
