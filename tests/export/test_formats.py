"""What a format wrote, loaded by the library that it is for, against the method in process."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers as hf

from posbench.errors import UserError
from posbench.export import base, checkpoint, lora
from posbench.export.fold import scaled_weights
from posbench.methods import Method
from posbench.methods.composed import Composed
from posbench.methods.layer_scaling import LayerScaling
from posbench.methods.moice import MoICE
from posbench.methods.ms_poe import MsPoE
from posbench.methods.position_interpolation import PositionInterpolation
from posbench.methods.rope_base import RopeBase
from posbench.methods.scale_channel import ScaleChannel
from posbench.model.load import load
from tests.messages import refused
from tests.models import BUILDERS, VOCABULARY, build
from tests.rounding import assert_same, family_noise, log_probabilities

SCALED = ScaleChannel(channel=(3, 7), factor=-1.5, layers=(1, 3), last="all")
INTERPOLATED = PositionInterpolation(scale=1.7)
OTHER_BASE = RopeBase(base=20000.0)
BOTH = Composed(parts={"position_interpolation": INTERPOLATED, "scale_channel": SCALED})
RANKS = Composed(
    parts={
        "a": SCALED,
        "b": ScaleChannel(channel=5, factor=2.0, layers=(0, 2), last="all"),
    }
)
"""Layers with one, two and three channels."""
FEW = (
    "llama-tied-llama3",
    "phi3-partial",
    "gpt_neox",
    "qwen3",
    "mpt-clip",
    "falcon-7b",
)
"""Biases and grouped keys; fused in blocks; fused in groups; normed; clipped; one key for all queries."""
PROMPTS = [
    torch.randint(
        1, VOCABULARY - 2, (n,), generator=torch.Generator().manual_seed(n)
    ).tolist()
    for n in (20, 31, 40)
]


def fix_of(model: hf.PreTrainedModel, method: Method, folder: Path) -> base.Fix:
    """A fix of a model whose own files are in a folder."""
    model.save_pretrained(folder)
    method.check(load(model))
    again = partial(load, copy.deepcopy(model))
    return base.Fix(load(model), method, str(folder), again, "float32", str(folder))


def measured(to: str, fix: base.Fix, folder: Path) -> base.Comparison:
    form = base.find_format(to)
    form.check(fix)
    folder.mkdir()
    form.write(fix, folder)
    return base.measure(form, fix, folder, PROMPTS)


@pytest.mark.parametrize("to", ["checkpoint", "lora"])
@pytest.mark.parametrize(
    "name",
    [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in BUILDERS],
)
def test_scaled_channels_in_every_family(name: str, to: str, tmp_path: Path) -> None:
    found = measured(
        to, fix_of(build(name), SCALED, tmp_path / "model"), tmp_path / "out"
    )
    assert_same(
        found.difference, 0.0, family_noise(name, log_probabilities), "an export"
    )
    assert found.holds
    assert found.unmodified > 0.01, "the unmodified model is far away"


@pytest.mark.parametrize(
    "method", [INTERPOLATED, OTHER_BASE, BOTH], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize(
    "name", ["llama-gqa", *(pytest.param(n, marks=pytest.mark.slow) for n in BUILDERS)]
)
def test_rotary_embeddings_are_a_config(
    name: str, method: Method, tmp_path: Path
) -> None:
    model = build(name)
    try:
        fix = fix_of(model, method, tmp_path / "model")
        found = measured("checkpoint", fix, tmp_path / "out")
    except (
        UserError
    ) as error:  # no RoPE, one that is not plain, or a config that takes no other
        assert (
            "rope" in str(error).lower()
            or "rotary" in str(error)
            or "does not fold" in str(error)
        )
        assert name not in (
            "llama-gqa",
            "mistral",
            "qwen2",
            "gemma",
            "gpt_neox",
            "olmo2",
        )
        return
    assert found.holds and found.unmodified > 0.01
    weights = list((tmp_path / "out").glob("*.safetensors"))
    assert bool(weights) == (method is BOTH), (
        "weights that stay as they are are not written"
    )


def test_layers_may_differ_in_channels(tmp_path: Path) -> None:
    found = measured(
        "lora", fix_of(build("llama-gqa"), RANKS, tmp_path / "model"), tmp_path / "out"
    )
    assert found.holds and found.unmodified > 0.01


def test_weights_are_restored_to_the_bit(tmp_path: Path) -> None:
    lm = load(build("gpt_neox"))
    before = {name: value.clone() for name, value in lm.model.state_dict().items()}
    change = SCALED.folded(lm)
    assert change is not None
    with pytest.raises(KeyError), scaled_weights(lm, change):
        assert any(
            not torch.equal(before[n], v) for n, v in lm.model.state_dict().items()
        )
        raise KeyError
    assert all(
        torch.equal(before[name], value)
        for name, value in lm.model.state_dict().items()
    )


def test_shared_projections_are_refused(tmp_path: Path) -> None:
    model = build("llama")
    first, last = (model.model.layers[i].self_attn for i in (0, 3))
    last.q_proj.weight = first.q_proj.weight
    fix = base.Fix(load(model), SCALED, "x", lambda: load(model))
    with refused(
        "--to",
        "checkpoint",
        allowed="model.layers.0.self_attn.q_proj.weight",
        hint="--to lora",
    ):
        measured("checkpoint", fix, tmp_path / "out")


def test_half_precision_stays_half(tmp_path: Path) -> None:
    model = build("qwen2").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    again = partial(load, str(tmp_path / "model"), dtype="float32", device="cpu")
    lm = load(copy.deepcopy(model).float())
    fix = base.Fix(lm, SCALED, "x", again, "bfloat16", str(tmp_path / "model"))
    found = measured("checkpoint", fix, tmp_path / "out")
    saved = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert saved.dtype == torch.bfloat16 and saved.config.dtype == torch.bfloat16
    # Times -1.5 a column may lose a bit.
    assert 0 < found.difference < found.tolerance < found.unmodified


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_take_an_adapter(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        **shape, vocab_size=VOCABULARY, initializer_range=0.3, pad_token_id=0
    )
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    packed = hf.BitsAndBytesConfig(
        **{f"load_in_{bits}bit": True}, bnb_4bit_compute_dtype=torch.float32
    )
    read = partial(
        hf.AutoModelForCausalLM.from_pretrained, tmp_path / "model", dtype=torch.float32
    )
    again = lambda: load(read(quantization_config=packed, device_map="cpu"))  # noqa: E731
    fix = base.Fix(again(), SCALED, "x", again, "float32", str(tmp_path / "model"))
    found = measured("lora", fix, tmp_path / "out")
    assert found.holds and found.tolerance <= 0.1 * found.unmodified
    with refused("--to", "checkpoint", allowed="weights", hint="--to lora"):
        measured("checkpoint", fix, tmp_path / "refused")


@pytest.mark.parametrize(
    ("to", "method", "allowed", "hint"),
    [
        (
            "checkpoint",
            lambda lm: ScaleChannel(channel=3, factor=0.0, layers=(0, 1)),
            "scale_channel",
            "--to transformers",
        ),
        ("checkpoint", LayerScaling.example, "layer_scaling", "--to transformers"),
        ("lora", MsPoE.example, "ms_poe", "--to transformers"),
        ("lora", MoICE.example, "moice", "--to transformers"),
        ("lora", lambda lm: INTERPOLATED, "rotary embeddings", "--to checkpoint"),
    ],
)
def test_what_does_not_fold_is_refused(
    to: str, method: Callable[..., Method], allowed: str, hint: str, tmp_path: Path
) -> None:
    model = build("llama")
    fix = fix_of(model, method(load(model)), tmp_path / "model")
    with refused("--to", to, allowed=allowed, hint=hint):
        measured(to, fix, tmp_path / "out")


def test_a_wrong_adapter_is_far_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posbench.export import lora

    right = lora.factors
    monkeypatch.setattr(
        lora,
        "factors",
        lambda lm, change: {n: (a, 2 * b) for n, (a, b) in right(lm, change).items()},
    )
    found = measured(
        "lora", fix_of(build("llama"), SCALED, tmp_path / "model"), tmp_path / "out"
    )
    assert not found.holds and found.difference > 0.01


def test_right_padding_has_no_last_token() -> None:
    lm = load(build("llama-gqa"))
    ids = torch.tensor([PROMPTS[0]])
    mask = torch.ones(1, len(PROMPTS[0]), dtype=torch.long)
    mask[:, -4:] = 0
    last, everyone = (
        ScaleChannel(channel=3, factor=-1.5, layers=(1, 3), last=n) for n in (1, "all")
    )
    with last.applied(lm), pytest.raises(ValueError, match="padded on the left"):
        lm.model(input_ids=ids, attention_mask=mask)
    with everyone.applied(lm):
        padded = lm.model(input_ids=ids, attention_mask=mask).logits[0, -5]
        alone = lm.model(input_ids=ids[:, :-4]).logits[0, -1]
    assert_same(padded, alone, family_noise("llama-gqa"), "logits")


def test_a_revision_stands_wherever_the_model_is_loaded() -> None:
    model = build("llama")
    fix = base.Fix(load(model), SCALED, "org/toy", lambda: load(model), revision="s1")
    usages = [format.usage(fix) for format in (lora.Export(), checkpoint.Export())]
    assert 'from_pretrained("org/toy", revision="s1")' in usages[0]
    assert "vllm serve org/toy --revision s1" in usages[0]
    assert fix.with_base(checkpoint.CONFIG_USAGE).count("s1") == 2
    assert "BASE" not in "".join(usages)


OLD_SPELLING = {"rope_theta": 30000.0, "torch_dtype": "float32"}


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (SCALED, {}),
        (OTHER_BASE, {"rope_theta": 20000.0}),
        (INTERPOLATED, {"rope_scaling": {"rope_type": "linear", "factor": 1.7}}),
        (BOTH, {"rope_scaling": {"rope_type": "linear", "factor": 1.7}}),
    ],
)
def test_a_published_config_keeps_its_spelling(
    method: Method, expected: dict[str, object], tmp_path: Path
) -> None:
    # transformers 4 reads no rope_parameters, and takes a base of 10,000 without them.
    published = tmp_path / "published"
    build("llama").save_pretrained(published)
    config = json.loads((published / "config.json").read_text())
    for new in ("rope_parameters", "dtype"):
        del config[new]
    config |= OLD_SPELLING
    (published / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "LICENSE", "preprocessor_config.json"):
        (published / name).write_text(f"{name} as it was published\n")
    (published / "README.md").write_text("another card")
    lm = load(hf.AutoModelForCausalLM.from_pretrained(published))
    again = partial(load, copy.deepcopy(lm.model))
    fix = base.Fix(lm, method, str(published), again, "float32", str(published))
    assert measured("checkpoint", fix, tmp_path / "out").holds
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == config | expected
    for name in ("tokenizer.json", "LICENSE", "preprocessor_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (published / name).read_bytes()
    assert not (tmp_path / "out" / "README.md").exists()


def test_a_path_stands_in_a_command_as_a_shell_takes_it() -> None:
    fix = base.Fix(load(build("llama")), SCALED, "/a/MODEL of BASE", lambda: None)  # type: ignore[arg-type, return-value]
    usage = base.find_format("lora").usage(fix)
    assert "vllm serve '/a/MODEL of BASE' --enable-lora" in usage
    assert '"/a/MODEL of BASE"' in usage
