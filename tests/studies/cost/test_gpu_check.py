"""The check of a GPU: what it asks of which machine, and that it can fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from rich.console import Console

from posbench import paths
from posbench.methods.choice import all_choices
from posbench.studies.cost import gpu_check
from posbench.studies.cost.gpu_check import (
    Answers,
    GpuCheck,
    ModelCheck,
    differences,
    setups,
)
from tests.conftest import Result, run_folders
from tests.messages import assert_names


def test_what_a_machine_lacks_is_named() -> None:
    cuda = {s.name: s.missing for s in setups(torch.device("cuda"), 1, flash=False)}
    assert [name for name, missing in cuda.items() if not missing] == [
        *("CUDA, float32", "CUDA, bfloat16", "CUDA, float16")
    ]
    assert (
        cuda["layers on two GPUs"] == "one GPU only"
        and "flash-attn" in cuda["CUDA, flash-attention, bfloat16"]
    )
    assert not any(s.missing for s in setups(torch.device("cuda"), 2, flash=True))
    for gpus, reason in ((0, "no GPU on this machine"), (2, "runtime.device=cpu")):
        plan = setups(torch.device("cpu"), gpus, flash=True)
        assert {s.missing for s in plan if "cuda" in s.device} == {reason}
        assert not any(s.missing for s in plan if s.device == "cpu")


def test_differences_by_hand() -> None:
    logits = torch.tensor([[1.0, -4.0], [0.0, 2.0], [3.0, 3.0]])
    losses = torch.tensor([1.0, 2.0, 0.5])
    exact = Answers(logits, losses, ["a", "b", "c"])
    shift = torch.tensor([[0.4], [0.8], [0.0]])
    found = Answers(logits + shift, losses * 1.5, ["a", "b", "d"])
    worst = {"logits": 0.2, "losses": 0.5, "replies": 1 / 3}
    assert differences(found, exact, "float32") == pytest.approx(worst)
    assert differences(found, exact, "bfloat16") == pytest.approx(
        worst | {"logits": 0.1, "losses": 0.25}
    )


@pytest.mark.figures
def test_without_a_gpu_nothing_about_one_is_said(
    posbench: Callable[..., Result], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a bench that stops is told beside the rest."""

    def full(self: object, run: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_check.Latency, "measure", full)
    monkeypatch.setattr(gpu_check.Throughput, "measure", lambda self, run: {})
    result = posbench(
        "study=gpu_check",
        "study.models=[check_mpt]",
        "study.prompts=4",
        "runtime.device=cpu",
    )
    assert result.status == 0, result.err
    assert_names(result.out, "no GPU")
    (folder,) = run_folders(outputs)
    checks, found = (
        pd.read_csv(folder / f"{name}.csv") for name in ("checks", "findings")
    )
    bench = checks["setup"] == "bench"
    gpu = checks["device"].str.contains("cuda")
    verdicts = found.set_index(found["claim"].str.partition(":")[0])["verdict"]
    assert set(checks[gpu]["verdict"]) == {"not run"}
    assert set(checks[~gpu & ~bench]["verdict"]) == {"passed"}
    assert verdicts.drop(["CPU alone", "bench"]).tolist() == ["not testable"] * 5
    assert (
        set(verdicts["CPU alone"]) == {"holds"} and verdicts["bench"] == "contradicted"
    )
    # Sixteen bits do not give the same numbers, or nothing was compared.
    assert (
        checks[checks["dtype"].isin(["float16", "bfloat16"]) & ~gpu]["value"] > 0
    ).all()
    timed = checks[bench].set_index("quantity")
    assert timed["verdict"].to_dict() == {"latency": "failed", "throughput": "passed"}
    assert "out of memory" in timed.loc["latency", "reason"]
    assert (folder / "figures" / "checks.svg").is_file()


def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that differ under one kernel, and an error in one placement."""
    model = ModelCheck.model

    def wrong(self: ModelCheck, setup: gpu_check.Setup) -> Any:
        lm = model(self, setup)
        if setup.dtype == "bfloat16" and setup.kernel == "eager":
            lm.model.get_submodule("model.layers.2.self_attn.q_proj").weight.data *= 2
        if setup.second:
            lm.model.register_forward_pre_hook(
                lambda *_: torch.ones(1).expand(2, 3).view(7)
            )
        return lm

    monkeypatch.setattr(ModelCheck, "model", wrong)
    study = GpuCheck(prompts=4)
    plan = [s for s in setups(torch.device("cpu"), 0, flash=False) if not s.missing]
    # A type of 16 bits may differ as much as under any method: one alone can round well by chance.
    names = ("position_interpolation", "scale_channel")
    choices = all_choices([paths.CONF], {})
    run = SimpleNamespace(
        all_methods={name: choices[name] for name in names}, console=Console()
    )
    checked = ModelCheck("tiny", run, study.asked())  # type: ignore[arg-type]
    checks = pd.DataFrame(checked.rows(plan))
    found = {
        f.claim.partition(": every")[0]: f for f in study.findings({"checks": checks})
    }
    verdicts = {
        name.removeprefix("CPU alone: "): f.verdict for name, f in found.items()
    }
    wrong_ones = dict.fromkeys(("eager, bfloat16", "layers on disk"), "contradicted")
    assert verdicts == {"eager": "holds", "eager, float16": "holds", **wrong_ones}
    failed = found["CPU alone: layers on disk"].note
    assert_names(failed, "first", "tiny, none", "RuntimeError")
    differs = found["CPU alone: eager, bfloat16"].note
    assert_names(differs, "first", "tiny, none, logits")
