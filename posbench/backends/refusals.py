"""Classify a server's HTTP errors: the field it refuses, the feature it lacks, or its request to wait."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal[
    "api",
    "busy",
    "cut",
    "fields",
    "filter",
    "key",
    "length",
    "model",
    "overflow",
    "quota",
    "request",
    "server",
]
"""Kind of a refusal: ``api`` is not offered; the server is ``busy``; a reply was ``cut`` before it began;
``fields`` are refused; a ``filter`` took the prompt; the ``key`` is wrong; the ``length`` of a reply is over its limit;
there is no such ``model``; the prompt is an ``overflow``; the ``quota`` is spent; the ``request`` is refused for
another reason; the ``server`` failed."""

FILTERED = re.compile(r"content.?(filter|policy|management)", re.I)
TOO_LONG = re.compile(
    r"context.{0,20}(length|window|size)|maximum (context|sequence|prompt)|too (long|many tokens)"
    r"|exceeds? .{0,40}(tokens|length|context)|exceed_context",
    re.I | re.S,
)
WINDOW = re.compile(
    r"(?:context[ _](?:length|window|size)(?: is| of)?|n_ctx\W{1,4}|max_model_len\W{1,4})\D{0,20}(\d{3,9})",
    re.I,
)
"""The context window, in a message that names it."""
REPLY_LIMIT = re.compile(
    r"(?:at most|less than or equal to|<=|>|maximum (?:value )?(?:of|is)|\[\d+, ?)\D{0,4}(\d{2,9})",
    re.I,
)
"""The most tokens of a reply, in a message about ``max_tokens``."""
CUT_BEFORE_REPLY = re.compile(
    r"could not finish the message|model output limit was reached", re.I
)
"""OpenAI's message where a thinking model's reply ends before its first word."""
QUOTA = re.compile(
    r"insufficient_quota|billing_hard_limit|billing_not_active|credit balance"
    r"|insufficient (?:balance|credit|fund)|payment required|spend(?:ing)? limit",
    re.I,
)
SPENT_OR_BUSY = re.compile(r"exceeded your current quota", re.I)
RETRY = re.compile(r"retry|RESOURCE_EXHAUSTED", re.I)
"""A spent quota, in a message that some servers also send with a time after which to ask again."""
TOKENS_A_MINUTE = re.compile(
    r"tokens per min.{0,40}?limit:? ?([\d,]+).{0,20}?requested:? ?([\d,]+)", re.I | re.S
)
"""The rate limit and the tokens of one request, in messages of OpenAI and Groq."""
KEY = re.compile(r"invalid.{0,3}api.{0,3}key|incorrect api key|authentication", re.I)
NO_MODEL = re.compile(
    r"model_not_found|(?:unknown|no such|invalid) model"
    r"|model\b.{0,120}?\b(?:not found|does not exist|doesn't exist|not available|is not served)",
    re.I | re.S,
)
NO_API = re.compile(
    r"not (?:a chat model|supported in the v1/)|is a chat model|does not support (?:chat|the completions|completions)"
    r"|chat template|use (?:the )?(?:v1/)?(?:chat/completions|completions) (?:endpoint|instead)",
    re.I,
)
PLAIN_WORDS = ("stop", "seed")
"""Field names that are also English words: a message refers to them only if it quotes them or calls them a field."""


@dataclass(frozen=True)
class Refusal:
    """The meaning of a server's HTTP error.

    Attributes:
        kind: The kind of refusal.
        fields: Request fields that the error names; for ``length``, fields whose value is refused.
        limit: Tokens at most: of a reply for ``length``, of prompt and reply for ``overflow``; None: not reported.
    """

    kind: Kind
    fields: tuple[str, ...] = ()
    limit: int | None = None


def read_refusal(
    status: int, text: str, fields: Collection[str], model: str
) -> Refusal:
    """Read why a server refused a request, from its HTTP error.

    Args:
        status: Its status.
        text: Its body.
        fields: Names of the fields that were sent.
        model: The name of the model that was asked.
    """
    error = _error_of(text)
    code = f"{error.get('code')} {error.get('type')}"
    message = str(error.get("message") or text)
    may_be_quota = status in (400, 403, 429)
    # Such words also stand in errors that pass by themselves.
    is_spent = SPENT_OR_BUSY.search(text) and not RETRY.search(text)
    if status == 402 or (may_be_quota and (QUOTA.search(text) or is_spent)):
        return Refusal("quota")
    if status in (401, 403) or (status == 400 and KEY.search(code)):
        return Refusal("key")
    rate = TOKENS_A_MINUTE.search(text)
    if status in (413, 429) and rate:
        limit, requested = (int(number.replace(",", "")) for number in rate.groups())
        # No pause makes room for a request that is larger than the limit of a whole minute.
        if requested > limit:
            return Refusal("overflow", limit=limit)
        return Refusal("busy")
    if status == 429:
        return Refusal("busy")
    if status in (400, 404, 405, 413, 415, 422, 501):
        return _read_client_error(status, text, message, error, fields, model)
    if status in (503, 529):
        return Refusal("busy")
    return Refusal(
        "server" if status >= 500 or status in (408, 409, 425) else "request"
    )


def _read_client_error(
    status: int,
    text: str,
    message: str,
    error: Mapping[str, Any],
    fields: Collection[str],
    model: str,
) -> Refusal:
    """Classify an error status that concerns the request itself, by its text.

    Args:
        status: HTTP status.
        text: Whole text of the response.
        message: The error's message in it.
        error: The error's object in it.
        fields: Fields that were sent.
        model: Name of the model that was asked for.
    """
    if FILTERED.search(text):
        return Refusal("filter")
    if CUT_BEFORE_REPLY.search(text):
        return Refusal("cut")
    named = _named_fields(text, error, fields)
    about_length = [name for name in named if name.startswith("max_")]
    limit = REPLY_LIMIT.search(message)
    window = WINDOW.search(text)
    # The reply is too long, not the prompt.
    if about_length and limit and not window:
        return Refusal("length", tuple(about_length), int(limit[1]))
    is_over = TOO_LONG.search(text) or (about_length and window)
    if status in (400, 413, 422) and is_over:
        return Refusal("overflow", limit=int(window[1]) if window else None)
    # Of two names, a message may refuse one and recommend the other, which was not sent.
    if named:
        return Refusal("fields", tuple(named))
    if NO_API.search(text):
        return Refusal("api")
    if (
        error.get("param") == "model"
        or NO_MODEL.search(text)
        or _quotes(message, model)
    ):
        return Refusal("model")
    return Refusal("api" if status in (404, 405, 501) else "request")


def _error_of(text: str) -> Mapping[str, Any]:
    """Return the error object in the JSON body of a response; empty where there is none."""
    with suppress(ValueError, RecursionError):
        data = json.loads(text)
        if isinstance(data, dict):
            error = data.get("error", data)
            return error if isinstance(error, dict) else {"message": str(error)}
    return {}


def _named_fields(
    text: str, error: Mapping[str, Any], fields: Collection[str]
) -> list[str]:
    """Return the fields of a request that an error names.

    Args:
        text: Whole text of the response.
        error: The error's object in it.
        fields: Fields that were sent.
    """
    param = str(error.get("param") or "")
    if param.split(".")[0] in fields:
        return [param.split(".")[0]]
    named = []
    for name in fields:
        escaped = re.escape(name)
        pattern = rf"\b{escaped}\b"
        # Such a field name also occurs as a word of a sentence.
        if name in PLAIN_WORDS:
            quoted = rf"[\"'`]{escaped}[\"'`]"
            called = (
                rf"(?:parameter|argument|field|property)s?(?: supplied)?:? {escaped}\b"
            )
            pattern = f"{quoted}|{called}"
        if re.search(pattern, text):
            named.append(name)
    return named


def _quotes(text: str, model: str) -> bool:
    """Whether a message names the model in quotes."""
    return any(f"{mark}{model}{mark}" in text for mark in "'\"`")
