"""A method inside the checkpoint itself: scaled columns of projections, and another rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from posbench.errors import UserError
from posbench.late import PreTrainedConfig, Tensor, nn, torch
from posbench.methods.base import Folded
from posbench.model import families
from posbench.model.lm import LM


def columns(
    lm: LM, folded: Folded
) -> dict[str, tuple[Tensor | None, Mapping[int, float]]]:
    """What to scale: by the dotted name of a projection, its rows (None: all) and factors by channel."""
    found: dict[str, tuple[Tensor | None, Mapping[int, float]]] = {}
    for layer, factors in folded.columns.items():
        found |= {
            name: (rows, factors)
            for name, rows in families.query_key_rows(lm.model, layer).items()
        }
    return found


@contextmanager
def scaled_weights(lm: LM, folded: Folded) -> Iterator[None]:
    """Inside the block the projections of the model have scaled columns; afterwards they are as before.

    Raises:
        UserError: The weights are quantised, offloaded, or shared with a module that must not change.
    """
    planned = columns(lm, folded)
    kept = list[tuple[nn.Parameter, int, Tensor]]()
    weights = {name: _weight(lm, name) for name in planned}
    _need_own(lm, weights)
    try:
        with torch.no_grad():
            for name, (rows, factors) in planned.items():
                for channel, factor in factors.items():
                    column = weights[name][:, channel]
                    kept.append((weights[name], channel, column.clone()))
                    exact = column.to(torch.promote_types(column.dtype, torch.float32))
                    exact[slice(None) if rows is None else rows] *= factor
                    weights[name][:, channel] = exact.to(column.dtype)
        yield
    finally:
        with torch.no_grad():
            for weight, channel, column in reversed(kept):
                weight[:, channel] = column


def _weight(lm: LM, name: str) -> nn.Parameter:
    """The weight matrix of a projection, whose columns are the channels of its input."""
    module = lm.model.get_submodule(name)
    plain = type(module) is nn.Linear or type(module).__name__ == "FalconLinear"
    if not plain or module.weight.is_meta:
        kind = "offloaded weights" if plain else f"{type(module).__name__} weights"
        allowed = (
            f"weights in memory that are plain numbers; {name} of {lm.name} has {kind}"
        )
        raise UserError(
            "--to", "checkpoint", allowed, "--to lora, which leaves them as they are"
        )
    return module.weight


def _need_own(lm: LM, weights: Mapping[str, nn.Parameter]) -> None:
    """Refuse weights that another module shares, which would then change, too."""
    ours = {id(weight): name for name, weight in weights.items()}
    for other, weight in lm.model.named_parameters(remove_duplicate=False):
        name = ours.get(id(weight), "")
        if name and other != f"{name}.weight":
            allowed = f"projections of their own; {name} of {lm.name} shares its weights with {other}"
            raise UserError(
                "--to",
                "checkpoint",
                allowed,
                "--to lora, which leaves them as they are",
            )


def column(lm: LM, name: str, channel: int) -> Tensor:
    """A column of a projection's weights, [rows], float32 or better, also of quantised and adapted ones: what
    it makes of a unit vector beyond what it makes of zero."""
    module = lm.model.get_submodule(name)
    if type(module) is nn.Linear and not module.weight.is_meta:
        given = module.weight[:, channel]
    else:
        width = families.text_config(lm.model).hidden_size
        unit = torch.zeros(2, width, dtype=lm.model.dtype, device=lm.device)
        unit[1, channel] = 1
        with torch.inference_mode():
            zero, given = module(unit)
        given = given - zero
    return given.detach().to(torch.promote_types(given.dtype, torch.float32)).cpu()


def rotary_config(config: PreTrainedConfig, folded: Folded) -> PreTrainedConfig:
    """A copy of a model's config with the rotary embedding of a folded method.

    Raises:
        UserError: The architecture's config does not take it.
    """
    changed: Any = deepcopy(config)
    text = changed.get_text_config()
    known = dict(getattr(text, "rope_parameters", None) or {})
    nested = any(
        isinstance(value, Mapping) for value in known.values()
    )  # by kind of layer, as in Gemma 3
    each = (
        {kind: {**value, **folded.rope} for kind, value in known.items()}
        if nested
        else {}
    )
    text.rope_parameters = each or {**known, **folded.rope}
    try:
        text.validate()
    except (ValueError, StrictDataclassError) as error:
        kind = folded.rope.get("rope_type")
        allowed = (
            f"a model whose config takes rope_type {kind}; {config.model_type} does not"
        )
        raise UserError("--to", "checkpoint", allowed, "--to transformers") from error
    return changed
