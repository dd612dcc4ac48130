"""``posbench diagnose`` from the command line to its files, on models whose answer is known."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
from rich.console import Console

import posbench as library
from posbench import paths
from posbench.diagnose.allowance import Allowance
from posbench.diagnose.course import Course
from posbench.diagnose.outcome import Remedy, Shape, Source
from posbench.diagnose.race import FIRST_ROUND
from posbench.diagnose.remedies import Remedies
from posbench.diagnose.runs import Runs
from posbench.diagnose.signal import answer_signal, has_no_signal, spread_over_positions
from posbench.errors import UserError
from posbench.methods.choice import all_choices
from posbench.pipeline.compose import compose
from posbench.pipeline.config import Config
from posbench.pipeline.execute import execute
from posbench.pipeline.prepare import prepare
from posbench.run.budget import Budget, Stopwatch
from posbench.stats.bootstrap import Estimate
from posbench.tasks import KVRetrieval
from posbench.tasks.nq_multidoc import NQMultiDoc
from tests.conftest import Result
from tests.messages import assert_line_names, assert_refused

ROOT = Path(__file__).parents[2]
FEW = ("task.positions=[0%,50%,100%]", "task.limit=40", "runtime.resamples=200")


@pytest.fixture
def diagnose(
    posbench: Callable[..., Result], outputs: Path
) -> Callable[..., tuple[Result, dict[str, Any]]]:
    """The verb in this process, and what its JSON file says."""

    def call(*args: str) -> tuple[Result, dict[str, Any]]:
        result = posbench("diagnose", *args)
        files = sorted(outputs.glob("diagnose/*/diagnosis.json"))
        return result, json.loads(files[-1].read_text()) if files else {}

    return call


def test_a_model_that_loses_the_middle_is_explained_and_fixed(
    posbench: Callable[..., Result],
    diagnose: Callable[..., tuple[Result, dict[str, Any]]],
    outputs: Path,
) -> None:
    result, found = diagnose("model=tiny", *FEW)
    assert result.status == 0, result.err
    assert found["verdict"] == "fixed"
    assert found["shape"]["name"] == "middle drop"
    assert set(found["source"]["named"]) == {"causal mask", "position ids"}
    # The race and its winner: each method that helps tiny raises the answer's likelihood (docs/remedies.md).
    assert found["winner"] in ("scale_channel", "layer_scaling", "rope_base")
    gains = {entry["name"]: entry["gain"] for entry in found["remedies"]}
    assert gains[found["winner"]]["ci_low"] > 0
    assert found["next"].startswith("posbench export ")

    # The last token sees less of a gold item in the middle, where the answers are lost.
    attention = pd.read_csv(Path(found["runs"]["attention"]) / "attention.csv")
    to_gold = attention[attention["item"] == attention["gold_position"]]
    by_position = to_gold.groupby("gold_position")["attention"].sum()
    assert by_position.iloc[1] < min(by_position.iloc[0], by_position.iloc[2])

    # Held-back questions are none of those before.
    shape = questions_of(Path(found["runs"]["shape"]))
    held_back = questions_of(Path(found["runs"]["held-back"]))
    assert shape and held_back and shape.isdisjoint(held_back)

    folder = next(outputs.glob("diagnose/*__*"))
    page = (folder / "report.html").read_text()
    for part in (
        "Shape",
        "Attention",
        "Source",
        "Remedies",
        "Held-back",
        "Cost",
        found["next"],
    ):
        assert part in page
    badge = ElementTree.parse(folder / "badge.svg").getroot()
    assert "fixed" in "".join(badge.itertext())
    assert_line_names(result.out, "next:", "posbench export")

    before = replies_of(outputs)
    again, found_again = diagnose("model=tiny", *FEW)
    assert again.status == 0
    for part in ("verdict", "shape", "source", "winner", "runs", "next"):
        assert found_again[part] == found[part]
    assert before == replies_of(outputs)

    # The next command is one that runs.
    command = shlex.split(found["next"])
    exported = posbench(*command[1:-1], str(outputs / "fix"), verb=True)
    assert exported.status == 0, exported.err


def replies_of(outputs: Path) -> dict[Path, bytes]:
    """The rows of every run, by its folder."""
    files = outputs.glob("*/v*/*/*.jsonl")
    return {file: file.read_bytes() for file in files}


def questions_of(folder: Path) -> set[str]:
    """Prompts of a run, by their digests."""
    lines = (folder / "predictions.jsonl").read_text().splitlines()
    return {json.loads(line)["prompt"] for line in lines}


def make_course(*args: str) -> Course:
    """A course whose shape was found with 30 questions at each position."""
    course = Course(args, Budget.parse("10min"), Console(quiet=True))
    contrast = Estimate(0.3, 0.2, 0.4, 30)
    course.diagnosis.shape = Shape("primacy", {"primacy": contrast}, [contrast] * 3, 30)
    return course


def remedies_of(course: Course) -> Remedies:
    """The part of a course that races methods."""
    return Remedies(course.runs, course.sizes, course.folder)


def nq_file(folder: Path, questions: int, documents: int) -> Path:
    """A file of the form of NaturalQuestions, the gold document first."""
    document = {"title": "title", "text": "text", "isgold": False}
    gold_first = [document | {"isgold": True}, *[document] * (documents - 1)]
    rows = [
        {"question": f"question {n}", "answers": ["yes"], "ctxs": gold_first}
        for n in range(questions)
    ]
    file = folder / "nq.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.mark.parametrize("model", ["tiny", "tiny_nope"])
def test_the_first_prompts_of_a_race_have_gold_items_all_over_the_prompt(
    model: str,
) -> None:
    examples = remedies_of(make_course(f"model={model}"))._split_for_race().examples
    for few in (examples[:FIRST_ROUND], examples):
        depths = [e.gold_position / (len(e.items) - 1) for e in few]
        assert min(depths) < 0.25 and max(depths) > 0.75
        assert 0.35 < sum(depths) / len(depths) < 0.65


@pytest.mark.parametrize(
    ("typed", "raced"),
    [((), 32), (("task.pairs=12",), 12), (("task.calibration_pairs=8",), 8)],
)
def test_methods_are_raced_on_as_many_items_as_they_are_asked_about(
    typed: tuple[str, ...], raced: int
) -> None:
    course = make_course("model=tiny", *typed)
    examples = remedies_of(course)._split_for_race().examples
    assert {len(example.items) for example in examples} == {raced}


def test_no_question_of_a_race_is_asked_of_its_winner(tmp_path: Path) -> None:
    data = nq_file(tmp_path, questions=90, documents=20)
    course = make_course("model=tiny")
    task = NQMultiDoc(path=str(data), limit=20, documents=10)
    course.runs.config = replace(course.runs.config, task=task)
    split = remedies_of(course)._split_for_race()
    raced = {example.question_id for example in split.examples}
    assert split.num_held_back == 30
    asked = {e.question_id for e in replace(task, limit=30).evaluation()}
    assert len(raced) == 48 and len(asked) == 30 and not raced & asked


@pytest.mark.parametrize(
    ("prompts", "verdict"), [(FIRST_ROUND - 4, "bias"), (FIRST_ROUND, "not fixed")]
)
def test_a_race_of_few_prompts_does_not_tell_that_nothing_helps(
    prompts: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = make_course("model=tiny")
    course.diagnosis.verdict = "bias"
    worse = Remedy("scale_channel", Estimate(-0.2, -0.3, -0.1, prompts))
    monkeypatch.setattr(
        "posbench.diagnose.remedies.race", lambda *args, **kwargs: [worse]
    )
    remedies_of(course).run()
    assert course.diagnosis.verdict == verdict
    assert course.diagnosis.winner == ""


@pytest.mark.parametrize(
    ("seconds_of_shape", "searches"), [(0.1 * 90, True), (5.0 * 90, False)]
)
def test_constants_are_searched_only_where_the_budget_has_room(
    seconds_of_shape: float, searches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search takes as long as 300 prompts of the shape: ten minutes hold it at 0.1 s a prompt, not at 5 s."""
    course = make_course("model=tiny")
    monkeypatch.setattr(Stopwatch, "seconds", 0.0)
    course.diagnosis.prompts["shape"] = 90
    course.runs.seconds_of_run["shape"] = seconds_of_shape
    asked = []

    def execute_nothing(part: str, *args: Any, **kwargs: Any) -> Path:
        asked.append(part)
        raise UserError("search", part, "time", "nothing")

    monkeypatch.setattr(course.runs, "execute", execute_nothing)
    choice = all_choices(paths.config_folders(None), {})["scale_channel"]
    found = remedies_of(course)._search(choice, 30)
    assert found.choice is None and bool(asked) == searches
    assert found.note == (
        "search: time"
        if searches
        else "its search takes about 25 min, and 8.8 min are left for it"
    )


def test_a_winner_that_is_a_list_of_methods_is_asked_with_its_constants() -> None:
    methods = "method=[layer_scaling,scale_channel]"
    factor = "method.parts.scale_channel.factor=0"
    course = make_course("model=tiny", methods, factor)
    choices, kept = remedies_of(course)._choices(30)
    assert not kept
    (choice,) = choices.values()
    spelt = remedies_of(course)._spell_method(choice)
    assert spelt[0] == methods and factor in spelt
    part = course.runs.prepare(spelt, method="", in_process=True)
    assert part.choice.name == choice.name and part.choice.build() == choice.build()


@pytest.mark.parametrize(
    ("lead", "lead_over_question", "prompts", "winner"),
    [
        (0.1, 0.1, 48, "question_first_and_last-rope_base"),
        (-0.1, 0.1, 48, ""),
        (0.1, -0.1, 48, ""),
        (0.1, 0.1, 4, ""),
    ],
)
def test_the_question_first_wins_with_a_method_where_it_is_surely_better(
    lead: float,
    lead_over_question: float,
    prompts: int,
    winner: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leads are the least that the pair may be ahead of the method alone, and of the question alone."""
    course = make_course("model=tiny")
    alone = Remedy("rope_base", Estimate(0.4, 0.2, 0.6, 48))
    pair = Remedy("question_first_and_last-rope_base", Estimate(0.9, 0.5, 1.3, 48))
    question = Remedy("question_first_and_last", Estimate(0.1, -0.2, 0.4, 48))
    races = iter([[alone], [pair, alone, question]])
    monkeypatch.setattr(Remedies, "_race", lambda *args: next(races))
    least = {"rope_base": lead, "question_first_and_last": lead_over_question}
    monkeypatch.setattr(
        "posbench.diagnose.remedies.lead_over",
        lambda first, second, *args: Estimate(0.5, least[second], 0.9, prompts),
    )
    asked = []
    monkeypatch.setattr(
        Remedies, "_hold_back", lambda _, choice, n: asked.append(choice)
    )
    remedies_of(course).run()
    assert [remedy.name for remedy in course.diagnosis.remedies[:2]] == [
        pair.name,
        alone.name,
    ]
    ((choice,), found) = asked, course.diagnosis.winner
    assert found == choice.name == (winner or "rope_base")
    assert course.diagnosis.winner_changes == (
        "prompt and model" if winner else "model"
    )
    spelt = remedies_of(course)._spell_method(choice)
    built = course.runs.prepare(spelt, method="", in_process=True).choice.build()
    assert built == choice.build()


def search_constants_of(
    course: Course, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the model's file lack the constants of a method, and the budget have room for their search."""
    prepared = course.runs.prepare

    def without_block(*args: Any, **kwargs: Any) -> Config:
        config = prepared(*args, **kwargs)
        config.model.blocks.pop(method, None)
        return config

    monkeypatch.setattr(course.runs, "prepare", without_block)
    monkeypatch.setattr(course.allowance, "left", lambda share: 1e9)
    monkeypatch.setattr(course.sizes, "measured_cost_of_prompt", lambda: 0.0)


def test_a_base_that_the_search_kept_is_not_raced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is the unmodified model, and could win by rounding."""
    course = make_course("model=tiny")
    course.runs.config.model.blocks.pop("rope_base")
    monkeypatch.setattr(
        "posbench.diagnose.remedies.all_choices",
        lambda *args: {
            name: choice
            for name, choice in all_choices(*args).items()
            if name in ("rope_base", "scale_channel", "question_first_and_last")
        },
    )
    search_constants_of(course, "rope_base", monkeypatch)
    for base, is_raced in ((10000.0, False), (30000.0, True)):
        (tmp_path / "found.yaml").write_text(
            f"rope_base: {{base: {base}, own_base: 10000.0}}"
        )
        monkeypatch.setattr(course.runs, "execute", lambda *args, **kwargs: tmp_path)
        choices, kept = remedies_of(course)._choices(30)
        assert ("rope_base" in choices) == is_raced
        assert [remedy.name for remedy in kept] == ([] if is_raced else ["rope_base"])
        if is_raced:
            assert choices["rope_base"].values["base"] == base


def test_a_method_without_its_training_is_raced_as_far_as_it_goes() -> None:
    course = make_course("model=tiny")
    router = remedies_of(course)._choices(30)[0]["moice"].values
    assert router["weights"].endswith("moice.safetensors")
    course = make_course("model=tiny_b")
    choice = remedies_of(course)._choices(30)[0]["moice"]
    assert choice.values["weights"] == "uniform"
    assert "method.weights=uniform" in remedies_of(course)._spell_method(choice)


def test_a_channel_that_the_search_kept_is_not_raced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A search that found no better channel than none names none."""
    course = make_course("model=tiny")
    search_constants_of(course, "scale_channel", monkeypatch)
    (tmp_path / "found.yaml").write_text(
        "scale_channel: {channel: null, factor: 1.0, layers: null}"
    )
    monkeypatch.setattr(course.runs, "execute", lambda *args, **kwargs: tmp_path)
    choices, kept = remedies_of(course)._choices(30)
    assert "scale_channel" not in choices
    assert [remedy.name for remedy in kept] == ["scale_channel"]


def test_a_pair_whose_gain_is_sure_leaves_the_verdict_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    course = make_course("model=tiny")
    course.diagnosis.verdict = "bias"
    course.diagnosis.source = Source(Estimate(1.8, 1.2, 2.4, 9), {}, (), (), 30)
    alone = Remedy("rope_base", Estimate(0.2, -0.1, 0.5, 48))
    pair = Remedy("question_first_and_last-rope_base", Estimate(0.5, 0.1, 0.9, 48))
    races = iter([[alone], [pair, alone]])
    monkeypatch.setattr(Remedies, "_race", lambda *args: next(races))
    monkeypatch.setattr(
        "posbench.diagnose.remedies.lead_over",
        lambda *args: Estimate(0.3, -0.1, 0.7, 48),
    )
    remedies_of(course).run()
    assert course.diagnosis.winner == "" and course.diagnosis.verdict == "bias"
    assert pair.name in course.diagnosis.remedies_note


def test_a_source_is_that_of_the_unmodified_model() -> None:
    """A method that was typed takes part in the race alone."""
    runs = Runs(
        ["model=tiny", "method=scale_channel", "method.factor=0"],
        Allowance(Budget.parse("10min"), None),
        Console(quiet=True),
    )
    overrides = runs.overrides(["study=bias_source"], stages="study")
    assert [arg for arg in overrides if arg.startswith("method")] == ["method=none"]


@pytest.mark.parametrize("part", ["source", "structure", "prompts"])
def test_a_part_that_is_refused_leaves_a_note(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is a study at three positions; what it does not fit ends the part, not the diagnosis."""
    course = make_course("model=tiny", "task.pairs=12")
    diagnosis = course.diagnosis
    diagnosis.prompts |= {"shape": 100}
    course.runs.seconds_of_run["shape"] = 0.1
    diagnosis.source = Source(Estimate(1, 0.5, 1.5, 9), {}, (), (), 30)
    made = []

    def refuse(name: str, overrides: list[str], **choices: Any) -> Path:
        made.append((name, overrides, choices["stages"]))
        raise UserError("task.x", "value", "something else", "hint")

    monkeypatch.setattr(course.runs, "execute", refuse)
    getattr(course, f"_{part}")()
    ((name, overrides, stage),) = made
    assert (name, stage) == (part, "study")
    assert overrides[0].startswith("study=")
    assert "task.positions=[0, 5, 11]" in overrides
    notes = {
        "source": diagnosis.source_note,
        "structure": diagnosis.structure,
        "prompts": diagnosis.prompt_changes_note,
    }
    assert notes.pop(part).endswith("task.x: something else")
    assert not any(notes.values())


def test_a_shape_that_a_budget_cut_short_goes_on_with_a_larger_one(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    run = (
        "model=tiny",
        "method=none",
        "task.positions=[0%,50%,100%]",
        "task.limit=40",
        "stages=[evaluate]",
        "runtime.round_questions=5",
    )
    (config,) = prepared(*run, f"runtime.outputs={outputs}")
    asked = []
    for seconds in (1e-3, 1e-3, 600.0):
        budget = Budget(f"{seconds}s", seconds=seconds)
        folder = execute(
            replace(config, budget=budget), command="", console=Console(quiet=True)
        )
        asked.append(len(questions_of(folder)))
    assert asked[0] == asked[1] < asked[2] == 3 * 40


@pytest.mark.parametrize(
    ("args", "asked", "needed", "limit", "minutes"),
    [
        # Of 10 min 3 went for 30 questions: 300 of them take 30 min, and a fifth more to be safe.
        ((), 30, 300, None, range(35, 42)),
        # Beyond what a diagnosis asks by itself the limit is typed.
        ((), 30, 1500, "1500", range(180, 210)),
        (("task.limit=30",), 30, 300, "300", range(35, 42)),
        # A limit that is high enough stays.
        (("task.limit=400",), 30, 300, None, range(35, 42)),
        # A limit alone that was too low needs no larger budget.
        (("task.limit=30",), 30, 40, "40", range(10, 11)),
    ],
)
def test_the_next_command_has_the_questions_and_the_budget_that_the_verdict_asks_for(
    args: tuple[str, ...],
    asked: int,
    needed: int,
    limit: str | None,
    minutes: range,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    course = make_course("model=tiny", *args)
    course.diagnosis.verdict = "cannot tell"
    course.diagnosis.needed_questions = needed
    course.runs.seconds_of_run["shape"] = 180.0
    monkeypatch.setattr(Allowance, "spent", 180.0)
    following = shlex.split(course._next_command())
    settings = dict(arg.split("=", 1) for arg in following[2:])
    typed = dict(arg.split("=", 1) for arg in args)
    assert settings.get("task.limit") == (limit or typed.get("task.limit"))
    assert int(settings["budget"].removesuffix("min")) in minutes
    assert len(following) == len(settings) + 2, "each key once"


def test_a_limit_is_honoured_however_large() -> None:
    assert make_course("model=tiny").sizes.shape_limit() == 1000
    assert make_course("model=tiny", "task.limit=1100").sizes.shape_limit() == 1100


def test_a_file_without_further_questions_is_told_to_be_so(tmp_path: Path) -> None:
    data = nq_file(tmp_path, questions=30, documents=10)
    course = make_course("model=tiny")
    task = NQMultiDoc(path=str(data), limit=20, documents=10, positions=(0, 4, 9))
    course.runs.config = replace(course.runs.config, task=task)
    course.diagnosis.verdict = "cannot tell"
    course.diagnosis.needed_questions = 500
    assert course._next_command() == f"add questions to {data}: it has 30"


def undecided_course(*args: str, budget: str = "10min", spent: float = 30.0) -> Course:
    """A course of a bias that a method may remove, whose runs took these seconds."""
    course = make_course(*args)
    course.allowance.budget = Budget.parse(budget)
    course.diagnosis.verdict = "bias"
    course.diagnosis.remedies = [Remedy("scale_channel", Estimate(0.2, -0.3, 0.7, 12))]
    course.runs.seconds_of_run["shape"] = spent
    return course


@pytest.mark.parametrize(
    ("args", "budget", "spent", "asks_more"),
    [
        ((), "10min", 30.0, True),
        # The race has its smallest size up to ten minutes, or the one that was typed.
        ((), "2min", 30.0, False),
        ((), "2min", 100.0, True),
        (("task.calibration_examples=20",), "10min", 30.0, False),
        (("task.calibration_examples=20",), "10min", 400.0, True),
    ],
)
def test_a_larger_budget_is_asked_for_only_where_it_would_ask_more(
    args: tuple[str, ...], budget: str, spent: float, asks_more: bool
) -> None:
    course = undecided_course("model=tiny", *args, budget=budget, spent=spent)
    following = course._next_command()
    assert bool(following) == asks_more
    sizes = course.sizes
    if asks_more and spent < 60:
        larger = Budget.parse(following.rpartition("budget=")[2])
        now = sizes.race_prompts()
        course.allowance.budget = larger
        assert sizes.race_prompts() > now


def test_a_race_has_fewer_prompts_where_the_file_has_no_more(tmp_path: Path) -> None:
    data = nq_file(tmp_path, questions=120, documents=10)
    task = NQMultiDoc(path=str(data), limit=20, documents=10, positions=(0, 4, 9))
    course = undecided_course("model=tiny", budget="30min")
    course.runs.config = replace(course.runs.config, task=task)
    assert course.sizes.race_prompts() == 144
    assert len(remedies_of(course)._split_for_race().examples) == 48
    # More time would race no more of them.
    assert course._next_command() == ""
    assert course.diagnosis.shape is not None
    course.diagnosis.shape = replace(course.diagnosis.shape, questions=120)
    assert course._next_command().startswith("add questions to ")


def prepared(*args: str) -> list[Config]:
    """The checked configs of a command line."""
    return [prepare(job).config for job in compose(list(args)).composed]


def test_a_random_model_ends_at_the_floor(
    diagnose: Callable[..., tuple[Result, dict[str, Any]]], checkpoint: Path
) -> None:
    result, found = diagnose(f"model={checkpoint}", "task.pairs=8", *FEW)
    assert result.status == 0, result.err
    assert found["verdict"] == "cannot do the task"
    following = shlex.split(found["next"])
    assert [arg for arg in following if arg.startswith("task.pairs=")] != []
    for key in ("task.pairs=", "budget="):
        assert sum(arg.startswith(key) for arg in following) == 1
    assert set(found["runs"]) <= {"pilot"} and sum(found["prompts"].values()) <= 150


def test_own_items_are_moved_and_no_more_asked_than_the_file_has(
    diagnose: Callable[..., tuple[Result, dict[str, Any]]],
) -> None:
    file = ROOT / "tests/data/own/words.jsonl"
    result, found = diagnose(
        "tiny", "task=own_data", f"task.path={file}", "runtime.resamples=100"
    )
    assert result.status == 0, result.err
    # tiny loses the middle of its prompt; twenty lines at five positions.
    assert_line_names(result.out, "at most 100,")
    assert found["task"] == "own_data" and found["prompts"]["shape"] == 100
    rows = pd.read_json(Path(found["runs"]["shape"]) / "predictions.jsonl", lines=True)
    by_position = rows["scores"].map(lambda row: row["accuracy"])
    means = by_position.groupby(rows["gold_position"]).mean()
    assert len(means) == 5 and means.iloc[2] < min(means.iloc[0], means.iloc[-1])
    assert ", and the data hold 20" in found["reason"]
    assert found["next"] == f"add questions to {file}: it has 20"


def test_a_trained_model_tells_after_a_few_questions(tiny: Any) -> None:
    task = KVRetrieval(
        prompt="compact", records="words", pairs=8, limit=12, max_new_tokens=1
    )
    examples = spread_over_positions(task.evaluation())
    gain = answer_signal(tiny, task, examples)
    assert gain.n < len(examples) and gain.ci_low > 0.1


@pytest.mark.parametrize(
    ("seconds_per_prompt", "share", "questions"),
    [(0.1, 1.0, 5), (2.0, 1.0, 4), (2.0, 0.5, 2), (60.0, 1.0, 1)],
)
def test_a_round_is_as_large_as_the_time_that_is_left(
    seconds_per_prompt: float, share: float, questions: int
) -> None:
    """Of 60 seconds 57 may go; a question of the shape is five prompts, one of the pilot three."""
    course = Course(["model=tiny"], Budget.parse("60s"), Console(quiet=True))
    course.allowance.watch = Stopwatch()
    course.diagnosis.prompts["pilot"] = 15
    course.diagnosis.seconds["pilot"] = 15 * seconds_per_prompt
    assert course.sizes.round_questions("pilot", 6, share) == questions
    # Without a measured part, and under a budget that is no time, rounds are whole.
    assert course.sizes.round_questions("first look", 6, share) == 5
    course.allowance.budget = Budget.parse("500prompts")
    assert course.sizes.round_questions("pilot", 6, share) == 5


def test_a_prompt_tells_a_trained_model_its_answer_and_a_blind_one_nothing(
    tiny: Any, checkpoint: Path
) -> None:
    task = KVRetrieval(
        prompt="compact", records="words", pairs=8, limit=10, max_new_tokens=1
    )
    examples = spread_over_positions(task.evaluation())
    assert len({example.question_id for example in examples}) == len(examples) == 10
    assert len({example.gold_position for example in examples}) > 1
    gain = answer_signal(tiny, task, examples)
    own = tiny.answer_token_loss(
        [
            (tiny.encode(e.prompt).ids, tiny.tokenizer(e.answers[0])["input_ids"])
            for e in examples
        ]
    )
    # Under a prompt without it an answer is about one of 72 words.
    assert gain.value > 1 and float(own.mean()) < 1
    assert not has_no_signal(gain)
    # Without attention a model sees the last token alone, which all prompts share.
    blind = library.load(str(checkpoint), dtype="float32")
    for layer in blind.model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    gain = answer_signal(blind, task, examples)
    assert has_no_signal(gain) and gain.value == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("stages=[search]",), "stages"),
        (("study=crop_mask",), "study"),
        (("task=mmlu",), "task"),
        (("task=own_data", "task.path=tests/data/own/choices.jsonl"), "task"),
        (("task=own_data", "task.path=tests/data/own/long_text.jsonl"), "task"),
        (("-m", "task.pairs=8,16"), "diagnose"),
        (("budget=soon",), "budget"),
        (("task.positions=[0,5]",), "task.positions"),
    ],
)
def test_what_a_diagnosis_chooses_or_cannot_ask_is_refused(
    posbench: Callable[..., Result], outputs: Path, args: tuple[str, ...], field: str
) -> None:
    result = posbench("diagnose", "model=tiny", *args)
    assert result.status == 2
    assert_refused(result.err, field)
    assert not outputs.exists()


def test_the_last_of_two_typed_numbers_counts_as_it_does_in_a_run() -> None:
    runs = SimpleNamespace(args=["task.limit=5", "++task.limit=50", "task.pairs=x"])
    assert Runs.typed_number(runs, "task.limit") == 50  # type: ignore[arg-type]
    assert Runs.typed_number(runs, "task.pairs") is None  # type: ignore[arg-type]
