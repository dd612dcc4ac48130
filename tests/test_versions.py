"""The supported versions: stated in pyproject.toml, tested at both ends; another transformers is refused in
words."""

from __future__ import annotations

import json
import platform
import runpy
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import posbench
from posbench import versions
from posbench.cli.main import main
from tests.messages import assert_refused, refused

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPENDENCIES = [
    *PROJECT["dependencies"],
    *(
        f"{line}; extra == 'local'"
        for line in PROJECT["optional-dependencies"]["local"]
    ),
]
TESTED = [*PROJECT["dependencies"]]
TESTED += [
    line
    for name in ("local", "lm_eval", "export", "cluster", "dev")
    for line in PROJECT["optional-dependencies"][name]
]
"""What the environment of the tests has."""
(SUPPORTED,) = (
    Requirement(line).specifier
    for line in PROJECT["optional-dependencies"]["local"]
    if Requirement(line).name == "transformers"
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Pretend that packages of that version are installed, with the metadata of this checkout."""

    def pretend(number: str) -> None:
        monkeypatch.setattr("importlib.metadata.requires", lambda name: DEPENDENCIES)
        monkeypatch.setattr(versions, "version_of", lambda name: number)

    return pretend


def _pins(file: str) -> dict[str, str]:
    """The versions of a constraints file, by normalised name."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if "==" in line]
    return {
        canonicalize_name(name): version
        for name, _, version in (line.partition("==") for line in lines)
    }


@pytest.mark.parametrize(
    "line", [line for line in TESTED if not line.startswith(versions.DISTRIBUTION)]
)
def test_the_two_test_environments_span_the_supported_range(line: str) -> None:
    """The oldest one has the lower bounds themselves: another could not tell whether they are right."""
    requirement = Requirement(line)
    name = canonicalize_name(requirement.name)
    oldest, tested = (
        _pins(file)[name] for file in ("constraints-oldest.txt", "constraints.txt")
    )
    (lowest,) = (
        bound.version for bound in requirement.specifier if bound.operator == ">="
    )
    # A version of two numbers stands for the first of its patches that was published.
    assert (
        Version(oldest).release[: len(Version(lowest).release)]
        == Version(lowest).release
    )
    assert requirement.specifier.contains(tested)


@pytest.mark.parametrize("number", ["5.6.0", "5.23.0", "5.24.9"])
def test_supported(number: str, installed) -> None:
    installed(number)
    versions.check_transformers()


@pytest.mark.parametrize(
    "number", ["4.57.6", "5.5.4", "5.25.0.dev0", "5.25.0", "6.1.0"]
)
def test_unsupported_is_one_line(
    number: str, installed, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(number)
    assert main(["ls"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert_refused(told.err, "transformers", number, hint="pip install")
    assert all(str(bound) in told.err for bound in SUPPORTED)
    with refused("transformers", number):
        posbench.load("tiny")
    assert main(["--version"]) == 0


def test_a_checkout_without_metadata_is_not_checked(
    installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    installed("4.0.0")
    monkeypatch.setattr("importlib.metadata.requires", missing)
    versions.check_transformers()
    assert versions.installed_versions() == {}


def test_a_run_records_what_posbench_needs_here_without_extras(
    installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("7.0")
    assert versions.installed_versions() == {
        Requirement(line).name: "7.0" for line in DEPENDENCIES
    }
    lines = [
        "numpy>=2.0",
        "lm-eval>=0.4.13; extra == 'lm_eval'",
        "tomli; python_version < '3'",
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: lines)
    assert versions.installed_versions() == {"numpy": "7.0"}


def test_the_name_in_hints_is_that_of_the_package() -> None:
    assert PROJECT["name"] == versions.DISTRIBUTION
    extra = versions.install_hint("local").partition("[")[2].partition("]")[0]
    assert extra == versions.LOCAL_EXTRA and extra in PROJECT["optional-dependencies"]


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'positionbench[push]'"),
        ({"url": "file:///a/p.whl", "archive_info": {}}, "'positionbench[push]'"),
        ({"url": "file:///nowhere", "dir_info": {}}, "'positionbench[push]'"),
        ({"url": "{folder}", "dir_info": {}}, "pip install '{path}[push]'"),
        (
            {"url": "{folder}", "dir_info": {"editable": True}},
            "pip install -e '{path}[push]'",
        ),
    ],
)
def test_a_hint_installs_from_where_posbench_came(
    origin: dict[str, Any] | None,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkout = tmp_path / "a checkout"
    checkout.mkdir()
    text = json.dumps(origin).replace("{folder}", checkout.as_uri()) if origin else None

    def read_text(self: Distribution, name: str) -> str | None:
        return text if name == "direct_url.json" else None

    monkeypatch.setattr("importlib.metadata.PathDistribution.read_text", read_text)
    hint = versions.install_hint("push")
    assert hint.endswith(command.replace("{path}", str(checkout)))


def test_the_matrix_records_where_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    program = runpy.run_path(str(ROOT / "tools" / "portable.py"))["FACTS"]
    exec(compile(program, "portable.py", "exec"), {})
    facts = json.loads(capsys.readouterr().out)
    assert facts["python"] == platform.python_version()
    assert "torch" in facts["packages"] and "thread" in facts["hardware"]
