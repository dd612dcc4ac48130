"""Strict reading: what JSON and YAML from outside may hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posbench.files import parse
from tests.messages import refused

finite = st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | finite | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(plain)
def test_what_json_writes_is_read(data: Any) -> None:
    assert parse.parse_json(json.dumps(data)) == data
    assert parse.parse_json(json.dumps(data, ensure_ascii=False).encode()) == data


@pytest.mark.parametrize("opening, closing", ["[]", ('{"a":', "}")])
def test_the_deepest_data(opening: str, closing: str) -> None:
    def nested(depth: int) -> str:
        return opening * depth + "1" + closing * depth

    assert parse.parse_json(nested(parse.MAX_DEPTH)) == json.loads(
        nested(parse.MAX_DEPTH)
    )
    for depth in (parse.MAX_DEPTH + 1, 900, 100_000):
        with pytest.raises(ValueError, match="nested"):
            parse.parse_json(nested(depth))
        with pytest.raises(ValueError, match="nested"):
            parse.parse_yaml(nested(depth).replace(":", ": "))


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "-1e999"])
def test_numbers_are_finite(number: str) -> None:
    for text in (number, f"[{number}]", f'{{"a": {number}}}'):
        with pytest.raises(ValueError, match="finite"):
            parse.parse_json(text)


@pytest.mark.parametrize("half", ["\\ud800", "\\uDC00", "\\udfff x"])
def test_half_a_character_is_refused_and_a_whole_one_is_not(half: str) -> None:
    for text in (f'"{half}"', f'{{"{half}": 1}}'):
        with pytest.raises(ValueError, match="surrogates"):
            parse.parse_json(text)
    assert parse.parse_json('"\\ud83d\\ude00"') == "\N{GRINNING FACE}"
    assert parse.parse_json('"\\\\ud800"') == "\\ud800"


def test_aliases_of_aliases_are_refused_before_they_are_spelled_out() -> None:
    """Ten lines of ten aliases each are ten thousand million values; two shared lines are nothing."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 10):
        aliases = ", ".join(10 * [f"*a{level - 1}"])
        lines.append(f"a{level}: &a{level} [{aliases}]")
    with pytest.raises(ValueError, match="aliases"):
        parse.parse_yaml("\n".join(lines))
    assert parse.parse_yaml("\n".join(lines[:2]))["a1"] == 10 * [10 * ["x"]]


def test_an_alias_is_no_loop() -> None:
    assert parse.parse_yaml("a: &x [1]\nb: *x") == {"a": [1], "b": [1]}
    with pytest.raises(ValueError, match="inside"):
        parse.parse_yaml("a: &x [1, *x]")


def test_a_file_may_be_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "data.json"
    file.write_text('{"a": 1}')
    monkeypatch.setattr(parse, "MAX_FILE_BYTES", 8)
    assert parse.read_json(file, hint="go on") == {"a": 1}
    monkeypatch.setattr(parse, "MAX_FILE_BYTES", 7)
    with refused("data.json", str(file), hint=("8", "7")):
        parse.read_json(file, hint="go on")


def test_a_field_of_another_type_is_named(tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text('{"a": [1, 2], "b": [1, "two"]}')
    shape = dict[str, list[int]]
    with refused(f"{file}: b.1", "two", allowed="integer", hint="go on"):
        parse.read_json(file, shape, hint="go on")
    file.write_text('{"a": "' + "x" * 1000 + '"}')
    with refused(f"{file}: a", "x" * 120 + " ...", allowed="list", hint="go on"):
        parse.read_json(file, shape, hint="go on")
