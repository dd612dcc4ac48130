"""The papers behind the experiments, and which experiments train networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PAPERS = {
    "yu2025": "Yu et al. 2025: Mitigate Position Bias in LLMs via Scaling a Single Hidden States Channel",
    "lpes": "LPES: Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
    "wu2025": "Wu et al. 2025: On the Emergence of Position Bias in Transformers",
    "behind_rope": "Behind RoPE: How Does Causal Mask Encode Positional Information?",
}
"""Title of each paper by its short name, in the order of all pages."""


def trains_networks(data: Mapping[str, Any]) -> bool:
    """Whether a config of an experiment trains networks, which takes hours."""
    return {"override study": "synthetic_training"} in data["defaults"]
