"""Common parts of studies of cost: times of several ways side by side, methods that apply, random models."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal

import yaml

from posbench import versions
from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.files.hardware import describe_hardware
from posbench.late import Figure, PreTrainedConfig, pd, torch, transformers
from posbench.methods import Method, Unmodified
from posbench.methods.choice import MethodChoice
from posbench.model.lm import LM
from posbench.model.load import load, usable_kernel
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.schema import Count
from posbench.stats.frames import UNMODIFIED
from posbench.studies.base import Study, Tables

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
Shape = Literal[
    "small",
    "wide",
    "smollm2",
    "llama2_7b",
    "mistral7b",
    "gemma_7b",
    "qwen2_5_7b",
    "mpt_7b",
]


@dataclass(frozen=True, kw_only=True)
class TimingStudy(Study):
    """A study that compares times.

    Attributes:
        caption: Of its figures.
        repeats: Measured rounds.
        clock: ``processor`` counts the process's own time, for a CPU that is shared with other work.
    """

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False
    caption: ClassVar[str]

    repeats: Count = 3
    clock: Literal["wall", "processor"] = "wall"

    def compared(
        self,
        work: str,
        ways: Mapping[str, Callable[[], Any]],
        device: torch.device,
        *,
        faster: bool = True,
        same: bool = True,
        advance: Callable[[int], None] = lambda n: None,
    ) -> list[Row]:
        """Time several ways of doing a work in turn, A B C A B C ..., so that drift affects all ways.

        A first round warms up.

        Args:
            work: Name of the work.
            ways: Functions that do it, by name; the first one is the base.
            device: Where they run.
            faster: Report the speed-up over the base instead of the ratio of times.
            same: All ways must return the same. Otherwise each returns a list of one length.
            advance: Called with 1 after each call of a way.

        Returns:
            Rows of work, way, base, seconds (median round), ``speedup`` over the base or ``ratio`` to it (median
            over the n rounds, its range in ``_min`` and ``_max``), n; with ``same`` off also ``equal``, the share
            of the list that is the base's.

        Raises:
            RuntimeError: A way returns something else than the base.
        """
        clock = CLOCKS[self.clock]
        base = next(iter(ways))
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        results: dict[str, Any] = {}
        for round_index in range(self.repeats + 1):
            for way, function in ways.items():
                _synchronize(device)
                start = clock()
                results[way] = function()
                _synchronize(device)
                duration = clock() - start
                # The first round warms up.
                if round_index > 0:
                    seconds[way].append(duration)
                advance(1)
                if same and results[way] != results[base]:
                    raise RuntimeError(f"{work}: {way} gives other results than {base}")

        rows = []
        for way in ways:
            row = {
                "work": work,
                "way": way,
                "base": base,
                "seconds": median(seconds[way]),
                **_ratios(seconds[way], seconds[base], faster),
                "n": len(seconds[way]),
            }
            if not same and results[base]:
                pairs = zip(results[way], results[base], strict=True)
                row["equal"] = sum(a == b for a, b in pairs) / len(results[base])
            rows.append(row)
        return rows

    def figures(self, tables: Tables) -> Drawn:
        """The ratios of each table."""
        return {
            name: (ratio_figure(table), self.caption) for name, table in tables.items()
        }


def _synchronize(device: torch.device) -> None:
    """Wait until a GPU has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ratios(
    seconds: Sequence[float], base_seconds: Sequence[float], faster: bool
) -> dict[str, float]:
    """Return median, smallest and largest ratio of two ways' times over the rounds, by column.

    Args:
        seconds: Seconds of the way in each round.
        base_seconds: Seconds of the way that it is compared with.
        faster: Give speed-ups (base over way) in place of ratios of times (way over base).
    """
    rounds = list(zip(seconds, base_seconds, strict=True))
    if faster:
        kind = "speedup"
        ratios = [base / duration for duration, base in rounds]
    else:
        kind = "ratio"
        ratios = [duration / base for duration, base in rounds]
    return {
        kind: median(ratios),
        f"{kind}_min": min(ratios),
        f"{kind}_max": max(ratios),
    }


def with_environment(rows: Sequence[Row]) -> pd.DataFrame:
    """Measured rows, with the hardware and the versions that they were made on."""
    return pd.DataFrame(rows).assign(
        hardware=describe_hardware(), versions=versions.version_line()
    )


def applicable_methods(
    lm: LM,
    choices: Mapping[str, MethodChoice],
    build: Callable[[MethodChoice], Method],
    report: Callable[[str], object] = lambda text: None,
) -> dict[str, Method]:
    """Build the methods that apply to a model and change no prompt.

    Args:
        lm: The model.
        choices: Methods by name.
        build: Makes a method; raises `UserError` where it cannot.
        report: Called with a line for each method that is left out.

    Returns:
        Methods by name, the unmodified one first.
    """
    methods: dict[str, Method] = {UNMODIFIED: Unmodified()}
    for name, choice in choices.items():
        try:
            method = build(choice)
            method.check(lm)
            if method.rewrites:
                # These prompts go as they are, so that it would count as the unmodified model.
                allowed = "methods that leave prompts as they are"
                raise UserError("method", name, allowed, "posbench study=remedies")
            methods[name] = method
        except UserError as error:
            report(f"left out: {name} ({error.field}: {error.allowed})")
    return methods


def shape_config(shape: str) -> PreTrainedConfig:
    """The config of a shape of ``shapes.yaml``."""
    shapes = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text("utf-8"))
    return transformers.AutoConfig.for_model(**shapes[shape])


def random_model(
    shape: str, device: torch.device, dtype: str = "float32", tokenizer: Any = None
) -> LM:
    """Make a model of a shape of ``shapes.yaml`` with random weights.

    Args:
        shape: Key of ``shapes.yaml``.
        device: Where the weights are drawn and kept.
        dtype: Of the weights.
        tokenizer: A tokenizer of transformers, where prompts are texts.
    """
    config = shape_config(shape)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, dtype),
            attn_implementation=usable_kernel(config, "auto"),
        )
    return load(model, tokenizer=tokenizer, name=shape)


@plot.styled
def ratio_figure(measured: pd.DataFrame) -> Figure:
    """Draw a panel for each work: median ratio of each way, its range over rounds, and the paper's ratios.

    Args:
        measured: A row for each work and way.
    """
    panels = list(measured.groupby("work", sort=False))
    kind = "ratio" if "ratio" in measured else "speedup"
    figure, grid = plot.new_figure(
        plot.PAGE,
        0.3 + 0.22 * len(measured) + 0.55 * len(panels),
        len(panels),
        sharex=True,
        squeeze=False,
        height_ratios=[len(rows) + 1.5 for _, rows in panels],
        n=measured.get("n", ()),
    )
    for axes, (work, rows) in zip(grid.flat, panels, strict=True):
        for y, row in enumerate(rows[::-1].to_dict("records")):
            below = row[kind] - row[f"{kind}_min"]
            above = row[f"{kind}_max"] - row[kind]
            axes.errorbar(
                [row[kind]],
                [y],
                xerr=[[below], [above]],
                fmt="o",
                clip_on=False,
                color=plot.BLACK if row["way"] == UNMODIFIED else plot.BLUE,
                capsize=2,
                label="posbench",
            )
            # The paper's own ratios, where it has some.
            printed = _printed_ratios(row, rows)
            if printed:
                # Around ours where both are the same.
                ring = plot.PAPER_MARKER | {"markerfacecolor": "none", "markersize": 6}
                axes.plot(printed, [y] * len(printed), **ring)
        names = rows["way"][::-1].replace(UNMODIFIED, "unmodified")
        axes.set_yticks(range(len(rows)), names)
        axes.axvline(1, color=plot.GUIDE, linewidth=0.6, zorder=0)
        axes.set(title=work)
        axes.margins(y=0.5 / len(rows))
    quantity = {"ratio": "time over that of", "speedup": "speed-up over"}[kind]
    bases = measured["base"].replace(UNMODIFIED, "unmodified").unique()
    base = bases[0] if len(bases) == 1 else "the first way of each panel"
    several = "median and range over rounds"
    label = f"{quantity} {base} ({several if measured['n'].max() > 1 else 'one round'})"
    axes.set(xlabel=label)
    if 0 < plot.LOG_AXIS_RATIO * measured[kind].min() <= measured[kind].max():
        axes.set_xscale("log")
    else:
        axes.set_xlim(0, None)
    if "paper" in plot.legend_entries(figure)[1]:
        plot.add_legend_below(figure)
    return figure


def _printed_ratios(row: Row, rows: pd.DataFrame) -> list[float]:
    """The papers' ratios of a way: from seconds, or from texts such as ``1.45 (LPES, Table 5); 1.86 (...)``."""
    if "paper_seconds" in row:
        base = rows.loc[rows["way"] == row["base"], "paper_seconds"].item()
        return [row["paper_seconds"] / base]
    text = str(row.get("paper", ""))
    return [float(ratio) for ratio in re.findall(r"(?:^|; )([\d.]+) \(", text)]
