"""A study: how much of the attention to all items goes to the first one, wherever the gold item stands."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from posbench.files.atomic import Row
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.schema import Count
from posbench.stats import bootstrap
from posbench.stats.findings import Finding, estimate
from posbench.studies.base import Study, Tables
from posbench.studies.prompts import Prompts, means_by_position
from posbench.tasks import Example


@dataclass(frozen=True, kw_only=True)
class FirstItem(Study):
    """Share of the first item in the last token's attention to all items, mean over layers.

    Attributes:
        examples: Prompts of each gold position at most.
    """

    examples: Count = 20

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``first_item`` (by gold position) and ``first_item_total``."""
        prompts = Prompts.of(run, self.examples)

        def compute(batch: Sequence[Example]) -> list[Row]:
            weights = prompts.attention(batch).mean(1)  # [B, N]: mean over layers
            return [{"share": float(row[0] / row.sum())} for row in weights]

        rows = prompts.complete(
            "rows.jsonl", "attention", {}, compute
        )  # a killed run goes on here
        frame = prompts.frame()
        frame["share"] = [rows[name]["share"] for name in frame["id"]]
        total = bootstrap.mean(frame["share"], list(frame["cluster"]))
        even = 1 / len(prompts.examples[0].items)
        overall = {**total._asdict(), "even": even}
        return {
            "first_item": means_by_position(frame, ["share"]),
            "first_item_total": pd.DataFrame([overall]),
        }

    def figures(self, tables: Tables) -> Drawn:
        """Drawn from the tables as read back, so that ``posbench report DIR`` draws it again."""
        return {
            "first_item": (
                figure(tables["first_item"]),
                "Share of the first item, with 95 % intervals.",
            )
        }

    def findings(self, tables: Tables) -> list[Finding]:
        """Is the share above an even one?"""
        row = tables["first_item_total"].iloc[0]
        claim = "the first item gets more than its share of attention"
        found = Finding.above(
            claim, "share of the attention to all items", estimate(row), row["even"]
        )
        return [found.control()]  # no paper claims it


@plot.styled
def figure(table: pd.DataFrame) -> Figure:
    """The share over the gold position."""
    drawn, axes = plot.new_figure(plot.COLUMN, 2.4, n=table["n"])
    plot.band(axes, table, plot.line_style(0), name="share")
    plot.percent_axes(axes, "attention to the first item (%)")
    return drawn
