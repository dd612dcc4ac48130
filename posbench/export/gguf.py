"""A GGUF file of the whole model with the method folded in, for llama.cpp and what is built on it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from posbench.errors import UserError
from posbench.export.base import Fix, Format, Prompts, folded
from posbench.export.fold import rotary_config, scaled_weights
from posbench.export.llama_cpp import next_token, serve, tokens
from posbench.late import Tensor, torch
from posbench.methods.base import Folded
from posbench.model import families, rope


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp knows a model."""

    name: str
    interleaved: bool = (
        False  # rotates neighbouring coordinates of a head, not its two halves
    )
    gemma: bool = False  # norms add 1 to their weight; llama.cpp takes GELU from a half precision table
    # its queries are scaled by the size of a head, and by hidden size / heads where it has so many layers;
    # llama.cpp reads which layers have a sliding window
    large: int = 0


ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True),
    "mistral": Architecture("llama", interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", gemma=True),
    "gemma2": Architecture("gemma2", gemma=True, large=46),
    "gemma3_text": Architecture("gemma3", gemma=True, large=62),
}
"""By ``config.model_type``."""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}COUNT| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    _SPLIT.replace("COUNT", count): name
    for count, name in (("", "qwen2"), ("{1,3}", "llama-bpe"))
}
"""How byte-level tokenizers cut a text before they merge, and llama.cpp's names for it."""


class Export(Format):
    """One file; of the unmodified model, too."""

    name = "gguf"
    package = "xllamacpp"
    library = "gguf"

    def check(self, fix: Fix) -> None:
        """See :class:`Format`; llama.cpp must know the architecture, its rotary embedding and tokenizer."""
        metadata(fix, folded(fix, self.name))

    def exact(self, fix: Fix) -> bool:
        """See :class:`Format`."""
        return fix.exact and not architecture(fix).gemma

    def write(self, fix: Fix, folder: Path) -> None:
        """``model.gguf``."""
        write_model(fix, folded(fix, self.name), folder / "model.gguf")

    def read(self, fix: Fix, folder: Path, prompts: Prompts) -> Tensor:
        """Through xllamacpp; as texts the prompts must be the same tokens as here, too."""
        server = serve(folder / "model.gguf", max(map(len, prompts)) + 8)
        tokenizer = fix.lm.tokenizer
        for prompt in prompts:
            text = (
                ""
                if tokenizer is None
                else str(tokenizer.decode(prompt, skip_special_tokens=True))
            )
            if (
                tokenizer is not None
                and tokens(server, text) != tokenizer(text)["input_ids"]
            ):
                refuse(
                    fix,
                    f"a tokenizer that llama.cpp follows, as it does not in {text[:40]!r},",
                )
        return next_token(server, prompts, width(fix))

    def usage(self, fix: Fix) -> str:
        """By engine."""
        return USAGE


USAGE = """- llama.cpp: `llama-server -m DIR/model.gguf`, or `llama-cli -m DIR/model.gguf`
- The weights are in float32 or float16; what `llama-quantize` makes of them was not measured.
"""


def refuse(fix: Fix, allowed: str) -> NoReturn:
    """Raise UserError, with the way that is left."""
    hint = "--to checkpoint or lora, then llama.cpp's own convert_hf_to_gguf.py or convert_lora_to_gguf.py"
    raise UserError("model", fix.lm.name, f"{allowed} in a GGUF file of posbench", hint)


def architecture(fix: Fix) -> Architecture:
    """How llama.cpp knows the model; UserError where it does not."""
    kind = fix.lm.model.config.model_type
    if kind not in ARCHITECTURES:
        refuse(fix, f"a model of type {', '.join(ARCHITECTURES)}, not {kind},")
    if any(p.is_meta or not p.is_floating_point() for p in fix.lm.model.parameters()):
        refuse(
            fix,
            "weights in memory that are plain numbers, neither quantised nor offloaded,",
        )
    return ARCHITECTURES[kind]


def width(fix: Fix) -> int:
    """Tokens of the vocabulary."""
    return int(families.text_config(fix.lm.model).vocab_size)


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows [H * d, ...] of queries or keys for a rotation of neighbouring coordinates; in transformers each
    turns with the one d / 2 further on."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def place(fix: Fix, name: str, rows: Tensor) -> tuple[str, Tensor]:
    """Name and rows in GGUF of what belongs to a tensor of the model, by its dotted name; UserError where
    there is none."""
    import gguf

    kind = architecture(fix)
    text = families.text_config(fix.lm.model)
    number = next(
        number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == kind.name
    )
    found = gguf.get_tensor_name_map(number, fix.lm.layers).get_name(
        name, (".weight", ".bias")
    )
    if found is None:
        refuse(fix, f"a plain model of its type, without {name},")
    heads = {"q_proj": text.num_attention_heads, "k_proj": text.num_key_value_heads}
    module = name.split(".")[-2]
    return found, interleaved(
        rows, heads[module]
    ) if kind.interleaved and module in heads else rows


def write_model(fix: Fix, change: Folded, path: Path) -> None:
    """Write the model with a change, matrices in float16 where the published ones are in half precision."""
    import gguf

    kind = architecture(fix)
    half = fix.dtype in ("float16", "bfloat16")
    writer = gguf.GGUFWriter(path, kind.name)
    for key, value in metadata(fix, change).items():
        getattr(writer, f"add_{key}")(value)
    with scaled_weights(fix.lm, change):
        # Of tied matrices the first alone, as llama.cpp wants it.
        for name, weight in fix.lm.model.named_parameters():
            given, rows = place(fix, name, weight.detach().float().cpu())
            rows = rows + 1 if kind.gemma and name.endswith("norm.weight") else rows
            writer.add_tensor(
                given, (rows.half() if half and rows.ndim > 1 else rows).numpy()
            )
        module: Any = rope.rotary_module(fix.lm.model)
        if getattr(module, "rope_type", None) == "llama3":
            theta = module.config.rope_parameters["rope_theta"]
            slower = module.inv_freq.double().cpu()
            plain = theta ** (
                -torch.arange(len(slower), dtype=torch.float64) / len(slower)
            )
            writer.add_tensor("rope_freqs.weight", (plain / slower).float().numpy())
        finish(writer)


def finish(writer: Any) -> None:
    """Write a file whose parts were all given."""
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def metadata(fix: Fix, change: Folded) -> dict[str, Any]:
    """Sizes, rotary embedding and vocabulary, by the method of gguf's writer that takes each; UserError where
    llama.cpp has no word for one."""
    import gguf

    kind = architecture(fix)
    text = rotary_config(fix.lm.model.config, change).get_text_config()
    head = (
        getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    )
    window = getattr(text, "sliding_window", None)
    context = text.max_position_embeddings
    whole = text.rope_parameters.get("full_attention", text.rope_parameters)
    local = text.rope_parameters.get("sliding_attention", {"rope_type": "default"})
    scaling = whole["rope_type"]
    more = set(whole) - {
        "rope_type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
    }
    known = scaling in ("default", "linear", "llama3") or (
        scaling == "yarn" and not more
    )
    if not known or local["rope_type"] != "default":
        refuse(
            fix,
            f"rope_type default, linear, llama3 or plain yarn, default where layers slide; not {whole}",
        )
    found = {
        "type": "model",
        "name": fix.lm.name,
        # Where llama.cpp knows no window, it is the same model up to there.
        "context_length": min(context, window)
        if window and not kind.large
        else context,
        "vocab_size": text.vocab_size,
        "embedding_length": text.hidden_size,
        "block_count": text.num_hidden_layers,
        "feed_forward_length": text.intermediate_size,
        "head_count": text.num_attention_heads,
        "head_count_kv": text.num_key_value_heads,
        "key_length": head,
        "value_length": head,
        "layer_norm_rms_eps": text.rms_norm_eps,
        "attn_logit_softcapping": getattr(text, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
        "rope_dimension_count": head,
        "rope_freq_base": whole["rope_theta"],
        "rope_freq_base_swa": local.get("rope_theta"),
    }
    if scaling in ("linear", "yarn"):
        found |= {
            "rope_scaling_type": gguf.RopeScalingType(scaling),
            "rope_scaling_factor": whole["factor"],
        }
        found["rope_scaling_orig_ctx_len"] = whole.get(
            "original_max_position_embeddings"
        )
    if kind.large:
        full = [name == "full_attention" for name in text.layer_types]
        period = 1 + (*full, True).index(True)
        wide = (
            text.hidden_size / text.num_attention_heads
            if len(full) == kind.large
            else head
        )
        if text.query_pre_attn_scalar != wide or full != [
            not i % period for i in range(1, len(full) + 1)
        ]:
            refuse(
                fix,
                f"full attention in every n-th layer, and query_pre_attn_scalar {wide:g}",
            )
        found |= {"sliding_window": window, "sliding_window_pattern": period}
    return {
        key: value
        for key, value in (found | vocabulary(fix)).items()
        if value is not None
    }


def vocabulary(fix: Fix) -> dict[str, Any]:
    """The part of :func:`metadata` that reads texts; without a tokenizer token ids alone are read."""
    from gguf import TokenType

    size = width(fix)
    tokenizer = fix.lm.tokenizer
    pieces = [f"<|{i}|>" for i in range(size)]
    types = [TokenType.UNUSED] * size
    spelt: dict[str, Any] = {"model": {"type": "WordLevel"}}
    if tokenizer is not None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        spelt = json.loads(backend.to_str()) if backend else {"model": {"type": "slow"}}
        added = tokenizer.added_tokens_decoder
        for piece, i in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])[
            :size
        ]:
            kind = TokenType.NORMAL if i not in added else TokenType.USER_DEFINED
            pieces[i], types[i] = (
                piece,
                TokenType.CONTROL if i in added and added[i].special else kind,
            )
    steps = (spelt.get("pre_tokenizer") or {}).get("pretokenizers", [{}])
    split = SPLITS.get(steps[0].get("pattern", {}).get("Regex"))
    found: dict[str, Any] = {
        "token_types": types,
        "add_eos_token": False,
        "add_bos_token": False,
    }
    if spelt["model"]["type"] == "WordLevel":
        # A text is cut into as few pieces as possible; a space is U+2581 in this kind of vocabulary.
        found |= {
            "tokenizer_model": "t5",
            "token_list": [piece.replace(" ", "\u2581") for piece in pieces],
        }
        found |= {
            "token_scores": [-1.0] * size,
            "add_space_prefix": False,
            "remove_extra_whitespaces": False,
        }
    elif spelt["model"]["type"] == "BPE" and split:
        merges = [
            pair if isinstance(pair, str) else " ".join(pair)
            for pair in spelt["model"]["merges"]
        ]
        found |= {
            "tokenizer_model": "gpt2",
            "tokenizer_pre": split,
            "token_list": pieces,
        }
        found["token_merges"] = merges
    else:
        refuse(
            fix,
            "a tokenizer of whole words, or a byte-level one of Qwen's or Llama 3's kind",
        )
    for name in ("bos", "eos", "pad", "unk"):
        found[f"{name}_token_id"] = getattr(tokenizer, f"{name}_token_id", None)
    if tokenizer is not None:
        found["add_bos_token"] = (
            tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
        )
        found["chat_template"] = (
            tokenizer.chat_template
            if isinstance(tokenizer.chat_template, str)
            else None
        )
    return found
