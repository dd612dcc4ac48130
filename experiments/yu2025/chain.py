"""The chain of Yu et al. 2025 on one page: mask, positional channel, attention, accuracy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from posbench.errors import renamed
from posbench.late import Axes, Figure, pd
from posbench.methods import Method
from posbench.methods.choice import MethodChoice
from posbench.methods.unmodified import Unmodified
from posbench.model.lm import LM
from posbench.plots import base as plot
from posbench.plots.attention import draw_over_positions
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.folder import RunDir
from posbench.schema import Count
from posbench.stats.findings import Finding
from posbench.stats.frames import UNMODIFIED
from posbench.studies import prompts as shared
from posbench.studies.base import Study, Tables
from posbench.tasks import Example
from yu2025 import (
    channel_subtraction,
    common,
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

    Attributes:
        hidden_perturbation: Mask to channel.
        crop_mask: Mask to attention.
        channel_subtraction: Channel to attention.
        doubling: Attention to accuracy.
        examples: Examples of each gold position, for the first panels.
    """

    uses_method: ClassVar[bool] = True

    hidden_perturbation: hidden_perturbation.HiddenPerturbation
    crop_mask: crop_mask.CropMask
    channel_subtraction: channel_subtraction.ChannelSubtraction
    doubling: doubling.Doubling
    examples: Count = 40

    def _links(self) -> dict[str, Study]:
        return {
            name: link for name, link in vars(self).items() if isinstance(link, Study)
        }

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        for name, link in self._links().items():
            with renamed("study.", f"study.{name}."):
                link.check(_without_method(run))

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Table ``bias`` (attention and score by method and gold position), and every link's tables."""
        tables = {"bias": self._bias(run)}
        for name, link in self._links().items():
            # Rows of the links must not meet: each has a folder of its own, and resumes there.
            out = RunDir(run.out.path / name, f"{run.out.id}/{name}")
            out.path.mkdir(exist_ok=True)
            link_run = _without_method(run).in_folder(out)
            for table, frame in link.measure(link_run).items():
                tables[f"{name}/{table}"] = frame
        return tables

    def _bias(self, run: Run) -> pd.DataFrame:
        """Attention and score by method and gold position, and the layers that are averaged."""
        prompts = shared.Prompts.of(run, self.examples)
        measured = {
            name: prompts.under(
                name, partial(_method_block, run.lm, method), common.gold_attention_rows
            )
            for name, method in run.methods().items()
        }
        unmodified = [row["attention"] for row in measured[UNMODIFIED].values()]
        first, last = common.retrieval_layers(None, np.mean(unmodified, axis=0))
        means = []
        for name, rows in measured.items():
            results = prompts.results(rows, (first, last))
            by_position = shared.means_by_position(results, ("attention", "score"))
            means.append(by_position.assign(method=name))
        bias = pd.concat(means, ignore_index=True)
        return bias.assign(layer_first=first, layer_last=last)

    def figures(self, tables: Tables) -> Drawn:
        """The page, then the figures of every link."""
        caption = (
            "(c) Mean of the positional channel over random text and the layers behind the first, where a "
            "span cannot see what comes before it, or has shifted position ids. (d) Gold item with a crop "
            "mask, or moved position ids. (e) Channel of one item (circle) moved towards the beginning. "
            "(f) Attention to one item doubled. Bands: 95 %."
        )
        figures = {"chain": (chain_figure(tables), caption)}
        for name, link in self._links().items():
            link_figures = link.figures(_tables_of(name, tables))
            for key, figure_and_caption in link_figures.items():
                if not key.startswith(name):
                    key = f"{name}_{key}"
                figures[key] = figure_and_caption
        return figures

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """The verdicts of every link, in the order of the chain."""
        return [
            finding
            for name, link in self._links().items()
            for finding in link.findings(_tables_of(name, tables))
        ]


def _method_block(
    lm: LM, method: Method, batch: Sequence[Example]
) -> AbstractContextManager[object]:
    """Apply a method, to whatever batch."""
    return method.applied(lm)


def _without_method(run: Run) -> Run:
    """A copy of the run that measures the unmodified model."""
    choice = MethodChoice(name=UNMODIFIED, cls=Unmodified, values={})
    unmodified = copy.copy(run)
    unmodified.method = replace(run.method, choice=choice, target=None)
    return unmodified


def _tables_of(link: str, tables: Tables) -> Tables:
    """The tables of one link, by the names that it gave them."""
    prefix = f"{link}/"
    return {
        name.removeprefix(prefix): table
        for name, table in tables.items()
        if name.startswith(prefix)
    }


@plot.styled
def chain_figure(tables: Tables) -> Figure:
    """Six panels in the order of the argument; see the caption of :class:`Chain`."""
    bias = tables["bias"]
    items = tables["channel_subtraction/items"]
    counts = [n for table in tables.values() if "n" in table for n in table["n"]]
    figure, grid = plot.new_figure(plot.PAGE, 5.8, 2, 3, n=counts)
    (by_score, by_attention, channel), (cropped, subtracted, doubled) = grid

    labels = {method: f"with {method}" for method in bias["method"].unique()}
    labels[UNMODIFIED] = "unmodified"
    draw_over_positions(by_attention, by_score, bias, "method", labels)
    by_score.set_title("position bias")
    layers = common.layers_label(*bias[["layer_first", "layer_last"]].iloc[0])
    by_attention.set_title(f"attention, {layers}")

    _channel_panel(channel, tables["hidden_perturbation/curves"])

    crop_mask.attention_panel(cropped, tables["crop_mask/crop_mask"])
    cropped.set_title(f"mask to attention, {cropped.get_title()}")

    channel_subtraction.panel(subtracted, items, "other", "attention")
    subtracted.set_title("channel to attention")

    labels = {
        UNMODIFIED: "unmodified",
        "gold": "gold item doubled",
        "other": "another doubled (control)",
    }
    plot.bands(doubled, tables["doubling/doubling"], "mode", labels, name="score")
    plot.percent_axes(doubled)
    doubled.set_title("attention to accuracy")

    for letter, axes in zip("abcdef", grid.flat, strict=True):
        axes.set_title(f"({letter}) {axes.get_title()}")
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.45, -0.26),
            ncols=2 if letter in "abc" else 1,
            fontsize=6.5,
            handlelength=1.4,
            columnspacing=1.0,
        )
    return figure


def _channel_panel(axes: Axes, curves: pd.DataFrame) -> None:
    """Mean over the layers behind the first one: no token of layer 0 has seen another yet."""
    rows = curves[~curves["control"] & (curves["layer"] > 0)]
    first = rows.iloc[0]
    axes.axvspan(
        first["start"], first["end"], color=plot.SHADE, linewidth=0, label="span"
    )
    for index, (variant, label) in enumerate(
        hidden_perturbation.VARIANT_LABELS.items()
    ):
        line = rows[rows["variant"] == variant].groupby("token")["value"].mean()
        if line.empty:
            continue
        style = plot.line_style(max(index - 1, 0), variant == UNMODIFIED)
        style["marker"] = ""
        axes.plot(line, label=label, **style)
    axes.set(
        xlabel=plot.TOKEN_LABEL.replace("\n", " "),
        ylabel=f"mean of channel {first['channel']}",
        title="mask to channel",
    )
