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
from posbench.measure.replies import encode_with_answer
from posbench.methods.moice import (
    MoICE,
    auxiliary_loss,
    mixed_attention,
    mixture_weights,
    new_routers,
    save_routers,
)
from posbench.model.guard import check_finite, guarded
from posbench.model.lm import LM
from posbench.plots.section import Section
from posbench.run.base import Run
from posbench.schema import Count, Positive, Seed, Several
from posbench.search.base import ALONE, Read, Search, epoch_section
from posbench.tasks import Example
from posbench.tasks.reading import read_data_rows

if TYPE_CHECKING:
    from posbench.methods.router import Router

ROUTER_FILE = "router.safetensors"
MIN_TEXTS = 4


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
        seed: Seed of the initial weights and of the order of the texts.
    """

    serves: ClassVar[type[MoICE]] = MoICE
    place: ClassVar[str] = ALONE
    finds: ClassVar[Mapping[str, Any]] = {"weights": "uniform"}

    steps: Count = 7
    batch: Count = 128
    learning_rate: Positive = 1e-4
    aux: float = 0.3
    data: str | None = None
    longest: Several = 4608
    seed: Seed = 0

    def files(self) -> tuple[Source, ...]:
        """The file of texts; see :meth:`Search.files`."""
        if self.data is None:
            return ()
        return (Source(kind="path", id=self.data, field="search.data"),)

    def check(self, run: Run) -> None:
        """Refuse typed weights, and texts that are too few or malformed."""
        super().check(run)
        self.texts(run)

    def search(self, run: Run) -> None:
        """Train the routers of MoICE; the first tenth of the texts is held out.

        Writes ``search.csv`` (a row per step), the routers' weights and ``found.yaml``.
        """
        method = run.method.trial()
        texts = self.texts(run)
        assert isinstance(method, MoICE)
        num_held_out = _held_out_count(texts)
        with run.progress("search: steps", self.steps) as advance:
            training_texts = texts[num_held_out:]
            routers, steps = self.train(run.lm, training_texts, method, advance)
        write_csv(run.out.path / "search.csv", pd.DataFrame(steps))
        text_losses = self.held_out(run.lm, texts[:num_held_out], routers, method)
        losses = {name: sum(v) / num_held_out for name, v in text_losses.items()}
        file = run.out.path / ROUTER_FILE
        save_routers(routers, file, {"search": run.raw["search"], "held_out": losses})
        block = {
            "weights": str(file.absolute()),
            "texts": len(training_texts),
            "held_out": losses,
        }
        settings = f"{self.steps} steps of {self.batch} at {self.learning_rate:g}"
        self.write_found(run, block, f"router ({settings})")

    def train(
        self,
        lm: LM,
        texts: Sequence[Sequence[int]],
        method: MoICE,
        advance: Callable[[int], None],
    ) -> tuple[dict[int, Router], list[dict[str, float]]]:
        """Train routers; the model stays as it is.

        Args:
            lm: The model.
            texts: Token ids of each text; their order is drawn again whenever all were used.
            method: Bases and top_k of the mixture.
            advance: Called with 1 after every step.

        Returns:
            The routers by layer, and per step the mean loss, the auxiliary loss and the largest weight of a
            mixture (1 / N for N bases: an even one).
        """
        torch.manual_seed(self.seed)
        rng = random.Random(self.seed)
        top_k = method.top_k
        routers = new_routers(lm.model, len(method.bases))
        for router in routers.values():
            router.to(lm.device)
        gates = [p for router in routers.values() for p in router.parameters()]
        optimizer = torch.optim.AdamW(gates, lr=self.learning_rate, weight_decay=0.0)
        model_parameters = [p for p in lm.model.parameters() if p.requires_grad]
        router_logits: dict[int, torch.Tensor] = {}
        queue: list[Sequence[int]] = []
        steps = []
        # Only the routers are trained.
        lm.model.requires_grad_(False)
        try:
            listen = router_logits.__setitem__
            with mixed_attention(lm.model, routers, method.bases, top_k, listen):
                for step in range(1, self.steps + 1):
                    row = {"step": step, "loss": 0.0, "aux": 0.0, "largest_weight": 0.0}
                    for _ in range(self.batch):
                        if not queue:
                            queue = rng.sample(texts, len(texts))
                        loss = text_loss(lm, queue.pop())
                        # [B, H, T, N] of each layer as [rows, N] of all.
                        logits = torch.cat(
                            [
                                x.flatten(0, 2).to(lm.device)
                                for x in router_logits.values()
                            ]
                        )
                        aux = auxiliary_loss(logits, top_k)
                        # Gradients add up over the batch, one text at a time.
                        ((loss + self.aux * aux) / self.batch).backward()
                        largest_weight = (
                            mixture_weights(logits.detach(), top_k).amax(-1).mean()
                        )
                        row["loss"] += loss.item() / self.batch
                        row["aux"] += aux.item() / self.batch
                        row["largest_weight"] += largest_weight.item() / self.batch
                    optimizer.step()
                    optimizer.zero_grad()
                    steps.append(row)
                    advance(1)
        finally:
            for parameter in model_parameters:
                parameter.requires_grad_(True)
        return routers, steps

    @inference_mode
    def held_out(
        self,
        lm: LM,
        texts: Sequence[Sequence[int]],
        routers: Mapping[int, Router],
        method: MoICE,
    ) -> dict[str, list[float]]:
        """Return the loss of each text under the unmodified model, an even mixture, and the trained one.

        Args:
            lm: The model.
            texts: Token ids of each text.
            routers: The trained routers by layer.
            method: Bases and top_k of the mixture.

        Returns:
            Nats per token of each text, by the name of the mixture.
        """
        losses = {"unmodified": [text_loss(lm, text).item() for text in texts]}
        with mixed_attention(lm.model, None, method.bases, len(method.bases)):
            losses["even mixture"] = [text_loss(lm, text).item() for text in texts]
        with mixed_attention(lm.model, routers, method.bases, method.top_k):
            losses["trained router"] = [text_loss(lm, text).item() for text in texts]
        return losses

    def held_back_examples(self, run: Run, count: int | None) -> list[Example]:
        """Return prompts that the routers are not trained on, at most ``count``; None: as many as there are."""
        if self.data is None:
            return super().held_back_examples(run, count)
        examples = self._examples(run)
        num_held_out = _held_out_count(examples)
        trained_on = {(e.prompt, e.answers) for e in examples[num_held_out:]}
        held_out = examples[:num_held_out]
        return [e for e in held_out if (e.prompt, e.answers) not in trained_on][:count]

    @inference_mode
    def measure_batch(self, run: Run, batch: Sequence[Example]) -> list[float]:
        """Loss of all tokens of each text."""
        losses = []
        for example in batch:
            ids = self._shorten(*encode_with_answer(run.lm, example))
            losses.append(text_loss(run.lm, ids).item())
        return losses

    def texts(self, run: Run) -> list[list[int]]:
        """Return the token ids of the texts to train on.

        Raises:
            UserError: A line of the file has another form, or there are too few texts.
        """
        pairs = [encode_with_answer(run.lm, e) for e in self._examples(run)]
        texts = [self._shorten(*pair) for pair in pairs]
        if len(texts) < MIN_TEXTS:
            field = "search.data" if self.data else "task.calibration_examples"
            hint = "give more lines" if self.data else f"set {field}={MIN_TEXTS}"
            raise UserError(field, len(texts), f"{MIN_TEXTS} texts or more", hint)
        return texts

    def _shorten(self, prompt_ids: list[int], answer_ids: list[int]) -> list[int]:
        """Token ids of a text, cut to its longest length."""
        return (prompt_ids + answer_ids)[: self.longest]

    def _examples(self, run: Run) -> list[Example]:
        """Return the texts to train on as examples with prompt and answer: of the user's file, else of the task."""
        if self.data is None:
            return run.task.examples("calibration")
        with renamed("task.", "search."):
            lines = [line for _, line in read_data_rows("data", Path(self.data))]
            return [
                Example(
                    id=f"h{number}",
                    prompt=line.take("prompt"),
                    answers=(line.take("answer"),),
                )
                for number, line in enumerate(lines)
            ]

    def describe(self, block: Mapping[str, Any]) -> str:
        """Losses on the texts that were held out."""
        losses = [f"{name} {loss:.5f}" for name, loss in block["held_out"].items()]
        return f"{block['weights']}: loss of texts held out: {', '.join(losses)}"

    def sections(self, read: Read) -> list[Section]:
        """The steps of the training."""
        text = "Per step: mean loss of the texts, auxiliary loss, and the largest weight of a mixture."
        return epoch_section(read, text, digits=5)


def _held_out_count(texts: Sequence[Any]) -> int:
    """Number of texts, from the first on, that are not trained on: a tenth, at least one."""
    return max(len(texts) // 10, 1)


@guarded
def text_loss(lm: LM, ids: Sequence[int]) -> torch.Tensor:
    """Mean cross-entropy of all tokens of a text but the first, in nats, a scalar."""
    tokens = torch.tensor([ids], device=lm.device)
    logits = check_finite(lm.model(input_ids=tokens, use_cache=False).logits[0, :-1])
    return F.cross_entropy(logits.float(), tokens[0, 1:])
