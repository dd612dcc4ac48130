"""Attention under several RoPE bases at once, mixed by a router for every token and head (MoICE)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from posbench import paths
from posbench.errors import UserError
from posbench.files.sources import Source
from posbench.late import F, PreTrainedModel, Tensor, nn, safetensors, torch
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
_TRAIN_HINT = "train one: posbench search=router method=moice stages=[search] model={}"
_TENSOR_NAME = re.compile(r"layers\.(\d+)\..*\b(gate_[123]\.weight)$")


def mixture_weights(logits: Tensor, top_k: int) -> Tensor:
    """Weights of the bases: the largest ``top_k`` of a softmax, rescaled to sum 1.

    Args:
        logits: Router logits, shape (..., N).
        top_k: Bases that keep a weight.

    Returns:
        Shape (..., N), float32 or better.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    weights = logits.to(dtype).softmax(-1)
    if top_k == logits.shape[-1]:
        return weights
    chosen = logits.topk(top_k, dim=-1).indices
    largest = weights.gather(-1, chosen)
    sparse = torch.zeros_like(weights).scatter(-1, chosen, largest)
    return sparse / sparse.sum(-1, keepdim=True)


def auxiliary_loss(logits: Tensor, top_k: int) -> Tensor:
    """The loss that asks for balanced experts, ``N sum_e P_e sum_k f_ke``.

    P_e is the mean probability of expert e, f_ke the share of rows whose k-th choice is e. With ``top_k`` =
    N, the released setting, the inner sum is 1 for each e: the loss is the constant N, its gradient is zero,
    and it says nothing to the router.

    Args:
        logits: Router logits, shape (rows, N), a row for each layer, token and head.
        top_k: Bases that keep a weight.

    Returns:
        A scalar.
    """
    num_experts = logits.shape[-1]
    choices = logits.topk(top_k, dim=-1).indices
    shares = F.one_hot(choices, num_experts).float().mean(0).sum(0)
    probabilities = logits.float().softmax(-1).mean(0)
    return num_experts * (probabilities * shares).sum()


@contextmanager
def mixed_attention(
    model: PreTrainedModel,
    routers: Mapping[int, Router] | None,
    bases: tuple[float | None, ...],
    top_k: int,
    listen: Callable[[int, Tensor], None] = lambda layer, logits: None,
) -> Iterator[None]:
    """Attend under every base and mix the outputs, for the duration of a block.

    Args:
        model: The model.
        routers: By layer, for those that rotate; None mixes all bases evenly.
        bases: The N bases; None is the model's own.
        top_k: Bases that a token and head keeps.
        listen: Called with a layer and its router logits, shape (B, H, T, N).
    """
    # For the rotary call of the latest forward: tables of queries and keys under each base, by number of keys.
    table_cache: dict[int, tuple[list[Table], list[Table]]] = {}
    latest_call: rope.RotaryCall | None = None

    def tables(rotation: HandRotation) -> tuple[list[Table], list[Table]]:
        nonlocal latest_call
        call = rotation.call
        if latest_call is not call:
            latest_call = call
            table_cache.clear()
        # Layers that hold the same keys share their tables within one forward.
        num_keys = rotation.key.shape[2]
        if num_keys not in table_cache:
            key_tables = [call.table(rotation.key_positions, base) for base in bases]
            query_tables = key_tables
            if rotation.query.shape[2] != num_keys:
                positions = rotation.query_positions
                query_tables = [call.table(positions, base) for base in bases]
            table_cache[num_keys] = query_tables, key_tables
        return table_cache[num_keys]

    def attend(rotation: HandRotation) -> Tensor:
        query_tables, key_tables = tables(rotation)
        queries = rotation.rotate_by_each(rotation.query, query_tables)
        keys = rotation.rotate_by_each(rotation.key, key_tables)
        mixed: Tensor | None = None
        for index, (query, key) in enumerate(zip(queries, keys, strict=True)):
            if mixed is None:
                weights = weigh(rotation.layer, query)
            # The output comes as [B, T, H, d]; weights in float32 keep their sum 1.
            weight = weights[..., index].transpose(1, 2)[..., None]
            output = rotation.attend(query, key)
            if mixed is None:
                mixed = weight * output
            else:
                mixed.addcmul_(weight, output.to(mixed.dtype))
        assert mixed is not None, "check() asks for one base or more"
        return mixed.to(rotation.query.dtype)

    def weigh(layer: int, query: Tensor) -> Tensor:
        """Weights (B, H, T, N) from queries (B, H, T, d) that are rotated with the first base."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        if routers is None:
            shape = (*query.shape[:3], len(bases))
            return query.new_full(shape, 1 / len(bases), dtype=dtype)
        logits = routers[layer].to(query.device, dtype)(query.to(dtype))
        listen(layer, logits)
        return mixture_weights(logits, top_k)

    with rope.rotating_by_hand(
        model, dict.fromkeys(rope.rotated_layers(model), attend)
    ):
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
        bases: The N bases theta; null (None) is the model's own. The released ones were made for models of base 10,000:
            in others they may reach less far than the prompts (:func:`posbench.model.rope.reach`).
        top_k: Bases that a token and head keeps, 1 to N.

    Source: Lin et al., NeurIPS 2024 (MoICE); released program p1nksnow/MoICE, e14b5a3.
    Differs from source: batches with left padding; any attention kernel (released: flash attention alone).
    """

    needs: ClassVar[Needs] = Needs(rope=True, plain=True, by_hand=True)
    untrained: ClassVar[Mapping[str, Any]] = {"weights": UNIFORM}

    weights: str | None = None
    bases: Bases = BASES
    top_k: Count = 7

    @classmethod
    def files(cls, values: Mapping[str, Any]) -> tuple[Source, ...]:
        """The file of the router; see :meth:`Method.files`."""
        path = values.get("weights")
        if path in (None, UNIFORM):
            return ()
        return (Source(kind="path", id=str(path), field="weights"),)

    def check(self, lm: LM) -> None:
        """Refuse a model without RoPE, missing weights, a top_k over the number of bases, routers of another model.

        Raises:
            UserError: States which.
        """
        super().check(lm)
        num_bases = len(self.bases)
        if self.weights is None:
            allowed = f"a safetensors file with a trained router, or {UNIFORM}"
            hint = f"{_TRAIN_HINT.format(lm.name)}; {UNIFORM} needs none"
            raise UserError("method.weights", None, allowed, hint)
        is_uniform = self.weights == UNIFORM
        if self.top_k > num_bases or (is_uniform and self.top_k < num_bases):
            allowed = f"1 to {num_bases}, the bases"
            if is_uniform:
                allowed = f"{num_bases} with method.weights={UNIFORM}, as no base is preferred"
            hint = f"set method.top_k={num_bases}"
            raise UserError("method.top_k", self.top_k, allowed, hint)
        if not is_uniform:
            load_routers(lm, self.weights, num_bases)

    @classmethod
    def example(cls, lm: LM) -> Self:
        """An even mixture, which needs no router."""
        return cls(weights=UNIFORM)

    def neutral(self) -> Self:
        """The model's own base, as often as there are bases: whatever the weights, their sum is 1."""
        return replace(self, bases=(None,) * len(self.bases))

    def caution(self, lm: LM, tokens: int) -> str:
        """See :meth:`Method.caution`."""
        return rope.caution_about_bases(lm, self.bases, tokens)

    def changed(self, lm: LM) -> AbstractContextManager[None]:
        """See :meth:`Method.changed`."""
        routers = None
        if self.weights != UNIFORM:
            routers = load_routers(lm, str(self.weights), len(self.bases))
        return mixed_attention(lm.model, routers, self.bases, self.top_k)


def new_routers(model: PreTrainedModel, experts: int) -> dict[int, Router]:
    """Return random routers for the layers that rotate, by layer, as the released program starts: normal, std 0.02.

    Args:
        model: The model.
        experts: Number of bases that a router chooses among.
    """
    from posbench.methods.router import Router

    config = families.text_config(model)
    head_width = getattr(config, "head_dim", None)
    if not head_width:
        head_width = config.hidden_size // config.num_attention_heads
    layers = rope.rotated_layers(model)
    routers = {layer: Router(head_width, experts) for layer in layers}
    for router in routers.values():
        for parameter in router.parameters():
            nn.init.normal_(parameter, std=0.02)
    return routers


def save_routers(
    routers: Mapping[int, Router], file: Path, metadata: Mapping[str, object]
) -> None:
    """Write routers to a safetensors file under the tensor names of the released program.

    Args:
        routers: Routers by layer.
        file: The file.
        metadata: Facts of the training, stored as one JSON text.
    """
    from safetensors.torch import save_file

    tensors = {}
    for layer, router in routers.items():
        for name, value in router.state_dict().items():
            full_name = f"model.layers.{layer}.self_attn.{name}"
            tensors[full_name] = value.detach().float().cpu().contiguous()
    file.parent.mkdir(parents=True, exist_ok=True)
    # Safetensors writes several entries in an order of chance; one gives the same bytes every time.
    save_file(tensors, file, {"training": json.dumps(metadata)})


def load_routers(lm: LM, path: str, experts: int) -> dict[int, Router]:
    """Read the routers of a model from a file.

    Args:
        lm: The model.
        path: A safetensors file; ``posbench://NAME/FILE`` is a file of a model that posbench ships.
        experts: Number of RoPE bases that a router weighs.

    Returns:
        The routers by layer.

    Raises:
        UserError: The file cannot be read, or does not fit the model.
    """
    field = "method.weights"
    hint = _TRAIN_HINT.format(lm.name)
    try:
        gates = _read_gates(Path(paths.model_path(path)))
    except (OSError, safetensors.SafetensorError) as error:
        allowed = f"a readable safetensors file ({error})"
        raise UserError(field, path, allowed, hint) from error
    routers = new_routers(lm.model, experts)
    for layer, router in routers.items():
        expected = _shapes(router.state_dict())
        actual = _shapes(gates.get(layer, {}))
        if actual != expected:
            allowed = (
                f"gates of layer {layer} with shapes {expected}; the file has {actual}"
            )
            raise UserError(field, path, allowed, hint)
        router.load_state_dict(gates[layer])
    return routers


def _read_gates(file: Path) -> dict[int, dict[str, Tensor]]:
    """Return the weights of the routers in a safetensors file, by layer and parameter name."""
    gates: dict[int, dict[str, Tensor]] = {}
    with safetensors.safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118, it is no mapping
            match = _TENSOR_NAME.search(name)
            if match:
                layer = int(match[1])
                gates.setdefault(layer, {})[match[2]] = tensors.get_tensor(name)
    return gates


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}
