"""Multiply the last token's attention weights on some tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from posbench.late import F, Tensor, nn, sdpa, torch
from posbench.model import families
from posbench.model.attention import last_query_weights
from posbench.model.hooks import AttentionFunction, find_cache, intercepting_attention
from posbench.model.lm import LM
from posbench.perturbations.base import track_cache_length


@contextmanager
def scale_attention(
    lm: LM,
    tokens: Tensor,
    factor: float,
    layers: Collection[int],
    *,
    renormalise: bool = True,
    generated: bool = False,
) -> Iterator[dict[int, Tensor]]:
    """Multiply the last prompt token's attention weights on some tokens, for a forward or a generation.

    With a the weights of the last row, v the values, o = sum a_j v_j and S the tokens, the head's output
    becomes o + (factor - 1) sum_S a_j v_j; with ``renormalise`` divided by 1 + (factor - 1) sum_S a_j, which
    equals log(factor) added to the scores of S. Only that row is computed a second time, so memory is linear
    in the prompt and any kernel will do.

    Source: Yu et al. 2025, Appendix D.2; the reading of last row and renormalisation is ours.

    Args:
        lm: The model.
        tokens: 1 at the tokens S and 0 elsewhere, [B, T], left padding included; the rows are of equal length
            or longest first, the order in which :meth:`LM.generate` runs them.
        factor: Factor of the weights.
        layers: Layers whose weights change.
        renormalise: Whether the changed weights of a row are divided by their sum.
        generated: Whether the rows of generated tokens, one at a time, change too.

    Yields:
        The last prompt token's weights after the change, [B, H, T'], by layer, as :meth:`LM.last_attention`.

    Raises:
        ValueError: Families outside the library's attention functions ran without a cache, which holds their
            values.
    """
    with ExitStack() as stack:
        cache_length = stack.enter_context(track_cache_length(lm.model))
        scaling = _LastRowScaling(
            tokens, factor - 1, layers, renormalise, generated, cache_length
        )
        if families.family_of(lm.model).interface:
            stack.enter_context(intercepting_attention(lm.model, scaling.attend))
        else:
            scaling.projection = families.family_of(lm.model).output
            stack.enter_context(lm.eager())
            for module in families.attention_modules(lm.model):
                handle = module.register_forward_hook(
                    scaling.change_projected, with_kwargs=True
                )
                stack.callback(handle.remove)
        yield scaling.weights


@dataclass
class _LastRowScaling:
    """What scaled weights add to the output of the last row; see :func:`scale_attention`.

    Attributes:
        tokens: 1 at the tokens to scale and 0 elsewhere, [B, T].
        extra: The factor minus 1.
        layers: Layers whose weights change.
        renormalise: Whether the changed weights of a row are divided by their sum.
        generated: Whether the rows of generated tokens change too.
        cache_length: Returns the columns that the cache held before the running forward.
        projection: Name of the attention module's output projection, for :meth:`change_projected`.
        weights: The last prompt token's weights after the change, [B, H, T'], by layer.
    """

    tokens: Tensor
    extra: float
    layers: Collection[int]
    renormalise: bool
    generated: bool
    cache_length: Callable[[], int]
    projection: str = ""
    weights: dict[int, Tensor] = field(default_factory=dict)

    def gain(
        self, layer: int, row: Tensor, value: Tensor, num_queries: int
    ) -> Tensor | None:
        """Compute what the change of the weights adds to the output of the last row.

        Args:
            layer: The layer.
            row: Weights of the call's last query, [B, H, T'].
            value: Values [B, G, T', d].
            num_queries: Queries of the call.

        Returns:
            The gain [B, H, d], or None where nothing changes.
        """
        # A method may attend several times in one forward.
        num_generated = self.cache_length() + num_queries - self.tokens.shape[1]
        if num_generated < 0 or (num_generated > 0 and not self.generated):
            return None
        if layer not in self.layers:
            self.weights.setdefault(layer, row)
            return None
        # Generated tokens lie behind the prompt, and a sliding window holds the newest keys only.
        tokens = F.pad(self.tokens, (0, num_generated))[:, -row.shape[-1] :].to(row)
        # A method may run a prompt as several rows next to each other.
        tokens = tokens.repeat_interleave(len(row) // len(tokens), dim=0)[:, None]
        values = sdpa.repeat_kv(value, row.shape[1] // value.shape[1]).to(row)
        output = row[:, :, None] @ values
        added = self.extra * (row * tokens)[:, :, None] @ values
        total = torch.ones_like(row[..., :1])
        if self.renormalise:
            total = 1 + self.extra * (row * tokens).sum(-1, keepdim=True)
        self.weights.setdefault(layer, row * (1 + self.extra * tokens) / total)
        return ((output + added) / total[..., None] - output)[:, :, 0]

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        following: AttentionFunction,
        **settings: Any,
    ) -> Any:
        """Attend as before and add the gain; see :data:`posbench.model.hooks.AttentionFunction`."""
        output, *weights = following(module, query, key, value, mask, **settings)
        row = last_query_weights(query, key, mask, **settings)
        gain = self.gain(module.layer_idx, row, value, query.shape[2])
        if gain is not None:
            output = output.clone()
            output[:, -1] += gain.to(output)
        return (output, *weights)

    def change_projected(
        self,
        module: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
        outputs: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        """Forward hook that adds the projected gain to the output of an eager attention module."""
        cache = find_cache(kwargs)
        if cache is None:
            raise ValueError(
                "this family's values are read from its cache: run it with use_cache=True"
            )
        layer: Any = module.layer_idx
        output, weights = outputs[:2]
        values = cache.layers[layer].values
        gain = self.gain(layer, weights[:, :, -1], values, output.shape[1])
        if gain is None:
            return outputs
        project = getattr(module, self.projection)
        changed = output.clone()
        gain = gain.flatten(1).to(changed)
        # Without the projection's bias, which the output holds already.
        changed[:, -1] += project(gain) - project(torch.zeros_like(gain))
        return (changed, *outputs[1:])
