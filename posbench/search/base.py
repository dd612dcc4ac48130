"""What every search is: plain data that says which method it serves, what it finds, and how."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any, ClassVar, TypeAlias

import yaml

from posbench import versions
from posbench.errors import UserError
from posbench.files.atomic import Row, digest, write_bytes, write_csv, write_text
from posbench.files.digests import contents
from posbench.files.sources import Source
from posbench.late import pd, torch
from posbench.methods import Method
from posbench.methods.choice import MethodChoice
from posbench.methods.unmodified import Unmodified
from posbench.plots.section import Section
from posbench.run.base import Run
from posbench.run.cost import StudyWorkload
from posbench.schema import Count
from posbench.search import held_back
from posbench.stats.frames import UNMODIFIED
from posbench.tasks import Example, Task

log = logging.getLogger(__name__)

FOUND = "found.yaml"
ROWS = "search.jsonl"
STATE = "search_state.pt"
Read: TypeAlias = "Callable[[str], pd.DataFrame | None]"
"""A table of the run folder by its name, None where it has none."""


@dataclass(frozen=True, kw_only=True)
class Search(ABC):
    """A search for parameters of a method; the dataclass fields are the keys of ``search.*``."""

    serves: ClassVar[type[Method]]  # the method whose parameters it finds
    place: ClassVar[str] = (
        "alone or in a list of methods"  # where that may stand among others
    )
    finds: ClassVar[
        Mapping[str, Any]
    ]  # their names, each with a value that stands for it until it is found
    # files that it leaves, beside ``found.yaml`` and ``held_back.csv``
    results: ClassVar[Sequence[str]] = ("search.csv",)
    rows: ClassVar[Sequence[str]] = (ROWS, held_back.ROWS)  # what it resumes from
    measure: ClassVar[str] = (
        "loss"  # what it lowers, in nats per token; any other: what it raises
    )

    # calibration prompts that the search does not see, on which what it found is checked against the
    # unmodified model, where the task has so many; None: as many as it sees
    held_back: Count | None = None

    def target(self, choice: MethodChoice) -> MethodChoice | None:
        """The choice, or the part of it, whose parameters it finds with the others applied; None without."""
        parts = [choice, *choice.parts.values()]
        return next((part for part in parts if issubclass(part.cls, self.serves)), None)

    def check(self, run: Run) -> None:
        """Raise `UserError` where a value of what it finds is typed, or model or task do not fit."""
        assert run.method.target is not None
        for name in sorted(set(run.method.target.pinned) & set(self.finds)):
            allowed = "nothing typed, with the search stage: it finds this"
            hint = "leave the search out: stages=[evaluate,report]"
            raise UserError(
                f"{run.method.target.where}.{name}",
                run.method.target.values[name],
                allowed,
                hint,
            )

    def fitted(self, window: int, spells: bool, layers: int) -> Mapping[str, Any]:
        """The fields that must change for a model of ``layers`` that reads ``window`` tokens, and whose
        tokenizer may not spell letters and digits."""
        return {}

    def asks(
        self, prompts: int, answer: int, layers: int, channels: int
    ) -> StudyWorkload | None:
        """What it reads at most, of so many calibration prompts with answers of so many tokens; None where
        that cannot be told before."""
        return None

    def beside(self) -> tuple[Task, list[Example], int] | None:
        """A second task that it asks, its prompts, and how often at most it asks each; None without one."""
        return None

    def files(self) -> tuple[Source, ...]:
        """The files that it reads; what they hold is part of a run's identity."""
        return ()

    def depends(self, run: Run) -> Mapping[str, Any]:
        """What moves the result beside model, task, the search's settings and other methods of a list."""
        return {}

    def further(self, run: Run, count: int | None) -> list[Example]:
        """Prompts of the check: at most ``count``, None: as many as the search asks."""
        return run.task.held_back(count or len(run.examples("calibration")))

    def tokens(self, run: Run, example: Example) -> int:
        """Tokens of a prompt of the check; `UserError` where it does not fit."""
        return len(run.lm.answer_ids(example.prompt, example.answers[0])[0])

    def measured(self, run: Run, batch: Sequence[Example]) -> list[float]:
        """The measure of prompts of the check, inside a method."""
        prompts = [e.prompt for e in batch]
        answers = [e.answers[0] for e in batch]
        losses: list[float] = run.lm.answer_loss(
            prompts, answers, batch_size=len(batch)
        ).tolist()
        return losses

    @abstractmethod
    def search(self, run: Run) -> None:
        """Search, and write the results and, by :meth:`write_found`, ``found.yaml``."""

    @abstractmethod
    def told(self, block: Mapping[str, Any]) -> str:
        """What was found, in one line."""

    def remarks(self, block: Mapping[str, Any]) -> list[str]:
        """What else is to be said of it, line by line."""
        return []

    def found(self, block: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters for the later stages."""
        return {name: block[name] for name in self.finds}

    @abstractmethod
    def sections(self, read: Read) -> list[Section]:
        """Its part of the report, from the files alone."""

    def run(self, run: Run) -> None:
        """Search unless another run of this version did under the same key, and keep what was found."""
        assert run.method.target is not None
        if not run.out.stage("search").get("done"):
            parts = [
                [name, None if p is run.method.target else p.values]
                for name, p in run.method.choice.parts.items()
            ]
            settings: dict[str, Any] = {
                "search": run.raw["search"],
                "task": run.raw["task"],
                "parts": parts,
            }
            others = [
                file
                for part in run.method.choice.parts.values()
                if part is not run.method.target
                for file in part.files()
            ]
            settings["files"] = [content.key for content in contents(others)]
            # The rest of the method takes part in the check.
            settings["method"] = {
                k: v for k, v in run.method.target.values.items() if k not in self.finds
            }
            key = digest({"identity": run.identity, **settings, **self.depends(run)})
            other = run.out.sibling_with("search", key)
            if other is None:
                self.search(run)
                (run.out.path / STATE).unlink(missing_ok=True)
            else:
                run.out.add_hardware(other.hardware())
                for name in other.stage("search")["files"]:
                    if name in self.rows:
                        run.out.write_rows(
                            name, other.rows(name)
                        )  # they carry the id of this run
                    else:
                        write_bytes(
                            run.out.path / name, (other.path / name).read_bytes()
                        )
            # A finished search looks at its rows no more: they are recorded as its other files are.
            rows = run.out.sums(self.rows)
            copied = other.path.name if other else None
            run.out.mark("search", key=key, copied_from=copied, files=rows)
        text = (run.out.path / FOUND).read_text()
        block = yaml.safe_load(text)[run.method.target.name]
        run.method.use(self.found(block))
        run.console.print(f"search chose {self.told(block)}", soft_wrap=True)
        found = self.found(block)
        own = run.method.target.pinned
        if typed := [
            f"{k} {own[k]}" for k in self.finds if k in own and own[k] != found.get(k)
        ]:
            said = f"typed, and used in place of what was found: {', '.join(typed)}"
            run.console.print(
                f"{said}; a gain is that of what was found", soft_wrap=True
            )
        for line in self.remarks(block):
            run.console.print(line, soft_wrap=True)
        gained = held_back.words(block["held_back"])
        useless = held_back.noise(block["held_back"])
        if useless and {"intervene", "evaluate"} & set(run.stages):
            gained += "; the stages that follow run with what it found all the same"
        elif useless:
            return  # the run ends with that line
        run.console.print(gained, soft_wrap=True)
        if "evaluate" not in run.stages:
            run.console.print(f"paste into the model's YAML:\n\n{text}", soft_wrap=True)

    def check_gain(self, run: Run, block: Mapping[str, Any]) -> dict[str, Any]:
        """Measure what was found and the unmodified model on held-back prompts, resumed; the facts of
        ``held_back.csv``. Prompts that were asked before, or do not fit the window, are left out."""
        assert run.method.target is not None
        seen = {
            e.prompt
            for split in ("calibration", "evaluation")
            for e in run.examples(split)
        }  # type: ignore[arg-type]
        lengths = dict[str, int]()
        refused = set[str]()
        examples = [
            replace(e, cluster=e.cluster or e.id)
            for e in self.further(run, self.held_back)
        ]
        for e in examples:
            try:
                lengths[e.id] = self.tokens(run, e)
            except UserError:
                refused.add(e.cluster)
        refused |= {e.cluster for e in examples if e.prompt in seen}
        examples = [e for e in examples if e.cluster not in refused]
        values = dict[str, list[float]]()
        plan = run.prompts.batches_by_length(examples, lambda e: lengths[e.id])

        def compute(batch: Sequence[Example]) -> list[Row]:
            return [{"value": value} for value in self.measured(run, batch)]

        # What was found, also where the stages that follow use a typed value in its place.
        target = replace(run.method.target, typed=frozenset())
        found = run.method.with_target(
            target.build(self.found(block), target, run.method.hint)
        )
        for name, method in (
            (UNMODIFIED, run.method.with_target(Unmodified())),
            ("found", found),
        ):
            with method.applied(run.lm):
                label = f"search: check, {name}"
                key = lambda e, name=name: {"method": name, "id": e.id}  # noqa: E731
                rows = run.rows.complete(held_back.ROWS, label, plan, key, compute)
            by_id = {row["id"]: row["value"] for row in rows}
            values[name] = [by_id[e.id] for e in examples]
        clusters = [e.cluster for e in examples]
        return held_back.gain(
            self.measure, values["found"], values[UNMODIFIED], clusters
        )

    def write_found(self, run: Run, block: Mapping[str, Any], how: str) -> None:
        """Write the block to paste into a model's YAML, with its gain on held-back prompts, and the search in
        words as its source."""
        assert run.method.target is not None
        among = (
            f" in the list {run.method.choice.name}" if run.method.choice.parts else ""
        )
        source = (
            f"posbench {versions.__version__} {how}{among}; run {run.out.path.name}"
        )
        facts = self.check_gain(run, block)
        write_csv(
            run.out.path / held_back.TABLE,
            pd.DataFrame([facts], columns=list(held_back.HEADER)),
        )
        data = {run.method.target.name: {**block, "held_back": facts, "source": source}}
        write_text(
            run.out.path / FOUND, yaml.safe_dump(data, sort_keys=False, width=1000)
        )


def save(run: Run, state: dict[str, Any]) -> None:
    """Keep tensors and plain data in the run folder, so that a killed search goes on where it was."""
    torch.save(state, buffer := BytesIO())
    write_bytes(
        run.out.path / STATE, _checksum(run, buffer.getvalue()) + buffer.getvalue()
    )


def saved(run: Run) -> dict[str, Any]:
    """What :func:`save` kept, on the CPU; empty where there is nothing, or nothing whole of this run."""
    file = run.out.path / STATE
    data = file.read_bytes() if file.is_file() else b""
    if data and data[:32] != _checksum(run, data[32:]):
        log.warning("%s: damaged, or another run's; made again", file)
        data = b""
    return (
        torch.load(BytesIO(data[32:]), map_location="cpu", weights_only=True)
        if data
        else {}
    )


def _checksum(run: Run, data: bytes) -> bytes:
    """Over a state and the run that it belongs to, 32 bytes."""
    return hashlib.sha256(run.out.id.encode() + data).digest()


def steps_section(read: Read, text: str, digits: int) -> list[Section]:
    """The rows of ``search.csv`` as they are."""
    table = read("search")
    if table is None:
        return []
    rows = [
        [f"{value:.{digits}g}" for value in row]
        for row in table.itertuples(index=False)
    ]
    return [Section("Search", text, list(table), rows)]
