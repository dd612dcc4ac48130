"""What every method of conf/method owes: nothing at neutral parameters, and a model left as it was."""

import pytest
import torch
import yaml

import posbench
from posbench import paths
from posbench.cli.main import _hydra
from posbench.errors import UserError
from posbench.model import families
from posbench.model import rope
from posbench.pipeline.config import check, plain
from tests.models import BUILDERS, build

GIVEN = {"layer_scaling": ["method.points=[[0,1.2],[1.5,1.8],[3,1.4]]"], "moice": ["method.weights=uniform"]}
"""Parameters that no published or found block of the embedded model gives."""
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


def method(name: str):
    """The method as `posbench model=tiny method=<name>` builds it."""
    built = []
    _hydra(
        ["model=tiny", f"method={name}", "stages=[evaluate]", *GIVEN.get(name, [])],
        lambda config: built.append(check(plain(config)).method()),
    )
    return built[0]


@pytest.mark.parametrize("family", ["tiny", *BUILDERS])
@pytest.mark.parametrize("name", sorted(file.stem for file in (paths.CONF / "method").glob("*.yaml")))
def test_identity_and_restoration(name, family):
    lm = posbench.load("tiny" if family == "tiny" else build(family))
    found = method(name)
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


@pytest.mark.parametrize("name", sorted(file.stem for file in (paths.CONF / "method").glob("*.yaml")))
def test_the_file_is_named_as_the_method(name):
    assert yaml.safe_load((paths.CONF / "method" / f"{name}.yaml").read_text())["name"] == name
