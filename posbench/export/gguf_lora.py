"""A method as a LoRA adapter for llama.cpp, beside a GGUF file of the unmodified model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from posbench.export import gguf as whole
from posbench.export.base import Fix, Prompts, folded
from posbench.export.llama_cpp import next_token, serve
from posbench.export.lora import factors, need_columns
from posbench.late import Tensor
from posbench.methods.base import Folded


class Export(whole.Export):
    """A few kilobytes to a megabyte that leave the model's own file as it is."""

    name = "gguf-lora"

    def check(self, fix: Fix) -> None:
        """See :class:`Format`; an adapter changes weights alone."""
        need_columns(folded(fix, self.name), self.name)
        whole.metadata(_of_ids(fix), Folded())

    def write(self, fix: Fix, folder: Path) -> None:
        """``adapter.gguf``."""
        import gguf

        writer = gguf.GGUFWriter(folder / "adapter.gguf", whole.architecture(fix).name)
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        for name, (down, up) in factors(fix.lm, folded(fix, self.name)).items():
            given, rows = whole.place(fix, f"{name}.weight", up)
            writer.add_tensor(f"{given}.lora_a", down.numpy())
            writer.add_tensor(f"{given}.lora_b", rows.contiguous().numpy())
        writer.add_float32("adapter.lora.alpha", len(down))
        whole.finish(writer)

    def read(self, fix: Fix, folder: Path, prompts: Prompts) -> Tensor:
        """Through xllamacpp, on a file of the unmodified model that is made for this alone."""
        with TemporaryDirectory() as made:
            base = Path(made) / "base.gguf"
            whole.write_model(_of_ids(fix), Folded(), base)
            server = serve(base, max(map(len, prompts)) + 8, folder / "adapter.gguf")
            return next_token(server, prompts, whole.width(fix))

    def usage(self, fix: Fix) -> str:
        """By engine."""
        return USAGE


USAGE = """- llama.cpp: `llama-server -m BASE.gguf --lora DIR/adapter.gguf`; `llama-cli` takes `--lora`, too
- `BASE.gguf` is the unmodified model: as published, from convert_hf_to_gguf.py, or by `posbench export
  model=... method=none --to gguf`. What the adapter does to a quantised one was not measured.
"""


def _of_ids(fix: Fix) -> Fix:
    """The same without its tokenizer, which an adapter does without."""
    return replace(fix, lm=replace(fix.lm, tokenizer=None))
