"""Several seeds of one recipe: train, measure on the choosing set, and list what the choice was made from."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers.utils.logging import disable_progress_bar

from posbench.embedded.checks import CHOOSING_SEED, criteria, load_trained, measure
from posbench.embedded.recipe import RECIPES, SHIPPED, Recipe
from posbench.embedded.train import TRAINING_FILE, save, train
from posbench.errors import UserError
from posbench.files.atomic import write_csv, write_text

STUDY_FILE = "choosing.json"
"""Numbers of `posbench.embedded.checks.measure` on the choosing set, in each seed's directory."""
SEEDS_FILE = "seeds.csv"
"""One row per seed."""


def run_seeds(seeds: Sequence[int], out: Path, workers: int, recipe: Recipe | None = None) -> pd.DataFrame:
    """Train and measure every seed that ``out`` lacks, then write ``seeds.csv`` over all seeds there.

    Args:
        seeds: Training seeds.
        out: Directory with one ``seed<N>`` per seed; finished ones are kept.
        workers: Processes, one thread each.
        recipe: The recipe; the default one if None.

    Returns:
        The table of `seeds_table`.

    Raises:
        UserError: A finished seed was trained with another recipe.
    """
    recipe = recipe or Recipe()
    for seed in seeds:
        _same_recipe(out / f"seed{seed}", recipe)
    # Spawned, not forked: torch's thread pools do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=workers, mp_context=context) as pool:
        jobs = {pool.submit(_one_seed, recipe, seed, out / f"seed{seed}"): seed for seed in seeds}
        for job in as_completed(jobs):
            job.result()
            print(f"seed {jobs[job]} done", flush=True)
    table = seeds_table(out)
    write_csv(out / SEEDS_FILE, table)
    return table


def retrain(out: Path, workers: int, attempts: int, name: str = "tiny") -> Path:
    """Train until a seed meets the criteria on the choosing set, the shipped seed of ``name`` first.

    One processor rounds differently from another, so the shipped seed may end at other weights elsewhere; the
    criteria then hold for another seed. Seeds are trained ``workers`` at a time.

    Args:
        out: Directory of the study; finished seeds are kept.
        workers: Processes, one thread each.
        attempts: Seeds to try at most.
        name: A key of `posbench.embedded.recipe.RECIPES`.

    Returns:
        Directory of the first seed that meets the criteria.

    Raises:
        UserError: None of them does.
    """
    recipe, first = RECIPES[name], SHIPPED[name]
    order = [first, *(seed for seed in range(attempts) if seed != first)][:attempts]
    # A second seed on the second core costs `tiny` nothing; its siblings have no gain to reach and need the
    # first only.
    workers = workers if name == "tiny" else 1
    for start in range(0, len(order), workers):
        group = order[start : start + workers]
        run_seeds(group, out, workers, recipe)
        for seed in group:
            checks = criteria(json.loads((out / f"seed{seed}" / STUDY_FILE).read_text()))
            if all(check.passed for check in checks if name == "tiny" or check.of_every_model):
                return out / f"seed{seed}"
            print(f"seed {seed} does not meet the criteria on this machine", flush=True)
    raise UserError("--attempts", attempts, "enough seeds for one to pass", "raise --attempts")


def _same_recipe(folder: Path, recipe: Recipe) -> None:
    file = folder / TRAINING_FILE
    if file.is_file() and json.loads(file.read_text())["recipe"] != json.loads(json.dumps(recipe.as_dict())):
        raise UserError(
            "--out", str(folder), "a directory trained with the present recipe", "choose another --out"
        )


def _one_seed(recipe: Recipe, seed: int, folder: Path) -> None:
    disable_progress_bar()
    torch.set_num_threads(1)
    if not folder.is_dir():
        save(train(recipe, seed), folder)
    if not (folder / STUDY_FILE).is_file():
        measured = measure(
            load_trained(folder),
            CHOOSING_SEED,
            pairs=recipe.measured_pairs,
            longest=recipe.longest,
            per_position=32,
        )
        write_text(folder / STUDY_FILE, json.dumps(measured) + "\n")


def seeds_table(out: Path) -> pd.DataFrame:
    """One row per finished seed, in order, from the files that `run_seeds` left under ``out``.

    Returns:
        Frame with the seed, the number of prompts, unmodified accuracies (``base`` over all positions,
        ``first``, ``last``, ``inner`` half, ``lowest`` position), the sets of random strings on which the
        search was repeated and how many of them gave the same choice, the channel and factor that the paper's
        search found with accuracy, gain and its 95 % interval (empty where no channel passes its filter), the
        same for the best channel of a full traversal (``best_``), and the training time in seconds.
    """
    rows = [_row(file.parent) for file in out.glob(f"seed*/{STUDY_FILE}")]
    # A seed without a monotone channel has no found channel; Int64 keeps the others whole numbers.
    return pd.DataFrame(rows).sort_values("seed", ignore_index=True).astype({"channel": "Int64"})


def _row(folder: Path) -> dict[str, Any]:
    training = json.loads((folder / TRAINING_FILE).read_text())
    measured = json.loads((folder / STUDY_FILE).read_text())
    base = measured["base"]
    row: dict[str, Any] = {
        "seed": training["seed"],
        "n": measured["n"],
        "base": base["mean"],
        **{name: base[name] for name in ("first", "last", "inner", "lowest")},
        "monotone_channels": measured["channels_monotone"],
        "string_sets": measured["string_sets"],
        "string_sets_same": measured["string_sets_same"],
    }
    for prefix, name in (("", "found"), ("best_", "best")):
        result = measured[name] or {}
        for field in ("channel", "factor"):
            row[prefix + field] = result.get(field)
        row[prefix + "scaled"] = result["scaled"]["mean"] if result else None
        for field in ("gain", "gain_low", "gain_high"):
            row[prefix + field] = result.get(field)
    return row | {"seconds": training["seconds"]}
