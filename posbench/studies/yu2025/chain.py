"""The chain of Yu et al. 2025 on one page: mask, positional channel, attention, accuracy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from posbench.errors import renamed
from posbench.late import Axes, Figure, pd
from posbench.methods.choice import MethodChoice
from posbench.methods.unmodified import Unmodified
from posbench.plots import base as plot
from posbench.plots.attention import over_positions
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.folder import RunDir
from posbench.schema import Count
from posbench.stats.findings import Finding
from posbench.stats.frames import UNMODIFIED
from posbench.studies import prompts as shared
from posbench.studies.base import Study, Tables
from posbench.studies.yu2025 import (
    channel_subtraction,
    crop_mask,
    doubling,
    hidden_perturbation,
)


@dataclass(frozen=True, kw_only=True)
class Chain(Study):
    """Causal mask, positional channel, attention and accuracy, each link perturbed.

    Every link is a study of its own, on the unmodified model; its tables lie in a folder of its name. The
    first panels close the chain: with and without the method, which changes the channel alone.

    Source: Yu et al. 2025: Appendix D.4 (mask to channel), Section 2.2 (mask to attention), Appendix D.5
    (channel to attention), Appendix D.2 (attention to accuracy), Section 3 (the method).
    """

    uses_method: ClassVar[bool] = True

    hidden_perturbation: hidden_perturbation.HiddenPerturbation
    crop_mask: crop_mask.CropMask
    channel_subtraction: channel_subtraction.ChannelSubtraction
    doubling: doubling.Doubling
    examples: Count = 40  # of each gold position, for the first panels

    def _links(self) -> dict[str, Study]:
        return {
            name: link for name, link in vars(self).items() if isinstance(link, Study)
        }

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        for name, link in self._links().items():
            with renamed("study.", f"study.{name}."):
                link.check(_alone(run))

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Table ``bias`` (attention and score by method and gold position), and those of every link."""
        prompts = shared.Prompts.of(run, self.examples)
        measured = {}
        means = []
        for name, method in run.methods().items():
            block = lambda batch, method=method: method.applied(run.lm)  # type: ignore[misc]  # noqa: E731
            measured[name] = prompts.under(name, block, shared.gold_attention)
        unmodified = pd.DataFrame(
            [row["attention"] for row in measured[UNMODIFIED].values()]
        ).mean()
        layers = shared.retrieval_layers(None, unmodified.to_numpy())
        for name, rows in measured.items():
            frame = shared.means_by_position(
                prompts.results(rows, layers), ("attention", "score")
            )
            means.append(frame.assign(method=name))
        bias = pd.concat(means, ignore_index=True)
        tables = {"bias": bias.assign(layer_first=layers[0], layer_last=layers[1])}
        for name, link in self._links().items():
            own = _alone(run)
            # Rows of the links must not meet: each has a folder of its own, and resumes there.
            own.out = RunDir(run.out.path / name, f"{run.out.id}/{name}")
            own.out.path.mkdir(exist_ok=True)
            tables |= {
                f"{name}/{table}": frame for table, frame in link.measure(own).items()
            }
        return tables

    def figures(self, tables: Tables) -> Drawn:
        """The page, then the figures of every link."""
        caption = (
            "(c) Mean of the positional channel over random text and the layers behind the first, where a "
            "span cannot see what comes before it, or has shifted position ids. (d) Gold item with a crop "
            "mask, or moved position ids. (e) Channel of one item moved towards the beginning. (f) Attention "
            "to one item doubled. Bands: 95 %."
        )
        drawn = {"chain": (chain_figure(tables), caption)}
        for name, link in self._links().items():
            for figure, made in link.figures(_of(name, tables)).items():
                drawn[figure if figure.startswith(name) else f"{name}_{figure}"] = made
        return drawn

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """The verdicts of every link, in the order of the chain."""
        return [
            found
            for name, link in self._links().items()
            for found in link.findings(_of(name, tables))
        ]


def _alone(run: Run) -> Run:
    """The run without its method."""
    own = copy.copy(run)
    unmodified = MethodChoice(name=UNMODIFIED, cls=Unmodified, values={})
    own.method = replace(run.method, choice=unmodified, target=None)
    return own


def _of(link: str, tables: Tables) -> Tables:
    """The tables of one link."""
    own = [name for name in tables if name.startswith(f"{link}/")]
    return {name.removeprefix(f"{link}/"): tables[name] for name in own}


@plot.styled
def chain_figure(tables: Tables) -> Figure:
    """Six panels in the order of the argument; see the caption of :class:`Chain`."""
    bias = tables["bias"]
    counts = [n for table in tables.values() if "n" in table for n in table["n"]]
    figure, grid = plot.new_figure(plot.PAGE, 5.8, 2, 3, n=counts)
    labels = {method: f"with {method}" for method in bias["method"].unique()} | {
        UNMODIFIED: "unmodified"
    }
    over_positions(grid[0][1], grid[0][0], bias, "method", labels)
    grid[0][0].set_title("position bias")
    grid[0][1].set_title(
        f"attention, {shared.named(*bias[['layer_first', 'layer_last']].iloc[0])}"
    )
    _channel(grid[0][2], tables["hidden_perturbation/curves"])
    crop_mask.attention_panel(grid[1][0], tables["crop_mask/crop_mask"])
    grid[1][0].set_title(f"mask to attention, {grid[1][0].get_title()}")
    items = tables["channel_subtraction/items"]
    doubled = tables["doubling/doubling"]
    channel_subtraction.panel(grid[1][1], items, "other", "attention")
    grid[1][1].set_title(f"channel of item {items['other'].iloc[0]} to attention")
    labels = {
        UNMODIFIED: "unmodified",
        "gold": "gold item doubled",
        "other": "another doubled (control)",
    }
    plot.bands(grid[1][2], doubled, "mode", labels, name="score")
    plot.percent_axes(grid[1][2], "score (%)")
    grid[1][2].set_title("attention to accuracy")
    narrow = {"fontsize": 6.5, "handlelength": 1.4, "columnspacing": 1.0}
    for letter, axes in zip("abcdef", grid.flat, strict=True):
        axes.set_title(f"({letter}) {axes.get_title()}")
        columns = 2 if letter in "abc" else 1
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.45, -0.26), ncols=columns, **narrow
        )
    return figure


def _channel(axes: Axes, curves: pd.DataFrame) -> None:
    """Mean over the layers behind the first one: no token of layer 0 has seen another yet."""
    rows = curves[~curves["control"] & (curves["layer"] > 0)]
    axes.axvspan(
        rows["start"].iloc[0],
        rows["end"].iloc[0],
        color=plot.SHADE,
        linewidth=0,
        label="span",
    )
    for index, (variant, label) in enumerate(hidden_perturbation.LABELS.items()):
        line = rows[rows["variant"] == variant].groupby("token")["value"].mean()
        style = plot.line_style(max(index - 1, 0), variant == UNMODIFIED) | {
            "marker": ""
        }
        if len(line):
            axes.plot(line, label=label, **style)
    ylabel = f"mean of channel {rows['channel'].iloc[0]}"
    axes.set(
        xlabel=plot.TOKEN.replace("\n", " "), ylabel=ylabel, title="mask to channel"
    )
