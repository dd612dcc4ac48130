"""What every method of conf/method and docs/examples owes: neutral is no change, the model stays the same."""

from pathlib import Path

import pytest
import torch

import posbench
from posbench.errors import UserError
from posbench.model import families, rope
from tests.conftest import config_of
from tests.models import BUILDERS, build

ROTATES = {"position_interpolation", "layer_scaling", "ms_poe", "moice", "attention_buckets"}
BY_HAND, PLAIN = {"ms_poe", "moice"}, {"moice", "attention_buckets"}
"""Methods of rotary embeddings; those that rotate in attention, and those that need a base."""
OWN = Path(__file__).parents[2] / "docs" / "examples"
METHODS = config_of(f"--config-dir={OWN}", "study=precision", "model=tiny_damped").every


def test_a_method_of_ones_own_is_among_them() -> None:
    assert {"none", "damp", "scale_channel", *ROTATES} == set(METHODS)


def applies(name, lm) -> bool:
    """Whether a method is meant for a model."""
    kinds = getattr(rope.rotary_module(lm.model), "rope_type", "default")
    return name not in ROTATES or (
        (bool(rope.rotated_layers(lm.model)) and not (name in PLAIN and kinds != "default"))
        and not (name in BY_HAND and not families.family_of(lm.model).interface)
    )


@pytest.mark.parametrize("family", ["tiny", *BUILDERS])
@pytest.mark.parametrize("name", METHODS)
def test_identity_and_restoration(name, family):
    lm = posbench.load("tiny" if family == "tiny" else build(family))
    # The embedded model's file gives its constants; the other models are random.
    found = METHODS[name].build() if family == "tiny" else METHODS[name].cls.example(lm)
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
        assert torch.equal(lm.logits(ids, mask), before) == (name == "none")
        lm.model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    assert torch.equal(lm.logits(ids, mask), before)
    for key, module in lm.model.named_modules():
        assert not module._forward_pre_hooks and not module._forward_hooks, key
        assert set(vars(module)) == set(attributes[key]), key
