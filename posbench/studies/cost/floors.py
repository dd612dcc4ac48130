"""What methods of several RoPE bases cannot leave out of a prompt, as ways of the latency study."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from itertools import product
from typing import Any

from posbench.late import sdpa, torch
from posbench.methods import Method, Unmodified
from posbench.methods.attention_buckets import AttentionBuckets
from posbench.methods.moice import MoICE
from posbench.model.hooks import attending, replaced
from posbench.model.lm import LM

ROWS = 128  # queries of a tile: of 64 to 384 the fastest with 2048 keys


def floors(methods: Mapping[str, Method]) -> dict[str, Method]:
    """The floors of methods that have one, by name; Attention Buckets also with all bases in one batch."""
    found: dict[str, Method] = {}
    for name, method in methods.items():
        if isinstance(method, MoICE):
            count = len(method.bases)
            found[f"{name}: {count} kernel calls alone"] = Kernels(count=count)
            found[f"{name}: own kernel alone"] = Tiles(count=count)
        elif isinstance(method, AttentionBuckets):
            found[f"{name}: {len(method.bases)} forwards alone"] = Forwards(
                **vars(method)
            )
            found[f"{name}: one batch"] = replace(method, batch_tokens=None)
    return found


@dataclass(frozen=True, kw_only=True)
class Kernels(Unmodified):
    """Calls the attention kernel ``count`` times: MoICE without its rotations and weights."""

    count: int

    @contextmanager
    def changed(self, lm: LM) -> Iterator[None]:
        """See :meth:`Method.changed`."""
        with attending(lm.model, self.attend):
            yield

    def attend(self, *given: Any, following: Any, **rest: Any) -> Any:
        """What the last of the calls returns."""
        return [following(*given, **rest) for _ in range(self.count)][-1]


class Tiles(Kernels):
    """A kernel for all bases: ``count`` softmaxes, whose mean is multiplied with the values once.

    For prompts without padding. A tile of scores, [ROWS, keys] of one head, stays in a processor's cache.
    """

    def attend(self, *given: Any, following: Any, **settings: Any) -> Any:
        """The mean output [B, T, H, d] of queries [B, H, T, d], and of keys and values [B, G, T, d]."""
        _, query, key, value, _ = given
        rows, heads, total, _ = query.shape
        out = torch.empty_like(query)
        query = query * settings["scaling"]
        shut = query.new_full((ROWS, ROWS), float("-inf")).triu(1)
        value = sdpa.repeat_kv(value, heads // value.shape[1])
        # Every base has keys of its own: one copy alone would stay in the cache.
        keys = [
            sdpa.repeat_kv(key, heads // key.shape[1]).clone()
            for _ in range(self.count)
        ]
        for at in product(range(rows), range(heads)):
            for start in range(0, total, ROWS):
                end = min(start + ROWS, total)
                scores = query.new_empty(end - start, end)
                mixed = query.new_zeros(end - start, end)
                for own in keys:
                    torch.mm(query[at][start:end], own[at][:end].T, out=scores)
                    scores[:, start:] += shut[: end - start, : end - start]
                    mixed += torch.softmax(scores, -1, out=scores)
                torch.mm(mixed, value[at][:end], out=out[at][start:end])
        return (out / self.count).transpose(1, 2), None


class Forwards(AttentionBuckets):
    """Attention Buckets without a cache, neither of a base nor of all."""

    @contextmanager
    def changed(self, lm: LM) -> Iterator[None]:
        """See :meth:`Method.changed`."""
        forward = lm.model.forward

        @wraps(forward)
        def bare(*args: Any, **kwargs: Any) -> Any:
            return forward(
                *args, **kwargs | {"use_cache": False, "past_key_values": None}
            )

        with replaced(lm.model, "forward", bare), super().changed(lm):
            yield
