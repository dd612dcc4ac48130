"""How much of a method's result is rounding: error by weight type, and drift with the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from posbench.files.atomic import Row
from posbench.late import Figure, Tensor, inference_mode, pd, torch
from posbench.methods import Method
from posbench.methods.choice import MethodChoice
from posbench.model.guard import finite, guarded
from posbench.model.lm import LM, batches
from posbench.model.load import Dtype, load
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.schema import Count
from posbench.stats.frames import UNMODIFIED, shown
from posbench.studies.base import Study, Tables
from posbench.studies.cost.timing import applicable, table

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")
BATCHES = (1, 4, 16)


@dataclass(frozen=True, kw_only=True)
class Precision(Study):
    """Logits of the first answer token under every method, in four weight types and three batch sizes.

    Float64 is exact but for norms, rotations and the softmax, which transformers computes in float32. Larger
    batches are padded on the left and sum in another order.
    """

    all_methods: ClassVar[bool] = True

    prompts: Count = 512  # of several lengths, so that batches are padded

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``errors`` and ``drifts``: method, weights, and :func:`compare` of the logits.

        ``errors`` is against float64, one prompt at a time; its rows in float64 show how far a method itself
        moves the logits. ``drifts`` is by batch, against one prompt at a time.
        """
        chosen = run.evaluation[:: max(1, len(run.evaluation) // self.prompts)][
            : self.prompts
        ]
        rows = [code.ids for code in run.prompts.encode(chosen).values()]
        # Every other prompt loses some of its first pairs: equal lengths would need no padding.
        rows = [
            row if i % 2 else row[:1] + row[1 + 4 * (i % 7) :]
            for i, row in enumerate(rows)
        ]
        methods = applicable(
            run.lm, run.all_methods, MethodChoice.build, run.console.out
        )
        errors = list[Row]()
        drifts = list[Row]()
        with run.progress("weight types", 1 + len(DTYPES)) as advance:
            lm = _load(run, "float64")
            exact = {
                name: next_logits(lm, method, rows, 1)
                for name, method in methods.items()
            }
            advance(1)
            for dtype in DTYPES:
                lm = _load(run, dtype)
                for name, method in methods.items():
                    alone, *others = (
                        next_logits(lm, method, rows, size) for size in BATCHES
                    )
                    front = {"method": name, "weights": dtype}
                    errors.append({**front, **compare(alone, exact[name])})
                    for size, found in zip(BATCHES[1:], others, strict=True):
                        drifts.append({**front, "batch": size, **compare(found, alone)})
                advance(1)
        unmodified = exact.pop(UNMODIFIED)
        for name, found in exact.items():
            errors.append(
                {"method": name, "weights": "float64", **compare(found, unmodified)}
            )
        return {"errors": table(errors), "drifts": table(drifts)}

    def figures(self, tables: Tables) -> Drawn:
        """Errors and effects."""
        words = "Mean difference of logits: error of each weight type, and what the method itself does."
        return {"errors": (errors_figure(tables["errors"]), words)}


def _load(run: Run, dtype: Dtype) -> LM:
    where = run.runtime
    config = replace(run.model, dtype=dtype)
    return load(
        config,
        device=where.device,
        device_map=where.device_map,
        max_memory=where.max_memory,
    )


@guarded
@inference_mode
def next_logits(
    lm: LM, method: Method, rows: Sequence[Sequence[int]], batch_size: int
) -> Tensor:
    """Logits of the first answer token, [N, V] in float64, for N prompts of token ids."""
    out = torch.empty(
        len(rows), lm.model.get_output_embeddings().out_features, dtype=torch.float64
    )
    with method.applied(lm):
        for batch in batches([len(row) for row in rows], batch_size):
            inputs = lm.pad([rows[i] for i in batch])
            out[batch] = (
                finite(lm.model(**inputs, logits_to_keep=1).logits[:, -1])
                .double()
                .cpu()
            )
    return out


def compare(found: Tensor, reference: Tensor) -> dict[str, float]:
    """Largest and mean absolute difference of logits [N, V], and share of prompts with another best token."""
    error = (found - reference).abs()
    changed = (found.argmax(-1) != reference.argmax(-1)).double().mean()
    return {
        "largest": error.max().item(),
        "mean": error.mean().item(),
        "changed": changed.item(),
    }


@plot.styled
def errors_figure(errors: pd.DataFrame) -> Figure:
    """Mean difference of logits, a line for each method, a mark for each weight type and its own effect."""
    figure, axes = plot.new_figure(plot.PAGE, 2.4)
    for index, (weights, rows) in enumerate(errors.groupby("weights", sort=False)):
        label = (
            "effect of the method, float64"
            if weights == "float64"
            else f"error of {weights}"
        )
        names = rows["method"].map(shown)
        axes.plot(
            rows["mean"],
            names,
            **plot.line_style(index) | {"linestyle": "", "label": label},
        )
    axes.set(xscale="log", xlabel="mean absolute difference of logits")
    plot.legend_below(figure)
    return figure
