"""What studies of gold positions share: prompts ready to run, the layers that are looked at, tables of effects."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.measure.items import attention_to_items, item_tokens
from posbench.measure.replies import replies
from posbench.methods.scale_channel import check_channels, share
from posbench.model import families
from posbench.model.lm import LM, Encoded
from posbench.run.base import Run
from posbench.stats import bootstrap
from posbench.stats.bootstrap import Array, Estimate
from posbench.stats.findings import Finding, ends, estimate
from posbench.tasks import Example, Task
from posbench.tasks.items import placed

Range = tuple[int, int]
Block = Callable[[Sequence[Example]], AbstractContextManager[object]]
CROP, RETRIEVAL = (1, 7), (15, 20)
"""Yu et al. 2025, layers of 32, 0-based and inclusive: "2 to 8" of Section 2.2, counted from 1, and 15 to 20."""
NO_ROPE = "the model has no rotary embedding in attention that runs through the library's functions"


def need_items(task: Task) -> list[Example]:
    """The evaluation examples with a gold item among others, sorted by gold position.

    Raises:
        UserError: The task has none, or its replies are chosen.
    """
    # A task without items would first have to be downloaded.
    there = placed(task.evaluation()) if task.items else []
    if not there or any(e.choices or len(e.items) < 2 for e in there):
        allowed = "a task with a gold item among others, with generated replies"
        raise UserError("task", task.name, allowed, "take task=kv_retrieval or task=nq_multidoc")
    return there


def need_whole_maps(run: Run) -> None:
    """Refuse a method that computes the last row apart from the others: no forward then has whole maps.

    Raises:
        UserError: The method is one of these.
    """
    if run.trial().needs_prompt:
        name = run.choice.name
        allowed = f"a method that leaves whole attention maps; {name} runs the last token apart"
        raise UserError("method", name, allowed, "leave the method out")


def retrieval_layers(given: Range | None, unmodified: Sequence[float] | Array) -> Range:
    """The layers whose attention is looked at: those given, else the paper's 15 to 20 of 32, or that share of another depth.

    A share says little about a model of fewer than 16 layers: there it is the one with the strongest attention to the gold
    item.

    Args:
        given: First and last layer, or None.
        unmodified: Attention to the gold item in every layer of the unmodified model, [L].
    """
    if given is None and len(unmodified) < 16:
        return (int(np.argmax(unmodified)),) * 2
    return given or share(RETRIEVAL, len(unmodified))


def inclusive(layers: Range) -> range:
    """The layers from the first to the last."""
    return range(layers[0], layers[1] + 1)


def named(first: int, last: int) -> str:
    """``layer 1`` or ``layers 1-3``."""
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def positional_channel(run: Run, channel: int | None) -> int:
    """The channel of a study: a given one, else that of the model's scale_channel block, checked.

    Raises:
        UserError: There is none, or the model has no such channel.
    """
    found = run.model.blocks.get("scale_channel", {}).get("channel") if channel is None else channel
    if found is None:
        allowed = f"a channel (model {run.lm.name} has no scale_channel block with one)"
        hint = f"find one: posbench stages=[search] model={run.lm.name} method=scale_channel"
        raise UserError("study.channel", None, allowed, hint)
    check_channels(run.lm, "study.channel", [int(found)])
    return int(found)


def random_channels(lm: LM, channel: int, count: int, seed: int) -> list[int]:
    """``count`` channels other than the positional one, for a control."""
    others = [c for c in range(families.text_config(lm.model).hidden_size) if c != channel]
    return sorted(random.Random(f"posbench control channels {seed}").sample(others, count))


def other_item(example: Example, name: str, seed: int) -> int:
    """An item of the prompt that is not the gold one, drawn by example."""
    others = [i for i in range(len(example.items)) if i != example.gold_position]
    return random.Random(f"posbench {name} {seed} {example.id}").choice(others)


def gold(example: Example) -> int:
    """Index of the gold item."""
    return int(example.gold_position or 0)


@dataclass(frozen=True)
class Prompts:
    """Prompts of a task, ready to run.

    Attributes:
        run: The run.
        task: Their task.
        examples: The examples, sorted by gold position.
        encoded: Tokens by example id.
        tokens: Spans of tokens of every item, by example id.
        batches: All examples, those of a batch decoded alike and the longest first, as ``generate`` orders them too.
    """

    run: Run
    task: Task
    examples: list[Example]
    encoded: dict[str, Encoded]
    tokens: dict[str, list[tuple[int, int]]]
    batches: list[list[Example]]

    @classmethod
    def of(
        cls,
        run: Run,
        most: int | None = None,
        examples: Sequence[Example] | None = None,
        task: Task | None = None,
    ) -> Prompts:
        """Tokenise examples and plan their batches.

        Args:
            run: The run.
            most: Examples of each gold position at most; None: all.
            examples: These instead of the task's.
            task: Another task than the run's.
        """
        task = task or run.task
        chosen = placed(need_items(task) if examples is None else examples, most)
        encoded = run.encode(chosen, task)
        tokens = {e.id: item_tokens(encoded[e.id], e) for e in chosen}
        return cls(run, task, chosen, encoded, tokens, run.plan(chosen, encoded, task))

    def lengths(self, batch: Sequence[Example]) -> list[int]:
        """Tokens of each prompt of a batch."""
        return [len(self.encoded[e.id].ids) for e in batch]

    def spans(self, batch: Sequence[Example], item: Callable[[Example], int]) -> list[tuple[int, int]]:
        """Tokens of one item of each prompt of a batch."""
        return [self.tokens[e.id][item(e)] for e in batch]

    def frame(self) -> pd.DataFrame:
        """Rows of items (per prompt), id, cluster, gold_position and depth (0..1), in the order of the examples."""
        count = len(self.examples[0].items)
        rows = [
            (count, e.id, e.cluster or e.id, e.gold_position, gold(e) / max(count - 1, 1))
            for e in self.examples
        ]
        return pd.DataFrame(rows, columns=["items", "id", "cluster", "gold_position", "depth"])

    def complete(
        self,
        file: str,
        label: str,
        key: Mapping[str, object],
        compute: Callable[[Sequence[Example]], list[Row]],
    ) -> dict[str, Row]:
        """A row of each example by its id; resumed from a JSON-lines file.

        Args:
            file: JSON-lines file in the run folder.
            label: Text beside the progress bar.
            key: Fields that tell these rows from others of the file.
            compute: Rows of one batch.
        """
        rows = self.run.complete(file, label, self.batches, lambda e: {**key, "id": e.id}, compute)
        return {row["id"]: row for row in rows}

    def attention(self, batch: Sequence[Example], *, heads: bool = False) -> Array:
        """See :func:`posbench.measure.items.attention_to_items`."""
        codes = [self.encoded[e.id] for e in batch]
        return attention_to_items(self.run.lm, codes, batch, heads=heads).double().numpy()

    def replies(self, batch: Sequence[Example]) -> list[Row]:
        """``output`` and ``score`` (the task's metric) of each example of a batch."""
        outputs = [str(row["output"]) for row in replies(self.run.lm, self.task, batch, self.encoded)]
        scores = [self.task.score(e, text)[self.task.metric] for e, text in zip(batch, outputs, strict=True)]
        return [{"output": text, "score": score} for text, score in zip(outputs, scores, strict=True)]

    def under(
        self, variant: str, block: Block, keep: Callable[[Sequence[Example], Array], list[Row]]
    ) -> dict[str, Row]:
        """Score and attention of every prompt inside a block; kept in ``rows.jsonl``, so that a killed run goes on.

        Args:
            variant: Name of what is done.
            block: The block of one batch.
            keep: From a batch and the attention to its items, [B, L, N], what to keep of each prompt.

        Returns:
            Rows by id: score (the task's metric), and what ``keep`` kept.
        """

        def compute(batch: Sequence[Example]) -> list[Row]:
            with block(batch):
                kept, scored = keep(batch, self.attention(batch)), self.replies(batch)
            return [{"score": said["score"], **row} for said, row in zip(scored, kept, strict=True)]

        return self.complete("rows.jsonl", variant.replace("_", " "), {"variant": variant}, compute)


def means_by_position(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Means at each gold position and number of items, with 95 % intervals.

    Args:
        frame: Rows as :meth:`Prompts.frame` gives them, with the columns.
        columns: Columns to average.

    Returns:
        Rows of items, gold_position, depth, n, and each column with its _ci_low and _ci_high.
    """
    rows = []
    for (items, position, depth), part in frame.groupby(["items", "gold_position", "depth"], sort=True):
        row = {"items": items, "gold_position": position, "depth": depth, "n": len(part)}
        for column in columns:
            row |= ends(bootstrap.mean(part[column].to_numpy(), list(part["cluster"])), column)
        rows.append(row)
    return pd.DataFrame(rows)


# Effects: estimates by name, and the claims that are held against them


def effects_table(effects: Mapping[str, Estimate]) -> pd.DataFrame:
    """Rows of effect, value, ci_low, ci_high, n."""
    return pd.DataFrame([(name, *at) for name, at in effects.items()], columns=["effect", *Estimate._fields])


class Claim(NamedTuple):
    """A claim that the interval of an effect lies above a bound.

    Attributes:
        effect: Its name.
        claim: The claim with its source.
        statistic: What the number is.
        bound: What the interval must lie above.
        quoted: Further effects that the note quotes.
    """

    effect: str
    claim: str
    statistic: str
    bound: float = 0.0
    quoted: Sequence[str] = ()


def judged(
    table: pd.DataFrame, claims: Sequence[Claim], note: str = "", absent: str = NO_ROPE
) -> list[Finding]:
    """The verdicts on claims, from a table of effects; a claim without its effect is not testable."""
    effects = {row["effect"]: estimate(row) for row in table.to_dict("records")}
    found = []
    for each in claims:
        if each.effect not in effects:
            found.append(Finding.untestable(each.claim, each.statistic, absent))
            continue
        told = [
            f"{name.replace('_', ' ')} {effects[name].value:.3g}" for name in each.quoted if name in effects
        ]
        text = "; ".join(filter(None, [note, *told]))
        found.append(Finding.above(each.claim, each.statistic, effects[each.effect], each.bound, text))
    return found
