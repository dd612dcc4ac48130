"""Shared fixtures: no network, a random checkpoint on disk, and the command line in this process."""

import base64
import os
import re
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
# Models this small gain nothing from a second thread, and lose much when test processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hypothesis import settings

from posbench import paths
from posbench.stats.glance import Glance
from tests.glances import check_glance

settings.register_profile("posbench", deadline=None)  # a machine may be slow
settings.load_profile("posbench")

PATH = [*sys.path]
PROCESS = [sys.executable, "-c", "from posbench.cli.main import run; run()"]
"""The command line as a process of its own; arguments follow."""
BYTECODE = sys.dont_write_bytecode
# Compiled test modules are kept, whatever the environment says: rewriting the asserts takes a third of the collection.
sys.dont_write_bytecode = False
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg=="
)
"""A PNG."""


def pytest_collection_finish() -> None:
    """Keep nothing of the modules that tests write, and change within a second."""
    sys.dont_write_bytecode = BYTECODE


@dataclass(frozen=True)
class Result:
    """What one call of the command line left."""

    status: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def forget_own_code() -> None:
    """Let a test find the user's own modules as a new process does: none is imported, and no --config-dir searched."""
    own = {os.path.realpath(entry) for entry in set(sys.path) - set(PATH)}
    sys.path[:] = PATH
    if not own:
        return
    real_folder = cache(os.path.realpath)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and real_folder(os.path.dirname(file)) in own:
            del sys.modules[name]


@pytest.fixture(scope="session", autouse=True)
def composed_once() -> Iterator[None]:
    """Let Hydra compose each choice of shipped files once, which takes a seventh of a small run; callers copy it."""
    compose = hydra.compose
    shipped = (paths.CONF, paths.EXPERIMENTS)
    made = dict[tuple[str, ...], Any]()

    def is_shipped(override: str) -> bool:
        """Whether it chooses a file, not what the command line put under a name: model=DIR, method=from:RUN."""
        group, _, choice = override.lstrip("+").partition("=")
        folder = paths.CONF / group
        return not folder.is_dir() or (folder / f"{choice}.yaml").is_file()

    def compose_once(name: str, overrides: list[str], **settings: Any) -> Any:
        entries = GlobalHydra.instance().config_loader().get_search_path().get_path()
        places = [str(entry.path) for entry in entries]
        further = re.findall(r"file://([^,\]]+)", ",".join(overrides))
        folders = [Path(place) for place in [*places, *further] if "://" not in place]
        if not all(any(map(folder.is_relative_to, shipped)) for folder in folders):
            return compose(name, overrides, **settings)
        if not all(map(is_shipped, overrides)):
            return compose(name, overrides, **settings)
        key = (os.getcwd(), name, *places, *overrides)
        if key not in made:
            made[key] = compose(name, overrides, **settings)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hydra, "compose", compose_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """Leave to the system when files reach the disk: a small run would wait for it 30 times, at 8 ms each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_retries() -> Iterator[None]:
    """Repeat a request that failed at once: the pauses of five failures are 15 seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posbench.backends.served.FIRST_RETRY_SECONDS", 0.01)
        yield


@pytest.fixture(scope="session", autouse=True)
def checked_glances() -> Iterator[None]:
    """Check every first look at a result that any test makes, of all studies, sweeps and diagnoses."""
    create = Glance.__init__

    def create_and_check(glance: Glance, *args: Any, **fields: Any) -> None:
        create(glance, *args, **fields)
        check_glance(glance)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Glance, "__init__", create_and_check)
        yield


@pytest.fixture(autouse=True)
def blank_figures(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write an empty picture for every figure, but in tests marked ``figures``: drawing is a quarter of a small run."""
    if request.node.get_closest_marker("figures"):
        return
    from matplotlib.figure import Figure

    def write_empty(figure: Figure, file: Any, *, format: str, **settings: Any) -> None:
        svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="1pt" height="1pt"/>'
        file.write(svg if format == "svg" else PIXEL)

    monkeypatch.setattr(Figure, "savefig", write_empty)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 4 layers and 16 channels that reads the words of the embedded models; window 256."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from posbench.embedded.tokenizer import build_tokenizer

    folder = tmp_path_factory.mktemp("models") / "random"
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny() -> Any:
    """The embedded model; a test that changes it changes it back."""
    import posbench

    return posbench.load("tiny")


@pytest.fixture(scope="session")
def small(checkpoint: Path) -> list[str]:
    """Overrides of a run on that checkpoint that takes a second: 36 examples, 16 candidates."""
    return [
        "model=hf",
        "model.name=random",
        f"model.path={checkpoint}",
        "model.dtype=float32",
        "search=exhaustive",
        "task.prompt=compact",
        "task.records=words",
        "task.pairs=12",
        "task.positions=[0,5,11]",
        "task.limit=12",
        "task.max_new_tokens=1",
        "task.calibration_pairs=8",
        "task.calibration_examples=12",
        "search.alphabet=tokens",
        "search.strings=24",
        "search.length=48",
        "search.window=6",
        "search.skip=2",
        "search.factors=[0.0]",
        "runtime.device=cpu",
        "runtime.threads=1",
        "runtime.intervene_examples=4",
        "runtime.resamples=200",
        "runtime.batch_size=8",
        "stages=[search,intervene,evaluate]",
    ]


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Where the runs of a test go."""
    return tmp_path / "outputs"


@pytest.fixture
def posbench(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """The command line in this process; whatever composes a config writes to ``outputs``."""
    from posbench.cli.main import main

    def call(*args: str, verb: bool = False) -> Result:
        capsys.readouterr()
        status = main([*args] if verb else [*args, f"runtime.outputs={outputs}"])
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return call


def few(values: Iterable[Any], count: int) -> list[Any]:
    """Values to parametrize a test with: so many of them, spread evenly, are in the suite, the others are slow."""
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    kept = {round(i * (len(cases) - 1) / max(count - 1, 1)) for i in range(count)}
    return [
        pytest.param(*case, marks=() if index in kept else pytest.mark.slow)
        for index, case in enumerate(cases)
    ]


def run_folders(outputs: Path) -> list[Path]:
    """The run folders of an outputs folder, sweeps excluded."""
    return sorted(p.parent for p in outputs.glob("*/v*/*/config.yaml"))


def config_of(*overrides: str) -> Any:
    """The checked config of a command line."""
    from posbench.pipeline.compose import compose_one
    from posbench.pipeline.config import check_config

    return check_config(compose_one(*overrides))
