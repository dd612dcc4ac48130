"""Scale one hidden-state channel for the last token's attention (Yu et al. 2025, Section 3.3, Eq. 2-3).

Earlier tokens never see the scaled queries and keys, which differ by the rank-1 term ``(s - 1) h_p RoPE(W[:, p])``.
A prompt therefore runs in one pass, in which the last tokens attend once more; see :mod:`posbench.model.last_rows`.

It runs in two where a prefill is shared, something else listens to the attention, or queries and keys are no linear
function of the input (norms or clamps behind the projection, quantised or adapted weights): all earlier tokens are
prefilled without the method, the cached keys get the term, or are projected again from the stored attention input,
and the last tokens run with scaled inputs to the query and key projections.
"""

from __future__ import annotations

import inspect
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from posbench.errors import UserError
from posbench.late import PreTrainedModel, Tensor, torch, transformers
from posbench.methods.base import (
    CheckpointChange,
    Continuation,
    Method,
    SweepClaims,
    bind_call,
    input_shape,
)
from posbench.methods.unmodified import Unmodified
from posbench.model import families
from posbench.model.hooks import (
    cache_name,
    find_cache,
    fork_cache,
    replace_attribute,
    set_cache,
    with_cache,
)
from posbench.model.last_rows import LastRows
from posbench.model.lm import LM
from posbench.model.prefix import PREFIX_ATTRIBUTE, Prefix, recording_inputs
from posbench.schema import Count, Factor

if TYPE_CHECKING:
    from transformers import DynamicCache

log = logging.getLogger(__name__)

SEARCH_SUBJECT = "the search's channel"
STRONGEST_SUBJECT = "the strongest positional channel"

DYNAMIC = (
    "%s has rope_type dynamic: past its trained length the frequencies change with every token, so that tokens "
    "in a cache, of a generation or of a prompt that is prefilled in two parts, have others than in one pass"
)
CHUNKED = (
    "scale_channel needs a prompt whole, as its last tokens are scaled: drop prefill_chunk_size, and give "
    "generate() the tokens in the cache, too"
)
_MARK = "posbench_scaled_in"
"""Holds the blocks that have filled a cache; a copy of the cache keeps them."""
_SCALES = "posbench_scale_channel"
"""On the forward of a model inside a block, and its wrappers: whether some prompt tokens are not scaled."""
_OF_GENERATE = "posbench_of_generate"
"""Argument that marks the forward of a prompt as one of ``generate``."""


def scale_cached_keys(
    prefix: Prefix, model: PreTrainedModel, method: ScaleChannel
) -> DynamicCache:
    """Return a fork of a prefix's cache with scaled keys in the method's layers; all else is shared with it.

    Args:
        prefix: Cache of a prompt that was read without the method, and the recorded attention inputs.
        model: The model.
        method: The method.
    """
    cache = fork_cache(prefix.cache)
    # Only tokens to come are scaled, or no layer of the method was recorded.
    if method.tokens == "last" or not prefix.inputs:
        return cache
    for index in method.layer_indices:
        layer = cache.layers[index]
        # A sliding-window layer keeps the newest tokens only.
        newest = slice(-layer.keys.shape[-2], None)
        # A channel's share of a linear key is added; behind a norm, say, keys are computed anew.
        if families.keys_are_linear(model, index):
            term = key_term(prefix, model, index, method.channels)[..., newest, :]
            term = _match_heads(term, layer.keys)
            keys = torch.add(layer.keys, term, alpha=method.factor - 1)
        else:
            keys = projected_keys(prefix, model, index, method.channels, method.factor)
            keys = _match_heads(keys[..., newest, :], layer.keys)
        layer.keys = keys.to(layer.keys.dtype)
    return cache


def _mark(cache: DynamicCache, block_id: str) -> None:
    """Note on a cache that a block has filled it."""
    setattr(cache, _MARK, {*getattr(cache, _MARK, ()), block_id})


def projected_keys(
    prefix: Prefix,
    model: PreTrainedModel,
    layer: int,
    channels: tuple[int, ...],
    factor: float,
) -> Tensor:
    """Return the keys of a prefix, [B, G, P, d], projected again from its attention input with scaled channels.

    Args:
        prefix: Cache and recorded attention inputs of the prompts.
        model: The model.
        layer: The layer.
        channels: Channels to scale.
        factor: Their factor.
    """
    inputs = scale_channels(prefix.inputs[layer], channels, factor)
    keys = families.project_keys(model, layer, inputs)
    return families.keys_for_cache(model, layer, keys, prefix.rotary[layer])


def scale_channels(hidden: Tensor, channels: tuple[int, ...], factor: float) -> Tensor:
    """A copy of the attention input, shape (B, T, D), with channels scaled."""
    scaled = hidden.clone()
    # A list of channels would be copied to the GPU, and wait for all its work, in every layer.
    for channel in channels:
        scaled[..., channel].mul_(factor)
    return scaled


def key_term(
    prefix: Prefix, model: PreTrainedModel, layer: int, channels: tuple[int, ...]
) -> Tensor:
    """Return the channels' contribution to the rotated keys of a prefix, ``h_p RoPE(W_K[:, p])`` summed over p.

    Args:
        prefix: Holds the attention inputs, and the terms computed so far.
        model: The model.
        layer: Index of a layer.
        channels: The channels p, recorded in the prefix.

    Returns:
        Shape (B, G, P, d) for G key heads and P tokens, float32 or better.
    """
    key = channels, layer
    if key not in prefix.parts:
        # Candidates differ in factor and layers first: one set of channels at a time keeps memory small.
        for old_key in list(prefix.parts):
            if old_key[0] != channels:
                del prefix.parts[old_key]
        inputs = prefix.inputs[layer]
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        if channels != prefix.channels:
            inputs = inputs[..., [prefix.channels.index(c) for c in channels]]
        columns = families.key_columns(model, layer, channels).to(dtype)
        term = inputs.to(dtype) @ columns
        rotary = prefix.rotary[layer]
        prefix.parts[key] = families.keys_for_cache(model, layer, term, rotary)
    return prefix.parts[key]


def _match_heads(keys: Tensor, cached: Tensor) -> Tensor:
    """Return keys (B, G, P, d) with the cache's number of heads: Falcon caches a key once per query head."""
    times = cached.shape[1] // keys.shape[1]
    return keys if times == 1 else keys.repeat_interleave(times, dim=1)


def record_prefix(
    model: PreTrainedModel,
    forward: Callable[..., Any],
    channels: Sequence[int],
    layers: Sequence[int],
    *,
    cache: DynamicCache | None = None,
    **inputs: Any,
) -> tuple[Prefix, Any]:
    """Run the unmodified ``forward`` once and record the activations that any later scaling needs.

    Args:
        model: The model.
        forward: Its unmodified forward.
        channels: Channels of the attention input to record.
        layers: Layers in which to record them.
        cache: The empty cache to fill; None: a new one.
        **inputs: Further arguments of ``forward``.

    Returns:
        The prefix, which holds the cache, and the output of ``forward``.
    """
    if cache is None:
        cache = transformers.DynamicCache(config=model.config)
    prefix = Prefix(cache)
    inputs |= with_cache(forward, cache)
    with recording_inputs(model, prefix, channels, layers):
        output = forward(use_cache=True, **inputs)
    return prefix, output


@dataclass(frozen=True, kw_only=True)
class ScaleChannel(Method):
    """Multiply channels of the attention input (after the layer's first norm) for the last tokens only.

    In the chosen layers the queries of the last prompt token and of every generated token, and the keys of all
    positions, are computed from the scaled input; values, the residual stream and the attention of earlier tokens are
    unchanged. The cache keeps the scaled keys.

    Stock ``lm.model(...)`` and ``lm.model.generate(...)`` see the method. A call with an empty cache is a prompt; later
    calls on its cache are generated or teacher-forced tokens and are scaled. Without a cache each call is a prompt of
    its own: ``generate(use_cache=False)`` is another method.

    Args:
        channel: One channel or several, 0-based.
        factor: The multiplier s; 1 changes nothing.
        layers: First and last layer, inclusive and 0-based as in the paper's Table 4.
        last: Rows of the prompt with scaled attention: 1 (paper), n, or ``"all"`` (also None): Table 6.
        tokens: Whose inputs are scaled: ``both`` (paper), only the ``last`` rows and generated tokens (their queries
            and own keys), or the keys of all ``earlier`` ones. The two halves are ours.

    A forward with an empty cache is a prompt, also where ``generate`` goes on from a filled one; tokens of a forward
    on a filled cache count as generated.

    Source: Yu et al. 2025, Eq. 2-3. Differs from source: the authors' program projects queries and keys a second time
    in every layer; this one adds the same amount as a rank-1 term (equal in exact arithmetic), and serves batches with
    left padding.
    """

    sweep_claims: ClassVar[Mapping[str, SweepClaims]] = {
        "factor": SweepClaims(
            attention="A larger factor moves attention to the beginning (Yu et al. 2025, Figure 6a)",
            score="A larger factor favours the beginning (Yu et al. 2025, Figure 6b)",
            bias="As we read Section 4.3, a factor over 1 amplifies the bias, below 1 shrinks it (Yu et al. 2025)",
            peak="The average accuracy peaks for a factor from 0.5 to -1 (Yu et al. 2025, Section 4.3)",
            best=(-1.0, 0.5),
        )
    }

    channel: int | tuple[int, ...]
    factor: Factor
    layers: tuple[int, int]
    last: Count | Literal["all"] | None = 1
    tokens: Literal["both", "last", "earlier"] = "both"

    @classmethod
    def sweep_subject(
        cls, settings: Mapping[str, Any], model: Mapping[str, Any]
    ) -> str:
        """Which channel is scaled: the papers' claims are about "the positional channel"."""
        searched = model.get("scale_channel", {}).get("channel")
        strongest = model.get("positional_channel")
        return channel_role(settings.get("channel"), searched, strongest)

    @classmethod
    def example(cls, lm: LM) -> Self:
        """A channel over half of the layers, the paper's share."""
        return cls(channel=3, factor=0.0, layers=scale_layer_range((10, 25), lm.layers))

    @property
    def channels(self) -> tuple[int, ...]:
        """The scaled channels, always as a tuple."""
        if isinstance(self.channel, Iterable):
            return tuple(self.channel)
        return (int(self.channel),)

    @property
    def needs_prompt(self) -> bool:
        """Whether some prompt tokens are not scaled; see :class:`Method`."""
        return self.last not in (None, "all")

    @property
    def layer_indices(self) -> range:
        """The scaled layers."""
        return range(self.layers[0], self.layers[1] + 1)

    def neutral(self) -> Self:
        """Factor 1."""
        return replace(self, factor=1.0)

    def prefill(self) -> Method | None:
        """The unmodified model, where the last token alone is scaled."""
        return Unmodified() if self.last == 1 else None

    def continuation(self) -> Continuation | None:
        """Return how the method goes on behind a prefill that was read without it.

        Queries and keys of later tokens, and keys of all earlier ones, are scaled as ``tokens`` says. None if several
        last tokens are treated apart.
        """
        if self.last != 1:
            return None
        return Continuation(
            self.channels,
            self.factor,
            self.layer_indices,
            scales_inputs=self.tokens != "earlier",
            scales_keys=self.tokens != "last",
        )

    def records(self) -> tuple[Collection[int], Collection[int]]:
        """Its channels in its layers, where keys are scaled."""
        if self.tokens == "last":
            return (), ()
        return self.channels, self.layer_indices

    def twin(self) -> Self:
        """All tokens scaled, as in the paper's Table 6: all queries then see the same keys."""
        return replace(self, last="all") if self.tokens == "both" else self

    def folded(self, lm: LM) -> CheckpointChange | None:
        """Scaled columns of the projections of the chosen layers, where all tokens are scaled."""
        if self.needs_prompt or self.tokens != "both":
            return None
        factors = dict.fromkeys(self.channels, self.factor)
        return CheckpointChange(columns=dict.fromkeys(self.layer_indices, factors))

    def scale(self, hidden: Tensor) -> Tensor:
        """A copy of the attention input, shape (B, T, D), with the channels scaled."""
        return scale_channels(hidden, self.channels, self.factor)

    def check(self, lm: LM) -> None:
        """Refuse channels and layers that the model does not have; warn where its RoPE depends on the prompt's length.

        Raises:
            UserError: States which.
        """
        super().check(lm)
        check_channels(lm, "method.channel", self.channels)
        check_layers(lm, "method.layers", self.layers)
        if self.tokens == "earlier" and self.last == "all":
            allowed = (
                "a number, with method.tokens=earlier: before all tokens there are none"
            )
            raise UserError("method.last", self.last, allowed, "set method.last=1")
        config = families.text_config(lm.model)
        rope_parameters = getattr(config, "rope_parameters", None) or {}
        if rope_parameters.get("rope_type") == "dynamic":
            log.warning(DYNAMIC, lm.name)

    @contextmanager
    def changed(self, lm: LM) -> Iterator[None]:
        """Replace the model's forward inside the block by one that scales the channel for the last tokens.

        A prompt without a cache runs as :meth:`_run_prompt` says; on a cache that this block filled, all tokens are
        scaled.
        """
        model = lm.model
        forward = model.forward
        is_nested = hasattr(forward, _SCALES)
        if is_nested and (self.needs_prompt or getattr(forward, _SCALES)):
            value = "scale_channel in scale_channel"
            allowed = "one at a time, unless both have last=all"
            hint = "name all channels in one: channel=(3, 15)"
            raise UserError("method", value, allowed, hint)
        prepare_inputs = model.prepare_inputs_for_generation
        signature = inspect.signature(forward)
        block_id = uuid.uuid4().hex
        last_rows = LastRows(
            model, self.channels, self.factor, self.layer_indices, self.tokens
        )

        @wraps(forward)
        def scaled_forward(*args: Any, **kwargs: Any) -> Any:
            num_candidates = 0
            if kwargs.pop(_OF_GENERATE, False):
                # In assisted generation candidates for the reply follow on the prompt.
                num_candidates = max(kwargs.get("logits_to_keep", 1) - 1, 0)
            call = bind_call(signature, args, kwargs)
            cache = call.pop(cache_name(call), None)
            if cache is None or cache.get_seq_length() == 0:
                return self._run_prompt(
                    last_rows, forward, cache, block_id, num_candidates, call
                )
            shared_prefix = vars(cache).pop(PREFIX_ATTRIBUTE, None)
            if shared_prefix is not None:
                cache.layers = scale_cached_keys(shared_prefix, model, self).layers
                _mark(cache, block_id)
            if block_id not in getattr(cache, _MARK, ()):
                problem = "this cache was filled outside the scale_channel block"
                raise ValueError(f"{problem}: run the prompt inside")
            return self.continue_with(model, forward, cache, **call)

        setattr(scaled_forward, _SCALES, self.needs_prompt)

        @wraps(prepare_inputs)
        def prepare_scaled_inputs(*args: Any, **kwargs: Any) -> Any:
            # Before transformers 5.23 the parts of a long prompt are named by neither argument.
            is_prompt = kwargs.get("is_first_iteration")
            is_part = "next_sequence_length" not in kwargs
            if not (self.needs_prompt and (is_prompt or is_part)):
                return prepare_inputs(*args, **kwargs)
            cache = find_cache(kwargs)
            if block_id in getattr(cache, _MARK, ()):
                # generate() reads a long prompt in parts, so its end is not known yet.
                if not kwargs.get("next_sequence_length"):
                    raise ValueError(CHUNKED)
                # All tokens of the prompt are here: those in the cache were scaled as if they were its end.
                vars(cache).update(vars(transformers.DynamicCache(config=model.config)))
                delattr(cache, _MARK)
                kwargs["next_sequence_length"] = None
            return {**prepare_inputs(*args, **kwargs), _OF_GENERATE: True}

        # Some checkpoints (MPT) ask generate() to go without a cache, which would be another method.
        with (
            replace_attribute(model, "forward", scaled_forward),
            replace_attribute(
                model, "prepare_inputs_for_generation", prepare_scaled_inputs
            ),
            replace_attribute(model.generation_config, "use_cache", True),
        ):
            yield

    def continue_with(
        self,
        model: PreTrainedModel,
        forward: Callable[..., Any],
        cache: Any,
        **inputs: Any,
    ) -> Any:
        """Run tokens whose queries and keys are scaled, on a cache whose keys are scaled already; return the output.

        Args:
            model: The model.
            forward: Its unmodified forward.
            cache: The cache.
            inputs: Further arguments of the forward.
        """
        with ExitStack() as stack:
            if self.tokens != "earlier":
                for layer in self.layer_indices:
                    for hook in families.on_query_key_input(model, layer, self.scale):
                        stack.enter_context(hook)
            return forward(**with_cache(forward, cache), **inputs)

    def _run_prompt(
        self,
        last_rows: LastRows,
        forward: Callable[..., Any],
        cache: Any,
        block_id: str,
        num_candidates: int,
        call: dict[str, Any],
    ) -> Any:
        """Run a whole prompt, in one pass where the model and the cache allow it.

        Args:
            last_rows: Scales the last tokens in one pass.
            forward: The model's unmodified forward.
            cache: The empty cache of the call, or None.
            block_id: Marks the cache as filled here.
            num_candidates: Tokens behind the prompt, which count as generated.
            call: The other arguments of the call, by name.

        Returns:
            The output of the unmodified forward for the whole prompt.
        """
        if call.get("output_attentions"):
            raise ValueError(
                "output_attentions is not available inside the block: use lm.last_attention()"
            )
        model = last_rows.model
        if model.training and model.is_gradient_checkpointing:
            problem = (
                "gradient checkpointing drops the cache, which scale_channel needs"
            )
            raise ValueError(f"{problem}: call model.gradient_checkpointing_disable()")
        use_cache = call.pop("use_cache", None)
        if use_cache is None:
            use_cache = families.text_config(model).use_cache
        return_dict = call.pop("return_dict", None)
        if cache is None:
            cache = transformers.DynamicCache(config=model.config)
        _check_cache(cache)
        self._check_padding(call.get("attention_mask"))
        _, num_tokens = input_shape(call)
        num_scaled = num_tokens
        if isinstance(self.last, int):
            num_scaled = min(self.last + num_candidates, num_tokens)

        # The method needs the cache, whatever the caller wants to get back.
        inputs = {**call, "use_cache": True, "return_dict": True}
        if num_scaled == num_tokens:
            output = self.continue_with(model, forward, cache, **inputs)
        # One pass if the last rows can be computed again on the same keys, else two.
        elif _keys_stay(cache) and LastRows.fits(model, self.layer_indices):
            with last_rows.scaling(num_scaled):
                output = forward(**with_cache(forward, cache), **inputs)
        else:
            output = self._run_parts(
                model, forward, cache, num_tokens - num_scaled, num_tokens, call
            )
        _mark(cache, block_id)
        if not use_cache:
            set_cache(output, None)
        return output.to_tuple() if return_dict is False else output

    def _run_parts(
        self,
        model: PreTrainedModel,
        forward: Callable[..., Any],
        cache: Any,
        num_unscaled: int,
        num_tokens: int,
        call: Mapping[str, Any],
    ) -> Any:
        """Prefill all tokens but the last n unmodified, scale the cached keys, run the last n scaled.

        Args:
            model: The model.
            forward: Its unmodified forward.
            cache: The empty cache.
            num_unscaled: Tokens before the last n.
            num_tokens: All tokens.
            call: The other arguments of the call.

        Returns:
            Loss, logits, cache and hidden states.
        """
        inputs = dict(call)
        logits_to_keep = inputs.pop("logits_to_keep", 0)
        labels = inputs.pop("labels", None)
        num_scaled = num_tokens - num_unscaled
        is_count = isinstance(logits_to_keep, int)

        earlier_inputs = _select_tokens(inputs, slice(0, num_unscaled), num_tokens)
        earlier_inputs["logits_to_keep"] = 0
        if is_count and logits_to_keep:
            # Fewer than 1 cannot be asked for: the one spare row is dropped again below.
            earlier_inputs["logits_to_keep"] = max(logits_to_keep - num_scaled, 1)
        prefix, earlier = record_prefix(
            model,
            forward,
            self.channels,
            self.layer_indices,
            cache=cache,
            **earlier_inputs,
        )
        cache.layers = scale_cached_keys(prefix, model, self).layers
        last_inputs = _select_tokens(
            inputs, slice(num_unscaled, num_tokens), num_tokens
        )
        last_inputs["logits_to_keep"] = 0
        if is_count:
            last_inputs["logits_to_keep"] = min(logits_to_keep, num_scaled)
        last = self.continue_with(model, forward, cache, use_cache=True, **last_inputs)

        # The last rows by number (-0 takes all), or rows by index tensor.
        kept_tokens = slice(-logits_to_keep, None) if is_count else logits_to_keep
        logits = torch.cat([earlier.logits, last.logits], dim=1)[:, kept_tokens]
        hidden_states = None
        if last.hidden_states is not None:
            by_layer = zip(earlier.hidden_states, last.hidden_states, strict=True)
            hidden_states = tuple(torch.cat(states, dim=1) for states in by_layer)
        loss = None
        if labels is not None:
            vocabulary = families.text_config(model).vocab_size
            loss = model.loss_function(
                logits=logits, labels=labels, vocab_size=vocabulary
            )
        kind = transformers.modeling_outputs.CausalLMOutputWithPast
        name = cache_name(kind.__dataclass_fields__)
        return kind(
            loss=loss, logits=logits, hidden_states=hidden_states, **{name: cache}
        )

    def _check_padding(self, mask: Any) -> None:
        """Refuse prompts that are padded on the right, whose last tokens are padding.

        Args:
            mask: The attention mask, [B, T]; other forms cannot be checked.

        Raises:
            ValueError: A row ends with padding.
        """
        if not (
            isinstance(self.last, int) and torch.is_tensor(mask) and mask.ndim == 2
        ):
            return
        if not mask[:, -self.last :].any(dim=1).all():
            raise ValueError(
                "scale_channel needs prompts that are padded on the left, not on the right"
            )


def _keys_stay(cache: Any) -> bool:
    """Whether a cache keeps the very tensors that attention reads, and no gradient does: they can be scaled there."""
    cache_utils = transformers.cache_utils
    growing = cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer
    if getattr(cache, "offloading", False) or torch.is_grad_enabled():
        return False
    return all(type(layer) in growing for layer in cache.layers)


def _check_cache(cache: Any) -> None:
    """Refuse a cache of fixed size, whose keys cannot be replaced.

    Raises:
        ValueError: It is one.
    """
    growing = transformers.cache_utils.DynamicLayer
    if not all(isinstance(layer, growing) for layer in cache.layers):
        kind = type(cache).__name__
        raise ValueError(
            f"scale_channel needs a DynamicCache, got {kind}: drop cache_implementation"
        )


def _select_tokens(
    call: Mapping[str, Any], tokens: slice, num_tokens: int
) -> dict[str, Any]:
    """Return the arguments of a forward over ``num_tokens`` tokens, restricted to some of them.

    Args:
        call: The arguments by name.
        tokens: The tokens to keep.
        num_tokens: Number of all tokens.
    """
    return {
        name: _select_from_argument(name, value, tokens, num_tokens)
        for name, value in call.items()
    }


def _select_from_argument(name: str, value: Any, tokens: slice, num_tokens: int) -> Any:
    """Return the part of one argument of a forward that belongs to some tokens.

    Args:
        name: Name of the argument.
        value: Its value; one without an axis of tokens is returned as it is.
        tokens: The tokens.
        num_tokens: Number of all tokens, by which an axis of tokens is recognised.

    Raises:
        ValueError: The attention mask is no tensor.
    """
    if value is None:
        return None
    is_tensor = isinstance(value, torch.Tensor)
    if name == "attention_mask" and not is_tensor:
        raise ValueError("scale_channel takes a 2-D or 4-D attention_mask tensor")
    if name == "attention_mask":
        # A token sees all earlier ones, so the mask begins with the first.
        visible = value[..., : tokens.stop]
        return visible if value.ndim == 2 else visible[:, :, tokens]
    if name == "position_ids":
        return value[..., tokens]
    if is_tensor and value.ndim >= 2 and value.shape[1] == num_tokens:
        return value[:, tokens]
    return value


def scale_layer_range(published: tuple[int, int], count: int) -> tuple[int, int]:
    """First and last layer in a model of ``count`` layers, at the depths of a paper's layers of 32."""
    first_layer = round(count * published[0] / 32)
    last_layer = round(count * published[1] / 32)
    return first_layer, min(last_layer, count - 1)


def check_channels(lm: LM, name: str, channels: Sequence[int]) -> None:
    """Refuse channels outside the model's hidden size.

    Args:
        lm: The model.
        name: Config key of the channels, for the error.
        channels: The channels.

    Raises:
        UserError: Names those allowed.
    """
    width = families.text_config(lm.model).hidden_size
    repeated = len(set(channels)) != len(channels)
    if not channels or repeated or any(not 0 <= c < width for c in channels):
        allowed = f"different channels from 0 to {width - 1} (hidden size {width} of model {lm.name})"
        hint = f"find one with: posbench stages=[search] model={lm.name} method=scale_channel"
        raise UserError(name, list(channels), allowed, hint)


def check_layers(lm: LM, name: str, layers: Sequence[int] | None) -> None:
    """Refuse a range of layers unless [first, last], inclusive, lies inside the model; None passes.

    Args:
        lm: The model.
        name: Config key of the range, for the error.
        layers: The range.

    Raises:
        UserError: It does not.
    """
    if layers is None:
        return
    count = lm.layers
    if len(layers) != 2 or not 0 <= layers[0] <= layers[1] < count:
        allowed = f"[first, last] with 0 <= first <= last <= {count - 1} ({count} layers in model {lm.name})"
        raise UserError(
            name,
            list(layers),
            allowed,
            f"set {name}=[0,{count - 1}] or a part of it: layers are 0-based and inclusive",
        )


def channel_role(
    channel: int | Sequence[int] | None, searched: int | None, strongest: int | None
) -> str:
    """Return the role of a channel in a model, for claims about "the positional channel".

    The search's choice need not be the channel that follows the position most closely, so both are asked.

    Args:
        channel: The channel, or several; None: the result of a search in the same run.
        searched: The search's choice, in the block ``scale_channel`` of the model's file.
        strongest: The strongest one where it is another, ``positional_channel`` of that file.
    """
    if isinstance(channel, Sequence):
        return f"channels {', '.join(map(str, channel))}"
    if channel in (None, searched):
        return SEARCH_SUBJECT
    if channel == strongest:
        return STRONGEST_SUBJECT
    return f"channel {channel}"
