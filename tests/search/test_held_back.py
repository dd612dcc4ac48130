"""What a search gains on prompts that it never saw, and resume after damage to what a search keeps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from posbench.methods import ScaleChannel
from posbench.methods.layer_scaling import LayerScaling
from posbench.model.lm import LM, GeneratedReply
from posbench.report.glance import gain_glance
from posbench.search import held_back
from posbench.search.held_back import gain_facts, summary_line
from posbench.search.scales import calibration_questions
from posbench.tasks import KVRetrieval
from posbench.tasks.nq_multidoc import NQMultiDoc
from tests.conftest import Result, run_folders
from tests.messages import assert_names
from tests.rounding import assert_same, embedded_noise, log_probabilities

CHANNEL = [
    "model=tiny",
    "runtime.device=cpu",
    "search.strings=20",
    "search.factors=[0.5]",
]
CHANNEL += ["task.calibration_examples=24", "task.limit=1", "stages=[search]"]
WORDS = {"prompt": "compact", "records": "words"}


def only(outputs: Path) -> Path:
    (folder,) = run_folders(outputs)
    return folder


def test_a_gain_is_that_of_a_plain_loop_over_new_prompts(
    posbench: Callable[..., Result], outputs: Path, tiny: LM
) -> None:
    result = posbench(*CHANNEL)
    assert result.status == 0, result.err
    block = yaml.safe_load((only(outputs) / "found.yaml").read_text())["scale_channel"]
    facts = block["held_back"]
    chosen = {name: block[name] for name in ("channel", "factor", "layers")}
    task = KVRetrieval(**WORDS, pairs=32, calibration_pairs=32, calibration_examples=24)
    examples = task.held_back(24)
    pairs = [e.prompt for e in examples], [e.answers[0] for e in examples]
    before = np.array(
        [tiny.answer_loss([p], [a]).item() for p, a in zip(*pairs, strict=True)]
    )
    with ScaleChannel(**chosen | {"layers": tuple(chosen["layers"])}).applied(tiny):
        after = np.array(
            [tiny.answer_loss([p], [a]).item() for p, a in zip(*pairs, strict=True)]
        )
    assert facts["n"] == 24 and facts["measure"] == "loss"
    gains = before - after
    noise = embedded_noise("tiny", log_probabilities)
    for name, values in {"unmodified": before, "found": after, "gain": gains}.items():
        assert_same(facts[name], values.mean(), noise, "losses")
    draws = np.random.default_rng(1).choice(gains, (4000, 24)).mean(1)
    low, high = np.quantile(draws, [0.025, 0.975])
    assert (facts["ci_low"], facts["ci_high"]) == pytest.approx(
        (low, high), abs=0.15 * (high - low)
    )
    assert ("paste" in result.out) == (facts["ci_low"] > 0)
    assert held_back.summary_line(facts) in result.out


def test_a_gain_belongs_to_what_was_found_whatever_is_typed(
    posbench: Callable[..., Result], outputs: Path, tiny: LM
) -> None:
    gains = {}
    for typed in (["method.factor=0.5"], [], ["method.last=all"], ["method.factor=0"]):
        assert posbench(*CHANNEL, *typed).status == 0
        (run,) = set(run_folders(outputs)) - set(gains)
        table = pd.read_csv(run / held_back.TABLE_FILE).drop(columns="beside")
        gains[run] = table.to_numpy().tolist()
    half, plain, everyone, zero = gains.values()
    assert half == plain == zero != everyone, (
        "found alone, and nothing copied from another method"
    )
    block = yaml.safe_load((run / "found.yaml").read_text())["scale_channel"]
    task = KVRetrieval(**WORDS, pairs=32, calibration_pairs=32, calibration_examples=24)
    found = {
        "channel": block["channel"],
        "factor": block["factor"],
        "layers": tuple(block["layers"]),
    }
    with ScaleChannel(**found, last="all").applied(tiny):
        pairs = [([e.prompt], [e.answers[0]]) for e in task.held_back(24)]
        losses = [tiny.answer_loss(*pair).item() for pair in pairs]
    assert_same(
        everyone[0][1],
        np.mean(losses),
        embedded_noise("tiny", log_probabilities),
        "losses",
    )


def gain_line(out: str) -> str:
    """The line before the verdict, its sentence, the next command if there is one, and the page."""
    lines = out.rstrip().splitlines()
    return lines[-5 if lines[-2].startswith("next: ") else -4]


def test_no_gain_is_said_last_and_nothing_is_to_paste(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    neutral = [*CHANNEL, "search.factors=[1.0]"]
    result = posbench(*neutral)
    line = gain_line(result.out)
    assert result.status == 0 and "paste" not in result.out
    assert_names(line, "search", "nothing", "loss", "24 held-back prompts", "gain")
    table = pd.read_csv(only(outputs) / held_back.TABLE_FILE)
    noise = embedded_noise("tiny", log_probabilities)
    assert_same(table["found"][0], table["unmodified"][0], noise, "losses")
    assert table["n"][0] == 24
    (section,) = held_back.sections(table)
    assert section.text.lower().startswith(line)
    again = posbench(*neutral)
    assert gain_line(again.out) == line, "of a finished run, too"
    assert "no gain: gain " in again.out.splitlines()[-3]
    assert "next: " not in again.out, "the unmodified model is measured already"
    later = posbench(*neutral, "stages=[search,evaluate]")
    assert later.status == 0 and gain_line(later.out) == line
    assert_names(later.out, "stages", "follow", "found")


def test_a_search_that_keeps_the_unmodified_model_gains_exactly_nothing(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    # One mutant beside the unmodified model, and its scale of 11 answers hardly anything.
    few = [f"search.{name}=0" for name in ("mutations", "crossovers", "generations")]
    wild = ["search.start=1", "search.high=11", "search.reach_y=10", "search.step_y=10"]
    small = ["search.population=2", "search.parents=2", "task.limit=1"]
    small += ["task.calibration_examples=6"]
    genetic = ["model=tiny", "method=layer_scaling", "search=genetic"]
    result = posbench(*genetic, *small, *few, *wild, "stages=[search]")
    assert result.status == 0, result.err
    table = pd.read_csv(only(outputs) / held_back.TABLE_FILE)
    assert table.loc[0, ["gain", "ci_low", "ci_high"]].tolist() == [0, 0, 0]
    assert table["found"][0] == table["unmodified"][0] > 0
    line = gain_line(result.out)
    assert_names(line, "gains nothing", "changes nothing", "18 held-back prompts")


def test_a_fitness_weighs_the_places_of_the_answer(tiny: LM) -> None:
    """Of the genetic search: the gain is the difference of two fitnesses on new questions."""
    from posbench.search.genetic import GeneticSearch
    from posbench.search.scales import Scores, make_evaluator

    task = KVRetrieval(
        **WORDS,
        pairs=20,
        calibration_pairs=20,
        calibration_examples=6,
        max_new_tokens=1,
    )
    examples, places = calibration_questions(task, held_back=6)
    search = GeneticSearch()
    found = (1.2, 1.6, 1.7, 1.5)
    scores = Scores(search, np.array(places), make_evaluator(tiny, task, examples))
    run = type("Run", (), {"lm": tiny, "task": task})()
    for scales in ((1.0,) * 4, found):
        scores.score_all(scales)
        with LayerScaling(scales=scales).applied(tiny):
            values = search.measure_batch(run, examples)
        assert np.mean(values) == pytest.approx(scores.fitness_bound(scales))
    assert not {e.prompt for e in examples} & {
        e.prompt for e in calibration_questions(task)[0]
    }


@pytest.mark.parametrize(
    ("gains", "beginning"),
    [
        ([0.1, 0.2] * 20, "the search lowers the loss"),
        ([0.01, 0.011] * 20, "the search gains nothing worth naming (0.02 or more)"),
        ([-0.1, -0.2] * 20, "what the search found raises the loss"),
        ([0.5, -0.45] * 20, "cannot tell whether the search gains 0.02 or more"),
    ],
)
def test_a_gain_has_a_smallest_size(gains: list[float], beginning: str) -> None:
    clusters = [str(number) for number in range(len(gains))]
    facts = held_back.gain_facts(
        "loss", [1 - gain for gain in gains], [1.0] * len(gains), clusters
    )
    assert held_back.summary_line(facts).startswith(beginning)
    assert held_back.shows_no_gain(facts) == ("lowers" not in beginning)
    # The page's first word is that of the line: what cannot be told is no "no".
    words = {"the search lowers": "gains", "the search gains": "no gain"}
    words["what the search"] = "harms"
    glance = gain_glance(facts, "")
    assert glance.word == words.get(" ".join(beginning.split()[:3]), "cannot tell")
    assert (glance.tone == "open") == beginning.startswith("cannot tell")


@pytest.mark.parametrize(
    "gains", [[0.1] * 6, [-0.1] * 6, [0.5, -0.6, 0.4, -0.3, 0.2, -0.1]]
)
def test_verdicts(gains: list[float]) -> None:
    clusters = [str(number) for number in range(6)]
    facts = held_back.gain_facts(
        "loss", [1 - gain for gain in gains], [1.0] * 6, clusters
    )
    assert held_back.was_checked(facts) and held_back.shows_no_gain(facts) == (
        min(gains) < 0
    )
    raised = held_back.gain_facts("fitness", gains, [0.0] * 6, clusters)
    assert raised["gain"] == facts["gain"] and held_back.shows_no_gain(
        raised
    ) == held_back.shows_no_gain(facts)
    few = held_back.gain_facts("loss", [0.0] * 6, [1.0] * 6, ["one question"] * 6)
    assert (
        not held_back.was_checked(few)
        and not held_back.shows_no_gain(few)
        and "not checked" in held_back.summary_line(few)
    )
    (section,) = held_back.sections(
        pd.DataFrame([few], columns=held_back.TABLE_COLUMNS)
    )
    assert "not checked" in section.text and not section.rows


def test_held_back_questions_are_asked_nowhere_else() -> None:
    task = KVRetrieval(**WORDS, pairs=12, calibration_pairs=12, limit=20)
    new = {e.prompt for e in task.held_back(100)}
    known = {
        e.prompt
        for split in ("evaluation", "calibration")
        for e in task.examples(split)
    }
    assert len(new) == 100 and not new & known
    places = [
        [e.gold_position for e in each]
        for each in (task.held_back(100), task.examples("calibration"))
    ]
    assert places[0] == places[1]
    file = (
        Path(__file__).parents[1]
        / "data/nq_multidoc/nq-open-20_total_documents_gold_at_0.first3.jsonl"
    )
    used = {"path": str(file), "limit": 1}
    documents = NQMultiDoc(**used, calibration_examples=1)
    asked = [
        documents.examples("evaluation"),
        documents.examples("calibration"),
        documents.held_back(5),
    ]
    assert [{e.cluster for e in each} for each in asked] == [{"0"}, {"1"}, {"2"}]
    assert NQMultiDoc(**used, calibration_examples=2).held_back(5) == [], (
        "the file is used up"
    )


class Killed(BaseException):
    pass


GRADIENT = [
    "model=tiny",
    "runtime.device=cpu",
    "method=layer_scaling",
    "search=gradient",
    "search.epochs=2",
]
GRADIENT += [
    "task.limit=1",
    "search.samples=4",
    "search.learning_rate=0.05",
    "task.calibration_examples=6",
    "stages=[search]",
]
GENETIC = [
    "model=tiny",
    "runtime.device=cpu",
    "method=layer_scaling",
    "search=genetic",
    "stages=[search]",
]
GENETIC += [
    "search.population=4",
    "search.parents=2",
    "search.mutations=2",
    "search.crossovers=1",
]
GENETIC += [
    "task.limit=1",
    "search.generations=1",
    "search.batch_size=6",
    "task.calibration_examples=6",
]


ALL = ["empty", "torn", "flipped", "swapped", "deleted"]


def test_equal_scores_of_a_few_prompts_are_no_proof_of_equality() -> None:
    """Of 24 prompts none changed: by the rule of three up to one in eight of all may."""
    weights = np.repeat([0.6, 0.9, 1.5], 8)
    right = np.tile([1, 1, 1, 0, 0, 0, 1, 0], 3)
    prompts = [str(i) for i in range(24)]
    facts = gain_facts("fitness", weights * right, weights * right, prompts)
    assert facts["gain"] == 0 and facts["ci_low"] < -0.05 and facts["ci_high"] > 0.05
    assert summary_line(facts).startswith("cannot tell")
    many = gain_facts("fitness", *[np.tile(weights * right, 400)] * 2, range(9600))
    assert summary_line(many).startswith("the search gains nothing worth naming")
    # A loss is no share: what is equal there is equal.
    losses = np.linspace(0, 3, 24)
    assert gain_facts("loss", losses, losses, prompts)["ci_high"] == 0


def test_a_fitness_scores_what_follows_the_thinking(
    tiny: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posbench.search.scales import make_evaluator

    task = KVRetrieval(**WORDS, pairs=20, calibration_pairs=20, calibration_examples=2)
    examples = task.examples("calibration")
    values = [example.answers[0] for example in examples]

    def think(lm: LM, prompts: list[list[int]], **options: object) -> list[Any]:
        first, second = values
        texts = [f"<think>{first}</think>no", f"<think>no</think>{second}"]
        return [GeneratedReply(text, "stop") for text in texts]

    monkeypatch.setattr(LM, "generate_replies", think)
    assert make_evaluator(tiny, task, examples)((1.0,) * 4, [0, 1]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("command", "file", "names"),
    [
        (GRADIENT, "search_state.pt", ["swapped"]),
        pytest.param(GRADIENT, "search_state.pt", ALL, marks=pytest.mark.slow),
        pytest.param(GENETIC, "search.jsonl", ALL, marks=pytest.mark.slow),
    ],
)
def test_damage_to_what_a_killed_search_kept_changes_nothing(
    command: list[str],
    file: str,
    names: list[str],
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def contents(folder: Path) -> dict[str, bytes]:
        # When a run started and how long it took, and checksums over that.
        times = "provenance.json", "status.json", "manifest.json", "DONE"
        files = [p for p in folder.rglob("*") if p.is_file() and p.name not in times]
        return {p.name: p.read_bytes() for p in files}

    assert posbench(*command).status == 0
    wanted = contents(only(outputs))
    shutil.rmtree(outputs)
    # Another run's file, and a search that is killed in the middle.
    generate = LM.generate_replies
    left = [6]

    def dies(lm: LM, *args: object, **options: object) -> object:
        left[0] -= 1
        if left[0] == 0 or command is GRADIENT:
            raise Killed
        return generate(lm, *args, **options)

    monkeypatch.setattr(LM, "generate_replies", dies)
    with pytest.raises(Killed):
        posbench(*command, "search.seed=5")
    other = (only(outputs) / file).read_bytes()
    shutil.rmtree(outputs)
    left[0] = 6
    with pytest.raises(Killed):
        posbench(*command)
    monkeypatch.setattr(LM, "generate_replies", generate)
    folder = only(outputs)
    kept = tmp_path / "kept"
    data = (folder / file).read_bytes()
    shutil.copytree(folder, kept)
    flipped = bytearray(data)
    flipped[len(data) // 3] ^= 1
    damages = {
        "empty": b"",
        "torn": data[: len(data) // 2],
        "flipped": bytes(flipped),
        "swapped": other,
    }
    for name in names:
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        (folder / file).unlink() if name == "deleted" else (folder / file).write_bytes(
            damages[name]
        )
        assert posbench(*command).status == 0, name
        found = contents(folder)
        assert found.keys() == wanted.keys(), name
        assert [n for n in found if found[n] != wanted[n]] == [], name
