# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The posbench authors
"""A language model that rotates queries and keys as if a token at position m stood at
m / s, in each layer with a scale s of its own (LPES, Section 3.2; one scale for all
layers: Position Interpolation).

``AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`` loads it;
nothing but transformers is needed. ``posbench`` in config.json holds the ``scales``,
one for each layer; ``where`` names the model's ``layers``, their ``attention`` and the
``rotary`` embedding.
"""

import inspect
from functools import partial
from typing import Any

import torch
import transformers
from transformers import LlamaConfig as BaseConfig
from transformers import LlamaForCausalLM as Base

if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError("transformers 5 or later: earlier ones read no rope_parameters")


class PosbenchConfig(BaseConfig):
    """The config of the unmodified model, and ``posbench``."""

    model_type = "posbench"


class PosbenchForCausalLM(Base):
    """The model with other positions in each layer."""

    config_class = PosbenchConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        scales = config.posbench["scales"]
        modules = config.posbench["where"]
        # By kind of layer: an empty tensor of the hidden states' dtype and device,
        # and the positions [B, T] of the current forward.
        self.rotary_inputs: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        # cos and sin of the current forward, by kind of layer and scale.
        self.scaled_tables: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        rotary = self.get_submodule(modules["rotary"])
        rotary.register_forward_hook(self.record_rotary_inputs, with_kwargs=True)
        layers = self.get_submodule(modules["layers"])
        layer_kinds = getattr(config.get_text_config(), "layer_types", None)
        if not layer_kinds:
            layer_kinds = [None] * len(layers)
        for layer, layer_kind, scale in zip(layers, layer_kinds, scales, strict=True):
            if scale != 1:
                attention = getattr(layer, modules["attention"])
                hook = partial(self.scale_positions, layer_kind, scale)
                attention.register_forward_pre_hook(hook, with_kwargs=True)

    def record_rotary_inputs(
        self, rotary: Any, args: Any, kwargs: Any, tables: Any
    ) -> None:
        """Forward hook of the rotary embedding: record the positions [B, T] of a forward.

        Models with several kinds of layers call their rotary embedding once per kind.
        """
        names = ("x", "position_ids", "layer_type")
        arguments = dict(zip(names, args, strict=False)) | kwargs
        # Of the hidden states only dtype and device matter.
        like_hidden = arguments["x"].new_empty(0)
        layer_kind = arguments.get("layer_type")
        self.rotary_inputs[layer_kind] = (like_hidden, arguments["position_ids"])
        self.scaled_tables.clear()

    def scale_positions(
        self,
        layer_kind: str | None,
        scale: float,
        attention: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Before a layer's attention: its tables become those of positions m / scale.

        Args:
            layer_kind: Kind of the layer, where the model has several.
            scale: The layer's scale s.
            attention: The attention module.
            args: Its positional arguments.
            kwargs: Its arguments by name.

        Returns:
            The arguments, with cos and sin [B, T, rotated coordinates of a head].
        """
        original = kwargs.get("position_embeddings")
        if original is None:  # a layer without rotary embedding
            return None
        if layer_kind not in self.rotary_inputs:
            layer_kind = None
        if (layer_kind, scale) not in self.scaled_tables:
            like_hidden, positions = self.rotary_inputs[layer_kind]
            rotary = self.get_submodule(self.config.posbench["where"]["rotary"])
            # Without its decorators, which would choose other frequencies by the
            # largest position: those chosen for the prompt stay.
            forward = inspect.unwrap(type(rotary).forward)
            options = {"layer_type": layer_kind} if layer_kind else {}
            with torch.no_grad():
                self.scaled_tables[layer_kind, scale] = forward(
                    rotary, like_hidden, positions.float() / scale, **options
                )
        device = original[0].device
        cos, sin = self.scaled_tables[layer_kind, scale]
        tables = (cos.to(device), sin.to(device))
        return args, {**kwargs, "position_embeddings": tables}
