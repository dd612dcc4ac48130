"""Accuracy over the gold position in prompts of several lengths, without documents, and with the gold one alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from annotated_types import MinLen

from posbench.backends.base import NO_WINDOW
from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.late import Figure, pd
from posbench.measure.replies import encode_untruncated
from posbench.methods.choice import MethodChoice
from posbench.model.encode import Encoder
from posbench.plots import base as plot
from posbench.plots.section import Drawn, Section
from posbench.run.base import Run
from posbench.run.cost import InspectionPasses
from posbench.run.folder import PREDICTIONS
from posbench.run.replies import scored_replies
from posbench.run.reply_rows import prompt_columns
from posbench.run.stop import StopRules
from posbench.schema import Count, Several
from posbench.stats import bootstrap
from posbench.stats.bootstrap import Estimate
from posbench.stats.findings import (
    SMALLEST_POINTS,
    Finding,
    estimate,
    estimate_columns,
    estimate_row,
    join_findings,
)
from posbench.stats.frames import UNMODIFIED
from posbench.stats.glance import Glance, Number, first_short
from posbench.stats.outcomes import missing_note, room_for_replies, setting_in
from posbench.stats.policies import detectable_difference
from posbench.stats.scores import Tabulator, score_frame
from posbench.stats.shape import NEGLIGIBLE_CONTRAST, shape_in_metrics
from posbench.stats.verdict import BIAS, CANNOT_DO, CANNOT_TELL, NO_BIAS, run_verdict
from posbench.studies.base import Study, Tables
from posbench.studies.probes import (
    CLOSED_BOOK,
    GOLD_ALONE,
    question_alone,
    with_documents,
)
from posbench.tasks import Example, Task
from posbench.tasks.base import num_questions
from posbench.tasks.items import GoldPositionTask, positions_in_fewer_items
from posbench.tasks.scorers import WHOLE_REPLY

SOURCE = "Liu et al. 2023"
FIRST_LINE_READING = "first line"
WHOLE_READING = "whole reply"
LEFT_OUT = "left out"
"""In place of a verdict: prompts with so many items were not asked."""
TOLD_APART = (0.2, 0.1, 0.05, 0.02)
"""Differences of ends and middle: where nothing can be told, a run is proposed that detects the next smaller one."""
SMALLER = 0.75
"""Share of the present smallest difference that a proposed run detects at most."""
PAPER_CLOSED_BOOK_ITEMS = 20
"""Documents from which on the paper finds the middle below the closed book."""
CLOSED_BOOK_CLAIM = f"With {{}} accuracy in the middle is below the closed book ({SOURCE}, Section 2.3: GPT-3.5-Turbo)"
NUM_LONGEST = 16
"""Prompts of a length, the longest in characters, whose tokens are counted before anything is asked."""

BASELINES = {CLOSED_BOOK: "closed book", GOLD_ALONE: "gold document alone (oracle)"}
"""Settings without gold positions, with their names for readers."""
PROMPT_COLUMNS = ["n", "tokens", "window", "window_share"]
CELL_COLUMNS = [
    "setting",
    "items",
    "gold_position",
    "depth",
    "reading",
    *estimate_columns(),
    *PROMPT_COLUMNS,
]
"""Columns of ``cells.csv``: an accuracy (0..1) for each setting, gold position (``all``: over all) and reading of the
replies; mean tokens of a prompt, tokens of the model's window, and their ratio."""
VERDICT_COLUMNS = [
    "setting",
    "items",
    "reading",
    "verdict",
    "reason",
    "shape",
    *estimate_columns(),
    "detectable",
    *PROMPT_COLUMNS,
]
"""Columns of ``verdicts.csv``: value is the position bias, detectable the smallest difference between the ends and the
inner positions that so many questions detect (both in 0..1)."""
EFFECT_COLUMNS = ["effect", "items", "reading", *estimate_columns(), "n", "note"]
"""Columns of ``effects.csv``: differences of accuracies on the same questions."""


class Setting(NamedTuple):
    """One way to ask every question.

    Attributes:
        name: Its name in tables, and the subset of its examples.
        items: Items of a prompt; None without gold positions.
        task: The task with so many items.
        examples: Its prompts; ids are unique among all settings.
    """

    name: str
    items: int | None
    task: Task
    examples: list[Example]


@dataclass(frozen=True, kw_only=True)
class LostInTheMiddle(Study):
    """Is the middle lost? Accuracy over the gold position for several numbers of documents, beside both baselines.

    Every question is asked in all settings before the next one, so that a budget is spent evenly: with each number of
    items at each gold position of the task, without items (closed book), and with the gold item alone (oracle). Prompts
    that the model's window does not hold are left out, and so are numbers of items above the task's.

    Source: Liu et al. 2023, Section 2.3, Figure 5 and Table 1.

    Attributes:
        items: Numbers of items (documents, pairs) of a prompt. Where none fits, prompts have as many as fit.
        questions: Questions at each gold position at most; None: all of the task.
    """

    asks_only: ClassVar[bool] = True
    smallest: ClassVar[Mapping[str, int]] = {"questions": 1}

    items: Annotated[tuple[Several, ...], MinLen(1)] = (10, 20, 30)
    questions: Count | None = None

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`: the task moves a gold item, and no method changes the model or its prompts."""
        if not isinstance(run.task, GoldPositionTask):
            hint = "set task=nq_multidoc, or task=kv_retrieval"
            allowed = "a task that moves a gold item among others"
            raise UserError("task", run.task.name, allowed, hint)
        if not run.evaluation[0].items:
            allowed = "prompts that show the gold item among others: the study asks without them itself"
            hint = "leave task.prompt out"
            raise UserError(
                "task.prompt", getattr(run.task, "prompt", ""), allowed, hint
            )
        if run.method.choice.name != UNMODIFIED:
            hint = "compare methods with task=nq_multidoc method=NAME"
            raise UserError("method", run.method.choice.name, UNMODIFIED, hint)

    def asked_examples(
        self, encoder: Encoder, task: Task, choices: Mapping[str, MethodChoice]
    ) -> list[Example]:
        """See :meth:`Study.asked_examples`."""
        return [e for s in self.settings(encoder, task) for e in s.examples]

    def recorded_examples(self, task: Task) -> list[Example]:
        """See :meth:`Study.recorded_examples`; with prompts that the window may not have held."""
        return [e for s in self.settings(None, task) for e in s.examples]

    def workload(self, run: Run) -> list[InspectionPasses]:
        """See :meth:`Study.workload`."""
        examples = self.asked_examples(run.encoder, run.task, {})
        return [InspectionPasses(examples, times=0, replies=1, shared=True)]

    def settings(self, encoder: Encoder | None, task: Task) -> list[Setting]:
        """Return the settings that the model's window holds, by number of items, then the baselines.

        Args:
            encoder: Makes the model's prompts; None: the window holds all.
            task: The task with the largest number of items that is asked.
        """
        assert isinstance(task, GoldPositionTask), "another task was refused"
        field = task.sizes[0]
        fixed: dict[str, Any] = {"limit": min(self.questions or task.limit, task.limit)}
        if task.files():
            # Prompts with fewer items come from the same file, also where the benchmark has one of their own.
            fixed["path"] = str(task.place())
        settings = []
        for items in self._sizes(task):
            positions = positions_in_fewer_items(task.positions, task.items, items)
            sized = replace(task, **fixed, **{field: items}, positions=positions)
            examples = sized.evaluation()
            if encoder is None or _fits(encoder, sized, examples):
                name = f"{items} {field}"
                settings.append(Setting(name, items, sized, _named(name, examples)))
        if not settings:
            assert encoder is not None, "without a window all fit"
            least = min(self._sizes(task))
            window = encoder.context_window
            allowed = f"numbers of {field} that fit the window: prompt and reply exceed {window} tokens with {least}"
            hint = "set study.items to fewer"
            raise UserError("study.items", list(self.items), allowed, hint)
        # The gold item comes first, so that alone it has the label of a first one.
        fewest = settings[0].items
        first = replace(task, **fixed, **{field: fewest}, positions=(0,)).evaluation()
        closed_book = [question_alone(example) for example in first]
        alone = [with_documents(example, example.gold_positions) for example in first]
        for name, examples in ((CLOSED_BOOK, closed_book), (GOLD_ALONE, alone)):
            settings.append(Setting(name, None, task, _named(name, examples)))
        return settings

    def _sizes(self, task: GoldPositionTask) -> list[int]:
        """Numbers of items up to the task's own, in order."""
        return sorted({n for n in self.items if n <= task.items}) or [task.items]

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Ask every question in all settings.

        Returns:
            ``cells``: :data:`CELL_COLUMNS`; ``verdicts``: :data:`VERDICT_COLUMNS`; ``effects``: :data:`EFFECT_COLUMNS`.
        """
        settings = self.settings(run.encoder, run.task)
        examples = [example for setting in settings for example in setting.examples]
        self._announce(run, settings)
        encoded = run.prompts.encode(examples)
        methods = run.methods()
        rules = StopRules(run.deadline, run.spending)
        # A deadline is looked at between rounds; a server takes question by question in any case.
        round_questions = 1 if run.deadline and run.model.in_process else None
        by_method = scored_replies(
            run, PREDICTIONS, methods, encoded, rules, examples, round_questions
        )
        stopped = (rules.stop.asked, rules.stop.planned) if rules.stop else None
        run.out.mark("study", stopped=stopped)
        (rows,) = by_method.values()
        replies = Replies(run, settings, rows)
        asked = {setting.items for setting in settings}
        left_out = [items for items in sorted({*self.items}) if items not in asked]
        verdicts = [*replies.verdicts(), *map(replies.left_out, left_out)]
        return {
            "cells": pd.DataFrame(replies.cells(), columns=CELL_COLUMNS),
            "verdicts": pd.DataFrame(verdicts, columns=VERDICT_COLUMNS),
            "effects": pd.DataFrame(replies.effects(), columns=EFFECT_COLUMNS),
        }

    def _announce(self, run: Run, settings: Sequence[Setting]) -> None:
        """Print, before anything is asked, how much there is to ask and what it can show."""
        questions = num_questions(settings[-1].examples)
        prompts = sum(len({e.gold_position for e in s.examples}) for s in settings)
        sizes = ", ".join(str(s.items) for s in settings if s.items)
        field = run.task.sizes[0]
        points = 100 * detectable_difference(questions, 1)
        told = "too few to detect any difference between two gold positions"
        if points < 100:
            told = (
                f"so many detect a difference of about {points:.0f} points between two gold positions, where one "
                "answer in ten changes"
            )
        message = (
            f"{questions} questions, each in {prompts} prompts: {sizes} {field}, {', '.join(BASELINES.values())}; "
            f"{told}"
        )
        run.console.print(message)

    def figures(self, tables: Tables) -> Drawn:
        """See :meth:`Study.figures`."""
        caption = (
            "Accuracy over the gold position, a line for each number of items; horizontal: without any, and with the "
            "gold one alone. Bands: 95 % intervals."
        )
        return {"positions": (draw_positions(tables["cells"]), caption)}

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """The paper's claims, by the reading of replies that the task scores; the other reading is in the notes."""
        return judge_claims(tables)

    def glance(self, tables: Tables) -> Glance:
        """See :meth:`Study.glance`: the verdicts, and the curve with the most items."""
        return first_look(tables)

    def sections(self, tables: Tables, figures: Drawn) -> list[Section]:
        """See :meth:`Study.sections`: accuracy by number of items, with the figure, then the verdicts."""
        return [
            Section(
                "Accuracy by number of documents and gold position",
                "Accuracy in %, with its 95 % interval, over the same questions in all rows. Share of the window: mean "
                "tokens of a prompt over the tokens that the model can read.",
                *_accuracy_table(tables["cells"]),
                figures,
            ),
            Section(
                "Verdict for each number of documents",
                "The rule is that of every run (docs/metrics.md). Detectable: the smallest difference between the ends "
                "and the positions in between that so many questions detect with a probability of 80 %.",
                *_verdict_table(tables["verdicts"]),
            ),
        ]


def _fits(encoder: Encoder, task: Task, examples: Sequence[Example]) -> bool:
    """Whether the longest prompts leave room for a reply; without a tokenizer they were fitted by their characters."""
    if encoder.tokenizer is None:
        return True
    longest = sorted(examples, key=lambda e: len(e.prompt))[-NUM_LONGEST:]
    tokens = max(len(encode_untruncated(encoder, e).ids) for e in longest)
    return tokens + task.max_new_tokens <= encoder.context_window


def _named(setting: str, examples: Sequence[Example]) -> list[Example]:
    """The examples of a setting: it is their subset, and the beginning of their ids."""
    return [
        replace(e, id=f"{setting.replace(' ', '_')}/{e.id}", subset=setting)
        for e in examples
    ]


# Tables


class Replies:
    """The replies of a run, as tables.

    Args:
        run: The run.
        settings: The settings that were asked.
        rows: Rows of predictions.jsonl.
    """

    def __init__(
        self, run: Run, settings: Sequence[Setting], rows: Sequence[Row]
    ) -> None:
        self._run = run
        self._settings = settings
        window = run.encoder.context_window
        self._window = window if window < NO_WINDOW else math.nan
        self._readings = {WHOLE_READING: run.task.metric}
        if WHOLE_REPLY in run.task.metrics_by_position:
            self._readings = {
                FIRST_LINE_READING: run.task.metric,
                WHOLE_READING: WHOLE_REPLY,
            }
        setting_of = {e.id: s.name for s in settings for e in s.examples}
        self._rows: dict[str, list[Row]] = {s.name: [] for s in settings}
        for row in rows:
            self._rows[setting_of[row["id"]]].append(row)
        # Questions are numbered within each cell: the same number is the same question.
        counts = Counter[tuple[str, int | None]]()
        self._question: dict[str, int] = {}
        for setting in settings:
            for example in setting.examples:
                cell = (setting.name, example.gold_position)
                self._question[example.id] = counts[cell]
                counts[cell] += 1
        self._metrics = {
            (s.name, reading): self._tabulate(s, metric)
            for s in settings
            if s.items and self._rows[s.name]
            for reading, metric in self._readings.items()
        }

    def _tabulate(self, setting: Setting, metric: str) -> pd.DataFrame:
        """Rows of metrics.csv of a setting, where a metric takes the place of the task's own."""
        run = self._run
        own = setting.task.metric
        rows = [
            {**row, "scores": {own: row["scores"][metric]} if row["scores"] else {}}
            for row in self._rows[setting.name]
        ]
        tabulator = Tabulator(
            task=setting.task,
            model=run.model.name,
            unmodified=UNMODIFIED,
            resamples=run.runtime.resamples,
            seed=0,
            thinking_tokens=run.model.thinking_tokens,
            window=run.encoder.context_window,
        )
        return tabulator.metrics(rows)

    def _prompt_columns(self, rows: Sequence[Row]) -> dict[str, float | None]:
        """Mean tokens of prompts, the model's window, and their ratio; None where they are not known."""
        return prompt_columns(rows, self._run.encoder.context_window)

    def cells(self) -> list[Row]:
        """Rows of ``cells.csv``."""
        table = []
        for setting in self._settings:
            rows = self._rows[setting.name]
            head = {"setting": setting.name, "items": setting.items}
            for reading, metric in self._readings.items():
                if setting.items is None:
                    place = {"gold_position": "all", "depth": math.nan}
                    number = self._mean(rows, metric)
                    columns = {**estimate_row(number), "n": number.n}
                    prompt = self._prompt_columns(rows)
                    table.append(
                        {**head, **place, "reading": reading, **columns, **prompt}
                    )
                    continue
                metrics = self._metrics.get((setting.name, reading))
                if metrics is None:
                    continue
                for line in metrics[metrics["metric"] == setting.task.metric].to_dict(
                    "records"
                ):
                    here = [
                        row
                        for row in rows
                        if line["gold_position"] in ("all", str(row["gold_position"]))
                    ]
                    columns = {
                        c: line[c]
                        for c in ("gold_position", "depth", *estimate_columns(), "n")
                    }
                    prompt = self._prompt_columns(here)
                    table.append({**head, "reading": reading, **columns, **prompt})
        return table

    @staticmethod
    def _mean(rows: Sequence[Row], metric: str) -> Estimate:
        """Mean score of the answers with its interval; NaN without any."""
        answered = [row for row in rows if row["scores"]]
        if not answered:
            return bootstrap.NO_ESTIMATE
        values = [row["scores"][metric] for row in answered]
        return bootstrap.mean(values, [row["id"] for row in answered])

    def verdicts(self) -> list[Row]:
        """Rows of ``verdicts.csv`` of the settings that were asked, by the rule of every run."""
        table = []
        for (name, reading), metrics in self._metrics.items():
            setting = next(s for s in self._settings if s.name == name)
            verdict = run_verdict(metrics)
            method = metrics["method"].iloc[0]
            bias = metrics[metrics["metric"] == "position_bias"]
            number = estimate(bias.iloc[0]) if len(bias) else bootstrap.NO_ESTIMATE
            ends = self._ends_minus_inner(setting, reading)
            table.append(
                {
                    "setting": name,
                    "items": setting.items,
                    "reading": reading,
                    "verdict": verdict.name if verdict else CANNOT_TELL,
                    "reason": verdict.reason
                    if verdict
                    else "fewer than three gold positions",
                    "shape": shape_in_metrics(metrics, method),
                    **estimate_row(number),
                    "detectable": bootstrap.detectable(ends) if ends else math.nan,
                    "n": number.n,
                    **self._prompt_columns(self._rows[name]),
                }
            )
        return table

    def left_out(self, items: int) -> Row:
        """The row of ``verdicts.csv`` of a number of items that was not asked, with the reason."""
        task = self._run.task
        assert isinstance(task, GoldPositionTask), "another task was refused"
        field = task.sizes[0]
        reason = f"above task.{field}={task.items}, which you or the budget chose"
        most = max(s.items or 0 for s in self._settings)
        largest = max(self._longest(s.name) for s in self._settings)
        alone = self._longest(GOLD_ALONE)
        # Items are about equally long.
        per_item = (largest - alone) / (most - 1)
        expected = alone + per_item * (items - 1) + task.max_new_tokens
        if not expected <= self._window and not math.isnan(expected):
            reason = (
                f"prompt and reply would take up to about {expected:,.0f} tokens, and the window of "
                f"{self._run.model.name} is {self._window:,.0f}"
            )
        name = f"{items} {field}"
        empty = dict.fromkeys(VERDICT_COLUMNS)
        return {
            **empty,
            "setting": name,
            "items": items,
            "verdict": LEFT_OUT,
            "reason": reason,
        }

    def _longest(self, setting: str) -> float:
        """Tokens of the longest prompt of a setting; NaN where they are not counted."""
        return max(
            (row["tokens"] or math.nan for row in self._rows[setting]), default=math.nan
        )

    def _scores(
        self, setting: str, reading: str, position: int | None = None
    ) -> dict[int, float]:
        """Scores of a cell by the number of the question; questions without an answer are left out."""
        metric = self._readings[reading]
        return {
            self._question[row["id"]]: float(row["scores"][metric])
            for row in self._rows[setting]
            if row["scores"] and row["gold_position"] == position
        }

    def _at(
        self, setting: Setting, reading: str, indices: Sequence[int]
    ) -> list[dict[int, float]]:
        """Scores at some of a setting's gold positions, given as indices into their list."""
        positions = _positions(setting)
        return [self._scores(setting.name, reading, positions[i]) for i in indices]

    def _ends_minus_inner(self, setting: Setting, reading: str) -> Estimate | None:
        """Both ends minus the positions in between; None with fewer than three positions."""
        count = len(_positions(setting))
        if count < 3:
            return None
        ends = self._at(setting, reading, (0, count - 1))
        return _paired(ends, self._at(setting, reading, range(1, count - 1)))

    def effects(self) -> list[Row]:
        """Rows of ``effects.csv``."""
        table = []
        for reading in self._readings:
            notes = {s.name: self._note(s, reading) for s in self._settings}
            before: Setting | None = None

            def add(
                effect: str, items: int | None, number: Estimate | None, note: str
            ) -> None:
                if number is not None:
                    line = {"effect": effect, "items": items, "reading": reading}  # noqa: B023
                    table.append(
                        {**line, **estimate_row(number), "n": number.n, "note": note}
                    )

            closed_book = [self._scores(CLOSED_BOOK, reading)]
            for setting in self._settings:
                if setting.items is None or not self._rows[setting.name]:
                    continue
                name, items = setting.name, setting.items
                metrics = self._metrics[name, reading]
                for statistic in ("primacy", "recency"):
                    found = metrics[metrics["metric"] == statistic]
                    if len(found):
                        add(
                            statistic,
                            items,
                            estimate(found.iloc[0]),
                            notes[name] or str(found["note"].iloc[0] or ""),
                        )
                add(
                    "ends_minus_inner",
                    items,
                    self._ends_minus_inner(setting, reading),
                    notes[name],
                )
                count = len(_positions(setting))
                every = self._at(setting, reading, range(count))
                middle = self._at(setting, reading, [count // 2])
                note = notes[name] or notes[CLOSED_BOOK]
                add(
                    "closed_book_minus_middle",
                    items,
                    _paired(closed_book, middle),
                    note,
                )
                if before:
                    fewer = self._at(before, reading, range(len(_positions(before))))
                    # A model at the floor with more items alone has lost what it could do with fewer.
                    note = (
                        ""
                        if not notes[before.name]
                        else notes[name] or notes[before.name]
                    )
                    if notes[name] and not notes[name].startswith(CANNOT_DO):
                        note = notes[name]
                    add("fewer_minus_more", items, _paired(fewer, every), note)
                before = setting
            alone = [self._scores(GOLD_ALONE, reading)]
            note = notes[GOLD_ALONE] or notes[CLOSED_BOOK]
            add("gold_alone_minus_closed_book", None, _paired(alone, closed_book), note)
        return table

    def _note(self, setting: Setting, reading: str) -> str:
        """Why the scores of a setting say nothing: missing answers, or a model that cannot do the task; else empty."""
        rows = self._rows[setting.name]
        if not rows:
            return "nothing was asked"
        task = self._run.task
        frame, _ = score_frame(rows, task)
        thinking = self._run.model.thinking_tokens
        resamples = self._run.runtime.resamples
        lengths = (row["tokens"] for row in rows)
        room = room_for_replies(self._run.encoder.context_window, lengths)
        note = missing_note(frame, task.max_new_tokens, resamples, 0, thinking, room)
        metrics = self._metrics.get((setting.name, reading))
        verdict = None if metrics is None else run_verdict(metrics)
        if not note and verdict and verdict.name == CANNOT_DO:
            return f"{CANNOT_DO} with {setting.name}"
        return note


def _positions(setting: Setting) -> list[int]:
    """The gold positions of a setting, in order."""
    return sorted(
        {e.gold_position for e in setting.examples if e.gold_position is not None}
    )


def _paired(
    after: Sequence[Mapping[int, float]], before: Sequence[Mapping[int, float]]
) -> Estimate | None:
    """Mean difference between two means over cells, on the questions with a score in all; None without two of them.

    Args:
        after: Scores by question of some cells, of which each question's mean is taken.
        before: Those of the cells to subtract.
    """
    questions = sorted(set.intersection(*(set(cell) for cell in (*after, *before))))
    if len(questions) < 2:
        return None
    means = [
        [float(np.mean([cell[q] for cell in cells])) for q in questions]
        for cells in (after, before)
    ]
    return bootstrap.paired(*means, [str(q) for q in questions])


# Claims and sentences


def judge_claims(tables: Tables) -> list[Finding]:
    """Compare the paper's claims with the tables of a run.

    Args:
        tables: ``verdicts`` and ``effects``, as read back.
    """
    effects = tables["effects"]
    effects = effects.assign(note=effects["note"].astype(object).fillna(""))
    verdicts = tables["verdicts"]
    names = dict(zip(verdicts["items"], verdicts["setting"], strict=True))
    is_asked = verdicts["verdict"] != LEFT_OUT
    asked = sorted(verdicts.loc[is_asked, "items"].unique())
    left_out = ", ".join(verdicts.loc[~is_asked, "setting"])
    not_asked = f"left out: {left_out}" if left_out else "one number of items was asked"
    claims = [
        _judge(
            effects,
            f"With {names[items]} accuracy is higher at both ends than in between ({SOURCE}, Figure 5)",
            "first, and last, gold position minus the mean of the inner ones, in points",
            ("primacy", "recency"),
            items,
        )
        for items in asked
    ]
    for fewer, more in pairwise(asked):
        claims.append(
            _judge(
                effects,
                f"Accuracy falls from {names[fewer]} to {names[more]} ({SOURCE}, Section 2.3)",
                f"accuracy over all gold positions with {names[fewer]} minus that with {names[more]}, in points",
                ("fewer_minus_more",),
                more,
            )
        )
    if len(asked) < 2:
        claim = f"Accuracy falls as documents are added ({SOURCE}, Section 2.3)"
        statistic = "accuracy with fewer minus that with more, in points"
        claims.append(Finding.untestable(claim, statistic, not_asked))
    many = [items for items in asked if items >= PAPER_CLOSED_BOOK_ITEMS]
    statistic = "closed book minus the middle gold position, in points"
    for items in many:
        claim = CLOSED_BOOK_CLAIM.format(names[items])
        effect = ("closed_book_minus_middle",)
        claims.append(_judge(effects, claim, statistic, effect, items))
    if not many:
        claim = CLOSED_BOOK_CLAIM.format("20 and 30 documents")
        claims.append(Finding.untestable(claim, statistic, not_asked))
    control = _judge(
        effects,
        "The gold document alone is read: it raises accuracy over the closed book",
        "oracle minus closed book, in points",
        ("gold_alone_minus_closed_book",),
        None,
    )
    return [*claims, control.control()]


def _judge(
    effects: pd.DataFrame,
    claim: str,
    statistic: str,
    names: Sequence[str],
    items: int | None,
) -> Finding:
    """Hold the claim that some effects are positive against them, by the first reading; the other is in the note.

    Args:
        effects: Rows of effects.csv.
        claim: The claim, which holds if all effects exceed the smallest one worth naming.
        statistic: What the effects are, in words.
        names: Their names.
        items: Items of the prompts; None for effects without.
    """
    of_items = effects["items"].isna() if items is None else effects["items"] == items
    rows = effects[of_items & effects["effect"].isin(names)]
    main_reading, *others = effects["reading"].unique()
    main = rows[rows["reading"] == main_reading]
    quotes = [
        f"{reading}: "
        + ", ".join(
            estimate(row, scale=100).words
            for row in rows[rows["reading"] == reading].to_dict("records")
        )
        for reading in others
    ]
    note = "; ".join(quotes)
    if len(main) < len(names):
        return Finding.untestable(
            claim, statistic, "too few gold positions or questions"
        )
    obstacles = [text for text in main["note"] if text]
    if obstacles:
        return Finding.untestable(
            claim, statistic, obstacles[0], int(main["n"].iloc[0])
        )
    parts = [
        Finding.above(claim, statistic, estimate(row, scale=100), SMALLEST_POINTS, note)
        for row in main.to_dict("records")
    ]
    return join_findings(parts)


def first_look(tables: Tables) -> Glance:
    """Return with which numbers of items there is a position bias, and a curve, of a biased number if there is one.

    Args:
        tables: ``cells`` and ``verdicts``, as read back.
    """
    details = describe_result(tables)
    cells, verdicts = tables["cells"], tables["verdicts"]
    asked = verdicts[verdicts["verdict"] != LEFT_OUT]
    if cells.empty or asked.empty:
        return Glance("nothing asked", "open", "Nothing was asked.", details=details)
    main = cells["reading"].iloc[0]
    asked = asked[asked["reading"] == main]
    biased = asked[asked["verdict"] == BIAS]
    last = asked.iloc[-1] if biased.empty else biased.iloc[-1]
    curve = cells[
        (cells["reading"] == main)
        & (cells["setting"] == last["setting"])
        & (cells["gold_position"] != "all")
    ].sort_values("depth")
    places = {"first": 0, "in the middle": len(curve) // 2, "last": -1}
    numbers = tuple(
        Number(
            f"{last['setting']}, answer {name}", _cell(curve.iloc[place].to_dict()), "%"
        )
        for name, place in places.items()
    )
    basis = {
        "details": details,
        "sample": f"{_questions(asked, cells)} at each position",
    }
    if len(biased):
        word = (
            BIAS
            if len(biased) == len(asked)
            else f"{BIAS} in {len(biased)} of {len(asked)}"
        )
        named = ", ".join(biased["setting"])
        shapes = {str(shape) for shape in biased["shape"].dropna() if shape}
        shape = f" ({shapes.pop()})" if len(shapes) == 1 else ""
        full = f"There is a position bias with {named}{shape}."
        short = f"There is a position bias with {len(biased)} of {len(asked)} lengths."
        glance = Glance(word, "bad", first_short(full, short), numbers, **basis)
        # Where another length has too few answers, longer replies may tell.
        setting = setting_in(" ".join(asked["reason"].dropna()))
        if not setting:
            return glance
        count = _num_questions(asked, cells)
        return replace(
            glance,
            next=f"posbench {_command(last)} study.questions={count} task.limit={count} {setting}",
            purpose="leaves room for the replies that were cut",
        )
    words = set(asked["verdict"])
    word = words.pop() if len(words) == 1 else "no bias shown"
    if word == NO_BIAS:
        named = " and ".join(asked["setting"])
        points = f"{100 * NEGLIGIBLE_CONTRAST:g} points"
        sentence = f"With {named} no gold position differs from the others by more than {points}."
        return Glance(word, "good", sentence, numbers, **basis)
    if word == CANNOT_DO:
        sentence = "The model cannot do this task: a position bias could not show."
        return Glance(word, "open", sentence, numbers, **basis)
    named = " and ".join(asked.loc[asked["verdict"] != NO_BIAS, "setting"])
    told = f"cannot be told from {_questions(asked, cells)}"
    full = f"Whether the position of the answer matters with {named} {told}."
    short = f"Whether the position of the answer matters {told}."
    glance = Glance(word, "open", first_short(full, short), numbers, **basis)
    spread = asked["detectable"].max()
    if pd.isna(spread):
        return glance
    apart = next((a for a in TOLD_APART if a <= SMALLER * spread), TOLD_APART[-1])
    # The interval of a mean shrinks with the root of the questions.
    needed = math.ceil(_num_questions(asked, cells) * (spread / apart) ** 2)
    return replace(
        glance,
        next=f"posbench {_command(last)} study.questions={needed} task.limit={needed}",
        purpose=f"about so many questions tell {100 * apart:.0f} points apart",
    )


def _command(last: Mapping[str, Any]) -> str:
    """What asks again: the experiment, or its study on another task, which a row of verdicts tells."""
    if last["setting"].endswith("documents"):
        return "experiment=liu2023"
    return "study=lost_in_the_middle"


def describe_result(tables: Tables) -> str:
    """Say what the run found: a sentence for each number of items, then the baselines, and what was left out.

    Args:
        tables: ``cells`` and ``verdicts``, as read back.
    """
    cells, verdicts = tables["cells"], tables["verdicts"]
    if cells.empty:
        return "Nothing was asked."
    main = cells["reading"].iloc[0]
    shown = cells[cells["reading"] == main]
    texts = []
    for verdict in verdicts[verdicts["reading"] == main].to_dict("records"):
        curve = shown[
            (shown["setting"] == verdict["setting"]) & (shown["gold_position"] != "all")
        ]
        curve = curve.sort_values("depth")["value"].to_list()
        share = ""
        if not pd.isna(verdict["window_share"]):
            share = f" ({100 * verdict['window_share']:.3g} % of the window)"
        shape = verdict["shape"]
        named = f", {shape}" if isinstance(shape, str) and shape else ""
        first, middle, last = map(
            _percent, (curve[0], curve[len(curve) // 2], curve[-1])
        )
        ends = f"{first} with the answer first, {middle} in the middle, {last} last"
        texts.append(
            f"{verdict['setting']}{share}: {verdict['verdict']}{named}; {ends}."
        )
    levels = {row["setting"]: row for row in shown.to_dict("records")}
    baselines = [
        f"{label} {_percent(levels[name]['value'])}"
        for name, label in BASELINES.items()
        if name in levels
    ]
    text = ", ".join(baselines)
    texts.append(f"{text[0].upper()}{text[1:]}.")
    texts += _reading_differences(verdicts, main)
    first = verdicts[verdicts["reading"] == main]
    spread = first["detectable"].max()
    asked = _questions(first, shown)
    told = "too few to tell anything"
    if not pd.isna(spread):
        told = (
            f"less than {100 * spread:.0f} points between ends and middle may be missed"
        )
    texts.append(f"{asked}: {told}.")
    for row in verdicts[verdicts["verdict"] == LEFT_OUT].to_dict("records"):
        texts.append(f"Left out: {row['setting']} ({row['reason']}).")
    return " ".join(texts)


def _num_questions(verdicts: pd.DataFrame, cells: pd.DataFrame) -> int:
    """How many questions were asked at each position."""
    placed = cells[cells["gold_position"] != "all"]
    positions = int(placed.groupby("setting")["gold_position"].nunique().max())
    return int(verdicts["n"].max() // positions)


def _questions(verdicts: pd.DataFrame, cells: pd.DataFrame) -> str:
    """The same in words."""
    questions = _num_questions(verdicts, cells)
    return "1 question" if questions == 1 else f"{questions:,} questions"


def _reading_differences(verdicts: pd.DataFrame, main: str) -> list[str]:
    """A sentence for each number of items whose verdict is another one by another reading of the replies."""
    texts = []
    for setting, rows in verdicts.dropna(subset=["reading"]).groupby(
        "setting", sort=False
    ):
        by_reading = dict(zip(rows["reading"], rows["verdict"], strict=True))
        for reading, verdict in by_reading.items():
            if verdict != by_reading[main]:
                texts.append(f"By the {reading}, {setting}: {verdict}.")
    return texts


def _percent(share: float) -> str:
    return "-" if pd.isna(share) else f"{100 * share:.1f} %"


def _cell(row: Mapping[str, Any]) -> str:
    """An accuracy in % with its interval."""
    if pd.isna(row["value"]):
        return "-"
    value, low, high = (100 * row[column] for column in estimate_columns())
    return bootstrap.with_interval(value, low, high, "z.1f")


def _accuracy_table(cells: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """A row for each setting and gold position, with a column for each reading."""
    readings = list(cells["reading"].unique())
    header = [
        "prompt",
        "gold position",
        *readings,
        "n",
        "tokens",
        "share of the window",
    ]
    table = []
    for (setting, position), rows in cells.groupby(
        ["setting", "gold_position"], sort=False
    ):
        by_reading = {row["reading"]: row for row in rows.to_dict("records")}
        row = by_reading[readings[0]]
        depth = "all" if position == "all" else f"{100 * row['depth']:.0f} %"
        if setting in BASELINES:
            depth = ""
        table.append(
            [
                BASELINES.get(str(setting), str(setting)),
                depth,
                *(_cell(by_reading[reading]) for reading in readings),
                str(row["n"]),
                "-" if pd.isna(row["tokens"]) else f"{row['tokens']:,.0f}",
                "-"
                if pd.isna(row["window_share"])
                else f"{100 * row['window_share']:.3g} %",
            ]
        )
    return header, table


def _verdict_table(verdicts: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """A row for each number of items and reading."""
    header = [
        "prompt",
        "reading",
        "verdict",
        "position bias (points)",
        "detectable (points)",
        "reason",
    ]
    table = []
    for row in verdicts.to_dict("records"):
        spread = row["detectable"]
        table.append(
            [
                row["setting"],
                row["reading"] if isinstance(row["reading"], str) else "",
                row["verdict"],
                _cell(row),
                "-" if pd.isna(spread) else f"{100 * spread:.1f}",
                row["reason"],
            ]
        )
    return header, table


@plot.styled
def draw_positions(cells: pd.DataFrame) -> Figure:
    """Accuracy over the gold position for each number of items, a panel for each reading, with both baselines.

    Args:
        cells: Rows of cells.csv.
    """
    readings = list(cells["reading"].unique())
    width = plot.PAGE if len(readings) > 1 else plot.COLUMN
    figure, panels = plot.new_figure(
        width,
        2.7,
        1,
        len(readings),
        n=cells.loc[cells["gold_position"] != "all", "n"],
        sharey=True,
        squeeze=False,
    )
    items = sorted(cells["items"].dropna().unique())
    for axes, reading in zip(panels[0], readings, strict=True):
        rows = cells[cells["reading"] == reading]
        for index, count in enumerate(items):
            curve = rows[(rows["items"] == count) & (rows["gold_position"] != "all")]
            style = plot.line_style(index, steps=len(items))
            plot.band(axes, curve, style, label=str(curve["setting"].iloc[0]))
        for name, colour in ((CLOSED_BOOK, plot.GUIDE), (GOLD_ALONE, plot.GOLD_COLOUR)):
            for row in rows[rows["setting"] == name].to_dict("records"):
                plot.level(axes, row, {"color": colour}, BASELINES[name])
        axes.set_title(f"scored: {reading}")
        plot.percent_axes(axes, "accuracy (%)" if axes is panels[0][0] else "")
    plot.add_legend_below(figure)
    return figure
