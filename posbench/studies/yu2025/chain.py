"""The chain of Yu et al. 2025 on one page: causal mask, positional channel, attention, accuracy, each link
perturbed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from posbench.model.lm import LM
from posbench.pipeline.config import Config, study_of
from posbench.plots.base import ATTENTION_LABEL, PAGE, from_zero, line_style, new_figure, percent_axes, styled
from posbench.run.base import UNMODIFIED, Run
from posbench.run.folder import RunDir
from posbench.studies import perturbing
from posbench.studies.base import Finding, Study
from posbench.studies.gold_positions import by_length, facts
from posbench.studies.gold_positions import placed as chosen_of
from posbench.studies.perturbing import Prompts

PARTS = ("hidden_perturbation", "crop_mask", "channel_subtraction", "doubling")
"""Studies of the links, in the order of the chain; each is a key of the YAML."""


@dataclass(frozen=True, kw_only=True)
class Chain(Study):
    """Causal mask, positional channel, attention and accuracy, each link perturbed (Yu et al. 2025).

    Every link is a study of its own with the same name and keys; its tables lie in a folder of that name. The
    first panels close the chain: accuracy and attention with and without the method, which changes the
    channel alone.

    Source: Yu et al. 2025: Appendix D.4 (mask to channel), Section 2.2 (mask to attention), Appendix D.5
    (channel to attention), Appendix D.2 (attention to accuracy), Section 3 (the method).

    Attributes:
        hidden_perturbation: Keys of that study: crop mask and shifted position ids on random text.
        crop_mask: Keys of that study: crop mask of the gold item, and moved position ids.
        channel_subtraction: Keys of that study: one channel of one item lowered.
        doubling: Keys of that study: the attention to one item doubled.
        examples: Examples of each gold position, for the first panels.
    """

    uses_method: ClassVar[bool] = True

    hidden_perturbation: dict[str, Any]
    crop_mask: dict[str, Any]
    channel_subtraction: dict[str, Any]
    doubling: dict[str, Any]
    examples: int = 40

    def _parts(self) -> dict[str, Study]:
        return {name: study_of(getattr(self, name))[0] for name in PARTS}

    def check(self, config: Config, lm: LM | None) -> None:
        """Let every link check its own fields."""
        assert lm is not None
        perturbing.check_counts(examples=self.examples)
        for part in self._parts().values():
            part.check(config, lm)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Table ``bias`` (method, gold position, attention and score with intervals), and those of every
        link."""
        prompts = Prompts.of(run, chosen_of(run.config.task, self.examples))
        methods = run.methods()
        frames = []
        for name, method in methods.items():
            rows = prompts.measure(
                name,
                lambda batch, method=method: method.applied(run.lm),  # type: ignore[misc]
                lambda batch, attention: [
                    {"attention": [float(f"{x:.6g}") for x in layers[:, e.gold_position or 0]]}
                    for layers, e in zip(attention, batch, strict=True)
                ],
            )
            by_id = {row["id"]: row for row in rows}
            frame = facts(prompts.examples).assign(method=name)
            frame["score"] = [float(by_id[e.id]["score"]) for e in prompts.examples]
            frames.append((frame, [by_id[e.id]["attention"] for e in prompts.examples]))
        unmodified = pd.DataFrame(frames[0][1]).mean().to_numpy()
        first, last = perturbing.retrieval_layers(None, list(unmodified))
        means = []
        for frame, attention in frames:
            frame["attention"] = pd.DataFrame(attention).iloc[:, first : last + 1].mean(axis=1).to_numpy()
            means.append(by_length(frame).assign(method=frame["method"].iloc[0]))
        tables = {"bias": pd.concat(means, ignore_index=True).assign(layer_first=first, layer_last=last)}
        for name, part in self._parts().items():
            folder = run.out.path / name
            folder.mkdir(exist_ok=True)
            # Rows of the links must not meet: each has a folder of its own, and resumes there.
            link = Run(run.config, RunDir(folder), run.console, run.identity)
            link.lm = run.lm
            tables |= {f"{name}/{table}": frame for table, frame in part.measure(link).items()}
        return tables

    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """The page, then the figures of every link."""
        caption = (
            "(a, b) Score, and attention of the last token to the gold item, unmodified and with the method. (c) Mean of the "
            "positional channel over random text and over the layers behind the first, where a span (grey) cannot see what comes "
            "before it, or has shifted position ids. (d) Attention to a gold item whose mask is cropped, or whose "
            "position ids are moved. (e) Attention to every "
            "item where the channel of one (dotted) is moved towards the beginning. (f) Score with the attention to one item "
            "doubled. Bands: 95 %."
        )
        drawn = {"chain": (chain_figure(tables), caption)}
        for name, part in self._parts().items():
            own = {
                table.partition("/")[2]: frame
                for table, frame in tables.items()
                if table.startswith(f"{name}/")
            }
            drawn |= {
                f"{name}_{figure}" if not figure.startswith(name) else figure: made
                for figure, made in part.figures(own).items()
            }
        return drawn

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """The verdicts of every link, in the order of the chain."""
        found: list[Finding] = []
        for name, part in self._parts().items():
            own = {
                table.partition("/")[2]: frame
                for table, frame in tables.items()
                if table.startswith(f"{name}/")
            }
            found += part.findings(own)
        return found


def _line(
    axes: Axes,
    x: pd.Series,
    rows: pd.DataFrame,
    columns: Sequence[str],
    scale: float,
    style: dict[str, Any],
    label: str,
) -> None:
    """One line with its band; columns are value, low and high."""
    value, low, high = (scale * rows[column] for column in columns)
    axes.plot(x, value, label=label, **style)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


@styled
def chain_figure(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Six panels in the order of the argument; see the caption of :class:`Chain`."""
    figure = new_figure(PAGE, 5.4)
    grid = figure.subplots(2, 3)
    _bias(grid[0][0], grid[0][1], tables["bias"])
    _channel(grid[0][2], tables["hidden_perturbation/curves"])
    _cropped(grid[1][0], tables["crop_mask/crop_mask"])
    _subtracted(grid[1][1], tables["channel_subtraction/items"])
    _doubled(grid[1][2], tables["doubling/doubling"])
    for letter, axes in zip("abcdef", grid.flat, strict=True):
        axes.set_title(f"({letter}) {axes.get_title()}")
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.45, -0.26),
            ncols=2,
            handlelength=1.4,
            columnspacing=1.0,
            fontsize=6.5,
        )
    return figure


def _bias(left: Axes, right: Axes, table: pd.DataFrame) -> None:
    for index, (method, rows) in enumerate(table.groupby("method", sort=False)):
        style = line_style(max(index - 1, 0), method == UNMODIFIED)
        label = "unmodified" if method == UNMODIFIED else f"with {method}"
        for axes, column, scale in ((left, "score", 100.0), (right, "attention", 1.0)):
            _line(
                axes,
                100 * rows["depth"],
                rows,
                (column, f"{column}_low", f"{column}_high"),
                scale,
                style,
                label,
            )
    percent_axes(left)
    left.set_title("position bias")
    where = perturbing.named(int(table["layer_first"].iloc[0]), int(table["layer_last"].iloc[0]))
    right.set(xlabel=left.get_xlabel(), ylabel=ATTENTION_LABEL, title=f"attention, {where}")
    from_zero(right)


def _channel(axes: Axes, curves: pd.DataFrame) -> None:
    """Mean over the layers behind the first one: no token of layer 0 has seen another yet."""
    rows = curves[~curves["control"].astype(bool) & (curves["layer"] > 0)]
    labels = {UNMODIFIED: "unmodified", "crop": "crop mask", "shift": "shifted position ids"}
    axes.axvspan(rows["start"].iloc[0], rows["end"].iloc[0], color="0.9", linewidth=0)
    for index, variant in enumerate(v for v in labels if v in set(rows["variant"])):
        line = rows[rows["variant"] == variant].groupby("position")["value"].mean()
        style = line_style(max(index - 1, 0), variant == UNMODIFIED) | {"marker": ""}
        axes.plot(line.index, line.to_numpy(), label=labels[variant], **style)
    axes.set(
        xlabel="token position", ylabel=f"mean of channel {rows['channel'].iloc[0]}", title="mask to channel"
    )


def _cropped(axes: Axes, table: pd.DataFrame) -> None:
    labels = {
        UNMODIFIED: "unmodified",
        "crop": "crop mask",
        "pe_to_beginning": "PE to beginning",
        "pe_to_end": "PE to end",
    }
    labels["crop_other"] = "crop another"
    rows = table[table["measure"] == "attention"]
    for index, variant in enumerate(v for v in labels if v in set(rows["variant"])):
        line = rows[rows["variant"] == variant].sort_values("depth")
        style = line_style(max(index - 1, 0), variant == UNMODIFIED)
        _line(axes, 100 * line["depth"], line, ("value", "low", "high"), 1.0, style, labels[variant])
    where = perturbing.named(int(rows["retrieval_first"].iloc[0]), int(rows["retrieval_last"].iloc[0]))
    axes.set(
        xlabel="gold position (% of the context)", ylabel=ATTENTION_LABEL, title=f"mask to attention, {where}"
    )
    from_zero(axes)


def _subtracted(axes: Axes, items: pd.DataFrame) -> None:
    rows, first = items[items["measure"] == "attention"], items.iloc[0]
    random = (
        rows[rows["variant"].str.startswith("other_control_")].groupby("item", as_index=False)["value"].mean()
    )
    lines = {UNMODIFIED: "unmodified", "other": "positional channel"}
    for index, (variant, label) in enumerate(lines.items()):
        line = rows[rows["variant"] == variant]
        style = line_style(max(index - 1, 0), variant == UNMODIFIED) | {"markersize": 2}
        _line(axes, line["item"] + 1, line, ("value", "low", "high"), 1.0, style, label)
    axes.plot(
        random["item"] + 1,
        random["value"],
        label="random channels",
        **line_style(1) | {"markersize": 2, "linestyle": "--"},
    )
    axes.axvline(first["other"] + 1, color="0.5", linewidth=0.8, linestyle=":")
    # The gold item has a hundred times the weight of the others, whose levels matter here.
    axes.set_yscale("log")
    axes.set(
        xlabel="item (1 is the first)",
        ylabel="attention\n(mean weight per token)",
        title=f"channel of item {first['other'] + 1} to attention",
    )


def _doubled(axes: Axes, table: pd.DataFrame) -> None:
    labels = {"none": "unmodified", "gold": "gold item doubled", "other": "another doubled"}
    for index, (mode, label) in enumerate(labels.items()):
        line = table[table["mode"] == mode].sort_values("depth")
        style = line_style(max(index - 1, 0), mode == "none")
        _line(axes, 100 * line["depth"], line, ("score", "score_low", "score_high"), 100.0, style, label)
    percent_axes(axes)
    axes.set_title("attention to accuracy")
