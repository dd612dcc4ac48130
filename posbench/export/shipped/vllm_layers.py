# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The posbench authors
"""A model of vLLM whose layer h rotates queries and keys as if a token at position m
stood at m / s_h (LPES, Section 3.2)."""

from math import ceil
from typing import Any

from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.llama import LlamaForCausalLM as Base
from vllm.model_executor.models.utils import PPMissingLayer

SCALES = (1.0,)
"""The scale s_h of each layer."""


class PosbenchForCausalLM(Base):
    """The model with a rotary embedding of each layer's own."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", **options: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **options)
        layers = self.model.layers
        rope_parameters = dict(self.config.rope_parameters)
        rope_type = rope_parameters.get("rope_type", "default")
        if len(layers) != len(SCALES) or rope_type != "default":
            raise ValueError(
                f"{len(SCALES)} layers and plain RoPE are needed, "
                f"not {len(layers)} and {rope_type}"
            )
        for layer, scale in zip(layers, SCALES, strict=True):
            if scale == 1 or isinstance(layer, PPMissingLayer):
                continue
            rotary = layer.self_attn.rotary_emb
            layer.self_attn.rotary_emb = get_rope(
                rotary.head_size,
                # vLLM's table ends at max_position times the factor.
                max_position=ceil(rotary.max_position_embeddings / min(scale, 1)),
                is_neox_style=rotary.is_neox_style,
                rope_parameters={
                    **rope_parameters,
                    "rope_type": "linear",
                    "factor": scale,
                },
            )
