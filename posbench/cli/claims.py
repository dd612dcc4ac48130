"""The claims of Yu et al. 2025 held against the embedded models: one table, made from the studies' own
verdicts.

``make claims``, or ``python -m posbench.cli.claims --help``. Runs that are there are not repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
import transformers
from rich.console import Console

import posbench
from posbench.cli import main as cli
from posbench.files.atomic import write_text
from posbench.files.hardware import hardware
from posbench.files.markdown import markdown
from posbench.report import page as report
from posbench.report.tables import findings_table

MODELS = ("tiny", "tiny_b", "tiny_nope", "tiny_alibi")
STUDIES = (
    "study=attention_to_gold study.pairs=[16,32,64]",
    "study=positional_channels",
    "study=chain",
    "experiment=yu2025_fig6",
)
TITLES = {
    "C1": "C1: attention is a micro-level expression of position bias",
    "C2": "C2: positional information in hidden states is a source of its own",
    "C3": "C3: positional channels exist, and the causal mask makes them",
    "C4": "C4: one channel changes the attention to an item",
    "C7": "C7: the scaling factor controls the bias",
    "Control": "Controls: what must not do it",
}
"""Claims of the paper that need no benchmark; C5 and C6 are its tables of accuracy and side effects."""


def collect(outputs: Path) -> pd.DataFrame:
    """The verdicts below a folder, of the newest run of each study on each model; columns of
    ``findings.csv``."""
    newest: dict[tuple[str, str], pd.DataFrame] = {}
    for file in sorted(outputs.glob("*/v*/*/findings.csv"), key=lambda file: file.stat().st_mtime):
        frame = report.read_csv(file)
        if frame is not None:
            newest[file.parts[-4], str(frame["model"].iloc[0])] = frame
    return pd.concat(newest.values(), ignore_index=True)


def verdict_of(rows: pd.DataFrame) -> str:
    """The verdict on one claim for one model; how many of several statistics hold."""
    holding = int((rows["verdict"] == "holds").sum())
    if len(rows) == 1 or holding in (0, len(rows)):
        return str(rows["verdict"].iloc[0])
    return f"{holding} of {len(rows)} hold"


def overview(findings: pd.DataFrame, models: Sequence[str]) -> str:
    """A row for each claim, a column for each model."""
    rows = []
    for claim, part in findings.groupby("claim", sort=False):
        own = [part[part["model"] == model] for model in models]
        rows.append([claim, *(verdict_of(each) if len(each) else "" for each in own)])
    return markdown(["claim", *models], rows)


def section(claim: str, rows: pd.DataFrame) -> str:
    """One claim: the statistic, its interval and the verdict for each model."""
    header, lines = findings_table(rows)
    names = [str(model) for model in rows["model"]]
    table = markdown(
        ["model", *header[1:]], [[model, *line[1:]] for model, line in zip(names, lines, strict=True)]
    )
    return f"### {claim}\n\n{table}"


def page(findings: pd.DataFrame, models: Sequence[str], commands: Sequence[str]) -> str:
    """The whole document."""
    kinds = (
        findings["claim"]
        .str.extract(r"^(C\d|Control|Negative control)", expand=False)
        .replace("Negative control", "Control")
    )
    place = {model: number for number, model in enumerate(models)}
    ordered = findings.assign(kind=kinds, place=findings["model"].map(place)).sort_values(
        "place", kind="stable"
    )
    parts, whole = [], []
    for kind, title in TITLES.items():
        rows = ordered[ordered["kind"] == kind]
        claims = list(rows["claim"].drop_duplicates())
        whole += claims
        parts += (
            [f"## {title}", *(section(claim, rows[rows["claim"] == claim]) for claim in claims)]
            if claims
            else []
        )
    versions = (
        f"posbench {posbench.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    ran = "\n".join(f"    {command}" for command in commands)
    shown = ordered.set_index("claim").loc[whole].reset_index()
    return f"""# Yu et al. 2025: claims and the embedded models

The models have about 0.1 million parameters: a claim that fails here may hold in a large model, and the other way round.
Every interval is a 95 % interval; a claim holds where the interval lies on its side. "Does not hold" is all else: the opposite,
or too little data to tell; the interval says which. `tiny_nope` has 16 pairs in a prompt, the others 32. Thresholds and layers
that were chosen after a first look, and what they decide, are in LOG.md. Made by `make claims`, on {hardware()};
{versions}.

{overview(shown, models)}

{(chr(10) * 2).join(parts)}

## How

The verdicts are those of these runs:

{ran}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the studies on every model and write the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--studies", nargs="+", default=list(STUDIES))
    parser.add_argument("--outputs", type=Path, default=Path("outputs/claims"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("docs/claims.md"))
    parser.add_argument("overrides", nargs="*", default=[], help="further key=value for every run")
    options = parser.parse_args(argv)
    commands, status = [], 0
    for study in options.studies:
        for model in options.models:
            args = [*study.split(), f"model={model}", *options.overrides]
            commands.append(f"posbench {' '.join(args)}")
            status = max(status, cli.main([*args, f"runtime.outputs={options.outputs}"]))
    if status:
        return status
    write_text(options.out, page(collect(options.outputs), options.models, commands))
    Console().print(f"written: {options.out}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
