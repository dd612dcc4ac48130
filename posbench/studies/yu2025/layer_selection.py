"""Which layers to scale: every range on calibration prompts, the best one beside the published one and beside
retrieval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.methods import Method, ScaleChannel, Unmodified
from posbench.model.lm import LM, batches
from posbench.pipeline.config import Config
from posbench.pipeline.stages.intervene import attention_to_items
from posbench.plots.base import COLOURS, PAGE, UNMODIFIED, new_figure, styled
from posbench.run.base import Run, complete, encode
from posbench.search import Candidate, ChannelSearch
from posbench.search import channel_run as channel_search
from posbench.stats.tables import mean_interval
from posbench.studies import paired
from posbench.studies.base import Finding, Study, Verdict
from posbench.tasks import Example

Array = NDArray[np.float64]
LOSSES, ATTENTION, ROWS = "range_losses.jsonl", "range_attention.jsonl", "range_predictions.jsonl"
CHOSEN, CONTROL = "channel of the method", "control: random channel"
BEST, PUBLISHED, EVERY = "best range", "published range", "all layers"


@dataclass(frozen=True, kw_only=True)
class LayerSelection(Study):
    """Layer ranges of scale_channel: loss of each, the best against the published, and retrieval layer by
    layer.

    Source: beyond Yu et al. 2025, who choose layers "based on engineering experience" (Section 3.3,
    Limitations) as those "more likely to be retrieval-related". Channel and factor are the method's own, and
    stay fixed.

    Attributes:
        step: Ranges start and end on multiples of this; None gives about eight steps, as
            ``search.layers=auto`` does.
        control: Whether the ranges of a channel drawn at random are tried, too.
        seed: Seed of that draw.
    """

    uses_method: ClassVar[bool] = True
    uses_search: ClassVar[bool] = True

    step: int | None = None
    control: bool = True
    seed: int = 0

    def check(self, config: Config, lm: LM | None) -> None:
        """Refuse another method than scale_channel with one channel, another search, and a task without gold
        positions.

        Raises:
            UserError: See above.
        """
        method = config.method()
        if not isinstance(method, ScaleChannel) or len(method.channels) > 1:
            allowed = "scale_channel with one channel: the study chooses its layers"
            raise UserError("method", config.method_name, allowed, "set method=scale_channel")
        if not isinstance(config.search, ChannelSearch):
            allowed = "channel: its batch size and steps are used"
            raise UserError("search", type(config.search).__name__, allowed, "leave search= out")
        if config.task.items is None:
            allowed = "a task with gold positions: kv_retrieval, nq_multidoc"
            raise UserError("task", config.task.name, allowed, "set task=kv_retrieval")
        if self.step is not None and self.step < 1:
            raise UserError(
                "study.step", self.step, "a whole number from 1 up, or null", "set study.step=null"
            )

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``ranges``, ``edges`` (what the first and last layers do), ``layers`` and ``evaluation``."""
        method, search, lm = run.config.method(), run.config.search, run.lm
        assert isinstance(method, ScaleChannel) and isinstance(search, ChannelSearch)
        resamples = run.config.runtime.resamples
        grid = replace(search, layers="auto", layer_step=self.step).layer_ranges(lm.layers, None)
        published = (method.layers[0], method.layers[1])
        tried = list(dict.fromkeys([*grid, published]))
        channels = {CHOSEN: method.channels[0]}
        if self.control:
            others = [
                c for c in range(lm.model.config.get_text_config().hidden_size) if c != method.channels[0]
            ]
            channels[CONTROL] = int(np.random.default_rng(self.seed).choice(others))
        candidates = [Candidate(channel, method.factor, r) for channel in channels.values() for r in tried]
        each = channel_search.calibration_losses(run, LOSSES, candidates)
        changes = dict(zip(candidates, each[1:] - each[0], strict=True))
        names = [e.cluster or e.id for e in run.examples("calibration")]
        ranges = pd.DataFrame(
            [
                {
                    "kind": kind,
                    **_placed(c),
                    "loss": float((changes[c] + each[0]).mean()),
                    **_mean(changes[c], names, resamples),
                }
                for kind, channel in channels.items()
                for c in candidates
                if c.channel == channel
            ]
        ).assign(loss_unmodified=float(each[0].mean()))
        best = {
            kind: min((c for c in changes if c.channel == channel), key=lambda c: changes[c].mean())
            for kind, channel in channels.items()
        }
        settings = {
            BEST: replace(method, layers=best[CHOSEN].layers),
            PUBLISHED: method,
            EVERY: replace(method, layers=(0, lm.layers - 1)),
        }
        if self.control:
            settings[CONTROL] = replace(method, channel=channels[CONTROL], layers=best[CONTROL].layers)
        return {
            "ranges": ranges,
            "edges": edges(changes, channels[CHOSEN], lm.layers, names, resamples),
            "layers": self.layers(run, changes, channels[CHOSEN], best[CHOSEN].layers, published, resamples),
            "evaluation": _evaluation(run, settings, resamples),
        }

    def layers(
        self,
        run: Run,
        changes: Mapping[Candidate, Array],
        channel: int,
        best: tuple[int, int],
        published: tuple[int, int],
        resamples: int,
    ) -> pd.DataFrame:
        """Rows of layer: retrieval score with interval and n, benefit, and whether the ranges hold it; the
        last row compares.

        The retrieval score is the share of prompts in which the unmodified model gives the gold item the most
        attention of all items, minus that of a guess; the benefit is the mean loss of the ranges without a
        layer minus that of those with it.
        """
        hits, clusters, count = retrieval(run)
        chance = 1 / count
        rows = []
        for layer in range(hits.shape[1]):
            ranges = [
                (c.layers[0] <= layer <= c.layers[1], float(v.mean()))
                for c, v in changes.items()
                if c.channel == channel
            ]
            without, within = ([v for inside, v in ranges if inside == wanted] for wanted in (False, True))
            rows.append(
                {
                    "layer": str(layer),
                    **_mean(hits[:, layer] - chance, clusters, resamples),
                    "n": len(hits),
                    "benefit": float(np.mean(without) - np.mean(within)) if without and within else np.nan,
                    "best": best[0] <= layer <= best[1],
                    "published": published[0] <= layer <= published[1],
                }
            )
        for name, (first, last) in (("best", best), ("published", published)):
            inside = np.isin(np.arange(hits.shape[1]), np.arange(first, last + 1))
            none = {"change": np.nan, "low": np.nan, "high": np.nan}
            shared = hits[:, inside].mean(1) - hits[:, ~inside].mean(1) if not inside.all() else None
            compared = none if shared is None else _mean(shared, clusters, resamples)
            flags = {"best": name == "best", "published": name == "published"}
            rows.append(
                {
                    "layer": f"inside minus outside the {name} range",
                    **compared,
                    "n": len(hits),
                    "benefit": np.nan,
                    **flags,
                }
            )
        return pd.DataFrame(rows).rename(columns={"change": "retrieval"})

    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """Loss over ranges, and retrieval and benefit layer by layer."""
        caption = (
            "Left: calibration loss of each range of layers minus that of the unmodified model; star: the lowest, square: the "
            "published range. Right: retrieval score of each layer (share of prompts whose gold item gets the most attention, "
            "minus chance), and what the loss gains where a range holds the layer."
        )
        return {"layers": (layer_figure(tables["ranges"], tables["layers"]), caption)}

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """Whether the search for a range pays, whether its layers retrieve, and what the first and last
        layers do."""
        rows, layers = tables["evaluation"].set_index("setting"), tables["layers"].set_index("layer")
        best, n = rows.loc[BEST], int(rows["n"].iloc[0])
        found = [
            _finding(
                "Searching the layers improves on the published range",
                "best minus published range, points of the score",
                100 * best[["difference", "difference_low", "difference_high"]].to_numpy(dtype=float),
                n,
                f"layers {best['layers']} against {rows.loc[PUBLISHED, 'layers']}",
            )
        ]
        claims = {
            "best": "The range with the lowest loss is that of the retrieval-related layers",
            "published": "The layers to scale are more likely to be retrieval-related (Yu et al. 2025, Section 3.3)",
        }
        for name, claim in claims.items():
            row = layers.loc[f"inside minus outside the {name} range"]
            values = row[["retrieval", "low", "high"]].to_numpy(dtype=float)
            statistic = f"retrieval score of the layers inside minus outside the {name} range"
            found.append(
                _finding(
                    claim, statistic, values, int(row["n"]), "" if values[0] == values[0] else "all layers"
                )
            )
        for _, row in tables["edges"].iterrows():
            claim = f"Scaling the {row['edge']} layers, too, does harm (Yu et al. 2025, Section 3.3)"
            statistic = (
                f"calibration loss of ranges with the {row['edge']} layers minus that without, nats per token"
            )
            found.append(
                _finding(
                    claim, statistic, row[["change", "low", "high"]].to_numpy(dtype=float), int(row["n"]), ""
                )
            )
        if CONTROL in rows.index:
            row = rows.loc[CONTROL]
            values = 100 * row[["difference", "difference_low", "difference_high"]].to_numpy(dtype=float)
            claim = "Control: a random channel with the best of its ranges stays below the published setting"
            found.append(
                _finding(
                    claim, "published range minus control, points of the score", -values[[0, 2, 1]], n, ""
                )
            )
        return found


def _placed(candidate: Candidate) -> dict[str, int]:
    return {"channel": candidate.channel, "first": candidate.layers[0], "last": candidate.layers[1]}


def _mean(values: Array, clusters: Sequence[str], resamples: int) -> dict[str, float]:
    low, high = mean_interval(values, clusters, resamples=resamples, seed=0)
    return {"change": float(values.mean()), "low": low, "high": high}


def _finding(claim: str, statistic: str, values: Array, n: int, note: str) -> Finding:
    """A claim that a number is above zero."""
    value, low, high = map(float, values)
    verdict: Verdict = "not testable here" if value != value else "holds" if low > 0 else "does not hold"
    return Finding(
        claim=claim, statistic=statistic, value=value, low=low, high=high, n=n, verdict=verdict, note=note
    )


def edges(
    changes: Mapping[Candidate, Array], channel: int, layers: int, clusters: Sequence[str], resamples: int
) -> pd.DataFrame:
    """What the first and the last layers add to the loss: ranges that hold them against those that start or
    end a step inside.

    Returns:
        Rows of edge (first, last), change (nats per answer token, mean over ranges) with interval, n
        (calibration prompts).
    """
    found = {c.layers: values for c, values in changes.items() if c.channel == channel}
    starts, ends = sorted({first for first, _ in found}), sorted({last for _, last in found})
    rows = []
    for edge in ("first", "last"):
        pairs = [
            (values, found.get((starts[1], last) if edge == "first" else (first, ends[-2])))
            for (first, last), values in found.items()
            if (first == 0 if edge == "first" else last == layers - 1) and len(starts) > 1 < len(ends)
        ]
        both = [outer - inner for outer, inner in pairs if inner is not None]
        if both:
            rows.append(
                {"edge": edge, **_mean(np.mean(both, axis=0), clusters, resamples), "n": len(clusters)}
            )
    return pd.DataFrame(rows, columns=["edge", "change", "low", "high", "n"])


def retrieval(run: Run) -> tuple[Array, list[str], int]:
    """Whether each layer of the unmodified model gives the gold item the most attention of all items.

    Returns:
        1 or 0, [prompts, L], for the first ``runtime.intervene_examples`` prompts of each gold position;
        their clusters; items.
    """
    placed = [e for e in run.evaluation if e.gold_position is not None and e.items]
    seen: dict[int | None, int] = {}
    examples = []
    for e in placed:
        seen[e.gold_position] = seen.get(e.gold_position, 0) + 1
        if seen[e.gold_position] <= run.config.runtime.intervene_examples:
            examples.append(e)
    encoded = {e.id: encode(run.lm, run.config.task, e) for e in examples}
    runtime = run.config.runtime
    plan = batches([len(encoded[e.id].ids) for e in examples], runtime.batch_size, runtime.batch_tokens)

    def compute(batch: Sequence[Example]) -> list[Row]:
        most = attention_to_items(run.lm, [encoded[e.id] for e in batch], batch).argmax(-1).tolist()
        return [{"most": layers} for layers in most]

    rows = complete(
        run,
        ATTENTION,
        "attention",
        [[examples[i] for i in group] for group in plan],
        lambda e: {"id": e.id},
        compute,
    )
    most = {row["id"]: row["most"] for row in rows}
    hits = np.array([[float(item == e.gold_position) for item in most[e.id]] for e in examples])
    return hits, [e.cluster or e.id for e in examples], len(examples[0].items)


def _evaluation(run: Run, settings: Mapping[str, ScaleChannel], resamples: int) -> pd.DataFrame:
    """Rows of setting, channel, layers, score, gain over the unmodified model and difference from the
    published range."""

    def text(method: ScaleChannel) -> str:
        return f"ch {method.channels[0]} x {method.factor:g}, layers {method.layers[0]}-{method.layers[1]}"

    methods: dict[str, Method] = {UNMODIFIED: Unmodified(), **{text(m): m for m in settings.values()}}
    scores = paired.scores(run, ROWS, methods)
    rows: list[dict[str, Any]] = [{"setting": UNMODIFIED, "channel": "", "layers": "", "name": UNMODIFIED}]
    for name, method in settings.items():
        layers = f"{method.layers[0]}-{method.layers[1]}"
        rows.append(
            {"setting": name, "channel": str(method.channels[0]), "layers": layers, "name": text(method)}
        )
    for row in rows:
        name = row.pop("name")
        row |= paired.accuracy(scores, name, resamples)
        for kind, base in (("gain", UNMODIFIED), ("difference", text(settings[PUBLISHED]))):
            change = paired.difference(scores, name, base, resamples)
            row |= {kind: change["value"], f"{kind}_low": change["low"], f"{kind}_high": change["high"]}
    return pd.DataFrame(rows)


@styled
def layer_figure(ranges: pd.DataFrame, layers: pd.DataFrame) -> Figure:
    """Loss over ranges, a map per channel on one scale (left); retrieval and benefit layer by layer
    (right)."""
    kinds = list(ranges["kind"].unique())
    figure = new_figure(PAGE, 2.6)
    *maps, right = figure.subplots(1, len(kinds) + 1)
    top = float(ranges["change"].abs().max()) or 1.0
    published = layers[
        layers["layer"].str.isdigit() & layers["published"].astype(str).str.lower().eq("true")
    ]["layer"].astype(int)
    image: Any = None
    for axes, kind in zip(maps, kinds, strict=True):
        image = _loss_map(axes, ranges[ranges["kind"] == kind], top, (published.min(), published.max()))
        channel = ranges.loc[ranges["kind"] == kind, "channel"].iloc[0]
        axes.set_title(f"channel {channel}" + (" (random)" if kind == CONTROL else ""))
    figure.colorbar(image, ax=maps, label="loss minus unmodified\n(nats per answer token)")
    rows = layers[layers["layer"].str.isdigit()]
    x = rows["layer"].astype(int).to_numpy()
    error = np.stack([rows["retrieval"] - rows["low"], rows["high"] - rows["retrieval"]])
    right.bar(
        x, rows["retrieval"], yerr=np.clip(error, 0, None), color=COLOURS[5], error_kw={"elinewidth": 0.8}
    )
    right.set(xlabel="layer", xticks=x[:: max(1, len(x) // 8)])
    right.set_ylabel("retrieval score (bars)")
    other = right.twinx()
    other.plot(x, rows["benefit"], color=COLOURS[1], marker="D", markersize=3)
    other.set_ylabel("benefit (line, nats)", color=COLOURS[1])
    other.spines["right"].set_visible(True)
    return figure


def _loss_map(axes: Axes, rows: pd.DataFrame, top: float, published: tuple[int, int]) -> Any:
    grid = rows.pivot(index="first", columns="last", values="change")
    image = axes.imshow(
        grid.to_numpy(dtype=float), cmap="PuOr_r", vmin=-top, vmax=top, aspect="auto", origin="lower"
    )
    lowest = rows.loc[rows["change"].idxmin()]
    for (first, last), marker, size in (((lowest["first"], lowest["last"]), "*", 8), (published, "s", 12)):
        at = grid.columns.get_loc(last), grid.index.get_loc(first)
        fill = COLOURS[2] if marker == "*" else "none"
        axes.plot(
            [at[0]],
            [at[1]],
            marker,
            markersize=size,
            color=COLOURS[2],
            markerfacecolor=fill,
            markeredgewidth=1.2,
        )
    for names, place in ((grid.columns, axes.set_xticks), (grid.index, axes.set_yticks)):
        step = max(1, len(names) // 6)
        place(range(0, len(names), step), [str(n) for n in names[::step]])
    axes.set(xlabel="last layer", ylabel="first layer")
    return image
