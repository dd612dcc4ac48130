"""The interface of a study: a measurement that ends in tables, figures and verdicts on a paper's claims."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from posbench.errors import UserError
from posbench.files.sources import Source
from posbench.late import pd
from posbench.methods.choice import MethodChoice
from posbench.model.encode import Encoder
from posbench.run.base import Run
from posbench.run.cost import InspectionPasses, StudyWorkload
from posbench.schema import instantiate
from posbench.stats.findings import Finding
from posbench.stats.glance import Glance
from posbench.tasks import Example, Task

if TYPE_CHECKING:
    from posbench.plots.section import Drawn, Section

Tables: TypeAlias = "Mapping[str, pd.DataFrame]"
RESERVED_TABLES = ("findings", "metrics")
"""Names of CSV files in a run's folder that are no study's."""


@dataclass(frozen=True, kw_only=True)
class Study(ABC):
    """An analysis other than "score a task"; its fields are the keys of ``study.*``, with their defaults.

    Attributes:
        needs_model: Whether it runs the model; otherwise ``run.lm`` stays untouched.
        needs_task: Whether it runs the task's prompts.
        uses_method: Whether it applies the run's method itself. Otherwise the whole study runs inside the typed
            method, or on the unmodified model if none was typed.
        all_methods: Whether it measures every method of ``run.all_methods``, and takes none.
        asks_only: Whether it looks at replies alone, so that a model behind a server will do; it then ends at the run's
            deadline and spending by itself.
        text_lengths: Fields with the tokens of a text, which the context window bounds.
        smallest: Fields that a budget may lower, each with the least that it leaves; its :meth:`workload` follows them.
    """

    needs_model: ClassVar[bool] = True
    needs_task: ClassVar[bool] = True
    uses_method: ClassVar[bool] = False
    all_methods: ClassVar[bool] = False
    asks_only: ClassVar[bool] = False
    text_lengths: ClassVar[tuple[str, ...]] = ()
    smallest: ClassVar[Mapping[str, int]] = {}

    def check(self, run: Run) -> None:  # noqa: B027
        """Compare the fields with model and task, before anything is written.

        Raises:
            UserError: The fields do not fit; the message names the field and the allowed values.
        """

    def measures(self, choice: MethodChoice) -> bool:
        """Whether a study of all methods measures this one: those that change the model, or, of replies, the prompt."""
        return choice.changes_prompts_alone == self.asks_only

    def files(self) -> tuple[Source, ...]:
        """Further files that the numbers come from; their contents are part of a run's identity."""
        return ()

    def asked_examples(
        self, encoder: Encoder, task: Task, choices: Mapping[str, MethodChoice]
    ) -> list[Example]:
        """Return the prompts of a study that :attr:`asks_only`, once for each time that it asks them at most.

        Args:
            encoder: Makes the model's prompts.
            task: The task.
            choices: All methods by name.
        """
        return []

    def recorded_examples(self, task: Task) -> list[Example]:
        """Return the prompts whose replies its run keeps, made without the model, to be shown beside these."""
        return task.evaluation()

    def workload(self, run: Run) -> Sequence[InspectionPasses | StudyWorkload]:
        """Upper bound of its workload; empty where it is not known in advance."""
        return ()

    @abstractmethod
    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Measure; each table becomes ``<name>.csv`` in the run folder."""

    def checked_tables(self, run: Run) -> dict[str, pd.DataFrame]:
        """Return :meth:`measure`.

        Raises:
            UserError: It returned something else than one or more tables under names of files.
        """
        tables = self.measure(run)
        hint = f"correct measure() of {type(self).__name__}"
        if not isinstance(tables, Mapping) or not tables:
            allowed = "tables (DataFrames) by name, one or more"
            raise UserError("study: measure", tables, allowed, hint)
        for name, table in tables.items():
            # A study may have made folders of its own, as one that runs several others does.
            is_file_name = re.fullmatch(r"(\w+/)*\w+", str(name))
            has_folder = (run.out.path / str(name)).parent.is_dir()
            if not (is_file_name and has_folder) or name in RESERVED_TABLES:
                listed = ", ".join(RESERVED_TABLES)
                allowed = f"names in letters, digits and _, other than {listed}"
                raise UserError("study: measure", name, allowed, hint)
            if not isinstance(table, pd.DataFrame) or table.columns.empty:
                value = f"{name}: {type(table).__name__}"
                allowed = "tables that are DataFrames with columns"
                raise UserError("study: measure", value, allowed, hint)
        return tables

    def figures(self, tables: Tables) -> Drawn:
        """Figures with captions, from the tables as read back: ``posbench report DIR`` draws them again."""
        return {}

    def findings(self, tables: Tables) -> Sequence[Finding]:
        """Verdicts on the paper's claims, from the tables."""
        return ()

    def glance(self, tables: Tables) -> Glance | None:
        """The first look at the result, from the tables; None: how the claims fared says it.

        Its next command is without model and task, which are added.
        """
        return None

    def sections(self, tables: Tables, figures: Drawn) -> Sequence[Section]:
        """Parts of the page that come before the claims, from the tables.

        Args:
            tables: The tables as read back.
            figures: All :meth:`figures`; those that no section takes stand with the claims.
        """
        return ()


def read_study(data: Mapping[str, Any]) -> Study:
    """The study that a config or a run folder's config holds; UserError as for any config."""
    return instantiate(data, Study, "study")  # type: ignore[type-abstract]
