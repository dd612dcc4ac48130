"""Request the reply to an example from a backend, and check beforehand that the backend can serve the task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from posbench.backends.base import Backend
from posbench.backends.served import Endpoint, RequestError
from posbench.errors import UserError
from posbench.files.sources import cached_path, weight_files
from posbench.measure.outcomes import decide_outcome, holds_answer
from posbench.measure.replies import encode_longest, split_quote
from posbench.model.answers import Reply
from posbench.model.encode import Encoded, Encoder, cut_at_stop
from posbench.model.lm import LM
from posbench.model.load import SERVER_KEYS, ModelConfig, load
from posbench.tasks import Example, Task
from posbench.tasks.items import evenly_spaced

COMPARED_PROMPTS = 3
"""Prompts on which a server is compared with its checkpoint."""
COMPARED_TOKENS = 40
"""Tokens of the replies that are compared."""
COMPARED_CHARACTERS = 1000
"""Most characters of a compared prompt."""
MAX_COMPARED_BYTES = 2_000_000_000
"""Size of the weights files up to which they are loaded for the comparison."""
SHOWN_CHARACTERS = 120


def check_server(
    model: ModelConfig, task: Task, examples: Sequence[Example], encoder: Encoder
) -> tuple[str, ...]:
    """Check that a server can do a task, and list how it differs from a model in process.

    Args:
        model: The served model.
        task: The task.
        examples: Its examples as they are asked.
        encoder: Makes the prompts.

    Returns:
        Differences in words; none for a model in process.

    Raises:
        UserError: The server cannot do the task, or the longest prompt does not fit its window.
    """
    if model.in_process:
        return ()
    if task.repetition_penalty != 1:
        allowed = "1.0: the API of a server has no repetition penalty"
        hint = "set task.repetition_penalty=1"
        raise UserError(
            "task.repetition_penalty", task.repetition_penalty, allowed, hint
        )
    is_chat = model.api == "chat"
    if is_chat and any(example.prefill for example in examples):
        allowed = f"completions: {task.name} begins the reply, which messages cannot do alike on all servers"
        raise UserError("model.api", model.api, allowed, "set model.api=completions")
    encode_longest(encoder, task, examples)

    differences = []
    without_template = not all(example.chat for example in examples)
    if model.base_url and not (is_chat or model.path or without_template):
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


def compare_with_checkpoint(
    endpoint: Endpoint, encoder: Encoder, model: ModelConfig, task: Task
) -> str:
    """Compare a server's replies to a few truncated prompts with its checkpoint's replies in process.

    A truncated prompt makes the model continue the text: a long reply, which shows sampling penalties best.

    Args:
        endpoint: The server.
        encoder: Tokenizer of the served model.
        model: Its config; ``path`` names the checkpoint.
        task: The task whose prompts are asked.

    Returns:
        One line: the result, or the reason why there is none.
    """
    if not model.path:
        return (
            "server: its decoding could not be compared with that of a checkpoint: "
            "model.path=DIR_OR_HUB_ID names one"
        )
    if endpoint.profile.thinking:
        return (
            "server: its decoding could not be compared with that in process: the model thinks, "
            "and a server keeps thinking apart"
        )
    try:
        lm = _load_reference(model)
        pairs = [
            _reply_to_beginning(endpoint, encoder, lm, example)
            for example in evenly_spaced(task.evaluation(), COMPARED_PROMPTS)
        ]
    except (UserError, RequestError) as error:
        return (
            f"server: its decoding could not be compared with that in process: {error}"
        )
    differing = [pair for pair in pairs if pair[0] != pair[1]]
    if not differing:
        return f"server: {len(pairs)} of {len(pairs)} replies are those of {model.path} in process"
    served, in_process = differing[0]
    return (
        f"server: {len(differing)} of {len(pairs)} replies differ from those of {model.path} in process: "
        f"{served[:SHOWN_CHARACTERS]!r}, in process {in_process[:SHOWN_CHARACTERS]!r}; where the server holds "
        "other weights, such as a fix, that is expected; else check its default decoding settings, chat "
        "template and precision"
    )


def _reply_to_beginning(
    endpoint: Endpoint, encoder: Encoder, lm: LM, example: Example
) -> tuple[str, str]:
    """Return the replies of a server and of its checkpoint in process to the beginning of an example's prompt.

    Args:
        endpoint: The server.
        encoder: Encodes as the server's tokenizer does.
        lm: The checkpoint.
        example: The example.

    Returns:
        The server's reply (or why it refuses the prompt), and that of the checkpoint.

    Raises:
        RequestError: The server gave no reply.
        UserError: The window is too small.
    """
    length = min(len(example.prompt) // 2, COMPARED_CHARACTERS)
    form: dict[str, Any] = {
        "truncation": "middle",
        "reserve": COMPARED_TOKENS,
        "chat": example.chat,
        "system": example.system,
    }
    beginning = example.prompt[:length].rstrip()
    (in_process,) = lm.generate(
        [lm.encode(beginning, **form).ids], max_new_tokens=COMPARED_TOKENS
    )
    prompt = endpoint.prompt(encoder, encoder.encode(beginning, **form), example.system)
    reply = endpoint.generate(prompt, COMPARED_TOKENS)
    return (reply.rejection or reply.text).strip(), in_process.strip()


def _load_reference(model: ModelConfig) -> LM:
    """Load the checkpoint of a served model in this process, on the CPU: the server may need the whole GPU.

    Raises:
        UserError: It is not on this machine, too large to load just for a comparison, or cannot be loaded.
    """
    defaults = {
        key.name: key.default for key in fields(ModelConfig) if key.name in SERVER_KEYS
    }
    local_model = replace(model, base_url=None, **defaults)  # type: ignore[arg-type]
    folder = cached_path(local_model.checkpoint)
    files = [folder / name for name in weight_files(folder)] if folder else []
    if not files or not all(file.is_file() for file in files):
        hint = "posbench fetch gets those of the hub"
        raise UserError("model.path", model.path, "weights on this machine", hint)
    size = sum(file.stat().st_size for file in files)
    if size > MAX_COMPARED_BYTES:
        allowed = f"weights of at most {MAX_COMPARED_BYTES / 1e9:.0f} GB, these have {size / 1e9:.0f} GB"
        hint = "make a run in process, too, and posbench compare RUN RUN"
        raise UserError("model.path", model.path, allowed, hint)
    return load(local_model, device="cpu")


def ask(
    backend: Backend,
    encoder: Encoder,
    task: Task,
    example: Example,
    encoded: Encoded,
    prompt_arrived: Callable[[Reply], bool] = lambda reply: True,
) -> dict[str, Any]:
    """Ask a backend for the reply to an example.

    Args:
        backend: The backend.
        encoder: Makes the prompts.
        task: The example's task.
        example: The example to reply to.
        encoded: Its prompt as tokens.
        prompt_arrived: Judges by a reply's token counts whether the model read the whole prompt.

    Returns:
        ``output`` and ``outcome`` (:data:`posbench.stats.outcomes.Outcome`), with the ``reason`` where it is no answer;
        and, where the server reports them, its token counts (``prompt_tokens``, ``reply_tokens``), why the reply ended
        (``finish``), the thinking before it (``thinking``, ``thinking_tokens``), whether it ended while thinking
        (``is_thinking``), the ``quote`` that a method asked for before the answer, and the model (``server``). For
        choices also how they were read (``by``), their ``loglikelihoods`` (nats) and, if there were several requests,
        their number (``requests``).
    """
    prompt = backend.prompt(encoder, encoded, example.system)
    quote = ""
    if example.choices:
        response = backend.choose(prompt, example.choices)
        output = answer = response.text
    else:
        max_new_tokens = example.max_new_tokens or task.max_new_tokens
        response = backend.generate(prompt, max_new_tokens, example.generation_stop)
        quote, answer = split_quote(response.text, example)
        output = cut_at_stop(answer, example.stop)
    facts = {
        "loglikelihoods": list(response.nats),
        "by": response.by,
        "finish": response.finish,
        "quote": quote,
        "thinking": response.thinking,
        "thinking_tokens": response.thinking_tokens,
        "is_thinking": response.is_thinking,
        "prompt_tokens": response.prompt_tokens,
        "reply_tokens": response.reply_tokens,
        "cached_tokens": response.cached_tokens or None,
        "requests": response.requests if response.requests > 1 else None,
        "server": response.server,
    }
    # Facts that the server did not report are left out of the row.
    unsaid: tuple[Any, ...] = ("", [], None, False)
    stated = {name: value for name, value in facts.items() if value not in unsaid}
    reply = {"output": output, **stated}
    decision = decide_outcome(
        answer,
        response.finish,
        holds_answer=holds_answer(task, example, reply),
        is_thinking=response.is_thinking,
        ended_itself=response.ended_itself,
        rejection=response.rejection,
        obstacle=response.obstacle,
        prompt_arrived=prompt_arrived(response),
    )
    return {**reply, **decision.fields}
