"""Scale one hidden-state channel for the last token's attention (Yu et al. 2025, Section 3.3, Eq. 2-3).

Earlier tokens never see the scaled queries and keys. The prompt is therefore prefilled without the method,
the cached keys get the rank-1 term ``(s - 1) h_p RoPE(W_K[:, p])``, and only the last tokens run with scaled
inputs to the query and key projections. Where keys are no linear function of the input (norms or clamps
behind the projection, quantised or adapted weights) they are projected again from the stored attention input.
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
from posbench.methods.base import Folded, Method, SweepClaims
from posbench.methods.unmodified import Unmodified
from posbench.model import families
from posbench.model.hooks import fork, replaced
from posbench.model.lm import LM
from posbench.model.prefix import READ, Prefix, recording
from posbench.schema import Count, Factor

if TYPE_CHECKING:
    from transformers import DynamicCache

log = logging.getLogger(__name__)

DYNAMIC = (
    "%s has rope_type dynamic: past its trained length the frequencies change with every token, and a prompt "
    "that is prefilled in two parts, as here and in generation, differs from one pass"
)
_MARK = "posbench_scaled_in"


def scaled(
    prefix: Prefix, model: PreTrainedModel, method: ScaleChannel
) -> DynamicCache:
    """A fork of a prefix's cache with scaled keys in the method's layers; all else is shared with it."""
    cache = fork(prefix.cache)
    for index in (
        method.layer_indices if prefix.inputs and method.tokens != "last" else ()
    ):
        layer = cache.layers[index]
        # A sliding-window layer keeps the newest tokens only.
        newest = slice(-layer.keys.shape[-2], None)
        if families.keys_are_linear(model, index):
            part = _key_part(prefix, model, index, method.channels)[..., newest, :]
            keys = torch.add(
                layer.keys, _as_cached(part, layer.keys), alpha=method.factor - 1
            )
        else:
            projected = families.project_keys(
                model, index, method.scale(prefix.inputs[index])
            )
            finished = families.finish_keys(
                model, index, projected, prefix.rotary[index]
            )
            keys = _as_cached(finished[..., newest, :], layer.keys)
        layer.keys = keys.to(layer.keys.dtype)
    return cache


def _key_part(
    prefix: Prefix, model: PreTrainedModel, layer: int, channels: tuple[int, ...]
) -> Tensor:
    """What the channels add to rotated keys, ``h_p RoPE(W_K[:, p])``, [B, G, P, d], float32 or better."""
    key = channels, layer
    if key not in prefix.parts:
        # Candidates differ in factor and layers first: one set of channels at a time keeps memory small.
        for other in [known for known in prefix.parts if known[0] != channels]:
            del prefix.parts[other]
        inputs = prefix.inputs[layer]
        exact = torch.promote_types(inputs.dtype, torch.float32)
        columns = families.key_columns(model, layer, channels).to(exact)
        part = (
            inputs[..., [prefix.channels.index(c) for c in channels]].to(exact)
            @ columns
        )
        prefix.parts[key] = families.finish_keys(
            model, layer, part, prefix.rotary[layer]
        )
    return prefix.parts[key]


def _as_cached(keys: Tensor, cached: Tensor) -> Tensor:
    """Keys [B, G, P, d] with as many heads as the cache holds: Falcon caches each key once per query head."""
    times = cached.shape[1] // keys.shape[1]
    return keys if times == 1 else keys.repeat_interleave(times, dim=1)


def prefill(
    model: PreTrainedModel,
    forward: Callable[..., Any],
    channels: Sequence[int],
    layers: Sequence[int],
    *,
    past_key_values: DynamicCache | None = None,
    **inputs: Any,
) -> tuple[Prefix, Any]:
    """Run the unmodified ``forward`` once and remember what any later scaling needs.

    Records the channels of the attention input of some layers, and fills ``past_key_values`` or a new cache.
    Gives the prefix and the output.
    """
    cache = (
        transformers.DynamicCache(config=model.config)
        if past_key_values is None
        else past_key_values
    )
    prefix = Prefix(cache)
    with recording(model, prefix, channels, layers):
        return prefix, forward(past_key_values=cache, use_cache=True, **inputs)


@dataclass(frozen=True, kw_only=True)
class ScaleChannel(Method):
    """Multiply channels of the attention input (after the layer's first norm) for the last tokens only.

    In the chosen layers the queries of the last prompt token and of every generated token, and the keys of
    all positions, are computed from the scaled input; values, the residual stream and the attention of
    earlier tokens stay as they are. The cache keeps the scaled keys.

    Stock ``lm.model(...)`` and ``lm.model.generate(...)`` see the method. A call with an empty cache is a
    prompt; later calls on its cache are generated or teacher-forced tokens and are scaled. Without a cache
    each call is a prompt of its own: ``generate(use_cache=False)`` is another method.

    Args:
        channel: One channel or several, 0-based.
        factor: The multiplier s; 1 changes nothing.
        layers: First and last layer, inclusive and 0-based as in the paper's Table 4.
        last: Rows of the prompt with scaled attention: 1 (paper), n, or ``"all"`` (also None): Table 6.
        tokens: Whose inputs are scaled: ``both`` (paper), those of the ``last`` rows and generated tokens
            alone (their queries and own keys), or the keys of all ``earlier`` ones. The two halves are ours.

    Source: Yu et al. 2025, Eq. 2-3.
    Differs from source: the authors' program projects queries and keys a second time in every layer; this one
    adds the same amount as a rank-1 term (equal in exact arithmetic), and serves batches with left padding.
    """

    sweep_claims: ClassVar[Mapping[str, SweepClaims]] = {
        "factor": SweepClaims(
            attention="A larger factor moves attention to the beginning (Yu et al. 2025, Figure 6a)",
            score="A larger factor favours the beginning (Yu et al. 2025, Figure 6b)",
            bias="Over 1 a factor amplifies the bias, below 1 shrinks it (Yu et al. 2025, Section 4.3)",
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
    def example(cls, lm: LM) -> Self:
        """A channel over half of the layers, the paper's share."""
        return cls(channel=3, factor=0.0, layers=share((10, 25), lm.layers))

    @property
    def channels(self) -> tuple[int, ...]:
        """The scaled channels, always as a tuple."""
        return (
            tuple(self.channel)
            if isinstance(self.channel, Iterable)
            else (int(self.channel),)
        )

    @property
    def needs_prompt(self) -> bool:
        """See :class:`Method`; not where all tokens are scaled."""
        return self.last not in (None, "all")

    @property
    def layer_indices(self) -> range:
        """The scaled layers."""
        return range(self.layers[0], self.layers[1] + 1)

    def neutral(self) -> Self:
        """Factor 1."""
        return replace(self, factor=1.0)

    def prefill(self) -> Method | None:
        """The unmodified model, where the last token alone is treated apart."""
        return Unmodified() if self.last == 1 else None

    def records(self) -> tuple[Collection[int], Collection[int]]:
        """Its channels in its layers, where keys are scaled."""
        return (
            ((), ()) if self.tokens == "last" else (self.channels, self.layer_indices)
        )

    def twin(self) -> Self:
        """All tokens scaled, as in the paper's Table 6: earlier queries then need no other keys than later
        ones."""
        return replace(self, last="all") if self.tokens == "both" else self

    def folded(self, lm: LM) -> Folded | None:
        """Scaled columns of the projections of the chosen layers, where all tokens are scaled."""
        if self.needs_prompt or self.tokens != "both":
            return None
        return Folded(
            columns=dict.fromkeys(
                self.layer_indices, dict.fromkeys(self.channels, self.factor)
            )
        )

    def scale(self, hidden: Tensor) -> Tensor:
        """A copy of the attention input [B, T, D] with the channels scaled."""
        scaled = hidden.clone()
        scaled[..., list(self.channels)] *= self.factor
        return scaled

    def check(self, lm: LM) -> None:
        """See :meth:`Method.check`."""
        super().check(lm)
        check_channels(lm, "method.channel", self.channels)
        check_layers(lm, "method.layers", self.layers)
        parameters = (
            getattr(families.text_config(lm.model), "rope_parameters", None) or {}
        )
        if parameters.get("rope_type") == "dynamic":
            log.warning(DYNAMIC, lm.name)

    @contextmanager
    def changed(self, lm: LM) -> Iterator[None]:
        """See :meth:`Method.changed`."""
        model, forward = lm.model, lm.model.forward
        signature = inspect.signature(forward)
        # Marks the caches that this block has filled; a copy of one keeps the mark.
        block = uuid.uuid4().hex

        @wraps(forward)
        def scaled_forward(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs).arguments
            call = {k: v for k, v in bound.items() if k != "kwargs"} | bound.get(
                "kwargs", {}
            )
            cache = call.pop("past_key_values", None)
            if cache is not None and cache.get_seq_length() > 0:
                shared = vars(cache).pop(READ, None)
                if shared is not None:
                    cache.layers = scaled(shared, model, self).layers
                    setattr(cache, _MARK, block)
                if getattr(cache, _MARK, None) != block:
                    outside = "this cache was filled outside the scale_channel block"
                    raise ValueError(f"{outside}: run the prompt inside")
                return self.continue_with(model, forward, past_key_values=cache, **call)
            return self._prompt(model, forward, cache, block, call)

        # Some checkpoints (MPT) ask generate() to go without a cache, which would be another method.
        with (
            replaced(model, "forward", scaled_forward),
            replaced(model.generation_config, "use_cache", True),
        ):
            yield

    def continue_with(
        self, model: PreTrainedModel, forward: Callable[..., Any], **inputs: Any
    ) -> Any:
        """Run tokens whose queries and keys are scaled, on a cache whose keys are scaled already."""
        with ExitStack() as stack:
            for layer in self.layer_indices if self.tokens != "earlier" else ():
                for handle in families.on_query_key_input(model, layer, self.scale):
                    stack.enter_context(handle)
            return forward(**inputs)

    def _prompt(
        self,
        model: PreTrainedModel,
        forward: Callable[..., Any],
        cache: Any,
        block: str,
        call: dict[str, Any],
    ) -> Any:
        """Prefill all tokens but the last n unmodified, scale the cached keys, run the last n scaled."""
        if call.get("output_attentions"):
            raise ValueError(
                "output_attentions is not available inside the block: use lm.last_attention()"
            )
        keep = call.pop("logits_to_keep", 0)
        labels = call.pop("labels", None)
        use_cache = call.pop("use_cache", None)
        as_dict = call.pop("return_dict", None)
        cache = (
            transformers.DynamicCache(config=model.config) if cache is None else cache
        )
        if not all(
            isinstance(layer, transformers.cache_utils.DynamicLayer)
            for layer in cache.layers
        ):
            kind = type(cache).__name__
            raise ValueError(
                f"scale_channel needs a DynamicCache, got {kind}: drop cache_implementation"
            )
        tokens = (
            call["input_ids"]
            if call.get("input_ids") is not None
            else call["inputs_embeds"]
        )
        total = tokens.shape[1]
        mask: Any = call.get("attention_mask")
        if isinstance(self.last, int) and torch.is_tensor(mask) and mask.ndim == 2:
            read = mask[:, -self.last :].any(dim=1)
            if not read.all():
                raise ValueError(
                    "scale_channel needs prompts that are padded on the left, not on the right"
                )
        rows = total if self.last in (None, "all") else min(int(self.last), total)  # type: ignore[arg-type]
        head = total - rows
        outputs = []
        if head:
            part = {k: _rows(k, v, slice(0, head), total) for k, v in call.items()}
            # Row counts below 1 cannot be asked for: the one spare row is dropped again below.
            part["logits_to_keep"] = (
                max(keep - rows, 1) if isinstance(keep, int) and keep else 0
            )
            layers = self.layer_indices
            prefix, out = prefill(
                model, forward, self.channels, layers, past_key_values=cache, **part
            )
            cache.layers = scaled(prefix, model, self).layers
            outputs.append(out)
        part = {k: _rows(k, v, slice(head, total), total) for k, v in call.items()}
        part |= {
            "use_cache": True,
            "logits_to_keep": min(keep, rows) if isinstance(keep, int) else 0,
        }
        outputs.append(
            self.continue_with(model, forward, past_key_values=cache, **part)
        )
        setattr(cache, _MARK, block)
        logits = torch.cat([out.logits for out in outputs], dim=1)
        hidden = None
        loss = None
        # The last rows, or those of a tensor; -0 takes all.
        logits = logits[:, slice(-keep, None) if isinstance(keep, int) else keep]
        if outputs[-1].hidden_states is not None:
            states = zip(*(out.hidden_states for out in outputs), strict=True)
            hidden = tuple(torch.cat(parts, dim=1) for parts in states)
        config = families.text_config(model)
        if labels is not None:
            loss = model.loss_function(
                logits=logits, labels=labels, vocab_size=config.vocab_size
            )
        kept = cache if (config.use_cache if use_cache is None else use_cache) else None
        out = transformers.modeling_outputs.CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=kept, hidden_states=hidden
        )
        return out.to_tuple() if as_dict is False else out


def _rows(name: str, value: Any, rows: slice, total: int) -> Any:
    """The part of a forward argument that belongs to the tokens ``rows`` of a prompt of ``total`` tokens."""
    if name == "attention_mask" and isinstance(value, torch.Tensor):
        return (
            value[:, : rows.stop] if value.ndim == 2 else value[:, :, rows, : rows.stop]
        )
    if name == "attention_mask" and value is not None:
        raise ValueError("scale_channel takes a 2-D or 4-D attention_mask tensor")
    if name == "position_ids" and value is not None:
        return value[..., rows]
    along = (
        isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == total
    )
    return value[:, rows] if along else value


def share(published: tuple[int, int], count: int) -> tuple[int, int]:
    """A paper's first and last layer of 32, or the same share of a model of another depth."""
    return round(count * published[0] / 32), min(
        round(count * published[1] / 32), count - 1
    )


def check_channels(lm: LM, name: str, channels: Sequence[int]) -> None:
    """Raise UserError unless every channel lies inside the model's hidden size."""
    width = families.text_config(lm.model).hidden_size
    if (
        not channels
        or any(not 0 <= c < width for c in channels)
        or len(set(channels)) != len(channels)
    ):
        allowed = f"different channels from 0 to {width - 1} (hidden size {width} of model {lm.name})"
        hint = f"find one with: posbench stages=[search] model={lm.name} method=scale_channel"
        raise UserError(name, list(channels), allowed, hint)


def check_layers(lm: LM, name: str, layers: Sequence[int] | None) -> None:
    """Raise UserError unless [first, last], inclusive, lies inside the model; None is a caller's default."""
    count = lm.layers
    if layers is not None and (
        len(layers) != 2 or not 0 <= layers[0] <= layers[1] < count
    ):
        allowed = f"[first, last] with 0 <= first <= last <= {count - 1} ({count} layers in model {lm.name})"
        raise UserError(name, list(layers), allowed, "layers are 0-based and inclusive")
