"""Find parameters of the method on calibration data."""

from __future__ import annotations

from posbench.pipeline.config import Config
from posbench.run.base import Run


def run(config: Config, run: Run) -> None:
    """Run the search of a config."""
    config.search.run(run)
