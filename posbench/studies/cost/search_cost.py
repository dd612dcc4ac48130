"""Cost of each operation in one generation of the genetic search."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from posbench.late import pd
from posbench.methods.layer_scaling import LayerScaling
from posbench.run.base import Run
from posbench.search.genetic import GeneticSearch, Genome
from posbench.search.scales import calibration_questions, make_evaluator
from posbench.stats import reference
from posbench.stats.findings import Finding
from posbench.studies.base import Tables
from posbench.studies.cost.timing import TimingStudy, with_environment

OPERATIONS = {  # the paper's names, and ours
    "Computing fitness via model inference": "answers of the model",
    "Assigning scaling factor from curve": "scales of all candidates",
    "Mutation": "mutation",
    "Crossover": "crossover",
}
DOMINANT_SHARE = 0.9  # of the time: the threshold for "dominates"


@dataclass(frozen=True, kw_only=True)
class SearchCost(TimingStudy):
    """Seconds of each operation in one generation of the genetic search (LPES, Table 10).

    A generation has the defaults of ``search=genetic``: 16 mutations and 4 crossovers; the same number of
    candidates answers all calibration questions three times. Nothing is given up early, as in the paper.
    """

    needs_model: ClassVar[bool] = True
    needs_task: ClassVar[bool] = True
    caption: ClassVar[str] = (
        "Time of each operation in one generation of the genetic search."
    )

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        calibration_questions(run.task)
        LayerScaling(scales=(1.0,) * run.lm.layers).check(run.lm)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Time the operations of one generation of the genetic search.

        Returns:
            Table ``operations``: seconds and share of each, and the paper's.
        """
        block = run.model.blocks.get("genetic", {})
        fields = GeneticSearch.__dataclass_fields__
        settings = {key: value for key, value in block.items() if key in fields}
        ways = self.operations(run, GeneticSearch(**settings))
        with run.progress("operations", len(ways) * (self.repeats + 1)) as advance:
            rows = self.compared(
                "one generation", ways, run.lm.device, faster=False, advance=advance
            )
        operations = with_environment(rows)
        printed = reference.read_table("lpes_table10_ga_runtime.csv", "task", "value")
        printed_seconds = printed.set_index("task")["value"].loc[list(OPERATIONS)]
        operations["paper_seconds"] = printed_seconds.astype(float).to_numpy()
        for prefix in ("", "paper_"):
            seconds = operations[f"{prefix}seconds"]
            operations[f"{prefix}share"] = seconds / seconds.sum()
        return {"operations": operations}

    def operations(
        self, run: Run, search: GeneticSearch
    ) -> dict[str, Callable[[], Any]]:
        """Return by name, for each operation, a function that does it as often as one generation of the search does."""
        lm = run.lm
        num_layers = lm.layers
        rng = random.Random(0)
        examples, positions = calibration_questions(run.task)
        num_questions = len(positions)
        answer = make_evaluator(lm, run.task, examples)
        parents: list[Genome] = [
            search.mutate(search.first(num_layers), rng, num_layers)
            for _ in range(search.parents)
        ]
        children = [search.mutate(parent, rng, num_layers) for parent in parents]
        num_offspring = search.mutations + search.crossovers
        copies = num_offspring // len(children) + 1
        # As many candidates as a generation has.
        offspring = (children * copies)[:num_offspring]

        def fitness() -> None:
            for genome in offspring:
                scales = search.decode(genome, num_layers)
                for start in range(0, num_questions, search.batch_size):
                    end = min(start + search.batch_size, num_questions)
                    answer(scales, list(range(start, end)))

        def apply_scales() -> None:
            for genome in offspring:
                scales = search.decode(genome, num_layers)
                with LayerScaling(scales=scales).applied(lm):
                    pass

        def mutation() -> None:
            for _ in range(search.mutations):
                search.mutate(rng.choice(parents), rng, num_layers)

        def crossover() -> None:
            for _ in range(search.crossovers):
                for _ in range(search.crossover_tries):
                    if search.cross(parents, rng):
                        break

        functions = (fitness, apply_scales, mutation, crossover)
        return dict(zip(OPERATIONS.values(), functions, strict=True))

    def findings(self, tables: Tables) -> list[Finding]:
        """Judge whether the answers of the model take nearly all of the time."""
        answers = tables["operations"].iloc[0]
        finding = Finding.that(
            answers["share"] > DOMINANT_SHARE,
            "LPES, Table 10: the answers of the model take nearly all of the time of the genetic search",
            f"their share of a generation's time; holds above {DOMINANT_SHARE:g}",
            (answers["share"], self.repeats),
            f"the paper's: {answers['paper_share']:.3f}; one machine and model, no interval",
        )
        return [finding]
