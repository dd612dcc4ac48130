"""How much of a method's result is rounding: error against float64 per weight type, and drift with the batch
size.

``make precision``, or ``python -m posbench.studies.cost.precision --help``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

import posbench
from posbench import paths
from posbench.cli.main import _hydra as compose
from posbench.errors import choices
from posbench.files.atomic import write_text
from posbench.files.hardware import hardware
from posbench.files.markdown import markdown
from posbench.methods import Method
from posbench.model.lm import LM, batches
from posbench.pipeline import config as configs

DTYPES = ("float32", "bfloat16", "float16")
BATCHES = (1, 4, 16)


def methods_of(model: str) -> dict[str, Method]:
    """Every method of ``conf/method`` with the constants of a model, by its name."""
    found: dict[str, Method] = {}
    for name in choices(paths.CONF / "method"):
        job = [f"model={model}", f"method={name}", "stages=[evaluate]"]
        compose(job, lambda config: found.update({name: configs.check(configs.plain(config)).method()}))  # noqa: B023
    return found


@torch.inference_mode()
def next_logits(lm: LM, method: Method, rows: Sequence[Sequence[int]], batch_size: int) -> Tensor:
    """Logits of the first answer token, [N, V] in float64, for N prompts of token ids."""
    out = torch.empty(len(rows), lm.model.get_output_embeddings().out_features, dtype=torch.float64)
    with method.applied(lm):
        for batch in batches([len(row) for row in rows], batch_size):
            inputs = lm.pad([rows[i] for i in batch])
            out[batch] = lm.model(**inputs, logits_to_keep=1).logits[:, -1].double().cpu()
    return out


def compare(found: Tensor, reference: Tensor) -> dict[str, float]:
    """Largest and mean absolute difference of logits [N, V], and the share of prompts whose most likely token
    differs."""
    error = (found - reference).abs()
    changed = (found.argmax(-1) != reference.argmax(-1)).double().mean()
    return {"largest": error.max().item(), "mean": error.mean().item(), "changed": changed.item()}


def measure(model: str, prompts: int, device: str) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of the two tables: error per method and weight type, and drift per method, weight type and batch
    size.

    Args:
        model: A name in ``conf/model`` that has the constants of every method.
        prompts: Prompts of several lengths, so that batches are padded.
        device: Where to run.
    """
    exact = posbench.load(model, dtype="float64", device=device)
    task = task_of(model)
    rows = [exact.encode(e.prompt).ids for e in task.examples("evaluation")]
    rows = rows[:: max(1, len(rows) // prompts)][:prompts]
    # Every other prompt loses some of its first pairs: equal lengths would need no padding.
    rows = [row if i % 2 else row[:1] + row[1 + 4 * (i % 7) :] for i, row in enumerate(rows)]
    methods = methods_of(model)
    references = {name: next_logits(exact, method, rows, 1) for name, method in methods.items()}
    errors, drifts = [], []
    for dtype in DTYPES:
        lm = posbench.load(model, dtype=dtype, device=device)
        for name, method in methods.items():
            by_batch = {size: next_logits(lm, method, rows, size) for size in BATCHES}
            errors.append([name, dtype, *_cells(compare(by_batch[1], references[name]))])
            for size in BATCHES[1:]:
                drifts.append([name, dtype, str(size), *_cells(compare(by_batch[size], by_batch[1]))])
    plain = references["none"]
    for name, reference in references.items():
        if name != "none":
            errors.append([f"{name} - none", "float64", *_cells(compare(reference, plain))])
    return errors, drifts


def task_of(model: str) -> configs.Task:
    """The default task of a model."""
    found = []
    compose(
        [f"model={model}", "stages=[evaluate]"],
        lambda config: found.append(configs.check(configs.plain(config)).task),
    )
    return found[0]


def _cells(numbers: Mapping[str, float]) -> list[str]:
    return [f"{numbers['largest']:.1e}", f"{numbers['mean']:.1e}", f"{100 * numbers['changed']:.1f} %"]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write the page where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write the tables as Markdown")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    disable_progress_bar()
    errors, drifts = measure(options.model, options.prompts, options.device)
    versions = (
        f"posbench {posbench.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    text = f"""# Precision

Model {options.model}, {options.prompts} prompts, logits of the first answer token; {options.device}: {hardware()}; {versions}.
Made by `make precision`.

## Error against float64, one prompt at a time

{markdown(("method", "weights", "largest", "mean", "other answer"), errors)}

Absolute differences of logits. "Other answer": prompts whose most likely token differs. The float64 run is exact but for norms,
rotations and the softmax, which transformers computes in float32. The rows `method - none` are no error: they show how far the
method itself moves the logits.

## Drift with the batch size, against one prompt at a time

{markdown(("method", "weights", "batch", "largest", "mean", "other answer"), drifts)}

Batches are padded on the left. In exact arithmetic all of these are zero; a larger batch sums in another order. Runs with another
`runtime.batch_size` therefore get another folder, and a method is compared with the unmodified model at the same batch size.
"""
    print(text)
    if options.out:
        write_text(options.out, text)


if __name__ == "__main__":
    main()
