"""Ask for a quotation first: the passage that holds the answer, word for word, and then the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from posbench.methods.prompt_change import PromptChange
from posbench.model.encode import Encoder
from posbench.model.items import ItemPrompt
from posbench.schema import Count

ANSWER_CUE = "Answer:"
INSTRUCTION = (
    "First quote, word for word, the passage above that holds the answer. "
    f'Then write the answer itself after "{ANSWER_CUE}".\n\nQuote:'
)
CUE_LINE = re.compile(r"\n[^\n]{0,40}:\s*\Z")
"""A short last line that ends with a colon, such as ``Answer:``, behind which the model would answer at once."""
MAX_CUE_CHARACTERS = 40
"""Length of the text behind a question at the end of a prompt up to which it is taken for such a cue."""


@dataclass(frozen=True, kw_only=True)
class Recite(PromptChange):
    """Ask every prompt to quote the passage with the answer before answering; the answer alone is scored.

    The answer is what a reply says after its last "Answer:"; a reply without it is scored whole. The prompt ends with
    "Quote:" in place of its last cue, so that a model without instruction tuning continues with a quotation, too.

    Args:
        quote_tokens: Tokens of a reply in addition to those that the task gives its answer.
    """

    quote_tokens: Count = 200

    @property
    def recipe(self) -> str:
        """See :attr:`PromptChange.recipe`."""
        return (
            f"recite = {INSTRUCTION!r}\n"
            f'prompt = prompt.removesuffix("{ANSWER_CUE}").rstrip() + "\\n\\n" + recite\n'
            f'answer = reply.rpartition("{ANSWER_CUE}")[2].strip()'
        )

    @property
    def extra_reply_tokens(self) -> int:
        """Those of the quotation."""
        return self.quote_tokens

    @property
    def answer_cue(self) -> str:
        """``Answer:``."""
        return ANSWER_CUE

    def rewrite(self, lm: Encoder, prompt: ItemPrompt) -> ItemPrompt:
        """The prompt with the instruction behind its question."""
        text = f"{_without_cue(prompt)}\n\n{INSTRUCTION}"
        return prompt.shifted(text, 0)


def _without_cue(prompt: ItemPrompt) -> str:
    """The text of a prompt up to the cue behind which the model would answer at once."""
    end = len(prompt.text)
    cue = CUE_LINE.search(prompt.text)
    if prompt.question and end - prompt.question[1] <= MAX_CUE_CHARACTERS:
        end = prompt.question[1]
    elif cue:
        end = cue.start()
    # No cue holds an item.
    last_item_end = max((end for _, end in prompt.items), default=0)
    return prompt.text[: max(end, last_item_end)].rstrip()
