"""A GGUF file as a checkpoint: converted once, in float32, into a folder of posbench's cache.

transformers reads the weights. It silently ignores settings and tensors that it does not know, and assumes GPT-2's
pre-tokenizer in every file; both are checked here.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.filesize import decimal

from posbench import paths
from posbench.errors import MachineError, UserError, is_machine_fault
from posbench.files.atomic import write_json
from posbench.files.checksums import cache_folder, file_sha256
from posbench.files.parse import parse_json, read_text
from posbench.late import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    torch,
    transformers,
)

READABLE_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architectures whose conversion the tests compare with llama.cpp."""

KEY_HEADS = "attention.head_count_kv"
"""Optional in llama.cpp; without it transformers leaves the rows of llama's projections in llama.cpp's order."""

EPSILON = "attention.layer_norm_rms_epsilon"
ROPE_BASE = "rope.freq_base"
SHAPE_KEYS = (
    "context_length",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
)
READ_KEYS = (*SHAPE_KEYS, KEY_HEADS, EPSILON, ROPE_BASE, "vocab_size")
"""Settings of an architecture that transformers reads."""

REQUIRED_KEYS = (*SHAPE_KEYS, EPSILON)
"""Settings without which llama.cpp loads no model; transformers would fall back to defaults."""

DEFAULT_ROPE_BASE = 10000.0
"""llama.cpp's default base of the rotary embedding."""

HEAD_SIZE_KEYS = (
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
)
"""Settings that must be equal: heads that rotate in part are not supported."""

SCALING_TYPE = "rope.scaling.type"
SCALING_FACTOR = "rope.scaling.factor"
SCALING_KEYS = (
    SCALING_TYPE,
    SCALING_FACTOR,
    "rope.scaling.original_context_length",
)

COUNT_KEYS = (*SHAPE_KEYS, KEY_HEADS, "vocab_size", *HEAD_SIZE_KEYS)
"""Settings that are whole numbers of at least 1."""

NUMBER_KEYS = (EPSILON, ROPE_BASE)
"""Settings that are finite numbers above 0."""

TOKENIZER_JSON = "tokenizer.huggingface.json"
"""Key of a whole ``tokenizer.json`` in the GGUF specification."""

SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""Names of special tokens: transformers' to GGUF's."""

END_TOKENS = ("eos", "eot", "eom")
"""Tokens at which llama.cpp ends a reply, in GGUF's keys: of a text, a turn and a message."""

CONTROL_TOKEN = 3
"""Type of control tokens, which are split off a text first."""
USER_TOKEN = 4
"""Type of user-defined tokens, which are split off a text first."""

UNQUANTISED = ("F32", "F16", "BF16", "F64")

OTHER_FILES = "set model.path to the checkpoint itself: a hub id, or a folder with its *.safetensors"
"""Hint where a GGUF file cannot be read."""

RECORD = "posbench.json"
"""Record in a converted folder: ``gguf``, sha256 of the file; ``weights``, types of its tensors; ``files``, sha256 of
each."""

VERSION = 3
"""Raised when a conversion changes: folders of an earlier one are not used."""

SCRATCH_PREFIX = ".new-"
"""Name prefix of half-written folders."""

ABANDONED_SECONDS = 3600
"""Age from which a half-written folder belongs to a process that was killed."""


def _splitting(pattern: str) -> dict[str, Any]:
    """The pre-tokenizer that cuts a text by a regular expression, then writes its bytes as characters."""
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(False)]}


def _byte_level(use_regex: bool) -> dict[str, Any]:
    """The step that writes bytes as characters, with GPT-2's cut into words before it or not."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}COUNT| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = {"type": "Digits", "individual_digits": True}

PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _byte_level(True),
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _byte_level(True)]},
    "qwen2": _splitting(_WORDS.replace("COUNT", "")),
    "llama-bpe": _splitting(_WORDS.replace("COUNT", "{1,3}")),
}
"""Pre-tokenizers of byte-level tokenizers, as in ``tokenizer.json``, by ``tokenizer.ggml.pre``."""

NFC_NAMES = ("qwen2",)
"""Tokenizers whose ``tokenizer.json`` composes characters first."""

WHOLE_WORD_NAMES = ("llama-bpe",)
"""Tokenizers that keep a piece of text whole if it is a token, whatever their merges."""

BEGINNING_NAMES = ("llama-bpe",)
"""Tokenizers that put the beginning-of-sequence token in front unless the file says otherwise."""


def pre_tokenizer_name(definition: Mapping[str, Any] | None) -> str | None:
    """llama.cpp's name of a pre-tokenizer of ``tokenizer.json``; None if it has none."""
    wanted = _without_offsets(definition or {})
    for name, known in PRE_TOKENIZERS.items():
        if _without_offsets(known) == wanted:
            return name
    return None


def _without_offsets(step: Mapping[str, Any]) -> dict[str, Any]:
    """A pre-tokenizer without ``trim_offsets``, which moves no cut."""
    plain = {key: value for key, value in step.items() if key != "trim_offsets"}
    if "pretokenizers" in plain:
        plain["pretokenizers"] = [_without_offsets(s) for s in plain["pretokenizers"]]
    return plain


def find_file(path: Path, field: str) -> Path:
    """Return the GGUF file that a path names: itself, or the only one in a folder.

    Raises:
        UserError: There is none, or a folder holds several; the error blames ``field``.
    """
    files = [path]
    if path.is_dir():
        files = sorted(path.glob(f"*{paths.GGUF}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        allowed = f"a folder with one GGUF file, not {names}"
        raise UserError(field, str(path), allowed, f"set {field}={files[0]}")
    if not files or not files[0].is_file():
        raise UserError(field, str(path), "a GGUF file", "check the path")
    return files[0]


@dataclass(frozen=True)
class Settings:
    """The metadata of a GGUF file.

    Attributes:
        values: By key.
        field: The config key that named the file, for errors.
        name: How the config names it, for errors.
    """

    values: Mapping[str, Any]
    field: str
    name: str

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.values.get("general.architecture"))

    def of_architecture(self, key: str) -> Any:
        """A setting of the architecture; None where the file has none."""
        return self.values.get(f"{self.architecture}.{key}")

    def refuse(self, allowed: str) -> NoReturn:
        """Raise UserError, with the checkpoint's own files as the way out."""
        raise UserError(self.field, self.name, f"a GGUF file of {allowed}", OTHER_FILES)

    def check(self) -> None:
        """Refuse a file that would be read wrongly, or not at all.

        Raises:
            UserError: The file is of another architecture, a part of a model, or has settings that are not read.
        """
        if self.architecture not in READABLE_ARCHITECTURES:
            names = ", ".join(READABLE_ARCHITECTURES)
            self.refuse(f"architecture {names}, not {self.architecture}")
        if self.values.get("general.type", "model") != "model":
            self.refuse(f"a model, not of type {self.values['general.type']}")
        if self.values.get("split.count", 1) > 1:
            self.refuse("a whole model, not one of several parts")
        if self.of_architecture(SCALING_TYPE) not in (None, "none", "linear"):
            scaling = self.of_architecture(SCALING_TYPE)
            self.refuse(f"plain or linearly scaled positions, not {scaling}")
        prefix = f"{self.architecture}."
        for key, value in self.values.items():
            setting = key.removeprefix(prefix)
            known = setting in (*READ_KEYS, *HEAD_SIZE_KEYS, *SCALING_KEYS)
            if key.startswith(prefix) and not known:
                self.refuse(f"a plain {self.architecture} model, without {key}")
            if key.startswith(prefix) and isinstance(value, list):
                self.refuse(f"a model whose layers are alike; {key} is a list")
        self._check_values()

    def _check_values(self) -> None:
        """Refuse settings that are missing, or are no sizes, bases or tokens of a model."""
        required = (*REQUIRED_KEYS, KEY_HEADS)
        for setting in (*required, *COUNT_KEYS, *NUMBER_KEYS, SCALING_FACTOR):
            key = f"{self.architecture}.{setting}"
            value = self.values.get(key)
            if value is None:
                if setting in required:
                    self.refuse(f"a whole model; {key} is missing")
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if setting in COUNT_KEYS:
                if not isinstance(value, int) or not is_number or value < 1:
                    self.refuse(f"a model whose {key} is at least 1, not {value}")
                continue
            # To llama.cpp a factor of 0 is none.
            lowest = 0 if setting == SCALING_FACTOR else math.ulp(0.0)
            if not is_number or not lowest <= value < math.inf:
                bound = "0 or more" if setting == SCALING_FACTOR else "above 0"
                self.refuse(f"a model whose {key} is finite and {bound}, not {value}")
        heads = self.of_architecture("attention.head_count")
        key_heads = self.of_architecture(KEY_HEADS)
        if heads % key_heads:
            allowed = f"{heads} heads in groups of one size"
            self.refuse(f"{allowed}, not a {KEY_HEADS} of {key_heads}")
        num_tokens = len(self.values.get("tokenizer.ggml.tokens", ()))
        for name in ("bos", *END_TOKENS):
            key = f"tokenizer.ggml.{name}_token_id"
            token = self.values.get(key)
            if token is not None and num_tokens and not 0 <= token < num_tokens:
                self.refuse(
                    f"{num_tokens} tokens whose {key} is one of them, not {token}"
                )

    @property
    def end_tokens(self) -> list[int]:
        """Tokens at which a reply ends; empty where the file names none."""
        ids = [self.values.get(f"tokenizer.ggml.{n}_token_id") for n in END_TOKENS]
        return list(dict.fromkeys(token for token in ids if token is not None))

    def adjust(self, config: PreTrainedConfig) -> None:
        """Set the fields of a config that transformers does not read from the file.

        Raises:
            UserError: Sizes of heads differ.
        """
        sizes = {self.of_architecture(key) for key in HEAD_SIZE_KEYS} - {None}
        if not sizes:
            sizes = {config.hidden_size // config.num_attention_heads}
        if len(sizes) > 1:
            self.refuse(f"heads of one size, not {sorted(sizes)}")
        (config.head_dim,) = sizes
        if self.of_architecture("rope.freq_base") is None:
            base = {"rope_theta": DEFAULT_ROPE_BASE}
            config.rope_parameters = {**config.rope_parameters, **base}
        # transformers has one of its own where the file names none.
        config.eos_token_id = next(iter(self.end_tokens), None)
        factor = self.of_architecture(SCALING_FACTOR)
        # To llama.cpp a factor without a type is linear, and a factor of 0 is none.
        if factor and self.of_architecture(SCALING_TYPE) in (None, "linear"):
            linear = {"rope_type": "linear", "factor": factor}
            config.rope_parameters = {**config.rope_parameters, **linear}

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with special tokens and chat template.

        Raises:
            UserError: How it cuts a text is not known for certain.
        """
        from tokenizers import Tokenizer

        tokenizer_json = self.values.get(TOKENIZER_JSON)
        if tokenizer_json:
            backend = Tokenizer.from_str(tokenizer_json)
        else:
            backend = self._byte_level_tokenizer()
        pieces = self.values.get("tokenizer.ggml.tokens", ())
        special = {}
        for role, key in SPECIAL_TOKENS.items():
            token = self.values.get(f"tokenizer.ggml.{key}_token_id")
            if token is not None and token < len(pieces):
                special[f"{role}_token"] = backend.id_to_token(token)
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=backend,
            chat_template=self.values.get("tokenizer.chat_template"),
            clean_up_tokenization_spaces=False,
            **special,
        )

    def _byte_level_tokenizer(self) -> Any:
        """The tokenizer of vocabulary, merges and the name of its pre-tokenizer."""
        from tokenizers import (
            AddedToken,
            Tokenizer,
            decoders,
            models,
            normalizers,
            processors,
        )

        kind = self.values.get("tokenizer.ggml.model")
        name = self.values.get("tokenizer.ggml.pre")
        if kind != "gpt2" or name not in PRE_TOKENIZERS:
            names = ", ".join(PRE_TOKENIZERS)
            self.refuse(
                f"a byte-level tokenizer (tokenizer.ggml.model gpt2) with tokenizer.ggml.pre {names}, "
                f"whose cuts are known; not {kind} with {name}"
            )
        pieces = self.values["tokenizer.ggml.tokens"]
        merges = [tuple(m.split(" ", 1)) for m in self.values["tokenizer.ggml.merges"]]
        backend = Tokenizer(
            models.BPE(
                vocab={piece: token for token, piece in enumerate(pieces)},
                merges=merges,
                ignore_merges=name in WHOLE_WORD_NAMES,
            )
        )
        if name in NFC_NAMES:
            backend.normalizer = normalizers.NFC()
        definition = json.loads(backend.to_str())
        definition["pre_tokenizer"] = PRE_TOKENIZERS[name]
        backend = Tokenizer.from_str(json.dumps(definition))
        backend.decoder = decoders.ByteLevel()
        types = self.values.get("tokenizer.ggml.token_type", ())
        added = [
            AddedToken(piece, special=kind == CONTROL_TOKEN, normalized=False)
            for piece, kind in zip(pieces, types, strict=False)
            if kind in (CONTROL_TOKEN, USER_TOKEN)
        ]
        backend.add_tokens(added)
        adds_first = name in BEGINNING_NAMES
        if self.values.get("tokenizer.ggml.add_bos_token", adds_first):
            token = self.values["tokenizer.ggml.bos_token_id"]
            first = pieces[token]
            backend.post_processor = processors.TemplateProcessing(
                single=[first, "$A"],
                pair=[first, "$A", first, "$B"],
                special_tokens=[(first, token)],
            )
        if self.values.get("tokenizer.ggml.add_eos_token"):
            self.refuse("a tokenizer that ends no text with a token of its own")
        return backend


# The cache


def converted_folder(sha256: str) -> Path:
    """Return the folder of the checkpoint converted from the GGUF file with this sha256, whether or not it exists."""
    cache = cache_folder()
    if cache is None:
        allowed = "a folder for converted files: this user has no home folder"
        raise MachineError("POSBENCH_CACHE", None, allowed, "set POSBENCH_CACHE=DIR")
    return cache / "gguf" / f"{sha256[:16]}-v{VERSION}"


def damage(folder: Path) -> str:
    """Return how a converted folder differs from its :data:`RECORD`; empty if it does not."""
    try:
        files = dict(parse_json(read_text(folder / RECORD))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{RECORD} is missing or cannot be read"
    for name, sha256 in files.items():
        try:
            if file_sha256(folder / name) != sha256:
                return f"{name} does not hold what was written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return ""


def weight_types(folder: Path) -> tuple[str, ...]:
    """Types of the tensors of the GGUF file from which an undamaged converted folder was made."""
    return tuple(parse_json(read_text(folder / RECORD))["weights"])


def convert(
    file: Path,
    sha256: str,
    field: str,
    name: str,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Convert a GGUF file to a checkpoint in float32 in posbench's cache.

    Args:
        file: The GGUF file.
        sha256: Its digest.
        field: The config key that named it, for errors.
        name: How the config names it, for errors.
        say: Called with a line before each step that takes a while.

    Returns:
        The folder, with config, tokenizer, weights and :data:`RECORD`. It appears when it is complete.

    Raises:
        UserError: The file is damaged, or would be read wrongly.
        MachineError: The cache cannot be written, or has too little room.
    """
    folder = converted_folder(sha256)
    with scratch_folder(folder.parent) as scratch:
        types = _write_checkpoint(file, scratch, field, name, say)
        files = {f.name: file_sha256(f) for f in sorted(scratch.iterdir())}
        record = {"gguf": sha256, "weights": types, "files": files}
        write_json(scratch / RECORD, record)
        if folder.exists() and damage(folder):
            shutil.rmtree(folder, ignore_errors=True)
        try:
            scratch.rename(folder)
        except OSError:
            # Another process has made the same folder meanwhile, and may be reading it.
            if not folder.exists() or damage(folder):
                raise
    return folder


@contextmanager
def scratch_folder(cache: Path) -> Iterator[Path]:
    """Make a folder in a cache to write into, and remove it after the block unless it was renamed.

    Args:
        cache: The folder of the cache.

    Raises:
        MachineError: The cache cannot be written.
    """
    _remove_abandoned(cache)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=cache))
    except OSError as error:
        allowed = f"a folder that can be written ({error.strerror})"
        hint = "set POSBENCH_CACHE=DIR"
        raise MachineError("POSBENCH_CACHE", str(cache), allowed, hint) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove half-written folders of processes that were killed."""
    for scratch in parent.glob(f"{SCRATCH_PREFIX}*"):
        if time.time() - scratch.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(scratch, ignore_errors=True)


def _write_checkpoint(
    file: Path, folder: Path, field: str, name: str, say: Callable[[str], None]
) -> list[str]:
    """Write config, tokenizer and weights of a GGUF file; return the types of its tensors.

    Arguments as of :func:`convert`, and the folder to write into.
    """
    import gguf

    with _blaming(field, name, "a whole GGUF file", "get the file again"):
        reader = gguf.GGUFReader(file)
        values = {key: entry.contents() for key, entry in reader.fields.items()}
        types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
    settings = Settings(values, field, name)
    settings.check()
    size = 4 * elements
    _need_room(folder, size)
    say(f"reading {file.name}: {len(types)} tensors, as float32")
    allowed = "a GGUF file whose tokenizer and model transformers can build"
    with _blaming(field, name, allowed, OTHER_FILES):
        tokenizer = settings.tokenizer()
        model = _read_model(file, settings)
    numbers = {label: number for number, label in gguf.MODEL_ARCH_NAMES.items()}
    architecture = numbers[settings.architecture]
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    read = {
        names.get_name(parameter, (".weight", ".bias"))
        for parameter, _ in model.named_parameters()
    }
    unread = sorted(set(types) - read)
    if unread:
        settings.refuse(f"a plain {settings.architecture} model, without {unread[0]}")
    say(f"writing {decimal(size)} to {folder.parent}")
    # A bar of transformers' own would cut through posbench's lines.
    with redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sorted(set(types.values()))


@contextmanager
def _blaming(field: str, name: str, allowed: str, hint: str) -> Iterator[None]:
    """Turn errors that libraries raise on a file into one line; arguments as of UserError."""
    try:
        yield
    except UserError:
        raise
    # Whatever the libraries make of these bytes, it is the file that is wrong.
    except Exception as error:
        if is_machine_fault(error):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise UserError(field, name, f"{allowed} ({reason})", hint) from error


def _need_room(folder: Path, size: int) -> None:
    """Refuse to write ``size`` bytes to a disk without room for them."""
    free = shutil.disk_usage(folder).free
    if free < size:
        allowed = (
            f"a disk with room for {decimal(size)} in float32 (free: {decimal(free)})"
        )
        hint = "set POSBENCH_CACHE=DIR to a folder on another disk"
        raise MachineError("POSBENCH_CACHE", str(folder.parent), allowed, hint)


def _read_model(file: Path, settings: Settings) -> PreTrainedModel:
    """The model of a GGUF file in float32.

    Raises:
        UserError: Tensors are missing, or sizes of heads differ.
    """
    arguments: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    # A bar of transformers' own would cut through posbench's lines.
    with redirect_stderr(io.StringIO()):
        config = transformers.AutoConfig.from_pretrained(file.parent, **arguments)
        settings.adjust(config)
        model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            **arguments,
        )
    missing = sorted(loading_info["missing_keys"])
    if missing:
        settings.refuse(f"a whole model; {missing[0]} is missing")
    model.generation_config.eos_token_id = settings.end_tokens or None
    # The mark of quantised weights, which these no longer are: transformers would not save them.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model
