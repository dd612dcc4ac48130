"""Averages of hidden states against those that transformers returns."""

import numpy as np
import pytest
import torch

import posbench
from posbench.measure.states import Strings, average_states, channel_input, moments
from posbench.methods import ScaleChannel
from posbench.methods.attention_buckets import AttentionBuckets
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


def test_averages_are_those_of_the_method_that_is_applied(lm):
    strings = Strings(count=5, length=20, alphabet="tokens", batch_size=4)
    rows = torch.tensor(strings.draw(lm))
    method = ScaleChannel(channel=3, factor=-2.0, layers=(0, 2), last="all")
    unmodified = average_states(lm, strings)
    with method.applied(lm):
        averages = average_states(lm, strings)
        with torch.no_grad():
            states = lm.model(rows, output_hidden_states=True).hidden_states
    expected = torch.stack(states).mean(1)
    assert_same(averages["residual"], expected, states_noise("qwen2"), "hidden states")
    assert abs(averages["residual"] - unmodified["residual"]).max() > 1e-2


@pytest.mark.parametrize("batch_tokens", [None, 60, 1000])
def test_averages_of_several_views_of_a_prompt_are_those_of_each(lm, batch_tokens):
    """The views run next to each other, after each other, or some of each."""
    strings = Strings(count=20, length=20, alphabet="tokens", batch_size=3)
    bases = (1e4, 3e4, 1e5)
    parts = []
    for base in bases:
        with AttentionBuckets(bases=(base,)).applied(lm):
            parts.append(average_states(lm, strings))
    buckets = AttentionBuckets(bases=bases, batch_tokens=batch_tokens)
    with buckets.applied(lm):
        averages = average_states(lm, strings)
        found = moments(lm, strings, "residual", [2, 5], 4, lambda n: None)
    noise = states_noise("qwen2")
    for site, values in averages.items():
        expected = np.mean([part[site] for part in parts], axis=0)
        assert_same(values, expected, noise, "hidden states")
    assert_same(found.mean, averages["residual"][1:], noise, "hidden states")
    rows = torch.tensor(strings.draw(lm))
    views = []
    for base in bases:
        with (
            AttentionBuckets(bases=(base,)).applied(lm),
            channel_input(lm, [2, 5], "residual") as inputs,
            torch.no_grad(),
        ):
            lm.model(rows)
            views.append(torch.stack([inputs[i][:, 4:] for i in range(1, LAYERS)]))
    chosen = torch.stack(views).mean(0).double()
    variance = (chosen**2).mean((1, 2)) - chosen.mean((1, 2)) ** 2
    # The output of the last block comes after the final norm.
    np.testing.assert_allclose(found.variance[:-1], variance, rtol=1e-3, atol=1e-5)


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
