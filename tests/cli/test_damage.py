"""Damage to every file of a finished and of an unfinished run, in five ways: noticed, and made good."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from posbench.cli.main import main
from posbench.run.folder import REDRAWN_FILES, RunDir, open_run_dir, open_undamaged
from posbench.run.lease import owning
from tests.conftest import Result, run_folders
from tests.messages import assert_refused, refused

WAYS = ("deleted", "emptied", "halved", "flipped", "swapped")
OWN = ("provenance.json", "status.json", "manifest.json", "DONE", "report.html")
"""What holds the time of the start, or checksums of what holds it."""


@dataclass(frozen=True)
class Tree:
    """Outputs with one run, whole or stopped, and a finished one of another setting beside it."""

    args: list[str]  # of the command line, without outputs
    root: Path
    run: Path  # its folder, below the root
    other: Path
    whole: dict[
        str, bytes
    ]  # files of the run when it is finished and undamaged, but for OWN

    def copy(self, to: Path) -> Path:
        shutil.copytree(self.root, to)
        return to / self.run

    def repeat(self, outputs: Path) -> int:
        return main([*self.args, f"runtime.outputs={outputs}"])


def files(folder: Path) -> list[str]:
    return sorted(
        p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()
    )


def results(folder: Path) -> dict[str, bytes]:
    """Content of every file, wherever the outputs lie."""
    outputs = str(folder.parents[2]).encode()
    names = [name for name in files(folder) if name not in OWN]
    return {
        name: (folder / name).read_bytes().replace(outputs, b"outputs")
        for name in names
    }


def damage(file: Path, how: str, other: Path) -> bool:
    """Damage a file; False where that changes nothing."""
    data = file.read_bytes()
    middle = len(data) // 2
    new = {
        "emptied": b"",
        "halved": data[:middle],
        "flipped": data[:middle]
        + bytes(b ^ 1 for b in data[middle : middle + 1])
        + data[middle + 1 :],
        "swapped": other.read_bytes() if other.is_file() else data,
    }
    if how == "deleted":
        file.unlink()
    else:
        file.write_bytes(new[how])
    return how == "deleted" or new[how] != data


@pytest.fixture(scope="module")
def trees(
    small: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, bool], Tree]:
    """Trees by kind (search or study) and whether the run finished; each is made once."""
    few = ["task.limit=4", "task.calibration_examples=4", "search.strings=8"]
    few += ["runtime.intervene_examples=2", "runtime.batch_size=4"]
    rollout = ["study=rollout", "study.prompts=4", "study.tokens=32", "study.parts=4"]
    kinds = {
        "search": ([*small, *few, "stages=[search,evaluate]"], "method.factor=-1"),
        "full": (
            [*small, *few, "stages=[search,intervene,evaluate,report]"],
            "method.factor=-1",
        ),
        "study": (rollout, "study.tokens=40"),
    }
    made: dict[tuple[str, bool], Tree] = {}

    def make(kind: str, finished: bool) -> Tree:
        if (kind, finished) in made:
            return made[kind, finished]
        args, changed = kinds[kind]
        root = tmp_path_factory.mktemp(kind)
        if not finished:
            append = RunDir.append
            left = [2 if kind == "study" else 5]

            def stops(run: RunDir, name: str, rows: object) -> None:
                left[0] -= name in ("predictions.jsonl", "flow.jsonl")
                if not left[0]:
                    raise KeyboardInterrupt
                append(run, name, rows)  # type: ignore[arg-type]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(RunDir, "append", stops)
                assert main([*args, f"runtime.outputs={root}"]) == 130
        else:
            assert main([*args, f"runtime.outputs={root}"]) == 0
        (run,) = run_folders(root)
        whole = results(run) if finished else make(kind, True).whole
        assert main([*args, changed, f"runtime.outputs={root}"]) == 0
        (other,) = (folder for folder in run_folders(root) if folder != run)
        made[kind, finished] = Tree(args, root, run.relative_to(root), other, whole)
        return made[kind, finished]

    return make


def hit(tree: Tree, to: Path, name: str, how: str) -> Path | None:
    """The damaged run in a copy of its tree; None where the damage changes nothing."""
    folder = tree.copy(to)
    return folder if damage(folder / name, how, tree.other / name) else None


@pytest.mark.parametrize(
    "kind",
    [
        "search",
        pytest.param("full", marks=pytest.mark.slow),
        pytest.param("study", marks=pytest.mark.slow),
    ],
)
def test_damage_to_a_finished_run_is_named(
    kind: str, trees: Callable[[str, bool], Tree], tmp_path: Path
) -> None:
    tree = trees(kind, True)
    folder = tree.copy(tmp_path / "copy")
    names = files(folder)
    assert {"DONE", "manifest.json", "config.yaml", "provenance.json"} < set(
        names
    ) and len(names) > 10
    assert files(tree.other) == names, "also where the search was copied"
    for name in names:
        kept = (folder / name).read_bytes()
        for how in WAYS:
            if damage(folder / name, how, tree.other / name):
                if (name, how) == ("DONE", "deleted"):
                    assert not open_undamaged(folder).done
                elif name.startswith(REDRAWN_FILES):
                    assert RunDir(folder).damaged() == [name] and open_undamaged(
                        folder, REDRAWN_FILES
                    )
                else:
                    with refused("DIR", str(folder), allowed=name, hint="posbench"):
                        open_undamaged(folder, REDRAWN_FILES)
            (folder / name).write_bytes(kept)
    assert open_undamaged(folder).done
    (folder / "subsets.csv").write_text("added\n")
    assert RunDir(folder).damaged() == ["subsets.csv"]


def rebuilt(tree: Tree, folder: Path, note: str) -> None:
    """Repeat the command on a damaged run: it ends as the undamaged one."""
    assert tree.repeat(folder.parents[2]) == 0, note
    found = results(folder)
    assert found.keys() == tree.whole.keys(), note
    assert [name for name in found if found[name] != tree.whole[name]] == [], note
    assert open_undamaged(folder).done, note


def said(
    name: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> bool:
    """Whether damage to a file was told."""
    told = capsys.readouterr().out.replace("\n", " ")
    found = f"{name}: dropped" in caplog.text or any(
        name in line.split("; made again")[0] for line in told.split("damaged: ")[1:]
    )
    caplog.clear()
    return found


SAMPLE = [
    ("search", True, "found.yaml", "flipped"),
    ("search", False, "predictions.jsonl", "swapped"),
]


@pytest.mark.parametrize(("kind", "finished", "name", "how"), SAMPLE)
def test_the_same_command_makes_damage_good(
    kind: str,
    finished: bool,
    name: str,
    how: str,
    trees: Callable[[str, bool], Tree],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    tree = trees(kind, finished)
    folder = hit(tree, tmp_path / "copy", name, how)
    assert folder
    rebuilt(tree, folder, name)
    assert said(name, capsys, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
@pytest.mark.parametrize("kind", ["full", "study"])
def test_damage_matrix(
    kind: str,
    finished: bool,
    how: str,
    trees: Callable[[str, bool], Tree],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    tree = trees(kind, finished)
    for number, name in enumerate(files(tree.root / tree.run)):
        folder = hit(tree, tmp_path / str(number), name, how)
        if folder:
            rebuilt(tree, folder, f"{name} {how}")
            stages = open_run_dir(tree.root / tree.run).status()["stages"].values()
            # A file whose stage is not done is made again without a word.
            early = (
                not finished
                and name not in OWN
                and all(name not in s.get("files", ()) for s in stages)
            )
            # Rows that are missing look as if they had never been made; so does a run without DONE.
            less = (
                how in ("deleted", "emptied", "halved")
                and name.endswith(".jsonl")
                and not finished
            )
            assert (
                said(name, capsys, caplog)
                or less
                or (early and not name.endswith(".jsonl"))
                or (name, how) == ("DONE", "deleted")
            ), (name, how)
        shutil.rmtree(tmp_path / str(number))


def test_rows_are_never_dropped_by_rescore(
    trees: Callable[[str, bool], Tree], tmp_path: Path, posbench: Callable[..., Result]
) -> None:
    tree = trees("search", True)
    for number, how in enumerate(("flipped", "halved", "swapped")):
        folder = hit(tree, tmp_path / str(number), "predictions.jsonl", how)
        assert folder
        for verb in ("rescore", "report"):
            told = posbench(verb, str(folder), verb=True)
            assert told.status == 2 and told.err.count("\n") == 1
            assert_refused(
                told.err,
                "DIR",
                str(folder),
                allowed="predictions.jsonl",
                hint="posbench",
            )
        assert (folder / "metrics.csv").read_bytes() == tree.whole["metrics.csv"]


@pytest.mark.figures
def test_what_verbs_make_again_may_be_damaged(
    trees: Callable[[str, bool], Tree],
    tmp_path: Path,
    posbench: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = trees("search", True)
    folder = hit(tree, tmp_path / "copy", "metrics.csv", "flipped")
    assert folder
    monkeypatch.setattr(
        "posbench.model.load._load_checkpoint",
        lambda *args: pytest.fail("no model needed"),
    )
    assert posbench("report", str(folder), verb=True).status == 2
    assert posbench("rescore", str(folder), verb=True).status == 0
    assert (folder / "metrics.csv").read_bytes() == tree.whole[
        "metrics.csv"
    ] and open_undamaged(folder).done
    (folder / "report.html").write_text("")
    (folder / "figures" / "accuracy.svg").unlink()
    with owning(folder):
        held = posbench("report", str(folder), verb=True)
    assert held.status == 2
    assert_refused(held.err, "run folder", str(folder), hint="wait")
    assert posbench("report", str(folder), verb=True).status == 0
    assert (
        open_undamaged(folder).done and (folder / "report.html").stat().st_size > 1000
    )
