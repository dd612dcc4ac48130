"""A run whose model is not in this process: messages before it starts, and its spending."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posbench.backends.asking import compare_with_checkpoint
from posbench.backends.served import MAX_LISTED_MODELS, Endpoint
from posbench.pipeline.config import Config
from posbench.pipeline.served import (
    asked_examples,
    describe_endpoint,
    estimate_served,
    need_consent,
)
from posbench.run.base import Run
from posbench.run.budget import Spending, price_of
from posbench.run.folder import EVALUATE_STAGE, PREDICTIONS

PROBE_ENTRY = "probe"
"""The entry for requests before the questions, in the record of a run's spending."""


def spending(config: Config, run: Run) -> Spending:
    """Return what a served run has spent so far, killed sessions and the probe included, and its limit.

    Returns:
        The spending, with the expected cost of a question in the unit of the budget (tokens or US dollars).
    """
    rows = run.out.rows_without_error(PREDICTIONS)
    stage = "study" if config.study else EVALUATE_STAGE
    recorded = run.out.status().get("spent", {}).get(stage, {})
    read = sum(row.get("prompt_tokens") or 0 for row in rows)
    written = sum(row.get("reply_tokens") or 0 for row in rows)
    cached = sum(row.get("cached_tokens") or 0 for row in rows)
    # A killed session's tokens are in its rows alone, tokens of discarded replies in the record alone.
    tokens = max(
        read + written,
        recorded.get("prompt_tokens", 0) + recorded.get("reply_tokens", 0),
    )
    budget = config.budget
    price = run.model.price
    recorded_usd = recorded.get("usd", 0.0)
    usd = max(price_of(read, written, price, cached) or 0.0, recorded_usd)
    # Costs of a killed session, which its rows show, are added to the record.
    if usd > recorded_usd:
        run.out.spend(stage, {"usd": usd - recorded_usd}, {})
    probe = _record_probe(config, run)
    tokens += probe.get("prompt_tokens", 0) + probe.get("reply_tokens", 0)
    usd += probe.get("usd", 0.0)
    expected = 0.0
    if budget and (budget.tokens or budget.usd):
        estimate = estimate_served(config, run.backend.profile, run.encoder)
        amount = float(estimate.tokens) if budget.tokens else estimate.cost or 0.0
        expected = amount / max(len(asked_examples(config, run.encoder)), 1)
    return Spending(budget, price, tokens, usd, expected)


def _record_probe(config: Config, run: Run) -> Mapping[str, Any]:
    """Record the tokens that probing the server took in this session.

    Returns:
        ``prompt_tokens``, ``reply_tokens`` and ``usd`` of the probes of all sessions.
    """
    server = config.server
    if server and server.tokens_read:
        read, written = server.tokens_read, server.tokens_written
        amounts: dict[str, float] = {"prompt_tokens": read, "reply_tokens": written}
        cost = price_of(read, written, run.model.price)
        if cost is not None:
            amounts["usd"] = cost
        run.out.spend(PROBE_ENTRY, amounts, {})
    spent: Mapping[str, Any] = run.out.status().get("spent", {}).get(PROBE_ENTRY, {})
    return spent


def announce_cost(config: Config, run: Run, made: int) -> None:
    """Print the cost of the requests that a served run still lacks, and ask for consent where they cost money.

    Args:
        config: The run.
        run: The same run.
        made: Rows that it has already.

    Raises:
        UserError: The user does not agree, or nobody can be asked.
    """
    if not isinstance(run.backend, Endpoint):
        return
    run.backend.check(any(example.choices for example in run.evaluation))
    estimate = estimate_served(config, run.backend.profile, run.encoder)
    share = 1 - made / max(len(asked_examples(config, run.encoder)), 1)
    if share <= 0:
        return
    estimate = estimate.times(share)
    line = estimate.line(config.model.concurrency)
    run.console.print(line)
    need_consent(config, estimate, run.console)


def check_backend(config: Config, run: Run) -> dict[str, Any]:
    """Check that a backend can answer the task, and print what is known about it.

    Returns:
        The findings, for the run's provenance.
    """
    backend = run.backend
    backend.check(any(example.choices for example in run.evaluation))
    facts: dict[str, Any] = {
        "decoding": backend.decoding,
        "delivery": backend.profile.delivery_facts,
    }
    if isinstance(backend, Endpoint):
        facts["served_replies"] = _describe_server(config, run, backend)
    return facts


def _describe_server(config: Config, run: Run, endpoint: Endpoint) -> str:
    """Print a server's properties, and compare a few of its replies with its checkpoint's.

    Args:
        config: The run, with a served model.
        run: The same run: its console, and the tokenizer.
        endpoint: The server.

    Returns:
        The sentence on the comparison.
    """
    models = [model.id for model in endpoint.models()]
    name = config.model.server_name
    if models and name not in models:
        listed = ", ".join(models[:MAX_LISTED_MODELS])
        message = f"server: it lists {listed}, not {name}, and answers all the same"
        run.console.print(message)
    for line in describe_endpoint(endpoint):
        run.console.print(line)
    comparison = compare_with_checkpoint(
        endpoint, run.encoder, config.model, config.task
    )
    run.console.print(comparison)
    return comparison
