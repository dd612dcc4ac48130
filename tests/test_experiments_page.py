"""The list of all captions, the experiments that cover them, and the page that is made of both."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from posbench import paths
from posbench.files.atomic import write_csv
from posbench.report.experiments import PAPERS, trains_networks
from posbench.run.folder import RunDir
from posbench.stats.findings import FINDING_COLUMNS
from tests.messages import assert_names, refused
from tools.pages import (
    experiments_page,
    find_experiments,
    read_captions,
    read_experiments,
)

TABLES_AND_FIGURES = {
    "yu2025": (6, 14),
    "lpes": (17, 6),
    "wu2025": (1, 18),
    "behind_rope": (0, 16),
}
"""Counted in the papers: they number their tables and figures from 1 without a gap."""
MAKE_GALLERY = "python tools/figures.py redraw"
CLAIM_ON_MODELS = re.compile(r"(.*?)(?: \(((?:all|both|tiny)[a-z_0-9, ]*)\))?")
README = paths.EXPERIMENTS / "README.md"


def test_every_table_and_figure_of_the_papers_is_listed_once() -> None:
    listed = [tuple(row) for row in read_captions()[["paper", "item"]].to_numpy()]
    wanted = {
        (paper, f"{kind} {number}")
        for paper, counts in TABLES_AND_FIGURES.items()
        for kind, count in zip(("Table", "Figure"), counts, strict=True)
        for number in range(1, count + 1)
    }
    assert set(listed) == wanted and len(listed) == len(wanted) == 78
    assert (
        set(PAPERS) == set(TABLES_AND_FIGURES)
        and (read_captions()["shows"] != "").all()
    )


def test_each_has_an_experiment_or_a_reason_and_no_experiment_covers_another() -> None:
    every = read_experiments()
    listed = read_captions()
    for row in listed.to_dict("records"):
        names = find_experiments(every, row["paper"], row["item"])
        assert bool(names) != bool(row["reason"]), (row["paper"], row["item"], names)
    known = set(zip(listed["paper"], listed["item"], strict=True))
    covers = {
        (e["paper"], item)
        for d in every.values()
        if (e := d["experiment"]).get("paper")
        for item in e.get("covers", ())
    }
    assert covers <= known, covers - known


def test_each_caption_has_panels_in_the_gallery_and_no_picture_is_shown_twice() -> None:
    page = (paths.EXPERIMENTS.parent / "docs/gallery.md").read_text(encoding="utf-8")
    images = paths.EXPERIMENTS.parent / "docs/gallery"
    wanted = set[str]()
    for name, config in read_experiments().items():
        experiment = config["experiment"]
        if experiment.get("needs_weights") or trains_networks(config):
            continue
        panels = experiment["panels"]
        assert set(experiment.get("covers", panels)) == set(panels), name
        # A picture of a run that was not kept stays what it was.
        kept = (paths.EXPERIMENTS / "results/runs" / name).is_dir()
        of_experiment = {
            f"{name}-{panel.replace('/', '-')}.{'svg' if kept else 'png'}"
            for names in panels.values()
            for panel in names
        }
        pictures = {(images / image).read_bytes() for image in of_experiment}
        assert len(pictures) == len(of_experiment), name
        wanted |= of_experiment
    assert set(re.findall(r"\(gallery/([^)]+)\)", page)) == wanted, MAKE_GALLERY
    assert {file.name for file in images.iterdir()} == wanted, MAKE_GALLERY


def test_a_claim_has_one_verdict_on_a_model_in_the_whole_gallery() -> None:
    page = (paths.EXPERIMENTS.parent / "docs/gallery.md").read_text(encoding="utf-8")
    verdicts: dict[tuple[str, str], set[str]] = {}
    for claim, models, verdict in _gallery_verdicts(page):
        for model in models:
            verdicts.setdefault((claim, model), set()).add(verdict)
    assert len(verdicts) > 50
    assert {key: v for key, v in verdicts.items() if len(v) > 1} == {}


def test_the_page_of_claims_says_what_the_gallery_says() -> None:
    gallery = (paths.EXPERIMENTS.parent / "docs/gallery.md").read_text(encoding="utf-8")
    in_gallery = {
        (claim, model): verdict.lower()
        for claim, models, verdict in _gallery_verdicts(gallery)
        for model in models
    }
    page = (paths.EXPERIMENTS / "yu2025/results/yu2025_claims.md").read_text(
        encoding="utf-8"
    )
    header, _, *rows = (line for line in page.splitlines() if line.startswith("| "))
    names = header.strip("| ").split(" | ")[1:]
    compared = 0
    for row in rows:
        claim, *verdicts = (cell.strip() for cell in row.strip("|").split("|"))
        if len(verdicts) != len(names) or "Control" in claim:
            continue
        for model, verdict in zip(names, verdicts, strict=True):
            shown = in_gallery.get((re.sub(r" \(Yu.*?\)$", "", claim), model))
            if shown and verdict in ("holds", "contradicted"):
                assert verdict == shown, (claim, model)
                compared += 1
    assert compared > 50


def _gallery_verdicts(page: str) -> Iterator[tuple[str, list[str], str]]:
    """Each claim that an entry lists, the models that it lists it on, and the verdict."""
    for entry in page.split("\n### ")[1:]:
        seen = re.search(r"\*We see:\* (.*)", entry)
        made = re.search(r"^`posbench[^;]*; ([a-z_, ]+);", entry, re.MULTILINE)
        if not seen or not made:
            continue
        for verdict, claims in re.findall(
            r"(Holds|Contradicted|Inconclusive): (.*?)\.(?= [A-Z][a-z]+: |$)", seen[1]
        ):
            for claim in claims.split("; "):
                text, listed = CLAIM_ON_MODELS.fullmatch(claim).groups()
                models = (listed or "").split(", ")
                if not listed or listed.startswith(("all", "both")):
                    models = made[1].split(", ")
                yield text, models, verdict


def _told(text: str) -> list[list[str]]:
    """What the page says whatever ran: headings, counts, and of a line item, words and command."""
    lines = [
        line
        for line in text.splitlines()
        if line.startswith(("|", "## ")) or line.endswith(" without an experiment.")
    ]
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")][:3] for line in lines
    ]


def test_the_readme_lists_every_caption(tmp_path: Path) -> None:
    """Made of runs that no test repeats, but its captions and experiments are those of today."""
    text = README.read_text(encoding="utf-8")
    assert _told(text) == _told(experiments_page(tmp_path)), MAKE_GALLERY


def test_the_readme_has_minutes_and_verdicts_of_the_kept_runs() -> None:
    cells_of = dict[str, tuple[str, str]]()
    for line in README.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|") or ".yaml)" not in line:
            continue
        commands, minutes, statuses = (
            cell.strip().split("<br>") for cell in line.split("|")[3:6]
        )
        for command, *cells in zip(commands, minutes, statuses, strict=True):
            (name,) = re.findall(r"experiment/(\w+)\.yaml", command)
            assert cells_of.setdefault(name, tuple(cells)) == tuple(cells), name
    judged = 0
    for records in paths.EXPERIMENTS.glob("results/runs/*/runs.json"):
        name = records.parent.name
        if name not in cells_of:
            continue
        minutes, status = cells_of[name]
        runs = json.loads(records.read_text(encoding="utf-8")).values()
        seconds = [run["seconds"] for run in runs if "jobs" not in run]
        assert float(minutes) == pytest.approx(sum(seconds) / 60, abs=0.051), name
        files = list(records.parent.glob("*/findings.csv"))
        findings = pd.concat([pd.DataFrame({"kind": []}), *map(pd.read_csv, files)])
        of_paper = findings[findings["kind"] == "paper"]
        if len(of_paper):
            told = re.findall(r"(\d+) ([a-z ]+)", status)
            words = ["holds" if word == "hold" else word for _, word in told]
            counts = dict(zip(words, (int(count) for count, _ in told), strict=True))
            assert counts == of_paper["verdict"].value_counts().to_dict(), name
            judged += 1
    assert judged > 20, MAKE_GALLERY


def test_the_small_tables_of_lpes_are_those_of_the_kept_runs() -> None:
    page = (paths.EXPERIMENTS / "lpes/results/lpes_tiny.md").read_text(encoding="utf-8")
    section = page.partition("## As experiments")[2].partition("\n## ")[0]
    shown = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if re.match(r"\| \d", line)
    ]
    wanted = []
    for table, swept in (
        (6, "search.curve"),
        (15, "search.weights"),
        (16, "search.curve"),
    ):
        runs = paths.EXPERIMENTS / f"results/runs/lpes_table{table}"
        (file,) = runs.glob("*/summary.csv*")
        summary = pd.read_csv(file, dtype={"gold_position": str})
        whole = summary[summary["gold_position"] == "all"]
        for setting, rows in whole.groupby(swept, sort=False):
            by_name = rows.set_index(["method", "metric"])
            text = str(setting).strip("[]").replace(",", ", ")
            cells = [str(table), text.replace("bezier", "Bezier")]
            for name in (
                ("layer_scaling", "accuracy"),
                ("none", "accuracy"),
                ("layer_scaling", "accuracy_difference"),
            ):
                row = by_name.loc[name]
                sign = "+" if name[1].endswith("difference") else ""
                numbers = 100 * row[["value", "ci_low", "ci_high"]].astype(float)
                value, low, high = numbers
                cells.append(f"{value:{sign}.1f} ({low:.1f} to {high:.1f})")
            wanted.append([*cells, str(row["n"])])
    assert shown == wanted
    # The differences between settings are those that the runs were judged by.
    claims = pd.read_csv(paths.EXPERIMENTS / "lpes/results/lpes_claims.csv")
    of_tables = claims["study"].isin(["lpes_table6", "lpes_table15", "lpes_table16"])
    for numbers in claims.loc[of_tables & (claims["verdict"] != "holds"), "value"]:
        value, low, high = re.findall(r"-?[\d.]+", numbers)
        interval = rf"{value.lstrip('-')} points (less )?\({low} to {high}\)"
        short = rf"{value} \({low} to {high}\)"
        assert re.search(f"{interval}|{short}", section), numbers


def _run(
    folder: Path, seconds: float | None, *verdicts: str, model: str = "tiny"
) -> Path:
    """A finished run that says no more than the page reads."""
    run = RunDir(folder, "x")
    folder.mkdir(parents=True)
    command = f"posbench experiment={model} runtime.outputs=/tmp/x"
    facts = {"state": "done", "stages": {}} | (
        {} if seconds is None else {"seconds": seconds}
    )
    run.write_facts("status.json", facts)
    (folder / "config.yaml").write_text("{}")
    one: dict[str, Any] = dict.fromkeys(FINDING_COLUMNS, 0.0) | {
        "model": model,
        "claim": "c",
        "statistic": "s",
    }
    rows = [one | {"kind": "paper", "verdict": verdict} for verdict in verdicts]
    write_csv(
        folder / "findings.csv",
        pd.DataFrame([*rows, one | {"kind": "control", "verdict": "holds"}]),
    )
    run.seal(command)
    return folder


def _line(folder: Path, name: str = "yu2025_fig7") -> list[str]:
    """Command, minutes and status of an experiment's line on the page."""
    link = f"(yu2025/experiment/{name}.yaml)"
    (line,) = (line for line in experiments_page(folder).splitlines() if link in line)
    command, *told = [cell.strip() for cell in line.split("|")[3:6]]
    return [command.removesuffix(f"]{link}").removeprefix("["), *told]


def test_of_a_sweep_times_and_verdicts_of_all_jobs_count(tmp_path: Path) -> None:
    version = tmp_path / "yu2025_fig7/v001"
    jobs = [
        _run(version / "a", 60, "holds"),
        _run(version / "b", 75, "contradicted", "holds", model="b"),
    ]
    sweep = version / "sweep__model__x"
    sweep.mkdir()
    told = pd.concat([pd.read_csv(job / "findings.csv") for job in jobs])
    write_csv(sweep / "findings_summary.csv", told)
    listed = [
        {
            "folder": f"elsewhere/yu2025_fig7/v001/{job.name}",
            "overrides": [f"model={job.name}"],
        }
        for job in jobs
    ]
    RunDir(sweep).write_json("jobs.json", listed)
    RunDir(sweep).seal("posbench experiment=tiny")
    command, minutes, verdicts = _line(tmp_path)
    assert (command, minutes) == ("`posbench experiment=tiny`", "2.2")
    assert_names(verdicts, "2 hold", "1 contradicted")
    failed = {"folder": None, "overrides": ["model=c"], "status": 1}
    RunDir(sweep).write_json("jobs.json", [*listed, failed])
    RunDir(sweep).seal("posbench experiment=tiny")
    assert_names(_line(tmp_path)[2], "2 hold", "1 contradicted", "unfinished", "1")


def test_the_page_shows_the_newest_version_of_an_experiment(tmp_path: Path) -> None:
    assert _line(tmp_path)[1:] == [
        "",
        "not run",
    ] and "training: hours" in experiments_page(tmp_path)
    _run(tmp_path / "yu2025_fig7/v001/a", 30, "contradicted")
    _run(tmp_path / "yu2025_fig7/v002/a", 90, "holds", "holds")
    assert _line(tmp_path) == ["`posbench experiment=tiny`", "1.5", "2 hold"]
    _run(tmp_path / "yu2025_fig7/v003/a", None, "holds")
    assert _line(tmp_path)[1:] == ["", "1 holds"], (
        "no minutes where the run recorded none"
    )


def test_damage_and_a_folder_that_is_none_are_told(tmp_path: Path) -> None:
    folder = _run(tmp_path / "yu2025_fig7/v001/a", 90, "holds")
    (folder / "findings.csv").write_text("model\n")
    minutes, verdicts = _line(tmp_path)[1:]
    assert minutes == ""
    assert_names(verdicts, "not run", "damaged", "1")
    with refused(
        "DIR",
        str(tmp_path / "none"),
        allowed="outputs folder",
        hint="posbench experiment=NAME",
    ):
        experiments_page(tmp_path / "none")
