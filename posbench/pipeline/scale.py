"""What the papers' experiments cost on large models: the table of docs/scale.md, by the estimate of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import yaml
from rich.console import Console

from posbench.files.markdown import markdown
from posbench.late import torch, transformers
from posbench.methods.unmodified import Unmodified
from posbench.model.encode import Encoded
from posbench.model.lm import LM
from posbench.pipeline.compose import Composed, compose
from posbench.pipeline.config import Config, check
from posbench.pipeline.estimate import estimate_run
from posbench.pipeline.prepare import build_run
from posbench.run.cost import Costs, WorkEstimate
from posbench.stats.frames import UNMODIFIED
from posbench.tasks import Example, Task
from posbench.tasks.base import Split
from posbench.tasks.items import Placed, joined

GIVEN = yaml.safe_load(Path(__file__).with_name("scale.yaml").read_text())
NAMES = tuple(GIVEN["models"])
MODEL = "model=vicuna_7b_16k"
MANY = 8
SHARDED = ("intervene", "evaluate")
"""Stages whose prompts processes share out; another stage of a job is one process."""
FEW = 6
"""Questions that are made for the stages of a run: the others have the same form."""


class Outline(LM):
    """A model without weights and without a tokenizer: every so many characters are a token."""

    rate: float = 1.0  # tokens per character

    def need_tokenizer(self) -> Any:
        """What gives tokens and spells nothing."""
        return lambda text, **_: {"input_ids": tokens(text, self.rate)}

    def encode(
        self, prompt: str, *, reserve: int = 0, most: int | None = None, **_: Any
    ) -> Encoded:  # type: ignore[override]
        """The prompt, cut in the middle to what fits."""
        ids = tokens(prompt, self.rate)
        size = min(len(ids), most or len(ids), self.context_window - reserve)
        return Encoded(
            [*ids[: size - size // 2], *ids[len(ids) - size // 2 :]], [], prompt
        )


@lru_cache(128)
def tokens(text: str, rate: float) -> list[int]:
    """Pieces of equal length, as numbers."""
    count = max(round(len(text) * rate), 1)
    ends = [round(i * len(text) / count) for i in range(count + 1)]
    return [crc32(text[a:b].encode()) for a, b in pairwise(ends)]


@dataclass(frozen=True, kw_only=True)
class StandIn(Task):
    """Prompts of a benchmark's form and length, of random letters."""

    asked: Any  # the task that it stands for
    form: Mapping[str, Any] = field(default_factory=dict)

    def examples(self, split: Split) -> list[Example]:
        """See :meth:`Task.examples`."""
        form = self.form
        asked = self.asked
        if "item" not in form:
            each = form["questions"] // form.get("groups", form["questions"])
            return [
                self._example(
                    f"{n}",
                    letters(n // each, form.get("common", 0))
                    + letters(f"own {n}", form["own"]),
                )
                for n in range(form["questions"])
            ]
        count = asked.limit
        places = asked.gold_positions
        if split == "calibration":
            count = asked.calibration_examples
            places = places[:1]
        found = []
        for n in range(count):
            first, *others = [
                letters((split, n, i), form["item"]) for i in range(asked.documents)
            ]
            for place in places:
                every = [*others[:place], first, *others[place:]]
                prompt, items = joined(
                    letters(0, form["common"]),
                    every,
                    "\n",
                    letters(("own", n), form["own"]),
                )
                found.append(
                    self._example(
                        f"{n}-{place}",
                        prompt,
                        gold_position=place,
                        items=items,
                        cluster=f"{n}",
                    )
                )
        return found

    def _example(self, name: str, prompt: str, **more: Any) -> Example:
        choices = tuple("ABCD") if self.form.get("choices") else ()
        return Example(
            id=name, prompt=prompt, answers=("answer",), choices=choices, **more
        )

    def score(self, example: Example, text: str) -> dict[str, float]:
        """Nothing."""
        return {}


@cache
def letters(seed: object, count: int) -> str:
    """Random letters of a seed."""
    return (sha256(str(seed).encode()).hexdigest() * (count // 64 + 1))[:count]


@cache
def outline(name: str, rate: float) -> Outline:
    """A model of the page without its weights."""
    given = {
        "max_position_embeddings": GIVEN["window"],
        **GIVEN["models"][name]["shape"],
    }
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model("llama", **given)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16
        )
    lm = Outline(model.eval(), None, name, GIVEN["window"])
    lm.rate = rate
    return lm


@cache
def costs(name: str) -> Costs:
    """The numbers of such a model."""
    return Costs.of(outline(name, 1.0))


@cache
def configs(experiment: str) -> list[Config]:
    """The jobs of an experiment with the paper's settings, their prompts such as are here, few of them."""
    jobs = list[Composed]()
    found = []
    compose(
        [f"experiment={experiment}", MODEL, *GIVEN["experiments"][experiment]],
        jobs.append,
    )
    for job in jobs:
        config = check(job.raw, job.typed, job.folders)
        task: Any = config.task
        if isinstance(task, Placed):
            task = replace(
                task,
                limit=min(getattr(config.study, "examples", None) or FEW, task.limit),
            )
        if form := GIVEN["prompts"].get(task.name):
            same = {f.name: getattr(task, f.name) for f in fields(Task)}
            new = form.get("new", task.max_new_tokens)
            task = StandIn(**{**same, "max_new_tokens": new}, asked=task, form=form)
        found.append(replace(config, task=task))
    return found


def works(experiment: str, model: str) -> list[WorkEstimate]:
    """What an experiment asks of a model, of jobs that differ in their method in one pass."""
    jobs = configs(experiment)
    found = list[WorkEstimate]()
    grid = jobs[0].experiment.grid if jobs[0].experiment else {}
    alike = len(jobs) > 1 and all(
        key.startswith("method") for key in grid if key != "model"
    )
    for config in jobs[:1] if alike else jobs:
        text = (
            GIVEN["prompts"]
            .get(config.task.name, {"text": "uuid"})
            .get("text", "english")
        )
        config = replace(
            config, runtime=replace(config.runtime, **GIVEN["models"][model]["runtime"])
        )
        run = build_run(config, Console(quiet=True))
        run.lm = outline(model, GIVEN["tokens"][text])
        methods = (
            {str(n): job.method_under_test().trial() for n, job in enumerate(jobs)}
            if alike
            else {}
        )
        for each in estimate_run(
            config, run, {UNMODIFIED: Unmodified(), **methods} if alike else None
        ):
            found.append(each.times(_many(config, each.stage) if each.prompts else 1))
    return found


def _many(config: Config, stage: str) -> float:
    """How many times as many questions the experiment asks as were looked at."""
    asked: Any = getattr(config.task, "asked", config.task)
    if not isinstance(asked, Placed) or stage not in SHARDED:
        return 1
    whole: int = config.raw["task"]["limit"]
    return (
        min(whole, config.runtime.intervene_examples) if stage == "intervene" else whole
    ) / asked.limit


def row(experiment: str) -> list[str]:
    """Name, tokens asked, and by model tokens computed, operations, memory, hours on one and on eight."""
    cells = [f"[`{experiment}`](../experiments/{experiment}.yaml)"]
    for name in NAMES:
        every = works(experiment, name)
        shape = costs(name)
        devices = max(shape.devices(w) for w in every)
        hours = sum(shape.seconds(w) for w in every) / 3600
        alone = sum(shape.seconds(w) for w in every if w.stage not in SHARDED) / 3600
        processes = MANY // devices
        jobs = len(configs(experiment))
        eight = (hours - alone) / processes + alone / jobs * -(-jobs // processes)
        if name == NAMES[0]:
            cells += [
                f"{sum(w.prompts for w in every):,}",
                f"{sum(w.tokens for w in every) / 1e6:,.1f}",
            ]
        size = max(map(shape.memory_bytes, every)) / 1e9
        flops = sum(map(shape.flops, every)) / 1e15
        cells.append(
            f"{sum(w.computed_tokens for w in every) / 1e6:,.1f} M, {flops:,.0f} PFLOP, {size:.0f} GB"
        )
        cells.append(
            f"{_hours(hours) if devices == 1 else f'no ({devices})'} / {_hours(eight)}"
        )
    return cells


def _hours(hours: float) -> str:
    return "<0.01" if hours < 0.01 else f"{hours:.2g}" if hours < 10 else f"{hours:.0f}"


def page() -> str:
    """The table, and what it leaves out."""
    header = ["experiment", "prompts", "M tokens asked"]
    for name in NAMES:
        header += [name, f"{name}: hours on one / eight"]
    untold = "\n".join(
        f"- {', '.join(f'`{n}`' for n in names.split(', '))}: {why}."
        for names, why in GIVEN["untold"].items()
    )
    table = markdown(header, [row(name) for name in GIVEN["experiments"]])
    return f"{table}\n\nNot estimated:\n\n{untold}"
