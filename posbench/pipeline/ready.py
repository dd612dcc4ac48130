"""Before a run: every obstacle at once, and defaults that fit the model's context window.

What the user typed, and what an experiment asks, is never changed: it is refused with the number that would
fit. Nothing here reads weights.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from posbench import paths
from posbench.errors import Faults, UserError
from posbench.files.digests import Content, in_place
from posbench.files.sources import cached, listing
from posbench.late import transformers
from posbench.measure import served
from posbench.measure.replies import encode_longest, encode_whole, room
from posbench.model.encode import Encoder
from posbench.model.endpoint import text_encoder
from posbench.model.load import Reader, outline, reader
from posbench.pipeline.compose import Composed
from posbench.pipeline.config import Config, check
from posbench.pipeline.identity import files
from posbench.run.base import Run
from posbench.tasks import Example, Task
from posbench.tasks.base import EvaluationOnly
from posbench.tasks.items import Placed

LONGEST = 16
DRAWN = 8
"""Prompts whose tokens are counted, the longest; of so many per gold position, where the task draws them."""
SLACK = 5.0
"""Standard deviations of their lengths that stay free: another prompt may be longer."""
ITEMS = 5
"""Items of which a prompt has at least so many, where shorter ones do that: positions need room."""
UNKNOWN = 0.1
"""Share of unknown tokens in a prompt from which a tokenizer does not spell it."""


@dataclass(frozen=True)
class Ready:
    """A config that can run, the changes of its defaults in words, and the checkpoint without its weights."""

    config: Config
    said: tuple[str, ...] = ()
    reader: Reader | None = None


def ready(composed: Composed, download: bool = True) -> Ready:
    """Check a composed config, look for all that it reads, and fit its defaults to the model.

    Args:
        composed: The config as composed.
        download: Whether what is not on this machine may be downloaded; else it is an obstacle.

    Raises:
        UserError: What stands in the way, all of it.
    """
    faults = Faults()
    config = None
    with faults.collecting():
        config = check(composed.raw, composed.typed, composed.folders, faults)
    if config is None:
        faults.raise_any()
    assert config is not None, "check gives a config or a fault"
    with faults.collecting():
        need_words(config)
    taken = {fault.field.partition(".")[0] for fault in faults.found}
    for source in files(config):
        if (
            source.kind != "path"
            and source.field.partition(".")[0] not in taken
            and cached(source) is None
        ):
            with faults.collecting():
                if download:
                    listing(source)  # whether it can be downloaded
                else:
                    hint = f"posbench fetch {' '.join(composed.overrides)}"
                    allowed = f"what is on this machine; this is not{source.about and f' ({source.about})'}"
                    raise UserError(source.field, source.id, allowed, hint)
    # Whatever is missing makes prompts or tokens that cannot be counted.
    faults.raise_any()
    if not config.uses_model:
        _compare(config, None, faults)
        return Ready(config)
    quiet()
    read: Any = (
        text_encoder(config.model) if config.model.base_url else reader(config.model)
    )
    fit = _Fit(config, read)
    told = tuple[str, ...]()
    asked = composed.raw["method"]["name"]
    if (
        config.choice.name == "none" != asked
        and config.study is None
        and not config.model.base_url
    ):
        why = f"no constants of {config.model.name} are known, and {config.task.name} has nothing to search on"
        fit.said["method"] = (
            asked,
            "none",
            f"{why} (posbench model={config.model.path} finds them)",
        )
    for group in ("task", "search") if read.tokenizer else ("whole",):
        with faults.collecting():
            getattr(fit, group)()
    if not config.model.base_url:
        _compare(fit.config, read, faults)
    with faults.collecting():
        told = served.check(config.model, fit.config.task, read)
    faults.raise_any()
    said = (
        f"{key}: {was} -> {now}, {why}" for key, (was, now, why) in fit.said.items()
    )
    return Ready(fit.config, (*said, *told), read if isinstance(read, Reader) else None)


def quiet() -> None:
    """Let transformers keep its bars and warnings to itself: what matters is told in our own words."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def prepared(
    config: Config, who: Mapping[str, Any], read: Sequence[Content], console: Console
) -> Run:
    """The run that stages receive, without its folder."""
    same = (
        "model",
        "task",
        "choice",
        "target",
        "runtime",
        "raw",
        "stages",
        "missing",
        "standins",
        "every",
    )
    given: dict[str, Any] = {name: getattr(config, name) for name in same}
    given["raw"] = in_place(config.raw, read)
    return Run(**given, reference=config.reference()[0], console=console, identity=who)


def _compare(config: Config, read: Reader | None, faults: Faults) -> None:
    """Raise UserError for all that was found and all that does not fit the model: a channel, layers, a search
    or study, the longest prompts."""
    run = prepared(config, {}, (), Console(quiet=True))
    wrong = {fault.field.partition(".")[0] for fault in faults.found}
    if read:
        with faults.collecting():
            run.lm = outline(config.model, read, config.runtime.device)
            run.trial().check(run.lm)
        if "lm" not in vars(run):
            faults.raise_any()  # what follows would load the weights
    if config.study and "task" not in wrong:
        with faults.collecting():
            config.study.check(run)
    if "search" in config.stages and not {"task", "search"} & wrong:
        with faults.collecting():
            config.search.check(run)
            config.search.further(run, config.search.held_back)
    if "task" not in wrong:
        with faults.collecting():
            list(longest(run, config.stages))
    faults.raise_any()


def longest(run: Run, stages: Sequence[str]) -> Iterator[list[int]]:
    """The longest prompts (in characters) of each split that the stages ask, as tokens; UserError for one
    that does not fit the window, or whose choices the tokenizer does not tell apart; the stages see all."""
    if "search" in stages:
        asked = max(run.task.examples("calibration"), key=lambda e: len(e.prompt))
        yield run.lm.encode(asked.prompt).ids
    if {"intervene", "evaluate"} & set(stages):
        example, encoded = encode_longest(run.lm, run.task)
        told = {
            tuple(run.lm.continuation_ids(encoded, choice))
            for choice in example.choices
        }
        if len(told) < len(example.choices):
            shown = ", ".join(map(repr, example.choices))
            allowed = (
                f"a tokenizer that tells the choices of {run.task.name} apart: {shown}"
            )
            hint = "take a model that reads this text; the embedded ones know the words of kv_retrieval only"
            raise UserError("model", run.lm.name, allowed, hint)
        yield encoded.ids


def need_words(config: Config) -> None:
    """Refuse, before anything is downloaded, texts of a benchmark for a model that knows few words."""
    task = config.task
    path = config.model.path
    texts = isinstance(task, EvaluationOnly) and task.path is None
    if (
        texts
        and config.uses_model
        and config.uses_task
        and path.startswith(paths.EMBEDDED)
    ):
        allowed = f"kv_retrieval with model {config.model.name}, which knows its words only and reads short prompts"
        hint = (
            f"take a model that reads text: posbench task={task.name} model=mistral7b"
        )
        raise UserError("task", task.name, allowed, hint)


@dataclass
class _Fit:
    """A config on its way to fit a model; ``said`` has each change by its key."""

    config: Config
    reader: Reader
    said: dict[str, tuple[Any, Any, str]] = field(default_factory=dict)

    @property
    def _window(self) -> str:
        return (
            f"the window of {self.reader.name} is {self.reader.context_window} tokens"
        )

    @property
    def _items(self) -> list[str]:
        return [f"task.{name}" for name in getattr(self.config.task, "sizes", ())]

    def _kept(self, key: str) -> bool:
        return key in self.config.typed or self.config.experiment is not None

    def _change(self, group: str, wanted: Mapping[str, Any], why: str) -> None:
        """Set fields of a group; UserError for those that are kept."""
        faults = Faults()
        thing = getattr(self.config, group)
        said = dict(self.said)
        for name, value in wanted.items():
            key = f"{group}.{name}"
            was = getattr(thing, name)
            if self._kept(key):
                most = "at most " if isinstance(value, int) else ""
                cut = (
                    ", or cut prompts: task.truncation=middle"
                    if key in self._items
                    else ""
                )
                faults.found.append(
                    UserError(
                        key, was, f"{most}{value}: {why}", f"set {key}={value}{cut}"
                    )
                )
            said[key] = said.get(key, (was,))[0], value, why
        faults.raise_any()
        raw = {**self.config.raw, group: {**self.config.raw[group], **wanted}}
        changed: Any = {group: replace(thing, **wanted), "raw": raw}
        self.config = replace(self.config, **changed)
        self.said = said

    def search(self) -> None:
        """Shorter random strings, of tokens where letters cannot be spelt."""
        if "search" in self.config.stages:
            model = self.reader.name
            layers = self.reader.facts.get_text_config().num_hidden_layers
            spells = _unknown(self.reader, "The quick brown fox 0123456789") < UNKNOWN
            why = {
                "alphabet": f"the tokenizer of {model} does not spell letters and digits"
            }
            why["points"] = (
                f"{model} has {layers} layers, and they lie search.step_x apart"
            )
            wanted = self.config.search.fitted(
                self.reader.context_window, spells, layers
            )
            for name, value in wanted.items():
                self._change("search", {name: value}, why.get(name, self._window))

    def task(self) -> None:
        """Shorter replies, and fewer items in a prompt."""
        config, stages, window = (
            self.config,
            set(self.config.stages),
            self.reader.context_window,
        )
        task = config.task
        asked = bool({"study", "intervene", "evaluate"} & stages)
        if not config.uses_task or not (asked or "search" in stages):
            return
        if "search" in stages:
            task.examples("calibration")  # what is wrong with them is told first
        placed = isinstance(task, Placed)
        if not placed and stages <= {"study", "report"}:
            return  # studies choose among such prompts
        examples = _some(task)
        most = window // 2 if task.truncation == "refuse" else window - 1
        least = window // 4
        if self._kept("task.max_new_tokens"):
            most = least = max(most, window - max(map(self._tokens, examples)))
        if task.max_new_tokens > most:
            self._change("task", {"max_new_tokens": least}, self._window)
        if isinstance(task, Placed) and examples[0].items:
            self._spell_and_fit(examples)
        elif {"intervene", "evaluate"} & stages:
            self._need_spelt(examples)

    def whole(self) -> None:
        """Prompts that cannot be counted go as they are."""
        wanted = {"truncation": "refuse", "max_prompt_tokens": None}
        task = self.config.task
        why = "without a tokenizer nothing can be cut (model.path=DIR_OR_HUB_ID)"
        self._change(
            "task",
            {key: v for key, v in wanted.items() if getattr(task, key) != v},
            why,
        )

    def _tokens(self, example: Example) -> int:
        return len(encode_whole(self.reader, example).ids)

    def _need_spelt(self, examples: Sequence[Example]) -> None:
        worst = max(examples, key=lambda example: _unknown(self.reader, example.prompt))
        share = _unknown(self.reader, worst.prompt)
        if share >= UNKNOWN:
            name = self.reader.name
            words = _unknown_words(self.reader, worst.prompt)
            some = f", such as {', '.join(map(repr, words[:5]))}" if words else ""
            allowed = f"text that the tokenizer of {name} spells; {share:.0%} of these tokens are unknown to it"
            hint = "write others (docs/own_data.md lists those of the embedded models), or take another model"
            place = f"{self.config.task.name}, question {worst.id}"
            raise UserError("task", place, f"{allowed}{some}", hint)

    def _spell_and_fit(self, examples: Sequence[Example]) -> None:
        """Fewer items, or simpler ones where few fit or the tokenizer does not spell them."""
        task: Any = self.config.task
        spelt = _unknown(self.reader, examples[-1].prompt) < UNKNOWN
        fits = self._items_that_fit(task, examples) if spelt else 0
        simpler = {k: v for k, v in task.simpler.items() if getattr(task, k) != v}
        few = fits < min(ITEMS, task.items) and task.truncation == "refuse"
        if (
            (few or not spelt)
            and simpler
            and not any(self._kept(f"task.{key}") for key in simpler)
        ):
            why = (
                self._window
                if spelt
                else f"the tokenizer of {self.reader.name} spells no others"
            )
            self._change("task", simpler, why)
            self._reply_with_one_item()
            return self._spell_and_fit(_some(self.config.task))
        self._need_spelt(examples)
        if task.truncation == "refuse":
            self._fewer_items(task, fits)
            if self.config.task.items != task.items:
                # Prompts of that size vary in their own way.
                self._spell_and_fit(_some(self.config.task))

    def _reply_with_one_item(self) -> None:
        """Replies as long as the longest answer: of so few words a long reply holds the right one by luck."""
        examples = self.config.task.evaluation()
        code = encode_whole(self.reader, examples[0])
        longest = max(
            len(self.reader.continuation_ids(code, a))
            for a in {e.answers[0] for e in examples}
        )
        if not self._kept("task.max_new_tokens"):
            self._change(
                "task", {"max_new_tokens": longest}, "the tokens of the longest word"
            )

    def _fewer_items(self, task: Placed, fits: int) -> None:
        stages = set(self.config.stages)
        if fits < 2:
            allowed = (
                f"a model whose window holds two items of {task.name}: {self._window}"
            )
            raise UserError(
                "model",
                self.reader.name,
                allowed,
                "take another task, or another model",
            )
        used = [task.sizes[0]] if {"study", "intervene", "evaluate"} & stages else []
        used += [task.sizes[1]] if "search" in stages else []
        wanted = {
            name: fits for name in dict.fromkeys(used) if getattr(task, name) > fits
        }
        self._change("task", wanted, self._window)
        now: Any = self.config.task
        if len(places := now.gold_positions) < len(now.positions):
            what = f"{len(places)} different ones"
            self.said["task.positions"] = (
                len(now.positions),
                what,
                f"with {now.items} {task.sizes[0]}",
            )

    def _items_that_fit(self, task: Placed, examples: Sequence[Example]) -> int:
        """Items per prompt that fit, by the tokens of items and of all else in the longest prompts."""
        codes = [encode_whole(self.reader, e) for e in examples]
        n = len(examples[0].items)
        budget = self.reader.context_window - max(
            room(self.reader, task, e) for e in examples
        )
        total = [len(code.ids) for code in codes]
        around = []
        for e, code in zip(examples, codes, strict=True):
            first = e.items[min(1, n - 1)][0]
            last = e.items[-1][0]
            inner = sum(first <= start < last for start, _ in code.offsets) / max(
                n - 2, 1
            )
            # A slow tokenizer tells no places, and two items have nothing between them.
            each = (
                inner
                or len(code.ids) * (e.items[-1][1] - e.items[0][0]) / len(code.text) / n
            )
            around.append(len(code.ids) - n * each)
        outside = max(around)
        mean = statistics.fmean(total)
        spread = statistics.pstdev(total)

        def needed(k: int) -> float:
            # Where the size is kept, what is tight but fits must go on to run.
            slack = (
                0
                if self._kept(f"task.{task.sizes[0]}")
                else SLACK * spread * math.sqrt(k / n)
            )
            return outside + (mean - outside) * k / n + slack

        most = max(getattr(task, name) for name in task.sizes)
        return next((k for k in range(most, 0, -1) if needed(k) <= budget), 0)


def _some(task: Task) -> list[Example]:
    """The longest prompts of a task, in characters; of a few, where it draws them."""
    drawn = isinstance(task, Placed) and not task.files()
    examples = (
        replace(task, limit=min(task.limit or DRAWN, DRAWN)) if drawn else task
    ).evaluation()
    return sorted(examples, key=lambda e: len(e.prompt))[-LONGEST:]


def _unknown_words(reader: Encoder, text: str) -> list[str]:
    """What of a text is unknown, each once; empty where the tokenizer does not tell places."""
    tokenizer = reader.need_tokenizer()
    if not tokenizer.is_fast:
        return []
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    shut = [tokenizer.unk_token_id == token for token in found["input_ids"]]
    marked = [False] * len(text)
    for (start, end), unknown in zip(found["offset_mapping"], shut, strict=True):
        marked[start:end] = [unknown] * (end - start)
    spans = re.finditer("1+", "".join(str(int(mark)) for mark in marked))
    return list(
        dict.fromkeys(word for s in spans if (word := text[slice(*s.span())].strip()))
    )


def _unknown(reader: Encoder, text: str) -> float:
    """The share of a text's tokens that the tokenizer does not know."""
    tokenizer = reader.need_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids.count(tokenizer.unk_token_id) / max(len(ids), 1)
