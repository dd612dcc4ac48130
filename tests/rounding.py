"""Equality up to rounding: bounds come from the noise of the case itself, not from one processor.

Two orders of the same sum differ in their last digits. By how much depends on the instruction set, the
number of threads and the libraries. :func:`noise_floor` measures what float32 rounding moves in a case, on
the machine at hand: two right ways to compute the case differ by a few times that, a wrong one by far more.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import posbench
from posbench.methods.base import Method
from posbench.tasks.kv_retrieval import KVRetrieval
from tests.models import VOCABULARY, build

SLACK = 4.0
"""How many noise floors two right computations may be apart: each is about one away from the exact value."""
EPSILON = float(np.finfo(np.float32).eps)
"""Noise of a float32 number near 1, and of a short sum of such."""
TIGHTENED = float(os.environ.get("POSBENCH_TIGHTEN", 1))
"""Divides every bound: at 10 the suite must fail, or its bounds would prove nothing."""
RECORD = os.environ.get("POSBENCH_ROUNDING")
"""A JSON-lines file that collects every comparison; ``tools/portable.py`` makes a table of it."""


def logits_of(output: Any) -> Tensor:
    """The logits [B, T, V] of a forward."""
    return output.logits


def log_probabilities(output: Any) -> Tensor:
    """Log-probabilities [B, T, V] of a forward, in nats."""
    return output.logits.log_softmax(-1)


def hidden_states(output: Any) -> Tensor:
    """Hidden states [L + 1, B, T, D] of a forward."""
    return torch.stack(output.hidden_states)


@torch.no_grad()
def noise_floor(
    model: torch.nn.Module,
    ids: Tensor,
    read: Callable[[Any], Tensor] = logits_of,
    method: Method | None = None,
    **forward: Any,
) -> float:
    """How far float32 rounding moves what a model computes.

    Args:
        model: A float32 model; it is copied.
        ids: Token ids [B, T], all of them read.
        read: What is looked at, from the output of a forward to a tensor.
        method: Applied to both, where it rounds much more than the unmodified model.
        forward: Further arguments of both forwards.

    Returns:
        The largest difference between the model's own precision and float64.
    """
    exact = copy.deepcopy(model).double()
    if hasattr(exact.config, "_experts_implementation"):
        exact.set_experts_implementation(
            "eager"
        )  # the fast kernel of the experts knows no float64
    outputs = []
    for version in (model.float(), exact):
        with method.applied(posbench.load(version)) if method else nullcontext():
            outputs.append(read(version(ids, **forward)))
    floor = largest_difference(*outputs)
    assert floor > 0, "nothing is rounded: the model is not in float32"
    return floor


@cache
def family_noise(
    name: str,
    read: Callable[[Any], Tensor] = logits_of,
    tokens: int = 48,
    method: Method | None = None,
    **forward: Any,
) -> float:
    """The noise floor of ``tests.models.build(name)``, from four random prompts of so many tokens."""
    ids = torch.randint(
        1, VOCABULARY - 1, (4, tokens), generator=torch.Generator().manual_seed(0)
    )
    return noise_floor(build(name), ids, read, method, **forward)


@cache
def embedded_noise(
    name: str = "tiny", read: Callable[[Any], Tensor] = logits_of, **forward: Any
) -> float:
    """As :func:`family_noise`, of an embedded model on prompts of its own task."""
    lm = posbench.load(name, device="cpu")
    return noise_floor(lm.model, _own_prompts(lm), read, **forward)


def states_noise(name: str) -> float:
    """As :func:`family_noise`, of the hidden states of all layers."""
    return family_noise(name, hidden_states, output_hidden_states=True)


def random_noise(
    model: torch.nn.Module, read: Callable[[Any], Tensor] = logits_of, **forward: Any
) -> float:
    """As :func:`family_noise`, of any model that reads the words of the embedded ones."""
    ids = torch.randint(6, 60, (4, 60), generator=torch.Generator().manual_seed(0))
    return noise_floor(model, ids, read, **forward)


def weights_noise(model: torch.nn.Module, ids: Tensor) -> float:
    """As :func:`noise_floor`, of the attention weights of all layers and heads."""
    model = copy.deepcopy(model)
    model.config._attn_implementation = "eager"
    return noise_floor(
        model,
        ids,
        lambda output: torch.stack(output.attentions),
        output_attentions=True,
    )


@cache
def embedded_attention_noise(name: str = "tiny") -> float:
    """As :func:`attention_noise`, of an embedded model on prompts of its own task."""
    lm = posbench.load(name, device="cpu")
    return weights_noise(lm.model, _own_prompts(lm))


def _own_prompts(lm: posbench.LM) -> Tensor:
    """Token ids [4, T] of prompts that an embedded model was made for."""
    task = KVRetrieval(
        prompt="compact", records="words", pairs=32, limit=4, positions=(0,)
    )
    return torch.tensor(
        [lm.encode(example.prompt).ids for example in task.examples("evaluation")]
    )


@cache
def attention_noise(name: str, tokens: int = 48) -> float:
    """As :func:`family_noise`, of the attention weights of all layers and heads."""
    ids = torch.randint(
        1, VOCABULARY - 1, (4, tokens), generator=torch.Generator().manual_seed(0)
    )
    return weights_noise(build(name), ids)


def assert_same(got: Any, wanted: Any, noise: float, kind: str) -> None:
    """Assert that two computations of the same numbers differ by rounding alone.

    Args:
        got: Tensor, array, number or list.
        wanted: The same, from another order of operations.
        noise: The noise floor of the case, see :func:`noise_floor`.
        kind: What is compared, for the record.
    """
    difference = largest_difference(got, wanted)
    bound = SLACK * noise / TIGHTENED
    if RECORD:
        line = {
            "kind": kind,
            "difference": difference,
            "noise": noise,
            "bound": bound,
            "test": os.environ.get("PYTEST_CURRENT_TEST", ""),
        }
        with Path(RECORD).open("a") as record:
            record.write(json.dumps(line) + "\n")
    assert difference <= bound, (
        f"{kind}: {difference:.3g} apart, {difference / noise:.1f} times the noise of {noise:.3g}; "
        f"at most {bound / noise:g} times are rounding"
    )


def largest_difference(one: Any, other: Any) -> float:
    """Largest absolute difference of two tensors, arrays, lists or numbers of one shape."""
    first, second = (
        value.detach().double().cpu().numpy()
        if isinstance(value, Tensor)
        else np.asarray(value, np.float64)
        for value in (one, other)
    )
    assert first.shape == second.shape, f"shapes {first.shape} and {second.shape}"
    assert np.array_equal(np.isnan(first), np.isnan(second)), (
        "one is not a number where the other is"
    )
    return float(np.nan_to_num(np.abs(first - second)).max(initial=0.0))
