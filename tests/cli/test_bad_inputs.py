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
from tests.messages import ANY, Tokens, assert_refused

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
    gold_pair = json.loads(lines[0])
    records = gold_pair["ordered_kv_records"]
    key = gold_pair["key"]
    for name, value, others in (
        ("blank", " ", [(k, " " if k == key else v) for k, v in records]),
        ("null", None, [(k, None if k == key else v) for k, v in records]),
        ("twice", gold_pair["value"], [*records, (key, gold_pair["value"])]),
    ):
        row = {"ordered_kv_records": others, "key": key, "value": value}
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
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
    # what it is, arguments; what the line names: field, value, allowed, next step
    (
        "wrong type",
        ["method.factor=abc"],
        "method.factor",
        "abc",
        ("number", "float32"),
        "method.factor=0.5",
    ),
    (
        "true is no number",
        ["method.factor=true"],
        "method.factor",
        True,
        ("number", "float32"),
        "method.factor=0.5",
    ),
    (
        "not a number",
        ["method.factor=nan"],
        "method.factor",
        float("nan"),
        ("number", "float32"),
        "method.factor=0.5",
    ),
    (
        "infinite",
        ["method.factor=-inf"],
        "method.factor",
        -float("inf"),
        ("number", "float32"),
        "method.factor=0.5",
    ),
    (
        "not a number as text",
        ["method.factor='nan'"],
        "method.factor",
        "nan",
        ("number", "float32"),
        "method.factor=0.5",
    ),
    (
        "infinite in a list",
        ["search.factors=[0.5,inf]"],
        "search.factors",
        [0.5, float("inf")],
        ("1", "finite"),
        "search.factors=[0.5]",
    ),
    (
        "no value",
        [
            "method.channel=1",
            "method.factor=null",
            "method.layers=[0,1]",
            "stages=[evaluate]",
        ],
        "method.factor",
        None,
        "scale_channel",
        ("stages=[search]", "model=tiny", "method=scale_channel"),
    ),
    (
        "misspelt key",
        ["method.facto=1"],
        "method.facto",
        1,
        ("channel", "factor"),
        "method.factor",
    ),
    (
        "added key",
        ["+method.x=1"],
        "method.x",
        1,
        ("channel", "factor", "layers", "last"),
        "remove",
    ),
    ("misspelt group", ["modle=tiny"], "modle", "tiny", ("model", "task"), "model"),
    ("key of no group", ["foo.bar=1"], "foo.bar", "1", ("model", "task"), "remove"),
    (
        "unknown model",
        ["model=mistral7"],
        "model",
        "mistral7",
        "mistral7b",
        "mistral7b",
    ),
    (
        "unknown task",
        ["task=kv"],
        "task",
        "kv",
        ("kv_retrieval", "mmlu"),
        "kv_retrieval",
    ),
    (
        "key of another task",
        ["task=mmlu", "task.pairs=3"],
        "task.pairs",
        3,
        ("subsets", "shots"),
        "remove",
    ),
    (
        "unknown method",
        ["method=scale"],
        "method",
        "scale",
        "scale_channel",
        "scale_channel",
    ),
    (
        "unknown search",
        ["search=x"],
        "search",
        "x",
        ("channel", "exhaustive", "genetic"),
        "posbench ls searches",
    ),
    (
        "unknown runtime",
        ["runtime=x"],
        "runtime",
        "x",
        ("auto", "gpu"),
        "posbench ls runtimes",
    ),
    (
        "unknown experiment",
        ["experiment=yu2025_fig66"],
        "experiment",
        "yu2025_fig66",
        "yu2025_fig6",
        "yu2025_fig6",
    ),
    (
        "model=hf without a path",
        ["model=hf"],
        "model.path",
        None,
        ("directory", "hub id"),
        ("model=DIR", "model.base_url=http://localhost:8000/v1"),
    ),
    (
        "unknown dtype",
        ["model.dtype=int8"],
        "model.dtype",
        "int8",
        "bfloat16",
        "model.dtype=auto",
    ),
    (
        "unknown kernel",
        ["model.attention=flash"],
        "model.attention",
        "flash",
        ("sdpa", "eager"),
        "model.attention=auto",
    ),
    (
        "window of zero",
        ["+model.context_window=0"],
        "model.context_window",
        0,
        ("1", "1000000000"),
        "model.context_window=1",
    ),
    (
        "name that is a path",
        ["model.name=../x"],
        "model.name",
        "../x",
        ("letters", "76"),
        "model.name=mine",
    ),
    (
        "one layer",
        ["method.layers=[1]"],
        "method.layers",
        [1],
        ("2", "exactly"),
        "method.layers=[1,1]",
    ),
    (
        "three layers",
        ["method.layers=[1,2,3]"],
        "method.layers",
        [1, 2, 3],
        ("2", "exactly"),
        "method.layers=[1,1]",
    ),
    (
        "layers not a list",
        ["method.layers=2"],
        "method.layers",
        2,
        ("2", "exactly"),
        "method.layers=[1,1]",
    ),
    (
        "last by name",
        ["method.last=foo"],
        "method.last",
        "foo",
        ("1", "1000000", "all"),
        "method.last=1",
    ),
    (
        "no stages",
        ["stages=[]"],
        "stages",
        [],
        ("search", "study", "intervene", "evaluate", "report"),
        "stages=[evaluate,report]",
    ),
    (
        "misspelt stage",
        ["stages=[serch]"],
        "stages",
        ["serch"],
        ("search", "study", "intervene", "evaluate", "report"),
        "stages=[evaluate,report]",
    ),
    (
        "stages out of order",
        ["stages=[evaluate,search]"],
        "stages",
        ["evaluate", "search"],
        ("search", "order"),
        "stages=[evaluate,report]",
    ),
    (
        "search for no method",
        ["method=none", "stages=[search]"],
        "stages",
        ["search"],
        ("none", "channel", "scale_channel"),
        ("method=scale_channel", "posbench ls searches"),
    ),
    (
        "index outside the list",
        ["task.positions=[0,32]"],
        "task.positions",
        32,
        ("0", "31", "task.pairs=32"),
        "list",
    ),
    (
        "negative index",
        ["task.positions=[-1]"],
        "task.positions",
        -1,
        ("0", "31"),
        "list",
    ),
    (
        "share above 100 %",
        ["task.positions=['101%']"],
        "task.positions",
        "101%",
        ("0%", "100%"),
        "list",
    ),
    (
        "share that is none",
        ["task.positions=['nan%']"],
        "task.positions",
        "nan%",
        ("0%", "100%"),
        "list",
    ),
    (
        "position that is none",
        ["task.positions=[middle]"],
        "task.positions",
        "middle",
        ("0", "31"),
        "list",
    ),
    (
        "repeated positions",
        ["task.positions=[0,'0%']"],
        "task.positions",
        [0, "0%"],
        ("different", "task.pairs=32"),
        ("task.positions", "task.pairs"),
    ),
    (
        "no positions",
        ["task.positions=[]"],
        "task.positions",
        [],
        "1",
        "task.positions=[1]",
    ),
    ("one pair", ["task.pairs=1"], "task.pairs", 1, ("2", "1000000"), "task.pairs=2"),
    (
        "more pairs than words",
        ["task.pairs=65"],
        "task.pairs",
        65,
        ("64", "records=words"),
        "task.pairs=64",
    ),
    (
        "more calibration pairs than words",
        ["task.calibration_pairs=65"],
        "task.calibration_pairs",
        65,
        ("64", "records=words"),
        "task.calibration_pairs=64",
    ),
    (
        "no strings",
        ["search.strings=0"],
        "search.strings",
        0,
        ("1", "1000000"),
        "search.strings=1",
    ),
    (
        "no factors",
        ["search.factors=[]"],
        "search.factors",
        [],
        "1",
        "search.factors=[0.5]",
    ),
    (
        "no threads",
        ["runtime.threads=0"],
        "runtime.threads",
        0,
        ("1", "1024"),
        "runtime.threads=1",
    ),
    (
        "unknown device map",
        ["runtime.device_map=spread"],
        "runtime.device_map",
        "spread",
        ("auto", "balanced"),
        "runtime.device_map=auto",
    ),
    (
        "device map on one device",
        ["runtime.device=cpu", "runtime.device_map=auto"],
        "runtime.device_map",
        "auto",
        ("null", "runtime.device=cpu"),
        ("runtime.device=auto", "CUDA_VISIBLE_DEVICES"),
    ),
    (
        "memory without a device map",
        ["runtime.max_memory={cpu:1GiB}"],
        "runtime.max_memory",
        {"cpu": "1GiB"},
        ("null", "device_map"),
        "runtime.device_map=auto",
    ),
    (
        "memory without a unit",
        ["runtime.device_map=auto", "runtime.max_memory={0:70}"],
        "runtime.max_memory",
        {0: 70},
        "mapping",
        "runtime.max_memory",
    ),
    (
        "memory that is no size",
        ["runtime.device_map=auto", "runtime.max_memory={0:lots}"],
        "runtime.max_memory",
        {0: "lots"},
        ("KiB", "MiB", "GiB"),
        "runtime.max_memory={0:70GiB,cpu:100GiB}",
    ),
    (
        "memory of no device",
        ["runtime.device_map=auto", "runtime.max_memory={gpu:1GiB}"],
        "runtime.max_memory",
        {"gpu": "1GiB"},
        ("GPU", "cpu"),
        "runtime.max_memory={0:70GiB,cpu:100GiB}",
    ),
    (
        "empty batches",
        ["runtime.batch_size=0"],
        "runtime.batch_size",
        0,
        ("1", "1000000"),
        "runtime.batch_size=1",
    ),
    (
        "one draw",
        ["runtime.resamples=1"],
        "runtime.resamples",
        1,
        ("100", "1000000"),
        "runtime.resamples=100",
    ),
    (
        "unfinished list",
        ["method.factor=[1"],
        "method.factor",
        "method.factor=[1",
        "key=value",
        ("brackets", "quotes"),
    ),
    ("no equals sign", ["foo"], "verb", "foo", "key=value", "posbench --help"),
    (
        "unknown reference",
        ["method.factor=${nope}"],
        "method.factor",
        "???",
        "value",
        ("method.factor=...", "nope"),
    ),
    (
        "a sweep without -m",
        ["model=hf,tiny"],
        "model",
        "hf,tiny",
        "[a,b]",
        "--multirun",
    ),
    (
        "unknown flag",
        ["--nonsense"],
        "flag",
        "--nonsense",
        ("key=value", "--config-dir"),
        "posbench --help",
    ),
    (
        "unknown choice of a flag",
        ["--cfg", "nonsense"],
        "--cfg",
        "nonsense",
        "job",
        "posbench --cfg job",
    ),
    (
        "a flag of Hydra's",
        ["--info", "-m"],
        "flag",
        "--info",
        ("-m", "--cfg job"),
        "posbench --help",
    ),
    (
        "a search path of Hydra's",
        ["hydra.searchpath=[file:///nowhere]"],
        "hydra.searchpath",
        ANY,
        "nothing",
        "--config-dir",
    ),
    (
        "missing config folder",
        ["--config-dir", "/nowhere"],
        "--config-dir",
        "/nowhere",
        "folder",
        "path",
    ),
    (
        "no questions kept",
        ["task.limit=0"],
        "task.limit",
        0,
        ("1", "100000"),
        "task.limit=1",
    ),
    (
        "endless stages",
        ["stages=inf"],
        "stages",
        [float("inf")],
        "order",
        "stages=[evaluate,report]",
    ),
    (
        "half a stage",
        ["stages=1.5"],
        "stages",
        1.5,
        "order",
        "stages=[evaluate,report]",
    ),
    (
        "stages that are true",
        ["stages=true"],
        "stages",
        [True],
        "order",
        "stages=[evaluate,report]",
    ),
    (
        "a word that is no stage",
        ["stages=evaluat"],
        "stages",
        ["evaluat"],
        ("search", "evaluate"),
        "stages=[evaluate,report]",
    ),
    (
        "words out of order",
        ["stages=report,evaluate"],
        "stages",
        ["report", "evaluate"],
        ("report", "order"),
        "stages=[evaluate,report]",
    ),
    ("no model", ["model=null"], "model", "null", "tiny", "leave"),
    ("no task", ["task=null"], "task", "null", "kv_retrieval", "leave"),
    (
        "no penalty",
        ["task.repetition_penalty=0"],
        "task.repetition_penalty",
        0,
        ("0", "above"),
        "task.repetition_penalty=1",
    ),
    (
        "negative seed",
        ["task.seed=-1"],
        "task.seed",
        -1,
        ("0", "4294967295"),
        "task.seed=0",
    ),
    (
        "negative seed of a study",
        ["study=positional_channels", "study.seed=-5"],
        "study.seed",
        -5,
        ("0", "4294967295"),
        "study.seed=0",
    ),
    (
        "depth of an item",
        ["study=channel_subtraction", "study.gold=7"],
        "study.gold",
        7,
        ("0", "1"),
        "study.gold=0",
    ),
    (
        "a search of a study that makes none",
        ["study=rollout", "search=bases"],
        "search",
        "bases",
        "rollout",
        "leave it out",
    ),
    (
        "a setting of that search",
        ["study=rollout", "search.top_k=2"],
        "search",
        "channel",
        "search.top_k",
        "leave it out",
    ),
    (
        "depth below",
        ["study=channel_subtraction", "study.other=-0.5"],
        "study.other",
        -0.5,
        ("0", "1"),
        "study.other=0",
    ),
    (
        "a start beyond float32",
        [
            "method=layer_scaling",
            "search=gradient",
            "search.start=1e300",
            "stages=[search]",
        ],
        "search.start",
        1e300,
        ("1e-06", "1000000"),
        "search.start=1",
    ),
    (
        "iterations without an end",
        ["study=synthetic_training", "study.iterations=1000000000000000000"],
        "study.iterations",
        1000000000000000000,
        ("1", "1000000"),
        "study.iterations=1",
    ),
    (
        "threads beyond C",
        ["runtime.threads=1000000000000000000"],
        "runtime.threads",
        1000000000000000000,
        ("1", "1024"),
        "runtime.threads=1",
    ),
    (
        "threads that no machine has",
        ["runtime.threads=999999"],
        "runtime.threads",
        999999,
        ("1", "1024"),
        "runtime.threads=1",
    ),
    (
        "a name that is too long",
        ["model.name=" + "x" * 230],
        "model.name",
        "x" * 230,
        "76",
        "model.name=mine",
    ),
    (
        "a path that is too long",
        ["task.path=" + "x" * 300],
        "task.path",
        "x" * 300,
        ("file", "folder"),
        "path",
    ),
    (
        "a block that the run does not use",
        ["model.layer_scaling.x=plain"],
        "model.layer_scaling.x",
        "plain",
        ("scale_channel", "kv_retrieval", "channel"),
        "layer_scaling",
    ),
    (
        "texts for a model of few words",
        ["task=longbench"],
        "task",
        "longbench",
        ("kv_retrieval", "tiny"),
        ("task=longbench", "model=mistral7b"),
    ),
    (
        "an experiment's name too long",
        ["experiment=" + "x" * 300],
        "file",
        ANY,
        "255",
        "shorten",
    ),
    (
        "a key of the model's block",
        ["model.scale_channel.factr=1"],
        "model.scale_channel.factr",
        1,
        "factor",
        "factor",
    ),
    (
        "keys of a choice inside a study",
        ["study=ablations", "study.search.skip=3"],
        "study.search",
        {"skip": 3},
        "search",
        "search.KEY=VALUE",
    ),
    (
        "nothing in a list of methods",
        ["method=[none,scale_channel]"],
        "method",
        "[none,scale_channel]",
        ("layer_scaling", "scale_channel"),
        "leave",
    ),
    (
        "a launcher that is not there",
        ["hydra/launcher=ray"],
        "hydra/launcher",
        "ray",
        "basic",
        "hydra/launcher",
    ),
    (
        "a search without its method",
        ["search=genetic"],
        "search",
        "genetic",
        ("genetic", "layer_scaling"),
        ("method=layer_scaling", "posbench ls searches"),
    ),
    (
        "a file as checkpoint",
        ["model.path={tiny}/config.json"],
        "model.path",
        "{tiny}/config.json",
        ("directory", "config.json"),
        "model.path=DIR",
    ),
    (
        "a reply longer than the window",
        ["task.max_new_tokens=100000"],
        "task.max_new_tokens",
        100000,
        ("381", "tiny", "512"),
        "task.max_new_tokens=381",
    ),
]

SMALL = [
    # what it is, arguments; what the line names: field, value, allowed, next step
    (
        "channel outside the hidden size",
        ["method.channel=16"],
        "method.channel",
        [16],
        ("different", "0", "15"),
        ("stages=[search]", "model=random"),
    ),
    (
        "negative channel",
        ["method.channel=-1"],
        "method.channel",
        [-1],
        ("different", "0", "15"),
        ("stages=[search]", "model=random"),
    ),
    (
        "repeated channel",
        ["method.channel=[3,3]"],
        "method.channel",
        [3, 3],
        ("different", "0", "15"),
        ("stages=[search]", "model=random"),
    ),
    (
        "no channel",
        ["method.channel=[]"],
        "method.channel",
        [],
        ("different", "0", "15"),
        ("stages=[search]", "model=random"),
    ),
    (
        "layer outside the model",
        ["method.layers=[0,4]"],
        "method.layers",
        [0, 4],
        ("first", "last", "3", "4"),
        "0-based",
    ),
    (
        "negative layer",
        ["method.layers=[-1,2]"],
        "method.layers",
        [-1, 2],
        ("first", "last", "3", "4"),
        "0-based",
    ),
    (
        "reversed layers",
        ["method.layers=[2,1]"],
        "method.layers",
        [2, 1],
        ("first", "last", "3", "4"),
        "0-based",
    ),
    (
        "no last token",
        ["method.last=0"],
        "method.last",
        0,
        ("1", "1000000", "all"),
        "method.last=1",
    ),
    (
        "negative last token",
        ["method.last=-1"],
        "method.last",
        -1,
        ("1", "1000000", "all"),
        "method.last=1",
    ),
    (
        "layers of the search",
        ["search.layers=[3,4]"],
        "search.layers",
        [3, 4],
        ("first", "last", "3", "4"),
        "0-based",
    ),
    (
        "prompt over the window",
        ["task.pairs=64", "task.positions=[0]"],
        "task.pairs",
        64,
        ("63", "random", "256"),
        ("task.pairs=63", "task.truncation=middle"),
    ),
    (
        "calibration over the window",
        ["task.calibration_pairs=64"],
        "task.calibration_pairs",
        64,
        "63",
        "task.calibration_pairs=63",
    ),
    (
        "strings over the window",
        ["search.length=257"],
        "search.length",
        257,
        ("256", "random"),
        "search.length=256",
    ),
    (
        "window over the strings",
        ["search.window=100"],
        "search.window",
        100,
        "4",
        "search.window=4",
    ),
    (
        "official over the strings",
        ["search.variant=official"],
        "search.length",
        48,
        ("301", "variant=official", "256"),
        "search.length=256",
    ),
    (
        "raw curves in the released program",
        ["search.variant=official", "search.scaled=false"],
        "search.scaled",
        False,
        ("true", "variant=official"),
        "search.variant=paper",
    ),
    (
        "device that is not there",
        ["runtime.device=cuda:7"],
        "runtime.device",
        "cuda:7",
        ("auto", "cpu"),
        "runtime.device=auto",
    ),
    (
        "device that is none",
        ["runtime.device=abacus"],
        "runtime.device",
        "abacus",
        ("auto", "cpu"),
        "runtime.device=auto",
    ),
    (
        "device without numbers",
        ["runtime.device=meta"],
        "runtime.device",
        "meta",
        ("auto", "cpu"),
        "runtime.device=auto",
    ),
    (
        "kernel that is not installed",
        ["model.attention=flash_attention_2"],
        "model.attention",
        "flash_attention_2",
        ("sdpa", "eager"),
        "model.attention=sdpa",
    ),
    (
        "no constants",
        ["stages=[evaluate]"],
        "method.channel",
        None,
        "scale_channel",
        ("stages=[search]", "method=scale_channel"),
    ),
    (
        "nothing to report",
        [
            "stages=[report]",
            "method.channel=0",
            "method.factor=0",
            "method.layers=[0,1]",
        ],
        "stages",
        ["report"],
        "report",
        "posbench report",
    ),
    (
        "missing checkpoint",
        ["model.path={files}/nowhere"],
        "model.path",
        "{files}/nowhere",
        "config.json",
        ("model.path=DIR", "no such directory"),
    ),
    (
        "unknown hub id",
        ["model.path=nobody/nothing"],
        "model.path",
        "nobody/nothing",
        "hub id",
        ("HF_HUB_OFFLINE", "posbench fetch", "model.path=DIR"),
    ),
    (
        "unknown embedded model",
        ["model.path=posbench://huge"],
        "model.path",
        "posbench://huge",
        "config.json",
        ("model.path=DIR", "no such directory"),
    ),
    (
        "empty checkpoint",
        ["model.path={files}/empty"],
        "model.path",
        "{files}/empty",
        "config.json",
        ("model.path=DIR", "config.json"),
    ),
    (
        "broken config",
        ["model.path={files}/badconfig"],
        "model.path",
        "{files}/badconfig",
        "config.json",
        ("model.path=DIR", "JSON"),
    ),
    (
        "pickled weights",
        ["model.path={files}/pickle"],
        "model.path",
        "{files}/pickle",
        "*.safetensors",
        ("model.path=DIR", "model.safetensors"),
    ),
    (
        "torn weights",
        ["model.path={files}/torn"],
        "model.path",
        "{files}/torn",
        "*.safetensors",
        ("model.path=DIR", "metadata"),
    ),
    (
        "no tokenizer",
        ["model.path={files}/notokenizer"],
        "model.path",
        "{files}/notokenizer",
        "tokenizer",
        ("model.path=DIR", "tokenizer files"),
    ),
    (
        "unknown family",
        ["model.path={files}/gpt2"],
        "model architecture",
        "gpt2",
        ("llama", "mistral"),
        "posbench/model/families.py",
    ),
    (
        "another unknown family",
        ["model.path={files}/deepseek_v3"],
        "model architecture",
        "deepseek_v3",
        ("llama", "mistral"),
        "MLA",
    ),
    (
        "unknown to transformers too",
        ["model.path={files}/alien"],
        "model architecture",
        "alien",
        ("llama", "mistral"),
        "posbench/model/families.py",
    ),
    (
        "missing file",
        ["task.path={files}/nowhere.jsonl"],
        "task.path",
        "{files}/nowhere.jsonl",
        ("file", "folder"),
        ("path", "2023"),
    ),
    (
        "a folder as file",
        ["task.path={files}"],
        "task.path",
        "{files}",
        ".jsonl.gz",
        "directory",
    ),
    (
        "broken line",
        ["task.path={files}/broken.jsonl", "task.limit=3"],
        "task.path: {files}/broken.jsonl, line 2",
        "",
        ("JSON object", "UTF-8"),
        "line",
    ),
    (
        "line that is no object",
        ["task.path={files}/list.jsonl"],
        "task.path: {files}/list.jsonl, line 1",
        "",
        ("JSON object", "UTF-8"),
        "line",
    ),
    (
        "truncated gzip",
        ["task.path={files}/truncated.jsonl.gz"],
        "task.path",
        "{files}/truncated.jsonl.gz",
        ".jsonl.gz",
        "2",
    ),
    (
        "gzip that is none",
        ["task.path={files}/notgzip.jsonl.gz"],
        "task.path",
        "{files}/notgzip.jsonl.gz",
        ".jsonl.gz",
        "Not a gzipped",
    ),
    (
        "missing field",
        ["task.path={files}/nofield.jsonl", ONE],
        "task.path: {files}/nofield.jsonl, line 1",
        "",
        ("ordered_kv_records", "key", "value"),
        "line",
    ),
    (
        "gold not among the pairs",
        ["task.path={files}/nogold.jsonl", ONE],
        "task.path: {files}/nogold.jsonl, line 1",
        "",
        ("gold", "ordered_kv_records"),
        "line",
    ),
    *(
        (
            f"gold value: {name}",
            [f"task.path={{files}}/{name}.jsonl", ONE],
            f"task.path: {{files}}/{name}.jsonl, line 1",
            "",
            words,
            "line",
        )
        for name, words in (
            ("blank", ("gold", "blank")),
            ("null", ("gold", "blank")),
            ("twice", ("gold key", "once")),
        )
    ),
    (
        "wrong encoding",
        ["task.path={files}/latin.jsonl", ONE],
        "task.path: {files}/latin.jsonl, line 1",
        "",
        "UTF-8",
        "as UTF-8",
    ),
    (
        "empty file",
        ["task.path={files}/empty.jsonl"],
        "task.path",
        "{files}/empty.jsonl",
        "empty",
        "path",
    ),
    (
        "half of a character",
        ["task.path={files}/half.jsonl", ONE],
        "task.path: {files}/half.jsonl, line 1",
        "",
        "UTF-8",
        "line",
    ),
    (
        "more pairs than the file",
        ["task.path={files}/good.jsonl", ONE, "task.pairs=76"],
        "task.pairs",
        76,
        "75",
        "task.pairs=75",
    ),
    (
        "calibration on the evaluation",
        [
            "task.path={files}/good.jsonl",
            ONE,
            "task.calibration_path={files}/overlap.jsonl",
        ],
        "task.calibration_path: {files}/overlap.jsonl, line 1",
        "",
        ("questions", "evaluation"),
        "line",
    ),
    (
        "calibration without output",
        ["task.calibration_path={files}/nooutput.jsonl"],
        "task.calibration_path: {files}/nooutput.jsonl, line 1",
        "",
        "output",
        "line",
    ),
    (
        "empty calibration",
        ["task.calibration_path={files}/empty.jsonl"],
        "task.calibration_path",
        "{files}/empty.jsonl",
        "empty",
        "path",
    ),
]


def _expect(
    result: Result,
    outputs: Path,
    field: str,
    value: object,
    allowed: Tokens,
    hint: Tokens,
) -> None:
    assert result.status == 2 and "hydra.cc" not in result.err, result
    assert result.err.startswith("posbench: ") and result.err.count("\n") == 1, (
        result.err
    )
    assert "Traceback" not in result.out + result.err
    assert_refused(result.err, field, value, allowed=allowed, hint=hint)
    assert run_folders(outputs) == [] and list(outputs.glob("*/v*")) == []


@pytest.mark.parametrize(
    ("args", "field", "value", "allowed", "hint"),
    [row[1:] for row in BARE],
    ids=[row[0] for row in BARE],
)
def test_refused_before_the_model(
    args: list[str],
    field: str,
    value: object,
    allowed: Tokens,
    hint: Tokens,
    posbench: Callable[..., Result],
    outputs: Path,
) -> None:
    tiny = str(paths.MODELS / "tiny")
    result = posbench(*(a.replace("{tiny}", tiny) for a in args))
    _expect(result, outputs, field, _at(value, "{tiny}", tiny), allowed, hint)


def _at(value: object, placeholder: str, path: str) -> object:
    """A value with a path in the place of a placeholder."""
    return value.replace(placeholder, path) if isinstance(value, str) else value


def test_the_checkpoint_comes_first_and_with_what_else_is_missing(
    posbench: Callable[..., Result], outputs: Path, tmp_path: Path
) -> None:
    result = posbench(
        f"model={tmp_path}", f"task.path={tmp_path}/none.jsonl", "stages=[evaluate]"
    )
    lines = result.err.splitlines()
    assert result.status == 2 and len(lines) == 3 and run_folders(outputs) == []
    assert_refused(lines[0], "model.path", str(tmp_path), hint="config.json")
    assert_refused(lines[1], "task.path", f"{tmp_path}/none.jsonl", hint="Liu")
    assert_refused(lines[2], "method.channel", None, hint="stages=[search]")


def test_every_job_of_a_sweep_says_what_is_wrong(
    posbench: Callable[..., Result], outputs: Path
) -> None:
    result = posbench("-m", "method.facto=1,2")
    assert result.status == 2 and run_folders(outputs) == []
    for value, line in zip((1, 2), result.err.splitlines(), strict=True):
        assert_refused(line, "method.facto", value, hint="method.factor")


@pytest.mark.parametrize(
    ("args", "field", "value", "allowed", "hint"),
    [row[1:] for row in SMALL],
    ids=[row[0] for row in SMALL],
)
def test_refused_before_the_folder(
    args: list[str],
    field: str,
    value: object,
    allowed: Tokens,
    hint: Tokens,
    posbench: Callable[..., Result],
    outputs: Path,
    files: Path,
    small: list[str],
) -> None:
    here = str(files)
    result = posbench(*small, *(a.replace("{files}", here) for a in args))
    field = field.replace("{files}", here)
    _expect(result, outputs, field, _at(value, "{files}", here), allowed, hint)


def test_validate_says_what_the_run_says(
    posbench: Callable[..., Result], files: Path, small: list[str]
) -> None:
    # Of a hub id that is not on this machine it asks no server.
    chosen = [*SMALL[::6], *(row for row in SMALL if "weights" in row[0])]
    for name, args, *_ in (row for row in chosen if row[0] != "unknown hub id"):
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
        result = posbench("runtime=gpu", *rest, *extra)
        allowed, hint = ("cpu", "no CUDA device"), "runtime=gpu"
        _expect(result, outputs, "runtime.device", "cuda", allowed, hint)
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
    ("args", "field", "value", "allowed", "hint"),
    [
        (["ls", "nonsense"], "ls", "nonsense", ("models", "tasks"), "posbench ls"),
        (
            ["ls", "models", "tasks"],
            "ls",
            "models tasks",
            ("models", "tasks"),
            "models",
        ),
        (["ls", "rusn"], "ls", "rusn", "runs", "runs"),
        (["shwo", "x"], "verb", "shwo", ("show", "key=value"), "show"),
        (["lsruns"], "verb", "lsruns", "ls runs", "ls runs"),
        (["open"], "verb", "open", ("rescore", "show"), "posbench --help"),
        (["run", "--help"], "verb", "run", "key=value", "leave"),
        (["fetch", "nope"], "model", "nope", "tiny", ()),
        (["report"], "report", "", "folder", "posbench report DIR"),
        (["report", "/nowhere"], "DIR", "/nowhere", "config.yaml", "posbench ls runs"),
        (["rescore", "/nowhere"], "DIR", "/nowhere", "config.yaml", "posbench ls runs"),
        (["report", "{here}"], "DIR", "{here}", "config.yaml", "posbench ls runs"),
        (["rescore", "{here}"], "DIR", "{here}", "config.yaml", "posbench ls runs"),
        (["fetch", "model=nope"], "model", "nope", "tiny", ()),
        (["fetch", "task.pairs=1"], "task.pairs", 1, ("2", "1000000"), "task.pairs=2"),
        (
            ["fetch", "task.path=/nowhere.jsonl", "task.prompt=compact"],
            "task.path",
            "/nowhere.jsonl",
            "file",
            "task.path",
        ),
        (["fetch", "--wet-run"], "flag", "--wet-run", "key=value", "posbench --help"),
        *(
            (
                [verb, "{here}", "--foo"],
                "flag",
                "--foo",
                flag,
                f"posbench {verb} --help",
            )
            for verb, flag in (
                ("report", "--format"),
                ("rescore", "--outputs"),
                ("show", "--wrong"),
                ("audit", "--share"),
            )
        ),
        (["validate", "model=nope"], "model", "nope", "tiny", ()),
    ],
)
def test_verbs(
    args: list[str],
    field: str,
    value: object,
    allowed: Tokens,
    hint: Tokens,
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
) -> None:
    here = str(tmp_path)
    (tmp_path / "foreign.txt").write_text("not a run")
    result = posbench(*(a.replace("{here}", here) for a in args), verb=True)
    _expect(result, outputs, field, _at(value, "{here}", here), allowed, hint)
    assert [p.name for p in tmp_path.iterdir()] == ["foreign.txt"]


def test_outputs_that_are_a_file(
    posbench: Callable[..., Result], outputs: Path, small: list[str]
) -> None:
    outputs.write_text("in the way")
    result = posbench(*small)
    allowed, hint = ("folder", "written"), ("runtime.outputs=DIR", str(outputs))
    _expect(result, outputs, "runtime.outputs", str(outputs), allowed, hint)
    assert outputs.read_text() == "in the way"
    outputs.unlink()
    outputs.symlink_to("nowhere")
    result = posbench(*small)
    hint = ("runtime.outputs=DIR", f"{outputs} is a", "link to nothing")
    _expect(result, outputs, "runtime.outputs", str(outputs), allowed, hint)
    assert outputs.is_symlink() and not outputs.exists()
    outputs.unlink()
    outputs.mkdir()
    suite = outputs / "kv_retrieval"
    suite.symlink_to("nowhere")
    result = posbench(*small)
    assert result.status == 2
    hint = ("runtime.outputs=DIR", f"{suite} is a", "link to nothing")
    assert_refused(result.err, "runtime.outputs", allowed=allowed, hint=hint)
    assert [*outputs.iterdir()] == [suite]


def test_folders_that_are_a_link_to_nothing(
    posbench: Callable[..., Result], outputs: Path, tmp_path: Path, small: list[str]
) -> None:
    outputs.mkdir()
    link = outputs / "figures"
    link.symlink_to("nowhere")
    for args, is_verb in (
        ((*small, f"hydra.run.dir={link}/run"), False),
        (("figures", "yu2025_fig6", f"runtime.outputs={outputs}"), True),
    ):
        result = posbench(*args, verb=is_verb)
        assert result.status == 2
        named = ("a folder", "link to nothing")
        assert_refused(result.err, "folder", str(link), allowed=named, hint="rename")
    assert not link.exists()


def test_broken_yaml_of_the_user(
    posbench: Callable[..., Result], outputs: Path, tmp_path: Path
) -> None:
    own = tmp_path / "conf"
    (own / "model").mkdir(parents=True)
    (own / "model" / "mine.yaml").write_text("name: [mine\n")
    result = posbench("--config-dir", str(own), "model=mine")
    _expect(result, outputs, "config file", str(own), "YAML", ("mine.yaml", "line 1"))


def test_the_process_says_the_same(outputs: Path, tmp_path: Path) -> None:
    """One real process: the status and the single line reach the shell."""
    command = [*PROCESS, "method.factor=abc", f"runtime.outputs={outputs}"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    result = Result(done.returncode, done.stdout, done.stderr)
    hint = "method.factor=0.5"
    _expect(result, outputs, "method.factor", "abc", "float32", hint)


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
    result = Result(done.returncode, done.stdout, done.stderr)
    model = "mistralai/Mistral-7B-Instruct-v0.2"
    _expect(result, outputs, "model.path", model, "hub id", "model.path=DIR")
