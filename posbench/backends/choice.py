"""Which backend answers for a model."""

from __future__ import annotations

from posbench.backends.base import Backend, ServerProfile
from posbench.backends.served import Endpoint
from posbench.model.load import ModelConfig
from posbench.schema import instantiate, resolve_target


def backend_class(model: ModelConfig) -> type[Backend]:
    """Return the class that answers for a model that is not in this process: the user's, else the server's client.

    Raises:
        UserError: ``model.backend`` names no backend.
    """
    if model.backend is None:
        return Endpoint
    cls, _ = resolve_target(model.backend, Backend, "model.backend")  # type: ignore[type-abstract]
    return cls


def make_backend(model: ModelConfig, profile: ServerProfile | None = None) -> Backend:
    """Return the backend of a model that is not in this process.

    Args:
        model: The model.
        profile: Result of an earlier probe of its server.

    Raises:
        UserError: ``model.backend`` names no backend, or its settings are wrong; a server's key is not set.
    """
    if model.backend is None:
        return Endpoint(model, profile)
    return instantiate(model.backend, Backend, "model.backend")  # type: ignore[type-abstract]
