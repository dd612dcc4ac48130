"""What a server's answers say: the reply, its thinking, its tokens, log-likelihoods; other forms are failures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge

from posbench.errors import UserError
from posbench.model.lm import LENGTH
from posbench.model.thinking import Form, split_thinking
from posbench.schema import check_shape

OVERFLOW = "context overflow"
REFUSED = "refused"
"""Notes of a reply that has no text: the prompt is over the server's window; its content filter took it."""
THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message in which servers give the thinking apart from the answer."""
ROUNDING_NATS = 1e-3
"""How far above 0 rounding may put a log-probability."""

Tokens = Annotated[int, Ge(0)]
"""A number of tokens."""


class RequestError(RuntimeError):
    """A request that failed after all its retries, or whose answer is none; another time it may go well."""


@dataclass(frozen=True)
class Reply:
    """What a server answered.

    Attributes:
        text: The answer, without the thinking before it; or the choice.
        finish: Why the reply ended, in the server's word: stop, length ...
        thinking: The thinking before the answer, where the server shows it.
        thinking_tokens: Tokens of it as the server counts, None where it does not tell them.
        thinking_form: How the server gives it.
        is_thinking: Whether the reply ended in the thinking, before an answer.
        prompt_tokens: Tokens of the prompt as the server counts, None where it does not tell them.
        reply_tokens: Tokens of the reply, thinking among them, as those of the prompt.
        note: :data:`OVERFLOW` or :data:`REFUSED`, where there is no text.
        nats: Log-likelihood of each choice; None: not among the likeliest.
        by: How the choice was read; empty where there was none to make.
        server: The model and the fingerprint that the server reports.
    """

    text: str = ""
    finish: str = ""
    thinking: str = ""
    thinking_tokens: int | None = None
    thinking_form: Form = ""
    is_thinking: bool = False
    prompt_tokens: int | None = None
    reply_tokens: int | None = None
    note: str = ""
    nats: tuple[float | None, ...] = ()
    by: str = ""
    server: str = ""


@dataclass(frozen=True)
class _Usage:
    """Tokens of a request as the server counts, None where it does not tell them; other fields are not read."""

    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    total_tokens: Tokens | None = None
    reasoning_tokens: Any = None
    completion_tokens_details: Any = None

    @property
    def thinking_tokens(self) -> int | None:
        """Tokens of the thinking, which not every server tells, and each in its own way."""
        details = self.completion_tokens_details
        count = self.reasoning_tokens
        if isinstance(details, Mapping):
            count = details.get("reasoning_tokens", count)
        is_count = isinstance(count, int) and not isinstance(count, bool)
        return count if is_count and count >= 0 else None

    @property
    def reply_tokens(self) -> int | None:
        """All tokens that were written; some servers leave the thinking out of ``completion_tokens``."""
        if self.completion_tokens is None:
            return None
        total = self.total_tokens or 0
        return max(self.completion_tokens, total - (self.prompt_tokens or 0))


CUT = ("length", "max_tokens", "max_length", "model_length")
"""Why a reply ended, in the words of servers, where it had no more tokens."""
FAILED = ("error", "abort", "aborted", "cancelled")
"""The same where the server gave up."""


def read_reply(
    answer: Mapping[str, Any], opened: bool = False, hidden: bool = False
) -> Reply:
    """Read the reply in an answer of either API.

    Args:
        answer: The answer, with a choice 0.
        opened: Whether the chat template wrote the mark that begins thinking.
        hidden: Whether the model thinks, and the server neither shows nor counts that.

    Raises:
        RequestError: The reply is not finished, or its usage has another form.
        AttributeError, TypeError, ...: Other parts have another form, see :func:`failing_on_other_forms`.
    """
    choice = first_choice(answer)
    usage = read_usage(answer)
    message = choice.get("message") or {}
    if choice.get("finish_reason", "") is None:
        raise RequestError("the reply is not finished (finish_reason is null)")
    finish = str(choice.get("finish_reason", ""))
    if finish.lower() in FAILED or choice.get("error"):
        raise RequestError(f"the reply ended with {choice.get('error') or finish}")
    if finish.lower() in CUT:
        finish = LENGTH
    text, field_thinking = _texts(choice, message)
    split = split_thinking(text, opened and not field_thinking)
    text = split.answer
    thinking = "\n".join(filter(None, (field_thinking, split.thinking)))
    note = ""
    if finish == "content_filter" or message.get("refusal"):
        text = ""
        note = REFUSED
    form = split.form
    if field_thinking:
        form = "field"
    elif not form and (hidden or usage.thinking_tokens):
        form = "hidden"
    is_cut = finish == LENGTH and bool(form) and not text.strip()
    server = (answer.get("model"), answer.get("system_fingerprint"))
    return Reply(
        text=text,
        note=note,
        finish=finish,
        thinking=thinking,
        thinking_tokens=usage.thinking_tokens,
        thinking_form=form,
        is_thinking=not note and (split.is_open or is_cut),
        prompt_tokens=usage.prompt_tokens,
        reply_tokens=usage.reply_tokens,
        server=" ".join(str(name) for name in server if name),
    )


def _texts(choice: Mapping[str, Any], message: Mapping[str, Any]) -> tuple[str, str]:
    """Text and thinking of a choice, as the fields of its message hold them."""
    content = choice.get("text") if "text" in choice else message.get("content")
    thinking = ""
    if isinstance(content, list):
        content, thinking = _joined_parts(content)
    if not isinstance(content, str | None):
        raise TypeError(f"text is {type(content).__name__}")
    for field in THINKING_FIELDS:
        value = message.get(field) or choice.get(field)
        if isinstance(value, str) and not thinking:
            thinking = value
    return content or "", thinking


def _joined_parts(parts: Sequence[Any]) -> tuple[str, str]:
    """Text and thinking of a content that is a list of parts."""
    texts = []
    thinking = []
    for part in parts:
        if part["type"] == "text":
            texts.append(part["text"])
        elif part["type"] == "thinking":
            inner = part["thinking"]
            if isinstance(inner, list):
                inner = "".join(entry["text"] for entry in inner)
            thinking.append(inner)
    return "".join(texts), "".join(thinking)


def read_usage(answer: Mapping[str, Any]) -> _Usage:
    """Read what the server counts of a request; RequestError where that is no number of tokens."""
    try:
        usage: _Usage = check_shape(answer.get("usage") or {}, _Usage, "usage", "")
    except UserError as error:
        raise RequestError(f"{error.field} that is {error.value!r}") from error
    return usage


def first_choice(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choice with index 0 of an answer; empty where there is none.

    A server may give several in any order. One that stands alone needs no index.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list):
        return {}
    choices = [choice for choice in choices if isinstance(choice, dict)]
    if len(choices) == 1 and "index" not in choices[0]:
        return choices[0]
    return next((choice for choice in choices if choice.get("index") == 0), {})


def without_surrogates(value: Any) -> Any:
    """Return data with the replacement character for every half of a surrogate pair, which no file can hold.

    A reply that ends inside a character may have one.
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [without_surrogates(entry) for entry in value]
    if isinstance(value, dict):
        return {
            without_surrogates(key): without_surrogates(entry)
            for key, entry in value.items()
        }
    return value


@contextmanager
def failing_on_other_forms() -> Iterator[None]:
    """Raise RequestError where an answer has another form than the API's."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise RequestError(
            f"an answer of another form ({type(error).__name__}: {error})"
        ) from error


# Log-likelihoods


def first_token_nats(
    top_logprobs: Mapping[str, float], choices: Sequence[str], continues: bool = True
) -> list[float | None]:
    """Log-likelihoods of choices by the likeliest first tokens; None for a choice that no token begins.

    A token counts where it begins one choice alone, as it stands; where no token does so, without the spaces
    around both.

    Args:
        top_logprobs: The likeliest first tokens with their log-likelihoods.
        choices: The choices.
        continues: Whether the reply continues a text, so that a choice keeps its leading space; a reply in a chat
            begins without one.
    """
    result: list[float | None] = [None] * len(choices)
    for strip in (False, True) if continues else (True,):
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
    """The choice that follows "answer is" or "answer:" in a reply, or with which it begins; else nothing.

    An A or an I at the beginning, or behind "answer", is a word where another one than a verb of the choice follows.
    """
    names = sorted((choice.strip() for choice in choices), key=len, reverse=True)
    choice = rf"[\s(\[*\"']*({'|'.join(map(re.escape, names))})(?!\w)"
    no_word = r"(?!\s*(?:[AI]\s+(?!is\b|was\b|because\b|since\b|as\b)[a-z]|I['\u2019]))"
    match = re.search(rf"(?i:answer(?: is:?|:)){choice}", text)
    match = match or re.match(no_word + choice, text)
    match = match or re.search(rf"(?i:answer){no_word}{choice}", text)
    return match[1] if match else ""


def read_top_logprobs(answer: Mapping[str, Any]) -> dict[str, float]:
    """The likeliest first tokens of a reply with their log-likelihoods, in either form of the APIs."""
    logprobs = first_choice(answer).get("logprobs") or {}
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


def read_echoed_logprobs(
    answer: Mapping[str, Any], written: int
) -> list[tuple[str, float | None]]:
    """Every token of an echoed prompt with its log-likelihood; the first token has none.

    Args:
        answer: The answer to a request with ``echo`` and ``logprobs``.
        written: Tokens that the server wrote behind the prompt.
    """
    logprobs = first_choice(answer).get("logprobs") or {}
    tokens = list(logprobs.get("tokens") or [])
    nats = list(logprobs.get("token_logprobs") or [])
    if len(tokens) != len(nats):
        raise RequestError("no log-likelihoods of the prompt")
    kept = len(tokens) - written
    return _with_nats(tokens[:kept], nats[:kept])


def read_prompt_logprobs(answer: Mapping[str, Any]) -> list[tuple[str, float | None]]:
    """The same from ``prompt_logprobs`` of vLLM: for each token of the prompt one entry, the first of which is none."""
    entries = first_choice(answer).get("prompt_logprobs")
    entries = entries or answer.get("prompt_logprobs") or []
    tokens: list[str] = []
    nats: list[Any] = []
    for index, entry in enumerate(entries):
        if not entry:
            tokens.append("")
            nats.append(None)
            continue
        # With prompt_logprobs=0 there is the prompt's own token alone.
        if len(entry) != 1:
            raise RequestError(f"{len(entry)} log-likelihoods of token {index}")
        (token,) = entry
        tokens.append(str(token))
        nats.append(entry[token]["logprob"])
    return _with_nats(tokens, nats)


def _with_nats(
    tokens: Sequence[str], nats: Sequence[Any]
) -> list[tuple[str, float | None]]:
    if len(tokens) < 2 or None in nats[1:]:
        raise RequestError("no log-likelihoods of the prompt")
    # The first token has none.
    return list(zip(tokens, [None, *map(log_probability, nats[1:])], strict=True))


def log_probability(value: object) -> float:
    """A log-probability in nats, as a server gave it; RequestError where it is none.

    Rounding may put that of a certain token a little above 0.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestError(f"a log-probability that is {value!r}")
    if not math.isfinite(value) or value > ROUNDING_NATS:
        raise RequestError(f"a log-probability that is {value}")
    return float(value)
