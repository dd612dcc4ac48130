"""Where a model's content comes from, and which tokens are sinks: the theory on trained weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posbench.files.atomic import Row, rounded
from posbench.late import Figure, pd
from posbench.measure.flow import KINDS, flow
from posbench.measure.replies import encode
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.schema import Several
from posbench.stats import bootstrap
from posbench.stats.bootstrap import Array, Estimate
from posbench.stats.findings import Finding, ends, estimate
from posbench.studies.base import Study, Tables
from posbench.studies.prompts import need_whole_maps
from posbench.tasks import Example

METRICS = {"by_head": "heads (Gu et al.)", "by_entry": "attention entries (Wu et al.)"}


@dataclass(frozen=True, kw_only=True)
class Rollout(Study):
    """Attention rollout and attention sinks of a model.

    Source: Wu et al. 2025, Section 3 (cumulative context probability), Appendix K.4; Gu et al. 2024 (sinks).
    """

    prompts: Several = 64  # of the task, evenly over its gold positions
    parts: Several = 10  # equal parts of the prompt whose weights are summed
    tokens: Several = 64  # first tokens, among which sinks are looked for; shorter prompts do not count there

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        need_whole_maps(run)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """The tables of :func:`summary`."""
        chosen = run.evaluation[:: max(len(run.evaluation) // self.prompts, 1)][
            : self.prompts
        ]

        def compute(batch: Sequence[Example]) -> list[Row]:
            found = flow(
                run.lm, encode(run.lm, run.task, batch[0]).ids, self.parts, self.tokens
            )
            return [{name: rounded(values, 9) for name, values in found.items()}]

        rows = run.rows.complete(
            "flow.jsonl",
            "rollout",
            [[e] for e in chosen],
            lambda e: {"id": e.id},
            compute,
        )
        return summary(rows, [e.cluster or e.id for e in chosen])

    def figures(self, tables: Tables) -> Drawn:
        """The rollout by depth of the prompt."""
        caption = "Weight of the last token on each part of the prompt after the first 1, 2, ... layers"
        return {
            "rollout": (
                rollout_figure(tables["rollout"]),
                f"{caption}, mean over prompts (95 %).",
            )
        }

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Whether the first token is the strongest sink, and whether depth moves weight to the beginning."""
        changes = {
            row["what"]: estimate(row) for row in tables["changes"].to_dict("records")
        }
        claim = "Under a causal mask the first token is the attention sink (Wu et al. 2025, Figure 10)"
        found = []
        for metric in [m for m in METRICS if m in changes]:
            sinks = tables["sinks"]
            at = changes[metric]
            first = sinks.loc[
                (sinks["metric"] == metric) & (sinks["token"] == 0), "share"
            ].item()
            statistic = f"share of {METRICS[metric]} with the first token a sink, minus the strongest other"
            note = f"first token: {first:.3f}, strongest other of the first half: {first - at.value:.3f}"
            found.append(Finding.above(claim, statistic, at, note=note))
        claim = "Depth moves the content towards the first tokens (Wu et al. 2025, Theorem 4.1)"
        statistic = "weight of the last token on the first part, all layers minus one"
        return [
            *found,
            *(
                Finding.above(claim, f"{statistic}, {kind}", changes[kind])
                for kind in KINDS
            ),
        ]


def summary(rows: Sequence[Row], clusters: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Tables ``rollout``, ``sinks``, ``changes`` of what :func:`flow` found in prompts of these clusters."""

    def interval(values: Array, which: Sequence[str] = clusters) -> Estimate:
        return bootstrap.difference(values, which)

    weights = np.array([row["rollout"] for row in rows])
    changes = dict[str, Estimate]()
    rollout = list[Row]()
    sinks = list[Row]()
    for number, kind in enumerate(KINDS):
        for layer, part in np.ndindex(weights.shape[2:]):
            at = interval(weights[:, number, layer, part])
            place = {"rollout": kind, "layers": layer + 1, "part": part}
            rollout.append({**place, **ends(at, "weight"), "n": at.n})
        changes[kind] = interval(weights[:, number, -1, 0] - weights[:, number, 0, 0])
    long = [number for number, row in enumerate(rows) if "by_head" in row]
    which = [clusters[number] for number in long]
    for metric in METRICS if long else ():
        shares = np.array([rows[number][metric] for number in long])
        for token, values in enumerate(shares.T):
            at = interval(values, which)
            sinks.append(
                {"metric": metric, "token": token} | ends(at, "share") | {"n": at.n}
            )
        # Late tokens average few queries.
        other = 1 + int(shares.mean(0)[1 : shares.shape[1] // 2 + 1].argmax())
        changes[metric] = interval(shares[:, 0] - shares[:, other], which)
    told = pd.DataFrame(
        [{"what": what, **at._asdict()} for what, at in changes.items()]
    )
    columns = ["metric", "token", "share", "share_ci_low", "share_ci_high", "n"]
    return {
        "rollout": pd.DataFrame(rollout),
        "sinks": pd.DataFrame(sinks, columns=columns),
        "changes": told,
    }


@plot.styled
def rollout_figure(table: pd.DataFrame) -> Figure:
    """Rollout by depth of the prompt, a line per number of layers; a panel per kind of rollout."""
    figure, panels = plot.new_figure(plot.PAGE, 2.6, 1, len(KINDS), n=table["n"])
    table = table.assign(place=100 * (table["part"] + 0.5) / table["part"].nunique())
    depths = sorted(table["layers"].unique())
    shown = depths[:: -(-len(depths) // 8)]  # eight lines can be told apart
    for axes, kind in zip(panels, KINDS, strict=True):
        for index, layers in enumerate(shown):
            line = table[(table["rollout"] == kind) & (table["layers"] == layers)]
            style = plot.line_style(index, of=len(shown))
            name = f"{layers} layer{'s' if layers > 1 else ''}"
            plot.band(axes, line, style, x="place", name="weight", scale=1, label=name)
        axes.set(
            xlabel="place in the prompt (%)",
            ylabel="weight of the last token",
            title=kind,
        )
        axes.set_ylim(0, None)
        axes.legend()
    return figure
