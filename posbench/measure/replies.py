"""Encode prompts, group prompts that are decoded alike into batches, and generate replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from posbench.errors import UserError
from posbench.files.atomic import round_values
from posbench.measure.outcomes import decide_outcome, holds_answer
from posbench.model.answers import unclear_thinking
from posbench.model.encode import Encoded, Encoder, PromptTooLong, cut_at_stop
from posbench.model.lm import LM, GeneratedReply, length_batches
from posbench.model.prefix import Prefix
from posbench.model.thinking import opens_thinking, split_thinking
from posbench.stats.outcomes import ANSWERED
from posbench.tasks import Example, Task


class BatchShape(NamedTuple):
    """Size limit of a batch, and the space that a prompt takes in it.

    Attributes:
        max_tokens: Tokens of a batch at most, padding and replies counted; None: see the parameter that takes it.
        rows: Rows of the batch for each prompt, which each have a reply.
        copies: How many times the tokens of each prompt are in memory.
    """

    max_tokens: int | None = None
    rows: int = 1
    copies: int = 1


def generation_budget(encoder: Encoder, task: Task, example: Example) -> int:
    """Tokens to reserve in the context window for an example's answer."""
    tokenizer = encoder.tokenizer
    if example.choices and tokenizer:
        return max(
            len(tokenizer(choice, add_special_tokens=False)["input_ids"])
            for choice in example.choices
        )
    return example.max_new_tokens or task.max_new_tokens


def encode_prompt(encoder: Encoder, task: Task, example: Example) -> Encoded:
    """Tokenise an example's prompt so that its answer fits behind it; see :func:`encode_prompts`."""
    (encoded,) = encode_prompts(encoder, task, [example])
    return encoded


def encode_prompts(
    encoder: Encoder, task: Task, examples: Sequence[Example]
) -> list[Encoded]:
    """Tokenise the prompts of examples so that the answer of each fits behind it.

    Raises:
        UserError: A prompt does not fit, or the cut takes the gold item away.
    """
    forms = [render_form(example) for example in examples]
    whole = encoder.encode_whole([example.prompt for example in examples], forms)
    result = []
    for example, form, encoded in zip(examples, forms, whole, strict=True):
        try:
            fitting = encoder.fit(
                encoded,
                form,
                truncation=task.truncation,
                reserve=generation_budget(encoder, task, example),
                most=task.max_prompt_tokens,
                document=example.document,
                separator=example.separator,
            )
        except PromptTooLong as error:
            hint = task.how_to_shorten(example)
            raise UserError(error.field, error.value, error.allowed, hint) from error
        if fitting.dropped:
            _need_gold_items(task, example, fitting)
        result.append(fitting)
    return result


def render_form(example: Example) -> dict[str, Any]:
    """Return the arguments of :meth:`Encoder.render` for an example's prompt."""
    return {
        "chat": example.chat,
        "system": example.system,
        "prefill": example.prefill,
    }


def template_sources(encoder: Encoder, examples: Sequence[Example]) -> list[str]:
    """List the inputs of the chat template besides the prompt, found with the first prompt of each subset."""
    first_of_subset: dict[str, Example] = {}
    for example in examples:
        first_of_subset.setdefault(example.subset, example)
    sources = [
        source
        for example in first_of_subset.values()
        for source in encoder.template_sources(
            example.prompt, chat=example.chat, system=example.system
        )
    ]
    return list(dict.fromkeys(sources))


def _need_gold_items(task: Task, example: Example, encoded: Encoded) -> None:
    """Refuse a shortened prompt without its gold item: its answer would be wrong whatever the model does.

    Raises:
        UserError: That, with the gold position.
    """
    for position in example.gold_positions:
        start, end = example.items[position]
        if example.prompt[start:end].strip() in encoded.prompt:
            continue
        allowed = (
            f"a cut that leaves the gold item: of example {example.id} {encoded.dropped} tokens "
            f"are cut, and item {position} with them"
        )
        sizes = [f"task.{name}" for name in task.sizes]
        hint = f"ask with fewer items ({', '.join(sizes)})" if sizes else "shorten it"
        raise UserError("task.truncation", task.truncation, allowed, hint)


def encode_with_answer(
    encoder: Encoder, example: Example
) -> tuple[list[int], list[int]]:
    """Token ids of an example's prompt, uncut and in its form, and of the first answer after it."""
    encoded = encoder.encode(example.prompt, **render_form(example))
    return encoded.ids, encoder.continuation_ids(encoded, example.answers[0])


def encode_untruncated(encoder: Encoder, example: Example) -> Encoded:
    """Tokenise an example's prompt, however long it is."""
    unlimited: Any = replace(encoder, context_window=2**31)  # type: ignore[type-var]
    return unlimited.encode(example.prompt, **render_form(example))


def encode_longest(
    encoder: Encoder, task: Task, examples: Sequence[Example]
) -> tuple[Example, Encoded]:
    """Tokenise the example with the longest prompt in characters, to detect at once if prompts do not fit.

    Args:
        encoder: Makes the prompts.
        task: The task.
        examples: Its examples as they are asked.
    """
    longest = max(examples, key=lambda example: len(example.prompt))
    return longest, encode_prompt(encoder, task, longest)


def plan_batches(
    task: Task,
    examples: Sequence[Example],
    encoded: Mapping[str, Encoded],
    max_rows: int,
    shape: BatchShape,
    boundary: int | None = None,
) -> list[list[Example]]:
    """Put examples that are decoded alike into batches.

    Args:
        task: The examples' task.
        examples: The examples.
        encoded: Their prompts as tokens, by id.
        max_rows: Rows of a batch at most.
        shape: Space that each prompt takes in a batch, and the most tokens of a batch.
        boundary: See :func:`posbench.model.lm.length_batches`.

    Returns:
        Batches of examples, the one with the longest prompt first.
    """
    groups: dict[tuple[Any, ...], list[Example]] = {}
    for example in examples:
        decoding = (
            bool(example.choices),
            example.max_new_tokens or task.max_new_tokens,
            example.min_new_tokens,
            example.stop,
        )
        groups.setdefault(decoding, []).append(example)
    result = []
    for (has_choices, max_new_tokens, *_), members in groups.items():
        reply_tokens = 0 if has_choices else shape.rows * max_new_tokens
        lengths = [
            shape.copies * len(encoded[member.id].ids) + reply_tokens
            for member in members
        ]
        max_prompts = max(max_rows // shape.rows, 1)
        for batch in length_batches(lengths, max_prompts, shape.max_tokens, boundary):
            result.append([members[i] for i in batch])
    return sorted(result, key=lambda batch: -len(encoded[batch[0].id].ids))


def reply_to_batch(
    lm: LM,
    task: Task,
    batch: Sequence[Example],
    encoded: Mapping[str, Encoded],
    prefix: Prefix | None = None,
) -> list[dict[str, Any]]:
    """Reply to a batch of examples that are decoded alike.

    Args:
        lm: The model.
        task: The examples' task.
        batch: The examples; all of them have choices, or none.
        encoded: Their prompts as tokens, by id.
        prefix: Cache with all tokens of these prompts but the last.

    Returns:
        For each example its ``output`` and ``outcome`` (:data:`posbench.stats.outcomes.Outcome`), with the ``reason``
        where it is no answer; why it ended (``finish``, see :class:`posbench.model.lm.GeneratedReply`), with the
        ``thinking`` before it, whether it ended while thinking (``is_thinking``), and the ``quote`` that a method asked
        for before the answer; or, where it has choices, their ``loglikelihoods`` (nats).
    """
    prompts = [encoded[example.id].ids for example in batch]
    first = batch[0]
    if first.choices:
        return _choices(lm, prompts, batch, encoded, prefix)
    replies = lm.generate_replies(
        prompts,
        max_new_tokens=first.max_new_tokens or task.max_new_tokens,
        min_new_tokens=first.min_new_tokens,
        stop=first.generation_stop,
        repetition_penalty=task.repetition_penalty,
        batch_size=len(batch),
        prefix=prefix,
    )
    return [
        _row_of_reply(task, example, reply, encoded[example.id])
        for reply, example in zip(replies, batch, strict=True)
    ]


class QuotedReply(NamedTuple):
    """A reply to a prompt that asks for a quotation first: all text up to its answer, and the answer."""

    quote: str
    answer: str


def split_quote(text: str, example: Example) -> QuotedReply:
    """Split a reply behind the last answer cue of its example; without a cue, all of it is the answer.

    Args:
        text: The reply without its thinking.
        example: The example as it was asked.
    """
    if not example.answer_cue or example.answer_cue not in text:
        return QuotedReply("", text)
    before, cue, answer = text.rpartition(example.answer_cue)
    return QuotedReply(before + cue, cut_at_stop(answer, example.stop))


def _row_of_reply(
    task: Task, example: Example, reply: GeneratedReply, prompt: Encoded
) -> dict[str, Any]:
    """Return the fields of a reply in a row: thinking is separate, and not scored."""
    split = split_thinking(reply.text, opens_thinking(prompt.text))
    parts = split_quote(split.answer, example)
    row: dict[str, Any] = {"output": parts.answer, "finish": reply.finish}
    if parts.quote:
        row["quote"] = parts.quote
    if split.thinking:
        row["thinking"] = split.thinking
    if split.is_open:
        row["is_thinking"] = True
    decision = decide_outcome(
        parts.answer,
        reply.finish,
        holds_answer=holds_answer(task, example, row),
        is_thinking=split.is_open,
        ended_itself=True,
        obstacle=unclear_thinking(split),
    )
    return {**row, **decision.fields}


def _choices(
    lm: LM,
    prompts: Sequence[list[int]],
    batch: Sequence[Example],
    encoded: Mapping[str, Encoded],
    prefix: Prefix | None,
) -> list[dict[str, Any]]:
    """The most likely choice of each example of a batch; see :func:`reply_to_batch`."""
    choice_tokens = [
        [lm.continuation_ids(encoded[example.id], choice) for choice in example.choices]
        for example in batch
    ]
    scored = lm.continuations(
        prompts, choice_tokens, batch_size=len(batch), prefix=prefix
    )
    result = []
    for example, choices in zip(batch, scored, strict=True):
        nats = [total for total, _ in choices]
        best = example.choices[nats.index(max(nats))]
        row = {"output": best.strip(), "loglikelihoods": round_values(nats, 8)}
        result.append({**row, "outcome": ANSWERED})
    return result
