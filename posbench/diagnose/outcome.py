"""Findings of the parts of a diagnosis, in words and as data; nothing here runs a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from posbench.late import pd
from posbench.stats.bootstrap import (
    NO_ESTIMATE,
    Array,
    Estimate,
    combined,
    mean,
    with_interval,
)
from posbench.stats.frames import UNMODIFIED
from posbench.stats.outcomes import (
    CUT_METRIC,
    MAX_MISSING_SHARE,
    THINKING_METRIC,
    describe_kinds,
    kind_of_row,
    next_step,
)
from posbench.stats.position_bias import FLOOR_MARGIN, NEGLIGIBLE_SHARE
from posbench.stats.shape import (
    FLAT,
    SHAPES,
    UNCLEAR,
    UNEVEN,
    curve_in_metrics,
    name_shape,
)
from posbench.stats.verdict import BIAS, FIXED, NOT_FIXED
from posbench.studies.base import Tables
from posbench.studies.bias_source import (
    INTERVENTIONS,
    NO_GAP,
    best_place,
    read_effects,
)
from posbench.studies.structure import CAUSE, DIRECTION, conclude

Level = Literal["in between", "floor", "ceiling", "missing answers"]
"""Whether a model's replies on a task can show a position bias, and if not, why."""
LEVELS: Mapping[Level, str] = {
    "in between": "its replies can show a position bias",
    "floor": "the model is at the floor",
    "ceiling": "the model is at the ceiling",
    "missing answers": "replies are no answers",
}
"""The levels in words."""

BEST_POSITION_MARGIN = 0.3
"""At the floor, the best position is surely less than this above a guess."""
CEILING_MARGIN = 0.2
"""At the ceiling, the average is surely less than this below 1."""
MIN_MISSING = 2
"""Number of missing answers from which a pilot shows nothing."""


@dataclass(frozen=True)
class Pilot:
    """Result of a few questions at the first, a middle and the last position of a task.

    Attributes:
        level: Whether the replies can show a position bias.
        average: Score over all answers, 0..1, with its interval; NaN where there is none.
        missing: Number of replies without an answer.
        kinds: Their kinds with counts and reasons, in words.
        step: The change to make then; empty where longer replies help.
        is_cut: Whether most were cut, so that longer replies help.
        thinks: Whether most of the cut ones ended in the model's thinking.
        settings: Settings of the task that the diagnosis changed, by key.
    """

    level: Level
    average: Estimate
    missing: int
    kinds: str = ""
    step: str = ""
    is_cut: bool = False
    thinks: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


def none_of(methods: int) -> str:
    """The subject of a sentence on so many methods that were tried."""
    return f"none of {methods} methods" if methods > 1 else "no method that was tried"


def judge_pilot(
    rows: Sequence[Mapping[str, Any]],
    metric: str,
    chance: float,
    settings: Mapping[str, Any],
) -> Pilot:
    """Judge from the rows of a pilot whether the replies can show a position bias.

    Args:
        rows: Rows of predictions.jsonl.
        metric: The score that counts.
        chance: Score of a guess, 0..1.
        settings: Settings that the diagnosis changed.
    """
    scored = [row for row in rows if row.get("scores")]
    scores = [float(row["scores"][metric]) for row in scored]
    clusters = [row["cluster"] or row["id"] for row in scored]
    average = mean(scores, clusters) if scores else NO_ESTIMATE
    kinds = Counter(kind for row in rows if (kind := kind_of_row(row)))
    missing = kinds.total()
    by_position: dict[Any, list[float]] = {}
    for row, score in zip(scored, scores, strict=True):
        by_position.setdefault(row["gold_position"], []).append(score)
    best = max(
        (sum(values) / len(values) for values in by_position.values()), default=0.0
    )
    level: Level = "in between"
    if missing >= MIN_MISSING and missing > MAX_MISSING_SHARE * len(rows):
        level = "missing answers"
    elif (
        average.ci_high < chance + FLOOR_MARGIN and best < chance + BEST_POSITION_MARGIN
    ):
        level = "floor"
    elif average.ci_low > 1 - CEILING_MARGIN and average.value >= 1 - NEGLIGIBLE_SHARE:
        level = "ceiling"
    num_cut = kinds[CUT_METRIC] + kinds[THINKING_METRIC]
    is_cut = 2 * num_cut > missing
    step = ""
    if missing and not is_cut:
        pairs = [(kind_of_row(row), str(row.get("reason", ""))) for row in rows]
        step = next_step([pair for pair in pairs if pair[0]], max_new_tokens=1)
    return Pilot(
        level,
        average,
        missing,
        kinds=describe_kinds(rows),
        step=step,
        is_cut=is_cut,
        thinks=2 * kinds[THINKING_METRIC] > num_cut,
        settings=dict(settings),
    )


@dataclass(frozen=True)
class Shape:
    """The shape of the score over the gold position.

    Attributes:
        name: One of :data:`posbench.stats.shape.SHAPES`.
        contrasts: ``primacy`` and ``recency``: first and last position minus the mean of the inner ones.
        positions: Each gold position minus the mean of the others.
        questions: Questions at each position.
    """

    name: str
    contrasts: Mapping[str, Estimate]
    positions: Sequence[Estimate]
    questions: int


def shape_of_run(metrics: pd.DataFrame) -> Shape | None:
    """The shape of the first method in metrics.csv of a run; None for fewer than three gold positions."""
    curve = curve_in_metrics(metrics, metrics["method"].iloc[0])
    if curve is None:
        return None
    contrasts = {"primacy": curve.primacy, "recency": curve.recency}
    questions = min(contrast.n for contrast in curve.contrasts)
    return Shape(name_shape(curve), contrasts, curve.contrasts, questions)


@dataclass(frozen=True)
class Source:
    """Sources of the gap between positions, by interventions that remove them.

    Attributes:
        gap: Loss at the worst gold position minus that at the best one, nats per answer token.
        shares: Share of the gap that each intervention closes, by its description.
        named: Sources with an intervention that closes a third of the gap or more, for sure.
        excluded: Sources with an intervention that surely closes less, and makes the item look like one at the best
            place.
        questions: Questions at each position.
    """

    gap: Estimate
    shares: Mapping[str, Estimate]
    named: Sequence[str]
    excluded: Sequence[str]
    questions: int

    def __str__(self) -> str:
        """The finding, in a sentence."""
        if self.gap.ci_low <= 0:
            return f"cannot tell: on these questions {NO_GAP}"
        if not self.named and not self.excluded:
            return (
                "cannot tell: no intervention surely closes a third of the gap, or less"
            )
        named = f"the {' and the '.join(self.named)}"
        excluded = f"the {' and the '.join(self.excluded)}"
        if not self.named:
            return f"less than a third of the gap from {excluded}"
        text = f"{named}: an intervention on the gold item closes a third of the gap or more"
        if len(self.named) > 1:
            text += (
                "; either alone does, which is consistent with a preference for places that training taught, "
                "and not with one part of the architecture alone"
            )
        if self.excluded:
            text += f"; less than a third from {excluded}"
        return text


def judge_source(tables: Tables, findings: pd.DataFrame) -> Source:
    """Say which sources contribute, from a run of ``study=bias_source``.

    Args:
        tables: Its tables.
        findings: Its verdicts, corrected for their number.
    """
    effects = read_effects(tables)
    verdict_of_claim = dict(zip(findings["claim"], findings["verdict"], strict=True))
    verdicts = {
        name: verdict_of_claim[intervention.claim]
        for name, intervention in INTERVENTIONS.items()
        if f"{name}_share" in effects
    }
    # Only interventions that make the item look like one at the best place can rule a source out.
    places = ("", best_place(tables))
    named = [
        INTERVENTIONS[name].source
        for name, verdict in verdicts.items()
        if verdict == "holds"
    ]
    excluded = [
        INTERVENTIONS[name].source
        for name, verdict in verdicts.items()
        if verdict == "contradicted"
        and effects[f"{name}_over_bound"].ci_high < 0
        and INTERVENTIONS[name].place in places
    ]
    table = tables["bias_source"]
    unmodified = table[table["variant"] == UNMODIFIED]
    return Source(
        gap=effects["gap"],
        shares={
            str(INTERVENTIONS[name]): effects[f"{name}_share"] for name in verdicts
        },
        named=list(dict.fromkeys(named)),
        excluded=[source for source in dict.fromkeys(excluded) if source not in named],
        questions=int(unmodified["n"].min()),
    )


def judge_structure(findings: pd.DataFrame) -> str:
    """Say what structure alone predicts of the bias, from the verdicts of a run of ``study=structure``."""
    rows = findings.set_index("claim")
    verdicts = [str(rows.loc[claim, "verdict"]) for claim, _ in (DIRECTION, CAUSE)]
    word, _, sentence = conclude(*verdicts)
    text = f"{word}: {sentence[:1].lower()}{sentence[1:].removesuffix('.')}"
    note = rows.loc[CAUSE[0], "note"]
    return text if pd.isna(note) else f"{text} ({note})"


@dataclass(frozen=True)
class Remedy:
    """A method in the race on calibration prompts.

    Attributes:
        name: The method.
        gain: Fall of the loss in nats per answer token, paired with the unmodified model; None: it was not run.
        time_ratio: Its time divided by the unmodified model's on the same prompts.
        note: Why it was not run.
    """

    name: str
    gain: Estimate | None = None
    time_ratio: float | None = None
    note: str = ""


@dataclass
class Diagnosis:
    """All findings; parts that were not reached are None.

    Attributes:
        model: Name of the model.
        task: Name of the task.
        verdict: One of :data:`posbench.stats.verdict.VERDICTS`.
        reason: The numbers or the obstacle behind it.
        pilots: The pilots, the last one of the task that was then asked.
        shape: The shape.
        needed_questions: Questions at each position, in all, that would decide on a bias; None: decided, or more
            than the farthest forecast.
        source: The source.
        source_note: Why the source was not looked for.
        structure: What mask, ALiBi and residual stream alone predict of the bias; empty: not compared.
        remedies: The race, the best first.
        remedies_note: Why there was no race, or no winner.
        winner: The method that was asked on held-back questions.
        winner_changes: What it changes: ``prompt``, ``model`` or ``prompt and model``.
        held_back: The verdict on it.
        place: Where in a prompt to put what matters; empty: no place is surely better, or it was not looked for.
        prompt_changes: Verdict, policy, reason, recipe and table of ``study=order``; None: not raced.
        prompt_changes_note: Why they were not raced.
        next: The command to run next; empty: nothing is left to do.
        runs: Run folders by part.
        prompts: Prompts that were answered, by part.
        seconds: Time of each part.
        total: Prompts, tokens and time of the whole diagnosis, in words.
        total_seconds: Time of all, loading and checks among it.
    """

    model: str
    task: str
    verdict: str = ""
    reason: str = ""
    pilots: list[Pilot] = field(default_factory=list)
    shape: Shape | None = None
    needed_questions: int | None = None
    source: Source | None = None
    source_note: str = ""
    structure: str = ""
    remedies: list[Remedy] = field(default_factory=list)
    remedies_note: str = ""
    winner: str = ""
    winner_changes: str = "model"
    held_back: str = ""
    place: str = ""
    prompt_changes: Mapping[str, Any] | None = None
    prompt_changes_note: str = ""
    next: str = ""
    runs: dict[str, str] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    total: str = ""
    total_seconds: float = 0.0

    @property
    def headline(self) -> str:
        """The answer in a sentence or two."""
        text = f"Verdict: {self.verdict} ({self.reason})."
        name = self.shape.name if self.shape else UNCLEAR
        has_bias = self.verdict in (BIAS, FIXED, NOT_FIXED)
        if has_bias and name not in (FLAT, UNCLEAR):
            article = "an" if name == UNEVEN else "a"
            bias = f"{self.model} has {article} {name} bias on {self.task}"
            text = f"{bias}: {SHAPES[name]}. {text}"
        return text

    def as_data(self) -> dict[str, Any]:
        """The diagnosis as plain data, for diagnosis.json."""
        return asdict(self) | {"headline": self.headline}


def best_place_in_prompt(scores: Array, positions: Sequence[int]) -> str:
    """Say where in a prompt an item is answered best; empty where no place is surely better than the others.

    Every other question chooses the place, and the rest measure it.

    Args:
        scores: Score of each question at each gold position, shape (questions, positions), 0..1.
        positions: The gold positions, in ascending order.
    """
    choosing, measuring = scores[::2], scores[1::2]
    if len(measuring) < 2:
        return ""
    curve = choosing.mean(axis=0)
    best = int(curve.argmax())
    last = len(positions) - 1
    place = {0: "first", last: "last"}.get(best, f"at item {positions[best] + 1}")
    chosen = [best]
    if best == 0 and curve[last] == curve[0]:
        place = "first or last"
        chosen = [0, last]
    there = measuring[:, chosen].mean(axis=1)
    others = np.delete(measuring, chosen, axis=1).mean(axis=1)
    # Where all answers are right at the place, the differences vary too little to tell how sure that is.
    questions = [str(number) for number in range(len(there))]
    means = [mean(there, questions), mean(others, questions)]
    vary = there.std() > 0 and others.std() > 0
    correlation = float(np.corrcoef(there, others)[0, 1]) if vary else 0.0
    gain = combined(means, (1, -1), len(there), correlation)
    if gain.ci_low <= 0:
        return ""
    return (
        f"put what matters {place}: {100 * there.mean():.0f} % right there, {100 * others.mean():.0f} % elsewhere, "
        f"{points(gain)} points more on {gain.n} questions that did not choose the place"
    )


def points(value: Estimate) -> str:
    """An estimate of a share as points with its interval."""
    return with_interval(100 * value.value, 100 * value.ci_low, 100 * value.ci_high)
