"""One line for each fault: field, value, what is allowed, the next step."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from posbench.errors import (
    Faults,
    SeveralErrors,
    UserError,
    choices,
    machine_error,
    near,
    renamed,
    unknown_name,
)


def test_a_fault_is_one_line() -> None:
    error = UserError("task.pairs", "a\nb", "a whole\n number", "set\ttask.pairs=2")
    assert (
        str(error)
        == "task.pairs = 'a\\nb': allowed: a whole number; next: set task.pairs=2"
    )
    assert error.faults == (error,)


def test_a_full_stream_is_called_the_output() -> None:
    """Python tells no file of a write that standard output cannot take."""
    fault = machine_error(OSError(errno.ENOSPC, "No space left on device"))
    assert fault is not None and fault.field == "file"
    assert fault.value.startswith("the output") and "No space left" in fault.hint


def test_faults_are_raised_together() -> None:
    faults, first, second, third = (
        Faults(),
        *(UserError(name, 1, "2", "set it") for name in ("a", "b", "c")),
    )
    again = UserError("b", 1, "3", "another word on the same value")
    faults.raise_any()
    with faults.collecting():
        raise first
    with pytest.raises(UserError) as alone:
        faults.raise_any()
    assert alone.value is first
    with faults.collecting():
        raise SeveralErrors([second, third, again])
    with pytest.raises(SeveralErrors) as several:
        faults.raise_any()
    assert several.value.faults == (first, second, third) and several.value.field == "a"
    assert str(several.value).splitlines() == [str(first), str(second), str(third)]
    with pytest.raises(KeyError), faults.collecting():
        raise KeyError("not the user's")


def test_errors_of_a_part_name_it_in_all_their_words() -> None:
    with pytest.raises(UserError) as caught, renamed("method.", "method.parts.moice."):
        raise UserError(
            "method.top_k",
            9,
            "1 to 7 with method.weights=uniform",
            "set method.top_k=7",
        )
    assert str(caught.value) == (
        "method.parts.moice.top_k = 9: allowed: 1 to 7 with method.parts.moice.weights=uniform; "
        "next: set method.parts.moice.top_k=7"
    )
    with pytest.raises(UserError) as again, renamed("method.", "method.parts.moice."):
        raise caught.value
    assert again.value is caught.value, "what is named already is not named twice"


def test_each_of_several_faults_is_named() -> None:
    faults = [
        UserError(f"method.{name}", 1, "2", f"set method.{name}=2")
        for name in ("a", "b")
    ]
    with pytest.raises(UserError) as caught, renamed("method.", "model_args."):
        raise SeveralErrors(faults)
    assert [str(fault) for fault in caught.value.faults] == [
        f"model_args.{name} = 1: allowed: 2; next: set model_args.{name}=2"
        for name in ("a", "b")
    ]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("scale", "scale_channel"),
        ("scale_chanel", "scale_channel"),
        ("kv", ""),
        ("", ""),
    ],
)
def test_the_nearest_name_is_a_hint(name: str, hint: str) -> None:
    wanted = f"did you mean {hint}?" if hint else "look there"
    assert near(name, ["moice", "scale_channel"], "look there") == wanted


def test_choices_are_the_names_of_the_files(tmp_path: Path) -> None:
    for name in ("b.yaml", "a.yaml", "c.txt"):
        (tmp_path / name).touch()
    assert choices(tmp_path, tmp_path, tmp_path / "absent") == ["a", "b"]


def test_of_many_names_an_error_lists_the_closest() -> None:
    names = [f"fig{number}" for number in range(60)]
    error = unknown_name("experiment", "fig99", names, "posbench ls experiments")
    text = error.allowed
    assert error.field == "experiment" and error.hint == "did you mean fig9?"
    listed, _, others = text.partition(" and ")
    assert others == "55 others (posbench ls experiments)"
    assert "fig9" in listed.split(", ") and len(listed.split(", ")) == 5
    error = unknown_name("model", "qqq", ["a", "b"], "posbench ls models")
    assert (error.allowed, error.hint) == ("a, b", "posbench ls models")
