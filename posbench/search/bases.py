"""A RoPE base for a model: a few are tried, and the one under which the right answers are likeliest is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import MinLen

from posbench.files.atomic import write_csv
from posbench.late import pd
from posbench.methods.base import Method
from posbench.methods.rope_base import RopeBase
from posbench.model import rope
from posbench.plots.search import bases_figure
from posbench.plots.section import Section
from posbench.run.base import Run
from posbench.run.cost import StudyWorkload
from posbench.schema import Scale
from posbench.search.base import SEARCH_ROWS_FILE, Read, Search
from posbench.stats.bootstrap import difference, with_interval


@dataclass(frozen=True, kw_only=True)
class BaseSearch(Search):
    """Compare bases by the loss of the right answer on calibration prompts.

    Args:
        factors: The bases to try, as multiples of the model's own, which is tried as well.

    Source: posbench.
    """

    serves: ClassVar[type[RopeBase]] = RopeBase
    finds: ClassVar[Mapping[str, Any]] = {"base": 10000.0}

    factors: Annotated[tuple[Scale, ...], MinLen(1)] = (
        0.01,
        0.03,
        0.1,
        0.3,
        3.0,
        10.0,
        30.0,
    )

    def workload(
        self, prompts: int, answer: int, layers: int, channels: int
    ) -> StudyWorkload:
        """Return the work of all bases, the model's own among them, and of the check of the best one."""
        reads = (1 + len(self.factors)) * prompts + 2 * (self.held_back or prompts)
        return StudyWorkload(prompts=reads, answers=reads * answer)

    def search(self, run: Run) -> None:
        """Read every calibration prompt with its answer under every base.

        Writes ``search.csv``: a row for each base, with its loss in nats per answer token, and by how much it is below
        that of the model's own base, paired over questions.
        """
        own_base = rope.own_base(run.lm.model)
        examples = self.calibration(run)
        batches = run.prompts.batches_by_length(
            examples, lambda example: self.prompt_length(run, example)
        )
        losses = {
            base: self.measure_under(
                run, f"{base:g}", RopeBase(base=base), batches, SEARCH_ROWS_FILE
            )
            for base in sorted({own_base, *(own_base * f for f in self.factors)})
        }
        rows = []
        for base, by_prompt in losses.items():
            falls = [losses[own_base][e.id] - by_prompt[e.id] for e in examples]
            fall = difference(np.array(falls), [e.question_id for e in examples])
            loss = float(np.mean([by_prompt[e.id] for e in examples]))
            row = {"base": base, "own_base": own_base, "loss": loss, "fall": fall.value}
            row |= {"ci_low": fall.ci_low, "ci_high": fall.ci_high, "n": fall.n}
            rows.append(row)
        write_csv(run.out.path / "search.csv", pd.DataFrame(rows))
        best = min(rows, key=lambda row: row["loss"])
        block = {
            "base": best["base"],
            "own_base": own_base,
            "loss": round(best["loss"], 6),
            "loss_unmodified": round(best["loss"] + best["fall"], 6),
        }
        settings = f"{len(rows)} bases, {len(examples)} calibration prompts"
        self.write_found(run, block, f"RoPE base ({settings} of {run.task.name})")

    def keeps_unmodified(self, block: Mapping[str, Any], method: Method) -> bool:
        """Whether it kept the model's own base."""
        return bool(block["base"] == block["own_base"])

    def describe(self, block: Mapping[str, Any]) -> str:
        """The base, and its loss beside that of the model's own."""
        text = f"base {block['base']:,.0f}: loss {block['loss']:.4f}"
        if block["base"] == block["own_base"]:
            return f"{text}; it is the model's own, and no other one has a lower loss"
        return f"{text}; with the model's own, {block['own_base']:,.0f}: {block['loss_unmodified']:.4f}"

    def sections(self, read: Read) -> list[Section]:
        """The loss under every base."""
        table = read("search")
        if table is None:
            return []
        rows = []
        for row in table.itertuples(index=False):
            fall = with_interval(row.fall, row.ci_low, row.ci_high)
            rows.append([f"{row.base:,.0f}", f"{row.loss:.4f}", fall, str(row.n)])
        text = "Loss of the right answer in nats per token; the fall is against the model's own base."
        header = ("base", "loss", "fall", "n")
        caption = (
            "Fall of the loss under other bases (95 %, paired); rises may lie below."
        )
        figures = {"bases": (bases_figure(table), caption)}
        return [Section("Search", text, header, rows, figures)]
