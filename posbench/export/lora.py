"""A method as a LoRA adapter, of rank 1 for each scaled channel, in PEFT's files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from safetensors.torch import save

from posbench.errors import UserError
from posbench.export.base import Fix, Format, Prompts, checkpoint_change, next_token
from posbench.export.fold import column, column_scalings
from posbench.files.atomic import write_bytes, write_json
from posbench.late import Tensor, torch
from posbench.methods.base import CheckpointChange
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
        """Raise UserError where the method changes more than weights."""
        super().check(fix)
        need_columns(checkpoint_change(fix, self.name), self.name)

    def write(self, fix: Fix, folder: Path) -> None:
        """Write the method as a LoRA adapter: ``adapter_config.json`` and ``adapter_model.safetensors``.

        Args:
            fix: The method with its constants, and the model that it is written for.
            folder: Where the files go.
        """
        change = checkpoint_change(fix, self.name)
        tensors: dict[str, Tensor] = {}
        modules: set[str] = set()
        for name, (a, b) in factors(fix.lm, change).items():
            tensors[f"{PREFIX}{name}.lora_A.weight"] = a
            tensors[f"{PREFIX}{name}.lora_B.weight"] = b
            modules.add(name.rpartition(".")[2])
        # lora_alpha = rank makes PEFT's factor 1.
        rank = adapter_rank(change)
        layers = families.family_of(fix.lm.model).layers
        config: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": fix.base,
            "revision": fix.revision,
            "r": rank,
            "lora_alpha": rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
            "target_modules": sorted(modules),
            "layers_to_transform": sorted(change.columns),
            "layers_pattern": layers.rpartition(".")[2],
        }
        weights = save(tensors, {"format": "pt"})
        write_bytes(folder / "adapter_model.safetensors", weights)
        write_json(folder / "adapter_config.json", config)

    def read(self, fix: Fix, folder: Path, prompts: Prompts) -> Tensor:
        """Load the adapter with PEFT, and return the log-probabilities of the next token after each prompt.

        Args:
            fix: The method with its constants, and the model that it was written for.
            folder: Holds the adapter.
            prompts: Token ids of P prompts.

        Returns:
            [P, vocabulary], in nats.
        """
        from peft import PeftModel

        lm = fix.load()
        with warnings.catch_warnings():
            # PEFT's own calls warn, which users cannot change.
            warnings.simplefilter("ignore", FutureWarning)
            model = PeftModel.from_pretrained(lm.model, str(folder))
        adapted: Any = model.base_model.model
        return next_token(load(adapted, tokenizer=lm.tokenizer), prompts)

    def usage(self, fix: Fix) -> str:
        """How to load the adapter, by engine."""
        max_rank = vllm_max_rank(adapter_rank(checkpoint_change(fix, self.name)))
        vllm = f"- vLLM: not at this rank, it takes at most {VLLM_MAX_RANKS[-1]}\n"
        if max_rank is not None:
            vllm = VLLM_USAGE.replace("RANK", str(max_rank))
        return fix.with_base(USAGE.replace("VLLM\n", vllm))


VLLM_MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for ``--max-lora-rank``."""
VLLM_USAGE = """\
- vLLM: `vllm serve BASE --enable-lora --max-loras 2 --max-lora-rank RANK --lora-modules fixed=DIR`, then
  ask for the model `fixed`; the name `BASE` stays the unmodified one. Keep `--max-loras 2`: with 1, vLLM on a
  CPU applies the adapter also to requests for `BASE` that run beside those for `fixed`.
"""
USAGE = """- PEFT: `PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE"), "DIR")`
VLLM
- llama.cpp: `posbench export ... --to gguf-lora`, or its own `convert_lora_to_gguf.py`
"""


def need_columns(change: CheckpointChange, to: str) -> None:
    """Refuse a change of rotary embeddings, which an adapter cannot hold, and one of nothing.

    Args:
        change: The method as a change of the checkpoint.
        to: Name of the format, for the error.

    Raises:
        UserError: States which.
    """
    if change.columns and not change.rope:
        return
    reason = "rotary embeddings change" if change.rope else "nothing changes"
    hint = "--to gguf" if to == "gguf-lora" else "--to checkpoint"
    allowed = f"a format for more than weights: {reason} here"
    raise UserError("--to", to, allowed, hint)


def adapter_rank(change: CheckpointChange) -> int:
    """The rank of the adapter: the largest number of channels in a layer."""
    return max(map(len, change.columns.values()), default=0)


def vllm_max_rank(rank: int) -> int | None:
    """The smallest ``--max-lora-rank`` of vLLM for an adapter of a rank; None if it has none."""
    return next((value for value in VLLM_MAX_RANKS if value >= rank), None)


def factors(lm: LM, change: CheckpointChange) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the adapter's matrices, by the dotted name of the projection.

    Each scaled channel has a unit row in A, and in B its column of the weights times its
    factor minus 1; the rest, up to the rank of the adapter, is zero.

    Args:
        lm: The model.
        change: The method as a change of the checkpoint.

    Returns:
        A, shape (rank, hidden size), and B, shape (rows, rank), in float32; B A is added to
        the projection's weights.
    """
    width = families.text_config(lm.model).hidden_size
    matrices: dict[str, tuple[Tensor, Tensor]] = {}
    rank = adapter_rank(change)
    for name, (rows, column_factors) in column_scalings(lm, change).items():
        a = torch.zeros(rank, width)
        gains = []
        for index, (channel, factor) in enumerate(column_factors.items()):
            a[index, channel] = 1
            gain = (factor - 1) * column(lm, name, channel)
            # A fused projection: only rows of queries and keys change.
            if rows is not None:
                gain = torch.zeros_like(gain).index_copy(0, rows, gain[rows])
            gains.append(gain)
        padding = [torch.zeros_like(gain)] * (rank - len(gains))
        b = torch.stack(gains + padding, dim=1).float().contiguous()
        matrices[name] = (a, b)
    return matrices
