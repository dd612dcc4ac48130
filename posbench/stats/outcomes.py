"""Outcomes of rows: which ones count, how many do not and where, and which conclusions that rules out.

A row has a score only if its reply is known to be an answer; :func:`posbench.measure.outcomes.decide_outcome` decides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from posbench.late import pd
from posbench.stats.bootstrap import Estimate, mean
from posbench.stats.position_bias import gap_p

Outcome = Literal["answered", "cut", "refused", "no answer", "not read", "failed"]
"""Outcome of a row.

``cut``: the reply ended at its limit before an answer. ``refused``: by a content filter, or by the model in a field of
its own. ``no answer``: the reply is not known to be an answer. ``not read``: the prompt did not arrive whole.
``failed``: no reply came.
"""
ANSWERED: Outcome = "answered"
CUT: Outcome = "cut"
REFUSED: Outcome = "refused"
NO_ANSWER: Outcome = "no answer"
NOT_READ: Outcome = "not read"
FAILED: Outcome = "failed"

# Reasons of outcomes, in full or how they begin
OVERFLOW = "context overflow"
CONTENT_FILTER = "content filter"
IN_THINKING = "ended in the thinking"
TOOL_CALL = "a tool call"
OTHER_FIELD = "no text but in the field"
NO_TEXT = "no text"
UNKNOWN_MARKS = "thinking cannot be told from the answer"
UNKNOWN_REASON = "finish_reason"
UNKNOWN_LENGTH = "the server tells neither"
ADVICE = {
    TOOL_CALL: "switch tools off at the server",
    OTHER_FIELD: "switch off the parser of the server that puts the reply there (reasoning or tools)",
    NO_TEXT: "read the log of the server: a parser (reasoning, tools) or a proxy may take the text away",
    UNKNOWN_MARKS: "switch thinking off (model.extra_body), or have the server give it in a field of its own",
    UNKNOWN_REASON: "look that word up in the manual of the server",
    UNKNOWN_LENGTH: "ask a server that says why a reply ended, or set a larger task.max_new_tokens",
    OVERFLOW: "ask with fewer or shorter items, or raise the window of the server",
}
"""Hints, by the beginning of a reason."""
ADVICE_OF_OUTCOME: Mapping[str, str] = {
    REFUSED: "switch off the content filter of the server, or ask another task or server",
    NO_ANSWER: "read the log of the server",
    NOT_READ: "set model.context_window to what the server reads",
    FAILED: "run the same command again",
}
"""Hints by outcome, for reasons not in :data:`ADVICE`."""

KIND = "kind"
"""Column of a score frame: the metric that counts a row without an answer; empty for an answer."""
REASON = "reason"
"""Column of a score frame: why a row has no answer."""
CUT_METRIC = "cut_replies"
THINKING_METRIC = "cut_thinking"
OUTCOME_METRICS: Mapping[str, str] = {
    CUT_METRIC: "cut off",
    THINKING_METRIC: "cut thinking",
    "refused": "refused",
    "no_answer": "no answer",
    "not_read": "not read",
    "failed": "failed",
}
"""Metrics in metrics.csv with the share of each kind, per gold position and over all, and their names in words."""
MAX_MISSING_SHARE = 0.02
"""Share of rows without an answer above which nothing is said about a score."""
MISSING_ALPHA = 0.01
"""Level of the test of whether that share varies with the gold position."""
MORE_TOKENS = 4
"""Factor by which more tokens are recommended."""
PROBLEM = "missing answers"
"""Beginning of the note on a method whose scores mean nothing."""


def is_scorable(row: Mapping[str, Any]) -> bool:
    """Return whether a row takes part in tables: it has scores, or would have some if it had been answered."""
    is_missing = outcome_of_row(row) != ANSWERED
    return bool(row.get("scores")) or (is_missing and row.get("answers") != [])


def outcome_of_row(row: Mapping[str, Any]) -> str:
    """The outcome of a row of predictions.jsonl."""
    return str(row.get("outcome", FAILED if "error" in row else ANSWERED))


def kind_of_row(row: Mapping[str, Any]) -> str:
    """Return the metric of :data:`OUTCOME_METRICS` that counts a row without an answer; empty for an answer."""
    outcome = outcome_of_row(row)
    if outcome == ANSWERED:
        return ""
    if outcome == CUT:
        return THINKING_METRIC if row.get("is_thinking") else CUT_METRIC
    return outcome.replace(" ", "_")


def describe_kind(row: Mapping[str, Any]) -> str:
    """Describe the kind and the reason of a row without an answer."""
    name = OUTCOME_METRICS[kind_of_row(row)]
    return f"{name} ({row['reason']})" if row.get("reason") else name


def describe_kinds(rows: Iterable[Mapping[str, Any]]) -> str:
    """Count in words the rows of predictions.jsonl without an answer by kind and reason; empty if all have one."""
    counts = Counter(describe_kind(row) for row in rows if kind_of_row(row))
    return ", ".join(f"{count} {text}" for text, count in counts.most_common())


def count_kinds(rows: pd.DataFrame) -> str:
    """Count in words the rows of each kind without an answer, the most frequent kind first."""
    counts = Counter(kind for kind in rows[KIND] if kind)
    return ", ".join(
        f"{count} {OUTCOME_METRICS[kind]}" for kind, count in counts.most_common()
    )


def share_of_kind(rows: pd.DataFrame, kind: str) -> Estimate:
    """Share of rows of one kind of :data:`OUTCOME_METRICS`, with its interval over questions."""
    is_kind = (rows[KIND] == kind).to_numpy(dtype=float)
    return mean(is_kind, list(rows["cluster"]))


def missing_note(
    rows: pd.DataFrame,
    max_new_tokens: int,
    resamples: int,
    seed: int,
    thinking_tokens: int | None = None,
    room: int | None = None,
) -> str:
    """Explain that a method's scores mean nothing if too many of its rows have no answer.

    That is if more than :data:`MAX_MISSING_SHARE` of the rows have none, of whatever kind, or where their share varies
    with the gold position (permutation test of the largest difference between two positions, at :data:`MISSING_ALPHA`).

    Args:
        rows: Rows of one method, with gold_position, cluster, :data:`KIND` and :data:`REASON`.
        max_new_tokens: Tokens that an answer may have.
        resamples: Shuffles of the test.
        seed: Seed of the test.
        thinking_tokens: Additional tokens for thinking; None: no thinking.
        room: Tokens that the context window leaves for an answer; None: not known.

    Returns:
        ``missing answers: how many of each kind, and the next step``; empty if the scores are valid.
    """
    if (rows[KIND] == "").all():
        return ""
    rows = rows.assign(is_missing=(rows[KIND] != "").astype(float))
    share = float(rows["is_missing"].mean())
    placed = rows.dropna(subset=["gold_position"])
    by_position = placed.groupby("gold_position")["is_missing"].mean()
    varies = False
    if len(by_position) > 1:
        varies = gap_p(placed, "is_missing", resamples, seed) <= MISSING_ALPHA
    if share <= MAX_MISSING_SHARE and not varies:
        return ""
    facts = f"{share:.1%} of {len(rows)} replies are no answers: {count_kinds(rows)}"
    if len(by_position) > 1:
        facts += f" ({by_position.min():.1%} to {by_position.max():.1%} by position)"
    missing = rows[rows[KIND] != ""]
    pairs = zip(missing[KIND], missing[REASON], strict=True)
    step = next_step(pairs, max_new_tokens, thinking_tokens, room)
    return f"{PROBLEM}: {facts}; {step}"


def room_for_replies(window: int, lengths: Iterable[int | None]) -> int:
    """Tokens that a context window leaves for a reply after the longest prompt; None: a length that is not known."""
    return window - max((length or 0 for length in lengths), default=0)


def next_step(
    missing: Iterable[tuple[str, str]],
    max_new_tokens: int,
    thinking_tokens: int | None = None,
    room: int | None = None,
) -> str:
    """Return a hint against the most frequent kind of missing answers.

    Args:
        missing: Kind and reason of each row without an answer; one at least.
        max_new_tokens: Tokens that an answer may have.
        thinking_tokens: Additional tokens for thinking; None: no thinking.
        room: Tokens that the context window leaves for an answer; None: not known.
    """
    counts = Counter(missing)
    kinds = Counter[str]()
    for (kind, _), count in counts.items():
        kinds[kind] += count
    kind = kinds.most_common(1)[0][0]
    if kind == THINKING_METRIC and thinking_tokens is not None:
        tokens = MORE_TOKENS * max(thinking_tokens, max_new_tokens)
        return f"set model.thinking_tokens={tokens}"
    if kind in (CUT_METRIC, THINKING_METRIC):
        tokens = MORE_TOKENS * max_new_tokens
        if room is not None:
            tokens = min(tokens, room)
        if tokens <= max_new_tokens:
            return "once the prompts are shorter: they leave no more room for replies"
        return f"set task.max_new_tokens={tokens}"
    reason = next(reason for (of, reason), _ in counts.most_common() if of == kind)
    step = ADVICE_OF_OUTCOME[kind.replace("_", " ")]
    for beginning, special_step in ADVICE.items():
        if reason.startswith(beginning):
            step = special_step
            break
    return f"{reason}: {step}" if reason else step


def setting_in(note: str) -> str:
    """The setting that a note on missing answers asks for, such as ``task.max_new_tokens=400``; empty without one."""
    setting = re.search(r"\bset (\S+=\w+)", note)
    return setting[1] if setting else ""
