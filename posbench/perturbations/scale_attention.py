"""The last token's attention weights on some tokens are multiplied."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from posbench.late import F, Tensor, nn, sdpa, torch
from posbench.model import families
from posbench.model.attention import last_row
from posbench.model.hooks import Attend, attending
from posbench.model.lm import LM


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

    With a the weights of the row, v the values, o = sum a_j v_j and S the tokens, the head's output becomes o
    + (factor - 1) sum_S a_j v_j; with ``renormalise`` divided by 1 + (factor - 1) sum_S a_j, which equals
    log(factor) added to the scores of S. Only that row is computed a second time, so memory is linear in the
    prompt and any kernel will do.

    ``tokens`` is 1 at S and 0 elsewhere, [B, T], left padding included; its rows are of equal length or
    longest first, the order in which :meth:`LM.generate` runs them. With ``generated`` the rows of
    generated tokens, one at a time, change too.

    Yields:
        The last prompt token's weights after the change, [B, H, T'], by layer, as :meth:`LM.last_attention`.

    Raises:
        ValueError: Families outside the library's attention functions ran without a cache, which holds their
            values.

    Source: Yu et al. 2025, Appendix D.2; the reading of last row and renormalisation is ours.
    """
    change = _Change(tokens, factor - 1, layers, renormalise, generated)
    output = families.family_of(lm.model).output

    def hook(
        module: nn.Module, args: Any, kwargs: dict[str, Any], out: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        cache = kwargs.get("past_key_values") or kwargs.get("layer_past")
        if cache is None:
            raise ValueError(
                "this family's values are read from its cache: run it with use_cache=True"
            )
        layer: Any = module.layer_idx
        more = change.gain(
            layer, out[1][:, :, -1], cache.layers[layer].values, out[0].shape[1]
        )
        if more is None:
            return out
        project = getattr(module, output)
        moved = out[0].clone()
        added = more.flatten(1).to(moved)
        moved[:, -1] += project(added) - project(torch.zeros_like(added))
        return (moved, *out[1:])

    with ExitStack() as stack:
        if families.family_of(lm.model).interface:
            stack.enter_context(attending(lm.model, change.attend))
        else:
            stack.enter_context(lm.eager())
            for module in families.attention_modules(lm.model):
                stack.callback(
                    module.register_forward_hook(hook, with_kwargs=True).remove
                )
        yield change.weights


@dataclass
class _Change:
    """What the last row's output gains; see :func:`scale_attention`. ``extra`` is the factor minus 1."""

    tokens: Tensor
    extra: float
    layers: Collection[int]
    renormalise: bool
    generated: bool
    weights: dict[int, Tensor] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)

    def gain(
        self, layer: int, row: Tensor, value: Tensor, queries: int
    ) -> Tensor | None:
        """The gain [B, H, d], from the row's weights [B, H, T'] and values [B, G, T', d]; None: no change."""
        self.seen[layer] = self.seen.get(layer, 0) + queries
        behind = self.seen[layer] - self.tokens.shape[1]
        if behind < 0 or (behind > 0 and not self.generated):
            return None
        if layer not in self.layers:
            self.weights.setdefault(layer, row)
            return None
        # Generated tokens lie behind the prompt, and a sliding window holds the newest keys only.
        part = F.pad(self.tokens, (0, behind))[:, -row.shape[-1] :].to(row)
        # A method may run a prompt as several rows next to each other.
        part = part.repeat_interleave(len(row) // len(part), dim=0)[:, None]
        values = sdpa.repeat_kv(value, row.shape[1] // value.shape[1]).to(row)
        before = row[:, :, None] @ values
        more = self.extra * (row * part)[:, :, None] @ values
        total = torch.ones_like(row[..., :1])
        if self.renormalise:
            total = 1 + self.extra * (row * part).sum(-1, keepdim=True)
        self.weights.setdefault(layer, row * (1 + self.extra * part) / total)
        return ((before + more) / total[..., None] - before)[:, :, 0]

    def attend(self, module: Any, *given: Any, following: Attend, **rest: Any) -> Any:
        """The library's attention function, and the gain."""
        query, key, value, mask = given
        out, *others = following(module, *given, **rest)
        more = self.gain(
            module.layer_idx, last_row(query, key, mask, **rest), value, query.shape[2]
        )
        if more is not None:
            out = out.clone()
            out[:, -1] += more.to(out)
        return (out, *others)
