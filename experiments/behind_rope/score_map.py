"""Behind RoPE on trained models (Figures 5, 8, 11-16): mean scores before the softmax, layer by layer."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge

from behind_rope.maps import (
    long_table,
    maps_figure,
    rows_of_panels,
    stack_maps,
    title_layers,
)
from posbench.errors import UserError
from posbench.files.sources import Source
from posbench.late import pd
from posbench.measure.scores import (
    diagonal_normalised,
    need_attention_interface,
    score_maps,
)
from posbench.model import families
from posbench.model.lm import LM
from posbench.model.rope import rotated_layers
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import StudyWorkload
from posbench.schema import Seed, Several
from posbench.stats.findings import SMALLEST_SHARE, Finding, estimate, join_findings
from posbench.studies.base import Study, Tables
from posbench.studies.prompts import need_whole_maps

MAIN_LAYERS = 4  # of the paper's main figure
MAPS_ACROSS = 8  # in the figures of all layers
PAPER_SECTION = "Behind RoPE, Section"
NEEDS_NO_ROPE = (
    "a claim on models without position embedding; this one rotates queries and keys"
)
NEEDS_ROPE = "a claim on models with RoPE; this one has none"


@dataclass(frozen=True, kw_only=True)
class Sampled(Study):
    """A study that averages over samples of tokens.

    Attributes:
        samples: Token rows.
        tokens: Tokens of a row, with the beginning-of-sequence token where there is one.
        text: UTF-8 file whose pieces are the rows; None: tokens drawn evenly.
        seed: Seed of the draws, and of the order in which pieces of a text are taken.
        cells: Side of the written maps; larger ones: means of blocks, no diagonal.
    """

    text_lengths: ClassVar[tuple[str, ...]] = ("tokens",)
    smallest: ClassVar[Mapping[str, int]] = {"samples": 16}
    samples: Several = 1000
    tokens: Annotated[int, Ge(8)] = 50
    text: str | None = None
    seed: Seed = 0
    cells: Annotated[int, Ge(8)] = 128

    def files(self) -> tuple[Source, ...]:
        """See :meth:`Study.files`."""
        if not self.text:
            return ()
        return (Source(kind="path", id=self.text, field="study.text"),)

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        need_whole_maps(run)
        window = run.lm.context_window
        if self.tokens > window:
            allowed = f"at most {window}, the context window of {run.lm.name}"
            raise UserError(
                "study.tokens", self.tokens, allowed, f"set study.tokens={window}"
            )
        need_attention_interface(run.lm)
        self.rows(run.lm)

    def workload(self, run: Run) -> list[StudyWorkload]:
        """See :meth:`Study.workload`."""
        return [StudyWorkload(texts=self.samples, length=self.tokens)]

    def rows(self, lm: LM) -> list[list[int]]:
        """The token rows: pieces of the text, or random tokens.

        Raises:
            UserError: The text is missing or too short.
        """
        rng = random.Random(self.seed)
        start = lm.encode("", chat=False).ids[:1] if lm.tokenizer else []
        length = self.tokens - len(start)
        if self.text is None:
            usable = _ordinary_tokens(lm)
            bodies = [rng.choices(usable, k=length) for _ in range(self.samples)]
        else:
            bodies = rng.sample(self._pieces(self.text, length, lm), self.samples)
        return [start + body for body in bodies]

    def _pieces(self, file: str, length: int, lm: LM) -> list[list[int]]:
        """A text cut into pieces of ``length`` tokens, at least one for each sample."""
        try:
            text = Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            hint = f"check the path ({error})"
            raise UserError("study.text", file, "a UTF-8 text file", hint) from error
        ids = list(lm.need_tokenizer()(text, add_special_tokens=False)["input_ids"])
        starts = range(0, len(ids) - length + 1, length)
        pieces = [ids[start : start + length] for start in starts]
        if len(pieces) < self.samples:
            allowed = f"{self.samples} pieces of {length} tokens"
            hint = f"set study.samples={len(pieces)}, fewer study.tokens, or take a longer text"
            raise UserError("study.text", f"{len(ids)} tokens", allowed, hint)
        return pieces

    @property
    def last_token(self) -> int | None:
        """Number of the last token, where a cell of the written maps covers several."""
        return self.tokens if self.tokens > self.cells else None

    @property
    def source(self) -> str:
        """The source of the rows, in words."""
        kind = "random tokens"
        if self.text:
            kind = f"tokens, pieces of {Path(self.text).name}"
        return f"{self.samples} samples of {self.tokens} {kind}, seed {self.seed}"


def _ordinary_tokens(lm: LM) -> list[int]:
    """Ids of all tokens that are not special."""
    if not lm.tokenizer:
        return list(range(families.text_config(lm.model).vocab_size))
    special = set(lm.tokenizer.all_special_ids)
    return [token for token in range(len(lm.tokenizer)) if token not in special]


@dataclass(frozen=True, kw_only=True)
class ScoreMap(Sampled):
    """Mean attention scores before the softmax, layer by layer.

    Source: Behind RoPE, Section 5.2, Figures 5, 8, 11-16.
    """

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``maps`` (layer, query, key, score, normalised) and ``layers`` (:meth:`MeanMap.facts`, rotated)."""
        batches = run.prompts.batches_by_length(self.rows(run.lm), len)
        with run.progress("samples", self.samples) as advance:
            mean_maps = score_maps(run.lm, batches, advance)
        rotated = rotated_layers(run.lm.model)
        maps = {}
        layers = []
        for layer, mean_map in enumerate(mean_maps):
            score = mean_map.mean
            maps[layer] = {"score": score, "normalised": diagonal_normalised(score)}
            layers.append({"layer": layer, **mean_map.facts()})
        return {
            "maps": long_table("layer", maps, self.cells),
            "layers": pd.DataFrame(layers).assign(
                rotated=[layer in rotated for layer in range(len(layers))]
            ),
        }

    def figures(self, tables: Tables) -> Drawn:
        """The first layers raw and normalised, and all layers if there are more."""
        samples = (
            f"{self.source}; mean over heads. Colours from the 1 % to the 99 % quantile without key 1, which trained "
            "models single out; no diagonal."
        )
        scores = stack_maps(tables["maps"], "score")
        normalised = stack_maps(tables["maps"], "normalised")
        rows = [
            ("score", title_layers(scores[:MAIN_LAYERS])),
            ("normalised", title_layers(normalised[:MAIN_LAYERS])),
        ]
        caption = (
            f"Scores before the softmax, and less the mean of their diagonal: {samples}"
        )
        figures = {
            "score_map": (maps_figure(rows, self.last_token, has_sink=True), caption)
        }
        if len(scores) <= MAIN_LAYERS:
            return figures
        for name, title, maps in (
            ("score", "Scores before the softmax", scores),
            ("normalised", "Less the mean of their diagonal", normalised),
        ):
            rows = rows_of_panels(title_layers(maps), MAPS_ACROSS)
            figure = maps_figure(rows, self.last_token, has_sink=True)
            figures[f"all_layers_{name}"] = (
                figure,
                f"{title}, every layer: {samples}",
            )
        return figures

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Whether scores favour near keys, and whether they depend on more than the distance."""
        first = tables["layers"].iloc[0]
        later = tables["layers"].iloc[1:]
        near_keys = _near_keys(first, later)
        of_rope = [_beyond_distance(first, later), _normalised_size(later)]
        if tables["layers"]["rotated"].any():
            return [near_keys.not_testable(NEEDS_NO_ROPE), *of_rope]
        return [near_keys, *(finding.not_testable(NEEDS_ROPE) for finding in of_rope)]


def _near_keys(first: pd.Series, later: pd.DataFrame) -> Finding:
    """Sections 3.2 and 4.2, from the rows of the first and of the later layers."""
    above = (later["near_ci_low"] > 0).sum()
    below = (later["near_ci_high"] < 0).sum()
    claim = f"{PAPER_SECTION}s 3.2 and 4.2: from the second layer on scores favour nearby keys"
    statistic = "second layer: mean score of the nearest quarter of keys minus the farthest, key 1 left out"
    note = (
        f"later layers with an interval above 0: {above}, below: {below}, of {len(later)}; "
        f"first: {estimate(first, 'near').words}"
    )
    # Scores are logarithms of weights: a difference of 0.05 changes a weight by 5 %.
    parts = [
        Finding.above(claim, statistic, estimate(layer, "near"), SMALLEST_SHARE, note)
        for _, layer in later.iterrows()
    ]
    return join_findings(parts, numbers_of=parts[0])


def _beyond_distance(first: pd.Series, later: pd.DataFrame) -> Finding:
    """Section 5.2, from the rows of the first and of the later layers."""
    low = later["shift_ci_low"]
    high = later["shift_ci_high"]
    differ = ((low > 0) | (high < 0)).sum()
    # The layer whose interval comes nearest to 0, as the claim is about all layers.
    least_sure = (later["shift"].abs() / (high - low)).idxmin()
    claim = f"{PAPER_SECTION} 5.2: scores depend on more than i - j in all layers but the first"
    statistic = "mean score of earlier minus later pairs of a distance; the later layer least sure to differ"
    note = (
        f"later layers whose interval leaves 0 out: {differ} of {len(later)}; "
        f"first: {estimate(first, 'shift').words}"
    )
    least_sure_differs = _differs_from_0(claim, statistic, later.loc[least_sure], note)
    first_differs = _differs_from_0(claim, statistic, first, note)
    parts = [
        _differs_from_0(claim, statistic, layer, note) for _, layer in later.iterrows()
    ]
    if first_differs.verdict == "holds":
        parts.insert(0, replace(first_differs, verdict="contradicted"))
    return join_findings(parts, numbers_of=least_sure_differs)


def _differs_from_0(claim: str, statistic: str, layer: pd.Series, note: str) -> Finding:
    """Whether a layer's shift differs from 0, on either side."""
    shift = estimate(layer, "shift")
    if shift.value > 0:
        return Finding.above(claim, statistic, shift, SMALLEST_SHARE, note)
    return Finding.below(claim, statistic, shift, -SMALLEST_SHARE, note)


def _normalised_size(later: pd.DataFrame) -> Finding:
    """Section 5.2: the size of the part that does not depend on i - j, from the rows of the later layers."""
    scale = np.sqrt(later["beyond"])
    typical = scale.median()
    claim = f"{PAPER_SECTION} 5.2: that part is not negligible, [-1, 1] where scores lie in [-10, 10]"
    statistic = "standard deviation of diagonal-normalised over that of raw scores, median of the later layers"
    note = (
        f"from {scale.min():.2f} to {scale.max():.2f}; of what two halves of the samples share; "
        "no interval: one model, a mean over the samples"
    )
    value = (typical, len(later))
    finding = Finding.that(bool(typical >= 0.1), claim, statistic, value, note)
    if np.isnan(typical):
        return finding.not_testable("the halves of the samples share nothing")
    return finding
