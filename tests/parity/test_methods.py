"""What every method of conf/method owes: nothing at neutral parameters, and a model left as it was."""

import pytest
import torch
import yaml

import posbench
from posbench import paths
from posbench.cli import _hydra
from posbench.config import check, plain
from tests.models import BUILDERS, build


def method(name: str):
    """The method as `posbench model=tiny method=<name>` builds it."""
    built = []
    _hydra(["model=tiny", f"method={name}", "stages=[evaluate]"], lambda config: built.append(check(plain(config)).method()))
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
    attributes = {key: dict(vars(module)) for key, module in lm.model.named_modules()}
    with found.neutral().applied(lm):
        neutral = lm.logits(ids, mask)
    assert (neutral - before)[mask.bool()].abs().max() < 5e-5
    with found.applied(lm):
        lm.model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    assert torch.equal(lm.logits(ids, mask), before)
    for key, module in lm.model.named_modules():
        assert not module._forward_pre_hooks and not module._forward_hooks, key
        assert set(vars(module)) == set(attributes[key]), key


@pytest.mark.parametrize("name", sorted(file.stem for file in (paths.CONF / "method").glob("*.yaml")))
def test_the_file_is_named_as_the_method(name):
    assert yaml.safe_load((paths.CONF / "method" / f"{name}.yaml").read_text())["name"] == name
