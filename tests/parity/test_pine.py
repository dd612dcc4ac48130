"""PINE against a plain recomputation, its own promise (no order of documents), and outputs of the authors' program."""

import json
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import posbench
from posbench.errors import UserError
from posbench.methods.pine import Pine, document_columns
from tests.messages import refused
from tests.models import build
from tests.parity.plain import attending_plainly, batch, prompt_then_steps
from tests.rounding import assert_same, family_noise, noise_floor

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "documents" / "manifest.json").read_text())["cases"][
    "pine"
]
PADS = [0, 7]
PROMPT = 36
STEPS = 3
ITEMS = [(3, 9), (9, 13), (15, 22)]
"""Tokens of three documents of each prompt, counted from its first one; two tokens stand between the last two."""
DOCUMENTS = [(3, 9), (9, 15), (15, 22)]
FAMILIES = ("llama-gqa", "qwen2", "gemma")
ANY_ORDER = ("llama-gqa", "qwen3", "qwen2-yarn", "gpt_neox", "phi3-longrope", "smollm3")
"""Grouped keys, norms of keys, rescaled angles, partial rotation, short and long factors, layers without RoPE."""


def turned(layer, x, positions):
    """Vectors [T, d] rotated to positions [T], by the angles of the formula."""
    width = int(x.shape[-1] * layer.share)
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = positions[:, None] * rates
    first, second = x[:, : width // 2], x[:, width // 2 : width]
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    pair = first * cos - second * sin, second * cos + first * sin
    return torch.cat([*pair, x[:, width:]], dim=1)


def document_of(token):
    return next((n for n, (a, b) in enumerate(DOCUMENTS) if a <= token < b), None)


def plain_positions(layer, head, token, reverse):
    """The positions at which a token stands and sees every key, from scores without positions."""
    end = DOCUMENTS[-1][1]
    own = document_of(token)
    rows = [token] if own is None else [*range(*DOCUMENTS[own])]
    others = [n for n in range(len(DOCUMENTS)) if n != own]
    keys = [j for n in others for j in range(*DOCUMENTS[n])]
    scores = layer.query[head][rows] @ layer.key[head][keys].T * layer.scaling
    shares = scores.softmax(1).sum(0).tolist()
    importance = {
        n: np.mean(
            [s for s, j in zip(shares, keys, strict=True) if document_of(j) == n]
        )
        for n in others
    }
    ranked = sorted(others, key=lambda n: importance[n], reverse=not reverse)
    positions = torch.arange(len(layer.key[head]))
    at = end
    for n in ([] if own is None else [own]) + ranked:
        first, last = DOCUMENTS[n]
        at -= last - first
        positions[first:last] = at + torch.arange(last - first)
    return positions


def plain_weights(layer, head, token, positions, seen):
    """Attention weights of a token to the keys that it sees."""
    (query,) = turned(layer, layer.query[head][[token]], positions[[token]])
    keys = turned(layer, layer.key[head][seen], positions[seen])
    return (keys @ query * layer.scaling).softmax(0)


def plainly(model, ids, pads, reverse=False):
    """Logits [B, T, V], one query of one head at a time."""

    def attend(layer):
        out = torch.zeros_like(layer.query)
        heads, tokens, _ = layer.query.shape
        for head in range(heads):
            for token in range(tokens):
                own = document_of(token)
                seen = set(range(token + 1))
                if own is not None:
                    others = [span for n, span in enumerate(DOCUMENTS) if n != own]
                    seen |= {j for span in others for j in range(*span)}
                positions = torch.arange(tokens)
                if token >= DOCUMENTS[0][0]:
                    positions = plain_positions(layer, head, token, reverse)
                weights = plain_weights(layer, head, token, positions, sorted(seen))
                out[head, token] = weights @ layer.value[head][sorted(seen)]
        return out

    with attending_plainly(model, pads, attend), torch.no_grad():
        return model(ids, use_cache=False).logits


def add_items(lm, ids, pads, items=ITEMS):
    for row, pad in zip(ids, pads, strict=True):
        lm.items.add(row[pad:PROMPT].tolist(), items)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_and_steps_equal_a_plain_recomputation(family):
    lm = posbench.load(build(family))
    ids, mask, positions = batch(PADS, PROMPT + STEPS)
    add_items(lm, ids, PADS)
    expected = plainly(lm.model, ids, PADS)
    with Pine().applied(lm):
        found = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    real = mask.bool()
    assert_same(found[real], expected[real], family_noise(family), "logits")
    stock = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    assert (stock - expected)[real].abs().max() > 1e-2


def test_the_reversed_order_and_the_kernels():
    ids, mask, positions = batch(PADS, PROMPT + STEPS)
    real = mask.bool()
    lm = posbench.load(build("llama-gqa"))
    expected = plainly(lm.model, ids, PADS, reverse=True)
    add_items(lm, ids, PADS)
    for kernel in ("sdpa", "eager"):
        lm.model.set_attn_implementation(kernel)
        with Pine(order="reversed").applied(lm):
            found = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
        assert_same(found[real], expected[real], family_noise("llama-gqa"), "logits")


@torch.no_grad()
def test_many_tokens_at_once_on_a_cache_equal_one_by_one(monkeypatch):
    """And so do queries in several pieces."""
    monkeypatch.setattr("posbench.methods.pine.CHUNK_ROWS", 7)
    lm = posbench.load(build("llama-gqa"))
    ids, mask, positions = batch(PADS, PROMPT + STEPS)
    add_items(lm, ids, PADS)
    with Pine().applied(lm):
        steps = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
        out = lm.model(
            ids[:, :PROMPT],
            attention_mask=mask[:, :PROMPT],
            position_ids=positions[:, :PROMPT],
        )
        rest = lm.model(
            ids[:, PROMPT:],
            attention_mask=mask,
            position_ids=positions[:, PROMPT:],
            past_key_values=out.past_key_values,
        ).logits
    assert_same(rest, steps[:, PROMPT:], family_noise("llama-gqa"), "logits")


def prompt_in_order(order):
    """A prompt of four documents of unequal lengths, two of which are identical, and their tokens."""
    generator = torch.Generator().manual_seed(7)

    def draw(count):
        return torch.randint(1, 250, (count,), generator=generator).tolist()

    prefix, suffix = draw(4), draw(6)
    documents = [draw(length) for length in (5, 9, 7)]
    documents.append(documents[0])
    ids = [*prefix]
    spans = []
    for index in order:
        spans.append((len(ids), len(ids) + len(documents[index])))
        ids += documents[index]
    return ids + suffix, spans, len(suffix)


@pytest.mark.parametrize("family", ANY_ORDER)
def test_no_order_of_documents_changes_what_comes_after_them(family):
    lm = posbench.load(build(family))
    orders = list(permutations(range(4)))[::5]
    assert len(orders) >= 5 and orders[0] == (0, 1, 2, 3)
    suffixes = []
    replies = []
    stock = []
    for order in orders:
        ids, spans, num_after = prompt_in_order(order)
        lm.items.add(ids, spans)
        ids = torch.tensor([ids])
        stock.append(lm.logits(ids)[0, -num_after:])
        with Pine().applied(lm):
            suffixes.append(lm.logits(ids)[0, -num_after:])
            generated = lm.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=6,
                min_new_tokens=6,
                do_sample=False,
                pad_token_id=0,
            )
            replies.append(generated[0, ids.shape[1] :].tolist())
    for suffix, reply in zip(suffixes, replies, strict=True):
        assert_same(suffix, suffixes[0], family_noise(family), "logits")
        assert reply == replies[0]
    assert (stock[1] - stock[0]).abs().max() > 1e-2


@pytest.mark.parametrize("family", [*FAMILIES, "smollm3"])
def test_one_document_changes_nothing(family):
    lm = posbench.load(build(family))
    ids, mask, positions = batch(PADS, PROMPT + STEPS)
    add_items(lm, ids, PADS, [(3, 22)])
    stock = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    with Pine().applied(lm):
        found = prompt_then_steps(lm.model, ids, mask, positions, PROMPT)
    real = mask.bool()
    assert_same(found[real], stock[real], family_noise(family), "logits")


@torch.no_grad()
def test_a_listener_sees_the_weights_of_the_last_token():
    lm = posbench.load(build("llama-gqa"))
    ids, mask, _ = batch([0], PROMPT)
    add_items(lm, ids, [0])
    rows = {}

    def attend(layer):
        found = []
        for head in range(len(layer.query)):
            positions = plain_positions(layer, head, PROMPT - 1, reverse=False)
            seen = list(range(PROMPT))
            found.append(plain_weights(layer, head, PROMPT - 1, positions, seen))
        rows.setdefault(layer.number, torch.stack(found))
        return torch.zeros_like(layer.query)

    with attending_plainly(lm.model, [0], attend):
        lm.model(ids, use_cache=False)
    with Pine().applied(lm), lm.last_attention() as weights:
        lm.logits(ids, mask)
    # In the first layer both see the same queries and keys.
    assert_same(weights[0][0], rows[0], family_noise("llama-gqa"), "attention")
    for layer in range(lm.layers):
        total = weights[layer].sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
def test_outputs_of_the_released_program(case):
    lm = posbench.load(AutoModelForCausalLM.from_pretrained(GOLDEN / "llama-mha"))
    with np.load(GOLDEN / "documents" / "pine_llama-mha.npz") as data:
        prefix = f"{case['id']}/"
        wanted = {k.removeprefix(prefix): data[k] for k in data if prefix in k}
    ids = torch.tensor(wanted["prompt_ids"])
    ends = np.cumsum([case["prefix"], *case["documents"]]).tolist()
    lm.items.add(ids[0].tolist(), list(pairwise(ends)))
    with Pine().applied(lm):
        logits = lm.logits(ids)[0]
        generated = lm.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=len(wanted["tokens"]),
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    noise = noise_floor(lm.model, ids)
    assert_same(logits, wanted["prefill_logits"], noise, "golden")
    np.testing.assert_array_equal(
        generated.sequences[0, ids.shape[1] :], wanted["tokens"]
    )
    steps = torch.stack(generated.logits, 1)[0]
    assert_same(steps, wanted["step_logits"], noise, "golden")


@pytest.mark.parametrize(
    ("items", "documents"),
    [
        ([(2, 4), (6, 8)], [(2, 6), (6, 8)]),
        ([(6, 8), (2, 4)], [(2, 6), (6, 8)]),
        ([(2, 5), (4, 8)], [(2, 5), (5, 8)]),
        ([(2, 5), (0, 0), (5, 8)], [(2, 5), (5, 8)]),
        ([(2, 5), (2, 5)], [(2, 5)]),
    ],
)
def test_documents_have_no_gaps_and_do_not_overlap(items, documents):
    assert document_columns(items) == documents


@pytest.mark.parametrize("family", ["mpt", "smollm3-nope", "mistral-window", "gemma2"])
def test_what_cannot_work_is_refused(family):
    lm = posbench.load(build(family))
    with pytest.raises(UserError) as error:
        Pine().check(lm)
    assert error.value.field == "method" and "scale_channel" in error.value.hint
    assert "\n" not in str(error.value)


def test_a_window_that_no_prompt_reaches_is_none():
    lm = posbench.load(build("mistral-window"))
    Pine().check(replace(lm, context_window=24))
    with refused("method", "pine", allowed="24 tokens", hint="scale_channel"):
        Pine().check(replace(lm, context_window=25))
