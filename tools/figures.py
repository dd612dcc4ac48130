"""The committed figures, drawn again from committed tables.

python tools/figures.py redraw                  writes the galleries, the list of experiments/README.md, and all figures
                                                whose tables are committed
python tools/figures.py redraw --check          writes nothing; ends with status 1 where code and figure differ
python tools/figures.py redraw masks --check    the same for the figures of some experiments and studies
python tools/figures.py keep outputs            keeps the tables of all runs in an outputs folder, to redraw from
python tools/figures.py keep real --page experiments/results/qwen2_5_coder_0_5b.md    the same for a model's own page

A figure that cannot be drawn again, as its run was not kept, is named with the reason.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import lzma
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from PIL import Image

from posbench import paths
from posbench.errors import UserError, complain
from posbench.files.atomic import new_folder, write_bytes, write_text
from posbench.files.parse import Objects
from posbench.late import pd
from posbench.plots.base import save, sign
from posbench.plots.scores import accuracy_by_model
from posbench.plots.search import bases_figure
from posbench.report.collect import Entry, collect_entries
from posbench.report.folder import read_json
from posbench.report.page import compact_svg, render_run
from posbench.report.summaries import read_config_as_run
from posbench.report.sweep import render_sweep
from posbench.run.folder import (
    CONFIG,
    JOBS,
    OTHER_HARDWARE,
    PROVENANCE,
    STATUS,
    RunDir,
    open_run_dir,
    runs_in,
)
from posbench.stats import frames
from posbench.stats.findings import estimate_columns
from posbench.studies.base import Study
from posbench.studies.remedies import Remedies
from tools.pages import (
    RECORDS,
    between_marks,
    experiments_page,
    further_sections,
    gallery_page,
    read_entries,
)
from wu2025.synthetic_results import CELL_FILES, PUBLISHED_TABLES, SyntheticResults
from wu2025.synthetic_tables import compare_cells

ROOT = paths.EXPERIMENTS.parent


class Gallery(NamedTuple):
    """A page with figures of kept runs.

    Attributes:
        page: The page; a folder of its name beside it holds the figures.
        runs: The kept runs: a folder for each experiment or study, with :data:`RECORDS` and a folder of tables for
            each run.
        further: Pages whose figures and sentences stand there, too.
    """

    page: str
    runs: str
    further: tuple[str, ...] = ()


QWEN = "experiments/results/qwen2_5_coder_0_5b.md"
GALLERY = Gallery(
    "docs/gallery.md",
    "experiments/results/runs",
    further=("experiments/results/smollm2.md", QWEN),
)
EXPERIMENTS_PAGE = "experiments/README.md"
"""The list of all tables and figures, with the status of the kept runs of :data:`GALLERY`."""
GALLERIES = (Gallery(QWEN, QWEN.replace(".md", "/runs")), GALLERY)
"""All galleries of kept runs, each after those that stand in it."""
PLACED = {
    "docs/figures/qwen_lengths.svg": (
        "yu2025_fig2",
        "qwen2_5_coder_0_5b/lengths",
    ),
    "experiments/behind_rope/results/figures/behind_rope_layernorm_sqrt_dim.svg": (
        "behind_rope_fig7",
        "causal_mask-input_norm_sqrt_dim/layernorm",
    ),
    "experiments/behind_rope/results/figures/behind_rope_layernorm_unit.svg": (
        "behind_rope_fig7",
        "causal_mask-input_norm_unit/layernorm",
    ),
    "experiments/wu2025/results/figures/wu2025_bounds.svg": ("masks", "masks/bounds"),
    "experiments/wu2025/results/figures/wu2025_masks.svg": ("masks", "masks/theory"),
    "experiments/wu2025/results/figures/wu2025_rope.svg": ("masks", "masks/rope"),
}
"""Figures of kept runs outside the gallery: experiment or study, and label of the run with the name of the figure."""
NOT_KEPT = {
    "docs/figures/smollm2_": "runs of SmolLM2, up to hours each, were not kept",
    "experiments/results/smollm2/": "runs of SmolLM2, up to hours each, were not kept",
    "experiments/results/figures/": "runs on a GPU were not kept",
}
"""Why committed figures cannot be drawn again, by the beginning of their paths."""
PICTURES = (".png", ".svg")
PLAIN_BYTES = 20_000
"""Size of a table above which it is kept compressed, and with fewer digits."""
KEPT_DIGITS = 6
"""Digits of the numbers in a compressed table: a figure shows four at most."""
LONG_NUMBER = re.compile(rf"-?\d+\.\d{{{KEPT_DIGITS - 1},}}(?:e-?\d+)?")
UNUSED_COLUMNS = ("standard_error",)
"""Columns that no figure draws."""
KEPT_JSON = ("study.json", "experiment.json", "reference.json")
"""Files of a run that its figures or the gallery read, beside its tables."""
KEPT_FACTS = ("command", "started", "hardware", OTHER_HARDWARE, "dtype", "posbench")
"""Fields of the provenance that a page shows."""
KEPT_PACKAGES = ("torch", "transformers")
OWN_PATH = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|work|Users|mnt|data)/")
"""An absolute path of somebody's machine."""
MAX_SHIFT = 0.02
"""Points by which two drawings of one figure may differ: the last digits are those of a processor."""
MAX_SHADE = 2
"""Steps of 255 by which a colour inside a picture may differ."""
DRAWN_NUMBER = re.compile(r"(?<![\w#.])(-?\d+(?:\.\d+)?(?:e-\d+)?)(?!\w)")
EMBEDDED_PNG = re.compile(r"data:image/png;base64,([^\"']+)")


def main(argv: Sequence[str] | None = None) -> int:
    """Redraw or check the figures, or keep the tables of runs; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    redrawing = verbs.add_parser("redraw")
    redrawing.add_argument("names", metavar="NAME", nargs="*")
    redrawing.add_argument("--check", action="store_true")
    keeping = verbs.add_parser("keep")
    keeping.add_argument("folder", metavar="DIR", type=Path)
    keeping.add_argument(
        "--page", choices=[gallery.page for gallery in GALLERIES], default=GALLERY.page
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.verb == "keep":
            runs = {gallery.page: gallery.runs for gallery in GALLERIES}
            keep(arguments.folder, ROOT / runs[arguments.page])
            return 0
        return redraw(ROOT, arguments.names, check=arguments.check)
    except UserError as error:
        complain(error)
        return error.status


# Keeping


def keep(outputs: Path, kept: Path) -> None:
    """Keep what the figures of an outputs folder's newest runs are drawn from, in the place of what was kept before.

    Args:
        outputs: The folder.
        kept: Where it is kept: a folder for each experiment or study.

    Raises:
        UserError: The folder has no runs, or a file would carry a path of this machine into the repository.
    """
    entries = [entry for entry in collect_entries(outputs) if entry.results]
    if not entries:
        allowed = "a folder with finished runs"
        raise UserError("DIR", str(outputs), allowed, "posbench figures")
    for entry in entries:
        folder = kept / entry.name
        folder.parent.mkdir(parents=True, exist_ok=True)
        shown = [result.folder for result in entry.results]
        behind = {run.path for run in entry.runs}
        sweeps = [
            run
            for run in runs_in(outputs)
            if run.parents[1].name == entry.name
            and _names_of_jobs(run) & {path.name for path in behind}
        ]
        records = {
            f"{run.parent.name}/{run.name}": _record(run)
            for run in sorted({*shown, *behind, *sweeps})
        }
        text = json.dumps(records, indent=1, ensure_ascii=False)
        _need_no_path(folder / RECORDS, text)
        with new_folder(folder) as root:
            for run in shown:
                _keep_tables(run, root / run.name)
            write_text(root / RECORDS, f"{text}\n")
        print(folder)


def _names_of_jobs(sweep: Path) -> set[str]:
    """Names of the runs that a sweep's jobs made; none of a run."""
    jobs = read_json(sweep / JOBS, Objects) or []
    return {Path(job["folder"]).name for job in jobs if job["folder"]}


def _record(folder: Path) -> dict[str, Any]:
    """What is kept of a run, or of a sweep, beside its tables."""
    run = open_run_dir(folder)
    command = _as_anyone_types_it(run.command)
    if (folder / JOBS).is_file():
        jobs = read_json(folder / JOBS, Objects)
        for job in jobs:
            if job["folder"]:
                job["folder"] = "/".join(Path(job["folder"]).parts[-3:])
            job["overrides"] = [
                _as_anyone_types_it(text)
                for text in job["overrides"]
                if not text.startswith("runtime.outputs=")
            ]
        return {"command": command, "jobs": jobs}
    config = run.config()
    kept_config = {
        key: {"name": config[key]["name"]}
        for key in ("model", "task", "method")
        if config.get(key)
    }
    if config.get("method"):
        # Captions tell runs of one method apart by these.
        kept_config["method"] |= {
            key: value
            for key, value in read_config_as_run(run)["method"].items()
            if isinstance(value, int | float)
        }
    kept_config |= {
        key: config[key] for key in ("study", "search", "stages") if config.get(key)
    }
    facts = run.facts(PROVENANCE)
    provenance = {name: facts[name] for name in KEPT_FACTS if name in facts}
    packages = {name: facts["packages"].get(name) for name in KEPT_PACKAGES}
    return {
        "config": kept_config,
        "provenance": provenance | {"command": command, "packages": packages},
        "seconds": run.status().get("seconds"),
    }


def _as_anyone_types_it(command: str) -> str:
    """A command, or an override, without the outputs folder and without the folders of files that it names."""
    command = re.sub(r" runtime\.(?:outputs|log_every)=\S+", "", command)
    return re.sub(r"(?<=\.path=)/\S*/(?=[^/\s])", "", command)


def _keep_tables(run: Path, folder: Path) -> None:
    """Keep the tables of a run, large ones compressed."""
    folder.mkdir(parents=True)
    for file in sorted(run.glob("*.csv")):
        text = file.read_text(encoding="utf-8")
        _need_no_path(file, text)
        if len(text) <= PLAIN_BYTES:
            write_text(folder / file.name, text)
            continue
        data = lzma.compress(_what_figures_use(file.stem, text).encode())
        write_bytes(folder / f"{file.name}.xz", data)
    for file in (run / name for name in KEPT_JSON):
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            _need_no_path(file, text)
            write_text(folder / file.name, text)


def _what_figures_use(name: str, table: str) -> str:
    """The part of a large table that figures draw: of attention.csv the gold item, and no digits beyond sight."""
    frame = pd.read_csv(io.StringIO(table), dtype=str, keep_default_na=False)
    if name in ("attention", "attention_summary"):
        frame = frame[frame["item"] == frame["gold_position"]]
    frame = frame.drop(columns=[name for name in UNUSED_COLUMNS if name in frame])
    text: str = frame.to_csv(index=False, lineterminator="\n")
    return LONG_NUMBER.sub(lambda number: f"{float(number[0]):.{KEPT_DIGITS}g}", text)


def _need_no_path(file: Path, text: str) -> None:
    """Refuse a text with an absolute path of a machine, which belongs in no repository."""
    found = OWN_PATH.search(text)
    if found:
        around = text[found.start() : found.start() + 60].partition("\n")[0]
        hint = "make the run again with relative paths"
        raise UserError(str(file), around, "no path of this machine", hint)


# Drawing


@contextmanager
def drawn_runs(kept: Path, names: Sequence[str] = ()) -> Iterator[Path]:
    """A temporary outputs folder with kept runs and all their figures, drawn by today's code.

    Args:
        kept: The folder of kept runs.
        names: Of which experiments and studies; empty: all.

    Yields:
        The folder.
    """
    with tempfile.TemporaryDirectory() as scratch:
        outputs = Path(scratch).resolve()
        for records in sorted(kept.glob(f"*/{RECORDS}")):
            suite = records.parent.name
            if not names or suite in names:
                _draw_kept(records, outputs / suite)
        yield outputs


def _draw_kept(records: Path, suite: Path) -> None:
    """Make run folders of an experiment's or a study's kept runs, with their figures.

    Args:
        records: The file with what is kept beside the tables.
        suite: The folder that they go to.
    """
    file = paths.find_choice("experiment", suite.name)
    # Title, claims, and which figures stand for the paper's, are those of today.
    experiment = yaml.safe_load(file.read_text(encoding="utf-8")) if file else {}
    kept = read_json(records)
    # A sweep reads its runs, which come first.
    for name in sorted(kept, key=lambda name: "jobs" in kept[name]):
        record = kept[name]
        run = RunDir(suite / name)
        tables = _unpack(records.parent / run.path.name, run.path)
        if "jobs" in record:
            run.write_json(JOBS, record["jobs"])
            if tables:
                render_sweep(run.path, record["command"])
            run.seal(record["command"])
            continue
        config = record["config"]
        if experiment:
            config["experiment"] = {"name": suite.name, **experiment["experiment"]}
        write_text(run.path / CONFIG, yaml.safe_dump(config, sort_keys=False))
        run.write_facts(PROVENANCE, record["provenance"])
        status: dict[str, Any] = {"state": "done", "error": None, "stages": {}}
        if record["seconds"] is not None:
            status["seconds"] = record["seconds"]
        run.write_facts(STATUS, status)
        if tables:
            render_run(run.path)
        run.seal(record["provenance"]["command"])


def _unpack(tables: Path, run: Path) -> list[str]:
    """Write the kept tables of a run into its folder; return their names, none where it has none."""
    run.mkdir(parents=True)
    names = []
    for file in sorted(tables.glob("*")):
        data = file.read_bytes()
        if file.suffix == ".xz":
            data = lzma.decompress(data)
        names.append(file.name.removesuffix(".xz"))
        write_bytes(run / names[-1], data)
    return names


def draw_remedies(root: Path, scratch: Path) -> dict[str, Path]:
    """Draw the remedies on each of three models from its table; see :data:`FROM_TABLES`."""
    figures = {}
    for model in ("tiny", "smollm2", "qwen2_5_coder_0_5b"):
        table = pd.read_csv(root / f"experiments/results/remedies/{model}.csv")
        table["verdict"] = table["verdict"].fillna("")
        folder = scratch / model
        folder.mkdir(parents=True)
        drawn = _draw_study(Remedies(), {"remedies": table}, [model], folder)
        figures[f"docs/figures/{model}_remedies.svg"] = drawn["remedies"]
    return figures


def draw_bases(root: Path, scratch: Path) -> dict[str, Path]:
    """Draw the searches for a RoPE base on four models from their table; see :data:`FROM_TABLES`."""
    table = pd.read_csv(root / "experiments/results/rope_bases.csv")
    figure = bases_figure(table)
    sign(figure, ["four models"])
    return {"docs/figures/rope_bases.svg": save(figure, scratch / "bases")}


def draw_question_first(root: Path, scratch: Path) -> dict[str, Path]:
    """Draw the question first with a smaller base on two real models, their second draws; see :data:`FROM_TABLES`."""
    file = "experiments/results/remedies/question_first_and_rope_base.csv"
    table = pd.read_csv(root / file)
    draws = {("qwen2_5_coder_0_5b", 40, 6), ("smollm2", 20, 9)}
    keys = pd.MultiIndex.from_frame(table[["model", "pairs", "seed"]])
    rows = _as_metrics(table[keys.isin(draws)])
    changed = rows["method"] != frames.UNMODIFIED
    rows.loc[changed, "method"] = "the question first as well, and a smaller RoPE base"
    figure = accuracy_by_model(rows)
    models = list(rows["model"].unique())
    sign(figure, models)
    return {"docs/figures/question_first.svg": save(figure, scratch / "first")}


def draw_lengths(root: Path, scratch: Path) -> dict[str, Path]:
    """Draw the paper's prompt at two lengths on Qwen2.5-Coder from its table; see :data:`FROM_TABLES`."""
    table = pd.read_csv(
        root / "experiments/results/remedies/qwen2_5_coder_0_5b_uuid.csv"
    )
    rows = _as_metrics(table)
    question_first = "the question first as well"
    labels = {
        "question_first_and_last": question_first,
        "question_first_and_last-rope_base": f"{question_first}, and a RoPE base of 100,000",
    }
    rows["method"] = rows["method"].replace(labels)
    models = list(rows["model"].unique())
    rows["model"] = [
        f"{pairs} pairs, {share:.0f} % of the window"
        for pairs, share in zip(rows["pairs"], rows["share_of_window"], strict=True)
    ]
    figure = accuracy_by_model(rows)
    sign(figure, models)
    return {"docs/figures/qwen_uuid.svg": save(figure, scratch / "uuid")}


def draw_uuids(root: Path, scratch: Path) -> dict[str, Path]:
    """Draw SmolLM2 among more and more UUID pairs from its table; see :data:`FROM_TABLES`."""
    rows = _as_metrics(
        pd.read_csv(root / "experiments/results/remedies/smollm2_uuid.csv")
    )
    # Among more it answers the last pair alone, or none.
    rows = rows[rows["pairs"] <= 20].copy()
    models = list(rows["model"].unique())
    rows["model"] = [f"{pairs} UUID pairs" for pairs in rows["pairs"]]
    figure = accuracy_by_model(rows)
    sign(figure, models)
    return {"docs/figures/smollm2_uuid.svg": save(figure, scratch / "uuids")}


def _as_metrics(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of metrics.csv from a table of accuracies in percent over the gold position among key-value pairs."""
    columns = ("accuracy", "accuracy_low", "accuracy_high")
    named = dict(zip(columns, estimate_columns(), strict=True))
    rows = table.rename(columns=named)
    rows[estimate_columns()] /= 100
    positions = pd.to_numeric(rows["gold_position"], errors="coerce")
    depth = positions / (rows["pairs"] - 1)
    return rows.assign(task="kv_retrieval", metric="accuracy", depth=depth)


def draw_trainings(root: Path, scratch: Path) -> dict[str, Path]:
    """Draw the trainings of Wu et al. 2025 from their tables; see :data:`FROM_TABLES`."""
    folder = "experiments/wu2025/results"
    tables = {
        name: pd.read_csv(root / folder / f"{name}.csv", keep_default_na=False)
        for name in PUBLISHED_TABLES
    }
    tables["paper_cells"] = compare_cells(tables["gaps"], CELL_FILES)
    drawn = _draw_study(SyntheticResults(), tables, ["synthetic_results"], scratch)
    return {f"{folder}/{name}.svg": file for name, file in drawn.items()}


def _draw_study(
    study: Study,
    tables: Mapping[str, pd.DataFrame],
    models: Sequence[str],
    scratch: Path,
) -> dict[str, Path]:
    """Draw all figures of a study into a folder, signed as its page signs them.

    Args:
        study: The study.
        tables: Its tables by name.
        models: Names to print on the figures.
        scratch: The folder.

    Returns:
        The drawings by the figures' names.
    """
    drawn = {}
    for name, (figure, _) in study.figures(tables).items():
        sign(figure, models)
        drawn[name] = save(figure, scratch / name)
    return drawn


FROM_TABLES: dict[str, Callable[[Path, Path], dict[str, Path]]] = {
    "remedies": draw_remedies,
    "bases": draw_bases,
    "question_first": draw_question_first,
    "lengths": draw_lengths,
    "uuids": draw_uuids,
    "synthetic_results": draw_trainings,
}
"""By study, what draws its figures from tables that are committed as results of their own.

Arguments are the repository and a folder for the drawings; returned are these by the path of the committed figure.
"""


def placed_figures(entries: Sequence[Entry], names: Sequence[str]) -> dict[str, Path]:
    """The drawings of the figures of kept runs that stand outside the gallery, by path.

    Args:
        entries: The entries with all drawings.
        names: Of which experiments and studies; empty: all.

    Raises:
        UserError: A figure is not among them.
    """
    drawings = {
        (entry.name, f"{panel.result.label}/{panel.figure}"): panel.file
        for entry in entries
        for panel in entry.panels
    }
    files = {}
    for path, source in PLACED.items():
        if names and source[0] not in names:
            continue
        if source not in drawings:
            hint = "python tools/figures.py keep DIR, with a run of it"
            raise UserError(path, "/".join(source), "a figure of a kept run", hint)
        files[path] = drawings[source]
    return files


def draw_all(root: Path, names: Sequence[str] = ()) -> dict[str, str]:
    """Draw all committed figures that have their tables, the galleries' pages, and the list of experiments.

    Args:
        root: The repository.
        names: Of which experiments and studies, without the list; empty: all.

    Returns:
        The text of each file by its path in the repository.

    Raises:
        UserError: A name without tables, or a placed figure without its run.
    """
    suites = {
        file.parent.name
        for gallery in GALLERIES
        for file in (root / gallery.runs).glob(f"*/{RECORDS}")
    }
    unknown = [name for name in names if name not in {*suites, *FROM_TABLES}]
    if unknown:
        allowed = ", ".join(sorted({*suites, *FROM_TABLES}))
        hint = "python tools/figures.py keep DIR, with a run of it"
        raise UserError("NAME", unknown[0], allowed, hint)
    texts: dict[str, str] = {}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        drawings: dict[str, Path] = {}
        for name, draw in FROM_TABLES.items():
            if not names or name in names:
                drawings |= draw(root, scratch / name)
        entries: list[Entry] = []
        for gallery in GALLERIES:
            out = stack.enter_context(drawn_runs(root / gallery.runs, names))
            found = collect_entries(out)
            entries += found
            page = root / gallery.page
            further = further_sections(
                [root / path for path in gallery.further],
                page,
                {root / path: text for path, text in texts.items()},
            )
            # What the gallery shows of other runs stays.
            kept = read_entries(page, gallery.page)
            of_experiments = [entry for entry in found if entry.experiment]
            text, images = gallery_page(of_experiments, page.stem, further, kept)
            texts[gallery.page] = between_marks(page, "gallery", text)
            if gallery == GALLERY and not names:
                listed = experiments_page(out)
                texts[EXPERIMENTS_PAGE] = between_marks(
                    root / EXPERIMENTS_PAGE, "experiments", listed
                )
            for name, file in images.items():
                drawings[gallery.page.replace(".md", f"/{name}")] = file
        drawings |= placed_figures(entries, names)
        for path, file in drawings.items():
            texts[path] = compact_svg(file.read_text(encoding="utf-8"))
    return texts


# Comparing


def redraw(root: Path, names: Sequence[str] = (), *, check: bool = False) -> int:
    """Write the committed figures and their pages, or compare them with what today's code draws.

    Args:
        root: The repository.
        names: Of which experiments and studies; empty: all.
        check: Whether to compare alone.

    Returns:
        The exit status: 1 where a comparison finds a difference, or nothing is known of a committed picture.
    """
    texts = draw_all(root, names)
    different = [p for p, text in texts.items() if not same_file(root / p, text)]
    if not check:
        for path in different:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            write_text(root / path, texts[path])
        _remove_unshown(root)
    others = {} if names else without_tables(root, texts)
    for path, reason in others.items():
        print(f"{path}: cannot be drawn again: {reason}")
    verb = "differs from what the code draws" if check else "drawn"
    for path in different:
        print(f"{path}: {verb}")
    unknown = [path for path, reason in others.items() if reason == NO_SOURCE]
    print(
        f"{len(texts)} files: {len(texts) - len(different)} as they were, {len(different)} others"
    )
    if different and (note := _note_on_version(root)):
        print(note)
    return int(bool(unknown) or (check and bool(different)))


NO_SOURCE = "no page shows it and no table is known"


def _remove_unshown(root: Path) -> None:
    """Remove pictures of the galleries that their pages do not show."""
    for gallery in GALLERIES:
        page = root / gallery.page
        text = page.read_text(encoding="utf-8")
        for file in page.with_suffix("").glob("*"):
            is_shown = f"({page.stem}/{file.name})" in text
            if file.suffix in PICTURES and not is_shown:
                file.unlink()


def without_tables(root: Path, drawn: Mapping[str, str]) -> dict[str, str]:
    """The committed pictures that are not drawn, with the reason.

    Args:
        root: The repository.
        drawn: What is drawn, by path.
    """
    page = drawn[GALLERY.page]
    reasons = {}
    for folder in ("docs", "experiments"):
        for file in sorted((root / folder).rglob("*")):
            path = file.relative_to(root).as_posix()
            if file.suffix not in PICTURES or path in drawn:
                continue
            known = (text for start, text in NOT_KEPT.items() if path.startswith(start))
            reason = next(known, NO_SOURCE)
            if f"({path.removeprefix('docs/')})" in page:
                reason = "its run was not kept"
            reasons[path] = reason
    return reasons


def same_file(file: Path, text: str) -> bool:
    """Whether a committed file is what was drawn: a page the same text, a figure the same to the eye.

    Args:
        file: The committed file, which may be absent.
        text: What was drawn.
    """
    if not file.is_file():
        return False
    committed = file.read_text(encoding="utf-8")
    if committed == text:
        return True
    return file.suffix == ".svg" and same_drawing(committed, text)


def same_drawing(a: str, b: str) -> bool:
    """Whether two SVGs show the same: all marks, letters and colours, places up to :data:`MAX_SHIFT`.

    The last digits of places depend on the processor, and the bytes of a picture inside on the library that packed it.
    """
    pieces_a, pictures_a = _take_apart(a)
    pieces_b, pictures_b = _take_apart(b)
    # Texts and numbers take turns.
    if pieces_a[::2] != pieces_b[::2] or len(pictures_a) != len(pictures_b):
        return False
    places_a = np.array(pieces_a[1::2], dtype=float)
    places_b = np.array(pieces_b[1::2], dtype=float)
    if np.abs(places_a - places_b).max(initial=0) > MAX_SHIFT:
        return False
    return all(
        one.shape == other.shape and np.abs(one - other).max() <= MAX_SHADE
        for one, other in zip(pictures_a, pictures_b, strict=True)
    )


def _take_apart(svg: str) -> tuple[list[str], list[np.ndarray]]:
    """An SVG as texts and numbers in turns, and the colours of the pictures in it.

    The names that marks have in the file, which hang on the digits of places, become numbers in their order.
    """
    pictures = []
    for data in EMBEDDED_PNG.findall(svg):
        image = Image.open(io.BytesIO(base64.b64decode(data)))
        pictures.append(np.asarray(image.convert("RGBA"), dtype=int))
    text = EMBEDDED_PNG.sub("picture", svg)
    names = dict.fromkeys(re.findall(r'id="([^"]+)"', text))
    numbered = {name: f"name{index}" for index, name in enumerate(names)}
    text = re.sub(
        r'(?<=["#])[\w.-]+(?=["\)])', lambda m: numbered.get(m[0], m[0]), text
    )
    return DRAWN_NUMBER.split(text), pictures


def _note_on_version(root: Path) -> str:
    """Say that the installed matplotlib is not the one that drew the figures; empty where it is."""
    pinned = re.search(
        r"^matplotlib==(\S+)", (root / "constraints.txt").read_text(), re.MULTILINE
    )
    installed = version("matplotlib")
    if pinned and pinned[1] == installed:
        return ""
    drew = pinned[1] if pinned else "another version"
    return (
        f"These were drawn by matplotlib {installed}, the committed ones by {drew} (constraints.txt): letters and "
        "layout may differ for that alone."
    )


if __name__ == "__main__":
    sys.exit(main())
