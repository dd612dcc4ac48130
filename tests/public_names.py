"""The public names of posbench, one a line; ``python -m tests.public_names`` writes them to ``FILE``.

A line is a kind and a name: ``verb compare --out``, ``key task.limit of KVRetrieval``, ``column metrics.csv n``.
"""

from __future__ import annotations

import ast
import csv
import dataclasses
import inspect
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, get_args

import yaml

from posbench import paths
from posbench.cli import completion, ls, main
from posbench.errors import MachineError, UserError, choices
from posbench.model.load import ModelConfig
from posbench.pipeline.arguments import TOP
from posbench.pipeline.config import STAGES, Experiment
from posbench.pipeline.jobs import JobState
from posbench.report.summaries import ListedState
from posbench.run.folder import State
from posbench.run.runtime import Cluster, Runtime
from posbench.schema import resolve_target
from posbench.stats.findings import FINDING_COLUMNS, Kind, Verdict
from posbench.stats.reference import Reference

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "data" / "public_names.txt"
DOCUMENTS = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
SWEEP = """
    -m method.factor=0,-1 task.limit=4 task.max_new_tokens=1 search=exhaustive search.layers=null
    search.strings=24 search.length=48 search.window=6 search.skip=2 search.factors=[0.0]
    task.calibration_examples=8 runtime.intervene_examples=4 runtime.resamples=100
    stages=[search,intervene,evaluate]
"""


def public_names() -> set[str]:
    """All names that are known within seconds."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            *verb_names(),
            *config_names(),
            *state_names(),
            *python_names(),
            *run_names(Path(folder)),
        }


def verb_names() -> Iterator[str]:
    """Verbs, their flags, and the words that they take."""
    yield from ("verb -m", "verb --multirun", "verb --cfg", "verb --config-dir")
    yield "verb --yes"
    for verb in main.VERBS:
        yield f"verb {verb}"
        text = main.usage(main.find_verb(verb)).partition("\n\nexample:")[0]
        for flag in re.findall(r"(?<!\S)\[?(--?[a-z][a-z-]*)", text):
            yield f"verb {verb} {flag}"
    for verb, module in {"ls": ls, "completion": completion}.items():
        yield from (f"verb {verb} {word}" for word in module.CHOICES)


def config_names() -> Iterator[str]:
    """Choices of the config, and keys with the class that has them."""
    for key in TOP:
        yield f"key {key}"
    for stage in STAGES:
        yield f"choice stages={stage}"
    for experiment in choices(*paths.group_folders("experiment")):
        yield f"choice experiment={experiment}"
    plain: dict[str, type[Any]] = {
        "model": ModelConfig,
        "runtime": Runtime,
        "runtime.cluster": Cluster,
        "experiment": Experiment,
        "experiment.reference": Reference,
    }
    for group, cls in plain.items():
        yield from (f"key {group}.{field.name}" for field in dataclasses.fields(cls))
    for group in (*paths.GROUPS, "runtime/cluster"):
        for name in choices(*paths.group_folders(group)):
            yield f"choice {group}={name}"
            text = paths.find_choice(group, name).read_text()
            # A choice without a class is another one's variant.
            if "_target_" in text and group != "model":
                cls, _ = resolve_target(yaml.safe_load(text), object, group)
                for field in dataclasses.fields(cls):
                    yield f"key {group}.{field.name} of {cls.__name__}"


def state_names() -> Iterator[str]:
    """What status.json, lists and findings say of a run or a claim, and exit statuses."""
    kinds = {
        "status.json": State,
        "ls runs": ListedState,
        "jobs": JobState,
        "findings.csv verdict": Verdict,
        "findings.csv kind": Kind,
    }
    for place, words in kinds.items():
        yield from (f"state {place}: {word}" for word in get_args(words))
    yield from (f"column findings.csv {column}" for column in FINDING_COLUMNS)
    for number in re.findall(r"\b\d+\b", main.HELP.partition("Exit status:")[2]):
        yield f"exit {number}"
    yield f"exit {UserError.status} UserError"
    yield f"exit {MachineError.status} MachineError"


def run_names(folder: Path) -> Iterator[str]:
    """Files of a sweep and its runs, with their columns; columns of lists and comparisons."""
    outputs = f"runtime.outputs={folder}"
    call(*SWEEP.split(), "runtime.threads=1", outputs)
    runs = sorted(file.parent for file in folder.glob("*/v*/*/config.yaml"))
    sweep = next(folder.glob("*/v*/sweep__*"))
    compared = folder / "compare"
    call("compare", *map(str, runs), "--out", str(compared))
    for place in (*runs, sweep, compared):
        for file in place.iterdir():
            yield from file_names(file)
    lists = {"ls": call("ls", "--json")}
    lists["ls runs"] = call("ls", "runs", "--json", "--outputs", str(folder))
    for verb, text in lists.items():
        found = json.loads(text)
        records = {"": found} if isinstance(found, list) else found
        for kind, rows in records.items():
            for row in rows:
                yield from (
                    f"column {verb} {kind} {key}".replace("  ", " ") for key in row
                )


def file_names(file: Path) -> Iterator[str]:
    """A file, with the columns of a table and the keys of JSON objects."""
    yield f"file {file.name}"
    columns: list[str] = []
    if file.suffix == ".csv":
        with open(file, newline="") as lines:
            columns = next(csv.reader(lines))
    elif file.suffix == ".jsonl":
        for line in file.read_text().splitlines():
            columns += json.loads(line)
    elif file.suffix == ".json" and file.name != "jobs.json":
        columns = list(json.loads(file.read_text()))
    yield from (f"column {file.name} {column}" for column in columns)


def call(*args: str) -> str:
    """What a command line prints."""
    with redirect_stdout(StringIO()) as out:
        status = main.main(args)
    assert status == 0, args
    return out.getvalue()


def python_names() -> Iterator[str]:
    """What docs/api.md, the other pages and the examples import."""
    for name in {*documented(), *imported()}:
        thing = resolve(name)
        if thing is not None and not inspect.ismodule(thing):
            yield f"python {name}"


def documented() -> Iterator[str]:
    """Dotted names in documents, and those of docs/api.md."""
    for file in DOCUMENTS:
        text = file.read_text()
        yield from re.findall(r"`(posbench(?:\.\w+)+)`", text)
        for module, names in re.findall(
            r"from (posbench[\w.]*) import ([\w, ]+)", text
        ):
            yield from (f"{module}.{name}" for name in re.findall(r"\w+", names))
    api = (ROOT / "docs" / "api.md").read_text()
    for kind, name, options in re.findall(
        r"\.\. auto(\w+):: (\S+)\n((?:   :.*\n)*)", api
    ):
        yield name
        if kind == "module":
            listed = re.findall(r"\w+", options.replace(":members:", ""))
            module = import_module(name)
            own = [
                key
                for key, value in vars(module).items()
                if getattr(value, "__module__", "") == name and not key.startswith("_")
            ]
            yield from (f"{name}.{member}" for member in listed or own)


def imported() -> Iterator[str]:
    """What the examples import of posbench, and what they use of the modules that they import."""
    for file in EXAMPLES:
        tree = ast.parse(file.read_text())
        modules: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(
                "posbench"
            ):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    modules[alias.asname or alias.name] = name
                    yield name
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id=name)) if name in modules:
                    if inspect.ismodule(resolve(modules[name])):
                        yield f"{modules[name]}.{node.attr}"


def resolve(name: str) -> Any:
    """The object of a dotted name; None where there is none."""
    module, _, attribute = name.rpartition(".")
    try:
        return import_module(name)
    except (ImportError, ValueError):
        pass
    if not module:
        return None
    return getattr(resolve(module), attribute, None)


def listed() -> set[str]:
    """The names in the file."""
    return set(FILE.read_text().splitlines())


def write() -> None:
    """Write the file, and print what it listed before and does no more."""
    names = public_names()
    for line in sorted(listed() - names):
        print(f"gone: {line}", file=sys.stderr)
    FILE.write_text("\n".join(sorted(names)) + "\n")


if __name__ == "__main__":
    write()
