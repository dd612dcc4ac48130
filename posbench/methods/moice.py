"""Attention under several RoPE bases at once, mixed by a router for every token and head (MoICE)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from safetensors import SafetensorError, safe_open

from posbench import paths
from posbench.errors import UserError
from posbench.files.sources import Source
from posbench.late import F, PreTrainedModel, Tensor, nn, torch
from posbench.methods.base import Method, Needs
from posbench.model import families, rope
from posbench.model.lm import LM
from posbench.model.rope import HandRotation, Table
from posbench.schema import Bases, Count

if TYPE_CHECKING:
    from posbench.methods.router import Router

BASES = (10000.0, 17500.0, 18000.0, 19000.0, 20000.0, 22500.0, 25000.0)
"""Bases of the released program."""

UNIFORM = "uniform"
_TRAIN = "train one: posbench search=router method=moice stages=[search] model={}"
_NAME = re.compile(r"layers\.(\d+)\..*\b(gate_[123]\.weight)$")


def mixture(logits: Tensor, top_k: int) -> Tensor:
    """Weights [..., N] in float32 or better that sum to 1: the largest ``top_k`` of a softmax."""
    weights = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    if top_k == logits.shape[-1]:
        return weights
    chosen = logits.topk(top_k, dim=-1).indices
    kept = torch.zeros_like(weights).scatter(-1, chosen, weights.gather(-1, chosen))
    return kept / kept.sum(-1, keepdim=True)


def auxiliary_loss(logits: Tensor, top_k: int) -> Tensor:
    """The loss that asks for balanced experts, ``N sum_e P_e sum_k f_ke``, from router logits [rows, N].

    P_e is the mean probability of expert e, f_ke the share of rows (of all layers, tokens and heads) whose
    k-th choice is e. With ``top_k`` = N, the released setting, the inner sum is 1 for each e: the loss is the
    constant N, its gradient is zero, and it says nothing to the router.
    """
    experts = logits.shape[-1]
    share = (
        F.one_hot(logits.topk(top_k, dim=-1).indices, experts).float().mean(0).sum(0)
    )
    return experts * (logits.float().softmax(-1).mean(0) * share).sum()


@contextmanager
def mixing(
    model: PreTrainedModel,
    routers: Mapping[int, Router] | None,
    bases: tuple[float | None, ...],
    top_k: int,
    listen: Callable[[int, Tensor], None] = lambda layer, logits: None,
) -> Iterator[None]:
    """Attend under every base (None: the model's own) and mix the outputs, for the duration of a block.

    Every token and head keeps ``top_k`` bases, chosen by the ``routers`` of the layers that rotate; None
    mixes all evenly. ``listen`` is called with a layer and its router logits [B, H, T, N].
    """
    made: dict[int, tuple[list[Table], list[Table]]] = {}
    latest: rope.Call | None = None

    def tables(r: HandRotation) -> tuple[list[Table], list[Table]]:
        nonlocal latest
        # Layers that hold the same keys share their tables within one forward.
        if latest is not r.call:
            latest = r.call
            made.clear()
        count = r.key.shape[2]
        same = r.query.shape[2] == r.key.shape[2]
        if count not in made:
            for_keys = [r.call.table(r.key_positions, base) for base in bases]
            for_queries = (
                for_keys
                if same
                else [r.call.table(r.query_positions, base) for base in bases]
            )
            made[count] = for_queries, for_keys
        return made[count]

    def attend(r: HandRotation) -> Tensor:
        mixed: Tensor | None = None
        for_queries, for_keys = tables(r)
        pairs = zip(
            r.rotate_by_each(r.query, for_queries),
            r.rotate_by_each(r.key, for_keys),
            strict=True,
        )
        for number, (query, key) in enumerate(pairs):
            if mixed is None:
                weights = weigh(r.layer, query)
            # The output comes as [B, T, H, d]; weights in float32 keep their sum 1.
            weight = weights[..., number].transpose(1, 2)[..., None]
            out = r.attend(query, key)
            mixed = (
                weight * out
                if mixed is None
                else mixed.addcmul_(weight, out.to(mixed.dtype))
            )
        assert mixed is not None, "check() asks for one base or more"
        return mixed.to(r.query.dtype)

    def weigh(layer: int, query: Tensor) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        if routers is None:
            return query.new_full(
                (*query.shape[:3], len(bases)), 1 / len(bases), dtype=exact
            )
        logits = routers[layer].to(query.device, exact)(query.to(exact))
        listen(layer, logits)
        return mixture(logits, top_k)

    with rope.by_hand(model, dict.fromkeys(rope.rotated_layers(model), attend)):
        yield


@dataclass(frozen=True, kw_only=True)
class MoICE(Method):
    """Run attention once per RoPE base and mix the outputs, with weights of a router for every token and
    head.

    The router sees the query rotated with the first base; a softmax over the N bases gives the weights, of
    which the largest ``top_k`` are kept and rescaled to sum 1. Keys stay un-rotated in the cache and are
    rotated N times at every step. All N attentions are computed whatever ``top_k`` is.
    :meth:`posbench.model.lm.LM.last_attention` sees the attention of the last base, not the mixture.

    Args:
        weights: A safetensors file with the trained router (``search=router`` makes one; a checkpoint of the
            released program is read too), or ``uniform``: no router, all bases count the same.
        bases: The N bases theta; null (None) is the model's own.
        top_k: Bases that a token and head keeps, 1 to N.

    Source: Lin et al., NeurIPS 2024 (MoICE); released program p1nksnow/MoICE, e14b5a3.
    Differs from source: batches with left padding; any attention kernel (released: flash attention alone).
    """

    needs: ClassVar[Needs] = Needs(rope=True, plain=True, by_hand=True)

    weights: str | None = None
    bases: Bases = BASES
    top_k: Count = 7

    @classmethod
    def files(cls, values: Mapping[str, Any]) -> tuple[Source, ...]:
        """See :meth:`Method.files`: the router."""
        path = values.get("weights")
        return (
            ()
            if path in (None, UNIFORM)
            else (Source(kind="path", id=str(path), field="weights"),)
        )

    def check(self, lm: LM) -> None:
        """See :meth:`Method.check`; a router has to be there, and to fit the model."""
        super().check(lm)
        count = len(self.bases)
        if self.weights is None:
            allowed = f"a safetensors file with a trained router, or {UNIFORM}"
            hint = f"{_TRAIN.format(lm.name)}; {UNIFORM} needs none"
            raise UserError("method.weights", None, allowed, hint)
        if self.top_k > count or (self.weights == UNIFORM and self.top_k < count):
            even = f"{count} with method.weights={UNIFORM}, as no base is preferred"
            allowed = even if self.weights == UNIFORM else f"1 to {count}, the bases"
            raise UserError(
                "method.top_k", self.top_k, allowed, f"set method.top_k={count}"
            )
        if self.weights != UNIFORM:
            load_routers(lm, self.weights, count)

    @classmethod
    def example(cls, lm: LM) -> Self:
        """An even mixture, which needs no router."""
        return cls(weights=UNIFORM)

    def neutral(self) -> Self:
        """The model's own base, as often as there are bases: whatever the weights, their sum is 1."""
        return replace(self, bases=(None,) * len(self.bases))

    def changed(self, lm: LM) -> AbstractContextManager[None]:
        """See :meth:`Method.changed`."""
        routers = (
            None
            if self.weights == UNIFORM
            else load_routers(lm, str(self.weights), len(self.bases))
        )
        return mixing(lm.model, routers, self.bases, self.top_k)


def new_routers(model: PreTrainedModel, experts: int) -> dict[int, Router]:
    """Random routers for the layers that rotate, as the released program starts: normal, std 0.02."""
    from posbench.methods.router import Router

    config = families.text_config(model)
    width = (
        getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    routers = {layer: Router(width, experts) for layer in rope.rotated_layers(model)}
    for router in routers.values():
        for parameter in router.parameters():
            nn.init.normal_(parameter, std=0.02)
    return routers


def save_routers(
    routers: Mapping[int, Router], file: Path, metadata: Mapping[str, object]
) -> None:
    """Write routers under the tensor names of the released program, with metadata as one JSON text."""
    from safetensors.torch import save_file

    tensors = {
        f"model.layers.{layer}.self_attn.{name}": value.detach()
        .float()
        .cpu()
        .contiguous()
        for layer, router in routers.items()
        for name, value in router.state_dict().items()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    # Safetensors writes several entries in an order of chance; one gives the same bytes every time.
    save_file(tensors, file, {"training": json.dumps(metadata)})


def load_routers(lm: LM, path: str, experts: int) -> dict[int, Router]:
    """Read the routers of a model for so many bases; ``posbench://NAME/FILE`` is a file of an embedded model.

    Raises:
        UserError: The file cannot be read, or does not fit the model.
    """

    def refuse(allowed: str) -> UserError:
        return UserError("method.weights", path, allowed, _TRAIN.format(lm.name))

    file = Path(paths.model_path(path))
    found = dict[int, dict[str, torch.Tensor]]()
    try:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, it is no mapping
                if match := _NAME.search(name):
                    found.setdefault(int(match[1]), {})[match[2]] = tensors.get_tensor(
                        name
                    )
    except (OSError, SafetensorError) as error:
        raise refuse(f"a readable safetensors file ({error})") from error
    routers = new_routers(lm.model, experts)
    for layer, router in routers.items():
        wanted = {
            name: tuple(value.shape) for name, value in router.state_dict().items()
        }
        given = {
            name: tuple(value.shape) for name, value in found.get(layer, {}).items()
        }
        if wanted != given:
            raise refuse(
                f"gates of layer {layer} with shapes {wanted}; the file has {given}"
            )
        router.load_state_dict(found[layer])
    return routers
