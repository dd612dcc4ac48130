"""What every search is: plain data that says which method it serves, what it finds, and how."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, ClassVar

import pandas as pd
import torch
import yaml

from posbench import versions
from posbench.errors import UserError
from posbench.files.atomic import digest, write_bytes, write_text
from posbench.files.digests import contents
from posbench.files.sources import Source
from posbench.methods import Method
from posbench.methods.choice import MethodChoice
from posbench.plots.section import Section
from posbench.run.base import Run

FOUND, ROWS, STATE = "found.yaml", "search.jsonl", "search_state.pt"
Read = Callable[[str], pd.DataFrame | None]
"""A table of the run folder by its name, None where it has none."""


@dataclass(frozen=True, kw_only=True)
class Search(ABC):
    """A search for parameters of a method; the dataclass fields are the keys of ``search.*``."""

    serves: ClassVar[type[Method]]  # the method whose parameters it finds
    place: ClassVar[str] = "alone or in a list of methods"  # where that may stand among others
    finds: ClassVar[Mapping[str, Any]]  # their names, each with a value that stands for it until it is found
    results: ClassVar[Sequence[str]] = ("search.csv",)  # files that it leaves, beside ``found.yaml``

    def target(self, choice: MethodChoice) -> MethodChoice | None:
        """The choice, or the part of it, whose parameters it finds with the others applied; None without."""
        parts = [choice, *choice.parts.values()]
        return next((part for part in parts if issubclass(part.cls, self.serves)), None)

    def check(self, run: Run) -> None:
        """Raise `UserError` where a value of what it finds is typed, or model or task do not fit."""
        assert run.target is not None
        for name in sorted(set(run.target.pinned) & set(self.finds)):
            allowed = "nothing typed, with the search stage: it finds this"
            hint = "leave the search out: stages=[evaluate,report]"
            raise UserError(f"{run.target.where}.{name}", run.target.values[name], allowed, hint)

    def files(self) -> tuple[Source, ...]:
        """The files that it reads; what they hold is part of a run's identity."""
        return ()

    def depends(self, run: Run) -> Mapping[str, Any]:
        """What moves the result beside model, task, the search's settings and other methods of a list."""
        return {}

    @abstractmethod
    def search(self, run: Run) -> None:
        """Search, and write the results and, by :meth:`write_found`, ``found.yaml``."""

    @abstractmethod
    def told(self, block: Mapping[str, Any]) -> str:
        """What was found, in one line."""

    def found(self, block: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters for the later stages."""
        return {name: block[name] for name in self.finds}

    @abstractmethod
    def sections(self, read: Read) -> list[Section]:
        """Its part of the report, from the files alone."""

    def run(self, run: Run) -> None:
        """Search unless another run of this version did under the same key, and keep what was found."""
        assert run.target is not None
        if not run.out.stage("search").get("done"):
            parts = [[name, None if p is run.target else p.values] for name, p in run.choice.parts.items()]
            settings: dict[str, Any] = {"search": run.raw["search"], "task": run.raw["task"], "parts": parts}
            others = [
                file for part in run.choice.parts.values() if part is not run.target for file in part.files()
            ]
            settings["files"] = [content.key for content in contents(others)]
            key = digest({"identity": run.identity, **settings, **self.depends(run)})
            other = run.out.sibling_with("search", key)
            if other is None:
                self.search(run)
                (run.out.path / STATE).unlink(missing_ok=True)
            else:
                for file in [other.path / name for name in (*self.results, FOUND)]:
                    if file.is_file():
                        write_bytes(run.out.path / file.name, file.read_bytes())
            run.out.mark("search", key=key, done=True, copied_from=other.path.name if other else None)
        text = (run.out.path / FOUND).read_text()
        block = yaml.safe_load(text)[run.target.name]
        run.found = self.found(block)
        run.console.print(f"search chose {self.told(block)}")
        if "evaluate" not in run.stages:
            run.console.print(f"paste into the model's YAML:\n\n{text}", soft_wrap=True)

    def write_found(self, run: Run, block: Mapping[str, Any], how: str) -> None:
        """Write the block to paste into a model's YAML, with the search in words as its source."""
        assert run.target is not None
        among = f" in the list {run.choice.name}" if run.choice.parts else ""
        source = f"posbench {versions.__version__} {how}{among}; run {run.out.path.name}"
        data = {run.target.name: {**block, "source": source}}
        write_text(run.out.path / FOUND, yaml.safe_dump(data, sort_keys=False, width=1000))


def save(run: Run, state: dict[str, Any]) -> None:
    """Keep tensors and plain data in the run folder, so that a killed search goes on where it was."""
    torch.save(state, buffer := BytesIO())
    write_bytes(run.out.path / STATE, buffer.getvalue())


def saved(run: Run) -> dict[str, Any]:
    """What :func:`save` kept, on the CPU; empty where there is nothing."""
    file = run.out.path / STATE
    return torch.load(file, map_location="cpu", weights_only=True) if file.is_file() else {}


def steps_section(read: Read, text: str, digits: int) -> list[Section]:
    """The rows of ``search.csv`` as they are."""
    table = read("search")
    if table is None:
        return []
    rows = [[f"{value:.{digits}g}" for value in row] for row in table.itertuples(index=False)]
    return [Section("Search", text, list(table), rows)]
