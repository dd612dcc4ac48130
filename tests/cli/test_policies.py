"""Runs under methods that change the prompt alone: rows, estimates, audits and refusals, in process and at a server."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from posbench.backends.base import text_encoder
from posbench.errors import UserError
from posbench.methods import Unmodified
from posbench.model.load import load_without_weights, read_checkpoint
from posbench.pipeline import estimate
from posbench.pipeline.compose import compose_one
from posbench.pipeline.prepare import build_run, prepare
from posbench.pipeline.served import estimate_served
from posbench.pipeline.stages.intervene import plan_attention
from posbench.run.plan import Subject
from posbench.run.replies import plan_replies
from posbench.stats.frames import UNMODIFIED
from tests.cli.test_probing import SMALL, only_run, rows_of
from tests.conftest import Result, config_of
from tests.messages import assert_names, assert_refused
from tests.server import Server, right_value, serving

Call = Callable[..., Result]
TINY = ["model=tiny", *SMALL, "task.limit=4"]
# An order needs all gold positions.
EVERYWHERE = [
    *(arg for arg in TINY if not arg.startswith(("task.pairs", "task.positions"))),
    "task.pairs=6",
    "task.positions=[0,1,2,3,4,5]",
]


def ask(posbench: Call, server: Server, *args: str) -> Result:
    return posbench(
        f"model.base_url={server.url}", "model.api=completions", *SMALL, *args
    )


def quoting(prompt: str) -> str:
    """The reply to a prompt: the pair that it asks for, and the value, where a quotation is asked for."""
    if not prompt.endswith("Quote:"):
        return right_value(prompt)
    (key,) = re.findall(r'key "(\w+)"', prompt)
    (value,) = re.findall(rf'"{key}": "(\w+)"', prompt)
    return f' "{key}": "{value}"\n\nAnswer: {value}'


def audit(posbench: Call, folder: Path) -> None:
    """Check that all follows from config and replies."""
    result = posbench("audit", str(folder), verb=True)
    assert result.status == 0, result.out + result.err
    assert "fault" not in result.out


# At a server


def test_a_server_is_asked_both_prompts_as_estimated(posbench, outputs) -> None:
    with serving() as server:
        args = ("method=prompt_twice", "task.limit=3", "model.price=[1,2]", "--yes")
        result = ask(posbench, server, *args)
        assert result.status == 0, result.err
        call = [f"model.base_url={server.url}", "model.api=completions"]
        config = prepare(compose_one(*call, *SMALL, *args[:2])).config
    folder = only_run(outputs)
    rows = rows_of(folder)
    assert Counter(row["method"] for row in rows) == {"none": 9, "prompt_twice": 9}
    prompts = {e.id: e.prompt for e in config.task.evaluation()}
    for row in rows:
        prompt = prompts[row["id"]]
        if row["method"] == "none":
            assert "rewritten_prompt" not in row
        else:
            prompt = f"{prompt}\n\n{prompt}"
            assert row["rewritten_prompt"] == prompt
        # The server counts a token a character.
        assert row["prompt_tokens"] == len(prompt)
        assert server.asked[prompt] or "\n" in prompt
    assert config.server is not None
    told = estimate_served(config, config.server, text_encoder(config.model))
    assert told.requests == len(rows)
    assert told.read == sum(row["prompt_tokens"] for row in rows)
    assert f"{len(rows)} requests; about {told.read:,} tokens read" in result.out
    audit(posbench, folder)


def test_what_follows_the_quotation_is_scored(posbench, outputs) -> None:
    with serving() as server:
        server.answer = quoting
        result = ask(posbench, server, "method=recite", "task.limit=2")
        assert result.status == 0, result.err
        lengths = {
            body["max_tokens"] for body in server.bodies if "Quote:" in body["prompt"]
        }
    folder = only_run(outputs)
    rows = [row for row in rows_of(folder) if row["method"] == "recite"]
    assert len(rows) == 6
    for row in rows:
        (value,) = row["answers"]
        assert row["output"].strip() == value and row["scores"] == {"accuracy": 1.0}
        assert row["quote"] + row["output"] == quoting(row["rewritten_prompt"])
        assert row["quote"].endswith("Answer:")
        assert row["max_new_tokens"] == 300 and row["answer_cue"] == "Answer:"
    assert 300 in lengths
    before = (folder / "predictions.jsonl").read_bytes()
    assert posbench("rescore", str(folder), verb=True).status == 0
    assert (folder / "predictions.jsonl").read_bytes() == before
    shown = posbench("show", str(folder), "--id", rows[0]["id"], "--all", verb=True)
    assert "quote, not scored" in shown.out
    audit(posbench, folder)


def test_a_reply_without_a_cue_is_scored_whole(posbench, outputs) -> None:
    with serving() as server:
        server.answer = lambda prompt: quoting(prompt).replace("Answer:", "so")
        result = ask(posbench, server, "method=recite", "task.limit=2")
        assert result.status == 0, result.err
    rows = [row for row in rows_of(only_run(outputs)) if row["method"] == "recite"]
    assert all(row["scores"] == {"accuracy": 1.0} for row in rows)
    assert not any("quote" in row for row in rows)


@pytest.mark.parametrize("method", ["scale_channel", "[prompt_twice,scale_channel]"])
def test_a_method_that_changes_the_model_is_refused_at_a_server(
    method, posbench
) -> None:
    with serving() as server:
        result = ask(posbench, server, f"method={method}")
    assert result.status == 2
    assert_refused(result.err, "method", allowed="prompt_twice", hint="export")


# In process


@pytest.mark.parametrize("policy", ["reversed", "top_3", "documents_twice"])
def test_a_run_asks_what_the_policy_writes(policy, posbench, outputs, tiny) -> None:
    result = posbench(f"method={policy}", *EVERYWHERE)
    assert result.status == 0, result.err
    folder = only_run(outputs)
    rows = [row for row in rows_of(folder) if row["method"] == policy]
    examples = {e.id: e for e in config_of(*EVERYWHERE).task.evaluation()}
    assert {row["id"] for row in rows} == set(examples)
    for row in rows:
        example = examples[row["id"]]
        pairs = re.findall(r'"\w+": "\w+"', example.prompt)
        pairs = {
            "reversed": pairs[::-1],
            "top_3": pairs[:3],
            "documents_twice": pairs * 2,
        }[policy]
        tail = example.prompt[example.prompt.index("}") :]
        prompt = f"Json data: {{{', '.join(pairs)}{tail}"
        assert row["rewritten_prompt"] == prompt
        (reply,) = tiny.generate([prompt], max_new_tokens=1)
        assert row["output"] == reply and row["gold_position"] == example.gold_position
    audit(posbench, folder)


def test_a_list_changes_the_prompt_and_the_model(posbench, outputs, tiny) -> None:
    result = posbench("method=[prompt_twice,scale_channel]", *TINY)
    assert result.status == 0, result.err
    folder = only_run(outputs)
    rows = [row for row in rows_of(folder) if row["method"] != "none"]
    config = config_of("method=scale_channel", *TINY)
    prompts = {e.id: f"{e.prompt}\n\n{e.prompt}" for e in config.task.evaluation()}
    with config.method_under_test().build().applied(tiny):
        for row in rows:
            (reply,) = tiny.generate([prompts[row["id"]]], max_new_tokens=1)
            assert row["output"] == reply
            assert row["rewritten_prompt"] == prompts[row["id"]]
    assert len(rows) == 12
    audit(posbench, folder)


@pytest.mark.parametrize("method", ["reversed", "top_3"])
def test_an_order_of_items_that_nothing_ranks_is_refused(
    method: str, posbench: Call
) -> None:
    result = posbench(*TINY, f"method={method}", "stages=[evaluate]")
    assert result.status == 2
    assert_refused(result.err, "method", method, hint="posbench order LOG")


def test_a_quotation_that_fills_the_reply_is_cut(posbench, outputs) -> None:
    result = posbench("method=recite", "method.quote_tokens=5", *TINY)
    assert result.status == 0, result.err
    folder = only_run(outputs)
    rows = [row for row in rows_of(folder) if row["method"] == "recite"]
    assert {row["max_new_tokens"] for row in rows} == {6}
    for row in rows:
        assert row["finish"] != "length" or row["outcome"] == "cut"
    assert any(row["finish"] == "length" for row in rows)
    audit(posbench, folder)


@pytest.mark.parametrize("policy", ["prompt_twice", "recite", "top_1"])
def test_tokens_are_estimated_as_the_model_reads_them(policy, tiny) -> None:
    overrides = [*EVERYWHERE, f"method={policy}", "stages=[intervene,evaluate]"]
    config = prepare(compose_one(*overrides, "runtime.batch_size=4")).config
    quiet = Console(quiet=True)
    run = build_run(config, quiet)
    run.lm = load_without_weights(config.model, read_checkpoint(config.model), "cpu")
    works = estimate.estimate_run(config, run)
    for make_plan, work in zip((plan_attention, plan_replies), works, strict=True):
        run = build_run(config, quiet)
        run.lm = tiny
        run.evaluation = config.task.evaluation()
        methods = {UNMODIFIED: Unmodified(), policy: config.method_under_test().trial()}
        subjects: list[Any] = [Subject(run, *method) for method in methods.items()]
        plan: Any = make_plan(subjects, run.prompts.encode(run.evaluation))
        before = tiny.tokens_read
        for batch in plan.batches:
            plan.answer(batch)
        assert tiny.tokens_read - before == work.computed_tokens
        assert plan.requested_tokens == work.tokens


def test_prompts_are_made_so_short_that_they_fit_twice() -> None:
    """The window of tiny holds 512 tokens, of which 64 pairs and the question take more than half."""
    args = ["model=tiny", "task.limit=2", "task.pairs=64"]
    prepare(compose_one(*args, "method=none"))
    with pytest.raises(UserError) as error:
        prepare(compose_one(*args, "method=prompt_twice"))
    assert error.value.field == "task.pairs"
    most = int(re.findall(r"at most (\d+)", error.value.allowed)[0])
    assert most < 64
    prepare(compose_one(*args[:2], f"task.pairs={most}", "method=prompt_twice"))


def test_an_order_that_is_not_known_is_refused_before_the_run(
    posbench, outputs
) -> None:
    result = posbench("method=original_order", *EVERYWHERE)
    assert result.status == 2 and len(result.err.splitlines()) == 1
    assert_refused(result.err, "method.order", "original_order", hint="best_first")
    assert not outputs.exists()


@pytest.mark.parametrize(
    "method", ["prompt_twice", "[prompt_twice,question_first_and_last]"]
)
def test_a_changed_prompt_is_no_file(method, posbench, tmp_path) -> None:
    result = posbench(
        "export",
        "model=tiny",
        f"method={method}",
        "--to",
        "lora",
        "--out",
        str(tmp_path / "x"),
        verb=True,
    )
    assert result.status == 2 and not (tmp_path / "x").exists()
    assert_names(result.err, "method", "prompt", "rewritten_prompt")


def test_studies_of_all_methods_leave_out_what_costs_only_its_prompts() -> None:
    methods = config_of("study=latency").all_methods
    assert {"none", "scale_channel", "ms_poe"} <= set(methods)
    assert not {"prompt_twice", "reversed", "recite"} & set(methods)


def test_a_run_of_every_policy_is_listed(posbench) -> None:
    listed = posbench("ls", "methods", verb=True).out
    names = {line.split("\t")[0] for line in listed.splitlines()}
    assert {"both_ends", "cache_stable", "top_5", "recite"} <= names


def test_json_of_the_method_names_its_part(posbench, outputs) -> None:
    result = posbench("method=documents_twice", *TINY)
    assert result.status == 0, result.err
    facts = json.loads((only_run(outputs) / "method.json").read_text())
    assert facts["name"] == "documents_twice" and facts["part"] == "documents"
