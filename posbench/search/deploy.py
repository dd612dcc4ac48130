"""A search for the setting to ship: as a format holds it, and within a budget of side effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from posbench.errors import UserError, renamed
from posbench.files.atomic import Row
from posbench.files.sources import Source
from posbench.late import pd
from posbench.measure.replies import encode_prompt, encode_with_answer
from posbench.methods import Method
from posbench.methods.composed import Composed
from posbench.methods.scale_channel import ScaleChannel
from posbench.methods.unmodified import Unmodified
from posbench.run.base import Run
from posbench.run.leads import LEADS_FILE, ReadAt, examples_at_answer
from posbench.run.proofs import (
    COMPUTATION,
    REQUEST,
    computation_digest,
    request_digest,
)
from posbench.schema import Count, NonNegative
from posbench.search import held_back
from posbench.search.base import SEARCH_ROWS_FILE, Read, Search
from posbench.stats.bootstrap import paired
from posbench.stats.findings import estimate, estimate_columns, estimate_row
from posbench.stats.frames import UNMODIFIED, display_name
from posbench.stats.glance import sentence_case
from posbench.tasks import Example, Task
from posbench.tasks.base import EvaluationOnly

if TYPE_CHECKING:
    from posbench.plots.section import Section
    from posbench.search.statistics import Array

FOLDING = ("checkpoint", "lora", "gguf", "gguf-lora")
"""Formats of ``posbench export`` that scale the attention of all tokens."""
Format = Literal["checkpoint", "lora", "gguf", "gguf-lora", "transformers"]
DEPLOY_ROWS = "deploy.jsonl"
MAX_TABLE_ROWS = 12  # best candidates in the report's table
TokenPairs = Mapping[str, tuple[list[int], list[int]]]
"""Token ids of prompts and of their continuations, by id."""


@dataclass(frozen=True, kw_only=True)
class DeploySearch(Search):
    """A search for settings of scale_channel that can continue with the setting to ship.

    The best candidates with the last token alone scaled are scored again: as the format holds them, and on the side
    task. The unmodified model is among them, so the choice is at least as good. With ``layers=auto`` the two orders can
    differ much: take a larger ``shortlist`` then.

    Args:
        top_k: Candidates that go on; see the search.
        deploy: The format for ``posbench export --to``. Formats that fold scale the attention of all tokens
            (``last=all``); ``transformers`` holds the method as it is, as does None.
        shortlist: Candidates that are scored again; None: ``top_k``.
        side_task: A second task, chosen as ``task`` is. Its loss is the loss of the right choice, or of the first
            answer, on calibration prompts where it has some, else on those of its evaluation.
        side_rise: Largest rise of that loss, in nats per token; 0.02 makes the right answer 2 % less likely.
        side_prompts: Most prompts of the side task, spread over all.
        read_at: The loss is that of the answer right after the ``prompt``, or, with ``answer``, after the words that
            the unmodified model puts before it in its own reply.
    """

    row_files: ClassVar[Sequence[str]] = (
        SEARCH_ROWS_FILE,
        DEPLOY_ROWS,
        LEADS_FILE,
        held_back.HELD_BACK_ROWS_FILE,
    )

    top_k: Count = 10
    deploy: Format | None = None
    shortlist: Count | None = None
    side_task: Task | None = None
    side_rise: NonNegative = 0.02
    side_prompts: Count = 100
    read_at: ReadAt = "prompt"

    @property
    def folds(self) -> bool:
        """Whether the format scales the attention of all tokens."""
        return self.deploy in FOLDING

    @property
    def num_rescored(self) -> int:
        """Largest number of candidates that are scored again."""
        if self.folds or self.side_task:
            return self.shortlist or self.top_k
        return 0

    def as_measured(self, run: Run, examples: list[Example]) -> list[Example]:
        """See :meth:`Search.as_measured`."""
        if self.read_at == "answer":
            return examples_at_answer(run, examples)
        return examples

    def files(self) -> tuple[Source, ...]:
        """The files of the side task."""
        if self.side_task is None:
            return ()
        files = self.side_task.files()
        return tuple(replace(file, field=f"search.side_{file.field}") for file in files)

    def second_task(self) -> tuple[Task, list[Example], int] | None:
        """See :meth:`Search.beside`."""
        if self.side_task is None:
            return None
        examples = [replace(e, max_new_tokens=1) for e in self._side_examples()]
        return self.side_task, examples, 1 + self.num_rescored

    def _side_examples(self) -> list[Example]:
        """Return prompts of the side task, on which a shipped method must not raise the loss.

        They are spread evenly over its prompts with an answer.

        Raises:
            UserError: Its files cannot be read, or it has no answers.
        """
        task: Any = self.side_task
        with renamed("task.", "search.side_task."):
            examples = (
                # Such a task has no calibration prompts.
                task.evaluation()
                if isinstance(task, EvaluationOnly)
                else task.examples("calibration")
            )
        answered = [e for e in examples if e.answers and e.answers[0]]
        if not answered:
            allowed = "a task with known answers"
            raise UserError(
                "search.side_task",
                task.name,
                allowed,
                "set search.side_task to another task",
            )
        count = min(self.side_prompts, len(answered))
        indices = np.linspace(0, len(answered) - 1, count).round().astype(int)
        return [answered[i] for i in indices]

    def check(self, run: Run) -> None:
        """Refuse a method that the export format cannot hold, and a side task whose text the tokenizer does not know.

        Raises:
            UserError: Names the field.
        """
        if run.method.target is None:  # a study's search
            if self.num_rescored:
                allowed = "null in a study, which ships nothing"
                hint = "leave out search.deploy and search.side_task"
                raise UserError("search.deploy", self.deploy, allowed, hint)
            return
        last = run.method.target.pinned.get("last")
        if self.folds and last not in (None, "all"):
            field = f"{run.method.target.where}.last"
            allowed = f"all, with search.deploy={self.deploy}, which folds"
            raise UserError(field, last, allowed, f"leave out {field} or search.deploy")
        if self.folds and run.method.trial().twin().folded(run.lm) is None:
            allowed = f"a method that folds into a {self.deploy}; {run.method.choice.name} with these keys does not"
            hint = "set search.deploy=transformers"
            raise UserError("search.deploy", self.deploy, allowed, hint)
        if self.side_task:
            prompts = [ids for ids, _ in self._side_pairs(run).values()]
            tokens = [token for ids in prompts for token in ids]
            num_unknown = tokens.count(run.lm.need_tokenizer().unk_token_id)
            if num_unknown > len(tokens) / 10:
                allowed = f"text that the tokenizer of {run.lm.name} spells"
                hint = "set search.side_task to another task, or use another model"
                raise UserError("search.side_task", self.side_task.name, allowed, hint)

    def rescore(
        self,
        run: Run,
        candidates: Sequence[ScaleChannel],
        losses: Array,
        best: int | None,
    ) -> tuple[pd.DataFrame, int | None]:
        """Score the shortlist again, inside the run's other methods, and choose the setting to ship; resumed.

        Args:
            run: The run.
            candidates: C settings.
            losses: Nats per answer token with the last token alone scaled, shape (1 + C, N): the unmodified
                model, then the candidates, on N calibration examples.
            best: Index of the best candidate by these; None: the unmodified model.

        Returns:
            The table ``deploy.csv``, and the index of the chosen candidate, or None for the unmodified model.
        """
        order = np.argsort(losses[1:].mean(1), kind="stable").tolist()
        best_first = order
        if best is not None:
            best_first = [best, *(i for i in order if i != best)]
        shortlist = best_first[: self.num_rescored]
        mode = self._shipped_mode(run)
        shortlisted = [candidates[i] for i in shortlist]
        methods = [
            replace(mode, channel=c.channel, factor=c.factor, layers=c.layers)
            for c in shortlisted
        ]
        examples = self.calibration(run)
        clusters = [e.question_id for e in examples]
        losses_last_1 = losses[[0, *(i + 1 for i in shortlist)]]
        shipped_losses = losses_last_1
        # Else the losses of the search are those of the shipped method.
        if mode.last != 1 or mode.tokens != "both":
            pairs = {e.id: encode_with_answer(run.lm, e) for e in examples}
            method_losses = self._method_losses(run, "calibration", pairs, methods)
            shipped_losses = np.concatenate([losses[:1], method_losses])

        # Row 0 is the unmodified model, row 1 the best candidate.
        best_row = 0 if best is None else 1
        ranks = [0, *(order.index(i) + 1 for i in shortlist)]
        table = pd.DataFrame({"rank": ranks})
        table["candidate"] = [display_name(UNMODIFIED), *map(_label, methods)]
        table["loss_last_1"] = losses_last_1.mean(1)
        table["loss"] = shipped_losses.mean(1)
        table["best_last_1"] = table.index == best_row
        lowest = losses_last_1[best_row]
        prices = [paired(row, lowest, clusters) for row in shipped_losses]
        table = table.join(
            pd.DataFrame([estimate_row(price, "price") for price in prices])
        )
        table["n"] = len(examples)
        table["candidates"] = len(candidates)
        table["allowed"] = True
        if self.side_task:
            clusters = [e.question_id for e in self._side_examples()]
            side_pairs = self._side_pairs(run)
            all_methods = [Unmodified(), *methods]
            side_losses = self._method_losses(run, "side", side_pairs, all_methods)
            rises = [paired(row, side_losses[0], clusters) for row in side_losses]
            table = table.join(
                pd.DataFrame([estimate_row(rise, "side_rise") for rise in rises])
            )
            table["side_loss"] = side_losses.mean(1)
            table["side_n"] = len(clusters)
            table["allowed"] = table["side_rise"] <= self.side_rise
        chosen_row = int(table.loc[table["allowed"], "loss"].idxmin())
        table["selected"] = table.index == chosen_row
        chosen = shortlist[chosen_row - 1] if chosen_row > 0 else None
        return table, chosen

    def _shipped_mode(self, run: Run) -> ScaleChannel:
        """Return the method under test as the format holds it, with placeholders for channel, factor and layers."""
        method: Any = run.method.trial()
        if isinstance(method, Composed):
            # The search serves the last method of a list.
            method = list(method.parts.values())[-1]
        if self.folds:
            method = method.twin()
        assert isinstance(method, ScaleChannel)
        return method

    def _side_pairs(self, run: Run) -> TokenPairs:
        """Return token ids of each prompt of the side task, and of its right choice or first answer, by example id.

        The loss of that answer shows whether a setting harms the side task.

        Args:
            run: The run, with the model's tokenizer.
        """
        task = self.side_task
        assert task is not None
        tokenizer = run.lm.need_tokenizer()
        pairs: dict[str, tuple[list[int], list[int]]] = {}
        for example in self._side_examples():
            accepted = {answer.strip() for answer in example.answers}
            right = [c for c in example.choices if c.strip() in accepted]
            text = right[0] if right else example.answers[0]
            # Room for the answer is cut from the prompt where the window is small.
            answer_length = len(tokenizer(text, add_special_tokens=False)["input_ids"])
            # The side task's settings lie under this key of the config: errors must name it.
            with renamed("task.", "search.side_task."):
                sized = replace(example, max_new_tokens=answer_length)
                encoded = encode_prompt(run.lm, task, sized)
            answer_ids = run.lm.continuation_ids(encoded, text)
            pairs[example.id] = encoded.ids, answer_ids
        return pairs

    def _method_losses(
        self, run: Run, split: str, pairs: TokenPairs, methods: Sequence[Method]
    ) -> Array:
        """Losses under M methods, each of which reads all prompts itself; resumed.

        Args:
            run: The run.
            split: ``calibration`` or ``side``, which the rows of ``deploy.jsonl`` record.
            pairs: N prompts and their answers.
            methods: The methods.

        Returns:
            Nats per answer token, shape (M, N).
        """
        groups = run.prompts.batches_by_length(
            list(pairs), lambda id_: sum(map(len, pairs[id_]))
        )
        # Items are pairs of a method's index and a prompt's id; a batch has one method.
        batches = [
            [(index, id_) for id_ in group]
            for index in range(len(methods))
            for group in groups
        ]

        def key(item: tuple[int, str]) -> Row:
            index, id_ = item
            return {"of": split, "method": index, "id": id_}

        def compute(batch: Sequence[tuple[int, str]]) -> list[Row]:
            method = methods[batch[0][0]]
            prompts = [pairs[id_][0] for _, id_ in batch]
            answers = [pairs[id_][1] for _, id_ in batch]
            choices = [[answer] for answer in answers]
            with method.applied(run.lm) as lm:
                scores = lm.continuations(prompts, choices, batch_size=len(batch))
            return [
                {"loss": -score[0][0] / len(answer)}
                for score, answer in zip(scores, answers, strict=True)
            ]

        computations = [computation_digest(run, method) for method in methods]

        def proof(item: tuple[int, str]) -> Row:
            index, id_ = item
            prompt, answer = pairs[id_]
            return {
                REQUEST: request_digest([*prompt, *answer], ()),
                COMPUTATION: computations[index],
            }

        variant = "the side task" if split == "side" else "all tokens scaled"
        label = f"search: {len(methods)} again, {variant}"
        rows = run.rows.complete(DEPLOY_ROWS, label, batches, key, compute, proof=proof)
        losses = {(row["method"], row["id"]): row["loss"] for row in rows}
        return np.array(
            [[losses[index, id_] for id_ in pairs] for index in range(len(methods))]
        )

    def facts(self, table: pd.DataFrame) -> dict[str, Any]:
        """Return what ``found.yaml`` says of the setting to ship, from ``deploy.csv``.

        Args:
            table: Its rows, a candidate each, with the columns ``selected`` and ``best_last_1`` (True in one row each).

        Returns:
            Values by name: format, the chosen candidate and its loss, the best candidate for the last token alone, the
            price (how much higher the loss is as shipped), and the effect on the side task.
        """
        selected = table[table["selected"]].iloc[0]
        best_last_1 = table[table["best_last_1"]].iloc[0]
        facts: dict[str, Any] = {
            "format": self.deploy,
            "found": selected["candidate"],
            "loss": selected["loss"],
            "last_1": best_last_1["candidate"],
            "loss_last_1": best_last_1["loss_last_1"],
        }
        for name in (*estimate_columns("price"), "n", "candidates"):
            facts[name] = selected[name]
        facts["tried"] = len(table) - 1
        facts["exceed"] = (~table["allowed"]).sum()
        if self.side_task:
            facts["side_task"] = self.side_task.name
            for name in (*estimate_columns("side_rise"), "side_n"):
                facts[name] = selected[name]
            facts["side_limit"] = self.side_rise
        return {name: _plain_number(value) for name, value in facts.items()}

    def remarks(self, block: Mapping[str, Any]) -> list[str]:
        """The shipped setting; see :meth:`Search.remarks`."""
        return summary_lines(block["deploy"]) if "deploy" in block else []

    def shipped_sections(self, read: Read) -> list[Section]:
        """Return the report's section on the setting to ship, its price and side effect; empty if there is none.

        Args:
            read: Returns a table of the run by name, None if there is none.
        """
        table = read("deploy")
        if table is None:
            return []
        from posbench.plots.section import Section

        # Two losses: as searched, for the last token alone, and as the shipped files compute it.
        header = ["candidate", "loss, last token", "loss as shipped", "price"]
        estimates = ["price"]
        if "side_rise" in table:
            header.append("rise on the side task")
            estimates.append("side_rise")
        table_by_loss = table.sort_values("loss", kind="stable")
        among_best = np.arange(len(table_by_loss)) < MAX_TABLE_ROWS
        rows = []
        for _, row in table_by_loss[among_best | table_by_loss["selected"]].iterrows():
            cells = [f"{row['loss_last_1']:.4f}", f"{row['loss']:.4f}"]
            cells += [estimate(row, name).words for name in estimates]
            mark = ""
            if row["selected"]:
                mark = "yes"
            # It harms the side task more than search.side_rise allows.
            elif not row["allowed"]:
                mark = "exceeds"
            rows.append([row["candidate"], *cells, mark])
        text = summary_sentences(self.facts(table))
        text += (
            " Price: loss as shipped, less that of the best with the last token alone."
        )
        return [Section("What is shipped", text, [*header, "selected"], rows)]


def summary_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return lines on the setting to ship: its price, its effect on the side task, or that nothing is left to ship.

    The price is how much higher the loss is than that of the best candidate with the last token alone scaled.

    Args:
        facts: From :meth:`DeploySearch.facts`.
    """
    lines = []
    unmodified_wins = facts["found"] == display_name(UNMODIFIED)
    if facts["format"] in FOLDING:
        price = estimate(facts, "price")
        shipped = facts["found"]
        if not unmodified_wins:
            shipped += ", all tokens"
        lines.append(
            f"price of folding for {facts['format']}: {price.loss_verdict}, {price.words} nats per answer token "
            f"on {price.n} calibration prompts; loss {facts['loss']:.4g} ({shipped}) instead of "
            f"{facts['loss_last_1']:.4g} ({facts['last_1']}, last token); the {facts['tried']} best of "
            f"{facts['candidates']} candidates were asked with all tokens"
        )
    if "side_task" in facts:
        line = f"loss on {facts['side_task']}, {facts['side_n']} prompts: "
        if not unmodified_wins:
            rise = estimate(facts, "side_rise")
            line += f"changes by {rise.words} nats per token; "
        line += (
            f"{facts['exceed']} of {facts['tried']} candidates raise it by more than "
        )
        line += f"{facts['side_limit']:g}"
        lines.append(line)
    if unmodified_wins:
        lines.append("nothing is left to ship: the unmodified model wins")
    return lines


def summary_sentences(facts: Mapping[str, Any]) -> str:
    """The lines of :func:`summary_lines` as sentences."""
    return " ".join(map(sentence_case, summary_lines(facts)))


def _plain_number(value: Any) -> Any:
    """A NumPy number as a Python one; floats with six decimals."""
    if isinstance(value, np.generic):
        value = value.item()
    return round(value, 6) if isinstance(value, float) else value


def _label(candidate: ScaleChannel) -> str:
    """A candidate as its figure names it."""
    first, last = candidate.layers
    return f"ch {candidate.channels[0]} x {candidate.factor:g}, layers {first}-{last}"
