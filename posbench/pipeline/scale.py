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
from posbench.pipeline.config import Config, check, trial
from posbench.pipeline.estimate import work
from posbench.pipeline.ready import prepared
from posbench.run.cost import H100, Costs, Work
from posbench.stats.frames import UNMODIFIED
from posbench.tasks import Example, Task
from posbench.tasks.base import Split
from posbench.tasks.items import Placed, joined

GIVEN = yaml.safe_load(Path(__file__).with_name("scale.yaml").read_text())
NAMES, MODEL, MANY = tuple(GIVEN["models"]), "model=vicuna_7b_16k", 8
FEW = 6
"""Questions that are looked at: the others have the same form."""


class Outline(LM):
    """A model without weights and without a tokenizer: every so many characters are a token."""

    rate: float = 1.0  # tokens per character

    def need_tokenizer(self) -> Any:
        """What gives tokens and spells nothing."""
        return lambda text, **_: {"input_ids": tokens(text, self.rate)}

    def encode(self, prompt: str, *, reserve: int = 0, most: int | None = None, **_: Any) -> Encoded:  # type: ignore[override]
        """The prompt, cut in the middle to what fits."""
        ids = tokens(prompt, self.rate)
        size = min(len(ids), most or len(ids), self.context_window - reserve)
        return Encoded([*ids[: size - size // 2], *ids[len(ids) - size // 2 :]], [], prompt)


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
        form, asked = self.form, self.asked
        if "item" not in form:
            each = form["questions"] // form.get("groups", form["questions"])
            return [
                self._example(
                    f"{n}", letters(n // each, form.get("common", 0)) + letters(f"own {n}", form["own"])
                )
                for n in range(form["questions"])
            ]
        count, places = asked.limit, asked.gold_positions
        if split == "calibration":
            count, places = asked.calibration_examples, places[:1]
        found = []
        for n in range(count):
            first, *others = [letters((split, n, i), form["item"]) for i in range(asked.documents)]
            for place in places:
                every = [*others[:place], first, *others[place:]]
                prompt, items = joined(
                    letters(0, form["common"]), every, "\n", letters(("own", n), form["own"])
                )
                found.append(
                    self._example(f"{n}-{place}", prompt, gold_position=place, items=items, cluster=f"{n}")
                )
        return found

    def _example(self, name: str, prompt: str, **more: Any) -> Example:
        choices = tuple("ABCD") if self.form.get("choices") else ()
        return Example(id=name, prompt=prompt, answers=("answer",), choices=choices, **more)

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
    given = {"max_position_embeddings": GIVEN["window"], **GIVEN["models"][name]["shape"]}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model("llama", **given)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lm = Outline(model.eval(), None, name, GIVEN["window"])
    lm.rate = rate
    return lm


@cache
def configs(experiment: str) -> list[Config]:
    """The jobs of an experiment with the paper's settings, their prompts such as are here, few of them."""
    jobs, found = list[Composed](), []
    compose([f"experiment={experiment}", MODEL, *GIVEN["experiments"][experiment]], jobs.append)
    for job in jobs:
        config = check(job.raw, job.typed, job.folders)
        task: Any = config.task
        if isinstance(task, Placed):
            task = replace(task, limit=min(FEW, task.limit))
        if form := GIVEN["prompts"].get(task.name):
            same = {f.name: getattr(task, f.name) for f in fields(Task)}
            task = StandIn(
                **{**same, "max_new_tokens": form.get("new", task.max_new_tokens)}, asked=task, form=form
            )
        found.append(replace(config, task=task))
    return found


def works(experiment: str, model: str) -> list[Work]:
    """What an experiment asks of a model, of jobs that differ in their method in one pass."""
    jobs, found = configs(experiment), list[Work]()
    grid = jobs[0].experiment.grid if jobs[0].experiment else {}
    alike = len(jobs) > 1 and all(key.startswith("method") for key in grid if key != "model")
    for config in jobs[:1] if alike else jobs:
        text = GIVEN["prompts"].get(config.task.name, {"text": "uuid"}).get("text", "english")
        config = replace(config, runtime=replace(config.runtime, **GIVEN["models"][model]["runtime"]))
        run = prepared(config, {}, (), Console(quiet=True))
        run.lm = outline(model, GIVEN["tokens"][text])
        methods = {str(n): trial(job) for n, job in enumerate(jobs)} if alike else {}
        for each in work(config, run, {UNMODIFIED: Unmodified(), **methods} if alike else None):
            found.append(each.times(_many(config, each.stage) if each.prompts else 1))
    return found


def _many(config: Config, stage: str) -> float:
    """How many times as many questions the experiment asks as were looked at."""
    asked: Any = getattr(config.task, "asked", config.task)
    whole: int = getattr(config.raw["task"], "limit", 0) or config.raw["task"].get("limit", 0)
    if not isinstance(asked, Placed) or stage.startswith("search"):
        return 1
    own = getattr(config.study, "examples", None) if stage.startswith("study") else None
    most = config.runtime.intervene_examples if stage == "intervene" else own
    return min(whole, most or whole) / asked.limit


def row(experiment: str) -> list[str]:
    """Name, tokens asked, and by model tokens computed, operations, memory, hours on one and on eight."""
    cells = [f"[`{experiment}`](../experiments/{experiment}.yaml)"]
    for name in NAMES:
        every, shape = works(experiment, name), Costs.of(outline(name, 1.0))
        devices = max(shape.devices(w, H100) for w in every)
        hours = sum(shape.seconds(w, H100) for w in every) / 3600
        if name == NAMES[0]:
            cells += [f"{sum(w.prompts for w in every):,}", f"{sum(w.tokens for w in every) / 1e6:,.1f}"]
        size = max(map(shape.bytes, every)) / 1e9
        flops = sum(map(shape.flops, every)) / 1e15
        cells.append(f"{sum(w.computed for w in every) / 1e6:,.1f} M, {flops:,.0f} PFLOP, {size:.0f} GB")
        one, eight = (f"{h:.0f}" if h >= 10 else f"{h:.2g}" for h in (hours, hours / (MANY // devices)))
        cells.append(f"{one if devices == 1 else f'no ({devices})'} / {eight}")
    return cells


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
