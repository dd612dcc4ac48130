"""The share of rounding in a method's result: error by weight type, and drift with the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, get_args

from annotated_types import MinLen

from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.late import Figure, Tensor, inference_mode, pd, torch
from posbench.methods import Method
from posbench.methods.choice import MethodChoice
from posbench.model.guard import check_finite, guarded
from posbench.model.items import token_spans
from posbench.model.lm import LM, length_batches
from posbench.model.load import Dtype
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run, load_placed
from posbench.schema import Count
from posbench.stats.frames import UNMODIFIED, display_name
from posbench.studies.base import Study, Tables
from posbench.studies.cost.timing import applicable_methods, with_environment

BATCH_SIZES = (1, 4, 16)
Rounded = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Precision(Study):
    """Logits of the first answer token under every method, in several weight types and three batch sizes.

    Float64 is exact but for norms, rotations and the softmax, which transformers computes in float32. Larger
    batches are padded on the left and sum in another order.

    Attributes:
        prompts: Number of prompts, of several lengths, so that batches are padded.
        dtypes: Weight types to compare with float64. Half precision is slow on processors without instructions for it.
    """

    all_methods: ClassVar[bool] = True

    prompts: Count = 512
    dtypes: Annotated[tuple[Rounded, ...], MinLen(1)] = get_args(Rounded)

    def check(self, run: Run) -> None:
        """Refuse a weight type that is named twice.

        Raises:
            UserError: One is.
        """
        if len(set(self.dtypes)) < len(self.dtypes):
            allowed = "each weight type once"
            raise UserError("study.dtypes", list(self.dtypes), allowed, "remove one")

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Return the tables ``errors`` and ``drifts``: by method and weights, how far the logits of prompts differ.

        ``errors`` is against float64, one prompt at a time, under the method ``against``: the same one, but in rows
        in float64, which show how far a method itself moves the logits of the unmodified model. ``drifts`` is by
        batch, against one prompt at a time. Both have the columns of :func:`compare`.
        """
        prompts = self._prompts(run)
        methods = applicable_methods(
            run.lm, run.all_methods, MethodChoice.build, run.console.out
        )
        errors: list[Row] = []
        drifts: list[Row] = []
        with run.progress("weight types", 1 + len(self.dtypes)) as advance:
            lm = _load(run, "float64", prompts)
            # The reference: float64, one prompt at a time.
            exact = {
                name: next_logits(lm, method, prompts, 1)
                for name, method in methods.items()
            }
            advance(1)
            for dtype in self.dtypes:
                lm = _load(run, dtype, prompts)
                for name, method in methods.items():
                    logits = {
                        size: next_logits(lm, method, prompts, size)
                        for size in BATCH_SIZES
                        if size <= len(prompts)
                    }
                    one_by_one = logits.pop(1)
                    key = {"method": name, "weights": dtype}
                    error = compare(one_by_one, exact[name])
                    errors.append({**key, "against": name, **error})
                    for size, in_batches in logits.items():
                        drift = compare(in_batches, one_by_one)
                        drifts.append({**key, "batch": size, **drift})
                advance(1)
        unmodified = exact.pop(UNMODIFIED)
        # What the methods themselves change, to compare the errors with.
        for name, exact_logits in exact.items():
            effect = compare(exact_logits, unmodified)
            key = {"method": name, "weights": "float64", "against": UNMODIFIED}
            errors.append({**key, **effect})
        return {"errors": with_environment(errors), "drifts": with_environment(drifts)}

    def _prompts(self, run: Run) -> list[list[int]]:
        """Return token ids of evaluation prompts, spread over the whole set, of different lengths."""
        examples = run.evaluation
        count = min(self.prompts, len(examples))
        chosen = [examples[i * len(examples) // count] for i in range(count)]
        encoded = run.prompts.encode(chosen).values()
        prompts = [prompt.ids for prompt in encoded]
        # Every second prompt loses some items before the gold one: equal lengths would need no padding.
        for i, (example, prompt) in enumerate(zip(chosen, encoded, strict=True)):
            removed = min(i % 7, example.gold_position or 0, *example.other_gold)
            if i % 2 == 0 and removed and prompt.offsets:
                spans = token_spans(prompt.offsets, example.items)
                first_item, _ = spans[0]
                first_kept, _ = spans[removed]
                prompts[i] = prompt.ids[:first_item] + prompt.ids[first_kept:]
        return prompts

    def figures(self, tables: Tables) -> Drawn:
        """Errors and effects; the caption has the unmodified model's numbers."""
        errors = tables["errors"]
        of_model = errors[errors["method"] == UNMODIFIED]
        numbers = [
            f"{row.mean:.2g} in {row.weights} ({100 * row.changed:.1f} % of {row.n} prompts get another answer token)"
            for row in of_model.itertuples()
        ]
        caption = (
            "Mean difference of logits: error of each weight type, and what the method itself does. "
            f"Unmodified: {'; '.join(numbers)}. A method without a mark of its effect changes nothing, and an error "
            "without a mark is 0: a logarithmic axis shows neither. All numbers: errors.csv, and by batch drifts.csv."
        )
        return {"errors": (errors_figure(errors), caption)}


def _load(run: Run, dtype: Dtype, prompts: Sequence[Sequence[int]]) -> LM:
    """Load the run's model once more, with weights of another dtype.

    A method that reads items gets the first two thirds of each prompt, a third for each of two.
    """
    lm = load_placed(replace(run.model, dtype=dtype), run.runtime)
    for prompt in prompts:
        third = len(prompt) // 3
        lm.items.add(prompt, [(0, third), (third, 2 * third)])
    return lm


@guarded
@inference_mode
def next_logits(
    lm: LM, method: Method, prompts: Sequence[Sequence[int]], batch_size: int
) -> Tensor:
    """Compute the logits of the first answer token under a method.

    Args:
        lm: The model, with a vocabulary of V tokens.
        method: The method.
        prompts: Token ids of N prompts.
        batch_size: Prompts of a batch.

    Returns:
        [N, V] in float64 on the CPU.
    """
    vocab_size = lm.model.get_output_embeddings().out_features
    result = torch.empty(len(prompts), vocab_size, dtype=torch.float64)
    with method.applied(lm):
        lengths = [len(prompt) for prompt in prompts]
        for batch in length_batches(lengths, batch_size, boundary=lm.rope_boundary):
            inputs = lm.pad([prompts[i] for i in batch])
            logits = lm.model(**inputs, logits_to_keep=1).logits[:, -1]
            result[batch] = check_finite(logits).double().cpu()
    return result


def compare(logits: Tensor, reference: Tensor) -> dict[str, float]:
    """Return the largest and mean absolute difference of logits, and the share of prompts with another best token.

    Args:
        logits: [N, V].
        reference: What they are compared with, [N, V].

    Returns:
        ``largest``, ``mean`` and ``changed``, and the number of prompts ``n``.
    """
    error = (logits - reference).abs()
    changed = (logits.argmax(-1) != reference.argmax(-1)).double().mean()
    return {
        "largest": error.max().item(),
        "mean": error.mean().item(),
        "changed": changed.item(),
        "n": len(logits),
    }


@plot.styled
def errors_figure(errors: pd.DataFrame) -> Figure:
    """Draw the mean difference of logits of each method: a mark for each weight type, and the method's own effect."""
    figure, axes = plot.new_figure(plot.PAGE, 2.4)
    for index, (weights, rows) in enumerate(errors.groupby("weights", sort=False)):
        label = f"error of {weights}"
        if weights == "float64":
            label = "effect of the method, float64"
        style = plot.line_style(index) | {"linestyle": "", "label": label}
        axes.plot(rows["mean"], rows["method"].map(display_name), **style)
    axes.set(xscale="log", xlabel="mean absolute difference of logits")
    plot.add_legend_below(figure)
    return figure
