"""A served model: whatever goes wrong on the way, no row is lost or doubled, and no number moves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from rich.console import Console

from posbench import paths
from posbench.cli.main import main
from posbench.model.lm import LM
from posbench.pipeline.compose import compose_one
from posbench.pipeline.execute import execute
from posbench.pipeline.identity import identity
from posbench.pipeline.prepare import prepare
from posbench.pipeline.stages import evaluate
from posbench.report.compare import ComparedRun, differences, label_runs
from posbench.report.page import describe_prompts
from posbench.run.folder import PREDICTIONS, open_run_dir
from tests.conftest import Result, config_of, run_folders
from tests.kills import Kills
from tests.messages import (
    Tokens,
    assert_line_names,
    assert_names,
    assert_refused,
    refused,
)
from tests.server import KEY, is_question, serving, value

TASK = [
    "task=kv_retrieval",
    "task.prompt=compact",
    "task.records=words",
    "task.pairs=12",
    "task.limit=6",
]
TASK += ["task.positions=[0,5,11]", "runtime.resamples=100"]
URL = "http://127.0.0.1:9/v1"
PROMPTS = 18
Call = Callable[..., Result]


def served(url: str, *more: str) -> list[str]:
    return [
        "model=endpoint",
        f"model.base_url={url}",
        "model.name=fake",
        *TASK,
        "stages=[evaluate]",
        *more,
    ]


def rows_of(outputs: Path, model: str = "fake") -> list[dict[str, Any]]:
    (folder,) = (
        folder
        for folder in run_folders(outputs)
        if folder.name.startswith(f"{model}__none")
    )
    return [
        json.loads(line)
        for line in (folder / "predictions.jsonl").read_text().splitlines()
    ]


def told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what tells runs and servers apart."""
    own = ("run", "sum", "computation")
    return [{k: v for k, v in row.items() if k not in own} for row in rows]


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key of the machine."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing went wrong with."""
    outputs = tmp_path_factory.mktemp("whole")
    with serving(
        lambda prompt, n: time.sleep(0.01) or ""
    ) as server:  # time for others to come
        assert (
            main(
                [
                    *served(server.url, "model.concurrency=3"),
                    f"runtime.outputs={outputs}",
                ]
            )
            == 0
        )
    assert 1 < server.most <= 3
    assert set(server.asked.values()) == {1} and len(server.asked) == PROMPTS
    body = server.bodies[-1]
    assert (body["model"], body["temperature"]) == ("fake", 0)
    return run_folders(outputs)[0]


@pytest.fixture
def undisturbed(whole: Path) -> list[dict[str, Any]]:
    """The rows of that run."""
    return rows_of(whole.parents[2])


def test_replies_are_scored_with_what_the_server_tells(
    undisturbed: list[dict[str, Any]], whole: Path
) -> None:
    examples = config_of(*served(URL)).task.evaluation()
    assert [row["id"] for row in undisturbed] == [e.id for e in examples]
    for row, e in zip(undisturbed, examples, strict=True):
        assert row["output"] == value(e.prompt) and row["prompt_tokens"] == row[
            "tokens"
        ] == len(e.prompt)
        assert row["scores"]["accuracy"] == (value(e.prompt) == e.answers[0])
        assert (row["finish"], row["reply_tokens"], row["server"]) == (
            "stop",
            1,
            "fake fp_1",
        )
    metrics = pd.read_csv(whole / "metrics.csv").query(
        "gold_position == 'all' and metric == 'accuracy'"
    )
    assert metrics["value"].item() == pytest.approx(
        sum(r["scores"]["accuracy"] for r in undisturbed) / PROMPTS
    )
    facts = json.loads((whole / "provenance.json").read_text())["model"]
    assert facts["server_name"] == "fake" and facts["base_url"].startswith(
        "http://127.0.0.1:"
    )


def test_faults_on_the_way_lose_and_double_no_row(
    undisturbed: list[dict[str, Any]], whole: Path, posbench: Call, outputs: Path
) -> None:
    """Each of the first prompts fails at first in its own way; a body that is no JSON fails its row."""
    order: dict[str, int] = {}
    kinds = ["429", "500", "torn", "late", "503", "cut", "429"]

    def fault(prompt: str, n: int) -> str:
        if not is_question(prompt):
            return ""
        place = order.setdefault(prompt, len(order))
        return kinds[place] if place < len(kinds) and n == 0 else ""

    with serving(fault) as server:
        first = posbench(*served(server.url, "model.timeout=0.4"))
        assert first.status == 1
        assert_line_names(first.err, "1", "predictions.jsonl", "failed", "same command")
        assert len(rows_of(outputs)) == PROMPTS
        second = posbench(*served(server.url, "model.timeout=0.4"))
    assert second.status == 0, second.err
    assert told(rows_of(outputs)) == told(undisturbed)
    again = {prompt: n for prompt, n in server.asked.items() if n > 1}
    # A slow machine may let further prompts wait for too long.
    assert {prompt for prompt, place in order.items() if place < len(kinds)} <= set(
        again
    )
    (folder,) = run_folders(outputs)
    assert (folder / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()


def test_prompts_that_were_not_read_have_no_score(
    posbench: Call, outputs: Path
) -> None:
    examples = config_of(*served(URL)).task.evaluation()
    bad = {examples[3].prompt: "overflow", examples[13].prompt: "filter"}
    with serving(lambda prompt, n: bad.get(prompt, "")) as server:
        result = posbench(*served(server.url))
        assert result.status == 0, result.err
        assert_names(
            result.out, "2 of 18", "context overflow", "1 not read", "1 refused"
        )
        again = posbench(*served(server.url))
        assert (
            "finished before" in again.out and server.asked.total() == PROMPTS
        )  # not tried again
    rows, (folder,) = rows_of(outputs), run_folders(outputs)
    assert [row["id"] for row in rows if not row["scores"]] == [
        examples[3].id,
        examples[13].id,
    ]
    outcomes = {row["outcome"] for row in rows if row["scores"]}
    assert outcomes == {"answered"}
    on_page = describe_prompts(folder)
    assert_names(on_page, "2 of 18", "context overflow", "1 not read", "1 refused")
    # The server tells no window.
    assert "of the window" not in on_page
    metrics = pd.read_csv(folder / "metrics.csv").query(
        "gold_position == 'all' and metric == 'accuracy'"
    )
    assert metrics["n"].item() == PROMPTS - 2
    assert (
        evaluate.rescore(
            config_of(*served(URL)).task, "fake", 100, open_run_dir(folder)
        )
        == 0
    )


def test_a_server_that_tells_no_tokens_has_no_known_cost(
    posbench: Call, outputs: Path
) -> None:
    priced = ["model.price=[1,2]", "task.limit=1"]
    with serving() as server:
        server.count_tokens = None
        result = posbench(*served(server.url, *priced))
        assert result.status == 0, result.err
    assert "usd" not in result.out.partition("answers")[2]
    assert not any("cost" in row for row in rows_of(outputs))
    (folder,) = run_folders(outputs)
    assert "usd" not in (folder / "status.json").read_text()


def test_tokens_from_the_servers_cache_have_a_price_of_their_own(
    posbench: Call, outputs: Path
) -> None:
    with serving() as server:
        server.cached_share = 0.75
        result = posbench(*served(server.url, "model.price=[4,8,1]", "task.limit=2"))
        assert result.status == 0, result.err
    total = 0.0
    for row in rows_of(outputs):
        read, written = row["prompt_tokens"], row["reply_tokens"]
        assert row["cached_tokens"] == int(0.75 * read)
        cost = (read - row["cached_tokens"]) * 4 + row["cached_tokens"] + written * 8
        assert row["cost"] == pytest.approx(cost / 1e6)
        total += cost / 1e6
    (folder,) = run_folders(outputs)
    spent = json.loads((folder / "status.json").read_text())["spent"]
    assert spent["evaluate"]["usd"] == pytest.approx(total)


def test_a_reply_of_as_many_tokens_as_it_may_have_is_cut_where_no_reason_is_told(
    posbench: Call, outputs: Path
) -> None:
    with serving(lambda prompt, n: "unsaid") as server:
        for tokens in (1, 2):
            result = posbench(
                *served(server.url, f"task.max_new_tokens={tokens}", "task.limit=1")
            )
            assert result.status == 0, result.err
    finishes = {
        (row.get("finish"), row["reply_tokens"])
        for folder in run_folders(outputs)
        for row in open_run_dir(folder).rows(PREDICTIONS)
    }
    assert finishes == {("length", 1), (None, 1)}


def test_a_run_of_which_nothing_was_read_says_so(posbench: Call, outputs: Path) -> None:
    with serving(lambda prompt, n: "overflow" if "key" in prompt else "") as server:
        result = posbench(*served(server.url, "task.limit=1"))
    assert result.status == 0, result.err
    assert_names(result.out, "3 not read", "context overflow", "cannot tell", "window")
    (folder,) = run_folders(outputs)
    table = pd.read_csv(folder / "metrics.csv")
    assert table.loc[table["metric"] == "not_read", "value"].eq(1).all()
    assert table.loc[table["metric"] == "accuracy", "value"].isna().all()


@pytest.mark.slow
def test_a_killed_client_asks_again_for_what_was_under_way_alone(
    tmp_path: Path,
) -> None:
    with serving() as server:
        args = served(server.url, "model.concurrency=2", "task.limit=3")
        execute(
            config_of(*args, f"runtime.outputs={tmp_path}/first"),
            command="",
            console=Console(),
        )
        server.asked.clear()  # the children are forks of this process, which has loaded all that it needs
        kills = Kills(args, tmp_path)
        assert kills.tried(6, whole=1) == (6, 6), kills.failures
        prompts = [count for prompt, count in server.asked.items() if "key" in prompt]
    # 7 whole runs and 6 of which the kill left some rows: two were under way, no more are asked again.
    assert len(prompts) == 9 and 7 * 9 <= sum(prompts) <= 7 * 9 + 6 * 2


def test_a_killed_server_stops_the_run_that_goes_on_later(
    undisturbed: list[dict[str, Any]], posbench: Call, outputs: Path
) -> None:
    command = [sys.executable, "-m", "tests.server", "0", "8"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout
        port = int(process.stdout.readline())
        url = f"http://127.0.0.1:{port}/v1"
        first = posbench(*served(url, "model.concurrency=2"))
    assert first.status == 3 and first.err.count("\n") == 1
    assert (
        first.err.startswith(f"posbench: model.base_url = '{url}'")
        and "resumes" in first.err
    )
    kept = rows_of(outputs)
    assert 0 < len(kept) <= 8 and not any("error" in row for row in kept)
    with serving(port=port) as server:
        assert posbench(*served(url, "model.concurrency=2")).status == 0
    assert len(server.asked) == PROMPTS - len(kept)
    assert told(rows_of(outputs)) == told(undisturbed)


def test_a_server_that_only_fails_is_not_asked_for_every_prompt(
    posbench: Call, outputs: Path
) -> None:
    def fault(prompt: str, n: int) -> str:
        time.sleep(0.05)
        return "500" if "key" in prompt else ""

    with serving(fault) as server:
        result = posbench(*served(server.url, "model.concurrency=2", "model.retries=0"))
    assert result.status == 1
    assert_line_names(result.err, "6 requests", "HTTP 500")
    assert len(server.asked) < 15


def test_a_key_is_sent_and_stands_in_no_file(
    posbench: Call, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_MINE", KEY)
    broken = config_of(*served(URL)).task.evaluation()[0].prompt
    for fault, status in (("401", 2), ("500", 1)):
        with serving(
            lambda prompt, n, f=fault: f if f == "401" or prompt == broken else ""
        ) as server:
            result = posbench(
                *served(server.url, "model.key_env=OF_MINE", "model.retries=0")
            )
        assert result.status == status, result.err
        assert server.keys == {f"Bearer {KEY}"} and KEY not in result.err + result.out
        assert status != 2 or (
            "model.key_env = 'OF_MINE'" in result.err and not run_folders(outputs)
        )
    held = [
        file
        for file in outputs.rglob("*")
        if file.is_file() and KEY.encode() in file.read_bytes()
    ]
    assert held == [] and len(run_folders(outputs)) == 1


def test_no_secret_lands_in_a_file_and_another_one_is_the_same_run(
    posbench: Call, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    fields = "{user_token: SECRET-1, top_k: 1, nested: {api_key: SECRET-2}}"
    few = ["task.limit=2", "stages=[evaluate,report]"]
    with serving() as server:
        server.echo = lambda header: f" {header} SECRET-1 SECRET-2"
        call = [*served(server.url)[:-1], *few]
        result = posbench(*call, f"model.extra_body={fields}")
        assert result.status == 0, result.err
        sent = server.bodies[-1]
        assert (
            sent["user_token"] == "SECRET-1" and sent["nested"]["api_key"] == "SECRET-2"
        )
        server.echo = lambda header: f" {header}"
        other = [f"model.extra_body={fields.replace('SECRET-1', 'SECRET-3')}"]
        again = posbench(*call, *other)
        assert "finished before" in again.out, again.err
    secrets = (KEY, "SECRET-1", "SECRET-2", "SECRET-3")
    for text in (result.out + result.err, again.out + again.err):
        assert not any(secret in text for secret in secrets)
    files = [file for file in outputs.rglob("*") if file.is_file()]
    held = [
        (file.name, secret)
        for file in files
        for secret in secrets
        if secret.encode() in file.read_bytes()
    ]
    assert held == []
    (folder,) = run_folders(outputs)
    config = yaml.safe_load((folder / "config.yaml").read_text())["model"]["extra_body"]
    assert config == {"user_token": "***", "top_k": 1, "nested": {"api_key": "***"}}


def test_rows_of_another_model_behind_the_name_are_refused(
    posbench: Call, outputs: Path
) -> None:
    """The server changes its model in the middle of a run, and between two sessions."""
    with serving() as server:

        def swap(prompt: str, n: int) -> str:
            if is_question(prompt) and len(server.asked) > 8:
                server.model = "fake-mini"
            return ""

        server.fault = swap
        call = served(server.url, "model.concurrency=1")
        first = posbench(*call)
        assert first.status == 2, first.err
        assert_refused(
            first.err, "model.served", "fake", allowed="fake-mini", hint="goes on"
        )
        kept = rows_of(outputs)
        assert 0 < len(kept) < PROMPTS and {r["server"] for r in kept} == {"fake fp_1"}
        second = posbench(*call)
        (folder,) = run_folders(outputs)
        assert second.status == 2 and rows_of(outputs) == kept, second.err
        assert_refused(
            second.err,
            "model.base_url",
            server.url,
            allowed="fake-mini",
            hint=str(folder),
        )
        server.fault = lambda prompt, n: ""
        server.model = "fake"
        assert posbench(*call).status == 0
    rows = rows_of(outputs)
    assert len(rows) == PROMPTS and {row["server"] for row in rows} == {"fake fp_1"}
    assert len({row["computation"] for row in rows}) == 1


def test_choices_of_words_are_read_by_letter_and_counted(
    posbench: Call, outputs: Path
) -> None:
    file = Path(__file__).parents[1] / "data" / "own" / "choices.jsonl"
    call = ["task=own_data", f"task.path={file}", "stages=[evaluate]", "model.api=chat"]
    with serving(ways=("first",)) as server:
        server.answer = lambda prompt: "The answer is B."
        server.first_tokens = {"The": -0.02, "A": -7.1, "B": -10.0}
        result = posbench(*served(server.url)[:3], *call)
    assert result.status == 0, result.err
    rows = rows_of(outputs)
    assert {(row["output"], row["by"]) for row in rows} == {("B", "letter")}
    assert_names(result.out, f"{len(rows)} letter")


def test_a_served_twin_stands_beside_the_model_in_process(
    posbench: Call, outputs: Path, tiny: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One config names both: the same prompts, the same replies, differences paired and zero."""
    few = [*TASK, "task.limit=4"]
    prompts = [e.prompt for e in config_of("model=tiny", *few).task.evaluation()]
    known = dict(zip(prompts, tiny.generate(prompts, max_new_tokens=1), strict=True))
    monkeypatch.setattr("tests.server.value", lambda prompt: known.get(prompt, ""))
    assert posbench("model=tiny", "method=none", "stages=[evaluate]", *few).status == 0
    with serving() as server:
        result = posbench(
            "model=tiny",
            f"model.base_url={server.url}",
            "model.served=fake",
            *few,
            "stages=[evaluate]",
        )
    assert result.status == 0, result.err
    # The fake one counts characters.
    assert_names(result.out, "server counted", "other tokens")
    runs = label_runs([ComparedRun.of(folder) for folder in run_folders(outputs)])
    assert {run.label for run in runs} == {"unmodified", "served"}
    found = differences(*runs)
    assert (found["pairs"], found["score"].value) == (12, 0)


def test_a_server_is_compared_with_its_checkpoint_before_the_run(
    posbench: Call, outputs: Path, tiny: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [*TASK, "task.limit=2", "stages=[evaluate]"]
    lock = threading.Lock()

    def reply(prompt: str) -> str:
        with lock:
            return str(tiny.generate([prompt], max_new_tokens=40)[0])

    monkeypatch.setattr("tests.server.value", reply)
    with serving() as server:
        call = ["model=tiny", f"model.base_url={server.url}", "model.served=fake"]
        server.has_penalties = True
        same = posbench(*call, "model.name=same", *few)
        # The penalties of its checkpoint stay, whatever is sent.
        server.refused_fields = ("repetition_penalty", "repeat_penalty")
        server.refused_fields += ("generation_config",)
        other = posbench(*call, "model.name=other", *few)
    assert (same.status, other.status) == (0, 0), same.err + other.err
    assert_names(same.out, "3 of 3", "posbench://tiny", "in process")
    assert "differ from" not in " ".join(same.out.split())
    assert_names(other.out, "3 of 3", "differ", "penalised", "posbench://tiny")
    for folder in run_folders(outputs):
        facts = json.loads((folder / "provenance.json").read_text())
        assert ("differ" in facts["served_replies"]) == ("other__" in folder.name)


def test_without_its_checkpoint_the_run_says_that_a_server_was_not_compared(
    posbench: Call, checkpoint: Path, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(checkpoint, tokenizer)
    (tokenizer / "model.safetensors").unlink()
    with serving() as server:
        for path in ([], [f"model.path={tokenizer}"]):
            result = posbench(*served(server.url, "task.limit=1", *path))
            assert result.status == 0, result.err
            assert_names(result.out, "not be compared", "model.path")


def test_choices_say_how_they_were_read(posbench: Call, outputs: Path) -> None:
    file = Path(__file__).parents[1] / "data" / "own" / "choices.jsonl"
    with serving(ways=("echo",)) as server:
        result = posbench(
            *served(server.url)[:3],
            "task=own_data",
            f"task.path={file}",
            "stages=[evaluate]",
        )
    assert result.status == 0, result.err
    for row in (rows := rows_of(outputs)):
        assert len(row["loglikelihoods"]) > 2 and row["by"] == "log-likelihoods"
    assert_names(result.out, f"{len(rows)} log-likelihoods")


REFUSED = [
    # the argument; what is refused, allowed, and the next step
    (
        "model.base_url=http://me:secret@host/v1",
        "http://***@host",
        ("user", "password", "query"),
        "OPENAI_API_KEY",
    ),
    (
        "model.base_url=ftp://host",
        "ftp://host",
        "http://HOST:PORT/v1",
        "model.base_url=http://localhost:8000/v1",
    ),
    (
        "model.base_url=http://host:port/v1",
        "http://host:port/v1",
        "http://HOST:PORT/v1",
        "model.base_url=http://localhost:8000/v1",
    ),
    ("method=scale_channel", "scale_channel", "none", "posbench export"),
    ("stages=[search]", ["search"], ("evaluate", "report"), "stages=[evaluate,report]"),
    (
        "stages=[intervene,report]",
        ["intervene", "report"],
        ("evaluate", "report"),
        "stages=[evaluate,report]",
    ),
    ("study=rollout", "rollout", ("evaluate", "report"), ("study", "model.base_url")),
    ("search=genetic", "genetic", ("evaluate", "report"), ("search", "model.base_url")),
]


@pytest.mark.parametrize(("argument", "value", "allowed", "hint"), REFUSED)
def test_what_a_server_cannot_do_is_refused_by_name(
    argument: str, value: object, allowed: Tokens, hint: Tokens
) -> None:
    field, _, _ = argument.partition("=")
    with refused(field, value, allowed=allowed, hint=hint) as caught:
        config_of(*served(URL)[:-1], argument)
    assert "secret" not in str(caught.value)


def test_an_address_may_stand_in_place_of_a_models_name() -> None:
    assert config_of(f"model={URL}", *TASK).model.base_url == URL
    address = "localhost:8000/v1"
    for typed in (address, f"tiny,{address}"):
        with refused(
            "model", address, allowed="http://", hint=f"model=http://{address}"
        ):
            config_of(f"model={typed}", *TASK)
    both = f"tiny,{URL}"
    with refused("model", both, allowed="addresses alone", hint="own command"):
        config_of(f"model={both}", *TASK)


def test_settings_of_a_server_want_one() -> None:
    with refused("model.api", "chat", allowed="auto", hint="model.base_url=URL"):
        config_of("model=tiny", "model.api=chat")
    with refused(
        "model.path",
        None,
        allowed=("directory", "hub id"),
        hint="model.base_url=http://localhost:8000/v1",
    ):
        config_of("model=endpoint")


def test_what_cannot_be_cut_or_asked_is_refused_before_the_run() -> None:
    """Without a tokenizer no prompt is cut; defaults change with a word, what was typed is refused.

    With name and API typed, no server is needed for that.
    """
    call = [*served(URL)[:3], "model.api=completions"]
    long = [
        "task=own_data",
        f"task.path={paths.PACKAGE.parent / 'tests/data/own/long_text.jsonl'}",
    ]
    for name, typed, allowed in (
        ("task.truncation", "middle", "refuse"),
        ("task.repetition_penalty", 2.0, "1.0"),
    ):
        hint = f"{name}={allowed.removesuffix('.0')}"
        with refused(name, typed, allowed=allowed, hint=hint):
            prepare(compose_one(*call, *long, f"{name}={typed}"))
    warnings = "\n".join(prepare(compose_one(*call, *long)).warnings)
    assert_line_names(warnings, "prompts", "plain text")


def test_an_address_alone_means_what_is_served_there(
    posbench: Call, outputs: Path
) -> None:
    """The run is named by the server's model and asks the task as it is, not in the words of the toy."""
    assert (
        config_of(f"model.base_url={URL}").task
        == config_of("model=endpoint", f"model.base_url={URL}").task
    )
    small = [*TASK, "task.limit=1", "stages=[evaluate]"]
    with serving() as server:
        server.listed = [{"id": "org/fake:8b", "object": "model"}]
        alone = posbench(f"model.base_url={server.url}", *small)
        assert alone.status == 0, alone.err
        assert {body["model"] for body in server.bodies} == {"org/fake:8b"}
        # The same run, typed in other ways.
        for name in ("model.served=org/fake:8b", "model.name=org/fake:8b"):
            again = posbench(
                "model=endpoint", f"model.base_url={server.url}", name, *small
            )
            assert "finished before" in again.out, again.err
    (folder,) = run_folders(outputs)
    assert folder.name.startswith("fake-8b__none__")


@pytest.mark.parametrize("listed", [["fake", "other"], []])
def test_of_several_models_the_user_chooses(posbench: Call, listed: list[str]) -> None:
    with serving() as server:
        server.listed = [{"id": name} for name in listed] or None
        result = posbench(f"model.base_url={server.url}", *TASK)
        assert_refused(
            result.err,
            "model.served",
            None,
            allowed=listed or ["none", "404", "Not Found"],
            hint="model.served=ID",
        )
        assert result.status == 2 and not server.bodies
        named = posbench(
            f"model.base_url={server.url}", "model.served=fake", *TASK, "task.limit=1"
        )
    assert named.status == 0, named.err


def test_a_known_model_is_found_under_its_name_at_the_server(posbench: Call) -> None:
    call = ["model=tiny", *TASK, "task.limit=1", "stages=[evaluate]"]
    with serving() as server:
        for listed in (["a", "tiny"], ["only"]):
            server.listed = [{"id": name} for name in listed]
            result = posbench(f"model.base_url={server.url}", *call)
            assert result.status == 0, result.err
            assert server.bodies[-1]["model"] == listed[-1]


def test_what_is_served_is_the_identity_and_how_it_is_asked_is_not() -> None:
    def who(*args: str) -> dict[str, Any]:
        return identity(config_of(*served(URL), *args), ())

    same = (
        "model.concurrency=2",
        "model.retries=0",
        "model.timeout=3",
        "runtime.batch_size=3",
    )
    assert all(who(arg) == who() for arg in same)
    others = (
        "model.served=other",
        "model.base_url=http://localhost:9/v1",
        "model.api=chat",
        "model.temperature=0.5",
        "model.thinking_tokens=9",
        "model.extra_body.reasoning_effort=low",
    )
    assert all(who(arg) != who() for arg in others)


def test_a_server_that_is_away_is_told_in_one_line(
    posbench: Call, outputs: Path
) -> None:
    result = posbench(*served(URL))
    assert (
        result.status == 3
        and result.err.count("\n") == 1
        and f"model.base_url = '{URL}'" in result.err
    )
    assert not run_folders(outputs)
    for api in ("auto", "chat"):
        checked = posbench("validate", *served(URL), f"model.api={api}", verb=True)
        assert checked.status == 3 and f"model.base_url = '{URL}'" in checked.err


def test_a_wrong_model_is_told_with_those_of_the_server(posbench: Call) -> None:
    with serving(lambda prompt, n: "404") as server:
        result = posbench(*served(server.url, "model.served=nope"))
    assert (
        result.status == 2
        and "model.served = 'nope'" in result.err
        and "lists fake" in result.err
    )


def test_a_server_that_wants_a_key_says_so_with_its_list(posbench: Call) -> None:
    with serving() as server:
        server.list_refusal = 401
        refused_run = posbench(f"model.base_url={server.url}", *TASK)
    assert_refused(
        refused_run.err, "model.key_env", "OPENAI_API_KEY", allowed="key", hint="export"
    )


def test_an_address_that_is_not_where_the_api_is_has_its_own_step(
    posbench: Call,
) -> None:
    with serving() as server, serving() as other:
        whole = f"{server.url}/chat/completions"
        named = posbench(*served(whole, "model.api=chat"))
        server.moved_to = other.url.removesuffix("/v1")
        moved = posbench(*served(server.url))
    assert named.status == moved.status == 2
    assert_line_names(named.err, f"set model.base_url={server.url};")
    assert_line_names(moved.err, f"set model.base_url={other.url};")


def test_a_run_says_and_records_how_the_server_decodes(
    posbench: Call, outputs: Path
) -> None:
    def fault(prompt: str, n: int) -> str:
        fails = "key" in prompt and n == 0 and sum(map(ord, prompt)) % 3 == 0
        return "500" if fails else ""

    args = ("model.retries=0", "task.limit=4")
    with serving(fault) as server:
        server.refused_fields = ("min_p", "repetition_penalty", "repeat_penalty")
        server.refused_fields += ("generation_config",)
        first = posbench(*served(server.url, *args))
    assert first.status == 1, first.err
    assert_names(first.out, *server.refused_fields, "not sent")
    (folder,) = run_folders(outputs)
    decoding = json.loads((folder / "provenance.json").read_text())["decoding"]
    assert set(decoding["left_out"]) == set(server.refused_fields)
    body = server.bodies[-1]
    assert {name: body[name] for name in decoding["sent"]} == decoding["sent"]
    # The rest of the rows are not asked of a server that decodes otherwise.
    port = server.server_address[1]
    with serving(port=port) as other:
        again = posbench(*served(server.url, *args))
    assert again.status == 2 and not other.asked, again.err
    assert_refused(
        again.err,
        "model.base_url",
        server.url,
        allowed="repetition_penalty",
        hint=str(folder),
    )
    with serving(port=port) as same:
        same.refused_fields = server.refused_fields
        assert posbench(*served(server.url, *args)).status == 0


def test_messages_are_sent_with_the_system_message_apart(
    posbench: Call, outputs: Path
) -> None:
    with serving() as server:
        assert (
            posbench(*served(server.url, "model.api=chat", "task.limit=1")).status == 0
        )
    assert [m["role"] for m in server.bodies[-1]["messages"]] == ["user"]
    assert {row["output"] for row in rows_of(outputs)} <= {
        value(p) for p in server.asked
    }
