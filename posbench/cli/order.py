"""``posbench order``: which order of the retrieved documents, how many, said twice? Measured on a log of your own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from posbench.cli.options import flag, option
from posbench.errors import UserError
from posbench.files.atomic import short_hash, write_json
from posbench.files.secrets import command_line
from posbench.pipeline.arguments import folder_name, read_flags
from posbench.pipeline.budget import check_budget
from posbench.pipeline.compose import compose
from posbench.pipeline.config import Config
from posbench.pipeline.execute import execute
from posbench.pipeline.prepare import prepare
from posbench.plots.section import Section
from posbench.report.console import make_console, show_glance, show_link
from posbench.report.explorer import questions_section
from posbench.report.folder import read_json, study_tables
from posbench.report.links import link_to_parents
from posbench.report.page import write_page
from posbench.report.policies import POLICY_HEADER, policy_rows, verdict_words
from posbench.report.terminal import show_table
from posbench.run.budget import Budget, Stopwatch
from posbench.run.folder import open_run_dir
from posbench.schema import override_text
from posbench.stats.bootstrap import with_interval
from posbench.stats.glance import Glance, Number, Tone, sentence_case
from posbench.stats.policies import CANNOT_DO, LEAVE, USE
from posbench.studies.order import AS_RETRIEVED, NO_REFERENCES, VERDICT_FILE, OrderStudy

PAIRED = (
    "Differences are paired with the prompts as they were retrieved, on the questions that both answered. Their "
    "intervals hold for all policies at once, also for one that was asked fewer questions; those of accuracies hold "
    "for one alone."
)
"""What the differences and their intervals are."""


def order(args: list[str], watch: Stopwatch | None = None) -> int:
    """Tell which order and number of retrieved documents serves a model best, on a log of your own questions.

    usage: posbench order LOG model=NAME|DIR|URL [references=FILE] [budget=10min] [OVERRIDES] [--json] [--yes]

      LOG         a retrieval log: of LangChain, LlamaIndex, Haystack, ragas, OpenInference, promptfoo, BEIR, or plain
                  JSON lines, CSV, parquet; docs/own_data.md lists the shapes
      model       the model that answers; an address as model=http://HOST:8000/v1
      references  the right answers, where the log holds only what the model said: CSV or JSON lines
      budget      an upper limit of time, tokens or money: 10min, 3Mtok, 2usd with model.price=[IN,OUT]
      OVERRIDES   study.policies=[reversed,documents_twice], study.vote=true, task.limit=100, any key of a run
      --json      prints order.json in place of the summary

    Every policy answers the same questions. Policies that are surely worse drop out after a few rounds, and the winner
    is checked on questions that the race did not see. The verdict is use, leave, cannot tell, or cannot do the task.
    Writes order.json, policies.csv and a page into outputs/order/; the same command resumes.

    example: posbench order my_log.jsonl model=http://localhost:8000/v1 references=answers.csv
    """
    as_json, args = flag(args, "--json")
    typed_budget, args = option(args, "budget")
    references, args = option(args, "references")
    positional = [a for a in read_flags(args).overrides if "=" not in a]
    if len(positional) != 1:
        hint = "posbench order my_log.jsonl model=smollm2"
        raise UserError("order", " ".join(positional), "one log, then keys", hint)
    (log,) = positional
    rest = [arg for arg in args if arg != log]
    overrides = ["study=order", "task=retrieval_log", f"task.path={override_text(log)}"]
    if references:
        overrides.append(f"task.references={override_text(references)}")
    overrides += rest
    if not any(a.startswith(("model=", "model.")) for a in rest):
        hint = "posbench ls models; or model=http://HOST:8000/v1"
        raise UserError("model", None, "the model that answers", hint)
    budget = Budget.parse(typed_budget) if typed_budget else None
    if budget and budget.prompts:
        allowed = "a time; at a server also tokens or money"
        raise UserError("budget", budget.text, allowed, "set budget=10min")
    console = make_console(is_error=as_json)
    typed = [
        a for a in args if a not in (log, "--yes") and not a.startswith("runtime.yes")
    ]
    words = ["order", log, *typed]
    words += [f"references={references}"] if references else []
    words += [f"budget={budget.text}"] if budget else []
    command = command_line(words)
    folder = _run(overrides, budget, command, console, watch)
    target = _target_folder(folder, log, [*typed, references or "", typed_budget or ""])
    facts = _write(folder, target, Path(log).name, command)
    if as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return 0
    console.rule(f"order of {Path(log).name}")
    glance = order_glance(facts)
    console.print(glance.details)
    _show_causes_and_recipe(console, facts)
    ranked = policy_rows([row for row in facts["policies"] if not row["same_as"]])
    show_table(console, [*POLICY_HEADER[:-1], "note"], ranked)
    console.print(PAIRED)
    show_glance(console, glance)
    show_link(console, "report", target / "report.html")
    return 0


def _run(
    overrides: Sequence[str],
    budget: Budget | None,
    command: str,
    console: Console,
    watch: Stopwatch | None,
) -> Path:
    """Make the run of the study; return its folder."""
    jobs = compose(list(overrides)).composed
    if len(jobs) > 1:
        allowed = "one model at a time"
        raise UserError("order", len(jobs), allowed, "posbench order for each")
    prepared = prepare(jobs[0], budget=budget)
    for line in prepared.warnings:
        console.print(line)
    config = replace(prepared.config, budget=budget)
    if budget:
        _need_limit(config, budget)
    return execute(
        config, command=command, console=console, watch=watch, shows_result=False
    )


def _need_limit(config: Config, budget: Budget) -> None:
    """Refuse a budget that would not limit the comparison.

    Raises:
        UserError: Its unit is not counted here.
    """
    if config.model.in_process and not budget.seconds:
        raise UserError("budget", budget.text, "a time", "set budget=10min")
    try:
        check_budget(config)
    except UserError as error:
        hint = error.hint.replace("budget=500prompts", "budget=10min")
        raise UserError(error.field, error.value, error.allowed, hint) from error


def _target_folder(folder: Path, log: str, typed: Sequence[str]) -> Path:
    """Where the files of a comparison go: a folder for each log, model and set of overrides."""
    name = "__".join(
        (
            folder_name(Path(log).stem) or "log",
            folder.name.split("__")[0],
            short_hash([folder.name, *sorted(typed)]),
        )
    )
    # outputs/order/vNNN/run: the results lie beside the versions.
    return folder.parent.parent / name


def _write(folder: Path, target: Path, log: str, command: str) -> dict[str, Any]:
    """Write order.json, the tables and the page of a finished run; return the content of order.json."""
    target.mkdir(parents=True, exist_ok=True)
    tables = study_tables(folder, ["policies", "questions", "ranks"])
    facts = dict(read_json(folder / VERDICT_FILE))
    facts |= {"command": command, "run": str(folder)}
    for name in ("policies", "questions"):
        shutil.copyfile(folder / f"{name}.csv", target / f"{name}.csv")
    drawn = OrderStudy().figures(tables)
    sections = [
        Section(
            "Policies",
            _race_sentence(facts["policies"]),
            POLICY_HEADER,
            policy_rows(facts["policies"]),
            {name: drawn[name] for name in drawn if name == "tokens"},
        ),
        _cause_section(facts, {name: drawn[name] for name in drawn if name == "ranks"}),
        Section("Use it", block=facts["recipe"]),
        Section("How the log was read", block="\n".join(facts["notes"])),
    ]
    filled_sections = [
        section
        for section in sections
        if section.block or section.rows or section.figures
    ]
    questions = questions_section(open_run_dir(folder))
    if questions:
        filled_sections.insert(1, questions)
    write_page(
        target,
        f"{log}: order of the documents",
        order_glance(facts),
        filled_sections,
        [folder.name.split("__")[0]],
        provenance={"command": command, "run": str(folder)},
        runs=[folder],
    )
    write_json(target / VERDICT_FILE, facts)
    link_to_parents([folder])
    return facts


def _cause_section(facts: Mapping[str, Any], figures: Any) -> Section:
    """What became of the questions as retrieved, and what the two probes say."""
    causes = facts["causes"]
    total = sum(causes.values())
    rows = [
        [name, str(count), f"{100 * count / total:.0f}"]
        for name, count in sorted(causes.items(), key=_most_first)
    ]
    texts = []
    for name, text in (
        ("closed_book", "without any document"),
        ("gold_alone", "with the gold documents alone"),
    ):
        probe = facts["probes"].get(name)
        if probe:
            texts.append(
                f"{text} {probe['value']:.1f} % [{probe['ci_low']:.1f}, {probe['ci_high']:.1f}] are right "
                f"(n = {probe['n']})"
            )
    return Section(
        "What an order changes, and what not",
        sentence_case("; ".join(texts)),
        ["as retrieved", "questions", "%"],
        rows,
        figures,
    )


def _race_sentence(policies: Sequence[Mapping[str, Any]]) -> str:
    """Why not all policies answered the same number of questions; empty where they did.

    Args:
        policies: The policies of order.json.
    """
    asked = [row for row in policies if not row["same_as"]]
    texts = []
    if not all(row["in_race"] for row in asked):
        texts.append("Policies that were surely worse dropped out.")
    if len({row["n"] for row in asked if row["in_race"]}) > 1:
        texts.append(
            "The best one and the prompts as retrieved alone were asked the held-back questions, too."
        )
    return " ".join(texts)


def order_glance(facts: Mapping[str, Any]) -> Glance:
    """The first look at a comparison of policies: what to do with the prompt.

    Args:
        facts: Content of order.json, with the ``command``.
    """
    details = f"Verdict: {verdict_words(facts)} ({facts['reason']})."
    scores = [row["accuracy"] for row in facts["policies"]]
    is_none_right = not any(scores) and 0 in scores
    needed = None if is_none_right else facts["needed_questions"]
    if needed:
        details += f" About {needed:,} questions in all would tell."
    verdict = facts["verdict"]
    rows = {row["name"]: row for row in facts["policies"]}
    numbers = _numbers(rows, facts["leader"])
    tone: Tone = "open"
    step = purpose = ""
    if verdict == USE:
        tone = "good"
        gained = rows[facts["policy"]]["difference"]
        sentence = f"Use {facts['policy']}: {gained:.1f} points more are right than with the prompts as retrieved"
        if "\n" in facts["recipe"]:
            sentence += "; its code is under Use it"
        else:
            step = facts["recipe"]
    elif verdict == LEAVE:
        sentence = "Leave the prompts as they are retrieved: no change of them gains enough to matter"
    elif verdict == CANNOT_DO:
        sentence = (
            "The model cannot answer these questions under any order of the documents"
        )
    else:
        sentence = "These questions do not tell whether a change of the prompt helps"
        if facts["reason"] == NO_REFERENCES:
            sentence = "The log holds no right answers, so that only the change of replies is known"
        elif is_none_right:
            sentence = "No reply was right under any policy: see whether the answers are written as replies are"
        elif needed:
            sentence += f"; about {needed:,} in all would"
        step, purpose = _step_to_tell(facts)
        if is_none_right:
            purpose = "once they are"
    return Glance(
        verdict_words(facts),
        tone,
        f"{sentence}.",
        tuple(numbers),
        step,
        purpose,
        details,
        _sample(facts),
        rule=PAIRED if len(numbers) > 1 else "",
    )


def _numbers(rows: Mapping[str, Mapping[str, Any]], leader: str) -> list[Number]:
    """Accuracy as retrieved and under the leader, and the difference of the two.

    Args:
        rows: The policies of order.json by name.
        leader: The policy that leads.
    """
    numbers = []
    for name in dict.fromkeys((AS_RETRIEVED, leader)):
        row = rows.get(name, {})
        if row.get("accuracy") is not None:
            numbers.append(Number(name, _with_interval(row, "accuracy", "ci"), "%"))
    gain = rows.get(leader, {})
    if leader != AS_RETRIEVED and gain.get("difference") is not None:
        text = _with_interval(gain, "difference", "difference", "+.1f")
        numbers.append(Number("difference", text, "points"))
    return numbers


def _sample(facts: Mapping[str, Any]) -> str:
    """How many questions the prompts as retrieved were judged on, beside those of the log where they are more."""
    in_log = facts["questions"]
    base = next(row for row in facts["policies"] if row["name"] == AS_RETRIEVED)
    answered = base.get("answered") or base["n"]
    if answered == in_log:
        return f"{in_log:,} questions"
    return f"{answered:,} of {in_log:,} questions"


def _with_interval(
    row: Mapping[str, Any], name: str, ends: str, form: str = ".1f"
) -> str:
    """A number of a policy with its interval."""
    return with_interval(row[name], row[f"{ends}_low"], row[f"{ends}_high"], form)


def _step_to_tell(facts: Mapping[str, Any]) -> tuple[str, str]:
    """The command after a comparison that cannot tell, and what it does, or what it waits for.

    Only right answers, more questions or a larger budget would change the answer.
    """
    command, step = str(facts["command"]), str(facts["step"])
    if facts["reason"] == NO_REFERENCES:
        return f"{command} references=FILE", "with the right answers in FILE"
    if step.startswith("set "):
        setting = step.removeprefix("set ")
        key = setting.partition("=")[0]
        words = [w for w in command.split(" ") if not w.startswith(f"{key}=")]
        return " ".join([*words, setting]), "with more room for replies"
    if step:
        return command, step
    needed = facts["needed_questions"]
    if needed and needed > facts["questions"]:
        purpose = f"once the log holds about {needed:,} questions with a reference"
        return command, purpose
    if not facts.get("stopped", True):
        return command, "once the log holds more questions: these are used up"
    return command, "resumes and repeats nothing that is there; a larger budget goes on"


def _most_first(cause: tuple[str, int]) -> int:
    """Sorts causes by their number of questions, the largest first."""
    return -cause[1]


def _show_causes_and_recipe(console: Console, facts: Mapping[str, Any]) -> None:
    """Print what became of the questions as retrieved, and the code that applies the policy to use."""
    causes = dict(facts["causes"])
    if causes:
        right = causes.pop("right", 0)
        counted = [f"{n} {name}" for name, n in sorted(causes.items(), key=_most_first)]
        wrong = f"; of the others {', '.join(counted)}" if counted else ""
        console.print(f"as retrieved: {right} right{wrong}")
    if facts["recipe"]:
        console.print("")
        console.print("Use it:")
        for line in facts["recipe"].splitlines():
            console.print(f"    {line}")
        console.print("")
