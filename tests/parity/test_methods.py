"""What every method of conf/method owes: nothing at neutral parameters, and a model left as it was."""

import pytest
import torch

import posbench
from posbench import paths
from posbench.errors import UserError, choices
from posbench.methods.choice import MethodChoice
from posbench.model import families, rope
from posbench.pipeline.compose import compose
from tests.models import BUILDERS, build

ROTATES = {"position_interpolation", "layer_scaling", "ms_poe", "moice", "attention_buckets"}
BY_HAND, PLAIN = {"ms_poe", "moice"}, {"moice", "attention_buckets"}
"""Methods of rotary embeddings; those that rotate in attention, and those that need a base."""


def applies(name, lm) -> bool:
    """Whether a method is meant for a model."""
    kinds = getattr(rope.rotary_module(lm.model), "rope_type", "default")
    return name not in ROTATES or (
        (bool(rope.rotated_layers(lm.model)) and not (name in PLAIN and kinds != "default"))
        and not (name in BY_HAND and not families.family_of(lm.model).interface)
    )


def all_methods():
    """The methods as `posbench model=tiny method=NAME` builds them."""
    found = {}
    compose(
        ["-m", "model=tiny", f"method={','.join(choices(paths.CONF / 'method'))}"],
        lambda made: found.__setitem__(
            made.raw["method"]["name"], MethodChoice.of(made.raw["method"]).build()
        ),
    )
    return found


METHODS = all_methods()


@pytest.mark.parametrize("family", ["tiny", *BUILDERS])
@pytest.mark.parametrize("name", METHODS)
def test_identity_and_restoration(name, family):
    lm = posbench.load("tiny" if family == "tiny" else build(family))
    found = METHODS[name]
    torch.manual_seed(0)
    ids = torch.randint(6, 60, (2, 40))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    before = lm.logits(ids, mask)
    if not applies(name, lm):
        with pytest.raises(UserError, match=r"a model with|a family whose"), found.applied(lm):
            pass
        return
    attributes = {key: dict(vars(module)) for key, module in lm.model.named_modules()}
    with found.neutral().applied(lm):
        neutral = lm.logits(ids, mask)
    assert (neutral - before)[mask.bool()].abs().max() < 1e-4
    with found.applied(lm):
        lm.model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    assert torch.equal(lm.logits(ids, mask), before)
    for key, module in lm.model.named_modules():
        assert not module._forward_pre_hooks and not module._forward_hooks, key
        assert set(vars(module)) == set(attributes[key]), key
