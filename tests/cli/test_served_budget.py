"""What a served run costs: said before the first prompt, counted on the way, and no more than its budget."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from posbench.backends.base import ServerProfile, text_encoder
from posbench.pipeline import served
from posbench.pipeline.budget import plan_run, with_settings
from posbench.pipeline.compose import compose_one
from posbench.pipeline.prepare import prepare
from posbench.pipeline.served import estimate_served, need_consent
from posbench.run.budget import Stopwatch
from tests.cli.test_probing import SMALL, ask, only_run, rows_of
from tests.conftest import Result, config_of, run_folders
from tests.messages import assert_names, assert_refused, refused
from tests.server import Server, gold_position, right_value, serving

Call = Callable[..., Result]
DOCUMENTS = Path(__file__).parents[1] / "data" / "own" / "documents.jsonl"


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key of the machine."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def tokens_of(row: dict[str, Any]) -> int:
    return int(row["prompt_tokens"] + row["reply_tokens"])


def spent_tokens(server: Server) -> int:
    """Tokens of all questions that a server answered, by its own count: a token a character, and one of a reply."""
    prompts = [body["messages"][-1]["content"] for body in server.questions]
    return sum(map(len, prompts)) + len(prompts)


def probe_tokens(folder: Path) -> int:
    """Tokens of what was asked before the questions, in all sessions of a run."""
    probe = json.loads((folder / "status.json").read_text())["spent"]["probe"]
    return int(probe["prompt_tokens"] + probe["reply_tokens"])


def assert_whole(rows: list[dict[str, Any]]) -> None:
    """Every question was asked at all three positions."""
    counts = Counter(row["id"].partition("-")[2] for row in rows)
    assert rows and set(counts.values()) == {3}


# Before the first prompt


@pytest.mark.parametrize(
    ("api", "task"),
    [
        ("chat", ["task.pairs=20", "task.limit=20"]),
        ("completions", [*SMALL, "task.limit=40"]),
        ("chat", ["task=own_data", f"task.path={DOCUMENTS}"]),
    ],
)
def test_tokens_are_those_of_the_estimate(api: str, task: list[str]) -> None:
    """A server that counts three tokens of ten characters, and 17 of its template, is estimated to 5 %."""
    with serving() as server:
        server.count_tokens = lambda characters: 17 + round(0.3 * characters)
        call = [f"model.base_url={server.url}", f"model.api={api}", *task]
        config = prepare(compose_one(*call)).config
    assert config.server is not None
    estimate = estimate_served(config, config.server, text_encoder(config.model))
    examples = config.task.evaluation()
    counted = sum(17 + round(0.3 * len(example.prompt)) for example in examples)
    assert estimate.requests == len(examples)
    assert estimate.read == pytest.approx(counted, rel=0.05)
    assert estimate.written_at_most == len(examples) * config.task.max_new_tokens


def test_tokens_of_a_known_tokenizer_are_counted_by_it() -> None:
    with serving() as server:
        call = ["model=tiny", f"model.base_url={server.url}", "task.limit=20"]
        prepared = prepare(compose_one(*call))
    config = prepared.config
    assert config.server is not None and prepared.reader is not None
    estimate = estimate_served(config, config.server, text_encoder(config.model))
    examples = config.task.evaluation()
    counted = sum(len(prepared.reader.encode(e.prompt).ids) for e in examples)
    assert estimate.read == pytest.approx(counted, rel=0.02)


def test_requests_tokens_and_money_are_said_first(
    posbench: Call, outputs: Path
) -> None:
    with serving() as server:
        call = [f"model.base_url={server.url}", *SMALL, "task.limit=4"]
        checked = posbench("validate", *call, "model.price=[2,10]", verb=True)
        assert checked.status == 0 and not server.questions
        unknown = posbench("validate", *call, verb=True)
        result = posbench(*call, "model.price=[2,10]")
    # The time is measured anew.
    lines, said = (
        [
            re.sub("about [^;]* at 8", "at 8", line)
            for line in out.splitlines()
            if "requests;" in line
        ]
        for out in (checked.out, result.out)
    )
    assert lines == said
    assert_names(lines[0], "12 requests", "tokens read", "at most 1,200", "usd")
    assert_names(unknown.out, "price unknown", "model.price=[IN,OUT]")
    rows = rows_of(only_run(outputs))
    for row in rows:
        by_hand = (2 * row["prompt_tokens"] + 10 * row["reply_tokens"]) / 1e6
        assert row["cost"] == pytest.approx(by_hand)
    status = json.loads((only_run(outputs) / "status.json").read_text())
    spent = status["spent"]["evaluate"]
    assert spent["usd"] == pytest.approx(sum(row["cost"] for row in rows), abs=1e-6)
    assert spent["prompt_tokens"] == sum(row["prompt_tokens"] for row in rows)
    # The line of progress says it, too, with what the probe took.
    probe = status["spent"]["probe"]
    tokens = sum(map(tokens_of, rows)) + probe["prompt_tokens"] + probe["reply_tokens"]
    usd = spent["usd"] + probe["usd"]
    assert_names(result.out, f"{tokens:,} tokens", f"{usd:.4f} usd spent")


def test_nothing_is_sent_that_nobody_agreed_to(
    posbench: Call, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no terminal can ask, what costs wants --yes."""
    monkeypatch.setattr(served, "is_on_this_machine", lambda address: False)
    with serving() as server:
        args = ("task.limit=4", "model.price=[2,10]")
        result = ask(posbench, server, *args)
        assert result.status == 2 and not server.questions, result.err
        assert_refused(result.err, "--yes", False, allowed="given", hint="budget=1usd")
        assert not run_folders(outputs)
        server.quota = len(server.bodies) + 8
        assert ask(posbench, server, *args, "--yes").status == 2
        server.quota = None
        folder = str(only_run(outputs))
        config = only_run(outputs) / "config.yaml"
        config.write_text(config.read_text().replace("'yes': true", "'yes': false"))
        refused_again = posbench("resume", folder, verb=True)
        assert_refused(
            refused_again.err, "--yes", False, allowed="given", hint="budget=1usd"
        )
        again = posbench("resume", folder, "--yes", verb=True)
        assert again.status == 0, again.err
    assert len(rows_of(only_run(outputs))) == 12


@pytest.mark.parametrize("sessions", [["budget=20ktok"], ["", "budget=20ktok"]])
def test_what_a_run_may_spend_holds_for_who_goes_on_with_it(
    posbench: Call, outputs: Path, sessions: list[str]
) -> None:
    """Also where a later session set the limit."""
    call = ["task.limit=40", "model.price=[0,0]"]
    with serving() as server:
        for number, budget in enumerate(sessions, 1):
            server.quota = 30 * number
            stopped = ask(posbench, server, *call, *filter(None, [budget]))
            assert stopped.status == 2
        server.quota = None
        resumed = posbench("resume", str(only_run(outputs)), verb=True)
    assert resumed.status == 0, resumed.err
    rows = rows_of(only_run(outputs))
    assert_whole(rows)
    spent = sum(map(tokens_of, rows)) + probe_tokens(only_run(outputs))
    assert 17_000 < spent <= 20_000


@pytest.mark.parametrize(
    ("args", "needs_consent"),
    [
        ([], True),
        (["model.price=[2,10]"], True),
        (["model.price=[0,0]"], False),
        (["task.limit=1"], False),
        (["runtime.yes=true"], False),
        (["budget=2usd", "model.price=[2,10]"], False),
        (["budget=2Mtok"], False),
        (["budget=100prompts"], True),
        (["model.base_url=http://localhost:1/v1"], False),
        (["model.base_url=http://127.0.0.1:1/v1", "model.price=[2,10]"], False),
    ],
)
def test_what_costs_and_what_is_large_and_of_unknown_price_wants_consent(
    args: list[str], needs_consent: bool
) -> None:
    config = config_of("model.base_url=http://far.example/v1", *SMALL, *args)
    profile = ServerProfile("chat", tokens_per_character=1.0)
    estimate = estimate_served(config, profile, text_encoder(config.model))
    console = Console(quiet=True)
    if needs_consent:
        with refused("--yes", False, allowed="given", hint="--yes"):
            need_consent(config, estimate, console)
    else:
        need_consent(config, estimate, console)


@pytest.mark.parametrize(
    ("answer", "agrees"), [("y", True), ("Yes ", True), ("", False), ("n", False)]
)
def test_a_terminal_asks(
    monkeypatch: pytest.MonkeyPatch, answer: str, agrees: bool
) -> None:
    asked = []

    class Terminal(Console):
        def input(self, prompt: str = "", **more: object) -> str:  # type: ignore[override]
            asked.append(prompt)
            return answer

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    config = config_of(
        "model.base_url=http://far.example/v1", *SMALL, "model.price=[2,10]"
    )
    profile = ServerProfile("chat", tokens_per_character=1.0)
    estimate = estimate_served(config, profile, text_encoder(config.model))
    console = Terminal(force_terminal=True, quiet=True)
    if agrees:
        need_consent(config, estimate, console)
    else:
        with refused("--yes", answer, allowed="y", hint="--yes"):
            need_consent(config, estimate, console)
    assert len(asked) == 1 and f"{estimate.cost_at_most:.2f} usd" in asked[0]


# On the way


@pytest.mark.slow
def test_a_budget_of_tokens_is_kept_and_leaves_questions_whole(
    posbench: Call, outputs: Path
) -> None:
    with serving() as server:
        result = ask(posbench, server, "budget=20ktok")
        assert result.status == 0, result.err
        asked = spent_tokens(server)
    rows = rows_of(only_run(outputs))
    assert_whole(rows)
    assert sum(map(tokens_of, rows)) == asked
    assert 18_000 < asked + probe_tokens(only_run(outputs)) <= 20_000
    assert_names(result.out, "budget 20ktok", "of 20ktok spent")


def test_a_model_that_thinks_longer_than_on_the_probe_stops_at_the_budget(
    posbench: Call, outputs: Path
) -> None:
    """What is passed is what was under way; the same command has nothing left to spend."""
    with serving() as server:
        server.thinking = lambda prompt: (
            40 if "\n" in prompt else 700 + 40 * gold_position(prompt)
        )
        server.answer = right_value
        args = ("model.price=[1,10]", "budget=0.5usd", "model.concurrency=4")
        result = ask(posbench, server, *args)
        assert result.status == 0, result.err
        asked = len(server.questions)
        again = ask(posbench, server, *args)
        assert "finished before" in again.out and len(server.questions) == asked
    rows = rows_of(only_run(outputs))
    assert_whole(rows)
    dearest = max(row["cost"] for row in rows)
    status = json.loads((only_run(outputs) / "status.json").read_text())
    assert 0.4 < status["spent"]["evaluate"]["usd"] <= 0.5 + 4 * dearest
    assert_names(result.out, "the budget", "of 0.5usd spent")
    # Rows of questions that were not asked at all positions are neither scored nor kept.
    assert len(rows) <= asked <= len(rows) + 4 + 2


def test_what_stopped_sessions_spent_counts(posbench: Call, outputs: Path) -> None:
    with serving() as server:
        server.quota = 30
        first = ask(posbench, server, "budget=20ktok", "model.concurrency=2")
        assert first.status == 2, first.err
        server.quota = None
        second = ask(posbench, server, "budget=20ktok", "model.concurrency=2")
        assert second.status == 0, second.err
    rows = rows_of(only_run(outputs))
    assert_whole(rows)
    spent = sum(map(tokens_of, rows)) + probe_tokens(only_run(outputs))
    assert 18_000 < spent <= 20_000


def test_a_budget_of_time_ends_inside_a_round(
    posbench: Call, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that each question moves by a second; the server seemed fast when it was probed."""
    seconds = [0.0]
    monkeypatch.setattr("posbench.run.progress.clock", lambda: seconds[0])

    def pass_a_second(prompt: str, n: int) -> str:
        seconds[0] += 1
        return ""

    with serving() as server:
        sizes = ("task.limit=100", "runtime.round_questions=100")
        prepared = ("budget=60s", "model.concurrency=1", *sizes)
        server.fault = pass_a_second
        result = ask(posbench, server, *prepared)
    assert result.status == 0, result.err
    rows = rows_of(only_run(outputs))
    assert_whole(rows)
    assert 20 <= len(rows) <= 60 and len(server.questions) < 70
    assert_names(result.out, "the budget", "60s", "expected")


def test_a_resumed_run_keeps_its_rows_when_its_time_is_over(
    posbench: Call, outputs: Path
) -> None:
    with serving() as server:
        sizes = ("task.limit=20", "runtime.round_questions=2")
        args = (*sizes, "budget=10min", "model.concurrency=1")
        server.quota = 50
        assert ask(posbench, server, *args).status == 2
        folder = only_run(outputs)
        made = {row["id"] for row in rows_of(folder)}
        server.quota = None
        (folder / ".seconds_used.json").write_text("598.0")
        resumed = ask(posbench, server, *args)
    assert resumed.status == 0, resumed.err
    rows = rows_of(folder)
    assert_whole(rows)
    kept = {row["id"] for row in rows}
    # Of the question under way at most two of three prompts are given up.
    assert 30 < len(made) < 60 and kept <= made and len(made - kept) <= 2
    stopped = json.loads((folder / "provenance.json").read_text())["budget"]["end"]
    assert f"{len(kept) // 3} of 20 questions" in stopped


def test_what_cannot_be_counted_is_no_budget(posbench: Call, outputs: Path) -> None:
    with serving() as server:
        result = ask(posbench, server, "budget=1usd")
        assert_refused(
            result.err, "budget", "1usd", allowed="model.price", hint="3Mtok"
        )
        tiny = ask(posbench, server, "budget=10tok")
        assert_refused(
            tiny.err, "budget", "10tok", allowed="one question", hint="budget=1ktok"
        )
        server.count_tokens = None
        uncounted = ask(posbench, server, "budget=20ktok")
        assert_refused(
            uncounted.err,
            "budget",
            "20ktok",
            allowed="tokens",
            hint="budget=500prompts",
        )
    assert not run_folders(outputs)


@pytest.mark.parametrize(
    ("budget", "most"),
    [("0.06usd", 0.06), pytest.param("30ktok", 30_000, marks=pytest.mark.slow)],
)
def test_a_model_in_process_has_budgets_of_tokens_and_money(
    budget: str, most: float
) -> None:
    """The most questions that fit, by counting the tokens of each prompt and one of its reply."""
    call = ("model=tiny", "method=none", "stages=[evaluate]", "model.price=[1,3]")
    prepared = prepare(compose_one(*call, f"budget={budget}"))
    quiet = Console(quiet=True)
    plan, _ = plan_run(prepared.config, prepared.reader, quiet, Stopwatch())
    config = with_settings(prepared.config, plan.settings)
    assert prepared.reader is not None

    def cost(limit: int) -> float:
        examples = with_settings(config, {"task.limit": limit}).task.evaluation()
        lengths = [len(prepared.reader.encode(e.prompt).ids) for e in examples]
        if budget.endswith("tok"):
            return sum(lengths) + len(lengths)
        return (sum(lengths) + 3 * len(lengths)) / 1e6

    assert cost(plan.questions) <= most < 1.03 * cost(plan.questions + 1)
