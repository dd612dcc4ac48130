"""Answer losses of many settings of scale_channel, from one prefill where the last token alone is scaled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from posbench.late import Tensor, inference_mode, torch, transformers
from posbench.methods import Method, ScaleChannel, Unmodified
from posbench.methods.packed import can_pack, continuation_of, packed
from posbench.methods.scale_channel import record_prefix
from posbench.model.guard import guarded
from posbench.model.hooks import fork_cache, with_cache
from posbench.model.lm import LM
from posbench.model.prefix import PREFIX_ATTRIBUTE, Prefix

PACKED_TOKENS = 256
"""Most tokens of candidates run together; more would not speed up matrix products, and logits take memory."""


@guarded
@inference_mode
def candidate_losses(
    lm: LM,
    pairs: Sequence[tuple[list[int], list[int]]],
    candidates: Sequence[ScaleChannel],
) -> NDArray[np.float64]:
    """Compute answer losses of the unmodified model and of candidates.

    Candidates that scale only the last prompt token continue one prefill; others run the whole prompt each.

    Args:
        lm: The model.
        pairs: Token ids of B prompts and their answers, see :meth:`LM.answer_ids`.
        candidates: C settings of scale_channel, each of one channel.

    Returns:
        Nats per answer token, [1 + C, B], the unmodified model first; each row equals the candidate's result on its
        own.
    """
    model = lm.model
    inputs, targets = lm.pad_with_answers(pairs)
    # The last prompt token and the answer, but for its last token, run together on every candidate's keys.
    num_tail_tokens = targets.shape[1]
    mask = inputs.pop("attention_mask")
    head_inputs = {"attention_mask": mask[:, :-num_tail_tokens]}
    tail_inputs = {"attention_mask": mask}
    for name, tokens in inputs.items():
        head_inputs[name] = tokens[:, :-num_tail_tokens]
        tail_inputs[name] = tokens[:, -num_tail_tokens:]

    channels = sorted({c for candidate in candidates for c in candidate.channels})
    layers = sorted({i for candidate in candidates for i in candidate.layer_indices})
    # Not the config's cache: a window of the newest tokens would be too short for the candidates that continue.
    cache = transformers.DynamicCache()
    prefix, _ = record_prefix(
        model,
        model.forward,
        channels,
        layers,
        cache=cache,
        logits_to_keep=1,
        **head_inputs,
    )
    losses: dict[int, Tensor] = {}
    methods = [Unmodified(), *candidates]
    continuing = [i for i, m in enumerate(methods) if continuation_of(m) is not None]
    size = max(PACKED_TOKENS // targets.numel(), 1) if can_pack(model) else 1
    for start in range(0, len(continuing), size):
        pack = continuing[start : start + size]
        pack_losses = _losses_from_prefix(
            lm, prefix, [methods[i] for i in pack], tail_inputs, targets
        )
        losses.update(zip(pack, pack_losses, strict=True))
    for index, method in enumerate(methods):
        if index not in losses:
            with method.applied(lm):
                loss = lm.answer_token_loss(pairs, batch_size=len(pairs))
            losses[index] = loss.to(losses[0])
    by_method = torch.stack([losses[index] for index in range(len(methods))])
    return by_method.double().cpu().numpy()


def _losses_from_prefix(
    lm: LM,
    prefix: Prefix,
    methods: Sequence[Method],
    inputs: dict[str, Tensor],
    targets: Tensor,
) -> Tensor:
    """Nats per answer token, [M, B], of M methods that continue the prefill of B prompts with the given tokens."""
    if len(methods) == 1:
        cache = fork_cache(prefix.cache)
        setattr(cache, PREFIX_ATTRIBUTE, prefix)
        with methods[0].changed(lm):
            output = lm.model(
                **with_cache(lm.model.forward, cache), use_cache=True, **inputs
            )
        return lm.answer_nats(output.logits, targets)[None]
    rows = {name: tokens.repeat(len(methods), 1) for name, tokens in inputs.items()}
    with packed(lm, prefix, methods, keep_keys=False) as prefix_of_rows:
        rows |= with_cache(lm.model.forward, prefix_of_rows.cache)
        output = lm.model(use_cache=True, **rows)
    nats = lm.answer_nats(output.logits, targets.repeat(len(methods), 1))
    return nats.unflatten(0, (len(methods), -1))
