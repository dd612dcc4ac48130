"""What every search is: plain data that says which method it serves and what it finds."""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from posbench.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Search(ABC):
    """A search for parameters of a method. The dataclass fields are the keys of ``conf/search/<name>.yaml``.

    ``serves`` is the class of the method whose parameters it finds; ``place`` says in words where that may
    stand among others; ``finds`` names them, each with a value that stands for it until it is found;
    ``stage`` is the module of :mod:`posbench.stages` that runs it.
    """

    serves: ClassVar[str]
    place: ClassVar[str] = "alone or in a list of methods"
    finds: ClassVar[Mapping[str, Any]]
    stage: ClassVar[str]

    def part_of(self, parts: Mapping[str, type]) -> str | None:
        """The part of a list of methods whose parameters it finds, with the others applied; None if it can
        find none.

        Args:
            parts: Name and class of each, the outermost first.
        """
        return next((name for name, cls in parts.items() if cls.__name__ == self.serves), None)

    def _at_least(self, **lowest: float) -> None:
        """Raise UserError where a field that is set lies below its lowest value."""
        for name, low in lowest.items():
            value = getattr(self, name)
            if value is not None and value < low:
                kind = "a whole number" if isinstance(low, int) else "a number"
                raise UserError(f"search.{name}", value, f"{kind} from {low} up", f"set search.{name}={low}")
