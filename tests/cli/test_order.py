"""``posbench order`` on logs that simulated readers answer behind a server."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from posbench.cli.order import order_glance
from posbench.studies.order import OrderStudy
from posbench.tasks import Example
from posbench.tasks.logs import read
from tests.conftest import Result, run_folders
from tests.messages import assert_line_names, assert_names, assert_refused
from tests.readers import CURVES, reading, reply_of, write_log
from tests.report.test_explorer import data_of

Call = Callable[..., Result]
POLICIES = (
    "study.policies=[reversed,best_first,both_ends,top_3,question_first_and_last]"
)
PROMPT_PRICE, REPLY_PRICE = 1.0, 2.0
PRICE = f"model.price=[{PROMPT_PRICE},{REPLY_PRICE}]"


def facts_of(folder: Path) -> dict[str, Any]:
    (file,) = (folder / "outputs" / "order").glob("*/order.json")
    facts: dict[str, Any] = json.loads(file.read_text())
    return facts


def accuracy_by_hand(
    log: Path,
    curve: str,
    seed: int,
    names: set[str],
    arrange: Callable[[list[Any]], list[Any]],
) -> float:
    """Share of questions that the reader answers on documents in an order made here, without posbench."""
    right = []
    for line in map(json.loads, log.read_text().splitlines()):
        if line["id"] in names:
            texts = [document["text"] for document in arrange(line["contexts"])]
            prompt = "\n".join([*texts, line["query"]])
            reply = reply_of(prompt, CURVES[curve], seed)
            right.append(bool(re.search(rf"\b{line['answers'][0]}\b", reply)))
    return 100 * sum(right) / len(right)


def test_every_policy_is_measured_on_the_prompts_that_its_rule_makes(
    posbench: Call, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    write_log(log, 70, 7, seed=3)
    with reading(CURVES["recency"], 3) as server:
        args = ("order", str(log), f"model={server.url}", POLICIES, PRICE, "--yes")
        result = posbench(*args)
        num_prompts = len(server.prompts)
        again = posbench(*args)
        assert len(server.prompts) == num_prompts, (
            "a finished comparison asks nothing again"
        )
        totals = dict(server.totals)
    assert result.status == 0, result.err
    assert again.status == 0
    # The study's own result, with another page and another next step, is not shown.
    assert len(re.findall(r"^report: ", result.out, re.MULTILINE)) == 1
    assert len(re.findall(r"^next: ", result.out, re.MULTILINE)) <= 1
    facts = facts_of(tmp_path)
    policies = {row["name"]: row for row in facts["policies"]}
    (file,) = (tmp_path / "outputs/order").glob("*/questions.csv")
    # What a policy makes right is no matter of the model or the question.
    helped = {"right in another order", "right with fewer documents"}
    helped |= {"right with a repetition", "right", "gold not retrieved"}
    with file.open() as table:
        found = [row["cause"] for row in csv.DictReader(table) if row["right_under"]]
    assert found and {*found} <= helped and "right in another order" in found
    assert policies["best_first"]["same_as"] == "as_retrieved"
    assert policies["best_first"]["accuracy"] == policies["as_retrieved"]["accuracy"]
    run = Path(facts["run"])
    if not run.is_absolute():
        run = tmp_path / run
    rows = [
        json.loads(line)
        for line in (run / "predictions.jsonl").read_text().splitlines()
    ]
    arrangements: dict[str, Callable[[list[Any]], list[Any]]] = {
        "as_retrieved": lambda documents: documents,
        "reversed": lambda documents: documents[::-1],
        "top_3": lambda documents: documents[:3],
    }
    for name, arrange in arrangements.items():
        names = {row["id"] for row in rows if row["method"] == name}
        by_hand = accuracy_by_hand(log, "recency", 3, names, arrange)
        assert policies[name]["accuracy"] == pytest.approx(by_hand, abs=0.01)
    assert (facts["verdict"], facts["policy"]) == ("use", "reversed")
    assert "documents[::-1]" in result.out
    # The page shows every policy's reply to a question, and links the run.
    (page,) = (tmp_path / "outputs" / "order").glob("*/report.html")
    data = data_of(page.read_text())
    replies = {
        (method, question[0])
        for question in data["questions"]
        for method, reply in zip(data["methods"], question[3], strict=True)
        if reply
    }
    assert replies == {(row["method"], row["id"]) for row in rows}
    assert f'href="../v001/{run.name}/' in page.read_text()
    # The estimate before the first prompt, against the tokens that the server counted.
    (estimate,) = re.findall(r"about ([0-9.]+) usd", result.out)[:1]
    cost = (totals["read"] * PROMPT_PRICE + totals["written"] * REPLY_PRICE) / 1e6
    assert float(estimate) >= 0.95 * cost
    if all(row["in_race"] for row in facts["policies"]):
        assert float(estimate) == pytest.approx(cost, rel=0.05)


def test_a_flat_reader_is_left_alone_and_the_json_is_printed(
    posbench: Call, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    write_log(log, 60, 5, seed=1)
    with reading(CURVES["flat_95"], 1) as server:
        result = posbench(
            "order",
            str(log),
            f"model={server.url}",
            "study.policies=[reversed,both_ends]",
            "--yes",
            "--json",
        )
    assert result.status == 0, result.err
    printed = json.loads(result.out)
    assert printed == facts_of(tmp_path)
    # An order changes nothing, so that all replies are the same.
    assert {row["flip_rate"] for row in printed["policies"]} == {0.0}
    assert printed["verdict"] in ("leave", "cannot tell")
    assert printed["policy"] == "as_retrieved"
    # A budget would buy nothing more where all questions were asked.
    glance = order_glance({**printed, "verdict": "cannot tell"})
    assert not printed["stopped"] and "these are used up" in glance.purpose
    # More questions would not tell where the references are spelt as no reply is.
    wrong = [{**row, "accuracy": 0.0} for row in printed["policies"]]
    facts = {**printed, "verdict": "cannot tell", "policies": wrong}
    glance = order_glance({**facts, "needed_questions": 200})
    assert_names(glance.sentence, "No reply", "answers")
    assert "200" not in glance.details + glance.purpose


def test_a_log_is_read_and_its_prompts_are_made_once(
    posbench: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a file changes: then both are made again."""
    log = tmp_path / "log.jsonl"
    write_log(log, 20, 5, seed=3)
    made: Counter[str] = Counter()

    def count(place: Any, name: str) -> None:
        call = getattr(place, name)

        def counted(*args: Any) -> Any:
            made[name] += 1
            return call(*args)

        monkeypatch.setattr(place, name, counted)

    count(read, "read_entries")
    count(OrderStudy, "_prepare")
    with reading(CURVES["recency"], 3) as server:
        few = ("study.policies=[reversed]", "study.probes=0", "--yes")
        args = ("order", str(log), f"model={server.url}", *few)
        assert posbench(*args).status == 0
        assert made == {"read_entries": 1, "_prepare": 1}
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(lines[:-1]))
        assert posbench(*args).status == 0
    assert made == {"read_entries": 2, "_prepare": 2}
    files = (tmp_path / "outputs/order").glob("*/order.json")
    assert sorted(json.loads(f.read_text())["questions"] for f in files) == [19, 20]


def test_causes_tell_apart_what_no_order_can_mend(
    posbench: Call, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    write_log(log, 40, 5, seed=2)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    # Of every fourth question the gold document was not retrieved.
    for line in lines[::4]:
        line["gold_doc_id"] = "none"
        line["contexts"] = [
            d for d in line["contexts"] if line["answers"][0] not in d["text"]
        ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with reading(lambda index, count: 1.0, 2) as server:
        result = posbench(
            "order",
            str(log),
            f"model={server.url}",
            "study.policies=[reversed]",
            "study.held_back=0",
            "--yes",
        )
    assert result.status == 0, result.err
    facts = facts_of(tmp_path)
    assert facts["probes"]["closed_book"]["value"] == 0
    (file,) = (tmp_path / "outputs" / "order").glob("*/questions.csv")
    with file.open() as table:
        causes = {row["id"]: row["cause"] for row in csv.DictReader(table)}
    for number in range(40):
        expected = "right"
        if number % 4 == 0:
            expected = "gold not retrieved"
        if f"q{number}" in causes:
            assert causes[f"q{number}"] == expected, number


def test_a_budget_of_tokens_is_kept(posbench: Call, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    write_log(log, 60, 6, seed=6)
    with reading(CURVES["primacy"], 6) as server:
        result = posbench(
            "order",
            str(log),
            f"model={server.url}",
            "model.concurrency=1",
            "study.policies=[reversed]",
            "budget=5ktok",
        )
        totals = dict(server.totals)
    assert result.status == 0, result.err
    # One request may begin before the limit is known to be reached.
    assert 2500 < totals["read"] + totals["written"] <= 5200
    facts = facts_of(tmp_path)
    assert 0 < facts["policies"][0]["n"] < 60
    (folder,) = (tmp_path / "outputs" / "order").glob("v*/reader*")
    rows = [
        json.loads(line)
        for line in (folder / "predictions.jsonl").read_text().splitlines()
    ]
    assert "a larger budget goes on" in result.out
    # All that was paid for is kept.
    assert len(rows) == len(server.prompts)
    with reading(CURVES["primacy"], 6) as second:
        more = posbench(
            "order",
            str(log),
            f"model={second.url}",
            "model.concurrency=1",
            "study.policies=[reversed]",
            "budget=7ktok",
        )
        assert more.status == 0, more.err
        assert second.prompts


@pytest.mark.parametrize(
    ("seconds", "size"), [(1.0, 10), (20.0, 3), (500.0, 1)]
)  # of a question under all policies
def test_a_round_takes_a_quarter_of_the_race_at_most(
    seconds: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = SimpleNamespace(total=5.0)
    run: Any = SimpleNamespace(deadline=SimpleNamespace(watch=watch, seconds=400.0))
    examples = [Example(id=str(n), prompt="p", answers=("a",)) for n in range(3)]
    asked = []

    def replies(self: OrderStudy, *args: Any) -> None:
        watch.total += seconds
        asked.extend(args[2])

    monkeypatch.setattr(OrderStudy, "_replies", replies)
    assert OrderStudy()._round_size(run, {}, examples) == size
    assert asked == examples[:1]
    run.deadline = None
    assert OrderStudy()._round_size(run, {}, examples) == OrderStudy().round_questions


@pytest.mark.parametrize("budget", ["500prompts", "2usd", "3Mtok"])
def test_a_budget_that_would_limit_nothing_is_refused(
    posbench: Call, tmp_path: Path, budget: str
) -> None:
    log = tmp_path / "log.jsonl"
    write_log(log, 12, 4, seed=0)
    with reading(CURVES["primacy"], 0) as server:
        model = "tiny" if budget == "3Mtok" else server.url
        result = posbench(
            "order", str(log), f"model={model}", f"budget={budget}", "--yes"
        )
        assert not server.prompts
    assert result.status == 2
    assert "budget" in result.err


def test_a_question_at_several_positions_keeps_its_ranks(posbench: Call) -> None:
    """Accuracy by rank, recomputed from the rows of key-value pairs, of which each question is asked at each place."""
    result = posbench(
        "study=order",
        "model=tiny",
        "task.limit=6",
        "task.positions=[0,8,15]",
        "task.pairs=16",
        "study.policies=[documents_twice]",
        "study.held_back=0",
        "study.probes=2",
    )
    assert result.status == 0, result.err
    folder = Path(result.out.split("report: ")[-1].split("/report.html")[0].strip())
    rows = [
        json.loads(line)
        for line in (folder / "predictions.jsonl").read_text().splitlines()
    ]
    with (folder / "ranks.csv").open() as file:
        table = [row for row in csv.DictReader(file) if row["policy"] == "as_retrieved"]
    assert [row["rank"] for row in table] == ["1", "9", "16"]
    for row in table:
        own = [
            r["scores"]["accuracy"]
            for r in rows
            if r["method"] == "as_retrieved"
            and r["gold_position"] == int(row["rank"]) - 1
        ]
        assert float(row["accuracy"]) == pytest.approx(sum(own) / len(own))


def test_where_the_task_places_the_gold_item_orders_are_left_out(
    posbench: Call,
) -> None:
    """The average over positions of another order is that of other positions: no gain of the order."""
    args = ["study=order", "model=tiny", "task.limit=6", "task.pairs=16"]
    args += ["task.positions=[0,8,15]", "study.probes=0", "study.held_back=0"]
    result = posbench(*args)
    assert result.status == 0, result.err
    (line,) = re.findall(".*the task places the gold item.*", result.out)
    folder = Path(result.out.split("report: ")[-1].split("/report.html")[0].strip())
    with (folder / "policies.csv").open() as file:
        raced = {row["name"] for row in csv.DictReader(file)}
    for name in ("reversed", "both_ends", "shuffled", "top_3"):
        assert name in line and name not in raced
    assert "documents_twice" in raced
    refused = posbench(*args, "study.policies=[both_ends]")
    assert refused.status == 2 and "study.policies = 'both_ends'" in refused.err
    for method in ("both_ends", "top_3"):
        alone = posbench(f"method={method}", *args[1:4])
        assert alone.status == 2 and f"method = '{method}'" in alone.err


def test_three_orders_vote(posbench: Call, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    write_log(log, 40, 7, seed=5)
    with reading(CURVES["inverted_u"], 5) as server:
        result = posbench(
            "order",
            str(log),
            f"model={server.url}",
            "study.policies=[reversed,shuffled]",
            "study.vote=true",
            "study.held_back=0",
            "study.probes=0",
            "--yes",
        )
    assert result.status == 0, result.err
    facts = facts_of(tmp_path)
    policies = {row["name"]: row for row in facts["policies"]}
    (folder,) = (tmp_path / "outputs" / "order").glob("v*/reader*")
    rows = map(json.loads, (folder / "predictions.jsonl").read_text().splitlines())
    right: dict[str, list[float]] = {}
    outputs: dict[str, list[str]] = {}
    for row in rows:
        right.setdefault(row["id"], []).append(row["scores"]["accuracy"])
        outputs.setdefault(row["id"], []).append(row["output"])
    votes = []
    for name, texts in outputs.items():
        if len(texts) == 3:
            # Two equal replies of three, or the first of three different ones, which is as retrieved.
            winner = max(texts, key=texts.count)
            votes.append(right[name][texts.index(winner)])
    assert policies["vote"]["accuracy"] == pytest.approx(
        100 * sum(votes) / len(votes), abs=0.01
    )
    assert policies["vote"]["tokens"] == pytest.approx(
        sum(
            policies[name]["tokens"]
            for name in ("as_retrieved", "reversed", "shuffled")
        )
    )


def test_more_room_for_replies_is_what_the_window_leaves(
    posbench: Call, tmp_path: Path
) -> None:
    """The embedded model rambles up to the limit; four times that and a prompt are more than its 512 tokens."""
    log = tmp_path / "log.jsonl"
    row = {"contexts": ["A is red.", "B is blue."], "answers": ["red"]}
    lines = [{"question": f"What is the colour of {i}?", **row} for i in range(4)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    typed = ("order", str(log), "model=tiny", "study.policies=[reversed]")
    result = posbench(*typed, "task.max_new_tokens=100", "budget=60s")
    (step,) = re.findall(r"next: posbench (.*?)  \(with more room", result.out)
    tokens = int(re.findall(r"task\.max_new_tokens=(\d+)", step)[-1])
    assert 100 < tokens < 400
    longer = step.replace(f"tokens={tokens}", f"tokens={tokens + 1}")
    assert_refused(posbench(*shlex.split(longer)).err, "prompt length")
    filled = posbench(*shlex.split(step))
    assert filled.status == 0, filled.err
    assert_line_names(
        filled.out, "next: posbench", f"task.max_new_tokens={tokens}", "no more room"
    )


def test_without_references_nothing_is_judged(posbench: Call, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    write_log(log, 20, 5, seed=4)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    references = tmp_path / "references.csv"
    with references.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "answers"])
        writer.writerows([line["query"], line["answers"][0]] for line in lines)
    for line in lines:
        del line["answers"]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with reading(CURVES["primacy"], 4) as server:
        common = (
            "order",
            str(log),
            f"model={server.url}",
            "study.policies=[reversed]",
            "--yes",
        )
        result = posbench(*common)
        assert result.status == 0, result.err
        facts = facts_of(tmp_path)
        assert facts["verdict"] == "cannot tell"
        assert facts["policies"][1]["accuracy"] is None
        assert facts["policies"][1]["changed_replies"] > 0
        assert "holds no right answers" in result.out
        assert " references=FILE  (with the right answers in FILE)" in result.out
        joined = posbench(*common, f"references={references}")
    assert joined.status == 0, joined.err
    assert "%" not in joined.err
    newest = max(
        (tmp_path / "outputs" / "order").glob("*/order.json"),
        key=lambda f: f.stat().st_mtime_ns,
    )
    assert json.loads(newest.read_text())["policies"][1]["accuracy"] is not None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), ("order", "one log")),
        (("log.jsonl",), ("model",)),
        (
            ("log.jsonl", "model=tiny", "study.policies=[scale_channel]"),
            ("study.policies", "scale_channel"),
        ),
        (
            ("log.jsonl", "model=tiny", "study.policies=[revers]"),
            ("study.policies", "revers", "reversed"),
        ),
        (
            ("log.jsonl", "model=localhost:8123/v1"),
            ("model", "http://localhost:8123/v1"),
        ),
        (("missing.jsonl", "model=tiny"), ("missing.jsonl",)),
    ],
)
def test_bad_input_is_one_line(
    posbench: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "log.jsonl", 8, 4, seed=0)
    result = posbench("order", *args)
    assert result.status == 2
    for word in words:
        assert word in result.err


def test_an_unknown_policy_is_refused_before_a_server_is_asked(
    posbench: Call, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    write_log(log, 8, 4, seed=0)
    with reading(CURVES["primacy"], 4) as server:
        args = (f"model={server.url}", "--yes", "study.policies=[revers]")
        refused = posbench("order", str(log), *args)
    assert refused.status == 2
    assert_refused(refused.err, "study.policies", "revers", allowed="reversed")


@pytest.fixture
def faulty_log(tmp_path: Path) -> Path:
    """A log of six lines with three faults: a score that is NaN, one that is a word, a single document."""
    log = tmp_path / "log.jsonl"
    row = {"question": "Who?", "answers": ["a"], "contexts": ["a", "b", "c"]}
    rows = [{**row, "question": f"Who is {n}?"} for n in range(6)]
    rows[1] |= {"scores": [0.9, float("nan"), 0.1]}
    rows[2] |= {"scores": [0.9, "high", 0.1]}
    rows[3] |= {"contexts": ["a"]}
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return log


def test_what_was_left_out_of_a_log_stays_on_the_page_of_a_run(
    posbench: Call, faulty_log: Path, outputs: Path
) -> None:
    source = ("task=retrieval_log", f"task.path={faulty_log}")
    with reading(CURVES["primacy"], 0) as server:
        result = posbench(f"model.base_url={server.url}", *source, "method=none")
        assert result.status == 0, result.err
    (run,) = run_folders(outputs)
    page = (run / "report.html").read_text()
    for text in (
        page,
        json.dumps(json.loads((run / "prompts.json").read_text())["notes"]),
    ):
        assert "1 of 6 lines skipped (score: not a number)" in text
        assert "1 of 5 questions have a single document" in text
    assert posbench("audit", str(run), verb=True).status == 0


def test_what_was_left_out_of_a_log_is_said(
    posbench: Call, faulty_log: Path, tmp_path: Path
) -> None:
    """Before anything is asked, in order.json and on the page."""
    few = ("study.policies=[reversed]", "study.probes=0", "--yes")
    with reading(CURVES["primacy"], 0) as server:
        result = posbench("order", str(faulty_log), f"model={server.url}", *few)
    assert result.status == 0, result.err
    (page,) = (tmp_path / "outputs/order").glob("*/report.html")
    said = {
        "terminal": " ".join(result.out.partition("order: ")[0].split()),
        "order.json": "\n".join(facts_of(tmp_path)["notes"]),
        "page": page.read_text(),
    }
    for place, text in said.items():
        assert "1 of 6 lines, the first is line 2" in text, place
        assert "1 of 6 lines skipped (score: not a number)" in text, place
        assert "1 of 5 questions have a single document" in text, place


@pytest.mark.parametrize(
    ("num_documents", "policies", "field", "allowed", "hint"),
    [
        (1, "", "task", ("all 6", "several documents"), "study.policies"),
        (1, "reversed", "study.policies", "reversed", "study.policies"),
        (3, "best_first", "study.policies", "best_first", "study.policies"),
    ],
)
def test_a_comparison_of_equal_prompts_is_refused(
    posbench: Call,
    tmp_path: Path,
    num_documents: int,
    policies: str,
    field: str,
    allowed: tuple[str, ...],
    hint: str,
) -> None:
    log = tmp_path / "log.jsonl"
    documents = ["a", "b", "c"][:num_documents]
    row = {"answers": ["a"], "contexts": documents}
    rows = [{"question": f"Who is {n}?", **row} for n in range(6)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with reading(CURVES["primacy"], 0) as server:
        args = [f"model={server.url}", "--yes"]
        args += [f"study.policies=[{policies}]"] if policies else []
        result = posbench("order", str(log), *args)
        assert not server.prompts
    assert result.status == 2
    assert_refused(result.err, field, allowed=allowed, hint=hint)
    assert not (tmp_path / "outputs").exists()


LANGCHAIN_ORDER_OF_EIGHT = (1, 3, 5, 7, 6, 4, 2, 0)
"""From the recorded outputs of LongContextReorder: the ranks, from 0, at the places of the new order."""
ARRANGED: dict[str, Callable[[int], int | None]] = {
    "as_retrieved": lambda rank: rank,
    "reversed": lambda rank: 7 - rank,
    "both_ends": LANGCHAIN_ORDER_OF_EIGHT.index,
    "top_1": lambda rank: rank if rank < 1 else None,
    "top_3": lambda rank: rank if rank < 3 else None,
}
"""The place of a document of a rank, from 0, of eight documents; None where it is cut away."""
SHOWN = {"top_1": 1, "top_3": 3}


def expected_accuracy(log: Path, kind: str, policy: str) -> float:
    """Probability of a right answer under a policy, over the questions of a log, by the reader's curve."""
    total = 0.0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        gold = [
            line["answers"][0] in document["text"] for document in line["contexts"]
        ].index(True)
        place = ARRANGED[policy](gold)
        if place is not None:
            total += CURVES[kind](place, SHOWN.get(policy, 8))
    return total / len(lines)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(CURVES))
def test_the_right_policy_in_18_of_20_seeds(
    posbench: Call, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is within a point of the best by the reader's curve; a flat reader is sent nowhere."""
    num_right = 0
    num_covered = 0
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        monkeypatch.chdir(folder)
        log = folder / "log.jsonl"
        write_log(log, 800 if kind == "u" else 300, 8, seed)
        with reading(CURVES[kind], seed) as server:
            result = posbench(
                "order",
                str(log),
                f"model={server.url}",
                "--yes",
                "study.probes=0",
                "study.policies=[reversed,both_ends,top_1,top_3]",
                f"runtime.outputs={folder}/outputs",
                verb=True,
            )
        assert result.status == 0, result.err
        facts = facts_of(folder)
        expected = {name: expected_accuracy(log, kind, name) for name in ARRANGED}
        is_flat = kind.startswith("flat")
        if is_flat:
            num_right += facts["verdict"] != "use"
        else:
            num_right += expected[facts["policy"]] >= max(expected.values()) - 0.01
        rows = {row["name"]: row for row in facts["policies"]}
        num_covered += all(
            rows[name]["difference_low"] / 100 - 1e-9
            <= expected[name] - expected["as_retrieved"]
            <= rows[name]["difference_high"] / 100 + 1e-9
            for name in ARRANGED
            if name != "as_retrieved"
        )
    assert num_right >= (19 if is_flat else 18)
    assert num_covered >= 18


def test_policies_that_no_reply_was_read_under_are_named() -> None:
    columns = {"difference_low": -20.0, "difference_high": 20.0, "n": 9, "use": False}
    rows = [
        {"name": "as_retrieved", "difference": 0.0, "missing": 0.0, "same_as": None},
        {"name": "best_last", "difference": -5.0, "missing": 0.0, "same_as": None},
        {"name": "prompt_twice", "difference": None, "missing": 1.0, "same_as": None},
        {"name": "reversed", "difference": -5.0, "missing": 0.0, "same_as": "best_last"},
    ]  # fmt: skip
    table = pd.DataFrame([columns | row for row in rows])
    glance = OrderStudy().glance({"policies": table})
    assert glance is not None
    # Nothing is the best of those that gain nothing; intervals hold for the two that were raced.
    assert_names(glance.sentence, "none")
    assert "best_last" not in glance.sentence
    assert_names(glance.rule, "all 2 policies")
    assert_names(glance.details, "prompt_twice")
    # One that dropped out early has a larger difference, of other questions.
    leading = table[:2].assign(difference=[0.0, 5.0], leads=[False, True])
    early = table[3:].assign(difference=9.0, same_as=None, leads=False)
    glance = OrderStudy().glance({"policies": pd.concat([leading, early])})
    assert glance is not None
    assert_names(glance.sentence, "best_last")
    base = table[:2].assign(leads=[True, False])
    early["n"] = 4
    glance = OrderStudy().glance({"policies": pd.concat([base, early])})
    assert glance is not None and "reversed" not in str(glance)
    assert_names(glance.sentence, "none")
    unread = table[table["name"].isin(["as_retrieved", "prompt_twice"])]
    glance = OrderStudy().glance({"policies": unread})
    assert glance is not None and glance.word == "cannot tell"
