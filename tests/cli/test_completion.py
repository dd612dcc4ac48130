"""What the Tab key offers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from posbench import paths
from posbench.cli.completion import words
from posbench.cli.main import VERBS
from posbench.errors import choices
from tests.conftest import Result
from tests.messages import assert_refused


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("posbench val", ["validate"]),
        (
            "posbench model=tiny_",
            ["model=tiny_alibi", "model=tiny_b", "model=tiny_nope"],
        ),
        ("posbench fetch experiment=yu2025_table4", ["experiment=yu2025_table4"]),
        ("posbench figures lpes_fig", ["lpes_fig2", "lpes_fig5"]),
        ("posbench method=moice method.top", ["method.top_k="]),
        ("posbench method.fac", ["method.factor="]),
        ("posbench runtime.device", ["runtime.device=", "runtime.device_map="]),
        ("posbench ls exp", ["experiments"]),
        ("posbench show --", ["--all", "--config-dir", "--id", "--wrong"]),
        ("posbench completion z", ["zsh"]),
        ("posbench report out", []),
        ("posbench model=nope model.pa", ["model.path="]),
        ("posbench study=nope study.", []),
    ],
)
def test_words_go_on_as_the_line_asks(line: str, offered: list[str]) -> None:
    assert words(line) == offered


def test_verbs_groups_and_own_files_are_offered(tmp_path: Path) -> None:
    first = {verb.split()[0] for verb in VERBS}
    assert {*first, "model=", "experiment=", "stages="} <= set(words("posbench "))
    assert words("posbench task=") == [
        f"task={name}" for name in choices(paths.CONF / "task")
    ]
    for folder in ("model", "experiment"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.yaml").touch()
    for line, found in (
        ("", "experiment=mine"),
        ("", "model=mine"),
        ("figures ", "mine"),
    ):
        assert words(f"posbench {line}--config-dir {tmp_path} {found[:-1]}") == [found]


def test_keys_of_an_own_file_are_those_of_the_one_that_it_extends(
    tmp_path: Path,
) -> None:
    (tmp_path / "method").mkdir()
    for name, extended in (("half", "scale_channel"), ("quarter", "half")):
        text = f"defaults: [{extended}]\nfactor: 0.5\n"
        (tmp_path / "method" / f"{name}.yaml").write_text(text)
    line = f"posbench --config-dir {tmp_path} method=quarter method.fac"
    assert words(line) == ["method.factor="]


def test_bash_completes_behind_its_own_word_breaks(
    posbench: Callable[..., Result], tmp_path: Path
) -> None:
    """In bash ``=`` begins a word of its own, so what stands before it must not come back."""
    script = posbench("completion", "bash", verb=True).out
    stand_in = 'posbench() { printf "%s\\n" model=tiny_b model=tiny_nope; }'
    line = "posbench model=tiny_"
    typed = f'COMP_LINE="{line}"; COMP_POINT={len(line)}; _posbench; echo "${{COMPREPLY[@]}}"'
    call = f"{script}\n{stand_in}\n{typed}"
    told = subprocess.run(
        ["bash", "-c", call], capture_output=True, text=True, check=True
    )
    assert told.stdout == "tiny_b tiny_nope\n"


def test_a_shell_that_is_not_known_is_refused(posbench: Callable[..., Result]) -> None:
    refused = posbench("completion", "tcsh", verb=True)
    assert (refused.status, refused.out) == (2, "")
    allowed, hint = ("bash", "zsh", "fish"), "posbench completion bash"
    assert_refused(refused.err, "completion", "tcsh", allowed=allowed, hint=hint)
