"""The channel search: filter against brute force, averages against stored hidden states, shared prefill bit
by bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import posbench
from posbench.errors import UserError
from posbench.methods import ScaleChannel
from posbench.search import Candidate, ChannelSearch, statistics
from posbench.search import channel_run as stage
from tests.models import LAYERS, VOCABULARY, WIDTH, build

POSITIONS = 120


class Words:
    """The little of a tokenizer that random token strings need."""

    all_special_ids = (0,)
    pad_token_id = 0

    def __len__(self) -> int:
        return VOCABULARY


def noisy_curves(seed: int = 0) -> np.ndarray:
    """[4 layers, 120 positions, 10 channels] of noise with three planted channels."""
    rng = np.random.default_rng(seed)
    curves = rng.normal(size=(4, POSITIONS, 10))
    rise = np.linspace(0, 1, POSITIONS)
    curves[:, :, 3] = 2 * rise + rng.normal(size=(4, POSITIONS)) * 0.05  # rising in every layer
    curves[:, :, 7] = -30 * np.sqrt(rise) + rng.normal(size=(4, POSITIONS)) * 0.5  # falling, rougher
    curves[:1, :, 5] = rise  # in one layer of four: not more than a quarter
    return curves


def test_planted_channels_are_found_smoothest_first():
    found = statistics.paper(noisy_curves(), window=20, skip=5)
    assert found.ranking[0] == 3
    assert 7 in found.ranking[1:]
    assert 5 not in found.ranking
    assert (found.direction[:, 3] == 1).all() and (found.direction[:, 7] == -1).all()


@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_filter_equals_a_plain_recomputation(aggregate):
    curves, window, skip = noisy_curves(1), 15, 8
    found = statistics.paper(curves, window=window, skip=skip, aggregate=aggregate)
    for channel in range(curves.shape[2]):
        rough, count = [], 0
        for layer in range(curves.shape[0]):
            smooth = np.convolve(curves[layer, :, channel], np.ones(window) / window, mode="valid")[skip:]
            fit = np.polynomial.Polynomial.fit(np.arange(len(smooth)), smooth, 3).deriv()
            slope = fit(np.arange(len(smooth)))
            if (slope > 0).all() or (slope < 0).all():
                count += 1
                rough.append(((smooth[2:] - 2 * smooth[1:-1] + smooth[:-2]) ** 2).sum())
        assert found.monotone_layers[channel] == count
        if count:
            expected = sum(rough) if aggregate == "sum" else sum(rough) / count
            np.testing.assert_allclose(found.smoothness[channel], expected, rtol=1e-8, atol=1e-20)
        assert (channel in found.ranking) == (count > curves.shape[0] / 4)


def test_a_rising_layer_and_a_falling_layer_both_count_in_the_paper_variant():
    rise = np.linspace(0, 1, POSITIONS)
    curves = np.stack([rise, -rise, 0 * rise, 0 * rise])[:, :, None]
    assert statistics.paper(curves, window=5, skip=2).monotone_layers.tolist() == [2]


def test_channels_that_only_the_official_threshold_separates():
    rise = np.linspace(0, 1, 400)
    hidden = np.zeros((8, 400, 2))
    hidden[2:5, :, 0] = rise[None]  # three rising layers of eight: more than 8 // 4
    hidden[2:4, :, 1] = rise[None]
    hidden[4:6, :, 1] = -rise[None]  # two against two: a tie, falling wins with two, not more than 8 // 4
    found = statistics.official(hidden)
    assert found.monotone_layers.tolist() == [3, 2]
    assert found.ranking == [0]


def test_too_short_strings_are_refused():
    with pytest.raises(UserError, match=r"search.length = 120.*at least"):
        statistics.paper(noisy_curves(), window=100, skip=30)
    with pytest.raises(UserError, match="300"):
        statistics.official(np.zeros((9, 300, 4)))


def test_averages_equal_stored_hidden_states():
    lm = posbench.load(build("qwen2"))
    lm.tokenizer = Words()
    search = ChannelSearch(strings=10, length=20, alphabet="tokens", batch_size=4)
    averages = stage.average_states(lm, search)
    rows = torch.tensor(stage.random_strings(lm, search))
    assert rows.shape == (10, 20) and (rows > 0).all() and (rows < VOCABULARY).all()
    with torch.no_grad():
        states = lm.model(rows, output_hidden_states=True).hidden_states
        inputs = [lm.model.model.layers[i].input_layernorm(states[i]) for i in range(LAYERS)]
    np.testing.assert_allclose(averages["residual"], torch.stack(states).mean(1), atol=1e-5)
    np.testing.assert_allclose(averages["attention_input"], torch.stack(inputs).mean(1), atol=1e-5)


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "qwen2"])
def test_a_channel_planted_in_a_model_is_found(name):
    lm = posbench.load(build(name))
    lm.tokenizer = Words()
    planted = 11

    def ramp(module, args, out):
        out = out.clone()
        out[..., planted] += torch.linspace(0, 6, out.shape[1])
        return out

    search = ChannelSearch(strings=40, length=POSITIONS, alphabet="tokens", window=20, skip=5, top_k=3)
    handle = lm.model.get_input_embeddings().register_forward_hook(ramp)
    found = search.statistics(stage.average_states(lm, search))
    handle.remove()
    without = search.statistics(stage.average_states(lm, search))
    assert planted in found.ranking and planted not in without.ranking
    assert any(c.channel == planted for c in ChannelSearch(top_k=WIDTH).ask(found, [(1, 2)]))


@pytest.mark.parametrize("name", ["llama", "llama-gqa", "mistral-window", "qwen2"])
def test_shared_prefill_gives_the_losses_of_one_forward_per_candidate_to_the_bit(name):
    lm = posbench.load(build(name))
    torch.manual_seed(0)
    prompts = [torch.randint(1, VOCABULARY, (n,)).tolist() for n in (40, 33, 12)]
    answers = [[5, 9, 2], [7], [1, 1]]
    candidates = [
        Candidate(c, f, layers)
        for c in (3, 17, 40)
        for f in (0.5, 0.0, -0.5, -1.0)
        for layers in ((1, 3), (2, 2))
    ]
    shared = stage.candidate_losses(lm, list(zip(prompts, answers, strict=True)), candidates)
    inputs, targets = lm.pad_with_answers(list(zip(prompts, answers, strict=True)))
    longest = targets.shape[1]
    for index, candidate in enumerate(candidates):
        settings = dict(channel=candidate.channel, factor=candidate.factor, layers=candidate.layers)
        with torch.inference_mode(), ScaleChannel(**settings, last=longest).applied(lm):
            alone = lm.answer_nats(lm.model(**inputs, logits_to_keep=longest).logits, targets)
        assert shared[1 + index].tolist() == alone.double().tolist()
    neutral = stage.candidate_losses(lm, [(prompts[0], answers[0])], [Candidate(3, 1.0, (0, 3))])
    assert neutral[0].tolist() == neutral[1].tolist()
    assert len(set(shared[:, 0].tolist())) == len(shared), "candidates that cannot be told apart test nothing"


def test_choice():
    paper, official = ChannelSearch(), ChannelSearch(variant="official")
    assert paper.choose([0.5, 0.3, 0.3], unmodified=0.1) == 1
    assert official.choose([0.5, 0.30004, 0.30001], unmodified=0.4) == 1, (
        "rounded to 4 decimals, the earlier one wins"
    )
    assert official.choose([0.5, 0.30001], unmodified=0.3) is None, "the unmodified model wins ties"


def test_exhaustive_traverses_every_channel_and_filter_keeps_the_best():
    found = statistics.paper(noisy_curves(), window=20, skip=5)
    everything = ChannelSearch(candidates="all").ask(found, [(1, 2)])
    assert {c.channel for c in everything} == set(range(10)) and len(everything) == 40
    few = ChannelSearch(top_k=1).ask(found, [(1, 2)])
    assert {c.channel for c in few} == {3} and [c.factor for c in few] == [0.5, 0.0, -0.5, -1.0]
    nothing = statistics.paper(np.zeros((4, POSITIONS, 3)), window=20, skip=5)
    with pytest.raises(UserError, match="search=exhaustive"):
        ChannelSearch().ask(nothing, [(0, 1)])


@given(count=st.integers(1, 100))
def test_layer_ranges_lie_inside_the_model(count):
    ranges = ChannelSearch(layers="auto").layer_ranges(count, None)
    assert len(set(ranges)) == len(ranges) and (0, count - 1) in ranges
    assert all(0 <= a <= b < count for a, b in ranges)
    ((first, last),) = ChannelSearch().layer_ranges(count, None)
    assert 0 <= first <= last < count


def test_default_layers_are_the_papers_share():
    assert ChannelSearch().layer_ranges(32, None) == [(10, 25)]
    assert ChannelSearch().layer_ranges(4, None) == [(1, 3)]
    assert ChannelSearch().layer_ranges(40, (10, 34)) == [(10, 34)]
    assert len(ChannelSearch(layers="auto").layer_ranges(4, None)) == 10
