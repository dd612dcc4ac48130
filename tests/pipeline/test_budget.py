"""A budget: what is chosen for it, and that the run is the one that these settings make by hand."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posbench import paths
from posbench.errors import choices
from posbench.files.parse import read_yaml
from posbench.model import precision
from posbench.model.load import read_checkpoint
from posbench.pipeline import budget as module
from posbench.pipeline import study_budget
from posbench.pipeline.budget import (
    Chooser,
    _make_plan,
    choose,
    most_questions,
    read_plan,
)
from posbench.pipeline.compose import compose_one
from posbench.pipeline.prepare import prepare
from posbench.pipeline.study_budget import StudyChooser
from posbench.run.budget import Budget, Deadline
from posbench.run.cost import WorkEstimate
from posbench.run.folder import open_run_dir
from posbench.schema import default_values, resolve_target
from posbench.studies.base import Study
from tests.conftest import Result, config_of, run_folders
from tests.messages import assert_names, assert_refused

POSBENCH = Callable[..., Result]
EVALUATE = ["stages=[evaluate]", "method=none"]


# Arithmetic


def test_most_questions_is_what_counting_finds() -> None:
    for limit in range(8):
        for most in range(10):
            counted = [n for n in range(1, limit + 1) if n <= most]
            found = most_questions(lambda n, most=most: n <= most, limit)
            assert found == max(counted, default=0)


def test_the_choice_is_that_of_trying_everything() -> None:
    rng = random.Random(0)
    for _ in range(500):
        options = [
            (rng.randint(0, 30), rng.randint(1, 9)) for _ in range(rng.randint(1, 5))
        ]
        limit = rng.randint(1, 20)
        enough = rng.randint(1, 12)
        available = rng.randint(1, 90)

        def cost(option: tuple[int, int], questions: int) -> float:
            fixed, per_question = option
            return fixed + per_question * questions

        tried = [
            max(
                (n for n in range(1, limit + 1) if cost(option, n) <= available),
                default=0,
            )
            for option in options
        ]
        wanted = min(enough, limit)
        satisfying = [i for i, n in enumerate(tried) if n >= wanted]
        chosen = choose(options, cost, limit, available, enough)
        if satisfying:
            best = satisfying[0]
            assert chosen == (options[best], tried[best])
        elif max(tried) == 0:
            assert chosen is None
        else:
            assert chosen is not None and chosen[1] == max(tried)


# Runs


def plan_of(outputs: Path) -> Any:
    (file,) = outputs.glob("*/.budgets/*.json")
    return read_plan(file)


def rows_of(folder: Path) -> list[str]:
    rows = open_run_dir(folder).rows("predictions.jsonl")
    return [json.dumps(row, sort_keys=True) for row in rows]


def stop_after(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """Let rounds fit that are not beyond so many, whatever the time."""

    def fits(self: Deadline, work: float) -> bool:
        self.__dict__.setdefault("asked_for", 0)
        self.__dict__["asked_for"] += 1
        return bool(self.__dict__["asked_for"] < rounds)

    monkeypatch.setattr(Deadline, "fits", fits)


def test_a_typed_number_of_questions_stands(
    posbench: POSBENCH, small: list[str], outputs: Path
) -> None:
    """Nothing stops it at the budget, and that is said."""
    result = posbench(*small, *EVALUATE, "budget=30prompts")
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    plan = plan_of(outputs)
    assert plan.settings == {} and plan.questions == 12 and plan.prompts == 36
    assert "task.limit=12 takes about 36 prompts, more than the budget" in result.out
    assert len(open_run_dir(folder).rows("predictions.jsonl")) == 3 * 12


def test_the_same_settings_by_hand_are_the_same_run(
    posbench: POSBENCH, small: list[str], outputs: Path
) -> None:
    untyped = [arg for arg in small if not arg.startswith(("task.limit", "stages"))]
    assert posbench(*untyped, *EVALUATE, "budget=31prompts").status == 0
    (folder,) = run_folders(outputs)
    plan = plan_of(outputs)
    # One method at three positions.
    assert plan.settings == {"task.limit": 10} and plan.prompts == 30
    assert len(open_run_dir(folder).rows("predictions.jsonl")) == 30
    by_hand = shlex.split(module.spelled(plan.settings))
    again = posbench(*untyped, *EVALUATE, *by_hand)
    assert again.status == 0 and run_folders(outputs) == [folder]
    assert json.loads((folder / "provenance.json").read_text())["budget"]["questions"]


def test_a_choice_is_that_of_the_same_typed_keys_and_the_same_price(
    posbench: POSBENCH, outputs: Path
) -> None:
    tiny = ["model=tiny", "runtime.device=cpu", *EVALUATE]
    asked: list[int] = []

    def ask(*args: str) -> str:
        known = set(run_folders(outputs))
        result = posbench(*tiny, *args)
        if result.status:
            return result.err
        (folder,) = set(run_folders(outputs)) - known
        rows = open_run_dir(folder).rows("predictions.jsonl")
        asked.append(len({row["gold_position"] for row in rows}))
        return result.out

    nine = ",".join(f'"{100 * i / 8:g}%"' for i in range(9))
    ask("budget=30prompts")
    # These are the default positions: the run would be the same without a budget.
    ask("budget=30prompts", f"task.positions=[{nine}]")
    assert asked == [3, 9]
    cheap, dear = (
        ask("budget=0.004usd", f"model.price=[{price},{price}]") for price in (1, 100)
    )
    assert "0.0040 usd expected" in cheap
    assert_names(dear, "budget", "0.004usd", "about 0.0132 usd")


def test_a_budget_without_an_evaluation_promises_no_questions(
    posbench: POSBENCH, small: list[str], outputs: Path
) -> None:
    result = posbench(*small, "stages=[search]", "budget=500prompts")
    assert result.status == 0, result.err
    (line,) = [s for s in result.out.splitlines() if s.startswith("budget 500prompts")]
    plan = plan_of(outputs)
    assert line == f"budget 500prompts: {plan.prompts} prompts in all"
    assert plan.questions == 0 and plan.prompts > 12


def test_a_time_is_measured_once_and_its_choice_kept(
    posbench: POSBENCH,
    small: list[str],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = [*small, *EVALUATE, "budget=1h"]
    first = posbench(*args)
    assert first.status == 0 and "1h" in first.out, first.err
    plan = plan_of(outputs)
    assert plan.questions == 12 and plan.operation > 0

    def never(*given: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("posbench.pipeline.apply_budget.plan_run", never)
    assert posbench(*args).status == 0
    assert len(run_folders(outputs)) == 1 and plan_of(outputs) == plan


def test_rounds_leave_the_rows_of_one_round(
    posbench: POSBENCH, small: list[str], outputs: Path, tmp_path: Path
) -> None:
    args = [*small, "stages=[intervene,evaluate]", "model.dtype=float64"]
    args = [arg for arg in args if arg != "model.dtype=float32"]
    args += ["method.channel=3", "method.factor=0.0", "method.layers=[1,2]"]
    assert posbench(*args).status == 0
    assert posbench(*args, "runtime.round_questions=5").status == 0
    one, other = run_folders(outputs)
    assert one != other, "rounds move rounding, so the runs are two"
    for name in ("metrics.csv", "attention.csv"):
        assert (one / name).read_bytes() == (other / name).read_bytes()

    def rows(folder: Path) -> list[dict[str, Any]]:
        found = []
        for row in open_run_dir(folder).rows("predictions.jsonl"):
            found.append({k: v for k, v in row.items() if k not in ("run", "sum")})
        return found

    assert [
        {k: v for k, v in row.items() if k != "computation"} for row in rows(one)
    ] == [{k: v for k, v in row.items() if k != "computation"} for row in rows(other)]


def test_a_run_that_stops_has_the_numbers_of_a_run_of_so_many_questions(
    posbench: POSBENCH,
    small: list[str],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = ["method.channel=3", "method.factor=0.0", "method.layers=[1,2]"]
    args = [*small, "stages=[evaluate,report]", *method, "runtime.round_questions=5"]
    with monkeypatch.context() as patched:
        stop_after(patched, 2)
        stopped = posbench(*args, "budget=1h")
    assert stopped.status == 0, stopped.err
    (folder,) = run_folders(outputs)
    sentence = "10 of 12 questions"
    assert sentence in stopped.out
    assert sentence in (folder / "report.html").read_text()
    assert sentence in (folder / "provenance.json").read_text()

    # The same command shows it, and makes no more.
    shown = posbench(*args, "budget=1h")
    assert shown.status == 0 and sentence in shown.out
    assert len(open_run_dir(folder).rows("predictions.jsonl")) == 2 * 3 * 10

    # A run of ten questions has the same rows but for their ids of the run, and the same table.
    fewer = [arg for arg in args if not arg.startswith("task.limit")]
    assert posbench(*fewer, "task.limit=10").status == 0
    (ten,) = [other for other in run_folders(outputs) if other != folder]
    assert (ten / "metrics.csv").read_bytes() == (folder / "metrics.csv").read_bytes()

    def texts(run: Path) -> list[Any]:
        rows = open_run_dir(run).rows("predictions.jsonl")
        return [(row["method"], row["id"], row["output"]) for row in rows]

    assert texts(ten) == texts(folder)

    # Without the budget the same run goes on to its end.
    assert posbench(*args).status == 0
    assert len(open_run_dir(folder).rows("predictions.jsonl")) == 2 * 3 * 12
    assert sentence not in (folder / "report.html").read_text()
    assert sentence not in (folder / "provenance.json").read_text()


def test_a_killed_run_goes_on_with_its_choice_and_the_time_that_is_left(
    posbench: POSBENCH,
    small: list[str],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from posbench.run import replies

    args = [*small, *EVALUATE, "runtime.round_questions=3", "budget=1h"]
    compute = replies.reply_to_batch
    calls = [0]

    def killed(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return compute(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(replies, "reply_to_batch", killed)
        assert posbench(*args).status == 130
    (folder,) = run_folders(outputs)
    (folder / ".seconds_used.json").write_text("3000.0")
    resumed = posbench(*args)
    assert resumed.status == 0 and "of 1h are left" in resumed.out
    assert run_folders(outputs) == [folder]
    alone = [*args[:-1], f"runtime.outputs={outputs / 'alone'}"]
    from posbench.cli.main import main

    assert main(alone) == 0
    (plain,) = run_folders(outputs / "alone")
    assert rows_of(plain) == rows_of(folder)


def test_a_row_that_failed_takes_its_round_along_and_no_later_one(
    posbench: POSBENCH,
    small: list[str],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four rounds of three questions; the second one failed, and no time is left to make it again."""
    from posbench.run import replies

    args = [*small, *EVALUATE, "runtime.round_questions=3", "budget=1h"]
    compute = replies.reply_to_batch
    calls = [0]

    def failing(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("no answer")
        return compute(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(replies, "reply_to_batch", failing)
        assert posbench(*args).status == 1
    (folder,) = run_folders(outputs)
    (folder / ".seconds_used.json").write_text("3599.0")
    resumed = posbench(*args)
    assert resumed.status == 0, resumed.err
    assert "9 of 12 questions" in " ".join(resumed.out.split())
    assert len(rows_of(folder)) == 3 * 9


def test_questions_positions_pairs_search_and_maps_are_lowered_but_not_what_is_typed(
    posbench: POSBENCH, outputs: Path
) -> None:
    result = posbench("model=tiny", "budget=60prompts", "task.positions=[0,5,9,13]")
    assert result.status == 0, result.err
    plan = plan_of(outputs)
    assert "task.positions" not in plan.settings
    assert plan.settings["task.limit"] < 500
    assert plan.prompts <= 60


def test_a_search_finds_the_constants_of_a_run_with_a_budget(
    posbench: POSBENCH, small: list[str], outputs: Path
) -> None:
    untyped = [arg for arg in small if not arg.startswith("task.calibration_examples")]
    result = posbench(*untyped, "budget=1h")
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    assert (folder / "found.yaml").is_file() and (folder / "attention.csv").is_file()


@pytest.mark.parametrize(
    ("tokens", "seconds_to_read", "most"),
    [(1, 10.0, 10), (101, 1.0, 30)],
    ids=["short", "long"],
)
def test_where_replies_may_end_early_more_may_be_asked(
    small: list[str], tokens: int, seconds_to_read: float, most: int
) -> None:
    """A question of three prompts takes 30 s, to read it or to write 101 tokens; 300 s hold ten of either."""
    untyped = [arg for arg in small if not arg.startswith(("task.limit", "stages"))]
    args = [*untyped, *EVALUATE, f"task.max_new_tokens={tokens}", "budget=1h"]
    prepared = prepare(compose_one(*args))

    def seconds(work: WorkEstimate) -> float:
        return seconds_to_read * work.prompts + 0.09 * work.decoded_tokens

    chooser = Chooser(prepared.config, prepared.reader, seconds, 1e9)
    budget = Budget("1h", seconds=3600.0)
    plan = _make_plan(chooser, budget, 300.0)
    assert plan.questions == 10 and plan.settings["task.limit"] == most
    assert plan.seconds == pytest.approx(30 * most)
    assert ("up to 30 where replies end early" in plan.lines()[0]) == (most == 30)


# Studies

STUDIES = {
    "attention_to_gold": "examples",
    "channel_subtraction": "examples",
    "crop_mask": "examples",
    "doubling": "examples",
    "hidden_perturbation": "texts",
    "positional_channels": "strings",
    "remedies": "examples",
    "rollout": "prompts",
    "rope_curves": "prompts",
    "score_map": "samples",
}
"""Studies that tell their work beforehand, and the size that a budget lowers."""


def study_chooser(study: str, *overrides: str) -> StudyChooser:
    config = config_of("model=tiny", f"study={study}", "task.limit=20", *overrides)
    return StudyChooser(config, read_checkpoint(config.model))


def test_every_study_that_tells_its_work_has_sizes() -> None:
    for name in choices(*paths.group_folders("study")):
        node = read_yaml(paths.find_choice("study", name), hint="")
        cls, _ = resolve_target(node, Study, "study")  # type: ignore[type-abstract]
        tells = cls.workload is not Study.workload
        assert tells == bool(cls.smallest), name
        if tells and name in STUDIES:
            assert [*cls.smallest] == [STUDIES[name]]
            assert cls.smallest.keys() <= default_values(cls).keys()


@pytest.mark.parametrize("study", STUDIES)
def test_a_smaller_study_asks_less_and_never_less_than_its_smallest(study: str) -> None:
    chooser = study_chooser(study)
    assert chooser.config.study is not None
    (smallest,) = chooser.config.study.smallest.values()
    key = f"study.{STUDIES[study]}"
    costs = []
    for count in (1, smallest, chooser.limit // 2, chooser.limit):
        size = chooser.settings_for(count).get(key, chooser.limit)
        assert size == max(count, smallest)
        works = chooser.works({}, count)
        costs.append(sum(work.tokens for work in works))
    assert 0 < costs[0] == costs[1] <= costs[2] <= costs[3]
    assert costs[1] < costs[3]
    assert chooser.settings_for(chooser.limit) == {}
    assert study_chooser(study, f"{key}={2 * smallest}").sizes == {}


def test_the_sizes_of_a_study_typed_by_hand_are_the_same_run(
    posbench: POSBENCH, small: list[str], outputs: Path
) -> None:
    args = [arg for arg in small if not arg.startswith(("search", "stages"))]
    args += ["study=crop_mask"]
    refused = posbench(*args, "budget=2prompts")
    assert refused.status == 2
    assert_refused(refused.err, "budget", "2prompts", allowed="crop_mask")
    enough = refused.err.partition("set ")[2].split(",")[0]
    assert posbench(*args, enough).status == 0
    (folder,) = run_folders(outputs)
    plan = plan_of(outputs)
    assert plan.settings == {"study.examples": 6}
    assert f"budget={plan.prompts}prompts" == enough
    by_hand = posbench(*args, *shlex.split(module.spelled(plan.settings)))
    assert by_hand.status == 0 and "finished before" in by_hand.out
    assert run_folders(outputs) == [folder]


def test_a_study_is_tried_at_small_sizes_and_leaves_nothing_of_that(
    posbench: POSBENCH,
    small: list[str],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []
    time_study = study_budget._time_study

    def record(config: Any, run: Any) -> float:
        tried.append(config.study.prompts)
        return time_study(config, run)

    monkeypatch.setattr(study_budget, "_time_study", record)
    args = [arg for arg in small if not arg.startswith(("search", "stages"))]
    args += ["study=rollout"]
    result = posbench(*args, "budget=1h")
    assert result.status == 0, result.err
    assert tried and tried == sorted(tried) and tried[0] == 8
    (folder,) = run_folders(outputs)
    plan = plan_of(outputs)
    # All of it fits into an hour, so this is the run without a budget.
    assert plan.settings == {} and plan.seconds < 3600
    assert "finished before" in posbench(*args).out
    assert len(open_run_dir(folder).rows("flow.jsonl")) == 36


def test_a_study_of_hours_says_so(
    posbench: POSBENCH, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [arg for arg in small if not arg.startswith(("search", "stages"))]
    monkeypatch.setattr("posbench.pipeline.execute.LIGHT_PARAMETERS", 1)
    monkeypatch.setattr(module, "LONG_RUN_SECONDS", 1e-9)
    result = posbench(*args, "study=rollout", "study.prompts=9")
    assert result.status == 0 and "budget=10min holds all of it" in result.out


# Refusals


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["study=chain", "budget=10min"], "study"),
        (["study=bucket_search", "budget=10min"], "model"),
        (
            ["study=crop_mask", "stages=[study,evaluate,report]", "budget=10min"],
            "evaluate",
        ),
        (["budget=10min", "runtime.workers=2"], "runtime.workers"),
        (["search=router", "method=moice", "stages=[search,report]", "budget=1h"], ""),
    ],
)
def test_what_cannot_be_divided_beforehand_is_refused(
    posbench: POSBENCH, args: list[str], named: str
) -> None:
    model = [] if "study=bucket_search" in args else ["model=tiny"]
    result = posbench(*model, *args)
    assert result.status == 2
    assert_refused(result.err, "budget", allowed=named)


def test_a_budget_that_is_too_small_names_one_that_does(
    posbench: POSBENCH, small: list[str], outputs: Path
) -> None:
    result = posbench(*small, *EVALUATE, "budget=2prompts")
    assert result.status == 2
    assert_refused(result.err, "budget", "2prompts", hint="budget=10prompts")
    assert not run_folders(outputs)


def test_what_is_submitted_takes_no_budget(posbench: POSBENCH) -> None:
    args = ["submit", "model=tiny", "runtime/cluster=local", "budget=10min"]
    result = posbench(*args, verb=True)
    assert result.status == 2
    assert_refused(result.err, "budget", "10min", hint="task.limit")


def test_a_sweep_gives_each_job_its_budget(
    posbench: POSBENCH, small: list[str], outputs: Path
) -> None:
    untyped = [arg for arg in small if not arg.startswith(("task.limit", "stages"))]
    result = posbench("-m", *untyped, *EVALUATE, "budget=15prompts,30prompts")
    assert result.status == 0, result.err
    sizes = [
        len(open_run_dir(folder).rows("predictions.jsonl"))
        for folder in run_folders(outputs)
    ]
    assert sorted(sizes) == [15, 30]


# Precision


def test_bfloat16_is_found_in_the_list_of_instructions(tmp_path: Path) -> None:
    for line, wanted in {
        "flags\t\t: fpu avx512_bf16 avx2": True,
        "flags\t\t: amx_bf16": True,
        "Features\t: fp asimd bf16": True,
        "flags\t\t: fpu avx2 avx512f": False,
        "model name\t: bf16": False,
    }.items():
        file = tmp_path / "cpuinfo"
        file.write_text(f"processor\t: 0\n{line}\n")
        assert precision.has_bfloat16(file) is wanted
    assert not precision.has_bfloat16(tmp_path / "absent")


def test_the_speed_of_bfloat16_is_that_of_a_product() -> None:
    def timer(left: torch.Tensor, right: torch.Tensor) -> float:
        assert left.shape[1] == right.shape[0] == 8
        return 3.0 if left.dtype == torch.float32 else 2.0

    assert precision.bfloat16_speedup(8, timer) == 1.5


@pytest.mark.parametrize(("speedup", "dtype"), [(2.0, "bfloat16"), (1.1, "auto")])
def test_a_budget_takes_bfloat16_where_it_is_clearly_faster(
    speedup: float,
    dtype: str,
    posbench: POSBENCH,
    small: list[str],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "has_bfloat16", lambda: True)
    monkeypatch.setattr(module, "bfloat16_speedup", lambda width: speedup)
    args = [arg for arg in small if not arg.startswith("model.dtype")]
    result = posbench(*args, *EVALUATE, "budget=1h")
    assert result.status == 0 and "bfloat16" in result.out
    (folder,) = run_folders(outputs)
    assert open_run_dir(folder).config()["model"]["dtype"] == dtype
    facts = json.loads((folder / "provenance.json").read_text())
    assert facts["identity"]["dtype"] == dtype


def test_an_embedded_model_stays_float32(
    posbench: POSBENCH, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_bfloat16", lambda: True)
    monkeypatch.setattr(module, "bfloat16_speedup", lambda width: 9.0)
    result = posbench("model=tiny", *EVALUATE, "task.limit=3", "budget=1h")
    assert result.status == 0 and "bfloat16" not in result.out


# Without a budget


def test_a_run_of_hours_says_so_with_a_budget_that_would_do(
    posbench: POSBENCH,
    small: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = [*small, *EVALUATE]
    assert "budget" not in posbench(*args).out
    monkeypatch.setattr("posbench.pipeline.execute.LIGHT_PARAMETERS", 1)
    monkeypatch.setattr(module, "LONG_RUN_SECONDS", 1e-9)
    result = posbench(*args, "task.limit=11")
    # A few prompts of tiny are done long before the smallest budget ends.
    assert result.status == 0 and "budget=10min holds all of it" in result.out
    assert "by the length of its replies" not in result.out
    # Most replies end long before the most tokens that they may have.
    study = ["study=remedies", "study.methods=[documents_twice]", "stages=[study]"]
    small = [setting for setting in small if not setting.startswith("search")]
    for sizes in ([*EVALUATE, "task.limit=10"], [*study, "task.limit=9"]):
        args = [*small, *sizes, "task.max_new_tokens=100"]
        assert "by the length of its replies" in posbench(*args).out
