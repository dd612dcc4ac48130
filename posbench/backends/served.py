"""A model behind an OpenAI-compatible server: text in, replies out, no access to the inside.

Servers differ in the requests they accept: a probe finds the accepted form, which every request then has.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from typing import Any
from urllib.parse import urlsplit

from posbench.backends.base import (
    CHOICE_TOKENS,
    LENGTH_FIELDS,
    NEUTRAL_SETTINGS,
    PENALTIES,
    Api,
    Backend,
    LikelihoodForm,
    ListedModel,
    MakePrompt,
    Prompt,
    ServerProfile,
    with_choice,
)
from posbench.backends.delivery import cold
from posbench.backends.pacing import (
    MAX_WAIT_SECONDS,
    Pacer,
    ServerBusy,
    ServerSpeed,
    Timing,
)
from posbench.backends.refusals import Refusal, read_refusal
from posbench.errors import MachineError, UserError
from posbench.files.secrets import (
    is_long_enough,
    secrets_in,
    without_named_secrets,
    without_secrets,
    written_forms,
)
from posbench.model.answers import (
    BY_FIRST_TOKEN,
    BY_LETTER,
    BY_LOG_LIKELIHOODS,
    GOOD_REASONS,
    Reply,
    RequestError,
    failing_on_other_forms,
    first_choice,
    first_token_nats,
    probability_of_choices,
    read_echoed_logprobs,
    read_prompt_logprobs,
    read_reply,
    read_top_logprobs,
    read_usage,
    reported_model,
    without_surrogates,
)
from posbench.model.encode import Encoded, Encoder
from posbench.model.lm import FINISH_LENGTH
from posbench.model.load import ModelConfig
from posbench.model.thinking import opens_thinking
from posbench.stats.outcomes import CONTENT_FILTER, OVERFLOW

MIN_CHOICE_PROBABILITY = 0.5
"""Probability of a first token that is a choice above which it is read as one: a model that begins with "The answer"
says its choice later."""
MAX_STOP_TEXTS = 4
"""Stop texts that OpenAI's API takes."""
MAX_LISTED_MODELS = 8
"""Models of a server that a message lists."""
MAX_MESSAGE_CHARACTERS = 200
"""Characters of a server's message that an error repeats."""
SEED = 0
"""Seed of sampled replies, where the server takes one."""
PROBE_QUESTION = "1 + 1 = ?\nA. 1\nB. 2\nAnswer:"
"""First question of the probe."""
SHORT_PROBE_TOKENS = 16
LONG_PROBE_TOKENS = 512
"""Tokens of the first reply, and of one that shows whether a model thinks that has written no answer by then."""
PROBE_WAIT_SECONDS = 120.0
"""Seconds for which a server may be busy before a run begins."""
PROBE_STOP = "\n#####"
DEFAULT_THINKING_TOKENS = 16384
"""Default of thinking tokens: more than questions about one item of a prompt take."""
FIRST_RETRY_SECONDS = 0.5
"""First pause before a failed request is repeated; doubled with each further failure."""
LONGEST_RETRY_SECONDS = 8.0
"""Longest such pause."""
WINDOW_FIELDS = (
    "max_model_len",  # vLLM, SGLang
    "loaded_context_length",  # LM Studio
    "context_length",  # OpenRouter, Together
    "context_window",  # Groq
    "max_context_length",  # Mistral, LM Studio
)
"""Fields of model lists that give a model's window."""
ROUTE = re.compile(r"/(chat/)?completions/?$")
"""End of a request's address, which is no part of ``model.base_url``."""
LLAMA_CPP = "llamacpp"
"""Owner of the models in llama.cpp's list, which gives the server's window in another place."""


class ServerFailed(RequestError):
    """The server failed or was not reached: nothing is said about the request."""


class ProbeTimeOver(Exception):
    """The time that a probe may take is over."""


def key_error(config: ModelConfig, message: str) -> UserError:
    """Return the error that a server refuses the key, or the lack of one; ``message`` is what it said."""
    allowed = "a variable with a key of that server"
    hint = (
        f"export {config.key_env}=KEY, or name another with model.key_env ({message})"
    )
    return UserError("model.key_env", config.key_env, allowed, hint)


class _RequestRefused(RequestError):
    """The server refused a request, for a reason that concerns its form.

    Attributes:
        refusal: Its answer, as it was read.
        redirected_to: The address that it was sent on to; empty where it was not.
    """

    def __init__(self, message: str, refusal: Refusal, redirected_to: str) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.redirected_to = redirected_to


class _PromptRejected(Exception):
    """The server did not let the model read a prompt.

    Attributes:
        reason: :data:`posbench.stats.outcomes.OVERFLOW` or :data:`posbench.stats.outcomes.CONTENT_FILTER`.
        window: Tokens that the model reads, if the server reports them.
    """

    def __init__(self, reason: str, window: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.window = window


class Endpoint(Backend):
    """A served model. Its calls may come from several threads.

    Args:
        config: The model.
        profile: Result of an earlier probe; None: :meth:`check` probes.

    Attributes:
        tokens_read: Prompt tokens so far, by the server's count.
        tokens_written: Reply tokens so far.
        listing_problem: Why the list of models could not be read; empty if it was read, or not requested.
        give_up_at: Deadline of the probe, on the clock of ``time.monotonic``; None: no deadline.
        timings: Requests that were sent alone: the first question, and texts that no cache has seen.
    """

    def __init__(
        self, config: ModelConfig, profile: ServerProfile | None = None
    ) -> None:
        self._config = config
        self._profile = profile
        self._lock = threading.RLock()
        self.tokens_read = 0
        self.tokens_written = 0
        self.tokens_cached = 0
        self.listing_problem = ""
        self.give_up_at: float | None = None
        self.timings: list[Timing] = []
        self._key = os.environ.get(config.key_env, "")
        if not self._key and config.key_env != "OPENAI_API_KEY":
            allowed = "an environment variable that is set"
            hint = f"export {config.key_env}=... (it is never recorded)"
            raise UserError("model.key_env", config.key_env, allowed, hint)
        import openai  # of all that a run imports it takes longest

        keys = [self._key] if is_long_enough(self._key) else []
        secrets = [*keys, *secrets_in(config.extra_body)]
        self._secrets = [form for secret in secrets for form in written_forms(secret)]
        self._client = openai.OpenAI(
            base_url=config.base_url,
            api_key=self._key or "none",
            max_retries=0,
            timeout=config.timeout,
        )
        self.pacer = Pacer(config.concurrency)

    @property
    def profile(self) -> ServerProfile:
        """The probed profile of the server; before the probe, the assumed one."""
        if self._profile is None:
            api: Api = "chat" if self._config.api == "chat" else "completions"
            return ServerProfile(api, temperature=self._config.temperature or 0)
        return self._profile

    @property
    def thinking_tokens(self) -> int:
        """The tokens that a reply may take for thinking: the config's, else the default or what the server allows.

        0 for a model that does not think.
        """
        if self._config.thinking_tokens is not None:
            return self._config.thinking_tokens
        if not self.profile.thinking:
            return 0
        most = self.profile.max_thinking_tokens
        return min(DEFAULT_THINKING_TOKENS, most or DEFAULT_THINKING_TOKENS)

    # Models of the server

    def models(self) -> list[ListedModel]:
        """Return the models that the server lists; empty where it has no such list.

        Raises:
            MachineError: Nothing answers there.
        """
        import openai

        client = self._client.with_options(timeout=min(self._config.timeout, 10))
        data: Any = {}
        # Not every server has a list; one that cannot be read stops nothing.
        try:
            response = client.models.with_raw_response.list()
            data = self._readable(response.http_response.json())
        except (openai.OpenAIError, AttributeError, TypeError, ValueError) as error:
            if _is_dead_address(error):
                raise self._dead_address(error) from error
            words: object = error
            if isinstance(error, openai.APIStatusError):
                words = f"HTTP {error.status_code}: {error.response.text}"
            self.listing_problem = self._short_text(words)
        entries = data.get("data") if isinstance(data, dict) else None
        if not isinstance(entries, list):
            return []
        return [
            ListedModel(str(entry["id"]), self._listed_window(entry))
            for entry in entries
            if isinstance(entry, dict) and entry.get("id")
        ]

    def _listed_window(self, entry: Mapping[str, Any]) -> int | None:
        """Return a model's context window (tokens) from its entry in the server's list; None if it is not there."""
        meta = entry.get("meta")
        values = [entry.get(name) for name in WINDOW_FIELDS]
        if entry.get("owned_by") == LLAMA_CPP:
            values.append(self._llama_cpp_window())
        if isinstance(meta, dict):
            values += [meta.get("n_ctx"), meta.get("n_ctx_train")]
        for value in values:
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None

    def _llama_cpp_window(self) -> Any:
        """Return llama.cpp's context window of a request, perhaps smaller than the checkpoint's; None if unknown."""
        import openai

        root = str(self._config.base_url).removesuffix("/v1")
        client = self._client.with_options(base_url=root, timeout=5)
        with suppress(openai.OpenAIError, LookupError, ValueError, TypeError):
            properties: Any = client.get("/props", cast_to=object)
            return properties["default_generation_settings"]["n_ctx"]
        return None

    # Probing

    def check(self, choosing: bool = False) -> None:
        """Probe the server with a short question: does it answer for this model, and which requests does it accept?

        Args:
            choosing: Whether choices will be asked for; if so, how to read them is probed, too.

        Raises:
            UserError: It does not know the model, or takes no such request.
            MachineError: It does not answer.
        """
        with self._lock:
            if self._profile is not None and (
                not choosing or self._profile.choice_method
            ):
                return
            apis: Sequence[Api] = ("completions", "chat")
            if self._config.api != "auto":
                apis = (self._config.api,)
            self.probe(apis, probe_prompts(), choosing=choosing)

    def probe(
        self,
        apis: Sequence[Api],
        prompts: Mapping[Api, Prompt],
        *,
        answer_tokens: int = CHOICE_TOKENS,
        stops: bool = True,
        choosing: bool = False,
        known: ServerProfile | None = None,
    ) -> ServerProfile:
        """Find out the accepted requests and the limits of a server by a few short requests.

        Args:
            apis: The APIs to try, the best one first.
            prompts: A short question in the form of each.
            answer_tokens: Tokens of a reply without thinking, in the run.
            stops: Whether stop texts will be sent.
            choosing: Whether choices will be asked for.
            known: Result of an earlier probe with the same kind of requests: if the server still accepts that form, the
                rest of the probe is skipped.

        Raises:
            UserError: It does not know the model, or refuses a field that cannot be left out.
            MachineError: It does not answer.
            ProbeTimeOver: :attr:`give_up_at` has passed.
        """
        self.pacer.max_wait = PROBE_WAIT_SECONDS
        with self._lock, self._reporting_probe_failures():
            reply = self._choose_api(apis, prompts, stops)
            prompt = prompts[self.profile.api]
            counts_tokens = reply.prompt_tokens is not None
            if (
                known
                and known.form == self.profile.form
                and known.counts_tokens == counts_tokens
            ):
                self._profile = replace(known, model=reply.model)
            else:
                self._find_thinking(prompt, reply, answer_tokens)
                if choosing:
                    self._find_choice_method(prompt)
        self.pacer.max_wait = MAX_WAIT_SECONDS
        return self.profile

    def _choose_api(
        self, apis: Sequence[Api], prompts: Mapping[Api, Prompt], stops: bool
    ) -> Reply:
        """Find the first API that the server offers; return its reply to the probe.

        Args:
            apis: ``completions`` and ``chat``, in the order to try.
            prompts: The probe's prompt for each.
            stops: Whether requests will have texts that end a reply.

        Raises:
            UserError: It offers none.
        """
        first_error: _RequestRefused | None = None
        temperature = self._config.temperature or 0.0
        for api in apis:
            self._profile = ServerProfile(api, temperature=temperature)
            if temperature:
                self._profile = replace(
                    self._profile, settings={**NEUTRAL_SETTINGS, "seed": SEED}
                )
            try:
                return self._find_accepted_form(prompts[api], stops)
            except _RequestRefused as error:
                if error.refusal.kind != "api":
                    raise
                first_error = first_error or error
        assert first_error is not None, "there is an API to try"
        raise self._no_api(apis, first_error)

    def _find_accepted_form(self, prompt: Prompt, stops: bool) -> Reply:
        """Change the fields of requests until the server takes them; return the reply to the probe.

        A field that the server names in its refusal is left out or sent under its other name; if it names none, all
        optional fields are left out.

        Args:
            prompt: A short question.
            stops: Whether the run's requests have texts that end a reply, so that the probe has one.
        """
        tried_fields: set[str] = set()
        stop = (PROBE_STOP,) if stops else ()
        while True:
            # A length field that was refused once is not tried again under that name.
            tried_fields.add(self.profile.length_field)
            began = time.monotonic()
            try:
                reply = self._ask_reply(prompt, SHORT_PROBE_TOKENS, stop)
                seconds = time.monotonic() - began
                tokens = reply.reply_tokens or 0
                self.timings.append(Timing(len(PROBE_QUESTION), tokens, seconds))
                return reply
            except _RequestRefused as error:
                refusal = error.refusal
                if refusal.kind == "request" and self.profile.settings:
                    self._change(settings={})
                elif refusal.kind != "fields" or not self._leave_out(
                    refusal.fields, str(error), tried_fields
                ):
                    raise

    def _leave_out(
        self, names: Sequence[str], message: str, tried_fields: set[str]
    ) -> bool:
        """Leave out, or rename, fields that the server refuses; return whether anything changed.

        Args:
            names: The refused fields.
            message: What the server said.
            tried_fields: Names under which the length of a reply was already sent.

        Raises:
            UserError: The user set one of the fields.
        """
        profile = self.profile
        typed = [name for name in names if name in (self._config.extra_body or {})]
        if typed:
            value = without_named_secrets(self._config.extra_body or {})[typed[0]]
            allowed = f"a field that {self._config.base_url} takes ({message})"
            hint = "leave it out, or give it another value"
            raise UserError(f"model.extra_body.{typed[0]}", value, allowed, hint)
        # Optional settings are dropped.
        refused = [name for name in names if name in profile.settings]
        if refused:
            kept = {k: v for k, v in profile.settings.items() if k not in refused}
            self._change(settings=kept)
            return True
        if "stop" in names:
            self._change(sends_stop=False)
            return True
        # The length of a reply has several names.
        if profile.length_field in names:
            others = [name for name in LENGTH_FIELDS if name not in tried_fields]
            if others:
                self._change(length_field=others[0])
                return True
        if "temperature" in names and profile.temperature is not None:
            if self._config.temperature is not None:
                allowed = (
                    f"a temperature that {self._config.base_url} takes ({message})"
                )
                hint = "leave it out, or set the one that it names"
                raise UserError(
                    "model.temperature", self._config.temperature, allowed, hint
                )
            # The server's own temperature then; a seed makes its replies repeatable.
            settings = {**profile.settings, "seed": SEED}
            self._change(temperature=None, settings=settings)
            return True
        return False

    def _change(self, **changes: Any) -> None:
        self._profile = replace(self.profile, **changes)

    def _find_thinking(self, prompt: Prompt, reply: Reply, answer_tokens: int) -> None:
        """Find out whether and how the model thinks before it answers, and how long its replies may be then.

        A text without a chat template is no question that a model thinks about, and it may never end.

        Args:
            prompt: The probe's prompt.
            reply: The reply to it, which was short.
            answer_tokens: Tokens of an answer without thinking.
        """
        may_think = prompt != PROBE_QUESTION
        opened = isinstance(prompt, str) and opens_thinking(prompt)
        if opened:
            self._change(thinking="opened")
        self._see(reply, may_think)
        # The model may still have been thinking when the short reply was cut.
        is_cut = may_think and reply.finish == FINISH_LENGTH
        if is_cut and not self.profile.thinking:
            self._see(self._ask_reply(prompt, LONG_PROBE_TOKENS), may_think)
        if self.profile.thinking:
            self._find_reply_limit(prompt, answer_tokens)

    def _see(self, reply: Reply, may_think: bool) -> None:
        """Note what a reply shows of how the model thinks, of the counted tokens, and of the model that replied.

        Args:
            reply: The reply to the first question.
            may_think: Whether a reply without text is a sign of thinking that is not shown.
        """
        form = reply.thinking_form
        wrote = reply.reply_tokens or 0
        is_blank = not reply.text.strip()
        # The limit was used up, and no text came.
        if may_think and not form and is_blank and reply.finish == FINISH_LENGTH:
            form = "hidden"
        self._change(
            thinking=self.profile.thinking or form,
            reply_tokens=max(self.profile.reply_tokens, wrote),
            counts_tokens=reply.prompt_tokens is not None,
            overhead_tokens=reply.prompt_tokens or 0,
            model=self.profile.model or reply.model,
        )

    def _find_reply_limit(self, prompt: Prompt, answer_tokens: int) -> None:
        """Ask for the longest reply of the run, and keep to a shorter limit if the server has one.

        Args:
            prompt: A short question.
            answer_tokens: Most tokens of an answer in the run, without the thinking before it.

        Raises:
            UserError: The limit leaves no room for an answer.
        """
        # Once more with the limit that the first refusal named.
        for _ in range(2):
            try:
                reply = self._ask_reply(prompt, answer_tokens + self.thinking_tokens)
                self._see(reply, may_think=True)
                return
            except _RequestRefused as error:
                limit = error.refusal.limit
                if error.refusal.kind != "length" or not limit:
                    raise
                if limit <= answer_tokens:
                    allowed = f"at most {limit} tokens of a reply ({error})"
                    hint = f"set task.max_new_tokens={limit}"
                    raise UserError(
                        "task.max_new_tokens", answer_tokens, allowed, hint
                    ) from error
                self._limit_thinking(limit - answer_tokens, error)
            except _PromptRejected as rejection:
                # So short a prompt is over no window: the reply is.
                if not rejection.window:
                    raise
                self._limit_thinking(rejection.window // 2, rejection)
                self._change(window=rejection.window)

    def _limit_thinking(self, tokens: int, reason: Exception) -> None:
        """Limit the thinking tokens to what the server allows.

        Raises:
            UserError: The user asked for more; ``reason`` is what the server said.
        """
        typed = self._config.thinking_tokens
        if typed is not None and typed > tokens:
            allowed = f"at most {tokens}: {reason}"
            raise UserError(
                "model.thinking_tokens",
                typed,
                allowed,
                f"set model.thinking_tokens={tokens}",
            )
        self._change(max_thinking_tokens=tokens)

    def measure_sample(self, make_prompt: MakePrompt, sample: str) -> None:
        """Count the tokens of a piece of the task's prompts, and time it.

        Args:
            make_prompt: Gives a text the form of the task's prompts.
            sample: The piece.

        Raises:
            UserError, MachineError, ProbeTimeOver: As :meth:`probe`.
        """
        text = cold(sample)
        with self._reporting_probe_failures():
            try:
                long = self.ask_timed(make_prompt, text)
            except _PromptRejected as rejection:
                self._change(window=self.profile.window or rejection.window)
                return
        self._change(speed=ServerSpeed(tuple(self.timings)))
        short_tokens = self.profile.overhead_tokens
        if long.prompt_tokens is None or long.prompt_tokens <= short_tokens:
            return
        # Both prompts have the same template.
        extra_characters = len(text) - len(PROBE_QUESTION)
        # A longer and a shorter text differ by their characters alone.
        per_character = (long.prompt_tokens - short_tokens) / max(extra_characters, 1)
        overhead = max(short_tokens - round(per_character * len(PROBE_QUESTION)), 0)
        self._change(tokens_per_character=per_character, overhead_tokens=overhead)

    def measure_parallel(
        self, make_prompt: MakePrompt, sample: str, count: int
    ) -> None:
        """Find out how many requests a server answers in the time of one.

        Args:
            make_prompt: Gives a text the form of the task's prompts.
            sample: The text that :meth:`measure_sample` sent.
            count: Requests to send at once.

        Raises:
            UserError, MachineError, ProbeTimeOver: As :meth:`probe`.
        """
        speed = self.profile.speed
        if speed is None:
            return
        if count < 2:
            self._change(speed=replace(speed, parallel=1.0))
            return

        def ask(text: str) -> None:
            with suppress(_PromptRejected):
                self._ask_reply(make_prompt(text), SHORT_PROBE_TOKENS)

        texts = [cold(sample) for _ in range(count)]
        began = time.monotonic()
        with self._reporting_probe_failures(), ThreadPool(count) as pool:
            pool.map(ask, texts)
        seconds = max(time.monotonic() - began, 1e-9)
        alone = self.timings[-1].seconds
        parallel = min(max(count * alone / seconds, 1.0), float(count))
        self._change(speed=replace(speed, parallel=parallel, sent=count))

    def ask_timed(
        self, make_prompt: MakePrompt, text: str, answer_tokens: int = 0
    ) -> Reply:
        """Return the reply to a text of the probe, and add its time to :attr:`timings`.

        Args:
            make_prompt: Gives a text the form of the task's prompts.
            text: The text.
            answer_tokens: Most tokens of the answer, thinking excluded; 0: the reply does not matter.

        Raises:
            RequestError: No answer came.
            ProbeTimeOver: :attr:`give_up_at` has passed.
        """
        tokens = SHORT_PROBE_TOKENS
        if answer_tokens:
            tokens = answer_tokens + self.thinking_tokens
        prompt = make_prompt(text)
        began = time.monotonic()
        reply = self._ask_reply(prompt, tokens)
        seconds = time.monotonic() - began
        self.timings.append(Timing(len(text), reply.reply_tokens or 0, seconds))
        return reply

    def deliver(self, make_prompt: MakePrompt, text: str, answer_tokens: int) -> Reply:
        """:meth:`ask_timed`, with a note in the reply if the server rejects the text."""
        return _reply_or_rejection(
            lambda: self.ask_timed(make_prompt, text, answer_tokens)
        )

    def _need_time(self) -> float:
        """Return the timeout of a request in seconds: the config's, or the time left for the probe.

        Raises:
            ProbeTimeOver: No time is left.
        """
        timeout = float(self._config.timeout)
        if self.give_up_at is None:
            return timeout
        left = self.give_up_at - time.monotonic()
        if left <= 0:
            raise ProbeTimeOver
        return min(timeout, left)

    @property
    def decoding(self) -> dict[str, Any]:
        """Return the decoding settings that were sent, left out or left open, for the run's record.

        They are known after the probe.

        Returns:
            ``sent``: fields and values; ``left_out``: fields of greedy decoding that the server does not take;
            ``open_penalties``: penalties on repeated words that no field switches off, so that the server's may act;
            ``stop``: whether the server ends replies at the stop texts (sent), or this program cuts them (here); the
            form of requests (``api``, ``length``, ``thinking``), ``thinking_tokens``, and the name of the ``model``.
        """
        profile = self.profile
        sent = dict(profile.settings)
        if profile.temperature is not None:
            sent = {"temperature": profile.temperature, **sent}
        sent |= without_named_secrets(self._config.extra_body or {})
        wanted = ["temperature", *NEUTRAL_SETTINGS]
        left_out = [name for name in wanted if name not in sent]
        open_penalties = [
            names[0] for names in PENALTIES if sent.keys().isdisjoint(names)
        ]
        return {
            "api": profile.api,
            "sent": sent,
            "left_out": left_out,
            "open_penalties": open_penalties,
            "length": profile.length_field,
            "stop": "sent" if self._stop_is_sent else "here",
            "thinking": profile.thinking,
            "thinking_tokens": self.thinking_tokens,
            "model": profile.model,
        }

    @property
    def _stop_is_sent(self) -> bool:
        # A stop text would end the thinking, too.
        return self.profile.sends_stop and not self.profile.thinking

    # Prompts and replies

    def prompt(self, encoder: Encoder, encoded: Encoded, system: str) -> Prompt:
        """Return a prompt in the form to send, so that the model reads the text of ``encoded``."""
        return self.prompt_for(self.profile.api, encoder, encoded, system)

    def prompt_for(
        self, api: Api, encoder: Encoder, encoded: Encoded, system: str
    ) -> Prompt:
        """Return what is sent for a prompt: messages for the chat API, else a text.

        Args:
            api: The API.
            encoder: Tokenizer of the model.
            encoded: The prompt.
            system: System message, empty without one.
        """
        if api == "chat":
            messages = [{"role": "user", "content": encoded.prompt}]
            if system:
                messages.insert(0, {"role": "system", "content": system})
            return messages
        tokenizer = encoder.tokenizer
        bos = getattr(tokenizer, "bos_token", None)
        if not bos or tokenizer is None or not encoded.text.startswith(bos):
            return encoded.text
        # The server's tokenizer adds a beginning of sequence that the template wrote already.
        bare = encoded.text.removeprefix(bos)
        with self._lock:
            if list(tokenizer(bare)["input_ids"]) == encoded.ids:
                return bare
        return encoded.text

    def generate(
        self, prompt: Prompt, max_tokens: int, stop: Sequence[str] = ()
    ) -> Reply:
        """Return the reply to a prompt.

        Args:
            prompt: A text or messages.
            max_tokens: Most tokens of the answer, thinking excluded.
            stop: Texts that end the reply; only the first four are sent, so the caller cuts, too.

        Raises:
            RequestError: No answer came.
            UserError: The key is wrong or its quota spent, or there is no such model.
            MachineError: Nothing answers there any more.
        """

        def request() -> Reply:
            return self._ask_reply(prompt, max_tokens + self.thinking_tokens, stop)

        return _reply_or_rejection(request)

    def choose(self, prompt: Prompt, choices: Sequence[str]) -> Reply:
        """Return a reply whose text is one of the choices, by the best way that the server allows.

        Ways are the choices' log-likelihoods, the likeliest first tokens, or a letter in a generated reply. For errors
        see :meth:`generate`.
        """
        method = self.profile.choice_method
        if method == BY_LOG_LIKELIHOODS:
            return _reply_or_rejection(
                lambda: self._by_likelihoods(str(prompt), choices)
            )
        first: Reply | None = None
        if method == BY_FIRST_TOKEN:
            first = _reply_or_rejection(lambda: self._by_first_token(prompt, choices))
            if first.rejection or first.by:
                return first
        reply = self.generate(prompt, CHOICE_TOKENS)
        if first:
            reply = _with_counts(reply, (first, reply))
        return with_choice(reply, choices)

    # One request

    def _ask_reply(
        self, prompt: Prompt, max_tokens: int, stop: Sequence[str] = ()
    ) -> Reply:
        """Send one request, and return its reply.

        Args:
            prompt: The prompt.
            max_tokens: Limit of the reply, thinking included.
            stop: Texts that end it.
        """
        settings: dict[str, Any] = {}
        if stop and self._stop_is_sent:
            settings["stop"] = list(stop[:MAX_STOP_TEXTS])
        try:
            answer = self._ask(prompt, max_tokens, **settings)
        except _RequestRefused as error:
            if error.refusal.kind != "cut":
                raise
            # The server hides the thinking, and cut it before the answer began.
            return Reply(finish=FINISH_LENGTH, is_thinking=True, thinking_form="hidden")
        return self._read(answer, prompt, max_tokens)

    def _read(
        self,
        answer: Mapping[str, Any],
        prompt: Prompt,
        max_tokens: int | None = None,
    ) -> Reply:
        """Return the reply in a server's answer, without its thinking.

        The prompt may have opened the thinking, or the server hide it.

        Args:
            answer: The server's answer.
            prompt: The prompt.
            max_tokens: A reply of so many tokens counts as cut.
        """
        thinking = self.profile.thinking
        if isinstance(prompt, str):
            opened = opens_thinking(prompt)
        else:
            opened = thinking == "opened"
        with failing_on_other_forms():
            hidden = thinking == "hidden"
            return read_reply(answer, opened, hidden, max_tokens)

    def _ask(self, prompt: Prompt, max_tokens: int, **settings: Any) -> dict[str, Any]:
        """Send one request, count its tokens, and return the answer's JSON.

        Args:
            prompt: The prompt.
            max_tokens: Limit of the reply.
            settings: Further fields of the request.

        Raises:
            RequestError: The answer has another form.
            UserError: Another model answered.
        """
        profile = self.profile
        body: dict[str, Any] = dict(profile.settings)
        if profile.temperature is not None:
            body["temperature"] = profile.temperature
        body |= {profile.length_field: max_tokens, **settings}
        body |= self._config.extra_body or {}
        answer = self._send(prompt, body)
        if not isinstance(answer, dict) or not first_choice(answer):
            message = self._short_text(answer)
            raise RequestError(f"an answer without one choice 0: {message}")
        self._need_same_model(reported_model(answer))
        usage = read_usage(answer)
        with self._lock:
            self.tokens_read += usage.prompt_tokens or 0
            self.tokens_written += usage.reply_tokens or 0
            self.tokens_cached += usage.cached_tokens
        return answer

    def _need_same_model(self, model: str) -> None:
        """Refuse a reply of another model than the one that the server reported first: a score is of one model.

        Raises:
            UserError: The server names another model now.
        """
        first = self.profile.model
        if first and model and model != first:
            allowed = f"one model for all replies: the server named {first} first, and now {model}"
            hint = f"have it answer with {first}, then repeat the command: it goes on"
            raise UserError("model.served", self._config.server_name, allowed, hint)

    def _send(self, prompt: Prompt, body: Mapping[str, Any]) -> Any:
        """Send a request when its turn comes, until it is answered; return the answer's JSON.

        Requests that fail are repeated, those that are refused are not; a busy server is waited for.

        Args:
            prompt: The prompt, for the words of errors.
            body: Fields of the request.
        """
        import openai

        failures = 0
        while True:
            timeout = self._need_time()
            with self.pacer.turn() as began:
                try:
                    response = self._post(prompt, body, timeout)
                    answer = self._readable(response.json())
                    self.pacer.answered(response.headers, self._last_tokens(answer))
                    return answer
                except openai.APIStatusError as error:
                    failure = self._status_error(error, body)
                    headers = error.response.headers
                    if failure is None:
                        self._wait_for_server(began, headers, error)
                        continue
                except openai.APIConnectionError as error:
                    failure = self._connection_error(error)
                except (ValueError, RecursionError) as error:
                    message = self._short_text(error)
                    raise RequestError(f"the answer is no JSON: {message}") from error
            failures += 1
            # What the server did not refuse may succeed later.
            is_final = not isinstance(failure, ServerFailed | MachineError)
            if is_final or failures > self._config.retries:
                raise failure
            self._need_time()
            _sleep_before_retry(failures)

    def _post(self, prompt: Prompt, body: Mapping[str, Any], timeout: float) -> Any:
        """Send a request once, and return the HTTP response.

        Args:
            prompt: A text for the completions API, messages for the chat API.
            body: Other fields of the request.
            timeout: Seconds to wait.
        """
        name = self._config.server_name
        extra = dict(body)
        client = self._client
        if timeout != self._config.timeout:
            client = client.with_options(timeout=timeout)
        if isinstance(prompt, str):
            completions = client.completions.with_raw_response
            response: Any = completions.create(
                model=name, prompt=prompt, extra_body=extra
            )
        else:
            messages: Any = prompt
            chat = client.chat.completions.with_raw_response
            response = chat.create(model=name, messages=messages, extra_body=extra)
        return response.http_response

    @staticmethod
    def _last_tokens(answer: Any) -> int:
        """Return the tokens of a request by its answer's count: an estimate for the next one."""
        usage = answer.get("usage") if isinstance(answer, dict) else None
        total = usage.get("total_tokens") if isinstance(usage, dict) else None
        return total if isinstance(total, int) else 0

    def _wait_for_server(
        self, began: float, headers: Mapping[str, str], error: Any
    ) -> None:
        """Slow down as a busy server asks.

        Args:
            began: When the refused request was sent.
            headers: Headers of the response.
            error: The HTTP error.

        Raises:
            MachineError: The server was busy for too long.
        """
        message = self._short_text(error.response.text)
        try:
            self.pacer.refused(began, headers, f"{error.status_code}: {message}")
        except ServerBusy as busy:
            hint = "repeat the command later: it goes on; or lower model.concurrency"
            raise MachineError(
                "model.base_url",
                self._config.base_url,
                f"a server that takes requests; {busy}",
                hint,
            ) from error

    def _status_error(self, error: Any, body: Mapping[str, Any]) -> Exception | None:
        """Return the exception for an HTTP error of the server; None if it asks to wait.

        Args:
            error: The HTTP error.
            body: Fields that were sent.
        """
        config = self._config
        status = error.status_code
        text = error.response.text
        message = f"HTTP {status}: {self._short_text(text)}"
        refusal = read_refusal(status, text, body.keys(), config.server_name)
        if refusal.kind == "busy":
            return None
        if refusal.kind == "server":
            return ServerFailed(message)
        if refusal.kind == "filter":
            return _PromptRejected(CONTENT_FILTER)
        if refusal.kind == "overflow":
            return _PromptRejected(OVERFLOW, refusal.limit)
        if refusal.kind == "key":
            return key_error(config, message)
        if refusal.kind == "quota":
            allowed = f"a key of an account that may go on ({message})"
            hint = "add credit, or take another key; the same command goes on"
            return UserError("model.key_env", config.key_env, allowed, hint)
        if refusal.kind == "model":
            return self._no_model(message)
        response = error.response
        redirected_to = str(response.url) if response.history else ""
        return _RequestRefused(message, refusal, redirected_to)

    def _no_model(self, message: str) -> UserError:
        """Return the error that the server has no model of that name; ``message`` is what the server said."""
        config = self._config
        allowed = f"a model of {config.base_url}"
        models = [model.id for model in self.models()]
        if models:
            allowed += f", which lists {', '.join(models[:MAX_LISTED_MODELS])}"
        hint = "set model.served=ID"
        return UserError(
            "model.served", config.server_name, f"{allowed} ({message})", hint
        )

    def _no_api(self, apis: Sequence[Api], error: _RequestRefused) -> UserError:
        """Return the error that the server offers none of the APIs that were tried, or no such model.

        Args:
            apis: The APIs.
            error: What the server said to the first one.
        """
        config = self._config
        models = [model.id for model in self.models()]
        if models and config.server_name not in models:
            return self._no_model(str(error))
        others = [api for api in ("completions", "chat") if api not in apis]
        hints = []
        address = str(config.base_url).rstrip("/")
        # A request that is redirected may lose its content.
        if ROUTE.search(error.redirected_to):
            hints.append(f"set model.base_url={ROUTE.sub('', error.redirected_to)}")
        elif ROUTE.search(address):
            hints.append(f"set model.base_url={ROUTE.sub('', address)}")
        elif not address.endswith("/v1"):
            hints.append("most addresses end in /v1: add it")
        if others:
            hints.append(f"set model.api={others[0]}")
        hints.append("read the log of the server")
        allowed = f"an API that {config.base_url} offers ({error})"
        return UserError("model.api", " and ".join(apis), allowed, "; or ".join(hints))

    def _connection_error(self, error: Any) -> Exception:
        """Return the exception for a request without a response: nothing accepts connections, or the server failed."""
        if _is_dead_address(error):
            return self._dead_address(error)
        if type(error).__name__ == "APITimeoutError":
            seconds = self._config.timeout
            return ServerFailed(f"no answer within {seconds:g} s (model.timeout)")
        return ServerFailed(self._short_text(error.__cause__ or error))

    def _dead_address(self, error: BaseException) -> MachineError:
        """Return the error that nothing accepts connections to the server."""
        reason = self._short_text(error.__cause__)
        allowed = f"the address of a running server ({reason})"
        hint = "start the server or correct the address, then repeat the command: it resumes"
        return MachineError("model.base_url", self._config.base_url, allowed, hint)

    @contextmanager
    def _reporting_probe_failures(self) -> Iterator[None]:
        """Turn failures of the probe in the block into errors of one line, with what to do.

        Raises:
            MachineError: The server fails.
            UserError: The server refuses the probe, or is none.
        """
        config = self._config
        try:
            yield
        except ServerFailed as error:
            allowed = f"a server that answers ({error})"
            hint = "read the log of the server, then repeat the command"
            raise MachineError(
                "model.base_url", config.base_url, allowed, hint
            ) from error
        except _RequestRefused as error:
            fields = [*self.profile.settings, self.profile.length_field]
            fields += [*(config.extra_body or {}), "temperature"]
            allowed = f"fields that {config.base_url} takes ({error})"
            hint = "set what it asks for with model.extra_body, model.temperature or model.api"
            raise UserError("request", ", ".join(fields), allowed, hint) from error
        except _PromptRejected as rejection:
            allowed = f"a server that reads a short prompt ({rejection})"
            hint = "read the log of the server"
            raise UserError(
                "model.base_url", config.base_url, allowed, hint
            ) from rejection
        except RequestError as error:
            allowed = f"the address of an OpenAI-compatible API ({error})"
            hint = "correct it: most end in /v1; or read the log of the server"
            raise UserError("model.base_url", config.base_url, allowed, hint) from error

    def _short_text(self, message: object) -> str:
        """Return the message of a server or a library, short and with secrets masked."""
        text = " ".join((str(message) or type(message).__name__).split())
        return str(without_secrets(text, self._secrets))[:MAX_MESSAGE_CHARACTERS]

    def _readable(self, data: Any) -> Any:
        """Return a server's data as plain data with secrets masked, for files."""
        return without_secrets(without_surrogates(data), self._secrets)

    # Choices

    def _find_choice_method(self, prompt: Prompt) -> None:
        """Find the best way to choose that the server allows, and keep it in the profile.

        A way that the server refuses, or passes over in silence, is not used.
        """
        forms: tuple[LikelihoodForm, ...] = (
            "echo",
            "echo with a token",
            "prompt_logprobs",
        )
        for likelihood_form in forms if isinstance(prompt, str) else ():
            with suppress(RequestError, _PromptRejected), failing_on_other_forms():
                self._likelihoods(str(prompt), " A", likelihood_form)
                self._change(
                    choice_method=BY_LOG_LIKELIHOODS, likelihood_form=likelihood_form
                )
                return
        self._change(choice_method=BY_LETTER)
        if self.profile.thinking:
            return  # its first token begins the thinking
        with suppress(RequestError, _PromptRejected), failing_on_other_forms():
            if read_top_logprobs(self._ask_first_token(prompt)):
                self._change(choice_method=BY_FIRST_TOKEN)

    def _likelihoods(
        self, prompt: str, choice: str, form: LikelihoodForm
    ) -> tuple[Reply, list[tuple[str, Any]]]:
        """Return the reply to a prompt with a choice, and every token of both with its log-likelihood (nats).

        Args:
            prompt: The prompt.
            choice: The choice.
            form: How the server is asked for log-likelihoods.
        """
        text = prompt + choice
        if form == "prompt_logprobs":
            answer = self._ask(text, 1, prompt_logprobs=0)
            return self._read(answer, text), read_prompt_logprobs(answer)
        # Some servers want to write a token, too.
        written = 0 if form == "echo" else 1
        answer = self._ask(text, written, echo=True, logprobs=1)
        return self._read(answer, ""), read_echoed_logprobs(answer, written)

    def _by_likelihoods(self, prompt: str, choices: Sequence[str]) -> Reply:
        """Choose by the log-likelihoods of the choices; tokens that all of them begin with are left out."""
        form = self.profile.likelihood_form
        replies, tokens_of_choices = zip(
            *(self._likelihoods(prompt, choice, form) for choice in choices),
            strict=True,
        )
        num_common = 0
        while (
            all(len(row) > num_common for row in tokens_of_choices)
            and len({row[num_common][0] for row in tokens_of_choices}) == 1
        ):
            num_common += 1
        nats = tuple(
            sum(value or 0.0 for _, value in row[num_common:])
            for row in tokens_of_choices
        )
        return replace(
            _with_counts(replies[0], replies),
            text=choices[nats.index(max(nats))].strip(),
            nats=nats,
            by=BY_LOG_LIKELIHOODS,
            finish=_unusual_finish(replies),
            obstacle="",
            thinking="",
            is_thinking=False,
        )

    def _ask_first_token(self, prompt: Prompt) -> Mapping[str, Any]:
        """Request the likeliest first tokens of a reply, the most that the API gives."""
        if isinstance(prompt, str):
            return self._ask(prompt, 1, logprobs=5)
        return self._ask(prompt, 1, logprobs=True, top_logprobs=20)

    def _by_first_token(self, prompt: Prompt, choices: Sequence[str]) -> Reply:
        """Choose by the likeliest first tokens of a reply, where choices hold most of their probability.

        ``by`` is empty where they do not, and the reply is no choice.
        """
        answer = self._ask_first_token(prompt)
        reply = self._read(answer, prompt)
        top_logprobs = read_top_logprobs(answer)
        if probability_of_choices(top_logprobs, choices) <= MIN_CHOICE_PROBABILITY:
            return reply
        nats = first_token_nats(top_logprobs, choices, isinstance(prompt, str))
        likely = [value for value in nats if value is not None]
        text = choices[nats.index(max(likely))].strip()
        return replace(reply, text=text, nats=tuple(nats), by=BY_FIRST_TOKEN)


def _is_dead_address(error: BaseException) -> bool:
    """Whether a request failed because nothing accepts connections to the server."""
    return type(error.__cause__).__name__ in ("ConnectError", "ConnectTimeout")


def _unusual_finish(replies: Sequence[Reply]) -> str:
    """Why one of several requests ended that did not end well; empty where all did, or at their limit."""
    usual = ("", FINISH_LENGTH, *GOOD_REASONS)
    return next((reply.finish for reply in replies if reply.finish not in usual), "")


def _with_counts(reply: Reply, replies: Sequence[Reply]) -> Reply:
    """Return a reply with the summed tokens, and the number, of all the requests that it took."""
    return replace(
        reply,
        prompt_tokens=_total(part.prompt_tokens for part in replies),
        reply_tokens=_total(part.reply_tokens for part in replies),
        cached_tokens=sum(part.cached_tokens for part in replies),
        requests=len(replies),
    )


def _total(counts: Any) -> int | None:
    """The sum of numbers of tokens; None where one is not known."""
    counts = list(counts)
    return None if None in counts else sum(counts)


def _sleep_before_retry(failures: int) -> None:
    """Pause before a request is repeated, longer with each failure, and not with all others at once."""
    seconds = FIRST_RETRY_SECONDS * 2 ** (failures - 1)
    time.sleep(min(seconds, LONGEST_RETRY_SECONDS) * random.uniform(0.75, 1.25))


def _reply_or_rejection(request: Callable[[], Reply]) -> Reply:
    """Return the reply to a request; for a prompt that the server rejected, one that says so.

    Raises:
        RequestError: The answer has another form.
    """
    try:
        with failing_on_other_forms():
            return request()
    except _PromptRejected as rejection:
        return Reply(rejection=rejection.reason)


def probe_prompts() -> dict[Api, Prompt]:
    """The first question in the form of each API, without a chat template."""
    return {
        "completions": PROBE_QUESTION,
        "chat": [{"role": "user", "content": PROBE_QUESTION}],
    }


def is_on_this_machine(address: str) -> bool:
    """Return whether an address is on this machine: a server here does not charge."""
    host = urlsplit(address).hostname or ""
    return host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.\d+){3}", host))
