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
from posbench.methods.base import Method, Needs, bind_call, input_shape
from posbench.model import families, rope
from posbench.model.hooks import (
    cache_name,
    cache_of,
    count_hooks,
    replace_attribute,
    set_cache,
    with_cache,
)
from posbench.model.lm import LM
from posbench.schema import Bases, Tokens


@dataclass(frozen=True, kw_only=True)
class AttentionBuckets(Method):
    """Run every prompt once per RoPE base and mix the N predictions of each token into one.

    Inside the block a forward of B rows runs B * N rows, row by row all bases next to each other, and returns B rows of
    logits [B, T, V]; its cache holds B * N rows. Costs N times the cache and about N times the computation. Stock
    ``lm.model(...)`` and ``lm.model.generate(...)`` see the method, greedy or sampling; beam search reorders the cache
    and is refused, as are outputs of single layers.

    A long prompt runs base after base instead, so that activations take the memory of one; the first attention's inputs
    before rotation are then computed once. Not so on a cache of fixed size, or while another method or a listener
    (:meth:`posbench.model.lm.LM.last_attention`) looks into the layers.

    Args:
        bases: The N bases theta, in all layers; None is the model's own. The default is published for retrieved
            documents; for tools: 10000, 17500, 18000, 19000, 20000, 25000. Both were made for a model of base 10000.
        mixture: ``logits`` (the authors' program): logits z_j of base j weighted by softmax over j of max_v
            z_j[v]. ``probabilities`` (the paper's text): probabilities p_j weighted by their confidence max_v
            p_j[v], weights summing to 1; the result is given as log-probabilities.
        batch_tokens: Most tokens per forward of a prompt, all bases counted: the number of bases run together is the
            most that fit, at least one. None: always all. Changes rounding only.

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

    def caution(self, lm: LM, tokens: int) -> str:
        """See :meth:`Method.caution`."""
        return rope.caution_about_bases(lm, self.bases, tokens)

    def mix(self, logits: Tensor) -> Tensor:
        """Mix the predictions of the bases into one.

        Args:
            logits: Shape (B, N, T, V) for N bases.

        Returns:
            Mixed logits, or log-probabilities, shape (B, T, V), of the same dtype.
        """
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.mixture == "logits":
            # A base weighs by its confidence: the largest logit, or probability.
            weights = exact.amax(-1, keepdim=True).softmax(1)
            return (weights * exact).sum(1).to(logits.dtype)
        log_probabilities = exact.log_softmax(-1)
        log_weights = log_probabilities.amax(-1, keepdim=True).log_softmax(1)
        return (log_weights + log_probabilities).logsumexp(1).to(logits.dtype)

    @contextmanager
    def changed(self, lm: LM) -> Iterator[None]:
        """Run each forward of the model inside the block once with every base, and mix the logits."""
        model = lm.model
        forward = model.forward
        num_bases = len(self.bases)
        signature = inspect.signature(forward)
        current_bases = self.bases
        # Hooks and listeners expect one forward with all bases: then nothing is split.
        observed_from_outside = bool(count_hooks(model))

        @wraps(forward)
        def mixed_forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal current_bases
            call = bind_call(signature, args, kwargs)
            # The loss is that of the mixed logits, so the forwards below give logits alone.
            labels = call.pop("labels", None)
            return_dict = call.pop("return_dict", None)
            cache = call.pop(cache_name(call), None)
            num_rows, num_tokens = input_shape(call)
            _refuse(call, cache, num_rows * num_bases)
            # An inner method wraps this forward or has hooks of its own, as a listener has.
            observed_from_inside = (
                model.forward is not mixed_forward
                or count_hooks(model) != own_listeners
            )
            observed = observed_from_outside or observed_from_inside
            # Bases run as rows of one batch, as many at once as batch_tokens allows.
            group_size = num_bases
            if self.batch_tokens and not observed and _is_joinable(cache):
                num_fitting = self.batch_tokens // (num_rows * num_tokens)
                group_size = min(num_bases, max(1, num_fitting))
            grouped = group_size < num_bases

            logits: list[Tensor] = []
            joined = _JoinedCache(num_rows, num_bases)
            with ExitStack() as stack:
                if grouped:
                    # The first layer's projections get the same input under each base.
                    for child in families.attention_modules(model)[0].children():
                        cached_forward = _cache_last_output(child.forward)
                        stack.enter_context(
                            replace_attribute(child, "forward", cached_forward)
                        )
                for start in range(0, num_bases, group_size):
                    current_bases = self.bases[start : start + group_size]
                    repeated = {
                        name: _repeat_rows(value, num_rows, len(current_bases))
                        for name, value in call.items()
                    }
                    group_cache = copy.deepcopy(cache) if grouped else cache
                    repeated |= with_cache(forward, group_cache)
                    output = forward(**repeated)
                    logits.append(output.logits.unflatten(0, (num_rows, -1)))
                    if grouped and cache_of(output) is not None:
                        joined.add(cache_of(output))
            output.logits = self.mix(torch.cat(logits, dim=1))
            if grouped and cache_of(output) is not None:
                set_cache(output, joined.fill(cache, cache_of(output)))
            if labels is not None:
                vocabulary = families.text_config(model).vocab_size
                output.loss = model.loss_function(
                    logits=output.logits, labels=labels, vocab_size=vocabulary
                )
            return output.to_tuple() if return_dict is False else output

        def set_bases(call: rope.RotaryCall) -> rope.RotaryCall:
            return replace(call, bases=current_bases)

        layers = dict.fromkeys(rope.rotated_layers(model), set_bases)
        with (
            rope.tables(model, layers),
            replace_attribute(model, "forward", mixed_forward),
        ):
            own_listeners = count_hooks(model)
            yield


def _is_joinable(cache: Any) -> bool:
    """Whether the caches of several bases can be joined into one: it is empty, and can grow."""
    if cache is None:
        return True
    growing = (
        transformers.cache_utils.DynamicLayer,
        transformers.cache_utils.DynamicSlidingWindowLayer,
    )
    can_grow = all(type(layer) in growing for layer in cache.layers)
    return can_grow and cache.get_seq_length() == 0


class _JoinedCache:
    """One cache of B * N rows joined from the bases' caches, each of which is freed once it is copied."""

    def __init__(self, num_rows: int, num_bases: int) -> None:
        self.num_rows = num_rows
        self.num_bases = num_bases
        self.num_added = 0  # bases so far
        # By layer and name (keys, values): shape (B, N, G, T, d).
        self.states: dict[tuple[int, str], Tensor] = {}

    def add(self, cache: Any) -> None:
        """Copy the keys and values of the next bases into the joined ones, and drop them from their own cache."""
        for index, layer in enumerate(cache.layers):
            for name in ("keys", "values"):
                part = getattr(layer, name).unflatten(0, (self.num_rows, -1))
                end = self.num_added + part.shape[1]
                if self.num_added == 0:
                    shape = (self.num_rows, self.num_bases, *part.shape[2:])
                    self.states[index, name] = part.new_empty(shape)
                self.states[index, name][:, self.num_added : end] = part
                setattr(layer, name, None)
        self.num_added = end

    def fill(self, cache: Any, last: Any) -> Any:
        """Put the joined keys and values into the caller's cache, or without one into the last bases' cache; return it.

        Args:
            cache: The empty cache of the caller, or None.
            last: The cache of the last bases, whose lengths the joined one has.
        """
        for (index, name), states in self.states.items():
            setattr(last.layers[index], name, states.flatten(0, 1))
        if cache is None:
            return last
        vars(cache).update(vars(last))
        return cache


def _cache_last_output(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a module's forward that gives its last output again for the same input."""
    last_input: Tensor | None = None
    last_output: Tensor | None = None

    def cached_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal last_input, last_output
        if last_output is None or not torch.equal(x, last_input):
            last_output = forward(x, *args, **kwargs)
            last_input = x
        return last_output

    return cached_forward


def _repeat_rows(value: Any, num_rows: int, times: int) -> Any:
    """Return an argument of the forward with each row repeated, once for each base.

    Args:
        value: The argument; one without a row per prompt is returned unchanged.
        num_rows: Number of prompts.
        times: Number of bases.
    """
    if isinstance(value, dict):
        return {k: _repeat_rows(part, num_rows, times) for k, part in value.items()}
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and value.ndim >= 2 and value.shape[0] == num_rows:
        return value.repeat_interleave(times, dim=0)
    return value


def _refuse(call: dict[str, Any], cache: Any, num_rows: int) -> None:
    """Refuse outputs that have no mixture, and a cache of other rows.

    Args:
        call: Arguments of the forward by name.
        cache: Its cache, or None.
        num_rows: Prompts times bases.

    Raises:
        ValueError: States which.
    """
    for name in ("output_attentions", "output_hidden_states"):
        if call.get(name):
            raise ValueError(
                f"{name} is not available under attention_buckets: every base has its own"
            )
    if cache is None or cache.get_seq_length() == 0:
        return
    num_cached = cache.layers[0].keys.shape[0]
    if num_cached != num_rows:
        problem = f"this cache holds {num_cached} rows where attention_buckets needs {num_rows}"
        raise ValueError(f"{problem}: run the prompt inside the block, without beams")
