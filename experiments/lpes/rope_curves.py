"""Effect of a RoPE scale: slower decay with distance, other waves, more attention to a prompt's middle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from lpes.waves import rope_decay_bound, rope_wave
from posbench.files.atomic import Row
from posbench.late import Figure, pd
from posbench.measure.items import attention_to_thirds
from posbench.methods.position_interpolation import PositionInterpolation
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import InspectionPasses
from posbench.schema import Count, Several
from posbench.stats.bootstrap import difference
from posbench.stats.findings import (
    SMALLEST_SHARE,
    Finding,
    estimate,
    estimate_row,
    join_findings,
)
from posbench.studies.base import Study, Tables
from posbench.tasks import Example
from posbench.tasks.items import spread_examples

SCALES = (1.0, 1.2, 1.5, 2.0)
BASES = (10000.0, 17500.0, 25000.0)
THIRDS = ("first", "middle", "last")


class Panel(NamedTuple):
    """A panel of the theoretical curves.

    Attributes:
        columns: Prefix of the names of its columns.
        title: Its title.
        label: Label of the y axis.
        distance: Largest distance in tokens, on a linear axis; None: all distances, on a logarithmic one.
        legend: Whether there is room for one.
    """

    columns: str
    title: str
    label: str
    distance: int | None
    legend: bool = True


CURVE_PANELS = (
    Panel(
        "cosine_scale", "one frequency, scales as on the right", "cosine", 128, False
    ),
    Panel(
        "decay_scale", "long-term decay: bound of the score", "mean partial sum", None
    ),
    Panel("wave_scale", "waves of scales", "score", 600),
    Panel("wave_base", "waves of bases", "score", 600),
)


@dataclass(frozen=True, kw_only=True)
class RopeCurves(Study):
    """Decay and waves in theory, attention to thirds of a prompt, under RoPE scales (LPES, Figures 3 to 5).

    Attributes:
        prompts: Prompts of the task, spread over its evaluation set.
        distance: Tokens that the curves cover.
        dim: Size of a head in the curves.
    """

    smallest: ClassVar[Mapping[str, int]] = {"prompts": 8}
    prompts: Several = 96
    distance: Count = 4096
    dim: Several = 128

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        PositionInterpolation(scale=SCALES[-1]).check(run.lm)

    def workload(self, run: Run) -> list[InspectionPasses]:
        """See :meth:`Study.workload`."""
        return [InspectionPasses(self._examples(run), len(SCALES))]

    def _examples(self, run: Run) -> list[Example]:
        return spread_examples(run.evaluation, self.prompts)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``curves`` (a column for each line) and ``thirds``: attention by scale, layer and third, and
        its ``change`` from the scale before (0 of the first); intervals over questions."""
        return {"curves": self._curves(), "thirds": self._thirds(run)}

    def _curves(self) -> pd.DataFrame:
        """Cosine of one frequency, bound of the score and wave over the distance, for scales and bases."""
        distance = np.arange(1.0, self.distance + 1)
        frequency = 10000.0 ** (-2 * (self.dim // 8) / self.dim)
        columns = {"distance": distance}
        for scale in SCALES:
            columns[f"cosine_scale_{scale:g}"] = np.cos(distance / scale * frequency)
        for scale in SCALES:
            columns[f"decay_scale_{scale:g}"] = rope_decay_bound(
                distance, self.dim, scale=scale
            )
        for scale in SCALES:
            columns[f"wave_scale_{scale:g}"] = rope_wave(
                distance, self.dim, scale=scale
            )
        for base in BASES:
            columns[f"wave_base_{base:g}"] = rope_wave(distance, self.dim, base)
        return pd.DataFrame(columns)

    def _thirds(self, run: Run) -> pd.DataFrame:
        """Attention to thirds of the prompts by scale, layer and third, and its change from the scale before."""
        examples = self._examples(run)
        prompts = [encoded.ids for encoded in run.prompts.encode(examples).values()]
        clusters = [example.question_id for example in examples]
        batches = run.prompts.batches_by_length(
            range(len(prompts)), lambda i: len(prompts[i])
        )
        rows: list[Row] = []
        previous = None
        with run.progress("scales", len(SCALES)) as advance:
            for scale in SCALES:
                with PositionInterpolation(scale=scale).applied(run.lm) as lm:
                    attention = attention_to_thirds(lm, prompts, batches)
                change = attention - (attention if previous is None else previous)
                for layer, third in np.ndindex(attention.shape[1:]):
                    mean = difference(attention[:, layer, third], clusters)
                    mean_change = difference(change[:, layer, third], clusters)
                    row = {
                        "scale": scale,
                        "layer": layer,
                        "third": THIRDS[third],
                        **estimate_row(mean, "attention"),
                        **estimate_row(mean_change, "change"),
                    }
                    rows.append(row)
                previous = attention
                advance(1)
        return pd.DataFrame(rows).assign(n=len(prompts))

    def figures(self, tables: Tables) -> Drawn:
        """Figures 3 and 4 from theory, Figure 5 from the model."""
        caption = "LPES, Figures 3 and 4: decay and waves under scales and bases."
        figures = {"curves": (curves_figure(tables["curves"]), caption)}
        caption = "LPES, Figure 5: attention of the last prompt token to thirds of the prompt, 95 % intervals."
        figures["thirds"] = (thirds_figure(tables["thirds"]), caption)
        return figures

    def findings(self, tables: Tables) -> list[Finding]:
        """Whether a larger scale moves attention to the middle."""
        table = tables["thirds"][tables["thirds"]["third"] == "middle"]
        middle = table.pivot(index="layer", columns="scale", values="attention")
        is_rising = (middle.diff(axis=1).iloc[:, 1:] > 0).all(axis=1)
        means = ", ".join(
            f"{scale:g}: {value:.4f}" for scale, value in middle.mean().items()
        )
        claim = "LPES, Figure 5: a larger RoPE scale moves attention to the middle of the prompt"
        statistic = "share of layers whose attention to the middle third rises with every step of the scale"
        note = f"mean over layers by scale: {means}; {table['n'].iloc[0]} prompts; judged by each step"
        share_and_count = (is_rising.mean(), len(is_rising))
        summary = Finding.that(True, claim, statistic, share_and_count, note)
        steps = []
        for row in table[table["scale"] > min(SCALES)].to_dict("records"):
            before = row["attention"] - row["change"]
            change = estimate(row, "change")
            bound = SMALLEST_SHARE * before
            steps.append(Finding.above(claim, statistic, change, bound))
        return [join_findings(steps, numbers_of=summary)]


@plot.styled
def curves_figure(curves: pd.DataFrame) -> Figure:
    """LPES, Figures 3 and 4; see :data:`CURVE_PANELS`."""
    figure, grid = plot.new_figure(plot.PAGE, 4.4, 2, 2, n="theory")
    for axes, panel in zip(grid.flat, CURVE_PANELS, strict=True):
        rows = curves[: panel.distance]
        lines = [column for column in curves if column.startswith(panel.columns)]
        # Scales are steps of an ordered scale, bases are not.
        steps = len(SCALES) if "scale" in panel.columns else 0
        for index, column in enumerate(lines):
            _, *label = column.split("_")
            style = plot.line_style(index, steps=steps)
            style |= {"marker": "", "linewidth": 0.8}
            axes.plot(rows["distance"], rows[column], **style, label=" ".join(label))
        axes.set(
            title=panel.title, xlabel="relative distance (tokens)", ylabel=panel.label
        )
        axes.set_xscale("log" if panel.distance is None else "linear")
        if panel.legend:
            axes.legend(loc="upper right")
    return figure


@plot.styled
def thirds_figure(table: pd.DataFrame) -> Figure:
    """LPES, Figure 5: attention to the middle third over the layers, and to all thirds over the scale."""
    figure, (left, right) = plot.new_figure(plot.PAGE, 2.6, 1, 2, n=table["n"])
    middle = table[table["third"] == "middle"]
    for index, (scale, rows) in enumerate(middle.groupby("scale")):
        plot.band(
            left,
            rows,
            plot.line_style(index, steps=len(SCALES)),
            x="layer",
            name="attention",
            scale=1,
            label=f"scale {scale:g}",
        )
    for index, third in enumerate(THIRDS):
        mean = table[table["third"] == third].groupby("scale")["attention"].mean()
        right.plot(mean.index, mean, label=f"{third} third", **plot.line_style(index))
    left.set(
        xlabel="layer",
        ylabel="attention, middle third",
        ylim=(0, None),
    )
    left.locator_params("x", integer=True)
    right.set(
        xlabel="RoPE scale", ylabel="attention (mean over layers)", ylim=(0, None)
    )
    for axes in (left, right):
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    return figure
