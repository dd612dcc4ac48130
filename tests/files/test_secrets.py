"""Secrets in settings, answers and command lines."""

from __future__ import annotations

import pytest

from posbench.files.secrets import (
    is_secret_name,
    secrets_in,
    without_named_secrets,
    without_secrets,
    without_typed_secrets,
    written_forms,
)

SECRET_NAMES = """
    api_key apiKey key user_token token access-token end_user_token client_secret password passwd Authorization
    x.headers.authorization credentials bearer auth session headers.X-Pass cookie
"""
SETTINGS = """
    max_tokens min_tokens stop_token_ids bos_token eos_token skip_special_tokens truncate_prompt_tokens thinking_tokens
    tokenizer keywords top_k seed reasoning_effort author passes
"""


def test_names_of_secrets() -> None:
    assert all(map(is_secret_name, SECRET_NAMES.split()))
    assert not any(map(is_secret_name, SETTINGS.split()))


def test_a_secret_is_known_in_every_form_in_which_it_may_come_back() -> None:
    secret = "sk-Zq9W/77+x="
    repeated = f"?key=sk-Zq9W%2F77%2Bx%3D, c2stWnE5Vy83Nyt4PQ==, {secret}"
    assert without_secrets(repeated, written_forms(secret)) == "?key=***, ***==, ***"


BODY = {
    "top_k": 1,
    "user_token": "first-secret",
    "nested": [{"api_key": "second", "name": "open"}],
    "authorization": {"scheme": "third-secret", "tries": 3},
    "password": "short",
}


def test_secrets_are_found_masked_and_kept_apart() -> None:
    assert secrets_in(BODY) == ["first-secret", "third-secret", "second"]
    assert without_named_secrets(BODY) == {
        "top_k": 1,
        "user_token": "***",
        "nested": [{"api_key": "***", "name": "open"}],
        "authorization": {"scheme": "***", "tries": 3},
        "password": "***",
    }
    data = {"a second": ["x second y", 3, None, {"b": "first-secret"}]}
    masked = {"a ***": ["x *** y", 3, None, {"b": "***"}]}
    assert without_secrets(data, secrets_in(BODY)) == masked


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("model.extra_body.user_token=SECRET", "model.extra_body.user_token=***"),
        ("+model.extra_body.a.api_key='S T'", "+model.extra_body.a.api_key=***"),
        ("model.extra_body.user_token=S1,S2", "model.extra_body.user_token=***"),
        (
            "model.extra_body={user_token: SECRET, top_k: 1, n: {api_key: SECRET}}",
            "model.extra_body={user_token: ***, top_k: 1, n: {api_key: ***}}",
        ),
        (
            'model.extra_body={authorization: {a: SECRET}, max_tokens: 5, key: "S, T"}',
            "model.extra_body={authorization: ***, max_tokens: 5, key: ***}",
        ),
        ("model.extra_body={top_k:1},{seed:7}", "model.extra_body={top_k:1},{seed:7}"),
        ("task.key=open", "task.key=open"),
    ],
)
def test_arguments_are_shown_without_secrets(typed: str, shown: str) -> None:
    assert without_typed_secrets(typed) == shown
