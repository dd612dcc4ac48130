"""What starts a new version, what makes another run, and what does neither."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from posbench import paths, versions
from posbench.files.digests import read_contents
from posbench.files.sources import checkpoint_source as checkpoint_source
from posbench.methods.ms_poe import MsPoE
from posbench.pipeline import execute, identity
from posbench.search.channel import ChannelSearch
from posbench.studies.attention_to_gold import AttentionToGold
from posbench.studies.cost.latency import Latency
from posbench.tasks.longbench import LongBench
from tests.conftest import config_of, few
from yu2025.crop_mask import CropMask as CropMaskStudy

BASE = ["model=tiny", "method=scale_channel", "stages=[evaluate]", "runtime.device=cpu"]


@pytest.fixture(scope="module")
def config() -> Any:
    return config_of(*BASE)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the package's code that a test may change."""
    copy = tmp_path / "posbench"
    shutil.copytree(
        paths.PACKAGE,
        copy,
        ignore=shutil.ignore_patterns("models", "templates", "__pycache__"),
    )
    monkeypatch.setattr(paths, "PACKAGE", copy)
    yield copy
    _forget_code()


def _forget_code() -> None:
    identity._code_of.cache_clear()
    identity._package_code.cache_clear()


def _digest(*classes: type) -> str:
    """What a process that starts now would find."""
    _forget_code()
    return identity.source_digest(classes)


ALWAYS = (
    "tasks/kv_retrieval.py",
    "tasks/scorers.py",
    "stats/bootstrap.py",
    "model/lm.py",
    "methods/scale_channel.py",
    "measure/items.py",
    "run/base.py",
    "pipeline/stages/evaluate.py",
    "schema.py",
    "files/atomic.py",
    "files/gguf.py",
)
BY_CHOICE = {
    "tasks/longbench.py": LongBench,
    "methods/ms_poe.py": MsPoE,
    "search/channel.py": ChannelSearch,
    "perturbations/crop_mask.py": CropMaskStudy,
    "studies/base.py": CropMaskStudy,
    "studies/cost/floors.py": Latency,
}
NEVER = (
    "report/page.py",
    "report/text.py",
    "plots/base.py",
    "plots/sweep.py",
    "cli/main.py",
    "errors.py",
    "versions.py",
    "files/sources.py",
    "files/markdown.py",
    "pipeline/execute.py",
)


@pytest.mark.parametrize("file", few([*ALWAYS, *BY_CHOICE, *NEVER], 10))
def test_code_that_can_move_a_number_makes_another_run_and_other_code_does_not(
    file: str, package: Path
) -> None:
    classes = [BY_CHOICE[file]] if file in BY_CHOICE else []
    before = (_digest(), _digest(*classes))
    text = (package / file).read_text()
    (package / file).write_text(f"{text}# a comment\n\n\n'a docstring'\n")
    assert (_digest(), _digest(*classes)) == before
    (package / file).write_text(f"{text}CHANGED = 1\n")
    assert (_digest() != before[0]) is (file in ALWAYS)
    assert (_digest(*classes) != before[1]) is (file not in NEVER)


@pytest.mark.parametrize(
    ("cls", "data", "moves"),
    [
        (LongBench, "tasks/longbench.json", True),
        (LongBench, "tasks/mmlu.json", False),
        (Latency, "studies/cost/shapes.yaml", True),
    ],
)
def test_the_data_of_a_module_count_with_it(
    cls: type, data: str, moves: bool, package: Path
) -> None:
    before = _digest(cls)
    (package / data).write_text((package / data).read_text() + "\n")
    assert (_digest(cls) != before) is moves


def test_a_changed_figure_of_a_study_makes_no_other_run(package: Path) -> None:
    file = package / "studies/attention_to_gold.py"
    text = file.read_text()
    before = _digest(AttentionToGold)
    assert text.count("@plot.styled") == 3
    drawn = text.replace("    figure, ", "    print()\n    figure, ")
    assert drawn.count("print()") >= 2
    file.write_text(drawn)
    assert _digest(AttentionToGold) == before
    # What stands between the functions that draw counts.
    for at in (text.index("@plot.styled"), text.rindex("@plot.styled"), len(text)):
        file.write_text(text[:at] + "NEW = 1\n" + text[at:])
        assert _digest(AttentionToGold) != before


def test_a_new_file_counts_where_it_is_imported_and_under_its_own_name(
    package: Path,
) -> None:
    digests = [_digest()]
    fresh = package / "methods" / "fresh.py"
    fresh.write_text("")
    assert _digest() == digests[0], "nothing imports it"
    for name in ("fresh", "other"):
        fresh = fresh.rename(package / "methods" / f"{name}.py")
        method = package / "methods" / "scale_channel.py"
        text = method.read_text().partition("\nimport posbench.methods.")[0]
        method.write_text(f"{text}\nimport posbench.methods.{name}\n")
        digests.append(_digest())
    assert len(set(digests)) == 3


def _name(config: Any) -> str:
    read = identity.run_contents(config)
    return identity.run_name(config, identity.identity(config, read), read)


@pytest.mark.parametrize(
    ("override", "run"),
    [
        ("task.seed=1", True),
        ("task.pairs=16", True),
        ("method.factor=0.5", True),
        ("method.factor=-1.0", True),
        ("method=none", True),
        ("model=tiny_b", True),
        ("model.dtype=bfloat16", True),
        ("model.context_window=300", True),
        ("runtime.batch_size=8", True),
        ("runtime.threads=2", True),
        ("runtime.resamples=109", True),
        ("runtime.intervene_examples=3", True),
        ("search.strings=9", False),
        ("runtime.outputs=elsewhere", False),
        ("runtime.log_every=5", False),
        ("stages=[evaluate,report]", False),
    ],
)
def test_settings_that_move_a_number_make_another_run(
    override: str, run: bool, config: Any
) -> None:
    name = _name(config)
    other_name = _name(config_of(*BASE, override))
    assert (name != other_name) is run
    if override == "method.factor=-1.0":
        assert other_name.startswith("tiny__scale_channel__"), (
            "the model's own value, but typed"
        )


def test_a_search_is_part_of_a_run_that_searches_and_a_study_names_its_folder() -> None:
    searches = [
        config_of("stages=[search,evaluate]", f"search.strings={n}") for n in (8, 9)
    ]
    assert _name(searches[0]) != _name(searches[1])
    assert _name(config_of("study=crop_mask")).startswith("tiny__crop_mask__none__")


def test_a_checkpoint_is_known_by_every_byte_that_it_is_loaded_from(
    tmp_path: Path, checkpoint: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    weights = copy / "model.safetensors"
    whole = (copy / "model.safetensors").read_bytes()

    def found() -> str:
        return identity.fingerprint(read_contents([checkpoint_source(str(copy))]))

    first = found()
    assert first == identity.fingerprint(
        read_contents([checkpoint_source(str(checkpoint))])
    ), "where it lies says nothing"
    (copy / "README.md").write_text("read me")
    assert found() == first
    for changed in (
        whole[:-1] + bytes([whole[-1] ^ 1]),
        whole + b"\0",
        bytes([whole[0] ^ 1]) + whole[1:],
    ):
        weights.write_bytes(changed)
        assert found() != first
    long = bytes(3 << 20)
    weights.write_bytes(long)
    before = found()
    weights.write_bytes(long[: 3 << 19] + b"\1" + long[(3 << 19) + 1 :])
    assert found() != before, "a byte in the middle"
    weights.write_bytes(whole)
    assert found() == first
    (copy / "chat_template.jinja").write_text("x")
    assert found() != first


READ: dict[str, list[str]] = {
    "task.path": [],
    "task.calibration_path": ["stages=[search,evaluate]"],
    "method.weights": ["method=moice"],
    "method.parts.moice.weights": [
        "method=[moice,scale_channel]",
        "method.parts.moice.top_k=7",
    ],
    "search.data": ["search=router", "method=moice", "stages=[search]"],
    "study.text": ["study=score_map"],
    "study.trainings": ["study=synthetic_results"],
    "study.published": ["study=synthetic_results", "study.trainings=tests"],
}


@pytest.mark.parametrize("field", READ)
def test_what_a_file_holds_is_part_of_a_run(field: str, tmp_path: Path) -> None:
    given = tmp_path / "given"
    inside = {"study.trainings": "training/rows.jsonl", "study.published": "gaps.csv"}
    file = given / inside[field] if field in inside else given
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    base = BASE if not field.startswith(("study", "search")) else []
    config = config_of(*base, *READ[field], f"{field}={given}")
    names = []
    for text in ("one", "two", "one"):
        file.write_text(text)
        names.append(_name(config))
    assert names[0] == names[2] != names[1]


def test_a_folder_of_data_and_the_commit_of_hub_data_are_part_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub = tmp_path / "hub/datasets--tau--zero_scrolls"
    folder = tmp_path / "own"
    (hub / "refs").mkdir(parents=True)
    folder.mkdir()
    args = [*BASE, "task=zero_scrolls", "task.subsets=[gov_report]"]
    found = []
    configs = config_of(*args), config_of(*args, f"task.path={folder}")
    for sha in ("a" * 40, "b" * 40):
        (hub / "snapshots" / sha).mkdir(parents=True)
        (hub / "snapshots" / sha / "gov_report.zip").write_text("the same")
        (hub / "refs/main").write_text(sha)
        (folder / "gov_report.zip").write_text(sha)
        found += map(_name, configs)
    assert len(set(found)) == 4


USERS_CODE = {
    "users_identity.py": """
from dataclasses import dataclass
from users_identity_base import Base
from users_identity_factor import factor

@dataclass(frozen=True, kw_only=True)
class Mine(Base):
    '''Scales by a factor of another module.'''
""",
    "users_identity_base.py": """
from posbench.methods import ScaleChannel

class Base(ScaleChannel):
    def changed(self, lm):
        from users_identity_lazily import change
        return change(self, lm)
""",
    "users_identity_factor.py": "def factor(): return -0.5\n",
    "users_identity_lazily.py": "change = None\n",
    "users_identity_unused.py": "",
    "users_identity_task.py": """
from posbench.tasks.kv_retrieval import KVRetrieval

class Side(KVRetrieval):
    pass
""",
    "task/side.yaml": "_target_: users_identity_task.Side\n",
    "method/mine.yaml": "_target_: users_identity.Mine\nchannel: 3\nlayers: [1, 2]\nfactor: 0.5\n",
}


@pytest.mark.parametrize("changed", [name for name in USERS_CODE if ".py" in name])
def test_all_of_a_users_code_is_part_of_a_run(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class's own file, its base class's, and what they import, also inside a function."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which --config-dir adds
    for name, text in USERS_CODE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    overrides = ["method=mine", "stages=[search]", "search.side_task=side"]
    try:
        config = config_of(f"--config-dir={tmp_path}", "model=tiny", *overrides)
        before = _name(config)
        assert _name(config) == before
        (tmp_path / changed).write_text(USERS_CODE[changed] + "# a comment\n")
        assert _name(config) == before
        (tmp_path / changed).write_text(USERS_CODE[changed] + "CHANGED = 1\n")
        assert (_name(config) != before) is (changed != "users_identity_unused.py")
    finally:
        for name in [name for name in sys.modules if name.startswith("users_identity")]:
            del sys.modules[name]


def test_libraries_are_part_of_a_run(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [_name(config)]
    for library in ("torch", "transformers"):
        monkeypatch.setattr(
            versions,
            "version_of",
            lambda asked, own=library: "9" if asked == own else "1",
        )
        names.append(_name(config))
    assert len(set(names)) == 3


def test_a_record_says_where_a_run_was_made(config: Any) -> None:
    read = identity.run_contents(config)
    facts = identity.provenance(
        config, "posbench model=tiny", identity.identity(config, read), read
    )
    assert (
        facts["command"] == "posbench model=tiny"
        and facts["identity"]["device"] == "cpu"
    )
    assert {"torch", "transformers", "numpy"} <= set(facts["packages"]) and facts[
        "hardware"
    ]
    assert facts["model"]["path"] == "posbench://tiny" and facts["task"]["licence"]


def test_the_threads_of_a_run_are_its_own_whatever_ran_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model's file asks for one; the next run of the process has all again, shared out to its workers."""
    monkeypatch.setattr(execute, "default_threads", lambda: 4)
    before = torch.get_num_threads()
    workers = "runtime.workers=2"
    wanted = {
        (): 1,
        ("runtime.threads=3",): 3,
        ("model.threads=null",): 4,
        ("model.threads=null", workers): 2,
    }
    try:
        for overrides, threads in wanted.items():
            execute.set_threads(config_of(*BASE, *overrides))
            assert torch.get_num_threads() == threads, overrides
    finally:
        torch.set_num_threads(before)


def test_a_checkout_without_git_on_this_machine_has_no_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    identity._git_commit()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert identity._git_commit() is None
