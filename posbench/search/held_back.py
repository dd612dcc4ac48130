"""What a search gains on prompts that it never saw, beside the unmodified model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posbench.late import pd
from posbench.plots.section import Section
from posbench.stats.bootstrap import paired, with_interval

ROWS = "held_back.jsonl"
TABLE = "held_back.csv"
LEAST = 6
"""Questions that a check needs: of fewer, gains of one sign are no rarer than one in twenty by chance."""

HEADER = ("measure", "found", "unmodified", "gain", "ci_low", "ci_high", "n")
"""Columns of ``held_back.csv``, a single row; ``n`` counts prompts."""


def gain(
    measure: str,
    found: Sequence[float],
    unmodified: Sequence[float],
    clusters: Sequence[str],
) -> dict[str, Any]:
    """The facts of ``held_back.csv`` from the measure of N prompts under both: a paired gain, positive where
    the search helps, with its 95 % interval over questions; ``measure`` and ``n`` alone of too few."""
    if len(set(clusters)) < LEAST:
        return {"measure": measure, "n": len(clusters)}
    means = {
        "found": sum(found) / len(found),
        "unmodified": sum(unmodified) / len(found),
    }
    both = (unmodified, found) if measure == "loss" else (found, unmodified)
    estimate = paired(*both, clusters)
    facts = means | {
        "gain": estimate.value,
        "ci_low": estimate.ci_low,
        "ci_high": estimate.ci_high,
    }
    return {
        "measure": measure,
        **{k: round(float(v), 6) for k, v in facts.items()},
        "n": estimate.n,
    }


def noise(facts: Mapping[str, Any]) -> bool:
    """Whether there was a check, and it shows no gain: the interval does not lie above zero."""
    return checked(facts) and not facts["ci_low"] > 0


def checked(facts: Mapping[str, Any]) -> bool:
    """Whether there were prompts for the check."""
    return bool(pd.notna(facts.get("gain")))


def words(facts: Mapping[str, Any]) -> str:
    """The check in one line."""
    if not checked(facts):
        few = f"{facts['n']} are left, and {LEAST} questions are needed"
        return f"what was found is not checked on held-back prompts: {few}"
    both = (
        f"{facts['measure']} {facts['found']:.4g}, unmodified {facts['unmodified']:.4g}"
    )
    gained = with_interval(facts["gain"], facts["ci_low"], facts["ci_high"])
    front = (
        "the search gains nothing beyond noise" if noise(facts) else "the search gains"
    )
    return f"{front}: {both} on {facts['n']} held-back prompts, gain {gained}"


def told(facts: Mapping[str, Any]) -> str:
    """The check as the beginning of a sentence."""
    return words(facts)[0].upper() + words(facts)[1:]


def sections(table: pd.DataFrame | None) -> list[Section]:
    """The check as a part of the report; none without a search."""
    if table is None:
        return []
    facts = {str(name): value for name, value in table.iloc[0].items()}
    text = f"{told(facts)}."
    if not checked(facts):
        return [Section("Held-back prompts", text)]
    text += " Prompts that neither the search nor the evaluation asks; gain: paired, with its 95 % interval."
    return [Section("Held-back prompts", text)]
