"""Answer losses of many settings of scale_channel, from one prefill where the last token alone is scaled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from posbench.late import inference_mode, torch
from posbench.methods.scale_channel import (
    ScaleChannel,
    record_prefix,
    scale_cached_keys,
)
from posbench.model.guard import guarded
from posbench.model.hooks import fork_cache
from posbench.model.lm import LM


@guarded
@inference_mode
def candidate_losses(
    lm: LM,
    pairs: Sequence[tuple[list[int], list[int]]],
    candidates: Sequence[ScaleChannel],
) -> NDArray[np.float64]:
    """Compute answer losses of the unmodified model and of candidates.

    Those that scale the last prompt token alone go on from one prefill; of others each runs the whole prompt.

    Args:
        lm: The model.
        pairs: Token ids of B prompts and their answers, see :meth:`LM.answer_ids`.
        candidates: C settings of scale_channel, each of one channel.

    Returns:
        Nats per answer token, [1 + C, B], the unmodified model first; each row equals what the candidate gives
        on its own.
    """
    model = lm.model
    forward = model.forward
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
    prefix, _ = record_prefix(
        model, forward, channels, layers, logits_to_keep=1, **head_inputs
    )
    unmodified = forward(
        past_key_values=fork_cache(prefix.cache), use_cache=True, **tail_inputs
    )
    losses = [lm.answer_nats(unmodified.logits, targets)]
    for candidate in candidates:
        if candidate.last != 1:
            with candidate.applied(lm):
                loss = lm.answer_token_loss(pairs, batch_size=len(pairs))
            losses.append(loss.to(losses[0]))
            continue
        cache = scale_cached_keys(prefix, model, candidate)
        output = candidate.continue_with(
            model, forward, past_key_values=cache, use_cache=True, **tail_inputs
        )
        losses.append(lm.answer_nats(output.logits, targets))
    return torch.stack(losses).double().cpu().numpy()
