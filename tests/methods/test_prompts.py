"""Methods that see the prompt: token spans of its items, or another prompt in its place."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posbench.errors import UserError
from posbench.methods import Unmodified
from posbench.methods.attention_buckets import AttentionBuckets
from posbench.methods.composed import Composed
from posbench.model.items import ItemIndex, ItemPrompt, find_items, reading_items
from posbench.tasks import KVRetrieval
from tests.conftest import run_folders

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SMALL = [
    f"--config-dir={EXAMPLES}",
    "task.pairs=12",
    "task.positions=[0,5,11]",
    "task.limit=4",
    "runtime.intervene_examples=2",
    "runtime.resamples=100",
]
PAIR = r'"\w+": "\w+"'


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def task() -> KVRetrieval:
    return KVRetrieval(
        name="kv_retrieval",
        prompt="compact",
        records="words",
        pairs=12,
        positions=(0, 5, 11),
        limit=4,
        max_new_tokens=1,
    )


@given(st.permutations(range(4)))
def test_items_in_another_order_keep_their_text_and_their_number(order) -> None:
    prompt = ItemPrompt("ask: (a) (bb) (ccc) (dddd)!", find_items("", "x"))
    spans = find_items(prompt.text, r"\(\w+\)")
    prompt = ItemPrompt(prompt.text, spans)
    other = prompt.reordered(order)
    texts = [prompt.item_text(index) for index in range(4)]
    assert [other.item_text(index) for index in range(4)] == texts
    assert other.text == f"ask: {' '.join(texts[index] for index in order)}!"
    inverse = np.argsort(order).tolist()
    first_order = [order[index] for index in inverse]
    assert other.reordered(range(4)) == prompt.reordered(first_order) == prompt


@pytest.mark.parametrize("order", [(0, 0), (0,), (1, 2)])
def test_what_is_no_permutation_is_refused(order) -> None:
    with pytest.raises(ValueError, match="no permutation"):
        ItemPrompt("a b", ((0, 1), (2, 3))).reordered(order)


def test_a_prompt_is_known_by_its_tokens_up_to_the_last_item() -> None:
    index = ItemIndex()
    index.add([5, 6, 7, 8], [(0, 1), (2, 3)])
    index.add([5, 6, 9, 9, 9], [(0, 1), (3, 5)])
    assert index.find([5, 6, 7, 1, 1]) == ((0, 1), (2, 3))
    assert index.find([5, 6, 9, 9, 9]) == ((0, 1), (3, 5))
    assert index.find([5, 6]) is None and index.find([4, 6, 7, 8]) is None
    with pytest.raises(ValueError, match="outside 2 tokens"):
        index.add([1, 2], [(0, 3)])


def test_spans_are_those_of_each_row_and_stay_while_it_answers(tiny, task) -> None:
    chosen = [task.evaluation()[0], task.evaluation()[-1]]
    prompts = [chosen[0].prompt, chosen[1].prompt[:-12]]
    rows = [tiny.add_items(prompt, PAIR) for prompt in prompts]
    assert len(rows[0]) != len(rows[1])
    texts = [
        [prompt[slice(*span)] for span in find_items(prompt, PAIR)]
        for prompt in prompts
    ]
    with reading_items(tiny) as batch:
        inputs = tiny.pad(rows)
        tiny.logits(inputs["input_ids"], inputs["attention_mask"])
        spans = batch.rows
        for ids, row, items in zip(inputs["input_ids"], spans, texts, strict=True):
            decoded = [tiny.tokenizer.decode(ids[start:end]) for start, end in row]
            for text, item in zip(decoded, items, strict=True):
                # A token may also hold what stands before or behind the item.
                assert item.replace(" ", "") in text.replace(" ", "")
                assert text.count(":") <= item.count(":") + 1
        inputs.pop("position_ids")
        tiny.model.generate(**inputs, max_new_tokens=3, do_sample=False)
        assert batch.rows == spans
    with pytest.raises(UserError, match="whose items are known"), reading_items(tiny):
        tiny.logits(torch.tensor([[7, 8, 9]]))


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_even_items_is_its_formula(examples, strength) -> None:
    from even_items import EvenItems

    row = torch.rand(2, 3, 20, generator=torch.Generator().manual_seed(0))
    items = [[(0, 4), (4, 5), (9, 15)], [(2, 3), (3, 9), (16, 20)]]
    evened = EvenItems(strength=strength)._evened(row, items)
    for number, spans in enumerate(items):
        for head in range(3):
            before, after = row[number, head].numpy(), evened[number, head].numpy()
            totals = np.array([before[slice(*span)].sum() for span in spans])
            factors = (totals.mean() / totals) ** strength
            wanted = before.copy()
            for span, factor in zip(spans, factors, strict=True):
                wanted[slice(*span)] *= factor
            assert np.allclose(after, wanted, rtol=1e-5)
            if strength == 1:
                evened_totals = [after[slice(*span)].sum() for span in spans]
                assert np.allclose(evened_totals, totals.mean(), rtol=1e-5)


def test_a_run_tells_a_method_the_items(posbench, outputs, tiny, examples) -> None:
    from even_items import EvenItems

    result = posbench(
        "method=even_items", "method.strength=1", "stages=[intervene,evaluate]", *SMALL
    )
    assert result.status == 0, result.err
    (run,) = run_folders(outputs)
    rows = [json.loads(line) for line in (run / "predictions.jsonl").open()]
    replies = {row["id"]: row["output"] for row in rows if row["method"] != "none"}
    asked = KVRetrieval(
        name="kv_retrieval",
        prompt="compact",
        records="words",
        pairs=12,
        positions=(0, 5, 11),
        limit=4,
        max_new_tokens=1,
    ).evaluation()
    assert len(replies) == len(asked) == 12
    with EvenItems(strength=1.0).applied(tiny):
        for example in asked:
            (reply,) = tiny.generate(
                [tiny.add_items(example.prompt, PAIR)], max_new_tokens=1
            )
            assert replies[example.id] == reply


@pytest.mark.parametrize(
    "methods", ["even_items,scale_channel", "scale_channel,even_items"]
)
def test_a_method_that_reads_items_stands_in_a_list(methods, posbench, outputs) -> None:
    """With strength 0 it changes nothing beside a method that runs the last token apart."""
    neutral = "method.parts.even_items.strength=0"
    for overrides in ([f"method=[{methods}]", neutral], ["method=scale_channel"]):
        result = posbench(*overrides, "stages=[evaluate]", *SMALL)
        assert result.status == 0, result.err
    replies = []
    for run in run_folders(outputs):
        rows = [json.loads(line) for line in (run / "predictions.jsonl").open()]
        changed = [row for row in rows if row["method"] != "none"]
        replies.append({row["id"]: row["output"] for row in changed})
    in_list, alone = replies
    assert in_list == alone
    assert len(in_list) == 12


@pytest.mark.parametrize("order", ["reversed", "outside_in"])
def test_a_run_asks_the_rewritten_prompt(
    order, posbench, outputs, tiny, task, examples
) -> None:
    result = posbench(
        "method=reorder",
        f"method.order={order}",
        "stages=[intervene,evaluate]",
        *SMALL,
    )
    assert result.status == 0, result.err
    (run,) = run_folders(outputs)
    rows = [json.loads(line) for line in (run / "predictions.jsonl").open()]
    replies = {row["id"]: row for row in rows if row["method"] == "reorder"}
    ranks = list(range(12))
    if order == "reversed":
        ranks = ranks[::-1]
    else:
        ranks = [0, 2, 4, 6, 8, 10, 11, 9, 7, 5, 3, 1]
    for example in task.evaluation():
        texts = [example.prompt[slice(*span)] for span in example.items]
        head = example.prompt[: example.items[0][0]]
        tail = example.prompt[example.items[-1][1] :]
        prompt = head + ", ".join(texts[index] for index in ranks) + tail
        (reply,) = tiny.generate([prompt], max_new_tokens=1)
        assert replies[example.id]["output"] == reply
        assert replies[example.id]["rewritten_prompt"] == prompt
        # Tables keep the position that the task gave the gold item.
        assert replies[example.id]["gold_position"] == example.gold_position
    assert not any("rewritten_prompt" in row for row in rows if row["method"] == "none")
    shown = posbench("show", str(run), "--id", example.id, "--all", verb=True).out
    assert prompt in shown
    assert example.prompt in shown


def test_in_a_list_each_rewrites_what_the_one_before_left(tiny, examples) -> None:
    from reorder import Reorder

    prompt = ItemPrompt("a b c", ((0, 1), (2, 3), (4, 5)))
    both = Composed(parts={"one": Reorder(order="reversed"), "none": Unmodified()})
    assert both.rewrites and both.rewrite(tiny, prompt).text == "c b a"
    twice = Composed(
        parts={"one": Reorder(order="reversed"), "two": Reorder(order="reversed")}
    )
    assert twice.rewrite(tiny, prompt).text in {
        " ".join(letters) for letters in permutations("abc")
    }
    assert not Composed(parts={"none": Unmodified()}).rewrites


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["method=reorder", "study=crop_mask"], ["stages = 'study'", "reorder"]),
        (
            ["method=[reorder,scale_channel]", "search=channel", "stages=[search]"],
            ["stages = 'search'"],
        ),
    ],
)
def test_what_looks_at_the_tasks_own_prompts_is_refused(typed, words, posbench) -> None:
    result = posbench(*typed, *SMALL)
    assert result.status == 2 and len(result.err.splitlines()) == 1
    assert [word for word in words if word not in result.err] == [], result.err


def test_a_method_of_several_rows_per_prompt_reads_the_items_of_each(
    tiny, task
) -> None:
    bases = AttentionBuckets(bases=(None, 20000.0, 30000.0))
    rows = [tiny.add_items(example.prompt, PAIR) for example in task.evaluation()[:2]]
    inputs = tiny.pad(rows)
    with bases.applied(tiny), reading_items(tiny) as batch:
        tiny.logits(inputs["input_ids"], inputs["attention_mask"])
    spans = [list(tiny.items.find(row)) for row in rows]
    assert batch.rows == [spans[0]] * 3 + [spans[1]] * 3


@pytest.mark.parametrize("method", ["even_items", "reorder"])
def test_the_harness_has_no_items(method, examples) -> None:
    from posbench.cli.harness import PosbenchLM

    with pytest.raises(UserError) as error:
        PosbenchLM("tiny", method=method, config_dir=str(EXAMPLES))
    assert error.value.field == "model_args.method" and error.value.value == method
