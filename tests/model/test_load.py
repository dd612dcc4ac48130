"""Loading onto devices: plain, sharded, offloaded; and what low precision must not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import dispatch_model

import posbench
from posbench import paths
from posbench.cli.main import main
from posbench.errors import choices
from posbench.measure.items import attention_to_items
from posbench.measure.losses import candidate_losses
from posbench.measure.states import Strings, average_states
from posbench.methods import ScaleChannel
from posbench.methods.choice import all_choices
from posbench.model.guard import probe
from posbench.model.lm import LM
from posbench.model.load import default_dtype, load, model_config, read_checkpoint
from posbench.search.channel import ChannelSearch
from posbench.tasks import KVRetrieval
from posbench.tasks.kv_retrieval import WORDS
from tests.messages import refused
from tests.models import VOCABULARY, build
from tests.rounding import assert_same, log_probabilities, noise_floor

TASK = KVRetrieval(
    prompt="compact",
    records="words",
    pairs=6,
    limit=2,
    max_new_tokens=2,
    positions=(0, 3, 5),
)
SEARCH = ChannelSearch(
    strings=6,
    length=40,
    window=6,
    skip=2,
    alphabet="tokens",
    batch_size=4,
    factors=(0.0,),
)
PARTS = (
    "model.embed_tokens",
    "model.norm",
    "model.rotary_emb",
    "lm_head",
    *(f"model.layers.{i}" for i in range(4)),
)
OFFLOADED = {
    name: "disk" if name in ("model.layers.1", "model.layers.3") else "cpu"
    for name in PARTS
}
MAPS: dict[str, dict[str, Any]] = {
    "one device": {"device_map": {"": "cpu"}},
    "auto": {"device_map": "auto"},
    "layers on disk": {"device_map": OFFLOADED},
    "embedding and head on disk": {
        "device_map": OFFLOADED | {"model.embed_tokens": "disk", "lm_head": "disk"}
    },
    "little memory": {"device_map": "auto", "max_memory": {"cpu": "18KB"}},
}


def _everything(lm: LM) -> dict[str, Any]:
    """What the stages compute, with and without the method."""
    examples = TASK.examples("evaluation")
    encoded = [lm.encode(e.prompt) for e in examples]
    out: dict[str, Any] = dict(average_states(lm, SEARCH.drawn))
    pairs = [lm.answer_ids(e.prompt, e.answers[0]) for e in examples]
    found = SEARCH.statistics(out)
    out["losses"] = candidate_losses(
        lm, pairs, SEARCH.list_candidates(found, [(1, 2)], 5)
    )
    for name, factor in (("plain", 1.0), ("scaled", -1.0)):
        with ScaleChannel(channel=5, factor=factor, layers=(1, 3)).applied(lm):
            out[f"{name} text"] = lm.generate(
                [e.ids for e in encoded], max_new_tokens=2, batch_size=4
            )
            out[f"{name} attention"] = attention_to_items(lm, encoded, examples)
            out[f"{name} loss"] = lm.answer_loss(
                [e.prompt for e in examples], [e.answers[0] for e in examples]
            )
    return out


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> dict[str, Any]:
    return _everything(load(checkpoint))


@pytest.mark.parametrize("name", MAPS)
def test_sharded_and_offloaded_models_give_the_same_numbers(
    name: str, checkpoint: Path, plain: dict[str, Any]
) -> None:
    lm = load(checkpoint, **MAPS[name])
    places = set((getattr(lm.model, "hf_device_map", None) or {}).values())
    assert ("disk" in places) is (name not in ("one device", "auto"))
    assert lm.device == torch.device("cpu")
    found = _everything(lm)
    assert found.keys() == plain.keys()
    noise = noise_floor(
        load(checkpoint).model, torch.arange(5, 60)[None], log_probabilities
    )
    for key, value in plain.items():
        if isinstance(value, list):
            assert found[key] == value, key
        else:
            assert_same(found[key], value, noise, "a sharded model")
    # The method does something here, or the comparison would prove nothing.
    assert not np.allclose(
        plain["scaled attention"], plain["plain attention"], atol=1e-3
    )


def test_a_run_takes_the_device_map(
    tmp_path: Path, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = []
    monkeypatch.setattr(
        "posbench.run.base.load", lambda *a, **k: maps.append(load(*a, **k)) or maps[-1]
    )
    args = [a for a in small if not a.startswith("runtime.device=")]
    sharded = ["runtime.device_map=auto", "runtime.max_memory={cpu:18KB}"]
    for name, extra in (
        ("plain", ["runtime.device=cpu"]),
        ("sharded", sharded if not torch.cuda.is_available() else []),
    ):
        assert main([*args, *extra, f"runtime.outputs={tmp_path / name}"]) == 0
    assert "disk" in maps[1].model.hf_device_map.values() or torch.cuda.is_available()
    one, two = (
        sorted((tmp_path / name).glob("*/v*/*/predictions.jsonl"))
        for name in ("plain", "sharded")
    )
    rows = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (*one, *two)
    ]
    assert len(rows) == 2 and len(rows[0]) == 72 and rows[0] == rows[1]


def test_weights_that_do_not_fit_the_device(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14 GiB")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", full)
    with refused(
        "runtime.device",
        "cpu",
        allowed="random",
        hint=("runtime.device_map=auto", "model.dtype=bfloat16"),
    ):
        load(checkpoint, device="cpu")


def test_auto_is_float32_on_a_cpu_and_16_bits_on_a_gpu(
    tmp_path: Path, checkpoint: Path
) -> None:
    posbench.load(checkpoint).model.to(torch.bfloat16).save_pretrained(tmp_path)
    for file in checkpoint.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert load(tmp_path).model.dtype == torch.float32
    assert load(tmp_path, dtype="bfloat16").model.dtype == torch.bfloat16

    gpu = torch.device("cuda:0")
    facts = read_checkpoint(model_config(str(tmp_path))).facts
    for own, expected in (
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float32", "bfloat16"),
        (None, "bfloat16"),  # a config, or a GGUF file, that says nothing
    ):
        facts.dtype = own
        config = model_config(str(tmp_path))
        assert default_dtype(config, facts, gpu) == expected
        assert default_dtype(config, facts, torch.device("cpu")) == "float32"
    assert default_dtype(model_config("tiny"), facts, gpu) == "float32"


def test_a_typed_precision_wins_on_a_gpu(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is made up, and nothing is loaded: what transformers would be asked for."""
    from posbench.model import load as module

    monkeypatch.setattr(module, "torch_device", lambda _: torch.device("cuda"))
    asked = []

    def keep(*_: object, **settings: object) -> None:
        asked.append(settings["dtype"])
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", keep)
    for typed in ("auto", "float32", "float16"):
        with pytest.raises(KeyboardInterrupt):
            load(checkpoint, dtype=typed)
    assert asked == ["bfloat16", "float32", "float16"]


def test_averages_of_a_low_precision_model_are_summed_in_full(checkpoint: Path) -> None:
    """Against a float64 mean of the hidden states that transformers returns; a bfloat16 sum would be off by
    1e-2."""
    lm = load(checkpoint, dtype="bfloat16")
    strings = Strings(count=64, length=40, alphabet="tokens")
    found = average_states(lm, strings)["residual"]
    states = [
        torch.stack(
            lm.model(torch.tensor(rows), output_hidden_states=True).hidden_states
        )
        .double()
        .sum(1)
        for rows in np.array(strings.draw(lm)).reshape(8, 8, -1).tolist()
    ]
    expected = torch.stack(states).sum(0) / 64
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-5, rtol=1e-5)


def test_float16_that_overflows_is_refused() -> None:
    model = build("llama", dtype=torch.float16)
    lm = posbench.load(model)
    ids = list(range(1, min(20, VOCABULARY)))
    probe(lm, ids)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e4)
        model.model.layers[1].mlp.up_proj.weight.mul_(1e2)
    with refused(
        "model",
        "model",
        allowed=("float16", "layer 2"),
        hint=("model.dtype=bfloat16", "model.dtype=float32"),
    ):
        probe(lm, ids)
    probe(posbench.load(model.to(torch.bfloat16)), ids)
    assert not torch.isfinite(
        lm.model.to(torch.float16)(torch.tensor([ids])).logits
    ).all()


def test_an_answer_longer_than_the_window_is_refused_even_with_truncation(
    checkpoint: Path,
) -> None:
    lm = load(checkpoint, context_window=20)
    with refused("prompt length", 59, allowed=("0", "20"), hint="task.max_new_tokens"):
        lm.encode(" ".join(WORDS[:30]), truncation="middle", reserve=20)


@pytest.mark.parametrize("name", choices(paths.CONF / "method"))
def test_methods_on_a_model_whose_modules_accelerate_serves(name: str) -> None:
    """As with layers on several GPUs, it sends what each module gets to the module's device."""

    def logits(model: Any) -> torch.Tensor:
        lm = load(model)
        lm.items.add(range(5, 40), [(2, 9), (9, 15)])
        with all_choices([paths.CONF], {})[name].cls.example(lm).applied(lm):
            return lm.logits(torch.arange(5, 40)[None])

    assert logits(dispatch_model(build("llama"), {"": "cpu"}, force_hooks=True)).equal(
        logits(build("llama"))
    )


def test_what_is_no_model_is_refused() -> None:
    model = build("llama")
    with refused("source", "LlamaModel", allowed="logits", hint="causal"):
        load(model.model)
    wrapped = torch.nn.Sequential(model)
    for source in (wrapped, None, 123):
        with refused("source", type(source).__name__, allowed="a hub id", hint="wraps"):
            load(source)  # type: ignore[arg-type]
