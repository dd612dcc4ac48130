"""Change a model inside a block and restore it on the way out, also after an exception; branch its cache."""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posbench.late import PreTrainedModel, Tensor, nn, transformers

if TYPE_CHECKING:
    from transformers import DynamicCache

Attend = Callable[..., Any]
"""An attention function: (module, query, key, value, mask, **settings) to (output [B, T, H, d], weights)."""

_functions: dict[int, list[Attend]] = {}
"""Per model config (by identity) the functions in front of its kernel; the first one is called first."""


@contextmanager
def replaced(target: object, name: str, value: Any) -> Iterator[None]:
    """Set an instance attribute for the duration of a block.

    An attribute that lived on the class alone is deleted again, so that ``vars(target)`` ends as it began.
    """
    had = name in vars(target)
    before = vars(target).get(name)
    setattr(target, name, value)
    try:
        yield
    finally:
        if had:
            setattr(target, name, before)
        else:
            delattr(target, name)


@contextmanager
def before_each(
    modules: Sequence[nn.Module],
    layers: Collection[int] | None,
    hook: Callable[[int], Callable[..., Any]],
) -> Iterator[None]:
    """Run hooks before the modules of some layers (None: all) for the duration of a block.

    ``hook`` makes the hook of a layer, which is called with module, arguments and keyword arguments.
    """
    with ExitStack() as stack:
        for layer in range(len(modules)) if layers is None else layers:
            stack.enter_context(
                modules[layer].register_forward_pre_hook(hook(layer), with_kwargs=True)
            )
        yield


def fork(cache: DynamicCache) -> DynamicCache:
    """A cache that grows on its own; what it holds already is shared, not copied."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in other.layers:
        if rooms := vars(layer).get("rooms"):
            layer.rooms = dict(rooms)
            for room in rooms.values():
                if layer.keys.shape[-2] > room.used:
                    room.layers.add(layer)
    return other


ROOM = "posbench_room"
"""Attribute of keys and values with the :class:`Room` that they are a part of."""
SPARE = 64
"""Tokens for which a cache of :func:`held` makes room at a time."""


@dataclass
class Room:
    """A tensor [B, G, T + spare, d] that begins with what several caches hold, and takes what one adds."""

    whole: Tensor
    used: int  # tokens that all of them hold
    layers: weakref.WeakSet[Any] = field(
        default_factory=weakref.WeakSet
    )  # that hold more, or add some

    def part(self, tokens: int) -> Tensor:
        """The first so many tokens, marked as of this room."""
        view = self.whole[..., :tokens, :]
        setattr(view, ROOM, self)
        return view

    def serves(self, layer: Any, known: Tensor, end: int) -> bool:
        """Whether a layer that holds ``known`` can add tokens up to ``end``: this is a part of the room, and
        no other one that lives has added any."""
        fits = getattr(known, ROOM, None) is self and end <= self.whole.shape[-2]
        return fits and not [other for other in self.layers if other is not layer]


def held(states: Iterable[tuple[Tensor, Tensor]], spare: int = SPARE) -> DynamicCache:
    """A cache that holds each layer's keys and values [B, G, T, d] and, on a fork, takes so many more tokens
    without copying what it holds."""
    cache = transformers.DynamicCache()
    for keys, values in states:
        layer = _growing()()
        layer.lazy_initialization(keys, values)
        layer.rooms = {
            name: room_of(each, spare)
            for name, each in (("keys", keys), ("values", values))
        }
        for name, room in layer.rooms.items():
            setattr(layer, name, room.part(room.used))
        cache.layers.append(layer)
    return cache


def room_of(known: Tensor, spare: int) -> Room:
    """Keys or values at the beginning of a larger tensor."""
    *outer, size, dim = known.shape
    room = Room(known.new_empty(*outer, size + spare, dim), size)
    room.whole[..., :size, :] = known
    return room


@functools.cache
def _growing() -> type:
    class Growing(transformers.cache_utils.DynamicLayer):  # type: ignore[misc]
        """Keys and values at the beginning of larger tensors, ``rooms``."""

        def update(
            self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor]:
            for name, new in (("keys", key_states), ("values", value_states)):
                known = getattr(self, name)
                room = self.rooms[name]
                size = known.shape[-2]
                end = known.shape[-2] + new.shape[-2]
                # A method may have put other keys in the place of those in the room.
                if not room.serves(self, known, end):
                    room = self.rooms[name] = room_of(known, max(SPARE, new.shape[-2]))
                room.layers.add(self)
                room.whole[..., size:end, :] = new
                setattr(self, name, room.part(end))
            return self.keys, self.values

    return Growing


@contextmanager
def attending(model: PreTrainedModel, function: Attend) -> Iterator[None]:
    """Put a function in front of a model's attention kernel for the duration of a block.

    The model's family has to run attention through the library's functions. The function takes what an
    :data:`Attend` takes and, as ``following``, the next function or the kernel. That of an inner block comes
    nearer to the kernel, so that a listener sees the queries and keys that a method made.
    """
    config = model.config.get_text_config()
    stack = _functions.setdefault(id(config), [])
    before = config._attn_implementation
    if not stack:
        # Without a mask function under the same name transformers would give no mask at all.
        transformers.AttentionInterface.register(
            f"posbench_{before}", _dispatch(before)
        )
        transformers.masking_utils.AttentionMaskInterface.register(
            f"posbench_{before}",
            transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[before],
        )
        model.set_attn_implementation(f"posbench_{before}")
    stack.append(function)
    try:
        yield
    finally:
        stack.pop()
        if not stack:
            del _functions[id(config)]
            model.set_attn_implementation(before)


def listeners(model: PreTrainedModel) -> int:
    """How many hooks of its modules, and functions in front of its kernel, look into a model's forward."""
    hooks = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for module in model.modules()
    )
    return hooks + len(_functions.get(id(model.config.get_text_config()), []))


def _dispatch(kernel_name: str) -> Attend:
    def dispatch(module: Any, *args: Any, **settings: Any) -> Any:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        kernel = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface(
            kernel_name, eager
        )
        stack = _functions.get(id(module.config), [])

        def call(index: int) -> Attend:
            if index == len(stack):
                return kernel
            return lambda *a, **k: stack[index](*a, following=call(index + 1), **k)

        return call(0)(module, *args, **settings)

    return dispatch
