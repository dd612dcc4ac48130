"""Methods one inside the other: order, neutral pairs, restoration, and a brute-force recomputation."""

import inspect
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import permutations

import pytest
import torch

import posbench
from posbench.methods import Method, ScaleChannel, Unmodified
from posbench.methods.attention_buckets import AttentionBuckets
from posbench.methods.composed import Composed
from posbench.methods.layer_scaling import LayerScaling
from posbench.methods.ms_poe import MsPoE
from posbench.methods.position_interpolation import PositionInterpolation
from posbench.model.hooks import cache_name, replace_attribute
from posbench.pipeline.compose import compose_one
from posbench.pipeline.config import check_config
from tests.conftest import config_of
from tests.messages import refused
from tests.models import LAYERS, build
from tests.parity.test_families import Memory
from tests.parity.test_methods import METHODS
from tests.parity.test_rope import (
    BASES,
    PROMPT,
    SCALES,
    STEPS,
    attentions,
    frequencies,
    prompts,
    through_posbench,
)
from tests.rounding import SLACK, assert_same, family_noise

NAMES = sorted(set(METHODS) - {"none"})
CHANNEL = dict(channel=(5, 9), factor=-1.0, layers=(1, 2))


@pytest.fixture(scope="module")
def models():
    return {name: posbench.load(build(name)) for name in ("llama", "llama-gqa")}


@pytest.mark.parametrize("family", ["llama", "llama-gqa"])
@pytest.mark.parametrize("pair", list(permutations(NAMES, 2)), ids="-".join)
def test_any_neutral_pair_changes_nothing(pair, family, models):
    lm, (ids, mask) = models[family], prompts(True)
    before = lm.logits(ids, mask)
    parts = {name: METHODS[name].cls.example(lm) for name in pair}
    both = Composed(parts=parts).neutral()
    for row, row_mask in zip(ids, mask.bool(), strict=True):
        lm.items.add(row[row_mask].tolist(), [(2, 9), (9, 15)])
    first, second = (parts[name].needs for name in pair)
    if first.by_hand and first.rope and second.rope:
        with (
            refused("method", allowed=("ms_poe", "moice"), hint="last"),
            both.applied(lm),
        ):
            pass
        assert torch.equal(lm.logits(ids, mask), before)
        return
    logits, steps, tokens = through_posbench(lm, both, ids, mask)
    whole = torch.cat([mask, torch.ones(len(ids), STEPS, dtype=torch.long)], dim=1)
    noise = family_noise(family)
    assert_same(logits[mask.bool()], before[mask.bool()], noise, "logits")
    assert_same(steps, lm.logits(tokens, whole)[:, PROMPT - 1 : -1], noise, "logits")
    assert torch.equal(lm.logits(ids, mask), before)


@torch.no_grad()
def two_attentions(model, ids, mask, *, scales, first_row):
    """Logits of one forward without cache: every layer rotates at position / scale, by tables made here, and
    the chosen ones run once on their input and once on the scaled input with the values of the first run;
    rows from ``first_row`` on are the second run's."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def wrap(number, module, scale):
        forward, signature = module.forward, inspect.signature(module.forward)

        def call(*args, **kwargs):
            bound = signature.bind(*args, **kwargs).arguments
            arguments = {k: v for k, v in bound.items() if k != "kwargs"} | bound.get(
                "kwargs", {}
            )
            angles = torch.stack(
                [
                    torch.outer(row.float() / scale, frequencies(module))
                    for row in positions
                ]
            ).repeat(1, 1, 2)
            arguments["position_embeddings"] = (angles.cos(), angles.sin())
            first = Memory()
            base = forward(**arguments | {cache_name(arguments): first})
            if not CHANNEL["layers"][0] <= number <= CHANNEL["layers"][1]:
                return base
            scaled = arguments["hidden_states"].clone()
            scaled[..., list(CHANNEL["channel"])] *= CHANNEL["factor"]
            kept = Memory({"value": first.kept["value"]})
            second = forward(
                **arguments | {cache_name(arguments): kept, "hidden_states": scaled}
            )
            return (
                torch.cat([base[0][:, :first_row], second[0][:, first_row:]], dim=1),
                *base[1:],
            )

        return replace_attribute(module, "forward", call)

    with ExitStack() as stack:
        for number, (module, scale) in enumerate(
            zip(attentions(model), scales, strict=True)
        ):
            stack.enter_context(wrap(number, module, scale))
        return model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left-padded"])
@pytest.mark.parametrize(
    "name", ["llama", "llama-gqa", "mistral-window", "qwen2", "qwen3"]
)
def test_layer_scaling_with_scale_channel_equals_two_attentions(name, padded):
    model = build(name)
    both = Composed(
        parts={
            "layer_scaling": LayerScaling(scales=SCALES),
            "scale_channel": ScaleChannel(**CHANNEL),
        }
    )
    ids, mask = prompts(padded)
    prefill, steps, tokens = through_posbench(posbench.load(model), both, ids, mask)
    whole = torch.cat([mask, torch.ones(len(ids), STEPS, dtype=torch.long)], dim=1)
    expected = two_attentions(model, tokens, whole, scales=SCALES, first_row=PROMPT - 1)
    noise = family_noise(name)
    assert_same(
        prefill[mask.bool()], expected[:, :PROMPT][mask.bool()], noise, "logits"
    )
    assert_same(steps, expected[:, PROMPT - 1 : -1], noise, "logits")
    for other in (
        two_attentions(model, tokens, whole, scales=SCALES, first_row=tokens.shape[1]),
        two_attentions(
            model, tokens, whole, scales=(1.0,) * LAYERS, first_row=PROMPT - 1
        ),
    ):
        effect = (expected - other)[:, PROMPT - 1 :].abs().max()
        assert effect > 100 * SLACK * noise, "one of the two has no effect to test"


def test_position_scales_multiply():
    lm, (ids, mask) = posbench.load(build("llama-gqa")), prompts(True)
    parts = {
        "position_interpolation": PositionInterpolation(scale=1.5),
        "layer_scaling": LayerScaling(scales=SCALES),
    }
    with LayerScaling(scales=tuple(1.5 * s for s in SCALES)).applied(lm):
        expected = lm.logits(ids, mask)
    for order in (parts, dict(reversed(parts.items()))):
        with Composed(parts=order).applied(lm):
            found = lm.logits(ids, mask)
        assert_same(
            found[mask.bool()],
            expected[mask.bool()],
            family_noise("llama-gqa"),
            "logits",
        )


@pytest.mark.parametrize(
    "other",
    [
        LayerScaling(scales=SCALES),
        ScaleChannel(**CHANNEL),
        MsPoE(ratios=(1.2, 1.8), first_layer=1),
    ],
    ids=["layer_scaling", "scale_channel", "ms_poe"],
)
def test_buckets_around_another_method_mix_its_runs(other):
    """The same as a bucket of one base at a time around that method, mixed afterwards; padding and cached
    decoding included."""
    lm, (ids, mask) = posbench.load(build("llama-gqa")), prompts(True)
    parts = {"attention_buckets": AttentionBuckets(bases=BASES), "other": other}
    prefill, steps, tokens = through_posbench(lm, Composed(parts=parts), ids, mask)
    found = []
    for base in BASES:
        one = Composed(
            parts={"attention_buckets": AttentionBuckets(bases=(base,)), "other": other}
        )
        with one.applied(lm), torch.no_grad():
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            out = lm.model(
                ids, attention_mask=mask, position_ids=positions, use_cache=True
            )
            later = [out.logits[:, -1:]]
            seen = mask
            for step in range(STEPS - 1):
                seen = torch.cat(
                    [seen, torch.ones(len(ids), 1, dtype=torch.long)], dim=1
                )
                given = tokens[:, PROMPT + step : PROMPT + step + 1]
                at = seen.sum(-1, keepdim=True) - 1
                out = lm.model(
                    given,
                    attention_mask=seen,
                    position_ids=at,
                    past_key_values=out.past_key_values,
                )
                later.append(out.logits)
        found.append((lm_logits(lm, one, ids, mask), torch.cat(later, dim=1)))
    whole, generated = (torch.stack(part, dim=1) for part in zip(*found, strict=True))
    mix = AttentionBuckets(bases=BASES).mix
    noise = family_noise("llama-gqa")
    assert_same(prefill[mask.bool()], mix(whole)[mask.bool()], noise, "logits")
    assert_same(steps, mix(generated), noise, "logits")


def lm_logits(lm, found, ids, mask):
    with found.applied(lm):
        return lm.logits(ids, mask)


@dataclass(frozen=True, kw_only=True)
class Noted(Unmodified):
    """Writes down when it begins and ends."""

    name: str
    diary: list[str]

    @contextmanager
    def changed(self, lm):
        self.diary.append(f"+{self.name}")
        try:
            yield
        finally:
            self.diary.append(f"-{self.name}")


def test_the_first_part_is_the_outermost_also_after_an_exception():
    diary: list[str] = []
    parts: dict[str, Method] = {name: Noted(name=name, diary=diary) for name in "abc"}
    with (
        pytest.raises(RuntimeError, match="inside"),
        Composed(parts=parts).applied(posbench.load(build("llama"))),
    ):
        raise RuntimeError("inside")
    assert diary == ["+a", "+b", "+c", "-c", "-b", "-a"]


def test_a_part_that_does_not_fit_leaves_the_model_alone():
    lm, (ids, mask) = posbench.load(build("llama")), prompts(False)
    before = lm.logits(ids, mask)
    parts = {
        "layer_scaling": LayerScaling(scales=SCALES),
        "scale_channel": ScaleChannel(channel=4000, factor=0.0, layers=(0, 1)),
    }
    both = Composed(parts=parts)
    with (
        refused(
            "method.parts.scale_channel.channel",
            [4000],
            allowed="47",
            hint="stages=[search]",
        ),
        both.applied(lm),
    ):
        pass
    assert torch.equal(lm.logits(ids, mask), before)
    assert (
        both.needs_prompt
        and not Composed(parts={"layer_scaling": parts["layer_scaling"]}).needs_prompt
    )


def test_the_command_line_builds_the_parts_in_order():
    config = config_of(
        "method=[position_interpolation,scale_channel]",
        "method.parts.scale_channel.factor=0.5",
        "method.parts.position_interpolation.scale=1.25",
        "stages=[evaluate]",
    )
    assert config.choice.name == "position_interpolation-scale_channel"
    expected = {
        "position_interpolation": PositionInterpolation(scale=1.25),
        "scale_channel": ScaleChannel(channel=15, factor=0.5, layers=(1, 3)),
    }
    parts = config.choice.build().parts
    assert parts == expected and list(parts) == list(expected)
    assert config.choice.classes == [Composed, PositionInterpolation, ScaleChannel]


@pytest.mark.parametrize(
    ("overrides", "field", "value", "hint"),
    [
        (
            ["method=[layer_scaling,scale_chanel]"],
            "method",
            "[layer_scaling,scale_chanel]",
            "scale_channel",
        ),
        (
            ["method=[scale_channel,scale_channel]"],
            "method",
            "[scale_channel,scale_channel]",
            (),
        ),
        (["method=[]"], "method", "[]", "posbench ls methods"),
        (
            ["method=[layer_scaling,scale_channel]", "method.factor=0"],
            "method.factor",
            0,
            "method.parts.NAME.factor=...",
        ),
        (
            [
                "method=[layer_scaling,scale_channel]",
                "method.parts.scale_channel.factr=0",
            ],
            "method.parts.scale_channel.factr",
            0,
            "method.parts.scale_channel.factor",
        ),
        (
            [
                "method=[scale_channel,layer_scaling]",
                "method.parts.layer_scaling.points=null",
            ],
            "method.parts.layer_scaling.points",
            None,
            ("stages=[search]", "method=layer_scaling"),
        ),
        (
            [
                "method=[layer_scaling,scale_channel]",
                "method.parts.scale_channel.last=0.5",
            ],
            "method.parts.scale_channel.last",
            0.5,
            "method.parts.scale_channel.last=1",
        ),
    ],
    ids=lambda case: case[-1] if isinstance(case, list) else None,
)
def test_mistakes_are_told_in_one_line(overrides, field, value, hint):
    with refused(field, value, hint=hint) as error:
        config_of(*overrides).method_under_test().trial()
    assert "\n" not in str(error.value)


def test_a_search_serves_its_part_of_a_list():
    both = "method=[layer_scaling,scale_channel]"
    channel = config_of(both)
    genetic = config_of(both, "search=genetic")
    assert (channel.target.name, genetic.target.name) == (
        "scale_channel",
        "layer_scaling",
    )
    assert (
        channel.stages
        == genetic.stages
        == ("search", "intervene", "evaluate", "report")
    )
    values = {"channel": 3, "factor": 0.5, "layers": (0, 1)}
    found = channel.choice.build(values, channel.target)
    assert found.parts["scale_channel"] == ScaleChannel(
        channel=3, factor=0.5, layers=(0, 1)
    )
    assert found.parts["layer_scaling"] == genetic.choice.build().parts["layer_scaling"]
    # What is typed stays.
    typed = config_of(both, "method.parts.scale_channel.channel=9")
    assert typed.target.pinned == {"channel": 9}
    assert typed.choice.build(values, typed.target).parts["scale_channel"].channel == 9


@pytest.mark.parametrize(
    ("overrides", "search", "hint"),
    [
        (
            ["method=[position_interpolation,ms_poe]"],
            "channel",
            ("method=scale_channel", "posbench ls searches"),
        ),
        (["method=[scale_channel,layer_scaling]"], "channel", "alone"),
        (["method=[attention_buckets,scale_channel]"], "channel", "alone"),
        (
            ["method=[layer_scaling,scale_channel]", "search=gradient"],
            "gradient",
            ("alone", "stages=[evaluate,report]"),
        ),
    ],
    ids=lambda case: "-".join(case) if isinstance(case, list) else None,
)
def test_lists_that_no_search_serves(overrides, search, hint):
    composed = replace(compose_one(*overrides), typed=())
    assert check_config(composed).stages == ("intervene", "evaluate", "report")
    methods = overrides[0].removeprefix("method=[").removesuffix("]").replace(",", "-")
    stages = ["search", "intervene", "evaluate", "report"]
    with refused("stages", stages, allowed=(methods, search), hint=hint):
        check_config(replace(composed, typed=("stages",)))
