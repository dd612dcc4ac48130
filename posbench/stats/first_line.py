"""Compare scores of a reply's first line with scores of the whole reply: does the rule change the curve over
positions?"""

from __future__ import annotations

from posbench.late import pd
from posbench.stats.position_bias import gap_p
from posbench.tasks.scorers import WHOLE_REPLY

FIRST_LINE_ALPHA = 0.01
"""Level of the test of whether the difference between whole reply and first line varies with the gold position."""


def first_line_note(rows: pd.DataFrame, metric: str, resamples: int, seed: int) -> str:
    """Say where the whole reply adds to the score of the first line, if that depends on the gold position.

    The largest difference between two positions of the mean of whole reply minus first line is compared with that after
    shuffling the positions (permutation test at :data:`FIRST_LINE_ALPHA`).

    Args:
        rows: Rows of one method, with gold_position, cluster, the task's metric and :data:`WHOLE_REPLY`, in 0..1.
        metric: The task's metric, which reads the first line.
        resamples: Shuffles of the test.
        seed: Of its random generator.

    Returns:
        A sentence without its full stop; empty where positions do not differ, or there is only one.
    """
    placed = rows.dropna(subset=["gold_position", metric, WHOLE_REPLY])
    added = placed.assign(added=placed[WHOLE_REPLY] - placed[metric])
    by_position = added.groupby("gold_position")["added"].mean()
    if len(by_position) < 2 or not added["added"].any():
        return ""
    p = gap_p(added, "added", resamples, seed)
    if p > FIRST_LINE_ALPHA:
        return ""
    least, most = by_position.idxmin(), by_position.idxmax()
    return (
        f"{metric} reads the first line alone, as the benchmark does; the whole reply would add "
        f"{100 * by_position[least]:.1f} points at gold position {least:.0f} and {100 * by_position[most]:.1f} at "
        f"{most:.0f} (p = {p:.2g}), so the form of replies is part of the differences between positions: see the "
        "column whole reply"
    )
