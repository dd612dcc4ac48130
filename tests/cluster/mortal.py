"""A study for tests of launchers, which needs no model: its process dies where a file is there."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pandas as pd

from posbench.run.base import Run
from posbench.schema import Count
from posbench.stats.findings import Finding
from posbench.studies.base import Study, Tables


@dataclass(frozen=True, kw_only=True)
class Mortal(Study):
    """The square of a number.

    Attributes:
        number: The number.
        deadly: A folder; a file in it named as the number kills the process.
    """

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False
    number: Count = 1
    deadly: str = ""

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Table ``squares``."""
        if (Path(self.deadly) / str(self.number)).is_file():
            os.kill(os.getpid(), signal.SIGKILL)
        return {
            "squares": pd.DataFrame([{"number": self.number, "square": self.number**2}])
        }

    def findings(self, tables: Tables) -> list[Finding]:
        """Is the square large?"""
        square = int(tables["squares"]["square"][0])
        return [Finding.that(square > 4, "the square is large", "square", (square, 1))]
