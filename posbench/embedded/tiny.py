"""Train, study, check and package the embedded tiny models: commands of ``python -m posbench.embedded.tiny``.

- ``--seed N --out DIR``: one training, one process, one thread.
- ``seeds --seeds 0-9 --out DIR``: a study over seeds; resumable.
- ``retrain --out DIR``: train until a seed meets the criteria, the shipped one first, then check it (``make
  tiny``).
- ``check DIR``: measure the criteria on the evaluation set; exit status 1 if one fails.
- ``package DIR --name tiny``: copy the shipped seed out of a study, with its model card.

``--model tiny_nope`` or ``--model tiny_alibi`` takes the recipe of a sibling without rotary embedding
(default: ``tiny``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from posbench import paths
from posbench.embedded.recipe import RECIPES, SHIPPED
from posbench.errors import UserError


def parse_seeds(text: str) -> list[int]:
    """Seeds from text such as ``0-9`` or ``1,4,6-8``.

    Raises:
        ValueError: The text is not of that form.
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    if not seeds:
        raise ValueError(f"no seeds in {text!r}")
    return sorted(set(seeds))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m posbench.embedded.tiny", description="The embedded tiny models."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("train", help="one training (the default command)")
    one.add_argument("--seed", type=int, help="seed of weights and data (default: the shipped one)")
    one.add_argument("--out", type=Path, required=True, help="new directory for the model")
    one.add_argument("--threads", type=int, default=1, help="torch threads; the result depends on it")
    many = commands.add_parser("seeds", help="train and measure several seeds")
    many.add_argument("--seeds", type=parse_seeds, default=list(range(10)), help="e.g. 0-9 or 1,4,6")
    many.add_argument("--out", type=Path, required=True, help="directory of the study")
    many.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    again = commands.add_parser(
        "retrain", help="train until a seed meets the criteria, the shipped one first; then check it"
    )
    again.add_argument("--out", type=Path, required=True, help="directory of the trainings")
    again.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    again.add_argument("--attempts", type=int, default=6, help="seeds to try at most")
    for command in (one, many, again):
        command.add_argument(
            "--model", choices=sorted(RECIPES), default="tiny", help="whose recipe (default: tiny)"
        )
    check = commands.add_parser(
        "check", help="measure a model on the evaluation set and compare with the criteria"
    )
    check.add_argument("model", help="directory, or the name of a shipped model")
    check.add_argument("--json", type=Path, help="write the numbers here")
    pack = commands.add_parser("package", help="package data for a shipped model, from a study")
    pack.add_argument("study", type=Path, help="directory of the study")
    pack.add_argument("--name", choices=sorted(SHIPPED), required=True)
    pack.add_argument(
        "--out", type=Path, default=paths.MODELS, help="directory that receives the model's folder"
    )
    return parser


def run_check(model: str, json_file: Path | None = None) -> bool:
    """Measure a model directory (or a shipped name) on the evaluation set and print the criteria.

    Returns:
        Whether all criteria hold that are required; of the shipped ``tiny_b`` none is, and of models without
        rotary embedding those marked so.
    """
    from posbench.embedded.checks import EVALUATION_SEED, criteria, load_trained, measure
    from posbench.embedded.train import TRAINING_FILE
    from posbench.files.atomic import write_text

    folder = paths.MODELS / model if model in SHIPPED else Path(model)
    recipe = json.loads((folder / TRAINING_FILE).read_text())["recipe"]
    longest = max(stage["pairs"][1] for stage in recipe["stages"])
    measured = measure(load_trained(folder), EVALUATION_SEED, pairs=recipe["measured_pairs"], longest=longest)
    if json_file:
        write_text(json_file, json.dumps(measured) + "\n")
    table = Table(
        title=f"{folder.name}: {measured['n']} prompts of {measured['pairs']} pairs, one question per context"
    )
    for column in ("criterion", "measured", "required", "passed"):
        table.add_column(column)
    passed = True
    for check in criteria(measured):
        needed = folder.name != "tiny_b" and (recipe["positions"] == "rope" or check.of_every_model)
        passed &= check.passed or not needed
        table.add_row(
            check.name, check.measured, check.required if needed else "-", "yes" if check.passed else "no"
        )
    Console(width=110).print(table)
    return passed


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0].startswith("--") and given[0] != "--help":
        given = ["train", *given]
    args = _parser().parse_args(given)
    disable_progress_bar()
    try:
        if args.command == "train":
            from posbench.embedded.train import save, train

            if args.out.exists():
                raise UserError("--out", str(args.out), "a path that does not exist", "choose another")
            torch.set_num_threads(args.threads)
            seed = SHIPPED[args.model] if args.seed is None else args.seed
            save(train(RECIPES[args.model], seed), args.out)
        elif args.command == "seeds":
            from posbench.embedded.study import run_seeds

            print(run_seeds(args.seeds, args.out, args.workers, RECIPES[args.model]).to_string(index=False))
        elif args.command == "retrain":
            from posbench.embedded.study import retrain

            folder = retrain(args.out, args.workers, args.attempts, args.model)
            print(f"model: {folder}")
            return 0 if run_check(str(folder)) else 1
        elif args.command == "check":
            return 0 if run_check(args.model, args.json) else 1
        else:
            from posbench.embedded.package import package

            print(package(args.study, args.name, args.out))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
