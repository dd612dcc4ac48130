"""GGUF files through llama.cpp, against the method in process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from posbench.export import base, gguf
from posbench.export.llama_cpp import next_token, serve, tokens
from posbench.files.gguf import PRE_TOKENIZERS
from posbench.methods import Method
from posbench.methods.scale_channel import ScaleChannel
from posbench.methods.unmodified import Unmodified
from posbench.model.load import load
from posbench.tasks.kv_retrieval import KVRetrieval
from tests.export.test_formats import (
    BOTH,
    INTERPOLATED,
    OTHER_BASE,
    PROMPTS,
    RANKS,
    SCALED,
    fix_of,
    measured,
)
from tests.messages import Tokens, refused
from tests.models import BUILDERS, GROUPED, LOCAL, build
from tests.rounding import assert_same, embedded_noise, family_noise, log_probabilities

pytest.importorskip("xllamacpp")
FEW = ("llama-tied-llama3", "qwen3")
"""Biases, grouped keys and Llama 3 frequencies, interleaved; norms, in halves."""
PLAIN = (
    "llama",
    "llama-gqa",
    "llama-tied-llama3",
    "mistral",
    "qwen2",
    "qwen2-yarn",
    "qwen3",
)
GEMMA = dict(**GROUPED, head_dim=20, **LOCAL, query_pre_attn_scalar=20)


@pytest.mark.parametrize("to", ["gguf", "gguf-lora"])
@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in PLAIN]
)
def test_scaled_channels_in_every_family(name: str, to: str, tmp_path: Path) -> None:
    found = measured(
        to, fix_of(build(name), SCALED, tmp_path / "model"), tmp_path / "out"
    )
    assert_same(
        found.difference, 0.0, family_noise(name, log_probabilities), "llama.cpp"
    )
    assert found.tolerance == 1e-4
    assert found.unmodified > 0.01, "the unmodified model is far away"


@pytest.mark.parametrize(
    "to", ["gguf", pytest.param("gguf-lora", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name",
    [*(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma", "gemma2")), "gemma3"],
)
def test_gemma_but_for_its_activation(
    name: str, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capped = dict(
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        attn_implementation="eager",
    )
    for key, builder in {
        "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**GEMMA, **capped)),
        "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GEMMA)),
    }.items():
        monkeypatch.setitem(BUILDERS, key, builder)
    model = build(name)
    found = measured(to, fix_of(model, SCALED, tmp_path / "model"), tmp_path / "out")
    assert 1e-4 < found.difference < 1e-2 < found.tolerance < found.unmodified
    # llama.cpp takes its activation from a table of half precision. A hundredth of what it makes: then the
    # table is a hundredth off, and any other fault still in sight.
    with torch.no_grad():
        for layer in model.model.layers:
            last = getattr(layer, "post_feedforward_layernorm", None)
            if last is None:
                layer.mlp.down_proj.weight.mul_(0.01)
            else:  # it scales by 1 + weight
                last.weight.mul_(0.01).sub_(0.99)
    found = measured(to, fix_of(model, SCALED, tmp_path / "quiet"), tmp_path / "almost")
    assert found.difference < 1e-4 and found.unmodified > 0.01


@pytest.mark.parametrize(
    "method",
    [INTERPOLATED, OTHER_BASE, BOTH, RANKS],
    ids=["linear", "base", "both", "ranks"],
)
def test_what_else_folds(method: Method, tmp_path: Path) -> None:
    fix = fix_of(build("llama-gqa"), method, tmp_path / "model")
    for to in ("gguf",) if method is not RANKS else ("gguf", "gguf-lora"):
        found = measured(to, fix, tmp_path / to)
        assert found.holds and found.unmodified > 0.01
    if method is INTERPOLATED:
        with refused(
            "--to", "gguf-lora", allowed="rotary embeddings", hint="--to gguf"
        ):
            measured("gguf-lora", fix, tmp_path / "refused")


def test_rows_turn_as_in_a_rotation_of_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    heads = 3
    size = 8
    wide = 10
    angle = torch.rand(4, generator=generator, dtype=torch.float64)
    rows = torch.randn(heads * size, wide, generator=generator, dtype=torch.float64)
    x = torch.randn(wide, generator=generator, dtype=torch.float64)
    halves = (rows @ x).view(heads, size)
    pairs = (gguf.interleaved(rows, heads) @ x).view(heads, size)
    cos = angle.cos()
    sin = angle.sin()
    for head in range(heads):
        for i in range(size // 2):
            one = halves[head, i]
            two = halves[head, i + size // 2]
            assert torch.equal(pairs[head, 2 * i : 2 * i + 2], torch.stack([one, two]))
            turned = one * cos[i] - two * sin[i], one * sin[i] + two * cos[i]
            # A rotation of neighbours, written as complex numbers.
            other = torch.view_as_complex(pairs[head].view(-1, 2))[i] * torch.polar(
                torch.ones_like(angle[i]), angle[i]
            )
            assert torch.allclose(torch.stack(turned), torch.view_as_real(other))


def test_rows_in_the_wrong_order_are_far_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "interleaved", lambda rows, heads: rows)
    found = measured(
        "gguf-lora",
        fix_of(build("mistral"), SCALED, tmp_path / "model"),
        tmp_path / "out",
    )
    assert not found.holds and found.difference > 0.1


@pytest.mark.parametrize(
    "method",
    [Unmodified(), ScaleChannel(channel=15, factor=-1.0, layers=(1, 3), last="all")],
)
def test_the_embedded_model_reads_texts(
    method: Method, tiny: Any, tmp_path: Path
) -> None:
    fix = base.Fix(tiny, method, "tiny", lambda: tiny)
    task = KVRetrieval(
        pairs=12, prompt="compact", records="words", limit=2, calibration_pairs=8
    )
    texts = [example.prompt for example in task.examples("evaluation")[:6]]
    form = base.find_format("gguf")
    form.check(fix)
    form.write(fix, tmp_path)
    found = base.measure(form, fix, tmp_path, [tiny.encode(text).ids for text in texts])
    assert_same(
        found.difference, 0.0, embedded_noise("tiny", log_probabilities), "llama.cpp"
    )
    assert (found.unmodified > 0.5) == (not isinstance(method, Unmodified))
    server = serve(tmp_path / "model.gguf", 128)
    with method.applied(tiny):
        replies = tiny.generate(texts, max_new_tokens=3)
    for text, reply in zip(texts, replies, strict=True):
        answer = server.handle_completions(
            {"prompt": text, "max_tokens": 3, "temperature": 0}
        )
        assert (
            answer["choices"][0]["text"] == reply
            and answer["usage"]["prompt_tokens"] == 51
        )


def test_a_tokenizer_is_followed_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["it's 1234567 o'clock,\n\n  AT ten\t\u00e4\u65e5\u672c", "x = 12;\r\n  y"]
    definition = PRE_TOKENIZERS["llama-bpe"]
    regex = definition["pretokenizers"][0]["pattern"]["Regex"]
    spelt = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(regex), "isolated")
    spelt.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    spelt.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    spelt.train_from_iterator(
        ["123 456 123 12 it's ten o'clock, at ten 1234567\n\n"] * 9, trainer
    )
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=spelt, bos_token=special[0], eos_token=special[1]
    )
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**GROUPED, "vocab_size": 420}))
    lm = load(model, tokenizer=tokenizer)
    fix = base.Fix(lm, Unmodified(), "x", lambda: lm)
    form = gguf.Export()
    form.check(fix)
    form.write(fix, tmp_path)
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    server = serve(tmp_path / "model.gguf", 128)
    assert [tokens(server, text) for text in texts] == prompts
    assert base.measure(form, fix, tmp_path, prompts).holds
    monkeypatch.delitem(PRE_TOKENIZERS, "llama-bpe")
    monkeypatch.setitem(PRE_TOKENIZERS, "qwen2", definition)
    form.write(fix, tmp_path)
    with refused(
        "model",
        "model",
        allowed=("tokenizer", "llama.cpp"),
        hint=("--to checkpoint", "lora"),
    ):
        form.read(fix, tmp_path, prompts)
    monkeypatch.delitem(PRE_TOKENIZERS, "qwen2")
    with refused(
        "model",
        "model",
        allowed=("tokenizer", "byte-level"),
        hint=("--to checkpoint", "lora"),
    ):
        form.check(fix)


def test_half_precision_is_float16(tmp_path: Path) -> None:
    from gguf import GGUFReader

    model = build("qwen2")
    fix = replace(fix_of(model, SCALED, tmp_path / "model"), dtype="bfloat16")
    assert measured("gguf", fix, tmp_path / "out").holds
    kinds = {
        t.name: t.tensor_type.name
        for t in GGUFReader(tmp_path / "out" / "model.gguf").tensors
    }
    assert kinds["blk.0.attn_q.weight"] == "F16" and kinds["blk.0.attn_q.bias"] == "F32"


@pytest.mark.parametrize(
    ("name", "method", "field", "allowed", "hint"),
    [
        ("phi3", SCALED, "model", ("llama", "phi3"), "convert_hf_to_gguf.py"),
        ("gemma2", SCALED, "model", "query_pre_attn_scalar 20", "--to checkpoint"),
        ("mistral-window", SCALED, "llama.cpp", ("31 tokens", "24 tokens"), ()),
    ],
)
def test_what_llama_cpp_reads_otherwise_is_refused(
    name: str, method: Method, field: str, allowed: Tokens, hint: Tokens, tmp_path: Path
) -> None:
    fix = fix_of(build(name), method, tmp_path / "model")
    for to in ("gguf", "gguf-lora"):
        with refused(field, allowed=allowed, hint=hint):
            measured(to, fix, tmp_path / to)


def test_no_distribution_is_no_agreement(tmp_path: Path) -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.norm.weight.mul_(torch.nan)
    fix = base.Fix(load(build("llama")), Unmodified(), "x", lambda: load(model))
    fix.lm.model = model
    gguf.write_model(fix, Unmodified().folded(fix.lm), tmp_path / "model.gguf")
    with refused("llama.cpp", "3 tokens", allowed="probabilities"):
        next_token(serve(tmp_path / "model.gguf", 16), [[1, 2, 3]], 260)
    (tmp_path / "model.gguf").write_bytes((tmp_path / "model.gguf").read_bytes()[:5000])
    with refused("llama.cpp", "model.gguf", allowed="files", hint="--to checkpoint"):
        serve(tmp_path / "model.gguf", 16)


def test_q8_0_holds_the_method_rounded(tmp_path: Path) -> None:
    from gguf import GGUFReader

    torch.manual_seed(0)
    wide = hf.LlamaConfig(**{**GROUPED, "hidden_size": 64}, initializer_range=0.2)
    lm = load(hf.LlamaForCausalLM(wide))
    fix = base.Fix(lm, SCALED, "x", lambda: lm, weights="q8_0")
    form = gguf.Export()
    form.write(fix, tmp_path)
    found = base.measure(form, fix, tmp_path, PROMPTS)
    assert found.holds and 1e-4 < found.difference < found.unmodified
    tensors = GGUFReader(tmp_path / "model.gguf").tensors
    kinds = {tensor.name: tensor.tensor_type.name for tensor in tensors}
    assert kinds["blk.0.attn_q.weight"] == "Q8_0"
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    # The unmodified weights are not the method's, however near the replies are.
    form.write(replace(fix, method=Unmodified()), tmp_path)
    with refused("model", "model", allowed="Q8_0"):
        form.read(fix, tmp_path, PROMPTS)
