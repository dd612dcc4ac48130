"""The run object that every search, study and stage receives."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from posbench.backends.base import NO_WINDOW
from posbench.files.atomic import Row, short_hash
from posbench.methods import Method
from posbench.methods.choice import MethodChoice
from posbench.model.encode import Encoded, Encoder
from posbench.model.lm import LM
from posbench.model.load import ModelConfig, load
from posbench.run.budget import Deadline, Spending
from posbench.run.folder import METHOD_FILE, STUDY_STAGE, RunDir
from posbench.run.heartbeat import doing, is_beating, loading, showing_bar
from posbench.run.meter import StageMeter
from posbench.run.method import MethodUnderTest
from posbench.run.progress import Progress, progress
from posbench.run.prompts import PromptBatcher
from posbench.run.rows import IncompleteRun, ResumableRows
from posbench.run.runtime import Runtime
from posbench.run.shards import Shard, WorkerPool
from posbench.stats.frames import UNMODIFIED
from posbench.tasks import Example, Task
from posbench.tasks.base import Split, check_examples

if TYPE_CHECKING:
    from posbench.backends.base import Backend, ServerProfile

__all__ = ["IncompleteRun", "Run", "load_placed"]


def load_placed(model: ModelConfig, runtime: Runtime) -> LM:
    """Load a model, with its weights where the settings of a run place them.

    Raises:
        UserError: It cannot be loaded, or placed there.
    """
    return load(
        model,
        device=runtime.device,
        device_map=runtime.device_map,
        max_memory=runtime.max_memory,
    )


@dataclass
class Run:
    """One run.

    Attributes:
        model: The model's config.
        task: The task.
        method: The method under test.
        runtime: Where and how it runs.
        raw: The resolved config as plain data: the groups that take part.
        stages: Stages of the run, in order.
        reference: The paper's rows that apply, see :class:`posbench.stats.reference.Reference`.
        console: Where progress and tables go.
        identity: Model, weights, code and kernel: part of every stage key.
        unmodified_identity: The same without the code of methods, search and study.
        all_methods: The methods that change the model, by name; empty unless the study measures them all.
        model_identity: The part of ``identity`` that concerns the model: weights, precision, kernel.
        method_files: Content digest of each file that a method's constants name, by path.
        out: The claimed folder; not set while the config is checked.
        shard: The shard of the rows that this process makes.
        main_out: The run's own folder if ``out`` is a shard's folder.
        workers: Processes that make the other shards.
        deadline: Deadline of the replies, if the run has a time budget.
        server: Probed profile of the model's server; None: not probed, or no server.
        spending: Tokens and money that requests to the server took.
    """

    model: ModelConfig
    task: Task
    method: MethodUnderTest
    runtime: Runtime
    raw: Mapping[str, Any]
    stages: Sequence[str]
    reference: Sequence[Row]
    console: Console
    identity: Mapping[str, Any]
    unmodified_identity: Mapping[str, Any] = field(default_factory=dict)
    all_methods: Mapping[str, MethodChoice] = field(default_factory=dict)
    model_identity: Mapping[str, Any] = field(default_factory=dict)
    method_files: Mapping[str, str] = field(default_factory=dict)
    out: RunDir = field(init=False)
    shard: Shard = field(default_factory=Shard)
    main_out: RunDir | None = None
    workers: WorkerPool | None = None
    deadline: Deadline | None = None
    server: ServerProfile | None = None
    spending: Spending | None = None

    # Model

    @cached_property
    def lm(self) -> LM:
        """The model in this process, loaded when it is first needed."""
        message = Text(f"loading {self.model.name}")
        if self.runtime.log_every and not self.console.is_terminal:
            self.console.print(message)
        with loading(self.model.name, self.console):
            return load_placed(self.model, self.runtime)

    @cached_property
    def backend(self) -> Backend:
        """The backend of a model that is not in this process."""
        from posbench.backends.choice import make_backend

        return make_backend(self.model, self.server)

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder of prompts: the model, or a served model's tokenizer, if it is known."""
        if self.model.in_process:
            return self.lm
        from posbench.backends.base import text_encoder

        return text_encoder(self.model)

    def _loaded_model(self) -> LM | Backend | None:
        """The model if it is loaded already."""
        attributes = vars(self)
        return attributes.get("lm") or attributes.get("backend")

    # Examples and methods

    @cached_property
    def evaluation(self) -> list[Example]:
        """The evaluation examples."""
        return self.task.evaluation()

    def examples(self, split: Split) -> list[Example]:
        """Return the examples of a split."""
        if split == "evaluation":
            return self.evaluation
        examples = self.task.examples(split)
        check_examples(self.task, examples)
        return examples

    def as_asked(self, examples: list[Example]) -> list[Example]:
        """Return examples as the method under test asks them: where it, or a part of a list, changes the prompt."""
        method = self.method.trial()
        return self.prompts.rewrite(examples, method) if method.rewrites else examples

    @cached_property
    def prompts(self) -> PromptBatcher:
        """Encodes the task's examples as the model reads them, and groups them into batches."""
        return PromptBatcher(
            self.encoder,
            self.task,
            self.runtime.batch_size,
            self.runtime.batch_tokens,
            self.reads_items,
        )

    @property
    def reads_items(self) -> bool:
        """Whether a method of the run reads the positions of the items of a prompt."""
        choices = [self.method.choice, *self.all_methods.values()]
        return any(choice.reads_items for choice in choices)

    def methods(self) -> dict[str, Method]:
        """Record the method under test in ``method.json`` and return the methods that are compared.

        They are given by their names in tables, the unmodified model first.
        """
        self.out.write_json(METHOD_FILE, self.method.record())
        return self.method.methods()

    # Work

    @cached_property
    def meter(self) -> StageMeter:
        """Measures the stages."""
        price = None if self.model.in_process else self.model.price
        return StageMeter(self._loaded_model, price)

    def in_folder(self, out: RunDir) -> Run:
        """Return the same run with another folder, where its rows go and resume; the model is shared."""
        other = copy.copy(self)
        other.out = out
        vars(other).pop("rows", None)  # read from the other folder
        return other

    @contextmanager
    def progress(self, label: str, total: int, done: int = 0) -> Iterator[Progress]:
        """Show progress while the block runs, and count its time and tokens for the tokens per second.

        Args:
            label: Name of the work.
            total: Number of parts.
            done: Parts that an earlier session did.

        Yields:
            A function to call with the number of finished parts.
        """
        interval = self.runtime.log_every
        model = self._loaded_model()

        def tokens_read() -> int:
            return model.tokens_read if model else 0

        spending = self.spending
        with (
            progress(
                self.console,
                interval,
                label,
                total,
                done,
                tokens=tokens_read,
                spent=(lambda: spending) if spending else None,
                # The activity of the block is printed soon in any case.
                first_line=not is_beating(),
            ) as work,
            showing_bar() if self.console.is_terminal else doing(work.__str__, False),
            self.meter.loop(),
        ):
            yield work

    @cached_property
    def rows(self) -> ResumableRows:
        """The files of rows of the run folder."""
        return ResumableRows(self.out, self.progress)

    def note_prompts(self, prompts: Mapping[str, Encoded]) -> None:
        """Record how many tokens the prompts of the study have, with those that it noted before, and the window.

        Args:
            prompts: The prompts by id. Of a server that does not count tokens nothing is recorded.
        """
        lengths = [len(prompt.ids) for prompt in prompts.values() if prompt.ids]
        window = self.encoder.context_window
        if lengths and window < NO_WINDOW:
            lengths += self.out.stage(STUDY_STAGE).get("tokens_range", [])
            shortest_and_longest = [min(lengths), max(lengths)]
            self.out.mark(STUDY_STAGE, tokens_range=shortest_and_longest, window=window)

    def share_unmodified(self, file: str, *settings: Any) -> str:
        """Copy the unmodified model's rows of a file from another run of this version, if one has them.

        Runs with any methods thus measure them once.

        Args:
            file: Name of the JSON-lines file.
            settings: Further settings on which these rows depend, besides model and task.

        Returns:
            The key of model, task and settings under which the rows may be shared.
        """
        settings_key = {
            "identity": self.unmodified_identity,
            "task": self.raw["task"],
            "settings": settings,
        }
        key = short_hash(settings_key)
        # They were copied, or begun here, in an earlier session.
        if any(row["method"] == UNMODIFIED for row in self.out.rows(file)):
            return key
        sibling = self.out.sibling_with(file, key)
        if sibling:
            rows = [
                row
                for row in sibling.rows_without_error(file)
                if row["method"] == UNMODIFIED
            ]
            self.out.append(file, rows)
            self.out.mark(file, copied_from=sibling.path.name)
            self.out.add_hardware(sibling.hardware())
        return key
