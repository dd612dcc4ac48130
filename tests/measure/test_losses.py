"""Losses of many settings from one prefill against one forward for each."""

from dataclasses import replace

import numpy as np
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
def test_one_prefill_serves_all_candidates(name):
    lm = posbench.load(build(name))
    noise = family_noise(name, log_probabilities)
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
    noise = family_noise(name, log_probabilities)
    for candidate, losses in zip(candidates, together[1:], strict=True):
        with torch.inference_mode(), replace(candidate, last=longest).applied(lm):
            alone = lm.answer_nats(
                lm.model(**inputs, logits_to_keep=longest).logits, targets
            )
        assert_same(losses, alone, noise, "losses")
    assert len(set(together[:, 0].tolist())) == len(together), (
        "equal candidates would test nothing"
    )
    unmodified, neutral = candidate_losses(
        lm, pairs[:1], [replace(candidates[0], factor=1.0)]
    )
    assert_same(neutral, unmodified, noise, "losses")


@pytest.mark.parametrize("last", [3, 16, 100, "all"])
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "mpt"])
def test_candidates_for_several_tokens_have_the_loss_that_they_give_alone(name, last):
    lm = posbench.load(build(name))
    torch.manual_seed(0)
    prompts = [torch.randint(1, VOCABULARY, (n,)).tolist() for n in (40, 33, 12)]
    pairs = list(zip(prompts, [[5, 9, 2], [7], [1, 1]], strict=True))
    candidates = [
        ScaleChannel(channel=channel, factor=-1.0, layers=(0, 2), last=last)
        for channel in (3, 17)
    ]
    together = candidate_losses(lm, pairs, candidates)
    of_last_token = candidate_losses(
        lm, pairs, [replace(c, last=1) for c in candidates]
    )
    for index, candidate in enumerate(candidates, start=1):
        with candidate.applied(lm):
            alone = [float(lm.answer_token_loss([pair])[0]) for pair in pairs]
        noise = family_noise(name, log_probabilities)
        assert_same(together[index], np.array(alone), noise, "losses")
        assert abs(together[index] - of_last_token[index]).max() > 1e-3
