"""What a stage receives, and the one loop that makes work resumable."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from posbench.files.atomic import Row, digest, write_bytes
from posbench.methods import Method, Unmodified
from posbench.methods.composed import Composed
from posbench.model.lm import LM, Encoded
from posbench.model.load import load
from posbench.pipeline.config import Config
from posbench.run.folder import RunDir
from posbench.tasks import Example, Task
from posbench.tasks.base import Split

log = logging.getLogger(__name__)

UNMODIFIED = "none"


class IncompleteRun(Exception):
    """Some rows failed; they are recorded and retried by the next run of the same command."""


@dataclass
class Run:
    """One run in progress.

    Attributes:
        config: The checked config.
        out: The claimed folder.
        console: Where progress and tables go.
        identity: What identifies model, weights, code and kernel; part of every stage key.
    """

    config: Config
    out: RunDir
    console: Console
    identity: Mapping[str, Any]
    found: dict[str, Any] | None = None

    @cached_property
    def lm(self) -> LM:
        """The model, loaded when a stage first needs it."""
        return load_model(self.config, self.console)

    @cached_property
    def evaluation(self) -> list[Example]:
        """The evaluation examples."""
        return self.config.task.evaluation()

    def examples(self, split: Split) -> list[Example]:
        """Examples of a split."""
        return self.evaluation if split == "evaluation" else self.config.task.examples(split)

    def methods(self) -> dict[str, Method]:
        """The unmodified model and the method under test, by the name that tables show."""
        method = self.config.method(self.found)
        self.out.write_json(
            "method.json", {"name": self.config.method_name, **asdict(method), **self._origin(method)}
        )
        both: dict[str, Method] = {UNMODIFIED: Unmodified()}
        if not isinstance(method, Unmodified):
            both[self.config.method_name] = method
        return both

    def _origin(self, method: Method) -> dict[str, str]:
        """The ``source`` of the model's block for each method, where the method runs with the constants of
        that block."""
        model, sources = self.config.model, []
        for name, part in (
            method.parts if isinstance(method, Composed) else {self.config.method_name: method}
        ).items():
            block = (model.scale_channel if name == "scale_channel" else model.blocks.get(name)) or {}
            ran = json.loads(json.dumps(asdict(part)))
            published = all(ran.get(key) == value for key, value in block.items() if key != "source")
            if published and "source" in block:
                sources.append(
                    f"{name}: {block['source']}" if isinstance(method, Composed) else str(block["source"])
                )
        return {"source": "; ".join(sources)} if sources else {}

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """A progress bar with time left; yields the function that advances it."""
        bar = Progress(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        with bar:
            task = bar.add_task(label, total=total)
            yield lambda n: bar.advance(task, n)


def load_model(config: Config, console: Console) -> LM:
    """The model of a config, where its runtime wants it."""
    runtime = config.runtime
    with console.status(f"loading {config.model.name}"):
        return load(
            config.model, device=runtime.device, device_map=runtime.device_map, max_memory=runtime.max_memory
        )


def encode(lm: LM, task: Task, example: Example) -> Encoded:
    """An example's prompt as tokens, with room for its answer."""
    tokenizer = lm.tokenizer
    reserve = example.max_new_tokens or task.max_new_tokens
    if example.choices and tokenizer:
        reserve = max(
            len(tokenizer(choice, add_special_tokens=False)["input_ids"]) for choice in example.choices
        )
    return lm.encode(
        example.prompt,
        truncation=task.truncation,
        reserve=reserve,
        most=task.max_prompt_tokens,
        document=example.document,
        separator=example.separator,
        chat=example.chat,
        system=example.system,
        prefill=example.prefill,
    )


def complete(
    run: Run,
    file: str,
    label: str,
    batches: Sequence[Sequence[Any]],
    key: Callable[[Any], Mapping[str, Any]],
    compute: Callable[[Sequence[Any]], list[Row]],
) -> list[Row]:
    """Compute every row that a file lacks, batch by batch, and return all rows.

    Batches depend on the plan alone, and one with a missing row is computed whole, so that a resumed run sees
    the same batches, and hence the same rounding, as an uninterrupted one. Out of memory, a batch and all
    that follow are halved; the rows made so far are kept.

    Args:
        run: The run.
        file: JSON-lines file in the run folder.
        label: Text beside the progress bar.
        batches: All work, in the order it is done.
        key: Fields that identify the row of one item.
        compute: Rows of one batch, one per item, in order.

    Raises:
        IncompleteRun: Some batch failed; its rows carry the error and are retried next time.
    """
    run.out.mend(file)
    names = tuple(key(batches[0][0])) if batches else ()
    rows = {tuple(row[n] for n in names): row for row in run.out.rows(file) if all(n in row for n in names)}
    failed = 0
    share = 1
    with run.progress(label, sum(map(len, batches))) as advance:
        for batch in batches:
            waiting = _cut(batch, share)
            while waiting:
                part = waiting.pop(0)
                missing = [item for item in part if tuple(key(item).values()) not in rows]
                made: list[Row] | None = []
                if missing:
                    try:
                        made = _fitting(part, key, compute)
                    except RuntimeError as error:
                        log.error("%s: %s", file, error)
                        made = [{**key(item), "error": str(error)} for item in part]
                        failed += len(missing)
                if made is None:
                    share *= 2
                    log.warning(
                        "%s: out of memory with %d prompts at once: smaller batches from here on",
                        file,
                        len(part),
                    )
                    waiting = [smaller for each in (part, *waiting) for smaller in _cut(each, 2)]
                    continue
                fresh = [
                    row
                    for row, item in zip(made, part, strict=False)
                    if tuple(key(item).values()) not in rows
                ]
                run.out.append(file, fresh)
                rows |= {tuple(row[n] for n in names): row for row in fresh if "error" not in row}
                advance(len(part))
    if failed:
        raise IncompleteRun(f"{failed} rows of {file} failed; run the same command again to retry them")
    return [rows[tuple(key(item).values())] for batch in batches for item in batch]


def _cut(batch: Sequence[Any], share: int) -> list[Sequence[Any]]:
    """A batch in about ``share`` equal parts, none empty."""
    step = max(-(-len(batch) // share), 1)
    return [batch[i : i + step] for i in range(0, len(batch), step)]


def _fitting(
    part: Sequence[Any],
    key: Callable[[Any], Mapping[str, Any]],
    compute: Callable[[Sequence[Any]], list[Row]],
) -> list[Row] | None:
    """Rows of a part; None where it is too large for the memory and can be cut.

    Raises:
        RuntimeError: Anything else went wrong.
    """
    try:
        return [{**key(item), **row} for item, row in zip(part, compute(part), strict=True)]
    except RuntimeError as error:
        full = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not full or len(part) == 1:
            raise
    # Only behind the handler are the tensors of the failed forward free.
    torch.cuda.empty_cache()
    return None


def search_once(run: Run, key: str, files: Sequence[str], work: Callable[[], None]) -> None:
    """Search, unless another run of this version did so under the same key: then its files are copied.

    Args:
        run: The run.
        key: What the result depends on; marks the stage.
        files: What the search leaves; one that the other run lacks is left out.
        work: The search, which writes them.
    """
    if run.out.stage("search").get("done"):
        return
    other = run.out.sibling_with("search", key)
    if other is None:
        work()
        run.out.mark("search", key=key, done=True)
        return
    for name in files:
        if (other.path / name).is_file():
            write_bytes(run.out.path / name, (other.path / name).read_bytes())
    run.out.mark("search", key=key, done=True, copied_from=other.path.name)


def share_unmodified(run: Run, file: str, *settings: Any) -> str:
    """Take the unmodified model's rows from another run of this version, so that a sweep measures them once.

    Args:
        run: The run.
        file: JSON-lines file in the run folder.
        settings: What else, beside model and task, moves these rows.

    Returns:
        The key under which the finished rows may be shared.
    """
    key = digest({"identity": run.identity, "task": run.config.raw["task"], "settings": settings})
    if not any(row["method"] == UNMODIFIED for row in run.out.rows(file)):
        other = run.out.sibling_with(file, key)
        if other:
            run.out.append(
                file, [row for row in other.rows(file) if row["method"] == UNMODIFIED and "error" not in row]
            )
            run.out.mark(file, copied_from=other.path.name)
    return key
