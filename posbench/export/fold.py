"""A method inside the checkpoint itself: scaled columns of projections, other RoPE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError

from posbench.errors import UserError
from posbench.late import PreTrainedConfig, Tensor, nn, torch
from posbench.methods.base import CheckpointChange
from posbench.model import families
from posbench.model.lm import LM


class ColumnScaling(NamedTuple):
    """The change of one projection.

    Attributes:
        rows: Rows of the weight that change; None for all.
        factors: Factor of each scaled column, by channel.
    """

    rows: Tensor | None
    factors: Mapping[int, float]


def column_scalings(lm: LM, change: CheckpointChange) -> dict[str, ColumnScaling]:
    """The changes of the query and key projections, by their dotted names."""
    scalings: dict[str, ColumnScaling] = {}
    for layer, factors in change.columns.items():
        for name, rows in families.query_key_rows(lm.model, layer).items():
            scalings[name] = ColumnScaling(rows, factors)
    return scalings


@contextmanager
def scaled_weights(lm: LM, change: CheckpointChange) -> Iterator[None]:
    """Scale columns of the model's projections in a block; restore them bit for bit.

    Raises:
        UserError: The weights are quantised, offloaded, or shared with a module that
            must not change.
    """
    scalings = column_scalings(lm, change)
    weights = {name: _weight(lm, name) for name in scalings}
    _check_unshared(lm, weights)
    originals: list[tuple[nn.Parameter, int, Tensor]] = []
    try:
        with torch.no_grad():
            for name, (rows, factors) in scalings.items():
                weight = weights[name]
                for channel, factor in factors.items():
                    column = weight[:, channel]
                    originals.append((weight, channel, column.clone()))
                    # In float32, as the method multiplies the activations.
                    exact = column.to(torch.promote_types(column.dtype, torch.float32))
                    exact[slice(None) if rows is None else rows] *= factor
                    weight[:, channel] = exact.to(column.dtype)
        yield
    finally:
        with torch.no_grad():
            for weight, channel, column in reversed(originals):
                weight[:, channel] = column


def _weight(lm: LM, name: str) -> nn.Parameter:
    """Return the weight matrix of a projection, whose columns are the channels of its input.

    Args:
        lm: The model.
        name: Dotted name of the projection in the model.

    Raises:
        UserError: The weights are quantised, adapted or offloaded.
    """
    module = lm.model.get_submodule(name)
    is_plain = type(module) is nn.Linear or type(module).__name__ == "FalconLinear"
    if is_plain and not module.weight.is_meta:
        return module.weight
    kind = "offloaded" if is_plain else type(module).__name__
    allowed = f"plain weights in memory; {name} of {lm.name} has {kind} weights"
    raise UserError(
        "--to", "checkpoint", allowed, "use --to lora, which leaves them as they are"
    )


def _check_unshared(lm: LM, weights: Mapping[str, nn.Parameter]) -> None:
    """Refuse projections whose weights another module shares and would see changed.

    Args:
        lm: The model.
        weights: Weights by the projection's dotted name.

    Raises:
        UserError: Names both modules.
    """
    names = {id(weight): name for name, weight in weights.items()}
    for parameter, weight in lm.model.named_parameters(remove_duplicate=False):
        name = names.get(id(weight), "")
        if name and parameter != f"{name}.weight":
            allowed = (
                f"projections of their own; {name} of {lm.name} "
                f"shares its weights with {parameter}"
            )
            raise UserError(
                "--to",
                "checkpoint",
                allowed,
                "use --to lora, which leaves them as they are",
            )


def column(lm: LM, name: str, channel: int) -> Tensor:
    """A column of a projection's weights, also of quantised and adapted ones.

    Where the matrix cannot be read it is the output for a unit vector minus that for 0.

    Args:
        lm: The model.
        name: Dotted name of the projection.
        channel: Channel of its input.

    Returns:
        The column, shape (rows,), float32 or better, on the CPU.
    """
    module = lm.model.get_submodule(name)
    if type(module) is nn.Linear and not module.weight.is_meta:
        values = module.weight[:, channel]
    else:
        width = families.text_config(lm.model).hidden_size
        inputs = torch.zeros(2, width, dtype=lm.model.dtype, device=lm.device)
        inputs[1, channel] = 1
        with torch.inference_mode():
            output_of_zero, output_of_unit = module(inputs)
        values = output_of_unit - output_of_zero
    return values.detach().to(torch.promote_types(values.dtype, torch.float32)).cpu()


def rotary_config(
    config: PreTrainedConfig, change: CheckpointChange
) -> PreTrainedConfig:
    """Return a copy of a model's config with the rotary embedding of a folded method.

    Args:
        config: The config.
        change: The method as a change of the checkpoint.

    Raises:
        UserError: The architecture's config does not take it.
    """
    changed: Any = deepcopy(config)
    text_config = changed.get_text_config()
    parameters = dict(getattr(text_config, "rope_parameters", None) or {})
    by_layer_kind = any(isinstance(value, Mapping) for value in parameters.values())
    if by_layer_kind:  # as in Gemma 3
        text_config.rope_parameters = {
            kind: {**value, **change.rope} for kind, value in parameters.items()
        }
    else:
        text_config.rope_parameters = {**parameters, **change.rope}
    try:
        text_config.validate()
    except (ValueError, StrictDataclassError) as error:
        rope_type = change.rope.get("rope_type")
        allowed = (
            f"a model whose config takes rope_type {rope_type}; "
            f"{config.model_type} does not"
        )
        raise UserError("--to", "checkpoint", allowed, "--to transformers") from error
    return changed
