"""A search: try a few strengths of the method of damp.py on calibration prompts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
from damp import Damp

from posbench.files.atomic import write_csv
from posbench.plots.section import Section
from posbench.run.base import Run
from posbench.schema import Share
from posbench.search.base import Read, Search


@dataclass(frozen=True, kw_only=True)
class Tries(Search):
    """The strength with the lowest answer loss.

    Attributes:
        strengths: What is tried.
    """

    serves: ClassVar = Damp
    finds: ClassVar = {"strength": 0.5}

    strengths: tuple[Share, ...] = (0.1, 0.25, 0.5)

    def search(self, run: Run) -> None:
        """Write ``search.csv``, a row for each strength, and the best one as ``found.yaml``."""
        examples = self.calibration(run)
        prompts = [e.prompt for e in examples]
        answers = [e.answers[0] for e in examples]
        assert (
            run.method.target is not None
        )  # a search runs only for the method that it serves
        rows = []
        for strength in self.strengths:
            with run.method.with_target(
                run.method.target.build({"strength": strength})
            ).applied(run.lm) as lm:
                rows.append(
                    {
                        "strength": strength,
                        "loss": float(lm.answer_loss(prompts, answers).mean()),
                    }
                )
        write_csv(run.out.path / "search.csv", pd.DataFrame(rows))
        best = min(rows, key=lambda row: row["loss"])
        self.write_found(
            run, best, f"tries of {len(rows)} strengths on {len(examples)} prompts"
        )

    def describe(self, block: Mapping[str, Any]) -> str:
        """What was found, in one line."""
        return f"strength {block['strength']:g} (loss {block['loss']:.3f})"

    def sections(self, read: Read) -> list[Section]:
        """Its part of the report, from the files alone."""
        table = read("search")
        if table is None:
            return []
        rows = [[f"{row.strength:g}", f"{row.loss:.3f}"] for row in table.itertuples()]
        return [
            Section("Search", "Answer loss by strength.", ["strength", "loss"], rows)
        ]
