"""Interface of backends, which return only replies: a server, or a class of the user's own."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from posbench.backends.delivery import Delivery
from posbench.backends.pacing import ServerSpeed
from posbench.files.sources import Source
from posbench.model.answers import BY_LETTER, NO_CHOICE, Reply, choice_in_reply
from posbench.model.encode import Encoded, Encoder
from posbench.model.load import ModelConfig, read_checkpoint
from posbench.model.thinking import Form

CHOICE_TOKENS = 32
"""Tokens of a reply in which a choice is looked for."""
NO_WINDOW = 2**31
"""Tokens of a window that is not known."""
NEUTRAL_GENERATION_CONFIG = {
    "do_sample": False,
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
}
# Not top_k: its neutral value differs between servers, and the greedy token passes any.
NEUTRAL_SETTINGS: Mapping[str, Any] = {
    "top_p": 1,
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,  # vLLM, SGLang
    "repeat_penalty": 1,  # llama.cpp
    "generation_config": json.dumps(NEUTRAL_GENERATION_CONFIG),  # transformers serve
}
"""Sampling settings sent so that a server does not apply its checkpoint's generation_config.json."""
PENALTIES = (
    ("presence_penalty",),
    ("frequency_penalty",),
    ("repetition_penalty", "repeat_penalty", "generation_config"),
)
"""Settings that change the greedy reply; of several names of one, a server needs to take one."""
LENGTH_FIELDS = ("max_tokens", "max_completion_tokens")
"""Field names of the reply limit; thinking models accept only the second."""

Prompt = str | list[dict[str, str]]
"""The text that the model reads, or chat messages."""
MakePrompt = Callable[[str], Prompt]
"""Gives a text the form of the task's prompts."""
Api = Literal["completions", "chat"]
LikelihoodForm = Literal["", "echo", "echo with a token", "prompt_logprobs"]
"""Form of a server's log-likelihoods of a prompt: none; of an echoed prompt without a reply, or with a reply of one
token; a field of vLLM's.
"""


@dataclass(frozen=True)
class ServerProfile:
    """Result of probing a server: the form of requests it accepts, and its limits.

    Attributes:
        api: The API in use.
        length_field: Name of the field that limits the tokens of a reply.
        temperature: The temperature sent; None if the server refuses the field.
        settings: The neutral settings that the server accepts.
        sends_stop: Whether stop texts are sent; else replies are cut here.
        thinking: How the server returns thinking.
        max_thinking_tokens: Most tokens for thinking, where the server limits replies; None: not known.
        window: Tokens of prompt and reply that the model reads; None: not known.
        choice_method: How choices are read; empty: not asked.
        likelihood_form: How the server returns log-likelihoods of a prompt.
        counts_tokens: Whether the server reports the tokens of a request.
        overhead_tokens: Tokens that the server's chat template adds to a prompt.
        tokens_per_character: Tokens per character of the task's prompts, by the server's count; None: not measured.
        reply_tokens: Tokens of the longest reply to the probe, thinking among them.
        model: The model name that the server reports, if any.
        speed: How fast it answers; None: not measured.
        delivery: Whether prompts arrive whole; None: not checked yet.
        tokens_read: Prompt tokens of the probe itself.
        tokens_written: Reply tokens of the probe itself.
    """

    api: Api
    length_field: str = LENGTH_FIELDS[0]
    temperature: float | None = 0.0
    settings: Mapping[str, Any] = field(default_factory=lambda: dict(NEUTRAL_SETTINGS))
    sends_stop: bool = True
    thinking: Form = ""
    max_thinking_tokens: int | None = None
    window: int | None = None
    choice_method: str = ""
    likelihood_form: LikelihoodForm = ""
    counts_tokens: bool = False
    overhead_tokens: int = 0
    tokens_per_character: float | None = None
    reply_tokens: int = 0
    model: str = ""
    speed: ServerSpeed | None = None
    delivery: Delivery | None = None
    tokens_read: int = 0
    tokens_written: int = 0

    @property
    def form(self) -> tuple[Any, ...]:
        """The form of requests that the server takes."""
        settings = sorted(self.settings.items())
        fields = (self.api, self.length_field, self.temperature, self.sends_stop)
        return (*fields, *settings)

    @property
    def delivery_facts(self) -> dict[str, Any]:
        """Return the record of prompt delivery, with the line that relates characters to tokens of a prompt."""
        facts: dict[str, Any] = asdict(self.delivery) if self.delivery else {}
        facts["text"] = str(self.delivery or "")
        facts["tokens_per_character"] = self.tokens_per_character
        facts["overhead_tokens"] = self.overhead_tokens
        return facts

    @property
    def is_sampled(self) -> bool:
        """Whether replies are drawn at random, so that the same prompt may get another one."""
        return self.temperature != 0


@dataclass(frozen=True)
class ListedModel:
    """A model in a server's list, with its window where the list gives one."""

    id: str
    window: int | None = None


@dataclass
class Untokenized(Encoder):
    """Prompts of a model whose tokenizer is not known: plain texts, whole."""

    name: str
    tokenizer: None = None
    context_window: int = NO_WINDOW
    chat_template: str = "none"

    def encode_whole(
        self, prompts: Sequence[str], forms: Sequence[Mapping[str, Any]]
    ) -> list[Encoded]:
        """Return prompts without tokens: system message, prompt, and the beginning of the reply as one text each.

        Args:
            prompts: The prompts.
            forms: For each: ``system`` and ``prefill``, where there are any.
        """
        encoded = []
        for prompt, form in zip(prompts, forms, strict=True):
            text = prompt
            if form.get("system"):
                text = f"{form['system']}\n\n{prompt}"
            encoded.append(Encoded([], text + form.get("prefill", ""), prompt=prompt))
        return encoded

    def fit(self, encoded: Encoded, form: Mapping[str, Any], **limits: Any) -> Encoded:
        """Return the prompt unchanged: without a known tokenizer, the server reports prompts that do not fit."""
        return encoded


def text_encoder(config: ModelConfig) -> Encoder:
    """Return the encoder that makes a served model's prompts, with its tokenizer where that is known.

    The chat template is the tokenizer's; a server that receives messages applies its own. Thinking tokens count
    towards the window.

    Raises:
        UserError: There is no such tokenizer.
    """
    thinking_tokens = config.thinking_tokens or 0
    if not config.path:
        window = NO_WINDOW
        if config.context_window:
            window = max(config.context_window - thinking_tokens, 1)
        return Untokenized(config.name, context_window=window)
    if config.api == "chat":
        config = replace(config, chat_template="none")
    reader = read_checkpoint(config)
    window = max(reader.context_window - thinking_tokens, 1)
    return replace(reader, context_window=window)


def untruncated(encoder: Encoder) -> Encoder:
    """Return the encoder without a limit on the length of prompts."""
    return replace(encoder, context_window=NO_WINDOW)  # type: ignore[type-var]


class Backend(ABC):
    """Answers prompts as texts; its calls may come from several threads.

    A class of one's own is a frozen dataclass whose fields are the keys under ``model.backend``, with
    :meth:`generate`; see docs/endpoint.md.

    Attributes:
        tokens_read: Tokens of all prompts so far.
        tokens_written: Tokens of all replies so far.
    """

    tokens_read = 0
    tokens_written = 0

    @abstractmethod
    def generate(
        self, prompt: Prompt, max_tokens: int, stop: Sequence[str] = ()
    ) -> Reply:
        """Return the reply to a prompt.

        Args:
            prompt: A text, or messages where :attr:`profile` says so.
            max_tokens: Tokens of the answer at most.
            stop: Texts that end the reply; the caller cuts there, too.

        Raises:
            RequestError: No answer came; the same command asks again.
            UserError: The user has to correct something; no further requests are sent.
        """

    def choose(self, prompt: Prompt, choices: Sequence[str]) -> Reply:
        """Return the choice that the reply to a prompt names; for errors see :meth:`generate`."""
        return with_choice(self.generate(prompt, CHOICE_TOKENS), choices)

    def check(self, choosing: bool = False) -> None:
        """Probe the backend for the settings that requests need.

        Args:
            choosing: Whether choices will be asked for.

        Raises:
            UserError: The backend cannot be used.
        """
        return

    def files(self) -> tuple[Source, ...]:
        """Return the files that it reads; where one changes, its rows are another run's."""
        return ()

    @property
    def profile(self) -> ServerProfile:
        """The profile of its requests."""
        return ServerProfile("completions", settings={})

    @property
    def decoding(self) -> dict[str, Any]:
        """The decoding settings that were sent, left out or left open, for the run's record.

        See :attr:`posbench.backends.served.Endpoint.decoding`.
        """
        return {
            "api": self.profile.api,
            "sent": {},
            "left_out": [],
            "open_penalties": [],
            "length": self.profile.length_field,
            "stop": "here",
            "thinking": "",
            "thinking_tokens": 0,
            "model": "",
        }

    def prompt(self, encoder: Encoder, encoded: Encoded, system: str) -> Prompt:
        """Return a prompt in the form to send, so that the model reads the text of ``encoded``."""
        return encoded.text

    def deliver(self, make_prompt: MakePrompt, text: str, answer_tokens: int) -> Reply:
        """Return the reply to a text of which only the count of its tokens matters."""
        return self.generate(make_prompt(text), answer_tokens or CHOICE_TOKENS)


def with_choice(reply: Reply, choices: Sequence[str]) -> Reply:
    """Return a reply with the choice that its text names as its text, or marked as one that names none.

    Args:
        reply: The reply; a rejected, unfinished or unclear one is returned unchanged.
        choices: The choices.
    """
    if reply.rejection or reply.is_thinking or reply.obstacle:
        return reply
    choice = choice_in_reply(reply.text, choices)
    if not choice:
        return replace(reply, by=NO_CHOICE)
    return replace(reply, text=choice, by=BY_LETTER)
