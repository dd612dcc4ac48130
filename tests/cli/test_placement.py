"""No tensor is on a wrong GPU: methods, searches and studies on cuda:0, and with layers on cuda:0 and cuda:1.

It needs no GPU (:mod:`tests.placed` says how, and where it stops) but torch built for CUDA: -m slow runs it
where torch is, or in the Python that POSBENCH_CUDA_PYTHON names (a virtual environment with torch from the
package index, posbench's own dependencies, pytest and hypothesis).
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import _disable_current_modes

import posbench
from posbench import paths
from posbench.cli.main import main
from posbench.methods.choice import all_choices
from posbench.methods.scale_channel import ScaleChannel
from posbench.model.lm import LM
from posbench.studies.cost.gpu_check import GpuCheck, ModelCheck, setups
from posbench.studies.cost.timing import applicable_methods
from tests.cli.test_kills import JOBS
from tests.conftest import run_folders
from tests.models import BUILDERS, build
from tests.placed import halves, place, placing
from tests.rounding import assert_same, family_noise

PYTHON = "POSBENCH_CUDA_PYTHON"
ALL = all_choices([paths.CONF], {})
TRAINED = (
    "gradient",
    "router",
    "synthetic_training",
)  # by gradients, which are zeros here
RUN = [name for name, job in JOBS.items() if job.model]
ON_ONE = [
    *RUN,
    "gpu_check",
    "latency",
    "synthetic_training",
    "throughput",
]  # those without a model of the user's

cuda = pytest.mark.skipif(
    torch.version.cuda is None, reason=f"needs a build of torch for CUDA: see {PYTHON}"
)


@pytest.mark.slow
@pytest.mark.skipif(
    PYTHON not in os.environ or torch.version.cuda is not None,
    reason=f"{PYTHON} is not set",
)
def test_in_the_python_that_has_the_build() -> None:
    here = f"{__file__}::{test_in_the_python_that_has_the_build.__name__}"
    command = [
        os.environ[PYTHON],
        "-m",
        "pytest",
        "-m",
        "slow",
        __file__,
        f"--deselect={here}",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (
        done.returncode == 0
        and " passed" in done.stdout
        and "skipped" not in done.stdout
    ), done.stdout + done.stderr


def answers(lm: LM) -> dict[str, Any]:
    """Under every method, for a padded batch of two: logits, new tokens, choices, attention."""
    prompts = [[5, 6, 7, 8, 9, 10, 11] * 5, [3, 4, 5]]
    fixed: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    out = {}
    lm.items.add(prompts[0], [(2, 9), (9, 15)])
    lm.items.add(prompts[1], [(0, 1), (1, 2)])
    for name, method in applicable_methods(
        lm, ALL, lambda choice: choice.cls.example(lm)
    ).items():
        with method.applied(lm), torch.inference_mode():
            given = lm.pad(prompts)
            logits = lm.model(**given, logits_to_keep=1).logits[:, -1].cpu().numpy()
            new = lm.model.generate(
                given["input_ids"], attention_mask=given["attention_mask"], **fixed
            ).tolist()
            chosen = lm.continuations(prompts, [[[7], [8, 9]]] * 2)
            with lm.last_attention() as weights:
                lm.logits(given["input_ids"], given["attention_mask"])
            attention = [weights[layer].cpu().numpy() for layer in sorted(weights)]
        out[name] = logits, new, chosen, attention
    return out


def placed(family: str, gpus: int) -> LM:
    """A random model on so many GPUs."""
    with _disable_current_modes():
        model = build(family)
        if hasattr(model.config, "_experts_implementation"):
            model.set_experts_implementation(
                "eager"
            )  # the faster ones ask the driver what it can do
        places = halves(model) if gpus == 2 else {"": "cuda:0"}
    assert len(set(places.values())) == gpus
    return posbench.load(place(model, places))


@pytest.mark.slow
@cuda
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("family", BUILDERS)
def test_methods(family: str, gpus: int) -> None:
    want = answers(posbench.load(build(family)))
    with placing():
        got = answers(placed(family, gpus))
    assert got.keys() == want.keys()
    for name, (logits, new, chosen, attention) in want.items():
        noise = family_noise(family)
        assert_same(got[name][0], logits, noise, "a placed model")
        assert got[name][1] == new, name
        assert_same(got[name][2], chosen, noise, "a placed model")
        for found, wanted in zip(got[name][3], attention, strict=True):
            assert_same(found, wanted, noise, "a placed model")


def tables(folder: Path, timed: Sequence[str]) -> dict[str, pd.DataFrame]:
    """The tables of a run, without times."""
    found = {
        file.name: pd.read_csv(file, keep_default_na=False)
        for file in sorted(folder.glob("*.csv"))
    }
    times = {"hardware", "versions"}
    return {
        name: table.drop(
            columns=[
                c for c in table if c in times or any(re.fullmatch(t, c) for t in timed)
            ]
        )
        for name, table in found.items()
    }


@pytest.mark.slow
@cuda
@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((n, "device=cuda:0") for n in ON_ONE),
        *((n, "device_map=balanced") for n in RUN),
    ],
)
def test_searches_studies_and_stages(name: str, where: str, tmp_path: Path) -> None:
    """All tables are those of the CPU."""
    job = JOBS[name]
    made = []
    args = [arg for arg in job.args(tmp_path) if not arg.startswith("runtime.device=")]
    for there, inside in (("device=cpu", nullcontext()), (where, placing())):
        # Where a run is computed is no part of what it is called: folders of their own.
        outputs = tmp_path / str(len(made))
        with inside:
            assert main([*args, f"runtime.{there}", f"runtime.outputs={outputs}"]) == 0
        made += run_folders(outputs)
    want, got = (tables(folder, job.timed) for folder in made)
    assert want.keys() == got.keys() and want
    if name in (*TRAINED, "gpu_check"):
        return
    for file, table in want.items():
        pd.testing.assert_frame_equal(
            got[file], table, atol=1e-4, rtol=1e-4, obj=f"{name} {file}"
        )


@pytest.mark.slow
@cuda
def test_the_check_of_gpus_passes() -> None:
    study = GpuCheck(prompts=4)
    with placing():
        plan = [
            s for s in setups(torch.device("cuda:0"), 2, flash=False) if not s.missing
        ]
        run: Any = SimpleNamespace(all_methods=ALL, console=Console())
        rows = pd.DataFrame(
            [
                r
                for m in ("tiny", "check_gemma2")
                for r in ModelCheck(m, run, study.asked()).rows(plan)
            ]
        )
    assert set(rows["verdict"]) == {"passed"}, rows[
        rows["verdict"] != "passed"
    ].to_string()
    assert set(rows["device"]) == {"cuda:0", "cuda:0, cuda:1"}


@pytest.mark.slow
@cuda
@pytest.mark.parametrize(("gpus", "wrong"), [(1, "cpu"), (2, "cuda:0")])
def test_a_wrong_device_is_found(
    gpus: int, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of one method that is made on the CPU, or on the first of two GPUs whatever the layer's is."""
    scale = ScaleChannel.scale

    def made(self: ScaleChannel, hidden: torch.Tensor) -> torch.Tensor:
        return scale(self, hidden) * torch.ones(hidden.shape[-1], device=wrong)

    monkeypatch.setattr(ScaleChannel, "scale", made)
    with placing(), pytest.raises(RuntimeError, match="same device"):
        answers(placed("llama", gpus))
