"""What is sent to a server, and how its answers are read."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posbench.backends.base import Untokenized, text_encoder
from posbench.backends.served import (
    PROBE_QUESTION,
    Endpoint,
    Reply,
    RequestError,
    first_token_nats,
    probability_of_choices,
)
from posbench.errors import UserError
from posbench.model.answers import choice_in_reply
from posbench.model.encode import Encoded
from posbench.model.load import ModelConfig, load
from tests.conftest import few
from tests.messages import refused
from tests.mutations import single_fields, whole_files
from tests.server import KEY, serving, value


def endpoint(url: str, **more: Any) -> Endpoint:
    made = Endpoint(ModelConfig(name="fake", base_url=url, retries=0, **more))
    made.check(choosing=True)
    return made


@pytest.mark.parametrize(
    ("way", "form"),
    [
        ("echo", "echo"),
        ("echo1", "echo with a token"),
        ("prompt_logprobs", "prompt_logprobs"),
    ],
)
def test_log_likelihoods_count_what_the_choices_do_not_share(
    way: str, form: str
) -> None:
    """Against the server's own formula, -(sum of the letters mod 7) - 0.5 a token."""

    def nats(*tokens: str) -> float:
        return sum(-float(sum(map(ord, token)) % 7) - 0.5 for token in tokens)

    with serving(ways=(way,)) as server:
        made = endpoint(server.url)
        reply = made.choose("One or two?", [" the one", " the two of"])
    assert made.profile.likelihood_form == form
    assert reply.nats == pytest.approx((nats(" one"), nats(" two", " of")))
    assert reply.text == (
        "the one" if nats(" one") > nats(" two", " of") else "the two of"
    )
    assert (reply.by, reply.prompt_tokens) == ("log-likelihoods", 2 * 11 + 8 + 11)


def test_first_tokens_choose_in_completions_and_in_chat() -> None:
    with serving(ways=("first",)) as server:
        reply = endpoint(server.url).choose("?", [" A", " B", " C"])
        assert (reply.text, reply.nats, reply.by) == (
            "C",
            (-1.5, None, -0.3),
            "first token",
        )
        chat = endpoint(server.url, api="chat").choose(
            [{"role": "user", "content": "?"}], [" A", " B", " C"]
        )
        assert (chat.text, chat.nats) == ("B", (-1.0, -0.5, None))
        # Both begin with the same token: the letter tells.
        told = endpoint(server.url).choose("?", [" A one", " A two"])
        assert (told.text, told.by) == (" B", "none in the reply")


@pytest.mark.parametrize(
    ("top", "choices", "wanted"),
    [
        (
            {" A": -1.0, "A": -0.1, " B": -2.0},
            [" A", " B"],
            [-1.0, -2.0],
        ),  # as it stands comes first
        ({"A": -0.1, "\nB": -2.0}, [" A", " B"], [-0.1, -2.0]),
        ({" ": -0.1, "the": -0.2}, [" A", " B"], [None, None]),
        (
            {" pe": -0.4, " p": -0.3},
            [" pear", " plum"],
            [-0.4, None],
        ),  # " p" begins both
    ],
)
def test_first_nats(
    top: dict[str, float], choices: list[str], wanted: list[float | None]
) -> None:
    assert first_token_nats(top, choices) == wanted


@pytest.mark.parametrize(
    ("top", "wanted"),
    [
        ({"B": -0.01, "A": -5.0, " A": -9.0}, [-5.0, -0.01]),
        ({"A": -0.6, "B": -0.8, " B": -8.1, " A": -8.3}, [-0.6, -0.8]),
    ],
)
def test_a_reply_in_a_chat_begins_without_a_space(
    top: dict[str, float], wanted: list[float]
) -> None:
    """A few of the twenty likeliest tokens are noise with a space before."""
    assert first_token_nats(top, [" A", " B"], continues=False) == wanted


@pytest.mark.parametrize(
    ("top", "probability"),
    [
        ({"B": -0.01, "A": -5.0}, 0.997),
        # Two spellings of one choice count together.
        ({" B": -1.2, "B": -1.2, "The": -1.0}, 0.602),
        ({"The": -0.02, "A": -7.1, "D": -9.9}, 0.001),
        ({"": -0.1, " ": -0.1}, 0.0),
        ({}, 0.0),
    ],
)
def test_probability_of_choices(top: dict[str, float], probability: float) -> None:
    found = probability_of_choices(top, [" A", " B", " C", " D"])
    assert found == pytest.approx(probability, abs=1e-3)


def test_a_model_that_begins_with_words_is_read_by_its_letter() -> None:
    """It says "The answer is C"; the likeliest letter as its first token is A, at a probability of 0.0008."""
    with serving(ways=("first",)) as server:
        server.answer = lambda prompt: "The answer is C."
        server.first_tokens = {"The": -0.02, "A": -7.1, "C": -10.0}
        made = endpoint(server.url, api="chat")
        messages = [{"role": "user", "content": "Which?"}]
        by_letter = made.choose(messages, [" A", " B", " C"])
        server.first_tokens = {"The": -0.7, "B": -0.69, "A": -9.0}
        by_token = made.choose(messages, [" A", " B", " C"])
    assert (by_letter.text, by_letter.by, by_letter.requests) == ("C", "letter", 2)
    assert by_letter.prompt_tokens == 2 * len("Which?")
    assert (by_token.text, by_token.by, by_token.requests) == ("B", "first token", 1)


def test_a_server_that_changes_its_model_is_refused() -> None:
    with serving() as server:
        made = endpoint(server.url)
        assert made.generate("a", 3).model == made.profile.model == "fake"
        server.model = ""
        made.generate("b", 3)
        server.model = "fake-mini"
        with refused(
            "model.served", "fake", allowed=("fake", "fake-mini"), hint="goes on"
        ):
            made.generate("c", 3)


def test_a_key_that_the_server_repeats_is_masked_where_it_enters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    body = {"user_token": "t0ken!", "bos_token": "<begin>", "top_k": 1}
    with serving() as server:
        server.answer = lambda prompt: f"it is {KEY}, t0ken! and <begin>"
        server.echo = lambda header: f" {header}"
        reply = endpoint(server.url, extra_body=body).generate("a", 3)
        assert server.bodies[-1]["user_token"] == "t0ken!", "it is sent all the same"
    assert KEY not in repr(reply) and "t0ken!" not in repr(reply)
    assert reply.text == "it is ***, *** and <begin> Bearer ***"
    assert reply.server == "fake Bearer *** fp_1 Bearer ***"


def test_a_key_that_is_no_secret_changes_no_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key in ("EMPTY", "ollama"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with serving() as server:
            server.answer = lambda prompt, key=key: f"the set is {key}"
            assert endpoint(server.url).generate("a", 9).text == f"the set is {key}"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (" B", "B"),
        ("(C) because", "C"),
        ("**A**", "A"),
        ("I think the answer is D.", "D"),
        ("Answer: (B)", "B"),
        ("Bees are insects", ""),
        ("A careful reading shows that the answer is B.", "B"),
        ("A careful reading tells nothing", ""),
        ("A is right, as the answer cannot be B", "A"),
        ("A. It is the only one", "A"),
        ("B, and not answer A", "B"),
        ("None of them", ""),
    ],
)
def test_spoken(text: str, wanted: str) -> None:
    assert choice_in_reply(text, [" A", " B", " C", " D"]) == wanted


def test_a_beginning_of_sequence_is_sent_once() -> None:
    """The tokenizer of a server adds the one that a chat template wrote."""

    def tokens(text: str) -> dict[str, list[int]]:
        return {"input_ids": [1, *map(ord, text)]}

    class Tokenizer(SimpleNamespace):
        def __call__(self, text: str) -> dict[str, list[int]]:
            return tokens(text)

    encoder: Any = SimpleNamespace(tokenizer=Tokenizer(bos_token="<s>"))
    with serving() as server:
        made = endpoint(server.url)
        templated = Encoded(tokens("[INST] hi")["input_ids"], "<s>[INST] hi")
        assert made.prompt(encoder, templated, "") == "[INST] hi"
        plain = Encoded(tokens("hi")["input_ids"], "hi")
        assert made.prompt(encoder, plain, "") == "hi"
        # A task that asks about the text "<s>" itself.
        odd = Encoded(tokens("<s>")["input_ids"], "<s>")
        assert made.prompt(encoder, odd, "") == "<s>"


def test_without_a_tokenizer_prompts_go_as_they_are(checkpoint: Path) -> None:
    bare = text_encoder(ModelConfig(name="fake", base_url="http://h/v1"))
    assert isinstance(bare, Untokenized)
    code = bare.encode("Who?", system="Be short.", prefill="Answer:", reserve=3)
    assert (code.text, code.prompt, code.ids) == (
        "Be short.\n\nWho?Answer:",
        "Who?",
        [],
    )
    known = text_encoder(
        ModelConfig(name="fake", base_url="http://h/v1", path=str(checkpoint))
    )
    assert (
        known.context_window == 256
        and known.encode("bal", system="bel").prompt == "bal"
    )


def test_messages_hold_the_prompt_that_is_left() -> None:
    with serving() as server:
        made = endpoint(server.url, api="chat")
        code = Encoded([1], "whatever", prompt="short")
        system, user = made.prompt(Untokenized("fake"), code, "Be kind.")
    assert (
        system == {"role": "system", "content": "Be kind."}
        and user["content"] == "short"
    )  # type: ignore[index]


def test_a_served_model_is_never_loaded_in_its_place() -> None:
    with refused("model.base_url", "http://h/v1", allowed="null", hint="leave"):
        load("tiny", base_url="http://h/v1")


def test_what_is_no_reply_is_a_failure() -> None:
    with serving(
        lambda prompt, n: (
            "cut" if prompt == "x" else "overflow" if prompt == "long" else ""
        )
    ) as server:
        made = endpoint(server.url)
        with pytest.raises(RequestError, match="no JSON"):
            made.generate("x", 1)
        assert made.generate("long", 1) == Reply(rejection="context overflow")
        assert (made.tokens_read, made.tokens_written) == (
            sum(len(b["prompt"]) for b in server.bodies[:-2]),
            len(server.bodies) - 2,
        )


@pytest.mark.parametrize("fault", ["second", "deep"])
def test_an_answer_without_a_whole_reply_is_a_failure(fault: str) -> None:
    with (
        serving(lambda prompt, n: fault if prompt == "x" else "") as server,
        pytest.raises(RequestError),
    ):
        endpoint(server.url).generate("x", 1)


def test_of_several_choices_the_one_with_index_0_is_read() -> None:
    prompt = 'Json data: {"a": "b", "c": "d"} The value of key "c" is "'
    with serving(lambda prompt, n: "reversed") as server:
        assert endpoint(server.url).generate(prompt, 1).text == value(prompt)


def test_half_a_surrogate_pair_becomes_the_replacement_character() -> None:
    with serving(lambda prompt, n: "surrogate") as server:
        text = endpoint(server.url).generate("x", 1).text
    assert text == "caf\N{REPLACEMENT CHARACTER}"
    assert text.encode()


def test_penalties_of_the_checkpoint_are_undone() -> None:
    prompt = 'Json data: {"a": "b", "c": "d"} The value of key "c" is "'
    for api in ("completions", "chat"):
        sent: Any = prompt
        if api == "chat":
            sent = [{"role": "user", "content": prompt}]
        with serving() as server:
            server.has_penalties = True
            made = endpoint(server.url, api=api)
            assert made.generate(sent, 1).text == value(prompt)
        assert made.decoding["left_out"] == []
        body = server.bodies[-1]
        assert {name: body[name] for name in made.decoding["sent"]} == made.decoding[
            "sent"
        ]


@pytest.mark.parametrize("style", ["openai", "model", "transformers", "pydantic"])
@pytest.mark.parametrize(
    ("refused_fields", "open_penalties"),
    [
        (("min_p", "repetition_penalty", "repeat_penalty"), []),
        (
            ("min_p", "repetition_penalty", "repeat_penalty", "generation_config"),
            ["repetition_penalty"],
        ),
        (("presence_penalty", "frequency_penalty", "top_p"), None),
    ],
)
def test_settings_that_a_server_refuses_by_name_are_left_out(
    style: str, refused_fields: tuple[str, ...], open_penalties: list[str] | None
) -> None:
    with serving() as server:
        server.refused_fields = refused_fields
        server.refusal_style = style
        made = endpoint(server.url)
        first_requests = len(server.bodies)
        made.generate("x", 1)
    assert set(made.decoding["left_out"]) == set(refused_fields)
    if open_penalties is None:
        open_penalties = ["presence_penalty", "frequency_penalty"]
    assert made.decoding["open_penalties"] == open_penalties
    body = server.bodies[-1]
    assert not set(refused_fields) & set(body) and body["temperature"] == 0
    assert set(made.decoding["sent"]) <= set(body)
    # No more is asked after the first look.
    assert len(server.bodies) == first_requests + 1


@pytest.mark.parametrize("nats", [float("nan"), float("inf"), -float("inf"), 5.0, "x"])
def test_what_is_no_log_probability_is_a_failure(nats: Any) -> None:
    with serving(ways=("echo",)) as server:
        made = endpoint(server.url)
        assert made.choose("1 + 1 =", [" A", " B"]).by == "log-likelihoods"
        server.last_nats = nats
        with pytest.raises(RequestError):
            made.choose("1 + 1 =", [" A", " B"])


@pytest.mark.parametrize("told", few(["headers", "retry-after", ""], 1))
def test_requests_follow_the_limits_of_the_server(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve requests at most within half a second, asked by eight threads: all are answered, though none repeated."""
    monkeypatch.setattr("posbench.backends.pacing.FIRST_PAUSE_SECONDS", 0.01)
    with serving() as server:
        made = endpoint(server.url)
        server.rate = (12, 0.5)
        server.rate_told = told
        with ThreadPool(8) as pool:
            replies = pool.map(lambda n: made.generate(f"{n}?", 2), range(60))
    assert {reply.finish for reply in replies} == {"stop"}
    # They take five spans; without pacing, the other threads are refused all the time.
    assert 0 < server.num_busy < 60


@pytest.mark.parametrize(
    "form", ["reasoning_content", "reasoning", "inline", "opened", "hidden"]
)
def test_thinking_is_told_from_the_answer_in_every_form(form: str) -> None:
    prompt: Any = [{"role": "user", "content": "Who?"}]
    with serving() as server:
        server.thinking = lambda prompt: 40
        server.thinking_form = form
        server.answer = lambda prompt: "Me."
        made = endpoint(server.url, api="chat", thinking_tokens=50)
        whole = made.generate(prompt, 10)
        server.thinking = lambda prompt: 70
        cut = made.generate(prompt, 10)
    names = {"reasoning_content": "field", "reasoning": "field"}
    assert made.profile.thinking == names.get(form, form)
    assert (whole.text, whole.is_thinking) == ("Me.", False)
    assert (cut.text, cut.is_thinking) == ("", True)
    assert bool(whole.thinking) == bool(cut.thinking) == (form != "hidden")
    assert whole.thinking_tokens == (40 if form == "hidden" else None)


def test_a_blank_continuation_of_a_plain_text_is_no_thinking() -> None:
    """A base model goes on with empty lines where nothing is asked."""
    with serving() as server:
        server.apis = ("completions",)
        server.thinking = lambda prompt: 16 if prompt == PROBE_QUESTION else 0
        server.thinking_form = "uncounted"
        server.answer = lambda prompt: "Me."
        made = endpoint(server.url, api="completions")
        reply = made.generate("Who?", 10)
    assert not made.profile.thinking
    assert reply.text == "Me."
    assert server.bodies[-1]["max_tokens"] == 10


REPLY_FIELDS: list[tuple[str | int, ...]] = [
    ("choices",),
    ("choices", 0),
    ("choices", 0, "text"),
    ("choices", 0, "finish_reason"),
    ("choices", 0, "logprobs"),
    ("usage",),
    ("usage", "prompt_tokens"),
    ("usage", "completion_tokens"),
    ("model",),
]


SAMPLE = {
    "choices": [{"index": 0, "text": "A", "finish_reason": "stop", "logprobs": None}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
    "model": "fake",
}


def answers(data: Any) -> dict[str, str]:
    """Texts of mutated answers by name."""
    return dict([*whole_files(data), *single_fields(data, REPLY_FIELDS)])


@pytest.mark.parametrize("way", ["echo", "first", ""])
def test_an_answer_of_another_form_is_a_failed_request(way: str) -> None:
    """A mutated answer fails the request, or the first one of all; else the reply is one that a file can hold."""
    failed = set()
    with serving(ways=(way,)) as server:
        made = endpoint(server.url)
        for name in answers(SAMPLE):
            server.written = lambda data, name=name: answers(data)[name]
            try:
                reply = made.choose("1 + 1 =", [" A", " B"])
                json.dumps(asdict(reply), ensure_ascii=False, allow_nan=False).encode()
            except RequestError:
                failed.add(name)
            except UserError as error:
                # It names another model.
                assert error.field == "model.served" and name.startswith("model")
            with suppress(UserError):
                endpoint(server.url)
    assert failed >= {"list", "null", "number", "truncated", "deep", "choices missing"}
