"""Every key of every config times twelve kinds of bad value: one line, never a traceback or a folder."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import posbench.pipeline.execute as execute
import posbench.pipeline.identity as identity
import posbench.run.base as base
from posbench import paths
from posbench.errors import UserError, choices
from posbench.pipeline import compose
from posbench.pipeline.arguments import parse_request
from posbench.pipeline.compose import compose_one
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
FEW = ["task.limit=2"]
LONGEST = 60  # seconds after which a try counts as one that never ends
SAMPLE = ("task=nq_multidoc", "method=ms_poe", "search=channel", "study=crop_mask")
STEP = 23  # of their pairs, every so many; prime, so that all kinds have a turn
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
    every = [
        f"{group}={name}"
        for group in paths.GROUPS
        for name in choices(*paths.group_folders(group))
    ]
    every += [
        f"experiment={name}" for name in choices(*paths.group_folders("experiment"))
    ]
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
) -> Iterator[Callable[..., str]]:
    """Tries one command line up to the claim of its folder; what is wrong with the answer, or nothing.

    Hydra takes most of the time of a try: it composes a config once, and the last argument is laid over the
    copy as Hydra would. Choices go through Hydra itself. All behind it is the real path; but for keys of an
    experiment, which the model never sees, it ends before the model is loaded.
    """
    loaded = dict[str, Any]()
    load = base.load
    whole = compose.compose

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

    @cache
    def first(args: tuple[str, ...]) -> tuple[Any, ...]:
        made = list[tuple[Any, ...]]()
        with monkeypatch.context() as patched:
            patched.setattr(
                compose,
                "_compose_job",
                lambda *parts: made.append(parts) or composed(*parts),
            )
            whole(args)
        return made[0]

    composed = compose._compose_job

    def quick(args: list[str]) -> compose.Jobs:
        key = args[-1].partition("=")[0]
        if "." not in key:
            return whole(args)
        config, _, arguments = first(tuple(args[:-1]))
        request = parse_request(args, arguments.folders, False)
        text = next(o for o in request.overrides if o.lstrip("+").startswith(f"{key}="))
        value = OverridesParser.create().parse_override(text).value()
        config = deepcopy(config)
        try:
            OmegaConf.update(config, key, value, merge=True, force_add=True)
        except OmegaConfBaseException:
            return whole(args)
        job = config.hydra
        OmegaConf.set_readonly(job, False)
        job.overrides.task = [*job.overrides.task, text]
        return compose.Jobs(
            [composed(config, job, replace(arguments, request=request))]
        )

    def late(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(compose, "compose", quick)
    monkeypatch.setattr(execute, "claim", claim)
    monkeypatch.setattr(base, "load", once)
    # The same for every try, and a walk through the package.
    monkeypatch.setattr(identity, "source_digest", lambda *_: "code")
    before = signal.signal(signal.SIGALRM, late)

    looked = execute.probe_model

    def call(*args: str) -> str:
        own = args[-1].startswith("experiment.")
        monkeypatch.setattr(execute, "probe_model", (lambda *_: {}) if own else looked)
        signal.alarm(LONGEST)
        try:
            # The argument under test is the last one: a key that names where runs go wins.
            result = posbench(
                *args[:-1], f"runtime.outputs={outputs}", args[-1], verb=True
            )
        except Exception as error:  # noqa: BLE001
            last = traceback.extract_tb(error.__traceback__)[-1]
            return f"{args}: {error!r:.200} at {last.filename}:{last.lineno}"
        finally:
            signal.alarm(0)
        told = (
            result.err.startswith("posbench: ")
            and "Traceback" not in result.err + result.out
        )
        held = (
            result.status in (0, 2, 3)
            and (told or not result.status)
            and not outputs.exists()
        )
        return "" if held else f"{args}: {result!r:.600}"

    yield call
    signal.signal(signal.SIGALRM, before)


@cache
def pairs(name: str) -> tuple[tuple[str, str], ...]:
    """Keys and kinds of bad values of a config.

    An experiment composes groups that have a turn of their own: its own keys and the choices remain.
    """
    raw = compose_one(*configs()[name]).raw
    group = name.split("=")[0]
    there = [group, *paths.GROUPS, "stages"] if group == "experiment" else [group]
    found = [
        key
        for g in there
        if g in raw
        for key in (keys(raw[g], g) if g == group else [g])
    ]
    return tuple((key, kind) for key in found for kind in BAD)


def test_a_sample_of_bad_values(tried: Callable[..., str]) -> None:
    wrong = []
    for name in SAMPLE:
        every = pairs(name)
        wrong += [
            tried(*configs()[name], f"{key}={BAD[kind]}") for key, kind in every[::STEP]
        ]
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.slow
@pytest.mark.parametrize("name", configs())
def test_every_bad_value(name: str, tried: Callable[..., str]) -> None:
    args = configs()[name]
    few = FEW if name.split("=")[0] not in ("study", "task", "experiment") else []
    wrong = [tried(*args, *few, f"{key}={BAD[kind]}") for key, kind in pairs(name)]
    assert not any(wrong), "\n".join(filter(None, wrong))
