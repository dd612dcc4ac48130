# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The posbench authors
"""A language model that reads every prompt once per RoPE base and mixes the predictions of each token
(Attention Buckets, Chen et al. 2023).

``AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`` loads it; nothing but transformers is
needed. ``posbench`` in config.json holds the N ``bases`` (null: the model's own), the ``mixture``, and under
``where`` the name of the ``rotary`` embedding. Memory and time are those of N times the rows; no beam search.
"""

import inspect
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig as BaseConfig
from transformers import LlamaForCausalLM as Base


class PosbenchConfig(BaseConfig):
    """That of the unmodified model, and ``posbench``."""

    model_type = "posbench"


class PosbenchForCausalLM(Base):
    """The model under several bases: B rows come in and go out, B * N rows are computed and cached."""

    config_class = PosbenchConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.get_submodule(config.posbench["where"]["rotary"]).register_forward_hook(
            self.tables, with_kwargs=True
        )

    def tables(
        self, rotary: Any, args: Any, kwargs: Any, output: Any
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, [B * N, T, rotated coordinates], whose rows take the bases in turn."""
        given = dict(zip(("x", "position_ids"), args, strict=False)) | kwargs
        hidden, positions, bases = (
            given["x"],
            given["position_ids"],
            self.config.posbench["bases"],
        )
        rows, frequencies = hidden.shape[0] // len(bases), rotary.inv_freq
        # Positions that all rows share come as a single row.
        positions = positions.expand(hidden.shape[0], -1).unflatten(
            0, (rows, len(bases))
        )
        count, found = frequencies.numel(), []
        powers = (
            torch.arange(count, device=frequencies.device, dtype=torch.float32) / count
        )
        forward = inspect.unwrap(type(rotary).forward)
        try:
            for number, base in enumerate(bases):
                rotary.inv_freq = frequencies if base is None else base**-powers
                with torch.no_grad():
                    found.append(forward(rotary, hidden, positions[:, number]))
        finally:
            rotary.inv_freq = frequencies
        cos, sin = (
            torch.stack(tables, dim=1).flatten(0, 1)
            for tables in zip(*found, strict=True)
        )
        return cos, sin

    @wraps(Base.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Logits [B, T, V], or log-probabilities where probabilities are mixed."""
        bound = inspect.signature(Base.forward).bind(self, *args, **kwargs).arguments
        call = {**bound, **bound.get("kwargs", {})}
        call = {
            name: value
            for name, value in call.items()
            if name not in ("self", "kwargs")
        }
        if call.get("output_attentions") or call.get("output_hidden_states"):
            raise ValueError("attentions and hidden states have no single value here")
        labels, as_dict, cache = (
            call.pop(name, None)
            for name in ("labels", "return_dict", "past_key_values")
        )
        tokens = (
            call["input_ids"]
            if call.get("input_ids") is not None
            else call["inputs_embeds"]
        )
        rows, count = tokens.shape[0], len(self.config.posbench["bases"])
        if (
            cache is not None
            and cache.get_seq_length()
            and cache.layers[0].keys.shape[0] != rows * count
        ):
            raise ValueError(f"this cache does not hold {rows * count} rows: no beams")
        for name, value in call.items():
            if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[0] == rows:
                call[name] = value.repeat_interleave(count, dim=0)
        out = super().forward(past_key_values=cache, **call)
        out.logits = self.mixed(out.logits.unflatten(0, (rows, count)))
        if labels is not None:
            size = self.config.get_text_config().vocab_size
            out.loss = self.loss_function(
                logits=out.logits, labels=labels, vocab_size=size
            )
        return out.to_tuple() if as_dict is False else out

    def mixed(self, logits: Tensor) -> Tensor:
        """One prediction [B, T, V] from those of the bases [B, N, T, V]."""
        exact = logits.float()
        if self.config.posbench["mixture"] == "logits":
            return (
                (exact.amax(-1, keepdim=True).softmax(1) * exact)
                .sum(1)
                .to(logits.dtype)
            )
        shares = exact.log_softmax(-1)
        confidence = shares.amax(-1, keepdim=True).log_softmax(1)
        return (confidence + shares).logsumexp(1).to(logits.dtype)
