"""A Hugging Face checkpoint with the method folded in; a config alone if weights stay."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posbench.export.base import Fix, Format, Prompts, checkpoint_change, next_token
from posbench.export.fold import rotary_config, scaled_weights
from posbench.files.atomic import write_json
from posbench.late import PreTrainedConfig, Tensor, torch, transformers
from posbench.methods.base import CheckpointChange
from posbench.model.load import load


class Export(Format):
    """Every engine that loads the model loads this."""

    name = "checkpoint"

    def check(self, fix: Fix) -> None:
        """Raise UserError where the method does not fold, or the config refuses its RoPE."""
        super().check(fix)
        rotary_config(fix.lm.model.config, checkpoint_change(fix, self.name))

    def write(self, fix: Fix, folder: Path) -> None:
        """Write config, tokenizer, and weights (in the published dtype) if the method changes them.

        Args:
            fix: The method with its constants, and the model that it is written for.
            folder: Where the files go, as ``from_pretrained`` of transformers reads them.
        """
        lm = fix.lm
        change = checkpoint_change(fix, self.name)
        config = rotary_config(lm.model.config, change)
        # Some methods change the config alone, such as another base of RoPE.
        if change.columns:
            dtype = getattr(torch, fix.dtype)
            with scaled_weights(lm, change):
                weights = {
                    name: value.to(dtype) if value.is_floating_point() else value
                    for name, value in lm.model.state_dict().items()
                }
                lm.model.save_pretrained(folder, state_dict=weights)
        config.dtype = fix.dtype
        config.save_pretrained(folder)
        published = Path(fix.files) / "config.json"
        if fix.files and published.is_file():
            data = json.loads(published.read_text("utf-8"))
            _set_rope(data, config, change)
            write_json(folder / "config.json", data)
        fix.copy_published(folder)

    def read(self, fix: Fix, folder: Path, prompts: Prompts) -> Tensor:
        """Load what was written, and return the log-probabilities of the next token after each prompt.

        A config alone is loaded with the model's own weights.

        Args:
            fix: The method with its constants, and the model that it was written for.
            folder: The written files.
            prompts: Token ids of P prompts.

        Returns:
            [P, vocabulary], in nats.
        """
        config = transformers.AutoConfig.from_pretrained(folder)
        source = folder if checkpoint_change(fix, self.name).columns else fix.files
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=fix.lm.model.dtype,
            attn_implementation=fix.lm.model.config._attn_implementation,
        )
        return next_token(load(model.to(fix.lm.device)), prompts)

    def usage(self, fix: Fix) -> str:
        """How to load the files, by engine."""
        if checkpoint_change(fix, self.name).columns:
            return WEIGHTS_USAGE
        return fix.with_base(CONFIG_USAGE)


def _set_rope(
    published: dict[str, Any], config: PreTrainedConfig, change: CheckpointChange
) -> None:
    """Set a method's RoPE in a published config, spelled as it is there: transformers 4 knows no ``rope_parameters``.

    Args:
        published: Content of ``config.json``, which changes.
        config: The config with the method.
        change: The method as a change of the checkpoint.
    """
    text_config = config.get_text_config()
    node = published if text_config is config else published["text_config"]
    parameters = text_config.rope_parameters if change.rope else {}
    is_nested = any(isinstance(value, Mapping) for value in parameters.values())
    if change.rope and (is_nested or "rope_parameters" in node):
        node["rope_parameters"] = parameters
        return
    if "rope_theta" in change.rope:
        base = "rotary_emb_base" if "rotary_emb_base" in node else "rope_theta"
        node[base] = change.rope["rope_theta"]
    if change.rope.keys() - {"rope_theta"}:
        # These two have a key of their own beside it.
        beside = ("rope_theta", "partial_rotary_factor")
        scaling = {k: v for k, v in parameters.items() if k not in beside}
        node["rope_scaling"] = scaling


WEIGHTS_USAGE = """A checkpoint like any other; nothing of posbench is needed.

- transformers: `AutoModelForCausalLM.from_pretrained("DIR")`
- vLLM: `vllm serve DIR`
- llama.cpp: `python convert_hf_to_gguf.py DIR`, then as any GGUF file
"""

CONFIG_USAGE = """The weights stay as they are: only `config.json` is another one.

- transformers: `AutoModelForCausalLM.from_pretrained("BASE", config=AutoConfig.from_pretrained("DIR"))`
- vLLM: `vllm serve BASE --hf-config-path DIR`
- or copy `config.json` over that of the checkpoint
"""
