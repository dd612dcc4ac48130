"""Bounds from a case's own noise let rounding pass and nothing else: planted errors fail on every machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import posbench
from posbench.measure.losses import candidate_losses
from posbench.methods import ScaleChannel
from posbench.model.store import PrefixStore
from tests.cli.test_pinned_numbers import PINNED, assert_same_table, read
from tests.models import VOCABULARY, build
from tests.rounding import (
    assert_same,
    attention_noise,
    family_noise,
    log_probabilities,
    noise_floor,
    states_noise,
)

METHOD = ScaleChannel(channel=5, factor=-1.0, layers=(1, 2))
GOLDEN = Path(__file__).parent / "parity" / "golden"
PROMPTS = torch.randint(
    1, VOCABULARY - 1, (2, 40), generator=torch.Generator().manual_seed(2)
)
ERRORS = ("a key scaled by 1.001", "a position off by one", "two rows swapped")


@contextmanager
def planted(lm: posbench.LM, error: str) -> Iterator[None]:
    """A Llama with a small error in every forward of the block."""

    def scaled(module: torch.nn.Module, inputs: object, keys: Tensor) -> Tensor:
        return keys * 1.001

    def moved(
        module: torch.nn.Module, inputs: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        hidden, positions = inputs
        positions = positions.clone()
        positions[:, -1] += 1
        return hidden, positions

    def swapped(module: torch.nn.Module, inputs: object, embedded: Tensor) -> Tensor:
        return embedded.flip(0)

    model = lm.model.model
    hook = {
        "a key scaled by 1.001": lambda: model.layers[
            2
        ].self_attn.k_proj.register_forward_hook(scaled),
        "a position off by one": lambda: model.rotary_emb.register_forward_pre_hook(
            lambda module, args, kwargs: (
                moved(module, (args[0], kwargs["position_ids"])),
                {},
            ),
            with_kwargs=True,
        ),
        "two rows swapped": lambda: model.embed_tokens.register_forward_hook(swapped),
    }[error]()
    try:
        yield
    finally:
        hook.remove()


def logits(lm: posbench.LM) -> Tensor:
    with METHOD.applied(lm):
        return lm.logits(PROMPTS, torch.ones_like(PROMPTS))


def attention(lm: posbench.LM) -> Tensor:
    with lm.last_attention() as rows:
        lm.logits(PROMPTS, torch.ones_like(PROMPTS))
    return torch.stack([rows[layer] for layer in range(lm.layers)])


def hidden_states(lm: posbench.LM) -> Tensor:
    with torch.no_grad():
        return torch.stack(lm.model(PROMPTS, output_hidden_states=True).hidden_states)


def losses(lm: posbench.LM) -> Tensor:
    pairs = [(row[:-2], row[-2:]) for row in PROMPTS.tolist()]
    return torch.as_tensor(candidate_losses(lm, pairs, [METHOD]))


def shared_prefills(lm: posbench.LM) -> Tensor:
    """Log-probabilities behind prompts that share a prefill, which is not the one of the first row alone."""
    rows = PROMPTS.tolist()
    rows = [*rows, [*rows[0][:35], 7, 8, 9]]
    store = PrefixStore([row[:-1] for row in rows], *METHOD.records())
    store.fill(lm, 4, None)
    with METHOD.applied(lm), torch.inference_mode():
        out = lm.model(
            **lm.pad(rows, store.prefix(lm, range(len(rows)))), logits_to_keep=1
        )
        return out.logits[:, -1].log_softmax(-1)


READS: dict[str, tuple[Callable[[posbench.LM], Tensor], Callable[[], float]]] = {
    "logits": (logits, lambda: family_noise("llama-gqa")),
    "attention": (attention, lambda: attention_noise("llama-gqa")),
    "hidden states": (hidden_states, lambda: states_noise("llama-gqa")),
    "losses": (losses, lambda: family_noise("llama-gqa", log_probabilities)),
    "shared prefills": (
        shared_prefills,
        lambda: family_noise("llama-gqa", log_probabilities),
    ),
}
"""What tests compare, and its noise."""


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", READS)
def test_a_planted_error_is_no_rounding(kind: str, error: str) -> None:
    lm = posbench.load(build("llama-gqa"))
    look, noise = READS[kind]
    wanted = look(lm)
    assert_same(look(lm), wanted, noise(), kind)
    with planted(lm, error):
        got = look(lm)
    with pytest.raises(AssertionError, match="times the noise"):
        assert_same(got, wanted, noise(), kind)


@pytest.mark.parametrize("error", ERRORS)
def test_a_planted_error_is_not_what_the_authors_program_gives(error: str) -> None:
    lm = posbench.load(AutoModelForCausalLM.from_pretrained(GOLDEN / "llama-mha"))
    with np.load(GOLDEN / "scale_channel_llama-mha.npz") as arrays:
        ids = torch.tensor(arrays["batch_ids"])
        wanted = arrays["batch_f0_l12/prefill_logits"]
    noise = noise_floor(lm.model, ids)
    with ScaleChannel(channel=17, factor=0.0, layers=(1, 2)).applied(lm):
        assert_same(lm.logits(ids, torch.ones_like(ids)), wanted, noise, "golden")
        with planted(lm, error):
            got = lm.logits(ids, torch.ones_like(ids))
    with pytest.raises(AssertionError, match="times the noise"):
        assert_same(got, wanted, noise, "golden")


def scaled_cell(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(
        attention=table["attention"].where(table.index != 3, table["attention"] * 1.001)
    )


def moved_rows(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(attention=table["attention"].shift(1).bfill())


def swapped_rows(table: pd.DataFrame) -> pd.DataFrame:
    return table.iloc[[1, 0, *range(2, len(table))]].reset_index(drop=True)


@pytest.mark.parametrize("error", [scaled_cell, moved_rows, swapped_rows])
def test_a_planted_error_is_found_in_a_table(
    error: Callable[[pd.DataFrame], pd.DataFrame],
) -> None:
    table = read(PINNED / "run" / "attention.csv")
    assert_same_table(table, table)
    with pytest.raises(AssertionError):
        assert_same_table(error(table), table)
