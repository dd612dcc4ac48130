"""What studies of cost share: times of ways side by side, methods that apply, random models."""

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
from posbench.files.hardware import hardware
from posbench.late import Figure, pd, torch, transformers
from posbench.methods import Method, Unmodified
from posbench.methods.choice import MethodChoice
from posbench.model.lm import LM
from posbench.model.load import load
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.schema import Count
from posbench.stats.frames import UNMODIFIED
from posbench.studies.base import Study, Tables

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
Shape = Literal[
    "small", "wide", "llama2_7b", "mistral7b", "gemma_7b", "qwen2_5_7b", "mpt_7b"
]


@dataclass(frozen=True, kw_only=True)
class Timed(Study):
    """A study that compares times."""

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False
    caption: ClassVar[str]

    repeats: Count = 3  # measured rounds
    clock: Literal["wall", "processor"] = (
        "wall"  # processor where a CPU is shared with other work
    )

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
        """Time the ways of doing a work in turn, A B C A B C ..., after a warm-up: drift hits all alike.

        Returns:
            Rows of work, way, base (the first way), seconds (median round) and ``speedup`` over the base, or
            with ``faster`` off ``ratio`` to it: median over the n rounds, its range in ``_min`` and ``_max``.
            With ``same`` off a way may return another list than the base; ``equal`` is the share that it has.

        Raises:
            RuntimeError: A way returns something else than the base.
        """
        times: dict[str, list[float]] = {way: [] for way in ways}
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
        base = next(iter(ways))
        found = dict[str, Any]()
        clock = CLOCKS[self.clock]
        for number in range(self.repeats + 1):
            for way, do in ways.items():
                wait(device)
                start = clock()
                found[way] = do()
                wait(device)
                spent = clock() - start
                times[way] += [spent] if number else []
                advance(1)
                if same and found[way] != found[base]:
                    raise RuntimeError(f"{work}: {way} gives other results than {base}")
        rows = []
        kind = "speedup" if faster else "ratio"
        for way, own in times.items():
            each = [
                b / a if faster else a / b
                for a, b in zip(own, times[base], strict=True)
            ]
            ratios = {
                kind: median(each),
                f"{kind}_min": min(each),
                f"{kind}_max": max(each),
            }
            told = {"work": work, "way": way, "base": base, "seconds": median(own)}
            pairs = [] if same else list(zip(found[way], found[base], strict=True))
            alike = (
                {"equal": sum(a == b for a, b in pairs) / len(pairs)} if pairs else {}
            )
            rows.append({**told, **ratios, "n": len(own), **alike})
        return rows

    def figures(self, tables: Tables) -> Drawn:
        """The ratios of each table."""
        return {
            name: (ratio_figure(table), self.caption) for name, table in tables.items()
        }


def table(rows: Sequence[Row]) -> pd.DataFrame:
    """Measured rows, with the hardware and the versions that they were made on."""
    return pd.DataFrame(rows).assign(hardware=hardware(), versions=versions.summary())


def applicable(
    lm: LM,
    every: Mapping[str, MethodChoice],
    make: Callable[[MethodChoice], Method],
    tell: Callable[[str], object] = lambda text: None,
) -> dict[str, Method]:
    """The methods that apply to a model, by name, the unmodified one first; tells which are left out."""
    found: dict[str, Method] = {UNMODIFIED: Unmodified()}
    for name, choice in every.items():
        try:
            method = make(choice)
            method.check(lm)
            found[name] = method
        except UserError as error:
            tell(f"left out: {name} ({error.field}: {error.allowed})")
    return found


def random_model(
    shape: str, device: torch.device, dtype: str = "float32", tokenizer: Any = None
) -> LM:
    """A model of a shape of ``shapes.yaml`` with random weights."""
    shapes = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text())
    config = transformers.AutoConfig.for_model(**shapes[shape])
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype)
        )
    return load(model, tokenizer=tokenizer, name=shape)


@plot.styled
def ratio_figure(measured: pd.DataFrame) -> Figure:
    """A panel for each work: median ratio of each way, and its range over rounds."""
    panels = list(measured.groupby("work", sort=False))
    kind = "ratio" if "ratio" in measured else "speedup"
    height = 0.3 + 0.22 * len(measured) + 0.55 * len(panels)
    ratios = [len(rows) + 1.5 for _, rows in panels]
    shape = dict(
        sharex=True, squeeze=False, height_ratios=ratios, n=measured.get("n", ())
    )
    figure, grid = plot.new_figure(plot.PAGE, height, len(panels), **shape)
    for axes, (work, rows) in zip(grid.flat, panels, strict=True):
        for place, row in enumerate(rows[::-1].to_dict("records")):
            away = [[row[kind] - row[f"{kind}_min"]], [row[f"{kind}_max"] - row[kind]]]
            colour = plot.BLACK if row["way"] == UNMODIFIED else plot.BLUE
            style = {"color": colour, "capsize": 2, "label": "posbench"}
            axes.errorbar(
                [row[kind]], [place], xerr=away, fmt="o", clip_on=False, **style
            )
            if printed := _printed(row, rows):
                axes.plot(printed, [place] * len(printed), **plot.OPEN_DIAMOND)
        axes.set_yticks(
            range(len(rows)), rows["way"][::-1].replace(UNMODIFIED, "unmodified")
        )
        axes.axvline(1, color=plot.GUIDE, linewidth=0.6, zorder=0)
        axes.set(title=work)
        axes.margins(y=0.5 / len(rows))
    words = {"ratio": "time over that of", "speedup": "speed-up over"}[kind]
    base = str(measured["base"].iloc[0]).replace(UNMODIFIED, "unmodified")
    axes.set(xlabel=f"{words} {base} (median and range over rounds)", xlim=(0, None))
    if "paper" in plot.entries(figure)[1]:
        plot.legend_below(figure)
    return figure


def _printed(row: Row, rows: pd.DataFrame) -> list[float]:
    """The papers' ratios of a way: seconds over the base's, or as in ``1.45 (LPES, Table 5)``."""
    if "paper_seconds" in row:
        base = rows.loc[rows["way"] == row["base"], "paper_seconds"].item()
        return [row["paper_seconds"] / base]
    return [
        float(ratio)
        for ratio in re.findall(r"(?:^|; )([\d.]+) \(", str(row.get("paper", "")))
    ]
