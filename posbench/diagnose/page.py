"""A diagnosis as files: one page, one JSON file, one SVG badge."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from posbench.diagnose.outcome import LEVELS, Diagnosis, Pilot, Remedy, none_of, points
from posbench.diagnose.race import QUESTION_FIRST
from posbench.files.atomic import write_json, write_text
from posbench.late import pd
from posbench.plots.base import BAD_COLOUR, GOOD_COLOUR, NEUTRAL_COLOUR
from posbench.plots.scores import accuracy_by_position
from posbench.plots.section import Section
from posbench.report.curve import curve_of_run
from posbench.report.folder import read_csv, read_json, study_tables
from posbench.report.glance import EXPORT_PURPOSE, TONES, scores_glance
from posbench.report.links import link_to_parents, run_links
from posbench.report.page import attention_section, write_page
from posbench.report.policies import POLICY_HEADER, policy_rows, verdict_words
from posbench.report.tables import describe_positions, position_table
from posbench.report.text import describe_data, describe_method, describe_window_share
from posbench.run.folder import (
    EVALUATE_STAGE,
    METHOD_FILE,
    PREDICTIONS,
    open_run_dir,
)
from posbench.run.own_code import make_importable
from posbench.run.progress import duration
from posbench.schema import resolve_target
from posbench.stats.bootstrap import Estimate, with_interval
from posbench.stats.frames import metric_name
from posbench.stats.glance import Glance, Number, Tone, first_short, sentence_case
from posbench.stats.shape import SHAPES, SIDES
from posbench.stats.verdict import (
    BIAS,
    CANNOT_DO,
    CANNOT_TELL,
    FIXED,
    NOT_FIXED,
)
from posbench.studies.bias_source import SOURCE_TABLES, BiasSource
from posbench.studies.structure import Structure
from posbench.tasks import Task

JSON_FILE = "diagnosis.json"
BADGE_FILE = "badge.svg"
COLOURS: Mapping[Tone, str] = {
    "good": GOOD_COLOUR,
    "bad": BAD_COLOUR,
    "open": NEUTRAL_COLOUR,
}
CHARACTER_WIDTH = 6.6
"""Pixels of a character of the badge, on average."""
LABEL = "position bias"
MAX_PROMPT_CHARACTERS = 2000
"""Characters of the prompt on the page; of a longer one the middle is left out."""
PURPOSES = {
    FIXED: EXPORT_PURPOSE,
    BIAS: "goes on from here",
    NOT_FIXED: "goes on from here",
    CANNOT_TELL: "asks what would tell",
    CANNOT_DO: "asks something easier",
}
"""What the next command does, by verdict."""
FOUND = {FIXED: "fix found", NOT_FIXED: "no fix found"}
"""Words of a diagnosis, which changes nothing by itself, where a run under a method has these verdicts."""


def write_diagnosis(diagnosis: Diagnosis, folder: Path, command: str) -> Path:
    """Write the page, the JSON file and the badge of a diagnosis, and link to it from the pages of its runs.

    Args:
        diagnosis: The diagnosis.
        folder: Where they go.
        command: The command line.

    Returns:
        The path of the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first_look = glance(diagnosis)
    data = _plain(diagnosis.as_data())
    data |= {"command": command, "sentence": first_look.sentence}
    write_json(folder / JSON_FILE, data)
    write_text(folder / BADGE_FILE, badge(diagnosis.verdict))
    title = f"{diagnosis.model}, {diagnosis.task}: diagnosis"
    sections = [section for section in _sections(diagnosis, folder) if section]
    runs = [Path(run) for run in diagnosis.runs.values()]
    page = write_page(
        folder,
        title,
        first_look,
        sections,
        [diagnosis.model],
        provenance={"command": command, "seconds": dict(diagnosis.seconds)},
        runs=runs,
    )
    link_to_parents(runs)
    return page


def badge(verdict: str) -> str:
    """Return a badge with the verdict, as SVG."""
    left = len(LABEL) * CHARACTER_WIDTH + 12
    right = len(verdict) * CHARACTER_WIDTH + 12
    colour = COLOURS[TONES[verdict]]
    text = html.escape(verdict)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right:.0f}" height="20" role="img" '
        f'aria-label="{LABEL}: {text}">'
        f"<title>{LABEL}: {text}</title>"
        f'<rect width="{left:.0f}" height="20" fill="#444"/>'
        f'<rect x="{left:.0f}" width="{right:.0f}" height="20" fill="{colour}"/>'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left / 2:.0f}" y="14">{LABEL}</text>'
        f'<text x="{left + right / 2:.0f}" y="14">{text}</text></g></svg>\n'
    )


def glance(diagnosis: Diagnosis) -> Glance:
    """The first look at a diagnosis: that of the run that its verdict rests on, where there is one."""
    name = diagnosis.verdict
    part = "held-back" if name in (FIXED, NOT_FIXED) else "shape"
    looked = _look_at(diagnosis, part)
    if looked is None or looked.word != name:
        looked = _look_at(diagnosis, "shape")
    numbers, sample = (looked.numbers, looked.sample) if looked else ((), "")
    sentence = _verdict_sentence(diagnosis, looked)
    if part == "held-back" and looked and sentence == looked.sentence:
        sentence = _held_back_sentence(diagnosis, sentence)
    if diagnosis.place and name in (BIAS, NOT_FIXED):
        advice = diagnosis.place.partition(":")[0]
        sentence = first_short(f"{sentence.removesuffix('.')}; {advice}.", sentence)
    if not numbers and diagnosis.pilots and diagnosis.pilots[-1].average.n:
        average = diagnosis.pilots[-1].average
        numbers = (Number.of("right in the pilot", average, "%", ".1f", 100),)
        sample = f"{average.n:,} prompts"
    rule = looked.rule if looked and looked.word == name else ""
    if part == "held-back" and rule:
        method = read_json(Path(diagnosis.runs[part]) / METHOD_FILE) or {}
        rule += f" As applied: {describe_method(method)}." if len(method) > 1 else ""
    step = diagnosis.next
    return Glance(
        FOUND.get(name, name),
        TONES[name],
        sentence,
        numbers,
        step,
        _purpose(name, step),
        diagnosis.headline,
        sample=sample,
        rule=rule,
    )


def _held_back_sentence(diagnosis: Diagnosis, sentence: str) -> str:
    """What a method does on held-back questions, after the bias of the model where that favours a part of the prompt.

    Args:
        diagnosis: The diagnosis.
        sentence: What the method does, of the run on these questions.
    """
    plain = first_short(f"On held-back questions {sentence}", sentence)
    shape = diagnosis.shape.name if diagnosis.shape else ""
    if shape not in SIDES:
        return plain
    bias = f"{diagnosis.model} {SHAPES[shape].removeprefix('it ')}"
    effect = sentence.replace(f"the position bias of {diagnosis.model}", "that bias")
    effect = effect.partition(";")[0].removesuffix(".")
    return first_short(f"{bias}; tried on held-back questions, {effect}.", plain)


def _purpose(verdict: str, step: str) -> str:
    """What the next command does; empty where the step is no command."""
    if "study=order" in step.split():
        return "compares changes of the prompt on these questions"
    return PURPOSES.get(verdict, "") if step.startswith("posbench ") else ""


def _metrics(run: str | None) -> pd.DataFrame | None:
    """The numbers of a run, given its folder; None where there is no run, or none that was scored."""
    return read_csv(Path(run) / "metrics.csv") if run else None


def _look_at(diagnosis: Diagnosis, part: str) -> Glance | None:
    """The first look at the run of a part; None where the part was not made."""
    metrics = _metrics(diagnosis.runs.get(part))
    if metrics is None:
        return None
    return scores_glance(metrics.assign(model=diagnosis.model))


def _verdict_sentence(diagnosis: Diagnosis, looked: Glance | None) -> str:
    """The verdict of a diagnosis as a sentence.

    Args:
        diagnosis: The diagnosis.
        looked: The first look at the run behind it; None without one.
    """
    model, task, name = diagnosis.model, diagnosis.task, diagnosis.verdict
    if name == CANNOT_TELL and looked and diagnosis.needed_questions:
        asked = diagnosis.shape.questions if diagnosis.shape else 0
        return (
            f"Too few questions ({asked} at each position) to tell whether {model} has a position bias; about "
            f"{diagnosis.needed_questions:,} would do."
        )
    if looked and looked.word == name:
        return looked.sentence
    if name == NOT_FIXED:
        raced = sum(remedy.gain is not None for remedy in diagnosis.remedies)
        return f"{model} has a position bias on {task}, and {none_of(raced)} takes it away."
    if name == CANNOT_DO and not diagnosis.pilots:
        return f"{model} cannot do {task}: the right answer is hardly likelier after its own prompt than after another."
    if name == CANNOT_DO:
        share = 100 * diagnosis.pilots[-1].average.value
        return (
            f"{model} cannot do {task}: {share:.0f} % of the pilot's answers are right."
        )
    if diagnosis.pilots and diagnosis.pilots[-1].level == "missing answers":
        return f"Too many replies of {model} are no answers, so nothing can be said."
    return (
        f"What was asked does not tell whether {model} has a position bias on {task}."
    )


def lines(diagnosis: Diagnosis) -> list[str]:
    """Return what a terminal prints before the verdict, a line for each part that was made."""
    result = [diagnosis.headline]
    if diagnosis.source:
        result.append(f"source: {diagnosis.source}")
    elif diagnosis.source_note:
        result.append(f"source: not looked for, {diagnosis.source_note}")
    if diagnosis.structure:
        result.append(f"structure: {diagnosis.structure}")
    if diagnosis.place:
        result.append(f"change of the order: {diagnosis.place}")
    if diagnosis.prompt_changes:
        changes = _prompt_verdict(diagnosis.prompt_changes)
        result.append(f"change of the prompt: {changes}")
    elif diagnosis.prompt_changes_note:
        result.append(
            f"change of the prompt: not raced, {diagnosis.prompt_changes_note}"
        )
    if diagnosis.winner:
        held_back = diagnosis.held_back
        if held_back in diagnosis.headline:
            held_back = held_back.partition(" (")[0]
        changed = diagnosis.winner_changes.replace(" and ", " and the ")
        change = f"change of the {changed}: {diagnosis.winner}"
        gain = _winner_gain(diagnosis)
        result.append(f"{change}, {gain}; on held-back questions: {held_back}")
    elif diagnosis.remedies_note:
        result.append(f"change of the model: {diagnosis.remedies_note}")
    result.append(f"cost: {diagnosis.total}")
    return result


def _winner_gain(diagnosis: Diagnosis) -> str:
    """The gain of the winner of the race with its unit, and the methods whose gain lies within its interval."""
    gains = {remedy.name: remedy.gain for remedy in diagnosis.remedies if remedy.gain}
    best = gains.pop(diagnosis.winner, None)
    if best is None:
        return "gain unknown"
    text = f"{_nats(best)} nats per answer token"
    ties = [
        f"{name} {gain.value:.3g}"
        for name, gain in gains.items()
        if best.ci_low <= gain.value <= best.ci_high and gain.n == best.n
    ]
    if ties:
        text += f" (within its interval: {', '.join(ties)})"
    return text


def _sections(diagnosis: Diagnosis, folder: Path) -> list[Section | None]:
    """Return the sections of the page in their order; None for a part that was not made.

    Args:
        diagnosis: The diagnosis.
        folder: Folder of the page.
    """
    return [
        _shape_section(diagnosis, folder),
        _score_section(diagnosis),
        _task_section(diagnosis),
        _attention_section(diagnosis),
        _source_section(diagnosis),
        _structure_section(diagnosis),
        _place_section(diagnosis),
        _prompt_section(diagnosis),
        _remedy_section(diagnosis),
        _held_back_section(diagnosis, folder),
        _pilot_section(diagnosis),
        _cost_section(diagnosis),
    ]


def _with_curve(
    section: Section, run: str | None, name: str, caption: str, folder: Path
) -> Section:
    """Return a section with the curve of a run, whose points lead to its questions; unchanged where there is none.

    Args:
        section: The section.
        run: Folder of the run; None: it was not made.
        name: Name of the figure.
        caption: Its caption.
        folder: Folder of the page.
    """
    metrics = _metrics(run)
    if run is None or metrics is None:
        return section
    page = run_links([Path(run)], folder).get(run, "")
    return replace(
        section,
        figures={name: (accuracy_by_position(metrics), caption)},
        curves={name: curve_of_run(metrics, page)},
    )


def _shape_section(diagnosis: Diagnosis, folder: Path) -> Section | None:
    """Shape of the score over the gold position."""
    shape = diagnosis.shape
    if shape is None:
        return None
    text = (
        f"{shape.name}: {SHAPES[shape.name]}. Questions were asked in rounds, all positions of each, until the "
        "shape was decided or the time was over; the intervals below hold at any such time (95 %, those of the two "
        "ends together)."
    )
    labels = {
        "primacy": "first minus inner positions",
        "recency": "last minus inner positions",
    }
    rows = [
        [labels[name], points(value), str(shape.questions)]
        for name, value in shape.contrasts.items()
        if not math.isnan(value.value)
    ]
    rows += [
        [
            f"position {number} of {len(shape.positions)} minus the mean of the others",
            points(value),
            str(value.n),
        ]
        for number, value in enumerate(shape.positions, 1)
        if not math.isnan(value.value)
    ]
    caption = (
        "Score over the gold position; bands: 95 % for a fixed number of questions."
    )
    section = Section("Shape", text, ["contrast", "points", "questions"], rows)
    return _with_curve(section, diagnosis.runs["shape"], "shape", caption, folder)


def _score_section(diagnosis: Diagnosis) -> Section | None:
    """Scores at every gold position as a table."""
    metrics = _metrics(diagnosis.runs.get("shape"))
    if metrics is None:
        return None
    text = f"{metric_name(metrics).capitalize()} in % with its 95 % interval; {describe_positions(metrics)}"
    return Section(
        "Score by position", f"{text.rstrip('; ')}.", *position_table(metrics)
    )


def _task_section(diagnosis: Diagnosis) -> Section | None:
    """What was asked: the task in a sentence, and one prompt."""
    folder = diagnosis.runs.get("shape") or diagnosis.runs.get("pilot")
    if not folder:
        return None
    run = open_run_dir(Path(folder))
    make_importable(run)
    task, _ = resolve_target(run.config("task")["task"], Task, "task")  # type: ignore[type-abstract]
    texts = [str((task.__doc__ or "").split("\n")[0])]
    texts.append(describe_window_share(run.stage(EVALUATE_STAGE)))
    texts.append(describe_data(run.path))
    rows = run.rows_without_error(PREDICTIONS)
    prompts = run.read_json("prompts.json").get("first", {})
    first: Mapping[str, Any] = next(iter(prompts.values()), {})
    prompt = str(first.get("text", ""))
    answer = next(
        (row["answers"] for row in rows if row["id"] == first.get("id")), None
    )
    if answer:
        texts.append(
            f"The answer to the prompt below is {' or '.join(map(str, answer))}."
        )
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        half = MAX_PROMPT_CHARACTERS // 2
        prompt = f"{prompt[:half]}\n[...]\n{prompt[-half:]}"
    return Section("What was asked", " ".join(filter(None, texts)), block=prompt)


def _attention_section(diagnosis: Diagnosis) -> Section | None:
    """Attention to the gold item at every position."""
    folder = diagnosis.runs.get("attention")
    attention = read_csv(Path(folder) / "attention.csv") if folder else None
    if attention is None:
        return None
    section = attention_section(attention)
    n = attention["n"].min()
    text = (
        f"What the last token of the prompt sees of the gold item, n = {n} at each position. Where the bias comes from "
        "it does not say."
    )
    return replace(section, text=text)


def _source_section(diagnosis: Diagnosis) -> Section | None:
    """Interventions on the gold item that close the gap."""
    source = diagnosis.source
    if source is None:
        if not diagnosis.source_note:
            return None
        return Section("Source", f"Not looked for: {diagnosis.source_note}.")
    text = (
        f"{sentence_case(str(source))} Each intervention takes away one thing that tells the place of the gold item. A "
        "source is named where that closes a third of the gap or more, and more than the same change of another item, "
        "for sure; the gap is the loss of the right answer at the worst gold position minus that at the best one, here "
        f"{_nats(source.gap)} nats per answer token. What is named contributes in this task; it need not be all."
    )
    if diagnosis.source_note:
        text += f" {sentence_case(diagnosis.source_note)}"
    rows = [
        [name, points(share), str(share.n)] for name, share in source.shares.items()
    ]
    header = ["intervention", "share of the gap that it closes, %", "questions"]
    tables = study_tables(Path(diagnosis.runs["source"]), SOURCE_TABLES)
    return Section("Source", text, header, rows, BiasSource().figures(tables))


def _structure_section(diagnosis: Diagnosis) -> Section | None:
    """What structure alone predicts of the bias."""
    if not diagnosis.structure:
        return None
    text = (
        f"{sentence_case(diagnosis.structure)} Structure is the mask, ALiBi, and how much of its own input each layer "
        "keeps; the content of the prompt is no part of it. A bias that it causes moves with the items when a text "
        "is put in front of them."
    )
    folder = diagnosis.runs.get("structure")
    if not folder:
        return Section("What structure alone predicts", text)
    tables = study_tables(Path(folder), ["structure_items", "structure_scores"])
    figures = Structure().figures(tables)
    return Section("What structure alone predicts", text, figures=figures)


def _place_section(diagnosis: Diagnosis) -> Section | None:
    """Where in a prompt to put what matters."""
    if not diagnosis.place:
        return None
    return Section("Where to put what matters", sentence_case(diagnosis.place))


def _prompt_section(diagnosis: Diagnosis) -> Section | None:
    """The race of the changes of the prompt."""
    changes = diagnosis.prompt_changes
    if changes is None:
        if not diagnosis.prompt_changes_note:
            return None
        return Section(
            "Changes of the prompt", f"Not raced: {diagnosis.prompt_changes_note}."
        )
    verdict = sentence_case(_prompt_verdict(changes))
    text = (
        f"{verdict} Accuracy over all gold positions, paired against the prompts as they "
        "are; the intervals hold for all changes together. Whether a change removes the bias, and not only raises the "
        "average, is another question."
    )
    if diagnosis.next:
        text += " The command at the head of this page asks it where a change is to be used."
    rows = policy_rows(changes["policies"])
    return Section("Changes of the prompt", text, POLICY_HEADER, rows)


def _prompt_verdict(changes: Mapping[str, Any]) -> str:
    """What to do with the prompt, and why."""
    return f"{verdict_words(changes)} ({changes['reason']})"


def _remedy_section(diagnosis: Diagnosis) -> Section | None:
    """The race of the methods."""
    if not diagnosis.remedies:
        if not diagnosis.remedies_note:
            return None
        return Section("Remedies", f"None was tried: {diagnosis.remedies_note}.")
    text = (
        "Loss of the right answer on calibration prompts, with the gold item inside the prompt: the methods that fall "
        "behind drop out after the first prompts. The 95 % intervals hold for all methods together. Time: of reading a "
        "prompt, beside the unmodified model in turn."
    )
    if diagnosis.remedies[0].name.startswith(f"{QUESTION_FIRST}-"):
        text += (
            " The best one was raced with the question first as well, after the others."
        )
    if diagnosis.remedies_note:
        text = f"{sentence_case(diagnosis.remedies_note)} {text}"
    rows = [_remedy_row(remedy) for remedy in diagnosis.remedies]
    header = ["method", "gain, nats per answer token", "prompts", "time"]
    return Section("Remedies", text, header, rows)


def _remedy_row(remedy: Remedy) -> list[str]:
    """Return the cells of a method in the race: name, gain in nats with its interval, prompts, and relative time."""
    if remedy.gain is None:
        return [remedy.name, f"not run: {remedy.note}", "", ""]
    return [
        remedy.name,
        _nats(remedy.gain),
        str(remedy.gain.n),
        f"{remedy.time_ratio}x",
    ]


def _held_back_section(diagnosis: Diagnosis, folder: Path) -> Section | None:
    """Score of the winner on held-back questions."""
    if not diagnosis.held_back:
        return None
    text = f"{diagnosis.winner}, the winner of the race, {_winner_gain(diagnosis)}: {diagnosis.held_back}."
    caption = "Held-back questions, with and without the method; bands: 95 %."
    run = diagnosis.runs.get("held-back")
    section = Section("Held-back questions", text)
    return _with_curve(section, run, "held_back", caption, folder)


def _pilot_section(diagnosis: Diagnosis) -> Section:
    """Results of the pilots, and the settings they changed."""
    text = "A few questions at the first, a middle and the last position: whether the task can show a bias at all."
    header = ["settings", "score in %", "missing answers", "so"]
    rows = [_pilot_row(pilot) for pilot in diagnosis.pilots]
    return Section("Pilot", text, header, rows)


def _pilot_row(pilot: Pilot) -> list[str]:
    """Return the cells of a pilot: settings, average score, kinds of missing answers, and what it showed."""
    settings = " ".join(f"{key}={value}" for key, value in pilot.settings.items())
    return [
        settings or "as given",
        points(pilot.average) if pilot.average.n else "",
        pilot.kinds or "0",
        LEVELS[pilot.level],
    ]


def _cost_section(diagnosis: Diagnosis) -> Section:
    """Prompts and time of each part."""
    rows = [
        [
            part,
            str(diagnosis.prompts.get(part, "")),
            duration(seconds),
            diagnosis.runs.get(part, ""),
        ]
        for part, seconds in diagnosis.seconds.items()
    ]
    header = ["part", "prompts", "time", "run"]
    return Section("Cost", f"{diagnosis.total}.", header, rows)


def _nats(value: Estimate | None) -> str:
    assert value is not None, "asked of methods that ran"
    return with_interval(value.value, value.ci_low, value.ci_high)


def _plain(value: Any) -> Any:
    """Data for JSON: estimates as dictionaries, and null for NaN."""
    if isinstance(value, Estimate):
        return _plain(value._asdict())
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
