"""Several methods that continue one shared prefill, decoded as one batch.

The rows of the batch are the prompts under the first method, then those under the second, and so on. The keys and
values of the prompts are in memory once and are read once for all methods; each row adds its own tokens' keys and
values. Scaled channels change the scores of the shared keys by a rank-1 term, ``(s - 1) q . h_p RoPE(W_K[:, p])``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from posbench.late import PreTrainedModel, Tensor, torch
from posbench.methods.base import Continuation, Method
from posbench.methods.scale_channel import key_term, projected_keys
from posbench.model import families
from posbench.model.guard import exclusive
from posbench.model.hooks import appendable_cache, intercepting_attention
from posbench.model.last_rows import KERNELS
from posbench.model.lm import LM
from posbench.model.prefix import Prefix

OWN_TOKENS = 16
"""Tokens per allocation of memory for a row's own keys and values."""


def can_pack(model: PreTrainedModel) -> bool:
    """Whether the attention of a model can be computed over a common and an own part of the keys."""
    kernel = families.text_config(model)._attn_implementation
    return families.family_of(model).interface and kernel in KERNELS


def continuation_of(method: Method) -> Continuation | None:
    """A method as a continuation; None where its class inherits that from one from which it may differ."""
    if "continuation" not in vars(type(method)):
        return None
    return method.continuation()


def prompt_copies(model: PreTrainedModel, continuations: Sequence[Continuation]) -> int:
    """Return how many copies of their prompts' memory several continuations need in one batch."""
    scaled = [c for c in continuations if c.scales_keys and c.channels]
    layers = {layer for c in scaled for layer in c.layers}
    if all(families.keys_are_linear(model, layer) for layer in layers):
        return max(len({c.channels for c in scaled}), 1)
    return max(len(scaled), 1)


@contextmanager
def packed(
    lm: LM, prefix: Prefix, methods: Sequence[Method], *, keep_keys: bool = True
) -> Iterator[Prefix]:
    """Continue a prefill of B prompts under M methods at once, inside the block.

    Args:
        lm: The model, for which :func:`can_pack` holds.
        prefix: The prefill, with the activations that the methods record.
        methods: The methods, each with a :func:`continuation_of`, whose :meth:`Method.check` has accepted the
            model.
        keep_keys: Whether the scaled keys of a layer stay in memory; off where there is one forward.

    Yields:
        A prefill of M * B rows, method by method, which holds no keys: the keys of ``prefix`` are read in their place.
    """
    continuations = []
    for method in methods:
        continuation = continuation_of(method)
        assert continuation is not None, f"{method} continues in a block of its own"
        continuations.append(continuation)
    assert can_pack(lm.model), f"attention of {lm.name} runs in its own way"
    pack = _Pack(lm.model, prefix, continuations, keep_keys)
    names = [
        m.short_name()
        for m, c in zip(methods, continuations, strict=True)
        if c.channels
    ]
    name = " and ".join(dict.fromkeys(names))
    with exclusive(lm, name or "unmodified", pack.changed()):
        yield Prefix(pack.empty_cache())


class _Pack:
    """A prefill of B prompts that M continuations share.

    Args:
        model: The model.
        prefix: The prefill.
        continuations: The continuations.
        keep_keys: Whether the scaled keys of a layer are kept for the next forward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prefix: Prefix,
        continuations: Sequence[Continuation],
        keep_keys: bool,
    ) -> None:
        self._model = model
        self._prefix = prefix
        self._continuations = continuations
        self._num_prompts = prefix.cache.layers[0].keys.shape[0]
        # By layer, the factor of each channel of the attention input in each row, [M * B, 1, D].
        self._input_factors: dict[int, Tensor] = {}
        self._is_kept = keep_keys
        self._kept_keys: dict[int, Sequence[_ScaledKeys]] = {}

    def empty_cache(self) -> Any:
        """Return a cache of M * B rows that counts the tokens of the prefill, but does not hold them.

        M is the number of methods, B that of prompts.
        """
        rows = len(self._continuations) * self._num_prompts

        def empty(states: Tensor) -> Tensor:
            return states.new_empty(rows, states.shape[1], 0, states.shape[3])

        states = (
            (empty(layer.keys), empty(layer.values))
            for layer in self._prefix.cache.layers
        )
        return appendable_cache(states, OWN_TOKENS, self._prefix.tokens)

    @contextmanager
    def changed(self) -> Iterator[None]:
        """Inside the block, attend to the shared keys, and scale the inputs of queries and keys row by row."""
        layers = {
            layer
            for c in self._continuations
            if c.scales_inputs and c.channels
            for layer in c.layers
        }
        with ExitStack() as stack:
            stack.enter_context(intercepting_attention(self._model, self._attend))
            for layer in sorted(layers):
                for hook in families.on_query_key_input(
                    self._model, layer, self._scaling(layer)
                ):
                    stack.enter_context(hook)
            yield

    def _scaling(self, layer: int) -> Any:
        """Return a function that multiplies a layer's attention input [M * B, T, D] by each row's factors."""

        def scale(hidden: Tensor) -> Tensor:
            if layer not in self._input_factors:
                dtype = torch.promote_types(hidden.dtype, torch.float32)
                factors = torch.ones(
                    len(self._continuations), hidden.shape[-1], dtype=dtype
                )
                for method, c in enumerate(self._continuations):
                    if c.scales_inputs and layer in c.layers:
                        factors[method, list(c.channels)] = c.factor
                rows = factors.repeat_interleave(self._num_prompts, dim=0)
                self._input_factors[layer] = rows[:, None].to(hidden.device)
            return (hidden * self._input_factors[layer]).to(hidden.dtype)

        return scale

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scaling: float,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention of each row to the shared keys of its prompt, and to its own; it replaces the kernel.

        Args:
            module: The layer's attention module.
            query: Queries, [M * B, H, T, d].
            key: The rows' own keys, [M * B, G, own tokens, d].
            value: The rows' own values.
            mask: Attention mask over shared and own keys, or None.
            scaling: Factor of the scores.
            softcap: Limit of the scores, in models that have one.

        Returns:
            The output, and None for the weights.
        """
        shared = self._prefix.cache.layers[module.layer_idx]
        past = shared.keys.shape[2]
        rows, key_heads, _, dim = key.shape
        tokens = query.shape[2]
        # [M * B, G, N, d], where N are the tokens of all H / G heads of a group.
        queries = (query * scaling).reshape(rows, key_heads, -1, dim)
        own_scores = self._by_prompt(queries @ key.transpose(-1, -2))
        scores = torch.cat(
            [
                self._shared_scores(module.layer_idx, self._by_prompt(queries)),
                own_scores,
            ],
            dim=-1,
        )
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = _masked(scores, mask, tokens)
        dtype = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=dtype).to(query.dtype)

        # The queries of all methods that read the same values are adjacent.
        shared_weights = weights[..., :past].flatten(2, 3)
        shared_output = (shared_weights @ shared.values).unflatten(2, scores.shape[2:4])
        own_weights = weights[..., past:].permute(2, 0, 1, 3, 4).flatten(0, 1)
        output = shared_output.permute(2, 0, 1, 3, 4).flatten(0, 1)
        output = output + own_weights @ value
        output = output.reshape(rows, -1, tokens, dim).transpose(1, 2)
        return output.contiguous(), None

    def _by_prompt(self, states: Tensor) -> Tensor:
        """States [M * B, G, ...] of rows as [B, G, M, ...]."""
        return states.unflatten(0, (-1, self._num_prompts)).movedim(0, 2)

    def _shared_scores(self, layer: int, queries: Tensor) -> Tensor:
        """Return the scores [B, G, M, N, P] of queries [B, G, M, N, d] against the prefill's keys under each method.

        Args:
            layer: The layer.
            queries: B prompts, G key heads, M methods, N queries of a key head's group.
        """
        keys = self._prefix.cache.layers[layer].keys
        scores = _products(queries, keys)
        for scaled in self._scaled_keys(layer):
            members = queries[:, :, scaled.methods]
            # Keys of their own, else a term that is added times the method's factor.
            if scaled.factors is None:
                scores[:, :, scaled.methods] = _products(members, scaled.keys)
            else:
                factors = scaled.factors[:, None, None]
                scores[:, :, scaled.methods] += _products(
                    members * factors, scaled.keys
                )
        return scores

    def _scaled_keys(self, layer: int) -> Sequence[_ScaledKeys]:
        """Return the keys of a layer that some methods use in place of the prefill's keys, or add to them."""
        if layer in self._kept_keys:
            return self._kept_keys[layer]
        methods_by_channels: dict[tuple[int, ...], list[int]] = {}
        for method, c in enumerate(self._continuations):
            if c.scales_keys and layer in c.layers:
                methods_by_channels.setdefault(c.channels, []).append(method)
        cached = self._prefix.cache.layers[layer].keys
        result = []
        for channels, methods in methods_by_channels.items():
            factors = [self._continuations[method].factor for method in methods]
            # Then scaling adds (factor - 1) times the channels' part of the keys, for all factors.
            if families.keys_are_linear(self._model, layer):
                term = key_term(self._prefix, self._model, layer, channels)
                result.append(
                    _ScaledKeys(
                        _as_index(methods, cached.device),
                        term.to(cached.dtype).contiguous(),
                        cached.new_tensor(factors) - 1,
                    )
                )
                continue
            for method, factor in zip(methods, factors, strict=True):
                keys = projected_keys(
                    self._prefix, self._model, layer, channels, factor
                )
                result.append(
                    _ScaledKeys(slice(method, method + 1), keys.to(cached.dtype))
                )
        if self._is_kept:
            self._kept_keys[layer] = result
        return result


class _ScaledKeys(NamedTuple):
    """Keys of a prefill as some methods scale them.

    Attributes:
        methods: Numbers of the methods.
        keys: The keys, [B, G, P, d].
        factors: Of each method, times how much they are added to the keys of the prefill, [m]; None: they take the
            place of those.
    """

    methods: slice | Tensor
    keys: Tensor
    factors: Tensor | None = None


def _as_index(numbers: list[int], device: torch.device) -> slice | Tensor:
    """Rising numbers as a slice, which copies nothing, where they have no gap."""
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return slice(numbers[0], numbers[-1] + 1)
    return torch.tensor(numbers, device=device)


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """Inner products [B, G, M, N, P] of queries [B, G, M, N, d] and keys [B, G, P, d]."""
    products = queries.flatten(2, 3) @ keys.transpose(-1, -2)
    return products.unflatten(2, queries.shape[2:4])


def _masked(scores: Tensor, mask: Tensor | None, tokens: int) -> Tensor:
    """Return scores [B, G, M, N, P + n], very low where a token must not see a key.

    Args:
        scores: The scores, in which the tokens are the faster part of N.
        mask: The mask of a kernel, [1 or M * B, 1, tokens, P + n], true where a key is open or to be added; None:
            each token sees those up to itself.
        tokens: Number of tokens.
    """
    if mask is None:
        if tokens == 1:
            return scores
        num_keys = scores.shape[-1]
        ones = torch.ones(tokens, num_keys, dtype=torch.bool, device=scores.device)
        mask = ones.tril(num_keys - tokens)[None, None]
    # It is the same under each method.
    mask = mask[: scores.shape[0], :, None, None]
    by_token = scores.unflatten(3, (-1, tokens))
    if mask.dtype == torch.bool:
        by_token = by_token.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        by_token = by_token + mask
    return by_token.flatten(3, 4)
