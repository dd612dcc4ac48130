# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The posbench authors
"""A language model that rotates queries and keys as if a token at position m stood at m / s, in each layer
with a scale s of its own (LPES, Section 3.2; one scale for all layers: Position Interpolation).

``AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`` loads it; nothing but transformers is
needed. ``posbench`` in config.json holds the ``scales``, one for each layer; ``where`` names the model's
``layers``, their ``attention`` and the ``rotary`` embedding.
"""

import inspect
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig as BaseConfig
from transformers import LlamaForCausalLM as Base


class PosbenchConfig(BaseConfig):
    """That of the unmodified model, and ``posbench``."""

    model_type = "posbench"


class PosbenchForCausalLM(Base):
    """The model with other positions in each layer."""

    config_class = PosbenchConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        own = config.posbench
        self.asked: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self.made: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self.get_submodule(own["where"]["rotary"]).register_forward_hook(
            self.remember, with_kwargs=True
        )
        layers = self.get_submodule(own["where"]["layers"])
        kinds = getattr(config.get_text_config(), "layer_types", None) or [None] * len(
            layers
        )
        for layer, kind, scale in zip(layers, kinds, own["scales"], strict=True):
            if scale != 1:
                hook = partial(self.rotate, kind, scale)
                getattr(layer, own["where"]["attention"]).register_forward_pre_hook(
                    hook, with_kwargs=True
                )

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
        self.made.clear()

    def rotate(
        self, kind: str | None, scale: float, attention: Any, args: Any, kwargs: Any
    ) -> Any:
        """Give a layer its own cos and sin, each [B, T, rotated coordinates]."""
        given = kwargs.get("position_embeddings")
        if given is None:  # a layer without rotary embedding
            return None
        kind = kind if kind in self.asked else None
        if (kind, scale) not in self.made:
            hidden, positions = self.asked[kind]
            rotary = self.get_submodule(self.config.posbench["where"]["rotary"])
            # Without its decorators: frequencies that depend on the prompt's length stay as they were chosen.
            forward = inspect.unwrap(type(rotary).forward)
            options = {"layer_type": kind} if kind else {}
            with torch.no_grad():
                self.made[kind, scale] = forward(
                    rotary, hidden, positions.float() / scale, **options
                )
        tables = tuple(table.to(given[0].device) for table in self.made[kind, scale])
        return args, {**kwargs, "position_embeddings": tables}
