"""What a prompt and a generated token ask of a GPU under a method: few operations more, no wait for the host."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import posbench
from posbench.methods import Method, ScaleChannel, Unmodified
from posbench.methods.layer_scaling import LayerScaling
from posbench.model import rope
from posbench.model.lm import LM
from tests.models import LAYERS, build

SCALES = (1.0, 1.3, 1.7, 2.4)
PROMPT = torch.arange(5, 38)[None]
WAITS = (
    "aten.lift_fresh.default",
    "aten.is_nonzero.default",
    "aten._local_scalar_dense.default",
)
"""A tensor made of host numbers, and a number read from a tensor: on a GPU both wait for all of its work."""


class Operations(TorchDispatchMode):
    """Counts the operations inside the block that compute something, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not function.is_view:
            self.count[str(function)] += 1
        return function(*args, **(kwargs or {}))


def one_step(lm: LM, method: Method) -> tuple[torch.Tensor, Counter[str]]:
    """Logits of one token after a prompt, and the operations of that one."""
    with torch.inference_mode(), method.applied(lm):
        cache = lm.model(PROMPT, use_cache=True).past_key_values
        with Operations() as operations:
            output = lm.model(PROMPT[:, :1], past_key_values=cache, use_cache=True)
    return output.logits, operations.count


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3-longrope"])
def test_scales_of_all_layers_cost_one_evaluation(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = posbench.load(build(family))
    method = LayerScaling(scales=SCALES)
    own = one_step(lm, Unmodified())[1]["aten.cos.default"]
    logits, operations = one_step(lm, method)
    assert operations["aten.cos.default"] == 2 * own

    # A table for each layer, as in long prompts, gives the same to the last bit.
    monkeypatch.setattr(rope, "MAX_SHARED_POSITIONS", 0)
    one_by_one, operations = one_step(lm, method)
    assert operations["aten.cos.default"] == own + LAYERS
    assert torch.equal(logits, one_by_one)


@pytest.mark.parametrize("family", ["llama", "phi3", "mpt"])
def test_a_scaled_channel_waits_for_nothing(family: str) -> None:
    lm = posbench.load(build(family))
    method = ScaleChannel(channel=(3, 7), factor=-1.0, layers=(0, LAYERS - 1))
    plain = one_step(lm, Unmodified())[1]
    scaled = one_step(lm, method)[1]
    assert [scaled[name] for name in WAITS] == [plain[name] for name in WAITS]


@pytest.mark.parametrize("family", ["llama", "mistral-window", "phi3-partial"])
def test_a_prompt_takes_few_operations_more_in_one_pass(family: str) -> None:
    """The paper's half of the layers; what each block does once is counted, too."""
    lm = posbench.load(build(family))
    counts = []
    for method in (Unmodified(), ScaleChannel.example(lm)):
        with torch.inference_mode(), Operations() as operations, method.applied(lm):
            lm.model(PROMPT, logits_to_keep=1)
        counts.append(operations.count)
    plain, scaled = counts
    assert [scaled[name] for name in WAITS] == [plain[name] for name in WAITS]
    assert plain.total() > 30 * LAYERS
    # 9 for each scaled layer, 12 with a partial rotation; at most 25 for each block.
    num_scaled = len(ScaleChannel.example(lm).layer_indices)
    assert scaled.total() <= plain.total() + 12 * num_scaled + 25
