"""What every method of conf/method and docs/examples owes: neutral is no change, the model stays the same."""

from pathlib import Path

import pytest
import torch

import posbench
from posbench.errors import UserError
from posbench.methods.base import ModelNeeds
from posbench.model import families, rope
from posbench.model.store import PrefixStore
from posbench.schema import required_fields
from tests.conftest import config_of
from tests.models import BUILDERS, build
from tests.rounding import assert_same, family_noise, log_probabilities, noise_floor

NEEDS = {
    "none": ModelNeeds(),
    "damp": ModelNeeds(),
    "scale_channel": ModelNeeds(),
    "position_interpolation": ModelNeeds(rope=True),
    "layer_scaling": ModelNeeds(rope=True),
    "ms_poe": ModelNeeds(rope=True, by_hand=True),
    "moice": ModelNeeds(rope=True, by_hand=True, plain=True),
    "attention_buckets": ModelNeeds(rope=True, plain=True),
}
"""Rotary embeddings, one base for all of them, attention through the library's functions."""
OWN = Path(__file__).parents[2] / "docs" / "examples"
METHODS = config_of(
    f"--config-dir={OWN}", "study=precision", "model=tiny_damped"
).all_methods


@pytest.mark.parametrize("name", NEEDS)
def test_it_says_what_it_needs(name):
    assert METHODS[name].cls.needs == NEEDS[name]


def applies(needs, lm) -> bool:
    """Whether a model has what a method needs."""
    kinds = getattr(rope.rotary_module(lm.model), "rope_type", "default")
    return not needs.rope or (
        (
            bool(rope.rotated_layers(lm.model))
            and not (needs.plain and kinds != "default")
        )
        and not (needs.by_hand and not families.family_of(lm.model).interface)
    )


def noise_of(family, lm) -> float:
    """The noise floor of a family's model, or of the embedded one."""
    if family != "tiny":
        return family_noise(family)
    return noise_floor(
        lm.model,
        torch.randint(6, 60, (4, 40), generator=torch.Generator().manual_seed(0)),
    )


@pytest.mark.parametrize("family", ["tiny", *BUILDERS])
@pytest.mark.parametrize("name", METHODS)
def test_identity_and_restoration(name, family):
    lm = posbench.load("tiny" if family == "tiny" else build(family))
    choice = METHODS[name]
    # The embedded model's file may have the constants of a checkpoint; the other models are random.
    complete = all(
        choice.values[key] is not None for key in required_fields(choice.cls)
    )
    found = choice.build() if family == "tiny" and complete else choice.cls.example(lm)
    torch.manual_seed(0)
    ids = torch.randint(6, 60, (2, 40))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    before = lm.logits(ids, mask)
    if not applies(choice.cls.needs, lm):
        with (
            pytest.raises(UserError, match=r"a model with|a family whose"),
            found.applied(lm),
        ):
            pass
        return
    attributes = {key: dict(vars(module)) for key, module in lm.model.named_modules()}
    with found.neutral().applied(lm):
        neutral = lm.logits(ids, mask)
    assert_same(
        neutral[mask.bool()], before[mask.bool()], noise_of(family, lm), "logits"
    )
    with found.applied(lm):
        assert torch.equal(lm.logits(ids, mask), before) == (name == "none")
        lm.model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    assert torch.equal(lm.logits(ids, mask), before)
    for key, module in lm.model.named_modules():
        assert not module._forward_pre_hooks and not module._forward_hooks, key
        assert set(vars(module)) == set(attributes[key]), key


@pytest.mark.parametrize("name", METHODS)
def test_a_prefill_that_it_shares_gives_what_prompts_read_alone_give(name):
    lm = posbench.load(build("mistral-window"))
    method = METHODS[name].cls.example(lm)
    under = method.prefill()
    assert (under is None) == (name in ("ms_poe", "moice", "attention_buckets", "damp"))
    if under is None:
        return
    torch.manual_seed(0)
    trunk = torch.randint(6, 60, (70,)).tolist()
    rows = [trunk + torch.randint(6, 60, (n,)).tolist() for n in (40, 7, 25)]
    store = PrefixStore([row[:-1] for row in rows], *method.records())
    assert store.layout.size == 70 + 39 + 6 + 24, "the trunk once"
    with under.applied(lm):
        store.fill(lm, 2, None)
    with method.applied(lm), torch.inference_mode():
        shared = lm.model(
            **lm.pad(rows, store.prefix(lm, range(3))), logits_to_keep=1
        ).logits[:, -1]
        for row, found in zip(rows, shared, strict=True):
            wanted = lm.logits(torch.tensor([row]))[0, -1]
            noise = family_noise("mistral-window", log_probabilities)
            assert_same(
                found.log_softmax(-1), wanted.log_softmax(-1), noise, "shared prefills"
            )
