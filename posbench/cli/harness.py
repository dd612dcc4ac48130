"""lm-evaluation-harness under a posbench method; importing this module registers its model type ``posbench``.

The harness's own Hugging Face model scores context and continuation in one forward,
padded on the right, without a mask. A method that treats the last prompt token apart
cannot know which one that is. Here every context runs once, padded on the left, and its
continuations follow on its cache, as generated tokens do.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from posbench.errors import UserError, choices, near, renamed
from posbench.files.atomic import short_hash
from posbench.files.digests import content_keys
from posbench.late import torch
from posbench.measure.outcomes import decide_outcome
from posbench.methods import Method
from posbench.model.encode import CHAT_TEMPLATES
from posbench.model.guard import guarded
from posbench.model.lm import (
    FINISH_END,
    FINISH_LENGTH,
    FINISH_STOP,
    LM,
    finite_logits_processor,
    length_batches,
)
from posbench.pipeline.compose import compose_one
from posbench.pipeline.config import Config, check_config
from posbench.pipeline.identity import identity, run_contents, threads
from posbench.run.base import load_placed
from posbench.schema import Count, build
from posbench.stats import outcomes

if TYPE_CHECKING:
    from lm_eval.api.model import CacheHook

log = logging.getLogger(__name__)
MODEL_KEYS = (
    "revision",
    "dtype",
    "attention",
    "rope",
    "chat_template",
    "context_window",
    "threads",
    "allow_partial",
)
"""Model arguments that are keys of the config's ``model``."""
RUNTIME_KEYS = ("device", "device_map", "max_memory")
"""Model arguments that are keys of the config's ``runtime``."""

_OWNER = "posbench"
"""Key of the harness's response cache that holds whose answers it has."""

UNLIMITED_WINDOW = 2**31
"""Context window in tokens of a model whose config names none."""

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""A log-likelihood request of the harness: (context, continuation) as text, None inside
a rolling window, and both as tokens."""


@dataclass(frozen=True, kw_only=True)
class Harness:
    """Settings of the harness's Hugging Face model that keep their names and meaning.

    Attributes:
        batch_size: Contexts per forward, or ``auto``: the most that fits the longest
            request.
        max_batch_size: Where ``auto`` starts.
        max_length: Tokens; longer requests lose their beginning. None: the context
            window.
        add_bos_token: Whether prompts begin with it. None: as the tokenizer does.
        prefix_token_id: Token before a continuation without a context.
        logits_cache: Whether requests with the same context share its forward.
        think_end_token: See the harness, as for all below.
        enable_thinking: See the harness.
        chat_template_args: See the harness.
    """

    batch_size: int | str = 1
    max_batch_size: Count = 64
    max_length: Count | None = None
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    logits_cache: bool = True
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
    """Return the config of a model and a method, checked as the ``posbench`` command does.

    Args:
        pretrained: A name in ``conf/model``, a directory, or a hub id.
        method: A name in ``conf/method``, or several joined by ``+``, outermost first.
        settings: Fields of the method (of several: ``parts.<name>.<field>``), and the
            keys of ``MODEL_KEYS`` and ``RUNTIME_KEYS``.
        config_dir: A folder with the user's own YAML files.

    Raises:
        UserError: Unknown name, key or value.
    """
    folders = paths.config_folders(config_dir, "model_args.config_dir")
    overrides = [
        "model=hf",
        f"model.path={pretrained}",
        f"model.name={Path(pretrained).name}",
    ]
    if pretrained in choices(*paths.group_folders("model", folders)):
        overrides = [f"model={pretrained}"]
    # Commas separate the harness's arguments, so methods are joined by plus signs.
    if "+" in method:
        method = f"[{method.replace('+', ',')}]"
    overrides += [f"method={method}", "stages=[evaluate]"]
    if config_dir:
        overrides += ["--config-dir", config_dir]
    for key, value in settings.items():
        group = "method"
        if key in MODEL_KEYS:
            group = "model"
        elif key in RUNTIME_KEYS:
            group = "runtime"
        overrides.append(f"{group}.{key}={_spelled(value)}")
    with renamed("method.", "model_args."):
        return check_config(compose_one(*overrides))


@contextmanager
def _naming_pretrained(pretrained: str, config_dir: str | None) -> Iterator[None]:
    """Let an error on the model's path name ``pretrained``, which was typed, and a choice with a name close to it."""
    field = "model_args.pretrained"
    folders = paths.config_folders(config_dir, "model_args.config_dir")
    names = choices(*paths.group_folders("model", folders))
    if pretrained in names:  # the path is that of a file
        yield
        return
    try:
        with renamed("model.path", field):
            yield
    except UserError as error:
        if error.field != field or Path(pretrained).exists():
            raise
        hint = near(pretrained, names, error.hint)
        allowed = f"a name of `posbench ls models`, {error.allowed}"
        raise UserError(field, error.value, allowed, hint) from error


def _spelled(value: Any) -> str:
    """Return a value as text of an override; ``2:5`` becomes the list [2,5], as commas separate arguments here."""
    if value is None or isinstance(value, bool | dict):
        return json.dumps(value)
    text = str(value)
    if re.fullmatch(r"\d+(:\d+)+", text):
        return f"[{text.replace(':', ',')}]"
    if not isinstance(value, str):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


@register_model("posbench")
class PosbenchLM(HFLM):  # type: ignore[misc]
    """Any causal LM under a posbench method, as a model of lm-evaluation-harness.

    The method is applied for the time of each call and the model is itself between calls.
    Log-likelihoods are taken in float32. Tokens, truncation from the left, stop texts,
    chat templates and the order of results are the harness's own.

    Args:
        pretrained: See :func:`configured`; also for ``method`` and ``config_dir``.
        **settings: Settings of :func:`configured`, and fields of :class:`Harness`. A list is
            written with colons where commas separate the arguments: ``layers=1:3`` is the
            YAML's ``[1, 3]``.

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
        names = {field.name for field in fields(Harness)}
        harness_settings = {k: v for k, v in settings.items() if k in names}
        settings = {k: v for k, v in settings.items() if k not in names}
        harness = build(Harness, harness_settings, "model_args")
        # The harness reads the word none as None.
        method = str(method or "none")
        with _naming_pretrained(str(pretrained), config_dir):
            self.posbench = configured(str(pretrained), method, settings, config_dir)
            model = self.posbench.model
            num_threads = threads(self.posbench)
            if num_threads:
                torch.set_num_threads(num_threads)
            self.lm = load_placed(model, self.posbench.runtime)
        self.method: Method = self.posbench.method_under_test().build()
        self.method.check(self.lm)
        if self.method.rewrites or self.posbench.choice.reads_items:
            allowed = (
                "a method that neither reads items nor rewrites prompts: those of the harness go as they are, "
                "and their items are not known"
            )
            hint = "run a task of posbench: posbench task=nq_multidoc method=NAME"
            raise UserError("model_args.method", method, allowed, hint)
        if self.lm.tokenizer is not None and model.chat_template in CHAT_TEMPLATES:
            template = CHAT_TEMPLATES[model.chat_template].read_text("utf-8")
            self.lm.tokenizer.chat_template = template.rstrip("\n")
        max_length = harness.max_length
        if max_length is None and self.lm.context_window < UNLIMITED_WINDOW:
            max_length = self.lm.context_window
        hf_settings = asdict(harness) | {"max_length": max_length}
        super().__init__(
            self.lm.model,
            tokenizer=self.lm.tokenizer,
            revision=model.revision,
            **hf_settings,
        )
        self._device = self.lm.device
        self.identity = self._identity(hf_settings)

    def _identity(self, hf_settings: Mapping[str, Any]) -> str:
        """Return a digest of everything that can change an answer.

        Args:
            hf_settings: The harness's own settings of its Hugging Face model.
        """
        contents = run_contents(self.posbench)
        facts: dict[str, Any] = {
            "model": identity(self.posbench, contents),
            "files": content_keys(contents, "method"),
            "method": self.posbench.raw["method"],
            "lm_eval": version("lm_eval"),
        }
        # A cache may be used with another batch size, which moves rounding only.
        facts |= {k: v for k, v in hf_settings.items() if "batch" not in k}
        return short_hash(facts, 16)

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> Self:
        """The model from ``key=value,key=value``."""
        arguments = simple_parse_args_string(arg_string)
        return cls.create_from_arg_obj(arguments, additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> Self:
        """Make the model from ``--model_args`` and the harness's flags.

        Args:
            arg_dict: Values of ``--model_args``.
            additional_config: Flags; values of the same name in ``arg_dict`` win.

        Raises:
            UserError: ``pretrained`` is missing.
        """
        if "pretrained" not in arg_dict:
            allowed = "a name in conf/model, a directory or a hub id"
            hint = "--model_args pretrained=tiny,method=scale_channel"
            raise UserError("model_args.pretrained", None, allowed, hint)
        flags = additional_config or {}
        flags = {key: value for key, value in flags.items() if value is not None}
        if flags.get("device") == "cuda:0":
            # The harness's default, also where there is no GPU: leave the choice to auto.
            del flags["device"]
        return cls(**(flags | arg_dict))

    def get_model_info(self) -> dict[str, Any]:
        """Return the harness's record of the model, with the method and its parameters under ``posbench``."""
        info = {
            "model": self.posbench.model.path,
            "method": self.posbench.choice.name,
            **asdict(self.method),
        }
        return {**super().get_model_info(), "posbench": info}

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Take the harness's response cache, if it holds answers of this very model.

        Its keys describe the request alone: answers of another model or method would be
        returned as this model's.

        Args:
            cache_hook: The harness's, with a file of answers in ``dbdict``; None there without a cache.

        Raises:
            UserError: Something else filled the file.
        """
        answers = cache_hook.dbdict
        if answers is not None:
            owner = answers.get(_OWNER)
            is_foreign = owner is not None or len(answers) > 0
            if owner != self.identity and is_foreign:
                allowed = "a new file, or one that the same model, method and version of posbench wrote"
                hint = "use one file per method: the harness does not keep their answers apart"
                raise UserError("--use_cache", str(answers.filename), allowed, hint)
            answers[_OWNER] = self.identity
        super().set_cache_hook(cache_hook)

    def generate_until(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[str]:
        """Generate as the harness does, under the method, and warn of replies that are no answers.

        Args:
            requests: The harness's requests: a prompt, and texts that end the reply, each.
            disable_tqdm: Whether to show no progress bar.

        Returns:
            The replies, in the order of the requests.
        """
        self._missing = Counter[str]()
        with self.method.applied(self.lm):
            replies = super().generate_until(requests, disable_tqdm=disable_tqdm)
        if self._missing.total() > outcomes.MAX_MISSING_SHARE * len(requests):
            log.warning(
                "%d of %d replies are no answers (%s): a score may call right answers wrong that had no room; raise "
                "max_gen_toks of the task",
                self._missing.total(),
                len(requests),
                ", ".join(f"{n} {name}" for name, n in self._missing.items()),
            )
        return replies

    def _model_generate(
        self, context: Any, max_length: int, stop: Sequence[str], **settings: Any
    ) -> Any:
        """Generate token ids as the harness does, checking for NaN, and count replies that are no answers.

        Args:
            context: Token ids of the prompts, padded on the left, [rows, tokens].
            max_length: Most tokens of prompt and reply together.
            stop: Texts that end a reply.
            **settings: Other arguments of the harness.

        Returns:
            Token ids of prompts and replies, [rows, up to max_length].
        """
        generate = partial(
            super()._model_generate,
            context,
            max_length,
            stop,
            **settings,
            logits_processor=finite_logits_processor(),
        )
        tokens = _guarded_generate(self.lm, generate)
        reply_ids = tokens[:, context.shape[1] :]
        # Only a batch that reached the limit can hold cut replies.
        if tokens.shape[1] >= max_length:
            texts = self.tokenizer.batch_decode(reply_ids)
            end_id = self.tokenizer.eos_token_id
            for ids, text in zip(reply_ids.tolist(), texts, strict=True):
                finish = FINISH_END if end_id in ids else FINISH_LENGTH
                if any(word in text for word in stop):
                    finish = FINISH_STOP
                decision = decide_outcome(text, finish, ended_itself=True)
                if decision.outcome != outcomes.ANSWERED:
                    self._missing[f"{decision.outcome}: {decision.reason}"] += 1
        return tokens

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihoods (nats) of whole texts, for methods that treat all tokens alike.

        Args:
            requests: The harness's requests, a text each.
            disable_tqdm: Whether to show no progress bar.

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
        """Score requests: a forward per context, then its continuations on its cache.

        Args:
            requests: N requests of the harness.
            disable_tqdm: Whether to show no progress.
            override_bs: Contexts per forward, instead of the model's batch size.

        Returns:
            For each request the log-likelihood of its continuation in nats, and whether
            greedy decoding would produce it.

        Raises:
            UserError: A task's continuation is empty, or longer than the model reads.
        """
        contexts = self._truncated_contexts(requests)
        # Requests that share a context, by their indices.
        groups_by_context: dict[Any, list[int]] = {}
        for index, context in enumerate(contexts):
            key = tuple(context) if self.logits_cache else index
            groups_by_context.setdefault(key, []).append(index)
        groups = list(groups_by_context.values())
        lengths = [
            max(len(contexts[index]) + len(requests[index][2]) for index in group)
            for group in groups
        ]
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        progress = tqdm(
            total=len(requests),
            disable=disable_tqdm,
            desc="Running loglikelihood requests",
        )
        with self.method.applied(self.lm), progress:
            batch_size = override_bs or self.batch_size
            if not requests:
                batch_size = 1
            elif batch_size == "auto":
                longest = max(requests, key=lambda r: len(r[1]) + len(r[2]))
                batch_size = self._detect_batch_size([longest])
            boundary = self.lm.rope_boundary
            for batch in length_batches(lengths, int(batch_size), boundary=boundary):
                batch_groups = [groups[i] for i in batch]
                scores = self.lm.continuations(
                    [contexts[group[0]] for group in batch_groups],
                    [[requests[index][2] for index in group] for group in batch_groups],
                    batch_size=len(batch),
                )
                for group, group_scores in zip(batch_groups, scores, strict=True):
                    for index, score in zip(group, group_scores, strict=True):
                        answers[index] = score
                        text = requests[index][0]
                        # Windows of a rolling request have no text: their sum is cached.
                        if text is not None:
                            self.cache_hook.add_partial("loglikelihood", text, score)
                    progress.update(len(group))
        return answers

    def _truncated_contexts(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the token ids of each request's context, without a beginning that does not fit with its continuation.

        Raises:
            UserError: A continuation is empty, or longer than the model reads.
        """
        contexts = []
        num_truncated = 0
        for _, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                length = f"{len(continuation)} tokens"
                allowed = f"1 to {self.max_length} tokens (max_length)"
                hint = "correct the task's choices"
                raise UserError("continuation", length, allowed, hint)
            # The last token of a continuation is predicted and never read.
            max_context = self.max_length + 1 - len(continuation)
            num_truncated += len(context) > max_context
            contexts.append(context[-max_context:])
        if num_truncated:
            log.warning(
                "%d of %d requests exceed %d tokens and lost their beginning",
                num_truncated,
                len(requests),
                self.max_length,
            )
        return contexts


@guarded
def _guarded_generate(lm: LM, generate: Callable[[], Any]) -> Any:
    """Run the harness's generation, which a token without numbers stops."""
    return generate()
