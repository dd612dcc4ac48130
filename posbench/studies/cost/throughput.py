"""The evaluate stage against a loop over single prompts: same examples, same model, same outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, ClassVar

from posbench import paths
from posbench.files.atomic import Row
from posbench.files.sources import Source, checkpoint
from posbench.late import inference_mode, pd, torch
from posbench.measure.replies import encode, plan, replies
from posbench.model.lm import LM
from posbench.model.load import load, torch_device
from posbench.run.base import Run
from posbench.run.runtime import Runtime
from posbench.schema import Count, Several
from posbench.studies.cost.timing import Shape, Timed, random_model, table
from posbench.tasks import Example, KVRetrieval

CHOICES = 4


@dataclass(frozen=True, kw_only=True)
class Throughput(Timed):
    """Generated and chosen replies of the embedded model and of one with random weights, in float32."""

    caption: ClassVar[str] = "The evaluate stage and a loop over single prompts, with equal outputs."

    shape: Shape = "small"
    pairs: tuple[Several, ...] = (8, 56)  # per prompt of key-value retrieval: short and long prompts
    examples: Several = 60
    new_tokens: Count = 8  # generated

    def files(self) -> tuple[Source, ...]:
        """See :meth:`Study.files`: the embedded model."""
        return (replace(checkpoint(f"{paths.EMBEDDED}tiny"), field="study.model"),)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Table ``throughput``; see :meth:`Timed.compared`."""
        torch.manual_seed(0)
        tiny = load("tiny", device=run.runtime.device)
        other = random_model(self.shape, torch_device(run.runtime.device), tokenizer=tiny.tokenizer)
        rows: list[Row] = []
        with run.progress("prompts", 2 * len(self.pairs)) as advance:
            for lm in (tiny, other):
                for pairs in self.pairs:
                    rows += self.replied(lm, pairs, run.runtime)
                    advance(1)
        return {"throughput": table(rows)}

    def replied(self, lm: LM, pairs: int, runtime: Runtime) -> list[Row]:
        """Rows of one model at one number of pairs, generation first, then choices."""
        count, places = self.examples, tuple(dict.fromkeys((0, pairs // 2, pairs - 1)))
        made: dict[str, Any] = {"records": "words", "prompt": "compact", "max_new_tokens": self.new_tokens}
        made |= {"pairs": pairs, "positions": places, "limit": -(-count // len(places))}
        task = KVRetrieval(**made)
        generated = task.examples("evaluation")[:count]
        values = [e.answers[0] for e in generated]
        asked = (tuple(values[(i + k) % count] for k in range(CHOICES)) for i in range(count))
        chosen = [replace(e, choices=choices) for e, choices in zip(generated, asked, strict=True)]
        length, rows = round(median(len(lm.encode(e.prompt).ids) for e in generated)), list[Row]()
        for what, examples in ((f"generate {self.new_tokens}", generated), (f"{CHOICES} choices", chosen)):
            ways = {"one prompt at a time": partial(looped, lm, task, examples)}
            ways["evaluate stage"] = partial(staged, lm, task, examples, runtime)
            work = f"{lm.name}: {count} prompts of {length} tokens, {what}"
            rows += self.compared(work, ways, lm.device)
        return rows


def staged(lm: LM, task: KVRetrieval, examples: Sequence[Example], runtime: Runtime) -> list[str]:
    """Outputs as the evaluate stage makes them."""
    encoded, out = {e.id: encode(lm, task, e) for e in examples}, dict[str, str]()
    for batch in plan(task, examples, encoded, runtime.batch_size, runtime.batch_tokens):
        rows = replies(lm, task, batch, encoded)
        out |= {e.id: str(row["output"]) for e, row in zip(batch, rows, strict=True)}
    return [out[e.id] for e in examples]


@inference_mode
def looped(lm: LM, task: KVRetrieval, examples: Sequence[Example]) -> list[str]:
    """The same outputs from stock transformers, prompt by prompt; each choice costs a forward of its own."""
    out, tokenizer = [], lm.need_tokenizer()
    fixed = {"max_new_tokens": task.max_new_tokens, "do_sample": False, "pad_token_id": 0}
    for e in examples:
        prompt = tokenizer(e.prompt, return_tensors="pt")["input_ids"].to(lm.device)
        width, totals = prompt.shape[1], []
        for choice in e.choices:
            ids = torch.tensor([tokenizer(choice, add_special_tokens=False)["input_ids"]], device=lm.device)
            logits = lm.model(torch.cat([prompt, ids], dim=1)).logits[0, width - 1 : -1]
            totals.append(float(logits.float().log_softmax(-1).gather(1, ids.T).sum()))
        if totals:
            out.append(e.choices[totals.index(max(totals))])
        else:
            new = lm.model.generate(prompt, attention_mask=torch.ones_like(prompt), **fixed)
            out.append(str(tokenizer.decode(new[0, width:], skip_special_tokens=True)))
    return out
