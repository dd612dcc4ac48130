"""Every YAML composes, YAML and code name the same keys, and each mistake is told in words."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_class
from omegaconf import DictConfig

from posbench import paths
from posbench.errors import UserError, choices
from posbench.methods import ScaleChannel, Unmodified
from posbench.model import load as checkpoint
from posbench.model.load import ModelConfig
from posbench.pipeline import config as configs
from posbench.pipeline.config import Runtime, check, plain
from posbench.schema import build
from posbench.search import ChannelSearch, GeneticSearch
from posbench.tasks import KVRetrieval

GROUPS = ("model", "task", "method", "search", "runtime")
CONSTANTS = ["method.channel=3", "method.factor=0.5", "method.layers=[1,2]"]
GIVEN = {"scale_channel": CONSTANTS, "layer_scaling": ["method.points=[[0,1.5]]", "method.scales=null"]}
"""Parameters without a default, by method."""


def _composed(*overrides: str) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(paths.CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def _checked(*overrides: str) -> configs.Config:
    return check(plain(_composed(*overrides)), [o.split("=", 1)[0].lstrip("+~") for o in overrides])


@pytest.mark.parametrize("model", choices(paths.CONF / "model"))
def test_every_combination_composes(model: str) -> None:
    path = ["model.path=."] if model == "hf" else []
    tasks, methods, searches = (choices(paths.CONF / group) for group in ("task", "method", "search"))
    # Tasks do not depend on methods and searches, nor these on the model; few models bring something of their
    # own for a task.
    own = tasks if model in ("tiny", "hf", "vicuna_7b") else ["kv_retrieval", "longbench"]
    triples = [(task, "scale_channel", "channel") for task in own]
    if model == "tiny":
        triples += [("kv_retrieval", method, "channel") for method in methods]
        triples += [("kv_retrieval", "scale_channel", search) for search in searches]
    for task, method, search in triples:
        names = [
            f"model={model}",
            f"task={task}",
            f"method={method}",
            f"search={search}",
            "stages=[evaluate]",
        ]
        raw = plain(_composed(*names, *path, *GIVEN.get(method, [])))
        checked = check(raw)
        assert checked.raw["model"] == raw["model"] and checked.model.name == model
        assert checked.method_name == method and checked.task.name == task


@pytest.mark.parametrize("study", choices(paths.CONF / "study"))
def test_every_study_composes(study: str) -> None:
    assert _checked(f"study={study}").study_name == study


@pytest.mark.parametrize("name", choices(paths.EXPERIMENTS))
def test_every_experiment_composes_at_both_ends_of_its_sweep(name: str) -> None:
    sweep = (
        yaml.safe_load((paths.EXPERIMENTS / f"{name}.yaml").read_text())
        .get("hydra", {})
        .get("sweeper", {})
        .get("params", {})
    )
    parsed = OverridesParser.create().parse_overrides([f"{key}={values}" for key, values in sweep.items()])
    for end in (0, -1):
        point = [
            f"{o.key_or_group}={list(o.sweep_string_iterator())[end]}"
            for o in parsed
            if o.is_sweep_override()
        ]
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(paths.EXPERIMENTS), version_base="1.3"):
            raw = plain(compose(name, overrides=[*point, f"hydra.searchpath=[file://{paths.CONF}]"]))
        checked = check(raw, [o.split("=", 1)[0] for o in point])
        assert checked.experiment is not None and checked.experiment.name == name


@pytest.mark.parametrize(
    ("cls", "group"),
    [
        (ModelConfig, "model"),
        (ScaleChannel, "method"),
        (ChannelSearch, "search"),
        (GeneticSearch, "search"),
        (Runtime, "runtime"),
    ],
)
def test_yaml_and_dataclass_name_the_same_keys(cls: type[Any], group: str) -> None:
    """Each key is known to the class; each field without a place in any YAML would be a switch that nobody
    finds."""
    known = {f.name for f in fields(cls)}
    named: set[str] = set()
    for name in choices(paths.CONF / group):
        keys = yaml.safe_load((paths.CONF / group / f"{name}.yaml").read_text())
        inherited = (
            yaml.safe_load((paths.CONF / group / f"{keys['defaults'][0]}.yaml").read_text())
            if "defaults" in keys
            else keys
        )
        if group in ("method", "search") and get_class(inherited["_target_"]) is not cls:
            continue
        # A model's file also holds blocks of constants for methods that its class does not name.
        blocks = {
            key
            for key, value in keys.items()
            if group == "model" and isinstance(value, dict) and key not in known
        }
        assert blocks <= set(choices(paths.CONF / "method")), name
        keys = set(keys) - blocks - {"_target_", "defaults"} - ({"name"} if group == "method" else set())
        assert keys <= known, name
        named |= keys
    assert named == known - {"blocks"}, "blocks gathers the model's blocks for further methods"


@pytest.mark.parametrize("name", choices(paths.CONF / "task"))
def test_a_tasks_yaml_names_every_field_of_its_class(name: str) -> None:
    data = yaml.safe_load((paths.CONF / "task" / f"{name}.yaml").read_text())
    assert set(data) - {"_target_"} == {f.name for f in fields(get_class(data["_target_"]))}
    assert data["name"] == name


def test_the_defaults_of_the_yaml_are_those_of_the_class() -> None:
    """The task and the search without a model's own values: the paper's settings, once in YAML and once in
    Python."""
    composed = plain(_composed("model=mistral7b"))
    for group, cls in (("task", KVRetrieval), ("search", ChannelSearch)):
        values = {k: v for k, v in composed[group].items() if k != "_target_"}
        assert build(cls, values, group) == cls()


def test_models_bring_defaults_and_typed_values_win() -> None:
    tiny = _checked("model=tiny").task
    assert isinstance(tiny, KVRetrieval) and (tiny.pairs, tiny.prompt, tiny.records) == (
        32,
        "compact",
        "words",
    )
    typed = _checked("model=tiny", "task.pairs=16", "search.strings=9")
    assert isinstance(typed.task, KVRetrieval) and typed.task.pairs == 16 and typed.search.strings == 9
    mistral = _checked("model=mistral7b")
    assert mistral.method() == ScaleChannel(channel=213, factor=0.0, layers=(10, 25))
    assert mistral.stages == ("intervene", "evaluate", "report")


def test_what_is_typed_wins_over_what_is_found() -> None:
    found = {"channel": 5, "factor": 0.0, "layers": [1, 3]}
    assert _checked("model=tiny").method(found) == ScaleChannel(channel=5, factor=0.0, layers=(1, 3))
    pinned = _checked("model=tiny", "method.factor=-1")
    assert pinned.pinned == {"factor"}
    assert pinned.method(found) == ScaleChannel(channel=5, factor=-1.0, layers=(1, 3))
    # Published constants give way to a search, typed ones do not.
    searched = _checked("model=mistral7b", "stages=[search,evaluate]", "method.channel=7")
    assert searched.method(found) == ScaleChannel(channel=7, factor=0.0, layers=(1, 3))


def test_a_method_without_constants_names_the_command_that_finds_them() -> None:
    command = r"posbench stages=\[search\] model=hf model.path=\. method=scale_channel"
    with pytest.raises(UserError, match=r"method.channel = None.*" + command):
        _checked("model=hf", "model.path=.")
    assert _checked("model=hf", "model.path=.", "stages=[search]").trial() == ScaleChannel(
        channel=0, factor=1.0, layers=(0, 0)
    )


def test_a_default_search_stage_is_left_out_where_the_method_has_none() -> None:
    checked = _checked("model=tiny", "method=none")
    assert checked.stages == ("intervene", "evaluate", "report") and checked.method() == Unmodified()
    with pytest.raises(UserError, match="no search for method none"):
        _checked("model=tiny", "method=none", "stages=[search,evaluate]")


@dataclass(frozen=True)
class _Sample:
    """One field of each kind."""

    count: int = 0
    share: float = 0.0
    kind: Literal["a", "b"] = "a"
    pair: tuple[int, int] | None = None
    many: tuple[float, ...] = ()
    flag: bool = False
    facts: dict[str, int] | None = None


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"count": "x"}, "where.count = 'x': allowed: a whole number"),
        ({"count": 1.5}, "where.count = 1.5: allowed: a whole number"),
        ({"count": True}, "where.count = True: allowed: a whole number"),
        ({"share": float("nan")}, "where.share = nan: allowed: a finite number"),
        ({"share": "inf"}, "where.share = 'inf': allowed: a finite number"),
        ({"many": [1.0, float("inf")]}, "where.many = [1.0, inf]: allowed: a list [...] of: a finite number"),
        ({"kind": "c"}, "where.kind = 'c': allowed: a | b"),
        (
            {"pair": [1]},
            "where.pair = [1]: allowed: a list of exactly 2: [a whole number, a whole number], or null",
        ),
        ({"facts": 3}, "where.facts = 3: allowed: a mapping, or null"),
        ({"flag": "perhaps"}, "where.flag = 'perhaps': allowed: true or false"),
        (
            {"cuont": 3},
            "where.cuont = 3: allowed: keys count, share, kind, pair, many, flag, facts; next: did you mean where.count?",
        ),
    ],
)
def test_mistakes_in_words(data: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        build(_Sample, data, "where")
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(UserError, match=r"method\.factor = None: allowed: a finite number"):
        build(ScaleChannel, {"channel": 1, "layers": [0, 1]}, "method")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"modle": 1}, "modle = 1"),
        ({"model": None}, "model = None"),
        (
            {"method": {"_target_": "posbench.methods.Nothing"}},
            "method._target_ = 'posbench.methods.Nothing'",
        ),
        (
            {"method": {"_target_": "posbench.tasks.KVRetrieval"}},
            "a subclass of posbench.methods.base.Method",
        ),
        ({"task": {}}, "task._target_ = None"),
        ({"stages": "search"}, "stages = 'search'"),
        ({"stages": None}, "stages = None"),
    ],
)
def test_a_config_that_hydra_did_not_make(raw: dict[str, Any], words: str) -> None:
    good = plain(_composed("model=mistral7b"))
    with pytest.raises(UserError) as caught:
        check(good | raw)
    assert words in str(caught.value)


def test_model_config_outside_a_run() -> None:
    assert checkpoint.model_config("mistral7b", dtype="float32").dtype == "float32"
    with pytest.raises(UserError, match=r"model\.dtype = 'int8'"):
        checkpoint.model_config("mistral7b", dtype="int8")
