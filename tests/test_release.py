"""What publishes posbench names it as pyproject.toml does, and stores no secret."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = (ROOT / ".github" / "workflows" / "release.yml").read_text()
CONTAINER = (ROOT / "Containerfile").read_text()
INSTALLED = re.compile(r"([\w-]+)\[([\w,]+)\]")


@pytest.fixture
def jobs() -> dict[str, Any]:
    """The jobs of the workflow, by name."""
    return yaml.safe_load(WORKFLOW)["jobs"]


@pytest.mark.parametrize("text", [WORKFLOW, CONTAINER])
def test_the_distribution_and_its_extras_are_those_of_the_project(text: str) -> None:
    installed = INSTALLED.findall(text)
    assert installed
    for name, extras in installed:
        assert name == PROJECT["name"]
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_workflow_publishes_the_project_after_trying_it(
    jobs: dict[str, Any],
) -> None:
    publish = jobs["publish"]
    assert publish["environment"]["url"].rstrip("/").endswith(f"/{PROJECT['name']}")
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "try" and jobs["try"]["needs"] == "build"
    assert "secrets." not in WORKFLOW and "password" not in WORKFLOW
    for job in jobs.values():
        for step in job["steps"]:
            # A major version, or a branch of one: what is tested does not change under it.
            assert re.search(r"@(release/)?v\d+$", step.get("uses", "x@v1"))


def test_the_wheel_is_tried_on_every_python_of_the_tests(jobs: dict[str, Any]) -> None:
    tests = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    pythons = tests["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert jobs["try"]["strategy"]["matrix"]["python"] == pythons
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert pythons[0] == lowest


def test_the_container_runs_posbench_as_no_root() -> None:
    lines = [line for line in CONTAINER.splitlines() if line and line[0] != "#"]
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert lines[0] == f"FROM python:{lowest}-slim"
    (command,) = PROJECT["scripts"]
    assert lines[-1] == f'ENTRYPOINT ["{command}"]'
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users and users[-1] != "root"
    # What it fetches belongs to the user that runs it.
    fetch = f"RUN {command} fetch smollm2"
    assert lines.index(fetch) > lines.index(f"USER {users[-1]}")
