"""The evaluate stage and the search against stock transformers and against the least that the work costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, ClassVar, Literal

from posbench import paths
from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.files.sources import Source, checkpoint_source
from posbench.late import inference_mode, pd, torch
from posbench.measure.losses import candidate_losses
from posbench.methods import Method, ScaleChannel, Unmodified
from posbench.model.lm import LM
from posbench.model.load import load, torch_device
from posbench.run.base import Run
from posbench.run.cost import Costs
from posbench.run.plan import Subject
from posbench.run.replies import ReplyBatches
from posbench.run.runtime import Runtime
from posbench.schema import Count, Several, Tokens
from posbench.stats.frames import UNMODIFIED
from posbench.stats.glance import noun_for
from posbench.studies.cost.packed_loop import PackedLoop, is_of_loop
from posbench.studies.cost.timing import (
    Shape,
    TimingStudy,
    random_model,
    with_environment,
)
from posbench.tasks import Example, KVRetrieval
from posbench.tasks.kv_retrieval import WORDS, compact_prompt

NUM_CHOICES = 4
NUM_POSITIONS = 5
TINY_TOKENS = 200
"""Tokens of the embedded model's prompts in the paper's shapes; it was trained on prompts of this length."""
SAMPLE_PAIRS = 64  # of which the tokens of a pair are estimated
Work = Literal["Table 1", "Figure 6"]
FACTORS: Mapping[Work, tuple[float, ...]] = {
    "Table 1": (0.0,),
    "Figure 6": (2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0),
}
"""Factors of scale_channel besides the unmodified model, each at five gold positions: Yu et al. 2025."""
ALONE = "one prompt at a time"
STOCK = "transformers, in batches by method"
BATCHED = "in batches"
SHARED = "in batches, prefills shared"
LIMIT = "loop by hand"
SEARCH_FACTORS = (0.5, 0.0, -0.5, -1.0)
LOSS_DIGITS = 3
"""Decimal places to which losses are compared."""
Outputs = list[str]


@dataclass(frozen=True, kw_only=True)
class Throughput(TimingStudy):
    """Generated and chosen replies of the embedded model and of one with random weights, in float32.

    Where prompts have nothing in common, and under the unmodified model alone, sharing prefills gains nothing
    and should cost nothing: the limit is a loop of stock transformers over the same batches. Works in the shape of Yu
    et al.'s Table 1 and Figure 6 have the same question at five gold positions, under the unmodified model and factors
    of scale_channel; the channel search has one prompt and many settings. The limit of these is a loop written by hand,
    :class:`posbench.studies.cost.packed_loop.PackedLoop`, for models of its form.

    Attributes:
        shape: Shape of the model with random weights.
        dtype: Of the random weights; in 16 bits rounding lets ways differ, and ``equal`` is the share of outputs
            that do not.
        pairs: Pairs per prompt of key-value retrieval: short and long prompts.
        examples: Number of these prompts.
        new_tokens: Generated tokens.
        tokens: Tokens of a prompt in the paper's shapes, roughly; at most :data:`TINY_TOKENS` for the embedded model.
        questions: Number of questions in these.
        works: The shapes of the paper to measure.
        candidates: Settings of scale_channel that the channel search compares; None: the search is not measured.
    """

    caption: ClassVar[str] = (
        "The evaluate stage and a loop over single prompts, with equal outputs."
    )

    shape: Shape = "small"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    pairs: tuple[Several, ...] = (8, 56)
    examples: Several = 60
    new_tokens: Count = 8
    tokens: Tokens = 2000
    questions: Count = 1
    works: tuple[Work, ...] = tuple(FACTORS)
    candidates: Count | None = 40

    def check(self, run: Run) -> None:
        """Refuse a study of nothing.

        Raises:
            UserError: No work is asked for.
        """
        if not (self.pairs or self.works or self.candidates):
            allowed = "a work here, in study.pairs or in study.candidates"
            hint = "leave one of the three at its default"
            raise UserError("study.works", [], allowed, hint)

    def files(self) -> tuple[Source, ...]:
        """See :meth:`Study.files`: the embedded model."""
        return (
            replace(checkpoint_source(f"{paths.EMBEDDED}tiny"), field="study.model"),
        )

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Time the evaluate stage and the loop.

        Returns:
            Table ``throughput``: rows of :meth:`TimingStudy.compared`; seconds divided by those at the work's limit
            (``over_limit``); the prompt tokens that a way was asked for (``tokens_asked``) and computed
            (``tokens_computed``); for batches also ``operations``, as a run's estimate counts them, and operations
            per second in units of 1e9, ``gflops``.
        """
        torch.manual_seed(0)
        tiny = load("tiny", device=run.runtime.device)
        device = torch_device(run.runtime.device)
        random_lm = random_model(
            self.shape, device, self.dtype, tokenizer=tiny.tokenizer
        )
        rows: list[Row] = []
        candidates = self.candidates if is_of_loop(random_lm.model) else None
        count = 4 * len(self.pairs) + 2 * len(self.works) + bool(candidates)
        with run.progress("works", count) as advance:
            for lm in (tiny, random_lm):
                for pairs in self.pairs:
                    rows += self.time_replies(run, lm, pairs)
                    advance(2)
                tokens = min(self.tokens, TINY_TOKENS) if lm is tiny else self.tokens
                for work in self.works:
                    rows += self.time_paper_work(run, lm, work, tokens)
                    advance(1)
            if candidates:
                rows += self.time_search(random_lm, candidates)
                advance(1)
        return {"throughput": with_environment(rows)}

    def time_replies(self, run: Run, lm: LM, pairs: int) -> list[Row]:
        """Time the unmodified model on prompts with ``pairs`` pairs.

        Returns:
            Rows for generated replies, then for choices by likelihood.
        """
        count = self.examples
        positions = tuple(dict.fromkeys((0, pairs // 2, pairs - 1)))
        task = KVRetrieval(
            records="words",
            prompt="compact",
            pairs=pairs,
            positions=positions,
            limit=-(-count // len(positions)),
        )
        generated = task.examples("evaluation")[:count]
        values = [example.answers[0] for example in generated]
        # The same prompts with choices: the right value and those of the next prompts.
        chosen = [
            replace(
                example,
                choices=tuple(values[(i + k) % count] for k in range(NUM_CHOICES)),
            )
            for i, example in enumerate(generated)
        ]
        methods = {UNMODIFIED: Unmodified()}
        work = f"generate {self.new_tokens}"
        return [
            *self.time_ways(run, lm, generated, methods, work),
            *self.time_ways(run, lm, chosen, methods, f"{NUM_CHOICES} choices"),
        ]

    def time_paper_work(self, run: Run, lm: LM, work: Work, tokens: int) -> list[Row]:
        """Time the prompts and factors that a table or figure of Yu et al. 2025 takes.

        Args:
            run: The run.
            lm: The model.
            work: The table or figure.
            tokens: Tokens of a prompt, about.

        Returns:
            A row for each way to compute them.
        """
        scale_channel = ScaleChannel.example(lm)
        methods: dict[str, Method] = {UNMODIFIED: Unmodified()}
        for factor in FACTORS[work]:
            methods[f"{factor:g}"] = replace(scale_channel, factor=factor)
        examples: list[Example] = []
        for question in range(self.questions):
            examples += moved_gold(lm, tokens, question)
        num_factors = len(methods) - 1
        factors = noun_for(num_factors, "factor")
        name = (
            f"{work}: unmodified and {num_factors} {factors}, {NUM_POSITIONS} positions"
        )
        return self.time_ways(run, lm, examples, methods, name)

    def time_search(self, lm: LM, count: int) -> list[Row]:
        """Time the losses of an answer under ``count`` candidates of the channel search.

        Returns:
            A row for the search, and one for a loop written by hand.
        """
        example = moved_gold(lm, self.tokens, 0)[0]
        pair = lm.answer_ids(example.prompt, example.answers[0])
        template = ScaleChannel.example(lm)
        candidates = [
            replace(
                template,
                channel=index // len(SEARCH_FACTORS),
                factor=SEARCH_FACTORS[index % len(SEARCH_FACTORS)],
            )
            for index in range(count)
        ]
        settings = [replace(template, factor=1.0), *candidates]

        def by_hand() -> list[float]:
            loop = PackedLoop(lm.model, [pair[0]], settings)
            losses: list[float] = loop.losses(pair[1]).tolist()
            return [round(loss, LOSS_DIGITS) for loss in losses]

        def searched() -> list[float]:
            losses: list[float] = candidate_losses(lm, [pair], candidates)[
                :, 0
            ].tolist()
            return [round(loss, LOSS_DIGITS) for loss in losses]

        rows = self.compared(
            f"{lm.name}: channel search, {count} candidates, a prompt of {len(pair[0])} tokens",
            {LIMIT: by_hand, SHARED: searched},
            lm.device,
            same=False,
        )
        return _with_limit(rows, LIMIT)

    def time_ways(
        self,
        run: Run,
        lm: LM,
        examples: Sequence[Example],
        methods: Mapping[str, Method],
        work: str,
    ) -> list[Row]:
        """Time each way to make the same outputs.

        Args:
            run: The run of the study; another task and runtime replace its own.
            lm: The model.
            examples: Examples to reply to.
            methods: Methods by name, each of which replies to all examples.
            work: End of the work's name.

        Returns:
            Rows of :meth:`measure`.
        """
        task = KVRetrieval(
            records="words", prompt="compact", max_new_tokens=self.new_tokens, pairs=8
        )
        runtimes = {
            BATCHED: replace(run.runtime, share=None),
            SHARED: replace(run.runtime, share=run.runtime.share or Runtime.share),
        }
        ways: dict[str, Callable[[], Outputs]] = {
            ALONE: partial(looped, lm, task, examples, methods)
        }
        operations: dict[str, float] = {}
        costs = Costs.of(lm)
        # The evaluate stage, without and with shared prefills.
        for way, runtime in runtimes.items():
            stage_run = replace(run, task=task, runtime=runtime)
            plan = stage_plan(replace(stage_run), lm, examples, methods)
            operations[way] = costs.flops(plan.estimate("evaluate", answered=True))
            ways[way] = partial(staged, stage_run, lm, examples, methods)
        # The fastest way to do this work that we know.
        limit = SHARED
        if not any(example.choices for example in examples):
            ways[STOCK] = partial(stock_batches, lm, task, examples, methods, run)
            limit = STOCK
            if len(methods) > 1 and is_of_loop(lm.model):
                ways[LIMIT] = partial(looped_by_hand, lm, task, examples, methods)
                limit = LIMIT
        tokens_computed: dict[str, int] = {}

        def count_tokens(way: str) -> Outputs:
            tokens_before = lm.tokens_read
            outputs = ways[way]()
            tokens_computed[way] = lm.tokens_read - tokens_before
            return outputs

        lengths = [len(lm.encode(example.prompt).ids) for example in examples]
        prompts = f"{len(examples)} prompts of {round(median(lengths))} tokens"
        rows = self.compared(
            f"{lm.name}: {prompts}, {work}",
            {way: partial(count_tokens, way) for way in ways},
            lm.device,
            same=lm.model.dtype == torch.float32,
        )
        for row in rows:
            way = row["way"]
            flops = operations.get(way, float("nan"))
            row["tokens_asked"] = sum(lengths) * len(methods)
            row["tokens_computed"] = tokens_computed[way]
            row["operations"] = flops
            row["gflops"] = flops / row["seconds"] / 1e9
        return _with_limit(rows, limit) if limit in (STOCK, LIMIT) else rows


def _with_limit(rows: list[Row], limit: str) -> list[Row]:
    """Rows with the seconds of each way divided by the limit's, ``over_limit``."""
    seconds = next(row["seconds"] for row in rows if row["way"] == limit)
    return [{**row, "over_limit": row["seconds"] / seconds} for row in rows]


def moved_gold(lm: LM, tokens: int, question: int) -> list[Example]:
    """Return a question with its gold pair at each of five positions, in prompts of about ``tokens`` tokens.

    Args:
        lm: The model, whose tokenizer counts.
        tokens: Tokens of a prompt.
        question: Number of the question; seeds its words.

    Raises:
        UserError: There are not so many pairs of words.
    """
    rng = random.Random(f"posbench throughput {question}")
    words = [first + second for first in WORDS for second in WORDS]
    rng.shuffle(words)
    pairs = list(zip(words[::2], words[1::2], strict=True))
    sample, _ = compact_prompt(pairs[:SAMPLE_PAIRS], words[0])
    sample_tokens = len(lm.encode(sample).ids)
    num_pairs = max(NUM_POSITIONS, round(SAMPLE_PAIRS * tokens / sample_tokens))
    if num_pairs > len(pairs):
        most = int(len(pairs) * sample_tokens / SAMPLE_PAIRS)
        allowed = f"at most {most:,} tokens, as there are {len(pairs):,} pairs of words"
        raise UserError("study.tokens", tokens, allowed, "lower study.tokens")
    gold = pairs[0]
    distractors = pairs[1:num_pairs]
    key, value = gold
    examples = []
    for i in range(NUM_POSITIONS):
        position = i * (num_pairs - 1) // (NUM_POSITIONS - 1)
        items = [*distractors[:position], gold, *distractors[position:]]
        prompt, spans = compact_prompt(items, key)
        examples.append(
            Example(
                id=f"{question}-{position}",
                prompt=prompt,
                answers=(value,),
                gold_position=position,
                items=spans,
                cluster=str(question),
            )
        )
    return examples


def staged(
    run: Run, lm: LM, examples: Sequence[Example], methods: Mapping[str, Method]
) -> Outputs:
    """Return the outputs as the evaluate stage makes them, all examples under the first method, then the second, ..."""
    plan = stage_plan(run, lm, examples, methods)
    outputs: dict[tuple[str, str], str] = {}
    for batch in plan.batches:
        for request, row in zip(batch, plan.answer(batch), strict=True):
            outputs[request.subject.name, request.example.id] = str(row["output"])
    return [outputs[name, example.id] for name in methods for example in examples]


def stage_plan(
    run: Run, lm: LM, examples: Sequence[Example], methods: Mapping[str, Method]
) -> ReplyBatches:
    """Return the evaluate stage's plan for a model and examples; both are put into the run."""
    run.lm = lm
    run.evaluation = list(examples)
    subjects = [Subject(run, name, method) for name, method in methods.items()]
    return ReplyBatches(subjects, examples, run.prompts.encode(examples))


@inference_mode
def looped(
    lm: LM,
    task: KVRetrieval,
    examples: Sequence[Example],
    methods: Mapping[str, Method],
) -> Outputs:
    """Return the same outputs as :func:`staged` from stock transformers, prompt by prompt.

    Each choice of a question costs a forward of its own.

    Args:
        lm: The model.
        task: Says how a prompt is answered.
        examples: The prompts.
        methods: The methods, by name.

    Returns:
        The output of each prompt, method after method.
    """
    outputs = []
    for method in methods.values():
        with method.applied(lm):
            for example in examples:
                outputs.append(_stock_reply(lm, task, example))
    return outputs


@inference_mode
def stock_batches(
    lm: LM,
    task: KVRetrieval,
    examples: Sequence[Example],
    methods: Mapping[str, Method],
    run: Run,
) -> Outputs:
    """Return the same replies as :func:`staged` from stock transformers in padded batches, longest prompts first.

    Args:
        lm: The model.
        task: Limits the replies.
        examples: The prompts.
        methods: The methods, by name.
        run: Has the size of a batch.

    Returns:
        The reply to each prompt in the given order, method after method.
    """
    tokenizer = lm.need_tokenizer()
    outputs = []
    for method in methods.values():
        replies: dict[int, str] = {}
        order = sorted(range(len(examples)), key=lambda i: -len(examples[i].prompt))
        with method.applied(lm):
            for start in range(0, len(order), run.runtime.batch_size):
                batch = order[start : start + run.runtime.batch_size]
                prompts = tokenizer(
                    [examples[i].prompt for i in batch],
                    return_tensors="pt",
                    padding=True,
                    padding_side="left",
                ).to(lm.device)
                lm.tokens_read += int(prompts["attention_mask"].sum())
                tokens = lm.model.generate(
                    input_ids=prompts["input_ids"],
                    attention_mask=prompts["attention_mask"],
                    max_new_tokens=task.max_new_tokens,
                    do_sample=False,
                    pad_token_id=tokenizer.pad_token_id,
                )
                texts = tokenizer.batch_decode(
                    tokens[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True
                )
                replies.update(zip(batch, texts, strict=True))
        outputs += [replies[index] for index in range(len(examples))]
    return outputs


def looped_by_hand(
    lm: LM,
    task: KVRetrieval,
    examples: Sequence[Example],
    methods: Mapping[str, Method],
) -> Outputs:
    """Return the same replies as :func:`staged` from :class:`PackedLoop`.

    Methods are the unmodified model and factors of one scale_channel.
    """
    tokenizer = lm.need_tokenizer()
    scaled = next(m for m in methods.values() if isinstance(m, ScaleChannel))
    settings = [
        method if isinstance(method, ScaleChannel) else scaled.neutral()
        for method in methods.values()
    ]
    prompts = [tokenizer(example.prompt)["input_ids"] for example in examples]
    loop = PackedLoop(lm.model, prompts, settings)
    replies = loop.replies(task.max_new_tokens).unflatten(0, (len(examples), -1))
    lm.tokens_read += loop.tokens
    outputs = []
    for replies_of_method in replies.transpose(0, 1).tolist():
        for ids in replies_of_method:
            end = (
                ids.index(tokenizer.eos_token_id)
                if tokenizer.eos_token_id in ids
                else None
            )
            outputs.append(tokenizer.decode(ids[:end], skip_special_tokens=True))
    return outputs


def _stock_reply(lm: LM, task: KVRetrieval, example: Example) -> str:
    """Return the most likely choice of an example that has choices, else the generated reply."""
    tokenizer = lm.need_tokenizer()
    prompt = tokenizer(example.prompt, return_tensors="pt")["input_ids"].to(lm.device)
    lm.tokens_read += prompt.numel() * max(len(example.choices), 1)
    length = prompt.shape[1]
    if not example.choices:
        output = lm.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=task.max_new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        reply: Any = tokenizer.decode(output[0, length:], skip_special_tokens=True)
        return str(reply)
    nats = []
    for choice in example.choices:
        ids = tokenizer(choice, add_special_tokens=False)["input_ids"]
        choice_ids = torch.tensor([ids], device=lm.device)
        logits = lm.model(torch.cat([prompt, choice_ids], dim=1)).logits
        log_probs = logits[0, length - 1 : -1].float().log_softmax(-1)
        nats.append(float(log_probs.gather(1, choice_ids.T).sum()))
    return example.choices[nats.index(max(nats))]
