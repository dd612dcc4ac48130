"""A causal language model with its tokenizer: load, encode, generate, score, and read attention rows."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from posbench import arch
from posbench.errors import UserError
from posbench.hooks import replaced
from posbench.tasks.base import Truncation

log = logging.getLogger(__name__)

_ROWS = "posbench_last_row"


@dataclass(frozen=True)
class Encoded:
    """One prompt as tokens.

    Attributes:
        ids: Token ids, special tokens included.
        offsets: Per token, the (start, end) characters of the *task's* prompt it covers; (0, 0) for added tokens.
        dropped: Tokens removed from the middle to fit the context window.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
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
    chat_template: Literal["auto", "none"] = "auto"

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
        return int(arch.text_config(self.model).num_hidden_layers)

    def render(self, prompt: str) -> str:
        """The text the model reads: the prompt, inside the chat template where the rule asks for it."""
        tokenizer = self._tokenizer()
        if self.chat_template == "none" or not tokenizer.chat_template:
            return prompt
        messages = [{"role": "user", "content": prompt}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def encode(self, prompt: str, *, truncation: Truncation = "refuse", reserve: int = 0) -> Encoded:
        """Tokenise a prompt once, the beginning-of-sequence token exactly once.

        Args:
            prompt: The task's prompt.
            truncation: What to do over the context window: refuse, or drop tokens from the middle as LongBench does.
            reserve: Tokens to keep free for the answer.

        Raises:
            UserError: The prompt does not fit and ``truncation`` is ``refuse``, or ``reserve`` leaves no room at all.
        """
        tokenizer, text = self._tokenizer(), self.render(prompt)
        encoding = tokenizer(text, add_special_tokens=text is prompt, return_offsets_mapping=tokenizer.is_fast)
        ids = list(encoding["input_ids"])
        shift = text.find(prompt)
        pairs = encoding["offset_mapping"] if tokenizer.is_fast else [(0, 0)] * len(ids)
        offsets = [(max(a - shift, 0), max(b - shift, 0)) for a, b in pairs]
        room, dropped = self.context_window - reserve, 0
        if len(ids) > room:
            window = f"context window {self.context_window} of {self.name}, {reserve} kept"
            if truncation == "refuse" or room < 1:
                raise UserError(
                    field="prompt length",
                    value=len(ids),
                    allowed=f"at most {max(room, 0)} tokens ({window})",
                    hint="shorten the task (for kv_retrieval: task.pairs), or allow it with task.truncation=middle",
                )
            dropped, front = len(ids) - room, room // 2
            ids = ids[:front] + ids[front + dropped :]
            offsets = offsets[:front] + offsets[front + dropped :]
        return Encoded(ids=ids, offsets=offsets, dropped=dropped)

    def pad(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Left-pad token rows to one batch: ``input_ids``, ``attention_mask`` and ``position_ids``, each [B, T]."""
        width = max(len(row) for row in rows)
        fill = self._pad_id()
        ids = torch.tensor([[fill] * (width - len(row)) + list(row) for row in rows], device=self.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.device)
        # A bare forward counts positions from the first column, padding included; generate() counts from the mask.
        return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}

    @torch.inference_mode()
    def generate(self, rows: Sequence[Sequence[int]] | Sequence[str], *, max_new_tokens: int, batch_size: int = 8) -> list[str]:
        """Greedy continuations, from these settings alone (the checkpoint's generation config is not consulted).

        Args:
            rows: Prompts as token ids or as text.
            max_new_tokens: Tokens to generate at most.
            batch_size: Rows per batch; see :func:`batches`.

        Returns:
            The generated text per prompt, in input order.
        """
        if isinstance(rows, str):
            raise TypeError("generate takes a list of prompts, got one text: pass [text]")
        encoded = [self.encode(row).ids if isinstance(row, str) else list(row) for row in rows]
        texts = [""] * len(encoded)
        for batch in batches([len(row) for row in encoded], batch_size):
            for index, text in zip(batch, self._generate_batch([encoded[i] for i in batch], max_new_tokens), strict=True):
                texts[index] = text
        return texts

    def _generate_batch(self, rows: list[list[int]], max_new_tokens: int) -> list[str]:
        tokenizer, inputs = self._tokenizer(), self.pad(rows)
        settings = GenerationConfig(
            do_sample=False,
            num_beams=1,
            max_new_tokens=max_new_tokens,
            eos_token_id=self.model.generation_config.eos_token_id or tokenizer.eos_token_id,
            pad_token_id=self._pad_id(),
        )
        inputs.pop("position_ids")
        with replaced(self.model, "generation_config", settings):
            out = self.model.generate(**inputs)
        new = out[:, inputs["input_ids"].shape[1] :]
        return [str(text) for text in tokenizer.batch_decode(new, skip_special_tokens=True)]

    @torch.inference_mode()
    def logits(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Next-token logits of every row, [B, T, V], for token ids [B, T] and an optional left-padding mask [B, T]."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return self.model(input_ids=input_ids, attention_mask=mask, position_ids=positions).logits

    def answer_ids(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Token ids of a prompt and of the answer that follows it.

        The pair is tokenised as one text where the prompt's tokens survive that; otherwise each on its own.
        """
        tokenizer, head = self._tokenizer(), self.encode(prompt).ids
        text = self.render(prompt)
        both = tokenizer(text + answer, add_special_tokens=text is prompt)["input_ids"]
        if both[: len(head)] == head and len(both) > len(head):
            return head, list(both[len(head) :])
        return head, list(tokenizer(answer, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def answer_loss(self, prompts: Sequence[str], answers: Sequence[str], *, batch_size: int = 8) -> Tensor:
        """Mean cross-entropy (nats per token) of each answer after its prompt, [N].

        The prompt runs first and the answer is fed on its cache, so that a method that treats the last prompt token
        apart (scale_channel) sees the same sequence of calls as in generation.
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
                logits.append(self.model(**answer, attention_mask=mask, past_key_values=out.past_key_values).logits)
            losses[list(batch)] = self.answer_nats(torch.cat(logits, dim=1), targets).cpu()
        return losses

    def pad_with_answers(self, pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[dict[str, Tensor], Tensor]:
        """Prompts padded on the left and their answers, but for the last token, padded on the right.

        Args:
            pairs: Prompt and answer token ids, B of them; answers of at most A tokens.

        Returns:
            The forward's inputs, each [B, T + A - 1], and the answer tokens [B, A], -100 where an answer has ended.
        """
        inputs, width = self.pad([prompt for prompt, _ in pairs]), max(len(answer) for _, answer in pairs)
        fill = [answer + [-100] * (width - len(answer)) for _, answer in pairs]
        targets = torch.tensor(fill, device=self.device)
        given = targets[:, :-1]
        steps = torch.arange(1, width, device=self.device)
        return {
            "input_ids": torch.cat([inputs["input_ids"], given.where(given >= 0, self._pad_id())], dim=1),
            "attention_mask": torch.cat([inputs["attention_mask"], (given >= 0).long()], dim=1),
            "position_ids": torch.cat([inputs["position_ids"], inputs["position_ids"][:, -1:] + steps], dim=1),
        }, targets

    def answer_nats(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy per answer token, [B], from the logits [B, A, V] that predict the answer tokens [B, A]."""
        nats = F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none", ignore_index=-100)
        return nats.sum(1) / (targets >= 0).sum(1)

    @contextmanager
    def last_attention(self) -> Iterator[dict[int, Tensor]]:
        """Collect the attention weights of the last token in each forward inside the block.

        Yields:
            Dict layer -> weights [B, H, T] of the latest forward (post-softmax, float32 or better). A sliding-window layer
            that no longer holds all keys gives the newest T' < T. Memory is linear in T where the family allows it.
        """
        weights: dict[int, Tensor] = {}
        if arch.family_of(self.model).interface:
            with self._listening(weights):
                yield weights
            return

        def read(layer: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: tuple[Any, ...]) -> None:
                weights[layer] = output[1][:, :, -1]

            return hook

        # These families compute and return all weights themselves, when asked for eager attention.
        with ExitStack() as stack:
            stack.enter_context(replaced(self.model.config, "_attn_implementation_internal", "eager"))
            for layer, module in enumerate(arch.attention_modules(self.model)):
                stack.callback(module.register_forward_hook(read(layer)).remove)
            yield weights

    @contextmanager
    def _listening(self, weights: dict[int, Tensor]) -> Iterator[None]:
        """Route attention through a function that computes the last row once more and then calls the kernel in use."""
        before = arch.text_config(self.model)._attn_implementation

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
            weights[module.layer_idx] = last_row(query, key, mask, **kwargs)
            eager = sys.modules[type(module).__module__].eager_attention_forward
            kernel = ALL_ATTENTION_FUNCTIONS.get_interface(before, eager)
            return kernel(module, query, key, value, mask, **kwargs)

        AttentionInterface.register(_ROWS, attend)
        # Without a mask function under the same name transformers would hand over no mask at all.
        AttentionMaskInterface.register(_ROWS, ALL_MASK_ATTENTION_FUNCTIONS[before])
        try:
            self.model.set_attn_implementation(_ROWS)
            yield
        finally:
            self.model.set_attn_implementation(before)

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise UserError(field="tokenizer", value=None, allowed="a tokenizer", hint="pass posbench.load(model, tokenizer=...)")
        return self.tokenizer

    def _pad_id(self) -> int:
        if self.tokenizer is not None and self.tokenizer.pad_token_id is not None:
            return int(self.tokenizer.pad_token_id)
        eos = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        return int(eos or 0)


def last_row(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Attention weights of the last query, from what an attention function is given.

    Args:
        query: [B, H, Tq, d].
        key: [B, G, T, d].
        mask: None, boolean or additive [B, 1, Tq, >= T], or the padding mask [B, >= T] that flash kernels take.
        scaling: Factor of the scores; d^-0.5 if None.
        softcap: Bound of the scores through tanh (Gemma 2).
        sliding_window: Keys that the row may see, for kernels that get no mask of their own.
        s_aux: Sink logits per head (GPT-OSS).

    Returns:
        [B, H, T].
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    keys = repeat_kv(key, query.shape[1] // key.shape[1]).to(exact)
    scores = (query[:, :, -1:].to(exact) @ keys.transpose(-1, -2))[:, :, 0] * (scaling or query.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    total, shut = scores.shape[-1], float("-inf")
    if mask is not None and mask.ndim == 4:
        row = mask[:, :, -1, :total]
        scores = scores.masked_fill(~row, shut) if row.dtype == torch.bool else scores + row
    elif mask is not None:
        scores = scores.masked_fill(~mask[:, None, -total:].bool(), shut)
    if sliding_window and (mask is None or mask.ndim != 4):
        scores[..., : max(total - sliding_window, 0)] = shut
    if s_aux is not None:
        sinks = s_aux.to(exact)[None, :, None].expand(len(scores), -1, 1)
        return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    return scores.softmax(-1)


def batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Group prompts of similar length, longest first, so that little padding is needed and memory errors come early.

    Depends on the lengths alone: a resumed run forms the same batches and so gets the same numbers.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[i : i + size] for i in range(0, len(order), size)]
