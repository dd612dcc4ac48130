"""Servers that shorten prompts in silence: the run asks what they read, or ends with one line; no bias is claimed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest

from posbench.backends.base import text_encoder
from posbench.pipeline.compose import compose_one
from posbench.pipeline.prepare import prepare
from posbench.pipeline.served import estimate_served, probe_server
from posbench.run.budget import Budget
from tests.cli.test_probing import only_run, rows_of
from tests.conftest import Result, config_of, run_folders
from tests.messages import assert_names, assert_refused, refused
from tests.server import PROBE, Server, prompt_of, right_value, serving

Call = Callable[..., Result]
PAIRS = 60
TASK = [
    "task.prompt=compact",
    "runtime.resamples=100",
    "stages=[evaluate]",
    "task.limit=20",
]
WINDOW = 2000
"""Characters, each a token, of which 60 pairs have 4,900."""


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        running.answer = reader
        yield running


def front(prompt: str) -> str:
    """What is left behind a server that keeps the last half of its window, as Ollama does."""
    return prompt if len(prompt) <= WINDOW else prompt[-WINDOW // 2 :]


def middle(prompt: str) -> str:
    """What is left where a router cuts the middle out."""
    if len(prompt) <= WINDOW:
        return prompt
    return prompt[: WINDOW // 2] + prompt[-WINDOW // 2 :]


def reader(prompt: str) -> str:
    """A perfect reader of keys and values of any characters."""
    asked = re.search(r'key "([\w-]+)" is "$', prompt)
    if not asked:
        return right_value(prompt)
    found = re.search(rf'"{asked[1]}": "([\w-]+)"', prompt)
    return found[1] if found else "unknown"


def ask(posbench: Call, server: Server, *args: str) -> Result:
    return posbench(f"model.base_url={server.url}", *TASK, *args)


def facts_of(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "provenance.json").read_text())
    return dict(facts["delivery"])


@pytest.mark.parametrize(
    ("reads", "part", "counts"),
    [
        (front, "the front", True),
        (middle, "the middle", True),
        pytest.param(front, "the front", False, marks=pytest.mark.slow),
        pytest.param(middle, "the middle", False, marks=pytest.mark.slow),
    ],
)
def test_prompts_are_fitted_to_what_a_server_reads(
    posbench: Call,
    outputs: Path,
    server: Server,
    reads: Callable[[str], str],
    part: str,
    counts: bool,
) -> None:
    """A perfect reader stays one: with the 60 pairs it would be wrong wherever the gold pair is cut away."""
    server.reads = reads
    if not counts:
        server.count_tokens = None
    few = ask(posbench, server, "task.pairs=60")
    assert_refused(
        few.err, "task.pairs", PAIRS, allowed=f"drops {part}", hint="num_ctx"
    )
    assert few.status == 2 and not server.questions and not run_folders(outputs)
    result = ask(posbench, server, "model.name=fitted")
    assert result.status == 0, result.err
    assert_names(result.out, "task.pairs: 140 ->", "it reads", f"drops {part}")
    folder = only_run(outputs)
    rows = rows_of(folder)
    assert all(row["scores"]["accuracy"] == 1 for row in rows)
    assert facts_of(folder)["drops"] == part
    unit = 0.85 if not counts else 0.95
    limit = facts_of(folder)["limit"]
    assert unit * WINDOW <= limit <= WINDOW
    longest = max(len(prompt_of(body)) for body in server.questions)
    assert 0.6 * WINDOW < longest + 100 <= WINDOW


def test_a_typed_window_and_prompts_that_cannot_shrink_are_refused(
    posbench: Call, outputs: Path, server: Server
) -> None:
    server.reads = middle
    typed = ask(posbench, server, "task.pairs=60", "model.context_window=9000")
    assert_refused(
        typed.err,
        "model.context_window",
        9000,
        allowed="drops the middle",
        hint="num_ctx",
    )
    documents = outputs.parent / "documents.jsonl"
    lines = [
        {
            "question": f"Who is {i}?",
            "items": [f"{word} {i} is a person. " * 50 for word in "abcd"],
            "gold": 0,
            "answers": ["a person"],
        }
        for i in range(6)
    ]
    documents.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = posbench(
        f"model.base_url={server.url}", "task=own_data", f"task.path={documents}"
    )
    assert_names(own.err, "drops the middle", "num_ctx")
    assert own.status == 2 and not run_folders(outputs)


def test_an_honest_server_is_checked_and_that_is_recorded(
    posbench: Call, outputs: Path, server: Server
) -> None:
    """Also where the run goes on later, which does not ask again."""
    result = ask(posbench, server, "task.pairs=60", "task.positions=[0,59]")
    assert result.status == 0, result.err
    facts = facts_of(only_run(outputs))
    longest = max(len(prompt_of(body)) for body in server.questions)
    assert facts["characters"] == longest and facts["text"] == ""
    assert facts["tokens_per_character"] == pytest.approx(1, abs=0.02)
    assert "arrive whole" not in result.out


def test_what_cannot_be_checked_is_said(
    posbench: Call, outputs: Path, server: Server
) -> None:
    """Without counts a model that finds no value in a short text cannot show what a server does."""
    server.count_tokens = None
    server.answer = lambda prompt: "I cannot say."
    result = ask(posbench, server, "task.pairs=60", "task.limit=3")
    assert result.status == 0, result.err
    assert_names(result.out, "server:", "not be checked", "counts no tokens")
    assert "could not be checked" in facts_of(only_run(outputs))["text"]


@pytest.mark.parametrize("resumes", [False, True])
def test_a_row_whose_prompt_did_not_arrive_has_no_score(
    posbench: Call, outputs: Path, server: Server, resumes: bool
) -> None:
    """The server begins to shorten prompts during the run: every later row has the outcome, none is a wrong answer."""
    args = ("task.pairs=60", "task.positions=[0,30,59]", "model.concurrency=1")
    begun = 10

    def reads(prompt: str) -> str:
        return front(prompt) if len(server.questions) > begun else prompt

    server.reads = reads
    if resumes:
        probe = 16
        server.quota = probe + begun
        ask(posbench, server, *args)
        server.quota = None
        result = posbench("resume", str(only_run(outputs)), verb=True)
    else:
        result = ask(posbench, server, *args)
    assert result.status == 0, result.err
    outcomes = Counter(row["outcome"] for row in rows_of(only_run(outputs)))
    assert outcomes == {"answered": begun, "not read": 60 - begun}
    assert "Verdict: bias" not in result.out
    for row in rows_of(only_run(outputs)):
        assert row["scores"] == (
            {"accuracy": 1} if row["outcome"] == "answered" else {}
        )


# The probe


def test_no_text_of_the_probe_is_sent_twice(server: Server) -> None:
    """A cache would answer it at once."""
    prepare(compose_one(f"model.base_url={server.url}", *TASK, "task.pairs=60"))
    texts = Counter(map(prompt_of, server.bodies))
    texts.pop(PROBE)
    assert set(texts.values()) == {1} and len(texts) > 10
    beginnings = Counter(text[:16] for text in texts)
    assert set(beginnings.values()) == {1}


def test_a_probe_ends_with_the_budget(posbench: Call, server: Server) -> None:
    config = config_of(f"model.base_url={server.url}", *TASK, "task.pairs=60")
    with refused("budget", "1min", allowed="more time", hint="budget="):
        probe_server(config, Budget("1min", seconds=1e-9))
    assert not server.bodies


def test_jobs_of_one_process_ask_the_server_once(server: Server) -> None:
    for limit in (5, 6):
        call = (f"model.base_url={server.url}", *TASK, "task.pairs=60")
        prepare(compose_one(*call, f"task.limit={limit}"))
        if limit == 5:
            first = len(server.bodies)
    assert len(server.bodies) == first + 1


class SlowServer:
    """Gives a server one slot, a time for long prompts that it has not read before, and a clock that this moves."""

    def __init__(
        self, server: Server, seconds: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.now = 0.0
        self._seconds = seconds
        self._cached = set[str]()
        self._slot = Lock()
        server.reads = self.read
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=lambda seconds: None)
        monkeypatch.setattr("posbench.backends.served.time", clock)
        monkeypatch.setattr("posbench.pipeline.served.time", clock)
        monkeypatch.setattr("posbench.run.progress.clock", clock.monotonic)

    def read(self, prompt: str) -> str:
        with self._slot:
            if len(prompt) > 900:
                self.now += self._seconds / (50 if prompt in self._cached else 1)
                self._cached.add(prompt)
        return prompt


@pytest.mark.parametrize("pairs", [20, 60])
def test_the_time_of_a_server_with_one_slot_and_a_cache(
    server: Server, monkeypatch: pytest.MonkeyPatch, pairs: int
) -> None:
    """Two seconds a prompt, whatever the number of requests at a time."""
    SlowServer(server, 2.0, monkeypatch)
    call = (f"model.base_url={server.url}", *TASK, f"task.pairs={pairs}")
    config = prepare(compose_one(*call)).config
    assert config.server is not None
    estimate = estimate_served(config, config.server, text_encoder(config.model))
    truth = 2.0 * estimate.requests
    assert estimate.seconds is not None
    assert truth / 2 < estimate.seconds < 2 * truth
    assert_names(estimate.line(8), "8 requests", "answers about 1")


@pytest.mark.parametrize("verb", ["", "diagnose"])
def test_a_minute_is_over_after_two_on_a_server_that_takes_one_for_a_prompt(
    posbench: Call, server: Server, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    slow = SlowServer(server, 60.0, monkeypatch)
    # Prompts of a thousand questions take seconds to write, and none is asked.
    monkeypatch.setattr("posbench.diagnose.sizes.MAX_QUESTIONS", 30)
    args = (f"model.base_url={server.url}", "task.pairs=60", "budget=1min")
    result = posbench(*filter(None, [verb]), *args)
    assert_refused(
        result.err,
        "budget",
        "1min",
        hint="budget=",
        allowed="for" if not verb else "more",
    )
    assert slow.now <= 120 and not server.questions
