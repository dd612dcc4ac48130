"""Every remedy on one bench: methods and changes of the prompt on the same questions, with their cost side by side."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import MinLen

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.files.hardware import reset_resident_peak, resident_peak
from posbench.late import Figure, pd, torch
from posbench.methods import Method, Unmodified
from posbench.methods.choice import MethodChoice
from posbench.methods.prompt_change import UNRANKED, PromptChange
from posbench.plots import base as plot
from posbench.plots.section import Drawn, Section
from posbench.run.base import Run
from posbench.run.cost import InspectionPasses
from posbench.run.folder import PREDICTIONS
from posbench.run.plan import Subject
from posbench.run.replies import plan_replies, scored_replies
from posbench.schema import Count, Several
from posbench.stats import bootstrap
from posbench.stats.bootstrap import with_interval
from posbench.stats.findings import Finding
from posbench.stats.frames import UNMODIFIED
from posbench.stats.glance import Glance, Number, Tone, sentence_case
from posbench.stats.outcomes import PROBLEM, missing_note, room_for_replies, setting_in
from posbench.stats.policies import Scores, within_margin
from posbench.stats.position_bias import statistic_rows
from posbench.stats.scores import score_frame
from posbench.stats.sequential import ALPHA
from posbench.studies.base import Tables
from posbench.studies.cost.timing import TimingStudy
from posbench.tasks import Example, Task
from posbench.tasks.base import first_examples
from posbench.tasks.items import evenly_spaced, ranks_items

HELPS = "helps"
HARMS = "harms"
NO_EFFECT = "less than 5 points"
CANNOT_TELL = "cannot tell"
LEFT_OUT = "left out"
TICKS = (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
HEADER = (
    "remedy",
    "changes",
    "average (%)",
    "difference (points)",
    "worst position (%)",
    "position bias (points)",
    "time",
    "tokens",
    "n",
    "verdict",
)
COLUMNS = [
    "method",
    "changes",
    "accuracy",
    "accuracy_low",
    "accuracy_high",
    "difference",
    "difference_low",
    "difference_high",
    "worst",
    "worst_position",
    "bias",
    "bias_low",
    "bias_high",
    "seconds",
    "time",
    "time_low",
    "time_high",
    "tokens",
    "memory_gb",
    "n",
    "verdict",
    "note",
]
"""Columns of ``remedies.csv``."""
TOGETHER = " + "
"""Between the names of methods that are applied together."""
ALIKE = 1.0
"""Points within which remedies are alike; of these the cheapest is named."""
SAME_TIME = 1.1
"""Largest ratio of two times that are about the same."""
NAME_SPACE = 0.6
"""Space for the names left of the cheapest remedy, over that of all remedies on the axis."""
NAME_HEIGHT = 6.5
"""Height of a line of text, in points of the accuracy."""


@dataclass(frozen=True, kw_only=True)
class Remedies(TimingStudy):
    """Ask the same questions under every method and every change of the prompt that fits the model and the task.

    Differences of the average are paired against the unmodified prompt and model; their intervals hold for all
    remedies together (Bonferroni). Time and memory are those of ``timed`` prompts with their replies, rewriting
    included, all remedies in turn in this one run.

    Attributes:
        methods: Names of methods, or lists of names, whose methods are applied together; empty: all, each alone.
        examples: Examples per gold position at most; None is all of the task.
        timed: Prompts that are timed.
        clock: Of the times; a GPU is always timed by the wall clock.
    """

    smallest: ClassVar[Mapping[str, int]] = {"examples": 6}
    needs_model: ClassVar[bool] = True
    needs_task: ClassVar[bool] = True
    all_methods: ClassVar[bool] = True
    caption: ClassVar[str] = ""

    clock: Literal["wall", "processor"] = "processor"
    methods: tuple[str | Annotated[tuple[str, ...], MinLen(1)], ...] = ()
    examples: Several | None = None
    timed: Count = 2

    def measures(self, choice: MethodChoice) -> bool:
        """Every method but the unmodified model."""
        return not issubclass(choice.cls, Unmodified)

    def check(self, run: Run) -> None:
        """Refuse methods that do not exist, and a task that moves no gold item."""
        for name in chain.from_iterable(map(_names, self.methods)):
            if name not in run.all_methods:
                allowed = ", ".join(run.all_methods)
                hint = "posbench ls methods describes them"
                raise UserError("study.methods", name, allowed, hint)
        asked = first_examples(run.evaluation, self.examples)
        if len({example.gold_position for example in asked}) < 2:
            allowed = "a task that moves a gold item over positions"
            hint = "set task=kv_retrieval or task=nq_multidoc"
            raise UserError("task", run.task.name, allowed, hint)

    def recorded_examples(self, task: Task) -> list[Example]:
        """See :meth:`Study.recorded_examples`: those that every remedy is asked."""
        return first_examples(task.evaluation(), self.examples)

    def workload(self, run: Run) -> list[InspectionPasses]:
        """Return the replies under all remedies, those that turn out not to apply among them, and the timed ones."""
        asked = first_examples(run.evaluation, self.examples)
        sets = [asked]
        for choice in self._choices(run).values():
            sets.append(_rewritten(run, choice, asked) or asked)
        timed = [evenly_spaced(examples, self.timed) for examples in sets]
        return [
            InspectionPasses(_told_apart(sets), times=0, replies=1),
            InspectionPasses(_told_apart(timed), times=0, replies=self.repeats + 1),
        ]

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Ask, score and time.

        Returns:
            ``remedies``: a row for each remedy, the unmodified model first: accuracy and its difference, worst
            position and position bias in points, tokens and time of a prompt, verdict. ``curves``: accuracy at each
            gold position.
        """
        asked = first_examples(run.evaluation, self.examples)
        encoded = run.prompts.encode(asked)
        run.note_prompts(encoded)
        longest = max(len(prompt.ids) for prompt in encoded.values())
        num_tokens = longest + run.task.max_new_tokens
        choices = self._choices(run)
        methods, left_out = _applicable(run, choices, asked, num_tokens)
        rows = scored_replies(run, PREDICTIONS, methods, encoded, examples=asked)
        metric = run.task.metric
        scores = {name: _scores(rows[name], metric) for name in methods}
        alpha = ALPHA / max(len(methods) - 1, 1)
        curves = _curves(rows, metric)
        table = []
        notes = {name: _missing_note(run, rows[name]) for name in methods}
        answered = {name: rows[name] for name in methods if not notes[name]}
        chance = run.task.chance or 0.0
        biases = _biases(answered, metric, run.runtime.resamples, chance)
        # Without answers of the unmodified model there is nothing to compare.
        costs = {} if notes[UNMODIFIED] else self._costs(run, asked, methods)
        for name in methods:
            note = notes[UNMODIFIED] or notes[name]
            if note:
                left_out[name] = note
                continue
            own = scores[name]
            both = [question for question in scores[UNMODIFIED] if question in own]
            base = [scores[UNMODIFIED][question] for question in both]
            after = [own[question] for question in both]
            gain = bootstrap.Estimate(0.0, 0.0, 0.0, len(both))
            if name != UNMODIFIED:
                gain = bootstrap.paired(after, base, both, alpha=alpha)
            of_method = [row for row in curves if row["method"] == name]
            worst = min(of_method, key=lambda row: row["accuracy"])
            table.append(
                {
                    "method": name,
                    "changes": choices[name].changed_part if name in choices else "",
                    **_columns("accuracy", bootstrap.mean([*own.values()], [*own])),
                    **_columns("difference", gain),
                    "worst": worst["accuracy"],
                    "worst_position": worst["gold_position"],
                    **_columns("bias", biases.get(name, bootstrap.NO_ESTIMATE)),
                    **costs[name],
                    "n": gain.n,
                    "verdict": "" if name == UNMODIFIED else _verdict(gain),
                    "note": "",
                }
            )
        for name, reason in left_out.items():
            # Also remedies that were asked and whose replies are often no answers: what is left says nothing.
            table.append({"method": name, "verdict": LEFT_OUT, "note": reason})
        remedies = pd.DataFrame(table).reindex(columns=COLUMNS)
        return {"remedies": remedies, "curves": pd.DataFrame(curves)}

    def _choices(self, run: Run) -> dict[str, MethodChoice]:
        """The methods to ask, by name; those of a list together."""
        choices = {}
        for names in map(_names, self.methods or run.all_methods):
            parts = {name: run.all_methods[name] for name in names}
            joined = TOGETHER.join(parts)
            # A list of one is that method.
            choices[joined] = parts.get(joined) or MethodChoice.listed(parts, joined)
        return choices

    def _costs(
        self, run: Run, asked: Sequence[Example], methods: Mapping[str, Method]
    ) -> dict[str, Row]:
        """Time, tokens and peak memory of the timed ones of the examples under each method, by its name.

        Memory is that of the process, or on a GPU that of its tensors; None where neither is known.
        """
        examples = evenly_spaced(asked, self.timed)
        encoded = run.prompts.encode(examples)
        device = run.lm.device
        tokens: dict[str, float] = {}
        memory: dict[str, float | None] = {}

        def ask(name: str) -> list[str]:
            # The round that warms up measures memory: to give some back takes time.
            is_counted = name not in memory and _reset_peak(device)
            memory.setdefault(name, None)
            before = run.lm.tokens_read + run.lm.tokens_written
            # A new plan each time: one that is kept would find its prefills in memory.
            plan = plan_replies([Subject(run, name, methods[name])], encoded, examples)
            rows = [row for batch in plan.batches for row in plan.answer(batch)]
            read = run.lm.tokens_read + run.lm.tokens_written - before
            tokens[name] = read / len(examples)
            if is_counted:
                memory[name] = _peak_gigabytes(device)
            return [str(row.get("output", "")) for row in rows]

        ways = {name: partial(ask, name) for name in methods}
        with run.progress("times", len(ways) * (self.repeats + 1)) as advance:
            # A GPU works while the process waits.
            timer = replace(self, clock="wall") if device.type == "cuda" else self
            timed = timer.compared(
                "prompts", ways, device, faster=False, same=False, advance=advance
            )
        return {
            row["way"]: {
                "seconds": row["seconds"] / len(examples),
                "time": row["ratio"],
                "time_low": row["ratio_min"],
                "time_high": row["ratio_max"],
                "tokens": tokens[row["way"]],
                "memory_gb": memory[row["way"]],
            }
            for row in timed
        }

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Whether any remedy raises the average for sure."""
        raced = _raced(tables["remedies"])
        if raced.empty:
            return []
        best = best_remedy(raced)
        if best["difference_high"] < 0:
            # Another one, measured less exactly, may still raise it.
            best = raced.loc[raced["difference_high"].idxmax()].to_dict()
        points = bootstrap.estimate_in(best, "difference", int(best["n"]))
        statistic = f"{best['method']} minus unmodified, points of the average, {_time_in_words(best)}"
        if len(raced) > 1:
            statistic += f"; of {len(raced)} remedies, the interval for all together"
        claim = "a remedy raises the average"
        return [Finding.above(claim, statistic, points, 0.0).control()]

    def glance(self, tables: Tables) -> Glance | None:
        """See :meth:`Study.glance`."""
        raced = _raced(tables["remedies"])
        if raced.empty:
            return _empty_glance(tables["remedies"])
        best = best_remedy(raced)
        change = with_interval(
            best["difference"], best["difference_low"], best["difference_high"], "+.1f"
        )
        name = best["method"]
        time_name = "time (least and most of the rounds)"
        numbers = (
            Number(f"change of the average, {name}", change, "points"),
            Number(time_name, _time_ratio(best), "times the unmodified model's"),
        )
        ties = _ties(raced, best)
        tie = f"; {ties[0]} lies within its interval" if ties else ""
        if len(ties) > 1:
            tie = f"; {len(ties)} others lie within its interval"
        details = ""
        if ties:
            details = f"Within the interval of {name}: {', '.join(ties)}."
        among = f" under each of {len(raced)} remedies" if len(raced) > 1 else ""
        effect = f"{best['difference']:+.1f} points on average {_time_in_words(best)}"
        tone: Tone
        if best["verdict"] == HELPS:
            word, tone = HELPS, "good"
            sentence = f"Try {name} first: {effect}{tie}."
            command = shlex.join(["posbench", f"method={_typed(name)}"])
            purpose = "measures what it leaves of the position bias"
        else:
            is_undecided = (raced["verdict"] == CANNOT_TELL).any()
            word, tone = "none helps for sure", "open" if is_undecided else "bad"
            is_above = best["difference"] > 0
            best_is = f"; the best is {name}, {effect}" if is_above else ""
            sentence = f"No remedy raises the average for sure{best_is}."
            command = purpose = ""
        return Glance(
            word,
            tone,
            sentence,
            numbers,
            command,
            purpose,
            details,
            sample=f"{best['n']:.0f} questions{among}",
            rule="The change is paired, prompt by prompt, and its interval holds for all remedies together.",
        )

    def sections(self, tables: Tables, figures: Drawn) -> list[Section]:
        """See :meth:`Study.sections`: the remedies, the best first, and those left out with the reason."""
        table = tables["remedies"]
        is_out = table["verdict"] == LEFT_OUT
        ranked = table[~is_out].sort_values(
            "difference", ascending=False, kind="stable"
        )
        rows = [_cells(row) for row in ranked.to_dict("records")]
        left_out = [
            [str(row["method"]), str(row["note"])]
            for row in table[is_out].to_dict("records")
        ]
        text = (
            "The same questions for all. Differences are paired against the unmodified model and prompt, and their "
            "intervals hold for all remedies together; the other intervals are those of each alone (95 %). Time: of a "
            "prompt with its reply over the unmodified model's, all in turn in this run, with the least and the most "
            "of the rounds. Without a position bias, a remedy is right, or wrong, nearly everywhere, or too few "
            "questions were asked to tell."
        )
        header: Sequence[str] = HEADER
        memory = ranked["memory_gb"]
        if memory.notna().any():
            text += " Peak memory: of the process, or on a GPU of its tensors."
            header = (*HEADER, "peak memory (GB)")
            for cells, value in zip(rows, memory, strict=True):
                cells.append("" if np.isnan(value) else f"{value:.3g}")
        sections = [Section("Left out", "", ("method", "reason"), left_out)]
        if rows:
            sections.insert(0, Section("Remedies", text, header, rows, figures))
        return sections

    def figures(self, tables: Tables) -> Drawn:
        """Average and worst position over the time of a prompt."""
        table = tables["remedies"]
        drawn = table[table["verdict"] != LEFT_OUT]
        if drawn.empty:
            return {}
        caption = (
            "Average (95 % intervals of each alone) and worst gold position over the time of a prompt (bars: the least "
            "and the most of the rounds), beside the unmodified model's (black). Named are the remedies that are no "
            "worse than it, and than which no other is both better and cheaper."
        )
        return {"remedies": (_draw(drawn), caption)}


def _reset_peak(device: torch.device) -> bool:
    """Count the peak of memory anew; False where it cannot be known."""
    if device.type != "cuda":
        return reset_resident_peak()
    torch.cuda.reset_peak_memory_stats(device)
    return True


def _peak_gigabytes(device: torch.device) -> float | None:
    """The peak of memory since it was counted anew; None where it is not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    peak = resident_peak()
    return None if peak is None else peak / 1e9


def _rewritten(
    run: Run, choice: MethodChoice, examples: Sequence[Example]
) -> list[Example] | None:
    """The examples as a remedy asks them that changes their text; None where it does not, or does not apply."""
    try:
        method = choice.build()
        if method.rewrites and method.rewrites_by_text:
            return run.prompts.rewrite(examples, method)
    except UserError:
        pass  # the study says why it is left out
    return None


def _told_apart(sets: Sequence[Sequence[Example]]) -> list[Example]:
    """The examples of all sets, each under an id of its own."""
    return [
        replace(example, id=f"{number} {example.id}")
        for number, examples in enumerate(sets)
        for example in examples
    ]


def _applicable(
    run: Run,
    choices: Mapping[str, MethodChoice],
    asked: Sequence[Example],
    num_tokens: int,
) -> tuple[dict[str, Method], dict[str, str]]:
    """The methods that fit model and task, the unmodified model first, and the reasons against the others.

    Args:
        run: The run.
        choices: The methods by name.
        asked: The examples.
        num_tokens: Tokens of the longest prompt with its reply.
    """
    methods: dict[str, Method] = {UNMODIFIED: Unmodified()}
    left_out: dict[str, str] = {}
    name_of_prompts = {tuple(e.prompt for e in asked): UNMODIFIED}
    is_ordered = ranks_items(run.task, asked)
    for name, choice in choices.items():
        try:
            method = choice.build()
            method.check(run.lm)
            reason = method.without_effect(run.lm, num_tokens)
            if reason:
                left_out[name] = reason
                continue
            if not is_ordered and any(
                issubclass(cls, PromptChange) and cls.uses_order()
                for cls in choice.classes
            ):
                left_out[name] = UNRANKED
                continue
            if choice.parts:
                # Some methods do not go together, which shows where they meet.
                with method.applied(run.lm):
                    pass
            if method.rewrites_by_text and method.rewrites:
                rewritten = run.prompts.rewrite(asked, method)
                run.prompts.encode([max(rewritten, key=lambda e: len(e.prompt))])
            if choice.changes_prompts_alone:
                prompts = tuple(example.prompt for example in rewritten)
                first = name_of_prompts.setdefault(prompts, name)
                if first != name:
                    same = first.replace(UNMODIFIED, "the unmodified ones")
                    left_out[name] = f"the same prompts as {same}"
                    continue
        except UserError as error:
            left_out[name] = f"{error.field}: {error.allowed}"
            continue
        methods[name] = method
    return methods, left_out


def _names(entry: str | Sequence[str]) -> Sequence[str]:
    """The names of an entry of ``study.methods``."""
    return (entry,) if isinstance(entry, str) else entry


def _typed(name: str) -> str:
    """The name of a remedy as a value of ``method``."""
    names = name.split(TOGETHER)
    return name if len(names) == 1 else f"[{','.join(names)}]"


def _empty_glance(table: pd.DataFrame) -> Glance:
    """The first look where nothing could be compared."""
    notes = table.set_index("method")["note"].dropna().astype(str)
    notes = notes[notes.str.startswith(PROBLEM)]
    if len(notes):
        sentence = "Too many replies under each remedy that was asked are no answers, so none can be compared."
        if UNMODIFIED in notes:
            sentence = "Too many replies of the unmodified model are no answers, so no remedy can be compared with it."
        details = sentence_case(notes.iloc[0])
        setting = setting_in(details)
        command = purpose = ""
        if setting:
            command = f"posbench study=remedies {setting}"
            purpose = "what the missing answers call for"
        return Glance(
            "cannot tell",
            "open",
            sentence,
            next=command,
            purpose=purpose,
            details=details,
        )
    sentence = "No remedy fits this model and these prompts; the page says why."
    return Glance("cannot tell", "open", sentence)


def _raced(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of the remedies that were asked."""
    return table[(table["method"] != UNMODIFIED) & (table["verdict"] != LEFT_OUT)]


def best_remedy(raced: pd.DataFrame) -> Row:
    """The remedy with the highest average among those that help, or among all; of those alike the cheapest.

    Args:
        raced: Rows of ``remedies`` without the unmodified model.
    """
    helping = raced[raced["verdict"] == HELPS]
    candidates = helping if len(helping) else raced
    alike = candidates[
        candidates["difference"] >= candidates["difference"].max() - ALIKE
    ]
    best: Row = alike.sort_values("time", kind="stable").iloc[0].to_dict()
    return best


def _ties(raced: pd.DataFrame, best: Row) -> list[str]:
    """Names of the other remedies whose difference lies in the interval of the best one, the largest first."""
    others = raced[raced["method"] != best["method"]]
    ties = others[others["difference"] >= best["difference_low"]]
    names = ties.sort_values("difference", ascending=False, kind="stable")["method"]
    return [str(name) for name in names]


def _cells(row: Row) -> list[str]:
    """A remedy as a row of the page's table."""
    is_base = row["method"] == UNMODIFIED

    def interval(name: str, form: str = ".1f") -> str:
        return with_interval(row[name], row[f"{name}_low"], row[f"{name}_high"], form)

    return [
        "unmodified" if is_base else str(row["method"]),
        "" if is_base else str(row["changes"]),
        interval("accuracy"),
        "" if is_base else interval("difference", "+.1f"),
        f"{row['worst']:.0f}",
        "" if np.isnan(row["bias"]) else interval("bias"),
        "1" if is_base else _time_ratio(row),
        f"{row['tokens']:.0f}",
        f"{row['n']:.0f}",
        "" if is_base else str(row["verdict"]),
    ]


def _time_ratio(row: Row) -> str:
    """Time over the unmodified model's, with the least and the most of the rounds where they differ."""
    text, low, high = (f"{row[key]:.1f}" for key in ("time", "time_low", "time_high"))
    return text if low == text == high else f"{text} ({low} to {high})"


def _time_in_words(row: Row) -> str:
    """What a remedy costs; with the range of its rounds where some are faster than the unmodified model."""
    if row["time_low"] >= 1 / SAME_TIME and row["time_high"] <= SAME_TIME:
        return "in about the same time"
    is_open = row["time_low"] < 1 < row["time_high"]
    ratio = _time_ratio(row) if is_open else f"{row['time']:.1f}"
    return f"at {ratio} times the time"


def _verdict(gain: bootstrap.Estimate) -> str:
    """What the difference of the average says, with the interval for all remedies together."""
    if gain.ci_low > 0:
        return HELPS
    if gain.ci_high < 0:
        return HARMS
    if within_margin(gain.ci_low, gain.ci_high):
        return NO_EFFECT
    return CANNOT_TELL


def _columns(name: str, estimate: bootstrap.Estimate) -> Row:
    """A share with its interval, in points."""
    ends = (name, f"{name}_low", f"{name}_high")
    return {
        end: round(100 * number, 2)
        for end, number in zip(ends, estimate[:3], strict=True)
    }


def _missing_note(run: Run, rows: Sequence[Row]) -> str:
    """Why the scores of a method mean nothing: too many of its replies are no answers; else empty."""
    frame, _ = score_frame(rows, run.task)
    thinking = run.model.thinking_tokens
    lengths = (row["tokens"] for row in rows)
    room = room_for_replies(run.encoder.context_window, lengths)
    return missing_note(
        frame, run.task.max_new_tokens, run.runtime.resamples, 0, thinking, room
    )


def _question(row: Row) -> str:
    return str(row["cluster"] or row["id"])


def _scores(rows: Sequence[Row], metric: str) -> Scores:
    """Mean score of each question over the gold positions, by question."""
    values = defaultdict[str, list[float]](list)
    for row in rows:
        if row.get("scores"):
            values[_question(row)].append(float(row["scores"][metric]))
    return {question: float(np.mean(numbers)) for question, numbers in values.items()}


def _curves(rows: Mapping[str, Sequence[Row]], metric: str) -> list[Row]:
    """Accuracy in percent of each method at each gold position."""
    table = []
    for name, of_method in rows.items():
        by_position = defaultdict[int, list[Row]](list)
        for row in of_method:
            if row.get("scores"):
                by_position[row["gold_position"]].append(row)
        for position, found in sorted(by_position.items()):
            values = [float(row["scores"][metric]) for row in found]
            estimate = bootstrap.mean(values, [_question(row) for row in found])
            table.append(
                {
                    "method": name,
                    "gold_position": position,
                    **_columns("accuracy", estimate),
                    "n": estimate.n,
                }
            )
    return table


def _biases(
    rows: Mapping[str, Sequence[Row]], metric: str, resamples: int, chance: float
) -> dict[str, bootstrap.Estimate]:
    """Position bias of each method, by its name, as every run has it: NaN where none can be seen.

    Args:
        rows: Replies by method.
        metric: The task's metric.
        resamples: Bootstrap draws.
        chance: Score of a guess.
    """
    frame = pd.DataFrame(
        [
            {
                "method": name,
                "gold_position": row["gold_position"],
                "cluster": _question(row),
                "score": float(row["scores"][metric]),
            }
            for name, of_method in rows.items()
            for row in of_method
            if row.get("scores")
        ]
    )
    if frame.empty:
        return {}
    statistics = statistic_rows(frame, "score", UNMODIFIED, resamples, 0, chance)
    return {
        row.method: row.estimate
        for row in statistics
        if row.statistic == "position_bias"
    }


@plot.styled
def _draw(table: pd.DataFrame) -> Figure:
    """Average and worst position over the relative time of a prompt."""
    figure, panels = plot.new_figure(plot.PAGE, 2.6, 1, 2, n=table["n"], sharex=True)
    is_base = (table["method"] == UNMODIFIED).to_numpy()
    for axes, column in zip(panels, ("accuracy", "worst"), strict=True):
        times = table["time"].to_numpy()
        values = table[column].to_numpy()
        rounds = table[["time_low", "time_high"]].to_numpy().T
        bars = partial(axes.errorbar, fmt="none", color=plot.SHADE, linewidth=0.8)
        bars(times, values, xerr=np.abs(rounds - times))
        if column == "accuracy":
            ends = table[["accuracy_low", "accuracy_high"]].to_numpy().T
            bars(times, values, yerr=np.abs(ends - values))
        axes.plot(times[~is_base], values[~is_base], "o", color=plot.BLUE)
        axes.plot(times[is_base], values[is_base], "o", color=plot.BLACK)
        front = _front(times, values, values[is_base].min())
        axes.plot(
            times[front], values[front], color=plot.GUIDE, linewidth=0.8, zorder=0
        )
        lowest = -np.inf
        for index in sorted({*front, int(is_base.argmax())}, key=lambda i: values[i]):
            name = table["method"].iloc[index].replace(UNMODIFIED, "unmodified")
            # Above and left of the front there are no points; names close to each other go higher.
            lowest = max(values[index], lowest + NAME_HEIGHT)
            axes.annotate(
                name,
                (times[index], lowest),
                xytext=(-4, 2),
                textcoords="offset points",
                fontsize="small",
                ha="right",
            )
        axes.set_xscale("log")
        ticks = [t for t in TICKS if 0.9 * times.min() <= t <= 1.1 * times.max()]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlim(left=times.min() * (times.min() / times.max()) ** NAME_SPACE)
        axes.set_xlabel("time of a prompt over the unmodified model's")
        axes.set_ylim(-3, 108)
    panels[0].set_ylabel("average accuracy (%)")
    panels[1].set_ylabel("accuracy at the worst position (%)")
    return figure


def _front(times: np.ndarray, values: np.ndarray, least: float) -> list[int]:
    """Indices of the points of a value of ``least`` or more, none of which another beats in value and time, by time."""
    front: list[int] = []
    for index in sorted(range(len(times)), key=lambda i: (times[i], -values[i])):
        best = values[front[-1]] if front else -np.inf
        if values[index] >= least and values[index] > best:
            front.append(index)
    return front
