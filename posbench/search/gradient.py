"""One RoPE scale per layer, trained on calibration answers: the gradient baseline of LPES (Appendix C)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from posbench.files.atomic import write_csv
from posbench.late import Tensor, pd, torch
from posbench.methods.choice import MethodChoice
from posbench.model import rope
from posbench.model.guard import guarded
from posbench.model.lm import LM
from posbench.plots.section import Section
from posbench.run.base import Run
from posbench.run.cost import StudyWorkload
from posbench.schema import Count, Positive, Scale
from posbench.search.base import Read, save, saved, steps_section
from posbench.search.scales import (
    NEUTRAL,
    POSITIONS,
    ScaleSearch,
    Scores,
    answering,
    calibration,
)


@dataclass(frozen=True, kw_only=True)
class GradientSearch(ScaleSearch):
    """Adam on the scales alone; the defaults are Appendix C's.

    Args:
        start: Scale of every layer at the start; the paper does not say (1: the unmodified model).
        learning_rate: Of Adam: about how much a scale moves per step (1e-5: 0.02 over the paper's training).
        epochs: Passes (30).
        samples: Examples drawn per epoch, with replacement (2000).
        weights: Probability of an example with the answer at the beginning, in the middle, at the end.

    Source: LPES, Appendix C. Loss (not given there): cross-entropy of the answer tokens.
    """

    start: Scale = 1.0
    learning_rate: Positive = 1e-5
    epochs: Count = 30
    samples: Count = 2000

    def asks(
        self, prompts: int, answer: int, layers: int, channels: int
    ) -> StudyWorkload:
        """Every example forwards and back, which takes as long where the weights are fixed; then answers of
        the unmodified model and of what it found, here and on held-back questions."""
        back = 2 * self.epochs * self.samples
        asked = len(POSITIONS) * (prompts + (self.held_back or prompts))
        batches = 2 * -(-asked // self.batch_size)
        return StudyWorkload(
            back + 2 * asked, back * answer, replies=2 * asked, batches=batches
        )

    def target(self, choice: MethodChoice) -> MethodChoice | None:
        """Alone: a method inside the scales would stand between them and their gradients."""
        return None if choice.parts else super().target(choice)

    def search(self, run: Run) -> None:
        """Write ``search.csv``, a row per epoch; the last epoch's scales are found."""
        lm = run.lm
        out = run.out
        examples, positions = calibration(run.task, self.calibration_seed)
        pairs = [
            lm.answer_ids(example.prompt, example.answers[0]) for example in examples
        ]
        pools = [
            [i for i, position in enumerate(positions) if position == p]
            for p in range(len(POSITIONS))
        ]
        scales = torch.full(
            (lm.layers,), float(self.start), device=lm.device, requires_grad=True
        )
        optimizer = torch.optim.Adam([scales], lr=self.learning_rate)
        known = saved(run)
        history: list[dict[str, float]] = known.get("history", [])
        if known:
            scales.data.copy_(known["scales"])
            optimizer.load_state_dict(known["optimizer"])
        with run.progress("search: epochs", self.epochs, len(history)) as advance:
            for epoch in range(len(history), self.epochs):
                rng = random.Random(f"posbench gradient {self.seed}/{epoch}")
                drawn = [
                    rng.choice(rng.choices(pools, weights=self.weights)[0])
                    for _ in range(self.samples)
                ]
                losses = []
                for start in range(0, len(drawn), self.batch_size):
                    loss = answer_loss(
                        lm,
                        scales,
                        [pairs[i] for i in drawn[start : start + self.batch_size]],
                    )
                    (scales.grad,) = torch.autograd.grad(loss, scales)
                    optimizer.step()
                    losses.append(loss.item())
                named = {
                    f"scale_{layer}": scale
                    for layer, scale in enumerate(scales.tolist())
                }
                history.append(
                    {"epoch": epoch + 1, "loss": float(np.mean(losses)), **named}
                )
                state = {"scales": scales.detach(), "optimizer": optimizer.state_dict()}
                save(run, {"history": history, **state})
                advance(1)
        write_csv(out.path / "search.csv", pd.DataFrame(history))
        final = tuple(scales.tolist())
        scores = Scores(self, np.array(positions), answering(lm, run.task, examples))
        for candidate in dict.fromkeys(((1.0,) * lm.layers, final)):
            scores.fill(candidate)
        speed = f"{self.epochs} epochs of {self.samples}, learning rate {self.learning_rate:g}"
        parameters = {**NEUTRAL, "scales": list(final)}
        self.write_scales(run, parameters, final, scores, f"gradient baseline ({speed}")

    def sections(self, read: Read) -> list[Section]:
        """Loss and scales epoch by epoch."""
        return steps_section(
            read, "Mean loss and the scales at the end of every epoch.", 4
        )


@guarded
def answer_loss(
    lm: LM, scales: Tensor, pairs: Sequence[tuple[list[int], list[int]]]
) -> Tensor:
    """Mean cross-entropy in nats per answer token, a scalar that can be differentiated by the scales [L]."""
    inputs, targets = lm.pad_with_answers(pairs)
    changes = {
        layer: _divided(scales[layer]) for layer in rope.rotated_layers(lm.model)
    }
    with rope.tables(lm.model, changes, _with_gradients):
        logits = lm.model(
            **inputs, use_cache=False, logits_to_keep=targets.shape[1]
        ).logits
    return lm.answer_nats(logits, targets).mean()


def _divided(scale: Tensor) -> Callable[[rope.Call], rope.Call]:
    return lambda call: replace(
        call, positions=call.positions.float() / scale.to(call.positions.device)
    )


def _with_gradients(call: rope.Call) -> rope.Table:
    # The library computes its tables without gradients; below that decorator is the same function with them.
    forward = type(call.module).forward.__wrapped__  # type: ignore[attr-defined]
    positions = call.positions.to(
        call.hidden.device
    )  # as accelerate would, which it bypasses, too
    with rope.steady(call.module):
        return forward(call.module, call.hidden, positions, **call.options)
