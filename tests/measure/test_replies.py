"""Prompts as searches and evaluations give them to a model."""

from dataclasses import replace

import pytest

import posbench
from posbench.measure.replies import (
    encode_prompt,
    encode_prompts,
    encode_with_answer,
)
from posbench.model import encode
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


def test_prompts_encoded_together_are_those_encoded_alone(tiny, monkeypatch):
    monkeypatch.setattr(encode, "PROMPTS_AT_ONCE", 3)
    monkeypatch.setattr(tiny, "chat_template", "vicuna")
    task = KVRetrieval(records="words", prompt="compact", pairs=8, limit=4)
    examples = [
        replace(example, chat=number % 3 > 0, prefill='"' if number % 2 else "")
        for number, example in enumerate(task.examples("evaluation"))
    ]
    assert len(examples) > 2 * encode.PROMPTS_AT_ONCE
    together = encode_prompts(tiny, task, examples)
    assert len({tuple(prompt.ids) for prompt in together}) == len(examples)
    for example, encoded in zip(examples, together, strict=True):
        # Characters are looked for only once somebody reads them.
        assert "offsets" not in vars(encoded)
        form = {"chat": example.chat, "prefill": example.prefill}
        assert encoded == tiny.encode(example.prompt, **form)
        text = tiny.render(example.prompt, **form)
        assert encoded.text == text
        covered = "".join(example.prompt[a:b] for a, b in encoded.offsets)
        assert covered.replace(" ", "") == example.prompt.replace(" ", "")
        own = tiny.tokenizer(text, add_special_tokens=not example.chat)["input_ids"]
        assert encoded.ids[-len(own) :] == own and len(encoded.ids) - len(own) <= 1
