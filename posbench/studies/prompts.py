"""Common parts of studies of gold positions: tokenised prompts, and tables of effects."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.late import pd
from posbench.measure.items import attention_to_items, item_tokens
from posbench.measure.replies import BatchShape, encode_longest, reply_to_batch
from posbench.methods.unmodified import Unmodified
from posbench.model.encode import Encoded
from posbench.model.lm import LM
from posbench.model.prefix import Prefix
from posbench.run.base import Run
from posbench.run.batch_plan import BatchPlan
from posbench.run.cost import InspectionPasses
from posbench.run.leads import ReadAt, examples_at_answer
from posbench.run.plan import Request, Subject
from posbench.stats import bootstrap, reference
from posbench.stats.bootstrap import Array, Estimate, Group
from posbench.stats.findings import (
    SMALLEST_POINTS,
    SMALLEST_SHARE,
    Finding,
    estimate,
    estimate_row,
    join_findings,
    with_subject,
)
from posbench.studies.base import Study
from posbench.tasks import Example, Task
from posbench.tasks.items import sort_by_gold_position

LayerRange = tuple[int, int]
VariantContext = Callable[[Sequence[Example]], AbstractContextManager[object]]
ComputeRows = Callable[[Sequence[Example]], list[Row]]
ComputeRowsOnPrefix = Callable[[Sequence[Example], Prefix | None], list[Row]]
RowsByVariant = Mapping[str, Mapping[str, Row]]  # variant -> id -> row
BOUNDS = {"share": SMALLEST_SHARE, "point": SMALLEST_POINTS / 100}
"""Names of the smallest effects worth naming in ``yu2025_claims.csv``; its scores lie between 0 and 1."""
NO_ROPE_NOTE = "the model has no rotary embedding in attention that runs through the library's functions"


def need_items(task: Task) -> list[Example]:
    """Return the evaluation examples, which have a gold item among others, sorted by gold position.

    Raises:
        UserError: There are none, or their replies are not generated.
    """
    examples: list[Example] = []
    if task.items:  # a task without items would first have to be downloaded
        examples = sort_by_gold_position(task.evaluation())
    has_choices = any(example.choices for example in examples)
    is_gold_alone = any(len(e.items) <= len(e.gold_positions) for e in examples)
    if not examples or has_choices or is_gold_alone:
        allowed = "a task with a gold item among others, with generated replies"
        raise UserError(
            "task", task.name, allowed, "take task=kv_retrieval or task=nq_multidoc"
        )
    return examples


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
    encode_longest(run.lm, task, task.evaluation())


def check_positions(run: Run, purpose: str) -> list[Example]:
    """Return the first example at each gold position, sorted by it.

    Args:
        run: The run.
        purpose: What several positions are for, for the error.

    Raises:
        UserError: The prompts do not fit (:func:`check_prompts`), or have one gold position.
    """
    check_prompts(run)
    examples = sort_by_gold_position(need_items(run.task), 1)
    if len(examples) < 2:
        allowed = f"two gold positions or more, {purpose}"
        hint = "set task.positions=[0%,50%,100%]"
        raise UserError("task.positions", len(examples), allowed, hint)
    return examples


def check_each_layer(lm: LM, name: str, layers: Sequence[int] | None) -> None:
    """Raise UserError unless a list names some of the model's layers; None stands for a default."""
    if layers is None:
        return
    if not layers or any(not 0 <= layer < lm.layers for layer in layers):
        allowed = f"layers from 0 to {lm.layers - 1}, or null"
        raise UserError(name, list(layers), allowed, f"set {name}=null")


def random_distractor(example: Example, name: str, seed: int) -> int:
    """Index of a random item of the prompt that is not gold, drawn by example."""
    gold = example.gold_positions
    candidates = [i for i in range(len(example.items)) if i not in gold]
    return random.Random(f"posbench {name} {seed} {example.id}").choice(candidates)


def gold_index(example: Example) -> int:
    """Index of the gold item; of several the one at ``gold_position``."""
    return int(example.gold_position or 0)


def mean_distractor_attention(weights: Array, example: Example) -> Array:
    """Mean attention to the items that are not gold, [...].

    Args:
        weights: Attention to the N items of the example, [..., N].
        example: The example.
    """
    gold = list(example.gold_positions)
    num_distractors = max(weights.shape[-1] - len(gold), 1)
    return (weights.sum(-1) - weights[..., gold].sum(-1)) / num_distractors


@dataclass(frozen=True, kw_only=True)
class GoldStudy(Study):
    """A study of prompts with a gold item, at the end of the prompt or where the answer begins.

    Attributes:
        examples: Examples of each gold position at most; None: all.
        read_at: ``prompt``: the prompts as they are asked; their last token is the one that is looked at.
            ``answer``: each with the words that the model itself puts before its answer (:mod:`posbench.run.leads`).
    """

    examples: int | None = None
    read_at: ReadAt = "prompt"

    def prompts(self, run: Run, task: Task | None = None) -> Prompts:
        """Return the prompts of a task, the run's by default, that the study looks at."""
        examples = sort_by_gold_position(need_items(task or run.task), self.examples)
        if self.read_at == "answer":
            examples = examples_at_answer(run, examples, task)
        return Prompts.of(run, examples=examples, task=task)

    def lead_passes(self, examples: Sequence[Example]) -> list[InspectionPasses]:
        """Workload of finding where the answer begins."""
        if self.read_at == "prompt":
            return []
        return [InspectionPasses(examples, times=0, replies=1)]


class ItemChange(NamedTuple):
    """How the forward pass treats one item of a prompt.

    Attributes:
        label: The change, for readers.
        crops_mask: Whether the item sees nothing that comes before it.
        moved_to: Place of the item whose position ids it takes; empty: it keeps its own.
        of_another: Whether that is another item than the gold one (a control).
    """

    label: str
    crops_mask: bool = False
    moved_to: Literal["beginning", "end", ""] = ""
    of_another: bool = False


@dataclass(frozen=True)
class Prompts:
    """Tokenised prompts of a task, in batches.

    Attributes:
        run: The run that they belong to.
        task: The task.
        examples: The examples, sorted by gold position.
        encoded: Their prompts as tokens, by id.
        tokens: Token spans of every item, by example id.
        batches: Examples that are decoded alike, the longest first as in LM.generate.
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
        max_per_position: int | None = None,
        examples: Sequence[Example] = (),
        task: Task | None = None,
    ) -> Prompts:
        """Tokenise a task's prompts and plan their batches.

        Args:
            run: The run.
            max_per_position: Prompts at each gold position at most; None for all.
            examples: Examples of the task; empty for all with gold items.
            task: The task; None for the run's.
        """
        task = task or run.task
        examples = sort_by_gold_position(examples or need_items(task), max_per_position)
        encoded = run.prompts.encode(examples, task)
        run.note_prompts(encoded)
        tokens = {
            example.id: item_tokens(encoded[example.id], example)
            for example in examples
        }
        batches = run.prompts.batches(examples, encoded, task)
        return cls(run, task, examples, encoded, tokens, batches)

    def lengths(self, batch: Sequence[Example]) -> list[int]:
        """Tokens of each prompt of a batch."""
        return [len(self.encoded[example.id].ids) for example in batch]

    def spans(
        self, batch: Sequence[Example], item: Callable[[Example], int]
    ) -> list[tuple[int, int]]:
        """Token span of one item of each prompt of a batch; ``item`` gives its index."""
        return [self.tokens[example.id][item(example)] for example in batch]

    def frame(self) -> pd.DataFrame:
        """Return a row for each example: items (per prompt), id, cluster (its question), gold_position, depth, 0..1."""
        items = len(self.examples[0].items)
        rows = [
            {
                "items": items,
                "id": example.id,
                "cluster": example.question_id,
                "gold_position": example.gold_position,
            }
            for example in self.examples
        ]
        frame = pd.DataFrame(rows)
        return frame.assign(depth=frame["gold_position"] / max(items - 1, 1))

    @cached_property
    def _examples_by_id(self) -> dict[str, Example]:
        return {example.id: example for example in self.examples}

    def _need_own(self, batch: Sequence[Example]) -> None:
        """Refuse examples that are not these prompts': the tokens of another one with their id would be read.

        Raises:
            UserError: The first of them.
        """
        for example in batch:
            if self._examples_by_id.get(example.id) != example:
                allowed = (
                    "an example of these Prompts: their tokens are known by its id"
                )
                hint = (
                    "make Prompts of the changed ones: Prompts.of(run, examples=[...])"
                )
                raise UserError("example", example.id, allowed, hint)

    def results(
        self, rows: Mapping[str, Row], layers: LayerRange | None = None
    ) -> pd.DataFrame:
        """Add columns attention and score to :meth:`frame`.

        Args:
            rows: Rows with attention (by layer) and score, by example id.
            layers: First and last layer to average the attention over; None for the attention as it is.
        """
        attention = []
        scores = []
        for example in self.examples:
            row = rows[example.id]
            value = row["attention"]
            if layers is not None:
                first, last = layers
                value = float(np.mean(value[first : last + 1]))
            attention.append(value)
            scores.append(float(row["score"]))
        return self.frame().assign(attention=attention, score=scores)

    def complete(
        self, file: str, label: str, key: Mapping[str, object], compute: ComputeRows
    ) -> dict[str, Row]:
        """Compute a row for each example, resumed from a JSON-lines file.

        Args:
            file: The file, which may hold rows of other keys as well.
            label: Name of the work in the progress bar.
            key: Columns that identify these rows in the file, besides the id.
            compute: Makes the rows of a batch.

        Returns:
            Rows by example id.
        """
        rows = self.run.rows.complete(
            file, label, self.batches, lambda e: {**key, "id": e.id}, compute
        )
        return {row["id"]: row for row in rows}

    def as_read(
        self,
        file: str,
        label: str,
        key: Mapping[str, object],
        compute: ComputeRowsOnPrefix,
    ) -> dict[str, Row]:
        """Complete the rows of a measurement that changes nothing on the prompts but the run's method.

        As :meth:`complete`, but a prefix that several prompts share is computed once where that method allows it.

        Args:
            file: File of the rows.
            label: Label of the progress bar.
            key: Fields that tell these rows from others in the file.
            compute: Makes the rows of a batch; also gets a cache with all tokens of its prompts but the last, or None.

        Returns:
            The rows by example id.
        """
        run = self.run
        method = run.method.build()
        if method.prefill() != method:
            return self.complete(file, label, key, lambda batch: compute(batch, None))

        plan = _ReadBatches(run, self.examples, self.encoded, self.task, compute)

        def row_key(request: Request) -> Row:
            return {**key, "id": request.example.id}

        rows = run.rows.complete(
            file, label, plan.batches, row_key, plan.answer, plan.order
        )
        return {row["id"]: row for row in rows}

    def attention(
        self,
        batch: Sequence[Example],
        prefix: Prefix | None = None,
        *,
        heads: bool = False,
    ) -> Array:
        """Return the attention of the last token to the items of a batch, in the shape of :func:`attention_to_items`.

        Args:
            batch: Examples of :attr:`examples`.
            prefix: Cache of all their tokens but the last; None: the prompts are read whole.
            heads: Keep the heads apart, else their mean.

        Raises:
            UserError: An example is not one of :attr:`examples`.
        """
        self._need_own(batch)
        encoded = [self.encoded[example.id] for example in batch]
        weights = attention_to_items(
            self.run.lm, encoded, batch, heads=heads, prefix=prefix
        )
        return weights.double().numpy()

    def replies(
        self, batch: Sequence[Example], prefix: Prefix | None = None
    ) -> list[Row]:
        """Return the reply to each example of a batch: ``output``, its text, and ``score`` by the task's metric.

        Args:
            batch: Examples of :attr:`examples`.
            prefix: Cache of all their tokens but the last; None: the prompts are read whole.

        Raises:
            UserError: An example is not one of :attr:`examples`.
        """
        self._need_own(batch)
        rows = []
        batch_replies = reply_to_batch(
            self.run.lm, self.task, batch, self.encoded, prefix
        )
        for example, reply in zip(batch, batch_replies, strict=True):
            output = str(reply["output"])
            score = self.task.checked_score(example, output)[self.task.metric]
            rows.append({"output": output, "score": score})
        return rows

    def under(
        self,
        variant: str,
        block: VariantContext,
        keep: Callable[[Sequence[Example], Array], list[Row]],
    ) -> dict[str, Row]:
        """Measure reply and attention of every prompt under a variant, resumed from ``rows.jsonl``.

        Args:
            variant: Name of the variant, which identifies its rows.
            block: Makes the context in which a batch runs.
            keep: Selects the part of a batch's attention to its items, [B, L, N], to store: a row per prompt.

        Returns:
            By example id the score and the selection of ``keep``.
        """

        def compute(batch: Sequence[Example]) -> list[Row]:
            with block(batch):
                selected = keep(batch, self.attention(batch))
                scored = self.replies(batch)
            return [
                {"score": reply["score"], **row}
                for reply, row in zip(scored, selected, strict=True)
            ]

        label = variant.replace("_", " ")
        return self.complete("rows.jsonl", label, {"variant": variant}, compute)


class _ReadBatches(BatchPlan):
    """Prompts that a study reads on the unmodified model, each shared prefix once.

    Args:
        run: The run.
        examples: The examples.
        encoded: Their prompts by id.
        task: Their task.
        compute: Makes the rows of a batch, given its prefix.
    """

    def __init__(
        self,
        run: Run,
        examples: Sequence[Example],
        encoded: Mapping[str, Encoded],
        task: Task,
        compute: ComputeRowsOnPrefix,
    ) -> None:
        self._task = task
        self._compute = compute
        super().__init__([Subject(run, "", Unmodified())], examples, encoded)

    def make_batches(
        self,
        examples: Sequence[Example],
        prompts: Mapping[str, Encoded],
        shape: BatchShape,
    ) -> list[list[Example]]:
        return self.run.prompts.batches(examples, prompts, self._task, shape)

    def answer(self, batch: Sequence[Request]) -> list[Row]:
        with self.applied(batch) as prefix:
            return self._compute([request.example for request in batch], prefix)


def means_by_position(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Average columns at each gold position and number of items.

    Args:
        frame: Rows as of :meth:`Prompts.frame`.
        columns: The columns.

    Returns:
        Rows of items, gold_position, depth, n, and each column with its _ci_low and _ci_high.
    """
    rows = []
    keys = ["items", "gold_position", "depth"]
    for (items, position, depth), part in frame.groupby(keys, sort=True):
        row = {
            "items": items,
            "gold_position": position,
            "depth": depth,
            "n": len(part),
        }
        clusters = list(part["cluster"])
        for column in columns:
            values = part[column].to_numpy()
            is_score = column == "score"
            level = bootstrap.mean(values, clusters, of_scores=is_score)
            row |= estimate_row(level, column)
        rows.append(row)
    return pd.DataFrame(rows)


# Effects: estimates by name, and the claims that are held against them


def effects_table(effects: Mapping[str, Estimate]) -> pd.DataFrame:
    """Rows of effect, value, ci_low, ci_high, n."""
    rows = [(name, *effect) for name, effect in effects.items()]
    return pd.DataFrame(rows, columns=["effect", *Estimate._fields])


def values_and_clusters(rows: pd.DataFrame, column: str) -> Group:
    """A column's values with their clusters, for a bootstrap."""
    return list(rows[column]), list(rows["cluster"])


def judge_claims(
    table: pd.DataFrame,
    study: str,
    note: str = "",
    *,
    subject: str = "",
    missing_note: str = NO_ROPE_NOTE,
    untestable: Mapping[str, str] | None = None,
    **placeholders: str,
) -> list[Finding]:
    """Judge a study's claims of ``yu2025_claims.csv`` by a table of effects.

    A claim holds where the interval of an effect, and the interval of ``also``, lies on a side of a bound: a number or
    one of :data:`BOUNDS`, as a share of the effect ``of`` if it has one. A claim without its effect is not testable.

    Args:
        table: Rows of effect (its name), value, ci_low, ci_high, n.
        study: Name of the study in the claims.
        note: Start of the notes.
        subject: Of which channel the claims are asked: words that their text gets, such as that it is not the paper's.
        missing_note: Why an effect may be missing.
        untestable: Why a claim cannot be tested here, by the effect that it is judged by.
        **placeholders: Values of the placeholders in the statistics' names.

    Returns:
        A finding for each claim.
    """
    effects = {row["effect"]: estimate(row) for row in table.to_dict("records")}
    columns = (
        "study",
        "kind",
        "effects",
        "claim",
        "statistic",
        "side",
        "bound",
        "of",
        "also",
    )
    claims = reference.read_table("yu2025_claims.csv", *columns)
    findings = []
    for claim in claims[claims["study"] == study].itertuples():
        statistic = claim.statistic.format(**placeholders)
        claim = claim._replace(claim=with_subject(claim.claim, subject))
        # The first of its effects is the one that is judged.
        judged, *_ = claim.effects.split()
        if judged in effects:
            finding = _judged_claim(claim, statistic, effects, note)
        else:
            finding = Finding.untestable(claim.claim, statistic, missing_note)
        if untestable and judged in untestable:
            finding = finding.not_testable(untestable[judged])
        findings.append(replace(finding, kind=claim.kind))
    return findings


def _judged_claim(
    claim: Any, statistic: str, effects: Mapping[str, Estimate], note: str
) -> Finding:
    """Judge one row of a table of claims.

    Args:
        claim: The row: ``claim`` (its text), ``effects`` (the one that is judged, then those that the note quotes),
            ``side`` and ``bound`` of the judged effect, ``of`` (an effect that the bound is a multiple of), and
            ``also`` (a second effect that has to pass the same bound).
        statistic: What the effect is, in words.
        effects: Estimates by name.
        note: Begin of the finding's note.
    """
    name, *quoted = claim.effects.split()
    quotes = [
        f"{effect.replace('_', ' ')} {effects[effect].value:.3g}"
        for effect in quoted
        if effect in effects
    ]
    text = "; ".join(filter(None, [note, *quotes]))
    bound = BOUNDS[claim.bound] if claim.bound in BOUNDS else float(claim.bound)
    if claim.of:
        bound *= effects[claim.of].value
    judge = Finding.below if claim.side == "below" else Finding.above
    finding = judge(claim.claim, statistic, effects[name], bound, text)
    parts = [finding]
    if claim.also and claim.also != name:
        also = effects[claim.also]
        parts.append(judge(claim.claim, statistic, also, bound, text))
    return join_findings(parts, numbers_of=finding)
