"""Scored replies to the evaluation examples under a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posbench.errors import UserError
from posbench.files.atomic import Row, short_hash
from posbench.late import pd
from posbench.measure import served
from posbench.measure.replies import reply_to_batch
from posbench.methods import Method
from posbench.model.encode import Encoded
from posbench.model.lm import LENGTH
from posbench.run.base import Run
from posbench.run.batch_plan import BatchPlan, Compute, Prompts, Request, Subject
from posbench.run.folder import PROVENANCE
from posbench.run.proofs import (
    COMPUTATION,
    REQUEST,
    computation_digest,
    decoding_of,
    request_digest,
)
from posbench.tasks import Example, Task
from posbench.tasks.base import num_questions, split_into_rounds

STAGE = "evaluate"


def prompt_digest(example: Example) -> str:
    """Return a checksum by which a prompt that is built again is recognised."""
    return short_hash([example.system, example.prompt, example.prefill])


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

    if examples is None:
        examples = run.evaluation
    plan = BatchPlan.of(subjects, examples, encoded, make_batches)
    return plan, compute


def _served_replies(
    run: Run, file: str, subjects: Sequence[Subject], encoded: Mapping[str, Encoded]
) -> list[Row]:
    """Rows of the replies of a server, several of which are requested at a time."""
    endpoint = run.endpoint
    encoder = run.encoder
    has_choices = any(example.choices for example in run.evaluation)
    first_decoding = run.out.facts(PROVENANCE).get("decoding")

    def compute(request: Request) -> Row:
        endpoint.check(has_choices)
        if first_decoding and _differs(first_decoding, endpoint.decoding):
            raise _other_decoding(run, first_decoding)
        example = request.example
        prompt = encoded[example.id]
        reply = served.ask_server(endpoint, encoder, run.task, example, prompt)
        return _row(run, example, prompt, reply)

    def proof(request: Request) -> Row:
        # What tokens the server makes of the text is not known.
        text = prompt_digest(request.example).encode()
        decoding = decoding_of(run.task, request.example)
        return {
            REQUEST: request_digest(list(text), request.example.choices),
            COMPUTATION: computation_digest(run, request.subject.method, decoding),
        }

    def complete(examples: Sequence[Example]) -> list[Row]:
        requests = [
            Request(subject, example) for subject in subjects for example in examples
        ]
        return run.rows.complete_each(
            file,
            STAGE,
            requests,
            key=lambda request: request.key,
            compute=compute,
            workers=run.model.concurrency,
            proof=proof,
        )

    rule = run.shape_rule
    if rule is None:
        return complete(run.evaluation)
    rounds = split_into_rounds(run.evaluation, run.runtime.round_questions)
    asked: list[Example] = []
    rows: list[Row] = []
    for number, questions in enumerate(rounds):
        if number and rule.is_decided(rows):
            rule.stop(number, num_questions(asked), num_questions(run.evaluation))
            break
        ids = {example.id for example in (*asked, *questions)}
        asked = [example for example in run.evaluation if example.id in ids]
        rows = complete(asked)
    return rows


def _differs(first: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether replies are decoded otherwise than when a run began; how a server shows thinking changes none."""
    return any(first[name] != now.get(name) for name in first if name != "thinking")


def _other_decoding(run: Run, first: Mapping[str, Any]) -> UserError:
    """The refusal of a server that takes other settings than the one with which a run began."""
    refused_then = ", ".join(first["left_out"]) or "nothing"
    refused_now = ", ".join(run.endpoint.decoding["left_out"]) or "nothing"
    allowed = (
        "a server that decodes as when the run began "
        f"(it refused {refused_then}; now {refused_now})"
    )
    hint = f"start that server again, or remove {run.out.path}"
    return UserError("model.base_url", run.model.base_url, allowed, hint)


def _row(run: Run, example: Example, encoded: Encoded, reply: Row) -> Row:
    """The row of a reply: where its example comes from, the reply, its scores, and what was asked."""
    # What the model did not get to read has no score: it is no wrong answer.
    scores = {}
    if not reply.get("note"):
        scores = run.task.checked_score(example, str(reply["output"]))
    # A server that applies the chat template itself counts the tokens.
    tokens = len(encoded.ids) if run.model.api == "completions" else 0
    row = {
        "subset": example.subset,
        "gold_position": example.gold_position,
        "cluster": example.cluster,
        **reply,
        "scores": scores,
        "tokens": tokens or reply.get("prompt_tokens"),
        "dropped": encoded.dropped,
        "answers": list(example.answers),
        "prompt": prompt_digest(example),
    }
    if example.other_gold:
        row["other_gold"] = list(example.other_gold)
    if is_cut(run.task, example, reply):
        row["cut"] = True
    return row


def is_cut(task: Task, example: Example, reply: Mapping[str, Any]) -> bool:
    """Whether a reply was cut off before it came to an answer.

    A reply of one token at most has no room for anything before its answer. A benchmark that prescribes the
    length scores a reply as it stands.

    Args:
        task: The task.
        example: What was asked.
        reply: Has ``output`` and, where that is known, ``finish``.
    """
    if example.choices or reply.get("finish") != LENGTH or reply.get("note"):
        return False
    max_new_tokens = example.max_new_tokens or task.max_new_tokens
    if max_new_tokens == 1 or task.prescribes_length:
        return False
    return not task.has_answer(example, str(reply["output"]))


def compare_scores(run: Run, file: str, methods: Mapping[str, Method]) -> pd.DataFrame:
    """Score every evaluation example under each method.

    Args:
        run: The run; rows that its folder has already are not computed again.
        file: Name of the JSON-lines file in its folder.
        methods: The methods by name.

    Returns:
        A row per method and scored example: ``method``, ``id``, ``gold_position``, ``cluster``, and ``score``
        by the task's own metric.
    """
    encoded = run.prompts.encode(run.evaluation)
    metric = run.task.metric
    values = [
        (
            row["method"],
            row["id"],
            row["gold_position"],
            row["cluster"] or row["id"],
            row["scores"][metric],
        )
        for rows in scored_replies(run, file, methods, encoded).values()
        for row in rows
        if row["scores"]
    ]
    columns = ["method", "id", "gold_position", "cluster", "score"]
    return pd.DataFrame(values, columns=columns)
