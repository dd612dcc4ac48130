"""The least that forks of prompts cost: a loop written by hand for models of Llama's form.

It has no padding, no hooks and no attention kernel of a library: each shared prefix is computed once, and all settings
of scale_channel go on together from the keys and values of their prompt. Its numbers are posbench's up to
rounding; its time is the measure for posbench's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from posbench.late import F, PreTrainedModel, Tensor, inference_mode, torch
from posbench.methods import ScaleChannel
from posbench.model.store import build_prefix_trie

MODEL_TYPES = ("llama", "mistral")
"""Families of this form: grouped keys, no biases, one rotary embedding, full attention."""


def is_of_loop(model: PreTrainedModel) -> bool:
    """Whether a model has the form of :class:`PackedLoop`."""
    return model.config.model_type in MODEL_TYPES


class PackedLoop:
    """B prompts under M settings of scale_channel, all of the same layers; rows are ordered by prompt.

    Args:
        model: A model of one of :data:`MODEL_TYPES`.
        prompts: Token ids of each prompt.
        settings: The settings; factor 1 is the unmodified model.

    Attributes:
        tokens: Number of tokens that the loop computes, including the first forward after the prefill.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[ScaleChannel],
    ) -> None:
        self._model = model
        self._layers = list(model.model.layers)  # type: ignore[arg-type]
        self._prompts = [list(prompt) for prompt in prompts]
        self._lengths = [len(prompt) - 1 for prompt in prompts]
        self._scaled = settings[0].layer_indices
        device = model.device
        self._factors = torch.tensor([s.factor for s in settings], device=device)
        self._channels = torch.tensor([s.channels[0] for s in settings], device=device)
        attention = self._layers[0].self_attn
        self._head_size = attention.head_dim
        self._key_heads = attention.k_proj.out_features // self._head_size
        # By layer and prompt: keys [G, d, P], values [G, P, d], and by channel scaled keys [G, d, P].
        self._keys: list[list[Tensor]] = []
        self._values: list[list[Tensor]] = []
        self._terms: list[list[dict[int, Tensor]]] = []
        # By layer, the keys and values of the rows' own tokens, [R, n, G, d].
        self._own: list[tuple[Tensor, Tensor] | None] = [None] * len(self._layers)
        self._prefill()

    @inference_mode
    def replies(self, new_tokens: int) -> Tensor:
        """Return the greedy replies of ``new_tokens`` tokens to each prompt under each setting, [B * M, new_tokens]."""
        last = torch.tensor([p[-1:] for p in self._prompts], device=self._model.device)
        tokens = last.repeat_interleave(len(self._factors), 0)
        replies = []
        for _ in range(new_tokens):
            tokens = self._forward(tokens)[:, -1:].argmax(-1)
            replies.append(tokens)
        return torch.cat(replies, dim=1)

    @inference_mode
    def losses(self, answer: Sequence[int]) -> Tensor:
        """Return the mean loss of an answer after each prompt under each setting, nats per token, [B * M].

        Args:
            answer: Token ids of the answer.
        """
        rows = [
            [prompt[-1], *answer[:-1]]
            for prompt in self._prompts
            for _ in self._factors
        ]
        logits = self._forward(torch.tensor(rows, device=self._model.device)).float()
        targets = torch.tensor(answer, device=logits.device).expand(len(rows), -1)
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(
            1
        )

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        weight = self._model.lm_head.weight
        cos, sin = self._model.model.rotary_emb(weight, positions[None])  # type: ignore[operator, union-attr]
        return cos[0], sin[0]

    @inference_mode
    def _prefill(self) -> None:
        """Compute all tokens but the last of each prompt, shared prefixes once, without any scaling.

        Fills ``_keys``, ``_values`` and, for scaled layers, ``_terms``: what scaling a channel by 2 would add to keys.
        """
        prompts = [prompt[:-1] for prompt in self._prompts]
        trie = build_prefix_trie(prompts)
        self.tokens = trie.size + len(prompts) * len(self._factors)
        slots = [torch.from_numpy(slots) for slots in trie.token_slots]
        weight = self._model.lm_head.weight
        shape = (self._key_heads, trie.size, self._head_size)
        keys = [weight.new_empty(shape) for _ in self._layers]
        values = [weight.new_empty(shape) for _ in self._layers]
        channels = self._channels.unique()
        inputs = [weight.new_empty(trie.size, len(channels)) for _ in self._layers]
        # Each segment attends to the stored tokens before it and to itself.
        for segment in trie.segments:
            ids = torch.tensor(prompts[segment.prompt][segment.start :])
            past = slots[segment.prompt][: segment.start]
            new = slots[segment.prompt][segment.start :]
            seen = len(past) + torch.arange(len(new))
            cos, sin = self._rotation(seen.to(weight.device))
            open_keys = torch.arange(len(past) + len(new)) <= seen[:, None]
            x = self._model.model.embed_tokens(ids.to(weight.device))  # type: ignore[operator, union-attr]
            # Transformer layers, by hand.
            for number, layer in enumerate(self._layers):
                h = layer.input_layernorm(x)
                inputs[number][new] = h[:, channels]
                key = _rotated(self._heads(layer.self_attn.k_proj(h)), cos, sin)
                value = self._heads(layer.self_attn.v_proj(h))
                keys[number][:, new], values[number][:, new] = key, value
                # After the last layer's keys and values nothing else is needed.
                if number == len(self._layers) - 1:
                    break
                query = _rotated(self._heads(layer.self_attn.q_proj(h)), cos, sin)
                all_keys = torch.cat([keys[number][:, past], key], dim=1)
                all_values = torch.cat([values[number][:, past], value], dim=1)
                output = F.scaled_dot_product_attention(
                    query[None],
                    all_keys[None],
                    all_values[None],
                    attn_mask=open_keys.to(x.device) if len(past) else None,
                    is_causal=not len(past),
                    enable_gqa=True,
                )[0]
                output = output.transpose(0, 1).flatten(1)
                x = x + layer.self_attn.o_proj(output)
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        for number, layer in enumerate(self._layers):
            self._keys.append(
                [
                    keys[number][:, prompt_slots].mT.contiguous()
                    for prompt_slots in slots
                ]
            )
            self._values.append(
                [values[number][:, prompt_slots] for prompt_slots in slots]
            )
            self._terms.append([{} for _ in slots])
            if number not in self._scaled:
                continue
            for terms, prompt_slots in zip(self._terms[number], slots, strict=True):
                cos, sin = self._rotation(
                    torch.arange(len(prompt_slots), device=weight.device)
                )
                for index, channel in enumerate(channels.tolist()):
                    # A channel's part of the keys is its value times this column.
                    column = layer.self_attn.k_proj.weight[:, channel]
                    column = column.view(-1, 1, self._head_size)
                    term = (
                        _rotated(column, cos, sin)
                        * inputs[number][prompt_slots, index, None]
                    )
                    terms[channel] = term.mT.contiguous()

    def _heads(self, states: Tensor) -> Tensor:
        """Projected states [n, H * d] as [H, n, d]."""
        return states.unflatten(-1, (-1, self._head_size)).transpose(0, 1)

    def _forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [B * M, t, V] of tokens [B * M, t] that follow the ones computed so far."""
        rows, num_tokens = tokens.shape
        prompts, settings = len(self._prompts), len(self._factors)
        # Tokens of the replies that were computed in earlier steps.
        before = 0 if self._own[0] is None else self._own[0][0].shape[1]
        steps = before + torch.arange(num_tokens, device=tokens.device)
        starts = torch.tensor(self._lengths, device=tokens.device)
        positions = (starts[:, None] + steps).repeat_interleave(settings, 0)
        cos, sin = self._rotation(positions.flatten())
        cos, sin = (table.view(rows, num_tokens, 1, -1) for table in (cos, sin))
        row_channels = self._channels.repeat(prompts)
        row_factors = self._factors.repeat(prompts)[:, None]
        every_row = torch.arange(rows, device=tokens.device)
        later_tokens = torch.ones(num_tokens, before + num_tokens, device=tokens.device)
        later_tokens = later_tokens.triu(before + 1).bool()
        shape = (rows, num_tokens, -1, self._head_size)
        x = self._model.model.embed_tokens(tokens)  # type: ignore[operator, union-attr]
        for number, layer in enumerate(self._layers):
            h = layer.input_layernorm(x)
            scaled = h
            if number in self._scaled:
                scaled = h.clone()
                scaled[every_row, :, row_channels] *= row_factors
            attention = layer.self_attn
            query = _rotated(attention.q_proj(scaled).view(shape), cos, sin)
            key = _rotated(attention.k_proj(scaled).view(shape), cos, sin)
            value = attention.v_proj(h).view(shape)
            # Keys and values of the replies' own tokens, which no other row shares.
            own = self._own[number]
            if own is not None:
                key, value = torch.cat([own[0], key], 1), torch.cat([own[1], value], 1)
            self._own[number] = key, value

            query = query / math.sqrt(self._head_size)
            # [B, G, M, R t, d] for R query heads of a key head
            query = query.view(
                prompts, settings, num_tokens, self._key_heads, -1, self._head_size
            )
            query = query.permute(0, 3, 1, 4, 2, 5)
            own_keys, own_values = (
                states.view(
                    prompts, settings, -1, self._key_heads, self._head_size
                ).permute(0, 3, 1, 2, 4)
                for states in (key, value)
            )
            own_scores = query.flatten(3, 4) @ own_keys.mT
            if num_tokens > 1:
                by_token = own_scores.unflatten(3, (-1, num_tokens))
                own_scores = by_token.masked_fill(later_tokens, -math.inf).flatten(3, 4)
            # Shared keys are read once for all settings of a prompt.
            outputs = []
            for prompt in range(prompts):
                queries = query[prompt].flatten(2, 3)
                scores = _product(queries, self._keys[number][prompt])
                for channel, term in self._terms[number][prompt].items():
                    members = self._channels == channel
                    # Scaling a channel by f adds f - 1 times its part of the keys.
                    factors = (self._factors[members] - 1)[:, None, None]
                    scores[:, members] += _product(queries[:, members] * factors, term)
                past = scores.shape[-1]
                weights = torch.cat([scores, own_scores[prompt]], -1).softmax(-1)
                output = _product(weights[..., :past], self._values[number][prompt])
                outputs.append(output + weights[..., past:] @ own_values[prompt])
            output = torch.stack(outputs).unflatten(3, (-1, num_tokens))
            output = output.permute(0, 2, 4, 1, 3, 5).reshape(rows, num_tokens, -1)
            x = x + attention.o_proj(output)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self._model.lm_head(self._model.model.norm(x))  # type: ignore[operator, union-attr]


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys [..., d] with rotary position embedding."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


def _product(rows: Tensor, shared: Tensor) -> Tensor:
    """Product [G, M, n, k] of [G, M, n, j] and [G, j, k], which all M share."""
    return (rows.flatten(1, 2) @ shared).unflatten(1, rows.shape[1:3])
