"""What the parts of a diagnosis found, in words and as data; nothing here runs a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from posbench.late import pd
from posbench.stats.bootstrap import Estimate, mean, with_interval
from posbench.stats.cut_replies import MAX_SHARE
from posbench.stats.findings import estimate
from posbench.stats.position_bias import NEGLIGIBLE_SHARE
from posbench.stats.shape import SHAPES, WITHOUT_SIDE, Shape

Level = Literal["in between", "floor", "ceiling", "cut"]
"""Where a model stands on a task: whether its replies can show a position bias."""

FLOOR_MARGIN = 0.15
"""A model is at the floor where its average is surely less than this above that of a guess."""
CEILING_MARGIN = 0.15
"""A model is at the ceiling where its average is surely less than this below 1."""
MIN_CUT = 2
"""Cut replies from which a pilot asks again with more tokens."""
LARGE_EFFECT = 1 / 3
"""Share of the gap between the ends and the inner positions that an intervention on a source closes at least."""


@dataclass(frozen=True)
class Pilot:
    """What a few questions at the first, a middle and the last position say of a task.

    Attributes:
        level: Where the model stands.
        average: Score over all of them, 0..1, with its interval.
        cut: Replies that were cut before an answer.
        settings: Settings of the task that the diagnosis changed, by key.
    """

    level: Level
    average: Estimate
    cut: int
    settings: Mapping[str, Any] = field(default_factory=dict)


def judge_pilot(
    rows: Sequence[Mapping[str, Any]],
    metric: str,
    chance: float,
    settings: Mapping[str, Any],
) -> Pilot:
    """Say where a model stands from the rows of a pilot.

    Args:
        rows: Rows of predictions.jsonl.
        metric: The score that counts.
        chance: Score of a guess, 0..1.
        settings: What the diagnosis changed.
    """
    scored = [row for row in rows if row.get("scores")]
    scores = [float(row["scores"][metric]) for row in scored]
    clusters = [row["cluster"] or row["id"] for row in scored]
    average = mean(scores, clusters)
    cut = sum(bool(row.get("cut")) for row in rows)
    by_position: dict[Any, list[float]] = {}
    for row, score in zip(scored, scores, strict=True):
        by_position.setdefault(row["gold_position"], []).append(score)
    best = max(sum(values) / len(values) for values in by_position.values())
    level: Level = "in between"
    if cut >= MIN_CUT and cut > MAX_SHARE * len(rows):
        level = "cut"
    elif average.ci_high < chance + FLOOR_MARGIN and best < chance + 2 * FLOOR_MARGIN:
        level = "floor"
    elif average.ci_low > 1 - CEILING_MARGIN and average.value >= 1 - NEGLIGIBLE_SHARE:
        level = "ceiling"
    return Pilot(level, average, cut, dict(settings))


@dataclass(frozen=True)
class Source:
    """Which interventions on the gold item close the gap between the best end and the inner positions.

    Attributes:
        gap: Score at the better end minus the mean of the inner positions, in shares.
        effects: Change of the score at the inner positions by intervention, with its interval.
        named: What an intervention shows to contribute: ``causal mask``, ``position ids``.
        excluded: What cannot close :data:`LARGE_EFFECT` of the gap.
        examples: Questions at each position.
    """

    gap: float
    effects: Mapping[str, Estimate]
    named: Sequence[str]
    excluded: Sequence[str]
    examples: int

    def __str__(self) -> str:
        """What that says of the source, in a sentence."""
        text = "no intervention on the gold item closes a third of the gap for sure"
        if self.named:
            verb = "contributes" if len(self.named) == 1 else "contribute"
            parts = " and the ".join(self.named)
            text = f"the {parts} of the gold item {verb}: an intervention closes a third of the gap"
        if self.excluded:
            text += f"; the {' and the '.join(self.excluded)} alone cannot"
        return text


INTERVENTIONS = {
    "causal mask": ("crop",),
    "position ids": ("pe_to_beginning", "pe_to_end"),
}
"""Variants of ``study=crop_mask`` by what they change."""
CONTROL = "crop_other"


def judge_source(
    by_position: pd.DataFrame, effects: pd.DataFrame, metric: str
) -> Source:
    """Say which interventions close the gap, from the tables of ``study=crop_mask``.

    Args:
        by_position: Its table ``crop_mask``.
        effects: Its table ``crop_mask_effects``.
        metric: The score that counts.
    """
    scores = by_position[
        (by_position["variant"] == "none") & (by_position["measure"] == metric)
    ].sort_values("gold_position")
    values = scores["value"].to_numpy()
    gap = float(max(values[0], values[-1]) - values[1:-1].mean())
    changes = {
        row["effect"].removesuffix("_score"): estimate(row)
        for _, row in effects.iterrows()
        if str(row["effect"]).endswith("_score") and "late" not in str(row["effect"])
    }
    control = changes.get(CONTROL)
    bar = LARGE_EFFECT * gap
    named = []
    excluded = []
    for name, variants in INTERVENTIONS.items():
        found = [changes[variant] for variant in variants if variant in changes]
        if not found:
            continue
        above_control = [
            change
            for change in found
            if change.ci_low > 0
            and change.value >= bar
            and (control is None or change.value > control.ci_high)
        ]
        if above_control:
            named.append(name)
        elif all(change.ci_high < bar for change in found):
            excluded.append(name)
    return Source(gap, changes, named, excluded, int(scores["n"].min()))


@dataclass(frozen=True)
class Remedy:
    """A method in the race on calibration prompts.

    Attributes:
        name: The method.
        gain: Fall of the loss in nats per answer token, paired with the unmodified model; None: it was not run.
        time_ratio: Its time over that of the unmodified model on the same prompts.
        note: Why it was not run.
    """

    name: str
    gain: Estimate | None = None
    time_ratio: float | None = None
    note: str = ""


@dataclass
class Diagnosis:
    """All that was found; parts that were not reached are None.

    Attributes:
        model: Name of the model.
        task: Name of the task.
        verdict: One of :data:`posbench.stats.verdict.VERDICTS`.
        reason: The numbers or the obstacle behind it.
        pilots: The pilots, the last one of the task that was then asked.
        shape: The shape.
        source: The source.
        source_note: Why the source was not looked for.
        remedies: The race, the best first.
        remedies_note: Why there was no race, or no winner.
        winner: The method that was asked on held-back questions.
        held_back: The verdict on it.
        next: The command to run next; empty: nothing is left to do.
        runs: Run folders by part.
        prompts: Prompts that were answered, by part.
        seconds: Time of each part.
        total_seconds: Time of all, loading and checks among it.
    """

    model: str
    task: str
    verdict: str = ""
    reason: str = ""
    pilots: list[Pilot] = field(default_factory=list)
    shape: Shape | None = None
    source: Source | None = None
    source_note: str = ""
    remedies: list[Remedy] = field(default_factory=list)
    remedies_note: str = ""
    winner: str = ""
    held_back: str = ""
    next: str = ""
    runs: dict[str, str] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    total_seconds: float = 0.0

    @property
    def headline(self) -> str:
        """The answer in a sentence or two."""
        text = f"Verdict: {self.verdict} ({self.reason})."
        if self.shape and self.shape.name not in WITHOUT_SIDE:
            text = f"{self.model} has a {self.shape.name} bias: {SHAPES[self.shape.name]}. {text}"
        return text

    def as_data(self) -> dict[str, Any]:
        """The diagnosis as plain data, for diagnosis.json."""
        return asdict(self) | {"headline": self.headline}


def points(value: Estimate) -> str:
    """An estimate of a share as points with its interval."""
    return with_interval(100 * value.value, 100 * value.ci_low, 100 * value.ci_high)
