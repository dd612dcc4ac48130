"""Several methods at once, one inside the other."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Self

from posbench.errors import renamed
from posbench.methods.base import CheckpointChange, Method
from posbench.methods.unmodified import Unmodified
from posbench.model.encode import Encoder
from posbench.model.items import ItemPrompt
from posbench.model.lm import LM


@dataclass(frozen=True, kw_only=True)
class Composed(Method):
    """Apply methods one inside the other: ``method=[layer_scaling,scale_channel]`` on the command line.

    The first of ``parts`` is the outermost: it is applied first and taken back last, and a later part works on the
    model as the earlier ones left it. So methods of rotary embeddings come before scale_channel. Among these, position
    scales multiply, and a base set by a later part replaces that of an earlier one.
    """

    parts: dict[str, Method]

    @property
    def needs_prompt(self) -> bool:
        """See :class:`Method`."""
        return any(part.needs_prompt for part in self.parts.values())

    @property
    def rewrites(self) -> bool:
        """See :class:`Method`."""
        return any(part.rewrites for part in self.parts.values())

    @property
    def rewrites_by_text(self) -> bool:
        """See :class:`Method`."""
        return all(part.rewrites_by_text for part in self.parts.values())

    def rewrite(self, lm: Encoder, prompt: ItemPrompt) -> ItemPrompt:
        """Rewrite the prompt part by part, the first one first."""
        for part in self.parts.values():
            prompt = part.rewrite(lm, prompt)
        return prompt

    @property
    def extra_reply_tokens(self) -> int:
        """The sum of those of all parts."""
        return sum(part.extra_reply_tokens for part in self.parts.values())

    @property
    def answer_cue(self) -> str:
        """That of the last part that has one: its instruction is the last in the prompt."""
        return next(
            filter(None, (p.answer_cue for p in reversed(self.parts.values()))), ""
        )

    def check(self, lm: LM) -> None:
        """See :meth:`Method.check`."""
        for name, part in self.parts.items():
            with renamed("method.", f"method.parts.{name}."):
                part.check(lm)

    def unchanged_length(self, lm: LM) -> int:
        """That of the part that changes the shortest texts."""
        return min(part.unchanged_length(lm) for part in self.parts.values())

    def caution(self, lm: LM, tokens: int) -> str:
        """Those of all parts."""
        cautions = (part.caution(lm, tokens) for part in self.parts.values())
        return "; ".join(filter(None, cautions))

    def neutral(self) -> Self:
        """Every part neutral."""
        parts = {name: part.neutral() for name, part in self.parts.items()}
        return replace(self, parts=parts)

    def prefill(self) -> Method | None:
        """Return the method under which shared prompts can be read before: the parts' own ones, one inside the other.

        None where a part has none.
        """
        parts: dict[str, Method] = {}
        for name, part in self.parts.items():
            method = part.prefill()
            if method is None:
                return None
            if not isinstance(method, Unmodified):
                parts[name] = method
        return Composed(parts=parts) if parts else Unmodified()

    def records(self) -> tuple[Collection[int], Collection[int]]:
        """Return the channels, and the layers, whose attention inputs any of its parts needs from a prefill."""
        channels: set[int] = set()
        layers: set[int] = set()
        for part in self.parts.values():
            part_channels, part_layers = part.records()
            channels.update(part_channels)
            layers.update(part_layers)
        return sorted(channels), sorted(layers)

    def twin(self) -> Self:
        """Every part's twin."""
        parts = {name: part.twin() for name, part in self.parts.items()}
        return replace(self, parts=parts)

    def folded(self, lm: LM) -> CheckpointChange | None:
        """Return the changes of weights that equal all parts together.

        None where a part has none, or two change the rotary embeddings.
        """
        columns: dict[int, dict[int, float]] = {}
        rope: dict[str, object] = {}
        for part in self.parts.values():
            change = part.folded(lm)
            if change is None or (rope and change.rope):
                return None
            rope |= change.rope
            for layer, factors in change.columns.items():
                product = columns.setdefault(layer, {})
                for channel, factor in factors.items():
                    product[channel] = factor * product.get(channel, 1.0)
        return CheckpointChange(columns, rope)

    @contextmanager
    def changed(self, lm: LM) -> Iterator[None]:
        """Apply the parts, one inside the other, in a block."""
        with ExitStack() as stack:
            for part in self.parts.values():
                # Not ``applied``: the parts share the one block of the model that this method has.
                part.check(lm)
                stack.enter_context(part.changed(lm))
            yield
