"""What studies of gold positions share: prompts ready to run, layers to look at, tables of effects."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from posbench.errors import UserError
from posbench.files.atomic import Row, rounded
from posbench.late import pd
from posbench.measure.items import attention_to_items, item_tokens
from posbench.measure.replies import encode_longest, replies
from posbench.methods.scale_channel import check_channels, share
from posbench.methods.unmodified import Unmodified
from posbench.model import families
from posbench.model.encode import Encoded
from posbench.model.lm import LM
from posbench.model.prefix import Prefix
from posbench.run.base import Run
from posbench.run.batch_plan import BatchPlan, Request, Subject
from posbench.stats import bootstrap, reference
from posbench.stats.bootstrap import Array, Estimate, Group, K
from posbench.stats.findings import Finding, ends, estimate, joint
from posbench.stats.frames import UNMODIFIED
from posbench.tasks import Example, Task
from posbench.tasks.items import placed

Range = tuple[int, int]
Block = Callable[[Sequence[Example]], AbstractContextManager[object]]
Compute = Callable[[Sequence[Example]], list[Row]]
OnPrefix = Callable[[Sequence[Example], Prefix | None], list[Row]]
Measured = Mapping[str, Mapping[str, Row]]  # variant -> id -> row
CROP = (1, 7)
RETRIEVAL = (15, 20)
"""Yu et al. 2025, of 32 layers, 0-based and inclusive: 2 to 8 (Section 2.2, counted from 1), 15 to 20."""
NO_ROPE = "the model has no rotary embedding in attention that runs through the library's functions"


def need_items(task: Task) -> list[Example]:
    """The evaluation examples with a gold item among others, sorted by gold position; UserError without."""
    # A task without items would first have to be downloaded.
    there = placed(task.evaluation()) if task.items else []
    if not there or any(e.choices or len(e.items) < 2 for e in there):
        allowed = "a task with a gold item among others, with generated replies"
        raise UserError(
            "task", task.name, allowed, "take task=kv_retrieval or task=nq_multidoc"
        )
    return there


def need_whole_maps(run: Run) -> None:
    """Raise UserError for a method that runs the last token apart: no forward then has whole maps."""
    if run.method.trial().needs_prompt:
        allowed = f"a method that leaves whole attention maps; {run.method.choice.name} runs the last token apart"
        raise UserError(
            "method", run.method.choice.name, allowed, "leave the method out"
        )


def check_prompts(run: Run, task: Task | None = None) -> None:
    """Raise UserError for a task without gold items (:func:`need_items`), or with prompts that do not fit."""
    task = task or run.task
    need_items(task)
    encode_longest(run.lm, task)


def check_each_layer(lm: LM, name: str, layers: Sequence[int] | None) -> None:
    """Raise UserError unless a list names some layers, all of them the model's; None is for a default."""
    if layers is not None and (
        not layers or any(not 0 <= layer < lm.layers for layer in layers)
    ):
        allowed = f"layers from 0 to {lm.layers - 1}, or null"
        raise UserError(name, list(layers), allowed, f"set {name}=null")


def retrieval_layers(given: Range | None, unmodified: Sequence[float] | Array) -> Range:
    """The layers to look at: those given, else the paper's 15 to 20 of 32 or that share of another depth.

    A share says little below 16 layers: there it is the one with the strongest attention to the gold item in
    the unmodified model, given for each layer, [L].
    """
    if given is None and len(unmodified) < 16:
        return (int(np.argmax(unmodified)),) * 2
    return given or share(RETRIEVAL, len(unmodified))


def named(first: int, last: int) -> str:
    """``layer 1`` or ``layers 1-3``."""
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def channels(run: Run, channel: int | None, controls: int, seed: int) -> list[int]:
    """The channel given or of the model's scale_channel block, then random ones; UserError for too few."""
    lm = run.lm
    block = run.model.blocks.get("scale_channel", {})
    found = block.get("channel") if channel is None else channel
    if found is None:
        allowed = f"a channel (model {lm.name} has no scale_channel block with one)"
        hint = (
            f"find one: posbench stages=[search] model={lm.name} method=scale_channel"
        )
        raise UserError("study.channel", None, allowed, hint)
    check_channels(lm, "study.channel", [int(found)])
    others = [
        c for c in range(families.text_config(lm.model).hidden_size) if c != found
    ]
    if controls > len(others):
        allowed = f"at most {len(others)}, the other channels of {lm.name}"
        raise UserError("study.controls", controls, allowed, "set study.controls=3")
    drawn = random.Random(f"posbench control channels {seed}").sample(others, controls)
    return [int(found), *sorted(drawn)]


def other_item(example: Example, name: str, seed: int) -> int:
    """An item of the prompt that is not the gold one, drawn by example."""
    others = [i for i in range(len(example.items)) if i != example.gold_position]
    return random.Random(f"posbench {name} {seed} {example.id}").choice(others)


def gold(example: Example) -> int:
    """Index of the gold item."""
    return int(example.gold_position or 0)


def gold_attention(batch: Sequence[Example], attention: Array) -> list[Row]:
    """What :meth:`Prompts.under` keeps of the attention [B, L, N]: that to the gold item, by layer."""
    pairs = zip(batch, attention, strict=True)
    return [{"attention": rounded(layers[:, gold(e)])} for e, layers in pairs]


@dataclass(frozen=True)
class Prompts:
    """Prompts of a task, ready to run."""

    run: Run
    task: Task
    examples: list[Example]  # sorted by gold position
    encoded: dict[str, Encoded]  # by example id
    tokens: dict[str, list[tuple[int, int]]]  # spans of every item, by example id
    batches: list[
        list[Example]
    ]  # those of a batch decoded alike, the longest first as in LM.generate

    @classmethod
    def of(
        cls,
        run: Run,
        most: int | None = None,
        examples: Sequence[Example] = (),
        task: Task | None = None,
    ) -> Prompts:
        """Tokenise the task's examples, or those given, at most so many per gold position; plan batches."""
        task = task or run.task
        chosen = placed(examples or need_items(task), most)
        encoded = run.prompts.encode(chosen, task)
        tokens = {e.id: item_tokens(encoded[e.id], e) for e in chosen}
        return cls(
            run,
            task,
            chosen,
            encoded,
            tokens,
            run.prompts.batches(chosen, encoded, task),
        )

    def lengths(self, batch: Sequence[Example]) -> list[int]:
        """Tokens of each prompt of a batch."""
        return [len(self.encoded[e.id].ids) for e in batch]

    def spans(
        self, batch: Sequence[Example], item: Callable[[Example], int]
    ) -> list[tuple[int, int]]:
        """Tokens of one item of each prompt of a batch."""
        return [self.tokens[e.id][item(e)] for e in batch]

    def frame(self) -> pd.DataFrame:
        """Rows of items (per prompt), id, cluster, gold_position, depth (0..1), in the examples' order."""
        count = len(self.examples[0].items)
        every = self.examples
        frame = pd.DataFrame({"items": count, "id": [e.id for e in every]})
        frame["cluster"] = [e.cluster or e.id for e in every]
        frame["gold_position"] = [e.gold_position for e in every]
        return frame.assign(depth=frame["gold_position"] / max(count - 1, 1))

    def results(
        self, rows: Mapping[str, Row], layers: Range | None = None
    ) -> pd.DataFrame:
        """:meth:`frame` with attention and score of rows by id; attention by layer is averaged over some."""
        found = [rows[e.id] for e in self.examples]
        seen = [row["attention"] for row in found]
        if layers is not None:
            seen = [
                float(np.mean(by_layer[layers[0] : layers[1] + 1])) for by_layer in seen
            ]
        return self.frame().assign(
            attention=seen, score=[float(row["score"]) for row in found]
        )

    def complete(
        self, file: str, label: str, key: Mapping[str, object], compute: Compute
    ) -> dict[str, Row]:
        """A row of each example by id, resumed from a JSON-lines file; the key tells them from its others."""
        rows = self.run.rows.complete(
            file, label, self.batches, lambda e: {**key, "id": e.id}, compute
        )
        return {row["id"]: row for row in rows}

    def as_read(
        self, file: str, label: str, key: Mapping[str, object], compute: OnPrefix
    ) -> dict[str, Row]:
        """As :meth:`complete`, of prompts that nothing changes but the run's method: what several have in
        common is read once, where that method allows it."""
        run, method = self.run, self.run.method.build()
        if method.prefill() != method:
            return self.complete(file, label, key, lambda batch: compute(batch, None))
        plan = lambda part, most: run.prompts.batches(  # noqa: E731
            part, self.encoded, self.task, most
        )
        asks = BatchPlan.of(
            [Subject(run, "", Unmodified())], self.examples, self.encoded, plan
        )

        def made(batch: Sequence[Request]) -> list[Row]:
            with asks.applied(batch) as prefix:
                return compute([ask.example for ask in batch], prefix)

        own: Callable[[Request], Row] = lambda ask: {**key, "id": ask.example.id}  # noqa: E731
        rows = run.rows.complete(file, label, asks.batches, own, made, asks.order)
        return {row["id"]: row for row in rows}

    def attention(
        self,
        batch: Sequence[Example],
        prefix: Prefix | None = None,
        *,
        heads: bool = False,
    ) -> Array:
        """See :func:`posbench.measure.items.attention_to_items`."""
        codes = [self.encoded[e.id] for e in batch]
        return (
            attention_to_items(self.run.lm, codes, batch, heads=heads, prefix=prefix)
            .double()
            .numpy()
        )

    def replies(
        self, batch: Sequence[Example], prefix: Prefix | None = None
    ) -> list[Row]:
        """``output`` and ``score`` (the task's metric) of each example of a batch."""
        said = replies(self.run.lm, self.task, batch, self.encoded, prefix)
        outputs = [str(row["output"]) for row in said]
        scores = [
            self.task.score(e, text)[self.task.metric]
            for e, text in zip(batch, outputs, strict=True)
        ]
        return [
            {"output": text, "score": score}
            for text, score in zip(outputs, scores, strict=True)
        ]

    def under(
        self,
        variant: str,
        block: Block,
        keep: Callable[[Sequence[Example], Array], list[Row]],
    ) -> dict[str, Row]:
        """Rows by id, resumed from ``rows.jsonl``: the score of every prompt inside its batch's block.

        And what ``keep`` keeps of each, from the batch and the attention to its items, [B, L, N].
        """

        def compute(batch: Sequence[Example]) -> list[Row]:
            with block(batch):
                kept = keep(batch, self.attention(batch))
                scored = self.replies(batch)
            return [
                {"score": said["score"], **row}
                for said, row in zip(scored, kept, strict=True)
            ]

        return self.complete(
            "rows.jsonl", variant.replace("_", " "), {"variant": variant}, compute
        )


def means_by_position(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Means of columns at each gold position and number of items, from rows as of :meth:`Prompts.frame`.

    Returns:
        Rows of items, gold_position, depth, n, and each column with its _ci_low and _ci_high.
    """
    rows = []
    for (items, position, depth), part in frame.groupby(
        ["items", "gold_position", "depth"], sort=True
    ):
        row = {
            "items": items,
            "gold_position": position,
            "depth": depth,
            "n": len(part),
        }
        for column in columns:
            row |= ends(
                bootstrap.mean(part[column].to_numpy(), list(part["cluster"])), column
            )
        rows.append(row)
    return pd.DataFrame(rows)


def contrasts(scores: pd.DataFrame, method: str, base: str) -> dict[str, float]:
    """Columns of a method's row, from the scores of :func:`posbench.run.replies.compare_scores`.

    Its score (value) and n; paired, the ``difference`` from a base and the ``gain`` on the unmodified model.
    """
    own = scores[scores["method"] == method]
    value = bootstrap.mean(own["score"].to_numpy(), list(own["cluster"]))
    wide = scores.pivot(index="id", columns="method", values="score")
    clusters = list(
        scores.drop_duplicates("id").set_index("id").loc[wide.index, "cluster"]
    )
    row: dict[str, float] = {**ends(value), "n": value.n}
    for name, other in (("difference", base), ("gain", UNMODIFIED)):
        scored = wide[method].to_numpy(), wide[other].to_numpy()
        row |= ends(bootstrap.paired(*scored, clusters), name)
    return row


# Effects: estimates by name, and the claims that are held against them


def effects_table(effects: Mapping[str, Estimate]) -> pd.DataFrame:
    """Rows of effect, value, ci_low, ci_high, n."""
    return pd.DataFrame(
        [(name, *at) for name, at in effects.items()],
        columns=["effect", *Estimate._fields],
    )


def group(rows: pd.DataFrame, column: str) -> Group:
    """A column's values with their clusters, for a bootstrap."""
    return list(rows[column]), list(rows["cluster"])


def minus(groups: Mapping[K, Group], one: K, other: K, resamples: int) -> Estimate:
    """Mean of a group minus that of another: :func:`posbench.stats.bootstrap.paired` of the same prompts,
    else :func:`posbench.stats.bootstrap.statistic`."""
    (after, asked), (before, also) = groups[one], groups[other]
    if list(asked) == list(also):
        return bootstrap.paired(after, before, asked)
    return bootstrap.statistic(groups, lambda m: m[one] - m[other], resamples=resamples)


def judged(
    table: pd.DataFrame,
    study: str,
    note: str = "",
    *,
    missing: str = NO_ROPE,
    **words: str,
) -> list[Finding]:
    """The verdicts on a study's claims of ``yu2025_claims.csv``, from a table of effects.

    A claim holds where the interval of an effect, and that of ``also``, lies above a bound. Behind its name
    stand the effects that the note quotes; a claim without its effect is not testable, and
    ``missing`` says why.
    """
    effects = {row["effect"]: estimate(row) for row in table.to_dict("records")}
    found = []
    columns = ("study", "kind", "effects", "claim", "statistic", "bound", "also")
    claims = reference.table("yu2025_claims.csv", *columns)
    for each in claims[claims["study"] == study].itertuples():
        statistic, (name, *quoted) = (
            each.statistic.format(**words),
            each.effects.split(),
        )
        if name in effects:
            told = [
                f"{q.replace('_', ' ')} {effects[q].value:.3g}"
                for q in quoted
                if q in effects
            ]
            text = "; ".join(filter(None, [note, *told]))
            bound = float(each.bound or 0)
            both = dict.fromkeys((name, each.also or name))
            parts = [
                Finding.above(each.claim, statistic, effects[part], bound, text)
                for part in both
            ]
            found.append(joint(parts, shown=parts[0]))
        else:
            found.append(Finding.untestable(each.claim, statistic, missing))
        found[-1] = replace(found[-1], kind=each.kind)
    return found
