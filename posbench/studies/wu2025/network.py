"""The attention-only network of Wu et al. 2025, Section 5: one head, masks, positions, a small classifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

from posbench.late import Tensor, nn, torch
from posbench.schema import Count, NonNegative, Positive
from posbench.studies.wu2025.sequences import Mixture
from posbench.theory import masks

HIDDEN_LAYERS = 3  # of the classifier


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Architecture of Wu et al. 2025, Section 5: no biases in attention, no output projection, no norm."""

    depth: Annotated[int, Ge(1), Le(64)] = 2
    residual: bool = False  # whether a layer's input is added to its output (the official code's --not_res)
    mask: Literal["full", "causal", "window", "prefix", "decay"] = "causal"
    pe: Literal["none", "sin", "rope"] = (
        "none"  # sinusoids added to the tokens, or interleaved pairs rotated
    )
    window: Count = 5  # tokens seen under ``window``, the token itself included
    prefix: Count = 4  # tokens seen by all under ``prefix``
    decay: NonNegative = 0.22314355131420976  # m of ``decay``, -log 0.8: causal, -(i - j) m added to scores
    rope_base: Positive = 10000.0  # of both ``rope`` and ``sin``

    def seen(self, tokens: int) -> masks.Mask:
        """Which tokens a token sees, [n, n]."""
        own = {
            "window": masks.window(tokens, self.window),
            "prefix": masks.prefix(tokens, self.prefix),
        }
        own["full"] = np.ones((tokens, tokens), dtype=bool)
        return own.get(self.mask, masks.causal(tokens))

    def score_bias(self, tokens: int) -> Tensor:
        """What the mask adds to the scores, [n, n]: the log of the official code's factor."""
        seen = np.where(self.seen(tokens), 0.0, -np.inf)
        bias = masks.decay(tokens, self.decay) if self.mask == "decay" else seen
        return torch.tensor(bias, dtype=torch.float32)


class AttentionNetwork(nn.Module):
    """M networks for tokens [M, B, n, D], trained side by side: all parameters have a leading dimension M.

    Each of the generators draws one, as torch does by default: uniform within 1 / sqrt(width).
    """

    def __init__(
        self, spec: Attention, data: Mixture, rngs: list[torch.Generator]
    ) -> None:
        super().__init__()
        width = data.width
        tokens = data.tokens
        device = rngs[0].device
        depth = spec.depth
        self.spec = spec
        self.models = len(rngs)
        self.scale = width**-0.5

        def drawn(*shape: int) -> nn.Parameter:
            parts = [
                (2 * torch.rand(shape, generator=rng, device=device) - 1) * width**-0.5
                for rng in rngs
            ]
            return nn.Parameter(torch.stack(parts))

        self.query = nn.ParameterList(drawn(width, width) for _ in range(depth))
        self.key = nn.ParameterList(drawn(width, width) for _ in range(depth))
        self.value = nn.ParameterList(drawn(width, width) for _ in range(depth))
        sizes = [width] * HIDDEN_LAYERS + [data.labels]
        self.weight = nn.ParameterList(drawn(width, size) for size in sizes)
        self.bias = nn.ParameterList(drawn(1, size) for size in sizes)
        angles = torch.arange(tokens)[:, None] * spec.rope_base ** (
            -torch.arange(0, width, 2) / width
        )
        self.register_buffer("score_bias", spec.score_bias(tokens).to(device))
        self.register_buffer(
            "rotation", torch.polar(torch.ones_like(angles), angles).to(device)
        )
        # sin and cos take turns along the width.
        self.register_buffer(
            "sinusoids",
            torch.stack([angles.sin(), angles.cos()], -1).flatten(1).to(device),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the query's label, [M, B, L], from tokens [M, B, n, D]."""
        x, _ = self._states(tokens, whole=False)
        x = x.view(self.models, -1, x.shape[-1])
        for index, (weight, bias) in enumerate(
            zip(self.weight, self.bias, strict=True)
        ):
            x = torch.baddbmm(bias, x, weight)
            x = x.relu() if index < HIDDEN_LAYERS else x
        return x

    @torch.no_grad()
    def attentions(self, tokens: Tensor) -> Tensor:
        """Attention weights of every layer and row, [M, B, depth, n, n], from tokens [M, B, n, D]."""
        return torch.stack(self._states(tokens, whole=True)[1], 1).unflatten(
            0, tokens.shape[:2]
        )

    def _states(self, tokens: Tensor, whole: bool) -> tuple[Tensor, list[Tensor]]:
        """Last states [M B, r, D] and each layer's weights; if not ``whole``, the last's of the query."""
        x = tokens.flatten(0, 1)
        found = []
        x = x + self.sinusoids if self.spec.pe == "sin" else x
        for layer in range(self.spec.depth):
            rows = x if whole or layer + 1 < self.spec.depth else x[:, -1:]
            found.append(self._weights(layer, x, rows))
            mixed = self._times(found[-1] @ x, self.value[layer])
            x = rows + mixed if self.spec.residual else mixed
        return x, found

    def _times(self, x: Tensor, weight: Tensor) -> Tensor:
        """Rows [M B, r, D] times each model's matrix [M, D, E]."""
        return (x.reshape(self.models, -1, x.shape[-1]) @ weight).view(
            *x.shape[:-1], -1
        )

    def _weights(self, layer: int, x: Tensor, rows: Tensor) -> Tensor:
        """Attention of the rows, which are the last ones of x [M B, n, D], over all tokens, [M B, r, n]."""
        # The small matrix is scaled, not the scores: a pass less over the largest arrays.
        start = x.shape[1] - rows.shape[1]
        query = self.query[layer] * self.scale
        key = self.key[layer]
        if self.spec.pe == "rope":
            queries = self._rotated(self._times(rows, query), start)
            keys = self._rotated(self._times(x, key), 0)
        else:
            # q k^T = x (Wq Wk^T) x^T: one projection fewer.
            queries = self._times(rows, query @ key.mT)
            keys = x
        return torch.baddbmm(self.score_bias[start:], queries, keys.mT).softmax(-1)

    def _rotated(self, x: Tensor, start: int) -> Tensor:
        """Interleaved pairs as complex numbers, turned; the first row is token ``start``."""
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.rotation[start:]).flatten(-2)
