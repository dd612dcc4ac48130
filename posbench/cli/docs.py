"""``posbench docs NAME``: pages of the documentation that are made from code or from runs, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posbench.cli.options import option
from posbench.errors import UserError
from posbench.files.atomic import write_bytes, write_text
from posbench.files.markdown import markdown
from posbench.late import pd
from posbench.model.families import support_table
from posbench.report import experiments
from posbench.report.collect import collect_entries
from posbench.report.folder import read_csv, read_json
from posbench.report.gallery import gallery_page, shrink_png
from posbench.report.page import read_run
from posbench.report.tables import findings_table
from posbench.report.text import count_verdicts, tally_verdicts
from posbench.run.folder import open_undamaged
from posbench.tasks.own_data import KINDS, schema


def docs(args: list[str]) -> int:
    """Print a page of the documentation that is made from code or from runs, as Markdown.

    usage: posbench docs PAGE [DIR] [--out FILE]

      families         which architectures work, from the code
      data             the fields of a file of your own, from the code
      claims DIR       verdicts on papers' claims, of all studies in a folder of runs
      run DIR          one run: its sentence, text and tables
      experiments DIR  every table and figure of the papers, with the status of its newest run
      gallery DIR      the figures of all runs; they go to a folder beside FILE, which has its name
      --out FILE       write the page between the marks <!-- PAGE --> and <!-- /PAGE --> of a file

    example: posbench docs gallery outputs --out docs/gallery.md

    Raises:
        UserError: No such page, a folder that holds nothing to show, or a file of other text without marks.
    """
    out, args = option(args, "--out")
    name, *operands = args or [""]
    if name not in CHOICES or len(operands) != (0 if name in FROM_CODE else 1):
        pages = [name if name in FROM_CODE else f"{name} DIR" for name in CHOICES]
        allowed = f"{', '.join(pages)}; --out FILE"
        raise UserError("docs", " ".join(args), allowed, "posbench docs families")
    file = Path(out or "gallery.md").expanduser()
    images: dict[str, Path] = {}
    if name in FROM_CODE:
        page = FROM_CODE[name]()
    else:
        folder = Path(operands[0]).expanduser()
        if name == "gallery":
            page, images = gallery_page(collect_entries(folder), file.stem)
        else:
            page = FROM_RUNS[name](folder)
    if out is None:
        print(page)
        return 0
    text = between_marks(file, name, page)
    if images:
        _write_images(file.with_suffix(""), images)
    write_text(file, text)
    print(out)
    return 0


def _write_images(folder: Path, images: Mapping[str, Path]) -> None:
    """Write figures to a folder under their names there, and remove all other images."""
    folder.mkdir(exist_ok=True)
    for name, figure in images.items():
        write_bytes(folder / name, shrink_png(figure))
    for file in set(folder.glob("*.png")) - {folder / name for name in images}:
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
        hint = "put the two marks where the page belongs"
        raise UserError("--out", str(file), allowed, hint)
    return new


def claims(folder: Path) -> str:
    """The claims that studies below a folder judged, by model: an overview, then each with its numbers.

    The newest run of each study on each model counts.
    """
    newest: dict[tuple[str, str], tuple[pd.DataFrame, str]] = {}
    files = folder.glob("*/v*/*/findings.csv")
    for file in sorted(files, key=lambda file: file.stat().st_mtime):
        open_undamaged(file.parent)
        frame = read_csv(file)
        if frame is not None:
            study = file.parts[-4]
            model = str(frame["model"].iloc[0])
            newest[study, model] = (frame, _read_provenance(file.parent)["command"])
    if not newest:
        raise UserError(
            "DIR", str(folder), "a folder with runs of studies", "posbench study=chain"
        )
    frames = [frame for frame, _ in newest.values()]
    findings = pd.concat(frames, ignore_index=True).fillna({"model": "no model"})
    # The claims of papers first, in the order of their studies, then our controls.
    findings = findings.sort_values(
        "kind", key=lambda kind: kind != "paper", kind="stable"
    )
    models = sorted(findings["model"].unique())
    overview = []
    sections = []
    for _, of_claim in findings.groupby("claim", sort=False):
        header, rows = findings_table(of_claim)
        claim = rows[0][1]
        verdict_by_model = [
            combined_verdict(of_claim.loc[of_claim["model"] == model, "verdict"])
            for model in models
        ]
        overview.append([claim, *verdict_by_model])
        # The model instead of the claim, which is the section's title.
        rows = [
            [row[0], model, *row[2:]]
            for model, row in zip(of_claim["model"], rows, strict=True)
        ]
        table = markdown(["verdict", "model", *header[2:]], rows)
        sections.append(f"## {claim}\n\n{table}")
    counts = [
        f"- {model}: {count_verdicts(findings[findings['model'] == model])}"
        for model in models
    ]
    commands = "\n".join(f"    {command}" for _, command in newest.values())
    return "\n\n".join(
        [
            "\n".join(counts),
            markdown(["claim", *models], overview),
            *sections,
            f"## How\n\nThe verdicts are those of these runs:\n\n{commands}",
        ]
    )


def _read_provenance(folder: Path) -> dict[str, Any]:
    """The provenance of a run; of a sweep that of its first run, as each records the command of the sweep."""
    jobs = read_json(folder / "jobs.json") or []
    runs = [job["folder"] for job in jobs if job["folder"]]
    run_folder = folder.parent / Path(runs[0]).name if runs else folder
    provenance: dict[str, Any] | None = read_json(run_folder / "provenance.json")
    if provenance is None:
        allowed = "a run folder with its provenance.json"
        raise UserError(
            "DIR", str(folder), allowed, "repeat the command that made the run"
        )
    return provenance


def combined_verdict(verdicts: pd.Series) -> str:
    """The verdict of one model; of several statistics, how many got each."""
    return verdicts.iloc[0] if verdicts.nunique() == 1 else tally_verdicts(verdicts)


def run(folder: Path) -> str:
    """A run's page as Markdown: its sentence, text and tables; figures stay in the run's folder."""
    open_undamaged(folder)
    sentence, sections = read_run(folder)
    provenance = _read_provenance(folder)
    packages = provenance["packages"]
    parts = [sentence]
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


def data() -> str:
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


FROM_CODE: dict[str, Callable[[], str]] = {
    "families": lambda: markdown(*support_table()),
    "data": data,
}
FROM_RUNS: dict[str, Callable[[Path], str]] = {
    "claims": claims,
    "run": run,
    "experiments": experiments.experiments_page,
}
CHOICES = *FROM_CODE, *FROM_RUNS, "gallery"
