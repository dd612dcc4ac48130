"""Scored replies to the evaluation examples under a method."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from posbench.errors import UserError
from posbench.files.atomic import Row, short_hash
from posbench.late import pd
from posbench.measure import served
from posbench.measure.outcomes import decide_outcome, holds_answer
from posbench.measure.replies import BatchShape, reply_to_batch
from posbench.methods import Method
from posbench.model.answers import Reply
from posbench.model.delivery import RowCheck
from posbench.model.encode import Encoded
from posbench.model.endpoint import BY_LOG_LIKELIHOODS, Prompt, untruncated
from posbench.run.base import Run
from posbench.run.batch_plan import BatchPlan, Compute, Prompts, Request, Subject
from posbench.run.budget import Deadline, price_of
from posbench.run.folder import PROVENANCE
from posbench.run.proofs import (
    COMPUTATION,
    REQUEST,
    computation_digest,
    decoding_of,
    request_digest,
)
from posbench.run.sequential import ShapeRule
from posbench.stats.outcomes import ANSWERED, CUT, is_scorable
from posbench.tasks import Example, Task
from posbench.tasks.base import num_questions, split_into_rounds

STAGE = "evaluate"
COST_DIGITS = 9
"""Digits behind the point of what a reply cost."""


def prompt_digest(example: Example) -> str:
    """Return a checksum by which a prompt that is built again is recognised."""
    return short_hash([example.system, example.prompt, example.prefill])


def served_request_digest(example: Example) -> str:
    """Return the digest of what a server is asked: of the text, as what tokens it makes of that is not known."""
    return request_digest(list(prompt_digest(example).encode()), example.choices)


def scored_replies(
    run: Run, file: str, methods: Mapping[str, Method], encoded: Mapping[str, Encoded]
) -> dict[str, list[Row]]:
    """Return scored replies to all evaluation examples under each method.

    Args:
        run: The run; rows that its folder has already are not computed again.
        file: Name of the JSON-lines file in its folder.
        methods: The methods by name.
        encoded: The prompts by the id of their example.

    Returns:
        The rows of each method, by its name.
    """
    subjects = [Subject(run, name, method) for name, method in methods.items()]
    if run.model.base_url:
        rows = _served_replies(run, file, subjects, encoded)
    else:
        plan, compute = plan_replies(subjects, encoded)
        rows = plan.complete(run, file, STAGE, compute, run.deadline, run.shape_rule)
    return {name: [row for row in rows if row["method"] == name] for name in methods}


def plan_replies(
    subjects: Sequence[Subject],
    encoded: Mapping[str, Encoded],
    examples: Sequence[Example] | None = None,
) -> tuple[BatchPlan, Compute]:
    """Plan the replies to examples, of runs that differ in their methods alone.

    Args:
        subjects: The methods.
        encoded: The prompts by the id of their example.
        examples: The examples; None: those of the evaluation.

    Returns:
        The plan, and a function that computes the rows of a batch.
    """
    run = subjects[0].run

    def compute(batch: Sequence[Request]) -> list[Row]:
        return [row for part in plan.parts(batch) for row in reply_to(part)]

    def reply_to(batch: Sequence[Request]) -> list[Row]:
        asked_prompts = [plan.asked_prompt(request) for request in batch]
        examples = [prompt.example for prompt in asked_prompts]
        prompts = {prompt.example.id: prompt.encoded for prompt in asked_prompts}
        with plan.applied(batch) as prefix:
            texts = reply_to_batch(run.lm, run.task, examples, prompts, prefix)
        rows = []
        for request, prompt, reply in zip(batch, asked_prompts, texts, strict=True):
            row = _row(run, request.example, prompt.encoded, reply)
            if prompt.example.prompt != request.example.prompt:
                row["rewritten_prompt"] = prompt.example.prompt
            rows.append(row)
        return rows

    def make_batches(
        examples: Sequence[Example], prompts: Prompts, shape: BatchShape
    ) -> list[list[Example]]:
        return run.prompts.batches(examples, prompts, shape=shape)

    if examples is None:
        examples = run.evaluation
    plan = BatchPlan(subjects, examples, encoded, make_batches, packs=True)
    return plan, compute


def _served_replies(
    run: Run, file: str, subjects: Sequence[Subject], encoded: Mapping[str, Encoded]
) -> list[Row]:
    """Rows of the replies of a server, several of which are requested at a time.

    A question is asked at all its positions before the next one, so that what stops the run leaves questions whole.
    """
    endpoint = run.endpoint
    encoder = run.encoder
    has_choices = any(example.choices for example in run.evaluation)
    first_decoding = run.out.facts(PROVENANCE).get("decoding")
    # Rows of another model are not dropped, and not gone on with.
    if run.server and first_decoding and _differs(first_decoding, endpoint.decoding):
        raise _other_decoding(run, first_decoding)
    reported_model = str((first_decoding or {}).get("model", ""))
    questions = ServedQuestions(run, subjects)
    row_check = _row_check(run)

    def compute(request: Request) -> Row:
        endpoint.check(has_choices)
        if first_decoding and _differs(first_decoding, endpoint.decoding):
            raise _other_decoding(run, first_decoding)
        example = request.example
        prompt = encoded[example.id]
        text = prompt.prompt or example.prompt

        def arrived(reply: Reply) -> bool:
            requests = len(example.choices) if reply.by == BY_LOG_LIKELIHOODS else 1
            return row_check.arrived(text, (reply.prompt_tokens or 0) // requests)

        try:
            reply = served.ask_server(
                endpoint, encoder, run.task, example, prompt, arrived
            )
        except Exception:
            questions.count(0, 0)
            raise
        read = int(reply.get("prompt_tokens") or 0)
        written = int(reply.get("reply_tokens") or 0)
        questions.count(read, written)
        row = _row(run, example, prompt, reply)
        cost = price_of(read, written, run.model.price)
        is_told = bool(reply.get("prompt_tokens"))
        if cost is not None and is_told:
            row["cost"] = round(cost, COST_DIGITS)
        return row

    def proof(request: Request) -> Row:
        decoding = decoding_of(run.task, request.example)
        return {
            REQUEST: served_request_digest(request.example),
            COMPUTATION: computation_digest(
                run, request.subject.method, decoding, reported_model
            ),
        }

    requests = [
        Request(subject, example) for subject in subjects for example in run.evaluation
    ]
    rows = run.rows.complete_each(
        file,
        STAGE,
        requests,
        key=lambda request: request.key,
        compute=compute,
        workers=run.model.concurrency,
        proof=proof,
        rounds=questions.rounds,
        stop=lambda number: questions.stop(number, run.out.rows(file)),
        may_start=questions.may_start,
    )
    return questions.keep_whole(rows, file)


def _row_check(run: Run) -> RowCheck:
    """What tells from a row's count of tokens whether its prompt arrived whole."""
    endpoint = run.endpoint
    example = run.evaluation[0]
    encoder = untruncated(run.encoder)

    def make_prompt(text: str) -> Prompt:
        encoded = encoder.encode(text, chat=example.chat)
        return endpoint.prompt(encoder, encoded, "")

    def ask(text: str, answer_tokens: int) -> Reply:
        return endpoint.deliver(make_prompt, text, answer_tokens)

    # A run that goes on may not have measured it: then as it was when the run began.
    facts = run.out.facts(PROVENANCE).get("delivery", {})
    profile = endpoint.profile
    if profile.tokens_per_character is not None:
        facts = vars(profile)
    return RowCheck(
        ask, facts.get("tokens_per_character"), facts.get("overhead_tokens", 0)
    )


class ServedQuestions:
    """The questions of a served run, in the order in which they are asked, and what stops them.

    Args:
        run: The run.
        subjects: The methods under which each is asked.
    """

    def __init__(self, run: Run, subjects: Sequence[Subject]) -> None:
        self._run = run
        self._subjects = subjects
        by_question = split_into_rounds(run.evaluation, 1)
        self._question_of = {
            example.id: number
            for number, examples in enumerate(by_question)
            for example in examples
        }
        self._sizes = [len(subjects) * len(examples) for examples in by_question]
        self._rounds = split_into_rounds(run.evaluation, run.runtime.round_questions)
        self._started = set[int]()
        self._is_closed = False
        self._ending: ShapeRule | Deadline | None = None
        self._lock = threading.Lock()

    @property
    def rounds(self) -> list[list[Request]]:
        """The requests of each round, question by question."""
        rounds = []
        for examples in self._rounds:
            ordered = sorted(examples, key=lambda e: self._question_of[e.id])
            rounds.append(
                [Request(subject, e) for e in ordered for subject in self._subjects]
            )
        return rounds

    def stop(self, number: int, rows: Sequence[Row]) -> bool:
        """Return whether a round is the first that is not asked: the shape is decided, or the time is over."""
        run = self._run
        size = sum(len(example.prompt) for example in self._rounds[number])
        ending: ShapeRule | Deadline | None = None
        asked = self._examples_before(number)
        if number and run.shape_rule:
            ids = {example.id for example in asked}
            if run.shape_rule.is_decided([row for row in rows if row["id"] in ids]):
                ending = run.shape_rule
        if number and not ending and run.deadline and not run.deadline.fits(size):
            ending = run.deadline
        if ending:
            ending.stop(number, num_questions(asked), num_questions(run.evaluation))
            self._ending = ending
            return True
        if run.deadline:
            run.deadline.begin(size)
        return False

    def may_start(self, request: Request) -> bool:
        """Return whether a request may be sent: a question is begun only where the budget has room for all of it."""
        spending = self._run.spending
        question = self._question_of[request.example.id]
        with self._lock:
            if question not in self._started:
                if self._is_closed or self._is_full(question):
                    self._is_closed = True
                    return False
                self._started.add(question)
            if spending:
                if spending.is_spent:
                    return False
                spending.begin()
            return True

    def _is_full(self, question: int) -> bool:
        """Whether the budget has no room for one more question; without any the first one is asked all the same."""
        run = self._run
        if run.spending and not run.spending.has_room(self._sizes[question]):
            return True
        return bool(run.deadline and self._started and run.deadline.is_over)

    def count(self, read: int, written: int) -> None:
        """Count the tokens that a request took."""
        if self._run.spending:
            self._run.spending.add(read, written)

    def _examples_before(self, number: int) -> list[Example]:
        """The examples of the rounds before one."""
        ids = {e.id for examples in self._rounds[:number] for e in examples}
        return [example for example in self._run.evaluation if example.id in ids]

    def keep_whole(self, rows: list[Row], file: str) -> list[Row]:
        """Return the rows of the questions that were asked at all positions, where some were not; the file keeps no
        others."""
        run = self._run
        kept = self._questions_to_keep(rows)
        if len(kept) == len(self._sizes):
            return rows
        asked = [e for e in run.evaluation if self._question_of[e.id] in kept]
        counts = (num_questions(asked), num_questions(run.evaluation))
        if self._ending:
            self._ending.stopped = counts
        elif run.spending and run.spending.has_limit:
            run.spending.stopped = counts
        elif run.deadline:
            run.deadline.stopped = counts
        kept_rows = [row for row in rows if self._question_of[row["id"]] in kept]
        run.out.write_rows(file, kept_rows)
        return kept_rows

    def _questions_to_keep(self, rows: Sequence[Row]) -> set[int]:
        """Those before the round that a decided shape made needless; else all that are whole."""
        rule = self._run.shape_rule
        if rule and self._ending is rule:
            before = self._examples_before(rule.stopped_round)
            return {self._question_of[example.id] for example in before}
        made = Counter(self._question_of[row["id"]] for row in rows)
        return {number for number, n in made.items() if n == self._sizes[number]}


def _differs(first: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether replies are decoded otherwise, or by another model, than when a run began.

    How a server shows thinking changes none, nor does whether it reports its model.
    """
    names = first.keys() - {"thinking", "model"}
    return _is_other_model(first, now) or any(
        first[name] != now.get(name) for name in names
    )


def _is_other_model(first: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a server reports another model than when a run began."""
    models = (first.get("model"), now.get("model"))
    return all(models) and models[0] != models[1]


def _other_decoding(run: Run, first: Mapping[str, Any]) -> UserError:
    """The refusal of a server that takes other settings than the one with which a run began."""
    hint = f"start that server again, or remove {run.out.path}"
    now = run.endpoint.decoding
    if _is_other_model(first, now):
        allowed = f"the model {first['model']} that replied when the run began: the server now says {now['model']}"
        return UserError("model.base_url", run.model.base_url, allowed, hint)
    refused_then = ", ".join(first["left_out"]) or "nothing"
    refused_now = ", ".join(now["left_out"]) or "nothing"
    allowed = (
        "a server that decodes as when the run began "
        f"(it refused {refused_then}; now {refused_now})"
    )
    return UserError("model.base_url", run.model.base_url, allowed, hint)


def _row(run: Run, example: Example, encoded: Encoded, reply: Row) -> Row:
    """The row of a reply: where its example comes from, the reply, its scores, and what was asked."""
    scores = {}
    if reply["outcome"] == ANSWERED:
        scores = run.task.checked_score(example, str(reply["output"]))
    # A server that applies the chat template itself counts the tokens.
    tokens = 0 if run.model.api == "chat" else len(encoded.ids)
    row = {
        "subset": example.subset,
        "gold_position": example.gold_position,
        "cluster": example.cluster,
        **reply,
        "scores": scores,
        "tokens": tokens or _tokens_of_prompt(reply),
        "dropped": encoded.dropped,
        "answers": list(example.answers),
        "prompt": prompt_digest(example),
    }
    if example.other_gold:
        row["other_gold"] = list(example.other_gold)
    return row


def _tokens_of_prompt(reply: Row) -> int | None:
    """Tokens of one prompt as a server counts them; None where it does not tell."""
    total = reply.get("prompt_tokens")
    return None if total is None else total // reply.get("requests", 1)


FIELDS_OF_EXAMPLE = (
    "subset",
    "gold_position",
    "cluster",
    "tokens",
    "dropped",
    "answers",
    "prompt",
    "other_gold",
)
"""Fields of a row that follow from its example and prompt."""
FIELDS_OF_SCORE = ("scores", "outcome", "reason")
"""Fields of a row that follow from its example and reply."""


def row_of_reply(run: Run, example: Example, encoded: Encoded, recorded: Row) -> Row:
    """Make a row again from the reply that it records: all other fields follow from the example.

    Args:
        run: The run.
        example: The example that the row should be of.
        encoded: Its prompt as the model read it.
        recorded: The row.
    """
    rescored = rescored_row(run.task, example, recorded)
    derived = {*FIELDS_OF_EXAMPLE, "scores"}
    reply = {name: value for name, value in rescored.items() if name not in derived}
    return _row(run, example, encoded, reply)


def rescored_row(task: Task, example: Example, row: Row) -> Row:
    """A row of predictions.jsonl with the outcome and the scores that a task gives now.

    Only whether a reply holds an answer depends on the task: what was refused, say, stays so.
    """
    if row.get("outcome") not in (ANSWERED, CUT):
        return row
    decision = decide_outcome(
        str(row["output"]),
        str(row.get("finish", "")),
        holds_answer=holds_answer(task, example, row),
        is_thinking=bool(row.get("is_thinking")),
        ended_itself=True,
    )
    scores = {}
    if decision.outcome == ANSWERED:
        scores = task.checked_score(example, str(row["output"]))
    # In the order of a row that is made afresh, so that the file has the same bytes.
    rescored: Row = {}
    for name, value in row.items():
        if name == "outcome":
            rescored |= decision.fields
        elif name == "scores":
            rescored[name] = scores
        elif name != "reason":
            rescored[name] = value
    return rescored


def compare_scores(run: Run, file: str, methods: Mapping[str, Method]) -> pd.DataFrame:
    """Score every evaluation example under each method.

    Args:
        run: The run; rows that its folder has already are not computed again.
        file: Name of the JSON-lines file in its folder.
        methods: The methods by name.

    Returns:
        A row per method and example that can be scored: ``method``, ``id``, ``gold_position``, ``cluster``, and
        ``score`` by the task's own metric, NaN where the reply is no answer.
    """
    encoded = run.prompts.encode(run.evaluation)
    metric = run.task.metric
    values = [
        (
            row["method"],
            row["id"],
            row["gold_position"],
            row["cluster"] or row["id"],
            row["scores"].get(metric, math.nan),
        )
        for rows in scored_replies(run, file, methods, encoded).values()
        for row in rows
        if is_scorable(row)
    ]
    columns = ["method", "id", "gold_position", "cluster", "score"]
    return pd.DataFrame(values, columns=columns)
