"""A Hugging Face checkpoint with the method folded in; a config alone if weights stay."""

from __future__ import annotations

from pathlib import Path

from posbench.export.base import Fix, Format, Prompts, checkpoint_change, next_token
from posbench.export.fold import rotary_config, scaled_weights
from posbench.late import Tensor, torch, transformers
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
        if lm.tokenizer is not None:
            lm.tokenizer.save_pretrained(folder)

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
