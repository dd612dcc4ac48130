"""Which order of the documents, how many, said twice? Policies that change the prompt, raced on the same questions."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Lt

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.late import Figure, pd
from posbench.measure.replies import encode_prompt
from posbench.methods import Method, Unmodified
from posbench.methods.choice import MethodChoice
from posbench.methods.prompt_change import UNRANKED, PromptChange
from posbench.model.encode import Encoder
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.budget import Deadline, Spending
from posbench.run.folder import PREDICTIONS
from posbench.run.prompts import rewrite_examples
from posbench.run.replies import scored_replies
from posbench.run.stop import ReadRows, StopRule, StopRules
from posbench.schema import Count, Seed
from posbench.stats import bootstrap
from posbench.stats.glance import Glance, Number, Tone
from posbench.stats.outcomes import (
    describe_kinds,
    is_scorable,
    kind_of_row,
    next_step,
    room_for_replies,
)
from posbench.stats.policies import (
    CANNOT_TELL,
    MAX_MISSING,
    USE,
    PolicyRace,
    PolicyVerdict,
    Scores,
    Standing,
    detectable_difference,
)
from posbench.studies.base import Study, Tables
from posbench.studies.probes import (
    CLOSED_BOOK,
    GOLD_ALONE,
    gold_documents,
    with_documents,
)
from posbench.tasks import Example, Task
from posbench.tasks.items import ranks_items
from posbench.tasks.scorers import contains_answer

AS_RETRIEVED = "as_retrieved"
"""The policy in use: the prompt as the task gives it."""
VOTE = "vote"
VOTERS = (AS_RETRIEVED, "reversed", "shuffled")
"""Policies whose replies vote; where all three differ, the first one's counts."""
RACE_SHARE = 0.7
"""Share of a budget that is spent when the race ends; the rest is for held-back questions and probes."""
NO_REFERENCES = "the log holds no reference answers"
VERDICT_FILE = "order.json"

QUESTION_COLUMNS = [
    "id",
    "documents",
    "gold_rank",
    "score",
    "cause",
    "wrong_document",
    "closed_book",
    "gold_alone",
    "right_under",
]
"""Columns of ``questions.csv``."""
RANK_COLUMNS = ["policy", "rank", "accuracy", "ci_low", "ci_high", "n"]
"""Columns of ``ranks.csv``."""

Cause = Literal[
    "right",
    "gold not retrieved",
    "right in another order",
    "right with fewer documents",
    "right with a repetition",
    "not even from the gold document alone",
    "answered from a wrong document",
    "wrong in every way",
    "not looked into",
]
"""What became of a question as retrieved; the first that applies."""


class Prepared(NamedTuple):
    """The policies of a log.

    Attributes:
        methods: The methods to ask, the policy in use first.
        same_as: Policies whose prompts are those of another one, with its name.
        left_out: Policies that cannot be applied, with the reason.
        prompts: The examples under each of the methods, by id.
    """

    methods: dict[str, Method]
    same_as: dict[str, str]
    left_out: dict[str, str]
    prompts: dict[str, dict[str, Example]]

    @property
    def voters(self) -> list[str]:
        """The policies whose replies vote, by the names under which they are asked."""
        return [self.same_as.get(name, name) for name in VOTERS]


@dataclass(frozen=True, kw_only=True)
class OrderStudy(Study):
    """Compare policies with the prompts as they are, on the same questions, in rounds that drop the losers.

    A share of the questions is held back: the winner of the race and the policy in use are asked them last, so that one
    number is free of the choice. Questions of the race are then asked without their documents, and with the gold ones
    alone, where these are known: that tells apart what no order changes.

    Attributes:
        policies: Names of methods that change the prompt alone; empty: all of them.
        vote: Whether the replies of three orders vote; voting may amplify a position bias that they share.
        held_back: Share of the questions on which the winner is checked.
        round_questions: Questions after which losers drop out.
        probes: Questions at most that are asked without documents, and with the gold ones alone.
        seed: Of the order of the questions.
    """

    all_methods: ClassVar[bool] = True
    asks_only: ClassVar[bool] = True

    policies: tuple[str, ...] = ()
    vote: bool = False
    held_back: Annotated[float, Ge(0), Lt(1)] = 0.3
    round_questions: Count = 10
    probes: Annotated[int, Ge(0)] = 100
    seed: Seed = 0

    def _known_policies(self, choices: Mapping[str, MethodChoice]) -> list[str]:
        """Return the names of the methods that change the prompt alone.

        Raises:
            UserError: A chosen policy is none of them.
        """
        known = [
            name for name, choice in choices.items() if choice.changes_prompts_alone
        ]
        for name in self.policies:
            if name not in known:
                hint = "posbench ls methods describes them"
                raise UserError("study.policies", name, ", ".join(known), hint)
        return known

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`: the policies exist and change the prompt alone, and the prompts have items."""
        known = self._known_policies(run.all_methods)
        for name in self.policies:
            if self._is_unranked(
                run.all_methods[name].build(), run.task, run.evaluation
            ):
                hint = "posbench order LOG asks in the order of a log"
                allowed = f"repetitions: {UNRANKED}"
                raise UserError("study.policies", name, allowed, hint)
        missing = {*VOTERS[1:]} - {*(self.policies or known)}
        if self.vote and missing:
            allowed = f"false, or policies with {' and '.join(sorted(missing))}, whose replies vote"
            raise UserError("study.vote", True, allowed, "set study.vote=false")
        if not any(example.items for example in run.evaluation):
            allowed = "a task whose prompts have items: retrieval_log, own_data, nq_multidoc, kv_retrieval"
            hint = "posbench order LOG model=..."
            raise UserError("task", run.task.name, allowed, hint)
        num_single = sum(len(example.items) == 1 for example in run.evaluation)
        if num_single == len(run.evaluation) and not self.policies:
            allowed = f"prompts of several documents: all {num_single} have a single one, which no order can change"
            hint = "log all retrieved documents, or repeat one: study.policies=[documents_twice]"
            raise UserError("task", run.task.name, allowed, hint)
        prepared = self.prepared(run.encoder, run.task, run.all_methods)
        if len(prepared.methods) == 1:
            # Where the prompts as retrieved are too long as well, that is the fault.
            longest = max(run.evaluation, key=lambda e: len(e.prompt))
            encode_prompt(run.encoder, run.task, longest)
            unchanged = dict.fromkeys(prepared.same_as, "prompts as retrieved")
            reasons = _listed_by_reason({**prepared.left_out, **unchanged})
            allowed = f"policies that change a prompt, unlike {'; '.join(reasons)}"
            hint = "leave out study.policies, or name others"
            raise UserError("study.policies", [*self.policies], allowed, hint)

    def _is_unranked(
        self, method: Method, task: Task, examples: Sequence[Example]
    ) -> bool:
        """Whether a policy means nothing on a task; replies under several orders may vote all the same."""
        if self.vote or not isinstance(method, PromptChange):
            return False
        return method.uses_order() and not ranks_items(task, examples)

    def prepared(
        self, encoder: Encoder, task: Task, choices: Mapping[str, MethodChoice]
    ) -> Prepared:
        """Return the policies that can be applied to the prompts of a task, each set of equal prompts once.

        Args:
            encoder: Makes the model's prompts.
            task: The task.
            choices: All methods by name.
        """
        examples = task.evaluation()
        # All that prompts are made from; the start of a run on a server asks for the same ones five times.
        texts = (type(encoder), encoder.tokenizer, encoder.name, encoder.chat_template)
        made_from = (texts, task.max_new_tokens, examples, dict(choices))
        for earlier, prepared in self._last_prepared:
            if earlier == made_from:
                return prepared
        prepared = self._prepare(encoder, task, choices, examples)
        self._last_prepared[:] = [(made_from, prepared)]
        return prepared

    @cached_property
    def _last_prepared(self) -> list[tuple[Any, Prepared]]:
        """The last result of :meth:`prepared` with what it was made from; at first empty."""
        return []

    def _prepare(
        self,
        encoder: Encoder,
        task: Task,
        choices: Mapping[str, MethodChoice],
        examples: Sequence[Example],
    ) -> Prepared:
        """Rewrite examples under all policies, see :meth:`prepared`."""
        methods: dict[str, Method] = {AS_RETRIEVED: Unmodified()}
        name_of_prompts = {tuple(e.prompt for e in examples): AS_RETRIEVED}
        by_id = {AS_RETRIEVED: {example.id: example for example in examples}}
        same_as = {}
        left_out = {}
        known = self._known_policies(choices)
        for name in self.policies or known:
            method = choices[name].build()
            if self._is_unranked(method, task, examples):
                left_out[name] = UNRANKED
                continue
            try:
                rewritten = rewrite_examples(encoder, task, examples, method)
                encode_prompt(
                    encoder, task, max(rewritten, key=lambda e: len(e.prompt))
                )
            except UserError as error:
                left_out[name] = error.allowed
                continue
            prompts = tuple(example.prompt for example in rewritten)
            first = name_of_prompts.setdefault(prompts, name)
            if first == name:
                methods[name] = method
                by_id[name] = {example.id: example for example in rewritten}
            else:
                same_as[name] = first
        return Prepared(methods, same_as, left_out, by_id)

    def asked_examples(
        self, encoder: Encoder, task: Task, choices: Mapping[str, MethodChoice]
    ) -> list[Example]:
        """See :meth:`Study.asked_examples`: all policies on the questions of the race, and the probes.

        Held-back questions are asked under the longest policy, which may not win.
        """
        asked, kept_back = self._split(_judged(task.evaluation()))
        examples = list[Example]()
        longest: list[Example] = []
        for by_id in self.prepared(encoder, task, choices).prompts.values():
            examples += [by_id[example.id] for example in asked]
            held = [by_id[example.id] for example in kept_back]
            longest = max(longest, held, key=lambda h: sum(len(e.prompt) for e in h))
        examples += [*kept_back, *longest]
        if any(example.answers for example in asked):
            for probes in self._probes(asked).values():
                examples += probes
        return examples

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Race the policies, check the winner, and look for the causes of wrong answers.

        Returns:
            ``policies``: a row for each policy: accuracy, difference from the policy in use in points, flips, tokens
            and cost of a question. ``questions``: a row for each question: its gold rank, its score as retrieved and
            the cause. ``ranks``: accuracy by the rank of the gold document, of the policy in use and of the leader.
        """
        prepared = self.prepared(run.encoder, run.task, run.all_methods)
        for line in _listed_by_reason(prepared.left_out):
            run.console.print(f"order: left out: {line}")
        has_references = any(example.answers for example in run.evaluation)
        asked, kept_back = self._split(_judged(run.evaluation))
        # In the random order of the race, on which its intervals rest.
        examples = {example.id: example for example in (*asked, *kept_back)}
        others = tuple(prepared.methods)[1:]
        race = PolicyRace(AS_RETRIEVED, others + (VOTE,) * self.vote)
        self._announce(run, asked, len(others), has_references)
        elimination = Elimination(
            race, examples, run.task.metric, has_references, run.spending
        )
        rules = StopRules(elimination, _race_deadline(run), run.spending)
        late_rules = _late_rules(run)
        size = self._round_size(run, prepared.methods, asked)
        rows = self._replies(run, prepared.methods, asked, rules, size)
        scores = _scores(rows, examples, run.task.metric)
        if self.vote:
            scores[VOTE] = _votes(run, rows, examples, prepared.voters)
        missing = {name: _missing(policy_rows) for name, policy_rows in rows.items()}
        remaining = race.remaining(scores, list(prepared.methods))
        leader = AS_RETRIEVED
        if scores[AS_RETRIEVED]:
            tokens = {name: _tokens(asked) or 0.0 for name, asked in rows.items()}
            leader = race.leader(scores, remaining, tokens, missing)
        held_back = None
        if leader != AS_RETRIEVED and kept_back:
            pair = {n: prepared.methods[n] for n in (AS_RETRIEVED, leader)}
            held_rows = self._replies(run, pair, kept_back, late_rules)
            held_scores = _scores(held_rows, examples, run.task.metric)
            held_back = _gain(held_scores[leader], held_scores[AS_RETRIEVED])
            for name in pair:
                rows[name] += held_rows[name]
                scores[name] = {**scores[name], **held_scores[name]}
        verdict = PolicyVerdict(CANNOT_TELL, AS_RETRIEVED, NO_REFERENCES)
        probe_rows: dict[str, list[Row]] = {}
        if has_references:
            sound = [n for n in remaining if missing.get(n, 0.0) <= MAX_MISSING]
            unsound = [name for name in remaining if name not in sound]
            verdict = race.verdict(scores, leader, held_back, sound, unsound)
            verdict = _with_caveats(
                verdict, rows[AS_RETRIEVED], is_checked=not kept_back or bool(held_back)
            )
            answered = {row["id"] for row in rows[AS_RETRIEVED]}
            probed = [example for example in asked if example.id in answered]
            for name, probes in self._probes(probed).items():
                unmodified: Mapping[str, Method] = {name: Unmodified()}
                probe_rows |= self._replies(run, unmodified, probes, late_rules)
        stopped = None
        if rules.ending not in (None, elimination) or late_rules.ending:
            # A larger budget goes on from here.
            stopped = (len(rows[AS_RETRIEVED]), len(examples))
        run.out.mark("study", stopped=stopped)
        causes = _causes(run, examples, rows, probe_rows, prepared.methods)
        table = _policy_table(race, scores, rows, prepared, remaining)
        for row in table:
            row["use"] = verdict.name == USE and row["name"] == verdict.policy
            row["leads"] = row["name"] == leader
        log = getattr(run.task, "log", None)
        facts = {
            "verdict": verdict.name,
            "policy": verdict.policy,
            "reason": verdict.reason,
            "needed_questions": verdict.needed,
            "leader": leader,
            "held_back": _in_points(held_back) if held_back else None,
            "questions": len({e.question_id for e in examples.values()}),
            "stopped": bool(stopped),
            "step": _step_against_missing(run, rows, remaining),
            "causes": dict(Counter(row["cause"] for row in causes)),
            "left_out": prepared.left_out,
            "notes": run.task.notes(),
            "probes": _probe_facts(probe_rows, examples, run.task.metric),
            "recipe": "",
            "policies": table,
        }
        if verdict.name == USE:
            is_resorted = any("relevance" in e.orders for e in examples.values())
            are_distances = bool(getattr(log, "are_distances", False))
            method = prepared.methods.get(verdict.policy)
            facts["recipe"] = _recipe(method, is_resorted, are_distances)
        run.out.write_json(VERDICT_FILE, facts)
        return {
            "policies": pd.DataFrame(table),
            "questions": pd.DataFrame(causes, columns=QUESTION_COLUMNS),
            "ranks": _rank_table(
                examples, rows, run.task.metric, (AS_RETRIEVED, leader)
            ),
        }

    def _announce(
        self,
        run: Run,
        asked: Sequence[Example],
        num_policies: int,
        has_references: bool,
    ) -> None:
        """Print, before anything is asked, what the comparison can show."""
        questions = len({example.question_id for example in asked})
        left_out = len(run.evaluation) - len(_judged(run.evaluation))
        if not has_references:
            message = "order: no reference answers: it is measured how many replies change, and no policy is judged"
        else:
            least = detectable_difference(questions, num_policies)
            detected = "too few to detect any gain"
            if least < 1:
                points = f"about {100 * least:.0f} points"
                detected = f"a gain of {points} would be detected (where one answer in ten changes)"
            message = f"order: {questions} questions, {num_policies} policies against {AS_RETRIEVED}; {detected}"
        if left_out:
            message += f"; {left_out} prompts without a reference are not asked"
        run.console.print(message)

    def _split(
        self, examples: Sequence[Example]
    ) -> tuple[list[Example], list[Example]]:
        """The examples of the race, in random order of their questions, and those held back."""
        questions = list(dict.fromkeys(example.question_id for example in examples))
        random.Random(f"order {self.seed}").shuffle(questions)
        num_back = int(self.held_back * len(questions))
        rank = {name: number for number, name in enumerate(questions)}
        ordered = sorted(examples, key=lambda example: rank[example.question_id])
        end = len(questions) - num_back
        return (
            [e for e in ordered if rank[e.question_id] < end],
            [e for e in ordered if rank[e.question_id] >= end],
        )

    def _probes(self, examples: Sequence[Example]) -> dict[str, list[Example]]:
        """The first questions without their documents, and with the gold ones alone, by the name of the probe."""
        questions = list(dict.fromkeys(example.question_id for example in examples))
        chosen = {*questions[: self.probes]}
        first = [example for example in examples if example.question_id in chosen]
        probes = {
            CLOSED_BOOK: [with_documents(example, ()) for example in first],
            GOLD_ALONE: [
                with_documents(example, gold)
                for example in first
                if (gold := gold_documents(example))
            ],
        }
        return {name: examples for name, examples in probes.items() if examples}

    def _replies(
        self,
        run: Run,
        methods: Mapping[str, Method],
        examples: Sequence[Example],
        rules: StopRules,
        round_questions: int | None = None,
    ) -> dict[str, list[Row]]:
        """Scored replies to some examples by method, asked in rounds."""
        encoded = run.prompts.encode(examples)
        run.note_prompts(encoded)
        size = round_questions or self.round_questions
        return scored_replies(run, PREDICTIONS, methods, encoded, rules, examples, size)

    def _round_size(
        self, run: Run, methods: Mapping[str, Method], asked: Sequence[Example]
    ) -> int:
        """Questions of a round: fewer where such a round would take more than a quarter of the race's time.

        A budget of time ends between rounds, so the first question is asked alone, and tells what one takes.
        """
        if run.deadline is None:
            return self.round_questions
        first = [e for e in asked if e.question_id == asked[0].question_id]
        watch = run.deadline.watch
        began = watch.total
        self._replies(run, methods, first, StopRules())
        seconds = max(watch.total - began, 1e-9)
        affordable = RACE_SHARE * run.deadline.seconds / 4 / seconds
        return max(min(int(affordable), self.round_questions), 1)

    def glance(self, tables: Tables) -> Glance | None:
        """See :meth:`Study.glance`: the policy to use, or the one with the largest gain."""
        policies = tables["policies"]
        # A run of an earlier version has no such columns.
        defaults = {"missing": 0.0, "same_as": "", "leads": False}
        absent = {
            name: value for name, value in defaults.items() if name not in policies
        }
        policies = policies.assign(**absent)
        changed = policies[policies["name"] != AS_RETRIEVED]
        same_as = changed["same_as"]
        raced = changed[same_as.isna() | (same_as == "")]
        others = changed[changed["missing"].fillna(0.0) <= MAX_MISSING]
        others = others.dropna(subset="difference")
        unread = raced[raced["missing"] > MAX_MISSING]["name"]
        details = ""
        if len(unread):
            details = f"Not compared, as too many of their replies are no answers: {', '.join(unread)}."
        if others.empty:
            if details:
                sentence = "No policy can be compared: too many of their replies are no answers."
                return Glance("cannot tell", "open", sentence, details=details)
            return None
        used = others[others["use"]]
        leads = policies.loc[policies["leads"].astype(bool), "name"]
        is_none_better = AS_RETRIEVED in set(leads)
        # Policies that dropped out were asked fewer questions: their differences are of others.
        most_asked = others[others["n"] == others["n"].max()]
        last_choice = most_asked if is_none_better else others
        candidates = (used, others[others["leads"].astype(bool)], last_choice)
        best_rows = next(rows for rows in candidates if len(rows))
        best = best_rows.nlargest(1, "difference").iloc[0]
        gain = bootstrap.estimate_in(best, "difference", int(best["n"]))
        numbers = (Number.of(str(best["name"]), gain, "points", "+.1f"),)
        sample = f"{gain.n:,} questions"
        rule = (
            f"Difference from the prompts as they were retrieved, paired; the interval holds for all {len(raced)} "
            "policies at once, also for one that was asked fewer questions."
        )
        word = "no sure gain"
        tone: Tone = "open"
        command = purpose = ""
        sentence = "No policy can be recommended; none answers more than the prompts as they were retrieved."
        if not used.empty:
            word, tone = "gains", "good"
            sentence = f"{best['name']} answers {gain.value:.1f} points more than the prompts as they were retrieved."
            command = f"posbench method={best['name']}"
            purpose = "measures scores and position bias under it"
        elif gain.value > 0 and not is_none_better:
            sentence = f"No policy can be recommended; the one that answers most is {best['name']}."
        return Glance(
            word,
            tone,
            sentence,
            numbers,
            command,
            purpose,
            details,
            sample,
            rule,
        )

    def figures(self, tables: Tables) -> Drawn:
        """Accuracy over tokens of all policies, and over the rank of the gold document."""
        policies = tables["policies"]
        drawn = {}
        if policies["accuracy"].notna().any():
            drawn["tokens"] = (
                _draw_tokens(policies),
                "Accuracy under each policy (95 % intervals of each alone; the dashed line is the policy in use), and "
                "the tokens of a question, read and written.",
            )
        ranks = tables.get("ranks")
        if ranks is not None and len(ranks):
            drawn["ranks"] = (
                _draw_ranks(ranks),
                "Accuracy over the rank of the first gold document, of questions whose gold document is known.",
            )
        return drawn


class Elimination(StopRule):
    """Drops policies that are surely worse than the best one, and ends the race once the verdict is decided.

    Args:
        race: The comparison.
        examples: The examples by id.
        metric: The score that counts.
        judges: Whether the replies have scores; else nothing drops out.
        spending: Tokens or money spent, of which the race leaves a share; None: no limit.
    """

    drops_methods = True

    def __init__(
        self,
        race: PolicyRace,
        examples: Mapping[str, Example],
        metric: str,
        judges: bool,
        spending: Spending | None,
    ) -> None:
        self._spending = spending
        self._race = race
        self._examples = examples
        self._metric = metric
        self._judges = judges
        self._remaining = {race.base, *race.policies}

    def ends_before(self, size: float, rows: ReadRows) -> bool:
        """See :meth:`posbench.run.stop.StopRule.ends_before`."""
        if not self._judges:
            return False
        by_method = defaultdict[str, list[Row]](list)
        for row in rows():
            by_method[row["method"]].append(row)
        scores = _scores(by_method, self._examples, self._metric)
        if not scores.get(self._race.base):
            return False
        names = [n for n in (self._race.base, *self._race.policies) if n in scores]
        self._remaining = set(self._race.remaining(scores, names))
        if self._spending and self._spending.share_spent > RACE_SHARE:
            return True
        return self._race.is_decided(scores, self._remaining)

    def leaves_out(self, method: str) -> bool:
        """See :meth:`posbench.run.stop.StopRule.leaves_out`."""
        return method not in self._remaining


def _scores(
    rows: Mapping[str, Sequence[Row]], examples: Mapping[str, Example], metric: str
) -> dict[str, dict[str, float]]:
    """Mean score of each question under each policy, in the order in which they were asked; without an answer: none."""
    scores = {}
    order = {name: number for number, name in enumerate(examples)}
    for name, policy_rows in rows.items():
        values = defaultdict[str, list[float]](list)
        for row in sorted(policy_rows, key=lambda row: order[row["id"]]):
            if row.get("scores"):
                question = examples[row["id"]].question_id
                values[question].append(float(row["scores"][metric]))
        scores[name] = {q: float(np.mean(numbers)) for q, numbers in values.items()}
    return scores


def _race_deadline(run: Run) -> Deadline | None:
    """The time at which the race ends; None without a budget of time."""
    if run.deadline is None:
        return None
    return Deadline(RACE_SHARE * run.deadline.seconds, run.deadline.watch)


def _late_rules(run: Run) -> StopRules:
    """The rules of the parts after the race; where one ends them, the rows of the race stay."""
    rules = StopRules(run.deadline, run.spending)
    rules.drops_methods = True
    return rules


def _with_caveats(
    verdict: PolicyVerdict, rows: Sequence[Row], is_checked: bool
) -> PolicyVerdict:
    """The verdict, or "cannot tell" where it rests on too few answers, or on an unchecked winner.

    Args:
        verdict: The verdict of the race.
        rows: Rows as retrieved.
        is_checked: Whether held-back questions were answered, or none are held back.
    """
    share = _missing(rows)
    reason = ""
    if share > MAX_MISSING:
        kinds = describe_kinds(rows)
        reason = (
            f"{100 * share:.0f} % of the replies as retrieved are no answers: {kinds}"
        )
    elif verdict.name == USE and not is_checked:
        reason = f"{verdict.policy} has {verdict.reason}, but no two held-back questions were answered"
    return PolicyVerdict(CANNOT_TELL, AS_RETRIEVED, reason) if reason else verdict


def _step_against_missing(
    run: Run, rows_by_policy: Mapping[str, Sequence[Row]], names: Iterable[str]
) -> str:
    """What to do about replies that are no answers, under the first policy with many; empty where all have few.

    Args:
        run: The run.
        rows_by_policy: Rows by policy.
        names: The policies in the race, the prompts as retrieved first.
    """
    answers = [rows_by_policy.get(name, ()) for name in names]
    many = (rows for rows in answers if _missing(rows) > MAX_MISSING)
    rows = next(many, None)
    if rows is None:
        return ""
    kinds = [
        (kind, str(row.get("reason", ""))) for row in rows if (kind := kind_of_row(row))
    ]
    lengths = (_prompt_tokens(row) for asked in answers for row in asked)
    room = room_for_replies(run.encoder.context_window, lengths)
    return next_step(kinds, run.task.max_new_tokens, run.model.thinking_tokens, room)


def _listed_by_reason(reasons: Mapping[str, str]) -> list[str]:
    """A line for each reason, with the names of the policies that it concerns.

    Args:
        reasons: The reason by name of the policy.
    """
    names = defaultdict[str, list[str]](list)
    for name, reason in reasons.items():
        names[reason].append(name)
    return [f"{', '.join(listed)} ({reason})" for reason, listed in names.items()]


def _judged(examples: Sequence[Example]) -> list[Example]:
    """The examples with a reference; all where none has one."""
    return [example for example in examples if example.answers] or list(examples)


def _votes(
    run: Run,
    rows: Mapping[str, Sequence[Row]],
    examples: Mapping[str, Example],
    voters: Sequence[str],
) -> dict[str, float]:
    """Mean score by question of the replies that two of three orders give; where all differ, of the first one's."""
    replies = [
        {row["id"]: str(row["output"]) for row in rows[name] if row.get("scores")}
        for name in voters
    ]
    values = defaultdict[str, list[float]](list)
    for example_id in replies[0]:
        if all(example_id in of_voter for of_voter in replies):
            texts = [of_voter[example_id] for of_voter in replies]
            plain = [" ".join(text.casefold().split()).strip(" .") for text in texts]
            # max() takes the first of equals.
            text = texts[plain.index(max(plain, key=plain.count))]
            example = examples[example_id]
            score = run.task.checked_score(example, text)[run.task.metric]
            values[example.question_id].append(score)
    return {question: float(np.mean(scores)) for question, scores in values.items()}


def _recipe(method: Method | None, is_resorted: bool, are_distances: bool) -> str:
    """Code that applies a policy; empty where none is known, as for a vote.

    Args:
        method: The policy.
        is_resorted: Whether the log is in another order than that of its scores.
        are_distances: Whether the best document has the lowest score.
    """
    if not isinstance(method, PromptChange):
        return ""
    if not (is_resorted and method.takes_ranking):
        return method.recipe
    falls = "" if are_distances else ", reverse=True"
    by_score = f"documents = sorted(documents, key=score_of{falls})  # the log is in another order"
    return f"{by_score}\n{method.recipe}".rstrip()


def _gain(scores: Scores, base: Scores) -> bootstrap.Estimate | None:
    """Mean difference on the questions that have both scores, with its 95 % interval; None without two of them."""
    both = [name for name in scores if name in base]
    if len(both) < 2:
        return None
    return bootstrap.paired([scores[n] for n in both], [base[n] for n in both], both)


def _in_points(estimate: bootstrap.Estimate) -> dict[str, float]:
    """A share with its interval in points, and its n."""
    value, low, high = (round(100 * end, 2) for end in estimate[:3])
    return {"value": value, "ci_low": low, "ci_high": high, "n": estimate.n}


def _prompt_tokens(row: Row) -> int:
    """Tokens of a prompt; 0 where the server counts none."""
    return int(row.get("prompt_tokens") or row.get("tokens") or 0)


def _tokens(rows: Sequence[Row]) -> float | None:
    """Tokens of a question, read and written, on average; None where the server counts none."""
    read = [_prompt_tokens(row) for row in rows]
    written = [row.get("reply_tokens") or 0 for row in rows]
    if not any(read):
        return None
    return round(float(np.mean(np.add(read, written))), 1)


def _cost(rows: Sequence[Row]) -> float | None:
    """Cost of a question on average; None where the price is not known."""
    costs = [row["cost"] for row in rows if "cost" in row]
    return float(np.mean(costs)) if costs else None


def _missing(rows: Sequence[Row]) -> float:
    """Share of the questions without an answer."""
    asked = [row for row in rows if is_scorable(row)]
    return float(np.mean([not row.get("scores") for row in asked])) if asked else 0.0


def _policy_table(
    race: PolicyRace,
    scores: Mapping[str, Scores],
    rows: Mapping[str, Sequence[Row]],
    prepared: Prepared,
    remaining: Iterable[str],
) -> list[Row]:
    """A row for each policy; those with the prompts of another one have its numbers."""
    standings = race.standings(scores) if scores.get(race.base) else {}
    changed = _changed_replies(rows)
    table = {}
    for name in (race.base, *race.policies):
        policy_rows = rows.get(name, ())
        table[name] = {
            "name": name,
            **_score_columns(standings.get(name)),
            "n": standings[name].difference.n
            if name in standings
            else len(policy_rows),
            "answered": standings[name].accuracy.n if name in standings else 0,
            "changed_replies": changed.get(name),
            "tokens": _tokens(policy_rows),
            "cost": _cost(policy_rows),
            "missing": round(_missing(policy_rows), 4),
            "in_race": name in set(remaining),
            "same_as": "",
        }
    if VOTE in table:
        voters = [table[name] for name in prepared.voters]
        costs = [row["cost"] for row in voters if row["cost"] is not None]
        counts = [row["tokens"] for row in voters if row["tokens"] is not None]
        table[VOTE] |= {
            "tokens": round(sum(counts), 1) if counts else None,
            "cost": sum(costs) if costs else None,
            "in_race": True,
        }
    for name, first in prepared.same_as.items():
        table[name] = {**table[first], "name": name, "same_as": first}
    return list(table.values())


def _score_columns(standing: Standing | None) -> Row:
    """Accuracy, difference and flips of a policy, in points; empty without scores."""
    names = (
        "accuracy",
        "ci_low",
        "ci_high",
        "difference",
        "difference_low",
        "difference_high",
    )
    if standing is None:
        return dict.fromkeys((*names, "flip_rate"))
    numbers = [*standing.accuracy[:3], *standing.difference[:3], standing.flips]
    return {
        name: round(100 * number, 2)
        for name, number in zip((*names, "flip_rate"), numbers, strict=True)
    }


def _changed_replies(rows: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """Share of replies whose text is another one than as retrieved, in percent, by policy."""
    base = {row["id"]: str(row.get("output", "")).strip() for row in rows[AS_RETRIEVED]}
    result = {}
    for name, policy_rows in rows.items():
        changes = [
            base[row["id"]] != str(row.get("output", "")).strip()
            for row in policy_rows
            if row["id"] in base
        ]
        if changes:
            result[name] = round(100 * float(np.mean(changes)), 2)
    return result


# What no order changes


def _probe_facts(
    rows: Mapping[str, Sequence[Row]], examples: Mapping[str, Example], metric: str
) -> dict[str, Row]:
    """Accuracy of each probe with its interval, in points."""
    facts = {}
    for name, probe_rows in rows.items():
        answered = [row for row in probe_rows if row.get("scores")]
        if answered:
            facts[name] = _in_points(_accuracy(answered, examples, metric))
    return facts


def _causes(
    run: Run,
    examples: Mapping[str, Example],
    rows: Mapping[str, Sequence[Row]],
    probe_rows: Mapping[str, Sequence[Row]],
    methods: Mapping[str, Method],
) -> list[Row]:
    """A row for each prompt that was asked as retrieved: its gold rank, its score, the cause of a wrong answer."""
    metric = run.task.metric
    probes = {
        name: {row["id"]: row["scores"][metric] for row in found if row.get("scores")}
        for name, found in probe_rows.items()
    }
    right_under = defaultdict[str, list[str]](list)
    changes = {
        name: method.changes if isinstance(method, PromptChange) else "repetition"
        for name, method in methods.items()
    }
    for name, policy_rows in rows.items():
        for row in policy_rows:
            if name != AS_RETRIEVED and row.get("scores", {}).get(metric, 0.0) >= 1:
                right_under[row["id"]].append(name)
    table = []
    for row in rows[AS_RETRIEVED]:
        example = examples[row["id"]]
        if not row.get("scores"):
            continue
        gold = gold_documents(example)
        is_right = row["scores"][metric] >= 1
        wrong_document = None
        if not is_right:
            wrong_document = _document_of_reply(example, str(row["output"]), gold or ())
        alone = probes.get(GOLD_ALONE, {}).get(example.id)
        closed = probes.get(CLOSED_BOOK, {}).get(example.id)
        cause: Cause = "right"
        if not is_right:
            is_probed = closed is not None or alone is not None
            helping = {changes[name] for name in right_under[example.id]}
            cause = _cause(gold, alone, is_probed, helping, wrong_document)
        table.append(
            {
                "id": example.id,
                "documents": len(example.items),
                "gold_rank": min(gold) + 1 if gold else None,
                "score": row["scores"][metric],
                "cause": cause,
                "wrong_document": None
                if wrong_document is None
                else wrong_document + 1,
                "closed_book": closed,
                "gold_alone": alone,
                "right_under": " ".join(right_under[example.id]),
            }
        )
    return table


def _cause(
    gold: Sequence[int] | None,
    alone: float | None,
    is_probed: bool,
    helping: Collection[str],
    wrong_document: int | None,
) -> Cause:
    """The first cause that applies to a wrong answer.

    Args:
        gold: Indices of the gold documents; None: not known.
        alone: Score with the gold documents alone; None: not asked.
        is_probed: Whether the question was asked in the probes.
        helping: What the policies change under which it is right.
        wrong_document: The one wrong document that holds the reply, if there is one.
    """
    if gold is not None and not gold:
        return "gold not retrieved"
    if "order" in helping:
        return "right in another order"
    if "number" in helping:
        return "right with fewer documents"
    if helping:
        return "right with a repetition"
    if alone is not None and alone < 1:
        return "not even from the gold document alone"
    if wrong_document is not None:
        return "answered from a wrong document"
    return "wrong in every way" if is_probed else "not looked into"


def _document_of_reply(example: Example, reply: str, gold: Sequence[int]) -> int | None:
    """Index of the one document besides the gold ones in which a reply stands as whole words; else None."""
    text = reply.strip().rstrip(".")
    if not text:
        return None
    holding = [
        index
        for index, (start, end) in enumerate(example.items)
        if index not in gold
        and contains_answer(example.prompt[start:end], [text], whole_words=True)
    ]
    return holding[0] if len(holding) == 1 else None


def _rank_table(
    examples: Mapping[str, Example],
    rows: Mapping[str, Sequence[Row]],
    metric: str,
    names: Iterable[str],
) -> pd.DataFrame:
    """Accuracy by the rank of the first gold document, from 1, under some policies."""
    table = []
    for name in dict.fromkeys(names):
        by_rank = defaultdict[int, list[Row]](list)
        for row in rows.get(name, ()):
            gold = gold_documents(examples[row["id"]])
            if gold and row.get("scores"):
                by_rank[min(gold) + 1].append(row)
        for rank, found in sorted(by_rank.items()):
            accuracy = _accuracy(found, examples, metric)
            table.append((name, rank, *accuracy))
    return pd.DataFrame(table, columns=RANK_COLUMNS)


def _accuracy(
    rows: Sequence[Row], examples: Mapping[str, Example], metric: str
) -> bootstrap.Estimate:
    """Mean score of rows that have one, with its 95 % interval over questions."""
    values = [row["scores"][metric] for row in rows]
    questions = [examples[row["id"]].question_id for row in rows]
    return bootstrap.mean(values, questions)


@plot.styled
def _draw_tokens(policies: pd.DataFrame) -> Figure:
    """Accuracy and tokens of each policy with prompts of its own, the best on top."""
    own = policies[policies["same_as"].isna()].dropna(subset=["accuracy"])
    own = own.sort_values("accuracy", kind="stable")
    places = np.arange(len(own))
    is_base = (own["name"] == AS_RETRIEVED).to_numpy()
    figure, (left, right) = plot.new_figure(
        plot.PAGE,
        0.6 + 0.19 * len(own),
        1,
        2,
        n=own["n"],
        sharey=True,
        width_ratios=(2, 1),
    )
    left.axvline(float(own["accuracy"][is_base].iloc[0]), **plot.UNMODIFIED_LINE)
    accuracy = own["accuracy"].to_numpy()
    errors = np.abs(own[["ci_low", "ci_high"]].to_numpy().T - accuracy)
    left.errorbar(
        accuracy, places, xerr=errors, fmt="none", color=plot.GUIDE, linewidth=0.8
    )
    tokens = own["tokens"].to_numpy(float)
    right.hlines(places, 0, tokens, color=plot.SHADE, linewidth=4)
    for axes, values in ((left, accuracy), (right, tokens)):
        axes.plot(values[~is_base], places[~is_base], "o", color=plot.BLUE)
        axes.plot(values[is_base], places[is_base], "o", color=plot.BLACK)
    left.set_yticks(places, own["name"])
    left.set_xlabel("accuracy (%)")
    is_counted = own["tokens"].notna().any()
    right.set_xlabel("tokens of a question" if is_counted else "tokens: not counted")
    right.set_xlim(left=0)
    return figure


@plot.styled
def _draw_ranks(ranks: pd.DataFrame) -> Figure:
    """Accuracy over the rank of the gold document."""
    figure, axes = plot.new_figure(plot.COLUMN, 2.4, n=ranks["n"])
    for number, (name, rows) in enumerate(ranks.groupby("policy", sort=False)):
        colour = plot.BLACK if name == AS_RETRIEVED else plot.BLUE
        errors = np.abs(
            rows[["ci_low", "ci_high"]].to_numpy().T - rows["accuracy"].to_numpy()
        )
        axes.errorbar(
            rows["rank"] + 0.08 * number,
            100 * rows["accuracy"],
            100 * errors,
            marker="os"[number % 2],
            color=colour,
            label=str(name),
            elinewidth=0.8,
        )
    axes.set_xlabel("rank of the first gold document as retrieved")
    axes.set_ylabel("accuracy (%)")
    axes.set_ylim(-3, 103)
    axes.legend()
    return figure
