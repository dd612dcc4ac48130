"""The runs of an outputs folder to show, and their results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from posbench import paths
from posbench.files.parse import CORRECT_FILE, Objects, read_yaml
from posbench.late import DataFrame, pd
from posbench.report import tables
from posbench.report.folder import (
    CAPTIONS,
    config_group,
    name_in_config,
    read_csv,
    read_json,
    sweep_runs,
)
from posbench.report.glance import describe_measurements
from posbench.report.index import differing_settings
from posbench.report.paper import (
    count_agreement,
    paper_cells,
    paper_table,
    with_subsets,
)
from posbench.report.summaries import read_summaries
from posbench.report.sweep import setting_columns, sweep_table
from posbench.report.tables import Table
from posbench.report.text import headline, list_decided_claims
from posbench.run.folder import (
    CONFIG,
    JOBS,
    PROVENANCE,
    RunDir,
    open_run_dir,
    runs_in,
)

MAX_RUNS = 24
"""Runs that are shown of an experiment without a sweep, the newest."""


@dataclass(frozen=True)
class Result:
    """A run or a sweep that is shown, under a label unique in its experiment."""

    folder: Path
    label: str

    @cached_property
    def figures(self) -> dict[str, str]:
        """Caption of each figure by its file name without suffix, in page order."""
        captions = read_json(self.folder / "figures" / CAPTIONS) or {}
        names = sorted(file.stem for file in (self.folder / "figures").glob("*.svg"))
        order = [*captions, *names]
        return {
            name: str(captions.get(name, "")) for name in sorted(names, key=order.index)
        }

    @property
    def is_sweep(self) -> bool:
        """Whether it is a sweep."""
        return (self.folder / JOBS).is_file()

    @property
    def setting(self) -> str:
        """What its label adds to the model's name; empty for a sweep."""
        if self.is_sweep:
            return ""
        return self.label.removeprefix(self.folder.name.split("__")[0]).lstrip("-_")

    def read_table(self, name: str) -> pd.DataFrame | None:
        """One of its tables, with a column `run`; None where it has none."""
        frame = read_csv(self.folder / f"{name}.csv")
        return None if frame is None else self._with_run(frame)

    def _with_run(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Rows with a column `run` in front, which a sweep's rows have already."""
        if "run" in frame:
            return frame
        run = pd.Series(self.label, index=frame.index, name="run")
        return pd.concat([run, frame], axis=1)

    @cached_property
    def metrics(self) -> pd.DataFrame | None:
        """Its scores, one row per number."""
        return self.read_table("summary" if self.is_sweep else "metrics")

    @cached_property
    def scores(self) -> Scores | None:
        """Table of scores for readers and the sentence on them; None for a run or sweep without scores."""
        metrics = self.metrics
        if metrics is None:
            return None
        if self.is_sweep:
            header, rows, sentence = sweep_table(metrics, setting_columns(metrics))
            table = pd.DataFrame(rows, columns=header)
            return Scores(table.drop(columns="run", errors="ignore"), sentence)
        header, rows = tables.position_table(metrics)
        table = self._with_run(pd.DataFrame(rows, columns=header))
        # The sentence says it where a server did not read all prompts whole.
        delivery = open_run_dir(self.folder).facts(PROVENANCE).get("delivery")
        return Scores(table, headline(metrics, delivery))


class Panel(NamedTuple):
    """A figure of a result.

    Attributes:
        covers: The tables and figures of the paper that it shows, as ``Figure 3, Figure 4``; empty for others.
        result: Whose figure it is.
        figure: Its name.
    """

    covers: str
    result: Result
    figure: str

    @property
    def caption(self) -> str:
        """Its caption, after the paper's figures that it covers."""
        caption = self.result.figures[self.figure]
        return f"{self.covers}: {caption}" if self.covers else caption

    @property
    def file(self) -> Path:
        """The picture."""
        return self.result.folder / "figures" / f"{self.figure}.svg"


class Scores(NamedTuple):
    """Scores as a table of text, and the result in a sentence."""

    table: DataFrame
    sentence: str


@dataclass
class Entry:
    """An experiment, or a suite of runs without one.

    Attributes:
        name: Its folder in the outputs.
        results: The runs and sweeps that are shown.
        faults: Why other runs cannot be shown.
    """

    name: str
    results: list[Result] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @cached_property
    def runs(self) -> list[RunDir]:
        """The folders of the single runs behind the results; of a sweep, those of its jobs."""
        folders: list[Path] = []
        for result in self.results:
            folders += sweep_runs(result.folder) if result.is_sweep else [result.folder]
        return [
            open_run_dir(folder)
            for folder in dict.fromkeys(folders)
            if (folder / CONFIG).is_file()
        ]

    @cached_property
    def experiment(self) -> Mapping[str, Any]:
        """The block ``experiment`` of the newest run's config, else of its YAML: title, paper, claims, figures to show.

        It is empty for runs that belong to no experiment.
        """
        file = paths.find_choice("experiment", self.name)
        if self.runs:
            config = self.runs[0].config()
        elif file:
            config = read_yaml(file, hint=CORRECT_FILE)
        else:
            config = {}
        return config_group(config, "experiment")

    @cached_property
    def panels(self) -> list[Panel]:
        """All figures, each picture once: first those that the experiment names for its captions, in that order.

        A picture that covers several captions (parts of a paper's figure) names all of them.
        """
        # The paper's captions by (index of the result, name of the figure).
        covers: dict[tuple[int, str], list[str]] = {}
        for item, names in (self.experiment.get("panels") or {}).items():
            for name in names:
                key = self._find_figure(name)
                # Panels that name one figure of several models find the same one in a run of a single model.
                if key and item not in covers.setdefault(key, []):
                    covers[key].append(item)
        for index, result in enumerate(self.results):
            for figure in result.figures:
                covers.setdefault((index, figure), [])
        # Runs that differ in nothing visible draw the same bytes.
        first_with_picture: dict[bytes, tuple[int, str]] = {}
        for key, items in covers.items():
            index, figure = key
            picture = Panel("", self.results[index], figure).file.read_bytes()
            first = first_with_picture.setdefault(picture, key)
            if first != key:
                covers[first] += [item for item in items if item not in covers[first]]
        return [
            Panel(", ".join(covers[index, figure]), self.results[index], figure)
            for index, figure in first_with_picture.values()
        ]

    def _find_figure(self, name: str) -> tuple[int, str] | None:
        """Find the figure that a panel names as ``tiny/maps``, label of the result and name of the figure.

        Returns:
            Index of the result and name of the figure; without a result of that label the first one with such a figure,
            None if no result has one.
        """
        label, _, figure = name.rpartition("/")
        with_figure = [
            index
            for index, result in enumerate(self.results)
            if figure in result.figures
        ]
        for index in with_figure:
            if self.results[index].label == label:
                return index, figure
        return (with_figure[0], figure) if with_figure else None

    @property
    def command(self) -> str:
        """The commands that make the results, one a line."""
        commands = [open_run_dir(result.folder).command for result in self.results]
        return "\n".join(dict.fromkeys(filter(None, commands)))

    @cached_property
    def origin(self) -> str:
        """Where the runs come from, in one line: models, versions, hardware, precision of the weights, and dates."""
        models = [name_in_config(run.config(), "model") for run in self.runs]
        provenances = [run.facts(PROVENANCE) for run in self.runs]
        provenances = [provenance for provenance in provenances if provenance]
        texts = [", ".join(dict.fromkeys(filter(None, models)))]
        for provenance in provenances:
            packages = provenance.get("packages", {})
            versions = {"posbench": provenance.get("posbench"), **packages}
            texts.append(
                ", ".join(
                    f"{name} {versions[name]}"
                    for name in ("posbench", "torch", "transformers")
                    if versions.get(name)
                )
            )
        for provenance in provenances:
            texts.append(str(provenance.get("hardware", "")))
            dtype = provenance.get("dtype", "float32")
            if dtype != "float32":
                texts.append(f"weights in {dtype}")
        days = sorted(
            str(provenance.get("started", ""))[:10] for provenance in provenances
        )
        first_and_last = dict.fromkeys([*days[:1], *days[-1:]])
        texts.append(" to ".join(filter(None, first_and_last)))
        return "; ".join(dict.fromkeys(filter(None, texts)))

    @cached_property
    def cells(self) -> pd.DataFrame:
        """Numbers of the paper beside ours, a row each, from :func:`posbench.report.paper.paper_cells`.

        It is empty where the experiment has no numbers of the paper, or none were measured.
        """
        frames = []
        for result in self.results:
            reference = read_json(result.folder / "reference.json", Objects) or []
            if result.metrics is None or not reference:
                continue
            name = "subsets_summary" if result.is_sweep else "subsets"
            metrics = with_subsets(result.metrics, result.read_table(name))
            frames.append(paper_cells(metrics, reference)[0])
        return _concat(frames)

    @cached_property
    def findings(self) -> pd.DataFrame:
        """Verdicts on claims of all results, as rows of findings.csv; a sweep's own come before its runs'.

        Where results of one model have settings, a first column names them.
        """
        names_settings = any(result.setting for result in self.results)
        frames = []
        for result in self.results:
            for name in ("findings", "findings_summary"):
                frame = result.read_table(name)
                if frame is not None:
                    if names_settings:
                        frame.insert(0, "setting", result.setting)
                    frames.append(frame)
        return _concat(frames)

    @property
    def summary(self) -> str:
        """The result in words: scores and claims, else the gains and times measured."""
        texts = []
        for result in self.results:
            if result.scores:
                texts.append(self.label_prefix(result) + result.scores.sentence)
        if len(self.findings):
            texts.append(list_decided_claims(self.findings))
        if len(self.cells):
            texts.append(count_agreement(self.cells))
        if texts:
            return " ".join(texts)
        for result in self.results:
            text = describe_measurements(result.folder)
            if text:
                texts.append(self.label_prefix(result) + text)
        return " ".join(texts)

    def label_prefix(self, result: Result) -> str:
        """`name: ` where there are several results, see :attr:`names`."""
        return f"{self.names[result.label]}: " if len(self.results) > 1 else ""

    @cached_property
    def names(self) -> dict[str, str]:
        """What texts call the results, by label.

        A label that is a folder's name ends in a hash, which tells nobody anything: there the model and the settings
        that differ stand for it, if these are not those of another result.
        """
        hashed = [
            result
            for result in self.results
            if result.label == result.folder.name and not result.is_sweep
        ]
        summaries = read_summaries([result.folder for result in hashed])
        settings_of_runs = differing_settings(summaries)
        readable_names = []
        for summary, settings in zip(summaries, settings_of_runs, strict=True):
            texts = [f"{key.partition('.')[2]}={settings[key]}" for key in settings]
            parts = filter(None, [summary.name("model"), *texts])
            readable_names.append(", ".join(parts))
        names = {result.label: result.label for result in self.results}
        for result, name in zip(hashed, readable_names, strict=True):
            if readable_names.count(name) == 1:
                names[result.label] = name
        return names

    @property
    def tables(self) -> dict[str, tuple[pd.DataFrame, Table]]:
        """The tables for readers by kind: ``cells`` (the paper's numbers), ``claims``, ``scores``, as far as there are.

        Each is a frame with a row per number, for the CSV, and a header with rows of text, for pages.
        """
        by_kind: dict[str, tuple[pd.DataFrame, Table]] = {}
        if len(self.cells):
            by_kind["cells"] = (self.cells, paper_table(self.cells))
        if len(self.findings):
            labelled = self.findings
            if "setting" in labelled:
                # A run's label names its model and setting.
                labelled = labelled.assign(model=labelled["run"])
            claims = tables.findings_table(labelled, models=True)
            by_kind["claims"] = (self.findings, claims)
        score_tables = [result.scores.table for result in self.results if result.scores]
        if score_tables:
            metrics = [r.metrics for r in self.results if r.metrics is not None]
            text = _concat(score_tables).fillna("")
            by_kind["scores"] = (
                _concat(metrics),
                (list(text), text.to_numpy().tolist()),
            )
        return by_kind


def _concat(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def collect_entries(folder: Path) -> list[Entry]:
    """Return the newest runs of each experiment below a folder: outputs, an experiment's folder, or one version's.

    Of each experiment: the newest version with an intact run; there the newest sweep if
    it has a page, else the runs of the newest sweep, else the newest runs. Damaged and
    unfinished runs are left out and named in the entry's ``faults``. Runs that the sweep of
    another entry shows, as one over studies does, are left out, too.
    """
    suites: dict[str, list[Path]] = {}
    for run in runs_in(folder):
        suites.setdefault(run.parents[1].name, []).append(run)
    entries = [
        _newest_version(name, suites[name])
        for name in sorted(suites, key=natural_order)
    ]
    # A sweep over studies or tasks lies beside the runs of the first.
    runs_elsewhere = {
        run.path
        for entry in entries
        for run in entry.runs
        if run.path.parents[1].name != entry.name
    }
    for index, entry in enumerate(entries):
        # The runs of this suite that such a sweep shows.
        shown_there = {r for r in runs_elsewhere if r.parents[1].name == entry.name}
        results = [r for r in entry.results if r.folder.resolve() not in shown_there]
        entries[index] = Entry(entry.name, results, entry.faults)
    return [entry for entry in entries if entry.results or entry.faults]


def natural_order(name: str) -> list[Any]:
    """Sort key by which fig2 comes before fig10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _newest_version(name: str, folders: Sequence[Path]) -> Entry:
    """Return the entry of an experiment's newest version with something to show.

    Args:
        name: The experiment.
        folders: Folders of all its runs and sweeps, in all versions.

    Returns:
        The entry; its faults are those of this version and of all newer ones, which have nothing to show.
    """
    versions = {folder: int(folder.parent.name[1:]) for folder in folders}
    sweeps = {
        # Settings that change no result share a run.
        folder: list(dict.fromkeys(sweep_runs(folder)))
        for folder in folders
        if (folder / JOBS).is_file()
    }
    results: list[Result] = []
    faults: list[str] = []
    for version in sorted(set(versions.values()), reverse=True):
        in_version = [folder for folder in folders if versions[folder] == version]
        # A sweep may lie in another version than some of its runs.
        for sweep, runs in sweeps.items():
            if any(versions.get(run) == version for run in runs):
                in_version.append(sweep)
        entry = _entry(name, list(dict.fromkeys(in_version)), sweeps)
        faults += entry.faults
        results = entry.results
        if results:
            break
    return Entry(name, results, list(dict.fromkeys(faults)))


@dataclass
class _Inspection:
    """Finds out which runs can be shown.

    Attributes:
        faults: Reasons against showing runs and sweeps, by folder; empty without a fault so far.
    """

    faults: dict[Path, str] = field(default_factory=dict)

    def check_configs(self, folders: Iterable[Path]) -> None:
        """Look whether runs are finished and have their config undamaged."""
        for folder in folders:
            if folder not in self.faults:
                self.faults[folder] = _fault(folder, (CONFIG,))

    def intact(self, folders: Iterable[Path], at_most: int | None = None) -> list[Path]:
        """Return the first ``at_most`` folders, in their order, that are finished and undamaged; all if it is None.

        Faults are remembered by folder, so that each is read once; folders after the last one needed are not read.
        """
        intact_folders: list[Path] = []
        for folder in folders:
            if len(intact_folders) == at_most:
                break
            self.faults[folder] = self.faults.get(folder) or _fault(folder)
            if not self.faults[folder]:
                intact_folders.append(folder)
        return intact_folders


def _entry(
    name: str, folders: Sequence[Path], sweeps: Mapping[Path, Sequence[Path]]
) -> Entry:
    """Return the entry of one version of an experiment: its newest intact sweep, else its newest runs.

    Only the runs that are shown are checked in every file.

    Args:
        name: Name of the experiment or suite.
        folders: Runs and sweeps of the version.
        sweeps: The runs of every sweep.
    """
    inspection = _Inspection()
    inspection.check_configs(folders)
    # A sweep is shown rather than single runs.
    newest_sweeps = sorted(
        (folder for folder in folders if folder in sweeps),
        key=lambda folder: (folder / JOBS).stat().st_mtime,
        reverse=True,
    )
    notes: list[str] = []
    jobs: list[Any] = []
    intact_sweeps = inspection.intact(newest_sweeps, at_most=1)
    if intact_sweeps:
        sweep = intact_sweeps[0]
        jobs = read_json(sweep / JOBS, Objects)
        notes += _failed_jobs(jobs)
        runs = [run for run in sweeps[sweep] if (run / CONFIG).is_file()]
        inspection.check_configs(runs)
        # A sweep of studies may have no figures of its own.
        has_page = any((sweep / "figures").glob("*.svg"))
        chosen = [sweep] if has_page else inspection.intact(runs)
    else:
        runs = [folder for folder in folders if folder not in sweeps]
        newest_runs = sorted(
            (run for run in runs if not inspection.faults[run]),
            key=_started,
            reverse=True,
        )
        chosen = sorted(inspection.intact(newest_runs, at_most=MAX_RUNS))
        num_older = sum(not inspection.faults[run] for run in runs) - len(chosen)
        if num_older:
            notes.append(
                f"{num_older} older runs of {name} are left out: posbench ls runs"
            )
    faults = [fault for fault in inspection.faults.values() if fault]
    return Entry(name, _label_results(chosen, jobs), faults + notes)


def _failed_jobs(jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The jobs of a sweep that made no run."""
    return [
        f"failed: {' '.join(job['overrides'])} (exit status {job['status']})"
        for job in jobs
        if not job["folder"]
    ]


def _started(folder: Path) -> str:
    """When a run started, in ISO format."""
    return str(open_run_dir(folder).facts(PROVENANCE).get("started", ""))


def _fault(folder: Path, files: Sequence[str] | None = None) -> str:
    """Why a run cannot be shown; empty for an intact, finished run.

    Args:
        folder: A run or a sweep.
        files: The files to check; None checks all.
    """
    run = open_run_dir(folder)
    name = f"{folder.parent.name}/{folder.name}"
    command = run.command or "the command that made it"
    if not run.done:
        error = run.status().get("error")
        reason = f" ({error})" if error else ""
        return f"{name} is unfinished{reason}; go on with: {command}"
    damaged = run.damaged(files)
    if damaged:
        return f"{name} is damaged ({', '.join(damaged[:4])}); make it again: {command}"
    return ""


def _label_results(
    folders: Sequence[Path], jobs: Sequence[Mapping[str, Any]]
) -> list[Result]:
    """Results labelled by model, or by study where no model takes part.

    Where that is not unique, the settings that a sweep varies are added, or the task, or the folder's name is used
    instead.

    Args:
        folders: Runs or sweeps.
        jobs: Jobs of the sweep that made the runs, if any.
    """
    names = [folder.name.split("__")[0] for folder in folders]
    # Of jobs that share a run the first one names it.
    overrides = {
        Path(job["folder"]).name: job["overrides"]
        for job in reversed(jobs)
        if job["folder"]
    }
    common: set[str] = set()
    if overrides:
        common = set.intersection(*map(set, overrides.values()))
    tasks = [_task_name(folder) for folder in folders]
    results = []
    for folder, name, task in zip(folders, names, tasks, strict=True):
        label = name
        if names.count(name) > 1:
            varied = [
                re.sub(r"[^\w.-]+", "_", override.split(".", 1)[-1])
                for override in overrides.get(folder.name, ())
                if override not in common and override != f"model={name}"
            ]
            if not varied and len(set(tasks)) == len(tasks):
                varied = [task]
            label = "-".join([name, *varied]) if varied else folder.name
        results.append(Result(folder, label))
    return results


def _task_name(folder: Path) -> str:
    """The task that a run asked; empty where it asked none, and of a sweep."""
    if not (folder / CONFIG).is_file():
        return ""
    return name_in_config(open_run_dir(folder).config(), "task")
