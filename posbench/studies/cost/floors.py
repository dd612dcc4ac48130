"""Lower bounds of the time that methods of several RoPE bases need for a prompt, for the latency study."""

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
from posbench.model.hooks import intercepting_attention, replace_attribute, with_cache
from posbench.model.lm import LM

TILE_QUERIES = 128  # of 64 to 384 the fastest with 2048 keys


def floors(methods: Mapping[str, Method]) -> dict[str, Method]:
    """Return for methods that need several passes the least work that they could do, as methods to time, by name.

    Attention Buckets is also returned with all bases in one batch.

    Args:
        methods: Methods by name.
    """
    result: dict[str, Method] = {}
    for name, method in methods.items():
        if isinstance(method, MoICE):
            count = len(method.bases)
            result[f"{name}: {count} kernel calls alone"] = Kernels(count=count)
            result[f"{name}: own kernel alone"] = Tiles(count=count)
        elif isinstance(method, AttentionBuckets):
            forwards = Forwards(**vars(method))
            result[f"{name}: {len(method.bases)} forwards alone"] = forwards
            result[f"{name}: one batch"] = replace(method, batch_tokens=None)
    return result


@dataclass(frozen=True, kw_only=True)
class Kernels(Unmodified):
    """Calls the attention kernel ``count`` times: MoICE without its rotations and weights."""

    count: int

    @contextmanager
    def changed(self, lm: LM) -> Iterator[None]:
        """See :meth:`Method.changed`."""
        with intercepting_attention(lm.model, self.attend):
            yield

    def attend(self, *args: Any, following: Any, **settings: Any) -> Any:
        """The output of the last call."""
        for _ in range(self.count):
            output = following(*args, **settings)
        return output


class Tiles(Kernels):
    """A kernel for all bases: ``count`` softmaxes, whose mean is multiplied with the values once.

    For prompts without padding. A tile of scores, [TILE_QUERIES, keys] of one head, stays in a processor's
    cache.
    """

    def attend(self, *args: Any, following: Any, **settings: Any) -> Any:
        """Compute the mean attention output over ``count`` copies of the keys, tile by tile.

        This measures how fast plain matrix products could compute a method with several bases.

        Args:
            *args: As of an attention kernel of transformers: the module, queries [B, H, T, d], keys and values
                [B, G, T, d], and a mask, in place of which this is causal.
            following: The model's own kernel, which is not called.
            **settings: Other arguments of a kernel; ``scaling`` is the factor of the scores.

        Returns:
            The output [B, T, H, d], and None for the weights.
        """
        _, query, key, value, _ = args
        batch_size, heads, num_tokens, _ = query.shape
        output = torch.empty_like(query)
        query = query * settings["scaling"]
        causal_mask = query.new_full((TILE_QUERIES, TILE_QUERIES), float("-inf")).triu(
            1
        )
        value = sdpa.repeat_kv(value, heads // value.shape[1])
        # Every base has keys of its own: a single copy would stay in the cache.
        keys = [
            sdpa.repeat_kv(key, heads // key.shape[1]).clone()
            for _ in range(self.count)
        ]
        for row_and_head in product(range(batch_size), range(heads)):
            for start in range(0, num_tokens, TILE_QUERIES):
                end = min(start + TILE_QUERIES, num_tokens)
                queries = query[row_and_head][start:end]
                tile_mask = causal_mask[: end - start, : end - start]
                scores = query.new_empty(end - start, end)
                weights = query.new_zeros(end - start, end)
                for base_keys in keys:
                    torch.mm(queries, base_keys[row_and_head][:end].T, out=scores)
                    # Only the last tile of keys has some that come after a query.
                    scores[:, start:] += tile_mask
                    weights += torch.softmax(scores, -1, out=scores)
                tile = output[row_and_head][start:end]
                torch.mm(weights, value[row_and_head][:end], out=tile)
        return (output / self.count).transpose(1, 2), None


class Forwards(AttentionBuckets):
    """Attention Buckets without a cache, neither of a base nor of all."""

    @contextmanager
    def changed(self, lm: LM) -> Iterator[None]:
        """Run the method's forwards without a cache inside the block, so that only the forwards are timed."""
        forward = lm.model.forward

        @wraps(forward)
        def without_cache(*args: Any, **kwargs: Any) -> Any:
            kwargs |= {"use_cache": False, **with_cache(forward, None)}
            return forward(*args, **kwargs)

        with replace_attribute(lm.model, "forward", without_cache), super().changed(lm):
            yield
