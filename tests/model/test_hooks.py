"""Caches that share memory hold what caches of their own would, whoever grows, ends or is cut when."""

from __future__ import annotations

import random

import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import posbench
from posbench.methods.ms_poe import MsPoE
from posbench.model.hooks import appendable_cache, fork_cache
from tests.models import build


def fresh(size: int) -> torch.Tensor:
    return torch.rand(2, 1, size, 3)


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 6))
def test_caches_that_share_memory_hold_what_their_own_would(
    draw: random.Random, spare: int
) -> None:
    torch.manual_seed(draw.randrange(1000))
    first = fresh(4), fresh(4)
    # Each cache, and what it must hold.
    live = [(appendable_cache([first], spare), first)]
    for _ in range(25):
        number = draw.randrange(len(live))
        cache, (keys, values) = live[number]
        match draw.choice(
            ["fork", "fork", "grow", "grow", "grow", "end", "cut", "other keys"]
        ):
            case "fork":
                live.append((fork_cache(cache), (keys, values)))
                continue
            case "end":
                if len(live) > 1:
                    del live[number]
                continue
            case "grow":
                count = draw.choice([1, 1, 2, 5])
                more = fresh(count), fresh(count)
                given_back = cache.update(*more, 0)
                keys = torch.cat([keys, more[0]], 2)
                values = torch.cat([values, more[1]], 2)
                assert torch.equal(given_back[0], keys) and torch.equal(
                    given_back[1], values
                )
            case "cut":
                size = max(keys.shape[2] - draw.randrange(4), 1)
                keys = keys[:, :, :size]
                values = values[:, :, :size]
                layer = cache.layers[0]
                layer.keys = layer.keys[:, :, :size]
                layer.values = layer.values[:, :, :size]
            case "other keys":
                keys = torch.rand_like(keys)
                cache.layers[0].keys = keys.clone()
        del cache
        live[number] = live[number][0], (keys, values)
        for each, (own_keys, own_values) in live:
            assert torch.equal(each.layers[0].keys, own_keys), "keys of another one"
            assert torch.equal(each.layers[0].values, own_values), (
                "values of another one"
            )


def test_a_fork_after_another_copies_nothing() -> None:
    cache = appendable_cache([(fresh(50), fresh(50))])
    place = cache.layers[0].keys.data_ptr()
    for _ in range(3):
        other = fork_cache(cache)
        other.update(fresh(1), fresh(1), 0)
        assert (
            other.layers[0].keys.data_ptr() == place
            and cache.layers[0].keys.shape[2] == 50
        )
        del other
    one = fork_cache(cache)
    two = fork_cache(cache)
    for each in (one, two):
        each.update(fresh(1), fresh(1), 0)
    assert one.layers[0].keys.data_ptr() == place != two.layers[0].keys.data_ptr()


def test_models_that_share_a_config_have_functions_of_their_own() -> None:
    config = build("llama").config
    models = [transformers.LlamaForCausalLM(config) for _ in range(2)]
    first, second = (posbench.load(model) for model in models)
    ids = torch.arange(1, 33)[None]
    mask = torch.ones_like(ids)
    before = second.logits(ids, mask)
    method = MsPoE.example(first)
    with method.applied(first):
        changed = first.logits(ids, mask)
        assert torch.equal(second.logits(ids, mask), before)
        with method.applied(second):
            assert torch.equal(first.logits(ids, mask), changed)
            assert not torch.equal(second.logits(ids, mask), before)
    assert torch.equal(second.logits(ids, mask), before)
