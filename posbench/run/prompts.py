"""Encode the prompts of examples and group them into batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posbench.errors import UserError
from posbench.measure.items import item_tokens
from posbench.measure.replies import (
    BatchShape,
    encode_prompts,
    plan_batches,
    render_form,
)
from posbench.methods import Method
from posbench.model.encode import Encoded, Encoder
from posbench.model.items import ItemPrompt
from posbench.model.lm import LM, length_batches
from posbench.run.heartbeat import doing
from posbench.tasks import Example, Task
from posbench.tasks.base import first_span_outside


def item_prompt(example: Example) -> ItemPrompt:
    """Return the prompt of an example as a method sees it that rewrites prompts."""
    return ItemPrompt(
        example.prompt,
        example.items,
        example.question,
        example.orders,
        render_form(example),
    )


def rewrite_examples(
    encoder: Encoder, task: Task, examples: Sequence[Example], method: Method
) -> list[Example]:
    """Return examples as a method asks them: with another prompt, and the same answers.

    Args:
        encoder: The model, or the tokenizer of a served one.
        task: The task that asks them.
        examples: The examples.
        method: The method.

    Raises:
        UserError: The task cuts long documents, and the method moves the parts that would be cut; or it scores choices,
            and the method asks for more than an answer.
    """
    rewritten = []
    for example in examples:
        if example.document:
            allowed = (
                "a method that leaves prompts as they are: this task cuts its documents"
            )
            raise UserError(
                "method", method.short_name(), allowed, "choose another task"
            )
        if example.choices and method.answer_cue:
            allowed = (
                "a method that asks for an answer alone: this task scores given choices"
            )
            raise UserError(
                "method", method.short_name(), allowed, "choose another task"
            )
        prompt = method.rewrite(encoder, item_prompt(example))
        need_item_prompt(method, prompt, example)
        if len(prompt.items) != len(example.items):
            allowed = f"{len(example.items)} items, as before"
            hint = "correct the method: every item keeps its number"
            raise UserError("method.rewrite", len(prompt.items), allowed, hint)
        asked = replace(
            example,
            prompt=prompt.text,
            items=prompt.items,
            question=prompt.question,
            original=example,
        )
        if method.extra_reply_tokens:
            tokens = example.max_new_tokens or task.max_new_tokens
            tokens += method.extra_reply_tokens
            asked = replace(asked, max_new_tokens=tokens)
        if method.answer_cue:
            # The reply begins with something else than its answer, so that no beginning of an answer fits.
            asked = replace(asked, answer_cue=method.answer_cue, prefill="")
        rewritten.append(asked)
    return rewritten


def need_item_prompt(method: Method, prompt: ItemPrompt, example: Example) -> None:
    """Refuse what a method's ``rewrite`` returned where it is no prompt, or one whose items are not in its text."""
    value: object = ""
    if not isinstance(prompt, ItemPrompt):
        value = type(prompt).__name__
        allowed = f"an {ItemPrompt.__name__}"
    elif not prompt.text.strip():
        allowed = "a prompt with text"
    elif outside := first_span_outside(prompt.items, prompt.text):
        value = outside
        allowed = f"spans of items in its text of {len(prompt.text)} characters"
    else:
        return
    hint = f"correct rewrite() of {type(method).__name__} (example {example.id})"
    raise UserError("method.rewrite", value, allowed, hint)


@dataclass(frozen=True)
class PromptBatcher:
    """Encodes prompts and groups them into batches of a size that the runtime sets.

    Attributes:
        encoder: Encodes prompts.
        task: The task whose prompts they are.
        batch_size: Prompts of a batch at most.
        batch_tokens: Tokens of a batch at most, padding and reply counted; None: no limit.
        reads_items: Whether a method reads the positions of the items of a prompt.
    """

    encoder: Encoder
    task: Task
    batch_size: int
    batch_tokens: int | None
    reads_items: bool = False

    @property
    def rope_boundary(self) -> int | None:
        """See :attr:`LM.rope_boundary`; None for a model behind a server."""
        return self.encoder.rope_boundary if isinstance(self.encoder, LM) else None

    def encode(
        self, examples: Sequence[Example], task: Task | None = None
    ) -> dict[str, Encoded]:
        """Return the prompts of examples as tokens, by id.

        Args:
            examples: The examples.
            task: The task that asks them; None: the run's.
        """
        task = task or self.task
        with doing(f"tokenising {len(examples):,} prompts"):
            prompts = encode_prompts(self.encoder, task, examples)
        encoded = {e.id: prompt for e, prompt in zip(examples, prompts, strict=True)}
        if self.reads_items and isinstance(self.encoder, LM):
            for example in examples:
                prompt = encoded[example.id]
                self.encoder.items.add(prompt.ids, item_tokens(prompt, example))
        return encoded

    def rewrite(self, examples: Sequence[Example], method: Method) -> list[Example]:
        """Return the examples as a method asks them; see :func:`rewrite_examples`."""
        with doing(f"rewriting {len(examples):,} prompts for {method.short_name()}"):
            return rewrite_examples(self.encoder, self.task, examples, method)

    def batches(
        self,
        examples: Sequence[Example],
        encoded: Mapping[str, Encoded],
        task: Task | None = None,
        shape: BatchShape | None = None,
    ) -> list[list[Example]]:
        """Group examples into batches with room for replies; see :func:`posbench.measure.replies.plan_batches`.

        Args:
            examples: The examples.
            encoded: Their prompts, by id.
            task: The task that asks them; None: the run's.
            shape: Space that each prompt takes in a batch; None: a row. Without a limit of its own the runtime's
                applies.
        """
        shape = shape or BatchShape()
        shape = shape._replace(max_tokens=shape.max_tokens or self.batch_tokens)
        return plan_batches(
            task or self.task,
            examples,
            encoded,
            self.batch_size,
            shape,
            self.rope_boundary,
        )

    def batches_by_length(
        self,
        items: Sequence[Any],
        length: Callable[[Any], int],
        max_tokens: int | None = None,
    ) -> list[list[Any]]:
        """Group items of any kind into batches, the longest first.

        Args:
            items: The items.
            length: Number of tokens of an item.
            max_tokens: Tokens of a batch at most; None: the runtime's limit.
        """
        lengths = [length(item) for item in items]
        tokens = max_tokens or self.batch_tokens
        groups = length_batches(lengths, self.batch_size, tokens, self.rope_boundary)
        return [[items[index] for index in group] for group in groups]
