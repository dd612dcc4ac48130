"""Which channel, factor and layers to scale: the search of Yu et al. 2025, Algorithm 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import MinLen

from posbench.errors import UserError
from posbench.files.atomic import Row, write_csv
from posbench.files.digests import contents
from posbench.late import pd
from posbench.measure.losses import candidate_losses
from posbench.measure.states import Alphabet, Site, Strings, Sums, average_states
from posbench.methods.choice import MethodChoice
from posbench.methods.composed import Composed
from posbench.methods.scale_channel import ScaleChannel, check_layers, share
from posbench.model.lm import batches
from posbench.plots.search import (
    candidate_label,
    candidate_losses_figure,
    channel_curves,
)
from posbench.plots.section import Section
from posbench.run.base import Run
from posbench.run.cost import StudyWorkload
from posbench.schema import Count, Seed, Whole
from posbench.search import statistics
from posbench.search.base import ROWS, Read, save, saved
from posbench.search.deploy import DeploySearch
from posbench.search.statistics import Array, ChannelStatistics
from posbench.tasks import Example


@dataclass(frozen=True, kw_only=True)
class ChannelSearch(DeploySearch):
    """The channel search; see :class:`posbench.search.deploy.DeploySearch` for what will be shipped.

    Args:
        candidates: ``monotone`` filters channels by Algorithm 1; ``all`` traverses every channel.
        variant: ``paper`` or ``official``, as :mod:`posbench.search.statistics` says. Official also rounds
            losses to 4 decimals (ties go to the smoother channel) and lets the unmodified model win.
        site: Statistics on the ``attention_input`` (the tensor that is scaled) or on the ``residual`` stream
            (the released code; the paper says "hidden states").
        strings: Random strings to average over (paper 2000, released script 200).
        length: Tokens per string.
        alphabet: ``characters`` draws letters and digits and tokenises them; ``tokens`` draws token ids.
        window: Tokens in the sliding mean (paper 100, Section 2.3).
        skip: First tokens dropped (paper 30).
        over_layers: Smoothness over layers as a ``sum`` (Algorithm 1) or a ``mean`` (Section 3.2).
        top_k: Channels that go on to the calibration loss.
        factors: The factor grid.
        layers: ``[first, last]``; ``auto`` tries ranges; None: the model's published range, else its middle.
        layer_step: With ``auto``, ranges start and end on multiples of this; None gives about eight steps.
        batch_size: Strings or prompts per forward.
        seed: Seed of the random strings.
    """

    serves: ClassVar[type[ScaleChannel]] = ScaleChannel
    place: ClassVar[str] = (
        "alone or last in a list of methods without attention_buckets"
    )
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
    factors: Annotated[tuple[float, ...], MinLen(1)] = (0.5, 0.0, -0.5, -1.0)
    layers: Literal["auto"] | tuple[int, int] | None = None
    layer_step: Count | None = None
    batch_size: Count = 8
    seed: Seed = 0

    @property
    def drawn(self) -> Strings:
        """The random strings."""
        names = ("length", "alphabet", "seed", "batch_size")
        return Strings(
            count=self.strings, **{name: getattr(self, name) for name in names}
        )

    def target(self, choice: MethodChoice) -> MethodChoice | None:
        """The last part, whose prefill all candidates share; none where a row stands for several."""
        parts = [choice, *choice.parts.values()]
        several = any(part.cls.rows_per_prompt for part in parts)
        return (
            parts[-1]
            if issubclass(parts[-1].cls, self.serves) and not several
            else None
        )

    def fitted(self, window: int, spells: bool, layers: int) -> Mapping[str, Any]:
        """Shorter strings, with the paper's tenth and thirtieth of a thousand tokens as window and skip where
        those would take more than half of a string; token ids where letters cannot be spelt."""
        length = min(self.length, window)
        found: dict[str, Any] = {
            "length": length,
            "alphabet": self.alphabet if spells else "tokens",
        }
        short = length < self.length or self.window + self.skip + 7 > length
        if self.variant == "paper" and short and 2 * (self.window + self.skip) > length:
            found |= {"window": max(length // 10, 1), "skip": 3 * length // 100}
        return {
            name: value for name, value in found.items() if value != getattr(self, name)
        }

    def asks(
        self, prompts: int, answer: int, layers: int, channels: int
    ) -> StudyWorkload:
        """Calibration prompts, then the check of the winner; strings, and answers of every candidate."""
        tried = self.top_k if self.candidates == "monotone" else channels
        tried *= len(self.factors) * len(self.layer_ranges(layers, None))
        again = (
            min(self.asked_again, tried) if self.folds else 0
        )  # without a prefill that all share
        answers = prompts * (1 + tried + again) * answer
        return StudyWorkload(
            (3 + again) * prompts, answers, texts=self.strings, length=self.length
        )

    def check(self, run: Run) -> None:
        """Refuse strings and layers that do not fit the model, and several channels typed at once."""
        lm = run.lm
        low = self.window + self.skip + 7
        why = "search.window + search.skip + 7"
        if self.variant == "official":
            low = 301
            why = "variant=official skips 300 tokens"
        if not low <= self.length <= lm.context_window:
            allowed = f"from {low} ({why}) to {lm.context_window} (context window of {lm.name})"
            hint = f"set search.length={lm.context_window}, or shorten search.window"
            raise UserError("search.length", self.length, allowed, hint)
        typed = self._pinned(run).get("channel")
        if run.method.target and not isinstance(typed, int | None):
            hint = "leave the search out: stages=[intervene,evaluate,report]"
            raise UserError(
                f"{run.method.target.where}.channel",
                typed,
                "one channel, with the search stage",
                hint,
            )
        if isinstance(self.layers, tuple):
            check_layers(lm, "search.layers", self.layers)
        super().check(run)

    def depends(self, run: Run) -> Mapping[str, Any]:
        """The layer ranges that are tried, and a typed channel; what is asked again, and of which files."""
        values = (
            run.method.target.values if run.method.target and self.asked_again else {}
        )
        again = [
            values.get("last"),
            values.get("tokens"),
            [c.key for c in contents(self.files())],
        ]
        return {
            "layers": self.ranges(run),
            "channel": self._pinned(run).get("channel"),
            "again": again,
        }

    def _pinned(self, run: Run) -> dict[str, Any]:
        return run.method.target.pinned if run.method.target else {}

    def ranges(self, run: Run) -> list[tuple[int, int]]:
        """The layer ranges to try: a typed one, those of the search, or the model's published one."""
        typed = self._pinned(run).get("layers")
        published = run.model.blocks.get("scale_channel", {}).get("layers")
        return [tuple(typed)] if typed else self.layer_ranges(run.lm.layers, published)

    def layer_ranges(
        self, count: int, published: Sequence[int] | None
    ) -> list[tuple[int, int]]:
        """The layer ranges to try in a model of ``count`` layers."""
        if self.layers == "auto":
            step = self.layer_step or max(1, round(count / 8))
            edges = sorted({*range(0, count, step), count})
            return [(a, b - 1) for i, a in enumerate(edges) for b in edges[i + 1 :]]
        # The paper's own 32-layer models use 10-25; other depths take the same share of the model.
        first, last = self.layers or published or share((10, 25), count)
        return [(first, last)]

    def statistics(
        self, averages: Mapping[str, Array], monotone_only: bool = True
    ) -> ChannelStatistics:
        """The filter's statistics of averaged states; see :func:`posbench.search.statistics.paper`."""
        curves = averages[self.site]
        if self.variant == "official":
            return statistics.official(curves)
        settings: dict[str, Any] = {
            "window": self.window,
            "skip": self.skip,
            "monotone_only": monotone_only,
        }
        curves = curves[1:] if self.site == "residual" else curves
        return statistics.paper(curves, aggregate=self.over_layers, **settings)

    def ask(
        self,
        found: ChannelStatistics,
        ranges: Sequence[tuple[int, int]],
        channel: int | None = None,
    ) -> list[ScaleChannel]:
        """Every candidate, or every one of a channel; smoother channels first, which breaks ties. Raises
        `UserError` where no channel passes the filter."""
        every = (
            range(len(found.smoothness))
            if self.candidates == "all"
            else found.ranking[: self.top_k]
        )
        channels = every if channel is None else [channel]
        if not channels:
            allowed = "a model in which some channel is monotone in more than a quarter of the layers"
            hint = "try search=exhaustive, which traverses every channel"
            raise UserError("search.candidates", "monotone", allowed, hint)
        tried = [
            (c, factor, layers)
            for c in channels
            for layers in ranges
            for factor in self.factors
        ]
        return [
            ScaleChannel(channel=c, factor=factor, layers=layers)
            for c, factor, layers in tried
        ]

    def choose(self, losses: Sequence[float] | Array, unmodified: float) -> int | None:
        """Index of the chosen candidate; None where the official variant returns the unmodified model."""
        values = np.asarray(losses)
        if self.variant == "official":
            values = values.round(4)
            if round(unmodified, 4) <= values.min():
                return None
        return int(values.argmin())

    def search(self, run: Run) -> None:
        """Write ``search.csv`` (candidates, best first) and ``channels.csv`` (curves of the best channel)."""
        with ExitStack() as stack:
            method = run.method.trial()
            for part in (
                list(method.parts.values())[:-1] if isinstance(method, Composed) else ()
            ):
                stack.enter_context(part.applied(run.lm))
            averages = self.averages(run)
            found = self.statistics(averages)
            among = f"{self.candidates} candidates"
            if not found.ranking and (self.candidates, self.variant) == (
                "monotone",
                "paper",
            ):
                # Of some models no channel passes; what the paper calls "w/o monotonicity" (Table 6) is left.
                found = self.statistics(averages, monotone_only=False)
                among = "the smoothest, as none is monotone"
                why = "no channel is monotone in more than a quarter of the layers"
                run.console.print(
                    f"search: {why}; the smoothest are tried", soft_wrap=True
                )
            candidates = self.ask(
                found, self.ranges(run), self._pinned(run).get("channel")
            )
            each = self.losses(run, ROWS, candidates)
            unmodified = float(each[0].mean())
            losses = each[1:].mean(1)
            n = each.shape[1]
            best = self.choose(losses, unmodified)
            loss = float(losses.min())
            shipped = dict[str, Any]()
            if self.asked_again:
                again, best = self.again(run, candidates, each, best)
                write_csv(run.out.path / "deploy.csv", again)
                shipped = {
                    **({"last": "all"} if self.folds else {}),
                    "deploy": self.facts(again),
                }
                loss = shipped["deploy"]["loss"]
        order = np.argsort(losses, kind="stable")
        ranked = [candidates[i] for i in order]
        channels = [c.channels[0] for c in ranked]
        table: dict[str, Any] = {"rank": range(1, len(order) + 1), "channel": channels}
        table |= {"factor": [c.factor for c in ranked]}
        table |= {
            f"layer_{end}": [c.layers[i] for c in ranked]
            for end, i in (("first", 0), ("last", 1))
        }
        table |= {
            "loss": losses[order],
            "monotone_layers": found.monotone_layers[channels],
        }
        table |= {
            "smoothness": found.smoothness[channels],
            "selected": [int(i) == best for i in order],
        }
        write_csv(
            run.out.path / "search.csv",
            pd.DataFrame({**table, "loss_unmodified": unmodified, "n": n}),
        )
        winner = ranked[0] if best is None else candidates[best]
        write_csv(
            run.out.path / "channels.csv", self._curves(averages, winner.channels[0])
        )
        chosen = winner.channels[0], winner.factor, list(winner.layers)
        block = dict(
            zip(self.finds, [None] * 3 if best is None else chosen, strict=True)
        )
        block |= {
            "loss": round(loss, 6),
            "loss_unmodified": round(unmodified, 6),
            **shipped,
        }
        how = f"search ({among}, variant {self.variant}, {self.site}, {self.strings}"
        how += f" strings of {self.length} tokens, {n} calibration examples, seed {self.seed})"
        self.write_found(run, block, how)

    def averages(self, run: Run) -> dict[str, Array]:
        """Averaged states; the sums are kept in the run folder, so that a killed search goes on."""
        known = saved(run)
        sums = {
            site: total.to(run.lm.device)
            for site, total in known.get("sums", {}).items()
        }
        start = Sums(known.get("count", 0), sums)

        def keep(state: Sums) -> None:
            save(run, vars(state))

        with run.progress(
            "search: random strings", self.strings, start.count
        ) as advance:
            return average_states(
                run.lm, self.drawn, start=start, keep=keep, advance=advance
            )

    def losses(self, run: Run, file: str, candidates: Sequence[ScaleChannel]) -> Array:
        """Answer losses on calibration examples, [1 + C, N]; see :func:`candidate_losses`; resumed."""
        examples = run.examples("calibration")
        answers = {e.id: run.lm.answer_ids(e.prompt, e.answers[0]) for e in examples}
        plan = batches([len(answers[e.id][0]) for e in examples], self.batch_size)

        def compute(batch: Sequence[Example]) -> list[Row]:
            losses = candidate_losses(
                run.lm, [answers[e.id] for e in batch], candidates
            )
            return [
                {"unmodified": row[0], "losses": row[1:]} for row in losses.T.tolist()
            ]

        groups = [[examples[i] for i in group] for group in plan]
        label = f"search: {len(candidates)} candidates"
        rows = run.rows.complete(file, label, groups, lambda e: {"id": e.id}, compute)
        by_id = {row["id"]: [row["unmodified"], *row["losses"]] for row in rows}
        return np.array([by_id[e.id] for e in examples]).T

    def _curves(self, averages: Mapping[str, Array], channel: int) -> pd.DataFrame:
        """The channel's curve per site and layer, and the sliding mean that the paper's filter looks at."""
        parts = []
        start = self.window // 2
        for site, values in averages.items():
            curve = values[:, :, channel]
            smooth = np.full(curve.shape, np.nan)
            if self.variant == "paper":
                mean = statistics.sliding_mean(curve[:, :, None], self.window)[:, :, 0]
                # The first tokens are dropped before the fit.
                smooth[:, start + self.skip : start + mean.shape[1]] = mean[
                    :, self.skip :
                ]
            layer, token = (index.ravel() for index in np.indices(curve.shape))
            columns = {"channel": channel, "site": site, "layer": layer, "token": token}
            parts.append(
                pd.DataFrame(
                    {**columns, "value": curve.ravel(), "sliding_mean": smooth.ravel()}
                )
            )
        return pd.concat(parts, ignore_index=True)

    def found(self, block: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters, with what a format needs; factor 1 where the unmodified model won."""
        found = dict(self.finds) if block["channel"] is None else super().found(block)
        return found | ({"last": block["last"]} if "last" in block else {})

    def told(self, block: Mapping[str, Any]) -> str:
        """Channel, factor, layers and loss."""
        text = "the unmodified model"
        if block["channel"] is not None:
            text = f"channel {block['channel']} x {block['factor']}, layers {block['layers']}"
        text += (
            ", all tokens" if "last" in block and block["channel"] is not None else ""
        )
        worse = block["loss"] >= block["loss_unmodified"] and "deploy" not in block
        remark = (
            "; no candidate lowers the loss of the unmodified model" if worse else ""
        )
        return f"{text}: loss {block['loss']:.4f}, unmodified {block['loss_unmodified']:.4f}{remark}"

    def sections(self, read: Read) -> list[Section]:
        """The ten best candidates, and the channel along the strings."""
        out = self.shipped(read)
        table = read("search")
        channels = read("channels")
        if table is not None:
            alone = ", the last token alone scaled" if out else ""
            text = f"The ten best of {len(table)} candidates by loss on the calibration examples{alone}."
            if not table["selected"].any():
                text += " None was selected: the search kept the unmodified model."
            header = [
                "candidate",
                "loss",
                "unmodified",
                "n",
                "monotone layers",
                "smoothness",
                "selected",
            ]
            rows = []
            for _, row in table.sort_values("loss", kind="stable").head(10).iterrows():
                losses = [f"{row[name]:.4f}" for name in ("loss", "loss_unmodified")]
                counts = [str(row[name]) for name in ("n", "monotone_layers")]
                last = [f"{row['smoothness']:.3g}", "yes" if row["selected"] else ""]
                rows.append([candidate_label(row), *losses, *counts, *last])
            caption = "Loss of the best candidates."
            drawn = {"candidates": (candidate_losses_figure(table), caption)}
            out.append(Section("Search", text, header, rows, drawn))
        if channels is not None:
            shown = channels["channel"].unique()
            made = {c: channel_curves(channels, c, n=[self.strings]) for c in shown}
            drawn = {
                f"channel_{c}": (figure, f"Channel {c}. {CURVES}")
                for c, figure in made.items()
            }
            out.append(Section("Positional channel", figures=drawn))
        return out


CURVES = (
    "Mean over random strings at each token (thin) and its sliding mean (thick), which the search fits: a "
    "line that keeps rising or falling means that the channel encodes position. Attention input: after a "
    "layer's first norm. Residual: 0 is the embedding, the last one comes after the final norm. Each layer "
    "has an axis of its own; in brackets a first token that is off it."
)
