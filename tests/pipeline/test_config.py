"""Every choice and experiment composes and checks, YAML holds only what differs, mistakes are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml

from posbench import paths
from posbench.errors import UserError, choices
from posbench.methods import ScaleChannel, Unmodified
from posbench.methods import choice as choice_module
from posbench.methods.choice import MethodChoice
from posbench.model.load import model_config
from posbench.pipeline.compose import compose, compose_one
from posbench.pipeline.config import check_config, needs
from posbench.schema import default_values, required_fields, resolve_target
from posbench.search.channel import ChannelSearch
from posbench.tasks import KVRetrieval
from tests.conftest import Result, config_of
from tests.messages import Tokens, refused

NO_OUTPUTS = "runtime.outputs=nowhere"
"""Runs of whoever develops here could hold constants, which messages would name."""


def _all(*args: str) -> dict[str, Any]:
    """The checked configs of a sweep, by its overrides."""
    return {
        " ".join(job.overrides): check_config(job) for job in compose(args).composed
    }


@pytest.mark.parametrize("group", ["task", "search", "runtime"])
def test_every_choice_composes_and_checks(group: str) -> None:
    names = [
        name
        for name in choices(*paths.group_folders(group))
        if name not in ("own_data", "retrieval_log")
    ]  # nothing without a file
    found = _all("-m", f"{group}={','.join(names)}", "model=tiny", "stages=[evaluate]")
    assert len(found) == len(names)
    if group == "task":
        assert [config.task.name for config in found.values()] == names


def test_every_method_composes_and_checks() -> None:
    """Each one whose constants the model has; of the others, the first that is missing is named."""
    names = choices(paths.CONF / "method")
    jobs = compose(["-m", f"method={','.join(names)}", "model=tiny"])
    found = {
        job.raw["method"]["name"]: MethodChoice.of(job.raw["method"], ())
        for job in jobs.composed
    }
    assert list(found) == names
    for choice in found.values():
        missing = [
            key for key in required_fields(choice.cls) if choice.values[key] is None
        ]
        if missing:
            with pytest.raises(
                UserError, match=rf"method\.({'|'.join(missing)}) = None"
            ):
                choice.build()
        else:
            assert type(choice.build()) is choice.cls


def test_every_model_composes_and_checks() -> None:
    folder = paths.CONF / "model"
    # One that leaves a value to the user (???) is no model by itself.
    names = [
        n for n in choices(folder) if "???" not in (folder / f"{n}.yaml").read_text()
    ]
    found = _all(
        "-m",
        f"model={','.join(names)}",
        "model.path=posbench://tiny",
        "stages=[search]",
    )
    # A checkpoint that no YAML describes is called by its path.
    assert [config.model.name for config in found.values()] == [
        "tiny" if name == "hf" else name for name in names
    ]


@pytest.mark.parametrize("name", choices(paths.CONF / "model"))
def test_the_blocks_of_a_model_name_fields(name: str) -> None:
    for block, values in model_config(name, path=".").blocks.items():
        (file,) = (
            f for folder in paths.BUILT_IN for f in folder.glob(f"*/{block}.yaml")
        )
        cls, _ = resolve_target(yaml.safe_load(file.read_text()), object, block)
        assert set(values) <= {*default_values(cls), "source"}, block


@pytest.mark.parametrize("study", choices(*paths.group_folders("study")))
def test_every_study_composes_and_checks(study: str) -> None:
    assert config_of(f"study={study}").study_name == study


@pytest.mark.parametrize("name", choices(*paths.group_folders("experiment")))
def test_every_experiment_composes_at_both_ends_of_its_grid(name: str) -> None:
    grid = (
        (
            yaml.safe_load(paths.find_choice("experiment", name).read_text())[
                "experiment"
            ]
        ).get("grid")
        or {}
    )
    for end in (0, -1) if grid else (0,):
        spelled = {key: values[end] for key, values in grid.items()}
        texts = {
            k: v if isinstance(v, str) else json.dumps(v).replace('"', "")
            for k, v in spelled.items()
        }
        point = [f"{key}={text}" for key, text in texts.items()]
        config = config_of(f"experiment={name}", *point)
        assert config.experiment is not None and config.experiment.name == name


@pytest.mark.parametrize("group", ["task", "method", "search", "study"])
def test_a_file_holds_only_what_differs_from_the_defaults(group: str) -> None:
    for name in choices(*paths.group_folders(group)):
        data = yaml.safe_load(paths.find_choice(group, name).read_text())
        base = next(
            (
                b
                for b in data.get("defaults", [])
                if b in choices(*paths.group_folders(group))
            ),
            name,
        )
        named = yaml.safe_load(paths.find_choice(group, base).read_text())
        own = default_values(resolve_target(named, object, group)[0])
        for key in set(data) - {"_target_", "defaults"}:
            assert key in own and data[key] != own[key], f"{group}/{name}.yaml: {key}"


def test_without_a_models_own_values_the_settings_are_the_papers() -> None:
    config = config_of("model=mistral7b")
    assert config.task == KVRetrieval() and config.search == ChannelSearch()
    assert config.choice.build() == ScaleChannel(
        channel=213, factor=0.0, layers=(10, 25)
    )
    assert config.stages == ("intervene", "evaluate", "report")


def test_what_is_typed_wins_over_what_is_found() -> None:
    found = {"channel": 5, "factor": 0.0, "layers": [1, 3]}

    def built(*overrides: str) -> Any:
        config = config_of(*overrides)
        return config.choice.build(found, config.target)

    assert built("model=tiny") == ScaleChannel(channel=5, factor=0.0, layers=(1, 3))
    assert built("model=tiny", "method.factor=-1") == ScaleChannel(
        channel=5, factor=-1.0, layers=(1, 3)
    )
    # Published constants give way to a search, typed ones do not.
    searched = built("model=mistral7b", "stages=[search,evaluate]", "method.channel=7")
    assert searched == ScaleChannel(channel=7, factor=0.0, layers=(1, 3))


@pytest.mark.parametrize("typed", ["search=bases", "search.held_back=12"])
def test_a_search_that_is_typed_is_made_whatever_constants_are_known(
    typed: str,
) -> None:
    """Also under a model whose file asks for none, and not where it serves no part of the method."""
    known = ("model=tiny", "model.stages=[intervene,evaluate,report]")
    base = (*known, "method=rope_base", "search=bases")
    assert "search" not in config_of(*known, "method=scale_channel").stages
    assert config_of(*base, typed).stages[:2] == ("search", "intervene")
    assert config_of(*base, typed, "stages=[evaluate]").stages == ("evaluate",)
    assert "search" not in config_of(*known, "method=ms_poe", "search.strings=9").stages


def test_a_method_without_constants_is_searched_first_unless_stages_are_typed() -> None:
    model = "model.path=posbench://tiny"
    alone = config_of("model=hf", model)
    assert alone.stages == ("search", "intervene", "evaluate", "report")
    assert alone.method_under_test().trial() == ScaleChannel(
        channel=0, factor=1.0, layers=(0, 0)
    )
    scales = config_of("model=hf", model, "method=layer_scaling", "search=genetic")
    assert (
        scales.stages[0] == "search"
        and "search" not in config_of("model=hf", model, "method=none").stages
    )
    given = [f"method.{name}" for name in ("channel=3", "factor=0", "layers=[1,2]")]
    assert config_of("model=hf", model, *given).stages == (
        "intervene",
        "evaluate",
        "report",
    )
    hint = ("stages=[search]", "model=posbench://tiny", "method=scale_channel")
    with refused("method.channel", None, allowed="scale_channel", hint=hint):
        config_of("model=hf", model, "stages=[evaluate]", NO_OUTPUTS)
    # A task without calibration questions has nothing to search on: the model alone is measured.
    assert config_of("model=hf", model, "task=mmlu").choice.build() == Unmodified()
    with refused("method.channel", None, allowed="scale_channel", hint=hint):
        config_of("model=hf", model, "task=mmlu", "method=scale_channel", NO_OUTPUTS)
    assert config_of("model=tiny", "task=mmlu").stages == (
        "intervene",
        "evaluate",
        "report",
    )


def test_a_default_search_stage_is_left_out_where_the_method_has_none() -> None:
    config = config_of("model=tiny", "method=none")
    assert (
        config.stages == ("intervene", "evaluate", "report")
        and config.choice.build() == Unmodified()
    )
    with refused(
        "stages",
        ["search", "evaluate"],
        allowed=("none", "channel"),
        hint=("method=scale_channel", "posbench ls searches"),
    ):
        config_of("model=tiny", "method=none", "stages=[search,evaluate]")


@pytest.mark.parametrize(
    ("overrides", "groups"),
    [
        ([], "model task method search runtime"),
        (["stages=[evaluate]"], "model task method runtime"),
        (["study=crop_mask"], "model task method runtime study"),
        (
            ["study=crop_mask", "stages=[study,evaluate]"],
            "model task method runtime study",
        ),
        (["study=masks"], "runtime study"),
        (
            ["experiment=yu2025_fig6", "method.factor=1", "stages=[evaluate]"],
            "model task method runtime experiment",
        ),
    ],
)
def test_the_record_holds_the_groups_that_took_part(
    overrides: list[str], groups: str
) -> None:
    config = config_of(*overrides)
    assert set(config.raw) - {"stages", "typed"} == set(groups.split())
    assert config.raw["stages"] == list(config.stages)
    assert config.raw["typed"] == (
        ["method.factor"] if "method.factor=1" in overrides else []
    )


def test_a_method_is_made_once(
    posbench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the check of the config to the rows; other parameters are another method."""
    made: list[dict[str, Any]] = []
    build = choice_module.build

    def counted(cls: Any, values: dict[str, Any], where: str) -> Any:
        made.append(values)
        return build(cls, values, where)

    monkeypatch.setattr(choice_module, "build", counted)
    args = ["method.channel=3", "method.factor=0", "method.layers=[1,2]"]
    small = ["task.limit=2", "task.positions=[0]", "stages=[evaluate]"]
    assert posbench(*args, *small).status == 0
    assert [values["channel"] for values in made] == [3]
    values = {"channel": 3, "factor": None, "layers": [1, 2], "last": 1}
    free = MethodChoice(name="free", cls=ScaleChannel, values=values)
    half = free.build({"factor": 0.5})
    assert half is free.build({"factor": 0.5})
    assert half != free.build({"factor": 0.0})


def test_text_that_no_file_can_hold_is_refused_wherever_it_stands() -> None:
    composed = compose_one("experiment=lpes_table3")
    good = composed.raw["experiment"]
    for key, value in (
        ("source", "a\udc80b"),
        ("models", {"LLaMA-2-7B-chat": "a\udc80b"}),
    ):
        reference = {**good["reference"], key: value}
        field = f"experiment.reference.{key}"
        if isinstance(value, dict):
            field += ".LLaMA-2-7B-chat"
        with refused(field, "a\udc80b", allowed="UTF-8"):
            experiment = {**good, "reference": reference}
            check_config(
                replace(composed, raw={**composed.raw, "experiment": experiment})
            )


def test_all_mistakes_are_told_together() -> None:
    with pytest.raises(UserError) as caught:
        config_of(
            "task.pairs=1",
            "search.strings=0",
            "search.window=x",
            "runtime.batch_size=0",
            "model.dtype=int8",
        )
    fields = [fault.field for fault in caught.value.faults]
    wanted = [
        "task.pairs",
        "search.strings",
        "search.window",
        "model.dtype",
        "runtime.batch_size",
    ]
    assert sorted(fields) == sorted(wanted)
    assert all(
        "\n" not in str(fault) and "; next: " in str(fault)
        for fault in caught.value.faults
    )


@pytest.mark.parametrize(
    ("raw", "field", "value", "allowed", "hint"),
    [
        ({"modle": 1}, "modle", 1, ("model", "task"), "remove"),
        ({"model": None}, "model", None, (), "posbench ls models"),
        ({"search": None}, "search", None, (), "posbench ls searches"),
        (
            {"method": {"_target_": "posbench.methods.Nothing"}},
            "method._target_",
            "posbench.methods.Nothing",
            "class",
            "conf/method/*.yaml",
        ),
        (
            {"method": {"_target_": "posbench.tasks.KVRetrieval"}},
            "method._target_",
            "posbench.tasks.KVRetrieval",
            "posbench.methods.base.Method",
            "CONTRIBUTING.md",
        ),
        ({"task": {}}, "task._target_", None, "class", "conf/task/*.yaml"),
        (
            {"stages": "search"},
            "stages",
            "search",
            ("list", "search", "study"),
            "stages=[search]",
        ),
        (
            {"stages": ["report", "evaluate"]},
            "stages",
            ["report", "evaluate"],
            "order",
            "stages=[evaluate,report]",
        ),
        ({"stages": ["study"]}, "study", None, "study", "posbench ls studies"),
    ],
)
def test_a_config_that_hydra_did_not_make(
    raw: dict[str, Any], field: str, value: object, allowed: Tokens, hint: Tokens
) -> None:
    good = compose_one("model=mistral7b")
    with refused(field, value, allowed=allowed, hint=hint):
        check_config(replace(good, raw=good.raw | raw))


def test_a_config_needs_its_checkpoint_and_the_files_of_its_task() -> None:
    found = needs(
        compose_one(
            "model=mistral7b", "task.path=/a.jsonl", "task.calibration_path=/b.jsonl"
        )
    )
    assert [source.id for source in found] == [
        "mistralai/Mistral-7B-Instruct-v0.2",
        "/a.jsonl",
        "/b.jsonl",
    ]


def test_a_model_config_outside_a_run() -> None:
    assert model_config("mistral7b", dtype="float32").dtype == "float32"
    with refused(
        "model.dtype", "int8", allowed=("float32", "bfloat16"), hint="model.dtype=auto"
    ):
        model_config("mistral7b", dtype="int8")
