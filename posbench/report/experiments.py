"""Every table and figure of the papers: which experiment regenerates it, and how its newest run went."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from posbench import paths
from posbench.errors import UserError, choices
from posbench.files.markdown import markdown
from posbench.report.folder import read_csv, read_json
from posbench.report.paper import AGREEMENT, cells, with_subsets
from posbench.report.text import tally
from posbench.run.folder import PROVENANCE, RunDir, checked

PAPERS = {
    "yu2025": "Yu et al. 2025, Mitigate Position Bias in LLMs via Scaling a Single Hidden States Channel",
    "lpes": "LPES, Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
    "wu2025": "Wu et al. 2025, On the Emergence of Position Bias in Transformers",
    "behind_rope": "Behind RoPE: How Does Causal Mask Encode Positional Information?",
}
HEADER = ("item", "what it shows", "experiment", "needs weights", "command", "minutes", "status")
TRAINED = "training: hours ([results](results/wu2025/README.md))"


@dataclass(frozen=True)
class Newest:
    """The newest finished run of an experiment, or of its sweep, whose ``jobs`` are then its runs."""

    folder: Path
    jobs: tuple[Path, ...]

    @property
    def command(self) -> str:
        """The command that made it, without the folder that it wrote to."""
        made = str(RunDir(self.jobs[0]).facts(PROVENANCE).get("command", ""))
        return re.sub(r" runtime\.outputs=\S+", "", made)

    @property
    def minutes(self) -> str:
        """Wall time of all its jobs, sessions added up; empty where a run of an older version has none."""
        seconds = [RunDir(job).status().get("seconds") for job in self.jobs]
        return "" if None in seconds else f"{sum(filter(None, seconds)) / 60:.1f}"

    @property
    def status(self) -> str:
        """How the paper's claims fared; else how its cells did, where one of its models ran."""
        folders = dict.fromkeys((self.folder, *self.jobs))
        found = [frame for folder in folders if (frame := read_csv(folder / "findings.csv")) is not None]
        verdicts = pd.concat(found) if found else pd.DataFrame({"kind": [], "verdict": []})
        if told := tally(verdicts.loc[verdicts["kind"] == "paper", "verdict"]):
            return told
        compared = [_cells(job) for job in self.jobs]
        told = tally(pd.concat(compared), AGREEMENT)
        others = any(read_json(job / "reference.json") for job in self.jobs)
        return (
            f"cells: {told}"
            if told
            else f"measured{'; the numbers of the paper are of other models' * others}"
        )


def captions() -> pd.DataFrame:
    """Every table and figure of the papers: paper, item, what it shows, and why there is no experiment."""
    return pd.read_csv(paths.EXPERIMENTS / "captions.csv", keep_default_na=False, dtype=str)


def experiments() -> dict[str, Mapping[str, Any]]:
    """The configs of posbench's experiments, by name."""
    files = {name: paths.EXPERIMENTS / f"{name}.yaml" for name in choices(paths.EXPERIMENTS)}
    return {name: yaml.safe_load(file.read_text(encoding="utf-8")) for name, file in files.items()}


def covering(every: Mapping[str, Mapping[str, Any]], paper: str, item: str) -> list[str]:
    """The experiments that regenerate a table or figure."""
    told = {name: data["experiment"] for name, data in every.items()}
    return [n for n, e in told.items() if e.get("paper") == paper and item in e.get("covers", ())]


def newest(folder: Path, name: str) -> Newest | None:
    """The newest finished sweep of an experiment below an outputs folder; without one, its newest run.

    Raises:
        UserError: A file of it is damaged.
    """
    done = sorted(folder.glob(f"{name}/v*/*/DONE"), key=lambda file: file.stat().st_mtime)
    made = list(_finished(file.parent for file in done))
    last = next((each for each in reversed(made) if each.jobs != (each.folder,)), made[-1] if made else None)
    for path in dict.fromkeys((last.folder, *last.jobs)) if last else ():
        checked(path)
    return last


def _finished(folders: Iterator[Path]) -> Iterator[Newest]:
    for folder in folders:
        listed = read_json(folder / "jobs.json")
        jobs = [folder] if listed is None else [folder.parents[1] / _place(job) for job in listed]
        if all((job / "DONE").is_file() for job in jobs):
            yield Newest(folder, tuple(jobs))


def _place(job: Mapping[str, Any]) -> str:
    """Version and name of a job's run; of one that failed, what is no folder."""
    return "/".join(Path(job["folder"] or "failed").parts[-2:])


def _cells(run: Path) -> pd.Series:
    """Verdicts on the paper's cells that a run compares."""
    metrics, reference = read_csv(run / "metrics.csv"), read_json(run / "reference.json")
    if metrics is None or not reference:
        return pd.Series(dtype=str)
    return cells(with_subsets(metrics, read_csv(run / "subsets.csv")), reference)[0]["verdict"]


def page(folder: Path) -> str:
    """Every table and figure of the papers as Markdown, with the newest runs below an outputs folder.

    Raises:
        UserError: There is no such folder, or a file of a run is damaged.
    """
    if not folder.is_dir():
        raise UserError(
            "DIR", str(folder), "an outputs folder, with runs or empty", "posbench experiment=NAME"
        )
    every, parts = experiments(), list[str]()
    found = {name: newest(folder, name) for name in every}
    for paper, title in PAPERS.items():
        listed = captions()[lambda frame, paper=paper: frame["paper"] == paper]
        rows = [_row(every, found, paper, row) for row in listed.to_dict("records")]
        without = (listed["reason"] != "").sum()
        parts.append(f"## {title}\n\n{len(rows)} tables and figures, {without} without an experiment.")
        parts.append(markdown(HEADER, rows))
    return "\n\n".join(parts)


def _row(
    every: Mapping[str, Mapping[str, Any]],
    found: Mapping[str, Newest | None],
    paper: str,
    caption: Mapping[str, str],
) -> Sequence[str]:
    """One line of the page; the experiments of one item stand below each other in its cells."""
    front = [caption["item"], caption["shows"]]
    lines = [_line(name, every[name], found[name]) for name in covering(every, paper, caption["item"])]
    if not lines:
        return [*front, "none", "", "", "", caption["reason"]]
    return [*front, *("<br>".join(cell) for cell in zip(*lines, strict=True))]


def _line(name: str, data: Mapping[str, Any], last: Newest | None) -> Sequence[str]:
    weights = bool(data["experiment"].get("needs_weights"))
    link = f"[{name}]({name}.yaml)"
    if last:
        return link, "yes" if weights else "no", f"`{last.command}`", last.minutes, last.status
    trained = {"override study": "synthetic_training"} in data["defaults"]
    status = "needs weights" if weights else TRAINED if trained else "not run"
    return link, "yes" if weights else "no", f"`posbench experiment={name}`", "", status
