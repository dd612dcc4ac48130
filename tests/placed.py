"""Models on GPUs that are not there: fake tensors say where a tensor is, its twin on the CPU what it holds.

``torch._subclasses.fake_tensor`` knows which devices an operation may mix, and raises where they differ; it
holds no values. So every operation also runs on ordinary tensors of the CPU, the twins, and what is read back
(a loss, an end of sequence, a table) is what the CPU gives. It needs the CUDA build of torch, and no GPU.

It stops at backward passes, whose engine asks for a driver: they give zeros on the right device. A GPU's own
kernels, fused attention and grouped experts among them, are not chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import safetensors.torch as safetensors
import torch
import transformers
from accelerate import dispatch_model, infer_auto_device_map
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

CPU = torch.device("cpu")


def _real(value: Any) -> Any:
    """The twin of a fake tensor, the CPU in the place of a device; anything else as it is."""
    if isinstance(value, FakeTensor):
        return value.twin
    return CPU if isinstance(value, torch.device) else value


def _like(real: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor on a device for an ordinary one."""
    fake = torch.empty_strided(
        real.shape, real.stride(), dtype=real.dtype, device=device
    )
    fake.twin = real
    return fake


class _Twins(TorchDispatchMode):
    """Runs each operation twice: on the fakes, which checks the devices, and on their twins."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device = None
        try:
            fake = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            tensors = [
                t
                for t in tree_flatten((args, kwargs))[0]
                if isinstance(t, FakeTensor) and t.ndim
            ]
            devices = {t.device for t in tensors}
            if len(devices) > 1 and func._overloadpacket is not torch.ops.aten.index:
                raise RuntimeError(f"{func} of tensors on {devices}") from None
            fake = None
            device = tensors[0].device if tensors else CPU
        with _disable_current_modes():
            real = func(*tree_map(_real, args), **tree_map(_real, kwargs))
        if device is not None:
            return tree_map(
                lambda t: _like(t, device) if isinstance(t, torch.Tensor) else t, real
            )
        for made, held in zip(
            tree_flatten(fake)[0], tree_flatten(real)[0], strict=True
        ):
            if isinstance(made, FakeTensor):
                # Torch's own memory of a constant would be moved to a GPU in earnest.
                made.twin = held
                made.constant = None
        return fake


class _Reads(TorchFunctionMode):
    """What is no operation of tensors: arrays, files, and gradients."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        kwargs = kwargs or {}
        if func in (torch.Tensor.numpy, torch.Tensor.__array__) and isinstance(
            first, FakeTensor
        ):
            if first.device != CPU:
                raise TypeError(f"can't convert {first.device} tensor to numpy")
            with _disable_current_modes():
                return func(first.twin, *args[1:], **kwargs)
        if func is torch.asarray and isinstance(first, torch.UntypedStorage):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return tuple(torch.zeros_like(leaf) for leaf in args[1])
        if func is torch.Tensor.backward:
            for leaf in _leaves(first.grad_fn):
                leaf.grad = torch.zeros_like(leaf)
            return None
        return func(*args, **kwargs)


def _leaves(node: Any) -> list[torch.Tensor]:
    """The tensors to which a backward pass would give gradients."""
    found = []
    seen = set()
    stack = [node]
    while stack:
        if (at := stack.pop()) not in seen:
            seen.add(at)
            found += [at.variable] if hasattr(at, "variable") else []
            stack += [before for before, _ in at.next_functions if before is not None]
    return found


class _Generator(torch.Generator):
    """A generator of the CPU, whatever device is asked for."""

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls)


def _converted(
    self: nn.Module,
    convert: Callable[[torch.Tensor], torch.Tensor],
    recurse: bool = True,
) -> Any:
    """``Module._apply`` without swapping tensors, which fakes do not bear."""
    for module in self.modules():
        for key, value in module._parameters.items():
            if value is not None:
                module._parameters[key] = nn.Parameter(
                    convert(value.detach()), value.requires_grad
                )
        for key, value in module._buffers.items():
            if value is not None:
                module._buffers[key] = convert(value)
    return self


def _moved(module: nn.Module, name: str, device: Any, **_: Any) -> None:
    """What accelerate does to a tensor of a module; it would make a parameter of the class of fakes."""
    *path, last = name.split(".")
    owner = module.get_submodule(".".join(path))
    tensors = owner._parameters if last in owner._parameters else owner._buffers
    value = getattr(owner, last)
    if value.device != torch.device(device):
        moved = value.detach().to(device)
        tensors[last] = (
            nn.Parameter(moved, value.requires_grad)
            if tensors is owner._parameters
            else moved
        )


@contextmanager
def placing() -> Iterator[None]:
    """Inside the block tensors are fake, and checkpoints are loaded onto GPUs that are not there."""
    original = transformers.AutoModelForCausalLM.from_pretrained

    def load(*args: Any, device_map: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            model, told = original(*args, device_map={"": "cpu"}, **kwargs)
            places = device_map if isinstance(device_map, dict) else halves(model)
        # The hard case: what the model is given goes to another GPU than its embedding's.
        return place(model, places, "cuda:1"), told

    def written(save: Callable[..., Any]) -> Callable[..., Any]:
        def run(what: Any, *args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return save(tree_map(_real, what), *args, **kwargs)

        return run

    with (
        mock.patch.object(torch, "save", written(torch.save)),
        mock.patch.object(safetensors, "save_file", written(safetensors.save_file)),
        mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained", load),
        mock.patch("accelerate.hooks.set_module_tensor_to_device", _moved),
        mock.patch.object(torch.cuda, "synchronize", lambda *_: None),
        mock.patch.object(nn.Module, "_apply", _converted),
        mock.patch.object(torch, "Generator", _Generator),
        FakeTensorMode(allow_non_fake_inputs=True),
        _Twins(),
        _Reads(),
    ):
        yield


def place(model: Any, device_map: Mapping[str, Any], first: str | None = None) -> Any:
    """A model of the CPU with its tensors on the devices of a map from module names.

    Several devices are joined by accelerate, which sends what the model is given to the ``first`` of them.
    """
    known: dict[int, Any] = {}
    for name, module in model.named_modules():
        prefixes = [
            p for p in device_map if not p or name == p or name.startswith(f"{p}.")
        ]
        device = torch.device(device_map[max(prefixes, key=len)]) if prefixes else CPU
        for tensors in (module._parameters, module._buffers):
            for key, value in tensors.items():
                if value is None:
                    continue
                with _disable_current_modes():
                    held = value.detach()
                if id(value) not in known:
                    fake = _like(held, device)
                    weight = tensors is module._parameters
                    known[id(value)] = (
                        nn.Parameter(fake, value.requires_grad) if weight else fake,
                        value,
                    )
                tensors[key] = known[id(value)][0]
    if len(set(device_map.values())) > 1:
        keys = model._skip_keys_device_placement
        dispatch_model(model, dict(device_map), first or model.device, skip_keys=keys)
    return model


def halves(model: Any) -> dict[str, str]:
    """The map of a model over two GPUs, as transformers makes it of ``device_map=balanced``."""
    size = sum(
        t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())
    )
    whole = model._no_split_modules
    found = infer_auto_device_map(
        model, {0: size * 0.6, 1: size * 2}, no_split_module_classes=whole
    )
    return {name: f"cuda:{number}" for name, number in found.items()}
