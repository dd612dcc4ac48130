"""Cropped masks, moved positions and subtracted channels against prompts run alone, changed inputs and
written-out attention."""

import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

import posbench
from posbench.measure.states import channel_input
from posbench.methods import ScaleChannel
from posbench.methods.moice import MoICE
from posbench.methods.ms_poe import MsPoE
from posbench.methods.unmodified import Unmodified
from posbench.model import families
from posbench.model.hooks import intercepting_attention
from posbench.perturbations.crop_mask import crop_mask
from posbench.perturbations.move_positions import can_move, move_positions
from posbench.perturbations.scale_attention import scale_attention
from posbench.perturbations.subtract_channel import subtract_channel
from tests.messages import refused
from tests.models import BUILDERS, LAYERS, VOCABULARY, build
from tests.parity import plain
from tests.rounding import assert_same, attention_noise, family_noise, states_noise

LENGTHS = [40, 33]
SPANS = [(10, 30), (3, 22)]
TARGETS = [(2, 9), (1, 22)]
TOTAL = max(LENGTHS)
PADS = [TOTAL - length for length in LENGTHS]
MOVABLE = [
    name for name in BUILDERS if not name.startswith(("mpt", "falcon", "smollm3-nope"))
]


def prompts(lm):
    """A batch of two prompts, the second one padded."""
    rows = torch.randint(
        1, VOCABULARY - 1, (2, TOTAL), generator=torch.Generator().manual_seed(1)
    ).tolist()
    return lm.pad([row[-length:] for row, length in zip(rows, LENGTHS, strict=True)])


def inside(row):
    """Columns of a row's span."""
    return slice(PADS[row] + SPANS[row][0], PADS[row] + SPANS[row][1])


@torch.no_grad()
def states(lm, inputs, block=None):
    """Embedding and block outputs of every layer, [L + 1, B, T, D], inside a block."""
    with block or nullcontext():
        return torch.stack(
            lm.model(**inputs, use_cache=False, output_hidden_states=True).hidden_states
        )


def far(a, b):
    """Largest difference."""
    return (a - b).abs().max().item()


@pytest.mark.parametrize("name", BUILDERS)
def test_span_that_sees_nothing_before_it_is_the_span_as_a_prompt_of_its_own(name):
    """Every family knows relative positions only, so that a cropped span cannot tell where it stands."""
    lm = posbench.load(build(name))
    inputs = prompts(lm)
    free = states(lm, inputs)
    shut = states(
        lm, inputs, crop_mask(lm, LENGTHS, SPANS, range(LAYERS), keep_first=False)
    )
    for row in range(2):
        alone = states(
            lm, {"input_ids": inputs["input_ids"][row : row + 1, inside(row)]}
        )[:, 0]
        assert_same(
            shut[:, row, inside(row)], alone, states_noise(name), "hidden states"
        )
        assert far(free[:, row, inside(row)], alone) > 0.5, "without the crop it can"
        before = slice(PADS[row], inside(row).start)
        assert_same(
            shut[:, row, before],
            free[:, row, before],
            states_noise(name),
            "hidden states",
        )


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "mpt", "falcon-alibi"])
def test_crop_of_some_layers_ends_with_them_and_the_first_token_may_stay(name):
    lm = posbench.load(build(name))
    inputs = prompts(lm)
    free = states(lm, inputs)
    some = states(lm, inputs, crop_mask(lm, LENGTHS, SPANS, [0, 1], keep_first=False))
    alone = states(lm, {"input_ids": inputs["input_ids"][1:, inside(1)]})[:, 0]
    noise = states_noise(name)
    assert_same(some[:3, 1, inside(1)], alone[:3], noise, "hidden states")
    assert far(some[3, 1, inside(1)], alone[3]) > 0.1
    other = dict(inputs, input_ids=inputs["input_ids"].clone())
    other["input_ids"][0, 1 : SPANS[0][0]] = 7
    for keep, same in ((True, True), (False, True), (None, False)):
        block = (
            []
            if keep is None
            else [
                crop_mask(lm, LENGTHS, SPANS, range(LAYERS), keep_first=keep)
                for _ in range(2)
            ]
        )
        one, two = (
            states(lm, x, b)[-1, 0, inside(0)]
            for x, b in zip((inputs, other), block or [None, None], strict=True)
        )
        # What lies between the first token and the span reaches it only uncropped.
        if same:
            assert_same(one, two, noise, "hidden states")
        else:
            assert far(one, two) > 0.01
    other["input_ids"][0, 0] = 7
    kept = [
        states(lm, x, crop_mask(lm, LENGTHS, SPANS, range(LAYERS)))[-1, 0, inside(0)]
        for x in (inputs, other)
    ]
    assert far(*kept) > 0.01, "the first token reaches it"
    nothing = states(
        lm, inputs, crop_mask(lm, LENGTHS, [(0, 0), (0, 0)], range(LAYERS))
    )
    assert torch.equal(nothing, free)


def turned(layer, x, to):
    """Rotate [T, d] with token i at position ``to[i]``, by the written-out rotation of whole sequences."""
    out = layer.turn(x)
    for token, place in enumerate(to):
        if token != place:
            at = torch.zeros_like(x)
            at[place] = x[token]
            out[token] = layer.turn(at)[place]
    return out


@pytest.mark.parametrize("name", plain.FAMILIES)
def test_crop_and_move_equal_attention_written_out(name):
    """Cropped in layers 1 and 2; full matrices per row and head, angles from their formula."""
    lm = posbench.load(build(name))
    inputs = prompts(lm)
    number = {LENGTHS[0]: 0, LENGTHS[1]: 1}

    def attend(layer, crop, move):
        row = number[layer.query.shape[1]]
        total = layer.query.shape[1]
        (start, stop), (to, to_stop) = SPANS[row], TARGETS[row]
        places = list(range(total))
        if move:
            places[start:stop] = [min(to + i, to_stop - 1) for i in range(stop - start)]
        # Its rows share one matrix.
        layer = replace(layer, open=layer.open.clone())
        if crop and layer.number in (1, 2):
            for query in range(start, stop):
                layer.open[
                    query,
                    [key for key in range(total) if key and not start <= key < stop],
                ] = False
        out = []
        for q, k, v in zip(layer.query, layer.key, layer.value, strict=True):
            weights = layer.weights(layer.turn(q), layer.turn(k))
            weights[-1] = layer.weights(layer.turn(q), turned(layer, k, places))[-1]
            out.append(weights @ v)
        return torch.stack(out)

    def expected(crop=False, move=False):
        with plain.attending_plainly(
            lm.model, PADS, lambda layer: attend(layer, crop, move)
        ):
            return lm.logits(inputs["input_ids"], inputs["attention_mask"])

    # Cohere 2 rotates, and is written out, in layers 0 and 2 only.
    cropped = [2] if name == "cohere2" else [1, 2]
    got = {"none": lm.logits(inputs["input_ids"], inputs["attention_mask"])}
    with crop_mask(lm, LENGTHS, SPANS, cropped):
        got["crop"] = lm.logits(inputs["input_ids"], inputs["attention_mask"])
    with move_positions(lm, LENGTHS, SPANS, TARGETS):
        got["move"] = lm.logits(inputs["input_ids"], inputs["attention_mask"])
    seen = inputs["attention_mask"].bool()
    for key, value in {
        "none": expected(),
        "crop": expected(crop=True),
        "move": expected(move=True),
    }.items():
        assert_same(got[key][seen], value[seen], family_noise(name), "logits")
        if key != "none":
            rows = slice(-1, None)
            assert far(got[key][:, rows], got["none"][:, rows]) > 1e-2, (
                "and the last token notices"
            )
    assert torch.equal(
        got["move"][:, :-1][seen[:, :-1]], got["none"][:, :-1][seen[:, :-1]]
    ), "earlier rows do not"


@pytest.mark.parametrize("name", MOVABLE)
def test_last_row_of_the_first_layer_is_that_of_a_prompt_with_those_position_ids(name):
    lm = posbench.load(build(name))
    inputs = prompts(lm)
    places = inputs["position_ids"].clone()
    for row, ((_, _), (to, to_stop)) in enumerate(zip(SPANS, TARGETS, strict=True)):
        columns = inside(row)
        places[row, columns] = to + torch.arange(columns.stop - columns.start).clamp(
            max=to_stop - to - 1
        )
    first = {}
    for key, positions, block in (
        ("free", inputs["position_ids"], nullcontext()),
        ("ids", places, nullcontext()),
        ("moved", inputs["position_ids"], move_positions(lm, LENGTHS, SPANS, TARGETS)),
    ):
        with block, lm.last_attention() as weights:
            states(lm, inputs | {"position_ids": positions})
            # SmolLM3 rotates in its layers 0 and 2, Cohere 2 too.
            first[key] = weights[0]
    assert_same(first["moved"], first["ids"], attention_noise(name), "attention")
    assert far(first["free"], first["ids"]) > 1e-2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_tokens_behind_the_prompt_see_the_moved_span_too_with_and_without_a_cache(
    attention,
):
    model = build("mistral-window")
    model.set_attn_implementation(attention)
    lm = posbench.load(model)
    ids, mask, positions = plain.batch([0, 7], TOTAL + 5)
    logits = {}
    blocks = {
        "none": nullcontext,
        # The window of 24 tokens: part of the span falls out of it as tokens are generated.
        "move": lambda: move_positions(
            lm, LENGTHS, [(20, 30), (15, 24)], [(3, 9), (1, 22)]
        ),
        "crop": lambda: crop_mask(lm, LENGTHS, SPANS, [0, 1]),
        "subtract": lambda: subtract_channel(lm, LENGTHS, SPANS, 5, {1: 2.0, 3: -1.0}),
    }
    for key, block in blocks.items():
        with block():
            steps = plain.prompt_then_steps(model, ids, mask, positions, TOTAL)
            whole = lm.logits(ids, mask)
        assert_same(
            steps[mask.bool()],
            whole[mask.bool()],
            family_noise("mistral-window"),
            "logits",
        )
        logits[key] = steps[:, -1]
    assert all(
        far(logits[key], logits["none"]) > 1e-2 for key in ("move", "crop", "subtract")
    )


def test_attention_weights_that_eager_returns_have_the_moved_last_row():
    model = build("llama")
    model.set_attn_implementation("eager")
    lm = posbench.load(model)
    with (
        move_positions(lm, LENGTHS, SPANS, TARGETS),
        lm.last_attention() as rows,
        torch.no_grad(),
    ):
        weights = model(
            **prompts(lm), use_cache=False, output_attentions=True
        ).attentions
    for layer in range(LAYERS):
        assert_same(
            weights[layer][:, :, -1], rows[layer], attention_noise("llama"), "attention"
        )
    assert weights[0].shape == (2, 4, TOTAL, TOTAL)


NORMS = {
    "llama": "input_layernorm",
    "gemma": "input_layernorm",
    "gpt_neox": "input_layernorm",
    "mpt": "norm_1",
}


@pytest.mark.parametrize("name", NORMS)
def test_subtraction_equals_a_changed_norm_or_a_changed_embedding(name):
    lm = posbench.load(build(name))
    inputs = prompts(lm)
    channel = 11
    change = torch.zeros(2, TOTAL, lm.model.get_input_embeddings().weight.shape[1])
    for row in range(2):
        change[row, inside(row), channel] = 1.5

    @contextmanager
    def by_norm(layers):
        blocks = lm.model.get_submodule(families.family_of(lm.model).layers)
        hooks = [
            blocks[i]
            .get_submodule(NORMS[name])
            .register_forward_hook(lambda m, a, out: out - change)
            for i in layers
        ]
        yield
        for hook in hooks:
            hook.remove()

    base = states(lm, inputs)
    got = states(
        lm, inputs, subtract_channel(lm, LENGTHS, SPANS, channel, {1: 1.5, 2: 1.5})
    )
    noise = states_noise(name)
    assert_same(got, states(lm, inputs, by_norm([1, 2])), noise, "hidden states")
    assert far(got, base) > 1e-2
    got = states(
        lm,
        inputs,
        subtract_channel(lm, LENGTHS, SPANS, channel, {0: 1.5}, site="residual"),
    )
    changed = base[0] - change
    ids = {key: value for key, value in inputs.items() if key != "input_ids"}
    assert_same(
        got[1:],
        states(lm, ids | {"inputs_embeds": changed})[1:],
        noise,
        "hidden states",
    )
    assert far(got[1:], base[1:]) > 1e-2
    with (
        subtract_channel(lm, LENGTHS, SPANS, channel, {1: 1.5}),
        channel_input(lm, [channel]) as after,
    ):
        states(lm, inputs)
    with channel_input(lm, [channel]) as before:
        states(lm, inputs)
    assert torch.equal(after[1], before[1] - change[..., channel, None])


@pytest.mark.parametrize("name", ["llama", "mpt", "gemma3"])
def test_the_model_is_as_before_to_the_bit_also_after_an_exception(name):
    lm = posbench.load(build(name))
    inputs = prompts(lm)
    before = states(lm, inputs)
    attention = lm.model.config._attn_implementation
    hooks = [
        (len(m._forward_pre_hooks), len(m._forward_hooks)) for m in lm.model.modules()
    ]
    blocks = [
        lambda: crop_mask(lm, LENGTHS, SPANS, range(LAYERS)),
        lambda: subtract_channel(lm, LENGTHS, SPANS, 3, {0: 1.0}),
        *(
            []
            if name == "mpt"
            else [lambda: move_positions(lm, LENGTHS, SPANS, TARGETS)]
        ),
    ]
    for block in blocks:
        with pytest.raises(KeyboardInterrupt), block():
            assert not torch.equal(states(lm, inputs), before)
            raise KeyboardInterrupt
        assert torch.equal(states(lm, inputs), before)
    assert lm.model.config._attn_implementation == attention
    assert hooks == [
        (len(m._forward_pre_hooks), len(m._forward_hooks)) for m in lm.model.modules()
    ]


def assert_blocks_work_inside(lm, name, **settings):
    """Under a neutral method the last row is that without the method, in each block."""
    inputs = prompts(lm)
    neutral = ScaleChannel(channel=5, factor=1.0, layers=(1, 2), **settings)
    for block in (
        lambda: move_positions(lm, LENGTHS, SPANS, TARGETS),
        lambda: crop_mask(lm, LENGTHS, SPANS, [0, 1]),
        lambda: subtract_channel(lm, LENGTHS, SPANS, 5, {1: 2.0}),
    ):
        with block():
            alone = lm.logits(inputs["input_ids"], inputs["attention_mask"])
        with neutral.applied(lm), block():
            both = lm.logits(inputs["input_ids"], inputs["attention_mask"])
        assert_same(both[:, -1], alone[:, -1], family_noise(name), "logits")


def test_blocks_work_inside_a_method_that_runs_the_prompt_in_two_parts():
    assert_blocks_work_inside(
        posbench.load(build("llama", dtype=torch.float64)), "llama"
    )


@pytest.mark.parametrize("last", [2, 8, 11, 16, 25])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2"])
def test_blocks_reach_spans_that_a_method_runs_with_the_last_tokens(name, last):
    assert_blocks_work_inside(posbench.load(build(name)), name, last=last)


@pytest.mark.parametrize(
    "method", [Unmodified(), MsPoE(first_layer=0), MoICE(weights="uniform")]
)
def test_weights_scale_in_every_view_of_a_method(method):
    """Adding log(factor) to the scores of the last row, written out in front of the kernel."""
    lm = posbench.load(build("llama-gqa"))
    inputs = prompts(lm)
    tokens = torch.zeros(2, TOTAL)
    for row in (0, 1):
        tokens[row, inside(row)] = 1

    def attend(module, query, key, value, mask, *, following, **settings):
        output, *weights = following(module, query, key, value, mask, **settings)
        groups = query.shape[1] // key.shape[1]
        scores = query[:, :, -1:] @ key.repeat_interleave(groups, 1).mT
        scores = settings["scaling"] * scores + math.log(4) * tokens[:, None, None]
        if mask is not None:
            row = mask[:, :, -1:]
            shut = ~row if row.dtype == torch.bool else row < 0
            scores = scores.masked_fill(shut, -torch.inf)
        changed = scores.softmax(-1) @ value.repeat_interleave(groups, 1)
        output = output.clone()
        output[:, -1] = changed[:, :, 0]
        return output, *weights

    call = {"attention_mask": inputs["attention_mask"]}
    with method.applied(lm):
        before = lm.logits(inputs["input_ids"], **call)
        with scale_attention(lm, tokens, 4.0, range(LAYERS)):
            found = lm.logits(inputs["input_ids"], **call)
        with intercepting_attention(lm.model, attend):
            expected = lm.logits(inputs["input_ids"], **call)
    assert_same(found[:, -1], expected[:, -1], family_noise("llama-gqa"), "logits")
    assert far(found[:, -1], before[:, -1]) > 0.01


@pytest.mark.parametrize("name", ["mpt", "falcon", "falcon-alibi", "smollm3-nope"])
def test_positions_of_a_model_without_rope_cannot_be_moved(name):
    lm = posbench.load(build(name))
    assert not can_move(lm)
    with (
        refused("position ids of a span", lm.name, allowed="RoPE", hint="model=tiny"),
        move_positions(lm, LENGTHS, SPANS, TARGETS),
    ):
        pass


def test_what_does_not_fit_is_refused(monkeypatch):
    lm = posbench.load(build("llama"))
    with (
        MsPoE().applied(lm),
        refused(
            "method", "position ids of a span", allowed=("ms_poe", "moice"), hint="last"
        ),
        move_positions(lm, LENGTHS, SPANS, TARGETS),
    ):
        pass
    with (
        pytest.raises(ValueError, match="span"),
        crop_mask(lm, LENGTHS, [(0, 3), (30, 34)], [0]),
    ):
        pass
    with (
        pytest.raises(ValueError, match="1 spans for 2"),
        crop_mask(lm, LENGTHS, [(0, 3)], [0]),
    ):
        pass
    with pytest.raises(ValueError, match="3 rows"), crop_mask(lm, LENGTHS, SPANS, [0]):
        lm.logits(torch.ones(3, TOTAL, dtype=torch.long))
    monkeypatch.setattr(
        lm.model.config, "_attn_implementation_internal", "flash_attention_2"
    )
    for block in (
        crop_mask(lm, LENGTHS, SPANS, [0]),
        move_positions(lm, LENGTHS, SPANS, TARGETS),
    ):
        with (
            refused(
                "model.attention",
                "flash_attention_2",
                allowed=("sdpa", "eager"),
                hint="model.attention=sdpa",
            ),
            block,
        ):
            pass
