"""What a run is told to take, against the run: tokens that the model reads, operations and bytes."""

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from posbench.methods import Unmodified
from posbench.model.load import load, outline, reader
from posbench.model.store import Store
from posbench.pipeline import estimate
from posbench.pipeline.compose import composed
from posbench.pipeline.config import trial
from posbench.pipeline.execute import execute
from posbench.pipeline.ready import prepared, ready
from posbench.pipeline.stages import intervene
from posbench.run import answers
from posbench.run.cost import Costs, Work
from posbench.run.shared import Subject
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
    config = ready(composed(*FEW, *overrides)).config
    run = prepared(config, {}, (), QUIET)
    run.lm = outline(config.model, reader(config.model), "cpu")
    return config, estimate.work(config, run)


@pytest.mark.parametrize("share", ["4GiB", "2MiB", "null"])
@pytest.mark.parametrize("method", ["scale_channel", "ms_poe"])
def test_tokens_are_those_that_the_model_reads(share, method, tiny, monkeypatch):
    config, works = told(
        f"runtime.share={share}", f"method={method}", "runtime.batch_size=4"
    )
    held = [0]
    fill = Store.fill
    monkeypatch.setattr(
        Store,
        "fill",
        lambda self, *given: (held.append(self.layout.size), fill(self, *given)),
    )
    for stage, work in zip((intervene, answers), works, strict=True):
        run = prepared(config, {}, (), QUIET)
        run.lm = tiny
        run.evaluation = config.task.evaluation()
        lm, before, held[:] = run.lm, run.lm.read, [0]
        methods = {UNMODIFIED: Unmodified(), method: trial(config)}
        asked = [Subject(run, *each) for each in methods.items()]
        asks, compute = stage.planned(asked, run.encode(run.evaluation))
        for batch in asks.batches:
            compute(batch)
        assert lm.read - before == work.computed and asks.asked == work.tokens
        assert work.held == max(held) and bool(work.held) == (share != "null")
        assert work.prompts == 12 and (work.computed < work.tokens) == (
            (method, share != "null") == ("scale_channel", True)
        )


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
        "posbench.pipeline.execute.preflight", lambda *args: None
    )  # reads a few tokens
    monkeypatch.setattr("posbench.run.base.load", lambda *args, **kwargs: tiny)
    before = tiny.read
    execute(config, command="test", console=QUIET)
    assert sum(work.computed for work in works) == tiny.read - before > 0


def test_many_prompts_are_told_from_some(monkeypatch):
    _, (_, whole) = told("task.limit=40")
    monkeypatch.setattr(estimate, "LOOK", 3000)
    _, (_, some) = told("task.limit=40")
    assert some.prompts == whole.prompts == 240
    for name in ("tokens", "computed", "pairs", "fed", "later"):
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
    prompts = Work(
        "",
        batch,
        batch * past,
        batch * past,
        batch * past * (past + 1) // 2,
        batch=batch * past,
    )
    assert kept == shape.cached(prompts)
    assert shape.weights == sum(p.nbytes for p in lm.model.parameters())
    # A kernel multiplies whole squares, of which the model needs the half.
    square = Work("", batch, batch * past, batch * past, batch * past * past)
    assert first.get_total_flops() == pytest.approx(
        shape.prefill(square), rel=0.03
    )  # norms and biases are no products
    with torch.no_grad(), FlopCounterMode(display=False) as later:
        for _ in range(new):
            out = lm.model(
                ids[:, :1], past_key_values=out.past_key_values, use_cache=True
            )
    pairs = batch * (new * past + new * (new + 1) // 2)
    replies = Work("", 0, 0, 0, 0, fed=batch * new, later=pairs)
    assert later.get_total_flops() == pytest.approx(
        shape.flops(replies), rel=0.03
    )  # norms and biases are no products


def test_time_is_the_formula_by_hand():
    shape = Costs(7, 5, 1, layers=2, heads=3, cache=8, stored=4, width=2)
    work = Work(
        "", 10, 900, 600, pairs=1000, steps=20, fed=190, later=5000, batch=64, held=300
    )
    flops = 2 * 5 * 600 + 4 * 2 * 3 * 1000 + 2 * 1 * 10
    assert shape.prefill(work) == flops
    assert shape.flops(work) == flops + 2 * 5 * 190 + 4 * 2 * 3 * 5000 + 2 * 190
    read = 20 * 7 * 2 + 5000 * 8 * 2
    assert shape.seconds(work) == pytest.approx(
        flops / (0.4 * 989e12) + read / (0.6 * 3.35e12)
    )
    assert shape.bytes(work) == 14 + 64 * 16 + 300 * 4 and shape.devices(work) == 1
