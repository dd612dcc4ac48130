"""A LoRA adapter for llama.cpp, used with a GGUF file of the unmodified model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from posbench.export import gguf as model_format
from posbench.export.base import Fix, Prompts, checkpoint_change
from posbench.export.llama_cpp import next_token, serve
from posbench.export.lora import factors, need_columns
from posbench.late import Tensor
from posbench.methods.base import CheckpointChange


class Export(model_format.Export):
    """A few kilobytes to a megabyte that leave the model's own file as it is."""

    name = "gguf-lora"
    weight_types = ()

    def check(self, fix: Fix) -> None:
        """Raise UserError where the method changes more than weights, or for the model."""
        need_columns(checkpoint_change(fix, self.name), self.name)
        model_format.metadata(_without_tokenizer(fix), CheckpointChange())

    def write(self, fix: Fix, folder: Path) -> None:
        """Write the method as a LoRA adapter of llama.cpp, ``adapter.gguf``.

        Args:
            fix: The method with its constants, and the model that it is written for.
            folder: Where the file goes.
        """
        import gguf

        name = model_format.architecture(fix).name
        writer = gguf.GGUFWriter(folder / "adapter.gguf", name)
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        for module, (a, b) in factors(
            fix.lm, checkpoint_change(fix, self.name)
        ).items():
            gguf_name, rows = model_format.to_gguf(fix, f"{module}.weight", b)
            writer.add_tensor(f"{gguf_name}.lora_a", a.numpy())
            writer.add_tensor(f"{gguf_name}.lora_b", rows.contiguous().numpy())
        rank = len(a)
        # alpha = rank makes llama.cpp's factor alpha / rank 1.
        writer.add_float32("adapter.lora.alpha", rank)
        model_format.write_and_close(writer)

    def read(self, fix: Fix, folder: Path, prompts: Prompts) -> Tensor:
        """See :meth:`Format.read`; the unmodified model goes to a temporary file."""
        with TemporaryDirectory() as temporary:
            base = Path(temporary) / "base.gguf"
            model_format.write_model(_without_tokenizer(fix), CheckpointChange(), base)
            server = serve(base, max(map(len, prompts)) + 8, folder / "adapter.gguf")
            return next_token(server, prompts, model_format.vocabulary_size(fix))

    def usage(self, fix: Fix) -> str:
        """How to load the adapter."""
        return USAGE


USAGE = """- llama.cpp: `llama-server -m BASE.gguf --lora DIR/adapter.gguf`; `llama-cli` takes `--lora`, too
- `BASE.gguf` is the unmodified model: as published, from convert_hf_to_gguf.py, or by `posbench export
  model=... method=none --to gguf`. What the adapter does to a quantised one was not measured.
"""


def _without_tokenizer(fix: Fix) -> Fix:
    """The fix without its tokenizer, which an adapter does not need."""
    return replace(fix, lm=replace(fix.lm, tokenizer=None))
