# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The posbench authors
"""A language model whose attention rotates queries and keys itself, under other positions or bases than the
model's own: Ms-PoE (Zhang et al. 2024, Algorithm 1) or MoICE (Lin et al. 2024).

``AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`` loads it; nothing but transformers is
needed. ``posbench`` in config.json holds the ``method``, its constants, and the ``indices`` of the changed
layers; ``where`` names the model's ``layers``, their ``attention`` and the ``rotary`` embedding.

Keys stay un-rotated in the cache. B is the batch, H query heads, G key heads, T new tokens, S all tokens, d a
head's size.
"""

import inspect
import sys
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers import LlamaConfig as BaseConfig
from transformers import LlamaForCausalLM as Base
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class PosbenchConfig(BaseConfig):
    """That of the unmodified model, and ``posbench``."""

    model_type = "posbench"


class Router(nn.Module):
    """Scores of N bases from queries [B, H, T, d] (MoICE)."""

    def __init__(self, width: int, bases: int) -> None:
        super().__init__()
        self.gate_1 = nn.Linear(width, bases, bias=False)
        self.gate_2 = nn.Linear(bases, bases, bias=False)
        self.gate_3 = nn.Linear(width, bases, bias=False)

    def forward(self, query: Tensor) -> Tensor:
        """Logits [B, H, T, N]."""
        return self.gate_2(nn.functional.silu(self.gate_1(query)) * self.gate_3(query))


class PosbenchForCausalLM(Base):
    """The model with its own rotation. Ms-PoE ranks heads by the prompt: a call with an empty cache."""

    config_class = PosbenchConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        own, text = config.posbench, config.get_text_config()
        self.asked: dict[Any, tuple[Tensor, Tensor]] = {}
        self.get_submodule(own["where"]["rotary"]).register_forward_hook(
            self.remember, with_kwargs=True
        )
        layers = self.get_submodule(own["where"]["layers"])
        kinds = getattr(text, "layer_types", None) or [None] * len(layers)
        for index in own["indices"]:
            attention = getattr(layers[index], own["where"]["attention"])
            attention.register_forward_pre_hook(
                partial(self.hold, kinds[index]), with_kwargs=True
            )
            if own.get("router"):
                attention.router = Router(own["router"], len(own["bases"]))
        # In front of the kernel in use, and under a name of this file's own.
        self.kernel = text._attn_implementation
        self.ours = f"posbench_{self.kernel}_{__name__}"
        AttentionInterface.register(self.ours, partial(attend, self.kernel))
        AttentionMaskInterface.register(
            self.ours, ALL_MASK_ATTENTION_FUNCTIONS[self.kernel]
        )
        self.set_attn_implementation(self.ours)

    def remember(self, rotary: Any, args: Any, kwargs: Any, tables: Any) -> None:
        """Keep the positions [B, T] of a forward; some models ask for each kind of layer apart."""
        given = (
            dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
        )
        # Of the hidden states only type and device matter.
        self.asked[given.get("layer_type")] = (
            given["x"].new_empty(0),
            given["position_ids"],
        )

    def hold(self, kind: str | None, attention: Any, args: Any, kwargs: Any) -> Any:
        """Let a layer cache un-rotated keys, and keep what :func:`attend` needs."""
        if attention.config._attn_implementation != self.ours:
            raise ValueError(
                "choose the attention kernel in from_pretrained(attn_implementation=...)"
            )
        kind = kind if kind in self.asked else None
        cache = kwargs.get("past_key_values", kwargs.get("layer_past"))
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        positions, memory = (
            self.asked[kind][1].expand(hidden.shape[0], -1).to(hidden.device),
            {},
        )
        past = cache.get_seq_length(attention.layer_idx) if cache is not None else 0
        if past:
            before, memory = cache.posbench[attention.layer_idx]
            positions = torch.cat([before[:, :past], positions], dim=1)
        if cache is not None:
            # A copy of a cache shares what it holds: replace, never change.
            cache.posbench = {
                **getattr(cache, "posbench", {}),
                attention.layer_idx: (positions, memory),
            }
        attention.held = (
            self.config.posbench,
            positions,
            memory,
            partial(self.table, kind),
        )
        cos, sin = kwargs["position_embeddings"]
        return args, {
            **kwargs,
            "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin)),
        }

    def table(
        self, kind: str | None, positions: Tensor, base: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """cos and sin [B, T, rotated coordinates] at positions [B, T], under another base if given."""
        rotary, hidden = (
            self.get_submodule(self.config.posbench["where"]["rotary"]),
            self.asked[kind][0],
        )
        before = rotary._buffers.get("inv_freq")
        if base is not None:
            count = before.numel()
            powers = (
                torch.arange(count, device=before.device, dtype=torch.float32) / count
            )
            rotary._buffers["inv_freq"] = base**-powers
        # Without its decorators: frequencies that depend on the prompt's length stay as they were chosen.
        forward, options = (
            inspect.unwrap(type(rotary).forward),
            {"layer_type": kind} if kind else {},
        )
        try:
            with torch.no_grad():
                return forward(rotary, hidden, positions.to(hidden.device), **options)
        finally:
            if base is not None:
                rotary._buffers["inv_freq"] = before


class Rotation(NamedTuple):
    """What a method gets for one layer: un-rotated queries [B, H, T, d], and keys and values [B, G, S, d]."""

    attention: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    settings: dict[str, Any]  # of the kernel
    kernel: Any
    own: dict[str, Any]  # constants of the method
    places: tuple[
        Tensor, Tensor
    ]  # positions of the queries [B, T] and of the keys [B, S]
    memory: dict[str, Any]  # kept from the prompt on
    table: Any  # from positions and a base to cos and sin

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attention's output [B, T, H, d]."""
        return self.kernel(
            self.attention, query, key, value, self.mask, **self.settings
        )[0]


def attend(
    kernel_name: str,
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    **settings: Any,
) -> Any:
    """Attention under the method in its layers, and as ever in the others."""
    eager = sys.modules[type(attention).__module__].eager_attention_forward
    kernel = ALL_ATTENTION_FUNCTIONS.get_interface(kernel_name, eager)
    if not hasattr(attention, "held"):
        return kernel(attention, query, key, value, mask, **settings)
    own, positions, memory, table = attention.held
    if positions.shape[1] < key.shape[2]:
        raise ValueError("a cache that grows is needed (DynamicCache)")
    # A sliding-window layer holds the newest keys alone.
    places = positions[:, -query.shape[2] :], positions[:, -key.shape[2] :]
    rest = mask, settings, kernel, own, places, memory, table
    method = ms_poe if own["method"] == "ms_poe" else moice
    return method(Rotation(attention, query, key, value, *rest)), None


def ms_poe(r: Rotation) -> Tensor:
    """Every head sees positions divided by a ratio of its own."""
    groups = r.query.shape[1] // r.key.shape[1]
    if "ratios" not in r.memory:
        r.memory["ratios"] = ratios(r)
    queries, keys = (
        at[:, None] / r.memory["ratios"][..., None] for at in r.places
    )  # [B, H, T], [B, H, S]
    query = rotated(r.attention, r.query, *per_head(r.table, queries))
    if (
        r.own["variant"] == "official"
    ):  # the keys of a group are rotated with the ratio of its first head
        return r.attend(
            query,
            rotated(r.attention, r.key, *per_head(r.table, keys[:, ::groups])),
            r.value,
        )
    key, value = (x.repeat_interleave(groups, dim=1) for x in (r.key, r.value))
    key = rotated(r.attention, key, *per_head(r.table, keys))
    if groups == 1:
        return r.attend(query, key, value)
    # The kernel repeats no head: each has its keys already.
    r.attention.num_key_value_groups = 1
    try:
        return r.attend(query, key, value)
    finally:
        r.attention.num_key_value_groups = groups


def ratios(r: Rotation) -> Tensor:
    """The ratio of each head, [B, H], by how many keys have an outlying share of its last row."""
    heads, (low, high), paper = (
        r.query.shape[1],
        r.own["ratios"],
        r.own["variant"] == "paper",
    )
    if r.own["order"] == "reversed":
        number = torch.arange(heads - 1, -1, -1, device=r.query.device).expand(
            r.query.shape[:2]
        )
    else:
        last, key, alpha = r.query[:, :, -1:], r.key, r.own["alpha"]
        if paper:
            last = rotated(r.attention, last, *r.table(r.places[0][:, -1:]))
            key = rotated(r.attention, key, *r.table(r.places[1]))
        weights = last_row(last, key, r.mask, **r.settings)
        # Equal scores give the mean to every key that the row may see, and nothing to padding.
        mean = last_row(torch.zeros_like(last), key, r.mask, **r.settings)
        above = weights >= alpha * mean if paper else weights > alpha * mean
        number = (
            (above & (mean > 0)).sum(-1).argsort(dim=1, descending=True, stable=True)
        )
        number = number if r.own["order"] == "permutation" else number.argsort(dim=1)
    steps = max(heads - 1, 1) if paper else heads
    return low + (high - low) * number.float() / steps


def moice(r: Rotation) -> Tensor:
    """Attention under every base, mixed with weights of a router for each token and head."""
    mixed, weights = torch.zeros(()), None
    for number, base in enumerate(r.own["bases"]):
        query = rotated(r.attention, r.query, *r.table(r.places[0], base))
        weights = (
            shares(r.attention, query.float(), r.own) if weights is None else weights
        )
        out = r.attend(
            query, rotated(r.attention, r.key, *r.table(r.places[1], base)), r.value
        )
        mixed = mixed + weights[..., number].transpose(1, 2)[..., None] * out
    return mixed.to(r.query.dtype)


def shares(attention: Any, query: Tensor, own: Any) -> Tensor:
    """Weights [B, H, T, N] that sum to 1, of which the largest ``top_k`` are kept."""
    if not own.get("router"):
        return query.new_full(
            (*query.shape[:3], len(own["bases"])), 1 / len(own["bases"])
        )
    logits = attention.router.to(query)(query)
    weights = logits.softmax(-1)
    chosen = logits.topk(own["top_k"], dim=-1).indices
    kept = torch.zeros_like(weights).scatter(-1, chosen, weights.gather(-1, chosen))
    return kept / kept.sum(-1, keepdim=True)


def rotated(attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, H, T, d] by the model's own function, with tables [B, T, r] or, per head, [B, H, T, r]."""
    if cos.ndim == 4:  # heads become rows
        heads = rotated(
            attention, x.flatten(0, 1)[:, None], cos.flatten(0, 1), sin.flatten(0, 1)
        )
        return heads.reshape(x.shape)
    apply = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    part, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    turned = apply(part[:, :0], part, cos.to(x.device), sin.to(x.device))[1]
    return torch.cat([turned, rest], dim=-1)


def per_head(table: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [B, H, T, r] at positions [B, H, T]."""
    cos, sin = table(positions.flatten(0, 1))
    return cos.unflatten(0, positions.shape[:2]), sin.unflatten(0, positions.shape[:2])


def last_row(
    query: Tensor,
    key: Tensor,
    mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> Tensor:
    """Attention weights of the last query, [B, H, S]."""
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).float()
    scores = (query.float() @ keys.transpose(-1, -2))[:, :, -1] * (
        scaling or query.shape[-1] ** -0.5
    )
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    total, shut = scores.shape[-1], float("-inf")
    if mask is not None and mask.ndim == 4:
        row = mask[:, :, -1, :total]
        return (
            scores.masked_fill(~row, shut) if row.dtype == torch.bool else scores + row
        ).softmax(-1)
    hidden = torch.arange(total - 1, -1, -1, device=scores.device) >= (
        sliding_window or total
    )
    if mask is not None:  # padding alone, as flash kernels take it
        hidden = hidden | ~mask[:, None, -total:].bool()
    return scores.masked_fill(hidden, shut).softmax(-1)
