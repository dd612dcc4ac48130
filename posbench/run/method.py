"""The method under test of a run: as the config names it, and with the parameters that a search found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from posbench.methods import Method
from posbench.methods.choice import MethodChoice
from posbench.methods.unmodified import Unmodified
from posbench.stats.frames import SERVED, UNMODIFIED

TYPED = "typed"
"""In ``method.json``: parameters typed by the user that differ from the search's result."""


@dataclass
class MethodUnderTest:
    """The method that a run compares with the unmodified model.

    Attributes:
        choice: The method as the config names it, or a list of methods.
        target: The choice, or its part, whose parameters the search finds; None: there is no search.
        stand_ins: Legal values of the parameters that the search stage will find.
        hint: Hint of the error for a missing parameter.
        blocks: The blocks of the model's file: constants of methods, each with its ``source``, by name.
        served: Whether the model is behind a server, which applies the method itself.
        found_parameters: Result of the search; set by :meth:`use`.
    """

    choice: MethodChoice
    target: MethodChoice | None
    stand_ins: Mapping[str, Any] = field(default_factory=dict)
    hint: str = ""
    blocks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    served: bool = False
    found_parameters: Mapping[str, Any] | None = None

    @property
    def searched(self) -> MethodChoice:
        """The target, in a run with a search stage: there is one."""
        assert self.target is not None, "a search stage serves a method"
        return self.target

    def use(self, parameters: Mapping[str, Any] | None) -> None:
        """Use the parameters that a search found from now on."""
        self.found_parameters = parameters

    def build(self) -> Method:
        """Return the method with the parameters that the search found.

        Raises:
            UserError: A parameter is missing or wrong.
        """
        return self.choice.build(self.found_parameters, self.target, self.hint)

    def trial(self) -> Method:
        """Return the method with stand-ins for parameters that the search has yet to find, to check all else first.

        Raises:
            UserError: A parameter is missing or wrong.
        """
        typed = self.target.values if self.target else {}
        stand_ins = {
            name: value
            for name, value in self.stand_ins.items()
            if typed.get(name) is None
        }
        return self.choice.build(
            stand_ins or self.found_parameters, self.target, self.hint
        )

    def with_target(self, method: Method) -> Method:
        """Return what is applied to try a candidate of the search.

        Args:
            method: The candidate.

        Returns:
            The list of methods with the candidate in place of the searched one; without a list, the candidate itself.
        """
        if not self.choice.parts or self.target is None:
            return method
        composed: Any = self.trial()
        return replace(composed, parts={**composed.parts, self.target.name: method})

    def methods(self) -> dict[str, Method]:
        """Map names in tables to the compared methods, the unmodified model first.

        A served model is one entry, unless a method changes its prompts.
        """
        method = self.build()
        if self.served and not method.rewrites:
            return {SERVED: method}
        methods: dict[str, Method] = {UNMODIFIED: Unmodified()}
        if not isinstance(method, Unmodified):
            methods[self.choice.name] = method
        return methods

    @property
    def overridden(self) -> dict[str, Any]:
        """The parameters that the user typed, and that are applied in place of other values that a search found."""
        found = self.found_parameters or {}
        typed = self.target.pinned if self.target else {}
        return {
            name: typed[name]
            for name in found
            if name in typed and typed[name] != found[name]
        }

    def record(self) -> dict[str, Any]:
        """Return name, parameters and source of the method, for ``method.json``, and which parameters were typed."""
        facts = {"name": self.choice.name, **asdict(self.build()), **self.origin()}
        if self.overridden:
            facts[TYPED] = self.overridden
        return facts

    def origin(self) -> dict[str, str]:
        """Return under ``source`` where the method's constants come from; empty if they are the user's or a search's.

        A source is named only if all constants of the model's block are those applied.
        """
        parts = self.choice.parts or {self.choice.name: self.choice}
        sources = []
        for name, part in parts.items():
            block = self.blocks.get(name, {})
            searched = part is self.target and self.found_parameters
            if searched or "source" not in block:
                continue  # a search records its source itself
            method = part.build(hint=self.hint)
            parameters = json.loads(json.dumps(asdict(method)))
            has_published_constants = all(
                parameters.get(key) == value
                for key, value in block.items()
                if key != "source"
            )
            if has_published_constants and self.choice.parts:
                sources.append(f"{name}: {block['source']}")
            elif has_published_constants:
                sources.append(str(block["source"]))
        return {"source": "; ".join(sources)} if sources else {}


def typed_in_place(record: Mapping[str, Any]) -> str:
    """Describe the typed parameters in a ``method.json`` that replace the search's result; empty if there are none."""
    values = ", ".join(f"{k} {v}" for k, v in record.get(TYPED, {}).items())
    return f"typed in place of what was found: {values}" if values else ""
