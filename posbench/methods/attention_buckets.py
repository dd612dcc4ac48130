"""Several RoPE bases side by side, their predictions mixed at every step (Attention Buckets)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ClassVar, Literal, Self

from posbench.late import Tensor, torch, transformers
from posbench.methods.base import Folded, Method, Needs
from posbench.model import families, rope
from posbench.model.hooks import listeners, replaced
from posbench.model.lm import LM
from posbench.schema import Bases, Tokens


@dataclass(frozen=True, kw_only=True)
class AttentionBuckets(Method):
    """Run every prompt once per RoPE base and let the N predictions of each token make one.

    Inside the block a forward of B rows runs B * N rows, row by row all bases next to each other, and returns
    B rows of logits [B, T, V]; its cache holds B * N rows. Costs N times the cache and about N times the
    computation. Stock ``lm.model(...)`` and ``lm.model.generate(...)`` see the method, greedy or sampling;
    beam search reorders the cache and is refused, as are outputs of single layers.

    A long prompt runs base after base instead, so that activations take the memory of one; what the first
    attention computes before it rotates is then computed once. Not so on a cache of fixed size, or while
    another method or a listener (:meth:`posbench.model.lm.LM.last_attention`) looks into the layers.

    Args:
        bases: The N bases theta, in all layers; None is the model's own. The default is published for
            retrieved documents; for tools: 10000, 17500, 18000, 19000, 20000, 25000. Both were made for a
            model of base 10000.
        mixture: ``logits`` (the authors' program): logits z_j of base j weighted by softmax over j of max_v
            z_j[v]. ``probabilities`` (the paper's text): probabilities p_j weighted by their confidence max_v
            p_j[v], weights summing to 1; the result is given as log-probabilities.
        batch_tokens: Tokens per forward of a prompt at most, those of all bases counted: as many bases run
            together as fit, one at least. None: always all. Moves rounding alone.

    Source: Chen et al. 2023, Fortify the Shortest Stave in Attention (arXiv 2312.04455); released program.
    Differs from source: all positions are mixed (the program: the last alone), so that losses have a value;
    batches with left padding work. The paper's own formula of confidence could not be compared.
    """

    needs: ClassVar[Needs] = Needs(rope=True, plain=True)
    rows_per_prompt: ClassVar[bool] = True

    bases: Bases = (10000.0, 13000.0, 16000.0, 19000.0, 22000.0, 25000.0, 28000.0)
    mixture: Literal["logits", "probabilities"] = "logits"
    batch_tokens: Tokens | None = 2048

    def neutral(self) -> Self:
        """The model's own base N times, logits mixed."""
        return replace(self, bases=(None,) * len(self.bases), mixture="logits")

    def folded(self, lm: LM) -> Folded | None:
        """Another base, where there is one alone."""
        return (
            Folded(rope={"rope_theta": self.bases[0]} if self.bases[0] else {})
            if len(self.bases) == 1
            else None
        )

    def mix(self, logits: Tensor) -> Tensor:
        """One prediction [B, T, V] from those of the bases [B, N, T, V]: mixed logits, or
        log-probabilities."""
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.mixture == "logits":
            weights = exact.amax(-1, keepdim=True).softmax(1)
            return (weights * exact).sum(1).to(logits.dtype)
        shares = exact.log_softmax(-1)
        confidence = shares.amax(-1, keepdim=True).log_softmax(1)
        return (confidence + shares).logsumexp(1).to(logits.dtype)

    @contextmanager
    def changed(self, lm: LM) -> Iterator[None]:
        """See :meth:`Method.changed`."""
        model, forward, count = lm.model, lm.model.forward, len(self.bases)
        signature = inspect.signature(forward)
        running = self.bases
        alone = not listeners(model)

        @wraps(forward)
        def mixed_forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal running
            bound = signature.bind(*args, **kwargs).arguments
            call = {k: v for k, v in bound.items() if k != "kwargs"} | bound.get(
                "kwargs", {}
            )
            labels = call.pop("labels", None)
            as_dict = call.pop("return_dict", None)
            cache = call.pop("past_key_values", None)
            tokens = (
                call["input_ids"]
                if call.get("input_ids") is not None
                else call["inputs_embeds"]
            )
            rows = tokens.shape[0]
            _refuse(call, cache, rows * count)
            # An inner method stands in front of this forward or has hooks of its own, as a listener has.
            unseen = (
                alone and model.forward is mixed_forward and listeners(model) == own
            )
            size = count
            if self.batch_tokens and unseen and _may_be_joined(cache):
                size = min(count, max(1, self.batch_tokens // tokens.shape[:2].numel()))
            logits = list[torch.Tensor]()
            joined = _Joined(rows, count)
            with ExitStack() as stack:
                for child in (
                    families.attention_modules(model)[0].children()
                    if size < count
                    else ()
                ):
                    stack.enter_context(
                        replaced(child, "forward", _once(child.forward))
                    )
                for start in range(0, count, size):
                    running = self.bases[start : start + size]
                    repeated = {
                        name: _repeated(value, rows, len(running))
                        for name, value in call.items()
                    }
                    fresh = cache if size == count else copy.deepcopy(cache)
                    out = forward(past_key_values=fresh, **repeated)
                    logits.append(out.logits.unflatten(0, (rows, -1)))
                    if size < count and out.past_key_values is not None:
                        joined.add(out.past_key_values)
            out.logits = self.mix(torch.cat(logits, dim=1))
            if size < count and out.past_key_values is not None:
                out.past_key_values = joined.in_place_of(cache, out.past_key_values)
            if labels is not None:
                vocabulary = families.text_config(model).vocab_size
                out.loss = model.loss_function(
                    logits=out.logits, labels=labels, vocab_size=vocabulary
                )
            return out.to_tuple() if as_dict is False else out

        def with_bases(call: rope.Call) -> rope.Call:
            return replace(call, bases=running)

        layers = dict.fromkeys(rope.rotated_layers(model), with_bases)
        with rope.tables(model, layers), replaced(model, "forward", mixed_forward):
            own = listeners(model)
            yield


def _may_be_joined(cache: Any) -> bool:
    """Whether a prompt's cache may be made of those of the bases: empty, and of layers that grow."""
    growing = (
        transformers.cache_utils.DynamicLayer,
        transformers.cache_utils.DynamicSlidingWindowLayer,
    )
    return cache is None or (
        all(type(x) in growing for x in cache.layers) and cache.get_seq_length() == 0
    )


class _Joined:
    """One cache of B * N rows out of those of the bases, each of which is let go once it is copied."""

    def __init__(self, rows: int, count: int) -> None:
        self.rows = rows
        self.count = count
        self.filled = 0
        self.parts: dict[tuple[int, str], Tensor] = {}

    def add(self, cache: Any) -> None:
        """Copy the keys and values of the next bases, and drop them from their cache."""
        for number, layer in enumerate(cache.layers):
            for name in ("keys", "values"):
                part = getattr(layer, name).unflatten(0, (self.rows, -1))
                if not self.filled:
                    self.parts[number, name] = part.new_empty(
                        self.rows, self.count, *part.shape[2:]
                    )
                self.parts[number, name][
                    :, self.filled : self.filled + part.shape[1]
                ] = part
                setattr(layer, name, None)
        self.filled += part.shape[1]

    def in_place_of(self, given: Any, last: Any) -> Any:
        """The joined cache: the caller's own where there is one, in the state of the last base's."""
        for (number, name), tensor in self.parts.items():
            setattr(last.layers[number], name, tensor.flatten(0, 1))
        if given is None:
            return last
        vars(given).update(vars(last))
        return given


def _once(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A module's forward that gives its output again where its input comes again."""
    known: list[Tensor] = []

    def remembered(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not known or not torch.equal(x, known[0]):
            known[:] = x, forward(x, *args, **kwargs)
        return known[1]

    return remembered


def _repeated(value: Any, rows: int, count: int) -> Any:
    """An argument of the forward with each row ``count`` times; what has no row per prompt stays as it is."""
    if isinstance(value, dict):
        return {name: _repeated(part, rows, count) for name, part in value.items()}
    if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[0] == rows:
        return value.repeat_interleave(count, dim=0)
    return value


def _refuse(call: dict[str, Any], cache: Any, rows: int) -> None:
    """Raise ValueError for outputs that have no mixture, and for a cache of other rows."""
    for name in ("output_attentions", "output_hidden_states"):
        if call.get(name):
            raise ValueError(
                f"{name} is not available under attention_buckets: every base has its own"
            )
    held = (
        rows
        if cache is None or cache.get_seq_length() == 0
        else cache.layers[0].keys.shape[0]
    )
    if held != rows:
        needs = f"this cache holds {held} rows where attention_buckets needs {rows}"
        raise ValueError(f"{needs}: run the prompt inside the block, without beams")
