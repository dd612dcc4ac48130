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
    return [_cells(row) for row in _best_first(policies)]


def _best_first(policies: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Policies by their paired difference, the largest first; those with the prompts of another one come last."""
    return sorted(
        policies, key=lambda row: (bool(row["same_as"]), -(row["difference"] or 0.0))
    )


def _count(tokens: float | None) -> str:
    """A number of tokens; empty where the server counts none."""
    return "" if tokens is None else f"{tokens:,.0f}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    """A policy as a row of the page's table."""
    note = f"same prompts as {row['same_as']}" if row["same_as"] else ""
    if not note and not row["in_race"]:
        note = "dropped out"
    if row["missing"] and row["missing"] > 0.02:
        note = (
            f"{note}, ".lstrip(", ") + f"{100 * row['missing']:.0f} % without an answer"
        )
    if row["accuracy"] is None:
        changed = row["changed_replies"]
        flips = "" if changed is None else f"{changed:.0f} (of the replies)"
        return [
            row["name"],
            "",
            "",
            flips,
            _count(row["tokens"]),
            str(row["n"]),
            note,
        ]
    # Of a run of an earlier version the answers that have no pair are not known.
    answered = row.get("answered", row["n"])
    questions = str(row["n"])
    if answered > row["n"]:
        questions += f" ({answered} answered)"
    accuracy = f"{row['accuracy']:.1f} [{row['ci_low']:.1f}, {row['ci_high']:.1f}]"
    difference = f"{row['difference']:+.1f} [{row['difference_low']:.1f}, {row['difference_high']:.1f}]"
    if row["name"] == AS_RETRIEVED:
        difference = ""
    return [
        row["name"],
        accuracy,
        difference,
        f"{row['flip_rate']:.0f}",
        _count(row["tokens"]),
        questions,
        note,
    ]
