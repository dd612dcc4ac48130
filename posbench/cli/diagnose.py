"""``posbench diagnose``: one model, one answer."""

from __future__ import annotations

from posbench.cli.options import option
from posbench.diagnose.allowance import DEFAULT_BUDGET
from posbench.diagnose.course import Course
from posbench.diagnose.page import glance, lines, write_diagnosis
from posbench.files.secrets import command_line
from posbench.pipeline.arguments import URL, read_flags, with_address
from posbench.report.console import make_console, show_glance, show_link
from posbench.run.budget import Budget, Stopwatch


def diagnose(args: list[str], watch: Stopwatch | None = None) -> int:
    """Tell whether a model has a position bias, of what shape, where from, what helps, and what it costs.

    usage: posbench diagnose [MODEL|URL] [budget=10min] [OVERRIDES] [--yes] [--config-dir DIR]

      MODEL     a checkpoint's folder, a hub id, or a name of `posbench ls models`, as model=MODEL has it
      URL       the address of a server, as model.base_url=URL has it; with MODEL its checkpoint, which is looked into
      budget    an upper limit: 10min unless said, 500prompts, 3Mtok, or 2usd with model.price=[IN,OUT]
      OVERRIDES as a run has them: task=nq_multidoc task.path=FILE asks about documents
      --yes     asks a server without asking you first

    A pilot makes the task easier or harder where it shows nothing; questions at all positions are asked until the
    shape is decided; interventions look for the source; the methods race on calibration prompts, and the winner is
    asked held-back questions. A server shows the shape alone. Every part is an ordinary run, and the same command
    resumes. Writes one page, one JSON file and one SVG badge into outputs/diagnose/.

    example: posbench diagnose model=smollm2 budget=10min
    """
    typed_budget, args = option(args, "budget")
    # Words without a dash: an address or a model's name lacks its key.
    positional = read_flags(args).overrides
    args = [_as_override(arg) if arg in positional else arg for arg in args]
    budget = Budget.parse(typed_budget or DEFAULT_BUDGET)
    console = make_console()
    course = Course(args, budget, console, watch)
    course.run()
    diagnosis = course.diagnosis
    # The page's command is for others, who answer for themselves whether a server may be asked.
    typed = [arg for arg in args if not arg.startswith("runtime.yes=")]
    command = command_line(["diagnose", *typed, f"budget={budget.text}"])
    page = write_diagnosis(diagnosis, course.folder, command)
    console.rule(f"diagnosis of {diagnosis.model}")
    for line in lines(diagnosis):
        console.print(line)
    show_glance(console, glance(diagnosis))
    show_link(console, "report", page)
    return 0


def _as_override(arg: str) -> str:
    """An argument as typed, or with the key that a bare address or model name lacks."""
    is_bare = "=" not in arg or URL.fullmatch(arg)
    return with_address(f"model={arg}" if is_bare else arg)
