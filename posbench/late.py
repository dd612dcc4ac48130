"""Libraries that take seconds to import, each loaded when something in it is first used.

``posbench ls`` and a wrong key are answered without torch. So every module takes these libraries from here
and uses nothing from them while it is imported itself; types are for annotations alone, and decorators of torch
and matplotlib are made by :func:`run_inside`. A module that defines a network needs torch at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from posbench.errors import UserError
from posbench.versions import install_hint

LOCAL = ("datasets", "safetensors", "torch", "transformers")
"""Packages of the extra ``local``, without which a model behind a server can be asked all the same."""

P = ParamSpec("P")
R = TypeVar("R")


class LateModule:
    """A module that is imported when one of its attributes is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        try:
            module = import_module(self._name)
        except ModuleNotFoundError as error:
            if error.name not in LOCAL:
                raise
            allowed = "installed: models in this process and parquet files need it"
            hint = f"{install_hint('local')}, or ask a server with model.base_url=URL"
            raise UserError(error.name, "not installed", allowed, hint) from error
        return getattr(module, name)


if TYPE_CHECKING:
    import datasets
    import matplotlib
    import numpy as np
    import pandas as pd
    import safetensors
    import torch
    import torch.nn.functional as F
    import transformers
    import transformers.integrations.sdpa_attention as sdpa
    from huggingface_hub import errors as hub_errors
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from torch import Tensor, nn
    from torch.nn import Module
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
else:
    datasets = LateModule("datasets")
    F = LateModule("torch.nn.functional")
    hub_errors = LateModule("huggingface_hub.errors")
    matplotlib = LateModule("matplotlib")
    nn = LateModule("torch.nn")
    np = LateModule("numpy")  # tasks are listed without it
    pd = LateModule("pandas")
    safetensors = LateModule("safetensors")
    sdpa = LateModule("transformers.integrations.sdpa_attention")
    torch = LateModule("torch")
    transformers = LateModule("transformers")
    # For annotations alone: isinstance() refuses them. Python 3.15 looks up ``pd.DataFrame`` in the fields of a
    # dataclass, which would load pandas: there the plain names are used.
    Axes = Any
    DataFrame = Any
    Figure = Any
    Module = Any
    PreTrainedConfig = Any
    PreTrainedModel = Any
    PreTrainedTokenizerBase = Any
    Tensor = Any

__all__ = [
    "Axes",
    "DataFrame",
    "F",
    "Figure",
    "Module",
    "PreTrainedConfig",
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "Tensor",
    "datasets",
    "hub_errors",
    "matplotlib",
    "nn",
    "np",
    "pd",
    "safetensors",
    "sdpa",
    "torch",
    "transformers",
]


def has_torch() -> bool:
    """Whether torch is installed, and so a model may run in this process."""
    return find_spec("torch") is not None


def run_inside(
    block: Callable[[], AbstractContextManager[Any]],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that runs each call inside a new context manager, made by ``block``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def decorated(*args: P.args, **kwargs: P.kwargs) -> R:
            with block():
                return function(*args, **kwargs)

        return decorated

    return decorate


inference_mode = run_inside(lambda: torch.inference_mode())
