"""What every study is: a measurement beside the benchmark that ends in tables, figures and verdicts on a
paper's claims."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import pandas as pd
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from posbench.model.lm import LM
    from posbench.pipeline.config import Config
    from posbench.run.base import Run

Verdict = Literal["holds", "does not hold", "not testable here"]
FINDING_COLUMNS = ("model", "claim", "statistic", "value", "low", "high", "n", "verdict", "note")
"""Columns of ``findings.csv``."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A paper's claim held against a number.

    Attributes:
        claim: The claim with its source.
        statistic: What ``value`` is, with its unit.
        value: The number.
        low: Lower end of its 95 % interval; not a number where it has none.
        high: Upper end.
        n: Observations behind it.
        verdict: Whether the interval supports the claim.
        note: What a reader must know to judge it.
    """

    claim: str
    statistic: str
    value: float
    low: float = math.nan
    high: float = math.nan
    n: int
    verdict: Verdict
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Study(ABC):
    """An analysis that is not "score a task". The dataclass fields are the keys of
    ``conf/study/<name>.yaml``.

    Attributes:
        needs_model: Whether it measures on a model; without one ``run.lm`` stays untouched.
        uses_method: Whether it applies the method itself. Otherwise all of it runs inside the method that the
            user typed, and on the unmodified model where none was typed.
        uses_search: Whether the settings of the search move its numbers, so that they belong to the identity
            of its runs.
    """

    needs_model: ClassVar[bool] = True
    uses_method: ClassVar[bool] = False
    uses_search: ClassVar[bool] = False

    def check(self, config: Config, lm: LM | None) -> None:  # noqa: B027
        """Compare the fields with config and model, before anything is written.

        Raises:
            UserError: Something does not fit; the message names it and what is allowed.
        """

    @abstractmethod
    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Measure; each table becomes ``<name>.csv`` in the run folder."""

    @abstractmethod
    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """Figures with their captions, by file name, from the tables as read back: ``posbench report DIR``
        draws them again."""

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """What the tables say about the paper's claims."""
        return ()
