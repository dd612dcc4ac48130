"""Train one RoPE scale per layer on calibration answers: the gradient baseline of LPES (Appendix C)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import posbench
from posbench.files.atomic import write_csv, write_text
from posbench.model import rope
from posbench.model.lm import LM
from posbench.pipeline.config import Config
from posbench.run.base import Run, search_once
from posbench.search import GeneticSearch, GradientSearch
from posbench.search.curve_run import answering, calibration, check_task, found_block, hand_over, key_of
from posbench.search.genetic import POSITIONS, Scores

STATE = "search_state.json"
RESULTS = ("search.csv", "found.yaml")


def run(run: Run) -> None:
    """Train, write ``search.csv`` (a row per epoch) and ``found.yaml``, and hand the last epoch's scales to
    the later stages."""
    search_once(run, key_of(run), RESULTS, lambda: _search(run))
    hand_over(run)


def check(config: Config, lm: LM) -> None:
    """Refuse typed parameters and tasks that do not fit, before anything runs.

    Raises:
        UserError: See above.
    """
    check_task(config)


def answer_loss(lm: LM, scales: Tensor, pairs: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    """Mean cross-entropy in nats per answer token, a scalar that can be differentiated by the scales.

    Args:
        lm: The model.
        scales: One per layer, [L].
        pairs: Prompt and answer token ids.
    """
    inputs, targets = lm.pad_with_answers(pairs)
    changes = {layer: _divided(scales[layer]) for layer in rope.rotated_layers(lm.model)}
    with rope.tables(lm.model, changes, _with_gradients):
        logits = lm.model(**inputs, use_cache=False, logits_to_keep=targets.shape[1]).logits
    return lm.answer_nats(logits, targets).mean()


def _divided(scale: Tensor) -> Callable[[rope.Call], rope.Call]:
    return lambda call: replace(call, positions=call.positions.float() / scale)


def _with_gradients(call: rope.Call) -> rope.Table:
    # The library computes its tables without gradients; below that decorator is the same function with them.
    forward = type(call.module).forward.__wrapped__  # type: ignore[attr-defined]
    return forward(call.module, call.hidden, call.positions, **call.options)


def _search(run: Run) -> None:
    search, lm, task = run.config.search, run.lm, run.config.task
    assert isinstance(search, GradientSearch)
    examples, positions = calibration(task)
    pairs = [lm.answer_ids(example.prompt, example.answers[0]) for example in examples]
    pools = [[i for i, position in enumerate(positions) if position == p] for p in range(len(POSITIONS))]
    scales = torch.full((lm.layers,), search.start, device=lm.device, requires_grad=True)
    optimizer = torch.optim.Adam([scales], lr=search.learning_rate)
    history: list[dict[str, float]] = run.out.read_json(STATE).get("history", [])
    if history:
        _restore(scales, optimizer, run.out.read_json(STATE))
    with run.progress("search: epochs", search.epochs) as advance:
        advance(len(history))
        for epoch in range(len(history), search.epochs):
            rng = random.Random(f"posbench gradient {search.seed}/{epoch}")
            drawn = [rng.choice(rng.choices(pools, weights=search.weights)[0]) for _ in range(search.samples)]
            losses = []
            for start in range(0, len(drawn), search.batch_size):
                batch = drawn[start : start + search.batch_size]
                loss = answer_loss(lm, scales, [pairs[i] for i in batch])
                (scales.grad,) = torch.autograd.grad(loss, scales)
                optimizer.step()
                losses.append(loss.item())
            named = {f"scale_{layer}": scale for layer, scale in enumerate(scales.tolist())}
            history.append({"epoch": epoch + 1, "loss": float(np.mean(losses)), **named})
            run.out.write_json(STATE, {"history": history, **_state(scales, optimizer)})
            advance(1)
    write_csv(run.out.path / "search.csv", pd.DataFrame(history))
    final = tuple(scales.tolist())
    scores = Scores(GeneticSearch(weights=search.weights), np.array(positions), answering(lm, task, examples))
    for candidate in dict.fromkeys(((1.0,) * lm.layers, final)):
        for start in range(0, len(examples), search.batch_size):
            batch = list(range(len(examples)))[start : start + search.batch_size]
            scores.add(candidate, batch, scores.answer(candidate, batch))
    source = (
        f"posbench {posbench.__version__} gradient baseline ({search.epochs} epochs of {search.samples}, learning rate "
        f"{search.learning_rate:g}, seed {search.seed}); run {run.out.path.name}"
    )
    parameters = {"points": None, "curve": "bezier", "x": "stretched", "scales": list(final)}
    write_text(run.out.path / "found.yaml", found_block(parameters, final, scores, source))
    (run.out.path / STATE).unlink(missing_ok=True)


def _state(scales: Tensor, optimizer: torch.optim.Adam) -> dict[str, object]:
    """Scales and Adam's moments; a float32 survives JSON to the bit."""
    moments = optimizer.state[scales]
    return {"scales": scales.tolist()} | {
        name: moments[name].tolist() for name in ("step", "exp_avg", "exp_avg_sq")
    }


def _restore(scales: Tensor, optimizer: torch.optim.Adam, state: dict[str, list[float]]) -> None:
    with torch.no_grad():
        scales.copy_(torch.tensor(state["scales"]))
    moments = {name: torch.tensor(state[name], device=scales.device) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[scales] = {"step": torch.tensor(state["step"]), **moments}
