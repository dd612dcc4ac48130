"""Every table and figure of the papers: which experiment regenerates it, and how its newest run went."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from posbench import paths
from posbench.errors import UserError, choices
from posbench.files.markdown import markdown
from posbench.late import pd
from posbench.report.collect import Entry, collect
from posbench.report.paper import AGREEMENT
from posbench.report.text import tally

PAPERS = {
    "yu2025": "Yu et al. 2025: Mitigate Position Bias in LLMs via Scaling a Single Hidden States Channel",
    "lpes": "LPES: Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
    "wu2025": "Wu et al. 2025: On the Emergence of Position Bias in Transformers",
    "behind_rope": "Behind RoPE: How Does Causal Mask Encode Positional Information?",
}
"""Title of each paper by its short name, in the order of all pages."""
HEADER = ("item", "what it shows", "command", "minutes", "status")
TRAINED = "training: hours ([results](results/wu2025/README.md))"


def captions() -> pd.DataFrame:
    """Every table and figure of the papers: paper, item, what it shows, and why there is no experiment."""
    return pd.read_csv(
        paths.EXPERIMENTS / "captions.csv", keep_default_na=False, dtype=str
    )


def experiments() -> dict[str, Mapping[str, Any]]:
    """The configs of posbench's experiments, by name."""
    files = {
        name: paths.EXPERIMENTS / f"{name}.yaml" for name in choices(paths.EXPERIMENTS)
    }
    return {
        name: yaml.safe_load(file.read_text(encoding="utf-8"))
        for name, file in files.items()
    }


def covering(
    every: Mapping[str, Mapping[str, Any]], paper: str, item: str
) -> list[str]:
    """The experiments that regenerate a table or figure."""
    told = {name: data["experiment"] for name, data in every.items()}
    return [
        n
        for n, e in told.items()
        if e.get("paper") == paper and item in e.get("covers", ())
    ]


def page(folder: Path) -> str:
    """Every table and figure of the papers as Markdown, with the newest runs in an outputs folder.

    Raises:
        UserError: There is no such folder.
    """
    if not folder.is_dir():
        raise UserError(
            "DIR",
            str(folder),
            "an outputs folder, with runs or empty",
            "posbench experiment=NAME",
        )
    every = experiments()
    parts = list[str]()
    found = {entry.name: entry for entry in collect(folder)}
    for paper, title in PAPERS.items():
        listed = captions()[lambda frame, paper=paper: frame["paper"] == paper]
        rows = [_row(every, found, paper, row) for row in listed.to_dict("records")]
        without = (listed["reason"] != "").sum()
        parts.append(
            f"## {title}\n\n{len(rows)} tables and figures, {without} without an experiment."
        )
        parts.append(markdown(HEADER, rows))
    return "\n\n".join(parts)


def trains(data: Mapping[str, Any]) -> bool:
    """Whether a config of an experiment trains networks, which takes hours."""
    return {"override study": "synthetic_training"} in data["defaults"]


def _row(
    every: Mapping[str, Mapping[str, Any]],
    found: Mapping[str, Entry],
    paper: str,
    caption: Mapping[str, str],
) -> Sequence[str]:
    """One line of the page; the experiments of one item stand below each other in its cells."""
    front = [caption["item"], caption["shows"]]
    names = covering(every, paper, caption["item"])
    if not names:
        return [*front, "none", "", caption["reason"]]
    lines = [_line(name, every[name], found.get(name)) for name in names]
    return [*front, *("<br>".join(cell) for cell in zip(*lines, strict=True))]


def _line(name: str, data: Mapping[str, Any], entry: Entry | None) -> Sequence[str]:
    weights = bool(data["experiment"].get("needs_weights"))
    command = f"posbench experiment={name}"
    minutes = ""
    status = "needs weights" if weights else TRAINED if trains(data) else "not run"
    if entry and entry.parts:
        command = re.sub(r" runtime\.outputs=\S+", "", entry.command)
        minutes = "" if entry.seconds is None else f"{entry.seconds / 60:.1f}"
        status = _status(entry)
    if entry and entry.faults:
        status += f"; unfinished or damaged: {len(entry.faults)}"
    return f"[`{command}`]({name}.yaml)", minutes, status


def _status(entry: Entry) -> str:
    """How the paper's claims fared; else how its cells did, where one of its models ran; else what we see."""
    findings = entry.findings
    cells = entry.cells
    told = (
        tally(findings.loc[findings["kind"] == "paper", "verdict"])
        if len(findings)
        else ""
    )
    if told or len(cells):
        return told or f"cells: {tally(cells['verdict'], AGREEMENT)}"
    return entry.seen or "measured"
