"""The requests of a run to a backend: question by question, several at a time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from posbench.backends.asking import ask
from posbench.backends.base import Prompt, untruncated
from posbench.backends.delivery import RowCheck
from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.model.answers import BY_LOG_LIKELIHOODS, Reply
from posbench.model.encode import Encoded
from posbench.run.base import Run
from posbench.run.budget import price_of
from posbench.run.folder import PROVENANCE
from posbench.run.plan import Plan, Request, Rounds, Subject
from posbench.run.proofs import COMPUTATION, REQUEST, computation_digest, decoding_of
from posbench.run.reply_rows import make_row, served_request_digest
from posbench.run.rows import Schedule
from posbench.run.stop import StopRules
from posbench.tasks import Example

FAILURES_IN_A_ROW = 3
"""Consecutive failed requests, for each thread, after which no more are sent."""
COST_DIGITS = 9
"""Decimals of the cost of a reply."""


class ServedPlan(Plan):
    """Requests to a server, several at a time.

    A question is asked at all its positions before the next one, so that a stopped run has complete questions.

    Args:
        subjects: The methods, of one run.
        examples: The examples.
        encoded: Their prompts by id.
        round_questions: Questions of a round; None: the runtime's.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        examples: Sequence[Example],
        encoded: Mapping[str, Encoded],
        round_questions: int | None = None,
    ) -> None:
        super().__init__(subjects, examples, encoded, round_questions)
        run = subjects[0].run
        self.workers = run.model.concurrency
        self._run = run
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
        return len(self.asked_prompt(request).example.prompt)

    def proof(self, request: Request) -> Row:
        """See :meth:`posbench.run.plan.Plan.proof`."""
        asked = self.asked_prompt(request).example
        decoding = decoding_of(self._run.task, asked)
        reported_model = str(self._first_decoding.get("model", ""))
        return {
            REQUEST: served_request_digest(asked),
            COMPUTATION: computation_digest(
                self._run, request.subject.method, decoding, reported_model
            ),
        }

    def schedule(self, rules: StopRules, run: Run, file: str) -> Schedule:
        """See :meth:`posbench.run.plan.Plan.schedule`."""
        return _Questions(self, rules, run, file)

    def answer(self, batch: Sequence[Request]) -> list[Row]:
        """See :meth:`posbench.run.plan.Plan.answer`; a batch is one request."""
        (request,) = batch
        run = self._run
        backend = run.backend
        backend.check(self._has_choices)
        self._need_first_decoding()
        asked = self.asked_prompt(request)
        example, prompt = asked
        text = prompt.prompt or example.prompt

        def arrived(reply: Reply) -> bool:
            requests = len(example.choices) if reply.by == BY_LOG_LIKELIHOODS else 1
            return self._row_check.arrived(text, (reply.prompt_tokens or 0) // requests)

        read = written = cached = 0
        try:
            reply = ask(backend, run.encoder, run.task, example, prompt, arrived)
            read = int(reply.get("prompt_tokens") or 0)
            written = int(reply.get("reply_tokens") or 0)
            cached = int(reply.get("cached_tokens") or 0)
        finally:
            if run.spending:
                run.spending.add(read, written, cached)
            if run.deadline:
                run.deadline.count_reply()
        row = make_row(run, example, prompt, reply)
        cost = price_of(read, written, run.model.price, cached)
        if cost is not None and reply.get("prompt_tokens"):
            row["cost"] = round(cost, COST_DIGITS)
        return [row]

    def _need_first_decoding(self) -> None:
        """Refuse a server that decodes otherwise than when the run began."""
        first, now = self._first_decoding, self._run.backend.decoding
        if first and _differs(first, now):
            raise _other_decoding(self._run, first)


class _Questions(Rounds):
    """Rounds of a served run: a question is started only if its rules allow all its positions."""

    def __init__(self, plan: Plan, rules: StopRules, run: Run, file: str) -> None:
        super().__init__(plan, rules, run, file)
        self._plan = plan
        self._sizes_of_questions = Counter(
            plan.question_of(request.example)
            for batch in plan.batches
            for request in batch
        )
        self.most_failures = FAILURES_IN_A_ROW * plan.workers
        self._begun = set[int]()
        self._is_closed = False
        self._lock = threading.Lock()

    def admits(self, batch: Sequence[Request]) -> bool:
        """See :meth:`posbench.run.rows.Schedule.admits`."""
        if not super().admits(batch):
            return False
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
    """Return the check, by a row's token count, that its prompt arrived whole."""
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
