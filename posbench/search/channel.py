"""Which channel, factor and layers: candidates to try, and the choice among their losses (Yu et al. 2025,
Algorithm 1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from posbench.errors import UserError
from posbench.search import statistics
from posbench.search.base import Search
from posbench.search.statistics import Array, ChannelStatistics


@dataclass(frozen=True, order=True)
class Candidate:
    """One setting of scale_channel: channel, factor, and the inclusive 0-based layer range."""

    channel: int
    factor: float
    layers: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class ChannelSearch(Search):
    """The channel search. The fields are the keys of ``conf/search/*.yaml``.

    Args:
        candidates: ``monotone`` filters channels by Algorithm 1; ``all`` traverses every channel.
        variant: ``paper`` or ``official`` where text and released code differ; see
            :mod:`posbench.search.statistics`. Official also rounds losses to 4 decimals (ties go to the
            smoother channel) and lets the unmodified model win.
        site: Statistics on the ``attention_input`` (after the first norm, the tensor that is scaled) or on
            the ``residual`` stream. The paper says "hidden states"; the released code takes the residual
            stream.
        strings: Random strings to average over (paper 2000, released script 200).
        length: Tokens per string.
        alphabet: ``characters`` draws random letters and digits and tokenises them; ``tokens`` draws random
            token ids, for models whose vocabulary is a small lexicon.
        window: Positions in the sliding mean (paper 100, Section 2.3).
        skip: First positions dropped (paper 30).
        over_layers: Smoothness over layers as a ``sum`` (Algorithm 1) or a ``mean`` (Section 3.2).
        top_k: Channels that go on to the calibration loss.
        factors: The factor grid.
        layers: ``[first, last]``; ``auto`` tries ranges; None takes the model's published range, else the
            middle of the model.
        layer_step: With ``auto``, ranges start and end on multiples of this; None gives about eight steps.
        batch_size: Strings or prompts per forward.
        seed: Seed of the random strings.
    """

    serves: ClassVar[str] = "ScaleChannel"
    place: ClassVar[str] = "alone or last in a list of methods without attention_buckets"
    finds: ClassVar[Mapping[str, Any]] = {"channel": 0, "factor": 1.0, "layers": (0, 0)}
    stage: ClassVar[str] = "channel_run"

    candidates: Literal["monotone", "all"] = "monotone"
    variant: Literal["paper", "official"] = "paper"
    site: Literal["attention_input", "residual"] = "attention_input"
    strings: int = 2000
    length: int = 1000
    alphabet: Literal["characters", "tokens"] = "characters"
    window: int = 100
    skip: int = 30
    over_layers: Literal["sum", "mean"] = "sum"
    top_k: int = 10
    factors: tuple[float, ...] = (0.5, 0.0, -0.5, -1.0)
    layers: Literal["auto"] | tuple[int, int] | None = None
    layer_step: int | None = None
    batch_size: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        self._at_least(strings=1, length=1, window=1, top_k=1, batch_size=1, layer_step=1, skip=0)
        if not self.factors:
            raise UserError("search.factors", [], "at least one factor", "the paper tries [0.5,0,-0.5,-1]")

    def part_of(self, parts: Mapping[str, type]) -> str | None:
        """See :class:`Search`; the last part, whose prefill all candidates share, and not where a row stands
        for several."""
        names = [cls.__name__ for cls in parts.values()]
        return list(parts)[-1] if names[-1] == self.serves and "AttentionBuckets" not in names else None

    def statistics(self, averages: dict[str, Array], monotone_only: bool = True) -> ChannelStatistics:
        """Run the filter on averaged states.

        Args:
            averages: ``attention_input`` [L, P, D] and ``residual`` [L + 1, P, D] (embedding, block outputs,
                final norm).
            monotone_only: See :func:`posbench.search.statistics.paper`; the official variant always is.
        """
        if self.variant == "official":
            return statistics.official(averages[self.site])
        curves = averages["attention_input"] if self.site == "attention_input" else averages["residual"][1:]
        return statistics.paper(
            curves,
            window=self.window,
            skip=self.skip,
            aggregate=self.over_layers,
            monotone_only=monotone_only,
        )

    def layer_ranges(self, count: int, published: tuple[int, int] | None) -> list[tuple[int, int]]:
        """The layer ranges to try in a model of ``count`` layers."""
        if self.layers == "auto":
            step = self.layer_step or max(1, round(count / 8))
            edges = sorted({*range(0, count, step), count})
            return [(a, b - 1) for i, a in enumerate(edges) for b in edges[i + 1 :]]
        if self.layers is not None:
            return [self.layers]
        # The paper's own 32-layer models use 10-25; other depths take the same share of the model.
        return [published or (round(count * 10 / 32), min(round(count * 25 / 32), count - 1))]

    def ask(
        self, found: ChannelStatistics, ranges: Sequence[tuple[int, int]], channel: int | None = None
    ) -> list[Candidate]:
        """Every candidate, in the order in which ties are broken: smoother channels first; of one channel
        where it is given.

        Raises:
            UserError: No channel passes the filter.
        """
        channels = found.ranking[: self.top_k]
        if channel is not None:
            channels = [channel]
        elif self.candidates == "all":
            channels = list(range(len(found.smoothness)))
        if not channels:
            raise UserError(
                "search.candidates",
                "monotone",
                "a model in which some channel is monotone in more than a quarter of the layers",
                "try search=exhaustive, which traverses every channel",
            )
        return [Candidate(c, f, r) for c in channels for r in ranges for f in self.factors]

    def choose(self, losses: Sequence[float], unmodified: float) -> int | None:
        """Index of the chosen candidate; None where the official variant returns the unmodified model."""
        values = np.asarray(losses)
        if self.variant == "official":
            values, unmodified = values.round(4), round(unmodified, 4)
            if unmodified <= values.min():
                return None
        return int(values.argmin())
