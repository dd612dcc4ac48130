"""Plug-ins: installed packages that bring methods, tasks, ... of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from posbench import paths
from posbench.model.items import ItemPrompt
from posbench.pipeline import identity
from tests.conftest import PROCESS, Result, config_of, run_folders
from tests.messages import assert_names, assert_refused
from tests.plugins import EXAMPLE, forget, install, install_example

ROOT = Path(__file__).parents[2]
NOT_IMPORTED = "raise ImportError('the plug-in was imported')\n"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What is installed is looked up anew in each test, and forgotten behind it."""
    paths.plugins.cache_clear()
    yield
    forget()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, still empty."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def damp(site: Path) -> Path:
    """Install the method of the examples as a plug-in: ``method=damped``, its strength in a module of constants."""
    package = install(
        site, "plugged-damp", "plugged.damp", damped="_target_: plugged.damp.code.Damp"
    )
    (site / "plugged" / "__init__.py").touch()
    (package / "__init__.py").touch()
    code = (ROOT / "docs" / "examples" / "damp.py").read_text()
    (package / "code.py").write_text(
        code.replace("strength: Share\n", "strength: Share = STRENGTH\n").replace(
            "from posbench.schema",
            "from .constants import STRENGTH\nfrom posbench.schema",
        )
    )
    (package / "constants.py").write_text("STRENGTH = 0.25\nUNUSED = 1\n")
    return package


def test_the_example_rotates_the_items(site: Path) -> None:
    install_example(site)
    prompt = ItemPrompt("a, b, c?", ((0, 1), (3, 4), (6, 7)))
    for places, text in {
        0: "a, b, c?",
        1: "c, a, b?",
        -1: "b, c, a?",
        3: "a, b, c?",
    }.items():
        config = config_of("method=rotate", f"method.places={places}", "model=tiny")
        rewritten = config.method_under_test().trial().rewrite(None, prompt)
        assert rewritten.text == text


@pytest.mark.slow
def test_the_example_is_built_installed_listed_and_run(tmp_path: Path) -> None:
    # A copy, as a build may leave files where it runs.
    source = tmp_path / "source"
    shutil.copytree(EXAMPLE, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    flags = ["--no-deps", "--no-index", "--no-build-isolation"]
    target = ["--target", str(tmp_path / "site"), str(source)]
    subprocess.run([*pip, "install", *flags, *target], check=True)
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])

    def posbench(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", *PROCESS[1:], *args],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path},
            check=False,
        )

    listed = json.loads(posbench("ls", "methods", "--json").stdout)
    origins = {row["name"]: row["from"] for row in listed}
    assert origins.pop("rotate") == "posbench-rotate"
    assert origins == dict.fromkeys(origins)
    args = ["method=rotate", "model=tiny", "task.limit=3", "stages=[evaluate]"]
    refused = posbench(*args)
    assert refused.returncode == 2 and "method = 'rotate'" in refused.stderr
    args += ["task.pairs=4", "task.positions=[0,1,2,3]", "runtime.resamples=100"]
    done = posbench(*args)
    assert done.returncode == 0, done.stderr
    (run,) = run_folders(tmp_path / "outputs")
    packages = json.loads((run / "provenance.json").read_text())["packages"]
    assert packages["posbench-rotate"] == "0.1.0"
    rows = pd.read_json(run / "predictions.jsonl", lines=True)
    assert set(rows["method"]) == {"none", "rotate"}


def test_its_code_is_part_of_a_run(site: Path) -> None:
    package = damp(site)
    config = config_of("method=damped", "model=tiny")

    def digest() -> object:
        return identity.identity(config, identity.run_contents(config))

    before = digest()
    constants = package / "constants.py"
    constants.write_text("STRENGTH = 0.25  # a comment\nUNUSED = 1\n")
    assert digest() == before
    constants.write_text("STRENGTH = 0.25\nUNUSED = 2\n")
    assert digest() != before


def test_nothing_is_imported_until_it_is_chosen(
    site: Path, posbench: Callable[..., Result]
) -> None:
    package = install(site, "plugged", "plugged", late="_target_: plugged.code.Late")
    (package / "__init__.py").write_text(NOT_IMPORTED)
    assert "late" in posbench("ls", "methods", verb=True).out
    assert posbench("method=none", "model=tiny", "--cfg", "job").status == 0
    assert "plugged" not in sys.modules
    chosen = posbench("method=late", "model=tiny", "--cfg", "job")
    assert chosen.status == 2
    assert_names(chosen.err, "method._target_", "plugged.code.Late", "was imported")


@pytest.mark.parametrize("value", ["plugged", "plugged.inner", "json", "plugged:x"])
def test_a_package_that_is_missing_or_empty(
    value: str, site: Path, posbench: Callable[..., Result]
) -> None:
    install(site, "plugged-two", value)
    result = posbench("ls", "methods", verb=True)
    assert_refused(
        result.err,
        "plug-in plugged-two",
        value,
        allowed=("package", "method/NAME.yaml"),
        hint="plugged-two",
    )
    if value == "plugged":
        (site / value / "methods").mkdir(parents=True)
        assert posbench("ls", "methods", verb=True).err == result.err


def test_a_name_that_posbench_or_another_plug_in_has(
    site: Path, posbench: Callable[..., Result]
) -> None:
    package = install(site, "plugged-b", "plugged_b", pine="_target_: a.B")
    assert_refused(
        posbench("model=tiny").err,
        "plug-in plugged-b",
        "method=pine",
        allowed="posbench",
        hint="plugged-b",
    )
    (package / "method" / "pine.yaml").rename(package / "method" / "mine.yaml")
    install(site, "plugged-a", "plugged_a", mine="_target_: a.B")
    assert_refused(
        posbench("model=tiny").err,
        "plug-in plugged-b",
        "method=mine",
        allowed="plugged-a",
        hint="plugged-b",
    )


def test_beside_a_folder_of_the_user(
    site: Path, posbench: Callable[..., Result], tmp_path: Path
) -> None:
    package = damp(site)
    own = tmp_path / "own"
    (own / "method").mkdir(parents=True)
    (own / "method" / "half.yaml").write_text(
        "_target_: plugged.damp.code.Damp\nstrength: 0.5\n"
    )
    folders = paths.config_folders(str(own))
    assert folders == [*paths.BUILT_IN, package, own]
    assert paths.own_folder(folders) == own
    assert paths.own_folder(paths.config_folders(str(package))) is None
    listed = posbench("ls", "methods", "--config-dir", str(own), verb=True).out
    origins = {(*line.split("\t"),)[0::2] for line in listed.splitlines()}
    assert {("damped", "plugged-damp"), ("half", ""), ("pine", "")} <= origins
    # Neither of two files of one name is passed over in silence.
    (own / "method" / "half.yaml").rename(own / "method" / "damped.yaml")
    assert_refused(
        posbench(f"--config-dir={own}", "method=damped", "model=tiny").err,
        "--config-dir",
        str(own),
        allowed=("method=damped", "plugged-damp"),
        hint="rename",
    )


def test_a_run_finds_its_plug_in_again_and_names_one_that_is_gone(
    site: Path, posbench: Callable[..., Result], outputs: Path
) -> None:
    damp(site)
    settings = ["method=damped", "model=tiny", "task.limit=2", "task.positions=[0,31]"]
    assert posbench(*settings, "stages=[evaluate]", "runtime.resamples=100").status == 0
    (run,) = run_folders(outputs)
    assert json.loads((run / "method.json").read_text())["strength"] == 0.25
    facts = json.loads((run / "provenance.json").read_text())
    assert facts["packages"]["plugged-damp"] == "1.5" and "config_dir" not in facts
    command = ["export", str(run), "--to=transformers", "--out", str(outputs / "made")]
    # Found: what is refused is the format, which has no code for it.
    assert_refused(posbench(*command, verb=True).err, "--to", "transformers")
    sys.path.remove(str(site))
    forget()
    gone = posbench(*command, verb=True)
    assert gone.status == 2
    assert_names(gone.err, "method._target_", "plugged.damp.code", "plug-in")
    # The page over all runs stays.
    assert posbench("view", str(outputs), verb=True).status == 0


def test_one_that_cannot_be_imported_is_named_before_anything_is_asked(
    site: Path, posbench: Callable[..., Result], outputs: Path
) -> None:
    package = install(
        site, "plugged-bad", "plugged", late="_target_: plugged.code.Late"
    )
    (package / "__init__.py").touch()
    (package / "code.py").write_text("import no_such_library\n")
    for command, verb in (
        (["study=remedies", "model=tiny", "task.limit=2"], False),
        (["diagnose", "model=tiny"], True),
    ):
        result = posbench(*command, verb=verb)
        assert_refused(
            result.err,
            "method=late",
            "plugged.code.Late",
            hint=("no_such_library", "pip uninstall plugged-bad"),
        )
    assert not run_folders(outputs)
