"""Where a model's content comes from, and which tokens are attention sinks: the theory's quantities on
trained weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.model import families
from posbench.model.hooks import attending
from posbench.model.attention import attention_weights
from posbench.model.lm import LM
from posbench.pipeline.config import Config
from posbench.plots.base import PAGE, line_style, new_figure, styled
from posbench.run.base import Run, complete, encode
from posbench.stats.tables import mean_interval
from posbench.studies.base import Finding, Study
from posbench.tasks import Example
from posbench.theory import masks

Array = NDArray[np.float64]
KINDS = {"attention alone": 0.0, "with the residual stream": 0.5}
"""Shares of a layer's own input: the product of attentions of Wu et al. 2025, and the rollout of Abnar and
Zuidema 2020."""
METRICS = {"by_head": "heads (Gu et al.)", "by_entry": "attention entries (Wu et al.)"}
ENTRIES = 1 << 24  # attention weights held at once


@dataclass(frozen=True, kw_only=True)
class Rollout(Study):
    """Attention rollout and attention sinks of a model.

    Source: Wu et al. 2025, Section 3 (cumulative context probability) and Appendix K.4; Gu et al. 2024 (sink
        metric).

    Attributes:
        prompts: Prompts of the task, evenly over its gold positions.
        parts: Equal parts of the prompt whose weights are summed.
        tokens: First tokens of a prompt among which sinks are looked for (Gu et al.: 64); shorter prompts do
            not count there.
    """

    prompts: int = 64
    parts: int = 10
    tokens: int = 64

    def check(self, config: Config, lm: LM | None) -> None:
        """Refuse counts that leave nothing to measure, and a method whose last row is computed apart from the
        others."""
        refuse_last_token_apart(config)
        for name in ("prompts", "parts", "tokens"):
            if getattr(self, name) < 2:
                raise UserError(
                    f"study.{name}", getattr(self, name), "a whole number from 2 up", f"set study.{name}=10"
                )

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``rollout`` (rollout, layers, part, weight), ``sinks`` (metric, token, share), ``changes``
        (what, value).

        Each with the mean over prompts, its 95 % interval (bootstrap over questions) as low and high, and n
        prompts.
        """
        chosen = run.evaluation[:: max(len(run.evaluation) // self.prompts, 1)][: self.prompts]

        def compute(batch: Sequence[Example]) -> list[Row]:
            (example,) = batch
            found = flow(run.lm, encode(run.lm, run.config.task, example).ids, self.parts, self.tokens)
            return [{name: _rounded(values.tolist()) for name, values in found.items()}]

        rows = complete(run, "flow.jsonl", "rollout", [[e] for e in chosen], lambda e: {"id": e.id}, compute)
        clusters = [example.cluster or example.id for example in chosen]
        return summary(rows, clusters, run.config.runtime.resamples)

    def figures(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, tuple[Figure, str]]:
        """The rollout by depth of the prompt."""
        caption = "Weight of the last token on each part of the prompt after the first 1, 2, ... layers, mean over prompts (95 %)."
        return {"rollout": (rollout_figure(tables["rollout"]), caption)}

    def findings(self, tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """Whether the first token is the strongest sink of the first half, and whether depth moves weight to
        the beginning."""
        sinks, changes = tables["sinks"], tables["changes"].set_index("what")
        found = []
        for metric, words in METRICS.items():
            if metric not in changes.index:
                continue
            row, shares = changes.loc[metric], sinks[sinks["metric"] == metric].set_index("token")["share"]
            found.append(
                Finding(
                    claim="Under a causal mask the first token is the attention sink (Wu et al. 2025, Theorem 4.1, Figure 10)",
                    statistic=f"share of {words} in which token 1 is a sink, minus the strongest other of the first half",
                    value=row["value"],
                    low=row["low"],
                    high=row["high"],
                    n=int(row["n"]),
                    verdict="holds" if row["low"] > 0 else "does not hold",
                    note=f"token 1: {shares[0]:.3f}, strongest other: {shares[0] - row['value']:.3f}",
                )
            )
        for kind in KINDS:
            row = changes.loc[kind]
            found.append(
                Finding(
                    claim="Depth moves the content towards the first tokens (Wu et al. 2025, Theorem 4.1)",
                    statistic=f"weight of the last token on the first part, all layers minus one, {kind}",
                    value=row["value"],
                    low=row["low"],
                    high=row["high"],
                    n=int(row["n"]),
                    verdict="holds" if row["low"] > 0 else "does not hold",
                )
            )
        return found


def refuse_last_token_apart(config: Config) -> None:
    """Refuse a method that computes the last row apart from the others: no forward then has whole maps.

    Raises:
        UserError: The method is one of these.
    """
    if config.trial().needs_prompt:
        allowed = f"a method that leaves whole attention maps; {config.method_name} runs the last token apart"
        raise UserError("method", config.method_name, allowed, "leave the method out")


def _rounded(values: Any) -> Any:
    """Nested lists of floats with 9 significant digits."""
    return [_rounded(value) for value in values] if isinstance(values, list) else float(f"{values:.9g}")


@torch.inference_mode()
def flow(lm: LM, ids: Sequence[int], parts: int = 10, tokens: int = 64) -> dict[str, Array]:
    """Rollout and sinks of one prompt, from one forward whose attention rows are reduced block by block.

    The rollout after t layers is A(t) ... A(1), A being the attention averaged over heads, mixed with the
    layer's own input where :data:`KINDS` says so. Only its product with the parts of the prompt is carried
    from layer to layer, [n, parts], so memory is linear in the n tokens. Families that compute whole maps
    themselves (MPT, Falcon) hold one layer's.

    Args:
        lm: The model, inside a method's block where one is meant. Where a method runs several rows for a
            prompt (attention_buckets), these are averaged; where it attends several times in a layer (moice),
            the last time counts.
        ids: The prompt.
        parts: Equal parts of the prompt.
        tokens: First tokens among which sinks are looked for.

    Returns:
        ``rollout`` [2, L, parts]: weight of the last token on each part after 1, 2, ... layers, as
        :data:`KINDS`. ``by_head`` and ``by_entry`` [tokens]: share of heads in which a token's mean weight,
        and of queries whose weight, is above the metric's threshold; not there where the prompt is shorter
        than ``tokens``.

    Source: :func:`posbench.theory.masks.rollout`, :func:`posbench.theory.masks.sink_by_head` and
        ``sink_by_entry``.
    """
    length, seen = len(ids), np.arange(tokens, 0, -1)
    share = torch.tensor(list(KINDS.values()), dtype=torch.float64).view(-1, 1, 1)
    member = torch.zeros(len(KINDS), length, parts, dtype=torch.float64)
    for part, rows in enumerate(np.array_split(np.arange(length), parts)):
        member[:, rows, part] = 1
    entering = leaving = member
    current = -1
    last: dict[int, Array] = {}
    heads: dict[int, Array] = {}
    entries: dict[int, Array] = {}

    def reduce(layer: int, blocks: Iterable[tuple[int, Tensor]]) -> None:
        nonlocal entering, leaving, current
        if layer != current:
            entering, current = leaving, layer
        mixed, sums, above = [], 0.0, 0.0
        for start, weights in blocks:
            entering = entering.to(weights.device)
            mixed.append(weights.mean(1).double()[:, None] @ entering)
            early = weights[:, :, : max(tokens - start, 0), :tokens].double()
            sums = sums + early.sum(2)
            above = above + (early > masks.ENTRY).double().sum(2)
        leaving = share.to(entering.device) * entering + (1 - share.to(entering.device)) * torch.cat(
            mixed, dim=2
        )
        last[layer] = leaving[..., -1, :].reshape(-1, len(KINDS), parts).mean(0).cpu().numpy()
        if length >= tokens:
            # [rows of the prompt, H, tokens], over the queries that see each of the tokens.
            heads[layer] = (torch.as_tensor(sums).cpu().numpy() / seen > masks.HEAD).mean((0, 1))
            entries[layer] = torch.as_tensor(above).cpu().numpy().mean((0, 1)) / seen

    with ExitStack() as stack:
        if families.family_of(lm.model).interface:

            def read(
                module: Any,
                query: Tensor,
                key: Tensor,
                value: Tensor,
                mask: Tensor | None,
                following: Any,
                **rest: Any,
            ) -> Any:
                reduce(module.layer_idx, attention_rows(query, key, mask, **rest))
                return following(module, query, key, value, mask, **rest)

            stack.enter_context(attending(lm.model, read))
        else:
            stack.enter_context(lm.eager())
            for layer, module in enumerate(families.attention_modules(lm.model)):
                stack.callback(module.register_forward_hook(_whole_map(layer, reduce)).remove)
        lm.model(**lm.pad([ids]), use_cache=False, logits_to_keep=1)
    found = {"rollout": np.stack([last[layer] for layer in sorted(last)], axis=1)}
    if length >= tokens:
        # Layers have equally many heads and queries.
        found |= {
            "by_head": np.mean(list(heads.values()), axis=0),
            "by_entry": np.mean(list(entries.values()), axis=0),
        }
    return found


def _whole_map(
    layer: int, reduce: Callable[[int, Iterable[tuple[int, Tensor]]], None]
) -> Callable[..., None]:
    return lambda module, args, output: reduce(layer, [(0, output[1].float())])


def attention_rows(
    query: Tensor, key: Tensor, mask: Tensor | None, *, entries: int = ENTRIES, **settings: Any
) -> Iterator[tuple[int, Tensor]]:
    """Attention weights of all queries of a prompt, a block of rows at a time, from what an attention
    function is given.

    Args:
        query: [B, H, n, d].
        key: [B, G, n, d].
        mask: See :func:`posbench.model.lm.attention_weights`.
        entries: Weights of a block at most.
        settings: Further arguments of that function.

    Yields:
        The first row of a block, and its weights [B, H, rows, n], in float32 or better.
    """
    # Once for all blocks.
    keys = repeat_kv(key, query.shape[1] // key.shape[1]).to(torch.promote_types(query.dtype, torch.float32))
    step = max(entries // (query.shape[0] * query.shape[1] * keys.shape[2]), 1)
    for start in range(0, query.shape[2], step):
        yield start, attention_weights(query, keys, mask, slice(start, start + step), **settings)


def summary(rows: Sequence[Row], clusters: Sequence[str], resamples: int = 2000) -> dict[str, pd.DataFrame]:
    """The tables of :class:`Rollout`, from what :func:`flow` found in each prompt.

    Args:
        rows: One row for each prompt.
        clusters: The question each prompt belongs to; intervals resample questions.
        resamples: Bootstrap draws.
    """

    def interval(values: Array, which: Sequence[str] = clusters) -> tuple[float, float, float, int]:
        low, high = mean_interval(values, which, resamples=resamples, seed=0)
        return float(values.mean()), low, high, len(values)

    weights = np.array([row["rollout"] for row in rows])
    _, kinds, layers, parts = weights.shape
    rollout = [
        (list(KINDS)[kind], layer + 1, part, *interval(weights[:, kind, layer, part]))
        for kind in range(kinds)
        for layer in range(layers)
        for part in range(parts)
    ]
    changes: list[tuple[Any, ...]] = [
        (kind, *interval(weights[:, number, -1, 0] - weights[:, number, 0, 0]))
        for number, kind in enumerate(KINDS)
    ]
    sinks: list[tuple[Any, ...]] = []
    long = [number for number, row in enumerate(rows) if "by_head" in row]
    for metric in METRICS if long else ():
        shares = np.array([rows[number][metric] for number in long])
        which = [clusters[number] for number in long]
        sinks += [(metric, token, *interval(shares[:, token], which)) for token in range(shares.shape[1])]
        # Late tokens average few queries.
        other = 1 + int(shares.mean(0)[1 : shares.shape[1] // 2 + 1].argmax())
        changes.append((metric, *interval(shares[:, 0] - shares[:, other], which)))
    end = ["low", "high", "n"]
    return {
        "rollout": pd.DataFrame(rollout, columns=["rollout", "layers", "part", "weight", *end]),
        "sinks": pd.DataFrame(sinks, columns=["metric", "token", "share", *end]),
        "changes": pd.DataFrame(changes, columns=["what", "value", *end]),
    }


@styled
def rollout_figure(table: pd.DataFrame) -> Figure:
    """Rollout of a model by depth of the prompt, a line per number of layers; a panel per share of the
    residual stream."""
    figure = new_figure(PAGE, 2.6)
    panels = list(table.groupby("rollout", sort=False))
    for axes, (title, frame) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        count, depths = frame["part"].nunique(), sorted(frame["layers"].unique())
        # Eight lines can be told apart.
        shown = depths[:: -(-len(depths) // 8)]
        for index, layers in enumerate(shown):
            line, style = frame[frame["layers"] == layers], line_style(index, of=len(shown))
            place = 100 * (line["part"] + 0.5) / count
            axes.plot(place, line["weight"], label=f"{layers} layer{'s' if layers > 1 else ''}", **style)
            axes.fill_between(place, line["low"], line["high"], color=style["color"], alpha=0.2, linewidth=0)
        axes.set(
            xlabel="place in the prompt (%)",
            ylabel="weight of the last token",
            title=str(title),
            ylim=(0, None),
        )
        axes.legend()
    return figure
