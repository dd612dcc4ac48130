"""A package that gives each layer of a model in vLLM a rotary embedding of its own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posbench.errors import UserError
from posbench.export.base import Fix, Format, Prompts
from posbench.export.transformers import CODE, SHIPPED, apart
from posbench.late import Tensor, torch
from posbench.model import rope

MODELS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "phi3",
    "mixtral",
    "qwen3_moe",
)
"""Values of ``model_type``, and modules of vLLM, whose layers each hold a rotary embedding."""
PYTHON = "POSBENCH_VLLM_PYTHON"


class Export(Format):
    """A package for vLLM, which serves the weights as they are but rotates in each layer by its own scale."""

    name = "vllm-plugin"
    folds = False
    library = "vllm"

    def check(self, fix: Fix) -> None:
        """Raise UserError for other methods, and for models that vLLM does not serve in this shape."""
        if SHIPPED.get(type(fix.method), ("",))[0] != "layer_scaling":
            allowed = f"a format that holds {fix.method.short_name()}; this one holds layer_scaling"
            raise UserError(
                "--to",
                self.name,
                allowed,
                "--to lora for what folds, else --to transformers",
            )
        kind = fix.lm.model.config.model_type
        scaled = (
            getattr(rope.rotary_module(fix.lm.model), "rope_type", None) != "default"
        )
        if kind not in MODELS or scaled:
            what = f"{fix.lm.name} is {kind}{', scaled' if scaled else ''}"
            allowed = f"{', '.join(MODELS)} with plain RoPE; {what}"
            raise UserError(
                "--to", f"{self.name} of {fix.lm.name}", allowed, "--to transformers"
            )

    def write(self, fix: Fix, folder: Path) -> None:
        """``pyproject.toml`` and a package of two modules: one that registers, one that is the model."""
        kind = fix.lm.model.config.model_type
        package = name_of(fix)
        model = type(fix.lm.model).__name__
        text = (CODE / "vllm_layers.py").read_text()
        text = text.replace(
            "models.llama import LlamaForCausalLM", f"models.{kind} import {model}"
        )
        text = text.replace("SCALES = (1.0,)", f"SCALES = {scales_of(fix)}")
        (folder / package).mkdir()
        (folder / package / "model.py").write_text(text)
        for file, source in (
            (f"{package}/__init__.py", REGISTER),
            ("pyproject.toml", PROJECT),
        ):
            (folder / file).write_text(
                source.replace("PACKAGE", package).replace("MODEL", name_in_vllm(fix))
            )

    def missing(self) -> str:
        """See :class:`Format`."""
        look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        there = subprocess.run([python(), "-c", look], check=False).returncode == 0
        return (
            ""
            if there
            else f"vLLM is not installed here; set {PYTHON} to a Python that has it"
        )

    def read(self, fix: Fix, folder: Path, prompts: Prompts) -> Tensor:
        """Through vLLM in a process of its own."""
        model = str(Path(fix.files).resolve()) if fix.files else fix.base
        dtype = str(fix.lm.model.dtype).removeprefix("torch.")
        call = {
            "model": model,
            "dtype": dtype,
            "hf_overrides": {"architectures": [name_in_vllm(fix)]},
        }
        return answers(call, prompts, package=str(folder.resolve() / name_of(fix)))

    def usage(self, fix: Fix) -> str:
        """With vLLM."""
        return USAGE.replace("BASE", fix.base).replace("MODEL", name_in_vllm(fix))


USAGE = """- vLLM: `pip install DIR`, then `vllm serve BASE --hf-overrides '{"architectures": ["MODEL"]}'`

  Without `--hf-overrides` vLLM serves the unmodified model, whether or not the package is installed.
"""

REGISTER = '''# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The posbench authors
"""Tells vLLM of the model MODEL."""


def register() -> None:
    """What vLLM calls when it starts."""
    from vllm import ModelRegistry

    ModelRegistry.register_model("MODEL", "PACKAGE.model:PosbenchForCausalLM")
'''

PROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "PACKAGE"
version = "1.0"
description = "A rotary embedding for each layer of one model in vLLM, written by posbench"
license = "MIT"

[project.entry-points."vllm.general_plugins"]
PACKAGE = "PACKAGE:register"

[tool.setuptools]
packages = ["PACKAGE"]
"""


def scales_of(fix: Fix) -> tuple[float, ...]:
    """The scale of each layer."""
    return tuple(
        float(scale)
        for scale in SHIPPED[type(fix.method)][1](fix.method, fix.lm)["scales"]
    )


def name_of(fix: Fix) -> str:
    """Of the package: another for other scales or another architecture, so that several can be installed."""
    told = json.dumps([type(fix.lm.model).__name__, scales_of(fix)])
    return f"posbench_{hashlib.sha256(told.encode()).hexdigest()[:8]}"


def name_in_vllm(fix: Fix) -> str:
    """Of the architecture that the package registers."""
    return f"{name_of(fix).capitalize().replace('_', '')}ForCausalLM"


def python() -> str:
    """The interpreter that has vLLM."""
    return os.environ.get(PYTHON, sys.executable)


def answers(
    call: Mapping[str, Any], prompts: Prompts, *, package: str = "", adapter: str = ""
) -> Tensor:
    """Log-probabilities [N, V] from vLLM.

    Args:
        call: Arguments of ``vllm.LLM``.
        prompts: N prompts as token ids.
        package: The package's folder; it registers as where it is installed.
        adapter: The folder of a LoRA adapter.

    Raises:
        UserError: vLLM is not there.
        MachineError: It ended with an error.
    """
    if missing := Export().missing():
        raise UserError(
            "vllm", python(), missing, f"{PYTHON}=/path/to/python posbench verify DIR"
        )
    job = {
        "call": call,
        "prompts": [list(prompt) for prompt in prompts],
        "package": package,
    }
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    if not torch.cuda.is_available():
        settings |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    if package:
        # For the processes that vLLM starts, too.
        settings["PYTHONPATH"] = str(Path(package).parent)
    rows: Tensor = apart(
        [python(), "-c", ASK], {**job, "adapter": adapter}, settings, "vllm-plugin"
    )
    return rows


ASK = """
import importlib, json, os, sys
import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

job = json.load(sys.stdin)
if job["package"]:
    importlib.import_module(os.path.basename(job["package"])).register()
engine = LLM(
    max_model_len=max(map(len, job["prompts"])) + 1,
    max_logprobs=-1,
    skip_tokenizer_init=True,
    enforce_eager=True,
    **job["call"],
)
adapter = LoRARequest("fix", 1, job["adapter"]) if job["adapter"] else None
asked = SamplingParams(max_tokens=1, temperature=0.0, logprobs=-1, detokenize=False)
out = engine.generate([{"prompt_token_ids": p} for p in job["prompts"]], asked, lora_request=adapter)
found = [reply.outputs[0].logprobs[0] for reply in out]
rows = [[row[token].logprob for token in range(len(row))] for row in found]
torch.save(torch.tensor(rows, dtype=torch.float64), sys.argv[1])
"""
"""What that process runs, from one JSON object to a file with a tensor."""
