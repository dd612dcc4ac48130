"""A public name stays, or is answered with its new name for a whole version."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posbench.cli.main import main
from posbench.renamed import OLD_NAMES, RenamedAttribute, renamed_parameters
from tests import public_names

ROOT = Path(__file__).parents[1]
GONE = """
gone from posbench, but listed in tests/data/public_names.txt. Whoever uses such a name must be told the new one for
a whole version (CONTRIBUTING.md, "Rename something"), and CHANGELOG.md has a line with both. Then write the list:
python -m tests.public_names
"""
NEW = "new: list them by `python -m tests.public_names`"
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sorted((ROOT / "posbench").rglob("*.py"))
    if "from posbench.renamed import" in file.read_text()
]
for module in MODULES:
    import_module(module)
RENAMED = sorted(OLD_NAMES.items())


def assert_same(listed: set[str], names: set[str]) -> None:
    gone = sorted(listed - names)
    assert not gone, "\n".join([GONE, *gone])
    new = sorted(names - listed)
    assert not new, "\n".join([NEW, *new])


def test_the_list_holds_every_public_name() -> None:
    listed = {name for name in public_names.listed() if not name.startswith("study ")}
    assert_same(listed, public_names.public_names())


@pytest.mark.slow
def test_the_list_holds_every_column_of_a_study() -> None:
    listed = {name for name in public_names.listed() if name.startswith("study ")}
    assert_same(listed, public_names.study_names())


def find(dotted: str) -> Any:
    """The module, class or function of a dotted name."""
    module, names = dotted, []
    while module not in MODULES:
        module, _, name = module.rpartition(".")
        names.insert(0, name)
    found: Any = import_module(module)
    for name in names:
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(("old", "new"), RENAMED)
def test_an_old_name_gives_what_it_is_now(old: str, new: str) -> None:
    owner, _, name = old.rpartition(".")
    new_name = new.rpartition(".")[2]
    thing = find(owner)
    if inspect.ismodule(thing):
        with pytest.warns(FutureWarning, match=f"{old} is now {new};"):
            assert getattr(thing, name) is getattr(thing, new_name)
    elif isinstance(vars(thing).get(name), RenamedAttribute):
        owned = SimpleNamespace(**{new_name: "what it is now"})
        with pytest.warns(FutureWarning, match=f"{old} is now {new};"):
            assert vars(thing)[name].__get__(owned) == "what it is now"
        assert new_name in public_names.members(thing, set())
    else:
        names = inspect.signature(thing).parameters
        assert new_name in names and name not in names


@pytest.mark.parametrize("old", OLD_NAMES)
def test_the_changelog_tells_of_it(old: str) -> None:
    table = re.findall(r"^\|.*", (ROOT / "CHANGELOG.md").read_text(), re.M)
    before = " ".join(line.split(" | ")[0] for line in table)
    assert re.search(rf"\b{old.rpartition('.')[2]}\b", before)


def test_an_old_parameter_is_taken_and_the_line_that_gives_it_told() -> None:
    @renamed_parameters(at="estimate")
    def judge(claim: str, estimate: float) -> tuple[str, float]:
        return claim, estimate

    with pytest.warns(
        FutureWarning, match=r"judge\(at=\) is now .*\(estimate=\)"
    ) as told:
        assert judge("claim", at=0.5) == ("claim", 0.5)  # type: ignore[call-arg]
    assert told[0].filename == __file__


def test_a_name_that_never_was_is_none() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        _ = find("posbench.search.base").absent


@pytest.mark.parametrize(
    ("args", "answer"),
    [
        (["docs", "families"], "python tools/pages.py"),
        (["validate", "study=attention_to_gold", "study.pairs=3"], "study.items=3"),
        (["validate", "task.examples_per_position=3"], "task.limit=3"),
        (["validate", "experiment=old"], "experiment.grid, its name now"),
        (["validate", "model=old"], "the name of its search: channel"),
    ],
)
def test_an_old_word_of_the_command_line_is_answered_with_the_new_one(
    args: list[str], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "experiment": "defaults: [config]\nhydra: {sweeper: {params: {task.limit: '1,2'}}}\n",
        "model": "path: posbench://tiny\nsearch: {length: 64}\n",
    }
    for group, text in files.items():
        (tmp_path / group).mkdir()
        (tmp_path / group / "old.yaml").write_text(text)
    if args[0] == "validate":
        args = [*args, "--config-dir", str(tmp_path)]
    assert main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert answer in line
