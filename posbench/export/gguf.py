"""A GGUF file of the model with the method folded in, for llama.cpp and its users."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NoReturn

from posbench.errors import UserError
from posbench.export.base import (
    Fix,
    Format,
    Prompts,
    checkpoint_change,
    difference,
)
from posbench.export.fold import rotary_config, scaled_weights
from posbench.export.llama_cpp import next_token, serve, tokens
from posbench.files.gguf import PRE_TOKENIZERS, TOKENIZER_JSON, pre_tokenizer_name
from posbench.late import Tensor, torch
from posbench.methods.base import CheckpointChange
from posbench.model import families, rope


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp implements an architecture.

    Attributes:
        name: Its name in llama.cpp.
        interleaved: Whether a rotation turns neighbouring coordinates of a head, rather
            than its two halves.
        gemma: Whether norms add 1 to their weight, and GELU comes from a table in half
            precision.
        large: Number of layers of the size whose queries are scaled by hidden size /
            heads instead of the size of a head. Not 0 where llama.cpp also reads which
            layers have a sliding window.
    """

    name: str
    interleaved: bool = False
    gemma: bool = False
    large: int = 0


WRITTEN_ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True),
    "mistral": Architecture("llama", interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", gemma=True),
    "gemma2": Architecture("gemma2", gemma=True, large=46),
    "gemma3_text": Architecture("gemma3", gemma=True, large=62),
}
"""By ``config.model_type``."""


Q8_0_BLOCK = 32
"""Neighbours in a row that share a scale in Q8_0; other rows are written in float16."""
Q8_0_ERROR = 0.5 / 127 + 2**-11
"""Largest error as a share of the largest number of a block: half a step, and a scale in half precision."""


class Export(Format):
    """One file; of the unmodified model, too."""

    name = "gguf"
    package = "xllamacpp"
    library = "gguf"
    weight_types: ClassVar[tuple[str, ...]] = ("float32", "float16", "q8_0")

    def check(self, fix: Fix) -> None:
        """Raise UserError where llama.cpp cannot represent the model or the method.

        It must know the architecture, its rotary embedding and tokenizer.
        """
        metadata(fix, checkpoint_change(fix, self.name))

    def exact(self, fix: Fix) -> bool:
        """Whether llama.cpp computes in float32 or better."""
        is_exact = weight_type(fix) == "float32"
        return fix.exact and is_exact and not architecture(fix).gemma

    def write(self, fix: Fix, folder: Path) -> None:
        """Write ``model.gguf``."""
        write_model(fix, checkpoint_change(fix, self.name), folder / "model.gguf")

    def read(self, fix: Fix, folder: Path, prompts: Prompts) -> Tensor:
        """Serve the file with llama.cpp, and return the log-probabilities of the next token after each prompt.

        Args:
            fix: The method with its constants, and the model that it was written for.
            folder: Holds the written file.
            prompts: Token ids of P prompts.

        Returns:
            [P, vocabulary], in nats.

        Raises:
            UserError: llama.cpp cuts the text of a prompt into other tokens.
        """
        if weight_type(fix) == "q8_0":
            need_rounded_weights(fix, folder / "model.gguf")
        # A few tokens more than the longest prompt has: room for the one that is asked.
        server = serve(folder / "model.gguf", max(map(len, prompts)) + 8)
        # Served as text later, a prompt would be other tokens than those that are compared here.
        tokenizer = fix.lm.tokenizer
        if tokenizer is not None:
            for prompt in prompts:
                text = str(tokenizer.decode(prompt, skip_special_tokens=True))
                if tokens(server, text) != tokenizer(text)["input_ids"]:
                    refuse(
                        fix,
                        "a tokenizer that llama.cpp follows, "
                        f"as it does not in {text[:40]!r},",
                    )
        return next_token(server, prompts, vocabulary_size(fix))

    def rounding(self, fix: Fix, unmodified: Tensor, prompts: Prompts) -> float:
        """Return how far rounding to Q8_0 alone moves the unmodified model's next-token log-probabilities.

        It is 0 for other weight types.

        Args:
            fix: The method with its constants, and the model that it was written for.
            unmodified: Log-probabilities of P prompts without the method in process, [P, vocabulary], in nats.
            prompts: Token ids of the prompts.
        """
        if weight_type(fix) != "q8_0":
            return 0.0
        with TemporaryDirectory() as temporary:
            file = Path(temporary) / "unmodified.gguf"
            write_model(fix, CheckpointChange(), file)
            # A few tokens more than the longest prompt has: room for the one that is asked.
            server = serve(file, max(map(len, prompts)) + 8)
            rounded = next_token(server, prompts, vocabulary_size(fix))
        return difference(unmodified, rounded)

    def usage(self, fix: Fix) -> str:
        """How to load the file."""
        return USAGE.format(weights=weight_type(fix))


USAGE = """- llama.cpp: `llama-server -m DIR/model.gguf`, or `llama-cli -m DIR/model.gguf`
- Matrices are in {weights}; what `llama-quantize` makes of them was not measured.
"""


def weight_type(fix: Fix) -> str:
    """Type of matrices in the file, one of ``weight_types``."""
    if fix.weights:
        return fix.weights
    return "float16" if fix.dtype in ("float16", "bfloat16") else "float32"


def refuse(fix: Fix, allowed: str) -> NoReturn:
    """Raise UserError, with the formats that remain."""
    hint = "--to checkpoint or lora, then llama.cpp's own convert_hf_to_gguf.py or convert_lora_to_gguf.py"
    raise UserError("model", fix.lm.name, f"{allowed} in a GGUF file of posbench", hint)


def architecture(fix: Fix) -> Architecture:
    """Return what llama.cpp calls the model's architecture.

    Args:
        fix: The method with its constants, and the model that it is written for.

    Raises:
        UserError: llama.cpp has none, or the weights are quantised or offloaded.
    """
    model_type = fix.lm.model.config.model_type
    if model_type not in WRITTEN_ARCHITECTURES:
        refuse(
            fix,
            f"a model of type {', '.join(WRITTEN_ARCHITECTURES)}, not {model_type},",
        )
    if any(p.is_meta or not p.is_floating_point() for p in fix.lm.model.parameters()):
        refuse(
            fix,
            "plain weights in memory, neither quantised nor offloaded,",
        )
    return WRITTEN_ARCHITECTURES[model_type]


def vocabulary_size(fix: Fix) -> int:
    """Number of tokens in the model's vocabulary."""
    return int(families.text_config(fix.lm.model).vocab_size)


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows of a projection for a rotation of neighbouring coordinates.

    In transformers a coordinate of a head turns with the one d / 2 further on.

    Args:
        rows: Rows of the query or key projection, shape (heads * d, ...).
        heads: Number of heads.

    Returns:
        The rows with each head's two halves interleaved, same shape.
    """
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def to_gguf(fix: Fix, name: str, rows: Tensor) -> tuple[str, Tensor]:
    """Return the name and the rows in GGUF of a tensor of the model.

    Args:
        fix: The fix whose model it is.
        name: Dotted name of the tensor in transformers.
        rows: Its rows, shape (rows, ...), or the rows of an adapter's matrix B.

    Raises:
        UserError: GGUF has no such tensor for this architecture.
    """
    import gguf

    arch = architecture(fix)
    config = families.text_config(fix.lm.model)
    numbers = {arch_name: number for number, arch_name in gguf.MODEL_ARCH_NAMES.items()}
    name_map = gguf.get_tensor_name_map(numbers[arch.name], fix.lm.layers)
    gguf_name = name_map.get_name(name, (".weight", ".bias"))
    if gguf_name is None:
        refuse(fix, f"a plain model of its type, without {name},")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    module = name.split(".")[-2]
    if arch.interleaved and module in heads:
        rows = interleaved(rows, heads[module])
    return gguf_name, rows


def write_model(fix: Fix, change: CheckpointChange, path: Path) -> None:
    """Write the model with a change folded in; vectors are always in float32.

    Args:
        fix: The fix whose model is written.
        change: The method as a change of the checkpoint.
        path: The GGUF file.
    """
    import gguf

    arch = architecture(fix)
    weights = weight_type(fix)
    writer = gguf.GGUFWriter(path, arch.name)
    for key, value in metadata(fix, change).items():
        getattr(writer, f"add_{key}")(value)
    if weights == "q8_0":
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    backend = getattr(fix.lm.tokenizer, "backend_tokenizer", None)
    if backend is not None:
        writer.add_string(TOKENIZER_JSON, backend.to_str())
    with scaled_weights(fix.lm, change):
        for gguf_name, rows in named_rows(fix):
            if rows.ndim == 1 or weights == "float32":
                writer.add_tensor(gguf_name, rows.numpy())
            elif weights == "float16" or rows.shape[1] % Q8_0_BLOCK:
                writer.add_tensor(gguf_name, rows.half().numpy())
            else:
                kind = gguf.GGMLQuantizationType.Q8_0
                blocks = gguf.quantize(rows.numpy(), kind)
                writer.add_tensor(gguf_name, blocks, raw_dtype=kind)
        rotary: Any = rope.rotary_module(fix.lm.model)
        # llama.cpp takes this scaling as a factor of each frequency.
        if getattr(rotary, "rope_type", None) == "llama3":
            theta = rope.own_base(fix.lm.model)
            scaled = rotary.inv_freq.double().cpu()
            count = len(scaled)
            plain = theta ** (-torch.arange(count, dtype=torch.float64) / count)
            writer.add_tensor("rope_freqs.weight", (plain / scaled).float().numpy())
        write_and_close(writer)


def named_rows(fix: Fix) -> Iterator[tuple[str, Tensor]]:
    """Yield name in GGUF and rows, in float32, of the tensors of the model as it is now."""
    arch = architecture(fix)
    # Of tied matrices the first alone, as llama.cpp expects.
    for name, weight in fix.lm.model.named_parameters():
        gguf_name, rows = to_gguf(fix, name, weight.detach().float().cpu())
        if arch.gemma and name.endswith("norm.weight"):
            # Gemma multiplies by 1 + weight, llama.cpp by the stored number.
            rows = rows + 1
        yield gguf_name, rows


def need_rounded_weights(fix: Fix, file: Path) -> None:
    """Refuse a file in Q8_0 whose matrices are not the fix's, rounded.

    Args:
        fix: The fix that was written.
        file: The GGUF file.

    Raises:
        UserError: A number is further off than Q8_0 rounds.
    """
    import gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    change = checkpoint_change(fix, Export.name)
    with scaled_weights(fix.lm, change):
        for name, rows in named_rows(fix):
            tensor = tensors[name]
            if tensor.tensor_type != gguf.GGMLQuantizationType.Q8_0:
                continue
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            errors = (torch.from_numpy(values) - rows).unflatten(1, (-1, Q8_0_BLOCK))
            largest = rows.unflatten(1, (-1, Q8_0_BLOCK)).abs().amax(-1)
            if bool((errors.abs().amax(-1) > Q8_0_ERROR * largest).any()):
                refuse(fix, f"{name} as the method has it, rounded to Q8_0,")


def write_and_close(writer: Any) -> None:
    """Write a GGUF file whose metadata and tensors were all added to the writer, and close it."""
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def metadata(fix: Fix, change: CheckpointChange) -> dict[str, Any]:
    """Return sizes, rotary embedding and vocabulary of the model with a change, for the header of a GGUF file.

    Args:
        fix: The fix whose model it is.
        change: The method as a change of the checkpoint.

    Returns:
        Values by the method of gguf's writer that takes each, without its ``add_``.

    Raises:
        UserError: llama.cpp has no key for one of the values.
    """
    arch = architecture(fix)
    config = rotary_config(fix.lm.model.config, change).get_text_config()
    head_size = getattr(config, "head_dim", None)
    if not head_size:
        head_size = config.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    context = config.max_position_embeddings
    if window and not arch.large:
        # llama.cpp knows no window here: up to its size the model is the same.
        context = min(context, window)
    values = {
        "type": "model",
        "name": fix.lm.name,
        "context_length": context,
        "vocab_size": config.vocab_size,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "key_length": head_size,
        "value_length": head_size,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "rope_dimension_count": head_size,
        **rope_metadata(fix, config.rope_parameters),
    }
    if arch.large:
        values["sliding_window"] = window
        values["sliding_window_pattern"] = window_period(
            fix, config, head_size, arch.large
        )
    values |= vocabulary(fix)
    return {key: value for key, value in values.items() if value is not None}


def rope_metadata(fix: Fix, rope_parameters: Any) -> dict[str, Any]:
    """Return the rotary embedding's part of :func:`metadata`.

    Args:
        fix: The fix.
        rope_parameters: The config's parameters; in models with sliding windows by kind of layer.

    Raises:
        UserError: llama.cpp does not implement the embedding.
    """
    import gguf

    full = rope_parameters.get("full_attention", rope_parameters)
    local = rope_parameters.get("sliding_attention", {"rope_type": "default"})
    rope_type = full["rope_type"]
    plain_keys = {
        "rope_type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
    }
    is_known = rope_type in ("default", "linear", "llama3")
    if rope_type == "yarn":
        is_known = set(full) <= plain_keys
    if not is_known or local["rope_type"] != "default":
        refuse(
            fix,
            "rope_type default, linear, llama3 or plain yarn, "
            f"default where layers slide; not {full}",
        )
    values = {
        "rope_freq_base": full["rope_theta"],
        "rope_freq_base_swa": local.get("rope_theta"),
    }
    if rope_type in ("linear", "yarn"):
        values["rope_scaling_type"] = gguf.RopeScalingType(rope_type)
        values["rope_scaling_factor"] = full["factor"]
        values["rope_scaling_orig_ctx_len"] = full.get(
            "original_max_position_embeddings"
        )
    return values


def window_period(fix: Fix, config: Any, head_size: int, large: int) -> int:
    """Return the n such that every n-th layer has full attention and the others a sliding window.

    Args:
        fix: The fix whose model it is.
        config: The text model's config.
        head_size: Coordinates of a head.
        large: Number of layers of the size whose queries are scaled by hidden size / heads.

    Raises:
        UserError: There is no such n, or llama.cpp scales queries by another number.
    """
    is_full = [kind == "full_attention" for kind in config.layer_types]
    period = 1 + (*is_full, True).index(True)
    # What llama.cpp scales queries by.
    query_size: float = head_size
    if len(is_full) == large:
        query_size = config.hidden_size / config.num_attention_heads
    is_periodic = is_full == [
        number % period == 0 for number in range(1, len(is_full) + 1)
    ]
    if config.query_pre_attn_scalar != query_size or not is_periodic:
        refuse(
            fix,
            "full attention in every n-th layer, "
            f"and query_pre_attn_scalar {query_size:g}",
        )
    return period


def vocabulary(fix: Fix) -> dict[str, Any]:
    """Return the tokenizer's part of :func:`metadata`: pieces of text, merges, special tokens, chat template.

    Without a tokenizer the file reads token ids alone.

    Raises:
        UserError: llama.cpp does not implement the tokenizer.
    """
    from gguf import TokenType

    size = vocabulary_size(fix)
    tokenizer = fix.lm.tokenizer
    # Placeholders for token ids that the tokenizer does not have.
    pieces = [f"<|{token}|>" for token in range(size)]
    types = [TokenType.UNUSED] * size
    definition: dict[str, Any] = {"model": {"type": "WordLevel"}}
    if tokenizer is not None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        definition = {"model": {"type": "slow"}}
        if backend:
            definition = json.loads(backend.to_str())
        added = tokenizer.added_tokens_decoder
        by_token = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
        for piece, token in by_token[:size]:
            pieces[token] = piece
            types[token] = TokenType.NORMAL
            if token in added and added[token].special:
                types[token] = TokenType.CONTROL
            elif token in added:
                types[token] = TokenType.USER_DEFINED
    values: dict[str, Any] = {
        "token_types": types,
        "add_eos_token": False,
        "add_bos_token": False,
    }
    # llama.cpp has few tokenizers: whole words, or known byte-level ones.
    kind = definition["model"]["type"]
    pre_tokenizer = pre_tokenizer_name(definition.get("pre_tokenizer"))
    if kind == "WordLevel":
        # llama.cpp's T5 tokenizer cuts a text into as few pieces as possible if all
        # have the same score; its vocabularies write a space as U+2581.
        values["tokenizer_model"] = "t5"
        values["token_list"] = [piece.replace(" ", "\u2581") for piece in pieces]
        values["token_scores"] = [-1.0] * size
        values["add_space_prefix"] = False
        values["remove_extra_whitespaces"] = False
    elif kind == "BPE" and pre_tokenizer:
        values["tokenizer_model"] = "gpt2"
        values["tokenizer_pre"] = pre_tokenizer
        values["token_list"] = pieces
        values["token_merges"] = [
            pair if isinstance(pair, str) else " ".join(pair)
            for pair in definition["model"]["merges"]
        ]
    else:
        refuse(
            fix,
            "a tokenizer of whole words, or a byte-level one of the kind of "
            f"{', '.join(PRE_TOKENIZERS)}",
        )
    # Special tokens, and whether BOS is added.
    for name in ("bos", "eos", "pad", "unk"):
        values[f"{name}_token_id"] = getattr(tokenizer, f"{name}_token_id", None)
    if tokenizer is not None:
        first_token = tokenizer("a")["input_ids"][0]
        values["add_bos_token"] = first_token == tokenizer.bos_token_id
        if isinstance(tokenizer.chat_template, str):
            values["chat_template"] = tokenizer.chat_template
    return values
