"""Attention sorting against full attention matrices, and against outputs of the authors' program."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import posbench
from posbench.backends.base import text_encoder
from posbench.errors import UserError
from posbench.methods import attention_sorting
from posbench.methods.attention_sorting import AttentionSorting, item_scores
from posbench.methods.choice import MethodChoice
from posbench.methods.composed import Composed
from posbench.methods.reorder import Reorder
from posbench.model.items import ItemPrompt
from posbench.model.load import ModelConfig
from posbench.tasks.items import joined
from tests.messages import refused
from tests.models import build
from tests.rounding import EPSILON, assert_same, attention_noise, noise_floor

GOLDEN = Path(__file__).parent / "golden"
CASES = [
    case
    for case in json.loads((GOLDEN / "documents" / "manifest.json").read_text())[
        "cases"
    ]["documents"]
    if case["id"].startswith("sort_")
]


@pytest.fixture(scope="module")
def lm():
    """The tiny Llama of the golden outputs, with a token for each ASCII character, its code."""
    characters = tokenizers.models.WordLevel({chr(i): i for i in range(128)}, chr(0))
    tokenizer = tokenizers.Tokenizer(characters)
    each = tokenizers.Regex(r"[\s\S]")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(each, "isolated")
    return posbench.load(
        AutoModelForCausalLM.from_pretrained(GOLDEN / "llama-mha"),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer),
    )


def golden_arrays(case):
    prefix = f"{case['id']}/"
    with np.load(GOLDEN / "documents" / "documents_llama-mha.npz") as data:
        return {k.removeprefix(prefix): data[k] for k in data if prefix in k}


def golden_prompt(wanted):
    """A golden prompt as text; every character is one token."""
    text = "".join(map(chr, wanted["prompt_ids"][0]))
    return ItemPrompt(text, tuple(map(tuple, wanted["document_spans"].tolist())))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
def test_outputs_of_the_released_program(case, lm, monkeypatch):
    wanted = golden_arrays(case)
    prompt = golden_prompt(wanted)
    ids = wanted["prompt_ids"]
    assert lm.encode(prompt.text).ids == ids[0].tolist()
    with lm.last_attention() as weights:
        lm.logits(torch.tensor(ids))
    rows = torch.cat([weights[layer] for layer in range(lm.layers)])
    np.testing.assert_allclose(rows, wanted["last_row_attention"], atol=1e-5, rtol=0)
    scored = []

    def listen(*args):
        scored.append(item_scores(*args))
        return scored[-1]

    monkeypatch.setattr(attention_sorting, "item_scores", listen)
    for iterations, order in enumerate(wanted["orders"].tolist()):
        scored.clear()
        method = AttentionSorting(
            best_last=case["best_last"], iterations=iterations, score="sum"
        )
        sorted_prompt = method.rewrite(lm, prompt)
        assert sorted_prompt.shown_items == order
        for scores, before, expected in zip(
            scored, wanted["orders"], wanted["scores"], strict=False
        ):
            found = np.array(scores)[before]
            np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    final = lm.encode(sorted_prompt.text).ids
    np.testing.assert_array_equal(final, wanted["final_prompt_ids"][0])
    generated = lm.model.generate(
        torch.tensor([final]),
        attention_mask=torch.ones(1, len(final), dtype=torch.long),
        max_new_tokens=len(wanted["tokens"]),
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    np.testing.assert_array_equal(
        generated.sequences[0, len(final) :], wanted["tokens"]
    )
    steps = torch.stack(generated.logits, 1)[0]
    noise = noise_floor(lm.model, torch.tensor([final]))
    assert_same(steps, wanted["step_logits"], noise, "golden")


@pytest.mark.parametrize("score", ["sum", "mean"])
@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window", "gemma2", "mpt"])
def test_scores_equal_full_attention_matrices(family, score):
    model = build(family)
    ids = torch.randint(1, 250, (1, 40), generator=torch.Generator().manual_seed(1))
    spans = [(2, 9), (9, 12), (20, 35), (0, 0)]
    found = item_scores(posbench.load(model), ids[0].tolist(), spans, score)
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        layers = model(ids, output_attentions=True).attentions
    row = torch.stack(layers)[:, 0, :, -1].mean((0, 1))
    expected = []
    for start, end in spans:
        weights = row[start:end]
        expected.append(float(weights.sum()))
        if score == "mean" and len(weights):
            expected[-1] /= len(weights)
    assert_same(found, expected, attention_noise(family), "attention")
    assert found[-1] == 0


def test_a_neutral_method_and_a_single_item_leave_the_prompt(lm):
    prompt = ItemPrompt("ab cd ef", ((0, 2), (3, 5), (6, 8)))
    assert AttentionSorting().neutral().rewrite(lm, prompt) == prompt
    one = ItemPrompt("ab cd ef", ((3, 5),))
    assert AttentionSorting().rewrite(lm, one) == one
    none = ItemPrompt("ab cd ef", ())
    assert AttentionSorting().rewrite(lm, none) == none


@pytest.mark.parametrize("best_last", [True, False])
def test_ties_keep_their_order_and_end_the_repetition(lm, best_last, monkeypatch):
    calls = []

    def equal(*args):
        calls.append(args)
        return [0.2, 0.2, 0.2, 0.1]

    monkeypatch.setattr(attention_sorting, "item_scores", equal)
    prompt = ItemPrompt("ab cd ef gh", ((0, 2), (3, 5), (6, 8), (9, 11)))
    method = AttentionSorting(best_last=best_last, iterations=5)
    found = method.rewrite(lm, prompt)
    assert found.text == ("gh ab cd ef" if best_last else "ab cd ef gh")
    # The second reading, or the first, finds the order as it was.
    assert len(calls) == (2 if best_last else 1)


def test_it_reads_the_prompt_in_its_form(lm, monkeypatch):
    """The last token is that of the whole prompt, with system message and the beginning of the reply."""
    read = []
    monkeypatch.setattr(
        attention_sorting,
        "item_scores",
        lambda lm, ids, spans, score: read.append((ids, spans)) or [0.0, 1.0],
    )
    form = {"system": "be brief", "prefill": " so:"}
    prompt = ItemPrompt("ab cd?", ((0, 2), (3, 5)), form=form)
    AttentionSorting(iterations=1).rewrite(lm, prompt)
    ((ids, spans),) = read
    assert lm.tokenizer.decode(ids).replace(" ", "") == "bebrief\n\nabcd?so:"
    texts = ["".join(lm.tokenizer.convert_ids_to_tokens(ids[a:b])) for a, b in spans]
    assert texts == ["ab", "cd"]


def test_a_later_method_ranks_by_the_scores(lm, monkeypatch):
    scores = [0.3, 0.1, 0.4, 0.2]
    monkeypatch.setattr(attention_sorting, "item_scores", lambda *_: scores)
    text, spans = joined("of: ", ["a", "b", "c", "d"], ", ", "?")
    prompt = ItemPrompt(text, spans)
    found = AttentionSorting().rewrite(lm, prompt)
    assert found.text == "of: b, d, a, c?" and found.orders["relevance"] == [2, 0, 3, 1]
    both = Composed(
        parts={"sort": AttentionSorting(), "ends": Reorder(order="best_first")}
    )
    assert both.rewrite(lm, prompt).text == "of: c, a, d, b?"
    assert not both.rewrites_by_text


def test_it_needs_the_model():
    encoder = text_encoder(ModelConfig(name="fake", base_url="http://localhost/v1"))
    prompt = ItemPrompt("ab cd", ((0, 2), (3, 5)))
    with refused("method", "attention_sorting", hint="model.base_url"):
        AttentionSorting().rewrite(encoder, prompt)
    choice = MethodChoice.of(
        {"_target_": "posbench.methods.attention_sorting.AttentionSorting"}
    )
    assert not choice.changes_prompts_alone


def test_items_that_no_token_shows_are_told(lm):
    prompt = ItemPrompt("ab cd", ((30, 32), (33, 35)))
    with pytest.raises(UserError) as error:
        AttentionSorting().rewrite(lm, prompt)
    assert error.value.field == "prompt"


def test_a_sum_grows_with_the_tokens_and_a_mean_does_not(lm):
    ids = list(range(40, 80))
    spans = [(2, 9), (9, 12)]
    sums = item_scores(lm, ids, spans, "sum")
    means = item_scores(lm, ids, spans, "mean")
    assert_same([m * n for m, n in zip(means, (7, 3), strict=True)], sums, EPSILON, "x")
