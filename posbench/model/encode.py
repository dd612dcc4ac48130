"""A prompt as tokens: chat template, truncation, and which characters each token covers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from jinja2 import TemplateError

from posbench import paths
from posbench.errors import UserError
from posbench.late import PreTrainedTokenizerBase
from posbench.schema import Truncation

log = logging.getLogger(__name__)

CHAT_TEMPLATES = {
    file.stem: file
    for file in sorted((paths.PACKAGE / "model" / "templates").glob("*.jinja"))
}
"""Templates that checkpoints were trained with and do not carry, by their name in ``model.chat_template``."""

WORDS_AT_ONCE = 250
"""Words that ``truncation=words`` removes in one step, as L-Eval does."""

Parts = list[tuple[str, int]]
"""The parts of a prompt, each with its place in the task's prompt, -1 where it has none."""


@dataclass(frozen=True)
class Encoded:
    """One prompt as tokens."""

    ids: list[int]  # token ids, special tokens included
    # per token, the (start, end) characters of the *task's* prompt it covers; (0, 0) if added
    offsets: list[tuple[int, int]]
    text: str  # what the tokens spell, as rendered for the model
    dropped: int = 0  # tokens of the prompt that were removed to fit
    prompt: str = ""  # what is left of the task's prompt, before any chat template


class Encoder:
    """The part of an :class:`posbench.model.lm.LM` that makes tokens."""

    tokenizer: PreTrainedTokenizerBase | None
    name: str
    context_window: int
    chat_template: str

    def need_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; raises UserError where there is none."""
        if self.tokenizer is None:
            raise UserError(
                "tokenizer",
                None,
                "a tokenizer",
                "pass posbench.load(model, tokenizer=...)",
            )
        return self.tokenizer

    def render(
        self, prompt: str, *, chat: bool = True, system: str = "", prefill: str = ""
    ) -> str:
        """The text the model reads: the prompt, in the chat template if there is one to use, and ``prefill``.

        Without a template the system message stands in front of the prompt, with an empty line between.
        """
        return self._render(prompt, chat, system)[0] + prefill

    def _render(self, prompt: str, chat: bool, system: str) -> tuple[str, bool]:
        """The text, and whether a chat template made it."""
        tokenizer = self.need_tokenizer()
        joined = f"{system}\n\n{prompt}" if system else prompt
        own = CHAT_TEMPLATES.get(self.chat_template)
        if (
            not chat
            or self.chat_template == "none"
            or not (own or tokenizer.chat_template)
        ):
            return joined, False
        settings: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        if own:
            settings["chat_template"] = own.read_text().rstrip("\n")
        if system:
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": prompt},
            ]
            try:
                return str(tokenizer.apply_chat_template(messages, **settings)), True
            except TemplateError:
                # Gemma's and early Mistral templates know no system role: it goes before the question.
                log.debug("%s: the chat template takes no system message", self.name)
        try:
            return str(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": joined}], **settings
                )
            ), True
        # A template is a program of the checkpoint's: whatever it raises, it is the template that is wrong.
        except Exception as error:
            allowed = (
                f"a template that can be rendered ({type(error).__name__}: {error})"
            )
            hint = "correct the checkpoint's, or set model.chat_template=none"
            raise UserError(
                "model.chat_template", self.chat_template, allowed, hint
            ) from error

    def encode(
        self,
        prompt: str,
        *,
        truncation: Truncation = "refuse",
        reserve: int = 0,
        most: int | None = None,
        document: tuple[int, int] | None = None,
        separator: str = "",
        **form: Any,
    ) -> Encoded:
        """Tokenise a prompt, with the beginning-of-sequence token exactly once.

        Args:
            prompt: The task's prompt.
            truncation: What to do when it does not fit; see :class:`posbench.tasks.Task`.
            reserve: Tokens to keep free for the answer.
            most: Tokens of the prompt at most, special tokens counted and chat template not.
            document: Character span of the prompt that ``truncation=document`` and ``words`` shorten.
            separator: Text put where the document was cut.
            **form: See :meth:`render`.

        Raises:
            UserError: The prompt does not fit and ``truncation`` is ``refuse``, or not even shortened.
        """
        room = self.context_window - reserve
        parts = [(prompt, 0)]
        encoded = self._encode_parts(parts, form)
        bare = self._bare(prompt)
        over = max(len(encoded.ids) - room, len(bare) - (most or len(bare)))
        if over > 0 and (truncation == "refuse" or room < 1):
            hint = "shorten the task (for kv_retrieval: task.pairs), or allow it with task.truncation=middle"
            if len(encoded.ids) <= room and most:
                limit = f"at most {most} tokens before any chat template (task.max_prompt_tokens)"
                raise UserError("prompt length", len(bare), limit, hint)
            if room < 1:
                hint = f"set task.max_new_tokens to less than {self.context_window}"
            self._refuse(len(encoded.ids), room, reserve, hint)
        before = len(bare)
        cut = 0
        while over > 0:
            cut += over
            parts = self._shortened(prompt, cut, truncation, document, separator)
            # Half of what is left has to go and still it does not fit: all the rest is too long.
            if not parts or cut >= before:
                hint = "shorten the task, or take a model with a larger context window"
                self._refuse(len(encoded.ids), room, reserve, hint)
            encoded = self._encode_parts(parts, form)
            over = len(encoded.ids) - room
        left = len(self._bare("".join(part for part, _ in parts))) if cut else before
        return replace(encoded, dropped=before - left)

    def _encode_parts(self, parts: Parts, form: dict[str, Any]) -> Encoded:
        """A prompt made of parts."""
        tokenizer = self.need_tokenizer()
        prompt = "".join(part for part, _ in parts)
        text, templated = self._render(
            prompt, form.get("chat", True), form.get("system", "")
        )
        text += form.get("prefill", "")
        encoding = tokenizer(
            text,
            add_special_tokens=not templated,
            return_offsets_mapping=tokenizer.is_fast,
        )
        ids = list(encoding["input_ids"])
        pairs = encoding["offset_mapping"] if tokenizer.is_fast else [(0, 0)] * len(ids)
        start = tokenizer.bos_token_id
        if (
            templated
            and start is not None
            and ids[:1] != [start]
            and self._bare("a")[:1] == [start]
        ):
            ids = [start, *ids]
            pairs = [(0, 0), *pairs]
        moves = []
        at = text.find(prompt)
        for part, place in parts:
            moves.append((at, at + len(part), place - at if place >= 0 else None))
            at += len(part)
        offsets = []
        for first, last in pairs:
            move = next(
                (m for a, b, m in moves if a < last and first < b and last > first),
                None,
            )
            offsets.append(
                (0, 0) if move is None else (max(first + move, 0), max(last + move, 0))
            )
        return Encoded(ids, offsets, text, prompt=prompt)

    def _bare(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text without a chat template."""
        return list(
            self.need_tokenizer()(text, add_special_tokens=special)["input_ids"]
        )

    def _shortened(
        self,
        prompt: str,
        cut: int,
        truncation: Truncation,
        document: tuple[int, int] | None,
        separator: str,
    ) -> Parts:
        """The parts of a prompt that lost about ``cut`` tokens; empty where nothing is left to cut."""
        tokenizer = self.need_tokenizer()
        if truncation == "middle":
            ids = self._bare(prompt)
            half = (len(ids) - cut) // 2
            # LongBench decodes both halves and tokenises the result again; so do we, for the same text.
            halves = ids[:half], ids[len(ids) - half :]
            head, tail = (
                str(tokenizer.decode(part, skip_special_tokens=True)) for part in halves
            )
            begin = 0 if prompt.startswith(head) else -1
            end = len(prompt) - len(tail) if prompt.endswith(tail) else -1
            return [(head, begin), (tail, end)] if half > 0 else []
        first, last = document or (0, len(prompt))
        text = prompt[first:last]
        if truncation == "words":
            words = text.split(" ")
            while (
                words and len(self._bare(text)) - len(self._bare(" ".join(words))) < cut
            ):
                words = words[:-WORDS_AT_ONCE]
            kept = " ".join(words)
        else:
            ids = self._bare(text, False)
            extra = len(self._bare(separator, False)) if separator else 0
            kept = str(tokenizer.decode(ids[: max(len(ids) - cut - extra, 0)]))
        if not kept:
            return []
        return [
            (prompt[:first], 0),
            (kept, first),
            (separator, -1),
            (prompt[last:], last),
        ]

    def _refuse(self, length: int, room: int, reserve: int, hint: str) -> NoReturn:
        window = f"context window {self.context_window} of {self.name}, {reserve} kept"
        raise UserError(
            "prompt length", length, f"at most {max(room, 0)} tokens ({window})", hint
        )

    def answer_ids(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Token ids of a prompt and of the answer that follows it."""
        encoded = self.encode(prompt)
        return encoded.ids, self.continuation_ids(encoded, answer)

    def continuation_ids(self, encoded: Encoded, text: str) -> list[int]:
        """Token ids of a text that follows a prompt.

        The pair is tokenised as one text where the prompt's tokens survive that; otherwise each on its own.
        (A SentencePiece tokenizer turns " A" alone into two tokens, and after "Answer:" into one.)
        """
        head = encoded.ids
        for special in (True, False):
            both = self._bare(encoded.text + text, special)
            if both[: len(head)] == head and len(both) > len(head):
                return both[len(head) :]
        return self._bare(text, False)


def cut(reply: str, stop: Sequence[str]) -> str:
    """A reply up to the first of the stop texts."""
    for text in stop:
        reply = reply.split(text, 1)[0]
    return reply
