"""One RoPE scale per layer, trained on calibration answers: the gradient baseline of LPES (Appendix C)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from posbench.errors import UserError
from posbench.files.atomic import write_csv
from posbench.late import Tensor, pd, torch
from posbench.measure.replies import encode_with_answer
from posbench.model import rope
from posbench.model.guard import guarded
from posbench.model.lm import LM
from posbench.plots.section import Section
from posbench.run.base import Run
from posbench.run.cost import StudyWorkload
from posbench.schema import Count, Positive, Scale
from posbench.search.base import ALONE, Read, epoch_section, load_state, save_state
from posbench.search.scales import (
    NO_SCALES,
    POSITIONS,
    ScaleSearch,
    Scores,
    calibration_questions,
    make_evaluator,
)


@dataclass(frozen=True, kw_only=True)
class GradientSearch(ScaleSearch):
    """Gradient descent on the scales alone; the defaults of its settings are Appendix C's, Adam is our choice.

    Args:
        start: Scale of every layer at the start; the paper does not say (1: the unmodified model).
        learning_rate: Of Adam: about how much a scale moves per step (1e-5: 0.02 over the paper's training).
        epochs: Passes (30).
        samples: Examples drawn per epoch, with replacement (2000).
        weights: Probability of an example with the answer at the beginning, in the middle, at the end.

    Source: LPES, Appendix C, which names neither optimiser nor loss; ours is the cross-entropy of the answer tokens.
    """

    # Other methods would cut the scales from their gradients.
    place: ClassVar[str] = ALONE

    start: Scale = 1.0
    learning_rate: Positive = 1e-5
    epochs: Count = 30
    samples: Count = 2000

    def workload(
        self, prompts: int, answer: int, layers: int, channels: int
    ) -> StudyWorkload:
        """Return the work of the training, then of the unmodified model and the result.

        With fixed weights the backward pass of an example takes as long as its forward pass, and counts as a
        second read. The two methods answer the calibration questions and the held-back ones.

        Args:
            prompts: Number of calibration questions.
            answer: Tokens of an answer.
            layers: Number of layers.
            channels: Number of channels.
        """
        training_reads = 2 * self.epochs * self.samples
        questions = len(POSITIONS) * (prompts + (self.held_back or prompts))
        return StudyWorkload(
            prompts=training_reads + 2 * questions,
            answers=training_reads * answer,
            replies=2 * questions,
            batches=2 * math.ceil(questions / self.batch_size),
        )

    def search(self, run: Run) -> None:
        """Train the scales, and write ``search.csv``, a row per epoch; the last epoch's scales are the result."""
        lm = run.lm
        examples, positions = calibration_questions(run.task, self.calibration_seed)
        pairs = [encode_with_answer(lm, e) for e in examples]
        # Indices of the examples, by gold position.
        pools: list[list[int]] = [[] for _ in POSITIONS]
        for index, position in enumerate(positions):
            pools[position].append(index)

        start = float(self.start)
        scales = torch.full((lm.layers,), start, device=lm.device, requires_grad=True)
        optimizer = torch.optim.Adam([scales], lr=self.learning_rate)
        # A killed search goes on after its last epoch.
        state = load_state(run)
        history: list[dict[str, float]] = state.get("history", [])
        if state:
            scales.data.copy_(state["scales"])
            optimizer.load_state_dict(state["optimizer"])
        with run.progress("search: epochs", self.epochs, len(history)) as advance:
            for epoch in range(len(history), self.epochs):
                losses = []
                for batch in self._batches(epoch, pools):
                    loss = answer_loss(lm, scales, [pairs[i] for i in batch])
                    (scales.grad,) = torch.autograd.grad(loss, scales)
                    optimizer.step()
                    losses.append(loss.item())
                row = {"epoch": epoch + 1, "loss": float(np.mean(losses))}
                for layer, scale in enumerate(scales.tolist()):
                    row[f"scale_{layer}"] = scale
                history.append(row)
                state = {
                    "history": history,
                    "scales": scales.detach(),
                    "optimizer": optimizer.state_dict(),
                }
                save_state(run, state)
                advance(1)
        write_csv(run.out.path / "search.csv", pd.DataFrame(history))

        unmodified = (1.0,) * lm.layers
        trained = tuple(scales.tolist())
        if not all(1e-6 < scale <= 1e6 for scale in trained):
            allowed = f"a rate under which all scales stay above 0 (the least is {min(trained):g})"
            hint = f"set search.learning_rate={self.learning_rate / 10:g}"
            raise UserError("search.learning_rate", self.learning_rate, allowed, hint)
        # Accuracy of the result, by generated replies.
        scores = Scores(
            self, np.array(positions), make_evaluator(lm, run.task, examples)
        )
        scores.score_all(unmodified)
        scores.score_all(trained)
        parameters = {**NO_SCALES, "scales": list(trained)}
        description = f"gradient baseline ({self.epochs} epochs of {self.samples}"
        description += f", learning rate {self.learning_rate:g}"
        self.write_scales(run, parameters, trained, scores, description)

    def _batches(self, epoch: int, pools: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return batches of example indices for an epoch, drawn by the weights of the gold positions.

        Args:
            epoch: Index of the epoch, which seeds the draw.
            pools: Indices of the examples at each gold position.
        """
        rng = random.Random(f"posbench gradient {self.seed}/{epoch}")
        sample = []
        for _ in range(self.samples):
            (pool,) = rng.choices(pools, weights=self.weights)
            sample.append(rng.choice(pool))
        starts = range(0, len(sample), self.batch_size)
        return [sample[start : start + self.batch_size] for start in starts]

    def sections(self, read: Read) -> list[Section]:
        """Loss and scales epoch by epoch."""
        text = "Mean loss and the scales at the end of every epoch."
        return epoch_section(read, text, digits=4)


@guarded
def answer_loss(
    lm: LM, scales: Tensor, pairs: Sequence[tuple[list[int], list[int]]]
) -> Tensor:
    """Mean cross-entropy of the answer tokens under layer scaling, differentiable by the scales.

    Args:
        lm: The model, with L layers.
        scales: RoPE scale of each layer, shape (L,).
        pairs: Token ids of prompts and of their answers.

    Returns:
        Nats per token, a scalar.
    """
    inputs, targets = lm.pad_with_answers(pairs)
    layers = rope.rotated_layers(lm.model)
    changes = {layer: _position_divider(scales[layer]) for layer in layers}
    with rope.tables(lm.model, changes, _table_with_gradients):
        num_logits = targets.shape[1]
        output = lm.model(**inputs, use_cache=False, logits_to_keep=num_logits)
    return lm.answer_nats(output.logits, targets).mean()


def _position_divider(scale: Tensor) -> Callable[[rope.RotaryCall], rope.RotaryCall]:
    """Return a change of rotary calls that divides positions by a scalar tensor, through which gradients flow."""

    def divide(call: rope.RotaryCall) -> rope.RotaryCall:
        scaled = call.positions.float() / scale.to(call.positions.device)
        return replace(call, positions=scaled)

    return divide


def _table_with_gradients(call: rope.RotaryCall) -> rope.Table:
    """Return cos and sin of a rotary call, differentiable by its positions."""
    # The library computes its tables without gradients; below that decorator is the same function with them.
    forward = type(call.module).forward.__wrapped__  # type: ignore[attr-defined]
    # As accelerate's hooks would do, which this call bypasses, too.
    positions = call.positions.to(call.hidden.device)
    with rope.fixed_frequencies(call.module):
        return forward(call.module, call.hidden, positions, **call.options)
