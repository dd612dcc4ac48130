"""``posbench export`` and ``verify``: a fix as files that others load."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from rich.text import Text

from posbench import paths, versions
from posbench.cli.options import option
from posbench.cli.runs import outputs_of
from posbench.errors import UserError
from posbench.export import base, write
from posbench.export.write import Told
from posbench.files import sources
from posbench.files.digests import contents, sha256
from posbench.methods.base import Method
from posbench.model.load import load, reader
from posbench.pipeline.compose import composed
from posbench.pipeline.config import Config, check
from posbench.pipeline.identity import need_same
from posbench.pipeline.prepare import build_run, prepare, silence_transformers
from posbench.report.console import terminal
from posbench.report.folder import read_json, read_text
from posbench.report.index import run_named
from posbench.run.base import Run
from posbench.run.folder import PROVENANCE, checked
from posbench.search import deploy, held_back
from posbench.search.base import FOUND


def export(args: list[str]) -> int:
    """Write a run's fix so that others can load it: a checkpoint, an adapter, or code.

    usage: posbench export RUN --to FORMAT --out DIR [--exact]
           posbench export OVERRIDES --to FORMAT --out DIR [--exact]

      RUN           a run, its folder or hash, with what its search found
      OVERRIDES     model=... method=..., as a run has them
      --to FORMAT   checkpoint    weights, or a config alone, for every engine
                    lora          an adapter for PEFT, vLLM and others
                    gguf          the whole model, for llama.cpp and what is built on it
                    gguf-lora     an adapter for these
                    transformers  weights with a file of code, for methods that do not fold
                    vllm-plugin   a package for vLLM (layer_scaling)
      --out DIR     a new folder
      --exact       refuse what does not fold as it is

    What folds into weights scales the attention of all tokens. A method for the last token alone is written
    as that twin, and what it costs is measured on the calibration prompts, printed, and put on the model
    card. The files are loaded again and held against the method in process; beyond the tolerance nothing is
    left.

    example: posbench export 1a2b3c4d --to lora --out fix
    """
    outputs, rest = outputs_of(args)
    to, rest = option(rest, "--to")
    out, rest = option(rest, "--out")
    exact = "--exact" in rest
    rest = [arg for arg in rest if arg != "--exact"]
    if to is None or out is None or not rest:
        raise UserError(
            "export",
            " ".join(args),
            "a run, --to FORMAT and --out DIR",
            "posbench export --help",
        )
    form = base.find(to)
    console = terminal()
    place = Path(out).expanduser()
    write.need_room(place)
    made = (
        _of_run(run_named(rest[0], outputs))
        if "=" not in rest[0]
        else (_of(rest), "", "", "")
    )
    config, gain, known, source = made
    silence_transformers()
    run = build_run(config, console)
    asked = run.method.build()
    asked.check(run.lm)
    method = _written(form, run, asked, exact)
    fix = _fix(run, method)
    form.check(fix)
    if price := write.price_of(run, asked, method) if method != asked else known:
        console.print(Text(price), soft_wrap=True)
    told = Told(
        command=shlex.join(["posbench", "export", *args]),
        raw=_recorded(config, fix),
        source=source or run.method.origin().get("source", ""),
        gain=gain,
        price=price,
        effects=write.effects_of(outputs, run.model.name, run.task.name, asdict(asked)),
        base=[content.fact for content in contents([config.model.checkpoint])],
        versions={
            "posbench": versions.__version__,
            **_versions("torch", "transformers", form.package),
        },
    )
    measured = write.write(form, fix, told, write.prompts_of(run), place)
    console.print(Text(measured.words), soft_wrap=True)
    console.print(
        Text(f"{place}: how to load it stands in {place / write.CARD}"), soft_wrap=True
    )
    return 0


def verify(args: list[str]) -> int:
    """Load what `posbench export` wrote and hold it against the method in process again.

    usage: posbench verify DIR

    The files must be those that were written, and the model that they belong to must be on this machine. The
    exit status is 2 where they differ from the method by more than the tolerance.

    example: posbench verify fix
    """
    folder = Path(args[0]).expanduser() if len(args) == 1 else Path()
    record = read_json(folder / write.RECORD)
    if record is None:
        allowed = f"a folder of posbench export (it holds {write.RECORD})"
        raise UserError(
            "DIR", " ".join(args), allowed, "posbench export RUN --to FORMAT --out DIR"
        )
    for name, wanted in record["files"].items():
        if not (folder / name).is_file() or sha256(folder / name) != wanted:
            hint = f"write it again: {record['command']}"
            raise UserError(
                "DIR", str(folder / name), "the file as posbench export wrote it", hint
            )
    form = base.find(record["format"])
    config = _checked(record["raw"])
    need_same([config.model.checkpoint], {"files": record["base"]})
    silence_transformers()
    run = build_run(config, terminal())
    fix = _fix(run, run.method.build())
    measured = base.measure(form, fix, folder, write.prompts_of(run))
    write.need(measured, form, fix)
    print(measured.words)
    return 0


def _versions(*packages: str) -> dict[str, str]:
    return {name: version(name) for name in packages if name}


def _of(overrides: list[str]) -> Config:
    """The config that overrides ask for, without a search; sizes fit the model's window."""
    for key in overrides:
        if key.split("=")[0].split(".")[0] in (
            "search",
            "stages",
            "study",
            "experiment",
        ):
            hint = "run that first, then posbench export RUN"
            raise UserError(
                "export", key, "keys of model, method, task and runtime", hint
            )
    return prepare(composed(*overrides, "stages=[evaluate]"), download=False).config


def _of_run(folder: Path) -> tuple[Config, str, str, str]:
    """The config of a run with the constants that it applied; what its search gained, the price of what it
    found for a format, and where that comes from, in words."""
    out = checked(folder)
    raw = out.config("task", "model", "method")
    found = {}
    if (folder / FOUND).is_file():
        found = yaml.safe_load(read_text(folder / FOUND))
    ran = read_json(folder / "method.json")
    if ran is None:
        ran = (
            {"parts": found}
            if "parts" in raw["method"]
            else found.get(raw["method"]["name"], {})
        )
    raw = {**raw, "method": _node(raw["method"], ran)}
    block: dict[str, Any] = next((b for b in found.values()), {})
    gain = held_back.words(block["held_back"]) if "held_back" in block else ""
    config = _checked(raw)
    need_same([config.model.checkpoint], out.facts(PROVENANCE))
    price = deploy.told(block["deploy"]) if "deploy" in block else ""
    return config, gain, price, str(block.get("source", ""))


def _checked(raw: Mapping[str, Any]) -> Config:
    """The config of a run that recorded only the groups which took part in it."""
    kept = {
        key: value for key, value in raw.items() if key not in ("experiment", "study")
    }
    return check({**composed("method=none").raw, **kept, "stages": ["evaluate"]})


def _recorded(config: Config, fix: base.Fix) -> dict[str, Any]:
    """The config with the constants that are written, and with the place of the model from wherever it is
    asked again."""
    raw = {**config.raw, "method": _node(config.raw["method"], asdict(fix.method))}
    if config.model.checkpoint.kind == "path" and not config.model.path.startswith(
        paths.EMBEDDED
    ):
        raw["model"] = {**raw["model"], "path": fix.files}
    return raw


def _node(node: Mapping[str, Any], ran: Mapping[str, Any]) -> dict[str, Any]:
    """A method's config node with the constants that ran."""
    out = {
        k: ran[k] if k in ran and k not in ("name", "_target_", "parts") else v
        for k, v in node.items()
    }
    if "parts" in node:
        parts = ran.get("parts", {})
        out["parts"] = {
            name: _node(part, parts.get(name, {}))
            for name, part in node["parts"].items()
        }
    return json.loads(json.dumps(out))  # type: ignore[no-any-return]


def _written(form: base.Format, run: Run, asked: Method, exact: bool) -> Method:
    """The method as the format holds it: its twin where the format folds and it does not."""
    if not form.folds or asked.folded(run.lm) is not None:
        return asked
    twin = asked.twin()
    if exact and twin.folded(run.lm) is not None:
        allowed = f"a format that holds the method as it is; {form.name} scales the attention of all tokens"
        raise UserError(
            "--exact", form.name, allowed, "--to transformers, or leave --exact out"
        )
    return twin


def _fix(run: Run, method: Method) -> base.Fix:
    """A method on the model of a run."""
    config = run.model
    if config.rope == "none":
        allowed = (
            "checkpoint: other engines would rotate what this setting leaves alone"
        )
        raise UserError(
            "model.rope", config.rope, allowed, "take a model whose own config says it"
        )
    files = str(Path(sources.local(config.checkpoint)).resolve())
    dtype = str(reader(config).facts.get_text_config().dtype or "float32").removeprefix(
        "torch."
    )
    place = {
        name: getattr(run.runtime, name)
        for name in ("device", "device_map", "max_memory")
    }
    hub = config.checkpoint.kind == "model"
    again = partial(load, config, **place)
    return base.Fix(run.lm, method, config.path if hub else files, again, dtype, files)
