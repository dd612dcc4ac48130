"""The command line: bare Hydra overrides run; a few verbs look at what is there."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from posbench import __version__, paths, versions
from posbench.errors import UserError, choices, from_hydra, near

HELP = """posbench finds, explains and removes position bias in language models.

  posbench                                            the embedded tiny model: search, intervene, evaluate, report
  posbench task=kv_retrieval model=mistral7b method=scale_channel
  posbench model=llama2_13b runtime=gpu runtime.device_map=auto    shard a big model over the GPUs of this machine
  posbench model=hf model.path=DIR stages=[search]    find the channel of your own checkpoint
  posbench method=[layer_scaling,scale_channel]       methods one inside the other; keys: method.parts.scale_channel.factor=0
  posbench -m method.factor=1,0.5,0,-0.5,-1           sweep; ends with one summary table and one figure
  posbench study=rollout                              an analysis beside the benchmark: what happens inside the model
  posbench experiment=yu2025_fig6                     one figure or table of a paper

  posbench ls [models|methods|tasks|searches|studies|runtimes|experiments|families] [--config-dir DIR]
  posbench fetch [OVERRIDES] [--dry-run]              list and download all that a config needs; later runs need no network
  posbench validate [OVERRIDES]                       compose and check configs, run nothing
  posbench report DIR                                 redraw the figures and report.html of a run or a sweep
  posbench rescore DIR                                score saved outputs again, without a model

Every key of conf/ can be overridden as key=value; `--cfg job` prints the composed config, `--config-dir DIR` adds your own
YAML files, `--hydra-help` lists Hydra's own flags. Runs go to outputs/<task>/vNNN/<model>__<method>__<hash>; the same
command resumes. Exit status: 0 done, 1 some rows failed (run again to retry them), 2 something to mend.
"""

TASK_COLUMNS = ("version", "metric", "size", "source", "licence")
GROUPS = {
    "models": "model",
    "methods": "method",
    "tasks": "task",
    "searches": "search",
    "studies": "study",
    "runtimes": "runtime",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    verbs: dict[str, Callable[[list[str]], int]] = {
        "ls": _ls,
        "fetch": _fetch,
        "validate": _validate,
        "report": _report,
        "rescore": _rescore,
    }
    try:
        if args and args[0] in ("-h", "--help", "help"):
            print(HELP)
            return 0
        if args and args[0] == "--version":
            print(f"posbench {__version__}")
            return 0
        versions.check()
        if args and args[0] in verbs:
            return verbs[args[0]](args[1:])

        def job(config: Any) -> None:
            _job(config, shlex.join(["posbench", *args]))

        return _hydra(args, job)
    except UserError as error:
        print(f"posbench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("posbench: stopped; the same command resumes", file=sys.stderr)
        return 130


# Hydra


def _hydra(args: list[str], task: Callable[[Any], None]) -> int:
    """Compose the config from the arguments and hand it to ``task``, once or once per sweep job."""
    import hydra
    import yaml
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    status: list[int] = []
    known = _known_flags(args)
    config_name, flags, overrides = _experiment(known)
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR"), os.environ.get("POSBENCH_SWEEP")
    with tempfile.TemporaryDirectory(prefix="posbench-sweep-") as sweep:
        # Hydra would print a traceback and exit 1 on its own; with this it raises and the message is ours.
        os.environ |= {"HYDRA_FULL_ERROR": "1", "POSBENCH_SWEEP": sweep}
        # Its parser refuses an override that follows a flag and its value: overrides go last.
        overrides = composed(overrides, Path(sweep) / "conf", known.config_dir)
        sys.argv = ["posbench", *(a for a in args if a not in known.overrides), *flags, *overrides]
        try:
            GlobalHydra.instance().clear()
            hydra.main(version_base="1.3", config_path=str(paths.CONF), config_name=config_name)(task)()
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise from_hydra(error, known.overrides, known.config_dir) from error
        except SystemExit as end:
            # --help and the like print and leave.
            return int(end.code or 0)
        finally:
            GlobalHydra.instance().clear()
            sys.argv = before[0]
            for name, value in zip(("HYDRA_FULL_ERROR", "POSBENCH_SWEEP"), before[1:], strict=True):
                os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
        jobs = [json.loads(p.read_text()) for p in sorted(Path(sweep).glob("job-*.json"))]
        status = [job["status"] for job in jobs]
        if len(jobs) > 1 or any(job["multirun"] for job in jobs):
            from posbench.report.sweep import summarise

            summarise(jobs, Console())
    return max(status, default=0)


def _known_flags(args: list[str]) -> Any:
    """Hydra's own reading of the arguments, where every complaint is one line instead of its usage text."""
    from hydra._internal.utils import get_args_parser

    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint):
            known, unknown = get_args_parser().parse_known_intermixed_args(
                [a for a in args if a != "--version"]
            )
    except SystemExit as error:
        reason = complaint.getvalue().strip().splitlines()[-1].split("error: ")[-1]
        raise UserError("flag", " ".join(args), "Hydra's flags", f"posbench --help ({reason})") from error
    modes = [known.run, known.multirun, known.cfg, known.info, known.shell_completion]
    if unknown:
        raise UserError("flag", unknown[0], "key=value and Hydra's flags", "posbench --help")
    if (
        sum(map(bool, modes)) > 1
        or known.experimental_rerun
        or (known.resolve and not (known.cfg or known.help))
    ):
        raise UserError(
            "flag",
            " ".join(args),
            "one of -m, --cfg job [--resolve], --info",
            "to run again, repeat the command",
        )
    return known


def _experiment(known: Any) -> tuple[str, list[str], list[str]]:
    """``experiment=NAME`` makes that file the primary config: its name, further flags, and the other
    overrides."""
    names = [o.removeprefix("experiment=") for o in known.overrides if o.startswith("experiment=")]
    rest = [o for o in known.overrides if not o.startswith("experiment=")]
    if not names:
        return "config", [], rest
    if not (paths.EXPERIMENTS / f"{names[-1]}.yaml").is_file():
        there = choices(paths.EXPERIMENTS)
        hint = near(names[-1], there, "posbench ls experiments")
        raise UserError("experiment", names[-1], ", ".join(there) or "none yet", hint)
    # The last --config-dir wins, so the user's own goes on the search path.
    own = [f"hydra.searchpath=[file://{Path(known.config_dir).absolute()}]"] if known.config_dir else []
    return names[-1], ["--config-dir", str(paths.EXPERIMENTS)], [*rest, *own]


def composed(overrides: Sequence[str], folder: Path, config_dir: str | None = None) -> list[str]:
    """Overrides in which each ``method=[a,b]``, also among the values of a sweep, names a YAML written to
    ``folder``.

    Args:
        overrides: As typed.
        folder: Receives ``method/a-b.yaml``; it joins Hydra's search path.
        config_dir: The user's own config folder.

    Raises:
        UserError: A list names no method, an unknown one, or one of them twice.
    """
    there = choices(*(root / "method" for root in (paths.CONF, *([Path(config_dir)] if config_dir else []))))

    def write(match: re.Match[str]) -> str:
        names = [name.strip() for name in match[1].split(",")]
        for number, name in enumerate(names):
            if name not in there or name in names[:number]:
                raise UserError(
                    "method",
                    match[0],
                    f"a list of different ones of: {', '.join(there)}",
                    near(name, there, "write method=[layer_scaling,scale_channel]"),
                )
        whole = "-".join(names)
        lines = ["defaults:", *(f"  - {name}@parts.{name}" for name in names), "  - _self_"]
        lines += ["_target_: posbench.methods.composed.Composed", f"name: {whole}"]
        (folder / "method").mkdir(parents=True, exist_ok=True)
        (folder / "method" / f"{whole}.yaml").write_text("\n".join(lines) + "\n")
        return whole

    found = [re.sub(r"\[([^\[\]]*)\]", write, o) if o.startswith("method=") else o for o in overrides]
    if found == list(overrides):
        return found
    path = "hydra.searchpath=["
    others = next((o.removeprefix(path) for o in found if o.startswith(path)), "]")
    return [
        *(o for o in found if not o.startswith(path)),
        f"{path}file://{folder}{',' if others != ']' else ''}{others}",
    ]


def _job(config: Any, command: str) -> None:
    """One run: everything that can go wrong ends as a status, so that a sweep goes on."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from posbench.pipeline import config as configs
    from posbench.pipeline.execute import execute
    from posbench.run.base import IncompleteRun

    hydra_config = HydraConfig.get()
    typed = _typed()
    multirun = hydra_config.mode == RunMode.MULTIRUN
    number = OmegaConf.select(hydra_config, "job.num", default=0, throw_on_missing=False) or 0
    record: dict[str, Any] = {"overrides": typed, "multirun": multirun, "folder": None, "status": 0}
    try:
        checked = configs.check(configs.plain(config), _keys(typed))
        record["folder"] = str(execute(checked, command=command, console=Console()))
    except IncompleteRun as error:
        print(f"posbench: {error}", file=sys.stderr)
        record["status"] = 1
    except UserError as error:
        print(f"posbench: {error}", file=sys.stderr)
        record["status"] = 2
    except Exception:
        if not multirun:
            raise
        # One job's defect must not stop the others of a sweep.
        logging.exception("%s", " ".join(typed))
        record["status"] = 1
    finally:
        Path(os.environ["POSBENCH_SWEEP"], f"job-{number:05d}.json").write_text(json.dumps(record))


def _typed() -> list[str]:
    """The overrides of this job as the user typed them."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    # A typed ${...} must not be resolved here, where it has no neighbours.
    return [str(o) for o in OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)]  # type: ignore[union-attr]


def _keys(typed: list[str]) -> list[str]:
    return [o.split("=", 1)[0].lstrip("+~") for o in typed]


# Verbs


def _ls(args: list[str]) -> int:
    kinds = [*GROUPS, "experiments", "families"]
    own: list[Path] = []
    if "--config-dir" in args[:-1]:
        at = args.index("--config-dir")
        own, args = [Path(args[at + 1])], args[:at] + args[at + 2 :]
    if len(args) > 1 or (args and args[0] not in kinds):
        raise UserError("ls", " ".join(args), ", ".join(kinds), "posbench ls models")
    for kind in args or kinds:
        if kind == "families":
            _ls_families()
            continue
        folders = (
            [paths.EXPERIMENTS]
            if kind == "experiments"
            else [root / GROUPS[kind] for root in (paths.CONF, *own)]
        )
        table = Table(title=kind, title_justify="left", box=None, pad_edge=False)
        columns = TASK_COLUMNS if kind == "tasks" else ()
        for column in ("name", *columns, *(() if columns else ("what",))):
            table.add_column(column, no_wrap=column in ("name", "metric"), overflow="fold")
        for name in choices(*folders):
            file = next(f / f"{name}.yaml" for f in folders if (f / f"{name}.yaml").is_file())
            table.add_row(name, *(_task_facts(file) if columns else [_about(file)]))
        Console().print(table)
    return 0


def _task_facts(file: Path) -> list[str]:
    """What a task's class says of itself."""
    import yaml

    from posbench.pipeline.config import target
    from posbench.tasks import Task

    cls, _ = target(yaml.safe_load(file.read_text()) or {}, Task, "task")
    return [str(getattr(cls, column)) for column in TASK_COLUMNS]


def _ls_families() -> None:
    from posbench.model.families import FAMILIES

    table = Table(
        "name", "model_type", "positions", title="families", title_justify="left", box=None, pad_edge=False
    )
    for family in FAMILIES:
        table.add_row(family.name, ", ".join(family.model_types), family.position)
    Console().print(table)


def _about(file: Path) -> str:
    """The first comment of a YAML, or its title, source or path."""
    import yaml

    text = file.read_text()
    lines = list(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()))
    comment = (
        " ".join(line.lstrip("# ") for line in lines)
        .replace("et al. ", "et al.\0")
        .split(". ")[0]
        .replace("\0", " ")
        .rstrip(".")
    )
    data = yaml.safe_load(text) or {}
    experiment = data.get("experiment") or {}
    return str(experiment.get("title") or comment or data.get("path") or "")


def _fetch(args: list[str]) -> int:
    from posbench.files import sources
    from posbench.pipeline import config as configs

    needed: list[sources.Source] = []
    problems: list[UserError] = []

    def collect(config: Any) -> None:
        # A sweep's jobs share most of what they need; what one lacks must not hide what the others do.
        try:
            needed.extend(configs.needs(configs.plain(config)))
        except UserError as error:
            problems.append(error)

    _hydra([a for a in args if a != "--dry-run"], collect)
    if problems:
        raise problems[0]
    if needed:
        sources.fetch(needed, dry_run="--dry-run" in args, console=Console())
    return 0


def _validate(args: list[str]) -> int:
    from posbench.pipeline import config as configs

    if args:
        jobs = [args]
    else:
        jobs = [[f"{group}={name}"] for group in GROUPS.values() for name in choices(paths.CONF / group)]
        jobs += [[f"experiment={name}"] for name in choices(paths.EXPERIMENTS)]
    status = 0
    for job in jobs:
        job = (
            [*job, "model.path=."]
            if "model=hf" in job and not any(a.startswith("model.path=") for a in job)
            else job
        )
        # A model without published constants is a model to search on.
        job = [*job, "stages=[search]"] if job[0].startswith("model=") and not args else job
        # The settings of a search can be checked without the method that it serves.
        job = [*job, "stages=[evaluate]"] if job[0].startswith("search=") and not args else job
        problems: list[str] = []

        def check(config: Any) -> None:
            try:
                configs.check(configs.plain(config), _keys(_typed()))
            except UserError as error:
                problems.append(str(error))  # noqa: B023

        try:
            _hydra(job, check)
        except UserError as error:
            problems.append(str(error))
        print(f"{'ok  ' if not problems else 'BAD '} {shlex.join(job)}")
        for problem in problems:
            print(f"posbench: {problem}", file=sys.stderr)
            status = 2
    return status


def _folder(verb: str, args: list[str]) -> Path:
    if len(args) != 1:
        raise UserError(verb, " ".join(args), "one folder", f"posbench {verb} DIR")
    return Path(args[0]).expanduser()


def _report(args: list[str]) -> int:
    from posbench.report import page as report
    from posbench.run.folder import open_run

    folder = _folder("report", args)
    if not (folder / "summary.csv").is_file():
        open_run(folder)
    page = report.render_sweep(folder) if (folder / "summary.csv").is_file() else report.render_run(folder)
    print(page)
    return 0


def _rescore(args: list[str]) -> int:
    import yaml

    from posbench.pipeline import config as configs
    from posbench.pipeline.stages import evaluate
    from posbench.report import page as report
    from posbench.run.folder import open_run, owned

    run = open_run(_folder("rescore", args))
    raw = yaml.safe_load((run.path / "config.yaml").read_text())
    if all("error" in row for row in run.rows(evaluate.FILE)):
        raise UserError("DIR", str(run.path), "a run that evaluated", "add evaluate to its stages")
    with owned(run.path):
        changed = evaluate.rescore(configs.check({k: v for k, v in raw.items() if k != "pinned"}), run)
    print(f"{changed} of {len(run.rows(evaluate.FILE))} scores changed; {report.render_run(run.path)}")
    return 0


def run() -> None:
    """Entry point of the ``posbench`` command."""
    sys.exit(main())


if __name__ == "__main__":
    run()
