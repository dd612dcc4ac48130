"""``posbench push``: send the tables, figures and page of a run to a tracker or to the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from posbench.cli.options import option
from posbench.cli.runs import split_outputs
from posbench.errors import MachineError, UserError, near
from posbench.late import hub_errors, pd
from posbench.run.folder import find_run, open_undamaged
from posbench.versions import install_hint

PROJECT = "posbench"
"""Project of a tracker, unless another one is typed."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""Name of a repository on the hub, with its owner."""


class SentFiles(NamedTuple):
    """The files of a run that are sent, and nothing else of it."""

    folder: Path
    tables: list[Path]
    figures: list[Path]
    page: Path

    def names(self) -> list[str]:
        """All paths, relative to the run's folder."""
        files = [*self.tables, *self.figures, self.page]
        return [file.relative_to(self.folder).as_posix() for file in files]


def push(args: list[str]) -> int:
    """Send the tables, the figures and the page of a run to a tracker, or to a data set on the Hugging Face hub.

    usage: posbench push RUN --to trackio|wandb|hub [--project NAME] [--outputs DIR]

      RUN             a finished run or a sweep, its folder or hash
      --to trackio    Trackio, on this machine unless its own variables name a server or a Space
           wandb      Weights & Biases, as its own variables say (WANDB_API_KEY, WANDB_MODE)
           hub        a private data set; a folder for each run
      --project NAME  of a tracker, posbench unless typed; of the hub OWNER/NAME, which is needed

    Nothing else is sent: no config, no row of predictions.jsonl, nothing about this machine beyond what the page
    says. The page shows the settings, and some questions with their replies. trackio and wandb come with pip
    install 'positionbench[push]'.

    example: posbench push 1a2b3c4d --to hub --project my-org/position-bias
    """
    outputs, remaining = split_outputs(args)
    target, remaining = option(remaining, "--to")
    project, remaining = option(remaining, "--project")
    if target is None or len(remaining) != 1 or remaining[0].startswith("-"):
        allowed = f"one run, and --to {', '.join(TARGETS)}"
        raise UserError("push", " ".join(args), allowed, "posbench push --help")
    if target not in TARGETS:
        hint = near(target, list(TARGETS), "posbench push --help")
        raise UserError("--to", target, ", ".join(TARGETS), hint)
    files = files_to_send(find_run(remaining[0], outputs))
    TARGETS[target](target, files, project)
    num_tables, num_figures = len(files.tables), len(files.figures)
    what = f"{num_tables} tables, {num_figures} figures and the page of {files.folder.name}"
    print(f"sent to {target}, project {project or PROJECT}: {what}")
    return 0


def files_to_send(folder: Path) -> SentFiles:
    """The files of a run or a sweep that may be sent.

    Raises:
        UserError: It is no run, is not finished, or its files are damaged.
    """
    run = open_undamaged(folder)
    page = folder / "report.html"
    if not run.done or not page.is_file():
        hint = run.command or "repeat the command that made it"
        raise UserError("RUN", str(folder), "a finished run with its page", hint)
    figures = sorted((folder / "figures").glob("*.svg"))
    return SentFiles(folder, sorted(folder.glob("*.csv")), figures, page)


def _import_package(target: str) -> Any:
    """The package of a target.

    Raises:
        UserError: It is not installed.
    """
    try:
        return import_module(target)
    except ModuleNotFoundError as error:
        allowed = f"a target whose package is installed; no module {error.name}"
        raise UserError("--to", target, allowed, install_hint("push")) from error


def _settings(target: str, tracker: Any) -> dict[str, Any]:
    """Arguments with which a tracker records nothing on its own: neither machine, code nor output."""
    if target == "trackio":
        return {"auto_log_gpu": False, "auto_log_cpu": False}
    settings = tracker.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        save_code=False,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    return {"settings": settings}


def _push_to_tracker(target: str, files: SentFiles, project: str | None) -> None:
    """Log a run to trackio or wandb, whose interfaces are the same.

    Raises:
        UserError: The package is not installed, or refuses.
    """
    tracker = _import_package(target)
    items = {}
    for file in files.tables:
        table = pd.read_csv(file)
        # Neither knows NaN in a cell.
        cells = table.astype(object).where(table.notna(), None)
        items[f"tables/{file.stem}"] = tracker.Table(
            dataframe=cells, allow_mixed_types=True
        )
    for file in [*files.figures, files.page]:
        text = file.read_text(encoding="utf-8")
        name = "page" if file == files.page else f"figures/{file.stem}"
        items[name] = tracker.Html(text, inject=False, data_is_not_path=True)
    settings = _settings(target, tracker)
    try:
        tracker.init(project=project or PROJECT, name=files.folder.name, **settings)
        try:
            tracker.log(items)
        finally:
            tracker.finish()
    except getattr(tracker, "Error", ()) as error:  # wandb's; trackio has none
        allowed = f"a tracker that takes the run: {error}"
        raise UserError("--to", target, allowed, f"{target} login") from error


def _push_to_hub(target: str, files: SentFiles, project: str | None) -> None:
    """Upload a run's files to a data set on the hub, which is private where it is new.

    Raises:
        UserError: There is no name of a data set, or the hub refuses.
        MachineError: The hub does not answer.
    """
    if project is None or not HUB_NAME.fullmatch(project):
        hint = "--project OWNER/NAME"
        raise UserError("--project", project, "a data set with its owner", hint)
    api = import_module("huggingface_hub").HfApi()
    try:
        api.create_repo(project, repo_type="dataset", private=True, exist_ok=True)
        api.upload_folder(
            repo_id=project,
            repo_type="dataset",
            folder_path=files.folder,
            path_in_repo=files.folder.name,
            allow_patterns=files.names(),
            commit_message=f"posbench: {files.folder.name}",
        )
    except (
        hub_errors.HfHubHTTPError,
        hub_errors.LocalTokenNotFoundError,
        ValueError,  # a name that the hub cannot have
    ) as error:
        allowed = f"a data set that your token may write: {error}"
        raise UserError("--project", project, allowed, "hf auth login") from error
    except (OSError, hub_errors.HTTPError) as error:
        allowed = f"a hub that answers: {error}"
        raise MachineError("--to", target, allowed, "try again later") from error


TARGETS: dict[str, Callable[[str, SentFiles, str | None], None]] = {
    "trackio": _push_to_tracker,
    "wandb": _push_to_tracker,
    "hub": _push_to_hub,
}
"""What sends to each target."""
