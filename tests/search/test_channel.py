"""The channel search: the filter against a plain recomputation, and planted channels are found."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import posbench
from posbench.measure.states import average_states
from posbench.methods.scale_channel import ScaleChannel
from posbench.model.lm import LM
from posbench.search import statistics
from posbench.search.channel import ChannelSearch
from tests.conftest import Result, run_folders
from tests.messages import refused
from tests.models import VOCABULARY, WIDTH, build

POSITIONS = 120


class Words(list):
    """The little of a tokenizer that random token strings need: a length, and special tokens."""

    all_special_ids = (0,)


def noisy_curves(seed: int = 0) -> np.ndarray:
    """[4 layers, 120 positions, 10 channels] of noise with three planted channels."""
    rng = np.random.default_rng(seed)
    curves = rng.normal(size=(4, POSITIONS, 10))
    rise = np.linspace(0, 1, POSITIONS)
    curves[:, :, 3] = (
        2 * rise + rng.normal(size=(4, POSITIONS)) * 0.05
    )  # rising in every layer
    curves[:, :, 7] = (
        -30 * np.sqrt(rise) + rng.normal(size=(4, POSITIONS)) * 0.5
    )  # falling, rougher
    curves[:1, :, 5] = rise  # in one layer of four: not more than a quarter
    return curves


def test_planted_channels_are_found_smoothest_first():
    found = statistics.paper_filter(noisy_curves(), window=20, skip=5)
    assert found.ranking[0] == 3
    assert 7 in found.ranking[1:]
    assert 5 not in found.ranking
    assert (found.direction[:, 3] == 1).all() and (found.direction[:, 7] == -1).all()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_filter_equals_a_plain_recomputation(aggregate, scaled):
    curves = noisy_curves(1)
    window = 15
    skip = 8
    found = statistics.paper_filter(
        curves, window=window, skip=skip, aggregate=aggregate, scaled=scaled
    )
    for channel in range(curves.shape[2]):
        rough = []
        count = 0
        for layer in range(curves.shape[0]):
            smooth = np.convolve(
                curves[layer, :, channel], np.ones(window) / window, mode="valid"
            )[skip:]
            fit = np.polynomial.Polynomial.fit(
                np.arange(len(smooth)), smooth, 3
            ).deriv()
            slope = fit(np.arange(len(smooth)))
            if (slope > 0).all() or (slope < 0).all():
                count += 1
                if scaled:
                    smooth = (smooth - smooth.min()) / (smooth.max() - smooth.min())
                rough.append(((smooth[2:] - 2 * smooth[1:-1] + smooth[:-2]) ** 2).sum())
        assert found.monotone_layers[channel] == count
        if count:
            expected = sum(rough) if aggregate == "sum" else sum(rough) / count
            np.testing.assert_allclose(
                found.smoothness[channel], expected, rtol=1e-8, atol=1e-20
            )
        assert (channel in found.ranking) == (count > curves.shape[0] / 4)


def test_scaled_smoothness_ranks_by_shape_and_raw_smoothness_by_size():
    """A straight line of a large channel, and a tiny one that bends: the raw statistic calls the tiny one smooth."""
    x = np.linspace(0, 1, POSITIONS)
    noise = np.random.default_rng(2).normal(size=(4, POSITIONS)) * 0.01
    line, bend = 100 * x + noise, 1e-3 * x**3 * np.ones((4, 1))
    curves = np.stack([line, bend], axis=-1)
    assert statistics.paper_filter(curves, window=5, skip=2).ranking == [1, 0]
    unit = statistics.paper_filter(curves, window=5, skip=2, scaled=True)
    assert unit.ranking == [0, 1]
    # Neither a factor nor an offset of a channel moves the scaled statistic.
    other = statistics.paper_filter(curves * [3, -7] + 5, window=5, skip=2, scaled=True)
    np.testing.assert_allclose(other.smoothness, unit.smoothness, rtol=1e-6)
    np.testing.assert_array_equal(other.monotone_layers, unit.monotone_layers)


def test_a_constant_curve_has_no_scaled_smoothness():
    curves = np.zeros((4, POSITIONS, 1))
    curves[:3, :, 0] = np.linspace(0, 1, POSITIONS)
    found = statistics.paper_filter(
        curves, window=5, skip=2, scaled=True, monotone_only=False
    )
    assert found.smoothness.tolist() == [np.inf]
    found = statistics.paper_filter(curves, window=5, skip=2, scaled=True)
    assert np.isfinite(found.smoothness).all() and found.ranking == [0]


def test_each_variant_has_its_reading_of_smoothness():
    assert ChannelSearch(variant="official").scales_curves
    for scaled in (True, False):
        assert ChannelSearch(scaled=scaled).scales_curves is scaled


def test_a_rising_layer_and_a_falling_layer_both_count_in_the_paper_variant():
    rise = np.linspace(0, 1, POSITIONS)
    curves = np.stack([rise, -rise, 0 * rise, 0 * rise])[:, :, None]
    assert statistics.paper_filter(
        curves, window=5, skip=2
    ).monotone_layers.tolist() == [2]


def test_channels_that_only_the_official_threshold_separates():
    rise = np.linspace(0, 1, 400)
    hidden = np.zeros((8, 400, 2))
    hidden[2:5, :, 0] = rise[None]  # three rising layers of eight: more than 8 // 4
    hidden[2:4, :, 1] = rise[None]
    hidden[4:6, :, 1] = -rise[
        None
    ]  # two against two: a tie, falling wins with two, not more than 8 // 4
    found = statistics.official_filter(hidden)
    assert found.monotone_layers.tolist() == [3, 2] and found.ranking == [0]


def test_too_short_strings_are_refused():
    with refused(
        "search.length",
        120,
        allowed=("137", "search.window", "search.skip"),
        hint="search.window",
    ):
        statistics.paper_filter(noisy_curves(), window=100, skip=30)
    with refused(
        "search.length",
        300,
        allowed=("300", "variant=official"),
        hint="search.length=1000",
    ):
        statistics.official_filter(np.zeros((9, 300, 4)))


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "qwen2"])
def test_a_channel_planted_in_a_model_is_found(name):
    lm = posbench.load(build(name))
    lm.tokenizer = Words(range(VOCABULARY))
    planted = 11

    def ramp(module, args, out):
        out = out.clone()
        out[..., planted] += torch.linspace(0, 6, out.shape[1])
        return out

    search = ChannelSearch(
        strings=40, length=POSITIONS, alphabet="tokens", window=20, skip=5, top_k=3
    )
    handle = lm.model.get_input_embeddings().register_forward_hook(ramp)
    found = search.statistics(average_states(lm, search.drawn))
    handle.remove()
    without = search.statistics(average_states(lm, search.drawn))
    assert planted in found.ranking and planted not in without.ranking
    assert any(
        c.channel == planted
        for c in ChannelSearch(top_k=WIDTH).list_candidates(found, [(1, 2)])
    )


def test_choice():
    paper = ChannelSearch()
    official = ChannelSearch(variant="official")
    assert paper.choose([0.5, 0.3, 0.3], unmodified=0.1) == 1
    assert official.choose([0.5, 0.30004, 0.30001], unmodified=0.4) == 1, (
        "rounded to 4 decimals, the earlier one wins"
    )
    assert official.choose([0.5, 0.30001], unmodified=0.3) is None, (
        "the unmodified model wins ties"
    )


def test_exhaustive_traverses_every_channel_and_filter_keeps_the_best():
    found = statistics.paper_filter(noisy_curves(), window=20, skip=5)
    everything = ChannelSearch(candidates="all").list_candidates(found, [(1, 2)])
    assert {c.channel for c in everything} == set(range(10)) and len(everything) == 40
    few = ChannelSearch(top_k=1).list_candidates(found, [(1, 2)])
    assert {c.channel for c in few} == {3} and [c.factor for c in few] == [
        0.5,
        0.0,
        -0.5,
        -1.0,
    ]
    nothing = statistics.paper_filter(np.zeros((4, POSITIONS, 3)), window=20, skip=5)
    with refused(
        "search.candidates", "monotone", allowed="monotone", hint="search=exhaustive"
    ):
        ChannelSearch().list_candidates(nothing, [(0, 1)])


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


def test_the_loss_of_a_search_that_keeps_the_model_is_that_of_the_model(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    call = ["model=tiny", "search=official", "search.candidates=all"]
    call += ["search.strings=8", "search.length=400", "search.factors=[3.0]"]
    call += ["search.layers=[0,0]", "method.channel=7", "task.limit=2"]
    call += ["task.calibration_examples=8", "search.held_back=6", "stages=[search]"]
    result = posbench(*call, "runtime.device=cpu")
    assert result.status == 0, result.err
    (run,) = run_folders(outputs)
    block = yaml.safe_load((run / "found.yaml").read_text())["scale_channel"]
    assert block["channel"] is None
    assert block["loss"] == block["loss_unmodified"]


def test_there_are_no_tokens_before_all_of_them(tiny: LM) -> None:
    method = ScaleChannel(
        channel=3, factor=-1.0, layers=(0, 3), tokens="earlier", last="all"
    )
    with refused("method.last", "all", hint="method.last=1"):
        method.check(tiny)
