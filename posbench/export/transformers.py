"""A checkpoint with a file of code that computes a method as the model runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posbench.errors import MachineError, UserError
from posbench.export.base import Fix, Format, Prompts, other_format
from posbench.late import Tensor, torch
from posbench.methods.attention_buckets import AttentionBuckets
from posbench.methods.base import Method
from posbench.methods.layer_scaling import LayerScaling
from posbench.methods.moice import UNIFORM, MoICE, load_routers
from posbench.methods.ms_poe import MsPoE
from posbench.methods.position_interpolation import PositionInterpolation
from posbench.methods.rope_base import RopeBase
from posbench.methods.scale_channel import ScaleChannel
from posbench.model import families, rope
from posbench.model.hooks import replace_attribute
from posbench.model.lm import LM

CODE = Path(__file__).parent / "shipped"
"""Folder of the files of code. They are written for Llama: another architecture replaces
the names of two classes."""
MODULE = "modeling_posbench"
"""Name of the file of code in an exported folder."""


class Export(Format):
    """Weights, config and tokenizer with code beside them, which needs transformers alone.

    The weights are written too, so that one folder loads, and the code runs with the
    weights that it was compared on.
    """

    name = "transformers"
    folds = False

    def has_code(self, method: Method) -> bool:
        """See :meth:`Format.has_code`."""
        return type(method) in SHIPPED_CODE

    def check(self, fix: Fix) -> None:
        """Refuse a method without code for transformers, and weights that are not in plain tensors.

        Args:
            fix: The method with its constants, and the model that it is written for.

        Raises:
            UserError: States which.
        """
        if not self.has_code(fix.method):
            supported = ", ".join(method.short_name() for method in SHIPPED_CODE)
            allowed = (
                f"a format that holds {fix.method_name}; "
                f"this one holds {supported}, one at a time"
            )
            raise UserError("--to", self.name, allowed, other_format(fix))
        check_plain_weights(fix.lm, self.name)

    def write(self, fix: Fix, folder: Path) -> None:
        """Write config, weights (in the published dtype), tokenizer and the code of the method.

        Args:
            fix: The method with its constants, and the model that it is written for.
            folder: Where the files go; transformers loads it with ``trust_remote_code=True``.
        """
        model = fix.lm.model
        code, constants = SHIPPED_CODE[type(fix.method)]
        dtype = getattr(torch, fix.dtype)
        weights = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in (model.state_dict() | router_weights(fix)).items()
        }
        fix.copy_published(folder)
        # Some checkpoints (MPT) let generate() run without a cache: another method.
        with replace_attribute(model.generation_config, "use_cache", True):
            # With the class's names of weights: transformers would rename them by
            # model_type, which is another one here.
            model.save_pretrained(
                folder, state_dict=weights, save_original_format=False
            )
        config = model.config.to_dict()
        config.pop("_name_or_path", None)
        config |= {
            "model_type": "posbench",
            # Loaded by `transformers serve`; other engines know no such architecture,
            # and refuse the folder.
            "architectures": ["AutoModelForCausalLM"],
            "auto_map": {
                "AutoConfig": f"{MODULE}.PosbenchConfig",
                "AutoModelForCausalLM": f"{MODULE}.PosbenchForCausalLM",
            },
            "dtype": fix.dtype,
            "posbench": {
                "method": code,
                **constants(fix.method, fix.lm),
                "where": module_names(fix.lm),
            },
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        text = (CODE / f"{code}.py").read_text("utf-8")
        # The shipped code is written for Llama; other families have the same interface.
        text = text.replace("LlamaConfig", type(model.config).__name__)
        text = text.replace("LlamaForCausalLM", type(model).__name__)
        (folder / f"{MODULE}.py").write_text(text, "utf-8")

    def read(self, fix: Fix, folder: Path, prompts: Prompts) -> Tensor:
        """See :meth:`Format.read`; in a process that cannot import posbench."""
        return run_jobs([next_token_job(fix.lm, folder, prompts)])[0]

    def usage(self, fix: Fix) -> str:
        """How to load the files with transformers."""
        if isinstance(fix.method, ScaleChannel) and fix.method.needs_prompt:
            return USAGE + LAST_TOKEN_USAGE
        return USAGE


USAGE = """- transformers 5 or later: `AutoModelForCausalLM.from_pretrained("DIR", trust_remote_code=True)`, and
  `AutoTokenizer` alike. `modeling_posbench.py` is all the code that runs. Without `trust_remote_code` the
  folder is refused, not loaded as the unmodified model.
- an OpenAI-compatible server: `transformers serve DIR --trust-remote-code`
- vLLM refuses it: it runs no code of a model's own
"""


LAST_TOKEN_USAGE = """- The last token of a prompt is treated apart: a whole prompt goes in one call, padded on the
  left. A prompt that goes on from a filled cache, or with `prefill_chunk_size`, is refused; no
  `--continuous-batching`.
"""


def module_names(lm: LM) -> dict[str, Any]:
    """Return the dotted names of layers, attention (within a layer) and rotary embedding, which the code changes."""
    family = families.family_of(lm.model)
    rotary = rope.rotary_module(lm.model)
    names = {id(module): name for name, module in lm.model.named_modules()}
    return {
        "layers": family.layers,
        "attention": family.attention,
        "rotary": names.get(id(rotary)),
    }


def router_weights(fix: Fix) -> dict[str, Tensor]:
    """Return the weights of MoICE's routers by their names in the model; none for other methods."""
    if not isinstance(fix.method, MoICE):
        return {}
    family = families.family_of(fix.lm.model)
    weights = {}
    for layer, router in _routers(fix.method, fix.lm).items():
        prefix = f"{family.layers}.{layer}.{family.attention}.router"
        for name, value in router.state_dict().items():
            weights[f"{prefix}.{name}"] = value
    return weights


def check_plain_weights(lm: LM, to: str) -> None:
    """Refuse a model with quantised or offloaded weights.

    Args:
        lm: The model.
        to: Name of the format, for the error.

    Raises:
        UserError: It has such weights.
    """
    is_quantised = getattr(lm.model, "hf_quantizer", None) is not None
    if is_quantised or any(parameter.is_meta for parameter in lm.model.parameters()):
        kind = "quantised" if is_quantised else "offloaded"
        allowed = f"plain weights in memory; those of {lm.name} are {kind}"
        hint = "export the model before its weights were packed or offloaded, or use --to lora for a method that folds"
        raise UserError("--to", to, allowed, hint)


def next_token_job(lm: LM, folder: Path, prompts: Prompts) -> dict[str, Any]:
    """A job for :func:`run_jobs`: predict the next tokens of prompts.

    Args:
        lm: The model whose dtype, attention kernel and device the job uses.
        folder: The exported folder.
        prompts: Prompts as token ids.
    """
    return {
        "folder": str(folder.resolve()),
        "prompts": [list(prompt) for prompt in prompts],
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "kernel": families.text_config(lm.model)._attn_implementation,
        "device_map": "auto" if hasattr(lm.model, "hf_device_map") else str(lm.device),
    }


def run_jobs(jobs: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Log-probabilities of every job, from one process that cannot import posbench.

    Args:
        jobs: Results of :func:`next_token_job`.

    Returns:
        For each job a tensor in nats, shape (prompts, vocabulary), float64.
    """
    results: list[Tensor] = run_process(
        [sys.executable, "-I", "-c", NEXT_TOKEN_SCRIPT],
        jobs,
        {"HF_HUB_OFFLINE": "1"},
        "transformers",
    )
    return results


def run_process(
    command: Sequence[str], job: object, environment: Mapping[str, str], to: str
) -> Any:
    """Run a command that loads exported files, and return the object that it saved with torch.

    Args:
        command: The command; the name of the file to save to is appended.
        job: Its input, as JSON.
        environment: Environment variables to set.
        to: Name of the format, for errors.

    Returns:
        What the command saved with ``torch.save``, such as a list of tensors.

    Raises:
        MachineError: The command failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "answers.pt"
        process = subprocess.run(
            [*command, str(results)],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "HF_MODULES_CACHE": folder, **environment},
            check=False,
        )
        if process.returncode:
            reason = _error_line(process.stderr)
            raise MachineError(
                "--to",
                to,
                f"files that can be loaded; the process reported: {reason}",
                "please report this line",
            )
        return torch.load(results)


def _error_line(stderr: str) -> str:
    """The last error in the output of a process, or its last line, in 300 characters."""
    lines = stderr.strip().splitlines() or ["nothing"]
    # Progress bars may follow the error.
    is_error = re.compile(r"(^|\s)[\w.]+(Error|Exception): ")
    errors = [line for line in lines if is_error.search(line)]
    return (errors or lines)[-1][:300]


NEXT_TOKEN_SCRIPT = """
import json, sys
import torch
from transformers import AutoModelForCausalLM

sys.modules["posbench"] = None
results = []
for job in json.load(sys.stdin):
    model = AutoModelForCausalLM.from_pretrained(
        job["folder"],
        trust_remote_code=True,
        dtype=getattr(torch, job["dtype"]),
        attn_implementation=job["kernel"],
        device_map=job["device_map"],
    )
    rows = []
    with torch.inference_mode():
        for prompt in job["prompts"]:
            ids = torch.tensor([prompt], device=model.device)
            logits = model(input_ids=ids, logits_to_keep=1).logits[0, -1]
            rows.append(logits.to(torch.float64).log_softmax(-1).cpu())
    results.append(torch.stack(rows))
torch.save(results, sys.argv[1])
"""
"""Reads a list of jobs as JSON, and saves a list of tensors to the file it is called with."""


def _scale_channel(method: ScaleChannel, lm: LM) -> dict[str, Any]:
    """Return the constants of scale_channel for the shipped code, as they stand in config.json."""
    return {
        "channels": list(method.channels),
        "factor": method.factor,
        "layers": list(method.layers),
        "last": None if method.last == "all" else method.last,
        "tokens": method.tokens,
    }


def _layer_scaling(method: LayerScaling, lm: LM) -> dict[str, Any]:
    rotated = rope.rotated_layers(lm.model)
    scales = [
        scale if layer in rotated else 1.0
        for layer, scale in enumerate(method.layer_scales(lm.layers))
    ]
    return {"scales": scales}


def _position_interpolation(method: PositionInterpolation, lm: LM) -> dict[str, Any]:
    return _layer_scaling(LayerScaling(scales=(method.scale,) * lm.layers), lm)


def _attention_buckets(method: AttentionBuckets, lm: LM) -> dict[str, Any]:
    return {"bases": list(method.bases), "mixture": method.mixture}


def _rope_base(method: RopeBase, lm: LM) -> dict[str, Any]:
    return _attention_buckets(AttentionBuckets(bases=(method.base,)), lm)


def _ms_poe(method: MsPoE, lm: LM) -> dict[str, Any]:
    """Return the constants of Ms-PoE for the shipped code, as they stand in config.json."""
    rotated = rope.rotated_layers(lm.model)
    default_order = "permutation" if method.variant == "official" else "rank"
    return {
        "method": "ms_poe",
        "indices": [layer for layer in rotated if layer >= method.first_layer],
        "ratios": list(method.ratios),
        "alpha": method.alpha,
        "variant": method.variant,
        "order": method.order or default_order,
    }


def _moice(method: MoICE, lm: LM) -> dict[str, Any]:
    """Return the constants of MoICE for the shipped code, as they stand in config.json."""
    routers = _routers(method, lm)
    width = None
    if routers:
        width = next(iter(routers.values())).gate_1.in_features
    return {
        "method": "moice",
        "indices": rope.rotated_layers(lm.model),
        "bases": list(method.bases),
        "top_k": method.top_k,
        "router": width,
    }


def _routers(method: MoICE, lm: LM) -> dict[int, Any]:
    """Trained routers by layer; none where all bases weigh the same."""
    if method.weights == UNIFORM:
        return {}
    return load_routers(lm, str(method.weights), len(method.bases))


SHIPPED_CODE: dict[type[Method], tuple[str, Callable[[Any, LM], dict[str, Any]]]] = {
    ScaleChannel: ("scale_channel", _scale_channel),
    LayerScaling: ("layer_scaling", _layer_scaling),
    PositionInterpolation: ("layer_scaling", _position_interpolation),
    AttentionBuckets: ("attention_buckets", _attention_buckets),
    RopeBase: ("attention_buckets", _rope_base),
    MsPoE: ("by_hand", _ms_poe),
    MoICE: ("by_hand", _moice),
}
"""By method: the name of its file of code, and a function from the method and a model to
the constants in the config."""
