"""Behind RoPE on trained models (Figures 5, 8, 11-16): mean scores before the softmax, layer by layer."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv

from posbench.errors import UserError
from posbench.model import families
from posbench.model.hooks import attending
from posbench.model.lm import LM, batches
from posbench.pipeline.config import Config
from posbench.plots.base import new_figure, styled
from posbench.run.base import Run
from posbench.stats.tables import Z95
from posbench.studies.base import Finding, Study
from posbench.studies.behind_rope.causal_mask import draw_map, maps
from posbench.studies.wu2025.rollout import refuse_last_token_apart
from posbench.theory.causal_mask import diagonal_normalised

Array = NDArray[np.float64]
FIRST = 4  # layers of the paper's main figure
ACROSS = 8  # maps of the figures of all layers side by side


@dataclass(frozen=True, kw_only=True)
class Sampled(Study):
    """A study that averages over samples of tokens.

    Attributes:
        samples: Token rows.
        tokens: Tokens of a row, a beginning-of-sequence token counted where the tokenizer has one.
        text: A UTF-8 text file whose pieces are the rows; null: whole tokens drawn evenly, which know nothing
            of each other.
        seed: Seed of the draws, and of the order in which pieces of a text are taken.
        cells: Largest side of the maps that are written; of a larger map the means over blocks, its diagonal
            left out.
    """

    samples: int = 1000
    tokens: int = 50
    text: str | None = None
    seed: int = 0
    cells: int = 128

    def check(self, config: Config, lm: LM | None) -> None:
        """Refuse counts that leave nothing to see, rows that do not fit, short texts, and unfit methods and
        models."""
        refuse_last_token_apart(config)
        assert lm is not None
        for name, least in (("samples", 2), ("tokens", 8), ("cells", 8)):
            if getattr(self, name) < least:
                raise UserError(
                    f"study.{name}",
                    getattr(self, name),
                    f"a whole number from {least} up",
                    f"set study.{name}={least}",
                )
        if self.tokens > lm.context_window:
            allowed = f"at most {lm.context_window}, the context window of {lm.name}"
            raise UserError("study.tokens", self.tokens, allowed, "take fewer tokens")
        check_interface(lm)
        self.rows(lm)

    def rows(self, lm: LM) -> list[list[int]]:
        """The token rows; see :func:`samples`."""
        return samples(lm, self.samples, self.tokens, Path(self.text) if self.text else None, self.seed)

    def batches(self, run: Run) -> list[list[list[int]]]:
        """The token rows in batches as the runtime wants them."""
        rows, runtime = self.rows(run.lm), run.config.runtime
        plan = batches([self.tokens] * self.samples, runtime.batch_size, runtime.batch_tokens)
        return [[rows[i] for i in batch] for batch in plan]

    @property
    def source(self) -> str:
        """What the rows are, in words."""
        what = f"pieces of {Path(self.text).name}" if self.text else "random tokens"
        return f"{self.samples} samples of {self.tokens} {'tokens, ' + what if self.text else what}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class ScoreMap(Sampled):
    """Mean attention scores before the softmax, layer by layer (Behind RoPE, Section 5.2, Figures 5, 8,
    11-16)."""

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``maps`` (layer, query, key, score, normalised) and ``layers`` (what :func:`describe` says
        of each)."""
        plan = self.batches(run)
        with run.progress("samples", self.samples) as advance:
            found = score_maps(run.lm, plan, advance)
        layers = [{"layer": layer, **describe(each)} for layer, each in enumerate(found, start=1)]
        long = [
            long_map({"score": each.mean, "normalised": diagonal_normalised(each.mean)}, self.cells).assign(
                layer=layer
            )
            for layer, each in enumerate(found, start=1)
        ]
        columns = ["layer", "query", "key", "score", "normalised"]
        return {"maps": pd.concat(long, ignore_index=True)[columns], "layers": pd.DataFrame(layers)}

    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """The first layers raw and normalised, and where there are more, all of them."""
        table = tables["maps"]
        both = {name: stacked(table, name) for name in ("score", "normalised")}
        last = self.tokens if self.tokens > self.cells else None
        words = f"{self.source}; mean over heads. Colours from the 1 % to the 99 % quantile, the diagonal left out."
        rows = [
            (title, both[name][:FIRST]) for name, title in (("score", "scores"), ("normalised", "normalised"))
        ]
        drawn = {
            "score_map": (
                maps(rows, last),
                f"Scores before the softmax, and less the mean of their diagonal: {words}",
            )
        }
        if len(both["score"]) > FIRST:
            for name, title in (
                ("score", "Scores before the softmax"),
                ("normalised", "Scores less the mean of their diagonal"),
            ):
                drawn[f"all_layers_{name}"] = all_layers(both[name], last), f"{title}, every layer: {words}"
        return drawn

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """Whether scores favour near keys, and whether they depend on more than the distance."""
        first, later = tables["layers"].iloc[0], tables["layers"].iloc[1:]
        second, n = later.iloc[0], int(first["n"])
        toward, away = int((later["near_low"] > 0).sum()), int((later["near_high"] < 0).sum())
        moved = (later["shift_low"] > 0) | (later["shift_high"] < 0)
        still = first["shift_low"] <= 0 <= first["shift_high"]
        scale = np.sqrt(later["beyond"])
        # The layer whose interval comes nearest to 0, as the claim is about all of them.
        least = later.loc[(later["shift"].abs() / (later["shift_high"] - later["shift_low"])).idxmin()]
        return [
            Finding(
                claim="Behind RoPE, Sections 3.2 and 4.2: from layer 2 on scores favour nearby keys",
                statistic="layer 2: mean score of the nearest quarter of keys minus that of the farthest, key 1 left out",
                value=second["near"],
                low=second["near_low"],
                high=second["near_high"],
                n=n,
                verdict="holds" if second["near_low"] > 0 else "does not hold",
                note=f"layers from 2 on whose interval lies above 0: {toward}, below 0: {away}, of {len(later)}; "
                f"layer 1: {first['near']:.3g} [{first['near_low']:.3g}, {first['near_high']:.3g}]",
            ),
            Finding(
                claim="Behind RoPE, Section 5.2: scores depend on more than i - j in all layers but the first",
                statistic="mean score of earlier minus later pairs of a distance; the layer from 2 on least sure to differ",
                value=least["shift"],
                low=least["shift_low"],
                high=least["shift_high"],
                n=n,
                verdict="holds" if moved.all() and still else "does not hold",
                note=f"layers from 2 on whose interval leaves 0 out: {int(moved.sum())} of {len(later)}; "
                f"layer 1: {first['shift']:.3g} [{first['shift_low']:.3g}, {first['shift_high']:.3g}]",
            ),
            Finding(
                claim="Behind RoPE, Section 5.2: that part is not negligible, [-1, 1] where scores lie in [-10, 10]",
                statistic="standard deviation of diagonal-normalised over that of raw scores, median of layers 2 on",
                value=scale.median(),
                n=len(later),
                verdict="holds" if scale.median() >= 0.1 else "does not hold",
                note=f"from {scale.min():.2f} to {scale.max():.2f}; of what two halves of the samples share, key 1 left out",
            ),
        ]


def samples(lm: LM, count: int, tokens: int, text: Path | None, seed: int) -> list[list[int]]:
    """Token rows of one length, from a local text file or drawn at random; see :class:`Sampled`.

    Raises:
        UserError: The text is missing or too short.
    """
    rng = random.Random(seed)
    special = set(lm.tokenizer.all_special_ids) if lm.tokenizer else set()
    start = lm.encode("").ids[:1] if lm.tokenizer else []
    inner = tokens - len(start)
    if text is None:
        size = len(lm.tokenizer) if lm.tokenizer else families.text_config(lm.model).vocab_size
        usable = [i for i in range(size) if i not in special]
        return [start + rng.choices(usable, k=inner) for _ in range(count)]
    try:
        whole = text.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("study.text", str(text), "a UTF-8 text file", f"check the path ({error})") from error
    ids = list(lm.need_tokenizer()(whole, add_special_tokens=False)["input_ids"])
    pieces = [ids[i : i + inner] for i in range(0, len(ids) - inner + 1, inner)]
    if len(pieces) < count:
        hint = f"set study.samples={len(pieces)}, fewer study.tokens, or take a longer text"
        raise UserError("study.text", f"{len(ids)} tokens", f"{count} pieces of {inner} tokens", hint)
    return [start + piece for piece in rng.sample(pieces, count)]


class MeanMap:
    """Inner products of queries and keys, averaged over heads and samples as these come; no map of one sample
    is ever made.

    Attributes:
        each: Per sample the two differences of :func:`contrasts`, mean over heads.
    """

    def __init__(self, tokens: int) -> None:
        self._halves = torch.zeros(2, tokens, tokens, dtype=torch.float64)
        self.each: list[list[float]] = []

    def add(self, query: Tensor, key: Tensor, factor: float = 1.0) -> None:
        """Add samples: queries and keys [B, H, n, d], and the factor of their products."""
        query, key = query.float() * factor, key.float()
        count, heads, tokens, _ = query.shape
        half = (torch.arange(count) + len(self.each)) % 2
        for number in (0, 1):
            # Summed over samples and heads at once: one product of [n, B H d] matrices.
            rows = (half == number).to(query.device)
            left, right = (x[rows].permute(2, 0, 1, 3).reshape(tokens, -1) for x in (query, key))
            self._halves[number] += (left @ right.T).double().cpu() / heads
        differences = [
            (query * (weights @ key)).sum((2, 3)).mean(1) for weights in contrasts(tokens, query.device)
        ]
        self.each += torch.stack(differences, dim=1).tolist()

    @property
    def mean(self) -> Array:
        """The mean map [n, n], not a number above the diagonal."""
        return self._lower(self._halves.sum(0), len(self.each))

    @property
    def halves(self) -> tuple[Array, Array]:
        """The means over every other sample."""
        count = len(self.each)
        return self._lower(self._halves[0], (count + 1) // 2), self._lower(self._halves[1], count // 2)

    @staticmethod
    def _lower(total: Tensor, count: int) -> Array:
        found = (total / count).numpy()
        return np.where(np.tri(len(found), dtype=bool), found, np.nan)


@functools.lru_cache(maxsize=2)
def contrasts(tokens: int, device: torch.device) -> Tensor:
    """Weights [2, n, n] of the scores below the diagonal, token 1 left out (it is an attention sink).

    ``near``: for each query the nearest quarter of its keys minus the farthest, mean over queries with four
    keys or more. ``shift``: for each distance the earlier half of its pairs minus the later half, mean over
    distances; scores that depend on i - j alone give 0.
    """
    near, shift = torch.zeros(tokens, tokens), torch.zeros(tokens, tokens)
    for i in range(5, tokens):
        width = (i - 1) // 4
        near[i, i - width : i], near[i, 1 : 1 + width] = 1 / width, -1 / width
    for distance in range(1, tokens - 2):
        keys = torch.arange(1, tokens - distance)
        width = len(keys) // 2
        shift[keys[:width] + distance, keys[:width]] = 1 / width
        shift[keys[-width:] + distance, keys[-width:]] = -1 / width
    return torch.stack([near / (tokens - 5), shift / (tokens - 3)]).to(device)


@torch.inference_mode()
def score_maps(
    lm: LM, plan: Sequence[Sequence[Sequence[int]]], advance: Callable[[int], None] = lambda n: None
) -> list[MeanMap]:
    """Mean score before the softmax of every pair, a map per layer: after rotation and scaling, before any
    soft-cap.

    Memory is linear in the tokens but for two maps of each layer.

    Args:
        lm: The model, inside a method's block where one is meant. Where a method runs several rows for a
            sample (attention_buckets), these are averaged as heads are; where it attends several times in a
            layer (moice), the last time counts.
        plan: Batches of token rows, all of one length.
        advance: Told the size of each batch that is done.

    Raises:
        UserError: Attention of this family does not run through the library's functions.
    """
    found = [MeanMap(len(plan[0][0])) for _ in range(lm.layers)]
    for batch in plan:
        read_scores(lm, batch, lambda layer, query, key, factor: found[layer].add(query, key, factor))
        advance(len(batch))
    return found


def read_scores(
    lm: LM, batch: Sequence[Sequence[int]], add: Callable[[int, Tensor, Tensor, float], None]
) -> None:
    """Run a batch of token rows and hand on, once for each layer: layer, queries and keys [B, H, n, d],
    factor of their products.

    Raises:
        UserError: Attention of this family does not run through the library's functions.
    """
    check_interface(lm)
    pending: dict[int, tuple[Tensor, Tensor, float]] = {}

    def hand_on() -> None:
        for layer, found in pending.items():
            add(layer, *found)
        pending.clear()

    def read(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        following: Any,
        **rest: Any,
    ) -> Any:
        # A method may attend several times in a layer: the last one replaces those before it.
        if module.layer_idx not in pending:
            hand_on()
        factor = rest.get("scaling") or query.shape[-1] ** -0.5
        keys = repeat_kv(key, query.shape[1] // key.shape[1])
        pending[module.layer_idx] = (by_sample(query, len(batch)), by_sample(keys, len(batch)), factor)
        return following(module, query, key, value, mask, **rest)

    with attending(lm.model, read):
        lm.model(**lm.pad(batch), use_cache=False, logits_to_keep=1)
    hand_on()


def by_sample(states: Tensor, count: int) -> Tensor:
    """[rows, H, n, d] as [count, rows / count * H, n, d]: several rows of a sample count as further heads."""
    return states.reshape(count, -1, *states.shape[2:])


def check_interface(lm: LM) -> None:
    """Refuse a model whose attention cannot be listened to.

    Raises:
        UserError: Attention of this family does not run through the library's functions.
    """
    family = families.family_of(lm.model)
    if not family.interface:
        raise UserError(
            "model",
            lm.name,
            f"a family whose attention runs through the library; {family.name} does not",
            "take another model",
        )


def describe(found: MeanMap) -> dict[str, Any]:
    """What a map says in numbers, token 1 left out throughout.

    Returns:
        near and shift (see :func:`contrasts`; means over samples) with their 95 % intervals near_low,
        near_high, shift_low and shift_high (normal); score_low and score_high (1 % and 99 % quantile below
        the diagonal); repeat (correlation of the scores of two halves of the samples; noise gives 0) and
        beyond (share of the variance that both halves have in common which is left after each diagonal's mean
        is subtracted; not a number where they have none); n samples.
    """
    row: dict[str, Any] = {}
    for name, values in zip(("near", "shift"), np.array(found.each).T, strict=True):
        half = Z95 * values.std(ddof=1) / np.sqrt(len(values))
        row |= {
            name: values.mean(),
            f"{name}_low": values.mean() - half,
            f"{name}_high": values.mean() + half,
        }
    lower = np.tril_indices(len(found.mean) - 1, -1)
    one, other = (each[1:, 1:] for each in found.halves)
    raw = np.cov(one[lower], other[lower])
    left = np.cov(diagonal_normalised(one)[lower], diagonal_normalised(other)[lower])
    low, high = np.quantile(found.mean[1:, 1:][lower], [0.01, 0.99])
    return {
        **row,
        "score_low": low,
        "score_high": high,
        "repeat": raw[0, 1] / np.sqrt(raw[0, 0] * raw[1, 1]),
        "beyond": max(left[0, 1], 0) / raw[0, 1] if raw[0, 1] > 0 else np.nan,
        "n": len(found.each),
    }


def long_map(values: Mapping[str, Array], cells: int) -> pd.DataFrame:
    """Causal maps [n, n] as rows of query, key (from 1) and a column for each map.

    A map of more than ``cells`` tokens is cut into blocks: query and key are then the mean token of a block,
    and the value is the mean below the diagonal.
    """
    n = len(next(iter(values.values())))
    if n <= cells:
        i, j = np.tril_indices(n)
        return pd.DataFrame(
            {"query": i + 1, "key": j + 1, **{name: each[i, j] for name, each in values.items()}}
        )
    block = -(-n // cells)
    i, j = np.tril_indices(n, -1)
    frame = pd.DataFrame(
        {"query": i // block, "key": j // block, **{name: each[i, j] for name, each in values.items()}}
    )
    means = frame.groupby(["query", "key"], as_index=False).mean()
    edges = np.arange(0, n, block)
    middle = (edges + np.minimum(edges + block, n) + 1) / 2
    return means.assign(query=middle[means["query"]], key=middle[means["key"]])


def stacked(table: pd.DataFrame, column: str, by: str = "layer") -> Array:
    """The maps of a long table, [L, cells, cells]; not a number where it has no row."""
    places = np.union1d(table["query"], table["key"])
    each = list(table.groupby(by, sort=False))
    found = np.full((len(each), len(places), len(places)), np.nan)
    for number, (_, frame) in enumerate(each):
        found[number, np.searchsorted(places, frame["query"]), np.searchsorted(places, frame["key"])] = frame[
            column
        ]
    return found


@styled
def all_layers(values: Array, last: int | None) -> Figure:
    """Every layer's map, each with its own colours."""
    across = min(ACROSS, len(values))
    rows = -(-len(values) // across)
    figure = new_figure(1.4 * across, 1.5 * rows + 0.2)
    grid = figure.subplots(rows, across, squeeze=False)
    for number, axes in enumerate(grid.flat):
        if number < len(values):
            draw_map(figure, axes, values[number], last)
            axes.set(title=f"layer {number + 1}", xlabel="", ylabel="")
        else:
            axes.set_axis_off()
    figure.supxlabel("key", fontsize=8)
    figure.supylabel("query", fontsize=8)
    return figure
