"""Servers that think, refuse fields, limit requests or charge: the right outcome at each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.conftest import Result, run_folders
from tests.messages import assert_names, assert_refused
from tests.server import Server, gold_position, right_value, serving

Call = Callable[..., Result]
SMALL = [
    "task.prompt=compact",
    "task.records=words",
    "task.pairs=12",
    "task.positions=[0,5,11]",
    "runtime.resamples=100",
    "stages=[evaluate]",
]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key of the machine, and the first pause where a server is busy."""
    monkeypatch.setattr("posbench.backends.pacing.FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def ask(posbench: Call, server: Server, *args: str) -> Result:
    return posbench(f"model.base_url={server.url}", *SMALL, *args)


def only_run(outputs: Path) -> Path:
    (folder,) = run_folders(outputs)
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "predictions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def decoding_of(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "provenance.json").read_text())
    return dict(facts["decoding"])


# Thinking


@pytest.mark.parametrize(
    "form", ["inline", pytest.param("hidden", marks=pytest.mark.slow)]
)
def test_thinking_is_kept_apart_and_never_scored(
    posbench: Call, outputs: Path, form: str
) -> None:
    """The thinking names the right value, and the answer says something else: nothing is right."""
    with serving() as server:
        server.thinking = lambda prompt: 150
        server.thinking_form = form
        server.answer = lambda prompt: "I cannot say."
        wrong = ask(posbench, server, "task.limit=2", "model.name=wrong")
        server.answer = right_value
        right = ask(posbench, server, "task.limit=2", "model.name=right")
    assert (wrong.status, right.status) == (0, 0), wrong.err + right.err
    assert_names(right.out, "the model thinks", "16,384", "not scored")
    for folder in run_folders(outputs):
        for row in rows_of(folder):
            is_right = folder.name.startswith("right")
            assert row["scores"]["accuracy"] == float(is_right)
            assert "hm" not in row["output"] and row["outcome"] == "answered"
            assert ("maybe" in row.get("thinking", "")) == (form != "hidden")
            assert row.get("thinking_tokens") == (150 if form == "hidden" else None)
        assert decoding_of(folder)["thinking_tokens"] == 16384
    # A stop text would end the thinking; none is sent, and the tokens are added to those of the answer.
    question = server.questions[-1]
    assert question["max_tokens"] == 16384 + 100 and "stop" not in question


@pytest.mark.parametrize(
    "form", ["opened", pytest.param("reasoning_content", marks=pytest.mark.slow)]
)
def test_a_reply_that_ends_in_its_thinking_is_no_wrong_answer(
    posbench: Call, outputs: Path, form: str
) -> None:
    """It thinks longer, the later the gold pair stands: where it is cut, no bias is claimed."""
    with serving() as server:
        server.thinking = lambda prompt: 20 + 20 * gold_position(prompt)
        server.thinking_form = form
        server.answer = right_value
        args = ("model.thinking_tokens=60", "task.max_new_tokens=40", "task.limit=20")
        result = ask(posbench, server, *args)
    assert result.status == 0, result.err
    rows = rows_of(only_run(outputs))
    for row in rows:
        is_cut = row["gold_position"] > 0
        assert bool(row.get("is_thinking")) == (row["outcome"] == "cut") == is_cut
    assert_names(result.out, "66.7 %", "in the thinking", "model.thinking_tokens=240")
    assert_names(result.out, "40 of 60", "in the thinking")
    assert "position bias in points" not in result.out
    metrics = pd.read_csv(only_run(outputs) / "metrics.csv")
    cut = metrics[metrics["metric"] == "cut_thinking"].set_index("gold_position")
    assert dict(cut["value"]) == pytest.approx({"0": 0, "5": 1, "11": 1, "all": 2 / 3})
    assert "cut_replies" not in set(metrics["metric"])
    bias = metrics[metrics["metric"] == "position_bias"]
    assert bias["value"].isna().all()


def test_a_limit_of_replies_limits_the_thinking(posbench: Call, outputs: Path) -> None:
    with serving() as server:
        server.thinking = lambda prompt: 30
        server.max_reply_tokens = 500
        result = ask(posbench, server, "task.limit=1")
        assert result.status == 0, result.err
        assert server.questions[-1]["max_tokens"] == 500
        typed = ask(posbench, server, "task.limit=1", "model.thinking_tokens=999")
        assert_refused(
            typed.err, "model.thinking_tokens", 999, allowed="400", hint="400"
        )
        short = ask(posbench, server, "task.max_new_tokens=600")
        assert_refused(short.err, "task.max_new_tokens", 600, allowed="500", hint="500")
    assert decoding_of(only_run(outputs))["thinking_tokens"] == 400


# Fields


@pytest.mark.parametrize(
    "apis", [("completions",), pytest.param(("chat",), marks=pytest.mark.slow)]
)
def test_the_api_that_is_offered_is_asked(
    posbench: Call, outputs: Path, apis: tuple[str, ...]
) -> None:
    with serving() as server:
        server.apis = apis
        result = ask(posbench, server, "task.limit=1")
        assert result.status == 0, result.err
        other = {"chat": "completions", "completions": "chat"}[apis[0]]
        typed = ask(posbench, server, "task.limit=1", f"model.api={other}")
    assert decoding_of(only_run(outputs))["api"] == apis[0]
    assert_refused(typed.err, "model.api", other, allowed="404", hint=apis[0])


def test_a_model_that_takes_one_temperature_is_sampled_and_that_is_said(
    posbench: Call, outputs: Path
) -> None:
    """The answers of OpenAI's o-series: another name of the length, no temperature but 1."""
    with serving() as server:
        server.refused_fields = ("max_tokens", "presence_penalty")
        server.temperature = 1
        server.thinking = lambda prompt: 30
        server.thinking_form = "hidden"
        result = ask(posbench, server, "task.limit=1")
        assert result.status == 0, result.err
    assert_names(
        result.out, "max_completion_tokens", "refuses temperature 0", "SAMPLED"
    )
    decoding = decoding_of(only_run(outputs))
    assert decoding["length"] == "max_completion_tokens"
    assert set(decoding["left_out"]) == {"temperature", "presence_penalty"}
    question = server.questions[-1]
    assert "temperature" not in question and question["seed"] == 0
    assert {name: question[name] for name in decoding["sent"]} == decoding["sent"]


def test_what_the_user_adds_is_sent_or_refused_by_its_name(
    posbench: Call, outputs: Path
) -> None:
    effort = "model.extra_body.reasoning_effort=low"
    with serving() as server:
        args = (effort, "model.temperature=0.5", "task.limit=1")
        result = ask(posbench, server, *args)
        assert result.status == 0, result.err
        question = server.questions[-1]
        assert (question["reasoning_effort"], question["temperature"]) == ("low", 0.5)
        assert_names(result.out, "SAMPLED", "0.5")
        server.refused_fields = ("reasoning_effort",)
        refused = ask(posbench, server, effort)
        field = "model.extra_body.reasoning_effort"
        assert_refused(refused.err, field, "low", allowed="400", hint="leave")
        server.refused_fields = ()
        server.temperature = 1
        hot = ask(posbench, server, "model.temperature=0.5")
        assert_refused(hot.err, "model.temperature", 0.5, allowed="Only", hint="leave")
        own = ask(posbench, server, "model.extra_body.max_tokens=3")
        assert own.status == 2 and "model.extra_body" in own.err
    assert len(run_folders(outputs)) == 1


def test_a_refusal_without_a_name_leaves_out_what_can_be(
    posbench: Call, outputs: Path
) -> None:
    """What is left is named in the error, and neither the address nor the model is blamed."""
    with serving() as server:
        server.refuses_all = lambda body: "top_p" in body
        result = ask(posbench, server, "task.limit=1")
        assert result.status == 0, result.err
        assert "top_p" in decoding_of(only_run(outputs))["left_out"]
        server.refuses_all = lambda body: True
        other = ask(posbench, server, "task.limit=2")
    assert_refused(
        other.err,
        "request",
        "max_tokens, temperature",
        allowed="Bad Request",
        hint="model.extra_body",
    )
    assert other.status == 2


# Limits


def test_a_spent_quota_stops_the_run_at_once_and_keeps_its_rows(
    posbench: Call, outputs: Path
) -> None:
    with serving() as server:
        server.quota = 20
        result = ask(posbench, server, "task.limit=30", "model.concurrency=2")
        assert result.status == 2 and result.err.count("\n") == 1
        assert_refused(
            result.err,
            "model.key_env",
            "OPENAI_API_KEY",
            allowed="quota",
            hint="goes on",
        )
        assert len(server.bodies) <= 20 + 2
        kept = len(rows_of(only_run(outputs)))
        assert kept == len(server.questions) - (len(server.bodies) - 20)
        server.quota = None
        assert ask(posbench, server, "task.limit=30").status == 0
    rows = rows_of(only_run(outputs))
    assert len(rows) == 90 and not any("error" in row for row in rows)


def test_a_server_that_only_fails_is_the_machine_s_fault(posbench: Call) -> None:
    with serving(lambda prompt, n: "500") as server:
        result = ask(posbench, server, "model.retries=1")
    assert result.status == 3 and result.err.count("\n") == 1
    assert_names(result.err, "model.base_url", "HTTP 500")


# The window


def test_prompts_fit_the_window_that_the_server_tells(
    posbench: Call, outputs: Path
) -> None:
    """By the tokens of their characters, half a one each: 140 pairs are too many for 2,000, and are not sent."""
    with serving() as server:
        server.count_tokens = lambda characters: round(0.5 * characters)
        server.window = 2000
        server.listed = [{"id": "fake", "max_model_len": 2000}]
        call = [f"model.base_url={server.url}", "task.limit=2", "stages=[evaluate]"]
        result = posbench(*call)
        assert result.status == 0, result.err
        typed = posbench(*call, "task.pairs=140")
    assert typed.status == 2 and "task.pairs = 140" in typed.err
    assert_names(result.out, "task.pairs: 140", "2000 tokens")
    rows = rows_of(only_run(outputs))
    assert not any("note" in row for row in rows)
    # No fewer than needed.
    assert max(row["prompt_tokens"] for row in rows) > 0.9 * (2000 - 100)


def test_thinking_takes_its_share_of_the_window(posbench: Call, outputs: Path) -> None:
    with serving() as server:
        server.count_tokens = lambda characters: round(0.5 * characters)
        server.window = 2000
        server.thinking = lambda prompt: 30
        server.listed = [{"id": "fake", "meta": {"n_ctx_train": 2000}}]
        call = [f"model.base_url={server.url}", "task.limit=1", "stages=[evaluate]"]
        result = posbench(*call)
    assert result.status == 0, result.err
    assert decoding_of(only_run(outputs))["thinking_tokens"] == 1000
    assert not any("note" in row for row in rows_of(only_run(outputs)))


# Claims


def share_of(prompt: str, salt: str) -> float:
    """A number from 0 to 1 that a prompt draws."""
    digest = hashlib.sha256(f"{salt}{prompt}".encode()).digest()
    return int.from_bytes(digest[:4]) / 2**32


@pytest.mark.slow
@pytest.mark.parametrize("is_biased", [False, True])
def test_a_bias_of_models_that_think_is_claimed_where_there_is_one(
    posbench: Call, outputs: Path, is_biased: bool
) -> None:
    """Twenty servers, the thinking in turn in each form, 1 % of the replies cut in it."""
    forms = ["reasoning_content", "inline", "opened", "hidden"]
    claimed = 0
    for seed in range(20):
        with serving() as server:

            def reply(prompt: str, seed: int = seed) -> str:
                is_end = gold_position(prompt) in (0, 11)
                accuracy = 0.9 if is_end or not is_biased else 0.5
                is_right = share_of(prompt, f"right{seed}") < accuracy
                return right_value(prompt) if is_right else "I cannot say."

            def tokens(prompt: str, seed: int = seed) -> int:
                return 999 if share_of(prompt, f"cut{seed}") < 0.01 else 30

            server.answer = reply
            server.thinking = tokens
            server.thinking_form = forms[seed % len(forms)]
            args = (f"task.seed={seed}", "task.limit=60", "model.thinking_tokens=300")
            positions = "task.positions=[0,3,6,9,11]"
            resamples = "runtime.resamples=500"
            result = ask(posbench, server, *args, positions, resamples)
        assert result.status == 0, result.err
        assert "the model thinks" in result.out
        folder = max(run_folders(outputs), key=lambda path: path.stat().st_mtime)
        metrics = pd.read_csv(folder / "metrics.csv").set_index("metric")
        claimed += bool(metrics.loc["position_bias", "ci_low"] > 0)
    if is_biased:
        assert claimed >= 18
    else:
        # At an error rate of 5 %, more than three of twenty come once in sixty times.
        assert claimed <= 3
