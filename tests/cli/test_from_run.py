"""``method=from:RUN``: the constants of a run are taken as they are, for its weights alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from posbench.cli.completion import words
from posbench.cli.main import main
from posbench.pipeline.compose import compose
from posbench.pipeline.constants import RunConstants, calibration_overlap
from posbench.tasks.nq_multidoc import NQMultiDoc
from tests.conftest import Result, run_folders
from tests.messages import assert_names, assert_refused

FOUND = ["stages=[search]", "search.held_back=6"]
EVALUATE = ["stages=[evaluate]"]


@pytest.fixture(scope="module")
def searched(
    small: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """The outputs folder of a run that searched, and its hash."""
    outputs = tmp_path_factory.mktemp("searched") / "outputs"
    assert main([*small, *FOUND, f"runtime.outputs={outputs}"]) == 0
    (folder,) = run_folders(outputs)
    return outputs, folder.name.rpartition("__")[2]


@pytest.fixture
def outputs(searched: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of these outputs, for the runs of one test."""
    return Path(shutil.copytree(searched[0], tmp_path / "outputs"))


def run_of(outputs: Path, *without: str) -> Path:
    (folder,) = [f for f in run_folders(outputs) if f.name not in without]
    return folder


@pytest.mark.parametrize(("limit", "seen"), [(10, 0), (30, 20)])
def test_questions_that_a_search_saw_are_told(
    limit: int, seen: int, tmp_path: Path
) -> None:
    """The documents' calibration questions are the lines after those that are evaluated."""
    document = {"title": "title", "text": "text", "isgold": False}
    documents = [document | {"isgold": True}, *[document] * 4]
    data = tmp_path / "nq.jsonl"
    rows = [
        {"question": f"question {n}", "answers": ["yes"], "ctxs": documents}
        for n in range(40)
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    source = {
        "_target_": "posbench.tasks.nq_multidoc.NQMultiDoc",
        "name": "nq_multidoc",
        "path": str(data),
        "documents": 5,
        "limit": 10,
        "calibration_examples": 20,
    }
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"task": source}))
    (folder / "found.yaml").write_text("scale_channel: {}\n")
    constants = RunConstants(
        method="scale_channel",
        run="abc",
        folder=str(folder),
        weights="",
        source="",
        values={},
    )
    task = NQMultiDoc(path=str(data), documents=5, limit=limit)
    said = calibration_overlap(constants, task)
    assert (f"{seen} of {limit} questions" in said) if seen else said == ""


def test_a_run_may_lie_in_a_folder_with_a_space(
    searched: tuple[Path, str], small: list[str], tmp_path: Path
) -> None:
    outputs = Path(shutil.copytree(searched[0], tmp_path / "out puts"))
    (folder,) = run_folders(outputs)
    made = compose([*small, *EVALUATE, f"method=from:{folder}"]).composed
    assert made[0].raw["constants"][0]["folder"] == str(folder.resolve())


def test_the_constants_of_a_run_are_those_of_a_model_file(
    searched: tuple[Path, str],
    outputs: Path,
    small: list[str],
    posbench: Callable[..., Result],
    tmp_path: Path,
    checkpoint: Path,
) -> None:
    """Its identity is that of the constants: the run is the one that a model's file with them gives."""
    _, run_hash = searched
    (source,) = run_folders(outputs)
    result = posbench(*small, *EVALUATE, f"method=from:{run_hash}")
    assert result.status == 0, result.err
    assert_names(result.out, "method: scale_channel", f"from run {run_hash}")
    folder = run_of(outputs, source.name)
    found = yaml.safe_load((source / "found.yaml").read_text())["scale_channel"]
    applied = json.loads((folder / "method.json").read_text())
    finds = ("channel", "factor", "layers")
    assert {key: applied[key] for key in finds} == {key: found[key] for key in finds}
    assert source.name in applied["source"]
    facts = json.loads((folder / "provenance.json").read_text())["constants"]
    assert facts["scale_channel"]["run"] == run_hash
    assert facts["scale_channel"]["folder"] == str(source.resolve())

    block = {key: found[key] for key in finds}
    model = {"path": str(checkpoint), "scale_channel": block}
    own = tmp_path / "own"
    (own / "model").mkdir(parents=True)
    (own / "model" / "random.yaml").write_text(yaml.safe_dump(model))
    others = [key for key in small if not key.startswith("model")]
    same = posbench(
        f"--config-dir={own}",
        "model=random",
        "model.dtype=float32",
        "method=scale_channel",
        *others,
        *EVALUATE,
    )
    assert same.status == 0, same.err
    assert "finished before" in same.out


@pytest.fixture
def oddly_named(outputs: Path) -> Path:
    """A link to the run that searched, with signs of Hydra's grammar in its name."""
    link = outputs.parent / "mine, Anna's"
    link.symlink_to(run_folders(outputs)[0])
    return link


def test_typed_keys_win_over_the_constants_of_a_run(
    oddly_named: Path,
    outputs: Path,
    small: list[str],
    posbench: Callable[..., Result],
) -> None:
    source = oddly_named.resolve()
    name = f"from:{oddly_named}"  # by its folder, too, whatever its name
    result = posbench(*small, *EVALUATE, f"method={name}", "method.factor=0.25")
    assert result.status == 0, result.err
    applied = json.loads((run_of(outputs, source.name) / "method.json").read_text())
    assert applied["factor"] == 0.25
    assert "source" not in applied, "these are no longer the constants of that run"
    assert "typed here in place of its own: factor 0.25" in result.out


def test_a_folder_with_signs_of_hydra_in_its_name_stands_in_quotes(
    oddly_named: Path, small: list[str], posbench: Callable[..., Result]
) -> None:
    typed = [*small, *EVALUATE, "--cfg", "job"]
    escaped = str(oddly_named).replace("'", "\\'")
    run_hash = oddly_named.resolve().name[-8:]
    for name in (
        f"'from:{escaped}'",
        f'"from:{oddly_named}"',
        f"[recite,'from:{escaped}']",
    ):
        result = posbench(*typed, f"method={name}")
        assert result.status == 0 and run_hash in result.out, result.err
    for name in (f"from:{oddly_named}/none", f"[recite,from:{oddly_named}]"):
        result = posbench(*typed, f"method={name}")
        assert result.status == 2
        named = ("quote a folder", "'from:DIR'")
        assert_refused(result.err, "method=from:RUN", name, allowed="run", hint=named)


def test_a_part_of_a_list_may_come_from_a_run(
    searched: tuple[Path, str],
    outputs: Path,
    small: list[str],
    posbench: Callable[..., Result],
) -> None:
    _, run_hash = searched
    (source,) = run_folders(outputs)
    found = yaml.safe_load((source / "found.yaml").read_text())["scale_channel"]
    methods = f"method=[position_interpolation,from:{run_hash}]"
    result = posbench(
        *small, *EVALUATE, methods, "method.parts.position_interpolation.scale=1.5"
    )
    assert result.status == 0, result.err
    folder = run_of(outputs, source.name)
    assert "__position_interpolation-scale_channel__" in folder.name
    parts = json.loads((folder / "method.json").read_text())["parts"]
    assert parts["scale_channel"]["channel"] == found["channel"]
    twice = posbench(*small, *EVALUATE, f"method=[scale_channel,from:{run_hash}]")
    assert twice.status == 2
    assert_names(twice.err, "method", run_hash, "different")


def test_a_sweep_over_runs_names_them_as_typed(
    searched: tuple[Path, str], small: list[str]
) -> None:
    outputs, run_hash = searched
    methods = f"method=none,from:{run_hash}"
    args = ["-m", *small, methods, f"runtime.outputs={outputs}"]
    jobs = compose(args).composed
    assert [job.raw["method"]["name"] for job in jobs] == ["none", "scale_channel"]
    assert ["constants" in job.raw for job in jobs] == [False, True]
    typed = [f"method=from:{run_hash}" in job.overrides for job in jobs]
    assert typed == [False, True]


def test_a_run_of_other_weights_is_refused_with_what_to_type(
    searched: tuple[Path, str],
    outputs: Path,
    small: list[str],
    posbench: Callable[..., Result],
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    _, run_hash = searched
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    name = sorted(weights)[0]
    weights[name][0] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    changed = [*small, f"model.path={other}"]
    before = run_folders(outputs)
    refused = posbench(*changed, *EVALUATE, f"method=from:{run_hash}")
    assert refused.status == 2
    assert len(refused.err.splitlines()) == 1
    assert_names(refused.err, f"from:{run_hash}", "weights", "method.channel=")
    assert run_folders(outputs) == before
    typed = refused.err.partition("type them: ")[2].split()
    assert posbench(*changed, *EVALUATE, *typed).status == 0


def test_a_run_without_constants_names_the_run_that_found_some(
    searched: tuple[Path, str],
    outputs: Path,
    small: list[str],
    posbench: Callable[..., Result],
) -> None:
    _, run_hash = searched
    refused = posbench(*small, *EVALUATE, "method=scale_channel")
    assert refused.status == 2
    assert_names(refused.err, "method.channel", f"method=from:{run_hash}")
    # Constants of another method are no help.
    other = posbench(*small, *EVALUATE, "method=layer_scaling")
    assert other.status == 2
    assert run_hash not in other.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["method=from:ffffffff"], ("ffffffff", "posbench ls runs")),
        (["method=from:"], ("method",)),
        (["method=from:RUN", "stages=[search,evaluate]"], ("stages", "search")),
    ],
)
def test_what_is_no_run_with_constants_is_refused(
    arguments: list[str],
    named: tuple[str, ...],
    searched: tuple[Path, str],
    outputs: Path,
    small: list[str],
    posbench: Callable[..., Result],
) -> None:
    arguments = [text.replace("RUN", searched[1]) for text in arguments]
    refused = posbench(*small, *arguments)
    assert refused.status == 2
    assert len(refused.err.splitlines()) == 1
    assert_names(refused.err, *named)


def test_a_run_without_a_method_has_no_constants(
    outputs: Path, small: list[str], posbench: Callable[..., Result]
) -> None:
    (source,) = run_folders(outputs)
    assert posbench(*small, *EVALUATE, "method=none").status == 0
    plain = run_of(outputs, source.name)
    refused = posbench(*small, *EVALUATE, f"method=from:{plain}")
    assert refused.status == 2
    assert_names(refused.err, "with a method")


def test_tab_completes_runs_and_formats(searched: tuple[Path, str]) -> None:
    outputs, run_hash = searched
    start = run_hash[:3]
    for verb in ("show", "export", "compare"):
        assert words(f"posbench {verb} --outputs {outputs} {start}") == [run_hash]
    line = f"posbench runtime.outputs={outputs} method=from:{start}"
    assert words(line) == [f"method=from:{run_hash}"]
    assert words(f"posbench export {run_hash} --to gg") == ["gguf", "gguf-lora"]
    assert words(f"posbench export {run_hash} --to=lo") == ["--to=lora"]
