"""The evaluate stage against a loop over single prompts: same examples, same model, same outputs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, ClassVar, Literal

from posbench import paths
from posbench.files.atomic import Row
from posbench.files.sources import Source, checkpoint
from posbench.late import inference_mode, pd, torch
from posbench.methods import Method, ScaleChannel, Unmodified
from posbench.model.lm import LM
from posbench.model.load import load, torch_device
from posbench.run.base import Run
from posbench.run.batch_plan import BatchPlan, Compute, Subject
from posbench.run.cost import Costs
from posbench.run.replies import plan_replies
from posbench.run.runtime import Runtime
from posbench.schema import Count, Several, Tokens
from posbench.stats.frames import UNMODIFIED
from posbench.studies.cost.timing import Shape, Timed, random_model, table
from posbench.tasks import Example, KVRetrieval
from posbench.tasks.kv_retrieval import WORDS, compact_prompt

CHOICES = 4
POSITIONS = 5
Work = Literal["Table 1", "Figure 6"]
FACTORS: Mapping[Work, tuple[float, ...]] = {
    "Table 1": (0.0,),
    "Figure 6": (2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0),
}
"""Factors of scale_channel beside the unmodified model, each at five gold positions: Yu et al. 2025."""
ALONE = "one prompt at a time"
BATCHED = "in batches"
SHARED = "in batches, prefills shared"
Outputs = list[str]


@dataclass(frozen=True, kw_only=True)
class Throughput(Timed):
    """Generated and chosen replies of the embedded model and of one with random weights, in float32.

    Where prompts have nothing in common, and under the unmodified model alone, sharing prefills gains nothing
    and should cost nothing. Works in the shape of Yu et al.'s Table 1 and Figure 6 have the same question at
    five gold positions, under the unmodified model and factors of scale_channel.
    """

    caption: ClassVar[str] = (
        "The evaluate stage and a loop over single prompts, with equal outputs."
    )

    shape: Shape = "small"
    # of the random model; of 16 bits, rounding lets ways differ, and ``equal`` tells in how many outputs
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    pairs: tuple[Several, ...] = (
        8,
        56,
    )  # per prompt of key-value retrieval: short and long prompts
    examples: Several = 60
    new_tokens: Count = 8  # generated
    tokens: Tokens = 2000  # of a prompt in the shapes of the paper, about
    questions: Count = 1  # in these
    works: tuple[Work, ...] = tuple(FACTORS)  # these

    def files(self) -> tuple[Source, ...]:
        """See :meth:`Study.files`: the embedded model."""
        return (replace(checkpoint(f"{paths.EMBEDDED}tiny"), field="study.model"),)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Table ``throughput``: see :meth:`Timed.compared`; and the prompt tokens that a way was asked for
        (``tokens_asked``) and computed; of batches also ``operations``, as a run is told to take, and those
        of a second in units of 1e9, ``gflops``."""
        torch.manual_seed(0)
        tiny = load("tiny", device=run.runtime.device)
        device = torch_device(run.runtime.device)
        other = random_model(self.shape, device, self.dtype, tokenizer=tiny.tokenizer)
        rows: list[Row] = []
        with run.progress("works", 4 * len(self.pairs) + len(self.works)) as advance:
            for lm in (tiny, other):
                for pairs in self.pairs:
                    rows += self.replied(run, lm, pairs)
                    advance(2)
            for work in self.works:
                rows += self.shaped(run, other, work)
                advance(1)
        return {"throughput": table(rows)}

    def replied(self, run: Run, lm: LM, pairs: int) -> list[Row]:
        """Rows of the unmodified model at one number of pairs, generation first, then choices."""
        count = self.examples
        places = tuple(dict.fromkeys((0, pairs // 2, pairs - 1)))
        made: dict[str, Any] = {"records": "words", "prompt": "compact"}
        made |= {"pairs": pairs, "positions": places, "limit": -(-count // len(places))}
        generated = KVRetrieval(**made).examples("evaluation")[:count]
        values = [e.answers[0] for e in generated]
        asked = (
            tuple(values[(i + k) % count] for k in range(CHOICES)) for i in range(count)
        )
        chosen = [
            replace(e, choices=choices)
            for e, choices in zip(generated, asked, strict=True)
        ]
        return [
            *self.timed(
                run,
                lm,
                generated,
                {UNMODIFIED: Unmodified()},
                f"generate {self.new_tokens}",
            ),
            *self.timed(
                run, lm, chosen, {UNMODIFIED: Unmodified()}, f"{CHOICES} choices"
            ),
        ]

    def shaped(self, run: Run, lm: LM, work: Work) -> list[Row]:
        """Rows of the work of a table or figure of Yu et al. 2025."""
        channel = ScaleChannel.example(lm)
        methods = dict[str, Method]({UNMODIFIED: Unmodified()})
        methods |= {
            f"{factor:g}": replace(channel, factor=factor) for factor in FACTORS[work]
        }
        examples = [
            e
            for number in range(self.questions)
            for e in moved(lm, self.tokens, number)
        ]
        factors = f"unmodified and {len(methods) - 1} factor{'s' * (len(methods) > 2)}"
        return self.timed(
            run, lm, examples, methods, f"{work}: {factors}, {POSITIONS} positions"
        )

    def timed(
        self,
        run: Run,
        lm: LM,
        examples: Sequence[Example],
        methods: Mapping[str, Method],
        what: str,
    ) -> list[Row]:
        """Rows of each way to make the same outputs."""
        task = KVRetrieval(
            records="words", prompt="compact", max_new_tokens=self.new_tokens, pairs=8
        )
        plain = replace(run.runtime, share=None)
        shared = replace(run.runtime, share=run.runtime.share or Runtime.share)
        ways = {
            ALONE: partial(looped, lm, task, examples, methods),
            BATCHED: partial(
                staged, replace(run, task=task, runtime=plain), lm, examples, methods
            ),
            SHARED: partial(
                staged, replace(run, task=task, runtime=shared), lm, examples, methods
            ),
        }
        lengths = [len(lm.encode(e.prompt).ids) for e in examples]
        computed = dict[str, int]()
        shape = Costs.of(lm)
        told = dict[str, float]()
        for way, runtime in ((BATCHED, plain), (SHARED, shared)):
            asks, _ = asked_of(
                replace(run, task=task, runtime=runtime), lm, examples, methods
            )
            told[way] = shape.flops(asks.estimate("evaluate", answered=True))

        def counted(way: str) -> Outputs:
            before = lm.read
            found = ways[way]()
            computed[way] = lm.read - before
            return found

        work = f"{lm.name}: {len(examples)} prompts of {round(median(lengths))} tokens, {what}"
        exact = lm.model.dtype == torch.float32
        timed = {way: partial(counted, way) for way in ways}
        rows = self.compared(work, timed, lm.device, same=exact)
        asked = sum(lengths) * len(methods)
        for row in rows:
            way = row["way"]
            flops = told.get(row["way"], float("nan"))
            row |= {
                "tokens_asked": asked,
                "tokens_computed": computed[way],
                "operations": flops,
            }
            row["gflops"] = flops / row["seconds"] / 1e9
        return rows


def moved(lm: LM, tokens: int, number: int) -> list[Example]:
    """A question of about so many tokens, its gold pair at each of five positions."""
    draw = random.Random(f"posbench throughput {number}")
    words = [one + other for one in WORDS for other in WORDS]
    draw.shuffle(words)
    drawn = list(zip(words[::2], words[1::2], strict=True))
    some = len(lm.encode(compact_prompt(drawn[:64], words[0])[0]).ids)
    size = max(POSITIONS, round(64 * tokens / some))
    gold = drawn[0]
    others = drawn[1:size]
    examples = []
    for place in range(POSITIONS):
        at = place * (size - 1) // (POSITIONS - 1)
        prompt, spans = compact_prompt([*others[:at], gold, *others[at:]], gold[0])
        given: dict[str, Any] = {
            "gold_position": at,
            "items": spans,
            "cluster": str(number),
        }
        examples.append(
            Example(id=f"{number}-{at}", prompt=prompt, answers=(gold[1],), **given)
        )
    return examples


def staged(
    run: Run, lm: LM, examples: Sequence[Example], methods: Mapping[str, Method]
) -> Outputs:
    """Outputs as the evaluate stage makes them."""
    asks, compute = asked_of(run, lm, examples, methods)
    out: dict[tuple[str, str], str] = {}
    for batch in asks.batches:
        rows = zip(batch, compute(batch), strict=True)
        out |= {
            (ask.subject.name, ask.example.id): str(row["output"]) for ask, row in rows
        }
    return [out[name, e.id] for name in methods for e in examples]


def asked_of(
    run: Run, lm: LM, examples: Sequence[Example], methods: Mapping[str, Method]
) -> tuple[BatchPlan, Compute]:
    """The evaluate stage's plan."""
    run.lm = lm
    run.evaluation = list(examples)
    return plan_replies(
        [Subject(run, *each) for each in methods.items()], run.prompts.encode(examples)
    )


@inference_mode
def looped(
    lm: LM,
    task: KVRetrieval,
    examples: Sequence[Example],
    methods: Mapping[str, Method],
) -> Outputs:
    """The same outputs from stock transformers, prompt by prompt; each choice costs a forward of its own."""
    out = []
    tokenizer = lm.need_tokenizer()
    fixed = {
        "max_new_tokens": task.max_new_tokens,
        "do_sample": False,
        "pad_token_id": 0,
    }
    for method in methods.values():
        with method.applied(lm):
            for e in examples:
                prompt = tokenizer(e.prompt, return_tensors="pt")["input_ids"].to(
                    lm.device
                )
                lm.read += prompt.numel() * max(len(e.choices), 1)
                width = prompt.shape[1]
                totals = []
                for choice in e.choices:
                    ids = tokenizer(choice, add_special_tokens=False)["input_ids"]
                    given = torch.tensor([ids], device=lm.device)
                    logits = lm.model(torch.cat([prompt, given], dim=1)).logits[
                        0, width - 1 : -1
                    ]
                    totals.append(
                        float(logits.float().log_softmax(-1).gather(1, given.T).sum())
                    )
                if totals:
                    out.append(e.choices[totals.index(max(totals))])
                else:
                    new = lm.model.generate(
                        prompt, attention_mask=torch.ones_like(prompt), **fixed
                    )
                    out.append(
                        str(tokenizer.decode(new[0, width:], skip_special_tokens=True))
                    )
    return out
