"""The same jobs on two checkouts, and whether they wrote the same numbers: for changes that must move none.

    python tools/same_numbers.py record /tmp/before                 # with the checkout that is on the path
    PYTHONPATH=../changed python tools/same_numbers.py record /tmp/after
    python tools/same_numbers.py compare /tmp/before /tmp/after [--names names.tsv]

The jobs are every method on the embedded models (RoPE, none, ALiBi), every search, every study that times
nothing, and runs that are sharded, swept, composed and of another weight type. Compared are all
rows and tables byte for byte, but for what differs between any two runs: times, memory, paths, digests of the
code. ``names.tsv`` maps a renamed column or key to its new name, one pair a line.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SMALL_TASK = (
    "task.pairs=12 task.positions=[0,5,11] task.limit=6 task.calibration_pairs=10 "
    "task.calibration_examples=8"
)
SMALL_RUN = "runtime.resamples=100 runtime.intervene_examples=3 runtime.threads=1"
SMALL_CHANNEL = "search.strings=30 search.length=60 search.window=8 search.skip=4"
SMALL_GENETIC = (
    "search.generations=2 search.population=6 search.parents=3 search.mutations=3 "
    "search.crossovers=1"
)
ALL_STAGES = "stages=[search,intervene,evaluate]"
EVALUATE = "stages=[intervene,evaluate]"
STRINGS = "study.strings=40 study.length=80 study.window=8"

METHODS = {
    "none": "",
    "scale_channel": "method.channel=15 method.factor=-0.5 method.layers=[1,2]",
    "position_interpolation": "method.scale=1.5",
    "layer_scaling": "",
    "ms_poe": "",
    "moice": "",
    "attention_buckets": "",
}
WITHOUT_ROPE = ("none", "scale_channel")
SEARCHES = {
    "channel": f"method=scale_channel {SMALL_CHANNEL}",
    "official": f"method=scale_channel {SMALL_CHANNEL}",
    "exhaustive": f"method=scale_channel {SMALL_CHANNEL} search.factors=[0.0]",
    "genetic": f"method=layer_scaling {SMALL_GENETIC}",
    "brute_force": f"method=layer_scaling {SMALL_GENETIC}",
    "gradient": "method=layer_scaling",
    "router": "method=moice",
}
STUDIES = {
    "ablations": SMALL_CHANNEL,
    "attention_to_gold": "study.examples=3",
    "bucket_search": "",
    "causal_mask": "study.draws=40 study.show=[1,2,4,6,7,9,10] study.tokens=12",
    "chain": "study.examples=3 study.hidden_perturbation.texts=4 "
    "study.hidden_perturbation.length=80",
    "channel_subtraction": "study.examples=3",
    "crop_mask": "study.examples=3 study.crossed=true",
    "doubling": "study.examples=3",
    "embedded_model": "study.seeds=[]",
    "gram": "study.samples=20 study.tokens=16",
    "hidden_perturbation": "study.texts=4 study.length=80",
    "layer_selection": SMALL_CHANNEL,
    "masks": "",
    "positional_channels": STRINGS,
    "precision": "study.prompts=8",
    "rollout": "study.prompts=6 study.tokens=32 study.parts=4",
    "rope_curves": "study.prompts=6",
    "score_map": "study.samples=20 study.tokens=16",
    "synthetic_training": "study.iterations=40 study.seeds=1 study.processes=1",
}
OTHERS = {
    "sharded": f"runtime.workers=2 runtime.batch_size=4 {SMALL_TASK} {EVALUATE}",
    "shared": f"task.shared_prefix=true {SMALL_TASK} {EVALUATE}",
    "sweep": f"--multirun model=tiny,tiny_b {SMALL_TASK} {EVALUATE}",
    "perturbed": f"method=[scale_channel,position_interpolation] {SMALL_TASK} {EVALUATE}",
    "float64": f"model.dtype=float64 {SMALL_TASK} {EVALUATE}",
    "long_replies": f"task.max_new_tokens=6 {SMALL_TASK} {EVALUATE}",
}

NOT_COMPARED_FILES = re.compile(
    r"(provenance|status|manifest|version|prompts)\.json$|\.(png|pdf|html|free|lock|svg)$|DONE$"
)
NOT_COMPARED_NAMES = re.compile(
    r"second|time|memory|_ms$|started|finished|digest|sha256|commit|created|folder|path|tokens_per|check$|^run$|^sum$"
)
FOLDER_HASH = re.compile(r"__[0-9a-f]{8}\b")


def all_jobs() -> dict[str, str]:
    """Command lines by the name of their job."""
    jobs = {}
    for model in ("tiny", "tiny_b", "tiny_nope", "tiny_alibi"):
        for method, values in METHODS.items():
            if model in ("tiny_nope", "tiny_alibi") and method not in WITHOUT_ROPE:
                continue
            if method == "moice" and model != "tiny":
                continue  # no trained router ships for it
            task = SMALL_TASK.replace("task.calibration_pairs=10", "")
            if model in ("tiny_nope", "tiny_alibi"):
                task = "task.limit=6 task.positions=[0,7,15]"
            jobs[f"method-{model}-{method}"] = (
                f"model={model} method={method} {values} {task} {EVALUATE}"
            )
    for search, values in SEARCHES.items():
        jobs[f"search-{search}"] = f"search={search} {values} {SMALL_TASK} {ALL_STAGES}"
    for study, values in STUDIES.items():
        jobs[f"study-{study}"] = f"study={study} {values}"
    jobs |= {f"run-{name}": command for name, command in OTHERS.items()}
    return jobs


def record(folder: Path, names: list[str]) -> int:
    """Run jobs, each into its own folder; returns how many ended with a status other than 0."""
    jobs = all_jobs()
    failures = 0
    for name in names or jobs:
        target = folder / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        command = [
            sys.executable,
            "-c",
            "from posbench.cli.main import run; run()",
            *jobs[name].split(),
            *SMALL_RUN.split(),
            f"runtime.outputs={target}/outputs",
        ]
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=target,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        )
        (target / "output.txt").write_text(result.stdout + result.stderr)
        (target / "exit_status.json").write_text(json.dumps(result.returncode))
        if result.returncode:
            failures += 1
            last_line = (result.stdout + result.stderr).strip().rsplit("\n", 1)[-1]
            print(f"{name}: exit status {result.returncode}: {last_line}", flush=True)
    return failures


def tables(folder: Path) -> dict[str, list[str]]:
    """Lines of each file with results below a folder, without what differs between any two runs."""
    contents = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = FOLDER_HASH.sub("", str(file.relative_to(folder)))
        if NOT_COMPARED_FILES.search(name) or ".locks" in name or "worker" in name:
            continue
        if file.suffix == ".csv":
            contents[name] = csv_lines(file.read_text())
        elif file.suffix == ".jsonl":
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            contents[name] = [
                json.dumps(comparable(row), sort_keys=True) for row in rows
            ]
            # Shards and threads append in the order in which they end.
            contents[name].sort()
        elif file.suffix in (".json", ".yaml"):
            lines = FOLDER_HASH.sub("", file.read_text()).splitlines()
            contents[name] = [line for line in lines if " outputs: " not in line]
    return contents


def csv_lines(text: str) -> list[str]:
    """A table as lines, without the columns that are not compared."""
    rows = list(csv.reader(io.StringIO(text)))
    if not rows:
        return []
    columns = [
        index
        for index, name in enumerate(rows[0])
        if not NOT_COMPARED_NAMES.search(name)
    ]
    return [
        ",".join(row[index] for index in columns if index < len(row)) for row in rows
    ]


def comparable(value: Any) -> Any:
    """A JSON value without the keys that are not compared."""
    if isinstance(value, dict):
        return {
            key: comparable(item)
            for key, item in value.items()
            if not NOT_COMPARED_NAMES.search(key)
        }
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return value


def compare(before: Path, after: Path, names: dict[str, str]) -> int:
    """Print each difference between two recordings; returns how many jobs differ."""
    different = 0
    jobs = sorted(path.name for path in after.iterdir() if path.is_dir())
    for job in jobs:
        old = {
            name: renamed(lines, names) for name, lines in tables(before / job).items()
        }
        new = tables(after / job)
        problems = [f"only before: {name}" for name in sorted(set(old) - set(new))]
        problems += [f"only after: {name}" for name in sorted(set(new) - set(old))]
        for name in sorted(set(old) & set(new)):
            if old[name] != new[name]:
                problems.append(f"{name}: {first_difference(old[name], new[name])}")
        if problems:
            different += 1
            print(f"{job}:", *problems, sep="\n  ")
    print(f"{len(jobs)} jobs, {different} differ")
    return different


def renamed(lines: list[str], names: dict[str, str]) -> list[str]:
    """Lines with whole words replaced by their new names."""
    if not names:
        return lines
    words = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    return [words.sub(lambda match: names[match[0]], line) for line in lines]


def first_difference(old: list[str], new: list[str]) -> str:
    """The first line that differs, before and after."""
    if len(old) != len(new):
        return f"{len(old)} lines, {len(new)} after"
    number = next(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
    return f"line {number + 1}\n    - {old[number][:300]}\n    + {new[number][:300]}"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="run the jobs")
    recording.add_argument("folder", type=Path)
    recording.add_argument("jobs", nargs="*", help="all unless some are named")
    comparing = verbs.add_parser("compare", help="compare two recordings")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--names", type=Path, help="renamed columns and keys")
    arguments = parser.parse_args()
    if arguments.verb == "record":
        sys.exit(min(record(arguments.folder.resolve(), arguments.jobs), 1))
    names = {}
    if arguments.names:
        pairs = [line.split("\t") for line in arguments.names.read_text().splitlines()]
        names = dict(pair[:2] for pair in pairs)
    sys.exit(min(compare(arguments.before, arguments.after, names), 1))


if __name__ == "__main__":
    main()
