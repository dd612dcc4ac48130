"""Prompts that share their prefills: the plan against a trie, the numbers against prompts read alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import posbench
from posbench.errors import UserError
from posbench.methods import ScaleChannel, Unmodified
from posbench.methods.composed import Composed
from posbench.methods.layer_scaling import LayerScaling
from posbench.methods.position_interpolation import PositionInterpolation
from posbench.model.store import (
    MIN_SEGMENT_TOKENS,
    PrefixStore,
    build_prefix_trie,
    group_by_prefix,
    reason_not_shareable,
    segment_batches,
)
from tests.conftest import few
from tests.models import BUILDERS, VOCABULARY, build
from tests.rounding import assert_same, family_noise, log_probabilities

CHANGING = ("phi3-longrope",)


def forest(seed, questions=2, branches=3):
    """Prompts in which beginnings of several lengths are common, some nested, one twice, one a beginning of
    another."""
    random = np.random.default_rng(seed)

    def words(count):
        return random.integers(1, VOCABULARY, count).tolist()

    head = words(40)
    rows = []
    for _ in range(questions):
        trunk = head + words(35 + int(random.integers(20)))
        for _ in range(branches):
            rows.append(trunk + words(int(random.integers(1, 60))))
            trunk = trunk + words(int(random.integers(1, 45)))
    rows += [list(rows[0]), rows[1][:50], words(7), words(70)]
    random.shuffle(rows)
    return [row[:120] for row in rows]


trees = st.lists(
    st.tuples(
        st.integers(0, 7),
        st.integers(0, 90),
        st.lists(st.integers(0, 2), min_size=1, max_size=70),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(trees, st.integers(1, 5), st.sampled_from([None, 64, 300]))
def test_a_layout_computes_each_token_behind_what_it_sees_and_little_twice(
    tree, size, most
):
    rows = []
    for parent, keep, own in tree:
        rows.append((rows[parent % len(rows)][:keep] if rows else []) + own)
    found = build_prefix_trie(rows)
    held = {}
    done = set()
    for batch in segment_batches(rows, found.segments, size, most):
        assert len({each.level for each in batch}) == 1 and len(batch) <= size
        assert (
            most is None
            or len(batch) == 1
            or len(batch) * max(len(rows[e.prompt]) for e in batch) <= most
        )
        for row, start, _ in batch:
            # Everything before a stretch was computed in an earlier batch.
            assert set(found.token_slots[row][:start].tolist()) <= done
        for row, start, _ in batch:
            for place, token in zip(
                found.token_slots[row][start:].tolist(), rows[row][start:], strict=True
            ):
                assert place not in done
                held[place] = token
        done |= held.keys()
    assert [
        [held[place] for place in slots.tolist()] for slots in found.token_slots
    ] == rows
    # A place stands for one beginning: prompts that share it are alike up to there.
    seen = {}
    for row, slots in zip(rows, found.token_slots, strict=True):
        for count, place in enumerate(slots.tolist(), 1):
            assert seen.setdefault(place, row[:count]) == row[:count]
    trie = len({tuple(row[:count]) for row in rows for count in range(1, len(row) + 1)})
    assert trie <= found.size == len(held) <= trie + MIN_SEGMENT_TOKENS * len(rows)


@settings(max_examples=100, deadline=None)
@given(trees, st.integers(20, 400))
def test_groups_hold_every_prompt_once_and_no_more_tokens_than_fit(tree, capacity):
    rows = []
    for parent, keep, own in tree:
        rows.append((rows[parent % len(rows)][:keep] if rows else []) + own)
    groups = group_by_prefix(rows, capacity)
    assert sorted(i for group in groups for i in group) == [*range(len(rows))]
    for group in groups:
        assert (
            len(group) == 1
            or build_prefix_trie([rows[i] for i in group]).size <= capacity
        )


def methods(lm):
    channel = ScaleChannel(channel=(5, 17), factor=-0.5, layers=(1, 2))
    found = {"none": Unmodified(), "scale_channel": channel}
    if lm.name == "llama":
        found |= {
            tokens: replace(channel, tokens=tokens) for tokens in ("earlier", "last")
        }
    if rotates(lm):
        scaling = LayerScaling(scales=(1.0, 1.5, 1.2, 0.8))
        found["both"] = Composed(
            parts={"layer_scaling": scaling, "scale_channel": channel}
        )
    return found


def rotates(lm):
    try:
        PositionInterpolation(scale=1.7).check(lm)
    except UserError:
        return False
    return True


def alone(lm, row, answer):
    """Logits [A, V] of the last prompt token and an answer's, from one prompt without padding."""
    with torch.inference_mode():
        out = lm.model(input_ids=torch.tensor([row]), use_cache=True, logits_to_keep=1)
        later = torch.tensor([answer])
        places = len(row) + torch.arange(len(answer))[None]
        mask = torch.ones(1, len(row) + len(answer), dtype=torch.long)
        given = dict(
            past_key_values=out.past_key_values,
            position_ids=places,
            attention_mask=mask,
        )
        return torch.cat(
            [out.logits[0, -1:], lm.model(input_ids=later, **given).logits[0]]
        )


def batched(lm, rows, answer, prefix):
    """Log-probabilities [B, A, V] of prompts in one batch, read whole or going on from a prefix."""
    given = lm.pad(rows, prefix)
    mask = given["attention_mask"]
    last = given["position_ids"]
    out = lm.model(**given, use_cache=True, logits_to_keep=1)
    mask = torch.cat(
        [mask, torch.ones(len(rows), len(answer), dtype=torch.long)], dim=1
    )
    later = dict(input_ids=torch.tensor([answer] * len(rows)), attention_mask=mask)
    later["position_ids"] = last[:, -1:] + 1 + torch.arange(len(answer))
    more = lm.model(**later, past_key_values=out.past_key_values)
    return torch.cat([out.logits[:, -1:], more.logits], dim=1).log_softmax(-1)


@pytest.mark.parametrize("name", few([n for n in BUILDERS if n not in CHANGING], 10))
def test_shared_prefills_give_what_plain_batches_and_prompts_read_alone_do(name):
    rows = forest(len(name))
    answer = [3, 5, 8]
    rows.sort(key=lambda row: -len(row))
    lm = posbench.load(build(name, dtype=torch.float32), name=name)
    assert reason_not_shareable(lm.model) == ""
    noise = family_noise(name, log_probabilities, tokens=120)
    for method in methods(lm).values():
        channels, layers = method.records()
        store = PrefixStore([row[:-1] for row in rows], channels, layers)
        with method.prefill().applied(lm):
            store.fill(lm, 4, 400)
        prefix = store.prefix(lm, range(len(rows)))
        with method.applied(lm), torch.inference_mode():
            shared, plain = (batched(lm, rows, answer, each) for each in (prefix, None))
            assert_same(shared, plain, noise, "shared prefills")
            singly = torch.stack([alone(lm, row, answer) for row in rows]).log_softmax(
                -1
            )
            assert_same(shared, singly, noise, "shared prefills")
