"""``posbench diagnose`` through servers whose bias is planted."""

from __future__ import annotations

import html
import json
import re
import shlex
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from posbench.pipeline.compose import compose
from posbench.pipeline.prepare import prepare
from posbench.report.folder import read_csv
from posbench.stats.verdict import run_verdict
from tests.conftest import Result
from tests.messages import assert_line_names, assert_refused
from tests.server import (
    Server,
    gold_position,
    is_question,
    prompt_of,
    right_value,
    serving,
)

PAIRS = 8
TASK = (
    "task.prompt=compact",
    "task.records=words",
    f"task.pairs={PAIRS}",
    "task.positions=[0%,50%,100%]",
    "runtime.resamples=100",
)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(autouse=True)
def fewer_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 200 at each position, not 1,000: all prompts are written before the first is asked."""
    monkeypatch.setattr("posbench.diagnose.sizes.MAX_QUESTIONS", 200)


@pytest.fixture
def diagnose(
    posbench: Callable[..., Result], outputs: Path, server: Server
) -> Callable[..., tuple[Result, dict[str, Any]]]:
    """The verb in this process on the server, and what its JSON file says."""

    def call(*args: str) -> tuple[Result, dict[str, Any]]:
        result = posbench("diagnose", server.url, *TASK, *args)
        files = sorted(outputs.glob("diagnose/*/diagnosis.json"))
        return result, json.loads(files[-1].read_text()) if files else {}

    return call


def reader(right: Callable[[int], bool]) -> Callable[[str], str]:
    """Answers right at the gold positions that a rule names, and wrong elsewhere."""

    def answer(prompt: str) -> str:
        return right_value(prompt) if right(gold_position(prompt)) else "bal"

    return answer


def test_a_planted_primacy_is_found_and_nothing_is_said_of_the_inside(
    diagnose: Callable[..., tuple[Result, dict[str, Any]]],
    server: Server,
    outputs: Path,
) -> None:
    server.answer = reader(lambda position: position == 0)
    result, found = diagnose("budget=600prompts")
    assert result.status == 0, result.err
    assert (found["verdict"], found["shape"]["name"]) == ("bias", "primacy")
    assert found["source"] is None and not found["remedies"]
    # What someone with an address alone can do: no checkpoint to look into.
    assert "DIR" not in found["next"] and "model=" not in found["next"]
    # A budget of prompts does not limit the changes of the prompt, which the next command compares.
    following = shlex.split(found["next"])[1:]
    assert "study=order" in following
    (job,) = compose(following).composed
    assert prepare(job).config.task.limit == 40
    assert found["model"] == "fake"
    (page,) = outputs.glob("diagnose/*/report.html")
    words = html.unescape(" ".join(re.sub("<[^>]*>", " ", page.read_text()).split()))
    for text in ("Find the value of a key", "Score by position", "What was asked"):
        assert text in words
    assert 'is "' in words, "a prompt is shown"
    # All positions of each question, and no more questions than tell the shape.
    assert found["shape"]["questions"] < 100
    assert_line_names(result.out, "requests", "tokens", "price unknown")
    prompts = result.out.index("requests"), result.out.index("evaluate")
    assert prompts[0] < prompts[1], "the price stands before the first prompt"


def test_a_change_of_the_prompt_that_helps_is_found_on_held_back_questions(
    diagnose: Callable[..., tuple[Result, dict[str, Any]]], server: Server
) -> None:
    """A reader of the first item alone, unless the items are said twice."""

    def answer(prompt: str) -> str:
        asked = re.search(r'key "(\w+)" is "$', prompt)
        is_twice = bool(asked) and prompt.count(f'"{asked[1]}": "') == 2
        is_found = is_twice or gold_position(prompt) == 0
        return right_value(prompt) if is_found else "unknown"

    server.answer = answer
    result, found = diagnose()
    assert result.status == 0, result.err
    assert found["verdict"] == "bias", "a higher average is not yet a bias removed"
    changes = found["prompt_changes"]
    assert (changes["verdict"], changes["policy"]) == ("use", "documents_twice")
    by_name = {row["name"]: row for row in changes["policies"]}
    assert by_name["as_retrieved"]["accuracy"] == pytest.approx(100 / 3, abs=1)
    assert by_name["documents_twice"]["accuracy"] == 100
    assert changes["held_back"]["n"] > 20
    assert "put what matters first: 100 % right there, 0 % elsewhere" in found["place"]
    step = shlex.split(found["next"])
    assert "method=documents_twice" in step
    # The consent was to this diagnosis, and so was its price.
    assert not any(arg.startswith("runtime.yes") for arg in step)
    assert any(arg.startswith("budget=") for arg in step)
    assert_line_names(result.out, "prompt: use documents_twice", "held-back")


def test_one_lost_position_is_a_bias_without_a_side(
    diagnose: Callable[..., tuple[Result, dict[str, Any]]], server: Server
) -> None:
    """Its ends are like the inner positions on average: "no bias" was said beside the run's own "bias"."""
    server.answer = reader(lambda position: position != 3)
    result, found = diagnose("task.positions=[0,1,2,3,5,7]")
    assert result.status == 0, result.err
    assert (found["verdict"], found["shape"]["name"]) == ("bias", "uneven")
    assert "has an uneven bias" in found["headline"]
    verdict = run_verdict(read_csv(Path(found["runs"]["shape"]) / "metrics.csv"))
    assert verdict == (found["verdict"], found["reason"])


def test_a_reader_that_cannot_be_told_yet_gets_the_questions_that_would_tell(
    diagnose: Callable[..., tuple[Result, dict[str, Any]]], server: Server
) -> None:
    """Right four times of five, whatever the position."""

    def answer(prompt: str) -> str:
        luck = zlib.crc32(prompt.encode()) % 5
        return right_value(prompt) if luck else "bal"

    server.answer = answer
    result, found = diagnose("task.limit=25", "budget=2min")
    assert result.status == 0, result.err
    assert found["verdict"] == "cannot tell"
    needed = found["needed_questions"]
    assert 200 < needed < 900
    assert f"up to about {needed} questions at each position in all" in found["reason"]
    following = dict(arg.split("=", 1) for arg in shlex.split(found["next"])[2:])
    assert following["task.limit"] == str(needed)
    assert following["budget"].endswith("min")


@pytest.mark.slow
def test_a_reader_without_bias_has_none(
    diagnose: Callable[..., tuple[Result, dict[str, Any]]], server: Server
) -> None:
    server.answer = reader(lambda position: True)
    result, found = diagnose("task.limit=150")
    assert result.status == 0, result.err
    assert found["verdict"] == "no bias"


def test_a_model_that_answers_nothing_ends_after_its_pilots(
    diagnose: Callable[..., tuple[Result, dict[str, Any]]], server: Server
) -> None:
    server.answer = reader(lambda position: False)
    result, found = diagnose()
    assert result.status == 0, result.err
    assert found["verdict"] == "cannot do the task"
    assert len(server.questions) <= 2 * 3 * 20


def test_a_pilot_that_is_cut_in_its_thinking_is_asked_again_with_room(
    diagnose: Callable[..., tuple[Result, dict[str, Any]]], server: Server
) -> None:
    server.answer = reader(lambda position: True)
    server.thinking = lambda prompt: 20_000
    result, found = diagnose("task.limit=20")
    assert result.status == 0, result.err
    first, second, *_ = found["pilots"]
    assert (first["level"], first["thinks"]) == ("missing answers", True)
    assert second["settings"] == {"model.thinking_tokens": 4 * 16_384}
    assert second["level"] == "ceiling"


@pytest.mark.slow
def test_one_that_is_cut_all_the_same_is_told_what_to_set(
    diagnose: Callable[..., tuple[Result, dict[str, Any]]], server: Server
) -> None:
    server.answer = reader(lambda position: True)
    server.thinking = lambda prompt: 10**6
    result, found = diagnose("model.thinking_tokens=100")
    assert result.status == 0, result.err
    assert found["verdict"] == "cannot tell"
    assert "model.thinking_tokens=400" in found["next"]


@pytest.mark.slow
def test_a_budget_of_tokens_is_kept(
    diagnose: Callable[..., tuple[Result, dict[str, Any]]], server: Server
) -> None:
    server.answer = reader(lambda position: position != PAIRS // 2)
    result, found = diagnose("budget=60ktok")
    assert result.status == 0, result.err
    asked = [len(str(body["messages"][-1]["content"])) + 1 for body in server.questions]
    assert 30_000 < sum(asked) <= 60_000
    assert found["prompts"]["pilot"] >= 15


def test_a_budget_that_holds_no_pilot_is_refused(
    diagnose: Callable[..., tuple[Result, dict[str, Any]]], server: Server
) -> None:
    result, found = diagnose("budget=20prompts")
    assert result.status == 2 and not found
    assert_refused(result.err, "budget", "20prompts")
    assert not server.questions


def test_money_needs_a_price(
    diagnose: Callable[..., tuple[Result, dict[str, Any]]], server: Server
) -> None:
    result, _ = diagnose("budget=1usd")
    assert result.status == 2 and not server.questions
    assert_refused(result.err, "budget", "1usd")


@pytest.mark.slow
def test_the_checkpoint_of_a_served_model_is_looked_into(
    posbench: Callable[..., Result], outputs: Path, server: Server
) -> None:
    server.answer = reader(lambda position: position in (0, 31))
    result = posbench(
        "diagnose",
        "model=tiny",
        f"model.base_url={server.url}",
        "model.served=fake",
        "task.positions=[0%,50%,100%]",
        "task.limit=40",
        "runtime.resamples=100",
        "method=scale_channel",
    )
    assert result.status == 0, result.err
    (file,) = outputs.glob("diagnose/*/diagnosis.json")
    found = json.loads(file.read_text())
    assert found["shape"]["name"] == "middle drop"
    assert set(found["source"]["named"]) == {"causal mask", "position ids"}
    assert found["winner"] == "scale_channel" and found["verdict"] == "fixed"


def test_words_are_few_where_nobody_says_how_many(
    posbench: Callable[..., Result], outputs: Path, server: Server
) -> None:
    """140 pairs, the default, have more keys than there are words."""
    server.answer = reader(lambda position: position == 0)
    positions = "task.positions=[0%,50%,100%]"
    address = f"model.base_url={server.url}"
    few = positions, "task.limit=5", "runtime.resamples=100"
    result = posbench("diagnose", address, "task.records=words", *few)
    assert result.status == 0, result.err
    for config in outputs.glob("kv_retrieval/v*/*/config.yaml"):
        task = yaml.safe_load(config.read_text())["task"]
        assert task["pairs"] == task["calibration_pairs"] <= 20


def test_a_server_that_reads_no_prompt_is_no_traceback(
    diagnose: Callable[..., tuple[Result, dict[str, Any]]], server: Server
) -> None:
    server.window = 60
    result, found = diagnose("budget=100prompts")
    assert result.status == 0, result.err
    assert found["verdict"] == "cannot tell" and not found["runs"].get("shape")
    assert_line_names(result.out, "pilot", "prompts", "18 not read")
    assert_line_names(result.out, "next", "window")
    (pilot,) = found["pilots"]
    assert pilot["average"]["value"] is None and pilot["missing"] == 18


@pytest.mark.parametrize("count", [None, lambda characters: 0])
@pytest.mark.parametrize("budget", ["1usd", "900ktok"])
def test_a_budget_that_nobody_counts_is_refused(
    posbench: Callable[..., Result], server: Server, count: Any, budget: str
) -> None:
    server.count_tokens = count
    price = ("model.price=[1,2]", "--yes")
    result = posbench("diagnose", server.url, *TASK, *price, f"budget={budget}")
    assert_refused(result.err, "budget", budget, allowed="prompts", hint="500prompts")
    assert not any(is_question(prompt_of(body)) for body in server.bodies)


def test_requests_that_fail_for_good_are_one_line(
    posbench: Callable[..., Result], server: Server
) -> None:
    def fault(prompt: str, n: int) -> str:
        fails = "key" in prompt and sum(map(ord, prompt)) % 3 == 0
        return "500" if fails else ""

    server.fault = fault
    args = (*TASK, "budget=100prompts", "model.retries=0")
    failed = posbench("diagnose", server.url, *args)
    assert failed.status == 1
    assert "Traceback" not in failed.err
    assert_line_names(failed.err, "predictions.jsonl failed", "again")


def test_a_url_alone_is_the_address_of_a_server(
    posbench: Callable[..., Result], outputs: Path, server: Server
) -> None:
    server.listed = [{"id": "../whl/x.gguf", "object": "model"}]
    file = Path(__file__).parents[1] / "data/own/items.jsonl"
    server.answer = lambda prompt: "I do not know."
    result = posbench(
        "diagnose",
        server.url,
        "task=own_data",
        f"task.path={file}",
        "budget=300prompts",
    )
    assert result.status == 0, result.err
    (folder,) = (outputs / "diagnose").iterdir()
    found = json.loads((folder / "diagnosis.json").read_text())
    assert found["model"] == "../whl/x.gguf"
    # No folder is hidden, or outside of the outputs.
    assert folder.name.startswith("whl-x.gguf__own_data__")
    runs = [Path(run).relative_to(outputs) for run in found["runs"].values()]
    assert runs and not any(name.startswith(".") for run in runs for name in run.parts)
    assert f"model.base_url={server.url}" in found["command"]


def test_a_server_reads_documents_of_ones_own_at_every_position(
    posbench: Callable[..., Result], outputs: Path, server: Server, tmp_path: Path
) -> None:
    """The reader sees the second half of its prompt alone."""
    rows = [
        {
            "question": f"What is the mark of town {i}?",
            "documents": [
                {"text": f"Town {i + k} has mark X{i + k}Y."} for k in range(6)
            ],
            "gold": 0,
            "answers": [f"X{i}Y"],
        }
        for i in range(40)
    ]
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows + rows[:1]))
    server.answer = lambda prompt: prompt[len(prompt) // 2 :]
    result = posbench(
        "diagnose",
        server.url,
        "task=own_data",
        f"task.path={file}",
        "task.positions=[0,2,5]",
        "runtime.resamples=100",
    )
    assert result.status == 0, result.err
    assert_line_names(result.out, "1 of 41", "repeat")
    (saved,) = outputs.glob("diagnose/*/diagnosis.json")
    found = json.loads(saved.read_text())
    assert (found["verdict"], found["shape"]["name"]) == ("bias", "recency")
