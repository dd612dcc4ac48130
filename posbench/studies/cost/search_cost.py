"""What each operation of one generation of the genetic search costs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from posbench.late import pd
from posbench.methods.layer_scaling import LayerScaling
from posbench.run.base import Run
from posbench.search.genetic import GeneticSearch, Genome
from posbench.search.scales import answering, calibration
from posbench.stats import reference
from posbench.stats.findings import Finding
from posbench.studies.base import Tables
from posbench.studies.cost.timing import Timed, table

OPERATIONS = {  # the paper's names, and ours
    "Computing fitness via model inference": "answers of the model",
    "Assigning scaling factor from curve": "scales of all candidates",
    "Mutation": "mutation",
    "Crossover": "crossover",
}
LEAST = 0.9  # of the time: what "dominates" is held against


@dataclass(frozen=True, kw_only=True)
class SearchCost(Timed):
    """Seconds of each operation in one generation of the genetic search (LPES, Table 10).

    A generation is that of the defaults of ``search=genetic``: 16 mutations and 4 crossovers, and as many
    candidates answer all calibration questions three times. Nothing is given up early, as in the paper.
    """

    needs_model: ClassVar[bool] = True
    needs_task: ClassVar[bool] = True
    caption: ClassVar[str] = (
        "Time of each operation in one generation of the genetic search."
    )

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        calibration(run.task)
        LayerScaling(scales=(1.0,) * run.lm.layers).check(run.lm)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Table ``operations``: seconds and share of each, and the paper's."""
        block = run.model.blocks.get("genetic", {})
        names = GeneticSearch.__dataclass_fields__
        ways = self.operations(
            run, GeneticSearch(**{k: v for k, v in block.items() if k in names})
        )
        with run.progress("operations", len(ways) * (self.repeats + 1)) as advance:
            timed = self.compared(
                "one generation", ways, run.lm.device, faster=False, advance=advance
            )
        found = table(timed)
        printed = reference.table(
            "lpes_table10_ga_runtime.csv", "task", "value"
        ).set_index("task")["value"]
        found["paper_seconds"] = printed.loc[list(OPERATIONS)].astype(float).to_numpy()
        shares = {f"{name}share": found[f"{name}seconds"] for name in ("", "paper_")}
        return {
            "operations": found.assign(
                **{k: each / each.sum() for k, each in shares.items()}
            )
        }

    def operations(
        self, run: Run, search: GeneticSearch
    ) -> dict[str, Callable[[], Any]]:
        """The operations of a generation, by our names; each is whole work, repeated as it is."""
        lm, rng, layers = run.lm, random.Random(0), run.lm.layers
        examples, places = calibration(run.task)
        answer = answering(lm, run.task, examples)
        batch = search.batch_size
        parents: list[Genome] = [
            search.mutate(search.first(layers), rng, layers)
            for _ in range(search.parents)
        ]
        children = [search.mutate(parent, rng, layers) for parent in parents]
        count = search.mutations + search.crossovers
        offspring = (children * (count // len(children) + 1))[:count]

        def scales() -> None:
            for genome in offspring:
                with LayerScaling(scales=search.decode(genome, layers)).applied(lm):
                    pass

        def mutation() -> None:
            for _ in range(search.mutations):
                search.mutate(rng.choice(parents), rng, layers)

        def crossover() -> None:
            for _ in range(search.crossovers):
                any(search.cross(parents, rng) for _ in range(search.crossover_tries))

        def fitness() -> None:
            for genome in offspring:
                each = search.decode(genome, layers)
                for start in range(0, len(places), batch):
                    answer(each, list(range(start, min(start + batch, len(places)))))

        return dict(
            zip(
                OPERATIONS.values(), (fitness, scales, mutation, crossover), strict=True
            )
        )

    def findings(self, tables: Tables) -> list[Finding]:
        """Whether the answers of the model take nearly all of the time."""
        found = tables["operations"].iloc[0]
        claim = "LPES, Table 10: the answers of the model take nearly all of the time of the genetic search"
        size = f"their share of a generation's time; holds above {LEAST:g}"
        note = f"the paper's: {found['paper_share']:.3f}; one machine and model, no interval"
        at = found["share"], self.repeats
        return [Finding.that(found["share"] > LEAST, claim, size, at, note)]
