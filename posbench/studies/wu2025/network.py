"""The attention-only network of Wu et al. 2025, Section 5: one head, masks, position encodings, and a small
classifier.

All parameters have a leading dimension of models, so that several seeds train as one batched ensemble on a
GPU; a single training is an ensemble of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from posbench.errors import UserError
from posbench.theory import masks


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Architecture of Wu et al. 2025, Section 5: no bias in queries, keys and values, no output projection,
    no norm.

    Attributes:
        depth: Attention layers.
        residual: Add a layer's input to its output. The official code's default is no residual, although its
            flag ``--not_res`` says the opposite: passing it turns them on.
        mask: ``decay`` is causal with -(i - j) m added to the scores, i and j counted in tokens.
        pe: Position encoding: none, sinusoids added to the tokens, or rotary of interleaved pairs over the
            whole width.
        window: Tokens seen under ``window``, the token itself included.
        prefix: Tokens seen by all under ``prefix``.
        decay: m of ``decay`` (the paper: -log 0.8).
        rope_base: Base of both ``rope`` and ``sin``.
    """

    depth: int = 2
    residual: bool = False
    mask: Literal["full", "causal", "window", "prefix", "decay"] = "causal"
    pe: Literal["none", "sin", "rope"] = "none"
    window: int = 5
    prefix: int = 4
    decay: float = 0.22314355131420976
    rope_base: float = 10000.0

    def seen(self, tokens: int) -> NDArray[np.bool_]:
        """Which tokens a token sees, [n, n]."""
        if self.mask == "full":
            return np.ones((tokens, tokens), dtype=bool)
        if self.mask == "window":
            return masks.window(tokens, self.window)
        if self.mask == "prefix":
            return masks.prefix(tokens, self.prefix)
        return masks.causal(tokens)

    def score_bias(self, tokens: int) -> Tensor:
        """What the mask adds to the scores, [n, n]: 0, minus infinity, or the decay; the log of the official
        code's factor."""
        seen = np.where(self.seen(tokens), 0.0, -np.inf)
        return torch.tensor(
            masks.decay(tokens, self.decay) if self.mask == "decay" else seen, dtype=torch.float32
        )

    def check_network(self, where: str, width: int, tokens: int) -> None:
        """Raise `UserError` where a number is out of range; ``where`` is the dotted name of these fields."""
        for name, least, most in (("depth", 1, 64), ("window", 1, tokens), ("prefix", 1, tokens)):
            if not least <= getattr(self, name) <= most:
                raise UserError(
                    f"{where}.{name}", getattr(self, name), f"{least} to {most}", f"change {name}"
                )
        if self.decay < 0:
            raise UserError(f"{where}.decay", self.decay, "0 or more", "the paper takes 0.2231")
        if width % 2 and self.pe != "none":
            raise UserError(f"{where}.width", width, f"an even number with pe {self.pe}", "take 64")


HIDDEN_LAYERS = 3
"""Hidden layers of the classifier."""


class _Scores(torch.autograd.Function):
    """bias + q k^T, with gradients that are laid out as their inputs are: autograd's own for keys is
    transposed, and copied."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        ctx.save_for_backward(queries, keys)
        return torch.baddbmm(bias, queries, keys.mT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor | None]:
        (grad,) = grads
        queries, keys = ctx.saved_tensors
        return None, grad @ keys, grad.mT @ queries if ctx.needs_input_grad[2] else None


class AttentionNetwork(nn.Module):
    """M networks of one architecture, trained side by side; inputs and outputs have a leading dimension M."""

    def __init__(
        self, spec: Attention, width: int, labels: int, tokens: int, rngs: list[torch.Generator]
    ) -> None:
        """Draw the weights as torch's linear layers do by default: uniform within 1 / sqrt(width).

        Args:
            spec: Architecture.
            width: Dimension of a token, D.
            labels: Classes of the output, L.
            tokens: Tokens of a sequence, n.
            rngs: A generator per model; the model lives on their device.
        """
        super().__init__()
        self.spec, self.models, self.scale = spec, len(rngs), width**-0.5
        device = rngs[0].device

        def drawn(*shape: int) -> nn.Parameter:
            parts = [(2 * torch.rand(shape, generator=rng, device=device) - 1) * width**-0.5 for rng in rngs]
            return nn.Parameter(torch.stack(parts))

        self.query = nn.ParameterList(drawn(width, width) for _ in range(spec.depth))
        self.key = nn.ParameterList(drawn(width, width) for _ in range(spec.depth))
        self.value = nn.ParameterList(drawn(width, width) for _ in range(spec.depth))
        sizes = [width] * HIDDEN_LAYERS + [labels]
        self.weight = nn.ParameterList(drawn(width, size) for size in sizes)
        self.bias = nn.ParameterList(drawn(1, size) for size in sizes)
        angles = torch.arange(tokens)[:, None] * spec.rope_base ** (-torch.arange(0, width, 2) / width)
        self.register_buffer("score_bias", spec.score_bias(tokens).to(device))
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles).to(device))
        # sin and cos take turns along the width.
        self.register_buffer("sinusoids", torch.stack([angles.sin(), angles.cos()], -1).flatten(1).to(device))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the query's label, [M, B, L], from tokens [M, B, n, D].

        The last layer computes the query's row alone: no other row is read.
        """
        x = self._embedded(tokens)
        for layer in range(self.spec.depth):
            rows = x[:, -1:] if layer + 1 == self.spec.depth else x
            x = self._layer(layer, x, rows, self._weights(layer, x, rows))
        x = x.view(self.models, -1, x.shape[-1])
        for index, (weight, bias) in enumerate(zip(self.weight, self.bias, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            x = x.relu() if index < HIDDEN_LAYERS else x
        return x

    @torch.no_grad()
    def attentions(self, tokens: Tensor) -> Tensor:
        """Attention weights of every layer and row, [M, B, depth, n, n], from tokens [M, B, n, D]."""
        x, found = self._embedded(tokens), []
        for layer in range(self.spec.depth):
            found.append(self._weights(layer, x, x))
            x = self._layer(layer, x, x, found[-1])
        return torch.stack(found, 1).unflatten(0, tokens.shape[:2])

    def _embedded(self, tokens: Tensor) -> Tensor:
        x = tokens.flatten(0, 1)
        return x + self.sinusoids if self.spec.pe == "sin" else x

    def _layer(self, layer: int, x: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """The rows' output [M B, r, D] from all tokens x [M B, n, D] and the rows' weights [M B, r, n]."""
        mixed = self._times(weights @ x, self.value[layer])
        return rows + mixed if self.spec.residual else mixed

    def _times(self, x: Tensor, weight: Tensor) -> Tensor:
        """Rows [M B, r, D] times each model's matrix [M, D, E]."""
        return (x.reshape(self.models, -1, x.shape[-1]) @ weight).view(*x.shape[:-1], -1)

    def _weights(self, layer: int, x: Tensor, rows: Tensor) -> Tensor:
        """Attention weights of the rows, which are the last ones of x [M B, n, D], over all tokens, [M B, r,
        n]."""
        # The small matrix is scaled, not the scores: a pass less over the largest arrays.
        start, query = x.shape[1] - rows.shape[1], self.query[layer] * self.scale
        if self.spec.pe == "rope":
            queries, keys = (
                self._rotated(self._times(rows, query), start),
                self._rotated(self._times(x, self.key[layer]), 0),
            )
        else:
            # q k^T = x (Wq Wk^T) x^T: one projection fewer.
            queries, keys = self._times(rows, query @ self.key[layer].mT), x
        scores: Tensor = _Scores.apply(self.score_bias[start:], queries, keys)
        return scores.softmax(-1)

    def _rotated(self, x: Tensor, start: int) -> Tensor:
        """Rotary embedding as a complex product of interleaved pairs; the first row is token ``start``."""
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.rotation[start:]).flatten(-2)
