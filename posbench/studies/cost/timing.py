"""Times of several works side by side, in one process on one machine; models with random weights to measure on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal

import pandas as pd
import torch
import yaml
from matplotlib.figure import Figure
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from posbench import versions
from posbench.files.atomic import Row
from posbench.files.hardware import hardware
from posbench.model.lm import LM
from posbench.model.load import load
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.schema import Count
from posbench.studies.base import Study, Tables

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
Shape = Literal["small", "wide", "llama2_7b", "mistral7b", "gemma_7b", "qwen2_5_7b", "mpt_7b"]


@dataclass(frozen=True, kw_only=True)
class Timed(Study):
    """A study that compares times.

    Attributes:
        captions: What each table measures.
        repeats: Measured rounds.
        clock: ``processor`` where a CPU is shared with other work.
    """

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False
    captions: ClassVar[Mapping[str, str]]

    repeats: Count = 3
    clock: Literal["wall", "processor"] = "wall"

    def compared(
        self, work: str, works: Mapping[str, Callable[[], Any]], base: str, device: torch.device, kind: str
    ) -> list[Row]:
        """Time the ways of doing a work in turn, A B C A B C ..., after a round to warm up: drift hits all alike.

        Args:
            work: What is done.
            works: The ways of doing it.
            base: The way that the others are compared with.
            device: Where they run.
            kind: ``ratio``, of a way's seconds to those of the base, or ``speedup``, the other way round.

        Returns:
            Rows of work, way, base, seconds (median round), and of the ratio, taken round by round, the median in
            the column ``kind`` and the ends of its range in ``<kind>_min`` and ``<kind>_max``.
        """
        times: dict[str, list[float]] = {way: [] for way in works}
        for number in range(self.repeats + 1):
            for way, do in works.items():
                spent = _seconds(do, device, CLOCKS[self.clock])
                times[way] += [spent] if number else []
        rows = []
        for way, own in times.items():
            each = [a / b if kind == "ratio" else b / a for a, b in zip(own, times[base], strict=True)]
            ratios = {kind: median(each), f"{kind}_min": min(each), f"{kind}_max": max(each)}
            rows.append({"work": work, "way": way, "base": base, "seconds": median(own), **ratios})
        return rows

    def figures(self, tables: Tables) -> Drawn:
        """The ratios of each table."""
        return {name: (ratio_figure(table), self.captions[name]) for name, table in tables.items()}


def _seconds(work: Callable[[], Any], device: torch.device, clock: Callable[[], float]) -> float:
    """The time of one call, with all that it started on the device."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    wait(device)
    start = clock()
    work()
    wait(device)
    return clock() - start


def table(rows: Sequence[Row]) -> pd.DataFrame:
    """Measured rows, with the hardware and the versions that they were made on."""
    return pd.DataFrame(rows).assign(hardware=hardware(), versions=versions.summary())


def random_model(
    shape: Shape,
    device: torch.device,
    dtype: str = "float32",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> LM:
    """A model of a shape of ``shapes.yaml`` with random weights."""
    settings = yaml.safe_load((Path(__file__).parent / "shapes.yaml").read_text())[shape]
    with device:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**settings), dtype=getattr(torch, dtype)
        )
    return load(model, tokenizer=tokenizer, name=shape)


@plot.styled
def ratio_figure(measured: pd.DataFrame) -> Figure:
    """A panel for each work: median ratio of each way, and its range over rounds."""
    panels, kind = list(measured.groupby("work", sort=False)), "ratio" if "ratio" in measured else "speedup"
    figure = plot.new_figure(plot.PAGE, sum(0.22 * len(rows) + 0.55 for _, rows in panels))
    heights = [len(rows) + 1.5 for _, rows in panels]
    every = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, (work, rows) in zip(every, panels, strict=True):
        rows = rows[::-1]
        away = rows[kind] - rows[f"{kind}_min"], rows[f"{kind}_max"] - rows[kind]
        axes.errorbar(rows[kind], rows["way"], xerr=away, fmt="o", color=plot.COLOURS[0], capsize=2)
        axes.axvline(1, color="0.6", linewidth=0.6, zorder=0)
        axes.set(title=work)
        axes.margins(y=0.5 / len(rows))
    words = {"ratio": "time over that of", "speedup": "speed-up over"}[kind]
    every[-1].set(xlabel=f"{words} {measured['base'].iloc[0]} (median and range over rounds)", xlim=(0, None))
    return figure
