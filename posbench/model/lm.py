"""A causal language model with its tokenizer: encode, generate, score, and read attention rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from posbench.errors import UserError
from posbench.late import (
    F,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Tensor,
    inference_mode,
    nn,
    torch,
    transformers,
)
from posbench.model import families
from posbench.model.attention import last_query_weights
from posbench.model.encode import Encoder, cut_at_stop
from posbench.model.guard import NotFinite, check_finite, guarded
from posbench.model.hooks import (
    AttentionFunction,
    cache_of,
    fork_cache,
    intercepting_attention,
    pre_hooks,
    replace_attribute,
    with_cache,
)
from posbench.model.items import ItemIndex, Span, find_items, token_spans
from posbench.model.thinking import THINKING_MARKS

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList

    from posbench.model.prefix import Prefix

FINISH_END = "end"
FINISH_STOP = "stop"
FINISH_LENGTH = "length"
IGNORED = -100
"""The target token that torch's cross-entropy leaves out."""


class GeneratedReply(NamedTuple):
    """A generated text, and why it ended.

    Attributes:
        text: The text.
        finish: :data:`FINISH_END` (the model's end token), :data:`FINISH_STOP` (a stop text) or :data:`FINISH_LENGTH`
            (the largest number of new tokens). A server says ``stop`` for the first two.
    """

    text: str
    finish: str


@dataclass
class LM(Encoder):
    """A causal LM in eval mode, ready for posbench; without a tokenizer only token-level calls work.

    One thread at a time: a call while another thread is in a call, or in a method's block, on the same model
    raises UserError. So does a model that answers with NaN or infinity; the message names the layer.

    The other attributes are those of :class:`posbench.model.load.ModelConfig`.

    Attributes:
        tokens_read: Tokens of the prompts in all batches so far, padding left out.
        tokens_written: Tokens of all replies so far, each up to its end.
        items: Positions of the items of prompts, for methods that read them.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    context_window: int
    chat_template: str = "auto"
    tokens_read: int = 0
    tokens_written: int = 0
    items: ItemIndex = field(default_factory=ItemIndex, repr=False)

    @property
    def device(self) -> torch.device:
        """The device of the embedding, where inputs go."""
        embedding = self.model.get_input_embeddings()
        hook = getattr(embedding, "_hf_hook", None)
        if embedding.weight.is_meta and hook:
            # accelerate keeps an offloaded weight on "meta" and brings it to the execution device for each call.
            return torch.device(hook.execution_device)
        return embedding.weight.device

    @property
    def rope_boundary(self) -> int | None:
        """Length that divides prompts which share no batch; see :func:`families.rope_boundary`."""
        return families.rope_boundary(self.model)

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return int(families.text_config(self.model).num_hidden_layers)

    def pad(
        self, rows: Sequence[Sequence[int]], prefix: Prefix | None = None
    ) -> dict[str, Any]:
        """Left-pad prompts to one batch.

        Args:
            rows: Token ids of each of B prompts, the longest of which has T tokens.
            prefix: A prefill of all but the last tokens of these prompts.

        Returns:
            ``input_ids``, ``attention_mask`` and ``position_ids``, each [B, T]. With a prefix of P tokens
            ``input_ids`` and ``position_ids`` cover the last T - P tokens, and the cache is a fork_cache of its.
        """
        past = prefix.tokens if prefix else 0
        ids, mask = self._left_padded(rows, past)
        inputs = {
            "input_ids": ids[:, past:],
            "attention_mask": mask,
            "position_ids": _positions(mask)[:, past:],
        }
        if prefix is not None:
            inputs |= with_cache(self.model.forward, fork_cache(prefix.cache))
        return inputs

    def _left_padded(
        self, rows: Sequence[Sequence[int]], past: int
    ) -> tuple[Tensor, Tensor]:
        """Return token ids and mask of prompts, padded on the left to the longest, [B, T] each.

        Args:
            rows: Token ids of each prompt.
            past: Tokens in columns from here on are counted as read by the model; earlier ones are in its cache.
        """
        width = max(map(len, rows))
        ids = np.full((len(rows), width), self._pad_id())
        mask = np.zeros_like(ids)
        for row, tokens in enumerate(rows):
            start = width - len(tokens)
            ids[row, start:] = tokens
            mask[row, start:] = 1
        self.tokens_read += int(mask[:, past:].sum())
        return (
            torch.from_numpy(ids).to(self.device),
            torch.from_numpy(mask).to(self.device),
        )

    def add_items(
        self, prompt: str, items: Sequence[Span] | str, **form: Any
    ) -> list[int]:
        """Register the positions of the items of a prompt for methods that read them; a run does so by itself.

        Args:
            prompt: The prompt, before any chat template.
            items: Characters (start, end) of each item, or a regular expression that matches each of them.
            **form: See :meth:`render`.

        Returns:
            The prompt's token ids, for :meth:`generate`.

        Raises:
            UserError: There is no item.
        """
        spans = find_items(prompt, items) if isinstance(items, str) else items
        if not spans:
            allowed = "spans of characters, or an expression that matches in the prompt"
            raise UserError("items", items, allowed, "pass items=r'Document .*'")
        encoded = self.encode(prompt, **form)
        self.items.add(encoded.ids, token_spans(encoded.offsets, spans))
        return encoded.ids

    def generate(
        self,
        rows: Sequence[Sequence[int]] | Sequence[str],
        *,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        stop: Sequence[str] = (),
        repetition_penalty: float = 1.0,
        batch_size: int = 8,
        prefix: Prefix | None = None,
    ) -> list[str]:
        """Return the texts of :meth:`generate_replies`, which has the same arguments."""
        replies = self.generate_replies(
            rows,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            stop=stop,
            repetition_penalty=repetition_penalty,
            batch_size=batch_size,
            prefix=prefix,
        )
        return [reply.text for reply in replies]

    @guarded
    @inference_mode
    def generate_replies(
        self,
        rows: Sequence[Sequence[int]] | Sequence[str],
        *,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        stop: Sequence[str] = (),
        repetition_penalty: float = 1.0,
        batch_size: int = 8,
        prefix: Prefix | None = None,
    ) -> list[GeneratedReply]:
        """Greedy continuations, in input order, from these settings alone, not the checkpoint's generation
        config.

        Args:
            rows: Prompts as token ids or as text.
            max_new_tokens: Tokens to generate at most.
            min_new_tokens: Tokens before which neither the end of sequence nor a stop text of one token
                comes.
            stop: Texts that end a reply and are cut off; one of a single token ends it as that token, as in
                LongBench.
            repetition_penalty: See :class:`posbench.tasks.Task`.
            batch_size: Rows per batch; see :func:`length_batches`.
            prefix: All but the last tokens of the rows, which then are one batch, in their order.
        """
        if isinstance(rows, str):
            raise TypeError(
                "generate takes a list of prompts, got one text: pass [text]"
            )
        tokenizer = self.need_tokenizer()
        prompts = [
            self.encode(row).ids if isinstance(row, str) else list(row) for row in rows
        ]
        stop_tokens: dict[str, int] = {}
        for text in stop:
            # A stop text that is a single token ends a reply as that token.
            last_ids = tokenizer(text, add_special_tokens=False)["input_ids"][-1:]
            if last_ids and tokenizer.decode(last_ids) == text:
                stop_tokens[text] = last_ids[0]
        stop_texts = [text for text in stop if text not in stop_tokens]
        # Tokens at which the checkpoint ends a reply.
        end_ids = self.model.generation_config.eos_token_id
        if end_ids is None:
            end_ids = tokenizer.eos_token_id
        if end_ids is None:
            end_ids = []
        elif not isinstance(end_ids, list):
            end_ids = [end_ids]
        # Greedy, whatever the checkpoint's own settings are.
        settings = transformers.GenerationConfig(
            do_sample=False,
            num_beams=1,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens or None,
            eos_token_id=[*end_ids, *stop_tokens.values()] or None,
            pad_token_id=self._pad_id(),
            repetition_penalty=repetition_penalty if repetition_penalty != 1 else None,
        )
        stop_ids = set(stop_tokens.values())
        ending_ids = stop_ids.union(end_ids)
        hidden_ids = _hidden_ids(tokenizer)
        replies: dict[int, GeneratedReply] = {}
        for batch in _batches_or_one(prompts, batch_size, prefix, self.rope_boundary):
            reply_ids = self._generate_batch(
                [prompts[i] for i in batch], settings, stop_texts, prefix
            )
            for index, ids in zip(batch, reply_ids.tolist(), strict=True):
                # Everything after the first end token is padding.
                length = next(
                    (i for i, token in enumerate(ids) if token in ending_ids), len(ids)
                )
                text = str(
                    tokenizer.decode([i for i in ids[:length] if i not in hidden_ids])
                )
                reply = cut_at_stop(text, stop_texts)
                # Why the reply ended: a stop text, the end of sequence, or the limit.
                finish = FINISH_LENGTH
                if reply != text or not stop_ids.isdisjoint(ids[: length + 1]):
                    finish = FINISH_STOP
                elif length < len(ids):
                    finish = FINISH_END
                replies[index] = GeneratedReply(reply, finish)
        return [replies[index] for index in range(len(prompts))]

    def _generate_batch(
        self,
        rows: list[list[int]],
        settings: GenerationConfig,
        stop: Sequence[str],
        prefix: Prefix | None,
    ) -> Tensor:
        """Generate the replies to one batch of prompts.

        Args:
            rows: Token ids of each prompt.
            settings: Generation settings of transformers.
            stop: Texts at which a reply ends.
            prefix: Cache that already holds the beginning of each prompt; None without one.

        Returns:
            Token ids of the replies, padded at the end, [B, T].
        """
        tokenizer = self.need_tokenizer()
        # generate() takes whole prompts and cuts off the cached part.
        ids, mask = self._left_padded(rows, prefix.tokens if prefix else 0)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if prefix:
            inputs |= with_cache(self.model.forward, fork_cache(prefix.cache))
        width = ids.shape[1]

        def has_stopped(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            replies = tokenizer.batch_decode(ids[:, width:])
            return torch.tensor(
                [any(text in reply for text in stop) for reply in replies],
                device=ids.device,
            )

        # The library's own stop_strings fails on tokenizers that do not spell every text.
        criteria = transformers.StoppingCriteriaList([has_stopped] if stop else [])
        with replace_attribute(self.model, "generation_config", settings):
            output = self.model.generate(
                **inputs,
                stopping_criteria=criteria,
                logits_processor=finite_logits_processor(),
            )
        reply_ids = output[:, width:]
        self.tokens_written += _count_tokens(
            reply_ids, settings.eos_token_id or [], self._pad_id()
        )
        return reply_ids

    @guarded
    @inference_mode
    def logits(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Next-token logits of every row, [B, T, V], for token ids [B, T] and a left-padding mask [B, T]."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = self.model(
            input_ids=input_ids, attention_mask=mask, position_ids=_positions(mask)
        ).logits
        return check_finite(logits, mask.bool())

    @guarded
    @inference_mode
    def continuations(
        self,
        prompts: Sequence[Sequence[int]],
        choices: Sequence[Sequence[Sequence[int]]],
        *,
        batch_size: int = 8,
        prefix: Prefix | None = None,
    ) -> list[list[tuple[float, bool]]]:
        """Log-likelihood of every choice after its prompt; a prompt runs once for all its choices.

        Args:
            prompts: Token ids of each prompt.
            choices: Token ids of each continuation of each prompt, none empty.
            batch_size: Prompts per batch; see :func:`length_batches`.
            prefix: As in :meth:`generate`.

        Returns:
            By prompt and choice, the total log-likelihood in nats, and whether greedy decoding would produce the
            choice.
        """
        results: list[list[tuple[float, bool]]] = [[] for _ in prompts]
        for batch in _batches_or_one(prompts, batch_size, prefix, self.rope_boundary):
            inputs = self.pad([prompts[i] for i in batch], prefix)
            output = self.model(**inputs, use_cache=True, logits_to_keep=1)
            for number in range(max(len(choices[i]) for i in batch)):
                # A prompt with fewer choices runs a token that nobody looks at.
                targets = self._targets(
                    [
                        list(choices[i][number]) if number < len(choices[i]) else [0]
                        for i in batch
                    ]
                )
                logits = [output.logits[:, -1:].float()]
                if targets.shape[1] > 1:
                    answer_inputs = self._answer_inputs(inputs, targets)
                    cache = fork_cache(cache_of(output))
                    answer_inputs |= with_cache(self.model.forward, cache)
                    answer_output = self.model(**answer_inputs)
                    logits.append(answer_output.logits.float())
                scores = check_finite(torch.cat(logits, dim=1), targets >= 0)
                nats = _cross_entropy(scores, targets).double().sum(1)
                greedy = ((scores.argmax(-1) == targets) | (targets < 0)).all(1)
                for row, i in enumerate(batch):
                    if number < len(choices[i]):
                        results[i].append((-float(nats[row]), bool(greedy[row])))
        return results

    @guarded
    @inference_mode
    def answer_loss(
        self, prompts: Sequence[str], answers: Sequence[str], *, batch_size: int = 8
    ) -> Tensor:
        """Return the mean cross-entropy (nats per token) of each answer after its prompt, [N].

        The prompt runs first and the answer is fed on its cache, so that a method that treats the last prompt
        token apart (scale_channel) sees the same sequence of calls as in generation.

        Args:
            prompts: N prompts.
            answers: The answer to each.
            batch_size: Prompts per forward.
        """
        pairs = [self.answer_ids(p, a) for p, a in zip(prompts, answers, strict=True)]
        return self.answer_token_loss(pairs, batch_size=batch_size)

    @guarded
    @inference_mode
    def answer_token_loss(
        self, pairs: Sequence[tuple[list[int], list[int]]], *, batch_size: int = 8
    ) -> Tensor:
        """Mean cross-entropy (nats per token) of each answer after its prompt, [N]; see :meth:`answer_loss`.

        Args:
            pairs: Token ids of N prompts and of their answers.
            batch_size: Prompts per forward.
        """
        losses = torch.zeros(len(pairs))
        lengths = [len(prompt) + len(answer) for prompt, answer in pairs]
        groups = length_batches(lengths, batch_size, boundary=self.rope_boundary)
        for batch in groups:
            inputs, targets = self.pad_with_answers([pairs[i] for i in batch])
            ids = inputs["input_ids"]
            mask = inputs["attention_mask"]
            positions = inputs["position_ids"]
            # The prompts first: their last token predicts the first of the answer.
            start = ids.shape[1] - targets.shape[1] + 1
            output = self.model(
                input_ids=ids[:, :start],
                position_ids=positions[:, :start],
                attention_mask=mask[:, :start],
                use_cache=True,
                logits_to_keep=1,
            )
            logits = [output.logits[:, -1:]]
            if targets.shape[1] > 1:
                answer_output = self.model(
                    input_ids=ids[:, start:],
                    position_ids=positions[:, start:],
                    attention_mask=mask,
                    **with_cache(self.model.forward, cache_of(output)),
                )
                logits.append(answer_output.logits)
            nats = self.answer_nats(torch.cat(logits, dim=1), targets)
            losses[list(batch)] = nats.cpu()
        return losses

    def pad_with_answers(
        self, pairs: Sequence[tuple[list[int], list[int]]]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Prompts padded on the left and their answers, but for the last token, padded on the right.

        Args:
            pairs: Token ids of B prompts and their answers, of at most T and A tokens.

        Returns:
            The forward's inputs, each [B, T + A - 1], and the answer tokens [B, A], -100 where an answer has
            ended.
        """
        prompt_inputs = self.pad([prompt for prompt, _ in pairs])
        targets = self._targets([answer for _, answer in pairs])
        inputs = self._answer_inputs(prompt_inputs, targets, self._pad_id())
        for name in ("input_ids", "position_ids"):
            inputs[name] = torch.cat([prompt_inputs[name], inputs[name]], dim=1)
        return inputs, targets

    def _targets(self, answers: Sequence[list[int]]) -> Tensor:
        """Token ids of answers padded on the right with -100, [B, A]."""
        width = max(map(len, answers))
        return torch.tensor(
            [answer + [IGNORED] * (width - len(answer)) for answer in answers],
            device=self.device,
        )

    def _answer_inputs(
        self, prompt_inputs: dict[str, Tensor], targets: Tensor, pad_id: int = 0
    ) -> dict[str, Tensor]:
        """Return the inputs of a forward over answers behind prompts in the cache, without each answer's last token.

        Args:
            prompt_inputs: Inputs with which the prompts were read.
            targets: Token ids of the answers, padded at the end with negative numbers, [B, A].
            pad_id: Replaces the padding.
        """
        ids = targets[:, :-1]
        is_token = ids >= 0
        steps = torch.arange(1, targets.shape[1], device=self.device)
        return {
            "input_ids": ids.where(is_token, pad_id),
            "attention_mask": torch.cat(
                [prompt_inputs["attention_mask"], is_token.long()], dim=1
            ),
            "position_ids": prompt_inputs["position_ids"][:, -1:] + steps,
        }

    def answer_nats(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy per answer token (nats) of each answer, [B].

        Args:
            logits: Logits that predict the answers' tokens, [B, A, V].
            targets: Token ids of the answers, padded with negative numbers, [B, A].

        Raises:
            NotFinite: Some is no number; :func:`posbench.model.guard.guarded` names the layer.
        """
        is_token = targets >= 0
        totals = _cross_entropy(check_finite(logits, is_token).float(), targets).sum(1)
        nats = totals / is_token.sum(1)
        if not bool(torch.isfinite(nats.detach()).all()):
            raise NotFinite("the loss of an answer is NaN or infinite")
        return nats

    @contextmanager
    def last_attention(self) -> Iterator[dict[int, Tensor]]:
        """Collect the attention weights of the last token in each forward inside the block.

        Yields a dict layer -> weights [B, H, T] of the latest forward (post-softmax, float32 or better). A
        sliding-window layer that no longer holds all keys gives the newest T' < T. Memory is linear in T where the
        family allows it. Under attention_buckets there are B * N rows, the N bases of a prompt next to each other.
        """
        weights: dict[int, Tensor] = {}

        def read(
            layer: int, query: Tensor, key: Tensor, mask: Any, **settings: Any
        ) -> None:
            # The last row is computed once more in front of the kernel in use.
            weights[layer] = last_query_weights(query, key, mask, **settings)

        def read_map(layer: int, whole: Tensor) -> None:
            weights[layer] = whole[:, :, -1]

        with self.reading_attention(read, read_map):
            yield weights

    @contextmanager
    def reading_attention(
        self, read: Callable[..., None], read_map: Callable[[int, Tensor], None]
    ) -> Iterator[None]:
        """Show the attention of every layer, in each forward inside the block, to one of two functions.

        Args:
            read: Takes layer, query, key and mask, and the settings of the library's attention function by name, before
                this function runs.
            read_map: Takes layer and weights [B, H, T, T]; for families without such a function, which compute all
                weights.
        """

        def attend(
            module: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Tensor | None,
            *,
            following: AttentionFunction,
            **settings: Any,
        ) -> Any:
            read(module.layer_idx, query, key, mask, **settings)
            return following(module, query, key, value, mask, **settings)

        def hook(layer: int) -> Callable[..., None]:
            return lambda module, args, output: read_map(layer, output[1])

        with ExitStack() as stack:
            if families.family_of(self.model).interface:
                stack.enter_context(intercepting_attention(self.model, attend))
            else:
                stack.enter_context(self.eager())
                for layer, module in enumerate(families.attention_modules(self.model)):
                    stack.enter_context(module.register_forward_hook(hook(layer)))
            yield

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Make families outside the library's attention functions compute and return all their weights in a block."""

        def without_bias(
            _: nn.Module, args: Any, kwargs: dict[str, Any]
        ) -> tuple[Any, Any]:
            return args, kwargs | {"alibi": torch.zeros_like(kwargs["alibi"])}

        config = self.model.config
        is_eager = config._attn_implementation == "eager"
        mask_has_bias = families.family_of(self.model).mask_has_bias
        with ExitStack() as stack:
            # Their other kernels get ALiBi's bias in the mask; eager attention would add it twice.
            if mask_has_bias and config.alibi and not is_eager:
                modules = families.attention_modules(self.model)
                stack.enter_context(pre_hooks(modules, None, lambda _: without_bias))
            stack.enter_context(
                replace_attribute(config, "_attn_implementation_internal", "eager")
            )
            yield

    def _pad_id(self) -> int:
        """Return the id of a token to pad with."""
        num_embeddings = self.model.get_input_embeddings().weight.shape[0]
        for name in ("pad_token_id", "eos_token_id"):
            token = getattr(self.tokenizer, name, None)
            # Some tokenizers pad with a token that their model does not know; padding is never read.
            if token is not None and token < num_embeddings:
                return int(token)
        return 0


def finite_logits_processor() -> LogitsProcessorList:
    """A logits processor that stops ``generate`` at the first token whose logits are no numbers."""
    return transformers.LogitsProcessorList([lambda ids, scores: check_finite(scores)])


def _positions(mask: Tensor) -> Tensor:
    """Positions [B, T] of the tokens of left-padded rows.

    A bare forward would count them from the first column, padding included; generate() counts them so.
    """
    return (mask.cumsum(-1) - 1).clamp(min=0)


def _hidden_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of special tokens that are no part of a reply's text: all but those that mark thinking."""
    marks = {mark for pair in THINKING_MARKS for mark in pair}
    return {
        token
        for token in tokenizer.all_special_ids
        if tokenizer.convert_ids_to_tokens(token) not in marks
    }


def _count_tokens(replies: Tensor, end_ids: list[int], pad_id: int) -> int:
    """Number of tokens of replies [B, T], each up to and with its first end token, padding left out."""
    is_end = torch.isin(
        replies, torch.tensor(end_ids, dtype=replies.dtype, device=replies.device)
    )
    ends_before = is_end.cumsum(1) - is_end.int()
    return int(((ends_before == 0) & (is_end | (replies != pad_id))).sum())


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each target token, [B, A], from logits [B, A, V]; 0 where an answer has ended."""
    return F.cross_entropy(
        logits.transpose(1, 2), targets, reduction="none", ignore_index=IGNORED
    )


def length_batches(
    lengths: Sequence[int],
    batch_size: int,
    batch_tokens: int | None = None,
    boundary: int | None = None,
) -> list[list[int]]:
    """Group prompts of similar length, longest first: little padding is needed, and memory errors come early.

    The batches depend on the ``lengths`` alone: a resumed run forms the same ones and so gets the same numbers.

    Args:
        lengths: Tokens of each prompt, with its reply.
        batch_size: Prompts of a batch at most.
        batch_tokens: Tokens of a batch at most, padding included; None: any number. A longer prompt is a batch of its
            own.
        boundary: No batch mixes prompts below and above this length, see :attr:`LM.rope_boundary`; None: none.

    Returns:
        Indices of the prompts of each batch.
    """
    groups: list[list[int]] = []
    max_prompts = batch_size
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and batch_tokens:
            longest = lengths[groups[-1][0]]
            max_prompts = min(batch_size, max(batch_tokens // longest, 1))
        is_full = not groups or len(groups[-1]) >= max_prompts
        if not is_full and boundary:
            is_full = lengths[groups[-1][0]] > boundary >= lengths[index]
        if is_full:
            groups.append([])
        groups[-1].append(index)
    return groups


def _batches_or_one(
    prompts: Sequence[Sequence[int]],
    size: int,
    prefix: Prefix | None,
    boundary: int | None,
) -> list[list[int]]:
    """Return the indices of the prompts of each batch, prompts of similar length together.

    Args:
        prompts: Token ids of each prompt.
        size: Prompts in a batch.
        prefix: A cache of all prompts' beginnings, in their order: then all are one batch.
        boundary: Length that must not lie inside a batch; see :func:`posbench.model.families.rope_boundary`.
    """
    if prefix is not None:
        return [list(range(len(prompts)))]
    lengths = [len(prompt) for prompt in prompts]
    return length_batches(lengths, size, boundary=boundary)
