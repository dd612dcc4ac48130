"""What the perturbation studies share: which prompts, which layers and channels, and intervals of any
statistic of means."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.methods.scale_channel import check_channels, check_layers
from posbench.model import families
from posbench.model.lm import LM, Encoded
from posbench.pipeline.config import Config
from posbench.pipeline.stages.evaluate import plan, replies
from posbench.pipeline.stages.intervene import attention_to_items, item_tokens
from posbench.run.base import Run, complete, encode
from posbench.stats import tables as metrics
from posbench.studies.base import Verdict
from posbench.tasks import Example

Array = NDArray[np.float64]
Range = tuple[int, int]
CROP, RETRIEVAL = (1, 7), (15, 20)
"""Yu et al. 2025, layers of 32, 0-based and inclusive: "2 to 8" of Section 2.2, counted from 1, and 15 to
20."""


def retrieval_layers(given: Range | None, unmodified: Sequence[float]) -> Range:
    """The layers whose attention is looked at: those given, else the paper's 15 to 20 of 32, or that share of
    another depth.

    A share says little about a model of fewer than 16 layers: there it is the one with the strongest
    attention to the gold item.

    Args:
        given: First and last layer, or None.
        unmodified: Attention to the gold item in every layer of the unmodified model, [L].
    """
    if given is None and len(unmodified) < 16:
        return (int(np.argmax(unmodified)),) * 2
    return given or share(RETRIEVAL, len(unmodified))


def share(published: Range, count: int) -> Range:
    """The paper's layers of 32, or the same share of another depth."""
    return round(count * published[0] / 32), min(round(count * published[1] / 32), count - 1)


def named(first: int, last: int) -> str:
    """``layer 1`` or ``layers 1-3``."""
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def check_range(lm: LM, field: str, given: Range | None) -> None:
    """Raise UserError unless a typed range lies inside the model."""
    if given is not None:
        check_layers(lm, f"study.{field}", given)


def check_counts(**counts: int) -> None:
    """Raise UserError unless every count is at least 1."""
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"study.{name}", value, "a whole number from 1 up", f"set study.{name}=10")


def positional_channel(lm: LM, channel: int | None) -> int:
    """The channel, checked.

    Raises:
        UserError: There is none, or the model has no such channel.
    """
    if channel is None:
        raise UserError(
            "study.channel",
            None,
            f"a channel (model {lm.name} has no scale_channel block with one)",
            f"find one: posbench stages=[search] model={lm.name} method=scale_channel",
        )
    check_channels(lm, "study.channel", [channel])
    return channel


def random_channels(lm: LM, channel: int, count: int, seed: int) -> list[int]:
    """``count`` channels other than the positional one, for a control."""
    others = [c for c in range(families.text_config(lm.model).hidden_size) if c != channel]
    return sorted(random.Random(f"posbench control channels {seed}").sample(others, count))


def placed(config: Config) -> list[Example]:
    """The evaluation examples with a gold item among others.

    Raises:
        UserError: The task has none.
    """
    # A task without items would first have to be downloaded.
    there = config.task.evaluation() if config.task.items else []
    found = [e for e in there if e.gold_position is not None and len(e.items) > 1]
    if not found:
        raise UserError(
            "task",
            config.task.name,
            "a task with a gold item among others",
            "take task=kv_retrieval or task=nq_multidoc",
        )
    return found


@dataclass(frozen=True)
class Prompts:
    """Prompts of a task, ready to run.

    Attributes:
        run: The run.
        examples: The examples.
        encoded: Tokens by example id.
        tokens: Spans of tokens of every item, by example id.
        batches: All examples, those of a batch decoded alike and the longest first, as ``generate`` orders
            them too.
    """

    run: Run
    examples: list[Example]
    encoded: dict[str, Encoded]
    tokens: dict[str, list[tuple[int, int]]]
    batches: list[list[Example]]

    @classmethod
    def of(cls, run: Run, examples: Sequence[Example]) -> Prompts:
        """Tokenise examples and plan their batches."""
        chosen = list(examples)
        encoded = {e.id: encode(run.lm, run.config.task, e) for e in chosen}
        tokens = {e.id: item_tokens(encoded[e.id], e) for e in chosen}
        order = plan(run.config.task, chosen, encoded, run.config.runtime)
        return cls(run, chosen, encoded, tokens, [[chosen[i] for i in group] for group in order])

    def lengths(self, batch: Sequence[Example]) -> list[int]:
        """Tokens of each prompt of a batch."""
        return [len(self.encoded[e.id].ids) for e in batch]

    def measure(
        self,
        variant: str,
        block: Callable[[Sequence[Example]], AbstractContextManager[None]],
        rows: Callable[[Sequence[Example], Array], list[Row]],
    ) -> list[Row]:
        """Score and attention of every prompt inside a block; kept in ``rows.jsonl``, so that a killed run
        goes on.

        Args:
            variant: Name of what is done.
            block: The block of one batch.
            rows: From a batch and the attention to its items, [B, L, N], what to keep of each prompt.

        Returns:
            Rows with variant, id, score (the task's metric), and what ``rows`` keeps, in the order of the
            batches.
        """
        run, task = self.run, self.run.config.task
        choices = {
            e.id: [run.lm.continuation_ids(self.encoded[e.id], c) for c in e.choices]
            for e in self.examples
            if e.choices
        }

        def compute(batch: Sequence[Example]) -> list[Row]:
            with block(batch):
                attention = attention_to_items(run.lm, [self.encoded[e.id] for e in batch], batch)
                kept = rows(batch, attention.double().numpy())
                outputs = replies(run.lm, task, batch, self.encoded, choices)
            scores = [
                task.score(e, str(reply["output"]))[task.metric]
                for e, reply in zip(batch, outputs, strict=True)
            ]
            return [{"score": score, **row} for score, row in zip(scores, kept, strict=True)]

        return complete(
            run,
            "rows.jsonl",
            variant.replace("_", " "),
            self.batches,
            lambda e: {"variant": variant, "id": e.id},
            compute,
        )


Group = tuple[Sequence[float], Sequence[str]]
"""Values and the cluster (question) that each belongs to."""


def interval(
    groups: Mapping[str, Group],
    statistic: Callable[[Mapping[str, Array]], Array],
    *,
    resamples: int,
    seed: int = 0,
) -> tuple[float, float, float]:
    """A statistic of group means with its percentile bootstrap (95 %): whole clusters are drawn, the same in
    every group.

    Args:
        groups: Values by group; a cluster may occur in several groups, and then stays paired.
        statistic: From the group means, each [R], to the statistic, [R].
        resamples: Draws R.
        seed: Seed of the draws.

    Returns:
        The statistic of the means as measured, and both ends of its interval.
    """
    names, member = np.unique(
        np.concatenate([np.asarray(clusters) for _, clusters in groups.values()]), return_inverse=True
    )
    weights = np.random.default_rng(seed).multinomial(
        len(names), np.full(len(names), 1 / len(names)), size=resamples
    )
    means, drawn, at = {}, {}, 0
    for group, (values, _) in groups.items():
        here = member[at : at + len(values)]
        at += len(values)
        total = np.bincount(here, weights=np.asarray(values, dtype=np.float64), minlength=len(names))
        size = np.bincount(here, minlength=len(names))
        means[group] = np.array([total.sum() / size.sum()])
        with np.errstate(invalid="ignore"):
            drawn[group] = (weights @ total) / (weights @ size)
    low, high = np.nanquantile(statistic(drawn), [0.025, 0.975])
    return float(statistic(means)[0]), float(low), float(high)


def mean_of(values: Sequence[float], clusters: Sequence[str], resamples: int) -> tuple[float, float, float]:
    """A mean with its 95 % interval: Wilson for values that are all 0 or 1, else a bootstrap over
    clusters."""
    value, (low, high) = metrics.estimate(np.asarray(values, dtype=np.float64), clusters, resamples=resamples)
    return value, low, high


def change_of(values: Sequence[float], clusters: Sequence[str], resamples: int) -> tuple[float, float, float]:
    """A mean of paired differences with its 95 % bootstrap interval over clusters."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()), *metrics.mean_interval(array, clusters, resamples=resamples, seed=0)


def effects_table(effects: Mapping[str, tuple[tuple[float, float, float], int]]) -> pd.DataFrame:
    """Rows of effect, value, low, high, n."""
    rows = [(name, *estimate, n) for name, (estimate, n) in effects.items()]
    return pd.DataFrame(rows, columns=["effect", "value", "low", "high", "n"])


def verdict(low: float, bound: float = 0.0) -> Verdict:
    """``holds`` where an interval lies above a bound."""
    return "holds" if low > bound else "does not hold"
