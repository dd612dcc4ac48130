"""What a RoPE scale does: slower decay with distance, other waves, more attention to a prompt's middle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
from posbench.stats.findings import Finding, ends, estimate, joint
from posbench.studies.base import Study, Tables
from posbench.tasks import Example
from posbench.theory.waves import decay, wave

SCALES = (1.0, 1.2, 1.5, 2.0)
THIN = {"marker": "", "linewidth": 0.8}
THIRDS = ("first", "middle", "last")
PANELS = {  # title, label and largest distance of a panel, by the name of its columns
    "cosine scale": ("one frequency, scales as on the right", "cosine", 128),
    "decay scale": ("long-term decay: bound of the score", "mean partial sum", None),
    "wave scale": ("waves of scales", "score", 600),
    "wave base": ("waves of bases", "score", 600),
}


@dataclass(frozen=True, kw_only=True)
class RopeCurves(Study):
    """Decay and waves in theory, attention to thirds of a prompt, under RoPE scales (LPES, Figures 3 to 5).

    Attributes:
        prompts: Prompts of the task, spread over its evaluation set.
        distance: Tokens that the curves cover.
        dim: Size of a head in the curves.
    """

    prompts: Several = 96
    distance: Count = 4096
    dim: Several = 128

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        PositionInterpolation(scale=SCALES[-1]).check(run.lm)

    def reads(self, run: Run) -> list[InspectionPasses]:
        """See :meth:`Study.reads`."""
        return [InspectionPasses(self._chosen(run), len(SCALES))]

    def _chosen(self, run: Run) -> list[Example]:
        return run.evaluation[:: max(len(run.evaluation) // self.prompts, 1)][
            : self.prompts
        ]

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``curves`` (a column for each line) and ``thirds``: attention by scale, layer and third, and
        its ``change`` from the scale before (0 of the first); intervals over questions."""
        distance = np.arange(1.0, self.distance + 1)
        angle = 10000.0 ** (-2 * (self.dim // 8) / self.dim)
        lines = {"distance": distance} | {
            f"cosine_scale_{s:g}": np.cos(distance / s * angle) for s in SCALES
        }
        lines |= {
            f"decay_scale_{s:g}": decay(distance, self.dim, scale=s) for s in SCALES
        }
        lines |= {
            f"wave_scale_{s:g}": wave(distance, self.dim, scale=s) for s in SCALES
        }
        lines |= {
            f"wave_base_{b:g}": wave(distance, self.dim, b)
            for b in (10000.0, 17500.0, 25000.0)
        }
        chosen = self._chosen(run)
        prompts = [code.ids for code in run.prompts.encode(chosen).values()]
        rows = list[Row]()
        asked = [e.cluster or e.id for e in chosen]
        before = None
        plan = run.prompts.batches_by_length(
            range(len(prompts)), lambda i: len(prompts[i])
        )
        with run.progress("scales", len(SCALES)) as advance:
            for scale in SCALES:
                with PositionInterpolation(scale=scale).applied(run.lm) as lm:
                    found = attention_to_thirds(lm, prompts, plan)
                before = found if before is None else before
                for layer, third in np.ndindex(found.shape[1:]):
                    at = ends(difference(found[:, layer, third], asked), "attention")
                    at |= ends(
                        difference((found - before)[:, layer, third], asked), "change"
                    )
                    rows.append(
                        {"scale": scale, "layer": layer, "third": THIRDS[third], **at}
                    )
                before = found
                advance(1)
        return {
            "curves": pd.DataFrame(lines),
            "thirds": pd.DataFrame(rows).assign(n=len(prompts)),
        }

    def figures(self, tables: Tables) -> Drawn:
        """Figures 3 and 4 from theory, Figure 5 from the model."""
        curves = "LPES, Figures 3 and 4: decay and waves under scales and bases."
        thirds = "LPES, Figure 5: attention of the last prompt token to thirds of the prompt, 95 % intervals."
        drawn = {"curves": (curves_figure(tables["curves"]), curves)}
        return drawn | {"thirds": (thirds_figure(tables["thirds"]), thirds)}

    def findings(self, tables: Tables) -> list[Finding]:
        """Whether a larger scale moves attention to the middle."""
        table = tables["thirds"][tables["thirds"]["third"] == "middle"]
        middle = table.pivot(index="layer", columns="scale", values="attention")
        rising = (middle.diff(axis=1).iloc[:, 1:] > 0).all(axis=1)
        told = ", ".join(
            f"{scale:g}: {value:.4f}" for scale, value in middle.mean().items()
        )
        claim = "LPES, Figure 5: a larger RoPE scale moves attention to the middle of the prompt"
        size = "share of layers whose attention to the middle third rises with every step of the scale"
        note = f"mean over layers by scale: {told}; {table['n'].iloc[0]} prompts; judged by each step"
        steps = table[table["scale"] > min(SCALES)].to_dict("records")
        shown = Finding.that(True, claim, size, (rising.mean(), len(rising)), note)
        return [
            joint(
                [Finding.above(claim, size, estimate(row, "change")) for row in steps],
                shown=shown,
            )
        ]


@plot.styled
def curves_figure(curves: pd.DataFrame) -> Figure:
    """LPES, Figures 3 and 4; see :data:`PANELS`."""
    figure, grid = plot.new_figure(plot.PAGE, 4.4, 2, 2, n="theory")
    for axes, (name, (title, label, last)) in zip(
        grid.flat, PANELS.items(), strict=True
    ):
        rows = curves[:last]
        lines = [c for c in curves if c.startswith(name.replace(" ", "_"))]
        for index, column in enumerate(lines):
            style = (
                plot.line_style(index, of=len(SCALES) if "scale" in name else 0) | THIN
            )
            axes.plot(
                rows["distance"],
                rows[column],
                **style,
                label=" ".join(column.split("_")[1:]),
            )
        axes.set(title=title, xlabel="relative distance (tokens)", ylabel=label)
        axes.set_xscale("linear" if last else "log")
        if last != 128:  # no room
            axes.legend(loc="upper right")
    return figure


@plot.styled
def thirds_figure(table: pd.DataFrame) -> Figure:
    """LPES, Figure 5: attention to the middle third over the layers, and to all thirds over the scale."""
    figure, (left, right) = plot.new_figure(plot.PAGE, 2.6, 1, 2, n=table["n"])
    for index, (scale, rows) in enumerate(
        table[table["third"] == "middle"].groupby("scale")
    ):
        style = plot.line_style(index, of=len(SCALES))
        plot.band(
            left,
            rows,
            style,
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
        xticks=table["layer"].unique(),
        ylim=(0, None),
    )
    right.set(
        xlabel="RoPE scale", ylabel="attention (mean over layers)", ylim=(0, None)
    )
    for axes in (left, right):
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    return figure
