"""Faults of classes of one's own: each is refused in one line that names the class, and no number is wrong for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from tests.conftest import Result, run_folders
from tests.messages import assert_refused

MODULE = "faulty_classes"
SOURCE = """
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import pandas as pd

from posbench.methods import Method
from posbench.model import families
from posbench.model.items import ItemPrompt
from posbench.studies.base import Study
from posbench.tasks import Example, Task


@dataclass(frozen=True, kw_only=True)
class Louder(Method):
    gain: float = 1.5
    mode: str = "sound"

    def neutral(self):
        return replace(self, gain=1.0)

    @contextmanager
    def changed(self, lm):
        if self.mode == "no yield":
            return
        layer = families.decoder_layers(lm.model)[1]
        if self.mode == "weights":
            next(layer.parameters()).data.mul_(self.gain)
        hook = layer.register_forward_hook(self.louder)
        yield
        if self.mode != "hook":
            hook.remove()

    def louder(self, module, args, output):
        if isinstance(output, tuple):
            return (self.gain * output[0], *output[1:])
        return self.gain * output


@dataclass(frozen=True, kw_only=True)
class Named(Louder):
    name: str = "linear"


class Undecorated(Louder):
    factor: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Rewriter(Method):
    mode: str = "sound"

    def neutral(self):
        return self

    @contextmanager
    def changed(self, lm):
        yield

    def rewrite(self, lm, prompt):
        if self.mode == "text":
            return prompt.text
        if self.mode == "empty":
            return replace(prompt, text=" ")
        if self.mode == "spans":
            return replace(prompt, items=[(9000, 9001) for _ in prompt.items])
        return prompt


@dataclass(frozen=True, kw_only=True)
class Words(Task):
    metric: ClassVar[str] = "accuracy"
    source: ClassVar[str] = "generated"
    licence: ClassVar[str] = "none needed"
    size: ClassVar[str] = "3"

    name: str = "words"
    max_new_tokens: int = 1
    mode: str = "sound"

    def examples(self, split):
        prompt, answers, items = 'Json data: {"kop": "' * 2, ("kop",), ()
        if self.mode == "none":
            return []
        if self.mode == "nil":
            return None
        if self.mode == "answers":
            answers = "kop"
        if self.mode == "prompt":
            prompt = ""
        if self.mode == "items":
            items = ((0, 3), (4, 99))
        return [
            Example(id=str(i), prompt=prompt, answers=answers, items=items)
            for i in range(3)
        ]

    def score(self, example, text):
        return {"accuracy": 100.0 if self.mode == "percent" else 1.0}


@dataclass(frozen=True, kw_only=True)
class Bare(Words):
    metric: ClassVar[str]


class Nothing(Task):
    pass


@dataclass(frozen=True, kw_only=True)
class Look(Study):
    mode: str = "sound"

    def measure(self, run):
        table = pd.DataFrame({"value": [1.0]})
        return {
            "sound": {"seen": table},
            "nil": None,
            "none": {},
            "list": {"seen": [1.0]},
            "empty": {"seen": pd.DataFrame()},
            "path": {"a/b": table},
            "reserved": {"findings": table},
            "findings": {"seen": table},
        }[self.mode]

    def findings(self, tables):
        return ["it holds"] if self.mode == "findings" else []
"""
CHOICES = {
    "method": ("louder", "named", "undecorated", "rewriter"),
    "task": ("words", "nothing"),
    "study": ("look",),
}
COLUMNS = ["gold_position", "metric", "value", "ci_low", "ci_high", "n"]
QUICK = ("model=tiny", "runtime.threads=1", "runtime.resamples=100")
RUN = (*QUICK, "task.pairs=8", "task.limit=2", "stages=[evaluate,report]")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The argument that names a config folder with these classes; they are forgotten at the end."""
    folder = tmp_path / "own"
    for group, names in CHOICES.items():
        (folder / group).mkdir(parents=True)
        for name in names:
            text = f"# Faulty.\n_target_: {MODULE}.{name.capitalize()}\n"
            (folder / group / f"{name}.yaml").write_text(text)
    (folder / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield f"--config-dir={folder}"
    sys.modules.pop(MODULE, None)


@pytest.mark.parametrize(
    ("mode", "words"),
    [("hook", "hooks"), ("weights", "logits"), ("no yield", "yields")],
)
def test_a_method_that_does_not_restore_the_model_gives_no_numbers(
    mode: str, words: str, own: str, posbench: Callable[..., Result], outputs: Path
) -> None:
    result = posbench(own, *RUN, "method=louder", f"method.mode='{mode}'")
    assert result.status == 2 and not run_folders(outputs)
    assert_refused(result.err, "method", allowed=words, hint="changed()")


@pytest.mark.parametrize("mode", ["hook", "weights"])
def test_such_a_method_leaves_nothing_for_the_next_job_of_a_sweep(
    mode: str, own: str, posbench: Callable[..., Result], outputs: Path
) -> None:
    result = posbench(own, *RUN, "-m", "method=louder", f"method.mode={mode},sound")
    assert result.status == 2
    assert posbench(own, *RUN, "method=ms_poe").status == 0
    louder, ms_poe = (pd.read_csv(f / "metrics.csv") for f in run_folders(outputs))
    unmodified = [
        metrics.loc[metrics["method"] == "none", COLUMNS].reset_index(drop=True)
        for metrics in (louder, ms_poe)
    ]
    pd.testing.assert_frame_equal(*unmodified)


@pytest.mark.parametrize(
    ("args", "field", "allowed"),
    [
        (["method=named"], "method._target_", "name"),
        (["method=undecorated"], "method._target_", "dataclass"),
        (["method=rewriter", "method.mode=text"], "method.rewrite", "ItemPrompt"),
        (["method=rewriter", "method.mode=empty"], "method.rewrite", "text"),
        (["method=rewriter", "method.mode=spans"], "method.rewrite", "spans"),
        (["task=words", "task.mode=none"], "task words: examples", "one"),
        (["task=words", "task.mode=nil"], "task words: examples", "one"),
        (["task=words", "task.mode=answers"], "task: answers", "tuple"),
        (["task=words", "task.mode=prompt"], "task: prompt", "text"),
        (["task=words", "task.mode=items"], "task: items", "40"),
        (["task=words", "task.mode=percent"], "task words: score", "0"),
        (["task=nothing"], "task._target_", "examples"),
    ],
)
def test_a_fault_of_a_class_is_one_line(
    args: list[str],
    field: str,
    allowed: str,
    own: str,
    posbench: Callable[..., Result],
) -> None:
    settings = RUN if args[0].startswith("method") else (*QUICK, "method=none")
    result = posbench(own, *settings, *args)
    assert result.status == 2, result.err
    assert_refused(result.err, field, allowed=allowed)


@pytest.mark.parametrize(
    "mode", ["nil", "none", "list", "empty", "path", "reserved", "findings"]
)
def test_what_a_study_returns_is_checked(
    mode: str, own: str, posbench: Callable[..., Result]
) -> None:
    result = posbench(own, *QUICK, "study=look", f"study.mode={mode}")
    assert result.status == 2, result.err
    field = "findings" if mode == "findings" else "measure"
    assert_refused(result.err, f"study: {field}", hint="Look")


def test_a_sound_study_is_read(
    own: str, posbench: Callable[..., Result], outputs: Path
) -> None:
    result = posbench(own, *QUICK, "study=look")
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    assert pd.read_csv(folder / "seen.csv")["value"].tolist() == [1.0]


def test_a_choice_cannot_have_the_name_of_one_of_posbench(
    own: str, posbench: Callable[..., Result]
) -> None:
    folder = Path(own.partition("=")[2])
    (folder / "method" / "louder.yaml").rename(folder / "method" / "ms_poe.yaml")
    result = posbench(own, *RUN, "method=ms_poe")
    assert result.status == 2
    words = ("method=ms_poe", "posbench")
    assert_refused(result.err, "--config-dir", allowed=words, hint="rename")


def test_a_name_may_have_letters_of_any_language(
    own: str, posbench: Callable[..., Result], outputs: Path
) -> None:
    folder = Path(own.partition("=")[2])
    (folder / "method" / "louder.yaml").rename(folder / "method" / "stärke.yaml")
    result = posbench(own, *RUN, "method=stärke")
    assert result.status == 0, result.err
    (run,) = run_folders(outputs)
    assert set(pd.read_csv(run / "metrics.csv")["method"]) == {"none", "stärke"}
