"""From a name, a directory, a hub id or a model object to a ready LM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from annotated_types import Ge, Gt, Le
from safetensors import SafetensorError, safe_open

from posbench import paths
from posbench.errors import MachineError, UserError
from posbench.files import sources
from posbench.late import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    torch,
    transformers,
)
from posbench.model import families, guard
from posbench.model.encode import CHAT_TEMPLATES, Encoder
from posbench.model.lm import LM
from posbench.schema import Count, Positive, Tokens, build

Kernel = Literal["auto", "sdpa", "eager", "flash_attention_2"]
Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]

ORIGIN: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""How transformers reads a checkpoint: from this machine, and no code of its own."""

SERVER = ("served", "api", "concurrency", "retries", "timeout", "key_env")
"""Keys of a model that mean something with a server alone."""

WORDS = tuple(part for part in sources.CHECKPOINT if part != sources.WEIGHTS)
"""Files of a checkpoint that make tokens: all but the weights."""

PARTIAL = "-partial"
"""How the name of a model ends whose weights are not all those of its checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One file of ``conf/model/``."""

    name: str  # short name used in folders and tables
    # hub id, local directory, or ``posbench://NAME`` for an embedded model; empty for a served model whose
    # tokenizer is not known
    path: str = ""
    # hub branch, tag or commit; None takes the default branch, as cached if that is complete
    revision: str | None = None
    dtype: Dtype = "auto"  # weight type; ``auto`` is the checkpoint's own on a GPU and float32 on a CPU
    # attention kernel; ``auto`` is sdpa where the family has it, else eager (Gemma 2, MPT)
    attention: Kernel = "auto"
    # ``checkpoint``, or ``none`` for one trained without position embeddings whose config hides it
    rope: Literal["checkpoint", "none"] = "checkpoint"
    # ``auto`` applies the tokenizer's template where it has one, ``none`` never; or the name of one in
    # ``posbench/model/templates``, for a checkpoint that does not carry its own
    chat_template: str = "auto"
    # tokens the model reads; None takes the checkpoint's ``max_position_embeddings``
    context_window: Tokens | None = None
    threads: Count | None = None  # CPU threads; None leaves torch's choice
    # runs a checkpoint that lacks tensors, or has others, with random ones in their place, the same at every
    # load; its name then ends in ``-partial`` in every table
    allow_partial: bool = False
    stages: tuple[str, ...] = (
        "intervene",
        "evaluate",
        "report",
    )  # stages that run when the user names none
    source: str = ""  # where the facts of this file come from
    # of the published weights, about: parameters times bytes of their type
    gigabytes: Positive | None = None
    # an OpenAI-compatible server that answers in the place of the weights, such as http://localhost:8000/v1
    base_url: str | None = None
    served: str | None = None  # what that server calls the model; None: ``name``
    # ``completions`` sends the very text that the model reads in process; ``chat`` sends messages, and the
    # server's own template surrounds them
    api: Literal["completions", "chat"] = "completions"
    concurrency: Annotated[int, Ge(1), Le(256)] = 8  # requests at a time
    retries: Annotated[int, Ge(0), Le(20)] = (
        5  # of a request that failed, each after a longer pause
    )
    timeout: Annotated[float, Gt(0), Le(86400)] = (
        600.0  # seconds that a request may take
    )
    key_env: str = "OPENAI_API_KEY"  # environment variable that holds the key, where the server asks for one
    # what the file brings for methods, tasks, searches and studies, by their names: every other key of the
    # file that holds a mapping
    blocks: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = ("auto", "none", *CHAT_TEMPLATES)
        if self.chat_template not in names:
            hint = "set model.chat_template=auto"
            raise UserError(
                "model.chat_template", self.chat_template, " | ".join(names), hint
            )
        if self.allow_partial and not self.name.endswith(PARTIAL):
            object.__setattr__(self, "name", self.name + PARTIAL)
        self._check_server()

    def _check_server(self) -> None:
        """Refuse an address that is none or holds a secret, and settings of a server where there is none."""
        if self.base_url is None:
            for f in fields(self):
                if f.name in SERVER and (value := getattr(self, f.name)) != f.default:
                    allowed = f"{f.default} without a server"
                    raise UserError(
                        f"model.{f.name}", value, allowed, "set model.base_url=URL"
                    )
            return
        try:
            url = urlsplit(self.base_url)
            _ = urlsplit(self.base_url).port
        except ValueError:
            url = urlsplit("")
        if url.username or url.password or url.query:
            allowed = (
                "an address without user, password and query: run folders record it"
            )
            hint = f"put the key into the environment variable {self.key_env}"
            raise UserError(
                "model.base_url", f"{url.scheme}://***@{url.hostname}", allowed, hint
            )
        if url.scheme not in ("http", "https") or not url.hostname:
            hint = "set model.base_url=http://localhost:8000/v1"
            raise UserError(
                "model.base_url",
                self.base_url,
                "http://HOST:PORT/v1 or https://...",
                hint,
            )
        object.__setattr__(self, "base_url", self.base_url.rstrip("/"))

    @property
    def server_name(self) -> str:
        """What the server calls the model."""
        return self.served or self.name

    @property
    def checkpoint(self) -> sources.Source:
        """The files that it is loaded from; of a served model those of its tokenizer."""
        if self.base_url:
            return replace(sources.checkpoint(self.path, self.revision), files=WORDS)
        about = f"about {self.gigabytes:g} GB" if self.gigabytes else ""
        return replace(sources.checkpoint(self.path, self.revision), about=about)

    @property
    def files(self) -> tuple[sources.Source, ...]:
        """The checkpoint; nothing for a served model whose tokenizer is not known."""
        return (self.checkpoint,) if self.path else ()


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
        _kernel(source.config, families.text_config(source)._attn_implementation)
        window = families.context_window(source.config)
        guard.check_parameters(source, name or "model")
        return LM(
            source.eval(),
            tokenizer,
            name or "model",
            window,
            values.get("chat_template", "auto"),
        )
    if not isinstance(source, ModelConfig):
        source = model_config(str(source), **({"name": name} if name else {}), **values)
    return _load_checkpoint(source, device, device_map, max_memory)


@dataclass
class Reader(Encoder):
    """A checkpoint without its weights: what tells how long its prompts are, and how large it is."""

    tokenizer: PreTrainedTokenizerBase | None
    name: str
    context_window: int
    chat_template: str
    facts: PreTrainedConfig


def reader(config: ModelConfig) -> Reader:
    """Config and tokenizer of a checkpoint, downloaded where they are not on this machine; no weights.

    Raises:
        UserError: Unknown architecture; config or tokenizer are missing or cannot be read.
    """
    source = config.checkpoint
    path = str(
        sources.local(
            replace(source, files=WORDS) if source.kind == "model" else source
        )
    )
    with _explained(config, config.path):
        # Read as plain data first: transformers would not name the families for a type that it does not know.
        known, _ = transformers.PreTrainedConfig.get_config_dict(path, **ORIGIN)
        if known and not config.base_url:
            families.family_of_type(known.get("model_type"))
        facts = transformers.AutoConfig.from_pretrained(path, **ORIGIN)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **ORIGIN)
    window = config.context_window or families.context_window(facts)
    return Reader(tokenizer, config.name, window, config.chat_template, facts)


def model_config(source: str, **values: Any) -> ModelConfig:
    """The config of a name in ``conf/model``, else of a directory or hub id, with some fields replaced."""
    known = paths.CONF / "model" / f"{source}.yaml"
    data: Any = {"name": Path(source).name, "path": source}
    if known.is_file():
        data = {"name": source, **yaml.safe_load(known.read_text())}
    return build(ModelConfig, with_blocks({**data, **values}), "model")


def with_blocks(data: Mapping[str, Any]) -> dict[str, Any]:
    """A model's node with its blocks gathered under ``blocks``."""
    known = {f.name for f in fields(ModelConfig)}
    blocks = {
        k: dict(v) for k, v in data.items() if k not in known and isinstance(v, Mapping)
    }
    own = {k: v for k, v in data.items() if k not in blocks}
    return own | {"blocks": blocks | dict(data.get("blocks") or {})}


def _load_checkpoint(
    config: ModelConfig,
    device: str,
    device_map: str | dict[str, Any] | None,
    max_memory: dict[int | str, str] | None,
) -> LM:
    if config.base_url:
        allowed = "null: what is behind a server is not loaded here"
        raise UserError(
            "model.base_url",
            config.base_url,
            allowed,
            "leave it out, or run posbench with it",
        )
    where = torch_device(device)
    # From here on there is a folder on this machine, and nothing touches the network.
    sources.local(config.checkpoint)
    read = reader(config)
    path = str(sources.local(config.checkpoint))
    sources.shards(Path(path))
    with _explained(config, where):
        kernel = _kernel(read.facts, config.attention)
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            # Tensors that a partial checkpoint lacks are drawn: the same ones each time.
            torch.manual_seed(0)
            model, told = transformers.AutoModelForCausalLM.from_pretrained(
                path,
                dtype=_dtype(config, where),
                attn_implementation=kernel,
                use_safetensors=True,
                device_map=device_map or {"": where},
                max_memory=max_memory,
                output_loading_info=True,
                # Told in one line below, with every other fault of the weights.
                ignore_mismatched_sizes=True,
                **ORIGIN,
            )
    _need_complete(config, told)
    guard.check_parameters(model, config.name)
    return _with_reader(config, read, model)


def _dtype(config: ModelConfig, where: torch.device) -> str:
    """The weight type to load with; ``auto`` is the checkpoint's own."""
    return (
        config.dtype
        if config.dtype != "auto"
        else ("float32" if where.type == "cpu" else "auto")
    )


def outline(config: ModelConfig, read: Reader, device: str) -> LM:
    """The model on the meta device, without weights: its parts, to compare settings with; it cannot be run.

    Raises:
        UserError: Device, kernel or tokenizer do not fit.
    """
    where = torch_device(device)
    folder = sources.cached(config.checkpoint)
    with _explained(config, where), torch.device("meta"):
        for file in (
            [folder / name for name in sources.shards(folder)] if folder else []
        ):
            with safe_open(file, "pt"):
                pass  # its header tells whether all of it is there
        kernel = _kernel(read.facts, config.attention)
        dtype = _dtype(config, where)
        given = {} if dtype == "auto" else {"dtype": dtype}
        model = transformers.AutoModelForCausalLM.from_config(
            read.facts, attn_implementation=kernel, **given
        )
    return _with_reader(config, read, model)


def _with_reader(config: ModelConfig, read: Reader, model: PreTrainedModel) -> LM:
    """A model and its tokenizer; UserError unless they fit."""
    tokenizer = read.need_tokenizer()
    known = model.get_input_embeddings().weight.shape[0]
    spelt = tokenizer.vocab_size
    if spelt > known:
        allowed = f"a tokenizer of at most {known} tokens, as the embedding of that checkpoint; it has {spelt}"
        raise UserError(
            "model.path",
            config.path,
            allowed,
            "take the tokenizer that belongs to the weights",
        )
    if config.rope == "none":
        families.remove_rope(model)
    return LM(
        model.eval(), tokenizer, config.name, read.context_window, config.chat_template
    )


@contextmanager
def _explained(config: ModelConfig, where: torch.device | str) -> Iterator[None]:
    """Turn what the libraries raise on a checkpoint into one line."""
    try:
        yield
    except UserError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        allowed = f"a device that holds the weights of {config.name}"
        hint = "set runtime.device_map=auto to use all GPUs and the memory, or model.dtype=bfloat16"
        raise MachineError("runtime.device", str(where), allowed, hint) from error
    # Whatever the libraries make of these files, it is the files that are wrong.
    except Exception as error:
        if "does not support an attention implementation" in str(error):
            allowed = "auto or eager for this family"
            hint = "set model.attention=auto"
            raise UserError(
                "model.attention", config.attention, allowed, hint
            ) from error
        known = isinstance(error, OSError | ValueError | SafetensorError)
        reason = ("" if known else f"{type(error).__name__}: ") + " ".join(
            str(error).split()
        )[:200]
        hint = f"set model.path=DIR to a local checkpoint ({reason})"
        raise UserError(
            "model.path", config.path, sources.A_CHECKPOINT, hint
        ) from error


def _need_complete(config: ModelConfig, told: Mapping[str, Any]) -> None:
    """Refuse weights that are not the model's, by what transformers tells of loading; it leaves out tied
    tensors, and those that it knows may be missing or left over."""
    kinds = {
        "missing": told["missing_keys"],
        "of another shape": {key[0] for key in told["mismatched_keys"]},
    }
    kinds["not of this model"] = told["unexpected_keys"]
    faults = [
        f"{len(names)} {kind}, the first {min(names)}"
        for kind, names in kinds.items()
        if names
    ]
    if faults and not config.allow_partial:
        allowed = f"weights with every tensor that its config.json asks for and no other ({'; '.join(faults)})"
        hint = "get the checkpoint again, or set model.allow_partial=true to run with random tensors in place"
        raise UserError("model.path", config.path, allowed, hint)
    if config.allow_partial and not faults:
        allowed = "false: the checkpoint has every tensor, and its numbers must not be called partial"
        raise UserError("model.allow_partial", True, allowed, "leave it out")


def _kernel(config: PreTrainedConfig, asked: str | None) -> str | None:
    """The kernel to load with; sdpa is refused where attention scores are soft-capped (Gemma 2), and what is
    not installed."""
    asked = None if asked == "auto" else asked
    if (
        asked == "flash_attention_2"
        and not transformers.utils.is_flash_attn_2_available()
    ):
        allowed = "sdpa or eager on this machine (flash-attn is not installed)"
        hint = "set model.attention=sdpa, or install the extra posbench[flash]"
        raise UserError("model.attention", asked, allowed, hint)
    if not getattr(config.get_text_config(), "attn_logit_softcapping", None):
        return asked
    if asked == "sdpa":
        allowed = "auto or eager: sdpa would leave out the soft-cap of this model's attention scores"
        hint = "set model.attention=auto (a model object: attn_implementation='eager')"
        raise UserError("model.attention", asked, allowed, hint)
    # Some transformers versions would run sdpa all the same, and leave the cap out.
    return asked or "eager"


def torch_device(device: str) -> torch.device:
    """The device behind ``runtime.device``; UserError if this machine has none."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        there = (
            f"{torch.cuda.device_count()} CUDA devices"
            if torch.cuda.is_available()
            else "no CUDA device"
        )
        allowed = f"auto, cpu, or a CUDA device of this machine (it has {there})"
        hint = "set runtime.device=auto, or leave out runtime=gpu"
        raise UserError("runtime.device", device, allowed, hint) from error
    return where
