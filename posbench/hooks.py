"""Change a model inside a block and restore it on the way out, also after an exception; branch its cache."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import DynamicCache


@contextmanager
def replaced(target: object, name: str, value: Any) -> Iterator[None]:
    """Set an instance attribute for the duration of a block.

    An attribute that lived on the class alone is deleted again, so that ``vars(target)`` ends as it began.
    """
    own = vars(target)
    had, before = name in own, own.get(name)
    setattr(target, name, value)
    try:
        yield
    finally:
        if had:
            setattr(target, name, before)
        else:
            delattr(target, name)


def fork(cache: DynamicCache) -> DynamicCache:
    """A cache that grows on its own; what it holds already is shared, not copied."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other
