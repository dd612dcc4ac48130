"""A model behind an OpenAI-compatible server: text in, replies out; nothing inside it can be seen."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

from annotated_types import Ge

from posbench.errors import UserError
from posbench.model.encode import Encoded, Encoder
from posbench.model.load import ModelConfig, read_checkpoint
from posbench.schema import check_shape

OVERFLOW = "context overflow"
REFUSED = "refused"
"""Notes of a reply that has no text: the prompt is over the server's window; its content filter took it."""
BY_LOG_LIKELIHOODS = "log-likelihoods"
BY_FIRST_TOKEN = "first token"
BY_LETTER = "letter"
NO_CHOICE = "none in the reply"
"""How the choice of a model is read: from the log-likelihoods of all choices, from those of the likeliest
first tokens of a reply, or from what the reply says; it may say none."""
CHOICE_TOKENS = 32
"""Tokens of a reply in which a choice is looked for."""
MAX_STOP_TEXTS = 4
"""Stop texts that OpenAI's API takes."""
MAX_LISTED_MODELS = 8
"""Models of a server that a message lists."""
MAX_MESSAGE_CHARACTERS = 200
"""Characters of a server's message that an error repeats."""
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
"""What is sent so that a server does not apply its checkpoint's generation_config.json."""
PENALTIES = (
    ("presence_penalty",),
    ("frequency_penalty",),
    ("repetition_penalty", "repeat_penalty", "generation_config"),
)
"""Settings that change the greedy reply; of several names of one, a server needs to take one."""
PROBE = "1 + 1 = ?\nA. 1\nB. 2\nAnswer:"
"""What a server is asked first."""
TOO_LONG = re.compile(
    r"context.{0,20}(length|window|size)|maximum (context|sequence|prompt)|too (long|many tokens)"
    r"|exceeds? .{0,40}(tokens|length|context)|exceed_context",
    re.I | re.S,
)
ROUNDING_NATS = 1e-3
"""How far above 0 rounding may put a log-probability."""
FILTERED = re.compile(r"content.?(filter|policy|management)", re.I)

Tokens = Annotated[int, Ge(0)]
"""A number of tokens."""
Prompt = str | list[dict[str, str]]
"""What is sent: the text that the model reads, or messages."""


class RequestError(RuntimeError):
    """A request that failed after all its retries, or whose answer is none; another time it may go well."""


class _SettingsRefused(RequestError):
    """The server refused settings of :data:`NEUTRAL_SETTINGS`, which it named."""

    def __init__(self, message: str, names: Sequence[str]) -> None:
        super().__init__(message)
        self.names = names


class _PromptRejected(Exception):
    """The server did not let the model read a prompt; the text is :data:`OVERFLOW` or :data:`REFUSED`."""


@dataclass(frozen=True)
class Reply:
    """What a server answered.

    Attributes:
        text: The reply, or the choice.
        finish: Why the reply ended, in the server's word: stop, length ...
        prompt_tokens: Tokens of the prompt as the server counts, None where it does not tell them.
        reply_tokens: Tokens of the reply, as those of the prompt.
        note: :data:`OVERFLOW` or :data:`REFUSED`, where there is no text.
        nats: Log-likelihood of each choice; None: not among the likeliest.
        by: How the choice was read, :data:`BY_LOG_LIKELIHOODS` and so on; empty where there was none to make.
        server: The model and the fingerprint that the server reports.
    """

    text: str = ""
    finish: str = ""
    prompt_tokens: int | None = None
    reply_tokens: int | None = None
    note: str = ""
    nats: tuple[float | None, ...] = ()
    by: str = ""
    server: str = ""


@dataclass
class Untokenized(Encoder):
    """Prompts of a model whose tokenizer is not known: plain texts, whole."""

    name: str
    tokenizer: None = None
    context_window: int = 2**31
    chat_template: str = "none"

    def encode(self, prompt: str, **form: Any) -> Encoded:  # type: ignore[override]
        """A prompt without tokens: the system message, the prompt, and the beginning of the reply."""
        text = prompt
        if form.get("system"):
            text = f"{form['system']}\n\n{prompt}"
        return Encoded([], [], text + form.get("prefill", ""), prompt=prompt)


def text_encoder(config: ModelConfig) -> Encoder:
    """The encoder that makes the texts of a served model, with its tokenizer where that is known.

    The chat template is the tokenizer's; a server that is sent messages brings a template of its own.

    Raises:
        UserError: There is no such tokenizer.
    """
    if not config.path:
        return Untokenized(config.name)
    if config.api == "chat":
        config = replace(config, chat_template="none")
    return read_checkpoint(config)


class Endpoint:
    """A served model. Its calls may come from several threads.

    Attributes:
        tokens_read: Tokens of all prompts so far, as the server counts.
        tokens_written: Tokens of all replies so far.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        # How the server lets choices be read; empty until check() has asked it.
        self._choice_method = ""
        self._neutral_settings = dict(NEUTRAL_SETTINGS)
        self._lock = threading.RLock()
        self.tokens_read = 0
        self.tokens_written = 0
        self._key = os.environ.get(config.key_env, "")
        if not self._key and config.key_env != "OPENAI_API_KEY":
            allowed = "an environment variable that is set"
            hint = f"export {config.key_env}=... (it is never recorded)"
            raise UserError("model.key_env", config.key_env, allowed, hint)
        try:
            import openai
        except ImportError as error:
            hint = "pip install 'posbench[endpoint]'"
            raise UserError(
                "model.base_url",
                config.base_url,
                "null: the package openai is not installed",
                hint,
            ) from error
        self._client = openai.OpenAI(
            base_url=config.base_url,
            api_key=self._key or "none",
            max_retries=config.retries,
            timeout=config.timeout,
        )

    def models(self) -> list[str]:
        """The models that the server lists; empty where it has no such list.

        Raises:
            UserError: Nothing answers there.
        """
        import openai

        # Not every server has a list; one that cannot be read stops nothing.
        with suppress(openai.OpenAIError, AttributeError, TypeError, ValueError):
            client = self._client.with_options(
                max_retries=0, timeout=min(self._config.timeout, 5)
            )
            with self._refusing_dead_address():
                return [str(model.id) for model in client.models.list().data or ()]
        return []

    def check(self, choosing: bool = False) -> None:
        """Ask something short, to see that the server answers for this model.

        Args:
            choosing: Whether choices will be asked for: then find out how the server lets them be read.

        Raises:
            UserError: It cannot be reached, does not know the model, or takes no such request.
        """
        prompt: Prompt = PROBE
        if self._config.api == "chat":
            prompt = [{"role": "user", "content": PROBE}]
        with self._lock:
            if self._choice_method:
                return
            self.models()
            try:
                self._find_accepted_settings(prompt)
                self._choice_method = BY_LETTER
                if choosing:
                    self._choice_method = self._best_choice_method(prompt)
            except RequestError as error:
                allowed = f"a server that answers ({error})"
                hint = "read the log of the server, or try the other model.api"
                raise UserError(
                    "model.base_url", self._config.base_url, allowed, hint
                ) from error

    @property
    def decoding(self) -> dict[str, Any]:
        """How replies are decoded, known once :meth:`check` has asked the server.

        Returns:
            The settings ``sent``; those ``left_out``, as the server refused them; and the ``open_penalties``,
            which were sent under none of their names, so that the server's own may apply.
        """
        sent = {"temperature": 0, **self._neutral_settings}
        left_out = [name for name in NEUTRAL_SETTINGS if name not in sent]
        open_penalties = [
            names[0] for names in PENALTIES if sent.keys().isdisjoint(names)
        ]
        return {"sent": sent, "left_out": left_out, "open_penalties": open_penalties}

    def prompt(self, encoder: Encoder, encoded: Encoded, system: str) -> Prompt:
        """What to send for a prompt, so that the model reads what ``encoded`` says."""
        if self._config.api == "chat":
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
        """The greedy reply to a prompt.

        Args:
            prompt: What to send.
            max_tokens: Tokens of the reply at most.
            stop: Texts that end the reply; the server gets the first four, so the caller cuts, too.

        Raises:
            RequestError: No answer came.
            UserError: Nothing answers there any more, the key is wrong, or there is no such model.
        """

        def request() -> Reply:
            settings: dict[str, Any] = {"max_tokens": max_tokens}
            if stop:
                settings["stop"] = list(stop[:MAX_STOP_TEXTS])
            return self._reply(self._ask(prompt, **settings))

        return _reply_or_note(request)

    def choose(self, prompt: Prompt, choices: Sequence[str]) -> Reply:
        """The choice that follows a prompt, by the best way that the server allows; for errors see
        :meth:`generate`."""
        if self._choice_method == BY_LOG_LIKELIHOODS:
            return _reply_or_note(lambda: self._by_echo(str(prompt), choices))
        if self._choice_method == BY_FIRST_TOKEN:
            reply = _reply_or_note(lambda: self._by_first_token(prompt, choices))
            if reply.note or any(nats is not None for nats in reply.nats):
                return reply
        reply = self.generate(prompt, CHOICE_TOKENS)
        if reply.note:
            return reply
        choice = choice_in_reply(reply.text, choices)
        if not choice:
            return replace(reply, by=NO_CHOICE)
        return replace(reply, text=choice, by=BY_LETTER)

    # One request

    def _find_accepted_settings(self, prompt: Prompt) -> None:
        """Leave out the neutral settings that the server refuses by name."""
        while True:
            try:
                self.generate(prompt, 1)
                return
            except _SettingsRefused as refusal:
                for name in refusal.names:
                    del self._neutral_settings[name]

    def _ask(self, prompt: Prompt, **settings: Any) -> Mapping[str, Any]:
        """The answer to one request as plain data; ``settings`` are the API's."""
        import openai

        settings = {
            "model": self._config.server_name,
            "temperature": 0,
            "extra_body": dict(self._neutral_settings),
            **settings,
        }
        try:
            with self._refusing_dead_address():
                if isinstance(prompt, str):
                    response = self._client.completions.with_raw_response.create(
                        prompt=prompt, **settings
                    )
                else:
                    messages: Any = prompt
                    response = self._client.chat.completions.with_raw_response.create(
                        messages=messages, **settings
                    )
            answer = _without_surrogates(response.http_response.json())
        except openai.APIConnectionError as error:
            message = self._short_text(error.__cause__ or error)
            raise RequestError(message) from error
        except openai.APIStatusError as error:
            raise self._status_error(error) from error
        except (ValueError, RecursionError) as error:
            message = self._short_text(error)
            raise RequestError(f"the answer is no JSON: {message}") from error
        if not isinstance(answer, dict) or not _first_choice(answer):
            message = self._short_text(answer)
            raise RequestError(f"an answer without a choice 0: {message}")
        usage = _usage(answer)
        with self._lock:
            self.tokens_read += usage.prompt_tokens or 0
            self.tokens_written += usage.completion_tokens or 0
        return answer

    def _reply(self, answer: Mapping[str, Any]) -> Reply:
        """The reply in an answer of either API."""
        choice = _first_choice(answer)
        usage = _usage(answer)
        message = choice.get("message") or {}
        if choice.get("finish_reason", "") is None:
            raise RequestError("the reply is not finished (finish_reason is null)")
        finish = str(choice.get("finish_reason", ""))
        text = choice.get("text") if "text" in choice else message.get("content")
        if not isinstance(text, str | None):
            raise TypeError(f"text is {type(text).__name__}")
        note = ""
        if finish == "content_filter" or message.get("refusal"):
            text = ""
            note = REFUSED
        server = (answer.get("model"), answer.get("system_fingerprint"))
        return Reply(
            text=text or "",
            note=note,
            finish=finish,
            prompt_tokens=usage.prompt_tokens,
            reply_tokens=usage.completion_tokens,
            server=" ".join(str(name) for name in server if name),
        )

    def _status_error(self, error: Any) -> Exception:
        """The exception for an HTTP status of the server."""
        config = self._config
        status = error.status_code
        message = self._short_text(error.response.text)
        if status in (400, 413, 422):
            if FILTERED.search(message):
                return _PromptRejected(REFUSED)
            if TOO_LONG.search(message):
                return _PromptRejected(OVERFLOW)
            refused_names = self._named_settings(error.response.text)
            if refused_names:
                return _SettingsRefused(f"HTTP {status}: {message}", refused_names)
        if status in (401, 403):
            allowed = "a variable with a key of that server"
            hint = f"export {config.key_env}=KEY, or name another with model.key_env ({status}: {message})"
            return UserError("model.key_env", config.key_env, allowed, hint)
        # vLLM answers an unknown model with 404, transformers with 400.
        if status == 404 or (status == 400 and config.server_name in message):
            allowed = f"a model of {config.base_url}"
            models = self.models()
            if models:
                allowed += f", which lists {', '.join(models[:MAX_LISTED_MODELS])}"
            allowed += f" ({status}: {message})"
            hint = "set model.served=ID, or where the server lacks /completions model.api=chat"
            if not str(config.base_url).rstrip("/").endswith("/v1"):
                hint = f"most addresses end in /v1: add it; or {hint}"
            return UserError("model.served", config.server_name, allowed, hint)
        return RequestError(f"HTTP {status}: {message}")

    def _named_settings(self, message: str) -> list[str]:
        """The neutral settings among those sent that a server's message names."""
        return [
            name
            for name in self._neutral_settings
            if re.search(rf"\b{name}\b", message)
        ]

    @contextmanager
    def _refusing_dead_address(self) -> Iterator[None]:
        """Raise UserError where nothing takes a connection; one that breaks is another thing."""
        import openai

        try:
            yield
        except openai.APIConnectionError as error:
            cause = error.__cause__
            if type(cause).__name__ not in ("ConnectError", "ConnectTimeout"):
                raise
            allowed = f"the address of a running server ({self._short_text(cause)})"
            hint = "start the server or correct the address, then repeat the command: it resumes"
            raise UserError(
                "model.base_url", self._config.base_url, allowed, hint
            ) from error

    def _short_text(self, message: object) -> str:
        """What a server or a library said, short, and without the key that it may repeat."""
        text = " ".join((str(message) or type(message).__name__).split())
        if self._key:
            text = text.replace(self._key, "***")
        return text[:MAX_MESSAGE_CHARACTERS]

    # Choices

    def _best_choice_method(self, prompt: Prompt) -> str:
        """The best way that the server allows; one that it refuses, or passes over in silence, is not."""
        with suppress(RequestError, _PromptRejected), _failing_on_other_forms():
            if isinstance(prompt, str) and self._echo(prompt, " A"):
                return BY_LOG_LIKELIHOODS
        with suppress(RequestError, _PromptRejected), _failing_on_other_forms():
            if _top_logprobs(self._ask_first_token(prompt)):
                return BY_FIRST_TOKEN
        return BY_LETTER

    def _echo(self, prompt: str, choice: str) -> tuple[Reply, list[tuple[str, Any]]]:
        """The reply to a prompt with a choice, and every token of both with its log-likelihood."""
        answer = self._ask(prompt + choice, max_tokens=0, echo=True, logprobs=1)
        logprobs = _first_choice(answer).get("logprobs") or {}
        tokens = logprobs.get("tokens") or []
        nats = logprobs.get("token_logprobs") or []
        if len(tokens) != len(nats) or len(tokens) < 2 or None in nats[1:]:
            raise RequestError("no log-likelihoods of the prompt")
        # The first token has none.
        nats = [None, *map(log_probability, nats[1:])]
        return self._reply(answer), list(zip(tokens, nats, strict=True))

    def _by_echo(self, prompt: str, choices: Sequence[str]) -> Reply:
        """By the log-likelihoods of the choices, without the tokens with which all of them begin."""
        replies, rows = zip(
            *(self._echo(prompt, choice) for choice in choices), strict=True
        )
        common = 0
        while (
            all(len(row) > common for row in rows)
            and len({row[common][0] for row in rows}) == 1
        ):
            common += 1
        nats = tuple(sum(value or 0.0 for _, value in row[common:]) for row in rows)
        return replace(
            replies[0],
            text=choices[nats.index(max(nats))].strip(),
            nats=nats,
            by=BY_LOG_LIKELIHOODS,
            finish="",
            prompt_tokens=sum(reply.prompt_tokens or 0 for reply in replies),
        )

    def _ask_first_token(self, prompt: Prompt) -> Mapping[str, Any]:
        """The answer with the likeliest first tokens of a reply, as many as the API gives."""
        if isinstance(prompt, str):
            return self._ask(prompt, max_tokens=1, logprobs=5)
        return self._ask(prompt, max_tokens=1, logprobs=True, top_logprobs=20)

    def _by_first_token(self, prompt: Prompt, choices: Sequence[str]) -> Reply:
        """By the likeliest first tokens, where these tell the choices apart; ``nats`` are None elsewhere."""
        answer = self._ask_first_token(prompt)
        nats = first_token_nats(_top_logprobs(answer), choices)
        likely = [value for value in nats if value is not None]
        text = choices[nats.index(max(likely))].strip() if likely else ""
        return replace(
            self._reply(answer), text=text, nats=tuple(nats), by=BY_FIRST_TOKEN
        )


def _reply_or_note(request: Callable[[], Reply]) -> Reply:
    """The reply to a request, also to one that the server rejected.

    Raises:
        RequestError: The answer has another form.
    """
    try:
        with _failing_on_other_forms():
            return request()
    except _PromptRejected as rejection:
        return Reply(note=str(rejection))


@contextmanager
def _failing_on_other_forms() -> Iterator[None]:
    """Raise RequestError where an answer has another form than the API's."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise RequestError(
            f"an answer of another form ({type(error).__name__}: {error})"
        ) from error


def first_token_nats(
    top_logprobs: Mapping[str, float], choices: Sequence[str]
) -> list[float | None]:
    """Log-likelihoods of choices by the likeliest first tokens; None for a choice that no token begins.

    A token counts where it begins one choice alone, as it stands; where no token does so, without the spaces
    around both.
    """
    result: list[float | None] = [None] * len(choices)
    for strip in (False, True):
        names = [choice.strip() if strip else choice for choice in choices]
        for token, nats in top_logprobs.items():
            beginning = token.strip() if strip else token
            if not beginning.strip():
                continue
            matches = [i for i, name in enumerate(names) if name.startswith(beginning)]
            if len(matches) == 1:
                (match,) = matches
                best = result[match]
                result[match] = nats if best is None else max(best, nats)
        if any(value is not None for value in result):
            break
    return result


def choice_in_reply(text: str, choices: Sequence[str]) -> str:
    """The choice with which a reply begins, or that follows "answer is" or "answer:"; else nothing."""
    names = sorted((choice.strip() for choice in choices), key=len, reverse=True)
    choice = rf"[\s(\[*\"']*({'|'.join(map(re.escape, names))})(?!\w)"
    match = re.match(choice, text) or re.search(rf"(?i:answer(?: is)?):?{choice}", text)
    return match[1] if match else ""


def _top_logprobs(answer: Mapping[str, Any]) -> dict[str, float]:
    """The likeliest first tokens of a reply with their log-likelihoods, in either form of the APIs."""
    logprobs = _first_choice(answer).get("logprobs") or {}
    completions = next(iter(logprobs.get("top_logprobs") or ()), None)
    if completions:
        return {
            str(token): log_probability(nats) for token, nats in completions.items()
        }
    chat = next(iter(logprobs.get("content") or ()), None) or {}
    return {
        str(entry["token"]): log_probability(entry["logprob"])
        for entry in chat.get("top_logprobs") or ()
    }


def log_probability(value: object) -> float:
    """A log-probability in nats, as a server gave it; RequestError where it is none.

    Rounding may put that of a certain token a little above 0.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestError(f"a log-probability that is {value!r}")
    if not math.isfinite(value) or value > ROUNDING_NATS:
        raise RequestError(f"a log-probability that is {value}")
    return float(value)


@dataclass(frozen=True)
class _Usage:
    """Tokens of a request as the server counts, None where it does not tell them; other fields are not read."""

    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None


def _usage(answer: Mapping[str, Any]) -> _Usage:
    """What the server counts of a request; RequestError where that is no number of tokens."""
    try:
        usage: _Usage = check_shape(answer.get("usage") or {}, _Usage, "usage", "")
    except UserError as error:
        raise RequestError(f"{error.field} that is {error.value!r}") from error
    return usage


def _first_choice(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The choice with index 0 of an answer; empty where there is none.

    A server may give several in any order. One that stands alone needs no index.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list):
        return {}
    choices = [choice for choice in choices if isinstance(choice, dict)]
    if len(choices) == 1 and "index" not in choices[0]:
        return choices[0]
    return next((choice for choice in choices if choice.get("index") == 0), {})


def _without_surrogates(value: Any) -> Any:
    """Data with the replacement character for every half of a surrogate pair, which no file can hold.

    A reply that ends inside a character may have one.
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_surrogates(entry) for entry in value]
    if isinstance(value, dict):
        return {
            _without_surrogates(key): _without_surrogates(entry)
            for key, entry in value.items()
        }
    return value


def describe_server(config: ModelConfig) -> str:
    """Whether a server answers now, and what it lists, in words."""
    try:
        models = Endpoint(config).models()
    except UserError as error:
        return f"server: not ready: {error}"
    answers = f"server: {config.base_url} answers"
    if not models:
        return answers
    return f"{answers} and lists {', '.join(models[:MAX_LISTED_MODELS])}"
