"""Rows with checksums, and version folders that one process owns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posbench.errors import MachineError
from posbench.run import claim as folder
from posbench.run.claim import claim, find
from posbench.run.folder import RunDir, open_run, open_run_dir
from posbench.run.lease import Lease
from tests.messages import assert_names, refused

ROWS: list[dict[str, Any]] = [
    {"id": str(i), "output": f"Grüße\u2028{i}\n", "score": i / 3} for i in range(4)
]


def test_rows_come_back(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.append("rows.jsonl", ROWS[:2])
    run.append("rows.jsonl", ROWS[2:])
    assert run.rows("rows.jsonl") == ROWS
    assert run.rows("absent.jsonl") == []


@settings(max_examples=60)
@given(data=st.data())
def test_any_changed_byte_drops_its_row_and_no_other(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = RunDir(tmp_path_factory.mktemp("rows"))
    run.append("rows.jsonl", ROWS)
    file = run.path / "rows.jsonl"
    whole = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    if whole[at : at + 1] == b"\n":
        return
    byte = data.draw(
        st.integers(0, 255).filter(lambda b: b not in (whole[at], 10, 32, 9, 13))
    )
    number = whole[:at].count(b"\n")
    before = json.loads(bytes(whole).splitlines()[number])
    whole[at] = byte
    file.write_bytes(whole)
    try:
        says_the_same = json.loads(bytes(whole).split(b"\n")[number]) == before
    except ValueError:
        says_the_same = False
    kept = run.rows("rows.jsonl")
    # Such as 0E0 for 0.0: not a byte of it is wrong.
    assert kept == [row for i, row in enumerate(ROWS) if i != number or says_the_same]


def test_a_number_in_another_notation_is_the_same_row(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.append("rows.jsonl", ROWS)
    file = tmp_path / "rows.jsonl"
    text = file.read_text()
    assert '"score": 0.0' in text or '"score":0.0' in text
    file.write_text(text.replace("0.0", "0E0", 1))
    assert run.rows("rows.jsonl") == ROWS


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_torn_line_never_swallows_the_next(cut: int, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.append("rows.jsonl", ROWS[:2])
    file = tmp_path / "rows.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    run.append("rows.jsonl", ROWS[2:])
    assert run.rows("rows.jsonl") == [
        ROWS[0],
        *([ROWS[1]] if cut == 1 else []),
        *ROWS[2:],
    ]


def test_repair_drops_damage_and_errors(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.append("rows.jsonl", [*ROWS[:2], {"id": "9", "error": "out of memory"}])
    file = tmp_path / "rows.jsonl"
    good = b"".join(file.read_bytes().splitlines(keepends=True)[:2])
    file.write_bytes(file.read_bytes() + b'{"id": "7"}\n[1]\n5\n\xff\n{"id":')
    run.repair("rows.jsonl")
    assert file.read_bytes() == good
    untouched = file.stat().st_ino
    run.repair("rows.jsonl")
    assert file.stat().st_ino == untouched


def _claim(outputs: Path, key: Any, name: str = "run") -> Any:
    return claim(
        outputs, "suite", {"task": key}, name, {"model": "m"}, {"command": "posbench"}
    )


def test_versions(tmp_path: Path) -> None:
    assert (
        find(tmp_path / "out", "suite", {"task": 1}, "run") is None
        and not (tmp_path / "out").exists()
    )
    for key, version in (
        (1, "v001"),
        (2, "v002"),
        (1, "v001"),
        (3, "v003"),
        (2, "v002"),
    ):
        with _claim(tmp_path / "out", key) as run:
            assert run.path == tmp_path / "out/suite" / version / "run"
        assert find(tmp_path / "out", "suite", {"task": key}, "run") == run.path
    assert find(tmp_path / "out", "suite", {"task": 1}, "other") is None


def test_version_numbers_go_past_999_and_over_gaps(tmp_path: Path) -> None:
    for name in ("v007", "v1000", "vx", "video"):
        (tmp_path / "suite" / name).mkdir(parents=True)
    with _claim(tmp_path, 1) as run:
        assert run.path.parent.name == "v1001"


def test_config_and_provenance_come_first(tmp_path: Path) -> None:
    with _claim(tmp_path, 1) as run:
        names = {p.name for p in run.path.iterdir()}
        assert names == {"config.yaml", "provenance.json", "status.json", "figures"}
        assert not run.done
        run.mark("search", key="k", done=True)
        run.finish("done")
        assert (
            run.done
            and run.stage("search") == {"key": "k", "done": True}
            and run.stage("evaluate") == {}
        )
    with _claim(tmp_path, 1) as again:
        assert again.done and again.stage("search")["done"]


def test_a_kill_while_the_folder_is_made_leaves_nothing_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder, "write_text", killed)
    with pytest.raises(KeyboardInterrupt), _claim(tmp_path, 1):
        pass
    monkeypatch.undo()
    assert list(tmp_path.glob("suite/v*/*/config.yaml")) == []
    with _claim(tmp_path, 1) as run:
        assert (run.path / "config.yaml").is_file() and run.path.parent.name == "v001"
    assert [p.name for p in tmp_path.glob("**/.new*")] == []


def test_one_owner(tmp_path: Path) -> None:
    with (
        _claim(tmp_path, 1),
        refused(
            "run folder",
            str(tmp_path / "suite/v001/run"),
            allowed="process",
            hint="wait",
        ),
        _claim(tmp_path, 1),
    ):
        pass
    with _claim(tmp_path, 1), _claim(tmp_path, 1, "another"):
        pass


def test_what_a_run_took_adds_up_over_its_sessions_and_of_memory_the_most_stays(
    tmp_path: Path,
) -> None:
    with _claim(tmp_path, 1) as run:
        run.spend("evaluate", {"seconds": 2.5, "prompt_tokens": 300}, {"resident": 900})
        run.finish("failed", "stopped", seconds=4)
    with _claim(tmp_path, 1) as run:
        run.resume(["evaluate"], {}, {})
        run.spend("search", {"seconds": 1}, {"resident": 100})
        run.spend(
            "evaluate",
            {"seconds": 0.5, "prompt_tokens": 20},
            {"resident": 800, "cuda": 5},
        )
        run.finish("done", seconds=3)
    with _claim(tmp_path, 1) as run:
        evaluate = {"seconds": 3, "prompt_tokens": 320, "resident": 900, "cuda": 5}
        assert run.status()["spent"] == {
            "search": {"seconds": 1, "resident": 100},
            "evaluate": evaluate,
        }
        assert run.status()["seconds"] == 7


def test_siblings(tmp_path: Path) -> None:
    with _claim(tmp_path, 1, "a") as a, _claim(tmp_path, 1, "b") as b:
        assert b.sibling_with("search", "k") is None
        a.mark("search", key="k")
        assert b.sibling_with("search", "k") is None
        a.mark("search", done=True)
        found = b.sibling_with("search", "k")
        assert found is not None and found.path == a.path
        assert (
            b.sibling_with("search", "other") is None
            and a.sibling_with("search", "k") is None
        )


@pytest.mark.parametrize("outputs", ["file", "file/below"])
def test_outputs_in_the_way(outputs: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(
        "runtime.outputs",
        str(tmp_path / outputs),
        allowed="folder",
        hint=("runtime.outputs=DIR", str(tmp_path / "file")),
    ):
        find(tmp_path / outputs, "suite", {"task": 1}, "run")
    with (
        refused(
            "runtime.outputs",
            str(tmp_path / outputs),
            allowed="folder",
            hint=("runtime.outputs=DIR", str(tmp_path / "file")),
        ),
        _claim(tmp_path / outputs, 1),
    ):
        pass


def test_rows_of_another_run_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _claim(tmp_path, 1, "a") as a, _claim(tmp_path, 1, "b") as b:
        for run in (a, b):
            run.append("rows.jsonl", ROWS)
        both = [(run.path / "rows.jsonl").read_bytes() for run in (a, b)]
        (a.path / "rows.jsonl").write_bytes(both[1])
        assert (
            both[0] != both[1]
            and a.rows("rows.jsonl") == []
            and a.num_torn_rows("rows.jsonl") == 4
        )
        a.repair("rows.jsonl")
        assert_names(caplog.text, "dropped 4")
        b.path.rename(b.path.with_name("c"))
        assert open_run_dir(b.path.with_name("c")).rows("rows.jsonl") == ROWS


def test_damage_elsewhere_stops_no_other_run(tmp_path: Path) -> None:
    for key, name in ((1, "a"), (2, "b")):
        with _claim(tmp_path, key, name) as run:
            run.mark("search", key="k", done=True)
            run.finish("done")
    suite = tmp_path / "suite"
    (suite / "v²").mkdir()
    (suite / "v001/version.json").write_text('{"task": ')
    (suite / "v002/b/status.json").write_text("")
    (suite / "v002/b/provenance.json").write_text("[")
    with _claim(tmp_path, 2, "other") as run:
        assert (
            run.path == suite / "v002/other" and run.sibling_with("search", "k") is None
        )
    # The version of a run is known by the run, and its file is written again.
    with _claim(tmp_path, 1, "a") as run:
        assert run.path == suite / "v001/a" and run.damaged() == []
    assert json.loads((suite / "v001/version.json").read_text()) == {"task": 1}
    with _claim(tmp_path, 2, "b") as run:
        assert run.path == suite / "v002/b" and run.damaged() == [
            "provenance.json",
            "status.json",
        ]
        run.resume(["search"], {"model": "m"}, {"command": "again"})
        assert run.facts("provenance.json")["command"] == "again" and run.status()[
            "stages"
        ].keys() == {"config"}


def test_swapped_version_files_put_no_run_over_another(tmp_path: Path) -> None:
    for key in (1, 2):
        with _claim(tmp_path, key) as run:
            run.append("rows.jsonl", ROWS)
    files = [tmp_path / f"suite/{version}/version.json" for version in ("v001", "v002")]
    texts = [file.read_text() for file in files]
    for file, text in zip(files, reversed(texts), strict=True):
        file.write_text(text)
    for key, file, text in zip((1, 2), files, texts, strict=True):
        with _claim(tmp_path, key) as run:
            assert run.path.parent == file.parent and run.rows("rows.jsonl") == ROWS
        assert file.read_text() == text


def test_a_lock_that_stays_held_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder, "WAIT_SECONDS", 0.05)
    assert Lease(tmp_path / "suite/.locks/versions.lock").take()
    with (
        refused(
            "lock",
            str(tmp_path / "suite/.locks/versions.lock"),
            allowed="seconds",
            hint="stop",
            error=MachineError,
        ),
        _claim(tmp_path, 1),
    ):
        pass
    assert "waiting up to" in caplog.text and not list(tmp_path.glob("suite/v*"))


def test_a_folder_of_runs_names_them(tmp_path: Path) -> None:
    with _claim(tmp_path, 1, "a") as a, _claim(tmp_path, 1, "b") as b:
        for above in (a.path.parent, tmp_path):
            with refused(
                "DIR",
                str(above),
                allowed="config.yaml",
                hint=(str(a.path), str(b.path)),
            ):
                open_run(above)


def test_open_run(tmp_path: Path) -> None:
    with refused("DIR", str(tmp_path), allowed="config.yaml", hint="posbench ls runs"):
        open_run(tmp_path)
    with _claim(tmp_path, 1) as run:
        assert open_run(run.path).path == run.path
        assert run.facts("provenance.json") == {"command": "posbench", "run": run.id}
