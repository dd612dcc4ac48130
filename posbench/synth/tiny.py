"""Train, study, check and package the embedded tiny models: commands of ``python -m posbench.synth.tiny``.

- ``--seed N --out DIR``: one training, one process, one thread.
- ``seeds --seeds 0-9 --out DIR``: a study over seeds; resumable.
- ``retrain --out DIR``: train until a seed meets the criteria, the shipped one first, then check it (``make tiny``).
- ``check DIR``: measure the criteria on the evaluation set; exit status 1 if one fails.
- ``package DIR --name tiny``: copy the shipped seed out of a study, with its model card.
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
from posbench.errors import UserError
from posbench.synth.recipe import SHIPPED, Recipe


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
    parser = argparse.ArgumentParser(prog="python -m posbench.synth.tiny", description="The embedded tiny models.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("train", help="one training (the default command)")
    one.add_argument("--seed", type=int, default=SHIPPED["tiny"], help="seed of weights and data (default: the shipped one)")
    one.add_argument("--out", type=Path, required=True, help="new directory for the model")
    one.add_argument("--threads", type=int, default=1, help="torch threads; the result depends on it")
    many = commands.add_parser("seeds", help="train and measure several seeds")
    many.add_argument("--seeds", type=parse_seeds, default=list(range(10)), help="e.g. 0-9 or 1,4,6")
    many.add_argument("--out", type=Path, required=True, help="directory of the study")
    many.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    again = commands.add_parser("retrain", help="train until a seed meets the criteria, the shipped one first; then check it")
    again.add_argument("--out", type=Path, required=True, help="directory of the trainings")
    again.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    again.add_argument("--attempts", type=int, default=6, help="seeds to try at most")
    check = commands.add_parser("check", help="measure a model on the evaluation set and compare with the criteria")
    check.add_argument("model", help="directory, or the name of a shipped model")
    check.add_argument("--json", type=Path, help="write the numbers here")
    pack = commands.add_parser("package", help="package data for a shipped model, from a study")
    pack.add_argument("study", type=Path, help="directory of the study")
    pack.add_argument("--name", choices=sorted(SHIPPED), required=True)
    pack.add_argument("--out", type=Path, default=paths.MODELS, help="directory that receives the model's folder")
    return parser


def run_check(model: str, json_file: Path | None = None) -> bool:
    """Measure a model directory (or a shipped name) on the evaluation set and print the criteria.

    Returns:
        Whether all criteria hold; always True for a shipped sibling other than ``tiny``, whose numbers are shown only.
    """
    from posbench.checkpoint import load
    from posbench.record import write_text
    from posbench.synth.checks import EVALUATION_SEED, criteria, measure

    folder = paths.MODELS / model if model in SHIPPED else Path(model)
    measured = measure(load(folder, name=folder.name, device="cpu"), EVALUATION_SEED)
    if json_file:
        write_text(json_file, json.dumps(measured) + "\n")
    report_only = folder.name in SHIPPED and folder.name != "tiny"
    table = Table(title=f"{folder.name}: {measured['n']} prompts of {measured['pairs']} pairs, one question per context")
    for column in ("criterion", "measured", "required", "reported" if report_only else "passed"):
        table.add_column(column)
    checks = criteria(measured)
    for check in checks:
        table.add_row(check.name, check.measured, check.required, "yes" if check.passed else "no")
    Console(width=110).print(table)
    return report_only or all(check.passed for check in checks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0].startswith("--") and given[0] != "--help":
        given = ["train", *given]
    args = _parser().parse_args(given)
    disable_progress_bar()
    try:
        if args.command == "train":
            from posbench.synth.train import save, train

            if args.out.exists():
                raise UserError(field="--out", value=str(args.out), allowed="a path that does not exist", hint="choose another")
            torch.set_num_threads(args.threads)
            save(train(Recipe(), args.seed), args.out)
        elif args.command == "seeds":
            from posbench.synth.study import run_seeds

            print(run_seeds(args.seeds, args.out, args.workers).to_string(index=False))
        elif args.command == "retrain":
            from posbench.synth.study import retrain

            folder = retrain(args.out, args.workers, args.attempts)
            print(f"model: {folder}")
            return 0 if run_check(str(folder)) else 1
        elif args.command == "check":
            return 0 if run_check(args.model, args.json) else 1
        else:
            from posbench.synth.package import package

            print(package(args.study, args.name, args.out))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
