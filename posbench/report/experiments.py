"""Every table and figure of the papers: which experiment regenerates it, and how its newest run went."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from posbench import paths
from posbench.errors import UserError, choices
from posbench.files.markdown import markdown
from posbench.late import pd
from posbench.report.collect import Entry, collect_entries
from posbench.report.paper import AGREEMENT
from posbench.report.text import tally_verdicts

PAPERS = {
    "yu2025": "Yu et al. 2025: Mitigate Position Bias in LLMs via Scaling a Single Hidden States Channel",
    "lpes": "LPES: Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
    "wu2025": "Wu et al. 2025: On the Emergence of Position Bias in Transformers",
    "behind_rope": "Behind RoPE: How Does Causal Mask Encode Positional Information?",
}
"""Title of each paper by its short name, in the order of all pages."""
HEADER = ("item", "what it shows", "command", "minutes", "status")
TRAINING_STATUS = "training: hours ([results](results/wu2025/README.md))"


def read_captions() -> pd.DataFrame:
    """Every table and figure of the papers: paper, item, what it shows, and why there is no experiment."""
    return pd.read_csv(
        paths.EXPERIMENTS / "captions.csv", keep_default_na=False, dtype=str
    )


def read_experiments() -> dict[str, Mapping[str, Any]]:
    """The configs of posbench's experiments, by name."""
    configs = {}
    for name in choices(paths.EXPERIMENTS):
        text = (paths.EXPERIMENTS / f"{name}.yaml").read_text(encoding="utf-8")
        configs[name] = yaml.safe_load(text)
    return configs


def find_experiments(
    configs: Mapping[str, Mapping[str, Any]], paper: str, item: str
) -> list[str]:
    """Names of the experiments that regenerate a table or figure of a paper."""
    names = []
    for name, config in configs.items():
        experiment = config["experiment"]
        if experiment.get("paper") == paper and item in experiment.get("covers", ()):
            names.append(name)
    return names


def experiments_page(folder: Path) -> str:
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
    configs = read_experiments()
    entries = {entry.name: entry for entry in collect_entries(folder)}
    items = read_captions()
    parts = list[str]()
    for paper, title in PAPERS.items():
        of_paper = items[items["paper"] == paper]
        rows = [
            _row(configs, entries, paper, item) for item in of_paper.to_dict("records")
        ]
        num_without = (of_paper["reason"] != "").sum()
        parts.append(
            f"## {title}\n\n{len(rows)} tables and figures, {num_without} without an experiment."
        )
        parts.append(markdown(HEADER, rows))
    return "\n\n".join(parts)


def trains_networks(data: Mapping[str, Any]) -> bool:
    """Whether a config of an experiment trains networks, which takes hours."""
    return {"override study": "synthetic_training"} in data["defaults"]


def _row(
    configs: Mapping[str, Mapping[str, Any]],
    entries: Mapping[str, Entry],
    paper: str,
    item: Mapping[str, str],
) -> list[str]:
    """One line of the page; several experiments of an item share its cells.

    Args:
        configs: Config of each experiment by name.
        entries: The newest runs of each experiment by name.
        paper: Short name of the paper.
        item: A row of :func:`read_captions`.
    """
    names = find_experiments(configs, paper, item["item"])
    if not names:
        return [item["item"], item["shows"], "none", "", item["reason"]]
    cells = [_cells(name, configs[name], entries.get(name)) for name in names]
    commands, minutes, statuses = zip(*cells, strict=True)
    return [
        item["item"],
        item["shows"],
        "<br>".join(commands),
        "<br>".join(minutes),
        "<br>".join(statuses),
    ]


def _cells(
    name: str, config: Mapping[str, Any], entry: Entry | None
) -> tuple[str, str, str]:
    """Command, minutes and status of an experiment."""
    command = f"posbench experiment={name}"
    minutes = ""
    if config["experiment"].get("needs_weights"):
        status = "needs weights"
    elif trains_networks(config):
        status = TRAINING_STATUS
    else:
        status = "not run"
    if entry and entry.results:
        command = re.sub(r" runtime\.outputs=\S+", "", entry.command)
        status = _status(entry)
        if entry.seconds is not None:
            minutes = f"{entry.seconds / 60:.1f}"
    if entry and entry.faults:
        status += f"; unfinished or damaged: {len(entry.faults)}"
    return f"[`{command}`]({name}.yaml)", minutes, status


def _status(entry: Entry) -> str:
    """How the paper's claims fared, else its cells, else what was measured."""
    findings = entry.findings
    if len(findings):
        claims = tally_verdicts(findings.loc[findings["kind"] == "paper", "verdict"])
        if claims:
            return claims
    if len(entry.cells):
        return f"cells: {tally_verdicts(entry.cells['verdict'], AGREEMENT)}"
    return entry.summary or "measured"
