"""How much faster the evaluate stage is than a loop over single prompts: same examples, same model, same
outputs.

``make throughput``, or ``python -m posbench.studies.cost.throughput --help``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

import posbench
from posbench.model.lm import LM
from posbench.pipeline.config import Runtime
from posbench.pipeline.stages import evaluate
from posbench.run.base import encode
from posbench.studies.cost.latency import SHAPES, publish, ratios, side_by_side
from posbench.tasks import Example, KVRetrieval

CHOICES = 4


def staged(lm: LM, task: KVRetrieval, examples: Sequence[Example]) -> list[str]:
    """Outputs as the evaluate stage makes them."""
    encoded = {e.id: encode(lm, task, e) for e in examples}
    choices = {e.id: [lm.continuation_ids(encoded[e.id], c) for c in e.choices] for e in examples}
    out: dict[str, str] = {}
    for group in evaluate.plan(task, examples, encoded, Runtime()):
        batch = [examples[i] for i in group]
        rows = evaluate.replies(lm, task, batch, encoded, choices)
        out |= {e.id: row["output"] for e, row in zip(batch, rows, strict=True)}
    return [out[e.id] for e in examples]


@torch.inference_mode()
def looped(lm: LM, task: KVRetrieval, examples: Sequence[Example]) -> list[str]:
    """The same outputs from stock transformers, prompt by prompt; a choice costs a forward of prompt and
    choice."""
    out, tokenizer = [], lm.tokenizer
    assert tokenizer is not None
    for e in examples:
        prompt = tokenizer(e.prompt, return_tensors="pt")["input_ids"].to(lm.device)
        width = prompt.shape[1]
        if not e.choices:
            new = lm.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=task.max_new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            out.append(str(tokenizer.decode(new[0, width:], skip_special_tokens=True)))
            continue
        totals = []
        for choice in e.choices:
            ids = torch.tensor([tokenizer(choice, add_special_tokens=False)["input_ids"]], device=lm.device)
            logits = (
                lm.model(torch.cat([prompt, ids], dim=1)).logits[0, width - 1 : -1].float().log_softmax(-1)
            )
            totals.append(float(logits.gather(1, ids.T).sum()))
        out.append(e.choices[totals.index(max(totals))])
    return out


def measure(lm: LM, name: str, pairs: int, count: int, new_tokens: int, repeats: int) -> list[list[str]]:
    """Rows of work, way, median seconds and speed-up, for generation and for choices.

    Raises:
        RuntimeError: The two ways disagree in an output.
    """
    places = (0, pairs // 2, pairs - 1)
    made = {"records": "words", "prompt": "compact", "examples_per_position": -(-count // len(places))}
    task = KVRetrieval(pairs=pairs, positions=places, max_new_tokens=new_tokens, **made)  # type: ignore[arg-type]
    generated = task.examples("evaluation")[:count]
    values = [e.answers[0] for e in generated]
    chosen = [
        replace(e, choices=tuple(values[(i + k) % count] for k in range(CHOICES)))
        for i, e in enumerate(generated)
    ]
    rows = []
    for what, examples in ((f"generate {new_tokens}", generated), (f"{CHOICES} choices", chosen)):
        out: dict[str, list[str]] = {}

        def loop(examples: list[Example] = examples, out: dict[str, list[str]] = out) -> None:
            out["loop"] = looped(lm, task, examples)

        def stage(examples: list[Example] = examples, out: dict[str, list[str]] = out) -> None:
            out["stage"] = staged(lm, task, examples)

        times = side_by_side({"one prompt at a time": loop, "evaluate stage": stage}, lm.device, repeats)
        if out["loop"] != out["stage"]:
            raise RuntimeError(
                f"{sum(a != b for a, b in zip(out['loop'], out['stage'], strict=True))} outputs differ"
            )
        length = round(median(len(lm.encode(e.prompt).ids) for e in examples))
        base = times["one prompt at a time"]
        work = f"{name}: {count} prompts of {length} tokens, {what}"
        rows += [[work, way, f"{median(spent):.3f}", ratios(base, spent)] for way, spent in times.items()]
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write the table where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shape", choices=SHAPES, default="small", help="random-weight model beside the embedded one"
    )
    parser.add_argument(
        "--pairs", type=int, nargs="+", default=[8, 56], help="pairs per prompt: short and long prompts"
    )
    parser.add_argument("--examples", type=int, default=60)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the table as Markdown")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    tiny = posbench.load("tiny", device=options.device)
    with torch.device(options.device):
        model = SHAPES[options.shape]().eval()
    lms = {"tiny": tiny, options.shape: posbench.load(model, tokenizer=tiny.tokenizer, name=options.shape)}
    rows = []
    for name, lm in lms.items():
        for pairs in options.pairs:
            rows += measure(lm, name, pairs, options.examples, options.new_tokens, options.repeats)
    note = "ratio: speed-up over one prompt at a time, outputs equal; float32"
    publish(f"evaluation, {options.device}, {options.repeats} rounds", rows, note, options.out)


if __name__ == "__main__":
    main()
