"""Pages of the documentation that are made from code or from runs, as Markdown.

python tools/pages.py families           which architectures work, from the code
python tools/pages.py data               the fields of a file of your own, from the code
python tools/pages.py claims DIR         verdicts on papers' claims, of all studies in a folder of runs
python tools/pages.py run DIR            one run: its sentence, text and tables
python tools/pages.py tables DIR         the tables of one run, each between the marks of its name in FILE
python tools/pages.py experiments DIR    every table and figure of the papers, with the status of its newest run
python tools/pages.py gallery DIR        the figures of all runs; they go to a folder beside FILE, which has its name

--out FILE writes the page between the marks <!-- PAGE --> and <!-- /PAGE --> of a file:

python tools/pages.py gallery outputs --out my_gallery.md

--beside PATH adds a further model, and may be given for several: to a gallery what the model's own page shows, which is
made first; to claims those of its runs in a folder of their own, or of the CSV file that its own page of claims leaves
beside itself. DIR may be such a file, too, or a folder of kept runs (python tools/figures.py keep); --paper takes the
claims of one paper:

python tools/pages.py gallery real --out experiments/results/smollm2.md
python tools/pages.py gallery outputs --beside experiments/results/smollm2.md --out my_gallery.md
python tools/pages.py claims outputs --beside experiments/results/smollm2.csv \\
  --beside experiments/results/qwen2_5_coder_0_5b.csv --out experiments/yu2025/results/yu2025_claims.md
python tools/pages.py claims experiments/results/runs --paper lpes --beside experiments/results/smollm2.csv \\
  --beside experiments/results/qwen2_5_coder_0_5b.csv --out experiments/lpes/results/lpes_claims.md

docs/gallery.md and experiments/README.md show the runs that are kept in the repository: python tools/figures.py redraw.

--keep leaves what a gallery or a page of claims shows of experiments that DIR has no runs of: those of a large model
take hours, and need not all be made again, nor on one machine. Each says what it was made with.

python tools/pages.py gallery real --keep --out experiments/results/smollm2.md
python tools/pages.py claims real --keep --out experiments/results/smollm2.md
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from posbench import paths
from posbench.errors import UserError, complain
from posbench.files.atomic import write_text
from posbench.files.markdown import markdown
from posbench.files.parse import Objects
from posbench.late import pd
from posbench.model.families import FAMILIES
from posbench.report.collect import Entry, Panel, collect_entries, natural_order
from posbench.report.experiments import PAPERS, trains_networks
from posbench.report.folder import read_csv, read_json
from posbench.report.gallery import HEADINGS, heading, paper_of, paper_shows
from posbench.report.page import compact_svg, read_run
from posbench.report.paper import AGREEMENT
from posbench.report.tables import findings_table, format_p_value, papers_first
from posbench.report.text import count_verdicts, tally_verdicts
from posbench.run.folder import JOBS, open_undamaged
from posbench.schema import describe_type
from posbench.stats.findings import ALPHA, holm
from posbench.tasks.own_data import KINDS, Record

COUNTING_RULE = (
    "Each claim counts once on a model, however many statistics, channels or figures were asked; where they differ, it "
    "counts as contradicted where one contradicts it, else as its weakest. p values are Holm-corrected over all claims "
    "(controls apart) that this page shows of a model; in brackets what a claim was asked of where that may be one of "
    "several."
)
RECORDS = "runs.json"
"""What is kept of each run beside its tables, by version and name of the run; see tools/figures.py."""
MAX_PANELS = 3
EXPERIMENTS_HEADER = ("item", "what it shows", "command", "minutes", "status")
TRAINING_STATUS = "training: hours ([results](wu2025/results/README.md))"


def main(argv: Sequence[str] | None = None) -> int:
    """Print a page, or write it to a file; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pages = [*FROM_CODE, "claims", *FROM_RUNS, "tables", "gallery"]
    parser.add_argument("page", choices=pages)
    parser.add_argument("folder", metavar="DIR", nargs="?", type=Path)
    parser.add_argument("--out", metavar="FILE", type=Path)
    parser.add_argument(
        "--beside", metavar="PATH", type=Path, action="append", default=[]
    )
    parser.add_argument("--paper", choices=[*PAPERS])
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args(argv)
    from_code = arguments.page in FROM_CODE
    if from_code and arguments.folder:
        parser.error(f"{arguments.page} takes no DIR: it is made from the code")
    if not from_code and not arguments.folder:
        parser.error(f"{arguments.page} takes a DIR: a run, or a folder of runs")
    if arguments.page == "tables" and not arguments.out:
        parser.error("tables needs --out FILE, whose marks name the tables")
    if arguments.beside and arguments.page not in ("claims", "gallery"):
        parser.error("--beside goes with claims or gallery")
    if arguments.paper and arguments.page != "claims":
        parser.error("--paper goes with claims")
    if arguments.beside and arguments.page == "gallery" and not arguments.out:
        parser.error("--beside needs --out FILE, from which links to the page start")
    if arguments.keep and not (
        arguments.page in ("claims", "gallery") and arguments.out
    ):
        parser.error("--keep goes with claims or gallery, and --out FILE")
    try:
        if arguments.page == "tables":
            fill_tables(arguments.folder, arguments.out)
        else:
            make_page(
                arguments.page,
                arguments.folder,
                arguments.out,
                arguments.beside,
                paper=arguments.paper,
                keep=arguments.keep,
            )
    except UserError as error:
        complain(error)
        return error.status
    return 0


def make_page(
    name: str,
    folder: Path | None,
    out: Path | None,
    beside: Sequence[Path] = (),
    *,
    paper: str | None = None,
    keep: bool = False,
) -> None:
    """Print a page, or write it between its marks in a file.

    Args:
        name: Name of the page.
        folder: The run or the folder of runs that it is made from; None where that is the code.
        out: The file; None prints the page.
        beside: Further models: their pages for ``gallery`` in a file, for ``claims`` what :func:`read_claims` reads.
        paper: The paper whose claims are shown; None: all.
        keep: Whether a gallery or claims in a file keep what they show of experiments that the folder has no runs of.

    Raises:
        UserError: A folder that holds nothing to show, or a file of other text without marks.
    """
    images: dict[str, Path] = {}
    claims = None
    if folder is None:
        page = FROM_CODE[name]()
    elif name == "gallery":
        image_folder = out.stem if out else name
        further = further_sections(beside, out) if beside and out else None
        kept = read_entries(out, "--keep") if out and keep else {}
        page, images = gallery_page(
            collect_entries(folder), image_folder, further, kept
        )
    elif name == "claims":
        claims = read_claims(folder)
        if paper:
            claims = claims[claims["study"].str.startswith(f"{paper}_")]
            if claims.empty:
                allowed = f"a paper of the claims in {folder}"
                hint = f"posbench figures paper={paper}"
                raise UserError("--paper", paper, allowed, hint)
        if out and keep and out.with_suffix(".csv").is_file():
            claims = with_kept(claims, read_claims(out.with_suffix(".csv")))
        page = claims_page(claims, *map(read_claims, beside))
    else:
        page = FROM_RUNS[name](folder)
    if out is None:
        print(page)
        return
    text = between_marks(out, name, page)
    if images:
        _write_images(out.with_suffix(""), images, text)
    if claims is not None:
        write_text(out.with_suffix(".csv"), claims.to_csv(index=False))
    write_text(out, text)
    print(out)


def fill_tables(folder: Path, out: Path) -> None:
    """Write each table of a run between the marks of its name in a file, where the file has such marks.

    Raises:
        UserError: The file has marks for none of the run's tables, or the same ones twice.
    """
    open_undamaged(folder)
    text = out.read_text(encoding="utf-8") if out.is_file() else ""
    csv_files = sorted(folder.glob("*.csv"))
    named = [file for file in csv_files if f"<!-- {file.stem} -->" in text]
    if not named:
        allowed = f"a file with the marks of a table of {folder}"
        hint = "put <!-- NAME --> and <!-- /NAME --> where NAME.csv shall stand"
        raise UserError("--out", str(out), allowed, hint)
    for file in named:
        table = pd.read_csv(file, dtype=str, keep_default_na=False)
        page = markdown(list(table), table.to_numpy().tolist())
        write_text(out, between_marks(out, file.stem, page))
    print(out)


def _write_images(folder: Path, images: Mapping[str, Path], text: str) -> None:
    """Write figures to a folder under their names there, and remove the images that its page does not show."""
    folder.mkdir(exist_ok=True)
    for name, figure in images.items():
        svg = figure.read_text(encoding="utf-8")
        write_text(folder / name, compact_svg(svg))
    for file in folder.iterdir():
        is_picture = file.suffix in (".png", ".svg")
        if is_picture and f"({folder.name}/{file.name})" not in text:
            file.unlink()


def between_marks(file: Path, name: str, page: str) -> str:
    """The text of a file with a page between its marks.

    Args:
        file: The file; without text it becomes the marks and the page.
        name: Name of the page in the marks.
        page: The page, as Markdown.

    Raises:
        UserError: The file has text without these marks, or with several of them.
    """
    old = file.read_text(encoding="utf-8") if file.is_file() else ""
    start = f"<!-- {name} -->"
    end = f"<!-- /{name} -->"
    marked = f"{start}\n\n{page}\n\n{end}"
    if not old:
        return f"{marked}\n"
    new, count = re.subn(f"{start}.*?{end}", lambda _: marked, old, flags=re.DOTALL)
    if count != 1:
        allowed = f"a new file, or one with {start} and {end} once"
        hint = "put the marks where the page shall stand"
        raise UserError("--out", str(file), allowed, hint)
    return new


CLAIM_COLUMNS = (
    "study",
    "command",
    "kind",
    "model",
    "claim",
    "verdict",
    "value",
    "statistic",
    "p (Holm)",
    "p",
    "n",
    "holds if",
    "note",
)
"""Columns of a table of claims; all of them are text, as a page shows it. `p (Holm)` is adjusted within its study."""


def read_claims(source: Path) -> pd.DataFrame:
    """The claims that studies judged, with :data:`CLAIM_COLUMNS`, in the order of their studies.

    Args:
        source: A folder of runs, of which the newest of each study on each model counts, by what the claims are
            asked of where they name that; a folder of kept runs, which all count; or the CSV file of a page of claims.

    Raises:
        UserError: There are none.
    """
    if source.is_file():
        return pd.read_csv(source, dtype=str, keep_default_na=False)
    newest: dict[tuple[str, str, str, str], pd.DataFrame] = {}
    for study, run, command, findings in _judged_runs(source):
        # Findings of theory alone have no model; a sweep may hold several.
        findings = findings.fillna({"model": "no model"})
        asked_of = findings["claim"].map(_subject)
        for (model, subject), of_model in findings.groupby(
            ["model", asked_of], sort=False
        ):
            of_model = papers_first(of_model)
            header, rows = findings_table(of_model, models=True)
            newest[study, str(model), str(subject), run] = pd.DataFrame(
                rows, columns=header
            ).assign(
                study=study,
                command=command,
                kind=of_model["kind"].to_numpy(),
                p=[_format_p(p) for p in of_model["p"]],
            )
    if not newest:
        allowed = "a folder of runs of studies"
        raise UserError("DIR", str(source), allowed, "posbench study=chain")
    tables = [newest[key] for key in sorted(newest, key=_by_study)]
    claims = pd.concat(tables, ignore_index=True)
    return claims.reindex(columns=list(CLAIM_COLUMNS)).astype(object).fillna("")


def _judged_runs(source: Path) -> Iterator[tuple[str, str, str, pd.DataFrame]]:
    """The findings of the runs in a folder, the oldest run first.

    Args:
        source: A folder of runs, or one of kept runs.

    Yields:
        Study, name of a kept run, empty of others, command, and findings.
    """
    for records in sorted(source.glob(f"*/{RECORDS}")):
        for name, record in read_json(records).items():
            run = Path(name).name
            findings = read_csv(records.parent / run / "findings.csv")
            if findings is not None:
                command = record.get("command") or record["provenance"]["command"]
                yield records.parent.name, run, command, findings
    files = source.glob("*/v*/*/findings.csv")
    for file in sorted(files, key=lambda file: file.stat().st_mtime):
        open_undamaged(file.parent)
        findings = read_csv(file)
        if findings is not None:
            yield file.parts[-4], "", _read_provenance(file.parent)["command"], findings


def _subject(claim: str) -> str:
    """What a claim is asked of where it names that, see :func:`posbench.stats.findings.with_subject`; else empty."""
    named = re.search(r"\[([^]]*)\](?: \([^)]*\))?$", claim)
    return named[1] if named else ""


def _format_p(p: float) -> str:
    """A raw p value with three digits; empty without one."""
    return "" if pd.isna(p) else f"{p:.3g}"


def _by_study(key: Sequence[str]) -> list[Any]:
    """Sort key of a study and what follows it: a model, a subject, and of a kept run its name."""
    study, *others = key
    return [natural_order(study), *others]


def with_kept(claims: pd.DataFrame, kept: pd.DataFrame) -> pd.DataFrame:
    """Claims with those of studies, models and subjects that they do not hold, in the order of the studies."""
    keys = [
        pd.MultiIndex.from_arrays(
            [table["study"], table["model"], table["claim"].map(_subject)]
        )
        for table in (claims, kept)
    ]
    is_judged = keys[1].isin(keys[0])
    merged = pd.concat([claims, kept[~is_judged]], ignore_index=True)
    merged_keys = [*keys[0], *keys[1][~is_judged]]
    order = sorted(merged.index, key=lambda row: _by_study(merged_keys[row]))
    return merged.loc[order].reset_index(drop=True)


def claims_page(claims: pd.DataFrame, *beside: pd.DataFrame) -> str:
    """The claims that studies judged, by model: an overview, then each with its numbers.

    Args:
        claims: Claims, see :func:`read_claims`.
        beside: Those of further models, of which the same studies are shown.
    """
    models = sorted(set(claims["model"]))
    studies = set(claims["study"])
    for further in beside:
        further = further[further["study"].isin(studies)]
        models += sorted(set(further["model"]) - set(models))
        claims = pd.concat([claims, further], ignore_index=True)
    # Figures of one study show the same measurement, which counts once.
    claims = claims.drop_duplicates(["model", "claim", "statistic", "value", "n"])
    # The claims of papers first, in the order of their studies, then our controls.
    claims = papers_first(correct_over_page(claims))
    overview = []
    sections = []
    for claim, of_claim in claims.groupby("claim", sort=False):
        verdict_by_model = [
            combined_verdict(of_claim.loc[of_claim["model"] == model, "verdict"])
            for model in models
        ]
        overview.append([str(claim), *verdict_by_model])
        header = ["verdict", "model", "value", "statistic", "p (Holm)", "n"]
        header += [name for name in ("holds if", "note") if of_claim[name].any()]
        table = markdown(header, of_claim[header].to_numpy().tolist())
        sections.append(f"## {claim}\n\n{table}")
    counted = count_once(claims)
    counts = [
        f"- {model}: {count_verdicts(counted[counted['model'] == model], 'over this page')}"
        for model in models
    ]
    return "\n\n".join(
        [
            "\n".join(counts),
            COUNTING_RULE,
            markdown(["claim", *models], overview),
            *sections,
            "## How\n\nThe verdicts are those of these runs:",
            "\n".join(f"    {command}" for command in claims["command"].unique()),
        ]
    )


def correct_over_page(claims: pd.DataFrame) -> pd.DataFrame:
    """Claims with p values and verdicts corrected over all that a page shows of a model.

    A family is what the page shows of one model's claims, or of our controls there. A claim whose raw p was not
    kept enters with the p that was adjusted within its study, which is larger.
    """
    raw = claims["p"].where(claims["p"] != "", claims["p (Holm)"])
    p = pd.to_numeric(raw.str.removeprefix("<"), errors="coerce")
    claims = claims.copy()
    for _, family in claims.groupby(["model", "kind"]):
        adjusted = holm(p[family.index].to_numpy())
        for row, value in zip(family.index, adjusted, strict=True):
            claims.loc[row, "p (Holm)"] = format_p_value(value)
            verdict = claims.loc[row, "verdict"]
            if value > ALPHA and verdict in ("holds", "contradicted"):
                claims.loc[row, "verdict"] = "inconclusive"
                note = f"{verdict} by its study alone"
                notes = filter(None, [note, claims.loc[row, "note"]])
                claims.loc[row, "note"] = "; ".join(notes)
    return claims


def count_once(claims: pd.DataFrame) -> pd.DataFrame:
    """One row per claim and model, with one verdict and its adjusted p, for counting.

    Several statistics, channels or runs of one claim on one model count once. It is contradicted where one of them
    contradicts it, else as weak as the weakest; those that are not testable count only where all are.
    """
    order = ("contradicted", "inconclusive", "holds", "not testable")
    rows = []
    for _, of_claim in claims.groupby(["model", "claim"], sort=False):
        first = of_claim.iloc[0].copy()
        first["verdict"] = min(of_claim["verdict"], key=order.index)
        rows.append(first)
    table = pd.DataFrame(rows, columns=claims.columns)
    return table.assign(p_holm=table["p (Holm)"].where(table["p (Holm)"] != ""))


def _read_provenance(folder: Path) -> dict[str, Any]:
    """The provenance of a run; of a sweep that of its first run, as each records the command of the sweep."""
    jobs = read_json(folder / JOBS, Objects) or []
    runs = [job["folder"] for job in jobs if job["folder"]]
    run_folder = folder.parent / Path(runs[0]).name if runs else folder
    provenance: dict[str, Any] | None = read_json(run_folder / "provenance.json")
    if provenance is None:
        allowed = "a run folder with its provenance.json"
        raise UserError("DIR", str(folder), allowed, "repeat the run")
    return provenance


def combined_verdict(verdicts: pd.Series) -> str:
    """The verdict of one model; of several statistics, how many got each."""
    return verdicts.iloc[0] if verdicts.nunique() == 1 else tally_verdicts(verdicts)


def run_page(folder: Path) -> str:
    """A run's page as Markdown: its sentence, details and tables; figures stay in the run's folder."""
    open_undamaged(folder)
    glance, sections = read_run(folder)
    provenance = _read_provenance(folder)
    packages = provenance["packages"]
    parts = [glance.sentence, glance.details]
    for section in sections:
        parts += [f"## {section.title}", section.text]
        if section.rows:
            parts.append(markdown(section.header, section.rows))
        if section.block:
            parts.append(f"```yaml\n{section.block.rstrip()}\n```")
    parts.append(
        f"Made by `{provenance['command']}` on {provenance['hardware']}; "
        f"posbench {provenance['posbench']}, torch {packages['torch']}, "
        f"transformers {packages['transformers']}."
    )
    return "\n\n".join(part for part in parts if part)


def read_captions() -> pd.DataFrame:
    """Every table and figure of the papers: paper, item, what it shows, and why there is no experiment."""
    return pd.read_csv(
        paths.EXPERIMENTS / "captions.csv", keep_default_na=False, dtype=str
    )


def read_experiments() -> dict[str, Mapping[str, Any]]:
    """The configs of posbench's experiments, by name."""
    configs = {}
    for file in sorted(paths.EXPERIMENTS.glob("*/experiment/*.yaml")):
        text = file.read_text(encoding="utf-8")
        configs[file.stem] = yaml.safe_load(text)
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
            _item_row(configs, entries, paper, item)
            for item in of_paper.to_dict("records")
        ]
        num_without = (of_paper["reason"] != "").sum()
        parts.append(
            f"## {title}\n\n{len(rows)} tables and figures, {num_without} without an experiment."
        )
        parts.append(markdown(EXPERIMENTS_HEADER, rows))
    return "\n\n".join(parts)


def _item_row(
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
    cells = [
        _experiment_cells(name, configs[name], entries.get(name)) for name in names
    ]
    commands, minutes, statuses = zip(*cells, strict=True)
    return [
        item["item"],
        item["shows"],
        "<br>".join(commands),
        "<br>".join(minutes),
        "<br>".join(statuses),
    ]


def _experiment_cells(
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
        first = entry.command.partition("\n")[0]
        command = re.sub(r" runtime\.outputs=\S+", "", first)
        status = _run_status(entry)
        wall_minutes = _wall_minutes(entry)
        if wall_minutes is not None:
            minutes = f"{wall_minutes:.1f}"
    if entry and entry.faults:
        status += f"; unfinished or damaged: {len(entry.faults)}"
    link = f"{config['experiment']['paper']}/experiment/{name}.yaml"
    return f"[`{command}`]({link})", minutes, status


def _run_status(entry: Entry) -> str:
    """How the paper's claims fared, else its cells, else what was measured."""
    findings = entry.findings
    if len(findings):
        claims = tally_verdicts(findings.loc[findings["kind"] == "paper", "verdict"])
        if claims:
            return claims
    if len(entry.cells):
        return f"cells: {tally_verdicts(entry.cells['verdict'], AGREEMENT)}"
    return entry.summary or "measured"


WE_SEE = "*We see:*"
BESIDE_MARK = "<!-- beside -->"
"""Before what a further model shows, in an entry of a gallery."""


def gallery_page(
    entries: Sequence[Entry],
    images: str,
    further: Mapping[str, str] | None = None,
    kept: Mapping[str, Mapping[str, str]] | None = None,
) -> tuple[str, dict[str, Path]]:
    """The gallery in short, with the figures of each entry that stand for the paper's.

    Args:
        entries: What is shown.
        images: The folder of images, as the text names it.
        further: What follows an entry, by its name: what a further model shows. None leaves that of kept entries.
        kept: Text of further entries, by the title of their paper and by their name.

    Returns:
        The text, and the figure to put at each image's name.
    """
    texts = list[str]()
    figures = dict[str, Path]()
    for paper, paper_title in HEADINGS.items():
        text_of = dict((kept or {}).get(paper_title, {}))
        for entry in entries:
            if paper_of(entry) != paper:
                continue
            figures |= {_image_name(entry, p): p.file for p in _shown_panels(entry)}
            text_of[entry.name] = _entry_text(entry, images)
        if further is not None:
            text_of = {
                name: _followed_by(text, further.get(name))
                for name, text in text_of.items()
            }
        if text_of:
            texts.append(f"## {paper_title}")
            texts += [text_of[name] for name in sorted(text_of, key=natural_order)]
    return "\n\n".join(texts), figures


def _followed_by(text: str, section: str | None) -> str:
    """An entry with what a further model shows, in the place of what stood there before."""
    own_text = text.partition(BESIDE_MARK)[0].rstrip()
    if section is None:
        return own_text
    return "\n\n".join([own_text, BESIDE_MARK, section])


def _entry_text(entry: Entry, images: str) -> str:
    """What the gallery says of an entry, see :func:`gallery_page`, after a mark with its name."""
    texts = [f"<!-- entry {entry.name} -->", f"### {heading(entry)}"]
    shows = paper_shows(entry)
    if shows:
        texts.append(f"*The paper shows:* {shows}")
    summary = entry.summary
    if summary:
        texts.append(f"{WE_SEE} {summary}")
    texts += entry.faults
    texts += [_figure_text(entry, panel, images) for panel in _shown_panels(entry)]
    if entry.command:
        commands = ", ".join(f"`{command}`" for command in entry.command.splitlines())
        texts.append(f"{commands}; {entry.origin}{_took(entry)}.")
    return "\n\n".join(texts)


def read_entries(
    file: Path, option: str, text: str | None = None
) -> dict[str, dict[str, str]]:
    """The entries of a gallery's file, see :func:`entries_of`; none where there is no file yet.

    Args:
        file: The file.
        option: The option that reads it, for the error.
        text: What the file will say; None: what it says.

    Raises:
        UserError: The gallery has an entry without its mark, or one of an unknown paper, which would be lost.
    """
    if text is None:
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
    entries = entries_of(text)
    num_headings = len(re.findall(r"^### ", text, flags=re.MULTILINE))
    is_whole = num_headings == sum(map(len, entries.values()))
    if not is_whole or set(entries) - set(HEADINGS.values()):
        allowed = "a gallery with <!-- entry NAME --> before each heading"
        hint = "make that page again from all its runs, without --keep"
        raise UserError(option, str(file), allowed, hint)
    return entries


def entries_of(page: str) -> dict[str, dict[str, str]]:
    """The entries of a gallery, as its text has them, by the title of their paper and by their name."""
    page = page.partition("<!-- gallery -->")[2].partition("<!-- /gallery -->")[0]
    entries: dict[str, dict[str, str]] = {}
    for of_paper in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, *texts = re.split(r"(?=^<!-- entry )", of_paper, flags=re.MULTILINE)
        entries[title.strip()] = {
            re.findall(r"<!-- entry (\S+) -->", text)[0]: text.strip() for text in texts
        }
    return entries


def further_sections(
    pages: Sequence[Path], out: Path, texts: Mapping[Path, str] | None = None
) -> dict[str, str]:
    """What the pages of further models say and show of each experiment, by its name; arguments as of `sections_of`."""
    sections: dict[str, str] = {}
    for page in pages:
        for name, text in sections_of(page, out, (texts or {}).get(page)).items():
            sections[name] = "\n\n".join(filter(None, [sections.get(name), text]))
    return sections


def sections_of(page: Path, out: Path, text: str | None = None) -> dict[str, str]:
    """What a further model's page says and shows of each experiment, by its name.

    Args:
        page: The model's page, a gallery, beside which a folder of that name holds its figures.
        out: The gallery that takes it, from which links to the page and its figures start.
        text: What the page will say; None: what its file says.

    Raises:
        UserError: There is no such page, or it has no entries.
    """
    link = Path(os.path.relpath(page, out.parent)).as_posix()
    entries = {
        name: text
        for of_paper in read_entries(page, "--beside", text).values()
        for name, text in of_paper.items()
    }
    if not entries:
        hint = f"python tools/pages.py gallery DIR --out {page}"
        raise UserError("--beside", str(page), "the page of a gallery", hint)
    sections = {}
    for name, text in entries.items():
        _, title, *paragraphs = text.split("\n\n")
        anchor = _anchor(title.removeprefix("### "))
        seen = [part for part in paragraphs if part.startswith(WE_SEE)] or [WE_SEE]
        figures = [part for part in paragraphs if part.startswith("![")]
        section = "\n\n".join([*seen, *figures]).replace(
            WE_SEE, f"*We see* on [{page.stem}]({link}#{anchor}):", 1
        )
        images = link.removesuffix(page.suffix)
        sections[name] = section.replace(f"]({page.stem}/", f"]({images}/")
    return sections


def _anchor(title: str) -> str:
    """The anchor that GitHub and the site give a heading."""
    kept = re.sub(r"[^\w\- ]", "", title.lower())
    return kept.replace(" ", "-")


def _image_name(entry: Entry, panel: Panel) -> str:
    """The name of a figure in a folder of images."""
    return f"{entry.name}-{panel.result.label}-{panel.figure}.svg"


def _figure_text(entry: Entry, panel: Panel, images: str) -> str:
    """A figure with its caption, as Markdown; ``images`` is the folder of images, as the text names it."""
    caption = entry.label_prefix(panel.result) + panel.caption
    # The heading, which stands above, would be the same text for all figures of an entry.
    return f"![{caption}]({images}/{_image_name(entry, panel)})\\\n{caption}"


def _took(entry: Entry) -> str:
    """How long the runs of an entry took, as the end of a sentence; empty where a run does not know."""
    minutes = _wall_minutes(entry)
    return "" if minutes is None else f"; {minutes:.1f} minutes"


def _wall_minutes(entry: Entry) -> float | None:
    """Wall time of an entry's runs, all their sessions; None where a run, of an older version, has none."""
    seconds: list[Any] = [run.status().get("seconds") for run in entry.runs]
    return None if None in seconds else sum(map(float, seconds)) / 60


def _shown_panels(entry: Entry) -> list[Panel]:
    """The figures that stand for the paper's; of an experiment that names none, the first three."""
    named = [panel for panel in entry.panels if panel.covers]
    return named or entry.panels[:MAX_PANELS]


def families_page() -> str:
    """The families, as a Markdown table."""
    header = [
        "family",
        "`model_type`",
        "positions",
        "queries and keys",
        "cached keys",
        "also covered",
    ]
    rows = []
    for family in FAMILIES:
        types = ", ".join(f"`{model_type}`" for model_type in family.model_types)
        projection = f"fused, in {family.fused}" if family.fused else "separate"
        keys = "rank-1, projected again if clipped" if family.clip else "rank-1"
        if family.key_norm:
            projection += f", keys normed per {family.norm_over}"
            keys = "projected again"
        rows.append(
            [family.name, types, family.position, projection, keys, family.traits]
        )
    return markdown(header, rows)


def data_page() -> str:
    """The fields of a user's own file, as a Markdown table."""
    kinds_by_field: dict[tuple[str, ...], list[str]] = {}
    for kind_name, kind in KINDS.items():
        for field in schema(kind):
            kinds_by_field.setdefault(field, []).append(kind_name)
    rows = []
    for (name, form, meaning), kinds in kinds_by_field.items():
        listed = "all" if len(kinds) == len(KINDS) else ", ".join(kinds)
        rows.append([f"`{name}`", listed, form, meaning])
    return markdown(["field", "in files with", "form", "meaning"], rows)


def schema(kind: type[Record]) -> list[tuple[str, str, str]]:
    """The fields of a kind of file: name, form and meaning."""
    hints = get_type_hints(kind, include_extras=True)
    table = []
    for name, field in kind.model_fields.items():
        form = describe_type(hints[name])
        if not field.is_required():
            form += ", or left out"
        table.append((name, form, str(field.description)))
    return table


FROM_CODE: dict[str, Callable[[], str]] = {
    "families": families_page,
    "data": data_page,
}
FROM_RUNS: dict[str, Callable[[Path], str]] = {
    "run": run_page,
    "experiments": experiments_page,
}

if __name__ == "__main__":
    sys.exit(main())
