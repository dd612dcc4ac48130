"""From a composed config to checked objects: every mistake becomes one UserError."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import hydra.utils
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posbench.errors import UserError
from posbench.files import sources
from posbench.files.sources import Source
from posbench.methods import Method
from posbench.methods.composed import Composed, in_words_of_the_whole
from posbench.model.load import ModelConfig, with_blocks
from posbench.schema import build, required
from posbench.search import Search
from posbench.stats.reference import Reference
from posbench.studies.base import Study
from posbench.tasks import Task

Stage = Literal["search", "study", "intervene", "evaluate", "report"]
STAGES: tuple[Stage, ...] = get_args(Stage)
UNMODIFIED = {"_target_": "posbench.methods.unmodified.Unmodified", "name": "none"}


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where and how to run. The fields are the keys of ``conf/runtime/*.yaml``.

    Attributes:
        device: ``auto``, ``cpu``, ``cuda`` ...
        device_map: Shards the model's layers over all visible GPUs, then memory, then disk; None puts all on
            ``device``. ``auto`` and ``balanced`` share evenly, ``balanced_low_0`` spares the first GPU,
            ``sequential`` fills in order.
        max_memory: For ``device_map``: memory per GPU number and ``cpu``, such as ``{0: 70GiB, cpu:
            100GiB}``.
        batch_size: Prompts per forward at most (moves rounding, so it is part of a run's identity).
        batch_tokens: Tokens per forward at most, padding and reply counted; None: no such limit. Out of
            memory halves a batch.
        threads: CPU threads; None leaves torch's choice.
        outputs: Folder that receives the runs.
        intervene_examples: Examples per gold position whose attention is measured.
        resamples: Bootstrap resamples for paired differences.
    """

    device: str = "auto"
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None
    max_memory: dict[int | str, str] | None = None
    batch_size: int = 64
    batch_tokens: int | None = 16384
    threads: int | None = None
    outputs: str = "outputs"
    intervene_examples: int = 20
    resamples: int = 2000

    def __post_init__(self) -> None:
        for name in ("batch_size", "batch_tokens", "intervene_examples", "resamples", "threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(
                    f"runtime.{name}",
                    getattr(self, name),
                    "a whole number from 1 up",
                    f"set runtime.{name}=1",
                )
        if self.device_map and self.device not in ("auto", "cuda"):
            raise UserError(
                "runtime.device_map",
                self.device_map,
                f"null with runtime.device={self.device}: it spreads over all visible GPUs",
                "set runtime.device=auto, and choose GPUs with CUDA_VISIBLE_DEVICES",
            )
        memory = self.max_memory or {}
        sound = all(
            (isinstance(place, int) or place == "cpu") and re.fullmatch(r"\d+(\.\d+)?[KMG]i?B", size)
            for place, size in memory.items()
        )
        if memory and not (self.device_map and sound):
            raise UserError(
                "runtime.max_memory",
                memory,
                "null, or with a runtime.device_map: GPU numbers and cpu, each with a size in KiB, MiB or GiB",
                "set runtime.device_map=auto runtime.max_memory={0:70GiB,cpu:100GiB}",
            )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What turns a config into one table or figure of a paper.

    Attributes:
        name: File name in ``experiments/``, and the folder under the outputs.
        title: What it shows, with paper, table or figure.
        reference: The paper's numbers.
        claims: What the paper reads off the figure, where it prints no numbers.
        needs_weights: Whether it says nothing without a real checkpoint; ``make figures`` leaves it out.
    """

    name: str
    title: str
    reference: Reference | None = None
    claims: tuple[str, ...] = ()
    needs_weights: bool = False


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run, checked.

    Attributes:
        model: The model's YAML.
        task: The benchmark.
        method_class: Class of the method.
        method_fields: Its parameters; None marks what the search stage must find.
        pinned: Method parameters that the user typed; the search leaves them alone.
        search: The search, used by the search stage.
        runtime: Where and how.
        stages: Stages to run, in order.
        experiment: The experiment this run belongs to.
        study: The study of the stage of that name.
        study_name: Its name.
        raw: The resolved config as plain data, for the record.
    """

    model: ModelConfig
    task: Task
    method_class: type[Method]
    method_name: str
    method_fields: dict[str, Any]
    pinned: frozenset[str]
    search: Search
    runtime: Runtime
    stages: tuple[Stage, ...]
    experiment: Experiment | None
    study: Study | None
    study_name: str
    raw: dict[str, Any] = field(repr=False)

    def method(self, found: Mapping[str, Any] | None = None) -> Method:
        """Build the method; what the search found fills every parameter that the user did not type.

        Raises:
            UserError: A parameter is missing or wrong.
        """
        if not issubclass(self.method_class, Composed):
            return self._method(self.method_class, self._filled(self.method_fields, found), self.method_name)
        parts: dict[str, Method] = {}
        for name, (cls, fields_) in self._parts().items():
            with in_words_of_the_whole(name):
                parts[name] = self._method(
                    cls, self._filled(fields_, found) if name == self.part else fields_, name
                )
        return build(Composed, self.method_fields | {"parts": parts}, "method")

    def _filled(self, fields_: dict[str, Any], found: Mapping[str, Any] | None) -> dict[str, Any]:
        return fields_ | {k: v for k, v in (found or {}).items() if k in fields_ and k not in self.typed}

    @property
    def part(self) -> str | None:
        """Where the method is composed, the part whose parameters the search finds."""
        if not issubclass(self.method_class, Composed):
            return None
        return self.search.part_of({name: cls for name, (cls, _) in self._parts().items()})

    @property
    def typed(self) -> dict[str, Any]:
        """What the user typed of the method that the search serves, or of the part."""
        part = self.part
        fields_, where = (self._parts()[part][1], f"parts.{part}.") if part else (self.method_fields, "")
        return {key: value for key, value in fields_.items() if where + key in self.pinned}

    @property
    def method_classes(self) -> list[type[Method]]:
        """The method's class, and those of its parts where it is composed."""
        parts = self._parts() if issubclass(self.method_class, Composed) else {}
        return [self.method_class, *(cls for cls, _ in parts.values())]

    def _parts(self) -> dict[str, tuple[type[Method], dict[str, Any]]]:
        """Class and parameters of each part of a composed method."""
        given = self.method_fields.get("parts")
        if (
            not isinstance(given, Mapping)
            or not given
            or not all(isinstance(part, Mapping) for part in given.values())
        ):
            raise UserError(
                "method.parts", given, "methods by name", "write method=[layer_scaling,scale_channel]"
            )
        found = {}
        for name, part in given.items():
            cls, fields_ = target(part, Method, f"method.parts.{name}")
            found[str(name)] = cls, {key: value for key, value in fields_.items() if key != "name"}
        return found

    def _method(self, cls: type[Method], values: dict[str, Any], name: str) -> Method:
        missing = [k for k, v in values.items() if v is None and k in required(cls)]
        if missing:
            raise UserError(
                f"method.{missing[0]}",
                None,
                f"a value (model {self.model.name} has no {name} block with it)",
                self._where_from(cls, name, missing[0]),
            )
        return build(cls, values, "method")

    def _where_from(self, cls: type[Method], name: str, key: str) -> str:
        if not serves(self.search, cls):
            return f"type method.{key}=..., or add the block {name} to the model's YAML"
        given = self.model.source == "given by the user"
        model = f"hf model.path={self.model.path}" if given else self.model.name
        return f"find one: posbench stages=[search] model={model} method={name}"

    def trial(self) -> Method:
        """The method with legal stand-ins for what the search will find, so that everything else can be
        checked first."""
        standin = self.search.finds if "search" in self.stages else {}
        given = self._parts()[self.part][1] if self.part else self.method_fields
        return self.method({k: v for k, v in standin.items() if given.get(k) is None})


def plain(config: DictConfig) -> dict[str, Any]:
    """Resolve a composed config to plain data.

    Raises:
        UserError: A value is mandatory or refers to something that does not exist.
    """
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", "") or "config")
        reason = str(error).strip().splitlines()[0]
        raise UserError(key, "???", "a value", f"set {key}=... ({reason})") from error


def check(raw: dict[str, Any], typed: Sequence[str] = ()) -> Config:
    """Check a resolved config.

    Args:
        raw: Plain data from :func:`plain`.
        typed: Dotted keys that the user set on the command line.

    Raises:
        UserError: The first thing that is wrong.
    """
    raw = dict(raw)
    known = ("model", "task", "method", "search", "runtime", "study", "stages", "experiment")
    unknown = set(raw) - set(known)
    if unknown:
        name = sorted(unknown)[0]
        raise UserError(name, raw[name], ", ".join(known), "remove it")
    for group in ("model", "task", "method", "search", "runtime"):
        if not isinstance(raw.get(group), Mapping):
            raise UserError(
                group, raw.get(group), "a choice of that group", f"posbench ls {group}s shows the choices"
            )
    model, task = _model_and_task(raw)
    study, study_name = _study(raw, typed)
    method_class, fields_ = target(raw["method"], Method, "method")
    name = fields_.pop("name", method_class.__name__.lower())
    stages = build(_Stages, {"stages": raw.get("stages")}, "").stages
    search = _instance(raw["search"], Search, "search")
    pinned = frozenset(key.removeprefix("method.") for key in typed if key.startswith("method."))
    config = Config(
        model=model,
        task=task,
        method_class=method_class,
        method_name=name,
        method_fields=fields_,
        pinned=pinned,
        search=search,
        runtime=build(Runtime, raw["runtime"], "runtime"),
        stages=stages,
        experiment=build(Experiment, raw["experiment"], "experiment") if raw.get("experiment") else None,
        study=study,
        study_name=study_name,
        raw=raw | {"pinned": sorted(pinned)},
    )
    if "search" in stages and not (config.part or serves(search, method_class)):
        if "stages" in typed or "search" in typed:
            part = issubclass(method_class, Composed) and any(
                serves(search, cls) for cls in config.method_classes
            )
            served = f"{search.serves}, {search.place}"
            raise UserError(
                "stages" if "stages" in typed else "search",
                list(stages) if "stages" in typed else type(search).__name__,
                f"no search for method {name} by {type(search).__name__}, which finds parameters of {served}",
                "search that method alone, then type here what it finds, with stages=[evaluate,report]"
                if part
                else "leave search out of stages, or take the search that serves the method: posbench ls searches",
            )
        config = replace(config, stages=tuple(stage for stage in stages if stage != "search"))
    for where, text in (
        ("model", model.name),
        ("task", task.name),
        ("method", name),
        ("study", study_name or "none"),
    ):
        # They become folder names.
        if not re.fullmatch(r"\w[\w.-]*", str(text)):
            raise UserError(f"{where}.name", text, "letters, digits, . _ -", f"set {where}.name=...")
    if model.context_window is not None and model.context_window < 1:
        raise UserError(
            "model.context_window",
            model.context_window,
            "a whole number from 1 up, or null",
            "set it to null",
        )
    config.trial()
    if config.experiment and config.experiment.reference:
        config.experiment.reference.rows()
    return config


def _study(raw: dict[str, Any], typed: Sequence[str]) -> tuple[Study | None, str]:
    """The study of a config and its name; sets ``stages`` and ``method`` to what a study runs where the user
    typed neither."""
    stages = raw.get("stages") or []
    if raw.get("study") is None:
        if "study" in stages:
            raise UserError("study", None, "a study", "posbench ls studies shows the choices")
        return None, ""
    study, name = study_of(raw["study"])
    if "study" not in stages:
        if "stages" in typed:
            raise UserError("stages", list(stages), "stages with study in them", "set stages=[study,report]")
        raw["stages"] = ["study", "report"]
    given = [key for key in typed if key.split(".")[0] in ("model", "task", "method")]
    if not study.needs_model and given:
        allowed = f"no {given[0]}: study {name} looks at none"
        group = given[0].split(".")[0]
        raise UserError(group, raw[group].get("name", group), allowed, "leave it out")
    if not study.uses_method and not any(key.split(".")[0] == "method" for key in given):
        raw["method"] = dict(UNMODIFIED)
    return study, name


def study_of(data: Mapping[str, Any]) -> tuple[Study, str]:
    """The study that plain data describe, and its name.

    Raises:
        UserError: There is no such study, or a field is wrong.
    """
    if not isinstance(data, Mapping):
        raise UserError("study", data, "a choice of that group", "posbench ls studies shows the choices")
    cls, values = target(data, Study, "study")
    name = str(values.pop("name", cls.__module__.rsplit(".", 1)[-1]))
    return build(cls, values, "study"), name


def serves(search: Search, method_class: type[Method]) -> bool:
    """Whether a search finds parameters of a method, or of the method that it extends."""
    return any(cls.__name__ == search.serves for cls in method_class.__mro__)


def needs(raw: Mapping[str, Any]) -> tuple[Source, ...]:
    """The files that a resolved config reads: the checkpoint's, then the task's.

    Raises:
        UserError: The model or the task is wrong.
    """
    model, task = _model_and_task(raw)
    return (sources.checkpoint(model.path, model.revision), *task.files())


def _model_and_task(raw: Mapping[str, Any]) -> tuple[ModelConfig, Task]:
    if raw["model"].get("path") is None:
        raise UserError(
            "model.path", None, "a local directory or a hub id", "posbench model=hf model.path=DIR"
        )
    return build(ModelConfig, with_blocks(raw["model"]), "model"), _instance(raw["task"], Task, "task")


@dataclass(frozen=True)
class _Stages:
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages or list(self.stages) != [stage for stage in STAGES if stage in self.stages]:
            raise UserError(
                "stages",
                list(self.stages),
                f"some of {', '.join(STAGES)}, each once, in this order",
                "set stages=[evaluate,report]",
            )


def target(data: Mapping[str, Any], kind: type, where: str) -> tuple[type[Any], dict[str, Any]]:
    """The class that a group's ``_target_`` names, and the other keys.

    Raises:
        UserError: There is no such class, or it is none of that kind.
    """
    values = {k: v for k, v in data.items() if k != "_target_"}
    target = data.get("_target_")
    try:
        cls = hydra.utils.get_class(str(target))
    except Exception as error:
        raise UserError(
            f"{where}._target_", target, "the import path of a class", f"check conf/{where}/*.yaml"
        ) from error
    if not issubclass(cls, kind):
        raise UserError(
            f"{where}._target_",
            target,
            f"a subclass of {kind.__module__}.{kind.__name__}",
            "see CONTRIBUTING.md",
        )
    return cls, values


def _instance(data: Mapping[str, Any], kind: type, where: str) -> Any:
    cls, values = target(data, kind, where)
    return build(cls, values, where)
