"""Ms-PoE against a plain recomputation, head by head, and against outputs of the authors' program."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import posbench
from posbench.errors import UserError
from posbench.methods import ScaleChannel, Unmodified
from posbench.methods.ms_poe import MsPoE
from posbench.methods.position_interpolation import PositionInterpolation
from posbench.model.hooks import fork_cache
from tests.messages import refused
from tests.models import build
from tests.parity.plain import FAMILIES, attending_plainly, batch, prompt_then_steps
from tests.rounding import EPSILON, assert_same, family_noise, noise_floor

GOLDEN = Path(__file__).parent / "golden"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
CASES = MANIFEST["ms_poe"]["llama-mha"]["cases"]
PADS = [0, 5, 11]
PROMPT = 40
STEPS = 6


def plain_ratios(layer, variant, prompt, low=1.2, high=1.8, alpha=3.0):
    """Ratio of each head from full attention over the prompt, the formulas of the paper or of the released
    program."""
    aware = []
    heads = len(layer.query)
    for query, key in zip(layer.query, layer.key, strict=True):
        pair = (
            (layer.turn(query), layer.turn(key)) if variant == "paper" else (query, key)
        )
        row = layer.weights(*pair)[prompt - 1]
        keys = int(layer.open[prompt - 1].sum())
        bound = alpha / keys
        aware.append(
            int(((row >= bound) if variant == "paper" else (row > bound)).sum()) / keys
        )
    ranked = sorted(range(heads), key=lambda head: (-aware[head], head))
    if variant == "paper":
        return [
            low + (high - low) * ranked.index(head) / (heads - 1)
            for head in range(heads)
        ]
    return [low + (high - low) * ranked[head] / heads for head in range(heads)]


def plainly(model, ids, pads, variant, first=2):
    """Logits [B, T, V] and the ratios by (layer, row)."""
    found = {}

    def attend(layer):
        longest = ids.shape[1] - len(layer.query[0])
        ratios = [1.0] * len(layer.query)
        if layer.number >= first:
            ratios = plain_ratios(layer, variant, PROMPT - longest)
            found[layer.number, longest] = ratios
        # The released program rotates a group's key once, with the ratio of the group's first query head.
        group = (
            len(ratios) // model.config.num_key_value_heads
            if variant == "official"
            else 1
        )
        keyed = [ratios[head - head % group] for head in range(len(ratios))]
        heads = zip(ratios, keyed, layer.query, layer.key, layer.value, strict=True)
        return torch.stack(
            [
                layer.weights(layer.turn(q, r), layer.turn(k, s)) @ v
                for r, s, q, k, v in heads
            ]
        )

    with attending_plainly(model, pads, attend), torch.no_grad():
        return model(ids, use_cache=False).logits, found


@pytest.mark.parametrize("variant", ["paper", "official"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_and_steps_equal_a_plain_recomputation(family, variant):
    lm = posbench.load(build(family))
    ids, mask, positions = batch(PADS, PROMPT + STEPS)
    expected, ratios = plainly(lm.model, ids, PADS, variant)
    assert len({tuple(r) for r in ratios.values()}) > 1
    with MsPoE(variant=variant).applied(lm):
        found = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    assert_same(
        found[mask.bool()], expected[mask.bool()], family_noise(family), "logits"
    )
    stock = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    assert (stock - expected)[mask.bool()].abs().max() > 1e-2


@torch.no_grad()
def test_a_batch_equals_its_rows_one_by_one_with_a_ranking_each():
    lm = posbench.load(build("llama-gqa"))
    ids, mask, positions = batch(PADS, PROMPT + STEPS)
    with MsPoE().applied(lm):
        together = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
        for row, pad in enumerate(PADS):
            one = slice(row, row + 1), slice(pad, None)
            alone = prompt_then_steps(
                lm.model, ids[one], mask[one], positions[one], PROMPT - pad
            )
            assert_same(together[one], alone, family_noise("llama-gqa"), "logits")


@torch.no_grad()
def test_a_cache_that_is_copied_reordered_or_cut_back_goes_on_as_it_should():
    lm = posbench.load(build("llama-gqa"))
    ids, mask, positions = batch(PADS, PROMPT + 1)

    def step(cache, rows, kept=mask):
        given = {"attention_mask": kept[rows], "position_ids": positions[rows][:, -1:]}
        return lm.model(ids[rows][:, -1:], past_key_values=cache, **given).logits

    with MsPoE().applied(lm):
        out = lm.model(
            ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions[:, :-1]
        )
        every = torch.arange(len(ids))
        expected = step(fork_cache(out.past_key_values), every)
        assert torch.equal(step(fork_cache(out.past_key_values), every), expected)
        back = fork_cache(out.past_key_values)
        step(back, every)
        back.crop(-1)
        noise = family_noise("llama-gqa")
        assert_same(step(back, every), expected, noise, "logits")
        # Beams of one prompt: rows share positions and ranking, their later tokens differ.
        twice = torch.tensor([1, 1])
        beams = lm.model(
            ids[twice][:, :-2],
            attention_mask=mask[twice][:, :-2],
            position_ids=positions[twice][:, :-2],
        )
        cache = beams.past_key_values
        tokens = torch.tensor([[7], [9]])
        now = {
            "attention_mask": mask[twice][:, :-1],
            "position_ids": positions[twice][:, -2:-1],
        }
        lm.model(tokens, past_key_values=cache, **now)
        straight = step(fork_cache(cache), twice)
        assert (straight[0] - straight[1]).abs().max() > 1e-2
        cache.reorder_cache(torch.tensor([1, 0]))
        assert_same(step(cache, twice), straight.flip(0), noise, "logits")
    outside = lm.model(ids[:, :-1]).past_key_values
    with (
        pytest.raises(ValueError, match="filled outside the block"),
        MsPoE().applied(lm),
    ):
        step(outside, every)


@torch.no_grad()
def test_together_with_a_scaled_channel():
    lm = posbench.load(build("llama-gqa"))
    ids, mask, positions = batch(PADS, PROMPT + STEPS)
    stock = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    scale = ScaleChannel(channel=3, factor=-1.0, layers=(1, 3))
    with MsPoE().neutral().applied(lm), scale.neutral().applied(lm):
        neutral = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    noise = family_noise("llama-gqa")
    assert_same(neutral[mask.bool()], stock[mask.bool()], noise, "logits")
    with scale.applied(lm):
        scaled = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    with MsPoE().neutral().applied(lm), scale.applied(lm):
        both = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    assert_same(both[mask.bool()], scaled[mask.bool()], noise, "logits")
    assert (scaled - stock)[mask.bool()].abs().max() > 1e-2


def test_one_ratio_for_all_heads_is_position_interpolation_also_with_a_scaled_channel():
    lm = posbench.load(build("llama-gqa"))
    ids, mask, positions = batch(PADS, PROMPT + STEPS)
    scale = ScaleChannel(channel=3, factor=-1.0, layers=(1, 3))
    for extra in (Unmodified(), scale):
        found = []
        for method in (
            MsPoE(ratios=(2.0, 2.0), first_layer=0),
            PositionInterpolation(scale=2.0),
        ):
            with method.applied(lm), extra.applied(lm):
                found.append(
                    prompt_then_steps(lm.model, ids, mask, positions, PROMPT)[
                        mask.bool()
                    ]
                )
        assert_same(*found, family_noise("llama-gqa"), "logits")


def test_inside_scaled_positions_the_scales_multiply_and_outside_it_is_refused():
    lm = posbench.load(build("llama-gqa"))
    ids, mask, positions = batch(PADS, PROMPT + STEPS)
    outer = PositionInterpolation(scale=1.5)
    inner = MsPoE(ratios=(2.0, 2.0), first_layer=0)
    with outer.applied(lm), inner.applied(lm):
        both = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    with PositionInterpolation(scale=3.0).applied(lm):
        expected = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    assert_same(
        both[mask.bool()], expected[mask.bool()], family_noise("llama-gqa"), "logits"
    )
    with (
        inner.applied(lm),
        refused("method", allowed=("ms_poe", "moice"), hint="last"),
        outer.applied(lm),
    ):
        pass
    with inner.applied(lm):
        pass


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "ms_poe_llama-mha.npz") as data:
        return posbench.load(
            AutoModelForCausalLM.from_pretrained(GOLDEN / "llama-mha")
        ), dict(data)


def method_of(case):
    order = (
        "reversed"
        if case["head_type"] == "normal"
        else "rank"
        if case["id"].startswith("rankfix")
        else None
    )
    ratios = (case["ratio_min"], case["ratio_max"])
    first = case["layers"][0]
    return MsPoE(ratios=ratios, first_layer=first, variant="official", order=order)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
@torch.no_grad()
def test_outputs_of_the_released_program(golden, case):
    (lm, arrays), name = golden, case["id"]
    ids = torch.tensor(arrays[f"{name}/prompt_ids"])
    kept = {}
    method = method_of(case)
    head_ratios = method.head_ratios

    def remember(outlying):
        kept.setdefault("fraction", []).append(outlying[0] / ids.shape[1])
        kept.setdefault("ratios", []).append(head_ratios(outlying)[0])
        return head_ratios(outlying)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MsPoE, "head_ratios", lambda self, outlying: remember(outlying))
        with method.applied(lm):
            out = lm.model(ids)
    with method.applied(lm):
        generated = lm.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    noise = noise_floor(lm.model, ids)
    assert_same(
        torch.stack(kept["ratios"]),
        arrays[f"{name}/query_head_ratio"],
        EPSILON,
        "golden",
    )
    if f"{name}/outlier_fraction" in arrays and case["head_type"] is None:
        assert_same(
            torch.stack(kept["fraction"]),
            arrays[f"{name}/outlier_fraction"],
            EPSILON,
            "golden",
        )
    assert_same(
        out.logits[0, ::16], arrays[f"{name}/prefill_logits_every16"], noise, "golden"
    )
    assert_same(
        out.logits[0, -1], arrays[f"{name}/prefill_last_logits"], noise, "golden"
    )
    np.testing.assert_array_equal(
        generated.sequences[0, ids.shape[1] :], arrays[f"{name}/tokens"]
    )
    assert_same(
        torch.stack(generated.logits, 1)[0],
        arrays[f"{name}/step_logits"],
        noise,
        "golden",
    )


@torch.no_grad()
def test_ties_chunks_and_a_second_prompt_of_the_released_program(golden):
    lm, arrays = golden
    ids = torch.tensor(arrays["r12_18_l23/prompt_ids"])
    with MsPoE(variant="official").applied(lm):
        short = lm.model(ids[:, :8]).logits[0, -1]
        begun = lm.model(ids[:, :128])
        chunk = lm.model(ids[:, 128:], past_key_values=begun.past_key_values).logits[
            0, -1
        ]
        # Ranked anew: what the released program gives after a reset.
        fresh = lm.model(torch.tensor(arrays["noreset/ids"])).logits[0, -1]
    noise = noise_floor(lm.model, ids)
    for found, name in (
        (short, "short8/logits"),
        (chunk, "chunk128/last_logits"),
        (fresh, "noreset/fresh_logits"),
    ):
        assert_same(found, arrays[name], noise, "golden")
    assert (
        np.abs(arrays["noreset/fresh_logits"] - arrays["noreset/stale_logits"]).max()
        > 1e-3
    )


def test_order_of_ties_and_of_the_variants():
    outlying = torch.tensor([[2, 5, 2, 9]])
    paper = MsPoE(ratios=(1.0, 4.0))
    official = MsPoE(ratios=(1.0, 5.0), variant="official")
    assert paper.head_ratios(outlying).tolist() == [[3.0, 2.0, 4.0, 1.0]]
    # Ranked: heads 3, 1, 0, 2; head i gets the ratio with that number.
    assert official.head_ratios(outlying).tolist() == [[4.0, 2.0, 1.0, 3.0]]
    assert MsPoE(ratios=(1.0, 4.0), order="reversed").head_ratios(
        outlying
    ).tolist() == [[4.0, 3.0, 2.0, 1.0]]


def test_a_text_without_a_prompt_has_no_ranking():
    assert MsPoE().needs_prompt
    assert not MsPoE(order="reversed").needs_prompt


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ratios", (1.8, 1.2)),
        ("ratios", (0.0, 1.2)),
        ("first_layer", 4),
        ("first_layer", -1),
        ("alpha", 0.0),
    ],
)
def test_bad_parameters(field, value):
    lm = posbench.load(build("llama"))
    with pytest.raises(UserError) as error:
        MsPoE(**{field: value}).check(lm)
    assert error.value.field == f"method.{field}"
