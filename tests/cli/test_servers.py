"""Real servers on this machine: the replies are those of the model in process."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest

from posbench import paths
from posbench.export.llama_cpp import serve
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


@contextmanager
def transformers_serve(folder: Path) -> Iterator[str]:
    """``transformers serve`` with the checkpoint of a folder: its address."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    asked = [str(folder), "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    with subprocess.Popen(
        [sys.executable, "-c", *SERVE, *asked], stderr=subprocess.DEVNULL
    ) as process:
        try:
            look = build_opener(ProxyHandler({}))
            for _ in range(600):
                assert process.poll() is None, "it ended by itself"
                try:
                    look.open(f"http://localhost:{port}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.2)
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
