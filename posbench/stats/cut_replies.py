"""Replies that were cut off before they came to an answer: how many, where, and what they forbid to say."""

from __future__ import annotations

import numpy as np

from posbench.late import pd
from posbench.stats.bootstrap import Estimate, mean
from posbench.stats.position_bias import shuffled_gaps

METRIC = "cut_replies"
"""Rows of metrics.csv with the share of cut replies, at each gold position and over all."""
COLUMN = "cut"
"""Column of a score frame: 1 for a cut reply, else 0."""
MAX_SHARE = 0.02
"""Share of cut replies above which nothing is said about a score."""
ALPHA = 0.01
"""Level of the test of whether cutting varies with the gold position."""
MORE_TOKENS = 4
"""How many times as many tokens are recommended."""
PROBLEM = "cut replies"
"""How the note of a method begins about whose scores nothing can be said."""


def cut_share(rows: pd.DataFrame) -> Estimate:
    """Share of cut replies, with its interval over questions."""
    return mean(rows[COLUMN].to_numpy(dtype=float), list(rows["cluster"]))


def cut_note(rows: pd.DataFrame, max_new_tokens: int, resamples: int, seed: int) -> str:
    """Say why the scores of a method mean nothing, where too many of its replies were cut off.

    That is where more than :data:`MAX_SHARE` of them were, or where their share varies with the gold position
    (permutation test of the largest difference between two positions, at :data:`ALPHA`).

    Args:
        rows: Rows of one method, with gold_position, cluster and :data:`COLUMN`.
        max_new_tokens: Tokens that a reply may have.
        resamples: Shuffles of the test.
        seed: Of its random generator.

    Returns:
        ``cut replies: how many, and the next step``; empty where the scores stand.
    """
    share = float(rows[COLUMN].mean())
    placed = rows.dropna(subset=["gold_position"])
    by_position = placed.groupby("gold_position")[COLUMN].mean()
    varies = False
    if share > 0 and len(by_position) > 1:
        gap = np.ptp(by_position.to_numpy())
        null = shuffled_gaps(placed, COLUMN, resamples, seed)
        p = (1 + (null >= gap - 1e-12).sum()) / (1 + len(null))
        varies = bool(p <= ALPHA)
    if share <= MAX_SHARE and not varies:
        return ""
    facts = f"{share:.1%} ended at {max_new_tokens} tokens, before an answer"
    if len(by_position) > 1:
        facts += f" ({by_position.min():.1%} to {by_position.max():.1%} by position)"
    return f"{PROBLEM}: {facts}; set task.max_new_tokens={MORE_TOKENS * max_new_tokens}"
