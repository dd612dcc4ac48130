"""Behind RoPE on trained models (Figures 5, 8, 11-16): mean scores before the softmax, layer by layer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge

from posbench.errors import UserError
from posbench.files.sources import Source
from posbench.late import pd
from posbench.measure.scores import check_interface, score_maps
from posbench.model import families
from posbench.model.lm import LM
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import StudyWorkload
from posbench.schema import Seed, Several
from posbench.stats.findings import Finding, estimate, joint
from posbench.studies.base import Study, Tables
from posbench.studies.behind_rope.maps import by_layer, long_table, maps_figure, stacked
from posbench.studies.prompts import need_whole_maps
from posbench.theory.causal_mask import diagonal_normalised

FIRST = 4  # layers of the paper's main figure
ACROSS = 8  # maps of the figures of all layers in a row
PAPER = "Behind RoPE, Section"


@dataclass(frozen=True, kw_only=True)
class Sampled(Study):
    """A study that averages over samples of tokens."""

    samples: Several = 1000  # token rows
    tokens: Annotated[int, Ge(8)] = (
        50  # of a row, with the beginning-of-sequence token where there is one
    )
    text: str | None = (
        None  # UTF-8 file whose pieces are the rows; None: tokens drawn evenly
    )
    seed: Seed = 0  # of the draws, and of the order in which pieces of a text are taken
    cells: Annotated[int, Ge(8)] = (
        128  # side of the written maps; larger ones: means of blocks, no diagonal
    )

    def files(self) -> tuple[Source, ...]:
        """See :meth:`Study.files`."""
        return (
            (Source(kind="path", id=self.text, field="study.text"),)
            if self.text
            else ()
        )

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        need_whole_maps(run)
        if self.tokens > run.lm.context_window:
            allowed = (
                f"at most {run.lm.context_window}, the context window of {run.lm.name}"
            )
            raise UserError("study.tokens", self.tokens, allowed, "take fewer tokens")
        check_interface(run.lm)
        self.rows(run.lm)

    def reads(self, run: Run) -> list[StudyWorkload]:
        """See :meth:`Study.reads`."""
        return [StudyWorkload(texts=self.samples, length=self.tokens)]

    def rows(self, lm: LM) -> list[list[int]]:
        """The token rows.

        Raises:
            UserError: The text is missing or too short.
        """
        rng = random.Random(self.seed)
        special = set(lm.tokenizer.all_special_ids) if lm.tokenizer else set()
        start = lm.encode("").ids[:1] if lm.tokenizer else []
        inner = self.tokens - len(start)
        if self.text is None:
            size = (
                len(lm.tokenizer)
                if lm.tokenizer
                else families.text_config(lm.model).vocab_size
            )
            usable = [i for i in range(size) if i not in special]
            return [start + rng.choices(usable, k=inner) for _ in range(self.samples)]
        try:
            whole = Path(self.text).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            hint = f"check the path ({error})"
            raise UserError(
                "study.text", self.text, "a UTF-8 text file", hint
            ) from error
        ids = list(lm.need_tokenizer()(whole, add_special_tokens=False)["input_ids"])
        pieces = [ids[i : i + inner] for i in range(0, len(ids) - inner + 1, inner)]
        if len(pieces) < self.samples:
            allowed = f"{self.samples} pieces of {inner} tokens"
            hint = f"set study.samples={len(pieces)}, fewer study.tokens, or take a longer text"
            raise UserError("study.text", f"{len(ids)} tokens", allowed, hint)
        return [start + piece for piece in rng.sample(pieces, self.samples)]

    @property
    def last(self) -> int | None:
        """Number of the last token, where a cell of the written maps stands for several."""
        return self.tokens if self.tokens > self.cells else None

    @property
    def source(self) -> str:
        """What the rows are, in words."""
        what = (
            f"tokens, pieces of {Path(self.text).name}"
            if self.text
            else "random tokens"
        )
        return f"{self.samples} samples of {self.tokens} {what}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class ScoreMap(Sampled):
    """Mean attention scores before the softmax, layer by layer.

    Source: Behind RoPE, Section 5.2, Figures 5, 8, 11-16.
    """

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``maps`` (layer, query, key, score, normalised) and ``layers`` (:meth:`MeanMap.facts`)."""
        with run.progress("samples", self.samples) as advance:
            found = score_maps(
                run.lm, run.prompts.batches_by_length(self.rows(run.lm), len), advance
            )
        both = {
            n: {"score": m.mean, "normalised": diagonal_normalised(m.mean)}
            for n, m in enumerate(found)
        }
        layers = pd.DataFrame(
            [{"layer": n, **each.facts()} for n, each in enumerate(found)]
        )
        return {"maps": long_table("layer", both, self.cells), "layers": layers}

    def figures(self, tables: Tables) -> Drawn:
        """The first layers raw and normalised, and where there are more, all of them."""
        titles = {
            "score": "Scores before the softmax",
            "normalised": "Less the mean of their diagonal",
        }
        both = {name: stacked(tables["maps"], name) for name in titles}
        words = f"{self.source}; mean over heads. Colours from the 1 % to the 99 % quantile, no diagonal."
        rows = [(name, by_layer(each[:FIRST])) for name, each in both.items()]
        caption = (
            f"Scores before the softmax, and less the mean of their diagonal: {words}"
        )
        drawn = {"score_map": (maps_figure(rows, self.last), caption)}
        for name, title in titles.items() if len(both["score"]) > FIRST else ():
            every = list(by_layer(both[name]).items())
            rows = [
                ("", dict(every[first : first + ACROSS]))
                for first in range(0, len(every), ACROSS)
            ]
            drawn[f"all_layers_{name}"] = (
                maps_figure(rows, self.last),
                f"{title}, every layer: {words}",
            )
        return drawn

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Whether scores favour near keys, and whether they depend on more than the distance."""
        first = tables["layers"].iloc[0]
        later = tables["layers"].iloc[1:]
        toward = (later["near_ci_low"] > 0).sum()
        away = (later["near_ci_high"] < 0).sum()
        moved = (later["shift_ci_low"] > 0) | (later["shift_ci_high"] < 0)
        # The layer whose interval comes nearest to 0, as the claim is about all of them.
        sure = later["shift"].abs() / (later["shift_ci_high"] - later["shift_ci_low"])
        least = later.loc[sure.idxmin()]
        scale = np.sqrt(later["beyond"])
        count = len(later)
        near, shift = (estimate(first, name).words for name in ("near", "shift"))
        claim = (
            f"{PAPER}s 3.2 and 4.2: from the second layer on scores favour nearby keys"
        )
        size = "second layer: mean score of the nearest quarter of keys minus the farthest, key 1 left out"
        note = f"later layers with an interval above 0: {toward}, below: {away}, of {count}; first: {near}"
        found = [Finding.above(claim, size, estimate(later.iloc[0], "near"), note=note)]
        claim = (
            f"{PAPER} 5.2: scores depend on more than i - j in all layers but the first"
        )
        size = "mean score of earlier minus later pairs of a distance; the later layer least sure to differ"
        note = f"later layers whose interval leaves 0 out: {moved.sum()} of {count}; first: {shift}"
        one, other = (_apart(claim, size, at, note) for at in (least, first))
        turned = (
            [replace(other, verdict="contradicted")] if other.verdict == "holds" else []
        )
        found.append(joint([*turned, one], shown=one))
        claim = f"{PAPER} 5.2: that part is not negligible, [-1, 1] where scores lie in [-10, 10]"
        size = "standard deviation of diagonal-normalised over that of raw scores, median of the later layers"
        note = f"from {scale.min():.2f} to {scale.max():.2f}; of what two halves of the samples share; "
        note += "no interval: one model, a mean over the samples"
        typical = scale.median()
        return [
            *found,
            Finding.that(typical >= 0.1, claim, size, (typical, count), note),
        ]


def _apart(claim: str, statistic: str, layer: pd.Series, note: str) -> Finding:
    """Whether a layer's shift lies apart from 0, on either side."""
    side = Finding.above if layer["shift"] > 0 else Finding.below
    return side(claim, statistic, estimate(layer, "shift"), note=note)
