"""Position engineering against the unmodified model on position ids that are written out."""

import pytest

import posbench
from posbench.errors import UserError
from posbench.methods.position_engineering import PositionEngineering
from posbench.methods.position_interpolation import PositionInterpolation
from tests.messages import refused
from tests.models import build
from tests.parity.plain import batch, prompt_then_steps
from tests.rounding import assert_same, family_noise

PADS = [0, 5, 11]
PROMPT = 40
STEPS = 4
ITEMS = [[(3, 9), (9, 15), (17, 22)], [(12, 20), (4, 11)], [(2, 3), (0, 0), (7, 25)]]
"""Tokens of the items of each prompt, counted from its first one: not in order, with text between, one cut away."""
BEGINS, ENDS = (3, 4, 2), (22, 20, 25)
GAPS = PositionEngineering(theta_a=70, theta_b=23)


@pytest.fixture(params=["llama-gqa", "qwen2-yarn", "gemma3", "smollm3", "gpt_neox"])
def family(request):
    return request.param


def prompts(lm):
    ids, mask, positions = batch(PADS, PROMPT + STEPS)
    for row, pad, items in zip(ids, PADS, ITEMS, strict=True):
        lm.items.add(row[pad:PROMPT].tolist(), items)
    moved = positions.clone()
    for row, pad in enumerate(PADS):
        moved[row, pad + BEGINS[row] :] += 70
        moved[row, pad + ENDS[row] :] += 23
    return ids, mask, positions, moved


def test_it_equals_other_position_ids(family):
    lm = posbench.load(build(family))
    ids, mask, positions, moved = prompts(lm)
    expected = prompt_then_steps(lm.model, ids, mask, moved, PROMPT)
    stock = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    with GAPS.applied(lm):
        found = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    real = mask.bool()
    assert_same(found[real], expected[real], family_noise(family), "logits")
    assert (stock - expected)[real].abs().max() > 1e-2


def test_inside_scaled_positions_the_gaps_are_as_long():
    """Outside of them they are scaled too."""
    lm = posbench.load(build("llama-gqa"))
    ids, mask, positions, moved = prompts(lm)
    real = mask.bool()
    noise = family_noise("llama-gqa")
    scale = PositionInterpolation(scale=2.0)
    with scale.applied(lm):
        expected = prompt_then_steps(lm.model, ids, mask, moved, PROMPT)
    with GAPS.applied(lm), scale.applied(lm):
        found = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    assert_same(found[real], expected[real], noise, "logits")
    half = PositionEngineering(theta_a=35, theta_b=0)
    whole = PositionEngineering(theta_a=70, theta_b=0)
    with scale.applied(lm), half.applied(lm):
        inside = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    with whole.applied(lm), scale.applied(lm):
        outside = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    assert_same(inside[real], outside[real], noise, "logits")


def test_neutral_gaps_change_nothing(family):
    lm = posbench.load(build(family))
    ids, mask, positions, _ = prompts(lm)
    stock = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    with GAPS.neutral().applied(lm):
        found = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    real = mask.bool()
    assert_same(found[real], stock[real], family_noise(family), "logits")


def test_positions_stay_inside_the_context_window():
    lm = posbench.load(build("llama"))
    ids, mask, *_ = prompts(lm)
    ids, mask = ids[:, :PROMPT], mask[:, :PROMPT]
    lm.context_window = 60
    with PositionEngineering(theta_a=15, theta_b=5).applied(lm):
        lm.logits(ids, mask)
    with (
        PositionEngineering(theta_a=15, theta_b=6).applied(lm),
        refused("method.theta_a", 15, allowed="20", hint="fewer items"),
    ):
        lm.logits(ids, mask)
    with refused("method.theta_a", 60, allowed="60", hint="method.theta_a=15"):
        PositionEngineering(theta_a=60, theta_b=0).check(lm)


@pytest.mark.parametrize("family_without", ["mpt", "falcon-alibi", "smollm3-nope"])
def test_a_model_without_rope_is_refused(family_without):
    with pytest.raises(UserError) as error:
        GAPS.check(posbench.load(build(family_without)))
    assert error.value.field == "method"
    assert "\n" not in str(error.value)
