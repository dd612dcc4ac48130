"""Influence of a prompt's tokens on its last one: by the model's structure alone, by its attention, by its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from posbench.late import Tensor, inference_mode, nn, torch
from posbench.measure.flow import attention_rows
from posbench.model import families
from posbench.model.guard import check_finite, guarded
from posbench.model.hooks import pre_hooks
from posbench.model.lm import LM
from posbench.stats.bootstrap import Array

FIXED_SHARES = (0.5, 1.0)
"""Shares of attention beside the measured ones: Abnar and Zuidema 2020, and Wu et al. 2025 (no residual stream)."""


class Influence(NamedTuple):
    """Influence on the last token of a prompt, which sums to 1 over all tokens.

    Attributes:
        shares: Share of attention of each layer, [L]: the mean over tokens of |a| / (|x| + |a|), x being the layer's
            input and a what attention adds to it.
        structure: Of each target under attention that sees mask and ALiBi alone, [1 + F, C]: with the measured shares,
            then with each of :data:`FIXED_SHARES` in all layers.
        attention: The same under the model's own attention, mean over heads.
        gradient: Of each target, [C]: length of the gradient of the likeliest next token's probability at the embedding
            of a token, as a share of the sum over all tokens.
    """

    shares: Array
    structure: Array
    attention: Array
    gradient: Array


@guarded
def influence(lm: LM, ids: Sequence[int], targets: Array) -> Influence:
    """Measure the influence of parts of a prompt on its last token.

    Rollouts carry their product with the targets from layer to layer, so that memory is linear in the tokens (families
    that compute whole maps themselves, MPT and Falcon, hold one layer's). Where a method runs several rows for a prompt
    (attention_buckets), these are averaged; where it attends several times in a layer (moice), the last time counts.

    Args:
        lm: The model, with L layers.
        ids: Token ids of the prompt, n of them.
        targets: Weight of each token in each of C targets, [n, C].
    """
    columns = torch.from_numpy(np.ascontiguousarray(targets, dtype=np.float64))
    measured = _Rollout(columns)
    embeddings: list[Tensor] = []

    def keep(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1]

    with ExitStack() as stack:
        stack.enter_context(_following(lm, measured))
        stack.enter_context(lm.model.get_input_embeddings().register_forward_hook(keep))
        stack.enter_context(torch.enable_grad())
        logits = lm.model(**lm.pad([ids]), use_cache=False, logits_to_keep=1).logits
        # Of its logarithm, whose gradient has the same direction and does not vanish where the model is sure.
        likeliest = check_finite(logits)[0, -1].double().log_softmax(-1).max()
        (gradient,) = torch.autograd.grad(likeliest, embeddings)
    lengths = gradient[0].double().norm(dim=-1).cpu()
    shares = np.array(measured.shares)
    return Influence(
        shares=shares,
        structure=_structure(lm, ids, columns, shares),
        attention=measured.last_token(),
        gradient=((lengths / lengths.sum()) @ columns).numpy(),
    )


@inference_mode
def _structure(lm: LM, ids: Sequence[int], columns: Tensor, shares: Array) -> Array:
    """The rollout of attention without content, [1 + F, C]; arguments as of :func:`influence`."""
    alone = _Rollout(columns, shares)
    with without_scores(lm), _following(lm, alone):
        lm.model(**lm.pad([ids]), use_cache=False, logits_to_keep=1)
    return alone.last_token()


@contextmanager
def without_scores(lm: LM) -> Iterator[None]:
    """Make all queries 0 inside a block, so that attention follows the mask and ALiBi alone."""

    def silence(rows: Tensor | None, _: nn.Module, args: Any, output: Tensor) -> Tensor:
        if rows is None:
            return torch.zeros_like(output)
        return output.index_fill(-1, rows.to(output.device), 0)

    with ExitStack() as stack:
        for layer in range(lm.layers):
            for name, rows in families.query_key_rows(lm.model, layer).items():
                projection = lm.model.get_submodule(name)
                hook = partial(silence, rows)
                stack.enter_context(projection.register_forward_hook(hook))
        yield


class _Rollout:
    """The rollout of one prompt times the targets, carried through the layers.

    Args:
        targets: Weight of each token in each target, [n, C].
        shares: Measured share of attention of each layer, [L]; None: they are measured on the way.
    """

    def __init__(self, targets: Tensor, shares: Array | None = None) -> None:
        self._given = shares
        self.shares: list[float] = []
        # [rows of the prompt, 1 + F, n, C], before the current layer; attended once through it.
        self._state = targets.expand(1, 1 + len(FIXED_SHARES), *targets.shape)
        self._attended = self._state
        self._input = targets

    def enter_layer(self, stream: Tensor) -> None:
        """Take the residual stream [B, n, D] before a layer."""
        self._input = stream.detach()

    @inference_mode
    def attend(self, blocks: Iterable[tuple[int, Tensor]]) -> None:
        """Take the attention of the layer, in blocks as :func:`posbench.measure.flow.attention_rows` yields them."""
        parts = []
        for _, weights in blocks:
            self._state = self._state.to(weights.device)
            parts.append(weights.mean(1).double()[:, None] @ self._state)
        self._attended = torch.cat(parts, dim=2)

    @inference_mode
    def add(self, attention: Tensor) -> None:
        """Take what the attention of the layer adds to the stream, [B, n, D], and pass the layer."""
        if self._given is None:
            added = attention.double().norm(dim=-1)
            kept = self._input.to(attention.device).double().norm(dim=-1)
            self.shares.append(float((added / (kept + added)).mean()))
        else:
            self.shares.append(float(self._given[len(self.shares)]))
        share = torch.tensor(
            [self.shares[-1], *FIXED_SHARES],
            dtype=torch.float64,
            device=self._attended.device,
        ).view(-1, 1, 1)
        self._state = (1 - share) * self._state + share * self._attended

    def last_token(self) -> Array:
        """Weight of the last token on each target, [1 + F, C]."""
        weights: Array = self._state[:, :, -1].mean(0).cpu().numpy()
        return weights


@contextmanager
def _following(lm: LM, rollout: _Rollout) -> Iterator[None]:
    """Pass attention and residual stream of each layer of a forward inside the block to a rollout."""

    def enter(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        rollout.enter_layer(families.attention_input(args, kwargs))

    def read(
        layer: int, query: Tensor, key: Tensor, mask: Any, **settings: Any
    ) -> None:
        rollout.attend(attention_rows(query.detach(), key.detach(), mask, **settings))

    def read_map(layer: int, weights: Tensor) -> None:
        rollout.attend([(0, weights.detach().float())])

    def add(_: nn.Module, args: Any, output: Any) -> None:
        added = output[0] if isinstance(output, tuple) else output
        rollout.add(added.detach())

    layers = families.decoder_layers(lm.model)
    with ExitStack() as stack:
        stack.enter_context(pre_hooks(layers, None, lambda _: enter))
        stack.enter_context(lm.reading_attention(read, read_map))
        for module in families.attention_output_modules(lm.model):
            stack.enter_context(module.register_forward_hook(add))
        yield
