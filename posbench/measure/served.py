"""What a served model replies to an example."""

from __future__ import annotations

from typing import Any

from posbench.errors import UserError
from posbench.measure.replies import encode_longest
from posbench.model.encode import Encoded, Encoder, cut_at_stop
from posbench.model.endpoint import Endpoint
from posbench.model.load import ModelConfig
from posbench.tasks import Example, Task


def check_server(model: ModelConfig, task: Task, encoder: Encoder) -> tuple[str, ...]:
    """Check that a server can do a task, and tell what it does otherwise than a model in process.

    Returns:
        Differences in words; none for a model in process.

    Raises:
        UserError: It has no way to do what the task asks, or the longest prompt does not fit the window.
    """
    if not model.base_url:
        return ()
    if task.repetition_penalty != 1:
        allowed = "1.0: the API of a server has no repetition penalty"
        hint = "set task.repetition_penalty=1"
        raise UserError(
            "task.repetition_penalty", task.repetition_penalty, allowed, hint
        )
    examples = task.evaluation()
    is_chat = model.api == "chat"
    if is_chat and any(example.prefill for example in examples):
        allowed = f"completions: {task.name} begins the reply, which messages cannot do alike on all servers"
        raise UserError("model.api", model.api, allowed, "set model.api=completions")
    encode_longest(encoder, task)

    differences = []
    without_template = not all(example.chat for example in examples)
    if not (is_chat or model.path or without_template):
        differences.append(
            "prompts are sent as plain text; for a chat template set "
            "model.path=DIR_OR_HUB_ID (the tokenizer), or model.api=chat"
        )
    if is_chat and without_template:
        differences.append(
            f"{task.name} asks without a chat template, model.api=chat adds one"
        )
    if any(example.min_new_tokens for example in examples):
        differences.append(
            f"{task.name} asks for a token at least, and a server may reply nothing"
        )
    return tuple(differences)


def ask_server(
    endpoint: Endpoint, encoder: Encoder, task: Task, example: Example, encoded: Encoded
) -> dict[str, Any]:
    """Ask a server for the reply to an example.

    Args:
        endpoint: The server.
        encoder: Tokenizer of the served model.
        task: The example's task.
        example: What to reply to.
        encoded: Its prompt as tokens.

    Returns:
        ``output``, and what the server says of it, where it does: tokens as it counts (``prompt_tokens``,
        ``reply_tokens``), why the reply ended (``finish``), its model (``server``); of a choice which way it was
        read (``by``), with ``loglikelihoods`` (nats); and a ``note`` where the model did not get to read the
        prompt.
    """
    prompt = endpoint.prompt(encoder, encoded, example.system)
    if example.choices:
        response = endpoint.choose(prompt, example.choices)
        output = response.text
    else:
        max_new_tokens = example.max_new_tokens or task.max_new_tokens
        response = endpoint.generate(prompt, max_new_tokens, example.stop)
        output = cut_at_stop(response.text, example.stop)
    facts = {
        "loglikelihoods": list(response.nats),
        "by": response.by,
        "finish": response.finish,
        "prompt_tokens": response.prompt_tokens,
        "reply_tokens": response.reply_tokens,
        "server": response.server,
        "note": response.note,
    }
    stated = {name: value for name, value in facts.items() if value not in ("", [])}
    return {"output": output, **stated}
