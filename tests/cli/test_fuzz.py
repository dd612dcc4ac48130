"""Every key of every composed config times twelve bad values: one line, never a traceback or a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

import posbench.pipeline.execute as execute
import posbench.run.base as base
from posbench import paths
from posbench.errors import UserError, choices
from posbench.pipeline.compose import GROUPS, composed
from tests.conftest import Result

BAD = {
    "empty": "''",
    "null": "null",
    "true": "true",
    "negative": "-1",
    "zero": "0",
    "nan": "nan",
    "1e308": "1e308",
    "huge": str(10**18),
    "list": "[x]",
    "mapping": "{a: 1}",
    "long": "x" * 300,
    "surrogate": "a\udc80b",
}
FEW = "task.examples_per_position=2"
NEEDS = {
    "model=hf": ["model.path=posbench://tiny"],
    "search=genetic": ["method=layer_scaling"],
    "search=brute_force": ["method=layer_scaling"],
    "search=gradient": ["method=layer_scaling"],
    "search=router": ["method=moice"],
}
"""What a choice cannot do without."""


def configs() -> dict[str, list[str]]:
    """Arguments of a config for every choice of every group and every experiment, by its name."""
    every = [f"{group}={name}" for group in GROUPS for name in choices(paths.CONF / group)]
    every += [f"experiment={name}" for name in choices(paths.EXPERIMENTS)]
    found = {}
    for name in every:
        stages = ["stages=[search]"] if name.startswith(("model=", "search=")) else []
        found[name] = [name, *NEEDS.get(name, []), *stages]
    return found


def keys(node: Any, where: str) -> Iterator[str]:
    """Dotted keys of a config, but for those that name a class."""
    if isinstance(node, Mapping) and where.count(".") < 3:
        for key, value in node.items():
            if key != "_target_":
                yield from keys(value, f"{where}.{key}" if where else str(key))
    if where:
        yield where


@pytest.fixture
def tried(
    posbench: Callable[..., Result], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Checks one command line, which stops where it would claim its folder."""
    loaded, load = dict[str, Any](), base.load

    @contextmanager
    def claim(*_: Any) -> Iterator[NoReturn]:
        raise UserError("claim", "", "a legal config", "")
        yield

    def once(config: Any, **where: Any) -> Any:
        name = repr((config, where))
        if name not in loaded:
            loaded.clear()
            loaded[name] = load(config, **where)
        return loaded[name]

    monkeypatch.setattr(execute, "claim", claim)
    monkeypatch.setattr(base, "load", once)

    def call(*args: str) -> None:
        # A key that names where runs go is the last one, so it wins.
        result = posbench(*args, verb=any(a.startswith("runtime.outputs=") for a in args))
        assert result.status in (0, 2, 3) and "Traceback" not in result.err + result.out, (args, result)
        assert result.status == 0 or result.err.startswith("posbench: "), (args, result)
        assert not outputs.exists(), args

    return call


def _pairs(name: str, args: list[str]) -> list[tuple[str, str]]:
    raw = composed(*args).raw
    group = name.split("=")[0]
    # An experiment composes groups that have their own turn: its own keys and the choices remain.
    there = [group, *GROUPS, "stages"] if group == "experiment" else [group]
    found = [key for g in there if g in raw for key in (keys(raw[g], g) if g == group else [g])]
    return [(key, kind) for key in found for kind in BAD]


SAMPLE = 16
"""Of about ten thousand pairs: those of the default suite, spread over all configs."""


def test_a_sample_of_bad_values(tried: Callable[..., None]) -> None:
    every = [name for name in configs() if not name.startswith(("experiment=", "model="))]
    for number in range(SAMPLE):
        name = every[number * len(every) // SAMPLE]
        pairs = _pairs(name, configs()[name])
        key, kind = pairs[(number * 7919) % len(pairs)]
        tried(*configs()[name], f"{key}={BAD[kind]}")


@pytest.mark.slow
@pytest.mark.parametrize("name", configs())
def test_every_bad_value(name: str, tried: Callable[..., None]) -> None:
    args = configs()[name]
    few = [FEW] if composed(*args).raw["task"]["name"] in ("kv_retrieval", "nq_multidoc") else []
    for key, kind in _pairs(name, args):
        tried(*args, *(few if not name.startswith(("study=", "task=")) else []), f"{key}={BAD[kind]}")
