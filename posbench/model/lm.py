"""A causal language model with its tokenizer: load, encode, generate, score, and read attention rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.integrations.sdpa_attention import repeat_kv

from posbench import paths
from posbench.errors import UserError
from posbench.model import families
from posbench.model.hooks import attending, fork, replaced
from posbench.tasks.base import Truncation

log = logging.getLogger(__name__)

CHAT_TEMPLATES = {file.stem: file for file in sorted((paths.PACKAGE / "model" / "templates").glob("*.jinja"))}
"""Templates that checkpoints were trained with and do not carry themselves, by the name that
``model.chat_template`` takes."""

WORDS_AT_ONCE = 250
"""Words that ``truncation=words`` removes in one step, as L-Eval does."""


@dataclass(frozen=True)
class Encoded:
    """One prompt as tokens.

    Attributes:
        ids: Token ids, special tokens included.
        offsets: Per token, the (start, end) characters of the *task's* prompt it covers; (0, 0) for added
            tokens.
        text: What the tokens spell, as rendered for the model.
        dropped: Tokens of the prompt that were removed to fit.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
    text: str
    dropped: int = 0


@dataclass
class LM:
    """A causal LM ready for posbench.

    Attributes:
        model: The Hugging Face model, in eval mode.
        tokenizer: Its tokenizer; None allows token-level calls only.
        name: Short name.
        context_window: Tokens the model reads.
        chat_template: See :class:`ModelConfig`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    context_window: int
    chat_template: str = "auto"

    @property
    def device(self) -> torch.device:
        """Device of the embedding, where inputs go."""
        embedding = self.model.get_input_embeddings()
        # accelerate keeps an offloaded weight on "meta" and brings it to the execution device for each call.
        hook = getattr(embedding, "_hf_hook", None) if embedding.weight.is_meta else None
        return torch.device(hook.execution_device) if hook else embedding.weight.device

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return int(families.text_config(self.model).num_hidden_layers)

    def render(self, prompt: str, *, chat: bool = True, system: str = "", prefill: str = "") -> str:
        """The text the model reads: the prompt, inside the chat template where the rule asks for it, and
        ``prefill``.

        Without a template the system message stands in front of the prompt, with an empty line between.
        """
        return self._render(prompt, chat, system)[0] + prefill

    def _render(self, prompt: str, chat: bool, system: str) -> tuple[str, bool]:
        """The text, and whether a chat template made it."""
        tokenizer, joined = self.need_tokenizer(), f"{system}\n\n{prompt}" if system else prompt
        own = CHAT_TEMPLATES.get(self.chat_template)
        if not chat or self.chat_template == "none" or not (own or tokenizer.chat_template):
            return joined, False
        settings: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        if own:
            settings["chat_template"] = own.read_text().rstrip("\n")
        if system:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
            try:
                return str(tokenizer.apply_chat_template(messages, **settings)), True
            except TemplateError:
                # Gemma and early Mistral templates know no system role; their authors put it in front of the
                # question.
                log.debug("%s: the chat template takes no system message", self.name)
        return str(tokenizer.apply_chat_template([{"role": "user", "content": joined}], **settings)), True

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
        """Tokenise a prompt once, the beginning-of-sequence token exactly once.

        Args:
            prompt: The task's prompt.
            truncation: What to do when it does not fit; see :class:`posbench.tasks.Task`.
            reserve: Tokens to keep free for the answer.
            most: Tokens of the prompt, special tokens counted and chat template not; None: as many as the
                window takes.
            document: Character span of the prompt that ``truncation=document`` and ``words`` shorten.
            separator: Text put where the document was cut.
            **form: See :meth:`render`.

        Raises:
            UserError: The prompt does not fit and ``truncation`` is ``refuse``, or not even shortened.
        """
        room, parts = self.context_window - reserve, [(prompt, 0)]
        ids, offsets, text = self._encode_parts(parts, form)
        bare = self._bare(prompt)
        over = max(len(ids) - room, len(bare) - (most or len(bare)))
        if over > 0 and (truncation == "refuse" or room < 1):
            hint = "shorten the task (for kv_retrieval: task.pairs), or allow it with task.truncation=middle"
            if len(ids) <= room and most:
                limit = f"at most {most} tokens before any chat template (task.max_prompt_tokens)"
                raise UserError("prompt length", len(bare), limit, hint)
            self._refuse(len(ids), room, reserve, hint)
        before, cut = len(bare), 0
        while over > 0:
            cut += over
            parts = self._shortened(prompt, cut, truncation, document, separator)
            # Half of what is left has to go and still it does not fit: template and question alone are too
            # long.
            if not parts or cut >= before:
                self._refuse(
                    len(ids), room, reserve, "shorten the task, or take a model with a larger context window"
                )
            ids, offsets, text = self._encode_parts(parts, form)
            over = len(ids) - room
        return Encoded(
            ids, offsets, text, before - len(self._bare("".join(part for part, _ in parts))) if cut else 0
        )

    def _encode_parts(
        self, parts: list[tuple[str, int]], form: dict[str, Any]
    ) -> tuple[list[int], list[tuple[int, int]], str]:
        """Ids, offsets and rendered text of a prompt made of parts, each with its place in the task's prompt
        (-1: none)."""
        tokenizer, prompt = self.need_tokenizer(), "".join(part for part, _ in parts)
        text, templated = self._render(prompt, form.get("chat", True), form.get("system", ""))
        text += form.get("prefill", "")
        encoding = tokenizer(text, add_special_tokens=not templated, return_offsets_mapping=tokenizer.is_fast)
        ids = list(encoding["input_ids"])
        pairs = encoding["offset_mapping"] if tokenizer.is_fast else [(0, 0)] * len(ids)
        start = tokenizer.bos_token_id
        if templated and start is not None and ids[:1] != [start] and self._bare("a")[:1] == [start]:
            ids, pairs = [start, *ids], [(0, 0), *pairs]
        moves, at = [], text.find(prompt)
        for part, place in parts:
            moves.append((at, at + len(part), place - at if place >= 0 else None))
            at += len(part)
        offsets = []
        for first, last in pairs:
            move = next((m for a, b, m in moves if a < last and first < b and last > first), None)
            offsets.append((0, 0) if move is None else (max(first + move, 0), max(last + move, 0)))
        return ids, offsets, text

    def _bare(self, text: str) -> list[int]:
        return list(self.need_tokenizer()(text)["input_ids"])

    def _shortened(
        self, prompt: str, cut: int, truncation: Truncation, document: tuple[int, int] | None, separator: str
    ) -> list[tuple[str, int]]:
        """The parts of a prompt that lost about ``cut`` tokens; empty where nothing is left to cut."""
        tokenizer = self.need_tokenizer()
        if truncation == "middle":
            ids = self._bare(prompt)
            half = (len(ids) - cut) // 2
            # LongBench decodes both halves and tokenises the result again; so do we, for the same text.
            head, tail = (
                str(tokenizer.decode(part, skip_special_tokens=True))
                for part in (ids[:half], ids[len(ids) - half :])
            )
            places = (
                0 if prompt.startswith(head) else -1,
                len(prompt) - len(tail) if prompt.endswith(tail) else -1,
            )
            return [(head, places[0]), (tail, places[1])] if half > 0 else []
        first, last = document or (0, len(prompt))
        text = prompt[first:last]
        if truncation == "words":
            words = text.split(" ")
            while words and len(self._bare(text)) - len(self._bare(" ".join(words))) < cut:
                words = words[:-WORDS_AT_ONCE]
            kept = " ".join(words)
        else:
            ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            extra = len(tokenizer(separator, add_special_tokens=False)["input_ids"]) if separator else 0
            kept = str(tokenizer.decode(ids[: max(len(ids) - cut - extra, 0)]))
        if not kept:
            return []
        return [(prompt[:first], 0), (kept, first), (separator, -1), (prompt[last:], last)]

    def _refuse(self, length: int, room: int, reserve: int, hint: str) -> NoReturn:
        window = f"context window {self.context_window} of {self.name}, {reserve} kept"
        raise UserError("prompt length", length, f"at most {max(room, 0)} tokens ({window})", hint)

    def pad(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Left-pad token rows to one batch: ``input_ids``, ``attention_mask`` and ``position_ids``, each [B,
        T]."""
        width = max(len(row) for row in rows)
        fill = self._pad_id()
        ids = torch.tensor([[fill] * (width - len(row)) + list(row) for row in rows], device=self.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.device)
        # A bare forward counts positions from the first column, padding included; generate() counts from the
        # mask.
        return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}

    @torch.inference_mode()
    def generate(
        self,
        rows: Sequence[Sequence[int]] | Sequence[str],
        *,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        stop: Sequence[str] = (),
        repetition_penalty: float = 1.0,
        batch_size: int = 8,
    ) -> list[str]:
        """Greedy continuations, from these settings alone (the checkpoint's generation config is not
        consulted).

        Args:
            rows: Prompts as token ids or as text.
            max_new_tokens: Tokens to generate at most.
            min_new_tokens: Tokens before which neither the end of sequence nor a stop text of one token may
                come.
            stop: Texts that end a reply and are cut off. One that is a single token ends it as that token, as
                in LongBench.
            repetition_penalty: See :class:`posbench.tasks.Task`.
            batch_size: Rows per batch; see :func:`batches`.

        Returns:
            The generated text per prompt, in input order.
        """
        if isinstance(rows, str):
            raise TypeError("generate takes a list of prompts, got one text: pass [text]")
        tokenizer = self.need_tokenizer()
        encoded = [self.encode(row).ids if isinstance(row, str) else list(row) for row in rows]
        ends = self.model.generation_config.eos_token_id or tokenizer.eos_token_id
        last = {text: tokenizer(text, add_special_tokens=False)["input_ids"][-1:] for text in stop}
        single = {text: ids[0] for text, ids in last.items() if ids and tokenizer.decode(ids) == text}
        texts_of_several = [text for text in stop if text not in single]
        settings = GenerationConfig(
            do_sample=False,
            num_beams=1,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens or None,
            eos_token_id=[
                *(ends if isinstance(ends, list) else [] if ends is None else [ends]),
                *single.values(),
            ]
            or None,
            pad_token_id=self._pad_id(),
            repetition_penalty=repetition_penalty if repetition_penalty != 1 else None,
        )
        replies = [""] * len(encoded)
        for batch in batches([len(row) for row in encoded], batch_size):
            for index, reply in zip(
                batch,
                self._generate_batch([encoded[i] for i in batch], settings, texts_of_several),
                strict=True,
            ):
                for text in texts_of_several:
                    reply = reply.split(text, 1)[0]
                for text in single:
                    reply = reply.removesuffix(text)
                replies[index] = reply
        return replies

    def _generate_batch(
        self, rows: list[list[int]], settings: GenerationConfig, stop: Sequence[str]
    ) -> list[str]:
        tokenizer, inputs = self.need_tokenizer(), self.pad(rows)
        inputs.pop("position_ids")
        width = inputs["input_ids"].shape[1]

        def said(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            replies = tokenizer.batch_decode(ids[:, width:])
            return torch.tensor([any(text in reply for text in stop) for reply in replies], device=ids.device)

        # The library's own stop_strings fails on tokenizers that do not spell every text.
        criteria = StoppingCriteriaList([said] if stop else [])
        with replaced(self.model, "generation_config", settings):
            out = self.model.generate(**inputs, stopping_criteria=criteria)
        new = out[:, width:]
        return [str(text) for text in tokenizer.batch_decode(new, skip_special_tokens=True)]

    @torch.inference_mode()
    def logits(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Next-token logits of every row, [B, T, V], for token ids [B, T] and an optional left-padding mask
        [B, T]."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return self.model(input_ids=input_ids, attention_mask=mask, position_ids=positions).logits

    def answer_ids(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Token ids of a prompt and of the answer that follows it."""
        encoded = self.encode(prompt)
        return encoded.ids, self.continuation_ids(encoded, answer)

    def continuation_ids(self, encoded: Encoded, text: str) -> list[int]:
        """Token ids of a text that follows a prompt.

        The pair is tokenised as one text where the prompt's tokens survive that; otherwise each on its own.
        (A SentencePiece tokenizer turns " A" alone into two tokens, and after "Answer:" into one.)
        """
        tokenizer, head = self.need_tokenizer(), encoded.ids
        for special in (True, False):
            both = list(tokenizer(encoded.text + text, add_special_tokens=special)["input_ids"])
            if both[: len(head)] == head and len(both) > len(head):
                return both[len(head) :]
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def continuations(
        self,
        prompts: Sequence[Sequence[int]],
        choices: Sequence[Sequence[Sequence[int]]],
        *,
        batch_size: int = 8,
    ) -> list[list[tuple[float, bool]]]:
        """Log-likelihood of every choice after its prompt; a prompt runs once for all its choices.

        Args:
            prompts: Token ids, N rows.
            choices: Per prompt, the token ids of each continuation, none empty.
            batch_size: Prompts per batch.

        Returns:
            Per prompt and choice: total log-likelihood in nats, and whether greedy decoding would produce the
            choice.
        """
        found: list[list[tuple[float, bool]]] = [[] for _ in prompts]
        for batch in batches([len(row) for row in prompts], batch_size):
            inputs = self.pad([prompts[i] for i in batch])
            out = self.model(**inputs, use_cache=True, logits_to_keep=1)
            first = out.logits[:, -1:].float()
            for number in range(max(len(choices[i]) for i in batch)):
                rows = [list(choices[i][number]) if number < len(choices[i]) else [0] for i in batch]
                width = max(map(len, rows))
                targets = torch.tensor(
                    [row + [-100] * (width - len(row)) for row in rows], device=self.device
                )
                logits = first
                if width > 1:
                    given = targets[:, :-1]
                    steps = torch.arange(1, width, device=self.device)
                    later = self.model(
                        input_ids=given.clamp(min=0),
                        attention_mask=torch.cat([inputs["attention_mask"], (given >= 0).long()], dim=1),
                        position_ids=inputs["position_ids"][:, -1:] + steps,
                        past_key_values=fork(out.past_key_values),
                    ).logits
                    logits = torch.cat([first, later.float()], dim=1)
                nats = (
                    F.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=-100)
                    .double()
                    .sum(1)
                )
                greedy = ((logits.argmax(-1) == targets) | (targets < 0)).all(1)
                for row, i in enumerate(batch):
                    if number < len(choices[i]):
                        found[i].append((-float(nats[row]), bool(greedy[row])))
        return found

    @torch.inference_mode()
    def answer_loss(self, prompts: Sequence[str], answers: Sequence[str], *, batch_size: int = 8) -> Tensor:
        """Mean cross-entropy (nats per token) of each answer after its prompt, [N].

        The prompt runs first and the answer is fed on its cache, so that a method that treats the last prompt
        token apart (scale_channel) sees the same sequence of calls as in generation.
        """
        pairs = [self.answer_ids(p, a) for p, a in zip(prompts, answers, strict=True)]
        losses = torch.zeros(len(pairs))
        for batch in batches([len(prompt) for prompt, _ in pairs], batch_size):
            inputs, targets = self.pad_with_answers([pairs[i] for i in batch])
            start = inputs["input_ids"].shape[1] - targets.shape[1] + 1
            mask = inputs.pop("attention_mask")
            prompt = {name: value[:, :start] for name, value in inputs.items()}
            answer = {name: value[:, start:] for name, value in inputs.items()}
            out = self.model(**prompt, attention_mask=mask[:, :start], use_cache=True, logits_to_keep=1)
            logits = [out.logits[:, -1:]]
            if targets.shape[1] > 1:
                logits.append(
                    self.model(**answer, attention_mask=mask, past_key_values=out.past_key_values).logits
                )
            losses[list(batch)] = self.answer_nats(torch.cat(logits, dim=1), targets).cpu()
        return losses

    def pad_with_answers(
        self, pairs: Sequence[tuple[list[int], list[int]]]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Prompts padded on the left and their answers, but for the last token, padded on the right.

        Args:
            pairs: Prompt and answer token ids, B of them; answers of at most A tokens.

        Returns:
            The forward's inputs, each [B, T + A - 1], and the answer tokens [B, A], -100 where an answer has
            ended.
        """
        inputs, width = self.pad([prompt for prompt, _ in pairs]), max(len(answer) for _, answer in pairs)
        fill = [answer + [-100] * (width - len(answer)) for _, answer in pairs]
        targets = torch.tensor(fill, device=self.device)
        given = targets[:, :-1]
        steps = torch.arange(1, width, device=self.device)
        return {
            "input_ids": torch.cat([inputs["input_ids"], given.where(given >= 0, self._pad_id())], dim=1),
            "attention_mask": torch.cat([inputs["attention_mask"], (given >= 0).long()], dim=1),
            "position_ids": torch.cat(
                [inputs["position_ids"], inputs["position_ids"][:, -1:] + steps], dim=1
            ),
        }, targets

    def answer_nats(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy per answer token, [B], from the logits [B, A, V] that predict the answer tokens
        [B, A]."""
        nats = F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none", ignore_index=-100)
        return nats.sum(1) / (targets >= 0).sum(1)

    @contextmanager
    def last_attention(self) -> Iterator[dict[int, Tensor]]:
        """Collect the attention weights of the last token in each forward inside the block.

        Yields:
            Dict layer -> weights [B, H, T] of the latest forward (post-softmax, float32 or better). A
            sliding-window layer that no longer holds all keys gives the newest T' < T. Memory is linear in T
            where the family allows it. Under attention_buckets there are B * N rows, those of the N bases
            next to each other.
        """
        weights: dict[int, Tensor] = {}
        if families.family_of(self.model).interface:
            with self._listening(weights):
                yield weights
            return

        def read(layer: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: tuple[Any, ...]) -> None:
                weights[layer] = output[1][:, :, -1]

            return hook

        with ExitStack() as stack:
            stack.enter_context(self.eager())
            for layer, module in enumerate(families.attention_modules(self.model)):
                stack.callback(module.register_forward_hook(read(layer)).remove)
            yield weights

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Make families outside the library's attention functions compute, and return, all attention weights
        themselves."""

        def without_bias(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return args, kwargs | {"alibi": torch.zeros_like(kwargs["alibi"])}

        config, twice = self.model.config, families.family_of(self.model).mask_has_bias
        with ExitStack() as stack:
            if twice and config.alibi and config._attn_implementation != "eager":
                for module in families.attention_modules(self.model):
                    stack.callback(module.register_forward_pre_hook(without_bias, with_kwargs=True).remove)
            stack.enter_context(replaced(config, "_attn_implementation_internal", "eager"))
            yield

    @contextmanager
    def _listening(self, weights: dict[int, Tensor]) -> Iterator[None]:
        """Compute the last row once more in front of the kernel in use."""

        def attend(
            module: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Tensor | None,
            following: Any,
            **rest: Any,
        ) -> Any:
            weights[module.layer_idx] = last_row(query, key, mask, **rest)
            return following(module, query, key, value, mask, **rest)

        with attending(self.model, attend):
            yield

    def need_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            UserError: There is none.
        """
        if self.tokenizer is None:
            raise UserError("tokenizer", None, "a tokenizer", "pass posbench.load(model, tokenizer=...)")
        return self.tokenizer

    def _pad_id(self) -> int:
        if self.tokenizer is not None and self.tokenizer.pad_token_id is not None:
            return int(self.tokenizer.pad_token_id)
        eos = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        return int(eos or 0)


def last_row(query: Tensor, key: Tensor, mask: Tensor | None, **settings: Any) -> Tensor:
    """Attention weights of the last query, [B, H, T]; the arguments of :func:`attention_weights`."""
    return attention_weights(query, key, mask, slice(-1, None), **settings)[:, :, 0]


def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    rows: slice,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Attention weights of some queries, from what an attention function is given.

    Args:
        query: [B, H, Tq, d], the newest of T tokens.
        key: [B, G, T, d].
        mask: None (causal), boolean or additive [B, 1, Tq, >= T], or the padding mask [B, >= T] that flash
            kernels take.
        rows: R of the queries.
        scaling: Factor of the scores; d^-0.5 if None.
        softcap: Bound of the scores through tanh (Gemma 2).
        sliding_window: Keys that a row may see, for kernels that get no mask of their own.
        s_aux: Sink logits per head (GPT-OSS).

    Returns:
        [B, H, R, T].
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    keys = repeat_kv(key, query.shape[1] // key.shape[1]).to(exact)
    scores = query[:, :, rows].to(exact) @ keys.transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    total, shut = scores.shape[-1], float("-inf")
    if mask is not None and mask.ndim == 4:
        part = mask[:, :, rows, :total]
        scores = scores.masked_fill(~part, shut) if part.dtype == torch.bool else scores + part
    else:
        at = torch.arange(total, device=query.device)
        distance = at[total - query.shape[2] :][rows, None] - at
        hidden = (distance < 0) | (distance >= (sliding_window or total))
        scores = scores.masked_fill(
            hidden if mask is None else hidden | ~mask[:, None, None, -total:].bool(), shut
        )
    if s_aux is not None:
        sinks = s_aux.to(exact)[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    return scores.softmax(-1)


def batches(lengths: Sequence[int], size: int, tokens: int | None = None) -> list[list[int]]:
    """Group prompts of similar length, longest first, so that little padding is needed and memory errors come
    early.

    Depends on the lengths alone: a resumed run forms the same batches and so gets the same numbers.

    Args:
        lengths: Tokens per prompt, those to come included.
        size: Prompts per batch at most.
        tokens: Tokens per batch at most, padding included; a prompt longer than that is a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    out: list[list[int]] = []
    for index in order:
        most = min(size, max((tokens or 0) // lengths[out[-1][0]], 1) if tokens else size) if out else 0
        if not out or len(out[-1]) >= most:
            out.append([])
        out[-1].append(index)
    return out
