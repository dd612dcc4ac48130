"""A value is subtracted from one channel of a span's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from posbench.late import nn, torch
from posbench.model import families
from posbench.model.families import Site
from posbench.model.hooks import before_each
from posbench.model.lm import LM
from posbench.perturbations.base import Spans, columns, for_rows, past


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

    At the site ``attention_input`` each layer changes on its own; ``residual`` changes the stream before the
    layer, so that it adds up over the layers.

    Source: Yu et al. 2025, Appendix D.5, Figure 10, which does not say which of the two its "hidden states"
    are.
    """
    _, start, stop = columns(lengths, spans)

    with past(lm.model) as held:

        def subtract(layer: int) -> Callable[..., Any]:
            def hook(
                _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
            ) -> tuple[Any, Any]:
                hidden = families.attention_input(args, kwargs)
                at = held() + torch.arange(hidden.shape[1])
                inside = (at >= start) & (at < stop)
                if not inside.any():
                    return args, kwargs
                changed = hidden.clone()
                changed[..., channel] -= values[layer] * for_rows(inside, hidden).to(
                    hidden.dtype
                )
                if "hidden_states" in kwargs:
                    return args, kwargs | {"hidden_states": changed}
                return (changed, *args[1:]), kwargs

            return hook

        with before_each(families.site_modules(lm.model, site), values, subtract):
            yield
