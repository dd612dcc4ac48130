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
from posbench.tasks import Example


def prompt_digest(example: Example) -> str:
    """What tells whether a prompt that is built again is the one that was asked."""
    return digest([example.system, example.prompt, example.prefill])


def answers(run: Run, file: str, name: str, method: Method, encoded: Mapping[str, Encoded]) -> list[Row]:
    """Scored replies to all evaluation examples (prompts by id) under a method, which rows call ``name``;
    resumed from a JSON-lines file."""
    task, label = run.task, f"evaluate {name}"

    def key(e: Example) -> Row:
        return {"method": name, "id": e.id}

    def row(e: Example, reply: Row) -> Row:
        origin = {"subset": e.subset, "gold_position": e.gold_position, "cluster": e.cluster}
        own = len(encoded[e.id].ids) * (run.model.api == "completions")
        size = {"tokens": own or reply.get("prompt_tokens"), "dropped": encoded[e.id].dropped}
        asked = {"answers": list(e.answers), "prompt": prompt_digest(e)}
        # What the model did not get to read has no score: it is no wrong answer.
        scores = {} if reply.get("note") else task.score(e, str(reply["output"]))
        return {**origin, **reply, "scores": scores, **size, **asked}

    if run.model.base_url:
        endpoint, encoder, choosing = run.endpoint, run.encoder, any(e.choices for e in run.evaluation)

        def ask(e: Example) -> Row:
            endpoint.check(choosing)
            return row(e, served.reply(endpoint, encoder, task, e, encoded[e.id]))

        return run.complete_each(file, label, run.evaluation, key, ask, run.model.concurrency)
    with method.applied(run.lm) as lm:

        def compute(batch: Sequence[Example]) -> list[Row]:
            return [row(*pair) for pair in zip(batch, replies(lm, task, batch, encoded), strict=True)]

        return run.complete(file, label, run.plan(run.evaluation, encoded), key, compute)


def compared(run: Run, file: str, methods: Mapping[str, Method]) -> pd.DataFrame:
    """Method, id, gold_position, cluster, score (the task's own) of every evaluation example; resumed."""
    encoded, metric = run.encode(run.evaluation), run.task.metric
    rows = [row for name, method in methods.items() for row in answers(run, file, name, method, encoded)]
    own = [(r, r["cluster"] or r["id"], r["scores"][metric]) for r in rows if r["scores"]]
    values = [(r["method"], r["id"], r["gold_position"], *rest) for r, *rest in own]
    return pd.DataFrame(values, columns=["method", "id", "gold_position", "cluster", "score"])
