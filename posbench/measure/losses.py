"""Answer losses of many settings of scale_channel from one prefill."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from posbench.late import inference_mode, torch
from posbench.methods.scale_channel import ScaleChannel, prefill, scaled
from posbench.model.guard import guarded
from posbench.model.hooks import fork
from posbench.model.lm import LM


@guarded
@inference_mode
def candidate_losses(
    lm: LM,
    pairs: Sequence[tuple[list[int], list[int]]],
    candidates: Sequence[ScaleChannel],
) -> NDArray[np.float64]:
    """Nats per answer token of the unmodified model and of C candidates, each of one channel, [1 + C, B].

    From one prefill of B pairs of prompt and answer (:meth:`LM.answer_ids`); each row equals what the
    candidate gives on its own.
    """
    model, forward = lm.model, lm.model.forward
    inputs, targets = lm.pad_with_answers(pairs)
    # The last prompt token and the answer, but for its last token, run together on every candidate's keys.
    rows = targets.shape[1]
    mask = inputs.pop("attention_mask")
    head = {"attention_mask": mask[:, :-rows]} | {
        name: part[:, :-rows] for name, part in inputs.items()
    }
    tail = {"attention_mask": mask} | {
        name: part[:, -rows:] for name, part in inputs.items()
    }
    channels = sorted({channel for c in candidates for channel in c.channels})
    layers = sorted({layer for c in candidates for layer in c.layer_indices})
    prefix, _ = prefill(model, forward, channels, layers, logits_to_keep=1, **head)
    losses = [
        lm.answer_nats(
            forward(past_key_values=fork(prefix.cache), use_cache=True, **tail).logits,
            targets,
        )
    ]
    for candidate in candidates:
        cache = scaled(prefix, model, candidate)
        out = candidate.continue_with(
            model, forward, past_key_values=cache, use_cache=True, **tail
        )
        losses.append(lm.answer_nats(out.logits, targets))
    return torch.stack(losses).double().cpu().numpy()
