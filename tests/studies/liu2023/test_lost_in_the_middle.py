"""Liu et al. 2023 on simulated readers, recomputed by hand from rows and from runs of one length each."""

from __future__ import annotations

import csv
import html
import json
import random
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from liu2023 import lost_in_the_middle
from liu2023.lost_in_the_middle import (
    EFFECT_COLUMNS,
    VERDICT_COLUMNS,
    judge_claims,
)
from posbench.report.failures import RunExamples
from posbench.report.glance import run_glance
from posbench.run.folder import open_run_dir
from posbench.run.reply_rows import prompt_digest
from posbench.stats.bootstrap import Estimate, detectable
from posbench.stats.verdict import run_verdict
from posbench.studies.probes import question_alone, with_documents
from posbench.tasks import Example
from posbench.tasks.base import Split
from posbench.tasks.kv_retrieval import KVRetrieval
from posbench.tasks.nq_multidoc import NQMultiDoc
from tests.conftest import Result, run_folders
from tests.messages import assert_names
from tests.readers import CURVES, reading, reply_of
from tests.server import gold_position, right_value, serving

Call = Callable[..., Result]
DATA = Path(__file__).parents[2] / "data" / "nq_multidoc"
KV = [
    "study=lost_in_the_middle",
    "task.pairs=20",
    "task.prompt=compact",
    "task.records=words",
    "task.chat=false",
    "task.positions=[0,9,19]",
    "task.limit=24",
    "task.max_new_tokens=8",
    "runtime.resamples=200",
]
ON_TINY = ["model=tiny", "runtime.device=cpu", "runtime.threads=1"]
U_SHAPE = CURVES["u"]


def write_questions(path: Path, questions: int, documents: int) -> list[dict[str, Any]]:
    """Write a file of the benchmark's form whose questions the simulated readers understand; return its lines."""
    rng = random.Random(7)
    lines = []
    for number in range(questions):
        names = [f"item{number}x{k}" for k in range(documents)]
        texts = [f"The code of {n} is {rng.randrange(10**6, 10**7)}." for n in names]
        lines.append(
            {
                "question": f"What is the code of {names[0]}?",
                "answers": [texts[0].rstrip(".").split()[-1]],
                "ctxs": [
                    {"title": f"Sheet {k}", "text": text, "isgold": k == 0}
                    for k, text in enumerate(texts)
                ],
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def only_folder(outputs: Path, beginning: str = "") -> Path:
    (folder,) = [f for f in run_folders(outputs) if f.name.startswith(beginning)]
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (folder / "predictions.jsonl").read_text().splitlines()
    ]


def table_of(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def assert_every_question_is_whole(rows: list[dict[str, Any]]) -> int:
    """Every cell has the same questions; their number."""
    cells = Counter((row["subset"], row["gold_position"]) for row in rows)
    (count,) = set(cells.values())
    questions = defaultdict(set)
    for row in rows:
        questions[row["cluster"]].add((row["subset"], row["gold_position"]))
    assert set(map(len, questions.values())) == {len(cells)}
    return count


# Prompts


def test_baselines_ask_the_prompts_of_the_paper() -> None:
    file = str(DATA / "nq-open-20_total_documents_gold_at_0.first3.jsonl")
    common = {"path": file, "limit": 3}
    for positions in ((0,), (4,)):
        shown = NQMultiDoc(**common, documents=10, positions=positions).evaluation()
        closed = NQMultiDoc(**common, prompt="closed_book").evaluation()
        for example, official in zip(shown, closed, strict=True):
            alone = question_alone(example)
            assert alone.prompt == official.prompt
            assert alone.items == () and alone.gold_position is None
            assert alone.answers == official.answers
    oracle = NQMultiDoc(**common, prompt="oracle").evaluation()
    shown = NQMultiDoc(**common, documents=10, positions=(0,)).evaluation()
    for example, official in zip(shown, oracle, strict=True):
        assert with_documents(example, example.gold_positions).prompt == official.prompt


def test_a_question_in_front_of_the_documents_is_asked_without_them() -> None:
    file = str(DATA / "nq-open-20_total_documents_gold_at_0.first3.jsonl")
    (example,) = NQMultiDoc(
        path=file, documents=3, positions=(0,), limit=1
    ).evaluation()
    text = "who got the first nobel prize in physics"
    start = example.prompt.index("Write")
    moved = replace(example, question=(start, start + 5))
    alone = question_alone(moved)
    assert "Document [" not in alone.prompt
    assert alone.prompt.startswith("Write") and text in alone.prompt


# Numbers


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A reader with a U shape, asked by the experiment, and by a run of one length."""
    from posbench.cli.main import main

    root = tmp_path_factory.mktemp("served")
    lines = write_questions(root / "questions.jsonl", 60, 20)
    common = [f"task.path={root / 'questions.jsonl'}", "--yes"]
    with reading(U_SHAPE, 1) as server:
        url = f"model.base_url={server.url}"
        args = ["experiment=liu2023", url, "task.documents=20", *common]
        assert main([*args, f"runtime.outputs={root / 'study'}"]) == 0
        num_prompts = len(server.prompts)
        assert main([*args, f"runtime.outputs={root / 'study'}"]) == 0
        assert len(server.prompts) == num_prompts, "a finished run asks nothing again"
        plain = [
            "task=nq_multidoc",
            url,
            "task.documents=20",
            "task.reading=liu",
            "stages=[evaluate,report]",
            "task.positions=[0%,25%,50%,75%,100%]",
        ]
        assert main([*plain, *common, f"runtime.outputs={root / 'plain'}"]) == 0
    return {
        "lines": lines,
        "folder": only_folder(root / "study"),
        "plain": only_folder(root / "plain"),
    }


def test_its_prompts_can_be_shown_beside_their_replies(served: dict[str, Any]) -> None:
    rows = rows_of(served["folder"])
    run = open_run_dir(served["folder"])
    shown = RunExamples.of(run, run.config()).prompts
    assert {row["id"]: row["prompt"] for row in rows} == {
        name: prompt_digest(shown[name]) for name in shown
    }
    assert "closed_book/0-0" in shown


def test_accuracies_are_those_of_the_reader_on_prompts_made_here(
    served: dict[str, Any],
) -> None:
    cells = {
        (row["setting"], row["gold_position"]): row
        for row in table_of(served["folder"], "cells")
        if row["reading"] == "first line"
    }
    for documents, positions in ((10, (0, 2, 4, 6, 9)), (20, (0, 4, 9, 14, 19))):
        for position in positions:
            right = []
            for line in served["lines"]:
                gold, *others = [entry["text"] for entry in line["ctxs"]]
                texts = others[: documents - 1]
                texts.insert(position, gold)
                reply = reply_of("\n".join([*texts, line["question"]]), U_SHAPE, 1)
                right.append(line["answers"][0] in reply)
            cell = cells[f"{documents} documents", str(position)]
            assert float(cell["value"]) == pytest.approx(np.mean(right), abs=1e-6)
            assert int(cell["n"]) == 60
    assert float(cells["closed_book", "all"]["value"]) == 0
    alone = [
        line["answers"][0]
        in reply_of(f"{line['ctxs'][0]['text']}\n{line['question']}", U_SHAPE, 1)
        for line in served["lines"]
    ]
    assert float(cells["gold_alone", "all"]["value"]) == pytest.approx(np.mean(alone))


def test_a_length_has_the_verdict_of_a_run_of_that_length(
    served: dict[str, Any],
) -> None:
    metrics = pd.read_csv(served["plain"] / "metrics.csv", keep_default_na=False)
    numbers = ["value", "ci_low", "ci_high"]
    metrics[numbers] = metrics[numbers].apply(pd.to_numeric)
    verdict = run_verdict(metrics)
    assert verdict is not None and verdict.name == "bias"
    (row,) = [
        row
        for row in table_of(served["folder"], "verdicts")
        if row["items"] == "20" and row["reading"] == "first line"
    ]
    assert (row["verdict"], row["reason"]) == (verdict.name, verdict.reason)
    bias = metrics[metrics["metric"] == "position_bias"].iloc[0]
    for column in numbers:
        assert float(row[column]) == pytest.approx(bias[column], abs=1e-8)


def test_effects_are_paired_differences_of_the_rows(served: dict[str, Any]) -> None:
    scores: dict[tuple[str, Any, str], float] = {
        (row["subset"], row["gold_position"], row["cluster"]): row["scores"]["accuracy"]
        for row in rows_of(served["folder"])
    }
    questions = {question for _, _, question in scores}

    def mean(setting: str, *positions: int | None) -> float:
        return float(
            np.mean([scores[setting, p, q] for p in positions for q in questions])
        )

    ten, twenty = (0, 2, 4, 6, 9), (0, 4, 9, 14, 19)
    by_hand = {
        ("fewer_minus_more", "20"): mean("10 documents", *ten)
        - mean("20 documents", *twenty),
        ("closed_book_minus_middle", "20"): mean("closed_book", None)
        - mean("20 documents", 9),
        ("ends_minus_inner", "10"): mean("10 documents", 0, 9)
        - mean("10 documents", 2, 4, 6),
        ("primacy", "10"): mean("10 documents", 0) - mean("10 documents", 2, 4, 6),
        ("recency", "20"): mean("20 documents", 19) - mean("20 documents", 4, 9, 14),
        ("gold_alone_minus_closed_book", ""): mean("gold_alone", None)
        - mean("closed_book", None),
    }
    table = {
        (row["effect"], row["items"]): row
        for row in table_of(served["folder"], "effects")
        if row["reading"] == "first line"
    }
    for key, value in by_hand.items():
        assert float(table[key]["value"]) == pytest.approx(value, abs=1e-6), key
        assert float(table[key]["ci_low"]) <= value <= float(table[key]["ci_high"])


def test_the_share_of_the_window_is_that_of_the_counted_tokens(
    served: dict[str, Any],
) -> None:
    tokens = [
        row["prompt_tokens"]
        for row in rows_of(served["folder"])
        if row["subset"] == "20 documents"
    ]
    for row in table_of(served["folder"], "verdicts"):
        if row["items"] == "20":
            assert float(row["tokens"]) == pytest.approx(np.mean(tokens), abs=0.1)
            assert row["window"] == "100000"
            share = np.mean(tokens) / 100_000
            assert float(row["window_share"]) == pytest.approx(share, abs=1e-4)


def test_the_page_says_first_what_was_found_and_what_was_left_out(
    served: dict[str, Any],
) -> None:
    page = (served["folder"] / "report.html").read_text()
    answer = run_glance(served["folder"]).text
    assert_names(answer, "10 documents", "bias", "middle drop", "30 documents")
    assert_names(answer, "Left out", "task.documents=20")
    assert "10 documents (0.14 % of the window)" in answer
    assert run_glance(served["folder"]).sentence in html.unescape(page)
    assert page.index("Left out") < page.index("<table") < page.index("Liu et al. 2023")
    assert (served["folder"] / "figures" / "positions.svg").is_file()
    verdicts = {row["claim"]: row for row in table_of(served["folder"], "findings")}
    for documents in (10, 20):
        (row,) = [
            v
            for c, v in verdicts.items()
            if f"With {documents} documents acc" in c and "ends" in c
        ]
        assert row["verdict"] == "holds"
    (row,) = [v for c, v in verdicts.items() if "closed book (" in c]
    assert row["verdict"] == "contradicted"


def test_a_model_in_process_and_the_same_behind_a_server_have_one_verdict(
    posbench: Call, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of the first and the last pair, and of some in between, by their words."""

    def reply(prompt: str) -> str:
        pairs = re.findall(r'"(\w+)": "(\w+)"', prompt)
        is_end = gold_position(prompt) in (0, len(pairs) - 1)
        is_read = is_end or sum(map(ord, prompt)) % 3 == 0
        return right_value(prompt) if is_read else "bal"

    def reply_to_batch(lm: Any, task: Any, batch: Any, *_: Any) -> list[dict[str, Any]]:
        return [
            {"output": reply(e.prompt), "finish": "end", "outcome": "answered"}
            for e in batch
        ]

    with monkeypatch.context() as patched:
        patched.setattr("posbench.run.replies.reply_to_batch", reply_to_batch)
        result = posbench(*KV, *ON_TINY)
        assert result.status == 0, result.err
    with serving() as server:
        server.answer = reply
        result = posbench(*KV, f"model.base_url={server.url}")
        assert result.status == 0, result.err
    in_process = only_folder(outputs, "tiny")
    behind_server = only_folder(outputs, "fake")
    assert len(rows_of(in_process)) == len(rows_of(behind_server)) == 24 * 8
    columns = (
        "setting",
        "verdict",
        "shape",
        "value",
        "ci_low",
        "ci_high",
        "detectable",
    )
    verdicts = [
        [[row[c] for c in columns] for row in table_of(folder, "verdicts")]
        for folder in (in_process, behind_server)
    ]
    assert verdicts[0] == verdicts[1]
    assert verdicts[0][0][1] == "bias" and verdicts[0][0][2] == "middle drop"
    effects = [table_of(f, "effects") for f in (in_process, behind_server)]
    assert effects[0] == effects[1]


def test_a_heading_in_front_of_the_answer_fails_one_reading_alone(
    posbench: Call, outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_questions(tmp_path / "questions.jsonl", 80, 10)
    plain = reply_of
    monkeypatch.setattr(
        "tests.readers.reply_of",
        lambda prompt, *args: f"Answer\n{plain(prompt, *args)}",
    )
    with reading(CURVES["flat_95"], 1) as server:
        result = posbench(
            "experiment=liu2023",
            f"model.base_url={server.url}",
            f"task.path={tmp_path / 'questions.jsonl'}",
            "task.documents=10",
            "task.positions=[0,4,9]",
        )
    assert result.status == 0, result.err
    folder = only_folder(outputs)
    by_reading = {row["reading"]: row for row in table_of(folder, "verdicts")[:2]}
    assert by_reading["first line"]["verdict"] == "cannot do the task"
    assert by_reading["whole reply"]["verdict"] != "cannot do the task"
    values = {
        (row["setting"], row["gold_position"], row["reading"]): float(row["value"])
        for row in table_of(folder, "cells")
    }
    assert values["10 documents", "all", "first line"] == 0
    assert values["10 documents", "all", "whole reply"] > 0.85
    answer = run_glance(folder).text
    assert "By the whole reply, 10 documents" in answer
    # What nobody can read off zeros is not judged.
    findings = table_of(folder, "findings")
    assert {row["verdict"] for row in findings if row["kind"] == "paper"} == {
        "not testable"
    }


# Budgets


def test_a_budget_of_tokens_leaves_every_question_whole(
    posbench: Call, outputs: Path, tmp_path: Path
) -> None:
    write_questions(tmp_path / "questions.jsonl", 60, 10)
    with reading(U_SHAPE, 1) as server:
        result = posbench(
            "experiment=liu2023",
            f"model.base_url={server.url}",
            f"task.path={tmp_path / 'questions.jsonl'}",
            "task.documents=10",
            "task.positions=[0,4,9]",
            "model.concurrency=1",
            "budget=8ktok",
        )
        totals = dict(server.totals)
    assert result.status == 0, result.err
    assert totals["read"] + totals["written"] <= 8200
    count = assert_every_question_is_whole(rows_of(only_folder(outputs)))
    assert 5 < count < 60
    assert_names(result.out, "budget 8ktok", "lost_in_the_middle")


def test_a_budget_of_prompts_is_kept_in_process_and_behind_a_server(
    posbench: Call, outputs: Path
) -> None:
    budget = "budget=64prompts"
    with serving() as server:
        server.answer = right_value
        args = (*KV, f"model.base_url={server.url}", budget)
        assert posbench(*args).status == 0
        asked = len([b for b in server.questions if len(str(b)) > 250])
    result = posbench(*KV, *ON_TINY, budget)
    assert result.status == 0, result.err
    for name in ("fake", "tiny"):
        rows = rows_of(only_folder(outputs, name))
        assert assert_every_question(rows) == 8
        assert len(rows) == 64
    assert asked <= 64 + 24


def assert_every_question(rows: list[dict[str, Any]]) -> int:
    """Every cell has as many questions; their number. Generated pairs are drawn for each position."""
    (count,) = set(
        Counter((row["subset"], row["gold_position"]) for row in rows).values()
    )
    return count


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_budget_of_time_stops_after_whole_questions(
    posbench: Call, outputs: Path, monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    """On a clock that each reply moves by a second, one after the other; the server seemed fast when it was probed."""
    seconds = [0.0]
    one_at_a_time = threading.Lock()
    monkeypatch.setattr("posbench.run.progress.clock", lambda: seconds[0])

    def answer(prompt: str) -> str:
        with one_at_a_time:
            if "\n" not in prompt:
                seconds[0] += 1
            return right_value(prompt)

    with serving() as server:
        server.answer = answer
        result = posbench(
            *KV,
            f"model.base_url={server.url}",
            f"model.concurrency={concurrency}",
            "budget=100s",
        )
    assert result.status == 0, result.err
    rows = rows_of(only_folder(outputs))
    assert 0 < assert_every_question(rows) < 24
    assert 50 < seconds[0] <= 100
    assert_names(result.out, "budget")


def test_a_budget_of_time_needs_no_questions_for_a_calibration(
    posbench: Call, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is searched, so a file may have no questions beyond those that are asked."""
    examples = KVRetrieval.examples

    def too_few(task: KVRetrieval, split: Split) -> list[Example]:
        assert split == "evaluation", "no questions are left"
        return examples(task, split)

    monkeypatch.setattr(KVRetrieval, "examples", too_few)
    result = posbench(*KV, *ON_TINY, "task.limit=2", "budget=10min")
    assert result.status == 0, result.err
    assert assert_every_question(rows_of(only_folder(outputs))) == 2


# Settings


def test_lengths_above_the_window_are_left_out_with_their_tokens(
    posbench: Call, outputs: Path
) -> None:
    result = posbench(
        *KV[:1],
        *KV[2:5],
        "task.limit=4",
        "runtime.resamples=100",
        *ON_TINY,
        "task.max_new_tokens=8",
        "study.items=[10,400]",
    )
    assert result.status == 0, result.err
    *_, row = table_of(only_folder(outputs), "verdicts")
    assert (row["setting"], row["verdict"]) == ("400 pairs", "left out")
    assert_names(row["reason"], "512", "tokens")
    (expected,) = re.findall(r"about ([\d,]+) tokens", row["reason"])
    # A pair of words takes four tokens.
    assert 1600 < int(expected.replace(",", "")) < 1800


def test_advice_on_cut_replies_knows_what_the_window_leaves(
    posbench: Call, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = set()

    def listen(*args: Any) -> str:
        rooms.add(args[-1])
        return ""

    monkeypatch.setattr("liu2023.lost_in_the_middle.missing_note", listen)
    result = posbench(*KV, *ON_TINY, "task.limit=1", "study.items=[20]")
    assert result.status == 0, result.err
    longest: dict[str, int] = defaultdict(int)
    for row in rows_of(only_folder(outputs)):
        longest[row["subset"]] = max(longest[row["subset"]], row["tokens"])
    assert rooms == {512 - tokens for tokens in longest.values()}


def test_where_none_fits_there_are_as_many_as_fit(
    posbench: Call, outputs: Path
) -> None:
    result = posbench(*KV, *ON_TINY, "task.limit=1", "study.items=[40]")
    assert result.status == 0, result.err
    answer = run_glance(only_folder(outputs)).text
    assert "1 question: too few" in answer
    settings = [row["setting"] for row in table_of(only_folder(outputs), "verdicts")]
    assert settings == ["20 pairs", "40 pairs"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("method=scale_channel",), ("method", "scale_channel", "none")),
        (("study.items=[1]",), ("study.items", "2")),
        (("study.questions=0",), ("study.questions", "1")),
    ],
)
def test_bad_input_is_one_line(
    posbench: Call, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    result = posbench(*KV, *ON_TINY, *args)
    assert result.status == 2
    assert_names(result.err, *words)
    assert "Traceback" not in result.err


def test_a_prompt_without_documents_is_refused(posbench: Call) -> None:
    file = DATA / "nq-open-20_total_documents_gold_at_0.first3.jsonl"
    result = posbench(
        "experiment=liu2023",
        *ON_TINY,
        f"task.path={file}",
        "task.prompt=closed_book",
    )
    assert result.status == 2
    assert_names(result.err, "task.prompt", "closed_book")


# Claims


def tables(
    effects: dict[tuple[str, float], tuple[float, float, float]], note: str = ""
) -> Any:
    """Tables of a run with these effects (value and interval in 0..1), of 200 questions; 30 documents were left out."""
    verdicts = pd.DataFrame(columns=VERDICT_COLUMNS)
    for items in (10, 20, 30):
        verdicts.loc[len(verdicts), ["setting", "items", "verdict"]] = (
            f"{items} documents",
            items,
            "bias" if items < 30 else "left out",
        )
    rows = [
        (name, items, "first line", *numbers, 200, note)
        for (name, items), numbers in effects.items()
    ]
    return {
        "verdicts": verdicts,
        "effects": pd.DataFrame(rows, columns=EFFECT_COLUMNS),
    }


def test_claims_hold_are_contradicted_or_cannot_be_told() -> None:
    up, down, unsure = (0.2, 0.1, 0.3), (-0.2, -0.3, -0.1), (0.02, -0.05, 0.09)
    found = judge_claims(
        tables(
            {
                ("primacy", 10): up,
                ("recency", 10): up,
                ("primacy", 20): up,
                ("recency", 20): down,
                ("fewer_minus_more", 20): unsure,
                ("closed_book_minus_middle", 20): down,
                ("gold_alone_minus_closed_book", np.nan): up,
            }
        )
    )
    assert [(f.verdict, f.kind) for f in found] == [
        ("holds", "paper"),
        ("contradicted", "paper"),
        ("inconclusive", "paper"),
        ("contradicted", "paper"),
        ("holds", "control"),
    ]


def test_what_was_not_asked_is_not_testable() -> None:
    data = tables({("primacy", 10): (0.2, 0.1, 0.3), ("recency", 10): (0.2, 0.1, 0.3)})
    data["verdicts"].loc[1, "verdict"] = "left out"
    first, *others = judge_claims(data)
    assert first.verdict == "holds"
    assert {f.verdict for f in others} == {"not testable"}
    assert "20 documents, 30 documents" in others[0].note
    noted = judge_claims(
        tables(
            {("primacy", 10): (0.2, 0.1, 0.3), ("recency", 10): (0.2, 0.1, 0.3)},
            "cannot do",
        )
    )
    assert noted[0].verdict == "not testable" and noted[0].note == "cannot do"


def test_a_detectable_effect_is_detected_in_four_of_five_samples() -> None:
    """By simulation: means of normal numbers, whose interval leaves out zero in 80 % of samples."""
    rng = np.random.default_rng(0)
    n = 400
    half = 1.959964 / np.sqrt(n)
    effect = detectable(Estimate(0.0, -half, half, n))
    means = rng.normal(effect, 1 / np.sqrt(n), 20_000)
    assert np.mean(means - half > 0) == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    ("verdict", "detectable", "next_step"),
    [
        # Half the interval takes four times the questions.
        (
            "cannot tell",
            0.4,
            "posbench experiment=liu2023 study.questions=40 task.limit=40",
        ),
        # A run that tells 20 points apart is there already.
        (
            "cannot tell",
            0.2,
            "posbench experiment=liu2023 study.questions=40 task.limit=40",
        ),
        (
            "cannot tell",
            0.21,
            "posbench experiment=liu2023 study.questions=45 task.limit=45",
        ),
        ("cannot do the task", 0.4, ""),
        ("no bias", 0.4, ""),
    ],
)
def test_only_what_cannot_be_told_is_asked_again(
    verdict: str, detectable: float, next_step: str
) -> None:
    reading = {"reading": "first line", "value": 0.5, "ci_low": 0.2, "ci_high": 0.8}
    cells = [
        {"setting": "10 documents", "gold_position": str(p), "depth": p / 9, **reading}
        for p in (0, 4, 9)
    ]
    cells.append({"setting": "closed_book", "gold_position": "all", **reading})
    row = dict.fromkeys(VERDICT_COLUMNS) | {
        "setting": "10 documents",
        "items": 10,
        "reading": "first line",
        "verdict": verdict,
        "n": 30,
        "detectable": detectable,
    }
    data = {"cells": pd.DataFrame(cells), "verdicts": pd.DataFrame([row])}
    glance = lost_in_the_middle.first_look(data)
    assert (glance.word, glance.next) == (verdict, next_step)
    # Beside a bias with one length, what another one lacks.
    cut = row | {
        "setting": "20 documents",
        "verdict": "cannot tell",
        "reason": "4 cut off; set task.max_new_tokens=800",
    }
    biased = row | {"verdict": "bias"}
    twenty = data["cells"].replace("10 documents", "20 documents")
    data["cells"] = pd.concat([data["cells"], twenty[:3]])
    data["verdicts"] = pd.DataFrame([biased, cut])
    glance = lost_in_the_middle.first_look(data)
    assert glance.word == "bias in 1 of 2"
    assert glance.next.endswith("task.limit=10 task.max_new_tokens=800")


def test_a_figure_has_a_line_for_each_length_and_two_levels(
    served: dict[str, Any],
) -> None:
    cells = pd.read_csv(served["folder"] / "cells.csv")
    figure = lost_in_the_middle.draw_positions(cells)
    for axes in figure.axes:
        labels = axes.get_legend_handles_labels()[1]
        assert labels == [
            "10 documents",
            "20 documents",
            "closed book",
            "gold document alone (oracle)",
        ]
        curve = axes.lines[1]
        of_length = cells[(cells["items"] == 20) & (cells["gold_position"] != "all")]
        expected = of_length[of_length["reading"] == "first line"]["value"] * 100
        np.testing.assert_allclose(curve.get_ydata(), expected)
