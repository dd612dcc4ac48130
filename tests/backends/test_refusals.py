"""HTTP errors in the words of real servers, and what they mean."""

from __future__ import annotations

import json

import pytest

from posbench.backends.refusals import Refusal, read_refusal

FIELDS = ("temperature", "top_p", "min_p", "max_tokens", "stop", "seed")


def body(message: str, **error: object) -> str:
    return json.dumps({"error": {"message": message, **error}})


CASES = [
    # OpenAI
    (
        400,
        body(
            "Unsupported parameter: 'max_tokens' is not supported with this model. "
            "Use 'max_completion_tokens' instead.",
            param="max_tokens",
        ),
        Refusal("fields", ("max_tokens",)),
    ),
    (
        400,
        body(
            "Unsupported value: 'temperature' does not support 0 with this model.",
            param="temperature",
        ),
        Refusal("fields", ("temperature",)),
    ),
    (
        400,
        body(
            "max_tokens is too large: 20000. This model supports at most 16384 completion tokens, "
            "whereas you provided 20000."
        ),
        Refusal("length", ("max_tokens",), 16384),
    ),
    (
        400,
        body(
            "Could not finish the message because max_tokens or model output limit was reached."
        ),
        Refusal("cut"),
    ),
    (
        404,
        body(
            "This is a chat model and not supported in the v1/completions endpoint.",
            param="model",
        ),
        Refusal("api"),
    ),
    (
        404,
        body("The model `m` does not exist", code="model_not_found"),
        Refusal("model"),
    ),
    (
        429,
        body(
            "You exceeded your current quota, please check your plan and billing details.",
            code="insufficient_quota",
        ),
        Refusal("quota"),
    ),
    (
        429,
        body(
            "Rate limit reached. You can increase your limit at "
            "https://platform.openai.com/account/billing."
        ),
        Refusal("busy"),
    ),
    # Gemini: the limit of a minute
    (
        429,
        body(
            "You exceeded your current quota. Please retry in 20s.",
            status="RESOURCE_EXHAUSTED",
        ),
        Refusal("busy"),
    ),
    (400, body("Your credit balance is too low"), Refusal("quota")),
    (402, body("Insufficient Balance"), Refusal("quota")),
    (401, body("Incorrect API key provided"), Refusal("key")),
    (403, body("no access"), Refusal("key")),
    # vLLM
    (
        400,
        body(
            "max_tokens=5000 cannot be greater than max_model_len=4096. Please request fewer output tokens. "
            "(parameter=max_tokens, value=5000)",
            param="max_tokens",
        ),
        Refusal("overflow", limit=4096),
    ),
    (
        400,
        body(
            "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens"
        ),
        Refusal("overflow", limit=4096),
    ),
    (
        404,
        body("The model `m` does not exist.", type="NotFoundError"),
        Refusal("model"),
    ),
    (
        400,
        body("You must provide a chat template if the tokenizer does not define one."),
        Refusal("api"),
    ),
    (404, json.dumps({"detail": "Not Found"}), Refusal("api")),
    # DeepSeek, Groq
    (
        400,
        body("Invalid max_tokens value, the valid range of max_tokens is [1, 8192]"),
        Refusal("length", ("max_tokens",), 8192),
    ),
    (
        400,
        body(
            "`max_tokens` must be less than or equal to `8192`, the maximum value for `max_tokens` is less "
            "than the `context_window` for this model"
        ),
        Refusal("length", ("max_tokens",), 8192),
    ),
    # words of a sentence, and fields
    (400, body("please stop and seed no doubt"), Refusal("request")),
    (400, body("argument `stop` is not supported"), Refusal("fields", ("stop",))),
    (
        400,
        body("Unrecognized request argument supplied: seed"),
        Refusal("fields", ("seed",)),
    ),
    (
        400,
        body("Unsupported parameter: 'min_p' is not supported with this model."),
        Refusal("fields", ("min_p",)),
    ),
    # a rate limit: of one request that is over it for ever, and of those before it
    (
        413,
        body(
            "Request too large for model `m` in organization `org_1` service tier `on_demand` on tokens per "
            "minute (TPM): Limit 6000, Requested 9435, please reduce your message size and try again.",
            type="tokens",
            code="rate_limit_exceeded",
        ),
        Refusal("overflow", limit=6000),
    ),
    (
        429,
        body(
            "Request too large for m in organization org-1 on tokens per min (TPM): Limit 30000, Requested "
            "61,000. The input or output tokens must be reduced in order to run successfully.",
            code="rate_limit_exceeded",
        ),
        Refusal("overflow", limit=30000),
    ),
    (
        429,
        body(
            "Rate limit reached for m in organization org-1 on tokens per min (TPM): Limit 30000, Used 28000, "
            "Requested 4000. Please try again in 4s."
        ),
        Refusal("busy"),
    ),
    (400, "a content filter took it", Refusal("filter")),
    (500, "oops", Refusal("server")),
    (503, "overloaded", Refusal("busy")),
    (418, "teapot", Refusal("request")),
]


@pytest.mark.parametrize(("status", "text", "meaning"), CASES)
def test_errors_mean_what_their_servers_mean(
    status: int, text: str, meaning: Refusal
) -> None:
    assert read_refusal(status, text, FIELDS, "m") == meaning
