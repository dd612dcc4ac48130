"""Scored replies to the evaluation examples under a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posbench.files.atomic import Row, digest
from posbench.late import pd
from posbench.measure import served
from posbench.measure.replies import replies
from posbench.methods import Method
from posbench.model.encode import Encoded
from posbench.run.base import Run
from posbench.run.shared import Ask, Asks, Compute, Subject
from posbench.tasks import Example

STAGE = "evaluate"


def prompt_digest(example: Example) -> str:
    """What tells whether a prompt that is built again is the one that was asked."""
    return digest([example.system, example.prompt, example.prefill])


def answers(
    run: Run, file: str, methods: Mapping[str, Method], encoded: Mapping[str, Encoded]
) -> dict[str, list[Row]]:
    """Scored replies to all evaluation examples (prompts by id) under each method, by its name; resumed from
    a JSON-lines file."""
    subjects = [Subject(run, name, method) for name, method in methods.items()]
    if run.model.base_url:
        rows = _served(run, file, subjects, encoded)
    else:
        asks, compute = planned(subjects, encoded)
        rows = asks.complete(run, file, STAGE, compute)
    return {name: [row for row in rows if row["method"] == name] for name in methods}


def planned(
    subjects: Sequence[Subject], encoded: Mapping[str, Encoded]
) -> tuple[Asks, Compute]:
    """What to ask, of runs that differ in their methods alone, and what makes the rows of a batch."""
    run = subjects[0].run

    def compute(batch: Sequence[Ask]) -> list[Row]:
        given = [each.example for each in batch]
        with asks.under(batch) as prefix:
            said = replies(run.lm, run.task, given, encoded, prefix)
        return [
            _row(run, e, encoded[e.id], reply)
            for e, reply in zip(given, said, strict=True)
        ]

    asks = Asks.of(
        subjects,
        run.evaluation,
        encoded,
        lambda part, most: run.plan(part, encoded, tokens=most),
    )
    return asks, compute


def _served(
    run: Run, file: str, subjects: Sequence[Subject], encoded: Mapping[str, Encoded]
) -> list[Row]:
    endpoint = run.endpoint
    encoder = run.encoder
    choosing = any(e.choices for e in run.evaluation)

    def ask(each: Ask) -> Row:
        endpoint.check(choosing)
        e = each.example
        return _row(
            run,
            e,
            encoded[e.id],
            served.reply(endpoint, encoder, run.task, e, encoded[e.id]),
        )

    asked = [Ask(subject, e) for subject in subjects for e in run.evaluation]
    return run.complete_each(
        file, STAGE, asked, lambda each: each.key, ask, run.model.concurrency
    )


def _row(run: Run, e: Example, encoded: Encoded, reply: Row) -> Row:
    origin = {
        "subset": e.subset,
        "gold_position": e.gold_position,
        "cluster": e.cluster,
    }
    own = len(encoded.ids) * (run.model.api == "completions")
    size = {"tokens": own or reply.get("prompt_tokens"), "dropped": encoded.dropped}
    asked = {"answers": list(e.answers), "prompt": prompt_digest(e)}
    # What the model did not get to read has no score: it is no wrong answer.
    scores = {} if reply.get("note") else run.task.score(e, str(reply["output"]))
    return {**origin, **reply, "scores": scores, **size, **asked}


def compared(run: Run, file: str, methods: Mapping[str, Method]) -> pd.DataFrame:
    """Method, id, gold_position, cluster, score (the task's own) of every evaluation example; resumed."""
    encoded = run.encode(run.evaluation)
    metric = run.task.metric
    rows = [
        row for each in answers(run, file, methods, encoded).values() for row in each
    ]
    own = [
        (r, r["cluster"] or r["id"], r["scores"][metric]) for r in rows if r["scores"]
    ]
    values = [(r["method"], r["id"], r["gold_position"], *rest) for r, *rest in own]
    return pd.DataFrame(
        values, columns=["method", "id", "gold_position", "cluster", "score"]
    )
