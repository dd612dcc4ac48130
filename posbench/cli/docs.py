"""``posbench docs NAME``: pages of the documentation that are made from code or from runs, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posbench.cli.options import option
from posbench.errors import UserError
from posbench.files.atomic import write_bytes, write_text
from posbench.files.markdown import markdown
from posbench.late import pd
from posbench.model.families import support_table
from posbench.report import experiments
from posbench.report.collect import collect
from posbench.report.folder import read_csv, read_json
from posbench.report.gallery import as_markdown, shrink
from posbench.report.page import read_run
from posbench.report.tables import findings_table
from posbench.report.text import tally, verdicts
from posbench.run.folder import checked
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
    name, *rest = args or [""]
    if name not in CHOICES or len(rest) != (name not in FROM_CODE):
        allowed = ", ".join(
            name if name in FROM_CODE else f"{name} DIR" for name in CHOICES
        )
        raise UserError(
            "docs", " ".join(args), f"{allowed}; --out FILE", "posbench docs families"
        )
    file = Path(out or "gallery.md").expanduser()
    images = dict[str, Path]()
    if name == "gallery":
        page, images = as_markdown(collect(Path(rest[0]).expanduser()), file.stem)
    else:
        page = (
            FROM_RUNS[name](Path(rest[0]).expanduser()) if rest else FROM_CODE[name]()
        )
    if out is None:
        print(page)
        return 0
    text = between_marks(file, name, page)
    if images:
        folder = file.with_suffix("")
        folder.mkdir(exist_ok=True)
        for image, figure in images.items():
            write_bytes(folder / image, shrink(figure))
        for left in set(folder.glob("*.png")) - {folder / image for image in images}:
            left.unlink()
    write_text(file, text)
    print(out)
    return 0


def between_marks(file: Path, name: str, page: str) -> str:
    """A file's text with ``page`` between its marks; the two and the page for a new file."""
    old = file.read_text(encoding="utf-8") if file.is_file() else ""
    first = f"<!-- {name} -->"
    last = f"<!-- /{name} -->"
    marked = f"{first}\n\n{page}\n\n{last}"
    new, count = re.subn(f"{first}.*?{last}", lambda _: marked, old, flags=re.DOTALL)
    if old and count != 1:
        allowed = f"a new file, or one with {first} and {last} once"
        raise UserError(
            "--out", str(file), allowed, "put the marks where the page shall stand"
        )
    return new if old else f"{marked}\n"


def claims(folder: Path) -> str:
    """The claims that studies below a folder judged, by model: an overview, then each with its numbers.

    The newest run of each study on each model counts.
    """
    newest: dict[tuple[str, str], tuple[pd.DataFrame, str]] = {}
    for file in sorted(
        folder.glob("*/v*/*/findings.csv"), key=lambda file: file.stat().st_mtime
    ):
        checked(file.parent)
        if (frame := read_csv(file)) is not None:
            newest[file.parts[-4], str(frame["model"].iloc[0])] = (
                frame,
                _made(file.parent)["command"],
            )
    if not newest:
        raise UserError(
            "DIR", str(folder), "a folder of runs of studies", "posbench study=chain"
        )
    found = pd.concat(
        [frame for frame, _ in newest.values()], ignore_index=True
    ).fillna({"model": "no model"})
    # The claims of papers first, in the order of their studies, then our controls.
    found = found.sort_values("kind", key=lambda kind: kind != "paper", kind="stable")
    models = sorted(found["model"].unique())
    rows = []
    parts = []
    for _, part in found.groupby("claim", sort=False):
        header, lines = findings_table(part)
        told = lines[0][1]
        rows.append(
            [
                told,
                *(
                    _verdict(part.loc[part["model"] == model, "verdict"])
                    for model in models
                ),
            ]
        )
        named = [
            [line[0], model, *line[2:]]
            for model, line in zip(part["model"], lines, strict=True)
        ]
        parts.append(
            f"## {told}\n\n{markdown(['verdict', 'model', *header[2:]], named)}"
        )
    commands = "\n".join(f"    {command}" for _, command in newest.values())
    overview = markdown(["claim", *models], rows)
    sums = "\n".join(
        f"- {model}: {verdicts(found[found['model'] == model])}" for model in models
    )
    made = f"## How\n\nThe verdicts are those of these runs:\n\n{commands}"
    return "\n\n".join([sums, overview, *parts, made])


def _made(folder: Path) -> dict[str, Any]:
    """The provenance of a run; of a sweep, that of one of its runs, which have its command."""
    jobs = [
        job["folder"] for job in read_json(folder / "jobs.json") or () if job["folder"]
    ]
    run = folder.parent / Path(jobs[0]).name if jobs else folder
    made: dict[str, Any] | None = read_json(run / "provenance.json")
    if made is None:
        raise UserError(
            "DIR",
            str(folder),
            "a run folder with its provenance.json",
            "repeat the run",
        )
    return made


def _verdict(verdicts: pd.Series) -> str:
    """The verdict of one model; of several statistics, how many got each."""
    return verdicts.iloc[0] if verdicts.nunique() == 1 else tally(verdicts)


def run(folder: Path) -> str:
    """A run's page as Markdown: its sentence, text and tables; figures stay in the run's folder."""
    checked(folder)
    sentence, sections = read_run(folder)
    made = _made(folder)
    versions = ", ".join(
        f"{name} {made['packages'][name]}" for name in ("torch", "transformers")
    )
    parts = [sentence]
    for section in sections:
        table = markdown(section.header, section.rows) if section.rows else ""
        block = f"```yaml\n{section.block.rstrip()}\n```" if section.block else ""
        parts += [f"## {section.title}", section.text, table, block]
    parts.append(
        f"Made by `{made['command']}` on {made['hardware']}; posbench {made['posbench']}, {versions}."
    )
    return "\n\n".join(part for part in parts if part)


def data() -> str:
    """The fields of a file of one's own."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for name, kind in KINDS.items():
        for row in schema(kind):
            kinds.setdefault(row, []).append(name)
    told = [
        [f"`{field}`", "all" if len(of) == len(KINDS) else ", ".join(of), form, meaning]
        for (field, form, meaning), of in kinds.items()
    ]
    return markdown(["field", "in files with", "form", "meaning"], told)


FROM_CODE: dict[str, Callable[[], str]] = {
    "families": lambda: markdown(*support_table()),
    "data": data,
}
FROM_RUNS: dict[str, Callable[[Path], str]] = {
    "claims": claims,
    "run": run,
    "experiments": experiments.page,
}
CHOICES = *FROM_CODE, *FROM_RUNS, "gallery"
