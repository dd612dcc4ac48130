"""Parse a server's answers: the reply, its thinking, its tokens, log-likelihoods; other forms are failures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

from annotated_types import Ge

from posbench.errors import UserError
from posbench.model.lm import FINISH_LENGTH
from posbench.model.thinking import Form, SplitReply, split_thinking
from posbench.schema import check_shape
from posbench.stats.outcomes import OTHER_FIELD, UNKNOWN_LENGTH, UNKNOWN_MARKS

THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message in which servers give the thinking apart from the answer."""
ROUNDING_NATS = 1e-3
"""Largest log-probability above 0 that is accepted as rounding."""

BY_LOG_LIKELIHOODS = "log-likelihoods"
"""The choice is read from the log-likelihoods of all choices."""
BY_FIRST_TOKEN = "first token"
"""The choice is read from the log-likelihoods of the likeliest first tokens of a reply."""
BY_LETTER = "letter"
"""The choice is read from the text of the reply."""
NO_CHOICE = "none in the reply"
"""The text of the reply names no choice."""

Tokens = Annotated[int, Ge(0)]
"""A number of tokens."""


class RequestError(RuntimeError):
    """A request that failed after all its retries, or whose answer is none; another time it may go well."""


@dataclass(frozen=True)
class Reply:
    """A server's reply.

    Attributes:
        text: The answer, without the thinking before it; or the choice.
        finish: Why the reply ended, in the server's word in small letters: ``stop``, ``length`` ...; ``length`` also
            where it has as many tokens as it may, whatever the server says. Empty where the server says nothing.
        thinking: The thinking before the answer, where the server shows it.
        thinking_tokens: Tokens of the thinking by the server's count; None if it does not count them.
        thinking_form: How the server returns the thinking.
        is_thinking: Whether the reply ended in the thinking, before an answer.
        prompt_tokens: Tokens of the prompt by the server's count; None if it does not count them.
        reply_tokens: Tokens of the reply, thinking included, likewise.
        cached_tokens: Tokens of the prompt that the server had in its cache.
        rejection: Why the model did not read the prompt: :data:`posbench.stats.outcomes.OVERFLOW` or
            :data:`posbench.stats.outcomes.CONTENT_FILTER`; empty where it did.
        obstacle: Reason why the text may be no answer; often empty.
        ended_itself: Whether the model is known to have ended it, so that it may be empty.
        nats: Log-likelihood of each choice; None: not among the likeliest.
        by: How the choice was read; empty where there was none to make.
        requests: Requests that ``prompt_tokens`` and ``reply_tokens`` count together.
        model: The model that the server reports.
        server: Model and fingerprint that the server reports.
    """

    text: str = ""
    finish: str = ""
    thinking: str = ""
    thinking_tokens: int | None = None
    thinking_form: Form = ""
    is_thinking: bool = False
    prompt_tokens: int | None = None
    reply_tokens: int | None = None
    cached_tokens: int = 0
    rejection: str = ""
    obstacle: str = ""
    ended_itself: bool = False
    nats: tuple[float | None, ...] = ()
    by: str = ""
    requests: int = 1
    model: str = ""
    server: str = ""


@dataclass(frozen=True)
class _Usage:
    """Token counts of a request as the server reports them, None where it does not; other fields are not read."""

    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    total_tokens: Tokens | None = None
    reasoning_tokens: Any = None
    completion_tokens_details: Any = None
    prompt_tokens_details: Any = None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the server had in its cache; 0 where it does not say."""
        details = self.prompt_tokens_details
        count = details.get("cached_tokens") if isinstance(details, Mapping) else 0
        if not isinstance(count, int) or isinstance(count, bool):
            return 0
        # No more than the prompt has.
        return min(max(count, 0), self.prompt_tokens or 0)

    @property
    def thinking_tokens(self) -> int | None:
        """Tokens of the thinking, which servers report in different fields or not at all."""
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


CUT_REASONS = (
    "length",  # OpenAI, and most servers
    "max_tokens",  # Anthropic, Gemini, Cohere
    "max_length",
    "model_length",  # Mistral
    "max_new_tokens",
    "max_output_tokens",
    "max_completion_tokens",
    "token_limit",  # watsonx
    "limit",  # llama.cpp
    "model_context_window_exceeded",  # Anthropic
)
"""Finish reasons of servers, in lower case, for a reply at its token limit."""
GOOD_REASONS = (
    "stop",  # OpenAI, Gemini, and most servers
    "stop_sequence",  # Anthropic, Cohere, text-generation-inference
    "stop_token",
    "stop_word",
    "eos",  # Together
    "eos_token",  # text-generation-inference, watsonx
    "end",
    "end_turn",  # Anthropic, Bedrock
    "complete",  # Cohere
    "completed",
    "done",
    "finished",
    "normal",  # ERNIE
)
"""Finish reasons of a natural end: the model or a stop text. Unknown words are in none of these lists."""
REFUSAL_REASONS = (
    "content_filter",  # OpenAI
    "content_filtered",  # Bedrock
    "contentfilter",
    "safety",  # Gemini, as the next ones
    "image_safety",
    "recitation",
    "prohibited_content",
    "blocklist",
    "spii",
    "language",
    "blocked",
    "refusal",  # Anthropic
    "refused",
    "guardrail_intervened",  # Bedrock
    "error_toxic",  # Cohere
    "sensitive",  # Zhipu
    "moderation",
)
"""Finish reasons of a refusal by a filter or the model."""
TOOL_REASONS = (
    "tool_calls",  # OpenAI
    "tool_call",  # Cohere
    "tool_use",  # Anthropic
    "function_call",  # OpenAI
    "malformed_function_call",  # Gemini, as the next ones
    "unexpected_tool_call",
    "too_many_tool_calls",
)
"""Finish reasons of a tool call."""
FAILED_REASONS = (
    "error",
    "abort",
    "aborted",
    "cancelled",
    "canceled",
    "user_cancel",  # Cohere
    "timeout",
    "network_error",  # Zhipu
    "insufficient_system_resource",  # DeepSeek
)
"""Finish reasons of a failure of the server: asked again, it may answer."""


def reason_in_small_letters(reason: object) -> str:
    """A server's word for why a reply ended, in one spelling: ``FINISH_REASON_MAX-TOKENS`` is ``max_tokens``."""
    text = "" if reason is None else str(reason).strip().lower()
    return text.replace("-", "_").replace(" ", "_").removeprefix("finish_reason_")


def read_reply(
    answer: Mapping[str, Any],
    opened: bool = False,
    hidden: bool = False,
    max_tokens: int | None = None,
) -> Reply:
    """Read the reply in an answer of the completions or the chat API.

    Args:
        answer: The answer, with a choice 0.
        opened: Whether the chat template wrote the mark that begins thinking.
        hidden: Whether the model thinks, and the server neither shows nor counts that.
        max_tokens: Tokens that the reply may have, thinking among them; None: its length is not judged.

    Raises:
        RequestError: The reply is not finished, or its usage has another form.
        AttributeError, TypeError, ...: Other parts have another form, see :func:`failing_on_other_forms`.
    """
    choice = first_choice(answer)
    usage = read_usage(answer)
    message = choice.get("message") or {}
    finish = reason_in_small_letters(choice.get("finish_reason", ""))
    if finish in FAILED_REASONS or choice.get("error"):
        raise RequestError(f"the reply ended with {choice.get('error') or finish}")
    content, field_thinking = _texts(choice, message)
    obstacle = ""
    if finish in CUT_REASONS:
        finish = FINISH_LENGTH
    elif max_tokens is not None and finish in ("", *GOOD_REASONS):
        finish, obstacle = _judge_length(finish, content, usage, max_tokens)
    split = split_thinking(content, opened and not field_thinking)
    text = split.answer
    thinking = "\n".join(filter(None, (field_thinking, split.thinking)))
    if message.get("refusal"):
        finish = "refusal"
    form = split.form
    if field_thinking:
        form = "field"
    elif not form and (hidden or usage.thinking_tokens):
        form = "hidden"
    # The limit came while the model was thinking.
    is_cut = finish == FINISH_LENGTH and bool(form) and not text.strip()
    obstacle = unclear_thinking(split) or obstacle
    if not text.strip():
        obstacle = obstacle or _other_field(choice, message)
    server = (answer.get("model"), answer.get("system_fingerprint"))
    return Reply(
        text=text,
        finish=finish,
        thinking=thinking,
        thinking_tokens=usage.thinking_tokens,
        thinking_form=form,
        is_thinking=finish not in REFUSAL_REASONS and (split.is_open or is_cut),
        prompt_tokens=usage.prompt_tokens,
        reply_tokens=usage.reply_tokens,
        cached_tokens=usage.cached_tokens,
        obstacle=obstacle,
        # Of plain completions no parser takes anything away.
        ended_itself="text" in choice and not form and bool(usage.reply_tokens),
        model=reported_model(answer),
        server=" ".join(str(name) for name in server if name),
    )


def unclear_thinking(split: SplitReply) -> str:
    """Return why the text of a reply may not be its answer, with its marks; empty if it is."""
    return f"{UNKNOWN_MARKS}: {split.unclear_marks}" if split.unclear_marks else ""


def _judge_length(
    finish: str, content: str, usage: _Usage, max_tokens: int
) -> tuple[str, str]:
    """Find out whether a reply ended by itself, where the server does not say that it was cut.

    A server that cuts a reply may report ``stop``. Without token counts, the words of a reply are a lower bound of its
    tokens, and its bytes an upper bound.

    Args:
        finish: The reported reason, empty if there is none.
        content: Text of the reply.
        usage: Token counts as reported.
        max_tokens: Limit of the request.

    Returns:
        The reason (``length`` for a cut reply), and in words what remains unknown, empty if nothing.
    """
    # Not the total minus the prompt: it may include more than prompt and reply.
    tokens = usage.completion_tokens
    if tokens is None:
        at_limit = len(content.split()) >= max_tokens
    else:
        at_limit = tokens >= max_tokens
    if at_limit:
        return FINISH_LENGTH, ""
    if finish or tokens is not None or len(content.encode()) < max_tokens:
        return finish, ""
    return "", f"{UNKNOWN_LENGTH} why the reply ended nor how many tokens it has"


def _other_field(choice: Mapping[str, Any], message: Mapping[str, Any]) -> str:
    """Return the field with the reply if the text is empty; empty if there is none."""
    for field in (*THINKING_FIELDS, "tool_calls", "function_call"):
        if message.get(field) or choice.get(field):
            return f"{OTHER_FIELD} {field}"
    return ""


def _texts(choice: Mapping[str, Any], message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text and the thinking of a choice, whichever fields the server puts them in.

    Args:
        choice: An entry of ``choices``.
        message: Its ``message``; a completion has none, and holds ``text`` itself.

    Raises:
        TypeError: The content is neither text nor a list of parts.
    """
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


TEXT_PARTS = ("text", "output_text")
"""Types of answer parts in a content that is a list."""
THINKING_PARTS = ("thinking", "reasoning", "redacted_thinking", "reasoning_text")
"""Types of thinking parts in a content that is a list."""


def _joined_parts(parts: Sequence[Any]) -> tuple[str, str]:
    """Return text and thinking of a message whose content is a list of parts.

    Raises:
        RequestError: A part is of an unknown type.
    """
    texts = []
    thinking = []
    for part in parts:
        kind = part["type"]
        if kind in TEXT_PARTS:
            texts.append(part["text"])
        elif kind in THINKING_PARTS:
            thinking.append(_thinking_of_part(part))
        else:
            raise RequestError(
                f"an answer of another form (a part of the type {kind!r})"
            )
    return "".join(texts), "".join(thinking)


def _thinking_of_part(part: Mapping[str, Any]) -> str:
    """Return the text of a part that holds thinking; empty where the server does not show it."""
    for field in (part["type"], "text", "thinking", "reasoning", "summary"):
        inner = part.get(field)
        if isinstance(inner, list):
            return "".join(
                entry["text"] if isinstance(entry, Mapping) else str(entry)
                for entry in inner
            )
        if isinstance(inner, str):
            return inner
    return ""


def read_usage(answer: Mapping[str, Any]) -> _Usage:
    """Read a server's token counts of a request; RequestError if they are no numbers of tokens."""
    try:
        usage: _Usage = check_shape(answer.get("usage") or {}, _Usage, "usage", "")
    except UserError as error:
        raise RequestError(f"{error.field} that is {error.value!r}") from error
    # No prompt has 0 tokens: a server that says so does not count them.
    if usage.prompt_tokens == 0:
        written = usage.completion_tokens or None
        usage = replace(usage, prompt_tokens=None, completion_tokens=written)
    return usage


def reported_model(answer: Mapping[str, Any]) -> str:
    """The model that a server names in an answer; empty where it names none."""
    model = answer.get("model")
    return model if isinstance(model, str) else ""


def first_choice(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choice with index 0 of a server's answer; empty where there is none, or more than one.

    A server may give several in any order. A single one needs no index.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list):
        return {}
    choices = [choice for choice in choices if isinstance(choice, dict)]
    if len(choices) == 1 and "index" not in choices[0]:
        return choices[0]
    with_index_0 = [choice for choice in choices if choice.get("index") == 0]
    return with_index_0[0] if len(with_index_0) == 1 else {}


def without_surrogates(value: Any) -> Any:
    """Return JSON data in which each half of a surrogate pair, which no file can hold, is the replacement character.

    A reply that was cut inside a character may contain one.
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
    """Raise RequestError where the block reads a field that a server's answer does not have in the API's form."""
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

    A token counts if exactly one choice begins with it, spaces included; if no token does, spaces around both are
    ignored.

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


def probability_of_choices(
    top_logprobs: Mapping[str, float], choices: Sequence[str]
) -> float:
    """Return the probability that the first token of a reply begins exactly one of the choices.

    Args:
        top_logprobs: Log-likelihoods (nats) of the likeliest first tokens.
        choices: The choices' texts.
    """
    names = [choice.strip() for choice in choices]
    total = 0.0
    for token, nats in top_logprobs.items():
        beginning = token.strip()
        num_matches = sum(name.startswith(beginning) for name in names)
        if beginning and num_matches == 1:
            total += math.exp(nats)
    return total


def choice_in_reply(text: str, choices: Sequence[str]) -> str:
    """Return the choice that follows "answer is" or "answer:" in a reply, or with which it begins; empty if none.

    An A or I at the beginning, or behind "answer", may be a word ("A dog", "I think"): it counts as a choice only where
    no lower-case word follows, or one such as "is" and "because".
    """
    names = sorted((choice.strip() for choice in choices), key=len, reverse=True)
    choice = rf"[\s(\[*\"']*({'|'.join(map(re.escape, names))})(?!\w)"
    no_word = r"(?!\s*(?:[AI]\s+(?!is\b|was\b|because\b|since\b|as\b)[a-z]|I['\u2019]))"
    match = re.search(rf"(?i:answer(?: is:?|:)){choice}", text)
    match = match or re.match(no_word + choice, text)
    match = match or re.search(rf"(?i:answer){no_word}{choice}", text)
    return match[1] if match else ""


def read_top_logprobs(answer: Mapping[str, Any]) -> dict[str, float]:
    """Return the likeliest first tokens of a reply with their log-likelihoods (nats); empty where there are none.

    Completions and chats give them in different forms; both are read.

    Args:
        answer: JSON of the server's answer.
    """
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
    """Return each token of the prompt with its log-probability, from vLLM's ``prompt_logprobs``.

    Args:
        answer: JSON of the server's answer.

    Returns:
        Token and nats, in the prompt's order; None for the first token, before which there is nothing.

    Raises:
        RequestError: An entry does not hold one token.
    """
    entries = first_choice(answer).get("prompt_logprobs")
    # Chats hold it beside the choices.
    entries = entries or answer.get("prompt_logprobs") or []
    tokens: list[str] = []
    nats: list[Any] = []
    for index, entry in enumerate(entries):
        # The first token, on which there is no prediction.
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
    """Return a server's log-probability in nats; RequestError if it is none.

    A value slightly above 0 is accepted as rounding.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestError(f"a log-probability that is {value!r}")
    if not math.isfinite(value) or value > ROUNDING_NATS:
        raise RequestError(f"a log-probability that is {value}")
    return float(value)
