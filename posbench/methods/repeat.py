"""Policies that say a part of the prompt twice: the question, the documents, or all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from posbench.errors import UserError
from posbench.methods.prompt_change import PromptChange
from posbench.model.encode import Encoder
from posbench.model.items import ItemPrompt
from posbench.model.lm import LM

EMPTY_LINE = "\n\n"
Repeated = Literal["question", "documents", "documents_and_question", "prompt"]
DOCUMENTS_TWICE = "documents = documents + documents"
RECIPES: Mapping[Repeated, str] = {
    "question": 'prompt = f"{question}\\n\\n{prompt}"  # it also ends with the question',
    "documents": DOCUMENTS_TWICE,
    "documents_and_question": (
        f'{DOCUMENTS_TWICE}\nprompt = f"{{question}}\\n\\n{{prompt}}"  # with the documents twice'
    ),
    "prompt": 'prompt = f"{prompt}\\n\\n{prompt}"',
}


@dataclass(frozen=True, kw_only=True)
class Repeat(PromptChange):
    """Say a part of every prompt twice, so that all that follows the second time can look back at the first.

    Args:
        part: ``question``: also before the prompt. ``documents``: all items again after the last one, separated as
            they are from each other. ``documents_and_question``: both of these. ``prompt``: the whole prompt again,
            after an empty line.

    Spans of items and question are those of the last copy.
    """

    part: Repeated

    @property
    def recipe(self) -> str:
        """See :attr:`PromptChange.recipe`."""
        return RECIPES[self.part]

    @classmethod
    def example(cls, lm: LM) -> Self:
        """The whole prompt."""
        return cls(part="prompt")

    def rewrite(self, lm: Encoder, prompt: ItemPrompt) -> ItemPrompt:
        """The prompt with that part twice."""
        match self.part:
            case "prompt":
                return _prompt_twice(prompt)
            case "documents":
                return _documents_twice(prompt)
            case "question":
                return _question_first(prompt)
            case "documents_and_question":
                return _question_first(_documents_twice(prompt))


def _prompt_twice(prompt: ItemPrompt) -> ItemPrompt:
    first = prompt.text + EMPTY_LINE
    return prompt.shifted(first + prompt.text, len(first))


def _documents_twice(prompt: ItemPrompt) -> ItemPrompt:
    """The prompt with its items, in the order in which they stand, and then again."""
    places = [prompt.items[index] for index in prompt.shown_items]
    if not places:
        return prompt
    start, end = places[0][0], places[-1][1]
    separator = EMPTY_LINE
    if len(places) > 1:
        separator = prompt.text[places[-2][1] : places[-1][0]]
    again = prompt.text[start:end] + separator
    text = prompt.text[:start] + again + prompt.text[start:]
    question = prompt.question
    twice = prompt.shifted(text, len(again))
    if question and question[1] <= start:
        return replace(twice, question=question)
    return twice


def _question_first(prompt: ItemPrompt) -> ItemPrompt:
    first = question_of(prompt) + EMPTY_LINE
    return prompt.shifted(first + prompt.text, len(first))


def question_of(prompt: ItemPrompt) -> str:
    """The question of a prompt: where it is not marked, what follows the last item.

    Raises:
        UserError: Nothing does, or there is no item.
    """
    if prompt.question:
        start, end = prompt.question
        return prompt.text[start:end]
    shown = prompt.shown_items
    question = prompt.text[prompt.items[shown[-1]][1] :].strip() if shown else ""
    if not question:
        allowed = "a prompt whose question is marked, or follows its items"
        hint = "choose another method or task; docs/own_data.md says how to mark a question"
        raise UserError("method", "a prompt without a question", allowed, hint)
    return question
