"""The gradient baseline: one scale per layer, trained on the answers of calibration questions (LPES, Appendix
C)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from posbench.errors import UserError
from posbench.search.base import Search
from posbench.search.genetic import GeneticSearch, check_weights


@dataclass(frozen=True, kw_only=True)
class GradientSearch(Search):
    """Adam on the scales alone. The fields are the keys of ``conf/search/gradient.yaml``; the defaults are
    Appendix C's.

    Args:
        start: Scale of every layer at the start; the paper does not say (1: the unmodified model).
        learning_rate: Of Adam, which moves a scale by about this much per step (1e-5: 0.02 over the paper's
            whole training).
        epochs: Passes (30).
        samples: Examples drawn per epoch, with replacement (2000).
        weights: Probability of an example with the answer at the beginning, in the middle and at the end
            (0.2, 0.3, 0.5).
        batch_size: Examples per step (32).
        seed: Seed of the draws.

    Source: LPES, Appendix C. Loss (not given there): cross-entropy of the answer tokens.
    """

    serves: ClassVar[str] = GeneticSearch.serves
    place: ClassVar[str] = "alone"
    finds: ClassVar[Mapping[str, Any]] = GeneticSearch.finds
    stage: ClassVar[str] = "gradient_run"

    start: float = 1.0
    learning_rate: float = 1e-5
    epochs: int = 30
    samples: int = 2000
    weights: tuple[float, float, float] = (0.2, 0.3, 0.5)
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        self._at_least(epochs=1, samples=1, batch_size=1)
        for name in ("start", "learning_rate"):
            if getattr(self, name) <= 0:
                raise UserError(
                    f"search.{name}", getattr(self, name), "a number above 0", f"set search.{name}=1e-5"
                )
        check_weights(self.weights)

    def part_of(self, parts: Mapping[str, type]) -> None:
        """None: a method inside the scales would stand between them and their gradients."""
