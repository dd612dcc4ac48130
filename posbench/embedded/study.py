"""A model that ships with posbench, trained again and measured, or measured as it was shipped."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Literal

from posbench import paths
from posbench.embedded.criteria import (
    CHOOSING_SEED,
    EVALUATION_SEED,
    criteria,
    measure,
    monotone_at_start,
)
from posbench.embedded.recipe import RECIPES, SHIPPED
from posbench.embedded.training import TRAINING_FILE, save, train
from posbench.files.atomic import Row, short_hash, write_csv
from posbench.files.sources import Source, checkpoint_source
from posbench.late import pd, torch
from posbench.run.base import Run
from posbench.run.folder import RunDir
from posbench.run.lease import owning
from posbench.schema import Count, Seed
from posbench.stats.findings import Finding, estimate
from posbench.studies.base import Study, Tables

CHOOSING_FILE = "choosing.json"
MEASURED_FILE = "measured.json"
SEEDS_FILE = "seeds.csv"
"""Numbers on the choosing set (each training) and on the evaluation set, and a row for each training."""


@dataclass(frozen=True, kw_only=True)
class EmbeddedModel(Study):
    """A model that ships with posbench, trained again and measured.

    Every training is measured on the choosing set. The first one that meets the criteria (else the first) is
    the finished model: it alone is measured on the evaluation set, and its checkpoint stands in the run
    folder, under the model's name. To release it, copy RUN_FOLDER/tiny/* to posbench/embedded/models/tiny/,
    then write the numbers of measured.json, seeds.csv and training.json into the card, README.md.

    Trainings lie next to the run folder and go on where they were killed. Runs of the same code share them:
    two shells can train different seeds. On another processor a seed ends at other weights.
    """

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False

    model: Literal["tiny", "tiny_b", "tiny_nope", "tiny_alibi"] = "tiny"  # whose recipe
    # training seeds, the one to release first. None: the shipped seed, then 0, 1, ... until one meets the
    # criteria. ``[]``: none, and the shipped checkpoint is measured
    seeds: tuple[Seed, ...] | None = None
    attempts: Count = 6  # seeds at most where ``seeds`` is None

    def files(self) -> tuple[Source, ...]:
        """See :meth:`Study.files`: the shipped checkpoint, where nothing is trained."""
        shipped = replace(
            checkpoint_source(f"{paths.EMBEDDED}{self.model}"), field="study.model"
        )
        return (shipped,) if self.seeds == () else ()

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``criteria`` (by seed and prompts), ``training`` (the curve), ``seeds`` (by training)."""
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)  # the weights depend on it
            return self._finish(run, self._train(run))

    def _train(self, run: Run) -> dict[int, RunDir]:
        """The folder of every training by its seed, the finished model first."""
        order = self.seeds
        recipe = RECIPES[self.model]
        done = dict[int, RunDir]()
        good = list[int]()
        if order is None:
            others = (
                seed for seed in range(self.attempts) if seed != SHIPPED[self.model]
            )
            order = (SHIPPED[self.model], *others)[: self.attempts]
        root = run.out.path.parent / "trainings"
        steps = sum(stage.steps for stage in recipe.stages)
        root.mkdir(exist_ok=True)
        for seed in order:
            folder = done[seed] = RunDir(
                root / f"{self.model}_{short_hash(asdict(recipe))}_s{seed}"
            )
            model = folder.path / "model"
            with (
                run.progress(f"training seed {seed}", steps) as advance,
                owning(folder.path),
            ):
                folder.path.mkdir(exist_ok=True)
                if not model.is_dir():
                    save(
                        *train(recipe, seed, folder.path / "checkpoint.pt", advance),
                        model,
                    )
                if not folder.read_json(CHOOSING_FILE):
                    folder.write_json(
                        CHOOSING_FILE,
                        measure(model, self.model, CHOOSING_SEED, per_position=32),
                    )
            rows = criteria(folder.read_json(CHOOSING_FILE), self.model)
            good += (
                [seed]
                if all(row["passed"] or not row["required"] for row in rows)
                else []
            )
            if good and self.seeds is None:
                break
        return {seed: done[seed] for seed in [*good[:1], *done]}

    def _finish(self, run: Run, trained: dict[int, RunDir]) -> dict[str, pd.DataFrame]:
        """Measure the finished model, or the shipped one where none was trained, on the evaluation set."""
        source = next(
            (folder.path / "model" for folder in trained.values()),
            paths.MODELS / self.model,
        )
        out = RunDir(run.out.path / self.model)
        log = RunDir(source).read_json(TRAINING_FILE)
        measured = measure(source, self.model, EVALUATION_SEED)
        if RECIPES[self.model].positions != "rope":
            measured["channels_monotone_at_start"] = monotone_at_start(
                self.model, log["seed"]
            )
        out.path.mkdir(exist_ok=True)
        out.write_json(MEASURED_FILE, measured)
        tables = {
            "training": pd.DataFrame(
                [{"seed": log["seed"], **row} for row in log["curves"]]
            )
        }
        if trained:
            # With times of their own: files that are copied again count as written by this stage.
            shutil.copytree(
                source, out.path, dirs_exist_ok=True, copy_function=shutil.copy
            )
            tables["seeds"] = pd.DataFrame(
                [_row(trained[seed]) for seed in sorted(trained)]
            )
            # A seed without a monotone channel has no found channel; Int64 keeps the others whole numbers.
            tables["seeds"] = tables["seeds"].astype({"channel": "Int64"})
            write_csv(out.path / SEEDS_FILE, tables["seeds"])
        sets = [
            (seed, "choosing", folder.read_json(CHOOSING_FILE))
            for seed, folder in trained.items()
        ]
        sets.append((log["seed"], "evaluation", measured))
        rows = [
            {"seed": s, "prompts": p, **row}
            for s, p, found in sets
            for row in criteria(found, self.model)
        ]
        return {"criteria": pd.DataFrame(rows), **tables}

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Every criterion, on the evaluation set."""
        found = []
        for row in (
            tables["criteria"].query("prompts == 'evaluation'").to_dict("records")
        ):
            claim = f"{self.model}: {row['criterion']} ({row['condition']})"
            note = "not asked of this model"
            at = estimate(row)
            statistic = f"{row['criterion']}, training seed {row['seed']}"
            one = Finding.that(
                row["passed"], claim, statistic, at, "" if row["required"] else note
            )
            found.append(one.control())
        return found


def _row(folder: RunDir) -> Row:
    """One training in the table of seeds: what the choice was made from."""
    log = folder.read_json(f"model/{TRAINING_FILE}")
    measured = folder.read_json(CHOOSING_FILE)
    row = {"seed": log["seed"], "n": measured["n"], "base": measured["base"]["mean"]}
    row |= {
        name: measured["base"][name] for name in ("first", "last", "inner", "lowest")
    }
    row |= {"monotone_channels": measured["channels_monotone"]}
    row |= {name: measured[name] for name in ("string_sets", "string_sets_same")}
    for prefix, result in (("", measured["found"]), ("best_", measured["best"])):
        found = {**result, "scaled": result["scaled"]["mean"]} if result else {}
        for name in ("channel", "factor", "scaled", "gain", "gain_low", "gain_high"):
            row[prefix + name.replace("gain_", "gain_ci_")] = found.get(name)
    return row | {"seconds": log["seconds"]}
