"""``posbench view``: one page over all runs below a folder."""

from __future__ import annotations

from pathlib import Path

from rich.style import Style
from rich.text import Text

from posbench.errors import UserError
from posbench.report.console import make_console
from posbench.report.view import write_view
from posbench.stats.glance import noun_for


def view(args: list[str]) -> int:
    """Write one page over all runs below a folder, a row each, and print where it is.

    usage: posbench view [FOLDER] [--config-dir DIR]

      FOLDER            outputs of runs, or those of one experiment or task; outputs unless said
      --config-dir DIR  your own classes, where these are no longer in the folder that a run records

    The page, index.html in the folder, lists hash, what ran, verdict, score, position bias and age, filters rows by
    words, and links every run's own page. It is written from files alone, and nothing is opened.

    example: posbench view outputs
    """
    if len(args) > 1 or any(arg.startswith("-") for arg in args):
        hint = "posbench view outputs"
        raise UserError("view", " ".join(args), "one folder", hint)
    folder = Path(args[0] if args else "outputs").expanduser()
    page, num_runs = write_view(folder)
    address = page.absolute().as_uri()
    console = make_console()
    line = Text(f"{num_runs} {noun_for(num_runs, 'run')}: ")
    line.append(address, Style(link=address))
    console.print(line, soft_wrap=True, highlight=False)
    return 0
