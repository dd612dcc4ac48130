"""A prompt as tokens: chat template, truncation, and which characters each token covers."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError

from posbench import paths
from posbench.errors import UserError
from posbench.late import PreTrainedTokenizerBase, transformers
from posbench.model.hooks import replace_attribute
from posbench.schema import Truncation

log = logging.getLogger(__name__)

CHAT_TEMPLATES = {
    file.stem: file
    for file in sorted((paths.PACKAGE / "model" / "templates").glob("*.jinja"))
}
"""Templates that checkpoints were trained with and do not carry, by their name in ``model.chat_template``."""
MOMENTS = (datetime(2001, 2, 3, 4, 5, 6), datetime(2032, 11, 28, 17, 46, 59))
"""Two moments of different year, month, day, weekday, hour, minute and second."""
TEMPLATE_SEEDS = 16
"""Seeds of random numbers after which a template is rendered: a choice of two differs with 1 - 2^-15."""

WORDS_PER_CUT = 250
"""Words that ``truncation=words`` removes in one step, as L-Eval does."""

PROMPTS_AT_ONCE = 64
"""Prompts in one call of a tokenizer, whose output takes far more memory than their token ids."""

NO_CHARACTERS = (0, 0)
"""The span of a token that covers nothing of the task's prompt."""


class Piece(NamedTuple):
    """A piece of a truncated prompt, and the character of the task's prompt at which it starts.

    ``start`` is None for text that is not from there.
    """

    text: str
    start: int | None


class _Shift(NamedTuple):
    """Offset from characters ``start`` to ``end`` of a rendered text to the characters of the task's prompt."""

    start: int
    end: int
    offset: int | None


PROMPT_LENGTH = "prompt length"
"""Key of the error for a prompt that does not fit."""


class PromptTooLong(UserError):
    """A prompt that would fit if it were shorter."""


@dataclass(frozen=True)
class Encoded:
    """One prompt as tokens.

    Attributes:
        ids: Token ids, special tokens included.
        text: The rendered text that the tokens encode.
        dropped: Tokens of the prompt that were removed to fit.
        prompt: The task's prompt after truncation, before any chat template.
        find_offsets: Finds the :attr:`offsets`, which few methods read.
    """

    ids: list[int]
    text: str
    dropped: int = 0
    prompt: str = ""
    find_offsets: Callable[[], list[tuple[int, int]]] = field(
        default=list, repr=False, compare=False
    )

    @cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """For each token, the (start, end) characters of the *task's* prompt it covers; (0, 0) if added."""
        return self.find_offsets()


@contextmanager
def _clock_at(moment: datetime) -> Iterator[None]:
    """Fix the time that chat templates print (``strftime_now`` of transformers) for a block."""

    class Clock(datetime):
        """The standard library's class, whose now is fixed."""

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return moment

    templates = transformers.utils.chat_template_utils
    with replace_attribute(templates, "datetime", Clock):
        yield


class Encoder:
    """The part of an :class:`posbench.model.lm.LM` that makes tokens."""

    tokenizer: PreTrainedTokenizerBase | None
    name: str
    context_window: int
    chat_template: str

    def need_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; raises UserError where there is none."""
        if self.tokenizer is None:
            hint = "pass posbench.load(model, tokenizer=...)"
            raise UserError("tokenizer", None, "a tokenizer", hint)
        return self.tokenizer

    def render(
        self, prompt: str, *, chat: bool = True, system: str = "", prefill: str = ""
    ) -> str:
        """Return the text the model reads: the prompt, in the chat template if there is one to use, and ``prefill``.

        Without a template the system message comes before the prompt, with an empty line between.

        Args:
            prompt: The task's prompt.
            chat: Whether it may be put into the chat template.
            system: System message.
            prefill: Beginning of the reply.
        """
        text, _ = self._render(prompt, chat, system)
        return text + prefill

    @property
    def has_template(self) -> bool:
        """Whether a chat template surrounds the prompts that allow one."""
        if self.chat_template in CHAT_TEMPLATES:
            return True
        return self.chat_template != "none" and bool(
            self.need_tokenizer().chat_template
        )

    def template_sources(
        self, prompt: str, *, chat: bool = True, system: str = ""
    ) -> list[str]:
        """List the chat template's inputs besides its messages: ``the clock``, ``random numbers``; often none.

        The prompt is rendered at two moments that share no part of their date and time, and after several seeds.

        Args:
            prompt: A prompt of the task.
            chat: See :meth:`render`.
            system: The system message.
        """
        if not chat or not self.has_template:
            return []

        def text(moment: datetime, seed: int) -> str:
            random.seed(seed)
            with _clock_at(moment):
                return self._render(prompt, chat, system)[0]

        state = random.getstate()
        try:
            sources = []
            if len({text(moment, 0) for moment in MOMENTS}) > 1:
                sources.append("the clock")
            if len({text(MOMENTS[0], seed) for seed in range(TEMPLATE_SEEDS)}) > 1:
                sources.append("random numbers")
        finally:
            random.setstate(state)
        return sources

    def _render(self, prompt: str, chat: bool, system: str) -> tuple[str, bool]:
        """Return the text that the model reads, and whether a chat template made it.

        Args:
            prompt: The prompt.
            chat: Whether the task's prompts may be put into a chat template.
            system: System message; without a template, or with one that ignores it, it goes before the prompt.

        Raises:
            UserError: The template cannot be rendered, or leaves out the prompt.
        """
        tokenizer = self.need_tokenizer()
        joined = f"{system}\n\n{prompt}" if system else prompt
        if not chat or not self.has_template:
            return joined, False
        settings: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        template_file = CHAT_TEMPLATES.get(self.chat_template)
        if template_file is not None:
            settings["chat_template"] = template_file.read_text("utf-8").rstrip("\n")
        if system:
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": prompt},
            ]
            text = ""
            with suppress(TemplateError):
                text = str(tokenizer.apply_chat_template(messages, **settings))
            if system.strip() in text:
                self._need_shown(prompt, text)
                return text, True
            # Gemma's and early Mistral templates know no system role: it goes before the question.
            log.debug("%s: the chat template takes no system message", self.name)
        messages = [{"role": "user", "content": joined}]
        try:
            text = str(tokenizer.apply_chat_template(messages, **settings))
        # A template is a program of the checkpoint's: whatever it raises, it is the template that is wrong.
        except Exception as error:
            allowed = (
                f"a template that can be rendered ({type(error).__name__}: {error})"
            )
            hint = "correct the checkpoint's, or set model.chat_template=none"
            raise UserError(
                "model.chat_template", self.chat_template, allowed, hint
            ) from error
        self._need_shown(joined, text)
        return text, True

    def _need_shown(self, prompt: str, text: str) -> None:
        """Refuse a chat template that shows no line of a prompt, as those for messages in parts do.

        Args:
            prompt: The prompt.
            text: What the template made of it.

        Raises:
            UserError: The template does.
        """
        lines = [line.strip().lower() for line in prompt.splitlines() if line.strip()]
        text = text.lower()
        if lines and not any(line in text for line in lines):
            allowed = "a template that shows the text of a message"
            hint = "correct the checkpoint's, or set model.chat_template=none"
            raise UserError("model.chat_template", self.chat_template, allowed, hint)

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
            truncation: How to shorten a prompt that does not fit; see :class:`posbench.tasks.Task`.
            reserve: Tokens to keep free for the answer.
            most: Tokens of the prompt at most, special tokens counted and chat template not.
            document: Character span of the prompt that ``truncation=document`` and ``words`` shorten.
            separator: Text put where the document was cut.
            **form: See :meth:`render`.

        Returns:
            The token ids, the prompt as the model reads it, and the number of tokens cut (``dropped``).

        Raises:
            UserError: The prompt does not fit, and may not be cut or does not fit even then.
        """
        (encoded,) = self.encode_whole([prompt], [form])
        return self.fit(
            encoded,
            form,
            truncation=truncation,
            reserve=reserve,
            most=most,
            document=document,
            separator=separator,
        )

    def encode_whole(
        self, prompts: Sequence[str], forms: Sequence[Mapping[str, Any]]
    ) -> list[Encoded]:
        """Tokenise prompts, however long they are; many at once take less time than one by one.

        Args:
            prompts: The task's prompts.
            forms: The form of each, see :meth:`render`.
        """
        pieces = [[Piece(prompt, 0)] for prompt in prompts]
        encoded: list[Encoded] = []
        for start in range(0, len(prompts), PROMPTS_AT_ONCE):
            chunk = slice(start, start + PROMPTS_AT_ONCE)
            encoded += self._encode_pieces(pieces[chunk], forms[chunk])
        return encoded

    def fit(
        self,
        encoded: Encoded,
        form: Mapping[str, Any],
        *,
        truncation: Truncation = "refuse",
        reserve: int = 0,
        most: int | None = None,
        document: tuple[int, int] | None = None,
        separator: str = "",
    ) -> Encoded:
        """Return a whole prompt unchanged if it fits, else shortened.

        Args:
            encoded: The whole prompt.
            form: How it was rendered: arguments of :meth:`render`.
            truncation: As all that follow: see :meth:`encode`, also for the errors.
            reserve: Tokens to keep free for the answer.
            most: Tokens of the prompt at most.
            document: Character span that may be shortened.
            separator: Text put where the document was cut.
        """
        max_tokens = self.context_window - reserve
        prompt = encoded.prompt
        excess = len(encoded.ids) - max_tokens
        if excess <= 0 and not most:
            return encoded
        prompt_tokens = len(self._token_ids(prompt))
        if most:
            excess = max(excess, prompt_tokens - most)
        if excess <= 0:
            return encoded

        # It does not fit and may not be cut, or no prompt at all would fit.
        if truncation == "refuse" or max_tokens < 1:
            hint = "shorten the prompts, or cut them with task.truncation=middle"
            if len(encoded.ids) <= max_tokens and most:
                limit = f"at most {most} tokens before any chat template (task.max_prompt_tokens)"
                raise PromptTooLong(PROMPT_LENGTH, prompt_tokens, limit, hint)
            if max_tokens < 1:
                hint = f"set task.max_new_tokens to less than {self.context_window}"
            self._refuse_length(len(encoded.ids), max_tokens, reserve, hint)
        removed = 0
        # Cutting text does not remove exactly as many tokens, so it is repeated.
        while excess > 0:
            removed += excess
            pieces = self._shorten(prompt, removed, truncation, document, separator)
            if not pieces or removed >= prompt_tokens:
                hint = (
                    "shorten the prompts, or use a model with a larger context window"
                )
                self._refuse_length(len(encoded.ids), max_tokens, reserve, hint)
            (encoded,) = self._encode_pieces([pieces], [form])
            excess = len(encoded.ids) - max_tokens
        dropped = prompt_tokens - len(self._token_ids(encoded.prompt))
        return replace(encoded, dropped=dropped)

    def _encode_pieces(
        self, prompts: Sequence[list[Piece]], forms: Sequence[Mapping[str, Any]]
    ) -> list[Encoded]:
        """Encode several prompts in as few calls of the tokenizer as possible.

        Args:
            prompts: The pieces whose texts make up each prompt.
            forms: Arguments of :meth:`render` for each.

        Returns:
            Text and token ids of each; offsets are computed when they are first asked for.
        """
        tokenizer = self.need_tokenizer()
        texts = []
        # Whether a chat template wrote the special tokens of each.
        templated = []
        for pieces, form in zip(prompts, forms, strict=True):
            prompt = "".join(piece.text for piece in pieces)
            text, has_template = self._render(
                prompt, form.get("chat", True), form.get("system", "")
            )
            texts.append(text + form.get("prefill", ""))
            templated.append(has_template)
        ids_of_texts: dict[int, list[int]] = {}
        for has_template in set(templated):
            members = [i for i, value in enumerate(templated) if value == has_template]
            encoding = tokenizer(
                [texts[i] for i in members], add_special_tokens=not has_template
            )
            ids_of_texts.update(zip(members, encoding["input_ids"], strict=True))

        bos = tokenizer.bos_token_id
        # A template may leave out the first token that the tokenizer would add.
        begins_with_bos = any(templated) and self._token_ids("a")[:1] == [bos]
        encoded = []
        for index, (text, pieces) in enumerate(zip(texts, prompts, strict=True)):
            ids = self._without_end(list(ids_of_texts[index]), text)
            length = len(ids)
            lacks_bos = templated[index] and bos is not None and ids[:1] != [bos]
            if lacks_bos and begins_with_bos:
                ids = [bos, *ids]
            find_offsets = partial(
                self._offsets, text, pieces, templated[index], length, len(ids) - length
            )
            prompt = "".join(piece.text for piece in pieces)
            encoded.append(Encoded(ids, text, prompt=prompt, find_offsets=find_offsets))
        return encoded

    def _offsets(
        self,
        text: str,
        pieces: Sequence[Piece],
        has_template: bool,
        length: int,
        num_added: int,
    ) -> list[tuple[int, int]]:
        """Return the characters of the task's prompt that each token covers.

        Args:
            text: The rendered text: the prompt, shortened perhaps, as the chat template holds it.
            pieces: The pieces of the prompt in it, and where each begins in the task's prompt.
            has_template: Whether a chat template made the text.
            length: Number of tokens of the text.
            num_added: Number of tokens put before the text.

        Returns:
            First character and end for each token; an empty span for tokens of no character of the prompt.
        """
        tokenizer = self.need_tokenizer()
        spans = [NO_CHARACTERS] * length
        # Others do not say which characters a token covers.
        if tokenizer.is_fast:
            encoding = tokenizer(
                text, add_special_tokens=not has_template, return_offsets_mapping=True
            )
            spans = encoding["offset_mapping"][:length]
        spans = [NO_CHARACTERS] * num_added + spans
        start, (first, last) = _place_of("".join(piece.text for piece in pieces), text)
        # How far each piece lies from its place in the task's prompt.
        shifts = []
        for piece in pieces:
            offset = None if piece.start is None else piece.start - start
            end = start + len(piece.text)
            shifts.append(_Shift(max(start, first), min(end, last), offset))
            start = end
        return [_shift_span(span, shifts) for span in spans]

    def _token_ids(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text without a chat template."""
        encoding = self.need_tokenizer()(text, add_special_tokens=special)
        return self._without_end(list(encoding["input_ids"]), text)

    def _without_end(self, ids: list[int], text: str) -> list[int]:
        """Return token ids without the end-of-sequence token that some tokenizers add, as a reply follows.

        One that the text itself ends with stays.
        """
        tokenizer = self.need_tokenizer()
        end = tokenizer.eos_token_id
        if not ids or end is None or ids[-1] != end:
            return ids
        is_written = text.rstrip().endswith(str(tokenizer.eos_token))
        return ids if is_written or len(ids) == 1 else ids[:-1]

    def _shorten(
        self,
        prompt: str,
        removed: int,
        truncation: Truncation,
        document: tuple[int, int] | None,
        separator: str,
    ) -> list[Piece]:
        """Return the pieces of a prompt shortened by about ``removed`` tokens; empty if nothing is left to cut.

        A piece is a text and where it begins in the prompt.

        Args:
            prompt: The prompt.
            removed: Number of tokens.
            truncation: ``middle`` cuts the middle of the prompt; others cut the document, by words or at its end.
            document: Where it begins and ends in the prompt, in characters; None: not marked.
            separator: Text that replaces what was cut.
        """
        if truncation == "middle":
            return self._cut_middle(prompt, removed)
        if document is None:
            # The end of a prompt without a document is its question.
            allowed = "refuse or middle: the prompts of this task mark no document"
            hint = "shorten the prompts, or set task.truncation=middle"
            raise UserError("task.truncation", truncation, allowed, hint)
        start, end = document
        if truncation == "words":
            kept_text = self._cut_words(prompt[start:end], removed)
        else:
            kept_text = self._cut_end(prompt[start:end], removed, separator)
        if not kept_text:
            return []
        return [
            Piece(prompt[:start], 0),
            Piece(kept_text, start),
            Piece(separator, None),
            Piece(prompt[end:], end),
        ]

    def _cut_middle(self, prompt: str, removed: int) -> list[Piece]:
        """Return the first and the last tokens of a prompt, ``removed`` fewer, as two pieces; empty if none are left.

        LongBench decodes both halves and tokenises the result again; so do we, for the same text.
        """
        tokenizer = self.need_tokenizer()
        ids = self._token_ids(prompt)
        half = (len(ids) - removed) // 2
        if half <= 0:
            return []
        head = str(tokenizer.decode(ids[:half], skip_special_tokens=True))
        tail = str(tokenizer.decode(ids[len(ids) - half :], skip_special_tokens=True))
        tail_start = len(prompt) - len(tail)
        return [
            Piece(head, 0 if prompt.startswith(head) else None),
            Piece(tail, tail_start if prompt.endswith(tail) else None),
        ]

    def _cut_words(self, text: str, removed: int) -> str:
        """Return a text without its last words, cut in steps of the same size as in L-Eval."""
        words = text.split(" ")
        num_tokens = len(self._token_ids(text))
        while words and num_tokens - len(self._token_ids(" ".join(words))) < removed:
            words = words[:-WORDS_PER_CUT]
        return " ".join(words)

    def _cut_end(self, text: str, removed: int, separator: str) -> str:
        """Return a text without its last tokens, and shortened further by the separator's length."""
        ids = self._token_ids(text, False)
        if separator:
            removed += len(self._token_ids(separator, False))
        return str(self.need_tokenizer().decode(ids[: max(len(ids) - removed, 0)]))

    def _refuse_length(
        self, length: int, max_tokens: int, reserve: int, hint: str
    ) -> NoReturn:
        window = f"context window {self.context_window} of {self.name}, {reserve} kept for the reply"
        allowed = f"at most {max(max_tokens, 0)} tokens ({window})"
        error = PromptTooLong if max_tokens > 0 else UserError
        raise error(PROMPT_LENGTH, length, allowed, hint)

    def answer_ids(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Token ids of a prompt and of the answer that follows it."""
        encoded = self.encode(prompt)
        return encoded.ids, self.continuation_ids(encoded, answer)

    def continuation_ids(self, encoded: Encoded, text: str) -> list[int]:
        """Return the token ids of a text that follows a prompt.

        The pair is tokenised as one text where the prompt's tokens stay the same in it; otherwise the text alone.
        (A SentencePiece tokenizer turns " A" alone into two tokens, and after "Answer:" into one.)

        Args:
            encoded: The prompt, as text and token ids.
            text: What follows, such as an answer.
        """
        prompt_ids = encoded.ids
        # Depending on whether a chat template wrote the special tokens or the tokenizer adds them.
        for special in (True, False):
            pair_ids = self._token_ids(encoded.text + text, special)
            begins_with_prompt = pair_ids[: len(prompt_ids)] == prompt_ids
            if begins_with_prompt and len(pair_ids) > len(prompt_ids):
                return pair_ids[len(prompt_ids) :]
        return self._token_ids(text, False)


def _place_of(prompt: str, text: str) -> tuple[int, tuple[int, int]]:
    """Find a prompt in the text that a chat template made of it; some templates strip the prompt.

    Args:
        prompt: The prompt.
        text: The rendered text.

    Returns:
        Where its first character is, or would be unstripped, and the span of the text that it covers; an empty span if
        the template changed it in another way.
    """
    start = text.find(prompt)
    if start >= 0:
        return start, (start, start + len(prompt))
    stripped = prompt.strip()
    first = text.find(stripped)
    if first < 0 or not stripped:
        return 0, NO_CHARACTERS
    start = first - (len(prompt) - len(prompt.lstrip()))
    return start, (first, first + len(stripped))


def _shift_span(span: tuple[int, int], shifts: Sequence[_Shift]) -> tuple[int, int]:
    """Return a token's characters in the task's prompt, from its characters in the rendered text.

    Args:
        span: Start and end in the rendered text.
        shifts: Spans of the rendered text, and how far each lies from its place in the prompt; None: not in it.

    Returns:
        Start and end in the prompt; an empty span for a token outside.
    """
    first, last = span
    for start, end, offset in shifts:
        if start < last and first < end and last > first:
            if offset is None:
                break
            return max(first + offset, 0), max(last + offset, 0)
    return NO_CHARACTERS


def cut_at_stop(reply: str, stop: Sequence[str]) -> str:
    """A reply up to the first of the stop texts."""
    for text in stop:
        reply = reply.split(text, 1)[0]
    return reply
