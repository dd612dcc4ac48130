"""The table of docs/scale.md: what the papers' experiments cost on large models, by the estimate of a run.

python tools/scale.py    # writes the table into docs/scale.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import yaml
from rich.console import Console

from posbench.files.atomic import write_text
from posbench.files.markdown import markdown
from posbench.late import torch, transformers
from posbench.methods.base import Method
from posbench.methods.unmodified import Unmodified
from posbench.model.encode import Encoded
from posbench.model.lm import LM
from posbench.pipeline.compose import compose
from posbench.pipeline.config import Config, check_config
from posbench.pipeline.estimate import estimate_run
from posbench.pipeline.prepare import build_run
from posbench.run.cost import Costs, WorkEstimate
from posbench.stats.frames import UNMODIFIED
from posbench.tasks import Example, Task
from posbench.tasks.base import Split
from posbench.tasks.items import GoldPositionTask, joined
from tools.pages import between_marks

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
SETTINGS = yaml.safe_load(Path(__file__).with_name("scale.yaml").read_text())
MODELS = tuple(SETTINGS["models"])
MODEL_OVERRIDE = "model=vicuna_7b_16k"
DEVICES = 8
SHARDED = ("intervene", "evaluate")
"""Stages whose prompts processes share out; another stage of a job is one process."""
SAMPLE_QUESTIONS = 6
"""Questions that are made for the stages of a run: the others have the same form."""


class Outline(LM):
    """A model without weights and without a tokenizer: every so many characters are a token."""

    tokens_per_character: float = 1.0

    def need_tokenizer(self) -> Any:
        """Return what gives tokens and spells nothing."""
        return lambda text, **_: {"input_ids": tokens(text, self.tokens_per_character)}

    def encode_whole(
        self, prompts: Sequence[str], forms: Sequence[Mapping[str, Any]]
    ) -> list[Encoded]:
        """Return the prompts, however long."""
        return [
            Encoded(tokens(prompt, self.tokens_per_character), prompt)
            for prompt in prompts
        ]

    def fit(  # type: ignore[override]
        self,
        encoded: Encoded,
        form: Mapping[str, Any],
        *,
        reserve: int = 0,
        most: int | None = None,
        **_: Any,
    ) -> Encoded:
        """Return the prompt, cut in the middle to what fits."""
        ids = encoded.ids
        length = min(len(ids), most or len(ids), self.context_window - reserve)
        head = ids[: length - length // 2]
        tail = ids[len(ids) - length // 2 :]
        return Encoded([*head, *tail], encoded.text)


@lru_cache(128)
def tokens(text: str, tokens_per_character: float) -> list[int]:
    """Return pieces of a text of equal length, as numbers."""
    count = max(round(len(text) * tokens_per_character), 1)
    ends = [round(index * len(text) / count) for index in range(count + 1)]
    return [crc32(text[start:end].encode()) for start, end in pairwise(ends)]


@dataclass(frozen=True, kw_only=True)
class StandIn(Task):
    """Prompts of a benchmark's form and length, of random letters.

    Attributes:
        original: The task that it stands for.
        form: Numbers of questions and of characters, see ``scale.yaml``.
    """

    original: Any
    form: Mapping[str, Any] = field(default_factory=dict)

    def examples(self, split: Split) -> list[Example]:
        """See :meth:`Task.examples`."""
        if "item" in self.form:
            return self._questions_with_items(split)
        return self._questions()

    def _questions(self) -> list[Example]:
        """Questions without items; those of a group begin with the same letters."""
        form = self.form
        count = form["questions"]
        group_size = count // form.get("groups", count)
        examples = []
        for number in range(count):
            common = letters(number // group_size, form.get("common", 0))
            own = letters(f"own {number}", form["own"])
            examples.append(self._example(f"{number}", common + own))
        return examples

    def _questions_with_items(self, split: Split) -> list[Example]:
        """Questions whose first item stands at each gold position."""
        form = self.form
        original = self.original
        count = original.limit
        positions = original.gold_positions
        if split == "calibration":
            count = original.calibration_examples
            positions = positions[:1]
        examples = []
        for number in range(count):
            gold, *others = [
                letters((split, number, index), form["item"])
                for index in range(original.documents)
            ]
            instruction = letters(0, form["common"])
            question = letters(("own", number), form["own"])
            for position in positions:
                texts = [*others[:position], gold, *others[position:]]
                prompt, items = joined(instruction, texts, "\n", question)
                examples.append(
                    self._example(
                        f"{number}-{position}",
                        prompt,
                        gold_position=position,
                        items=items,
                        cluster=f"{number}",
                    )
                )
        return examples

    def _example(self, name: str, prompt: str, **fields: Any) -> Example:
        choices = tuple("ABCD") if self.form.get("choices") else ()
        return Example(
            id=name, prompt=prompt, answers=("answer",), choices=choices, **fields
        )

    def score(self, example: Example, text: str) -> dict[str, float]:
        """Return no score."""
        return {}


@cache
def letters(seed: object, count: int) -> str:
    """Return random letters of a seed."""
    return (sha256(str(seed).encode()).hexdigest() * (count // 64 + 1))[:count]


@cache
def outline(name: str, tokens_per_character: float) -> Outline:
    """Return a model of the page without its weights."""
    window = SETTINGS["window"]
    shape = {"max_position_embeddings": window, **SETTINGS["models"][name]["shape"]}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model("llama", **shape)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16
        )
    lm = Outline(model.eval(), None, name, window)
    lm.tokens_per_character = tokens_per_character
    return lm


@cache
def costs(name: str) -> Costs:
    """Return the sizes of a model of the page."""
    return Costs.of(outline(name, 1.0))


@cache
def configs(experiment: str) -> list[Config]:
    """Return the jobs of an experiment with the paper's settings, with few prompts, and stand-ins for texts."""
    settings = SETTINGS["experiments"][experiment]
    jobs = compose([f"experiment={experiment}", MODEL_OVERRIDE, *settings])
    fitted = []
    for job in jobs.composed:
        config = check_config(job)
        task: Any = config.task
        if isinstance(task, GoldPositionTask):
            sample = getattr(config.study, "examples", None) or SAMPLE_QUESTIONS
            task = replace(task, limit=min(sample, task.limit))
        form = SETTINGS["prompts"].get(task.name)
        if form:
            task = _stand_in(task, form)
        fitted.append(replace(config, task=task))
    return fitted


def _stand_in(task: Any, form: Mapping[str, Any]) -> StandIn:
    common_fields = {f.name: getattr(task, f.name) for f in fields(Task)}
    common_fields["max_new_tokens"] = form.get("new", task.max_new_tokens)
    return StandIn(**common_fields, original=task, form=form)


def works(experiment: str, model: str) -> list[WorkEstimate]:
    """Estimate what an experiment asks of a model; jobs that differ in their method share one pass."""
    jobs = configs(experiment)
    grid = jobs[0].experiment.grid if jobs[0].experiment else {}
    methods_only = all(key.startswith("method") for key in grid if key != "model")
    shared = len(jobs) > 1 and methods_only
    methods: dict[str, Method] | None = None
    if shared:
        methods = {UNMODIFIED: Unmodified()}
        for number, job in enumerate(jobs):
            methods[str(number)] = job.method_under_test().trial()
        jobs = jobs[:1]
    estimates = list[WorkEstimate]()
    for job in jobs:
        runtime = replace(job.runtime, **SETTINGS["models"][model]["runtime"])
        config = replace(job, runtime=runtime)
        run = build_run(config, Console(quiet=True))
        form = SETTINGS["prompts"].get(config.task.name, {"text": "uuid"})
        run.lm = outline(model, SETTINGS["tokens"][form.get("text", "english")])
        for work in estimate_run(config, run, methods):
            factor = _questions_per_sample(config, work.stage) if work.prompts else 1
            estimates.append(work.times(factor))
    return estimates


def _questions_per_sample(config: Config, stage: str) -> float:
    """How many times as many questions the experiment asks as the sample has."""
    task: Any = getattr(config.task, "original", config.task)
    if not isinstance(task, GoldPositionTask) or stage not in SHARDED:
        return 1
    questions: int = config.raw["task"]["limit"]
    if stage == "intervene":
        questions = min(questions, config.runtime.intervene_examples)
    return questions / task.limit


def row(experiment: str) -> list[str]:
    """Return name, tokens asked, and by model tokens computed, operations, memory, hours on one and on eight."""
    facts: Any = configs(experiment)[0].experiment
    file = f"experiments/{facts.paper}/experiment/{experiment}.yaml"
    cells = [f"[`{experiment}`](../{file})"]
    for name in MODELS:
        estimates = works(experiment, name)
        if name == MODELS[0]:
            prompts = sum(work.prompts for work in estimates)
            asked_millions = sum(work.tokens for work in estimates) / 1e6
            cells += [f"{prompts:,}", f"{asked_millions:,.1f}"]
        cells += _model_cells(name, estimates, num_jobs=len(configs(experiment)))
    return cells


def _model_cells(
    name: str, estimates: list[WorkEstimate], num_jobs: int
) -> tuple[str, str]:
    """Tokens, operations and memory on a model; and hours on one device and on eight."""
    model = costs(name)
    devices = max(model.devices(work) for work in estimates)
    hours = sum(model.seconds(work) for work in estimates) / 3600
    unsharded_seconds = sum(
        model.seconds(work) for work in estimates if work.stage not in SHARDED
    )
    unsharded_hours = unsharded_seconds / 3600
    processes = DEVICES // devices
    rounds = -(-num_jobs // processes)
    sharded_hours = (hours - unsharded_hours) / processes
    hours_on_eight = sharded_hours + unsharded_hours / num_jobs * rounds
    computed_millions = sum(work.computed_tokens for work in estimates) / 1e6
    petaflops = sum(model.flops(work) for work in estimates) / 1e15
    gigabytes = max(model.memory_bytes(work) for work in estimates) / 1e9
    on_one = _hours(hours) if devices == 1 else f"no ({devices})"
    return (
        f"{computed_millions:,.1f} M, {petaflops:,.0f} PFLOP, {gigabytes:.0f} GB",
        f"{on_one} / {_hours(hours_on_eight)}",
    )


def _hours(hours: float) -> str:
    if hours < 0.01:
        return "<0.01"
    return f"{hours:.2g}" if hours < 10 else f"{hours:.0f}"


def page() -> str:
    """Return the table, and what it leaves out."""
    header = ["experiment", "prompts", "M tokens asked"]
    for name in MODELS:
        header += [name, f"{name}: hours on one / eight"]
    table = markdown(header, [row(name) for name in SETTINGS["experiments"]])
    left_out = []
    for names, reason in SETTINGS["untold"].items():
        listed = ", ".join(f"`{name}`" for name in names.split(", "))
        left_out.append(f"- {listed}: {reason}.")
    return "\n\n".join([table, "Not estimated:", "\n".join(left_out)])


if __name__ == "__main__":
    write_text(PAGE, between_marks(PAGE, "scale", page()))
