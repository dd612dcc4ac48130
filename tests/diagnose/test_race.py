"""The race of methods: paired losses, the worse half drops out, a killed race goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from posbench.diagnose.race import (
    FIRST_ROUND,
    RACE_BATCH,
    RACE_FILE,
    applicable_methods,
    lead_over,
    race,
)
from posbench.measure.replies import encode_with_answer
from posbench.methods import Method, ScaleChannel, Unmodified
from posbench.methods.choice import MethodChoice
from posbench.methods.composed import Composed
from posbench.methods.dca import DualChunkAttention
from posbench.methods.layer_scaling import LayerScaling
from posbench.methods.repeat import Repeat
from posbench.methods.rope_base import RopeBase
from posbench.model.lm import LM
from posbench.model.load import load
from posbench.run.folder import RunDir
from posbench.run.rows import ResumableRows
from posbench.tasks import KVRetrieval

METHODS: dict[str, Method] = {
    "half": ScaleChannel(channel=15, factor=0.5, layers=(1, 3)),
    "zero": ScaleChannel(channel=15, factor=0.0, layers=(1, 3)),
    "minus": ScaleChannel(channel=15, factor=-1.0, layers=(1, 3)),
    "wide": LayerScaling(scales=(1.2, 1.1, 1.3, 1.0)),
}


@pytest.fixture(scope="module")
def lm() -> LM:
    return load("tiny")


@pytest.fixture(scope="module")
def task() -> KVRetrieval:
    return KVRetrieval(
        pairs=8, records="words", prompt="compact", calibration_examples=20, limit=1
    )


def rows_in(folder: Path, read: list[int]) -> ResumableRows:
    """The rows of a race; the numbers of prompts that it reads are added to ``read``."""
    folder.mkdir(exist_ok=True)

    @contextmanager
    def progress(label: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
        yield read.append

    return ResumableRows(RunDir(folder), progress)


def test_a_method_that_changes_longer_texts_alone_is_left_out(
    lm: LM, task: KVRetrieval
) -> None:
    examples = task.examples("calibration")[:16]
    pairs = [encode_with_answer(lm, example) for example in examples]
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    choices = {
        name: MethodChoice(
            name=name,
            cls=DualChunkAttention,
            values={"chunk_length": chunk, "largest_position": longest},
        )
        for name, chunk in (("shorter", longest - 1), ("longest", longest))
    }
    methods, left_out = applicable_methods(lm, choices, examples)
    assert list(methods) == ["shorter"]
    assert [remedy.name for remedy in left_out] == ["longest"]
    assert left_out[0].note.count(str(longest)) == 2


def test_a_change_of_the_prompt_is_raced_where_it_is_asked_about(
    lm: LM, task: KVRetrieval
) -> None:
    """Else it has had a race of its own; a base that is the model's own is no method."""
    examples = task.examples("calibration")[:4]
    choices = {
        "twice": MethodChoice(name="twice", cls=Repeat, values={"part": "documents"}),
        "own": MethodChoice(name="own", cls=RopeBase, values={"base": 10000.0}),
    }
    for typed, changes_raced, raced in (
        (False, True, []),
        (False, False, []),
        (True, False, ["twice"]),
    ):
        methods, left_out = applicable_methods(
            lm, choices, examples, typed, changes_raced
        )
        assert list(methods) == raced
        notes = {remedy.name: remedy.note for remedy in left_out}
        assert ("raced above" in notes.get("twice", "")) == changes_raced
        assert "changes nothing in the window" in notes["own"]


def test_gains_are_those_of_the_losses_one_by_one(
    lm: LM, task: KVRetrieval, tmp_path: Path
) -> None:
    examples = task.examples("calibration")[:16]
    read: list[int] = []
    found = race(
        lm, task, METHODS, examples, rows_in(tmp_path / "a", read), lambda: False
    )

    def losses(method: Method, count: int) -> np.ndarray:
        values = []
        with method.applied(lm):
            for example in examples[:count]:
                pair = encode_with_answer(lm, example)
                values.append(float(lm.answer_token_loss([pair], batch_size=1)[0]))
        return np.array(values)

    totals = {n: losses(m, FIRST_ROUND).sum() for n, m in METHODS.items()}
    kept = sorted(totals, key=totals.__getitem__)[:2]
    assert {r.name: r.gain.n for r in found if r.gain} == {
        name: 16 if name in kept else FIRST_ROUND for name in METHODS
    }
    for remedy in found:
        assert remedy.gain is not None
        count = remedy.gain.n
        gain = losses(Unmodified(), count) - losses(METHODS[remedy.name], count)
        assert remedy.gain.value == pytest.approx(gain.mean(), abs=1e-5)
    assert sum(read) == 5 * FIRST_ROUND + 3 * RACE_BATCH


def test_a_race_that_was_ended_goes_on_where_it_was(
    lm: LM, task: KVRetrieval, tmp_path: Path
) -> None:
    examples = task.examples("calibration")
    read: list[int] = []
    alone = race(
        lm, task, METHODS, examples, rows_in(tmp_path / "b", read), lambda: False
    )
    for end in (1, 2, 3):
        folder = tmp_path / str(end)
        answers = iter([False] * (end - 1) + [True])
        first: list[int] = []
        race(
            lm,
            task,
            METHODS,
            examples,
            rows_in(folder, first),
            lambda a=answers: next(a),
        )
        second: list[int] = []
        found = race(
            lm, task, METHODS, examples, rows_in(folder, second), lambda: False
        )
        assert [(r.name, r.gain) for r in found] == [(r.name, r.gain) for r in alone]
        assert sum(first) + sum(second) == sum(read) and sum(first) < sum(read)
        lines = (folder / RACE_FILE).read_text().splitlines()
        assert len(lines) == sum(read), "each prompt is read once"


def test_a_method_that_rewrites_prompts_is_raced_on_what_it_makes_of_them(
    lm: LM, task: KVRetrieval, tmp_path: Path
) -> None:
    examples = task.examples("calibration")[:8]
    pair = Composed(parts={"a": Repeat(part="question"), "b": METHODS["minus"]})
    contestants = {"alone": METHODS["minus"], "pair": pair}
    folder = tmp_path / "c"
    rows = rows_in(folder, [])
    race(lm, task, {"alone": METHODS["minus"]}, examples, rows, lambda: False)
    read: list[int] = []
    found = race(lm, task, contestants, examples, rows_in(folder, read), lambda: False)
    assert sum(read) == len(examples), "what was read before is not read again"

    def losses(method: Method, first: bool) -> np.ndarray:
        values = []
        with method.applied(lm):
            for example in examples:
                question = example.prompt[slice(*example.question)]
                prompt = f"{question}\n\n{example.prompt}" if first else example.prompt
                ids = encode_with_answer(lm, replace(example, prompt=prompt))
                values.append(float(lm.answer_token_loss([ids], batch_size=1)[0]))
        return np.array(values)

    of_pair = losses(METHODS["minus"], first=True)
    gains = {remedy.name: remedy.gain for remedy in found}
    expected = losses(Unmodified(), first=False) - of_pair
    assert gains["pair"].value == pytest.approx(expected.mean(), abs=1e-5)
    lead = lead_over("pair", "alone", RunDir(folder).rows(RACE_FILE), examples)
    ahead = losses(METHODS["minus"], first=False) - of_pair
    assert lead.value == pytest.approx(ahead.mean(), abs=1e-5)
