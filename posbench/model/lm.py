"""A causal language model with its tokenizer: encode, generate, score, and read attention rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from posbench.model.attention import last_row
from posbench.model.encode import Encoder, cut
from posbench.model.guard import NotFinite, finite, guarded
from posbench.model.hooks import Attend, attending, before_each, fork, replaced

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList

    from posbench.model.prefix import Prefix


@dataclass
class LM(Encoder):
    """A causal LM in eval mode, ready for posbench; without a tokenizer only token-level calls work.

    One thread at a time: a call while another thread is in a call, or in a method's block, on the same model
    raises UserError. So does a model that answers with NaN or infinity; the message names the layer.

    The other attributes are those of :class:`posbench.model.load.ModelConfig`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    context_window: int
    chat_template: str = "auto"
    read: int = 0  # tokens of the prompts in all batches so far, padding left out
    written: int = 0  # tokens of all replies so far, each up to its end

    @property
    def device(self) -> torch.device:
        """Device of the embedding, where inputs go."""
        embedding = self.model.get_input_embeddings()
        # accelerate keeps an offloaded weight on "meta" and brings it to the execution device for each call.
        hook = (
            getattr(embedding, "_hf_hook", None) if embedding.weight.is_meta else None
        )
        return torch.device(hook.execution_device) if hook else embedding.weight.device

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return int(families.text_config(self.model).num_hidden_layers)

    def pad(
        self, rows: Sequence[Sequence[int]], prefix: Prefix | None = None
    ) -> dict[str, Any]:
        """Left-pad rows to one batch: ``input_ids``, ``attention_mask`` and ``position_ids``, each [B, T].

        With a prefix, which holds all tokens of these rows but the last ones, ``input_ids`` and
        ``position_ids`` are those of the last ones, and ``past_key_values`` is a fork of its cache.
        """
        width = max(len(row) for row in rows)
        fill = self._pad_id()
        cut = prefix.tokens if prefix else 0
        self.read += sum(len(row) - max(len(row) - width + cut, 0) for row in rows)
        ids = torch.tensor(
            [[fill] * (width - len(row)) + list(row) for row in rows],
            device=self.device,
        )
        mask = torch.tensor(
            [[0] * (width - len(row)) + [1] * len(row) for row in rows],
            device=self.device,
        )
        # A bare forward counts positions from the first column, padding included; generate() from the mask.
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        if prefix is None:
            return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        later = {
            "input_ids": ids[:, cut:],
            "attention_mask": mask,
            "position_ids": positions[:, cut:],
        }
        return {**later, "past_key_values": fork(prefix.cache)}

    @guarded
    @inference_mode
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
            batch_size: Rows per batch; see :func:`batches`.
            prefix: All but the last tokens of the rows, which then are one batch, in their order.
        """
        if isinstance(rows, str):
            raise TypeError(
                "generate takes a list of prompts, got one text: pass [text]"
            )
        tokenizer = self.need_tokenizer()
        encoded = [
            self.encode(row).ids if isinstance(row, str) else list(row) for row in rows
        ]
        last = {
            text: tokenizer(text, add_special_tokens=False)["input_ids"][-1:]
            for text in stop
        }
        single = {
            text: ids[0]
            for text, ids in last.items()
            if ids and tokenizer.decode(ids) == text
        }
        several = [text for text in stop if text not in single]
        ends = self.model.generation_config.eos_token_id or tokenizer.eos_token_id
        ends = [
            *(ends if isinstance(ends, list) else [] if ends is None else [ends]),
            *single.values(),
        ]
        settings = transformers.GenerationConfig(
            do_sample=False,
            num_beams=1,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens or None,
            eos_token_id=ends or None,
            pad_token_id=self._pad_id(),
            repetition_penalty=repetition_penalty if repetition_penalty != 1 else None,
        )
        replies = [""] * len(encoded)
        for batch in (
            [[*range(len(encoded))]]
            if prefix
            else batches([len(row) for row in encoded], batch_size)
        ):
            texts = self._generate_batch(
                [encoded[i] for i in batch], settings, several, prefix
            )
            for index, reply in zip(batch, texts, strict=True):
                reply = cut(reply, several)
                for text in single:
                    reply = reply.removesuffix(text)
                replies[index] = reply
        return replies

    def _generate_batch(
        self,
        rows: list[list[int]],
        settings: GenerationConfig,
        stop: Sequence[str],
        prefix: Prefix | None,
    ) -> list[str]:
        tokenizer = self.need_tokenizer()
        inputs = self.pad(rows)
        inputs.pop("position_ids")
        if prefix:
            # generate() takes whole prompts and cuts off what the cache holds.
            self.read -= sum(map(len, rows))
            inputs["past_key_values"] = self.pad(rows, prefix)["past_key_values"]
        width = inputs["input_ids"].shape[1]

        def said(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            replies = tokenizer.batch_decode(ids[:, width:])
            return torch.tensor(
                [any(text in reply for text in stop) for reply in replies],
                device=ids.device,
            )

        # The library's own stop_strings fails on tokenizers that do not spell every text.
        criteria = transformers.StoppingCriteriaList([said] if stop else [])
        with replaced(self.model, "generation_config", settings):
            out = self.model.generate(
                **inputs, stopping_criteria=criteria, logits_processor=checking()
            )
        self.written += _length(
            out[:, width:], settings.eos_token_id or [], self._pad_id()
        )
        return [
            str(text)
            for text in tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
        ]

    @guarded
    @inference_mode
    def logits(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Next-token logits of every row, [B, T, V], for token ids [B, T] and a left-padding mask [B, T]."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self.model(
            input_ids=input_ids, attention_mask=mask, position_ids=positions
        ).logits
        return finite(logits, mask.bool())

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

        ``prefix`` is as in :meth:`generate`.

        Per prompt, ``choices`` are the token ids of each continuation, none empty. Gives per prompt and
        choice the total log-likelihood in nats, and whether greedy decoding would produce the choice.
        """
        found: list[list[tuple[float, bool]]] = [[] for _ in prompts]
        for batch in (
            [[*range(len(prompts))]]
            if prefix
            else batches([len(row) for row in prompts], batch_size)
        ):
            inputs = self.pad([prompts[i] for i in batch], prefix)
            out = self.model(**inputs, use_cache=True, logits_to_keep=1)
            for number in range(max(len(choices[i]) for i in batch)):
                rows = [
                    list(choices[i][number]) if number < len(choices[i]) else [0]
                    for i in batch
                ]
                targets = self._targets(rows)
                logits = [out.logits[:, -1:].float()]
                if targets.shape[1] > 1:
                    later = self._following(inputs, targets)
                    cache = fork(out.past_key_values)
                    logits.append(
                        self.model(**later, past_key_values=cache).logits.float()
                    )
                scores = finite(torch.cat(logits, dim=1), targets >= 0)
                nats = _nats(scores, targets).double().sum(1)
                greedy = ((scores.argmax(-1) == targets) | (targets < 0)).all(1)
                for row, i in enumerate(batch):
                    if number < len(choices[i]):
                        found[i].append((-float(nats[row]), bool(greedy[row])))
        return found

    @guarded
    @inference_mode
    def answer_loss(
        self, prompts: Sequence[str], answers: Sequence[str], *, batch_size: int = 8
    ) -> Tensor:
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
            out = self.model(
                **prompt,
                attention_mask=mask[:, :start],
                use_cache=True,
                logits_to_keep=1,
            )
            logits = [out.logits[:, -1:]]
            if targets.shape[1] > 1:
                later = self.model(
                    **answer, attention_mask=mask, past_key_values=out.past_key_values
                )
                logits.append(later.logits)
            losses[list(batch)] = self.answer_nats(
                torch.cat(logits, dim=1), targets
            ).cpu()
        return losses

    def pad_with_answers(
        self, pairs: Sequence[tuple[list[int], list[int]]]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Prompts padded on the left and their answers, but for the last token, padded on the right.

        From B prompts and answers as token ids, of at most T and A tokens: the forward's inputs, each [B, T +
        A - 1], and the answer tokens [B, A], -100 where an answer has ended.
        """
        inputs = self.pad([prompt for prompt, _ in pairs])
        targets = self._targets([row for _, row in pairs])
        later = self._following(inputs, targets, self._pad_id())
        for name in ("input_ids", "position_ids"):
            later[name] = torch.cat([inputs[name], later[name]], dim=1)
        return later, targets

    def _targets(self, rows: Sequence[list[int]]) -> Tensor:
        """Token rows padded on the right with -100, [B, A]."""
        width = max(map(len, rows))
        return torch.tensor(
            [row + [-100] * (width - len(row)) for row in rows], device=self.device
        )

    def _following(
        self, inputs: dict[str, Tensor], targets: Tensor, fill: int = 0
    ) -> dict[str, Tensor]:
        """Inputs of a forward over the answer tokens [B, A] but the last, behind a prompt in the cache."""
        given = targets[:, :-1]
        steps = torch.arange(1, targets.shape[1], device=self.device)
        return {
            "input_ids": given.where(given >= 0, fill),
            "attention_mask": torch.cat(
                [inputs["attention_mask"], (given >= 0).long()], dim=1
            ),
            "position_ids": inputs["position_ids"][:, -1:] + steps,
        }

    def answer_nats(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy per answer token, [B], from the logits [B, A, V] that predict them, [B, A].

        Raises:
            NotFinite: Some is no number; :func:`posbench.model.guard.guarded` names the layer.
        """
        nats = _nats(finite(logits, targets >= 0).float(), targets).sum(1) / (
            targets >= 0
        ).sum(1)
        if not bool(torch.isfinite(nats.detach()).all()):
            raise NotFinite("the loss of an answer is NaN or infinite")
        return nats

    @contextmanager
    def last_attention(self) -> Iterator[dict[int, Tensor]]:
        """Collect the attention weights of the last token in each forward inside the block.

        Yields a dict layer -> weights [B, H, T] of the latest forward (post-softmax, float32 or better). A
        sliding-window layer that no longer holds all keys gives the newest T' < T. Memory is linear in T
        where the family allows it. Under attention_buckets there are B * N rows, those of the N bases
        next to each other.
        """
        weights: dict[int, Tensor] = {}

        def attend(module: Any, *given: Any, following: Attend, **rest: Any) -> Any:
            # The last row is computed once more in front of the kernel in use.
            query, key, _, mask = given
            weights[module.layer_idx] = last_row(query, key, mask, **rest)
            return following(module, *given, **rest)

        def read(module: Any, args: Any, output: tuple[Any, ...]) -> None:
            weights[module.layer_idx] = output[1][:, :, -1]

        with ExitStack() as stack:
            if families.family_of(self.model).interface:
                stack.enter_context(attending(self.model, attend))
            else:
                stack.enter_context(self.eager())
                for module in families.attention_modules(self.model):
                    stack.enter_context(module.register_forward_hook(read))
            yield weights

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Make families outside the library's attention functions compute, and return, all their weights."""

        def without_bias(
            _: nn.Module, args: Any, kwargs: dict[str, Any]
        ) -> tuple[Any, Any]:
            return args, kwargs | {"alibi": torch.zeros_like(kwargs["alibi"])}

        config = self.model.config
        family = families.family_of(self.model)
        with ExitStack() as stack:
            if (
                family.mask_has_bias
                and config.alibi
                and config._attn_implementation != "eager"
            ):
                modules = families.attention_modules(self.model)
                stack.enter_context(before_each(modules, None, lambda _: without_bias))
            stack.enter_context(
                replaced(config, "_attn_implementation_internal", "eager")
            )
            yield

    def _pad_id(self) -> int:
        known = [
            getattr(self.tokenizer, name, None)
            for name in ("pad_token_id", "eos_token_id")
        ]
        rows = self.model.get_input_embeddings().weight.shape[0]
        # Some tokenizers pad with a token that their model does not know; a padded place is never read.
        return next(
            (int(token) for token in known if token is not None and token < rows), 0
        )


def checking() -> LogitsProcessorList:
    """What lets ``generate`` stop at the first token whose logits are no numbers."""
    return transformers.LogitsProcessorList([lambda ids, scores: finite(scores)])


def _length(replies: Tensor, ends: list[int], fill: int) -> int:
    """Tokens of replies [B, T], their ends counted, and not what fills them up."""
    end = torch.isin(
        replies, torch.tensor(ends, dtype=replies.dtype, device=replies.device)
    )
    return int(((end.cumsum(1) - end.int() == 0) & (end | (replies != fill))).sum())


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each target token, [B, A], from logits [B, A, V]; 0 where an answer has ended."""
    return F.cross_entropy(
        logits.transpose(1, 2), targets, reduction="none", ignore_index=-100
    )


def batches(
    lengths: Sequence[int], size: int, tokens: int | None = None
) -> list[list[int]]:
    """Group prompts of similar length, longest first: little padding is needed, and memory errors come early.

    Depends on the ``lengths`` alone (tokens, those to come included): a resumed run forms the same batches
    and so gets the same numbers. A batch has at most ``size`` prompts and ``tokens``, padding included; a
    longer prompt is a batch of its own.
    """
    out: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        most = (
            min(size, max((tokens or 0) // lengths[out[-1][0]], 1) if tokens else size)
            if out
            else 0
        )
        if not out or len(out[-1]) >= most:
            out.append([])
        out[-1].append(index)
    return out
