"""Real servers on this machine: the replies are those of the model in process."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posbench import paths
from posbench.backends.served import Endpoint
from posbench.cli.main import main
from posbench.export.llama_cpp import serve
from posbench.model.load import ModelConfig, load
from tests.conftest import Result, run_folders

Call = Callable[..., Result]
FEW = ["task.limit=20", "runtime.resamples=100", "runtime.threads=1"]
SERVE = ["from transformers.cli.transformers import main; main()", "serve"]


def replies(outputs: Path, method: str) -> dict[str, str]:
    """The reply to each prompt under a method, of all runs alike."""
    found: dict[str, str] = {}
    for folder in run_folders(outputs):
        rows = map(json.loads, (folder / "predictions.jsonl").read_text().splitlines())
        found |= {row["id"]: row["output"] for row in rows if row["method"] == method}
    return found


def free_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
    return port


def wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until a server says that it is well: for three minutes, if it does not end before."""
    look = build_opener(ProxyHandler({}))
    for _ in range(900):
        assert process.poll() is None, "it ended by itself"
        try:
            look.open(f"http://localhost:{port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)


@contextmanager
def transformers_serve(folder: Path) -> Iterator[str]:
    """``transformers serve`` with the checkpoint of a folder: its address."""
    port = free_port()
    asked = [str(folder), "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    with subprocess.Popen(
        [sys.executable, "-c", *SERVE, *asked], stderr=subprocess.DEVNULL
    ) as process:
        try:
            wait_for(process, port)
            yield f"http://localhost:{port}/v1"
        finally:
            process.kill()


@pytest.mark.slow
def test_transformers_serve_replies_as_the_model_in_process(
    posbench: Call, outputs: Path, tmp_path: Path
) -> None:
    pytest.importorskip("uvicorn", reason="needs transformers[serving]")
    folder = shutil.copytree(paths.MODELS / "tiny", tmp_path / "tiny")
    # The server applies what this file says, unless it is told otherwise.
    file = folder / "generation_config.json"
    settings = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    assert posbench("model=tiny", "method=none", "stages=[evaluate]", *FEW).status == 0
    with transformers_serve(folder) as url:
        result = posbench(
            "model=tiny", f"model.base_url={url}", f"model.served={folder}", *FEW
        )
    assert result.status == 0, result.err
    assert "counted other tokens" not in " ".join(result.out.split())
    # Of 40 tokens, before the run; its own replies have one.
    assert "3 of 3 replies are those of" in " ".join(result.out.split())
    served = replies(outputs, "served")
    assert len(served) == 180 and served == replies(outputs, "none")


@pytest.mark.slow
def test_llama_cpp_serves_the_fix_as_it_is_in_process(
    posbench: Call, outputs: Path, tmp_path: Path
) -> None:
    pytest.importorskip("xllamacpp")
    fix = ["model=tiny", "method.last=all"]
    out = str(tmp_path / "fixed")
    assert posbench("export", *fix, "--to", "gguf", "--out", out, verb=True).status == 0
    assert posbench(*fix, "stages=[evaluate]", *FEW).status == 0
    server = serve(Path(out) / "model.gguf", 512)
    result = posbench(
        "model=tiny",
        "model.name=fixed",
        f"model.base_url={server.listening_address}/v1",
        *FEW,
    )
    assert result.status == 0, result.err
    assert "counted other tokens" not in " ".join(result.out.split())
    served = replies(outputs, "served")
    assert len(served) == 180 and served == replies(
        outputs, "scale_channel"
    ) != replies(outputs, "none")


WORD_MODEL: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    head_dim=32,  # vLLM's attention on a CPU takes no 16
    num_key_value_heads=1,
    max_position_embeddings=512,
    initializer_range=0.2,
    bos_token_id=None,
)
VLLM_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def word_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the tokenizer of the embedded models."""
    from posbench.embedded.tokenizer import build_tokenizer

    folder = tmp_path_factory.mktemp("models") / "words"
    tokenizer = build_tokenizer()
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **WORD_MODEL,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def vllm_serve(folder: Path) -> Iterator[str]:
    """The server of vLLM with the checkpoint of a folder: its address."""
    python = os.environ.get("POSBENCH_VLLM_PYTHON")
    if not python:
        pytest.skip("needs POSBENCH_VLLM_PYTHON, a Python that has vLLM")
    port = free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--served-model-name", "words"]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager"]
    with subprocess.Popen(
        command,
        env={**os.environ, **VLLM_SETTINGS},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            wait_for(process, port)
            yield f"http://localhost:{port}/v1"
        finally:
            process.terminate()


@pytest.mark.slow
def test_vllm_tells_choices_and_replies_as_the_model_in_process(
    posbench: Call, outputs: Path, word_model: Path
) -> None:
    """By an echo and by prompt_logprobs: differences of log-likelihoods as in process, in float32."""
    few = [f"model.path={word_model}", "task.prompt=compact", "task.records=words"]
    few += ["task.pairs=12", "task.limit=6", "task.max_new_tokens=8"]
    few += ["runtime.resamples=100", "stages=[evaluate]"]
    lm = load(str(word_model))
    prompt = 'Json data: {"bal": "bel", "dip": "dop"} The value of key "bal" is "'
    choices = ["bel", "dop", "tip tap"]
    ids = [lm.continuation_ids(lm.encode(prompt), choice) for choice in choices]
    (scored,) = lm.continuations([lm.encode(prompt).ids], [ids], batch_size=1)
    in_process = [nats for nats, _ in scored]
    with vllm_serve(word_model) as url:
        for form in ("echo", "echo with a token", "prompt_logprobs"):
            config = ModelConfig(name="words", base_url=url, api="completions")
            endpoint = Endpoint(config)
            endpoint.check(choosing=True)
            # The first one that works is taken; the others work, too.
            assert endpoint.profile.likelihood_form == "echo"
            profile = replace(endpoint.profile, likelihood_form=form)
            reply = Endpoint(config, profile).choose(prompt, choices)
            assert reply.by == "log-likelihoods"
            assert reply.nats == pytest.approx(in_process, abs=1e-3)
        result = posbench(
            f"model.base_url={url}", "model.name=vllm", "model.served=words", *few
        )
        assert result.status == 0, result.err
    assert posbench("model=hf", "model.name=here", "method=none", *few).status == 0
    assert "window 512" in result.out
    assert replies(outputs, "served") == replies(outputs, "none")


@pytest.mark.slow
def test_llama_cpp_is_asked_for_choices_by_the_first_token(tmp_path: Path) -> None:
    """Likelihoods of a prompt it does not give; it passes over the fields that ask for them."""
    pytest.importorskip("xllamacpp")
    out = tmp_path / "fixed"
    fix = ["model=tiny", "method.last=all", "--to", "gguf", "--out", str(out)]
    assert main(["export", *fix]) == 0
    server = serve(out / "model.gguf", 512)
    config = ModelConfig(name="x", base_url=f"{server.listening_address}/v1")
    endpoint = Endpoint(config)
    endpoint.check(choosing=True)
    assert endpoint.profile.choice_method == "first token"
    assert [model.window for model in endpoint.models()] == [512]
    prompt = 'Json data: {"bal": "bel", "dip": "dop"} The value of key "bal" is "'
    assert endpoint.choose(prompt, ["dop", "bel", "tip"]).text == "bel"
