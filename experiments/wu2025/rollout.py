"""Where a model's content comes from, and which tokens are sinks: the theory on trained weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from posbench.files.atomic import Row, round_values
from posbench.late import Figure, pd
from posbench.measure.flow import RESIDUAL_SHARES, flow
from posbench.measure.replies import encode_prompt
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.run.cost import InspectionPasses
from posbench.schema import Several
from posbench.stats import bootstrap
from posbench.stats.bootstrap import Estimate
from posbench.stats.findings import SMALLEST_SHARE, Finding, estimate, estimate_row
from posbench.studies.base import Study, Tables
from posbench.studies.prompts import need_whole_maps
from posbench.tasks import Example
from posbench.tasks.items import spread_examples

SINK_METRICS = {
    "by_head": "heads (Gu et al.)",
    "by_entry": "attention entries (Wu et al.)",
}
MAX_LINES = 8  # distinguishable in a panel


@dataclass(frozen=True, kw_only=True)
class Rollout(Study):
    """Attention rollout and attention sinks of a model.

    Source: Wu et al. 2025, Section 3 (cumulative context probability), Appendix K.4; Gu et al. 2024 (sinks).

    Attributes:
        prompts: Prompts of the task, spread evenly over its gold positions.
        parts: Equal parts of the prompt whose weights are summed.
        tokens: First tokens, among which sinks are looked for; shorter prompts do not count there.
    """

    smallest: ClassVar[Mapping[str, int]] = {"prompts": 8}
    prompts: Several = 64
    parts: Several = 10
    tokens: Several = 64

    def check(self, run: Run) -> None:
        """See :meth:`Study.check`."""
        need_whole_maps(run)

    def workload(self, run: Run) -> list[InspectionPasses]:
        """See :meth:`Study.workload`."""
        return [InspectionPasses(self._examples(run), times=1)]

    def _examples(self, run: Run) -> list[Example]:
        """The prompts, spread evenly."""
        return spread_examples(run.evaluation, self.prompts)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """The tables of :func:`summary`."""
        examples = self._examples(run)
        rows = run.rows.complete(
            "flow.jsonl",
            "rollout",
            [[example] for example in examples],
            lambda example: {"id": example.id},
            lambda batch: [self._flow_row(run, example) for example in batch],
        )
        return summary(rows, [example.question_id for example in examples])

    def _flow_row(self, run: Run, example: Example) -> Row:
        """The arrays of :func:`flow` for one prompt, rounded."""
        ids = encode_prompt(run.lm, run.task, example).ids
        arrays = flow(run.lm, ids, self.parts, self.tokens)
        return {name: round_values(values, 9) for name, values in arrays.items()}

    def figures(self, tables: Tables) -> Drawn:
        """The rollout by depth of the prompt."""
        caption = (
            "Weight of the last token on each part of the prompt after the first 1, 2, ... layers, "
            "mean over prompts (95 %)."
        )
        return {"rollout": (rollout_figure(tables["rollout"]), caption)}

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Whether the first token is the strongest sink, and whether depth moves weight to the beginning."""
        rows = tables["changes"].to_dict("records")
        changes = {row["what"]: estimate(row) for row in rows}
        shares = tables["sinks"].set_index(["metric", "token"])["share"]
        findings = []
        claim = "Under a causal mask the first token is the attention sink (Wu et al. 2025, Figure 10)"
        for metric, entities in SINK_METRICS.items():
            if metric not in changes:
                continue  # all prompts were too short
            lead = changes[metric]
            first = shares[metric, 0]
            statistic = f"share of {entities} with the first token a sink, minus the strongest other"
            note = f"first token: {first:.3f}, strongest other of the first half: {first - lead.value:.3f}"
            findings.append(Finding.above(claim, statistic, lead, SMALLEST_SHARE, note))
        claim = "Depth moves the content towards the first tokens (Wu et al. 2025, Theorem 4.1)"
        statistic = "weight of the last token on the first part, all layers minus one"
        for kind in RESIDUAL_SHARES:
            finding = Finding.above(
                claim, f"{statistic}, {kind}", changes[kind], SMALLEST_SHARE
            )
            findings.append(finding)
        return findings


def summary(rows: Sequence[Row], clusters: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Average rollouts and sinks over prompts.

    Args:
        rows: Arrays of :func:`flow`, one row for each prompt.
        clusters: Cluster of each prompt, for the intervals.

    Returns:
        ``rollout`` (weight of the last token by kind, layers and part of the prompt), ``sinks`` (share by
        metric and token), ``changes`` (weight on the first part, all layers minus one; share of the first
        token minus the strongest other token).
    """
    changes: dict[str, Estimate] = {}
    rollout: list[Row] = []
    sinks: list[Row] = []
    # [prompts, kinds, layers, parts]
    weights = np.array([row["rollout"] for row in rows])
    for index, kind in enumerate(RESIDUAL_SHARES):
        for layer, part in np.ndindex(weights.shape[2:]):
            weight = bootstrap.difference(weights[:, index, layer, part], clusters)
            cell: Row = {"rollout": kind, "layers": layer + 1, "part": part}
            rollout.append({**cell, **estimate_row(weight, "weight"), "n": weight.n})
        first_part = weights[:, index, :, 0]
        change = first_part[:, -1] - first_part[:, 0]
        changes[kind] = bootstrap.difference(change, clusters)
    long = [index for index, row in enumerate(rows) if "by_head" in row]
    long_clusters = [clusters[index] for index in long]
    for metric in SINK_METRICS:
        if not long:
            break
        # [prompts, tokens]
        shares = np.array([rows[index][metric] for index in long])
        for token, values in enumerate(shares.T):
            share = bootstrap.difference(values, long_clusters)
            cell = {"metric": metric, "token": token}
            sinks.append({**cell, **estimate_row(share, "share"), "n": share.n})
        # Of the first half alone, as late tokens average few queries.
        half = shares.shape[1] // 2
        strongest = 1 + int(shares.mean(0)[1 : half + 1].argmax())
        lead = shares[:, 0] - shares[:, strongest]
        changes[metric] = bootstrap.difference(lead, long_clusters)
    columns = ["metric", "token", "share", "share_ci_low", "share_ci_high", "n"]
    change_rows = [{"what": name, **e._asdict()} for name, e in changes.items()]
    return {
        "rollout": pd.DataFrame(rollout),
        "sinks": pd.DataFrame(sinks, columns=columns),
        "changes": pd.DataFrame(change_rows),
    }


@plot.styled
def rollout_figure(table: pd.DataFrame) -> Figure:
    """Rollout by depth of the prompt, a line per number of layers; a panel per kind of rollout."""
    figure, panels = plot.new_figure(
        plot.PAGE, 2.6, 1, len(RESIDUAL_SHARES), n=table["n"]
    )
    parts = table["part"].nunique()
    table = table.assign(middle=100 * (table["part"] + 0.5) / parts)
    depths = sorted(table["layers"].unique())
    depths = depths[:: -(-len(depths) // MAX_LINES)]
    for axes, kind in zip(panels, RESIDUAL_SHARES, strict=True):
        for index, layers in enumerate(depths):
            rows = table[(table["rollout"] == kind) & (table["layers"] == layers)]
            style = plot.line_style(index, steps=len(depths))
            label = "1 layer" if layers == 1 else f"{layers} layers"
            plot.band(
                axes, rows, style, x="middle", name="weight", scale=1, label=label
            )
        axes.set(xlabel="place in the prompt (%)", ylabel="weight of the last token")
        axes.set(title=kind, ylim=(0, None))
        axes.legend()
    return figure
