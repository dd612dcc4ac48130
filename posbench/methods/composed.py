"""Several methods at once, one inside the other."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Self

from posbench.errors import renamed
from posbench.methods.base import Method
from posbench.model.lm import LM


@dataclass(frozen=True, kw_only=True)
class Composed(Method):
    """Apply methods one inside the other: ``method=[layer_scaling,scale_channel]`` on the command line.

    The first of ``parts`` is the outermost: it is applied first and taken back last, and a later part works
    on the model as the earlier ones left it. So methods of rotary embeddings stand before scale_channel.
    Among these, position scales multiply, and a base set by a later part replaces that of an earlier one.
    """

    parts: dict[str, Method]

    @property
    def needs_prompt(self) -> bool:
        """See :class:`Method`."""
        return any(part.needs_prompt for part in self.parts.values())

    def check(self, lm: LM) -> None:
        """See :meth:`Method.check`."""
        for name, part in self.parts.items():
            with renamed("method.", f"method.parts.{name}."):
                part.check(lm)

    def neutral(self) -> Self:
        """Every part neutral."""
        return replace(self, parts={name: part.neutral() for name, part in self.parts.items()})

    @contextmanager
    def changed(self, lm: LM) -> Iterator[None]:
        """See :meth:`Method.changed`."""
        with ExitStack() as stack:
            for part in self.parts.values():
                # One block of the model, not one for each part.
                part.check(lm)
                stack.enter_context(part.changed(lm))
            yield
