# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The posbench authors
"""A language model that reads every prompt once per RoPE base and mixes the predictions
of each token (Attention Buckets, Chen et al. 2023).

``AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`` loads it;
nothing but transformers is needed. ``posbench`` in config.json holds the N ``bases``
(null: the model's own), the ``mixture``, and under ``where`` the name of the ``rotary``
embedding. Memory and time are those of N times the rows; no beam search.

Shapes: B rows of the batch, N bases, T tokens, V vocabulary.
"""

import inspect
from functools import wraps
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig as BaseConfig
from transformers import LlamaForCausalLM as Base

# "cache" from transformers 5.24 on; "layer_past" in GPT-NeoX, Bloom and others before.
CACHE_NAMES = ("cache", "past_key_values", "layer_past")

if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError("transformers 5 or later: earlier ones read no rope_parameters")


def cache_name(names: Any) -> str:
    """What a forward calls its cache, by its parameters or the arguments of a call."""
    return next((name for name in CACHE_NAMES if name in names), "past_key_values")


CACHE = cache_name(inspect.signature(Base.forward).parameters)


class PosbenchConfig(BaseConfig):
    """The config of the unmodified model, and ``posbench``."""

    model_type = "posbench"


class PosbenchForCausalLM(Base):
    """The model under several bases.

    B rows come in and go out, B * N rows are computed and cached: row b under base n
    has the number b * N + n.
    """

    config_class = PosbenchConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        rotary = self.get_submodule(config.posbench["where"]["rotary"])
        rotary.register_forward_hook(self.rotary_tables, with_kwargs=True)

    def rotary_tables(
        self, rotary: Any, args: Any, kwargs: Any, output: Any
    ) -> tuple[Tensor, Tensor]:
        """Forward hook of the rotary embedding: cos and sin under all bases in its place.

        Args:
            rotary: The rotary embedding.
            args: Its arguments: hidden states [B * N, T, D] and position ids.
            kwargs: Its arguments by name.
            output: Its own cos and sin, which are replaced.

        Returns:
            cos and sin, each [B * N, T, rotated coordinates of a head].
        """
        arguments = dict(zip(("x", "position_ids"), args, strict=False)) | kwargs
        hidden = arguments["x"]
        bases = self.config.posbench["bases"]
        num_rows = hidden.shape[0] // len(bases)
        # Positions that all rows share come as a single row.
        positions = arguments["position_ids"].expand(hidden.shape[0], -1)
        positions = positions.unflatten(0, (num_rows, len(bases)))
        original = rotary.inv_freq
        count = original.numel()
        indices = torch.arange(count, device=original.device, dtype=torch.float32)
        powers = indices / count
        forward = inspect.unwrap(type(rotary).forward)
        cos_by_base = []
        sin_by_base = []
        try:
            for index, base in enumerate(bases):
                rotary.inv_freq = original if base is None else base**-powers
                with torch.no_grad():
                    cos, sin = forward(rotary, hidden, positions[:, index])
                cos_by_base.append(cos)
                sin_by_base.append(sin)
        finally:
            rotary.inv_freq = original
        cos = torch.stack(cos_by_base, dim=1).flatten(0, 1)
        sin = torch.stack(sin_by_base, dim=1).flatten(0, 1)
        return cos, sin

    @wraps(Base.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run each of B prompts under all N bases, as N rows, and mix their predictions.

        Takes the arguments of the model's own forward.

        Returns:
            Its output, with logits [B, T, V], or log-probabilities where probabilities are
            mixed.
        """
        bound = inspect.signature(Base.forward).bind(self, *args, **kwargs).arguments
        arguments = {**bound, **bound.get("kwargs", {})}
        arguments.pop("self")
        arguments.pop("kwargs", None)
        if arguments.get("output_attentions") or arguments.get("output_hidden_states"):
            raise ValueError("attentions and hidden states have no single value here")
        labels = arguments.pop("labels", None)
        return_dict = arguments.pop("return_dict", None)
        cache = arguments.pop(cache_name(arguments), None)
        inputs = arguments.get("input_ids")
        if inputs is None:
            inputs = arguments["inputs_embeds"]
        num_rows = inputs.shape[0]
        num_bases = len(self.config.posbench["bases"])
        if cache is not None and cache.get_seq_length():
            num_cached_rows = cache.layers[0].keys.shape[0]
            if num_cached_rows != num_rows * num_bases:
                raise ValueError(
                    f"this cache does not hold {num_rows * num_bases} rows: no beams"
                )
        for name, value in arguments.items():
            if not isinstance(value, Tensor) or value.ndim < 2:
                continue
            if value.shape[0] == num_rows:
                arguments[name] = value.repeat_interleave(num_bases, dim=0)
        output = super().forward(**{CACHE: cache}, **arguments)
        output.logits = self.mix(output.logits.unflatten(0, (num_rows, num_bases)))
        if labels is not None:
            output.loss = self.loss_function(
                logits=output.logits,
                labels=labels,
                vocab_size=self.config.get_text_config().vocab_size,
            )
        return output.to_tuple() if return_dict is False else output

    def mix(self, logits: Tensor) -> Tensor:
        """Return one prediction [B, T, V] from those under N bases [B, N, T, V].

        Bases weigh by their confidence, the softmax over bases of the largest value.
        """
        exact = logits.float()
        if self.config.posbench["mixture"] == "logits":
            weights = exact.amax(-1, keepdim=True).softmax(1)
            return (weights * exact).sum(1).to(logits.dtype)
        log_probabilities = exact.log_softmax(-1)
        log_weights = log_probabilities.amax(-1, keepdim=True).log_softmax(1)
        return (log_weights + log_probabilities).logsumexp(1).to(logits.dtype)
