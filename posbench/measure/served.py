"""What a served model replies to an example."""

from __future__ import annotations

from typing import Any

from posbench.errors import UserError
from posbench.measure.replies import encode_longest
from posbench.model.encode import Encoded, Encoder, cut
from posbench.model.endpoint import Endpoint
from posbench.model.load import ModelConfig
from posbench.tasks import Example, Task


def check(model: ModelConfig, task: Task, encoder: Encoder) -> tuple[str, ...]:
    """What a server does otherwise than a model in process, in words; nothing for one in process.

    Raises:
        UserError: It has no way to do what the task asks, or the longest prompt does not fit the window.
    """
    if not model.base_url:
        return ()
    if task.repetition_penalty != 1:
        allowed = "1.0: the API of a server has no such setting"
        hint = "set task.repetition_penalty=1"
        raise UserError(
            "task.repetition_penalty", task.repetition_penalty, allowed, hint
        )
    examples = task.evaluation()
    chat = model.api == "chat"
    if chat and any(e.prefill for e in examples):
        allowed = f"completions: {task.name} begins the reply, which messages cannot do alike on all servers"
        raise UserError("model.api", model.api, allowed, "set model.api=completions")
    encode_longest(encoder, task)
    template = "for a chat template set model.path=DIR_OR_HUB_ID (the tokenizer), or model.api=chat"
    bare = not all(e.chat for e in examples)
    least = any(e.min_new_tokens for e in examples)
    said = {
        f"prompts are sent as plain text; {template}": not (chat or model.path or bare),
        f"{task.name} asks without a chat template, model.api=chat adds one": chat
        and bare,
        f"{task.name} asks for a token at least, and a server may reply nothing": least,
    }
    return tuple(words for words, holds in said.items() if holds)


def reply(
    endpoint: Endpoint, encoder: Encoder, task: Task, e: Example, encoded: Encoded
) -> dict[str, Any]:
    """``output`` of an example, and what the server tells of it: tokens as it counts, why the reply ended
    (``finish``), its model; of a choice ``by`` which way it was read, with ``loglikelihoods`` (nats); and a
    ``note`` where the model did not get to read the prompt."""
    prompt = endpoint.prompt(encoder, encoded, e.system)
    if e.choices:
        found = endpoint.choose(prompt, e.choices)
    else:
        found = endpoint.generate(
            prompt, e.max_new_tokens or task.max_new_tokens, e.stop
        )
    facts = {
        "output": found.text if e.choices else cut(found.text, e.stop),
        "loglikelihoods": list(found.nats),
        "by": found.by,
        "finish": found.finish,
        "prompt_tokens": found.prompt_tokens,
        "reply_tokens": found.reply_tokens,
        "server": found.server,
        "note": found.note,
    }
    return {
        name: value
        for name, value in facts.items()
        if name == "output" or value not in ("", [])
    }
