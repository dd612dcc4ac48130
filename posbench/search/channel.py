"""Which channel, factor and layers to scale: the search of Yu et al. 2025, Algorithm 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from annotated_types import MinLen

from posbench.errors import UserError
from posbench.files.atomic import Row, write_bytes, write_csv
from posbench.measure.losses import candidate_losses
from posbench.measure.states import Alphabet, Site, Strings, Sums, average_states
from posbench.methods.choice import MethodChoice
from posbench.methods.composed import Composed
from posbench.methods.scale_channel import ScaleChannel, check_layers, share
from posbench.model.lm import batches
from posbench.plots.search import candidate_label, candidate_losses_figure, channel_curves
from posbench.plots.section import Section
from posbench.run.base import Run
from posbench.schema import Count, Whole
from posbench.search import statistics
from posbench.search.base import Read, Search
from posbench.search.statistics import Array, ChannelStatistics
from posbench.tasks import Example

LOSSES, STATE = "search.jsonl", "search_state.npz"


@dataclass(frozen=True, kw_only=True)
class ChannelSearch(Search):
    """The channel search.

    Args:
        candidates: ``monotone`` filters channels by Algorithm 1; ``all`` traverses every channel.
        variant: ``paper`` or ``official`` where text and released code differ; see
            :mod:`posbench.search.statistics`. Official also rounds losses to 4 decimals (ties go to the
            smoother channel) and lets the unmodified model win.
        site: Statistics on the ``attention_input`` (the tensor that is scaled) or on the ``residual`` stream.
            The paper says "hidden states"; the released code takes the residual stream.
        strings: Random strings to average over (paper 2000, released script 200).
        length: Tokens per string.
        alphabet: ``characters`` draws random letters and digits and tokenises them; ``tokens`` draws random
            token ids, for models whose vocabulary is a small lexicon.
        window: Tokens in the sliding mean (paper 100, Section 2.3).
        skip: First tokens dropped (paper 30).
        over_layers: Smoothness over layers as a ``sum`` (Algorithm 1) or a ``mean`` (Section 3.2).
        top_k: Channels that go on to the calibration loss.
        factors: The factor grid.
        layers: ``[first, last]``; ``auto`` tries ranges; None takes the model's published range, else the
            middle of the model.
        layer_step: With ``auto``, ranges start and end on multiples of this; None gives about eight steps.
        batch_size: Strings or prompts per forward.
        seed: Seed of the random strings.
    """

    serves: ClassVar[type[ScaleChannel]] = ScaleChannel
    place: ClassVar[str] = "alone or last in a list of methods without attention_buckets"
    finds: ClassVar[Mapping[str, Any]] = {"channel": 0, "factor": 1.0, "layers": (0, 0)}
    results: ClassVar[Sequence[str]] = ("search.csv", "channels.csv")

    candidates: Literal["monotone", "all"] = "monotone"
    variant: Literal["paper", "official"] = "paper"
    site: Site = "attention_input"
    strings: Count = 2000
    length: Count = 1000
    alphabet: Alphabet = "characters"
    window: Count = 100
    skip: Whole = 30
    over_layers: Literal["sum", "mean"] = "sum"
    top_k: Count = 10
    factors: Annotated[tuple[float, ...], MinLen(1)] = (0.5, 0.0, -0.5, -1.0)
    layers: Literal["auto"] | tuple[int, int] | None = None
    layer_step: Count | None = None
    batch_size: Count = 8
    seed: int = 0

    @property
    def drawn(self) -> Strings:
        """The random strings."""
        settings = {"alphabet": self.alphabet, "seed": self.seed, "batch_size": self.batch_size}
        return Strings(count=self.strings, length=self.length, **settings)  # type: ignore[arg-type]

    def target(self, choice: MethodChoice) -> MethodChoice | None:
        """See :class:`Search`; the last part, whose prefill all candidates share, and not where a row stands
        for several."""
        parts = [choice, *choice.parts.values()]
        several = any(part.cls.rows_per_prompt for part in parts)
        return parts[-1] if issubclass(parts[-1].cls, self.serves) and not several else None

    def check(self, run: Run) -> None:
        """Refuse strings and layers that do not fit the model, and several channels typed at once."""
        lm, low = run.lm, self.window + self.skip + 7
        if self.variant == "official":
            low = 301
        if not low <= self.length <= lm.context_window:
            skips = "variant=official skips 300 tokens"
            why = skips if self.variant == "official" else "search.window + search.skip + 7"
            allowed = f"from {low} ({why}) to {lm.context_window} (context window of {lm.name})"
            raise UserError(
                "search.length", self.length, allowed, "change search.length, or shorten search.window"
            )
        typed = run.target.pinned.get("channel") if run.target else None
        if run.target and typed is not None and not isinstance(typed, int):
            hint = "leave the search out: stages=[intervene,evaluate,report]"
            raise UserError(f"{run.target.where}.channel", typed, "one channel, with the search stage", hint)
        if isinstance(self.layers, tuple):
            check_layers(lm, "search.layers", self.layers)

    def depends(self, run: Run) -> Mapping[str, Any]:
        """The layer ranges that are tried, and a typed channel."""
        return {"layers": self.ranges(run), "channel": self._pinned(run).get("channel")}

    def _pinned(self, run: Run) -> dict[str, Any]:
        return run.target.pinned if run.target else {}

    def ranges(self, run: Run) -> list[tuple[int, int]]:
        """The layer ranges to try: a typed one, those of the search, or the model's published one."""
        typed = self._pinned(run).get("layers")
        if typed:
            return [tuple(typed)]
        published = run.model.blocks.get("scale_channel", {}).get("layers")
        return self.layer_ranges(run.lm.layers, tuple(published) if published else None)

    def layer_ranges(self, count: int, published: tuple[int, int] | None) -> list[tuple[int, int]]:
        """The layer ranges to try in a model of ``count`` layers."""
        if self.layers == "auto":
            step = self.layer_step or max(1, round(count / 8))
            edges = sorted({*range(0, count, step), count})
            return [(a, b - 1) for i, a in enumerate(edges) for b in edges[i + 1 :]]
        if self.layers is not None:
            return [self.layers]
        # The paper's own 32-layer models use 10-25; other depths take the same share of the model.
        return [published or share((10, 25), count)]

    # What to try, and what to choose

    def statistics(self, averages: Mapping[str, Array], monotone_only: bool = True) -> ChannelStatistics:
        """Run the filter on averaged states.

        Args:
            averages: What :func:`posbench.measure.states.average_states` returns.
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

    def ask(
        self, found: ChannelStatistics, ranges: Sequence[tuple[int, int]], channel: int | None = None
    ) -> list[ScaleChannel]:
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
            allowed = "a model in which some channel is monotone in more than a quarter of the layers"
            hint = "try search=exhaustive, which traverses every channel"
            raise UserError("search.candidates", "monotone", allowed, hint)
        return [
            ScaleChannel(channel=c, factor=factor, layers=r)
            for c in channels
            for r in ranges
            for factor in self.factors
        ]

    def choose(self, losses: Sequence[float] | Array, unmodified: float) -> int | None:
        """Index of the chosen candidate; None where the official variant returns the unmodified model."""
        values = np.asarray(losses)
        if self.variant == "official":
            values, unmodified = values.round(4), round(unmodified, 4)
            if unmodified <= values.min():
                return None
        return int(values.argmin())

    # The run

    def search(self, run: Run) -> None:
        """Write ``search.csv`` (candidates, best first) and ``channels.csv`` (the winner's channel along the
        strings)."""
        with ExitStack() as stack:
            method = run.trial()
            for part in list(method.parts.values())[:-1] if isinstance(method, Composed) else ():
                stack.enter_context(part.applied(run.lm))
            averages = self.averages(run)
            found = self.statistics(averages)
            candidates = self.ask(found, self.ranges(run), self._pinned(run).get("channel"))
            each = self.losses(run, LOSSES, candidates)
        unmodified, losses, n = float(each[0].mean()), each[1:].mean(1), each.shape[1]
        best = self.choose(losses, unmodified)
        table = self._table(candidates, losses, found, best).assign(loss_unmodified=unmodified, n=n)
        write_csv(run.out.path / "search.csv", table)
        winner = candidates[int(losses.argmin()) if best is None else best]
        write_csv(run.out.path / "channels.csv", self._curves(averages, int(winner.channels[0])))
        chosen = winner if best is not None else None
        block = {
            "channel": int(chosen.channels[0]) if chosen else None,
            "factor": chosen.factor if chosen else None,
            "layers": list(chosen.layers) if chosen else None,
            "loss": round(float(losses.min()), 6),
            "loss_unmodified": round(unmodified, 6),
        }
        self.write_found(
            run,
            block,
            f"search ({self.candidates} candidates, variant {self.variant}, {self.site}, {self.strings} strings of "
            f"{self.length} tokens, {n} calibration examples, seed {self.seed})",
        )
        (run.out.path / STATE).unlink(missing_ok=True)

    def averages(self, run: Run) -> dict[str, Array]:
        """Averaged states; progress is saved in the run folder, so that a killed search goes on where it
        was."""
        saved, start = run.out.path / STATE, Sums()
        if saved.is_file():
            with np.load(saved) as data:
                parts = {n: torch.tensor(data[n], device=run.lm.device) for n in data.files if n != "count"}
                start = Sums(int(data["count"]), parts)

        def keep(state: Sums) -> None:
            buffer = BytesIO()
            np.savez(buffer, count=state.count, **{name: v.cpu().numpy() for name, v in state.sums.items()})
            write_bytes(saved, buffer.getvalue())

        with run.progress("search: random strings", self.strings) as advance:
            return average_states(run.lm, self.drawn, start=start, keep=keep, advance=advance)

    def losses(self, run: Run, file: str, candidates: Sequence[ScaleChannel]) -> Array:
        """Answer losses on the calibration examples, [1 + C, N], see :func:`candidate_losses`; resumed from a
        JSON-lines file."""
        examples = run.examples("calibration")
        answers = {e.id: run.lm.answer_ids(e.prompt, e.answers[0]) for e in examples}
        plan = batches([len(answers[e.id][0]) for e in examples], self.batch_size)

        def compute(batch: Sequence[Example]) -> list[Row]:
            losses = candidate_losses(run.lm, [answers[e.id] for e in batch], candidates)
            return [{"unmodified": row[0], "losses": row[1:]} for row in losses.T.tolist()]

        groups = [[examples[i] for i in group] for group in plan]
        rows = run.complete(
            file, f"search: {len(candidates)} candidates", groups, lambda e: {"id": e.id}, compute
        )
        by_id = {row["id"]: row for row in rows}
        return np.array([[by_id[e.id]["unmodified"], *by_id[e.id]["losses"]] for e in examples]).T

    def _table(
        self, candidates: Sequence[ScaleChannel], losses: Array, found: ChannelStatistics, best: int | None
    ) -> pd.DataFrame:
        order = np.argsort(losses, kind="stable")
        channels = [int(candidates[i].channels[0]) for i in order]
        return pd.DataFrame(
            {
                "rank": range(1, len(order) + 1),
                "channel": channels,
                "factor": [candidates[i].factor for i in order],
                "layer_first": [candidates[i].layers[0] for i in order],
                "layer_last": [candidates[i].layers[1] for i in order],
                "loss": losses[order],
                "monotone_layers": found.monotone_layers[channels],
                "smoothness": found.smoothness[channels],
                "selected": [int(i) == best for i in order],
            }
        )

    def _curves(self, averages: Mapping[str, Array], channel: int) -> pd.DataFrame:
        """The channel's curve per site and layer, beside the sliding mean that the paper's filter looks
        at."""
        parts = []
        for site, values in averages.items():
            curve = values[:, :, channel]
            smooth = np.full(curve.shape, np.nan)
            if self.variant == "paper":
                start = self.window // 2
                mean = statistics.sliding_mean(curve[:, :, None], self.window)[:, :, 0]
                # The first tokens are dropped before the fit.
                smooth[:, start + self.skip : start + mean.shape[1]] = mean[:, self.skip :]
            layer, token = (index.ravel() for index in np.indices(curve.shape))
            columns = {"channel": channel, "site": site, "layer": layer, "token": token}
            parts.append(pd.DataFrame({**columns, "value": curve.ravel(), "sliding_mean": smooth.ravel()}))
        return pd.concat(parts, ignore_index=True)

    def found(self, block: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`Search`; factor 1 where the unmodified model won."""
        return dict(self.finds) if block["channel"] is None else super().found(block)

    def told(self, block: Mapping[str, Any]) -> str:
        """Channel, factor, layers and loss."""
        text = "the unmodified model"
        if block["channel"] is not None:
            text = f"channel {block['channel']} x {block['factor']}, layers {block['layers']}"
        worse = block["loss"] >= block["loss_unmodified"]
        remark = "; no candidate lowers the loss of the unmodified model" if worse else ""
        return f"{text}: loss {block['loss']:.4f}, unmodified {block['loss_unmodified']:.4f}{remark}"

    # The report

    def sections(self, read: Read) -> list[Section]:
        """The ten best candidates, and the channel along the strings."""
        out, table, channels = [], read("search"), read("channels")
        if table is not None:
            out.append(_candidates(table))
        if channels is not None:
            drawn = {
                f"channel_{c}": (channel_curves(channels, c), f"Channel {c}. {CURVES}")
                for c in channels["channel"].unique()
            }
            out.append(Section("Positional channel", figures=drawn))
        return out


CURVES = (
    "Mean over random strings at each token (thin) and its sliding mean (thick), which the search fits: a line that keeps "
    "rising or falling means that the channel encodes position. Attention input: after a layer's first norm. Residual: 0 is "
    "the embedding, the last one comes after the final norm."
)


def _candidates(table: pd.DataFrame) -> Section:
    text = f"The ten best of {len(table)} candidates by loss on the calibration examples."
    if not table["selected"].any():
        text += " None was selected: the search kept the unmodified model."
    header = ["candidate", "loss", "unmodified", "n", "monotone layers", "smoothness", "selected"]
    rows = [
        [
            candidate_label(row),
            f"{row['loss']:.4f}",
            f"{row['loss_unmodified']:.4f}",
            str(row["n"]),
            str(row["monotone_layers"]),
            f"{row['smoothness']:.3g}",
            "yes" if row["selected"] else "",
        ]
        for _, row in table.sort_values("loss", kind="stable").head(10).iterrows()
    ]
    caption = "Loss of the best candidates; dashed: unmodified model."
    return Section("Search", text, header, rows, {"candidates": (candidate_losses_figure(table), caption)})
