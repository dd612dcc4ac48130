"""The interface of a search, with plain data on the method it serves, the parameters it finds, and its settings."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import yaml

from posbench import versions
from posbench.errors import UserError
from posbench.files.atomic import Row, short_hash, write_bytes, write_csv, write_text
from posbench.files.digests import read_contents
from posbench.files.parse import read_yaml
from posbench.files.sources import Source
from posbench.late import pd, torch
from posbench.measure.replies import encode_with_answer
from posbench.methods import Method
from posbench.methods.choice import MethodChoice
from posbench.methods.unmodified import Unmodified
from posbench.run.base import Run
from posbench.run.cost import StudyWorkload
from posbench.run.folder import FOUND_FILE, METHOD_FILE, RunDir
from posbench.run.method import typed_in_place
from posbench.run.proofs import COMPUTATION, computation_digest
from posbench.schema import Count
from posbench.search import held_back
from posbench.stats.frames import UNMODIFIED
from posbench.stats.verdict import Verdict
from posbench.tasks import Example, Task

if TYPE_CHECKING:
    from posbench.plots.section import Section

log = logging.getLogger(__name__)

SEARCH_ROWS_FILE = "search.jsonl"
STATE_FILE = "search_state.pt"
CHECKSUM_BYTES = 32
ALONE = "alone"
"""Place of a method whose search runs under no other method."""
VERDICT_COMMENT = "# Verdict of this run: "
"""Beginning of the first line of a ``found.yaml`` whose constants were evaluated."""
Read: TypeAlias = "Callable[[str], pd.DataFrame | None]"
"""Reads a table of the run folder by name; None if there is none."""


@dataclass(frozen=True, kw_only=True)
class Search(ABC):
    """A search for parameters of a method; the dataclass fields are the keys of ``search.*``.

    Attributes:
        serves: The method whose parameters it finds.
        place: Allowed place of that method in a list of methods, for messages.
        finds: Names of the parameters, each with a legal value as a stand-in until it is found.
        row_files: Files that it resumes from.
        measure: ``loss`` (nats per token, lower is better), or any other name (higher is better).
        smallest: Fields that a budget may lower, each with its smallest value.
        held_back: Calibration prompts that the search does not see, on which its result is compared with the unmodified
            model, if the task has enough; None: the same number as for the search.
    """

    serves: ClassVar[type[Method]]
    place: ClassVar[str] = "alone or in a list of methods"
    finds: ClassVar[Mapping[str, Any]]
    row_files: ClassVar[Sequence[str]] = (
        SEARCH_ROWS_FILE,
        held_back.HELD_BACK_ROWS_FILE,
    )
    measure: ClassVar[str] = "loss"
    smallest: ClassVar[Mapping[str, int]] = {}

    held_back: Count | None = None

    def target(self, choice: MethodChoice) -> MethodChoice | None:
        """The choice, or its part, that this search serves; None if there is none."""
        if choice.parts and self.place == ALONE:
            return None
        for candidate in (choice, *choice.parts.values()):
            if issubclass(candidate.cls, self.serves):
                return candidate
        return None

    def check(self, run: Run) -> None:
        """Refuse a typed value of a parameter that the search finds; subclasses also compare with model and task.

        Raises:
            UserError: Names the parameter.
        """
        target = run.method.searched
        for name in sorted(set(target.pinned) & set(self.finds)):
            field = f"{target.where}.{name}"
            allowed = "null with the stage search, which finds the value"
            hint = "leave out the search: stages=[evaluate,report]"
            raise UserError(field, target.values[name], allowed, hint)

    def fields_for_model(
        self, window: int, spells: bool, layers: int
    ) -> Mapping[str, Any]:
        """Return the fields that must change for a small model, with the values that fit it.

        Args:
            window: Tokens of the model's context window.
            spells: Whether its tokenizer spells letters and digits.
            layers: Its number of layers.
        """
        return {}

    def workload(
        self, prompts: int, answer: int, layers: int, channels: int
    ) -> StudyWorkload | None:
        """Return an upper bound of the work of the search; None if it is not known in advance.

        Args:
            prompts: Number of calibration prompts.
            answer: Tokens of an answer.
            layers: Layers of the model.
            channels: Hidden size of the model.
        """
        return None

    def second_task(self) -> tuple[Task, list[Example], int] | None:
        """A second task that it asks, its prompts, and the most times each is asked; None without one."""
        return None

    def files(self) -> tuple[Source, ...]:
        """The files that it reads; their content is part of a run's identity."""
        return ()

    def identity_facts(self, run: Run) -> Mapping[str, Any]:
        """Facts that change the result, besides model, task, the search's settings and other methods of a list."""
        return {}

    def held_back_examples(self, run: Run, count: int | None) -> list[Example]:
        """Held-back prompts for the check: at most ``count``, None: the same number as for the search."""
        return run.task.held_back(count or len(run.examples("calibration")))

    def as_measured(self, run: Run, examples: list[Example]) -> list[Example]:
        """Prompts as the search measures them."""
        return examples

    def calibration(self, run: Run) -> list[Example]:
        """The calibration prompts as other methods of a list rewrite them, and as the search measures them."""
        return self.as_measured(run, run.as_asked(run.examples("calibration")))

    def prompt_length(self, run: Run, example: Example) -> int:
        """Tokens of a prompt of the check; `UserError` where it does not fit the window."""
        prompt_ids, _ = encode_with_answer(run.lm, example)
        return len(prompt_ids)

    def measure_batch(self, run: Run, batch: Sequence[Example]) -> list[float]:
        """The measure of each prompt of a batch, under the method that is applied."""
        pairs = [encode_with_answer(run.lm, example) for example in batch]
        losses = run.lm.answer_token_loss(pairs, batch_size=len(batch))
        return list(losses.tolist())

    @abstractmethod
    def search(self, run: Run) -> None:
        """Search, and write the results and, by :meth:`write_found`, ``found.yaml``."""

    @abstractmethod
    def describe(self, block: Mapping[str, Any]) -> str:
        """The block of ``found.yaml`` in one line."""

    def remarks(self, block: Mapping[str, Any]) -> list[str]:
        """Further lines to print about the block."""
        return []

    def parameters(self, block: Mapping[str, Any]) -> dict[str, Any]:
        """The method's parameters in the block, for the later stages; UserError where one is missing."""
        missing = [name for name in self.finds if name not in block]
        if missing:
            hint = f"let search() of {type(self).__name__} give write_found all that it finds"
            allowed = f"a block with {', '.join(self.finds)}"
            raise UserError("search: found", ", ".join(map(str, block)), allowed, hint)
        return {name: block[name] for name in self.finds}

    def keeps_unmodified(self, block: Mapping[str, Any], method: Method) -> bool:
        """Whether the search kept the unmodified model.

        Args:
            block: The block of ``found.yaml``.
            method: The method with its parameters.
        """
        return method == method.neutral()

    @abstractmethod
    def sections(self, read: Read) -> list[Section]:
        """Its part of the report, from the files alone."""

    def run(self, run: Run) -> None:
        """Search, or copy the result of another run with the same key, and pass the result to the method.

        Nothing is searched again where the run's folder has a finished search.
        """
        if not run.out.stage("search").get("done"):
            key = self._key(run)
            sibling = run.out.sibling_with("search", key)
            if sibling is None:
                self.search(run)
                if not (run.out.path / FOUND_FILE).is_file():
                    hint = f"let search() of {type(self).__name__} call write_found"
                    raise UserError("search", None, "a result", hint)
                (run.out.path / STATE_FILE).unlink(missing_ok=True)
            else:
                self._copy(sibling, run.out)
            copied_from = sibling.path.name if sibling else None
            # The search will not append to its rows again: their checksums can be recorded.
            checksums = run.out.checksums(self.row_files)
            run.out.mark("search", key=key, copied_from=copied_from, files=checksums)
        self._report(run, self.use_found(run))

    def use_found(self, run: Run) -> Mapping[str, Any]:
        """Give the method the parameters that ``found.yaml`` holds; return the method's block of that file.

        Raises:
            UserError: The file is damaged, or lacks the method.
        """
        file = run.out.path / FOUND_FILE
        hint = f"remove {run.out.path}, and repeat the command"
        found: dict[str, Row] = read_yaml(file, dict[str, Row], hint=hint)
        name = run.method.searched.name
        if name not in found:
            raise UserError(str(file), list(found), f"a block {name}", hint)
        block = found[name]
        run.method.use(self.parameters(block))
        return block

    def _key(self, run: Run) -> str:
        """Return a hash of everything that the result of the search and its check follow from."""
        target = run.method.searched
        parts: list[list[Any]] = []
        sources: list[Source] = []
        for name, part in run.method.choice.parts.items():
            # The searched method's own values are the result, not an input.
            if part is target:
                parts.append([name, None])
            else:
                parts.append([name, part.values])
                sources += part.files()
        # The target's other parameters take part in the check.
        settings = {k: v for k, v in target.values.items() if k not in self.finds}
        facts: dict[str, Any] = {
            "identity": run.identity,
            "search": run.raw["search"],
            "task": run.raw["task"],
            "parts": parts,
            "files": [content.key for content in read_contents(sources)],
            "method": settings,
        }
        return short_hash(facts | dict(self.identity_facts(run)))

    def _copy(self, sibling: RunDir, folder: RunDir) -> None:
        """Copy the files of another run's finished search into this run's folder.

        Args:
            sibling: Folder of a run with the same search, which need not be made again.
            folder: This run's folder.
        """
        folder.add_hardware(sibling.hardware())
        for name in sibling.stage("search")["files"]:
            if name in self.row_files:
                # Written anew, as rows carry the id of their run.
                folder.write_rows(name, sibling.rows(name))
            elif name == FOUND_FILE:
                # The verdict is on the sibling's evaluation.
                text = (sibling.path / name).read_text("utf-8")
                write_text(folder.path / name, _without_verdict(text))
            else:
                write_bytes(folder.path / name, (sibling.path / name).read_bytes())

    def _report(self, run: Run, block: Mapping[str, Any]) -> None:
        """Print the result, its gain on held-back prompts, and the block to paste.

        Args:
            run: The run.
            block: The method's block in ``found.yaml``.
        """
        run.console.print(f"search chose {self.describe(block)}")
        overridden = [f"{k} {v}" for k, v in run.method.overridden.items()]
        if overridden:
            line = (
                f"typed, and used in place of what was found: {', '.join(overridden)}"
            )
            line += "; a gain is that of what was found"
            run.console.print(line)
        for line in self.remarks(block):
            run.console.print(line)
        line = held_back.summary_line(block["held_back"])
        if held_back.shows_no_gain(block["held_back"]):
            if not {"intervene", "evaluate"} & set(run.stages):
                return  # the run ends with that line
            line += "; the stages that follow run with what it found all the same"
        run.console.print(line)
        if "evaluate" not in run.stages:
            text = _without_verdict((run.out.path / FOUND_FILE).read_text("utf-8"))
            run.console.print(f"paste into the model's YAML:\n\n{text}")

    def _check_gain(self, run: Run, block: Mapping[str, Any]) -> dict[str, Any]:
        """Compare the result on held-back prompts with the model without it; rows that exist are not computed again.

        Questions with a prompt that was asked before, or that does not fit the window, are left out.

        Args:
            run: The run.
            block: The method's block of ``found.yaml``.

        Returns:
            The facts of ``held_back.csv``.
        """
        used_prompts = {e.prompt for e in run.examples("calibration")}
        used_prompts |= {e.prompt for e in run.examples("evaluation")}
        examples = [
            replace(example, cluster=example.question_id)
            for example in self.held_back_examples(run, self.held_back)
        ]
        lengths: dict[str, int] = {}
        refused_questions = {e.cluster for e in examples if e.prompt in used_prompts}
        examples = run.as_asked(examples)
        for example in examples:
            try:
                lengths[example.id] = self.prompt_length(run, example)
            except UserError:
                refused_questions.add(example.cluster)
        examples = [e for e in examples if e.cluster not in refused_questions]
        try:
            examples = self.as_measured(run, examples) if examples else []
        except UserError:
            examples = []  # no reply holds an answer, before which it could be measured
        batches = run.prompts.batches_by_length(
            examples, lambda example: lengths[example.id]
        )

        # Without typed values, which the stages that follow use in place of those that were found.
        target = replace(run.method.searched, typed=frozenset())
        method = target.build(self.parameters(block), target, run.method.hint)
        rows_file = held_back.HELD_BACK_ROWS_FILE
        unmodified = self.measure_under(
            run, UNMODIFIED, Unmodified(), batches, rows_file
        )
        keeps_unmodified = self.keeps_unmodified(block, method)
        searched = unmodified
        if not keeps_unmodified:
            searched = self.measure_under(run, "found", method, batches, rows_file)
        facts = held_back.gain_facts(
            self.measure,
            [searched[example.id] for example in examples],
            [unmodified[example.id] for example in examples],
            [example.cluster for example in examples],
        )
        if keeps_unmodified and held_back.was_checked(facts):
            # No sample: the two are the same model, so its gain is 0 on every prompt.
            facts |= {"gain": 0.0, "ci_low": 0.0, "ci_high": 0.0}
        parts = run.method.choice.parts
        others = [name for name in parts if name != run.method.searched.name]
        facts[held_back.KEPT] = keeps_unmodified
        return facts | ({"beside": ", ".join(others)} if others else {})

    def measure_under(
        self,
        run: Run,
        name: str,
        method: Method,
        batches: list[list[Example]],
        file: str,
    ) -> dict[str, float]:
        """Measure prompts under a method, with the other methods of a list; resumed.

        Rows that an interrupted session left are kept where they carry the run's digest of what was computed.

        Args:
            run: The run.
            name: Name of the method in the rows.
            method: The method, in the place that the search serves: one of a list of methods, or the only one.
            batches: The prompts.
            file: The file of the rows.

        Returns:
            The measure of each prompt, by its id.
        """

        def key(example: Example) -> Row:
            return {"method": name, "id": example.id}

        def compute(batch: Sequence[Example]) -> list[Row]:
            return [{"value": value} for value in self.measure_batch(run, batch)]

        is_check = file == held_back.HELD_BACK_ROWS_FILE
        label = f"search: {'check, ' if is_check else ''}{name}"
        whole_method = run.method.with_target(method)
        proof = {COMPUTATION: computation_digest(run, whole_method)}
        with whole_method.applied(run.lm):
            rows = run.rows.complete(
                file,
                label,
                batches,
                key,
                compute,
                proof=lambda _: proof,
            )
        return {row["id"]: row["value"] for row in rows}

    def write_found(self, run: Run, block: Mapping[str, Any], description: str) -> None:
        """Write ``found.yaml``, the block to paste into a model's YAML, and ``held_back.csv``, its gain.

        Args:
            run: The run.
            block: Parameters of the method, and facts about them.
            description: The search in words, for the block's ``source``.
        """
        facts = self._check_gain(run, block)
        table = pd.DataFrame([facts], columns=list(held_back.TABLE_COLUMNS))
        write_csv(run.out.path / held_back.TABLE_FILE, table)
        source = f"posbench {versions.__version__} {description}"
        if run.method.choice.parts:
            source += f" in the list {run.method.choice.name}"
        source += f"; run {run.out.path.name}"
        data = {
            run.method.searched.name: {**block, "held_back": facts, "source": source}
        }
        text = yaml.safe_dump(data, sort_keys=False, width=1000)
        write_text(run.out.path / FOUND_FILE, text)


def note_verdict(folder: RunDir, verdict: Verdict | None) -> None:
    """Put the verdict on a run at the head of its ``found.yaml``, as a comment; nothing without a search.

    Args:
        folder: The run's folder.
        verdict: The verdict; None where no position bias was measured.
    """
    file = folder.path / FOUND_FILE
    if not file.is_file():
        return
    text = _without_verdict(file.read_text("utf-8"))
    if verdict is not None:
        typed = typed_in_place(folder.read_json(METHOD_FILE))
        ending = f"; not with these: {typed}" if typed else ""
        text = f"{VERDICT_COMMENT}{verdict}{ending}\n{text}"
    write_text(file, text)
    folder.renew([FOUND_FILE])


def _without_verdict(text: str) -> str:
    """The text of ``found.yaml`` as the search wrote it."""
    if text.startswith(VERDICT_COMMENT):
        return text.partition("\n")[2]
    return text


def save_state(run: Run, state: dict[str, Any]) -> None:
    """Write tensors and plain data to the run folder, so that a killed search resumes from them."""
    buffer = BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    write_bytes(run.out.path / STATE_FILE, _checksum(run, data) + data)


def load_state(run: Run) -> dict[str, Any]:
    """Load what :func:`save_state` wrote, tensors on the CPU; empty if there is no intact state of this run.

    Args:
        run: The run; its folder holds the file.

    Returns:
        Values by name: whatever the search saved to resume from.
    """
    file = run.out.path / STATE_FILE
    if not file.is_file():
        return {}
    content = file.read_bytes()
    if not content:
        return {}
    data = content[CHECKSUM_BYTES:]
    if content[:CHECKSUM_BYTES] != _checksum(run, data):
        log.warning("%s: damaged, or another run's; made again", file)
        return {}
    state = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    return dict(state)


def _checksum(run: Run, data: bytes) -> bytes:
    """Hash of a state and of the id of its run, 32 bytes."""
    return hashlib.sha256(run.out.id.encode() + data).digest()


def epoch_section(read: Read, text: str, digits: int) -> list[Section]:
    """Return the report's section with the rows of ``search.csv``; empty if there is no such table.

    Args:
        read: Returns a table of the run by name, None if there is none.
        text: Text of the section.
        digits: Significant digits of numbers.
    """
    table = read("search")
    if table is None:
        return []
    from posbench.plots.section import Section

    rows = []
    for row in table.itertuples(index=False):
        rows.append([f"{value:.{digits}g}" for value in row])
    return [Section("Search", text, list(table), rows)]
