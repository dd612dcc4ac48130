"""From a composed config to checked objects: every mistake becomes one UserError."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

import hydra.utils
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from posbench import paths
from posbench.errors import UserError
from posbench.lm import ModelConfig
from posbench.methods import Method
from posbench.search import ChannelSearch
from posbench.tasks import Task

Stage = Literal["search", "intervene", "evaluate", "report"]


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where and how to run. The fields are the keys of ``conf/runtime/*.yaml``.

    Attributes:
        device: ``auto``, ``cpu``, ``cuda`` ...
        batch_size: Prompts per forward (moves rounding, so it is part of a run's identity).
        threads: CPU threads; None leaves torch's choice.
        outputs: Folder that receives the runs.
        intervene_examples: Examples per gold position whose attention is measured.
        resamples: Bootstrap resamples for paired differences.
    """

    device: str = "auto"
    batch_size: int = 8
    threads: int | None = None
    outputs: str = "outputs"
    intervene_examples: int = 20
    resamples: int = 2000

    def __post_init__(self) -> None:
        for name in ("batch_size", "intervene_examples", "resamples"):
            if getattr(self, name) < 1:
                raise UserError(
                    field=f"runtime.{name}", value=getattr(self, name), allowed="a whole number from 1 up", hint=f"set runtime.{name}=1"
                )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What turns a config into one table or figure of a paper.

    Attributes:
        name: File name in ``experiments/``, and the folder under the outputs.
        title: What it shows, with paper, table or figure.
        reference: Rows of the paper's numbers: file in ``experiments/reference``, its task, and how its names map to ours.
        claims: What the paper reads off the figure, where it prints no numbers.
    """

    name: str
    title: str
    reference: dict[str, Any] | None = None
    claims: tuple[str, ...] = ()


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
        raw: The resolved config as plain data, for the record.
    """

    model: ModelConfig
    task: Task
    method_class: type[Method]
    method_name: str
    method_fields: dict[str, Any]
    pinned: frozenset[str]
    search: ChannelSearch
    runtime: Runtime
    stages: tuple[Stage, ...]
    experiment: Experiment | None
    raw: dict[str, Any] = field(repr=False)

    def method(self, found: Mapping[str, Any] | None = None) -> Method:
        """Build the method; what the search found fills every parameter that the user did not type.

        Raises:
            UserError: A parameter is missing or wrong.
        """
        values = self.method_fields | {k: v for k, v in (found or {}).items() if k in self.method_fields and k not in self.pinned}
        missing = [k for k, v in values.items() if v is None and k in _required(self.method_class)]
        if missing:
            raise UserError(
                field=f"method.{missing[0]}",
                value=None,
                allowed=f"a value (model {self.model.name} has no {self.method_name} block)",
                hint=f"find one: posbench stages=[search] model={self.model.name} method={self.method_name}",
            )
        return build(self.method_class, values, "method")


def build(cls: type[Any], data: Mapping[str, Any], where: str) -> Any:
    """Check plain data against a dataclass and make the object.

    Raises:
        UserError: Unknown key, missing key or wrong type, with the dotted name.
    """
    allowed = [f.name for f in fields(cls)]
    for key in data:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            raise UserError(
                field=f"{where}.{key}",
                value=data[key],
                allowed=f"keys {', '.join(allowed)}",
                hint=f"did you mean {where}.{near[0]}?" if near else "remove the key",
            )
    try:
        return TypeAdapter(cls).validate_python(dict(data))
    except ValidationError as error:
        # A union reports every branch; the shortest location names the field itself.
        first = min(error.errors(), key=lambda e: len(e["loc"]))
        name = ".".join(str(part) for part in first["loc"][:1])
        kind = next((str(f.type) for f in fields(cls) if f.name == name), "a value")
        raise UserError(
            field=f"{where}.{name}",
            value=data.get(name),
            allowed=_plain(kind),
            hint=f"set {where}.{name}=... ({first['msg'].lower()})",
        ) from error


def _plain(kind: str) -> str:
    """A type annotation in words."""
    words = {"int": "a whole number", "float": "a number", "str": "text", "None": "null", "bool": "true or false"}
    return kind.replace("<class '", "").replace("'>", "") if kind not in words else words[kind]


def _required(cls: type[Any]) -> set[str]:
    return {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}


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
        raise UserError(field=key, value="???", allowed="a value", hint=f"set {key}=... ({reason})") from error


def check(raw: dict[str, Any], typed: Sequence[str] = ()) -> Config:
    """Check a resolved config.

    Args:
        raw: Plain data from :func:`plain`.
        typed: Dotted keys that the user set on the command line.

    Raises:
        UserError: The first thing that is wrong.
    """
    raw = dict(raw)
    unknown = set(raw) - {"model", "task", "method", "search", "runtime", "stages", "experiment"}
    if unknown:
        name = sorted(unknown)[0]
        raise UserError(field=name, value=raw[name], allowed="model, task, method, search, runtime, stages, experiment", hint="remove it")
    for group in ("model", "task", "method", "search", "runtime"):
        if not isinstance(raw.get(group), Mapping):
            raise UserError(
                field=group, value=raw.get(group), allowed="a choice of that group", hint=f"posbench ls {group}s shows the choices"
            )
    if raw["model"].get("path") is None:
        raise UserError(
            field="model.path", value=None, allowed="a local directory or a hub id", hint="posbench model=hf model.path=DIR"
        )
    model = build(ModelConfig, raw["model"], "model")
    task = _instance(raw["task"], Task, "task")
    method_class, fields_ = _target(raw["method"], Method, "method")
    name = fields_.pop("name", method_class.__name__.lower())
    stages = build(_Stages, {"stages": raw.get("stages")}, "run").stages
    pinned = frozenset(key.removeprefix("method.") for key in typed if key.startswith("method."))
    config = Config(
        model=model,
        task=task,
        method_class=method_class,
        method_name=name,
        method_fields=fields_,
        pinned=pinned,
        search=_instance(raw["search"], ChannelSearch, "search"),
        runtime=build(Runtime, raw["runtime"], "runtime"),
        stages=stages,
        experiment=build(Experiment, raw["experiment"], "experiment") if raw.get("experiment") else None,
        raw=raw | {"pinned": sorted(pinned)},
    )
    # What the search will find stands in as a legal value, so that everything else is checked now.
    standin = {"channel": 0, "factor": 1.0, "layers": (0, 0)} if "search" in stages else {}
    config.method({k: v for k, v in standin.items() if config.method_fields.get(k) is None})
    return config


@dataclass(frozen=True)
class _Stages:
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise UserError(
                field="stages", value=[], allowed="some of search, intervene, evaluate, report", hint="set stages=[evaluate,report]"
            )


def _target(data: Mapping[str, Any], kind: type, where: str) -> tuple[type[Any], dict[str, Any]]:
    values = {k: v for k, v in data.items() if k != "_target_"}
    target = data.get("_target_")
    try:
        cls = hydra.utils.get_class(str(target))
    except Exception as error:
        raise UserError(
            field=f"{where}._target_", value=target, allowed="the import path of a class", hint=f"check conf/{where}/*.yaml"
        ) from error
    if not issubclass(cls, kind):
        raise UserError(
            field=f"{where}._target_", value=target, allowed=f"a subclass of {kind.__module__}.{kind.__name__}", hint="see CONTRIBUTING.md"
        )
    return cls, values


def _instance(data: Mapping[str, Any], kind: type, where: str) -> Any:
    cls, values = _target(data, kind, where)
    return build(cls, values, where)


def model_config(name: str, **fields_: Any) -> ModelConfig:
    """Read one file of ``conf/model`` outside a run (``posbench.load("mistral7b")``)."""
    data = OmegaConf.to_container(OmegaConf.load(paths.CONF / "model" / f"{name}.yaml"), resolve=True)
    return build(ModelConfig, {**data, **fields_}, "model")  # type: ignore[dict-item]
