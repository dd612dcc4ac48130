"""SelfExtend, ReRoPE, dual chunk attention and STRING against their formulas, pair by pair, and against outputs of
the authors' programs."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import posbench
from posbench.measure.scores import read_scores
from posbench.methods import Method, ScaleChannel, Unmodified
from posbench.methods.composed import Composed
from posbench.methods.dca import DualChunkAttention
from posbench.methods.position_interpolation import PositionInterpolation
from posbench.methods.rerope import ReRoPE
from posbench.methods.self_extend import SelfExtend
from posbench.methods.string_shift import StringShift
from posbench.model import attention
from posbench.model.hooks import fork_cache
from tests.messages import refused
from tests.models import build
from tests.parity.plain import FAMILIES, attending_plainly, batch, prompt_then_steps
from tests.rounding import (
    SLACK,
    assert_same,
    attention_noise,
    family_noise,
    noise_floor,
)

GOLDEN = Path(__file__).parent / "golden"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
PROGRAMS = MANIFEST["relative_positions"]["llama-mha"]
OUTPUTS = [(name, case) for name, cases in PROGRAMS.items() for case in cases]
PADS = [0, 5, 11]
PROMPT = 40
STEPS = 6
EXAMPLES = [SelfExtend, ReRoPE, DualChunkAttention, StringShift]


@dataclass(frozen=True)
class Formula:
    """A method, its relative position at tokens i and j as printed, and its factor of the scores of token i."""

    method: Method
    relative: Callable[[int, int], float]
    factor: Callable[[int], float] = lambda i: 1.0


def chunked(s: int, largest: int) -> Callable[[int, int], int]:
    """The relative position of dual chunk attention with chunks of s tokens."""

    def relative(i: int, j: int) -> int:
        between = i // s - j // s
        if between == 0:
            return i % s - j % s
        if between == 1:
            return min(i % s + s, largest) - j % s
        return min(2 * s - 1, largest) - j % s

    return relative


FORMULAS = {
    "self_extend": Formula(
        SelfExtend(group_size=4, window=6),
        lambda i, j: i - j if i - j < 6 else i // 4 - j // 4 + 6 - 6 // 4,
    ),
    "self_extend-fractional-scaled": Formula(
        SelfExtend(group_size=4, window=6, fractional_shift=True, scale_base=9),
        lambda i, j: i - j if i - j < 6 else i // 4 - j // 4 + 4.5,
        lambda i: max(1, math.log(i + 1) / math.log(9)),
    ),
    "rerope": Formula(
        ReRoPE(window=7, trained_length=20),
        lambda i, j: min(i - j, 7),
        lambda i: max(1, math.log(i + 1) / math.log(20)),
    ),
    "leaky": Formula(
        ReRoPE(window=7, compression=3, log_scale=False),
        lambda i, j: i - j if i - j < 7 else 7 + (i - j - 7) / 3,
    ),
    "dca": Formula(DualChunkAttention(trained_length=16), chunked(12, 15)),
    "dca-official": Formula(
        DualChunkAttention(trained_length=16, variant="official"), chunked(10, 12)
    ),
    "dca-all-reachable": Formula(
        DualChunkAttention(chunk_length=5, largest_position=30), chunked(5, 30)
    ),
    "string_shift": Formula(
        StringShift(offset=11, local_window=3, attention_factor=1.1),
        lambda i, j: i - j if i - j < 11 else i - j - 11 + 3,
        lambda i: 1.1**2,
    ),
    "scaled": Formula(
        Composed(
            parts={
                "position_interpolation": PositionInterpolation(scale=2.0),
                "rerope": ReRoPE(window=5, log_scale=False),
            }
        ),
        lambda i, j: min((i - j) / 2, 5),
    ),
}


def table_of(formula: Formula, tokens: int) -> tuple[Tensor, Tensor]:
    """Relative positions [tokens, tokens], 0 above the diagonal, and factors [tokens, 1]."""
    relative = torch.zeros(tokens, tokens, dtype=torch.float64)
    for i in range(tokens):
        for j in range(i + 1):
            relative[i, j] = formula.relative(i, j)
    return relative, torch.tensor([[formula.factor(i)] for i in range(tokens)])


def plain_weights(layer, formula: Formula) -> list[Tensor]:
    """Attention weights [T, T] of each head: the query is rotated by R(i, j) for each pair, the key not at all."""
    tokens = len(layer.query[0])
    relative, factor = table_of(formula, tokens)
    weights = []
    for query, key in zip(layer.query.double(), layer.key.double(), strict=True):
        scores = torch.zeros(tokens, tokens)
        for position in relative.unique():
            turned = layer.turn(query, positions=position.expand(tokens))
            scores = torch.where(relative == position, turned @ key.T, scores)
        scores = (scores * layer.scaling * factor).masked_fill(
            ~layer.open, float("-inf")
        )
        weights.append(scores.softmax(-1).float())
    return weights


def plainly(model, ids, pads, formula: Formula):
    """Logits [B, T, V], and the weights of the last token by layer, row and head."""
    last_rows: dict[int, list[list[Tensor]]] = {}

    def attend(layer):
        heads = plain_weights(layer, formula)
        last_rows.setdefault(layer.number, []).append([w[-1] for w in heads])
        return torch.stack([w @ v for w, v in zip(heads, layer.value, strict=True)])

    with attending_plainly(model, pads, attend), torch.no_grad():
        return model(ids, use_cache=False).logits, last_rows


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_and_steps_equal_the_formula(family, name):
    formula = FORMULAS[name]
    lm = posbench.load(build(family))
    ids, mask, positions = batch(PADS, PROMPT + STEPS)
    expected, _ = plainly(lm.model, ids, PADS, formula)
    real = mask.bool()
    with formula.method.applied(lm):
        found = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
        # Positions that count the padding, as of a bare forward.
        with torch.no_grad():
            bare = lm.model(ids, attention_mask=mask).logits
    noise = family_noise(family)
    assert_same(found[real], expected[real], noise, "logits")
    assert_same(bare[real], expected[real], noise, "logits")
    stock = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    assert (stock - expected)[real].abs().max() > 1e-2


def method_of(name: str, case: dict) -> Method:
    """The settings of a case of an authors' program."""
    if name == "self_extend":
        return SelfExtend(
            group_size=case["group_size"],
            window=case["window"],
            scale_base=None if case["scale_base"] < 0 else case["scale_base"],
            fractional_shift=case.get("fractional", False),
        )
    if name == "rerope":
        return ReRoPE(
            window=case["window"],
            compression=case["scaling_factor"],
            trained_length=case["training_length"],
        )
    if name == "dca":
        return DualChunkAttention(
            trained_length=case["pretraining_length"],
            chunk_length=case["chunk_len"],
            largest_position=case["chunk_size"],
            mscale=case["id"].startswith("mscale"),
        )
    return StringShift(
        offset=case["shifted_offset"],
        local_window=case["local_window"],
        attention_factor=case["attention_factor"],
        variant="official" if case["edge_counted_twice_at_prefill"] else "paper",
    )


@pytest.fixture(scope="module")
def golden():
    lm = posbench.load(AutoModelForCausalLM.from_pretrained(GOLDEN / "llama-mha"))
    with np.load(GOLDEN / "relative_positions_llama-mha.npz") as data:
        return lm, dict(data)


@pytest.mark.parametrize(
    ("name", "case"), OUTPUTS, ids=[f"{name}-{case['id']}" for name, case in OUTPUTS]
)
@torch.no_grad()
def test_outputs_of_the_released_programs(golden, name, case):
    lm, arrays = golden
    key = f"{name}/{case['id']}"
    ids = torch.tensor(arrays[f"{key}/prompt_ids"].astype(np.int64))
    noise = noise_floor(lm.model, ids)
    with method_of(name, case).applied(lm):
        logits = lm.model(ids).logits[0]
        generated = lm.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    assert_same(logits[::8], arrays[f"{key}/prefill_logits_every8"], noise, "golden")
    # The program of STRING cannot decode after a prompt that is shorter than the offset.
    if f"{key}/tokens" not in arrays:
        assert_same(logits[-1], arrays[f"{key}/last_logits"], noise, "golden")
        return
    tokens = generated.sequences[0, ids.shape[1] :]
    np.testing.assert_array_equal(tokens, arrays[f"{key}/tokens"])
    steps = torch.stack(generated.logits, 1)[0]
    assert_same(steps, arrays[f"{key}/step_logits"], noise, "golden")


NEUTRAL = {
    "self_extend": ("g1_w16_n96", "g4_w128_n96", "cross_g4_w16_n14"),
    "rerope": ("nolog_re_w128_n96", "nolog_leaky_w128_n96_k4", "nolog_leaky_w16_n96_k1"),
    "dca": ("p64_wdef_n30",),
    "string_shift": ("s44_w8_n40_factor1", "split_s40_w40_n120_factor1"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name, cases in NEUTRAL.items() for case in cases],
)
@torch.no_grad()
def test_settings_of_the_released_programs_that_change_nothing(golden, name, case):
    lm, arrays = golden
    (settings,) = (c for c in PROGRAMS[name] if c["id"] == case)
    ids = torch.tensor(arrays[f"{name}/{case}/prompt_ids"].astype(np.int64))
    with method_of(name, settings).applied(lm):
        found = lm.model(ids).logits
    assert_same(found, lm.model(ids).logits, noise_floor(lm.model, ids), "golden")


def test_defaults_of_the_official_variants():
    """Of the released programs: chunks of 5/8 L and a largest position of 3/4 L; a factor of 0.1 ln 2 + 1."""
    lm = posbench.load(build("llama"))
    cases = {case["id"]: case for case in PROGRAMS["dca"]}
    chunks = DualChunkAttention(trained_length=64, variant="official").fitted(lm)
    case = cases["p64_wdef_n150"]
    assert chunks.chunk_length == case["chunk_len"]
    assert chunks.largest_position == case["chunk_size"]
    official = StringShift(variant="official").fitted(lm)
    (factor,) = {
        c["attention_factor"]
        for c in PROGRAMS["string_shift"]
        if not c["id"].endswith("factor1")
    }
    assert official.attention_factor == pytest.approx(factor)
    assert StringShift().fitted(lm).attention_factor == 1


def test_defaults_follow_the_context_window():
    """At 4096 trained tokens those of the released programs; in smaller models the same shares."""
    lm = posbench.load(build("llama"))
    assert lm.context_window == 4096
    assert SelfExtend().fitted(lm).window == 1024
    assert ReRoPE().fitted(lm).window == 512
    assert StringShift().fitted(lm).lengths == (128, 1351)
    chunks = DualChunkAttention().fitted(lm)
    assert (chunks.chunk_length, chunks.largest_position) == (3072, 4095)
    lm.context_window = 256
    assert SelfExtend().fitted(lm).window == 64
    assert ReRoPE().fitted(lm).window == 32
    assert StringShift().fitted(lm).lengths == (8, 84)
    lm.context_window = 131072
    assert SelfExtend().fitted(lm).window == 1024
    assert StringShift().fitted(lm).lengths == (128, 43253)


@pytest.mark.parametrize("kind", EXAMPLES)
@torch.no_grad()
def test_texts_up_to_the_unchanged_length_are_read_unchanged(kind):
    lm = posbench.load(build("llama-gqa"))
    method = kind.example(lm)
    unchanged = method.unchanged_length(lm)
    ids, _, _ = batch([0], 2 * unchanged)
    stock = lm.model(ids).logits
    with method.applied(lm):
        found = lm.model(ids).logits
    noise = family_noise("llama-gqa")
    assert_same(found[:, :unchanged], stock[:, :unchanged], noise, "logits")
    assert (found - stock).abs().max() > 100 * SLACK * noise


def test_the_unchanged_length_counts_scales_and_parts():
    lm = posbench.load(build("llama"))
    assert SelfExtend(window=50, scale_base=30).unchanged_length(lm) == 30
    assert ReRoPE(window=50, trained_length=30).unchanged_length(lm) == 30
    without = ReRoPE(window=50, trained_length=30, log_scale=False)
    assert without.unchanged_length(lm) == 50
    chunks = {"chunk_length": 50, "largest_position": 60, "trained_length": 30}
    assert DualChunkAttention(**chunks).unchanged_length(lm) == 50
    assert DualChunkAttention(**chunks, mscale=True).unchanged_length(lm) == 30
    assert StringShift(offset=200).unchanged_length(lm) == 200
    assert StringShift(offset=200, variant="official").unchanged_length(lm) == 0
    parts = {"rerope": without, "string_shift": StringShift(offset=200)}
    assert Composed(parts=parts).unchanged_length(lm) == 50
    parts["none"] = Unmodified()
    assert Composed(parts=parts).unchanged_length(lm) == 0


@pytest.mark.parametrize("kind", EXAMPLES)
@torch.no_grad()
def test_a_prompt_in_pieces_and_a_cache_that_is_copied_cut_back_or_reordered(kind):
    lm = posbench.load(build("llama-gqa"))
    ids, mask, positions = batch(PADS, PROMPT)
    noise = family_noise("llama-gqa")

    def read(columns, cache=None, rows=slice(None)):
        return lm.model(
            ids[rows, columns],
            attention_mask=mask[rows, : columns.stop],
            position_ids=positions[rows, columns],
            past_key_values=cache,
        )

    with kind.example(lm).applied(lm):
        whole = read(slice(0, PROMPT)).logits
        # The first piece ends behind the padding of every row.
        begun = read(slice(0, 23))
        cache = begun.past_key_values
        rest = read(slice(23, PROMPT), fork_cache(cache)).logits
        pieces = torch.cat([begun.logits, rest], dim=1)
        assert_same(pieces[mask.bool()], whole[mask.bool()], noise, "logits")
        back = read(slice(23, 30), fork_cache(cache)).past_key_values
        back.crop(-7)
        again = read(slice(23, PROMPT), back).logits
        assert_same(again, rest, noise, "logits")
        # Beams of one prompt: rows share their padding, their later tokens differ.
        rows = torch.tensor([1, 1])
        beams = read(slice(0, 23), rows=rows).past_key_values
        given = {
            "attention_mask": mask[rows, :24],
            "position_ids": positions[rows, 23:24],
        }
        lm.model(torch.tensor([[7], [9]]), past_key_values=beams, **given)
        straight = read(slice(24, 25), fork_cache(beams), rows).logits
        assert (straight[0] - straight[1]).abs().max() > 1e-2
        beams.reorder_cache(torch.tensor([1, 0]))
        assert_same(
            read(slice(24, 25), beams, rows).logits, straight.flip(0), noise, "logits"
        )
    outside = read(slice(0, 23)).past_key_values
    with (
        pytest.raises(ValueError, match="filled outside the block"),
        kind.example(lm).applied(lm),
    ):
        read(slice(23, 24), outside)


@pytest.mark.parametrize("pads", [PADS, [0, 0]], ids=["left-padded", "plain"])
@pytest.mark.parametrize("family", ["gemma2", "mistral-window"])
@pytest.mark.parametrize("kind", EXAMPLES)
@torch.no_grad()
def test_queries_in_blocks(kind, family, pads, monkeypatch):
    lm = posbench.load(build(family))
    ids, mask, _ = batch(pads, PROMPT)
    with kind.example(lm).applied(lm):
        whole = lm.logits(ids, mask)
        # Seven queries at a time.
        limit = 7 * len(pads) * 4 * PROMPT
        monkeypatch.setitem(attention.MAX_BLOCK_WEIGHTS, "cpu", limit)
        blocks = lm.logits(ids, mask)
        begun = lm.model(ids[:, :20], attention_mask=mask[:, :20])
        given = {"attention_mask": mask, "past_key_values": begun.past_key_values}
        rest = lm.model(ids[:, 20:], **given).logits
    noise = family_noise(family)
    assert_same(blocks[mask.bool()], whole[mask.bool()], noise, "logits")
    assert_same(rest, whole[:, 20:], noise, "logits")


@pytest.mark.parametrize("name", FORMULAS)
@torch.no_grad()
def test_weights_of_the_last_token_are_those_of_the_formula(name):
    """Also those that eager attention returns."""
    formula = FORMULAS[name]
    lm = posbench.load(build("llama-gqa"))
    lm.model.set_attn_implementation("eager")
    ids, mask, _ = batch(PADS, PROMPT)
    _, expected = plainly(lm.model, ids, PADS, formula)
    with formula.method.applied(lm), lm.last_attention() as found:
        lm.logits(ids, mask)
        returned = lm.model(ids, attention_mask=mask, output_attentions=True).attentions
    noise = attention_noise("llama-gqa")
    for layer, rows in expected.items():
        for row, heads in enumerate(rows):
            wanted = torch.stack(heads)
            seen = found[layer][row, :, PADS[row] :]
            assert_same(seen, wanted, noise, "attention")
            last = returned[layer][row, :, -1, PADS[row] :]
            assert_same(last, wanted, noise, "attention")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", ["olmo2", "llama-gqa"])
@pytest.mark.parametrize("kind", EXAMPLES)
@torch.no_grad()
def test_other_dtypes_round_no_more_than_the_unmodified_model(kind, family, dtype):
    """OLMo 2 has tables in float32."""
    rounded = posbench.load(build(family, dtype=dtype))
    # The same weights, which are of that type already.
    precise = posbench.load(build(family, dtype=dtype).float())
    ids, mask, _ = batch(PADS, PROMPT)

    def rounding(method):
        logits = []
        for lm in (rounded, precise):
            with method.applied(lm):
                logits.append(lm.logits(ids, mask)[mask.bool()])
        assert logits[0].dtype == dtype
        return (logits[0].double() - logits[1].double()).abs().mean()

    method = kind.example(rounded)
    floor = rounding(Unmodified())
    assert rounding(method) < 2 * floor
    assert rounding(method.neutral()) < 2 * floor


@pytest.mark.parametrize("kind", EXAMPLES)
def test_with_a_scaled_channel(kind):
    lm = posbench.load(build("llama-gqa"))
    ids, mask, positions = batch(PADS, PROMPT + STEPS)
    method = kind.example(lm)
    scale = ScaleChannel(channel=3, factor=-1.0, layers=(1, 3))

    def read(*methods):
        parts = {str(index): method for index, method in enumerate(methods)}
        with Composed(parts=parts).applied(lm):
            logits = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
        return logits[mask.bool()]

    noise = family_noise("llama-gqa")
    alone = read(method)
    assert_same(read(method, scale.neutral()), alone, noise, "logits")
    assert_same(read(method.neutral(), scale), read(scale), noise, "logits")
    assert (read(method, scale) - alone).abs().max() > 1e-2


@torch.no_grad()
def test_a_score_map_is_refused():
    lm = posbench.load(build("llama"))
    ids, _, _ = batch([0, 0], 20)
    with (
        SelfExtend.example(lm).applied(lm),
        refused("method", hint=("self_extend", "string_shift")),
    ):
        read_scores(lm, ids.tolist(), lambda *scores: None)


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        (SelfExtend(group_size=0), "group_size", 0),
        (SelfExtend(window=0), "window", 0),
        (SelfExtend(scale_base=1.0), "scale_base", 1.0),
        (ReRoPE(compression=0.5), "compression", 0.5),
        (ReRoPE(trained_length=1), "trained_length", 1),
        (DualChunkAttention(chunk_length=0), "chunk_length", 0),
        (DualChunkAttention(chunk_length=9, largest_position=7), "largest_position", 7),
        (StringShift(offset=0), "offset", 0),
        (StringShift(offset=9, local_window=10), "local_window", 10),
        (StringShift(attention_factor=0.0), "attention_factor", 0.0),
    ],
)
def test_bad_parameters(method, field, value):
    lm = posbench.load(build("llama"))
    with refused(f"method.{field}", value, hint="method."):
        method.check(lm)
