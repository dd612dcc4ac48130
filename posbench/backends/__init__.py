"""What answers the prompts of a model that is not in this process."""

from posbench.backends.base import Backend

__all__ = ["Backend"]
