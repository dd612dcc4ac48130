# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The posbench authors
"""A language model in which channels of the attention input are scaled for the last
tokens alone (Yu et al. 2025, Section 3.3, Eq. 2-3).

``AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`` loads it;
nothing but transformers is needed. ``posbench`` in config.json holds the ``channels``,
their ``factor``, the first and last of the scaled ``layers`` [0-based, inclusive], and
``last``: how many tokens of a prompt have scaled queries (null: all), as every generated
token has. Where ``tokens`` is "both", these attend to scaled keys of all tokens.
``where`` names the model's ``layers`` and their ``attention``.

Shapes: B batch, T tokens, G key heads, d size of a head, D hidden size, V vocabulary.
"""

import inspect
from contextlib import suppress
from functools import partial, wraps
from typing import Any

import torch
import transformers
from transformers import DynamicCache
from transformers import LlamaConfig as BaseConfig
from transformers import LlamaForCausalLM as Base
from transformers.cache_utils import DynamicLayer

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


class CacheProxy:
    """Takes the place of a cache in one layer's attention."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


class KeysRecorded(Exception):
    """Ends a layer's attention once its keys and values are recorded."""


class RecordingCache(CacheProxy):
    """Records the keys and values of a layer instead of caching them."""

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Record keys and values [B, G, T, d], and end the layer's attention."""
        self.keys = keys
        self.values = values
        raise KeysRecorded


class CacheWithValues(CacheProxy):
    """Caches other values than the layer computes."""

    def __init__(self, cache: Any, values: torch.Tensor) -> None:
        super().__init__(cache)
        self.values = values

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Cache the layer's keys with these values, each [B, G, T, d]."""
        return self.cache.update(keys, self.values, *args, **kwargs)


class PosbenchForCausalLM(Base):
    """The model with scaled channels.

    A call with an empty cache is a prompt; what follows on that cache is generated, and
    is scaled. Each call without a cache is a prompt of its own. Where only the last tokens
    of a prompt are scaled, one that comes in several calls is refused: which tokens are
    last shows only at its end.
    """

    config_class = PosbenchConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        modules = config.posbench["where"]
        first, last = config.posbench["layers"]
        # True while a forward runs the last tokens of a prompt, or generated ones; False for earlier tokens.
        self.runs_last_tokens = False
        for index, layer in enumerate(self.get_submodule(modules["layers"])):
            if first <= index <= last:
                attention = getattr(layer, modules["attention"])
                attention.register_forward_pre_hook(
                    self.scale_last_tokens, with_kwargs=True
                )
                attention.register_forward_hook(
                    partial(self.scale_earlier_keys, index), with_kwargs=True
                )

    def scale_last_tokens(self, attention: Any, args: Any, kwargs: Any) -> Any:
        """Hook before a layer's attention: scale the input of queries and keys of the last tokens.

        Values come from the unmodified input.

        Args:
            attention: The attention module.
            args: Its arguments.
            kwargs: Its arguments by name, among them the cache.

        Returns:
            The changed arguments; None while the earlier tokens run.
        """
        if not self.runs_last_tokens or self.config.posbench["tokens"] == "earlier":
            return None
        name, cache = find_cache(kwargs)
        values = record_keys_values(attention, args, kwargs).values
        args, kwargs = self.scale_input(args, kwargs)
        return args, {**kwargs, name: CacheWithValues(cache, values)}

    def scale_earlier_keys(
        self, index: int, attention: Any, args: Any, kwargs: Any, output: Any
    ) -> None:
        """After attention of the earlier tokens: cache scaled keys for later tokens.

        Args:
            index: Index of the layer.
            attention: Its attention module.
            args: Positional arguments of the attention.
            kwargs: Its arguments by name.
            output: What it returned, which stays.
        """
        if self.runs_last_tokens or self.config.posbench["tokens"] == "last":
            return
        _, cache = find_cache(kwargs)
        layer = cache.layers[index]
        args, kwargs = self.scale_input(args, kwargs)
        keys = record_keys_values(attention, args, kwargs).keys
        # A sliding-window layer keeps the newest alone.
        num_cached = layer.keys.shape[-2]
        layer.keys = keys[..., -num_cached:, :].to(layer.keys.dtype)

    def scale_input(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return a layer's arguments of attention with scaled channels of its input [B, T, D]."""
        constants = self.config.posbench
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        hidden = hidden.clone()
        hidden[..., constants["channels"]] *= constants["factor"]
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": hidden}
        return (hidden, *args[1:]), kwargs

    @wraps(Base.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Return the inputs of a forward of ``generate``, marked so that :meth:`forward` knows whose they are."""
        cache = kwargs.get(cache_name(kwargs))
        is_filled = cache is not None and cache.get_seq_length() > 0
        # Before transformers 5.23 the parts of a long prompt are named by neither.
        is_part = "next_sequence_length" not in kwargs
        if is_filled and (kwargs.get("is_first_iteration") or is_part):
            self.refuse_second_call()
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        return {**inputs, "is_generate_call": True}

    def refuse_second_call(self) -> None:
        """Refuse a prompt that goes on from a filled cache, if only its last tokens are scaled."""
        if self.config.posbench["last"]:
            raise ValueError(
                "this prompt goes on from a filled cache (past_key_values or cache, "
                "prefill_chunk_size): the last tokens of a prompt are scaled, so give "
                "it whole, in one call with an empty cache; after it a call takes one "
                "generated token, or generate() all of them"
            )

    @wraps(Base.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a prompt in two passes, as the method changes its last tokens alone.

        The earlier tokens come first, then the last ones. Where the cache holds tokens already, all new ones are
        generated, and the method changes all.

        Returns:
            The output of the model's own forward: logits [B, T, V] of T tokens, or of those in ``logits_to_keep``.

        Raises:
            ValueError: Several tokens that ``generate`` did not make follow on a filled cache.
        """
        is_generate_call = kwargs.pop("is_generate_call", False)
        bound = inspect.signature(Base.forward).bind(self, *args, **kwargs).arguments
        arguments = {**bound, **bound.get("kwargs", {})}
        arguments.pop("self")
        arguments.pop("kwargs", None)
        cache = arguments.pop(cache_name(arguments), None)
        labels = arguments.pop("labels", None)
        use_cache = arguments.pop("use_cache", None)
        return_dict = arguments.pop("return_dict", None)
        logits_to_keep = arguments.pop("logits_to_keep", 0)
        if arguments.get("output_attentions") or arguments.get("output_hidden_states"):
            raise ValueError(
                "attentions and hidden states cannot be returned: a prompt runs in two passes"
            )
        if cache is None:
            cache = DynamicCache(config=self.config)
        if not all(isinstance(layer, DynamicLayer) for layer in cache.layers):
            raise ValueError(
                f"a DynamicCache is needed, not {type(cache).__name__}: "
                "drop cache_implementation"
            )
        inputs = arguments.get("input_ids")
        if inputs is None:
            inputs = arguments["inputs_embeds"]
        num_tokens = inputs.shape[1]
        num_last = self.config.posbench["last"] or num_tokens
        if self.config.posbench["last"]:
            check_left_padding(arguments.get("attention_mask"), num_last)
        if cache.get_seq_length():  # all tokens are generated ones
            if num_tokens > 1 and not is_generate_call:
                self.refuse_second_call()
            num_last = num_tokens
        elif is_generate_call and isinstance(logits_to_keep, int):
            # Assisted generation lets candidates follow on the prompt, and asks for the
            # logits of the prompt's last token and of theirs.
            num_last += max(logits_to_keep - 1, 0)
        num_last = min(num_last, num_tokens)
        num_earlier = num_tokens - num_last
        # 0 keeps the logits of all tokens; indices choose among them below.
        num_logits = logits_to_keep if isinstance(logits_to_keep, int) else 0
        logits = []
        if num_earlier:
            num_earlier_logits = 0
            if num_logits:
                # A call gives the logits of one token at least; that is dropped below.
                num_earlier_logits = max(num_logits - num_last, 1)
            output = self.run_tokens(
                arguments, slice(0, num_earlier), num_tokens, cache, num_earlier_logits
            )
            logits.append(output.logits)
        try:
            self.runs_last_tokens = True
            output = self.run_tokens(
                arguments,
                slice(num_earlier, num_tokens),
                num_tokens,
                cache,
                min(num_logits, num_last),
            )
        finally:
            self.runs_last_tokens = False
        logits.append(output.logits)
        if isinstance(logits_to_keep, int):
            logits_to_keep = slice(-logits_to_keep, None)
        output.logits = torch.cat(logits, dim=1)[:, logits_to_keep]
        if labels is not None:
            output.loss = self.loss_function(
                logits=output.logits,
                labels=labels,
                vocab_size=self.config.get_text_config().vocab_size,
            )
        setattr(output, CACHE, cache if use_cache is not False else None)
        return output.to_tuple() if return_dict is False else output

    def run_tokens(
        self,
        arguments: dict[str, Any],
        tokens: slice,
        num_tokens: int,
        cache: Any,
        logits_to_keep: int,
    ) -> Any:
        """Run the unmodified forward on a range of tokens.

        Args:
            arguments: Arguments of the forward for all tokens.
            tokens: The range.
            num_tokens: Number of all tokens.
            cache: Cache of the tokens before the range.
            logits_to_keep: Tokens whose logits are computed, from the end; 0 for all.
        """
        if tokens.stop - tokens.start < num_tokens:
            arguments = {
                name: select_tokens(name, value, tokens, num_tokens)
                for name, value in arguments.items()
            }
        return super().forward(
            **arguments,
            **{CACHE: cache},
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )


def check_left_padding(mask: Any, num_last: int) -> None:
    """Refuse an attention mask [B, S] under which a prompt has no token among the last ones.

    Raises:
        ValueError: Prompts are padded on the right.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return
    if not mask[:, -num_last:].any(dim=1).all():
        raise ValueError(
            "prompts must be padded on the left: tokenizer.padding_side = 'left'"
        )


def find_cache(kwargs: Any) -> tuple[str, Any]:
    """Name and value of the cache among the arguments of a layer's attention."""
    name = cache_name(kwargs)
    return name, kwargs[name]


def record_keys_values(attention: Any, args: Any, kwargs: Any) -> RecordingCache:
    """The keys and values that a layer's attention would cache."""
    name, cache = find_cache(kwargs)
    recording = RecordingCache(cache)
    with suppress(KeysRecorded):
        attention.forward(*args, **{**kwargs, name: recording})
    return recording


def select_tokens(name: str, value: Any, tokens: slice, num_tokens: int) -> Any:
    """Return the part of one argument of a model's forward that belongs to a range of the tokens.

    Args:
        name: Name of the argument.
        value: Its value for all tokens.
        tokens: The range. Its mask covers all tokens before it, too.
        num_tokens: Number of all tokens.

    Returns:
        A slice of a tensor that has a place for each token; any other value as it is.
    """
    if not isinstance(value, torch.Tensor):
        if name == "attention_mask" and value is not None:
            raise ValueError("attention_mask must be a tensor")
        return value
    if name == "attention_mask" and value.ndim == 2:
        return value[:, : tokens.stop]
    if name == "attention_mask":
        return value[:, :, tokens, : tokens.stop]
    if name == "position_ids":
        return value[..., tokens]
    if value.ndim >= 2 and value.shape[1] == num_tokens:
        return value[:, tokens]
    return value
