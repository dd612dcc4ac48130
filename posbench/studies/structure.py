"""What structure alone predicts of a position bias, and whether the bias follows when the prediction moves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Annotated, ClassVar

import numpy as np
import scipy
from annotated_types import Gt, Le
from numpy.typing import NDArray

from posbench.errors import UserError
from posbench.files.atomic import Row, round_values
from posbench.late import Axes, Figure, pd
from posbench.measure.influence import FIXED_SHARES, influence
from posbench.measure.replies import encode_longest, encode_prompt
from posbench.model.items import Span
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import InspectionPasses
from posbench.run.prompts import item_prompt
from posbench.schema import Count, Several
from posbench.stats import bootstrap
from posbench.stats.bootstrap import Array, Estimate, combined
from posbench.stats.correlation import spearman
from posbench.stats.findings import (
    SMALLEST_POINTS,
    SMALLEST_SHARE,
    Finding,
    correct_findings,
    estimate,
    estimate_row,
    join_findings,
)
from posbench.stats.glance import Glance, Number, Tone, sentence_case
from posbench.studies import prompts as shared
from posbench.studies.base import Study, Tables
from posbench.studies.prompts import Prompts
from posbench.tasks import Example
from posbench.tasks.items import sort_by_gold_position, spread_examples

PLAIN = "none"
BEHIND_TEXT = "text"
"""What stands in front of a prompt: nothing, or a neutral text."""
MEASURED = "measured"
SHARES = (MEASURED, *map(str, FIXED_SHARES))
"""Shares of attention of the layers, in the order of :class:`posbench.measure.influence.Influence`."""
ROLLOUTS = ("structure", "attention")
GRADIENT = "gradient"
KINDS = {
    "structure": "structure alone",
    "attention": "the model's attention",
    GRADIENT: "gradient",
}
MAX_PARTS = 256
"""Parts of a prompt behind the distances; each is a token in prompts that have no more."""
DISTANCES = ("spearman", "wasserstein", "spearman_inner", "wasserstein_inner")
SMALLEST_LOST_SHARE = 1 / 3
"""Share that a prediction, or a lead in score, loses behind the text at least, to be said to move."""
MIN_KEPT_SCORE = 0.5
"""Share of its best score that a model keeps behind the text at least; else the text broke the task."""
NEUTRAL_TEXT = (
    "The library lends books for four weeks. Readers return them at the counter near the entrance, or after hours "
    "through the flap in the yard. In summer the reading room stays open until the evening, and its windows look out "
    "on a row of old lime trees. Coffee is served on the first floor, where one may also borrow maps of the region."
)
DIRECTION = (
    "The gold position that structure alone favours is answered better (Herasimchyk et al. 2026)",
    "score at the gold position with the largest predicted influence minus the one with the smallest",
)
CAUSE = (
    "A third or more of the lead comes from structure: it has the predicted direction, and text in front lowers both",
    "lead in score that the gold position loses whose prediction the text lowers most, beyond a third of the lead",
)
RESIDUAL = (
    "Measured residual shares bring the rollout nearer to the gradient (Herasimchyk et al. 2026)",
    "Wasserstein distance to the gradient, as a share of the prompt: without residual stream minus with it",
)


@dataclass(frozen=True, kw_only=True)
class Structure(Study):
    """Influence of every item on the last token as structure alone predicts it, beside what the model does.

    Structure is the mask, ALiBi, and how much of its own input each layer keeps. A layer's share of attention (lambda)
    is the mean over tokens of |a| / (|x| + |a|), x being its input and a what attention adds; the MLP is ignored. The
    rollout with these shares is taken of attention that sees no content, and of the model's own; the gradient of the
    likeliest next token is the influence that is measured. RoPE is no part of the structure.

    As any curve that falls resembles any other, a control puts neutral text in front of the prompt, which moves items
    away from the first token: a bias is structural only if prediction and score both move. The control is judged at the
    gold position whose prediction it lowers most.

    Source: Herasimchyk et al. 2026 (arXiv 2602.16837); the control and its bar are ours.

    Attributes:
        examples: Examples of each gold position at most, for the scores.
        prompts: Prompts among them whose influence is measured, spread evenly over the gold positions.
        text_share: Length of the neutral text, as a share of the prompt's tokens, ten at most.
    """

    smallest: ClassVar[Mapping[str, int]] = {"examples": 6, "prompts": 6}

    examples: Count = 40
    prompts: Several = 40
    text_share: Annotated[float, Gt(0), Le(10)] = 1 / 3

    def check(self, run: Run) -> None:
        """Refuse a task without two gold positions, prompts too long with the text, and methods without whole maps.

        Raises:
            UserError: The task or the method does not fit.
        """
        shared.need_whole_maps(run)
        examples = shared.check_positions(run, "to compare")
        try:
            encode_longest(run.lm, run.task, self._behind_text(run, examples))
        except UserError as error:
            hint = "set study.text_share=0.1, or ask with fewer items"
            raise UserError(error.field, error.value, error.allowed, hint) from error

    def workload(self, run: Run) -> list[InspectionPasses]:
        """Return replies to all examples, and passes for the influence: one and its gradient, worth three, one without
        content."""
        plain = sort_by_gold_position(shared.need_items(run.task), self.examples)
        works = []
        for examples in (plain, self._behind_text(run, plain)):
            works.append(InspectionPasses(examples, times=0, replies=1, shared=True))
            measured = spread_examples(examples, self.prompts)
            works.append(InspectionPasses(measured, times=4))
        return works

    def _behind_text(self, run: Run, examples: Sequence[Example]) -> list[Example]:
        """The examples with neutral text in front, of ``text_share`` of the first one's tokens."""
        tokens = len(encode_prompt(run.lm, run.task, examples[0]).ids)
        tokenizer = run.lm.need_tokenizer()
        text = neutral_text(
            max(round(self.text_share * tokens), 1),
            lambda text: len(tokenizer(text, add_special_tokens=False).input_ids),
        )
        return [put_in_front(text, example) for example in examples]

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Measure influence and replies, without and with the text in front.

        Returns:
            ``structure_shares`` (lambda by layer), ``structure_items`` (influence of each item), ``structure_rollouts``
            (weight of the first and the last token, and distance to the gradient, by rollout), ``structure_scores``
            (score by gold position), ``structure_effects`` (the estimates behind the verdicts).
        """
        plain = sort_by_gold_position(shared.need_items(run.task), self.examples)
        influences = []
        scores = []
        for front, examples in (
            (PLAIN, plain),
            (BEHIND_TEXT, self._behind_text(run, plain)),
        ):
            key = {"front": front}
            label = "" if front == PLAIN else " behind text"
            prompts = Prompts.of(run, examples=examples)
            replies = prompts.as_read(
                "replies.jsonl", f"replies{label}", key, prompts.replies
            )
            of_prompts = [replies[example.id]["score"] for example in prompts.examples]
            scores.append(prompts.frame().assign(front=front, score=of_prompts))
            prompts = Prompts.of(run, examples=spread_examples(examples, self.prompts))
            rows = prompts.complete(
                "influence.jsonl",
                f"influence{label}",
                key,
                partial(_influence_rows, prompts),
            )
            columns = [rows[example.id] for example in prompts.examples]
            frame = pd.DataFrame(columns).drop(columns=["id"])
            influences.append(prompts.frame().join(frame))
        measured = pd.concat(influences, ignore_index=True)
        scores_table = pd.concat(
            [
                shared.means_by_position(frame, ["score"]).assign(front=front)
                for front, frame in zip((PLAIN, BEHIND_TEXT), scores, strict=True)
            ],
            ignore_index=True,
        )
        return {
            "structure_shares": _shares_table(measured),
            "structure_items": _items_table(measured),
            "structure_rollouts": _rollouts_table(measured),
            "structure_scores": scores_table,
            "structure_effects": _effects(measured, scores_table),
        }

    def figures(self, tables: Tables) -> Drawn:
        """Draw the predicted and the measured influence of each item beside the score."""
        caption = (
            "Influence of each item that is not asked for, relative to the mean of such items: by structure alone, by "
            "the model's attention, by its gradient; score by gold position (95 %). Dashed: behind a neutral text."
        )
        figure = structure_figure(tables["structure_items"], tables["structure_scores"])
        return {"structure": (figure, caption)}

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Judge direction and cause of the bias, and whether the residual stream brings the rollout to the gradient."""
        rows = tables["structure_effects"].to_dict("records")
        effects = {row["effect"]: estimate(row) for row in rows}
        direction = Finding.above(
            *DIRECTION, effects["direction"], SMALLEST_POINTS / 100
        )
        if effects["favoured"].value == effects["disfavoured"].value:
            direction = direction.not_testable("structure alone favours no position")
        nearer = Finding.above(*RESIDUAL, effects["nearer_to_gradient"], SMALLEST_SHARE)
        cause = _cause_finding(effects, direction, tables["structure_scores"])
        return [direction, nearer, cause]

    def glance(self, tables: Tables) -> Glance:
        """See :meth:`Study.glance`: whether structure alone predicts the bias, and whether it may be its cause."""
        findings = correct_findings(self.findings(tables))
        direction, _, cause = findings
        word, tone, sentence = conclude(direction.verdict, cause.verdict)
        rows = tables["structure_effects"].to_dict("records")
        effects = {row["effect"]: estimate(row) for row in rows}
        names = {
            "direction": "score where predicted best, minus worst",
            "lead": "lead in score",
            "lead_behind_text": "lead behind text",
        }
        numbers = tuple(
            Number.of(name, effects[effect], "points", "+z.1f", 100)
            for effect, name in names.items()
            if not np.isnan(effects[effect].value)
        )
        details = sentence_case(cause.note)
        sample = f"{effects['lead'].n:,} prompts"
        if effects["direction"].n:
            sample += f", {effects['direction'].n:,} of them at those two positions"
        return Glance(
            word,
            tone,
            sentence,
            numbers,
            details=details,
            sample=sample,
            rule="Lead: score at the position that is predicted less behind text, minus the mean of the others.",
        )


# Neutral text


def neutral_text(count: int, count_tokens: Callable[[str], int]) -> str:
    """Return the shortest run of words of :data:`NEUTRAL_TEXT`, repeated as needed, of ``count`` tokens or more.

    Args:
        count: Tokens.
        count_tokens: Number of tokens of a text.
    """
    words = NEUTRAL_TEXT.split()

    def of_words(number: int) -> str:
        return " ".join(islice(cycle(words), number)) + "\n\n"

    # Each word is a token or more.
    numbers = range(1, count + 1)
    index = bisect_left(numbers, count, key=lambda n: count_tokens(of_words(n)))
    return of_words(numbers[min(index, count - 1)])


def put_in_front(text: str, example: Example) -> Example:
    """Return an example with text in front of its prompt, and all its spans moved."""
    prompt = item_prompt(example).shifted(text + example.prompt, len(text))
    document = example.document
    if document is not None:
        document = (document[0] + len(text), document[1] + len(text))
    return replace(
        example,
        prompt=prompt.text,
        items=prompt.items,
        question=prompt.question,
        document=document,
        original=example,
    )


# Measurements


def _influence_rows(prompts: Prompts, batch: Sequence[Example]) -> list[Row]:
    """Measure the influence of the tokens of each prompt of a batch on its last one.

    Returns:
        A row for each prompt: ``tokens`` (n), ``lambdas`` [L], and by kind of influence a list of entries, one for each
        of :data:`SHARES`: ``first`` and ``last`` (weights of these tokens), ``items`` (weight of each item relative to
        the mean of those that are not gold) and, of rollouts, :data:`DISTANCES` to the gradient.
    """
    rows = []
    for example in batch:
        encoded = prompts.encoded[example.id]
        ids = encoded.ids
        owners = token_owners(example.prompt, encoded.offsets, example.items)
        layout = _Layout(owners, len(example.items), example.gold_positions)
        found = influence(prompts.run.lm, ids, layout.targets())
        row: Row = {"tokens": len(ids), "lambdas": round_values(found.shares)}
        for kind in ROLLOUTS:
            entries = []
            for weights in getattr(found, kind):
                distances = layout.distances(weights, found.gradient)
                entries.append({**layout.entry(weights), **distances})
            row[kind] = entries
        row[GRADIENT] = [layout.entry(found.gradient)]
        rows.append(row)
    return rows


def token_owners(
    prompt: str, offsets: Sequence[Span], items: Sequence[Span]
) -> NDArray[np.int64]:
    """Return the item that each token belongs to, [n]; -1 for none.

    A token belongs to the item in which its first character stands, spaces aside, so that no token counts twice.

    Args:
        prompt: The prompt, before any chat template.
        offsets: Characters (start, end) of each token in it; empty spans for tokens of the template.
        items: Characters (start, end) of each item.
    """
    owners = np.full(len(offsets), -1)
    for token, (start, end) in enumerate(offsets):
        text = prompt[start:end]
        first = end - len(text.lstrip())
        for item, (item_start, item_end) in enumerate(items):
            if item_start <= first < min(item_end, end):
                owners[token] = item
    return owners


@dataclass(frozen=True)
class _Layout:
    """What influence on a prompt is summed over: first token, last token, items, parts of all that is between the two.

    Attributes:
        owners: Item that each token belongs to, [n]; -1 for none.
        num_items: Items of the prompt; one that was cut away owns no token.
        gold: Items that are asked for.
    """

    owners: NDArray[np.int64]
    num_items: int
    gold: Sequence[int]

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.owners)

    @property
    def parts(self) -> list[NDArray[np.int64]]:
        """Tokens of each of at most :data:`MAX_PARTS` equal parts, without the first and the last token."""
        inner = np.arange(1, self.length - 1)
        return np.array_split(inner, min(MAX_PARTS, len(inner)))

    def targets(self) -> Array:
        """1 where a token is in the first token, the last one, each item, each part, in this order, else 0; [n, C]."""
        indicator = np.eye(self.length)
        columns = [indicator[0], indicator[-1]]
        for item in range(self.num_items):
            columns.append((self.owners == item).astype(float))
        columns += [indicator[tokens].sum(0) for tokens in self.parts]
        return np.stack(columns, axis=1)

    def entry(self, weights: Array) -> Row:
        """The weights [C] of first token, last token and, relative to the mean of those not asked for, of the items."""
        first, last = weights[:2]
        items = weights[2 : 2 + self.num_items].copy()
        items[~np.isin(np.arange(self.num_items), self.owners)] = np.nan
        others = np.delete(items, list(self.gold))
        mean = np.nanmean(others)
        relative = items / mean if mean > 0 else np.full(len(items), np.nan)
        return {
            "first": round_values(first),
            "last": round_values(last),
            "items": round_values(relative),
        }

    def distances(self, weights: Array, others: Array) -> dict[str, float]:
        """:data:`DISTANCES` of two influences, [C] each, in tokens; ``inner`` ones without the first and the last."""
        places = np.array([tokens.mean() for tokens in self.parts])
        places = np.array([0, *places, self.length - 1]) / (self.length - 1)
        first_part = 2 + self.num_items
        a, b = ([w[0], *w[first_part:], w[1]] for w in (weights, others))
        values = []
        for chosen in (slice(None), slice(1, -1)):
            x, y, at = a[chosen], b[chosen], places[chosen]
            values.append(float(spearman(x, y)))
            distance = np.nan
            if sum(x) > 0 and sum(y) > 0:
                distance = scipy.stats.wasserstein_distance(at, at, x, y)
            values.append(float(distance))
        return dict(zip(DISTANCES, round_values(values), strict=True))


# Tables


def _entries(frame: pd.DataFrame) -> Iterator[tuple[str, str, str, pd.DataFrame]]:
    """Yield the entries of :func:`_influence_rows` by front, kind and share: ``first``, ``last``, ``items``, distances.

    Each frame also has the columns gold_position and cluster.
    """
    for front, rows in frame.groupby("front", sort=False):
        for kind in KINDS:
            for index, share in enumerate(SHARES if kind in ROLLOUTS else ("",)):
                entries = pd.DataFrame([of_prompt[index] for of_prompt in rows[kind]])
                entries["gold_position"] = rows["gold_position"].to_numpy()
                entries["cluster"] = rows["cluster"].to_numpy()
                yield str(front), kind, share, entries


def _mean(values: pd.Series, clusters: pd.Series) -> Estimate:
    """The mean with its interval over questions, of values that are not NaN."""
    is_number = values.notna()
    if not is_number.any():
        return bootstrap.NO_ESTIMATE
    return bootstrap.difference(values[is_number].to_numpy(), list(clusters[is_number]))


def _shares_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of front, layer, lambda with its ci_low and ci_high, and n."""
    table = []
    for front, rows in frame.groupby("front", sort=False):
        by_layer = pd.DataFrame(rows["lambdas"].tolist(), index=rows.index)
        for layer in by_layer:
            mean = _mean(by_layer[layer], rows["cluster"])
            cell: Row = {"front": front, "layer": layer}
            table.append({**cell, **estimate_row(mean, "lambda"), "n": mean.n})
    return pd.DataFrame(table)


def _items_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of front, kind, share, gold (whether the item is asked for), item, depth, n, relative with its interval."""
    table = []
    for front, kind, share, entries in _entries(frame):
        items = pd.DataFrame(entries["items"].tolist())
        for item in items:
            is_gold = entries["gold_position"] == item
            for gold in (False, True):
                chosen = is_gold == gold
                mean = _mean(items.loc[chosen, item], entries.loc[chosen, "cluster"])
                if not mean.n:
                    continue
                cell: Row = {"front": front, "kind": kind, "share": share, "gold": gold}
                cell |= {"item": item, "depth": item / max(items.shape[1] - 1, 1)}
                row = {**cell, **estimate_row(mean, "relative"), "n": mean.n}
                table.append(row)
    return pd.DataFrame(table)


def _rollouts_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of front, kind, share, measure (``first``, ``last`` or one of DISTANCES), value, ci_low, ci_high, n."""
    table = []
    for front, kind, share, entries in _entries(frame):
        for measure in ("first", "last", *DISTANCES):
            if measure not in entries:
                continue  # the gradient has no distance to itself
            mean = _mean(entries[measure], entries["cluster"])
            cell: Row = {"front": front, "kind": kind, "share": share}
            cell["measure"] = measure
            table.append({**cell, **estimate_row(mean), "n": mean.n})
    return pd.DataFrame(table)


def _effects(measured: pd.DataFrame, scores: pd.DataFrame) -> pd.DataFrame:
    """Estimate what the verdicts rest on.

    Args:
        measured: A row for each front and prompt whose influence was measured.
        scores: The table ``structure_scores``.

    Returns:
        Rows of effect, value, ci_low, ci_high and n:
        ``sum_of_lambdas``, ``log_tokens``, ``text_tokens``: of the layers, of the prompts, and of the text in front;
        ``favoured``, ``disfavoured``: gold positions with most and least influence under structure alone;
        ``direction``: score at the first minus that at the second;
        ``lowered``: gold position whose influence under structure alone the text lowers most;
        ``predicted``: that influence, relative to the mean; ``lead``: score there minus the mean of the other gold
        positions; both also ``_behind_text``, and what they lose there beyond a third (``_lost_over_bound``);
        ``nearer_to_gradient``: Wasserstein distance to the gradient of the attention rollout without residual stream,
        minus that with measured shares.
    """
    plain, behind_text = (
        measured[measured["front"] == front].reset_index(drop=True)
        for front in (PLAIN, BEHIND_TEXT)
    )
    clusters = plain["cluster"]
    positions = scores["gold_position"].unique()
    predicted = _predictions(plain)[positions]
    predicted_behind_text = _predictions(behind_text)[positions]
    curve = predicted.mean().round(9)  # equal ones differ by rounding
    favoured, disfavoured = curve.idxmax(), curve.idxmin()
    lowered = (predicted_behind_text.mean() / curve).idxmin()
    before, after = predicted[lowered], predicted_behind_text[lowered]

    weights = np.where(positions == lowered, 1.0, -1 / (len(positions) - 1))
    direction = (positions == favoured).astype(float) - (positions == disfavoured)
    of_text = scores["front"] == BEHIND_TEXT
    at_positions = [estimate(row, "score") for _, row in scores[~of_text].iterrows()]
    at_text = [estimate(row, "score") for _, row in scores[of_text].iterrows()]
    kept = 1 - SMALLEST_LOST_SHARE
    n = int(scores.loc[~of_text, "n"].sum())
    of_direction = ~of_text & scores["gold_position"].isin([favoured, disfavoured])
    n_direction = int(scores.loc[of_direction, "n"].sum())

    text_tokens = (behind_text["tokens"] - plain["tokens"]).mean()
    distances = [
        entries[-1]["wasserstein"] - entries[0]["wasserstein"]
        for entries in plain["attention"]
    ]
    return shared.effects_table(
        {
            "sum_of_lambdas": _mean(plain["lambdas"].map(sum), clusters),
            "log_tokens": _mean(np.log(plain["tokens"]), clusters),
            "text_tokens": Estimate(text_tokens, np.nan, np.nan, len(plain)),
            "favoured": Estimate(favoured, np.nan, np.nan, len(plain)),
            "disfavoured": Estimate(disfavoured, np.nan, np.nan, len(plain)),
            "direction": combined(at_positions, direction, n_direction)
            if direction.any()
            else bootstrap.NO_ESTIMATE,
            "lowered": Estimate(lowered, np.nan, np.nan, len(plain)),
            "predicted": _mean(before, clusters),
            "predicted_behind_text": _mean(after, clusters),
            "predicted_lost_over_bound": _mean(kept * before - after, clusters),
            "lead": combined(at_positions, weights, n),
            "lead_behind_text": combined(at_text, weights, n),
            "lead_lost_over_bound": combined(
                [*at_positions, *at_text], [*(kept * weights), *-weights], n
            ),
            "nearer_to_gradient": _mean(pd.Series(distances), clusters),
        }
    )


def _predictions(rows: pd.DataFrame) -> pd.DataFrame:
    """Relative influence of each item by structure alone, by prompt and item; NaN where it is asked for."""
    items = pd.DataFrame([entries[0]["items"] for entries in rows["structure"]])
    is_gold = np.equal.outer(rows["gold_position"].to_numpy(), items.columns.to_numpy())
    return items.mask(is_gold)


# Verdicts


def _cause_finding(
    effects: Mapping[str, Estimate], direction: Finding, scores: pd.DataFrame
) -> Finding:
    """Judge whether the bias has the predicted direction, and text in front takes it away as it does the prediction.

    Args:
        effects: Estimates by name, see :func:`_effects`.
        direction: The finding on the direction.
        scores: The table ``structure_scores``.
    """
    note = (
        f"item {effects['lowered'].value:.0f} is predicted {effects['predicted'].value:.3g} times the mean, behind "
        f"{effects['text_tokens'].value:.0f} tokens of text {effects['predicted_behind_text'].value:.3g}; its lead in "
        f"score goes from {effects['lead'].words} to {effects['lead_behind_text'].words}"
    )
    moved = Finding.above(*CAUSE, effects["lead_lost_over_bound"], 0.0, note)
    best = scores.groupby("front")["score"].max()
    if direction.verdict == "not testable":
        moved = moved.not_testable("nothing is predicted")
    elif not effects["lead"].ci_low > 0:
        moved = moved.not_testable(
            "the gold position whose prediction the text lowers most has no sure lead"
        )
    elif not effects["predicted_lost_over_bound"].ci_low > 0:
        moved = moved.not_testable("the text does not lower the prediction by a third")
    elif best[BEHIND_TEXT] < MIN_KEPT_SCORE * best[PLAIN]:
        moved = moved.not_testable("behind the text the model no longer does the task")
    cause = join_findings([direction, moved], numbers_of=moved)
    return replace(cause, kind="source", note=moved.note)


def conclude(direction: str, cause: str) -> tuple[str, Tone, str]:
    """Return word, tone and sentence for the corrected verdicts on :data:`DIRECTION` and :data:`CAUSE`."""
    if direction == "holds" and cause == "holds":
        sentence = (
            "Structure alone predicts which gold position is answered better, and neutral text in front lowers the "
            "prediction and the lead in score."
        )
        return "structural in part", "good", sentence
    if direction == "holds" and cause == "contradicted":
        sentence = (
            "Structure alone predicts which gold position is answered better, but the lead in score loses less than a "
            "third where the prediction loses more."
        )
        return "direction only", "bad", sentence
    if direction == "holds":
        sentence = "Structure alone predicts which position is answered better; whether it causes this cannot be told."
        return "right direction", "open", sentence
    if direction == "contradicted":
        sentence = "The position that structure alone favours is not answered better than the one it disfavours."
        return "not the direction", "bad", sentence
    if direction == "not testable":
        sentence = (
            "Structure alone favours no gold position, so that it predicts no bias."
        )
        return "no prediction", "open", sentence
    sentence = "Whether the position that structure alone favours is answered better cannot be told."
    return "cannot tell", "open", sentence


# Figure


@plot.styled
def structure_figure(items: pd.DataFrame, scores: pd.DataFrame) -> Figure:
    """Draw influence by item as structure predicts it and as it is measured, beside the score by gold position.

    Args:
        items: The table ``structure_items``.
        scores: The table ``structure_scores``.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, (predicted, measured, score) = plot.new_figure(
        plot.PAGE, 2.6, 1, 3, n=scores["n"]
    )
    is_shown = ~items["gold"] & (items["share"].isna() | (items["share"] == MEASURED))
    others = items[is_shown]
    for front in (PLAIN, BEHIND_TEXT):
        for index, (kind, label) in enumerate(KINDS.items()):
            rows = others[(others["kind"] == kind) & (others["front"] == front)]
            axes = predicted if kind == "structure" else measured
            _draw(axes, rows, index, label, name="relative", scale=1)
        _draw(score, scores[scores["front"] == front], 3, "score", name="score")
    measured.sharey(predicted)
    for axes, title in ((predicted, "predicted"), (measured, "measured")):
        axes.axhline(1, color=plot.GUIDE, linewidth=0.6)
        axes.set(xlabel="item (% of the items)", title=title, yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    predicted.set_ylabel("influence relative to\nthe mean of the items")
    plot.percent_axes(score, "score (%)")
    score.set_title("score")
    plot.add_legend_below(figure)
    return figure


def _draw(
    axes: Axes,
    rows: pd.DataFrame,
    index: int,
    label: str,
    *,
    name: str,
    scale: float = 100,
) -> None:
    """Draw a line over the depth with its band; behind the text it is dashed, and has no entry in the legend.

    Args:
        axes: Where it is drawn.
        rows: A row per point.
        index: Number of the line's style.
        label: Its text in the legend.
        name: The estimate.
        scale: Factor of the estimate.
    """
    style = plot.line_style(index) | {"markersize": 2.5}
    if (rows["front"] == BEHIND_TEXT).all():
        style |= {"linestyle": plot.DASHED, "markerfacecolor": "white"}
        label = "_"
    plot.band(axes, rows, style, name=name, scale=scale, label=label)
