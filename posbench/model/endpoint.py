"""A model behind an OpenAI-compatible server: text in, replies out; nothing inside it can be seen."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from posbench.errors import UserError
from posbench.model.encode import Encoded, Encoder
from posbench.model.load import ModelConfig, reader

OVERFLOW = "context overflow"
REFUSED = "refused"
"""Notes of a reply that has no text: the prompt is over the server's window; its content filter took it."""
ECHO = "log-likelihoods"
FIRST = "first token"
LETTER = "letter"
NONE = "none in the reply"
"""How the choice of a model is read: from the log-likelihoods of all choices, from those of the likeliest
first tokens of a reply, or from what the reply says; it may say none."""
SPOKEN = 32
"""Tokens of a reply in which a choice is looked for."""
PROBE = "1 + 1 = ?\nA. 1\nB. 2\nAnswer:"
"""What a server is asked first."""
TOO_LONG = re.compile(
    r"context.{0,20}(length|window|size)|maximum (context|sequence|prompt)|too (long|many tokens)"
    r"|exceeds? .{0,40}(tokens|length|context)|exceed_context",
    re.I | re.S,
)
FILTERED = re.compile(r"content.?(filter|policy|management)", re.I)

Prompt = str | list[dict[str, str]]
"""What is sent: the text that the model reads, or messages."""


class Failed(RuntimeError):
    """A request that failed after all its retries, or whose answer is none; another time it may go well."""


class _Unread(Exception):
    """The server did not let the model read a prompt; the text is :data:`OVERFLOW` or :data:`REFUSED`."""


@dataclass(frozen=True)
class Reply:
    """What a server answered; token counts are its own, None where it does not tell them."""

    text: str = ""
    finish: str = ""  # why the reply ended, in the server's word: stop, length ...
    prompt_tokens: int | None = None
    reply_tokens: int | None = None
    note: str = ""  # OVERFLOW or REFUSED, where there is no text
    nats: tuple[float | None, ...] = ()  # of each choice; None: not among the likeliest
    by: str = ""  # ECHO, FIRST or LETTER, where it chose
    server: str = ""  # the model and the fingerprint that the server reports


@dataclass
class Untokenized(Encoder):
    """Prompts of a model whose tokenizer is not known: plain texts, whole."""

    name: str
    tokenizer: None = None
    context_window: int = 2**31
    chat_template: str = "none"

    def encode(self, prompt: str, **form: Any) -> Encoded:  # type: ignore[override]
        """A prompt without tokens: the system message, the prompt, and the beginning of the reply."""
        joined = f"{form['system']}\n\n{prompt}" if form.get("system") else prompt
        return Encoded([], [], joined + form.get("prefill", ""), prompt=prompt)


def text_encoder(config: ModelConfig) -> Encoder:
    """What makes the texts of a served model: its tokenizer with the chat template, where there is one; a
    server that is sent messages brings a template of its own.

    Raises:
        UserError: There is no such tokenizer.
    """
    if not config.path:
        return Untokenized(config.name)
    return reader(
        config if config.api == "completions" else replace(config, chat_template="none")
    )


class Endpoint:
    """A served model. Its calls may come from several threads.

    Attributes:
        read: Tokens of all prompts so far, as the server counts.
        written: Tokens of all replies so far.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._way = ""
        self._lock = threading.RLock()
        self.read = self.written = 0
        self._key = os.environ.get(config.key_env, "")
        if not self._key and config.key_env != "OPENAI_API_KEY":
            hint = f"export {config.key_env}=... (it is never recorded)"
            raise UserError(
                "model.key_env",
                config.key_env,
                "an environment variable that is set",
                hint,
            )
        try:
            import openai
        except ImportError as error:
            hint = "pip install 'posbench[endpoint]'"
            raise UserError(
                "model.base_url", config.base_url, "null without openai", hint
            ) from error
        settings: Any = {"max_retries": config.retries, "timeout": config.timeout}
        self._client = openai.OpenAI(
            base_url=config.base_url, api_key=self._key or "none", **settings
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
            with self._reached():
                return [str(model.id) for model in client.models.list().data or ()]
        return []

    def check(self, choosing: bool = False) -> None:
        """Ask something short, to see that the server answers for this model, and how it tells a choice.

        Raises:
            UserError: It cannot be reached, does not know the model, or takes no such request.
        """
        prompt: Prompt = (
            PROBE
            if self._config.api == "completions"
            else [{"role": "user", "content": PROBE}]
        )
        with self._lock:
            if self._way:
                return
            self.models()
            try:
                self.generate(prompt, 1)
                self._way = self._find_way(prompt) if choosing else LETTER
            except Failed as error:
                allowed = f"a server that answers ({error})"
                hint = "see its log, or try the other model.api"
                raise UserError(
                    "model.base_url", self._config.base_url, allowed, hint
                ) from error

    def prompt(self, encoder: Encoder, encoded: Encoded, system: str) -> Prompt:
        """What to send for a prompt, so that the model reads what ``encoded`` says."""
        if self._config.api == "chat":
            front = [{"role": "system", "content": system}] if system else []
            return [*front, {"role": "user", "content": encoded.prompt}]
        start = getattr(encoder.tokenizer, "bos_token", None)
        tokenizer = encoder.tokenizer
        if not start or tokenizer is None or not encoded.text.startswith(start):
            return encoded.text
        bare = encoded.text.removeprefix(start)
        with self._lock:  # the server's tokenizer adds a beginning of sequence that the template wrote already
            return (
                bare
                if list(tokenizer(bare)["input_ids"]) == encoded.ids
                else encoded.text
            )

    def generate(
        self, prompt: Prompt, max_tokens: int, stop: Sequence[str] = ()
    ) -> Reply:
        """The greedy reply to a prompt; OpenAI's API takes four stop texts, so the caller cuts, too.

        Raises:
            Failed: No answer came.
            UserError: Nothing answers there any more, the key is wrong, or there is no such model.
        """
        asked: dict[str, Any] = {"stop": [*stop[:4]]} if stop else {}
        return _read(
            lambda: self._reply(self._ask(prompt, max_tokens=max_tokens, **asked))
        )

    def choose(self, prompt: Prompt, choices: Sequence[str]) -> Reply:
        """The choice that follows a prompt, by the best way that the server allows; for errors see
        :meth:`generate`."""
        if self._way == ECHO:
            return _read(lambda: self._by_echo(str(prompt), choices))
        if self._way == FIRST:
            reply = _read(lambda: self._by_first_token(prompt, choices))
            if reply.note or any(nats is not None for nats in reply.nats):
                return reply
        reply = self.generate(prompt, SPOKEN)
        found = spoken(reply.text, choices)
        return (
            reply
            if reply.note
            else replace(reply, text=found or reply.text, by=LETTER if found else NONE)
        )

    # One request

    def _ask(self, prompt: Prompt, **body: Any) -> Mapping[str, Any]:
        """The answer to one request as plain data."""
        import openai

        asked: Any = {"model": self._config.server_name, "temperature": 0, **body}
        try:
            with self._reached():
                if isinstance(prompt, str):
                    raw = self._client.completions.with_raw_response.create(
                        prompt=prompt, **asked
                    )
                else:
                    messages: Any = prompt
                    raw = self._client.chat.completions.with_raw_response.create(
                        messages=messages, **asked
                    )
            answer = raw.http_response.json()
        except openai.APIConnectionError as error:
            raise Failed(self._said(error.__cause__ or error)) from error
        except openai.APIStatusError as error:
            raise self._refusal(error) from error
        except ValueError as error:
            raise Failed(f"the answer is no JSON: {self._said(error)}") from error
        listed = answer.get("choices") if isinstance(answer, dict) else None
        if (
            not isinstance(listed, list)
            or not listed
            or not isinstance(listed[0], dict)
        ):
            raise Failed(f"an answer without choices: {self._said(answer)}")
        usage = answer.get("usage") or {}
        with self._lock:
            self.read += usage.get("prompt_tokens") or 0
            self.written += usage.get("completion_tokens") or 0
        return answer

    def _reply(self, answer: Mapping[str, Any]) -> Reply:
        first = answer["choices"][0]
        usage = answer.get("usage") or {}
        message = first.get("message") or {}
        finish = str(first.get("finish_reason") or "")
        text = first.get("text") if "text" in first else message.get("content")
        if not isinstance(text, str | None):
            raise TypeError(f"text is {type(text).__name__}")
        refused = finish == "content_filter" or message.get("refusal")
        return Reply(
            text="" if refused else text or "",
            note=REFUSED if refused else "",
            finish=finish,
            prompt_tokens=usage.get("prompt_tokens"),
            reply_tokens=usage.get("completion_tokens"),
            server=" ".join(
                str(n)
                for n in (answer.get("model"), answer.get("system_fingerprint"))
                if n
            ),
        )

    def _refusal(self, error: Any) -> Exception:
        """What an HTTP status of the server means."""
        config = self._config
        status = error.status_code
        said = self._said(error.response.text)
        if status in (400, 413, 422) and (
            FILTERED.search(said) or TOO_LONG.search(said)
        ):
            return _Unread(REFUSED if FILTERED.search(said) else OVERFLOW)
        if status in (401, 403):
            hint = f"export {config.key_env}=KEY, or name another with model.key_env ({status}: {said})"
            return UserError(
                "model.key_env",
                config.key_env,
                "a variable with a key of that server",
                hint,
            )
        if status == 404 or (
            status == 400 and config.server_name in said
        ):  # vLLM; transformers
            listed = (
                f", which lists {', '.join(there[:8])}"
                if (there := self.models())
                else ""
            )
            allowed = f"a model of {config.base_url}{listed} ({status}: {said})"
            hint = "set model.served=ID, or where the server lacks /completions model.api=chat"
            if not str(config.base_url).rstrip("/").endswith("/v1"):
                hint = f"most addresses end in /v1: add it; or {hint}"
            return UserError("model.served", config.server_name, allowed, hint)
        return Failed(f"HTTP {status}: {said}")

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Raise UserError where nothing takes a connection; one that breaks is another thing."""
        import openai

        try:
            yield
        except openai.APIConnectionError as error:
            if type(error.__cause__).__name__ not in ("ConnectError", "ConnectTimeout"):
                raise
            allowed = (
                f"the address of a server that runs ({self._said(error.__cause__)})"
            )
            hint = (
                "start it, or correct the address; then repeat the command: it goes on"
            )
            raise UserError(
                "model.base_url", self._config.base_url, allowed, hint
            ) from error

    def _said(self, what: object) -> str:
        """What a server or a library said, short, and without the key that it may repeat."""
        text = " ".join((str(what) or type(what).__name__).split())
        return (text.replace(self._key, "***") if self._key else text)[:200]

    # Choices

    def _find_way(self, prompt: Prompt) -> str:
        """The best way that the server allows; one that it refuses, or passes over in silence, is not."""
        with suppress(Failed, _Unread):
            if isinstance(prompt, str) and self._echoed(prompt, " A"):
                return ECHO
        with suppress(Failed, _Unread):
            if _top(self._likeliest(prompt)):
                return FIRST
        return LETTER

    def _echoed(self, prompt: str, choice: str) -> tuple[Reply, list[tuple[str, Any]]]:
        """Every token of a prompt and a choice, with its log-likelihood."""
        answer = self._ask(prompt + choice, max_tokens=0, echo=True, logprobs=1)
        told = answer["choices"][0].get("logprobs") or {}
        tokens = told.get("tokens") or []
        nats = told.get("token_logprobs") or []
        if len(tokens) != len(nats) or len(tokens) < 2 or None in nats[1:]:
            raise Failed("no log-likelihoods of the prompt")
        return self._reply(answer), list(zip(tokens, nats, strict=True))

    def _by_echo(self, prompt: str, choices: Sequence[str]) -> Reply:
        """By the log-likelihoods of the choices, without the tokens with which all of them begin."""
        replies, rows = zip(
            *(self._echoed(prompt, choice) for choice in choices), strict=True
        )
        begin = 0
        while (
            all(len(row) > begin for row in rows)
            and len({row[begin][0] for row in rows}) == 1
        ):
            begin += 1
        nats = tuple(sum(value or 0.0 for _, value in row[begin:]) for row in rows)
        read = sum(reply.prompt_tokens or 0 for reply in replies)
        text = choices[nats.index(max(nats))].strip()
        return replace(
            replies[0], text=text, nats=nats, by=ECHO, finish="", prompt_tokens=read
        )

    def _likeliest(self, prompt: Prompt) -> Mapping[str, Any]:
        chat = {
            "logprobs": True,
            "top_logprobs": 20,
        }  # at most, as the 5 of completions
        return self._ask(
            prompt,
            max_tokens=1,
            **({"logprobs": 5} if isinstance(prompt, str) else chat),
        )

    def _by_first_token(self, prompt: Prompt, choices: Sequence[str]) -> Reply:
        """By the likeliest first tokens, where these tell the choices apart; ``nats`` are None elsewhere."""
        answer = self._likeliest(prompt)
        nats = tuple(first_nats(_top(answer), choices))
        known = [value for value in nats if value is not None]
        text = choices[nats.index(max(known))].strip() if known else ""
        return replace(self._reply(answer), text=text, nats=nats, by=FIRST)


def _read(ask: Callable[[], Reply]) -> Reply:
    """A reply, also to a prompt that the model did not read; `Failed` for an answer of another form."""
    try:
        return ask()
    except _Unread as unread:
        return Reply(note=str(unread))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Failed(
            f"an answer of another form ({type(error).__name__}: {error})"
        ) from error


def first_nats(top: Mapping[str, float], choices: Sequence[str]) -> list[float | None]:
    """Log-likelihoods of choices by the likeliest first tokens: of a token that begins one choice alone, as
    it stands or, where no token does so, apart from spaces around it."""
    found: list[float | None] = [None] * len(choices)
    for plain in (False, True):
        names = [choice.strip() if plain else choice for choice in choices]
        for token, nats in top.items():
            own = token.strip() if plain else token
            begun = [
                i
                for i, name in enumerate(names)
                if own.strip() and name.startswith(own)
            ]
            if len(begun) == 1:
                known = found[begun[0]]
                found[begun[0]] = nats if known is None else max(known, nats)
        if any(value is not None for value in found):
            break
    return found


def spoken(text: str, choices: Sequence[str]) -> str:
    """The choice with which a reply begins, or that follows "answer is" or "answer:"; else nothing."""
    names = sorted((choice.strip() for choice in choices), key=len, reverse=True)
    one = rf"[\s(\[*\"']*({'|'.join(map(re.escape, names))})(?!\w)"
    found = re.match(one, text) or re.search(rf"(?i:answer(?: is)?):?{one}", text)
    return found[1] if found else ""


def _top(answer: Mapping[str, Any]) -> dict[str, float]:
    """The likeliest first tokens of a reply with their log-likelihoods, in either form of the APIs."""
    told = answer["choices"][0].get("logprobs") or {}
    if first := next(iter(told.get("top_logprobs") or ()), None):
        return {str(token): float(nats) for token, nats in first.items()}
    content = next(iter(told.get("content") or ()), None) or {}
    return {
        str(each["token"]): float(each["logprob"])
        for each in content.get("top_logprobs") or ()
    }


def look(config: ModelConfig) -> str:
    """Whether a server answers now, and what it lists, in words."""
    try:
        models = Endpoint(config).models()
    except UserError as error:
        return f"server: not ready: {error}"
    return f"server: {config.base_url} answers{' and lists ' if models else ''}{', '.join(models[:8])}"
