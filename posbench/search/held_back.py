"""Gain of a search on held-back prompts, which it never saw, over the model without what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from posbench.late import pd
from posbench.stats.bootstrap import paired, with_interval

if TYPE_CHECKING:
    from posbench.plots.section import Section

HELD_BACK_ROWS_FILE = "held_back.jsonl"
TABLE_FILE = "held_back.csv"
MIN_QUESTIONS = 6
"""Fewest questions for a check: with fewer, gains of one sign have a chance of at least one in twenty."""

SMALLEST_LOSS_GAIN = 0.02
"""Nats per answer token worth naming: the right answer becomes 2 % more likely."""
SMALLEST_SCORE_GAIN = 0.01
"""Share of a fitness or score worth naming."""

KEPT = "keeps_unmodified"
"""Column that says whether the search kept the unmodified model."""
TABLE_COLUMNS = (
    "measure",
    "found",
    "unmodified",
    "gain",
    "ci_low",
    "ci_high",
    "n",
    KEPT,
    "beside",
)
"""Columns of ``held_back.csv``, a single row; ``n`` counts prompts, ``beside`` names the other methods of a list, under
which the ``unmodified`` model was measured, too."""


def gain_facts(
    measure: str,
    searched: Sequence[float],
    unmodified: Sequence[float],
    clusters: Sequence[str],
) -> dict[str, Any]:
    """The facts of ``held_back.csv``: the paired gain, with its 95 % interval over questions.

    Args:
        measure: ``loss`` (lower is better), or any other name (higher is better).
        searched: The measure of N prompts with the search's result.
        unmodified: The same under the unmodified model.
        clusters: The question that each prompt belongs to.

    Returns:
        Values by column, the gain positive where the search helps; ``measure`` and ``n`` alone where there are too few
        questions.
    """
    if len(set(clusters)) < MIN_QUESTIONS:
        return {"measure": measure, "n": len(clusters)}
    # The gain is the first less the second.
    minuend, subtrahend = np.array(searched), np.array(unmodified)
    if measure == "loss":
        minuend, subtrahend = np.array(unmodified), np.array(searched)
    # A fitness weighs its scores: only within 0..1 are equal scores of a few prompts no proof of equality.
    largest = 1.0
    if measure != "loss":
        largest = max(1.0, *searched, *unmodified)
    estimate = paired(minuend / largest, subtrahend / largest, clusters)
    numbers = {
        "found": sum(searched) / len(searched),
        "unmodified": sum(unmodified) / len(unmodified),
        "gain": estimate.value * largest,
        "ci_low": estimate.ci_low * largest,
        "ci_high": estimate.ci_high * largest,
    }
    rounded = {name: round(float(value), 6) for name, value in numbers.items()}
    return {"measure": measure, **rounded, "n": estimate.n}


def shows_no_gain(facts: Mapping[str, Any]) -> bool:
    """Whether there was a check, and it shows no gain worth naming, with an interval above zero."""
    if not was_checked(facts):
        return False
    is_shown = facts["ci_low"] > 0 and facts["gain"] >= _smallest_gain(facts)
    return not is_shown


def may_gain(facts: Mapping[str, Any]) -> bool:
    """Whether a check that shows no gain does not rule one out that is worth naming."""
    return shows_no_gain(facts) and facts["ci_high"] >= _smallest_gain(facts)


def harms(facts: Mapping[str, Any]) -> bool:
    """Whether a check shows that what was found is worse, with an interval below zero."""
    return was_checked(facts) and facts["ci_high"] < 0


def _smallest_gain(facts: Mapping[str, Any]) -> float:
    """The smallest gain worth naming."""
    return SMALLEST_LOSS_GAIN if facts["measure"] == "loss" else SMALLEST_SCORE_GAIN


def was_checked(facts: Mapping[str, Any]) -> bool:
    """Whether there were enough prompts for the check."""
    return bool(pd.notna(facts.get("gain")))


def baseline(facts: Mapping[str, Any]) -> str:
    """Name of what the result is compared with: the unmodified model, or the other methods of a list alone."""
    beside = facts.get("beside")
    return f"{beside} alone" if isinstance(beside, str) else "unmodified"


def summary_line(facts: Mapping[str, Any]) -> str:
    """Return one line on whether the search's result is better on held-back prompts, too.

    Args:
        facts: A row of ``held_back.csv``.
    """
    if not was_checked(facts):
        reason = f"it takes {MIN_QUESTIONS} questions, and search.held_back or the data give fewer"
        return f"what was found is not checked on held-back prompts: {reason}"
    smallest = _smallest_gain(facts)
    if not shows_no_gain(facts):
        change = "lowers" if facts["measure"] == "loss" else "raises"
        verdict = f"the search {change} the {facts['measure']}"
    elif facts["ci_low"] == facts["ci_high"] == 0:
        verdict = "the search gains nothing, as what it found changes nothing"
    elif harms(facts):
        change = "raises" if facts["measure"] == "loss" else "lowers"
        verdict = f"what the search found {change} the {facts['measure']}"
    elif may_gain(facts):
        verdict = f"cannot tell whether the search gains {smallest:g} or more"
    else:
        verdict = f"the search gains nothing worth naming ({smallest:g} or more)"
    means = f"{facts['measure']} {facts['found']:.4g}"
    means += f", {baseline(facts)} {facts['unmodified']:.4g}"
    interval = with_interval(facts["gain"], facts["ci_low"], facts["ci_high"])
    return f"{verdict}: {means} on {facts['n']} held-back prompts, gain {interval}"


def summary_sentence(facts: Mapping[str, Any]) -> str:
    """The check as the beginning of a sentence."""
    text = summary_line(facts)
    return text[0].upper() + text[1:]


def sections(table: pd.DataFrame | None) -> list[Section]:
    """Return the report's section on the check with held-back prompts; empty without a search.

    Args:
        table: ``held_back.csv``.
    """
    if table is None:
        return []
    from posbench.plots.section import Section

    facts = {str(name): value for name, value in table.iloc[0].items()}
    text = f"{summary_sentence(facts)}."
    if was_checked(facts):
        text += " Prompts that neither the search nor the evaluation asks; gain: paired, with its 95 % interval."
    return [Section("Held-back prompts", text)]
