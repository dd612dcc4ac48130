"""What a run is told to take, against the run: tokens that the model reads, operations and bytes."""

from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from posbench.methods import Unmodified
from posbench.model.load import load, load_without_weights, read_checkpoint
from posbench.model.store import PrefixStore
from posbench.pipeline import estimate
from posbench.pipeline.compose import compose_one
from posbench.pipeline.execute import execute
from posbench.pipeline.prepare import build_run, prepare
from posbench.pipeline.stages.intervene import plan_attention
from posbench.run.cost import Costs, WorkEstimate
from posbench.run.plan import Subject
from posbench.run.replies import plan_replies
from posbench.stats.frames import UNMODIFIED
from tests.models import build

FEW = [
    "model=tiny",
    "task.limit=2",
    "task.positions=[0,8,15]",
    "task.pairs=16",
    "stages=[intervene,evaluate]",
]
QUIET = Console(quiet=True)


def told(*overrides):
    config = prepare(compose_one(*FEW, *overrides)).config
    run = build_run(config, QUIET)
    run.lm = load_without_weights(config.model, read_checkpoint(config.model), "cpu")
    return config, estimate.estimate_run(config, run)


@pytest.mark.parametrize("share", ["4GiB", "2MiB", "null"])
@pytest.mark.parametrize("method", ["scale_channel", "ms_poe"])
def test_tokens_are_those_that_the_model_reads(share, method, tiny, monkeypatch):
    config, works = told(
        f"runtime.share={share}", f"method={method}", "runtime.batch_size=4"
    )
    held = [0]
    fill = PrefixStore.fill
    monkeypatch.setattr(
        PrefixStore,
        "fill",
        lambda self, *given: (held.append(self.layout.size), fill(self, *given)),
    )
    for make_plan, work in zip((plan_attention, plan_replies), works, strict=True):
        run = build_run(config, QUIET)
        run.lm = tiny
        run.evaluation = config.task.evaluation()
        lm, before, held[:] = run.lm, run.lm.tokens_read, [0]
        methods = {UNMODIFIED: Unmodified(), method: config.method_under_test().trial()}
        asked = [Subject(run, *each) for each in methods.items()]
        asks = make_plan(asked, run.prompts.encode(run.evaluation))
        for batch in asks.batches:
            asks.answer(batch)
        assert (
            lm.tokens_read - before == work.computed_tokens
            and asks.requested_tokens == work.tokens
        )
        # Under one method alone these prompts have nothing in common.
        is_shared = (method, share != "null") == ("scale_channel", True)
        assert work.prefix_tokens == max(held)
        assert bool(work.prefix_tokens) == is_shared
        assert work.prompts == 12 and (work.computed_tokens < work.tokens) == is_shared


STUDIES = [
    ["study=attention_to_gold", "study.examples=2", "study.items=[8]"],
    ["study=crop_mask", "study.examples=2", "study.crossed=true"],
    ["study=doubling", "study.examples=2"],
    ["study=channel_subtraction", "study.examples=2"],
    ["study=hidden_perturbation", "study.texts=6", "study.length=200"],
    ["study=score_map", "study.samples=6"],
    ["study=rope_curves", "study.prompts=6"],
]


@pytest.mark.slow
@pytest.mark.parametrize("given", STUDIES, ids=lambda given: given[0])
def test_studies_read_what_they_tell(given, tiny, tmp_path, monkeypatch):
    given = [
        *given,
        "task.positions=[0%,50%,100%]",
        "stages=[study]",
        f"runtime.outputs={tmp_path}",
    ]
    config, works = told(*given)
    monkeypatch.setattr(
        "posbench.pipeline.execute.probe_model", lambda *args: {}
    )  # reads a few tokens
    monkeypatch.setattr("posbench.run.base.load", lambda *args, **kwargs: tiny)
    before = tiny.tokens_read
    execute(config, command="test", console=QUIET)
    assert sum(work.computed_tokens for work in works) == tiny.tokens_read - before > 0


@pytest.mark.parametrize(
    "method",
    [
        ("pine",),
        ("calibrated_attention",),
        ("position_engineering", "method.theta_a=1", "method.theta_b=2"),
    ],
    ids=lambda method: method[0],
)
def test_a_method_that_reads_items_is_timed_on_cut_prompts(method, tiny):
    """A large model reads cut prompts, whose items no task states, and the run's own are as before."""
    name, *constants = method
    config = prepare(compose_one(*FEW, f"method={name}", *constants)).config
    run = build_run(config, QUIET)
    run.lm = tiny
    known = tiny.items
    speed = estimate.measure_speed(run, Costs.of(tiny), max_tokens=64, max_seconds=0)
    assert speed.operation > 0 and tiny.items is known


def test_many_prompts_are_told_from_some(monkeypatch):
    _, (_, whole) = told("task.limit=40")
    monkeypatch.setattr(estimate, "ESTIMATE_CHARACTERS", 3000)
    _, (_, some) = told("task.limit=40")
    assert some.prompts == whole.prompts == 240
    for name in (
        "tokens",
        "computed_tokens",
        "attention_pairs",
        "decoded_tokens",
        "decoded_pairs",
    ):
        assert getattr(some, name) == pytest.approx(getattr(whole, name), rel=0.03), (
            name
        )


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma", "mpt", "gpt_neox"])
def test_operations_and_bytes_are_those_of_a_forward(family):
    lm = load(build(family))
    lm.model.set_attn_implementation(
        "eager"
    )  # whose products torch counts on every device
    shape, (batch, past, new) = Costs.of(lm), (2, 40, 3)
    ids = torch.randint(0, 20, (batch, past))
    with torch.no_grad(), FlopCounterMode(display=False) as first:
        out = lm.model(ids, use_cache=True, logits_to_keep=1)
    kept = sum(
        t.nbytes
        for layer in out.past_key_values.layers
        for t in (layer.keys, layer.values)
    )
    prompts = WorkEstimate(
        "",
        batch,
        batch * past,
        batch * past,
        batch * past * (past + 1) // 2,
        batch_tokens=batch * past,
    )
    assert kept == shape.cache_bytes(prompts)
    assert shape.weight_bytes == sum(p.nbytes for p in lm.model.parameters())
    # A kernel multiplies whole squares, of which the model needs the half.
    square = WorkEstimate("", batch, batch * past, batch * past, batch * past * past)
    assert first.get_total_flops() == pytest.approx(
        shape.prefill_flops(square), rel=0.03
    )  # norms and biases are no products
    with torch.no_grad(), FlopCounterMode(display=False) as later:
        for _ in range(new):
            out = lm.model(
                ids[:, :1], past_key_values=out.past_key_values, use_cache=True
            )
    pairs = batch * (new * past + new * (new + 1) // 2)
    replies = WorkEstimate(
        "", 0, 0, 0, 0, decoded_tokens=batch * new, decoded_pairs=pairs
    )
    assert later.get_total_flops() == pytest.approx(
        shape.flops(replies), rel=0.03
    )  # norms and biases are no products


def test_time_is_the_formula_by_hand():
    shape = Costs(
        7,
        5,
        1,
        layers=2,
        query_width=3,
        cache_numbers=8,
        stored_token_bytes=4,
        number_bytes=2,
    )
    work = WorkEstimate(
        "",
        10,
        900,
        600,
        attention_pairs=1000,
        decode_steps=20,
        decoded_tokens=190,
        decoded_pairs=5000,
        batch_tokens=64,
        prefix_tokens=300,
    )
    flops = 2 * 5 * 600 + 4 * 2 * 3 * 1000 + 2 * 1 * 10
    assert shape.prefill_flops(work) == flops
    assert shape.flops(work) == flops + 2 * 5 * 190 + 4 * 2 * 3 * 5000 + 2 * 190
    # So small a model waits for the program: 0.7 ms a layer.
    prefills = flops / (0.4 * 989e12)
    assert shape.seconds(work) == pytest.approx(prefills + 20 * 2 * 0.7e-3)
    large = replace(shape, cache_numbers=8 * 10**9)
    read = 20 * 7 * 2 + 5000 * 8e9 * 2
    assert large.seconds(work) == pytest.approx(prefills + read / (0.6 * 3.35e12))
    assert (
        shape.memory_bytes(work) == 14 + 64 * 16 + 300 * 4 and shape.devices(work) == 1
    )
