# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The posbench authors
"""A language model in which channels of the attention input are scaled for the last tokens alone (Yu et al.
2025, Section 3.3, Eq. 2-3).

``AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`` loads it; nothing but transformers is
needed. ``posbench`` in config.json holds the ``channels``, their ``factor``, the first and last of the scaled
``layers`` [0-based, inclusive], and ``last``: how many tokens of a prompt have scaled queries (null: all), as
every generated token has. Where ``tokens`` is "both", these attend to scaled keys of all tokens. ``where``
names the model's ``layers`` and their ``attention``.
"""

import inspect
from contextlib import suppress
from functools import partial, wraps
from typing import Any

import torch
from transformers import DynamicCache
from transformers import LlamaConfig as BaseConfig
from transformers import LlamaForCausalLM as Base
from transformers.cache_utils import DynamicLayer


class PosbenchConfig(BaseConfig):
    """That of the unmodified model, and ``posbench``."""

    model_type = "posbench"


class Caught(Exception):
    """Ends a layer's attention once its keys and values are there."""


class Catch:
    """Takes the place of a cache in one layer, and catches its keys and values."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        """Keys and values [B, G, T, d] as the layer caches them."""
        self.keys, self.values = keys, values
        raise Caught


class WithValues(Catch):
    """A cache in one layer that keeps other values than it is given."""

    def __init__(self, cache: Any, values: torch.Tensor) -> None:
        super().__init__(cache)
        self.values = values

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        """See :meth:`Catch.update`."""
        return self.cache.update(keys, self.values, *rest, **more)


class PosbenchForCausalLM(Base):
    """The model with scaled channels. A call with an empty cache is a prompt; what follows on that cache is
    generated, and is scaled. Each call without a cache is a prompt of its own."""

    config_class = PosbenchConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        own = config.posbench
        self.at_the_end = False
        first, last = own["layers"]
        for index, layer in enumerate(self.get_submodule(own["where"]["layers"])):
            if first <= index <= last:
                attention = getattr(layer, own["where"]["attention"])
                attention.register_forward_pre_hook(self.before, with_kwargs=True)
                attention.register_forward_hook(
                    partial(self.after, index), with_kwargs=True
                )

    def before(self, attention: Any, args: Any, kwargs: Any) -> Any:
        """The last tokens: queries and keys come from the scaled input, values from the unmodified one."""
        if not self.at_the_end or self.config.posbench["tokens"] == "earlier":
            return None
        name, cache = the_cache(kwargs)
        kept = WithValues(cache, caught(attention, args, kwargs).values)
        args, kwargs = self.scaled(args, kwargs)
        return args, {**kwargs, name: kept}

    def after(
        self, index: int, attention: Any, args: Any, kwargs: Any, output: Any
    ) -> None:
        """The tokens before: once they have attended, their keys are cached as the last ones see them."""
        if self.at_the_end or self.config.posbench["tokens"] == "last":
            return
        layer = the_cache(kwargs)[1].layers[index]
        keys = caught(attention, *self.scaled(args, kwargs)).keys
        # A sliding-window layer keeps the newest alone.
        layer.keys = keys[..., -layer.keys.shape[-2] :, :].to(layer.keys.dtype)

    def scaled(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a layer's attention with a scaled input [B, T, D]."""
        own = self.config.posbench
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        hidden = hidden.clone()
        hidden[..., own["channels"]] *= own["factor"]
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": hidden}
        return (hidden, *args[1:]), kwargs

    @wraps(Base.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a prompt in two parts, what follows in one."""
        bound = inspect.signature(Base.forward).bind(self, *args, **kwargs).arguments
        call = {**bound, **bound.get("kwargs", {})}
        call = {
            name: value
            for name, value in call.items()
            if name not in ("self", "kwargs")
        }
        cache, labels = call.pop("past_key_values", None), call.pop("labels", None)
        use_cache, as_dict = call.pop("use_cache", None), call.pop("return_dict", None)
        if call.get("output_attentions") or call.get("output_hidden_states"):
            raise ValueError("attentions and hidden states have no single value here")
        cache = DynamicCache(config=self.config) if cache is None else cache
        if not all(isinstance(layer, DynamicLayer) for layer in cache.layers):
            raise ValueError(
                f"a DynamicCache is needed, not {type(cache).__name__}: drop cache_implementation"
            )
        tokens = (
            call["input_ids"]
            if call.get("input_ids") is not None
            else call["inputs_embeds"]
        )
        total, keep, mask = (
            tokens.shape[1],
            call.pop("logits_to_keep", 0),
            call.get("attention_mask"),
        )
        count = self.config.posbench["last"]
        if (
            count
            and isinstance(mask, torch.Tensor)
            and mask.ndim == 2
            and not mask[:, -count:].any(dim=1).all()
        ):
            raise ValueError(
                "prompts must be padded on the left: tokenizer.padding_side = 'left'"
            )
        some = keep if isinstance(keep, int) else 0
        last = (
            total
            if cache.get_seq_length()
            else min(self.config.posbench["last"] or total, total)
        )
        # No call gives fewer logits than those of one token: the spare one is dropped below.
        head = slice(0, total - last), max(some - last, 1) if some else 0, False
        logits = []
        try:
            for rows, few, self.at_the_end in (
                head,
                (slice(total - last, total), min(some, last), True),
            ):
                if rows.stop > rows.start:
                    # Later tokens come with the mask of all before them.
                    whole = rows.stop - rows.start == total
                    part = (
                        call
                        if whole
                        else {name: cut(name, call[name], rows, total) for name in call}
                    )
                    part = {
                        **part,
                        "past_key_values": cache,
                        "use_cache": True,
                        "logits_to_keep": few,
                    }
                    out = super().forward(**part)
                    logits.append(out.logits)
        finally:
            self.at_the_end = False
        out.logits = torch.cat(logits, dim=1)[
            :, slice(-keep, None) if isinstance(keep, int) else keep
        ]
        if labels is not None:
            size = self.config.get_text_config().vocab_size
            out.loss = self.loss_function(
                logits=out.logits, labels=labels, vocab_size=size
            )
        out.past_key_values = cache if use_cache is not False else None
        return out.to_tuple() if as_dict is False else out


def the_cache(kwargs: Any) -> tuple[str, Any]:
    """The cache among the arguments of a layer's attention, and its name there."""
    return next(
        (name, kwargs[name])
        for name in ("past_key_values", "layer_past")
        if name in kwargs
    )


def caught(attention: Any, args: Any, kwargs: Any) -> Catch:
    """The keys and values that a layer's attention would cache."""
    name, cache = the_cache(kwargs)
    catch = Catch(cache)
    with suppress(Caught):
        attention.forward(*args, **{**kwargs, name: catch})
    return catch


def cut(name: str, value: Any, rows: slice, total: int) -> Any:
    """The part of an argument of the forward that belongs to some of the ``total`` tokens."""
    if not isinstance(value, torch.Tensor):
        if name == "attention_mask" and value is not None:
            raise ValueError("attention_mask must be a tensor")
        return value
    if name == "attention_mask":
        return (
            value[:, : rows.stop] if value.ndim == 2 else value[:, :, rows, : rows.stop]
        )
    if name == "position_ids":
        return value[..., rows]
    return value[:, rows] if value.ndim >= 2 and value.shape[1] == total else value
