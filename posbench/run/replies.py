"""Scored replies to the evaluation examples under a method."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from posbench.backends.asking import ask
from posbench.backends.base import Prompt, untruncated
from posbench.backends.delivery import RowCheck
from posbench.errors import UserError
from posbench.files.atomic import Row, short_hash
from posbench.late import pd
from posbench.measure.outcomes import decide_outcome, holds_answer
from posbench.measure.replies import reply_to_batch
from posbench.methods import Method
from posbench.model.answers import BY_LOG_LIKELIHOODS, Reply
from posbench.model.encode import Encoded
from posbench.run.base import Run
from posbench.run.batch_plan import BatchPlan, Prompts
from posbench.run.budget import price_of
from posbench.run.folder import PROVENANCE
from posbench.run.plan import Compute, Plan, Request, Rounds, Subject
from posbench.run.proofs import (
    COMPUTATION,
    REQUEST,
    computation_digest,
    decoding_of,
    request_digest,
)
from posbench.run.rows import Schedule
from posbench.run.stop import StopRules
from posbench.stats.outcomes import ANSWERED, CUT, is_scorable
from posbench.tasks import Example, Task

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
    run: Run,
    file: str,
    methods: Mapping[str, Method],
    encoded: Mapping[str, Encoded],
    rules: StopRules | None = None,
) -> dict[str, list[Row]]:
    """Return scored replies to all evaluation examples under each method.

    Args:
        run: The run; rows that its folder has already are not computed again.
        file: Name of the JSON-lines file in its folder.
        methods: The methods by name.
        encoded: The prompts by the id of their example.
        rules: What may end the run before all are asked.

    Returns:
        The rows of each method, by its name.
    """
    subjects = [Subject(run, name, method) for name, method in methods.items()]
    plan, compute = plan_replies(subjects, encoded)
    rows = plan.complete(run, file, STAGE, compute, rules)
    return {name: [row for row in rows if row["method"] == name] for name in methods}


def plan_replies(
    subjects: Sequence[Subject],
    encoded: Mapping[str, Encoded],
    examples: Sequence[Example] | None = None,
) -> tuple[Plan, Compute]:
    """Plan the replies to examples, of runs that differ in their methods alone.

    Args:
        subjects: The methods.
        encoded: The prompts by the id of their example.
        examples: The examples; None: those of the evaluation.

    Returns:
        The plan, and a function that computes the rows of a batch.
    """
    run = subjects[0].run
    if examples is None:
        examples = run.evaluation
    if run.model.in_process:
        return plan_batches(subjects, encoded, examples)
    served = ServedPlan(subjects, examples, encoded)
    return served, served.answer


def plan_batches(
    subjects: Sequence[Subject],
    encoded: Mapping[str, Encoded],
    examples: Sequence[Example],
) -> tuple[BatchPlan, Compute]:
    """Plan replies of a model in process; see :func:`plan_replies`."""
    run = subjects[0].run

    def compute(batch: Sequence[Request]) -> list[Row]:
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
        examples: Sequence[Example], prompts: Prompts, max_tokens: int | None
    ) -> list[list[Example]]:
        return run.prompts.batches(examples, prompts, max_tokens=max_tokens)

    plan = BatchPlan(subjects, examples, encoded, make_batches)
    return plan, compute


class ServedPlan(Plan):
    """Requests to a server, several at a time.

    A question is asked at all its positions before the next one, so that what stops the run leaves questions whole.

    Args:
        subjects: The methods, of one run.
        examples: The examples.
        encoded: Their prompts by id.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        examples: Sequence[Example],
        encoded: Mapping[str, Encoded],
    ) -> None:
        super().__init__(subjects, examples)
        run = subjects[0].run
        self.workers = run.model.concurrency
        self._run = run
        self._encoded = encoded
        self._row_check = _row_check(run)
        self._has_choices = any(example.choices for example in examples)
        first_decoding = run.out.facts(PROVENANCE).get("decoding", {})
        self._first_decoding: Mapping[str, Any] = first_decoding
        # Rows of another model are not dropped, and not gone on with.
        if run.server:
            self._need_first_decoding()
        for number, round_examples in enumerate(self.rounds):
            for example in sorted(round_examples, key=self.question_of):
                self.batches += [
                    [Request(subject, example, round=number)] for subject in subjects
                ]

    def rows_in_order(self, examples: Sequence[Example]) -> list[Request]:
        """See :meth:`posbench.run.plan.Plan.rows_in_order`."""
        return [Request(s, example) for s in self._subjects for example in examples]

    def size(self, request: Request) -> int:
        """Return the characters of a request's prompt."""
        return len(request.example.prompt)

    def proof(self, request: Request) -> Row:
        """See :meth:`posbench.run.plan.Plan.proof`."""
        decoding = decoding_of(self._run.task, request.example)
        reported_model = str(self._first_decoding.get("model", ""))
        return {
            REQUEST: served_request_digest(request.example),
            COMPUTATION: computation_digest(
                self._run, request.subject.method, decoding, reported_model
            ),
        }

    def schedule(self, rules: StopRules, run: Run, file: str) -> Schedule:
        """See :meth:`posbench.run.plan.Plan.schedule`."""
        return _Questions(self, rules, run, file)

    def answer(self, batch: Sequence[Request]) -> list[Row]:
        """Ask for the reply to the request of a batch, and return its row.

        Raises:
            UserError: The server decodes otherwise than when the run began.
            RequestError: It gave no reply.
        """
        (request,) = batch
        run = self._run
        backend = run.backend
        backend.check(self._has_choices)
        self._need_first_decoding()
        example = request.example
        prompt = self._encoded[example.id]
        text = prompt.prompt or example.prompt

        def arrived(reply: Reply) -> bool:
            requests = len(example.choices) if reply.by == BY_LOG_LIKELIHOODS else 1
            return self._row_check.arrived(text, (reply.prompt_tokens or 0) // requests)

        read = written = 0
        try:
            reply = ask(backend, run.encoder, run.task, example, prompt, arrived)
            read = int(reply.get("prompt_tokens") or 0)
            written = int(reply.get("reply_tokens") or 0)
        finally:
            if run.spending:
                run.spending.add(read, written)
        row = _row(run, example, prompt, reply)
        cost = price_of(read, written, run.model.price)
        if cost is not None and reply.get("prompt_tokens"):
            row["cost"] = round(cost, COST_DIGITS)
        return [row]

    def _need_first_decoding(self) -> None:
        """Refuse a server that decodes otherwise than when the run began."""
        first, now = self._first_decoding, self._run.backend.decoding
        if first and _differs(first, now):
            raise _other_decoding(self._run, first)


class _Questions(Rounds):
    """Rounds of a served run: a question is begun only where its rules leave room for all of it."""

    def __init__(self, plan: Plan, rules: StopRules, run: Run, file: str) -> None:
        super().__init__(plan, rules, run, file)
        self._plan = plan
        self._sizes_of_questions = Counter(
            plan.question_of(request.example)
            for batch in plan.batches
            for request in batch
        )
        self._begun = set[int]()
        self._is_closed = False
        self._lock = threading.Lock()

    def admits(self, batch: Sequence[Request]) -> bool:
        """See :meth:`posbench.run.rows.Schedule.admits`."""
        question = self._plan.question_of(batch[0].example)
        with self._lock:
            if question in self._begun:
                return self._rules.admits(0)
            size = self._sizes_of_questions[question]
            if self._is_closed or not self._rules.admits(size):
                self._is_closed = True
                return False
            self._begun.add(question)
            return True


def _row_check(run: Run) -> RowCheck:
    """What tells from a row's count of tokens whether its prompt arrived whole."""
    backend = run.backend
    example = run.evaluation[0]
    encoder = untruncated(run.encoder)

    def make_prompt(text: str) -> Prompt:
        encoded = encoder.encode(text, chat=example.chat)
        return backend.prompt(encoder, encoded, "")

    def ask(text: str, answer_tokens: int) -> Reply:
        return backend.deliver(make_prompt, text, answer_tokens)

    # A run that goes on may not have measured it: then as it was when the run began.
    facts = run.out.facts(PROVENANCE).get("delivery", {})
    profile = backend.profile
    if profile.tokens_per_character is not None:
        facts = vars(profile)
    return RowCheck(
        ask, facts.get("tokens_per_character"), facts.get("overhead_tokens", 0)
    )


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
    now = run.backend.decoding
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
