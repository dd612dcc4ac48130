"""Averages of hidden states against those that transformers returns."""

import numpy as np
import pytest
import torch

import posbench
from posbench.measure.states import Strings, average_states
from tests.messages import refused
from tests.models import LAYERS, VOCABULARY, build
from tests.rounding import assert_same, states_noise


class Words:
    """The little of a tokenizer that random token strings need."""

    all_special_ids = (0,)
    pad_token_id = 0

    def __len__(self) -> int:
        return VOCABULARY


class Letters:
    """Six letters a token: a first guess of four a token draws too few."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[str]]:
        assert not add_special_tokens
        return {"input_ids": [text[i : i + 6] for i in range(0, len(text) - 5, 6)]}


@pytest.fixture
def lm():
    lm = posbench.load(build("qwen2"))
    lm.tokenizer = Words()
    return lm


def test_averages_equal_stored_hidden_states(lm):
    strings = Strings(count=10, length=20, alphabet="tokens", batch_size=4)
    averages = average_states(lm, strings)
    rows = torch.tensor(strings.draw(lm))
    assert rows.shape == (10, 20) and (rows > 0).all() and (rows < VOCABULARY).all()
    with torch.no_grad():
        states = lm.model(rows, output_hidden_states=True).hidden_states
        inputs = [
            lm.model.model.layers[i].input_layernorm(states[i]) for i in range(LAYERS)
        ]
    noise = states_noise("qwen2")
    assert_same(
        averages["residual"], torch.stack(states).mean(1), noise, "hidden states"
    )
    assert_same(
        averages["attention_input"], torch.stack(inputs).mean(1), noise, "hidden states"
    )


def test_an_average_goes_on_where_it_was_killed(lm, monkeypatch):
    monkeypatch.setattr("posbench.measure.states.SAVE_EVERY", 4)
    strings = Strings(count=11, length=8, alphabet="tokens", batch_size=4)
    kept = []
    done = []

    def keep(state):
        kept.append(
            type(state)(
                state.count, {name: value.clone() for name, value in state.sums.items()}
            )
        )

    whole = average_states(lm, strings, keep=keep)
    assert [state.count for state in kept] == [4, 8]
    again = average_states(lm, strings, start=kept[0], advance=done.append)
    assert done == [4, 3], "what is done now"
    assert all(np.array_equal(again[name], whole[name]) for name in whole)


def test_strings_of_characters_have_the_asked_length_and_fit_the_window(lm):
    lm.tokenizer = Letters()
    lm.context_window = 30
    strings = Strings(count=3, length=30, seed=1)
    rows = strings.draw(lm)
    assert [len(row) for row in rows] == [30] * 3
    assert all(piece.isalnum() for row in rows for piece in row)
    assert rows == strings.draw(lm) != Strings(count=3, length=30, seed=2).draw(lm)
    with refused("search.length", 31, allowed=("30", "model")):
        Strings(count=1, length=31).draw(lm)
