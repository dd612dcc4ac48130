"""Several methods at once, one inside the other."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Self

from posbench.errors import renamed
from posbench.methods.base import Folded, Method
from posbench.methods.unmodified import Unmodified
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
        return replace(
            self, parts={name: part.neutral() for name, part in self.parts.items()}
        )

    def prefill(self) -> Method | None:
        """What its parts are prefilled under, one inside the other."""
        found = {name: part.prefill() for name, part in self.parts.items()}
        if None in found.values():
            return None
        kept = {
            name: part
            for name, part in found.items()
            if part and not isinstance(part, Unmodified)
        }
        return Composed(parts=kept) if kept else Unmodified()

    def records(self) -> tuple[Collection[int], Collection[int]]:
        """What all its parts need."""
        told = [part.records() for part in self.parts.values()]
        channels, layers = (
            {each for one in side for each in one} for side in zip(*told, strict=True)
        )
        return sorted(channels), sorted(layers)

    def twin(self) -> Self:
        """Every part's."""
        return replace(
            self, parts={name: part.twin() for name, part in self.parts.items()}
        )

    def folded(self, lm: LM) -> Folded | None:
        """What the parts change together; None where two of them change the rotary embeddings."""
        columns = dict[int, dict[int, float]]()
        rope = dict[str, object]()
        for each in [part.folded(lm) for part in self.parts.values()]:
            if each is None or (rope and each.rope):
                return None
            rope |= each.rope
            for layer, factors in each.columns.items():
                known = columns.setdefault(layer, {})
                known |= {
                    channel: factor * known.get(channel, 1.0)
                    for channel, factor in factors.items()
                }
        return Folded(columns, rope)

    @contextmanager
    def changed(self, lm: LM) -> Iterator[None]:
        """See :meth:`Method.changed`."""
        with ExitStack() as stack:
            for part in self.parts.values():
                # One block of the model, not one for each part.
                part.check(lm)
                stack.enter_context(part.changed(lm))
            yield
