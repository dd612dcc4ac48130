"""The router of MoICE, trained: the model stays frozen, only the gates of its attention layers learn."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from posbench.errors import UserError, renamed
from posbench.files.atomic import write_csv
from posbench.files.sources import Source
from posbench.late import F, inference_mode, pd, torch
from posbench.methods.moice import (
    MoICE,
    auxiliary_loss,
    mixing,
    mixture,
    new_routers,
    save_routers,
)
from posbench.model.guard import finite, guarded
from posbench.model.lm import LM
from posbench.plots.section import Section
from posbench.run.base import Run
from posbench.schema import Count, Positive, Seed, Several
from posbench.search.base import Read, Search, steps_section
from posbench.tasks import Example
from posbench.tasks.reading import rows

if TYPE_CHECKING:
    from posbench.methods.router import Router

FILE = "router.safetensors"


@dataclass(frozen=True, kw_only=True)
class RouterSearch(Search):
    """Training of the router on texts: the task's calibration prompts with their answers, or a file's lines.

    The loss is the next-token cross-entropy of all tokens, the prompt's included, plus ``aux`` times the
    auxiliary loss of balanced experts. The defaults are those of the released program (p1nksnow/MoICE,
    e14b5a3). With all 7 bases kept the auxiliary loss is the constant 7 without a gradient
    (:func:`posbench.methods.moice.auxiliary_loss`).

    Args:
        steps: Updates, by AdamW without weight decay (7).
        batch: Texts per update, run one by one (128 conversations).
        learning_rate: Constant (1e-4, which leaves the mixture even after 7 steps).
        aux: Coefficient of the auxiliary loss (0.3).
        data: JSON lines, each with ``prompt`` and ``answer``; None: the task's calibration prompts.
        longest: Tokens per text at most; a longer one is cut at its end.
        seed: Of the first weights and of the order of the texts.
    """

    serves: ClassVar[type[MoICE]] = MoICE
    place: ClassVar[str] = "alone"
    finds: ClassVar[Mapping[str, Any]] = {"weights": "uniform"}
    results: ClassVar[Sequence[str]] = ("search.csv", FILE)

    steps: Count = 7
    batch: Count = 128
    learning_rate: Positive = 1e-4
    aux: float = 0.3
    data: str | None = None
    longest: Several = 4608
    seed: Seed = 0

    def files(self) -> tuple[Source, ...]:
        """See :meth:`Search.files`."""
        return (
            (Source(kind="path", id=self.data, field="search.data"),)
            if self.data
            else ()
        )

    def check(self, run: Run) -> None:
        """Refuse typed weights, and texts that are too few or malformed, too."""
        super().check(run)
        self.texts(run)

    def search(self, run: Run) -> None:
        """Write ``search.csv``, a row per step, and the router."""
        method = run.method.trial()
        texts = self.texts(run)
        assert isinstance(method, MoICE)
        part = max(len(texts) // 10, 1)
        with run.progress("search: steps", self.steps) as advance:
            routers, steps = self.train(run.lm, texts[part:], method, advance)
        write_csv(run.out.path / "search.csv", pd.DataFrame(steps))
        held = self.held_out(run.lm, texts[:part], routers, method)
        losses = {name: sum(values) / part for name, values in held.items()}
        file = run.out.path / FILE
        save_routers(routers, file, {"search": run.raw["search"], "held_out": losses})
        block = {
            "weights": str(file.absolute()),
            "texts": len(texts) - part,
            "held_out": losses,
        }
        self.write_found(
            run,
            block,
            f"router ({self.steps} steps of {self.batch} at {self.learning_rate:g})",
        )

    def train(
        self,
        lm: LM,
        rows: Sequence[Sequence[int]],
        method: MoICE,
        advance: Callable[[int], None],
    ) -> tuple[dict[int, Router], list[dict[str, float]]]:
        """Train routers on texts (token ids, in another order when all were used); the model stays as it is.

        Returns the routers by layer, and per step the mean loss, auxiliary loss and largest weight of a
        mixture (1 / N for N bases: an even one).
        """
        torch.manual_seed(self.seed)
        count = len(method.bases)
        top_k = method.top_k
        shuffle = random.Random(self.seed)
        order = list[Sequence[int]]()
        routers = {
            layer: router.to(lm.device)
            for layer, router in new_routers(lm.model, count).items()
        }
        parameters = [p for router in routers.values() for p in router.parameters()]
        optimizer = torch.optim.AdamW(
            parameters, lr=self.learning_rate, weight_decay=0.0
        )
        frozen = [p for p in lm.model.parameters() if p.requires_grad]
        heard = dict[int, torch.Tensor]()
        steps = []
        lm.model.requires_grad_(False)
        try:
            with mixing(lm.model, routers, method.bases, top_k, heard.__setitem__):
                for number in range(1, self.steps + 1):
                    seen = {"loss": 0.0, "aux": 0.0, "largest_weight": 0.0}
                    for _ in range(self.batch):
                        order = order or shuffle.sample(rows, len(rows))
                        loss = text_loss(lm, order.pop())
                        logits = torch.cat(
                            [x.flatten(0, 2).to(lm.device) for x in heard.values()]
                        )
                        aux = auxiliary_loss(logits, top_k)
                        ((loss + self.aux * aux) / self.batch).backward()
                        largest = mixture(logits.detach(), top_k).amax(-1).mean()
                        for name, value in zip(seen, (loss, aux, largest), strict=True):
                            seen[name] += value.item() / self.batch
                    optimizer.step()
                    optimizer.zero_grad()
                    steps.append({"step": number, **seen})
                    advance(1)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
        return routers, steps

    @inference_mode
    def held_out(
        self,
        lm: LM,
        rows: Sequence[Sequence[int]],
        routers: Mapping[int, Router],
        method: MoICE,
    ) -> dict[str, list[float]]:
        """Loss of each text under the unmodified model, an even mixture, and the trained one."""
        losses = {"unmodified": [text_loss(lm, row).item() for row in rows]}
        count = len(method.bases)
        for name, given, kept in (
            ("even mixture", None, count),
            ("trained router", routers, method.top_k),
        ):
            with mixing(lm.model, given, method.bases, kept):
                losses[name] = [text_loss(lm, row).item() for row in rows]
        return losses

    def further(self, run: Run, count: int | None) -> list[Example]:
        """See :meth:`Search.further`; of a file the texts that it is not trained on."""
        if self.data is None:
            return super().further(run, count)
        pairs = self._pairs(run)
        part = max(len(pairs) // 10, 1)
        fresh = [pair for pair in pairs[:part] if pair not in pairs[part:]][:count]
        return [
            Example(id=f"h{n}", prompt=text, answers=(answer,))
            for n, (text, answer) in enumerate(fresh)
        ]

    @inference_mode
    def measured(self, run: Run, batch: Sequence[Example]) -> list[float]:
        """Loss of all tokens of each text."""
        return [
            text_loss(run.lm, self._ids(run.lm, e.prompt, e.answers[0])).item()
            for e in batch
        ]

    def texts(self, run: Run) -> list[list[int]]:
        """Token ids of the texts; `UserError` for a line that is not of its form, and for too few texts."""
        texts = [self._ids(run.lm, *pair) for pair in self._pairs(run)]
        if len(texts) < 4:
            raise UserError(
                "search.data",
                len(texts),
                "4 texts or more",
                "give more lines or examples",
            )
        return texts

    def _ids(self, lm: LM, prompt: str, answer: str) -> list[int]:
        asked, told = lm.answer_ids(prompt, answer)
        return (asked + told)[: self.longest]

    def _pairs(self, run: Run) -> list[tuple[str, str]]:
        if self.data is None:
            return [(e.prompt, e.answers[0]) for e in run.task.examples("calibration")]
        with renamed("task.", "search."):
            lines = [line for _, line in rows("data", Path(self.data))]
            return [(line.take("prompt"), line.take("answer")) for line in lines]

    def told(self, block: Mapping[str, Any]) -> str:
        """Losses on the texts that were held out."""
        losses = ", ".join(
            f"{name} {value:.5f}" for name, value in block["held_out"].items()
        )
        return f"{block['weights']}: loss of texts held out: {losses}"

    def sections(self, read: Read) -> list[Section]:
        """The steps of the training."""
        text = "Per step: mean loss of the texts, auxiliary loss, and the largest weight of a mixture."
        return steps_section(read, text, 5)


@guarded
def text_loss(lm: LM, ids: Sequence[int]) -> torch.Tensor:
    """Mean cross-entropy in nats of all tokens of a text but the first."""
    tokens = torch.tensor([ids], device=lm.device)
    logits = finite(lm.model(input_ids=tokens, use_cache=False).logits[0, :-1])
    return F.cross_entropy(logits.float(), tokens[0, 1:])
