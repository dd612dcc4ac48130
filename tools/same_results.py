"""The same jobs on two checkouts, and whether they gave the same results: for changes that must move none.

    python tools/same_results.py record /tmp/before --checkout ../before    # the code of that folder
    python tools/same_results.py record /tmp/after                          # the code of this checkout
    python tools/same_results.py compare /tmp/before /tmp/after

The jobs are every method, search, study and task at a small size; runs that are swept, sharded, budgeted, served and
exported; the verbs that read runs, a diagnosis, and experiments of each paper. Studies that measure time or need a GPU
are left out (LEFT_OUT). ``compare`` prints a line for each file that differs, and exits with 1 if there is one; what
may differ is the map from NOT_COMPARED to NOISE_ITSELF. The files that the jobs read come from the tests of this
checkout, whichever code is recorded.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INPUTS = "inputs"
WARM = "warm"
JOB_FILE = "job.json"
COST_FILE = "resources.json"
TEXT_FILE = "output.txt"

# The jobs.

RUN = (
    "runtime.resamples=100 runtime.intervene_examples=3 runtime.threads=1 "
    "runtime.device=cpu runtime.outputs=outputs"
)
"""Added to every command that runs something."""
PLACES = "task.pairs=12 task.positions=[0,5,11] task.limit=6"
KV = f"{PLACES} task.calibration_pairs=10 task.calibration_examples=8"
WORDS = "task.prompt=compact task.records=words"
EVALUATE = "stages=[evaluate]"
INTERVENE = "stages=[intervene,evaluate]"
CHANNEL = "search.strings=30 search.length=60 search.window=8 search.skip=4"
GENETIC = (
    "search.generations=2 search.population=6 search.parents=3 search.mutations=3 "
    "search.crossovers=1"
)
METHODS = {
    "none": "",
    "scale_channel": "method.channel=15 method.factor=-0.5 method.layers=[1,2]",
    "position_interpolation": "method.scale=1.5",
    "layer_scaling": "",
    "ms_poe": "",
    "moice": "",
    "attention_buckets": "",
}
SEARCHES = {
    "channel": f"method=scale_channel {CHANNEL}",
    "official": f"method=scale_channel {CHANNEL} search.length=340 search.strings=6 "
    "search.candidates=all search.top_k=2",
    "exhaustive": f"method=scale_channel {CHANNEL} search.factors=[0.0]",
    "genetic": f"method=layer_scaling {GENETIC}",
    "brute_force": f"method=layer_scaling {GENETIC}",
    "gradient": "method=layer_scaling search.epochs=2 search.samples=64",
    "router": "method=moice search.steps=3 search.batch=16",
}
STUDIES = {
    "ablations": f"{KV} {CHANNEL}",
    "attention_to_gold": f"{KV} study.examples=3",
    "bias_source": f"{KV} study.examples=3",
    "bucket_search": "",
    "causal_mask": "study.draws=40 study.show=[1,2,4,6,7,9,10] study.tokens=12",
    "chain": f"{KV} study.examples=3 study.hidden_perturbation.texts=4 "
    "study.hidden_perturbation.length=80",
    "channel_subtraction": f"{KV} study.examples=3",
    "crop_mask": f"{KV} study.examples=3 study.crossed=true",
    "doubling": f"{KV} study.examples=3",
    "embedded_model": "study.seeds=[]",
    "gram": "study.samples=20 study.tokens=16",
    "hidden_perturbation": "study.texts=4 study.length=80",
    "layer_selection": f"{KV} {CHANNEL}",
    "masks": "",
    "positional_channels": "study.strings=40 study.length=80 study.window=8",
    "precision": f"{KV} study.prompts=8 study.dtypes=[float32]",
    "rollout": "study.prompts=6 study.tokens=32 study.parts=4",
    "rope_curves": f"{KV} study.prompts=6",
    "score_map": "study.samples=20 study.tokens=16",
    "scorers": "study.data={data}/scored",
    "structure": f"{KV} study.examples=3 study.prompts=6",
    "synthetic_training": "study.iterations=40 study.seeds=1 study.processes=1 study.trainings=trainings",
}
LEFT_OUT = {
    "latency": "measures time",
    "throughput": "measures time",
    "search_cost": "measures time",
    "training_speed": "measures time",
    "gpu_check": "needs a GPU",
}
"""Studies that are not recorded. Nor are: half precision on a CPU, whose replies depend on how prompts are batched;
budgets in seconds; launchers of clusters; lm_eval, which downloads its tasks."""
TASKS = (
    "ceval",
    "kv_retrieval",
    "leval_closed",
    "longbench",
    "loogle_timeline_reorder",
    "mmlu",
    "nq_multidoc",
    "own_data",
    "zero_scrolls",
)
OWN_DATA = ("choices", "documents", "items", "long_text")
"""Files of tests/data/own."""
FAMILIES = (
    "llama",
    "mistral-window",
    "qwen3",
    "gemma2",
    "phi3",
    "gpt_neox",
    "mpt",
    "falcon",
    "mixtral",
)
"""Models of tests/models.py, with random weights."""
EXPORTS = {
    "checkpoint": "scale_channel",
    "lora": "scale_channel",
    "gguf": "scale_channel",
    "gguf-lora": "scale_channel",
    "transformers": "scale_channel",
    "vllm-plugin": "layer_scaling",
}
"""Formats, and the method that each is written for."""
EXPERIMENTS = {
    "yu2025_fig6": f"{KV} {INTERVENE}",
    "yu2025_table4": f"{KV} {CHANNEL}",
    "yu2025_table6": f"{KV} {CHANNEL}",
    "lpes_table1_kv": f"{KV} model=tiny",
    "lpes_table8": f"{KV} {GENETIC}",
    "lpes_fig5": f"{KV} study.prompts=6",
    "wu2025_fig2": "study.iterations=20 study.seeds=1 study.processes=1 "
    "'study.conditions=[{{mask: decay, pe: none, depth: 2}}]'",
    "behind_rope_fig2": "study.draws=40 study.tokens=12",
    "behind_rope_fig8": "study.samples=20 study.tokens=16",
}
LISTS = ("models", "tasks", "methods", "searches", "studies", "experiments", "runtimes")


def all_jobs(experiments: Iterable[str]) -> dict[str, list[str]]:
    """Commands of each job by its name; a job has a folder of its own, and its commands run in order.

    ``{data}`` stands for tests/data, ``{inputs}`` for files that the tests make, ``{url}`` for a server of the tests,
    ``{run}`` and ``{runs}`` for the first run that the job's earlier commands left, and for all.
    """
    jobs = {
        f"method-{name}": [f"method={name} {values} {KV} {INTERVENE}"]
        for name, values in METHODS.items()
    }
    for model in ("tiny_nope", "tiny_alibi"):
        values = METHODS["scale_channel"]
        jobs[f"method-{model}"] = [f"model={model} {values} {PLACES} {INTERVENE}"]
    for name, values in SEARCHES.items():
        stages = "stages=[search,intervene,evaluate]"
        jobs[f"search-{name}"] = [f"search={name} {values} {KV} {stages}"]
    for name, values in STUDIES.items():
        jobs[f"study-{name}"] = [f"study={name} {values}"]
    together = "study=synthetic_results study.trainings=trainings"
    jobs["study-synthetic_training"].append(together)
    reader = "model=hf model.path={inputs}/llama model.name=llama"
    channel = "method.channel=3 method.factor=-1 method.layers=[0,1]"
    for name in TASKS:
        files = f"task={name} task.max_new_tokens=4 {{{name}}}"
        jobs[f"task-{name}"] = [f"{reader} {files} {channel} {INTERVENE}"]
    for name in OWN_DATA:
        file = f"{{data}}/own/{name}.jsonl"
        scaled = "method=position_interpolation method.scale=1.5"
        jobs[f"own-{name}"] = [
            f"check-data {file}",
            f"{reader} task=own_data task.path={file} task.max_new_tokens=4 {scaled} {EVALUATE}",
        ]
    for name in FAMILIES:
        family = f"model=hf model.path={{inputs}}/{name} model.name={name}"
        small = f"{PLACES} {WORDS} task.limit=3 task.max_new_tokens=4"
        jobs[f"family-{name}"] = [f"{family} {small} {channel} {INTERVENE}"]
    for name, method in EXPORTS.items():
        small = "task.limit=4 task.calibration_examples=12"
        jobs[f"export-{name}"] = [
            f"export model=tiny method={method} {small} --to {name} --out fix",
            # Needs vLLM.
            *(["verify fix"] if name != "vllm-plugin" else []),
        ]
    for name, values in EXPERIMENTS.items():
        jobs[f"experiment-{name}"] = [f"experiment={name} {values}"]
    jobs["configs"] = [f"--cfg job experiment={name}" for name in experiments]
    jobs["lists"] = [f"ls {what}" for what in LISTS]
    return jobs | other_jobs()


def other_jobs() -> dict[str, list[str]]:
    """Ways to run: swept, with nothing shared, sharded, budgeted, served, diagnosed; and verbs that read runs."""
    every = f"-m method={','.join(METHODS)}"
    asked = f"model.base_url={{url}} model.name=fake runtime.yes=true {EVALUATE}"
    places = "task.positions=[0%,50%,100%]"
    return {
        "sweep-methods": [f"{every} {KV} {INTERVENE}"],
        "sweep-models": [f"-m model=tiny_b,tiny method=layer_scaling {KV} {EVALUATE}"],
        "sweep-factors": [f"-m method.factor=1,0.5,0,-1 {KV} {INTERVENE}"],
        "sweep-last": [f"-m method.last=1,3,all {KV} {EVALUATE}"],
        "sweep-tokens": [f"-m method.tokens=both,last,earlier {KV} {EVALUATE}"],
        "long-replies": [f"{every} {KV} task.max_new_tokens=6 {EVALUATE}"],
        "nothing-shared": [f"{every} {KV} runtime.share=null {EVALUATE}"],
        "small-batches": [
            f"{every} {KV} task.max_new_tokens=3 runtime.batch_size=2 runtime.batch_tokens=256 {EVALUATE}"
        ],
        "small-store": [f"{KV} runtime.share=1MiB runtime.batch_size=4 {EVALUATE}"],
        "float64": [f"{every} {KV} model.dtype=float64 {EVALUATE}"],
        "workers": [f"{KV} runtime.workers=2 runtime.batch_size=4 {INTERVENE}"],
        "composed": [
            f"method=[layer_scaling,scale_channel] {KV} {INTERVENE}",
            f"method=[position_interpolation,ms_poe] method.parts.position_interpolation.scale=1.5 {KV} {INTERVENE}",
        ],
        "budget": [
            f"budget=60prompts {places}",
            f"budget=2ktok {PLACES} {EVALUATE}",
            f"budget=500prompts search=channel {CHANNEL} {KV} stages=[search]",
        ],
        "until-decided": [
            f"runtime.until=decided runtime.round_questions=10 {PLACES} task.limit=60 {EVALUATE}"
        ],
        "served": [
            f"{asked} {WORDS} {PLACES} model.api=completions model.concurrency=1",
            f"{asked} {WORDS} {PLACES} model.api=chat model.concurrency=3",
        ],
        "served-choices": [
            f"{asked} task=own_data task.path={{data}}/own/choices.jsonl model.api=completions"
        ],
        "served-budget": [
            f"{asked} {WORDS} {PLACES} task.limit=40 budget=20ktok model.concurrency=1"
        ],
        "diagnose": [f"diagnose model=tiny {places} task.limit=20 budget=600prompts"],
        "diagnose-served": [
            f"diagnose {{url}} {WORDS} task.pairs=8 {places} budget=300prompts --yes model.concurrency=1"
        ],
        "verbs": [
            f"{KV} {EVALUATE}",
            f"method=layer_scaling {KV} {EVALUATE}",
            "compare {runs} --out compared",
            "show {run} --all",
            "audit {run} --share 1",
            "rescore {run}",
            f"validate {KV} method=ms_poe",
        ],
        "refused": [
            "study=rollot",
            "task.limit=many",
            "method=ms_poe model=tiny_alibi",
            "study=rollout method=scale_channel",
        ],
    }


# The map: what is compared, and how far it may differ.

NOT_COMPARED = re.compile(
    r"(^|/)(provenance|status|manifest|version|resources|posbench_export)\.json$|(^|/)DONE$"
    r"|\.(png|pdf|svg|html|lock|free|pt|log)$|(^|/)\."
)
"""Files about when and by what a run was made, and drawings and pages of tables that are compared themselves."""
DROPPED_COLUMNS = re.compile(
    r"second|(^|_)time|memory|resident|_ms$|started|finished|digest|sha256|commit|created|folder|(^|_)path$|tokens_per|^roots"
    r"|^(run|runs|sum|request|computation|hardware|git|posbench|command|versions?|overrides|outputs)$"
)
"""Columns and keys of times, memory and places, and digests of settings, code and rows."""
DROPPED_LINES = re.compile(
    r"elapsed|^time: |^run: |^report: |^next: |computed, the others shared|^loading |^\s*$|^ *outputs: "
)
"""Lines of a command's output, or of a config, about progress, time and places."""
GROWS = re.compile(r"(^|/)config\.yaml$|^configs/output\.txt$")
"""Configs: each line must still be there, in the same order; others may come between."""
NEVER_MOVES = re.compile(
    r"(^|/)(predictions\.jsonl|(metrics|subsets|summary)\.csv|(prompts|method|jobs|job)\.json)$"
)
"""Files in which rounding may move no number, but those of CHOICES: replies, scores, and what follows from them."""
CHOICES = "loglikelihoods"
TOLERANCE = 2e-5
"""How far rounding may move a number with a decimal point in the other files, as a share of the largest number of its
column. Texts and whole numbers never move, decimals inside of a text by one unit of their last digit."""
NOISE_ITSELF = {
    "study-precision": re.compile("error|drift|difference|largest|max|mean|median")
}
"""Columns that hold rounding errors, by job: they are not compared."""

FOLDER_HASH = re.compile(r"__[0-9a-f]{8}\b")
HASH = re.compile(r"(?<![.\w])(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{8,64}\b")
PORT = re.compile(r"127\.0\.0\.1[:_]\d+")
MODULE = re.compile(
    r"\b(?:posbench|yu2025|lpes|wu2025|behind_rope)(?:\.\w+)+\.(?=[A-Z])"
)
DURATION = re.compile(r"\b\d[\d.,]* ?(?:ms|s|seconds?|min|minutes?|h)\b")
DECIMAL = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?|-?\d+e[+-]?\d+")


# Recording.


class Places(dict[str, str]):
    """Values of placeholders; others stay as they are."""

    def __missing__(self, name: str) -> str:
        """The placeholder itself."""
        return f"{{{name}}}"


def record(arguments: argparse.Namespace) -> int:
    """Run jobs, each in a process and a folder of its own; return how many raised an exception."""
    folder = arguments.folder.resolve()
    checkout = arguments.checkout.resolve()
    os.environ |= {
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "400",
    }
    sys.path.insert(0, str(ROOT))
    import tests  # noqa: F401, of this checkout

    sys.path[0] = str(checkout)
    import posbench

    assert Path(posbench.__file__).is_relative_to(checkout), posbench.__file__
    experiments = sorted(
        file.stem
        for file in (checkout / "experiments").rglob("*.yaml")
        if re.search("^experiment:", file.read_text(), re.MULTILINE)
    )
    jobs = all_jobs(experiments)
    words = set(re.findall(r"\w+", repr(jobs))) | set(LEFT_OUT)
    for group in ("method", "search", "study", "task"):
        for file in sorted((checkout / "conf" / group).glob("*.yaml")):
            if file.stem not in words:
                print(f"in no job: {group}={file.stem}")
    names = arguments.only or list(jobs)
    if not set(names) <= set(jobs):
        sys.exit(f"no such job: {', '.join(sorted(set(names) - set(jobs)))}")
    shutil.rmtree(folder / INPUTS, ignore_errors=True)
    places = make_inputs(folder / INPUTS)
    places["checkout"] = str(checkout)
    warm_up(folder / WARM)
    running: dict[int, str] = {}
    failures = 0
    while names or running:
        while names and len(running) < arguments.jobs:
            name, *names = names
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir()
            child = os.fork()
            if not child:
                run_job(folder / name, jobs[name], places, arguments.also)
            running[child] = name
        child, status, usage = os.wait4(-1, 0)
        seconds = round(usage.ru_utime + usage.ru_stime, 1)
        name = running.pop(child)
        (folder / name / COST_FILE).write_text(json.dumps({"cpu": seconds}))
        statuses = json.loads((folder / name / JOB_FILE).read_text())["status"]
        print(f"{name}: {seconds} CPU-s, exit status {statuses}", flush=True)
        failures += status != 0
    return failures


def make_inputs(folder: Path) -> Places:
    """Write the files that jobs read, and return the values of the placeholders that name them."""
    from tests.cli.task_files import TASKS as FILES
    from tests.models import build

    tokenizer = byte_tokenizer()
    for name in FAMILIES:
        model = build(name)
        model.config.eos_token_id = model.generation_config.eos_token_id = 1
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    places = Places(data=str(ROOT / "tests" / "data"), inputs=str(folder))
    for name in TASKS:
        make, _ = FILES[name]
        (folder / "tasks" / name).mkdir(parents=True)
        places[name] = shlex.join(make(folder / "tasks" / name))
    return places


def byte_tokenizer() -> Any:
    """A tokenizer with one token for each byte, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {t: i for i, t in enumerate(["<s>", "</s>", *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<s>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"
        "[assistant]"
    )
    return tokenizer


def warm_up(folder: Path) -> None:
    """Run once in this process: the jobs' processes then have all modules."""
    from contextlib import redirect_stderr, redirect_stdout

    import torch
    from matplotlib.figure import Figure

    from posbench.cli.main import main

    torch.set_num_threads(1)
    # Drawings are not compared, and would take most of the time.
    draw = Figure.savefig

    def draw_blank(figure: Any, file: Any, **settings: Any) -> None:
        draw(Figure((1, 1)), file, **settings | {"dpi": 10})

    Figure.savefig = draw_blank  # type: ignore[assignment,method-assign]
    said = io.StringIO()
    command = f"{KV} {RUN} stages=[intervene,evaluate,report] runtime.outputs={folder}"
    with redirect_stdout(said), redirect_stderr(said):
        status = main(shlex.split(command))
    assert status == 0, said.getvalue()
    shutil.rmtree(folder)


def run_job(
    folder: Path, commands: Sequence[str], places: Places, also: Sequence[str]
) -> None:
    """Run commands in this process, whose end it is; their output and exit statuses go to files of the folder."""
    os.chdir(folder)
    output = os.open(TEXT_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    statuses: list[int] = []
    failed = True
    try:
        with server_if(any("{url}" in command for command in commands)) as url:
            for command in commands:
                statuses.append(call(command, Places(places, url=url), also))
        failed = False
    except BaseException:  # noqa: BLE001, the process ends here whatever happened
        traceback.print_exc()
    finally:
        roots = {str(folder): "JOB", str(folder.parent): "RECORDING"}
        roots |= {places["checkout"]: "CHECKOUT", str(ROOT): "CHECKOUT"}
        facts = {"status": statuses, "roots": roots}
        Path(JOB_FILE).write_text(json.dumps(facts))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)


def call(command: str, places: Places, also: Sequence[str]) -> int:
    """Exit status of a command."""
    from posbench.cli.main import main

    runs = sorted(
        (file.parent for file in Path("outputs").glob("*/v*/*/predictions.jsonl")),
        key=lambda run: (run / "config.yaml").stat().st_mtime_ns,
    )
    places |= {"run": str(runs[0]) if runs else "", "runs": " ".join(map(str, runs))}
    words = shlex.split(command.format_map(places))
    if "=" in words[0] or words[0] in ("-m", "diagnose", "validate"):
        words += [*RUN.split(), *also]
    print(f"$ {command}", flush=True)
    return main(words)


@contextmanager
def server_if(needed: bool) -> Iterator[str]:
    """The address of a server of the tests that answers key-value questions, every fourth one wrong."""
    if not needed:
        yield ""
        return
    from tests.server import Server

    server = Server(lambda prompt, n: "", ("echo",))
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server.url


# Comparing.

Cell = tuple[str, str]
"""A column, or a path of keys in JSON, and what stands there."""


@dataclass
class Comparison:
    """What is found between two recordings.

    Attributes:
        differences: A line for each file that differs.
        moved: A line for each column that rounding moved.
    """

    differences: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)

    def compare_jobs(self, before: Path, after: Path) -> None:
        """Compare a job's folders; either may be missing."""
        old = files_of(before)
        new = files_of(after)
        for name in sorted(set(old) - set(new)):
            self.differences.append(f"{before.name}: {name}: only before")
        for name in sorted(set(new) - set(old)):
            self.differences.append(f"{before.name}: {name}: only after")
        for name in sorted(set(old) & set(new)):
            self.compare_files(
                before.name, name, rows_of(old[name], before), rows_of(new[name], after)
            )

    def compare_files(
        self, job: str, name: str, old: list[list[Cell]], new: list[list[Cell]]
    ) -> None:
        """Compare the rows of a file."""
        where = f"{job}: {name}"
        if GROWS.search(f"{job}/{name}"):
            lost = first_missing(old, new)
            if lost:
                self.differences.append(f"{where}: lost or changed: {lost}")
            return
        if len(old) != len(new):
            self.differences.append(f"{where}: {len(old)} rows, then {len(new)}")
            return
        noise = NOISE_ITSELF.get(job)
        scales = column_scales([*old, *new])
        moved: dict[str, list[float]] = defaultdict(list)
        changes = []
        for number, (row, other) in enumerate(zip(old, new, strict=True), 1):
            if [column for column, _ in row] != [column for column, _ in other]:
                changes.append(f"row {number}: other columns or keys")
                continue
            for (column, value), (_, changed) in zip(row, other, strict=True):
                if value == changed or (noise and noise.search(column)):
                    continue
                may_move = not NEVER_MOVES.search(name) or CHOICES in column
                share = distance(value, changed, scales.get(column, 0.0))
                if may_move and share is not None and share <= TOLERANCE:
                    moved[column].append(share)
                else:
                    shown = f"{value[:200]!r}, then {changed[:200]!r}"
                    changes.append(f"row {number}, {column}: {shown}")
        if changes:
            more = f" (and {len(changes) - 1} more)" if changes[1:] else ""
            self.differences.append(f"{where}: {changes[0]}{more}")
        for column, shares in moved.items():
            largest = f"by up to {max(shares):.1e} of the largest"
            self.moved.append(f"{where}: {column}: {len(shares)} moved, {largest}")


def files_of(job: Path) -> dict[str, Path]:
    """The files of a job that are compared, by names without hashes and ports.

    Folders whose names are then the same are numbered in the order of their configs.
    """
    names: dict[Path, str] = {job: ""}
    for folder in sorted(
        (p for p in job.rglob("*") if p.is_dir()), key=lambda p: len(p.parts)
    ):
        alike = [
            other
            for other in folder.parent.iterdir()
            if other.is_dir() and plain_name(other.name) == plain_name(folder.name)
        ]
        alike.sort(key=lambda other: (settings_of(other), other.name))
        number = f"#{alike.index(folder) + 1}" if alike[1:] else ""
        names[folder] = f"{names[folder.parent]}{plain_name(folder.name)}{number}/"
    return {
        name: file
        for file in sorted(job.rglob("*"))
        if file.is_file()
        and not NOT_COMPARED.search(
            name := f"{names[file.parent]}{plain_name(file.name)}"
        )
    }


def plain_name(name: str) -> str:
    """The name of a file or folder without hash and port."""
    return PORT.sub("SERVER", FOLDER_HASH.sub("", name))


def settings_of(folder: Path) -> list[str]:
    """The compared lines of a run's config; none where there is none."""
    file = folder / "config.yaml"
    return lines_of(file, folder) if file.is_file() else []


def text_of(file: Path, job: Path) -> str:
    """The text of a file of a job, without its places, the hashes of run folders, and ports."""
    text = file.read_text(errors="backslashreplace")
    facts = job / JOB_FILE
    if facts.is_file():
        for root, name in json.loads(facts.read_text())["roots"].items():
            text = text.replace(root, name)
    return plain_name(text)


def lines_of(file: Path, job: Path) -> list[str]:
    """The compared lines of a file of plain text."""
    text = MODULE.sub("", HASH.sub("HASH", text_of(file, job)))
    if file.name == TEXT_FILE:
        text = DURATION.sub("TIME", text)
    return [line for line in text.splitlines() if not DROPPED_LINES.search(line)]


def rows_of(file: Path, job: Path) -> list[list[Cell]]:
    """The rows of a file: of a table its lines, of JSON its values, of a text its lines, else a digest."""
    if file.suffix == ".csv":
        header, *rows = csv.reader(io.StringIO(text_of(file, job), newline=""))
        # A table without rows has columns, too.
        table = [list(zip(header, row, strict=True)) for row in [header, *rows]]
        return [[cell for cell in row if is_compared(cell[0])] for row in table]
    if file.suffix in (".json", ".jsonl"):
        text = text_of(file, job)
        parts = text.strip().split("\n") if file.suffix == ".jsonl" else [text]
        return [list(leaves(json.loads(part))) for part in parts]
    if file.suffix in (".safetensors", ".gguf"):
        return [[("sha256", hashlib.sha256(file.read_bytes()).hexdigest())]]
    return [[("text", line)] for line in lines_of(file, job)]


def is_compared(column: str) -> bool:
    """Whether a column or key is."""
    return not DROPPED_COLUMNS.search(column)


def leaves(value: Any, path: str = "") -> Iterator[Cell]:
    """The values of JSON, each with its path of keys; the index in a list is none."""
    if isinstance(value, dict):
        for key, item in sorted(value.items()):
            if is_compared(key):
                yield from leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item, f"{path}[]")
    else:
        yield path, value if isinstance(value, str) else json.dumps(value)


def column_scales(rows: Iterable[list[Cell]]) -> dict[str, float]:
    """The largest absolute number with a decimal point in each column."""
    scales: dict[str, float] = defaultdict(float)
    for row in rows:
        for column, value in row:
            if DECIMAL.fullmatch(value):
                scales[column] = max(scales[column], abs(float(value)))
    return scales


def distance(old: str, new: str, scale: float) -> float | None:
    """How far a number moved, as a share of a scale; None where more changed than a number with a decimal point.

    Of decimals inside of a text it is 0 where each moved by one unit of its last digit at most.
    """
    if DECIMAL.fullmatch(old) and DECIMAL.fullmatch(new):
        return abs(float(old) - float(new)) / scale if scale else None
    if DECIMAL.sub("", old) != DECIMAL.sub("", new):
        return None
    pairs = zip(DECIMAL.findall(old), DECIMAL.findall(new), strict=True)
    return 0.0 if all(is_last_digit(a, b) for a, b in pairs) else None


def is_last_digit(old: str, new: str) -> bool:
    """Whether two numbers are one unit of their last digit apart, or less."""
    unit = 10.0 ** -min(len(n.partition(".")[2].partition("e")[0]) for n in (old, new))
    exponent = max(float(f"1e{n.partition('e')[2] or 0}") for n in (old, new))
    return abs(float(old) - float(new)) <= 1.01 * unit * exponent


def first_missing(old: list[list[Cell]], new: list[list[Cell]]) -> str:
    """The first line that is not among the later ones in the order that it had; empty if all are."""
    remaining = iter(new)
    for row in old:
        if row not in remaining:  # reads on to the next one that is equal
            return row[0][1]
    return ""


def compare(before: Path, after: Path) -> Comparison:
    """Compare all jobs of two recordings."""
    found = Comparison()
    folders = [path for root in (before, after) for path in root.iterdir()]
    for name in sorted({path.name for path in folders if path.is_dir()}):
        missing = [str(root) for root in (before, after) if not (root / name).is_dir()]
        if missing:
            found.differences.append(f"{name}: not in {missing[0]}")
        else:
            found.compare_jobs(before / name, after / name)
    return found


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="run the jobs")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--checkout", type=Path, default=ROOT, help="whose code")
    recording.add_argument("--only", nargs="+", metavar="NAME", help="these jobs")
    recording.add_argument("--jobs", type=int, default=1, help="processes at a time")
    recording.add_argument(
        "--also",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="settings of all runs: with other batches, compare shows what rounding moves",
    )
    comparing = verbs.add_parser("compare", help="compare two recordings")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "record":
        sys.exit(min(record(arguments), 1))
    found = compare(arguments.before, arguments.after)
    for line in (*found.moved, *found.differences):
        print(line)
    print(f"{len(found.differences)} differences, {len(found.moved)} moved by rounding")
    sys.exit(min(len(found.differences), 1))


if __name__ == "__main__":
    main()
