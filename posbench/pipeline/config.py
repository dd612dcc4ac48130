"""From composed plain data to checked objects; all mistakes are reported together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from posbench import paths
from posbench.errors import Faults, UserError, renamed
from posbench.files import sources
from posbench.files.secrets import without_named_secrets
from posbench.files.sources import Source
from posbench.methods.choice import MethodChoice, all_choices
from posbench.model import families
from posbench.model.load import ModelConfig, with_blocks
from posbench.pipeline.arguments import TOP, USER_SOURCE
from posbench.pipeline.compose import ComposedConfig
from posbench.pipeline.constants import RunConstants, suggest_run
from posbench.run.budget import Budget
from posbench.run.method import MethodUnderTest
from posbench.run.runtime import Cluster, Runtime
from posbench.schema import Positive, build, instantiate, plain
from posbench.search.base import Search
from posbench.stats.reference import Contrast, Reference
from posbench.tasks import Task
from posbench.tasks.base import EvaluationOnly

if TYPE_CHECKING:
    from posbench.backends.base import ServerProfile
    from posbench.studies.base import Study

Stage = Literal["search", "study", "intervene", "evaluate", "report"]
STAGES: tuple[Stage, ...] = get_args(Stage)
NO_METHOD = {"_target_": "posbench.methods.unmodified.Unmodified", "name": "none"}
MAX_NAME_BYTES = 76
"""Limit for each of the three names in a folder's name: with a hash and the ends of scratch files at most 255."""
SURROGATES = re.compile("[\ud800-\udfff]")
"""Code points with which Python represents bytes of the command line that are not UTF-8."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Turns a config into one table or figure of a paper.

    Attributes:
        name: File name in ``experiments/``, and the folder under the outputs.
        title: Its content, with paper, table or figure.
        paper: The paper.
        covers: The paper's tables and figures that it regenerates, as ``Table 1``.
        panels: The figures of its runs that show each of these, as ``tiny/maps``: a run's model, or a sweep, and a
            figure; where no such run is shown, the figure of the first run that has one.
        grid: Swept unless the user types the key.
        reference: The paper's numbers.
        contrasts: Claims of the paper about the settings of the grid.
        claims: Claims that the paper reads off the figure, where it prints no numbers.
        needs_weights: Whether it is meaningless without a real checkpoint.
        minutes: Minutes on one core with the default settings, approximately.
    """

    name: str
    title: str
    paper: Literal["", "yu2025", "lpes", "wu2025", "behind_rope"] = ""
    covers: tuple[str, ...] = ()
    panels: dict[str, list[str]] = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    reference: Reference | None = None
    contrasts: tuple[Contrast, ...] = ()
    claims: tuple[str, ...] = ()
    needs_weights: bool = False
    minutes: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run, checked.

    Attributes:
        model: The model.
        task: The task.
        choice: The method under test.
        search: The search.
        target: The choice, or its part, whose parameters the search finds; None: no search serves it.
        runtime: Where and how to run.
        stages: The stages to run, in order.
        experiment: The experiment that the config belongs to.
        study: The study.
        study_name: Name of the study; empty without one.
        raw: The recorded config as plain data: the groups that take part.
        typed: Dotted keys that the user set.
        all_methods: The methods that the study measures, by name; empty unless it measures all.
        budget: The budget from which the sizes are still to be chosen; None: the sizes are final.
        config_dir: The user's own config folder; None without one.
        constants: Constants of the method, or of its parts, that come from runs.
        server: Properties of the model's server; None: not yet probed.
    """

    model: ModelConfig
    task: Task
    choice: MethodChoice
    search: Search
    target: MethodChoice | None
    runtime: Runtime
    stages: tuple[Stage, ...]
    experiment: Experiment | None
    study: Study | None
    study_name: str
    raw: dict[str, Any] = field(repr=False)
    typed: frozenset[str] = frozenset()
    all_methods: Mapping[str, MethodChoice] = field(default_factory=dict)
    budget: Budget | None = None
    config_dir: Path | None = None
    constants: tuple[RunConstants, ...] = ()
    server: ServerProfile | None = None

    @property
    def uses_model(self) -> bool:
        """Whether the run looks at a model at all; some studies do not."""
        if self.study is None or self.study.needs_model:
            return True
        return bool({"search", "intervene", "evaluate"} & set(self.stages))

    @property
    def asks_server(self) -> bool:
        """Whether the run's model is not in this process: a server, or a backend of the user's, answers."""
        return self.uses_model and not self.model.in_process

    @property
    def uses_task(self) -> bool:
        """Whether the task's prompts take part."""
        return self.study is None or self.study.needs_task

    def with_fields(self, group: str, values: Mapping[str, Any]) -> Config:
        """Return the config with changed fields of a group, in its record as well."""
        section = replace(getattr(self, group), **values)
        raw = {**self.raw, group: {**self.raw[group], **plain(values)}}
        changes: Any = {group: section, "raw": raw}
        return replace(self, **changes)

    def with_stages(self, stages: Sequence[Stage]) -> Config:
        """Return the config with other stages, in its record as well."""
        return replace(
            self, stages=tuple(stages), raw={**self.raw, "stages": list(stages)}
        )

    def method_under_test(self) -> MethodUnderTest:
        """Return the method under test, without the parameters that a search will find."""
        blocks_of_runs = {
            constants.method: {**constants.values, "source": constants.source}
            for constants in self.constants
        }
        return MethodUnderTest(
            self.choice,
            self.target,
            stand_ins=self.search.finds if "search" in self.stages else {},
            hint=self._missing_parameter_hint(),
            blocks=self.model.blocks | blocks_of_runs,
            served=not self.model.in_process,
        )

    def _missing_parameter_hint(self) -> str:
        if self.target is None:
            return ""
        model = self.model
        name = model.path if model.source == USER_SOURCE else model.name
        return (
            f"find one: posbench stages=[search] model={name} method={self.target.name}"
        )

    def reference(self) -> tuple[list[dict[str, Any]], str]:
        """Return the paper's rows for this run's task and setting, and the reason if there are none."""
        if self.experiment is None or self.experiment.reference is None:
            return [], ""
        return self.experiment.reference.beside(self.task, self.model.name)


def check_config(composed: ComposedConfig, obstacles: Faults | None = None) -> Config:
    """Check a composed config.

    Args:
        composed: The config; methods of its folders take part where a study measures them all.
        obstacles: Collects the faults of files on this machine; without it they are raised, too.

    Raises:
        UserError: All faults together.
    """
    data = dict(composed.raw)
    unknown = sorted(set(data) - {*TOP, "typed", "constants"})
    if unknown:
        key = unknown[0]
        raise UserError(key, data[key], ", ".join(TOP), "remove it")
    _need_text(data, "")
    _need_stage_list(data.get("stages"))
    typed = [*composed.typed, *data.pop("typed", ())]
    faults = Faults()
    parts = _build_parts(data, typed, faults)
    _check_files(parts, faults if obstacles is None else obstacles)
    config = None
    # The study sets stages and method.
    if {"study", "model", "choice", "search"} <= parts.keys():
        with faults.collecting():
            config = _assemble(data, parts, typed, composed.folders)
    faults.raise_any()
    assert config is not None, "it is made unless there is a fault"
    with faults.collecting():
        _need_folder_names(config)
    with faults.collecting():
        config.reference()
    faults.raise_any()
    return config


def _build_parts(
    data: dict[str, Any], typed: Sequence[str], faults: Faults
) -> dict[str, Any]:
    """The objects of all groups; faulty ones are left out, and their faults collected.

    Args:
        data: The config; the study and the method set ``stages`` and ``method`` where the user typed neither.
        typed: Dotted keys that the user set.
        faults: Collects the faults.
    """
    parts = dict[str, Any]()
    budget = data.pop("budget", None)
    constants = data.get("constants") or []
    builders: dict[str, Callable[[], Any]] = {
        "study": lambda: _build_study(data, typed),
        "task": lambda: _build_task(data.get("task")),
        "search": lambda: _build_search(data.get("search")),
        "model": lambda: _build_model(data.get("model")),
        "choice": lambda: _choose_method(
            data, parts.get("model"), parts.get("task"), typed
        ),
        "runtime": lambda: _build_runtime(data.get("runtime") or {}),
        "experiment": lambda: _build_experiment(data.get("experiment")),
        "budget": lambda: None if budget is None else Budget.parse(budget),
        "constants": lambda: tuple(
            build(RunConstants, values, "constants") for values in constants
        ),
    }
    for name, build_part in builders.items():
        with faults.collecting():
            parts[name] = build_part()
    return parts


def _assemble(
    data: Mapping[str, Any],
    parts: Mapping[str, Any],
    typed: Sequence[str],
    folders: Sequence[Path],
) -> Config:
    """Build the config from its parts and stages, and try its method once.

    Args:
        data: The composed config.
        parts: The parts by name; None where the caller has recorded a fault.
        typed: Keys that the user set.
        folders: Config folders.

    Raises:
        UserError: The method lacks constants; the hint names a run that found them.
    """
    stages, target = _resolve_stages(data, parts, typed)
    config = Config(
        model=parts["model"],
        task=parts.get("task"),  # type: ignore[arg-type]
        choice=parts["choice"],
        search=parts["search"],
        target=target,
        runtime=parts.get("runtime"),  # type: ignore[arg-type]
        stages=stages,
        experiment=parts.get("experiment"),
        study=parts["study"],
        study_name=str(data["study"]["name"]) if parts["study"] else "",
        raw=_record(data, parts, stages, typed),
        typed=frozenset(typed),
        budget=parts.get("budget"),
        config_dir=paths.own_folder(folders),
        constants=parts.get("constants", ()),
    )
    if config.study and config.study.all_methods:
        choices = all_choices(folders, config.model.blocks)
        all_methods = {n: c for n, c in choices.items() if config.study.measures(c)}
        config = replace(config, all_methods=all_methods)
    try:
        config.method_under_test().trial()
    except UserError as error:
        if error.value is not None or config.target is None or config.constants:
            raise
        outputs = Path(config.runtime.outputs if config.runtime else Runtime.outputs)
        hint = suggest_run(
            outputs.expanduser(), config.target.name, config.model.files, error.hint
        )
        raise UserError(error.field, error.value, error.allowed, hint) from error
    return config


def _typed_groups(typed: Sequence[str]) -> set[str]:
    """The groups in which the user set a key."""
    return {key.split(".")[0] for key in typed}


# Files and text


def _check_files(parts: Mapping[str, Any], faults: Faults) -> None:
    """Collect the missing files of checkpoint and data on this machine.

    Also collect a model type that posbench does not know.
    """
    study = parts.get("study")
    model = parts.get("model")
    if model and (study is None or study.needs_model):
        for source in model.files:
            if source.is_local:
                with faults.collecting():
                    _check_checkpoint(source, model)
    task = parts.get("task")
    if task and (study is None or study.needs_task):
        for number, source in enumerate(task.files()):
            if source.kind == "path":
                with faults.collecting():
                    if number == 0:
                        task.place()
                    else:
                        sources.list_files(source)


def _check_checkpoint(source: Source, model: ModelConfig) -> None:
    sources.list_files(source)
    facts = sources.checkpoint_config(source)
    if facts and model.in_process:
        families.family_of_type(facts.get("model_type"))


def _need_text(node: Any, key: str) -> None:
    """Refuse text that no file can hold: bytes of the command line that are not UTF-8."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            _need_text(value, f"{key}.{name}".strip("."))
    elif isinstance(node, list | tuple):
        for value in node:
            _need_text(value, key)
    for text in (node, key):
        if isinstance(text, str) and SURROGATES.search(text):
            raise UserError(
                key, node, "UTF-8 text", "remove the characters that are not UTF-8"
            )


def needs(composed: ComposedConfig) -> tuple[Source, ...]:
    """Return the files that a composed config reads: the checkpoint's, the task's, then the search's.

    Raises:
        UserError: The model, the task or the search is wrong.
    """
    raw = composed.raw
    model = _build_model(raw.get("model"))
    task = _build_task(raw.get("task"))
    search_files: tuple[Source, ...] = ()
    if raw.get("search"):
        search_files = _build_search(raw["search"]).files()
    return (*model.files, *task_sources(task), *search_files)


def task_sources(task: Task) -> list[Source]:
    """Return the files of a task, each described by size and licence."""
    about = f"{task.size}; {task.licence}"
    return [replace(source, about=about) for source in task.files()]


def _need_folder_names(config: Config) -> None:
    """Refuse names that cannot name a folder."""
    names = {
        "model": config.model.name,
        "task": config.task.name,
        "method": config.choice.name,
        "study": config.study_name or "none",
    }
    for group, name in names.items():
        too_long = len(str(name).encode()) > MAX_NAME_BYTES
        if too_long or not re.fullmatch(r"\w[\w.-]*", str(name)):
            allowed = f"letters, digits, . _ -, at most {MAX_NAME_BYTES} of them"
            raise UserError(f"{group}.name", name, allowed, f"set {group}.name=mine")


# Groups


def _build_task(data: Any) -> Task:
    return instantiate(data, Task, "task")  # type: ignore[type-abstract]


def _build_experiment(data: Any) -> Experiment | None:
    return build(Experiment, data, "experiment") if data else None


def _build_search(data: Any) -> Search:
    side_task = data.get("side_task") if isinstance(data, Mapping) else None
    if isinstance(side_task, Mapping) and "_target_" not in side_task:
        allowed = "keys of a task that is chosen"
        hint = "choose one: search.side_task=mmlu"
        raise UserError("search.side_task", dict(side_task), allowed, hint)
    with renamed("task.", "search.side_task."):
        return instantiate(data, Search, "search")  # type: ignore[type-abstract]


def _build_runtime(data: Mapping[str, Any]) -> Runtime:
    cluster = data.get("cluster")
    if cluster is None:
        return build(Runtime, data, "runtime")
    if not isinstance(cluster, Mapping):
        hint = "add runtime/cluster=slurm"
        raise UserError("runtime/cluster", cluster, "slurm, local", hint)
    built = build(Cluster, cluster, "runtime.cluster")
    return build(Runtime, {**data, "cluster": built}, "runtime")


def _build_model(data: Any) -> ModelConfig:
    if not isinstance(data, Mapping):
        hint = "posbench ls models shows the choices"
        raise UserError("model", data, "a choice of model", hint)
    if data.get("path") is None and (data.get("base_url") or data.get("backend")):
        data = {**data, "path": ""}
    if data.get("path") is None:
        hint = "posbench model=DIR, or for a server model.base_url=http://localhost:8000/v1 model.name=NAME"
        raise UserError("model.path", None, "a local directory or a hub id", hint)
    return build(ModelConfig, with_blocks(data), "model")


def _build_study(data: dict[str, Any], typed: Sequence[str]) -> Study | None:
    """The study of a config; sets ``stages`` and ``method`` to the study's where the user typed neither."""
    stages = data.get("stages") or []
    if data.get("study") is None:
        if "study" in stages:
            hint = "posbench ls studies shows the choices"
            raise UserError("study", None, "a study", hint)
        return None
    from posbench.studies.base import read_study

    study = read_study(data["study"])
    if "study" not in stages:
        if "stages" in typed and stages:
            allowed = "stages that include study"
            hint = "set stages=[study,report]"
            raise UserError("stages", list(stages), allowed, hint)
        data["stages"] = ["study", "report"]
    _need_used_groups(study, data, typed)
    if not study.uses_method and "method" not in _typed_groups(typed):
        data["method"] = dict(NO_METHOD)
    return study


def _need_used_groups(
    study: Study, data: Mapping[str, Any], typed: Sequence[str]
) -> None:
    """Refuse a typed key of a group that the study does not look at."""
    unused = set()
    if not study.needs_model:
        unused |= {"model", "method"}
    if not study.needs_task:
        unused.add("task")
    if study.all_methods:
        unused.add("method")
    searches = any(isinstance(value, Search) for value in vars(study).values())
    if not searches and "search" not in (data.get("stages") or []):
        unused.add("search")
    for key in typed:
        group = key.split(".")[0]
        if group in unused:
            value = data[group].get("name", group)
            allowed = f"no {key}: study {data['study'].get('name')} does not use one"
            raise UserError(group, value, allowed, "leave it out")


def _choose_method(
    data: dict[str, Any],
    model: ModelConfig | None,
    task: Task | None,
    typed: Sequence[str],
) -> MethodChoice:
    """The method of a config.

    The default method gives way to the method ``none``

    - for a served model, whose layers posbench cannot reach;
    - where it lacks constants, and no search can find them because the task has no calibration questions.

    Args:
        data: The config; ``method`` is set where the default is replaced.
        model: The model, None if it is not valid.
        task: The task, None if it is not valid.
        typed: Dotted keys that the user set.

    Raises:
        UserError: The user chose another method than ``none`` for a served model.
    """
    if not data.get("method"):
        allowed = "a method; none leaves the model as it is"
        raise UserError("method", "", allowed, "set method=none")
    choice = MethodChoice.of(data["method"], typed)
    groups = _typed_groups(typed)
    is_experiment = bool(data.get("experiment"))
    if model and not model.in_process:
        chosen = is_experiment or "method" in groups
        if choice.changes_prompts_alone and chosen:
            return choice
        if chosen and choice.name != NO_METHOD["name"]:
            allowed = (
                "none, or a method that changes the prompt alone, such as prompt_twice: "
                f"posbench cannot reach into the server of {model.name}"
            )
            hint = "serve a model with the method built in (posbench export), and leave out method"
            raise UserError("method", choice.name, allowed, hint)
        data["method"] = dict(NO_METHOD)
        return MethodChoice.of(data["method"])
    chosen = is_experiment or bool(groups & {"method", "search", "stages"})
    unsearchable = isinstance(task, EvaluationOnly) and data.get("study") is None
    if unsearchable and not chosen and not _can_build(choice, {}, choice):
        data["method"] = dict(NO_METHOD)
        choice = MethodChoice.of(data["method"])
    return choice


# Stages


def _need_stage_list(stages: Any) -> None:
    if stages is None or isinstance(stages, list | tuple):
        return
    example = stages if stages in STAGES else "evaluate,report"
    allowed = f"a list [...] of {', '.join(STAGES)}, each once, in this order"
    raise UserError("stages", stages, allowed, f"set stages=[{example}]")


def _resolve_stages(
    data: Mapping[str, Any], parts: Mapping[str, Any], typed: Sequence[str]
) -> tuple[tuple[Stage, ...], MethodChoice | None]:
    """The stages to run, and the method, or its part, whose parameters the search would find."""
    choice: MethodChoice = parts["choice"]
    search: Search = parts["search"]
    model: ModelConfig = parts["model"]
    target = search.target(choice)
    requested = data.get("stages")
    if requested is None:
        requested = _default_stages(model, parts.get("task"), search, choice, target)
        if parts.get("constants"):
            requested = [stage for stage in requested if stage != "search"]
        is_typed = "search" in _typed_groups(typed)
        if is_typed and model.in_process and "search" not in requested:
            requested = ["search", *requested]
    stages = tuple(requested)
    if not stages or list(stages) != [stage for stage in STAGES if stage in stages]:
        allowed = f"some of {', '.join(STAGES)}, each once, in this order"
        raise UserError("stages", requested, allowed, "set stages=[evaluate,report]")
    study: Study | None = parts.get("study")
    if not model.in_process and not (study and study.asks_only):
        _need_servable(data, stages, typed)
    if "search" in stages and target is None:
        if "stages" in typed or "search" in typed:
            raise _unserved(data, search, choice, stages, typed)
        stages = tuple(stage for stage in stages if stage != "search")
    constants = parts.get("constants")
    if constants and "search" in stages:
        allowed = f"no search: the constants come from run {constants[0].run}"
        hint = "leave out the search, or name the method itself"
        raise UserError("stages", list(stages), allowed, hint)
    if stages == ("report",):
        hint = "posbench report DIR redraws a run"
        raise UserError(
            "stages", ["report"], "report together with another stage", hint
        )
    return stages, target


def _unserved(
    data: Mapping[str, Any],
    search: Search,
    choice: MethodChoice,
    stages: Sequence[str],
    typed: Sequence[str],
) -> UserError:
    """That the user typed a search which does not serve the method."""
    name = data["search"].get("name")
    serves = search.serves.short_name()
    allowed = f"no search for method {choice.name} by {name}, which serves {serves} {search.place}"
    if any(issubclass(part.cls, search.serves) for part in choice.parts.values()):
        hint = "search for that method alone, then set its parameters here with stages=[evaluate,report]"
    else:
        hint = f"add method={serves}, or choose another search: posbench ls searches"
    if "stages" in typed:
        return UserError("stages", list(stages), allowed, hint)
    return UserError("search", name, allowed, hint)


def _need_servable(
    data: Mapping[str, Any], stages: Sequence[str], typed: Sequence[str]
) -> None:
    """Refuse settings that need the inside of a model where a server runs the model."""
    groups = _typed_groups(typed)
    value: Any
    if groups & {"search", "study"}:
        group = "search" if "search" in groups else "study"
        value = data[group].get("name")
        hint = f"leave {group} out"
    elif not set(stages) <= {"evaluate", "report"}:
        group = "stages"
        value = list(stages)
        hint = "set stages=[evaluate,report]"
    else:
        return
    name = data["model"]["name"]
    allowed = (
        f"evaluate and report only: posbench cannot look inside the server of {name}"
    )
    hint = f"{hint}, or run the model here, without model.base_url"
    raise UserError(group, value, allowed, hint)


def _default_stages(
    model: ModelConfig,
    task: Task | None,
    search: Search,
    choice: MethodChoice,
    target: MethodChoice | None,
) -> Sequence[str]:
    """The stages of the model's file, with or without a search.

    The search comes first where the method lacks its constants, and is left out where the task has no
    calibration questions.

    Args:
        model: The model.
        task: The task, None where it is wrong.
        search: The search.
        choice: The method under test.
        target: The choice, or its part, that the search serves.
    """
    if not model.in_process:
        return ["evaluate", "report"]
    without_search = [stage for stage in model.stages if stage != "search"]
    if isinstance(task, EvaluationOnly):
        return without_search
    if target is None or _can_build(choice, {}, target):
        return model.stages
    findable = {
        name: value
        for name, value in search.finds.items()
        if target.values.get(name) is None
    }
    if _can_build(choice, findable, target):
        return ["search", *without_search]
    return model.stages


def _can_build(
    choice: MethodChoice, parameters: Mapping[str, Any], target: MethodChoice
) -> bool:
    """Whether a method can be made with the parameters that a search would find."""
    try:
        choice.build(parameters, target)
    except UserError:
        return False
    return True


def _record(
    data: Mapping[str, Any],
    parts: Mapping[str, Any],
    stages: Sequence[str],
    typed: Sequence[str],
) -> dict[str, Any]:
    """The groups that take part in a run, as plain data.

    Args:
        data: The config.
        parts: The objects of its groups.
        stages: The stages to run.
        typed: Dotted keys that the user set.
    """
    study = parts["study"]
    used = {"runtime", "experiment"}
    if study:
        used.add("study")
    if "search" in stages:
        used.add("search")
    if study is None or study.needs_model:
        used |= {"model", "method"}
    if study is None or study.needs_task:
        used.add("task")
    record = {
        group: data[group]
        for group in (*paths.GROUPS, "experiment")
        if group in used and data.get(group) is not None
    }
    if "model" in record:
        model = {**data["model"], "name": parts["model"].name}
        if model.get("extra_body"):
            model["extra_body"] = without_named_secrets(model["extra_body"])
        record["model"] = model
    record["stages"] = list(stages)
    if parts.get("constants"):
        record["constants"] = [asdict(c) for c in parts["constants"]]
    record["typed"] = sorted(key for key in typed if key.split(".")[0] == "method")
    return record
