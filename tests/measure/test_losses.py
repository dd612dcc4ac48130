"""Losses of many settings from one prefill against one forward for each."""

from dataclasses import replace

import pytest
import torch

import posbench
from posbench.measure.losses import candidate_losses
from posbench.methods import ScaleChannel
from tests.models import VOCABULARY, build
from tests.rounding import assert_same, family_noise, log_probabilities

FAMILIES = (
    "llama",
    "llama-gqa",
    "mistral-window",
    "qwen2",
    "qwen3",
    "gemma3",
    "mpt",
    "mpt-clip",
    "falcon",
    "phi3",
)


@pytest.mark.parametrize("name", [*FAMILIES, "olmo2"])
def test_one_prefill_serves_all_candidates_to_the_bit(name):
    lm = posbench.load(build(name))
    torch.manual_seed(0)
    prompts = [torch.randint(1, VOCABULARY, (n,)).tolist() for n in (40, 33, 12)]
    pairs = list(zip(prompts, [[5, 9, 2], [7], [1, 1]], strict=True))
    candidates = [
        ScaleChannel(channel=channel, factor=factor, layers=layers)
        for channel in (3, 17, 40)
        for factor in (0.5, 0.0, -1.0)
        for layers in ((1, 3), (2, 2))
    ]
    together = candidate_losses(lm, pairs, candidates)
    inputs, targets = lm.pad_with_answers(pairs)
    longest = targets.shape[1]
    for candidate, losses in zip(candidates, together[1:], strict=True):
        with torch.inference_mode(), replace(candidate, last=longest).applied(lm):
            alone = lm.answer_nats(
                lm.model(**inputs, logits_to_keep=longest).logits, targets
            )
        assert losses.tolist() == alone.double().tolist()
    assert len(set(together[:, 0].tolist())) == len(together), (
        "equal candidates would test nothing"
    )
    unmodified, neutral = candidate_losses(
        lm, pairs[:1], [replace(candidates[0], factor=1.0)]
    )
    if name not in ("qwen3", "gemma3", "mpt-clip", "olmo2"):
        assert unmodified.tolist() == neutral.tolist()
    # Keys that are projected again round anew.
    assert_same(neutral, unmodified, family_noise(name, log_probabilities), "losses")
