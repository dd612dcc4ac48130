"""Rows without an answer: counted at each position, and no bias is read out of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from posbench.measure.outcomes import decide_outcome, holds_answer
from posbench.model.answers import read_reply
from posbench.report.tables import bias_table, position_table
from posbench.report.text import headline
from posbench.stats.outcomes import OUTCOME_METRICS
from posbench.stats.scores import Tabulator
from posbench.stats.verdict import run_verdict
from posbench.tasks import Example, KVRetrieval
from posbench.tasks.base import Task
from posbench.tasks.nq_multidoc import NQMultiDoc
from tests.tasks.test_several_gold import own_data, record, write

PAIRS = 20
POSITIONS = (0, 5, 10, 14, 19)
BUDGET = 100
Reader = Callable[[Example, np.random.Generator], dict[str, Any]]


def task(**fields: Any) -> KVRetrieval:
    return KVRetrieval(pairs=PAIRS, limit=60, max_new_tokens=BUDGET, **fields)


def perfect(example: Example, rng: np.random.Generator) -> dict[str, Any]:
    return {"output": f' "{example.answers[0]}"', "finish": "end"}


def noisy(example: Example, rng: np.random.Generator) -> dict[str, Any]:
    """Right in seven of ten, wherever the gold pair stands; it never stops by itself."""
    value = example.answers[0]
    if rng.random() > 0.7:
        value = value[:-3] + "000"
    return {"output": f' "{value}",\n and so on', "finish": "length"}


def thinking(example: Example, rng: np.random.Generator) -> dict[str, Any]:
    """Perfect, but it names every pair up to the gold one first, at 7 tokens a pair."""
    assert example.gold_position is not None
    pairs = [example.prompt[a:b] for a, b in example.items]
    if 7 * (1 + example.gold_position) > BUDGET:
        return {"output": "Let me see: " + "; ".join(pairs[:10]), "finish": "length"}
    return perfect(example, rng)


def cut_anywhere(example: Example, rng: np.random.Generator) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"output": "The value that belongs to the key", "finish": "length"}
    return perfect(example, rng)


def refusing(example: Example, rng: np.random.Generator) -> dict[str, Any]:
    return {"output": "I cannot help with that.", "finish": "end"}


def biased(example: Example, rng: np.random.Generator) -> dict[str, Any]:
    """Right in all at the ends, in half of the middle; its wrong answers are another pair's value."""
    if example.gold_position in (0, 19) or rng.random() < 0.5:
        return perfect(example, rng)
    start, end = example.items[int(example.gold_position == 3) + 2]
    value = example.prompt[start:end].split(": ")[1]
    return {"output": f" {value}", "finish": "length"}


def rows_of(task: Task, reader: Reader, seed: int = 0) -> list[dict[str, Any]]:
    """What a run writes of the replies of a reader."""
    rng = np.random.default_rng(seed)
    rows = []
    for example in task.evaluation():
        reply = reader(example, rng)
        decision = decide_outcome(
            reply["output"],
            reply["finish"],
            holds_answer=holds_answer(task, example, reply),
            is_thinking=reply.get("is_thinking", False),
            obstacle=reply.get("obstacle", ""),
        )
        scores = {}
        if decision.outcome == "answered":
            scores = task.score(example, reply["output"])
        row = {
            "method": "none",
            "id": example.id,
            "gold_position": example.gold_position,
            "cluster": example.cluster,
            "scores": scores,
            **reply,
            **decision.fields,
        }
        rows.append(row)
    return rows


def metrics_of(task: Task, *readers: tuple[str, Reader], seed: int = 0) -> pd.DataFrame:
    rows = []
    for method, reader in readers:
        rows += [row | {"method": method} for row in rows_of(task, reader, seed)]
    tabulator = Tabulator(
        task=task, model="m", unmodified="none", resamples=500, seed=0
    )
    return tabulator.metrics(rows)


def bias_of(metrics: pd.DataFrame, method: str = "none") -> Any:
    is_bias = metrics["metric"] == "position_bias"
    return metrics[is_bias & (metrics["method"] == method)].iloc[0]


@pytest.mark.parametrize("reader", [thinking, cut_anywhere])
def test_no_bias_and_no_headline_of_cut_replies(reader: Reader) -> None:
    metrics = metrics_of(task(positions=POSITIONS), ("none", reader))
    bias = bias_of(metrics)
    assert np.isnan(bias["value"])
    text = headline(metrics)
    assert f"task.max_new_tokens={4 * BUDGET}" in text
    assert "on average" not in text
    _, rows = bias_table(metrics)
    assert not any("[" in cell for row in rows for cell in row)


def test_no_more_tokens_are_asked_for_than_the_window_has() -> None:
    kv = task(positions=POSITIONS)
    rows = [row | {"method": "none", "tokens": 700} for row in rows_of(kv, thinking, 0)]
    rows[3]["tokens"] = 800
    for window, step in (
        (8_000, f"set task.max_new_tokens={4 * BUDGET}"),
        (1_050, "set task.max_new_tokens=250"),
        (850, "once the prompts are shorter"),
    ):
        tabulator = Tabulator(
            task=kv, model="m", unmodified="none", resamples=50, seed=0, window=window
        )
        text = headline(tabulator.metrics(rows))
        assert step in text
        assert ("task.max_new_tokens=" in text) == ("set" in step)


def test_cut_replies_are_counted_at_each_position() -> None:
    metrics = metrics_of(task(positions=POSITIONS), ("none", thinking))
    cut = metrics[metrics["metric"] == "cut_replies"].set_index("gold_position")
    assert cut["value"].to_dict() == {
        "0": 0.0,
        "5": 0.0,
        "10": 0.0,
        "14": 1.0,
        "19": 1.0,
        "all": 0.4,
    }
    header, rows = position_table(metrics)
    assert header[-1] == "cut off"
    assert [row[-1] for row in rows] == [
        f"{value:.1f} %" for value in (0, 0, 0, 100, 100, 40)
    ]


def test_replies_cut_at_one_position_alone_are_enough() -> None:
    """1 % of all replies, but all at one position."""

    def reader(example: Example, rng: np.random.Generator) -> dict[str, Any]:
        if example.gold_position == 19 and rng.random() < 0.09:
            return {"output": "Well", "finish": "length"}
        return perfect(example, rng)

    wide = KVRetrieval(pairs=PAIRS, limit=200, positions=POSITIONS)
    rows = rows_of(wide, reader)
    assert 0 < np.mean([row["outcome"] == "cut" for row in rows]) <= 0.02
    assert "max_new_tokens" in headline(metrics_of(wide, ("none", reader)))


@pytest.mark.parametrize("reader", [perfect, noisy, refusing, biased])
def test_replies_that_came_to_an_answer_are_not_cut(reader: Reader) -> None:
    rows = rows_of(task(positions=POSITIONS), reader)
    assert {row["outcome"] for row in rows} == {"answered"}


def test_a_bias_is_still_found() -> None:
    bias = bias_of(metrics_of(task(positions=POSITIONS), ("none", biased)))
    assert bias["ci_low"] > 0


@pytest.mark.parametrize("reader", [perfect, noisy, thinking, cut_anywhere, refusing])
def test_hardly_an_unbiased_reader_gets_a_bias(reader: Reader) -> None:
    claimed = 0
    for seed in range(20):
        kv = task(positions=POSITIONS, seed=seed)
        bias = bias_of(metrics_of(kv, ("none", reader), seed=seed))
        claimed += bool(bias["ci_low"] > 0)
    assert claimed <= 1


# Models that think, behind a server

FORMS = ("reasoning_content", "reasoning", "inline", "opened", "hidden")


def thinker(
    accuracy: Callable[[int], float], cut: Callable[[int], float]
) -> Callable[[str], Reader]:
    """A reader that thinks: its accuracy, and how often it ends in the thinking, by gold position.

    The thinking names the right value, whatever the answer is. The form in which a server gives it is chosen by name.
    """

    def of_form(form: str) -> Reader:
        def reader(example: Example, rng: np.random.Generator) -> dict[str, Any]:
            position = example.gold_position or 0
            value = example.answers[0]
            is_right = rng.random() < accuracy(position)
            is_cut = rng.random() < cut(position)
            answer = value if is_right else value[:-3] + "000"
            reply = read_reply(served_answer(form, value, answer, is_cut), *FLAGS[form])
            row = {"output": reply.text, "finish": reply.finish}
            return row | {"is_thinking": reply.is_thinking, "obstacle": reply.obstacle}

        return reader

    return of_form


FLAGS = {form: (form == "opened", form == "hidden") for form in FORMS}
"""What the probe of a server tells of the form: whether the template opens the thinking, whether it is hidden."""


def served_answer(form: str, value: str, answer: str, is_cut: bool) -> dict[str, Any]:
    """What a server sends of a reply with thinking in some form."""
    thinking = f"Perhaps it is {value}."
    message: dict[str, Any] = {"content": "" if is_cut else answer}
    if form in ("reasoning_content", "reasoning"):
        message[form] = thinking
    elif form != "hidden":
        begin = "<think>" if form == "inline" else ""
        message["content"] = begin + thinking
        if not is_cut:
            message["content"] += f"</think>\n\n{answer}"
    finish = "length" if is_cut else "stop"
    return {"choices": [{"index": 0, "finish_reason": finish, "message": message}]}


def by_position(ends: float, middle: float) -> Callable[[int], float]:
    return lambda position: ends if position in (0, PAIRS - 1) else middle


UNBIASED = {
    "never cut": (lambda position: 0.8, lambda position: 0.0),
    "hardly cut": (lambda position: 0.8, lambda position: 0.01),
    "often cut": (lambda position: 0.8, lambda position: 0.3),
    "cut by position": (lambda position: 1.0, lambda position: 0.05 * position),
    "cut in the middle": (lambda position: 0.9, by_position(0.0, 0.15)),
}
BIASED = {
    "never cut": (by_position(0.95, 0.6), lambda position: 0.0),
    "hardly cut": (by_position(0.95, 0.6), lambda position: 0.005),
}


def claims(accuracy: Callable[[int], float], cut: Callable[[int], float]) -> int:
    """In how many of 20 runs of a thinking model a bias is claimed, each in the next form."""
    claimed = 0
    for seed in range(20):
        kv = task(positions=POSITIONS, seed=seed)
        reader = thinker(accuracy, cut)(FORMS[seed % len(FORMS)])
        bias = bias_of(metrics_of(kv, ("none", reader), seed=seed))
        claimed += bool(bias["ci_low"] > 0)
    return claimed


@pytest.mark.parametrize("name", UNBIASED)
def test_hardly_an_unbiased_thinker_gets_a_bias(name: str) -> None:
    assert claims(*UNBIASED[name]) <= 1


@pytest.mark.parametrize("name", BIASED)
def test_the_bias_of_a_thinker_is_found(name: str) -> None:
    assert claims(*BIASED[name]) >= 18


def test_what_a_thinker_only_thinks_is_not_right() -> None:
    for form in FORMS:
        wrong = thinker(lambda position: 0.0, lambda position: 0.0)(form)
        metrics = metrics_of(task(positions=POSITIONS), ("none", wrong))
        average = metrics[metrics["gold_position"] == "all"].iloc[0]
        assert average["value"] == 0 and average["n"] == 300


def test_replies_cut_in_the_thinking_are_counted_apart() -> None:
    cut = thinker(lambda position: 1.0, lambda position: 0.05 * position)("inline")
    metrics = metrics_of(task(positions=POSITIONS), ("none", cut))
    assert "cut_replies" not in set(metrics["metric"])
    shares = metrics[metrics["metric"] == "cut_thinking"].set_index("gold_position")
    for position in POSITIONS:
        assert shares.loc[str(position), "value"] == pytest.approx(
            0.05 * position, abs=0.2
        )
    header, _ = position_table(metrics)
    assert "cut thinking" in header and "cut off" not in header


def test_a_method_is_not_compared_with_a_model_whose_replies_were_cut() -> None:
    metrics = metrics_of(
        task(positions=POSITIONS), ("none", thinking), ("scale_channel", perfect)
    )
    text = headline(metrics)
    assert "raises" not in text
    assert "max_new_tokens" in text
    assert "scale_channel answers 100.0 % on average" in text


def test_what_holds_an_answer() -> None:
    kv = task(positions=(3,))
    example = kv.evaluation()[0]
    pair = example.prompt[slice(*example.items[7])]
    key, value = pair.replace('"', "").split(": ")
    invented = "0f0e0d0c-0b0a-4009-8807-060504030201"
    assert kv.has_answer(example, f"It is {example.answers[0]}")
    assert kv.has_answer(example, f' "{value}", "')
    assert kv.has_answer(example, f"{invented}\n")
    assert kv.has_answer(example, f"{value[:-2]}.")
    assert not kv.has_answer(example, f"{key} is another key: {value}")
    assert not kv.has_answer(example, value[:20])
    assert not kv.has_answer(example, "")
    assert task(prompt="compact").has_answer(example, "x")


def test_quotation_marks_in_a_value_of_a_file_are_part_of_it() -> None:
    example = Example(
        id="x",
        prompt='{"a": "say "no" twice", "b": ""}',
        answers=("yes",),
        gold_position=0,
        items=((1, 22), (24, 31)),
    )
    assert task().has_answer(example, ' "say "no" twice" and')
    assert not task().has_answer(example, "say something else")


def test_a_first_line_or_a_right_reply_holds_an_answer(tmp_path: Any) -> None:
    example = Example(id="x", prompt="", answers=("Paris",))
    first_line = NQMultiDoc(reading="yu")
    assert first_line.has_answer(example, "\nRome\nQuestion:")
    assert not first_line.has_answer(example, "\nThe documents say that")
    own = own_data(write(tmp_path / "a.jsonl", record(0)))
    assert own.has_answer(example, "It is paris, I")
    assert not own.has_answer(example, "The documents say that")


SERVER_FAULTS = {
    "refused": {"output": "", "finish": "safety"},
    "no_answer": {"output": "", "finish": "tool_calls"},
    "cut_replies": {"output": "Let me look", "finish": "length"},
}


def failing_in_the_middle(fault: dict[str, Any]) -> Reader:
    """Perfect, but for half of the prompts whose gold pair stands in the middle a server gives no answer."""

    def reader(example: Example, rng: np.random.Generator) -> dict[str, Any]:
        in_middle = 4 < (example.gold_position or 0) < 15
        return (
            dict(fault) if in_middle and rng.random() < 0.5 else perfect(example, rng)
        )

    return reader


@pytest.mark.parametrize("kind", SERVER_FAULTS)
def test_a_server_that_fails_in_the_middle_is_no_middle_drop(kind: str) -> None:
    reader = failing_in_the_middle(SERVER_FAULTS[kind])
    metrics = metrics_of(task(positions=POSITIONS), ("none", reader))
    verdict = run_verdict(metrics)
    assert verdict and verdict.name == "cannot tell"
    shares = metrics[metrics["metric"] == kind].set_index("gold_position")["value"]
    assert shares["0"] == shares["19"] == 0 and shares["10"] == pytest.approx(
        0.5, abs=0.2
    )
    scores = metrics[metrics["metric"] == "accuracy"].set_index("gold_position")
    assert (scores["value"] == 1).all(), "what was answered is right"
    assert scores.loc["10", "n"] == round(60 * (1 - shares["10"]))
    assert (
        OUTCOME_METRICS[kind] in headline(metrics) and "-" not in headline(metrics)[:20]
    )
    assert OUTCOME_METRICS[kind] in position_table(metrics)[0]


def test_a_run_without_any_answer_has_tables_and_no_verdict_but_cannot_tell() -> None:
    metrics = metrics_of(
        task(positions=POSITIONS),
        ("none", lambda e, rng: {"output": "", "finish": "safety"}),
    )
    verdict = run_verdict(metrics)
    assert verdict and verdict.name == "cannot tell" and "300 refused" in verdict.reason
    assert "content filter" in verdict.reason
    scores = metrics[metrics["metric"] == "accuracy"]
    assert (
        scores["value"].isna().all() and (scores["n"] == 0).all() and len(scores) == 6
    )
    header, rows = position_table(metrics)
    assert header[-1] == "refused" and [row[-1] for row in rows] == ["100.0 %"] * 6


def test_one_position_without_any_answer_keeps_its_line() -> None:
    def reader(example: Example, rng: np.random.Generator) -> dict[str, Any]:
        if example.gold_position == 10:
            return {"output": "", "finish": "stop"}
        return perfect(example, rng)

    metrics = metrics_of(task(positions=POSITIONS), ("none", reader))
    verdict = run_verdict(metrics)
    assert verdict and verdict.name == "cannot tell"
    assert [row[0] for row in position_table(metrics)[1]][2] == "52.6 %"


def test_few_missing_answers_of_all_kinds_together_forbid_a_verdict() -> None:
    """No kind alone is above 2 %, all together are."""

    def reader(example: Example, rng: np.random.Generator) -> dict[str, Any]:
        if rng.random() < 0.045:
            return dict(SERVER_FAULTS[list(SERVER_FAULTS)[rng.integers(3)]])
        return biased(example, rng)

    many = KVRetrieval(pairs=PAIRS, limit=200, positions=POSITIONS)
    metrics = metrics_of(many, ("none", reader))
    totals = metrics[metrics["gold_position"] == "all"].set_index("metric")["value"]
    shares = [totals[kind] for kind in SERVER_FAULTS]
    assert max(shares) <= 0.02 < sum(shares)
    assert np.isnan(bias_of(metrics)["value"])
    named = re.findall(r"\d+ (cut off|refused|no answer)", bias_of(metrics)["note"])
    assert sorted(named) == ["cut off", "no answer", "refused"]


def test_of_few_missing_answers_a_bias_is_still_told() -> None:
    def reader(example: Example, rng: np.random.Generator) -> dict[str, Any]:
        if rng.random() < 0.01:
            return {"output": "", "finish": "safety"}
        return biased(example, rng)

    many = KVRetrieval(pairs=PAIRS, limit=200, positions=POSITIONS)
    assert bias_of(metrics_of(many, ("none", reader)))["ci_low"] > 0
