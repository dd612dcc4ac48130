"""The benchmark's yardstick computes the same thing as scale_channel: otherwise its ratio would compare two
methods."""

import pytest
import torch

import posbench
from posbench.methods import ScaleChannel
from posbench.studies.cost.latency import Reprojection
from tests.models import VOCABULARY, build
from tests.rounding import assert_same, family_noise


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama-gqa",
        "mistral-window",
        "qwen2",
        "gemma",
        "mpt",
        "gpt_neox",
        "qwen3",
        "phi3",
    ],
)
def test_direct_reprojection_gives_the_same_logits(name):
    lm = posbench.load(build(name))
    torch.manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (2, 40))
    setting = dict(channel=(5, 9), factor=-1.0, layers=(1, 3))
    found = []
    for method in (ScaleChannel(**setting), Reprojection(**setting)):
        with torch.no_grad(), method.applied(lm):
            out = lm.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=6,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
                use_cache=True,
            )
        found.append(torch.stack(out.logits))
    assert_same(found[0], found[1], family_noise(name), "logits")
    assert not [m for m in lm.model.modules() if "forward" in vars(m)]
