"""Policies: methods that change the prompt alone, against prompts that are put together by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posbench import paths
from posbench.backends.base import text_encoder
from posbench.measure.outcomes import holds_answer
from posbench.measure.replies import split_quote
from posbench.methods import ScaleChannel, Unmodified
from posbench.methods.base import CheckpointChange
from posbench.methods.choice import MethodChoice, all_choices
from posbench.methods.composed import Composed
from posbench.methods.prompt_change import PromptChange
from posbench.methods.recite import INSTRUCTION, Recite
from posbench.methods.reorder import Reorder
from posbench.methods.repeat import Repeat
from posbench.methods.top_documents import TopDocuments
from posbench.model.items import ItemPrompt
from posbench.model.load import ModelConfig
from posbench.run.prompts import rewrite_examples
from posbench.tasks import Example, KVRetrieval
from posbench.tasks.items import joined
from posbench.tasks.nq_multidoc import NQMultiDoc
from tests.messages import refused

ORDERS = json.loads(
    (Path(__file__).parents[1] / "data" / "remedies" / "orders.json").read_text()
)
POLICIES: dict[str, MethodChoice] = {
    name: choice
    for name, choice in all_choices([paths.CONF], {}).items()
    if issubclass(choice.cls, PromptChange)
}
ENCODER = text_encoder(ModelConfig(name="fake", base_url="http://localhost/v1"))
HEAD = "Read these.\n\n"
QUESTION = "Question: who?"


def prompt_of(
    items, separator="\n", head=HEAD, tail=f"\n\n{QUESTION}\nAnswer:", **orders
):
    """A prompt of items, whose question is marked where its tail holds it."""
    text, spans = joined(head, items, separator, tail)
    start = text.rfind(QUESTION)
    question = (start, start + len(QUESTION)) if start >= 0 else None
    return ItemPrompt(text, spans, question, orders)


def rewritten(name: str, prompt: ItemPrompt) -> ItemPrompt:
    return POLICIES[name].build().rewrite(ENCODER, prompt)


def shown_order(prompt: ItemPrompt) -> list[int]:
    """The items of a prompt by their spans, without those cut away."""
    shown = [i for i, span in enumerate(prompt.items) if span != (0, 0)]
    return sorted(shown, key=lambda i: prompt.items[i][0])


# Orders


@pytest.mark.parametrize(
    ("name", "library"),
    [("both_ends", "langchain"), ("both_ends_haystack", "haystack")],
)
@pytest.mark.parametrize("size", range(1, 13))
def test_both_ends_are_the_orders_of_the_libraries(name, library, size) -> None:
    items = [f"({index})" for index in range(size)]
    order = ORDERS[library][str(size)]
    assert shown_order(rewritten(name, prompt_of(items))) == order
    # Of a list that is sorted otherwise, the data states the ranking.
    relevance = [*range(1, size, 2), *range(0, size, 2)]
    ranked = rewritten(name, prompt_of(items, relevance=tuple(relevance)))
    assert shown_order(ranked) == [relevance[rank] for rank in order]


@pytest.mark.slow
@pytest.mark.parametrize("size", range(1, 13))
def test_the_libraries_return_these_orders_today(size) -> None:
    transformers = pytest.importorskip("langchain_community.document_transformers")
    documents = pytest.importorskip("langchain_core.documents")
    ranked = [documents.Document(page_content=str(index)) for index in range(size)]
    reordered = transformers.LongContextReorder().transform_documents(ranked)
    order = [int(document.page_content) for document in reordered]
    assert order == ORDERS["langchain"][str(size)]


@pytest.mark.slow
@pytest.mark.parametrize("size", range(1, 13))
def test_llama_index_returns_langchain_s_orders_today(size) -> None:
    postprocessor = pytest.importorskip("llama_index.core.postprocessor")
    schema = pytest.importorskip("llama_index.core.schema")
    ranked = [
        schema.NodeWithScore(node=schema.TextNode(text=str(index)), score=-index)
        for index in range(size)
    ]
    reordered = postprocessor.LongContextReorder().postprocess_nodes(ranked)
    order = [int(node.node.text) for node in reordered]
    assert order == ORDERS["langchain"][str(size)]


@pytest.mark.slow
@pytest.mark.parametrize("size", range(1, 13))
def test_haystack_returns_these_orders_today(size) -> None:
    rankers = pytest.importorskip("haystack.components.rankers")
    haystack = pytest.importorskip("haystack")
    ranked = [haystack.Document(content=str(index)) for index in range(size)]
    result = rankers.LostInTheMiddleRanker().run(documents=ranked)
    order = [int(document.content) for document in result["documents"]]
    assert order == ORDERS["haystack"][str(size)]


SIZES = st.integers(1, 9)


@given(SIZES.flatmap(lambda size: st.permutations(range(size))), st.data())
def test_an_order_moves_items_and_nothing_else(relevance, data) -> None:
    size = len(relevance)
    items = [f"<{'ab' * index}{index}>" for index in range(size)]
    source = data.draw(st.permutations(range(size)))
    ids = data.draw(st.permutations(range(size)))
    prompt = prompt_of(items, relevance=relevance, source=source, id=ids)
    expected = {
        "reversed": [*range(size)][::-1],
        "best_first": relevance,
        "best_last": relevance[::-1],
        "original_order": source,
        "cache_stable": ids,
    }
    for name in (*expected, "both_ends", "both_ends_haystack", "shuffled"):
        other = rewritten(name, prompt)
        order = shown_order(other)
        assert sorted(order) == [*range(size)]
        assert order == list(expected.get(name, order))
        by_hand = prompt_of([items[index] for index in order])
        assert (other.text, other.question) == (by_hand.text, by_hand.question)
        assert [other.item_text(i) for i in range(size)] == items


@pytest.mark.parametrize("name", ["original_order", "cache_stable"])
def test_an_order_that_is_not_known_is_refused(name) -> None:
    with refused("method.order", name, allowed="none", hint="best_first"):
        rewritten(name, prompt_of(["(a)", "(b)"]))


def test_a_shuffled_order_follows_from_the_seed_and_the_prompt() -> None:
    items = ["(a)", "(b)", "(c)"]
    prompts = [prompt_of(items, head=f"{number}:") for number in range(300)]
    orders = [shown_order(rewritten("shuffled", prompt)) for prompt in prompts]
    again = [shown_order(rewritten("shuffled", prompt)) for prompt in prompts[::-1]]
    assert orders == again[::-1]
    # 50 of each of the six, with a standard deviation of 6.5.
    counts = [orders.count(list(order)) for order in permutations(range(3))]
    assert sum(counts) == 300 and min(counts) > 20 and max(counts) < 80
    other_seed = Reorder(order="shuffled", seed=1)
    changed = [shown_order(other_seed.rewrite(ENCODER, p)) for p in prompts]
    assert changed != orders


# The best items


@given(SIZES.flatmap(lambda size: st.permutations(range(size))), st.booleans())
def test_the_best_items_stay_in_their_order(relevance, is_stated) -> None:
    size = len(relevance)
    items = [f"<{'ab' * index}{index}>" for index in range(size)]
    orders = {"relevance": relevance} if is_stated else {}
    ranking = relevance if is_stated else [*range(size)]
    prompt = prompt_of(items, **orders)
    for count in (1, 3, 5):
        best = sorted(ranking[:count])
        other = rewritten(f"top_{count}", prompt)
        by_hand = prompt_of([items[index] for index in best])
        assert (other.text, other.question) == (by_hand.text, by_hand.question)
        spans = dict(zip(best, by_hand.items, strict=True))
        assert list(other.items) == [spans.get(index, (0, 0)) for index in range(size)]


def test_a_later_method_ranks_as_the_data_do() -> None:
    """Not as the order in which the one before put the items."""
    prompt = prompt_of(["(a)", "(b)", "(c)", "(d)"])
    best_last = Reorder(order="best_last")
    two = TopDocuments(count=2)
    both = Composed(parts={"order": best_last, "number": two})
    assert both.rewrites_by_text
    other = both.rewrite(ENCODER, prompt)
    assert other.text == prompt_of(["(b)", "(a)"]).text
    swapped = Composed(parts={"number": two, "order": best_last})
    assert swapped.rewrite(ENCODER, prompt) == other
    # Items that were cut away stay away.
    thrice = Composed(parts={"a": two, "b": best_last, "c": Reorder(order="reversed")})
    assert thrice.rewrite(ENCODER, prompt).text == prompt_of(["(a)", "(b)"]).text
    assert thrice.rewrite(ENCODER, prompt).items[2:] == ((0, 0), (0, 0))


def test_a_question_among_the_items_moves_or_is_not_cut_away() -> None:
    text = "(aaa) Q? (b) (c)"
    prompt = ItemPrompt(text, ((0, 5), (9, 12), (13, 16)), (6, 8))
    other = Reorder(order="reversed").rewrite(ENCODER, prompt)
    assert other.text == "(c) Q? (b) (aaa)" and other.question == (4, 6)
    with refused("method", allowed="question"):
        TopDocuments(count=1).rewrite(ENCODER, prompt)


@pytest.mark.parametrize("order", [[], [0, 0], [3], [0, 1, 2, 2]])
def test_what_names_no_items_is_refused(order) -> None:
    with pytest.raises(ValueError, match="each once"):
        prompt_of(["(a)", "(b)", "(c)"]).with_items(order)


# Twice


def test_parts_of_a_prompt_are_said_twice() -> None:
    items = ["(a)", "(bb)"]
    prompt = prompt_of(items, separator="; ")
    ending = f"\n\n{QUESTION}\nAnswer:"
    expected = {
        "question_first_and_last": f"{QUESTION}\n\n{HEAD}(a); (bb){ending}",
        "documents_twice": f"{HEAD}(a); (bb); (a); (bb){ending}",
        "documents_twice_question_first": f"{QUESTION}\n\n{HEAD}(a); (bb); (a); (bb){ending}",
        "prompt_twice": f"{prompt.text}\n\n{prompt.text}",
    }
    for name, text in expected.items():
        other = rewritten(name, prompt)
        assert other.text == text
        # Spans are those of the last copy.
        starts = [text.rindex(item) for item in items]
        spans = [(s, s + len(i)) for s, i in zip(starts, items, strict=True)]
        assert list(other.items) == spans
        question = text.rindex(QUESTION)
        assert other.question == (question, question + len(QUESTION))
        has_question_twice = name != "documents_twice"
        assert text.count(QUESTION) == 1 + has_question_twice


def test_a_question_that_is_not_marked_is_what_follows_the_items() -> None:
    prompt = prompt_of(["(a)", "(b)"], tail="\nWhich?\n")
    other = rewritten("question_first_and_last", prompt)
    assert other.text == f"Which?\n\n{prompt.text}"
    assert other.items == ((21, 24), (25, 28)) and other.item_text(1) == "(b)"
    for without in (prompt_of(["(a)"], tail=" \n"), ItemPrompt("Which?", ())):
        with refused("method", allowed="question"):
            rewritten("question_first_and_last", without)


def test_a_question_before_the_items_stays_there() -> None:
    prompt = prompt_of(["(a)"], head=f"{QUESTION}\n", tail="\nAnswer:")
    other = rewritten("documents_twice", prompt)
    assert other.text == f"{QUESTION}\n(a)\n\n(a)\nAnswer:"
    assert other.question == prompt.question and other.items == ((20, 23),)


# Quoting


@pytest.mark.parametrize(
    ("tail", "left"),
    [
        (f"\n\n{QUESTION}\nAnswer:", f"\n\n{QUESTION}"),
        (f'\n\n{QUESTION} It is "', f"\n\n{QUESTION}"),
        ("\n\nwho?\nAnswer: ", "\n\nwho?"),
        ("\n\nwho?", "\n\nwho?"),
        (f"\n\n{QUESTION}\n{50 * 'word '}", f"\n\n{QUESTION}\n{50 * 'word '}".rstrip()),
        ("", ""),
    ],
)
def test_a_quotation_is_asked_for_in_place_of_the_cue(tail, left) -> None:
    prompt = prompt_of(["(a)", "(b):"], tail=tail)
    other = rewritten("recite", prompt)
    assert other.text == f"{HEAD}(a)\n(b):{left}\n\n{INSTRUCTION}"
    assert other.items == prompt.items and other.question == prompt.question


def test_the_answer_alone_is_scored() -> None:
    example = Example(
        id="0", prompt="", answers=("x",), answer_cue="Answer:", stop=("\n",)
    )
    for text, quote, answer in (
        ("a\nAnswer: x\nmore", "a\nAnswer:", " x"),
        ("Answer: y. Answer: x", "Answer: y. Answer:", " x"),
        ("no cue\nhere", "", "no cue\nhere"),
        ("a Answer:", "a Answer:", ""),
    ):
        assert split_quote(text, example) == (quote, answer)
    assert example.generation_stop == ()
    plain = replace(example, answer_cue="")
    assert split_quote("a Answer: x", plain) == ("", "a Answer: x")
    assert plain.generation_stop == ("\n",)


def test_a_reply_that_ends_in_its_quotation_has_come_to_no_answer() -> None:
    task = KVRetrieval(
        name="kv",
        prompt="compact",
        records="words",
        pairs=8,
        limit=1,
        calibration_pairs=8,
    )
    example = task.evaluation()[0]
    (asked,) = rewrite_examples(ENCODER, task, [example], Recite(quote_tokens=30))
    assert asked.max_new_tokens == task.max_new_tokens + 30
    assert asked.original == example and asked.answers == example.answers
    assert holds_answer(task, example, {"output": "x"})
    assert not holds_answer(task, asked, {"output": example.answers[0]})
    assert holds_answer(task, asked, {"output": "x", "quote": "q Answer:"})


def test_what_recite_asks_of_a_task() -> None:
    task = KVRetrieval(
        name="kv",
        prompt="compact",
        records="words",
        pairs=8,
        limit=1,
        calibration_pairs=8,
    )
    example = replace(task.evaluation()[0], prefill="Answer:", max_new_tokens=5)
    both = Composed(parts={"r": Recite(quote_tokens=7), "s": Recite(quote_tokens=2)})
    (asked,) = rewrite_examples(ENCODER, task, [example], both)
    assert asked.max_new_tokens == 14 and asked.prefill == ""
    assert both.answer_cue == "Answer:" and both.extra_reply_tokens == 9
    with refused("method", "recite", allowed="choices"):
        chosen = replace(example, choices=("a", "b"))
        rewrite_examples(ENCODER, task, [chosen], Recite())
    with refused("method", allowed="documents"):
        long = replace(example, document=(0, 3))
        rewrite_examples(ENCODER, task, [long], Repeat(part="prompt"))


# All of them


def test_there_are_these_policies() -> None:
    assert set(POLICIES) == {
        "reversed",
        "best_first",
        "best_last",
        "both_ends",
        "both_ends_haystack",
        "original_order",
        "shuffled",
        "cache_stable",
        "top_1",
        "top_3",
        "top_5",
        "question_first_and_last",
        "documents_twice",
        "documents_twice_question_first",
        "prompt_twice",
        "recite",
    }


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_leaves_the_model_as_it_is(name, tiny) -> None:
    choice = POLICIES[name]
    assert choice.name == name and choice.changes_prompts_alone
    for method in (choice.build(), choice.cls.example(tiny)):
        assert method.rewrites and method.rewrites_by_text
        assert method.neutral() == method and method.prefill() == Unmodified()
        assert method.folded(tiny) == CheckpointChange()
        assert (method.answer_cue != "") == (method.extra_reply_tokens > 0)
        ids = torch.tensor([[7, 8, 9]])
        before = tiny.logits(ids)
        with method.applied(tiny):
            assert torch.equal(tiny.logits(ids), before)


def test_beside_other_methods_each_part_does_its_own(tiny) -> None:
    prompt = prompt_of(["(a)", "(b)"])
    both = Composed(
        parts={"twice": Repeat(part="prompt"), "scale": ScaleChannel.example(tiny)}
    )
    assert both.rewrites and both.rewrites_by_text and both.answer_cue == ""
    assert both.rewrite(tiny, prompt) == rewritten("prompt_twice", prompt)


@pytest.mark.parametrize("form", ["official", "compact"])
def test_tasks_mark_their_question(form) -> None:
    task = KVRetrieval(
        name="kv", prompt=form, records="words", pairs=8, limit=2, calibration_pairs=8
    )
    for example in [*task.evaluation(), *task.examples("calibration")]:
        start, end = example.question
        pair = example.prompt[slice(*example.items[example.gold_position])]
        key = pair.split('"')[1]
        assert example.prompt[start:end].endswith(
            f'key "{key}"' if form == "compact" else f'Key: "{key}"'
        )
        assert start >= example.items[-1][1]


@pytest.mark.parametrize("form", ["official", "query_aware", "closed_book", "oracle"])
def test_multidoc_marks_its_last_question(form) -> None:
    file = (
        Path(__file__).parents[1]
        / "data"
        / "nq_multidoc"
        / "nq-open-20_total_documents_gold_at_0.first3.jsonl"
    )
    task = NQMultiDoc(path=str(file), prompt=form, limit=3, positions=(0,))
    for example in task.evaluation():
        start, end = example.question
        text = example.prompt[start:end]
        assert text.startswith("Question: ") and example.prompt[end:] == "\nAnswer:"
        assert example.prompt.count(text) == 1 + (form == "query_aware")
