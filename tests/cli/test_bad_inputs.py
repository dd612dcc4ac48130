"""Every mistake ends as exit status 2, one line that names field, value, range and next step, and no run
folder."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from posbench import paths
from tests.conftest import PROCESS, Result, run_folders

OFFICIAL = (
    Path(__file__).parents[1] / "data/kv_retrieval/kv-retrieval-75_keys.first3.jsonl"
)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """A folder of broken data files and checkpoints."""
    folder = tmp_path_factory.mktemp("broken")
    lines = OFFICIAL.read_text().splitlines(keepends=True)
    (folder / "good.jsonl").write_text("".join(lines))
    (folder / "broken.jsonl").write_text(lines[0] + lines[1][:500] + "\n" + lines[2])
    (folder / "list.jsonl").write_text("[1, 2]\n")
    half = json.dumps(
        {
            "ordered_kv_records": [["a", "\ud800"], ["b", "c"]],
            "key": "a",
            "value": "\ud800",
        }
    )
    (folder / "half.jsonl").write_text(half + "\n")
    (folder / "nofield.jsonl").write_text(
        json.dumps({k: v for k, v in json.loads(lines[0]).items() if k != "value"})
        + "\n"
    )
    (folder / "nogold.jsonl").write_text(
        json.dumps(json.loads(lines[0]) | {"key": "elsewhere"}) + "\n"
    )
    (folder / "latin.jsonl").write_bytes(
        lines[0].replace("ordered", "ördered").encode("latin-1")
    )
    (folder / "truncated.jsonl.gz").write_bytes(
        gzip.compress("".join(lines).encode())[:-2000]
    )
    (folder / "notgzip.jsonl.gz").write_text("plain text\n")
    gold = json.loads(lines[0])
    finished = {
        "input": f'Json data: {{"a": "b"}} Key: "{gold["key"]}"\nCorresponding value:',
        "output": gold["value"],
    }
    (folder / "overlap.jsonl").write_text(json.dumps(finished) + "\n")
    (folder / "nooutput.jsonl").write_text(json.dumps({"input": "text"}) + "\n")
    (folder / "empty.jsonl").write_text("")
    (folder / "empty").mkdir()
    for kind in ("gpt2", "deepseek_v3", "alien"):
        shutil.copytree(checkpoint, folder / kind)
        config = json.loads((folder / kind / "config.json").read_text())
        (folder / kind / "config.json").write_text(
            json.dumps(config | {"model_type": kind})
        )
    shutil.copytree(checkpoint, folder / "pickle")
    (folder / "pickle" / "model.safetensors").rename(
        folder / "pickle" / "pytorch_model.bin"
    )
    shutil.copytree(checkpoint, folder / "torn")
    weights = (checkpoint / "model.safetensors").read_bytes()
    (folder / "torn" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    shutil.copytree(checkpoint, folder / "badconfig")
    (folder / "badconfig" / "config.json").write_text("{")
    shutil.copytree(
        checkpoint, folder / "notokenizer", ignore=shutil.ignore_patterns("tokenizer*")
    )
    return folder


ONE = "task.limit=1"

BARE = [
    # what it is, arguments, what the line must say
    (
        "wrong type",
        ["method.factor=abc"],
        [
            "method.factor",
            "'abc'",
            "a number that float32 holds; next: set method.factor=0.5",
        ],
    ),
    (
        "true is no number",
        ["method.factor=true"],
        [
            "method.factor",
            "True",
            "a number that float32 holds; next: set method.factor=0.5",
        ],
    ),
    (
        "not a number",
        ["method.factor=nan"],
        [
            "method.factor",
            "nan",
            "a number that float32 holds; next: set method.factor=0.5",
        ],
    ),
    (
        "infinite",
        ["method.factor=-inf"],
        [
            "method.factor",
            "-inf",
            "a number that float32 holds; next: set method.factor=0.5",
        ],
    ),
    (
        "not a number as text",
        ["method.factor='nan'"],
        [
            "method.factor",
            "nan",
            "a number that float32 holds; next: set method.factor=0.5",
        ],
    ),
    (
        "infinite in a list",
        ["search.factors=[0.5,inf]"],
        ["search.factors", "inf", "finite"],
    ),
    (
        "no value",
        [
            "method.channel=1",
            "method.factor=null",
            "method.layers=[0,1]",
            "stages=[evaluate]",
        ],
        ["method.factor", "None", "posbench stages=[search]"],
    ),
    (
        "misspelt key",
        ["method.facto=1"],
        ["method.facto = 1", "channel, factor", "did you mean method.factor?"],
    ),
    (
        "added key",
        ["+method.x=1"],
        ["method.x", "1", "channel, factor, layers, last", "remove"],
    ),
    (
        "misspelt group",
        ["modle=tiny"],
        ["modle = 'tiny'", "model, task", "did you mean model?"],
    ),
    ("key of no group", ["foo.bar=1"], ["foo.bar = '1'", "model, task"]),
    (
        "unknown model",
        ["model=mistral7"],
        ["model", "'mistral7'", "mistral7b, ", "did you mean mistral7b?"],
    ),
    (
        "unknown task",
        ["task=kv"],
        ["task", "'kv'", "mmlu", "did you mean kv_retrieval?"],
    ),
    (
        "key of another task",
        ["task=mmlu", "task.pairs=3"],
        ["task.pairs = 3", "subsets, shots", "next:"],
    ),
    (
        "tasks of an earlier release",
        ["task=longbench", "task.path=.", "task.tasks=[qasper]"],
        ["task.tasks = ['qasper']", "task.subsets, its name now"],
    ),
    (
        "subjects of an earlier release",
        ["task=mmlu", "task.path=.", "task.subjects=[anatomy]"],
        ["task.subjects = ['anatomy']", "task.subsets, its name now"],
    ),
    (
        "unknown method",
        ["method=scale"],
        ["method", "'scale'", "did you mean scale_channel?"],
    ),
    ("unknown search", ["search=x"], ["search", "'x'", "channel, exhaustive, genetic"]),
    ("unknown runtime", ["runtime=x"], ["runtime", "'x'", "auto, gpu"]),
    (
        "unknown experiment",
        ["experiment=yu2025_fig66"],
        ["experiment", "'yu2025_fig66'", "yu2025_fig6"],
    ),
    (
        "model=hf without a path",
        ["model=hf"],
        ["model.path", "None", "posbench model=DIR"],
    ),
    ("unknown dtype", ["model.dtype=int8"], ["model.dtype", "'int8'", "bfloat16"]),
    (
        "unknown kernel",
        ["model.attention=flash"],
        ["model.attention", "'flash'", "sdpa | eager"],
    ),
    (
        "window of zero",
        ["+model.context_window=0"],
        ["model.context_window", "0", "from 1 to 1000000000"],
    ),
    ("name that is a path", ["model.name=../x"], ["model.name", "'../x'", "letters"]),
    ("one layer", ["method.layers=[1]"], ["method.layers", "[1]", "exactly 2"]),
    (
        "three layers",
        ["method.layers=[1,2,3]"],
        ["method.layers", "[1, 2, 3]", "exactly 2"],
    ),
    ("layers not a list", ["method.layers=2"], ["method.layers", "2", "exactly 2"]),
    ("last by name", ["method.last=foo"], ["method.last", "'foo'", "all"]),
    (
        "no stages",
        ["stages=[]"],
        ["stages", "[]", "search, study, intervene, evaluate, report"],
    ),
    (
        "misspelt stage",
        ["stages=[serch]"],
        ["stages", "'serch'", "search, study, intervene, evaluate, report"],
    ),
    (
        "stages out of order",
        ["stages=[evaluate,search]"],
        ["stages", "'search'", "in this order"],
    ),
    (
        "search for no method",
        ["method=none", "stages=[search]"],
        ["stages", "'search'", "method none"],
    ),
    (
        "index outside the list",
        ["task.positions=[0,32]"],
        ["task.positions", "32", "from 0 to 31"],
    ),
    (
        "negative index",
        ["task.positions=[-1]"],
        ["task.positions", "-1", "from 0 to 31"],
    ),
    (
        "share above 100 %",
        ["task.positions=['101%']"],
        ["task.positions", "'101%'", '"0%" to "100%"'],
    ),
    (
        "share that is none",
        ["task.positions=['nan%']"],
        ["task.positions", "'nan%'", '"0%" to "100%"'],
    ),
    (
        "position that is none",
        ["task.positions=[middle]"],
        ["task.positions", "'middle'", "from 0 to 31"],
    ),
    (
        "repeated positions",
        ["task.positions=[0,'0%']"],
        ["task.positions", "[0, '0%']", "different"],
    ),
    ("no positions", ["task.positions=[]"], ["task.positions", "[]", "at least 1"]),
    ("one pair", ["task.pairs=1"], ["task.pairs", "1", "from 2 to 1000000"]),
    ("more pairs than words", ["task.pairs=65"], ["task.pairs", "65", "at most 64"]),
    (
        "more calibration pairs than words",
        ["task.calibration_pairs=65"],
        ["task.calibration_pairs", "65", "at most 64"],
    ),
    ("no strings", ["search.strings=0"], ["search.strings", "0", "from 1 to 1000000"]),
    ("no factors", ["search.factors=[]"], ["search.factors", "[]", "at least 1"]),
    (
        "no threads",
        ["runtime.threads=0"],
        ["runtime.threads", "0", "from 1 to 1000000"],
    ),
    (
        "unknown device map",
        ["runtime.device_map=spread"],
        ["runtime.device_map", "'spread'", "auto | balanced"],
    ),
    (
        "device map on one device",
        ["runtime.device=cpu", "runtime.device_map=auto"],
        [
            "runtime.device_map",
            "'auto'",
            "null with runtime.device=cpu",
            "CUDA_VISIBLE_DEVICES",
        ],
    ),
    (
        "memory without a device map",
        ["runtime.max_memory={cpu:1GiB}"],
        ["runtime.max_memory", "{'cpu': '1GiB'}", "runtime.device_map=auto"],
    ),
    (
        "memory without a unit",
        ["runtime.device_map=auto", "runtime.max_memory={0:70}"],
        ["runtime.max_memory", "70"],
    ),
    (
        "memory that is no size",
        ["runtime.device_map=auto", "runtime.max_memory={0:lots}"],
        ["runtime.max_memory", "{0: 'lots'}", "KiB, MiB or GiB"],
    ),
    (
        "memory of no device",
        ["runtime.device_map=auto", "runtime.max_memory={gpu:1GiB}"],
        ["runtime.max_memory", "{'gpu': '1GiB'}", "GPU numbers and cpu"],
    ),
    (
        "empty batches",
        ["runtime.batch_size=0"],
        ["runtime.batch_size", "0", "from 1 to 1000000"],
    ),
    (
        "one draw",
        ["runtime.resamples=1"],
        ["runtime.resamples", "1", "from 100 to 1000000"],
    ),
    (
        "unfinished list",
        ["method.factor=[1"],
        ["method.factor", "'method.factor=[1'", "key=value"],
    ),
    ("no equals sign", ["foo"], ["foo", "'foo'", "key=value"]),
    (
        "unknown reference",
        ["method.factor=${nope}"],
        ["method.factor", "nope", "set method.factor="],
    ),
    ("a sweep without -m", ["model=hf,tiny"], ["model", "'hf,tiny'", "--multirun"]),
    ("unknown flag", ["--nonsense"], ["--nonsense", "posbench --help"]),
    ("unknown choice of a flag", ["--cfg", "nonsense"], ["--cfg", "nonsense", "'job'"]),
    ("two modes", ["--info", "-m"], ["--info -m", "one of"]),
    (
        "missing config folder",
        ["--config-dir", "/nowhere"],
        ["--config-dir", "'/nowhere'", "folder"],
    ),
    ("no questions kept", ["task.limit=0"], ["task.limit", "0", "from 1 to 100000"]),
    ("endless stages", ["stages=inf"], ["stages", "inf", "in this order"]),
    ("half a stage", ["stages=1.5"], ["stages", "1.5", "in this order"]),
    ("stages that are true", ["stages=true"], ["stages", "True", "in this order"]),
    (
        "a word that is no stage",
        ["stages=evaluat"],
        ["stages = ['evaluat']", "intervene, evaluate, report"],
    ),
    (
        "words out of order",
        ["stages=report,evaluate"],
        ["stages = ['report', 'evaluate']", "in this order"],
    ),
    ("no model", ["model=null"], ["model", "'null'", "tiny", "leave it out"]),
    ("no task", ["task=null"], ["task", "'null'", "kv_retrieval"]),
    (
        "no penalty",
        ["task.repetition_penalty=0"],
        ["task.repetition_penalty", "0", "above 0"],
    ),
    ("negative seed", ["task.seed=-1"], ["task.seed", "-1", "from 0 to 4294967295"]),
    (
        "negative seed of a study",
        ["study=positional_channels", "study.seed=-5"],
        ["study.seed", "-5", "from 0"],
    ),
    (
        "depth of an item",
        ["study=channel_subtraction", "study.gold=7"],
        ["study.gold", "7", "from 0 to 1"],
    ),
    (
        "depth below",
        ["study=channel_subtraction", "study.other=-0.5"],
        ["study.other", "-0.5", "from 0 to 1"],
    ),
    (
        "a start beyond float32",
        [
            "method=layer_scaling",
            "search=gradient",
            "search.start=1e300",
            "stages=[search]",
        ],
        ["search.start", "1e+300", "up to 1000000"],
    ),
    (
        "iterations without an end",
        ["study=synthetic_training", "study.iterations=1000000000000000000"],
        ["study.iterations", "1000000000000000000", "from 1 to 1000000"],
    ),
    (
        "threads beyond C",
        ["runtime.threads=1000000000000000000"],
        ["runtime.threads", "to 1000000"],
    ),
    (
        "a name that is too long",
        ["model.name=" + "x" * 230],
        ["model.name", "at most 80"],
    ),
    (
        "a path that is too long",
        ["task.path=" + "x" * 300],
        ["task.path", "on this machine"],
    ),
    (
        "a block that the run does not use",
        ["model.layer_scaling.x=plain"],
        [
            "model.layer_scaling.x = 'plain'",
            "that this run uses: scale_channel, kv_retrieval, channel",
            "choose",
        ],
    ),
    (
        "texts for a model of few words",
        ["task=longbench"],
        [
            "task = 'longbench'",
            "model tiny, which knows its words only",
            "model=mistral7b",
        ],
    ),
    (
        "an experiment's name too long",
        [f"experiment={'x' * 300}"],
        # Python below 3.14 fails to look for such a file; later ones find none.
        ["x" * 30],
    ),
    (
        "a key of the model's block",
        ["model.scale_channel.factr=1"],
        ["model.scale_channel.factr", "factor?"],
    ),
    (
        "keys of a choice inside a study",
        ["study=ablations", "study.search.skip=3"],
        ["study.search", "search.KEY"],
    ),
    (
        "nothing in a list of methods",
        ["method=[none,scale_channel]"],
        ["method", "none", "leave it out"],
    ),
    (
        "a launcher that is not there",
        ["hydra/launcher=ray"],
        ["hydra/launcher", "'ray'", "basic"],
    ),
    (
        "a search without its method",
        ["search=genetic"],
        ["search", "'genetic'", "add method=layer_scaling"],
    ),
    (
        "a file as checkpoint",
        ["model.path={tiny}/config.json"],
        ["model.path", "config.json", "directory"],
    ),
    (
        "a reply longer than the window",
        ["task.max_new_tokens=100000"],
        [
            "task.max_new_tokens = 100000",
            "at most 381",
            "window of tiny is 512",
            "task.max_new_tokens=381",
        ],
    ),
]

SMALL = [
    (
        "channel outside the hidden size",
        ["method.channel=16"],
        ["method.channel", "16", "from 0 to 15", "hidden size 16", "stages=[search]"],
    ),
    (
        "negative channel",
        ["method.channel=-1"],
        ["method.channel", "-1", "from 0 to 15"],
    ),
    (
        "repeated channel",
        ["method.channel=[3,3]"],
        ["method.channel", "[3, 3]", "different channels"],
    ),
    (
        "no channel",
        ["method.channel=[]"],
        ["method.channel", "[]", "different channels"],
    ),
    (
        "layer outside the model",
        ["method.layers=[0,4]"],
        ["method.layers", "[0, 4]", "<= 3", "4 layers"],
    ),
    (
        "negative layer",
        ["method.layers=[-1,2]"],
        ["method.layers", "[-1, 2]", "0 <= first"],
    ),
    (
        "reversed layers",
        ["method.layers=[2,1]"],
        ["method.layers", "[2, 1]", "first <= last"],
    ),
    (
        "no last token",
        ["method.last=0"],
        ["method.last", "0", "from 1 to 1000000", "all"],
    ),
    ("negative last token", ["method.last=-1"], ["method.last", "-1", "all"]),
    (
        "layers of the search",
        ["search.layers=[3,4]"],
        ["search.layers", "[3, 4]", "<= 3"],
    ),
    (
        "prompt over the window",
        ["task.pairs=64", "task.positions=[0]"],
        [
            "task.pairs = 64",
            "at most 63",
            "window of random is 256",
            "task.truncation=middle",
        ],
    ),
    (
        "calibration over the window",
        ["task.calibration_pairs=64"],
        ["task.calibration_pairs = 64", "at most 63", "set task.calibration_pairs=63"],
    ),
    (
        "strings over the window",
        ["search.length=257"],
        ["search.length", "257", "at most 256"],
    ),
    (
        "window over the strings",
        ["search.window=100"],
        ["search.window = 100", "at most 4"],
    ),
    (
        "official over the strings",
        ["search.variant=official"],
        ["search.length", "48", "from 301"],
    ),
    (
        "device that is not there",
        ["runtime.device=cuda:7"],
        ["runtime.device", "'cuda:7'", "auto, cpu"],
    ),
    (
        "device that is none",
        ["runtime.device=abacus"],
        ["runtime.device", "'abacus'", "auto, cpu"],
    ),
    (
        "kernel that is not installed",
        ["model.attention=flash_attention_2"],
        ["model.attention", "flash_attention_2", "sdpa"],
    ),
    (
        "no constants",
        ["stages=[evaluate]"],
        ["method.channel", "None", "posbench stages=[search]"],
    ),
    (
        "nothing to report",
        [
            "stages=[report]",
            "method.channel=0",
            "method.factor=0",
            "method.layers=[0,1]",
        ],
        ["stages", "['report']", "posbench report DIR"],
    ),
    (
        "missing checkpoint",
        ["model.path={files}/nowhere"],
        ["model.path", "nowhere", "local directory", "no such directory"],
    ),
    (
        "unknown hub id",
        ["model.path=nobody/nothing"],
        ["model.path", "'nobody/nothing'", "reachable hub id"],
    ),
    (
        "unknown embedded model",
        ["model.path=posbench://huge"],
        ["model.path", "'posbench://huge'", "no such directory"],
    ),
    (
        "empty checkpoint",
        ["model.path={files}/empty"],
        ["model.path", "empty", "config.json"],
    ),
    (
        "broken config",
        ["model.path={files}/badconfig"],
        ["model.path", "badconfig", "config.json"],
    ),
    (
        "pickled weights",
        ["model.path={files}/pickle"],
        ["model.path", "pickle", "safetensors"],
    ),
    (
        "torn weights",
        ["model.path={files}/torn"],
        ["model.path", "torn", "safetensors"],
    ),
    (
        "no tokenizer",
        ["model.path={files}/notokenizer"],
        ["model.path", "notokenizer", "tokenizer"],
    ),
    (
        "unknown family",
        ["model.path={files}/gpt2"],
        ["model architecture", "'gpt2'", "llama, mistral", "families.py"],
    ),
    (
        "another unknown family",
        ["model.path={files}/deepseek_v3"],
        ["model architecture", "'deepseek_v3'", "llama, mistral"],
    ),
    (
        "unknown to transformers too",
        ["model.path={files}/alien"],
        ["model architecture", "'alien'", "llama, mistral"],
    ),
    (
        "missing file",
        ["task.path={files}/nowhere.jsonl"],
        ["task.path", "nowhere.jsonl", "file or folder on this machine"],
    ),
    ("a folder as file", ["task.path={files}"], ["task.path", "readable", "directory"]),
    (
        "broken line",
        ["task.path={files}/broken.jsonl", "task.limit=3"],
        ["task.path", "broken.jsonl, line 2", "JSON"],
    ),
    (
        "line that is no object",
        ["task.path={files}/list.jsonl"],
        ["task.path", "list.jsonl, line 1", "JSON object"],
    ),
    (
        "truncated gzip",
        ["task.path={files}/truncated.jsonl.gz"],
        ["task.path", "truncated.jsonl.gz", "readable"],
    ),
    (
        "gzip that is none",
        ["task.path={files}/notgzip.jsonl.gz"],
        ["task.path", "notgzip.jsonl.gz", "readable"],
    ),
    (
        "missing field",
        ["task.path={files}/nofield.jsonl", ONE],
        ["task.path", "nofield.jsonl, line 1", "value"],
    ),
    (
        "gold not among the pairs",
        ["task.path={files}/nogold.jsonl", ONE],
        ["task.path", "nogold.jsonl, line 1", "gold"],
    ),
    (
        "wrong encoding",
        ["task.path={files}/latin.jsonl", ONE],
        ["task.path", "latin.jsonl", "UTF-8"],
    ),
    (
        "empty file",
        ["task.path={files}/empty.jsonl"],
        ["task.path", "empty.jsonl", "this one is empty"],
    ),
    (
        "half of a character",
        ["task.path={files}/half.jsonl", ONE],
        ["task.path", "half.jsonl, line 1", "UTF-8"],
    ),
    (
        "limit of an earlier release",
        ["task.examples_per_position=4"],
        ["task.examples_per_position = 4", "task.limit, its name now", "task.limit=4"],
    ),
    (
        "more pairs than the file",
        ["task.path={files}/good.jsonl", ONE, "task.pairs=76"],
        ["task.pairs", "76", "at most 75"],
    ),
    (
        "calibration on the evaluation",
        [
            "task.path={files}/good.jsonl",
            ONE,
            "task.calibration_path={files}/overlap.jsonl",
        ],
        ["task.calibration_path", "overlap.jsonl, line 1", "does not ask"],
    ),
    (
        "calibration without output",
        ["task.calibration_path={files}/nooutput.jsonl"],
        ["task.calibration_path", "nooutput.jsonl, line 1", "output"],
    ),
    (
        "empty calibration",
        ["task.calibration_path={files}/empty.jsonl"],
        ["task.calibration_path", "empty.jsonl"],
    ),
]


def _expect(result: Result, words: list[str], outputs: Path) -> None:
    assert result.status == 2 and "hydra.cc" not in result.err, result
    assert result.err.startswith("posbench: ") and result.err.count("\n") == 1, (
        result.err
    )
    assert "; next: " in result.err and ": allowed: " in result.err
    assert "Traceback" not in result.out + result.err
    assert [word for word in words if word not in result.err] == [], result.err
    assert run_folders(outputs) == [] and list(outputs.glob("*/v*")) == []


@pytest.mark.parametrize(
    ("args", "words"), [r[1:] for r in BARE], ids=[r[0] for r in BARE]
)
def test_refused_before_the_model(
    args: list[str], words: list[str], posbench: Callable[..., Result], outputs: Path
) -> None:
    _expect(
        posbench(*(a.replace("{tiny}", str(paths.MODELS / "tiny")) for a in args)),
        words,
        outputs,
    )


def test_the_checkpoint_comes_first_and_with_what_else_is_missing(
    posbench: Callable[..., Result], outputs: Path, tmp_path: Path
) -> None:
    result = posbench(
        f"model={tmp_path}", f"task.path={tmp_path}/none.jsonl", "stages=[evaluate]"
    )
    lines = result.err.splitlines()
    assert result.status == 2 and len(lines) == 3 and run_folders(outputs) == []
    assert "model.path" in lines[0] and "it lacks config.json" in lines[0]
    assert (
        "task.path" in lines[1]
        and "source: Liu" in lines[1]
        and "method.channel" in lines[2]
    )


def test_every_job_of_a_sweep_says_what_is_wrong(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    result = posbench("-m", "method.facto=1,2")
    assert result.status == 2 and run_folders(outputs) == []
    for value, line in zip((1, 2), result.err.splitlines(), strict=True):
        assert (
            f"method.facto = {value}" in line and "did you mean method.factor?" in line
        )


@pytest.mark.parametrize(
    ("args", "words"), [r[1:] for r in SMALL], ids=[r[0] for r in SMALL]
)
def test_refused_before_the_folder(
    args: list[str],
    words: list[str],
    posbench: Callable[..., Result],
    outputs: Path,
    files: Path,
    small: list[str],
) -> None:
    _expect(
        posbench(*small, *(a.replace("{files}", str(files)) for a in args)),
        words,
        outputs,
    )


def test_validate_says_what_the_run_says(
    posbench: Callable[..., Result], files: Path, small: list[str]
) -> None:
    # Of a hub id that is not on this machine it asks no server.
    chosen = [*SMALL[::6], *(row for row in SMALL if "weights" in row[0])]
    for name, args, _ in (row for row in chosen if row[0] != "unknown hub id"):
        given = [*small, *(a.replace("{files}", str(files)) for a in args)]
        run = posbench(*given)
        told = posbench("validate", *given, verb=True)
        assert told.err == run.err and told.status == 2, name


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpu_on_a_machine_without_one(
    posbench: Callable[..., Result],
    outputs: Path,
    small: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rest = [a for a in small if not a.startswith("runtime.device=")]
    for extra in ([], ["runtime.device_map=auto"]):
        words = ["runtime.device", "'cuda'", "no CUDA device", "leave out runtime=gpu"]
        _expect(posbench("runtime=gpu", *rest, *extra), words, outputs)
    # A folder that a GPU has begun is not touched either.
    with monkeypatch.context() as patch:
        patch.setattr(
            "posbench.pipeline.identity.torch_device", lambda name: torch.device("cuda")
        )
        assert posbench(*small).status == 0
    before = {p: p.read_bytes() for p in outputs.rglob("*") if p.is_file()}
    assert posbench(*small, "runtime.device=cuda").status == 2
    assert {p: p.read_bytes() for p in outputs.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["ls", "nonsense"], ["ls", "'nonsense'", "models, tasks"]),
        (["ls", "models", "tasks"], ["ls", "'models tasks'"]),
        (["ls", "rusn"], ["did you mean runs?"]),
        (["shwo", "x"], ["verb = 'shwo'", "key=value", "did you mean show?"]),
        (["lsruns"], ["verb = 'lsruns'", "did you mean ls runs?"]),
        (["open"], ["verb = 'open'", "rescore, show", "posbench --help"]),
        (["run", "--help"], ["verb = 'run'", "leave it out"]),
        (["docs", "run", "x"], ["verb = 'docs'", "next: python tools/pages.py"]),
        (["docs", "--help"], ["verb = 'docs'", "next: python tools/pages.py"]),
        (
            ["study=printed_tables"],
            ["study = 'printed_tables'", "next: python tools/printed_tables.py"],
        ),
        (["fetch", "tiny"], ["argument = 'tiny'", "key=value"]),
        (["report"], ["report", "one folder"]),
        (["report", "/nowhere"], ["DIR", "'/nowhere'", "run folder"]),
        (["rescore", "/nowhere"], ["DIR", "'/nowhere'", "run folder"]),
        (["report", "{here}"], ["DIR", "run folder"]),
        (["rescore", "{here}"], ["DIR", "run folder"]),
        (["fetch", "model=nope"], ["model", "'nope'", "tiny"]),
        (["fetch", "task.pairs=1"], ["task.pairs", "1", "from 2 to 1000000"]),
        (
            ["fetch", "task.path=/nowhere.jsonl", "task.prompt=compact"],
            ["task.path", "'/nowhere.jsonl'", "no such file"],
        ),
        (["fetch", "--wet-run"], ["flag", "'--wet-run'"]),
        (["validate", "model=nope"], ["model", "'nope'", "tiny"]),
    ],
)
def test_verbs(
    args: list[str],
    words: list[str],
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "foreign.txt").write_text("not a run")
    _expect(
        posbench(*(a.replace("{here}", str(tmp_path)) for a in args), verb=True),
        words,
        outputs,
    )
    assert [p.name for p in tmp_path.iterdir()] == ["foreign.txt"]


def test_outputs_that_are_a_file(
    posbench: Callable[..., Result], outputs: Path, small: list[str]
) -> None:
    outputs.write_text("in the way")
    _expect(
        posbench(*small), ["runtime.outputs", str(outputs), "can be written"], outputs
    )
    assert outputs.read_text() == "in the way"


def test_broken_yaml_of_the_user(
    posbench: Callable[..., Result], outputs: Path, tmp_path: Path
) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("name: [mine\n")
    _expect(
        posbench("--config-dir", str(tmp_path / "conf"), "model=mine"),
        ["config file", "conf", "valid YAML"],
        outputs,
    )


def test_the_process_says_the_same(outputs: Path, tmp_path: Path) -> None:
    """One real process: the status and the single line reach the shell."""
    command = [*PROCESS, "method.factor=abc", f"runtime.outputs={outputs}"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    _expect(
        Result(done.returncode, done.stdout, done.stderr),
        ["method.factor", "'abc'"],
        outputs,
    )


def test_without_a_network_nothing_is_retried(outputs: Path, tmp_path: Path) -> None:
    """A closed port stands for the hub: one line, and none of the hub client's own about its retries."""
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    environment |= {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path / "hub"),
    }
    command = [*PROCESS, "model=mistral7b", f"runtime.outputs={outputs}"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    words = [
        "model.path",
        "'mistralai/Mistral-7B-Instruct-v0.2'",
        "reachable hub id",
        "model.path=DIR",
    ]
    _expect(Result(done.returncode, done.stdout, done.stderr), words, outputs)
