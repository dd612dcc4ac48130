"""Replies that were cut off before they came to an answer: how many, where, and what they forbid to say.

A reply of a model that thinks may end in the thinking; that is counted apart from one that ends in the answer.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from posbench.late import pd
from posbench.stats.bootstrap import Estimate, mean
from posbench.stats.position_bias import shuffled_gaps

COLUMN = "cut"
THINKING_COLUMN = "cut_thinking"
"""Columns of a score frame: 1 for a reply that was cut in the answer, or in the thinking, else 0."""
METRIC = "cut_replies"
THINKING_METRIC = "cut_thinking"
METRICS: Mapping[str, str] = {COLUMN: METRIC, THINKING_COLUMN: THINKING_METRIC}
"""Rows of metrics.csv with the share of each, at each gold position and over all, by the column."""
MAX_SHARE = 0.02
"""Share of cut replies above which nothing is said about a score."""
ALPHA = 0.01
"""Level of the test of whether cutting varies with the gold position."""
MORE_TOKENS = 4
"""How many times as many tokens are recommended."""
PROBLEM = "cut replies"
"""How the note of a method begins about whose scores nothing can be said."""
EITHER = "cut_in_either"


def cut_share(rows: pd.DataFrame, column: str = COLUMN) -> Estimate:
    """Share of replies that were cut in one of the two ways, with its interval over questions."""
    return mean(rows[column].to_numpy(dtype=float), list(rows["cluster"]))


def cut_note(
    rows: pd.DataFrame,
    max_new_tokens: int,
    resamples: int,
    seed: int,
    thinking_tokens: int | None = None,
) -> str:
    """Say why the scores of a method mean nothing, where too many of its replies were cut off.

    That is where more than :data:`MAX_SHARE` of them were, in the thinking or in the answer, or where their share
    varies with the gold position (permutation test of the largest difference between two positions, at
    :data:`ALPHA`).

    Args:
        rows: Rows of one method, with gold_position, cluster, :data:`COLUMN` and :data:`THINKING_COLUMN`.
        max_new_tokens: Tokens that an answer may have.
        resamples: Shuffles of the test.
        seed: Of its random generator.
        thinking_tokens: Tokens that a reply may have for thinking, beside those; None: there are no such tokens.

    Returns:
        ``cut replies: how many, and the next step``; empty where the scores stand.
    """
    rows = rows.assign(**{EITHER: rows[[COLUMN, THINKING_COLUMN]].max(axis=1)})
    share = float(rows[EITHER].mean())
    placed = rows.dropna(subset=["gold_position"])
    by_position = placed.groupby("gold_position")[EITHER].mean()
    varies = False
    if share > 0 and len(by_position) > 1:
        gap = np.ptp(by_position.to_numpy())
        null = shuffled_gaps(placed, EITHER, resamples, seed)
        p = (1 + (null >= gap - 1e-12).sum()) / (1 + len(null))
        varies = bool(p <= ALPHA)
    if share <= MAX_SHARE and not varies:
        return ""
    in_thinking = float(rows[THINKING_COLUMN].mean())
    facts = f"{share:.1%} ended at {max_new_tokens} tokens, before an answer"
    advice = f"set task.max_new_tokens={MORE_TOKENS * max_new_tokens}"
    if in_thinking:
        facts = f"{share:.1%} ended before an answer, {in_thinking:.1%} in the thinking"
    if in_thinking > share / 2 and thinking_tokens is not None:
        tokens = MORE_TOKENS * max(thinking_tokens, max_new_tokens)
        advice = f"set model.thinking_tokens={tokens}"
    if len(by_position) > 1:
        facts += f" ({by_position.min():.1%} to {by_position.max():.1%} by position)"
    return f"{PROBLEM}: {facts}; {advice}"
