"""The attention-only network of Wu et al. 2025, Section 5: one head, masks, positions, a small classifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

from posbench.late import Tensor, nn, torch
from posbench.schema import Count, NonNegative, Positive
from posbench.theory import masks
from wu2025.sequences import Mixture

HIDDEN_LAYERS = 3  # of the classifier


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Architecture of Wu et al. 2025, Section 5: no biases in attention, no output projection, no norm.

    Attributes:
        depth: Layers of attention.
        residual: Whether a layer's input is added to its output (the official code's --not_res).
        mask: Attention mask; see :mod:`posbench.theory.masks`.
        pe: Position encoding: none, sinusoids added to the tokens, or RoPE on interleaved pairs.
        window: Tokens seen under ``window``, the token itself included.
        prefix: Tokens seen by all under ``prefix``.
        decay: m of ``decay``, -log 0.8: causal, -(i - j) m added to scores.
        rope_base: Base of both ``rope`` and ``sin``.
    """

    depth: Annotated[int, Ge(1), Le(64)] = 2
    residual: bool = False
    mask: Literal["full", "causal", "window", "prefix", "decay"] = "causal"
    pe: Literal["none", "sin", "rope"] = "none"
    window: Count = 5
    prefix: Count = 4
    decay: NonNegative = 0.22314355131420976
    rope_base: Positive = 10000.0

    def seen(self, tokens: int) -> masks.Mask:
        """Whether a query sees a key, [n, n]."""
        if self.mask == "full":
            return np.ones((tokens, tokens), dtype=bool)
        if self.mask == "window":
            return masks.window(tokens, self.window)
        if self.mask == "prefix":
            return masks.prefix(tokens, self.prefix)
        return masks.causal(tokens)

    def score_bias(self, tokens: int) -> Tensor:
        """Bias that the mask adds to the scores, [n, n] float32: the log of the official code's factor."""
        bias = np.where(self.seen(tokens), 0.0, -np.inf)
        if self.mask == "decay":
            bias = masks.decay(tokens, self.decay)
        return torch.tensor(bias, dtype=torch.float32)


class AttentionNetwork(nn.Module):
    """M networks trained side by side: every parameter has a leading dimension M.

    Args:
        spec: Architecture.
        data: Shape of the sequences: n tokens of D dimensions, L labels.
        rngs: Generator of each network's weights, which are uniform within 1 / sqrt(width), torch's default.
    """

    def __init__(
        self, spec: Attention, data: Mixture, rngs: list[torch.Generator]
    ) -> None:
        super().__init__()
        width = data.width
        device = rngs[0].device
        layers = range(spec.depth)
        self.spec = spec
        self.models = len(rngs)
        self.scale = width**-0.5
        square = (width, width)
        self.query = nn.ParameterList(self._draw(square, rngs) for _ in layers)
        self.key = nn.ParameterList(self._draw(square, rngs) for _ in layers)
        self.value = nn.ParameterList(self._draw(square, rngs) for _ in layers)
        sizes = [width] * HIDDEN_LAYERS + [data.labels]
        self.weight = nn.ParameterList(
            self._draw((width, size), rngs) for size in sizes
        )
        self.bias = nn.ParameterList(self._draw((1, size), rngs) for size in sizes)
        theta = spec.rope_base ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(data.tokens)[:, None] * theta
        rotation = torch.polar(torch.ones_like(angles), angles)
        # sin and cos take turns along the width.
        sinusoids = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
        self.register_buffer("score_bias", spec.score_bias(data.tokens).to(device))
        self.register_buffer("rotation", rotation.to(device))
        self.register_buffer("sinusoids", sinusoids.to(device))

    def _draw(
        self, shape: tuple[int, ...], rngs: Sequence[torch.Generator]
    ) -> nn.Parameter:
        """A parameter of each network from its own generator, [M, *shape]."""
        uniform = [torch.rand(shape, generator=rng, device=rng.device) for rng in rngs]
        return nn.Parameter(torch.stack([(2 * u - 1) * self.scale for u in uniform]))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the query's label, [M, B, L], from tokens [M, B, n, D]."""
        states, _ = self._states(tokens, query_only=True)
        x = states.view(self.models, -1, states.shape[-1])
        for index, (weight, bias) in enumerate(
            zip(self.weight, self.bias, strict=True)
        ):
            x = torch.baddbmm(bias, x, weight)
            if index < HIDDEN_LAYERS:
                x = x.relu()
        return x

    @torch.no_grad()
    def attentions(self, tokens: Tensor) -> Tensor:
        """Attention weights of every layer and row, [M, B, depth, n, n], from tokens [M, B, n, D]."""
        _, weights = self._states(tokens, query_only=False)
        return torch.stack(weights, 1).unflatten(0, tokens.shape[:2])

    def _states(self, tokens: Tensor, query_only: bool) -> tuple[Tensor, list[Tensor]]:
        """Run the layers of attention.

        Args:
            tokens: Tokens, [M, B, n, D].
            query_only: Compute in the last layer only the last row, which is the query's.

        Returns:
            States after the last layer, [M B, rows, D], and each layer's weights, [M B, rows, n].
        """
        x = tokens.flatten(0, 1)
        if self.spec.pe == "sin":
            x = x + self.sinusoids
        layer_weights = []
        for layer in range(self.spec.depth):
            last = layer == self.spec.depth - 1
            rows = x[:, -1:] if query_only and last else x
            weights = self._weights(layer, x, rows)
            layer_weights.append(weights)
            mixed = self._project(weights @ x, self.value[layer])
            x = rows + mixed if self.spec.residual else mixed
        return x, layer_weights

    def _project(self, x: Tensor, weight: Tensor) -> Tensor:
        """Rows [M B, r, D] times each network's matrix [M, D, E]: [M B, r, E]."""
        projected = x.reshape(self.models, -1, x.shape[-1]) @ weight
        return projected.view(*x.shape[:-1], -1)

    def _weights(self, layer: int, x: Tensor, rows: Tensor) -> Tensor:
        """Attention of some rows over all tokens.

        Args:
            layer: Layer, from 0.
            x: States of all tokens, [M B, n, D].
            rows: The last r rows of the input, [M B, r, D].

        Returns:
            Weights, [M B, r, n].
        """
        start = x.shape[1] - rows.shape[1]
        # The small matrix is scaled, not the scores: a pass less over the largest arrays.
        query = self.query[layer] * self.scale
        key = self.key[layer]
        if self.spec.pe == "rope":
            queries = self._rotate(self._project(rows, query), start)
            keys = self._rotate(self._project(x, key), 0)
        else:
            # q k^T = x (Wq Wk^T) x^T: one projection fewer.
            queries = self._project(rows, query @ key.mT)
            keys = x
        return torch.baddbmm(self.score_bias[start:], queries, keys.mT).softmax(-1)

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        """Rows [M B, r, D] rotated by RoPE, interleaved pairs; the first row is token ``start``."""
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.rotation[start:]).flatten(-2)
