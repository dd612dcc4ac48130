"""A search for what will be shipped: as a format holds it, and within a budget of side effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from posbench.errors import UserError, renamed
from posbench.files.atomic import Row
from posbench.files.sources import Source
from posbench.late import pd
from posbench.measure.replies import encode
from posbench.methods import Method
from posbench.methods.composed import Composed
from posbench.methods.scale_channel import ScaleChannel
from posbench.methods.unmodified import Unmodified
from posbench.plots.section import Section
from posbench.run.base import Run
from posbench.schema import Count, NonNegative
from posbench.search import held_back
from posbench.search.base import ROWS, Read, Search
from posbench.search.statistics import Array
from posbench.stats.bootstrap import paired
from posbench.stats.findings import columns, ends, estimate
from posbench.stats.frames import UNMODIFIED, shown
from posbench.tasks import Example, Task
from posbench.tasks.base import EvaluationOnly

FOLDING = ("checkpoint", "lora", "gguf", "gguf-lora")
"""Formats of ``posbench export`` that scale the attention of all tokens."""
Format = Literal["checkpoint", "lora", "gguf", "gguf-lora", "transformers"]
AGAIN = "deploy.jsonl"
MOST = 12  # rows of the report's table, the best ones
Pairs = Mapping[str, tuple[list[int], list[int]]]
"""Prompts and what should follow them, as token ids, by id."""


@dataclass(frozen=True, kw_only=True)
class DeploySearch(Search):
    """A search for settings of scale_channel that goes on to what will be shipped, where that is asked.

    The candidates that are best with the last token alone are asked again: as the format holds them, and on
    the side task. The unmodified model stands among them, so what is chosen is at least as good. With
    ``layers=auto`` the two orders can differ much: take a larger ``shortlist`` then.

    Args:
        top_k: See the search.
        deploy: What ``posbench export --to`` will be given. Formats that fold scale the attention of all
            tokens (``last=all``); ``transformers`` holds the method as it is, as does None.
        shortlist: Candidates that are asked again; None: ``top_k``.
        side_task: A second task, chosen as ``task`` is. Its loss is that of the right choice, or of the first
            answer, on calibration prompts where it has some, else on those of its evaluation.
        side_rise: Nats per token that it may rise by; 0.02 makes the right answer 2 % less likely.
        side_prompts: Prompts of it at most, spread over all.
    """

    rows: ClassVar[Sequence[str]] = (ROWS, AGAIN, held_back.ROWS)

    top_k: Count = 10
    deploy: Format | None = None
    shortlist: Count | None = None
    side_task: Task | None = None
    side_rise: NonNegative = 0.02
    side_prompts: Count = 100

    @property
    def folds(self) -> bool:
        """Whether the format scales the attention of all tokens."""
        return self.deploy in FOLDING

    @property
    def asked_again(self) -> int:
        """Candidates at most that are asked again."""
        return (self.shortlist or self.top_k) if self.folds or self.side_task else 0

    def files(self) -> tuple[Source, ...]:
        """Those of the side task."""
        found = self.side_task.files() if self.side_task else ()
        return tuple(replace(file, field=f"search.side_{file.field}") for file in found)

    def beside(self) -> tuple[Task, list[Example], int] | None:
        """See :meth:`Search.beside`."""
        task = self.side_task
        times = 1 + self.asked_again
        return (
            (task, [replace(e, max_new_tokens=1) for e in self._side()], times)
            if task
            else None
        )

    def _side(self) -> list[Example]:
        """Prompts of the side task; `UserError` where its files cannot be read, or no answer is known."""
        task: Any = self.side_task
        with renamed("task.", "search.side_task."):
            found = (
                task.evaluation()
                if isinstance(task, EvaluationOnly)
                else task.examples("calibration")
            )
        known = [e for e in found if e.answers and e.answers[0]]
        if not known:
            raise UserError(
                "search.side_task",
                task.name,
                "a task with known answers",
                "take another one",
            )
        at = np.linspace(0, len(known) - 1, min(self.side_prompts, len(known)))
        return [known[i] for i in at.round().astype(int)]

    def check(self, run: Run) -> None:
        """Refuse a method that the format does not hold, and a side task that the model does not read."""
        if run.method.target is None:  # a study's search
            if self.asked_again:
                hint = "leave out search.deploy and search.side_task"
                raise UserError(
                    "search.deploy",
                    self.deploy,
                    "null in a study, which ships nothing",
                    hint,
                )
            return
        last = run.method.target.pinned.get("last")
        if self.folds and last not in (None, "all"):
            allowed = f"all, with search.deploy={self.deploy}, which folds"
            raise UserError(
                f"{run.method.target.where}.last",
                last,
                allowed,
                "leave one of the two out",
            )
        if self.folds and run.method.trial().twin().folded(run.lm) is None:
            allowed = f"a method that folds into a {self.deploy}; {run.method.choice.name} with these keys does not"
            raise UserError(
                "search.deploy", self.deploy, allowed, "set search.deploy=transformers"
            )
        if self.side_task:
            tokens = [
                token for ids, _ in self._side_pairs(run).values() for token in ids
            ]
            if tokens.count(run.lm.need_tokenizer().unk_token_id) > len(tokens) / 10:
                allowed = f"text that the tokenizer of {run.lm.name} spells"
                name = self.side_task.name
                raise UserError(
                    "search.side_task",
                    name,
                    allowed,
                    "take another one, or another model",
                )

    def again(
        self,
        run: Run,
        candidates: Sequence[ScaleChannel],
        each: Array,
        best: int | None,
    ) -> tuple[pd.DataFrame, int | None]:
        """Ask the shortlist again, inside the run's other methods; resumed.

        From C candidates, their losses with the last token alone behind the unmodified model's, [1 + C, N],
        and the best of them (None: the unmodified model). Gives ``deploy.csv``, and what is chosen, alike.
        """
        order = np.argsort(each[1:].mean(1), kind="stable").tolist()
        short = sorted(order, key=lambda i: i != best)[: self.asked_again]
        trial = run.method.trial()
        part: Any = (
            [*trial.parts.values()][-1] if isinstance(trial, Composed) else trial
        )
        mode = part.twin() if self.folds else part
        fields = ("channel", "factor", "layers")
        examples = run.examples("calibration")
        methods = [
            replace(mode, **{name: getattr(candidates[i], name) for name in fields})
            for i in short
        ]
        before = losses = each[[0, *(i + 1 for i in short)]]
        if mode.last != 1 or mode.tokens != "both":
            own = {e.id: run.lm.answer_ids(e.prompt, e.answers[0]) for e in examples}
            losses = np.concatenate(
                [each[:1], self._nats(run, "calibration", own, methods)]
            )
        table = pd.DataFrame({"rank": [0, *(order.index(i) + 1 for i in short)]})
        table["candidate"] = [shown(UNMODIFIED), *map(_label, methods)]
        table["loss_last_1"], table["loss"] = before.mean(1), losses.mean(1)
        table["best_last_1"] = table.index == (
            best is not None
        )  # it is the first of the shortlist
        optimum = each[0 if best is None else best + 1]
        clusters = [e.cluster or e.id for e in examples]
        prices = [ends(paired(values, optimum, clusters), "price") for values in losses]
        table = table.join(pd.DataFrame(prices)).assign(
            n=len(examples), candidates=len(candidates)
        )
        table["allowed"] = True
        if self.side_task:
            clusters = [e.cluster or e.id for e in self._side()]
            pairs = self._side_pairs(run)
            side = self._nats(run, "side", pairs, [Unmodified(), *methods])
            rises = [
                ends(paired(values, side[0], clusters), "side_rise") for values in side
            ]
            table = table.join(pd.DataFrame(rises)).assign(
                side_loss=side.mean(1), side_n=len(clusters)
            )
            table["allowed"] = table["side_rise"] <= self.side_rise
        won = int(table.loc[table["allowed"], "loss"].idxmin())
        table["selected"] = table.index == won
        return table, short[won - 1] if won else None

    def _side_pairs(self, run: Run) -> Pairs:
        """The prompts of the side task, each with the right choice or the first answer."""
        task = self.side_task
        found = dict[str, tuple[list[int], list[int]]]()
        assert task is not None
        for e in self._side():
            accepted = {answer.strip() for answer in e.answers}
            text = next(
                (choice for choice in e.choices if choice.strip() in accepted),
                e.answers[0],
            )
            room = len(
                run.lm.need_tokenizer()(text, add_special_tokens=False)["input_ids"]
            )
            with renamed("task.", "search.side_task."):
                code = encode(run.lm, task, replace(e, max_new_tokens=room))
            found[e.id] = code.ids, run.lm.continuation_ids(code, text)
        return found

    def _nats(
        self, run: Run, of: str, pairs: Pairs, methods: Sequence[Method]
    ) -> Array:
        """Losses under M methods, [M, N], nats per token; each method reads all prompts itself."""
        groups = run.prompts.batches_by_length(
            list(pairs), lambda name: sum(map(len, pairs[name]))
        )
        plan = [
            [(number, name) for name in group]
            for number in range(len(methods))
            for group in groups
        ]

        def compute(batch: Sequence[tuple[int, str]]) -> list[Row]:
            asked = [pairs[name] for _, name in batch]
            prompts = [ids for ids, _ in asked]
            answers = [[right] for _, right in asked]
            with methods[batch[0][0]].applied(run.lm) as lm:
                said = lm.continuations(prompts, answers, batch_size=len(batch))
            return [
                {"loss": -row[0][0] / len(right)}
                for row, (_, right) in zip(said, asked, strict=True)
            ]

        def key(item: tuple[int, str]) -> Row:
            return {"of": of, "method": item[0], "id": item[1]}

        what = "the side task" if of == "side" else "all tokens scaled"
        rows = run.rows.complete(
            AGAIN, f"search: {len(methods)} again, {what}", plan, key, compute
        )
        found = {(row["method"], row["id"]): row["loss"] for row in rows}
        return np.array(
            [[found[number, name] for name in pairs] for number in range(len(methods))]
        )

    def facts(self, table: pd.DataFrame) -> dict[str, Any]:
        """What ``deploy.csv`` says, for ``found.yaml`` and :func:`words`."""
        won = table[table["selected"]].iloc[0]
        first = table[table["best_last_1"]].iloc[0]
        found = {"format": self.deploy, "found": won["candidate"], "loss": won["loss"]}
        found |= {"last_1": first["candidate"], "loss_last_1": first["loss_last_1"]}
        found |= {name: won[name] for name in (*columns("price"), "n", "candidates")}
        found |= {"tried": len(table) - 1, "exceed": (~table["allowed"]).sum()}
        if self.side_task:
            found |= {
                "side_task": self.side_task.name,
                **{c: won[c] for c in columns("side_rise")},
            }
            found |= {"side_n": won["side_n"], "side_limit": self.side_rise}
        plain = {
            k: v.item() if isinstance(v, np.generic) else v for k, v in found.items()
        }
        return {k: round(v, 6) if isinstance(v, float) else v for k, v in plain.items()}

    def remarks(self, block: Mapping[str, Any]) -> list[str]:
        """See :meth:`Search.remarks`."""
        return words(block["deploy"]) if "deploy" in block else []

    def shipped(self, read: Read) -> list[Section]:
        """What is shipped, with its price and its side effect, then the shortlist."""
        table = read("deploy")
        rows = []
        if table is None:
            return []
        numbers = ["price", *["side_rise"] * ("side_rise" in table)]
        best = table.sort_values("loss", kind="stable")
        for _, row in best[(np.arange(len(best)) < MOST) | best["selected"]].iterrows():
            cells = [f"{row['loss_last_1']:.4f}", f"{row['loss']:.4f}"]
            cells += [estimate(row, name).words for name in numbers]
            mark = "yes" if row["selected"] else "" if row["allowed"] else "exceeds"
            rows.append([row["candidate"], *cells, mark])
        header = [
            "candidate",
            "loss, last token",
            "loss as shipped",
            "price",
            "rise on the side task",
        ]
        text = (
            "Price: loss as shipped, less that of the best with the last token alone."
        )
        text = f"{told(self.facts(table))} {text}"
        return [
            Section(
                "What is shipped", text, [*header[: 3 + len(numbers)], "selected"], rows
            )
        ]


def words(facts: Mapping[str, Any]) -> list[str]:
    """What is shipped, its price and its side effect, a line each."""
    out = []
    kept = facts["found"] == shown(UNMODIFIED)
    if facts["format"] in FOLDING:
        gap = estimate(facts, "price")
        what = facts["found"] if kept else f"{facts['found']}, all tokens"
        out.append(
            f"price of folding for {facts['format']}: {gap.loss_verdict}, {gap.words} nats per answer token "
            f"on {gap.n} calibration prompts; loss {facts['loss']:.4g} ({what}) instead of "
            f"{facts['loss_last_1']:.4g} ({facts['last_1']}, last token); the {facts['tried']} best of "
            f"{facts['candidates']} candidates were asked with all tokens"
        )
    if "side_task" in facts:
        rise = estimate(facts, "side_rise").words
        task = facts["side_task"]
        front = f"loss on {task}, {facts['side_n']} prompts: "
        front += "" if kept else f"changes by {rise} nats per token; "
        front += (
            f"{facts['exceed']} of {facts['tried']} candidates raise it by more than "
        )
        out.append(f"{front}{facts['side_limit']:g}")
    if kept:
        out.append("nothing is left to ship: the unmodified model wins")
    return out


def told(facts: Mapping[str, Any]) -> str:
    """The same as sentences."""
    return " ".join(f"{line[0].upper()}{line[1:]}." for line in words(facts))


def _label(c: ScaleChannel) -> str:
    """As the figure of the candidates names it."""
    return f"ch {c.channels[0]} x {c.factor:g}, layers {c.layers[0]}-{c.layers[1]}"
