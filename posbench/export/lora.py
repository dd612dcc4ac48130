"""A method as a LoRA adapter of rank 1 for each channel, in PEFT's files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from safetensors.torch import save

from posbench.errors import UserError
from posbench.export.base import Fix, Format, Prompts, folded, next_token
from posbench.export.fold import column, columns
from posbench.files.atomic import write_bytes, write_text
from posbench.late import Tensor, torch
from posbench.methods.base import Folded
from posbench.model import families
from posbench.model.lm import LM
from posbench.model.load import load

PREFIX = "base_model.model."
"""Before the name of every module in PEFT's files."""


class Export(Format):
    """A few kilobytes to a megabyte that leave the weights as they are, quantised ones too."""

    name = "lora"
    package = "peft"
    library = "peft"

    def check(self, fix: Fix) -> None:
        """See :class:`Format`; an adapter changes weights alone."""
        super().check(fix)
        need_columns(folded(fix, self.name), self.name)

    def write(self, fix: Fix, folder: Path) -> None:
        """``adapter_config.json`` and ``adapter_model.safetensors``."""
        change = folded(fix, self.name)
        tensors = dict[str, Tensor]()
        modules = set[str]()
        for name, (down, up) in factors(fix.lm, change).items():
            tensors[f"{PREFIX}{name}.lora_A.weight"] = down
            tensors[f"{PREFIX}{name}.lora_B.weight"] = up
            modules.add(name.rpartition(".")[2])
        rank = max(len(factors) for factors in change.columns.values())
        config: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": fix.base,
            "r": rank,
            "lora_alpha": rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
            "target_modules": sorted(modules),
            "layers_to_transform": sorted(change.columns),
            "layers_pattern": families.family_of(fix.lm.model).layers.rpartition(".")[
                2
            ],
        }
        write_bytes(
            folder / "adapter_model.safetensors", save(tensors, {"format": "pt"})
        )
        write_text(folder / "adapter_config.json", json.dumps(config, indent=2) + "\n")

    def read(self, fix: Fix, folder: Path, prompts: Prompts) -> Tensor:
        """Through PEFT."""
        from peft import PeftModel

        lm = fix.load()
        with (
            warnings.catch_warnings()
        ):  # of PEFT's own calls, which nobody here can change
            warnings.simplefilter("ignore", FutureWarning)
            model = PeftModel.from_pretrained(lm.model, str(folder))
        tuned: Any = model.base_model.model
        return next_token(load(tuned, tokenizer=lm.tokenizer), prompts)

    def usage(self, fix: Fix) -> str:
        """By engine."""
        rank = max(len(factors) for factors in folded(fix, self.name).columns.values())
        return USAGE.replace("BASE", fix.base).replace("RANK", str(rank))


USAGE = """- PEFT: `PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE"), "DIR")`
- vLLM: `vllm serve BASE --enable-lora --max-lora-rank RANK --lora-modules fixed=DIR`, then
  ask for the model `fixed`; the name `BASE` stays the unmodified one
- llama.cpp: `posbench export ... --to gguf-lora`, or its own `convert_lora_to_gguf.py`
"""


def need_columns(change: Folded, to: str) -> None:
    """Refuse what no adapter of weights holds."""
    if change.rope or not change.columns:
        what = "rotary embeddings change" if change.rope else "nothing changes"
        hint = "--to gguf" if to == "gguf-lora" else "--to checkpoint"
        raise UserError(
            "--to", to, f"a format for more than weights: {what} here", hint
        )


def factors(lm: LM, change: Folded) -> dict[str, tuple[Tensor, Tensor]]:
    """Per projection, A [r, D] and B [rows, r] whose product B A is what its weights gain: for each of r
    channels a unit row of A, and in B that channel's column times its factor less one; zeros up to the r of
    the layer with most channels."""
    width = families.text_config(lm.model).hidden_size
    out = dict[str, tuple[Tensor, Tensor]]()
    rank = max(map(len, change.columns.values()), default=0)
    for name, (rows, scales) in columns(lm, change).items():
        down = torch.zeros(rank, width)
        ups = []
        for number, (channel, factor) in enumerate(scales.items()):
            down[number, channel] = 1
            gain = (factor - 1) * column(lm, name, channel)
            if rows is not None:
                gain = torch.zeros_like(gain).index_copy(0, rows, gain[rows])
            ups.append(gain)
        ups += [torch.zeros_like(gain)] * (rank - len(ups))
        out[name] = down, torch.stack(ups, dim=1).float().contiguous()
    return out
