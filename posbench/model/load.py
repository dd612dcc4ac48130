"""Load a model from a name, a directory, a hub id or a model object."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le

from posbench import paths
from posbench.errors import MachineError, UserError
from posbench.files import sources
from posbench.files.parse import CORRECT_FILE, read_yaml
from posbench.late import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    safetensors,
    torch,
    transformers,
)
from posbench.model import families, guard
from posbench.model.encode import CHAT_TEMPLATES, Encoder
from posbench.model.lm import LM
from posbench.schema import NonNegative, Positive, Threads, Tokens, build
from posbench.versions import install_hint

Kernel = Literal["auto", "sdpa", "eager", "flash_attention_2"]
Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]

FROM_THIS_MACHINE: dict[str, Any] = {
    "local_files_only": True,
    "trust_remote_code": False,
}
"""Arguments with which transformers reads a checkpoint: from this machine, without running its code."""

SERVER_KEYS = (
    "served",
    "api",
    "temperature",
    "thinking_tokens",
    "extra_body",
    "concurrency",
    "retries",
    "timeout",
    "key_env",
)
"""Keys of a model that apply to a server only."""

RESERVED_FIELDS = (
    "model",
    "prompt",
    "messages",
    "stream",
    "n",
    "temperature",
    "max_tokens",
    "max_completion_tokens",
)
"""Fields of a request that ``model.extra_body`` cannot set."""

FILES_WITHOUT_WEIGHTS = tuple(
    pattern
    for pattern in sources.CHECKPOINT_PATTERNS
    if pattern != sources.WEIGHTS_PATTERN
)
"""Files of a checkpoint without its weights: config and tokenizer."""

SIZE_KEYS = frozenset(
    (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "num_kv_heads",
        "head_dim",
        "num_local_experts",
        "num_experts",
        "num_experts_per_tok",
        "max_position_embeddings",
        "original_max_position_embeddings",
        # MPT
        "d_model",
        "n_heads",
        "n_layers",
        "expansion_ratio",
        "max_seq_len",
    )
)
"""Keys of config.json that are at least 1 in every model."""

POSITIVE_KEYS = frozenset(
    (
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "rope_theta",
        "rope_local_base_freq",
        "rotary_emb_base",
        "partial_rotary_factor",
        "rotary_pct",
        "factor",
        "query_pre_attn_scalar",
    )
)
"""Keys of config.json that are finite numbers above 0."""

DROPOUT_KEYS = frozenset(
    (
        "attention_dropout",
        "hidden_dropout",
        "attn_pdrop",
        "embd_pdrop",
        "emb_pdrop",
        "resid_pdrop",
    )
)
"""Keys of config.json that are probabilities."""

PARTIAL_SUFFIX = "-partial"
"""Suffix of the names of models with missing weights."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One file of ``conf/model/``."""

    # short name used in folders and tables
    name: str
    # hub id, local directory, or ``posbench://NAME`` for an embedded model; empty for a served model whose
    # tokenizer is not known
    path: str = ""
    # hub branch, tag or commit; None takes the default branch, as cached if that is complete
    revision: str | None = None
    # weight type; ``auto`` is float32 on a CPU, and of 16 bits on a GPU, see ``default_dtype``
    dtype: Dtype = "auto"
    # attention kernel; ``auto`` is sdpa where the family has it, else eager (Gemma 2, MPT)
    attention: Kernel = "auto"
    # ``checkpoint``, or ``none`` for one trained without position embeddings whose config hides it
    rope: Literal["checkpoint", "none"] = "checkpoint"
    # ``auto`` applies the tokenizer's template where it has one, ``none`` never; or the name of one in
    # ``posbench/model/templates``, for a checkpoint that does not carry its own
    chat_template: str = "auto"
    # tokens the model reads; None takes the checkpoint's ``max_position_embeddings``
    context_window: Tokens | None = None
    # CPU threads; None leaves torch's choice
    threads: Threads | None = None
    # runs a checkpoint that lacks tensors, or has others, with random ones in their place, the same at every
    # load; its name then ends in ``-partial`` in every table
    allow_partial: bool = False
    # stages that run when the user names none
    stages: tuple[str, ...] = ("intervene", "evaluate", "report")
    # where the facts of this file come from
    source: str = ""
    # the channel that follows the position most closely, where that is not the one of the block scale_channel
    positional_channel: int | None = None
    # size of the published weights, about: parameters times bytes of their type
    gigabytes: Positive | None = None
    # a class that answers in the place of the weights, {_target_: module.Class, ...}: see docs/endpoint.md
    backend: dict[str, Any] | None = None
    # an OpenAI-compatible server that answers in the place of the weights, such as http://localhost:8000/v1
    base_url: str | None = None
    # the server's name for the model; None: ``name``
    served: str | None = None
    # ``completions`` sends the very text that the model reads in process; ``chat`` sends messages, and the
    # server's own template surrounds them; ``auto`` takes the API that the server offers, see docs/endpoint.md
    api: Literal["auto", "completions", "chat"] = "auto"
    # sampling temperature; None: 0, or the server's own where it refuses 0
    temperature: Annotated[float, Ge(0), Le(2)] | None = None
    # tokens for thinking, added to those for the answer; None: none for a model that does not think
    thinking_tokens: Annotated[int, Ge(0), Le(10**6)] | None = None
    # further fields of every request, such as {reasoning_effort: low}; they are recorded, but for secrets
    extra_body: dict[str, Any] | None = None
    # requests at a time, at most: fewer where the server asks to wait
    concurrency: Annotated[int, Ge(1), Le(256)] = 8
    # repetitions of a request that failed, each after a longer pause
    retries: Annotated[int, Ge(0), Le(20)] = 5
    # seconds that a request may take
    timeout: Annotated[float, Gt(0), Le(86400)] = 600.0
    # environment variable that holds the key, where the server asks for one
    key_env: str = "OPENAI_API_KEY"
    # price of a million tokens that are read, of a million that are written, and, where it is another one, of a million
    # read from the server's cache, in the unit of budget=2usd
    price: (
        tuple[NonNegative, NonNegative]
        | tuple[NonNegative, NonNegative, NonNegative]
        | None
    ) = None
    # constants of the file for methods, tasks, searches and studies, by their names: every other key of the
    # file that holds a mapping
    blocks: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = ("auto", "none", *CHAT_TEMPLATES)
        if self.chat_template not in names:
            hint = "set model.chat_template=auto"
            raise UserError(
                "model.chat_template", self.chat_template, " | ".join(names), hint
            )
        if self.allow_partial and not self.name.endswith(PARTIAL_SUFFIX):
            object.__setattr__(self, "name", self.name + PARTIAL_SUFFIX)
        if self.in_process:
            self._refuse_server_keys()
        if self.base_url is not None:
            if self.backend is not None:
                hint = "leave out model.backend or model.base_url"
                raise UserError("model.backend", "a class", "null with a server", hint)
            _check_address(self.base_url, self.key_env)
            object.__setattr__(self, "base_url", self.base_url.rstrip("/"))
        for name in RESERVED_FIELDS:
            if name in (self.extra_body or {}):
                allowed = f"fields other than {', '.join(RESERVED_FIELDS)}, which posbench sets"
                hint = f"leave out model.extra_body.{name}"
                raise UserError("model.extra_body", {name: "..."}, allowed, hint)

    def _refuse_server_keys(self) -> None:
        """Refuse settings of a server where ``base_url`` names none.

        Raises:
            UserError: Names the setting.
        """
        for key in fields(self):
            value = getattr(self, key.name)
            if key.name in SERVER_KEYS and value != key.default:
                allowed = f"{key.default} without a server"
                raise UserError(
                    f"model.{key.name}", value, allowed, "set model.base_url=URL"
                )

    @property
    def in_process(self) -> bool:
        """Whether the weights are loaded in this process; else only replies are available."""
        return self.base_url is None and self.backend is None

    @property
    def server_name(self) -> str:
        """The server's name for the model."""
        return self.served or self.name

    @property
    def checkpoint(self) -> sources.Source:
        """The files from which it is loaded; for a served model, its tokenizer's files."""
        source = sources.checkpoint_source(self.path, self.revision)
        if not self.in_process:
            return replace(source, files=FILES_WITHOUT_WEIGHTS)
        about = f"about {self.gigabytes:g} GB" if self.gigabytes else ""
        return replace(source, about=about)

    @property
    def files(self) -> tuple[sources.Source, ...]:
        """The checkpoint; nothing for a served model whose tokenizer is not known."""
        return (self.checkpoint,) if self.path else ()


def is_in_process(model: Any) -> bool:
    """Return :attr:`ModelConfig.in_process` of a model's node in a config that is recorded as plain data."""
    if not isinstance(model, Mapping):
        return True
    return model.get("base_url") is None and model.get("backend") is None


def _check_address(address: str, key_env: str) -> None:
    """Refuse a server's address that is no URL, or holds a password or query.

    Args:
        address: The address.
        key_env: Environment variable that the hint names for the key.

    Raises:
        UserError: The address is refused; a secret is not printed.
    """
    try:
        url = urlsplit(address)
        _ = url.port  # raises where it is no number
    except ValueError:
        url = urlsplit("")
    if url.username or url.password or url.query:
        allowed = "an address without user, password and query: run folders record it"
        hint = f"put the key into the environment variable {key_env}"
        redacted = f"{url.scheme}://***@{url.hostname}"
        raise UserError("model.base_url", redacted, allowed, hint)
    if url.scheme not in ("http", "https") or not url.hostname:
        allowed = "http://HOST:PORT/v1 or https://..."
        hint = "set model.base_url=http://localhost:8000/v1"
        raise UserError("model.base_url", address, allowed, hint)


def load(
    source: str | Path | PreTrainedModel | ModelConfig,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str | None = None,
    device: str = "auto",
    device_map: str | dict[str, Any] | None = None,
    max_memory: dict[int | str, str] | None = None,
    **values: Any,
) -> LM:
    """Load a model for posbench.

    Args:
        source: A name of ``conf/model``, a local directory, a hub id, a model object or a config.
        tokenizer: For a model object; without it only token-level calls work.
        name: Short name; taken from the source if None.
        device: ``auto`` (a GPU where there is one), ``cpu``, ``cuda``, ``cuda:1`` ...
        device_map: Shards the layers instead, as accelerate's: ``auto``, ``balanced``, ``balanced_low_0``,
            ``sequential``, or module names to devices, ``cpu`` or ``disk``.
        max_memory: For a ``device_map`` in words: ``{0: "70GiB", "cpu": "100GiB"}``.
        **values: Fields of :class:`ModelConfig` to override.

    Raises:
        UserError: Unknown architecture, missing checkpoint, kernel or device; weights that lack tensors of
            the model or hold others.
        MachineError: Too little memory.
    """
    if isinstance(source, transformers.PreTrainedModel):
        families.family_of(source)
        if source.get_output_embeddings() is None:
            value = type(source).__name__
            hint = "pass the causal language model, of which that is a part"
            raise UserError("source", value, "a model that gives logits", hint)
        usable_kernel(source.config, families.text_config(source)._attn_implementation)
        guard.check_parameters(source, name or "model")
        return LM(
            model=source.eval(),
            tokenizer=tokenizer,
            name=name or "model",
            context_window=families.context_window(source.config),
            chat_template=values.get("chat_template", "auto"),
        )
    if not isinstance(source, ModelConfig):
        if not isinstance(source, str | os.PathLike):
            allowed = (
                "a name, a folder, a hub id, a ModelConfig or a transformers model"
            )
            hint = "of a wrapped model pass what it wraps: model.get_base_model(), model._orig_mod"
            raise UserError("source", type(source).__name__, allowed, hint)
        if name:
            values["name"] = name
        source = model_config(str(source), **values)
    return _load_checkpoint(source, device, device_map, max_memory)


@dataclass
class CheckpointReader(Encoder):
    """A checkpoint without its weights, from which the lengths of prompts and the model's size are known."""

    tokenizer: PreTrainedTokenizerBase | None
    name: str
    context_window: int
    chat_template: str
    facts: PreTrainedConfig


def read_checkpoint(config: ModelConfig) -> CheckpointReader:
    """Read config and tokenizer of a checkpoint without its weights; download them where they are not here.

    Raises:
        UserError: Unknown architecture; config or tokenizer are missing or cannot be read.
    """
    source = config.checkpoint
    if source.kind == "model":
        source = replace(source, files=FILES_WITHOUT_WEIGHTS)
    path = str(sources.local(source))
    with _explained(config, config.path):
        # Read as plain data first: transformers would not name the families for a type that it does not know.
        data, _ = transformers.PreTrainedConfig.get_config_dict(
            path, **FROM_THIS_MACHINE
        )
        if data and config.in_process:
            families.family_of_type(data.get("model_type"))
            _check_sizes(config, data)
        facts = transformers.AutoConfig.from_pretrained(path, **FROM_THIS_MACHINE)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            path, **FROM_THIS_MACHINE
        )
    window = config.context_window or families.context_window(facts)
    return CheckpointReader(tokenizer, config.name, window, config.chat_template, facts)


def _check_sizes(config: ModelConfig, data: Mapping[str, Any]) -> None:
    """Refuse a config.json with a size below 1, or a number that no model has, by the name of its key.

    Args:
        config: The model's config.
        data: The content of config.json, or of one of its parts.
    """
    for key, value in data.items():
        if isinstance(value, Mapping):
            _check_sizes(config, value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue  # transformers refuses other types
        if key in SIZE_KEYS and not 1 <= value < math.inf:
            bound = "of at least 1"
        elif key in POSITIVE_KEYS and not 0 < value < math.inf:
            bound = "finite and above 0"
        elif key in DROPOUT_KEYS and not 0 <= value <= 1:
            bound = "from 0 to 1"
        else:
            continue
        allowed = f"a checkpoint whose config.json has {key} {bound}, not {value}"
        hint = "get the checkpoint again"
        raise UserError("model.path", config.path, allowed, hint)


def model_config(source: str, **values: Any) -> ModelConfig:
    """Return the config of a model.

    Args:
        source: A name in ``conf/model``, else a directory or hub id.
        values: Fields that replace the config's.
    """
    file = paths.CONF / "model" / f"{source}.yaml"
    if file.is_file():
        data = {"name": source, **read_yaml(file, hint=CORRECT_FILE)}
    else:
        data = {"name": Path(source).name, "path": source}
    return build(ModelConfig, with_blocks({**data, **values}), "model")


def with_blocks(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's config node in which its blocks (constants of a method, task, ...) lie under ``blocks``."""
    keys = {key.name for key in fields(ModelConfig)}
    node: dict[str, Any] = {}
    blocks: dict[str, Any] = {}
    for key, value in data.items():
        if key not in keys and isinstance(value, Mapping):
            blocks[key] = dict(value)
        else:
            node[key] = value
    return node | {"blocks": blocks | dict(data.get("blocks") or {})}


def _load_checkpoint(
    config: ModelConfig,
    device: str,
    device_map: str | dict[str, Any] | None,
    max_memory: dict[int | str, str] | None,
) -> LM:
    """Return the model of a config, with weights and tokenizer.

    Args:
        config: Says which checkpoint, and how it is loaded.
        device: ``auto`` (a GPU where there is one), ``cpu``, ``cuda``, ``cuda:1`` ...
        device_map: Shards the layers over devices instead, as accelerate's; None: all on ``device``.
        max_memory: For a ``device_map`` in words: ``{0: "70GiB", "cpu": "100GiB"}``.

    Raises:
        UserError: The model is on a server, or the checkpoint cannot be loaded.
    """
    if not config.in_process:
        allowed = "null: posbench.load reads a checkpoint, not a server"
        hint = "leave out base_url, or run posbench model.base_url=URL"
        raise UserError("model.base_url", config.base_url, allowed, hint)
    target = torch_device(device)
    # From here on there is a folder on this machine, and nothing touches the network.
    sources.local(config.checkpoint)
    checkpoint = read_checkpoint(config)
    path = str(sources.local(config.checkpoint))
    sources.weight_files(Path(path))
    with _explained(config, target):
        kernel = usable_kernel(checkpoint.facts, config.attention)
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            # Tensors that a partial checkpoint lacks are drawn: the same ones each time.
            torch.manual_seed(0)
            dtype = loaded_dtype(config, checkpoint.facts, target)
            model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=kernel,
                # The fast experts of transformers, its own choice, know no float64.
                experts_implementation="eager" if dtype == "float64" else None,
                use_safetensors=True,
                device_map=device_map or {"": target},
                max_memory=max_memory,
                output_loading_info=True,
                # Reported in one line below, with every other fault of the weights.
                ignore_mismatched_sizes=True,
                **FROM_THIS_MACHINE,
            )
    _need_complete(config, loading_info)
    guard.check_parameters(model, config.name)
    return _with_reader(config, checkpoint, model)


def default_dtype(
    config: ModelConfig, facts: PreTrainedConfig, device: torch.device
) -> Dtype:
    """The weight type where none is set: float32 on a CPU; on a GPU the checkpoint's own if it has 16 bits, else
    bfloat16.

    The embedded models are small and were trained in float32, in which they stay.

    Args:
        config: Of the model.
        facts: The checkpoint's config; one without a type is taken for float32.
        device: Where the model runs.
    """
    if device.type == "cpu" or config.path.startswith(paths.EMBEDDED):
        return "float32"
    return "float16" if published_dtype(facts) == "float16" else "bfloat16"


def published_dtype(facts: PreTrainedConfig) -> str:
    """The type of a checkpoint's weights; float32 where its config states none."""
    return str(facts.get_text_config().dtype or "float32").removeprefix("torch.")


def loaded_dtype(
    config: ModelConfig, facts: PreTrainedConfig, device: torch.device
) -> Dtype:
    """The weight type to load with: the typed one, else :func:`default_dtype`."""
    if config.dtype == "auto":
        return default_dtype(config, facts, device)
    return config.dtype


def load_without_weights(
    config: ModelConfig, checkpoint: CheckpointReader, device: str
) -> LM:
    """Return the model on the meta device, without weights: its modules, to compare settings with; it cannot be run.

    Args:
        config: The model's config.
        checkpoint: Its config and tokenizer, from :func:`read_checkpoint`.
        device: Device that the model is meant for.

    Raises:
        UserError: Device, kernel or tokenizer do not fit.
    """
    target = torch_device(device)
    folder = sources.cached_path(config.checkpoint)
    with _explained(config, target), torch.device("meta"):
        if folder:
            for name in sources.weight_files(folder):
                with safetensors.safe_open(folder / name, "pt"):
                    pass  # its header shows whether it is complete
        kernel = usable_kernel(checkpoint.facts, config.attention)
        model = transformers.AutoModelForCausalLM.from_config(
            checkpoint.facts,
            attn_implementation=kernel,
            # The other kernels of experts know one dtype on the meta device, or none.
            experts_implementation="batched_mm",
            dtype=loaded_dtype(config, checkpoint.facts, target),
        )
    return _with_reader(config, checkpoint, model)


def _with_reader(
    config: ModelConfig, checkpoint: CheckpointReader, model: PreTrainedModel
) -> LM:
    """Return the model with its tokenizer, in evaluation mode, and without RoPE if the config says so.

    Raises:
        UserError: The tokenizer has more tokens than the embedding.
    """
    tokenizer = checkpoint.need_tokenizer()
    num_rows = model.get_input_embeddings().weight.shape[0]
    num_tokens = tokenizer.vocab_size
    if num_tokens > num_rows:
        allowed = f"a tokenizer of at most {num_rows} tokens, as the embedding of that checkpoint; it has {num_tokens}"
        hint = "use the tokenizer that belongs to the weights"
        raise UserError("model.path", config.path, allowed, hint)
    if config.rope == "none":
        families.remove_rope(model)
    return LM(
        model.eval(),
        tokenizer,
        config.name,
        checkpoint.context_window,
        config.chat_template,
    )


@contextmanager
def _explained(config: ModelConfig, device: torch.device | str) -> Iterator[None]:
    """Turn errors that libraries raise on a checkpoint inside the block into UserErrors of one line.

    Args:
        config: The model.
        device: Device or folder that the message names if memory runs out.
    """
    try:
        yield
    except UserError:
        raise
    # Whatever the libraries make of these files, it is the files that are wrong.
    except Exception as error:
        # Asked in here: a signal may come while torch is half imported.
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            allowed = f"a device with room for the weights of {config.name}"
            hint = "set runtime.device_map=auto to use all GPUs and the memory, or model.dtype=bfloat16"
            raise MachineError("runtime.device", str(device), allowed, hint) from error
        if "does not support an attention implementation" in str(error):
            allowed = "auto or eager for this family"
            hint = "set model.attention=auto"
            raise UserError(
                "model.attention", config.attention, allowed, hint
            ) from error
        reason = " ".join(str(error).split())[:200]
        if not isinstance(error, OSError | ValueError | safetensors.SafetensorError):
            reason = f"{type(error).__name__}: {reason}"
        hint = f"set model.path=DIR to a local checkpoint ({reason})"
        raise UserError(
            "model.path", config.path, sources.CHECKPOINT_ALLOWED, hint
        ) from error


def _need_complete(config: ModelConfig, loading_info: Mapping[str, Any]) -> None:
    """Refuse weights that are not the model's.

    Args:
        config: The model's config.
        loading_info: transformers' report of loading, without tied tensors and tensors that may be missing or unused.
    """
    tensors_by_fault = {
        "missing": loading_info["missing_keys"],
        "of another shape": {key[0] for key in loading_info["mismatched_keys"]},
        "not of this model": loading_info["unexpected_keys"],
    }
    faults = [
        f"{len(tensors)} {fault}, the first {min(tensors)}"
        for fault, tensors in tensors_by_fault.items()
        if tensors
    ]
    if faults and not config.allow_partial:
        allowed = (
            f"exactly the tensors that config.json describes ({'; '.join(faults)})"
        )
        hint = "get the checkpoint again, or set model.allow_partial=true to run with random tensors in place"
        raise UserError("model.path", config.path, allowed, hint)
    # A complete checkpoint must not be called partial.
    if config.allow_partial and not faults:
        allowed = "false: the checkpoint has every tensor, and its numbers must not be called partial"
        raise UserError("model.allow_partial", True, allowed, "leave it out")


def usable_kernel(config: PreTrainedConfig, kernel: str | None) -> str | None:
    """Return the attention kernel to load with; None leaves the choice to transformers.

    Args:
        config: Of the model.
        kernel: As ``model.attention`` names it; None or ``auto`` for the model's own.

    Raises:
        UserError: It is not installed, or is sdpa where attention scores are soft-capped (Gemma 2).
    """
    if kernel == "auto":
        kernel = None
    if (
        kernel == "flash_attention_2"
        and not transformers.utils.is_flash_attn_2_available()
    ):
        allowed = "sdpa or eager on this machine (flash-attn is not installed)"
        hint = f"set model.attention=sdpa, or {install_hint('flash')}"
        raise UserError("model.attention", kernel, allowed, hint)
    if not getattr(config.get_text_config(), "attn_logit_softcapping", None):
        return kernel
    if kernel == "sdpa":
        allowed = "auto or eager: sdpa would leave out the soft-cap of this model's attention scores"
        hint = "set model.attention=auto (a model object: attn_implementation='eager')"
        raise UserError("model.attention", kernel, allowed, hint)
    # Some transformers versions would run sdpa anyway, and leave the cap out.
    return kernel or "eager"


def torch_device(device: str) -> torch.device:
    """Return the device that ``runtime.device`` names; ``auto`` is the GPU if there is one.

    Raises:
        UserError: This machine has no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        result = torch.device(device)
        if result.type == "meta":
            raise RuntimeError("tensors there hold no numbers")
        torch.empty(0, device=result)
    except (RuntimeError, AssertionError) as error:
        devices = "no CUDA device"
        if torch.cuda.is_available():
            devices = f"{torch.cuda.device_count()} CUDA devices"
        allowed = f"auto, cpu, or a CUDA device of this machine (it has {devices})"
        hint = "set runtime.device=auto, or leave out runtime=gpu"
        raise UserError("runtime.device", device, allowed, hint) from error
    return result
