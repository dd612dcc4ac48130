"""``posbench diagnose``: one model, one answer."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from posbench.cli.options import option
from posbench.diagnose.course import DEFAULT_BUDGET, Course
from posbench.diagnose.page import lines, write_diagnosis
from posbench.files.atomic import short_hash
from posbench.report.console import make_console
from posbench.run.budget import Budget


def diagnose(args: list[str]) -> int:
    """Tell whether a model has a position bias, of what shape, where from, what helps, and what it costs.

    usage: posbench diagnose [model=DIR|ID|NAME] [budget=10min] [OVERRIDES] [--config-dir DIR]

      model     a checkpoint's folder, a hub id, or a name of `posbench ls models`; a served model with
                model=endpoint model.base_url=URL
      budget    a time (10min unless said): a diagnosis asks as much as it needs, and no more than fits
      OVERRIDES as a run has them: task=nq_multidoc task.path=FILE asks about documents

    A pilot makes the task easier or harder where it shows nothing; questions at five positions are asked until the
    shape is decided; interventions look for the source; the methods race on calibration prompts, and the winner is
    asked held-back questions. Every part is an ordinary run, and the same command resumes. Writes one page, one JSON
    file and one SVG badge into outputs/diagnose/.

    example: posbench diagnose model=smollm2 budget=10min
    """
    typed_budget, args = option(args, "budget")
    budget = Budget.parse(typed_budget or DEFAULT_BUDGET)
    console = make_console()
    course = Course(args, budget, console)
    diagnosis = course.run()
    folder = _folder(course, args)
    command = shlex.join(["posbench", "diagnose", *args, f"budget={budget.text}"])
    page = write_diagnosis(diagnosis, folder, command)
    console.rule(f"diagnosis of {diagnosis.model}")
    for line in lines(diagnosis):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(f"report: {page}", soft_wrap=True, markup=False, highlight=False)
    return 0


def _folder(course: Course, args: list[str]) -> Path:
    """Where the files of a diagnosis go: one folder for each set of overrides."""
    outputs = Path(course.config.runtime.outputs).expanduser()
    model = re.sub(r"[^\w.-]", "-", course.diagnosis.model)
    name = f"{model}__{course.diagnosis.task}__{short_hash(sorted(args))}"
    return outputs / "diagnose" / name
