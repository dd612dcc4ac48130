"""Write a fix as a format, hold it against the method, and tell all of it on a card; nothing is left of what
does not hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml

from posbench import paths
from posbench.errors import UserError
from posbench.export.base import Fix, Format, Measured, Prompts, Unverified, measure
from posbench.files.atomic import new_folder, write_text
from posbench.files.digests import sha256
from posbench.files.markdown import markdown
from posbench.methods.base import Method
from posbench.methods.unmodified import Unmodified
from posbench.report.folder import need_place, read_csv, read_json
from posbench.run.base import Run
from posbench.run.folder import runs_in
from posbench.stats.bootstrap import paired, with_interval
from posbench.stats.frames import overall
from posbench.tasks import Example
from posbench.tasks.base import EvaluationOnly

RECORD = "posbench.json"
CARD = "README.md"
KIND = "folder of posbench export"
"""What ``posbench verify`` reads, the model card, and what both stand in."""
PROMPTS = 8  # that are compared


@dataclass(frozen=True)
class Told:
    """What a card tells beside the format: all that is known of where the fix comes from."""

    command: str
    raw: Mapping[str, Any]  # the config with the constants, as plain data
    source: str = ""
    gain: str = ""  # of the search on held-back prompts, in words
    price: str = ""
    effects: Sequence[Sequence[str]] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    base: Sequence[Mapping[str, str]] = ()  # the model's files, as provenance has them


def examples_of(run: Run) -> list[Example]:
    """The prompts that a fix is held against: those of the calibration where the task has some, else those of
    the evaluation."""
    return (
        run.evaluation
        if isinstance(run.task, EvaluationOnly)
        else run.task.examples("calibration")
    )


def prompts_of(run: Run) -> Prompts:
    """Some of them as token ids, spread over all."""
    examples = examples_of(run)
    some = [
        examples[i]
        for i in sorted(
            {*np.linspace(0, len(examples) - 1, PROMPTS).round().astype(int)}
        )
    ]
    return [encoded.ids for encoded in run.prompts.encode(some).values()]


def price_of(run: Run, asked: Method, written: Method) -> str:
    """What it costs that all tokens are scaled where the last alone were: the loss of the answers, paired."""
    examples = [e for e in examples_of(run) if e.answers]
    if not examples:
        return "not measured: the task publishes no answers"
    encoded = run.prompts.encode(examples)
    losses = dict[str, np.ndarray]()
    for name, method in {
        "unmodified": Unmodified(),
        "asked": asked,
        "written": written,
    }.items():
        found = dict[str, float]()
        plan = run.prompts.batches_by_length(examples, lambda e: len(encoded[e.id].ids))
        with (
            method.applied(run.lm) as lm,
            run.progress(f"price of folding: {name}", len(examples)) as done,
        ):
            for batch in plan:
                texts = [e.prompt for e in batch]
                answers = [e.answers[0] for e in batch]
                values = lm.answer_loss(texts, answers, batch_size=len(batch))
                found |= {
                    e.id: float(value) for e, value in zip(batch, values, strict=True)
                }
                done(len(batch))
        losses[name] = np.array([found[e.id] for e in examples])
    gap = paired(
        losses["written"], losses["asked"], [e.cluster or e.id for e in examples]
    )
    means = {name: f"{float(values.mean()):.4g}" for name, values in losses.items()}
    return (
        f"All tokens scaled instead of the last alone: {gap.loss_verdict}; loss {means['written']} "
        f"instead of {means['asked']} nats per answer token, difference {gap.words}, unmodified "
        f"{means['unmodified']}; {gap.n} prompts"
    )


def effects_of(
    outputs: Path, model: str, task: str, method: Mapping[str, Any]
) -> list[list[str]]:
    """From runs of other tasks with the same model and constants: task, difference in points, n."""
    rows = []
    for folder in runs_in(outputs) if outputs.is_dir() else []:
        ran = read_json(folder / "method.json")
        metrics = read_csv(folder / "metrics.csv")
        if (
            ran is None
            or metrics is None
            or {k: ran.get(k) for k in method} != dict(method)
        ):
            continue
        here = metrics[(metrics["model"] == model) & (metrics["task"] != task)]
        for row in overall(here, "difference").itertuples():
            gap = with_interval(
                100 * row.value, 100 * row.ci_low, 100 * row.ci_high, "+z.1f"
            )
            rows.append([str(row.task), gap, str(row.n)])
    return rows


def write(
    form: Format, fix: Fix, told: Told, prompts: Prompts, out: Path
) -> Measured | Unverified:
    """Write a folder, verified where that is possible; ``out`` may hold an older one of posbench.

    Raises:
        UserError: The format cannot hold it, something else stands at ``out``, or what was loaded again is
            further from the method than the tolerance.
    """
    need_room(out)
    form.check(fix)
    with new_folder(out) as folder:
        form.write(fix, folder)
        measured: Measured | Unverified
        if missing := form.missing():
            measured = Unverified(f"not verified: {missing}")
        else:
            measured = measure(form, fix, folder, prompts)
            need(measured, form, fix)
        write_text(folder / CARD, card(form, fix, told, measured))
        files = {
            str(f.relative_to(folder)): sha256(f)
            for f in sorted(folder.rglob("*"))
            if f.is_file()
        }
        record = {
            "format": form.name,
            **asdict(told),
            "measured": asdict(measured),
            "files": files,
        }
        write_text(folder / RECORD, json.dumps(record, indent=2) + "\n")
        for file in files:  # safetensors lets nobody else read what it writes
            (folder / file).chmod((folder / RECORD).stat().st_mode)
    return measured


def need_room(out: Path) -> None:
    """Refuse a place where something stands that is not an export as it was written: it would be lost."""
    known = (read_json(out / RECORD) or {}).get("files", {})
    files = (
        {str(f.relative_to(out)): f for f in out.rglob("*") if f.is_file()}
        if out.is_dir()
        else {}
    )
    mine = [
        name
        for name, f in files.items()
        if name != RECORD and known.get(name) != sha256(f)
    ]
    need_place(
        out,
        bool(known) and not mine and not out.is_symlink(),
        f"{KIND} as it was written",
    )


def need(measured: Measured, form: Format, fix: Fix) -> None:
    """Raise UserError where the files do not do what the method does."""
    if not measured.holds:
        allowed = f"files that do what the method does: {measured.words}"
        hint = "please report it, with this line; another format may do: posbench export --help"
        raise UserError("--to", f"{form.name} of {fix.lm.name}", allowed, hint)


def card(form: Format, fix: Fix, told: Told, measured: Measured | Unverified) -> str:
    """The model card, Markdown."""
    constants = {k: v for k, v in told.raw["method"].items() if k != "_target_"}
    source = (paths.PACKAGE / "export" / "card.md.j2").read_text()
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    facts: dict[str, Any] = {
        "hub": not Path(fix.base).exists(),
        "base": fix.base,
        "library": form.library,
        "model": fix.lm.name,
        "told": constants["name"],
        "about": (type(form).__doc__ or "").splitlines()[0],
        "usage": form.usage(fix),
        "measured": measured.words[0].upper() + measured.words[1:],
        "constants": yaml.safe_dump(constants, sort_keys=False),
        "effects": markdown(["task", "difference", "n"], told.effects)
        if told.effects
        else "",
        "versions": ", ".join(
            f"{name} {version}" for name, version in told.versions.items()
        ),
    }
    return environment.from_string(source).render({**asdict(told), **facts})
