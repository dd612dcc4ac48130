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
from posbench.export.base import Fix, Format, Prompts, other_format
from posbench.export.transformers import CODE, SHIPPED_CODE, run_process
from posbench.late import Tensor, torch
from posbench.model import rope

VLLM_MODEL_TYPES = (
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
PYTHON_VARIABLE = "POSBENCH_VLLM_PYTHON"
"""Environment variable that names a Python interpreter with vLLM."""


class Export(Format):
    """A package for vLLM, which serves the weights as they are but rotates in each layer by its own scale."""

    name = "vllm-plugin"
    folds = False
    library = "vllm"

    def check(self, fix: Fix) -> None:
        """Refuse methods other than layer_scaling, and models that vLLM implements otherwise.

        Args:
            fix: The method with its constants, and the model that it is written for.

        Raises:
            UserError: States which.
        """
        code, _ = SHIPPED_CODE.get(type(fix.method), ("", None))
        if code != "layer_scaling":
            held = "layer_scaling and position_interpolation"
            allowed = f"a format that holds {fix.method_name}; this one holds {held}"
            # vLLM loads an adapter as well, of what an adapter holds.
            twin = fix.method.twin().folded(fix.lm)
            is_adapter = twin is not None and twin.columns and not twin.rope
            hint = other_format(fix)
            if is_adapter:
                hint = f"--to lora, or {hint}"
            raise UserError("--to", self.name, allowed, hint)
        model_type = fix.lm.model.config.model_type
        rotary = rope.rotary_module(fix.lm.model)
        has_plain_rope = getattr(rotary, "rope_type", None) == "default"
        if model_type in VLLM_MODEL_TYPES and has_plain_rope:
            return
        model = f"{fix.lm.name} is {model_type}"
        if not has_plain_rope:
            model += ", scaled"
        allowed = f"{', '.join(VLLM_MODEL_TYPES)} with plain RoPE; {model}"
        raise UserError(
            "--to", f"{self.name} of {fix.lm.name}", allowed, "--to transformers"
        )

    def write(self, fix: Fix, folder: Path) -> None:
        """Write a Python package for vLLM: ``pyproject.toml``, the model, and the code that registers it.

        Args:
            fix: The method with its constants, and the model that it is written for.
            folder: Where the package goes.
        """
        model_type = fix.lm.model.config.model_type
        package = package_name(fix)
        text = (CODE / "vllm_layers.py").read_text("utf-8")
        # The shipped code names Llama, and scales no layer: here are the model's class and the layers' scales.
        text = text.replace(
            "models.llama import LlamaForCausalLM",
            f"models.{model_type} import {type(fix.lm.model).__name__}",
        )
        text = text.replace("SCALES = (1.0,)", f"SCALES = {layer_scales(fix)}")
        (folder / package).mkdir()
        (folder / package / "model.py").write_text(text, "utf-8")
        templates = {f"{package}/__init__.py": REGISTER, "pyproject.toml": PROJECT}
        for name, template in templates.items():
            text = template.replace("PACKAGE", package)
            text = text.replace("MODEL", architecture_name(fix))
            (folder / name).write_text(text, "utf-8")

    def missing(self) -> str:
        """Return why the files cannot be verified here: vLLM is not installed; empty if it is."""
        script = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        process = subprocess.run([interpreter(), "-c", script], check=False)
        if process.returncode == 0:
            return ""
        return (
            f"vLLM is not installed here; set {PYTHON_VARIABLE} to a Python that has it"
        )

    def read(self, fix: Fix, folder: Path, prompts: Prompts) -> Tensor:
        """Load the package through vLLM in a process of its own, and predict the next token of each prompt."""
        arguments = {
            "model": str(Path(fix.files).resolve()) if fix.files else fix.base,
            "dtype": str(fix.lm.model.dtype).removeprefix("torch."),
            "hf_overrides": {"architectures": [architecture_name(fix)]},
        }
        package = folder.resolve() / package_name(fix)
        return next_token(arguments, prompts, package=str(package))

    def usage(self, fix: Fix) -> str:
        """How to load the package with vLLM."""
        return fix.with_base(USAGE.replace("MODEL", architecture_name(fix)))


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


def layer_scales(fix: Fix) -> tuple[float, ...]:
    """The scale of each layer."""
    _, constants = SHIPPED_CODE[type(fix.method)]
    return tuple(float(scale) for scale in constants(fix.method, fix.lm)["scales"])


def package_name(fix: Fix) -> str:
    """Name of the package, which its architecture and scales determine.

    So packages of several fixes can be installed side by side.
    """
    identity = json.dumps([type(fix.lm.model).__name__, layer_scales(fix)])
    return f"posbench_{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


def architecture_name(fix: Fix) -> str:
    """Name of the architecture that the package registers with vLLM."""
    return f"{package_name(fix).capitalize().replace('_', '')}ForCausalLM"


def interpreter() -> str:
    """The Python interpreter that has vLLM."""
    return os.environ.get(PYTHON_VARIABLE, sys.executable)


def next_token(
    arguments: Mapping[str, Any],
    prompts: Prompts,
    *,
    package: str = "",
    adapter: str = "",
) -> Tensor:
    """Predict the next token of each prompt with vLLM.

    Args:
        arguments: Arguments of ``vllm.LLM``.
        prompts: N prompts as token ids.
        package: Folder of an exported package, registered as if installed.
        adapter: Folder of a LoRA adapter.

    Returns:
        Log-probabilities in nats, shape (N, vocabulary), float64.

    Raises:
        UserError: vLLM is not installed.
        MachineError: vLLM failed.
    """
    missing = Export().missing()
    if missing:
        hint = f"{PYTHON_VARIABLE}=/path/to/python posbench verify DIR"
        raise UserError("vllm", interpreter(), missing, hint)
    job = {
        "arguments": arguments,
        "prompts": [list(prompt) for prompt in prompts],
        "package": package,
        "adapter": adapter,
    }
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    if not torch.cuda.is_available():
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if package:
        # vLLM's own processes must find the package, too.
        environment["PYTHONPATH"] = str(Path(package).parent)
    command = [interpreter(), "-c", NEXT_TOKEN_SCRIPT]
    log_probabilities: Tensor = run_process(command, job, environment, "vllm-plugin")
    return log_probabilities


NEXT_TOKEN_SCRIPT = """
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
    **job["arguments"],
)
adapter = LoRARequest("fix", 1, job["adapter"]) if job["adapter"] else None
sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=-1, detokenize=False)
prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
rows = []
for reply in engine.generate(prompts, sampling, lora_request=adapter):
    predictions = reply.outputs[0].logprobs[0]
    rows.append([predictions[token].logprob for token in range(len(predictions))])
torch.save(torch.tensor(rows, dtype=torch.float64), sys.argv[1])
"""
"""Reads a job as JSON, and saves a tensor to the file it is called with."""
