"""Sixty kills of every search and every study: resumed, all files are those of a run that was left alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from posbench import paths
from tests.kills import Kills, loaded_once

KILLS = 60
FEW = [
    "task.pairs=12",
    "task.positions=[0,5,11]",
    "task.limit=4",
    "runtime.resamples=100",
]
SCALES = [
    *FEW,
    "method=layer_scaling",
    "task.calibration_examples=6",
    "task.calibration_pairs=12",
]
BRED = [
    *SCALES,
    "search.population=5",
    "search.parents=3",
    "search.mutations=3",
    "search.crossovers=2",
]
BRED += ["search.generations=2", "search.batch_size=6"]
CHANNEL = [
    *FEW,
    "method=scale_channel",
    "task.calibration_examples=8",
    "search.strings=16",
]
CHANNEL += [
    "search.length=48",
    "search.window=6",
    "search.skip=2",
    "runtime.batch_size=4",
]


@dataclass
class Job:
    """A command line that takes a second."""

    settings: list[str]
    stages: str = "study"
    timed: tuple[str, ...] = ()
    setup: Callable[[Path], None] = lambda root: None
    model: str = "tiny"

    def args(self, root: Path) -> list[str]:
        """The command line, with files of its own under a folder."""
        own = (
            [f"model={self.model}", "runtime.device=cpu", "runtime.threads=1"]
            if self.model
            else []
        )
        return [s.format(root=root) for s in self.settings] + [
            *own,
            f"stages=[{self.stages}]",
        ]


def _search(name: str, settings: list[str], stages: str = "search") -> dict[str, Job]:
    return {name: Job([f"search={name}", *settings], stages)}


def _study(
    name: str, *settings: str, model: str = "tiny", **kwargs: object
) -> dict[str, Job]:
    return {name: Job([f"study={name}", *settings], model=model, **kwargs)}  # type: ignore[arg-type]


OFFICIAL = [*CHANNEL, "search.length=310", "search.candidates=all", "search.strings=2"]
GRADIENT = [*SCALES, "search.epochs=3", "search.samples=8", "search.learning_rate=0.05"]
ROUTER = [
    *FEW,
    "method=moice",
    "search.steps=2",
    "search.batch=2",
    "task.calibration_examples=8",
]
ROUTER += ["task.calibration_pairs=6"]

BASES = [
    *FEW,
    "method=rope_base",
    "search.factors=[0.1,10.0]",
    "task.calibration_examples=8",
    "runtime.batch_size=4",
]

STUDIED = [setting for setting in CHANNEL if not setting.startswith("method")]
PROMPTS = ["study.examples=4"]
CHAIN = ["study.hidden_perturbation.texts=4", "study.hidden_perturbation.controls=1"]
STRINGS = [
    "study.strings=24",
    "study.length=48",
    "study.window=6",
    "study.skip=2",
    "study.batch_size=8",
]
LATENCY = [
    "study.methods_at=[8]",
    "study.prompts=[8]",
    "study.search_tokens=8",
    "study.candidates=2",
]
LATENCY += ["study.methods=[ms_poe]"]
TRAINED = [
    "study.common={{width: 8, classes: 16, labels: 4, batch: 4, sequences: 40, depth: 1}}"
]
TRAINED += [
    "study.conditions=[{{mask: causal}}, {{mask: full, pe: rope, bias: [0, 7]}}]",
    "study.seeds=2",
]
TRAINED += ["study.processes=1"]
PROMPT = ["study.pairs=[8]", "study.examples=2", "study.new_tokens=1"]
SHAPES = ["study.tokens=64", "study.works=[Table 1]"]
REPEATS = ["study.iterations=2", "study.repeats=1"]
SCORED = Path(__file__).parents[1] / "data" / "scored"
TIMES = ("seconds", "(ratio|speedup)(_min|_max)?", "iterations_per_second", "gflops")
"""Columns of times and of what is made of times, in a study that compares them."""


def _micro(root: Path) -> None:
    """Trainings of a micro model, whose measured numbers are those of the shipped one."""
    from posbench.embedded import study
    from tests.embedded.test_study import GOOD
    from tests.embedded.test_training import MICRO

    study.RECIPES = dict.fromkeys(study.RECIPES, MICRO)  # type: ignore[assignment]
    study.measure = lambda folder, name, seed, per_position=64: (
        GOOD | {"task_seed": seed}
    )  # type: ignore[assignment]


def _trainings(root: Path) -> None:
    """Two finished trainings in the folder that a study of their results reads."""
    from wu2025.training import Condition, train

    for pe in ("none", "rope"):
        condition = Condition(pe=pe, residual=True, bias=(0, 7), batch=4, sequences=20)  # type: ignore[arg-type]
        train(condition, [0], 2, root / "trainings", hardware="here")


JOBS = {
    **_search("channel", CHANNEL, "search,intervene,evaluate"),
    **_search("exhaustive", [*CHANNEL, "search.factors=[0.0]"]),
    **_search("official", OFFICIAL),
    **_search("genetic", BRED, "search,evaluate"),
    **_search("brute_force", BRED),
    **_search("gradient", GRADIENT),
    **_search("router", ROUTER),
    **_search("bases", BASES),
    **_study("ablations", *STUDIED, "search.factors=[0.5,0.0]"),
    **_study(
        "attention_to_gold", *FEW, *PROMPTS, "task.positions=[0,4,8]", "study.items=[9]"
    ),
    **_study("bias_source", *FEW, *PROMPTS),
    **_study(
        "bucket_search", "study.dim=16", "study.candidates=[10000,14000,500]", model=""
    ),
    **_study("causal_mask", "study.show=[1,10]", "study.draws=20", model=""),
    **_study("chain", *FEW, *PROMPTS, *CHAIN),
    **_study("channel_subtraction", *FEW, *PROMPTS, "study.controls=1"),
    **_study(
        "crop_mask", *FEW, *PROMPTS, "study.layers=[0,1]", "study.retrieval=[2,3]"
    ),
    **_study("doubling", *FEW, *PROMPTS),
    **_study(
        "embedded_model",
        "study.seeds=[4,5]",
        model="",
        setup=_micro,
        timed=("seconds",),
    ),
    **_study(
        "gpu_check",
        "study.models=[tiny]",
        "study.prompts=4",
        "study.bench=false",
        model="",
    ),
    **_study(
        "gram",
        "study.samples=4",
        "study.tokens=12",
        "runtime.batch_size=3",
        model="tiny_nope",
    ),
    **_study(
        "hidden_perturbation",
        *FEW,
        "study.texts=4",
        "study.length=48",
        "study.controls=1",
    ),
    **_study("latency", *LATENCY, "study.repeats=1", model="", timed=TIMES),
    **_study("layer_selection", *STUDIED, "study.step=2"),
    **_study("lost_in_the_middle", *FEW, "study.items=[6,12]"),
    **_study("masks", model=""),
    **_study(
        "order", *FEW, "study.policies=[reversed,documents_twice]", "study.probes=4"
    ),
    **_study("positional_channels", *STRINGS),
    **_study("precision", *FEW, "study.prompts=2"),
    **_study(
        "remedies",
        *FEW,
        "study.methods=[prompt_twice,documents_twice]",
        "study.repeats=1",
        "study.timed=1",
        timed=("seconds", "time(_low|_high)?", "memory_gb", "statistic"),
    ),
    **_study("rollout", "study.prompts=4", "study.tokens=32", "study.parts=4"),
    **_study("rope_curves", *FEW, "study.prompts=2", "study.distance=100"),
    **_study(
        "score_map",
        "study.samples=4",
        "study.tokens=12",
        "runtime.batch_size=3",
        model="tiny_nope",
    ),
    **_study("scorers", f"study.data={SCORED}", model=""),
    **_study(
        "search_cost",
        *SCALES,
        "study.repeats=1",
        timed=(*TIMES, "share", "value", "verdict"),
    ),
    **_study("structure", *FEW, *PROMPTS, "study.prompts=6"),
    **_study(
        "synthetic_results",
        "study.trainings={root}/trainings",
        model="",
        setup=_trainings,
    ),
    **_study("synthetic_training", *TRAINED, "study.iterations=6", model=""),
    **_study("throughput", *PROMPT, *SHAPES, "study.repeats=1", model="", timed=TIMES),
    **_study("training_speed", "study.depths=[1]", *REPEATS, model="", timed=TIMES),
}


def test_every_search_and_study_is_killed() -> None:
    files = [
        file
        for folder in paths.BUILT_IN
        for kind in ("search", "study")
        for file in (folder / kind).glob("*.yaml")
    ]
    assert set(JOBS) == {file.stem for file in files}


def test_a_killed_study_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample, in this process: no backward pass, which a fork does not survive."""
    job = JOBS["score_map"]
    args = job.args(tmp_path)
    monkeypatch.setattr("posbench.run.base.load", loaded_once(args))
    kills = Kills(args, tmp_path, job.timed, job.setup)
    assert kills.tried(3, whole=1) == (3, 3), kills.failures


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(JOBS))
def test_sixty_kills(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.kills", name, str(KILLS), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=paths.PACKAGE.parent
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
