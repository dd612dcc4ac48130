"""What every method of conf/method and docs/examples owes: neutral is no change, the model stays the same."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import posbench
from posbench.methods import Method
from posbench.methods.base import Needs
from posbench.methods.unmodified import Unmodified
from posbench.model import families, rope
from posbench.model.hooks import intercepting_attention
from posbench.model.store import PrefixStore
from posbench.schema import required_fields
from tests.conftest import config_of
from tests.messages import refused
from tests.models import BUILDERS, build
from tests.rounding import assert_same, family_noise, log_probabilities, noise_floor

OWN = Path(__file__).parents[2] / "docs" / "examples"
METHODS = config_of(
    f"--config-dir={OWN}", "study=precision", "model=tiny_damped"
).all_methods


def has_window(lm) -> bool:
    """Whether a layer of a model sees only the newest tokens: its own mask shuts the first one."""
    shut = []

    def listen(module, query, key, value, mask, *, following, **settings):
        window = settings.get("sliding_window") or getattr(
            module, "sliding_window", None
        )
        shut.append(window is not None and window < key.shape[2])
        return following(module, query, key, value, mask, **settings)

    with intercepting_attention(lm.model, listen):
        lm.logits(torch.arange(6, 46)[None])
    return any(shut)


def applies(needs, lm) -> bool:
    """Whether a model has what a method needs."""
    if needs.by_hand and not families.family_of(lm.model).interface:
        return False
    if needs.full_attention and has_window(lm):
        return False
    if not (needs.rope or needs.plain):
        return True
    kind = getattr(rope.rotary_module(lm.model), "rope_type", "default")
    return bool(rope.rotated_layers(lm.model)) and not (
        needs.plain and kind != "default"
    )


@dataclass(frozen=True, kw_only=True)
class Listener(Method):
    """Halves what attention gives, in front of the kernel."""

    needs: ClassVar[Needs] = Needs(by_hand=True)

    def neutral(self):
        return self

    def changed(self, lm):
        def halved(module, *states, following, **settings):
            output, weights = following(module, *states, **settings)
            return output / 2, weights

        return intercepting_attention(lm.model, halved)


class Forgetful(Listener):
    """The same, without a word of what it needs."""

    needs: ClassVar[Needs] = Needs()


@pytest.mark.parametrize("family", BUILDERS)
@pytest.mark.parametrize("method", [Listener(), Forgetful()])
def test_a_method_that_would_change_nothing_is_refused(method, family):
    lm = posbench.load(build(family))
    ids = torch.randint(6, 60, (2, 40), generator=torch.Generator().manual_seed(0))
    before = lm.logits(ids)
    if families.family_of(lm.model).interface:
        with method.applied(lm):
            assert not torch.equal(lm.logits(ids), before)
    else:
        with (
            refused(
                "method",
                allowed=families.family_of(lm.model).name,
                hint="method=scale_channel",
            ),
            method.applied(lm),
        ):
            pass
    assert torch.equal(lm.logits(ids), before)


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
            refused("method", hint="method=scale_channel"),
            found.applied(lm),
        ):
            pass
        return
    for row, row_mask in zip(ids, mask.bool(), strict=True):
        lm.items.add(row[row_mask].tolist(), [(2, 9), (9, 15), (18, 22)])
    attributes = {key: dict(vars(module)) for key, module in lm.model.named_modules()}
    with found.neutral().applied(lm):
        neutral = lm.logits(ids, mask)
    assert_same(
        neutral[mask.bool()], before[mask.bool()], noise_of(family, lm), "logits"
    )
    with found.applied(lm):
        changes_nothing = isinstance(found, Unmodified) or found.rewrites
        assert torch.equal(lm.logits(ids, mask), before) == changes_nothing
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
