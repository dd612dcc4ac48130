"""Policies that change the prompt, as a table of a page and as the verdict's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posbench.stats.policies import USE
from posbench.studies.order import AS_RETRIEVED

POLICY_HEADER = (
    "policy",
    "accuracy (%)",
    "difference (points)",
    "flips (%)",
    "tokens",
    "questions",
    "",
)
"""Header of :func:`policy_rows`."""


def verdict_words(facts: Mapping[str, Any]) -> str:
    """The verdict of a comparison with the policy to use.

    Args:
        facts: Content of order.json.
    """
    name = facts["verdict"]
    return f"use {facts['policy']}" if name == USE else str(name)


def policy_rows(policies: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row of cells for each policy, the best first.

    Args:
        policies: The policies of order.json.
    """
    # By paired difference; those with the prompts of another one come last.
    best_first = sorted(
        policies, key=lambda row: (bool(row["same_as"]), -(row["difference"] or 0.0))
    )
    return [_cells(row) for row in best_first]


def _cells(row: Mapping[str, Any]) -> list[str]:
    """A policy as a row of the page's table."""
    notes = []
    if row["same_as"]:
        notes.append(f"same prompts as {row['same_as']}")
    elif not row["in_race"]:
        notes.append("dropped out")
    if row["missing"] and row["missing"] > 0.02:
        notes.append(f"{100 * row['missing']:.0f} % without an answer")
    accuracy = difference = flips = ""
    questions = str(row["n"])
    if row["accuracy"] is not None:
        accuracy = f"{row['accuracy']:.1f} [{row['ci_low']:.1f}, {row['ci_high']:.1f}]"
        if row["name"] != AS_RETRIEVED:
            difference = f"{row['difference']:+.1f} [{row['difference_low']:.1f}, {row['difference_high']:.1f}]"
        flips = f"{row['flip_rate']:.0f}"
        # Of a run of an earlier version the answers that have no pair are not known.
        answered = row.get("answered", row["n"])
        if answered > row["n"]:
            questions += f" ({answered} answered)"
    elif row["changed_replies"] is not None:
        flips = f"{row['changed_replies']:.0f} (of the replies)"
    tokens = "" if row["tokens"] is None else f"{row['tokens']:,.0f}"
    return [
        row["name"],
        accuracy,
        difference,
        flips,
        tokens,
        questions,
        ", ".join(notes),
    ]
