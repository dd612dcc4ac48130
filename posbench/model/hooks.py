"""Change a model inside a block and restore it on the way out, also after an exception; branch its cache."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posbench.late import PreTrainedModel, Tensor, nn, transformers
from posbench.model import families
from posbench.model.attention import attend_with_rotations

if TYPE_CHECKING:
    from transformers import DynamicCache

AttentionFunction = Callable[..., Any]
"""An attention function: (module, query, key, value, mask, **settings) to (output [B, T, H, d], weights)."""

CACHE_NAMES = ("cache", "past_key_values", "layer_past")
"""What a forward calls its cache: in transformers from 5.24 on, before, and before in GPT-NeoX, Bloom and others."""

_functions: dict[int, list[tuple[Container[nn.Module], AttentionFunction]]] = {}
"""By the id of a config, which models may share: modules and the functions before their kernel, in calling order."""


@contextmanager
def replace_attribute(target: object, name: str, value: Any) -> Iterator[None]:
    """Set an instance attribute for the duration of a block.

    An attribute that lived on the class alone is deleted again, so that ``vars(target)`` ends as it began.
    """
    existed = name in vars(target)
    previous = vars(target).get(name)
    setattr(target, name, value)
    try:
        yield
    finally:
        if existed:
            setattr(target, name, previous)
        else:
            delattr(target, name)


@contextmanager
def pre_hooks(
    modules: Sequence[nn.Module],
    layers: Collection[int] | None,
    make_hook: Callable[[int], Callable[..., Any]],
) -> Iterator[None]:
    """Run hooks before the modules of some layers for the duration of a block.

    Args:
        modules: A module for each layer.
        layers: Layers whose modules get a hook; None: all.
        make_hook: Makes the hook of a layer, which is called with module, arguments and keyword arguments.
    """
    if layers is None:
        layers = range(len(modules))
    with ExitStack() as stack:
        for layer in layers:
            handle = modules[layer].register_forward_pre_hook(
                make_hook(layer), with_kwargs=True
            )
            stack.enter_context(handle)
        yield


# Caches that share memory

SHARED_BUFFER = "posbench_shared_buffer"
"""Attribute of keys and values with the :class:`SharedBuffer` whose memory they are in."""
SPARE_TOKENS = 64
"""Tokens for which :func:`appendable_cache` allocates memory at a time."""


@dataclass
class SharedBuffer:
    """Memory that begins with the keys, or values, shared by several cache layers, with room for appended ones.

    Attributes:
        storage: The memory, shape [B, G, T + spare, d].
        shared_tokens: T, the tokens that all the cache layers hold.
        writers: Cache layers that hold more than T tokens, or are appending some.
    """

    storage: Tensor
    shared_tokens: int
    writers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    @classmethod
    def of(cls, states: Tensor, spare: int) -> SharedBuffer:
        """A buffer that begins with a copy of keys or values [B, G, T, d] and has room for ``spare`` tokens."""
        *outer, tokens, dim = states.shape
        buffer = cls(states.new_empty(*outer, tokens + spare, dim), tokens)
        buffer.storage[..., :tokens, :] = states
        return buffer

    def view(self, tokens: int) -> Tensor:
        """The first ``tokens`` tokens, marked as a part of this buffer."""
        states = self.storage[..., :tokens, :]
        setattr(states, SHARED_BUFFER, self)
        return states

    def can_append(self, layer: Any, states: Tensor, end: int) -> bool:
        """Whether a cache layer can append tokens in this buffer, up to token ``end``, without a copy.

        That is so if its states are a part of this buffer, and no other living layer has appended any.

        Args:
            layer: The cache layer.
            states: Its keys or values, [B, G, T, d].
            end: Tokens that it will have.
        """
        is_part = getattr(states, SHARED_BUFFER, None) is self
        if not is_part or end > self.storage.shape[-2]:
            return False
        return all(writer is layer for writer in self.writers)


def appendable_cache(
    states: Iterable[tuple[Tensor, Tensor]],
    spare: int = SPARE_TOKENS,
    tokens_before: int = 0,
) -> DynamicCache:
    """Return a cache whose forks can be appended to without copying their shared part.

    Args:
        states: Keys and values of each layer, [B, G, T, d] each.
        spare: Tokens that a fork can take up before it is copied.
        tokens_before: Tokens before these whose keys and values are elsewhere; they count in its length.
    """
    cache = transformers.DynamicCache()
    for keys, values in states:
        layer = _appendable_layer_type()()
        layer.tokens_before = tokens_before
        layer.lazy_initialization(keys, values)
        layer.shared_buffers = {
            "keys": SharedBuffer.of(keys, spare),
            "values": SharedBuffer.of(values, spare),
        }
        for name, buffer in layer.shared_buffers.items():
            setattr(layer, name, buffer.view(buffer.shared_tokens))
        cache.layers.append(layer)
    return cache


def cache_name(names: Container[str]) -> str:
    """Return what a forward calls its cache, by its parameters, the arguments of a call, or the fields of an output."""
    return next((name for name in CACHE_NAMES if name in names), "past_key_values")


def find_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a call; None without one."""
    return arguments.get(cache_name(arguments))


def with_cache(forward: Callable[..., Any], cache: Any) -> dict[str, Any]:
    """Return a cache as an argument of a forward."""
    return {cache_name(inspect.signature(forward).parameters): cache}


def cache_of(output: Any) -> Any:
    """Return the cache in the output of a model."""
    return getattr(output, cache_name(vars(output)))


def set_cache(output: Any, cache: Any) -> None:
    """Put another cache into the output of a model."""
    setattr(output, cache_name(vars(output)), cache)


def fork_cache(cache: DynamicCache) -> DynamicCache:
    """Return a cache that grows independently and shares its present keys and values with the original."""
    branch = copy.copy(cache)
    branch.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in branch.layers:
        buffers = vars(layer).get("shared_buffers")
        if not buffers:
            continue
        layer.shared_buffers = dict(buffers)
        for buffer in buffers.values():
            # A branch that holds more than the shared tokens occupies the memory behind them.
            if layer.keys.shape[-2] > buffer.shared_tokens:
                buffer.writers.add(layer)
    return branch


@functools.cache
def _appendable_layer_type() -> type:
    # Defined in a function, so that transformers is imported only when it is needed.
    """Return the class of cache layers that append new keys and values to larger tensors, without copying old ones."""

    class AppendableLayer(transformers.cache_utils.DynamicLayer):  # type: ignore[misc]
        """Keys and values at the beginning of larger tensors, ``shared_buffers``, behind ``tokens_before``."""

        def get_seq_length(self) -> int:
            return int(self.tokens_before + self.keys.shape[-2])

        def update(
            self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor]:
            self._append("keys", key_states)
            self._append("values", value_states)
            return self.keys, self.values

        def _append(self, name: str, new_states: Tensor) -> None:
            states = getattr(self, name)
            buffer = self.shared_buffers[name]
            start = states.shape[-2]
            end = start + new_states.shape[-2]
            # A method may have put other keys in the place of those in the buffer.
            if not buffer.can_append(self, states, end):
                spare = max(SPARE_TOKENS, new_states.shape[-2])
                buffer = SharedBuffer.of(states, spare)
                self.shared_buffers[name] = buffer
            buffer.writers.add(self)
            buffer.storage[..., start:end, :] = new_states
            setattr(self, name, buffer.view(end))

    return AppendableLayer


# Functions in front of the attention kernel


@contextmanager
def intercepting_attention(
    model: PreTrainedModel, function: AttentionFunction
) -> Iterator[None]:
    """Put a function in front of a model's attention kernel for the duration of a block.

    The function of an inner block comes nearer to the kernel, so that a listener sees the queries and keys that
    a method made.

    Args:
        model: A model whose family runs attention through the library's functions.
        function: Takes the arguments of an :data:`AttentionFunction` and, as ``following``, the next function or the
            kernel.

    Raises:
        UserError: The family calls its attention in its own way, so that the function would never run.
    """
    families.require_attention_interface(
        model, "a function in front of the attention kernel"
    )
    config = model.config.get_text_config()
    functions = _functions.setdefault(id(config), [])
    kernel_name = config._attn_implementation
    if not functions:
        own_name = f"posbench_{kernel_name}"
        transformers.AttentionInterface.register(own_name, _dispatch(kernel_name))
        # Without a mask function under the same name transformers would give no mask at all.
        transformers.masking_utils.AttentionMaskInterface.register(
            own_name,
            transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[kernel_name],
        )
        model.set_attn_implementation(own_name)
    entry = (set(model.modules()), function)
    functions.append(entry)
    try:
        yield
    finally:
        functions.remove(entry)
        if not functions:
            del _functions[id(config)]
            model.set_attn_implementation(kernel_name)


def count_hooks(model: PreTrainedModel) -> int:
    """Number of hooks of a model's modules and of functions in front of its kernel."""
    hooks = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for module in model.modules()
    )
    return hooks + len(functions_in_front(model))


def functions_in_front(model: PreTrainedModel) -> Sequence[AttentionFunction]:
    """The functions in front of a model's attention kernel, the first one first."""
    entries = _functions.get(id(model.config.get_text_config()), ())
    return [function for modules, function in entries if model in modules]


def _dispatch(kernel_name: str) -> AttentionFunction:
    """Return an attention function that calls the functions of :func:`intercepting_attention`, then a kernel.

    Args:
        kernel_name: Name under which transformers knows the kernel.
    """

    def kernel(module: Any, *args: Any, **settings: Any) -> Any:
        if "rotations" in settings:
            # The library's kernels know one rotation for all pairs.
            is_eager = kernel_name == "eager"
            return attend_with_rotations(*args, keep_weights=is_eager, **settings)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface(
            kernel_name, eager
        )
        return attend(module, *args, **settings)

    def dispatch(module: Any, *args: Any, **settings: Any) -> Any:
        attend = kernel
        # The one registered first is called first, and gets the next one as ``following``.
        for modules, function in reversed(_functions.get(id(module.config), [])):
            if module in modules:
                attend = functools.partial(function, following=attend)
        return attend(module, *args, **settings)

    return dispatch
