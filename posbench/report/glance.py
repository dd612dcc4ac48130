"""The first look at a run or a sweep, from its files: what page, terminal and gallery say first."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from posbench import paths
from posbench.files.parse import CORRECT_FILE, read_yaml
from posbench.late import pd
from posbench.methods.choice import MethodChoice
from posbench.model.load import is_in_process
from posbench.report.folder import (
    config_group,
    read_csv,
    read_json,
    study_tables,
)
from posbench.report.tables import has_missing_note, missing_notes, unmeasurable_bias
from posbench.report.text import (
    CITATION,
    MAX_LISTED,
    count_settings,
    count_verdicts,
    has_repeated_claims,
    headline,
    main_claims,
    study_answer,
    tally_verdicts,
)
from posbench.run.folder import (
    FOUND_FILE,
    PREDICTIONS,
    PROVENANCE,
    RunDir,
    open_run_dir,
)
from posbench.run.own_code import make_importable
from posbench.run.runtime import Runtime
from posbench.schema import override_text
from posbench.search import held_back
from posbench.stats.bootstrap import Estimate
from posbench.stats.findings import FINDING_VERDICTS, estimate
from posbench.stats.frames import (
    SERVED,
    UNMODIFIED,
    display_name,
    rows_at_positions,
    rows_over_all_positions,
)
from posbench.stats.glance import (
    Glance,
    Number,
    Tone,
    first_short,
    noun_for,
    sentence_case,
)
from posbench.stats.policies import MARGIN, within_margin
from posbench.stats.position_bias import NEGLIGIBLE_SHARE, fewest_questions
from posbench.stats.shape import (
    NEGLIGIBLE_CONTRAST,
    SHAPES,
    SIDES,
    UNCLEAR,
    shape_in_metrics,
)
from posbench.stats.verdict import (
    BIAS,
    CANNOT_DO,
    CANNOT_TELL,
    FIXED,
    NO_BIAS,
    NOT_FIXED,
    Verdict,
    run_verdict,
    verdict_rule,
)
from posbench.studies.base import Study, read_study

TONES: Mapping[str, Tone] = {
    NO_BIAS: "good",
    FIXED: "good",
    BIAS: "bad",
    NOT_FIXED: "bad",
    CANNOT_DO: "open",
    CANNOT_TELL: "open",
}
"""Tone of each verdict on a position bias."""
KINDS = {
    "paper": "of the paper",
    "control": "that serve as controls",
    "source": "on the source of the bias",
}
"""Whose claims a study judges, by the kind of finding."""
TIME_PHRASES = {
    "ratio": ("takes {} times the time of", "times the time"),
    "speedup": ("is {} times as fast as", "times the speed"),
}
"""How a column of measured times reads in a sentence, and its unit."""
ScoreOrder = Literal["above", "below", "alike", "not compared"]
MAX_WORD_CHARACTERS = 30
"""Characters of the word of a comparison up to which it names the run."""
EXPORT_PURPOSE = "writes the fix as files that others load"
MORE_QUESTIONS = 4
"""Factor on the questions that halves an interval."""
NESTED = re.compile(r"""'[^']*'|"[^"]*"|\[[^\[\]]*\]|\{[^{}]*\}|\([^()]*\)""")
"""What brackets or quotes hold together in an override."""
SWEEP_FUNCTIONS = ("choice", "range", "interval", "glob", "sort", "shuffle")
"""Functions of Hydra that give several values."""
MARGIN_TEXT = f"{100 * MARGIN:.0f} points"
WITHIN_MARGIN = f"within {MARGIN_TEXT}"
"""The word on two scores whose difference is surely too small to matter."""
NOTHING = Glance("nothing scored", "open", "Nothing was scored in this run.")


def run_glance(folder: Path) -> Glance:
    """Return the first look at a run, from its files.

    Args:
        folder: The run.

    Raises:
        UserError: A file cannot be read.
    """
    run = open_run_dir(folder)
    config = run.config()
    metrics = read_csv(folder / "metrics.csv")
    if metrics is not None:
        return _scored_run_glance(run, config, metrics)
    findings = read_csv(folder / "findings.csv")
    facts = read_json(folder / "study.json") or {}
    glance = None
    has_figures = False
    if facts and config.get("study"):
        make_importable(run)
        study = read_study(config["study"])
        has_figures = type(study).figures is not Study.figures
        glance = study.glance(study_tables(folder, facts["tables"]))
    if glance:
        counts = count_verdicts(findings) if findings is not None else ""
        glance = replace(glance, details=f"{glance.details} {counts}".strip())
    elif findings is not None:
        glance = findings_glance(findings)
    else:
        glance = measured_glance(folder)
    if glance == NOTHING and (folder / PREDICTIONS).is_file():
        return Glance(
            "unfinished",
            "open",
            "This run was stopped before its replies were scored.",
            next=f"posbench resume {shlex.quote(str(folder))}",
            purpose="goes on with it",
        )
    if glance.next:
        return _with_subject(glance, run, config)
    if "search" in (config.get("stages") or ()) and not facts:
        if _kept_unmodified(folder):
            return glance
        command = f"posbench method=from:{name_in_commands(run.path)}"
        words = [command, *_subject(run, config)]
        return _with_step(glance, " ".join(words), "evaluates what the search found")
    if has_figures:
        command = f"posbench report {name_in_commands(run.path)} --format pdf"
        return _with_step(glance, command, "draws the figures as PDF, too")
    return glance


def _scored_run_glance(
    run: RunDir, config: Mapping[str, Any], metrics: pd.DataFrame
) -> Glance:
    """The first look at a run that scored, with its next step unless all its answers are right."""
    delivery = run.facts(PROVENANCE).get("delivery")
    glance = scores_glance(metrics, delivery)
    # Where there is no verdict on a bias, the task has no three gold positions for a diagnosis.
    word = glance.word if glance.rule else ""
    base, method, _ = _subjects(metrics)
    is_open = word == CANNOT_TELL and bool(method) and _has_bias(metrics, base)
    command, purpose = _step_after_scores(run, config, word, is_open)
    averages = rows_over_all_positions(metrics)["value"]
    if "--wrong" in command and not (averages < 1).any():
        return glance
    return _with_step(glance, command, purpose)


def _with_subject(glance: Glance, run: RunDir, config: Mapping[str, Any]) -> Glance:
    """The first look at a study's run, its next command with the run's model and task."""
    named = {arg.partition("=")[0] for arg in shlex.split(glance.next)}
    subject = [a for a in _subject(run, config) if _key_of(a) not in named]
    purpose = glance.purpose
    task = config_group(config, "task")
    if "method" in named:
        # The best of several on few questions looks better than it is.
        subject = _without(subject, "task.limit")
        if "seed" in task and not task.get("path"):
            seed = f"task.seed={task['seed'] + 1}"
            subject = [*_without(subject, "task.seed"), seed]
            purpose += ", on new questions"
    return _with_step(glance, " ".join([glance.next, *subject]), purpose)


def _kept_unmodified(folder: Path) -> bool:
    """Whether a search kept the unmodified model, so that there is nothing to evaluate."""
    gains = read_csv(folder / held_back.TABLE_FILE)
    # A committed run may be older than the column.
    return gains is not None and bool(
        gains.get(held_back.KEPT, pd.Series([False])).all()
    )


def _has_bias(metrics: pd.DataFrame, base: str) -> bool:
    """Whether the unmodified model has a position bias for sure."""
    verdict = run_verdict(metrics[metrics["method"] == base])
    return verdict is not None and verdict.name == BIAS


def run_word(folder: Path) -> tuple[str, Tone]:
    """Return word and tone of :func:`run_glance`, in a fraction of its time where a run scored.

    Args:
        folder: The run.

    Raises:
        UserError: A file cannot be read.
    """
    metrics = read_csv(folder / "metrics.csv")
    if metrics is None:
        glance = run_glance(folder)
        return glance.word, glance.tone
    if rows_over_all_positions(metrics).empty:
        return NOTHING.word, NOTHING.tone
    verdict = run_verdict(metrics)
    if verdict:
        return verdict.name, TONES[verdict.name]
    word, tone, _ = _average_verdict(metrics, *_subjects(metrics))
    return word, tone


# Scores


def scores_glance(
    metrics: pd.DataFrame | None, delivery: Mapping[str, Any] | None = None
) -> Glance:
    """Return the first look at the scores of a run, without a next step.

    Args:
        metrics: Rows of metrics.csv; None when nothing was scored.
        delivery: ``delivery`` of the provenance, where a server was asked.
    """
    if metrics is None or rows_over_all_positions(metrics).empty:
        return NOTHING
    base, method, model = _subjects(metrics)
    verdict = run_verdict(metrics)
    details = headline(metrics, delivery, verdict)
    numbers = _score_numbers(metrics, base, method, verdict)
    sample = _sample(metrics, method) or _sample(metrics, base)
    if verdict is None:
        word, tone, sentence = _average_verdict(metrics, base, method, model)
        return Glance(word, tone, sentence, numbers, details=details, sample=sample)
    sentence = _bias_sentence(metrics, verdict, base, method, model)
    # A server that shortens prompts gives any model a bias.
    if verdict.name == BIAS and delivery and delivery.get("unchecked"):
        text = f"{model}, or else its server, has a position bias"
        clause = SHAPES.get(shape_in_metrics(metrics, base), "")
        sentence = first_short(f"{text}: {clause}.", f"{text}.")
    return Glance(
        verdict.name,
        TONES[verdict.name],
        sentence,
        numbers,
        details=details,
        sample=sample,
        rule=verdict_rule(verdict.name),
    )


def _sample(metrics: pd.DataFrame, method: str) -> str:
    """Prompts behind the scores of a method, and their gold positions; empty where it scored nothing."""
    average = _estimate(metrics, method)
    rows = rows_at_positions(metrics)
    positions = rows.loc[rows["method"] == method, "gold_position"].nunique()
    if average is None:
        return ""
    prompts = _prompts(average.n)
    return f"{prompts} at {positions} positions" if positions > 1 else prompts


def _subjects(metrics: pd.DataFrame) -> tuple[str, str, str]:
    """Names of the unmodified model in the rows of metrics.csv, of the method (empty without one), and of the model."""
    methods = list(dict.fromkeys(metrics["method"]))
    base = SERVED if SERVED in methods else UNMODIFIED
    others = [method for method in methods if method != base]
    return base, others[-1] if others else "", str(metrics["model"].iloc[0])


def _score_numbers(
    metrics: pd.DataFrame, base: str, method: str, verdict: Verdict | None
) -> tuple[Number, ...]:
    """The numbers behind a run's verdict: position bias before and after with the change of the average, or one curve.

    Args:
        metrics: Rows of metrics.csv.
        base: Name of the unmodified model in them.
        method: The method; empty without one.
        verdict: The verdict; None where no position bias was measured.
    """
    scores = metrics[~metrics["method"].isin([*missing_notes(metrics)])]
    numbers = []
    is_compared = bool(method) and base in set(metrics["method"])
    subjects = [base, method] if is_compared else [method or base]
    names = [f"position bias, {display_name(subjects[0])}", f"with {method}"]
    for subject, name in zip(subjects, names, strict=False):
        bias = _estimate(scores, subject, "position_bias")
        if bias:
            numbers.append(Number.of(name, bias, "points", "z.1f", 100))
    change = _estimate(scores, method, "difference") if is_compared else None
    if verdict is None or not is_compared:
        for subject in subjects:
            average = _estimate(scores, subject)
            name = "average" if len(subjects) == 1 else f"{display_name(subject)}"
            if average:
                numbers.append(Number.of(name, average, "%", "z.1f", 100))
    if change:
        name = "change of the average"
        numbers.append(Number.of(name, change, "points", "+z.1f", 100))
    elif verdict is not None:
        numbers += _worst_position(scores, subjects[-1])
    return tuple(numbers[:3])


def _worst_position(metrics: pd.DataFrame, method: str) -> list[Number]:
    """The lowest score at a gold position as the only number of a list, which is empty without such scores."""
    rows = rows_at_positions(metrics)
    rows = rows[rows["method"] == method].dropna(subset="value")
    if rows.empty:
        return []
    row = rows.loc[rows["value"].idxmin()]
    name = f"lowest, at {round(100 * row['depth'], 1):g} % of the items"
    return [Number.of(name, estimate(row), "%", "z.1f", 100)]


def _bias_sentence(
    metrics: pd.DataFrame, verdict: Verdict, base: str, method: str, model: str
) -> str:
    """The verdict on a run's position bias as a sentence.

    Args:
        metrics: Rows of metrics.csv.
        verdict: The verdict.
        base: Name of the unmodified model in them.
        method: The method; empty without one.
        model: Name of the model.
    """
    if verdict.name == CANNOT_TELL:
        return _doubt(metrics, base, method, model)
    if verdict.name == CANNOT_DO:
        return (
            f"{model} cannot do this task: no score is reliably above a guess, "
            "so a position bias could not show."
        )
    if verdict.name == NO_BIAS:
        points = f"{100 * NEGLIGIBLE_CONTRAST:g} points"
        return f"No gold position of {model} differs from the others by more than {points}."
    if verdict.name == BIAS:
        shape = shape_in_metrics(metrics, base)
        text = f"{model} has a position bias"
        if shape == UNCLEAR:
            return first_short(
                f"{text}; which part of the prompt it favours cannot be told yet.",
                f"{text}.",
            )
        if shape not in SIDES:
            return f"{text} that favours no part of the prompt as a whole."
        return f"{text}: {SHAPES[shape]}."
    change = _estimate(metrics, method, "difference")
    bias_before = _points(_estimate(metrics, base, "position_bias"))
    bias_after = _points(_estimate(metrics, method, "position_bias"))
    if verdict.name == NOT_FIXED:
        if change and change.ci_high < 0 and "lowers the average" in verdict.reason:
            fall = _points(Estimate(-change.value, *change[1:]))
            return f"{method} is no fix: it lowers the average of {model} by {fall} points."
        return (
            f"{method} removes less than half of the position bias of {model}: "
            f"{bias_before} points before, {bias_after} after."
        )
    if not bias_after:
        if unmeasurable_bias(metrics).get(method, "").startswith("at the ceiling"):
            return f"{method} removes the position bias of {model}: nearly all its answers are right."
        left = verdict.reason.rpartition("; ")[2].removeprefix(f"{method} ")
        return first_short(
            f"{method} removes more than half of the position bias of {model}: it {left}.",
            f"{method} removes more than half of the position bias of {model}.",
        )
    text = f"{method} lowers the position bias of {model} from {bias_before} to {bias_after} points"
    averages = [_estimate(metrics, name) for name in (base, method)]
    shares = [f"{100 * a.value:z.1f} %" for a in averages if a]
    if len(shares) < 2:
        return f"{text}."
    return f"{text}; the average goes from {shares[0]} to {shares[1]}."


def _doubt(metrics: pd.DataFrame, base: str, method: str, model: str) -> str:
    """Say in a sentence why there is no verdict on a run's position bias; arguments as of :func:`_bias_sentence`."""
    lacking = missing_notes(metrics)
    if lacking:
        return _missing_sentence(lacking, model)
    reasons = unmeasurable_bias(metrics)
    note = reasons.get(base, "")
    if note.startswith("at the floor"):
        return f"{method} lifts {model} off the floor of the task, where no bias shows to compare with."
    if note.startswith("at the ceiling"):
        return f"{model} is at the ceiling: it answers nearly all right, so this task can hardly show a position bias."
    n = max(rows_at_positions(metrics)["n"], default=0)
    if not method or note or not _has_bias(metrics, base):
        return f"{_questions(n)} at each position cannot tell whether {model} has a position bias."
    return f"{_questions(n)} at each position cannot tell whether {method} removes the position bias of {model}."


def _prompts(number: int) -> str:
    return f"{number:,} {noun_for(number, 'prompt')}"


def _questions(number: int) -> str:
    return f"{number:,} {noun_for(number, 'question')}"


def _missing_sentence(lacking: Mapping[str, str], model: str) -> str:
    """Say that answers are missing.

    Args:
        lacking: Why, by method.
        model: The model.
    """
    names = " and ".join(map(display_name, lacking))
    return first_short(
        f"Too many replies of {model} ({names}) are no answers, so its scores say nothing.",
        "Too many replies are no answers, so the scores say nothing.",
    )


def _average_verdict(
    metrics: pd.DataFrame, base: str, method: str, model: str
) -> tuple[str, Tone, str]:
    """Return word, tone and sentence on the average of a run whose position bias was not measured.

    Arguments are those of :func:`_bias_sentence`.
    """
    lacking = missing_notes(metrics)
    if lacking:
        return CANNOT_TELL, "open", _missing_sentence(lacking, model)
    before, after = (
        _estimate(metrics, name) if name else None for name in (base, method)
    )
    change = _estimate(metrics, method, "difference") if method else None
    alone = after or before
    if change is None or before is None or after is None:
        subject = f"{method} on {model}" if method else model
        value = f"{100 * alone.value:z.1f} %" if alone else "nothing"
        n = alone.n if alone else 0
        return (
            "measured",
            "open",
            f"{subject} scores {value} on average over {_prompts(n)}.",
        )
    ends = f"from {100 * before.value:z.1f} % to {100 * after.value:z.1f} %"
    if change.ci_low > 0:
        return "better", "good", f"{method} raises the average of {model} {ends}."
    if change.ci_high < 0:
        return "worse", "bad", f"{method} lowers the average of {model} {ends}."
    if within_margin(change.ci_low, change.ci_high):
        sentence = f"{method} changes the average of {model} by less than {MARGIN_TEXT}; it goes {ends}."
        return WITHIN_MARGIN, "open", sentence
    rest = f"cannot be told on {change.n} prompts, where it goes {ends}."
    sentence = first_short(
        f"Whether {method} changes the average of {model} {rest}",
        f"Whether it changes the average {rest}",
    )
    return CANNOT_TELL, "open", sentence


# Claims


def findings_glance(findings: pd.DataFrame) -> Glance:
    """Return the first look at judged claims, without a next step: how many hold, and the one that decides.

    Args:
        findings: Rows of findings.csv, of one run or of many.
    """
    claims = main_claims(findings)
    verdicts = list(claims["verdict"])
    total = len(verdicts)
    counts = {name: verdicts.count(name) for name in FINDING_VERDICTS}
    held, contradicted = counts["holds"], counts["contradicted"]
    tone: Tone = "bad" if contradicted else "open"
    if held == total:
        tone = "good"
    models = [name for name in dict.fromkeys(claims["model"]) if name]
    where = ""
    if models:
        where = f" on {models[0] if len(models) == 1 else f'{len(models)} models'}"
    num_settings = count_settings(claims)
    if num_settings > 1:
        where += f" in {num_settings} settings"
    kind = KINDS[claims["kind"].iloc[0]]
    details = study_answer(findings)
    if total == 1:
        claim = re.sub(CITATION, "", claims["claim"].iloc[0])
        sentence = first_short(
            f"{sentence_case(verdicts[0])[:-1]}{where}: {claim}.",
            f"{sentence_case(verdicts[0])[:-1]}: {claim}.",
            f"The claim {kind} is {verdicts[0]}{where}.".replace("is holds", "holds"),
        )
        return Glance(verdicts[0], tone, sentence, details=details)
    tally = _with_verbs(claims["verdict"])
    text = f"Of {total} claims {kind}{where}, {tally}"
    names = ("claims that hold", "contradicted claims", "undecided claims")
    unit = f"of {total}"
    if has_repeated_claims(claims):
        num_claims = claims["claim"].nunique()
        count = f"{num_claims} {noun_for(num_claims, 'claim')}"
        text = f"{count} {kind}{where}: of {total} verdicts, {tally}"
        names = ("hold", "contradicted", "undecided")
        unit = f"of {total} verdicts"
    decisive = claims[
        claims["verdict"] == ("contradicted" if contradicted else "holds")
    ]
    sentences = [f"{text}."]
    if len(decisive) == 1:
        claim = re.sub(CITATION, "", decisive["claim"].iloc[0])
        verdict = decisive["verdict"].iloc[0]
        sentences.insert(0, f"{text}; {verdict}: {claim}.")
    numbers = [
        Number(name, str(count), unit)
        for name, count in zip(
            names, (held, contradicted, total - held - contradicted), strict=True
        )
        if count
    ]
    word = f"{held} of {total} hold"
    return Glance(word, tone, first_short(*sentences), tuple(numbers), details=details)


def _with_verbs(verdicts: pd.Series) -> str:
    """The tally of verdicts as clauses, as `3 hold, 1 is contradicted, 2 are inconclusive`."""
    clauses = []
    for part in tally_verdicts(verdicts).split(", "):
        count, _, word = part.partition(" ")
        verb = "" if word.startswith("hold") else ("is " if count == "1" else "are ")
        clauses.append(f"{count} {verb}{word}")
    return ", ".join(clauses)


# Gains of a search, and times


def measured_glance(folder: Path) -> Glance:
    """Return the first look at a run without scores and claims, and without a next step: its search or its times.

    Args:
        folder: The run.
    """
    details = describe_measurements(folder)
    gains = read_csv(folder / held_back.TABLE_FILE)
    if gains is not None:
        facts = {str(name): value for name, value in gains.iloc[0].items()}
        return gain_glance(facts, details)
    study = read_json(folder / "study.json") or {}
    if study:
        nothing = Glance(
            "measured",
            "open",
            "This study judges no claims: its numbers are in its tables.",
        )
    else:
        nothing = NOTHING
    for table in study_tables(folder, study.get("tables", ())).values():
        for column, (phrase, unit) in TIME_PHRASES.items():
            rows = _timed_rows(table, column)
            if not rows:
                continue
            ratios = [row[column] for row in rows]
            numbers = tuple(
                Number(str(row["way"]), f"{row[column]:.2f}", unit) for row in rows[:3]
            )
            first = rows[0]
            verb = phrase.format(f"{first[column]:.2f}")
            sentence = f"{first['way']} {verb} {display_name(first['base'])}."
            if len(rows) > 1:
                span = f"{min(ratios):.2f} to {max(ratios):.2f} {unit}"
                sentence = f"{len(rows)} ways were timed: {span} of what they are compared with."
            sentence = first_short(sentence, f"{len(rows)} ways were timed.")
            return Glance("measured", "open", sentence, numbers, details=details)
    return nothing


def gain_glance(facts: Mapping[str, Any], details: str) -> Glance:
    """The first look at a search by its gain on held-back prompts.

    Args:
        facts: The row of ``held_back.csv``.
        details: All of it in words.
    """
    if not held_back.was_checked(facts):
        sentence = "Too few prompts are held back to check what the search found."
        return Glance("not checked", "open", sentence, details=details)
    measure = facts["measure"]
    unit = "nats per answer token" if measure == "loss" else f"of the {measure}"
    gain = Estimate(facts["gain"], facts["ci_low"], facts["ci_high"], int(facts["n"]))
    numbers = (
        Number.of("gain", gain, unit),
        Number(f"{measure}, found", f"{facts['found']:.3g}", unit),
        Number(
            f"{measure}, {held_back.baseline(facts)}",
            f"{facts['unmodified']:.3g}",
            unit,
        ),
    )
    verb = "lowers" if measure == "loss" else "raises"
    sample = f"{facts['n']} held-back prompts"
    word = "no gain"
    tone: Tone = "bad"
    sentence = f"What the search found shows no gain worth naming on {sample}."
    if not held_back.shows_no_gain(facts):
        word, tone = "gains", "good"
        ends = f"from {facts['unmodified']:.3g} to {facts['found']:.3g}"
        sentence = f"What the search found {verb} the {measure} {ends} on {sample}."
    elif held_back.harms(facts):
        word = "harms"
        verb = "raises" if measure == "loss" else "lowers"
        sentence = f"What the search found {verb} the {measure} on {sample}."
    elif held_back.may_gain(facts):
        word, tone = CANNOT_TELL, "open"
        sentence = f"Whether what the search found helps cannot be told on {sample}."
    return Glance(word, tone, sentence, numbers, details=details, sample=sample)


def describe_measurements(folder: Path) -> str:
    """Say what a run without scores and claims measured: the gain of a search, the times of a study.

    It is empty where the run has neither.
    """
    texts = []
    gains = read_csv(folder / held_back.TABLE_FILE)
    if gains is not None:
        texts.append(held_back.summary_sentence(gains.iloc[0]))
    study = read_json(folder / "study.json") or {}
    times = list[str]()
    for table in study_tables(folder, study.get("tables", ())).values():
        for column, (phrase, _) in TIME_PHRASES.items():
            times += _describe_times(table, column, phrase)
    texts += times[:MAX_LISTED]
    if len(times) > MAX_LISTED:
        texts.append(f"{len(times) - MAX_LISTED} more")
    return "; ".join(texts) + "." if texts else ""


def _describe_times(table: pd.DataFrame, column: str, phrase: str) -> list[str]:
    """One text for each variant: its time over that of its baseline.

    Args:
        table: A table of a study; without the columns of measured times there is no
            text.
        column: Ratio of a variant's time to its baseline's, over rounds; `_min` and `_max` of it are columns, too.
        phrase: Format of a sentence about the ratio, such as "takes {} times as long as".
    """
    texts = []
    for row in _timed_rows(table, column):
        verb = phrase.format(f"{row[column]:.2f}")
        low = row[f"{column}_min"]
        high = row[f"{column}_max"]
        spread = f"{row['work']}; {low:.2f} to {high:.2f} over rounds"
        if row.get("n") == 1:
            spread = f"{row['work']}; one round"
        texts.append(f"{row['way']} {verb} {display_name(row['base'])} ({spread})")
    return texts


def _timed_rows(table: pd.DataFrame, column: str) -> list[dict[str, Any]]:
    """The variants of a table of measured times without their baselines; none in another table."""
    needed = {"work", "way", "base", f"{column}_min", f"{column}_max"}
    if not needed <= set(table):
        return []
    rows: list[dict[str, Any]] = table[table["way"] != table["base"]].to_dict("records")
    return rows


# Runs side by side


def score_order(row: Mapping[str, Any]) -> ScoreOrder:
    """Return whether a run surely scores above or below the first one: all that is said of two runs rests on this.

    Args:
        row: The run's row of comparison.csv.
    """
    if row["score_difference"] is None:
        return "not compared"
    if row["score_difference_ci_low"] > 0:
        return "above"
    return "below" if row["score_difference_ci_high"] < 0 else "alike"


def comparison_glance(
    rows: Sequence[Mapping[str, Any]], folders: Sequence[Path] = ()
) -> Glance:
    """Return the first look at runs side by side: which of them score above or below the first one.

    Args:
        rows: Rows of comparison.csv.
        folders: The runs in the same order; of two the better one's fix is then the next step.
    """
    first, others = rows[0], rows[1:]
    names = list(map(name_in_commands, folders)) or [row["run"] for row in rows]
    purpose = "shows prompts that were answered wrong"
    if len(others) > 1:
        glance = _glance_at_many(first, [score_order(row) for row in others])
        return _with_step(glance, f"posbench show {names[-1]} --wrong", purpose)
    glance = _glance_at_two(first, others[0])
    better = _better_of_two(others[0])
    if folders and better is not None:
        look = run_glance(folders[better])
        if look.purpose == EXPORT_PURPOSE:
            return _with_step(glance, look.next, f"{look.purpose}, of the better run")
    worse = names[-1 if better is None else 1 - better]
    return _with_step(glance, f"posbench show {worse} --wrong", purpose)


def _better_of_two(second: Mapping[str, Any]) -> int | None:
    """Which of two runs surely scores higher, or has the lower position bias at scores alike: 0, 1, or None.

    Args:
        second: The second run's row of comparison.csv.
    """
    order = score_order(second)
    if order in ("above", "below"):
        return int(order == "above")
    if order == "not compared" or second["position_bias_difference"] is None:
        return None
    change = estimate(second, "position_bias_difference", 100)
    if change.ci_low <= 0 <= change.ci_high:
        return None
    return int(change.value < 0)


def _glance_at_many(first: Mapping[str, Any], orders: Sequence[ScoreOrder]) -> Glance:
    """The first look at three runs or more, without a next step.

    Args:
        first: The first run's row.
        orders: How each of the others scores beside it.
    """
    above, below, alike = (orders.count(o) for o in ("above", "below", "alike"))
    rest = orders.count("not compared")
    end = f"; {rest} cannot be compared." if rest else "."
    score = "scores" if above == 1 else "score"
    count = f"Of {len(orders)} runs, {above} {score} above"
    tone: Tone = "open"
    if above and not below:
        tone = "good"
    elif below and not above:
        tone = "bad"
    numbers = tuple(
        Number(name, str(number), f"of {len(orders)}")
        for name, number in (
            ("runs above", above),
            ("runs below", below),
            ("runs that cannot be told apart", alike),
        )
    )
    sentence = first_short(
        f"{count} {first['label']}, {below} below{end}",
        f"{count} the first, {below} below{end}",
    )
    rule = (
        "Above and below: the 95 % interval of the difference does not hold zero. Each interval stands alone: of 20 "
        "runs that do not differ about one is called above or below by chance."
    )
    return Glance(f"{above} above, {below} below", tone, sentence, numbers, rule=rule)


def _glance_at_two(first: Mapping[str, Any], second: Mapping[str, Any]) -> Glance:
    """The first look at two runs, without a next step. Neither is good or bad: their order is the reader's."""
    order = score_order(second)
    if order == "not compared":
        sentence = "One of the runs has no score, so they cannot be compared."
        if None not in (first["score"], second["score"]):
            sentence = (
                "Their gold positions differ, so their averages cannot be compared."
            )
        return Glance(CANNOT_TELL, "open", sentence)
    first_name, second_name = _short_names(first["label"], second["label"])
    better = _better_of_two(second)
    high, low, ordinal = second_name, first_name, "second"
    if better == 0:
        high, low, ordinal = first_name, second_name, "first"
    numbers = []
    for name in ("score", "position_bias"):
        column = f"{name}_difference"
        if second[column] is not None:
            change = estimate(second, column, 100)
            if better == 0:
                value, ci_low, ci_high, n = change
                change = Estimate(-value, -ci_high, -ci_low, n)
            title = f"{name.replace('_', ' ')}, {high} minus {low}"
            numbers.append(Number.of(title, change, "points", "+z.1f"))
    sample = f"{first['n']:,} and {second['n']:,} prompts"
    shared = ""
    if second["pairs"]:
        sample = f"paired on {second['pairs']:,} prompts"
        shared = f" on the {second['pairs']:,} prompts that both were asked"
    is_close = within_margin(
        second["score_difference_ci_low"], second["score_difference_ci_high"]
    )
    if better is None and is_close:
        word = WITHIN_MARGIN
        rest = f"score within {MARGIN_TEXT} of each other."
        sentence = first_short(
            f"{second_name} and {first_name} {rest}", f"The two runs {rest}"
        )
    elif better is None:
        word = CANNOT_TELL
        rest = "scores higher cannot be told."
        sentence = first_short(
            f"Which of {second_name} and {first_name} {rest}",
            f"Which of the two runs {rest}",
        )
    elif order == "alike":
        word = _word_of_two(high, ordinal, "less biased")
        scores = "which one scores higher cannot be told"
        if is_close:
            scores = f"the scores differ by less than {MARGIN_TEXT}"
        rest = f"has the lower position bias; {scores}."
        sentence = first_short(f"{high} {rest}", f"The {ordinal} run {rest}")
        # The number that decides comes first.
        numbers.reverse()
    else:
        word = _word_of_two(high, ordinal, "higher")
        points = f"{abs(estimate(second, 'score_difference', 100).value):z.1f} points"
        sentence = first_short(
            f"{high} scores {points} above {low}{shared}.",
            f"{high} scores {points} above {low}.",
            f"The {ordinal} run scores {points} above the other.",
        )
    return Glance(word, "open", sentence, tuple(numbers), sample=sample)


def _word_of_two(name: str, ordinal: str, comparison: str) -> str:
    """The word of a comparison, as `tiny higher`, or `second run higher` where a name is long."""
    word = f"{name} {comparison}"
    return word if len(word) <= MAX_WORD_CHARACTERS else f"{ordinal} run {comparison}"


def _short_names(first: str, second: str) -> tuple[str, str]:
    """Model or method of two runs' labels where these alone tell them apart, else the labels: settings are long.

    A setting that both labels name differs as well. What one label names alone is a setting of its method.
    """
    names, settings = [], []
    for label in (first, second):
        name, *rest = label.split(", ")
        names.append(name)
        # A text without a key is a method behind the name of a model.
        settings.append(
            {text.partition("=")[0] if "=" in text else "" for text in rest}
        )
    if names[0] == names[1] or settings[0] & settings[1]:
        return first, second
    return names[0], names[1]


# What to do next


def _with_step(glance: Glance, command: str, purpose: str) -> Glance:
    """The same with the command to run next."""
    return replace(glance, next=command, purpose=purpose)


def _step_after_scores(
    run: RunDir, config: Mapping[str, Any], word: str, is_method_open: bool
) -> tuple[str, str]:
    """Return the command after a run that scored, and what it does.

    Args:
        run: The run.
        config: Its config.
        word: Its verdict on a position bias; empty without one.
        is_method_open: Whether the model has a bias for sure, and what the method does about it cannot be told.
    """
    name = name_in_commands(run.path)
    subject = _subject(run, config)
    node = config_group(config, "method")
    make_importable(run)
    choice = MethodChoice.of(node) if "_target_" in node else None
    in_process = is_in_process(config.get("model"))
    to = choice.export_format if choice else "transformers"
    # Where a search kept the unmodified model, another part of a list made the fix, and no file holds that.
    holds_fix = to and not _kept_unmodified(run.path)
    if word == FIXED and in_process and holds_fix:
        return f"posbench export {name} --to {to} --out fix", EXPORT_PURPOSE
    if word == NOT_FIXED and in_process:
        words = ["posbench study=remedies", *subject]
        return " ".join(words), "asks the same questions under every remedy"
    others = _without(subject, "task.limit")
    limit = config_group(config, "task").get("limit")
    method = _method_as_typed(run, config, name) if is_method_open else None
    if limit and method is not None:
        more = MORE_QUESTIONS * limit
        purpose = f"asks {MORE_QUESTIONS} times as many questions"
        # With fewer nothing can be seen near 0 and 100 %.
        if more < (least := fewest_questions(NEGLIGIBLE_SHARE)):
            more = least
            purpose = f"asks {least} questions at each gold position"
        words = ["posbench", *method, *others, f"task.limit={more}"]
        return " ".join(words), purpose
    # A diagnosis asks as many questions as it needs; those of this run may be too few.
    command = " ".join(["posbench diagnose", *(method or []), *others])
    if word in (BIAS, NOT_FIXED):
        return command, "looks for where it comes from and what helps"
    if word == CANNOT_TELL:
        return command, "asks until it can tell, or says what that takes"
    return f"posbench show {name} --wrong", "shows prompts that were answered wrong"


def name_in_commands(run: Path) -> str:
    """What a verb calls the run in a folder: its hash, or its folder outside the default outputs.

    Its page is the same wherever the outputs are moved, so that it names them as they were.
    """
    config = open_run_dir(run).config()
    outputs = config_group(config, "runtime").get("outputs", Runtime.outputs)
    if outputs == Runtime.outputs:
        return run.absolute().name.rpartition("__")[2]
    parts = run.absolute().parts[-3:]
    return shlex.quote("/".join([str(outputs).rstrip("/"), *parts]))


def _subject(run: RunDir, config: Mapping[str, Any]) -> list[str]:
    """The model and the task of a run as the overrides of another command, the model's and the task's name first.

    They are as typed; a swept key has the value of this run, and so have the keys that its experiment sets.
    """
    args = shlex.split(str(run.facts(PROVENANCE).get("command", "")))
    typed = {}
    for arg in args:
        if re.match(r"[+~]*(model|task)[.=]", arg):
            typed[arg.lstrip("+~").partition("=")[0]] = arg
    flags = []
    if "--config-dir" in args[:-1]:
        flags = ["--config-dir", args[args.index("--config-dir") + 1]]
    folders = [*paths.BUILT_IN, *paths.plugins(), *map(Path, flags[1:])]
    chosen = _keys_of_experiment(config, folders) - typed.keys()
    # The jobs of a sweep share its command.
    if _is_sweep(args):
        chosen |= {key for key, arg in typed.items() if _is_swept(arg)}
    for key in sorted(chosen - {"model", "task"}):
        value: Any = config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        override = typed.pop(key, "")
        if value is not None:
            added = "+" * (len(override) - len(override.lstrip("+")))
            typed[key] = f"{added}{key}={override_text(value)}"
    for group in ("model", "task"):
        named = config_group(config, group).get("name")
        is_choice = paths.find_choice(group, str(named), folders) is not None
        # Fields of the default model or task are typed without its name, those of an experiment's with it.
        has_fields = any(key.startswith(f"{group}.") for key in typed)
        is_left_open = not has_fields or ("experiment" in config and is_choice)
        if named and (group in chosen or (group not in typed and is_left_open)):
            typed.pop(group, None)
            if not is_choice:
                named = config[group].get("path") or named
            typed = {group: f"{group}={named}", **typed}
    return [shlex.quote(arg) for arg in [*typed.values(), *flags]]


def _keys_of_experiment(config: Mapping[str, Any], folders: Sequence[Path]) -> set[str]:
    """Keys of the model and the task that the experiment of a run sets, or sweeps.

    Args:
        config: The run's config.
        folders: Config folders.
    """
    experiment = config_group(config, "experiment")
    file = paths.find_choice("experiment", str(experiment.get("name")), folders)
    grid = experiment.get("grid") or {}
    keys = {key for key in grid if re.match(r"(model|task)(\.|$)", key)}
    for group in ("model", "task"):
        settings = read_yaml(file, hint=CORRECT_FILE).get(group) if file else None
        keys |= {f"{group}.{name}" for name in settings or {}}
    return keys


def _is_sweep(args: Sequence[str]) -> bool:
    """Whether a command makes several runs."""
    return "-m" in args or "--multirun" in args


def _is_swept(override: str) -> bool:
    """Whether an override of a sweep has several values: a comma outside of brackets and quotes, or such a function."""
    value = override.partition("=")[2]
    while (outside := NESTED.sub("", value)) != value:
        value = outside
    return "," in value or value in SWEEP_FUNCTIONS


def _method_as_typed(
    run: RunDir, config: Mapping[str, Any], name: str
) -> list[str] | None:
    """The method of a run as the overrides of another command; None where the command named several.

    It is as typed, or with the constants that the run found, or that of its experiment.
    """
    if (run.path / FOUND_FILE).is_file():
        return [f"method=from:{name}"]
    args = shlex.split(str(run.facts(PROVENANCE).get("command", "")))
    if _is_sweep(args):
        return None
    node = config_group(config, "method")
    if "experiment" in config and not any(re.match(r"method[.=]", a) for a in args):
        # The experiment chose it.
        values = {k: v for k, v in node.items() if k != "_target_" and v is not None}
        if "parts" in values or "name" not in values:
            return None
        words = [f"method={values.pop('name')}"]
        words += [f"method.{key}={override_text(v)}" for key, v in values.items()]
        return list(map(shlex.quote, words))
    return [shlex.quote(arg) for arg in args if re.match(r"method[.=]", arg)]


def _without(overrides: Sequence[str], key: str) -> list[str]:
    """The overrides without that of a key."""
    return [override for override in overrides if _key_of(override) != key]


def _key_of(override: str) -> str:
    """The key that an override sets, which may be quoted for a shell."""
    return override.lstrip("+~'").partition("=")[0]


# Numbers


def _estimate(metrics: pd.DataFrame, method: str, metric: str = "") -> Estimate | None:
    """A number of a method over all gold positions; None where it was not measured, or answers are missing."""
    rows = rows_over_all_positions(metrics, metric)
    rows = rows[(rows["method"] == method) & ~has_missing_note(rows)]
    rows = rows.dropna(subset=["value", "ci_low"])
    return None if rows.empty else estimate(rows.iloc[0])


def _points(estimate: Estimate | None) -> str:
    """A share as points; empty where it is not known."""
    return "" if estimate is None else f"{100 * estimate.value:z.1f}"
