"""Scores of a reply against a gold text, shared by several benchmarks. Strings in, a float in 0..1 out, nothing else.

Each function follows the benchmark's released evaluation, whose quirks are part of the published numbers.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, ASCII punctuation deleted, whole words a, an, the out, white space collapsed; in this order (SQuAD).

    ``don't`` becomes ``dont``; typographic quotes and other punctuation beyond ASCII stay.
    """
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def best_subspan_em(reply: str, answers: Sequence[str], *, strip_first: bool = True) -> float:
    """1 where a normalised answer is contained in the first line of the reply, else 0 (Liu et al. 2023, arXiv:2307.03172).

    A substring, not a word: ``13`` is found in ``1300``.

    Args:
        reply: The model's text.
        answers: Accepted answers.
        strip_first: White space goes before the reply is cut at its first line break, as in the script of Yu et al.
            (arXiv:2406.02536). False: after the cut, as in that of Liu et al., where a reply that begins with a line
            break scores 0.
    """
    line = normalize_answer((reply.strip() if strip_first else reply).split("\n", 1)[0])
    return float(any(normalize_answer(answer) in line for answer in answers))
