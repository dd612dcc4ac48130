"""Prompts as searches and evaluations give them to a model."""

from dataclasses import replace

import pytest

import posbench
from posbench.measure.replies import encode_prompt, encode_with_answer
from posbench.tasks import Example
from posbench.tasks.kv_retrieval import KVRetrieval

EXAMPLE = Example(id="e", prompt="bal bap bel", answers=("bep",), gold_position=None)


@pytest.mark.parametrize("chat", [True, False])
def test_a_search_reads_the_prompt_that_an_evaluation_asks(chat: bool) -> None:
    """The answer's loss is taken after the same tokens, whether a chat template surrounds them or not."""
    lm = posbench.load("tiny", chat_template="auto")
    lm.need_tokenizer().chat_template = (
        "{% for m in messages %}nal {{ m['content'] }} nap {% endfor %}"
    )
    task = KVRetrieval(pairs=4, records="words", prompt="compact", chat=chat)
    for example in [*task.examples("calibration")[:2], replace(EXAMPLE, chat=chat)]:
        asked = encode_prompt(lm, task, example)
        prompt_ids, answer_ids = encode_with_answer(lm, example)
        assert prompt_ids == asked.ids
        assert asked.text.startswith("nal ") == chat
        answer = lm.need_tokenizer().decode(answer_ids).strip()
        assert answer == example.answers[0]
