"""Attention written out: full matrices, one row and one head at a time, angles from their formula, no
cache."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.models import attentions

FAMILIES = ("llama", "llama-gqa", "qwen2", "phi3-partial", "gemma", "cohere2")
"""Grouped keys, one key head, biases, a fused projection, partial and interleaved rotation, windows, layers
without RoPE."""


@dataclass(frozen=True)
class Layer:
    """One layer of one row of the batch; padding is cut off.

    Attributes:
        number: The layer.
        query, key, value: Un-rotated, one key and value per query head, [H, T, d].
        open: What each query may see, [T, T].
        scaling: Factor of the scores.
        share: Share of each head that rotates.
        interleaved: Whether neighbours make a pair of coordinates, not the first with the middle one.
    """

    number: int
    query: Tensor
    key: Tensor
    value: Tensor
    open: Tensor
    scaling: float
    share: float
    interleaved: bool

    def turn(
        self,
        x: Tensor,
        scale: float = 1.0,
        base: float = 10000.0,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Rotate [T, d] by the angles of positions m / scale, or of other positions [T] than m = 0, 1, ..."""
        if positions is None:
            positions = torch.arange(len(x))
        width = int(x.shape[-1] * self.share)
        rates = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angle = positions.double()[:, None] / scale * rates
        first = torch.arange(width // 2)
        second = torch.arange(width // 2) + width // 2
        if self.interleaved:
            first, second = 2 * first, 2 * first + 1
        out = x.clone()
        cos = angle.cos().to(x)
        sin = angle.sin().to(x)
        out[:, first] = x[:, first] * cos - x[:, second] * sin
        out[:, second] = x[:, second] * cos + x[:, first] * sin
        return out

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        """Attention weights [T, T] of rotated queries and keys [T, d]."""
        return (
            (query @ key.T * self.scaling)
            .masked_fill(~self.open, float("-inf"))
            .softmax(-1)
        )


def share_of(model: PreTrainedModel) -> float:
    """Share of a head's coordinates that rotates."""
    return (getattr(model.config, "rope_parameters", None) or {}).get(
        "partial_rotary_factor", 1.0
    )


@contextmanager
def attending_plainly(
    model: PreTrainedModel, pads: list[int], attend: Callable[[Layer], Tensor]
) -> Iterator[None]:
    """Run every layer that rotates through ``attend``, from a :class:`Layer` to the output [H, T, d], others
    as they are."""
    module = sys.modules[type(attentions(model)[0]).__module__]
    phi, cohere = (model.config.model_type == name for name in ("phi3", "cohere2"))

    def function(attention, query, key, value, mask, scaling=None, **_):
        out = torch.zeros_like(query)
        groups = query.shape[1] // key.shape[1]
        total = query.shape[2]
        at = torch.arange(total)
        # Phi-3 keeps its window in the config alone; Cohere 2 has one in some layers, and rotates in these
        # only.
        window = (
            (model.config if phi else attention).sliding_window
            if phi or cohere
            else None
        )
        seen = (at[:, None] >= at) & (at > at[:, None] - (window or total))
        for row, pad in enumerate(pads):
            part = [
                query[row],
                key[row].repeat_interleave(groups, 0),
                value[row].repeat_interleave(groups, 0),
            ]
            layer = Layer(
                attention.layer_idx,
                *(x[:, pad:] for x in part),
                seen[pad:, pad:],
                scaling,
                share_of(model),
                cohere,
            )
            if cohere and not window:
                heads = zip(layer.query, layer.key, layer.value, strict=True)
                out[row, :, pad:] = torch.stack(
                    [layer.weights(q, k) @ v for q, k, v in heads]
                )
            else:
                out[row, :, pad:] = attend(layer)
        return out.transpose(1, 2), None

    before = model.config._attn_implementation
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            module, "apply_rotary_pos_emb", lambda q, k, cos, sin, **_: (q, k)
        )
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "plain", function)
        model.set_attn_implementation("plain")
        try:
            yield
        finally:
            model.set_attn_implementation(before)


def batch(pads: list[int], total: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Random token ids, mask and positions [B, T] with left padding."""
    ids = torch.randint(
        1, 250, (len(pads), total), generator=torch.Generator().manual_seed(seed)
    )
    mask = (torch.arange(total) >= torch.tensor(pads)[:, None]).long()
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def prompt_then_steps(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, prompt: int
) -> Tensor:
    """Logits [B, T, V] of a prompt in one call and of the other tokens one by one on its cache."""
    out = model(
        ids[:, :prompt],
        attention_mask=mask[:, :prompt],
        position_ids=positions[:, :prompt],
    )
    logits = [out.logits]
    for t in range(prompt, ids.shape[1]):
        now = slice(t, t + 1)
        given = {"attention_mask": mask[:, : t + 1], "position_ids": positions[:, now]}
        out = model(ids[:, now], past_key_values=out.past_key_values, **given)
        logits.append(out.logits)
    return torch.cat(logits, dim=1)
