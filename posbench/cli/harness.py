"""lm-evaluation-harness under a posbench method; importing this module registers its model type ``posbench``.

The harness's own Hugging Face model scores context and continuation in one forward, padded on the right,
without a mask. A method that treats the last prompt token apart cannot know which one that is. Here every
context runs once, padded on the left, and its continuations follow on its cache, as generated tokens do.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import simple_parse_args_string
from tqdm import tqdm

from posbench import paths
from posbench.errors import UserError, choices, renamed
from posbench.files.atomic import digest
from posbench.files.digests import keys
from posbench.late import torch
from posbench.methods import Method
from posbench.model.encode import CHAT_TEMPLATES
from posbench.model.guard import guarded
from posbench.model.lm import LM, batches, checking
from posbench.model.load import load
from posbench.pipeline.compose import composed
from posbench.pipeline.config import Config, check
from posbench.pipeline.identity import identity, reads, threads
from posbench.schema import Count, build

if TYPE_CHECKING:
    from lm_eval.api.model import CacheHook

log = logging.getLogger(__name__)

MODEL_KEYS = (
    *(
        "revision",
        "dtype",
        "attention",
        "rope",
        "chat_template",
        "context_window",
        "threads",
    ),
    "allow_partial",
)
RUNTIME_KEYS = ("device", "device_map", "max_memory")

_OWNER = "posbench"

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""What the harness asks for: (context, continuation) as text, None inside a rolling window, and as tokens."""


@dataclass(frozen=True, kw_only=True)
class Harness:
    """Settings of the harness's Hugging Face model that keep their names and meaning."""

    batch_size: int | str = (
        1  # contexts per forward, or ``auto``: the most that fits the longest request
    )
    max_batch_size: Count = 64  # where ``auto`` starts
    max_length: Count | None = (
        None  # tokens; longer requests lose their beginning. None: the context window
    )
    add_bos_token: bool | None = None  # None: as the tokenizer does
    prefix_token_id: int | None = None  # stands before a continuation without a context
    logits_cache: bool = (
        True  # whether requests with the same context share its forward
    )
    think_end_token: str | int | None = None
    enable_thinking: bool | None = None
    chat_template_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[1-9]\d*|auto(:\d+)?", str(self.batch_size)):
            allowed = "a whole number from 1 up, or auto"
            raise UserError(
                "model_args.batch_size", self.batch_size, allowed, "set batch_size=1"
            )


def configured(
    pretrained: str,
    method: str,
    settings: Mapping[str, Any],
    config_dir: str | None = None,
) -> Config:
    """The checked config of a model and a method, composed and checked as the ``posbench`` command does.

    Args:
        pretrained: A name in ``conf/model``, a directory, or a hub id.
        method: A name in ``conf/method``, or several joined by ``+``, the outermost first.
        settings: Fields of the method (of several: ``parts.<name>.<field>``), and the keys of ``MODEL_KEYS``
            and ``RUNTIME_KEYS``.
        config_dir: A folder with the user's own YAML files.

    Raises:
        UserError: Unknown name, key or value.
    """
    folders = paths.config_folders(config_dir, "model_args.config_dir")
    # Commas separate the arguments, so a list of methods comes with plus signs.
    asked = (
        f"method=[{method.replace('+', ',')}]" if "+" in method else f"method={method}"
    )
    named = [
        "model=hf",
        f"model.path={pretrained}",
        f"model.name={Path(pretrained).name}",
    ]
    listed = pretrained in choices(*(folder / "model" for folder in folders))
    args = [f"model={pretrained}"] if listed else named
    args += [
        asked,
        "stages=[evaluate]",
        *(["--config-dir", config_dir] if config_dir else []),
    ]
    groups = dict.fromkeys(RUNTIME_KEYS, "runtime") | dict.fromkeys(MODEL_KEYS, "model")
    args += [
        f"{groups.get(key, 'method')}.{key}={_spelled(value)}"
        for key, value in settings.items()
    ]
    with renamed("method.", "model_args."):
        made = composed(*args)
        return check(made.raw, made.typed, made.folders)


def _spelled(value: Any) -> str:
    """A value as an override; ``2:5`` is the list [2, 5], for commas part the arguments."""
    if value is None or isinstance(value, bool | dict):
        return json.dumps(value)
    if re.fullmatch(r"\d+(:\d+)+", str(value)):
        return f"[{str(value).replace(':', ',')}]"
    quoted = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{quoted}'" if isinstance(value, str) else str(value)


@register_model("posbench")
class PosbenchLM(HFLM):  # type: ignore[misc]
    """Any causal LM under a posbench method, as a model of lm-evaluation-harness.

    The method is applied for the time of each call and the model is itself between calls. Log-likelihoods are
    taken in float32. Tokens, truncation from the left, stop texts, chat templates and the order of results
    are the harness's own.

    Args:
        pretrained: See :func:`configured`; also for ``method`` and ``config_dir``.
        **settings: Those of :func:`configured`, and fields of :class:`Harness`. A list is written with colons
            where commas separate the arguments: ``layers=1:3`` is the YAML's ``[1, 3]``.

    Raises:
        UserError: Something in the arguments does not fit; see :func:`configured`.
    """

    def __init__(
        self,
        pretrained: str,
        method: str | None = "none",
        *,
        config_dir: str | None = None,
        **settings: Any,
    ) -> None:
        own = {
            f.name: settings.pop(f.name) for f in fields(Harness) if f.name in settings
        }
        harness = build(Harness, own, "model_args")
        # The harness reads the word none as None.
        self.posbench = configured(
            str(pretrained), str(method or "none"), settings, config_dir
        )
        model = self.posbench.model
        runtime = self.posbench.runtime
        if threads(self.posbench):
            torch.set_num_threads(threads(self.posbench) or 1)
        where = {name: getattr(runtime, name) for name in RUNTIME_KEYS}
        self.lm = load(model, **where)
        self.method: Method = self.posbench.method_under_test().build()
        self.method.check(self.lm)
        if self.lm.tokenizer is not None and model.chat_template in CHAT_TEMPLATES:
            self.lm.tokenizer.chat_template = (
                CHAT_TEMPLATES[model.chat_template].read_text().rstrip("\n")
            )
        known = self.lm.context_window if self.lm.context_window < 2**31 else None
        kept = asdict(harness) | {"max_length": harness.max_length or known}
        super().__init__(
            self.lm.model, tokenizer=self.lm.tokenizer, revision=model.revision, **kept
        )
        self._device = self.lm.device
        read = reads(self.posbench)
        moves: dict[str, Any] = {
            "model": identity(self.posbench, read),
            "files": keys(read, "method"),
        }
        moves["method"] = self.posbench.raw["method"]
        # A cache may go on with smaller batches: they move rounding only.
        moves |= {name: value for name, value in kept.items() if "batch" not in name}
        self.identity = digest(moves | {"lm_eval": version("lm_eval")}, 16)

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> Self:
        """The model from ``key=value,key=value``."""
        return cls.create_from_arg_obj(
            simple_parse_args_string(arg_string), additional_config
        )

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> Self:
        """The model from its arguments; they win over the harness's flags of the same name."""
        flags = {
            key: value
            for key, value in (additional_config or {}).items()
            if value is not None
        }
        if flags.get("device") == "cuda:0":
            # What the harness says when nobody said anything: the first GPU where there is one, as auto.
            del flags["device"]
        if "pretrained" not in arg_dict:
            allowed = "a name in conf/model, a directory or a hub id"
            hint = "--model_args pretrained=tiny,method=scale_channel"
            raise UserError("model_args.pretrained", None, allowed, hint)
        return cls(**(flags | arg_dict))

    def get_model_info(self) -> dict[str, Any]:
        """What the harness records of a model, and the method with its parameters."""
        info = {
            "model": self.posbench.model.path,
            "method": self.posbench.choice.name,
            **asdict(self.method),
        }
        return {**super().get_model_info(), "posbench": info}

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Take the harness's response cache, if it is this model's and this method's.

        Its keys hold the request alone, so the answers of another model or method would be taken for ours.

        Raises:
            UserError: Something else filled the file.
        """
        answers = cache_hook.dbdict
        if answers is not None:
            owner = answers.get(_OWNER)
            if owner != self.identity and (owner is not None or len(answers)):
                allowed = "a new file, or one that this model, method and version of posbench filled"
                hint = "give each method a file of its own: the harness does not tell their answers apart"
                raise UserError("--use_cache", str(answers.filename), allowed, hint)
            answers[_OWNER] = self.identity
        super().set_cache_hook(cache_hook)

    def generate_until(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[str]:
        """Generate as the harness does, under the method."""
        with self.method.applied(self.lm):
            return super().generate_until(requests, disable_tqdm=disable_tqdm)

    def _model_generate(self, *args: Any, **settings: Any) -> Any:
        call = partial(
            super()._model_generate, *args, **settings, logits_processor=checking()
        )
        return _generated(self.lm, call)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihoods of whole texts, for methods that treat all tokens alike.

        Raises:
            UserError: The method treats the last prompt token apart, and a whole text has no prompt.
        """
        if self.method.needs_prompt:
            allowed = "for log-likelihoods of whole texts (perplexity): methods that treat all tokens alike"
            hint = (
                "leave out tasks of output_type loglikelihood_rolling, or set last=all"
            )
            raise UserError("method", self.posbench.choice.name, allowed, hint)
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Log-likelihood in nats and greediness per request: a forward per context, then its continuations.

        Raises:
            UserError: A task's continuation is empty, or longer than the model reads.
        """
        asked: dict[Any, list[int]] = {}
        contexts: list[list[int]] = []
        cut = 0
        for number, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                length = f"{len(continuation)} tokens"
                allowed = f"1 to {self.max_length} tokens (max_length)"
                raise UserError(
                    "continuation", length, allowed, "correct the task's choices"
                )
            # The last token of a continuation is predicted and never read.
            kept = context[-(self.max_length + 1 - len(continuation)) :]
            cut += len(kept) < len(context)
            asked.setdefault(tuple(kept) if self.logits_cache else number, []).append(
                number
            )
            contexts.append(kept)
        if cut:
            said = "%d of %d requests exceed %d tokens and lost their beginning"
            log.warning(said, cut, len(requests), self.max_length)
        groups = list(asked.values())
        lengths = [
            max(len(contexts[n]) + len(requests[n][2]) for n in group)
            for group in groups
        ]
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        progress = tqdm(
            total=len(requests),
            disable=disable_tqdm,
            desc="Running loglikelihood requests",
        )
        with self.method.applied(self.lm), progress:
            size = override_bs or self.batch_size
            if size == "auto" and requests:
                size = self._detect_batch_size(
                    [max(requests, key=lambda r: len(r[1]) + len(r[2]))]
                )
            for batch in batches(lengths, int(size) if requests else 1):
                prompts = [contexts[groups[i][0]] for i in batch]
                tokens = [[requests[n][2] for n in groups[i]] for i in batch]
                told = self.lm.continuations(prompts, tokens, batch_size=len(batch))
                for i, answers in zip(batch, told, strict=True):
                    for n, answer in zip(groups[i], answers, strict=True):
                        found[n] = answer
                        # Windows of a rolling request have no text of their own; their sum is cached instead.
                        if requests[n][0] is not None:
                            self.cache_hook.add_partial(
                                "loglikelihood", requests[n][0], answer
                            )
                    progress.update(len(answers))
        return found


@guarded
def _generated(lm: LM, call: Callable[[], Any]) -> Any:
    """The harness's own generation, which a token without numbers stops."""
    return call()
