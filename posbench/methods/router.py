"""The router of MoICE, in a separate module because its class needs torch at import."""

from __future__ import annotations

from torch import Tensor, nn


class Router(nn.Module):
    """Scores of N bases from a query, the same for all heads of a layer: ``W2 (SiLU(W1 u) * W3 u)``."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate_1 = nn.Linear(width, experts, bias=False)
        self.gate_2 = nn.Linear(experts, experts, bias=False)
        self.gate_3 = nn.Linear(width, experts, bias=False)

    def forward(self, query: Tensor) -> Tensor:
        """Logits [B, H, T, N] from queries [B, H, T, d] rotated with the first base."""
        return self.gate_2(nn.functional.silu(self.gate_1(query)) * self.gate_3(query))
