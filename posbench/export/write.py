"""Write a fix in a format, compare the files with the method, and add a model card.

Files that differ from the method are removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jinja2
import numpy as np
import yaml
from annotated_types import MinLen

from posbench import paths
from posbench.errors import UserError
from posbench.export.base import Comparison, Fix, Format, Prompts, Unverified, measure
from posbench.files.atomic import new_folder, write_json, write_text
from posbench.files.checksums import file_sha256
from posbench.files.markdown import markdown
from posbench.measure.replies import encode_with_answer
from posbench.methods.base import Method
from posbench.methods.unmodified import Unmodified
from posbench.report.folder import need_destination, read_csv, read_json
from posbench.report.tables import missing_notes
from posbench.run.base import Run
from posbench.run.folder import METHOD_FILE, PROVENANCE, runs_in
from posbench.schema import no_other_keys
from posbench.stats import outcomes
from posbench.stats.bootstrap import paired, with_interval
from posbench.stats.frames import rows_over_all_positions
from posbench.tasks import Example
from posbench.tasks.base import EvaluationOnly

RECORD_FILE = "posbench.json"
"""File that ``posbench verify`` reads."""
CARD = "README.md"
"""File of the model card."""
FOLDER_KIND = "folder of posbench export"
"""Name of an exported folder in messages."""
NUM_PROMPTS = 8
"""Prompts on which the files are compared with the method."""


@dataclass(frozen=True)
class CardFacts:
    """Facts for the model card and the record: where the fix comes from.

    Attributes:
        command: The command that wrote the files.
        raw: The config with the method's constants, as plain data.
        source: Where the constants come from.
        verdict: The verdict on the position bias of the run behind them, in words; empty without one.
        is_fix: Whether that verdict is ``fixed``.
        prompts: How long its prompts were, in words; empty where that is not known.
        caution: What to know before the files read long texts; empty where nothing is.
        gain: Their gain on prompts held back from the search, in words.
        price: Cost of folding, in words.
        effects: Side effects on other tasks, as :func:`side_effects` returns them.
        versions: Versions of packages, by name.
        base: The model's files, as the provenance of a run lists them.
        weights: Type of weights that was asked for; empty: none was.
        config_dir: Folder of the user's own classes; empty without one.
        prompt_changes: Python lines for changes of the prompt that the run behind them made as well.
    """

    command: str
    raw: Mapping[str, Any]
    source: str = ""
    verdict: str = ""
    is_fix: bool = False
    prompts: str = ""
    caution: str = ""
    gain: str = ""
    price: str = ""
    effects: Sequence[Sequence[str]] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    base: Sequence[Mapping[str, str]] = ()
    weights: str = ""
    config_dir: str = ""
    prompt_changes: Sequence[str] = ()


@no_other_keys
@dataclass(frozen=True, kw_only=True)
class Record(CardFacts):
    """The record of an export, from :func:`write`, for ``posbench verify``.

    Attributes:
        format: Name of the format.
        measured: How far the files are from the method, or why that was not measured.
        files: SHA-256 of each file by its name.
    """

    format: str
    measured: Mapping[str, Any]
    base: Annotated[Sequence[Mapping[str, str]], MinLen(1)] = field()
    files: Annotated[Mapping[str, str], MinLen(1)]


def comparison_examples(run: Run) -> list[Example]:
    """The calibration examples of a task, or its evaluation examples if it has none."""
    if isinstance(run.task, EvaluationOnly):
        return run.evaluation
    return run.task.examples("calibration")


def comparison_prompts(run: Run) -> Prompts:
    """Token ids of a few prompts, spread evenly over the examples."""
    examples = comparison_examples(run)
    indices = np.linspace(0, len(examples) - 1, NUM_PROMPTS).round().astype(int)
    chosen = [examples[i] for i in sorted({*indices})]
    return [encoded.ids for encoded in run.prompts.encode(chosen).values()]


def folding_price(run: Run, requested: Method, written: Method) -> str:
    """Return the cost of scaling all tokens instead of the last alone, in words.

    The loss of the examples' answers under both methods is compared, paired by prompt.

    Args:
        run: Model, task and runtime.
        requested: The method for the last token.
        written: Its twin for all tokens, which the files hold.
    """
    examples = [e for e in comparison_examples(run) if e.answers]
    if not examples:
        return "not measured: the task publishes no answers"
    methods = {"unmodified": Unmodified(), "asked": requested, "written": written}
    losses = {
        name: _answer_losses(run, method, examples, f"price of folding: {name}")
        for name, method in methods.items()
    }
    clusters = [e.question_id for e in examples]
    gap = paired(losses["written"], losses["asked"], clusters)
    means = {name: f"{float(values.mean()):.4g}" for name, values in losses.items()}
    return (
        f"All tokens scaled instead of the last alone: {gap.loss_verdict}; loss {means['written']} "
        f"instead of {means['asked']} nats per answer token, difference {gap.words}, unmodified "
        f"{means['unmodified']}; {gap.n} prompts"
    )


def _answer_losses(
    run: Run, method: Method, examples: Sequence[Example], label: str
) -> np.ndarray:
    """Loss of each example's first answer under a method.

    Args:
        run: Model and runtime.
        method: The method.
        examples: N examples with answers.
        label: Label of the progress bar.

    Returns:
        Nats per answer token, shape (N,).
    """
    encoded = run.prompts.encode(examples)
    batches = run.prompts.batches_by_length(examples, lambda e: len(encoded[e.id].ids))
    losses: dict[str, float] = {}
    with method.applied(run.lm) as lm, run.progress(label, len(examples)) as progress:
        for batch in batches:
            pairs = [encode_with_answer(lm, example) for example in batch]
            values = lm.answer_token_loss(pairs, batch_size=len(batch))
            for example, value in zip(batch, values, strict=True):
                losses[example.id] = float(value)
            progress(len(batch))
    return np.array([losses[e.id] for e in examples])


def side_effects(
    outputs: Path, weights: str, task: str, method: Mapping[str, Any]
) -> list[list[str]]:
    """Effects of the same method on other tasks, from runs with the same weights.

    Args:
        outputs: Folder of runs, which may not exist.
        weights: Digest of the checkpoint, as the identity of a run has it: another
            checkpoint may have the same name.
        task: Name of the task that is left out.
        method: Name and fields of the method.

    Returns:
        Rows of task, difference from the unmodified model in points, and n.
    """
    rows: list[list[str]] = []
    if not outputs.is_dir():
        return rows
    constants = _as_recorded(method)
    for folder in runs_in(outputs):
        recorded = _as_recorded(read_json(folder / METHOD_FILE) or {})
        metrics = read_csv(folder / "metrics.csv")
        if not recorded or metrics is None:
            continue
        if {key: recorded.get(key) for key in constants} != constants:
            continue
        identity = (read_json(folder / PROVENANCE) or {}).get("identity", {})
        if identity.get("weights") != weights:
            continue
        other_tasks = metrics[metrics["task"] != task]
        lacks_answers = bool(missing_notes(other_tasks))
        for row in rows_over_all_positions(other_tasks, "difference").itertuples():
            points = with_interval(
                100 * row.value, 100 * row.ci_low, 100 * row.ci_high, "+z.1f"
            )
            if lacks_answers:
                points = f"cannot tell ({outcomes.PROBLEM})"
            rows.append([str(row.task), points, str(row.n)])
    return rows


def _as_recorded(value: Any) -> Any:
    """Return a method's parameters in one form, to compare them: JSON's lists, and a single value without its list."""
    if isinstance(value, Mapping):
        return {key: _as_recorded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        entries = [_as_recorded(entry) for entry in value]
        return entries[0] if len(entries) == 1 else entries
    return value


def write(
    form: Format, fix: Fix, facts: CardFacts, prompts: Prompts, out: Path
) -> Comparison | Unverified:
    """Write the folder of a fix, and verify it if its engine is installed.

    Args:
        form: The format.
        fix: The fix.
        facts: Facts for the model card.
        prompts: Prompts to compare on, as token ids.
        out: The folder; an older export there is replaced.

    Raises:
        UserError: The format cannot hold the fix, ``out`` is taken, or
            the files differ from the method by more than the tolerance.
    """
    check_destination(out)
    form.check(fix)
    with new_folder(out) as folder:
        form.write(fix, folder)
        missing = form.missing()
        comparison: Comparison | Unverified
        if missing:
            comparison = Unverified(f"not verified: {missing}")
        else:
            comparison = measure(form, fix, folder, prompts)
            check_agreement(comparison, form, fix)
        write_text(folder / CARD, card(form, fix, facts, comparison))
        digests = {name: file_sha256(file) for name, file in _files(folder).items()}
        record = Record(
            **asdict(facts),
            format=form.name,
            measured=asdict(comparison),
            files=digests,
        )
        write_json(folder / RECORD_FILE, asdict(record))
        # safetensors writes files that nobody else may read.
        # That of a file written in the usual way.
        mode = (folder / RECORD_FILE).stat().st_mode
        # So that the export can be read by whoever reads the other files.
        for name in digests:
            (folder / name).chmod(mode)
    return comparison


def _files(folder: Path) -> dict[str, Path]:
    """All files below a folder, by their path in it."""
    return {
        str(file.relative_to(folder)): file
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def read_record(folder: Path) -> Record | None:
    """Return the record of an export; None in any other folder.

    Raises:
        UserError: It cannot be read.
    """
    hint = "export it again: posbench export RUN --to FORMAT --out DIR"
    record: Record | None = read_json(folder / RECORD_FILE, Record, hint)
    return record


def check_destination(out: Path) -> None:
    """Refuse a folder that holds anything but an unchanged export: it would be lost."""
    need_destination(
        out, lambda: _is_unchanged(out), f"{FOLDER_KIND} as it was written"
    )


def _is_unchanged(out: Path) -> bool:
    """Whether a folder holds an export as it was written, and nothing else, so that it may be replaced."""
    record = None
    with suppress(UserError):  # a record that cannot be read is none of ours
        record = read_record(out)
    if record is None or out.is_symlink():
        return False
    files = _files(out)
    # A name identifies a foreign file before all files are read.
    return files.keys() <= {RECORD_FILE, *record.files} and all(
        name == RECORD_FILE or record.files[name] == file_sha256(file)
        for name, file in files.items()
    )


def check_agreement(comparison: Comparison, form: Format, fix: Fix) -> None:
    """Raise UserError where the files differ from the method."""
    if not comparison.holds:
        allowed = f"files that reproduce the method: {comparison.words}"
        hint = "please report it, with this line; another format may do: posbench export --help"
        raise UserError("--to", f"{form.name} of {fix.lm.name}", allowed, hint)


def card(
    form: Format, fix: Fix, facts: CardFacts, comparison: Comparison | Unverified
) -> str:
    """The model card, as Markdown.

    Args:
        form: The format.
        fix: The fix.
        facts: Where it comes from.
        comparison: Of the files with the method.
    """
    source = (paths.PACKAGE / "export" / "card.md.j2").read_text("utf-8")
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    constants = {k: v for k, v in facts.raw["method"].items() if k != "_target_"}
    versions = [f"{name} {version}" for name, version in facts.versions.items()]
    effects = ""
    if facts.effects:
        effects = markdown(["task", "difference", "n"], facts.effects)
    return environment.from_string(source).render(
        about=(type(form).__doc__ or "").splitlines()[0],
        base=fix.base,
        caution=facts.caution,
        command=facts.command,
        constants=yaml.safe_dump(constants, sort_keys=False),
        effects=effects,
        gain=facts.gain,
        is_fix=facts.is_fix,
        hub=not Path(fix.base).exists(),
        library=form.library,
        measured=comparison.words[0].upper() + comparison.words[1:],
        method=constants["name"],
        model=fix.lm.name,
        price=facts.price,
        prompt_changes=facts.prompt_changes,
        prompts=facts.prompts,
        source=facts.source,
        usage=form.usage(fix),
        verdict=facts.verdict,
        versions=", ".join(versions),
    )
