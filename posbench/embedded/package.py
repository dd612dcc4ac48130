"""Package data of a shipped tiny model: weights, tokenizer, measured numbers and model card."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pandas as pd

from posbench.embedded.card import render
from posbench.embedded.checks import EVALUATION_SEED, load_trained, measure, monotone_at_start
from posbench.embedded.recipe import RECIPES, SHIPPED
from posbench.embedded.study import SEEDS_FILE
from posbench.embedded.train import TRAINING_FILE
from posbench.errors import UserError
from posbench.files.atomic import write_text

MEASURED_FILE = "measured.json"
"""Numbers of `posbench.embedded.checks.measure` on the evaluation set."""
CARD_FILE = "README.md"
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def package(study: Path, name: str, out: Path) -> Path:
    """Copy the shipped seed of ``name`` out of a study, measure it on the evaluation set and write its card.

    The evaluation set is read here for the first time, after the choice of the seed.

    Args:
        study: Directory of `posbench.embedded.study.run_seeds`.
        name: Shipped model, a key of `posbench.embedded.recipe.SHIPPED`.
        out: Directory that receives the folder ``name``; an existing one is replaced.

    Returns:
        The written folder.

    Raises:
        UserError: The study lacks the seed or its table.
    """
    source = study / f"seed{SHIPPED[name]}"
    for file in (study / SEEDS_FILE, source / TRAINING_FILE):
        if not file.is_file():
            raise UserError(
                "study", str(file), "a finished study", "run: python -m posbench.embedded.tiny seeds"
            )
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=out))
    try:
        for model_file in (*MODEL_FILES, TRAINING_FILE):
            shutil.copyfile(source / model_file, work / model_file)
        shutil.copyfile(study / SEEDS_FILE, work / SEEDS_FILE)
        recipe = RECIPES[name]
        measured = measure(
            load_trained(work, name), EVALUATION_SEED, pairs=recipe.measured_pairs, longest=recipe.longest
        )
        if recipe.positions != "rope":
            measured["channels_monotone_at_start"] = monotone_at_start(recipe, SHIPPED[name])
        write_text(work / MEASURED_FILE, json.dumps(measured) + "\n")
        write_card(work, name)
        work.chmod(0o755)
        target = out / name
        if target.exists():
            shutil.rmtree(target)
        os.rename(work, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return target


def write_card(folder: Path, name: str) -> None:
    """Write ``README.md`` from the JSON and CSV files in a packaged folder."""
    training = json.loads((folder / TRAINING_FILE).read_text())
    measured = json.loads((folder / MEASURED_FILE).read_text())
    seeds = pd.read_csv(folder / SEEDS_FILE)
    write_text(folder / CARD_FILE, render(name, training, measured, seeds))
