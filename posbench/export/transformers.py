"""A checkpoint with a few lines of code beside it that compute a method when the model runs."""

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
from posbench.export.base import Fix, Format, Prompts
from posbench.late import Tensor, torch
from posbench.methods.attention_buckets import AttentionBuckets
from posbench.methods.base import Method
from posbench.methods.layer_scaling import LayerScaling
from posbench.methods.moice import UNIFORM, MoICE, load_routers
from posbench.methods.ms_poe import MsPoE
from posbench.methods.position_interpolation import PositionInterpolation
from posbench.methods.scale_channel import ScaleChannel
from posbench.model import families, rope
from posbench.model.hooks import replaced
from posbench.model.lm import LM

CODE = Path(__file__).parent / "shipped"
"""The files that go out; what differs between architectures are two names in them, and the config."""
MODULE = "modeling_posbench"


class Export(Format):
    """Weights, config and tokenizer with code beside them, which needs transformers alone.

    The weights go along so that one folder loads, and the code runs with those that it was checked with.
    """

    name = "transformers"
    folds = False

    def check(self, fix: Fix) -> None:
        """Raise UserError for a method that no code is there for, and for weights that cannot be written."""
        if type(fix.method) not in SHIPPED:
            known = ", ".join(method.short_name() for method in SHIPPED)
            allowed = f"a format that holds {fix.method.short_name()}; this one holds {known}, one at a time"
            raise UserError(
                "--to", self.name, allowed, "--to checkpoint, for methods that fold"
            )
        need_plain(fix.lm, self.name)

    def write(self, fix: Fix, folder: Path) -> None:
        """``config.json``, weights in the type of the published ones, tokenizer and the code."""
        model = fix.lm.model
        dtype = getattr(torch, fix.dtype)
        code, constants = SHIPPED[type(fix.method)]
        tensors = model.state_dict() | more_weights(fix)
        weights = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in tensors.items()
        }
        # Some checkpoints (MPT) ask generate() to go without a cache, which would be another method.
        with replaced(model.generation_config, "use_cache", True):
            # Under the names of the class: transformers renames by model_type, which is another one here.
            model.save_pretrained(
                folder, state_dict=weights, save_original_format=False
            )
        own = {
            name: value
            for name, value in model.config.to_dict().items()
            if name != "_name_or_path"
        }
        config = own | {
            "model_type": "posbench",
            # What `transformers serve` loads; other engines know no such name, and refuse the folder.
            "architectures": ["AutoModelForCausalLM"],
            "auto_map": {
                "AutoConfig": f"{MODULE}.PosbenchConfig",
                "AutoModelForCausalLM": f"{MODULE}.PosbenchForCausalLM",
            },
            "dtype": fix.dtype,
            "posbench": {
                "method": code,
                **constants(fix.method, fix.lm),
                "where": places(fix.lm),
            },
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        text = (CODE / f"{code}.py").read_text()
        for stands, ours in (
            ("LlamaConfig", type(model.config)),
            ("LlamaForCausalLM", type(model)),
        ):
            text = text.replace(stands, ours.__name__)
        (folder / f"{MODULE}.py").write_text(text)
        if fix.lm.tokenizer is not None:
            fix.lm.tokenizer.save_pretrained(folder)

    def read(self, fix: Fix, folder: Path, prompts: Prompts) -> Tensor:
        """Through transformers in a process of its own, where posbench cannot be imported."""
        return answers([job(fix.lm, folder, prompts)])[0]

    def usage(self, fix: Fix) -> str:
        """With transformers alone."""
        return USAGE + (
            PROMPTS
            if isinstance(fix.method, ScaleChannel) and fix.method.needs_prompt
            else ""
        )


USAGE = """- transformers: `AutoModelForCausalLM.from_pretrained("DIR", trust_remote_code=True)`, and
  `AutoTokenizer` alike. `modeling_posbench.py` is all the code that runs. Without `trust_remote_code` the
  folder is refused, not loaded as the unmodified model.
- an OpenAI-compatible server: `transformers serve DIR --trust-remote-code`
- vLLM refuses it: it runs no code of a model's own
"""


PROMPTS = """- The last token of a prompt is treated apart: a whole prompt goes in one call, padded on the
  left. So no `prefill_chunk_size`, no prompt that goes on from a filled cache, no `--continuous-batching`.
"""


def places(lm: LM) -> dict[str, Any]:
    """Where the code finds what it changes."""
    family = families.family_of(lm.model)
    module = rope.rotary_module(lm.model)
    names = {id(found): name for name, found in lm.model.named_modules()}
    return {
        "layers": family.layers,
        "attention": family.attention,
        "rotary": names.get(id(module)),
    }


def more_weights(fix: Fix) -> dict[str, Tensor]:
    """Weights of the method's own, by their names in the model: the routers of MoICE."""
    if not isinstance(fix.method, MoICE):
        return {}
    family = families.family_of(fix.lm.model)
    return {
        f"{family.layers}.{layer}.{family.attention}.router.{name}": value
        for layer, router in _routers(fix.method, fix.lm).items()
        for name, value in router.state_dict().items()
    }


def need_plain(lm: LM, to: str) -> None:
    """Refuse a model whose weights are packed or elsewhere."""
    packed = getattr(lm.model, "hf_quantizer", None) is not None
    if packed or any(parameter.is_meta for parameter in lm.model.parameters()):
        kind = "quantised" if packed else "offloaded"
        allowed = (
            f"weights in memory that are plain numbers; those of {lm.name} are {kind}"
        )
        hint = "export from the model that it was made of, or --to lora for a method that folds"
        raise UserError("--to", to, allowed, hint)


def job(lm: LM, folder: Path, prompts: Prompts) -> dict[str, Any]:
    """What :func:`answers` is asked: a folder, the type, kernel and device of a model, and N prompts."""
    return {
        "folder": str(folder.resolve()),
        "prompts": [list(prompt) for prompt in prompts],
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "kernel": families.text_config(lm.model)._attn_implementation,
        "place": "auto" if hasattr(lm.model, "hf_device_map") else str(lm.device),
    }


def answers(jobs: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Log-probabilities [N, V] of every job, from one process where posbench cannot be imported."""
    rows: list[Tensor] = apart(
        [sys.executable, "-I", "-c", ASK], jobs, {"HF_HUB_OFFLINE": "1"}, "transformers"
    )
    return rows


def apart(
    command: Sequence[str], job: object, settings: Mapping[str, str], to: str
) -> Any:
    """What a process of its own saved with torch: it gets a job as JSON, the file's name, and environment
    variables.

    Raises:
        MachineError: It ended with an error.
    """
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "answers.pt"
        done = subprocess.run(
            [*command, str(out)],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            cwd=place,
            env={**os.environ, "HF_MODULES_CACHE": place, **settings},
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["nothing"]
            # Progress bars may follow the error.
            errors = [
                line
                for line in lines
                if re.search(r"(^|\s)[\w.]+(Error|Exception): ", line)
            ]
            said = (errors or lines)[-1][:300]
            raise MachineError(
                "--to",
                to,
                f"files that load; the process said: {said}",
                "please report it",
            )
        return torch.load(out)


ASK = """
import json, sys
import torch
from transformers import AutoModelForCausalLM

sys.modules["posbench"] = None
rows = []
for job in json.load(sys.stdin):
    model = AutoModelForCausalLM.from_pretrained(
        job["folder"],
        trust_remote_code=True,
        dtype=getattr(torch, job["dtype"]),
        attn_implementation=job["kernel"],
        device_map=job["place"],
    )
    with torch.inference_mode():
        found = [
            model(input_ids=torch.tensor([prompt], device=model.device), logits_to_keep=1).logits[0, -1]
            for prompt in job["prompts"]
        ]
    rows.append(torch.stack([row.to(torch.float64).log_softmax(-1).cpu() for row in found]))
torch.save(rows, sys.argv[1])
"""
"""What that process runs, from a list of jobs in JSON to a file with a list of tensors."""


def _channels(method: ScaleChannel, lm: LM) -> dict[str, Any]:
    last = None if method.last == "all" else method.last
    own = {
        "channels": list(method.channels),
        "factor": method.factor,
        "layers": list(method.layers),
    }
    return {**own, "last": last, "tokens": method.tokens}


def _scales(method: LayerScaling, lm: LM) -> dict[str, Any]:
    rotated = rope.rotated_layers(lm.model)
    scales = method.layer_scales(lm.layers)
    return {
        "scales": [
            scale if layer in rotated else 1.0 for layer, scale in enumerate(scales)
        ]
    }


def _scale(method: PositionInterpolation, lm: LM) -> dict[str, Any]:
    return _scales(LayerScaling(scales=(method.scale,) * lm.layers), lm)


def _buckets(method: AttentionBuckets, lm: LM) -> dict[str, Any]:
    return {"bases": list(method.bases), "mixture": method.mixture}


def _ratios(method: MsPoE, lm: LM) -> dict[str, Any]:
    direct = "permutation" if method.variant == "official" else "rank"
    layers = [
        layer for layer in rope.rotated_layers(lm.model) if layer >= method.first_layer
    ]
    own = {"indices": layers, "ratios": list(method.ratios), "alpha": method.alpha}
    return {
        "method": "ms_poe",
        **own,
        "variant": method.variant,
        "order": method.order or direct,
    }


def _mixture(method: MoICE, lm: LM) -> dict[str, Any]:
    routers = _routers(method, lm)
    width = next(iter(routers.values())).gate_1.in_features if routers else None
    own = {
        "indices": rope.rotated_layers(lm.model),
        "bases": list(method.bases),
        "top_k": method.top_k,
    }
    return {"method": "moice", **own, "router": width}


def _routers(method: MoICE, lm: LM) -> dict[int, Any]:
    return (
        {}
        if method.weights == UNIFORM
        else load_routers(lm, str(method.weights), len(method.bases))
    )


SHIPPED: dict[type[Method], tuple[str, Callable[[Any, LM], dict[str, Any]]]] = {
    ScaleChannel: ("scale_channel", _channels),
    LayerScaling: ("layer_scaling", _scales),
    PositionInterpolation: ("layer_scaling", _scale),
    AttentionBuckets: ("attention_buckets", _buckets),
    MsPoE: ("by_hand", _ratios),
    MoICE: ("by_hand", _mixture),
}
"""By method, the file of its code and what makes the constants in the config."""
