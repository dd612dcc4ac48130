"""Subtract a value from one channel of the hidden states of a span."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from posbench.late import nn, torch
from posbench.model import families
from posbench.model.families import Site
from posbench.model.hooks import pre_hooks
from posbench.model.lm import LM
from posbench.perturbations.base import (
    Spans,
    repeat_for_batch,
    span_columns,
    track_cache_length,
)


@contextmanager
def subtract_channel(
    lm: LM,
    lengths: Sequence[int],
    spans: Spans,
    channel: int,
    values: Mapping[int, float],
    *,
    site: Site = "attention_input",
) -> Iterator[None]:
    """Subtract a value, by layer, from one channel of the hidden states of a span's tokens.

    Source: Yu et al. 2025, Appendix D.5, Figure 10, which does not say which of the two sites its "hidden
    states" are.

    Args:
        lm: The model.
        lengths: Tokens of each prompt, [B].
        spans: The span of each prompt, [B].
        channel: Index in the hidden states.
        values: What to subtract in each changed layer.
        site: ``attention_input`` changes the input of each attention module alone; ``residual`` changes the
            stream before the layer, so that the changes add up over the layers.
    """
    _, start, stop = span_columns(lengths, spans)

    with track_cache_length(lm.model) as cache_length:

        def subtraction_hook(layer: int) -> Callable[..., Any]:
            def hook(
                _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
            ) -> tuple[Any, Any]:
                hidden = families.attention_input(args, kwargs)
                columns = cache_length() + torch.arange(hidden.shape[1])
                in_span = (columns >= start) & (columns < stop)
                if not in_span.any():
                    return args, kwargs
                in_span = repeat_for_batch(in_span, hidden).to(hidden.dtype)
                changed = hidden.clone()
                changed[..., channel] -= values[layer] * in_span
                if "hidden_states" in kwargs:
                    return args, kwargs | {"hidden_states": changed}
                return (changed, *args[1:]), kwargs

            return hook

        modules = families.site_modules(lm.model, site)
        with pre_hooks(modules, values, subtraction_hook):
            yield
