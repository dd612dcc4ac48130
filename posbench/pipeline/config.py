"""From composed plain data to checked objects; all mistakes are told together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from posbench import paths
from posbench.errors import Faults, UserError, renamed
from posbench.files import sources
from posbench.files.sources import Source
from posbench.methods.choice import MethodChoice, every
from posbench.model import families
from posbench.model.load import ModelConfig, with_blocks
from posbench.pipeline.arguments import GIVEN, GROUPS, TOP
from posbench.run.method import MethodUnderTest
from posbench.run.runtime import Cluster, Runtime
from posbench.schema import Positive, build, instantiate
from posbench.search.base import Search
from posbench.stats.reference import Reference
from posbench.studies.base import Study
from posbench.tasks import Task
from posbench.tasks.base import EvaluationOnly

Stage = Literal["search", "study", "intervene", "evaluate", "report"]
STAGES: tuple[Stage, ...] = get_args(Stage)
NONE = {"_target_": "posbench.methods.unmodified.Unmodified", "name": "none"}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What turns a config into one table or figure of a paper."""

    name: str  # file name in ``experiments/``, and the folder under the outputs
    title: str  # what it shows, with paper, table or figure
    paper: Literal["", "yu2025", "lpes", "wu2025", "behind_rope"] = ""
    covers: tuple[
        str, ...
    ] = ()  # the paper's tables and figures that it regenerates, as ``Table 1``
    grid: dict[str, list[Any]] = field(
        default_factory=dict
    )  # swept unless the user types the key
    reference: Reference | None = None  # the paper's numbers
    claims: tuple[
        str, ...
    ] = ()  # what the paper reads off the figure, where it prints no numbers
    needs_weights: bool = False  # whether it says nothing without a real checkpoint
    minutes: Positive | None = None  # of one core that it takes as it stands, about


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run, checked; ``target``, ``raw`` and ``every`` are those of :class:`posbench.run.base.Run`."""

    model: ModelConfig
    task: Task
    choice: MethodChoice
    search: Search
    target: MethodChoice | None
    runtime: Runtime
    stages: tuple[Stage, ...]
    experiment: Experiment | None
    study: Study | None
    raw: dict[str, Any] = field(repr=False)
    typed: frozenset[str] = frozenset()  # dotted keys that the user set
    all_methods: Mapping[str, MethodChoice] = field(default_factory=dict)

    @property
    def study_name(self) -> str:
        """Name of the study; empty without one."""
        return str(self.raw["study"]["name"]) if self.study else ""

    @property
    def uses_model(self) -> bool:
        """Whether the run looks at a model at all; some studies do not."""
        measured = {"search", "intervene", "evaluate"} & set(self.stages)
        return self.study is None or self.study.needs_model or bool(measured)

    @property
    def uses_task(self) -> bool:
        """Whether the task's prompts take part."""
        return self.study is None or self.study.needs_task

    def method_under_test(self) -> MethodUnderTest:
        """Return the method under test, without the parameters that a search will find."""
        return MethodUnderTest(
            self.choice,
            self.target,
            stand_ins=self.search.finds if "search" in self.stages else {},
            hint=self._missing_parameter_hint(),
            blocks=self.model.blocks,
            served=bool(self.model.base_url),
        )

    def _missing_parameter_hint(self) -> str:
        if self.target is None:
            return ""
        model = self.model
        name = model.path if model.source == GIVEN else model.name
        return (
            f"find one: posbench stages=[search] model={name} method={self.target.name}"
        )

    def reference(self) -> tuple[list[dict[str, Any]], str]:
        """The paper's rows that apply to this run's task and setting, and why there are none."""
        reference = self.experiment.reference if self.experiment else None
        return reference.beside(self.task, self.model.name) if reference else ([], "")


def check(
    raw: Mapping[str, Any],
    typed: Sequence[str] = (),
    folders: Sequence[Path] = (paths.CONF,),
    obstacles: Faults | None = None,
) -> Config:
    """Check a composed config.

    Args:
        raw: Plain data; see :class:`posbench.pipeline.compose.Composed`.
        typed: Dotted keys that the user set.
        folders: The config folders, whose methods some studies measure.
        obstacles: Collects what is wrong with files of this machine; without it that is raised, too.

    Raises:
        UserError: What is wrong, all of it.
    """
    data = dict(raw)
    faults = Faults()
    made = dict[str, Any]()
    for key in sorted(set(data) - {*TOP, "typed"}):
        raise UserError(key, data[key], ", ".join(TOP), "remove it")
    _need_text(data, "")
    if not isinstance(asked := data.get("stages"), list | tuple | None):
        hint = f"set stages=[{asked if asked in STAGES else 'evaluate,report'}]"
        raise UserError(
            "stages",
            asked,
            f"a list [...] of {', '.join(STAGES)}, each once, in this order",
            hint,
        )
    typed = [*typed, *data.pop("typed", ())]
    given: Any = data.get
    parts: dict[str, Callable[[], Any]] = {
        "study": lambda: _study(data, typed),
        "task": lambda: instantiate(given("task"), Task, "task"),  # type: ignore[type-abstract]
        "search": lambda: _search(given("search")),
        "model": lambda: _model(given("model")),
        "choice": lambda: _method(data, made, typed),
        "runtime": lambda: _runtime(given("runtime") or {}),
        "experiment": lambda: (
            build(Experiment, given("experiment"), "experiment")
            if given("experiment")
            else None
        ),
    }
    for name, make in parts.items():
        with faults.collecting():
            made[name] = make()
    _look_at_files(made, faults if obstacles is None else obstacles)
    config = None
    if {"study", "model", "choice", "search"} <= set(
        made
    ):  # the study sets stages and method
        with faults.collecting():
            stages, target = _stages(data, made, typed)
            made = {**dict.fromkeys(parts), **made}
            record = _record(data, made, stages, typed)
            config = Config(
                **made, stages=stages, target=target, raw=record, typed=frozenset(typed)
            )
            if config.study and config.study.all_methods:
                config = replace(
                    config, all_methods=every(folders, config.model.blocks)
                )
            config.method_under_test().trial()
    faults.raise_any()
    assert config is not None, "it is made unless there is a fault"
    for look in (_names, Config.reference):
        with faults.collecting():
            look(config)
    faults.raise_any()
    return config


def _look_at_files(made: Mapping[str, Any], faults: Faults) -> None:
    """Collect what is missing of the checkpoint and the data that lie on this machine, and a model type that
    posbench does not know."""
    study = made.get("study")
    if "model" in made and (study is None or study.needs_model):
        for source in made["model"].files:
            with faults.collecting():
                if source.kind == "path":
                    sources.listing(source)
                    if (known := sources.facts(source)) and not made["model"].base_url:
                        families.family_of_type(known.get("model_type"))
    if "task" in made and (study is None or study.needs_task):
        for number, source in enumerate(made["task"].files()):
            with faults.collecting():
                if source.kind == "path":
                    made["task"].place() if number == 0 else sources.listing(source)


def _need_text(node: Any, where: str) -> None:
    """Refuse text that no file can hold: bytes of the command line that are no UTF-8."""
    parts: Sequence[tuple[str, Any]] = ()
    if isinstance(node, Mapping):
        parts = [(f"{where}.{key}".strip("."), value) for key, value in node.items()]
    elif isinstance(node, list | tuple):
        parts = [(where, value) for value in node]
    for name, value in parts:
        _need_text(value, name)
    for text in (node, where):
        if isinstance(text, str) and re.search("[\ud800-\udfff]", text):
            raise UserError(where, node, "UTF-8 text", "type it again")


def needs(raw: Mapping[str, Any]) -> tuple[Source, ...]:
    """The files that a composed config reads: the checkpoint's, the task's, then the search's.

    Raises:
        UserError: The model, the task or the search is wrong.
    """
    model = _model(raw.get("model"))
    task = instantiate(raw.get("task"), Task, "task")  # type: ignore[type-abstract,arg-type]
    found = _search(raw["search"]).files() if raw.get("search") else ()
    return (*model.files, *data_of(task), *found)


def data_of(task: Task) -> list[Source]:
    """The files of a task, with what is known of them where their server is not reached."""
    return [
        replace(source, about=f"{task.size}; {task.licence}") for source in task.files()
    ]


def _search(data: Any) -> Search:
    side = data.get("side_task") if isinstance(data, Mapping) else None
    if isinstance(side, Mapping) and "_target_" not in side:
        hint = "choose one: search.side_task=mmlu"
        raise UserError(
            "search.side_task", dict(side), "keys of a task that is chosen", hint
        )
    with renamed("task.", "search.side_task."):
        return instantiate(data, Search, "search")  # type: ignore[type-abstract]


def _runtime(data: Mapping[str, Any]) -> Runtime:
    cluster = data.get("cluster")
    if isinstance(cluster, Mapping):
        data = {**data, "cluster": build(Cluster, cluster, "runtime.cluster")}
    return build(Runtime, data, "runtime")


def _model(data: Any) -> ModelConfig:
    if not isinstance(data, Mapping):
        raise UserError(
            "model",
            data,
            "a choice of that group",
            "posbench ls models shows the choices",
        )
    if data.get("path") is None and data.get("base_url"):
        data = {**data, "path": ""}
    if data.get("path") is None:
        hint = "posbench model=DIR, or for a server model.base_url=http://localhost:8000/v1 model.name=NAME"
        raise UserError("model.path", None, "a local directory or a hub id", hint)
    return build(ModelConfig, with_blocks(data), "model")


def _study(data: dict[str, Any], typed: Sequence[str]) -> Study | None:
    """The study of a config; sets ``stages`` and ``method`` to what it runs where the user typed neither."""
    stages = data.get("stages") or []
    if data.get("study") is None:
        if "study" in stages:
            raise UserError(
                "study", None, "a study", "posbench ls studies shows the choices"
            )
        return None
    study: Study = instantiate(data["study"], Study, "study")  # type: ignore[type-abstract]
    if "study" not in stages:
        if "stages" in typed and stages:
            raise UserError(
                "stages",
                list(stages),
                "stages with study in them",
                "set stages=[study,report]",
            )
        data["stages"] = ["study", "report"]
    unused = [
        g
        for g, used in (("model", study.needs_model), ("task", study.needs_task))
        if not used
    ]
    unused += ["method"] if not study.needs_model or study.all_methods else []
    given = [key for key in typed if key.split(".")[0] in unused]
    if given:
        group = given[0].split(".")[0]
        name = data["study"].get("name")
        allowed = f"no {given[0]}: study {name} looks at none"
        raise UserError(group, data[group].get("name", group), allowed, "leave it out")
    if not study.uses_method and not any(
        key.split(".")[0] == "method" for key in typed
    ):
        data["method"] = dict(NONE)
    return study


def _method(
    data: dict[str, Any], made: Mapping[str, Any], typed: Sequence[str]
) -> MethodChoice:
    """The method of a config; none instead of the default where constants are missing that nothing can find:
    on a task without calibration questions."""
    choice = MethodChoice.of(data["method"], typed)
    if (model := made.get("model")) and model.base_url:
        asked = any(key.split(".")[0] == "method" for key in typed) or data.get(
            "experiment"
        )
        if asked and choice.name != NONE["name"]:
            allowed = f"none: posbench cannot reach into the server of {model.name}"
            hint = "serve a model that has the method in it (posbench export), and leave method out"
            raise UserError("method", choice.name, allowed, hint)
        data["method"] = dict(NONE)
        return MethodChoice.of(data["method"])
    searched = (
        isinstance(made.get("task"), EvaluationOnly) and data.get("study") is None
    )
    chosen = data.get("experiment") or any(
        key.split(".")[0] in ("method", "search", "stages") for key in typed
    )
    if searched and not chosen and not _builds(choice, {}, choice):
        data["method"] = dict(NONE)
        choice = MethodChoice.of(data["method"])
    return choice


def _stages(
    data: Mapping[str, Any], made: Mapping[str, Any], typed: Sequence[str]
) -> tuple[tuple[Stage, ...], MethodChoice | None]:
    """The stages to run, and what the search would find the parameters of."""
    choice = made["choice"]
    search = made["search"]
    target = search.target(choice)
    given = data.get("stages")
    if given is None:
        given = _default_stages(made["model"], made.get("task"), search, choice, target)
    stages = tuple(given)
    if not stages or list(stages) != [s for s in STAGES if s in stages]:
        allowed = f"some of {', '.join(STAGES)}, each once, in this order"
        raise UserError("stages", given, allowed, "set stages=[evaluate,report]")
    if made["model"].base_url:
        _need_servable(data, stages, typed)
    if "search" in stages and target is None:
        if "stages" in typed or "search" in typed:
            of_part = any(
                issubclass(part.cls, search.serves) for part in choice.parts.values()
            )
            name = data["search"].get("name")
            serves = search.serves.short_name()
            allowed = f"no search for method {choice.name} by {name}, which serves {serves} {search.place}"
            hint = f"add method={serves}, or take the search that serves the method: posbench ls searches"
            if of_part:
                hint = "search that method alone, then type here what it finds, with stages=[evaluate,report]"
            field_ = "stages" if "stages" in typed else "search"
            raise UserError(
                field_, list(stages) if field_ == "stages" else name, allowed, hint
            )
        stages = tuple(stage for stage in stages if stage != "search")
    if stages == ("report",):
        hint = "posbench report DIR redraws a run"
        raise UserError("stages", ["report"], "report after another stage", hint)
    return stages, target  # type: ignore[return-value]


def _need_servable(
    data: Mapping[str, Any], stages: Sequence[str], typed: Sequence[str]
) -> None:
    """Refuse for a served model what looks inside a model."""
    inside = [
        group
        for group in ("search", "study")
        if any(key.split(".")[0] == group for key in typed)
    ]
    inside += ["stages"] * (not set(stages) <= {"evaluate", "report"})
    for group in inside:
        name = data["model"]["name"]
        value = list(stages) if group == "stages" else data[group].get("name")
        allowed = f"evaluate and report alone: nothing can be seen inside the server of {name}"
        hint = (
            "set stages=[evaluate,report]"
            if group == "stages"
            else f"leave {group} out"
        )
        raise UserError(
            group,
            value,
            allowed,
            f"{hint}, or run the model here, without model.base_url",
        )


def _default_stages(
    model: ModelConfig,
    task: Task | None,
    search: Search,
    choice: MethodChoice,
    target: MethodChoice | None,
) -> Sequence[str]:
    """The stages of the model's file; with the search first where the method lacks what it finds, and without
    it where the task has no calibration questions."""
    if model.base_url:
        return ["evaluate", "report"]
    rest = [stage for stage in model.stages if stage != "search"]
    if isinstance(task, EvaluationOnly):
        return rest
    free = (
        {k: v for k, v in search.finds.items() if target.values.get(k) is None}
        if target
        else {}
    )
    lacks = target and not _builds(choice, {}, target) and _builds(choice, free, target)
    return ["search", *rest] if lacks else model.stages


def _builds(
    choice: MethodChoice, found: Mapping[str, Any], target: MethodChoice
) -> bool:
    """Whether a method can be made with what a search would find."""
    try:
        choice.build(found, target)
    except UserError:
        return False
    return True


def _record(
    data: Mapping[str, Any],
    made: Mapping[str, Any],
    stages: Sequence[str],
    typed: Sequence[str],
) -> dict[str, Any]:
    """The groups that take part in a run."""
    study = made["study"]
    used = {"runtime", "experiment"} | ({"study"} if study else set())
    used |= {"search"} if "search" in stages else set()
    used |= {"model", "method"} if study is None or study.needs_model else set()
    used |= {"task"} if study is None or study.needs_task else set()
    kept = {
        key: data[key]
        for key in (*GROUPS, "experiment")
        if key in used and data.get(key) is not None
    }
    if "model" in kept:
        kept["model"] = {**data["model"], "name": made["model"].name}
    pinned = sorted(key for key in typed if key.split(".")[0] == "method")
    return {**kept, "stages": list(stages), "typed": pinned}


def _names(config: Config) -> None:
    """Refuse names that are no folder names."""
    names = {
        "model": config.model.name,
        "task": config.task.name,
        "method": config.choice.name,
    }
    for where, text in {**names, "study": config.study_name or "none"}.items():
        # Three of them and a hash make the name of a folder, which has at most 255 bytes.
        if not re.fullmatch(r"\w[\w.-]*", str(text)) or len(str(text).encode()) > 80:
            allowed = "letters, digits, . _ -, at most 80 of them"
            raise UserError(f"{where}.name", text, allowed, f"set {where}.name=mine")
