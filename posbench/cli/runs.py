"""``posbench ls runs`` and ``compare``: find runs again, and put some side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from posbench.cli.options import flag, option
from posbench.errors import UserError, near
from posbench.report import index
from posbench.report.console import (
    Record,
    is_read_by_program,
    make_console,
    show_glance,
    show_link,
    show_lists,
    show_next,
)
from posbench.run.folder import find_run


def split_outputs(args: Sequence[str]) -> tuple[Path, list[str]]:
    """The folder that ``--outputs`` names, and the remaining arguments."""
    folder, remaining = option(args, "--outputs")
    return Path(folder or "outputs").expanduser(), remaining


def figure_formats(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``--format NAME,NAME`` from arguments: formats in which figures are wanted, too.

    Args:
        args: Arguments of a verb.

    Returns:
        The formats, none where the option is absent, and the remaining arguments.

    Raises:
        UserError: posbench draws no such format.
    """
    from posbench.plots.base import FORMATS

    value, remaining = option(args, "--format")
    formats = value.split(",") if value is not None else []
    for name in formats:
        if name not in FORMATS:
            hint = near(name, FORMATS, "--format pdf")
            raise UserError("--format", name, ", ".join(FORMATS), hint)
    return formats, remaining


def ls_runs(args: list[str]) -> int:
    """List the runs of an outputs folder, newest first.

    usage: posbench ls runs [FILTERS] [--outputs DIR] [--json] [--config-dir DIR]

    A filter is ``column=value`` (run, folder, model, task, method, study, state), ``key=value`` of a
    setting, with ``*`` for anything, or a word of a row. A run has one line: its hash, what ran, the settings
    in which it differs from runs of the same kind, the verdict that its page begins with, score and position
    bias of the method in % and points with 95 % intervals where there is room, and age. A run that is not done
    has its state in place of the verdict: running, killed, failed, incomplete (some rows failed), mixed (a file
    changed under it), damaged. The last line is the command to run next: after the newest run, or, where that is
    fixed, after the fixed one with the least bias. A pipe gets TSV with all numbers.

    example: posbench ls runs model=tiny task.pairs=12 state=done
    """
    outputs, remaining = split_outputs(args)
    as_json, filters = flag(remaining, "--json")
    check_flags(filters, "--outputs DIR, --json", "ls runs")
    records: list[Record] = []
    # A default folder that does not exist is no mistake: nothing ran yet.
    if outputs.exists() or outputs.name != "outputs":
        records = index.records(outputs, filters)
    if not records:
        condition = f" that passes {' '.join(filters)}" if filters else ""
        hint = ""
        if filters and outputs.is_dir():
            hint = index.suggest_filter(filters, index.records(outputs))
        print(f"posbench: no run in {outputs}{condition}{hint}", file=sys.stderr)
    console = make_console()
    if not (as_json or is_read_by_program(console)):
        # As a title of the table it would break where the table ends.
        console.print(index.list_title(records), style="italic")
        if records:
            table = index.run_table(records, console.width)
            console.print(table)
            legend, step = index.legend(table, records), index.next_step(records)
            if legend:
                console.print(legend)
            if step:
                show_next(console, step)
    else:
        show_lists({index.list_title(records): records}, as_json)
    return 0


def check_flags(args: Sequence[str], allowed: str, verb: str) -> None:
    """Refuse arguments that are unknown flags.

    Args:
        args: Arguments of a verb, without the flags that it knows.
        allowed: Those flags.
        verb: The verb.

    Raises:
        UserError: One of them begins with a dash.
    """
    for arg in args:
        if arg.startswith("-"):
            raise UserError("flag", arg, allowed, f"posbench {verb} --help")


def compare(args: list[str]) -> int:
    """Put runs side by side: a table, a figure of their scores over the gold position, and a page.

    usage: posbench compare RUN RUN... [--out FOLDER] [--format pdf,png] [--outputs DIR] [--json] [--config-dir DIR]

    A run is its folder, or the hash that ``posbench ls runs`` prints. Differences are those from the first
    run, paired by prompt where one run asked all that the other did, with 95 % intervals over questions;
    unpaired ones are said to be. FOLDER, or ``compare/`` in the outputs, gets ``comparison.csv``, the figure,
    which --format draws in further formats, and a page with the verdict and links to the runs. A pipe gets TSV
    with all numbers. Runs with classes of your own find these in the folder that they record, or in that of
    --config-dir.

    example: posbench compare 51cc60e3 d172d1d1
    """
    from posbench.report.compare import terminal_rows, write_comparison
    from posbench.report.glance import comparison_glance

    outputs, remaining = split_outputs(args)
    out, remaining = option(remaining, "--out")
    formats, remaining = figure_formats(remaining)
    as_json, names = flag(remaining, "--json")
    check_flags(
        names, "--out FOLDER, --format pdf,png, --outputs DIR, --json", "compare"
    )
    folders = [find_run(name, outputs) for name in names]
    destination = Path(out).expanduser() if out else None
    files, lines, messages = write_comparison(folders, destination, formats)
    title = "differences are from the first run; in % and points, [95 % interval]"
    show_lists({title: lines}, as_json, terminal_rows)
    for message in messages:
        print(message, file=sys.stderr)
    glance = comparison_glance(lines, folders)
    # stdout is the table, for other programs.
    console = make_console(is_error=True)
    show_glance(console, glance)
    for file in files:
        show_link(console, file.stem, file)
    return 0
