"""Defaults that fit the model: prompts within its context window, of text that its tokenizer spells.

Settings typed by the user are never changed: they are refused with the number that would fit. An experiment's are kept
where they fit, however tightly. Nothing here reads weights.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from posbench.errors import Faults, UserError
from posbench.measure.replies import encode_untruncated, generation_budget
from posbench.model.encode import Encoded, Encoder
from posbench.model.load import CheckpointReader, torch_device
from posbench.pipeline.config import Config
from posbench.run.prompts import rewrite_examples
from posbench.schema import shortened
from posbench.tasks import Example, Task
from posbench.tasks.items import GoldPositionTask, positions_in_fewer_items

NUM_LONGEST = 16
"""Prompts whose tokens are counted: the longest."""
QUESTIONS_TO_DRAW = 8
"""Questions that are drawn to find the longest prompts, where the task draws them."""
CHARACTER_MARGIN = 0.05
"""Share of a prompt's tokens that stays free where they are estimated from its characters."""
SLACK_DEVIATIONS = 5.0
"""Standard deviations of their lengths that stay free: another prompt may be longer."""
MIN_ITEMS = 5
"""Items of a prompt below which shorter items are taken: gold positions need room."""
MAX_UNKNOWN_SHARE = 0.1
"""Share of unknown tokens in a prompt from which a tokenizer does not spell it."""
MAX_LISTED_WORDS = 5
PLAIN_TEXT = "The quick brown fox 0123456789"
BATCH_TOKENS = "runtime.batch_tokens"
CPU_BATCH_OPERATIONS = 1e12
"""Operations of a batch on a CPU: half a minute at 30 billion a second."""
WEIGHTS_OF_A_LAYER = 12
"""Weights of a layer in squares of the hidden size, of a plain transformer."""
MIN_BATCH_TOKENS = 64
MEASURING_STAGES = {"study", "intervene", "evaluate"}


class Adjustment(NamedTuple):
    """A change of a default: the value before and after, and why."""

    old: Any
    new: Any
    reason: str


class FitToModel:
    """Changes the defaults of a config so that it fits a model.

    Attributes:
        config: The config as it fits so far.
        reader: The model without its weights.
        asks_calibration: Whether calibration prompts are asked: by a search, or by an export.
        adjustments: The changes by the dotted key of the field.
    """

    def __init__(
        self, config: Config, reader: CheckpointReader, asks_calibration: bool = False
    ) -> None:
        self.config = config
        self.reader = reader
        self.asks_calibration = asks_calibration or "search" in config.stages
        self.adjustments = dict[str, Adjustment]()

    def fit_to_tokenizer(self, faults: Faults) -> None:
        """Fit task, search and study to the tokenizer and the window; collect the faults that the user has to mend."""
        for fit in (self.fit_task, self.fit_search, self.fit_study):
            with faults.collecting():
                fit()

    def fit_task(self) -> None:
        """Shorten replies, and put fewer items into a prompt, until prompts and replies fit the model's window.

        Raises:
            UserError: The task does not fit, or a typed setting does not.
        """
        config = self.config
        task = config.task
        stages = set(config.stages)
        measures = bool(MEASURING_STAGES & stages)
        if not config.uses_task or not (measures or "search" in stages):
            return
        if "search" in stages:
            task.examples("calibration")  # raises their own faults first
        if not isinstance(task, GoldPositionTask) and stages <= {"study", "report"}:
            return  # studies choose among such prompts
        examples = _longest_examples(task)
        self._fit_replies(task, examples)
        if isinstance(task, GoldPositionTask) and examples[0].items:
            self._fit_items(examples)
        elif {"intervene", "evaluate"} & stages:
            # Prompts of other tasks cannot be made shorter, but their words may be unknown to the tokenizer.
            self._need_spelt(examples)

    def fit_search(self) -> None:
        """Fit a search to the model: shorter random strings, an alphabet that its tokenizer has, points for its layers.

        Raises:
            UserError: A typed setting does not fit.
        """
        if "search" not in self.config.stages:
            return
        model = self.reader.name
        layers = self.reader.facts.get_text_config().num_hidden_layers
        spells = _unknown_share(self.reader, PLAIN_TEXT) < MAX_UNKNOWN_SHARE
        reasons = {
            "alphabet": f"the tokenizer of {model} does not spell letters and digits",
            "points": f"{model} has {layers} layers, and they lie search.step_x apart",
        }
        window = self.reader.context_window
        values = self.config.search.fields_for_model(window, spells, layers)
        for name, value in values.items():
            reason = reasons.get(name, self._window_reason)
            self._change("search", {name: value}, reason)

    def fit_study(self) -> None:
        """Limit each text length of a study to the model's window, in tokens.

        Raises:
            UserError: A typed setting does not fit.
        """
        study = self.config.study
        if study is None:
            return
        window = self.reader.context_window
        values = {
            name: window for name in study.text_lengths if getattr(study, name) > window
        }
        self._change("study", values, self._window_reason)

    def fit_batches(self) -> None:
        """Lower ``runtime.batch_tokens`` so that a CPU writes rows about every minute.

        The number follows from the model's shape alone, so that it is the same on every machine.
        """
        runtime = self.config.runtime
        on_cpu = torch_device(runtime.device).type == "cpu"
        if not on_cpu or runtime.batch_tokens is None or self._is_given(BATCH_TOKENS):
            return
        shape = self.reader.facts.get_text_config()
        weights = WEIGHTS_OF_A_LAYER * shape.num_hidden_layers * shape.hidden_size**2
        # A token costs two operations (multiply, add) per weight.
        max_tokens = max(int(CPU_BATCH_OPERATIONS / (2 * weights)), MIN_BATCH_TOKENS)
        if max_tokens < runtime.batch_tokens:
            reason = "a CPU writes rows every minute"
            self._change("runtime", {"batch_tokens": max_tokens}, reason)

    def leave_prompts_uncut(self) -> None:
        """Set the task not to truncate prompts, as there is no tokenizer to count their tokens.

        Raises:
            UserError: The user typed a truncation.
        """
        uncut = {"truncation": "refuse", "max_prompt_tokens": None}
        task = self.config.task
        values = {
            name: value for name, value in uncut.items() if getattr(task, name) != value
        }
        reason = "without a tokenizer nothing can be cut (model.path=DIR_OR_HUB_ID)"
        self._change("task", values, reason)

    def fit_by_characters(
        self, tokens_per_character: float, overhead_tokens: int
    ) -> list[str]:
        """Fit prompts to the window of a server that counted the tokens of a sample of their text.

        Args:
            tokens_per_character: Tokens of a character of the prompts.
            overhead_tokens: Tokens of a prompt outside its text.

        Returns:
            Prompts that may still not fit, in words.

        Raises:
            UserError: The user typed more items than fit.
        """
        window = self.reader.context_window
        task = self.config.task
        if task.max_new_tokens > window // 2:
            reply_tokens = {"max_new_tokens": max(window // 4, 1)}
            self._change("task", reply_tokens, self._window_reason)
            task = self.config.task
        examples = task.evaluation()
        asked = self._rewritten(examples)
        replies = [example.max_new_tokens or 0 for example in asked]
        reply = max([task.max_new_tokens, *replies])
        free_tokens = window - reply - overhead_tokens
        free_characters = free_tokens / (tokens_per_character * (1 + CHARACTER_MARGIN))
        lengths = ([len(e.prompt) for e in group] for group in (examples, asked))
        free_characters /= _growth(*lengths)
        sizes = [len(e.system) + len(e.prompt) + len(e.prefill) for e in examples]
        num_longer = sum(size > free_characters for size in sizes)
        if not num_longer:
            return []
        longest = examples[sizes.index(max(sizes))]
        if not isinstance(task, GoldPositionTask) or not longest.items:
            count = f"{num_longer} of {len(examples)} prompts"
            return [
                f"about {count} are too long, and will not be read: {self._window_reason}"
            ]
        num_items = len(longest.items)
        per_item = (longest.items[-1][1] - longest.items[0][0]) / num_items
        beside_items = max(sizes) - per_item * num_items
        self._reduce_items(task, int((free_characters - beside_items) / per_item))
        return []

    # Changes

    @property
    def _window_reason(self) -> str:
        reader = self.reader
        server = self.config.server
        if server and server.delivery and server.delivery.limit is not None:
            return str(server.delivery)
        return f"the window of {reader.name} is {reader.context_window} tokens"

    def _is_typed(self, key: str) -> bool:
        """Whether the user set a field: then it is refused where it does not fit."""
        return key in self.config.typed

    def _is_given(self, key: str) -> bool:
        """Whether the user or an experiment may have set a field: then it changes only where it does not fit."""
        return self._is_typed(key) or self.config.experiment is not None

    def _change(self, group: str, values: Mapping[str, Any], reason: str) -> None:
        """Set fields of a config group, and record old value, new value and reason for the user.

        Args:
            group: ``task``, ``search``, ``study`` or ``runtime``.
            values: New values by field.
            reason: Why the old ones do not fit, in words.

        Raises:
            UserError: The user typed one of the fields.
        """
        faults = Faults()
        section = getattr(self.config, group)
        item_counts = [f"task.{name}" for name in self.config.task.sizes]
        adjustments = dict(self.adjustments)
        for name, value in values.items():
            key = f"{group}.{name}"
            old = getattr(section, name)
            if self._is_typed(key):
                allowed = f"{value}: {reason}"
                if isinstance(value, int):
                    allowed = f"at most {allowed}"
                hint = f"set {key}={value}"
                if key in item_counts:
                    hint += ", or with the gold item at the ends alone cut prompts: task.truncation=middle"
                faults.found.append(UserError(key, old, allowed, hint))
            # A second change of a field still shows the configured value as the old one.
            default = adjustments[key].old if key in adjustments else old
            adjustments[key] = Adjustment(default, value, reason)
        faults.raise_any()
        self.config = self.config.with_fields(group, values)
        self.adjustments = adjustments

    # Replies

    def _fit_replies(self, task: Task, examples: Sequence[Example]) -> None:
        """Shorten replies to a quarter of the window where they leave too little of it to the prompts.

        A configured length is kept as long as it fits beside the longest prompt.
        """
        window = self.reader.context_window
        max_reply_tokens = window // 2 if task.truncation == "refuse" else window - 1
        new_value = window // 4
        if self._is_given("task.max_new_tokens"):
            longest = max(self._num_tokens(example) for example in examples)
            max_reply_tokens = max(max_reply_tokens, window - longest)
            new_value = max_reply_tokens
        if task.max_new_tokens > max_reply_tokens:
            self._change("task", {"max_new_tokens": new_value}, self._window_reason)

    def _reply_with_one_word(self) -> None:
        """Limit replies to the length of the longest answer.

        With few possible words, a long reply contains the right one by luck.
        """
        if self._is_typed("task.max_new_tokens"):
            return
        examples = self.config.task.evaluation()
        encoded = encode_untruncated(self.reader, examples[0])
        answers = {example.answers[0] for example in examples}
        longest = max(
            len(self.reader.continuation_ids(encoded, answer)) for answer in answers
        )
        reason = "the tokens of the longest word"
        self._change("task", {"max_new_tokens": longest}, reason)

    def _num_tokens(self, example: Example) -> int:
        return len(encode_untruncated(self.reader, example).ids)

    # Items

    def _fit_items(self, examples: Sequence[Example]) -> None:
        """Put fewer items into a prompt, or simpler ones where few fit or the tokenizer does not know their words.

        Args:
            examples: The longest prompts of the task.

        Raises:
            UserError: Not even two of the simplest items fit, or the tokenizer does not know the words.
        """
        task: Any = self.config.task
        unknown_share = _unknown_share(self.reader, examples[-1].prompt)
        spelt = unknown_share < MAX_UNKNOWN_SHARE
        num_fitting = self._num_fitting_items(task, examples) if spelt else 0
        refuses = task.truncation == "refuse"
        too_few = refuses and num_fitting < min(MIN_ITEMS, task.items)
        simpler = {
            name: value
            for name, value in task.simpler.items()
            if getattr(task, name) != value
        }
        may_simplify = simpler and not any(
            self._is_typed(f"task.{name}") for name in simpler
        )
        if may_simplify and (too_few or not spelt):
            reason = self._window_reason
            if not spelt:
                reason = f"the tokenizer of {self.reader.name} spells no others"
            self._change("task", simpler, reason)
            self._reply_with_one_word()
            self._fit_items(_longest_examples(self.config.task))
            return
        self._need_spelt(examples)
        if refuses:
            self._reduce_items(task, num_fitting)
            new_task: Any = self.config.task
            if new_task.items != task.items:
                # Prompts of that size vary in their own way.
                self._fit_items(_longest_examples(new_task))

    def _reduce_items(self, task: GoldPositionTask, num_fitting: int) -> None:
        """Put at most ``num_fitting`` items into a prompt, and move gold positions that would lie outside.

        Raises:
            UserError: Fewer than two items fit.
        """
        if num_fitting < 2:
            name = self.reader.name
            allowed = f"a model whose window holds two items of {task.name}: {self._window_reason}"
            hint = "choose another task or another model"
            raise UserError("model", name, allowed, hint)
        evaluation_items, calibration_items = task.sizes[:2]
        stages = set(self.config.stages)
        fields = []
        if MEASURING_STAGES & stages:
            fields.append(evaluation_items)
        if self.asks_calibration:
            fields.append(calibration_items)
        values = {
            name: num_fitting
            for name in dict.fromkeys(fields)
            if getattr(task, name) > num_fitting
        }
        moved_positions = self._positions_in_fewer_items(task, values)
        self._change("task", values | moved_positions, self._window_reason)
        new_task: Any = self.config.task
        num_positions = len(new_task.gold_positions)
        # Positions in per cent may fall on the same item of a shorter prompt.
        if num_positions < len(new_task.positions):
            self.adjustments["task.positions"] = Adjustment(
                len(new_task.positions),
                f"{num_positions} different ones",
                f"with {new_task.items} {evaluation_items}",
            )

    def _positions_in_fewer_items(
        self, task: GoldPositionTask, sizes: Mapping[str, int]
    ) -> dict[str, Any]:
        """Move gold positions that lie outside smaller prompts to the same relative depth inside.

        Args:
            task: The task.
            sizes: New number of items by field of the task.

        Returns:
            New positions by field of the task, ``positions`` and ``calibration_positions``; typed ones are left out.
        """
        moved: dict[str, Any] = {}
        # ``task.sizes`` names the field of the number of items for evaluation, then for calibration.
        keys = ("positions", "calibration_positions")
        for key, size_key in zip(keys, task.sizes, strict=True):
            positions = getattr(task, key) or ()
            new_size = sizes.get(size_key)
            is_outside = any(
                isinstance(p, int) and p >= (new_size or 0) for p in positions
            )
            if new_size and is_outside and not self._is_typed(f"task.{key}"):
                old_size = getattr(task, size_key)
                moved[key] = positions_in_fewer_items(positions, old_size, new_size)
        return moved

    def _num_fitting_items(
        self, task: GoldPositionTask, examples: Sequence[Example]
    ) -> int:
        """Return how many items fit into a prompt beside its instructions and the reply; 0 if not even one does.

        Args:
            task: The task.
            examples: Its longest prompts; their tokens are split into those of items and all others.
        """
        prompts = [encode_untruncated(self.reader, example) for example in examples]
        num_items = len(examples[0].items)
        asked = self._rewritten(examples)
        reply = max(
            generation_budget(self.reader, task, e) for e in [*examples, *asked]
        )
        beside_items = max(
            _tokens_beside_items(example, prompt, num_items)
            for example, prompt in zip(examples, prompts, strict=True)
        )
        lengths = [len(prompt.ids) for prompt in prompts]
        growth = _growth(lengths, [self._num_tokens(example) for example in asked])
        budget = (self.reader.context_window - reply) / growth
        mean = statistics.fmean(lengths)
        deviation = statistics.pstdev(lengths)
        is_given = self._is_given(f"task.{task.sizes[0]}")
        max_items = max(getattr(task, name) for name in task.sizes)
        for count in range(max_items, 0, -1):
            # If the size is given, a tight fit must still run.
            # Other prompts vary in length, so some tokens stay free.
            slack = 0.0
            if not is_given:
                slack = SLACK_DEVIATIONS * deviation * math.sqrt(count / num_items)
            item_tokens = (mean - beside_items) * count / num_items
            if beside_items + item_tokens + slack <= budget:
                return count
        return 0

    def _rewritten(self, examples: Sequence[Example]) -> list[Example]:
        """Examples as a method asks them that rewrites their text; empty where none does."""
        method = self.config.method_under_test().trial()
        if not (method.rewrites and method.rewrites_by_text):
            return []
        return rewrite_examples(self.reader, self.config.task, examples, method)

    # Text

    def _need_spelt(self, examples: Sequence[Example]) -> None:
        """Refuse prompts of which a large share are tokens unknown to the tokenizer.

        Raises:
            UserError: Names the worst prompt and some of its unknown words.
        """
        reader = self.reader
        worst = max(examples, key=lambda e: _unknown_share(reader, e.prompt))
        share = _unknown_share(reader, worst.prompt)
        if share < MAX_UNKNOWN_SHARE:
            return
        allowed = f"text that the tokenizer of {reader.name} spells; {share:.0%} of these tokens are unknown to it"
        unknown_words = _unknown_words(reader, worst.prompt)[:MAX_LISTED_WORDS]
        if unknown_words:
            samples = [repr(shortened(word)) for word in unknown_words]
            allowed += f", such as {', '.join(samples)}"
        hint = "use words that it spells (docs/own_data.md lists those of the embedded models), or another model"
        value = f"{self.config.task.name}, question {worst.id}"
        raise UserError("task", value, allowed, hint)


def _longest_examples(task: Task) -> list[Example]:
    """The longest prompts of a task, in characters, the longest last; of a few questions, where it draws them."""
    if isinstance(task, GoldPositionTask) and not task.files():
        limit = min(task.limit or QUESTIONS_TO_DRAW, QUESTIONS_TO_DRAW)
        task = replace(task, limit=limit)
    return sorted(task.evaluation(), key=lambda e: len(e.prompt))[-NUM_LONGEST:]


def _growth(lengths: Sequence[int], rewritten_lengths: Sequence[int]) -> float:
    """How many times as long the longest prompt becomes where a method rewrites prompts; at least 1."""
    return max(*lengths, *rewritten_lengths, 1) / max(lengths)


def _tokens_beside_items(example: Example, prompt: Encoded, num_items: int) -> float:
    """Return the tokens of a prompt that belong to no item: its length without the mean length of an item for each.

    Args:
        example: The example, with the spans of its items in characters.
        prompt: Its tokens and their offsets in characters.
        num_items: Number of its items.
    """
    second_item = example.items[min(1, num_items - 1)][0]
    last_item = example.items[-1][0]
    # The first and the last item are left out, as text before or after may share their tokens.
    inner_tokens = sum(second_item <= start < last_item for start, _ in prompt.offsets)
    item_tokens = inner_tokens / max(num_items - 2, 1)
    if not item_tokens:
        # A slow tokenizer gives no offsets, and two items have nothing between them: by characters.
        characters = example.items[-1][1] - example.items[0][0]
        item_tokens = len(prompt.ids) * characters / len(prompt.text) / num_items
    return len(prompt.ids) - num_items * item_tokens


def _unknown_share(encoder: Encoder, text: str) -> float:
    """The share of a text's tokens that the tokenizer does not know."""
    tokenizer = encoder.need_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids.count(tokenizer.unk_token_id) / max(len(ids), 1)


def _unknown_words(encoder: Encoder, text: str) -> list[str]:
    """Return the parts of a text whose tokens are unknown to the tokenizer, each once.

    It is empty where the tokenizer gives no offsets.
    """
    tokenizer = encoder.need_tokenizer()
    # Only a fast tokenizer says which characters a token covers.
    if not tokenizer.is_fast:
        return []
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # A mark for each character: 1 if its token is unknown.
    marks = ["0"] * len(text)
    for token, (start, end) in zip(
        encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        mark = "1" if token == tokenizer.unk_token_id else "0"
        marks[start:end] = [mark] * (end - start)
    spans = [match.span() for match in re.finditer("1+", "".join(marks))]
    unknown_words = [text[start:end].strip() for start, end in spans]
    return list(dict.fromkeys(word for word in unknown_words if word))
