"""Proofs of rows: digests of the request and of the computation that answered it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from posbench.files.atomic import short_hash
from posbench.methods import Method
from posbench.run.base import Run
from posbench.tasks import Example, Task

REQUEST = "request"
"""Column of rows: a digest of the prompt's token ids, and of its choices."""
COMPUTATION = "computation"
"""Column of rows: a digest of the computation, by :func:`computation_digest`."""
DIGITS = 12

Decoding = tuple[Any, ...]
"""Settings that end and decode a reply; empty if none is generated."""


def request_digest(ids: Sequence[int], choices: Sequence[str]) -> str:
    """Return a digest of a prompt's token ids and of the choices that are scored after it."""
    total = hashlib.sha256(np.asarray(ids, "<i8").tobytes())
    for choice in choices:
        total.update(b"\0" + choice.encode(errors="surrogatepass"))
    return total.hexdigest()[:DIGITS]


def decoding_of(task: Task, example: Example) -> Decoding:
    """Return the settings on which a generated reply depends; empty if choices are scored.

    They are the most and the fewest new tokens, the texts that end a reply, and the repetition penalty.
    """
    if example.choices:
        return ()
    return (
        example.max_new_tokens or task.max_new_tokens,
        example.min_new_tokens,
        example.stop,
        task.repetition_penalty,
    )


def computation_digest(
    run: Run, method: Method, decoding: Decoding = (), reported_model: str = ""
) -> str:
    """Return a digest of the computation: weights, precision, kernel, method with its constants, decoding.

    Args:
        run: The run, with the identity of its model.
        method: The method; a file that a constant names counts by its content.
        decoding: By :func:`decoding_of`.
        reported_model: The model that a server reports; empty where it reports none, or there is no server.
    """
    facts: dict[str, Any] = {
        "model": run.model_identity,
        "method": _describe(method, run.method_files),
        "decoding": decoding,
    }
    if reported_model:
        facts["reported_model"] = reported_model
    return short_hash(facts, DIGITS)


def _describe(value: Any, files: Mapping[str, str]) -> Any:
    """Return a value as lists, numbers and texts that a digest can be made of; objects begin with their class's name.

    Args:
        value: A method, or one of its parameters.
        files: By path of a file, the digest of its content, which stands for it.
    """
    if is_dataclass(value):
        cls = type(value)
        constants = [
            [field.name, _describe(getattr(value, field.name), files)]
            for field in fields(value)
        ]
        return [f"{cls.__module__}.{cls.__qualname__}", constants]
    if isinstance(value, Mapping):
        return [[key, _describe(part, files)] for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [_describe(part, files) for part in value]
    if isinstance(value, str):
        return files.get(value, value)
    return value
