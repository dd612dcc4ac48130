"""Which channel, factor and layers to scale: the search of Yu et al. 2025, Algorithm 1.

Every run with the default config checks these settings; what only the search itself needs is imported there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import MinLen

from posbench.errors import UserError
from posbench.files.atomic import Row, write_csv
from posbench.files.digests import read_contents
from posbench.late import pd
from posbench.measure.replies import encode_with_answer
from posbench.methods.choice import MethodChoice
from posbench.methods.composed import Composed
from posbench.methods.scale_channel import ScaleChannel, check_layers, scale_layer_range
from posbench.model.families import Site
from posbench.model.lm import length_batches
from posbench.run.base import Run
from posbench.run.cost import StudyWorkload
from posbench.schema import Alphabet, Count, Seed, Whole
from posbench.search import held_back
from posbench.search.base import SEARCH_ROWS_FILE, Read, load_state, save_state
from posbench.search.deploy import DeploySearch
from posbench.tasks import Example

if TYPE_CHECKING:
    from posbench.measure.states import Strings, Sums
    from posbench.plots.section import Section
    from posbench.search.statistics import Array, ChannelStatistics

CURVES_CAPTION = (
    "Mean over random strings at each token (thin) and its sliding mean (thick), which the search fits: a "
    "line that keeps rising or falling means that the channel encodes position. Attention input: after a "
    "layer's first norm. Residual: 0 is the embedding, the last one comes after the final norm. Each layer "
    "has an axis of its own; in brackets a first token that is off it."
)


@dataclass(frozen=True, kw_only=True)
class ChannelSearch(DeploySearch):
    """The channel search; see :class:`posbench.search.deploy.DeploySearch` for the shipped setting.

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
        scaled: Whether smoothness is computed on curves scaled to 0..1 (as the released program) or on raw ones (the
            text); None: by the variant, see :attr:`scales_curves`.
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
    smallest: ClassVar[Mapping[str, int]] = {"strings": 32, "length": 200, "top_k": 3}

    candidates: Literal["monotone", "all"] = "monotone"
    variant: Literal["paper", "official"] = "paper"
    site: Site = "attention_input"
    strings: Count = 2000
    length: Count = 1000
    alphabet: Alphabet = "characters"
    window: Count = 100
    skip: Whole = 30
    scaled: bool | None = None
    over_layers: Literal["sum", "mean"] = "sum"
    factors: Annotated[tuple[float, ...], MinLen(1)] = (0.5, 0.0, -0.5, -1.0)
    layers: Literal["auto"] | tuple[int, int] | None = None
    layer_step: Count | None = None
    batch_size: Count = 8
    seed: Seed = 0

    @property
    def drawn(self) -> Strings:
        """The random strings over whose tokens hidden states are averaged."""
        from posbench.measure.states import Strings

        return Strings(
            count=self.strings,
            length=self.length,
            alphabet=self.alphabet,
            seed=self.seed,
            batch_size=self.batch_size,
        )

    @property
    def scales_curves(self) -> bool:
        """Whether each curve is scaled to 0..1 before its smoothness is measured."""
        if self.scaled is None:
            return self.variant == "official"
        return self.scaled

    def target(self, choice: MethodChoice) -> MethodChoice | None:
        """The last part, whose prefill all candidates share; None where a prompt runs as several rows."""
        parts = [choice, *choice.parts.values()]
        if any(part.cls.rows_per_prompt for part in parts):
            return None
        return parts[-1] if issubclass(parts[-1].cls, self.serves) else None

    def fields_for_model(
        self, window: int, spells: bool, layers: int
    ) -> Mapping[str, Any]:
        """Return the settings that a model needs: strings that fit its window, token ids where it cannot spell letters.

        Where the sliding mean and the skipped tokens would take more than half of a string, they are scaled
        down with it, from the paper's 100 and 30 of 1000 tokens.

        Args:
            window: Tokens that the model reads.
            spells: Whether its tokenizer has letters and digits.
            layers: Number of layers.

        Returns:
            New values by field, of those that change.
        """
        length = min(self.length, window)
        values: dict[str, Any] = {"length": length}
        if not spells:
            values["alphabet"] = "tokens"
        too_short = length < self.length or length < self._min_length
        dominated = 2 * (self.window + self.skip) > length
        if self.variant == "paper" and too_short and dominated:
            values["window"] = max(length // 10, 1)
            values["skip"] = 3 * length // 100
        return {
            name: value
            for name, value in values.items()
            if value != getattr(self, name)
        }

    @property
    def _min_length(self) -> int:
        """Tokens per string that the paper's filter needs."""
        return self.window + self.skip + 7

    def workload(
        self, prompts: int, answer: int, layers: int, channels: int
    ) -> StudyWorkload:
        """Return the work of the search: losses of all candidates, the check of the winner, and random strings.

        Args:
            prompts: Number of calibration prompts.
            answer: Tokens of an answer.
            layers: Number of layers.
            channels: Number of channels.
        """
        num_channels = self.top_k if self.candidates == "monotone" else channels
        num_ranges = len(self.layer_ranges(layers, None))
        num_candidates = num_channels * len(self.factors) * num_ranges
        # As folded, each candidate reads the prompts itself.
        num_folded = min(self.num_rescored, num_candidates) if self.folds else 0
        return StudyWorkload(
            prompts=(3 + num_folded) * prompts,
            answers=(1 + num_candidates + num_folded) * prompts * answer,
            texts=self.strings,
            length=self.length,
        )

    def check(self, run: Run) -> None:
        """Refuse strings and layers that do not fit the model, and several channels typed at once.

        Raises:
            UserError: Names the field.
        """
        if self.variant == "official" and not self.scales_curves:
            allowed = "true or null with variant=official, which always scales curves"
            hint = "leave out search.scaled, or set search.variant=paper"
            raise UserError("search.scaled", self.scaled, allowed, hint)
        lm = run.lm
        # The filter averages over a window, drops the first means, and needs some more to fit a line.
        minimum = self._min_length
        reason = "search.window + search.skip + 7"
        if self.variant == "official":
            from posbench.search import statistics

            minimum = statistics.OFFICIAL_SKIP + 1
            reason = "variant=official skips 300 tokens"
        if not minimum <= self.length <= lm.context_window:
            allowed = f"from {minimum} ({reason}) to {lm.context_window} (context window of {lm.name})"
            hint = f"set search.length={lm.context_window}"
            if self.variant != "official":
                hint += ", or shorten search.window"
            if minimum > lm.context_window and self.variant != "official":
                allowed = f"{minimum} or more ({reason}), which the window of {lm.name} does not hold"
                hint = "lower search.skip or search.window"
            raise UserError("search.length", self.length, allowed, hint)
        # The search fills one channel: of several typed at once it can fill none.
        channel = self._pinned(run).get("channel")
        if run.method.target and not isinstance(channel, int | None):
            field = f"{run.method.target.where}.channel"
            allowed = "one channel with the stage search"
            hint = "leave out the search: stages=[intervene,evaluate,report]"
            raise UserError(field, channel, allowed, hint)
        if isinstance(self.layers, tuple):
            check_layers(lm, "search.layers", self.layers)
        super().check(run)

    def identity_facts(self, run: Run) -> Mapping[str, Any]:
        """Return what the result depends on beside the config: layer ranges, a typed channel, settings of rescoring."""
        values = (
            run.method.target.values if run.method.target and self.num_rescored else {}
        )
        files = [content.key for content in read_contents(self.files())]
        return {
            "layers": self.ranges(run),
            "channel": self._pinned(run).get("channel"),
            "again": [values.get("last"), values.get("tokens"), files],
        }

    def _pinned(self, run: Run) -> dict[str, Any]:
        """Parameters of scale_channel that the user typed."""
        return run.method.target.pinned if run.method.target else {}

    def _scaled_tokens(self, run: Run) -> dict[str, Any]:
        """The fields of scale_channel that say which tokens it scales, as the run applies it."""
        values = run.method.target.values if run.method.target else {}
        if self.folds:
            # The first pass scales the last token alone; folded settings are scored again.
            values = {**values, "last": 1}
        return {name: values[name] for name in ("last", "tokens") if name in values}

    def ranges(self, run: Run) -> list[tuple[int, int]]:
        """The layer ranges to try: the typed one, the search's, or the model's published one."""
        typed = self._pinned(run).get("layers")
        if typed:
            return [tuple(typed)]
        published = run.model.blocks.get("scale_channel", {}).get("layers")
        return self.layer_ranges(run.lm.layers, published)

    def layer_ranges(
        self, count: int, published: Sequence[int] | None
    ) -> list[tuple[int, int]]:
        """Return the layer ranges (first, last) to try.

        Args:
            count: Number of layers of the model.
            published: A paper's range for this model; None: there is none.
        """
        if self.layers == "auto":
            # All ranges that begin and end at multiples of a step, about an eighth of the layers.
            step = self.layer_step or max(1, round(count / 8))
            starts = list(range(0, count, step))
            ends = [*starts[1:], count]
            return [
                (start, end - 1) for i, start in enumerate(starts) for end in ends[i:]
            ]
        # The paper's own 32-layer models use 10-25; other depths take the same share of the model.
        first, last = self.layers or published or scale_layer_range((10, 25), count)
        return [(first, last)]

    def statistics(
        self, averages: Mapping[str, Array], monotone_only: bool = True
    ) -> ChannelStatistics:
        """Return how monotone and smooth each channel is over token positions, and the ranking that follows.

        Args:
            averages: States averaged over random strings, by site, shape (layers, tokens, channels) each.
            monotone_only: Rank only channels that rise or fall in enough layers.
        """
        from posbench.search import statistics

        curves = averages[self.site]
        if self.variant == "official":
            return statistics.official_filter(curves)
        if self.site == "residual":
            curves = curves[1:]  # without the embedding
        return statistics.paper_filter(
            curves,
            window=self.window,
            skip=self.skip,
            aggregate=self.over_layers,
            scaled=self.scales_curves,
            monotone_only=monotone_only,
        )

    def list_candidates(
        self,
        measured: ChannelStatistics,
        ranges: Sequence[tuple[int, int]],
        channel: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> list[ScaleChannel]:
        """Return the candidates (channel, layers, factor), smoother channels first: of equal losses the first one wins.

        Args:
            measured: Statistics of the channels.
            ranges: Layer ranges to try.
            channel: The only channel to try; None: every one that the filter leaves.
            settings: Further fields of all candidates.

        Raises:
            UserError: No channel passes the filter.
        """
        channels: Sequence[int] = measured.ranking[: self.top_k]
        if self.candidates == "all":
            channels = range(len(measured.smoothness))
        if channel is not None:
            channels = [channel]
        if not channels:
            allowed = "a model in which some channel is monotone in more than a quarter of the layers"
            hint = "try search=exhaustive, which traverses every channel"
            raise UserError("search.candidates", "monotone", allowed, hint)
        return [
            ScaleChannel(
                channel=channel, factor=factor, layers=layers, **(settings or {})
            )
            for channel in channels
            for layers in ranges
            for factor in self.factors
        ]

    def choose(self, losses: Sequence[float] | Array, unmodified: float) -> int | None:
        """Return the index of the candidate with the lowest loss.

        None where the official variant keeps the unmodified model, as no candidate has a lower loss.

        Args:
            losses: Mean loss of each candidate.
            unmodified: Mean loss of the unmodified model.
        """
        values = np.asarray(losses)
        if self.variant == "official":
            # The released program compares losses of four decimals.
            values = values.round(4)
            if round(unmodified, 4) <= values.min():
                return None
        return int(values.argmin())

    def search(self, run: Run) -> None:
        """Search channel, factor and layers, and write the results.

        Writes ``search.csv`` (candidates, best first), ``channels.csv`` (curves of the best channel), ``found.yaml``,
        and ``deploy.csv`` where candidates are scored again as they would be shipped.
        """
        method = run.method.trial()
        outer_methods = []
        if isinstance(method, Composed):
            # The search runs inside the other methods of a list: it is for the last one.
            outer_methods = list(method.parts.values())[:-1]
        with ExitStack() as stack:
            for outer in outer_methods:
                stack.enter_context(outer.applied(run.lm))
            averages = self.averages(run)
            measured, pool = self._filter(run, averages)
            pinned_channel = self._pinned(run).get("channel")
            candidates = self.list_candidates(
                measured, self.ranges(run), pinned_channel, self._scaled_tokens(run)
            )
            all_losses = self.losses(run, SEARCH_ROWS_FILE, candidates)
            # The first row is the unmodified model's.
            unmodified = float(all_losses[0].mean())
            losses = all_losses[1:].mean(1)
            best = self.choose(losses, unmodified)
            loss = unmodified if best is None else float(losses[best])
            shipped: dict[str, Any] = {}
            if self.num_rescored:
                deploy_table, best = self.rescore(run, candidates, all_losses, best)
                write_csv(run.out.path / "deploy.csv", deploy_table)
                if self.folds:
                    shipped["last"] = "all"
                shipped["deploy"] = self.facts(deploy_table)
                loss = shipped["deploy"]["loss"]

        num_examples = all_losses.shape[1]
        # The table of all candidates, best first.
        order = np.argsort(losses, kind="stable")
        ranked = [candidates[i] for i in order]
        channels = [c.channels[0] for c in ranked]
        table = pd.DataFrame({"rank": range(1, len(ranked) + 1)})
        table["channel"] = channels
        table["factor"] = [c.factor for c in ranked]
        table["layer_first"] = [c.layers[0] for c in ranked]
        table["layer_last"] = [c.layers[1] for c in ranked]
        table["loss"] = losses[order]
        table["monotone_layers"] = measured.monotone_layers[channels]
        table["smoothness"] = measured.smoothness[channels]
        table["selected"] = [int(i) == best for i in order]
        table["loss_unmodified"] = unmodified
        table["n"] = num_examples
        write_csv(run.out.path / "search.csv", table)
        shown_channel = channels[0]
        # The result; without a winner all parameters stay null.
        block: dict[str, Any] = dict.fromkeys(self.finds)
        if best is not None:
            winner = candidates[best]
            shown_channel = winner.channels[0]
            block["channel"] = shown_channel
            block["factor"] = winner.factor
            block["layers"] = list(winner.layers)
        curves = self._curves(averages, shown_channel)
        write_csv(run.out.path / "channels.csv", curves)
        block["loss"] = round(loss, 6)
        block["loss_unmodified"] = round(unmodified, 6)
        block |= shipped
        strings = f"{self.strings} strings of {self.length} tokens"
        curves_text = "scaled curves" if self.scales_curves else "raw curves"
        description = f"search ({pool}, variant {self.variant}, {curves_text}, {self.site}, {strings}"
        description += f", {num_examples} calibration examples, seed {self.seed})"
        self.write_found(run, block, description)

    def _filter(
        self, run: Run, averages: Mapping[str, Array]
    ) -> tuple[ChannelStatistics, str]:
        """Return statistics of the channels, and a description of which of them are candidates.

        Args:
            run: The run; told if no channel passes the filter.
            averages: As of :meth:`statistics`.
        """
        measured = self.statistics(averages)
        filtered = self.candidates == "monotone" and self.variant == "paper"
        if measured.ranking or not filtered:
            return measured, f"{self.candidates} candidates"
        # In some models no channel passes; then the paper's "w/o monotonicity" (Table 6) applies.
        reason = "no channel is monotone in more than a quarter of the layers"
        run.console.print(f"search: {reason}; the smoothest are tried")
        measured = self.statistics(averages, monotone_only=False)
        return measured, "the smoothest, as none is monotone"

    def averages(self, run: Run) -> dict[str, Array]:
        """Return hidden states averaged over random strings, by site, shape (layers, tokens, channels) each.

        A killed run resumes from its sums.
        """
        from posbench.measure.states import Sums, average_states

        state = load_state(run)
        sums = {
            site: total.to(run.lm.device)
            for site, total in state.get("sums", {}).items()
        }
        start = Sums(state.get("count", 0), sums)

        def keep(state: Sums) -> None:
            save_state(run, vars(state))

        label = "search: random strings"
        with run.progress(label, self.strings, start.count) as advance:
            return average_states(
                run.lm, self.drawn, start=start, keep=keep, advance=advance
            )

    def losses(self, run: Run, file: str, candidates: Sequence[ScaleChannel]) -> Array:
        """Return answer losses on N calibration examples; rows that ``file`` has are not computed again.

        Args:
            run: The run.
            file: Name of a JSON-lines file in the run folder.
            candidates: C candidates.

        Returns:
            Nats per answer token, shape (1 + C, N): the unmodified model, then the candidates.
        """
        from posbench.measure.losses import candidate_losses

        examples = self.calibration(run)
        pairs = {e.id: encode_with_answer(run.lm, e) for e in examples}
        lengths = [len(pairs[e.id][0]) for e in examples]
        groups = length_batches(lengths, self.batch_size, boundary=run.lm.rope_boundary)

        def compute(batch: Sequence[Example]) -> list[Row]:
            batch_pairs = [pairs[e.id] for e in batch]
            losses = candidate_losses(run.lm, batch_pairs, candidates)
            return [
                {"unmodified": row[0], "losses": row[1:]} for row in losses.T.tolist()
            ]

        rows = run.rows.complete(
            file,
            f"search: {len(candidates)} candidates",
            [[examples[i] for i in group] for group in groups],
            lambda example: {"id": example.id},
            compute,
        )
        by_id = {row["id"]: [row["unmodified"], *row["losses"]] for row in rows}
        return np.array([by_id[e.id] for e in examples]).T

    def _curves(self, averages: Mapping[str, Array], channel: int) -> pd.DataFrame:
        """Return a channel's averaged values per site, layer and token, and the sliding mean that the filter fits.

        A site is where hidden states are read: the residual stream, or the input of attention.

        Args:
            averages: Averaged states by site, shape (layers, tokens, channels) each.
            channel: The channel.
        """
        from posbench.search import statistics

        frames = []
        for site, values in averages.items():
            curve = values[:, :, channel]
            smooth = np.full(curve.shape, np.nan)
            if self.variant == "paper":
                mean = statistics.sliding_mean(curve[:, :, None], self.window)[:, :, 0]
                # A mean belongs to the middle of its window; the first tokens are dropped before the fit.
                center = self.window // 2
                end = center + mean.shape[1]
                smooth[:, center + self.skip : end] = mean[:, self.skip :]
            layer, token = np.indices(curve.shape)
            columns = {
                "channel": channel,
                "site": site,
                "layer": layer.ravel(),
                "token": token.ravel(),
                "value": curve.ravel(),
                "sliding_mean": smooth.ravel(),
            }
            frames.append(pd.DataFrame(columns))
        return pd.concat(frames, ignore_index=True)

    def parameters(self, block: Mapping[str, Any]) -> dict[str, Any]:
        """Return the method's parameters from its block of ``found.yaml``; factor 1 if the unmodified model won."""
        parameters = dict(self.finds)
        if block["channel"] is not None:
            parameters = super().parameters(block)
        # A format that folds needs all tokens scaled.
        if "last" in block:
            parameters["last"] = block["last"]
        return parameters

    def describe(self, block: Mapping[str, Any]) -> str:
        """Describe the result in one line: channel, factor, layers and loss.

        Args:
            block: The method's block of ``found.yaml``.
        """
        text = "the unmodified model"
        if block["channel"] is not None:
            text = f"channel {block['channel']} x {block['factor']}, layers {block['layers']}"
            if "last" in block:
                text += ", all tokens"
        before = held_back.baseline(block.get("held_back", {}))
        text += f": loss {block['loss']:.4f}, {before} {block['loss_unmodified']:.4f}"
        if "deploy" not in block and block["loss"] >= block["loss_unmodified"]:
            text += "; no candidate lowers that loss"
        return text

    def sections(self, read: Read) -> list[Section]:
        """Return the report's sections on the search.

        They show the candidate chosen for deployment, the ten best by loss, and the channel's values over tokens.

        Args:
            read: Returns a table of the run by name, None if there is none.
        """
        from posbench.plots.search import channel_figure
        from posbench.plots.section import Section

        sections = self.shipped_sections(read)
        table = read("search")
        channels = read("channels")
        if table is not None:
            sections.append(_candidate_section(table, bool(sections)))
        if channels is not None:
            figures = {}
            for channel in channels["channel"].unique():
                figure = channel_figure(channels, channel, n=[self.strings])
                figures[f"channel_{channel}"] = (
                    figure,
                    f"Channel {channel}. {CURVES_CAPTION}",
                )
            sections.append(Section("Positional channel", figures=figures))
        return sections


def _candidate_section(table: pd.DataFrame, rescored: bool) -> Section:
    """Return the report's section with the ten best candidates.

    Args:
        table: ``search.csv``.
        rescored: Whether some were scored again as they would be shipped.
    """
    from posbench.plots.search import candidate_label, candidate_losses_figure
    from posbench.plots.section import Section

    mode = ", the last token alone scaled" if rescored else ""
    text = f"The ten best of {len(table)} candidates by loss on the calibration examples{mode}."
    if not table["selected"].any():
        text += " None was selected: the search kept the unmodified model."
    header = ["candidate", "loss", "unmodified", "n"]
    header += ["monotone layers", "smoothness", "selected"]
    rows = []
    for _, row in table.sort_values("loss", kind="stable").head(10).iterrows():
        cells = [
            candidate_label(row),
            f"{row['loss']:.4f}",
            f"{row['loss_unmodified']:.4f}",
            str(row["n"]),
            str(row["monotone_layers"]),
            f"{row['smoothness']:.3g}",
            "yes" if row["selected"] else "",
        ]
        rows.append(cells)
    figure = candidate_losses_figure(table)
    figures = {"candidates": (figure, "Loss of the best candidates.")}
    return Section("Search", text, header, rows, figures)
