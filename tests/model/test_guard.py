"""Numbers that are none stop a call and name the layer; one thread at a time on a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import posbench
from posbench.errors import UserError
from posbench.measure.flow import flow
from posbench.measure.items import attention_to_thirds
from posbench.measure.losses import candidate_losses
from posbench.measure.scores import score_maps
from posbench.measure.states import Strings, average_states, moments
from posbench.methods import ScaleChannel
from posbench.methods.layer_scaling import LayerScaling
from posbench.methods.position_interpolation import PositionInterpolation
from posbench.model.guard import check_finite, probe
from posbench.model.lm import LM
from posbench.search.gradient import answer_loss
from posbench.search.router import text_loss
from posbench.stats.frames import UNMODIFIED
from tests.conftest import Result, run_folders
from tests.messages import assert_names, refused
from tests.models import build
from yu2025.hidden_perturbation import HiddenPerturbation

IDS = list(range(1, 12))
PAIR = (IDS, [3, 4])
STRINGS = Strings(count=20, length=12, alphabet="tokens")
METHOD = ScaleChannel(channel=3, factor=0.0, layers=(0, 1))
CALLS: dict[str, Callable[[LM], Any]] = {
    "generate": lambda lm: lm.generate([IDS], max_new_tokens=2),
    "generate_replies": lambda lm: lm.generate_replies([IDS], max_new_tokens=2),
    "logits": lambda lm: lm.logits(torch.tensor([IDS])),
    "continuations": lambda lm: lm.continuations([IDS], [[[3], [4, 5]]]),
    "candidate_losses": lambda lm: candidate_losses(lm, [PAIR], [METHOD]),
    "attention": lambda lm: attention_to_thirds(lm, [IDS], [[0]]),
    "flow": lambda lm: flow(lm, IDS, 2, 4),
    "score_maps": lambda lm: score_maps(lm, [[IDS]]),
    "average_states": lambda lm: average_states(lm, STRINGS),
    "moments": lambda lm: moments(lm, STRINGS, "residual", [3], 2, lambda n: None),
    "gradient": lambda lm: answer_loss(
        lm, torch.ones(lm.layers, requires_grad=True), [PAIR]
    ),
    "router": lambda lm: text_loss(lm, IDS),
    "probe": lambda lm: probe(lm, IDS),
}


@contextmanager
def damaged(lm: LM, name: str, value: float) -> Iterator[None]:
    parameter = dict(lm.model.named_parameters())[name]
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.view(-1)[:] = value
    try:
        yield
    finally:
        with torch.no_grad():
            parameter.copy_(kept)


def _hooks(lm: LM) -> int:
    # The library leaves some of its own in a model that was once asked for its hidden states.
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in lm.model.modules()
    )


@pytest.mark.parametrize("name", CALLS)
def test_every_call_stops_and_names_model_layer_and_dtype(name: str, tiny: LM) -> None:
    before = CALLS[name](tiny)
    hooks = _hooks(tiny)
    where = ("attention", "layer 3") if name == "probe" else ("layer 2",)
    with (
        damaged(tiny, "model.layers.2.mlp.down_proj.weight", float("nan")),
        refused("model", "tiny", allowed=("float32", *where, "NaN")) as told,
    ):
        CALLS[name](tiny)
    assert told.value.status == 2
    if name.startswith("generate"):
        assert CALLS[name](tiny) == before
    assert _hooks(tiny) == hooks


@pytest.mark.parametrize(
    ("parameter", "value", "where"),
    [
        ("model.embed_tokens.weight", float("inf"), "embedding"),
        ("model.layers.0.input_layernorm.weight", float("nan"), "layer 0"),
        ("lm_head.weight", float("nan"), "head"),
        # Their squares overflow in the norm, which then answers 0: finite, and nothing.
        ("model.layers.3.mlp.down_proj.weight", 1e30, "equal"),
    ],
)
def test_where_the_numbers_end(parameter: str, value: float, where: str) -> None:
    model = build("llama").float()
    lm = posbench.load(model, name="mine")
    with (
        damaged(lm, parameter, value),
        refused("model", "mine", allowed=("float32", where)),
    ):
        lm.logits(torch.tensor([IDS]))


def test_a_shut_token_is_legal_and_a_row_of_nothing_is_not() -> None:
    shut = torch.tensor([[0.0, 1.0, float("-inf")]])
    assert check_finite(shut) is shut
    for row in (
        [float("nan"), 0.0],
        [float("inf"), 0.0],
        [float("-inf")] * 2,
        [0.0, 0.0],
    ):
        bad = torch.tensor([[0.0, 1.0], row])
        with pytest.raises(Exception, match=r"NaN|equal"):
            check_finite(bad)
        check_finite(bad, torch.tensor([True, False]))


def test_a_kernel_that_swallows_nan_is_looked_into(tiny: LM) -> None:
    # On a CPU sdpa makes numbers of queries that are NaN: the logits alone do not show it.
    with (
        damaged(tiny, "model.layers.1.self_attn.q_proj.weight", float("nan")),
        refused(
            "model", "tiny", allowed=("attention", "layer 1", "NaN"), hint="milder"
        ),
    ):
        probe(tiny, IDS)
    with (
        refused(
            "method.scale", 1e-300, allowed=("1e-06", "1000000"), hint="method.scale=1"
        ),
        PositionInterpolation(scale=1e-300).applied(tiny),
    ):
        pass


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_parameters_are_looked_at_when_loaded(
    value: float, tmp_path: Path, checkpoint: Path
) -> None:
    lm = posbench.load(checkpoint)
    with damaged(lm, "model.layers.1.self_attn.q_proj.weight", value):
        lm.model.save_pretrained(tmp_path)
        lm.tokenizer.save_pretrained(tmp_path)  # type: ignore[union-attr]
        with refused(
            "model",
            "model",
            allowed=("model.layers.1.self_attn.q_proj.weight", "NaN"),
            hint="checkpoint",
        ):
            posbench.load(lm.model)
    with refused(
        "model",
        "mine",
        allowed=("model.layers.1.self_attn.q_proj.weight", "NaN"),
        hint="checkpoint",
    ):
        posbench.load(tmp_path, name="mine")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["method.factor=1e38"],
            ["model = 'tiny'", "layer", "float32", "milder", "scale_channel"],
        ),
        (
            ["method=position_interpolation", "method.scale=1e-300"],
            ["method.scale = 1e-300", "above 1e-06"],
        ),
        (
            ["study=crop_mask", "model=tiny", "model.path={nan}"],
            ["model = 'tiny'", "model.embed_tokens.weight", "NaN"],
        ),
        (
            [
                "stages=[evaluate]",
                "model=tiny",
                "model.path={big}",
                "model.dtype=bfloat16",
            ],
            [
                "model = 'tiny'",
                "logits of a token are equal",
                "set model.dtype=float32",
            ],
        ),
    ],
)
def test_a_run_stops_before_there_is_a_folder(
    args: list[str],
    words: list[str],
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
    tiny: LM,
) -> None:
    for name, value in (("nan", float("nan")), ("big", 1e30)):
        if f"{{{name}}}" in " ".join(args):
            with damaged(tiny, "model.embed_tokens.weight", value):
                tiny.model.save_pretrained(tmp_path / name)
                tiny.tokenizer.save_pretrained(tmp_path / name)  # type: ignore[union-attr]
    result = posbench(
        *(a.format(nan=tmp_path / "nan", big=tmp_path / "big") for a in args),
        "task.limit=2",
    )
    assert (
        result.status == 2
        and result.err.count("\n") == 1
        and run_folders(outputs) == []
    )
    assert [word for word in words if word not in result.err] == [], result.err


# Threads


def in_thread(work: Callable[[], Any]) -> BaseException | None:
    """What a thread raised."""
    told: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except (UserError, RuntimeError) as error:
            told.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return told[0] if told else None


def state(lm: LM) -> dict[str, Any]:
    kept = {n: dict(vars(m)) for n, m in lm.model.named_modules()}
    return {
        n: {k: v for k, v in own.items() if not k.startswith("_")}
        for n, own in kept.items()
    }


def test_a_second_thread_is_refused_and_nothing_is_mixed(tiny: LM) -> None:
    before = CALLS["generate"](tiny)
    kept = state(tiny)

    def block() -> None:
        with METHOD.applied(tiny):
            pass

    with METHOD.applied(tiny):
        inside = CALLS["generate"](tiny)
        for work in (block, *(lambda call=call: call(tiny) for call in CALLS.values())):
            error = in_thread(work)
            assert isinstance(error, UserError), error
            assert (error.field, error.value) == ("model", "tiny")
            assert_names(error.hint, "another thread", "scale_channel")
        with PositionInterpolation(scale=1.5).applied(
            tiny
        ):  # nested in one thread: legal
            CALLS["generate"](tiny)
        assert CALLS["generate"](tiny) == inside
    assert CALLS["generate"](tiny) == before and state(tiny) == kept
    assert in_thread(lambda: CALLS["generate"](tiny)) is None


def test_threads_that_meet_at_a_barrier(tiny: LM) -> None:
    before = CALLS["generate"](tiny)
    kept = state(tiny)
    wins = []
    errors = []
    barrier = threading.Barrier(4)
    inside = threading.Barrier(4)

    def work() -> None:
        barrier.wait(60)
        try:
            with METHOD.applied(tiny):
                inside.wait(60)
                wins.append(CALLS["generate"](tiny))
        except UserError as error:
            errors.append(error)
            inside.wait(60)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(wins) == 1 and len(errors) == 3
    with METHOD.applied(tiny):
        assert CALLS["generate"](tiny) == wins[0]
    assert CALLS["generate"](tiny) == before and state(tiny) == kept


def test_crossed_exits_raise_and_the_model_is_itself_again(tiny: LM) -> None:
    before = CALLS["generate"](tiny)
    kept = state(tiny)
    one = METHOD.applied(tiny)
    other = PositionInterpolation(scale=2.0).applied(tiny)
    one.__enter__()
    other.__enter__()
    with pytest.raises(
        RuntimeError, match="scale_channel was left before position_interpolation"
    ):
        one.__exit__(None, None, None)
    other.__exit__(None, None, None)
    assert CALLS["generate"](tiny) == before and state(tiny) == kept


def test_an_exception_in_a_block_lets_others_in(tiny: LM) -> None:
    with pytest.raises(ValueError, match="mine"), METHOD.applied(tiny):
        raise ValueError("mine")
    assert in_thread(lambda: CALLS["logits"](tiny)) is None


def test_a_batch_that_hooks_read_is_checked(tiny: LM) -> None:
    with (
        damaged(tiny, "model.layers.2.mlp.down_proj.weight", float("nan")),
        refused("model", "tiny", allowed=("layer 2", "NaN")),
    ):
        HiddenPerturbation(length=16, channel=3)._channels(
            tiny, [list(range(16))], UNMODIFIED, [3]
        )


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_model_has_the_method_inside_the_block(whole: bool) -> None:
    lm, compiled = posbench.load(build("llama")), posbench.load(build("llama"))
    if whole:
        compiled.model.compile(backend="eager")
    else:
        compiled.model.forward = torch.compile(compiled.model.forward, backend="eager")
    ids = torch.arange(1, 33)[None]
    mask = torch.ones_like(ids)
    # What is compiled here is the unmodified model.
    with torch.no_grad():
        before = compiled.model(ids, attention_mask=mask).logits
        for method in (PositionInterpolation(scale=3.0), LayerScaling.example(lm)):
            with method.applied(lm):
                expected = lm.logits(ids, mask)
            with method.applied(compiled):
                found = compiled.model(ids, attention_mask=mask).logits
            torch.testing.assert_close(found, expected)
            assert (found - before).abs().max() > 0.01
        assert torch.equal(compiled.model(ids, attention_mask=mask).logits, before)
