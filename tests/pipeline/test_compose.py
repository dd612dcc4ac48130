"""From arguments and YAML files to plain data: who wins where two say something, and what is refused."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from posbench import paths
from posbench.methods.choice import all_choices
from posbench.model.load import ModelConfig
from posbench.pipeline.compose import ComposedConfig, compose, compose_one, launch
from posbench.pipeline.multirun import Record, new_record
from posbench.run.runtime import Runtime
from posbench.schema import default_values
from posbench.search.channel import ChannelSearch
from posbench.tasks import KVRetrieval
from tests.conftest import Result, few
from tests.messages import Tokens, assert_refused, refused


def _jobs(*args: str) -> list[ComposedConfig]:
    return list(compose(args).composed)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's own folder with a model, a task, a method and a search."""
    files: dict[str, Any] = {
        "model/mine": {
            "path": "posbench://tiny",
            "kv_retrieval": {"pairs": 7, "prompt": "compact"},
            "qa": {"pairs": 9},
            "channel": {"strings": 11},
            "fast": {"top_k": 2},
        },
        "task/qa": {"_target_": "posbench.tasks.KVRetrieval", "records": "words"},
        "method/twice": {
            "_target_": "posbench.methods.scale_channel.ScaleChannel",
            "channel": [1, 2],
            "factor": 0.5,
            "layers": [0, 1],
        },
        "search/fast": {"defaults": ["channel", "_self_"], "length": 50},
    }
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(data))
    return tmp_path


# Who wins


def test_every_key_that_nobody_sets_has_its_classs_default() -> None:
    raw = compose_one("model=phi4").raw
    for group, cls in (
        ("task", KVRetrieval),
        ("search", ChannelSearch),
        ("runtime", Runtime),
    ):
        node = {
            key: value
            for key, value in raw[group].items()
            if key not in ("_target_", "name")
        }
        assert node == {
            key: value for key, value in default_values(cls).items() if key != "name"
        }, group
    assert raw["task"]["name"] == "kv_retrieval" and raw["search"]["name"] == "channel"
    assert raw["model"]["name"] == "phi4" and raw["model"]["dtype"] == "bfloat16"
    assert {f.name for f in fields(ModelConfig)} - {"blocks"} <= set(raw["model"])
    assert raw["method"] == {
        **{
            "name": "scale_channel",
            "_target_": "posbench.methods.scale_channel.ScaleChannel",
        },
        **{
            "channel": None,
            "factor": None,
            "layers": None,
            "last": 1,
            "tokens": "both",
        },
    }


def test_a_models_block_stands_over_defaults_and_what_is_typed_over_the_block() -> None:
    raw = compose_one(
        "model=tiny", "task.pairs=16", "search.strings=9", "method.factor=0.25"
    ).raw
    assert (
        raw["task"]["pairs"],
        raw["task"]["prompt"],
        raw["task"]["max_new_tokens"],
    ) == (16, "compact", 1)
    assert raw["search"]["strings"] == 9 and raw["search"]["length"] == 128
    assert (raw["method"]["channel"], raw["method"]["factor"]) == (15, 0.25)
    assert "source" not in raw["method"], (
        "what the block says of itself is no parameter"
    )
    # A typed null is typed.
    assert (
        compose_one("model=tiny", "method.channel=null").raw["method"]["channel"]
        is None
    )
    # A typed block is the model's block.
    assert (
        compose_one("model=tiny", "model.scale_channel.channel=3").raw["method"][
            "channel"
        ]
        == 3
    )


def test_a_model_without_a_block_for_the_task_leaves_the_papers_settings() -> None:
    raw = compose_one("model=tiny", "task=longbench").raw
    assert raw["task"]["max_prompt_tokens"] is None
    assert (
        compose_one("model=mistral7b", "task=longbench").raw["task"][
            "max_prompt_tokens"
        ]
        == 19500
    )


def test_what_an_experiment_sets_stands_over_the_models_block() -> None:
    file = yaml.safe_load(
        paths.find_choice("experiment", "yu2025_table1_kv").read_text()
    )
    own = compose_one("experiment=yu2025_table1_kv", "model=tiny").raw["task"]
    assert "pairs" not in file["task"] or own["pairs"] == file["task"]["pairs"]
    set_by = {
        key: value for key, value in file["task"].items() if not isinstance(value, dict)
    }
    assert set_by and {key: own[key] for key in set_by} == set_by
    typed = compose_one(
        "experiment=yu2025_table1_kv", "model=tiny", "task.pairs=5"
    ).raw["task"]
    assert typed["pairs"] == 5


def test_choices_of_one_class_share_its_modules_block(own: Path) -> None:
    dir_ = ["--config-dir", str(own), "model=mine"]
    for extra, strings, top_k in (
        ([], 11, 10),
        (["search=exhaustive"], 11, 10),
        (["search=fast"], 2000, 2),
    ):
        (made,) = _jobs(*dir_, *extra)
        found = made.raw["search"]["strings"], made.raw["search"]["top_k"]
        assert found == (strings, top_k), (
            "the block of the choice's own name comes first"
        )
    (made,) = _jobs(*dir_, "search=fast", "search.length=60")
    assert made.raw["search"]["length"] == 60
    (made,) = _jobs(*dir_, "task=qa")
    assert (made.raw["task"]["pairs"], made.raw["task"]["records"]) == (9, "words")


def test_what_a_users_own_file_sets_stands_over_the_models_block(own: Path) -> None:
    values = {"channel": 7, "factor": 0.5, "layers": [0, 3]}
    target = "posbench.methods.scale_channel.ScaleChannel"
    data = {"_target_": target, **values}
    (own / "method/mine_too.yaml").write_text(yaml.safe_dump(data))
    data = {"_target_": "posbench.tasks.KVRetrieval", "pairs": 10, "limit": 5}
    (own / "task/short.yaml").write_text(yaml.safe_dump(data))
    flag = f"--config-dir={own}"
    (job,) = _jobs(flag, "method=mine_too", "task=short")
    assert {key: job.raw["method"][key] for key in values} == values
    assert (job.raw["task"]["pairs"], job.raw["task"]["limit"]) == (10, 5)
    # What the file leaves out is tiny's.
    assert job.raw["task"]["records"] == "words"
    (typed,) = _jobs(flag, "method=mine_too", "method.channel=9")
    assert typed.raw["method"]["channel"] == 9


def test_an_own_file_may_extend_an_own_one(own: Path) -> None:
    files: dict[str, Any] = {
        "method/half": {"defaults": ["scale_channel"], "factor": 0.5},
        "method/half_last": {"defaults": ["half", "_self_"], "last": 2},
        "task/eight": {"defaults": ["kv_retrieval", "_self_"], "pairs": 8},
        "task/eight_limited": {"defaults": ["eight"], "limit": 2},
    }
    for name, data in files.items():
        (own / f"{name}.yaml").write_text(yaml.safe_dump(data))
    flag = f"--config-dir={own}"
    (job,) = _jobs(flag, "method=half_last", "task=eight_limited")
    method, task = job.raw["method"], job.raw["task"]
    assert (method["factor"], method["last"]) == (0.5, 2)
    assert (task["pairs"], task["limit"]) == (8, 2)
    # What no own file sets is the model's.
    assert (method["channel"], task["prompt"]) == (15, "compact")
    # A study of all methods reads it so, too.
    values = all_choices(paths.config_folders(str(own)), {})["half_last"].values
    assert (values["factor"], values["last"]) == (0.5, 2)
    # A block of the model's may name the choice.
    (own / "model/mb.yaml").write_text(
        yaml.safe_dump({"path": "posbench://tiny", "half": {"channel": 3}})
    )
    (job,) = _jobs(flag, "model=mb", "method=half", "model.half.channel=2")
    assert job.raw["method"]["channel"] == 2
    with refused("model.half.chanel", 2, allowed="channel", hint="channel"):
        _jobs(flag, "model=mb", "method=half", "+model.half.chanel=2")


def test_a_checkpoint_without_a_model_is_none_of_posbenchs(own: Path) -> None:
    """Its name and constants would be those of the default model."""
    (job,) = _jobs("model.path=posbench://tiny_b")
    assert job.raw["model"]["name"] == "tiny_b"
    assert "scale_channel" not in job.raw["model"]
    path = "model.path=posbench://tiny_b"
    assert len(_jobs("experiment=yu2025_fig11", path)) == 1
    (both,) = _jobs("model=tiny", path)
    assert both.raw["model"]["name"] == "tiny"


def test_an_experiment_may_have_hydras_plus() -> None:
    (plain, *_), (plus, *_) = (
        _jobs(f"{sign}experiment=yu2025_fig6") for sign in ("", "+")
    )
    assert plain.raw == plus.raw


def test_what_stands_for_a_value_is_spelled_as_typed() -> None:
    (job,) = _jobs("model=org/name", "method=[scale_channel,layer_scaling]")
    assert job.overrides == (
        "model=org/name",
        "method=[scale_channel,layer_scaling]",
    )


def test_a_typed_value_that_begins_another_changes_nothing_in_it(
    tmp_path: Path,
) -> None:
    checkpoint = tmp_path / "b"
    checkpoint.mkdir()
    short = "method=[question_first_and_last,rope_base]"
    long = "method=[question_first_and_last,rope_base,layer_scaling]"
    jobs = _jobs("-m", f"model=tiny_b,{checkpoint}", f"{short},{long.split('=')[1]}")
    typed = [override for job in jobs for override in job.overrides]
    models, methods = typed[::2], typed[1::2]
    assert models == ["model=tiny_b"] * 2 + [f"model={checkpoint}"] * 2
    assert methods == [short, long] * 2


def test_a_number_given_as_text_is_that_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FACTOR", "0")
    factors = "method.factor=0,'0',${oc.env:FACTOR}"
    texts = [
        "task.positions=['0','1','100%']",
        "runtime.threads='2'",
        "search.factors=['0.5']",
    ]
    jobs = _jobs("-m", factors, *texts)
    assert [repr(job.raw["method"]["factor"]) for job in jobs[1:]] == ["0.0", "0.0"]
    assert jobs[0].raw["method"]["factor"] == 0
    raw = jobs[0].raw
    assert raw["search"]["factors"] == [0.5] and raw["runtime"]["threads"] == 2
    # Where a text is right, and where none is.
    assert raw["task"]["positions"][-1] == "100%"
    assert compose_one("task.pairs=few").raw["task"]["pairs"] == "few"
    listed = compose_one("method=[scale_channel]", "method.factor='0'")
    assert listed.raw["method"]["factor"] == 0
    (two,) = _jobs(
        "method=[layer_scaling,scale_channel]", "method.parts.scale_channel.factor='0'"
    )
    assert two.raw["method"]["parts"]["scale_channel"]["factor"] == 0


def test_a_list_of_methods_takes_the_block_of_each() -> None:
    typed = [
        "method.parts.scale_channel.factor=0.5",
        "method.parts.layer_scaling.curve=linear",
    ]
    made = compose_one("model=tiny", "method=[layer_scaling, scale_channel]", *typed)
    method = made.raw["method"]
    assert method["name"] == "layer_scaling-scale_channel"
    assert list(method["parts"]) == ["layer_scaling", "scale_channel"], (
        "the first is the outermost"
    )
    scaling, channel = method["parts"].values()
    assert (channel["channel"], channel["factor"], channel["last"]) == (15, 0.5, 1)
    assert (scaling["points"][0], scaling["curve"], scaling["scales"]) == (
        [0.0, 1.0],
        "linear",
        None,
    )
    assert made.overrides == (
        "model=tiny",
        "method=[layer_scaling, scale_channel]",
        *typed,
    )


def test_references_are_resolved_against_the_model() -> None:
    made = compose_one("model=tiny", "task.seed=${model.scale_channel.channel}")
    assert made.raw["task"]["seed"] == 15
    with refused("task.seed", "???", hint=("task.seed=...", "model.nothing")):
        compose_one("task.seed=${model.nothing}")


# Sweeps


def test_an_experiments_grid_is_swept_unless_the_user_types_the_key() -> None:
    jobs = _jobs("experiment=yu2025_fig6", "task.pairs=8")
    values = yaml.safe_load(paths.find_choice("experiment", "yu2025_fig6").read_text())[
        "experiment"
    ]["grid"]
    assert [job.raw["method"]["factor"] for job in jobs] == values["method.factor"]
    assert all(job.multirun and job.raw["task"]["pairs"] == 8 for job in jobs)
    assert [job.number for job in jobs] == list(range(len(jobs)))
    assert jobs[0].typed == ("task.pairs", "method.factor")
    assert jobs[1].overrides == ("task.pairs=8", "method.factor=1.5")
    (one,) = _jobs("experiment=yu2025_fig6", "method.factor=3")
    assert one.raw["method"]["factor"] == 3 and not one.multirun
    other = _jobs("experiment=yu2025_fig6", "-m", "method.factor=3,4")
    assert [job.raw["method"]["factor"] for job in other] == [3, 4]


@pytest.mark.parametrize(
    ("typed", "stages"),
    [
        ("evaluate", ["evaluate"]),
        ("evaluate,report", ["evaluate", "report"]),
        ("[evaluate,report]", ["evaluate", "report"]),
        ("null", None),
    ],
)
def test_stages_need_no_brackets_in_a_sweep_either(
    typed: str, stages: list[str] | None
) -> None:
    assert compose_one(f"stages={typed}").raw["stages"] == stages
    found = _jobs("-m", "method.factor=0,1", f"stages={typed}")
    assert [job.raw["stages"] for job in found] == [stages, stages]


def test_lists_stand_among_the_values_of_a_sweep() -> None:
    jobs = _jobs(
        "-m",
        "method=none,[layer_scaling, scale_channel]",
        "task.positions=[0],[1,2]",
        "model=tiny",
    )
    shown = [(job.raw["method"]["name"], job.raw["task"]["positions"]) for job in jobs]
    assert shown == [
        (m, p) for m in ("none", "layer_scaling-scale_channel") for p in ([0], [1, 2])
    ]


def test_a_job_that_cannot_be_composed_does_not_stop_the_others() -> None:
    jobs = compose(["-m", "task.pairs=9", "task.seed=1,${model.nothing},3"])
    seeds = {job.number: job.raw["task"]["seed"] for job in jobs.composed}
    assert seeds == {0: 1, 2: 3}
    ((number, record),) = jobs.refused.items()
    assert number == 1 and record["status"] == 2 and "task.seed" in record["error"]
    # Its overrides are spelled as those of the others.
    spelled = [job.overrides[0] for job in jobs.composed]
    assert [*spelled, record["overrides"][0]] == ["task.pairs=9"] * 3


def test_nothing_outlives_composing() -> None:
    before = sys.argv, dict(os.environ), Path.cwd()
    compose_one("model=tiny")
    with refused("model", "nope", allowed="tiny"):
        compose_one("model=nope")
    with refused("task.seed", "???", hint="model.nothing"):
        compose_one("task.seed=${model.nothing}")
    assert (sys.argv, dict(os.environ), Path.cwd()) == before


# A folder of the user


def test_a_users_folder_adds_choices(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (str(own), own.name):
        monkeypatch.chdir(own.parent)
        (made,) = _jobs(
            "--config-dir", folder, "model=mine", "method=[twice,scale_channel]"
        )
        assert (made.raw["model"]["name"], made.raw["task"]["pairs"]) == ("mine", 7)
        parts = made.raw["method"]["parts"]
        assert list(parts) == ["twice", "scale_channel"]
        assert parts["twice"]["channel"] == [1, 2] and parts["twice"]["last"] == 1
    (made,) = _jobs(
        "--config-dir",
        str(own),
        "experiment=yu2025_fig6",
        "model=mine",
        "method.factor=1",
    )
    assert (made.raw["model"]["name"], made.raw["experiment"]["name"]) == (
        "mine",
        "yu2025_fig6",
    )


# Mistakes


@pytest.mark.parametrize(
    ("overrides", "field", "value", "allowed", "hint"),
    [
        (["modle=tiny"], "modle", "tiny", ("model", "task", "method"), "model"),
        (["+foo.bar=1"], "foo.bar", "1", "model", "remove"),
        (["model=mistral"], "model", "mistral", "llama2_7b", "mistral7b"),
        (["study=crop"], "study", "crop", "crop_mask", "crop_mask"),
        (["search=x"], "search", "x", "channel", "posbench ls searches"),
        (
            ["method=[layer_scaling,scale_chanel]"],
            "method",
            "[layer_scaling,scale_chanel]",
            ("different", "scale_channel"),
            "scale_channel",
        ),
        (
            ["method=[scale_channel,scale_channel]"],
            "method",
            "[scale_channel,scale_channel]",
            "different",
            (),
        ),
        (["method=[]"], "method", "[]", "different", "posbench ls methods"),
        (
            ["experiment=yu2025_fig66"],
            "experiment",
            "yu2025_fig66",
            "yu2025_fig6",
            "yu2025_fig6",
        ),
        (
            ["experiment=yu2025_fig6", "experiment.grid={method.factor: [1]}"],
            "experiment.grid",
            "{method.factor: [1]}",
            "file",
            "method.factor=1",
        ),
        (
            ["experiment=yu2025_fig6", "+experiment.grid.task=[1,2]"],
            "experiment.grid.task",
            "[1,2]",
            "file",
            "method.factor=1",
        ),
        (
            ["experiment=yu2025_fig6", "~experiment.grid"],
            "experiment.grid",
            "",
            "file",
            "method.factor=1",
        ),
        (
            ["experiment=yu2025_fig6", "experiment.minutes=2"],
            "experiment.minutes",
            "2",
            "file",
            "leave it out",
        ),
        (
            ["experiment=yu2025_fig6", "experiment=yu2025_fig7"],
            "experiment",
            "yu2025_fig6 yu2025_fig7",
            "one",
            "experiment=yu2025_fig6",
        ),
        (["~study", "study=causal_mask"], "study", "causal_mask", "~study", "~study"),
        (["task.limit=2", "~task"], "task.limit", "2", "~task", "leave ~task"),
        (["+hydra.foo=3"], "hydra.foo", "3", ("launcher", "sweeper"), "leave it out"),
        (["+hydra/lancher=3"], "hydra/lancher", "3", "launcher", "launcher"),
        (["+hydra.job.nam=3"], "hydra.job.nam", "3", ("name", "chdir"), "name"),
        (["model=tiny,hf"], "model", "tiny,hf", "[a,b]", ("-m", "--multirun")),
        (
            ["task.pairs=[1"],
            "task.pairs",
            "task.pairs=[1",
            "key=value",
            ("brackets", "quotes"),
        ),
        (["model=tiny", "model==tiny"], "model", "model==tiny", "key=value", "quotes"),
        (
            ["+model.longbensh.max_prompt_tokens=1"],
            "model.longbensh",
            "a block",
            ("method", "task"),
            "longbench",
        ),
        (
            ["model=tiny", "task._target_=posbench.tasks.Nothing"],
            "task._target_",
            "posbench.tasks.Nothing",
            "class",
            "Nothing",
        ),
    ],
    ids=lambda case: case[-1] if isinstance(case, list) else None,
)
def test_what_names_nothing_is_refused(
    overrides: list[str], field: str, value: str, allowed: Tokens, hint: Tokens
) -> None:
    with refused(field, value, allowed=allowed, hint=hint) as caught:
        compose_one(*overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("args", "field", "value", "allowed", "hint"),
    [
        (["--nonsense"], "flag", "--nonsense", "key=value", "posbench --help"),
        (["-m", "--info"], "flag", "--info", ("-m", "--config-dir"), ()),
        (["--config-dir"], "--config-dir", "", "folder", "--config-dir DIR"),
        (["--config-dir", "/nowhere"], "--config-dir", "/nowhere", "folder", "path"),
        (
            ["--config-dir=/first", "--config-dir", "/second"],
            "--config-dir",
            "/second",
            "once",
            ("/first", "/second"),
        ),
    ],
)
def test_flags_that_are_none(
    args: list[str], field: str, value: str, allowed: Tokens, hint: Tokens
) -> None:
    with refused(field, value, allowed=allowed, hint=hint):
        _jobs(*args)


@pytest.mark.parametrize("module", ["yu2025.py", "yu2025/__init__.py"])
def test_a_module_of_a_papers_name_is_refused(module: str, tmp_path: Path) -> None:
    file = tmp_path / module
    file.parent.mkdir(exist_ok=True)
    file.touch()
    path = tmp_path / module.partition("/")[0]
    with refused("--config-dir", str(path), allowed="yu2025", hint="rename"):
        _jobs("--config-dir", str(tmp_path), "model=tiny")


def test_a_papers_folder_may_be_named_and_changes_nothing() -> None:
    paper = next(folder for folder in paths.PAPERS if folder.name == "yu2025")
    args = ["study=doubling", "model=tiny"]
    (named,) = _jobs("--config-dir", str(paper), *args)
    (unnamed,) = _jobs(*args)
    assert named == unnamed


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("base", "base"),
        ("yu2025_fig6", "yu2025_fig6"),
        ({"experiment": "base"}, "base"),
    ],
)
def test_an_experiment_that_extends_another_is_refused(
    entry: Any, named: str, own: Path
) -> None:
    experiment = {"name": "base", "title": "-", "grid": {"method.factor": [1, 0]}}
    files = {
        "base": {"defaults": ["config", "_self_"], "experiment": experiment},
        "child": {"defaults": [entry, "_self_"], "task": {"limit": 2}},
    }
    (own / "experiment").mkdir()
    for name, data in files.items():
        (own / f"experiment/{name}.yaml").write_text(yaml.safe_dump(data))
    flag = f"--config-dir={own}"
    assert len(_jobs(flag, "experiment=base")) == 2
    field = f"{own}/experiment/child.yaml: defaults"
    with refused(field, named, allowed="config", hint=(named, "child.yaml")):
        _jobs(flag, "experiment=child")


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_file_of_another_encoding_is_named(own: Path, encoding: str) -> None:
    text = "# caf\u00e9\ndefaults: [tiny]\n"
    file = own / "model" / "mine.yaml"
    file.write_bytes(text.encode(encoding))
    with refused("mine.yaml", str(file), allowed="UTF-8", hint="as UTF-8"):
        _jobs("--config-dir", str(own), "model=mine")
    file.write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    (job,) = _jobs("--config-dir", str(own), "model=mine")
    assert job.raw["model"]["path"]


def test_a_broken_file_of_the_user_is_named(own: Path) -> None:
    (own / "model" / "mine.yaml").write_text("path: [x\n")
    with refused("config file", str(own), allowed="YAML", hint="line 1"):
        _jobs("--config-dir", str(own), "model=mine")


@pytest.mark.parametrize(
    "args",
    few(
        [
            ["model=tiny_b", "task.pairs=16", "++method.factor=0"],
            [
                "-m",
                "method.factor=1,0",
                "model=tiny,tiny_b",
                "stages=[evaluate],[search]",
            ],
            [
                "method=[layer_scaling,scale_channel]",
                "method.parts.scale_channel.factor=0.5",
            ],
            ["experiment=yu2025_table1_kv", "model=tiny"],
            ["experiment=lpes_table15", "task.seed=1"],
            [
                "-m",
                "model.base_url=http://127.0.0.1:9/v1",
                "model.extra_body={top_k:1},{top_k:5}",
                "model.extra_body={seed:7}",
            ],
        ],
        3,
    ),
)
def test_jobs_are_those_that_hydra_main_makes(args: list[str], tmp_path: Path) -> None:
    """A key of Hydra's own config leaves the jobs to ``hydra.main``, which splits and composes them itself."""
    jobs = compose(args)
    args = [*args, f"runtime.outputs={tmp_path}", "hydra.verbose=false"]
    left_to_hydra = compose(args)
    assert left_to_hydra.run_by_hydra and not jobs.run_by_hydra
    made: list[ComposedConfig] = []

    def run(job: ComposedConfig) -> Record:
        made.append(job)
        return new_record(job.overrides, job.multirun)

    records = launch(args, left_to_hydra, run)
    assert made == left_to_hydra.composed
    assert [record["overrides"] for record in records] == [
        list(job.overrides) for job in made
    ]
    assert not [*tmp_path.iterdir()], "nothing stays of a sweep that went well"
    for job in made:
        job.raw["runtime"]["outputs"] = "outputs"
    assert [job.raw for job in made] == [job.raw for job in jobs.composed]
    assert [job.number for job in jobs.composed] == list(range(len(made)))


def test_a_sweep_of_hydras_own(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / "here").mkdir()
    monkeypatch.chdir(own / "here")
    text = {
        "defaults": ["config", "_self_"],
        "experiment": {"name": "swept", "title": "x"},
    }
    text["hydra"] = {"mode": "MULTIRUN", "sweeper": {"params": {"++task.pairs": "4,5"}}}
    (own / "experiment").mkdir()
    (own / "experiment/swept.yaml").write_text(yaml.safe_dump(text))
    jobs = _jobs("--config-dir", str(own), "experiment=swept")
    assert [(job.raw["task"]["pairs"], job.multirun) for job in jobs] == [
        (4, True),
        (5, True),
    ]
    assert not [*Path().iterdir()], "Hydra writes nothing here"


SERVER = "model.base_url=http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("overrides", "alternatives"),
    [
        ([["{top_k:1}"], ["{seed:7}"]], 1),
        ([["{top_k:1}", "{top_k:5}"], ["{seed:7}", "{seed:8}"]], 4),
        ([["{a:{x:1,y:2}}"], ["{a:{y:3,z:'p q'}}", "{a:{y:4}}"]], 2),
        ([["{top_k:1}", "{top_k:5}"], ["{top_k:9}"]], 1),
        ([["{top_k:1}", "null"], ["{seed:7}"]], 2),
        ([["{top_k:1}"], ["null"]], 1),
    ],
)
def test_a_mapping_given_twice_is_merged_in_a_sweep_as_in_a_run(
    overrides: list[list[str]], alternatives: int
) -> None:
    key = "model.extra_body"
    typed = [f"{key}={','.join(values)}" for values in overrides]
    swept = [
        (job.raw["task"]["limit"], job.raw["model"]["extra_body"])
        for job in _jobs("-m", SERVER, *typed, "task.limit=2,3")
    ]
    alone = [
        compose_one(SERVER, *(f"{key}={value}" for value in values))
        for values in itertools.product(*overrides)
    ]
    bodies = [job.raw["model"]["extra_body"] for job in alone]
    expected = {json.dumps(body, sort_keys=True) for body in bodies}
    assert len(expected) == alternatives and len(swept) == 2 * alternatives
    for limit in (2, 3):
        got = {json.dumps(b, sort_keys=True) for each, b in swept if each == limit}
        assert got == expected


def test_a_key_inside_a_mapping_keeps_its_place_among_the_mappings() -> None:
    key = "model.extra_body"
    for typed in (
        [f"{key}={{x:1,y:1}}", f"{key}.x=2", f"{key}={{y:3}}"],
        [f"{key}={{x:1,y:1}}", f"{key}.x=2", f"{key}={{x:3}}"],
        [f"{key}={{x:1}}", f"{key}={{y:2}}", f"{key}.y=5"],
    ):
        alone = compose_one(SERVER, *typed).raw["model"]["extra_body"]
        for job in _jobs("-m", SERVER, *typed, "task.limit=2,3"):
            assert job.raw["model"]["extra_body"] == alone


def test_a_value_given_twice_is_the_last_one_in_a_sweep_as_in_a_run() -> None:
    jobs = _jobs("-m", "task.limit=2,3", "task.limit=5", "task.seed=1,2")
    assert [job.raw["task"]["limit"] for job in jobs] == [5, 5]


def test_no_items_is_a_fault_of_the_number_and_not_of_the_positions(
    posbench: Callable[..., Result],
) -> None:
    for given in (["task.pairs=0"], ["task.pairs=0", "task.positions=[0,1]"]):
        assert_refused(posbench(*given).err, "task.pairs", 0, hint="task.pairs=2")
