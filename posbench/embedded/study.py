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
from posbench.embedded.recipe import RECIPES, SHIPPED_SEEDS
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

CHOOSING_FILE = "choosing.json"  # numbers on the choosing set, of each training
MEASURED_FILE = "measured.json"  # numbers on the evaluation set
SEEDS_FILE = "seeds.csv"  # a row for each training


@dataclass(frozen=True, kw_only=True)
class EmbeddedModel(Study):
    """A model that ships with posbench, trained again and measured.

    Every training is measured on the choosing set. The first one that meets the criteria (else the first) is
    the finished model: it alone is measured on the evaluation set, and its checkpoint is in the run
    folder, under the model's name. To release it, copy RUN_FOLDER/tiny/* to posbench/embedded/models/tiny/,
    then write the numbers of measured.json, seeds.csv and training.json into the card, README.md.

    Trainings lie next to the run folder and go on where they were killed. Runs of the same code share them:
    two shells can train different seeds. On another processor a seed ends at other weights.

    Attributes:
        model: The model whose recipe is used.
        seeds: Training seeds, the one to release first. None: the shipped seed, then 0, 1, ... until one meets
            the criteria. ``[]``: none, and the shipped checkpoint is measured.
        attempts: Seeds at most where ``seeds`` is None.
    """

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False

    model: Literal["tiny", "tiny_b", "tiny_nope", "tiny_alibi"] = "tiny"
    seeds: tuple[Seed, ...] | None = None
    attempts: Count = 6

    def files(self) -> tuple[Source, ...]:
        """See :meth:`Study.files`: the shipped checkpoint, where nothing is trained."""
        if self.seeds != ():
            return ()
        shipped = checkpoint_source(f"{paths.EMBEDDED}{self.model}")
        return (replace(shipped, field="study.model"),)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``criteria`` (by seed and prompts), ``training`` (the curve), ``seeds`` (by training)."""
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)  # the weights depend on it
            return self._finish(run, self._train(run))

    def _train(self, run: Run) -> dict[int, RunDir]:
        """The folder of every training by its seed, the finished model first."""
        recipe = RECIPES[self.model]
        root = run.out.path.parent / "trainings"
        root.mkdir(exist_ok=True)
        folders: dict[int, RunDir] = {}
        finished: int | None = None
        for seed in self._training_seeds():
            name = f"{self.model}_{short_hash(asdict(recipe))}_s{seed}"
            folder = RunDir(root / name)
            folders[seed] = folder
            self._train_seed(run, seed, folder)
            rows = criteria(folder.read_json(CHOOSING_FILE), self.model)
            passed = all(row["passed"] or not row["required"] for row in rows)
            if passed and finished is None:
                finished = seed
            if passed and self.seeds is None:
                break
        seeds = sorted(folders, key=lambda seed: seed != finished)
        return {seed: folders[seed] for seed in seeds}

    def _training_seeds(self) -> Sequence[int]:
        """Seeds in the order of their training."""
        if self.seeds is not None:
            return self.seeds
        shipped = SHIPPED_SEEDS[self.model]
        further = [seed for seed in range(self.attempts) if seed != shipped]
        return [shipped, *further][: self.attempts]

    def _train_seed(self, run: Run, seed: int, folder: RunDir) -> None:
        """Train a seed and measure it on the choosing set, as far as that is not done."""
        recipe = RECIPES[self.model]
        steps = sum(stage.steps for stage in recipe.stages)
        model_folder = folder.path / "model"
        with (
            run.progress(f"training seed {seed}", steps) as advance,
            owning(folder.path),
        ):
            folder.path.mkdir(exist_ok=True)
            if not model_folder.is_dir():
                file = folder.path / "checkpoint.pt"
                model, log = train(recipe, seed, file, advance)
                save(model, log, model_folder)
            if not folder.read_json(CHOOSING_FILE):
                numbers = measure(
                    model_folder, self.model, CHOOSING_SEED, per_position=32
                )
                folder.write_json(CHOOSING_FILE, numbers)

    def _finish(self, run: Run, trained: dict[int, RunDir]) -> dict[str, pd.DataFrame]:
        """Measure the finished model, or the shipped one where none was trained, on the evaluation set."""
        source = paths.MODELS / self.model
        if trained:
            finished = next(iter(trained.values()))
            source = finished.path / "model"
        out = RunDir(run.out.path / self.model)
        log = RunDir(source).read_json(TRAINING_FILE)
        measured = measure(source, self.model, EVALUATION_SEED)
        if RECIPES[self.model].positions != "rope":
            monotone = monotone_at_start(self.model, log["seed"])
            measured["channels_monotone_at_start"] = monotone
        out.path.mkdir(exist_ok=True)
        out.write_json(MEASURED_FILE, measured)
        sets = [
            (seed, "choosing", folder.read_json(CHOOSING_FILE))
            for seed, folder in trained.items()
        ]
        sets.append((log["seed"], "evaluation", measured))
        rows = [
            {"seed": seed, "prompts": prompts, **row}
            for seed, prompts, numbers in sets
            for row in criteria(numbers, self.model)
        ]
        curve = [{"seed": log["seed"], **row} for row in log["curves"]]
        tables = {"criteria": pd.DataFrame(rows), "training": pd.DataFrame(curve)}
        if trained:
            # With times of their own: files that are copied again count as written by this stage.
            shutil.copytree(
                source, out.path, dirs_exist_ok=True, copy_function=shutil.copy
            )
            seeds = pd.DataFrame([_seed_row(trained[seed]) for seed in sorted(trained)])
            # A seed without a monotone channel has no found channel; Int64 keeps the others whole numbers.
            seeds = seeds.astype({"channel": "Int64"})
            write_csv(out.path / SEEDS_FILE, seeds)
            tables["seeds"] = seeds
        return tables

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Every criterion, on the evaluation set."""
        table = tables["criteria"]
        findings = []
        for row in table[table["prompts"] == "evaluation"].to_dict("records"):
            claim = f"{self.model}: {row['criterion']} ({row['condition']})"
            statistic = f"{row['criterion']}, training seed {row['seed']}"
            note = "" if row["required"] else "not asked of this model"
            finding = Finding.that(row["passed"], claim, statistic, estimate(row), note)
            findings.append(finding.control())
        return findings


def _seed_row(folder: RunDir) -> Row:
    """One training in the table of seeds: the numbers by which the finished model was chosen."""
    log = folder.read_json(f"model/{TRAINING_FILE}")
    measured = folder.read_json(CHOOSING_FILE)
    base = measured["base"]
    return {
        "seed": log["seed"],
        "n": measured["n"],
        "base": base["mean"],
        "first": base["first"],
        "last": base["last"],
        "inner": base["inner"],
        "lowest": base["lowest"],
        "monotone_channels": measured["channels_monotone"],
        "string_sets": measured["string_sets"],
        "string_sets_same": measured["string_sets_same"],
        **_choice_columns("", measured["found"]),
        **_choice_columns("best_", measured["best"]),
        "seconds": log["seconds"],
    }


def _choice_columns(prefix: str, choice: Row | None) -> Row:
    """Columns of a search's choice; all None without a choice."""
    choice = choice or {}
    return {
        f"{prefix}channel": choice.get("channel"),
        f"{prefix}factor": choice.get("factor"),
        f"{prefix}scaled": choice.get("scaled", {}).get("mean"),
        f"{prefix}gain": choice.get("gain"),
        f"{prefix}gain_ci_low": choice.get("gain_low"),
        f"{prefix}gain_ci_high": choice.get("gain_high"),
    }
